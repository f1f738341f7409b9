//! Tokenizer and chat template of a Hugging Face folder.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::Tokenizer;

use crate::error::{ModelError, Result};
use crate::json::{self, Fields};

/// Special tokens as a folder's files name them.
#[derive(Debug, Clone, Default)]
pub(crate) struct SpecialNames {
    /// The end token.
    pub eos_token: Option<String>,
    /// Its id.
    pub eos_id: Option<u32>,
    /// The opening token.
    pub bos_token: Option<String>,
    /// Its id.
    pub bos_id: Option<u32>,
    /// What fills up shorter texts of a batch.
    pub pad_token: Option<String>,
    /// tokenizer_config.json says `"bos_token": null`, whatever config.json says.
    pub says_no_bos: bool,
    /// Plain texts begin with the opening token.
    pub add_bos: bool,
    /// Every special token.
    pub all: Vec<(u32, String)>,
    /// The chat template.
    pub template: Option<String>,
    /// The chat template for requests with tools, where that is another one.
    pub tool_template: Option<String>,
}

/// What is read of tokenizer.json without building its vocabulary.
#[derive(Deserialize)]
struct TokenizerHead {
    #[serde(default)]
    added_tokens: Vec<AddedTokenHead>,
    #[serde(default)]
    post_processor: Option<Value>,
}

#[derive(Deserialize)]
struct AddedTokenHead {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
}

impl SpecialNames {
    /// Reads them from the folder's files.
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("tokenizer.json");
        if !path.exists() {
            let file = "tokenizer.json".to_owned();
            return Err(ModelError::MissingFile {
                folder: folder.to_owned(),
                file,
            });
        }
        let bytes = std::fs::read(&path).map_err(|e| ModelError::io(&path, e))?;
        let head: TokenizerHead =
            serde_json::from_slice(&bytes).map_err(|e| ModelError::tokenizer(&path, e))?;
        let id_of = |token: &str| {
            head.added_tokens
                .iter()
                .find(|added| added.content == token)
                .map(|added| added.id)
        };
        let mut names = Self {
            add_bos: opens_with_special(head.post_processor.as_ref()),
            ..Self::default()
        };
        let specials = head.added_tokens.iter().filter(|added| added.special);
        names.all = specials
            .map(|added| (added.id, added.content.clone()))
            .collect();
        let config_path = folder.join("tokenizer_config.json");
        if let Some(config) = json::read_optional(&config_path)? {
            let fields = Fields {
                value: &config,
                path: &config_path,
            };
            names.eos_token = token_text(&config, "eos_token");
            names.bos_token = token_text(&config, "bos_token");
            names.pad_token = token_text(&config, "pad_token");
            names.says_no_bos = config.get("bos_token").is_some_and(Value::is_null);
            names.eos_id = names.eos_token.as_deref().and_then(id_of);
            names.bos_id = names.bos_token.as_deref().and_then(id_of);
            if let Some(add) = fields.flag("add_bos_token")? {
                names.add_bos = add;
            }
            (names.template, names.tool_template) = templates(&config);
        }
        names.add_bos &= !names.says_no_bos;
        let jinja = folder.join("chat_template.jinja");
        if jinja.exists() {
            let text = std::fs::read_to_string(&jinja).map_err(|e| ModelError::io(&jinja, e))?;
            names.template = Some(text);
            names.tool_template = None;
        }
        Ok(names)
    }
}

/// `"<s>"` or `{"content": "<s>", …}`.
fn token_text(config: &Value, key: &str) -> Option<String> {
    let value = config.get(key)?;
    value
        .as_str()
        .or_else(|| value.get("content")?.as_str())
        .map(str::to_owned)
}

/// Does the tokenizer's template for one text begin with a special token?
fn opens_with_special(post_processor: Option<&Value>) -> bool {
    let Some(processor) = post_processor else {
        return false;
    };
    if let Some(list) = processor.get("processors").and_then(Value::as_array) {
        return list.iter().any(|inner| opens_with_special(Some(inner)));
    }
    let first = processor.get("single").and_then(|single| single.get(0));
    first.is_some_and(|first| first.get("SpecialToken").is_some())
}

/// One template, or a list of named ones.
fn templates(config: &Value) -> (Option<String>, Option<String>) {
    match config.get("chat_template") {
        Some(Value::String(text)) => (Some(text.clone()), None),
        Some(Value::Array(list)) => {
            let named = |name: &str| {
                let entry = list.iter().find(|entry| entry["name"] == name)?;
                entry["template"].as_str().map(str::to_owned)
            };
            let tools = named("tool_use");
            (named("default").or_else(|| tools.clone()), tools)
        }
        _ => (None, None),
    }
}

/// Builds the tokenizer of `folder`. Its own truncation and padding are dropped: nothing here may
/// shorten a text without saying so.
pub(crate) fn tokenizer(folder: &Path) -> Result<Tokenizer> {
    let path = folder.join("tokenizer.json");
    let bad = |e: tokenizers::Error| ModelError::tokenizer(&path, e);
    let mut tokenizer = Tokenizer::from_file(&path).map_err(bad)?;
    tokenizer.with_truncation(None).map_err(bad)?;
    tokenizer.with_padding(None);
    Ok(tokenizer)
}
