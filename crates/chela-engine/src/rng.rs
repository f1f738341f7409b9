//! A small seeded generator: SplitMix64 (Steele, Lea & Flood, OOPSLA 2014). Each request has its own, so that the same seed
//! gives the same reply whatever else runs.

/// The state.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Seeds it; near seeds give unrelated streams.
    pub fn new(seed: u64) -> Self {
        let mut rng = Self(seed);
        let first = rng.number();
        Self(first ^ seed.rotate_left(32))
    }

    /// The next 64 bits.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In [0, 1).
    pub fn uniform(&mut self) -> f64 {
        (self.number() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::Rng;

    #[test]
    fn is_uniform_enough_and_depends_on_the_seed() {
        let mut rng = Rng::new(1);
        let mean = (0..10_000).map(|_| rng.uniform()).sum::<f64>() / 10_000.0;
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
        assert_ne!(Rng::new(1).number(), Rng::new(2).number());
        assert_eq!(Rng::new(7).number(), Rng::new(7).number());
    }
}
