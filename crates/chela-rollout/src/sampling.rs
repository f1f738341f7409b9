//! From a verdict to a sample: the part that asks the engine.

use crate::{
    rollout::Rollout,
    samples::{self, Plan},
};
use chela_core::{
    Conversation, EngineError, Event, NewSample, OpenVerdict, PolicyRef, Priority, Prompt,
    SampleState, StoreError, TokenId, Turn, TurnStory, VerdictSource, Want,
};

/// Log-probs of the reply under the hinted and the plain prompt, each `[N]`.
struct Distilled {
    teacher: Vec<f32>,
    student: Vec<f32>,
}

/// Why there are none.
enum NoTeacher {
    /// Trying again after a restart is right.
    Later,
    /// There will never be any.
    Never(String),
}

impl Rollout {
    /// Settles one open verdict. `Ok(false)` = not now.
    pub(crate) async fn settle(&self, open: &OpenVerdict) -> Result<bool, StoreError> {
        let Some(story) = self.store.story(open.turn.id)? else {
            return Ok(true);
        };
        let (reward, hint) = match samples::plan(&story, open.id, &open.verdict, &self.config) {
            Plan::No(why) => return self.refused(open, &story, why).await,
            Plan::Sample { reward, hint } => (reward, hint),
        };
        let mut sample = NewSample {
            turn: open.turn.id,
            verdict: open.id,
            reward,
            explicit: open.verdict.source == VerdictSource::Explicit,
            hint: None,
            teacher_logprobs: None,
            student_logprobs: None,
            created: self.now(),
            group: open.verdict.group.clone(),
        };
        if let Some(hint) = hint {
            match self.distill(&open.turn, &hint).await {
                Ok(Distilled { teacher, student }) => {
                    sample.teacher_logprobs = Some(teacher);
                    sample.student_logprobs = Some(student);
                    sample.hint = Some(hint);
                }
                Err(NoTeacher::Later) => return Ok(false),
                Err(NoTeacher::Never(why)) => {
                    tracing::warn!(turn = %open.turn.id, "no teacher values: {why}");
                    match reward {
                        None => {
                            return self
                                .no_sample(open, format!("no teacher values: {why}"))
                                .await;
                        }
                        Some(0.0) if !self.config.keep_neutral => {
                            return self
                                .no_sample(open, format!("neutral, and no teacher values: {why}"))
                                .await;
                        }
                        Some(_) => {}
                    }
                }
            }
        }
        // Scoring took time: somebody may have spoken since, or the turn may be gone.
        let Some(story) = self.store.story(open.turn.id)? else {
            return Ok(true);
        };
        if let Some(why) = samples::outranked(&story, open.id, open.verdict.source) {
            return self.no_sample(open, why.to_owned()).await;
        }
        sample.created = self.now();
        self.store
            .append(vec![Event::Sample(Box::new(sample))])
            .await?;
        Ok(true)
    }

    /// No sample. An explicit reward that trains nothing (0, say) also takes back what a lower voice made of the turn.
    async fn refused(
        &self,
        open: &OpenVerdict,
        story: &TurnStory,
        why: String,
    ) -> Result<bool, StoreError> {
        let latest = samples::outranked(story, open.id, open.verdict.source).is_none();
        let explicit = open.verdict.source == VerdictSource::Explicit;
        let pending: Vec<_> = story
            .samples
            .iter()
            .filter(|(.., state)| *state == SampleState::Pending)
            .map(|(id, ..)| *id)
            .collect();
        if latest && explicit && open.verdict.reward.is_some() && !pending.is_empty() {
            let taken_back = "an explicit verdict took its place".to_owned();
            let events = vec![
                Event::NoSample {
                    verdict: open.id,
                    why: why.clone(),
                },
                Event::Dropped {
                    samples: pending,
                    why: taken_back,
                },
            ];
            match self.store.append(events).await {
                // Leased at this very moment: it is on its way into a step.
                Err(StoreError::Conflict(_)) => {}
                other => return other.map(|()| true),
            }
        }
        self.no_sample(open, why).await
    }

    async fn no_sample(&self, open: &OpenVerdict, why: String) -> Result<bool, StoreError> {
        self.store
            .append(vec![Event::NoSample {
                verdict: open.id,
                why,
            }])
            .await?;
        Ok(true)
    }

    /// Teacher and student are the same model, version and engine at temperature 1; only the hint differs.
    async fn distill(&self, turn: &Turn, hint: &str) -> Result<Distilled, NoTeacher> {
        let conversation = Conversation {
            messages: turn.messages.clone(),
            tools: turn.tools.clone(),
            template_args: None,
        };
        let render = |hint: &str| {
            self.chat
                .render_hinted(&conversation, hint)
                .map_err(|e| NoTeacher::Never(e.to_string()))
        };
        let hinted = samples::hinted_prompt(&turn.prompt, &render("")?, render(hint)?);
        let (teacher, student) = futures_util::future::try_join(
            self.score_reply(turn, &hinted),
            self.score_reply(turn, &turn.prompt),
        )
        .await?;
        Ok(Distilled { teacher, student })
    }

    async fn score_reply(&self, turn: &Turn, prompt: &[TokenId]) -> Result<Vec<f32>, NoTeacher> {
        let policy = match turn.version.number {
            0 => PolicyRef::Base,
            _ => PolicyRef::Version(turn.version.clone()),
        };
        let tokens = [prompt, turn.reply.tokens()].concat();
        let want = Want {
            priority: Priority::Judge,
            temperature: 1.0,
            ..Want::default()
        };
        let scored = self
            .engine
            .score(policy, Prompt { tokens }, prompt.len(), want)
            .await;
        let logprobs = match scored {
            Ok(scored) => scored.logprobs,
            Err(EngineError::Stopped(_)) => return Err(NoTeacher::Later),
            Err(error) => return Err(NoTeacher::Never(error.to_string())),
        };
        let n = turn.reply.len();
        if logprobs.len() != n {
            return Err(NoTeacher::Never(format!(
                "{} values for {n} tokens",
                logprobs.len()
            )));
        }
        if !logprobs.iter().all(|l| l.is_finite()) {
            return Err(NoTeacher::Never("values that are not finite".to_owned()));
        }
        Ok(logprobs)
    }
}
