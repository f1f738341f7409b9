//! REINFORCE++: each token's return, the reward less β times the KL still to come, normalised over all trained tokens of the batch (Hu, arXiv
//! 2501.03262). Groups do not matter.

use super::group::{EPSILON, Reply, mean_std};
use crate::{RlError, finite, same_length};

/// β of the k1 estimate in the reward.
pub const KL: f64 = 0.001;

/// A of each reply's tokens `[N]`; `None` for all when their returns are alike.
pub fn advantages(replies: &[Reply]) -> Result<Option<Vec<Vec<f32>>>, RlError> {
    let mut returns: Vec<Vec<f64>> = Vec::with_capacity(replies.len());
    for reply in replies {
        finite("reward", &[reply.reward])?;
        finite("kl", &reply.kl)?;
        let n = reply.mask.len();
        if !reply.kl.is_empty() {
            same_length("kl", reply.kl.len(), n)?;
        }
        let (mut of, mut to_come) = (vec![0.0; n], f64::from(reply.reward));
        for t in (0..n).rev() {
            if reply.mask[t] {
                to_come -= KL * reply.kl.get(t).map_or(0.0, |kl| f64::from(*kl));
            }
            of[t] = to_come;
        }
        returns.push(of);
    }
    let pairs = replies.iter().zip(&returns);
    let trained = pairs.flat_map(|(reply, of)| reply.mask.iter().zip(of));
    let trained: Vec<f64> = trained.filter(|(m, _)| **m).map(|(_, r)| *r).collect();
    let Some((mean, std)) = mean_std(&trained).filter(|(_, std)| *std > 0.0) else {
        return Ok(None);
    };
    let normal = |of: Vec<f64>| {
        of.into_iter()
            .map(|r| ((r - mean) / (std + EPSILON)) as f32)
    };
    Ok(Some(
        returns.into_iter().map(|of| normal(of).collect()).collect(),
    ))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::advantage::group::tests::replies;

    #[test]
    fn golden_vector() {
        let mut all = replies(&[&[1.0], &[0.0]]);
        all[0].mask = vec![true, true, true];
        all[0].kl = vec![10.0, 0.0, -20.0];
        // Returns 1.01 1.02 1.02 and 0: mean 0.7625, deviation with n − 1 0.5083552.
        let got = advantages(&all).unwrap().unwrap();
        for (a, want) in got
            .concat()
            .iter()
            .zip([0.486_864, 0.506_535, 0.506_535, -1.499_933])
        {
            assert!((a - want).abs() < 1e-4, "{got:?}");
        }
        assert_eq!(advantages(&replies(&[&[1.0, 1.0]])).unwrap(), None);
    }
}
