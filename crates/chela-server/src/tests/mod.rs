//! Tests of the API over fakes: shapes, order, refusals, and that a turn is kept before a client is told that it is over.

mod access;
mod cases;
mod chat;
mod control;
mod edge;
mod fakes;
mod form;
mod live;
mod messages;
mod refusals;
mod responses;
mod sessions;
mod stream;
mod text;

use crate::{
    App, ServerConfig,
    server::{Server, build},
};
use axum::{
    Router,
    body::{Body, to_bytes},
    http::{HeaderMap, Request, StatusCode, header},
};
use chela_chat::{Chat, ChatParts};
use chela_core::{testing::*, *};
use fakes::*;
use serde_json::{Value, json};
use std::{
    sync::{Arc, LazyLock},
    time::Duration,
};
use tower::ServiceExt;

const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if tools %}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
const NO_TOOLS: &str =
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}";
const START: TokenId = 256;
const END: TokenId = 257;
const VOCABULARY: usize = 258;
const CONTEXT: usize = 4096;

/// One token for each byte, and two control tokens.
fn chat_with(template: &str) -> Arc<Chat> {
    let alphabet = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
    let mut alphabet: Vec<char> = alphabet.into_iter().collect();
    alphabet.sort_unstable();
    let vocabulary: serde_json::Map<String, Value> = alphabet
        .iter()
        .enumerate()
        .map(|(i, c)| (c.to_string(), i.into()))
        .collect();
    let special = |id: TokenId, text: &str| {
        json!({"id": id, "content": text, "special": true, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false})
    };
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": true});
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": [special(START, "<|im_start|>"), special(END, "<|im_end|>")],
        "pre_tokenizer": level, "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    });
    let parts = ChatParts {
        tokenizer: tokenizers::Tokenizer::from_bytes(tokenizer.to_string()).unwrap(),
        template: template.to_owned(),
        bos: None,
        eos: Some("<|im_end|>".to_owned()),
        end_ids: vec![END],
        specials: vec![
            (START, "<|im_start|>".to_owned()),
            (END, "<|im_end|>".to_owned()),
        ],
    };
    Arc::new(Chat::from_parts(parts).unwrap())
}

static CHAT: LazyLock<Arc<Chat>> = LazyLock::new(|| chat_with(TEMPLATE));

/// A server over fakes.
struct Api {
    server: Arc<Server>,
    router: Router,
    engine: FakeEngine,
    recorder: Arc<FakeRecorder>,
    control: Arc<FakeControl>,
}

struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: String,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {:?}", self.body))
    }

    fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |v| v.to_str().unwrap())
    }

    /// The frames of a stream, `[DONE]` as a string.
    fn frames(&self) -> Vec<Value> {
        frames(&self.body)
    }
}

fn frames(body: &str) -> Vec<Value> {
    let frame = |f: &str| {
        let data = f
            .strip_prefix("data: ")
            .unwrap_or_else(|| panic!("no data: {f:?}"));
        serde_json::from_str(data).unwrap_or_else(|_| json!(data))
    };
    assert!(body.is_empty() || body.ends_with("\n\n"), "{body:?}");
    body.split("\n\n")
        .filter(|f| !f.is_empty())
        .map(frame)
        .collect()
}

/// The events of a stream in which each is named as its type.
fn named_events(body: &str) -> Vec<Value> {
    body.split("\n\n")
        .filter(|f| !f.is_empty())
        .map(|f| {
            let (name, data) = f.split_once('\n').unwrap();
            let value: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            assert_eq!(name.strip_prefix("event: "), value["type"].as_str());
            value
        })
        .collect()
}

fn api() -> Api {
    api_with(|_| {})
}

fn api_with(change: impl FnOnce(&mut App)) -> Api {
    let engine = FakeEngine::with_info(EngineInfo {
        model: "org/base".to_owned(),
        context_length: CONTEXT,
        vocabulary: VOCABULARY,
        tokenizer_hash: "tiny".to_owned(),
    });
    let recorder = Arc::new(FakeRecorder::default());
    let control = Arc::new(FakeControl::default());
    let mut app = App {
        engine: Arc::new(engine.clone()),
        chat: CHAT.clone(),
        recorder: recorder.clone(),
        control: control.clone(),
        gatekeeper: Arc::new(FakeGate::default()),
        config: ServerConfig {
            bound_names: vec!["here".to_owned()],
            ..ServerConfig::default()
        },
    };
    change(&mut app);
    let server = Server::new(app);
    Api {
        router: build(&server),
        server,
        engine,
        recorder,
        control,
    }
}

fn request(method: &str, path: &str) -> axum::http::request::Builder {
    Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, "here:1")
}

impl Api {
    async fn send(&self, request: Request<Body>) -> Answer {
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (status, headers) = (response.status(), response.headers().clone());
        let bytes = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        Answer {
            status,
            headers,
            body: String::from_utf8(bytes.to_vec()).unwrap(),
        }
    }

    async fn get(&self, path: &str, key: &str) -> Answer {
        let with_key = format!("Bearer {key}");
        let request = request("GET", path).header(header::AUTHORIZATION, with_key);
        self.send(request.body(Body::empty()).unwrap()).await
    }

    async fn post(&self, path: &str, key: &str, body: &Value) -> Answer {
        self.post_with(path, &[("authorization", &format!("Bearer {key}"))], body)
            .await
    }

    async fn post_with(&self, path: &str, headers: &[(&str, &str)], body: &Value) -> Answer {
        let mut request = request("POST", path).header(header::CONTENT_TYPE, "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.send(request.body(Body::from(body.to_string())).unwrap())
            .await
    }

    async fn chat(&self, body: Value) -> Answer {
        self.post("/v1/chat/completions", "chat", &body).await
    }

    /// The next reply is this text and the end id.
    fn reply(&self, text: &str) {
        self.engine.push_reply(ids(text));
    }
}

fn ids(text: &str) -> Vec<TokenId> {
    CHAT.encode(text).unwrap()
}

/// A chat request of one message, with more fields.
fn ask(more: Value) -> Value {
    let mut body = json!({"model": "org/base", "messages": [{"role": "user", "content": "hi"}]});
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// Waits until something is true; a test that never gets there fails.
async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..2000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    panic!("never happened: {what}");
}

fn add_tool() -> Value {
    json!({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}})
}
