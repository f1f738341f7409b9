//! GSPO: one ratio for the whole reply, the geometric mean of its tokens' (Zheng et al., arXiv 2507.18071), clipped narrowly.
//!
//! s = exp(mean over trained tokens of logprob − proximal), so ds/d(logprob_t) = s / |y|. Every token bears the reply's value; their sum
//! has the derivative s·A for each of them, as if each stood for itself.

use super::{Clip, TokenInputs, ratio_of};

/// Its ε.
pub const CLIP: Clip = Clip {
    low: 3e-4,
    high: 4e-4,
    dual: None,
};

/// s; 1 when nothing is trained.
pub fn ratio(inputs: &TokenInputs<'_>) -> f32 {
    let pairs = inputs.logprobs.iter().zip(inputs.proximal_logprobs);
    let trained = pairs.zip(inputs.mask).filter(|(_, trained)| **trained);
    let (sum, n) = trained.fold((0.0f64, 0usize), |(sum, n), ((l, p), _)| {
        (sum + f64::from(l - p), n + 1)
    });
    ratio_of((sum / n.max(1) as f64) as f32)
}
