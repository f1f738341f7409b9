//! Messages and tools of a chat request.

use crate::{
    problem::Problem,
    wire::{Fields, invalid},
};
use chela_core::{Message, Role, Tool, ToolCall};
use serde_json::{Map, Value, json};

/// The objects of `messages`, at least one.
pub(super) fn listed(fields: &Fields) -> Result<&[Value], Problem> {
    let list = fields
        .get("messages")
        .ok_or_else(|| invalid("messages", "is missing"))?
        .as_array()
        .ok_or_else(|| invalid("messages", "must be a list"))?;
    if list.is_empty() {
        return Err(invalid("messages", "must hold at least one message"));
    }
    Ok(list)
}

pub(super) fn messages(fields: &Fields) -> Result<Vec<Message>, Problem> {
    listed(fields)?
        .iter()
        .enumerate()
        .map(|(i, m)| message(&format!("messages[{i}]"), m))
        .collect()
}

fn message(at: &str, value: &Value) -> Result<Message, Problem> {
    let text_of = |name: &str| -> Result<Option<String>, Problem> {
        match value.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(s)) => Ok(Some(s.clone())),
            Some(_) => Err(invalid(format!("{at}.{name}"), "must be a string")),
        }
    };
    if !value.is_object() {
        return Err(invalid(at, "must be an object"));
    }
    let role = text_of("role")?.ok_or_else(|| invalid(format!("{at}.role"), "is missing"))?;
    let role = Role::parse(&role).ok_or_else(|| {
        invalid(
            format!("{at}.role"),
            format!("{role:?}: use system, developer, user, assistant or tool"),
        )
    })?;
    if value.get("content").is_none_or(Value::is_null) && matches!(role, Role::System | Role::User)
    {
        return Err(invalid(format!("{at}.content"), "is missing"));
    }
    let mut message = Message::text(role, content(at, value.get("content"))?);
    message.reasoning = text_of("reasoning_content")?
        .or(text_of("reasoning")?)
        .filter(|r| !r.is_empty());
    message.tool_call_id = text_of("tool_call_id")?;
    message.name = text_of("name")?;
    for (name, instead) in [
        ("function_call", "use tool_calls"),
        ("audio", "messages are text"),
    ] {
        if value.get(name).is_some_and(|v| !v.is_null()) {
            return Err(invalid(
                format!("{at}.{name}"),
                format!("this is not supported: {instead}"),
            ));
        }
    }
    if let Some(calls) = value.get("tool_calls").filter(|v| !v.is_null()) {
        let at = format!("{at}.tool_calls");
        let calls = calls
            .as_array()
            .ok_or_else(|| invalid(at.clone(), "must be a list"))?;
        message.tool_calls = calls
            .iter()
            .enumerate()
            .map(|(i, c)| tool_call(&format!("{at}[{i}]"), c))
            .collect::<Result<_, _>>()?;
    }
    Ok(message)
}

pub(super) fn content(at: &str, value: Option<&Value>) -> Result<String, Problem> {
    match value {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let mut texts = Vec::new();
            for (i, part) in parts.iter().enumerate() {
                let at = format!("{at}.content[{i}]");
                match part.get("type").and_then(Value::as_str) {
                    Some("text" | "input_text" | "output_text") => {
                        let text = part.get("text").and_then(Value::as_str);
                        texts.push(
                            text.ok_or_else(|| invalid(format!("{at}.text"), "must be a string"))?,
                        );
                    }
                    Some("refusal") => {
                        let text = part.get("refusal").and_then(Value::as_str);
                        texts.push(
                            text.ok_or_else(|| {
                                invalid(format!("{at}.refusal"), "must be a string")
                            })?,
                        );
                    }
                    other => {
                        let what = other.unwrap_or("a part without type");
                        return Err(invalid(
                            format!("{at}.type"),
                            format!("{what}: this model reads text only"),
                        ));
                    }
                }
            }
            Ok(texts.join("\n"))
        }
        Some(_) => Err(invalid(
            format!("{at}.content"),
            "must be a string, a list of parts or null",
        )),
    }
}

