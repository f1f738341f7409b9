//! Gradients of attention over segments, recomputed block by block from the log-sum-exp.
//!
//! With `P = exp(scale q·k - lse)` and `delta = Σ dout * out`: `dV = Pᵀ dout`,
//! `dS = P * (dout·Vᵀ - delta) * scale`, `dQ = dS·K`, `dK = dSᵀ·Q`. Queries and keys are walked in
//! two passes, so that each tile owns what it writes and the sums have one order.
#![allow(unsafe_code)]

use core::ops::Range;

use super::attention::{K_BLOCK, Q_BLOCK, blocks, check_shapes, keys_of_block, visible};
use super::matmul::{Operand, sgemm};
use super::simd::{self, exp, simd_fn};
use super::tiles::{Shared, with_scratch};
use super::{Cpu, CpuBuf, need};
use crate::error::Result;
use crate::ops::{Acc, AttentionSaved, Heads, Qkv, QkvGrad};
use crate::segments::Segment;

simd_fn! {
    /// Scores become weights `p`, and `dp` becomes the derivative by the unscaled scores.
    fn softmax_back(s: &mut [f32], dp: &mut [f32], scale: f32, lse: f32, delta: f32) {
        for (s, dp) in s.iter_mut().zip(dp) {
            let p = exp(scale * *s - lse);
            *s = p;
            *dp = p * (*dp - delta) * scale;
        }
    }
}

/// Everything the tiles read.
struct Inputs<'a> {
    qkv: Qkv<'a, CpuBuf>,
    heads: Heads,
    dout: &'a [f32],
    lse: &'a [f32],
    delta: &'a [f32],
}

impl Inputs<'_> {
    fn q(&self, row: usize, head: usize) -> Operand {
        let d = self.heads.head_dim;
        Operand::rows(&self.qkv.q.0, self.heads.q_heads * d).at(row, head * d)
    }

    fn dout(&self, row: usize, head: usize) -> Operand {
        let d = self.heads.head_dim;
        Operand::rows(self.dout, self.heads.q_heads * d).at(row, head * d)
    }

    fn kv(&self, data: &CpuBuf, row: usize, head: usize) -> Operand {
        let (d, group) = (
            self.heads.head_dim,
            self.heads.q_heads / self.heads.kv_heads,
        );
        Operand::rows(&data.0, self.heads.kv_heads * d).at(row, head / group * d)
    }

    /// Fills `p` and `ds` `[rows, keys]` for one query head.
    fn weights(
        &self,
        segment: &Segment,
        (rows, keys, head): (&Range<usize>, &Range<usize>, usize),
        p: &mut [f32],
        ds: &mut [f32],
    ) {
        let (m, n, d) = (rows.len(), keys.len(), self.heads.head_dim);
        let k = self.kv(self.qkv.k, keys.start, head).transposed();
        let v = self.kv(self.qkv.v, keys.start, head).transposed();
        let (q, dout) = (self.q(rows.start, head), self.dout(rows.start, head));
        // SAFETY: all rows were checked against the buffers; p and ds are this tile's own.
        unsafe {
            sgemm((m, n, d), 1.0, q, k, p.as_mut_ptr(), n, Acc::Set);
            sgemm((m, n, d), 1.0, dout, v, ds.as_mut_ptr(), n, Acc::Set);
        }
        for (i, row) in rows.clone().enumerate() {
            let seen = visible(segment, row, keys);
            let (p, ds) = (&mut p[i * n..(i + 1) * n], &mut ds[i * n..(i + 1) * n]);
            let at = row * self.heads.q_heads + head;
            for hidden in [0..seen.start, seen.end..n] {
                p[hidden.clone()].fill(0.0);
                ds[hidden].fill(0.0);
            }
            let (p, ds) = (&mut p[seen.clone()], &mut ds[seen]);
            softmax_back(p, ds, self.heads.scale, self.lse[at], self.delta[at]);
        }
    }
}

impl Cpu {
    pub(crate) fn attention_backward_impl(
        &self,
        qkv: Qkv<'_, CpuBuf>,
        heads: Heads,
        segments: &[Segment],
        saved: AttentionSaved<'_, CpuBuf>,
        grad: QkvGrad<'_, CpuBuf>,
    ) -> Result {
        const OP: &str = "attention_backward";
        let k_rows = segments.iter().map(|s| s.k.end).max().unwrap_or(0);
        let q_rows = check_shapes(OP, (qkv.q, k_rows), heads, segments)?;
        let (hq, d) = (heads.q_heads, heads.head_dim);
        let (q_len, k_len) = (q_rows * hq * d, k_rows * heads.kv_heads * d);
        need(OP, "k", qkv.k.0.len(), k_len)?;
        need(OP, "v", qkv.v.0.len(), k_len)?;
        need(OP, "out", saved.out.0.len(), q_len)?;
        need(OP, "dout", saved.dout.0.len(), q_len)?;
        need(OP, "lse", saved.lse.0.len(), q_rows * hq)?;
        need(OP, "dq", grad.dq.0.len(), q_len)?;
        need(OP, "dk", grad.dk.0.len(), k_len)?;
        need(OP, "dv", grad.dv.0.len(), k_len)?;
        let mut delta = vec![0.0; q_rows * hq];
        let shared = Shared::new(&mut delta);
        self.ranges(q_rows * hq, d as f64 * 0.2, |items| {
            for i in items {
                let at = i * d..(i + 1) * d;
                let dot = simd::dot(&saved.out.0[at.clone()], &saved.dout.0[at]);
                // SAFETY: tiles own disjoint items.
                unsafe { shared.put(i, dot) };
            }
        })?;
        let (dout, lse) = (&saved.dout.0[..], &saved.lse.0[..]);
        let inputs = Inputs {
            qkv,
            heads,
            dout,
            lse,
            delta: &delta,
        };
        self.query_pass(&inputs, segments, &Shared::new(&mut grad.dq.0))?;
        let out = (&Shared::new(&mut grad.dk.0), &Shared::new(&mut grad.dv.0));
        self.key_pass(&inputs, segments, out)
    }

