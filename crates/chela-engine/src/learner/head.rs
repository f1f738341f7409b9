//! The head of a training pass: only the rows that predict scored tokens go through it.

use super::LocalLearner;
use crate::{
    error::kernel, forward::hidden_norm, full::Grads, packing::Block, training::Tape,
    weights::BaseWeights,
};
use chela_core::{EngineError, Sample, Scored};
use chela_kernels::{Acc, HeadGrad, Kernels, Mat, MatMut, NormGrad, PairGrads, PairScores, Pairs};
use chela_model::TensorName;
use std::collections::HashMap;

/// What the head said about a block, and what its backward needs.
pub struct HeadRows<K: Kernels> {
    pub(super) hidden: K::Buf,
    pub(super) rows: Vec<u32>,
    pub(super) pair_rows: Vec<u32>,
    pub(super) inv_temperature: Vec<f32>,
    pub(super) candidates: Vec<u32>,
    pub(super) k: usize,
    pub(super) scores: PairScores,
}

/// Which rows of a block are asked about, and what. A row that several samples share goes through the head once.
#[derive(Default)]
struct Asked {
    rows: Vec<u32>,
    pair_rows: Vec<u32>,
    inv_temperature: Vec<f32>,
    candidates: Vec<u32>,
    k: usize,
}

impl Asked {
    fn new(samples: &[&Sample], block: &Block) -> Self {
        let mut asked = Self {
            k: 1,
            ..Self::default()
        };
        let mut places: HashMap<usize, u32> = HashMap::new();
        for (i, sample) in samples.iter().enumerate() {
            // A token is predicted by the row before it.
            for row in block.path(i).skip(sample.start() - 1) {
                let place = *places.entry(row).or_insert_with(|| {
                    asked.rows.push(row as u32);
                    asked.rows.len() as u32 - 1
                });
                asked.pair_rows.push(place);
                asked.inv_temperature.push(1.0 / sample.temperature());
            }
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
        asked
    }
}

impl<K: Kernels> LocalLearner<K> {
    /// Asks the head about the scored rows of a block.
    pub(super) fn head(
        &self,
        (model, tape): (&BaseWeights<K>, &Tape<K>),
        samples: &[&Sample],
        block: &Block,
        want: (bool, usize),
    ) -> Result<HeadRows<K>, EngineError> {
        let (k, c) = (&self.k, &model.config);
        let output = tape
            .output()
            .ok_or_else(|| EngineError::Shape("an empty tape".to_owned()))?;
        let Asked {
            rows,
            pair_rows,
            inv_temperature,
            candidates,
            k: width,
        } = Asked::new(samples, block);
        let n = rows.len();
        let mut picked = k.zeros(n * c.hidden).map_err(kernel)?;
        k.gather_rows(output, c.hidden, &rows, &mut picked)
            .map_err(kernel)?;
        let mut hidden = k.zeros(n * c.hidden).map_err(kernel)?;
        k.rms_norm(
            &picked,
            &model.final_norm,
            hidden_norm(model, n),
            &mut hidden,
        )
        .map_err(kernel)?;
        let pairs = Pairs {
            rows: &pair_rows,
            inv_temperature: &inv_temperature,
            candidates: &candidates,
            k: width,
        };
        let want = chela_kernels::Want {
            entropy: want.0,
            top_k: want.1,
        };
        let scores = k
            .head_scores(&model.head, Mat::new(&hidden, n, c.hidden), pairs, want)
            .map_err(kernel)?;
        Ok(HeadRows {
            hidden,
            rows,
            pair_rows,
            inv_temperature,
            candidates,
            k: width,
            scores,
        })
    }

    /// Derivative by the last layer's output from the derivatives by log-prob and entropy; adds to `grads` where the head is trained.
    pub(super) fn head_backward(
        &self,
        (model, tape): (&BaseWeights<K>, &Tape<K>),
        head: &HeadRows<K>,
        (d_logprobs, d_entropy): (&[f32], Option<&[f32]>),
        block: &Block,
        grads: &mut Grads<K::Buf>,
    ) -> Result<K::Buf, EngineError> {
        let (k, c, n) = (&self.k, &model.config, head.rows.len());
        let mut d_hidden = k.zeros(n * c.hidden).map_err(kernel)?;
        let pairs = Pairs {
            rows: &head.pair_rows,
            inv_temperature: &head.inv_temperature,
            candidates: &head.candidates,
            k: head.k,
        };
        let entropy = match (d_entropy, &head.scores.entropy) {
            (Some(d), Some(e)) => Some((e.as_slice(), d)),
            _ => None,
        };
        let derivatives = PairGrads {
            logsumexp: &head.scores.logsumexp,
            d_logprobs,
            entropy,
        };
        let hidden = Mat::new(&head.hidden, n, c.hidden);
        let to = HeadGrad {
            dhidden: MatMut::new(&mut d_hidden, n, c.hidden),
            dhead: grads
                .head(c)
                .map(|dhead| MatMut::new(dhead, c.vocab, c.hidden)),
        };
        k.head_backward(&model.head, hidden, pairs, derivatives, to)
            .map_err(kernel)?;
        let t = block.rows();
        let mut spread = k.zeros(t * c.hidden).map_err(kernel)?;
        k.scatter_add_rows(&d_hidden, c.hidden, &head.rows, &mut spread)
            .map_err(kernel)?;
        let output = tape
            .output()
            .ok_or_else(|| EngineError::Shape("an empty tape".to_owned()))?;
        let mut dx = k.zeros(t * c.hidden).map_err(kernel)?;
        let grad = NormGrad {
            dx: &mut dx,
            acc: Acc::Set,
            dw: grads.tensor(TensorName::FinalNorm),
        };
        k.rms_norm_backward(
            output,
            &model.final_norm,
            &spread,
            hidden_norm(model, t),
            grad,
        )
        .map_err(kernel)?;
        Ok(dx)
    }
}

/// Cuts a block's scores into the samples'.
pub fn split(scores: &PairScores, samples: &[&Sample], k: usize) -> Vec<Scored> {
    let mut at = 0;
    samples
        .iter()
        .map(|sample| {
            let rows = at..at + sample.len();
            at = rows.end;
            Scored {
                logprobs: scores.logprobs[rows.start * k..rows.end * k].to_vec(),
                entropy: scores.entropy.as_ref().map(|e| e[rows.clone()].to_vec()),
                top: scores.top.as_ref().map(|t| {
                    let cut = rows.start * t.k..rows.end * t.k;
                    (t.ids[cut.clone()].to_vec(), t.logprobs[cut].to_vec())
                }),
                values: None,
            }
        })
        .collect()
}
