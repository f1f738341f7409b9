//! Tiny random checkpoints against transformers and PEFT: log-probs, greedy text, adapters, gradients, optimizer.

use crate::common::{
    collect, golden_model, greedy, ids, options, rewarded, sample, score, version,
};
use chela_core::{
    AdapterSpec, Checkpoint, Learner, OptimParams, PolicyEngine, PolicyRef, Prompt, TokenLoss,
    Want, Weights,
};
use chela_engine::{EngineOptions, LocalEngine};
use futures_executor::block_on;
use serde_json::Value;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

pub const NAMES: [&str; 10] = [
    "llama-tied",
    "llama-rope3",
    "qwen2-tied",
    "qwen2-untied",
    "qwen3-tied",
    "qwen3-untied",
    "gemma3-tied",
    "gemma3-scaled",
    "qwen3moe-normed",
    "qwen3moe-plain",
];

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden/tiny")
}

fn open(name: &str) -> Arc<LocalEngine> {
    LocalEngine::open(&golden_model(&root().join(name)), options()).unwrap()
}

fn golden(name: &str) -> Value {
    let text = std::fs::read_to_string(root().join(format!("{name}.json"))).unwrap();
    serde_json::from_str(&text).unwrap()
}

pub fn numbers(value: &Value) -> Vec<f32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v.as_f64().unwrap() as f32)
        .collect()
}

pub fn token_ids(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v.as_u64().unwrap() as u32)
        .collect()
}

/// The parity the project promises: 1e-4 mean, 1e-3 at most.
pub fn close(name: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{name}");
    let gaps: Vec<f32> = got.iter().zip(want).map(|(a, b)| (a - b).abs()).collect();
    let most = gaps.iter().fold(0.0f32, |a, b| a.max(*b));
    let mean = gaps.iter().sum::<f32>() / gaps.len() as f32;
    assert!(
        most <= 1e-3 && mean <= 1e-4,
        "{name}: mean {mean}, most {most}"
    );
}

/// A real model: log-probs of the golden text and greedy replies as transformers', and llama.cpp's replies up to a near tie. `read` is
/// the model's own tokenizer.
pub fn as_others_do(
    name: &str,
    engine: &LocalEngine,
    golden: &Value,
    read: &dyn Fn(&Value) -> Vec<u32>,
) {
    let text = token_ids(&golden["ids"]);
    let got = score(engine, PolicyRef::Base, &text, 1).unwrap().logprobs;
    let want = numbers(&golden["logprobs"]);
    let gaps: Vec<f32> = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).collect();
    let most = gaps.iter().fold(0.0f32, |a, b| a.max(*b));
    let mean = gaps.iter().sum::<f32>() / gaps.len() as f32;
    println!("{} log-probs: mean {mean:.1e}, most {most:.1e}", gaps.len());
    close(name, &got, &want);

    for prompt in golden["prompts"].as_array().unwrap() {
        let tokens = token_ids(&prompt["ids"]);
        assert_eq!(read(&prompt["prompt"]), tokens);
        let said = token_ids(&prompt["greedy"]);
        let reply = sample(engine, PolicyRef::Base, &tokens, greedy(said.len()));
        let (got, exact) = (ids(&reply), token_ids(&prompt["exact"]["ids"]));
        assert_eq!(got, exact, "{}: transformers", prompt["prompt"]);
        let same = got.iter().zip(&said).take_while(|(a, b)| a == b).count();
        let of = said.len();
        println!("{}: {same} of {of} as llama.cpp", prompt["prompt"]);
        // llama.cpp rounds activations to 8 bits, and so may turn a near tie; from there on the texts are different ones.
        if same < of {
            let lead = numbers(&prompt["leads"])[same];
            let name = &prompt["prompt"];
            assert!(lead < 0.3, "{name}: token {same} leads by {lead}");
        }
    }
}

#[test]
fn log_probs_and_greedy_text_equal_transformers() {
    for name in NAMES {
        let engine = open(name);
        for text in golden(name)["texts"].as_array().unwrap() {
            let tokens = token_ids(&text["ids"]);
            let scored = score(&engine, PolicyRef::Base, &tokens, 1).unwrap();
            close(name, &scored.logprobs, &numbers(&text["logprobs"]));
            let prompt = Prompt { tokens };
            let reply = collect(engine.sample(PolicyRef::Base, prompt, greedy(32)).unwrap());
            assert_eq!(ids(&reply), token_ids(&text["greedy"]["ids"]), "{name}");
        }
    }
}

