//! AVX2 kernels over stored blocks: 32 numbers are unpacked into four registers and used at once.
//!
//! Every sum runs over the groups of 32 in order, in eight lanes that are folded at the end, whatever
//! the number of rows that share the unpacking.
#![allow(unsafe_code)]

use core::arch::x86_64::*;

use super::few::Rows;
use super::unpack_avx2::{Brain, F32, Half, Q4_0, Q4_1, Q4K, Q5K, Q6K, Q8_0, Unpack};
use crate::dtype::DType;
use crate::quant::GROUP;

/// Up to so many rows of x, the unpacked registers are used directly; more share rows that are
/// unpacked into scratch, unless unpacking is almost free.
pub(crate) fn direct_m(dtype: DType) -> usize {
    if matches!(dtype, DType::F16 | DType::BF16) {
        4
    } else {
        2
    }
}

/// Weight rows of a direct kernel: enough independent sums to hide the multiply-add's latency.
pub(crate) fn direct_n(m: usize) -> usize {
    if m <= 2 { 4 } else { 2 }
}

/// Rows of x and of w in a dense kernel: 12 sums, 3 weights and one x fill the 16 registers.
pub(crate) const DENSE_M: usize = 4;
/// See [`DENSE_M`].
pub(crate) const DENSE_N: usize = 3;

/// Results of one kernel: rows of w by rows of x.
pub(crate) type Block = [[f32; 4]; 4];

/// Sums the lanes in a fixed tree.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn fold(x: __m256) -> f32 {
    let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
}

/// `out[i][j] = row i of w · row j of x` over `groups` groups of 32.
///
/// # Safety
/// AVX2, FMA and F16C are there; `w` points at N rows of `groups` groups each, `row_bytes` apart, and
/// `x` at M rows of `32 * groups` numbers, `stride` apart.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn direct<U: Unpack, const M: usize, const N: usize>(
    (w, row_bytes): (*const u8, usize),
    (x, stride): (*const f32, usize),
    groups: usize,
) -> Block {
    let mut acc = [[_mm256_setzero_ps(); M]; N];
    for g in 0..groups {
        let (at, sub) = (g / U::GROUPS * U::BYTES, g % U::GROUPS);
        for (i, acc) in acc.iter_mut().enumerate() {
            // SAFETY: group g of row i by the caller's promise.
            let p = unsafe { w.add(i * row_bytes + at) };
            // The same place of the rows after these: rows are too short for the hardware to see
            // where they go on. A prefetch outside the matrix does nothing.
            _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(N * row_bytes).cast());
            // SAFETY: as above.
            let v = unsafe { U::load(p, sub) };
            for (j, acc) in acc.iter_mut().enumerate() {
                for (l, v) in v.iter().enumerate() {
                    // SAFETY: group g of row j of x by the caller's promise.
                    let x = unsafe { _mm256_loadu_ps(x.add(j * stride + g * GROUP + 8 * l)) };
                    *acc = _mm256_fmadd_ps(*v, x, *acc);
                }
            }
        }
    }
    folded(acc)
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(crate) fn folded<const M: usize, const N: usize>(acc: [[__m256; M]; N]) -> Block {
    let mut out = Block::default();
    for (out, acc) in out.iter_mut().zip(acc) {
        for (out, acc) in out.iter_mut().zip(acc) {
            *out = fold(acc);
        }
    }
    out
}

/// [`direct`] over rows of w that are f32 already; the same sums in the same order.
///
/// # Safety
/// As for [`direct`], with N rows of `32 * groups` numbers at `w`, `w_stride` apart.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dense_block<const M: usize, const N: usize>(
    (w, w_stride): (*const f32, usize),
    (x, stride): (*const f32, usize),
    groups: usize,
) -> Block {
    let mut acc = [[_mm256_setzero_ps(); M]; N];
    for c in (0..groups * GROUP).step_by(8) {
        let mut v = [_mm256_setzero_ps(); N];
        for (i, v) in v.iter_mut().enumerate() {
            // SAFETY: inside row i by the caller's promise.
            *v = unsafe { _mm256_loadu_ps(w.add(i * w_stride + c)) };
        }
        for j in 0..M {
            // SAFETY: inside row j of x by the caller's promise.
            let x = unsafe { _mm256_loadu_ps(x.add(j * stride + c)) };
            for (acc, v) in acc.iter_mut().zip(v) {
                acc[j] = _mm256_fmadd_ps(v, x, acc[j]);
            }
        }
    }
    folded(acc)
}

