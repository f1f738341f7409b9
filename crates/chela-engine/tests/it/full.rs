//! Training all weights: gradients against transformers, optimizer, checkpoints, serving beside adapters, refusals.

use crate::{
    common::{
        begin, collect, golden_model, greedy, ids, options, policy_gradient, prompt, rewarded,
        score, tiny_files, trained, version,
    },
    golden::{NAMES, numbers, root, token_ids},
    starter::starter,
};
use chela_core::{
    AdapterSpec, Checkpoint, EngineError, Learner, OptimParams, PolicyEngine, PolicyRef, Sample,
    Scored, Want, Weights,
};
use chela_engine::{
    EngineOptions, LocalEngine, LocalLearner,
    merge::{Form, merge},
};
use chela_kernels::Cpu;
use chela_model::{
    DType, Edit, Family, LayerTensor, Layout, Model, ModelFiles, NoProgress, TensorName, testing,
    write_folder,
};
use futures_executor::block_on;
use serde_json::Value;
use std::{path::Path, sync::Arc, time::Instant};

fn whole() -> AdapterSpec {
    AdapterSpec {
        whole: true,
        ..AdapterSpec::default()
    }
}

fn steps(learner: &mut LocalLearner<Cpu>, batch: &[Sample], n: usize) {
    for _ in 0..n {
        let added = learner.forward_backward(batch, &mut policy_gradient);
        added.unwrap();
        let params = OptimParams {
            lr: 1e-3,
            weight_decay: 0.01,
            ..OptimParams::default()
        };
        assert!(!learner.optim_step(&params).unwrap().skipped);
    }
}

fn logprobs(learner: &mut LocalLearner<Cpu>, batch: &[Sample]) -> Vec<f32> {
    let scored = learner.forward(batch, Want::default()).unwrap();
    scored.into_iter().flat_map(|s| s.logprobs).collect()
}

/// A model whose files stay.
fn opened(dir: &Path, seed: u64) -> Arc<LocalEngine> {
    LocalEngine::open(&Model::open(&tiny_files(dir, seed)).unwrap(), options()).unwrap()
}

fn batch() -> [Sample; 2] {
    [
        rewarded(&prompt(5, 20), &[1.0; 8]),
        rewarded(&prompt(90, 31), &[-0.5; 12]),
    ]
}

fn norm(values: &[f32]) -> f64 {
    let squares = values.iter().map(|v| f64::from(*v).powi(2));
    squares.sum::<f64>().sqrt()
}

/// The same numbers in transformers' order: one tensor for gate and up of all experts.
fn as_in_transformers(
    all: &[(TensorName, Vec<f32>)],
    family: Family,
    experts: usize,
) -> Vec<(String, Vec<f32>)> {
    let mut named = Vec::new();
    for (i, (name, values)) in all.iter().enumerate() {
        let TensorName::Layer(layer, tensor) = *name else {
            named.push((name.hugging_face(family), values.clone()));
            continue;
        };
        let of = |what: &str| format!("model.layers.{layer}.mlp.experts.{what}");
        match tensor {
            LayerTensor::ExpertGates => {
                let (ups, size) = (&all[i + 1].1, values.len() / experts);
                assert_eq!(
                    all[i + 1].0,
                    TensorName::Layer(layer, LayerTensor::ExpertUps)
                );
                let both = values.chunks(size).zip(ups.chunks(size));
                let both = both.flat_map(|(gate, up)| [gate, up].concat()).collect();
                named.push((of("gate_up_proj"), both));
            }
            LayerTensor::ExpertUps => {}
            LayerTensor::ExpertDowns => named.push((of("down_proj"), values.clone())),
            _ => named.push((name.hugging_face(family), values.clone())),
        }
    }
    named
}

/// How activations are held.
#[derive(Clone, Copy, PartialEq)]
enum Held {
    Kept,
    Recomputed,
    /// As few as will do for a walk in steps of some rows.
    Walked,
}

