//! Losses by token, with the decoupled correction for stale or mismatching samplers.
//!
//! ρ = exp(logprob − proximal), w = exp(proximal − behavior) (decoupled objective: Fu et al., AReaL, arXiv 2505.24298); L_t is w_t times
//! what the [`Surrogate`] makes of ρ_t and A_t, a file for each. [`topk`] and [`hybrid`] look at several candidates of a position.

pub mod cispo;
pub mod clip;
pub mod distil;
pub mod gspo;
pub mod hybrid;
pub mod proximal;
pub mod regular;
pub mod reinforce;
pub mod sapo;
pub mod topk;
pub mod value;

pub use self::{clip::Clip, distil::Distil, proximal::Proximal, regular::Regular, sapo::Sapo};

use crate::{RlError, finite, same_length};

/// ln of the largest ratio that is computed; beyond it exp would overflow and every clip has long acted.
const MAX_LOG_RATIO: f32 = 20.0;

/// What w does to a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Correction {
    /// Tokens whose w lies outside are left out; inside, w multiplies.
    Mask {
        /// Smallest w.
        low: f32,
        /// Largest w.
        cap: f32,
    },
    /// w multiplies, at most this.
    Cap(f32),
}

impl Correction {
    /// What multiplies a token; `None` = the token is left out.
    fn of(self, w: f32) -> Option<f32> {
        match self {
            Self::Mask { low, cap } => (w >= low && w <= cap).then_some(w),
            Self::Cap(cap) => Some(w.min(cap)),
        }
    }
}

impl Default for Correction {
    fn default() -> Self {
        Self::Mask { low: 0.2, cap: 5.0 }
    }
}

/// How tokens of a batch add up to one loss.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Aggregation {
    /// Each trained token of the batch weighs the same.
    #[default]
    TokenMean,
    /// Each sample weighs the same.
    SequenceMean,
    /// Σ / (samples · this length) (Dr.GRPO, arXiv 2503.20783).
    Constant(f32),
}

/// Counts of a whole batch; known before the first sample is back-propagated, so that every split into micro-batches gives
/// the same update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSize {
    /// Samples.
    pub samples: usize,
    /// Tokens with mask 1, counted before w masks any.
    pub tokens: usize,
}

impl Aggregation {
    /// The weight of each token of a sample that has `tokens` trained tokens.
    pub fn token_weight(self, batch: BatchSize, tokens: usize) -> f32 {
        let per = |n: usize| if n == 0 { 0.0 } else { 1.0 / n as f32 };
        match self {
            Self::TokenMean => per(batch.tokens),
            Self::SequenceMean => per(batch.samples) * per(tokens),
            Self::Constant(length) => per(batch.samples) / length,
        }
    }
}

/// One sample's numbers, each `[N]`.
#[derive(Clone, Copy, Debug)]
pub struct TokenInputs<'a> {
    /// The learner's, now.
    pub logprobs: &'a [f32],
    /// At the start of the train step; equal to `logprobs` for one step a batch.
    pub proximal_logprobs: &'a [f32],
    /// While sampling.
    pub behavior_logprobs: &'a [f32],
    /// Credit.
    pub advantages: &'a [f32],
    /// Trained on.
    pub mask: &'a [bool],
}

/// Sums over tokens; divide by `tokens` for means.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LossStats {
    /// Weighted loss of the sample; add over a batch.
    pub loss: f64,
    /// Trained tokens.
    pub tokens: usize,
    /// Tokens that w masked.
    pub masked: usize,
    /// Tokens whose ratio the clip stopped.
    pub clipped: usize,
    /// ρ of each trained token, in no order that means anything.
    pub ratios: Vec<f32>,
    /// Σ |proximal − behavior|
    pub behavior_gap: f64,
}

