//! What a request says about its session and kind, in headers and in the body.

use crate::{
    problem::Problem,
    wire::{Fields, invalid},
};
use axum::http::HeaderMap;
use chela_core::{DeclaredKind, Message, RequestHints, Role, SessionClaim, SessionId};
use serde_json::Value;

/// No header whose name holds one of these reaches a client rule or a record.
const SECRET: &[&str] = &[
    "authorization",
    "api-key",
    "apikey",
    "cookie",
    "token",
    "secret",
    "password",
];

/// Reads them. `messages` is what the request says.
pub(super) fn hints(
    headers: &HeaderMap,
    fields: &Fields,
    messages: &[Message],
) -> Result<RequestHints, Problem> {
    let session = match from_headers(headers)? {
        Some(claim) => Some(claim),
        None => from_body(fields)?.or_else(|| from_messages(messages)),
    };
    if let Some(claim) = &session {
        SessionId::new(claim.id.as_str()).map_err(|e| invalid(claim.source, e))?;
    }
    let secret = |name: &str| SECRET.iter().any(|s| name.contains(s));
    let readable = headers.iter().filter(|(name, _)| !secret(name.as_str()));
    let readable = readable.filter_map(|(name, value)| {
        let text = std::str::from_utf8(value.as_bytes()).ok()?;
        Some((name.as_str().to_owned(), text.to_owned()))
    });
    Ok(RequestHints {
        session,
        kind: kind(headers, fields)?,
        session_done: done(headers, fields)?,
        headers: readable.collect(),
    })
}

/// A header's text, trimmed; a blank one counts as absent.
fn header(headers: &HeaderMap, name: &str) -> Result<Option<String>, Problem> {
    let Some(value) = headers.get(name) else {
        return Ok(None);
    };
    let text = std::str::from_utf8(value.as_bytes())
        .map_err(|_| invalid(name, "this header is not UTF-8 text"))?
        .trim();
    Ok((!text.is_empty()).then(|| text.to_owned()))
}

fn kind(headers: &HeaderMap, fields: &Fields) -> Result<Option<DeclaredKind>, Problem> {
    let (name, word) = match header(headers, "x-turn-type")? {
        Some(word) => ("x-turn-type", word),
        None => match fields.filled("turn_type")? {
            Some(word) => ("turn_type", word.to_owned()),
            None => return Ok(None),
        },
    };
    match word.to_ascii_lowercase().as_str() {
        "main" => Ok(Some(DeclaredKind::Main)),
        "side" => Ok(Some(DeclaredKind::Side)),
        "private" => Ok(Some(DeclaredKind::Private)),
        _ => Err(invalid(
            name,
            format!("{word:?}: use main, side or private"),
        )),
    }
}

fn done(headers: &HeaderMap, fields: &Fields) -> Result<bool, Problem> {
    let truth = |name: &str, word: &str| match word.trim().to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" => Ok(true),
        "" | "false" | "0" | "no" => Ok(false),
        _ => Err(invalid(name, format!("{word:?}: use true or false"))),
    };
    if let Some(word) = header(headers, "x-session-done")? {
        return truth("x-session-done", &word);
    }
    match fields.get("session_done") {
        None => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(Value::String(word)) => truth("session_done", word),
        Some(_) => Err(invalid("session_done", "must be true or false")),
    }
}

/// The first session id present, in the order of the documentation.
fn from_headers(headers: &HeaderMap) -> Result<Option<SessionClaim>, Problem> {
    let claim = |source, id| Ok(Some(SessionClaim { source, id }));
    if let Some(id) = header(headers, "x-session-id")? {
        return claim("header x-session-id", id);
    }
    // Codex: `session-id` is what sub-agents share with their parent.
    if let Some(id) = header(headers, "thread-id")? {
        return claim("header thread-id", id);
    }
    if let Some(id) = header(headers, "x-claude-code-session-id")? {
        let agent = header(headers, "x-claude-code-agent-id")?;
        let agent = agent.map(|a| format!(":{a}")).unwrap_or_default();
        return claim("header x-claude-code-session-id", format!("{id}{agent}"));
    }
    match header(headers, "session_id")? {
        Some(id) => claim("header session_id", id),
        None => Ok(None),
    }
}

fn from_body(fields: &Fields) -> Result<Option<SessionClaim>, Problem> {
    let claim = |source, id: &str| {
        Ok(Some(SessionClaim {
            source,
            id: id.to_owned(),
        }))
    };
    let early = [
        ("session_id", "body session_id"),
        ("prompt_cache_key", "body prompt_cache_key"),
    ];
    for (name, source) in early {
        if let Some(id) = fields.filled(name)? {
            return claim(source, id);
        }
    }
    let metadata = fields.object("metadata")?;
    let filled = |value: Option<&Value>| {
        let text = value
            .and_then(Value::as_str)
            .map(str::trim)
            .filter(|t| !t.is_empty());
        text.map(str::to_owned)
    };
    if let Some(id) = filled(metadata.and_then(|m| m.get("session_id"))) {
        return claim("body metadata.session_id", &id);
    }
    if let Some(text) = filled(metadata.and_then(|m| m.get("user_id")))
        && let Ok(inner) = serde_json::from_str::<Value>(&text)
        && let Some(id) = filled(inner.get("session_id"))
    {
        return claim("body metadata.user_id", &id);
    }
    for (name, source) in [
        ("previous_response_id", "body previous_response_id"),
        ("user", "body user"),
    ] {
        if let Some(id) = fields.filled(name)? {
            return claim(source, id);
        }
    }
    Ok(None)
}

/// OpenClaw without plugin: a line `Runtime: … sessionId=<uuid> …` ends the first user message, or stands in the system text.
fn from_messages(messages: &[Message]) -> Option<SessionClaim> {
    const LINE: &str = "Runtime:";
    let first = messages.iter().find(|m| m.role == Role::User);
    let last = first.and_then(|m| m.content.trim_end().lines().next_back());
    let system = messages.iter().filter(|m| m.role == Role::System);
    let named = system.flat_map(|m| m.content.lines());
    let mut lines = last
        .into_iter()
        .chain(named)
        .filter_map(|line| line.strip_prefix(LINE));
    let id = lines.find_map(|line| {
        let mut words = line.split(|c: char| c.is_whitespace() || matches!(c, '|' | ',' | ';'));
        words.find_map(|word| word.strip_prefix("sessionId="))
    })?;
    SessionId::new(id).is_ok().then(|| SessionClaim {
        source: "Runtime line",
        id: id.to_owned(),
    })
}
