//! Tiny random models, written in milliseconds, for this crate's tests and those of others.
//!
//! The same seed and specification always give the same weights, in a Hugging Face folder as in a
//! GGUF file, up to what the storage format rounds.

mod headers;
mod quantise;
mod tiny_gguf;
mod tiny_text;

use std::path::Path;

use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use crate::config::{Experts, Family, ModelConfig, Rope, RopeScaling, full_layers};
use crate::error::{ModelError, Result};
use crate::names::TensorName;
use crate::source::{Layout, ModelFiles};
use crate::tensor::DType;

pub use headers::{Place, gguf_header, safetensors_header};
pub use quantise::quantise;
pub use tiny_gguf::write_tiny_gguf;
pub use tiny_text::{TINY_END, TINY_TEMPLATE, TINY_VOCAB};

/// Sizes of a tiny model. `Default` is a Llama of 2 layers in F32.
#[derive(Debug, Clone, PartialEq)]
pub struct TinySpec {
    /// The family; Qwen2 gets biases, Qwen3 gets q/k norms, Gemma3 all it has, Qwen3Moe 6 experts of which 2 are active.
    pub family: Family,
    /// Width; a multiple of 32 for block formats.
    pub hidden: usize,
    /// Layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Width of the MLP; a multiple of 32 for block formats.
    pub intermediate: usize,
    /// Context length.
    pub context_length: usize,
    /// Is the head the embedding?
    pub tie_embeddings: bool,
    /// Sliding window of all layers; in a Gemma3 every second layer is without.
    pub sliding_window: Option<usize>,
    /// Rotary scaling: none, linear, llama3 or yarn in a folder; none in a GGUF file.
    pub rope_scaling: RopeScaling,
    /// Storage of matrices (norms and biases are F32 in GGUF files, this in folders). Folders take
    /// F32, F16, BF16; GGUF files also Q8_0, Q4_0, Q4_1.
    pub dtype: DType,
    /// Number of safetensors files.
    pub shards: usize,
}

impl Default for TinySpec {
    fn default() -> Self {
        Self {
            family: Family::Llama,
            hidden: 64,
            layers: 2,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            intermediate: 128,
            context_length: 512,
            tie_embeddings: true,
            sliding_window: None,
            rope_scaling: RopeScaling::None,
            dtype: DType::F32,
            shards: 1,
        }
    }
}

impl TinySpec {
    /// The default sizes in another family; a Gemma3 has a window of 8, experts are 32 wide.
    pub fn of(family: Family) -> Self {
        Self {
            family,
            sliding_window: (family == Family::Gemma3).then_some(8),
            intermediate: match family {
                Family::Qwen3Moe => 32,
                _ => Self::default().intermediate,
            },
            ..Self::default()
        }
    }

    /// The configuration the written model will have.
    pub fn config(&self) -> ModelConfig {
        let gemma3 = self.family == Family::Gemma3;
        let mixed = gemma3 && self.sliding_window.is_some();
        ModelConfig {
            family: self.family,
            hidden: self.hidden,
            layers: self.layers,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            intermediate: self.intermediate,
            experts: (self.family == Family::Qwen3Moe).then_some(Experts {
                count: 6,
                active: 2,
                normalised: true,
            }),
            vocab: TINY_VOCAB,
            rms_eps: 1e-5,
            rope: Rope {
                theta: if gemma3 { 1_000_000.0 } else { 10_000.0 },
                scaling: self.rope_scaling.clone(),
            },
            local_rope: mixed.then_some(Rope {
                theta: 10_000.0,
                scaling: RopeScaling::None,
            }),
            full_layers: if mixed {
                full_layers(self.layers, 2)
            } else {
                Vec::new()
            },
            query_scalar: self.head_dim,
            sliding_window: self.sliding_window,
            tie_embeddings: self.tie_embeddings,
            context_length: self.context_length,
            qkv_bias: self.family == Family::Qwen2,
            o_bias: false,
            qk_norm: self.family.qk_norm(),
            end_ids: vec![TINY_END, tiny_text::END_OF_TEXT],
            bos_id: None,
            add_bos: false,
        }
    }
}

/// SplitMix64: small, and the same on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Mean 0, variance 1: twelve uniform numbers less six, which needs no library's logarithm.
    fn normal(&mut self) -> f32 {
        let twelve = [self.next(), self.next(), self.next()];
        let parts = twelve
            .iter()
            .flat_map(|word| (0..4).map(move |i| (word >> (16 * i)) as u16));
        parts
            .map(|part| (f32::from(part) + 0.5) / 65_536.0)
            .sum::<f32>()
            - 6.0
    }
}

