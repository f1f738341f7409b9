//! Instruction sets against each other.

use super::{Random, many};
use crate::cpu::simd::{self, AT_MOST, Level, level};

/// Bits of everything that the lane loops give, for lengths with and without a rest.
fn bits() -> Vec<u32> {
    let mut random = Random(70);
    let mut all = Vec::new();
    for n in [0, 1, 15, 16, 17, 64, 100, many(3000, 200)] {
        let (a, mut b) = (random.floats(n), random.floats(n));
        all.extend([simd::dot(&a, &b), simd::sum(&a), simd::max(&a)]);
        all.push(simd::exp_total(&a, 0.7, 0.3));
        simd::axpy(0.37, &a, &mut b);
        all.push(simd::exp_sum(&mut b, 1.3, 0.1));
        all.extend(b);
    }
    all.into_iter().map(f32::to_bits).collect()
}

#[test]
fn avx512_gives_the_bits_of_avx2() {
    if level() < Level::Avx512 {
        println!("this processor has no AVX-512: not compared");
        return;
    }
    let wide = bits();
    AT_MOST.set(Level::Avx2);
    assert_eq!(level(), Level::Avx2);
    assert_eq!(bits(), wide);
}

#[test]
fn a_thread_can_be_held_to_less() {
    AT_MOST.set(Level::Portable);
    let name = if simd::ALWAYS_FMA { "NEON" } else { "portable" };
    assert_eq!(simd::isa_name(), name);
    assert!(!bits().is_empty());
}
