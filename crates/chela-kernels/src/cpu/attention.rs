//! Softmax attention over segments in blocks (Dao 2022, FlashAttention): forward, over keys in one buffer or in pages.
#![allow(unsafe_code)]

use core::ops::Range;

use super::matmul::{Operand, sgemm};
use super::simd::{self, simd_fn};
use super::tiles::{Shared, with_scratch};
use super::{Cpu, CpuBuf, equal, need};
use crate::error::Result;
use crate::ops::{Acc, Heads, KvPiece};
use crate::segments::{Segment, check_segments};

/// Query rows of a tile, and key rows it looks at at a time.
pub(crate) const Q_BLOCK: usize = 64;
pub(crate) const K_BLOCK: usize = 128;

/// Rows that attend (or are attended to) in the same segments.
pub(crate) struct Block {
    pub(crate) rows: Range<usize>,
    /// Indices of segments, ascending.
    pub(crate) segments: Vec<usize>,
}

/// Cuts ranges into blocks of at most `size` rows, each inside every range that it touches.
pub(crate) fn blocks(ranges: &[Range<usize>], size: usize) -> Vec<Block> {
    // (row, ends before starts, segment)
    let mut events: Vec<(usize, bool, usize)> = Vec::with_capacity(ranges.len() * 2);
    for (i, r) in ranges.iter().enumerate().filter(|(_, r)| !r.is_empty()) {
        events.push((r.start, true, i));
        events.push((r.end, false, i));
    }
    events.sort_unstable();
    let (mut out, mut active, mut from) = (Vec::new(), Vec::<usize>::new(), 0);
    for (row, starts, segment) in events {
        if !active.is_empty() {
            for start in (from..row).step_by(size) {
                let rows = start..(start + size).min(row);
                out.push(Block {
                    rows,
                    segments: active.clone(),
                });
            }
        }
        from = row;
        match active.binary_search(&segment) {
            Ok(at) if !starts => drop(active.remove(at)),
            Err(at) if starts => active.insert(at, segment),
            _ => {}
        }
    }
    out
}

/// The part of `segment` that queries `rows` (of the buffer) see: key rows of the buffer.
pub(crate) fn keys_of_block(segment: &Segment, rows: &Range<usize>) -> Range<usize> {
    let first = segment.keys_of(rows.start - segment.q.start);
    let last = segment.keys_of(rows.end - 1 - segment.q.start);
    segment.k.start + first.start.min(last.start)..segment.k.start + first.end.max(last.end)
}

/// Keys that query row `q` sees of the block `keys`, relative to its start.
pub(crate) fn visible(segment: &Segment, q: usize, keys: &Range<usize>) -> Range<usize> {
    let seen = segment.keys_of(q - segment.q.start);
    let clip = |k: usize| (segment.k.start + k).clamp(keys.start, keys.end) - keys.start;
    clip(seen.start)..clip(seen.end)
}

/// Checks heads, segments and queries against each other; how many rows of queries there are.
pub(crate) fn check_shapes(
    op: &'static str,
    (q, k_rows): (&CpuBuf, usize),
    heads: Heads,
    segments: &[Segment],
) -> Result<usize> {
    let (hq, hk) = (heads.q_heads, heads.kv_heads);
    equal(
        op,
        "query heads modulo key-value heads",
        0,
        if hk == 0 { 1 } else { hq % hk },
    )?;
    let q_rows = segments.iter().map(|s| s.q.end).max().unwrap_or(0);
    check_segments(segments, q_rows, k_rows)?;
    need(op, "q", q.0.len(), q_rows * hq * heads.head_dim)?;
    Ok(q_rows)
}

/// Checks that pieces lie inside their buffers; how many rows they are together.
pub(crate) fn check_pieces(
    op: &'static str,
    pieces: &[KvPiece<'_, CpuBuf>],
    heads: Heads,
) -> Result<usize> {
    for piece in pieces {
        let needs = (piece.at + piece.len) * heads.kv_heads * heads.head_dim;
        need(op, "keys", piece.k.0.len(), needs)?;
        need(op, "values", piece.v.0.len(), needs)?;
    }
    Ok(pieces.iter().map(|p| p.len).sum())
}

/// Keys that are looked at at a time: rows of one piece, and which keys they are.
struct Part<'a> {
    piece: &'a KvPiece<'a, CpuBuf>,
    /// First row in the piece's buffers.
    row: usize,
    keys: Range<usize>,
}

/// Cuts `keys` at the ends of pieces and at multiples of [`K_BLOCK`] from `origin`, so that pages of as many rows and one long buffer
/// are cut alike.
fn parts<'a>(
    pieces: &'a [KvPiece<'a, CpuBuf>],
    keys: Range<usize>,
    origin: usize,
) -> impl Iterator<Item = Part<'a>> {
    let (mut at, mut piece, mut first) = (keys.start, 0, 0);
    core::iter::from_fn(move || {
        if at >= keys.end {
            return None;
        }
        while at >= first + pieces.get(piece)?.len {
            first += pieces[piece].len;
            piece += 1;
        }
        let own = &pieces[piece];
        let block = origin + ((at - origin) / K_BLOCK + 1) * K_BLOCK;
        let from = at;
        at = block.min(first + own.len).min(keys.end);
        Some(Part {
            piece: own,
            row: own.at + from - first,
            keys: from..at,
        })
    })
}

