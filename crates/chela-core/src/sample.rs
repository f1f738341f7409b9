//! What a learner sees: tokens, and numbers by token, all of one length by construction.

use crate::{
    error::EngineError,
    ids::{PolicyVersion, TokenId},
};

/// Candidate ids per scored position, row-major `[N, K]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidates {
    ids: Vec<TokenId>,
    k: usize,
}

impl Candidates {
    /// `ids.len()` must be a multiple of `k` ≥ 1.
    pub fn new(ids: Vec<TokenId>, k: usize) -> Result<Self, EngineError> {
        if k == 0 || !ids.len().is_multiple_of(k) {
            return Err(EngineError::Shape(format!(
                "{} candidate ids in rows of {k}",
                ids.len()
            )));
        }
        Ok(Self { ids, k })
    }

    /// `[N * K]`
    pub fn ids(&self) -> &[TokenId] {
        &self.ids
    }

    /// K
    pub fn k(&self) -> usize {
        self.k
    }

    /// N
    pub fn rows(&self) -> usize {
        self.ids.len() / self.k
    }
}

/// The per-position numbers of a [`Sample`], each `[N]`.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleColumns {
    /// Whether the position is trained on.
    pub mask: Vec<bool>,
    /// Log-prob of the token when it was sampled, at the turn's temperature (see `SampledToken::behavior_logprob`).
    pub behavior_logprobs: Vec<f32>,
    /// Credit.
    pub advantages: Vec<f32>,
}

/// One reply to learn from. N = number of scored positions = `tokens.len() − start`.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    tokens: Vec<TokenId>,
    start: usize,
    columns: SampleColumns,
    temperature: f32,
    version: PolicyVersion,
    candidates: Option<Candidates>,
}

impl Sample {
    /// `tokens` `[T]` is prompt and reply; positions `start..T` are scored, `1 ≤ start < T`. Every column has T − start entries,
    /// all finite. `temperature` divides the logits when log-probs are computed and is positive.
    pub fn new(
        tokens: Vec<TokenId>,
        start: usize,
        columns: SampleColumns,
        temperature: f32,
        version: PolicyVersion,
    ) -> Result<Self, EngineError> {
        if start == 0 || start >= tokens.len() {
            return Err(EngineError::Shape(format!(
                "start {start} of {} tokens",
                tokens.len()
            )));
        }
        let n = tokens.len() - start;
        let lengths = [
            columns.mask.len(),
            columns.behavior_logprobs.len(),
            columns.advantages.len(),
        ];
        if lengths.iter().any(|l| *l != n) {
            return Err(EngineError::Shape(format!(
                "columns of {lengths:?} for {n} positions"
            )));
        }
        if !(temperature.is_finite() && temperature > 0.0) {
            return Err(EngineError::Shape(format!("temperature {temperature}")));
        }
        let finite = |v: &[f32]| v.iter().all(|x| x.is_finite());
        if !finite(&columns.behavior_logprobs) || !finite(&columns.advantages) {
            return Err(EngineError::NotFinite(
                "a sample's log-probs or advantages".to_owned(),
            ));
        }
        Ok(Self {
            tokens,
            start,
            columns,
            temperature,
            version,
            candidates: None,
        })
    }

    /// The same with other credit: N finite values.
    pub fn with_advantages(self, advantages: Vec<f32>) -> Result<Self, EngineError> {
        let columns = SampleColumns {
            advantages,
            ..self.columns
        };
        let (tokens, start) = (self.tokens, self.start);
        let made = Self::new(tokens, start, columns, self.temperature, self.version)?;
        Ok(Self {
            candidates: self.candidates,
            ..made
        })
    }

    /// Scores these candidates instead of the sampled token; N rows.
    pub fn with_candidates(mut self, candidates: Candidates) -> Result<Self, EngineError> {
        if candidates.rows() != self.len() {
            let rows = candidates.rows();
            return Err(EngineError::Shape(format!(
                "{rows} rows for {} positions",
                self.len()
            )));
        }
        self.candidates = Some(candidates);
        Ok(self)
    }

    /// `[T]`
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Index of the first scored token.
    pub fn start(&self) -> usize {
        self.start
    }

    /// N
    pub fn len(&self) -> usize {
        self.tokens.len() - self.start
    }

    /// Never: a sample has at least one scored position.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// `[N]`
    pub fn mask(&self) -> &[bool] {
        &self.columns.mask
    }

    /// `[N]`
    pub fn behavior_logprobs(&self) -> &[f32] {
        &self.columns.behavior_logprobs
    }

    /// `[N]`
    pub fn advantages(&self) -> &[f32] {
        &self.columns.advantages
    }

