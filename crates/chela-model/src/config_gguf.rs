//! The configuration a GGUF file carries in its metadata.

use std::path::Path;

use crate::config::{Experts, Family, ModelConfig, Rope, RopeScaling, full_layers};
use crate::error::{ModelError, Result};
use crate::gguf::Gguf;

/// Tokens that end a reply wherever they exist. GGUF files name one or two end tokens, the
/// checkpoints they were made from often more (in generation_config.json, which is not carried).
const END_TOKENS: [&str; 7] = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
];

/// Reads the configuration from the header of the file at `path`. `factors` are the values of
/// `rope_freqs.weight` when the file has that tensor.
pub(crate) fn read(gguf: &Gguf, path: &Path, factors: Option<Vec<f32>>) -> Result<ModelConfig> {
    let named = gguf
        .text("general.architecture")
        .unwrap_or("a file that names none");
    let family = match named {
        "llama" => Family::Llama,
        "qwen2" => Family::Qwen2,
        "qwen3" => Family::Qwen3,
        "gemma3" => Family::Gemma3,
        "qwen3moe" => Family::Qwen3Moe,
        other => {
            return Err(unsupported(
                path,
                format!("the architecture {other}"),
                "llama, qwen2, qwen3, qwen3moe and gemma3 are",
            ));
        }
    };
    let keys = Keys {
        gguf,
        path,
        family: named,
    };
    let experts = match family {
        Family::Qwen3Moe => Some(Experts {
            count: keys.size("expert_count")?,
            active: keys.size("expert_used_count")?,
            // GGUF has no key for it, llama.cpp always does so.
            normalised: true,
        }),
        _ => None,
    };
    let mixed = keys.optional_size("expert_count");
    if let Some(count) = mixed.filter(|count| *count > 0 && experts.is_none()) {
        let what = format!("a {named} with {count} experts");
        return Err(unsupported(
            path,
            what,
            "a mixture of experts in qwen3moe is",
        ));
    }
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(cap) = keys.optional_number(key).filter(|cap| *cap != 0.0) {
            let what = format!("{named}.{key} {cap}");
            return Err(unsupported(path, what, "a model without it is"));
        }
    }
    let tokens = gguf.texts("tokenizer.ggml.tokens").unwrap_or_default();
    let embed = gguf.tensors.get("token_embd.weight");
    let (hidden, heads) = (
        keys.size("embedding_length")?,
        keys.size("attention.head_count")?,
    );
    let plain_head_dim = hidden.checked_div(heads).unwrap_or(0);
    let head_dim = keys
        .optional_size("attention.key_length")
        .unwrap_or(plain_head_dim);
    let rotated = keys
        .optional_size("rope.dimension_count")
        .unwrap_or(head_dim);
    if rotated != head_dim
        || keys
            .optional_size("attention.value_length")
            .is_some_and(|v| v != head_dim)
    {
        let what = format!("rotation of {rotated} of {head_dim} dimensions, or unequal heads");
        return Err(unsupported(path, what, "full rotation is"));
    }
    let context_length = keys.size("context_length")?;
    let bias = |name: &str| {
        gguf.tensors
            .contains_key(&format!("blk.0.attn_{name}.bias"))
    };
    let layers = keys.size("block_count")?;
    let (sliding_window, full_layers) = window(keys, family, layers)?;
    let local_theta = keys.optional_number("rope.freq_base_swa");
    let mut config = ModelConfig {
        family,
        hidden,
        layers,
        heads,
        kv_heads: keys
            .optional_size("attention.head_count_kv")
            .unwrap_or(heads),
        head_dim,
        intermediate: keys.size(match family {
            Family::Qwen3Moe => "expert_feed_forward_length",
            _ => "feed_forward_length",
        })?,
        experts,
        vocab: embed.map_or(tokens.len(), |tensor| tensor.shape[0]),
        rms_eps: keys.number("attention.layer_norm_rms_epsilon")?,
        rope: rope(keys, context_length, factors)?,
        local_rope: (family == Family::Gemma3 && sliding_window.is_some()).then(|| Rope {
            theta: local_theta.unwrap_or(10_000.0),
            scaling: RopeScaling::None,
        }),
        sliding_window,
        full_layers,
        query_scalar: head_dim,
        tie_embeddings: !gguf.tensors.contains_key("output.weight"),
        context_length,
        qkv_bias: bias("q"),
        o_bias: bias("output"),
        qk_norm: family.qk_norm(),
        end_ids: end_ids(gguf, tokens),
        bos_id: token_id(gguf, "tokenizer.ggml.bos_token_id"),
        add_bos: add_bos(gguf),
    };
    if family == Family::Gemma3 {
        config.query_scalar = gemma3_query_scalar(&config);
    }
    match config.flaw() {
        None => Ok(config),
        Some(flaw) => Err(ModelError::format(path, flaw)),
    }
}

/// GGUF has no key for it: llama.cpp knows the one Gemma 3 (27B) that differs from the others by its number of layers.
pub(crate) fn gemma3_query_scalar(config: &ModelConfig) -> usize {
    match config.layers {
        62 => config.hidden.checked_div(config.heads).unwrap_or(0),
        _ => config.head_dim,
    }
}

