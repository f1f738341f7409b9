//! Attention of one query row per sequence over its cached keys.
#![allow(unsafe_code)]

use core::ops::Range;

use super::simd::{self, dot_lanes, simd_fn};
use super::tiles::{Shared, with_scratch};
use super::{Cpu, CpuBuf, equal, need};
use crate::error::Result;
use crate::ops::{Heads, KvPiece};

/// Keys that one tile looks at; fixed, so that a sequence's sums depend on its length alone.
const CHUNK: usize = 512;

simd_fn! {
    /// `scores[h, j] = q[h] · k_j` for the heads of a group.
    fn score_keys(q: &[f32], keys: &[f32], stride: usize, d: usize, scores: &mut [f32], n: usize, at: usize) {
        for (j, key) in keys.chunks(stride).enumerate() {
            for (h, q) in q.chunks_exact(d).enumerate() {
                scores[h * n + at + j] = dot_lanes(q, &key[..d]);
            }
        }
    }
}

simd_fn! {
    /// `out[h] += p[h, j] v_j`
    fn add_values(p: &[f32], values: &[f32], stride: usize, d: usize, out: &mut [f32], n: usize, at: usize) {
        for (j, value) in values.chunks(stride).enumerate() {
            for (h, out) in out.chunks_exact_mut(d).enumerate() {
                let p = p[h * n + at + j];
                for (o, v) in out.iter_mut().zip(&value[..d]) {
                    *o += p * v;
                }
            }
        }
    }
}

/// One tile: keys `keys` of sequence `sequence`, and where its partial results go.
struct Chunk {
    sequence: usize,
    keys: Range<usize>,
}

impl Cpu {
    pub(crate) fn attention_decode_impl(
        &self,
        q: &CpuBuf,
        caches: &[&[KvPiece<'_, CpuBuf>]],
        heads: Heads,
        window: Option<usize>,
        out: &mut CpuBuf,
    ) -> Result {
        const OP: &str = "attention_decode";
        let (hq, hk, d) = (heads.q_heads, heads.kv_heads, heads.head_dim);
        equal(OP, "query heads modulo key-value heads", 0, if hk == 0 { 1 } else { hq % hk })?;
        need(OP, "q", q.0.len(), caches.len() * hq * d)?;
        need(OP, "out", out.0.len(), caches.len() * hq * d)?;
        let mut chunks = Vec::new();
        for (sequence, pieces) in caches.iter().enumerate() {
            for piece in *pieces {
                let needs = (piece.at + piece.len) * hk * d;
                need(OP, "a cache's keys", piece.k.0.len(), needs)?;
                need(OP, "a cache's values", piece.v.0.len(), needs)?;
            }
            let len: usize = pieces.iter().map(|p| p.len).sum();
            let from = window.map_or(0, |w| len.saturating_sub(w));
            for start in (from..len).step_by(CHUNK) {
                chunks.push(Chunk { sequence, keys: start..(start + CHUNK).min(len) });
            }
        }
        // Partial results: d weighted values, the maximum and the sum, per chunk and query head.
        let mut partial = vec![0.0; chunks.len() * hq * (d + 2)];
        let shared = Shared::new(&mut partial);
        let group = hq / hk;
        let width = group * (d + 2);
        self.run_tiles_if_worth(chunks.len() * hk, &chunks, heads, |tile| {
            let (chunk, kv_head) = (&chunks[tile / hk], tile % hk);
            let at = (chunk.sequence * hq + kv_head * group) * d;
            // SAFETY: a tile owns its slot.
            let slot = unsafe { shared.part(tile * width..(tile + 1) * width) };
            let q = &q.0[at..at + group * d];
            decode_chunk(q, caches[chunk.sequence], chunk.keys.clone(), (heads, kv_head), slot);
        })?;
        out.0[..caches.len() * hq * d].fill(0.0);
        merge(&partial, &chunks, heads, &mut out.0);
        Ok(())
    }

    fn run_tiles_if_worth(
        &self,
        tiles: usize,
        chunks: &[Chunk],
        heads: Heads,
        task: impl Fn(usize) + Sync,
    ) -> Result {
        let keys: usize = chunks.iter().map(|c| c.keys.len()).sum();
        let cost = (keys * heads.q_heads * heads.head_dim) as f64 * 0.15 / tiles.max(1) as f64;
        self.ranges(tiles, cost, |range| range.for_each(&task))
    }
}

fn decode_chunk(
    q: &[f32],
    pieces: &[KvPiece<'_, CpuBuf>],
    keys: Range<usize>,
    (heads, kv_head): (Heads, usize),
    slot: &mut [f32],
) {
    let (d, n) = (heads.head_dim, keys.len());
    let group = q.len() / d;
    let stride = heads.kv_heads * d;
    let (out, sums) = slot.split_at_mut(group * d);
    with_scratch(group * n, |scores| {
        let visit = |mut f: Box<dyn FnMut(&KvPiece<'_, CpuBuf>, Range<usize>, usize) + '_>| {
            let mut start = 0;
            for piece in pieces {
                let (from, to) = (keys.start.max(start), keys.end.min(start + piece.len));
                if from < to {
                    let rows = piece.at + from - start..piece.at + to - start;
                    let last = (rows.end - 1) * stride + (kv_head + 1) * d;
                    f(piece, rows.start * stride + kv_head * d..last, from - keys.start);
                }
                start += piece.len;
            }
        };
        visit(Box::new(|piece, range, at| {
            score_keys(q, &piece.k.0[range], stride, d, scores, n, at);
        }));
        for (h, row) in scores.chunks_exact_mut(n).enumerate() {
            let max = simd::max(row) * heads.scale;
            sums[2 * h] = max;
            sums[2 * h + 1] = simd::exp_sum(row, heads.scale, max);
        }
        visit(Box::new(|piece, range, at| {
            add_values(scores, &piece.v.0[range], stride, d, out, n, at);
        }));
    });
}

/// Adds the chunks of each sequence in order.
fn merge(partial: &[f32], chunks: &[Chunk], heads: Heads, out: &mut [f32]) {
    let (hk, d) = (heads.kv_heads, heads.head_dim);
    let group = heads.q_heads / hk;
    let width = group * (d + 2);
    let mut first = 0;
    while first < chunks.len() {
        let sequence = chunks[first].sequence;
        let count = chunks[first..].iter().take_while(|c| c.sequence == sequence).count();
        for head in 0..heads.q_heads {
            let slot = |c: usize| &partial[((first + c) * hk + head / group) * width..][..width];
            let h = head % group;
            let sums = |c: usize| (slot(c)[group * d + 2 * h], slot(c)[group * d + 2 * h + 1]);
            let max = (0..count).map(|c| sums(c).0).fold(f32::NEG_INFINITY, f32::max);
            let total: f32 = (0..count).map(|c| sums(c).1 * (sums(c).0 - max).exp()).sum();
            let o = &mut out[(sequence * heads.q_heads + head) * d..][..d];
            for c in 0..count {
                let weight = (sums(c).0 - max).exp() / total;
                simd::axpy(weight, &slot(c)[h * d..(h + 1) * d], o);
            }
        }
        first += count;
    }
}
