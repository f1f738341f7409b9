//! Template and tokenizer of Qwen2.5-Coder against Transformers (`golden/qwen2_coder.json`).

use crate::{
    common::fresh,
    starter::{fetched, golden, ids, messages},
};

#[test]
#[ignore = "fetches qwen2.5-coder-0.5b"]
fn qwen2_coder_ids_equal_transformers() {
    let (chat, golden) = (&fetched("qwen2.5-coder-0.5b"), golden("qwen2_coder"));
    let conversations = golden["conversations"].as_array().unwrap();
    for c in conversations {
        let name = &c["name"];
        assert_eq!(
            fresh(chat, &messages(&c["messages"])),
            ids(&c["ids"]),
            "{name}"
        );
    }
    assert_eq!(conversations.len(), 3);
}
