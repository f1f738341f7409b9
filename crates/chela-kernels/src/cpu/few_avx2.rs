//! AVX2 kernels over stored blocks: 32 numbers are unpacked into four registers and used at once.
//!
//! Every sum runs over the groups of 32 in order, in eight lanes that are folded at the end, whatever
//! the number of rows that share the unpacking.
#![allow(unsafe_code)]

use core::arch::x86_64::*;

use super::few::Rows;
use crate::dtype::DType;
use crate::quant::{self, GROUP};

/// Weight rows handled together: enough independent sums to hide the latency of the multiply-add.
pub(crate) const fn rows_together(m: usize) -> usize {
    match m {
        1 | 2 => 4,
        3 | 4 => 2,
        _ => 1,
    }
}

/// The most rows of x that one kernel takes.
pub(crate) const MAX_M: usize = 8;

/// How a stored type unpacks 32 numbers.
trait Unpack {
    /// Groups of 32 in a block, and bytes from one block to the next (or of one group of a plain
    /// type).
    const GROUPS: usize;
    const BYTES: usize;
    /// Group `sub` of the block at `p`.
    ///
    /// # Safety
    /// AVX2, FMA and F16C are there and `p` points at `BYTES` readable bytes.
    unsafe fn load(p: *const u8, sub: usize) -> [__m256; 4];
}

/// Eight bytes as numbers.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn bytes_to_ps(q: __m128i) -> __m256 {
    _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(q))
}

/// 16 low bytes and 16 high bytes as numbers.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn spread(low: __m128i, high: __m128i) -> [__m256; 4] {
    [
        bytes_to_ps(low),
        bytes_to_ps(_mm_unpackhi_epi64(low, low)),
        bytes_to_ps(high),
        bytes_to_ps(_mm_unpackhi_epi64(high, high)),
    ]
}

/// `q * d + m`
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn affine(q: [__m256; 4], d: __m256, m: __m256) -> [__m256; 4] {
    let [a, b, c, e] = q;
    [
        _mm256_fmadd_ps(a, d, m),
        _mm256_fmadd_ps(b, d, m),
        _mm256_fmadd_ps(c, d, m),
        _mm256_fmadd_ps(e, d, m),
    ]
}

/// A half-precision number.
///
/// # Safety
/// Two readable bytes at `p`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn half(p: *const u8) -> f32 {
    // SAFETY: the caller's promise.
    let bits = unsafe { p.cast::<u16>().read_unaligned() };
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))))
}

/// Eight half-precision numbers.
///
/// # Safety
/// 16 readable bytes at `p`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn half8(p: *const u8) -> __m256 {
    // SAFETY: the caller's promise.
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(p.cast()) })
}

/// Eight bfloat16 numbers: the upper halves of f32.
///
/// # Safety
/// 16 readable bytes at `p`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn brain8(p: *const u8) -> __m256 {
    // SAFETY: the caller's promise.
    let x = _mm256_cvtepu16_epi32(unsafe { _mm_loadu_si128(p.cast()) });
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(x))
}

/// Eight signed bytes times `d`.
///
/// # Safety
/// 8 readable bytes at `p`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn signed8(p: *const u8, d: __m256) -> __m256 {
    // SAFETY: the caller's promise.
    let q = _mm256_cvtepi8_epi32(unsafe { _mm_loadl_epi64(p.cast()) });
    _mm256_mul_ps(_mm256_cvtepi32_ps(q), d)
}

struct F32;
impl Unpack for F32 {
    const GROUPS: usize = 1;
    const BYTES: usize = 128;
    #[inline(always)]
    unsafe fn load(p: *const u8, _: usize) -> [__m256; 4] {
        let p = p.cast::<f32>();
        // SAFETY: 128 readable bytes by the caller's promise.
        unsafe {
            [
                _mm256_loadu_ps(p),
                _mm256_loadu_ps(p.add(8)),
                _mm256_loadu_ps(p.add(16)),
                _mm256_loadu_ps(p.add(24)),
            ]
        }
    }
}

struct Half;
impl Unpack for Half {
    const GROUPS: usize = 1;
    const BYTES: usize = 64;
    #[inline(always)]
    unsafe fn load(p: *const u8, _: usize) -> [__m256; 4] {
        // SAFETY: 64 readable bytes by the caller's promise.
        unsafe { [half8(p), half8(p.add(16)), half8(p.add(32)), half8(p.add(48))] }
    }
}

struct Brain;
impl Unpack for Brain {
    const GROUPS: usize = 1;
    const BYTES: usize = 64;
    #[inline(always)]
    unsafe fn load(p: *const u8, _: usize) -> [__m256; 4] {
        // SAFETY: 64 readable bytes by the caller's promise.
        unsafe { [brain8(p), brain8(p.add(16)), brain8(p.add(32)), brain8(p.add(48))] }
    }
}

