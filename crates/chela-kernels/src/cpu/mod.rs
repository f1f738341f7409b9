//! The CPU implementation of [`Kernels`]: one handle over a shared pool.

mod attention;
#[cfg(target_arch = "x86_64")]
mod attention_avx2;
mod attention_backward;
pub(crate) mod attention_decode;
mod elementwise;
pub(crate) mod few;
#[cfg(target_arch = "x86_64")]
mod few_avx2;
mod head;
mod head_backward;
#[cfg(target_arch = "x86_64")]
mod integers_avx2;
mod linear;
mod matmul;
mod norm;
mod path;
mod rope;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
mod rounded;
mod routing;
pub(crate) mod simd;
mod tiles;
#[cfg(target_arch = "x86_64")]
mod unpack_avx2;
mod weight;

use std::sync::Arc;

use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::ops::{
    Acc, Activation, AdamW, AttentionSaved, GluGrad, HeadGrad, Heads, Kernels, KvPiece, Linear,
    Mat, MatMut, Norm, NormGrad, PairGrads, PairScores, Pairs, Product, Qkv, QkvGrad, Rope,
    RopeDirection, Routes, Routing, RowsMode, Want, WeightBytes,
};
use crate::pool::{Pool, Priority, ServeLease};
use crate::segments::Segment;

pub use weight::CpuWeight;

/// Numbers in the machine's memory.
#[derive(Debug, Clone, PartialEq)]
pub struct CpuBuf(pub(crate) Vec<f32>);

/// A handle on the processor: a shared pool and the priority of this handle's work.
#[derive(Debug, Clone)]
pub struct Cpu {
    pool: Arc<Pool>,
    priority: Priority,
}

impl Cpu {
    /// A handle with its own pool of `threads` threads (the caller counts as one), at
    /// [`Priority::Serve`].
    pub fn new(threads: usize) -> Self {
        Self {
            pool: Arc::new(Pool::new(threads)),
            priority: Priority::Serve,
        }
    }

    /// The pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }
}

fn need(op: &'static str, what: &'static str, has: usize, needs: usize) -> Result {
    if has < needs {
        Err(KernelError::Short {
            op,
            what,
            needs,
            has,
        })
    } else {
        Ok(())
    }
}

fn equal(op: &'static str, what: &'static str, expected: usize, got: usize) -> Result {
    if expected == got {
        Ok(())
    } else {
        Err(KernelError::Shape {
            op,
            what,
            expected,
            got,
        })
    }
}

fn index(op: &'static str, what: &'static str, index: usize, limit: usize) -> Result {
    if index < limit {
        Ok(())
    } else {
        Err(KernelError::Index {
            op,
            what,
            index,
            limit,
        })
    }
}

fn mat_end(op: &'static str, rows: usize, cols: usize, stride: usize) -> Result<usize> {
    if rows == 0 || cols == 0 {
        return Ok(0);
    }
    if stride < cols {
        return Err(KernelError::Shape {
            op,
            what: "stride (at least)",
            expected: cols,
            got: stride,
        });
    }
    Ok((rows - 1) * stride + cols)
}

/// The numbers of a matrix, from its first to its last.
fn check_mat<'a>(op: &'static str, what: &'static str, m: &Mat<'a, CpuBuf>) -> Result<&'a [f32]> {
    let end = mat_end(op, m.rows, m.cols, m.stride)?;
    need(op, what, m.buf.0.len(), m.offset + end)?;
    Ok(&m.buf.0[m.offset..m.offset + end])
}

fn check_mat_mut<'a>(
    op: &'static str,
    what: &'static str,
    m: MatMut<'a, CpuBuf>,
) -> Result<&'a mut [f32]> {
    let end = mat_end(op, m.rows, m.cols, m.stride)?;
    need(op, what, m.buf.0.len(), m.offset + end)?;
    Ok(&mut m.buf.0[m.offset..m.offset + end])
}

impl Kernels for Cpu {
    type Buf = CpuBuf;
    type Weight = CpuWeight;
    type Lease = ServeLease;

    fn with_priority(&self, priority: Priority) -> Self {
        Self {
            pool: Arc::clone(&self.pool),
            priority,
        }
    }

    fn priority(&self) -> Priority {
        self.priority
    }

    fn lease(&self) -> ServeLease {
        self.pool.lease()
    }

    fn describe(&self) -> String {
        format!("CPU, {} threads, {}", self.pool.threads(), simd::isa_name())
    }

    fn zeros(&self, len: usize) -> Result<CpuBuf> {
        Ok(CpuBuf(vec![0.0; len]))
    }

    fn upload(&self, data: &[f32]) -> Result<CpuBuf> {
        Ok(CpuBuf(data.to_vec()))
    }

    fn len(&self, buf: &CpuBuf) -> usize {
        buf.0.len()
    }

