//! From a reply's tokens to what a client sees: text, reasoning, tool calls. What is streamed adds up to the final message.

use crate::{
    decode::TextDecoder,
    stop::{StopText, overlap},
};
use chela_core::{Message, TokenId, ToolCall};

/// How to read a reply.
#[derive(Clone, Debug, Default)]
pub struct AnswerOptions {
    /// Look for tool calls.
    pub tools: bool,
    /// Texts that end the reply and are not shown.
    pub stops: Vec<String>,
    /// Makes call ids unique: differs for each reply.
    pub call_id_seed: u64,
}

/// A piece of the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerDelta {
    /// Visible text.
    Content(String),
    /// Thinking.
    Reasoning(String),
    /// A complete call.
    ToolCall {
        /// Place among the reply's calls.
        index: usize,
        /// Unique in the session.
        id: String,
        /// Tool.
        name: String,
        /// JSON text.
        arguments: String,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Start,
    Thinking,
    Text,
    Call,
}

const THINK: (&str, &str) = ("<think>", "</think>");
const CALL: (&str, &str) = ("<tool_call>", "</tool_call>");

/// Follows one reply.
#[derive(Clone, Debug)]
pub struct AnswerParser {
    decoder: TextDecoder,
    stop: StopText,
    options: AnswerOptions,
    place: Place,
    held: String,
    message: Message,
}

impl AnswerParser {
    /// Nothing read yet.
    pub fn new(decoder: TextDecoder, options: AnswerOptions) -> Self {
        Self {
            decoder,
            stop: StopText::new(&options.stops),
            options,
            place: Place::Start,
            held: String::new(),
            message: Message::assistant(""),
        }
    }

    /// Takes a token of the reply (end ids included: they have no text).
    pub fn push(&mut self, id: TokenId) -> Vec<AnswerDelta> {
        let text = self.decoder.push(id);
        let text = self.stop.push(&text);
        self.read(&text, false)
    }

    /// The rest, and the whole message.
    pub fn finish(&mut self) -> (Vec<AnswerDelta>, Message) {
        let mut text = self.decoder.finish();
        text = self.stop.push(&text);
        text += &self.stop.finish();
        let deltas = self.read(&text, true);
        (
            deltas,
            std::mem::replace(&mut self.message, Message::assistant("")),
        )
    }

    fn read(&mut self, text: &str, last: bool) -> Vec<AnswerDelta> {
        self.held.push_str(text);
        let mut deltas = Vec::new();
        while self.advance(last, &mut deltas) {}
        deltas
    }

    /// One move through the held text; false when more is needed.
    fn advance(&mut self, last: bool, deltas: &mut Vec<AnswerDelta>) -> bool {
        match self.place {
            Place::Start => {
                // Reasoning stands at the very start, after white space at most.
                let trimmed = self.held.trim_start();
                if let Some(rest) = trimmed.strip_prefix(THINK.0) {
                    self.held = rest.to_owned();
                    self.place = Place::Thinking;
                    return true;
                }
                if !last && THINK.0.starts_with(trimmed) {
                    return false;
                }
                self.place = Place::Text;
                true
            }
            Place::Thinking => self.until(THINK.1, Place::Text, last, deltas),
            Place::Text if self.options.tools => self.until(CALL.0, Place::Call, last, deltas),
            Place::Text => {
                let text = std::mem::take(&mut self.held);
                self.say(text, deltas);
                false
            }
            Place::Call => self.call(last, deltas),
        }
    }

    /// Says the text before `tag`; the tag moves to `next`.
    fn until(&mut self, tag: &str, next: Place, last: bool, deltas: &mut Vec<AnswerDelta>) -> bool {
        if let Some(at) = self.held.find(tag) {
            let rest = self.held[at + tag.len()..].to_owned();
            self.held.truncate(at);
            let text = std::mem::replace(&mut self.held, rest);
            self.say(text, deltas);
            self.place = next;
            return true;
        }
        let keep = if last { 0 } else { overlap(&self.held, tag) };
        let rest = self.held.split_off(self.held.len() - keep);
        let text = std::mem::replace(&mut self.held, rest);
        self.say(text, deltas);
        false
    }

    fn say(&mut self, text: String, deltas: &mut Vec<AnswerDelta>) {
        if text.is_empty() {
            return;
        }
        if self.place == Place::Thinking {
            self.message
                .reasoning
                .get_or_insert_default()
                .push_str(&text);
            deltas.push(AnswerDelta::Reasoning(text));
        } else {
            self.message.content.push_str(&text);
            deltas.push(AnswerDelta::Content(text));
        }
    }

    /// A call becomes one when its end is there and it is lawful; else its text is text: never both, never neither.
    fn call(&mut self, last: bool, deltas: &mut Vec<AnswerDelta>) -> bool {
        let end = self.held.find(CALL.1);
        let (body, after) = match end {
            Some(at) => (self.held[..at].to_owned(), Some(at + CALL.1.len())),
            None if last => (self.held.clone(), None),
            None => return false,
        };
        let rest = after.map_or(String::new(), |at| self.held[at..].to_owned());
        self.held = rest;
        self.place = Place::Text;
        match parse(&body) {
            Some((name, arguments)) => {
                let index = self.message.tool_calls.len();
                let id = call_id(self.options.call_id_seed, index);
                self.message.tool_calls.push(ToolCall {
                    id: id.clone(),
                    name: name.clone(),
                    arguments: arguments.clone(),
                });
                deltas.push(AnswerDelta::ToolCall {
                    index,
                    id,
                    name,
                    arguments,
                });
            }
            None => {
                let close = if after.is_some() { CALL.1 } else { "" };
                self.say(format!("{}{body}{close}", CALL.0), deltas);
            }
        }
        true
    }
}

/// Name and arguments of a lawful call: an object with a non-empty `name` and `arguments` that are an object (or absent).
fn parse(body: &str) -> Option<(String, String)> {
    let value: serde_json::Value = serde_json::from_str(body.trim()).ok()?;
    let name = value
        .get("name")?
        .as_str()
        .filter(|n| !n.is_empty())?
        .to_owned();
    match value.get("arguments") {
        None if value.get("parameters").is_none() => Some((name, "{}".to_owned())),
        Some(arguments) if arguments.is_object() => Some((name, arguments.to_string())),
        _ => None,
    }
}

/// `call_` and 24 letters and digits.
fn call_id(seed: u64, index: usize) -> String {
    const LETTERS: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
    let mut state = seed ^ (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut id = String::from("call_");
    for _ in 0..24 {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        id.push(LETTERS[((state >> 33) % 36) as usize] as char);
    }
    id
}
