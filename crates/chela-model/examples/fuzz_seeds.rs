//! Writes the files that the fuzzers in `fuzz/` start from: `cargo run -p chela-model --example fuzz_seeds`.

use std::path::Path;

use chela_model::testing::{TinySpec, write_tiny_gguf, write_tiny_llama};
use chela_model::{DType, Family};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    for target in ["gguf_header", "gguf_model", "safetensors_header"] {
        std::fs::create_dir_all(corpus.join(target))?;
    }
    let dir = tempfile::tempdir()?;
    for dtype in [DType::F32, DType::Q8_0, DType::Q4_0] {
        for family in [Family::Llama, Family::Gemma3, Family::Qwen3Moe] {
            let spec = TinySpec {
                layers: 1,
                hidden: 32,
                heads: 2,
                kv_heads: 1,
                intermediate: 32,
                dtype,
                ..TinySpec::of(family)
            };
            let name = format!("{family:?}-{dtype}");
            let copy = |file: &str, target: &str| {
                std::fs::copy(dir.path().join(file), corpus.join(target).join(&name))
            };
            write_tiny_gguf(dir.path(), 1, &spec)?;
            copy("tiny.gguf", "gguf_header")?;
            copy("tiny.gguf", "gguf_model")?;
            if dtype == DType::F32 {
                write_tiny_llama(dir.path(), 1, &spec)?;
                copy("model.safetensors", "safetensors_header")?;
            }
        }
    }
    Ok(())
}
