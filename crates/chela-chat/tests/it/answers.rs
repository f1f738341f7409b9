//! From sampled tokens to what a client sees.

use crate::common::{CHATML, byte_level_chat, kinds};
use chela_chat::{AnswerDelta, AnswerOptions, Chat};
use chela_core::{Flow, Message, Tool, ToolCall};
use proptest::prelude::*;
use std::sync::{Arc, OnceLock};

fn plain() -> &'static Chat {
    &kinds()[0].chat
}

fn read_ids(chat: &Chat, ids: &[u32], options: AnswerOptions) -> (Vec<AnswerDelta>, Message) {
    let mut parser = chat.answer_parser(options);
    let mut deltas: Vec<AnswerDelta> = ids.iter().flat_map(|id| parser.push(*id)).collect();
    let (last, message) = parser.finish();
    deltas.extend(last);
    (deltas, message)
}

/// A reply's text through the parser.
fn read(text: &str, options: AnswerOptions) -> Message {
    read_ids(plain(), &plain().encode(text).unwrap(), options).1
}

fn offer(name: &str) -> Arc<[Tool]> {
    let definition = String::new();
    Arc::new([Tool {
        name: name.to_owned(),
        definition,
    }])
}

fn with_tools() -> AnswerOptions {
    AnswerOptions {
        tools: true,
        ..AnswerOptions::default()
    }
}

#[test]
fn a_reply_that_is_nothing_but_a_call_is_one() {
    let options = AnswerOptions {
        offered: offer("f"),
        ..with_tools()
    };
    let call = "```json\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n```";
    let ids = plain()
        .encode(&format!("<think>hm</think>\n{call}"))
        .unwrap();
    let (deltas, message) = read_ids(plain(), &ids, options.clone());
    assert_eq!(
        (message.content.as_str(), message.reasoning.as_deref()),
        ("", Some("hm"))
    );
    assert_eq!(message.tool_calls[0].arguments, "{\"x\": 1}");
    assert!(!deltas.iter().any(|d| matches!(d, AnswerDelta::Content(_))));
    for text in [
        format!("Sure: {call}"),
        "{\"name\": \"g\", \"arguments\": {}}".to_owned(),
        "{\"name\": \"f\", \"arguments\": {}".to_owned(),
        "{\"name\": \"f\", \"arguments\": {}}\n\nand more".to_owned(),
    ] {
        let message = read(&text, options.clone());
        assert_eq!((message.content, message.tool_calls.len()), (text, 0));
    }
    // Only where tools are looked for at all.
    let message = read(
        call,
        AnswerOptions {
            tools: false,
            ..options
        },
    );
    assert_eq!(message.content, call);
}

#[test]
fn calls_are_found_and_broken_ones_stay_text() {
    let good = "a<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": {\"y\": [1, 2]}}}\n</tool_call>b<tool_call>{\"name\":\"g\"}</tool_call>";
    let message = read(good, with_tools());
    assert_eq!(message.content, "ab");
    let calls: Vec<_> = message
        .tool_calls
        .iter()
        .map(|c| (c.name.as_str(), c.arguments.as_str()))
        .collect();
    assert_eq!(calls, [("f", "{\"x\": {\"y\": [1, 2]}}"), ("g", "{}")]);
    assert_ne!(message.tool_calls[0].id, message.tool_calls[1].id);
    for broken in [
        "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":1}",
        "hm \n <tool_call>{\"name\":\"f\",}</tool_call> \n",
        "<tool_call>{\"arguments\":{}}</tool_call>",
        "<tool_call>{'name':'f'}</tool_call> z",
        "<tool_call>{\"name\":\"f\",\"arguments\":\"{}\"}</tool_call>",
        "<tool_call>{\"name\":\"f</tool_call>",
        "<tool_call>",
        "stray </tool_call>",
        "<tool_call>{\"name\":\"f\",\"parameters\":1}</tool_call>",
    ] {
        let message = read(broken, with_tools());
        assert!(message.tool_calls.is_empty());
        assert_eq!(message.content, broken);
    }
    let message = read(good, AnswerOptions::default());
    assert_eq!(message.content, good, "without tools it is text");
    // A reply may end before the close is written.
    let message = read("<tool_call>{\"name\":\"f\"}", with_tools());
    assert_eq!(
        (message.content.as_str(), message.tool_calls.len()),
        ("", 1)
    );
}

