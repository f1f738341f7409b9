//! OpenAI's responses: items, instructions, flat tools, and a conversation that goes on from an earlier response.

use super::{Asked, KeptTo, form, form::Calls, hints, messages, sampling};
use crate::{
    problem::Problem,
    wire::{Fields, RESPONSES_HONOURED, invalid},
};
use axum::http::HeaderMap;
use chela_core::{
    ChatRequest, Conversation, Message, Role, SamplingRequest, Tool, ToolCall, TurnId,
};
use serde_json::{Map, Value};

/// A response as asked for.
#[derive(Debug)]
pub(crate) struct ResponsesAsked {
    pub(crate) asked: Asked,
    /// The turn that the conversation goes on from.
    pub(crate) previous: Option<TurnId>,
    /// It may be asked for again.
    pub(crate) stored: bool,
    /// Fields that come back in the response as they were sent.
    pub(crate) echo: Map<String, Value>,
}

/// Reads a response request. The messages hold the instructions and the new items; what stands between them, when there is an
/// earlier response, is put in by whoever knows it.
pub(crate) fn responses(
    headers: &HeaderMap,
    body: &[u8],
    vocabulary: usize,
) -> Result<ResponsesAsked, Problem> {
    let fields = Fields::parse(body)?;
    let mut ignored = fields.without_effect(RESPONSES_HONOURED)?;
    let mut list = Vec::new();
    if let Some(instructions) = fields.filled("instructions")? {
        list.push(Message::system(instructions));
    }
    input(&fields, &mut list)?;
    super::without_billing(&mut list);
    super::in_order_of_calls(&mut list);
    let tools = tools(&fields, &mut ignored)?;
    let calls = tool_choice(&fields, &tools)?;
    let parallel = super::parallel(&fields)?;
    let form = calls.with(form::responses(&fields)?, parallel);
    let previous = match fields.filled("previous_response_id")? {
        None => None,
        Some(id) => Some(turn_of(id).ok_or_else(|| {
            invalid(
                "previous_response_id",
                format!("{id:?} is no id of a response"),
            )
        })?),
    };
    let sampling = SamplingRequest {
        max_tokens: fields
            .integer("max_output_tokens", 1, i64::MAX)?
            .map(|n| n as usize),
        ..sampling::sampling(&fields, vocabulary)?.kept_to(&form)
    };
    let hints = hints::hints(headers, &fields, &list)?;
    let template_args = fields.object("chat_template_kwargs")?.cloned();
    let asked = Asked {
        request: ChatRequest {
            model: fields.text("model")?.unwrap_or_default().to_owned(),
            conversation: Conversation {
                messages: list,
                tools,
                template_args: template_args.map(|args| Value::Object(args).to_string()),
            },
            sampling,
            choices: 1,
            hints,
        },
        stream: fields.flag("stream")?,
        include_usage: true,
        may_call: calls.may,
        form_field: form.map_or("", |f| f.field),
        parallel,
        ignored,
    };
    let mut echo = Map::new();
    for name in [
        "instructions",
        "max_output_tokens",
        "previous_response_id",
        "temperature",
        "top_p",
        "tools",
        "tool_choice",
        "metadata",
        "store",
        "user",
        "prompt_cache_key",
    ] {
        if let Some(value) = fields.get(name) {
            echo.insert(name.to_owned(), value.clone());
        }
    }
    let stored = fields.get("store").is_none() || fields.flag("store")?;
    Ok(ResponsesAsked {
        asked,
        previous,
        stored,
        echo,
    })
}

/// The turn that a response's id names.
pub(crate) fn turn_of(id: &str) -> Option<TurnId> {
    TurnId::parse(id.strip_prefix("resp_")?)
}

/// The reply that is being put together: one answer comes back as several items.
#[derive(Default)]
struct Pending(Option<Message>);

impl Pending {
    /// The answer that may still take `part`; another one begins where it has that part already.
    fn with(&mut self, list: &mut Vec<Message>, full: impl Fn(&Message) -> bool) -> &mut Message {
        if self.0.as_ref().is_some_and(full) {
            self.close(list);
        }
        self.0.get_or_insert_with(|| Message::assistant(""))
    }

    fn close(&mut self, list: &mut Vec<Message>) {
        list.extend(self.0.take());
    }
}

fn input(fields: &Fields, list: &mut Vec<Message>) -> Result<(), Problem> {
    let items = match fields.get("input") {
        None => return Err(invalid("input", "is missing")),
        Some(Value::String(text)) => {
            list.push(Message::user(text.as_str()));
            return Ok(());
        }
        Some(Value::Array(items)) if !items.is_empty() => items,
        Some(_) => return Err(invalid("input", "must be a string or a list of items")),
    };
    let mut pending = Pending::default();
    for (i, item) in items.iter().enumerate() {
        self::item(&format!("input[{i}]"), item, &mut pending, list)?;
    }
    pending.close(list);
    Ok(())
}

