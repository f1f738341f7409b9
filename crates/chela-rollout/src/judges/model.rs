//! The judge that asks a model: m votes for the score, then m for a hint; every vote is kept as it came.

use crate::{
    judges::{quote, votes},
    validators::cut,
};
use chela_core::{
    BoxFuture, Judge, JudgeCase, JudgeError, Message, Role, Score, TextModel, TextRequest, Verdict,
    VerdictSource, Vote, VoteKind,
};
use futures_util::future::join_all;
use std::{sync::Arc, time::Duration};

const SCORE_PROMPT: &str = include_str!("../prompts/score.txt");
const HINT_PROMPT: &str = include_str!("../prompts/hint.txt");
/// Longest piece of the next state kept as evidence.
const EVIDENCE: usize = 500;

/// How a model is asked.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelJudgeConfig {
    /// m: votes for the score, and again for the hint. Default 3; 1 is right for the model itself on a CPU.
    pub votes: usize,
    /// Most tokens of a vote. Default 4096; 512 for the model itself.
    pub max_tokens: usize,
    /// Sampling temperature of votes. Default 0.6.
    pub temperature: f32,
    /// How long one vote may take. Default 2 minutes.
    pub vote_timeout: Duration,
    /// Most hints of a verdict. Default 3.
    pub max_hints: usize,
}

impl Default for ModelJudgeConfig {
    fn default() -> Self {
        Self {
            votes: 3,
            max_tokens: 4096,
            temperature: 0.6,
            vote_timeout: Duration::from_secs(120),
            max_hints: 3,
        }
    }
}

impl ModelJudgeConfig {
    /// Right for the model itself: one vote, 512 tokens.
    pub fn own() -> Self {
        Self {
            votes: 1,
            max_tokens: 512,
            ..Self::default()
        }
    }
}

/// Asks a [`TextModel`].
pub struct ModelJudge {
    name: String,
    model: Arc<dyn TextModel>,
    config: ModelJudgeConfig,
}

impl ModelJudge {
    /// `name` stands in verdicts: `self`, `openai`.
    pub fn new(
        name: impl Into<String>,
        model: Arc<dyn TextModel>,
        config: ModelJudgeConfig,
    ) -> Self {
        Self {
            name: name.into(),
            model,
            config,
        }
    }

    /// All votes of one kind. Votes that failed are void; when all failed the judge is down.
    async fn ask(&self, case: &JudgeCase, kind: VoteKind) -> Result<Vec<Vote>, JudgeError> {
        let mut asked = Vec::new();
        for i in 0..self.config.votes.max(1) {
            asked.push(self.vote(self.request(case, kind, i as u64)?));
        }
        let mut answered = 0;
        let mut last = JudgeError::Failed("no vote was asked for".to_owned());
        let mut votes = Vec::new();
        for answer in join_all(asked).await {
            match answer {
                Ok(raw) => {
                    answered += 1;
                    votes.push(read(kind, raw));
                }
                Err(error) => {
                    let raw = format!("failed: {error}");
                    votes.push(Vote {
                        kind,
                        raw,
                        score: None,
                        hint: None,
                    });
                    last = error;
                }
            }
        }
        if answered == 0 { Err(last) } else { Ok(votes) }
    }

    async fn vote(&self, request: TextRequest) -> Result<String, JudgeError> {
        let limit = self.config.vote_timeout;
        let milliseconds = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        tokio::time::timeout(limit, self.model.complete(request))
            .await
            .unwrap_or(Err(JudgeError::Timeout(milliseconds)))
    }

    fn request(
        &self,
        case: &JudgeCase,
        kind: VoteKind,
        index: u64,
    ) -> Result<TextRequest, JudgeError> {
        let delimiter = quote::delimiter()?;
        let (prompt, salt) = match kind {
            VoteKind::Score => (SCORE_PROMPT, 0),
            VoteKind::Hint => (HINT_PROMPT, 1 << 32),
        };
        let instructions = prompt.replace("{{delimiter}}", &delimiter);
        Ok(TextRequest {
            messages: vec![
                Message::system(instructions.trim()),
                Message::user(quote::case(case, &delimiter)),
            ],
            max_tokens: self.config.max_tokens,
            temperature: self.config.temperature,
            seed: case.turn.0.wrapping_add(salt + index),
        })
    }
}

fn read(kind: VoteKind, raw: String) -> Vote {
    let (score, hint) = match kind {
        VoteKind::Score => (votes::parse_score(&raw), None),
        VoteKind::Hint => votes::parse_hint(&raw),
    };
    Vote {
        kind,
        raw,
        score,
        hint,
    }
}

impl Judge for ModelJudge {
    fn name(&self) -> &str {
        &self.name
    }

    fn judge<'a>(
        &'a self,
        case: &'a JudgeCase,
    ) -> BoxFuture<'a, Result<Option<Verdict>, JudgeError>> {
        Box::pin(async move {
            let mut all = self.ask(case, VoteKind::Score).await?;
            let scores: Vec<_> = all.iter().map(|v| v.score).collect();
            let score = votes::majority(&scores);
            let mut hints = Vec::new();
            // Who was content taught nothing that the reply lacked.
            if score != Some(Score::Good) {
                let asked = self.ask(case, VoteKind::Hint).await?;
                let given: Vec<String> = asked.iter().filter_map(|v| v.hint.clone()).collect();
                hints = votes::usable_hints(&given, self.config.max_hints);
                all.extend(asked);
            }
            Ok(Some(Verdict {
                judge: self.name.clone(),
                source: VerdictSource::Judge,
                reward: score.map(Score::value),
                hints,
                evidence: evidence(case),
                votes: all,
                group: None,
            }))
        })
    }
}

/// The words a verdict rests on: the user's, else the tools'.
fn evidence(case: &JudgeCase) -> Option<String> {
    let of = |role: Role| case.next.messages.iter().find(|m| m.role == role);
    of(Role::User)
        .or_else(|| of(Role::Tool))
        .map(|m| cut(m.content.trim(), EVIDENCE))
}
