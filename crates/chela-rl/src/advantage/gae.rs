//! PPO's advantages: generalised estimation from a value head (Schulman et al., arXiv 1506.02438), γ = λ = 1 by default. The reward stands at
//! the last trained token; tokens that are not trained on are passed over as if they were not there.

use crate::{RlError, finite, same_length};

/// Advantages and returns `[N]`; 0 where nothing is trained.
pub fn advantages(
    reward: f32,
    values: &[f32],
    mask: &[bool],
    (gamma, lambda): (f32, f32),
) -> Result<(Vec<f32>, Vec<f32>), RlError> {
    finite("reward", &[reward])?;
    finite("values", values)?;
    same_length("values", values.len(), mask.len())?;
    let n = mask.len();
    let (mut advantages, mut returns) = (vec![0.0; n], vec![0.0; n]);
    // Value and advantage of the trained token behind; the reward of the last.
    let (mut next, mut behind, mut now) = (0.0, 0.0, reward);
    for t in (0..n).rev().filter(|t| mask[*t]) {
        let delta = now + gamma * next - values[t];
        behind = delta + gamma * lambda * behind;
        (advantages[t], returns[t]) = (behind, behind + values[t]);
        (next, now) = (values[t], 0.0);
    }
    Ok((advantages, returns))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn golden_vector() {
        let (values, mask) = ([0.5, 9.0, 0.25, 0.75], [true, false, true, true]);
        let (a, r) = advantages(1.0, &values, &mask, (1.0, 1.0)).unwrap();
        assert_eq!(a, [0.5, 0.0, 0.75, 0.25], "γ = λ = 1: R − v");
        assert_eq!(r, [1.0, 0.0, 1.0, 1.0]);
        let (a, _) = advantages(1.0, &values, &mask, (0.5, 0.5)).unwrap();
        // 0.25; 0.375 − 0.25 + 0.25 · 0.25; 0.125 − 0.5 + 0.25 · 0.1875
        assert_eq!(a, [-0.328_125, 0.0, 0.187_5, 0.25]);
        assert!(advantages(1.0, &values[..3], &mask, (1.0, 1.0)).is_err());
    }
}
