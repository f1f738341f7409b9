//! GRPO: (R − mean) / (std + 1e-6) within the group (DeepSeekMath, Shao et al., arXiv 2402.03300), std with n − 1.

use super::group::{Reply, centred};
use crate::RlError;

/// A of each reply; `None` where its group teaches nothing.
pub fn advantages(replies: &[Reply]) -> Result<Vec<Option<f32>>, RlError> {
    centred(replies, None)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::advantage::group::tests::replies;

    #[test]
    fn golden_vector() {
        let rewards = [1.0, 1.0, -1.0, -1.0, -1.0, 1.0, -1.0, -1.0];
        let got = advantages(&replies(&[&rewards])).unwrap();
        for (r, a) in rewards.iter().zip(got) {
            let want = if *r > 0.0 { 1.207_613_6 } else { -0.724_568_1 };
            assert!((a.unwrap() - want).abs() < 1e-6, "{a:?}");
        }
    }
}
