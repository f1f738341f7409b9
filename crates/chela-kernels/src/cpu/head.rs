//! Log-probs of named candidates, in chunks of the vocabulary: no `[rows, V]` buffer exists.
#![allow(unsafe_code)]

use core::ops::Range;

use super::linear::with_rows;
use super::matmul::{Operand, sgemm};
use super::simd::{self, LANES, exp, fold, simd_fn};
use super::tiles::{Shared, with_scratch};
use super::{Cpu, CpuBuf, CpuWeight, check_mat, equal, index};
use crate::error::{KernelError, Result};
use crate::ops::{Acc, Mat, PairScores, Pairs, TopK, Want};

/// Vocabulary rows of one tile, and hidden rows of one tile.
pub(crate) const CHUNK_V: usize = 128;
pub(crate) const CHUNK_R: usize = 256;

/// Pairs ordered by their hidden row.
pub(crate) struct ByRow {
    order: Vec<u32>,
    starts: Vec<usize>,
}

impl ByRow {
    pub(crate) fn new(rows: &[u32], count: usize) -> Self {
        let mut order: Vec<u32> = (0..rows.len() as u32).collect();
        order.sort_by_key(|p| rows[*p as usize]);
        let mut starts = vec![0; count + 1];
        for r in rows {
            starts[*r as usize + 1] += 1;
        }
        for i in 0..count {
            starts[i + 1] += starts[i];
        }
        Self { order, starts }
    }

    pub(crate) fn pairs(&self, row: usize) -> impl Iterator<Item = usize> + '_ {
        self.order[self.starts[row]..self.starts[row + 1]]
            .iter()
            .map(|p| *p as usize)
    }
}

/// Checks pairs against `rows` hidden rows and a vocabulary.
pub(crate) fn check_pairs(
    op: &'static str,
    pairs: &Pairs<'_>,
    rows: usize,
    vocab: usize,
) -> Result {
    equal(
        op,
        "inverse temperatures",
        pairs.rows.len(),
        pairs.inv_temperature.len(),
    )?;
    equal(
        op,
        "candidates",
        pairs.rows.len() * pairs.k,
        pairs.candidates.len(),
    )?;
    for r in pairs.rows {
        index(op, "hidden row of a pair", *r as usize, rows)?;
    }
    for c in pairs.candidates {
        index(op, "candidate id", *c as usize, vocab)?;
    }
    if pairs
        .inv_temperature
        .iter()
        .all(|t| t.is_finite() && *t > 0.0)
    {
        return Ok(());
    }
    Err(KernelError::NotFinite {
        op,
        what: "a pair's inverse temperature is not positive",
    })
}

/// What one chunk says about one pair; relative to `max`, the chunk's largest scaled logit.
#[derive(Clone, Copy, Default)]
struct Part {
    max: f32,
    sum: f32,
    /// `Σ e^(s - max) (s - max)` for the entropy.
    weighted: f32,
}

simd_fn! {
    /// `Σ exp(t (z - max))` and `Σ exp(t (z - max)) t (z - max)`
    fn sums(z: &[f32], t: f32, max: f32) -> (f32, f32) {
        let (mut sum, mut weighted) = ([0.0; LANES], [0.0; LANES]);
        let chunks = z.chunks_exact(LANES);
        let rest = chunks.remainder();
        for c in chunks {
            for l in 0..LANES {
                let s = t * (c[l] - max);
                let e = exp(s);
                sum[l] += e;
                weighted[l] += e * s;
            }
        }
        let (mut total, mut total_weighted) = (fold(sum), fold(weighted));
        for z in rest {
            let s = t * (z - max);
            let e = exp(s);
            total += e;
            total_weighted += e * s;
        }
        (total, total_weighted)
    }
}

/// The best ids of a pair so far, best first.
type Best = Vec<(f32, u32)>;

fn keep_best(best: &mut Best, z: &[f32], first: u32, k: usize) {
    for (i, z) in z.iter().enumerate() {
        if best.len() == k && best.last().is_none_or(|(worst, _)| z <= worst) {
            continue;
        }
        let at = best.partition_point(|(b, _)| b >= z);
        best.insert(at, (*z, first + i as u32));
        best.truncate(k);
    }
}

/// What the tiles write: one [`Part`] per (chunk, pair), candidates' logits, best ids per chunk.
struct Outputs {
    parts: Shared<Part>,
    logits: Shared<f32>,
    best: Shared<Best>,
}

