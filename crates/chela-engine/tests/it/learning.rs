//! Learning: it must learn, by finite differences, in any split, and go on after a restart as if nothing had happened.

use crate::common::{options, policy_gradient, prompt, rewarded, score, tiny, version};
use chela_core::{
    AdapterSpec, Candidates, Checkpoint, EngineError, Learner, OptimParams, PolicyEngine,
    PolicyRef, Sample, Scored, TokenLoss, Want, Weights,
};
use chela_engine::{EngineOptions, LocalEngine, LocalLearner};
use chela_kernels::Cpu;
use chela_model::{
    Family, Model,
    testing::{TinySpec, write_tiny_llama},
};
use futures_executor::block_on;

fn spec() -> AdapterSpec {
    AdapterSpec {
        rank: 4,
        alpha: 8.0,
        ..AdapterSpec::default()
    }
}

fn steps(learner: &mut LocalLearner<Cpu>, batch: &[Sample], n: usize, lr: f32) {
    for _ in 0..n {
        learner
            .forward_backward(batch, &mut policy_gradient)
            .unwrap();
        let report = learner
            .optim_step(&OptimParams {
                lr,
                ..OptimParams::default()
            })
            .unwrap();
        assert!(!report.skipped);
    }
}

fn total(learner: &mut LocalLearner<Cpu>, batch: &[Sample]) -> f32 {
    let scored = learner.forward(batch, Want::default()).unwrap();
    scored.iter().flat_map(|s| &s.logprobs).sum()
}

fn learner(engine: &LocalEngine) -> LocalLearner<Cpu> {
    engine.learner(&spec(), None).unwrap()
}

#[test]
fn a_rewarded_reply_becomes_likelier_and_the_engine_serves_it() {
    let engine = tiny(1);
    let text: Vec<u32> = (20..40).collect();
    let batch = [rewarded(&text, &[1.0; 8])];
    let before = score(&engine, PolicyRef::Base, &text, 12).unwrap().logprobs;
    let mut learner = learner(&engine);
    let fresh = learner.forward(&batch, Want::default()).unwrap();
    for (a, b) in fresh[0].logprobs.iter().zip(&before) {
        assert!((a - b).abs() < 1e-4, "a fresh adapter is the base model");
    }
    steps(&mut learner, &batch, 10, 1e-2);
    let now: f32 = total(&mut learner, &batch);
    assert!(now > before.iter().sum::<f32>() + 1.0, "{now}");
    let base = learner.forward_base(&batch, Want::default()).unwrap();
    assert_eq!(base, fresh, "what it has learnt does not reach the base");
    assert_eq!(total(&mut learner, &batch), now, "and is still there");
    let dir = tempfile::tempdir().unwrap();
    let saved = learner.save(&dir.path().join("v1")).unwrap();
    block_on(engine.load(version(1), Weights::Folder(saved.dir))).unwrap();
    let served = score(&engine, PolicyRef::Version(version(1)), &text, 12).unwrap();
    let gap = (served.logprobs.iter().sum::<f32>() - now).abs();
    assert!(gap < 1e-3, "served weights are the trained ones: {gap}");
}

#[test]
fn derivative_of_a_step_by_finite_differences() {
    // Along the gradient g, the loss must change by |g|² per unit of step; with candidates, entropy and temperature in it.
    let engine = tiny(2);
    let tokens: Vec<u32> = (30..50).collect();
    let named = Candidates::new((0..30).map(|i| (i * 7) % 200).collect(), 3).unwrap();
    let base = rewarded(&tokens, &[0.5; 10])
        .with_candidates(named)
        .unwrap();
    let weight = |i: usize| ((i * 37 % 11) as f32 - 5.0) / 10.0;
    let loss = |scored: &Scored| -> f64 {
        let logprobs = scored
            .logprobs
            .iter()
            .enumerate()
            .map(|(i, l)| f64::from(weight(i) * l));
        let entropy = scored
            .entropy
            .as_ref()
            .unwrap()
            .iter()
            .map(|e| f64::from(0.3 * e));
        logprobs.sum::<f64>() + entropy.sum::<f64>()
    };
    let mut derivative = |_: usize, s: &Sample, _: &Scored| TokenLoss {
        d_logprobs: (0..s.len() * 3).map(weight).collect(),
        d_entropy: Some(vec![0.3; s.len()]),
        d_values: None,
    };
    let mut learner = learner(&engine);
    steps(&mut learner, &[rewarded(&tokens, &[1.0; 10])], 2, 5e-2); // leave B = 0
    let batch = [base];
    let want = || Want {
        entropy: true,
        ..Want::default()
    };
    let here = loss(&learner.forward(&batch, want()).unwrap()[0]);
    learner.forward_backward(&batch, &mut derivative).unwrap();
    let squared: f64 = learner
        .gradients()
        .unwrap()
        .iter()
        .flat_map(|(_, _, a, b)| a.iter().chain(b))
        .map(|g| f64::from(*g).powi(2))
        .sum();
    let dir = tempfile::tempdir().unwrap();
    let saved = learner.save(&dir.path().join("x")).unwrap();
    let step = 1e-3 / squared.sqrt();
    let shifted = shift(&saved, &learner, step as f32, dir.path());
    let policy = PolicyRef::Version(version(2));
    block_on(engine.load(version(2), Weights::Folder(shifted))).unwrap();
    let want = Want {
        candidates: batch[0].candidates().cloned(),
        ..want()
    };
    let prompt = chela_core::Prompt { tokens };
    let there = loss(&block_on(engine.score(policy, prompt, 10, want)).unwrap());
    let measured = (here - there) / step;
    assert!(
        (measured / squared - 1.0).abs() < 0.05,
        "{measured} {squared}"
    );
}

