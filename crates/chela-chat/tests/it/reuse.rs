//! Sampled tokens over turns.

use crate::common::{THINKING, TOOLS, byte_level_chat, controls, fresh, kinds, talk};
use chela_chat::Chat;
use chela_core::{Conversation, Message, ReusablePrefix, Role, Segment, TokenId, Tool, ToolCall};
use proptest::prelude::*;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, UNIX_EPOCH},
};

/// Ids that no tokenizer gives for this text: letter by letter.
fn sampled(chat: &Chat, text: &str) -> Vec<TokenId> {
    let start = chat.encode("_").unwrap().len();
    let letter = |c: char| chat.encode(&format!("_{c}")).unwrap().split_off(start);
    text.chars().flat_map(letter).collect()
}

fn after(prompt: &[TokenId], reply: &[TokenId], messages: usize, ended: bool) -> ReusablePrefix {
    ReusablePrefix {
        messages,
        tokens: [prompt, reply].concat(),
        ended,
    }
}

/// Why a segment was opened; its prompt is the fresh one.
fn opened(chat: &Chat, c: &Conversation, reuse: &ReusablePrefix) -> String {
    let rendered = chat.render(c, Ok(reuse)).unwrap();
    assert_eq!(rendered.tokens, chat.render(c, Err("")).unwrap().tokens);
    match rendered.segment {
        Segment::Opened(why) => why,
        Segment::Extends => panic!("reused"),
    }
}

fn extends(chat: &Chat, c: &Conversation, reuse: &ReusablePrefix) -> bool {
    chat.render(c, Ok(reuse)).unwrap().segment == Segment::Extends
}

proptest! {
    /// Sampled ids are reused as they are, and what follows is what the template writes after the answer.
    #[test]
    fn a_next_turn_begins_with_the_recorded_ids(
        answers in prop::collection::vec("[a-z .<|\u{f8fe}]{1,12}", 1..4),
        typed in "([a-z <|\n]|<\\|im_end\\|>){1,8}", ended in any::<bool>(),
    ) {
        for kind in kinds() {
            let chat = &kind.chat;
            let mut messages = vec![Message::system("be kind"), Message::user("hello")];
            let mut tokens = fresh(chat, &messages);
            for answer in &answers {
                let mut reply = sampled(chat, answer);
                if ended {
                    reply.extend(chat.end_ids());
                }
                let recorded = after(&tokens, &reply, messages.len() + 1, ended);
                let question = Message::user(typed.clone());
                messages.extend([Message::assistant(answer.clone()), question.clone()]);
                let rendered = chat.render(&talk(&messages), Ok(&recorded)).unwrap();
                prop_assert_eq!(rendered.segment, Segment::Extends, "{}", kind.name);
                prop_assert!(rendered.tokens.starts_with(&recorded.tokens));
                // What follows the answer is what follows any answer in a fresh prompt.
                let rest = &rendered.tokens[recorded.tokens.len()..];
                let whole = fresh(chat, &[Message::assistant("a"), question]);
                let close = whole.iter().position(|id| chat.end_ids().contains(id)).unwrap();
                prop_assert_eq!(rest, &whole[close + usize::from(ended)..], "{}", kind.name);
                tokens = rendered.tokens;
            }
            prop_assert_eq!(controls(chat, &tokens), controls(chat, &fresh(chat, &messages)));
        }
    }
}

#[test]
fn an_edited_history_opens_a_segment() {
    let chat = &kinds()[0].chat;
    let all = [
        Message::user("a"),
        Message::assistant("b"),
        Message::user("c"),
    ];
    let prompt = fresh(chat, &all[..1]);
    for messages in [0, 1, 3, 4, 9] {
        let recorded = after(&prompt, chat.end_ids(), messages, true);
        assert_eq!(opened(chat, &talk(&all), &recorded), "history edited");
    }
    let other = fresh(chat, &[Message::user("another")]);
    let recorded = after(&other, chat.end_ids(), 2, true);
    let why = "tools, template options or date changed";
    assert_eq!(opened(chat, &talk(&all), &recorded), why);
}

#[test]
fn a_composing_tokenizer_recognises_its_own_prompt() {
    let chat = &kinds()[1].chat;
    // Composed on the way in, so the ids do not give the typed text back.
    let all = [
        Message::user("a\u{301}"),
        Message::assistant("b"),
        Message::user("c"),
    ];
    let recorded = after(&fresh(chat, &all[..1]), chat.end_ids(), 2, true);
    assert!(extends(chat, &talk(&all), &recorded));
}

#[test]
fn a_template_that_drops_thinking_opens_a_segment() {
    let chat = &byte_level_chat(THINKING, &[]);
    let answer = |reasoning: Option<&str>| Message {
        reasoning: reasoning.map(str::to_owned),
        ..Message::assistant("b")
    };
    let all = |reasoning| talk(&[Message::user("a"), answer(reasoning), Message::user("c")]);
    let recorded = after(&fresh(chat, &[Message::user("a")]), chat.end_ids(), 2, true);
    let why = opened(chat, &all(Some("hm")), &recorded);
    assert_eq!(why, "the template rewrites earlier turns");
    assert!(extends(chat, &all(None), &recorded));
}

#[test]
fn another_head_opens_a_segment() {
    let day = Arc::new(AtomicU64::new(10));
    let today = day.clone();
    let clock = move || UNIX_EPOCH + Duration::from_secs(86_400 * today.load(Ordering::Relaxed));
    let chat = byte_level_chat(TOOLS, &[]).with_clock(Arc::new(clock));
    let call = ToolCall {
        id: "1".to_owned(),
        name: "f".to_owned(),
        arguments: "{\"a\":1}".to_owned(),
    };
    let all = [
        Message::user("a"),
        Message {
            tool_calls: vec![call],
            ..Message::assistant("")
        },
        Message::text(Role::Tool, "42"),
    ];
    let with = |count: usize, definition: &str| Conversation {
        tools: vec![Tool {
            name: "f".to_owned(),
            definition: definition.to_owned(),
        }],
        ..talk(&all[..count])
    };
    let first = chat.render(&with(1, "{\"x\":1}"), Err(""));
    // Sampled in another form than the template's.
    let text = "<tool_call>{\"arguments\":{\"a\":1},\"name\":\"f\"}</tool_call>";
    let reply = [&sampled(&chat, text)[..], chat.end_ids()].concat();
    let recorded = after(&first.unwrap().tokens, &reply, 2, true);
    assert!(extends(&chat, &with(3, "{\"x\":1}"), &recorded));
    let why = "tools, template options or date changed";
    assert_eq!(opened(&chat, &with(3, "{\"x\":2}"), &recorded), why);
    day.store(11, Ordering::Relaxed);
    assert_eq!(opened(&chat, &with(3, "{\"x\":1}"), &recorded), why);
}
