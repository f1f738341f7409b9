//! Products with a stored weight: few rows straight from its blocks, many rows through tiles that
//! are expanded into scratch.
#![allow(unsafe_code)]

use core::ops::Range;

use super::few::{self, FEW, Rows};
use super::matmul::{Operand, Plan, TILE_N, sgemm, tile_rows};
use super::rounded::Rounded;
use super::tiles::{Shared, with_scratch};
use super::{Cpu, CpuBuf, CpuWeight, check_mat, check_mat_mut, equal, index, need};
use crate::error::Result;
use crate::ops::{Acc, Linear, Mat, MatMut, RowsMode};

/// One output of a group with its shapes checked.
struct Output<'a> {
    weight: &'a CpuWeight,
    bias: Option<&'a [f32]>,
    y: Shared<f32>,
    stride: usize,
}

impl Cpu {
    pub(crate) fn embed_impl(&self, weight: &CpuWeight, ids: &[u32], out: &mut CpuBuf) -> Result {
        let width = weight.cols();
        need("embed", "out", out.0.len(), ids.len() * width)?;
        for &id in ids {
            index("embed", "id", id as usize, weight.rows())?;
        }
        for (&id, out) in ids.iter().zip(out.0.chunks_exact_mut(width.max(1))) {
            few::unpack(weight.dtype(), weight.row(id as usize), 0, out);
        }
        Ok(())
    }

    pub(crate) fn linear_impl(
        &self,
        x: Mat<'_, CpuBuf>,
        outputs: &mut [Linear<'_, CpuWeight, CpuBuf>],
        mode: RowsMode,
    ) -> Result {
        const OP: &str = "linear";
        let data = check_mat(OP, "x", &x)?;
        let mut checked = Vec::with_capacity(outputs.len());
        for o in outputs.iter_mut() {
            equal(OP, "columns of x", o.weight.cols(), x.cols)?;
            equal(OP, "rows of y", x.rows, o.y.rows)?;
            equal(OP, "columns of y", o.weight.rows(), o.y.cols)?;
            if let Some(bias) = o.bias {
                need(OP, "bias", bias.0.len(), o.weight.rows())?;
            }
            let stride = o.y.stride;
            let y = MatMut {
                buf: &mut *o.y.buf,
                ..o.y
            };
            let y = Shared::new(check_mat_mut(OP, "y", y)?);
            let bias = o.bias.map(|b| &b.0[..o.weight.rows()]);
            checked.push(Output {
                weight: o.weight,
                bias,
                y,
                stride,
            });
        }
        let x = Rows {
            data,
            stride: x.stride,
            count: x.rows,
            width: x.cols,
        };
        if x.count == 0 {
            return Ok(());
        }
        match mode {
            RowsMode::Prefill if x.count > FEW => self.linear_many(x, &checked),
            _ => self.linear_few(x, &checked),
        }
    }

    /// Tiles are runs of weight rows; each serves all rows of x, in groups of [`FEW`].
    fn linear_few(&self, x: Rows<'_>, outputs: &[Output<'_>]) -> Result {
        let cost =
            x.width as f64 * few::cost_ns(outputs.first().map(|o| o.weight.dtype()), x.count);
        let any = outputs.iter().any(|o| few::takes_rounded(o.weight));
        let rounded = any.then(|| Rounded::new(x));
        let total: usize = outputs.iter().map(|o| o.weight.rows()).sum();
        let size = self.tile_items(total, cost, 8);
        let tiles = cut(outputs, |_| 1, size);
        self.run_tiles(tiles.len(), |t| {
            let (o, _, rows) = &tiles[t];
            let o = &outputs[*o];
            let put = |m: usize, n: usize, value: f32| {
                // SAFETY: a tile owns its columns of y, inside the checked matrix.
                unsafe {
                    o.y.put(m * o.stride + n, value + o.bias.map_or(0.0, |b| b[n]))
                };
            };
            for first in (0..x.count).step_by(FEW) {
                let some = x.part(first, FEW);
                match &rounded {
                    Some(x) if few::takes_rounded(o.weight) => {
                        let part = first..first + some.count;
                        few::products_rounded(o.weight, rows.clone(), (x, part), put);
                    }
                    _ => few::products(o.weight, rows.clone(), some, |m, n, v| {
                        put(first + m, n, v);
                    }),
                }
            }
        })
    }

