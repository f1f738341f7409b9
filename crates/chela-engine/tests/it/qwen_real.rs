//! A real Qwen2.5-Coder of half a billion parameters: its tokenizer out of the GGUF file, log-probs of a text as transformers computes
//! them, greedy text as llama.cpp writes it. Run with `cargo test --release -p chela-engine -- --ignored qwen`; fetches the model
//! (491 MB) when it is not in the cache.

use crate::{
    common::options,
    golden::{as_others_do, token_ids},
};
use chela_engine::LocalEngine;
use chela_model::{Model, ModelSource, NoProgress, resolve};
use serde_json::Value;

#[test]
#[ignore = "fetches qwen2.5-coder-0.5b"]
fn a_real_qwen2_coder_reads_and_says_what_others_do() {
    let cache = directories::ProjectDirs::from("", "", "chela").unwrap();
    let source = ModelSource::parse("qwen2.5-coder-0.5b").unwrap();
    let files = resolve(&source, cache.cache_dir(), &mut NoProgress).unwrap();
    let model = Model::open(&files).unwrap();
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../../golden/qwen2_coder.json");
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(golden).unwrap()).unwrap();

    let tokenizer = model.tokenizer().unwrap();
    let read = |text: &Value| -> Vec<u32> {
        let encoding = tokenizer.encode(text.as_str().unwrap(), false).unwrap();
        encoding.get_ids().to_vec()
    };
    let text = token_ids(&golden["ids"]);
    assert!(read(&golden["text"]) == text && text.len() >= 512);

    let engine = LocalEngine::open(&model, options()).unwrap();
    as_others_do("qwen2 coder", &engine, &golden, &read);
}
