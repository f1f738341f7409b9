//! Every way a model can be wrong stops the start with file, tensor and reason.

use std::fs;
use std::path::{Path, PathBuf};

use chela_model::testing::{TinySpec, write_tiny_gguf, write_tiny_llama};
use chela_model::{Family, Layout, Model, ModelError, ModelFiles, TensorName};
use serde_json::{Value, json};

fn gguf(dir: &Path) -> (ModelFiles, PathBuf) {
    let files = write_tiny_gguf(dir, 1, &TinySpec::default()).unwrap();
    let Layout::Gguf(path) = files.layout.clone() else {
        panic!("not a GGUF file")
    };
    (files, path)
}

fn replace(bytes: &mut [u8], from: &[u8], to: &[u8]) {
    assert_eq!(from.len(), to.len());
    let at = bytes
        .windows(from.len())
        .position(|window| window == from)
        .unwrap();
    bytes[at..at + to.len()].copy_from_slice(to);
}

/// The message of opening a GGUF file after `change`.
fn after(change: impl FnOnce(&mut Vec<u8>)) -> String {
    let dir = tempfile::tempdir().unwrap();
    let (files, path) = gguf(dir.path());
    let mut bytes = fs::read(&path).unwrap();
    change(&mut bytes);
    fs::write(&path, bytes).unwrap();
    let message = Model::open(&files).unwrap_err().to_string();
    assert!(
        message.starts_with(&path.display().to_string()),
        "{message}"
    );
    assert_eq!(message.lines().count(), 1, "{message}");
    message
}

#[test]
fn gguf_files_name_what_is_wrong() {
    let truncated = after(|bytes| bytes.truncate(bytes.len() - 5000));
    assert!(
        truncated.contains(": tensor ") && truncated.contains("truncated"),
        "{truncated}"
    );
    let header = after(|bytes| bytes.truncate(100));
    assert!(header.contains("header"), "{header}");
    let missing = after(|bytes| replace(bytes, b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"));
    assert!(
        missing.contains("tensor blk.1.ffn_up.weight: is missing"),
        "{missing}"
    );
    let family = after(|bytes| {
        replace(
            bytes,
            b"\x05\0\0\0\0\0\0\0llama",
            b"\x05\0\0\0\0\0\0\0mamba",
        )
    });
    assert!(
        family.contains("the architecture mamba is not supported"),
        "{family}"
    );
    let magic = after(|bytes| bytes[0] = b'X');
    assert!(magic.contains("not a GGUF file"), "{magic}");
    let version = after(|bytes| bytes[4] = 1);
    assert!(
        version.contains("GGUF version 1 is not supported"),
        "{version}"
    );
    // The name, one u32 of dimensions, two u64 sizes, then the type.
    let kind = after(|bytes| {
        let name = b"blk.0.ffn_gate.weight";
        let at = bytes.windows(name.len()).position(|w| w == name).unwrap() + name.len();
        bytes[at + 20] = 11;
    });
    assert!(
        kind.contains("blk.0.ffn_gate.weight") && kind.contains("Q3_K"),
        "{kind}"
    );
    let shape = after(|bytes| {
        let name = b"blk.0.ffn_gate.weight";
        let at = bytes.windows(name.len()).position(|w| w == name).unwrap() + name.len();
        bytes[at + 12] = 127;
    });
    assert!(shape.contains("has the shape [127, 64]"), "{shape}");
}

#[test]
fn an_unknown_pre_tokenizer_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let (files, path) = gguf(dir.path());
    let mut bytes = fs::read(&path).unwrap();
    replace(
        &mut bytes,
        b"\x05\0\0\0\0\0\0\0gpt-2",
        b"\x05\0\0\0\0\0\0\0tekke",
    );
    fs::write(&path, bytes).unwrap();
    let error = Model::open(&files)
        .unwrap()
        .tokenizer()
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("the pre-tokenizer \"tekke\" is not supported"),
        "{error}"
    );
}

#[test]
fn a_number_that_is_not_finite_names_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let (files, path) = gguf(dir.path());
    let mut bytes = fs::read(&path).unwrap();
    // The head is tied, so the final norm is last: 64 numbers of 4 bytes.
    let at = bytes.len() - 256 + 4 * 10;
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let model = Model::open(&files).unwrap();
    model.tensor(TensorName::Embed).unwrap();
    let error = model.tensor(TensorName::FinalNorm).unwrap_err();
    assert!(matches!(error, ModelError::Tensor { .. }));
    let message = error.to_string();
    assert!(
        message.contains("tensor final_norm: not a finite number at row 0, column 10"),
        "{message}"
    );
    let absent = model.tensor(TensorName::Head).unwrap_err().to_string();
    assert!(
        absent.contains("tensor head: is not part of this model"),
        "{absent}"
    );
}

