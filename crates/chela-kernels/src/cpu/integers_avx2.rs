//! AVX2 kernels that multiply 8-bit weights (Q8_0) with rounded activations as 16-bit integers.
//!
//! `Σ w x ≈ d · s · Σ q p` for 32 numbers, with `w = d · q` and `x ≈ s · p`. The integer sums are exact, also as floats
//! (4 · 128 · 32,767 ≤ 2^24); the float sums run over the groups in order, in eight lanes folded at the end, whatever rows share
//! the unpacking.
//!
//! Measured against the float kernels (docs/log.md): up to twice as fast on 8-bit weights, slower on 4 to 6 bits from 16 rows on,
//! where two scales and an offset for every 32 products eat the gain; so those types have none.
#![allow(unsafe_code)]

use core::arch::x86_64::*;

use super::few_avx2::{Block, folded};
use super::rounded::Rounded;
use super::unpack_avx2::half;
use crate::quant::GROUP;

/// Rows of x in a kernel.
pub(crate) const INT_M: usize = 4;
/// Bytes of a group of 32: a half-precision scale and the numbers.
const BYTES: usize = 34;
/// Bytes that a prefetch runs ahead: about what memory delivers during its own latency.
const AHEAD: usize = 4096;

/// Rows of w in a kernel.
pub(crate) fn int_n(m: usize) -> usize {
    if m == 1 { 4 } else { 1 }
}

/// `out[i][j] = row i of w · row first + j of x`
///
/// # Safety
/// AVX2, FMA and F16C are there; `w` points at N rows of `x.groups()` groups each, `row_bytes` apart, and x has
/// `first + M` rows.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn block<const M: usize, const N: usize>(
    (w, row_bytes): (*const u8, usize),
    x: &Rounded,
    first: usize,
) -> Block {
    let q: [*const i16; M] = core::array::from_fn(|j| x.q(first + j).as_ptr());
    let scale: [*const f32; M] = core::array::from_fn(|j| x.scale(first + j).as_ptr());
    let mut acc = [[_mm256_setzero_ps(); M]; N];
    for g in 0..x.groups() {
        for (i, acc) in acc.iter_mut().enumerate() {
            // SAFETY: group g of row i by the caller's promise.
            let (p, d, low, high) = unsafe {
                let p = w.add(i * row_bytes + g * BYTES);
                let low = _mm256_cvtepi8_epi16(_mm_loadu_si128(p.add(2).cast()));
                let high = _mm256_cvtepi8_epi16(_mm_loadu_si128(p.add(18).cast()));
                (p, _mm256_set1_ps(half(p)), low, high)
            };
            // Rows are too short for the hardware to see where they go on. A prefetch outside the matrix does nothing.
            _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(AHEAD).cast());
            for (j, acc) in acc.iter_mut().enumerate() {
                // SAFETY: group g of row first + j of x: `Rounded` holds `groups` of each for each row.
                let (x_low, x_high, s) = unsafe {
                    let q = q[j].add(g * GROUP);
                    (
                        _mm256_loadu_si256(q.cast()),
                        _mm256_loadu_si256(q.add(GROUP / 2).cast()),
                        _mm256_broadcast_ss(&*scale[j].add(g)),
                    )
                };
                let sums = _mm256_add_epi32(
                    _mm256_madd_epi16(low, x_low),
                    _mm256_madd_epi16(high, x_high),
                );
                *acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), _mm256_mul_ps(d, s), *acc);
            }
        }
    }
    folded(acc)
}

/// `count` stored rows (at most [`int_n`]) against rows `first..first + m` of x (m at most [`INT_M`]).
///
/// # Safety
/// AVX2, FMA and F16C are there and `w` points at `count` rows of `x.groups()` Q8_0 groups.
pub(crate) unsafe fn products(
    w: (*const u8, usize),
    count: usize,
    x: &Rounded,
    (first, m): (usize, usize),
) -> Block {
    let _ = x.q(first + m - 1);
    // SAFETY: the caller's promise; the last row of x was just checked.
    unsafe {
        match (m, count) {
            (1, 1) => block::<1, 1>(w, x, first),
            (1, 2) => block::<1, 2>(w, x, first),
            (1, 3) => block::<1, 3>(w, x, first),
            (1, _) => block::<1, 4>(w, x, first),
            (2, _) => block::<2, 1>(w, x, first),
            (3, _) => block::<3, 1>(w, x, first),
            _ => block::<4, 1>(w, x, first),
        }
    }
}
