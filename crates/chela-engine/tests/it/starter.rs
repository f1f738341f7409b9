//! The real starter against transformers. Run by `cargo test --release -- --ignored starter`; fetches the model when it is not in
//! the cache.

use crate::{
    common::{collect, greedy, ids, open, rewarded, score},
    golden::{close, numbers, token_ids},
};
use chela_core::{
    AdapterSpec, Checkpoint, Learner, PolicyEngine, PolicyRef, Prompt, Sample, Scored, TokenLoss,
};
use chela_engine::{LocalEngine, adapter};
use chela_model::{ModelFiles, ModelSource, NoProgress, resolve};
use serde_json::Value;
use std::path::Path;

pub fn starter() -> ModelFiles {
    let cache = directories::ProjectDirs::from("", "", "chela").unwrap();
    let source = ModelSource::parse("starter").unwrap();
    resolve(&source, cache.cache_dir(), &mut NoProgress).unwrap()
}

fn golden() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../golden/starter.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
#[ignore = "needs the starter model"]
fn starter_log_probs_and_greedy_text_equal_transformers() {
    let engine = open(&starter());
    let golden = golden();
    for name in ["text", "chat"] {
        let text = &golden[name];
        let tokens = token_ids(&text["ids"]);
        let scored = score(&engine, PolicyRef::Base, &tokens, 1).unwrap();
        close(name, &scored.logprobs, &numbers(&text["logprobs"]));
        let stream = engine
            .sample(PolicyRef::Base, Prompt { tokens }, greedy(64))
            .unwrap();
        assert_eq!(
            ids(&collect(stream)),
            token_ids(&text["greedy"]["ids"]),
            "{name}"
        );
    }
}

/// The golden adapter's numbers; see golden/FORMAT.md.
fn mixed(k: u64, n: u64) -> f64 {
    let wrap = 1u64 << 32;
    let mut x = ((k + 1) * 2_654_435_761 + (n + 1) * 2_654_445_111) % wrap;
    x ^= x >> 16;
    x = x * 2_246_822_519 % wrap;
    x ^= x >> 13;
    x as f64 / wrap as f64 - 0.5
}

/// Writes the golden adapter below `dir`, by the names and shapes of a fresh one.
fn golden_adapter(engine: &LocalEngine, dir: &Path) -> Checkpoint {
    let spec = AdapterSpec {
        rank: 4,
        alpha: 8.0,
        ..AdapterSpec::default()
    };
    let learner = engine.learner(&spec, None).unwrap();
    let saved = learner.save(&dir.join("adapter")).unwrap();
    std::fs::remove_file(saved.dir.join("optimizer.safetensors")).unwrap();
    let mut tensors = Vec::new();
    for (layer, module, a, b) in learner.gradients().unwrap() {
        let place = MODULES.iter().position(|m| *m == module).unwrap();
        let s = (7 * layer + place) as u64;
        let fill = |n: usize, which: u64, size: f64| -> Vec<f32> {
            (0..n as u64)
                .map(|k| (mixed(k, 2 * s + which) * size) as f32)
                .collect()
        };
        let (in_width, out_width) = (a.len() / 4, b.len() / 4);
        let (a, b) = (fill(a.len(), 0, 0.05), fill(b.len(), 1, 0.02));
        for (which, shape, values) in [("A", vec![4, in_width], a), ("B", vec![out_width, 4], b)] {
            tensors.push((
                name(layer, module, which),
                shape,
                adapter::bytes_of(&values),
            ));
        }
    }
    adapter::write_tensors(&saved.dir.join("adapter_model.safetensors"), &tensors).unwrap();
    saved
}

const MODULES: [&str; 7] = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
];

fn name(layer: usize, module: &str, which: &str) -> String {
    let block = if MODULES[..4].contains(&module) {
        "self_attn"
    } else {
        "mlp"
    };
    format!("base_model.model.model.layers.{layer}.{block}.{module}.lora_{which}.weight")
}

#[test]
#[ignore = "needs the starter model"]
fn starter_adapter_and_gradients_equal_peft() {
    let engine = open(&starter());
    let dir = tempfile::tempdir().unwrap();
    let saved = golden_adapter(&engine, dir.path());
    let mut learner = engine
        .learner(&AdapterSpec::default(), Some(&saved))
        .unwrap();
    let golden = golden();
    let lora = &golden["lora"];
    let advantages = numbers(&lora["advantages"]);
    let n = advantages.len() as f32;
    let sample = rewarded(&token_ids(&golden["text"]["ids"]), &advantages);
    let mut logprobs = Vec::new();
    let mut loss = |_: usize, s: &Sample, scored: &Scored| {
        logprobs.clone_from(&scored.logprobs);
        let d_logprobs = s.advantages().iter().map(|a| -a / n).collect();
        TokenLoss {
            d_logprobs,
            ..TokenLoss::default()
        }
    };
    learner
        .forward_backward(std::slice::from_ref(&sample), &mut loss)
        .unwrap();
    close("adapter", &logprobs, &numbers(&lora["logprobs"]));
    let mut seen = 0;
    let mut squares = 0.0;
    for (layer, module, a, b) in learner.gradients().unwrap() {
        for (which, got) in [("A", a), ("B", b)] {
            let norm = got.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>();
            squares += norm;
            let Some(want) = lora["gradients"].get(name(layer, module, which)) else {
                continue;
            };
            seen += 1;
            let wanted = want["norm"].as_f64().unwrap();
            assert!(
                (norm.sqrt() / wanted - 1.0).abs() < 1e-4,
                "{layer} {module} {which}"
            );
            for (g, w) in got.iter().zip(numbers(&want["first"])) {
                assert!(
                    f64::from((g - w).abs()) < 1e-4 * wanted,
                    "{layer} {module}: {g} {w}"
                );
            }
        }
    }
    assert_eq!(seen, 3 * 7 * 2);
    let wanted = lora["gradient_norm"].as_f64().unwrap();
    assert!((squares.sqrt() / wanted - 1.0).abs() < 1e-4);
}

/// Not a test of numbers: prints what `chela bench` would, by `--nocapture`.
#[test]
#[ignore = "needs the starter model and a quiet machine"]
fn starter_bench() {
    let engine = open(&starter());
    let dir = tempfile::tempdir().unwrap();
    println!(
        "{:#?}",
        chela_engine::bench::bench(&engine, dir.path()).unwrap()
    );
}