fn item(
    at: &str,
    item: &Value,
    pending: &mut Pending,
    list: &mut Vec<Message>,
) -> Result<(), Problem> {
    let text = |name: &str| {
        item.get(name)
            .and_then(Value::as_str)
            .ok_or_else(|| invalid(format!("{at}.{name}"), "must be a string"))
    };
    let answered = |m: &Message| !m.content.is_empty() || !m.tool_calls.is_empty();
    match item.get("type").and_then(Value::as_str) {
        Some("message") | None => {
            let role = text("role")?;
            let role = Role::parse(role)
                .filter(|r| *r != Role::Tool)
                .ok_or_else(|| {
                    invalid(
                        format!("{at}.role"),
                        format!("{role:?}: use system, developer, user or assistant"),
                    )
                })?;
            let content = messages::content(at, item.get("content"))?;
            if role == Role::Assistant {
                pending.with(list, answered).content = content;
            } else {
                pending.close(list);
                list.push(Message::text(role, content));
            }
        }
        Some("reasoning") => {
            let thought = thought(item);
            if !thought.is_empty() {
                pending.with(list, answered).reasoning = Some(thought);
            }
        }
        Some("function_call") => {
            let call = ToolCall {
                id: text("call_id")?.to_owned(),
                name: spaced(item.get("namespace").and_then(Value::as_str), text("name")?),
                arguments: text("arguments")?.to_owned(),
            };
            pending.with(list, |_| false).tool_calls.push(call);
        }
        Some("function_call_output") => {
            pending.close(list);
            let id = text("call_id")?;
            let output = match item.get("output") {
                Some(Value::Array(_) | Value::String(_)) => {
                    messages::content(at, item.get("output"))?
                }
                _ => {
                    return Err(invalid(
                        format!("{at}.output"),
                        "must be a string or a list of parts",
                    ));
                }
            };
            let mut result = Message::text(Role::Tool, output);
            result.tool_call_id = Some(id.to_owned());
            let calls = list.iter().rev().flat_map(|m| &m.tool_calls);
            result.name = calls.filter(|c| c.id == id).map(|c| c.name.clone()).next();
            list.push(result);
        }
        Some(other) => {
            return Err(invalid(
                format!("{at}.type"),
                format!("{other}: use message, reasoning, function_call or function_call_output"),
            ));
        }
    }
    Ok(())
}

/// What a reasoning item says in the open; what is encrypted nobody here can read.
fn thought(item: &Value) -> String {
    let texts = |name: &str| -> Vec<&str> {
        let parts = item.get(name).and_then(Value::as_array);
        let parts = parts.into_iter().flatten();
        parts.filter_map(|p| p.get("text")?.as_str()).collect()
    };
    let content = texts("content");
    if content.is_empty() {
        texts("summary").join("\n")
    } else {
        content.join("\n")
    }
}

/// Tools that a provider would run itself are not offered here and are named as ignored.
fn tools(fields: &Fields, ignored: &mut Vec<String>) -> Result<Vec<Tool>, Problem> {
    let mut tools = Vec::new();
    for (i, tool) in messages::offered(fields)?.iter().enumerate() {
        let at = format!("tools[{i}]");
        match tool.get("type").and_then(Value::as_str) {
            Some("function") => add(&mut tools, &at, tool, None)?,
            Some("namespace") => {
                let space = named(&at, tool)?;
                let inner = tool.get("tools").and_then(Value::as_array);
                for (k, tool) in inner.into_iter().flatten().enumerate() {
                    add(&mut tools, &format!("{at}.tools[{k}]"), tool, Some(space))?;
                }
            }
            _ => ignored.push(at),
        }
    }
    Ok(tools)
}

fn named<'a>(at: &str, value: &'a Value) -> Result<&'a str, Problem> {
    let name = value.get("name").and_then(Value::as_str);
    name.filter(|n| !n.is_empty())
        .ok_or_else(|| invalid(format!("{at}.name"), "must be a string"))
}

/// The name by which the model calls a tool of a namespace.
fn spaced(space: Option<&str>, name: &str) -> String {
    match space {
        Some(space) => format!("{space}.{name}"),
        None => name.to_owned(),
    }
}

fn add(tools: &mut Vec<Tool>, at: &str, tool: &Value, space: Option<&str>) -> Result<(), Problem> {
    messages::check_tool(at, tool, "parameters")?;
    let name = spaced(space, named(at, tool)?);
    let mut tool = tool.clone();
    tool["name"] = Value::from(name.as_str());
    let definition = messages::definition(&tool, "parameters");
    messages::add_tool(tools, format!("{at}.name"), (&name, definition))
}

/// A call's name in the space it belongs to, as the request that offered the tool spelt it.
pub(crate) fn unspaced<'a>(tools: Option<&Value>, name: &'a str) -> (Option<&'a str>, &'a str) {
    let spaces = tools.and_then(Value::as_array).into_iter().flatten();
    let spaces = spaces.filter(|t| t.get("type").and_then(Value::as_str) == Some("namespace"));
    let found = spaces
        .filter_map(|t| t.get("name")?.as_str())
        .find_map(|space| {
            let rest = name.strip_prefix(space)?.strip_prefix('.')?;
            Some((&name[..space.len()], rest))
        });
    found.map_or((None, name), |(space, rest)| (Some(space), rest))
}

fn tool_choice(fields: &Fields, tools: &[Tool]) -> Result<Calls, Problem> {
    let at = "tool_choice";
    match fields.get(at) {
        None => Ok(Calls::auto(tools)),
        Some(Value::String(word)) => Calls::word(at, word, tools),
        Some(named) if named.get("type").and_then(Value::as_str) == Some("function") => {
            let name = named.get("name").and_then(Value::as_str);
            let name = name.ok_or_else(|| invalid("tool_choice.name", "must be a string"))?;
            Calls::forced(at, Some(name), tools)
        }
        Some(_) => Err(invalid(
            "tool_choice.type",
            "use \"auto\", \"none\", \"required\", or {\"type\": \"function\", \"name\": …}",
        )),
    }
}
