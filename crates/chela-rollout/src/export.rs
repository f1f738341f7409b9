//! A session's turns as rows for a trainer elsewhere.

use crate::credit;
use chela_core::{
    ExportRow, ExportStyle, FinishReason, Segment, Turn, TurnId, TurnKind, TurnStory,
};
use std::collections::{HashMap, HashSet};

/// Rows of the main turns that sampled anything, oldest first; replies that a retry replaced are left out.
pub fn rows(stories: &[TurnStory], discount: f32, style: ExportStyle) -> Vec<ExportRow> {
    let credit = credit::discounted(stories, discount);
    let wanted: Vec<&TurnStory> = stories
        .iter()
        .filter(|s| s.turn.kind == TurnKind::Main && !s.turn.reply.is_empty() && s.mark.is_none())
        .collect();
    match style {
        ExportStyle::Individual => wanted.iter().map(|s| row(&[s], &credit)).collect(),
        ExportStyle::Concat => concatenated(&wanted, &credit),
    }
}

/// One row for each segment: the last turn's tokens, sampled where any of its turns sampled. Where a segment forks, the shared turns
/// are in the loss of the first row only.
fn concatenated(wanted: &[&TurnStory], credit: &HashMap<TurnId, f32>) -> Vec<ExportRow> {
    let by_id: HashMap<TurnId, &TurnStory> = wanted.iter().map(|s| (s.turn.id, *s)).collect();
    let extended: HashSet<TurnId> = wanted
        .iter()
        .filter(|s| s.turn.segment == Segment::Extends)
        .filter_map(|s| s.turn.parent)
        .collect();
    let mut seen = HashSet::new();
    let leaves = wanted.iter().filter(|s| !extended.contains(&s.turn.id));
    leaves
        .map(|leaf| {
            let mut line = vec![*leaf];
            let mut at = *leaf;
            while at.turn.segment == Segment::Extends
                && let Some(parent) = at.turn.parent.and_then(|p| by_id.get(&p).copied())
            {
                line.push(parent);
                at = parent;
            }
            line.retain(|s| seen.insert(s.turn.id));
            row(&line, credit)
        })
        .collect()
}

/// `line[0]` is the turn whose tokens the row holds; the others are earlier turns of its segment.
fn row(line: &[&TurnStory], credit: &HashMap<TurnId, f32>) -> ExportRow {
    let last = &line[0].turn;
    let mut input_ids = last.prompt.clone();
    input_ids.extend_from_slice(last.reply.tokens());
    let mut out = ExportRow {
        turn: last.id,
        loss_mask: vec![false; input_ids.len()],
        logprobs: vec![0.0; input_ids.len()],
        versions: vec![-1; input_ids.len()],
        input_ids,
        reward: credit
            .get(&last.id)
            .copied()
            .or_else(|| credit::standing_reward(line[0])),
        hints: line
            .iter()
            .rev()
            .flat_map(|s| &s.verdicts)
            .flat_map(|(_, v, _)| v.hints.clone())
            .collect(),
        temperature: last.temperature,
        finish: last.finish,
    };
    // What was cut off by the client or by a fault is nothing to learn from.
    let whole = |turn: &&Turn| !matches!(turn.finish, FinishReason::Aborted | FinishReason::Failed);
    for turn in line.iter().map(|s| &s.turn).filter(whole) {
        let begin = turn.prompt.len();
        for (i, logprob) in turn.reply.behavior_logprobs().iter().enumerate() {
            // A token that a form left no choice about is nothing to learn from either.
            out.loss_mask[begin + i] = !turn.reply.forced().get(i).copied().unwrap_or(false);
            out.logprobs[begin + i] = *logprob;
            out.versions[begin + i] = i64::try_from(turn.version.number).unwrap_or(i64::MAX);
        }
    }
    out
}
