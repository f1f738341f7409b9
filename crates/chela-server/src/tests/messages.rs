//! Anthropic's messages: what a request means, whole answers, the order of a stream's events, errors in that API's shape.

use super::*;

fn tool() -> Value {
    json!({"name": "add", "description": "adds", "input_schema": {"type": "object"}})
}

/// A request of one message, with more fields.
fn say(more: Value) -> Value {
    let mut body = json!({"model": "org/base", "max_tokens": 100,
        "messages": [{"role": "user", "content": "hi"}]});
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

impl Api {
    async fn message(&self, more: Value) -> Answer {
        self.post("/v1/messages?beta=true", "chat", &say(more))
            .await
    }

    /// The last prompt's text.
    fn prompt(&self) -> String {
        CHAT.decode(&self.engine.requests().last().unwrap().prompt)
    }
}

#[tokio::test]
async fn a_whole_answer_of_thinking_text_and_calls() {
    let api = api();
    api.engine.set_cached_tokens(5);
    api.reply(
        "<think>hm</think>sure <tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>",
    );
    let answer = api
        .message(json!({"tools": [tool()], "frobnicate": 1}))
        .await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    assert_eq!(answer.header("x-chela-turn"), "turn_0000000000000001");
    assert_eq!(answer.header("x-chela-ignored"), "frobnicate");
    let body = answer.json();
    assert_eq!(body["id"], "msg_turn_0000000000000001");
    assert_eq!(
        (&body["type"], &body["role"]),
        (&json!("message"), &json!("assistant"))
    );
    let content = body["content"].as_array().unwrap();
    assert_eq!(content[0]["type"], "thinking");
    assert_eq!(content[0]["thinking"], "hm");
    assert!(!content[0]["signature"].as_str().unwrap().is_empty());
    assert_eq!(content[1]["text"].as_str().unwrap().trim(), "sure");
    assert_eq!(content[2]["name"], "add");
    assert_eq!(content[2]["input"], json!({"a": 1}));
    assert_eq!(body["stop_reason"], "tool_use");
    let usage = &body["usage"];
    let prompt = api.engine.requests()[0].prompt.len();
    assert_eq!(usage["cache_read_input_tokens"], 5);
    assert_eq!(usage["input_tokens"], prompt - 5);
    assert!(usage["output_tokens"].as_u64().unwrap() > 10);
}

#[tokio::test]
async fn reasons_to_stop() {
    let api = api();
    api.reply("abc");
    let body = api.message(json!({})).await.json();
    assert_eq!(body["stop_reason"], "end_turn");
    assert_eq!(body["content"], json!([{"type": "text", "text": "abc"}]));
    api.reply("abcdef");
    let body = api.message(json!({"max_tokens": 2})).await.json();
    assert_eq!(
        (
            body["stop_reason"].as_str(),
            body["content"][0]["text"].as_str()
        ),
        (Some("max_tokens"), Some("ab"))
    );
    api.reply("one STOP two");
    let body = api
        .message(json!({"stop_sequences": [" STOP"]}))
        .await
        .json();
    assert_eq!(
        (
            body["stop_reason"].as_str(),
            body["content"][0]["text"].as_str()
        ),
        (Some("stop_sequence"), Some("one"))
    );
    assert_eq!(body["stop_sequence"], " STOP");
    // Nothing said is no block.
    api.reply("");
    assert_eq!(api.message(json!({})).await.json()["content"], json!([]));
}

#[tokio::test]
async fn a_conversation_of_blocks_reads_as_one_of_messages() {
    let api = api();
    let answer = api
        .message(json!({
            "system": [{"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=9"},
                       {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "tools": [tool()],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "1+2?"}]},
                {"role": "system", "content": "Think."},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "sum", "signature": "s"},
                    {"type": "text", "text": "adding"},
                    {"type": "tool_use", "id": "t1", "name": "add", "input": {"b": 1, "a": 2}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "is_error": true,
                     "content": [{"type": "text", "text": "broken"}]},
                    {"type": "text", "text": "and now?"}]},
            ],
        }))
        .await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    assert_eq!(
        api.prompt(),
        "system\nBe brief.\nuser\n1+2?\nsystem\nThink.\nassistant\nadding\ntool\nError: broken\nuser\nand now?\nassistant\n"
    );
    let asked = api.recorder.admitted.lock().unwrap();
    let messages = &asked.last().unwrap().conversation.messages;
    let call = &messages[3].tool_calls[0];
    assert_eq!(
        (call.id.as_str(), call.arguments.as_str()),
        ("t1", r#"{"b":1,"a":2}"#)
    );
    assert_eq!(messages[3].reasoning.as_deref(), Some("sum"));
    assert_eq!(
        (messages[4].name.as_deref(), messages[4].is_error),
        (Some("add"), true)
    );
    let tool = &asked.last().unwrap().conversation.tools[0];
    assert_eq!(
        tool.definition,
        r#"{"type":"function","function":{"name":"add","description":"adds","parameters":{"type":"object"}}}"#
    );
}

#[tokio::test]
async fn the_session_of_claude_code_is_known() {
    let api = api();
    let user = json!({"device_id": "d", "session_id": "from-metadata"}).to_string();
    api.message(json!({"metadata": {"user_id": user}})).await;
    let claim = api.recorder.admitted.lock().unwrap()[0]
        .hints
        .session
        .clone();
    assert_eq!(claim.unwrap().id, "from-metadata");
}

