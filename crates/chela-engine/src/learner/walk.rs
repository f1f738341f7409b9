//! Depth-first through a block's trie: what samples share is read once, and what must be held is one path and the rows of a step,
//! however many samples hang from it.
//!
//! A block that fits is one step. Otherwise keys and values of the present path stay, with what the derivatives by them add up to, and
//! activations of a step go when everything below it is to come, as far as memory asks for it: on the way back up the step is
//! read again below its own path. A sample's loss is asked for when its last row has been read.

use super::{
    Gradient, LocalLearner, RowsRead,
    head::{Asked, Part},
    value::ValueHead,
};
use crate::{
    adapter::Adapter,
    packing::{Block, Step, Tree},
    training::{Pass, Path, Tape},
    weights::BaseWeights,
};
use chela_core::{EngineError, Sample, Scored, TokenLoss};
use chela_kernels::{Kernels, PairGrads};
use std::ops::Range;

/// A loss by a sample's index in the batch, and where the gradient goes.
pub struct Back<'a, B> {
    pub(super) of: &'a [usize],
    pub(super) loss: &'a mut dyn FnMut(usize, &Sample, &Scored) -> TokenLoss,
    pub(super) grads: &'a mut Gradient<B>,
}

/// What is asked about each pair.
pub struct Asks<'a, B> {
    pub(super) want: chela_kernels::Want,
    /// Says what states are worth.
    pub(super) value: Option<&'a ValueHead<B>>,
}

/// How memory is divided in a walk, in rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Most rows of a step.
    pub(super) step: usize,
    /// Rows of steps above the present one whose activations may stay.
    kept: usize,
}

impl Room {
    /// Divides `bytes` for a trie of `rows` rows, `depth` of them on its longest path, when activations of a row take `row` bytes and keys
    /// and values of one `path`, which the rows of a step need too; steps have at most `step` rows. The bytes that would do, when the path
    /// leaves no room for a step.
    pub(super) fn new(
        bytes: usize,
        (rows, depth): (usize, usize),
        (row, path): (usize, usize),
        step: usize,
    ) -> Result<Self, usize> {
        let least = LEAST.min(step);
        let bytes = bytes.max(least * (row + path));
        if rows * row <= bytes {
            let (step, kept) = (rows, 0);
            return Ok(Self { step, kept });
        }
        let left = bytes.saturating_sub(depth * path);
        if left < least * (row + path) {
            return Err(depth * path + least * (row + path));
        }
        let step = step.min(left / (row + path));
        let kept = (left - step * (row + path)) / row;
        Ok(Self { step, kept })
    }
}

/// Rows that a step may have whatever the budget says.
const LEAST: usize = 64;

/// One walk's state.
struct Walk<'a, K: Kernels> {
    learner: &'a LocalLearner<K>,
    model: (&'a BaseWeights<K>, &'a Adapter<K::Buf>),
    samples: &'a [&'a Sample],
    block: &'a Block,
    asks: Asks<'a, K::Buf>,
    asked: Asked,
    /// Above the rows of a step; none when the block is one step.
    path: Option<Path<K>>,
    scores: Scores,
    /// Samples by their last row, the next one last.
    ends: Vec<(usize, usize)>,
}

/// What the head said so far, and the derivatives that the losses asked for; of all pairs.
#[derive(Default)]
struct Scores {
    logprobs: Vec<f32>,
    logsumexp: Vec<f32>,
    entropy: Option<Vec<f32>>,
    top: Option<chela_kernels::TopK>,
    values: Option<Vec<f32>>,
    d_logprobs: Vec<f32>,
    d_entropy: Option<Vec<f32>>,
    d_values: Option<Vec<f32>>,
}

/// What stays of a step whose rows go back later.
struct Below<K: Kernels> {
    block: Block,
    part: Part,
    /// Activations and normed rows of the head, where there is room.
    tape: Option<(Tape<K>, K::Buf)>,
}

