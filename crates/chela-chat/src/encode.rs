//! Text to ids, with a wall between what the template wrote and what somebody typed.
//!
//! Before rendering, every special token's text inside the conversation is broken by a mark after its first character; text
//! that could become a special one together with its neighbours gets a mark at that edge. After rendering, only unmarked
//! special texts (the template's own) become control ids, and the marks are taken out of the rest before it is encoded.
//! Marks change no id of a conversation without special texts: its ids are those of tokenizing the rendered text at once.

use crate::{error::ChatError, words::Words};
use chela_core::TokenId;
use regex::Regex;
use serde_json::Value as Json;
use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
};
use tokenizers::{
    AddedToken, ModelWrapper, PreTokenizerWrapper, Tokenizer,
    pre_tokenizers::metaspace::PrependScheme,
};

/// Breaks a special text after its first character.
const BREAK: char = '\u{F8FE}';
/// Keeps a typed text apart from its neighbour.
const EDGE: char = '\u{F8FD}';
/// Before a digit: one of [`MARKS`] that somebody typed.
const ESCAPE: char = '\u{F8FC}';
/// Private-use characters with a meaning here.
pub const MARKS: [char; 3] = [BREAK, EDGE, ESCAPE];

/// A control token.
#[derive(Clone, Copy, Debug)]
struct Special {
    id: TokenId,
    /// It swallows white space before it.
    left: bool,
    /// It swallows white space after it.
    right: bool,
}

/// Text to ids.
pub struct Encoder {
    /// Reads every special text as ordinary text.
    tokenizer: Tokenizer,
    /// What it read before, where that may be used again.
    words: Option<Words>,
    specials: HashMap<String, Special>,
    /// Finds special texts, the longest first.
    finder: Option<Regex>,
    /// Which ids must not come out of ordinary text.
    control: Vec<bool>,
    /// The first piece of a text, and only that, begins with a space of the tokenizer's own.
    opening_space: bool,
    edges: Edges,
}

/// Beginnings and ends of special texts.
#[derive(Default)]
struct Edges {
    begins: HashSet<String>,
    ends: HashSet<String>,
    longest: usize,
}

impl Encoder {
    /// Forgets the words that were encoded before.
    pub fn forget_words(&self) {
        if let Some(words) = &self.words {
            words.clear();
        }
    }

    /// `specials`: every control token with its text.
    pub fn new(
        mut tokenizer: Tokenizer,
        specials: &[(TokenId, String)],
    ) -> Result<Self, ChatError> {
        let texts: Vec<_> = specials
            .iter()
            .filter(|(_, text)| !text.is_empty())
            .collect();
        let added = tokenizer.get_added_tokens_decoder();
        let known = |id: &TokenId| added.get(id).is_some_and(|token| token.special);
        let missing: Vec<AddedToken> = texts
            .iter()
            .filter(|(id, _)| !known(id))
            .map(|(_, text)| AddedToken::from(text.as_str(), true).normalized(false))
            .collect();
        let special = |(id, text): &&(TokenId, String)| {
            let token = added.get(id);
            let left = token.is_some_and(|t| t.lstrip);
            let right = token.is_some_and(|t| t.rstrip);
            let id = *id;
            (text.clone(), Special { id, left, right })
        };
        let table = texts.iter().map(special).collect();
        tokenizer.add_special_tokens(&missing);
        tokenizer.set_encode_special_tokens(true);
        let opening_space = leave_out_opening_space(&mut tokenizer);
        Ok(Self {
            control: control_ids(&tokenizer, &texts),
            finder: finder(&texts).map_err(|e| ChatError::Tokenizer(e.to_string()))?,
            edges: Edges::new(&texts),
            specials: table,
            opening_space,
            words: Words::of(&tokenizer),
            tokenizer,
        })
    }

    /// Ordinary text: never a control id.
    pub fn ordinary(&self, text: &str) -> Result<Vec<TokenId>, ChatError> {
        self.piece(text, true)
    }

