//! The value head: it says what states are worth, by finite differences through the whole model, in any split, and is no part of what serves.

use crate::{
    common::{options, policy_gradient, prompt, rewarded, tiny, tiny_files, version},
    learning::{alike, shift},
};
use chela_core::{
    AdapterSpec, Checkpoint, EngineError, Learner, OptimParams, PolicyEngine, Sample, Scored,
    TokenLoss, Want, Weights,
};
use chela_engine::{
    EngineOptions, LocalEngine, LocalLearner,
    adapter::{bytes_of, floats, write_tensors},
};
use chela_kernels::Cpu;
use chela_model::{
    Family, Model,
    testing::{TinySpec, write_tiny_llama},
};
use futures_executor::block_on;
use std::path::Path;

fn spec(whole: bool) -> AdapterSpec {
    AdapterSpec {
        whole,
        rank: 4,
        alpha: 8.0,
        value_head: true,
        ..AdapterSpec::default()
    }
}

/// What this position is to be worth.
fn goal(i: usize) -> f32 {
    1.0 - 0.1 * (i % 7) as f32
}

/// ½ (V − R)² a token beside a policy gradient.
fn both(i: usize, sample: &Sample, scored: &Scored) -> TokenLoss {
    let values = scored.values.as_ref().unwrap().iter().enumerate();
    TokenLoss {
        d_values: Some(values.map(|(t, v)| v - goal(t)).collect()),
        ..policy_gradient(i, sample, scored)
    }
}

/// The same as a number.
fn loss(sample: &Sample, scored: &Scored) -> f64 {
    let values = scored.values.as_ref().unwrap().iter().enumerate();
    let values = values.map(|(t, v)| f64::from(v - goal(t)).powi(2) / 2.0);
    let terms = sample.advantages().iter().zip(&scored.logprobs);
    let policy = terms.map(|(a, l)| -f64::from(a * l) / sample.len() as f64);
    values.sum::<f64>() + policy.sum::<f64>()
}

fn steps(learner: &mut LocalLearner<Cpu>, batch: &[Sample], n: usize, lr: f32) {
    for _ in 0..n {
        learner.forward_backward(batch, &mut both).unwrap();
        let params = OptimParams {
            lr,
            weight_decay: 0.01,
            ..OptimParams::default()
        };
        assert!(!learner.optim_step(&params).unwrap().skipped);
    }
}

fn values(learner: &mut LocalLearner<Cpu>, batch: &[Sample]) -> Vec<Vec<f32>> {
    let scored = learner.forward(batch, Want::default()).unwrap();
    scored.into_iter().map(|s| s.values.unwrap()).collect()
}

fn file(checkpoint: &Checkpoint, name: &str) -> Vec<u8> {
    std::fs::read(checkpoint.dir.join(name)).unwrap()
}

/// Every tensor of a file less `step` times its gradient, into another folder.
fn moved(name: &str, gradients: &[(String, Vec<f32>)], step: f32, from: &Path, to: &Path) {
    let bytes = std::fs::read(from.join(name)).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensors = gradients.iter().map(|(name, gradient)| {
        let tensor = file.tensor(name).unwrap();
        let values = floats(&tensor).unwrap();
        let moved: Vec<f32> = values
            .iter()
            .zip(gradient)
            .map(|(v, g)| v - step * g)
            .collect();
        (name.clone(), tensor.shape().to_vec(), bytes_of(&moved))
    });
    write_tensors(&to.join(name), &tensors.collect::<Vec<_>>()).unwrap();
}

