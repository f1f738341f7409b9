//! A test for each refusal: the status, and the field that is named.

use super::*;

async fn refused(more: Value) -> (u16, Value) {
    let api = api();
    let answer = api.chat(ask(more)).await;
    let error = answer.json()["error"].clone();
    assert!(api.engine.requests().is_empty());
    (answer.status.as_u16(), error)
}

#[tokio::test]
async fn wrong_fields_are_named() {
    let image = json!([{"type": "image_url", "image_url": {"url": "x"}}]);
    let message = |m: Value| json!({"messages": [m]});
    let stops: Vec<String> = (0..17).map(|i| i.to_string()).collect();
    let cases = [
        (json!({"messages": null}), "messages"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": "hi"}), "messages"),
        (json!({"messages": ["hi"]}), "messages[0]"),
        (message(json!({"content": "x"})), "messages[0].role"),
        (
            message(json!({"role": "wizard", "content": "x"})),
            "messages[0].role",
        ),
        (message(json!({"role": "user"})), "messages[0].content"),
        (
            message(json!({"role": "user", "content": 5})),
            "messages[0].content",
        ),
        (
            message(json!({"role": "user", "content": image})),
            "messages[0].content[0].type",
        ),
        (
            message(json!({"role": "user", "content": [{"type": "text"}]})),
            "messages[0].content[0].text",
        ),
        (
            message(json!({"role": "user", "content": "x", "name": 1})),
            "messages[0].name",
        ),
        (
            message(json!({"role": "assistant", "function_call": {"name": "f"}})),
            "messages[0].function_call",
        ),
        (
            message(json!({"role": "assistant", "tool_calls": [{"function": {}}]})),
            "messages[0].tool_calls[0].function.name",
        ),
        (json!({"model": 5}), "model"),
        (json!({"temperature": -0.1}), "temperature"),
        (json!({"temperature": 2.1}), "temperature"),
        (json!({"temperature": "0"}), "temperature"),
        (json!({"top_p": 1.5}), "top_p"),
        (json!({"top_k": -2}), "top_k"),
        (json!({"min_p": 2}), "min_p"),
        (json!({"frequency_penalty": 3}), "frequency_penalty"),
        (json!({"n": 0}), "n"),
        (json!({"n": 9}), "n"),
        (json!({"n": 1.5}), "n"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (
            json!({"max_completion_tokens": -1}),
            "max_completion_tokens",
        ),
        (json!({"max_tokens": "5"}), "max_tokens"),
        (json!({"stop": stops}), "stop"),
        (json!({"stop": ""}), "stop"),
        (json!({"stop": [1]}), "stop"),
        (json!({"seed": 1.5}), "seed"),
        (json!({"stream": "yes"}), "stream"),
        (
            json!({"stream_options": {"include_usage": 1}}),
            "stream_options.include_usage",
        ),
        (json!({"logprobs": 1}), "logprobs"),
        (json!({"top_logprobs": 3}), "top_logprobs"),
        (
            json!({"logprobs": true, "top_logprobs": 21}),
            "top_logprobs",
        ),
        (
            json!({"logprobs": true, "top_logprobs": -1}),
            "top_logprobs",
        ),
        (json!({"logit_bias": {"99999999": 5}}), "logit_bias"),
        (json!({"logit_bias": {"258": 5}}), "logit_bias"),
        (json!({"logit_bias": {"-1": 5}}), "logit_bias"),
        (json!({"logit_bias": {"abc": 5}}), "logit_bias"),
        (json!({"logit_bias": {"5": 101}}), "logit_bias"),
        (json!({"chat_template_kwargs": []}), "chat_template_kwargs"),
        (json!({"tools": {}}), "tools"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (
            json!({"tools": [add_tool(), add_tool()]}),
            "tools[1].function.name",
        ),
        (
            json!({"response_format": {"type": "yaml"}}),
            "response_format.type",
        ),
        (
            json!({"response_format": {"type": "json_schema"}}),
            "response_format.json_schema.schema",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}}),
            "response_format",
        ),
        (json!({"guided_regex": "("}), "guided_regex"),
        (json!({"guided_choice": []}), "guided_choice"),
        (json!({"guided_json": "{"}), "guided_json"),
        (
            json!({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}]}),
            "tools[0]",
        ),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"tool_choice": "sometimes"}), "tool_choice"),
        (
            json!({"tools": [add_tool()], "tool_choice": {"type": "function", "function": {"name": "sub"}}}),
            "tool_choice",
        ),
        (json!({"metadata": 3}), "metadata"),
    ];
    for (more, field) in cases {
        let (status, error) = refused(more.clone()).await;
        assert_eq!(status, 400, "{more}");
        assert_eq!(error["param"], field, "{more}: {error}");
        assert_eq!(error["type"], "invalid_request_error");
        assert!(
            error["message"].as_str().unwrap().starts_with(field),
            "{error}"
        );
    }
}

