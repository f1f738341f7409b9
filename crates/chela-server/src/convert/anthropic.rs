//! Anthropic's message requests: blocks, tools, thinking, and system text outside and inside the messages.

use super::{Asked, BILLING, KeptTo, form, form::Calls, hints, messages, sampling};
use crate::{
    problem::Problem,
    wire::{Fields, MESSAGES_HONOURED, invalid},
};
use axum::http::HeaderMap;
use chela_core::{ChatRequest, Conversation, Message, Role, SamplingRequest, Tool, ToolCall};
use serde_json::{Value, json};
use std::collections::HashMap;

/// Reads a message request; for `count` it needs no limit of tokens.
pub(crate) fn anthropic(
    headers: &HeaderMap,
    body: &[u8],
    (vocabulary, count): (usize, bool),
) -> Result<Asked, Problem> {
    let fields = Fields::parse(body)?;
    let mut ignored = fields.without_effect(MESSAGES_HONOURED)?;
    let mut list = Vec::new();
    if let Some(system) = fields.get("system") {
        let text = texts("system", system)?;
        if !text.is_empty() {
            list.push(Message::system(text));
        }
    }
    conversation(&fields, &mut list)?;
    super::without_billing(&mut list);
    super::in_order_of_calls(&mut list);
    if let Some(last) = list.last().filter(|m| m.role == Role::Assistant && !count) {
        let at = format!("messages[{}].role", messages::listed(&fields)?.len() - 1);
        let what = match last.tool_calls.is_empty() {
            true => "a reply cannot be continued: the last message must be the user's",
            false => "the last message calls tools: their results must follow",
        };
        return Err(invalid(at, what));
    }
    let tools = tools(&fields, &mut ignored)?;
    let (calls, parallel) = tool_choice(&fields, &tools)?;
    let form = calls.with(form::anthropic(&fields)?, parallel);
    let hints = hints::hints(headers, &fields, &list)?;
    let most = fields.integer("max_tokens", 1, i64::MAX)?;
    if most.is_none() && !count {
        return Err(invalid("max_tokens", "is missing"));
    }
    fields.number("temperature", 0.0, 1.0)?;
    let sampling = SamplingRequest {
        max_tokens: most.map(|n| n as usize),
        stop: sampling::stops(&fields, "stop_sequences")?,
        ..sampling::sampling(&fields, vocabulary)?.kept_to(&form)
    };
    let request = ChatRequest {
        model: fields.text("model")?.unwrap_or_default().to_owned(),
        conversation: Conversation {
            messages: list,
            tools,
            template_args: template_args(&fields)?,
        },
        sampling,
        choices: 1,
        hints,
    };
    Ok(Asked {
        request,
        stream: fields.flag("stream")?,
        include_usage: true,
        may_call: calls.may,
        form_field: form.map_or("", |f| f.field),
        parallel,
        ignored,
    })
}

/// Text, or a list of text blocks.
fn texts(at: &str, value: &Value) -> Result<String, Problem> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Array(blocks) => {
            let mut all = Vec::new();
            for (i, block) in blocks.iter().enumerate() {
                let text = text_block(&format!("{at}[{i}]"), block)?;
                if !text.starts_with(BILLING) {
                    all.push(text);
                }
            }
            Ok(all.join("\n"))
        }
        _ => Err(invalid(at, "must be a string or a list of blocks")),
    }
}

fn text_block<'a>(at: &str, block: &'a Value) -> Result<&'a str, Problem> {
    match block.get("type").and_then(Value::as_str) {
        Some("text") => text_of(at, block, "text"),
        other => {
            let what = other.unwrap_or("a block without type");
            Err(invalid(
                format!("{at}.type"),
                format!("{what}: this model reads text only"),
            ))
        }
    }
}

fn text_of<'a>(at: &str, block: &'a Value, name: &str) -> Result<&'a str, Problem> {
    block
        .get(name)
        .and_then(Value::as_str)
        .ok_or_else(|| invalid(format!("{at}.{name}"), "must be a string"))
}

fn conversation(fields: &Fields, list: &mut Vec<Message>) -> Result<(), Problem> {
    // A result names its call by id only; templates may want the tool's name.
    let mut called = HashMap::new();
    for (i, value) in messages::listed(fields)?.iter().enumerate() {
        let at = format!("messages[{i}]");
        let role = text_of(&at, value, "role")?;
        let content = value
            .get("content")
            .ok_or_else(|| invalid(format!("{at}.content"), "is missing"))?;
        match (role, content) {
            ("assistant", content) => {
                let message = assistant(&at, content)?;
                for call in &message.tool_calls {
                    called.insert(call.id.clone(), call.name.clone());
                }
                list.push(message);
            }
            ("user", Value::Array(blocks)) => user(&at, blocks, &called, list)?,
            ("user", content) => {
                list.push(Message::user(texts(&format!("{at}.content"), content)?))
            }
            ("system", content) => {
                list.push(Message::system(texts(&format!("{at}.content"), content)?));
            }
            (other, _) => {
                return Err(invalid(
                    format!("{at}.role"),
                    format!("{other:?}: use user or assistant"),
                ));
            }
        }
    }
    Ok(())
}