struct Q8_0;
impl Unpack for Q8_0 {
    const GROUPS: usize = 1;
    const BYTES: usize = 34;
    #[inline(always)]
    unsafe fn load(p: *const u8, _: usize) -> [__m256; 4] {
        // SAFETY: 34 readable bytes by the caller's promise.
        unsafe {
            let d = _mm256_set1_ps(half(p));
            [signed8(p.add(2), d), signed8(p.add(10), d), signed8(p.add(18), d), signed8(p.add(26), d)]
        }
    }
}

/// The 16 bytes at `p` as 32 nibbles: low ones first.
///
/// # Safety
/// 16 readable bytes at `p`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn nibbles(p: *const u8) -> [__m256; 4] {
    let mask = _mm_set1_epi8(15);
    // SAFETY: the caller's promise.
    let q = unsafe { _mm_loadu_si128(p.cast()) };
    spread(_mm_and_si128(q, mask), _mm_and_si128(_mm_srli_epi16::<4>(q), mask))
}

struct Q4_0;
impl Unpack for Q4_0 {
    const GROUPS: usize = 1;
    const BYTES: usize = 18;
    #[inline(always)]
    unsafe fn load(p: *const u8, _: usize) -> [__m256; 4] {
        // SAFETY: 18 readable bytes by the caller's promise.
        unsafe {
            let d = half(p);
            affine(nibbles(p.add(2)), _mm256_set1_ps(d), _mm256_set1_ps(-8.0 * d))
        }
    }
}

struct Q4_1;
impl Unpack for Q4_1 {
    const GROUPS: usize = 1;
    const BYTES: usize = 20;
    #[inline(always)]
    unsafe fn load(p: *const u8, _: usize) -> [__m256; 4] {
        // SAFETY: 20 readable bytes by the caller's promise.
        unsafe {
            let pair = _mm_cvtph_ps(_mm_cvtsi32_si128(p.cast::<i32>().read_unaligned()));
            let (d, m) = (_mm256_broadcastss_ps(pair), _mm256_broadcastss_ps(_mm_movehdup_ps(pair)));
            affine(nibbles(p.add(4)), d, m)
        }
    }
}

/// 32 bytes as numbers.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn spread32(q: __m256i) -> [__m256; 4] {
    spread(_mm256_castsi256_si128(q), _mm256_extracti128_si256::<1>(q))
}

/// The nibbles and the scale and minimum of group `sub` of a Q4_K or Q5_K block.
///
/// # Safety
/// A whole block at `p` whose nibbles start at `at`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn k_group(p: *const u8, at: usize, sub: usize) -> (__m256i, __m256, __m256) {
    // SAFETY: the caller's promise.
    unsafe {
        let scales = core::slice::from_raw_parts(p.add(4), 12);
        let (s, m) = quant::scale_min(scales, sub);
        let q = _mm256_loadu_si256(p.add(at + sub / 2 * 32).cast());
        let q = _mm256_srl_epi16(q, _mm_cvtsi32_si128(4 * (sub % 2) as i32));
        let q = _mm256_and_si256(q, _mm256_set1_epi8(15));
        (q, _mm256_set1_ps(half(p) * s), _mm256_set1_ps(-half(p.add(2)) * m))
    }
}

struct Q4K;
impl Unpack for Q4K {
    const GROUPS: usize = 8;
    const BYTES: usize = 144;
    #[inline(always)]
    unsafe fn load(p: *const u8, sub: usize) -> [__m256; 4] {
        // SAFETY: a whole block by the caller's promise.
        unsafe {
            let (q, d, m) = k_group(p, 16, sub);
            affine(spread32(q), d, m)
        }
    }
}

struct Q5K;
impl Unpack for Q5K {
    const GROUPS: usize = 8;
    const BYTES: usize = 176;
    #[inline(always)]
    unsafe fn load(p: *const u8, sub: usize) -> [__m256; 4] {
        // SAFETY: a whole block by the caller's promise.
        unsafe {
            let (q, d, m) = k_group(p, 48, sub);
            let high = _mm256_loadu_si256(p.add(16).cast());
            let high = _mm256_srl_epi16(high, _mm_cvtsi32_si128(sub as i32));
            let high = _mm256_slli_epi16::<4>(_mm256_and_si256(high, _mm256_set1_epi8(1)));
            affine(spread32(_mm256_or_si256(q, high)), d, m)
        }
    }
}

