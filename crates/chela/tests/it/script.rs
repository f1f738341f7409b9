//! The binary itself, with a scripted engine and a tiny tokenizer: replies, faults, and what the store keeps of them.

use crate::server::{Server, command, prepared, wait_for};
use serde_json::{Value, json};
use std::{io::Read, process::Stdio};

const SCRIPT: &str = r#"
# The first line that fits answers.
{"when": "weather", "times": 1, "text": "Sunny at first."}
{"when": "weather", "text": "Rain by now."}
{"when": "break", "text": "half a reply that", "fail": "the device is gone", "after": 4}
{"when": "refuse", "refuse": "warming up"}
{"when": "cut", "text": "no end", "cut": true}
{"when": "wait", "text": "slow", "token_ms": 20, "hang": true}
{"text": "anything else"}
"#;

#[test]
fn lines_answer_in_order_and_faults_look_like_an_engines() {
    let server = Server::start(SCRIPT);
    let said = |text: &str| -> Value {
        let (status, body) = server.ask("plain", text, false);
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).unwrap()
    };
    let content = |v: &Value| v["choices"][0]["message"]["content"].clone();
    assert_eq!(content(&said("the weather?")), "Sunny at first.");
    assert_eq!(content(&said("the weather now?")), "Rain by now.");
    assert_eq!(content(&said("hello")), "anything else");
    let cut = said("cut it");
    assert_eq!(content(&cut), "no end");
    assert_eq!(cut["choices"][0]["finish_reason"], "length");
    let (status, body) = server.ask("plain", "refuse me", false);
    assert!(
        status >= 500 && body.contains("warming up"),
        "{status} {body}"
    );
    let (status, body) = server.ask("broken", "break it", false);
    assert!(
        status >= 500 && body.contains("the device is gone"),
        "{status} {body}"
    );
    // In a stream the status is already sent: an error event ends it, never a finish reason that looks like success.
    let (status, body) = server.ask("broken", "break it", true);
    assert_eq!(status, 200);
    assert!(body.contains("the device is gone"), "{body}");
    assert!(!body.contains("\"finish_reason\":\"stop\""), "{body}");
}

#[test]
fn a_client_that_leaves_a_hanging_reply_leaves_an_aborted_turn() {
    let server = Server::start(SCRIPT);
    let body = json!({
        "model": "model", "stream": true, "messages": [{ "role": "user", "content": "wait" }],
    });
    let response = ureq::post(format!("{}/v1/chat/completions", server.address))
        .header("x-session-id", "left")
        .send_json(body)
        .unwrap();
    let mut reader = response.into_body().into_reader();
    let mut some = [0; 64];
    assert!(reader.read(&mut some).unwrap() > 0);
    drop(reader);
    let turn = wait_for("the sealed turn", || {
        let session = server.session("left")?;
        session["turns"].as_array()?.first().cloned()
    });
    assert_eq!(turn["finish"], "aborted", "{turn}");
    let (status, _) = server.ask("after", "hello", false);
    assert_eq!(status, 200, "still up");
}

#[test]
fn a_wrong_script_is_named_with_its_line() {
    for (script, expected) in [
        (
            "{\"text\": \"fine\"}\n{\"txt\": \"typo\"}\n",
            "script.jsonl:2",
        ),
        (
            "{\"when\": \"(\", \"text\": \"x\"}\n",
            "no regular expression",
        ),
        ("# nothing\n", "holds no reply"),
    ] {
        let (home, file) = prepared(script);
        let output = command(home.path(), &file)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(expected), "{said}");
    }
}
