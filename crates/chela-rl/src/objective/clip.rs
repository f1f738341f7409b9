//! PPO's clipped surrogate: max(−ρA, −clip(ρ, 1 − ε_lo, 1 + ε_hi)A) (Schulman et al., arXiv 1707.06347), with two ε (DAPO, arXiv
//! 2503.14476), bounded by c·|A| for A < 0 when dual clip is set (Ye et al., arXiv 1912.09729).

use super::TokenValue;

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

/// The loss at one token; dρ/d(logprob) = ρ.
pub fn token(clip: Clip, ratio: f32, advantage: f32) -> TokenValue {
    let free = -ratio * advantage;
    let bounded = -ratio.clamp(1.0 - clip.low, 1.0 + clip.high) * advantage;
    let most = match clip.dual {
        Some(c) if advantage < 0.0 => c * advantage.abs(),
        _ => f32::INFINITY,
    };
    let value = free.max(bounded).min(most);
    let clipped = free < bounded || free > most;
    TokenValue {
        value,
        slope: if clipped { 0.0 } else { -advantage * ratio },
        clipped,
    }
}
