//! The text files of a Hugging Face folder, made from what is known of a model, and the writer of
//! its weights.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tokenizers::Tokenizer;
use tokenizers::processors::template::TemplateProcessing;

use crate::config::{Family, ModelConfig, Rope, RopeScaling};
use crate::error::{ModelError, Result};
use crate::model::Model;
use crate::tensor::DType;

/// A type's name in config.json.
pub(crate) fn torch_name(dtype: DType) -> Option<&'static str> {
    match dtype {
        DType::F32 => Some("float32"),
        DType::F16 => Some("float16"),
        DType::BF16 => Some("bfloat16"),
        _ => None,
    }
}

/// config.json, in the words that every transformers since 4.43 reads. `Err`: what it has no words for.
pub(crate) fn config_json(config: &ModelConfig, dtype: DType) -> Result<Value, String> {
    let (architecture, kind) = config.family.hugging_face();
    if config.family == Family::Llama && config.sliding_window.is_some() {
        return Err("a sliding window in a Llama".to_owned());
    }
    if config.family != Family::Qwen2 && config.qkv_bias != config.o_bias {
        return Err("biases on some of the attention's projections".to_owned());
    }
    let mut json = json!({
        "architectures": [architecture],
        "model_type": kind,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
        "vocab_size": config.vocab,
        "rms_norm_eps": number(config.rms_eps),
        "rope_theta": number(config.rope.theta),
        "rope_scaling": rope_json(&config.rope, config.head_dim)?,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.context_length,
        "attention_bias": config.qkv_bias && config.family != Family::Qwen2,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.end_ids.first(),
        "torch_dtype": torch_name(dtype),
        "use_cache": true,
    });
    if let Some(experts) = config.experts {
        json["moe_intermediate_size"] = json!(config.intermediate);
        json["num_experts"] = json!(experts.count);
        json["num_experts_per_tok"] = json!(experts.active);
        json["norm_topk_prob"] = json!(experts.normalised);
        json["decoder_sparse_step"] = json!(1);
        json["mlp_only_layers"] = json!([]);
    }
    if config.family == Family::Gemma3 {
        gemma3_json(config, &mut json)?;
    } else if config.family != Family::Llama {
        json["sliding_window"] = json!(config.sliding_window);
        json["use_sliding_window"] = json!(config.sliding_window.is_some());
        // From this layer on there is a window.
        json["max_window_layers"] = json!(if config.sliding_window.is_some() {
            0
        } else {
            config.layers
        });
    }
    Ok(json)
}

/// What only a Gemma 3 says: older transformers read the pattern, newer ones the list of layers.
fn gemma3_json(config: &ModelConfig, json: &mut Value) -> Result<(), String> {
    let kind = |layer| match config.window(layer) {
        Some(_) => "sliding_attention",
        None => "full_attention",
    };
    json["hidden_activation"] = json!("gelu_pytorch_tanh");
    json["query_pre_attn_scalar"] = json!(config.query_scalar);
    json["sliding_window"] = json!(config.sliding_window);
    json["layer_types"] = (0..config.layers).map(kind).collect();
    match config.sliding_window {
        None => json["sliding_window_pattern"] = json!(1),
        Some(_) => {
            if let Some(pattern) = config.window_pattern() {
                json["sliding_window_pattern"] = json!(pattern);
            }
        }
    }
    if let Some(local) = &config.local_rope {
        if local.scaling != RopeScaling::None {
            return Err("scaled rotary positions in windowed layers".to_owned());
        }
        json["rope_local_base_freq"] = number(local.theta);
    }
    // transformers knows one activation of a Gemma by this name and reads `hidden_act` of none.
    if let Some(map) = json.as_object_mut() {
        map.remove("hidden_act");
    }
    Ok(())
}

/// The shortest decimal that reads back as this f32: 1e-5, not 9.99999974e-6.
fn number(x: f32) -> Value {
    x.to_string()
        .parse::<f64>()
        .map_or(Value::Null, Value::from)
}

