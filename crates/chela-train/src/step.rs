//! What is made of a batch: forward, loss, backward, update, once for each of its minibatches, and the figures of it.

use crate::{TrainError, batch::Prepared, config::TrainConfig, groups::Values};
use chela_core::{
    Learner, PolicyEngine, PolicyRef, Priority, Prompt, Sample, Scored, StepReport, TokenLoss, Want,
};
use chela_rl::{
    RlError,
    kl::{Estimator, estimate},
    objective::{
        BatchSize, LossStats, Proximal, Surrogate, TokenInputs,
        proximal::{interpolate, share},
        regular::{self, RegularInputs},
        token_loss, topk,
    },
};
use futures_executor::block_on;
use std::{borrow::Cow, ops::Range};

/// What a step did.
#[derive(Debug)]
pub struct StepOutcome {
    /// The optimizer's report of the last minibatch, with the largest gradient norm of all.
    pub report: StepReport,
    /// Sums over the batch.
    pub stats: LossStats,
    /// The learner's log-probs when it read a sample for its update, per sample `[N]`.
    pub logprobs: Vec<Vec<f32>>,
    /// The base model's, where the loss asked for them.
    pub reference: Option<Vec<Vec<f32>>>,
    /// Σ over trained tokens of their entropies, where the learner said them.
    pub entropy: Option<f64>,
    /// Minibatches that went before a skipped one: the learner no longer holds what it began with.
    pub moved: bool,
}

/// Cuts a batch of `n` samples into at most `parts` of nearly the same number, in their order.
fn minibatches(n: usize, parts: usize) -> Vec<Range<usize>> {
    let parts = parts.clamp(1, n.max(1));
    let cut = |i: usize| i * n / parts;
    (0..parts).map(|i| cut(i)..cut(i + 1)).collect()
}

fn trained(sample: &Sample) -> usize {
    sample.mask().iter().filter(|m| **m).count()
}

/// What is known of a batch before its first update.
struct Known {
    reference: Option<Vec<Vec<f32>>>,
    /// Of each sample, where a pass was made for it.
    proximal: Vec<Option<Vec<f32>>>,
}

/// Runs the step. In the first minibatch proximal log-probs are the forward pass's own, detached: one optimizer step a batch needs no
/// extra pass. When a minibatch is skipped as not finite, so is what is left of the batch.
pub fn run(
    learner: &mut dyn Learner,
    prepared: &Prepared,
    config: &TrainConfig,
) -> Result<StepOutcome, TrainError> {
    let samples = &prepared.samples;
    let parts = minibatches(samples.len(), config.minibatches);
    let mut known = Known {
        reference: None,
        proximal: vec![None; samples.len()],
    };
    if config.regular.kl != 0.0 {
        let scored = learner.forward_base(samples, Want::default())?;
        known.reference = Some(scored.into_iter().map(|s| s.logprobs).collect());
    }
    // What the sampler thought of candidates is not known: nothing could be interpolated.
    let again = |sample: &Sample| match sample.candidates() {
        Some(_) => config.distil.has_ratio(),
        None => config.proximal == Proximal::Recomputed,
    };
    let later = (parts[0].end..samples.len()).filter(|i| again(&samples[*i]));
    let later: Vec<usize> = later.collect();
    if !later.is_empty() {
        let some: Vec<Sample> = later.iter().map(|i| samples[*i].clone()).collect();
        let scored = learner.forward(&some, Want::default())?;
        for (i, scored) in later.into_iter().zip(scored) {
            known.proximal[i] = Some(scored.logprobs);
        }
    }
    let mut outcome = StepOutcome {
        report: StepReport::default(),
        stats: LossStats::default(),
        logprobs: vec![Vec::new(); samples.len()],
        reference: None,
        entropy: None,
        moved: false,
    };
    let n = parts.len();
    for (made, part) in parts.into_iter().enumerate() {
        let norm = outcome.report.grad_norm;
        outcome.report = minibatch(
            learner,
            (prepared, &known, config),
            (made, part),
            &mut outcome,
        )?;
        if outcome.report.skipped {
            outcome.moved = made > 0;
            break;
        }
        outcome.report.grad_norm = norm.max(outcome.report.grad_norm);
    }
    // Each minibatch's loss is a mean of its own: their mean is the batch's, however it is cut.
    outcome.stats.loss /= n as f64;
    outcome.reference = known.reference;
    Ok(outcome)
}

