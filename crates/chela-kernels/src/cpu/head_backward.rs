//! The gradient of candidate log-probs and entropies by the hidden rows, and by the head's matrix where
//! it is trained, in sections of the vocabulary that are recomputed.
#![allow(unsafe_code)]

use core::ops::Range;

use super::head::{ByRow, CHUNK_V, check_pairs};
use super::matmul::{Operand, Plan, sgemm};
use super::simd::{exp, simd_fn};
use super::tiles::{Shared, with_scratch};
use super::{Cpu, CpuBuf, CpuWeight, check_mat, check_mat_mut, equal};
use crate::error::Result;
use crate::ops::{Acc, HeadGrad, Mat, PairGrads, Pairs};

/// Vocabulary rows whose derivatives exist at one time, and hidden rows of one round.
const SECTION_V: usize = 1024;
const ROUND_R: usize = 512;

/// Constants of one pair's derivative.
#[derive(Clone, Copy)]
struct PairConstants {
    t: f32,
    lse: f32,
    /// `-Σ_c d_c`
    minus_sum: f32,
    d_entropy: f32,
    entropy: f32,
}

simd_fn! {
    /// `dz += t p (-Σ d - d_entropy (log p + entropy))`
    fn add_pair(z: &[f32], dz: &mut [f32], c: PairConstants) {
        for (z, dz) in z.iter().zip(dz) {
            let logp = c.t * z - c.lse;
            *dz += c.t * exp(logp) * (c.minus_sum - c.d_entropy * (logp + c.entropy));
        }
    }
}

/// What the tiles of one call share.
struct Head<'a> {
    pairs: Pairs<'a>,
    grads: PairGrads<'a>,
    by_row: ByRow,
}

impl Head<'_> {
    fn constants(&self, p: usize) -> PairConstants {
        let d = &self.grads.d_logprobs[p * self.pairs.k..(p + 1) * self.pairs.k];
        let (entropy, d_entropy) = self.grads.entropy.map_or((0.0, 0.0), |(h, d)| (h[p], d[p]));
        PairConstants {
            t: self.pairs.inv_temperature[p],
            lse: self.grads.logsumexp[p],
            minus_sum: -d.iter().sum::<f32>(),
            d_entropy,
            entropy,
        }
    }

    /// Turns the logits `z` of a hidden row for vocabulary rows `ids` into their derivatives.
    fn derive(&self, row: usize, ids: &Range<usize>, z: &mut [f32], dz: &mut [f32]) {
        dz.fill(0.0);
        let k = self.pairs.k;
        for p in self.by_row.pairs(row) {
            let c = self.constants(p);
            if c.minus_sum != 0.0 || c.d_entropy != 0.0 {
                add_pair(z, dz, c);
            }
            for at in p * k..(p + 1) * k {
                let id = self.pairs.candidates[at] as usize;
                if ids.contains(&id) {
                    dz[id - ids.start] += c.t * self.grads.d_logprobs[at];
                }
            }
        }
        z.copy_from_slice(dz);
    }

    fn check(&self, op: &'static str) -> Result {
        let count = self.pairs.rows.len();
        equal(op, "logsumexp", count, self.grads.logsumexp.len())?;
        equal(
            op,
            "d_logprobs",
            count * self.pairs.k,
            self.grads.d_logprobs.len(),
        )?;
        if let Some((entropy, d_entropy)) = self.grads.entropy {
            equal(op, "entropy", count, entropy.len())?;
            equal(op, "d_entropy", count, d_entropy.len())?;
        }
        Ok(())
    }
}

