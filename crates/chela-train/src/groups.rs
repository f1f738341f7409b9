//! Batches of whole groups: which are taken, and what each reply of theirs teaches by [`TrainConfig::algorithm`].

use crate::{
    TrainError,
    batch::{Prepared, Selection, left_out, sample_of},
    config::TrainConfig,
};
use chela_core::{
    Group, Learner, LeasedSample, Millis, PendingSample, Sample, SampleId, Scored, Want,
    registry::Chain,
};
use chela_rl::{
    RlError,
    advantage::{clipped_reward, group::Reply},
    algorithm::{Algorithm, Taught},
    objective::value,
};
use std::collections::BTreeMap;

/// Why replies are dropped whose group did not become whole in time.
pub const INCOMPLETE: &str = "incomplete group";
/// Why replies are dropped whose rewards, all alike or a single one, tell none of them from another.
pub const NO_DIFFERENCE: &str = "no difference in its group";

/// Chooses among grouped samples (oldest first): [`TrainConfig::groups`] whole groups, the oldest first, or nothing yet. A group falls
/// whole: when a reply of it is stale or of a foreign version, and when nothing came to an incomplete one for the time-out. For algorithms
/// that refill, so does one of equal rewards, so that another takes its place in the batch.
pub fn select(
    pending: &[&PendingSample],
    chain: &Chain,
    config: &TrainConfig,
    now: Millis,
) -> Selection {
    let mut dropped = Vec::new();
    let mut whole: Vec<&[&PendingSample]> = Vec::new();
    let by_group = by_group(pending);
    for (group, all) in &by_group {
        // An id that is used again means another group, which waits for a later batch.
        let members = &all[..all.len().min(group.size())];
        let behind: Vec<_> = members
            .iter()
            .map(|m| chain.staleness(&m.version))
            .collect();
        let newest = members.iter().map(|m| m.created).max().unwrap_or(now);
        let clip = config.advantage.reward_clip;
        let reward = |m: &PendingSample| m.reward.map(|r| clipped_reward(r, clip));
        let alike = members
            .windows(2)
            .all(|two| reward(two[0]) == reward(two[1]));
        let why = if behind.contains(&None) {
            "version outside the chain"
        } else if behind.iter().flatten().any(|n| *n > config.max_staleness) {
            "stale"
        } else if members.len() < group.size() {
            if now - newest < config.batch_timeout_ms {
                continue;
            }
            INCOMPLETE
        } else if alike && config.algorithm.refills() {
            NO_DIFFERENCE
        } else {
            whole.push(members);
            continue;
        };
        dropped.extend(members.iter().map(|m| (m.id, why)));
    }
    whole.sort_by_key(|members| members.iter().map(|m| m.id).min());
    let mut batch = Vec::new();
    if whole.len() >= config.groups {
        let taken = whole.iter().take(config.groups);
        batch = taken.flat_map(|g| g.iter().map(|m| m.id)).collect();
    }
    Selection { batch, dropped }
}

fn by_group<'a>(pending: &[&'a PendingSample]) -> BTreeMap<&'a Group, Vec<&'a PendingSample>> {
    let mut groups: BTreeMap<&Group, Vec<&PendingSample>> = BTreeMap::new();
    for sample in pending {
        if let Some(group) = &sample.group {
            groups.entry(group).or_default().push(sample);
        }
    }
    groups
}

/// What a value head is taught about one reply, each `[N]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Values {
    /// What it said when the step began.
    pub old: Vec<f32>,
    /// What it should have said.
    pub returns: Vec<f32>,
}

impl Values {
    /// Derivative of the value loss by each value `[N]`, and the loss; see [`value::loss`].
    pub fn loss(
        &self,
        scored: &Scored,
        mask: &[bool],
        weight: f32,
    ) -> Result<(Vec<f32>, f64), RlError> {
        let now = scored.values.as_deref().unwrap_or_default();
        value::loss(now, &self.old, &self.returns, mask, weight)
    }
}

/// A reply on its way into the batch.
struct Row {
    id: SampleId,
    sample: Sample,
    reply: Reply,
}

