//! Looks an adapter's folder over before it is imported: all that reading it would refuse, and what a person wants to see of it.

use super::{AdapterFile, Side, config::read_short};
use crate::error::weights;
use chela_core::EngineError;
use chela_model::ModelConfig;
use serde_json::Value;
use std::path::Path;

/// What an adapter is.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterInfo {
    /// r
    pub rank: usize,
    /// Numerator of the scale alpha / r; that of an rsLoRA adapter is given as the equal one of this rule.
    pub alpha: f32,
    /// PEFT's names of the changed maps.
    pub targets: Vec<String>,
    /// How the numbers are stored: `F32`, `F16`, `BF16`.
    pub dtype: String,
    /// What the trainer called the base model.
    pub base_model: Option<String>,
    /// Of the file of tensors.
    pub bytes: u64,
}

impl AdapterInfo {
    /// A warning where the configuration names clearly another base model than `model`. Only a warning: the same weights have many
    /// names (a folder, a hub id, a file), and shapes are checked.
    pub fn other_base(&self, model: &str) -> Option<String> {
        let named = self.base_model.as_deref().filter(|name| !name.is_empty())?;
        let (there, here) = (plain_name(named), plain_name(model));
        let same =
            there.is_empty() || here.is_empty() || there.contains(&here) || here.contains(&there);
        (!same).then(|| {
            format!("the adapter was made for {named}, this is {model}; its shapes fit, its numbers may not")
        })
    }
}

/// The last part of a path or hub id, in small letters and digits alone.
fn plain_name(name: &str) -> String {
    let last = name
        .trim_end_matches(['/', '\\'])
        .rsplit(['/', '\\'])
        .next();
    let last = last.unwrap_or(name).to_lowercase();
    let last = last.strip_suffix(".gguf").unwrap_or(&last);
    last.chars().filter(char::is_ascii_alphanumeric).collect()
}

/// Reads the whole folder `dir` as [`super::Adapter::read`] does; changes nothing.
pub fn inspect(dir: &Path, config: &ModelConfig) -> Result<AdapterInfo, EngineError> {
    let mut file = AdapterFile::open(config, dir)?;
    let mut kinds: Vec<String> = Vec::new();
    for name in file.file.names() {
        let kind = file.file.dtype(&name).map(|dtype| format!("{dtype:?}"));
        kinds.extend(kind.filter(|kind| !kinds.contains(kind)));
    }
    for layer in 0..config.layers {
        for target in file.targets().to_vec() {
            file.factor(layer, target, Side::A)?;
            file.factor(layer, target, Side::B)?;
        }
    }
    Ok(AdapterInfo {
        rank: file.rank(),
        alpha: file.alpha(),
        targets: file
            .targets()
            .iter()
            .map(|t| t.module().to_owned())
            .collect(),
        dtype: kinds.join(" and "),
        base_model: file.config.base_model.clone(),
        bytes: file.file.len,
    })
}

/// Real ones have up to 35 MB (Gemma's 262,144 tokens).
const LONGEST_TOKENIZER: u64 = 1 << 28;

/// Trainers put the tokenizer beside the adapter. One of another size is another model's: its ids would mean other words here.
pub(super) fn check_tokenizer(dir: &Path, config: &ModelConfig) -> Result<(), EngineError> {
    let rows = config.vocab as u64;
    // Checkpoints round the embedding up: Qwen2.5's has up to 399 rows more than tokens.
    let spare = 1024.min(rows / 16);
    for (name, size) in [
        (
            "tokenizer.json",
            tokenizer_size as fn(&Value) -> Option<u64>,
        ),
        ("tokenizer_config.json", added_size),
    ] {
        let path = dir.join(name);
        if !path.exists() {
            continue;
        }
        let refuse = |why: String| Err(weights(format!("{}: {why}", path.display())));
        let bytes = read_short(&path, LONGEST_TOKENIZER)?;
        let json: Value = match serde_json::from_slice(&bytes) {
            Ok(json) => json,
            Err(e) => return refuse(format!("not valid JSON: {e}; copy the adapter again")),
        };
        let whole = name == "tokenizer.json";
        let Some(tokens) = size(&json) else {
            continue;
        };
        if tokens > rows || (whole && tokens + spare < rows) {
            return refuse(format!(
                "made for another tokenizer: it has {tokens} tokens, this model {rows}; take an adapter of this model"
            ));
        }
    }
    Ok(())
}

/// One more than the highest id of a tokenizer.json; `None` where it names none.
fn tokenizer_size(json: &Value) -> Option<u64> {
    let vocab = match &json["model"]["vocab"] {
        // Byte-pair and word-piece vocabularies map a token to its id, unigram ones are lists.
        Value::Object(map) => map.values().filter_map(Value::as_u64).max().and_then(after),
        Value::Array(list) => Some(list.len() as u64),
        _ => None,
    };
    let added = json["added_tokens"]
        .as_array()
        .map_or(&[][..], Vec::as_slice);
    let added = added.iter().filter_map(|token| token["id"].as_u64()).max();
    vocab.max(added.and_then(after))
}

/// One more than the highest id that a tokenizer_config.json adds.
fn added_size(json: &Value) -> Option<u64> {
    let added = json["added_tokens_decoder"].as_object()?;
    added
        .keys()
        .filter_map(|id| id.parse().ok())
        .max()
        .and_then(after)
}

fn after(id: u64) -> Option<u64> {
    id.checked_add(1)
}
