//! A text completion as asked for.

use super::{
    sampling::{MOST_TOP, choices, sampling},
    streaming,
};
use crate::{
    problem::Problem,
    wire::{Fields, PromptText, TEXT_HONOURED, invalid},
};
use chela_core::{SamplingRequest, TokenId};
use serde_json::Value;

/// OpenAI's default on this route.
const DEFAULT_MAX_TOKENS: i64 = 16;
const MOST_REPLIES: usize = 64;

/// What is asked.
#[derive(Debug)]
pub(crate) struct TextAsked {
    pub(crate) model: String,
    pub(crate) prompts: Vec<PromptText>,
    /// `max_tokens` is always there; 0 = the prompt is only read.
    pub(crate) sampling: SamplingRequest,
    /// Replies to each prompt.
    pub(crate) choices: usize,
    pub(crate) echo: bool,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) ignored: Vec<String>,
}

/// Reads a text completion.
pub(crate) fn text(body: &[u8], vocabulary: usize) -> Result<TextAsked, Problem> {
    let fields = Fields::parse(body)?;
    let ignored = fields.without_effect(TEXT_HONOURED)?;
    let prompts = prompts(&fields, vocabulary)?;
    let echo = fields.flag("echo")?;
    let most = fields
        .integer("max_tokens", 0, i64::MAX)?
        .unwrap_or(DEFAULT_MAX_TOKENS);
    if most == 0 && !echo {
        return Err(invalid(
            "max_tokens",
            "0 asks for nothing, except with echo: true",
        ));
    }
    let top_logprobs = match fields.get("logprobs") {
        // As chat completions spell it.
        Some(Value::Bool(asked)) => asked.then_some(0),
        _ => fields.integer("logprobs", 0, MOST_TOP)?.map(|n| n as u8),
    };
    let choices = choices(&fields)?;
    if prompts.len() * choices > MOST_REPLIES {
        return Err(invalid(
            "prompt",
            format!("more than {MOST_REPLIES} replies in one request"),
        ));
    }
    let max_tokens = Some(most as usize);
    let sampling = sampling(&fields, vocabulary)?;
    let (stream, include_usage) = streaming(&fields)?;
    Ok(TextAsked {
        model: fields.text("model")?.unwrap_or_default().to_owned(),
        prompts,
        sampling: SamplingRequest {
            max_tokens,
            top_logprobs,
            ..sampling
        },
        choices,
        echo,
        stream,
        include_usage,
        ignored,
    })
}

/// A text, token ids, or a list of either.
fn prompts(fields: &Fields, vocabulary: usize) -> Result<Vec<PromptText>, Problem> {
    let list = match fields.get("prompt") {
        None => return Err(invalid("prompt", "is missing")),
        Some(Value::Array(list)) if !list.is_empty() => list,
        Some(one) => return Ok(vec![prompt(one, "prompt", vocabulary)?]),
    };
    if list.iter().all(Value::is_number) {
        return Ok(vec![ids(list, "prompt", vocabulary)?]);
    }
    list.iter()
        .enumerate()
        .map(|(i, one)| prompt(one, &format!("prompt[{i}]"), vocabulary))
        .collect()
}

fn prompt(value: &Value, at: &str, vocabulary: usize) -> Result<PromptText, Problem> {
    match value {
        Value::String(text) if !text.is_empty() => Ok(PromptText::Text(text.clone())),
        Value::Array(list) if !list.is_empty() => ids(list, at, vocabulary),
        Value::String(_) | Value::Array(_) => Err(invalid(at, "is empty")),
        _ => Err(invalid(at, "must be a text or a list of token ids")),
    }
}

fn ids(list: &[Value], at: &str, vocabulary: usize) -> Result<PromptText, Problem> {
    let mut ids = Vec::with_capacity(list.len());
    for (i, value) in list.iter().enumerate() {
        let id = value.as_u64().filter(|id| (*id as usize) < vocabulary);
        let id = id
            .and_then(|id| TokenId::try_from(id).ok())
            .ok_or_else(|| {
                invalid(
                    format!("{at}[{i}]"),
                    format!("{value} is no token id below {vocabulary}"),
                )
            })?;
        ids.push(id);
    }
    Ok(PromptText::Ids(ids))
}
