//! Verdict and hint together: A_t = w_binary (r − b) + w_opd (teacher − student) (OpenClaw-RL, Wang et al., arXiv 2603.10165). What is
//! missing adds nothing; without both there is nothing to learn.

/// A `[N]`.
pub fn advantage(
    (binary, binary_weight): (Option<f32>, f32),
    (opd, opd_weight): (Option<Vec<f32>>, f32),
    tokens: usize,
) -> Option<Vec<f32>> {
    if binary.is_none() && opd.is_none() {
        return None;
    }
    let from_verdict = binary.map_or(0.0, |b| binary_weight * b);
    let Some(opd) = opd else {
        return Some(vec![from_verdict; tokens]);
    };
    let both = opd.into_iter().map(|o| from_verdict + opd_weight * o);
    Some(both.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_apply_to_their_parts() {
        let got = advantage((Some(-1.0), 2.0), (Some(vec![0.5, 0.0]), 0.5), 2);
        assert_eq!(got, Some(vec![-1.75, -2.0]));
        assert_eq!(advantage((None, 1.0), (None, 1.0), 2), None);
    }
}
