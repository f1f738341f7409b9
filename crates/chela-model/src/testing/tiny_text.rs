//! Tokenizer and template of the tiny models: bytes, a few merges, ChatML.

use std::path::Path;

use serde_json::{Value, json};
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::{AddedToken, PreTokenizerWrapper, Tokenizer};

use crate::error::{ModelError, Result};

/// Words whose prefixes are merged, so that some tokens have several letters. Each adds its
/// length less one, minus what an earlier one already added.
const WORDS: [&str; 9] = [
    "the", "and", "ing", "Ġthe", "Ġand", "hello", "Ġworld", "Ġtool", "answer",
];

const SPECIALS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// Number of tokens, and rows of the embedding.
pub const TINY_VOCAB: usize = 256 + 28 + SPECIALS.len();
/// `<|endoftext|>`.
pub(super) const END_OF_TEXT: u32 = TINY_VOCAB as u32 - 3;
/// `<|im_end|>`, the end of a reply.
pub const TINY_END: u32 = TINY_VOCAB as u32 - 1;

/// A ChatML template with tools.
pub const TINY_TEMPLATE: &str = "\
{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}<tool_call>
{\"name\": \"{{ call.function.name }}\", \"arguments\": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}";

/// Printable stand-ins of the 256 bytes, as byte-level BPE writes them: printable Latin-1 stays,
/// the rest moves to U+0100 and on.
fn byte_letters() -> Vec<String> {
    let mut moved = 0;
    let letter = |byte: u8| {
        let stays = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let code = if stays {
            u32::from(byte)
        } else {
            moved += 1;
            0xff + moved
        };
        char::from_u32(code).map(String::from).unwrap_or_default()
    };
    (0..=255).map(letter).collect()
}

/// The whole vocabulary in id order, and the merges.
pub(super) fn vocabulary() -> (Vec<String>, Vec<(String, String)>) {
    let mut tokens = byte_letters();
    let mut merges = Vec::new();
    for word in WORDS {
        let letters: Vec<String> = word.chars().map(String::from).collect();
        let mut left = letters[0].clone();
        for right in &letters[1..] {
            let joined = format!("{left}{right}");
            if !tokens.contains(&joined) {
                tokens.push(joined.clone());
                merges.push((left, right.clone()));
            }
            left = joined;
        }
    }
    tokens.extend(SPECIALS.map(str::to_owned));
    (tokens, merges)
}

/// Number of special tokens, at the end of the vocabulary.
pub(super) const fn specials() -> usize {
    SPECIALS.len()
}

pub(super) fn tokenizer_config() -> Value {
    json!({ "eos_token": SPECIALS[2], "bos_token": null, "add_bos_token": false })
}

/// Writes tokenizer.json.
pub(super) fn write_tokenizer(path: &Path) -> Result<()> {
    let bad = |e: tokenizers::Error| ModelError::tokenizer(path, e);
    let (tokens, merges) = vocabulary();
    let mut vocab = Vocab::default();
    for (id, token) in tokens.into_iter().enumerate() {
        vocab.insert(token, id as u32);
    }
    let bpe = BPE::builder()
        .vocab_and_merges(vocab, merges)
        .build()
        .map_err(bad)?;
    let mut tokenizer = Tokenizer::new(bpe);
    let bytes = PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, true));
    tokenizer.with_pre_tokenizer(Some(Sequence::new(vec![bytes])));
    tokenizer.with_decoder(Some(ByteLevel::new(false, true, true)));
    let added = SPECIALS.map(|token| AddedToken::from(token, true).normalized(false));
    tokenizer.add_special_tokens(&added);
    tokenizer.save(path, false).map_err(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vocabulary_has_the_size_it_says() {
        let (tokens, merges) = vocabulary();
        assert_eq!(tokens.len(), TINY_VOCAB, "{} merges", merges.len());
        assert_eq!(tokens[TINY_END as usize], "<|im_end|>");
        assert_eq!(tokens[END_OF_TEXT as usize], "<|endoftext|>");
        let distinct: std::collections::HashSet<_> = tokens.iter().collect();
        assert_eq!(distinct.len(), tokens.len());
    }
}