    /// Divides the logits.
    pub fn temperature(&self) -> f32 {
        self.temperature
    }

    /// The version that sampled the reply.
    pub fn version(&self) -> &PolicyVersion {
        &self.version
    }

    /// `[N, K]`, or `None` for the sampled tokens (K = 1).
    pub fn candidates(&self) -> Option<&Candidates> {
        self.candidates.as_ref()
    }
}

/// What to compute beside the log-probs of the tokens themselves.
#[derive(Clone, Debug, PartialEq)]
pub struct Want {
    /// Log-probs of these instead of the tokens themselves; only for [`crate::PolicyEngine::score`], samples carry their own.
    pub candidates: Option<Candidates>,
    /// The most likely tokens at each position; 0 = none.
    pub top_k: usize,
    /// Divides the logits; only for [`crate::PolicyEngine::score`], samples carry their own.
    pub temperature: f32,
    /// Entropy of each position.
    pub entropy: bool,
    /// Who is served first.
    pub priority: crate::engine::Priority,
}

impl Default for Want {
    fn default() -> Self {
        Self {
            candidates: None,
            top_k: 0,
            temperature: 1.0,
            entropy: false,
            priority: crate::engine::Priority::Judge,
        }
    }
}

/// What a forward pass found for N positions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scored {
    /// `[N, K]`; K = 1 unless candidates were named.
    pub logprobs: Vec<f32>,
    /// `[N]` when asked for.
    pub entropy: Option<Vec<f32>>,
    /// `[N, top_k]` ids and their log-probs, most likely first, when asked for.
    pub top: Option<(Vec<TokenId>, Vec<f32>)>,
    /// `[N]` when the adapter has a value head.
    pub values: Option<Vec<f32>>,
}

/// The derivative of the loss by what a forward pass found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenLoss {
    /// `[N, K]`, as [`Scored::logprobs`].
    pub d_logprobs: Vec<f32>,
    /// `[N]`
    pub d_entropy: Option<Vec<f32>>,
    /// `[N]`
    pub d_values: Option<Vec<f32>>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Profile;

    fn columns(n: usize) -> SampleColumns {
        SampleColumns {
            mask: vec![true; n],
            behavior_logprobs: vec![-1.0; n],
            advantages: vec![0.5; n],
        }
    }

    fn base() -> PolicyVersion {
        PolicyVersion::base(Profile::default())
    }

    #[test]
    fn unequal_lengths_cannot_be_built() {
        assert!(Sample::new(vec![1, 2, 3, 4], 2, columns(2), 1.0, base()).is_ok());
        assert!(Sample::new(vec![1, 2, 3, 4], 2, columns(3), 1.0, base()).is_err());
        assert!(Sample::new(vec![1, 2, 3, 4], 0, columns(4), 1.0, base()).is_err());
        assert!(Sample::new(vec![1, 2], 2, columns(0), 1.0, base()).is_err());
        let sample = Sample::new(vec![1, 2, 3, 4], 2, columns(2), 1.0, base()).unwrap();
        let other = sample.clone().with_advantages(vec![1.0, -1.0]).unwrap();
        assert_eq!(other.advantages(), [1.0, -1.0]);
        assert_eq!(other.behavior_logprobs(), sample.behavior_logprobs());
        assert!(sample.with_advantages(vec![1.0]).is_err());
        let mut short = columns(2);
        short.advantages.pop();
        assert!(Sample::new(vec![1, 2, 3, 4], 2, short, 1.0, base()).is_err());
    }

    #[test]
    fn what_is_not_finite_cannot_be_built() {
        let mut bad = columns(2);
        bad.advantages[1] = f32::INFINITY;
        assert!(Sample::new(vec![1, 2, 3, 4], 2, bad, 1.0, base()).is_err());
        assert!(Sample::new(vec![1, 2, 3, 4], 2, columns(2), 0.0, base()).is_err());
        assert!(Sample::new(vec![1, 2, 3, 4], 2, columns(2), f32::NAN, base()).is_err());
    }

    #[test]
    fn candidates_have_a_row_for_each_position() {
        let sample = Sample::new(vec![1, 2, 3, 4], 2, columns(2), 1.0, base()).unwrap();
        assert!(Candidates::new(vec![1, 2, 3], 2).is_err());
        assert!(Candidates::new(vec![], 0).is_err());
        let three = Candidates::new(vec![1, 2, 3, 4, 5, 6], 2).unwrap();
        assert!(sample.clone().with_candidates(three).is_err());
        assert!(
            sample
                .with_candidates(Candidates::new(vec![1, 2, 3, 4], 2).unwrap())
                .is_ok()
        );
    }
}
