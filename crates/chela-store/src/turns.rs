//! A turn as a row: what its parent does not have. Read back through the chain of parents.

use crate::{
    error::{Fail, damaged, reading, refuse},
    records::*,
};
use chela_core::{
    PolicyVersion, Profile, Reply, Segment, SessionId, StoreError, Turn, TurnId, TurnKind,
};
use rusqlite::{Connection, OptionalExtension, Row, named_params};
use std::{collections::HashSet, sync::Arc};

/// SQLite's integers end at 2^63 − 1; larger ids were never given, so nothing has them.
pub(crate) fn key(id: u64) -> Option<i64> {
    i64::try_from(id).ok()
}

/// The columns of `turns` that hold what the parent does not have.
struct Columns {
    parent: Option<i64>,
    segment: Option<String>,
    temperature: f64,
    prompt_shared: i64,
    messages_shared: i64,
    prompt: Vec<u8>,
    reply: Vec<u8>,
    behavior_logprobs: Vec<u8>,
    logprobs_t1: Vec<u8>,
    kept_mass: Vec<u8>,
    forced: Vec<u8>,
    messages: String,
    tools: Option<String>,
    answer: String,
}

impl Columns {
    fn of(turn: &Turn, parent: Option<&Turn>) -> Result<Self, Fail> {
        let (prompt_shared, messages_shared) = parent.map_or((0, 0), |p| {
            let ids = p.prompt.iter().chain(p.reply.tokens());
            let messages = p.messages.iter().chain([&p.answer]);
            (common(ids, &turn.prompt), common(messages, &turn.messages))
        });
        let same_tools = parent.is_some_and(|p| p.tools == turn.tools);
        Ok(Self {
            parent: turn.parent.and_then(|p| key(p.0)),
            segment: match &turn.segment {
                Segment::Extends => None,
                Segment::Opened(why) => Some(why.clone()),
            },
            temperature: f64::from(turn.temperature),
            prompt_shared: prompt_shared as i64,
            messages_shared: messages_shared as i64,
            prompt: u32_blob(&turn.prompt[prompt_shared..]),
            reply: u32_blob(turn.reply.tokens()),
            behavior_logprobs: f32_blob(turn.reply.behavior_logprobs()),
            logprobs_t1: f32_blob(turn.reply.logprobs_t1()),
            kept_mass: f32_blob(turn.reply.kept_mass()),
            forced: bool_blob(turn.reply.forced()),
            messages: write_messages(&turn.messages[messages_shared..])?,
            tools: if same_tools {
                None
            } else {
                Some(write_tools(&turn.tools)?)
            },
            answer: write_message(&turn.answer)?,
        })
    }

    /// Over everything that is read back: SQLite itself notices no flipped bit.
    fn digest(&self) -> i64 {
        let optional = |fnv: Fnv, text: &Option<String>| match text {
            None => fnv.bytes(&[0]),
            Some(text) => fnv.bytes(&[1]).column(text.as_bytes()),
        };
        let fnv = Fnv::default()
            .bytes(&self.parent.unwrap_or(-1).to_le_bytes())
            .bytes(&self.temperature.to_le_bytes())
            .bytes(&self.prompt_shared.to_le_bytes())
            .bytes(&self.messages_shared.to_le_bytes())
            .column(&self.prompt)
            .column(&self.reply)
            .column(&self.behavior_logprobs)
            .column(&self.logprobs_t1)
            .column(&self.kept_mass)
            .column(&self.forced)
            .column(self.messages.as_bytes())
            .column(self.answer.as_bytes());
        optional(optional(fnv, &self.segment), &self.tools).value()
    }
}

fn common<'a, T: PartialEq + 'a>(a: impl Iterator<Item = &'a T>, b: &[T]) -> usize {
    a.zip(b).take_while(|(a, b)| a == b).count()
}

/// Refuses what contradicts the turn itself or its parent.
pub(crate) fn check(turn: &Turn, parent: Option<&Turn>) -> Result<(), Fail> {
    let id = turn.id;
    if turn.version.profile != turn.profile {
        return refuse(format!(
            "{id} of {} sampled by {}",
            turn.profile, turn.version
        ));
    }
    if !turn.temperature.is_finite() {
        return refuse(format!("{id} has temperature {}", turn.temperature));
    }
    if let Some(p) = parent
        && (&p.profile, &p.session) != (&turn.profile, &turn.session)
    {
        return refuse(format!("the parent {} of {id} is of another session", p.id));
    }
    let extends = parent.is_some_and(|p| {
        let rest = turn.prompt.strip_prefix(p.prompt.as_slice());
        rest.is_some_and(|rest| rest.starts_with(p.reply.tokens()))
    });
    if turn.segment == Segment::Extends && !extends {
        return refuse(format!("{id} does not extend its parent's tokens"));
    }
    Ok(())
}

