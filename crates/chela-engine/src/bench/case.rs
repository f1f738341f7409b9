//! What `chela bench --only` can measure, and the texts of each: numbers without meaning, the same in every run, so that another
//! program can be given the same work.

use super::text;
use crate::{engine::LocalEngine, packing::Block};
use chela_core::{
    AdapterSpec, EngineError, PolicyVersion, Profile, Sample, SampleColumns, TokenId,
};
use std::{fmt, str::FromStr};

/// Prompt and reply of each sample of `train:ragged`: long prompts, short replies, no two of one length.
const RAGGED: [(usize, usize); 4] = [(704, 64), (352, 48), (224, 32), (512, 40)];
/// Prompt that the samples of `train:shared` begin with, their number, and the tokens that each adds.
const SHARED: (usize, usize, usize) = (1024, 4, 64);
/// Prompt of each reply of `decode:N`.
const PROMPT: usize = 32;
/// Texts of `train:recompute` and their tokens, all scored but the first: one block of rows.
const RECOMPUTED: (usize, usize) = (1, 768);
/// New tokens of a second turn of `turn2:N`.
pub(super) const NEW: usize = 32;
/// Replies that `decode:N` may ask for, and so the lanes that an engine needs for it.
pub const MOST_LANES: usize = 64;

/// One thing to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// A LoRA step over `texts` of `tokens` each, of which every token but the first is scored.
    Equal {
        /// B
        texts: usize,
        /// N
        tokens: usize,
    },
    /// A LoRA step over texts of different lengths, of which the replies are scored.
    Ragged,
    /// A LoRA step over texts that begin with the same long prompt, of which the replies are scored.
    Shared,
    /// The same step with all activations kept and with layers' inputs only, one after the other.
    Recompute,
    /// So many replies together.
    Decode(usize),
    /// A prompt of so many tokens.
    Prefill(usize),
    /// The first token of a second turn that adds `NEW` tokens to a cached text of so many.
    SecondTurn(usize),
    /// The machine's matrix rate.
    Sgemm,
    /// The machine's memory rate.
    Memory,
}

impl FromStr for Case {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let number = |text: &str, most: usize| match text.parse::<usize>() {
            Ok(n) if (1..=most).contains(&n) => Ok(n),
            _ => Err(format!("{name}: {text:?} is not a number from 1 to {most}")),
        };
        let unknown = || {
            format!(
                "{name}: no such case; there are train:BxN, train:ragged, train:shared, train:recompute, decode:N, prefill:N, turn2:N, sgemm and memory"
            )
        };
        match name.split_once(':') {
            None if name == "sgemm" => Ok(Self::Sgemm),
            None if name == "memory" => Ok(Self::Memory),
            Some(("train", "ragged")) => Ok(Self::Ragged),
            Some(("train", "shared")) => Ok(Self::Shared),
            Some(("train", "recompute")) => Ok(Self::Recompute),
            Some(("train", shape)) => {
                let (texts, tokens) = shape.split_once('x').ok_or_else(unknown)?;
                let tokens = match number(tokens, 1 << 20)? {
                    1 => return Err(format!("{name}: a text of one token predicts nothing")),
                    n => n,
                };
                Ok(Self::Equal {
                    texts: number(texts, 1024)?,
                    tokens,
                })
            }
            Some(("decode", lanes)) => Ok(Self::Decode(number(lanes, MOST_LANES)?)),
            Some(("prefill", tokens)) => Ok(Self::Prefill(number(tokens, 1 << 20)?)),
            Some(("turn2", tokens)) => Ok(Self::SecondTurn(number(tokens, 1 << 20)?)),
            _ => Err(unknown()),
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Equal { texts, tokens } => write!(f, "train:{texts}x{tokens}"),
            Self::Ragged => f.write_str("train:ragged"),
            Self::Shared => f.write_str("train:shared"),
            Self::Recompute => f.write_str("train:recompute"),
            Self::Decode(lanes) => write!(f, "decode:{lanes}"),
            Self::Prefill(tokens) => write!(f, "prefill:{tokens}"),
            Self::SecondTurn(tokens) => write!(f, "turn2:{tokens}"),
            Self::Sgemm => f.write_str("sgemm"),
            Self::Memory => f.write_str("memory"),
        }
    }
}

