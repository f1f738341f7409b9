//! The few calls of the public API that experiments need.

use crate::{LabError, standing::Standing};
use serde_json::{Value, json};
use std::time::Duration;

/// A running server and the key of its administrator.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// `http://host:port`
    pub url: String,
    /// Admin key.
    pub admin_key: String,
    /// Name of the base model.
    pub base_model: String,
}

/// Who asks: a profile, and the key that selects it.
#[derive(Clone, Debug)]
pub struct Member {
    /// Name of the profile.
    pub profile: String,
    /// Its key, of scope feedback; `None` = requests are sent without one, which is the default profile.
    pub key: Option<String>,
}

impl Default for Member {
    fn default() -> Self {
        Self {
            profile: "default".to_owned(),
            key: None,
        }
    }
}

/// One message on the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    /// `system`, `user` or `assistant`.
    pub role: &'static str,
    /// The text.
    pub text: String,
}

/// How to ask.
#[derive(Clone, Debug)]
pub struct Ask<'a> {
    /// Session id.
    pub session: &'a str,
    /// The version that answers; `None` = the served one.
    pub version: Option<u64>,
    /// Sent as `X-Turn-Type` when set.
    pub kind: Option<&'a str>,
    /// The last request of its session.
    pub done: bool,
    /// The conversation.
    pub messages: &'a [Said],
    /// 0 = greedy.
    pub temperature: f64,
    /// Most tokens.
    pub max_tokens: usize,
    /// Sampling seed.
    pub seed: u64,
}

/// What came back.
#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    /// Text.
    pub text: String,
    /// Ended by itself (`finish_reason` is `stop`).
    pub ended: bool,
    /// Tokens of the reply.
    pub tokens: usize,
    /// Version that answered.
    pub version: u64,
    /// Session it was put into.
    pub session: String,
    /// The turn; the first one of several choices.
    pub turn: String,
}

/// Log-probs of a recorded reply.
#[derive(Clone, Debug, PartialEq)]
pub struct Recorded {
    /// Prompt and reply.
    pub ids: Vec<u64>,
    /// Index of the first reply token.
    pub start: usize,
    /// The reply's log-probs as they were sampled: at the turn's temperature, or at 1 for a greedy turn.
    pub logprobs: Vec<f64>,
}

/// Speaks to one server as one profile.
#[derive(Clone, Debug)]
pub struct Client {
    endpoint: Endpoint,
    member: Member,
    agent: ureq::Agent,
}

impl Client {
    /// A client without a key; nothing is sent yet.
    pub fn new(endpoint: Endpoint) -> Self {
        Self::of(endpoint, Member::default())
    }