/// One optimizer step, over a part of the batch, after `made` others.
fn minibatch(
    learner: &mut dyn Learner,
    (prepared, known, config): (&Prepared, &Known, &TrainConfig),
    (made, part): (usize, Range<usize>),
    outcome: &mut StepOutcome,
) -> Result<StepReport, TrainError> {
    let samples = &prepared.samples[part.clone()];
    let batch = BatchSize {
        samples: samples.len(),
        tokens: samples.iter().map(trained).sum(),
    };
    let mut failed: Option<RlError> = None;
    let mut loss = |index: usize, sample: &Sample, scored: &Scored| {
        let index = part.start + index;
        let weight = prepared.aggregation.token_weight(batch, trained(sample));
        let behind = prepared.behind.get(index).copied().unwrap_or(0);
        let proximal = match &known.proximal[index] {
            Some(recomputed) => Cow::Borrowed(&recomputed[..]),
            None if made > 0 && sample.candidates().is_none() => {
                let steps = |batches: u64| batches * config.minibatches as u64;
                let share = share(0, steps(behind), steps(behind) + made as u64);
                let (now, behavior) = (&scored.logprobs, sample.behavior_logprobs());
                Cow::Owned(interpolate(now, behavior, share))
            }
            None => Cow::Borrowed(&scored.logprobs[..]),
        };
        let reference = known.reference.as_ref().map(|all| &all[index][..]);
        let values = prepared.values.get(index);
        let numbers = (&proximal[..], reference, values);
        match sample_loss(
            sample,
            scored,
            numbers,
            (prepared.surrogate, config, weight),
        ) {
            Ok((loss, one)) => {
                outcome.stats.add(&one);
                outcome.logprobs[index].clone_from(&scored.logprobs);
                if let Some(entropy) = &scored.entropy {
                    let of = entropy.iter().zip(sample.mask()).filter(|(_, m)| **m);
                    let sum: f64 = of.map(|(h, _)| f64::from(*h)).sum();
                    *outcome.entropy.get_or_insert(0.0) += sum;
                }
                loss
            }
            Err(error) => {
                failed.get_or_insert(error);
                // The optimizer refuses a gradient that is not finite, so the step cannot go through half-made.
                TokenLoss {
                    d_logprobs: vec![f32::NAN; scored.logprobs.len()],
                    ..TokenLoss::default()
                }
            }
        }
    };
    learner.forward_backward(samples, &mut loss)?;
    let report = learner.optim_step(&config.optim)?;
    if let Some(error) = &failed {
        tracing::error!(%error, "the loss of a sample could not be computed; the step is given up");
    }
    match failed {
        Some(error) if !report.skipped => Err(error.into()),
        _ => Ok(report),
    }
}

