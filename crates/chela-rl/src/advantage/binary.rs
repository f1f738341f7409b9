//! Binary RL: A = r − b for every token of the reply (OpenClaw-RL, Wang et al., arXiv 2603.10165), b a running mean of the profile's rewards.

use crate::{RlError, finite};

/// r within ±`clip`.
pub fn clipped_reward(reward: f32, clip: f32) -> f32 {
    reward.clamp(-clip, clip)
}

/// A, or `None` without a verdict.
pub fn advantage(reward: Option<f32>, baseline: f32, clip: f32) -> Result<Option<f32>, RlError> {
    let Some(reward) = reward else {
        return Ok(None);
    };
    finite("reward", &[reward])?;
    Ok(Some(clipped_reward(reward, clip) - baseline))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reward_less_the_mean_within_limits() {
        assert_eq!(advantage(Some(-1.0), 0.25, 5.0), Ok(Some(-1.25)));
        assert_eq!(advantage(Some(-90.0), 0.0, 5.0), Ok(Some(-5.0)));
        assert_eq!(advantage(None, 0.25, 5.0), Ok(None));
        assert!(advantage(Some(f32::NAN), 0.0, 5.0).is_err());
    }
}
