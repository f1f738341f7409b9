//! OpenAI's responses: items in, items out, the order and numbers of a stream's events, conversations that go on.

use super::*;

fn tool() -> Value {
    json!({"type": "function", "name": "add", "description": "adds", "strict": true,
           "parameters": {"type": "object"}})
}

impl Api {
    async fn respond(&self, more: Value) -> Answer {
        let mut body = json!({"model": "org/base", "input": "hi"});
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        self.post("/v1/responses", "chat", &body).await
    }
}

const ALL: &str = "<think>hm</think>sure <tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>";

#[tokio::test]
async fn a_whole_response_of_reasoning_text_and_calls() {
    let api = api();
    api.engine.set_cached_tokens(5);
    api.reply(ALL);
    let answer = api
        .respond(
            json!({"tools": [tool()], "temperature": 0.5, "frobnicate": 1, "metadata": {"a": "b"}}),
        )
        .await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    assert_eq!(answer.header("x-chela-ignored"), "frobnicate");
    assert_eq!(answer.header("x-chela-turn"), "turn_0000000000000001");
    let body = answer.json();
    assert_eq!(body["id"], "resp_turn_0000000000000001");
    assert_eq!(
        (&body["object"], &body["status"]),
        (&json!("response"), &json!("completed"))
    );
    assert_eq!(body["metadata"], json!({"a": "b"}));
    assert_eq!(body["tools"][0]["name"], "add");
    let output = body["output"].as_array().unwrap();
    let types: Vec<&str> = output.iter().map(|o| o["type"].as_str().unwrap()).collect();
    assert_eq!(types, ["reasoning", "message", "function_call"]);
    assert_eq!(output[0]["content"][0]["text"], "hm");
    assert_eq!(
        output[1]["content"][0]["text"].as_str().unwrap().trim(),
        "sure"
    );
    assert_eq!(output[2]["arguments"], r#"{"a": 1}"#);
    assert!(!output[2]["call_id"].as_str().unwrap().is_empty());
    let usage = &body["usage"];
    assert_eq!(usage["input_tokens_details"]["cached_tokens"], 5);
    let total = usage["input_tokens"].as_u64().unwrap() + usage["output_tokens"].as_u64().unwrap();
    assert_eq!(usage["total_tokens"], total);
    assert_eq!(api.engine.requests()[0].temperature, 0.5);

    api.reply("abcdef");
    let body = api.respond(json!({"max_output_tokens": 2})).await.json();
    assert_eq!(body["status"], "incomplete");
    assert_eq!(body["incomplete_details"]["reason"], "max_output_tokens");
}

#[tokio::test]
async fn items_of_one_answer_become_one_message_again() {
    let api = api();
    let answer = api
        .respond(json!({
            "instructions": "Be brief.", "tools": [tool(), {"type": "web_search"}],
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "1+2?"}]},
                {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "sum"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "adding"}]},
                {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{\"a\":1}"},
                {"type": "function_call", "call_id": "c2", "name": "sub", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c2", "output": "3"},
                {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "4"}]},
                {"type": "message", "role": "assistant", "content": "done"},
                {"type": "message", "role": "developer", "content": "Louder."},
            ],
        }))
        .await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    assert_eq!(answer.header("x-chela-ignored"), "tools[1]");
    let asked = api.recorder.last_request();
    let messages = &asked.conversation.messages;
    let roles: Vec<&str> = messages.iter().map(|m| m.role.as_str()).collect();
    assert_eq!(
        roles,
        [
            "system",
            "user",
            "assistant",
            "tool",
            "tool",
            "assistant",
            "system"
        ]
    );
    assert_eq!(messages[2].reasoning.as_deref(), Some("sum"));
    assert_eq!(messages[2].content, "adding");
    let calls: Vec<&str> = messages[2]
        .tool_calls
        .iter()
        .map(|c| c.id.as_str())
        .collect();
    assert_eq!(calls, ["c1", "c2"]);
    assert_eq!(
        (messages[4].name.as_deref(), messages[4].content.as_str()),
        (Some("sub"), "3")
    );
    assert_eq!(messages[3].content, "4");
    assert_eq!(
        asked.conversation.tools[0].definition,
        r#"{"type":"function","function":{"name":"add","description":"adds","parameters":{"type":"object"}}}"#
    );
}