    fn read(&self, buf: &CpuBuf, at: usize, out: &mut [f32]) -> Result {
        need("read", "buf", buf.0.len(), at + out.len())?;
        out.copy_from_slice(&buf.0[at..at + out.len()]);
        Ok(())
    }

    fn write(&self, buf: &mut CpuBuf, at: usize, data: &[f32]) -> Result {
        need("write", "buf", buf.0.len(), at + data.len())?;
        buf.0[at..at + data.len()].copy_from_slice(data);
        Ok(())
    }

    fn copy(
        &self,
        src: &CpuBuf,
        src_at: usize,
        dst: &mut CpuBuf,
        dst_at: usize,
        len: usize,
    ) -> Result {
        need("copy", "src", src.0.len(), src_at + len)?;
        need("copy", "dst", dst.0.len(), dst_at + len)?;
        dst.0[dst_at..dst_at + len].copy_from_slice(&src.0[src_at..src_at + len]);
        Ok(())
    }

    fn copy_within(&self, buf: &mut CpuBuf, src_at: usize, dst_at: usize, len: usize) -> Result {
        need("copy_within", "source", buf.0.len(), src_at + len)?;
        need("copy_within", "destination", buf.0.len(), dst_at + len)?;
        buf.0.copy_within(src_at..src_at + len, dst_at);
        Ok(())
    }

    fn gather_rows(&self, src: &CpuBuf, width: usize, ids: &[u32], dst: &mut CpuBuf) -> Result {
        need("gather_rows", "dst", dst.0.len(), ids.len() * width)?;
        if width == 0 {
            return Ok(());
        }
        for &id in ids {
            index("gather_rows", "row", id as usize, src.0.len() / width)?;
        }
        for (&id, dst) in ids.iter().zip(dst.0.chunks_exact_mut(width)) {
            dst.copy_from_slice(&src.0[id as usize * width..][..width]);
        }
        Ok(())
    }

    fn scatter_add_rows(
        &self,
        src: &CpuBuf,
        width: usize,
        ids: &[u32],
        dst: &mut CpuBuf,
    ) -> Result {
        need("scatter_add_rows", "src", src.0.len(), ids.len() * width)?;
        if width == 0 {
            return Ok(());
        }
        for &id in ids {
            index("scatter_add_rows", "row", id as usize, dst.0.len() / width)?;
        }
        for (&id, src) in ids.iter().zip(src.0.chunks_exact(width)) {
            simd::axpy(1.0, src, &mut dst.0[id as usize * width..][..width]);
        }
        Ok(())
    }

    fn weight(
        &self,
        dtype: DType,
        rows: usize,
        cols: usize,
        bytes: WeightBytes,
    ) -> Result<CpuWeight> {
        CpuWeight::new(dtype, rows, cols, bytes)
    }

    fn weight_from_buf(&self, buf: &CpuBuf, rows: usize, cols: usize) -> Result<CpuWeight> {
        need("weight_from_buf", "buf", buf.0.len(), rows * cols)?;
        let floats = weight::Floats(buf.0[..rows * cols].to_vec());
        CpuWeight::new(DType::F32, rows, cols, Arc::new(floats))
    }

    fn weight_rows(&self, weight: &CpuWeight, rows: core::ops::Range<usize>) -> Result<CpuWeight> {
        weight.slice(rows)
    }

    fn weight_shape(&self, weight: &CpuWeight) -> (usize, usize) {
        (weight.rows(), weight.cols())
    }

    fn weight_dtype(&self, weight: &CpuWeight) -> DType {
        weight.dtype()
    }

    fn embed(&self, weight: &CpuWeight, ids: &[u32], out: &mut CpuBuf) -> Result {
        self.embed_impl(weight, ids, out)
    }

