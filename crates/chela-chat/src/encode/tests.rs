//! The wall between typed and written special texts.

use super::*;
use proptest::prelude::*;
use serde_json::json;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

/// One token for each byte, and these specials after them.
fn encoder(specials: &[&str]) -> Encoder {
    let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let letters = alphabet.iter().enumerate();
    let vocab: serde_json::Map<String, Json> =
        letters.map(|(i, c)| (c.to_string(), json!(i))).collect();
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let json = json!({
        "version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    let mut tokenizer = Tokenizer::from_bytes(json.to_string()).unwrap();
    let tokens: Vec<AddedToken> = specials
        .iter()
        .map(|s| AddedToken::from(*s, true))
        .collect();
    tokenizer.add_special_tokens(&tokens);
    let list: Vec<(TokenId, String)> = specials
        .iter()
        .map(|s| (tokenizer.token_to_id(s).unwrap(), (*s).to_owned()))
        .collect();
    Encoder::new(tokenizer, &list).unwrap()
}

fn controls(encoder: &Encoder, text: &str) -> usize {
    let ids = encoder.rendered(text, true).unwrap();
    ids.iter().filter(|id| encoder.is_control(**id)).count()
}

const SPECIALS: [&str; 6] = ["<|a|>", "<|a|><|a|>", "<|", "★", "</s>", "1a"];

proptest! {
    /// Typed text gives no control token, keeps every byte, and leaves the template's own control tokens alone, also next to half
    /// of one; two typed texts side by side give none either.
    #[test]
    fn guarded_text_is_ordinary_everywhere(
        typed in "[<|a>bs/ é\u{f8fc}-\u{f8fe}]{0,12}", other in "[<|a>b/s\u{f8fc}-\u{f8fe}]{0,6}",
    ) {
        // Nothing between two halves is no typed text.
        prop_assume!(!typed.is_empty() || !other.is_empty());
        let e = encoder(&["<|a|>", "<|a|><|a|>", "<|b", "</s>"]);
        let text = format!("{}{}", e.guard(&typed), e.guard(&other));
        prop_assert_eq!(unguard(&text), format!("{typed}{other}"));
        prop_assert_eq!(controls(&e, &text), 0);
        for written in ["</s>{}</s>", "</{}s>", "<|b{}</s>", "<{}"] {
            let whole = written.replace("{}", &text);
            prop_assert_eq!(controls(&e, &whole), controls(&e, &written.replace("{}", "#")));
        }
    }

    #[test]
    fn special_texts_inside_others_and_of_one_letter_too(typed in "[<|a>★s/1\u{f8fc}-\u{f8fe}]{0,12}") {
        let e = encoder(&SPECIALS);
        let text = e.guard(&typed);
        prop_assert_eq!(unguard(&text), typed.clone());
        prop_assert_eq!(controls(&e, &text), 0);
        prop_assert_eq!(controls(&e, &format!("★{text}★")), 2);
        prop_assert!(e.ordinary(&typed).unwrap().iter().all(|id| !e.is_control(*id)));
    }
}

#[test]
fn what_the_template_writes_is_control() {
    let e = encoder(&SPECIALS);
    assert_eq!(controls(&e, "<|a|><|a|>"), 1, "the longest wins");
    assert_eq!(controls(&e, "<|a|> <|a|></s>★"), 4);
    let mut json = json!({"<|a|>": ["\u{3c}|a|>", 1, null]});
    e.guard_json(&mut json);
    assert_eq!(controls(&e, &json.to_string()), 0);
}

#[test]
fn control_tokens_built_by_merges_stay_text() {
    // A vocabulary whose own merges lead to `</s>`.
    let vocab = json!({"<": 0, "/": 1, "s": 2, ">": 3, "</": 4, "s>": 5, "</s>": 6, "a": 7});
    let json = json!({
        "version": "1.0", "added_tokens": [],
        "model": {"type": "BPE", "vocab": vocab, "merges": ["< /", "s >", "</ s>"]},
    });
    let tokenizer = Tokenizer::from_bytes(json.to_string()).unwrap();
    let e = Encoder::new(tokenizer, &[(6, "</s>".to_owned())]).unwrap();
    assert_eq!(e.ordinary("a</s>").unwrap(), [7, 0, 1, 5]);
    assert_eq!(e.rendered("a</s>", true).unwrap(), [7, 6]);
}
