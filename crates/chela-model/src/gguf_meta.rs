//! Metadata of a GGUF file for a model that comes from a Hugging Face folder, in the keys that
//! llama.cpp's `convert_hf_to_gguf.py` writes.

use crate::config::{Family, ModelConfig, RopeScaling};
use crate::config_gguf;
use crate::error::{ModelError, Result};
use crate::gguf_write::Metadata;
use crate::model::Model;
use crate::tokenizer_write;

/// GGML's version of its block formats (`GGML_QNT_VERSION`).
pub(crate) const QUANTIZATION_VERSION: u32 = 2;

/// All pairs but the file type, and Llama 3's divisors of the rotary frequencies, which are a tensor there.
pub(crate) fn of_folder(model: &Model) -> Result<(Metadata, Option<Vec<f32>>)> {
    let folder = model.folder().unwrap_or(std::path::Path::new("."));
    let config = model.config();
    if let Some(what) = without_words(config) {
        return Err(ModelError::Unsupported {
            path: folder.join("config.json"),
            what: format!("a GGUF file of a model with {what}"),
            hint: "llama.cpp would compute other numbers; write a Hugging Face folder".to_owned(),
        });
    }
    let family = config.family.gguf();
    let mut metadata = Metadata::default();
    metadata.text("general.architecture", family);
    metadata.text("general.type", "model");
    metadata.text("general.name", model.name());
    metadata.u32("general.quantization_version", QUANTIZATION_VERSION);
    let sizes = [
        ("block_count", config.layers),
        ("context_length", config.context_length),
        ("embedding_length", config.hidden),
        ("feed_forward_length", config.intermediate),
        ("attention.head_count", config.heads),
        ("attention.head_count_kv", config.kv_heads),
        ("attention.key_length", config.head_dim),
        ("attention.value_length", config.head_dim),
        ("rope.dimension_count", config.head_dim),
        ("vocab_size", config.vocab),
    ];
    if let Some(experts) = config.experts {
        let counts = [
            ("expert_count", experts.count),
            ("expert_used_count", experts.active),
            ("expert_feed_forward_length", config.intermediate),
        ];
        for (key, count) in counts {
            metadata.u32(&format!("{family}.{key}"), count as u32);
        }
    }
    for (key, size) in sizes {
        metadata.u32(&format!("{family}.{key}"), size as u32);
    }
    metadata.f32(
        &format!("{family}.attention.layer_norm_rms_epsilon"),
        config.rms_eps,
    );
    metadata.f32(&format!("{family}.rope.freq_base"), config.rope.theta);
    if let Some(window) = config.sliding_window {
        let key = |name: &str| format!("{family}.{name}");
        metadata.u32(&key("attention.sliding_window"), window as u32);
        if let Some(pattern) = config.window_pattern() {
            metadata.u32(&key("attention.sliding_window_pattern"), pattern as u32);
        }
        if let Some(local) = &config.local_rope {
            metadata.f32(&key("rope.freq_base_swa"), local.theta);
        }
    }
    let factors = rope(config, family, &mut metadata);
    tokenizer_write::write(model, folder, &mut metadata)?;
    Ok((metadata, factors))
}

/// What llama.cpp's graphs of these architectures leave out.
fn without_words(config: &ModelConfig) -> Option<String> {
    let biases = config.qkv_bias || config.o_bias;
    match config.family {
        Family::Gemma3 => {
            let scalar = config_gguf::gemma3_query_scalar(config);
            let local = config.local_rope.as_ref();
            if config.query_scalar != scalar {
                let own = config.query_scalar;
                return Some(format!(
                    "a query_pre_attn_scalar of {own} instead of {scalar}"
                ));
            }
            if config.sliding_window.is_some() && config.window_pattern().is_none() {
                let full = &config.full_layers;
                return Some(format!("full attention in the layers {full:?} of all"));
            }
            if local.is_some_and(|rope| rope.scaling != RopeScaling::None) {
                return Some("scaled rotary positions in windowed layers".to_owned());
            }
            biases.then(|| "biases in a Gemma's attention".to_owned())
        }
        _ if config.sliding_window.is_some() => Some("a sliding window".to_owned()),
        Family::Qwen3 | Family::Qwen3Moe if biases => {
            Some("biases in a Qwen3's attention".to_owned())
        }
        _ if config.experts.is_some_and(|experts| !experts.normalised) => {
            Some("norm_topk_prob false".to_owned())
        }
        Family::Llama | Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe => None,
    }
}

fn rope(config: &ModelConfig, family: &str, metadata: &mut Metadata) -> Option<Vec<f32>> {
    let key = |name: &str| format!("{family}.rope.scaling.{name}");
    match &config.rope.scaling {
        RopeScaling::None => None,
        RopeScaling::Linear { factor } => {
            metadata.text(&key("type"), "linear");
            metadata.f32(&key("factor"), *factor);
            None
        }
        RopeScaling::Yarn {
            factor,
            original_context,
            beta_fast,
            beta_slow,
            attention_factor,
        } => {
            metadata.text(&key("type"), "yarn");
            metadata.f32(&key("factor"), *factor);
            metadata.u32(&key("original_context_length"), *original_context as u32);
            metadata.f32(&key("yarn_beta_fast"), *beta_fast);
            metadata.f32(&key("yarn_beta_slow"), *beta_slow);
            // llama.cpp multiplies what the file says by YaRN's own factor.
            let own = if *factor <= 1.0 {
                1.0
            } else {
                0.1 * factor.ln() + 1.0
            };
            metadata.f32(&key("attn_factor"), attention_factor / own);
            None
        }
        RopeScaling::Factors(factors) => Some(factors.clone()),
        RopeScaling::Llama3 { .. } => {
            let mut plain = config.rope.clone();
            plain.scaling = RopeScaling::None;
            let (plain, _) = plain.inverse_frequencies(config.head_dim);
            let (scaled, _) = config.rope.inverse_frequencies(config.head_dim);
            Some(plain.iter().zip(&scaled).map(|(p, s)| p / s).collect())
        }
    }
}
