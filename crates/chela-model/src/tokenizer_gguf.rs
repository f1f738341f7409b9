//! Tokenizer and chat template out of a GGUF file's metadata.

use std::path::Path;

use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer};

use crate::config_gguf::token_id;
use crate::error::{ModelError, Result};
use crate::gguf::Gguf;
use crate::tokenizer_hf::SpecialNames;
use crate::tokenizer_spm;

/// GGML's token types.
pub(crate) const NORMAL: i32 = 1;
pub(crate) const CONTROL: i32 = 3;
pub(crate) const USER_DEFINED: i32 = 4;
pub(crate) const UNUSED: i32 = 5;

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
pub(crate) const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
pub(crate) const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The keys with which a tokenizer can be built again without the file's tensors.
pub(crate) struct Source<'a> {
    /// The header.
    pub gguf: &'a Gguf,
    /// The file.
    pub path: &'a Path,
}

impl Source<'_> {
    pub(crate) fn bad(&self, reason: impl ToString) -> ModelError {
        ModelError::tokenizer(self.path, reason)
    }

    pub(crate) fn texts(&self, key: &str) -> Result<&[String]> {
        let texts = self.gguf.texts(key).filter(|texts| !texts.is_empty());
        texts.ok_or_else(|| self.bad(format!("the metadata has no {key}")))
    }

    /// Special tokens and templates.
    pub(crate) fn specials(&self) -> Result<SpecialNames> {
        let tokens = self.texts("tokenizer.ggml.tokens")?;
        let named = |key: &str| {
            let id = token_id(self.gguf, key)?;
            tokens.get(id as usize).map(|token| (id, token.clone()))
        };
        let eos = named("tokenizer.ggml.eos_token_id");
        let bos = named("tokenizer.ggml.bos_token_id");
        let pad = named("tokenizer.ggml.padding_token_id");
        let types = self.types(tokens.len())?;
        let control = |id: &usize| types.get(*id) == Some(&CONTROL);
        let all = (0..tokens.len())
            .filter(control)
            .map(|id| (id as u32, tokens[id].clone()));
        let template = |key: &str| self.gguf.text(key).map(str::to_owned);
        Ok(SpecialNames {
            eos_id: eos.as_ref().map(|(id, _)| *id),
            eos_token: eos.map(|(_, token)| token),
            bos_id: bos.as_ref().map(|(id, _)| *id),
            bos_token: bos.map(|(_, token)| token),
            pad_token: pad.map(|(_, token)| token),
            all: all.collect(),
            template: template("tokenizer.chat_template"),
            tool_template: template("tokenizer.chat_template.tool_use"),
            ..SpecialNames::default()
        })
    }

    pub(crate) fn types(&self, tokens: usize) -> Result<&[i32]> {
        match self.gguf.ints("tokenizer.ggml.token_type") {
            None => Ok(&[]),
            Some(types) if types.len() == tokens => Ok(types),
            Some(types) => {
                Err(self.bad(format!("{} token types for {tokens} tokens", types.len())))
            }
        }
    }

    /// Builds the tokenizer.
    pub(crate) fn tokenizer(&self) -> Result<Tokenizer> {
        match self.gguf.text("tokenizer.ggml.model") {
            Some("gpt2") => {}
            Some("llama") => return tokenizer_spm::tokenizer(self),
            other => {
                return Err(ModelError::Unsupported {
                    path: self.path.to_owned(),
                    what: format!("the tokenizer model {}", other.unwrap_or("(none named)")),
                    hint: "byte-level BPE (gpt2) and scored pieces (llama) are; use the model's Hugging Face folder"
                        .to_owned(),
                });
            }
        }
        let pre = self.gguf.text("tokenizer.ggml.pre").unwrap_or("default");
        let pieces = self.pre_tokenizer(pre)?;
        let tokens = self.texts("tokenizer.ggml.tokens")?;
        let types = self.types(tokens.len())?;
        let kind = |id: usize| types.get(id).copied().unwrap_or(NORMAL);

        let mut vocab = Vocab::default();
        for (id, token) in tokens
            .iter()
            .enumerate()
            .filter(|(id, _)| kind(*id) != UNUSED)
        {
            if let Some(first) = vocab.insert(token.clone(), id as u32) {
                return Err(self.bad(format!("tokens {first} and {id} are both {token:?}")));
            }
        }
        let merges = self.merges()?;
        let llama3 = matches!(pre, "llama-bpe" | "llama3" | "llama-v3");
        let bpe = BPE::builder()
            .vocab_and_merges(vocab, merges)
            .ignore_merges(llama3)
            .build()
            .map_err(|e| self.bad(e))?;

        let mut tokenizer = Tokenizer::new(bpe);
        if pre == "qwen2" {
            tokenizer.with_normalizer(Some(NFC));
        }
        tokenizer.with_pre_tokenizer(Some(Sequence::new(pieces)));
        tokenizer.with_decoder(Some(ByteLevel::new(false, true, true)));
        let added = |wanted: i32, special: bool| -> Vec<AddedToken> {
            let of_kind = tokens
                .iter()
                .enumerate()
                .filter(|(id, _)| kind(*id) == wanted);
            of_kind
                .map(|(_, token)| AddedToken::from(token, special).normalized(false))
                .collect()
        };
        tokenizer.add_special_tokens(&added(CONTROL, true));
        tokenizer.add_tokens(&added(USER_DEFINED, false));
        Ok(tokenizer)
    }

    fn merges(&self) -> Result<Vec<(String, String)>> {
        let pair = |merge: &String| {
            // A space inside a token is written as another character, so the first one separates.
            let (left, right) = merge.split_once(' ')?;
            Some((left.to_owned(), right.to_owned()))
        };
        let merges = self.texts("tokenizer.ggml.merges")?;
        let broken = |merge: &String| self.bad(format!("the merge {merge:?} is not a pair"));
        merges
            .iter()
            .map(|merge| pair(merge).ok_or_else(|| broken(merge)))
            .collect()
    }

    fn pre_tokenizer(&self, pre: &str) -> Result<Vec<PreTokenizerWrapper>> {
        let split = |regex: &str| {
            let pattern = SplitPattern::Regex(regex.to_owned());
            Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
                .map(PreTokenizerWrapper::Split)
                .map_err(|e| self.bad(e))
        };
        let bytes =
            |use_regex| PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, use_regex));
        Ok(match pre {
            "smollm" => vec![PreTokenizerWrapper::Digits(Digits::new(true)), bytes(true)],
            "gpt-2" => vec![bytes(true)],
            "qwen2" => vec![split(QWEN2)?, bytes(false)],
            "llama-bpe" | "llama3" | "llama-v3" => vec![split(LLAMA3)?, bytes(false)],
            "default" => vec![
                split(r"[\p{P}\$\+<=>\^~\|]+")?,
                split(GPT2)?,
                split(r"\p{N}+")?,
                split("[0-9][0-9][0-9]")?,
                bytes(false),
            ],
            other => {
                return Err(ModelError::Unsupported {
                    path: self.path.to_owned(),
                    what: format!("the pre-tokenizer {other:?}"),
                    hint: "smollm, qwen2, llama-bpe, gpt-2 and default are; use the model's Hugging Face folder".to_owned(),
                });
            }
        })
    }
}
