//! From a reply's tokens to what a client sees: text, reasoning, tool calls. What is streamed adds up to the final message.

use crate::{
    call::{self, CallFormat, Found},
    decode::TextDecoder,
    stop::{StopText, overlap},
};
use chela_core::{Message, TokenId, Tool, ToolCall};
use std::sync::Arc;

/// How to read a reply.
#[derive(Clone, Debug, Default)]
pub struct AnswerOptions {
    /// Look for tool calls.
    pub tools: bool,
    /// The tools. A reply may call one by being nothing but the call's object, without tags or in a code fence: small models
    /// forget the tags that their template shows them. Their schemas say what is no text where a format does not.
    pub offered: Arc<[Tool]>,
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

/// What opens and closes a thought.
pub const THINK: (&str, &str) = ("<think>", "</think>");

/// Tags that a tokenizer has as control tokens, which have no text of their own.
#[derive(Clone, Debug)]
pub struct Tags(Arc<[(TokenId, &'static str)]>);

impl Tags {
    /// Among these control tokens.
    pub fn new(specials: &[(TokenId, String)], format: CallFormat) -> Self {
        let mut tags = format.marks();
        tags.extend([THINK.0, THINK.1]);
        let of = |tag: &'static str| {
            let found = specials.iter().find(|(_, text)| text == tag)?;
            Some((found.0, tag))
        };
        Self(tags.into_iter().filter_map(of).collect())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Start,
    Thinking,
    /// Perhaps the beginning of a call without tags.
    Bare,
    Text,
    Call,
}

/// Follows one reply.
///
/// Line ends next to the think tags and white space next to a call belong to neither text: templates write them.
#[derive(Clone, Debug)]
pub struct AnswerParser {
    decoder: TextDecoder,
    tags: Tags,
    format: CallFormat,
    stop: StopText,
    options: AnswerOptions,
    place: Place,
    /// What opened the call that is being read.
    opened: &'static str,
    /// Read and not yet understood.
    held: String,
    /// How much of `held` is known to hold no end of a call.
    searched: usize,
    /// White space that is part of the text only when more text follows.
    gap: String,
    /// What was last read is a tag, not text.
    after_tag: bool,
    message: Message,
}

impl AnswerParser {
    /// Nothing read yet.
    pub(crate) fn new(
        decoder: TextDecoder,
        (tags, format): (Tags, CallFormat),
        options: AnswerOptions,
    ) -> Self {
        Self {
            decoder,
            tags,
            format,
            stop: StopText::new(&options.stops),
            options,
            place: Place::Start,
            opened: "",
            held: String::new(),
            searched: 0,
            gap: String::new(),
            after_tag: false,
            message: Message::assistant(""),
        }
    }

    /// Takes a token of the reply (end ids included: they have no text).
    pub fn push(&mut self, id: TokenId) -> Vec<AnswerDelta> {
        let tag = self.tags.0.iter().find(|(tag, _)| *tag == id);
        let text = match tag {
            Some((_, tag)) if self.options.tools || [THINK.0, THINK.1].contains(tag) => {
                self.decoder.finish() + tag
            }
            _ => self.decoder.push(id),
        };
        let text = self.stop.push(&text);
        self.read(&text, false)
    }

    /// What is read now is a thought.
    pub fn thinking(&self) -> bool {
        self.place == Place::Thinking
    }

    /// The stop string that ended the text.
    pub fn stop(&self) -> Option<&str> {
        self.stop.stop()
    }

    /// The rest, and the whole message.
    pub fn finish(&mut self) -> (Vec<AnswerDelta>, Message) {
        let mut text = self.decoder.finish();
        text = self.stop.push(&text);
        text += &self.stop.finish();
        let mut deltas = self.read(&text, true);
        if !self.after_tag {
            let gap = std::mem::take(&mut self.gap);
            self.emit(gap, &mut deltas);
        }
        let message = std::mem::replace(&mut self.message, Message::assistant(""));
        (deltas, message)
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
                    self.enter(Place::Thinking);
                    return true;
                }
                if !last && THINK.0.starts_with(trimmed) {
                    return false;
                }
                self.place = self.first();
                true
            }
            Place::Bare => self.bare(last, deltas),
            Place::Thinking => self.until(&[THINK.1], self.first(), last, deltas),
            Place::Text if self.options.tools => {
                self.until(self.format.opens(), Place::Call, last, deltas)
            }
            Place::Text => {
                let text = std::mem::take(&mut self.held);
                self.say(&text, deltas);
                false
            }
            Place::Call => self.call(last, deltas),
        }
    }

    /// Where visible text begins.
    fn first(&self) -> Place {
        if self.options.tools && !self.options.offered.is_empty() {
            Place::Bare
        } else {
            Place::Text
        }
    }

    /// Held back as long as it may still be a call and nothing else.
    fn bare(&mut self, last: bool, deltas: &mut Vec<AnswerDelta>) -> bool {
        if !last && call::may_be_bare(&self.held, &self.options.offered) {
            return false;
        }
        self.place = Place::Text;
        let found = last.then(|| call::bare(&self.held, &self.options.offered));
        let Some(calls) = found.flatten() else {
            return true;
        };
        self.held.clear();
        self.enter(Place::Text);
        self.called(calls, deltas);
        false
    }

    /// Past a tag: the white space before it is no text.
    fn enter(&mut self, place: Place) {
        self.place = place;
        self.gap.clear();
        self.after_tag = true;
    }

    /// Says the text before the first of `tags`; the tag moves to `next`.
    fn until(
        &mut self,
        tags: &'static [&'static str],
        next: Place,
        last: bool,
        deltas: &mut Vec<AnswerDelta>,
    ) -> bool {
        let found = tags
            .iter()
            .filter_map(|tag| Some((self.held.find(tag)?, *tag)))
            .min();
        if let Some((at, tag)) = found {
            let rest = self.held.split_off(at + tag.len());
            let mut text = std::mem::replace(&mut self.held, rest);
            text.truncate(at);
            self.say(&text, deltas);
            if next == Place::Call {
                // Whether it is a call, and the white space before it no text, is not known yet.
                self.place = next;
                self.opened = tag;
                self.searched = 0;
            } else {
                self.enter(next);
            }
            return true;
        }
        let begun = tags.iter().map(|tag| overlap(&self.held, tag)).max();
        let keep = if last { 0 } else { begun.unwrap_or(0) };
        let rest = self.held.split_off(self.held.len() - keep);
        let text = std::mem::replace(&mut self.held, rest);
        self.say(&text, deltas);
        false
    }

