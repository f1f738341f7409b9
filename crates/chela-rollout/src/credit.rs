//! Explicit rewards flow back along the branch: e_i = own_i + γ e_{i+1} (learning.md of the design, "Credit").

use chela_core::{SampleState, TurnId, TurnKind, TurnStory, Verdict, VerdictSource};
use std::collections::HashMap;

/// Name of the judge in verdicts that a later reward made.
pub const CREDIT: &str = "credit";

/// The explicit reward that was given to the turn itself: the last one.
pub fn own_reward(story: &TurnStory) -> Option<f32> {
    story
        .verdicts
        .iter()
        .rev()
        .filter(|(_, v, _)| v.source == VerdictSource::Explicit && v.judge != CREDIT)
        .find_map(|(_, v, _)| v.reward)
}

/// The reward says how the reply fares beside others of its group, not how its session went: it stays where it was given.
fn in_group(story: &TurnStory) -> bool {
    let explicit = |v: &Verdict| v.source == VerdictSource::Explicit && v.reward.is_some();
    let last = story.verdicts.iter().rev().find(|(_, v, _)| explicit(v));
    last.is_some_and(|(_, v, _)| v.group.is_some())
}

/// The reward now standing: the last one of the greatest voice that gave any.
pub fn standing_reward(story: &TurnStory) -> Option<f32> {
    story
        .verdicts
        .iter()
        .filter_map(|(id, v, _)| v.reward.map(|r| (v.source, *id, r)))
        .max_by_key(|(source, id, _)| (*source, *id))
        .map(|(.., reward)| reward)
}

/// e_i of every turn that an explicit reward reaches, its own or a later one's. Where the branch forks, the mean of the forks that
/// were rewarded flows back: siblings answer the same question and must not count twice. Retried turns pass nothing on.
pub fn discounted(stories: &[TurnStory], gamma: f32) -> HashMap<TurnId, f32> {
    let mut order: Vec<&TurnStory> = stories.iter().collect();
    // Later turns have larger ids, so children come before their parents.
    order.sort_by_key(|s| std::cmp::Reverse(s.turn.id));
    let mut from_children: HashMap<TurnId, (f32, u32)> = HashMap::new();
    let mut credit = HashMap::new();
    for story in order {
        let own = own_reward(story);
        if in_group(story) {
            credit.extend(own.map(|own| (story.turn.id, own)));
            continue;
        }
        let later = from_children
            .get(&story.turn.id)
            .map(|(sum, n)| gamma * sum / *n as f32)
            .filter(|_| gamma != 0.0);
        let reached = match (own, later) {
            (None, None) => continue,
            // Each was finite; their sum stays so, or it would be lost here and null in an export.
            (own, later) => (own.unwrap_or(0.0) + later.unwrap_or(0.0)).clamp(f32::MIN, f32::MAX),
        };
        credit.insert(story.turn.id, reached);
        if let Some(parent) = story.turn.parent
            && story.mark.is_none()
        {
            let entry = from_children.entry(parent).or_insert((0.0, 0));
            entry.0 += reached;
            entry.1 += 1;
        }
    }
    credit
}

/// The verdicts that a session's end adds: turns that a later reward reaches with another value than stands on them, and that
/// were not trained on yet.
pub fn flowing_back(stories: &[TurnStory], gamma: f32) -> Vec<(TurnId, Verdict)> {
    let credit = discounted(stories, gamma);
    let explicit = |s: &TurnStory| {
        s.verdicts
            .iter()
            .rev()
            .filter(|(_, v, _)| v.source == VerdictSource::Explicit)
            .find_map(|(_, v, _)| v.reward)
    };
    let spent = |s: &TurnStory| {
        s.samples
            .iter()
            .any(|(.., state)| matches!(state, SampleState::Consumed(_) | SampleState::Leased))
    };
    stories
        .iter()
        .filter(|s| s.turn.kind == TurnKind::Main && s.mark.is_none() && !spent(s))
        .filter_map(|s| {
            let reward = *credit.get(&s.turn.id)?;
            (reward.is_finite() && explicit(s) != Some(reward))
                .then(|| (s.turn.id, verdict(reward)))
        })
        .collect()
}

fn verdict(reward: f32) -> Verdict {
    Verdict {
        judge: CREDIT.to_owned(),
        source: VerdictSource::Explicit,
        reward: Some(reward),
        hints: Vec::new(),
        evidence: Some("a reward on a later turn of the same branch".to_owned()),
        votes: Vec::new(),
        group: None,
    }
}

#[cfg(test)]
#[path = "credit_tests.rs"]
mod tests;