/// Computes what each reply teaches and builds the learner's samples, in the order of their ids, so that the order of `leased` changes
/// nothing. What cannot be built, what the learner does not take and what teaches nothing is left out with the reason, and enters no
/// mean or deviation; so the step is the same when it is made again out of what it consumed. `limit` is the most tokens of a reply,
/// `None` = not known: nothing is taken from long replies, and a constant length is that of the longest.
pub fn prepare(
    leased: &[LeasedSample],
    config: &TrainConfig,
    (algorithm, limit): (Algorithm, Option<usize>),
    learner: &mut dyn Learner,
) -> Result<Prepared, TrainError> {
    let mut prepared = Prepared::default();
    let mut rows = rows(leased, config, &*learner, &mut prepared);
    ask(&mut rows, algorithm, learner)?;
    let taught = loop {
        let replies: Vec<Reply> = rows.iter().map(|r| r.reply.clone()).collect();
        let taught = algorithm.taught(&replies, limit.unwrap_or(usize::MAX))?;
        if taught.iter().all(Option::is_some) {
            break taught;
        }
        let mut teaches = taught.iter().map(Option::is_some);
        rows.retain(|row| {
            let stays = teaches.next() == Some(true);
            if !stays {
                prepared.left_out.push((row.id, NO_DIFFERENCE.to_owned()));
            }
            stays
        });
    };
    let longest = rows.iter().map(|r| r.sample.len()).max().unwrap_or(1);
    prepared.surrogate = algorithm.surrogate();
    prepared.aggregation = algorithm.aggregation(limit.unwrap_or(longest));
    let mut seen: Vec<usize> = rows.iter().map(|r| r.reply.group).collect();
    seen.sort_unstable();
    seen.dedup();
    prepared.groups = seen.len();
    for (row, taught) in rows.into_iter().zip(taught.into_iter().flatten()) {
        let Taught {
            advantages,
            returns,
        } = taught;
        prepared.values.extend(returns.map(|returns| Values {
            old: row.reply.values,
            returns,
        }));
        prepared.rewards.push(row.reply.reward);
        prepared.ids.push(row.id);
        prepared
            .samples
            .push(row.sample.with_advantages(advantages)?);
    }
    Ok(prepared)
}

/// Replies that can be trained on, by id, without what only the model can say of them.
fn rows(
    leased: &[LeasedSample],
    config: &TrainConfig,
    learner: &dyn Learner,
    prepared: &mut Prepared,
) -> Vec<Row> {
    let clip = config.advantage.reward_clip;
    let mut sorted: Vec<&LeasedSample> = leased.iter().collect();
    sorted.sort_by_key(|l| l.id);
    let mut numbers: BTreeMap<&Group, usize> = BTreeMap::new();
    let mut rows = Vec::with_capacity(leased.len());
    for one in sorted {
        let (group, reward) = (one.sample.group.as_ref(), one.sample.reward);
        let Some((group, reward)) = group.zip(reward).filter(|(_, r)| r.is_finite()) else {
            let why = "no reward in a group".to_owned();
            prepared.left_out.push((one.id, why));
            continue;
        };
        let next = numbers.len();
        let number = *numbers.entry(group).or_insert(next);
        let built = sample_of(one, vec![0.0; one.turn.reply.len()]);
        let sample = match built.and_then(|s| learner.takes(&s).map(|()| s)) {
            Ok(sample) => sample,
            Err(error) => {
                prepared.left_out.push((one.id, left_out(one, error)));
                continue;
            }
        };
        prepared.clipped += usize::from(reward.abs() > clip);
        let reply = Reply {
            group: number,
            reward: clipped_reward(reward, clip),
            mask: sample.mask().to_vec(),
            kl: Vec::new(),
            values: Vec::new(),
        };
        rows.push(Row {
            id: one.id,
            sample,
            reply,
        });
    }
    rows
}

/// Asks the model for what the algorithm needs to know beside rewards.
fn ask(
    rows: &mut [Row],
    algorithm: Algorithm,
    learner: &mut dyn Learner,
) -> Result<(), TrainError> {
    if rows.is_empty() || !(algorithm.kl() || algorithm.values()) {
        return Ok(());
    }
    let samples: Vec<Sample> = rows.iter().map(|r| r.sample.clone()).collect();
    let now = learner.forward(&samples, Want::default())?;
    if algorithm.values() {
        for (row, scored) in rows.iter_mut().zip(&now) {
            let values = scored.values.clone();
            row.reply.values = values.ok_or(TrainError::NoValues)?;
        }
    }
    if algorithm.kl() {
        let base = learner.forward_base(&samples, Want::default())?;
        for (row, (now, base)) in rows.iter_mut().zip(now.iter().zip(&base)) {
            let both = now.logprobs.iter().zip(&base.logprobs);
            row.reply.kl = both.map(|(now, base)| now - base).collect();
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "groups_tests.rs"]
mod tests;
