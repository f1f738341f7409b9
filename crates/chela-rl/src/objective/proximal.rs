//! Proximal log-probs between the sampler's and the learner's without a pass of their own (AReaL, arXiv 2505.24298, log-linear form):
//! proximal = behavior + α · (logprob − behavior), α = (v_start − v_behavior) / (v_now − v_behavior) within 0..1.

/// Where the proximal log-probs of a batch come from that is cut into several optimizer steps. With one step they are the learner's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Proximal {
    /// A forward pass before the first step.
    #[default]
    Recomputed,
    /// Between the sampler's and the learner's, as [`interpolate`] makes them.
    Interpolated,
}

impl Proximal {
    /// As people write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Recomputed => "recomputed",
            Self::Interpolated => "interpolated",
        }
    }

    /// The one of this name.
    pub fn named(name: &str) -> Option<Self> {
        [Self::Recomputed, Self::Interpolated]
            .into_iter()
            .find(|p| p.name() == name)
    }
}

/// α from versions as counts of optimizer steps: at the sample's own, at the start of the train step, and now, steps inside the batch
/// counted. A sample of the present version has nothing between.
pub fn share(behavior: u64, start: u64, now: u64) -> f32 {
    let (to_start, to_now) = (start.saturating_sub(behavior), now.saturating_sub(behavior));
    if to_now == 0 {
        return 1.0;
    }
    (to_start as f32 / to_now as f32).clamp(0.0, 1.0)
}

/// `[N]`
pub fn interpolate(logprobs: &[f32], behavior: &[f32], share: f32) -> Vec<f32> {
    let pairs = logprobs.iter().zip(behavior);
    pairs.map(|(l, b)| b + share * (l - b)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found() {
        for name in ["recomputed", "interpolated"] {
            assert_eq!(Proximal::named(name).map(Proximal::name), Some(name));
        }
        assert_eq!(Proximal::named("own"), None);
    }

    #[test]
    fn between_the_sampler_and_now() {
        assert_eq!(share(3, 3, 3), 1.0);
        assert_eq!(
            share(3, 3, 4),
            0.0,
            "fresh: the sampler is the proximal policy"
        );
        assert_eq!(share(1, 3, 5), 0.5);
        assert_eq!(share(9, 3, 5), 1.0, "from a version that was taken back");
        assert_eq!(interpolate(&[-1.0], &[-3.0], 0.25), [-2.5]);
        assert_eq!(interpolate(&[-1.0, -2.0], &[-3.0, -2.0], 1.0), [-1.0, -2.0]);
    }
}
