//! RLOO: R − the mean of the others in the group (Ahmadian et al., arXiv 2402.14740).

use super::group::{Reply, by_group};
use crate::RlError;

/// A of each reply; `None` where its group teaches nothing.
pub fn advantages(replies: &[Reply]) -> Result<Vec<Option<f32>>, RlError> {
    by_group(replies, |rewards| {
        let (sum, others) = (rewards.iter().sum::<f64>(), (rewards.len() - 1) as f64);
        rewards.iter().map(|r| r - (sum - r) / others).collect()
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::advantage::group::tests::replies;

    #[test]
    fn golden_vector() {
        let got = advantages(&replies(&[&[1.0, 0.0, 0.5]])).unwrap();
        assert_eq!(got, [Some(0.75), Some(-0.75), Some(0.0)]);
    }
}