/// Along the gradient g, the loss must change by |g|² per unit of step.
#[test]
fn derivative_through_adapter_and_all_weights_by_finite_differences() {
    for whole in [false, true] {
        let home = tempfile::tempdir().unwrap();
        let files = tiny_files(&home.path().join("base"), 2);
        let engine = LocalEngine::open(&Model::open(&files).unwrap(), options()).unwrap();
        let mut learner = engine.learner(&spec(whole), None).unwrap();
        let batch = [rewarded(&prompt(30, 20), &[0.5; 10])];
        // Away from B = 0 and from a head of zeros, through which nothing flows.
        steps(&mut learner, &batch, 3, 1e-2);
        let scored = learner.forward(&batch, Want::default()).unwrap();
        let here = loss(&batch[0], &scored[0]);
        learner.forward_backward(&batch, &mut both).unwrap();
        let adapter = learner.gradients().unwrap().into_iter();
        let adapter: Vec<f32> = adapter.flat_map(|(_, _, a, b)| [a, b].concat()).collect();
        let full = learner.full_gradients().unwrap();
        let of_value = learner.value_gradients().unwrap();
        let all = full.iter().flat_map(|(_, g)| g);
        let all = all.chain(&adapter).chain(&of_value);
        let squared: f64 = all.map(|g| f64::from(*g).powi(2)).sum();
        let part: f64 = of_value.iter().map(|g| f64::from(*g).powi(2)).sum();
        assert!(
            part > 1e-3 * squared && part < 0.999 * squared,
            "{whole}: {part} of {squared}"
        );

        let saved = learner.save(&home.path().join("x")).unwrap();
        let step = (1e-3 / squared.sqrt()) as f32;
        let to = if whole {
            let to = home.path().join("shifted");
            std::fs::create_dir(&to).unwrap();
            for entry in std::fs::read_dir(&saved.dir).unwrap() {
                let entry = entry.unwrap();
                std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
            }
            std::fs::remove_file(to.join("optimizer.safetensors")).unwrap();
            let named = full.into_iter();
            let named = named.map(|(name, g)| (name.hugging_face(Family::Llama), g));
            let named: Vec<_> = named.collect();
            moved("model.safetensors", &named, step, &saved.dir, &to);
            to
        } else {
            shift(&saved, &learner, step, home.path())
        };
        let (weight, bias) = of_value.split_at(of_value.len() - 1);
        let named = [("weight", weight), ("bias", bias)].map(|(n, g)| (n.to_owned(), g.to_vec()));
        moved("value_head.safetensors", &named, step, &saved.dir, &to);
        drop(learner);
        let there = Checkpoint { dir: to, step: 3 };
        let mut there = engine.learner(&spec(whole), Some(&there)).unwrap();
        let scored = there.forward(&batch, Want::default()).unwrap();
        let measured = (here - loss(&batch[0], &scored[0])) / f64::from(step);
        let gap = measured / squared - 1.0;
        assert!(gap.abs() < 0.05, "{whole}: {measured} {squared}");
    }
}

#[test]
fn a_value_is_that_of_the_state_before_its_token_and_is_learnt() {
    let engine = tiny(1);
    let mut learner = engine.learner(&spec(false), None).unwrap();
    let text = prompt(11, 24);
    let batch = [rewarded(&text, &[0.0; 8])];
    assert_eq!(
        values(&mut learner, &batch),
        [[0.0; 8]],
        "it begins at zero"
    );
    steps(&mut learner, &batch, 150, 1e-2);
    let before = values(&mut learner, &batch).remove(0);
    for (t, v) in before.iter().enumerate() {
        assert!((v - goal(t)).abs() < 0.05, "{t}: {v} for {}", goal(t));
    }
    let changed = |at: usize| {
        let mut text = text.clone();
        text[at] += 40;
        rewarded(&text, &[0.0; 8])
    };
    let last = values(&mut learner, &[changed(23)]).remove(0);
    assert_eq!(last, before, "no value has seen the last token");
    let earlier = values(&mut learner, &[changed(22)]).remove(0);
    assert_eq!(earlier[..7], before[..7]);
    assert!(
        (earlier[7] - before[7]).abs() > 1e-3,
        "the last one has seen that before it"
    );
    let base = learner.forward_base(&batch, Want::default()).unwrap();
    assert!(base[0].values.is_none(), "the base model has no opinion");
}