impl Cpu {
    pub(crate) fn head_backward_impl(
        &self,
        head: &CpuWeight,
        hidden: Mat<'_, CpuBuf>,
        pairs: Pairs<'_>,
        grads: PairGrads<'_>,
        to: HeadGrad<'_, CpuBuf>,
    ) -> Result {
        const OP: &str = "head_backward";
        let (vocab, width, rows) = (head.rows(), head.cols(), hidden.rows);
        equal(OP, "columns of hidden", width, hidden.cols)?;
        equal(OP, "columns of dhidden", width, to.dhidden.cols)?;
        equal(OP, "rows of dhidden", rows, to.dhidden.rows)?;
        if let Some(dhead) = &to.dhead {
            equal(OP, "columns of dhead", width, dhead.cols)?;
            equal(OP, "rows of dhead", vocab, dhead.rows)?;
        }
        let x = check_mat(OP, "hidden", &hidden)?;
        check_pairs(OP, &pairs, rows, vocab)?;
        let stride = to.dhidden.stride;
        let dx = check_mat_mut(OP, "dhidden", to.dhidden)?;
        let head_stride = to.dhead.as_ref().map_or(0, |dhead| dhead.stride);
        let dhead = to.dhead.map(|dhead| check_mat_mut(OP, "dhead", dhead));
        let mut dhead = dhead.transpose()?;
        let shared = Head {
            pairs,
            grads,
            by_row: ByRow::new(pairs.rows, rows),
        };
        shared.check(OP)?;
        if pairs.rows.is_empty() || width == 0 {
            return Ok(());
        }
        let mut dz = vec![0.0; rows.min(ROUND_R) * SECTION_V.min(vocab)];
        let mut unpacked = vec![
            0.0;
            if head.as_f32().is_some() {
                0
            } else {
                SECTION_V * width
            }
        ];
        for first in (0..rows).step_by(ROUND_R) {
            let m = ROUND_R.min(rows - first);
            let a = Operand::rows(&x[first * hidden.stride..], hidden.stride);
            for start in (0..vocab).step_by(SECTION_V) {
                let ids = start..(start + SECTION_V).min(vocab);
                let round = first..first + m;
                let scratch = (&mut dz[..], &mut unpacked[..]);
                self.section(head, &shared, a, (&round, &ids), scratch)?;
                let w = match head.as_f32() {
                    Some(w) => &w[start * width..],
                    None => &unpacked[..],
                };
                let plan = Plan {
                    size: (m, width, ids.len()),
                    alpha: 1.0,
                    a: Operand::rows(&dz, ids.len()),
                    b: Operand::rows(w, width),
                    c: Shared::new(&mut dx[first * stride..]),
                    c_rs: stride,
                    acc: Acc::Add,
                };
                // SAFETY: sizes follow from the checks above; `dx` is borrowed mutably.
                unsafe { self.gemm_tiles(&plan)? };
                if let Some(dhead) = &mut dhead {
                    let plan = Plan {
                        size: (ids.len(), width, m),
                        alpha: 1.0,
                        a: Operand::rows(&dz, ids.len()).transposed(),
                        b: a,
                        c: Shared::new(&mut dhead[start * head_stride..]),
                        c_rs: head_stride,
                        acc: Acc::Add,
                    };
                    // SAFETY: as above, for `dhead`.
                    unsafe { self.gemm_tiles(&plan)? };
                }
            }
        }
        Ok(())
    }

    /// Derivatives by the logits of one section `[rows, ids]`, and its weight rows when unpacked.
    fn section(
        &self,
        head: &CpuWeight,
        shared: &Head<'_>,
        a: Operand,
        (rows, ids): (&Range<usize>, &Range<usize>),
        (dz, unpacked): (&mut [f32], &mut [f32]),
    ) -> Result {
        let (m, n, width) = (rows.len(), ids.len(), head.cols());
        let (dz, unpacked) = (Shared::new(dz), Shared::new(unpacked));
        self.run_tiles(n.div_ceil(CHUNK_V), |tile| {
            let part = tile * CHUNK_V..((tile + 1) * CHUNK_V).min(n);
            let part_ids = ids.start + part.start..ids.start + part.end;
            let w = match head.as_f32() {
                Some(w) => &w[part_ids.start * width..part_ids.end * width],
                None => {
                    // SAFETY: a tile owns its rows of the section.
                    let w = unsafe { unpacked.part(part.start * width..part.end * width) };
                    head.unpack(part_ids.clone(), 0..width, w);
                    &*w
                }
            };
            let b = Operand::rows(w, width).transposed();
            let dst = dz.ptr().wrapping_add(part.start);
            // SAFETY: dz holds [m, n]; a tile owns its columns.
            unsafe { sgemm((m, part.len(), width), 1.0, a, b, dst, n, Acc::Set) };
            with_scratch(part.len(), |scratch| {
                for (i, row) in rows.clone().enumerate() {
                    // SAFETY: as above.
                    let z = unsafe { dz.part(i * n + part.start..i * n + part.end) };
                    shared.derive(row, &part_ids, z, scratch);
                }
            });
        })
    }
}
