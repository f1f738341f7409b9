//! Answers of the control routes, as JSON.

use chela_core::{
    ExportRow, FinishReason, Message, PolicyView, Receipt, SampleState, Score, SessionRecord,
    StatusView, TurnKind, TurnMark, TurnStory, Verdict, VerdictId, VersionRecord, VersionState,
    Vote, VoteKind,
};
use serde_json::{Map, Value, json};

pub(super) fn export_json(row: &ExportRow) -> Value {
    let mask: Vec<u8> = row.loss_mask.iter().map(|m| u8::from(*m)).collect();
    json!({
        "interaction_id": row.turn.to_string(),
        "input_ids": row.input_ids,
        "loss_mask": mask,
        "logprobs": row.logprobs,
        "versions": row.versions,
        "rewards": row.reward,
        "hints": row.hints,
        "finish": row.finish.as_str(),
    })
}

pub(super) fn session_row(record: &SessionRecord) -> Value {
    json!({
        "id": record.id.as_str(),
        "profile": record.profile.as_str(),
        "turns": record.turns,
        "last_active": record.last_active,
        "ended": record.ended.as_ref().map(|(at, why)| json!({"at": at, "why": why})),
    })
}

fn message_json(message: &Message) -> Value {
    let call =
        |c: &chela_core::ToolCall| json!({"id": c.id, "name": c.name, "arguments": c.arguments});
    json!({
        "role": message.role.as_str(),
        "content": message.content,
        "reasoning": message.reasoning,
        "tool_calls": message.tool_calls.iter().map(call).collect::<Vec<_>>(),
    })
}

fn messages_json(messages: &[Message]) -> Value {
    messages.iter().map(message_json).collect()
}

/// Where a turn stands on its way into a version, in words.
fn turn_state(story: &TurnStory) -> String {
    match &story.mark {
        Some(TurnMark::Superseded) => return "superseded".to_owned(),
        Some(TurnMark::Abandoned) => return "abandoned".to_owned(),
        Some(TurnMark::Withdrawn) => return "withdrawn".to_owned(),
        None => {}
    }
    if story.turn.kind == TurnKind::Side {
        return "side: never trained on".to_owned();
    }
    let finish = story.turn.finish;
    if matches!(finish, FinishReason::Aborted | FinishReason::Failed) {
        return format!("{}: never trained on", finish.as_str());
    }
    match story.samples.last().map(|(_, _, state)| state) {
        Some(SampleState::Pending) => return "pending".to_owned(),
        Some(SampleState::Leased) => return "leased".to_owned(),
        Some(SampleState::Consumed(v)) => return format!("trained into version {}", v.number),
        Some(SampleState::Dropped(why)) => return format!("dropped: {why}"),
        None => {}
    }
    match (story.verdicts.last(), &story.no_verdict, &story.next) {
        (Some((_, _, Some(why))), _, _) => format!("judged, no sample: {why}"),
        (Some(_), _, _) => "judged".to_owned(),
        (None, Some(why), _) => format!("no verdict: {why}"),
        (None, None, Some(_)) => "waits for a judge".to_owned(),
        (None, None, None) => "waits for what comes next".to_owned(),
    }
}

fn vote_json(vote: &Vote) -> Value {
    let kind = match vote.kind {
        VoteKind::Score => "score",
        VoteKind::Hint => "hint",
    };
    json!({"kind": kind, "raw": vote.raw, "score": vote.score.map(Score::value), "hint": vote.hint})
}

fn verdict_json((id, verdict, no_sample): &(VerdictId, Verdict, Option<String>)) -> Value {
    json!({
        "id": id.0,
        "judge": verdict.judge,
        "source": verdict.source.as_str(),
        "reward": verdict.reward,
        "hints": verdict.hints,
        "evidence": verdict.evidence,
        "votes": verdict.votes.iter().map(vote_json).collect::<Vec<_>>(),
        "no_sample": no_sample,
    })
}

pub(super) fn turn_json(story: &TurnStory) -> Value {
    let turn = &story.turn;
    json!({
        "id": turn.id.to_string(),
        "parent": turn.parent.map(|p| p.to_string()),
        "kind": turn.kind.as_str(),
        "reason": turn.reason,
        "version": turn.version.number,
        "messages": messages_json(&turn.messages),
        "reply": message_json(&turn.answer),
        "next_state": story.next.as_ref().map(|n| messages_json(&n.messages)),
        "verdicts": story.verdicts.iter().map(verdict_json).collect::<Vec<_>>(),
        "state": turn_state(story),
        "finish": turn.finish.as_str(),
        "prompt_tokens": turn.prompt.len(),
        "reply_tokens": turn.reply.len(),
        "created": turn.created,
    })
}

fn receipt_json(receipt: &Receipt) -> Value {
    json!({
        "weights_hash": receipt.weights_hash,
        "engine_canary": receipt.engine_canary,
        "learner_canary": receipt.learner_canary,
    })
}

pub(super) fn version_json(record: &VersionRecord) -> Value {
    let (state, gate) = match &record.state {
        VersionState::Candidate => ("candidate".to_owned(), Value::Null),
        VersionState::Served => ("served".to_owned(), Value::Null),
        VersionState::Superseded => ("superseded".to_owned(), Value::Null),
        VersionState::Rejected(why) => (format!("rejected({why})"), json!(why)),
        VersionState::RolledBack => ("rolled_back".to_owned(), Value::Null),
    };
    let metrics: Map<String, Value> = record
        .metrics
        .iter()
        .map(|(name, x)| (name.clone(), json!(x)))
        .collect();
    json!({
        "version": record.version.number,
        "parent": record.parent,
        "steps": record.steps,
        "state": state,
        "receipt": record.receipt.as_ref().map(receipt_json),
        // Why the gate kept it out, when it did.
        "gate": gate,
        "samples": record.samples.iter().map(|s| s.0).collect::<Vec<_>>(),
        "metrics": metrics,
        "created": record.created,
    })
}

/// The base model, which has no record.
pub(super) fn base_version_json(served: bool) -> Value {
    json!({
        "version": 0, "parent": null, "steps": 0,
        "state": if served { "served" } else { "superseded" },
        "receipt": null, "gate": null, "samples": [], "metrics": {}, "created": null,
    })
}

pub(super) fn policy_json(view: &PolicyView) -> Value {
    json!({
        "profile": view.profile.as_str(),
        "served": view.served,
        "paused": view.paused,
        "versions": view.versions.iter().map(version_json).collect::<Vec<_>>(),
    })
}

pub(super) fn status_json(status: &StatusView) -> Value {
    let counts = &status.counts;
    let turns: Vec<Value> = counts
        .turns
        .iter()
        .map(|(kind, why, n)| json!({"kind": kind.as_str(), "reason": why, "count": n}))
        .collect();
    let map = |rows: &[(String, u64)]| -> Value {
        Value::Object(
            rows.iter()
                .map(|(name, n)| (name.clone(), json!(n)))
                .collect(),
        )
    };
    json!({
        "model": status.model,
        "context_length": status.context_length,
        "learning": status.learning,
        "notices": status.notices,
        "turns": turns,
        "samples": map(&counts.samples),
        "verdicts": map(&counts.verdicts),
        "unjudged": counts.unjudged,
        "sessions": counts.sessions,
        "disk_bytes": counts.bytes,
        "judging": status.judging,
        "judge_errors": map(&status.judge_errors),
        "profiles": status.profiles.iter().map(policy_json).collect::<Vec<_>>(),
    })
}
