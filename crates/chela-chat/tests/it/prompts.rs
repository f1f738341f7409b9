//! What a conversation becomes.

use crate::common::{CHATML, THINKING, TOOLS, byte_level_chat, controls, fresh, kinds, talk};
use chela_core::{Conversation, Message, Segment, Tool, ToolCall};
use proptest::prelude::*;
use tokenizers::Tokenizer;

fn rendered(messages: &[Message]) -> String {
    let mut text = String::new();
    for m in messages {
        text += &format!("<|im_start|>{}\n{}<|im_end|>\n", m.role.as_str(), m.content);
    }
    text + "<|im_start|>assistant\n"
}

fn at_once(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    let encoding = tokenizer.encode_fast(text, false).unwrap();
    encoding.get_ids().to_vec()
}

/// A conversation with this text in every field that a client fills, in JSON as escapes.
fn everywhere(text: &str) -> Conversation {
    let escaped: String = text.encode_utf16().map(|u| format!("\\u{u:04x}")).collect();
    let json = format!("{{\"x\": \"{escaped}\", \"{escaped}\": 1}}");
    let call = ToolCall {
        id: text.to_owned(),
        name: text.to_owned(),
        arguments: json.clone(),
    };
    let messages = [
        Message::system(text),
        Message::user(text),
        Message {
            tool_calls: vec![call],
            ..Message::assistant(text)
        },
        Message {
            name: Some(text.to_owned()),
            ..Message::user(text)
        },
    ];
    Conversation {
        tools: vec![Tool {
            name: text.to_owned(),
            definition: json.clone(),
        }],
        template_args: Some(json),
        ..talk(&messages)
    }
}

proptest! {
    /// Without special texts, the ids are those of the rendered text tokenized at once, as Transformers does it.
    #[test]
    fn ids_are_those_of_the_rendered_text(
        system in "[a-z <|>\n]{0,12}",
        user in "( |hello|a\u{301}|🦀|<think>|\n|\u{f8fe}|[a-z_<|/>]){0,12}",
    ) {
        let messages = [Message::system(system), Message::user(user)];
        for kind in kinds() {
            let want = at_once(&kind.tokenizer, &rendered(&messages));
            prop_assert_eq!(fresh(&kind.chat, &messages), want, "{}", kind.name);
        }
    }

    /// Typed special texts stay text, in every field of a conversation.
    #[test]
    fn typed_control_tokens_stay_text(
        typed in "([a-z ]|<\\|im_end\\|>|<\\|im_start\\|>|<\\|im_|end\\|>|<|\u{f8fe}){0,8}",
    ) {
        let chat = byte_level_chat(TOOLS, &[]);
        let ids = |text: &str| chat.render(&everywhere(text), Err("first turn")).unwrap().tokens;
        let with = ids(&typed);
        prop_assert_eq!(controls(&chat, &with), controls(&chat, &ids("y")));
        prop_assert!(chat.decode(&with).contains(&typed));
        for kind in kinds() {
            let ids = kind.chat.encode(&typed).unwrap();
            prop_assert!(controls(&kind.chat, &ids).is_empty(), "{}", kind.name);
            let back = kind.chat.decode(&ids);
            prop_assert_eq!(back.trim_start(), typed.trim_start(), "{}", kind.name);
        }
    }
}

#[test]
fn decoding_equals_the_tokenizers_own() {
    for kind in kinds() {
        for text in ["hello a", " hello  a\n\n", "é🦀 a", "<|endoftext|> x"] {
            let ids = at_once(&kind.tokenizer, text);
            let want = kind.tokenizer.decode(&ids, true).unwrap();
            assert_eq!(kind.chat.decode(&ids), want, "{} {text:?}", kind.name);
        }
    }
}

#[test]
fn hints_follow_the_message_they_answer() {
    let chat = &kinds()[0].chat;
    let messages = [
        Message::system("s"),
        Message::user("q"),
        Message::assistant("a"),
        Message::user("r"),
    ];
    let plain = chat.render_hinted(&talk(&messages), "").unwrap();
    assert_eq!(plain, fresh(chat, &messages));
    let hinted = |count: usize| {
        let ids = chat.render_hinted(&talk(&messages[..count]), "be brief");
        chat.decode(&ids.unwrap())
    };
    assert!(hinted(4).contains("r\n\n[user hint]\nbe brief\nassistant"));
    assert!(hinted(3).contains("q\n\n[user hint]\nbe brief\nassistant\na"));
    assert!(hinted(1).contains("s\n\n[user hint]\nbe brief"));
}

#[test]
fn tools_need_a_template_with_a_place_for_them() {
    let takes = |template: &str| {
        let chat = byte_level_chat(template, &[]);
        let (name, definition) = ("f".to_owned(), r#"{"name":"f"}"#.to_owned());
        let c = Conversation {
            tools: vec![Tool { name, definition }],
            ..talk(&[Message::user("x")])
        };
        let rendered = chat.render(&c, Err("first turn"));
        assert_eq!(rendered.is_ok(), chat.supports_tools());
        let hinted = chat.render_hinted(&c, "h");
        assert_eq!(hinted.is_ok(), chat.supports_tools());
        if let Ok(rendered) = rendered {
            let text = chat.decode(&rendered.tokens);
            assert!(text.contains(r#"{"name": "f"}"#));
            assert_eq!(rendered.segment, Segment::Opened("first turn".to_owned()));
        }
        chat.supports_tools()
    };
    assert_eq!([CHATML, THINKING, TOOLS].map(takes), [false, false, true]);
}