#[tokio::test]
async fn a_stream_adds_fills_and_finishes_each_item() {
    let api = api();
    api.reply(ALL);
    let answer = api
        .respond(json!({"stream": true, "tools": [tool()]}))
        .await;
    let events = named_events(&answer.body);
    for (i, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], i);
    }
    let kinds: Vec<&str> = events.iter().map(|e| e["type"].as_str().unwrap()).collect();
    assert_eq!(kinds[..2], ["response.created", "response.in_progress"]);
    let mut without_deltas: Vec<&str> = Vec::new();
    for kind in &kinds[2..] {
        if without_deltas.last() != Some(kind) {
            without_deltas.push(kind.strip_prefix("response.").unwrap());
        }
    }
    without_deltas.dedup();
    assert_eq!(
        without_deltas,
        [
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "completed",
        ]
    );
    let last = &events.last().unwrap()["response"];
    let done: Vec<&Value> = events
        .iter()
        .filter(|e| e["type"] == "response.output_item.done")
        .map(|e| &e["item"])
        .collect();
    assert_eq!(
        last["output"]
            .as_array()
            .unwrap()
            .iter()
            .collect::<Vec<_>>(),
        done
    );
    assert_eq!(last["id"], "resp_turn_0000000000000001");
    assert!(last["usage"]["output_tokens"].as_u64().unwrap() > 10);
    let text: String = events
        .iter()
        .filter(|e| e["type"] == "response.output_text.delta")
        .map(|e| e["delta"].as_str().unwrap())
        .collect();
    assert_eq!(last["output"][1]["content"][0]["text"], text);
}

#[tokio::test]
async fn a_stream_that_breaks_fails_and_never_completes() {
    let api = api();
    api.engine.push_reply(FakeReply {
        tokens: ids("ab"),
        error: Some(EngineError::Stopped("crash".to_owned())),
    });
    let answer = api.respond(json!({"stream": true})).await;
    let last = named_events(&answer.body).pop().unwrap();
    assert_eq!(last["type"], "response.failed");
    assert_eq!(last["response"]["status"], "failed");
    assert!(!answer.body.contains("response.completed"));
}

pub fn earlier(id: u64) -> TurnStory {
    let turn = Turn {
        id: TurnId(id),
        profile: Profile::default(),
        session: SessionId::new("its-session").unwrap(),
        parent: None,
        segment: Segment::Extends,
        kind: TurnKind::Main,
        reason: "default".to_owned(),
        version: PolicyVersion::base(Profile::default()),
        prompt: vec![1, 2, 3],
        reply: Reply::default(),
        temperature: 1.0,
        finish: FinishReason::Length,
        messages: vec![Message::system("Old."), Message::user("q")],
        tools: vec![],
        answer: Message::assistant("a"),
        created: 1,
        completed: 2_000,
    };
    TurnStory {
        turn,
        next: None,
        mark: None,
        no_verdict: None,
        verdicts: vec![],
        samples: vec![],
    }
}

#[tokio::test]
async fn a_conversation_goes_on_from_an_earlier_response() {
    let api = api();
    *api.control.stories.lock().unwrap() = vec![earlier(7)];
    let said = |api: &Api| -> Vec<String> {
        let asked = api.recorder.last_request();
        let text = |m: &Message| format!("{}:{}", m.role.as_str(), m.content);
        asked.conversation.messages.iter().map(text).collect()
    };
    let id = "resp_turn_0000000000000007";
    api.respond(json!({"previous_response_id": id, "input": "and?"}))
        .await;
    assert_eq!(
        said(&api),
        ["system:Old.", "user:q", "assistant:a", "user:and?"]
    );
    let session = api.recorder.last_request().hints.session.unwrap();
    assert_eq!(session.id, "its-session");
    // New instructions replace the old ones.
    api.respond(json!({"previous_response_id": id, "input": "and?", "instructions": "New."}))
        .await;
    assert_eq!(
        said(&api),
        ["system:New.", "user:q", "assistant:a", "user:and?"]
    );

    let given = api
        .get(&format!("/v1/responses/{id}"), "feedback")
        .await
        .json();
    assert_eq!(
        (&given["id"], &given["status"]),
        (&json!(id), &json!("incomplete"))
    );
    assert_eq!(given["output"][0]["content"][0]["text"], "a");
    assert_eq!(
        (&given["created_at"], &given["usage"]["input_tokens"]),
        (&json!(2), &json!(3))
    );

    let unknown = api
        .respond(json!({"previous_response_id": "resp_turn_0000000000000009"}))
        .await;
    assert_eq!(unknown.status, StatusCode::NOT_FOUND);
    assert_eq!(unknown.json()["error"]["param"], "previous_response_id");
}