#[tokio::test]
async fn what_would_change_the_reply_is_refused() {
    let cases = [
        ("modalities", json!(["text", "audio"])),
        ("audio", json!({"voice": "x"})),
        ("functions", json!([{"name": "f"}])),
        ("function_call", json!({"name": "f"})),
        ("web_search_options", json!({})),
        ("repetition_penalty", json!(1.5)),
        ("min_tokens", json!(5)),
        ("ignore_eos", json!(true)),
        ("stop_token_ids", json!([1])),
        ("guided_grammar", json!("start: \"a\"")),
        ("best_of", json!(3)),
        ("continue_final_message", json!(true)),
        ("chat_template", json!("x")),
    ];
    for (field, value) in cases {
        let (status, error) = refused(json!({ field: value })).await;
        assert_eq!((status, &error["param"]), (400, &json!(field)));
    }
}

#[tokio::test]
async fn harmless_values_of_refused_fields_are_fine() {
    let api = api();
    let answer = api
        .chat(ask(json!({
            "response_format": {"type": "text"}, "modalities": ["text"], "functions": [],
            "function_call": "none", "repetition_penalty": 1.0, "min_tokens": 0, "ignore_eos": false,
            "stop_token_ids": [], "best_of": 1, "audio": null, "guided_json": null, "tools": [],
            "tool_choice": "auto", "top_logprobs": 0, "temperature": null, "seed": -3, "top_p": 0,
            "min_p": 1, "top_k": -1, "unknown": null,
        })))
        .await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    assert_eq!(answer.header("x-chela-ignored"), "");
    let sampling = api.recorder.last_request().sampling;
    assert_eq!(sampling.seed, Some((-3i64) as u64));
    assert_eq!((sampling.min_p, sampling.top_k), (None, Some(1)));
}

#[tokio::test]
async fn tools_need_a_template_that_knows_them() {
    let api = api_with(|app| app.chat = chat_with(NO_TOOLS));
    let answer = api.chat(ask(json!({"tools": [add_tool()]}))).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
    assert_eq!(answer.json()["error"]["param"], "tools");
}

#[tokio::test]
async fn a_prompt_that_does_not_fit() {
    let api = api();
    let answer = api
        .chat(ask(
            json!({"messages": [{"role": "user", "content": "x".repeat(CONTEXT)}]}),
        ))
        .await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
    let error = answer.json()["error"].clone();
    assert_eq!(error["code"], "context_length_exceeded");
    let message = error["message"].as_str().unwrap();
    assert!(
        message.contains(&CONTEXT.to_string()) && message.contains("41"),
        "{message}"
    );
}

async fn raw(api: &Api, content_type: Option<&str>, body: impl Into<Body>) -> Answer {
    let mut request = request("POST", "/v1/chat/completions");
    if let Some(kind) = content_type {
        request = request.header(header::CONTENT_TYPE, kind);
    }
    api.send(request.body(body.into()).unwrap()).await
}

