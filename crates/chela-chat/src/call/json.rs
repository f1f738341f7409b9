//! Tool calls written as JSON: between tags (Hermes, Qwen), as a whole reply or after a control token (Llama).

use super::{Call, Found, first_close, rest_from};
use chela_core::Tool;
use serde::de::IgnoredAny;
use serde_json::{Deserializer, Map, Value as Json};

/// What opens a call.
pub const OPEN: &str = "<tool_call>";
/// What closes it.
pub const CLOSE: &str = "</tool_call>";

/// Reads the text after [`OPEN`]; `last`: nothing follows. An earlier search got as far as `from`.
///
/// A close inside a JSON string does not close the call. At the end of the reply a call may lack its close.
pub fn find(text: &str, mut from: usize, last: bool) -> Found {
    while let Some(at) = text[from..].find(CLOSE).map(|i| i + from) {
        match parse(&text[..at]) {
            Ok(call) => return Found::Calls(vec![call], at + CLOSE.len()),
            Err(Broken::InString) => from = at + CLOSE.len(),
            Err(Broken::Otherwise) => return Found::Text(first_close(text, CLOSE)),
        }
    }
    if !last {
        return Found::More(rest_from(text, from, CLOSE));
    }
    match parse(text) {
        Ok(call) => Found::Calls(vec![call], text.len()),
        Err(_) => Found::Text(first_close(text, CLOSE)),
    }
}

/// The text is an object rather than something else.
pub fn opens_object(text: &str) -> bool {
    text.trim_start().starts_with('{')
}

/// Reads calls that end with the reply.
pub fn find_list(text: &str, last: bool) -> Found {
    if !last {
        return Found::More(0);
    }
    match list(text, |_| true) {
        Some(calls) => Found::Calls(calls, text.len()),
        None => Found::Text(text.len()),
    }
}

/// Objects with semicolons between them, and nothing else; each a call, and as `lawful` wants it.
fn list(text: &str, lawful: impl Fn(&Map<String, Json>) -> bool) -> Option<Vec<Call>> {
    let mut calls = Vec::new();
    let mut rest = text.trim();
    loop {
        let mut values = Deserializer::from_str(rest).into_iter::<IgnoredAny>();
        values.next()?.ok()?;
        let (object, after) = rest.split_at(values.byte_offset());
        if !lawful(&serde_json::from_str(object).ok()?) {
            return None;
        }
        calls.push(parse(object).ok()?);
        rest = after.trim_start();
        if rest.is_empty() {
            return Some(calls);
        }
        rest = rest.strip_prefix(';')?.trim_start();
        if rest.is_empty() {
            return Some(calls);
        }
    }
}

enum Broken {
    /// The text ends within a JSON string.
    InString,
    Otherwise,
}

/// A lawful call is an object with a non-empty `name` and with `arguments` that are an object, null or absent. Small models write
/// `parameters` for them, as Llama's do by rule.
fn parse(body: &str) -> Result<Call, Broken> {
    let map: Map<String, Json> = serde_json::from_str(body).map_err(|e| {
        // The kinds of serde_json's errors do not tell one end of input from another; the words do.
        if e.is_eof() && e.to_string().starts_with("EOF while parsing a string") {
            Broken::InString
        } else {
            Broken::Otherwise
        }
    })?;
    let name = map.get("name").and_then(Json::as_str);
    let name = name
        .filter(|name| !name.is_empty())
        .ok_or(Broken::Otherwise)?;
    let arguments = match (map.get("arguments"), map.get("parameters")) {
        (Some(Json::Object(_)), None) => written(body, "arguments").ok_or(Broken::Otherwise)?,
        (None, Some(Json::Object(_))) => written(body, "parameters").ok_or(Broken::Otherwise)?,
        (None | Some(Json::Null), None | Some(Json::Null)) => "{}",
        _ => return Err(Broken::Otherwise),
    };
    Ok(Call {
        name: name.to_owned(),
        arguments: arguments.to_owned(),
    })
}

/// What may stand around a call that is a whole reply.
const FENCES: [(&str, &str); 3] = [("```json", "```"), ("```", "```"), ("", "")];

/// Whether more text could make this calls that are a whole reply: `{"name": "…"` of a known tool, so far as it goes.
pub fn may_be_bare(text: &str, tools: &[Tool]) -> bool {
    let text = text.trim_start();
    FENCES.iter().any(|(open, _)| {
        open.starts_with(text)
            || text
                .strip_prefix(open)
                .is_some_and(|body| begins(body, tools))
    })
}

/// The beginning of an object that names a tool, first of all or after `"type": "function"`.
fn begins(body: &str, tools: &[Tool]) -> bool {
    const TYPED: [&str; 7] = ["{", "\"type\"", ":", "\"function\"", ",", "\"name\"", ":"];
    const PLAIN: [&str; 3] = ["{", "\"name\"", ":"];
    let after = |words: &[&str]| {
        let mut rest = body.trim_start();
        for word in words {
            if word.starts_with(rest) {
                return true;
            }
            match rest.strip_prefix(word) {
                Some(more) => rest = more.trim_start(),
                None => return false,
            }
        }
        tools.iter().any(|tool| {
            let quoted = Json::from(tool.name.as_str()).to_string();
            quoted.starts_with(rest) || rest.starts_with(&quoted)
        })
    };
    after(&PLAIN) || after(&TYPED)
}