#[test]
fn a_call_comes_out_as_soon_as_it_is_whole() {
    let mut parser = plain().answer_parser(with_tools());
    let ids = plain().encode("<tool_call>{\"name\":\"f\"}</tool_call>");
    let deltas: Vec<_> = ids
        .unwrap()
        .into_iter()
        .flat_map(|id| parser.push(id))
        .collect();
    let [AnswerDelta::ToolCall { index: 0, .. }] = deltas.as_slice() else {
        panic!("{deltas:?}");
    };
}

#[test]
fn white_space_at_tags_is_the_templates() {
    let call = "<tool_call>{\"name\":\"f\"}</tool_call>";
    let both = format!("<think>\nhm\n</think>\n\nok \n{call}\n{call}\n");
    let then = format!("{call}\nthen");
    for (text, reasoning, content, calls) in [
        (both.as_str(), "hm", "ok", 2),
        (&then, "", "\nthen", 1),
        ("<think>\n\n</think>\n\nok\n", "", "ok\n", 0),
        ("<think>\n a\n\nb", " a\n\nb", "", 0),
        (" \n ok \n", "", " \n ok \n", 0),
    ] {
        let message = read(text, with_tools());
        let seen = message.reasoning.unwrap_or_default();
        assert_eq!(seen, reasoning, "{text:?}");
        assert_eq!(message.content, content, "{text:?}");
        assert_eq!(message.tool_calls.len(), calls, "{text:?}");
    }
}

#[test]
fn a_call_drafted_while_thinking_is_not_made() {
    let text = "<think>maybe <tool_call>{\"name\":\"del\"}</tool_call> no</think>ok";
    let message = read(text, with_tools());
    assert_eq!(
        (message.content.as_str(), message.tool_calls.len()),
        ("ok", 0)
    );
    assert!(message.reasoning.unwrap().contains("<tool_call>"));
}

#[test]
fn tags_that_are_control_tokens_are_seen() {
    let tags = ["<think>", "</think>", "<tool_call>", "</tool_call>"];
    let chat = byte_level_chat(CHATML, &tags.map(|tag| (tag, true)));
    let end = chat.end_ids()[0];
    // The tags' ids follow those of `<|im_end|>` and `<|endoftext|>`.
    let [think, unthink, open, close] = [2, 3, 4, 5].map(|n| end + n);
    let json = chat.encode("{\"name\":\"f\"}").unwrap();
    let ids = [&[think], &json[..], &[unthink, open], &json, &[close, end]].concat();
    let (_, message) = read_ids(&chat, &ids, with_tools());
    assert_eq!(message.reasoning.as_deref(), Some("{\"name\":\"f\"}"));
    assert_eq!(
        (message.content.as_str(), message.tool_calls.len()),
        ("", 1)
    );
}

/// Joins what was streamed.
fn join(deltas: Vec<AnswerDelta>) -> Message {
    let mut all = Message::assistant("");
    for delta in deltas {
        match delta {
            AnswerDelta::Content(text) => all.content += &text,
            AnswerDelta::Reasoning(text) => *all.reasoning.get_or_insert_default() += &text,
            AnswerDelta::ToolCall {
                index,
                id,
                name,
                arguments,
            } => {
                assert_eq!(index, all.tool_calls.len());
                let call = ToolCall {
                    id,
                    name,
                    arguments,
                };
                all.tool_calls.push(call);
            }
        }
    }
    all
}

/// Chats whose templates show each way of writing calls.
fn formats() -> &'static [Chat] {
    static CHATS: OnceLock<Vec<Chat>> = OnceLock::new();
    CHATS.get_or_init(|| {
        let shown = ["", "<function=", "<|python_tag|>", "<start_function_call>"];
        let template = |shown: &str| format!("{{# {shown} #}}{CHATML}");
        shown
            .iter()
            .map(|shown| byte_level_chat(&template(shown), &[]))
            .collect()
    })
}

