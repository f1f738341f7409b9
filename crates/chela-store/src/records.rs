//! How values lie in columns: JSON records of their own for what people said, little-endian blobs for numbers by token.
//!
//! These records belong to the schema's number: a change of theirs is a migration.

use crate::error::{Fail, damaged};
use chela_core::{
    FinishReason, GateCheck, GateReport, Group, Message, Role, Score, Tool, ToolCall, TurnMark,
    Verdict, VerdictSource, VersionOrigin, VersionState, Vote, VoteKind,
};
use rusqlite::types::Value;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::fmt::Display;

fn is_false(value: &bool) -> bool {
    !*value
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CallRecord {
    id: String,
    name: String,
    arguments: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MessageRecord {
    role: String,
    content: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    calls: Vec<CallRecord>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    call_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(default, skip_serializing_if = "is_false")]
    error: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolRecord {
    name: String,
    definition: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct VoteRecord {
    kind: String,
    raw: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    score: Option<i8>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    hint: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct VerdictRecord {
    hints: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    evidence: Option<String>,
    votes: Vec<VoteRecord>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    group: Option<GroupRecord>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct GroupRecord {
    id: String,
    size: usize,
}

/// The part of a verdict that no query looks into.
pub(crate) fn verdict_body(verdict: &Verdict) -> Result<String, Fail> {
    let votes = verdict.votes.iter().map(|v| VoteRecord {
        kind: match v.kind {
            VoteKind::Score => "score".to_owned(),
            VoteKind::Hint => "hint".to_owned(),
        },
        raw: v.raw.clone(),
        score: v.score.map(|s| s.value() as i8),
        hint: v.hint.clone(),
    });
    write(&VerdictRecord {
        hints: verdict.hints.clone(),
        evidence: verdict.evidence.clone(),
        votes: votes.collect(),
        group: verdict.group.as_ref().map(|g| GroupRecord {
            id: g.id().to_owned(),
            size: g.size(),
        }),
    })
}

/// The columns of a verdict beside its body.
pub(crate) struct VerdictColumns {
    pub judge: String,
    pub source: String,
    pub reward: Option<f32>,
    pub body: String,
}

impl VerdictColumns {
    pub fn read(self, what: &dyn Display) -> Result<Verdict, Fail> {
        let source = VerdictSource::parse(&self.source);
        let body: VerdictRecord = read(what, &self.body)?;
        let mut votes = Vec::with_capacity(body.votes.len());
        for vote in body.votes {
            let kind = match vote.kind.as_str() {
                "score" => VoteKind::Score,
                "hint" => VoteKind::Hint,
                other => return Err(damaged(what, format!("vote of kind {other:?}"))),
            };
            let score = match vote.score {
                None => None,
                Some(1) => Some(Score::Good),
                Some(0) => Some(Score::Neutral),
                Some(-1) => Some(Score::Bad),
                Some(other) => return Err(damaged(what, format!("a vote's score {other}"))),
            };
            votes.push(Vote {
                kind,
                raw: vote.raw,
                score,
                hint: vote.hint,
            });
        }
        let group = body.group.map(|g| Group::new(g.id, g.size));
        Ok(Verdict {
            judge: self.judge,
            source: source
                .ok_or_else(|| damaged(what, format!("verdict source {:?}", self.source)))?,
            reward: self.reward,
            hints: body.hints,
            evidence: body.evidence,
            votes,
            group: group.transpose().map_err(|e| damaged(what, e))?,
        })
    }
}

fn write<T: Serialize>(value: &T) -> Result<String, Fail> {
    serde_json::to_string(value).map_err(|e| damaged("a record being written", e))
}

fn read<T: DeserializeOwned>(what: &dyn Display, text: &str) -> Result<T, Fail> {
    serde_json::from_str(text).map_err(|e| damaged(what, e))
}

fn to_record(message: &Message) -> MessageRecord {
    let calls = message.tool_calls.iter().map(|c| CallRecord {
        id: c.id.clone(),
        name: c.name.clone(),
        arguments: c.arguments.clone(),
    });
    MessageRecord {
        role: message.role.as_str().to_owned(),
        content: message.content.clone(),
        reasoning: message.reasoning.clone(),
        calls: calls.collect(),
        call_id: message.tool_call_id.clone(),
        name: message.name.clone(),
        error: message.is_error,
    }
}

fn from_record(what: &dyn Display, record: MessageRecord) -> Result<Message, Fail> {
    let role = Role::parse(&record.role)
        .ok_or_else(|| damaged(what, format!("message of role {:?}", record.role)))?;
    let calls = record.calls.into_iter();
    Ok(Message {
        role,
        content: record.content,
        reasoning: record.reasoning,
        tool_calls: calls
            .map(|c| ToolCall {
                id: c.id,
                name: c.name,
                arguments: c.arguments,
            })
            .collect(),
        tool_call_id: record.call_id,
        name: record.name,
        is_error: record.error,
    })
}

pub(crate) fn write_messages(messages: &[Message]) -> Result<String, Fail> {
    write(&messages.iter().map(to_record).collect::<Vec<_>>())
}

pub(crate) fn read_messages(what: &dyn Display, text: &str) -> Result<Vec<Message>, Fail> {
    let records: Vec<MessageRecord> = read(what, text)?;
    records.into_iter().map(|r| from_record(what, r)).collect()
}

pub(crate) fn write_message(message: &Message) -> Result<String, Fail> {
    write(&to_record(message))
}

pub(crate) fn read_message(what: &dyn Display, text: &str) -> Result<Message, Fail> {
    from_record(what, read(what, text)?)
}

pub(crate) fn write_tools(tools: &[Tool]) -> Result<String, Fail> {
    let record = |t: &Tool| ToolRecord {
        name: t.name.clone(),
        definition: t.definition.clone(),
    };
    write(&tools.iter().map(record).collect::<Vec<_>>())
}

pub(crate) fn read_tools(what: &dyn Display, text: &str) -> Result<Vec<Tool>, Fail> {
    let records: Vec<ToolRecord> = read(what, text)?;
    Ok(records
        .into_iter()
        .map(|r| Tool {
            name: r.name,
            definition: r.definition,
        })
        .collect())
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CheckRecord {
    name: String,
    value: String,
    limit: String,
    passed: bool,
    detail: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct GateRecord {
    checks: Vec<CheckRecord>,
    seconds: String,
    at: i64,
}

/// A number as text that reads back to the same value, NaN and infinities included, which JSON numbers cannot.
fn write_number(value: f64) -> String {
    format!("{value:?}")
}

fn read_number(what: &dyn Display, name: &str, text: &str) -> Result<f64, Fail> {
    let bad = |e| damaged(what, format!("figure {name} {text:?}: {e}"));
    text.parse().map_err(bad)
}

pub(crate) fn write_gate(report: &GateReport) -> Result<String, Fail> {
    let checks = report.checks.iter().map(|c| CheckRecord {
        name: c.name.clone(),
        value: write_number(c.value),
        limit: write_number(c.limit),
        passed: c.passed,
        detail: c.detail.clone(),
    });
    write(&GateRecord {
        checks: checks.collect(),
        seconds: write_number(report.seconds),
        at: report.at,
    })
}

pub(crate) fn read_gate(what: &dyn Display, text: &str) -> Result<GateReport, Fail> {
    let record: GateRecord = read(what, text)?;
    let checks = record.checks.into_iter().map(|c| {
        Ok(GateCheck {
            value: read_number(what, &c.name, &c.value)?,
            limit: read_number(what, &c.name, &c.limit)?,
            name: c.name,
            passed: c.passed,
            detail: c.detail,
        })
    });
    Ok(GateReport {
        checks: checks.collect::<Result<_, Fail>>()?,
        seconds: read_number(what, "seconds", &record.seconds)?,
        at: record.at,
    })
}

/// Word and value of an origin.
pub(crate) fn write_origin(origin: &VersionOrigin) -> (&'static str, Value) {
    match origin {
        VersionOrigin::Trained => ("trained", Value::Null),
        VersionOrigin::Imported(from) => ("imported", Value::Text(from.clone())),
        VersionOrigin::Replayed(of) => ("replayed", Value::Integer(of.cast_signed())),
    }
}

pub(crate) fn read_origin(
    what: &dyn Display,
    word: &str,
    value: Value,
) -> Result<VersionOrigin, Fail> {
    match (word, value) {
        ("trained", Value::Null) => Ok(VersionOrigin::Trained),
        ("imported", Value::Text(from)) => Ok(VersionOrigin::Imported(from)),
        ("replayed", Value::Integer(of)) => Ok(VersionOrigin::Replayed(of.cast_unsigned())),
        (other, _) => Err(damaged(what, format!("version origin {other:?}"))),
    }
}

/// Named figures.
pub(crate) fn write_metrics(metrics: &[(String, f64)]) -> Result<String, Fail> {
    write(
        &metrics
            .iter()
            .map(|(n, v)| (n.clone(), write_number(*v)))
            .collect::<Vec<_>>(),
    )
}

pub(crate) fn read_metrics(what: &dyn Display, text: &str) -> Result<Vec<(String, f64)>, Fail> {
    let records: Vec<(String, String)> = read(what, text)?;
    let number = |(name, text): (String, String)| {
        let value = read_number(what, &name, &text)?;
        Ok((name, value))
    };
    records.into_iter().map(number).collect()
}

pub(crate) fn u32_blob(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub(crate) fn f32_blob(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub(crate) fn u64_blob(values: impl Iterator<Item = u64>) -> Vec<u8> {
    values.flat_map(u64::to_le_bytes).collect()
}

pub(crate) fn bool_blob(values: &[bool]) -> Vec<u8> {
    values.iter().map(|v| u8::from(*v)).collect()
}

fn chunks<'a, const N: usize>(what: &dyn Display, blob: &'a [u8]) -> Result<&'a [[u8; N]], Fail> {
    match blob.as_chunks::<N>() {
        (chunks, []) => Ok(chunks),
        _ => Err(damaged(
            what,
            format!("{} bytes in values of {N}", blob.len()),
        )),
    }
}

pub(crate) fn read_u32s(what: &dyn Display, blob: &[u8]) -> Result<Vec<u32>, Fail> {
    Ok(chunks(what, blob)?
        .iter()
        .map(|b| u32::from_le_bytes(*b))
        .collect())
}

pub(crate) fn read_f32s(what: &dyn Display, blob: &[u8]) -> Result<Vec<f32>, Fail> {
    Ok(chunks(what, blob)?
        .iter()
        .map(|b| f32::from_le_bytes(*b))
        .collect())
}

pub(crate) fn read_u64s(what: &dyn Display, blob: &[u8]) -> Result<Vec<u64>, Fail> {
    Ok(chunks(what, blob)?
        .iter()
        .map(|b| u64::from_le_bytes(*b))
        .collect())
}

pub(crate) fn read_bools(what: &dyn Display, blob: &[u8]) -> Result<Vec<bool>, Fail> {
    let read = |b: &u8| match b {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(damaged(what, format!("{other} where 0 or 1 belongs"))),
    };
    blob.iter().map(read).collect()
}

pub(crate) fn read_finish(what: &dyn Display, text: &str) -> Result<FinishReason, Fail> {
    let found = FinishReason::parse(text);
    found.ok_or_else(|| damaged(what, format!("finish reason {text:?}")))
}

pub(crate) fn write_mark(mark: &TurnMark) -> &'static str {
    match mark {
        TurnMark::Superseded => "superseded",
        TurnMark::Abandoned => "abandoned",
        TurnMark::Withdrawn => "withdrawn",
    }
}

pub(crate) fn read_mark(what: &dyn Display, text: &str) -> Result<TurnMark, Fail> {
    match text {
        "superseded" => Ok(TurnMark::Superseded),
        "abandoned" => Ok(TurnMark::Abandoned),
        "withdrawn" => Ok(TurnMark::Withdrawn),
        other => Err(damaged(what, format!("mark {other:?}"))),
    }
}

pub(crate) fn read_state(
    what: &dyn Display,
    text: &str,
    why: Option<String>,
) -> Result<VersionState, Fail> {
    match (text, why) {
        ("candidate", None) => Ok(VersionState::Candidate),
        ("served", None) => Ok(VersionState::Served),
        ("superseded", None) => Ok(VersionState::Superseded),
        ("rejected", Some(why)) => Ok(VersionState::Rejected(why)),
        ("rolled_back", Some(why)) => Ok(VersionState::RolledBack(why)),
        ("forgotten", Some(why)) => Ok(VersionState::Forgotten(why)),
        (other, _) => Err(damaged(what, format!("version state {other:?}"))),
    }
}

/// FNV-1a, 64 bits: finds flipped bits and tells replies apart; no protection against intent.
pub(crate) struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
        self
    }

    /// Ends a column, so that bytes cannot move from one to the next unseen.
    pub fn column(self, bytes: &[u8]) -> Self {
        self.bytes(&(bytes.len() as u64).to_le_bytes()).bytes(bytes)
    }

    /// As SQLite keeps it.
    pub fn value(&self) -> i64 {
        self.0.cast_signed()
    }
}
