//! Dense f32 products, cut into tiles that each call `gemm` on one thread.
#![allow(unsafe_code)]

use super::few::FEW;
use super::simd;
use super::tiles::Shared;
use super::{Cpu, CpuBuf, check_mat, check_mat_mut, equal};
use crate::error::Result;
use crate::ops::{Acc, Mat, MatMut, Product};

/// A strided operand: element `(r, c)` at `ptr + r * rs + c * cs`.
#[derive(Clone, Copy)]
pub(crate) struct Operand {
    pub(crate) ptr: *const f32,
    pub(crate) rs: usize,
    pub(crate) cs: usize,
}

// SAFETY: a pointer with strides; who dereferences it (`sgemm`) states what must hold.
unsafe impl Send for Operand {}
// SAFETY: as above.
unsafe impl Sync for Operand {}

impl Operand {
    pub(crate) fn rows(data: &[f32], stride: usize) -> Self {
        Self {
            ptr: data.as_ptr(),
            rs: stride,
            cs: 1,
        }
    }

    pub(crate) fn transposed(self) -> Self {
        Self {
            ptr: self.ptr,
            rs: self.cs,
            cs: self.rs,
        }
    }

    /// The operand from element (r, c) on.
    pub(crate) fn at(self, r: usize, c: usize) -> Self {
        let ptr = self.ptr.wrapping_add(r * self.rs + c * self.cs);
        Self { ptr, ..self }
    }
}

