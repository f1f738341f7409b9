//! SAPO: −(4/τ) σ(τ(ρ − 1)) · A with ρ = exp(logprob − behavior) (soft adaptive policy optimization, arXiv 2511.20347): a gate that closes
//! gradually, faster for tokens that are pushed down.

use super::TokenValue;

/// τ by the sign of the advantage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sapo {
    /// For A > 0.
    pub positive: f32,
    /// For A < 0.
    pub negative: f32,
}

impl Default for Sapo {
    fn default() -> Self {
        Self {
            positive: 1.0,
            negative: 1.05,
        }
    }
}

/// The loss at one token; at ρ = 1 its derivative is that of the plain ratio.
pub fn token(sapo: Sapo, ratio: f32, advantage: f32) -> TokenValue {
    let tau = if advantage > 0.0 {
        sapo.positive
    } else {
        sapo.negative
    };
    let gate = 1.0 / (1.0 + (-tau * (ratio - 1.0)).exp());
    TokenValue {
        value: -4.0 / tau * gate * advantage,
        slope: -4.0 * gate * (1.0 - gate) * ratio * advantage,
        clipped: false,
    }
}
