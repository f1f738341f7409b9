//! What is known to go wrong at the edge of such servers, on each API: odd histories, odd text, odd JSON. The same conversation is the
//! same prompt whichever API it comes by, and a client's mistake is never the server's.

use super::*;
use proptest::prelude::*;

/// Everything a conversation can hold has a place in it.
const RICH: &str = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
const CHAT_PATH: &str = "/v1/chat/completions";
const MESSAGES_PATH: &str = "/v1/messages";
const RESPONSES_PATH: &str = "/v1/responses";

fn rich() -> Api {
    api_with(|app| app.chat = chat_with(RICH))
}

/// The prompt of a request that must be fine.
async fn prompt(path: &str, body: &Value) -> Vec<TokenId> {
    let api = rich();
    let answer = api.post(path, "chat", body).await;
    assert_eq!(answer.status, StatusCode::OK, "{body}: {}", answer.body);
    api.engine.requests()[0].prompt.clone()
}

async fn prompt_text(path: &str, body: &Value) -> String {
    CHAT.decode(&prompt(path, body).await)
}

fn chat(messages: Value) -> Value {
    json!({"model": "org/base", "messages": messages})
}

fn called(content: Option<Value>) -> Value {
    let call = json!({"id": "c1", "type": "function", "function": {"name": "w", "arguments": "{\"c\": \"X\"}"}});
    let mut message = json!({"role": "assistant", "tool_calls": [call]});
    if let Some(content) = content {
        message["content"] = content;
    }
    message
}

#[tokio::test]
async fn no_content_is_no_content_however_it_is_spelt() {
    let question = json!({"role": "user", "content": "weather?"});
    let result = json!({"role": "tool", "tool_call_id": "c1", "content": "sunny"});
    let mut seen = Vec::new();
    for content in [None, Some(Value::Null), Some(json!("")), Some(json!([]))] {
        let body = chat(json!([question, called(content), result]));
        let text = prompt_text(CHAT_PATH, &body).await;
        assert!(text.contains("\"c\": \"X\"") && text.contains("sunny"));
        assert!(!text.contains("None") && !text.contains("null"), "{text}");
        seen.push(text);
    }
    assert!(seen.iter().all(|text| *text == seen[0]));
    for content in [json!(null), json!("")] {
        let plain = json!({"role": "assistant", "content": content});
        let text = prompt_text(CHAT_PATH, &chat(json!([question, plain, question]))).await;
        assert!(!text.contains("None"), "{text}");
    }
}

