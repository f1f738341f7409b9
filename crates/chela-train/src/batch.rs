//! Which pending samples make the next batch, and how a leased one becomes what the learner sees. Plain functions.

use crate::{
    TrainError,
    config::TrainConfig,
    groups::{self, Values},
};
use chela_core::{
    EngineError, HELD_OUT, LeasedSample, Millis, PendingSample, Sample, SampleColumns, SampleId,
    registry::Chain,
};
use chela_rl::{
    advantage::{Credit, advantages, clipped_reward},
    baseline::Baseline,
    objective::{Aggregation, Surrogate},
};
use std::collections::{HashMap, HashSet};

/// What to do with the pending samples now.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selection {
    /// The batch; empty = wait.
    pub batch: Vec<SampleId>,
    /// Never to be trained on, with the reason.
    pub dropped: Vec<(SampleId, &'static str)>,
}

/// Chooses among `pending` (oldest first): a batch out of sessions or one of whole groups, never both; when there is one of each, that
/// whose oldest sample is older.
pub fn select(
    pending: &[PendingSample],
    chain: &Chain,
    config: &TrainConfig,
    now: Millis,
) -> Selection {
    let (grouped, alone): (Vec<_>, Vec<_>) = pending.iter().partition(|s| s.group.is_some());
    let mut sessions = of_sessions(&alone, chain, config, now);
    let mut groups = groups::select(&grouped, chain, config, now);
    sessions.dropped.append(&mut groups.dropped);
    let oldest = |selection: &Selection| selection.batch.iter().min().copied();
    let groups_first = match (oldest(&sessions), oldest(&groups)) {
        (Some(session), Some(group)) => group < session,
        (session, _) => session.is_none(),
    };
    if groups_first {
        sessions.batch = groups.batch;
    }
    sessions
}

