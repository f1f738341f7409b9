//! The model behind the fakes: a real distribution over the vocabulary with a few parameters that can be learned.

use crate::{EngineError, ids::TokenId};

/// Number of parameters: token `t` reads parameter `t % FAKE_PARAMETERS`.
pub const FAKE_PARAMETERS: usize = 16;

/// Vocabulary of the fakes unless a test says otherwise.
pub const FAKE_VOCABULARY: usize = 256;

/// The logit of token t after a prefix is `h(prefix, t % P) + w[t % P]`, where h is a hash in [-1, 1] that every version
/// shares: with w = 0 this is the base model.
#[derive(Clone, Debug, PartialEq)]
pub struct FakeModel {
    /// Number of token ids.
    pub vocabulary: usize,
    /// w, `[FAKE_PARAMETERS]`
    pub parameters: Vec<f32>,
}

/// What the model says about one position.
pub(super) struct Position {
    /// Log-prob of any one token of a class, `[P]`.
    pub logprobs: Vec<f32>,
    /// Probability of a whole class, `[P]`.
    pub mass: Vec<f32>,
}

impl Position {
    pub fn logprob(&self, token: TokenId) -> f32 {
        self.logprobs[token as usize % FAKE_PARAMETERS]
    }

    /// H = −Σ p ln p over all tokens.
    pub fn entropy(&self) -> f32 {
        -self
            .mass
            .iter()
            .zip(&self.logprobs)
            .map(|(m, l)| if *m > 0.0 { m * l } else { 0.0 })
            .sum::<f32>()
    }
}

impl FakeModel {
    /// The base model.
    pub fn base(vocabulary: usize) -> Self {
        Self {
            vocabulary,
            parameters: vec![0.0; FAKE_PARAMETERS],
        }
    }

    /// Of the parameters' bits, in hexadecimal.
    pub fn hash(&self) -> String {
        let bits: Vec<TokenId> = self.parameters.iter().map(|p| p.to_bits()).collect();
        format!("{:016x}", hash(&bits))
    }

    /// Log-prob of `token` after `prefix`.
    pub fn logprob(&self, prefix: &[TokenId], token: TokenId, temperature: f32) -> f32 {
        self.position(hash(prefix), temperature).logprob(token)
    }

    /// The distribution after a prefix with this hash.
    pub(super) fn position(&self, prefix: u64, temperature: f32) -> Position {
        let logits: Vec<f32> = (0..FAKE_PARAMETERS)
            .map(|class| (noise(prefix, class) + self.parameters[class]) / temperature)
            .collect();
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let size = |class: usize| (self.vocabulary + FAKE_PARAMETERS - 1 - class) / FAKE_PARAMETERS;
        let sum: f32 = logits
            .iter()
            .enumerate()
            .map(|(c, l)| size(c) as f32 * (l - most).exp())
            .sum();
        let logprobs: Vec<f32> = logits.iter().map(|l| l - most - sum.ln()).collect();
        let mass = logprobs
            .iter()
            .enumerate()
            .map(|(c, l)| size(c) as f32 * l.exp())
            .collect();
        Position { logprobs, mass }
    }

    /// The `k` most likely tokens, the smaller id first among equals.
    pub(super) fn top(&self, position: &Position, k: usize) -> Vec<(TokenId, f32)> {
        let mut all: Vec<(TokenId, f32)> = (0..self.vocabulary as TokenId)
            .map(|t| (t, position.logprob(t)))
            .collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        all.truncate(k);
        all
    }

    /// Refuses ids outside the vocabulary.
    pub(super) fn check(&self, tokens: &[TokenId]) -> Result<(), EngineError> {
        match tokens.iter().find(|t| **t as usize >= self.vocabulary) {
            Some(bad) => Err(EngineError::Token(*bad, self.vocabulary)),
            None => Ok(()),
        }
    }
}

/// FNV-1a, a step at a time.
pub(super) fn hash_step(hash: u64, token: TokenId) -> u64 {
    token.to_le_bytes().iter().fold(hash, |h, b| {
        (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// FNV-1a of token ids.
pub(super) fn hash(tokens: &[TokenId]) -> u64 {
    tokens
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |h, t| hash_step(h, *t))
}

/// In [-1, 1], by splitmix64.
fn noise(prefix: u64, class: usize) -> f32 {
    let mut z = prefix.wrapping_add((class as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_a_distribution() {
        let mut model = FakeModel::base(37);
        model.parameters[3] = 1.5;
        for temperature in [0.5, 1.0, 2.0] {
            let position = model.position(hash(&[1, 2, 3]), temperature);
            let sum: f32 = (0..37).map(|t| position.logprob(t).exp()).sum();
            assert!((sum - 1.0).abs() < 1e-5, "{sum}");
            assert!((position.mass.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        }
    }
}