/// The message of opening a folder after one value of a JSON file is changed.
fn with(file: &str, key: &str, value: Value) -> String {
    with_of(&TinySpec::default(), file, key, value)
}

fn with_of(spec: &TinySpec, file: &str, key: &str, value: Value) -> String {
    let dir = tempfile::tempdir().unwrap();
    let files = write_tiny_llama(dir.path(), 1, spec).unwrap();
    let path = dir.path().join(file);
    let mut json: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    json[key] = value;
    fs::write(&path, json.to_string()).unwrap();
    Model::open(&files).unwrap_err().to_string()
}

#[test]
fn folders_name_what_is_wrong() {
    let cases = [
        (
            "architectures",
            json!(["GemmaForCausalLM"]),
            "the architecture GemmaForCausalLM is not",
        ),
        (
            "hidden_act",
            json!("gelu"),
            "the activation gelu is not supported",
        ),
        (
            "hidden_size",
            json!("wide"),
            "hidden_size is \"wide\", expected a whole number",
        ),
        ("hidden_size", json!(96), "has the shape"),
        (
            "num_hidden_layers",
            json!(3),
            "model.layers.2.input_layernorm.weight: is missing",
        ),
        (
            "num_hidden_layers",
            json!(1),
            "is not part of this model's family",
        ),
        ("num_attention_heads", json!(0), "attention heads is 0"),
        (
            "num_key_value_heads",
            json!(3),
            "4 heads over 3 key/value heads",
        ),
        ("vocab_size", json!(10), "beyond the vocabulary of 10"),
        (
            "rms_norm_eps",
            Value::Null,
            "rms_norm_eps is null, expected a number",
        ),
        (
            "rope_scaling",
            json!({"rope_type": "dynamic", "factor": 2}),
            "rope scaling dynamic",
        ),
        (
            "rope_scaling",
            json!({"rope_type": "linear", "factor": 0}),
            "has the number 0",
        ),
        (
            "quantization_config",
            json!({"bits": 4}),
            "quantised Hugging Face checkpoint",
        ),
        ("mlp_bias", json!(true), "a bias in the MLP"),
        ("partial_rotary_factor", json!(0.5), "rotation of a part"),
    ];
    for (key, value, expected) in cases {
        let message = with("config.json", key, value);
        assert!(message.contains(expected), "{key}: {message}");
    }
    let head = with("config.json", "tie_word_embeddings", json!(false));
    assert!(head.contains("lm_head.weight: is missing"), "{head}");
}

#[test]
fn a_gemma_names_what_is_wrong() {
    let cases = [
        (
            "final_logit_softcapping",
            json!(30.0),
            "config.json: final_logit_softcapping 30.0 is not supported; null, as in every Gemma 3, is",
        ),
        (
            "attn_logit_softcapping",
            json!(50.0),
            "attn_logit_softcapping 50.0 is not supported",
        ),
        (
            "hidden_activation",
            json!("silu"),
            "the activation silu is not supported; gelu_pytorch_tanh is",
        ),
        (
            "use_bidirectional_attention",
            json!(true),
            "use_bidirectional_attention is not supported",
        ),
        (
            "architectures",
            json!(["Gemma3ForConditionalGeneration"]),
            "a Gemma 3 with its image part is not supported; its text model is",
        ),
        (
            "layer_types",
            json!(["full_attention"]),
            "layer_types names 1 layers, expected 2",
        ),
        (
            "layer_types",
            json!(["full_attention", "chunked_attention"]),
            "layer_types has \"chunked_attention\", expected full_attention or sliding_attention",
        ),
        ("layer_types", json!(6), "layer_types is 6, expected a list"),
        (
            "sliding_window_pattern",
            json!(0),
            "sliding_window_pattern is 0, expected 1 or more",
        ),
        (
            "sliding_window",
            Value::Null,
            "sliding_window is null, expected a whole number",
        ),
        (
            "sliding_window",
            json!(0),
            "sliding window is 0, expected 1",
        ),
        ("query_pre_attn_scalar", json!(0), "query scalar is 0"),
        ("rope_local_base_freq", json!(0.5), "rope theta is 0.5"),
        (
            "rope_parameters",
            json!({"rope_theta": 1e6}),
            "rope_parameters has neither full_attention nor sliding_attention",
        ),
    ];
    for (key, value, expected) in cases {
        let message = with_of(&TinySpec::of(Family::Gemma3), "config.json", key, value);
        assert!(message.contains(expected), "{key}: {message}");
        assert!(message.contains("config.json: "), "{key}: {message}");
    }
}

