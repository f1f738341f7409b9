//! Replies kept to a form, sampled at random under the mask: whatever is drawn has the form.

use crate::common::{CHATML, byte_level_chat, talk};
use chela_chat::{AnswerOptions, Chat, ChatError};
use chela_core::{Constraint, Conversation, Flow, Message, TokenId, Tool};
use serde_json::{Value, json};

/// Draws from what is allowed, the end as soon as it is, for at most this many tokens. `prefer`: these texts first.
fn draw(
    chat: &Chat,
    constraint: &Constraint,
    c: &Conversation,
    seed: u64,
    begin: &str,
) -> Vec<TokenId> {
    let grammar = chat.grammar(constraint, c).unwrap();
    let mut guide = chat.guide(&[], Some(&grammar)).unwrap();
    let mut state = seed;
    let mut ids = Vec::new();
    let mut wanted: Vec<TokenId> = chat.encode_rendered(begin).unwrap();
    wanted.reverse();
    for _ in 0..400 {
        let mut logits = vec![0.0f32; chat.vocabulary() + 3];
        let left = guide.mask(&mut logits);
        let allowed: Vec<TokenId> = (0..logits.len() as TokenId)
            .filter(|id| logits[*id as usize].is_finite())
            .collect();
        assert!(left.is_none_or(|n| n == allowed.len()));
        let next = match wanted.pop() {
            Some(id) => {
                assert!(
                    allowed.contains(&id),
                    "{:?} is not allowed after {:?}",
                    chat.decode(&[id]),
                    chat.decode(&ids)
                );
                id
            }
            None => {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                let ends = allowed.iter().find(|id| chat.end_ids().contains(id));
                // Closing characters often, so that texts end.
                let close = allowed
                    .iter()
                    .find(|id| ["\"", "}", "]"].contains(&chat.decode(&[**id]).as_str()));
                let any = allowed[(state >> 33) as usize % allowed.len()];
                *ends
                    .or(close.filter(|_| (state >> 20).is_multiple_of(3)))
                    .unwrap_or(&any)
            }
        };
        ids.push(next);
        if chat.end_ids().contains(&next) {
            return ids;
        }
        assert_eq!(guide.accept(next), Flow::Continue);
    }
    panic!("no end: {:?}", chat.decode(&ids));
}

fn schema(schema: &Value) -> Constraint {
    Constraint::Schema {
        schema: schema.to_string(),
        or_calls: false,
    }
}

fn plain() -> Chat {
    byte_level_chat(CHATML, &[])
}

fn thinking() -> Chat {
    byte_level_chat(CHATML, &[("<think>", false), ("</think>", false)])
}

#[test]
fn json_has_the_schemas_form_and_order() {
    let chat = plain();
    let form = json!({"type": "object", "properties": {
        "b": {"type": "string", "maxLength": 8}, "a": {"type": "integer"}, "e": {"enum": ["x y", "é"]},
        "n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2}},
        "required": ["b", "a", "e", "n"], "additionalProperties": false,
        "$defs": {"n": {"type": "object", "properties": {"v": {"type": "boolean"}}, "required": ["v"], "additionalProperties": false}}});
    for seed in 0..30 {
        let text = chat.decode(&draw(
            &chat,
            &schema(&form),
            &Conversation::default(),
            seed,
            "",
        ));
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{text:?}: {e}"));
        let keys: Vec<&String> = value.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["b", "a", "e", "n"], "{text}");
        assert!(value["a"].is_i64() || value["a"].is_u64() || value["a"].is_f64());
        assert!(!text.contains("  ") && !text.contains('\n'), "{text:?}");
    }
}

#[test]
fn thinking_comes_before_the_form() {
    let chat = thinking();
    let form = schema(
        &json!({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false}),
    );
    for begin in [
        "<think>\nmaybe {\"a\": 3} 界\n</think>\n\n{\"a\": ",
        "<think></think>{",
        "{\"a\": t",
    ] {
        let ids = draw(&chat, &form, &Conversation::default(), 1, begin);
        let mut parser = chat.answer_parser(AnswerOptions::default());
        for id in ids {
            parser.push(id);
        }
        let message = parser.finish().1;
        assert!(serde_json::from_str::<Value>(&message.content).unwrap()["a"].is_boolean());
        assert_eq!(message.reasoning.is_some(), begin.contains("maybe"));
    }
}