const INSERT: &str = "INSERT INTO turns (id, sid, parent, kind, reason, segment, version, temperature, finish, created,
    completed, prompt_shared, messages_shared, digest, prompt, reply, behavior_logprobs, logprobs_t1, kept_mass, forced,
    messages, tools, answer)
  VALUES (:id, :sid, :parent, :kind, :reason, :segment, :version, :temperature, :finish, :created, :completed,
    :prompt_shared, :messages_shared, :digest, :prompt, :reply, :behavior_logprobs, :logprobs_t1, :kept_mass, :forced,
    :messages, :tools, :answer)";

/// Writes the row of a turn that was checked.
pub(crate) fn insert(
    conn: &Connection,
    sid: i64,
    turn: &Turn,
    parent: Option<&Turn>,
) -> Result<(), Fail> {
    let columns = Columns::of(turn, parent)?;
    let Some(id) = key(turn.id.0) else {
        return refuse(format!("{} is not an id that next_turn_id gave", turn.id));
    };
    let Some(version) = key(turn.version.number) else {
        return refuse(format!("version {} has no such number", turn.version));
    };
    conn.prepare_cached(INSERT)?.execute(named_params! {
        ":id": id,
        ":sid": sid,
        ":parent": columns.parent,
        ":kind": turn.kind.as_str(),
        ":reason": turn.reason,
        ":segment": columns.segment,
        ":version": version,
        ":temperature": columns.temperature,
        ":finish": turn.finish.as_str(),
        ":created": turn.created,
        ":completed": turn.completed,
        ":prompt_shared": columns.prompt_shared,
        ":messages_shared": columns.messages_shared,
        ":digest": columns.digest(),
        ":prompt": columns.prompt,
        ":reply": columns.reply,
        ":behavior_logprobs": columns.behavior_logprobs,
        ":logprobs_t1": columns.logprobs_t1,
        ":kept_mass": columns.kept_mass,
        ":forced": columns.forced,
        ":messages": columns.messages,
        ":tools": columns.tools,
        ":answer": columns.answer,
    })?;
    Ok(())
}

/// A row as it lies there.
struct TurnRow {
    id: TurnId,
    profile: String,
    session: String,
    kind: String,
    reason: String,
    version: i64,
    finish: String,
    created: i64,
    completed: i64,
    digest: i64,
    columns: Columns,
}

const SELECT: &str = "SELECT s.profile, s.id, t.kind, t.reason, t.version, t.finish, t.created, t.completed, t.digest,
    t.parent, t.segment, t.temperature, t.prompt_shared, t.messages_shared, t.prompt, t.reply, t.behavior_logprobs,
    t.logprobs_t1, t.kept_mass, t.forced, t.messages, t.tools, t.answer
  FROM turns t JOIN sessions s USING (sid) WHERE t.id = ?1";

impl TurnRow {
    fn load(conn: &Connection, id: TurnId) -> Result<Option<Self>, Fail> {
        let Some(key) = key(id.0) else {
            return Ok(None);
        };
        let mut statement = conn.prepare_cached(SELECT)?;
        let row = statement
            .query_row([key], |row| Self::of(id, row))
            .optional();
        let Some(row) = row.map_err(reading(id))? else {
            return Ok(None);
        };
        if row.digest != row.columns.digest() {
            return Err(damaged(id, "its digest does not fit its content"));
        }
        Ok(Some(row))
    }