#[tokio::test]
async fn bodies_that_are_no_json() {
    let api = api();
    let json = Some("application/json");
    for (body, part) in [
        ("{\"messages\": [", "line 1 column 14"),
        ("{\"temperature\": NaN}", "column 17"),
        ("[]", "object"),
        ("", "JSON"),
        (
            r#"{"messages":[{"role":"user","content":"cut \ud83d here"}]}"#,
            "UTF-16",
        ),
        (r#"{"session_id":"\ude00"}"#, "UTF-16"),
    ] {
        let answer = raw(&api, json, body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{body}");
        let message = answer.json()["error"]["message"]
            .as_str()
            .unwrap()
            .to_owned();
        assert!(message.contains(part), "{body}: {message}");
    }
    assert_eq!(
        raw(&api, json, b"{\"a\": \"\xff\"}".to_vec()).await.status,
        StatusCode::BAD_REQUEST
    );
    for kind in [
        None,
        Some("text/plain"),
        Some("application/x-www-form-urlencoded"),
        Some("application/jsonx"),
    ] {
        let answer = raw(&api, kind, ask(json!({})).to_string()).await;
        assert_eq!(
            answer.status,
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "{kind:?}"
        );
        assert!(answer.json()["error"]["message"].is_string());
    }
    let charset = raw(
        &api,
        Some("Application/JSON; charset=utf-8"),
        ask(json!({})).to_string(),
    );
    assert_eq!(charset.await.status, StatusCode::OK);
}

#[tokio::test]
async fn bodies_that_are_too_large() {
    let api = api_with(|app| app.config.body_limit = 100);
    let body = format!("{{\"x\": \"{}\"}}", "y".repeat(200));
    let json = Some("application/json");
    assert_eq!(
        raw(&api, json, body.clone()).await.status,
        StatusCode::PAYLOAD_TOO_LARGE
    );
    // Also when its length was not announced.
    let pieces = futures_util::stream::iter([Ok::<_, std::io::Error>(body)]);
    let answer = raw(&api, json, Body::from_stream(pieces)).await;
    assert_eq!(answer.status, StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(answer.json()["error"]["type"], "request_too_large");
}

#[tokio::test]
async fn models_that_do_not_exist() {
    let api = api_with(|app| app.config.strict_models = true);
    let answer = api.chat(ask(json!({"model": "gpt-9"}))).await;
    assert_eq!(answer.status, StatusCode::NOT_FOUND);
    assert_eq!(answer.json()["error"]["code"], "model_not_found");
    for model in ["org/base", "org/base:side", "org/base@0"] {
        assert_eq!(
            api.chat(ask(json!({"model": model}))).await.status,
            StatusCode::OK
        );
    }
    let tolerant = super::api();
    assert_eq!(
        tolerant.chat(ask(json!({"model": "gpt-9"}))).await.status,
        StatusCode::OK
    );
}

#[tokio::test]
async fn every_refusal_has_its_status() {
    let api = api();
    let text = || "why".to_owned();
    let cases = [
        (
            Refusal::Invalid {
                field: "f".to_owned(),
                message: text(),
            },
            400,
        ),
        (Refusal::Unauthenticated(text()), 401),
        (Refusal::Forbidden(text()), 403),
        (Refusal::NotFound(text()), 404),
        (Refusal::Gone(text()), 410),
        (Refusal::Conflict(text()), 409),
        (
            Refusal::ContextLength {
                prompt: 2,
                context: 1,
            },
            400,
        ),
        (
            Refusal::Unavailable {
                message: text(),
                retry_after: 4,
            },
            503,
        ),
        (Refusal::Internal(text()), 500),
    ];
    for (refusal, status) in cases {
        *api.recorder.refuse_admit.lock().unwrap() = Some(refusal.clone());
        let answer = api.chat(ask(json!({}))).await;
        assert_eq!(answer.status.as_u16(), status, "{refusal:?}");
        let error = answer.json()["error"].clone();
        assert!(error["message"].is_string() && error["type"].is_string());
        if status == 503 {
            assert_eq!(answer.header("retry-after"), "4");
            assert_eq!(error["message"], "why (retry-after: 4)");
        }
    }
}