/// The window, and the layers of a Gemma that do not have it: every sixth, unless the file says otherwise.
fn window(keys: Keys<'_>, family: Family, layers: usize) -> Result<(Option<usize>, Vec<usize>)> {
    let window = keys.optional_size("attention.sliding_window");
    let Some(window) = window.filter(|w| *w > 0) else {
        return Ok((None, Vec::new()));
    };
    if family != Family::Gemma3 {
        return Ok((Some(window), Vec::new()));
    }
    let key = "attention.sliding_window_pattern";
    let pattern = match keys.gguf.values.get(&keys.key(key)) {
        None => 6,
        Some(_) => match keys.optional_size(key).filter(|pattern| *pattern > 0) {
            Some(pattern) => pattern,
            None => {
                let what = format!("a {} that is not a whole number above 0", keys.key(key));
                return Err(unsupported(keys.path, what, "every so many layers is"));
            }
        },
    };
    Ok(match pattern {
        1 => (None, Vec::new()),
        _ => (Some(window), full_layers(layers, pattern)),
    })
}

fn unsupported(path: &Path, what: String, hint: &str) -> ModelError {
    ModelError::Unsupported {
        path: path.to_owned(),
        what,
        hint: hint.to_owned(),
    }
}

/// Metadata below the architecture's prefix.
#[derive(Clone, Copy)]
struct Keys<'a> {
    gguf: &'a Gguf,
    path: &'a Path,
    family: &'a str,
}

impl Keys<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.family)
    }

    fn missing(&self, key: &str) -> ModelError {
        let key = self.key(key);
        ModelError::format(self.path, format!("the metadata has no usable {key}"))
    }

    fn size(&self, key: &str) -> Result<usize> {
        self.optional_size(key).ok_or_else(|| self.missing(key))
    }

    fn optional_size(&self, key: &str) -> Option<usize> {
        self.gguf.size(&self.key(key))
    }

    fn number(&self, key: &str) -> Result<f32> {
        self.gguf
            .float(&self.key(key))
            .ok_or_else(|| self.missing(key))
    }

    fn optional_number(&self, key: &str) -> Option<f32> {
        self.gguf.float(&self.key(key))
    }
}

fn rope(keys: Keys<'_>, context_length: usize, factors: Option<Vec<f32>>) -> Result<Rope> {
    let theta = keys.optional_number("rope.freq_base").unwrap_or(10_000.0);
    if let Some(factors) = factors {
        return Ok(Rope {
            theta,
            scaling: RopeScaling::Factors(factors),
        });
    }
    let original = keys.optional_size("rope.scaling.original_context_length");
    let scaling = match keys.gguf.text(&keys.key("rope.scaling.type")) {
        None | Some("none") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear {
            factor: keys.number("rope.scaling.factor")?,
        },
        Some("yarn") => {
            let factor = keys.number("rope.scaling.factor")?;
            let sharpen = if factor <= 1.0 {
                1.0
            } else {
                0.1 * factor.ln() + 1.0
            };
            RopeScaling::Yarn {
                factor,
                original_context: original.unwrap_or(context_length),
                beta_fast: keys
                    .optional_number("rope.scaling.yarn_beta_fast")
                    .unwrap_or(32.0),
                beta_slow: keys
                    .optional_number("rope.scaling.yarn_beta_slow")
                    .unwrap_or(1.0),
                // llama.cpp multiplies what the file says by YaRN's own factor.
                attention_factor: sharpen
                    * keys
                        .optional_number("rope.scaling.attn_factor")
                        .unwrap_or(1.0),
            }
        }
        Some(other) => {
            let what = format!("rope scaling {other}");
            return Err(unsupported(keys.path, what, "none, linear and yarn are"));
        }
    };
    Ok(Rope { theta, scaling })
}

/// A token id in the metadata; -1 and the like mean "none".
pub(crate) fn token_id(gguf: &Gguf, key: &str) -> Option<u32> {
    gguf.int(key)
        .and_then(|id| u32::try_from(id).ok())
        .filter(|id| *id != u32::MAX)
}

fn end_ids(gguf: &Gguf, tokens: &[String]) -> Vec<u32> {
    let named = ["eos", "eot", "eom"].map(|name| format!("tokenizer.ggml.{name}_token_id"));
    let mut ids: Vec<u32> = Vec::new();
    let known = END_TOKENS.iter().filter_map(|end| {
        let id = tokens.iter().position(|token| token == end)?;
        // A normal word that happens to look like one (type 1) ends nothing.
        let kind = gguf
            .ints("tokenizer.ggml.token_type")
            .and_then(|types| types.get(id));
        kind.is_none_or(|kind| *kind == 3).then_some(id as u32)
    });
    for id in named
        .iter()
        .filter_map(|key| token_id(gguf, key))
        .chain(known)
    {
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    ids
}

/// When a file does not say, only Llama 3's tokenizer opens every text with its first token.
fn add_bos(gguf: &Gguf) -> bool {
    gguf.flag("tokenizer.ggml.add_bos_token")
        .unwrap_or_else(|| {
            matches!(
                gguf.text("tokenizer.ggml.pre"),
                Some("llama-bpe" | "llama3" | "llama-v3")
            )
        })
}
