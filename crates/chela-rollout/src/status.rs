//! How things stand, and why turns make no samples although learning is on.

use crate::{
    control::may_see,
    rollout::{Rollout, Tally},
    session::live::locked,
};
use chela_core::{
    Caller, JudgeView, PolicyView, Profile, Refusal, Scope, StatusView, StoreCounts, TurnKind,
    VersionState, registry::Barren,
};
use std::{collections::BTreeMap, sync::atomic::Ordering};

/// Reasons named in one notice.
const REASONS: usize = 4;

impl Rollout {
    pub(crate) fn status_view(&self, caller: &Caller) -> Result<StatusView, Refusal> {
        may_see(caller)?;
        let all = caller.scope == Scope::Admin && caller.session.is_none();
        let profiles = if all {
            self.store.profiles()?
        } else {
            vec![caller.profile.clone()]
        };
        let counts = self.store.counts((!all).then_some(&caller.profile))?;
        let profiles: Vec<PolicyView> = profiles
            .iter()
            .map(|p| self.policy_view(p))
            .collect::<Result<_, _>>()?;
        let info = self.engine.info();
        let tallies = locked(&self.tallies).clone();
        let failing: Vec<(String, String)> = tallies
            .iter()
            .filter_map(|(judge, t)| Some((judge.clone(), t.failing.clone()?)))
            .collect();
        let health = self.store.health().err();
        Ok(StatusView {
            model: info.model,
            context_length: info.context_length,
            learning: self.config.learning,
            notices: if self.config.learning {
                let mut lines =
                    notices(&counts, &profiles, self.judges.is_empty(), &failing, health);
                lines.extend(profiles.iter().filter_map(|p| {
                    let barren = self.alarms.of(&p.profile)?;
                    Some(no_step(&p.profile, &barren))
                }));
                lines
            } else {
                Vec::new()
            },
            counts,
            judging: self.judging.load(Ordering::Relaxed),
            judge_errors: tallies
                .iter()
                .filter(|(_, t)| t.failures > 0)
                .map(|(judge, t)| (judge.clone(), t.failures))
                .collect(),
            judges: self.judge_views(&tallies),
            groups: self.config.groups.clone(),
            profiles,
        })
    }
}

impl Rollout {
    fn judge_views(&self, tallies: &BTreeMap<String, Tally>) -> Vec<JudgeView> {
        let mut canaries = self.canaries.figures();
        let each = self.judges.iter().map(|judge| {
            let name = judge.name();
            let tally = tallies.get(name).cloned().unwrap_or_default();
            JudgeView {
                judge: name.to_owned(),
                verdicts: tally.verdicts,
                valid_votes: tally.valid_votes,
                void_votes: tally.void_votes,
                hinted: tally.hinted,
                canaries: canaries.remove(name).unwrap_or_default(),
            }
        });
        each.collect()
    }
}

/// One line for each thing that keeps turns from becoming samples.
fn notices(
    counts: &StoreCounts,
    profiles: &[PolicyView],
    no_judge: bool,
    failing: &[(String, String)],
    health: Option<String>,
) -> Vec<String> {
    let mut lines: Vec<String> = health.into_iter().collect();
    lines.extend(no_main(counts));
    if no_judge {
        lines.push("no judge is configured: only explicit feedback trains".to_owned());
    }
    lines.extend(
        failing.iter().map(|(judge, why)| {
            format!("judge {judge} fails: {why}; {} turns wait", counts.unjudged)
        }),
    );
    lines.extend(profiles.iter().filter_map(alarm));
    lines.extend(profiles.iter().filter_map(|p| {
        let why = p.paused.as_ref()?;
        Some(format!(
            "training of profile {} is paused: {why}",
            p.profile
        ))
    }));
    lines
}

/// What happened to a profile's newest version, when that is nothing good; and what is being made again.
fn alarm(view: &PolicyView) -> Option<String> {
    if !view.replays.is_empty() {
        return Some(format!(
            "profile {}: {} steps are being made again without what was forgotten",
            view.profile,
            view.replays.len()
        ));
    }
    let newest = view.versions.last()?;
    match &newest.state {
        VersionState::Rejected(why) => {
            Some(format!("version {} was rejected: {why}", newest.version))
        }
        VersionState::RolledBack(why) => {
            Some(format!("version {} was taken back: {why}", newest.version))
        }
        _ => None,
    }
}

fn no_main(counts: &StoreCounts) -> Option<String> {
    let total: u64 = counts.turns.iter().map(|(.., n)| n).sum();
    let main: u64 = counts
        .turns
        .iter()
        .filter(|(kind, ..)| *kind == TurnKind::Main)
        .map(|(.., n)| n)
        .sum();
    if total == 0 || main > 0 {
        return None;
    }
    let reasons = counts.turns.iter().map(|(_, why, n)| (why.as_str(), *n));
    Some(format!(
        "0 of {total} turns were main: {}",
        most_frequent(reasons)
    ))
}

/// Batches of a profile that made no version: what was wrong with their samples.
fn no_step(profile: &Profile, barren: &Barren) -> String {
    let reasons = barren.reasons.iter().map(|(why, n)| (why.as_str(), *n));
    format!(
        "profile {profile}: {} batches in a row held nothing to learn from: {} (docs/learning.md, \"Batches that teach nothing\")",
        barren.batches,
        most_frequent(reasons)
    )
}

fn most_frequent<'a>(reasons: impl Iterator<Item = (&'a str, u64)>) -> String {
    let mut reasons: Vec<(&str, u64)> = reasons.collect();
    reasons.sort_by_key(|(_, n)| std::cmp::Reverse(*n));
    let named = reasons.iter().take(REASONS);
    let named: Vec<String> = named.map(|(why, n)| format!("{why} ({n})")).collect();
    named.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_name_what_keeps_turns_from_training() {
        let counts = StoreCounts {
            turns: vec![
                (TurnKind::Side, "X-Turn-Type: side".to_owned(), 10),
                (TurnKind::Side, "model :side".to_owned(), 20),
            ],
            unjudged: 7,
            ..StoreCounts::default()
        };
        let paused = PolicyView {
            profile: Profile::default(),
            served: 0,
            paused: Some("KL budget".to_owned()),
            versions: Vec::new(),
            replays: Vec::new(),
        };
        let failing = [("self".to_owned(), "time limit".to_owned())];
        let lines = notices(&counts, &[paused], true, &failing, None);
        assert_eq!(
            lines,
            [
                "0 of 30 turns were main: model :side (20), X-Turn-Type: side (10)",
                "no judge is configured: only explicit feedback trains",
                "judge self fails: time limit; 7 turns wait",
                "training of profile default is paused: KL budget",
            ]
        );
        let fine = StoreCounts {
            turns: vec![(TurnKind::Main, "default".to_owned(), 1)],
            ..StoreCounts::default()
        };
        assert!(notices(&fine, &[], false, &[], None).is_empty());
    }
}
