//! Unpacking of 32 stored numbers into four AVX2 registers, for every stored type.
#![allow(unsafe_code)]

use core::arch::x86_64::*;

use crate::quant;

/// How a stored type unpacks 32 numbers.
pub(crate) trait Unpack {
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
pub(crate) unsafe fn half(p: *const u8) -> f32 {
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

pub(crate) struct F32;
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

pub(crate) struct Half;
impl Unpack for Half {
    const GROUPS: usize = 1;
    const BYTES: usize = 64;
    #[inline(always)]
    unsafe fn load(p: *const u8, _: usize) -> [__m256; 4] {
        // SAFETY: 64 readable bytes by the caller's promise.
        unsafe {
            [
                half8(p),
                half8(p.add(16)),
                half8(p.add(32)),
                half8(p.add(48)),
            ]
        }
    }
}

pub(crate) struct Brain;
impl Unpack for Brain {
    const GROUPS: usize = 1;
    const BYTES: usize = 64;
    #[inline(always)]
    unsafe fn load(p: *const u8, _: usize) -> [__m256; 4] {
        // SAFETY: 64 readable bytes by the caller's promise.
        unsafe {
            [
                brain8(p),
                brain8(p.add(16)),
                brain8(p.add(32)),
                brain8(p.add(48)),
            ]
        }
    }
}

pub(crate) struct Q8_0;
impl Unpack for Q8_0 {
    const GROUPS: usize = 1;
    const BYTES: usize = 34;
    #[inline(always)]
    unsafe fn load(p: *const u8, _: usize) -> [__m256; 4] {
        // SAFETY: 34 readable bytes by the caller's promise.
        unsafe {
            let d = _mm256_set1_ps(half(p));
            [
                signed8(p.add(2), d),
                signed8(p.add(10), d),
                signed8(p.add(18), d),
                signed8(p.add(26), d),
            ]
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
    // One shuffle brings eight bytes into eight lanes; each holds a low and a high number.
    let pick = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    let pick = _mm256_or_si256(pick, _mm256_set1_epi32(0x8080_8000_u32 as i32));
    // SAFETY: the caller's promise.
    let q = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(p.cast()) });
    let a = _mm256_shuffle_epi8(q, pick);
    let b = _mm256_shuffle_epi8(q, _mm256_add_epi32(pick, _mm256_set1_epi32(8)));
    let mask = _mm256_set1_epi32(15);
    [
        _mm256_cvtepi32_ps(_mm256_and_si256(a, mask)),
        _mm256_cvtepi32_ps(_mm256_and_si256(b, mask)),
        _mm256_cvtepi32_ps(_mm256_srli_epi32::<4>(a)),
        _mm256_cvtepi32_ps(_mm256_srli_epi32::<4>(b)),
    ]
}

pub(crate) struct Q4_0;
impl Unpack for Q4_0 {
    const GROUPS: usize = 1;
    const BYTES: usize = 18;
    #[inline(always)]
    unsafe fn load(p: *const u8, _: usize) -> [__m256; 4] {
        // SAFETY: 18 readable bytes by the caller's promise.
        unsafe {
            let d = half(p);
            affine(
                nibbles(p.add(2)),
                _mm256_set1_ps(d),
                _mm256_set1_ps(-8.0 * d),
            )
        }
    }
}

pub(crate) struct Q4_1;
impl Unpack for Q4_1 {
    const GROUPS: usize = 1;
    const BYTES: usize = 20;
    #[inline(always)]
    unsafe fn load(p: *const u8, _: usize) -> [__m256; 4] {
        // SAFETY: 20 readable bytes by the caller's promise.
        unsafe {
            let pair = _mm256_cvtph_ps(_mm_set1_epi32(p.cast::<i32>().read_unaligned()));
            affine(
                nibbles(p.add(4)),
                _mm256_moveldup_ps(pair),
                _mm256_movehdup_ps(pair),
            )
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
        (
            q,
            _mm256_set1_ps(half(p) * s),
            _mm256_set1_ps(-half(p.add(2)) * m),
        )
    }
}

pub(crate) struct Q4K;
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

pub(crate) struct Q5K;
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

pub(crate) struct Q6K;
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
            let (a, b) = (
                d * f32::from(scales.read()),
                d * f32::from(scales.add(1).read()),
            );
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
