//! Run-time choice of instruction set, and the scalar functions that vectorise under each of them.
#![allow(unsafe_code)]

use core::sync::atomic::{AtomicU8, Ordering};

/// What the processor offers; each level has all of those below.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Level {
    /// What every processor of this kind has.
    Portable = 1,
    /// AVX2, FMA and F16C.
    Avx2 = 2,
    /// AVX-512 in the forms that servers have had since 2017: F, VL, DQ and BW.
    Avx512 = 3,
}

fn detect() -> Level {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::is_x86_feature_detected as has;
        if has!("avx2") && has!("fma") && has!("f16c") {
            let wide = has!("avx512f") && has!("avx512vl") && has!("avx512dq") && has!("avx512bw");
            return if wide { Level::Avx512 } else { Level::Avx2 };
        }
    }
    Level::Portable
}

#[cfg(test)]
thread_local! {
    /// What this thread may use, so that a test can compare levels.
    pub(crate) static AT_MOST: core::cell::Cell<Level> = const { core::cell::Cell::new(Level::Avx512) };
}

/// The level in use. Asked once: the processor does not change, and short functions ask each time.
#[inline]
pub(crate) fn level() -> Level {
    static LEVEL: AtomicU8 = AtomicU8::new(0);
    let level = match LEVEL.load(Ordering::Relaxed) {
        3 => Level::Avx512,
        2 => Level::Avx2,
        1 => Level::Portable,
        _ => {
            let level = detect();
            LEVEL.store(level as u8, Ordering::Relaxed);
            level
        }
    };
    #[cfg(test)]
    let level = level.min(AT_MOST.get());
    level
}

/// Whether AVX2, FMA and F16C are there.
#[inline]
pub(crate) fn has_avx2() -> bool {
    level() >= Level::Avx2
}

/// Whether every processor of this kind multiplies and adds in one instruction: 64-bit ARM does, in NEON, which it always has.
pub(crate) const ALWAYS_FMA: bool = cfg!(target_arch = "aarch64");

/// Name of the instruction set in use.
pub(crate) fn isa_name() -> &'static str {
    match level() {
        Level::Avx512 => "AVX-512",
        Level::Avx2 => "AVX2",
        Level::Portable if ALWAYS_FMA => "NEON",
        Level::Portable => "portable",
    }
}

/// Defines a function whose body is compiled plain (on 64-bit ARM that is NEON), for AVX2 with FMA and for AVX-512, and chosen at run
/// time. The body is written as loops over fixed lanes, which the compiler turns into vectors; in it,
/// `fma::<FMA>` is one instruction where there is one and a product and a sum elsewhere. The lanes are fixed and nothing is reordered,
/// so AVX-512 gives the bits of AVX2.
macro_rules! simd_fn {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn plain<const FMA: bool>($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma,f16c")]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    plain::<true>($($arg),*)
                }
                #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512vl,avx512dq,avx512bw")]
                fn avx512($($arg: $ty),*) $(-> $ret)? {
                    plain::<true>($($arg),*)
                }
                match $crate::cpu::simd::level() {
                    // SAFETY: the features the callee is compiled for were detected.
                    $crate::cpu::simd::Level::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::cpu::simd::Level::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::cpu::simd::Level::Portable => {}
                }
            }
            plain::<{ $crate::cpu::simd::ALWAYS_FMA }>($($arg),*)
        }
    };
}
pub(crate) use simd_fn;

/// `a * b + c`
#[inline(always)]
pub(crate) fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// `exp(x)` within 2 units in the last place; 0 below -87.3, infinity above 88.7, NaN for NaN.
///
/// `x = n ln 2 + r`, a polynomial of `r` (Cephes), then `n` goes into the exponent.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer
    let z = x * core::f32::consts::LOG2_E + MAGIC;
    let n = z - MAGIC;
    let r = x - n * 0.693_359_4;
    let r = r + n * 2.121_944_4e-4;
    let p = 1.987_569_1e-4_f32;
    let p = p * r + 1.398_2e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 5e-1;
    let y = p * (r * r) + r + 1.0;
    // Two factors, so that neither 2^128 nor 2^-127 is needed on its own.
    let e = (z.to_bits() << 23) as i32 >> 23;
    let half = e >> 1;
    let two = |e: i32| f32::from_bits(((e + 127) << 23) as u32);
    let y = y * two(half) * two(e - half);
    let y = if x < -87.33 { 0.0 } else { y };
    if x > 88.72 { f32::INFINITY } else { y }
}