    /// What a template rendered from guarded texts. `opens`: it is the beginning of the prompt.
    pub fn rendered(&self, text: &str, opens: bool) -> Result<Vec<TokenId>, ChatError> {
        let mut ids = Vec::new();
        let mut done = 0;
        let mut swallow = false;
        while let Some((start, end, special)) = self.next_control(text, done) {
            let mut before = &text[done..start];
            if swallow {
                before = before.trim_start();
            }
            if special.left {
                before = before.trim_end();
            }
            ids.extend(self.piece(&unguard(before), opens && done == 0)?);
            ids.push(special.id);
            swallow = special.right;
            done = end;
        }
        let mut rest = &text[done..];
        if swallow {
            rest = rest.trim_start();
        }
        ids.extend(self.piece(&unguard(rest), opens && done == 0)?);
        Ok(ids)
    }

    /// The next special text that the template itself wrote.
    fn next_control(&self, text: &str, mut from: usize) -> Option<(usize, usize, Special)> {
        let finder = self.finder.as_ref()?;
        loop {
            let found = finder.find_at(text, from)?;
            let special = *self.specials.get(found.as_str())?;
            // The break after the first character leaves only texts of a single character whole.
            let single = found.as_str().chars().nth(1).is_none();
            if !single || !text[found.end()..].starts_with(BREAK) {
                return Some((found.start(), found.end(), special));
            }
            from = found.end();
        }
    }

    fn piece(&self, text: &str, first: bool) -> Result<Vec<TokenId>, ChatError> {
        let ids = self.encode(text, first)?;
        if !ids.iter().any(|id| self.is_control(*id)) {
            return Ok(ids);
        }
        // The vocabulary itself builds a control token out of its letters: encode the text in parts that cannot.
        let mut ids = Vec::new();
        let mut done = 0;
        for cut in self.cuts(text) {
            ids.extend(self.encode(&text[done..cut], first && done == 0)?);
            done = cut;
        }
        ids.extend(self.encode(&text[done..], first && done == 0)?);
        match ids.iter().find(|id| self.is_control(**id)) {
            None => Ok(ids),
            Some(id) => Err(ChatError::Tokenizer(format!(
                "text would be read as the control token {id}; take that text out"
            ))),
        }
    }

    fn encode(&self, text: &str, first: bool) -> Result<Vec<TokenId>, ChatError> {
        if text.is_empty() {
            return Ok(Vec::new());
        }
        let spaced;
        let text = if first && self.opening_space && !text.starts_with([' ', '▁']) {
            spaced = format!(" {text}");
            &spaced
        } else {
            text
        };
        let encode = |text: &str| {
            let encoding = self.tokenizer.encode_fast(text, false);
            let encoding = encoding.map_err(|e| ChatError::Tokenizer(e.to_string()))?;
            Ok(encoding.get_ids().to_vec())
        };
        match &self.words {
            Some(words) => words.encode(text, encode),
            None => encode(text),
        }
    }

    fn is_control(&self, id: TokenId) -> bool {
        self.control.get(id as usize).copied().unwrap_or(false)
    }

    /// Where special texts are broken: after the first character of each, overlapping ones included.
    fn cuts(&self, text: &str) -> Vec<usize> {
        let mut cuts = Vec::new();
        let Some(finder) = &self.finder else {
            return cuts;
        };
        let mut from = 0;
        while let Some(found) = finder.find_at(text, from) {
            from = found.start() + found.as_str().chars().next().map_or(1, char::len_utf8);
            cuts.push(from);
        }
        cuts
    }

    /// Typed text in which no control token can be found.
    pub fn guard(&self, text: &str) -> String {
        let text = escape(text);
        let mut out = String::with_capacity(text.len());
        if self.edges.opens(&text) {
            out.push(EDGE);
        }
        self.push_broken(&text, &mut out);
        if self.edges.closes(&text) {
            out.push(EDGE);
        }
        out
    }

    /// Every special text in it broken.
    fn push_broken(&self, text: &str, out: &mut String) {
        let mut done = 0;
        for cut in self.cuts(text) {
            out.push_str(&text[done..cut]);
            out.push(BREAK);
            done = cut;
        }
        out.push_str(&text[done..]);
    }

    /// The same for every string inside JSON: there an escape may hide what the text is. Keys, by which templates look things
    /// up, get none at their edges.
    pub fn guard_json(&self, value: &mut Json) {
        match value {
            Json::String(text) => *text = self.guard(text),
            Json::Array(items) => items.iter_mut().for_each(|item| self.guard_json(item)),
            Json::Object(map) => {
                for (key, mut item) in std::mem::take(map) {
                    self.guard_json(&mut item);
                    let mut broken = String::with_capacity(key.len());
                    self.push_broken(&escape(&key), &mut broken);
                    map.insert(broken, item);
                }
            }
            _ => {}
        }
    }
}