impl LossStats {
    /// Adds another sample's.
    pub fn add(&mut self, other: &Self) {
        self.loss += other.loss;
        self.tokens += other.tokens;
        self.masked += other.masked;
        self.clipped += other.clipped;
        self.ratios.extend_from_slice(&other.ratios);
        self.behavior_gap += other.behavior_gap;
    }
}

/// What is made of a token's ratio and advantage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Surrogate {
    /// The larger of free and clipped; see [`clip`].
    Clip(Clip),
    /// The same with one ratio for the reply; see [`gspo`].
    Sequence(Clip),
    /// No ratio; see [`reinforce`].
    Reinforce,
    /// A clipped weight on the log-prob; see [`cispo`].
    Cispo(Clip),
    /// A soft gate instead of a clip; see [`sapo`].
    Sapo(Sapo),
}

impl Default for Surrogate {
    fn default() -> Self {
        Self::Clip(Clip::default())
    }
}

/// Loss of one token, its derivative by the token's log-prob, and whether a clip acted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenValue {
    /// L
    pub value: f32,
    /// dL/d(logprob)
    pub slope: f32,
    /// The ratio was outside.
    pub clipped: bool,
}

/// e^x where it is finite: beyond e^±20 every clip has long acted.
fn ratio_of(log_ratio: f32) -> f32 {
    log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
}

/// Loss of one sample and its derivative by each log-prob `[N]`. `weight` is [`Aggregation::token_weight`].
pub fn token_loss(
    surrogate: Surrogate,
    correction: Correction,
    weight: f32,
    inputs: &TokenInputs<'_>,
) -> Result<(Vec<f32>, LossStats), RlError> {
    let n = inputs.logprobs.len();
    same_length("proximal_logprobs", inputs.proximal_logprobs.len(), n)?;
    same_length("behavior_logprobs", inputs.behavior_logprobs.len(), n)?;
    same_length("advantages", inputs.advantages.len(), n)?;
    same_length("mask", inputs.mask.len(), n)?;
    finite("logprobs", inputs.logprobs)?;
    finite("proximal_logprobs", inputs.proximal_logprobs)?;
    finite("behavior_logprobs", inputs.behavior_logprobs)?;
    finite("advantages", inputs.advantages)?;
    let whole = gspo::ratio(inputs);
    let (mut derivative, mut stats) = (vec![0.0; n], LossStats::default());
    for (t, slot) in derivative.iter_mut().enumerate() {
        if !inputs.mask[t] {
            continue;
        }
        let (logprob, advantage) = (inputs.logprobs[t], inputs.advantages[t]);
        let gap = inputs.proximal_logprobs[t] - inputs.behavior_logprobs[t];
        let ratio = ratio_of(logprob - inputs.proximal_logprobs[t]);
        stats.tokens += 1;
        stats.ratios.push(ratio);
        stats.behavior_gap += f64::from(gap.abs());
        let (one, w) = match surrogate {
            // Its ratio is the one to the sampler: nothing is left to correct.
            Surrogate::Sapo(sapo) => {
                let ratio = ratio_of(logprob - inputs.behavior_logprobs[t]);
                (sapo::token(sapo, ratio, advantage), 1.0)
            }
            other => {
                let Some(w) = correction.of(ratio_of(gap)) else {
                    stats.masked += 1;
                    continue;
                };
                let one = match other {
                    Surrogate::Clip(clip) => clip::token(clip, ratio, advantage),
                    Surrogate::Sequence(clip) => clip::token(clip, whole, advantage),
                    Surrogate::Cispo(clip) => cispo::token(clip, ratio, (logprob, advantage)),
                    Surrogate::Reinforce | Surrogate::Sapo(_) => {
                        reinforce::token(logprob, advantage)
                    }
                };
                (one, w)
            }
        };
        stats.loss += f64::from(weight * w * one.value);
        stats.clipped += usize::from(one.clipped && advantage != 0.0);
        // w is not differentiated.
        *slot = weight * w * one.slope;
    }
    Ok((derivative, stats))
}

#[cfg(test)]
mod tests;