impl<K: Kernels> LocalLearner<K> {
    /// Reads a block's samples, and with `back` goes back through them.
    pub(super) fn walk(
        &self,
        model: (&BaseWeights<K>, &Adapter<K::Buf>),
        samples: &[&Sample],
        asks: Asks<'_, K::Buf>,
        mut back: Option<Back<'_, K::Buf>>,
    ) -> Result<Vec<Scored>, EngineError> {
        let block = Block::new(samples);
        let room = self.room(block.rows(), block.depth())?;
        let whole = room.step >= block.rows();
        let steps = Tree::new(&block).walk(room.step);
        // The rows of a step stand behind its path, also where they branch and are more than any path is long.
        let ends = steps.iter().map(|step| match step {
            Step::Leaf(rows, depth) | Step::Down(rows, depth) | Step::Up(rows, depth) => {
                depth + rows.len()
            }
        });
        let most = ends.max().unwrap_or(0);
        let path = (!whole)
            .then(|| Path::new(&self.k, &self.base, most))
            .transpose()?;
        let last = |i: usize| block.path(i).last().unwrap_or_default();
        let mut ends: Vec<_> = (0..samples.len()).map(|i| (last(i), i)).collect();
        ends.sort_unstable_by(|a, b| b.cmp(a));
        let asked = Asked::new(samples, &block);
        let mut walk = Walk {
            learner: self,
            model,
            samples,
            scores: Scores::new(&asked, &asks, back.is_some()),
            asks,
            asked,
            block: &block,
            path,
            ends,
        };
        let mut scored: Vec<Option<Scored>> = samples.iter().map(|_| None).collect();
        let (mut open, mut kept): (Vec<Below<K>>, usize) = (Vec::new(), room.kept);
        for step in steps {
            match step {
                Step::Leaf(rows, depth) => {
                    let below = walk.down(&rows, depth, back.is_some())?;
                    walk.ended(&rows, &mut scored, &mut back)?;
                    if let Some(back) = &mut back {
                        walk.up(below, depth, back.grads)?;
                    }
                }
                Step::Down(rows, depth) => {
                    let keep = back.is_some() && rows.len() <= kept;
                    kept -= if keep { rows.len() } else { 0 };
                    let below = walk.down(&rows, depth, keep)?;
                    walk.ended(&rows, &mut scored, &mut back)?;
                    open.push(below);
                }
                Step::Up(rows, depth) => {
                    if let (Some(below), Some(back)) = (open.pop(), &mut back) {
                        kept += below.tape.as_ref().map_or(0, |_| rows.len());
                        walk.up(below, depth, back.grads)?;
                    }
                }
            }
        }
        let all = scored.into_iter().collect::<Option<Vec<_>>>();
        all.ok_or_else(|| EngineError::Shape("a sample without rows".to_owned()))
    }
}

