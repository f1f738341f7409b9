//! The running mean of a profile's rewards: what a reply of this profile can expect.

/// How many rewards the mean looks back on, once there are as many.
pub const WINDOW: f64 = 32.0;

/// A mean over the first [`WINDOW`] rewards, then an exponential one of that span. It persists with the version it belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Baseline {
    /// The mean.
    pub mean: f64,
    /// Rewards seen.
    pub count: f64,
}

impl Baseline {
    /// b for a batch: the mean so far, or for the very first batch its own mean (else one sign of reward would move everything).
    pub fn for_batch(&self, rewards: &[f32]) -> f32 {
        if self.count > 0.0 {
            return self.mean as f32;
        }
        let mut fresh = *self;
        fresh.update(rewards);
        fresh.mean as f32
    }

    /// Takes a batch's rewards in.
    pub fn update(&mut self, rewards: &[f32]) {
        for reward in rewards {
            self.count += 1.0;
            self.mean += (f64::from(*reward) - self.mean) / self.count.min(WINDOW);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_batch_is_centred_on_itself() {
        let b = Baseline::default();
        assert_eq!(b.for_batch(&[1.0, -1.0, -1.0, -1.0]), -0.5);
        assert_eq!(b.for_batch(&[]), 0.0);
    }

    #[test]
    fn later_batches_use_the_past_and_the_mean_follows() {
        let mut b = Baseline::default();
        b.update(&[-1.0; 16]);
        assert_eq!(b.for_batch(&[1.0; 16]), -1.0);
        for _ in 0..20 {
            b.update(&[1.0; 16]);
        }
        assert!(b.mean > 0.99, "{b:?}");
    }
}
