//! The binary itself, with a scripted engine and a tiny tokenizer: replies, faults, and what the store keeps of them.

use serde_json::{Value, json};
use std::{
    io::Read,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

struct Server {
    child: Child,
    address: String,
    admin: String,
    _home: tempfile::TempDir,
}

fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + Duration::from_secs(60);
    while Instant::now() < until {
        if let Some(found) = look() {
            return found;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("{what} did not come");
}

fn command(home: &Path, script: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_chela"));
    command
        .args(["serve", "--port", "0", "--engine"])
        .arg(format!("script:{}", script.display()))
        .arg("--model")
        .arg(home.join("model"))
        .arg("--data-dir")
        .arg(home.join("data"))
        .stdin(Stdio::null());
    command
}

fn prepared(script: &str) -> (tempfile::TempDir, PathBuf) {
    let home = tempfile::tempdir().unwrap();
    chela_model::testing::write_tiny_llama(
        &home.path().join("model"),
        1,
        &chela_model::testing::TinySpec::default(),
    )
    .unwrap();
    let file = home.path().join("script.jsonl");
    std::fs::write(&file, script).unwrap();
    (home, file)
}

impl Server {
    fn start(script: &str) -> Self {
        let (home, file) = prepared(script);
        let child = command(home.path(), &file).spawn().unwrap();
        let data = home.path().join("data");
        let address = wait_for("the address", || {
            let note = std::fs::read_to_string(data.join("server.json")).ok()?;
            let note: Value = serde_json::from_str(&note).ok()?;
            Some(note["address"].as_str()?.to_owned())
        });
        let admin = std::fs::read_to_string(data.join("admin.key")).unwrap();
        Self {
            child,
            address,
            admin: admin.trim().to_owned(),
            _home: home,
        }
    }

    fn ask(&self, session: &str, text: &str, stream: bool) -> (u16, String) {
        let body = json!({
            "model": "model", "stream": stream, "messages": [{ "role": "user", "content": text }],
        });
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .build()
            .into();
        let mut response = agent
            .post(format!("{}/v1/chat/completions", self.address))
            .header("x-session-id", session)
            .send_json(body)
            .unwrap();
        let status = response.status().as_u16();
        (status, response.body_mut().read_to_string().unwrap())
    }

    /// A session with its turns, once one is kept.
    fn session(&self, id: &str) -> Option<Value> {
        let mut response = ureq::get(format!("{}/v1/sessions/{id}", self.address))
            .header("authorization", format!("Bearer {}", self.admin))
            .call()
            .ok()?;
        response.body_mut().read_json().ok()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

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