/// The adapter of `saved` minus `step` times the learner's gradient, written as PEFT.
pub fn shift(
    saved: &Checkpoint,
    learner: &LocalLearner<Cpu>,
    step: f32,
    dir: &std::path::Path,
) -> std::path::PathBuf {
    let to = dir.join("shifted");
    std::fs::create_dir(&to).unwrap();
    let config = "adapter_config.json";
    std::fs::copy(saved.dir.join(config), to.join(config)).unwrap();
    let bytes = std::fs::read(saved.dir.join("adapter_model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors = Vec::new();
    for (layer, module, a, b) in learner.gradients().unwrap() {
        let block = if "qkvo".contains(&module[..1]) {
            "self_attn"
        } else {
            "mlp"
        };
        for (which, gradient) in [("A", a), ("B", b)] {
            let name = format!(
                "base_model.model.model.layers.{layer}.{block}.{module}.lora_{which}.weight"
            );
            let tensor = file.tensor(&name).unwrap();
            let values = chela_engine::adapter::floats(&tensor).unwrap();
            let moved: Vec<f32> = values
                .iter()
                .zip(&gradient)
                .map(|(v, g)| v - step * g)
                .collect();
            tensors.push((
                name,
                tensor.shape().to_vec(),
                chela_engine::adapter::bytes_of(&moved),
            ));
        }
    }
    chela_engine::adapter::write_tensors(&to.join("adapter_model.safetensors"), &tensors).unwrap();
    to
}

#[test]
fn the_update_does_not_depend_on_split_or_order() {
    let engine = tiny(3);
    let texts: Vec<Vec<u32>> = (0..5u32)
        .map(|i| (10 + i..20 + 4 * i).map(|t| (t * 3) % 250).collect())
        .collect();
    let batch: Vec<Sample> = texts
        .iter()
        .enumerate()
        .map(|(i, t)| rewarded(t, &[0.3 * (i as f32 - 2.0); 5]))
        .collect();
    let gradients = |order: &[&[usize]]| {
        let mut learner = learner(&engine);
        steps(&mut learner, &batch[..1], 1, 1e-2);
        for part in order {
            let part: Vec<Sample> = part.iter().map(|i| batch[*i].clone()).collect();
            learner
                .forward_backward(&part, &mut policy_gradient)
                .unwrap();
        }
        let all = learner.gradients().unwrap();
        all.into_iter()
            .flat_map(|(_, _, a, b)| [a, b])
            .flatten()
            .collect::<Vec<f32>>()
    };
    let whole = gradients(&[&[0, 1, 2, 3, 4]]);
    let norm = whole.iter().map(|g| g * g).sum::<f32>().sqrt();
    for split in [
        &[&[0usize, 1][..], &[2, 3, 4]][..],
        &[&[4, 3, 2, 1, 0]],
        &[&[2], &[0, 4], &[1, 3]],
    ] {
        let other = gradients(split);
        let gap = whole
            .iter()
            .zip(&other)
            .map(|(a, b)| (a - b).powi(2))
            .sum::<f32>()
            .sqrt();
        assert!(gap < 1e-4 * norm, "{gap} of {norm}");
    }
}

/// Texts that begin alike in every way: equal, one the beginning of another, apart from the first token on, apart at a branch of a
/// branch; with other starts, so that a shared row is scored for one and not for the other.
pub fn alike() -> Vec<Sample> {
    let head = prompt(3, 40);
    let text = |parts: &[&[u32]]| parts.concat();
    let branch = text(&[&head, &prompt(90, 12)]);
    [
        text(&[&head, &prompt(60, 9)]),
        text(&[&head, &prompt(60, 9)]),
        text(&[&head, &prompt(60, 9), &prompt(5, 7)]),
        text(&[&branch, &prompt(1, 6)]),
        text(&[&branch, &prompt(2, 8)]),
        head[..20].to_vec(),
        prompt(4, 25),
        prompt(150, 3),
    ]
    .iter()
    .enumerate()
    .map(|(i, t)| rewarded(t, &vec![0.4 * (i as f32 - 3.2); 1 + i.min(t.len() - 2)]))
    .collect()
}

#[test]
fn what_samples_share_is_read_once_and_changes_nothing() {
    for (family, window, seed) in [
        (Family::Qwen3, None, 7),
        (Family::Qwen3, None, 12),
        (Family::Qwen3, Some(11), 8),
        (Family::Gemma3, Some(11), 7),
        (Family::Qwen3Moe, None, 7),
        (Family::Qwen3Moe, Some(11), 9),
    ] {
        let spec_of = TinySpec {
            family,
            sliding_window: window,
            ..TinySpec::default()
        };
        let dir = tempfile::tempdir().unwrap();
        let files = write_tiny_llama(dir.path(), seed, &spec_of).unwrap();
        let engine = LocalEngine::open(&Model::open(&files).unwrap(), options()).unwrap();
        let batch = alike();
        let gradients = |parts: &[&[Sample]]| {
            let mut learner = learner(&engine);
            steps(&mut learner, &batch[..1], 2, 1e-2);
            let mut scored = Vec::new();
            for part in parts {
                scored.extend(learner.forward(part, Want::default()).unwrap());
                learner
                    .forward_backward(part, &mut policy_gradient)
                    .unwrap();
            }
            let all = learner.gradients().unwrap();
            let all: Vec<f32> = all
                .into_iter()
                .flat_map(|(_, _, a, b)| [a, b])
                .flatten()
                .collect();
            (scored, all)
        };
        let apart: Vec<&[Sample]> = batch.chunks(1).collect();
        let (one_by_one, wanted) = gradients(&apart);
        let (together, got) = gradients(&[&batch]);
        for (a, b) in one_by_one.iter().zip(&together) {
            assert_eq!(a.logprobs.len(), b.logprobs.len());
            let gap = a.logprobs.iter().zip(&b.logprobs).map(|(a, b)| a - b);
            assert!(gap.into_iter().all(|g| g.abs() < 1e-4), "{a:?} {b:?}");
        }
        let norm = |v: &[f32]| v.iter().map(|g| g * g).sum::<f32>().sqrt();
        let gap: Vec<f32> = wanted.iter().zip(&got).map(|(a, b)| a - b).collect();
        assert!(norm(&gap) < 1e-5 * norm(&wanted), "{family:?} {window:?}");
        let mut shuffled = batch.clone();
        shuffled.reverse();
        let again = gradients(&[&shuffled]).1;
        let odd = again.iter().zip(&got).filter(|(a, b)| a != b).count();
        assert_eq!(
            odd, 0,
            "{family:?} {window:?}: the order of a batch does not matter, not in the last bit"
        );
    }
}

/// A trie that does not fit is walked through; a text alone too. Neither changes what is learnt, whatever there is room for.
#[test]
fn a_walk_through_what_does_not_fit_changes_nothing() {
    let long = |from: u32| rewarded(&prompt(from, 150), &[0.5, -1.0, 0.25, 1.0, 2.0]);
    for (family, window) in [
        (Family::Qwen3, None),
        (Family::Qwen3, Some(11)),
        (Family::Gemma3, Some(11)),
        (Family::Qwen3Moe, None),
    ] {
        let spec_of = TinySpec {
            family,
            sliding_window: window,
            ..TinySpec::default()
        };
        let dir = tempfile::tempdir().unwrap();
        let files = write_tiny_llama(dir.path(), 7, &spec_of).unwrap();
        let model = Model::open(&files).unwrap();
        let mut batch = alike();
        // More rows on the branches below a short path than any path is long.
        let bush = |i: u32| {
            rewarded(
                &[&prompt(40, 25)[..], &prompt(7 * i, 9)].concat(),
                &[0.5; 4],
            )
        };
        batch.extend((0..20).map(bush));
        batch.extend([long(3), long(77)]);
        let learnt = |train_rows, activation_bytes, recompute| {
            let options = EngineOptions {
                train_rows,
                activation_bytes,
                recompute,
                ..options()
            };
            let engine = LocalEngine::open(&model, options).unwrap();
            let mut learner = learner(&engine);
            learner.forward(&batch, Want::default())?;
            steps(&mut learner, &batch[..1], 1, 1e-2);
            let before = learner.rows_read();
            let scored = learner.forward(&batch, Want::default())?;
            let mut asked = Vec::new();
            let mut loss = |i: usize, sample: &Sample, scored: &Scored| {
                asked.push(i);
                policy_gradient(i, sample, scored)
            };
            learner.forward_backward(&batch, &mut loss)?;
            asked.sort_unstable();
            assert_eq!(asked, (0..batch.len()).collect::<Vec<_>>());
            let all = learner.gradients()?;
            let all = all.into_iter().flat_map(|(_, _, a, b)| [a, b]);
            let again = learner.rows_read().again - before.again;
            Ok((scored, all.flatten().collect::<Vec<f32>>(), again))
        };
        let (scored, wanted, again) = learnt(768, 0, false).unwrap();
        assert_eq!(again, 0, "it fits");
        let norm = |v: &[f32]| v.iter().map(|g| g * g).sum::<f32>().sqrt();
        for (rows, recompute) in [(24, false), (64, false), (7, false), (24, true)] {
            // From just enough for the longest path to enough for some steps on it to stay.
            let (mut bytes, mut most) = (1 << 12, 0);
            for _ in 0..3 {
                let (walked, got, again) = loop {
                    bytes = bytes * 5 / 4;
                    match learnt(rows, bytes, recompute) {
                        Err(EngineError::Memory(_)) => {}
                        other => break other.unwrap(),
                    }
                };
                most = most.max(again);
                for (a, b) in scored.iter().zip(&walked) {
                    let gap = a.logprobs.iter().zip(&b.logprobs).map(|(a, b)| a - b);
                    assert!(gap.into_iter().all(|g| g.abs() < 1e-4), "{a:?} {b:?}");
                }
                let gap: Vec<f32> = wanted.iter().zip(&got).map(|(a, b)| a - b).collect();
                let gap = norm(&gap) / norm(&wanted);
                assert!(gap < 2e-5, "{family:?} {window:?} {rows} {bytes}: {gap}");
            }
            assert!(most > 60, "no room, and yet little was read again: {most}");
        }
    }
}

#[test]
fn a_reopened_checkpoint_goes_on_bit_for_bit() {
    let engine = tiny(4);
    let batch = [rewarded(
        &(20..44).collect::<Vec<u32>>(),
        &[1.0, -0.5, 0.25, 1.0],
    )];
    let mut first = learner(&engine);
    steps(&mut first, &batch, 3, 1e-2);
    let dir = tempfile::tempdir().unwrap();
    let saved = first.save(&dir.path().join("a/b")).unwrap();
    assert_eq!(saved.step, 3);
    assert!(
        first.save(&dir.path().join("a/b")).is_err(),
        "never overwritten"
    );
    let mut second = engine.learner(&spec(), Some(&saved)).unwrap();
    for _ in 0..3 {
        steps(&mut first, &batch, 1, 1e-2);
        steps(&mut second, &batch, 1, 1e-2);
    }
    let a = first.save(&dir.path().join("first")).unwrap();
    let b = second.save(&dir.path().join("second")).unwrap();
    for file in [
        "adapter_model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ] {
        let read = |c: &Checkpoint| std::fs::read(c.dir.join(file)).unwrap();
        assert!(read(&a) == read(&b), "{file}");
    }
}

#[test]
fn a_step_that_is_not_finite_changes_nothing() {
    let engine = tiny(5);
    let batch = [rewarded(&(20..40).collect::<Vec<u32>>(), &[1.0; 6])];
    let mut learner = learner(&engine);
    steps(&mut learner, &batch, 2, 1e-2);
    let dir = tempfile::tempdir().unwrap();
    let a = learner.save(&dir.path().join("a")).unwrap();
    for bad in [f32::NAN, f32::INFINITY] {
        learner
            .forward_backward(&batch, &mut |_, s, _| TokenLoss {
                d_logprobs: vec![bad; s.len()],
                ..TokenLoss::default()
            })
            .unwrap();
        let report = learner.optim_step(&OptimParams::default()).unwrap();
        assert!(report.skipped && report.step == 2);
    }
    let b = learner.save(&dir.path().join("b")).unwrap();
    for file in [
        "adapter_model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ] {
        let read = |c: &Checkpoint| std::fs::read(c.dir.join(file)).unwrap();
        assert!(read(&a) == read(&b), "{file}");
    }
    steps(&mut learner, &batch, 1, 1e-2);
}