/// Chooses among what is in no group (oldest first). Stale and foreign samples and copies of a reply are dropped; a session fills at most
/// its share while others wait; a partial batch goes when its oldest sample has waited long enough.
fn of_sessions(
    pending: &[&PendingSample],
    chain: &Chain,
    config: &TrainConfig,
    now: Millis,
) -> Selection {
    let mut dropped: Vec<(SampleId, &'static str)> = Vec::new();
    let mut usable = Vec::new();
    let mut replies = HashSet::new();
    for sample in pending.iter().copied() {
        match chain.staleness(&sample.version) {
            None => dropped.push((sample.id, "version outside the chain")),
            Some(steps) if steps > config.max_staleness && !sample.explicit => {
                dropped.push((sample.id, "stale"));
            }
            Some(_) if !replies.insert((sample.reply_hash, sample.reply_len)) => {
                dropped.push((sample.id, "duplicate reply"));
            }
            Some(_) if held_out(sample, config.gate.held_out) => {
                dropped.push((sample.id, HELD_OUT))
            }
            Some(_) => usable.push(sample),
        }
    }
    let waited = usable
        .first()
        .is_some_and(|s| now - s.created >= config.batch_timeout_ms);
    let share = ((config.batch as f32 * config.max_session_share).floor() as usize).max(1);
    let mut batch = Vec::new();
    let mut surplus = Vec::new();
    let mut by_session: HashMap<_, usize> = HashMap::new();
    for sample in &usable {
        let count = by_session.entry(&sample.session).or_default();
        *count += 1;
        if *count <= share {
            batch.push(sample.id)
        } else {
            surplus.push(sample.id)
        }
    }
    if waited {
        batch.extend(surplus);
    }
    batch.truncate(config.batch);
    let enough = batch.len() == config.batch || (waited && batch.len() >= config.min_batch);
    if !enough {
        batch.clear();
    }
    Selection { batch, dropped }
}

/// Whether a judged turn is kept for the gate: by its name alone, so that a restart or a replay decides the same. What a person said
/// through the API always trains.
fn held_out(sample: &PendingSample, part: f64) -> bool {
    // The multiplier of splitmix64 (Steele et al., 2014): ids that follow one another fall anywhere.
    let spread = sample.turn.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 11;
    !sample.explicit && (spread as f64) < part * (1u64 << 53) as f64
}

/// What a batch trains on.
#[derive(Debug, Default)]
pub struct Prepared {
    /// For the learner.
    pub samples: Vec<Sample>,
    /// The ids of `samples`, in their order.
    pub ids: Vec<SampleId>,
    /// Leased, but without anything to train on, with the reason.
    pub left_out: Vec<(SampleId, String)>,
    /// Clipped rewards of `samples`, where they had one.
    pub rewards: Vec<f32>,
    /// How many rewards were clipped.
    pub clipped: usize,
    /// Samples with a hint.
    pub hinted: usize,
    /// Groups of `samples`; 0 = they are of sessions.
    pub groups: usize,
    /// The loss by token.
    pub surrogate: Surrogate,
    /// How tokens add up.
    pub aggregation: Aggregation,
    /// What a value head is taught about each of `samples`; empty when there is none.
    pub values: Vec<Values>,
}

/// Why a sample is dropped that needs more tokens than the context, or more memory than there is for training.
pub const TOO_LONG: &str = "too long";

/// Computes advantages and builds the learner's samples. What cannot be built, or what the learner does not take, is left out with the
/// reason: one such sample must not keep a batch from being trained, now and at each later try.
pub fn prepare(
    leased: &[LeasedSample],
    config: &TrainConfig,
    baseline: f32,
    takes: &dyn Fn(&Sample) -> Result<(), EngineError>,
) -> Prepared {
    let clip = config.advantage.reward_clip;
    let large = |l: &&LeasedSample| l.sample.reward.is_some_and(|r| r.abs() > clip);
    let mut prepared = Prepared {
        rewards: rewards(leased, config),
        clipped: leased.iter().filter(large).count(),
        surrogate: Surrogate::Clip(config.clip),
        aggregation: config.aggregation,
        ..Prepared::default()
    };
    for one in leased {
        match build(one, config, baseline) {
            Ok(Some(sample)) => {
                if let Err(error) = takes(&sample) {
                    prepared.left_out.push((one.id, left_out(one, error)));
                    continue;
                }
                prepared.hinted += usize::from(one.sample.teacher_logprobs.is_some());
                prepared.ids.push(one.id);
                prepared.samples.push(sample);
            }
            Ok(None) => prepared
                .left_out
                .push((one.id, "nothing to learn from".to_owned())),
            Err(error) => prepared.left_out.push((one.id, error.to_string())),
        }
    }
    prepared
}

/// Why a sample is left out that cannot be built or is not taken.
pub(crate) fn left_out(one: &LeasedSample, error: EngineError) -> String {
    tracing::warn!(sample = one.id.0, turn = %one.turn.id, %error, "a sample is left out of its batch");
    match error {
        EngineError::ContextLength { .. } | EngineError::Memory(_) => TOO_LONG.to_owned(),
        error => error.to_string(),
    }
}

/// The clipped rewards of a batch.
fn rewards(leased: &[LeasedSample], config: &TrainConfig) -> Vec<f32> {
    let clip = config.advantage.reward_clip;
    let finite = leased
        .iter()
        .filter_map(|l| l.sample.reward)
        .filter(|r| r.is_finite());
    finite.map(|r| clipped_reward(r, clip)).collect()
}

/// b of a batch.
pub fn baseline_of(leased: &[LeasedSample], config: &TrainConfig, baseline: &Baseline) -> f32 {
    if config.baseline {
        baseline.for_batch(&rewards(leased, config))
    } else {
        0.0
    }
}

fn build(
    leased: &LeasedSample,
    config: &TrainConfig,
    baseline: f32,
) -> Result<Option<Sample>, TrainError> {
    let (turn, judged) = (&leased.turn, &leased.sample);
    let hinted = judged
        .teacher_logprobs
        .as_deref()
        .zip(judged.student_logprobs.as_deref());
    let credit = Credit {
        tokens: turn.reply.len(),
        reward: judged.reward,
        baseline,
        hinted,
    };
    let Some(advantages) = advantages(&config.advantage, &credit)? else {
        return Ok(None);
    };
    if advantages.iter().all(|a| *a == 0.0) {
        return Ok(None);
    }
    Ok(Some(sample_of(leased, advantages)?))
}

/// What the learner sees of a turn, with this credit `[N]`.
pub(crate) fn sample_of(
    leased: &LeasedSample,
    advantages: Vec<f32>,
) -> Result<Sample, EngineError> {
    let turn = &leased.turn;
    let mut tokens = turn.prompt.clone();
    let start = tokens.len();
    tokens.extend_from_slice(turn.reply.tokens());
    let columns = SampleColumns {
        // What a guide forced was no choice of the policy.
        mask: turn.reply.forced().iter().map(|f| !f).collect(),
        behavior_logprobs: turn.reply.behavior_logprobs().to_vec(),
        advantages,
    };
    Sample::new(
        tokens,
        start,
        columns,
        turn.temperature,
        turn.version.clone(),
    )
}

#[cfg(test)]
#[path = "batch_tests.rs"]
mod tests;
