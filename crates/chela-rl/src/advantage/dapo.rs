//! DAPO's way with rewards (Yu et al., arXiv 2503.14476): replies that nearly fill their limit lose up to 1, then GRPO; a group whose rewards
//! are all alike *before* that is dropped, and whoever makes rollouts asks for another one in its place (dynamic sampling).

use super::{
    group::{Reply, groups},
    grpo,
};
use crate::RlError;

/// Tokens before the limit from which on length costs.
pub const BUFFER: f32 = 512.0;

/// What a reply of `length` tokens loses when its limit is `limit`: 0 up to `limit` − 512, 1 at the limit.
pub fn overlong(length: usize, limit: usize) -> f32 {
    (-(length as f32 - (limit as f32 - BUFFER)) / BUFFER).clamp(-1.0, 0.0)
}

/// A of each reply; `None` where its group teaches nothing.
pub fn advantages(replies: &[Reply], limit: usize) -> Result<Vec<Option<f32>>, RlError> {
    let mut punished = replies.to_vec();
    for reply in &mut punished {
        reply.reward += overlong(reply.mask.len(), limit);
    }
    let mut all = grpo::advantages(&punished)?;
    for members in groups(replies).into_values() {
        let first = replies[members[0]].reward;
        if members.iter().all(|i| replies[*i].reward == first) {
            members.iter().for_each(|i| all[*i] = None);
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::advantage::group::tests::replies;

    #[test]
    fn golden_vector() {
        for (length, want) in [
            (100, 0.0),
            (1536, 0.0),
            (1792, -0.5),
            (2048, -1.0),
            (9999, -1.0),
        ] {
            assert_eq!(overlong(length, 2048), want);
        }
        let mut all = replies(&[&[1.0, 0.0], &[1.0, 1.0]]);
        for i in [0, 2] {
            all[i].mask = vec![true; 1792];
        }
        let got = advantages(&all, 2048).unwrap();
        // 0.5 and 0: ±0.25 / (0.3535534 + 1e-6)
        assert!((got[0].unwrap() - 0.707_104_8).abs() < 1e-6);
        assert!((got[1].unwrap() + 0.707_104_8).abs() < 1e-6);
        assert_eq!(
            got[2..],
            [None, None],
            "all were right: length alone teaches nothing"
        );
    }
}
