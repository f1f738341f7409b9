//! Dr.GRPO: R − mean within the group, not divided by the deviation, which would favour prompts that are nearly solved or nearly hopeless
//! (Liu et al., arXiv 2503.20783).

use super::group::{Reply, by_group, mean_std};
use crate::RlError;

/// A of each reply; `None` where its group teaches nothing.
pub fn advantages(replies: &[Reply]) -> Result<Vec<Option<f32>>, RlError> {
    by_group(replies, |rewards| {
        let (mean, _) = mean_std(rewards).unwrap_or_default();
        rewards.iter().map(|r| r - mean).collect()
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::advantage::group::tests::replies;

    #[test]
    fn golden_vector() {
        let got = advantages(&replies(&[&[1.0, 0.0, 0.0, 0.0]])).unwrap();
        assert_eq!(got, [Some(0.75), Some(-0.25), Some(-0.25), Some(-0.25)]);
    }
}
