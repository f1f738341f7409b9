//! One request's own state: what was asked, where it stands, and how its next token is drawn.

use crate::{error::kernel, pages::KvCache, prefix::CacheKey, rng::Rng, version::Held};
use chela_core::{
    EngineError, FinishReason, Flow, Priority, Profile, SampledToken, SamplingEvent,
    SamplingParams, TokenId,
};
use chela_kernels::{Kernels, SamplePolicy, sample_row, token_logprob};
use futures_channel::mpsc::UnboundedSender;
use std::collections::HashMap;

/// Below this temperature the likeliest token is taken.
const GREEDY: f32 = 0.01;
/// Below this, log-probs at the turn's temperature say nothing; temperature 1 is recorded.
const SHARP: f32 = 0.1;

/// A reply being made.
pub struct Reply<K: Kernels> {
    /// Version, pinned at arrival, and whose text it is.
    pub key: CacheKey,
    /// Its weights; kept alive by this request even when unloaded. Set when the request reaches the engine's thread.
    pub version: Held<K>,
    /// Prompt, then reply.
    pub tokens: Vec<TokenId>,
    /// Length of the prompt.
    pub prompt: usize,
    /// How to sample.
    pub params: SamplingParams,
    /// Most tokens of the reply, cut to the context.
    pub most: usize,
    /// To the client.
    pub events: UnboundedSender<Result<SamplingEvent, EngineError>>,
    /// Keys and values; `None` until admitted.
    pub cache: Option<KvCache<K>>,
    /// Prompt tokens that came from a cache.
    pub reused: usize,
    /// Set by the draw that ended it, or failed.
    pub over: Option<Result<FinishReason, EngineError>>,
    counts: HashMap<TokenId, u32>,
    rng: Rng,
    told: bool,
    forgotten: bool,
}

/// A request that nobody finished was lost with the engine's thread; its client must not wait, nor take it for complete.
impl<K: Kernels> Drop for Reply<K> {
    fn drop(&mut self) {
        if !self.told {
            let lost = EngineError::Stopped("the request was lost".to_owned());
            let _ = self.events.unbounded_send(Err(lost)); // or the client has gone away
        }
    }
}

impl<K: Kernels> Reply<K> {
    /// A request that has arrived.
    pub fn new(
        key: CacheKey,
        tokens: Vec<TokenId>,
        (params, most): (SamplingParams, usize),
        events: UnboundedSender<Result<SamplingEvent, EngineError>>,
    ) -> Self {
        let rng = Rng::new(params.seed);
        let forgotten = !params.keep;
        Self {
            key,
            version: None,
            prompt: tokens.len(),
            tokens,
            params,
            most,
            events,
            cache: None,
            reused: 0,
            over: None,
            counts: HashMap::new(),
            rng,
            told: false,
            forgotten,
        }
    }

    /// That profile's texts are to be forgotten: what this reply leaves is not kept, if it may be one of them.
    pub fn forget(&mut self, profile: &Profile) {
        self.forgotten |= self.key.may_be_of(profile);
    }

    /// Who is served when.
    pub fn whose(&self) -> (Priority, &Profile) {
        (self.params.priority, &self.key.version.profile)
    }

    /// The client went away.
    pub fn cancelled(&self) -> bool {
        self.events.is_closed()
    }

    /// The whole prompt is read and tokens are being sampled.
    pub fn decoding(&self) -> bool {
        self.tokens.len() > self.prompt
    }

    /// Says that the prompt is read.
    pub fn started(&self) {
        let version = self.key.version.clone();
        let event = SamplingEvent::Started {
            version,
            cached_tokens: self.reused,
        };
        let _ = self.events.unbounded_send(Ok(event)); // a client that went away is seen by `cancelled`
    }

