//! LitePPO: R − the group's mean, divided by the whole batch's deviation (Liu et al., "Tricks or Traps?", arXiv 2508.08221).

use super::group::{Reply, centred, mean_std};
use crate::RlError;

/// A of each reply; `None` where its group teaches nothing.
pub fn advantages(replies: &[Reply]) -> Result<Vec<Option<f32>>, RlError> {
    let rewards: Vec<f64> = replies.iter().map(|r| f64::from(r.reward)).collect();
    let (_, std) = mean_std(&rewards).unwrap_or_default();
    centred(replies, Some(std))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::advantage::group::tests::replies;

    #[test]
    fn golden_vector() {
        // Deviation of 1 0 1 1 with n − 1: 0.5.
        let got = advantages(&replies(&[&[1.0, 0.0], &[1.0, 1.0]])).unwrap();
        assert!((got[0].unwrap() - 0.999_998).abs() < 1e-6, "{got:?}");
        assert!((got[1].unwrap() + 0.999_998).abs() < 1e-6 && got[2].is_none());
    }
}
