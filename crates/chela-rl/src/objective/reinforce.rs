//! REINFORCE (Williams, 1992): −A · logprob. No ratio and no clip; w still corrects for the sampler.

use super::TokenValue;

/// The loss at one token.
pub fn token(logprob: f32, advantage: f32) -> TokenValue {
    TokenValue {
        value: -advantage * logprob,
        slope: -advantage,
        clipped: false,
    }
}
