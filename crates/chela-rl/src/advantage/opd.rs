//! On-policy distillation from a hint: A_t = teacher − student log-prob of the reply's own tokens (OpenClaw-RL, Wang et al., arXiv
//! 2603.10165; after Agarwal et al., arXiv 2306.13649). The teacher is the model that reads the hint, the student the same one without it.

use crate::{RlError, finite, same_length};

/// A `[N]`, or `None` without a hint. A missing teacher value is never read as 0: a log-prob of 0 would mean certainty.
pub fn advantage(
    hinted: Option<(&[f32], &[f32])>,
    tokens: usize,
    clip: f32,
) -> Result<Option<Vec<f32>>, RlError> {
    let Some((teacher, student)) = hinted else {
        return Ok(None);
    };
    same_length("teacher_logprobs", teacher.len(), tokens)?;
    same_length("student_logprobs", student.len(), tokens)?;
    finite("teacher_logprobs", teacher)?;
    finite("student_logprobs", student)?;
    let gaps = teacher.iter().zip(student).map(|(t, s)| t - s);
    Ok(Some(gaps.map(|gap| gap.clamp(-clip, clip)).collect()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_gap_of_each_token_within_limits() {
        let got = advantage(Some((&[-1.0, -9.0], &[-1.5, -1.0])), 2, 5.0);
        assert_eq!(got.unwrap(), Some(vec![0.5, -5.0]));
        assert_eq!(advantage(None, 2, 5.0).unwrap(), None);
        assert!(advantage(Some((&[-1.0], &[-1.0, -1.0])), 2, 5.0).is_err());
    }
}
