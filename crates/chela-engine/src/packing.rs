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
/// own, or more when its samples would have to read much again in the next block: [`Tree`] walks those.
pub fn blocks(batch: &[Sample], rows: usize) -> Vec<Vec<usize>> {
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
            if again > rows / 8 || taken + more <= rows {
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
    /// The trie of these samples, rows in depth-first order.
    pub fn new(samples: &[&Sample]) -> Self {
        let mut sorted: Vec<usize> = (0..samples.len()).collect();
        sorted.sort_by(|a, b| order(samples[*a], samples[*b]));
        let (mut ids, mut positions) = (Vec::new(), Vec::new());
        let mut paths = vec![Vec::new(); samples.len()];
        let (mut path, mut last): (Vec<Range<usize>>, &[TokenId]) = (Vec::new(), &[]);
        for at in sorted {
            let tokens = read(samples[at]);
            let known = common(last, tokens);
            cut(&mut path, known);
            if known < tokens.len() {
                let rows = ids.len()..ids.len() + tokens.len() - known;
                ids.extend_from_slice(&tokens[known..]);
                positions.extend(known as u32..tokens.len() as u32);
                match path.last_mut() {
                    Some(run) if run.end == rows.start => run.end = rows.end,
                    _ => path.push(rows),
                }
            }
            paths[at].clone_from(&path);
            last = tokens;
        }
        Self {
            segments: segments(&positions, 0),
            ids,
            positions,
            paths,
        }
    }

    /// Rows that hang from one path of `depth` rows, as a block of their own. Its segments name keys of a buffer that holds the path
    /// first and these rows behind it.
    pub fn part(&self, rows: Range<usize>, depth: usize) -> Self {
        let positions = self.positions[rows.clone()].to_vec();
        Self {
            segments: segments(&positions, depth),
            ids: self.ids[rows].to_vec(),
            positions,
            paths: Vec::new(),
        }
    }

    /// T
    pub fn rows(&self) -> usize {
        self.ids.len()
    }

    /// Tokens on its longest path.
    pub fn depth(&self) -> usize {
        self.positions.iter().max().map_or(0, |p| *p as usize + 1)
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

/// Who attends to whom among rows in depth-first order, below a path of `depth` rows whose keys stand before theirs.
fn segments(positions: &[u32], depth: usize) -> Vec<Segment> {
    let mut segments = Vec::new();
    let mut path: Vec<Range<usize>> = Vec::new();
    let mut start = 0;
    while start < positions.len() {
        let follows = |r: &usize| positions[*r] == positions[*r - 1] + 1;
        let end = start + 1 + (start + 1..positions.len()).take_while(follows).count();
        let (rows, position) = (start..end, positions[start] as usize);
        let known = position - depth;
        cut(&mut path, known);
        if depth > 0 {
            segments.push(Segment::ancestor(rows.clone(), 0..depth, position));
        }
        let mut above = 0;
        for run in &path {
            let keys = depth + run.start..depth + run.end;
            segments.push(Segment::ancestor(rows.clone(), keys, known - above));
            above += run.len();
        }
        let own = Segment::causal(rows.clone());
        segments.push(Segment {
            k: depth + start..depth + end,
            ..own
        });
        path.push(rows);
        start = end;
    }
    segments
}

/// What a depth-first walk does with rows of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Forward and at once back: whole subtrees that hang from a path of `depth` rows.
    Leaf(Range<usize>, usize),
    /// Forward: more rows of the path, which has `depth` before them.
    Down(Range<usize>, usize),
    /// Back through what went down: everything below it has been.
    Up(Range<usize>, usize),
}

/// The shape of a block's trie.
pub struct Tree {
    /// Where the subtree of each row ends.
    ends: Vec<usize>,
    /// Rows that follow each row directly.
    children: Vec<u32>,
}

impl Tree {
    /// Of rows in depth-first order, from their positions.
    pub fn new(block: &Block) -> Self {
        let n = block.rows();
        let (mut ends, mut children) = (vec![n; n], vec![0; n]);
        let mut open: Vec<usize> = Vec::new();
        for (row, position) in block.positions.iter().enumerate() {
            for done in open.drain((*position as usize).min(open.len())..) {
                ends[done] = row;
            }
            if let Some(parent) = open.last() {
                children[*parent] += 1;
            }
            open.push(row);
        }
        Self { ends, children }
    }

    /// A walk in steps of at most `most` rows: what it must hold at one time is one path and the rows of a step.
    pub fn walk(&self, most: usize) -> Vec<Step> {
        let mut steps = Vec::new();
        // What is still to do, the next last: rows that hang from a path of so many rows, or the way back up.
        let mut open = vec![Step::Down(0..self.ends.len(), 0)];
        while let Some(step) = open.pop() {
            let (rows, depth) = match step {
                Step::Down(rows, depth) => (rows, depth),
                up => {
                    steps.push(up);
                    continue;
                }
            };
            if rows.is_empty() {
                continue;
            }
            let end = self.whole(&rows, most);
            if end > rows.start {
                steps.push(Step::Leaf(rows.start..end, depth));
                open.push(Step::Down(end..rows.end, depth));
                continue;
            }
            let run = rows.start..self.run(rows.start, most);
            let end = self.ends[rows.start];
            open.push(Step::Down(end..rows.end, depth));
            open.push(Step::Up(run.clone(), depth));
            open.push(Step::Down(run.end..end, depth + run.len()));
            steps.push(Step::Down(run, depth));
        }
        steps
    }

    /// The end of as many whole subtrees as `most` rows hold.
    fn whole(&self, rows: &Range<usize>, most: usize) -> usize {
        let mut end = rows.start;
        while end < rows.end && self.ends[end] - rows.start <= most {
            end = self.ends[end];
        }
        end
    }

    /// The end of the rows from `start` on that are one path, at most `most`.
    fn run(&self, start: usize, most: usize) -> usize {
        let single = |row: &usize| self.children[*row] == 1;
        start + 1 + (start..start + most.max(1) - 1).take_while(single).count()
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
        fn every_sample_is_in_one_block_within_the_limits(texts in texts(), rows in 1usize..20) {
            let batch: Vec<Sample> = texts.iter().map(|t| sample(t)).collect();
            let blocks = blocks(&batch, rows);
            let mut all = blocks.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..batch.len()).collect::<Vec<_>>());
            for block in blocks.iter().filter(|b| b.len() > 1) {
                let samples: Vec<&Sample> = block.iter().map(|i| &batch[*i]).collect();
                let shares = |pair: &[&Sample]| common(read(pair[0]), read(pair[1])) > rows / 8;
                prop_assert!(Block::new(&samples).rows() <= rows || samples.windows(2).any(shares));
            }
        }

        #[test]
        fn a_walk_reads_every_row_once_below_its_own_path(texts in texts(), most in 1usize..9, window in prop::option::of(1usize..6)) {
            let samples: Vec<Sample> = texts.iter().map(|t| sample(t)).collect();
            let all: Vec<&Sample> = samples.iter().collect();
            let block = Block::new(&all);
            let parents: Vec<Vec<usize>> = (0..block.rows()).map(|row| {
                let at = (0..texts.len()).find(|i| block.path(*i).any(|r| r == row)).unwrap();
                block.path(at).take_while(|r| *r < row).collect()
            }).collect();
            let (mut path, mut open, mut been): (Vec<usize>, Vec<Step>, Vec<usize>) = Default::default();
            for step in Tree::new(&block).walk(most) {
                let (rows, depth, down) = match step.clone() {
                    Step::Leaf(rows, depth) => (rows, depth, false),
                    Step::Down(rows, depth) => (rows, depth, true),
                    Step::Up(rows, depth) => {
                        prop_assert_eq!(open.pop(), Some(Step::Down(rows.clone(), depth)));
                        prop_assert_eq!(path.split_off(depth), rows.collect::<Vec<_>>());
                        continue;
                    }
                };
                prop_assert!(path.len() == depth && !rows.is_empty() && rows.len() <= most);
                let part = block.part(rows.clone(), depth);
                let keys: Vec<usize> = path.iter().copied().chain(rows.clone()).collect();
                let mut seen: Vec<Vec<usize>> = vec![Vec::new(); rows.len()];
                for s in part.segments(window) {
                    for (i, q) in s.q.clone().enumerate() {
                        seen[q].extend(s.keys_of(i).map(|k| keys[s.k.start + k]));
                    }
                }
                for (row, mut sees) in rows.clone().zip(seen) {
                    let mut wanted = parents[row].clone();
                    wanted.push(row);
                    let from = window.map_or(0, |w| wanted.len().saturating_sub(w));
                    sees.sort_unstable();
                    prop_assert_eq!(&sees, &wanted[from..]);
                }
                been.extend(rows.clone());
                if down {
                    path.extend(rows);
                    open.push(step);
                }
            }
            prop_assert!(path.is_empty() && open.is_empty());
            prop_assert_eq!(been, (0..block.rows()).collect::<Vec<_>>());
        }
    }

    #[test]
    fn what_shares_much_stays_together() {
        let text = |i: u32| sample(&[&[9; 100][..], &[i, i, i]].concat());
        let batch: Vec<Sample> = (0..8).map(text).collect();
        assert_eq!(blocks(&batch, 50), [(0..8).collect::<Vec<_>>()]);
        let apart: Vec<Sample> = (0..8).map(|i| sample(&[i; 26])).collect();
        assert_eq!(blocks(&apart, 50).len(), 4, "two fit into a block");
    }

    #[test]
    fn a_walk_takes_small_subtrees_together_and_cuts_a_long_path() {
        let text = |i: u32| sample(&[&[9; 10][..], &[i, i, i]].concat());
        let batch: Vec<Sample> = (0..4).map(text).collect();
        let block = Block::new(&batch.iter().collect::<Vec<_>>());
        let steps = Tree::new(&block).walk(6);
        let wanted = [
            Step::Down(0..6, 0),
            Step::Down(6..10, 6),
            Step::Leaf(10..16, 10),
            Step::Leaf(16..18, 10),
            Step::Up(6..10, 6),
            Step::Up(0..6, 0),
        ];
        assert!(steps == wanted, "{steps:?}");
    }
}
