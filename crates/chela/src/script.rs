//! `serve --engine script:FILE`: an engine that says what a file tells it, for tests of everything around a model.
//!
//! The file holds one JSON object a line (`#` begins a comment line). A request gets the first line whose `when` is found in
//! its prompt and that was used fewer than `times`. Text becomes ids of the real tokenizer, control tokens included; log-probs
//! are the line's, or made from the ids for texts that are scored, and mean nothing.

use anyhow::{Context, Result, bail};
use chela_chat::Chat;
use chela_core::{
    BoxFuture, EngineError, EngineInfo, FinishReason, Flow, PolicyEngine, PolicyRef, PolicyVersion,
    Profile, Prompt, SampledToken, Sampling, SamplingEvent, SamplingParams, Scored, TokenId, Want,
    Weights,
};
use futures_util::stream;
use regex::Regex;
use serde::Deserialize;
use std::{
    collections::VecDeque,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

/// One scripted reply.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    /// Regular expression on the prompt's text, control tokens left out; none = any prompt.
    #[serde(default)]
    when: Option<String>,
    /// How often it may be used; none = always.
    #[serde(default)]
    times: Option<usize>,
    /// What is said.
    #[serde(default)]
    text: String,
    /// Log-prob of each token.
    #[serde(default = "certain")]
    logprob: f32,
    /// Milliseconds until the prompt is read.
    #[serde(default)]
    first_ms: u64,
    /// Milliseconds before each token.
    #[serde(default)]
    token_ms: u64,
    /// The reply is cut after the text, as by the context's end, instead of ending.
    #[serde(default)]
    cut: bool,
    /// Refuses the request with this before anything is said.
    #[serde(default)]
    refuse: Option<String>,
    /// Fails with this, after `after` tokens or the whole text.
    #[serde(default)]
    fail: Option<String>,
    /// Says nothing more after `after` tokens or the whole text, and never ends.
    #[serde(default)]
    hang: bool,
    /// Tokens before `fail` or `hang`.
    #[serde(default)]
    after: Option<usize>,
}

fn certain() -> f32 {
    -0.1
}

struct Scripted {
    line: Line,
    when: Option<Regex>,
    tokens: Vec<TokenId>,
    used: usize,
}

/// The engine. It cannot learn: `load` refuses, and there are no learners.
pub struct ScriptEngine {
    info: EngineInfo,
    chat: Arc<Chat>,
    lines: Mutex<Vec<Scripted>>,
}

impl ScriptEngine {
    /// Reads the file.
    pub fn open(path: &Path, info: EngineInfo, chat: Arc<Chat>) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the script {}", path.display()))?;
        let mut lines = Vec::new();
        for (i, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let scripted =
                scripted(line, &chat).with_context(|| format!("{}:{}", path.display(), i + 1))?;
            lines.push(scripted);
        }
        if lines.is_empty() {
            bail!(
                "the script {} holds no reply; write one JSON object a line, like {{\"text\": \"Hello.\"}}",
                path.display()
            );
        }
        Ok(Self {
            info,
            chat,
            lines: Mutex::new(lines),
        })
    }

    /// The reply to a prompt, taken from its line.
    fn choose(&self, prompt: &Prompt) -> Result<(Line, Vec<TokenId>), EngineError> {
        let text = self.chat.decode(&prompt.tokens);
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let found = lines.iter_mut().find(|s| {
            s.line.times.is_none_or(|times| s.used < times)
                && s.when.as_ref().is_none_or(|when| when.is_match(&text))
        });
        let Some(found) = found else {
            return Err(EngineError::Stopped(
                "no line of the script answers this prompt".to_owned(),
            ));
        };
        found.used += 1;
        Ok((found.line.clone(), found.tokens.clone()))
    }

    fn check(&self, tokens: &[TokenId]) -> Result<(), EngineError> {
        let (n, context) = (tokens.len(), self.info.context_length);
        if n == 0 {
            return Err(EngineError::Shape("an empty prompt".to_owned()));
        }
        if n > context {
            return Err(EngineError::ContextLength { prompt: n, context });
        }
        let known = self.info.vocabulary;
        match tokens.iter().find(|t| **t as usize >= known) {
            Some(token) => Err(EngineError::Token(*token, known)),
            None => Ok(()),
        }
    }
}

fn scripted(line: &str, chat: &Chat) -> Result<Scripted> {
    let line: Line = serde_json::from_str(line).context("not a scripted reply")?;
    if !(line.logprob.is_finite() && line.logprob <= 0.0) {
        bail!("logprob {} must be at most 0", line.logprob);
    }
    let when = match &line.when {
        Some(pattern) => Some(Regex::new(pattern).context("`when` is no regular expression")?),
        None => None,
    };
    let tokens = chat.encode_rendered(&line.text)?;
    Ok(Scripted {
        line,
        when,
        tokens,
        used: 0,
    })
}

