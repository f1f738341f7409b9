//! Words that were encoded before: the same word between spaces has the same ids in any text, so most of a text needs no tokenizer.
//!
//! This holds for tokenizers that first split a text by one of the patterns named here: with each of them a space before a Latin
//! letter begins a piece of its own when no white space stands before it, whatever the rest of the text is.

use chela_core::TokenId;
use serde_json::Value as Json;
use std::{
    collections::HashMap,
    sync::{PoisonError, RwLock},
};
use tokenizers::Tokenizer;

/// Qwen2's pattern, and with up to three digits Llama 3's.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Longer stretches without such a space are seldom seen twice.
const LONGEST: usize = 48;
/// Words kept; about 10 MB.
const MOST: usize = 100_000;

/// What is remembered.
pub struct Words(RwLock<HashMap<Box<str>, Box<[TokenId]>>>);

impl Words {
    /// For a tokenizer of which the above is known; `None` for others.
    pub fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let pre = serde_json::to_value(tokenizer.get_pre_tokenizer()).ok()?;
        let normalizer = serde_json::to_value(tokenizer.get_normalizer()).ok()?;
        let added = tokenizer.get_added_tokens_decoder();
        // A token that takes spaces in is found in the whole text only.
        let apart = |token: &tokenizers::AddedToken| {
            !token.lstrip && !token.rstrip && !token.single_word && !token.content.contains(' ')
        };
        let plain = normalizer.is_null() || normalizer["type"] == "NFC";
        (plain && splits(&pre) && added.values().all(apart)).then(|| Self(RwLock::default()))
    }

    /// Forgets all of them: words are people's words.
    pub fn clear(&self) {
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        known.clear();
    }

    /// The ids of a text, whose unknown words `encode` finds.
    pub fn encode<E>(
        &self,
        text: &str,
        encode: impl Fn(&str) -> Result<Vec<TokenId>, E>,
    ) -> Result<Vec<TokenId>, E> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        let mut new: Vec<(&str, Vec<TokenId>)> = Vec::new();
        {
            let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
            for word in words(text) {
                match known.get(word) {
                    Some(found) => ids.extend_from_slice(found),
                    None => {
                        let found = encode(word)?;
                        ids.extend_from_slice(&found);
                        if word.len() <= LONGEST {
                            new.push((word, found));
                        }
                    }
                }
            }
        }
        if !new.is_empty() {
            let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
            if known.len() + new.len() > MOST {
                known.clear();
            }
            known.extend(new.into_iter().map(|(word, ids)| (word.into(), ids.into())));
        }
        Ok(ids)
    }
}

/// One of the known ways to split, in any of the shapes that files have for them.
fn splits(pre: &Json) -> bool {
    let bytes = |part: &Json, regex: bool| {
        part["type"] == "ByteLevel"
            && part["add_prefix_space"] == false
            && part["use_regex"] == regex
    };
    let digits = |part: &Json| part["type"] == "Digits" && part["individual_digits"] == true;
    let split = |part: &Json| {
        part["type"] == "Split"
            && part["behavior"] == "Isolated"
            && part["invert"] == false
            && [QWEN2, LLAMA3]
                .iter()
                .any(|p| part["pattern"]["Regex"] == *p)
    };
    match pre["pretokenizers"].as_array().map(Vec::as_slice) {
        None => bytes(pre, true),
        Some([one]) => bytes(one, true),
        Some([first, second]) => {
            (split(first) && bytes(second, false)) || (digits(first) && bytes(second, true))
        }
        Some(_) => false,
    }
}

/// The text cut before each space that begins a piece of its own.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let bytes = text.as_bytes();
    let mut from = 0;
    std::iter::from_fn(move || {
        if from == bytes.len() {
            return None;
        }
        let mut at = from + 1;
        while at < bytes.len() && !begins(text, bytes, at) {
            at += 1;
        }
        let word = &text[from..at];
        from = at;
        Some(word)
    })
}

/// A space before a Latin letter, after something that is no white space.
fn begins(text: &str, bytes: &[u8], at: usize) -> bool {
    if bytes[at] != b' ' || !bytes.get(at + 1).is_some_and(u8::is_ascii_alphabetic) {
        return false;
    }
    match bytes[at - 1] {
        before if before.is_ascii() => before.is_ascii_graphic(),
        _ => {
            let before = text[..at].chars().next_back();
            before.is_some_and(|c| !c.is_whitespace() && !c.is_control())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_cut_where_nothing_depends_on_what_is_before() {
        let text = "Hello  wide world, it's 5 o'clock\n now é x\u{a0} y 12 a";
        let cut: Vec<&str> = words(text).collect();
        assert_eq!(
            cut,
            [
                "Hello  wide",
                " world,",
                " it's 5",
                " o'clock\n now é",
                " x\u{a0} y 12",
                " a"
            ]
            .as_slice()
        );
        assert_eq!(words(text).collect::<String>(), text);
        assert_eq!(words("").count(), 0);
    }
}