#[tokio::test]
async fn a_stream_opens_and_closes_each_block_in_order() {
    let api = api();
    api.reply(
        "<think>hm</think>ok <tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>",
    );
    let answer = api
        .message(json!({"stream": true, "tools": [tool()]}))
        .await;
    assert_eq!(
        answer.header("content-type"),
        "text/event-stream; charset=utf-8"
    );
    assert_eq!(answer.header("x-chela-turn-kind"), "main");
    let events = named_events(&answer.body);
    let kinds: Vec<&str> = events.iter().map(|e| e["type"].as_str().unwrap()).collect();
    assert_eq!(kinds.first(), Some(&"message_start"));
    assert_eq!(kinds[kinds.len() - 2..], ["message_delta", "message_stop"]);
    let start = &events[0]["message"];
    assert_eq!(start["content"], json!([]));
    assert!(start["usage"]["input_tokens"].as_u64().unwrap() > 0);
    // No delta outside its own block, no gap in the numbers.
    let (mut open, mut next) = (None, 0);
    let (mut texts, mut types) = (vec![String::new(); 3], Vec::new());
    for event in &events[1..events.len() - 2] {
        let index = event["index"].as_u64().unwrap();
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert_eq!((open, index), (None, next));
                types.push(event["content_block"]["type"].as_str().unwrap().to_owned());
                (open, next) = (Some(index), next + 1);
            }
            "content_block_delta" => {
                assert_eq!(open, Some(index));
                for key in ["thinking", "text", "partial_json"] {
                    texts[index as usize] += event["delta"][key].as_str().unwrap_or_default();
                }
            }
            "content_block_stop" => assert_eq!(open.take(), Some(index)),
            other => panic!("{other}"),
        }
    }
    assert_eq!(open, None);
    assert_eq!(types, ["thinking", "text", "tool_use"]);
    assert_eq!(
        (texts[0].as_str(), texts[1].trim(), texts[2].as_str()),
        ("hm", "ok", r#"{"a":1}"#)
    );
    let end = &events[events.len() - 2];
    assert_eq!(end["delta"]["stop_reason"], "tool_use");
    assert!(end["usage"]["output_tokens"].as_u64().unwrap() > 10);
}

#[tokio::test]
async fn a_stream_that_breaks_ends_with_an_error_and_no_stop() {
    let api = api();
    api.engine.push_reply(FakeReply {
        tokens: ids("ab"),
        error: Some(EngineError::Stopped("crash".to_owned())),
    });
    let answer = api.message(json!({"stream": true})).await;
    let events = named_events(&answer.body);
    let last = events.last().unwrap();
    assert_eq!(
        (last["type"].as_str(), last["error"]["type"].as_str()),
        (Some("error"), Some("overloaded_error"))
    );
    assert!(!answer.body.contains("message_stop") && !answer.body.contains("stop_reason\":\"end"));
}

#[tokio::test]
async fn refusals_have_the_apis_own_shape_and_name_the_field() {
    let api = api();
    for (more, field) in [
        (json!({"max_tokens": null}), "max_tokens"),
        (json!({"messages": []}), "messages"),
        (
            json!({"messages": [{"role": "robot", "content": "x"}]}),
            "messages[0].role",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
            "messages[0].content[0].type",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}),
            "messages[0].content[0].tool_use_id",
        ),
        (json!({"tools": [{"name": "x"}]}), "tools[0].input_schema"),
        (
            json!({"tools": [tool()], "tool_choice": {"type": "tool", "name": "sub"}}),
            "tool_choice",
        ),
        (json!({"thinking": {"type": "deep"}}), "thinking.type"),
        (json!({"stop_sequences": [""]}), "stop_sequences"),
        (json!({"system": 5}), "system"),
    ] {
        let answer = api.message(more.clone()).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{more}");
        let body = answer.json();
        assert_eq!(body["type"], "error", "{more}");
        assert_eq!(body["error"]["type"], "invalid_request_error");
        let message = body["error"]["message"].as_str().unwrap();
        assert!(message.starts_with(&format!("{field}:")), "{message}");
    }
    let long = "x".repeat(CONTEXT + 1);
    let body = api
        .message(json!({"messages": [{"role": "user", "content": long}]}))
        .await
        .json();
    assert!(
        body["error"]["message"]
            .as_str()
            .unwrap()
            .starts_with("prompt is too long")
    );
    assert!(api.recorder.sealed.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_providers_own_tools_are_named_as_ignored() {
    let api = api();
    api.reply("ok");
    let tools = json!([{"type": "web_search_20250305", "name": "web_search"}, tool()]);
    let answer = api.message(json!({"tools": tools})).await;
    assert_eq!(answer.header("x-chela-ignored"), "tools[0]");
}

#[tokio::test]
async fn tokens_are_counted_without_a_turn() {
    let api = api();
    let body = json!({"model": "org/base", "messages": [{"role": "user", "content": "hi"}]});
    let counted = api.post("/v1/messages/count_tokens", "chat", &body).await;
    assert_eq!(counted.status, StatusCode::OK, "{}", counted.body);
    api.reply("x");
    api.message(json!({})).await;
    assert_eq!(
        counted.json()["input_tokens"],
        api.engine.requests()[0].prompt.len()
    );
    assert_eq!(api.recorder.admitted.lock().unwrap().len(), 1);
}