/// A made-up log-prob: the same for the same neighbours, never 0.
fn made_up(before: TokenId, token: TokenId) -> f32 {
    let mixed = (u64::from(before) << 32 | u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    -0.05 - (mixed >> 40) as f32 / (1u32 << 24) as f32 * 3.0
}

enum Stage {
    New,
    Started,
    Over(FinishReason),
    Done,
}

struct Reply {
    line: Line,
    left: VecDeque<TokenId>,
    said: usize,
    room: usize,
    params: SamplingParams,
    version: PolicyVersion,
    stage: Stage,
}

impl Reply {
    async fn next(&mut self) -> Option<Result<SamplingEvent, EngineError>> {
        match self.stage {
            Stage::New => {
                pause(self.line.first_ms).await;
                self.stage = Stage::Started;
                Some(Ok(SamplingEvent::Started {
                    version: self.version.clone(),
                    cached_tokens: 0,
                }))
            }
            Stage::Over(reason) => {
                self.stage = Stage::Done;
                Some(Ok(SamplingEvent::Finished(reason)))
            }
            Stage::Done => None,
            Stage::Started => Some(self.token().await),
        }
    }

    async fn token(&mut self) -> Result<SamplingEvent, EngineError> {
        let due = match self.line.after {
            Some(after) => self.said >= after,
            None => self.left.is_empty(),
        };
        if due && self.line.hang {
            std::future::pending::<()>().await;
        }
        if let (true, Some(why)) = (due, &self.line.fail) {
            self.stage = Stage::Done;
            return Err(EngineError::Stopped(why.clone()));
        }
        pause(self.line.token_ms).await;
        let end = self.params.end_ids.first().copied();
        let next = match self.left.pop_front() {
            Some(id) => Some(id),
            None if self.line.cut => {
                self.stage = Stage::Done;
                return Ok(SamplingEvent::Finished(FinishReason::Length));
            }
            None => end,
        };
        let Some(id) = next else {
            self.stage = Stage::Done;
            return Ok(SamplingEvent::Finished(FinishReason::End));
        };
        self.said += 1;
        self.room -= 1;
        let ended = self.params.end_ids.contains(&id);
        let stopped = !ended
            && self
                .params
                .guide
                .as_mut()
                .is_some_and(|g| g.accept(id) == Flow::Stop);
        if ended {
            self.stage = Stage::Over(FinishReason::End);
        } else if stopped {
            self.stage = Stage::Over(FinishReason::Stopped);
        } else if self.room == 0 {
            self.stage = Stage::Over(FinishReason::Length);
        }
        let top = match self.params.top_logprobs {
            0 => Vec::new(),
            _ => vec![(id, self.line.logprob)],
        };
        Ok(SamplingEvent::Token(SampledToken {
            id,
            behavior_logprob: self.line.logprob,
            logprob_t1: self.line.logprob,
            kept_mass: 1.0,
            forced: false,
            top,
        }))
    }
}

async fn pause(ms: u64) {
    if ms > 0 {
        tokio::time::sleep(Duration::from_millis(ms)).await;
    }
}

impl PolicyEngine for ScriptEngine {
    fn info(&self) -> EngineInfo {
        self.info.clone()
    }

    fn served(&self, profile: &Profile) -> PolicyVersion {
        PolicyVersion::base(profile.clone())
    }

    fn sample(
        &self,
        policy: PolicyRef,
        prompt: Prompt,
        params: SamplingParams,
    ) -> Result<Sampling, EngineError> {
        let version = match policy {
            PolicyRef::Base => PolicyVersion::base(Profile::default()),
            PolicyRef::Served(profile) => PolicyVersion::base(profile),
            PolicyRef::Version(version) if version.number == 0 => version,
            PolicyRef::Version(version) => return Err(EngineError::NotLoaded(version)),
        };
        self.check(&prompt.tokens)?;
        let room = self.info.context_length - prompt.tokens.len();
        if room == 0 {
            return Err(EngineError::ContextLength {
                prompt: prompt.tokens.len(),
                context: self.info.context_length,
            });
        }
        let (line, tokens) = self.choose(&prompt)?;
        if let Some(why) = line.refuse {
            return Err(EngineError::Stopped(why));
        }
        let reply = Reply {
            left: tokens.into(),
            said: 0,
            room: room.min(params.max_tokens),
            line,
            params,
            version,
            stage: Stage::New,
        };
        let events = stream::unfold(reply, |mut reply| async move {
            let event = reply.next().await?;
            Some((event, reply))
        });
        Ok(Box::pin(events))
    }

    fn score(
        &self,
        _policy: PolicyRef,
        prompt: Prompt,
        from: usize,
        want: Want,
    ) -> BoxFuture<'static, Result<Scored, EngineError>> {
        let scored = self.check(&prompt.tokens).and_then(|()| {
            if from == 0 || from > prompt.tokens.len() {
                let n = prompt.tokens.len();
                return Err(EngineError::Shape(format!("from {from} of {n} tokens")));
            }
            if want.top_k > 0 || want.candidates.is_some() || want.entropy {
                let what = "candidates, top-k and entropy of a scripted engine";
                return Err(EngineError::Unsupported(what));
            }
            let pairs = prompt.tokens[from - 1..].windows(2);
            Ok(Scored {
                logprobs: pairs.map(|p| made_up(p[0], p[1])).collect(),
                ..Scored::default()
            })
        });
        Box::pin(std::future::ready(scored))
    }

    fn load(
        &self,
        _version: PolicyVersion,
        _weights: Weights,
    ) -> BoxFuture<'static, Result<String, EngineError>> {
        let error = EngineError::Unsupported("weights of a scripted engine");
        Box::pin(std::future::ready(Err(error)))
    }

    fn serve(&self, version: &PolicyVersion) -> Result<(), EngineError> {
        match version.number {
            0 => Ok(()),
            _ => Err(EngineError::NotLoaded(version.clone())),
        }
    }

    fn register(&self, _version: PolicyVersion, _weights: Weights, _hash: Option<String>) {}

    fn unload(&self, _version: &PolicyVersion) {}

    fn forget_texts(&self, _profile: &Profile) {}

    fn health(&self) -> Result<(), String> {
        Ok(())
    }
}
