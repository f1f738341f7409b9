//! Measures one case, once for each call, so that a caller can let another program work in between.

use super::{
    Park,
    case::{Case, NEW, Text},
    peak_mib, text,
};
use crate::{engine::LocalEngine, error::kernel, learner::LocalLearner};
use chela_core::{
    AdapterSpec, EngineError, Learner, OptimParams, PolicyEngine, PolicyRef, Prompt, Sample,
    SamplingEvent, SamplingParams, TokenLoss,
};
use chela_kernels::{Cpu, measured_memory_gbs, measured_sgemm_gflops};
use std::{
    task::{Context, Poll, Waker},
    time::Instant,
};

/// Tokens of each reply that are timed while all replies run.
const STEPS: usize = 48;

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// What was timed.
    pub seconds: f64,
    /// In the case's unit; tokens are those of the texts, shared ones as often as they occur.
    pub rate: f64,
    /// Mean log-prob of the scored tokens before the step, so that another program's can be compared.
    pub mean_logprob: Option<f64>,
    /// Of a case that compares: peak resident memory with everything kept, and with layers run again.
    pub peaks_mib: Option<[f64; 2]>,
}

/// A case that is ready to be measured.
pub struct Runner<'a> {
    engine: &'a LocalEngine,
    case: Case,
    texts: Vec<Text>,
    training: Option<(LocalLearner<Cpu>, Vec<Sample>)>,
    /// Second turns so far: no two add the same tokens.
    turns: usize,
    /// Runs layers again, beside a learner that keeps everything.
    again: Option<Again>,
}

struct Again {
    learner: LocalLearner<Cpu>,
    rounds: usize,
    peaks_mib: [f64; 2],
}

impl<'a> Runner<'a> {
    /// Makes texts and, for a training case, a learner with a fresh adapter.
    pub fn new(engine: &'a LocalEngine, case: Case) -> Result<Self, EngineError> {
        let info = engine.info();
        let texts = case.texts(info.vocabulary);
        let more = match case {
            Case::Decode(lanes) => STEPS + lanes,
            Case::Prefill(_) => 1,
            Case::SecondTurn(_) => NEW + 1,
            _ => 0,
        };
        let longest = texts.iter().map(|t| t.ids.len() + more).max();
        let (need, context) = (longest.unwrap_or(0), info.context_length);
        if need > context {
            return Err(EngineError::Shape(format!(
                "{case} needs a context of {need} tokens and {} has {context}: take a smaller case or another model",
                info.model
            )));
        }
        let training = if case.trains() {
            let spec = AdapterSpec::default();
            let learner = match case {
                Case::Recompute => engine.learner_that(false, &spec, None)?,
                _ => engine.learner(&spec, None)?,
            };
            Some((learner, case.samples(info.vocabulary)?))
        } else {
            None
        };
        let again = match case {
            Case::Recompute => Some(Again {
                learner: engine.learner_that(true, &AdapterSpec::default(), None)?,
                rounds: 0,
                peaks_mib: [0.0; 2],
            }),
            _ => None,
        };
        Ok(Self {
            engine,
            case,
            texts,
            training,
            turns: 0,
            again,
        })
    }

    /// The texts, for a program that is given the same.
    pub fn texts(&self) -> &[Text] {
        &self.texts
    }

    /// Measures once. The first time is slower: buffers are made and threads wake.
    pub fn once(&mut self) -> Result<Measured, EngineError> {
        if let Some((learner, batch)) = &mut self.training {
            return match &mut self.again {
                Some(again) => again.once(learner, batch),
                None => step(learner, batch),
            };
        }
        let k = self.engine.kernels();
        let started = Instant::now();
        let rate = match self.case {
            Case::Sgemm => measured_sgemm_gflops(k).map_err(kernel)?,
            Case::Memory => measured_memory_gbs(k).map_err(kernel)?,
            Case::Prefill(tokens) => {
                replies(self.engine, &self.texts, (1, false))?;
                tokens as f64 / started.elapsed().as_secs_f64()
            }
            Case::SecondTurn(_) => return self.second_turn(),
            _ => {
                let most = STEPS + self.texts.len();
                return together(&replies(self.engine, &self.texts, (most, false))?);
            }
        };
        Ok(Measured {
            seconds: started.elapsed().as_secs_f64(),
            rate,
            mean_logprob: None,
            peaks_mib: None,
        })
    }
}

impl Runner<'_> {
    /// Milliseconds to the first token behind a cached text; the first call reads that text before.
    fn second_turn(&mut self) -> Result<Measured, EngineError> {
        if self.turns == 0 {
            replies(self.engine, &self.texts, (1, true))?;
        }
        self.turns += 1;
        let cached = self.texts.iter();
        let longer = cached.map(|first| {
            let new = text(NEW, 6100 + self.turns, self.engine.info().vocabulary);
            let ids = [&first.ids[..], &new].concat();
            Text {
                start: ids.len(),
                ids,
            }
        });
        let longer: Vec<Text> = longer.collect();
        let started = Instant::now();
        let came = replies(self.engine, &longer, (1, false))?;
        let first = came.iter().flatten().min().copied().unwrap_or(started);
        let seconds = (first - started).as_secs_f64();
        Ok(Measured {
            seconds,
            rate: 1e3 * seconds,
            mean_logprob: None,
            peaks_mib: None,
        })
    }
}

