//! A real Gemma 3 of 270M parameters, when it is there: its tokenizer out of the GGUF file, log-probs of a text longer than its window
//! as transformers computes them, greedy text as llama.cpp writes it. Run with `CHELA_GEMMA3_GGUF=… cargo test -p chela-engine -- --ignored gemma3`.

use crate::{
    common::options,
    golden::{as_others_do, token_ids},
};
use chela_engine::LocalEngine;
use chela_model::{DType, Edit, Layout, Model, ModelFiles, NoProgress, TensorName, write_folder};
use serde_json::Value;
use std::path::Path;

fn opened(layout: Layout) -> Model {
    let name = "gemma3".to_owned();
    Model::open(&ModelFiles { name, layout }).unwrap()
}

fn real() -> Model {
    let path = std::env::var_os("CHELA_GEMMA3_GGUF").expect("CHELA_GEMMA3_GGUF names the file");
    opened(Layout::Gguf(path.into()))
}

/// Changes nothing.
struct AsItIs;

impl Edit for AsItIs {
    fn touches(&self, _: TensorName) -> bool {
        false
    }
    fn apply(&mut self, _: TensorName, _: [usize; 2], _: &mut [f32]) -> Result<(), String> {
        Ok(())
    }
}

#[test]
#[ignore = "needs gemma3-270m in Q4_K_M as a GGUF file in CHELA_GEMMA3_GGUF; writes 0.5 GB"]
fn a_real_gemma3_becomes_the_same_model_as_a_folder() {
    let (model, home) = (real(), tempfile::tempdir().unwrap());
    let to = match std::env::var_os("CHELA_EXPORTS") {
        Some(dir) => Path::new(&dir).join("gemma3"), // for others to read
        None => home.path().join("gemma3"),
    };
    write_folder(&model, &to, Some(DType::F16), &mut AsItIs, &mut NoProgress).unwrap();
    let folder = opened(Layout::Folder(to));
    assert_eq!(folder.config(), model.config());
    let hash = |model: &Model| model.tokenizer_hash().unwrap();
    assert_eq!(hash(&folder), hash(&model));
    let norm = TensorName::FinalNorm;
    let read = |model: &Model| model.tensor(norm).unwrap().to_f32();
    for (a, b) in read(&folder).iter().zip(read(&model)) {
        assert!((a - b).abs() <= 1e-3 * b.abs(), "{a} {b}");
    }
}

#[test]
#[ignore = "needs gemma3-270m in Q4_K_M as a GGUF file in CHELA_GEMMA3_GGUF"]
fn a_real_gemma3_reads_and_says_what_others_do() {
    let model = real();
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../../golden/gemma3_270m.json");
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(golden).unwrap()).unwrap();

    let (tokenizer, bos) = (model.tokenizer().unwrap(), model.config().bos_id.unwrap());
    let read = |text: &Value| {
        let encoding = tokenizer.encode(text.as_str().unwrap(), false).unwrap();
        [&[bos], encoding.get_ids()].concat()
    };
    assert_eq!(read(&golden["text"]), token_ids(&golden["ids"]));
    assert_eq!(model.config().end_ids, [1, 106]);

    let engine = LocalEngine::open(&model, options()).unwrap();
    as_others_do("gemma3", &engine, &golden, &read);
}