    fn linear_group(
        &self,
        x: Mat<'_, CpuBuf>,
        outputs: &mut [Linear<'_, CpuWeight, CpuBuf>],
        mode: RowsMode,
    ) -> Result {
        self.linear_impl(x, outputs, mode)
    }

    fn linear_dx(
        &self,
        dy: Mat<'_, CpuBuf>,
        weight: &CpuWeight,
        dx: MatMut<'_, CpuBuf>,
        acc: Acc,
    ) -> Result {
        self.linear_dx_impl(dy, weight, dx, acc)
    }

    fn matmul(
        &self,
        product: Product,
        alpha: f32,
        operands: (Mat<'_, CpuBuf>, Mat<'_, CpuBuf>),
        c: MatMut<'_, CpuBuf>,
        acc: Acc,
    ) -> Result {
        self.matmul_impl(product, alpha, operands, c, acc)
    }

    fn rms_norm(&self, x: &CpuBuf, w: &CpuBuf, norm: Norm, y: &mut CpuBuf) -> Result {
        self.rms_norm_impl(x, w, norm, y)
    }

    fn rms_norm_backward(
        &self,
        x: &CpuBuf,
        w: &CpuBuf,
        dy: &CpuBuf,
        norm: Norm,
        grad: NormGrad<'_, CpuBuf>,
    ) -> Result {
        self.rms_norm_backward_impl(x, w, dy, norm, grad)
    }

    fn rope_table(
        &self,
        positions: &[u32],
        inv_freq: &[f32],
        scale: f32,
        table: &mut CpuBuf,
    ) -> Result {
        self.rope_table_impl(positions, inv_freq, scale, table)
    }

    fn rope(&self, x: &mut CpuBuf, table: &CpuBuf, rope: Rope, direction: RopeDirection) -> Result {
        self.rope_impl(x, table, rope, direction)
    }

    fn attention_paged(
        &self,
        inputs: (&CpuBuf, &[KvPiece<'_, CpuBuf>]),
        heads: Heads,
        segments: &[Segment],
        out: &mut CpuBuf,
        lse: &mut CpuBuf,
    ) -> Result {
        self.attention_impl(inputs, heads, segments, out, lse)
    }

    fn attention_backward(
        &self,
        qkv: Qkv<'_, CpuBuf>,
        heads: Heads,
        segments: &[Segment],
        saved: AttentionSaved<'_, CpuBuf>,
        grad: QkvGrad<'_, CpuBuf>,
    ) -> Result {
        self.attention_backward_impl(qkv, heads, segments, saved, grad)
    }

    fn attention_decode(
        &self,
        q: &CpuBuf,
        caches: &[&[KvPiece<'_, CpuBuf>]],
        heads: Heads,
        window: Option<usize>,
        out: &mut CpuBuf,
    ) -> Result {
        self.attention_decode_impl(q, caches, heads, window, out)
    }

    fn glu(
        &self,
        activation: Activation,
        n: usize,
        gate: &CpuBuf,
        up: &CpuBuf,
        out: &mut CpuBuf,
    ) -> Result {
        self.glu_impl(activation, n, (gate, up), out)
    }

    fn glu_backward(
        &self,
        activation: Activation,
        n: usize,
        gate: &CpuBuf,
        up: &CpuBuf,
        grad: GluGrad<'_, CpuBuf>,
    ) -> Result {
        self.glu_backward_impl(activation, n, (gate, up), grad)
    }

    fn axpy(&self, n: usize, alpha: f32, x: &CpuBuf, y: &mut CpuBuf) -> Result {
        self.axpy_impl(n, alpha, x, y)
    }

    fn scale(&self, n: usize, alpha: f32, x: &mut CpuBuf) -> Result {
        self.scale_impl(n, alpha, x)
    }

    fn fill(&self, n: usize, value: f32, x: &mut CpuBuf) -> Result {
        need("fill", "x", x.0.len(), n)?;
        x.0[..n].fill(value);
        Ok(())
    }

    fn sum_squares(&self, n: usize, x: &CpuBuf) -> Result<f64> {
        self.sum_squares_impl(n, x)
    }

    fn all_finite(&self, n: usize, x: &CpuBuf) -> Result<bool> {
        self.all_finite_impl(n, x)
    }

    fn adamw(
        &self,
        param: &mut CpuBuf,
        grad: &CpuBuf,
        first: &mut CpuBuf,
        second: &mut CpuBuf,
        adamw: AdamW,
    ) -> Result {
        self.adamw_impl(param, grad, (first, second), adamw)
    }

    fn route(&self, logits: &CpuBuf, routing: Routing) -> Result<Routes> {
        self.route_impl(logits, routing)
    }

    fn route_backward(
        &self,
        logits: &CpuBuf,
        routing: Routing,
        routes: (&Routes, &[f32]),
        d_logits: &mut CpuBuf,
    ) -> Result {
        self.route_backward_impl(logits, routing, routes, d_logits)
    }

    fn scale_rows(&self, factors: &[f32], width: usize, x: &mut CpuBuf) -> Result {
        self.scale_rows_impl(factors, width, x)
    }

    fn row_dots(
        &self,
        rows: usize,
        width: usize,
        operands: (&CpuBuf, &CpuBuf),
    ) -> Result<Vec<f32>> {
        self.row_dots_impl(rows, width, operands)
    }

    fn head_scores(
        &self,
        head: &CpuWeight,
        hidden: Mat<'_, CpuBuf>,
        pairs: Pairs<'_>,
        want: Want,
    ) -> Result<PairScores> {
        self.head_scores_impl(head, hidden, pairs, want)
    }

    fn head_backward(
        &self,
        head: &CpuWeight,
        hidden: Mat<'_, CpuBuf>,
        pairs: Pairs<'_>,
        grads: PairGrads<'_>,
        to: HeadGrad<'_, CpuBuf>,
    ) -> Result {
        self.head_backward_impl(head, hidden, pairs, grads, to)
    }
}