struct Q6K;
impl Unpack for Q6K {
    const GROUPS: usize = 8;
    const BYTES: usize = 210;
    #[inline(always)]
    unsafe fn load(p: *const u8, sub: usize) -> [__m256; 4] {
        // SAFETY: a whole block by the caller's promise.
        unsafe {
            let (part, c) = (sub / 4, sub % 4);
            let low = _mm256_loadu_si256(p.add(64 * part + 32 * (c % 2)).cast());
            let low = _mm256_srl_epi16(low, _mm_cvtsi32_si128(4 * (c / 2) as i32));
            let low = _mm256_and_si256(low, _mm256_set1_epi8(15));
            let high = _mm256_loadu_si256(p.add(128 + 32 * part).cast());
            let high = _mm256_srl_epi16(high, _mm_cvtsi32_si128(2 * c as i32));
            let high = _mm256_slli_epi16::<4>(_mm256_and_si256(high, _mm256_set1_epi8(3)));
            let q = spread32(_mm256_or_si256(low, high));
            let d = half(p.add(208));
            let scales = p.add(192 + 2 * sub).cast::<i8>();
            let (a, b) = (d * f32::from(scales.read()), d * f32::from(scales.add(1).read()));
            let [q0, q1, q2, q3] = q;
            // 32 q is exact, so the shifted product is rounded once.
            let (a, a_shift) = (_mm256_set1_ps(a), _mm256_set1_ps(-32.0 * a));
            let (b, b_shift) = (_mm256_set1_ps(b), _mm256_set1_ps(-32.0 * b));
            [
                _mm256_fmadd_ps(q0, a, a_shift),
                _mm256_fmadd_ps(q1, a, a_shift),
                _mm256_fmadd_ps(q2, b, b_shift),
                _mm256_fmadd_ps(q3, b, b_shift),
            ]
        }
    }
}

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
unsafe fn block<U: Unpack, const M: usize, const N: usize>(
    (w, row_bytes): (*const u8, usize),
    (x, stride): (*const f32, usize),
    groups: usize,
) -> [[f32; MAX_M]; N] {
    let mut acc = [[_mm256_setzero_ps(); M]; N];
    for g in 0..groups {
        let (at, sub) = (g / U::GROUPS * U::BYTES, g % U::GROUPS);
        for (i, acc) in acc.iter_mut().enumerate() {
            // SAFETY: group g of row i by the caller's promise.
            let v = unsafe { U::load(w.add(i * row_bytes + at), sub) };
            for (j, acc) in acc.iter_mut().enumerate() {
                for (l, v) in v.iter().enumerate() {
                    // SAFETY: group g of row j of x by the caller's promise.
                    let x = unsafe { _mm256_loadu_ps(x.add(j * stride + g * GROUP + 8 * l)) };
                    *acc = _mm256_fmadd_ps(*v, x, *acc);
                }
            }
        }
    }
    let mut out = [[0.0; MAX_M]; N];
    for (out, acc) in out.iter_mut().zip(acc) {
        for (out, acc) in out.iter_mut().zip(acc) {
            *out = fold(acc);
        }
    }
    out
}

/// `count` rows of `w` (at most [`rows_together`]) against the rows of `x` (at most [`MAX_M`]).
///
/// # Safety
/// AVX2, FMA and F16C are there and `w` points at `count` rows of `x.width` numbers of type `dtype`.
pub(crate) unsafe fn products(
    dtype: DType,
    (w, row_bytes, count): (*const u8, usize, usize),
    x: Rows<'_>,
) -> [[f32; MAX_M]; 4] {
    let _ = (x.row(x.count - 1), "the last row lies inside the buffer");
    let (w, count) = ((w, row_bytes), count);
    // SAFETY: the caller's promise; `x.row` checked the last row of x.
    unsafe {
        match dtype {
            DType::F32 => rows::<F32>(w, count, x),
            DType::F16 => rows::<Half>(w, count, x),
            DType::BF16 => rows::<Brain>(w, count, x),
            DType::Q8_0 => rows::<Q8_0>(w, count, x),
            DType::Q4_0 => rows::<Q4_0>(w, count, x),
            DType::Q4_1 => rows::<Q4_1>(w, count, x),
            DType::Q4_K => rows::<Q4K>(w, count, x),
            DType::Q5_K => rows::<Q5K>(w, count, x),
            DType::Q6_K => rows::<Q6K>(w, count, x),
        }
    }
}

/// Chooses the kernel for the number of rows.
///
/// # Safety
/// As for [`products`].
unsafe fn rows<U: Unpack>(
    w: (*const u8, usize),
    count: usize,
    x: Rows<'_>,
) -> [[f32; MAX_M]; 4] {
    let (xs, groups) = ((x.data.as_ptr(), x.stride), x.width / GROUP);
    let mut out = [[0.0; MAX_M]; 4];
    // SAFETY: the caller's promise, for each of the `count` rows.
    unsafe {
        let row = |i: usize| (w.0.add(i * w.1), w.1);
        match (x.count, count) {
            (1, 4) => return block::<U, 1, 4>(w, xs, groups),
            (2, 4) => return block::<U, 2, 4>(w, xs, groups),
            (3, 2) => out[..2].copy_from_slice(&block::<U, 3, 2>(w, xs, groups)),
            (4, 2) => out[..2].copy_from_slice(&block::<U, 4, 2>(w, xs, groups)),
            (m, count) => {
                for (i, out) in out.iter_mut().enumerate().take(count) {
                    let w = row(i);
                    [*out] = match m {
                        1 => block::<U, 1, 1>(w, xs, groups),
                        2 => block::<U, 2, 1>(w, xs, groups),
                        3 => block::<U, 3, 1>(w, xs, groups),
                        4 => block::<U, 4, 1>(w, xs, groups),
                        5 => block::<U, 5, 1>(w, xs, groups),
                        6 => block::<U, 6, 1>(w, xs, groups),
                        7 => block::<U, 7, 1>(w, xs, groups),
                        _ => block::<U, 8, 1>(w, xs, groups),
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