fn tool_call(at: &str, value: &Value) -> Result<ToolCall, Problem> {
    let function = value.get("function").unwrap_or(value);
    let name = function
        .get("name")
        .and_then(Value::as_str)
        .ok_or_else(|| invalid(format!("{at}.function.name"), "must be a string"))?;
    let arguments = match function.get("arguments") {
        None | Some(Value::Null) => "{}".to_owned(),
        Some(Value::String(s)) if s.trim().is_empty() => "{}".to_owned(),
        // Not parsed here: a model may have written broken JSON, and its words must come back as they were.
        Some(Value::String(s)) => s.clone(),
        Some(object) => object.to_string(),
    };
    Ok(ToolCall {
        id: value
            .get("id")
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned(),
        name: name.to_owned(),
        arguments,
    })
}

/// The objects of `tools`; null and `[]` are none.
pub(super) fn offered(fields: &Fields) -> Result<&[Value], Problem> {
    match fields.get("tools") {
        None => Ok(&[]),
        Some(Value::Array(list)) => Ok(list),
        Some(_) => Err(invalid("tools", "must be a list")),
    }
}

/// Adds a tool, unless one of its name is there; `at` is the name's field.
pub(super) fn add_tool(
    tools: &mut Vec<Tool>,
    at: String,
    (name, definition): (&str, String),
) -> Result<(), Problem> {
    if tools.iter().any(|t| t.name == name) {
        return Err(invalid(at, format!("{name:?} is there twice")));
    }
    tools.push(Tool {
        name: name.to_owned(),
        definition,
    });
    Ok(())
}

/// A tool's description is text and its schema an object, where they are there.
pub(super) fn check_tool(at: &str, tool: &Value, schema: &str) -> Result<(), Problem> {
    let given = |name: &str| tool.get(name).filter(|v| !v.is_null());
    if given("description").is_some_and(|v| !v.is_string()) {
        return Err(invalid(format!("{at}.description"), "must be a string"));
    }
    if given(schema).is_some_and(|v| !v.is_object()) {
        return Err(invalid(format!("{at}.{schema}"), "must be an object"));
    }
    Ok(())
}

/// A tool that another API spells flat, as templates know it: OpenAI's shape, keys in wire order. `schema` is that API's word for
/// the parameters.
pub(super) fn definition(tool: &Value, schema: &str) -> String {
    let mut function = Map::new();
    for (key, from) in [
        ("name", "name"),
        ("description", "description"),
        ("parameters", schema),
    ] {
        if let Some(value) = tool.get(from).filter(|v| !v.is_null()) {
            function.insert(key.to_owned(), value.clone());
        }
    }
    json!({"type": "function", "function": function}).to_string()
}

/// As chat completions spell them.
pub(super) fn tools(fields: &Fields) -> Result<Vec<Tool>, Problem> {
    let mut tools = Vec::new();
    for (i, tool) in offered(fields)?.iter().enumerate() {
        let at = format!("tools[{i}]");
        if tool
            .get("type")
            .is_some_and(|t| t.as_str() != Some("function"))
        {
            return Err(invalid(format!("{at}.type"), "only \"function\" is known"));
        }
        let name = tool
            .get("function")
            .and_then(|f| f.get("name"))
            .and_then(Value::as_str);
        if let Some(function) = tool.get("function") {
            check_tool(&format!("{at}.function"), function, "parameters")?;
        }
        let at = format!("{at}.function.name");
        let name = name
            .filter(|n| !n.is_empty())
            .ok_or_else(|| invalid(at.as_str(), "must be a string"))?;
        add_tool(&mut tools, at, (name, tool.to_string()))?;
    }
    Ok(tools)
}