    fn linear_many(&self, x: Rows<'_>, outputs: &[Output<'_>]) -> Result {
        let tile_m = tile_rows(x.count, x.width);
        let tiles = cut(outputs, |_| x.count.div_ceil(tile_m), TILE_N);
        self.run_tiles(tiles.len(), |t| {
            let (o, block, rows) = &tiles[t];
            let o = &outputs[*o];
            let first = block * tile_m;
            let m = tile_m.min(x.count - first);
            let a = Operand::rows(&x.data[first * x.stride..], x.stride);
            let y = o.y.ptr().wrapping_add(first * o.stride + rows.start);
            with_rows(o.weight, rows.clone(), |w, stride| {
                let b = Operand::rows(w, stride).transposed();
                // SAFETY: x and y were checked; the tile owns this part of y.
                unsafe { sgemm((m, rows.len(), x.width), 1.0, a, b, y, o.stride, Acc::Set) };
            });
            if let Some(bias) = o.bias {
                for i in first..first + m {
                    let at = i * o.stride;
                    // SAFETY: as above.
                    let y = unsafe { o.y.part(at + rows.start..at + rows.end) };
                    y.iter_mut()
                        .zip(&bias[rows.clone()])
                        .for_each(|(y, b)| *y += b);
                }
            }
        })
    }

    pub(crate) fn linear_dx_impl(
        &self,
        dy: Mat<'_, CpuBuf>,
        weight: &CpuWeight,
        dx: MatMut<'_, CpuBuf>,
        acc: Acc,
    ) -> Result {
        const OP: &str = "linear_dx";
        equal(OP, "columns of dy", weight.rows(), dy.cols)?;
        equal(OP, "columns of dx", weight.cols(), dx.cols)?;
        equal(OP, "rows of dx", dy.rows, dx.rows)?;
        let dy_data = check_mat(OP, "dy", &dy)?;
        let stride = dx.stride;
        let dx = Shared::new(check_mat_mut(OP, "dx", dx)?);
        let (m, n, k) = (dy.rows, weight.rows(), weight.cols());
        if m == 0 || k == 0 {
            return Ok(());
        }
        let a = Operand::rows(dy_data, dy.stride);
        if let Some(w) = weight.as_f32() {
            let b = Operand::rows(w, k);
            let plan = Plan {
                size: (m, k, n),
                alpha: 1.0,
                a,
                b,
                c: dx,
                c_rs: stride,
                acc,
            };
            // SAFETY: all matrices were checked and `dx` is borrowed mutably.
            return unsafe { self.gemm_tiles(&plan) };
        }
        let tile_m = tile_rows(m, n);
        let across = k.div_ceil(TILE_N);
        self.run_tiles(m.div_ceil(tile_m) * across, |tile| {
            let (r, c) = (tile / across * tile_m, tile % across * TILE_N);
            let (rows, cols) = (tile_m.min(m - r), TILE_N.min(k - c));
            with_scratch(n * cols, |scratch| {
                weight.unpack(0..n, c..c + cols, scratch);
                let b = Operand::rows(scratch, cols);
                let dst = dx.ptr().wrapping_add(r * stride + c);
                // SAFETY: dy and dx were checked; tiles of dx do not overlap.
                unsafe { sgemm((rows, cols, n), 1.0, a.at(r, 0), b, dst, stride, acc) };
            });
        })
    }
}

/// Lends rows of a weight as f32, with their stride: in place when they are stored so.
pub(crate) fn with_rows<R>(
    weight: &CpuWeight,
    rows: Range<usize>,
    use_it: impl FnOnce(&[f32], usize) -> R,
) -> R {
    let cols = weight.cols();
    if let Some(w) = weight.as_f32() {
        return use_it(&w[rows.start * cols..rows.end * cols], cols);
    }
    with_scratch(rows.len() * cols, |scratch| {
        weight.unpack(rows, 0..cols, scratch);
        use_it(scratch, cols)
    })
}

/// Tiles (output, block of x, rows of its weight) of at most `size` weight rows; the blocks of x that
/// share weight rows follow each other.
fn cut(
    outputs: &[Output<'_>],
    blocks: impl Fn(&Output<'_>) -> usize,
    size: usize,
) -> Vec<(usize, usize, Range<usize>)> {
    let mut tiles = Vec::new();
    for (i, o) in outputs.iter().enumerate() {
        let rows = o.weight.rows();
        for start in (0..rows).step_by(size.max(1)) {
            for block in 0..blocks(o) {
                tiles.push((i, block, start..(start + size).min(rows)));
            }
        }
    }
    tiles
}
