//! Samples as rows of one token trie: what several of them begin with stands there once, forward and backward.
//!
//! Turns of one session, replies to one prompt, probes under one template all begin alike. A row's position is its depth; it attends
//! to its ancestors only, given as ranges of rows along the path (never a dense mask), so that the cost is that of the rows that
//! differ. Exact: a row's past is the same whoever shares it.

use crate::prefix::common;
use chela_core::{Sample, TokenId};
use chela_kernels::Segment;
use std::{cmp::Ordering, ops::Range};

/// What is read of a sample: its last token predicts nothing and has no row.
fn read(sample: &Sample) -> &[TokenId] {
    let tokens = sample.tokens();
    &tokens[..tokens.len() - 1]
}

/// Candidates of a position; samples of one block have as many.
fn width(sample: &Sample) -> usize {
    sample.candidates().map_or(1, |c| c.k())
}

/// The candidates of all its positions.
fn named(sample: &Sample) -> Option<&[TokenId]> {
    sample.candidates().map(|c| c.ids())
}

/// Depth-first order of a trie, and of samples read alike by what else they say: their derivatives at one row are added up in this
/// order, so that the order of a batch does not reach the last bit of a sum.
fn order(a: &Sample, b: &Sample) -> Ordering {
    let numbers = |a: &[f32], b: &[f32]| {
        let unequal = a.iter().zip(b).map(|(a, b)| a.total_cmp(b));
        unequal.fold(a.len().cmp(&b.len()), Ordering::then)
    };
    (width(a), read(a))
        .cmp(&(width(b), read(b)))
        .then_with(|| a.tokens().cmp(b.tokens()))
        .then_with(|| a.start().cmp(&b.start()))
        .then_with(|| a.temperature().total_cmp(&b.temperature()))
        .then_with(|| numbers(a.advantages(), b.advantages()))
        .then_with(|| numbers(a.behavior_logprobs(), b.behavior_logprobs()))
        .then_with(|| a.mask().cmp(b.mask()))
        .then_with(|| named(a).cmp(&named(b)))
}

/// Cuts a batch into blocks that are run one after the other, as indices in depth-first order. A block has at most `rows` rows of its
/// own; a sample that would have to read much again in the next block stays as long as the block has at most `most` rows.
pub fn blocks(batch: &[Sample], rows: usize, most: usize) -> Vec<Vec<usize>> {
    let mut sorted: Vec<usize> = (0..batch.len()).collect();
    sorted.sort_by(|a, b| order(&batch[*a], &batch[*b]));
    let mut blocks: Vec<Vec<usize>> = Vec::new();
    let mut taken = 0;
    for at in sorted {
        let sample = read(&batch[at]);
        let last = blocks.last().and_then(|b| b.last()).map(|l| &batch[*l]);
        if let Some(last) = last
            && width(last) == width(&batch[at])
            && let Some(block) = blocks.last_mut()
        {
            let again = common(read(last), sample);
            let more = sample.len() - again;
            let limit = if again > rows / 8 { most } else { rows };
            if taken + more <= limit.max(rows) {
                block.push(at);
                taken += more;
                continue;
            }
        }
        blocks.push(vec![at]);
        taken = sample.len();
    }
    blocks
}

/// Rows that run together.
pub struct Block {
    /// Token of each row `[T]`.
    pub ids: Vec<TokenId>,
    /// Position of each row in its samples `[T]`.
    pub positions: Vec<u32>,
    /// Who attends to whom in a layer without a window.
    segments: Vec<Segment>,
    /// Of each sample, in the order given: the runs of rows that it is read along.
    paths: Vec<Vec<Range<usize>>>,
}

impl Block {
    /// The trie of these samples.
    pub fn new(samples: &[&Sample]) -> Self {
        let mut sorted: Vec<usize> = (0..samples.len()).collect();
        sorted.sort_by(|a, b| order(samples[*a], samples[*b]));
        let mut block = Self {
            ids: Vec::new(),
            positions: Vec::new(),
            segments: Vec::new(),
            paths: vec![Vec::new(); samples.len()],
        };
        let (mut path, mut last): (Vec<Range<usize>>, &[TokenId]) = (Vec::new(), &[]);
        for at in sorted {
            let tokens = read(samples[at]);
            let known = common(last, tokens);
            cut(&mut path, known);
            if known < tokens.len() {
                let rows = block.ids.len()..block.ids.len() + tokens.len() - known;
                block.ids.extend_from_slice(&tokens[known..]);
                block.positions.extend(known as u32..tokens.len() as u32);
                let mut depth = 0;
                for run in &path {
                    let ancestor = Segment::ancestor(rows.clone(), run.clone(), known - depth);
                    block.segments.push(ancestor);
                    depth += run.len();
                }
                block.segments.push(Segment::causal(rows.clone()));
                match path.last_mut() {
                    Some(run) if run.end == rows.start => run.end = rows.end,
                    _ => path.push(rows),
                }
            }
            block.paths[at].clone_from(&path);
            last = tokens;
        }
        block
    }

