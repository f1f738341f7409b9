//! Calls as Gemma's models for functions write them: `call:name{key:value,…}`, texts between control tokens of their own.

use super::{Call, Found, Marks, first_close, rest_from};
use serde_json::{Map, Value as Json};

const DEEPEST: usize = 64;

/// Reads what follows the opening token. A close inside a text closes nothing.
pub fn find(marks: Marks, text: &str, mut from: usize, last: bool) -> Found {
    let call = |end: usize| {
        let mut rest = Cursor {
            text: &text[..end],
            marks,
        };
        rest.call()
    };
    while let Some(at) = text[from..].find(marks.close).map(|i| i + from) {
        let end = at + marks.close.len();
        if let Some(call) = call(at) {
            return Found::Calls(vec![call], end);
        }
        // Within a text there is an odd number of quotes before it.
        if text[..at].matches(marks.quote).count().is_multiple_of(2) {
            return Found::Text(first_close(text, marks.close));
        }
        from = end;
    }
    if !last {
        return Found::More(rest_from(text, from, marks.close));
    }
    match call(text.len()) {
        Some(call) => Found::Calls(vec![call], text.len()),
        None => Found::Text(first_close(text, marks.close)),
    }
}

struct Cursor<'a> {
    text: &'a str,
    marks: Marks,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, word: &str) -> bool {
        self.text = self.text.trim_start();
        let rest = self.text.strip_prefix(word);
        self.text = rest.unwrap_or(self.text);
        rest.is_some()
    }

    fn until(&mut self, ends: impl FnMut(char) -> bool) -> Option<&'a str> {
        let (before, after) = self.text.split_at(self.text.find(ends)?);
        self.text = after;
        Some(before.trim())
    }

    fn call(&mut self) -> Option<Call> {
        if !self.take("call:") {
            return None;
        }
        let name = self.until(|c| c == '{')?;
        if name.is_empty() || name.contains(char::is_whitespace) {
            return None;
        }
        let arguments = self.value(0)?;
        self.text.trim().is_empty().then(|| Call {
            name: name.to_owned(),
            arguments: arguments.to_string(),
        })
    }

    fn quoted(&mut self) -> Option<&'a str> {
        if !self.take(self.marks.quote) {
            return None;
        }
        let (text, rest) = self.text.split_once(self.marks.quote)?;
        self.text = rest;
        Some(text)
    }

    fn value(&mut self, depth: usize) -> Option<Json> {
        if depth > DEEPEST {
            return None;
        }
        if let Some(text) = self.quoted() {
            return Some(Json::from(text));
        }
        if self.take("{") {
            let mut map = Map::new();
            while !self.take("}") {
                let key = match self.quoted() {
                    Some(key) => key,
                    None => self.until(|c| c == ':')?,
                };
                if !self.take(":") {
                    return None;
                }
                let value = self.value(depth + 1)?;
                map.insert(key.to_owned(), value);
                if !self.take(",") && !self.text.trim_start().starts_with('}') {
                    return None;
                }
            }
            return Some(Json::Object(map));
        }
        if self.take("[") {
            let mut list = Vec::new();
            while !self.take("]") {
                list.push(self.value(depth + 1)?);
                if !self.take(",") && !self.text.trim_start().starts_with(']') {
                    return None;
                }
            }
            return Some(Json::Array(list));
        }
        let word = self.until(|c| matches!(c, ',' | '}' | ']'))?;
        serde_json::from_str(word).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{FUNCTION_GEMMA, GEMMA_4};

    #[test]
    fn both_generations_are_read() {
        let old = "call:get{place:<escape>Köln, {a}<escape>,n:2,deep:{list:[1,true,<escape>x<escape>]}}<end_function_call>more";
        let Found::Calls(calls, length) = find(FUNCTION_GEMMA, old, 0, false) else {
            panic!("not found");
        };
        assert_eq!(&old[length..], "more");
        assert_eq!(calls[0].name, "get");
        let want = r#"{"place":"Köln, {a}","n":2,"deep":{"list":[1,true,"x"]}}"#;
        assert_eq!(calls[0].arguments, want);
        let new = "call:f{s:<|\"|>a<tool_call|>b<|\"|>}<tool_call|>";
        let Found::Calls(calls, length) = find(GEMMA_4, new, 0, false) else {
            panic!("not found");
        };
        assert_eq!(
            (calls[0].arguments.as_str(), length),
            (r#"{"s":"a<tool_call|>b"}"#, new.len())
        );
        assert!(matches!(
            find(GEMMA_4, "call:f{}", 0, true),
            Found::Calls(..)
        ));
    }

    #[test]
    fn broken_calls_stay_text() {
        for broken in [
            "call:f{a:}<tool_call|>",
            "call:{}<tool_call|>",
            "f{}<tool_call|>",
            "call:f{a:1 b:2}<tool_call|>",
            "call:f{a:<|\"|>x}<tool_call|>",
        ] {
            assert_eq!(
                find(GEMMA_4, broken, 0, true),
                Found::Text(broken.len()),
                "{broken}"
            );
        }
    }
}