#[test]
fn neither_split_nor_order_nor_what_samples_share_nor_a_walk_changes_anything() {
    for (family, window) in [
        (Family::Qwen3, None),
        (Family::Gemma3, Some(11)),
        (Family::Qwen3Moe, None),
    ] {
        let shape = TinySpec {
            family,
            sliding_window: window,
            ..TinySpec::default()
        };
        let dir = tempfile::tempdir().unwrap();
        let files = write_tiny_llama(dir.path(), 7, &shape).unwrap();
        let model = Model::open(&files).unwrap();
        let batch = alike();
        for whole in [false, true] {
            let run = |parts: &[&[Sample]], limited: Option<(usize, usize)>| {
                let mut options = options();
                if let Some((rows, bytes)) = limited {
                    (options.train_rows, options.activation_bytes) = (rows, bytes);
                }
                let engine = LocalEngine::open(&model, options).unwrap();
                let mut learner = engine.learner(&spec(whole), None)?;
                learner.forward(&batch, Want::default())?; // is there memory?
                steps(&mut learner, &batch[..1], 2, 1e-2);
                let before = learner.rows_read();
                let mut said = Vec::new();
                for part in parts {
                    let scored = learner.forward(part, Want::default())?;
                    said.extend(scored.into_iter().map(|s| s.values.unwrap()));
                    learner.forward_backward(part, &mut both)?;
                }
                let mut all = learner.value_gradients()?;
                let adapter = learner.gradients()?.into_iter();
                all.extend(adapter.flat_map(|(_, _, a, b)| [a, b].concat()));
                all.extend(learner.full_gradients()?.into_iter().flat_map(|(_, g)| g));
                let again = learner.rows_read().again - before.again;
                Ok::<_, EngineError>((said, all, again))
            };
            let apart: Vec<&[Sample]> = batch.chunks(1).collect();
            let (one_by_one, wanted, _) = run(&apart, None).unwrap();
            let norm = |v: &[f32]| v.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
            let same = |said: &[Vec<f32>], got: &[f32], what: &str| {
                assert_eq!(said.len(), one_by_one.len());
                for (a, b) in one_by_one.iter().flatten().zip(said.iter().flatten()) {
                    assert!((a - b).abs() < 1e-4, "{family:?} {what}: {a} {b}");
                }
                let gap: Vec<f32> = wanted.iter().zip(got).map(|(a, b)| a - b).collect();
                let gap = norm(&gap) / norm(&wanted);
                assert!(gap < 2e-5, "{family:?} {whole} {what}: {gap}");
            };
            let (said, together, again) = run(&[&batch], None).unwrap();
            assert_eq!(again, 0);
            same(&said, &together, "packed");
            let (said, got, _) = run(&[&batch[..3], &batch[3..]], None).unwrap();
            same(&said, &got, "in two parts");
            let mut turned = batch.clone();
            turned.reverse();
            let (_, got, _) = run(&[&turned], None).unwrap();
            assert!(
                got == together,
                "the order does not matter, not in the last bit"
            );
            let mut bytes = 1 << 12;
            let (said, got, again) = loop {
                bytes = bytes * 5 / 4;
                match run(&[&batch], Some((24, bytes))) {
                    Err(EngineError::Memory(_)) => {}
                    other => break other.unwrap(),
                }
            };
            assert!(again > 0, "it was walked");
            same(&said, &got, "walked");
        }
    }
}

