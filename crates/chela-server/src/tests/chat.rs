//! Whole chat completions.

use super::*;

#[tokio::test]
async fn a_whole_answer() {
    let api = api();
    api.reply("Hello 🦀");
    api.engine.set_cached_tokens(3);
    let answer = api
        .chat(ask(json!({"frobnicate": 1, "store": true, "seed": 4})))
        .await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    let body = answer.json();
    assert_eq!(body["id"], "chatcmpl-turn_0000000000000001");
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(body["created"], 1_700_000_000);
    assert_eq!(body["model"], "org/base");
    let choice = json!({"index": 0, "message": {"role": "assistant", "content": "Hello 🦀"},
        "logprobs": null, "finish_reason": "stop"});
    assert_eq!(body["choices"], json!([choice]));
    let prompt = api.engine.requests()[0].prompt.len();
    let sampled = ids("Hello 🦀").len() + 1;
    assert_eq!(body["usage"]["prompt_tokens"], prompt);
    assert_eq!(body["usage"]["completion_tokens"], sampled);
    assert_eq!(body["usage"]["total_tokens"], prompt + sampled);
    assert_eq!(body["usage"]["prompt_tokens_details"]["cached_tokens"], 3);
    assert_eq!(answer.header("x-chela-session"), "s-new");
    assert_eq!(answer.header("x-chela-turn"), "turn_0000000000000001");
    assert_eq!(answer.header("x-chela-policy-version"), "default@0");
    assert_eq!(answer.header("x-chela-turn-kind"), "main");
    assert_eq!(answer.header("x-chela-ignored"), "frobnicate,store");

    let sealed = api.recorder.sealed.lock().unwrap();
    assert_eq!(sealed.len(), 1);
    assert_eq!(sealed[0].finish, FinishReason::End);
    assert_eq!(
        sealed[0].reply.tokens(),
        [ids("Hello 🦀"), vec![END]].concat()
    );
    assert_eq!(sealed[0].prompt, api.engine.requests()[0].prompt);
    assert_eq!(sealed[0].answer.content, "Hello 🦀");
    assert_eq!(api.engine.requests()[0].seed, 4);
}

#[tokio::test]
async fn several_choices_have_their_own_turns_and_seeds() {
    let api = api();
    for text in ["a", "bb", "ccc"] {
        api.reply(text);
    }
    let answer = api.chat(ask(json!({"n": 3, "seed": 10}))).await;
    let body = answer.json();
    for (i, text) in ["a", "bb", "ccc"].iter().enumerate() {
        assert_eq!(body["choices"][i]["index"], i);
        assert_eq!(body["choices"][i]["message"]["content"], *text);
    }
    assert_eq!(body["usage"]["completion_tokens"], 2 + 3 + 4);
    assert_eq!(answer.header("x-chela-turn").split(',').count(), 3);
    let seeds: Vec<u64> = api.engine.requests().iter().map(|r| r.seed).collect();
    assert_eq!(seeds, [10, 11, 12]);
    let mut choices: Vec<usize> = api.recorder.finishes().iter().map(|f| f.0).collect();
    choices.sort_unstable();
    assert_eq!(choices, [0, 1, 2]);
}

#[tokio::test]
async fn limits_and_temperatures_reach_the_engine() {
    let api = api_with(|app| app.config.default_max_tokens = Some(50));
    api.chat(ask(json!({}))).await;
    api.chat(ask(json!({"max_tokens": 7, "temperature": 0.5})))
        .await;
    api.chat(ask(
        json!({"max_tokens": 7, "max_completion_tokens": 8, "temperature": 0.05}),
    ))
    .await;
    api.chat(ask(
        json!({"max_tokens": 100_000, "presence_penalty": 1, "temperature": 0.7}),
    ))
    .await;
    let requests = api.engine.requests();
    let room = CONTEXT - requests[0].prompt.len();
    let limits: Vec<usize> = requests.iter().map(|r| r.max_tokens).collect();
    assert_eq!(limits, [50, 7, 8, room]);
    assert!(
        requests
            .iter()
            .all(|r| r.end_ids == [END] && r.priority == Priority::User)
    );
    // Behavior log-probs hold at temperature 1 where the turn was near greedy or the logits were shaped.
    let sealed = api.recorder.sealed.lock().unwrap();
    let kept: Vec<f32> = sealed.iter().map(|c| c.temperature).collect();
    assert_eq!(kept, [1.0, 0.5, 1.0, 1.0]);
}

#[tokio::test]
async fn length_stop_and_thinking() {
    let api = api();
    let thought = "<think>\nhm\n</think>";
    api.reply(&format!("{thought}ok"));
    let usage = api.chat(ask(json!({}))).await.json()["usage"].clone();
    let details = &usage["completion_tokens_details"];
    // One token a byte here; the end is the third after the thought.
    assert_eq!(details["reasoning_tokens"], thought.len() - "<think".len());
    assert_eq!(usage["completion_tokens"], thought.len() + 3);
    api.reply("abcdef");
    let body = api.chat(ask(json!({"max_tokens": 3}))).await.json();
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    assert_eq!(body["choices"][0]["message"]["content"], "abc");

    api.reply("one STOP two");
    let body = api.chat(ask(json!({"stop": " STOP"}))).await.json();
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    assert_eq!(body["choices"][0]["message"]["content"], "one");
    assert_eq!(
        api.recorder.finishes().last().unwrap().1,
        FinishReason::Stopped
    );

    api.reply("<think>hm</think>yes");
    let message = api.chat(ask(json!({}))).await.json()["choices"][0]["message"].clone();
    assert_eq!(message["reasoning_content"], "hm");
    assert_eq!(message["content"], "yes");
}

