//! Streams: their order, what they never say too early, and their end.

use super::*;
use axum::body::BodyDataStream;
use futures_util::StreamExt;

/// A stream that is read frame by frame.
struct Reader(BodyDataStream);

impl Reader {
    async fn open(api: &Api, body: Value) -> Self {
        let request = request("POST", "/v1/chat/completions")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Body::from(body.to_string()));
        let response = api.router.clone().oneshot(request.unwrap()).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        Self(response.into_body().into_data_stream())
    }

    async fn next(&mut self) -> Option<Value> {
        let bytes = self.0.next().await?.unwrap();
        let mut all = frames(std::str::from_utf8(&bytes).unwrap());
        assert_eq!(all.len(), 1);
        all.pop()
    }
}

fn finish(frame: &Value) -> &Value {
    &frame["choices"][0]["finish_reason"]
}

fn content(frames: &[Value], choice: usize) -> String {
    let of_choice = frames.iter().filter(|f| f["choices"][0]["index"] == choice);
    of_choice
        .filter_map(|f| f["choices"][0]["delta"]["content"].as_str())
        .collect()
}

#[tokio::test]
async fn the_order_of_a_stream() {
    let api = api();
    api.reply("Hi 🦀");
    let answer = api.chat(ask(json!({"stream": true}))).await;
    assert_eq!(
        answer.header("content-type"),
        "text/event-stream; charset=utf-8"
    );
    assert_eq!(answer.header("x-chela-turn"), "turn_0000000000000001");
    let frames = answer.frames();
    assert_eq!(frames[0]["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(content(&frames, 0), "Hi 🦀");
    let (done, said) = frames.split_last().unwrap();
    assert_eq!(done, "[DONE]");
    let finishes: Vec<&Value> = said.iter().map(finish).filter(|f| !f.is_null()).collect();
    assert_eq!(finishes, ["stop"]);
    assert_eq!(finish(said.last().unwrap()), "stop");
    for frame in said {
        assert_eq!(frame["id"], "chatcmpl-turn_0000000000000001");
        assert_eq!(frame["object"], "chat.completion.chunk");
        assert_eq!(frame["created"], 1_700_000_000);
        assert_eq!(frame["model"], "org/base");
        assert!(frame.get("usage").is_none());
    }
}

#[tokio::test]
async fn usage_comes_when_asked_for_and_equals_the_whole_answers() {
    let api = api();
    for _ in 0..2 {
        ["a", "bb", "ccc"].iter().for_each(|text| api.reply(text));
    }
    let whole = api.chat(ask(json!({"n": 3}))).await.json();
    let options = json!({"include_usage": true});
    let streamed = api
        .chat(ask(
            json!({"n": 3, "stream": true, "stream_options": options}),
        ))
        .await;
    let frames = streamed.frames();
    let (usage, said) = frames[..frames.len() - 1].split_last().unwrap();
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"], whole["usage"]);
    assert!(
        said.iter()
            .all(|f| f["usage"].is_null() && f.get("usage").is_some())
    );
    for (choice, text) in ["a", "bb", "ccc"].iter().enumerate() {
        assert_eq!(content(said, choice), *text);
        let of_choice: Vec<&Value> = said
            .iter()
            .filter(|f| f["choices"][0]["index"] == choice)
            .collect();
        assert_eq!(of_choice[0]["choices"][0]["delta"]["role"], "assistant");
        assert_eq!(of_choice.iter().filter(|f| !finish(f).is_null()).count(), 1);
        assert_eq!(finish(of_choice.last().unwrap()), "stop");
    }
}

#[tokio::test]
async fn tool_calls_are_streamed_once_and_complete() {
    let api = api();
    api.reply(
        "ok <tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": {\"b\": 1}}}\n</tool_call>",
    );
    let frames = api
        .chat(ask(json!({"stream": true, "tools": [add_tool()]})))
        .await
        .frames();
    let calls: Vec<&Value> = frames
        .iter()
        .filter_map(|f| f["choices"][0]["delta"].get("tool_calls"))
        .collect();
    assert_eq!(calls.len(), 1);
    let call = &calls[0][0];
    assert_eq!(
        (&call["index"], &call["type"]),
        (&json!(0), &json!("function"))
    );
    assert!(call["id"].is_string());
    let arguments: Value =
        serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(arguments, json!({"a": {"b": 1}}));
    assert_eq!(finish(&frames[frames.len() - 2]), "tool_calls");
}

#[tokio::test]
async fn streamed_logprobs_are_the_whole_answers() {
    let api = api();
    api.reply("é STOP");
    api.reply("é STOP");
    let body = |stream| {
        ask(
            json!({"stream": stream, "logprobs": true, "top_logprobs": 1, "stop": "STOP", "seed": 1}),
        )
    };
    let whole = api.chat(body(false)).await.json();
    let frames = api.chat(body(true)).await.frames();
    let streamed: Vec<Value> = frames
        .iter()
        .filter_map(|f| f["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(json!(streamed), whole["choices"][0]["logprobs"]["content"]);
    assert_eq!(streamed.len(), ids("é STOP").len());
}

#[tokio::test]
async fn nothing_is_over_before_it_is_kept() {
    let api = api();
    api.recorder.may_seal.send_replace(false);
    api.reply("ab");
    let mut reader = Reader::open(&api, ask(json!({"stream": true}))).await;
    let mut said = String::new();
    while said != "ab" {
        let frame = reader.next().await.unwrap();
        assert!(finish(&frame).is_null());
        said += frame["choices"][0]["delta"]["content"]
            .as_str()
            .unwrap_or_default();
    }
    {
        let next = reader.next();
        tokio::pin!(next);
        let waiting = tokio::time::timeout(Duration::from_millis(50), &mut next).await;
        assert!(waiting.is_err(), "said to be over before it was kept");
        assert!(api.recorder.sealed.lock().unwrap().is_empty());
        api.recorder.may_seal.send_replace(true);
        assert_eq!(finish(&next.await.unwrap()), "stop");
    }
    assert_eq!(api.recorder.finishes(), [(0, FinishReason::End)]);
    assert_eq!(reader.next().await.unwrap(), "[DONE]");
}

#[tokio::test]
async fn a_turn_that_cannot_be_kept_ends_in_an_error_frame() {
    let api = api();
    api.reply("ab");
    *api.recorder.refuse_seal.lock().unwrap() = Some(Refusal::Internal("no".to_owned()));
    let frames = api.chat(ask(json!({"stream": true}))).await.frames();
    assert!(frames.iter().all(|f| f != "[DONE]" && finish(f).is_null()));
    assert_eq!(frames.last().unwrap()["error"]["type"], "server_error");
}

#[tokio::test]
async fn an_engine_that_breaks_ends_in_an_error_frame_and_the_turn_is_failed() {
    let api = api();
    let error = Some(EngineError::Stopped("crash".to_owned()));
    api.engine.push_reply(FakeReply {
        tokens: ids("ab"),
        error,
    });
    let frames = api.chat(ask(json!({"stream": true}))).await.frames();
    assert_eq!(content(&frames, 0), "ab");
    assert!(frames.iter().all(|f| f != "[DONE]" && finish(f).is_null()));
    assert!(
        frames.last().unwrap()["error"]["message"]
            .as_str()
            .unwrap()
            .contains("crash")
    );
    until("sealed", || {
        api.recorder.finishes() == [(0, FinishReason::Failed)]
    })
    .await;
}

#[tokio::test]
async fn one_broken_choice_ends_the_request_and_the_others_are_aborted() {
    let api = api();
    api.engine.set_yields(1);
    let error = Some(EngineError::Stopped("crash".to_owned()));
    api.engine.push_reply(FakeReply {
        tokens: vec![],
        error,
    });
    api.reply("a long, long, long answer");
    let frames = api
        .chat(ask(json!({"stream": true, "n": 2})))
        .await
        .frames();
    assert!(frames.last().unwrap()["error"].is_object());
    until("both sealed", || api.recorder.finishes().len() == 2).await;
    let mut finishes = api.recorder.finishes();
    finishes.sort_by_key(|f| f.0);
    assert_eq!(
        finishes,
        [(0, FinishReason::Failed), (1, FinishReason::Aborted)]
    );
    assert_eq!(api.engine.running(), 0);
}

#[tokio::test]
async fn silence_is_filled_with_empty_deltas() {
    let api = api_with(|app| app.config.keep_alive = Duration::from_millis(5));
    api.engine.hold();
    api.reply("x");
    let mut reader = Reader::open(&api, ask(json!({"stream": true}))).await;
    assert_eq!(
        reader.next().await.unwrap()["choices"][0]["delta"]["role"],
        "assistant"
    );
    for _ in 0..3 {
        let frame = reader.next().await.unwrap();
        assert_eq!(frame["choices"][0]["delta"], json!({}));
        assert!(finish(&frame).is_null());
    }
    api.engine.go_on();
    let mut said = String::new();
    while let Some(frame) = reader.next().await {
        said += frame["choices"][0]["delta"]["content"]
            .as_str()
            .unwrap_or_default();
    }
    assert_eq!(said, "x");
}

#[tokio::test]
async fn a_client_that_leaves_stops_the_engine_and_its_turn_is_aborted_once() {
    let api = api();
    api.engine.set_yields(1);
    api.reply("abcdefgh");
    let mut reader = Reader::open(&api, ask(json!({"stream": true}))).await;
    let mut said = String::new();
    while said.is_empty() {
        let frame = reader.next().await.unwrap();
        said += frame["choices"][0]["delta"]["content"]
            .as_str()
            .unwrap_or_default();
    }
    drop(reader);
    assert_eq!((api.engine.running(), api.engine.cancelled()), (0, 1));
    api.server.tasks.join().await;
    assert_eq!(api.recorder.finishes(), [(0, FinishReason::Aborted)]);
    let sealed = api.recorder.sealed.lock().unwrap();
    assert!(!sealed[0].reply.is_empty() && sealed[0].answer.content.starts_with(&said));
}

#[tokio::test]
async fn a_client_that_leaves_while_its_turn_is_being_kept_does_not_stop_that() {
    let api = api();
    api.recorder.may_seal.send_replace(false);
    api.reply("a");
    let mut reader = Reader::open(&api, ask(json!({"stream": true}))).await;
    let sealing = || {
        api.recorder
            .sealing
            .load(std::sync::atomic::Ordering::SeqCst)
            == 1
    };
    while !sealing() {
        let _ = tokio::time::timeout(Duration::from_millis(5), reader.next()).await;
    }
    drop(reader);
    api.recorder.may_seal.send_replace(true);
    api.server.tasks.join().await;
    assert_eq!(api.recorder.finishes(), [(0, FinishReason::End)]);
}

#[tokio::test]
async fn what_can_be_refused_is_refused_before_the_stream() {
    let api = api();
    for more in [
        json!({"n": 0}),
        json!({"temperature": -1}),
        json!({"messages": []}),
    ] {
        let mut body = ask(more);
        body["stream"] = json!(true);
        let answer = api.chat(body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        assert_eq!(answer.header("content-type"), "application/json");
    }
}
