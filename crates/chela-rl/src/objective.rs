//! The clipped surrogate with the decoupled correction for stale or mismatching samplers.
//!
//! ρ = exp(logprob − proximal), w = exp(proximal − behavior) (decoupled objective: Fu et al., AReaL, arXiv 2505.24298):
//! L_t = w_t · max(−ρ_t A_t, −clip(ρ_t, 1 − ε_lo, 1 + ε_hi) A_t) (Schulman et al., arXiv 1707.06347; asymmetric ε: DAPO,
//! arXiv 2503.14476), bounded by c·|A_t| for A_t < 0 when dual clip is set (Ye et al., arXiv 1912.09729).

use crate::{RlError, finite, same_length};

/// ln of the largest ratio that is computed; beyond it exp would overflow and every clip has long acted.
const MAX_LOG_RATIO: f32 = 20.0;

/// ε and the dual clip.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clip {
    /// ε_lo
    pub low: f32,
    /// ε_hi
    pub high: f32,
    /// c > 1
    pub dual: Option<f32>,
}

impl Default for Clip {
    fn default() -> Self {
        Self {
            low: 0.2,
            high: 0.28,
            dual: None,
        }
    }
}

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
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LossStats {
    /// Weighted loss of the sample; add over a batch.
    pub loss: f64,
    /// Trained tokens.
    pub tokens: usize,
    /// Tokens that w masked.
    pub masked: usize,
    /// Tokens whose ratio the clip stopped.
    pub clipped: usize,
    /// Σ ρ
    pub ratio: f64,
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
        self.ratio += other.ratio;
        self.behavior_gap += other.behavior_gap;
    }
}

/// The surrogate at one token and its derivative by ρ.
fn surrogate(clip: Clip, ratio: f32, advantage: f32) -> (f32, f32) {
    let free = -ratio * advantage;
    let bounded = -ratio.clamp(1.0 - clip.low, 1.0 + clip.high) * advantage;
    let (mut value, mut slope) = if free >= bounded {
        (free, -advantage)
    } else {
        (bounded, 0.0)
    };
    if let (Some(c), true) = (clip.dual, advantage < 0.0) {
        let most = c * advantage.abs();
        if value > most {
            (value, slope) = (most, 0.0);
        }
    }
    (value, slope)
}

/// Loss of one sample and its derivative by each log-prob `[N]`. `weight` is [`Aggregation::token_weight`].
pub fn token_loss(
    clip: Clip,
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
    let mut derivative = vec![0.0; n];
    let mut stats = LossStats::default();
    for (t, slot) in derivative.iter_mut().enumerate() {
        if !inputs.mask[t] {
            continue;
        }
        let gap = inputs.proximal_logprobs[t] - inputs.behavior_logprobs[t];
        let w = gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp();
        let log_ratio = inputs.logprobs[t] - inputs.proximal_logprobs[t];
        let ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp();
        stats.tokens += 1;
        stats.ratio += f64::from(ratio);
        stats.behavior_gap += f64::from(gap.abs());
        let w = match correction {
            Correction::Mask { low, cap } if w < low || w > cap => {
                stats.masked += 1;
                continue;
            }
            Correction::Mask { .. } => w,
            Correction::Cap(cap) => w.min(cap),
        };
        let (value, slope) = surrogate(clip, ratio, inputs.advantages[t]);
        stats.loss += f64::from(weight * w * value);
        stats.clipped += usize::from(slope == 0.0 && inputs.advantages[t] != 0.0);
        // d(value)/d(logprob) = slope · ρ, since dρ/d(logprob) = ρ. w is not differentiated.
        *slot = weight * w * slope * ratio;
    }
    Ok((derivative, stats))
}

#[cfg(test)]
#[path = "objective_tests.rs"]
mod tests;
