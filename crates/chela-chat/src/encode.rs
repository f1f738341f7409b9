//! Text to ids, with a wall between what the template wrote and what somebody typed.
//!
//! Before rendering, every special token's text inside the conversation gets a mark after its first character; after rendering only
//! unmarked special texts (the template's own) become control ids, and the marks are taken out of ordinary text. Without special
//! texts in the conversation the ids are those of tokenizing the whole rendered text at once.

use crate::error::ChatError;
use chela_core::{Conversation, Message, TokenId, Tool};
use tokenizers::Tokenizer;

/// A private-use character; where it occurs in the conversation itself it is doubled.
const MARK: char = '\u{F8FE}';

/// Text to ids.
pub struct Encoder {
    ordinary: Tokenizer,
    specials: Vec<(TokenId, String)>,
}

impl Encoder {
    /// `specials`: every control token with its text.
    pub fn new(mut ordinary: Tokenizer, mut specials: Vec<(TokenId, String)>) -> Self {
        ordinary.set_encode_special_tokens(true);
        specials.retain(|(_, text)| !text.is_empty());
        // Longest first, so that no text hides inside another.
        specials.sort_by(|a, b| b.1.len().cmp(&a.1.len()).then(a.0.cmp(&b.0)));
        Self { ordinary, specials }
    }

    /// Ordinary text: never a control id.
    pub fn ordinary(&self, text: &str) -> Result<Vec<TokenId>, ChatError> {
        if text.is_empty() {
            return Ok(Vec::new());
        }
        let encoding = self
            .ordinary
            .encode_fast(text, false)
            .map_err(|e| ChatError::Tokenizer(e.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// What a template rendered from a guarded conversation.
    pub fn rendered(&self, text: &str) -> Result<Vec<TokenId>, ChatError> {
        let mut ids = Vec::new();
        let mut rest = text;
        while let Some((at, id, length)) = self.next_special(rest) {
            ids.extend(self.ordinary(&unguard(&rest[..at]))?);
            ids.push(id);
            rest = &rest[at + length..];
        }
        ids.extend(self.ordinary(&unguard(rest))?);
        Ok(ids)
    }

    fn next_special(&self, text: &str) -> Option<(usize, TokenId, usize)> {
        let hits = self.specials.iter().filter_map(|(id, s)| {
            text.find(s.as_str())
                .map(|at| (at, std::cmp::Reverse(s.len()), *id))
        });
        hits.min().map(|(at, length, id)| (at, id, length.0))
    }

    /// A copy of the conversation in which no typed text can be taken for a control token.
    pub fn guard(&self, conversation: &Conversation) -> Conversation {
        let message = |m: &Message| Message {
            role: m.role,
            content: self.guard_text(&m.content),
            reasoning: m.reasoning.as_deref().map(|t| self.guard_text(t)),
            tool_calls: m
                .tool_calls
                .iter()
                .map(|c| chela_core::ToolCall {
                    id: self.guard_text(&c.id),
                    name: self.guard_text(&c.name),
                    arguments: self.guard_text(&c.arguments),
                })
                .collect(),
            tool_call_id: m.tool_call_id.as_deref().map(|t| self.guard_text(t)),
            name: m.name.as_deref().map(|t| self.guard_text(t)),
            is_error: m.is_error,
        };
        let tool = |t: &Tool| Tool {
            name: self.guard_text(&t.name),
            definition: self.guard_text(&t.definition),
        };
        Conversation {
            messages: conversation.messages.iter().map(message).collect(),
            tools: conversation.tools.iter().map(tool).collect(),
            template_args: conversation
                .template_args
                .as_deref()
                .map(|t| self.guard_text(t)),
        }
    }

    fn guard_text(&self, text: &str) -> String {
        let doubled: String = if text.contains(MARK) {
            text.chars()
                .flat_map(|c| std::iter::repeat_n(c, if c == MARK { 2 } else { 1 }))
                .collect()
        } else {
            text.to_owned()
        };
        let mut out = String::new();
        let mut rest = doubled.as_str();
        while let Some((at, _, _)) = self.next_special(rest) {
            let first = rest[at..].chars().next().map_or(0, char::len_utf8);
            out.push_str(&rest[..at + first]);
            out.push(MARK);
            rest = &rest[at + first..];
        }
        out.push_str(rest);
        out
    }
}

/// Takes single marks out and makes double ones single.
fn unguard(text: &str) -> String {
    if !text.contains(MARK) {
        return text.to_owned();
    }
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c != MARK {
            out.push(c);
        } else if chars.peek() == Some(&MARK) {
            chars.next();
            out.push(MARK);
        }
    }
    out
}