/// `c [m, n] (+)= alpha * a [m, k] · b [k, n]` on this thread; rows of `c` lie `c_rs` apart.
///
/// # Safety
/// Every element named by the sizes and strides is inside its allocation, `c` is not read or written
/// by anyone else meanwhile and does not overlap `a` or `b`.
#[allow(clippy::too_many_arguments)]
#[inline]
pub(crate) unsafe fn sgemm(
    (m, n, k): (usize, usize, usize),
    alpha: f32,
    a: Operand,
    b: Operand,
    c: *mut f32,
    c_rs: usize,
    acc: Acc,
) {
    // SAFETY: the caller's promise, passed on.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c,
            1,
            c_rs as isize,
            acc == Acc::Add,
            a.ptr,
            a.cs as isize,
            a.rs as isize,
            b.ptr,
            b.cs as isize,
            b.rs as isize,
            1.0,
            alpha,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// Columns of a tile, and its rows at a depth that keeps it at a few tenths of a millisecond. Tall
/// tiles share the packing of B, which `gemm` does anew for each.
pub(crate) const TILE_N: usize = 64;

/// Rows of a tile of a product of depth `k` with `m` rows, as even as possible.
pub(crate) fn tile_rows(m: usize, k: usize) -> usize {
    let most = if k <= 1024 { 256 } else { 128 };
    m.div_ceil(m.div_ceil(most).max(1)).next_multiple_of(16)
}

/// Rows and columns of the tiles of an `m x n` result over depth `k`.
fn tile_shape(m: usize, n: usize, k: usize) -> (usize, usize) {
    let rows = tile_rows(m, k);
    // A shallow product is cheap per element: wider tiles, so that handing them out costs little.
    let cols = if k < 256 {
        TILE_N * (256 / k.max(16))
    } else {
        TILE_N
    };
    (rows.max(1), cols.min(n.max(1)))
}

/// Parts of a product shared by its tiles.
pub(crate) struct Plan {
    pub(crate) size: (usize, usize, usize),
    pub(crate) alpha: f32,
    pub(crate) a: Operand,
    pub(crate) b: Operand,
    pub(crate) c: Shared<f32>,
    pub(crate) c_rs: usize,
    pub(crate) acc: Acc,
}

impl Cpu {
    /// Runs a product in tiles.
    ///
    /// # Safety
    /// As for [`sgemm`], over the whole product.
    pub(crate) unsafe fn gemm_tiles(&self, plan: &Plan) -> Result {
        let (m, n, k) = plan.size;
        let (tm, tn) = tile_shape(m, n, k);
        let across = n.div_ceil(tn);
        self.run_tiles(m.div_ceil(tm) * across, |tile| {
            let (r, c) = (tile / across * tm, tile % across * tn);
            let size = (tm.min(m - r), tn.min(n - c), k);
            let dst = plan.c.ptr().wrapping_add(r * plan.c_rs + c);
            // SAFETY: a part of the caller's product; tiles of `c` do not overlap.
            unsafe {
                let (a, b) = (plan.a.at(r, 0), plan.b.at(0, c));
                sgemm(size, plan.alpha, a, b, dst, plan.c_rs, plan.acc);
            }
        })
    }

    pub(crate) fn matmul_impl(
        &self,
        product: Product,
        alpha: f32,
        (a, b): (Mat<'_, CpuBuf>, Mat<'_, CpuBuf>),
        c: MatMut<'_, CpuBuf>,
        acc: Acc,
    ) -> Result {
        const OP: &str = "matmul";
        let (m, n) = (c.rows, c.cols);
        let (am, k) = if product == Product::TN {
            (a.cols, a.rows)
        } else {
            (a.rows, a.cols)
        };
        let (bk, bn) = if product == Product::NT {
            (b.cols, b.rows)
        } else {
            (b.rows, b.cols)
        };
        equal(OP, "rows of c", am, m)?;
        equal(OP, "columns of c", bn, n)?;
        equal(OP, "depth of b", k, bk)?;
        let (a_data, b_data) = (check_mat(OP, "a", &a)?, check_mat(OP, "b", &b)?);
        let (a_stride, b_stride, c_stride) = (a.stride, b.stride, c.stride);
        let c_data = check_mat_mut(OP, "c", c)?;
        if m == 0 || n == 0 {
            return Ok(());
        }
        if m <= FEW && product != Product::TN {
            let few = FewRows {
                m,
                n,
                k,
                alpha,
                a: a_data,
                a_stride,
                b: b_data,
                b_stride,
            };
            return self.matmul_few(product, few, c_data, c_stride, acc);
        }
        let (mut a, mut b) = (
            Operand::rows(a_data, a_stride),
            Operand::rows(b_data, b_stride),
        );
        if product == Product::TN {
            a = a.transposed();
        }
        if product == Product::NT {
            b = b.transposed();
        }
        let c = Shared::new(c_data);
        let plan = Plan {
            size: (m, n, k),
            alpha,
            a,
            b,
            c,
            c_rs: c_stride,
            acc,
        };
        // SAFETY: all three matrices were checked against their buffers, and `c` is borrowed mutably.
        unsafe { self.gemm_tiles(&plan) }
    }

    /// Each row on its own, so that it does not depend on the number of rows.
    fn matmul_few(
        &self,
        product: Product,
        p: FewRows<'_>,
        c: &mut [f32],
        c_stride: usize,
        acc: Acc,
    ) -> Result {
        let c = Shared::new(c);
        self.ranges(p.n, p.m as f64 * p.k as f64 * 0.1 + 2.0, |cols| {
            for i in 0..p.m {
                let a = &p.a[i * p.a_stride..][..p.k];
                // SAFETY: tiles own disjoint columns of each row, inside the checked matrix.
                let out = unsafe { c.part(i * c_stride + cols.start..i * c_stride + cols.end) };
                if acc == Acc::Set {
                    out.fill(0.0);
                }
                if product == Product::NT {
                    for (j, out) in cols.clone().zip(out) {
                        *out += p.alpha * simd::dot(a, &p.b[j * p.b_stride..][..p.k]);
                    }
                } else {
                    for (l, a) in a.iter().enumerate() {
                        let b = &p.b[l * p.b_stride..][cols.clone()];
                        simd::axpy(p.alpha * a, b, out);
                    }
                }
            }
        })
    }
}

struct FewRows<'a> {
    m: usize,
    n: usize,
    k: usize,
    alpha: f32,
    a: &'a [f32],
    a_stride: usize,
    b: &'a [f32],
    b_stride: usize,
}
