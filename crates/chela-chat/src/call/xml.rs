//! Calls as Qwen3-Coder writes them. Values stand as they are, without escapes: the tool's schema says what is no text.

use super::{Call, Found, first_close, json, parameter, rest_from};
use chela_core::Tool;
use serde_json::{Map, Value as Json};

/// Opens a function.
pub const OPEN: &str = "<function=";
const CLOSE: &str = "</function>";
const PARAMETER: (&str, &str) = ("<parameter=", "</parameter>");

/// Reads what follows `<tool_call>` or, where that was forgotten, `<function=`.
pub fn find(open: &str, text: &str, mut from: usize, last: bool, tools: &[Tool]) -> Found {
    let wrapped = open != OPEN;
    let close = if wrapped { json::CLOSE } else { CLOSE };
    while let Some(at) = text[from..].find(CLOSE).map(|i| i + from + CLOSE.len()) {
        let mut rest = Cursor(&text[..at]);
        if let Some(call) = function(&mut rest, wrapped, tools)
            && rest.0.is_empty()
        {
            return closed(call, text, at, (wrapped, last), tools);
        }
        // It stands inside a value.
        from = at;
    }
    if wrapped && let Some(at) = text.find(json::CLOSE) {
        // Closed without a function that is whole; unless a value goes on past it.
        let inside = text[..at].rfind(PARAMETER.0) > text[..at].rfind(PARAMETER.1);
        if !inside || last {
            return Found::Text(at + json::CLOSE.len());
        }
    }
    if last {
        return Found::Text(first_close(text, close));
    }
    Found::More(rest_from(text, from, CLOSE))
}

/// After a function that is whole: more of them, the outer close, or something else.
fn closed(
    call: Call,
    text: &str,
    at: usize,
    (wrapped, last): (bool, bool),
    tools: &[Tool],
) -> Found {
    if !wrapped {
        return Found::Calls(vec![call], at);
    }
    let mut calls = vec![call];
    let mut rest = Cursor(&text[at..]);
    loop {
        rest.space();
        let here = text.len() - rest.0.len();
        if rest.take(json::CLOSE) {
            return Found::Calls(calls, text.len() - rest.0.len());
        }
        let Some(end) = rest.0.find(CLOSE).filter(|_| rest.0.starts_with(OPEN)) else {
            let coming = [json::CLOSE, OPEN].iter().any(|t| t.starts_with(rest.0));
            return if !last && (coming || rest.0.starts_with(OPEN)) {
                Found::More(0)
            } else {
                Found::Calls(calls, here)
            };
        };
        let mut one = Cursor(&rest.0[..end + CLOSE.len()]);
        match function(&mut one, true, tools) {
            Some(call) if one.0.is_empty() => calls.push(call),
            _ => return Found::Calls(calls, here),
        }
        rest.0 = &rest.0[end + CLOSE.len()..];
    }
}

struct Cursor<'a>(&'a str);

impl<'a> Cursor<'a> {
    fn space(&mut self) {
        self.0 = self.0.trim_start();
    }

    fn take(&mut self, text: &str) -> bool {
        let rest = self.0.strip_prefix(text);
        self.0 = rest.unwrap_or(self.0);
        rest.is_some()
    }

    fn until(&mut self, text: &str) -> Option<&'a str> {
        let (before, after) = self.0.split_once(text)?;
        self.0 = after;
        Some(before)
    }
}

/// `<function=name>`, its parameters, its close. `opened`: the first tag is still to be read.
fn function(rest: &mut Cursor<'_>, opened: bool, tools: &[Tool]) -> Option<Call> {
    rest.space();
    if opened && !rest.take(OPEN) {
        return None;
    }
    let name = rest.until(">")?.trim();
    if name.is_empty() || name.contains(['<', '\n']) {
        return None;
    }
    let tool = tools.iter().find(|tool| tool.name == name);
    let definition: Json = tool
        .and_then(|tool| serde_json::from_str(&tool.definition).ok())
        .unwrap_or_default();
    let mut arguments = Map::new();
    loop {
        rest.space();
        if rest.take(CLOSE) {
            let (name, arguments) = (name.to_owned(), Json::Object(arguments).to_string());
            return Some(Call { name, arguments });
        }
        if !rest.take(PARAMETER.0) {
            return None;
        }
        let key = rest.until(">")?.trim();
        let raw = value(rest)?;
        arguments.insert(key.to_owned(), typed(raw, parameter(&definition, key)));
    }
}

