//! From the wire to the domain: past here nothing knows which API a request came by.

mod anthropic;
mod hints;
mod messages;
mod responses;
mod sampling;
mod text;

pub(crate) use anthropic::{UNPARSED, anthropic};
pub(crate) use responses::{ResponsesAsked, responses, turn_of};
pub(crate) use text::{TextAsked, text};

use crate::{
    problem::Problem,
    wire::{CHAT_HONOURED, Fields, invalid},
};
use axum::http::{HeaderMap, StatusCode};
use chela_core::{ChatRequest, Conversation, Tool};
use serde_json::Value;

/// A chat completion as asked for.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) request: ChatRequest,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    /// Tool calls are looked for in the reply.
    pub(crate) may_call: bool,
    /// More than one.
    pub(crate) parallel: bool,
    /// Accepted without effect.
    pub(crate) ignored: Vec<String>,
}

/// Reads a chat completion.
pub(crate) fn chat(headers: &HeaderMap, body: &[u8], vocabulary: usize) -> Result<Asked, Problem> {
    let fields = Fields::parse(body)?;
    let ignored = fields.without_effect(CHAT_HONOURED)?;
    let messages = messages::messages(&fields)?;
    let tools = messages::tools(&fields)?;
    let may_call = may_call(&fields, &tools)?;
    let hints = hints::hints(headers, &fields, &messages)?;
    let template_args = fields.object("chat_template_kwargs")?.cloned();
    let template_args = template_args.map(|args| Value::Object(args).to_string());
    let parallel = parallel(&fields)?;
    let (stream, include_usage) = streaming(&fields)?;
    let request = ChatRequest {
        model: fields.text("model")?.unwrap_or_default().to_owned(),
        conversation: Conversation {
            messages,
            tools,
            template_args,
        },
        sampling: sampling::chat_sampling(&fields, vocabulary)?,
        choices: sampling::choices(&fields)?,
        hints,
    };
    Ok(Asked {
        request,
        stream,
        include_usage,
        may_call,
        parallel,
        ignored,
    })
}

/// Whether a reply may call more than one tool; it may unless the request says no.
fn parallel(fields: &Fields) -> Result<bool, Problem> {
    Ok(fields.get("parallel_tool_calls").is_none() || fields.flag("parallel_tool_calls")?)
}

/// `stream`, and whether usage is asked for.
fn streaming(fields: &Fields) -> Result<(bool, bool), Problem> {
    let include = match fields
        .object("stream_options")?
        .and_then(|o| o.get("include_usage"))
    {
        None | Some(Value::Null) => false,
        Some(Value::Bool(flag)) => *flag,
        Some(_) => {
            return Err(invalid(
                "stream_options.include_usage",
                "must be true or false",
            ));
        }
    };
    Ok((fields.flag("stream")?, include))
}

/// Whether calls are looked for in the reply. With `none` the tools still stand in the prompt: what was read before stays the
/// same, and text that looks like a call stays text. A forced call cannot be promised, so it is refused.
fn may_call(fields: &Fields, tools: &[Tool]) -> Result<bool, Problem> {
    let word = match fields.get("tool_choice") {
        None => "auto",
        Some(Value::String(word)) => word.as_str(),
        Some(named) => {
            let name = named
                .get("function")
                .and_then(|f| f.get("name"))
                .and_then(Value::as_str);
            let name =
                name.ok_or_else(|| invalid("tool_choice", "must be a word or name a function"))?;
            if !tools.iter().any(|t| t.name == name) {
                return Err(invalid(
                    "tool_choice",
                    format!("{name:?} is not among the tools"),
                ));
            }
            "required"
        }
    };
    match word {
        "auto" => Ok(!tools.is_empty()),
        "none" => Ok(false),
        "required" if tools.is_empty() => Err(invalid("tool_choice", "required without tools")),
        "required" => Err(invalid(
            "tool_choice",
            "a call cannot be forced so far; use \"auto\" and ask for the call in words",
        )),
        other => Err(invalid(
            "tool_choice",
            format!("{other:?}: use auto or none"),
        )),
    }
}

/// The status for a template's refusal.
pub(crate) fn of_chat(error: chela_chat::ChatError) -> Problem {
    use chela_chat::ChatError as E;
    match error {
        E::NoTools => Problem {
            param: Some("tools".to_owned()),
            ..Problem::new(StatusCode::BAD_REQUEST, error.to_string())
        },
        E::Refused(_) | E::Json { .. } => Problem {
            param: Some("messages".to_owned()),
            ..Problem::new(StatusCode::BAD_REQUEST, error.to_string())
        },
        E::Template(_) | E::Tokenizer(_) => chela_core::Refusal::Internal(error.to_string()).into(),
    }
}
