//! AVX2 kernels of decode attention: one query against a run of keys, weights against values.
//!
//! What a key or value adds does not depend on where it stands in its run, so a cache may be cut
//! into pieces anywhere.
#![allow(unsafe_code)]

use core::arch::x86_64::*;

use super::attention_decode::Run;

/// `scores[j] = q · k_j`; `q.len()` is a multiple of 8.
#[target_feature(enable = "avx2,fma")]
pub(crate) fn score_keys(q: &[f32], run: Run<'_>, scores: &mut [f32]) {
    let d = q.len() / 8 * 8;
    let last = scores.len().saturating_sub(1);
    for (i, out) in scores.chunks_mut(4).enumerate() {
        // Four keys at once, so that their sums are independent; the last one fills up.
        let row = |l: usize| run.row((4 * i + l).min(last), d).as_ptr();
        let rows = [row(0), row(1), row(2), row(3)];
        let mut acc = [_mm256_setzero_ps(); 4];
        for c in (0..d).step_by(8) {
            // SAFETY: `c + 8 <= d`, and `row` checked each row's length.
            unsafe {
                let q = _mm256_loadu_ps(q.as_ptr().add(c));
                for (acc, row) in acc.iter_mut().zip(rows) {
                    *acc = _mm256_fmadd_ps(q, _mm256_loadu_ps(row.add(c)), *acc);
                }
            }
        }
        let pairs = (
            _mm256_hadd_ps(acc[0], acc[1]),
            _mm256_hadd_ps(acc[2], acc[3]),
        );
        let sums = _mm256_hadd_ps(pairs.0, pairs.1);
        let high = _mm256_extractf128_ps::<1>(sums);
        let mut four = [0.0_f32; 4];
        // SAFETY: `four` holds four numbers.
        unsafe {
            _mm_storeu_ps(
                four.as_mut_ptr(),
                _mm_add_ps(_mm256_castps256_ps128(sums), high),
            )
        };
        out.copy_from_slice(&four[..out.len()]);
    }
}

/// `out += Σ_j p[j] v_j`; `out.len()` is a multiple of 8.
#[target_feature(enable = "avx2,fma")]
pub(crate) fn add_values(p: &[f32], run: Run<'_>, out: &mut [f32]) {
    let mut from = 0;
    for part in out.chunks_mut(64) {
        match part.len() {
            64 => add_columns::<8>(p, run, from, part),
            _ => {
                for (i, part) in part.chunks_exact_mut(8).enumerate() {
                    add_columns::<1>(p, run, from + 8 * i, part);
                }
            }
        }
        from += part.len();
    }
}

/// `8 N` columns from column `from` on; the sums stay in registers over all rows.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn add_columns<const N: usize>(p: &[f32], run: Run<'_>, from: usize, out: &mut [f32]) {
    let out = &mut out[..8 * N];
    let mut acc = [_mm256_setzero_ps(); N];
    for (l, acc) in acc.iter_mut().enumerate() {
        // SAFETY: `out` holds 8 N numbers.
        *acc = unsafe { _mm256_loadu_ps(out.as_ptr().add(8 * l)) };
    }
    for (j, p) in p.iter().enumerate() {
        let row = run.row(j, from + 8 * N)[from..].as_ptr();
        let p = _mm256_set1_ps(*p);
        for (l, acc) in acc.iter_mut().enumerate() {
            // SAFETY: the row was just checked to hold `from + 8 N` numbers.
            *acc = _mm256_fmadd_ps(p, unsafe { _mm256_loadu_ps(row.add(8 * l)) }, *acc);
        }
    }
    for (l, acc) in acc.into_iter().enumerate() {
        // SAFETY: `out` holds 8 N numbers.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr().add(8 * l), acc) };
    }
}