impl Again {
    /// How many times as long the step takes when layers are run again. Who is first changes from round to round, so that a machine that
    /// becomes slower meets both.
    fn once(
        &mut self,
        kept: &mut LocalLearner<Cpu>,
        batch: &[Sample],
    ) -> Result<Measured, EngineError> {
        let first = self.rounds == 0;
        if first {
            reset_peak();
        }
        let (with, without) = if self.rounds.is_multiple_of(2) {
            let without = step(&mut self.learner, batch)?;
            if first {
                // The smaller one first: freed pages stay with the process for a while.
                self.peaks_mib[1] = peak_mib();
            }
            let with = step(kept, batch)?;
            if first {
                self.peaks_mib[0] = peak_mib();
            }
            (with, without)
        } else {
            let with = step(kept, batch)?;
            (with, step(&mut self.learner, batch)?)
        };
        if kept.rows_read().again > 0 {
            return Err(EngineError::Memory(
                "learning.activation_mib does not let a step keep everything, so there is nothing to compare with"
                    .to_owned(),
            ));
        }
        self.rounds += 1;
        Ok(Measured {
            seconds: with.seconds + without.seconds,
            rate: without.seconds / with.seconds,
            mean_logprob: with.mean_logprob,
            peaks_mib: Some(self.peaks_mib),
        })
    }
}

/// Forgets the peak so far, where the system can; else it is the process's own.
fn reset_peak() {
    let _ = std::fs::write("/proc/self/clear_refs", "5"); // Linux: peak := what is resident now
}

/// Forward, backward, AdamW, under the plainest loss: each scored token a little more likely.
pub(super) fn step(
    learner: &mut LocalLearner<Cpu>,
    batch: &[Sample],
) -> Result<Measured, EngineError> {
    let (mut sum, mut scored) = (0.0, 0);
    let started = Instant::now();
    learner.forward_backward(batch, &mut |_, sample, now| {
        sum += now.logprobs.iter().map(|l| f64::from(*l)).sum::<f64>();
        scored += sample.len();
        TokenLoss {
            d_logprobs: vec![-1e-3; sample.len()],
            ..TokenLoss::default()
        }
    })?;
    learner.optim_step(&OptimParams {
        lr: 1e-5,
        ..OptimParams::default()
    })?;
    let seconds = started.elapsed().as_secs_f64();
    let tokens: usize = batch.iter().map(|s| s.tokens().len()).sum();
    Ok(Measured {
        seconds,
        rate: tokens as f64 / seconds,
        mean_logprob: Some(sum / f64::from(u32::try_from(scored).unwrap_or(u32::MAX))),
        peaks_mib: None,
    })
}

/// Greedy replies of `most` tokens to all texts at once: when each token came. Unless told to `keep`, nothing is kept for the next call.
fn replies(
    engine: &LocalEngine,
    texts: &[Text],
    (most, keep): (usize, bool),
) -> Result<Vec<Vec<Instant>>, EngineError> {
    let mut streams = Vec::with_capacity(texts.len());
    for text in texts {
        let prompt = Prompt {
            tokens: text.ids.clone(),
        };
        let params = SamplingParams {
            temperature: 0.0,
            max_tokens: most,
            keep,
            ..SamplingParams::default()
        };
        streams.push(Some(engine.sample(PolicyRef::Base, prompt, params)?));
    }
    let waker = Waker::from(std::sync::Arc::new(Park(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut came = vec![Vec::with_capacity(most); texts.len()];
    while streams.iter().any(Option::is_some) {
        let mut idle = true;
        for (slot, came) in streams.iter_mut().zip(&mut came) {
            while let Some(stream) = slot {
                match stream.as_mut().poll_next(&mut context) {
                    Poll::Pending => break,
                    Poll::Ready(None) => *slot = None,
                    Poll::Ready(Some(event)) => {
                        if matches!(event?, SamplingEvent::Token(_)) {
                            came.push(Instant::now());
                        }
                    }
                }
                idle = false;
            }
        }
        if idle {
            std::thread::park();
        }
    }
    Ok(came)
}

/// The rate while all replies ran: from the first token of the last one to begin to the end of the first one to end. In between each
/// of that one's tokens is a step that gave every reply one.
fn together(came: &[Vec<Instant>]) -> Result<Measured, EngineError> {
    if came.iter().any(Vec::is_empty) {
        return Err(EngineError::Shape("a reply without tokens".to_owned()));
    }
    let from = came.iter().filter_map(|c| c.first()).max();
    let first = came.iter().min_by_key(|c| c.last());
    let (Some(from), Some(first)) = (from, first) else {
        return Err(EngineError::Shape("no replies".to_owned()));
    };
    let to = first.last().unwrap_or(from);
    let steps = first.iter().filter(|t| *t > from).count();
    let seconds = to.saturating_duration_since(*from).as_secs_f64();
    if steps == 0 || seconds <= 0.0 {
        return Err(EngineError::Shape(
            "the replies did not run together; give the engine more lanes or memory".to_owned(),
        ));
    }
    Ok(Measured {
        seconds,
        rate: (steps * came.len()) as f64 / seconds,
        mean_logprob: None,
        peaks_mib: None,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::time::Duration;

    #[test]
    fn only_the_time_in_which_all_replies_run_counts() {
        let zero = Instant::now();
        let at = |seconds: &[u64]| -> Vec<Instant> {
            let of = |s: &u64| zero + Duration::from_secs(*s);
            seconds.iter().map(of).collect()
        };
        // The second begins at 3; the first ends at 5: two steps of two replies in two seconds.
        let measured = together(&[at(&[1, 2, 3, 4, 5]), at(&[3, 4, 5, 6, 7])]).unwrap();
        assert_eq!((measured.seconds, measured.rate), (2.0, 2.0));
        let alone = together(&[at(&[1, 2, 3])]).unwrap();
        assert_eq!((alone.seconds, alone.rate), (2.0, 1.0));
        assert!(together(&[at(&[1, 2]), at(&[4, 5])]).is_err());
        assert!(together(&[at(&[1, 2]), Vec::new()]).is_err());
    }
}