/// The values of one tensor, from the seed and its name alone.
pub fn tiny_values(config: &ModelConfig, name: TensorName, seed: u64) -> Vec<f32> {
    let [rows, cols] = config.shape(name).unwrap_or_default();
    let salt = name.to_string().bytes().fold(seed, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let mut random = Random(salt);
    if name.is_norm() && config.family.norm_plus_one() {
        // Few bits, so that a GGUF file, which holds 1 + w, gives back w exactly.
        let weight = |_| (0.1 * random.normal() * 4096.0).round() / 4096.0;
        return (0..rows * cols).map(weight).collect();
    }
    let (center, spread) = match rows {
        _ if name.is_norm() => (1.0, 0.1),
        1 => (0.0, 0.1),
        // Keeps the size of what is multiplied.
        _ => (0.0, 1.0 / (cols as f32).sqrt()),
    };
    (0..rows * cols)
        .map(|_| center + spread * random.normal())
        .collect()
}

/// Writes a Hugging Face folder with random weights, a byte-level tokenizer of [`TINY_VOCAB`]
/// tokens, and a ChatML template. The end token is [`TINY_END`], `<|im_end|>`.
pub fn write_tiny_llama(dir: &Path, seed: u64, spec: &TinySpec) -> Result<ModelFiles> {
    let config = spec.config();
    let io = |e| ModelError::io(dir, e);
    std::fs::create_dir_all(dir).map_err(io)?;
    let write_json = |file: &str, value: &Value| {
        let path = dir.join(file);
        std::fs::write(&path, format!("{value:#}")).map_err(|e| ModelError::io(&path, e))
    };
    write_json("config.json", &config_json(&config))?;
    write_json(
        "generation_config.json",
        &json!({ "eos_token_id": config.end_ids }),
    )?;
    write_json("tokenizer_config.json", &tiny_text::tokenizer_config())?;
    std::fs::write(dir.join("chat_template.jinja"), TINY_TEMPLATE).map_err(io)?;
    tiny_text::write_tokenizer(&dir.join("tokenizer.json"))?;
    write_shards(dir, seed, spec)?;
    let name = dir
        .file_name()
        .map_or("tiny".into(), |name| name.to_string_lossy());
    Ok(ModelFiles {
        name: name.into_owned(),
        layout: Layout::Folder(dir.to_owned()),
    })
}

fn config_json(config: &ModelConfig) -> Value {
    let (architecture, kind) = config.family.hugging_face();
    let mut json = json!({
        "architectures": [architecture],
        "model_type": kind,
        "hidden_act": "silu",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config.query_scalar,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
        "vocab_size": config.vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": config.rope.theta,
        "rope_scaling": rope_json(&config.rope.scaling),
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window.is_some(),
        "max_window_layers": 0,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.context_length,
        "eos_token_id": config.end_ids[0],
    });
    if let Some(pattern) = config.window_pattern() {
        json["sliding_window_pattern"] = json!(config.sliding_window.map_or(1, |_| pattern));
    }
    if let Some(experts) = config.experts {
        json["moe_intermediate_size"] = json!(config.intermediate);
        json["num_experts"] = json!(experts.count);
        json["num_experts_per_tok"] = json!(experts.active);
        json["norm_topk_prob"] = json!(experts.normalised);
    }
    if let Some(local) = &config.local_rope {
        json["rope_local_base_freq"] = json!(local.theta);
    }
    json
}

fn rope_json(scaling: &RopeScaling) -> Value {
    match scaling {
        // A folder cannot say these factors; the model is written without them.
        RopeScaling::None | RopeScaling::Factors(_) => Value::Null,
        RopeScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_context,
        } => {
            json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_context,
            })
        }
        RopeScaling::Yarn {
            factor,
            original_context,
            beta_fast,
            beta_slow,
            attention_factor,
        } => {
            json!({
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original_context,
                "beta_fast": beta_fast,
                "beta_slow": beta_slow,
                "attention_factor": attention_factor,
            })
        }
    }
}

fn write_shards(dir: &Path, seed: u64, spec: &TinySpec) -> Result<()> {
    let config = spec.config();
    let dtype = match spec.dtype {
        DType::F32 => safetensors::Dtype::F32,
        DType::F16 => safetensors::Dtype::F16,
        DType::BF16 => safetensors::Dtype::BF16,
        other => {
            return Err(ModelError::format(
                dir,
                format!("no safetensors form of {other}"),
            ));
        }
    };
    let mut tensors: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
    for name in config.tensor_names() {
        let mut shape = config.shape(name).unwrap_or_default();
        let bytes = quantise(spec.dtype, &tiny_values(&config, name, seed))?;
        let parts = name.hugging_face_parts(&config);
        shape[0] /= parts.len();
        let shape = if shape[0] == 1 {
            vec![shape[1]]
        } else {
            shape.to_vec()
        };
        let each = bytes.chunks(bytes.len() / parts.len());
        for (part, bytes) in parts.into_iter().zip(each) {
            tensors.push((part, shape.clone(), bytes.to_vec()));
        }
    }
    let shards = spec.shards.max(1);
    let mut map = serde_json::Map::new();
    for (index, chunk) in tensors.chunks(tensors.len().div_ceil(shards)).enumerate() {
        let file = match shards {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{shards:05}.safetensors", index + 1),
        };
        let path = dir.join(&file);
        let bad = |e: safetensors::SafeTensorError| ModelError::format(&path, e.to_string());
        let mut views = Vec::new();
        for (name, shape, bytes) in chunk {
            views.push((
                name,
                TensorView::new(dtype, shape.clone(), bytes).map_err(bad)?,
            ));
            map.insert(name.clone(), json!(file));
        }
        safetensors::serialize_to_file(views, None, &path).map_err(bad)?;
    }
    if shards > 1 {
        let path = dir.join("model.safetensors.index.json");
        let index = json!({ "weight_map": map }).to_string();
        std::fs::write(&path, index).map_err(|e| ModelError::io(&path, e))?;
    }
    Ok(())
}
