//! Writes a tiny model as a GGUF file.

use std::path::Path;

use super::tiny_text::{END_OF_TEXT, TINY_END, TINY_TEMPLATE, specials, vocabulary};
use super::{TinySpec, quantise, tiny_values};
use crate::config::{Family, ModelConfig};
use crate::error::{ModelError, Result};
use crate::names::{LayerTensor, TensorName};
use crate::source::{Layout, ModelFiles};
use crate::tensor::DType;

/// Bytes of a GGUF header as they grow.
#[derive(Default)]
struct Header(Vec<u8>);

impl Header {
    fn u32(&mut self, n: u32) {
        self.0.extend(n.to_le_bytes());
    }

    fn u64(&mut self, n: u64) {
        self.0.extend(n.to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        self.u64(text.len() as u64);
        self.0.extend(text.as_bytes());
    }

    fn key(&mut self, key: &str, kind: u32) {
        self.text(key);
        self.u32(kind);
    }

    fn list(&mut self, key: &str, kind: u32, count: usize) {
        self.key(key, 9);
        self.u32(kind);
        self.u64(count as u64);
    }
}

/// Writes `dir/tiny.gguf` with the weights [`super::write_tiny_llama`] has for the same seed, and
/// the same tokenizer and template. Matrices are stored in `spec.dtype`.
pub fn write_tiny_gguf(dir: &Path, seed: u64, spec: &TinySpec) -> Result<ModelFiles> {
    let config = spec.config();
    let family = config.family.gguf();
    let names = config.tensor_names();
    let mut head = Header::default();
    head.0.extend(b"GGUF");
    head.u32(3);
    head.u64(names.len() as u64);
    let (pairs, metadata) = metadata(&config, family);
    head.u64(pairs);
    head.0.extend(metadata.0);

    let mut data = Vec::new();
    for name in names {
        let [rows, cols] = config.shape(name).unwrap_or_default();
        let router = matches!(name, TensorName::Layer(_, LayerTensor::Router));
        let dtype = if rows == 1 || router {
            DType::F32
        } else {
            spec.dtype
        };
        let mut values = interleave(&config, name, tiny_values(&config, name, seed));
        if name.is_norm() && config.family.norm_plus_one() {
            values.iter_mut().for_each(|w| *w += 1.0);
        }
        head.text(&name.gguf());
        let stack = config.stack(name);
        let sizes = [cols, rows / stack, stack];
        let dims = match (rows, stack) {
            (1, _) => 1,
            (_, 1) => 2,
            _ => 3,
        };
        head.u32(dims as u32);
        for size in &sizes[..dims] {
            head.u64(*size as u64);
        }
        head.u32(ggml_type(dtype));
        head.u64(data.len() as u64);
        data.extend(quantise(dtype, &values)?);
        data.resize(data.len().next_multiple_of(32), 0);
    }
    let mut bytes = head.0;
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    bytes.extend(data);
    std::fs::create_dir_all(dir).map_err(|e| ModelError::io(dir, e))?;
    let path = dir.join("tiny.gguf");
    std::fs::write(&path, bytes).map_err(|e| ModelError::io(&path, e))?;
    Ok(ModelFiles {
        name: "tiny".to_owned(),
        layout: Layout::Gguf(path),
    })
}

fn ggml_type(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::Q4_0 => 2,
        DType::Q4_1 => 3,
        DType::Q8_0 => 8,
        DType::Q4_K => 12,
        DType::Q5_K => 13,
        DType::Q6_K => 14,
        DType::BF16 => 30,
    }
}

/// The order in which llama.cpp's converter writes q and k rows of Llama models: element `j` of
/// the first half of a head, then `j` of the second, and so on.
fn interleave(config: &ModelConfig, name: TensorName, values: Vec<f32>) -> Vec<f32> {
    let swaps = matches!(name, TensorName::Layer(_, LayerTensor::Q | LayerTensor::K));
    if config.family != Family::Llama || !swaps {
        return values;
    }
    let (row, half) = (config.hidden, config.head_dim / 2);
    let mut out = Vec::with_capacity(values.len());
    for head in values.chunks_exact(config.head_dim * row) {
        for j in 0..half {
            out.extend(&head[j * row..(j + 1) * row]);
            out.extend(&head[(half + j) * row..(half + j + 1) * row]);
        }
    }
    out
}

/// The number of metadata pairs, and their bytes.
fn metadata(config: &ModelConfig, family: &str) -> (u64, Header) {
    let mut head = Header::default();
    let mut pairs = 0;
    let texts = [
        ("general.architecture", family),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "gpt-2"),
        ("tokenizer.chat_template", TINY_TEMPLATE),
    ];
    for (key, text) in texts {
        head.key(key, 8);
        head.text(text);
        pairs += 1;
    }
    let sizes = [
        ("embedding_length", config.hidden),
        ("block_count", config.layers),
        ("attention.head_count", config.heads),
        ("attention.head_count_kv", config.kv_heads),
        ("attention.key_length", config.head_dim),
        ("attention.value_length", config.head_dim),
        ("feed_forward_length", config.intermediate),
        ("expert_feed_forward_length", config.intermediate),
        ("expert_count", config.experts.map_or(0, |e| e.count)),
        ("expert_used_count", config.experts.map_or(0, |e| e.active)),
        ("context_length", config.context_length),
        (
            "attention.sliding_window",
            config.sliding_window.unwrap_or(0),
        ),
        (
            "attention.sliding_window_pattern",
            config.window_pattern().unwrap_or(1),
        ),
    ];
    for (key, size) in sizes {
        head.key(&format!("{family}.{key}"), 4);
        head.u32(size as u32);
        pairs += 1;
    }
    let numbers = [
        ("attention.layer_norm_rms_epsilon", config.rms_eps),
        ("rope.freq_base", config.rope.theta),
        (
            "rope.freq_base_swa",
            config.local_rope.as_ref().unwrap_or(&config.rope).theta,
        ),
    ];
    for (key, number) in numbers {
        head.key(&format!("{family}.{key}"), 6);
        head.0.extend(number.to_le_bytes());
        pairs += 1;
    }
    for (key, id) in [("eos", TINY_END), ("eot", END_OF_TEXT)] {
        head.key(&format!("tokenizer.ggml.{key}_token_id"), 4);
        head.u32(id);
        pairs += 1;
    }
    head.key("tokenizer.ggml.add_bos_token", 7);
    head.0.push(0);
    let (tokens, merges) = vocabulary();
    head.list("tokenizer.ggml.tokens", 8, tokens.len());
    for token in &tokens {
        head.text(token);
    }
    head.list("tokenizer.ggml.token_type", 5, tokens.len());
    for id in 0..tokens.len() {
        head.u32(if id + specials() < tokens.len() { 1 } else { 3 });
    }
    head.list("tokenizer.ggml.merges", 8, merges.len());
    for (left, right) in &merges {
        head.text(&format!("{left} {right}"));
    }
    (pairs + 4, head)
}
