//! Ids to text, whole characters only.

use chela_core::TokenId;
use std::sync::Arc;

/// The bytes of every token; control tokens have none.
#[derive(Debug)]
pub struct Bytes {
    tokens: Vec<Vec<u8>>,
}

impl Bytes {
    /// From the tokenizer's own pieces: byte-level BPE (GPT-2's alphabet) or plain text with byte fallback (`<0x0A>`).
    pub fn new(tokenizer: &tokenizers::Tokenizer, specials: &[(TokenId, String)]) -> Self {
        let size = tokenizer.get_vocab_size(true);
        let is_special = |id: u32| specials.iter().any(|(s, _)| *s == id);
        let added: std::collections::HashSet<u32> = tokenizer
            .get_added_tokens_decoder()
            .keys()
            .copied()
            .collect();
        let byte_level = looks_byte_level(tokenizer);
        let tokens = (0..size as u32)
            .map(|id| {
                if is_special(id) {
                    return Vec::new();
                }
                let piece = tokenizer.id_to_token(id).unwrap_or_default();
                if added.contains(&id) {
                    return piece.into_bytes();
                }
                if byte_level {
                    from_byte_level(&piece)
                } else {
                    from_plain(&piece)
                }
            })
            .collect();
        Self { tokens }
    }

    /// Of one token; empty for control tokens and ids that do not exist.
    pub fn of(&self, id: TokenId) -> &[u8] {
        self.tokens.get(id as usize).map_or(&[], Vec::as_slice)
    }
}

fn looks_byte_level(tokenizer: &tokenizers::Tokenizer) -> bool {
    // A byte-level alphabet writes a space as Ġ; SentencePiece writes ▁.
    tokenizer.token_to_id("Ġ").is_some() || tokenizer.token_to_id("Ċ").is_some()
}

/// GPT-2's reversible alphabet: printable bytes stand for themselves, the others for characters from U+0100 on.
fn byte_of(c: char) -> Option<u8> {
    let code = c as u32;
    let printable =
        |b: u32| (33..=126).contains(&b) || (161..=172).contains(&b) || (174..=255).contains(&b);
    if code < 256 {
        return printable(code).then_some(code as u8);
    }
    (0..256u32)
        .filter(|b| !printable(*b))
        .nth((code - 256) as usize)
        .map(|b| b as u8)
}

fn from_byte_level(piece: &str) -> Vec<u8> {
    let bytes: Option<Vec<u8>> = piece.chars().map(byte_of).collect();
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
}

impl TextDecoder {
    /// Nothing held.
    pub fn new(bytes: Arc<Bytes>) -> Self {
        Self {
            bytes,
            held: Vec::new(),
        }
    }

    /// The characters that this token completes.
    pub fn push(&mut self, id: TokenId) -> String {
        self.held.extend_from_slice(self.bytes.of(id));
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

    fn decoder(pieces: &[&[u8]]) -> TextDecoder {
        let tokens = pieces.iter().map(|p| p.to_vec()).collect();
        TextDecoder::new(Arc::new(Bytes { tokens }))
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
        assert_eq!(from_byte_level("Ġhi"), b" hi");
        assert_eq!(from_byte_level("Ċ"), b"\n");
        assert_eq!(from_plain("▁a"), b" a");
        assert_eq!(from_plain("<0x0A>"), b"\n");
        let all: std::collections::HashSet<u8> = (0..0x200)
            .filter_map(char::from_u32)
            .filter_map(byte_of)
            .collect();
        assert_eq!(all.len(), 256);
    }
}
