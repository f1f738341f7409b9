//! A tokenizer of scored pieces (SentencePiece's BPE, `tokenizer.ggml.model` = `llama`) out of a GGUF file's metadata, for the
//! vocabularies that keep a text as it is but for a sign for spaces, as Gemma's do.
//!
//! Such a file has no merges: of all neighbouring pieces those are joined first whose joined piece scores highest. That is byte-pair
//! encoding with the merges in the order of these scores, which is how Hugging Face's tokenizer.json writes the same vocabulary.

use std::cmp::Reverse;
use std::collections::HashMap;

use tokenizers::decoders::DecoderWrapper;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::replace::Replace;
use tokenizers::{AddedToken, Tokenizer};

use crate::config_gguf::token_id;
use crate::error::{ModelError, Result};
use crate::tokenizer_gguf::{CONTROL, NORMAL, Source, USER_DEFINED};

/// SentencePiece's sign for a space.
const SPACE: &str = "\u{2581}";

/// Builds the tokenizer from pieces, their types and scores.
pub(crate) fn tokenizer(source: &Source<'_>) -> Result<Tokenizer> {
    let gguf = source.gguf;
    // A space put before every text, as Llama 2 has it: absent means yes.
    if gguf.flag("tokenizer.ggml.add_space_prefix") != Some(false) {
        return Err(ModelError::Unsupported {
            path: source.path.to_owned(),
            what: "a tokenizer of pieces that puts a space before each text".to_owned(),
            hint: "one with tokenizer.ggml.add_space_prefix = false (Gemma's) is; use the model's Hugging Face folder"
                .to_owned(),
        });
    }
    let stored = source.texts("tokenizer.ggml.tokens")?;
    let (n, types) = (stored.len(), source.types(stored.len())?);
    let kind = |id: usize| types.get(id).copied().unwrap_or(NORMAL);
    let scores = gguf.floats("tokenizer.ggml.scores").unwrap_or_default();
    if scores.len() != n {
        let scores = scores.len();
        return Err(source.bad(format!(
            "tokenizer.ggml.scores has {scores} numbers, expected {n}"
        )));
    }
    // llama.cpp's converter writes real spaces into those a user defined.
    let piece = |(id, text): (usize, &String)| match kind(id) {
        USER_DEFINED => text.replace(' ', SPACE),
        _ => text.clone(),
    };
    let pieces: Vec<String> = stored.iter().enumerate().map(piece).collect();
    let mut vocab = Vocab::default();
    for (id, piece) in pieces.iter().enumerate() {
        if let Some(first) = vocab.insert(piece.clone(), id as u32) {
            return Err(source.bad(format!("tokens {first} and {id} are both {piece:?}")));
        }
    }
    let key = "tokenizer.ggml.unknown_token_id";
    let unknown = token_id(gguf, key).and_then(|id| pieces.get(id as usize));
    let unknown = unknown.ok_or_else(|| source.bad(format!("{key} names none of {n} tokens")))?;
    let bpe = BPE::builder()
        .vocab_and_merges(vocab, merges(&pieces, &kind, scores))
        .unk_token(unknown.clone())
        .fuse_unk(true)
        .byte_fallback(true)
        .build()
        .map_err(|e| source.bad(e))?;
    let mut tokenizer = Tokenizer::new(bpe);
    let spaces = |from: &str, to: &str| Replace::new(from, to).map_err(|e| source.bad(e));
    tokenizer.with_normalizer(Some(spaces(" ", SPACE)?));
    tokenizer.with_decoder(Some(Sequence::new(vec![
        DecoderWrapper::Replace(spaces(SPACE, " ")?),
        DecoderWrapper::ByteFallback(ByteFallback::new()),
        DecoderWrapper::Fuse(Fuse::new()),
    ])));
    let added = |wanted: i32, special: bool| -> Vec<AddedToken> {
        let of_kind = (0..n).filter(|id| kind(*id) == wanted);
        of_kind
            .map(|id| AddedToken::from(pieces[id].clone(), special).normalized(false))
            .collect()
    };
    tokenizer.add_special_tokens(&added(CONTROL, true));
    tokenizer.add_tokens(&added(USER_DEFINED, false));
    Ok(tokenizer)
}

/// Every way to make a piece of two others, best first: what the user defined, then by score; ways to make one piece (and pieces of
/// equal score) with the longest left part first, as Hugging Face's converter orders them.
fn merges(pieces: &[String], kind: &dyn Fn(usize) -> i32, scores: &[f32]) -> Vec<(String, String)> {
    let joinable = |id: &usize| matches!(kind(*id), NORMAL | USER_DEFINED);
    let known: HashMap<&str, usize> = pieces
        .iter()
        .enumerate()
        .map(|(id, piece)| (piece.as_str(), id))
        .collect();
    let mut ways = Vec::new();
    for id in (0..pieces.len()).filter(joinable) {
        let piece = pieces[id].as_str();
        let length = piece.chars().count();
        for (left_length, (at, _)) in piece.char_indices().enumerate().skip(1) {
            let (left, right) = piece.split_at(at);
            if known.contains_key(left) && known.contains_key(right) {
                let lengths = (Reverse(left_length), Reverse(length - left_length));
                ways.push((id, lengths, (left, right)));
            }
        }
    }
    ways.sort_by(|a, b| {
        let defined = |id: usize| kind(id) != USER_DEFINED;
        let by_score = scores[b.0].total_cmp(&scores[a.0]);
        let of_user = defined(a.0).cmp(&defined(b.0));
        of_user
            .then(by_score)
            .then(a.1.cmp(&b.1))
            .then(a.0.cmp(&b.0))
    });
    ways.into_iter()
        .map(|(_, _, (left, right))| (left.to_owned(), right.to_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_go_by_score_and_what_the_user_defined_is_first() {
        let pieces: Vec<String> = ["a", "b", "c", "ab", "bc", "abc", "\n", "\n\n", "<0x61>"]
            .map(String::from)
            .to_vec();
        let kind = |id: usize| match id {
            7 => USER_DEFINED,
            8 => 6,
            _ => NORMAL,
        };
        let scores = [0.0, 0.0, 0.0, -2.0, -1.0, -3.0, 0.0, -1000.0, 0.0];
        let said = merges(&pieces, &kind, &scores);
        let said: Vec<String> = said.iter().map(|(a, b)| format!("{a}|{b}")).collect();
        assert_eq!(said, ["\n|\n", "b|c", "a|b", "ab|c", "a|bc"]);
    }
}
