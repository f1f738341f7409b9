//! The configuration of a Hugging Face folder: config.json, generation_config.json,
//! tokenizer_config.json.

use std::path::Path;

use serde_json::Value;

use crate::config::{Experts, Family, ModelConfig, Rope, RopeScaling, full_layers};
use crate::error::{ModelError, Result};
use crate::json::{self, Fields};
use crate::tokenizer_hf::SpecialNames;

const FAMILIES: &str = "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM and Gemma3ForCausalLM are";

/// Reads the configuration of the model in `folder`.
pub(crate) fn read(folder: &Path, specials: &SpecialNames) -> Result<ModelConfig> {
    let path = folder.join("config.json");
    if !path.exists() {
        let file = "config.json".to_owned();
        return Err(ModelError::MissingFile {
            folder: folder.to_owned(),
            file,
        });
    }
    let value = json::read(&path)?;
    let fields = Fields {
        value: &value,
        path: &path,
    };
    let family = family(fields)?;
    refuse_unknown_parts(fields, family)?;

    let heads = fields.size("num_attention_heads")?;
    let hidden = fields.size("hidden_size")?;
    let layers = fields.size("num_hidden_layers")?;
    let context_length = fields.size("max_position_embeddings")?;
    let head_dim = match fields.optional_size("head_dim")? {
        Some(head_dim) => head_dim,
        None if heads == 0 => 0,
        None => hidden / heads,
    };
    let attention_bias = fields.flag("attention_bias")?.unwrap_or(false);
    let generation = folder.join("generation_config.json");
    let (sliding_window, full_layers) = sliding_window(fields, family, layers)?;
    let (rope, local_rope) = match family {
        Family::Gemma3 => gemma3_ropes(fields, context_length)?,
        _ => {
            let parameters = fields.object("rope_parameters");
            // The default of both Llama and Qwen code when the file does not say.
            let theta = fields.optional_number("rope_theta")?.unwrap_or(10_000.0);
            let scaling = parameters.or_else(|| fields.object("rope_scaling"));
            (rope(fields, scaling, theta, context_length)?, None)
        }
    };
    let config = ModelConfig {
        family,
        hidden,
        layers,
        heads,
        kv_heads: fields
            .optional_size("num_key_value_heads")?
            .unwrap_or(heads),
        head_dim,
        intermediate: fields.size(match family {
            Family::Qwen3Moe => "moe_intermediate_size",
            _ => "intermediate_size",
        })?,
        experts: experts(fields, family)?,
        vocab: fields.size("vocab_size")?,
        rms_eps: fields.number("rms_norm_eps")?,
        rope,
        local_rope: local_rope.filter(|_| sliding_window.is_some()),
        sliding_window,
        full_layers,
        query_scalar: match family {
            Family::Gemma3 => fields
                .optional_size("query_pre_attn_scalar")?
                .unwrap_or(256),
            _ => head_dim,
        },
        // What transformers takes where the file does not say.
        tie_embeddings: fields
            .flag("tie_word_embeddings")?
            .unwrap_or(family == Family::Gemma3),
        context_length,
        qkv_bias: attention_bias || family == Family::Qwen2,
        o_bias: attention_bias && family != Family::Qwen2,
        qk_norm: family.qk_norm(),
        end_ids: end_ids(fields, &generation, specials)?,
        bos_id: match specials.bos_id {
            Some(id) => Some(id),
            None if specials.says_no_bos => None,
            None => fields.ids("bos_token_id")?.first().copied(),
        },
        add_bos: specials.add_bos,
    };
    match config.flaw() {
        None => Ok(config),
        Some(flaw) => Err(ModelError::format(&path, flaw)),
    }
}

fn family(fields: Fields<'_>) -> Result<Family> {
    let named = fields
        .get("architectures")
        .and_then(|list| list.get(0))
        .and_then(Value::as_str);
    let named = named
        .or_else(|| fields.text("model_type"))
        .unwrap_or("a model that names none");
    match named {
        "LlamaForCausalLM" | "llama" => Ok(Family::Llama),
        "Qwen2ForCausalLM" | "qwen2" => Ok(Family::Qwen2),
        "Qwen3ForCausalLM" | "qwen3" => Ok(Family::Qwen3),
        "Qwen3MoeForCausalLM" | "qwen3_moe" => Ok(Family::Qwen3Moe),
        "Gemma3ForCausalLM" | "gemma3_text" => Ok(Family::Gemma3),
        "Gemma3ForConditionalGeneration" | "gemma3" => Err(ModelError::Unsupported {
            path: fields.path.to_owned(),
            what: "a Gemma 3 with its image part".to_owned(),
            hint: "its text model is: take a checkpoint of Gemma3ForCausalLM, or a GGUF file"
                .to_owned(),
        }),
        other => Err(ModelError::Unsupported {
            path: fields.path.to_owned(),
            what: format!("the architecture {other}"),
            hint: FAMILIES.to_owned(),
        }),
    }
}