    /// A client of that profile.
    pub fn of(endpoint: Endpoint, member: Member) -> Self {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(Duration::from_secs(600)))
            .http_status_as_error(false)
            .build();
        Self {
            endpoint,
            member,
            agent: config.into(),
        }
    }

    /// Where it speaks to.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// As whom.
    pub fn profile(&self) -> &str {
        &self.member.profile
    }

    fn admin(&self) -> String {
        format!("Bearer {}", self.endpoint.admin_key)
    }

    fn post(
        &self,
        route: &str,
        headers: &[(&str, &str)],
        body: &Value,
    ) -> Result<(ureq::http::HeaderMap, Value), LabError> {
        let mut request = self.agent.post(format!("{}{route}", self.endpoint.url));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let answer = request
            .send_json(body)
            .map_err(|e| LabError::Http(e.to_string()))?;
        Self::read(route, answer)
    }

    fn get(&self, route: &str, bearer: &str) -> Result<Value, LabError> {
        let request = self.agent.get(format!("{}{route}", self.endpoint.url));
        let answer = request
            .header("authorization", bearer)
            .call()
            .map_err(|e| LabError::Http(e.to_string()))?;
        Ok(Self::read(route, answer)?.1)
    }

    fn read(
        route: &str,
        mut answer: ureq::http::Response<ureq::Body>,
    ) -> Result<(ureq::http::HeaderMap, Value), LabError> {
        let status = answer.status().as_u16();
        let body: Value = answer
            .body_mut()
            .read_json()
            .map_err(|e| LabError::Http(format!("{route}: status {status}, {e}")))?;
        if status >= 400 {
            let message = body["error"]["message"]
                .as_str()
                .unwrap_or("no message")
                .to_owned();
            return Err(LabError::Refused {
                status,
                route: route.to_owned(),
                message,
            });
        }
        Ok((answer.headers().clone(), body))
    }

    /// One chat completion, as any agent would ask for it.
    pub fn chat(&self, ask: &Ask<'_>) -> Result<Reply, LabError> {
        let messages: Vec<Value> = ask
            .messages
            .iter()
            .map(|m| json!({"role": m.role, "content": m.text}))
            .collect();
        let base = &self.endpoint.base_model;
        let model = ask
            .version
            .map_or_else(|| base.clone(), |v| format!("{base}@{v}"));
        let body = json!({
            "model": model, "messages": messages, "temperature": ask.temperature,
            "max_tokens": ask.max_tokens, "seed": ask.seed,
        });
        let own = self.member.key.as_ref().map(|key| format!("Bearer {key}"));
        let mut headers = vec![("x-session-id", ask.session)];
        headers.extend(own.as_deref().map(|bearer| ("authorization", bearer)));
        headers.extend(ask.kind.map(|kind| ("x-turn-type", kind)));
        if ask.done {
            headers.push(("x-session-done", "true"));
        }
        let (headers, body) = self.post("/v1/chat/completions", &headers, &body)?;
        let choice = &body["choices"][0];
        let header = |name: &str| {
            headers
                .get(name)
                .and_then(|v| v.to_str().ok())
                .unwrap_or_default()
                .to_owned()
        };
        let missing = |what: &str| LabError::Http(format!("a chat completion without {what}"));
        let version = header("x-chela-policy-version");
        let number = version.rsplit('@').next().and_then(|n| n.parse().ok());
        Ok(Reply {
            text: choice["message"]["content"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
            ended: choice["finish_reason"] == "stop",
            tokens: body["usage"]["completion_tokens"]
                .as_u64()
                .ok_or_else(|| missing("usage"))? as usize,
            version: number.ok_or_else(|| missing("x-chela-policy-version"))?,
            session: header("x-chela-session"),
            turn: header("x-chela-turn")
                .split(',')
                .next()
                .unwrap_or_default()
                .to_owned(),
        })
    }

    /// The ids of the last recorded reply of a session of the default profile, which is the administrator's.
    pub fn recorded(&self, session: &str) -> Result<Recorded, LabError> {
        let bearer = self.admin();
        let body = json!({"session_id": session, "style": "individual"});
        let headers = [("authorization", bearer.as_str())];
        let (_, answer) = self.post("/rl/export_trajectories", &headers, &body)?;
        let rows = answer["rows"].as_array().or_else(|| answer.as_array());
        let row = rows
            .and_then(|r| r.last())
            .ok_or_else(|| LabError::Http(format!("session {session} has no recorded turn")))?;
        let numbers = |name: &str| -> Vec<u64> {
            row[name]
                .as_array()
                .map(|a| {
                    a.iter()
                        .map(|v| v.as_u64().unwrap_or(u64::from(v == &json!(true))))
                        .collect()
                })
                .unwrap_or_default()
        };
        let mask = numbers("loss_mask");
        let start = mask.iter().position(|m| *m == 1);
        let start = start.ok_or_else(|| LabError::Http("a row without reply".to_owned()))?;
        let logprobs = row["logprobs"].as_array().into_iter().flatten();
        Ok(Recorded {
            ids: numbers("input_ids"),
            start,
            logprobs: logprobs.skip(start).filter_map(Value::as_f64).collect(),
        })
    }

    /// Log-probs of the reply's tokens under a model name (`<base>`'s versions, or `<base>:side` for the base weights).
    pub fn logprobs(&self, model: &str, recorded: &Recorded) -> Result<Vec<f64>, LabError> {
        let bearer = self.admin();
        let body = json!({
            "model": model, "prompt": recorded.ids, "echo": true, "logprobs": 0, "max_tokens": 0,
        });
        let headers = [("authorization", bearer.as_str())];
        let (_, answer) = self.post("/v1/completions", &headers, &body)?;
        let all = answer["choices"][0]["logprobs"]["token_logprobs"]
            .as_array()
            .ok_or_else(|| LabError::Http("a completion without token_logprobs".to_owned()))?;
        if all.len() != recorded.ids.len() {
            let (got, want) = (all.len(), recorded.ids.len());
            return Err(LabError::Http(format!("{got} log-probs for {want} tokens")));
        }
        all[recorded.start..]
            .iter()
            .map(|v| {
                v.as_f64()
                    .ok_or_else(|| LabError::Http("a missing log-prob".to_owned()))
            })
            .collect()
    }

    /// How the profile stands: its samples, its versions, and whether anything is under way. One question, so that the figures belong
    /// together. Asked with the profile's own key where there is one; the administrator's counts all profiles' samples.
    pub fn standing(&self) -> Result<Standing, LabError> {
        let bearer = match &self.member.key {
            Some(key) => format!("Bearer {key}"),
            None => self.admin(),
        };
        let status = self.get("/v1/status", &bearer)?;
        Standing::read(&self.member.profile, status)
    }

    /// Hands in what a turn was worth, as one of `size` replies to the same prompt.
    pub fn scored(
        &self,
        turn: &str,
        score: f64,
        (group, size): (&str, usize),
    ) -> Result<(), LabError> {
        let bearer = match &self.member.key {
            Some(key) => format!("Bearer {key}"),
            None => self.admin(),
        };
        let body = json!({"turn": turn, "score": score, "group": {"id": group, "size": size}});
        let headers = [("authorization", bearer.as_str())];
        self.post("/v1/feedback", &headers, &body).map(|_| ())
    }

    /// The sessions that a version's own step learnt from, one entry for each sample.
    pub fn taught(&self, version: u64) -> Result<Vec<String>, LabError> {
        let route = format!(
            "/v1/policy/versions/{version}?profile={}",
            self.member.profile
        );
        let view = self.get(&route, &self.admin())?;
        let lessons = view["lessons"].as_array();
        let lessons =
            lessons.ok_or_else(|| LabError::Http(format!("{route}: an answer without lessons")))?;
        Ok(lessons
            .iter()
            .map(|l| l["session"].as_str().unwrap_or_default().to_owned())
            .collect())
    }
}
