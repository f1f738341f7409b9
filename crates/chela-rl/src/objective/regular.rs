//! What a loss has beside its surrogate: β · KL(policy ‖ base), by an estimator of [`crate::kl`] (in the loss as in GRPO, arXiv 2402.03300), less
//! c · H, a bonus for entropy (as in A3C, Mnih et al., arXiv 1602.01783). Neither is multiplied by w: both are of the policy as it is now.

use crate::{
    RlError, finite,
    kl::{Estimator, derivative, estimate},
    same_length,
};

/// The two coefficients; both zero by default.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Regular {
    /// β
    pub kl: f32,
    /// How KL is estimated; [`Estimator::K1`] would pull nowhere.
    pub estimator: Estimator,
    /// c
    pub entropy: f32,
}

impl Default for Regular {
    fn default() -> Self {
        Self {
            kl: 0.0,
            estimator: Estimator::K3,
            entropy: 0.0,
        }
    }
}

/// One sample's numbers, each `[N]`; what has a coefficient must be there, and nothing else is looked at.
#[derive(Clone, Copy, Debug)]
pub struct RegularInputs<'a> {
    /// The learner's, now.
    pub logprobs: &'a [f32],
    /// The base model's.
    pub reference_logprobs: Option<&'a [f32]>,
    /// Of each position, nats.
    pub entropy: Option<&'a [f32]>,
    /// Trained on.
    pub mask: &'a [bool],
}

/// What both add.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RegularLoss {
    /// Weighted loss of the sample.
    pub loss: f64,
    /// Its derivative by each log-prob `[N]`; `None` without a pull to the base.
    pub d_logprobs: Option<Vec<f32>>,
    /// Its derivative by each entropy `[N]`; `None` without a bonus.
    pub d_entropy: Option<Vec<f32>>,
}

fn given<'a>(
    what: &'static str,
    values: Option<&'a [f32]>,
    n: usize,
) -> Result<&'a [f32], RlError> {
    let values = values.ok_or(RlError::Missing { what })?;
    same_length(what, values.len(), n)?;
    finite(what, values)?;
    Ok(values)
}

/// Of one sample; `weight` is [`super::Aggregation::token_weight`].
pub fn loss(
    regular: Regular,
    weight: f32,
    inputs: &RegularInputs<'_>,
) -> Result<RegularLoss, RlError> {
    let n = inputs.mask.len();
    let trained = || (0..n).filter(|t| inputs.mask[*t]);
    let mut added = RegularLoss::default();
    if regular.kl != 0.0 {
        given("logprobs", Some(inputs.logprobs), n)?;
        let reference = given("reference_logprobs", inputs.reference_logprobs, n)?;
        let by = weight * regular.kl;
        let mut d = vec![0.0; n];
        for t in trained() {
            let (now, base) = (inputs.logprobs[t], reference[t]);
            added.loss += f64::from(by * estimate(regular.estimator, now, base));
            d[t] = by * derivative(regular.estimator, now, base);
        }
        added.d_logprobs = Some(d);
    }
    if regular.entropy != 0.0 {
        let entropy = given("entropy", inputs.entropy, n)?;
        let by = -weight * regular.entropy;
        let mut d = vec![0.0; n];
        for t in trained() {
            added.loss += f64::from(by * entropy[t]);
            d[t] = by;
        }
        added.d_entropy = Some(d);
    }
    Ok(added)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const NOW: [f32; 3] = [-1.0, -0.2, -3.0];
    const BASE: [f32; 3] = [-1.5, -0.9, -2.0];
    const ENTROPY: [f32; 3] = [0.5, 1.5, 2.0];
    const MASK: [bool; 3] = [true, false, true];

    fn run(regular: Regular, now: &[f32], entropy: &[f32]) -> RegularLoss {
        let inputs = RegularInputs {
            logprobs: now,
            reference_logprobs: Some(&BASE),
            entropy: Some(entropy),
            mask: &MASK,
        };
        loss(regular, 0.25, &inputs).unwrap()
    }

    #[test]
    fn golden_values() {
        let regular = Regular {
            kl: 0.1,
            estimator: Estimator::K2,
            entropy: 0.01,
        };
        // 0.25 · 0.1 · (0.5² + 1²) / 2 − 0.25 · 0.01 · (0.5 + 2)
        let got = run(regular, &NOW, &ENTROPY).loss;
        assert!((got - (0.015_625 - 0.006_25)).abs() < 1e-7, "{got}");
        assert_eq!(
            run(Regular::default(), &NOW, &ENTROPY),
            RegularLoss::default()
        );
    }

    #[test]
    fn derivatives_by_finite_differences() {
        for estimator in [Estimator::K2, Estimator::K3] {
            let regular = Regular {
                kl: 0.3,
                estimator,
                entropy: 0.2,
            };
            let here = run(regular, &NOW, &ENTROPY);
            let (by_logprob, by_entropy) = (here.d_logprobs.unwrap(), here.d_entropy.unwrap());
            for t in 0..3 {
                let moved = |by: f32, entropy: bool| {
                    let (mut now, mut h) = (NOW, ENTROPY);
                    let of = if entropy { &mut h } else { &mut now };
                    of[t] += by;
                    run(regular, &now, &h).loss
                };
                for (entropy, d) in [(false, by_logprob[t]), (true, by_entropy[t])] {
                    let numeric = (moved(1e-2, entropy) - moved(-1e-2, entropy)) / 2e-2;
                    let gap = (numeric - f64::from(d)).abs();
                    assert!(gap < 1e-4, "{estimator:?} {t} {entropy}: {numeric} {d}");
                }
            }
            assert_eq!((by_logprob[1], by_entropy[1]), (0.0, 0.0), "not trained on");
        }
    }

    #[test]
    fn what_has_a_coefficient_must_be_there() {
        let inputs = RegularInputs {
            logprobs: &NOW,
            reference_logprobs: None,
            entropy: None,
            mask: &MASK,
        };
        let refused = |kl, entropy| {
            let regular = Regular {
                kl,
                entropy,
                ..Regular::default()
            };
            loss(regular, 1.0, &inputs).unwrap_err()
        };
        let missing = |what| RlError::Missing { what };
        assert_eq!(refused(0.1, 0.0), missing("reference_logprobs"));
        assert_eq!(refused(0.0, 0.1), missing("entropy"));
        let short = RegularInputs {
            entropy: Some(&ENTROPY[..2]),
            ..inputs
        };
        let regular = Regular {
            entropy: 0.1,
            ..Regular::default()
        };
        assert!(loss(regular, 1.0, &short).is_err());
    }
}
