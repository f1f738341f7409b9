//! Reading a JSON body field by field, so that a refusal can name the field, and the three lists of chat completions.

use crate::problem::Problem;
use axum::http::StatusCode;
use serde_json::{Map, Value};

/// Fields of a chat completion that are honoured.
pub(crate) const HONOURED: &[&str] = &[
    "model",
    "messages",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "user",
    "prompt_cache_key",
    "metadata",
    "session_id",
    "turn_type",
    "session_done",
    "response_format",
    "functions",
    "function_call",
    "modalities",
    "audio",
];

/// A body that is an object.
pub(crate) struct Fields(Map<String, Value>);

pub(crate) fn invalid(field: impl Into<String>, message: impl std::fmt::Display) -> Problem {
    let field = field.into();
    Problem {
        param: Some(field.clone()),
        ..Problem::new(StatusCode::BAD_REQUEST, format!("{field}: {message}"))
    }
}

impl Fields {
    pub(crate) fn parse(body: &[u8]) -> Result<Self, Problem> {
        let value: Value = serde_json::from_slice(body).map_err(|e| {
            Problem::new(
                StatusCode::BAD_REQUEST,
                format!("the body is not valid JSON: {e}"),
            )
            .code("invalid_json")
        })?;
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

    pub(crate) fn names(&self) -> impl Iterator<Item = &String> {
        self.0.keys()
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
            Some(n) => Err(invalid(
                name,
                format!("{n} must be between {low} and {high}"),
            )),
            None => Err(invalid(name, "must be an integer")),
        }
    }
}
