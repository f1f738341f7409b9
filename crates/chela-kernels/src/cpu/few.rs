//! Products of a stored matrix with 1 to 16 rows, read block by block without a float copy.
//!
//! Every output number is one dot product summed in an order that depends on the row length alone,
//! so a row's result is the same, bit for bit, whatever stands beside it.
#![allow(unsafe_code)]

use core::ops::Range;

use super::CpuWeight;
use super::rounded::Rounded;
use super::simd::dot;
use super::tiles::with_scratch;
use crate::dtype::DType;
use crate::quant;

/// Rows of x that share a pass over the weight's tile.
pub(crate) const FEW: usize = 16;

/// Rows of activations inside a buffer.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) count: usize,
    pub(crate) width: usize,
}

impl<'a> Rows<'a> {
    pub(crate) fn row(&self, i: usize) -> &'a [f32] {
        &self.data[i * self.stride..][..self.width]
    }

    /// Rows from `first` on, at most `count`.
    pub(crate) fn part(self, first: usize, count: usize) -> Self {
        let count = count.min(self.count - first);
        Self {
            data: &self.data[first * self.stride..],
            count,
            ..self
        }
    }
}

/// Unpacks columns of one stored row with the fastest path there is.
pub(crate) fn unpack(dtype: DType, row: &[u8], from: usize, out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if super::simd::has_avx2() {
        // SAFETY: the features were just detected.
        let done = unsafe { super::few_avx2::unpack(dtype, row, from, out) };
        if done < out.len() {
            quant::unpack(dtype, row, from + done, &mut out[done..]);
        }
        return;
    }
    quant::unpack(dtype, row, from, out);
}

/// Calls `put(row of x, row of w, dot product)` for all of `x` and `w_rows`.
pub(crate) fn products(
    weight: &CpuWeight,
    w_rows: Range<usize>,
    x: Rows<'_>,
    put: impl FnMut(usize, usize, f32),
) {
    #[cfg(target_arch = "x86_64")]
    if super::simd::has_avx2() {
        return products_avx2(weight, w_rows, x, put);
    }
    products_portable(weight, w_rows, x, put);
}

/// Unpacks each row once and multiplies it with every row of x.
pub(crate) fn products_portable(
    weight: &CpuWeight,
    w_rows: Range<usize>,
    x: Rows<'_>,
    mut put: impl FnMut(usize, usize, f32),
) {
    with_scratch(weight.cols(), |scratch| {
        for n in w_rows {
            quant::unpack(weight.dtype(), weight.row(n), 0, scratch);
            for m in 0..x.count {
                put(m, n, dot(scratch, x.row(m)));
            }
        }
    });
}

/// Whether a weight's products of few rows are made of integers here; the answer hangs on its type alone, so that a row's
/// result does not depend on how many rows there are.
pub(crate) fn takes_rounded(weight: &CpuWeight) -> bool {
    cfg!(target_arch = "x86_64") && weight.dtype() == DType::Q8_0 && super::simd::has_avx2()
}

/// [`products`] of a weight that [`takes_rounded`] activations, with `rows` of x.
pub(crate) fn products_rounded(
    weight: &CpuWeight,
    w_rows: Range<usize>,
    (x, rows): (&Rounded, Range<usize>),
    mut put: impl FnMut(usize, usize, f32),
) {
    debug_assert!(takes_rounded(weight) && x.groups() * quant::GROUP == weight.cols());
    #[cfg(target_arch = "x86_64")]
    {
        use super::integers_avx2::{INT_M, int_n, products};
        // Even parts: five rows are three and two.
        let part = rows.len().div_ceil(rows.len().div_ceil(INT_M));
        let together = int_n(part);
        for n in w_rows.clone().step_by(together) {
            let count = together.min(w_rows.end - n);
            let w = (weight.row_span(n..n + count).as_ptr(), weight.row_bytes());
            for first in rows.clone().step_by(part) {
                let m = part.min(rows.end - first);
                // SAFETY: the type and the features by `takes_rounded`, the width by `linear`'s check; the rows were just
                // borrowed.
                let out = unsafe { products(w, count, x, (first, m)) };
                for (i, out) in out.iter().enumerate().take(count) {
                    for (j, value) in out.iter().enumerate().take(m) {
                        put(first + j, n + i, *value);
                    }
                }
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (w_rows, rows, &mut put);
}

#[cfg(target_arch = "x86_64")]
fn products_avx2(
    weight: &CpuWeight,
    w_rows: Range<usize>,
    x: Rows<'_>,
    mut put: impl FnMut(usize, usize, f32),
) {
    use super::few_avx2::{self, DENSE_M, DENSE_N};
    let whole = x.width.is_multiple_of(quant::GROUP);
    let mut show =
        |first: usize, count: usize, (n, rows): (usize, usize), out: &few_avx2::Block| {
            for (i, out) in out.iter().enumerate().take(rows) {
                for (m, value) in out.iter().enumerate().take(count) {
                    let rest = if whole {
                        0.0
                    } else {
                        tail(weight, n + i, x.row(first + m))
                    };
                    put(first + m, n + i, value + rest);
                }
            }
        };
    if x.count <= few_avx2::direct_m(weight.dtype()) {
        let together = few_avx2::direct_n(x.count);
        for n in w_rows.clone().step_by(together) {
            let rows = together.min(w_rows.end - n);
            let bytes = (weight.row_span(n..n + rows).as_ptr(), weight.row_bytes());
            // SAFETY: `products` detected the features; the rows were just borrowed and hold `cols`
            // numbers each, which equals `x.width` (`linear` checks it).
            let out = unsafe { few_avx2::stored(weight.dtype(), bytes, rows, x) };
            show(0, x.count, (n, rows), &out);
        }
        return;
    }
    // Even parts: five rows are three and two.
    let part = x.count.div_ceil(x.count.div_ceil(DENSE_M));
    for n in w_rows.clone().step_by(DENSE_N) {
        let rows = DENSE_N.min(w_rows.end - n);
        super::linear::with_rows(weight, n..n + rows, |w, stride| {
            for first in (0..x.count).step_by(part) {
                let x = x.part(first, part);
                // SAFETY: `products` detected the features.
                let out = unsafe { few_avx2::dense(w, stride, rows, x) };
                show(first, x.count, (n, rows), &out);
            }
        });
    }
}

/// What the last columns add, when they do not fill a group of 32 (plain types only).
#[cfg(target_arch = "x86_64")]
fn tail(weight: &CpuWeight, row: usize, x: &[f32]) -> f32 {
    let whole = x.len() / quant::GROUP * quant::GROUP;
    let mut w = [0.0; quant::GROUP];
    let w = &mut w[..x.len() - whole];
    quant::unpack(weight.dtype(), weight.row(row), whole, w);
    w.iter().zip(&x[whole..]).map(|(w, x)| w * x).sum()
}

/// Estimated nanoseconds per column of one weight row against `m` rows of x.
pub(crate) fn cost_ns(dtype: Option<DType>, m: usize) -> f64 {
    let unpack = match dtype {
        Some(DType::F32) => 0.15,
        Some(DType::F16 | DType::BF16) => 0.1,
        _ => 0.06,
    };
    unpack + 0.03 * m as f64
}