/// One conversation as each API spells it.
#[tokio::test]
async fn the_same_conversation_is_the_same_prompt_on_every_api() {
    let parameters = json!({"type": "object", "properties": {"zeta": {"type": "string"}, "alpha": {"é": ["<&>'"]}}});
    let billing = "x-anthropic-billing-header: cc_version=1; cch=";
    let tools = json!([{"type": "function", "function": {"name": "w", "description": "d", "parameters": parameters}}]);
    let mut bodies = Vec::new();
    let mut asked = chat(json!([
        {"role": "system", "content": format!("{billing}a;\nBe brief.")},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        called(None),
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "developer", "content": "Briefer."},
        {"role": "user", "content": "and?"},
    ]));
    asked["tools"] = tools;
    bodies.push((CHAT_PATH, asked));
    bodies.push((MESSAGES_PATH, json!({
        "model": "org/base", "max_tokens": 9,
        "system": [{"type": "text", "text": format!("{billing}b;")}, {"type": "text", "text": "Be brief."}],
        "tools": [{"name": "w", "description": "d", "input_schema": parameters}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "w", "input": {"c": "X"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "sunny"}]}]},
            {"role": "system", "content": "Briefer."},
            {"role": "user", "content": "and?"},
        ]})));
    bodies.push((RESPONSES_PATH, json!({
        "model": "org/base", "instructions": format!("{billing}c;\nBe brief."),
        "tools": [{"type": "function", "name": "w", "description": "d", "parameters": parameters}],
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]},
            {"type": "function_call", "call_id": "c1", "name": "w", "arguments": "{\"c\": \"X\"}"},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
            {"type": "message", "role": "developer", "content": "Briefer."},
            {"role": "user", "content": "and?"},
        ]})));
    let mut prompts = Vec::new();
    for (path, body) in &bodies {
        prompts.push(prompt_text(path, body).await);
    }
    assert_eq!(prompts[0], prompts[1]);
    assert_eq!(prompts[0], prompts[2]);
    assert!(prompts[0].contains(r#""zeta": {"type": "string"}, "alpha": {"é": ["<&>'"]}"#));
    assert!(!prompts[0].contains("billing"));
}

#[tokio::test]
async fn broken_histories_are_answered_or_refused_and_never_break_the_server() {
    let user = json!({"role": "user", "content": "x"});
    let result = |id: Value| json!({"role": "tool", "tool_call_id": id, "content": "r"});
    let api = rich();
    for messages in [
        json!([]),
        json!([{"role": "system", "content": "s"}]),
        json!([{"role": "assistant", "content": "a"}]),
        json!([result(json!("c1")), user]),
        json!([{"role": "tool", "content": "r"}, user]),
        json!([user, called(None), result(json!("other")), user]),
        json!([user, called(None), result(json!("c1")), result(json!("c1"))]),
        json!([user, called(None), user]),
        json!([user, null]),
        json!("x"),
    ] {
        let answer = api.chat(chat(messages.clone())).await;
        let fine = matches!(answer.status.as_u16(), 200 | 400);
        assert!(fine, "{messages}: {}", answer.body);
        if answer.status == StatusCode::BAD_REQUEST {
            let param = answer.json()["error"]["param"].clone();
            assert!(param.as_str().is_some_and(|p| p.starts_with("messages")));
        }
    }
    // A cut-off call comes back as it was written: refusing it would stop the agent for good.
    let broken =
        json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{\"a\": "});
    let body = json!({"model": "org/base", "input": [{"role": "user", "content": "x"}, broken,
        {"type": "function_call_output", "call_id": "c", "output": "no"}]});
    assert!(
        prompt_text(RESPONSES_PATH, &body)
            .await
            .contains("{\\\"a\\\": ")
    );
    let prefill = json!({"model": "org/base", "max_tokens": 5, "messages": [user, {"role": "assistant", "content": "pre"}]});
    let answer = api.post(MESSAGES_PATH, "chat", &prefill).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
    assert!(answer.body.contains("messages[1].role"), "{}", answer.body);
    assert_eq!(api.chat(ask(json!({}))).await.status, StatusCode::OK);
}