fn check_gradients(name: &str, held: Held) {
    let model = golden_model(&root().join(name));
    let text = std::fs::read_to_string(root().join(format!("{name}.json"))).unwrap();
    let golden: Value = serde_json::from_str(&text).unwrap();
    let advantages = numbers(&golden["advantages"]);
    let sample = rewarded(&token_ids(&golden["texts"][1]["ids"]), &advantages);
    let mut engine = LocalEngine::open(&model, options()).unwrap();
    if held != Held::Kept {
        let mut limited = EngineOptions {
            recompute: held == Held::Recomputed,
            ..options()
        };
        if held == Held::Walked {
            (limited.train_rows, limited.activation_bytes) = (16, 1 << 12);
        }
        engine = loop {
            let engine = LocalEngine::open(&model, limited.clone()).unwrap();
            let mut learner = engine.learner(&whole(), None).unwrap();
            let batch = std::slice::from_ref(&sample);
            match learner.forward(batch, Want::default()) {
                Err(EngineError::Memory(_)) => {
                    limited.activation_bytes += limited.activation_bytes / 4
                }
                other => break other.map(|_| engine.clone()).unwrap(),
            }
        };
    }
    let mut learner = engine.learner(&whole(), None).unwrap();
    let mut loss = 0.0;
    learner
        .forward_backward(std::slice::from_ref(&sample), &mut |i, s, scored| {
            let terms = scored.logprobs.iter().zip(s.advantages());
            loss = terms.map(|(l, a)| -l * a).sum::<f32>() / advantages.len() as f32;
            policy_gradient(i, s, scored)
        })
        .unwrap();
    assert_eq!(
        learner.rows_read().again > 0,
        held == Held::Walked,
        "{name}"
    );
    let want = golden["full_loss"].as_f64().unwrap();
    assert!((f64::from(loss) - want).abs() < 1e-4, "{name}: {loss}");
    let bytes = std::fs::read(root().join(format!("{name}.full_gradients.safetensors"))).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut whole_ones = file.names().len();
    let all = learner.full_gradients().unwrap();
    let experts = model.config().experts.map_or(1, |e| e.count);
    let all = as_in_transformers(&all, model.config().family, experts);
    let expected = golden["full_gradients"].as_object().unwrap();
    assert_eq!(all.len(), expected.len(), "{name}");
    for (tensor, got) in all {
        let about = &expected[&tensor];
        let size = about["norm"].as_f64().unwrap();
        let gap = (norm(&got) / size - 1.0).abs();
        assert!(gap < 1e-4, "{name} {tensor}: norm {gap}");
        // Of four numbers that may be small, by the size of an average one.
        let usual = size / (got.len() as f64).sqrt();
        for (got, want) in got.iter().zip(numbers(&about["first"])) {
            let gap = f64::from((got - want).abs()) / usual.max(f64::from(want.abs()));
            assert!(gap < 1e-4, "{name} {tensor}: {got} {want}");
        }
        if let Ok(want) = file.tensor(&tensor) {
            let want = want.data().chunks_exact(4);
            let want = want.map(|c| f32::from_le_bytes(c.try_into().unwrap()));
            let gap: Vec<f32> = got.iter().zip(want).map(|(a, b)| a - b).collect();
            assert_eq!(gap.len(), got.len());
            let gap = norm(&gap) / size;
            assert!(gap < 1e-4, "{name} {tensor}: {gap}");
            whole_ones -= 1;
        }
    }
    assert_eq!(whole_ones, 0, "{name}");
}

#[test]
fn gradients_of_all_weights_equal_transformers() {
    NAMES
        .iter()
        .for_each(|name| check_gradients(name, Held::Kept));
}

#[test]
fn recomputed_layers_and_walks_give_the_same_gradients() {
    for name in [
        "qwen2-untied",
        "qwen3-tied",
        "gemma3-tied",
        "qwen3moe-plain",
    ] {
        check_gradients(name, Held::Recomputed);
        check_gradients(name, Held::Walked);
    }
}

