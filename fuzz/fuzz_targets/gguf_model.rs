//! A whole GGUF file: opened as a model, each tensor read, its tokenizer built.
#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

use chela_model::{Layout, Model, ModelFiles};
use libfuzzer_sys::fuzz_target;

static DIR: LazyLock<tempfile::TempDir> =
    LazyLock::new(|| tempfile::tempdir().expect("a temporary folder"));

fuzz_target!(|bytes: &[u8]| {
    let path: PathBuf = DIR.path().join("x.gguf");
    std::fs::write(&path, bytes).expect("a temporary file");
    let files = ModelFiles {
        name: "x".into(),
        layout: Layout::Gguf(path),
    };
    let Ok(model) = Model::open(&files) else {
        return;
    };
    for name in model.config().tensor_names() {
        if let Ok(tensor) = model.tensor(name) {
            assert_eq!(tensor.to_f32().len(), tensor.shape[0] * tensor.shape[1]);
        }
    }
    if let Ok(tokenizer) = model.tokenizer() {
        let _ = tokenizer.encode("hello", false);
    }
});