/// Tool results become messages of their own and come first, directly after their calls as models were taught; the texts around them
/// are what the user says then.
fn user(
    at: &str,
    blocks: &[Value],
    called: &HashMap<String, String>,
    messages: &mut Vec<Message>,
) -> Result<(), Problem> {
    let mut said: Vec<&str> = Vec::new();
    let begin = messages.len();
    for (i, block) in blocks.iter().enumerate() {
        let at = format!("{at}.content[{i}]");
        if block.get("type").and_then(Value::as_str) != Some("tool_result") {
            said.push(text_block(&at, block)?);
            continue;
        }
        let id = text_of(&at, block, "tool_use_id")?;
        let content = match block.get("content") {
            None | Some(Value::Null) => String::new(),
            Some(content) => texts(&format!("{at}.content"), content)?,
        };
        let mut result = Message::text(Role::Tool, content);
        result.tool_call_id = Some(id.to_owned());
        result.name = called.get(id).cloned();
        result.is_error = block.get("is_error") == Some(&Value::Bool(true));
        messages.push(result);
    }
    if !said.is_empty() || messages.len() == begin {
        messages.push(Message::user(said.join("\n")));
    }
    Ok(())
}

fn assistant(at: &str, content: &Value) -> Result<Message, Problem> {
    let Value::Array(blocks) = content else {
        return Ok(Message::assistant(texts(
            &format!("{at}.content"),
            content,
        )?));
    };
    let (mut said, mut thought) = (Vec::new(), Vec::new());
    let mut calls = Vec::new();
    for (i, block) in blocks.iter().enumerate() {
        let at = format!("{at}.content[{i}]");
        match block.get("type").and_then(Value::as_str) {
            Some("thinking") => thought.push(text_of(&at, block, "thinking")?),
            // Nobody can read it.
            Some("redacted_thinking") => {}
            Some("tool_use") => calls.push(ToolCall {
                id: text_of(&at, block, "id")?.to_owned(),
                name: text_of(&at, block, "name")?.to_owned(),
                arguments: match block.get("input") {
                    None | Some(Value::Null | Value::Object(_)) => arguments(block.get("input")),
                    Some(_) => return Err(invalid(format!("{at}.input"), "must be an object")),
                },
            }),
            _ => said.push(text_block(&at, block)?),
        }
    }
    let mut message = Message::assistant(said.join("\n"));
    message.reasoning = (!thought.is_empty()).then(|| thought.join("\n"));
    message.tool_calls = calls;
    Ok(message)
}

/// The key under which arguments come and go that a model wrote as no JSON object.
pub(crate) const UNPARSED: &str = "_unparsed";

fn arguments(input: Option<&Value>) -> String {
    match input {
        None | Some(Value::Null) => "{}".to_owned(),
        Some(Value::Object(map)) if map.len() == 1 => match map.get(UNPARSED) {
            Some(Value::String(text)) => text.clone(),
            _ => Value::Object(map.clone()).to_string(),
        },
        Some(input) => input.to_string(),
    }
}

/// Tools that a provider would run itself are not offered here and are named as ignored.
fn tools(fields: &Fields, ignored: &mut Vec<String>) -> Result<Vec<Tool>, Problem> {
    let mut tools = Vec::new();
    for (i, tool) in messages::offered(fields)?.iter().enumerate() {
        let at = format!("tools[{i}]");
        let name = text_of(&at, tool, "name")?;
        let own = matches!(
            tool.get("type").and_then(Value::as_str),
            None | Some("custom")
        );
        if !own {
            ignored.push(at);
            continue;
        }
        if tool.get("input_schema").is_none() {
            return Err(invalid(format!("{at}.input_schema"), "is missing"));
        }
        messages::check_tool(&at, tool, "input_schema")?;
        let definition = messages::definition(tool, "input_schema");
        messages::add_tool(&mut tools, format!("{at}.name"), (name, definition))?;
    }
    Ok(tools)
}

/// How a reply may call tools, and whether more than one.
fn tool_choice(fields: &Fields, tools: &[Tool]) -> Result<(Calls, bool), Problem> {
    let Some(choice) = fields.object("tool_choice")? else {
        return Ok((Calls::auto(tools), true));
    };
    let parallel = choice.get("disable_parallel_tool_use") != Some(&Value::Bool(true));
    let calls = match choice.get("type").and_then(Value::as_str) {
        Some("auto") => Calls::auto(tools),
        Some("none") => Calls::none(),
        Some("any") => Calls::forced("tool_choice", None, tools)?,
        Some("tool") => {
            let name = choice.get("name").and_then(Value::as_str);
            let name = name.ok_or_else(|| invalid("tool_choice.name", "must be a string"))?;
            Calls::forced("tool_choice", Some(name), tools)?
        }
        _ => return Err(invalid("tool_choice.type", "use auto, any, tool or none")),
    };
    Ok((calls, parallel))
}

/// `thinking` as templates with a switch know it. Adaptive thinking is the template's default.
fn template_args(fields: &Fields) -> Result<Option<String>, Problem> {
    let mut args = fields
        .object("chat_template_kwargs")?
        .cloned()
        .unwrap_or_default();
    if let Some(thinking) = fields.object("thinking")? {
        let on = match thinking.get("type").and_then(Value::as_str) {
            Some("enabled") => Some(true),
            Some("disabled") => Some(false),
            Some("adaptive") => None,
            _ => {
                return Err(invalid(
                    "thinking.type",
                    "use enabled, disabled or adaptive",
                ));
            }
        };
        if let Some(on) = on {
            args.entry("enable_thinking").or_insert(json!(on));
        }
    }
    Ok((!args.is_empty()).then(|| Value::Object(args).to_string()))
}