#[test]
fn steps_learn_and_the_engine_serves_exactly_what_was_trained() {
    for kind in [
        Family::Llama,
        Family::Qwen2,
        Family::Gemma3,
        Family::Qwen3Moe,
    ] {
        let home = tempfile::tempdir().unwrap();
        let spec = testing::TinySpec::of(kind);
        let files = testing::write_tiny_llama(&home.path().join("base"), 4, &spec).unwrap();
        let engine = LocalEngine::open(&Model::open(&files).unwrap(), options()).unwrap();
        let (mut learner, batch) = (engine.learner(&whole(), None).unwrap(), batch());
        let before = logprobs(&mut learner, &batch);
        let base = learner.forward_base(&batch, Want::default()).unwrap();
        assert_eq!(
            base.concat_logprobs(),
            before,
            "it begins as the base model"
        );
        steps(&mut learner, &batch, 5);
        let after = logprobs(&mut learner, &batch);
        let sum = |of: &[f32]| of[..8].iter().sum::<f32>() - of[8..].iter().sum::<f32>();
        assert!(sum(&after) > sum(&before) + 1.0, "{kind:?}");
        let again = learner.forward_base(&batch, Want::default()).unwrap();
        assert_eq!(again.concat_logprobs(), before, "the base model stays");

        let dir = home.path().join("1");
        let saved = learner.save(&dir).unwrap();
        let held = block_on(engine.load(version(1), Weights::Folder(saved.dir))).unwrap();
        assert_eq!(held, learner.weights_hash().unwrap(), "{kind:?}");
        let tokens = batch[0].tokens();
        let policy = PolicyRef::Version(version(1));
        let served = score(&engine, policy, tokens, 12).unwrap().logprobs;
        let gap = served.iter().zip(&after).map(|(a, b)| (a - b).abs());
        assert!(gap.fold(0.0, f32::max) < 2e-4, "{kind:?}");

        // The folder is a model of its own.
        let layout = Layout::Folder(dir.clone());
        let name = "trained".to_owned();
        let model = Model::open(&ModelFiles { name, layout }).unwrap();
        assert_eq!(
            model.tokenizer_hash().unwrap(),
            engine.info().tokenizer_hash
        );
        let alone = LocalEngine::open(&model, options()).unwrap();
        let scored = score(&alone, PolicyRef::Base, tokens, 12).unwrap();
        assert_eq!(scored.logprobs, served, "{kind:?}");
    }
}

/// Whatever the base model was read from, and whatever is written.
#[test]
fn a_whole_version_is_exported_as_the_model_it_is() {
    let home = tempfile::tempdir().unwrap();
    let spec = testing::TinySpec::of(Family::Qwen3Moe);
    let folder = testing::write_tiny_llama(&home.path().join("base"), 4, &spec).unwrap();
    let gguf = testing::write_tiny_gguf(&home.path().join("gguf"), 4, &spec).unwrap();
    let batch = batch();
    for (files, what) in [(folder, "folder"), (gguf, "gguf")] {
        let model = Model::open(&files).unwrap();
        let engine = LocalEngine::open(&model, options()).unwrap();
        let mut learner = engine.learner(&whole(), None).unwrap();
        steps(&mut learner, &batch, 3);
        let saved = learner
            .save(&home.path().join(format!("{what}-1")))
            .unwrap();
        let trained = logprobs(&mut learner, &batch[..1]);
        for (form, end) in [(Form::Folder, "hf"), (Form::Gguf, "gguf")] {
            let to = home.path().join(format!("{what}.{end}"));
            let form = (form, Some(DType::F32));
            let merged = merge(&model, &saved.dir, form, &to, &mut NoProgress).unwrap();
            assert!(merged.adapter.is_none());
            assert_eq!(merged.maps, model.config().tensor_names().len());
            let layout = match form.0 {
                Form::Folder => Layout::Folder(to),
                Form::Gguf => Layout::Gguf(to),
            };
            let name = "exported".to_owned();
            let written = Model::open(&ModelFiles { name, layout }).unwrap();
            let alone = LocalEngine::open(&written, options()).unwrap();
            let scored = score(&alone, PolicyRef::Base, batch[0].tokens(), 12).unwrap();
            let gap = scored
                .logprobs
                .iter()
                .zip(&trained)
                .map(|(a, b)| (a - b).abs());
            assert!(gap.fold(0.0, f32::max) < 2e-4, "{what} as {end}");
        }
    }
}

trait Logprobs {
    fn concat_logprobs(&self) -> Vec<f32>;
}

impl Logprobs for Vec<Scored> {
    fn concat_logprobs(&self) -> Vec<f32> {
        self.iter().flat_map(|s| s.logprobs.clone()).collect()
    }
}

