//! Chats over small tokenizers of several kinds.

use chela_chat::{Chat, ChatParts};
use chela_core::{Conversation, Message, TokenId};
use serde_json::{Map, Value, json};
use std::sync::OnceLock;
use tokenizers::{Tokenizer, pre_tokenizers::byte_level::ByteLevel};

pub const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Writes the thinking of the last answer only, as Qwen3's does.
pub const THINKING: &str = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.reasoning_content and loop.last %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}{{ message.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// ChatML with tools and a date.
pub const TOOLS: &str = "{{ '<|im_start|>system\n' }}{{ strftime_now('%Y-%m-%d') }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}{% for call in message.tool_calls or [] %}{{ '<tool_call>\n{\"name\": \"' + call.function.name + '\", \"arguments\": ' }}{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

const SPECIALS: [&str; 3] = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"];

fn added(first: usize, extra: &[(&str, bool)], strip: bool) -> Vec<Value> {
    let specials = SPECIALS.iter().map(|s| (*s, true));
    let all = specials.chain(extra.iter().copied()).enumerate();
    all.map(|(i, (text, special))| {
        json!({"id": first + i, "content": text, "special": special, "single_word": false,
            "lstrip": false, "rstrip": strip && special, "normalized": false})
    })
    .collect()
}

/// The pieces with their ids, and the merges that make the last of them.
fn vocabulary(mut pieces: Vec<String>, pairs: &[(&str, &str)]) -> (Map<String, Value>, Value) {
    for (a, b) in pairs {
        let joined = format!("{a}{b}");
        if !pieces.contains(&joined) {
            pieces.push(joined);
        }
    }
    let ids = pieces.into_iter().enumerate();
    let merges: Vec<String> = pairs.iter().map(|(a, b)| format!("{a} {b}")).collect();
    (ids.map(|(i, p)| (p, json!(i))).collect(), json!(merges))
}

/// Bytes and a few merges; `strip`: special tokens swallow the white space after them; `nfc`: text is composed first.
fn byte_level(extra: &[(&str, bool)], strip: bool, nfc: bool) -> Tokenizer {
    let mut letters: Vec<String> = ByteLevel::alphabet()
        .into_iter()
        .map(String::from)
        .collect();
    letters.sort_unstable();
    let words = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")];
    let signs = [("Ġ", "a"), ("Ċ", "Ċ"), ("<", "|"), ("|", ">")];
    let (vocab, merges) = vocabulary(letters, &[words, signs].concat());
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let json = json!({
        "version": "1.0", "added_tokens": added(vocab.len(), extra, strip),
        "normalizer": if nfc { json!({"type": "NFC"}) } else { Value::Null },
        "pre_tokenizer": level, "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    });
    Tokenizer::from_bytes(json.to_string()).unwrap()
}

/// SentencePiece's manner: ▁ for spaces, one before the very first word, bytes for what is not in the vocabulary.
fn sentence_piece() -> Tokenizer {
    let mut pieces = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    pieces.extend((0..=255).map(|b| format!("<0x{b:02X}>")));
    pieces.extend("▁abcdefghijklmnopqrstuvwxyz|<>_/".chars().map(String::from));
    let words = [("▁", "a"), ("▁", "h"), ("h", "e"), ("▁h", "e")];
    let signs = [("l", "l"), ("<", "/"), ("s", ">"), ("</", "s>")];
    let (vocab, merges) = vocabulary(pieces, &[words, signs].concat());
    let json = json!({
        "version": "1.0", "added_tokens": added(vocab.len(), &[], false),
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true},
    });
    Tokenizer::from_bytes(json.to_string()).unwrap()
}

pub fn chat(tokenizer: Tokenizer, template: &str) -> Chat {
    let end = tokenizer.token_to_id("<|im_end|>").unwrap();
    let parts = ChatParts {
        tokenizer,
        template: template.to_owned(),
        bos: None,
        eos: Some("<|im_end|>".to_owned()),
        end_ids: vec![end],
        specials: Vec::new(),
    };
    Chat::from_parts(parts).unwrap()
}

/// A name, the tokenizer as its own makers use it, and a chat over it.
pub struct Kind {
    pub name: &'static str,
    pub tokenizer: Tokenizer,
    pub chat: Chat,
}

/// ChatML over each kind of tokenizer.
pub fn kinds() -> &'static [Kind] {
    static KINDS: OnceLock<Vec<Kind>> = OnceLock::new();
    KINDS.get_or_init(|| {
        let all = [
            (
                "byte level",
                byte_level(&[("<think>", false)], false, false),
            ),
            ("composed", byte_level(&[], false, true)),
            ("white space swallowed", byte_level(&[], true, false)),
            ("sentence piece", sentence_piece()),
        ];
        let kind = |(name, tokenizer): (_, Tokenizer)| Kind {
            name,
            chat: chat(tokenizer.clone(), CHATML),
            tokenizer,
        };
        all.into_iter().map(kind).collect()
    })
}

/// Byte level, with this template and these more added tokens (text, special).
pub fn byte_level_chat(template: &str, extra: &[(&str, bool)]) -> Chat {
    chat(byte_level(extra, false, false), template)
}

pub fn talk(messages: &[Message]) -> Conversation {
    Conversation {
        messages: messages.to_vec(),
        ..Conversation::default()
    }
}

pub fn fresh(chat: &Chat, messages: &[Message]) -> Vec<TokenId> {
    let rendered = chat.render(&talk(messages), Err("first turn"));
    rendered.unwrap().tokens
}

/// The control tokens among these.
pub fn controls(chat: &Chat, ids: &[TokenId]) -> Vec<TokenId> {
    let control = |id: &TokenId| chat.token_bytes(*id).is_empty();
    ids.iter().copied().filter(control).collect()
}
