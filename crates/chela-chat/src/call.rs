//! Tool calls as Hermes and Qwen models write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

use serde::de::IgnoredAny;
use serde_json::{Deserializer, Map, Value as Json};

/// What opens a call.
pub const OPEN: &str = "<tool_call>";
/// What closes it.
pub const CLOSE: &str = "</tool_call>";

/// A call as written.
#[derive(Debug, PartialEq, Eq)]
pub struct Call {
    /// The tool.
    pub name: String,
    /// JSON text of an object, as the model wrote it.
    pub arguments: String,
}

/// What the text after [`OPEN`] is.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    /// A call, and how many bytes it takes with its close.
    Call(Call, usize),
    /// Not a lawful call; so many bytes of it are text.
    Text(usize),
    /// Not known yet. The search may go on from this byte.
    More(usize),
}

/// Reads the text after [`OPEN`]; `last`: nothing follows. An earlier search got as far as `from`.
///
/// A close inside a JSON string does not close the call. At the end of the reply a call may lack its close.
pub fn find(text: &str, mut from: usize, last: bool) -> Found {
    while let Some(at) = text[from..].find(CLOSE).map(|i| i + from) {
        match parse(&text[..at]) {
            Ok(call) => return Found::Call(call, at + CLOSE.len()),
            Err(Broken::InString) => from = at + CLOSE.len(),
            Err(Broken::Otherwise) => return Found::Text(first_close(text)),
        }
    }
    if !last {
        // The end of what is there may be the beginning of a close.
        let mut end = text.len().saturating_sub(CLOSE.len());
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        return Found::More(from.max(end));
    }
    match parse(text) {
        Ok(call) => Found::Call(call, text.len()),
        Err(_) => Found::Text(first_close(text)),
    }
}

fn first_close(text: &str) -> usize {
    text.find(CLOSE).map_or(text.len(), |at| at + CLOSE.len())
}

enum Broken {
    /// The text ends within a JSON string.
    InString,
    Otherwise,
}

/// A lawful call is an object with a non-empty `name` and with `arguments` that are an object, null or absent.
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
    let arguments = match map.get("arguments") {
        Some(Json::Object(_)) => written(body, "arguments").ok_or(Broken::Otherwise)?,
        // Arguments under another name are not thrown away.
        None | Some(Json::Null) if !map.contains_key("parameters") => "{}",
        _ => return Err(Broken::Otherwise),
    };
    Ok(Call {
        name: name.to_owned(),
        arguments: arguments.to_owned(),
    })
}

/// What may stand around a call that is a whole reply.
const FENCES: [(&str, &str); 3] = [("```json", "```"), ("```", "```"), ("", "")];

/// Whether more text could make this a call that is a whole reply: `{"name": "…"` of a known tool, so far as it goes.
pub fn may_be_bare(text: &str, tools: &[String]) -> bool {
    let text = text.trim_start();
    let begins = |body: &str| {
        let mut rest = body.trim_start();
        for part in ["{", "\"name\"", ":"] {
            if part.starts_with(rest) {
                return true;
            }
            match rest.strip_prefix(part) {
                Some(more) => rest = more.trim_start(),
                None => return false,
            }
        }
        tools.iter().any(|name| {
            let quoted = Json::from(name.as_str()).to_string();
            quoted.starts_with(rest) || rest.starts_with(&quoted)
        })
    };
    FENCES
        .iter()
        .any(|(open, _)| open.starts_with(text) || text.strip_prefix(open).is_some_and(begins))
}

/// The call that a whole reply is: an object of a known tool's name and its arguments, and nothing else.
pub fn bare(text: &str, tools: &[String]) -> Option<Call> {
    // What is held back while it comes is what is looked at in the end, however it is cut.
    if !may_be_bare(text, tools) {
        return None;
    }
    let text = text.trim();
    let body = FENCES.iter().find_map(|(open, close)| {
        let body = text.strip_prefix(open)?.strip_suffix(close)?;
        body.trim_start().starts_with('{').then_some(body)
    })?;
    let map: Map<String, Json> = serde_json::from_str(body).ok()?;
    if !map.keys().all(|key| key == "name" || key == "arguments") || !map.contains_key("arguments")
    {
        return None;
    }
    parse(body).ok().filter(|call| tools.contains(&call.name))
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

/// `call_` and 24 letters and digits, from the reply's seed and the call's place.
pub fn id(seed: u64, index: usize) -> String {
    const LETTERS: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
    // SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators").
    const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |mut x: u64| {
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    };
    let mut state = mix(seed ^ mix(index as u64 + 1));
    let mut id = String::from("call_");
    for _ in 0..24 {
        state = state.wrapping_add(GAMMA);
        id.push(char::from(LETTERS[(mix(state) % 36) as usize]));
    }
    id
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(name: &str, arguments: &str, length: usize) -> Found {
        let (name, arguments) = (name.to_owned(), arguments.to_owned());
        Found::Call(Call { name, arguments }, length)
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
        let tools = ["get_weather".to_owned(), "add".to_owned()];
        for text in [
            r#"{"name": "add", "arguments": {"a": 1}}"#,
            " {\n  \"name\" : \"add\",\"arguments\":{\"a\": 1}}\n",
            "```json\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n```",
            "```\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n```\n",
        ] {
            let call = bare(text, &tools).unwrap();
            assert_eq!(
                (call.name.as_str(), call.arguments.as_str()),
                ("add", r#"{"a": 1}"#)
            );
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

    #[test]
    fn ids_are_unique() {
        let ids: std::collections::HashSet<String> = (0..40)
            .flat_map(|seed| (0..5).map(move |i| id(seed, i)))
            .collect();
        assert_eq!(ids.len(), 200);
        assert!(ids.iter().all(|i| i.len() == 29));
    }
}