    /// Draws the next token from its logits `[V]`; `Some` when the reply is over.
    pub fn draw(&mut self, logits: &mut [f32]) -> Result<Option<FinishReason>, EngineError> {
        let top = top_logprobs(logits, usize::from(self.params.top_logprobs))?;
        let plain = (self.edited() || self.params.guide.is_some()).then(|| logits.to_vec());
        let allowed = self.shape(logits);
        // A guide that only watches for stop strings masks nothing and leaves the distribution as it is.
        let shaped = self.edited() || allowed.is_some();
        let forced = allowed == Some(1);
        let p = &self.params;
        let policy = SamplePolicy {
            temperature: if p.temperature < GREEDY {
                0.0
            } else {
                p.temperature
            },
            top_p: p.top_p,
            top_k: p.top_k as usize,
            min_p: p.min_p,
        };
        let drawn = sample_row(logits, policy, self.rng.uniform()).map_err(|e| {
            EngineError::NotFinite(format!("the logits of {}: {e}", self.key.version))
        })?;
        let logprob_t1 = match &plain {
            Some(plain) => token_logprob(plain, drawn.id, 1.0).map_err(kernel)?,
            None => drawn.logprob_t1,
        };
        let behavior_logprob = if shaped || p.temperature < SHARP {
            logprob_t1
        } else {
            drawn.logprob
        };
        let id = drawn.id;
        let token = SampledToken {
            id,
            behavior_logprob,
            logprob_t1,
            kept_mass: drawn.kept_mass,
            forced,
            top,
        };
        self.tokens.push(id);
        *self.counts.entry(id).or_default() += 1;
        let _ = self.events.unbounded_send(Ok(SamplingEvent::Token(token)));
        if self.params.end_ids.contains(&id) {
            return Ok(Some(FinishReason::End));
        }
        if let Some(guide) = &mut self.params.guide
            && guide.accept(id) == Flow::Stop
        {
            return Ok(Some(FinishReason::Stopped));
        }
        Ok((self.tokens.len() - self.prompt >= self.most).then_some(FinishReason::Length))
    }

    fn edited(&self) -> bool {
        let p = &self.params;
        p.frequency_penalty != 0.0 || p.presence_penalty != 0.0 || !p.logit_bias.is_empty()
    }

    /// Penalties, bias, guide. Returns how many tokens a guide left.
    fn shape(&mut self, logits: &mut [f32]) -> Option<usize> {
        let p = &mut self.params;
        if p.frequency_penalty != 0.0 || p.presence_penalty != 0.0 {
            for (id, count) in &self.counts {
                if let Some(logit) = logits.get_mut(*id as usize) {
                    *logit -= p.frequency_penalty * *count as f32 + p.presence_penalty;
                }
            }
        }
        for (id, bias) in &p.logit_bias {
            if let Some(logit) = logits.get_mut(*id as usize) {
                *logit += bias;
            }
        }
        p.guide.as_mut().and_then(|g| g.mask(logits))
    }

    /// Says that the reply is over. Returns what may be kept of it.
    pub fn finish(mut self, reason: FinishReason) -> (CacheKey, Vec<TokenId>, Option<KvCache<K>>) {
        self.told = true;
        let _ = self
            .events
            .unbounded_send(Ok(SamplingEvent::Finished(reason)));
        let tokens = std::mem::take(&mut self.tokens);
        let cache = self.cache.take().filter(|_| !self.forgotten);
        (self.key.clone(), tokens, cache)
    }

    /// Says that the engine failed.
    pub fn fail(mut self, error: EngineError) {
        self.told = true;
        let _ = self.events.unbounded_send(Err(error));
    }
}

/// The likeliest ids at temperature 1.
fn top_logprobs(logits: &[f32], n: usize) -> Result<Vec<(TokenId, f32)>, EngineError> {
    if n == 0 {
        return Ok(Vec::new());
    }
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    let n = n.min(ids.len());
    let by = |a: &u32, b: &u32| {
        logits[*b as usize]
            .total_cmp(&logits[*a as usize])
            .then(a.cmp(b))
    };
    if n < ids.len() {
        ids.select_nth_unstable_by(n - 1, by);
        ids.truncate(n);
    }
    ids.sort_by(by);
    ids.into_iter()
        .map(|id| Ok((id, token_logprob(logits, id, 1.0).map_err(kernel)?)))
        .collect()
}