impl<K: Kernels> Walk<'_, K> {
    fn pass<'a>(&'a self, block: &'a Block) -> Pass<'a, K> {
        Pass {
            k: &self.learner.k,
            base: self.model.0,
            adapter: self.model.1,
            block,
            recompute: self.learner.options.recompute,
        }
    }

    /// Reads rows below a path of `depth` rows, activations and all when they are to stay.
    fn read(
        &mut self,
        block: &Block,
        part: &Part,
        (depth, keep): (usize, bool),
    ) -> Result<(Tape<K>, K::Buf), EngineError> {
        let mut path = self.path.take();
        if let Some(path) = &mut path {
            path.depth = depth;
        }
        let tape = self.pass(block).forward(keep, path.as_mut());
        self.path = path;
        let tape = tape?;
        let hidden = self.learner.head_rows((self.model.0, &tape), part)?;
        Ok((tape, hidden))
    }

    fn count(&self, add: impl FnOnce(&mut RowsRead)) {
        let mut read = self.learner.read.get();
        add(&mut read);
        self.learner.read.set(read);
    }

    fn down(
        &mut self,
        rows: &Range<usize>,
        depth: usize,
        keep: bool,
    ) -> Result<Below<K>, EngineError> {
        let block = self.block.part(rows.clone(), depth);
        let part = self.asked.part(rows);
        self.count(|read| read.unique += block.rows());
        let (tape, hidden) = self.read(&block, &part, (depth, keep))?;
        let read = (&hidden, &part);
        let scores = self.learner.head(self.model.0, read, self.asks.want)?;
        self.scores.put(&part, &scores);
        if let (Some(head), Some(all)) = (self.asks.value, &mut self.scores.values) {
            let values = self.learner.values(head, read)?;
            let pairs = part.pairs.iter().zip(values);
            pairs.for_each(|(pair, value)| all[*pair] = value);
        }
        let tape = keep.then_some((tape, hidden));
        Ok(Below { block, part, tape })
    }

    /// Asks for the losses of samples whose last row is among these.
    fn ended(
        &mut self,
        rows: &Range<usize>,
        scored: &mut [Option<Scored>],
        back: &mut Option<Back<'_, K::Buf>>,
    ) -> Result<(), EngineError> {
        let mut ended = Vec::new();
        while let Some((_, i)) = self.ends.pop_if(|(last, _)| *last < rows.end) {
            ended.push(i);
        }
        for i in ended {
            let pairs = self.asked.of(i, self.samples[i].len());
            let k = self.asked.k;
            let one = self.scores.of(&pairs, k);
            if let Some(back) = back {
                let loss = (back.loss)(back.of[i], self.samples[i], &one);
                self.scores.derive(&pairs, k, loss)?;
            }
            scored[i] = Some(one);
        }
        Ok(())
    }

    /// Goes back through rows whose losses all are known and below which nothing is left.
    fn up(
        &mut self,
        below: Below<K>,
        depth: usize,
        grads: &mut Gradient<K::Buf>,
    ) -> Result<(), EngineError> {
        let Below { block, part, tape } = below;
        let (tape, hidden) = match tape {
            Some(kept) => kept,
            None => {
                self.count(|read| read.again += block.rows());
                self.read(&block, &part, (depth, true))?
            }
        };
        let k = self.asked.k;
        let of = |all: &[f32], width: usize| -> Vec<f32> {
            let rows = part.pairs.iter().map(|p| p * width..(p + 1) * width);
            rows.flat_map(|row| all[row].to_vec()).collect()
        };
        let (logsumexp, d_logprobs) = (
            of(&self.scores.logsumexp, 1),
            of(&self.scores.d_logprobs, k),
        );
        let entropy = self.scores.entropy.as_ref();
        let entropy = entropy.zip(self.scores.d_entropy.as_ref());
        let entropy = entropy.map(|(e, d)| (of(e, 1), of(d, 1)));
        let given = PairGrads {
            logsumexp: &logsumexp,
            d_logprobs: &d_logprobs,
            entropy: entropy.as_ref().map(|(e, d)| (&e[..], &d[..])),
        };
        let d_values = self.scores.d_values.as_ref().map(|d| of(d, 1));
        let (model, given) = ((self.model.0, &tape), (given, d_values.as_deref()));
        let dx = self
            .learner
            .head_backward(model, (&hidden, &part), given, block.rows(), grads)?;
        drop(hidden);
        let mut path = self.path.take();
        if let Some(path) = &mut path {
            path.depth = depth;
        }
        let done = self
            .pass(&block)
            .backward(tape, dx, &mut grads.weights, path.as_mut());
        self.path = path;
        done
    }
}

impl Scores {
    fn new<B>(asked: &Asked, asks: &Asks<'_, B>, back: bool) -> Self {
        let n = asked.pairs();
        Self {
            logprobs: vec![0.0; n * asked.k],
            logsumexp: vec![0.0; n],
            entropy: asks.want.entropy.then(|| vec![0.0; n]),
            top: None,
            values: asks.value.map(|_| vec![0.0; n]),
            d_logprobs: vec![0.0; if back { n * asked.k } else { 0 }],
            d_entropy: None,
            d_values: None,
        }
    }