#[test]
fn a_forced_call_is_one() {
    let tool = |name: &str, parameters: Value| Tool {
        name: name.to_owned(),
        definition:
            json!({"type": "function", "function": {"name": name, "parameters": parameters}})
                .to_string(),
    };
    let place = json!({"type": "object", "properties": {"place": {"type": "string", "maxLength": 4}}, "required": ["place"], "additionalProperties": false});
    let tools = vec![
        tool("get", place),
        tool(
            "no\"w",
            json!({"type": "object", "properties": {}, "additionalProperties": false}),
        ),
    ];
    let shown = ["", "<function=", "\"parameters\": dictionary"];
    for chat in shown.map(|shown| {
        byte_level_chat(
            &format!("{CHATML}{{# {shown} tools #}}"),
            &[("<tool_call>", true), ("</tool_call>", true)],
        )
    }) {
        let mut c = talk(&[Message::user("hi")]);
        c.tools = tools.clone();
        for (seed, tool, many) in [
            (1, None, true),
            (2, Some("get"), false),
            (3, Some("no\"w"), false),
            (4, None, false),
        ] {
            let constraint = Constraint::Calls {
                tool: tool.map(str::to_owned),
                many,
            };
            let ids = draw(&chat, &constraint, &c, seed, "");
            let mut parser = chat.answer_parser(AnswerOptions {
                tools: true,
                offered: tools.as_slice().into(),
                ..AnswerOptions::default()
            });
            for id in &ids {
                parser.push(*id);
            }
            let message = parser.finish().1;
            assert_eq!(message.content, "");
            assert!(many || message.tool_calls.len() == 1);
            let call = &message.tool_calls[0];
            assert!(tool.is_none_or(|tool| tool == call.name));
            let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
            assert_eq!(arguments["place"].is_string(), call.name == "get");
        }
    }
}

#[test]
fn a_form_may_leave_room_for_calls() {
    let chat = plain();
    let mut c = talk(&[Message::user("hi")]);
    let definition = json!({"type": "function", "function": {"name": "f"}}).to_string();
    c.tools.push(Tool {
        name: "f".to_owned(),
        definition,
    });
    let form =
        json!({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]});
    let constraint = Constraint::Schema {
        schema: form.to_string(),
        or_calls: true,
    };
    for begin in [
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>",
        "{\"a\": true}",
    ] {
        let ids = draw(&chat, &constraint, &c, 0, begin);
        assert_eq!(chat.decode(&ids), begin);
    }
}

#[test]
fn texts_and_patterns() {
    let chat = plain();
    let none = Conversation::default();
    let choice = Constraint::Choice(vec!["yes\n".to_owned(), "\"no\"".to_owned()]);
    let many = Constraint::Choice((0..5000).map(|n| format!("option {n}.")).collect());
    let text = chat.decode(&draw(&chat, &many, &none, 1, ""));
    assert!(
        text.starts_with("option ") && text.ends_with('.'),
        "{text:?}"
    );
    let one = |n: usize| {
        let key = format!("k{n}");
        json!({"type": "object", "properties": {key.as_str(): {"type": "null"}}, "required": [key], "additionalProperties": false})
    };
    let any = schema(&json!({"anyOf": (0..3000).map(one).collect::<Vec<_>>()}));
    let text = chat.decode(&draw(&chat, &any, &none, 3, ""));
    assert!(
        text.starts_with("{\"k") && text.ends_with(": null}"),
        "{text:?}"
    );
    let pattern = Constraint::Regex("[a-c]{2}-(é|\\d)".to_owned());
    for seed in 0..10 {
        let text = chat.decode(&draw(&chat, &choice, &none, seed, ""));
        assert!(["yes\n", "\"no\""].contains(&text.as_str()), "{text:?}");
        let text = chat.decode(&draw(&chat, &pattern, &none, seed, ""));
        assert_eq!(text.chars().count(), 4, "{text:?}");
        assert!(text.chars().take(2).all(|c| "abc".contains(c)));
    }
}

#[test]
fn forms_that_cannot_be_kept_to_are_refused() {
    let chat = plain();
    let mut c = talk(&[Message::user("hi")]);
    for (name, parameters) in [
        ("fine", json!({"type": "object"})),
        ("odd", json!({"type": "nothing"})),
    ] {
        let definition =
            json!({"type": "function", "function": {"name": name, "parameters": parameters}});
        c.tools.push(Tool {
            name: name.to_owned(),
            definition: definition.to_string(),
        });
    }
    let calls = Constraint::Calls {
        tool: None,
        many: true,
    };
    let refused = chat.grammar(&calls, &c).err();
    assert!(
        matches!(refused, Some(ChatError::Grammar { tool: Some(1), .. })),
        "{refused:?}"
    );
    let nested = |n: usize| {
        let open = r#"{"type":"object","required":["a"],"properties":{"a":"#.repeat(n);
        Constraint::Schema {
            schema: format!("{open}{{\"type\":\"null\"}}{}", "}}".repeat(n)),
            or_calls: false,
        }
    };
    assert!(chat.grammar(&nested(50), &Conversation::default()).is_ok());
    assert!(
        chat.grammar(&nested(2000), &Conversation::default())
            .is_err()
    );
    for bad in [
        json!({"type": "nothing"}),
        json!({"type": "object", "properties": 3}),
        json!({"$ref": "#/nowhere"}),
        json!({"type": "integer", "minimum": 3, "maximum": 2}),
    ] {
        let refused = chat.grammar(&schema(&bad), &Conversation::default()).err();
        assert!(
            matches!(refused, Some(ChatError::Grammar { tool: None, .. })),
            "{refused:?}"
        );
    }
    let regex = Constraint::Regex("(".to_owned());
    assert!(chat.grammar(&regex, &Conversation::default()).is_err());
}
