//! The real starter against transformers. Run by `cargo test --release -- --ignored starter`; fetches the model when it is not in
//! the cache.

use crate::{
    common::{collect, greedy, ids, open, score},
    golden::{close, numbers, token_ids},
};
use chela_core::{PolicyEngine, PolicyRef, Prompt};
use chela_model::{ModelFiles, ModelSource, NoProgress, resolve};
use serde_json::Value;

fn starter() -> ModelFiles {
    let cache = directories::ProjectDirs::from("", "", "chela").unwrap();
    let source = ModelSource::parse("starter").unwrap();
    resolve(&source, cache.cache_dir(), &mut NoProgress).unwrap()
}

#[test]
#[ignore = "needs the starter model"]
fn starter_log_probs_and_greedy_text_equal_transformers() {
    let engine = open(&starter());
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../golden/starter.json");
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    for name in ["text", "chat"] {
        let text = &golden[name];
        let tokens = token_ids(&text["ids"]);
        let scored = score(&engine, PolicyRef::Base, &tokens, 1).unwrap();
        close(name, &scored.logprobs, &numbers(&text["logprobs"]));
        let stream = engine.sample(PolicyRef::Base, Prompt { tokens }, greedy(64)).unwrap();
        assert_eq!(ids(&collect(stream)), token_ids(&text["greedy"]["ids"]), "{name}");
    }
}

/// Not a test of numbers: prints what `chela bench` would, by `--nocapture`.
#[test]
#[ignore = "needs the starter model and a quiet machine"]
fn starter_bench() {
    let engine = open(&starter());
    let dir = tempfile::tempdir().unwrap();
    println!("{:#?}", chela_engine::bench::bench(&engine, dir.path()).unwrap());
}
