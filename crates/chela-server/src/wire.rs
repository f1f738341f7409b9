//! Reading a JSON body field by field, so that a refusal can name the field, and the three lists: fields honoured, fields refused,
//! and all others, which have no effect.

use crate::problem::Problem;
use axum::http::StatusCode;
use serde_json::{Map, Value};

/// Fields of a chat completion that do something.
pub(crate) const CHAT_HONOURED: &[&str] = &[
    "model",
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "stream",
    "stream_options",
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "seed",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "logprobs",
    "top_logprobs",
    "user",
    "prompt_cache_key",
    "previous_response_id",
    "metadata",
    "session_id",
    "turn_type",
    "session_done",
];

/// Fields of a message request that do something.
pub(crate) const MESSAGES_HONOURED: &[&str] = &[
    "model",
    "messages",
    "system",
    "tools",
    "tool_choice",
    "thinking",
    "output_config",
    "output_format",
    "chat_template_kwargs",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "stop_sequences",
    "metadata",
    "session_id",
    "turn_type",
    "session_done",
];

/// Fields of a response request that do something, or that ask for what is done anyway.
pub(crate) const RESPONSES_HONOURED: &[&str] = &[
    "model",
    "input",
    "instructions",
    "previous_response_id",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "text",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_output_tokens",
    "metadata",
    "store",
    "user",
    "prompt_cache_key",
    "session_id",
    "turn_type",
    "session_done",
];

/// Fields of a text completion that do something.
pub(crate) const TEXT_HONOURED: &[&str] = &[
    "model",
    "prompt",
    "echo",
    "stream",
    "stream_options",
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "seed",
    "max_tokens",
    "stop",
    "logprobs",
];

/// Fields that are refused, unless their value asks for nothing, because without them the reply would mean something else;
/// each with what can be done instead. Any field on no list has no effect and is named in `x-chela-ignored`.
const REFUSED: &[(&str, &str)] = &[
    (
        "response_format",
        "use it in a chat completion, or text.format in a response",
    ),
    ("modalities", "only [\"text\"] is possible"),
    ("audio", "replies are text"),
    ("functions", "use tools"),
    ("function_call", "use tools and tool_choice"),
    ("web_search_options", "offer the search as a tool"),
    (
        "repetition_penalty",
        "only 1 is possible; use frequency_penalty or presence_penalty",
    ),
    ("min_tokens", "only 0 is possible"),
    ("ignore_eos", "only false is possible"),
    ("stop_token_ids", "use stop"),
    ("bad_words", "use logit_bias"),
    ("guided_json", "use response_format of a chat completion"),
    ("guided_regex", "use it in a chat completion"),
    ("guided_choice", "use it in a chat completion"),
    ("guided_grammar", "use guided_regex or response_format"),
    (
        "structured_outputs",
        "use response_format, guided_regex or guided_choice",
    ),
    ("grammar", "use guided_regex or response_format"),
    ("json_schema", "use response_format"),
    (
        "prompt_logprobs",
        "use /v1/completions with echo and logprobs",
    ),
    (
        "conversation",
        "use previous_response_id, or send the items",
    ),
    ("prompt", "send the text in the conversation"),
    ("background", "only false is possible"),
    ("use_beam_search", "only false is possible"),
    ("best_of", "only 1 is possible; use n"),
    ("suffix", "a text cannot be filled in the middle"),
    ("chat_template", "the model's own template is used"),
    ("documents", "put them into a message"),
    ("continue_final_message", "only false is possible"),
    ("add_generation_prompt", "only true is possible"),
    ("skip_special_tokens", "only true is possible"),
];

/// Values of refused fields that change nothing.
fn asks_for_nothing(name: &str, value: &Value) -> bool {
    match name {
        "response_format" => value.get("type").and_then(Value::as_str) == Some("text"),
        "modalities" => value
            .as_array()
            .is_some_and(|all| all.iter().all(|m| m.as_str() == Some("text"))),
        "function_call" => matches!(value.as_str(), Some("none" | "auto")),
        "repetition_penalty" | "best_of" => value.as_f64() == Some(1.0),
        "min_tokens" | "prompt_logprobs" => value.as_f64() == Some(0.0),
        "ignore_eos" | "use_beam_search" | "continue_final_message" | "background" => {
            value == &Value::Bool(false)
        }
        "add_generation_prompt" | "skip_special_tokens" => value == &Value::Bool(true),
        "suffix" => value.as_str() == Some(""),
        _ => value.as_array().is_some_and(Vec::is_empty),
    }
}

