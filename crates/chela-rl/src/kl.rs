//! Estimators of KL(policy ‖ base) from tokens the policy sampled (Schulman, "Approximating KL divergence", 2020).

/// Which estimator. d = logprob − reference_logprob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Estimator {
    /// d: unbiased; its gradient in a loss is zero on average, so it belongs into a reward only.
    K1,
    /// d² / 2
    K2,
    /// e^(−d) − 1 + d: unbiased and never negative.
    K3,
}

impl Estimator {
    /// As people write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::K1 => "k1",
            Self::K2 => "k2",
            Self::K3 => "k3",
        }
    }

    /// The one of this name.
    pub fn named(name: &str) -> Option<Self> {
        [Self::K1, Self::K2, Self::K3]
            .into_iter()
            .find(|e| e.name() == name)
    }
}

/// The estimate for one token.
pub fn estimate(estimator: Estimator, logprob: f32, reference_logprob: f32) -> f32 {
    let d = logprob - reference_logprob;
    match estimator {
        Estimator::K1 => d,
        Estimator::K2 => d * d / 2.0,
        Estimator::K3 => (-d).exp() - 1.0 + d,
    }
}

/// Its derivative by `logprob`.
pub fn derivative(estimator: Estimator, logprob: f32, reference_logprob: f32) -> f32 {
    let d = logprob - reference_logprob;
    match estimator {
        Estimator::K1 => 1.0,
        Estimator::K2 => d,
        Estimator::K3 => 1.0 - (-d).exp(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found() {
        for name in ["k1", "k2", "k3"] {
            assert_eq!(Estimator::named(name).map(Estimator::name), Some(name));
        }
        assert_eq!(Estimator::named("k4"), None);
    }

    #[test]
    fn golden_vector_k3() {
        for (d, want) in [(1.0, 0.367_879_4), (-0.5, 0.148_721_3), (-2.0, 4.389_056)] {
            assert!((estimate(Estimator::K3, d, 0.0) - want).abs() < 1e-6);
        }
    }

    #[test]
    fn derivatives_by_finite_differences() {
        for e in [Estimator::K1, Estimator::K2, Estimator::K3] {
            for x in [-1.5f32, -0.2, 0.0, 0.7] {
                let h = 1e-2;
                let up = estimate(e, x + h, -0.4);
                let down = estimate(e, x - h, -0.4);
                let numeric = (up - down) / (2.0 * h);
                assert!((numeric - derivative(e, x, -0.4)).abs() < 1e-3, "{e:?} {x}");
            }
        }
    }
}
