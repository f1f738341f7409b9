//! The binary with a real, tiny model and `learning.weights = "full"`: feedback, on a reply or on groups of them, becomes a version, which
//! is served, survives a restart and is taken out as a model.

use crate::server::wait_for;
use serde_json::{Value, json};
use std::{
    path::Path,
    process::{Child, Command, Stdio},
};

struct Running {
    child: Child,
    address: String,
    admin: String,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn chela(home: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_chela"));
    command
        .args(args)
        .arg("--model")
        .arg(home.join("model"))
        .arg("--data-dir")
        .arg(home.join("data"))
        .stdin(Stdio::null());
    for setting in [
        "learning.weights=full",
        "learning.lr=1e-2",
        "learning.method=binary",
        "learning.baseline=false",
        "learning.batch=1",
        "learning.min_batch=1",
        "learning.groups=2",
        "learning.gate=false",
        // The tiny model knows no end.
        "learning.truncated=judged",
        "judge.kinds=[]",
    ] {
        command.args(["--set", setting]);
    }
    command
}

impl Running {
    fn start(home: &Path) -> Self {
        let note = home.join("data/server.json");
        let _ = std::fs::remove_file(&note); // a killed server's
        let child = chela(home, &["serve", "--port", "0"]).spawn().unwrap();
        let address = wait_for("the address", || {
            let note: Value = serde_json::from_str(&std::fs::read_to_string(&note).ok()?).ok()?;
            Some(note["address"].as_str()?.to_owned())
        });
        let admin = std::fs::read_to_string(home.join("data/admin.key")).unwrap();
        Self {
            child,
            address,
            admin: format!("Bearer {}", admin.trim()),
        }
    }

    fn agent() -> ureq::Agent {
        let config = ureq::Agent::config_builder().http_status_as_error(false);
        config.build().into()
    }

    fn post(&self, path: &str, body: &Value) -> Value {
        let request = Self::agent().post(format!("{}{path}", self.address));
        let request = request.header("authorization", &self.admin);
        let mut response = request.send_json(body).unwrap();
        let text = response.body_mut().read_to_string().unwrap();
        assert_eq!(response.status().as_u16(), 200, "{path}: {text}");
        serde_json::from_str(&text).unwrap()
    }

    fn get(&self, path: &str) -> (u16, String) {
        let request = Self::agent().get(format!("{}{path}", self.address));
        let request = request.header("authorization", &self.admin);
        let mut response = request.call().unwrap();
        let text = response.body_mut().read_to_string().unwrap();
        (response.status().as_u16(), text)
    }

    /// A reply to a fixed message: its completion and its text.
    fn ask(&self, temperature: u32) -> (Value, Value) {
        let said = self.post(
            "/v1/chat/completions",
            &json!({
                "model": "model", "temperature": temperature, "max_tokens": 12,
                "messages": [{ "role": "user", "content": "tell me of owls" }],
            }),
        );
        let text = said["choices"][0]["message"]["content"].clone();
        (said["id"].clone(), text)
    }

    fn served(&self) -> u64 {
        let (_, text) = self.get("/v1/policy");
        let view: Value = serde_json::from_str(&text).unwrap();
        view["served"].as_u64().unwrap()
    }
}

#[test]
fn all_weights_learn_from_feedback_are_served_and_survive_a_restart() {
    let home = tempfile::tempdir().unwrap();
    let spec = chela_model::testing::TinySpec::default();
    chela_model::testing::write_tiny_llama(&home.path().join("model"), 1, &spec).unwrap();
    let server = Running::start(home.path());
    let (_, before) = server.ask(0);
    // Greedy replies of a model that knows nothing never train: too little of their distribution was left.
    let (completion, _) = server.ask(1);
    server.post(
        "/v1/feedback",
        &json!({ "completion_id": completion, "score": -1 }),
    );
    wait_for("the first version", || (server.served() == 1).then_some(()));
    let (_, after) = server.ask(0);
    assert_ne!(before, after);
    let (status, text) = server.get("/v1/policy/versions/1/adapter_model.safetensors");
    assert!(
        status == 409 && text.contains("whole model"),
        "{status} {text}"
    );
    drop(server);

    let server = Running::start(home.path());
    assert_eq!(server.served(), 1);
    assert_eq!(server.ask(0).1, after);
    // The server was killed, maybe before it wrote the step's figures: they are there now, once.
    let figures = home.path().join("data/metrics/default/steps.jsonl");
    let lines = wait_for("the step's figures", || {
        let text = std::fs::read_to_string(&figures).ok()?;
        text.ends_with('\n').then_some(text)
    });
    let line: Value = serde_json::from_str(lines.trim_end()).unwrap();
    assert_eq!(
        (&line["version"], &line["state"]),
        (&json!(1), &json!("served"))
    );
    let (_, metrics) = server.get("/metrics");
    let loss = line["metrics"]["loss"].as_f64().unwrap();
    let shown = metrics
        .lines()
        .find_map(|l| l.strip_prefix("chela_train_loss{profile=\"default\"} "));
    assert_eq!(shown.unwrap().parse::<f64>().unwrap(), loss);

    let to = home.path().join("taken");
    let export = |args: &[&str]| {
        let mut command = chela(home.path(), &["policy", "export"]);
        command.args(args).arg(&to).output().unwrap()
    };
    let refused = export(&[]);
    let says = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && says.contains("--merged hf"),
        "{says}"
    );
    let done = export(&["--merged", "hf"]);
    let says = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success(), "{says}");
    let model = chela_model::ModelFiles {
        name: "taken".to_owned(),
        layout: chela_model::Layout::Folder(to),
    };
    chela_model::Model::open(&model).unwrap();

    // Back to the base model and its words.
    server.post("/v1/policy/rollback", &json!({ "version": 0 }));
    assert_eq!(server.ask(0).1, before);
}

