//! Text completions.

use super::*;

async fn complete(api: &Api, body: Value) -> Answer {
    api.post("/v1/completions", "chat", &body).await
}

#[tokio::test]
async fn a_text_is_completed_and_forgotten() {
    let api = api();
    api.reply("<think>x</think> END more");
    let answer = complete(
        &api,
        json!({"prompt": "ab", "stop": " END", "max_tokens": 50, "odd": 1}),
    )
    .await;
    let body = answer.json();
    assert_eq!(body["object"], "text_completion");
    assert_eq!(
        body["choices"],
        json!([{"index": 0, "text": "<think>x</think>", "logprobs": null, "finish_reason": "stop"}])
    );
    assert_eq!(body["usage"]["prompt_tokens"], 2);
    assert_eq!(answer.header("x-chela-ignored"), "odd");
    assert!(api.recorder.admitted.lock().unwrap().is_empty());
    assert!(api.recorder.sealed.lock().unwrap().is_empty());
    assert_eq!(api.engine.requests()[0].prompt, ids("ab"));
}

#[tokio::test]
async fn echo_gives_the_logprobs_of_a_text() {
    let api = api();
    let tokens = ids("abc");
    for prompt in [json!("abc"), json!(tokens), json!([tokens])] {
        let asked = json!({"prompt": prompt, "echo": true, "logprobs": 2, "max_tokens": 0});
        let body = complete(&api, asked).await.json();
        let choice = &body["choices"][0];
        assert_eq!(
            (&choice["text"], &choice["finish_reason"]),
            (&json!("abc"), &json!("length"))
        );
        let columns = &choice["logprobs"];
        assert_eq!(columns["tokens"], json!(["a", "b", "c"]));
        assert_eq!(columns["text_offset"], json!([0, 1, 2]));
        let model = FakeModel::base(VOCABULARY);
        let numbers = columns["token_logprobs"].as_array().unwrap();
        assert!(numbers[0].is_null() && columns["top_logprobs"][0].is_null());
        for at in 1..3 {
            let expected = model.logprob(&tokens[..at], tokens[at], 1.0);
            assert_eq!(numbers[at].as_f64().unwrap() as f32, expected);
            assert!(columns["top_logprobs"][at].is_object());
        }
        assert_eq!(body["usage"]["completion_tokens"], 0);
    }
    assert!(api.engine.requests().is_empty());
}

#[tokio::test]
async fn several_prompts_and_choices() {
    let api = api();
    ["1", "2", "3", "4"].iter().for_each(|text| api.reply(text));
    let asked = json!({"prompt": ["a", "b"], "n": 2, "echo": true, "logprobs": 0, "seed": 5});
    let body = complete(&api, asked).await.json();
    let texts: Vec<&str> = body["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["text"].as_str().unwrap())
        .collect();
    assert_eq!(texts, ["a1", "a2", "b3", "b4"]);
    assert_eq!(
        body["choices"][2]["logprobs"]["tokens"],
        json!(["b", "3", ""])
    );
    let seeds: Vec<u64> = api.engine.requests().iter().map(|r| r.seed).collect();
    assert_eq!(seeds, [5, 6, 5, 6]);
}

#[tokio::test]
async fn a_stream_says_the_same() {
    let api = api();
    api.reply("hello");
    api.reply("hello");
    let asked = |stream: bool| {
        json!({"prompt": "a", "echo": true, "logprobs": 1, "seed": 1, "stream": stream,
            "stream_options": {"include_usage": true}})
    };
    let whole = complete(&api, asked(false)).await.json();
    let frames = complete(&api, asked(true)).await.frames();
    let (done, rest) = frames.split_last().unwrap();
    assert_eq!(done, "[DONE]");
    let (usage, said) = rest.split_last().unwrap();
    assert_eq!(usage["usage"], whole["usage"]);
    let text: String = said
        .iter()
        .filter_map(|f| f["choices"][0]["text"].as_str())
        .collect();
    assert_eq!(text, whole["choices"][0]["text"].as_str().unwrap());
    for column in ["tokens", "token_logprobs", "text_offset"] {
        let joined: Vec<Value> = said
            .iter()
            .filter_map(|f| f["choices"][0]["logprobs"][column].as_array())
            .flatten()
            .cloned()
            .collect();
        assert_eq!(
            json!(joined),
            whole["choices"][0]["logprobs"][column],
            "{column}"
        );
    }
    assert_eq!(said.last().unwrap()["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn what_a_model_name_selects() {
    let api = api();
    for model in ["org/base", "org/base:side", "other"] {
        complete(&api, json!({"model": model, "prompt": "a"})).await;
    }
    let policies: Vec<PolicyRef> = api
        .engine
        .requests()
        .iter()
        .map(|r| r.policy.clone())
        .collect();
    let served = PolicyRef::Served(Profile::default());
    assert_eq!(policies, [served.clone(), PolicyRef::Base, served]);
    let answer = complete(&api, json!({"model": "org/base@9", "prompt": "a"})).await;
    assert_eq!(answer.json()["error"]["code"], "model_not_found");
}

#[tokio::test]
async fn wrong_fields_are_named() {
    let api = api();
    for (body, field) in [
        (json!({}), "prompt"),
        (json!({"prompt": ""}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": {}}), "prompt"),
        (json!({"prompt": [1, 258]}), "prompt[1]"),
        (json!({"prompt": [[1], []]}), "prompt[1]"),
        (json!({"prompt": ["a", 1]}), "prompt[1]"),
        (json!({"prompt": "a", "max_tokens": 0}), "max_tokens"),
        (json!({"prompt": "a", "logprobs": 21}), "logprobs"),
        (json!({"prompt": "a", "suffix": "b"}), "suffix"),
        (json!({"prompt": "a", "best_of": 2}), "best_of"),
        (json!({"prompt": "a", "n": 9}), "n"),
    ] {
        let answer = complete(&api, body.clone()).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{body}");
        assert_eq!(answer.json()["error"]["param"], field, "{body}");
    }
    let long = complete(&api, json!({"prompt": "a".repeat(CONTEXT)})).await;
    assert_eq!(long.json()["error"]["code"], "context_length_exceeded");
}
