//! The loss of a sample whose positions name several candidates with a teacher's log-probs: which of [`topk`] and [`hybrid`] it is.

use super::{Clip, hybrid, topk};
use crate::RlError;

/// What is made of candidates.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Distil {
    /// Reverse KL over the teacher's likeliest and one bin for the rest.
    #[default]
    TopK,
    /// An advantage for each candidate, clipped like PPO's.
    Hybrid {
        /// C: |teacher − student| is clipped to this.
        limit: f32,
    },
}

impl Distil {
    /// Whether it looks back on proximal log-probs.
    pub fn has_ratio(self) -> bool {
        self != Self::TopK
    }

    /// Loss of one sample and its derivative by the student's present log-probs, from log-probs `(now, proximal, teacher)`, all `[N, K]` at
    /// the same candidates; `mask` is `[N]`, `weight` [`super::Aggregation::token_weight`].
    pub fn loss(
        self,
        (now, proximal, teacher): (&[f32], &[f32], &[f32]),
        k: usize,
        mask: &[bool],
        clip: Clip,
        weight: f32,
    ) -> Result<(Vec<f32>, f64), RlError> {
        match self {
            Self::TopK => topk::loss(now, teacher, k, mask, weight),
            Self::Hybrid { limit } => {
                hybrid::loss((now, proximal, teacher), k, mask, (clip, limit), weight)
            }
        }
    }
}
