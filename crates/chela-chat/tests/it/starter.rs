//! The starter model's template and tokenizer against Transformers (`golden/chat_starter.json`).

use crate::common::fresh;
use chela_chat::Chat;
use chela_core::{Message, Role};
use chela_model::{Model, ModelSource, NoProgress, resolve};
use serde_json::Value;

pub fn fetched(name: &str) -> Chat {
    let cache = directories::ProjectDirs::from("", "", "chela").unwrap();
    let source = ModelSource::parse(name).unwrap();
    let files = resolve(&source, cache.cache_dir(), &mut NoProgress).unwrap();
    Chat::load(&Model::open(&files).unwrap()).unwrap()
}

pub fn golden(name: &str) -> Value {
    let path = format!("{}/../../golden/{name}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

pub fn ids(v: &Value) -> Vec<u32> {
    let ids = v.as_array().unwrap().iter();
    ids.map(|i| i.as_u64().unwrap() as u32).collect()
}

pub fn messages(v: &Value) -> Vec<Message> {
    let message = |m: &Value| {
        let role = Role::parse(m["role"].as_str().unwrap()).unwrap();
        Message::text(role, m["content"].as_str().unwrap())
    };
    v.as_array().unwrap().iter().map(message).collect()
}

#[test]
#[ignore = "needs the starter model"]
fn starter_ids_equal_transformers() {
    let (chat, golden) = (&fetched("starter"), golden("chat_starter"));
    let mut compared = 0;
    for c in golden["conversations"].as_array().unwrap() {
        if c["add_generation_prompt"] != true {
            continue;
        }
        let messages = messages(&c["messages"]);
        let typed = messages.iter().any(|m| m.content.contains("<|"));
        if !typed {
            assert_eq!(fresh(chat, &messages), ids(&c["ids"]), "{}", c["name"]);
            compared += 1;
        }
    }
    assert!(compared >= 8);
    for text in golden["texts"].as_array().unwrap() {
        let raw = text["text"].as_str().unwrap();
        if !raw.contains("<|") {
            assert_eq!(chat.encode(raw).unwrap(), ids(&text["ids"]), "{raw:?}");
        }
    }
}
