//! Ids to text, whole characters only.

use chela_core::TokenId;
use serde_json::Value as Json;
use std::{collections::BTreeMap, sync::Arc};
use tokenizers::Tokenizer;

/// The bytes of every token; control tokens have none.
#[derive(Debug)]
pub struct Bytes {
    tokens: Vec<Vec<u8>>,
    /// A text's first space was put there by the tokenizer (SentencePiece).
    opening_space: bool,
}

impl Bytes {
    /// From the tokenizer's own pieces: byte-level BPE (GPT-2's alphabet) or plain text with byte fallback (`<0x0A>`).
    pub fn new(tokenizer: &Tokenizer, specials: &BTreeMap<TokenId, String>) -> Self {
        let vocabulary = tokenizer.get_vocab(true);
        let added = tokenizer.get_added_tokens_decoder();
        let (byte_level, opening_space) = manner(tokenizer);
        let alphabet = alphabet();
        let size = vocabulary.values().max().map_or(0, |id| *id as usize + 1);
        let mut tokens = vec![Vec::new(); size];
        for (piece, id) in vocabulary {
            if specials.contains_key(&id) {
                continue;
            }
            tokens[id as usize] = match added.get(&id) {
                Some(token) if byte_level => token.content.clone().into_bytes(),
                None if byte_level => from_byte_level(&piece, &alphabet),
                // Gemma's runs of spaces are added tokens, written like any piece.
                Some(_) | None => from_plain(&piece),
            };
        }
        Self {
            tokens,
            opening_space,
        }
    }

    /// One more than the highest id.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// The text of these tokens: what a [`TextDecoder`] says in all.
    pub fn text(&self, ids: &[TokenId]) -> String {
        let mut all = Vec::with_capacity(ids.len() * 4);
        for id in ids {
            all.extend_from_slice(self.of(*id));
        }
        if self.opening_space && all.first() == Some(&b' ') {
            all.remove(0);
        }
        String::from_utf8(all)
            .unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned())
    }

    /// Of one token; empty for control tokens and ids that do not exist.
    pub fn of(&self, id: TokenId) -> &[u8] {
        self.tokens.get(id as usize).map_or(&[], Vec::as_slice)
    }
}

/// Whether pieces are written in GPT-2's alphabet, and whether decoding takes a space off the beginning.
fn manner(tokenizer: &Tokenizer) -> (bool, bool) {
    let mut parts = vec![serde_json::to_value(tokenizer.get_decoder()).unwrap_or_default()];
    if parts[0].is_null() {
        parts = vec![serde_json::to_value(tokenizer.get_pre_tokenizer()).unwrap_or_default()];
    }
    let (mut byte_level, mut opening_space) = (false, false);
    while let Some(part) = parts.pop() {
        match part["type"].as_str() {
            Some("ByteLevel") => byte_level = true,
            Some("Strip") => opening_space |= part["content"] == " " && part["start"] == 1,
            Some("Metaspace") => opening_space |= part["prepend_scheme"] != "never",
            _ => {}
        }
        for list in ["decoders", "pretokenizers"] {
            let list = part.get(list).and_then(Json::as_array);
            parts.extend(list.cloned().unwrap_or_default());
        }
    }
    (byte_level, opening_space)
}

/// GPT-2's reversible alphabet: printable bytes stand for themselves, the others for characters from U+0100 on.
fn alphabet() -> Vec<Option<u8>> {
    let printable = |b: &u8| matches!(b, 33..=126 | 161..=172 | 174..=255);
    let mut table: Vec<Option<u8>> = (0..=255).map(|b| Some(b).filter(printable)).collect();
    table.extend((0..=255).filter(|b| !printable(b)).map(Some));
    table
}

fn from_byte_level(piece: &str, alphabet: &[Option<u8>]) -> Vec<u8> {
    let byte = |c: char| alphabet.get(c as usize).copied().flatten();
    let bytes: Option<Vec<u8>> = piece.chars().map(byte).collect();
    bytes.unwrap_or_else(|| piece.as_bytes().to_vec())
}

fn from_plain(piece: &str) -> Vec<u8> {
    let hex = piece.strip_prefix("<0x").and_then(|p| p.strip_suffix('>'));
    if let Some(byte) = hex.and_then(|h| u8::from_str_radix(h, 16).ok()) {
        return vec![byte];
    }
    piece.replace('▁', " ").into_bytes()
}