/// A text and where its reply begins: what comes before is read and not scored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text {
    /// Its ids.
    pub ids: Vec<TokenId>,
    /// First scored token of a training text; the length of a prompt.
    pub start: usize,
}

impl Case {
    /// The unit of its figure.
    pub fn unit(&self) -> &'static str {
        match self {
            Self::Sgemm => "GFLOP/s",
            Self::Memory => "GB/s",
            Self::SecondTurn(_) => "ms",
            Self::Recompute => "x time",
            _ => "tokens/s",
        }
    }

    /// Whether it is an optimizer step.
    pub fn trains(&self) -> bool {
        matches!(
            self,
            Self::Equal { .. } | Self::Ragged | Self::Shared | Self::Recompute
        )
    }

    /// Its texts over a vocabulary.
    pub fn texts(&self, vocabulary: usize) -> Vec<Text> {
        let prompt = |n: usize, salt: usize| Text {
            ids: text(n, salt, vocabulary),
            start: n,
        };
        match *self {
            Self::Equal { texts, tokens } => (0..texts)
                .map(|i| Text {
                    start: 1,
                    ..prompt(tokens, 7000 + i)
                })
                .collect(),
            Self::Recompute => {
                let (texts, tokens) = RECOMPUTED;
                Self::Equal { texts, tokens }.texts(vocabulary)
            }
            Self::Ragged => (0..)
                .zip(RAGGED)
                .map(|(i, (start, reply))| Text {
                    start,
                    ..prompt(start + reply, 7100 + i)
                })
                .collect(),
            Self::Shared => {
                let (start, samples, reply) = SHARED;
                let begins = text(start, 7200, vocabulary);
                let ends = (0..samples).map(|i| text(reply, 7201 + i, vocabulary));
                ends.map(|end| Text {
                    ids: [&begins[..], &end].concat(),
                    start,
                })
                .collect()
            }
            Self::Decode(lanes) => (0..lanes).map(|i| prompt(PROMPT, 1000 + i)).collect(),
            Self::Prefill(tokens) => vec![prompt(tokens, 5000)],
            Self::SecondTurn(tokens) => vec![prompt(tokens, 6000)],
            Self::Sgemm | Self::Memory => Vec::new(),
        }
    }

    /// The texts as samples whose every reply token trains.
    pub(super) fn samples(&self, vocabulary: usize) -> Result<Vec<Sample>, EngineError> {
        samples(self.texts(vocabulary))
    }
}

/// Texts as samples whose every reply token trains.
pub(super) fn samples(texts: impl IntoIterator<Item = Text>) -> Result<Vec<Sample>, EngineError> {
    let version = PolicyVersion::base(Profile::default());
    let texts = texts.into_iter();
    texts
        .map(|text| {
            let n = text.ids.len() - text.start;
            let columns = SampleColumns {
                mask: vec![true; n],
                behavior_logprobs: vec![-1.0; n],
                advantages: vec![1.0; n],
            };
            Sample::new(text.ids, text.start, columns, 1.0, version.clone())
        })
        .collect()
}

/// Floating point operations of a step's linear maps, adapter and head: 4 a parameter and row for the frozen maps, 6 for the adapter, 4
/// for the head on scored rows.
pub(super) fn step_flops(engine: &LocalEngine, rows: usize, scored: usize) -> f64 {
    let (frozen, head) = engine.parameters();
    let adapter = engine.low_rank_parameters(AdapterSpec::default().rank);
    rows as f64 * (4.0 * frozen as f64 + 6.0 * adapter as f64) + scored as f64 * 4.0 * head as f64
}

/// What a case cannot do without, whoever computes it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Rows through the layers, what several texts begin with counted once.
    pub rows: usize,
    /// Rows through the head.
    pub scored: usize,
    /// 10^9 floating point operations of linear maps, adapter and head: 2 for each parameter and row on the way there, as many on
    /// the way back, and for the adapter as many again for its own derivative.
    pub gflop_maps: f64,
    /// The same of attention: 2 products there and 5 back over each pair of query and key.
    pub gflop_attention: f64,
}

