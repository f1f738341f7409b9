//! The head of a training pass: only the rows that predict scored tokens go through it.

use super::{Gradient, LocalLearner, value::ValueHead};
use crate::{
    error::kernel, forward::hidden_norm, packing::Block, training::Tape, weights::BaseWeights,
};
use chela_core::{EngineError, Sample};
use chela_kernels::{Acc, HeadGrad, Kernels, Mat, MatMut, NormGrad, PairGrads, PairScores, Pairs};
use chela_model::TensorName;
use std::ops::Range;

/// What the head is asked about a block: a pair for each scored token of each sample, in the samples' order.
pub struct Asked {
    /// Row of each pair. A token is predicted by the row before it.
    rows: Vec<usize>,
    inv_temperature: Vec<f32>,
    candidates: Vec<u32>,
    /// Candidates of a pair.
    pub(super) k: usize,
    /// Each sample's first pair.
    starts: Vec<usize>,
    /// The pairs in the order of their rows.
    by_row: Vec<usize>,
}

/// The pairs of some rows of a block, as the head takes them: a row that several samples share goes through it once.
pub struct Part {
    /// Which they are.
    pub(super) pairs: Vec<usize>,
    rows: Vec<u32>,
    pair_rows: Vec<u32>,
    inv_temperature: Vec<f32>,
    candidates: Vec<u32>,
    k: usize,
}

impl Asked {
    /// Everything that these samples score.
    pub(super) fn new(samples: &[&Sample], block: &Block) -> Self {
        let mut asked = Self {
            rows: Vec::new(),
            inv_temperature: Vec::new(),
            candidates: Vec::new(),
            k: 1,
            starts: Vec::with_capacity(samples.len()),
            by_row: Vec::new(),
        };
        for (i, sample) in samples.iter().enumerate() {
            let before = asked.rows.len();
            asked.starts.push(before);
            asked.rows.extend(block.path(i).skip(sample.start() - 1));
            let n = asked.rows.len() - before;
            let inv_temperature = 1.0 / sample.temperature();
            asked.inv_temperature.extend(vec![inv_temperature; n]);
            match sample.candidates() {
                Some(named) => {
                    asked.k = named.k();
                    asked.candidates.extend_from_slice(named.ids());
                }
                None => {
                    let said = &sample.tokens()[sample.start()..];
                    asked.candidates.extend_from_slice(said);
                }
            }
        }
        asked.by_row = (0..asked.rows.len()).collect();
        asked.by_row.sort_by_key(|pair| asked.rows[*pair]);
        asked
    }

    /// How many pairs there are.
    pub(super) fn pairs(&self) -> usize {
        self.rows.len()
    }

    /// A sample's `n` pairs.
    pub(super) fn of(&self, sample: usize, n: usize) -> Range<usize> {
        self.starts[sample]..self.starts[sample] + n
    }

    /// Those of these rows; rows of the part count from its first.
    pub(super) fn part(&self, rows: &Range<usize>) -> Part {
        let from = self.by_row.partition_point(|p| self.rows[*p] < rows.start);
        let to = self.by_row.partition_point(|p| self.rows[*p] < rows.end);
        let mut part = Part {
            pairs: self.by_row[from..to].to_vec(),
            rows: Vec::new(),
            pair_rows: Vec::with_capacity(to - from),
            inv_temperature: Vec::with_capacity(to - from),
            candidates: Vec::with_capacity((to - from) * self.k),
            k: self.k,
        };
        for pair in &part.pairs {
            let row = (self.rows[*pair] - rows.start) as u32;
            if part.rows.last() != Some(&row) {
                part.rows.push(row);
            }
            part.pair_rows.push(part.rows.len() as u32 - 1);
            part.inv_temperature.push(self.inv_temperature[*pair]);
            let named = pair * self.k..(pair + 1) * self.k;
            part.candidates.extend_from_slice(&self.candidates[named]);
        }
        part
    }
}

impl Part {
    /// What each pair takes from its row, of numbers by row.
    pub(super) fn spread(&self, by_row: &[f32]) -> Vec<f32> {
        let rows = self.pair_rows.iter();
        rows.map(|row| by_row[*row as usize]).collect()
    }

    /// What the pairs of each row add up to.
    fn sums(&self, by_pair: &[f32]) -> Vec<f32> {
        let mut sums = vec![0.0; self.rows.len()];
        for (row, of) in self.pair_rows.iter().zip(by_pair) {
            sums[*row as usize] += of;
        }
        sums
    }

