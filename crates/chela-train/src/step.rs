//! One optimizer step: forward, loss, backward, update, and the figures of it.

use crate::{TrainError, batch::Prepared, config::TrainConfig};
use chela_core::{
    Learner, PolicyEngine, PolicyRef, Priority, Prompt, Sample, Scored, StepReport, TokenLoss, Want,
};
use chela_rl::{
    RlError,
    kl::{Estimator, estimate},
    objective::{BatchSize, LossStats, TokenInputs, token_loss},
};
use futures_executor::block_on;

/// What a step did.
#[derive(Debug)]
pub struct StepOutcome {
    /// The optimizer's report.
    pub report: StepReport,
    /// Sums over the batch.
    pub stats: LossStats,
    /// The learner's log-probs before the update, per sample `[N]`.
    pub logprobs: Vec<Vec<f32>>,
}

/// Runs the step. Proximal log-probs are the forward pass's own, detached: one optimizer step a batch needs no extra pass.
pub fn run(
    learner: &mut dyn Learner,
    prepared: &Prepared,
    config: &TrainConfig,
) -> Result<StepOutcome, TrainError> {
    let trained = |s: &Sample| s.mask().iter().filter(|m| **m).count();
    let batch = BatchSize {
        samples: prepared.samples.len(),
        tokens: prepared.samples.iter().map(trained).sum(),
    };
    let mut stats = LossStats::default();
    let mut logprobs = vec![Vec::new(); prepared.samples.len()];
    let mut failed: Option<RlError> = None;
    let mut loss = |index: usize, sample: &Sample, scored: &Scored| {
        let weight = prepared.aggregation.token_weight(batch, trained(sample));
        let inputs = TokenInputs {
            logprobs: &scored.logprobs,
            proximal_logprobs: &scored.logprobs,
            behavior_logprobs: sample.behavior_logprobs(),
            advantages: sample.advantages(),
            mask: sample.mask(),
        };
        let policy = token_loss(prepared.surrogate, config.correction, weight, &inputs);
        let values = prepared.values.get(index);
        let values = values.map(|v| v.loss(scored, sample.mask(), weight));
        match policy.and_then(|policy| Ok((policy, values.transpose()?))) {
            Ok(((d_logprobs, one), values)) => {
                stats.add(&one);
                stats.loss += values.as_ref().map_or(0.0, |(_, loss)| *loss);
                logprobs[index].clone_from(&scored.logprobs);
                TokenLoss {
                    d_logprobs,
                    d_values: values.map(|(d, _)| d),
                    ..TokenLoss::default()
                }
            }
            Err(error) => {
                failed.get_or_insert(error);
                // The optimizer refuses a gradient that is not finite, so the step cannot go through half-made.
                TokenLoss {
                    d_logprobs: vec![f32::NAN; sample.len()],
                    ..TokenLoss::default()
                }
            }
        }
    };
    learner.forward_backward(&prepared.samples, &mut loss)?;
    let report = learner.optim_step(&config.optim)?;
    if let Some(error) = failed
        && !report.skipped
    {
        return Err(error.into());
    }
    Ok(StepOutcome {
        report,
        stats,
        logprobs,
    })
}

/// Mean k1 per token to the base model on at most `config.kl_tokens` reply tokens of the batch; `None` when off.
pub fn kl_to_base(
    engine: &dyn PolicyEngine,
    prepared: &Prepared,
    logprobs: &[Vec<f32>],
    config: &TrainConfig,
) -> Result<Option<f64>, TrainError> {
    let (mut sum, mut tokens) = (0.0, 0usize);
    for (sample, now) in prepared.samples.iter().zip(logprobs) {
        if tokens >= config.kl_tokens {
            break;
        }
        let prompt = Prompt {
            tokens: sample.tokens().to_vec(),
        };
        let want = Want {
            temperature: sample.temperature(),
            priority: Priority::Train,
            ..Want::default()
        };
        let base = block_on(engine.score(PolicyRef::Base, prompt, sample.start(), want))?;
        for (policy, reference) in now.iter().zip(&base.logprobs) {
            sum += f64::from(estimate(Estimator::K1, *policy, *reference));
            tokens += 1;
        }
    }
    Ok((tokens > 0).then(|| sum / tokens as f64))
}
