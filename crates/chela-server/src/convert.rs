//! From the wire to the domain: past here nothing knows which API a request came by.

use crate::{
    problem::Problem,
    wire::{Fields, HONOURED, invalid},
};
use axum::http::{HeaderMap, StatusCode};
use chela_core::{
    ChatRequest, Conversation, DeclaredKind, Message, RequestHints, Role, SamplingRequest,
    SessionClaim, SessionId, Tool, ToolCall,
};
use serde_json::Value;

/// A chat completion as asked for.
pub(crate) struct Asked {
    pub(crate) request: ChatRequest,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) logprobs: bool,
    /// Tool calls are looked for.
    pub(crate) tools: bool,
    /// Accepted without effect.
    pub(crate) ignored: Vec<String>,
}

/// Reads a chat completion.
pub(crate) fn chat(headers: &HeaderMap, body: &[u8], vocabulary: usize) -> Result<Asked, Problem> {
    let fields = Fields::parse(body)?;
    refuse_what_would_change_the_reply(&fields)?;
    let ignored = fields
        .names()
        .filter(|n| !HONOURED.contains(&n.as_str()))
        .cloned()
        .collect();
    let messages = messages(&fields)?;
    let mut tools = tools(&fields)?;
    let choice = fields.get("tool_choice");
    let mut use_tools = !tools.is_empty();
    match choice.map(|c| (c, c.as_str())) {
        None | Some((_, Some("auto"))) => {}
        Some((_, Some("none"))) => {
            use_tools = false;
            tools.clear();
        }
        Some((_, Some("required"))) if tools.is_empty() => {
            return Err(invalid("tool_choice", "required without tools"));
        }
        Some(_) => {
            return Err(invalid(
                "tool_choice",
                "only auto and none are supported by this server",
            ));
        }
    }
    let template_args = match fields.get("chat_template_kwargs") {
        Some(value @ Value::Object(_)) => Some(value.to_string()),
        Some(_) => return Err(invalid("chat_template_kwargs", "must be an object")),
        None => None,
    };
    let (sampling, logprobs) = sampling(&fields, vocabulary)?;
    let request = ChatRequest {
        model: fields.text("model")?.unwrap_or_default().to_owned(),
        conversation: Conversation {
            messages,
            tools,
            template_args,
        },
        sampling,
        choices: fields.integer("n", 1, 8)?.unwrap_or(1) as usize,
        hints: hints(headers, &fields)?,
    };
    let include_usage = fields
        .get("stream_options")
        .and_then(|o| o.get("include_usage"))
        == Some(&Value::Bool(true));
    let stream = fields.flag("stream")?;
    Ok(Asked {
        request,
        stream,
        include_usage,
        logprobs,
        tools: use_tools,
        ignored,
    })
}

fn refuse_what_would_change_the_reply(fields: &Fields) -> Result<(), Problem> {
    if let Some(format) = fields.get("response_format")
        && format.get("type").and_then(Value::as_str) != Some("text")
    {
        return Err(invalid(
            "response_format",
            "only {\"type\": \"text\"} is supported so far",
        ));
    }
    if fields.get("functions").is_some() {
        return Err(invalid("functions", "use tools"));
    }
    if fields
        .get("function_call")
        .is_some_and(|c| c.as_str() != Some("none"))
    {
        return Err(invalid("function_call", "use tool_choice"));
    }
    if fields.get("audio").is_some() {
        return Err(invalid("audio", "this model speaks text only"));
    }
    if fields
        .get("modalities")
        .is_some_and(|m| m != &serde_json::json!(["text"]))
    {
        return Err(invalid("modalities", "only [\"text\"] is supported"));
    }
    Ok(())
}