#[test]
fn a_mixture_of_experts_names_what_is_wrong() {
    let cases = [
        (
            "decoder_sparse_step",
            json!(2),
            "decoder_sparse_step 2 is not supported; experts in every layer are",
        ),
        (
            "mlp_only_layers",
            json!([1]),
            "mlp_only_layers [1] is not supported",
        ),
        (
            "num_experts_per_tok",
            json!(7),
            "7 of 6 experts for a token, expected 1 to all of at most 4096",
        ),
        ("num_experts_per_tok", json!(0), "0 of 6 experts"),
        (
            "num_experts",
            json!("many"),
            "num_experts is \"many\", expected a whole number",
        ),
        (
            "num_experts",
            Value::Null,
            "num_local_experts is missing, expected a whole number",
        ),
    ];
    let spec = TinySpec::of(Family::Qwen3Moe);
    for (key, value, expected) in cases {
        let message = with_of(&spec, "config.json", key, value);
        assert!(message.contains(expected), "{key}: {message}");
        assert!(message.contains("config.json: "), "{key}: {message}");
    }
    // Tensors are named as they are in the file, by expert.
    let message = with_of(&spec, "config.json", "num_experts", json!(7));
    assert!(
        message.contains("model.layers.0.mlp.gate.weight: has the shape [6, 64]"),
        "{message}"
    );
    let message = with_of(&spec, "config.json", "moe_intermediate_size", json!(48));
    assert!(
        message.contains("mlp.experts.0.gate_proj.weight: has the shape [32, 64], the configuration asks for [48, 64]"),
        "{message}"
    );

    let dir = tempfile::tempdir().unwrap();
    let files = write_tiny_gguf(dir.path(), 1, &spec).unwrap();
    let Layout::Gguf(path) = files.layout.clone() else {
        panic!("not a GGUF file")
    };
    let bytes = fs::read(&path).unwrap();
    let name = b"blk.1.ffn_up_exps.weight";
    let at = bytes.windows(name.len()).position(|w| w == name).unwrap() + name.len();
    let mut spoilt = bytes.clone();
    // 3 matrices of 64 rows instead of 6 of 32: as many numbers.
    spoilt[at + 12] = 64;
    spoilt[at + 20] = 3;
    fs::write(&path, spoilt).unwrap();
    let message = Model::open(&files).unwrap_err().to_string();
    assert!(
        message.contains("blk.1.ffn_up_exps.weight: is a stack of 3 matrices, expected 6"),
        "{message}"
    );
    let mut dense = bytes;
    replace(
        &mut dense,
        b"\x08\0\0\0\0\0\0\0qwen3moe",
        b"\x08\0\0\0\0\0\0\0deepseek",
    );
    fs::write(&path, dense).unwrap();
    let message = Model::open(&files).unwrap_err().to_string();
    assert!(
        message.contains("the architecture deepseek is not supported"),
        "{message}"
    );
}

#[test]
fn missing_and_cut_files_are_named() {
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        let dir = tempfile::tempdir().unwrap();
        let files = write_tiny_llama(dir.path(), 1, &TinySpec::default()).unwrap();
        fs::remove_file(dir.path().join(file)).unwrap();
        let message = Model::open(&files).unwrap_err().to_string();
        assert!(message.contains(&format!("{file} is missing")), "{message}");
    }
    let dir = tempfile::tempdir().unwrap();
    let spec = TinySpec {
        shards: 2,
        ..TinySpec::of(Family::Qwen3)
    };
    let files = write_tiny_llama(dir.path(), 1, &spec).unwrap();
    let shard = dir.path().join("model-00002-of-00002.safetensors");
    let bytes = fs::read(&shard).unwrap();
    fs::write(&shard, &bytes[..bytes.len() - 100]).unwrap();
    let message = Model::open(&files).unwrap_err().to_string();
    assert!(
        message.contains("00002-of-00002") && message.contains("truncated"),
        "{message}"
    );
    fs::write(&shard, &bytes[..6]).unwrap();
    assert!(
        Model::open(&files)
            .unwrap_err()
            .to_string()
            .contains("truncated")
    );
    fs::remove_file(&shard).unwrap();
    let message = Model::open(&files).unwrap_err().to_string();
    assert!(
        message.contains("00002-of-00002.safetensors is missing"),
        "{message}"
    );
}