impl Cpu {
    pub(crate) fn head_scores_impl(
        &self,
        head: &CpuWeight,
        hidden: Mat<'_, CpuBuf>,
        pairs: Pairs<'_>,
        want: Want,
    ) -> Result<PairScores> {
        const OP: &str = "head_scores";
        let (vocab, rows) = (head.rows(), hidden.rows);
        equal(OP, "columns of hidden", head.cols(), hidden.cols)?;
        let x = check_mat(OP, "hidden", &hidden)?;
        check_pairs(OP, &pairs, rows, vocab)?;
        let (count, top_k) = (pairs.rows.len(), want.top_k.min(vocab));
        if count == 0 {
            return Ok(empty(want, top_k));
        }
        let by_row = ByRow::new(pairs.rows, rows);
        let (chunks, blocks) = (vocab.div_ceil(CHUNK_V), rows.div_ceil(CHUNK_R));
        let mut parts = vec![Part::default(); chunks * count];
        let mut logits = vec![0.0; count * pairs.k];
        let mut best = vec![Best::new(); if top_k > 0 { chunks * count } else { 0 }];
        let out = Outputs {
            parts: Shared::new(&mut parts),
            logits: Shared::new(&mut logits),
            best: Shared::new(&mut best),
        };
        self.run_tiles(chunks * blocks, |tile| {
            let (chunk, block) = (tile / blocks, tile % blocks);
            let ids = chunk * CHUNK_V..((chunk + 1) * CHUNK_V).min(vocab);
            let block = block * CHUNK_R..((block + 1) * CHUNK_R).min(rows);
            logits_tile(head, (x, hidden.stride), &ids, &block, |row, z| {
                for p in by_row.pairs(row) {
                    score_pair(&pairs, p, &ids, z, (&out, chunk, top_k));
                }
            });
        })?;
        Ok(self.merge_scores(&pairs, want, top_k, (parts, logits, best)))
    }

    fn merge_scores(
        &self,
        pairs: &Pairs<'_>,
        want: Want,
        top_k: usize,
        (parts, logits, mut best): (Vec<Part>, Vec<f32>, Vec<Best>),
    ) -> PairScores {
        let count = pairs.rows.len();
        let mut scores = empty(want, top_k);
        for p in 0..count {
            let parts = || parts[p..].iter().step_by(count);
            let max = parts()
                .map(|c| f64::from(c.max))
                .fold(f64::NEG_INFINITY, f64::max);
            let (mut sum, mut weighted) = (0.0, 0.0);
            for c in parts() {
                let shift = f64::from(c.max) - max;
                sum += shift.exp() * f64::from(c.sum);
                weighted += shift.exp() * (f64::from(c.weighted) + f64::from(c.sum) * shift);
            }
            let lse = max + sum.ln();
            scores.logsumexp.push(lse as f32);
            if let Some(entropy) = &mut scores.entropy {
                entropy.push((sum.ln() - weighted / sum) as f32);
            }
            let t = f64::from(pairs.inv_temperature[p]);
            let logprob = |z: f32| (t * f64::from(z) - lse) as f32;
            scores.logprobs.extend(
                logits[p * pairs.k..(p + 1) * pairs.k]
                    .iter()
                    .map(|z| logprob(*z)),
            );
            if let Some(top) = &mut scores.top {
                let mut all: Best = Vec::new();
                best.iter_mut()
                    .skip(p)
                    .step_by(count)
                    .for_each(|b| all.append(b));
                all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
                all.truncate(top_k);
                top.ids.extend(all.iter().map(|b| b.1));
                top.logprobs.extend(all.iter().map(|b| logprob(b.0)));
            }
        }
        scores
    }
}

fn empty(want: Want, top_k: usize) -> PairScores {
    PairScores {
        entropy: want.entropy.then(Vec::new),
        top: (top_k > 0).then(|| TopK {
            k: top_k,
            ..TopK::default()
        }),
        ..PairScores::default()
    }
}

/// Computes the logits of vocabulary rows `ids` for hidden rows `block` and shows each row.
fn logits_tile(
    head: &CpuWeight,
    (x, stride): (&[f32], usize),
    ids: &Range<usize>,
    block: &Range<usize>,
    mut show: impl FnMut(usize, &[f32]),
) {
    let (m, n, k) = (block.len(), ids.len(), head.cols());
    with_scratch(m * n, |z| {
        with_rows(head, ids.clone(), |w, w_stride| {
            let a = Operand::rows(&x[block.start * stride..], stride);
            let b = Operand::rows(w, w_stride).transposed();
            // SAFETY: hidden was checked, the weight's rows are whole, z is this tile's own.
            unsafe { sgemm((m, n, k), 1.0, a, b, z.as_mut_ptr(), n, Acc::Set) };
        });
        for (row, z) in block.clone().zip(z.chunks_exact(n)) {
            show(row, z);
        }
    });
}

fn score_pair(
    pairs: &Pairs<'_>,
    p: usize,
    ids: &Range<usize>,
    z: &[f32],
    (out, chunk, top_k): (&Outputs, usize, usize),
) {
    let t = pairs.inv_temperature[p];
    let max = simd::max(z);
    let (sum, weighted) = sums(z, t, max);
    let slot = chunk * pairs.rows.len() + p;
    // SAFETY: one tile looks at this chunk of this pair's row, and so owns the slot.
    unsafe {
        out.parts.put(
            slot,
            Part {
                max: t * max,
                sum,
                weighted,
            },
        )
    };
    for (c, id) in pairs.candidates[p * pairs.k..(p + 1) * pairs.k]
        .iter()
        .enumerate()
    {
        if ids.contains(&(*id as usize)) {
            let at = p * pairs.k + c;
            // SAFETY: the candidate lies in this tile's chunk and in no other.
            unsafe { out.logits.put(at, z[*id as usize - ids.start]) };
        }
    }
    if top_k > 0 {
        // SAFETY: as for the part.
        let best = &mut unsafe { out.best.part(slot..slot + 1) }[0];
        keep_best(best, z, ids.start as u32, top_k);
    }
}