impl Edges {
    fn new(texts: &[&(TokenId, String)]) -> Self {
        let mut edges = Self::default();
        for (_, text) in texts {
            for (at, _) in text.char_indices().skip(1) {
                edges.begins.insert(text[..at].to_owned());
                edges.ends.insert(text[at..].to_owned());
                edges.longest = edges.longest.max(at).max(text.len() - at);
            }
        }
        edges
    }

    /// The text begins with the end of a special one.
    fn opens(&self, text: &str) -> bool {
        let ends = text.char_indices().skip(1).map(|(at, _)| at);
        let mut ends = ends
            .chain([text.len()])
            .take_while(|at| *at <= self.longest);
        ends.any(|at| self.ends.contains(&text[..at]))
    }

    /// The text ends with the beginning of a special one.
    fn closes(&self, text: &str) -> bool {
        let starts = text.char_indices().rev().map(|(at, _)| at);
        let mut starts = starts.take_while(|at| text.len() - at <= self.longest);
        starts.any(|at| self.begins.contains(&text[at..]))
    }
}

/// Looks for the marks' first byte before it looks for characters: most texts have none, and bytes are found quickly.
fn has_marks(text: &str) -> bool {
    text.as_bytes().contains(&0xEF) && text.contains(MARKS)
}

/// Typed marks written so that they are none.
fn escape(text: &str) -> Cow<'_, str> {
    if !has_marks(text) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        match MARKS
            .iter()
            .zip("012".chars())
            .find(|(mark, _)| **mark == c)
        {
            Some((_, digit)) => out.extend([ESCAPE, digit]),
            None => out.push(c),
        }
    }
    Cow::Owned(out)
}

/// Takes the marks out and gives back those that were typed.
pub fn unguard(text: &str) -> Cow<'_, str> {
    if !has_marks(text) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            BREAK | EDGE => {}
            // A break may stand between an escape and its digit when a special text begins with that.
            ESCAPE => {
                let digit = chars.find(|c| *c != BREAK).and_then(|c| c.to_digit(10));
                out.extend(digit.and_then(|d| MARKS.get(d as usize)));
            }
            c => out.push(c),
        }
    }
    Cow::Owned(out)
}

fn finder(texts: &[&(TokenId, String)]) -> Result<Option<Regex>, regex::Error> {
    if texts.is_empty() {
        return Ok(None);
    }
    let mut words: Vec<&str> = texts.iter().map(|(_, text)| text.as_str()).collect();
    // Alternatives are tried in order: the longest first, so that no text hides inside another.
    words.sort_unstable_by_key(|word| std::cmp::Reverse(word.len()));
    let words: Vec<String> = words.into_iter().map(regex::escape).collect();
    Regex::new(&words.join("|")).map(Some)
}

/// Ids of the special texts, but for the one that stands for unknown characters.
fn control_ids(tokenizer: &Tokenizer, texts: &[&(TokenId, String)]) -> Vec<bool> {
    let unknown = match tokenizer.get_model() {
        ModelWrapper::BPE(model) => model.get_unk_token().clone(),
        ModelWrapper::WordPiece(model) => Some(model.unk_token.clone()),
        ModelWrapper::WordLevel(model) => Some(model.unk_token.clone()),
        ModelWrapper::Unigram(_) => Some("<unk>".to_owned()),
    };
    let mut control = Vec::new();
    for (id, text) in texts {
        if Some(text) == unknown.as_ref() {
            continue;
        }
        let at = *id as usize;
        if control.len() <= at {
            control.resize(at + 1, false);
        }
        control[at] = true;
    }
    control
}

/// Metaspace's scheme `first` puts a space before the first piece of a text only. Pieces are encoded one by one here, so the
/// tokenizer is told not to, and [`Encoder::encode`] does it.
fn leave_out_opening_space(tokenizer: &mut Tokenizer) -> bool {
    let Some(PreTokenizerWrapper::Metaspace(space)) = tokenizer.get_pre_tokenizer() else {
        return false;
    };
    if space.prepend_scheme != PrependScheme::First {
        return false;
    }
    let mut space = space.clone();
    space.set_prepend_scheme(PrependScheme::Never);
    tokenizer.with_pre_tokenizer(Some(space));
    true
}

#[cfg(test)]
mod tests;