/// `count` rows of f32 (at most [`DENSE_N`]) against the rows of `x` (at most [`DENSE_M`]).
///
/// # Safety
/// AVX2, FMA and F16C are there.
pub(crate) unsafe fn dense(w: &[f32], w_stride: usize, count: usize, x: Rows<'_>) -> Block {
    let groups = x.width / GROUP;
    let _ = (
        x.row(x.count - 1),
        &w[(count - 1) * w_stride..][..groups * GROUP],
    );
    let (w, x, m) = ((w.as_ptr(), w_stride), (x.data.as_ptr(), x.stride), x.count);
    // SAFETY: the features by the caller's promise; the last rows were just checked.
    unsafe {
        match (m, count) {
            (1, 1) => dense_block::<1, 1>(w, x, groups),
            (1, 2) => dense_block::<1, 2>(w, x, groups),
            (1, _) => dense_block::<1, 3>(w, x, groups),
            (2, 1) => dense_block::<2, 1>(w, x, groups),
            (2, 2) => dense_block::<2, 2>(w, x, groups),
            (2, _) => dense_block::<2, 3>(w, x, groups),
            (3, 1) => dense_block::<3, 1>(w, x, groups),
            (3, 2) => dense_block::<3, 2>(w, x, groups),
            (3, _) => dense_block::<3, 3>(w, x, groups),
            (_, 1) => dense_block::<4, 1>(w, x, groups),
            (_, 2) => dense_block::<4, 2>(w, x, groups),
            _ => dense_block::<4, 3>(w, x, groups),
        }
    }
}

/// `count` stored rows (at most [`direct_n`]) against the rows of `x` (at most [`direct_m`]).
///
/// # Safety
/// AVX2, FMA and F16C are there and `w` points at `count` rows of `x.width` numbers of type `dtype`.
pub(crate) unsafe fn stored(
    dtype: DType,
    w: (*const u8, usize),
    count: usize,
    x: Rows<'_>,
) -> Block {
    let _ = x.row(x.count - 1);
    // SAFETY: the caller's promise; the last row of x was just checked.
    unsafe {
        match dtype {
            DType::F32 => stored_as::<F32>(w, count, x),
            DType::F16 => stored_as::<Half>(w, count, x),
            DType::BF16 => stored_as::<Brain>(w, count, x),
            DType::Q8_0 => stored_as::<Q8_0>(w, count, x),
            DType::Q4_0 => stored_as::<Q4_0>(w, count, x),
            DType::Q4_1 => stored_as::<Q4_1>(w, count, x),
            DType::Q4_K => stored_as::<Q4K>(w, count, x),
            DType::Q5_K => stored_as::<Q5K>(w, count, x),
            DType::Q6_K => stored_as::<Q6K>(w, count, x),
        }
    }
}

/// Chooses the kernel for the number of rows.
///
/// # Safety
/// As for [`stored`].
unsafe fn stored_as<U: Unpack>(w: (*const u8, usize), count: usize, x: Rows<'_>) -> Block {
    let (xs, groups) = ((x.data.as_ptr(), x.stride), x.width / GROUP);
    let mut out = Block::default();
    // SAFETY: the caller's promise, for each of the `count` rows.
    unsafe {
        match (x.count, count) {
            (1, 4) => return direct::<U, 1, 4>(w, xs, groups),
            (2, 4) => return direct::<U, 2, 4>(w, xs, groups),
            (3, 2) => return direct::<U, 3, 2>(w, xs, groups),
            (4, 2) => return direct::<U, 4, 2>(w, xs, groups),
            (m, count) => {
                for (i, out) in out.iter_mut().enumerate().take(count) {
                    let row = (w.0.add(i * w.1), w.1);
                    [*out, ..] = match m {
                        1 => direct::<U, 1, 1>(row, xs, groups),
                        2 => direct::<U, 2, 1>(row, xs, groups),
                        3 => direct::<U, 3, 1>(row, xs, groups),
                        _ => direct::<U, 4, 1>(row, xs, groups),
                    };
                }
            }
        }
    }
    out
}

/// Unpacks whole groups of a row from column `from` on; returns how many numbers it wrote.
///
/// # Safety
/// AVX2, FMA and F16C are there.
pub(crate) unsafe fn unpack(dtype: DType, row: &[u8], from: usize, out: &mut [f32]) -> usize {
    // SAFETY: the features by the caller's promise.
    unsafe {
        match dtype {
            DType::F32 => unpack_groups::<F32>(row, from, out),
            DType::F16 => unpack_groups::<Half>(row, from, out),
            DType::BF16 => unpack_groups::<Brain>(row, from, out),
            DType::Q8_0 => unpack_groups::<Q8_0>(row, from, out),
            DType::Q4_0 => unpack_groups::<Q4_0>(row, from, out),
            DType::Q4_1 => unpack_groups::<Q4_1>(row, from, out),
            DType::Q4_K => unpack_groups::<Q4K>(row, from, out),
            DType::Q5_K => unpack_groups::<Q5K>(row, from, out),
            DType::Q6_K => unpack_groups::<Q6K>(row, from, out),
        }
    }
}

/// # Safety
/// AVX2, FMA and F16C are there.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack_groups<U: Unpack>(row: &[u8], from: usize, out: &mut [f32]) -> usize {
    let whole = out.len() / GROUP;
    for (i, out) in out.chunks_exact_mut(GROUP).enumerate() {
        let g = from / GROUP + i;
        let at = g / U::GROUPS * U::BYTES;
        let block = &row[at..at + U::BYTES];
        // SAFETY: the block was just checked, and `out` holds 32 numbers.
        unsafe {
            let v = U::load(block.as_ptr(), g % U::GROUPS);
            for (l, v) in v.iter().enumerate() {
                _mm256_storeu_ps(out.as_mut_ptr().add(8 * l), *v);
            }
        }
    }
    whole * GROUP
}
