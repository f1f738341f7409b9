//! Tests of the whole crate over fakes.

mod canaries;
mod control;
mod flow;
mod judged;
mod models;
mod versions;

use crate::{Rollout, RolloutConfig};
use chela_chat::{Chat, ChatParts};
use chela_core::{testing::*, *};
use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% if tools %}{% endif %}";
const START: TokenId = 256;
const END: TokenId = 257;

/// One token for each byte, and two control tokens.
fn tiny_chat() -> Arc<Chat> {
    let mut alphabet: Vec<char> = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet()
        .into_iter()
        .collect();
    alphabet.sort_unstable();
    let vocabulary: serde_json::Map<String, serde_json::Value> = alphabet
        .iter()
        .enumerate()
        .map(|(i, c)| (c.to_string(), i.into()))
        .collect();
    let special = |id: TokenId, text: &str| {
        serde_json::json!({"id": id, "content": text, "special": true, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false})
    };
    let level = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false,
        "trim_offsets": true, "use_regex": true});
    let json = serde_json::json!({
        "version": "1.0",
        "added_tokens": [special(START, "<|im_start|>"), special(END, "<|im_end|>")],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    });
    let tokenizer = tokenizers::Tokenizer::from_bytes(json.to_string()).unwrap();
    let parts = ChatParts {
        tokenizer,
        template: TEMPLATE.to_owned(),
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

struct Fixture {
    rollout: Arc<Rollout>,
    store: Arc<MemoryStore>,
    engine: FakeEngine,
    chat: Arc<Chat>,
    time: Arc<AtomicI64>,
}

fn quick(config: &mut RolloutConfig) {
    config.tick = Duration::from_millis(2);
    config.judge_backoff = Duration::from_millis(1);
    config.judge_timeout = Duration::from_secs(20);
}

fn fixture(judges: Vec<Arc<dyn Judge>>, change: impl FnOnce(&mut RolloutConfig)) -> Fixture {
    fixture_over(Arc::new(MemoryStore::new()), judges, change)
}

fn fixture_over(
    store: Arc<MemoryStore>,
    judges: Vec<Arc<dyn Judge>>,
    change: impl FnOnce(&mut RolloutConfig),
) -> Fixture {
    let engine = FakeEngine::with_info(EngineInfo {
        model: "tiny".to_owned(),
        context_length: 100_000,
        vocabulary: 258,
        tokenizer_hash: "tiny".to_owned(),
    });
    let chat = tiny_chat();
    let time = Arc::new(AtomicI64::new(1_000_000));
    let mut config = RolloutConfig::new("/nowhere");
    quick(&mut config);
    change(&mut config);
    let clock = {
        let time = time.clone();
        Arc::new(move || time.fetch_add(10, Ordering::SeqCst))
    };
    let rollout = Rollout::new(
        store.clone(),
        Arc::new(engine.clone()),
        chat.clone(),
        judges,
        clock,
        config,
    );
    Fixture {
        rollout,
        store,
        engine,
        chat,
        time,
    }
}

fn someone() -> Caller {
    Caller {
        profile: Profile::default(),
        scope: Scope::Feedback,
        session: None,
    }
}

fn admin() -> Caller {
    Caller {
        scope: Scope::Admin,
        ..someone()
    }
}

/// A request of a plain client.
fn request(session: Option<&str>, messages: &[Message]) -> ChatRequest {
    ChatRequest {
        model: "tiny".to_owned(),
        conversation: Conversation {
            messages: messages.to_vec(),
            ..Conversation::default()
        },
        choices: 1,
        hints: RequestHints {
            session: session.map(|id| SessionClaim {
                source: "header x-session-id",
                id: id.into(),
            }),
            ..RequestHints::default()
        },
        ..ChatRequest::default()
    }
}

impl Fixture {
    /// A reply as the server would hand it in.
    fn completion(&self, admission: &Admission, request: &ChatRequest, answer: &str) -> Completion {
        let reuse = admission.reuse.as_ref().map_err(String::as_str);
        let rendered = self.chat.render(&request.conversation, reuse).unwrap();
        let mut tokens = self.chat.encode(answer).unwrap();
        tokens.push(END);
        let n = tokens.len();
        let reply = Reply::from_columns(
            tokens,
            vec![-0.5; n],
            vec![-0.5; n],
            vec![1.0; n],
            vec![false; n],
        );
        Completion {
            choice: 0,
            prompt: rendered.tokens,
            segment: rendered.segment,
            reply: reply.unwrap(),
            temperature: 1.0,
            finish: FinishReason::End,
            answer: Message::assistant(answer),
        }
    }

    /// One whole request.
    async fn exchange(
        &self,
        caller: &Caller,
        request: &ChatRequest,
        answer: &str,
    ) -> (Admission, TurnId) {
        let admission = self.rollout.admit(caller, request).await.unwrap();
        let completion = self.completion(&admission, request, answer);
        let turn = self
            .rollout
            .seal(&admission, request, completion)
            .await
            .unwrap();
        (admission, turn)
    }

    async fn say(&self, session: &str, messages: &[Message], answer: &str) -> TurnId {
        self.exchange(&someone(), &request(Some(session), messages), answer)
            .await
            .1
    }

    fn story(&self, turn: TurnId) -> TurnStory {
        self.store.story(turn).unwrap().unwrap()
    }

    /// Lets the loop run until something is so.
    async fn until(&self, what: &str, so: impl Fn() -> bool) {
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let running = tokio::spawn(self.rollout.clone().run(async {
            let _ = stopped.await;
        }));
        for _ in 0..5_000 {
            if so() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let was = so();
        let _ = stop.send(());
        running.await.unwrap();
        assert!(was, "{what}");
    }
}

fn user(text: &str) -> Message {
    Message::user(text)
}

fn said(text: &str) -> Message {
    Message::assistant(text)
}