#[test]
fn groups_of_replies_to_one_prompt_become_a_version() {
    let home = tempfile::tempdir().unwrap();
    let spec = chela_model::testing::TinySpec::default();
    chela_model::testing::write_tiny_llama(&home.path().join("model"), 1, &spec).unwrap();
    let server = Running::start(home.path());
    let status =
        |server: &Running| -> Value { serde_json::from_str(&server.get("/v1/status").1).unwrap() };
    let rules = json!({"algorithm": "grpo", "groups": 2, "max_staleness": 2, "reply_limit": null});
    assert_eq!(status(&server)["groups"], rules);
    let (_, before) = server.ask(0);
    // The same request again and again: each reply but the last counts as retried, and trains all the same.
    for (group, score) in [("a", 1), ("b", 0), ("a", 0), ("b", 3)] {
        let (completion, _) = server.ask(1);
        server.post(
            "/v1/feedback",
            &json!({ "completion_id": completion, "score": score, "group": { "id": group, "size": 2 } }),
        );
    }
    wait_for("the first version", || (server.served() == 1).then_some(()));
    assert_ne!(before, server.ask(0).1);
    let status = status(&server);
    let version = &status["profiles"][0]["versions"][0];
    assert_eq!(version["metrics"]["groups"], 2.0, "{version}");
    assert_eq!(version["metrics"]["samples"], 4.0, "{version}");
    assert_eq!(status["samples"]["consumed"], 4, "{status}");
}

#[test]
fn turns_recorded_elsewhere_are_learnt_once_and_only_by_the_model_that_made_them() {
    let home = tempfile::tempdir().unwrap();
    let spec = chela_model::testing::TinySpec::default();
    chela_model::testing::write_tiny_llama(&home.path().join("model"), 1, &spec).unwrap();
    let file = home.path().join("turns.jsonl");
    {
        let server = Running::start(home.path());
        let (completion, _) = server.ask(1);
        let said = json!({ "completion_id": completion, "score": 1 });
        server.post("/v1/feedback", &said);
        let sessions: Value = serde_json::from_str(&server.get("/v1/sessions").1).unwrap();
        let id = sessions["sessions"][0]["id"].clone();
        let exported = server.post("/rl/export_trajectories", &json!({ "session_id": id }));
        assert_eq!(exported["rows"][0]["rewards"], 1.0, "{exported}");
        std::fs::write(&file, format!("{exported}\n")).unwrap();
    }
    let elsewhere = home.path().join("elsewhere");
    let train = |file: &Path| {
        let file = file.to_str().unwrap();
        let mut command = chela(home.path(), &["--json", "train", "--from", file]);
        // Stands last, over the folder before.
        let folder = format!("data.dir={}", elsewhere.display());
        command.args(["--set", &folder]);
        command.output().unwrap()
    };
    let answer = |output: &std::process::Output| -> Value {
        let says = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{says}");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        serde_json::from_str(text.lines().next_back().unwrap()).unwrap()
    };
    let first = answer(&train(&file));
    assert_eq!(
        (&first["new"], &first["served"]),
        (&json!(1), &json!(1)),
        "{first}"
    );
    let again = answer(&train(&file));
    assert_eq!(
        (&again["new"], &again["known"]),
        (&json!(0), &json!(1)),
        "{again}"
    );
    assert_eq!(again["served"], 1);

    let mut other: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    other["tokenizer_hash"] = json!("another");
    other["rows"][0]["rewards"] = json!(-1.0);
    let foreign = home.path().join("foreign.jsonl");
    std::fs::write(&foreign, other.to_string()).unwrap();
    let refused = train(&foreign);
    let says = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success()
            && says.contains("another model")
            && says.contains("nothing was trained"),
        "{says}"
    );
}

#[test]
fn a_wrong_task_is_refused_before_anything_is_loaded() {
    let home = tempfile::tempdir().unwrap();
    let task = home.path().join("task.toml");
    std::fs::write(&task, "name = \"a\"\nkind = \"arithmetic\"\ndigit = 2\n").unwrap();
    for (args, says) in [
        (vec!["train", "--task", task.to_str().unwrap()], "digit"),
        (vec!["train", "--task", "chess"], "word-problems"),
        (
            vec!["train", "--task", "arithmetic", "--samples", "1"],
            "--samples",
        ),
        (vec!["train"], "--task"),
        (vec!["experiment", "learn", "--live", "0"], "--live"),
    ] {
        let output = chela(home.path(), &args).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && error.contains(says),
            "{args:?}: {error}"
        );
    }
}