    fn query_pass(&self, inputs: &Inputs<'_>, segments: &[Segment], dq: &Shared<f32>) -> Result {
        let (hq, d) = (inputs.heads.q_heads, inputs.heads.head_dim);
        let ranges: Vec<_> = segments.iter().map(|s| s.q.clone()).collect();
        let blocks = blocks(&ranges, Q_BLOCK);
        self.run_tiles(blocks.len() * hq, |tile| {
            let (block, head) = (&blocks[tile / hq], tile % hq);
            let rows = &block.rows;
            with_scratch(2 * rows.len() * K_BLOCK, |scratch| {
                let (p, ds) = scratch.split_at_mut(rows.len() * K_BLOCK);
                for &s in &block.segments {
                    let keys = keys_of_block(&segments[s], rows);
                    for start in keys.clone().step_by(K_BLOCK) {
                        let part = start..(start + K_BLOCK).min(keys.end);
                        inputs.weights(&segments[s], (rows, &part, head), p, ds);
                        let k = inputs.kv(inputs.qkv.k, part.start, head);
                        let dst = dq.ptr().wrapping_add((rows.start * hq + head) * d);
                        let size = (rows.len(), d, part.len());
                        let ds = Operand::rows(ds, part.len());
                        // SAFETY: dq was checked; a tile owns one head of its query rows.
                        unsafe { sgemm(size, 1.0, ds, k, dst, hq * d, Acc::Add) };
                    }
                }
            });
        })
    }

    fn key_pass(
        &self,
        inputs: &Inputs<'_>,
        segments: &[Segment],
        (dk, dv): (&Shared<f32>, &Shared<f32>),
    ) -> Result {
        let (hk, d) = (inputs.heads.kv_heads, inputs.heads.head_dim);
        let group = inputs.heads.q_heads / hk.max(1);
        let ranges: Vec<_> = segments.iter().map(|s| s.k.clone()).collect();
        let blocks = blocks(&ranges, Q_BLOCK);
        self.run_tiles(blocks.len() * hk, |tile| {
            let (block, kv_head) = (&blocks[tile / hk], tile % hk);
            let keys = &block.rows;
            let at = (keys.start * hk + kv_head) * d;
            let (dk, dv) = (dk.ptr().wrapping_add(at), dv.ptr().wrapping_add(at));
            with_scratch(2 * keys.len() * K_BLOCK, |scratch| {
                let (p, ds) = scratch.split_at_mut(keys.len() * K_BLOCK);
                for &s in &block.segments {
                    let queries = queries_of_block(&segments[s], keys);
                    for start in queries.clone().step_by(K_BLOCK) {
                        let rows = start..(start + K_BLOCK).min(queries.end);
                        for head in kv_head * group..(kv_head + 1) * group {
                            inputs.weights(&segments[s], (&rows, keys, head), p, ds);
                            let size = (keys.len(), d, rows.len());
                            let p = Operand::rows(p, keys.len()).transposed();
                            let ds = Operand::rows(ds, keys.len()).transposed();
                            let q = inputs.q(rows.start, head);
                            let dout = inputs.dout(rows.start, head);
                            // SAFETY: dk and dv were checked; a tile owns one head of its key rows.
                            unsafe {
                                sgemm(size, 1.0, p, dout, dv, hk * d, Acc::Add);
                                sgemm(size, 1.0, ds, q, dk, hk * d, Acc::Add);
                            }
                        }
                    }
                }
            });
        })
    }
}

/// Query rows of `segment` that may see one of the key rows `keys`.
fn queries_of_block(segment: &Segment, keys: &Range<usize>) -> Range<usize> {
    let (first, last) = (keys.start - segment.k.start, keys.end - 1 - segment.k.start);
    let start = if segment.causal {
        first.saturating_sub(segment.offset)
    } else {
        0
    };
    let end = segment.window.map_or(usize::MAX, |w| {
        // offset + i - last < w
        last.saturating_add(w).saturating_sub(segment.offset)
    });
    let count = segment.q.len();
    segment.q.start + start.min(count)..segment.q.start + end.min(count).max(start.min(count))
}