    /// Text of the place where we are; white space that may turn out to be none is kept back.
    fn say(&mut self, text: &str, deltas: &mut Vec<AnswerDelta>) {
        let mut all = std::mem::take(&mut self.gap) + text;
        if self.after_tag && self.message.tool_calls.is_empty() {
            let from = all.len() - all.trim_start_matches('\n').len();
            all.drain(..from);
        }
        let end = match (self.place, self.options.tools) {
            (Place::Thinking, _) => all.trim_end_matches('\n').len(),
            (_, true) => all.trim_end().len(),
            (_, false) => all.len(),
        };
        self.gap = all.split_off(end);
        self.emit(all, deltas);
    }

    fn emit(&mut self, text: String, deltas: &mut Vec<AnswerDelta>) {
        if text.is_empty() {
            return;
        }
        self.after_tag = false;
        if self.place == Place::Thinking {
            let reasoning = self.message.reasoning.get_or_insert_default();
            reasoning.push_str(&text);
            deltas.push(AnswerDelta::Reasoning(text));
        } else {
            self.message.content.push_str(&text);
            deltas.push(AnswerDelta::Content(text));
        }
    }

    /// A call becomes one when it is lawful; else its text is text: never both, never neither.
    fn call(&mut self, last: bool, deltas: &mut Vec<AnswerDelta>) -> bool {
        let found = self.format.find(
            self.opened,
            &self.held,
            self.searched,
            last,
            &self.options.offered,
        );
        let (calls, length) = match found {
            Found::More(from) => {
                self.searched = from;
                return false;
            }
            Found::Calls(calls, length) => (Some(calls), length),
            Found::Text(length) => (None, length),
        };
        let rest = self.held.split_off(length);
        let text = std::mem::replace(&mut self.held, rest);
        self.place = Place::Text;
        let Some(calls) = calls else {
            self.say(&format!("{}{text}", self.opened), deltas);
            return true;
        };
        self.enter(Place::Text);
        self.called(calls, deltas);
        true
    }

    fn called(&mut self, calls: Vec<call::Call>, deltas: &mut Vec<AnswerDelta>) {
        for call in calls {
            let index = self.message.tool_calls.len();
            let id = call::id(self.options.call_id_seed, index);
            let (name, arguments) = (call.name, call.arguments);
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
    }
}
