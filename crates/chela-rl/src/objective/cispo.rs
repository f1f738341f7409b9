//! CISPO: −sg(clip(ρ, 1 − ε_lo, 1 + ε_hi)) · A · logprob (MiniMax-M1, arXiv 2506.13585). The ratio is a bounded weight, so that no token is
//! without gradient.

use super::{Clip, TokenValue};

/// Its ε: from below nothing is bounded.
pub const CLIP: Clip = Clip {
    low: 1.0,
    high: 4.0,
    dual: None,
};

/// The loss at one token.
pub fn token(clip: Clip, ratio: f32, (logprob, advantage): (f32, f32)) -> TokenValue {
    let weight = ratio.clamp(1.0 - clip.low, 1.0 + clip.high);
    TokenValue {
        value: -weight * advantage * logprob,
        slope: -weight * advantage,
        clipped: weight != ratio,
    }
}