/// The calls that a whole reply is: objects of known tools' names and their arguments, and nothing else.
pub fn bare(text: &str, tools: &[Tool]) -> Option<Vec<Call>> {
    // What is held back while it comes is what is looked at in the end, however it is cut.
    if !may_be_bare(text, tools) {
        return None;
    }
    let text = text.trim();
    let body = FENCES.iter().find_map(|(open, close)| {
        let body = text.strip_prefix(open)?.strip_suffix(close)?;
        opens_object(body).then_some(body)
    })?;
    let calls = list(body, is_bare)?;
    let known = |call: &Call| tools.iter().any(|tool| tool.name == call.name);
    calls.iter().all(known).then_some(calls)
}

/// A name, arguments, and at most the word that it is a function.
fn is_bare(map: &Map<String, Json>) -> bool {
    let known = |(key, value): (&String, &Json)| match key.as_str() {
        "name" | "arguments" | "parameters" => true,
        "type" => value == "function",
        _ => false,
    };
    map.iter().all(known) && (map.contains_key("arguments") || map.contains_key("parameters"))
}

/// The text of an object's member; of its last one, as everywhere, when it stands there twice.
fn written<'a>(object: &'a str, member: &str) -> Option<&'a str> {
    let mut found = None;
    let mut rest = object.trim().strip_prefix('{')?;
    loop {
        let mut keys = Deserializer::from_str(rest).into_iter::<String>();
        let key = keys.next()?.ok()?;
        rest = rest[keys.byte_offset()..].trim_start().strip_prefix(':')?;
        let mut values = Deserializer::from_str(rest).into_iter::<IgnoredAny>();
        values.next()?.ok()?;
        let (value, after) = rest.split_at(values.byte_offset());
        if key == member {
            found = Some(value.trim());
        }
        match after.trim_start().strip_prefix(',') {
            Some(after) => rest = after,
            None => return found,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(name: &str, arguments: &str, length: usize) -> Found {
        let (name, arguments) = (name.to_owned(), arguments.to_owned());
        Found::Calls(vec![Call { name, arguments }], length)
    }

    #[test]
    fn arguments_stay_as_written() {
        let body = r#" {"arguments" : {"b": [1.50, "é\u0041"],  "a":{}} , "name":"f"} "#;
        let text = format!("{body}{CLOSE}rest");
        let want = r#"{"b": [1.50, "é\u0041"],  "a":{}}"#;
        assert_eq!(
            find(&text, 0, false),
            call("f", want, body.len() + CLOSE.len())
        );
        assert_eq!(find(r#"{"name":"f"}"#, 0, true), call("f", "{}", 12));
        let null = r#"{"name":"f","arguments":null}"#;
        assert_eq!(find(null, 0, true), call("f", "{}", null.len()));
    }

    #[test]
    fn a_whole_reply_may_be_a_call_of_a_known_tool() {
        let tools = ["get_weather", "add"].map(|name| Tool {
            name: name.to_owned(),
            definition: String::new(),
        });
        for text in [
            r#"{"name": "add", "arguments": {"a": 1}}"#,
            " {\n  \"name\" : \"add\",\"arguments\":{\"a\": 1}}\n",
            "```json\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n```",
            "```\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n```\n",
            r#"{"name": "add", "parameters": {"a": 1}}"#,
            r#"{"type": "function", "name": "add", "parameters": {"a": 1}};"#,
            r#"{"name": "add", "parameters": {"a": 1}}; {"name": "get_weather", "parameters": {"c": ";"}}"#,
        ] {
            let calls = bare(text, &tools).unwrap();
            let call = &calls[0];
            assert_eq!(
                (call.name.as_str(), call.arguments.as_str()),
                ("add", r#"{"a": 1}"#)
            );
            assert_eq!(calls.len(), text.matches("\"name\"").count());
            assert!((0..text.len()).all(|end| may_be_bare(&text[..end], &tools)));
        }
        for text in [
            r#"{"name": "sub", "arguments": {}}"#,
            r#"{"name": "add"}"#,
            r#"{"arguments": {}, "name": "add"}"#,
            r#"{"name": "add", "arguments": {}, "more": 1}"#,
            r#"{"name": "add", "arguments": {}} and so on"#,
            r#"So: {"name": "add", "arguments": {}}"#,
            r#"{"name": "add", "arguments": "#,
            "```json\n{\"name\": \"add\", \"arguments\": {}}",
            "",
        ] {
            assert_eq!(bare(text, &tools), None, "{text}");
        }
        for text in [
            "Hello",
            "[1",
            "{\"key\"",
            "{\"name\": \"other",
            "```rust",
            "{}",
        ] {
            assert!(!may_be_bare(text, &tools), "{text}");
        }
    }

    #[test]
    fn a_close_inside_a_string_closes_nothing() {
        let arguments = r#"{"s":"</tool_call>"}"#;
        let body = format!(r#"{{"name":"f","arguments":{arguments}}}"#);
        let text = format!("{body}{CLOSE}");
        assert_eq!(find(&text, 0, false), call("f", arguments, text.len()));
        let Found::More(from) = find(&body, 0, false) else {
            panic!("decided too early");
        };
        assert_eq!(find(&text, from, false), call("f", arguments, text.len()));
        // A string that never ends: the first close was one.
        let broken = r#"{"name":"f</tool_call> x <tool_call>{"name":"g"}</tool_call>"#;
        let first = r#"{"name":"f</tool_call>"#.len();
        assert_eq!(find(broken, 0, false), Found::Text(first));
    }
}
