//! A running server of the tests.

use serde_json::{Value, json};
use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// The binary with a scripted engine and a tiny tokenizer.
pub struct Server {
    pub child: Child,
    pub address: String,
    pub admin: String,
    _home: tempfile::TempDir,
}

/// Looks until it is there.
pub fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + Duration::from_secs(60);
    while Instant::now() < until {
        if let Some(found) = look() {
            return found;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("{what} did not come");
}

/// How it is started.
pub fn command(home: &Path, script: &Path) -> Command {
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

/// A folder with model and script.
pub fn prepared(script: &str) -> (tempfile::TempDir, PathBuf) {
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
    /// Runs it.
    pub fn start(script: &str) -> Self {
        Self::start_with(script, |_| {})
    }

    /// Runs it over a model folder that was changed first.
    pub fn start_with(script: &str, change: impl FnOnce(&Path)) -> Self {
        let (home, file) = prepared(script);
        change(&home.path().join("model"));
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

    /// A chat of one message.
    pub fn ask(&self, session: &str, text: &str, stream: bool) -> (u16, String) {
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
    pub fn session(&self, id: &str) -> Option<Value> {
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