/// The loss of one sample by what the learner said, and its figures.
fn sample_loss(
    sample: &Sample,
    scored: &Scored,
    (proximal, reference, values): (&[f32], Option<&[f32]>, Option<&Values>),
    (surrogate, config, weight): (Surrogate, &TrainConfig, f32),
) -> Result<(TokenLoss, LossStats), RlError> {
    let mut regular = config.regular;
    let (mut d_logprobs, mut stats) = match sample.candidates() {
        Some(candidates) => {
            let k = candidates.k();
            let numbers = (&scored.logprobs[..], proximal, reference);
            let given = distilled(sample, numbers, k, (config, weight))?;
            regular.kl = 0.0; // it is in there
            given
        }
        None => {
            let inputs = TokenInputs {
                logprobs: &scored.logprobs,
                proximal_logprobs: proximal,
                behavior_logprobs: sample.behavior_logprobs(),
                advantages: sample.advantages(),
                mask: sample.mask(),
            };
            token_loss(surrogate, config.correction, weight, &inputs)?
        }
    };
    let beside = RegularInputs {
        logprobs: &scored.logprobs,
        reference_logprobs: reference,
        entropy: scored.entropy.as_deref(),
        mask: sample.mask(),
    };
    let added = regular::loss(regular, weight, &beside)?;
    stats.loss += added.loss;
    add(&mut d_logprobs, added.d_logprobs);
    let values = values.map(|v| v.loss(scored, sample.mask(), weight));
    let values = values.transpose()?;
    stats.loss += values.as_ref().map_or(0.0, |(_, loss)| *loss);
    let loss = TokenLoss {
        d_logprobs,
        d_entropy: added.d_entropy,
        d_values: values.map(|(d, _)| d),
    };
    Ok((loss, stats))
}

fn add(to: &mut [f32], more: Option<Vec<f32>>) {
    to.iter_mut()
        .zip(more.into_iter().flatten())
        .for_each(|(d, more)| *d += more);
}

/// Of a sample with candidates `[N, K]`. KL to the base model is the one over these and a bin for the rest: of more than one token it needs
/// no estimator.
fn distilled(
    sample: &Sample,
    (now, proximal, reference): (&[f32], &[f32], Option<&[f32]>),
    k: usize,
    (config, weight): (&TrainConfig, f32),
) -> Result<(Vec<f32>, LossStats), RlError> {
    let what = "teacher_logprobs";
    let teacher = sample.teacher_logprobs();
    let teacher = teacher.ok_or(RlError::Missing { what })?;
    let (numbers, mask) = ((now, proximal, teacher), sample.mask());
    let (mut derivative, mut loss) = config.distil.loss(numbers, k, mask, config.clip, weight)?;
    if config.regular.kl != 0.0 {
        let what = "reference_logprobs";
        let reference = reference.ok_or(RlError::Missing { what })?;
        let by = weight * config.regular.kl;
        let (more, value) = topk::loss(now, reference, k, mask, by)?;
        add(&mut derivative, Some(more));
        loss += value;
    }
    let stats = LossStats {
        loss,
        tokens: trained(sample),
        ..LossStats::default()
    };
    Ok((derivative, stats))
}

/// Mean k1 per token to the base model: on all reply tokens of the batch where the loss asked the base model anyway, else on at most
/// `config.kl_tokens`; `None` when off. Samples with candidates are passed over: of their sampled tokens nothing is known.
pub fn kl_to_base(
    engine: &dyn PolicyEngine,
    prepared: &Prepared,
    outcome: &StepOutcome,
    config: &TrainConfig,
) -> Result<Option<f64>, TrainError> {
    let (mut sum, mut tokens) = (0.0, 0usize);
    let mut add = |now: &[f32], base: &[f32]| {
        for (policy, reference) in now.iter().zip(base) {
            sum += f64::from(estimate(Estimator::K1, *policy, *reference));
            tokens += 1;
        }
        tokens
    };
    let plain = prepared.samples.iter().enumerate();
    let plain = plain.filter(|(_, s)| s.candidates().is_none());
    if let Some(reference) = &outcome.reference {
        plain.for_each(|(i, _)| {
            add(&outcome.logprobs[i], &reference[i]);
        });
    } else if config.kl_tokens > 0 {
        for (i, sample) in plain {
            let prompt = Prompt {
                tokens: sample.tokens().to_vec(),
            };
            let want = Want {
                temperature: sample.temperature(),
                priority: Priority::Train,
                ..Want::default()
            };
            let base = block_on(engine.score(PolicyRef::Base, prompt, sample.start(), want))?;
            if add(&outcome.logprobs[i], &base.logprobs) >= config.kl_tokens {
                break;
            }
        }
    }
    Ok((tokens > 0).then(|| sum / tokens as f64))
}