#[test]
fn the_likeliest_tokens_equal_transformers() {
    for name in NAMES {
        let engine = open(name);
        let golden = golden(name);
        let text = &golden["texts"][1];
        let mut tokens = token_ids(&text["ids"]);
        tokens.push(0); // the position after the text is scored
        let from = tokens.len() - 1;
        let want = Want {
            top_k: 5,
            ..Want::default()
        };
        let scored = block_on(engine.score(PolicyRef::Base, Prompt { tokens }, from, want));
        let (top, logprobs) = scored.unwrap().top.unwrap();
        assert_eq!(top, token_ids(&text["top5"]["ids"]), "{name}");
        close(name, &logprobs, &numbers(&text["top5"]["logprobs"]));
    }
}

#[test]
fn a_peft_adapter_scores_as_in_peft() {
    for name in NAMES {
        let engine = open(name);
        let dir = root().join(name).join("adapter");
        block_on(engine.load(version(1), Weights::Folder(dir))).unwrap();
        let golden = golden(name);
        for (text, want) in golden["texts"]
            .as_array()
            .unwrap()
            .iter()
            .zip(golden["adapter_logprobs"].as_array().unwrap())
        {
            let tokens = token_ids(&text["ids"]);
            let policy = PolicyRef::Version(version(1));
            let scored = score(&engine, policy, &tokens, 1).unwrap();
            close(name, &scored.logprobs, &numbers(want));
        }
    }
}

fn relative(got: &[f32], want: &[f32]) -> f64 {
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let gap = norm(&mut got.iter().zip(want).map(|(a, b)| f64::from(a - b)));
    gap / norm(&mut want.iter().map(|b| f64::from(*b))).max(1e-12)
}

fn check_gradients(name: &str, recompute: bool) {
    let options = EngineOptions {
        recompute,
        ..options()
    };
    let engine = LocalEngine::open(&golden_model(&root().join(name)), options).unwrap();
    let golden = golden(name);
    let from = Checkpoint {
        dir: root().join(name).join("adapter"),
        step: 0,
    };
    let mut learner = engine
        .learner(&AdapterSpec::default(), Some(&from))
        .unwrap();
    let advantages = numbers(&golden["advantages"]);
    let sample = rewarded(&token_ids(&golden["texts"][1]["ids"]), &advantages);
    let n = advantages.len() as f32;
    let mut losses = Vec::new();
    let path = root().join(format!("{name}.lora_gradients.safetensors"));
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    for step in 0..3 {
        let mut loss = 0.0;
        learner
            .forward_backward(std::slice::from_ref(&sample), &mut |_, s, scored| {
                loss = scored
                    .logprobs
                    .iter()
                    .zip(s.advantages())
                    .map(|(l, a)| -l * a)
                    .sum::<f32>()
                    / n;
                TokenLoss {
                    d_logprobs: s.advantages().iter().map(|a| -a / n).collect(),
                    ..TokenLoss::default()
                }
            })
            .unwrap();
        losses.push(loss);
        if step == 0 {
            for (layer, module, a, b) in learner.gradients().unwrap() {
                let block = if module.ends_with("_proj") && "qkvo".contains(&module[..1]) {
                    "self_attn"
                } else {
                    "mlp"
                };
                for (which, got) in [("A", a), ("B", b)] {
                    let key = format!(
                        "base_model.model.model.layers.{layer}.{block}.{module}.lora_{which}.weight"
                    );
                    let tensor = file.tensor(&key).unwrap();
                    let want: Vec<f32> = tensor
                        .data()
                        .chunks_exact(4)
                        .map(|c| f32::from_le_bytes(c.try_into().unwrap()))
                        .collect();
                    let gap = relative(&got, &want);
                    assert!(gap < 1e-4, "{name} {key}: {gap}");
                }
            }
        }
        let report = learner.optim_step(&OptimParams {
            clip: 0.0,
            ..OptimParams::default()
        });
        let report = report.unwrap();
        assert!(!report.skipped);
        if step == 0 {
            let want = golden["lora_gradient_norm"].as_f64().unwrap();
            assert!(
                (f64::from(report.grad_norm) / want - 1.0).abs() < 1e-4,
                "{name}"
            );
        }
    }
    // Losses after one and two optimizer steps agree only if AdamW does.
    for (got, want) in losses.iter().zip(numbers(&golden["lora_losses"])) {
        assert!((got - want).abs() < 1e-4, "{name}: {losses:?}");
    }
}

#[test]
fn lora_gradients_and_steps_equal_peft() {
    NAMES.iter().for_each(|name| check_gradients(name, false));
}

#[test]
fn recomputed_layers_give_the_same_gradients() {
    check_gradients("llama-rope3", true);
    check_gradients("qwen3-tied", true);
    check_gradients("gemma3-tied", true);
    check_gradients("qwen3moe-normed", true);
}