/// Lanes of the fixed accumulators: two AVX2 registers.
pub(crate) const LANES: usize = 16;

/// Sums lanes in a fixed tree.
#[inline(always)]
pub(crate) fn fold(mut acc: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            acc[i] += acc[i + width];
        }
        width /= 2;
    }
    acc[0]
}

/// Dot product in a fixed order that depends on the length only.
#[inline(always)]
pub(crate) fn dot_lanes<const FMA: bool>(a: &[f32], b: &[f32]) -> f32 {
    let mut acc = [0.0; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let (a_rest, b_rest) = (a_chunks.remainder(), b_chunks.remainder());
    for (a, b) in a_chunks.zip(b_chunks) {
        for l in 0..LANES {
            acc[l] = fma::<FMA>(a[l], b[l], acc[l]);
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    fold(acc) + rest
}

simd_fn! {
    /// Dot product in a fixed order that depends on the length only.
    pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
        dot_lanes::<FMA>(a, b)
    }
}

simd_fn! {
    /// `y += alpha * x`
    pub(crate) fn axpy(alpha: f32, x: &[f32], y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = fma::<FMA>(alpha, *x, *y);
        }
    }
}

simd_fn! {
    /// Largest number; minus infinity for none.
    pub(crate) fn max(x: &[f32]) -> f32 {
        let mut acc = [f32::NEG_INFINITY; LANES];
        let chunks = x.chunks_exact(LANES);
        let rest = chunks.remainder();
        for c in chunks {
            for l in 0..LANES {
                acc[l] = if c[l] > acc[l] { c[l] } else { acc[l] };
            }
        }
        let best = acc.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        rest.iter().copied().fold(best, f32::max)
    }
}

simd_fn! {
    /// `x = exp(scale * x - shift)`; returns the sum.
    pub(crate) fn exp_sum(x: &mut [f32], scale: f32, shift: f32) -> f32 {
        let mut acc = [0.0; LANES];
        let mut chunks = x.chunks_exact_mut(LANES);
        for c in &mut chunks {
            for l in 0..LANES {
                c[l] = exp(scale * c[l] - shift);
                acc[l] += c[l];
            }
        }
        let mut rest = 0.0;
        for v in chunks.into_remainder() {
            *v = exp(scale * *v - shift);
            rest += *v;
        }
        fold(acc) + rest
    }
}

simd_fn! {
    /// `Σ exp(scale * x - shift)`
    pub(crate) fn exp_total(x: &[f32], scale: f32, shift: f32) -> f32 {
        let mut acc = [0.0; LANES];
        let chunks = x.chunks_exact(LANES);
        let rest: f32 = chunks.remainder().iter().map(|x| exp(scale * x - shift)).sum();
        for c in chunks {
            for l in 0..LANES {
                acc[l] += exp(scale * c[l] - shift);
            }
        }
        fold(acc) + rest
    }
}

simd_fn! {
    /// Sum in a fixed order.
    pub(crate) fn sum(x: &[f32]) -> f32 {
        let mut acc = [0.0; LANES];
        let chunks = x.chunks_exact(LANES);
        let rest: f32 = chunks.remainder().iter().sum();
        for c in chunks {
            for l in 0..LANES {
                acc[l] += c[l];
            }
        }
        fold(acc) + rest
    }
}

simd_fn! {
    /// Whether a number is NaN.
    pub(crate) fn any_nan(x: &[f32]) -> bool {
        x.iter().fold(false, |bad, x| bad | x.is_nan())
    }
}
