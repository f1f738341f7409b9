//! A folder's tokenizer in GGUF's words: the other direction of `tokenizer_gguf`.

use std::path::Path;

use serde_json::Value;

use crate::error::{ModelError, Result};
use crate::gguf_write::Metadata;
use crate::json;
use crate::model::Model;
use crate::tokenizer_gguf::{CONTROL, LLAMA3, NORMAL, QWEN2, UNUSED, USER_DEFINED};

/// Adds the keys below `tokenizer.` for the tokenizer.json in `folder`. What llama.cpp would read otherwise is refused.
pub(crate) fn write(model: &Model, folder: &Path, metadata: &mut Metadata) -> Result<()> {
    let path = folder.join("tokenizer.json");
    let file = json::read(&path)?;
    let unsupported = |what: String| ModelError::Unsupported {
        path: path.clone(),
        what: format!("a GGUF file of this tokenizer: {what}"),
        hint: "write a Hugging Face folder, and convert it with llama.cpp's convert_hf_to_gguf.py"
            .to_owned(),
    };
    let pre = pre_name(&file).map_err(unsupported)?;
    let (tokens, types) = vocabulary(&file, model.config().vocab).map_err(unsupported)?;
    metadata.text("tokenizer.ggml.model", "gpt2");
    metadata.text("tokenizer.ggml.pre", pre);
    metadata.texts("tokenizer.ggml.tokens", &tokens);
    metadata.ints("tokenizer.ggml.token_type", &types);
    metadata.texts(
        "tokenizer.ggml.merges",
        &merges(&file).map_err(unsupported)?,
    );
    let config = model.config();
    let pad = model
        .pad_token()
        .and_then(|pad| tokens.iter().position(|token| *token == pad));
    let ids = [
        ("bos", config.bos_id),
        ("eos", config.end_ids.first().copied()),
        // llama.cpp stops at both.
        ("eot", config.end_ids.get(1).copied()),
        ("padding", pad.map(|id| id as u32)),
    ];
    for (name, id) in ids {
        if let Some(id) = id {
            metadata.u32(&format!("tokenizer.ggml.{name}_token_id"), id);
        }
    }
    metadata.flag("tokenizer.ggml.add_bos_token", config.add_bos);
    if let Some(template) = model.chat_template() {
        metadata.text("tokenizer.chat_template", &template);
    }
    if let Some(template) = model.tool_template() {
        metadata.texts("tokenizer.chat_templates", &["tool_use".to_owned()]);
        metadata.text("tokenizer.chat_template.tool_use", &template);
    }
    Ok(())
}

/// llama.cpp's name of the way the text is split before byte-pair encoding (`llama-vocab.cpp`; its converter finds it by a hash of
/// test ids, here the parts themselves are compared).
fn pre_name(file: &Value) -> Result<&'static str, String> {
    let model = &file["model"];
    let null_or = |key: &str, other: Value| model[key].is_null() || model[key] == other;
    let plain = model["type"] == "BPE"
        && null_or("byte_fallback", false.into())
        && null_or("continuing_subword_prefix", "".into())
        && null_or("end_of_word_suffix", "".into())
        && model["dropout"].is_null();
    if !plain {
        let kind = &model["type"];
        return Err(format!(
            "its kind is {kind}, plain byte-level BPE can be written"
        ));
    }
    let whole = model["ignore_merges"] == true;
    let pre = &file["pre_tokenizer"];
    let bytes = |part: &Value, regex: bool| {
        part["type"] == "ByteLevel"
            && part["add_prefix_space"] == false
            // tokenizer.json leaves it out where it is true
            && part["use_regex"].as_bool().unwrap_or(true) == regex
    };
    let digits = |part: &Value| part["type"] == "Digits" && part["individual_digits"] == true;
    let split = |part: &Value, regex: &str| {
        part["type"] == "Split"
            && part["behavior"] == "Isolated"
            && part["invert"] == false
            && part["pattern"]["Regex"] == regex
    };
    let parts = pre["pretokenizers"].as_array();
    let parts = parts.map_or(std::slice::from_ref(pre), Vec::as_slice);
    let normalizer = &file["normalizer"];
    let found = match parts {
        [one] if bytes(one, true) => ("gpt-2", false),
        [first, second] if digits(first) && bytes(second, true) => ("smollm", false),
        [first, second] if split(first, QWEN2) && bytes(second, false) => ("qwen2", false),
        [first, second] if split(first, LLAMA3) && bytes(second, false) => ("llama-bpe", true),
        _ => {
            return Err(
                "its pre-tokenizer is none of gpt-2's, smollm's, qwen2's and llama 3's".to_owned(),
            );
        }
    };
    let (name, ignores_merges) = found;
    if whole != ignores_merges {
        return Err(format!(
            "ignore_merges is {whole}, with {name} it is {ignores_merges}"
        ));
    }
    // Qwen composes characters first; llama.cpp leaves that out, as it does in the files its own converter writes.
    if !(normalizer.is_null() || (name == "qwen2" && normalizer["type"] == "NFC")) {
        return Err(format!("the normalizer {}", normalizer["type"]));
    }
    Ok(name)
}

/// Tokens in id order and their types; rows without a token get a name that no text has.
fn vocabulary(file: &Value, rows: usize) -> Result<(Vec<String>, Vec<i32>), String> {
    let mut tokens: Vec<Option<String>> = vec![None; rows];
    let mut types = vec![UNUSED; rows];
    let mut put = |token: &str, id: &Value, kind: i32| {
        let id = id.as_u64().and_then(|id| usize::try_from(id).ok());
        let Some(id) = id.filter(|id| *id < rows) else {
            return Err(format!("the id of token {token:?} is not below {rows}"));
        };
        tokens[id] = Some(token.to_owned());
        types[id] = kind;
        Ok(())
    };
    let vocab = file["model"]["vocab"].as_object();
    for (token, id) in vocab.ok_or("it has no vocabulary")? {
        put(token, id, NORMAL)?;
    }
    for added in file["added_tokens"]
        .as_array()
        .map_or(&[][..], Vec::as_slice)
    {
        let token = added["content"]
            .as_str()
            .ok_or("an added token without content")?;
        let odd = ["lstrip", "rstrip", "single_word"]
            .into_iter()
            .find(|key| added[key] == true);
        if let Some(key) = odd {
            return Err(format!("the added token {token:?} with {key}"));
        }
        let kind = if added["special"] == true {
            CONTROL
        } else {
            USER_DEFINED
        };
        put(token, &added["id"], kind)?;
    }
    let named = tokens.into_iter().enumerate();
    let tokens = named.map(|(id, token)| token.unwrap_or_else(|| format!("[PAD{id}]")));
    Ok((tokens.collect(), types))
}

/// `"a b"`, from that or from `["a", "b"]`.
fn merges(file: &Value) -> Result<Vec<String>, String> {
    let one = |merge: &Value| match merge {
        Value::String(text) => Some(text.clone()),
        Value::Array(pair) => match pair.as_slice() {
            [Value::String(a), Value::String(b)] if !a.contains(' ') => Some(format!("{a} {b}")),
            _ => None,
        },
        _ => None,
    };
    let list = file["model"]["merges"]
        .as_array()
        .ok_or("it has no merges")?;
    let merges: Option<Vec<String>> = list.iter().map(one).collect();
    merges.ok_or_else(|| "a merge that is not a pair".to_owned())
}