simd_fn! {
    fn scale_row(row: &mut [f32], factor: f32) {
        for x in row {
            *x *= factor;
        }
    }
}

/// Running softmax of the rows of one block (Milakov and Gimelshein 2018).
struct Softmax<'a> {
    max: &'a mut [f32],
    sum: &'a mut [f32],
    out: &'a mut [f32],
}

impl Softmax<'_> {
    /// Turns the raw scores of query row `i` into weights relative to the running maximum.
    fn update(&mut self, i: usize, row: &mut [f32], seen: Range<usize>, (scale, d): (f32, usize)) {
        row[..seen.start].fill(0.0);
        row[seen.end..].fill(0.0);
        let row = &mut row[seen];
        if row.is_empty() {
            return;
        }
        // The scale may be negative in no model; it is folded into the exponent.
        let max = (simd::max(row) * scale).max(self.max[i]);
        let keep = (self.max[i] - max).exp();
        self.sum[i] = self.sum[i] * keep + simd::exp_sum(row, scale, max);
        if keep != 1.0 {
            scale_row(&mut self.out[i * d..(i + 1) * d], keep);
        }
        self.max[i] = max;
    }
}

impl Cpu {
    pub(crate) fn attention_impl(
        &self,
        (q, pieces): (&CpuBuf, &[KvPiece<'_, CpuBuf>]),
        heads: Heads,
        segments: &[Segment],
        out: &mut CpuBuf,
        lse: &mut CpuBuf,
    ) -> Result {
        const OP: &str = "attention";
        let k_rows = check_pieces(OP, pieces, heads)?;
        let q_rows = check_shapes(OP, (q, k_rows), heads, segments)?;
        let (hq, d) = (heads.q_heads, heads.head_dim);
        need(OP, "out", out.0.len(), q_rows * hq * d)?;
        need(OP, "lse", lse.0.len(), q_rows * hq)?;
        let ranges: Vec<_> = segments.iter().map(|s| s.q.clone()).collect();
        let blocks = blocks(&ranges, Q_BLOCK);
        let (out, lse) = (Shared::new(&mut out.0), Shared::new(&mut lse.0));
        self.run_tiles(blocks.len() * hq, |tile| {
            let (block, head) = (&blocks[tile / hq], tile % hq);
            let rows = block.rows.len();
            with_scratch(rows * (K_BLOCK + d + 2), |scratch| {
                let (scores, rest) = scratch.split_at_mut(rows * K_BLOCK);
                let (acc, rest) = rest.split_at_mut(rows * d);
                let (max, sum) = rest.split_at_mut(rows);
                acc.fill(0.0);
                max.fill(f32::NEG_INFINITY);
                sum.fill(0.0);
                let mut state = Softmax { max, sum, out: acc };
                forward_tile(
                    (q, pieces),
                    heads,
                    (segments, block, head),
                    scores,
                    &mut state,
                );
                for (i, row) in block.rows.clone().enumerate() {
                    let at = row * hq + head;
                    // SAFETY: a tile owns one head of its query rows.
                    let (o, l) = unsafe { (out.part(at * d..(at + 1) * d), lse.part(at..at + 1)) };
                    let inverse = if state.sum[i] > 0.0 {
                        1.0 / state.sum[i]
                    } else {
                        0.0
                    };
                    for (o, a) in o.iter_mut().zip(&state.out[i * d..(i + 1) * d]) {
                        *o = a * inverse;
                    }
                    l[0] = state.max[i] + state.sum[i].ln();
                }
            });
        })
    }
}

fn forward_tile(
    (q, pieces): (&CpuBuf, &[KvPiece<'_, CpuBuf>]),
    heads: Heads,
    (segments, block, head): (&[Segment], &Block, usize),
    scores: &mut [f32],
    state: &mut Softmax<'_>,
) {
    let (d, hq, hk) = (heads.head_dim, heads.q_heads, heads.kv_heads);
    let kv_head = head / (hq / hk);
    let rows = block.rows.len();
    let q = Operand::rows(&q.0, hq * d).at(block.rows.start, head * d);
    for &s in &block.segments {
        let segment = &segments[s];
        let keys = keys_of_block(segment, &block.rows);
        for part in parts(pieces, keys, segment.k.start) {
            let n = part.keys.len();
            let k = Operand::rows(&part.piece.k.0, hk * d).at(part.row, kv_head * d);
            let v = Operand::rows(&part.piece.v.0, hk * d).at(part.row, kv_head * d);
            let dst = scores.as_mut_ptr();
            // SAFETY: rows and heads were checked against the buffers; scores is this tile's own.
            unsafe { sgemm((rows, n, d), 1.0, q, k.transposed(), dst, n, Acc::Set) };
            for (i, row) in block.rows.clone().enumerate() {
                let seen = visible(segment, row, &part.keys);
                state.update(i, &mut scores[i * n..(i + 1) * n], seen, (heads.scale, d));
            }
            let p = Operand::rows(scores, n);
            let acc = state.out.as_mut_ptr();
            // SAFETY: as above; the accumulator is this tile's own.
            unsafe { sgemm((rows, d, n), 1.0, p, v, acc, d, Acc::Add) };
        }
    }
}
