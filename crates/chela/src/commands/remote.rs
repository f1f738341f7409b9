//! `status`, `session`, `feedback`: questions to the running server, found through `server.json`.

use crate::{
    cli::{FeedbackArgs, SessionAction},
    folder,
    keys::KeyFile,
    output::{Output, json_line},
};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::{path::Path, time::Duration};

/// Comparing versions and forgetting wait for the engine and for a step being made.
const PATIENCE: Duration = Duration::from_secs(600);

/// A running server, spoken to with the admin key of its data folder.
pub struct Remote {
    address: String,
    key: String,
    agent: ureq::Agent,
}

impl Remote {
    /// Finds it.
    pub fn find(data_dir: &Path) -> Result<Self> {
        let Some(note) = folder::running(data_dir) else {
            bail!(
                "no server runs on {}; start one with `chela serve`",
                data_dir.display()
            );
        };
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(PATIENCE))
            .http_status_as_error(false)
            .build();
        let key = KeyFile::of(data_dir).admin()?;
        Ok(Self {
            address: note.address,
            key,
            agent: config.into(),
        })
    }

    /// `http://host:port`
    pub fn address(&self) -> &str {
        &self.address
    }

    fn read(&self, mut answer: ureq::http::Response<ureq::Body>) -> Result<Value> {
        let status = answer.status().as_u16();
        let body: Value = answer
            .body_mut()
            .read_json()
            .context("the answer is not JSON")?;
        if status >= 400 {
            bail!(
                "{} ({status})",
                body["error"]["message"].as_str().unwrap_or("refused")
            );
        }
        Ok(body)
    }

    pub(super) fn get(&self, route: &str) -> Result<Value> {
        let request = self.agent.get(format!("{}{route}", self.address));
        let answer = request
            .header("authorization", format!("Bearer {}", self.key))
            .call();
        self.read(answer.with_context(|| format!("no answer from {}", self.address))?)
    }

    pub(super) fn post(&self, route: &str, body: &Value) -> Result<Value> {
        let request = self.agent.post(format!("{}{route}", self.address));
        let answer = request
            .header("authorization", format!("Bearer {}", self.key))
            .send_json(body);
        self.read(answer.with_context(|| format!("no answer from {}", self.address))?)
    }
}

/// `chela status`
pub fn status(remote: &Remote, output: &Output) -> Result<()> {
    let status = remote.get("/v1/status")?;
    print(output, &status)
}

/// `chela session …`
pub fn session(remote: &Remote, action: &SessionAction, output: &Output) -> Result<()> {
    match action {
        SessionAction::List => {
            let answer = remote.get("/v1/sessions")?;
            if output.json {
                return output.plain(&json_line(&answer));
            }
            for one in answer["sessions"].as_array().into_iter().flatten() {
                output.plain(&format!(
                    "{:<40}  {:<16}  {:>5} turns",
                    text(&one["id"]),
                    text(&one["profile"]),
                    one["turns"]
                ))?;
            }
            Ok(())
        }
        SessionAction::Show { id } => print(
            output,
            &remote.get(&format!("/v1/sessions/{}", encode(id)))?,
        ),
        SessionAction::End { id } => print(
            output,
            &remote.post(&format!("/v1/sessions/{}/end", encode(id)), &json!({}))?,
        ),
        SessionAction::Export { id } => {
            let body = json!({"session_id": id, "style": "individual"});
            output.plain(&json_line(&remote.post("/rl/export_trajectories", &body)?))
        }
    }
}

/// `chela feedback`
pub fn feedback(remote: &Remote, args: &FeedbackArgs, output: &Output) -> Result<()> {
    let mut body = json!({});
    body[if args.session { "session" } else { "turn" }] = json!(args.target);
    if let Some(score) = args.score {
        body["score"] = json!(score);
    }
    if let Some(text) = &args.text {
        body["text"] = json!(text);
    }
    print(output, &remote.post("/v1/feedback", &body)?)
}

pub(super) fn print(output: &Output, value: &Value) -> Result<()> {
    if output.json {
        output.plain(&json_line(value))
    } else {
        output.plain(&serde_json::to_string_pretty(value)?)
    }
}

pub(super) fn text(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

/// Percent-encodes all but unreserved characters, for ids in paths.
pub(super) fn encode(id: &str) -> String {
    id.bytes()
        .map(|b| {
            if b.is_ascii_alphanumeric() || b"-._~".contains(&b) {
                (b as char).to_string()
            } else {
                format!("%{b:02X}")
            }
        })
        .collect()
}