    /// Puts a part's answers where its pairs have their places.
    fn put(&mut self, part: &Part, scores: &chela_kernels::PairScores) {
        fn spread<T: Copy>(all: &mut [T], width: usize, pairs: &[usize], some: &[T]) {
            for (i, pair) in pairs.iter().enumerate() {
                all[pair * width..(pair + 1) * width]
                    .copy_from_slice(&some[i * width..(i + 1) * width]);
            }
        }
        let (n, pairs) = (self.logsumexp.len(), &part.pairs);
        let k = self.logprobs.len() / n.max(1);
        spread(&mut self.logprobs, k, pairs, &scores.logprobs);
        spread(&mut self.logsumexp, 1, pairs, &scores.logsumexp);
        if let (Some(all), Some(some)) = (&mut self.entropy, &scores.entropy) {
            spread(all, 1, pairs, some);
        }
        if let Some(some) = &scores.top {
            let all = self.top.get_or_insert_with(|| chela_kernels::TopK {
                k: some.k,
                ids: vec![0; n * some.k],
                logprobs: vec![0.0; n * some.k],
            });
            spread(&mut all.ids, some.k, pairs, &some.ids);
            spread(&mut all.logprobs, some.k, pairs, &some.logprobs);
        }
    }

    /// A sample's answers.
    fn of(&self, pairs: &Range<usize>, k: usize) -> Scored {
        Scored {
            logprobs: self.logprobs[pairs.start * k..pairs.end * k].to_vec(),
            entropy: self.entropy.as_ref().map(|e| e[pairs.clone()].to_vec()),
            top: self.top.as_ref().map(|t| {
                let cut = pairs.start * t.k..pairs.end * t.k;
                (t.ids[cut.clone()].to_vec(), t.logprobs[cut].to_vec())
            }),
            values: self.values.as_ref().map(|v| v[pairs.clone()].to_vec()),
        }
    }

    /// Keeps a sample's derivatives.
    fn derive(
        &mut self,
        pairs: &Range<usize>,
        k: usize,
        loss: TokenLoss,
    ) -> Result<(), EngineError> {
        if loss.d_values.is_some() && self.values.is_none() {
            return Err(EngineError::Unsupported(
                "a loss by values without a value head (AdapterSpec::value_head)",
            ));
        }
        let n = pairs.len();
        let fits = |d: &Option<Vec<f32>>| d.as_ref().is_none_or(|d| d.len() == n);
        if loss.d_logprobs.len() != n * k || !fits(&loss.d_entropy) || !fits(&loss.d_values) {
            return Err(EngineError::Shape("a loss of another length".to_owned()));
        }
        self.d_logprobs[pairs.start * k..pairs.end * k].copy_from_slice(&loss.d_logprobs);
        let n = self.logsumexp.len();
        for (given, all) in [
            (loss.d_entropy, &mut self.d_entropy),
            (loss.d_values, &mut self.d_values),
        ] {
            if let Some(d) = given {
                let all = all.get_or_insert_with(|| vec![0.0; n]);
                all[pairs.clone()].copy_from_slice(&d);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_divided_between_the_path_and_the_steps() {
        let room = |bytes, rows, depth| Room::new(bytes, (rows, depth), (1000, 100), 768);
        let some = |step, kept| Ok(Room { step, kept });
        assert_eq!(room(1_000_000, 1000, 500), some(1000, 0), "all of it");
        assert_eq!(room(1_000_000, 1001, 1000), some(768, 55));
        assert_eq!(room(1_000_000, 8900, 8900), some(100, 0));
        assert_eq!(room(1_000_000, 9296, 9296), some(64, 0));
        assert_eq!(room(1_000_000, 9297, 9297), Err(1_000_100), "too long");
        assert_eq!(room(0, 64, 64), some(64, 0), "something is always learnt");
        assert_eq!(room(0, 80, 60), Err(76_400));
        assert_eq!(room(70_400 + 6_000, 80, 60), some(64, 0));
    }
}
