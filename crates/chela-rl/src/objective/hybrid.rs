//! Hybrid select (OpenClaw-RL, Wang et al., arXiv 2603.10165, second version): at each position a few candidates, each with an advantage
//! from one hint's teacher, clipped like PPO's.
//!
//! w = softmax of the student's log-probs on the support S, Δ = clip(teacher − student, ±C), A_v = w_v Δ_v, and the loss is the sum of
//! the clipped surrogate over S. w, Δ and the ratio are of the *proximal* student over the full vocabulary.

use super::{Clip, clip, ratio_of};
use crate::{RlError, finite, same_length};

/// Which candidates of a position are looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Support {
    /// The student's likeliest.
    #[default]
    Student,
    /// The teacher's likeliest.
    Teacher,
    /// What is among the likeliest of both.
    Overlap,
}

impl Support {
    /// S from the likeliest ids of both, the student's order kept; may be empty for [`Support::Overlap`].
    pub fn of(self, student: &[u32], teacher: &[u32]) -> Vec<u32> {
        match self {
            Self::Student => student.to_vec(),
            Self::Teacher => teacher.to_vec(),
            Self::Overlap => {
                let both = student.iter().filter(|id| teacher.contains(id));
                both.copied().collect()
            }
        }
    }
}

/// Which of several hints teaches a reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// The one of fewest tokens.
    Shortest,
    /// The one whose teacher agrees with the student at most tokens.
    TokenOverlap,
    /// The one whose teacher agrees with the student on the longest beginning.
    #[default]
    SequenceOverlap,
}

/// What a choice looks at, of one hint.
#[derive(Clone, Copy, Debug)]
pub struct Hinted<'a> {
    /// Tokens of the hint.
    pub tokens: usize,
    /// For each position, whether its likeliest token is among the student's.
    pub agrees: &'a [bool],
}

impl Choice {
    /// The chosen hint; ties take the first. `None` without hints.
    pub fn of(self, hints: &[Hinted<'_>]) -> Option<usize> {
        let score = |hint: &Hinted<'_>| match self {
            Self::Shortest => usize::MAX - hint.tokens,
            Self::TokenOverlap => hint.agrees.iter().filter(|a| **a).count(),
            Self::SequenceOverlap => hint.agrees.iter().take_while(|a| **a).count(),
        };
        let best = hints.iter().map(score).max()?;
        hints.iter().position(|hint| score(hint) == best)
    }
}

/// A_v of one position's candidates.
pub fn advantages(student: &[f32], teacher: &[f32], limit: f32) -> Vec<f32> {
    let most = student.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f32> = student.iter().map(|s| (s - most).exp()).collect();
    let sum: f32 = weights.iter().sum();
    let gaps = student.iter().zip(teacher).map(|(s, t)| t - s);
    let pairs = weights.iter().zip(gaps);
    pairs
        .map(|(w, gap)| w / sum * gap.clamp(-limit, limit))
        .collect()
}

/// Loss of one sample and its derivative by the student's present log-probs, all `[N, K]` at the same candidates.
pub fn loss(
    (now, proximal, teacher): (&[f32], &[f32], &[f32]),
    k: usize,
    mask: &[bool],
    (limits, limit): (Clip, f32),
    weight: f32,
) -> Result<(Vec<f32>, f64), RlError> {
    for (what, all) in [
        ("student", now),
        ("proximal", proximal),
        ("teacher", teacher),
    ] {
        same_length(what, all.len(), mask.len() * k)?;
        finite(what, all)?;
    }
    let (mut derivative, mut loss) = (vec![0.0; now.len()], 0.0);
    for t in (0..mask.len()).filter(|t| mask[*t]) {
        let at = t * k..(t + 1) * k;
        let credit = advantages(&proximal[at.clone()], &teacher[at.clone()], limit);
        for (i, advantage) in at.zip(credit) {
            let one = clip::token(limits, ratio_of(now[i] - proximal[i]), advantage);
            loss += f64::from(weight * one.value);
            derivative[i] = weight * one.slope;
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
    const OLD: [f32; 5] = [1.8, 1.2, 0.4, 0.1, -1.0];
    const HINTS: [[f32; 5]; 2] = [[0.5, 2.5, 0.0, 1.0, -2.0], [2.5, 0.2, 1.5, -1.0, 0.0]];

    fn of(support: Support, hint: usize) -> f64 {
        let ids = |logits: &[f32]| -> Vec<u32> {
            likeliest(logits, 2).into_iter().map(|i| i as u32).collect()
        };
        let on = support.of(&ids(&OLD), &ids(&HINTS[hint]));
        let at = |logits: &[f32]| -> Vec<f32> {
            let all = log_softmax(logits);
            on.iter().map(|i| all[*i as usize]).collect()
        };
        let inputs = (&at(&NOW)[..], &at(&OLD)[..], &at(&HINTS[hint])[..]);
        let limits = (Clip::default(), 1.0);
        loss(inputs, on.len(), &[true], limits, 1.0).unwrap().1
    }

    #[test]
    fn golden_vectors() {
        for (support, hint, want) in [
            (Support::Student, 0, 0.484_954_4),
            (Support::Student, 1, 0.094_681_7),
            (Support::Overlap, 1, -0.292_405_1),
        ] {
            let got = of(support, hint);
            assert!((got - want).abs() < 1e-6, "{support:?} {hint}: {got}");
        }
    }

    #[test]
    fn hints_are_chosen_and_ties_take_the_first() {
        let hints = [
            Hinted {
                tokens: 9,
                agrees: &[true, false, true, true],
            },
            Hinted {
                tokens: 7,
                agrees: &[true, true, false, false],
            },
            Hinted {
                tokens: 7,
                agrees: &[true, true, false, false],
            },
        ];
        assert_eq!(Choice::Shortest.of(&hints), Some(1));
        assert_eq!(Choice::TokenOverlap.of(&hints), Some(0));
        assert_eq!(Choice::SequenceOverlap.of(&hints), Some(1));
        assert_eq!(Choice::default().of(&[]), None);
    }

    #[test]
    fn derivative_by_finite_differences() {
        let (now, old, teacher) = ([-1.0f32, -1.6], [-1.1f32, -1.5], [-0.4f32, -2.2]);
        let run = |now: &[f32]| {
            let limits = (Clip::default(), 1.0);
            loss((now, &old, &teacher), 2, &[true], limits, 0.7).unwrap()
        };
        let (d, _) = run(&now);
        for i in 0..2 {
            let moved = |by: f32| {
                let mut now = now;
                now[i] += by;
                run(&now).1
            };
            let numeric = (moved(1e-3) - moved(-1e-3)) / 2e-3;
            assert!(
                (numeric - f64::from(d[i])).abs() < 1e-3,
                "{i} {numeric} {d:?}"
            );
        }
    }
}
