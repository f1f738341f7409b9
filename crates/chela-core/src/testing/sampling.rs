//! The stream of one scripted reply.

use super::{
    engine::{FakeEngine, Resolved},
    model::hash_step,
};
use crate::*;
use futures_core::Stream;
use std::{
    collections::VecDeque,
    pin::Pin,
    task::{Context, Poll},
};

/// How far it is.
#[derive(PartialEq)]
pub(super) enum Stage {
    New,
    Started,
    /// The last token decided it.
    Over(FinishReason),
    Done,
}

pub(super) struct Running {
    pub engine: FakeEngine,
    pub resolved: Resolved,
    pub prefix: Vec<TokenId>,
    pub hash: u64,
    pub left: VecDeque<TokenId>,
    pub error: Option<EngineError>,
    pub params: SamplingParams,
    pub room: usize,
    pub cached_tokens: usize,
    pub yields_left: usize,
    pub stage: Stage,
}

impl Running {
    fn token(&mut self, id: TokenId) -> SampledToken {
        // As the contract has it: the turn's temperature, or 1 where that is nearly greedy or the logits were shaped.
        let shaped = self.params.frequency_penalty != 0.0
            || self.params.presence_penalty != 0.0
            || !self.params.logit_bias.is_empty();
        let temperature = if shaped || self.params.temperature < 0.1 {
            1.0
        } else {
            self.params.temperature
        };
        let top = match self.params.top_logprobs {
            0 => Vec::new(),
            k => self.resolved.top(&self.prefix, usize::from(k), 1.0),
        };
        let logprob = |t: f32| match &self.resolved.score {
            Some(score) => score(&self.resolved.policy, &self.prefix, id),
            None => self.resolved.model.position(self.hash, t).logprob(id),
        };
        let (behavior_logprob, logprob_t1) = (logprob(temperature), logprob(1.0));
        self.prefix.push(id);
        self.hash = hash_step(self.hash, id);
        SampledToken {
            id,
            behavior_logprob,
            logprob_t1,
            kept_mass: 1.0,
            forced: false,
            top,
        }
    }

    fn advance(&mut self) -> Option<Result<SamplingEvent, EngineError>> {
        match self.stage {
            Stage::New => {
                self.stage = Stage::Started;
                let version = self.resolved.version.clone();
                Some(Ok(SamplingEvent::Started {
                    version,
                    cached_tokens: self.cached_tokens,
                }))
            }
            Stage::Over(reason) => {
                self.stage = Stage::Done;
                Some(Ok(SamplingEvent::Finished(reason)))
            }
            Stage::Done => None,
            Stage::Started => Some(self.next_token()),
        }
    }

    /// How many tokens a guide leaves; a script that says another is wrong.
    fn allowed(&mut self, id: TokenId) -> Result<Option<usize>, EngineError> {
        let Some(guide) = &mut self.params.guide else {
            return Ok(None);
        };
        let mut logits = vec![0.0; self.resolved.model.vocabulary];
        let left = guide.mask(&mut logits);
        if logits.get(id as usize).is_some_and(|l| l.is_finite()) {
            return Ok(left);
        }
        self.stage = Stage::Done;
        let why = format!("the script's token {id} is not allowed here");
        Err(EngineError::Stopped(why))
    }

    fn next_token(&mut self) -> Result<SamplingEvent, EngineError> {
        if self.left.is_empty()
            && let Some(error) = self.error.take()
        {
            self.stage = Stage::Done;
            return Err(error);
        }
        let scripted = self.left.pop_front();
        let Some(id) = scripted.or(self.params.end_ids.first().copied()) else {
            self.stage = Stage::Done;
            return Ok(SamplingEvent::Finished(FinishReason::End));
        };
        let allowed = self.allowed(id)?;
        let mut token = self.token(id);
        token.forced = allowed == Some(1);
        self.room -= 1;
        if self.params.end_ids.contains(&id) {
            self.stage = Stage::Over(FinishReason::End);
        } else if self
            .params
            .guide
            .as_mut()
            .is_some_and(|g| g.accept(id) == Flow::Stop)
        {
            self.stage = Stage::Over(FinishReason::Stopped);
        } else if self.room == 0 {
            self.stage = Stage::Over(FinishReason::Length);
        }
        Ok(SamplingEvent::Token(token))
    }
}

impl Stream for Running {
    type Item = Result<SamplingEvent, EngineError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        match this.engine.poll_turn(cx, &mut this.yields_left) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(()) => Poll::Ready(this.advance()),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.engine.stream_over(self.stage == Stage::Done);
    }
}