    fn of(id: TurnId, row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            id,
            profile: row.get(0)?,
            session: row.get(1)?,
            kind: row.get(2)?,
            reason: row.get(3)?,
            version: row.get(4)?,
            finish: row.get(5)?,
            created: row.get(6)?,
            completed: row.get(7)?,
            digest: row.get(8)?,
            columns: Columns {
                parent: row.get(9)?,
                segment: row.get(10)?,
                temperature: row.get(11)?,
                prompt_shared: row.get(12)?,
                messages_shared: row.get(13)?,
                prompt: row.get(14)?,
                reply: row.get(15)?,
                behavior_logprobs: row.get(16)?,
                logprobs_t1: row.get(17)?,
                kept_mass: row.get(18)?,
                forced: row.get(19)?,
                messages: row.get(20)?,
                tools: row.get(21)?,
                answer: row.get(22)?,
            },
        })
    }

    fn needs_parent(&self) -> bool {
        let c = &self.columns;
        c.prompt_shared > 0 || c.messages_shared > 0 || c.tools.is_none()
    }

    fn parent(&self) -> Option<TurnId> {
        self.columns.parent.map(|p| TurnId(p.cast_unsigned()))
    }

    /// The whole turn, made from the parent's, which is used up: its vectors grow instead of being copied.
    fn join(self, parent: Option<Turn>) -> Result<Turn, Fail> {
        let id = self.id;
        let parent_id = self.parent();
        let c = self.columns;
        let (mut prompt, mut messages, mut tools) = (Vec::new(), Vec::new(), Vec::new());
        if let Some(parent) = parent {
            prompt = parent.prompt;
            prompt.extend_from_slice(parent.reply.tokens());
            messages = parent.messages;
            messages.push(parent.answer);
            tools = parent.tools;
        }
        cut(id, &mut prompt, c.prompt_shared)?;
        cut(id, &mut messages, c.messages_shared)?;
        prompt.extend(read_u32s(&id, &c.prompt)?);
        messages.extend(read_messages(&id, &c.messages)?);
        if let Some(text) = &c.tools {
            tools = read_tools(&id, text)?;
        }
        let profile = Profile::new(self.profile).map_err(|e| damaged(id, e))?;
        let number = self.version.cast_unsigned();
        let reply = Reply::from_columns(
            read_u32s(&id, &c.reply)?,
            read_f32s(&id, &c.behavior_logprobs)?,
            read_f32s(&id, &c.logprobs_t1)?,
            read_f32s(&id, &c.kept_mass)?,
            read_bools(&id, &c.forced)?,
        );
        Ok(Turn {
            id,
            session: SessionId::new(self.session).map_err(|e| damaged(id, e))?,
            parent: parent_id,
            segment: c.segment.map_or(Segment::Extends, Segment::Opened),
            kind: TurnKind::parse(&self.kind).ok_or_else(|| damaged(id, "its kind"))?,
            reason: self.reason,
            version: PolicyVersion {
                profile: profile.clone(),
                number,
            },
            profile,
            prompt,
            reply: reply.map_err(|e| match e {
                StoreError::Damaged(why) => damaged(id, why),
                other => Fail::Store(other),
            })?,
            temperature: c.temperature as f32,
            finish: read_finish(&id, &self.finish)?,
            messages,
            tools,
            answer: read_message(&id, &c.answer)?,
            created: self.created,
            completed: self.completed,
        })
    }
}

fn cut<T>(id: TurnId, shared: &mut Vec<T>, count: i64) -> Result<(), Fail> {
    match usize::try_from(count) {
        Ok(n) if n <= shared.len() => {
            shared.truncate(n);
            Ok(())
        }
        _ => Err(damaged(
            id,
            format!("shares {count} of its parent's {}", shared.len()),
        )),
    }
}

/// Reads a turn through its chain, from the nearest one that `known` has or that needs no parent. Work and memory grow with
/// what was said once, not with its square.
pub(crate) fn load(
    conn: &Connection,
    id: TurnId,
    known: &dyn Fn(TurnId) -> Option<Arc<Turn>>,
) -> Result<Option<Arc<Turn>>, Fail> {
    if let Some(turn) = known(id) {
        return Ok(Some(turn));
    }
    let mut rows: Vec<TurnRow> = Vec::new();
    let mut seen = HashSet::new();
    let (mut at, mut base) = (id, None);
    loop {
        let Some(row) = TurnRow::load(conn, at)? else {
            match rows.last() {
                None => return Ok(None),
                Some(child) => return Err(damaged(child.id, format!("its parent {at} is gone"))),
            }
        };
        seen.insert(at);
        let (needs, parent) = (row.needs_parent(), row.parent());
        rows.push(row);
        if !needs {
            break;
        }
        match parent {
            None => return Err(damaged(at, "it shares with a parent it does not have")),
            Some(parent) if seen.contains(&parent) => {
                return Err(damaged(at, "it is its own parent"));
            }
            Some(parent) => at = parent,
        }
        base = known(at).map(|turn| (*turn).clone());
        if base.is_some() {
            break;
        }
    }
    while let Some(row) = rows.pop() {
        base = Some(row.join(base)?);
    }
    Ok(base.map(Arc::new))
}

/// Tests that write rows themselves: gives each the digest of what is in it.
#[cfg(test)]
pub(crate) fn digest_again(conn: &Connection) {
    let ids: Vec<i64> = conn
        .prepare("SELECT id FROM turns")
        .unwrap()
        .query_map([], |row| row.get(0))
        .unwrap()
        .collect::<Result<_, _>>()
        .unwrap();
    for id in ids {
        let of = |row: &Row<'_>| TurnRow::of(TurnId(id.cast_unsigned()), row);
        let row = conn.query_row(SELECT, [id], of).unwrap();
        let sql = "UPDATE turns SET digest = ?2 WHERE id = ?1";
        conn.execute(sql, [id, row.columns.digest()]).unwrap();
    }
}
