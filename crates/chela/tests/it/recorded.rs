//! Requests as real clients sent them (`tests/clients/recorded`): what the server makes of each is what was written down.

use crate::server::{Server, wait_for};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Systems, tools and results have a place in it.
const TEMPLATE: &str = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn all() -> Vec<(String, Value)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/clients/recorded");
    let list = |folder: &Path| -> Vec<PathBuf> {
        let mut all: Vec<PathBuf> = std::fs::read_dir(folder)
            .unwrap()
            .map(|e| e.unwrap().path())
            .collect();
        all.sort();
        all
    };
    let files = list(&root).into_iter().flat_map(|client| list(&client));
    files
        .map(|file| {
            let name = file.strip_prefix(&root).unwrap().display().to_string();
            let text = std::fs::read_to_string(&file).unwrap();
            (name, serde_json::from_str(&text).unwrap())
        })
        .collect()
}

#[test]
fn recorded_requests_are_what_they_were() {
    let server = Server::start_with("{\"text\": \"Yes.\"}", |model| {
        std::fs::write(model.join("chat_template.jinja"), TEMPLATE).unwrap();
        let path = model.join("config.json");
        let mut config: Value =
            serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        config["max_position_embeddings"] = 200_000.into();
        std::fs::write(path, config.to_string()).unwrap();
    });
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .build()
        .into();
    let mut seen = 0;
    for (name, recorded) in all() {
        let expect = &recorded["expect"];
        if recorded["body"]["previous_response_id"].is_string() {
            continue; // It names a response of another server.
        }
        let path = recorded["path"].as_str().unwrap();
        let mut request = agent.post(format!("{}{path}", server.address));
        for (header, value) in recorded["headers"].as_object().unwrap() {
            let own = [
                "authorization",
                "content-length",
                "host",
                "accept-encoding",
                "x-api-key",
            ];
            if !own.contains(&header.as_str()) {
                request = request.header(header, value.as_str().unwrap());
            }
        }
        let mut answer = request.send(recorded["body"].to_string()).unwrap();
        let body = answer.body_mut().read_to_string().unwrap();
        assert_eq!(answer.status(), 200, "{name}: {body}");
        let header = |name: &str| {
            let value = answer.headers().get(name).unwrap();
            percent_decoded(value.to_str().unwrap())
        };
        assert_eq!(header("x-chela-turn-kind"), expect["kind"], "{name}");
        let session = header("x-chela-session");
        if expect["session"] != "message prefix" {
            assert_eq!(session, expect["id"], "{name}");
        }
        let turn = header("x-chela-turn");
        let kept = wait_for("the turn", || {
            let session = server.session(&session.replace('/', "%2F"))?;
            let turns = session["turns"].as_array()?;
            turns.iter().find(|t| t["id"] == turn).cloned()
        });
        assert_eq!(kept["reason"], expect["reason"], "{name}");
        assert!(!kept["messages"].to_string().contains("x-anthropic-billing"));
        seen += 1;
    }
    assert!(seen >= 70, "{seen}");
}

fn percent_decoded(text: &str) -> String {
    text.replace("%20", " ").replace("%3A", ":")
}