#[tokio::test]
async fn logprobs_have_an_entry_for_each_token_with_raw_bytes() {
    let api = api();
    api.reply("é!");
    let body = api
        .chat(ask(json!({"logprobs": true, "top_logprobs": 2})))
        .await
        .json();
    let entries = body["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap();
    assert_eq!(entries.len(), ids("é!").len() + 1);
    let bytes: Vec<u8> = entries
        .iter()
        .flat_map(|e| e["bytes"].as_array().unwrap())
        .map(|b| b.as_u64().unwrap() as u8)
        .collect();
    assert_eq!(bytes, "é!".as_bytes());
    let sealed = api.recorder.sealed.lock().unwrap();
    for (entry, kept) in entries.iter().zip(sealed[0].reply.logprobs_t1()) {
        assert_eq!(entry["logprob"].as_f64().unwrap() as f32, *kept);
        assert!(*kept <= 0.0);
        assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 2);
    }
}

const CALLS: &str = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 2}}\n</tool_call>";

#[tokio::test]
async fn tool_calls_and_tool_choice() {
    let api = api();
    api.reply(CALLS);
    let body = api.chat(ask(json!({"tools": [add_tool()]}))).await.json();
    let choice = &body["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], Value::Null);
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    assert_eq!(calls.len(), 2);
    assert_eq!(calls[0]["function"]["name"], "add");
    assert_ne!(calls[0]["id"], calls[1]["id"]);

    api.reply(CALLS);
    let body = api
        .chat(ask(json!({"tools": [add_tool()], "tool_choice": "none"})))
        .await
        .json();
    assert_eq!(body["choices"][0]["message"]["content"], CALLS);
    assert_eq!(body["choices"][0]["finish_reason"], "stop");

    api.reply(CALLS);
    let one = ask(json!({"tools": [add_tool()], "parallel_tool_calls": false}));
    let body = api.chat(one).await.json();
    assert_eq!(
        body["choices"][0]["message"]["tool_calls"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
    let sealed = api.recorder.sealed.lock().unwrap();
    let last = sealed.last().unwrap();
    assert_eq!(
        (last.finish, last.answer.tool_calls.len()),
        (FinishReason::Stopped, 1)
    );
    assert!(last.reply.len() < ids(CALLS).len());
    assert_eq!(api.engine.running(), 0);
}

#[tokio::test]
async fn a_private_turn_is_answered_and_not_kept() {
    let api = api();
    api.reply("secret");
    let body = ask(json!({}));
    let answer = api
        .post_with("/v1/chat/completions", &[("x-turn-type", "private")], &body)
        .await;
    assert_eq!(answer.json()["choices"][0]["message"]["content"], "secret");
    assert_eq!(answer.header("x-chela-turn-kind"), "private");
    assert!(api.recorder.sealed.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_version_that_went_away_since_admission_is_replaced() {
    let api = api();
    api.recorder
        .version
        .store(3, std::sync::atomic::Ordering::SeqCst);
    let answer = api.chat(ask(json!({}))).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(answer.header("x-chela-policy-version"), "default@0");
    let pinned = api.chat(ask(json!({"model": "org/base@3"}))).await;
    assert_eq!(pinned.status, StatusCode::NOT_FOUND);
    assert_eq!(pinned.json()["error"]["code"], "model_not_found");
}

#[tokio::test]
async fn a_turn_that_cannot_be_kept_is_no_answer() {
    let api = api();
    api.reply("x");
    *api.recorder.refuse_seal.lock().unwrap() = Some(Refusal::Unavailable {
        message: "disk full".to_owned(),
        retry_after: 30,
    });
    let answer = api.chat(ask(json!({}))).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.header("retry-after"), "30");
    assert!(
        answer.json()["error"]["message"]
            .as_str()
            .unwrap()
            .contains("retry-after: 30")
    );
}

#[tokio::test]
async fn an_engine_that_breaks_is_an_error_and_the_turn_is_failed() {
    let api = api();
    let error = Some(EngineError::Stopped("crash".to_owned()));
    api.engine.push_reply(FakeReply {
        tokens: ids("ab"),
        error,
    });
    let answer = api.chat(ask(json!({}))).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    until("sealed", || {
        api.recorder.finishes() == [(0, FinishReason::Failed)]
    })
    .await;
    assert_eq!(
        api.recorder.sealed.lock().unwrap()[0].reply.tokens(),
        ids("ab")
    );
}

#[tokio::test]
async fn numbers_that_are_not_finite_never_leave() {
    let api = api();
    api.engine.score_with(|_, _, _| f32::NEG_INFINITY);
    api.reply("a");
    let answer = api.chat(ask(json!({"logprobs": true}))).await;
    assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
    until("sealed", || {
        api.recorder.finishes() == [(0, FinishReason::Failed)]
    })
    .await;
}