/// Turns ids into text as they come; holds back bytes of a character that is not whole yet.
#[derive(Clone, Debug)]
pub struct TextDecoder {
    bytes: Arc<Bytes>,
    held: Vec<u8>,
    begun: bool,
}

impl TextDecoder {
    /// Nothing held.
    pub fn new(bytes: Arc<Bytes>) -> Self {
        Self {
            bytes,
            held: Vec::new(),
            begun: false,
        }
    }

    /// The characters that this token completes.
    pub fn push(&mut self, id: TokenId) -> String {
        let mut bytes = self.bytes.of(id);
        if !self.begun && !bytes.is_empty() {
            self.begun = true;
            if self.bytes.opening_space {
                bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
            }
        }
        self.held.extend_from_slice(bytes);
        self.take(false)
    }

    /// What is left; a character that never became whole is U+FFFD.
    pub fn finish(&mut self) -> String {
        self.take(true)
    }

    fn take(&mut self, all: bool) -> String {
        let mut out = String::new();
        loop {
            match std::str::from_utf8(&self.held) {
                Ok(text) => {
                    out.push_str(text);
                    self.held.clear();
                    return out;
                }
                Err(error) => {
                    let good = error.valid_up_to();
                    out.push_str(&String::from_utf8_lossy(&self.held[..good]));
                    match error.error_len() {
                        Some(bad) => {
                            out.push(char::REPLACEMENT_CHARACTER);
                            self.held.drain(..good + bad);
                        }
                        None if all => {
                            out.push(char::REPLACEMENT_CHARACTER);
                            self.held.clear();
                            return out;
                        }
                        None => {
                            self.held.drain(..good);
                            return out;
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decoder(pieces: &[&[u8]]) -> TextDecoder {
        let tokens = pieces.iter().map(|p| p.to_vec()).collect();
        TextDecoder::new(Arc::new(Bytes {
            tokens,
            opening_space: false,
        }))
    }

    #[test]
    fn an_emoji_over_three_tokens_comes_out_once() {
        let crab = "🦀".as_bytes();
        let mut d = decoder(&[&crab[..1], &crab[1..3], &crab[3..], b"!"]);
        assert_eq!(
            (0..4).map(|i| d.push(i)).collect::<Vec<_>>(),
            ["", "", "🦀", "!"]
        );
        assert_eq!(d.finish(), "");
    }

    #[test]
    fn broken_bytes_become_replacements() {
        let mut d = decoder(&[&[0xff], b"a", &[0xf0, 0x9f]]);
        assert_eq!(
            d.push(0) + &d.push(1) + &d.push(2) + &d.finish(),
            "\u{fffd}a\u{fffd}"
        );
    }

    #[test]
    fn the_byte_alphabet_is_gpt2s() {
        let alphabet = alphabet();
        assert_eq!(from_byte_level("Ġhi", &alphabet), b" hi");
        assert_eq!(from_byte_level("Ċ", &alphabet), b"\n");
        assert_eq!(from_plain("▁a"), b" a");
        assert_eq!(from_plain("<0x0A>"), b"\n");
        let all: std::collections::HashSet<u8> = alphabet.into_iter().flatten().collect();
        assert_eq!(all.len(), 256);
    }

    proptest! {
        /// However the bytes are cut into tokens, the text is that of all bytes at once.
        #[test]
        fn pieces_add_up_to_the_whole(
            bytes in prop::collection::vec(prop_oneof![any::<u8>(), 0x80u8..0xc0, Just(0xe2), Just(0xf0)], 0..40),
            cuts in prop::collection::vec(1usize..5, 40),
        ) {
            let mut rest = bytes.as_slice();
            let mut tokens = Vec::new();
            for n in cuts {
                let (token, after) = rest.split_at(n.min(rest.len()));
                tokens.push(token);
                rest = after;
            }
            let mut d = decoder(&tokens);
            let mut text: String = (0..tokens.len() as u32).map(|id| d.push(id)).collect();
            text += &d.finish();
            prop_assert_eq!(&text, &String::from_utf8_lossy(&bytes));
            let ids: Vec<TokenId> = (0..tokens.len() as u32).collect();
            prop_assert_eq!(d.bytes.text(&ids), text);
        }
    }
}