#[test]
fn a_checkpoint_goes_on_bit_for_bit_and_what_serves_knows_nothing_of_it() {
    for whole in [false, true] {
        let home = tempfile::tempdir().unwrap();
        let files = tiny_files(&home.path().join("base"), 4);
        let named = EngineOptions {
            model_name: "tiny".to_owned(),
            ..options()
        };
        let engine = LocalEngine::open(&Model::open(&files).unwrap(), named).unwrap();
        let batch = [rewarded(&prompt(20, 24), &[1.0, -0.5, 0.25, 1.0])];
        let mut first = engine.learner(&spec(whole), None).unwrap();
        steps(&mut first, &batch, 3, 1e-2);
        let saved = first.save(&home.path().join("3")).unwrap();
        let mut second = engine.learner(&spec(whole), Some(&saved)).unwrap();
        assert_eq!(values(&mut first, &batch), values(&mut second, &batch));
        for learner in [&mut first, &mut second] {
            steps(learner, &batch, 3, 1e-2);
        }
        let a = first.save(&home.path().join("a")).unwrap();
        let b = second.save(&home.path().join("b")).unwrap();
        let weights = if whole {
            "model.safetensors"
        } else {
            "adapter_model.safetensors"
        };
        for name in [weights, "value_head.safetensors", "optimizer.safetensors"] {
            assert!(file(&a, name) == file(&b, name), "{whole} {name}");
            assert!(file(&a, name) != file(&saved, name), "{whole} {name}");
        }
        let names = file(&a, weights);
        let names = safetensors::SafeTensors::deserialize(&names).unwrap();
        assert!(names.names().iter().all(|n| n.starts_with("base_model.")
            || n.starts_with("model.")
            || *n == "lm_head.weight"));
        let hash = first.weights_hash().unwrap();
        let held = block_on(engine.load(version(1), Weights::Folder(a.dir.clone()))).unwrap();
        assert_eq!(held, hash);

        // With and without, either way.
        let without = AdapterSpec {
            value_head: false,
            ..spec(whole)
        };
        let mut plain = engine.learner(&without, Some(&a)).unwrap();
        assert_eq!(plain.weights_hash().unwrap(), hash);
        let scored = plain.forward(&batch, Want::default()).unwrap();
        assert!(scored[0].values.is_none());
        let with = first.forward(&batch, Want::default()).unwrap();
        assert_eq!(scored[0].logprobs, with[0].logprobs);
        let mut loss = |_: usize, s: &Sample, _: &Scored| TokenLoss {
            d_logprobs: vec![0.0; s.len()],
            d_values: Some(vec![1.0; s.len()]),
            ..TokenLoss::default()
        };
        let refused = plain.forward_backward(&batch, &mut loss).unwrap_err();
        assert!(matches!(refused, EngineError::Unsupported(_)), "{refused}");
        let c = plain.save(&home.path().join("c")).unwrap();
        assert!(!c.dir.join("value_head.safetensors").exists());
        let mut begun = engine.learner(&spec(whole), Some(&c)).unwrap();
        assert_eq!(values(&mut begun, &batch), [[0.0; 4]]);
        assert_eq!(begun.optim_step(&OptimParams::default()).unwrap().step, 7);
    }
}

#[test]
fn a_step_by_values_that_is_not_finite_changes_nothing() {
    let engine = tiny(5);
    let batch = [rewarded(&prompt(20, 20), &[1.0; 6])];
    let mut learner = engine.learner(&spec(false), None).unwrap();
    steps(&mut learner, &batch, 2, 1e-2);
    let dir = tempfile::tempdir().unwrap();
    let a = learner.save(&dir.path().join("a")).unwrap();
    let mut bad = |i: usize, s: &Sample, scored: &Scored| TokenLoss {
        d_values: Some(vec![f32::NAN; s.len()]),
        ..policy_gradient(i, s, scored)
    };
    learner.forward_backward(&batch, &mut bad).unwrap();
    let report = learner.optim_step(&OptimParams::default()).unwrap();
    assert!(report.skipped && report.step == 2);
    let b = learner.save(&dir.path().join("b")).unwrap();
    for name in [
        "adapter_model.safetensors",
        "value_head.safetensors",
        "optimizer.safetensors",
    ] {
        assert!(file(&a, name) == file(&b, name), "{name}");
    }
}