#[test]
fn a_checkpoint_goes_on_bit_for_bit() {
    let home = tempfile::tempdir().unwrap();
    let engine = opened(&home.path().join("base"), 2);
    let batch = batch();
    let mut through = engine.learner(&whole(), None).unwrap();
    steps(&mut through, &batch, 2);
    let saved = through.save(&home.path().join("2")).unwrap();
    assert_eq!(saved.step, 2);
    steps(&mut through, &batch, 2);
    let mut resumed = engine.learner(&whole(), Some(&saved)).unwrap();
    steps(&mut resumed, &batch, 2);
    assert_eq!(
        resumed.weights_hash().unwrap(),
        through.weights_hash().unwrap()
    );
    assert_eq!(
        logprobs(&mut resumed, &batch),
        logprobs(&mut through, &batch)
    );
    let report = resumed.optim_step(&OptimParams::default()).unwrap();
    assert_eq!(report.step, 5);
    assert!(
        through.save(&home.path().join("2")).is_err(),
        "never over another"
    );
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let home = tempfile::tempdir().unwrap();
    let files = tiny_files(home.path(), 6);
    let hash = |threads: usize| {
        let options = EngineOptions {
            threads,
            ..options()
        };
        let engine = LocalEngine::open(&Model::open(&files).unwrap(), options).unwrap();
        let mut learner = engine.learner(&whole(), None).unwrap();
        steps(&mut learner, &batch(), 2);
        learner.weights_hash().unwrap()
    };
    assert_eq!(hash(1), hash(3));
}

#[test]
fn base_adapter_and_whole_models_are_decoded_together() {
    let home = tempfile::tempdir().unwrap();
    let engine = opened(&home.path().join("base"), 3);
    let mut learner = engine.learner(&whole(), None).unwrap();
    for number in [1, 4] {
        steps(&mut learner, &batch(), 3);
        let saved = learner.save(&home.path().join(number.to_string())).unwrap();
        block_on(engine.load(version(number), Weights::Folder(saved.dir))).unwrap();
    }
    for number in [2, 3] {
        let weights = trained(&engine, home.path(), number);
        block_on(engine.load(version(number), weights)).unwrap();
    }
    let policy = |number| match number {
        0 => PolicyRef::Base,
        number => PolicyRef::Version(version(number)),
    };
    let start = |number: u64| {
        let tokens = prompt(40, 9 + number as u32);
        begin(&engine, policy(number), &tokens, greedy(24)).unwrap()
    };
    let order = [1, 0, 2, 4, 3, 0, 1];
    let alone: Vec<_> = order.iter().map(|n| ids(&collect(start(*n)))).collect();
    let streams: Vec<_> = order.iter().map(|n| start(*n)).collect();
    for ((number, alone), stream) in order.iter().zip(&alone).zip(streams) {
        let together = collect(stream);
        assert_eq!(ids(&together), *alone, "version {number}");
        // What is said is scored alike, token by token.
        let text = [&prompt(40, 9 + *number as u32)[..], alone].concat();
        let from = text.len() - alone.len();
        let scored = score(&engine, policy(*number), &text, from).unwrap();
        for (token, scored) in together.iter().zip(scored.logprobs) {
            assert!((token.logprob_t1 - scored).abs() < 2e-4, "version {number}");
        }
    }
    assert_ne!(alone[0], alone[1], "they differ at all");
    // A reply keeps the version it began with, also when that is let go of.
    let running = start(4);
    engine.unload(&version(4));
    assert_eq!(ids(&collect(running)), alone[3]);
}

#[test]
fn all_weights_go_on_from_an_adapter_and_not_the_other_way_round() {
    let home = tempfile::tempdir().unwrap();
    let engine = opened(&home.path().join("base"), 5);
    let Weights::Folder(dir) = trained(&engine, home.path(), 1);
    let from = Checkpoint { dir, step: 3 };
    let batch = batch();
    let mut adapter = engine
        .learner(&AdapterSpec::default(), Some(&from))
        .unwrap();
    let mut merged = engine.learner(&whole(), Some(&from)).unwrap();
    let (a, b) = (
        logprobs(&mut adapter, &batch),
        logprobs(&mut merged, &batch),
    );
    assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-4));
    let base = merged.forward_base(&batch, Want::default()).unwrap();
    assert_ne!(base.concat_logprobs(), b);
    let report = merged.optim_step(&OptimParams::default()).unwrap();
    assert_eq!(report.step, 1, "moments begin anew");

    let saved = merged.save(&home.path().join("2")).unwrap();
    let refused = engine.learner(&AdapterSpec::default(), Some(&saved));
    let says = refused.err().unwrap().to_string();
    assert!(says.contains("learning.weights = \"full\""), "{says}");
}

