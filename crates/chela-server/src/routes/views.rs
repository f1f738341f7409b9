//! Answers of the control routes, as JSON.

use chela_core::{
    Answers, ExportRow, FinishReason, ForgetProof, Forgetting, GateCheck, GateReport, JudgeView,
    Lesson, Message, PolicyDiff, PolicyView, Receipt, SampleState, Score, SessionRecord,
    StatusView, TurnKind, TurnMark, TurnStory, Verdict, VerdictId, VersionOrigin, VersionRecord,
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
        "temperature": row.temperature,
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
        "group": verdict.group.as_ref().map(|g| json!({"id": g.id(), "size": g.size()})),
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

/// A number that JSON has; what is not finite is null.
fn figure(x: f64) -> Value {
    serde_json::Number::from_f64(x).map_or(Value::Null, Value::Number)
}

fn gate_json(report: &GateReport) -> Value {
    let check = |c: &GateCheck| {
        json!({
            "name": c.name,
            "value": figure(c.value),
            "limit": figure(c.limit),
            "passed": c.passed,
            "detail": c.detail,
        })
    };
    json!({
        "passed": report.passed(),
        "seconds": report.seconds,
        "at": report.at,
        "checks": report.checks.iter().map(check).collect::<Vec<_>>(),
    })
}

fn origin_json(origin: &VersionOrigin) -> Value {
    match origin {
        VersionOrigin::Trained => json!({"kind": "trained"}),
        VersionOrigin::Imported(from) => json!({"kind": "imported", "from": from}),
        VersionOrigin::Replayed(of) => json!({"kind": "replayed", "of": of}),
    }
}

pub(super) fn version_json(record: &VersionRecord) -> Value {
    let (state, why) = record.state.words();
    let metrics: Map<String, Value> = record
        .metrics
        .iter()
        .map(|(name, x)| (name.clone(), figure(*x)))
        .collect();
    json!({
        "version": record.version.number,
        "parent": record.parent,
        "steps": record.steps,
        "state": state,
        "why": why,
        "origin": origin_json(&record.origin),
        "receipt": record.receipt.as_ref().map(receipt_json),
        "gate": record.gate.as_ref().map(gate_json),
        "samples": record.samples.iter().map(|s| s.0).collect::<Vec<_>>(),
        "metrics": metrics,
        "created": record.created,
        "served_at": record.served_at,
        "left_at": record.left_at,
    })
}

pub(super) fn lesson_json(lesson: &Lesson) -> Value {
    json!({
        "sample": lesson.sample.0,
        "version": lesson.version,
        "turn": lesson.turn.to_string(),
        "session": lesson.session.as_str(),
        "request": lesson.request,
        "reply": lesson.reply,
        "reward": lesson.reward,
        "hint": lesson.hint,
        "judge": lesson.judge,
        "evidence": lesson.evidence,
        "explicit": lesson.explicit,
    })
}

pub(super) fn diff_json(diff: &PolicyDiff) -> Value {
    let answers = |a: &Answers| json!({"request": a.request, "from": a.from, "to": a.to});
    json!({
        "from": diff.from,
        "to": diff.to,
        "steps": diff.steps,
        "own_prompts": diff.own_prompts,
        "answers": diff.answers.iter().map(answers).collect::<Vec<_>>(),
        "mean_tokens": {"from": diff.tokens.0, "to": diff.tokens.1},
        "kl": diff.kl.map(figure),
        "lessons": diff.lessons.iter().map(lesson_json).collect::<Vec<_>>(),
    })
}

pub(super) fn forgetting_json(done: &Forgetting) -> Value {
    let proof = |p: &ForgetProof| {
        json!({
            "pieces_looked_for": p.pieces,
            "files": p.files,
            "bytes": p.bytes,
            "found": p.found,
        })
    };
    let plan = &done.plan;
    json!({
        "profile": done.profile.as_str(),
        "forgotten": done.proof.is_some(),
        "forgotten_turns": plan.turns.len(),
        "turns": plan.turns.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "unjudged": plan.unjudged.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "sessions": plan.sessions,
        "verdicts": plan.verdicts,
        "samples": plan.samples,
        "trained_samples": plan.trained.len(),
        "versions": done.undo.versions,
        "back_to": done.undo.back_to,
        "replay": done.undo.replay,
        "samples_again": done.samples_again,
        "learning": done.learning,
        "seconds": done.seconds,
        "proof": done.proof.as_ref().map(proof),
    })
}

/// The base model, which has no record.
pub(super) fn base_version_json(served: bool) -> Value {
    json!({
        "version": 0, "parent": null, "steps": 0,
        "state": if served { "served" } else { "superseded" },
        "why": null, "origin": {"kind": "base"}, "receipt": null, "gate": null, "samples": [], "metrics": {}, "created": null,
        "served_at": null, "left_at": null,
    })
}

pub(super) fn policy_json(view: &PolicyView) -> Value {
    json!({
        "profile": view.profile.as_str(),
        "served": view.served,
        "paused": view.paused,
        "replays": view.replays,
        "versions": view.versions.iter().map(version_json).collect::<Vec<_>>(),
    })
}

fn judge_json(view: &JudgeView) -> Value {
    let canaries = &view.canaries;
    json!({
        "judge": view.judge,
        "verdicts": view.verdicts,
        "votes": {"valid": view.valid_votes, "void": view.void_votes},
        "hinted": view.hinted,
        "canaries": {
            "verdicts": canaries.verdicts,
            "wrong": canaries.wrong,
            "abstained": canaries.abstained,
            "failed": canaries.failed,
            "error": canaries.error,
            "examples": canaries.examples,
        },
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
        "judges": status.judges.iter().map(judge_json).collect::<Vec<_>>(),
        "groups": status.groups.as_ref().map(|g| json!({
            "algorithm": g.algorithm,
            "groups": g.groups,
            "max_staleness": g.max_staleness,
            "reply_limit": g.reply_limit,
        })),
        "profiles": status.profiles.iter().map(policy_json).collect::<Vec<_>>(),
    })
}
