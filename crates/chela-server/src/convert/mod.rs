//! From the wire to the domain: past here nothing knows which API a request came by.

mod anthropic;
mod form;
mod hints;
mod messages;
mod responses;
mod sampling;
mod text;

pub(crate) use anthropic::{UNPARSED, anthropic};
pub(crate) use responses::{ResponsesAsked, responses, turn_of, unspaced};
pub(crate) use text::{TextAsked, text};

use form::{Calls, Form};

use crate::{
    problem::Problem,
    wire::{CHAT_HONOURED, Fields, invalid},
};
use axum::http::{HeaderMap, StatusCode};
use chela_core::{ChatRequest, Conversation, Message, Role, SamplingRequest, Tool};
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
    /// The field that asks for a form of the reply, when one does.
    pub(crate) form_field: &'static str,
    /// Accepted without effect.
    pub(crate) ignored: Vec<String>,
}

/// A system line of Claude Code that changes with every request and says nothing to a model.
const BILLING: &str = "x-anthropic-billing-header:";

/// Takes that line out where a system message begins with it, whatever API it came by.
fn without_billing(messages: &mut Vec<Message>) {
    messages.retain_mut(|message| {
        if message.role != Role::System || !message.content.starts_with(BILLING) {
            return true;
        }
        let rest = message.content.split_once('\n');
        message.content = rest.map_or("", |(_, rest)| rest).to_owned();
        !message.content.is_empty()
    });
}

/// Results in the order of the calls they answer: most templates show no ids, and a model would read one for another.
fn in_order_of_calls(messages: &mut [Message]) {
    let mut at = 0;
    while at < messages.len() {
        let calls: Vec<String> = messages[at]
            .tool_calls
            .iter()
            .map(|c| c.id.clone())
            .collect();
        let results = messages[at + 1..].iter();
        let n = results.take_while(|m| m.role == Role::Tool).count();
        if calls.len() > 1 {
            messages[at + 1..at + 1 + n].sort_by_key(|m| {
                let id = m.tool_call_id.as_ref();
                calls
                    .iter()
                    .position(|call| Some(call) == id)
                    .unwrap_or(usize::MAX)
            });
        }
        at += 1 + n;
    }
}

/// Puts a form into what is sampled.
trait KeptTo {
    fn kept_to(self, form: &Option<Form>) -> Self;
}

impl KeptTo for SamplingRequest {
    fn kept_to(mut self, form: &Option<Form>) -> Self {
        self.constraint = form.as_ref().map(|f| f.constraint.clone());
        self
    }
}

/// Reads a chat completion.
pub(crate) fn chat(headers: &HeaderMap, body: &[u8], vocabulary: usize) -> Result<Asked, Problem> {
    let fields = Fields::parse(body)?;
    let ignored = fields.without_effect(CHAT_HONOURED)?;
    let mut messages = messages::messages(&fields)?;
    without_billing(&mut messages);
    in_order_of_calls(&mut messages);
    let tools = messages::tools(&fields)?;
    let calls = calls(&fields, &tools)?;
    let hints = hints::hints(headers, &fields, &messages)?;
    let template_args = fields.object("chat_template_kwargs")?.cloned();
    let template_args = template_args.map(|args| Value::Object(args).to_string());
    let parallel = parallel(&fields)?;
    let (stream, include_usage) = streaming(&fields)?;
    let form = calls.with(form::chat(&fields)?, parallel);
    let request = ChatRequest {
        model: fields.text("model")?.unwrap_or_default().to_owned(),
        conversation: Conversation {
            messages,
            tools,
            template_args,
        },
        sampling: sampling::chat_sampling(&fields, vocabulary)?.kept_to(&form),
        choices: sampling::choices(&fields)?,
        hints,
    };
    Ok(Asked {
        request,
        stream,
        include_usage,
        may_call: calls.may,
        form_field: form.map_or("", |f| f.field),
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

/// `tool_choice` of a chat completion.
fn calls(fields: &Fields, tools: &[Tool]) -> Result<Calls, Problem> {
    let at = "tool_choice";
    match fields.get(at) {
        None => Ok(Calls::auto(tools)),
        Some(Value::String(word)) => Calls::word(at, word, tools),
        Some(named) => {
            let name = named.get("function").and_then(|f| f.get("name"));
            let name = name
                .and_then(Value::as_str)
                .ok_or_else(|| invalid(at, "must be a word or name a function"))?;
            Calls::forced(at, Some(name), tools)
        }
    }
}

/// The status for a template's refusal.
pub(crate) fn of_chat(error: chela_chat::ChatError) -> Problem {
    use chela_chat::ChatError as E;
    match error {
        E::Grammar { tool, error } => match tool {
            Some(i) => invalid(format!("tools[{i}]"), error),
            None => invalid("tools", error),
        },
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