/// A prompt of a text completion.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum PromptText {
    Text(String),
    Ids(Vec<chela_core::TokenId>),
}

/// A body that is an object.
pub(crate) struct Fields(Map<String, Value>);

pub(crate) fn invalid(field: impl Into<String>, message: impl std::fmt::Display) -> Problem {
    let field = field.into();
    Problem {
        param: Some(field.clone()),
        ..Problem::new(StatusCode::BAD_REQUEST, format!("{field}: {message}"))
    }
}

fn malformed(error: &serde_json::Error) -> Problem {
    // Half of a UTF-16 pair is what JavaScript leaves when it cuts a string.
    let said = error.to_string();
    let message = if said.contains("surrogate") || said.contains("hex escape") {
        format!(
            "the body holds a broken \\u escape or half of a UTF-16 pair, which is no text: {error}"
        )
    } else {
        format!("the body is not valid JSON: {error}")
    };
    Problem::new(StatusCode::BAD_REQUEST, message).code("invalid_json")
}

impl Fields {
    pub(crate) fn parse(body: &[u8]) -> Result<Self, Problem> {
        let value: Value = serde_json::from_slice(body).map_err(|e| malformed(&e))?;
        match value {
            Value::Object(map) => Ok(Self(map)),
            _ => Err(Problem::new(
                StatusCode::BAD_REQUEST,
                "the body must be a JSON object",
            )),
        }
    }

    /// A field that is there and not null.
    pub(crate) fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|v| !v.is_null())
    }

    /// An object with nothing in it.
    pub(crate) fn none() -> Self {
        Self(Map::new())
    }

    /// Names the fields without effect, or refuses what must not be ignored.
    pub(crate) fn without_effect(&self, honoured: &[&str]) -> Result<Vec<String>, Problem> {
        let mut ignored = Vec::new();
        for (name, value) in self
            .0
            .iter()
            .filter(|(n, v)| !v.is_null() && !honoured.contains(&n.as_str()))
        {
            match REFUSED.iter().find(|(refused, _)| refused == name) {
                Some(_) if asks_for_nothing(name, value) => {}
                Some((_, instead)) => {
                    return Err(invalid(
                        name.as_str(),
                        format!("this is not supported: {instead}"),
                    ));
                }
                None => ignored.push(name.clone()),
            }
        }
        Ok(ignored)
    }

    pub(crate) fn object(&self, name: &str) -> Result<Option<&Map<String, Value>>, Problem> {
        self.get(name)
            .map(|v| {
                v.as_object()
                    .ok_or_else(|| invalid(name, "must be an object"))
            })
            .transpose()
    }

    /// A text that is neither absent nor blank, trimmed.
    pub(crate) fn filled(&self, name: &str) -> Result<Option<&str>, Problem> {
        Ok(self.text(name)?.map(str::trim).filter(|t| !t.is_empty()))
    }

    pub(crate) fn text(&self, name: &str) -> Result<Option<&str>, Problem> {
        self.get(name)
            .map(|v| v.as_str().ok_or_else(|| invalid(name, "must be a string")))
            .transpose()
    }

    pub(crate) fn flag(&self, name: &str) -> Result<bool, Problem> {
        self.get(name).map_or(Ok(false), |v| {
            v.as_bool()
                .ok_or_else(|| invalid(name, "must be true or false"))
        })
    }

    /// A finite number within bounds.
    pub(crate) fn number(&self, name: &str, low: f64, high: f64) -> Result<Option<f32>, Problem> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        match value.as_f64() {
            Some(n) if n.is_finite() && n >= low && n <= high => Ok(Some(n as f32)),
            Some(n) => Err(invalid(
                name,
                format!("{n} must be between {low} and {high}"),
            )),
            None => Err(invalid(name, "must be a number")),
        }
    }

    pub(crate) fn integer(&self, name: &str, low: i64, high: i64) -> Result<Option<i64>, Problem> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        match value.as_i64() {
            Some(n) if n >= low && n <= high => Ok(Some(n)),
            Some(n) if high == i64::MAX => {
                Err(invalid(name, format!("{n} must be at least {low}")))
            }
            Some(n) => Err(invalid(
                name,
                format!("{n} must be between {low} and {high}"),
            )),
            None => Err(invalid(name, "must be an integer")),
        }
    }
}
