//! Agents of several steps: a step's reward is the outcome and the mean of its process votes, normalised among the steps of the same index
//! in the group (as OpenClaw-RL does, Wang et al., arXiv 2603.10165), with the population's deviation.

use super::group::EPSILON;
use crate::{RlError, finite};
use std::collections::BTreeMap;

/// One step of one trajectory.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReward {
    /// Which prompt its trajectory answers.
    pub group: usize,
    /// Index of the step in its trajectory.
    pub step: usize,
    /// The trajectory's outcome.
    pub outcome: f32,
    /// Votes on the step itself; may be empty.
    pub votes: Vec<f32>,
}

/// The step's reward.
pub fn reward(step: &StepReward) -> f32 {
    let n = step.votes.len().max(1) as f32;
    step.outcome + step.votes.iter().sum::<f32>() / n
}

/// A of each step. A step alone at its index keeps its reward. What is not given here takes no part in any mean.
pub fn advantages(steps: &[StepReward]) -> Result<Vec<f32>, RlError> {
    let rewards: Vec<f32> = steps.iter().map(reward).collect();
    finite("reward", &rewards)?;
    let mut buckets: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
    for (i, step) in steps.iter().enumerate() {
        buckets.entry((step.group, step.step)).or_default().push(i);
    }
    let mut all = rewards.clone();
    for members in buckets.into_values().filter(|m| m.len() > 1) {
        let n = members.len() as f64;
        let of = || members.iter().map(|i| f64::from(rewards[*i]));
        let mean = of().sum::<f64>() / n;
        let std = (of().map(|r| (r - mean).powi(2)).sum::<f64>() / n).sqrt();
        for i in members {
            all[i] = ((f64::from(rewards[i]) - mean) / (std + EPSILON)) as f32;
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn step(group: usize, step: usize, outcome: f32, votes: &[f32]) -> StepReward {
        StepReward {
            group,
            step,
            outcome,
            votes: votes.to_vec(),
        }
    }

    #[test]
    fn golden_vector() {
        let mut steps: Vec<StepReward> = [1.0, 0.0, -1.0, 0.0]
            .iter()
            .map(|r| step(0, 1, *r, &[*r, *r]))
            .collect();
        steps.push(step(0, 2, 1.0, &[]));
        steps.push(step(1, 1, -1.0, &[1.0, 0.0]));
        let got = advantages(&steps).unwrap();
        for (a, want) in got
            .iter()
            .zip([1.414_212_6, 0.0, -1.414_212_6, 0.0, 1.0, -0.5])
        {
            assert!((a - want).abs() < 1e-6, "{got:?}");
        }
        assert!(advantages(&[step(0, 0, f32::NAN, &[])]).is_err());
    }
}
