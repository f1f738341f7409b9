//! On-policy distillation over the teacher's K likeliest tokens and one bin for the rest: the reverse KL Σ q (log q − log p) with q the
//! student's and p the teacher's probabilities (as in SDFT, arXiv 2601.19897).
//!
//! The student's rest is 1 − Σ q_k, so dL/d(log q_k) = q_k ((log q_k − log p_k) − (log q_rest − log p_rest)).

use crate::{RlError, finite, same_length};

/// Least probability of the rest: what rounding leaves of a full sum.
const LEAST: f64 = 1e-9;

/// ln(1 − Σ e^x)
fn log_rest(logprobs: &[f32]) -> f64 {
    let sum: f64 = logprobs.iter().map(|l| f64::from(*l).exp()).sum();
    (1.0 - sum).max(LEAST).ln()
}

/// Loss of one sample and its derivative by the student's log-probs `[N, K]`, which are at the teacher's candidates.
pub fn loss(
    student: &[f32],
    teacher: &[f32],
    k: usize,
    mask: &[bool],
    weight: f32,
) -> Result<(Vec<f32>, f64), RlError> {
    same_length("student", student.len(), mask.len() * k)?;
    same_length("teacher", teacher.len(), mask.len() * k)?;
    finite("student", student)?;
    finite("teacher", teacher)?;
    let (mut derivative, mut loss) = (vec![0.0; student.len()], 0.0);
    for t in (0..mask.len()).filter(|t| mask[*t]) {
        let at = t * k..(t + 1) * k;
        let (q, p) = (&student[at.clone()], &teacher[at.clone()]);
        let (log_q, log_p) = (log_rest(q), log_rest(p));
        let rest = log_q - log_p;
        loss += f64::from(weight) * log_q.exp() * rest;
        for ((d, q), p) in derivative[at].iter_mut().zip(q).zip(p) {
            let (q, gap) = (f64::from(*q).exp(), f64::from(q - p));
            loss += f64::from(weight) * q * gap;
            *d = weight * (q * (gap - rest)) as f32;
        }
    }
    Ok((derivative, loss))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::objective::tests::{likeliest, log_softmax};

    const NOW: [f32; 5] = [2.0, 1.0, 0.5, 0.0, -1.0];
    const HINTED: [f32; 5] = [0.5, 2.5, 0.0, 1.0, -2.0];

    fn at(logits: &[f32], ids: &[usize]) -> Vec<f32> {
        let all = log_softmax(logits);
        ids.iter().map(|i| all[*i]).collect()
    }

    #[test]
    fn golden_vector() {
        let ids = likeliest(&HINTED, 2);
        let (_, loss) = loss(&at(&NOW, &ids), &at(&HINTED, &ids), 2, &[true], 1.0).unwrap();
        assert!((loss - 0.783_874_0).abs() < 1e-6, "{loss}");
    }

    #[test]
    fn derivative_by_finite_differences_and_zero_for_an_equal_teacher() {
        let (student, teacher) = ([-1.0f32, -2.0, -0.4, -2.5], [-0.7f32, -1.5, -1.4, -2.0]);
        let run = |s: &[f32]| loss(s, &teacher, 2, &[true, true], 0.5).unwrap();
        let (d, _) = run(&student);
        for i in 0..4 {
            let moved = |by: f32| {
                let mut s = student;
                s[i] += by;
                run(&s).1
            };
            let numeric = (moved(1e-3) - moved(-1e-3)) / 2e-3;
            assert!(
                (numeric - f64::from(d[i])).abs() < 1e-3,
                "{i} {numeric} {d:?}"
            );
        }
        let (d, l) = loss(&teacher, &teacher, 2, &[true, true], 1.0).unwrap();
        assert!(l.abs() < 1e-9 && d.iter().all(|d| d.abs() < 1e-6));
        let (d, l) = loss(&student, &teacher, 2, &[false, false], 1.0).unwrap();
        assert!(l == 0.0 && d == [0.0; 4]);
    }
}