fn rope_json(rope: &Rope, head_dim: usize) -> Result<Value, String> {
    Ok(match &rope.scaling {
        RopeScaling::None => Value::Null,
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": number(*factor)}),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_context,
        } => json!({
            "rope_type": "llama3",
            "factor": number(*factor),
            "low_freq_factor": number(*low_freq_factor),
            "high_freq_factor": number(*high_freq_factor),
            "original_max_position_embeddings": original_context,
        }),
        RopeScaling::Yarn {
            factor,
            original_context,
            beta_fast,
            beta_slow,
            attention_factor,
        } => json!({
            "rope_type": "yarn",
            "factor": number(*factor),
            "original_max_position_embeddings": original_context,
            "beta_fast": number(*beta_fast),
            "beta_slow": number(*beta_slow),
            "attention_factor": number(*attention_factor),
        }),
        RopeScaling::Factors(factors) => {
            let Some((factor, original)) = llama3_of(rope, head_dim, factors) else {
                return Err("rotary divisors that are not Llama 3's".to_owned());
            };
            json!({
                "rope_type": "llama3",
                "factor": number(factor),
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            })
        }
    })
}

/// The rule whose divisors a GGUF file has: every published Llama 3.x uses the bounds 1 and 4 and the length 8192, with a stretch
/// that is the largest divisor. `None` unless it gives these very numbers.
fn llama3_of(rope: &Rope, head_dim: usize, factors: &[f32]) -> Option<(f32, usize)> {
    let factor = factors.iter().copied().fold(0.0, f32::max);
    let original = 8192;
    let mut rope = rope.clone();
    let (given, _) = rope.inverse_frequencies(head_dim);
    rope.scaling = RopeScaling::Llama3 {
        factor,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: original,
    };
    let (made, _) = rope.inverse_frequencies(head_dim);
    let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-4 * a.abs();
    (given.len() == made.len() && given.iter().zip(&made).all(near)).then_some((factor, original))
}

/// The text files of a folder of this model, by name.
pub(crate) fn texts(model: &Model, dtype: DType) -> Result<Vec<(String, Vec<u8>)>> {
    match model.folder() {
        Some(from) => copied_texts(from, dtype),
        None => made_texts(model, dtype),
    }
}

/// config.json, generation_config.json, tokenizer.json and tokenizer_config.json of a model that comes from a GGUF file.
fn made_texts(model: &Model, dtype: DType) -> Result<Vec<(String, Vec<u8>)>> {
    let config = model.config();
    let unsupported = |what: String| ModelError::Unsupported {
        path: "config.json".into(),
        what: format!("a Hugging Face folder of a model with {what}"),
        hint: "write a GGUF file".to_owned(),
    };
    let json = config_json(config, dtype).map_err(unsupported)?;
    let mut texts = vec![("config.json".to_owned(), json_text(&json))];
    let mut generation = json!({ "eos_token_id": config.end_ids });
    if let Some(id) = config.bos_id {
        generation["bos_token_id"] = json!(id);
    }
    texts.push(("generation_config.json".to_owned(), json_text(&generation)));

    let name = "tokenizer.json";
    let mut tokenizer = model.tokenizer()?;
    if config.add_bos {
        open_with_bos(&mut tokenizer, model)
            .map_err(|e| ModelError::tokenizer(Path::new(name), e))?;
    }
    let text = tokenizer
        .to_string(false)
        .map_err(|e| ModelError::tokenizer(Path::new(name), e))?;
    texts.push((name.to_owned(), text.into_bytes()));

    let mut json = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": model.bos_token(),
        "eos_token": model.eos_token(),
        "add_bos_token": config.add_bos,
        "clean_up_tokenization_spaces": false,
        "model_max_length": config.context_length,
    });
    if let Some(pad) = model.pad_token() {
        json["pad_token"] = json!(pad);
    }
    match (model.chat_template(), model.tool_template()) {
        (Some(plain), Some(tools)) => {
            json["chat_template"] = json!([
                {"name": "default", "template": plain},
                {"name": "tool_use", "template": tools},
            ]);
        }
        (Some(plain), None) => json["chat_template"] = json!(plain),
        _ => {}
    }
    texts.push(("tokenizer_config.json".to_owned(), json_text(&json)));
    Ok(texts)
}

