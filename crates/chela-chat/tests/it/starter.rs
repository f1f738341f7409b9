//! The starter model's template and tokenizer against Transformers (`golden/chat_starter.json`).

use crate::common::fresh;
use chela_chat::Chat;
use chela_core::Message;
use chela_model::{Model, ModelSource, NoProgress, resolve};

#[test]
#[ignore = "needs the starter model"]
fn starter_ids_equal_transformers() {
    let cache = directories::ProjectDirs::from("", "", "chela").unwrap();
    let source = ModelSource::parse("starter").unwrap();
    let files = resolve(&source, cache.cache_dir(), &mut NoProgress).unwrap();
    let chat = &Chat::load(&Model::open(&files).unwrap()).unwrap();
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../golden/chat_starter.json"
    );
    let golden: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let ids = |v: &serde_json::Value| -> Vec<u32> {
        v.as_array()
            .unwrap()
            .iter()
            .map(|i| i.as_u64().unwrap() as u32)
            .collect()
    };
    let mut compared = 0;
    for c in golden["conversations"].as_array().unwrap() {
        if c["add_generation_prompt"] != true {
            continue;
        }
        let messages: Vec<Message> = c["messages"]
            .as_array()
            .unwrap()
            .iter()
            .map(|m| {
                let role = chela_core::Role::parse(m["role"].as_str().unwrap()).unwrap();
                Message::text(role, m["content"].as_str().unwrap())
            })
            .collect();
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
