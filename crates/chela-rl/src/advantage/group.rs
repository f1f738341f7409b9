//! Replies to one prompt and what their rewards say about each.

use crate::{RlError, finite};
use std::collections::BTreeMap;

/// Added to a standard deviation before it divides.
pub const EPSILON: f64 = 1e-6;

/// One reply of a batch of groups.
#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    /// Which prompt it answers.
    pub group: usize,
    /// R
    pub reward: f32,
    /// Of each token whether it is trained on.
    pub mask: Vec<bool>,
    /// logprob − reference of each token, where an algorithm punishes it; else empty.
    pub kl: Vec<f32>,
    /// Of each token, where the model has a value head; else empty.
    pub values: Vec<f32>,
}

/// Mean and standard deviation, the latter with n − 1; `None` of fewer than two.
pub fn mean_std(values: &[f64]) -> Option<(f64, f64)> {
    let n = values.len();
    if n < 2 {
        return None;
    }
    let mean = values.iter().sum::<f64>() / n as f64;
    let squares: f64 = values.iter().map(|v| (v - mean).powi(2)).sum();
    Some((mean, (squares / (n - 1) as f64).sqrt()))
}

/// The replies' indices by group.
pub fn groups(replies: &[Reply]) -> BTreeMap<usize, Vec<usize>> {
    let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (i, reply) in replies.iter().enumerate() {
        groups.entry(reply.group).or_default().push(i);
    }
    groups
}

/// One number for each reply from the rewards of its group; `None` for a group that teaches nothing: a single reply, or all alike.
pub fn by_group(
    replies: &[Reply],
    one: impl Fn(&[f64]) -> Vec<f64>,
) -> Result<Vec<Option<f32>>, RlError> {
    let rewards: Vec<f32> = replies.iter().map(|r| r.reward).collect();
    finite("reward", &rewards)?;
    let mut all = vec![None; replies.len()];
    for members in groups(replies).into_values() {
        let of: Vec<f64> = members.iter().map(|i| f64::from(rewards[*i])).collect();
        if of.len() < 2 || of.iter().all(|r| *r == of[0]) {
            continue;
        }
        for (i, value) in members.iter().zip(one(&of)) {
            all[*i] = Some(value as f32);
        }
    }
    Ok(all)
}

/// R − the group's mean, divided by a deviation: `std`, or without one the group's own.
pub fn centred(replies: &[Reply], std: Option<f64>) -> Result<Vec<Option<f32>>, RlError> {
    by_group(replies, |rewards| {
        let (mean, own) = mean_std(rewards).unwrap_or_default();
        let by = std.unwrap_or(own) + EPSILON;
        rewards.iter().map(|r| (r - mean) / by).collect()
    })
}

#[cfg(test)]
pub(crate) mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Replies of one token with these rewards, by group.
    pub(crate) fn replies(groups: &[&[f32]]) -> Vec<Reply> {
        let of = |group: usize, rewards: &[f32]| -> Vec<Reply> {
            let one = |reward: &f32| Reply {
                group,
                reward: *reward,
                mask: vec![true],
                kl: Vec::new(),
                values: Vec::new(),
            };
            rewards.iter().map(one).collect()
        };
        let all = groups.iter().enumerate().map(|(i, g)| of(i, g));
        all.flatten().collect()
    }

    #[test]
    fn single_and_equal_replies_teach_nothing() {
        let all = replies(&[&[1.0], &[0.5, 0.5], &[1.0, 0.0]]);
        let got = by_group(&all, <[f64]>::to_vec).unwrap();
        assert_eq!(got, [None, None, None, Some(1.0), Some(0.0)]);
        assert!(by_group(&replies(&[&[f32::NAN, 1.0]]), <[f64]>::to_vec).is_err());
    }
}