fn messages(fields: &Fields) -> Result<Vec<Message>, Problem> {
    let list = fields
        .get("messages")
        .ok_or_else(|| invalid("messages", "is missing"))?
        .as_array()
        .ok_or_else(|| invalid("messages", "must be a list"))?;
    if list.is_empty() {
        return Err(invalid("messages", "must hold at least one message"));
    }
    list.iter()
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
    let mut message = Message::text(role, content(at, value.get("content"))?);
    message.reasoning = text_of("reasoning_content")?.or(text_of("reasoning")?);
    message.tool_call_id = text_of("tool_call_id")?;
    message.name = text_of("name")?;
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

fn content(at: &str, value: Option<&Value>) -> Result<String, Problem> {
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
                    other => {
                        let what = other.unwrap_or("a part without type");
                        return Err(invalid(at, format!("{what}: this model reads text only")));
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
        Some(Value::String(s)) => {
            serde_json::from_str::<Value>(s).map_err(|e| {
                invalid(format!("{at}.function.arguments"), format!("not JSON: {e}"))
            })?;
            s.clone()
        }
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

fn tools(fields: &Fields) -> Result<Vec<Tool>, Problem> {
    let Some(list) = fields.get("tools") else {
        return Ok(Vec::new());
    };
    let list = list
        .as_array()
        .ok_or_else(|| invalid("tools", "must be a list"))?;
    list.iter()
        .enumerate()
        .map(|(i, tool)| {
            let name = tool
                .get("function")
                .and_then(|f| f.get("name"))
                .and_then(Value::as_str);
            let name = name
                .ok_or_else(|| invalid(format!("tools[{i}].function.name"), "must be a string"))?;
            Ok(Tool {
                name: name.to_owned(),
                definition: tool.to_string(),
            })
        })
        .collect()
}

fn sampling(fields: &Fields, vocabulary: usize) -> Result<(SamplingRequest, bool), Problem> {
    let top_p = fields.number("top_p", 0.0, 1.0)?;
    if top_p == Some(0.0) {
        return Err(invalid("top_p", "must be above 0"));
    }
    let logprobs = fields.flag("logprobs")?;
    let top = fields.integer("top_logprobs", 0, 20)?;
    if top.is_some() && !logprobs {
        return Err(invalid("top_logprobs", "needs logprobs: true"));
    }
    let most = match fields.integer("max_completion_tokens", 1, i64::MAX)? {
        Some(n) => Some(n),
        None => fields.integer("max_tokens", 1, i64::MAX)?,
    };
    let sampling = SamplingRequest {
        temperature: fields.number("temperature", 0.0, 2.0)?,
        top_p,
        top_k: fields
            .integer("top_k", -1, i64::from(u32::MAX))?
            .map(|k| k.max(0) as u32),
        min_p: fields.number("min_p", 0.0, 1.0)?,
        frequency_penalty: fields.number("frequency_penalty", -2.0, 2.0)?,
        presence_penalty: fields.number("presence_penalty", -2.0, 2.0)?,
        logit_bias: logit_bias(fields, vocabulary)?,
        seed: fields
            .integer("seed", i64::MIN, i64::MAX)?
            .map(|s| s as u64),
        max_tokens: most.map(|m| m as usize),
        stop: stops(fields)?,
        top_logprobs: logprobs.then_some(top.unwrap_or(0) as u8),
    };
    Ok((sampling, logprobs))
}

fn stops(fields: &Fields) -> Result<Vec<String>, Problem> {
    let wrong = || invalid("stop", "must be a string or a list of at most 16 strings");
    let all: Vec<String> = match fields.get("stop") {
        None => Vec::new(),
        Some(Value::String(s)) => vec![s.clone()],
        Some(Value::Array(list)) if list.len() <= 16 => list
            .iter()
            .map(|s| s.as_str().map(str::to_owned).ok_or_else(wrong))
            .collect::<Result<_, _>>()?,
        Some(_) => return Err(wrong()),
    };
    if all.iter().any(|s| s.chars().count() > 1000) {
        return Err(invalid("stop", "a stop string has at most 1000 characters"));
    }
    Ok(all)
}

fn logit_bias(fields: &Fields, vocabulary: usize) -> Result<Vec<(u32, f32)>, Problem> {
    let Some(value) = fields.get("logit_bias") else {
        return Ok(Vec::new());
    };
    let map = value
        .as_object()
        .ok_or_else(|| invalid("logit_bias", "must be an object"))?;
    map.iter()
        .map(|(id, bias)| {
            let id: u32 = id
                .parse()
                .ok()
                .filter(|id| (*id as usize) < vocabulary)
                .ok_or_else(|| {
                    invalid(
                        "logit_bias",
                        format!("{id:?} is no token id below {vocabulary}"),
                    )
                })?;
            let bias = bias.as_f64().filter(|b| (-100.0..=100.0).contains(b));
            let bias =
                bias.ok_or_else(|| invalid("logit_bias", "values must be between -100 and 100"))?;
            Ok((id, bias as f32))
        })
        .collect()
}

const SECRET: &[&str] = &[
    "authorization",
    "x-api-key",
    "cookie",
    "proxy-authorization",
];

fn hints(headers: &HeaderMap, fields: &Fields) -> Result<RequestHints, Problem> {
    let header = |name: &str| {
        headers
            .get(name)
            .and_then(|v| v.to_str().ok())
            .filter(|v| !v.is_empty())
    };
    let kind = match header("x-turn-type").or(fields.text("turn_type")?) {
        None => None,
        Some(word) => Some(match word.to_ascii_lowercase().as_str() {
            "main" => DeclaredKind::Main,
            "side" => DeclaredKind::Side,
            "private" => DeclaredKind::Private,
            _ => {
                return Err(invalid(
                    "x-turn-type",
                    format!("{word:?}: use main, side or private"),
                ));
            }
        }),
    };
    let done = header("x-session-done").is_some_and(|v| matches!(v, "1" | "true" | "True"))
        || fields
            .get("session_done")
            .is_some_and(|v| v == &Value::Bool(true));
    let session = session(headers, fields)?;
    if let Some(claim) = &session {
        SessionId::new(claim.id.clone()).map_err(|e| invalid(claim.source, e))?;
    }
    let headers = headers
        .iter()
        .filter(|(name, _)| !SECRET.contains(&name.as_str()))
        .filter_map(|(name, v)| Some((name.as_str().to_owned(), v.to_str().ok()?.to_owned())))
        .collect();
    Ok(RequestHints {
        session,
        kind,
        session_done: done,
        headers,
    })
}

/// The first session id present, in the order of the documentation.
fn session(headers: &HeaderMap, fields: &Fields) -> Result<Option<SessionClaim>, Problem> {
    let header = |name: &str| {
        headers
            .get(name)
            .and_then(|v| v.to_str().ok())
            .filter(|v| !v.is_empty())
    };
    let claim = |source, id: String| Ok(Some(SessionClaim { source, id }));
    if let Some(id) = header("x-session-id") {
        return claim("header x-session-id", id.to_owned());
    }
    if let Some(id) = header("thread-id") {
        return claim("header thread-id", id.to_owned());
    }
    if let Some(id) = header("x-claude-code-session-id") {
        let agent = header("x-claude-code-agent-id")
            .map(|a| format!(":{a}"))
            .unwrap_or_default();
        return claim("header x-claude-code-session-id", format!("{id}{agent}"));
    }
    if let Some(id) = header("session_id") {
        return claim("header session_id", id.to_owned());
    }
    for (name, source) in [
        ("session_id", "body session_id"),
        ("prompt_cache_key", "body prompt_cache_key"),
    ] {
        if let Some(id) = fields.text(name)?.filter(|id| !id.is_empty()) {
            return claim(source, id.to_owned());
        }
    }
    let metadata = fields.get("metadata");
    if let Some(id) = metadata
        .and_then(|m| m.get("session_id"))
        .and_then(Value::as_str)
    {
        return claim("body metadata.session_id", id.to_owned());
    }
    if let Some(text) = metadata
        .and_then(|m| m.get("user_id"))
        .and_then(Value::as_str)
        && let Ok(inner) = serde_json::from_str::<Value>(text)
        && let Some(id) = inner.get("session_id").and_then(Value::as_str)
    {
        return claim("body metadata.user_id", id.to_owned());
    }
    if let Some(id) = fields.text("user")?.filter(|id| !id.is_empty()) {
        return claim("body user", id.to_owned());
    }
    Ok(None)
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