    /// T
    pub fn rows(&self) -> usize {
        self.ids.len()
    }

    /// Who attends to whom in a layer of this window; layers of one model differ in it.
    pub fn segments(&self, window: Option<usize>) -> Vec<Segment> {
        let windowed = |segment: &Segment| segment.clone().with_window(window);
        self.segments.iter().map(windowed).collect()
    }

    /// The rows of a sample's tokens, from its first one to its last but one.
    pub fn path(&self, sample: usize) -> impl Iterator<Item = usize> {
        self.paths[sample].iter().cloned().flatten()
    }
}

/// Keeps the first `n` rows of a path.
fn cut(path: &mut Vec<Range<usize>>, mut n: usize) {
    path.retain_mut(|run| {
        run.end = run.end.min(run.start + n);
        n -= run.len();
        run.start < run.end
    });
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use chela_core::{PolicyVersion, Profile, SampleColumns};
    use proptest::prelude::*;

    fn sample(tokens: &[TokenId]) -> Sample {
        let columns = SampleColumns {
            mask: vec![true],
            behavior_logprobs: vec![-1.0],
            advantages: vec![1.0],
        };
        let version = PolicyVersion::base(Profile::default());
        Sample::new(tokens.to_vec(), tokens.len() - 1, columns, 1.0, version).unwrap()
    }

    fn texts() -> impl Strategy<Value = Vec<Vec<TokenId>>> {
        // Few tokens, so that texts share beginnings, are equal, and begin one another.
        prop::collection::vec(prop::collection::vec(0..2u32, 2..12), 1..9)
    }

    proptest! {
        #[test]
        fn a_row_sees_its_own_past_and_nothing_else(texts in texts(), window in prop::option::of(1usize..6)) {
            let samples: Vec<Sample> = texts.iter().map(|t| sample(t)).collect();
            let all: Vec<&Sample> = samples.iter().collect();
            let block = Block::new(&all);
            let mut seen: Vec<Vec<usize>> = vec![Vec::new(); block.rows()];
            for s in block.segments(window) {
                for (i, q) in s.q.clone().enumerate() {
                    seen[q].extend(s.keys_of(i).map(|k| s.k.start + k));
                }
            }
            let mut beginnings = std::collections::HashSet::new();
            for (at, text) in texts.iter().enumerate() {
                let path: Vec<usize> = block.path(at).collect();
                prop_assert_eq!(path.len(), text.len() - 1);
                for (i, row) in path.iter().enumerate() {
                    beginnings.insert(&text[..=i]);
                    prop_assert_eq!((block.ids[*row], block.positions[*row]), (text[i], i as u32));
                    let from = window.map_or(0, |w| (i + 1).saturating_sub(w));
                    let mut sees = seen[*row].clone();
                    sees.sort_unstable();
                    prop_assert_eq!(&sees, &path[from..=i]);
                }
            }
            prop_assert_eq!(block.rows(), beginnings.len(), "each beginning stands there once");
        }

        #[test]
        fn every_sample_is_in_one_block_within_the_limits(texts in texts(), rows in 1usize..20, more in 0usize..20) {
            let batch: Vec<Sample> = texts.iter().map(|t| sample(t)).collect();
            let blocks = blocks(&batch, rows, rows + more);
            let mut all = blocks.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..batch.len()).collect::<Vec<_>>());
            for block in blocks.iter().filter(|b| b.len() > 1) {
                let samples: Vec<&Sample> = block.iter().map(|i| &batch[*i]).collect();
                prop_assert!(Block::new(&samples).rows() <= rows + more);
            }
        }
    }

    #[test]
    fn what_shares_much_stays_together() {
        let text = |i: u32| sample(&[&[9; 100][..], &[i, i, i]].concat());
        let batch: Vec<Sample> = (0..8).map(text).collect();
        assert_eq!(blocks(&batch, 50, 200), [(0..8).collect::<Vec<_>>()]);
        assert_eq!(blocks(&batch, 50, 0).len(), 8);
        let apart: Vec<Sample> = (0..8).map(|i| sample(&[i; 26])).collect();
        assert_eq!(
            blocks(&apart, 50, 1000).len(),
            4,
            "who shares nothing does not ask for memory"
        );
    }
}