#[tokio::test]
async fn refusals_name_the_field() {
    let api = api();
    for (more, field) in [
        (json!({"input": null}), "input"),
        (json!({"input": []}), "input"),
        (
            json!({"input": [{"role": "robot", "content": "x"}]}),
            "input[0].role",
        ),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
            "input[0].content[0].type",
        ),
        (
            json!({"input": [{"type": "computer_call"}]}),
            "input[0].type",
        ),
        (
            json!({"input": [{"type": "function_call", "name": "x"}]}),
            "input[0].call_id",
        ),
        (
            json!({"input": [{"type": "function_call_output", "call_id": "c"}]}),
            "input[0].output",
        ),
        (
            json!({"tools": [tool()], "tool_choice": {"type": "function", "name": "sub"}}),
            "tool_choice",
        ),
        (
            json!({"text": {"format": {"type": "json_schema"}}}),
            "text.format.schema",
        ),
        (
            json!({"previous_response_id": "other"}),
            "previous_response_id",
        ),
        (json!({"max_output_tokens": 0}), "max_output_tokens"),
    ] {
        let answer = api.respond(more.clone()).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{more}");
        assert_eq!(answer.json()["error"]["param"], field, "{more}");
    }
    assert!(api.recorder.sealed.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_deleted_response_is_gone() {
    let api = api();
    *api.control.stories.lock().unwrap() = vec![earlier(7)];
    let path = "/v1/responses/resp_turn_0000000000000007";
    let delete = || {
        request("DELETE", path)
            .header("x-api-key", "feedback")
            .body(Body::empty())
            .unwrap()
    };
    let answer = api.send(delete()).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    assert_eq!(answer.json()["deleted"], true);
    assert_eq!(api.control.last(), "withdraw turn_0000000000000007");
    assert_eq!(
        api.get(path, "feedback").await.status,
        StatusCode::NOT_FOUND
    );
    assert_eq!(api.send(delete()).await.status, StatusCode::NOT_FOUND);
    let id = "resp_turn_0000000000000007";
    let answer = api
        .respond(json!({"previous_response_id": id, "input": "and?"}))
        .await;
    assert_eq!(answer.status, StatusCode::NOT_FOUND);
    assert_eq!(answer.json()["error"]["param"], "previous_response_id");
}

#[tokio::test]
async fn tools_of_a_namespace_are_offered_and_called() {
    let api = api();
    let space = json!({"type": "namespace", "name": "agents.v1", "tools": [
        {"type": "function", "name": "spawn", "parameters": {"type": "object"}}]});
    let body = json!({"tools": [space, tool()], "input": [
        {"role": "user", "content": "go"},
        {"type": "function_call", "call_id": "c", "namespace": "agents.v1", "name": "spawn", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "done"}]});
    let call = "<tool_call>{\"name\": \"agents.v1.spawn\", \"arguments\": {}}</tool_call>";
    api.reply(call);
    let answer = api.respond(body.clone()).await;
    let item = answer.json()["output"][0].clone();
    assert_eq!(
        (&item["name"], &item["namespace"]),
        (&json!("spawn"), &json!("agents.v1"))
    );
    let asked = api.recorder.last_request().conversation;
    let names: Vec<&str> = asked.tools.iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["agents.v1.spawn", "add"]);
    assert_eq!(asked.messages[1].tool_calls[0].name, "agents.v1.spawn");
    api.reply(call);
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let events = named_events(&api.respond(streamed).await.body);
    let of = |kind: &str| events.iter().find(|e| e["type"] == kind).unwrap().clone();
    for kind in ["response.output_item.added", "response.output_item.done"] {
        assert_eq!(of(kind)["item"]["namespace"], "agents.v1");
    }
    assert_eq!(of("response.function_call_arguments.done")["name"], "spawn");
}