#[test]
fn calls_are_read_as_the_template_shows_them() {
    let calls = [
        "So: <tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"x\"}}\n</tool_call>",
        "So: <tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>",
        "So: <|python_tag|>{\"name\": \"f\", \"parameters\": {\"a\": \"x\"}}",
        "So: <start_function_call>call:f{a:<escape>x<escape>}<end_function_call>",
    ];
    for (at, chat) in formats().iter().enumerate() {
        for (other, text) in calls.iter().enumerate() {
            let ids = chat.encode(text).unwrap();
            let (_, message) = read_ids(chat, &ids, with_tools());
            // What a model was not shown stays text; JSON between the tags is forgiven where XML was shown.
            if at == other || (at == 1 && other == 0) {
                assert_eq!(message.content, "So:", "{at} {other}");
                let arguments: serde_json::Value =
                    serde_json::from_str(&message.tool_calls[0].arguments).unwrap();
                assert_eq!(arguments, serde_json::json!({"a": "x"}));
            } else {
                assert_eq!(
                    (message.content.as_str(), message.tool_calls.len()),
                    (*text, 0)
                );
            }
        }
    }
}

proptest! {
    /// What is streamed adds up to the message, however the text is cut into tokens; nothing is lost and no stop string shown.
    #[test]
    fn deltas_add_up(
        text in "(<think>)?([a-z界🦀 \n]|</think>|<tool_call>|\\{\"name\":\"f\"\\}|\\{\"name\": \"f\", \"arguments\": \\{\\}\\}|\"|</tool_call>|STOP|<t){0,14}",
        formal in "(<tool_call>\n?|<function=f>\n?|<parameter=a>|</parameter>\n?|</function>\n?|</tool_call>|call:f\\{a:|<escape>|\\}|<start_function_call>|<end_function_call>|<\\|python_tag\\|>|\\{\"name\":\"f\",\"parameters\":\\{\\}\\}|;| |[a-c]){0,12}",
        tools in any::<bool>(), which in 0usize..4,
    ) {
        let stops = vec!["STOP".to_owned()];
        let options = AnswerOptions { tools, offered: offer("f"), stops, call_id_seed: 3 };
        let chat = &formats()[which];
        let text = text + &formal;
        let (deltas, message) = read_ids(chat, &chat.encode(&text).unwrap(), options.clone());
        prop_assert_eq!(&join(deltas), &message);
        let letters = text.chars().flat_map(|c| chat.encode(&c.to_string()).unwrap());
        let (deltas, same) = read_ids(chat, &letters.collect::<Vec<u32>>(), options);
        prop_assert_eq!(&join(deltas), &same);
        prop_assert_eq!(&same, &message);
        prop_assert!(!message.content.contains("STOP"));
        if !text.contains(['<', 'S']) && message.tool_calls.is_empty() {
            prop_assert_eq!(message.content, text);
        }
    }

    /// The engine stops at the token that completes a stop string, and no sooner.
    #[test]
    fn the_guide_stops_where_the_text_says(
        text in "[abh🦀]{0,20}", stops in prop::collection::vec("[abh🦀]{1,3}", 1..3),
    ) {
        let chat = plain();
        let mut guide = chat.guide(&stops, None).unwrap();
        let mut decoder = chat.decoder();
        let mut seen = String::new();
        for id in chat.encode(&text).unwrap() {
            seen += &decoder.push(id);
            let hit = stops.iter().any(|s| seen.contains(s.as_str()));
            prop_assert_eq!(guide.accept(id), if hit { Flow::Stop } else { Flow::Continue });
            if hit {
                break;
            }
        }
    }
}

#[test]
fn no_stops_need_no_guide() {
    assert!(plain().guide(&[], None).is_none());
    assert!(plain().guide(&[String::new()], None).is_none());
}