    fn as_pairs(&self) -> Pairs<'_> {
        Pairs {
            rows: &self.pair_rows,
            inv_temperature: &self.inv_temperature,
            candidates: &self.candidates,
            k: self.k,
        }
    }
}

impl<K: Kernels> LocalLearner<K> {
    /// The rows of a part as the head reads them: picked and normed `[R, H]`.
    pub(super) fn head_rows(
        &self,
        (model, tape): (&BaseWeights<K>, &Tape<K>),
        part: &Part,
    ) -> Result<K::Buf, EngineError> {
        let (k, c, n) = (&self.k, &model.config, part.rows.len());
        let mut picked = k.zeros(n * c.hidden).map_err(kernel)?;
        k.gather_rows(output(tape)?, c.hidden, &part.rows, &mut picked)
            .map_err(kernel)?;
        let mut hidden = k.zeros(n * c.hidden).map_err(kernel)?;
        k.rms_norm(
            &picked,
            &model.final_norm,
            hidden_norm(model, n),
            &mut hidden,
        )
        .map_err(kernel)?;
        Ok(hidden)
    }

    /// What the head says about a part.
    pub(super) fn head(
        &self,
        model: &BaseWeights<K>,
        (hidden, part): (&K::Buf, &Part),
        want: chela_kernels::Want,
    ) -> Result<PairScores, EngineError> {
        let hidden = Mat::new(hidden, part.rows.len(), model.config.hidden);
        self.k
            .head_scores(&model.head, hidden, part.as_pairs(), want)
            .map_err(kernel)
    }

    /// What the value head says about a part, by pair.
    pub(super) fn values(
        &self,
        value: &ValueHead<K::Buf>,
        (hidden, part): (&K::Buf, &Part),
    ) -> Result<Vec<f32>, EngineError> {
        let hidden = Mat::new(hidden, part.rows.len(), self.base.config.hidden);
        Ok(part.spread(&value.values(&self.k, hidden)?))
    }

    /// Derivative by the last layer's output `[T, H]` from the derivatives by the part's log-probs, entropies and values; adds to
    /// `grads` where the heads are trained.
    pub(super) fn head_backward(
        &self,
        (model, tape): (&BaseWeights<K>, &Tape<K>),
        (hidden, part): (&K::Buf, &Part),
        (derivatives, d_values): (PairGrads<'_>, Option<&[f32]>),
        rows: usize,
        grads: &mut Gradient<K::Buf>,
    ) -> Result<K::Buf, EngineError> {
        let (k, c, n) = (&self.k, &model.config, part.rows.len());
        let mut d_hidden = k.zeros(n * c.hidden).map_err(kernel)?;
        let hidden = Mat::new(hidden, n, c.hidden);
        let to = HeadGrad {
            dhidden: MatMut::new(&mut d_hidden, n, c.hidden),
            dhead: grads
                .weights
                .head(c)
                .map(|dhead| MatMut::new(dhead, c.vocab, c.hidden)),
        };
        k.head_backward(&model.head, hidden, part.as_pairs(), derivatives, to)
            .map_err(kernel)?;
        let value = self.value.as_ref().zip(grads.value.as_mut());
        if let (Some((value, to)), Some(d_values)) = (value, d_values) {
            let sums = part.sums(d_values);
            value.backward(k, hidden, &sums, &mut d_hidden, to)?;
        }
        let mut spread = k.zeros(rows * c.hidden).map_err(kernel)?;
        k.scatter_add_rows(&d_hidden, c.hidden, &part.rows, &mut spread)
            .map_err(kernel)?;
        let mut dx = k.zeros(rows * c.hidden).map_err(kernel)?;
        let grad = NormGrad {
            dx: &mut dx,
            acc: Acc::Set,
            dw: grads.weights.tensor(TensorName::FinalNorm),
        };
        k.rms_norm_backward(
            output(tape)?,
            &model.final_norm,
            &spread,
            hidden_norm(model, rows),
            grad,
        )
        .map_err(kernel)?;
        Ok(dx)
    }
}

fn output<K: Kernels>(tape: &Tape<K>) -> Result<&K::Buf, EngineError> {
    tape.output()
        .ok_or_else(|| EngineError::Shape("an empty tape".to_owned()))
}