/// The experts of a mixture; a model that has an ordinary MLP in some layers is refused.
fn experts(fields: Fields<'_>, family: Family) -> Result<Option<Experts>> {
    if family != Family::Qwen3Moe {
        return Ok(None);
    }
    let refuse = |what: String| {
        Err(ModelError::Unsupported {
            path: fields.path.to_owned(),
            what,
            hint: "experts in every layer are".to_owned(),
        })
    };
    if let Some(step) = fields
        .optional_size("decoder_sparse_step")?
        .filter(|s| *s != 1)
    {
        return refuse(format!("decoder_sparse_step {step}"));
    }
    match fields.get("mlp_only_layers") {
        None => {}
        Some(Value::Array(layers)) if layers.is_empty() => {}
        Some(layers) => return refuse(format!("mlp_only_layers {layers}")),
    }
    let count = match fields.optional_size("num_experts")? {
        Some(count) => count,
        None => fields.size("num_local_experts")?,
    };
    Ok(Some(Experts {
        count,
        active: fields.size("num_experts_per_tok")?,
        normalised: fields.flag("norm_topk_prob")?.unwrap_or(false),
    }))
}

/// Switches that would change the forward pass and that no supported model uses.
fn refuse_unknown_parts(fields: Fields<'_>, family: Family) -> Result<()> {
    let refuse = |what: String, hint: &str| {
        let (path, hint) = (fields.path.to_owned(), hint.to_owned());
        Err(ModelError::Unsupported { path, what, hint })
    };
    let (key, known) = match family {
        Family::Gemma3 => ("hidden_activation", "gelu_pytorch_tanh"),
        _ => ("hidden_act", "silu"),
    };
    if let Some(other) = fields.text(key).filter(|other| *other != known) {
        return refuse(format!("the activation {other}"), &format!("{known} is"));
    }
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(cap) = fields.get(key) {
            return refuse(format!("{key} {cap}"), "null, as in every Gemma 3, is");
        }
    }
    if fields.flag("use_bidirectional_attention")? == Some(true) {
        let what = "use_bidirectional_attention".to_owned();
        return refuse(what, "models that read from left to right are");
    }
    if fields.flag("mlp_bias")? == Some(true) {
        return refuse("a bias in the MLP".into(), "models without one are");
    }
    if fields.get("quantization_config").is_some() {
        let hint = "take the unquantised checkpoint, or a GGUF file";
        return refuse("a quantised Hugging Face checkpoint".into(), hint);
    }
    let parameters = fields.object("rope_parameters");
    for fields in [Some(fields), parameters].into_iter().flatten() {
        if fields
            .optional_number("partial_rotary_factor")?
            .is_some_and(|part| part != 1.0)
        {
            return refuse("rotation of a part of each head".into(), "full rotation is");
        }
    }
    Ok(())
}

/// The rotary positions of a Gemma's full layers and of its windowed ones. Both spellings: `rope_theta`, `rope_scaling` (of full
/// layers only) and `rope_local_base_freq`, and the newer `rope_parameters` by kind of layer.
fn gemma3_ropes(fields: Fields<'_>, context_length: usize) -> Result<(Rope, Option<Rope>)> {
    let parameters = fields.object("rope_parameters");
    let of = |kind| parameters.and_then(|p| p.object(kind));
    let (full, local) = (of("full_attention"), of("sliding_attention"));
    if parameters.is_some() && full.is_none() && local.is_none() {
        let reason = "rope_parameters has neither full_attention nor sliding_attention";
        return Err(ModelError::format(fields.path, reason));
    }
    let theta = fields.optional_number("rope_theta")?.unwrap_or(1_000_000.0);
    let scaling = full.or_else(|| fields.object("rope_scaling"));
    let full = rope(fields, scaling, theta, context_length)?;
    let theta = fields.optional_number("rope_local_base_freq")?;
    let local = rope(fields, local, theta.unwrap_or(10_000.0), context_length)?;
    Ok((full, Some(local)))
}

/// One set of rotary positions from `parameters` (`rope_scaling`, or the newer `rope_parameters`, which has `rope_theta` too);
/// `theta` is for where these do not say.
fn rope(
    fields: Fields<'_>,
    parameters: Option<Fields<'_>>,
    theta: f32,
    context_length: usize,
) -> Result<Rope> {
    let Some(scaling) = parameters else {
        return Ok(Rope {
            theta,
            scaling: RopeScaling::None,
        });
    };
    let theta = scaling.optional_number("rope_theta")?.unwrap_or(theta);
    let original = scaling
        .optional_size("original_max_position_embeddings")?
        .or(fields.optional_size("original_max_position_embeddings")?);
    let kind = scaling
        .text("rope_type")
        .or_else(|| scaling.text("type"))
        .unwrap_or("default");
    let scaling = match kind {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear {
            factor: scaling.number("factor")?,
        },
        "llama3" => RopeScaling::Llama3 {
            factor: scaling.number("factor")?,
            low_freq_factor: scaling.number("low_freq_factor")?,
            high_freq_factor: scaling.number("high_freq_factor")?,
            original_context: original.unwrap_or(context_length),
        },
        "yarn" => yarn(scaling, original.unwrap_or(context_length))?,
        other => {
            return Err(ModelError::Unsupported {
                path: fields.path.to_owned(),
                what: format!("rope scaling {other}"),
                hint: "default, linear, llama3 and yarn are".to_owned(),
            });
        }
    };
    Ok(Rope { theta, scaling })
}

