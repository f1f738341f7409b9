//! Replies kept to a form, over an engine that fails where its script breaks it.

use super::*;

const CALL: &str = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>";
const OBJECT: &str = "{\"b\": 1, \"a\": \"x\"}";

fn schema() -> Value {
    json!({"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}},
        "required": ["b", "a"], "additionalProperties": false})
}

/// The same question to each API, asking for a schema or a call.
fn questions(form: bool) -> [(&'static str, Value); 3] {
    let parameters = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let chat = if form {
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": schema()}}})
    } else {
        json!({"tools": [{"type": "function", "function": {"name": "add", "parameters": parameters}}], "tool_choice": "required"})
    };
    let mut messages = json!({"model": "org/base", "max_tokens": 500, "messages": [{"role": "user", "content": "hi"}]});
    let mut responses = json!({"model": "org/base", "input": "hi"});
    if form {
        messages["output_config"] = json!({"format": {"type": "json_schema", "schema": schema()}});
        responses["text"] =
            json!({"format": {"type": "json_schema", "name": "n", "schema": schema()}});
    } else {
        messages["tools"] = json!([{"name": "add", "input_schema": parameters}]);
        messages["tool_choice"] = json!({"type": "tool", "name": "add"});
        responses["tools"] = json!([{"type": "function", "name": "add", "parameters": parameters}]);
        responses["tool_choice"] = json!({"type": "function", "name": "add"});
    }
    [
        ("/v1/chat/completions", ask(chat)),
        ("/v1/messages", messages),
        ("/v1/responses", responses),
    ]
}

#[tokio::test]
async fn every_api_keeps_a_reply_to_its_schema() {
    for (path, body) in questions(true) {
        let api = api();
        api.reply(OBJECT);
        let answer = api.post(path, "chat", &body).await;
        assert_eq!(answer.status, StatusCode::OK, "{path}: {}", answer.body);
        let text = serde_json::to_string(OBJECT).unwrap();
        assert!(answer.body.contains(&text), "{path}: {}", answer.body);
        {
            let sealed = api.recorder.sealed.lock().unwrap();
            // The mask changes what is sampled from, so log-probs hold at temperature 1.
            assert_eq!(sealed[0].temperature, 1.0);
            assert!(sealed[0].reply.forced().iter().any(|forced| *forced));
        }
        for wrong in [
            "Sure: {}",
            "{\"a\": \"x\", \"b\": 1}",
            "{ \"b\": 1",
            "{\"b\": 1}",
        ] {
            api.reply(wrong);
            let answer = api.post(path, "chat", &body).await;
            assert!(answer.status.is_server_error(), "{path}: {wrong}");
        }
    }
}

#[tokio::test]
async fn every_api_forces_a_call() {
    for (path, body) in questions(false) {
        let api = api();
        api.reply(CALL);
        let answer = api.post(path, "chat", &body).await;
        assert_eq!(answer.status, StatusCode::OK, "{path}: {}", answer.body);
        let sealed = api.recorder.sealed.lock().unwrap().pop().unwrap();
        assert_eq!(sealed.answer.tool_calls[0].arguments, "{\"a\": 1}");
        assert_eq!(sealed.answer.content, "");
        for wrong in [
            "Let me think.",
            "<tool_call>\n{\"name\": \"sub\"",
            "{\"a\": 1}",
        ] {
            api.reply(wrong);
            let answer = api.post(path, "chat", &body).await;
            assert!(answer.status.is_server_error(), "{path}: {wrong}");
        }
    }
}

#[tokio::test]
async fn a_schema_leaves_room_for_calls_and_one_call_is_one() {
    let api = api();
    let parameters = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let tools =
        json!([{"type": "function", "function": {"name": "add", "parameters": parameters}}]);
    let mut body = ask(json!({"tools": tools, "response_format": {"type": "json_object"}}));
    for reply in [CALL, "{\"free\": [1, null]}"] {
        api.reply(reply);
        let answer = api.chat(body.clone()).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    }
    body["tool_choice"] = json!("required");
    api.reply(&format!("{CALL}\n{CALL}"));
    let two = api.chat(body.clone()).await.json();
    let calls = &two["choices"][0]["message"]["tool_calls"];
    assert_eq!(calls.as_array().unwrap().len(), 2);
    body["parallel_tool_calls"] = json!(false);
    api.reply(&format!("{CALL}\n"));
    assert_eq!(api.chat(body).await.status, StatusCode::OK);
    for (field, value, right, wrong) in [
        ("guided_choice", json!(["yes", "no"]), "no", "maybe"),
        ("guided_regex", json!("\\d{3}"), "123", "12x"),
        ("guided_json", json!({"type": "boolean"}), "true", "1"),
    ] {
        api.reply(right);
        let answer = api.chat(ask(json!({ field: value }))).await;
        assert_eq!(answer.status, StatusCode::OK, "{field}: {}", answer.body);
        api.reply(wrong);
        let answer = api.chat(ask(json!({ field: value }))).await;
        assert!(answer.status.is_server_error(), "{field}");
    }
}
