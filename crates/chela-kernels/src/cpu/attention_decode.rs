//! Attention of one query row per sequence over its cached keys.
#![allow(unsafe_code)]

use core::ops::Range;

use super::attention::check_pieces;
use super::simd;
use super::tiles::{Shared, with_scratch};
use super::{Cpu, CpuBuf, equal, need};
use crate::error::Result;
use crate::ops::{Heads, KvPiece};

/// Keys that one tile looks at; fixed, so that a sequence's sums depend on its length alone.
const CHUNK: usize = 512;

/// Keys that are read for every head of a group before the next ones: they stay in the first cache.
const NEAR: usize = 64;

/// One run of keys or values of one head: rows `stride` apart, numbers `at..` of the scores.
#[derive(Clone, Copy)]
pub(crate) struct Run<'a> {
    pub(crate) rows: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) at: usize,
}

impl<'a> Run<'a> {
    /// Rows `j..` (at most `count`) as a run of their own.
    fn part(self, j: usize, count: usize) -> Self {
        let from = j * self.stride;
        let to = self.rows.len().min(from + count * self.stride);
        Self {
            rows: &self.rows[from..to],
            at: self.at + j,
            ..self
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.rows.len().div_ceil(self.stride)
    }

    /// Row `j`, of `d` numbers.
    pub(crate) fn row(&self, j: usize, d: usize) -> &'a [f32] {
        &self.rows[j * self.stride..][..d]
    }
}

/// `scores[j] = q · k_j`
fn score_keys(q: &[f32], run: Run<'_>, scores: &mut [f32]) {
    let scores = &mut scores[run.at..run.at + run.count()];
    #[cfg(target_arch = "x86_64")]
    if q.len().is_multiple_of(8) && simd::has_avx2() {
        // SAFETY: the features were just detected.
        return unsafe { super::attention_avx2::score_keys(q, run, scores) };
    }
    score_keys_portable(q, run, scores);
}

/// `out += Σ_j p[j] v_j`
fn add_values(p: &[f32], run: Run<'_>, out: &mut [f32]) {
    let p = &p[run.at..run.at + run.count()];
    #[cfg(target_arch = "x86_64")]
    if out.len().is_multiple_of(8) && simd::has_avx2() {
        // SAFETY: the features were just detected.
        return unsafe { super::attention_avx2::add_values(p, run, out) };
    }
    add_values_portable(p, run, out);
}

pub(crate) fn score_keys_portable(q: &[f32], run: Run<'_>, scores: &mut [f32]) {
    for (j, score) in scores.iter_mut().enumerate() {
        *score = simd::dot(q, run.row(j, q.len()));
    }
}

pub(crate) fn add_values_portable(p: &[f32], run: Run<'_>, out: &mut [f32]) {
    for (j, p) in p.iter().enumerate() {
        simd::axpy(*p, run.row(j, out.len()), out);
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
        equal(
            OP,
            "query heads modulo key-value heads",
            0,
            if hk == 0 { 1 } else { hq % hk },
        )?;
        need(OP, "q", q.0.len(), caches.len() * hq * d)?;
        need(OP, "out", out.0.len(), caches.len() * hq * d)?;
        let mut chunks = Vec::new();
        for (sequence, pieces) in caches.iter().enumerate() {
            let len = check_pieces(OP, pieces, heads)?;
            let from = window.map_or(0, |w| len.saturating_sub(w));
            for start in (from..len).step_by(CHUNK) {
                chunks.push(Chunk {
                    sequence,
                    keys: start..(start + CHUNK).min(len),
                });
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
            decode_chunk(
                q,
                caches[chunk.sequence],
                chunk.keys.clone(),
                (heads, kv_head),
                slot,
            );
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
        for (piece, rows, at) in runs(pieces, &keys) {
            let span =
                rows.start * stride + kv_head * d..(rows.end - 1) * stride + (kv_head + 1) * d;
            let run = Run {
                rows: &piece.k.0[span],
                stride,
                at,
            };
            for j in (0..rows.len()).step_by(NEAR) {
                let heads = q.chunks_exact(d).zip(scores.chunks_exact_mut(n));
                heads.for_each(|(q, scores)| score_keys(q, run.part(j, NEAR), scores));
            }
        }
        for (row, sums) in scores.chunks_exact_mut(n).zip(sums.chunks_exact_mut(2)) {
            sums[0] = simd::max(row) * heads.scale;
            sums[1] = simd::exp_sum(row, heads.scale, sums[0]);
        }
        for (piece, rows, at) in runs(pieces, &keys) {
            let span =
                rows.start * stride + kv_head * d..(rows.end - 1) * stride + (kv_head + 1) * d;
            let run = Run {
                rows: &piece.v.0[span],
                stride,
                at,
            };
            for j in (0..rows.len()).step_by(NEAR) {
                let heads = scores.chunks_exact(n).zip(out.chunks_exact_mut(d));
                heads.for_each(|(p, out)| add_values(p, run.part(j, NEAR), out));
            }
        }
    });
}

/// The parts of the pieces that hold keys `keys`: piece, its rows, and where they stand in `keys`.
fn runs<'a>(
    pieces: &'a [KvPiece<'a, CpuBuf>],
    keys: &'a Range<usize>,
) -> impl Iterator<Item = (&'a KvPiece<'a, CpuBuf>, Range<usize>, usize)> {
    let mut start = 0;
    pieces.iter().filter_map(move |piece| {
        let (from, to) = (keys.start.max(start), keys.end.min(start + piece.len));
        let first = start;
        start += piece.len;
        let rows = piece.at + from.checked_sub(first)?..piece.at + to.checked_sub(first)?;
        (from < to).then(|| (piece, rows, from - keys.start))
    })
}

/// Adds the chunks of each sequence in order.
fn merge(partial: &[f32], chunks: &[Chunk], heads: Heads, out: &mut [f32]) {
    let (hk, d) = (heads.kv_heads, heads.head_dim);
    let group = heads.q_heads / hk;
    let width = group * (d + 2);
    let mut first = 0;
    while first < chunks.len() {
        let sequence = chunks[first].sequence;
        let count = chunks[first..]
            .iter()
            .take_while(|c| c.sequence == sequence)
            .count();
        for head in 0..heads.q_heads {
            let slot = |c: usize| &partial[((first + c) * hk + head / group) * width..][..width];
            let h = head % group;
            let sums = |c: usize| (slot(c)[group * d + 2 * h], slot(c)[group * d + 2 * h + 1]);
            let max = (0..count)
                .map(|c| sums(c).0)
                .fold(f32::NEG_INFINITY, f32::max);
            let total: f32 = (0..count)
                .map(|c| sums(c).1 * (sums(c).0 - max).exp())
                .sum();
            let o = &mut out[(sequence * heads.q_heads + head) * d..][..d];
            for c in 0..count {
                let weight = (sums(c).0 - max).exp() / total;
                simd::axpy(weight, &slot(c)[h * d..(h + 1) * d], o);
            }
        }
        first += count;
    }
}