impl Work {
    /// Of a case; nothing for a machine's rates and for replies, which are bound by memory.
    pub fn of(case: &Case, engine: &LocalEngine) -> Result<Self, EngineError> {
        let c = &engine.base.config;
        let width = (c.heads * c.head_dim * c.layers) as f64;
        let (frozen, head) = engine.parameters();
        let (frozen, head) = (frozen as f64, head as f64);
        if case.trains() {
            let samples = case.samples(c.vocab)?;
            let all: Vec<&Sample> = samples.iter().collect();
            let block = Block::new(&all);
            // Layers may differ in their windows; the mean of them counts.
            let pairs: usize = (0..c.layers)
                .flat_map(|layer| block.segments(c.window(layer)))
                .map(|s| (0..s.q.len()).map(|i| s.keys_of(i).len()).sum::<usize>())
                .sum::<usize>()
                / c.layers.max(1);
            let scored: std::collections::HashSet<usize> = (0..all.len())
                .flat_map(|i| block.path(i).skip(all[i].start() - 1))
                .collect();
            let (rows, scored) = (block.rows(), scored.len());
            return Ok(Self {
                rows,
                scored,
                gflop_maps: step_flops(engine, rows, scored) / 1e9,
                gflop_attention: 14.0 * width * pairs as f64 / 1e9,
            });
        }
        Ok(match case {
            Case::Prefill(n) => Self {
                rows: *n,
                scored: 1,
                gflop_maps: (*n as f64 * 2.0 * frozen + 2.0 * head) / 1e9,
                gflop_attention: 4.0 * width * (n * (n + 1) / 2) as f64 / 1e9,
            },
            _ => Self::default(),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn names_are_read_and_written_alike() {
        for name in [
            "train:1x1024",
            "train:6x256",
            "train:ragged",
            "train:shared",
            "train:recompute",
            "decode:32",
            "prefill:512",
            "turn2:4096",
            "sgemm",
            "memory",
        ] {
            assert_eq!(name.parse::<Case>().unwrap().to_string(), name);
        }
        for (name, says) in [
            ("train", "no such case"),
            ("train:wide", "no such case"),
            ("train:0x9", "\"0\" is not a number from 1"),
            ("train:1x", "\"\" is not a number"),
            ("train:2x1", "predicts nothing"),
            ("decode:65", "from 1 to 64"),
            ("prefill:-1", "\"-1\" is not a number"),
            ("Sgemm", "no such case"),
        ] {
            let error = name.parse::<Case>().unwrap_err();
            assert!(error.starts_with(name) && error.contains(says), "{error}");
        }
    }

    #[test]
    fn texts_have_the_promised_shape_and_ids_of_the_vocabulary() {
        let shape = |name: &str| -> Vec<(usize, usize)> {
            let case: Case = name.parse().unwrap();
            let texts = case.texts(300);
            assert!(texts.iter().flat_map(|t| &t.ids).all(|id| *id < 300));
            assert_eq!(texts, case.texts(300), "the same in every run");
            texts.iter().map(|t| (t.ids.len(), t.start)).collect()
        };
        assert_eq!(shape("train:2x16"), [(16, 1), (16, 1)]);
        assert_eq!(
            shape("train:ragged"),
            [(768, 704), (400, 352), (256, 224), (552, 512)]
        );
        assert_eq!(shape("train:shared"), [(1088, 1024); 4]);
        assert_eq!(shape("train:recompute"), [(768, 1)]);
        assert_eq!(shape("decode:3"), [(32, 32); 3]);
        assert_eq!(shape("prefill:512"), [(512, 512)]);
        assert!(shape("sgemm").is_empty());
    }

    #[test]
    fn only_what_is_meant_to_be_shared_is() {
        let rows = |name: &str| {
            let samples = name.parse::<Case>().unwrap().samples(49_152).unwrap();
            Block::new(&samples.iter().collect::<Vec<_>>()).rows()
        };
        assert_eq!(rows("train:shared"), 1024 + 4 * 63);
        assert_eq!(rows("train:ragged"), 768 + 400 + 256 + 552 - 4);
        assert_eq!(rows("train:2x256"), 2 * 255);
    }
}