/// A GGUF file has this as a switch, a tokenizer.json as a template for one text.
fn open_with_bos(tokenizer: &mut Tokenizer, model: &Model) -> Result<(), String> {
    let (Some(token), Some(id)) = (model.bos_token(), model.config().bos_id) else {
        return Ok(());
    };
    let one = vec![token.to_owned(), "$A".to_owned()];
    let two = vec![
        token.to_owned(),
        "$A".to_owned(),
        format!("{token}:1"),
        "$B:1".to_owned(),
    ];
    let template = TemplateProcessing::builder()
        .try_single(one)
        .map_err(|e| e.to_string())?
        .try_pair(two)
        .map_err(|e| e.to_string())?
        .special_tokens(vec![(token.to_owned(), id)])
        .build()
        .map_err(|e| e.to_string())?;
    tokenizer.with_post_processor(Some(template));
    Ok(())
}

/// What of a folder belongs to the model beside its weights; the other files there are left.
const COPIED: [&str; 9] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
];

/// The text files of the folder `from`; config.json gets the new type of the weights.
fn copied_texts(from: &Path, dtype: DType) -> Result<Vec<(String, Vec<u8>)>> {
    let mut texts = Vec::new();
    for name in COPIED {
        let path = from.join(name);
        if path.exists() {
            let bytes = std::fs::read(&path).map_err(|e| ModelError::io(&path, e))?;
            texts.push((name.to_owned(), bytes));
        }
    }
    let mut config = crate::json::read(&from.join("config.json"))?;
    // transformers 5 says `dtype`, what was before it `torch_dtype`.
    let key = if config.get("dtype").is_some() {
        "dtype"
    } else {
        "torch_dtype"
    };
    config[key] = json!(torch_name(dtype));
    texts.push(("config.json".to_owned(), json_text(&config)));
    Ok(texts)
}

fn json_text(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}

/// Writes a file and syncs it.
pub(crate) fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(|e| ModelError::io(path, e))
}

/// A safetensors file whose header is written, waiting for its tensors in the order of the header.
pub(crate) struct SafetensorsWriter {
    out: BufWriter<File>,
    path: PathBuf,
    left: u64,
}

impl SafetensorsWriter {
    /// Creates the file. All tensors have one type; a single row is a vector.
    pub(crate) fn create(
        path: &Path,
        dtype: DType,
        tensors: &[(String, [usize; 2])],
    ) -> Result<Self> {
        let mut header = Map::new();
        header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
        let mut at = 0_u64;
        for (name, [rows, cols]) in tensors {
            let bytes = (rows * cols * dtype.block_bytes()) as u64;
            let shape = if *rows == 1 {
                vec![*cols]
            } else {
                vec![*rows, *cols]
            };
            let entry = json!({
                "dtype": dtype.to_string(),
                "shape": shape,
                "data_offsets": [at, at + bytes],
            });
            header.insert(name.clone(), entry);
            at += bytes;
        }
        let mut text = Value::Object(header).to_string().into_bytes();
        // The format wants the numbers to begin at a multiple of 8.
        text.resize(text.len().next_multiple_of(8), b' ');
        let file = File::create_new(path).map_err(|e| ModelError::io(path, e))?;
        let mut writer = Self {
            out: BufWriter::with_capacity(1 << 20, file),
            path: path.to_owned(),
            left: at + 8 + text.len() as u64,
        };
        writer.tensor(&(text.len() as u64).to_le_bytes())?;
        writer.tensor(&text)?;
        Ok(writer)
    }

    /// The next tensor's bytes.
    pub(crate) fn tensor(&mut self, bytes: &[u8]) -> Result<()> {
        self.left = self.left.wrapping_sub(bytes.len() as u64);
        self.out
            .write_all(bytes)
            .map_err(|e| ModelError::io(&self.path, e))
    }

    /// Writes out and syncs.
    pub(crate) fn finish(self) -> Result<()> {
        let io = |e| ModelError::io(&self.path, e);
        if self.left != 0 {
            let reason = "other bytes were written than its header says";
            return Err(ModelError::format(&self.path, reason));
        }
        let file = self.out.into_inner().map_err(|e| io(e.into_error()))?;
        file.sync_all().map_err(io)
    }
}
