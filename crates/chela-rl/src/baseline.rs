//! The running mean of a profile's rewards: what a reply of this profile can expect.

/// How many rewards the mean looks back on, once there are as many.
pub const WINDOW: f64 = 16.0;

/// A mean over the first [`WINDOW`] rewards, then an exponential one of that span. It persists with the version it belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Baseline {
    /// The mean.
    pub mean: f64,
    /// Rewards seen.
    pub count: f64,
}

impl Baseline {
    /// b for a batch: the mean with the batch's own rewards taken in. While replies improve from batch to batch, a mean of the
    /// past alone lags behind, and nearly every token of the batch is pushed up.
    pub fn for_batch(&self, rewards: &[f32]) -> f32 {
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
    fn later_batches_remember_the_past_and_the_mean_follows() {
        let mut b = Baseline::default();
        b.update(&[-1.0; 16]);
        let mixed = b.for_batch(&[1.0; 16]);
        // 1 - 2 (15/16)^16
        assert!((mixed - 0.2878).abs() < 1e-3, "{mixed}");
        assert_eq!(b.mean, -1.0, "asking changes nothing");
        for _ in 0..20 {
            b.update(&[1.0; 16]);
        }
        assert!(b.mean > 0.99, "{b:?}");
    }
}