#[test]
fn what_cannot_be_trained_or_served_is_refused_with_what_to_do() {
    let home = tempfile::tempdir().unwrap();
    // A quantised base model.
    let spec = testing::TinySpec {
        dtype: DType::Q8_0,
        ..testing::TinySpec::default()
    };
    let files = testing::write_tiny_gguf(&home.path().join("q"), 1, &spec).unwrap();
    let model = Model::open(&files).unwrap();
    let engine = LocalEngine::open(&model, options()).unwrap();
    let late = engine.learner(&whole(), None).err().unwrap();
    let told = EngineOptions {
        train_whole: true,
        ..options()
    };
    let early = LocalEngine::open(&model, told).err().unwrap();
    for says in [late.to_string(), early.to_string()] {
        assert!(
            says.contains("F32, F16 or BF16") && says.contains("learning.weights = \"lora\""),
            "{says}"
        );
    }

    // Another model's weights.
    let engine = opened(&home.path().join("base"), 5);
    let other = home.path().join("other");
    let spec = testing::TinySpec::of(Family::Qwen3);
    testing::write_tiny_llama(&other, 1, &spec).unwrap();
    let load = block_on(engine.load(version(1), Weights::Folder(other)));
    let says = load.unwrap_err().to_string();
    assert!(says.contains("trained from another model"), "{says}");

    // Damage after publishing.
    let learner = engine.learner(&whole(), None).unwrap();
    let saved = learner.save(&home.path().join("1")).unwrap();
    let hash = learner.weights_hash().unwrap();
    let path = saved.dir.join(Weights::MODEL);
    let mut bytes = std::fs::read(&path).unwrap();
    let at = bytes.len() - 3;
    bytes[at] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    engine.register(version(1), Weights::Folder(saved.dir), Some(hash));
    let policy = PolicyRef::Version(version(1));
    let says = score(&engine, policy, &[1, 2, 3], 1).unwrap_err();
    assert!(says.to_string().contains("changed or damaged"), "{says}");
}

struct Untouched;

impl Edit for Untouched {
    fn touches(&self, _: TensorName) -> bool {
        false
    }

    fn apply(&mut self, _: TensorName, _: [usize; 2], _: &mut [f32]) -> Result<(), String> {
        Ok(())
    }
}

/// Real sizes: both methods learn the same text, and the engine holds what was trained. Prints times and memory.
#[test]
#[ignore = "needs the starter model; writes 2.5 GB"]
fn measured_all_weights_of_a_real_model() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("bf16");
    let starter = Model::open(&starter()).unwrap();
    let to = Some(DType::BF16);
    write_folder(&starter, &dir, to, &mut Untouched, &mut NoProgress).unwrap();
    let (name, layout) = ("bf16".to_owned(), Layout::Folder(dir));
    let model = Model::open(&ModelFiles { name, layout }).unwrap();
    let tokens: Vec<u32> = (0..1024).map(|i| (i * 7919 + 13) % 49_000).collect();
    let batch = [rewarded(&tokens, &[1.0; 512])];
    // What a process needed most is told once; the smaller comes first.
    for (spec, lr) in [(AdapterSpec::default(), 2e-4), (whole(), 1e-5)] {
        let what = if spec.whole { "full" } else { "lora" };
        let engine = LocalEngine::open(&model, options()).unwrap();
        let mut learner = engine.learner(&spec, None).unwrap();
        let before: f32 = logprobs(&mut learner, &batch).iter().sum();
        let params = OptimParams {
            lr,
            ..OptimParams::default()
        };
        for _ in 0..3 {
            let started = Instant::now();
            let added = learner.forward_backward(&batch, &mut policy_gradient);
            added.unwrap();
            let passed = started.elapsed();
            assert!(!learner.optim_step(&params).unwrap().skipped);
            println!(
                "{what}: passes {passed:.2?}, with optimizer {:.2?}",
                started.elapsed()
            );
        }
        let after: f32 = logprobs(&mut learner, &batch).iter().sum();
        let started = Instant::now();
        let saved = learner.save(&home.path().join(what)).unwrap();
        let wrote = started.elapsed();
        let held = block_on(engine.load(version(1), Weights::Folder(saved.dir))).unwrap();
        println!(
            "{what}: saved in {wrote:.2?}, then loaded in {:.2?}",
            started.elapsed() - wrote
        );
        assert_eq!(held, learner.weights_hash().unwrap());
        assert!(after > before, "{what}: {before} {after}");
        println!("{what}: log-prob {before:.1} to {after:.1}");
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let most = status.lines().find(|l| l.starts_with("VmHWM"));
        println!("{what}: {}", most.unwrap_or("VmHWM unknown"));
    }
}