/// The text up to the close that the next tag follows: a close inside the value closes nothing.
fn value<'a>(rest: &mut Cursor<'a>) -> Option<&'a str> {
    let mut from = 0;
    loop {
        let at = rest.0[from..].find(PARAMETER.1)? + from;
        let after = &rest.0[at + PARAMETER.1.len()..];
        let next = after.trim_start();
        if next.starts_with(PARAMETER.0) || next.starts_with(CLOSE) {
            let raw = &rest.0[..at];
            rest.0 = after;
            let raw = raw.strip_prefix('\n').unwrap_or(raw);
            return Some(raw.strip_suffix('\n').unwrap_or(raw));
        }
        from = at + PARAMETER.1.len();
    }
}

/// A text unless the schema, or without one the text itself, says that it is JSON. Python's words for it are understood.
fn typed(raw: &str, schema: Option<&Json>) -> Json {
    let text = || Json::String(raw.to_owned());
    let says = |kind: &str| match schema.and_then(|s| s.get("type")) {
        Some(Json::String(one)) => one == kind,
        Some(Json::Array(list)) => list.iter().any(|one| one == kind),
        _ => false,
    };
    let only_text = schema.is_some_and(|s| s.get("type") == Some(&Json::from("string")));
    if only_text || (schema.is_some_and(|s| s.get("enum").is_some()) && !says("integer")) {
        return text();
    }
    let word = match raw.trim() {
        "True" => "true",
        "False" => "false",
        "None" => "null",
        other => other,
    };
    match serde_json::from_str::<Json>(word) {
        // `["string", "null"]`: only null is not meant as text.
        Ok(value) if says("string") && !value.is_null() => text(),
        Ok(value) => value,
        Err(_) => text(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool() -> Tool {
        Tool {
            name: "run".to_owned(),
            definition: r#"{"type":"function","function":{"name":"run","parameters":{"type":"object","properties":{
                "code":{"type":"string"},"n":{"type":"integer"},"o":{"type":"object"},"b":{"type":"boolean"},"m":{"type":["string","null"]}}}}}"#
                .to_owned(),
        }
    }

    fn calls(text: &str) -> Vec<(String, String)> {
        match find(json::OPEN, text, 0, true, &[tool()]) {
            Found::Calls(calls, length) => {
                assert_eq!(length, text.len());
                calls.into_iter().map(|c| (c.name, c.arguments)).collect()
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn values_are_what_the_schema_says() {
        let text = "\n<function=run>\n<parameter=code>\nif a < b:\n  print(\"&amp;</parameter>\")\n\n</parameter>\n<parameter=n>\n3\n</parameter>\n<parameter=o>\n{\"k\": [1]}\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n<parameter=m>\n12\n</parameter>\n<parameter=free>\n7\n</parameter>\n<parameter=word>\nhi\n</parameter>\n</function>\n</tool_call>";
        let want = r#"{"code":"if a < b:\n  print(\"&amp;</parameter>\")\n","n":3,"o":{"k":[1]},"b":true,"m":"12","free":7,"word":"hi"}"#;
        assert_eq!(calls(text), [("run".to_owned(), want.to_owned())]);
    }

    #[test]
    fn it_comes_when_it_is_whole_and_not_before() {
        let text = "<function=run>\n<parameter=code>\n</function>\n</parameter>\n</function>\n<function=run>\n</function>\n</tool_call>";
        let mut from = 0;
        for end in 0..text.len() {
            match find(json::OPEN, &text[..end], from, false, &[]) {
                Found::More(next) => from = next,
                other => panic!("{end}: {other:?}"),
            }
        }
        let Found::Calls(found, length) = find(json::OPEN, text, from, false, &[]) else {
            panic!("not found");
        };
        assert_eq!((found.len(), length), (2, text.len()));
        assert_eq!(found[0].arguments, r#"{"code":"</function>"}"#);
    }

    #[test]
    fn what_is_forgotten_at_the_edges_is_forgiven() {
        let whole = "<function=run>\n<parameter=n>\n1\n</parameter>\n</function>";
        assert_eq!(calls(whole)[0].1, r#"{"n":1}"#);
        let inner = whole.strip_prefix(OPEN).unwrap();
        let found = find(OPEN, inner, 0, false, &[tool()]);
        assert!(matches!(found, Found::Calls(_, n) if n == inner.len()));
        for broken in [
            "<function=run>\n<parameter=n>\n1\n</function>\n</tool_call>",
            "<function=>\n</function>\n</tool_call>",
            "<function=run>",
            "hello</tool_call>",
        ] {
            let found = find(json::OPEN, broken, 0, true, &[tool()]);
            assert_eq!(found, Found::Text(broken.len()), "{broken}");
        }
    }
}