fn yarn(scaling: Fields<'_>, original_context: usize) -> Result<RopeScaling> {
    let factor = scaling.number("factor")?;
    // YaRN §3.4: attention is sharpened by 0.1 ln(s) + 1, unless the file says otherwise.
    let magnitude = |m: f32| {
        if factor <= 1.0 {
            1.0
        } else {
            0.1 * m * factor.ln() + 1.0
        }
    };
    let mscale = scaling.optional_number("mscale")?;
    let mscale_all = scaling.optional_number("mscale_all_dim")?;
    let attention_factor = match (
        scaling.optional_number("attention_factor")?,
        mscale,
        mscale_all,
    ) {
        (Some(factor), _, _) => factor,
        (None, Some(m), Some(all)) if m != 0.0 && all != 0.0 => magnitude(m) / magnitude(all),
        _ => magnitude(1.0),
    };
    Ok(RopeScaling::Yarn {
        factor,
        original_context,
        beta_fast: scaling.optional_number("beta_fast")?.unwrap_or(32.0),
        beta_slow: scaling.optional_number("beta_slow")?.unwrap_or(1.0),
        attention_factor,
    })
}

/// The window, and the layers that do not have it although others do.
fn sliding_window(
    fields: Fields<'_>,
    family: Family,
    layers: usize,
) -> Result<(Option<usize>, Vec<usize>)> {
    if family == Family::Gemma3 {
        return gemma3_window(fields, layers);
    }
    let window = fields.optional_size("sliding_window")?;
    let on = match family {
        Family::Llama | Family::Gemma3 => window.is_some(),
        Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe => {
            fields.flag("use_sliding_window")?.unwrap_or(false)
        }
    };
    let Some(window) = window.filter(|_| on) else {
        return Ok((None, Vec::new()));
    };
    let sliding = match fields.get("layer_types").and_then(Value::as_array) {
        Some(types) => types
            .iter()
            .filter(|kind| **kind == "sliding_attention")
            .count(),
        // Qwen: layers from max_window_layers on have the window.
        None if family != Family::Llama => {
            layers.saturating_sub(fields.optional_size("max_window_layers")?.unwrap_or(0))
        }
        None => layers,
    };
    match sliding {
        0 => Ok((None, Vec::new())),
        all if all == layers => Ok((Some(window), Vec::new())),
        some => Err(ModelError::Unsupported {
            path: fields.path.to_owned(),
            what: format!("a sliding window in {some} of {layers} layers"),
            hint: "all layers or none is".to_owned(),
        }),
    }
}

/// `layer_types` by layer, or (in older files) every so many layers one without the window.
fn gemma3_window(fields: Fields<'_>, layers: usize) -> Result<(Option<usize>, Vec<usize>)> {
    let bad = |reason: String| Err(ModelError::format(fields.path, reason));
    let full = match fields.get("layer_types") {
        Some(Value::Array(types)) if types.len() == layers => {
            let known = |kind: &&Value| !(**kind == FULL || **kind == SLIDING);
            if let Some(kind) = types.iter().find(known) {
                return bad(format!(
                    "layer_types has {kind}, expected {FULL} or {SLIDING}"
                ));
            }
            (0..layers).filter(|layer| types[*layer] == FULL).collect()
        }
        Some(Value::Array(types)) => {
            let types = types.len();
            return bad(format!(
                "layer_types names {types} layers, expected {layers}"
            ));
        }
        Some(other) => return bad(format!("layer_types is {other}, expected a list")),
        None => {
            let pattern = match fields.optional_size("sliding_window_pattern")? {
                Some(pattern) => pattern,
                None => fields
                    .optional_size("_sliding_window_pattern")?
                    .unwrap_or(6),
            };
            if pattern == 0 {
                return bad("sliding_window_pattern is 0, expected 1 or more".to_owned());
            }
            full_layers(layers, pattern)
        }
    };
    if full.len() == layers {
        return Ok((None, Vec::new()));
    }
    Ok((Some(fields.size("sliding_window")?), full))
}

const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

/// The tokenizer's end token first, then those of generation_config.json and config.json.
fn end_ids(fields: Fields<'_>, generation: &Path, specials: &SpecialNames) -> Result<Vec<u32>> {
    let mut all: Vec<u32> = specials.eos_id.into_iter().collect();
    if let Some(value) = json::read_optional(generation)? {
        all.extend(
            Fields {
                value: &value,
                path: generation,
            }
            .ids("eos_token_id")?,
        );
    }
    all.extend(fields.ids("eos_token_id")?);
    let mut ids = Vec::new();
    for id in all {
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    Ok(ids)
}
