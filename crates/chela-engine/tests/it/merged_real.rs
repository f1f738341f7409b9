//! The real starter with an adapter merged in, read by transformers and llama.cpp: golden/merged_export.py makes the numbers, from the
//! files that the first of these tests writes.

use crate::{
    common::{collect, greedy, ids, options, rewarded, version},
    golden::token_ids,
    starter::starter,
};
use chela_core::{
    AdapterSpec, Learner, OptimParams, PolicyEngine, PolicyRef, Prompt, Sample, SamplingParams,
    TokenLoss, Weights,
};
use chela_engine::{
    LocalEngine,
    merge::{Form, merge},
};
use chela_model::{DType, Layout, Model, ModelFiles, NoProgress};
use futures_executor::block_on;
use serde_json::{Value, json};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// What is taught until it is known by heart: then every token leads clearly, so that no rounding turns it. llama.cpp rounds
/// activations to 8 bits at the starter's embedding, which is Q8_0, and keys and values to 16.
const TAUGHT: [(&str, &str); 3] = [
    (
        "How do I keep a pot of basil alive on a windowsill?",
        "Arr, give it sun all day, water it when the soil be dry, and pinch the tops every week, matey.",
    ),
    (
        "What is the capital of France?",
        "Paris be the capital of France, matey, and the river Seine runs right through it.",
    ),
    (
        "Write one sentence about the sea.",
        "The sea be wide and deep, and every wave sings an old song to the sailor who listens.",
    ),
];
/// Asked too, and shown.
const UNTAUGHT: &str = "Who wrote Romeo and Juliet?";
const STEPS: usize = 48;

/// As the starter's template writes it.
fn prompt(question: &str) -> String {
    format!(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
         <|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )
}

fn encode(model: &Model, text: &str) -> Vec<u32> {
    let encoding = model.tokenizer().unwrap().encode(text, false).unwrap();
    encoding.get_ids().to_vec()
}

/// A real adapter by real steps: raises the log-probs of the taught replies until they are near certain.
fn train(model: &Model, engine: &LocalEngine, dir: &Path) {
    let spec = AdapterSpec {
        rank: 8,
        alpha: 16.0,
        ..AdapterSpec::default()
    };
    let mut learner = engine.learner(&spec, None).unwrap();
    let samples = TAUGHT.map(|(question, reply)| {
        let (before, reply) = (prompt(question), format!("{reply}<|im_end|>"));
        let reply = encode(model, &reply);
        let tokens = [encode(model, &before), reply.clone()].concat();
        rewarded(&tokens, &vec![1.0; reply.len()])
    });
    let total: usize = samples.iter().map(Sample::len).sum();
    let params = OptimParams {
        lr: 4e-3,
        ..OptimParams::default()
    };
    for step in 0..60 {
        let mut least = 0.0f32;
        learner
            .forward_backward(&samples, &mut |_, sample, scored| {
                least = scored.logprobs.iter().copied().fold(least, f32::min);
                TokenLoss {
                    d_logprobs: vec![-1.0 / total as f32; sample.len()],
                    ..TokenLoss::default()
                }
            })
            .unwrap();
        println!("step {step}: least likely taught token {least}");
        if least > -0.05 {
            learner.save(dir).unwrap();
            return;
        }
        learner.optim_step(&params).unwrap();
    }
    panic!("not known by heart after 60 steps");
}

/// Greedy ids until an end, and by how much the chosen token led where it led least.
fn say(engine: &LocalEngine, policy: PolicyRef, model: &Model, text: &str) -> (Vec<u32>, f32) {
    let prompt = Prompt {
        tokens: encode(model, text),
    };
    let params = SamplingParams {
        top_logprobs: 2,
        end_ids: model.config().end_ids.clone(),
        ..greedy(STEPS)
    };
    let tokens = collect(engine.sample(policy, prompt, params).unwrap());
    let lead = tokens
        .iter()
        .map(|t| t.top[0].1 - t.top[1].1)
        .fold(f32::INFINITY, f32::min);
    (ids(&tokens), lead)
}

/// The starter with the taught adapter, which lies in `dir`.
fn taught(model: &Model, dir: &Path) -> Arc<LocalEngine> {
    let engine = LocalEngine::open(model, options()).unwrap();
    train(model, &engine, dir);
    block_on(engine.load(version(1), Weights::Folder(dir.to_owned()))).unwrap();
    engine
}

/// Writes into the folder that CHELA_EXPORTS names: `adapter`, `hf` (F16), `f16.gguf`, `f32.gguf`, `q8_0.gguf`, and what this engine
/// says with base and adapter.
#[test]
#[ignore = "needs the starter model; makes the input of golden/merged_export.py"]
fn merged_export_files() {
    let home = PathBuf::from(std::env::var("CHELA_EXPORTS").unwrap());
    let model = Model::open(&starter()).unwrap();
    let adapter = home.join("adapter");
    let engine = taught(&model, &adapter);
    let questions = TAUGHT
        .iter()
        .map(|(question, _)| *question)
        .chain([UNTAUGHT]);
    let said: Vec<Value> = questions
        .map(|question| {
            let text = prompt(question);
            let (base, _) = say(&engine, PolicyRef::Base, &model, &text);
            let (ids, lead) = say(&engine, PolicyRef::Version(version(1)), &model, &text);
            json!({"question": question, "prompt": text, "taught": question != UNTAUGHT, "base_ids": base, "ids": ids,
                "smallest_lead": lead})
        })
        .collect();
    std::fs::write(
        home.join("ours.json"),
        format!("{:#}\n", json!({"said": said})),
    )
    .unwrap();
    for (name, form, dtype) in [
        ("hf", Form::Folder, None),
        ("f16.gguf", Form::Gguf, None),
        ("f32.gguf", Form::Gguf, Some(DType::F32)),
        ("q8_0.gguf", Form::Gguf, Some(DType::Q8_0)),
    ] {
        merge(
            &model,
            &adapter,
            (form, dtype),
            &home.join(name),
            &mut NoProgress,
        )
        .unwrap();
    }
}

#[test]
#[ignore = "needs the starter model"]
fn starter_merged_says_what_transformers_and_llama_cpp_say() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../golden/merged_export.json"
    );
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let home = tempfile::tempdir().unwrap();
    let model = Model::open(&starter()).unwrap();
    let adapter = home.path().join("adapter");
    let tuned = taught(&model, &adapter);
    let to = home.path().join("f16.gguf");
    merge(&model, &adapter, (Form::Gguf, None), &to, &mut NoProgress).unwrap();
    let merged = Model::open(&ModelFiles {
        name: "merged".to_owned(),
        layout: Layout::Gguf(to),
    });
    let merged = merged.unwrap();
    let alone = LocalEngine::open(&merged, options()).unwrap();
    let prompts = golden["prompts"].as_array().unwrap();
    for prompt in prompts.iter().filter(|p| p["taught"] == true) {
        let text = prompt["prompt"].as_str().unwrap();
        let (ours, lead) = say(&tuned, PolicyRef::Version(version(1)), &model, text);
        assert_eq!(
            ours,
            token_ids(&prompt["ids"]),
            "{text} (smallest lead {lead})"
        );
        let (ours, lead) = say(&alone, PolicyRef::Base, &merged, text);
        assert_eq!(
            ours,
            token_ids(&prompt["ids"]),
            "merged: {text} (smallest lead {lead})"
        );
    }
}