#[tokio::test]
async fn half_a_utf16_pair_is_refused_in_each_apis_shape() {
    let api = rich();
    let bodies = [
        (
            CHAT_PATH,
            r#"{"model":"m","messages":[{"role":"user","content":"cut \ud83d here"}]}"#,
        ),
        (
            CHAT_PATH,
            r#"{"model":"m","messages":[{"role":"tool","tool_call_id":"c","content":"\udc00"}]}"#,
        ),
        (
            CHAT_PATH,
            r#"{"model":"m","session_id":"\ud83d","messages":[{"role":"user","content":"x"}]}"#,
        ),
        (
            MESSAGES_PATH,
            r#"{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"cut \ud83d here"}]}"#,
        ),
        (RESPONSES_PATH, r#"{"model":"m","input":"cut \ud83d here"}"#),
    ];
    for (path, body) in bodies {
        let sent = request("POST", path)
            .header("x-api-key", "chat")
            .header("content-type", "application/json");
        let answer = api.send(sent.body(Body::from(body)).unwrap()).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{path}");
        let json = answer.json();
        assert_eq!(json["type"] == "error", path == MESSAGES_PATH);
        let message = json["error"]["message"].as_str().unwrap();
        assert!(
            message.contains("UTF-16") && message.contains("column"),
            "{message}"
        );
    }
    assert!(api.recorder.admitted.lock().unwrap().is_empty());
}

/// No place cuts text by bytes: every offset of a wide character, in every field.
#[tokio::test]
async fn wide_characters_may_stand_anywhere() {
    let api = api_with(|app| {
        app.chat = chat_with(RICH);
    });
    for pad in 0..3 {
        let wide = "a".repeat(pad) + &"界".repeat(300);
        for (field, value) in [
            ("session_id", json!(wide)),
            ("model", json!(wide)),
            ("user", json!(wide)),
            ("stop", json!(wide)),
            (
                "tools",
                json!([{"type": "function", "function": {"name": wide, "description": wide}}]),
            ),
            ("tool_choice", json!(wide)),
            ("messages", json!([{"role": "user", "content": wide}])),
            ("messages", json!([{"role": wide, "content": "x"}])),
            ("response_format", json!({"type": wide})),
            ("guided_regex", json!(format!("({wide}"))),
            (wide.as_str(), json!(wide)),
        ] {
            let answer = api.chat(ask(json!({ field: value }))).await;
            let fine = matches!(answer.status.as_u16(), 200 | 400 | 404);
            assert!(fine, "{field}: {}", answer.body);
        }
        let key = api.post(CHAT_PATH, &wide, &ask(json!({}))).await;
        assert!(matches!(key.status.as_u16(), 200 | 401 | 403));
    }
}

#[tokio::test]
async fn fields_that_would_change_a_response_are_refused() {
    let api = rich();
    for (field, value) in [
        ("conversation", json!("conv_1")),
        ("prompt", json!({"id": "p"})),
        ("background", json!(true)),
    ] {
        let body = json!({"model": "org/base", "input": "x", field: value});
        let answer = api.post(RESPONSES_PATH, "chat", &body).await;
        assert_eq!(answer.json()["error"]["param"], field, "{}", answer.body);
    }
    // What is not to be kept for later is not given later.
    let body = json!({"model": "org/base", "input": "x", "store": false});
    let id = api.post(RESPONSES_PATH, "chat", &body).await.json()["id"].clone();
    let path = format!("/v1/responses/{}", id.as_str().unwrap());
    assert_eq!(
        api.get(&path, "feedback").await.status,
        StatusCode::NOT_FOUND
    );
    let long = json!({"model": "org/base", "input": "x".repeat(CONTEXT)});
    let answer = api.post(RESPONSES_PATH, "chat", &long).await;
    assert_eq!(answer.json()["error"]["code"], "context_length_exceeded");
    assert_eq!(answer.json()["error"]["param"], "input");
}

#[tokio::test]
async fn tool_choices_mean_the_same_with_and_without_tools() {
    for tools in [json!(null), json!([]), json!([add_tool()])] {
        let some = tools.as_array().is_some_and(|t| !t.is_empty());
        for (choice, status) in [
            (json!(null), 200),
            (json!("auto"), 200),
            (json!("none"), 200),
            (json!("required"), if some { 200 } else { 400 }),
            (
                json!({"type": "function", "function": {"name": "add"}}),
                if some { 200 } else { 400 },
            ),
            (
                json!({"type": "function", "function": {"name": "sub"}}),
                400,
            ),
            (json!({"type": "function"}), 400),
            (json!(5), 400),
        ] {
            let api = rich();
            if status == 200 && some && !choice.is_null() && choice != "auto" && choice != "none" {
                api.reply("<tool_call>\n{\"name\": \"add\", \"arguments\": {}}\n</tool_call>");
            }
            let answer = api
                .chat(ask(json!({"tools": tools, "tool_choice": choice})))
                .await;
            assert_eq!(
                answer.status.as_u16(),
                status,
                "{tools} {choice}: {}",
                answer.body
            );
        }
    }
}

/// A request with one value replaced or taken away, wherever it stands.
fn mutated(base: Value) -> impl Strategy<Value = Value> {
    let odd = prop_oneof![
        Just(Value::Null),
        Just(json!(true)),
        Just(json!(-1)),
        Just(json!(0.5)),
        Just(json!(1e300)),
        Just(json!(u64::MAX)),
        Just(json!("")),
        Just(json!("界\u{0}\u{fffd}<|im_end|>")),
        Just(json!([])),
        Just(json!([[], {}, null, "x", 1])),
        Just(json!({})),
        Just(json!({"type": "text", "text": 5})),
        Just(json!({"type": "tool_use", "input": []})),
        Just(json!("x".repeat(3000))),
    ];
    (prop::collection::vec((any::<u16>(), odd, 0u8..4), 1..3)).prop_map(move |edits| {
        let mut body = base.clone();
        for (pick, odd, how) in edits {
            let mut paths = Vec::new();
            places(&body, &mut Vec::new(), &mut paths);
            let path = &paths[usize::from(pick) % paths.len()];
            if let Some(at) = body.pointer_mut(path) {
                match how {
                    0 => *at = json!([at.clone(), odd]),
                    1 => *at = json!({"type": at.clone(), "content": odd}),
                    _ => *at = odd,
                }
            }
        }
        body
    })
}

fn places(value: &Value, path: &mut Vec<String>, out: &mut Vec<String>) {
    out.push(path.iter().map(|p| format!("/{p}")).collect());
    let inner: Vec<(String, &Value)> = match value {
        Value::Array(list) => list
            .iter()
            .enumerate()
            .map(|(i, v)| (i.to_string(), v))
            .collect(),
        Value::Object(map) => map.iter().map(|(k, v)| (k.replace('/', "~1"), v)).collect(),
        _ => Vec::new(),
    };
    for (key, value) in inner {
        path.push(key);
        places(value, path, out);
        path.pop();
    }
}

fn full_requests() -> [(&'static str, Value); 5] {
    let parameters = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let tool = json!({"type": "function", "function": {"name": "add", "description": "d", "parameters": parameters}});
    [
        (
            CHAT_PATH,
            json!({
            "model": "org/base", "stream": false, "stream_options": {"include_usage": true}, "n": 1, "max_tokens": 3, "temperature": 1.0,
            "top_p": 1.0, "top_k": 0, "min_p": 0.0, "stop": ["S"], "seed": 1, "logprobs": true, "top_logprobs": 1, "logit_bias": {"5": 1},
            "tools": [tool], "tool_choice": "auto", "parallel_tool_calls": true, "response_format": {"type": "text"},
            "chat_template_kwargs": {"a": 1}, "metadata": {"session_id": "s"}, "user": "u",
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}, called(None),
                {"role": "tool", "tool_call_id": "c1", "content": "r"}]}),
        ),
        (
            MESSAGES_PATH,
            json!({
            "model": "org/base", "max_tokens": 3, "system": [{"type": "text", "text": "s"}], "stream": false, "temperature": 1.0,
            "stop_sequences": ["S"], "metadata": {"user_id": "{\"session_id\": \"s\"}"}, "thinking": {"type": "adaptive"},
            "tools": [{"name": "add", "description": "d", "input_schema": parameters}], "tool_choice": {"type": "auto"},
            "output_config": {"effort": "low", "format": null},
            "messages": [{"role": "user", "content": "x"},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": ""}, {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "r", "is_error": false}]}]}),
        ),
        (
            "/v1/messages/count_tokens",
            json!({"model": "org/base", "messages": [{"role": "user", "content": "x"}], "tools": []}),
        ),
        (
            RESPONSES_PATH,
            json!({
            "model": "org/base", "instructions": "s", "max_output_tokens": 3, "stream": false, "store": true, "metadata": {}, "include": [],
            "tools": [{"type": "function", "name": "add", "parameters": parameters},
                {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}],
            "tool_choice": "auto", "text": {"format": {"type": "text"}}, "previous_response_id": null,
            "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]},
                {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "r"}]}),
        ),
        (
            "/v1/completions",
            json!({"model": "org/base", "prompt": ["a", "b"], "echo": true, "logprobs": 1, "max_tokens": 2, "n": 1}),
        ),
    ]
}

fn any_request() -> impl Strategy<Value = (&'static str, Value)> {
    (0usize..5).prop_flat_map(|which| {
        let (path, base) = full_requests()[which].clone();
        mutated(base).prop_map(move |body| (path, body))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]
    /// Whatever a client sends, it is answered or told what is wrong with it, in its API's shape; and only what was answered is kept.
    #[test]
    fn any_body_is_answered_or_refused((path, body) in any_request()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let api = rich();
            let answer = api.post(path, "chat", &body).await;
            let status = answer.status.as_u16();
            // A scripted engine says what a forced form forbids.
            let forced = body["tool_choice"] != "auto" || body["response_format"]["type"] != "text";
            assert!(status < 500 || (status == 503 && forced), "{path} {body}: {}", answer.body);
            if status >= 400 {
                let error = answer.json();
                assert!(error["error"]["message"].is_string(), "{}", answer.body);
                assert_eq!(error["type"] == "error", path.contains("messages"), "{path}");
            }
            if (400..500).contains(&status) {
                assert!(api.recorder.sealed.lock().unwrap().is_empty(), "{path} {body}");
            }
            let sound = api.chat(ask(json!({"max_tokens": 1}))).await;
            assert_eq!(sound.status, StatusCode::OK);
        });
    }
}

#[tokio::test]
async fn results_follow_their_calls_in_order_and_failures_are_seen() {
    let call =
        |id: &str, name: &str| json!({"type": "tool_use", "id": id, "name": name, "input": {}});
    let result = |id: &str, text: &str, failed: bool| json!({"type": "tool_result", "tool_use_id": id, "content": text, "is_error": failed});
    let body = json!({"model": "org/base", "max_tokens": 5, "messages": [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [call("t1", "f"), call("t2", "g")]},
        {"role": "user", "content": [{"type": "text", "text": "a reminder"}, result("t2", "of g", true),
            result("t1", "of f", false), {"type": "text", "text": "and B?"}]},
    ]});
    let text = prompt_text(MESSAGES_PATH, &body).await;
    let at = |what: &str| {
        text.find(what)
            .unwrap_or_else(|| panic!("{what} in {text}"))
    };
    assert!(at("of f") < at("Error: of g"));
    assert!(at("Error: of g") < at("a reminder\nand B?"));
    let body = chat(json!([
        {"role": "user", "content": "go"},
        {"role": "assistant", "tool_calls": [
            {"id": "t1", "function": {"name": "f", "arguments": "{}"}}, {"id": "t2", "function": {"name": "g", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "t2", "content": "of g"},
        {"role": "tool", "tool_call_id": "t1", "content": "of f"},
    ]));
    let text = prompt_text(CHAT_PATH, &body).await;
    assert!(text.find("of f") < text.find("of g"));
}

/// What a stream of each API says in all: text, thoughts, calls, the reason and the tokens.
fn streamed(path: &str, body: &str) -> Value {
    let (mut text, mut thought, mut end) = (String::new(), String::new(), Value::Null);
    let mut calls: Vec<(String, String)> = Vec::new();
    let mut add = |into: &str, piece: &Value| match into {
        "text" => text += piece.as_str().unwrap_or_default(),
        _ => thought += piece.as_str().unwrap_or_default(),
    };
    if path == CHAT_PATH {
        for frame in frames(body) {
            let delta = &frame["choices"][0]["delta"];
            add("text", &delta["content"]);
            add("thought", &delta["reasoning_content"]);
            for call in delta["tool_calls"].as_array().into_iter().flatten() {
                let at = call["index"].as_u64().unwrap() as usize;
                calls.resize(calls.len().max(at + 1), Default::default());
                calls[at].0 += call["function"]["name"].as_str().unwrap_or_default();
                calls[at].1 += call["function"]["arguments"].as_str().unwrap_or_default();
            }
            if !frame["choices"][0]["finish_reason"].is_null() {
                end = frame["choices"][0]["finish_reason"].clone();
            }
        }
    } else {
        for event in named_events(body) {
            match event["type"].as_str().unwrap() {
                "content_block_start" if event["content_block"]["type"] == "tool_use" => {
                    let name = event["content_block"]["name"].as_str().unwrap();
                    calls.push((name.to_owned(), String::new()));
                }
                "content_block_delta" => {
                    let delta = &event["delta"];
                    add("text", &delta["text"]);
                    add("thought", &delta["thinking"]);
                    if let Some(piece) = delta["partial_json"].as_str() {
                        calls.last_mut().unwrap().1 += piece;
                    }
                }
                "message_delta" => end = event["delta"]["stop_reason"].clone(),
                "response.output_text.delta" => add("text", &event["delta"]),
                "response.reasoning_text.delta" => add("thought", &event["delta"]),
                "response.output_item.done" if event["item"]["type"] == "function_call" => {
                    let of = |name: &str| event["item"][name].as_str().unwrap().to_owned();
                    calls.push((of("name"), of("arguments")));
                }
                "response.completed" | "response.incomplete" => {
                    end = event["response"]["status"].clone()
                }
                _ => {}
            }
        }
    }
    json!([text, thought, calls, end])
}

/// The same of a whole answer.
fn whole(path: &str, body: &Value) -> Value {
    let (mut text, mut thought) = (String::new(), String::new());
    let mut calls: Vec<(String, String)> = Vec::new();
    let of = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    match path {
        CHAT_PATH => {
            let message = &body["choices"][0]["message"];
            text += &of(&message["content"]);
            thought += &of(&message["reasoning_content"]);
            for call in message["tool_calls"].as_array().into_iter().flatten() {
                calls.push((
                    of(&call["function"]["name"]),
                    of(&call["function"]["arguments"]),
                ));
            }
            json!([text, thought, calls, body["choices"][0]["finish_reason"]])
        }
        MESSAGES_PATH => {
            for block in body["content"].as_array().unwrap() {
                text += &of(&block["text"]);
                thought += &of(&block["thinking"]);
                if block["type"] == "tool_use" {
                    calls.push((of(&block["name"]), block["input"].to_string()));
                }
            }
            json!([text, thought, calls, body["stop_reason"]])
        }
        _ => {
            for item in body["output"].as_array().unwrap() {
                match item["type"].as_str().unwrap() {
                    "message" => text += &of(&item["content"][0]["text"]),
                    "reasoning" => thought += &of(&item["content"][0]["text"]),
                    _ => calls.push((of(&item["name"]), of(&item["arguments"]))),
                }
            }
            json!([text, thought, calls, body["status"]])
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    /// A stream of any API says what the whole answer says, whatever the model writes.
    #[test]
    fn a_stream_says_what_the_whole_answer_says(
        said in "(<think>\n?)?([a-c界🦀 \n]{1,4}|</think>\n{0,2}|<tool_call>|</tool_call>|\\{\"name\": \"add\", \"arguments\": \\{\"a\": 1\\}\\}|<function=add>|\"|<t){0,10}",
        most in 1usize..60, tools in any::<bool>(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let parameters = json!({"type": "object"});
            for (path, mut body) in [
                (CHAT_PATH, json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": most,
                    "tools": [{"type": "function", "function": {"name": "add", "parameters": parameters}}]})),
                (MESSAGES_PATH, json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": most,
                    "tools": [{"name": "add", "input_schema": parameters}]})),
                (RESPONSES_PATH, json!({"input": "x", "max_output_tokens": most,
                    "tools": [{"type": "function", "name": "add", "parameters": parameters}]})),
            ] {
                if !tools {
                    body["tools"] = json!([]);
                }
                let api = rich();
                api.reply(&said);
                let answer = api.post(path, "chat", &body).await;
                assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
                body["stream"] = json!(true);
                api.reply(&said);
                let stream = api.post(path, "chat", &body).await;
                let (streamed, whole) = (streamed(path, &stream.body), whole(path, &answer.json()));
                assert_eq!(streamed, whole, "{path} {said:?}\n{}", stream.body);
            }
        });
    }
}
