//! Queries: what is stored, and what waits.

use crate::{
    cache::TurnCache,
    error::{Fail, damaged, reading},
    records::*,
    turns::{self, key},
};
use chela_core::{
    Group, NewSample, NextState, OpenVerdict, PendingSample, PolicyVersion, Profile, SampleId,
    SampleState, SessionId, SessionRecord, Turn, TurnId, TurnStory, Verdict, VerdictId,
};
use rusqlite::{Connection, OptionalExtension, Row, ToSql};
use std::{
    cell::RefCell,
    collections::{HashMap, HashSet},
    fmt::Display,
    sync::Arc,
};

/// What one read looks at.
pub(crate) struct Read<'a> {
    pub conn: &'a Connection,
    pub cache: &'a TurnCache,
    /// The cache's generation from before the read.
    pub generation: u64,
    pub leases: &'a HashSet<SampleId>,
}

pub(crate) fn unsigned(row: &Row<'_>, column: usize) -> rusqlite::Result<u64> {
    Ok(row.get::<_, i64>(column)?.cast_unsigned())
}

pub(crate) fn limit(limit: usize) -> i64 {
    i64::try_from(limit).unwrap_or(i64::MAX)
}

const SESSION: &str = "SELECT profile, id, key_hash, task, opened, last_active, ended_at, ended_why, turns FROM sessions";

fn sessions(
    conn: &Connection,
    rest: &str,
    values: &[&dyn ToSql],
) -> Result<Vec<SessionRecord>, Fail> {
    type Raw = (String, String, SessionRecord);
    let raw = |row: &Row<'_>| -> rusqlite::Result<Raw> {
        let (profile, id): (String, String) = (row.get(0)?, row.get(1)?);
        let ended: Option<i64> = row.get(6)?;
        let ended = match ended {
            Some(at) => Some((at, row.get(7)?)),
            None => None,
        };
        let record = SessionRecord {
            profile: Profile::default(),
            id: SessionId::new("-").map_err(|_| rusqlite::Error::InvalidQuery)?,
            key_hash: row.get(2)?,
            task: row.get(3)?,
            opened: row.get(4)?,
            last_active: row.get(5)?,
            ended,
            turns: unsigned(row, 8)?,
        };
        Ok((profile, id, record))
    };
    let mut statement = conn.prepare_cached(&format!("{SESSION} {rest}"))?;
    let rows = statement.query_map(values, raw)?;
    let mut records = Vec::new();
    for row in rows {
        let (profile, id, record) = row.map_err(reading("a session"))?;
        let what = format!("session {id:?}");
        let profile = Profile::new(profile).map_err(|e| damaged(&what, e))?;
        let id = SessionId::new(id).map_err(|e| damaged(&what, e))?;
        records.push(SessionRecord {
            profile,
            id,
            ..record
        });
    }
    Ok(records)
}

/// A sample, and its state's word on disk.
pub(crate) fn sample(conn: &Connection, id: SampleId) -> Result<Option<(NewSample, String)>, Fail> {
    let sql = format!("{SAMPLE} WHERE id = ?1");
    let mut statement = conn.prepare_cached(&sql)?;
    let what = format!("sample {}", id.0);
    let raw = statement.query_row([key(id.0)], RawSample::of).optional();
    let Some(raw) = raw.map_err(reading(&what))? else {
        return Ok(None);
    };
    let word = raw.state.clone();
    Ok(Some((raw.read()?, word)))
}

/// A group's id and size, as they lie there.
fn raw_group(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<(String, i64)>> {
    let id: Option<String> = row.get(column)?;
    id.map(|id| Ok((id, row.get(column + 1)?))).transpose()
}

fn read_group(what: &dyn Display, raw: Option<(String, i64)>) -> Result<Option<Group>, Fail> {
    let Some((id, size)) = raw else {
        return Ok(None);
    };
    let size = usize::try_from(size).map_err(|e| damaged(what, e))?;
    let group = Group::new(id, size).map_err(|e| damaged(what, e))?;
    Ok(Some(group))
}

const SAMPLE: &str =
    "SELECT id, turn, verdict, state, why, step, reward, explicit, created, hint, teacher_logprobs,
    student_logprobs, reply_len, group_id, group_size FROM samples";

struct RawSample {
    id: SampleId,
    state: String,
    why: Option<String>,
    step: Option<i64>,
    reply_len: i64,
    teacher: Option<Vec<u8>>,
    student: Option<Vec<u8>>,
    group: Option<(String, i64)>,
    sample: NewSample,
}

impl RawSample {
    fn of(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            id: SampleId(unsigned(row, 0)?),
            state: row.get(3)?,
            why: row.get(4)?,
            step: row.get(5)?,
            teacher: row.get(10)?,
            student: row.get(11)?,
            reply_len: row.get(12)?,
            group: raw_group(row, 13)?,
            sample: NewSample {
                turn: TurnId(unsigned(row, 1)?),
                verdict: VerdictId(unsigned(row, 2)?),
                reward: row.get::<_, Option<f64>>(6)?.map(|r| r as f32),
                explicit: row.get(7)?,
                hint: row.get(9)?,
                teacher_logprobs: None,
                student_logprobs: None,
                created: row.get(8)?,
                group: None,
            },
        })
    }

    fn read(self) -> Result<NewSample, Fail> {
        let what = format!("sample {} of {}", self.id.0, self.sample.turn);
        let column = |blob: Option<Vec<u8>>| -> Result<Option<Vec<f32>>, Fail> {
            let Some(blob) = blob else { return Ok(None) };
            let values = read_f32s(&what, &blob)?;
            if values.len() as i64 != self.reply_len {
                let (is, should) = (values.len(), self.reply_len);
                return Err(damaged(
                    &what,
                    format!("{is} log-probs for {should} tokens"),
                ));
            }
            Ok(Some(values))
        };
        let teacher_logprobs = column(self.teacher)?;
        let student_logprobs = column(self.student)?;
        let group = read_group(&what, self.group)?;
        Ok(NewSample {
            teacher_logprobs,
            student_logprobs,
            group,
            ..self.sample
        })
    }

    fn state(&self, profile: &Profile, leases: &HashSet<SampleId>) -> Result<SampleState, Fail> {
        match (self.state.as_str(), &self.why, self.step) {
            ("pending", _, _) if leases.contains(&self.id) => Ok(SampleState::Leased),
            ("pending", _, _) => Ok(SampleState::Pending),
            ("dropped", Some(why), _) => Ok(SampleState::Dropped(why.clone())),
            ("consumed", _, Some(step)) => Ok(SampleState::Consumed(PolicyVersion {
                profile: profile.clone(),
                number: step.cast_unsigned(),
            })),
            (word, _, _) => Err(damaged(
                format!("sample {}", self.id.0),
                format!("state {word}"),
            )),
        }
    }
}

const VERDICT: &str = "SELECT id, turn, judge, source, reward, body, no_sample FROM verdicts";

/// Mark and reason of no verdict, as they lie there.
type Fate = (Option<String>, Option<String>);

type RawVerdict = (VerdictId, TurnId, VerdictColumns, Option<String>);

fn raw_verdict(row: &Row<'_>) -> rusqlite::Result<RawVerdict> {
    let columns = VerdictColumns {
        judge: row.get(2)?,
        source: row.get(3)?,
        reward: row.get::<_, Option<f64>>(4)?.map(|r| r as f32),
        body: row.get(5)?,
    };
    Ok((
        VerdictId(unsigned(row, 0)?),
        TurnId(unsigned(row, 1)?),
        columns,
        row.get(6)?,
    ))
}

impl Read<'_> {
    pub fn sessions(&self, rest: &str, values: &[&dyn ToSql]) -> Result<Vec<SessionRecord>, Fail> {
        sessions(self.conn, rest, values)
    }

    /// A turn that is known to be stored at the moment this read sees.
    pub fn turn(&self, id: TurnId) -> Result<Arc<Turn>, Fail> {
        let found = turns::load(self.conn, id, &|id| self.cache.get(id))?;
        let turn = found.ok_or_else(|| damaged(id, "it is gone"))?;
        self.cache.put(self.generation, turn.clone());
        Ok(turn)
    }

    pub fn story(&self, id: TurnId) -> Result<Option<TurnStory>, Fail> {
        match self.fate(id)? {
            None => Ok(None),
            Some(fate) => Ok(Some(self.tell(self.turn(id)?, fate)?)),
        }
    }

    /// Mark and reason of no verdict; `None` = no such turn.
    fn fate(&self, id: TurnId) -> Result<Option<Fate>, Fail> {
        let sql = "SELECT mark, no_verdict FROM turns WHERE id = ?1";
        let mut statement = self.conn.prepare_cached(sql)?;
        let fate = statement.query_row([key(id.0)], |row| Ok((row.get(0)?, row.get(1)?)));
        fate.optional().map_err(reading(id))
    }

    fn tell(&self, turn: Arc<Turn>, (mark, no_verdict): Fate) -> Result<TurnStory, Fail> {
        let id = turn.id;
        Ok(TurnStory {
            next: self.next_state(id)?,
            mark: mark.map(|m| read_mark(&id, &m)).transpose()?,
            no_verdict,
            verdicts: self.verdicts(id)?,
            samples: self.samples(id, &turn.profile)?,
            turn: Arc::unwrap_or_clone(turn),
        })
    }

    fn next_state(&self, id: TurnId) -> Result<Option<NextState>, Fail> {
        let sql = "SELECT messages FROM next_states WHERE turn = ?1 ORDER BY seq";
        let mut statement = self.conn.prepare_cached(sql)?;
        let mut next: Option<NextState> = None;
        for text in statement.query_map([key(id.0)], |row| row.get::<_, String>(0))? {
            let messages = read_messages(&id, &text.map_err(reading(id))?)?;
            next.get_or_insert_default().messages.extend(messages);
        }
        Ok(next)
    }

    fn verdicts(&self, id: TurnId) -> Result<Vec<(VerdictId, Verdict, Option<String>)>, Fail> {
        let sql = format!("{VERDICT} WHERE turn = ?1 ORDER BY id");
        let mut statement = self.conn.prepare_cached(&sql)?;
        let mut verdicts = Vec::new();
        for row in statement.query_map([key(id.0)], raw_verdict)? {
            let (verdict, _, columns, no_sample) = row.map_err(reading(id))?;
            verdicts.push((verdict, columns.read(&id)?, no_sample));
        }
        Ok(verdicts)
    }

    fn samples(
        &self,
        id: TurnId,
        profile: &Profile,
    ) -> Result<Vec<(SampleId, NewSample, SampleState)>, Fail> {
        let sql = format!("{SAMPLE} WHERE turn = ?1 ORDER BY id");
        let mut statement = self.conn.prepare_cached(&sql)?;
        let mut samples = Vec::new();
        for row in statement.query_map([key(id.0)], RawSample::of)? {
            let raw = row.map_err(reading(id))?;
            let state = raw.state(profile, self.leases)?;
            samples.push((raw.id, raw.read()?, state));
        }
        Ok(samples)
    }

    pub fn session_stories(
        &self,
        profile: &Profile,
        session: &SessionId,
    ) -> Result<Vec<TurnStory>, Fail> {
        let sql = "SELECT t.id, t.mark, t.no_verdict FROM turns t JOIN sessions s USING (sid)
             WHERE s.profile = ?1 AND s.id = ?2 ORDER BY t.id";
        let mut statement = self.conn.prepare_cached(sql)?;
        let names = [profile.as_str(), session.as_str()];
        let rows = statement
            .query_map(names, |row| {
                Ok((TurnId(unsigned(row, 0)?), (row.get(1)?, row.get(2)?)))
            })?
            .collect::<Result<Vec<_>, _>>()
            .map_err(reading(format!("session {session}")))?;
        // Parents come before children, so each turn is one step from what this read has.
        let known: RefCell<HashMap<TurnId, Arc<Turn>>> = RefCell::default();
        let mut stories = Vec::with_capacity(rows.len());
        for (id, fate) in rows {
            let turn = turns::load(self.conn, id, &|id| known.borrow().get(&id).cloned())?;
            let turn = turn.ok_or_else(|| damaged(id, "it is gone"))?;
            known.borrow_mut().insert(id, turn.clone());
            stories.push(self.tell(turn, fate)?);
        }
        Ok(stories)
    }

    pub fn unjudged(&self, most: usize) -> Result<Vec<TurnId>, Fail> {
        let sql = "SELECT id FROM turns WHERE waiting = 1 ORDER BY id LIMIT ?1";
        let mut statement = self.conn.prepare_cached(sql)?;
        let ids = statement.query_map([limit(most)], |row| Ok(TurnId(unsigned(row, 0)?)))?;
        Ok(ids.collect::<Result<_, _>>()?)
    }

    pub fn open_verdicts(&self, most: usize) -> Result<Vec<OpenVerdict>, Fail> {
        let sql = format!("{VERDICT} WHERE open = 1 ORDER BY id LIMIT ?1");
        let mut statement = self.conn.prepare_cached(&sql)?;
        let mut open = Vec::new();
        for row in statement.query_map([limit(most)], raw_verdict)? {
            let (id, turn, columns, _) = row.map_err(reading("an open verdict"))?;
            let verdict = columns.read(&turn)?;
            open.push(OpenVerdict {
                id,
                turn: Arc::unwrap_or_clone(self.turn(turn)?),
                verdict,
            });
        }
        Ok(open)
    }

    pub fn profiles(&self) -> Result<Vec<Profile>, Fail> {
        let sql = "SELECT profile FROM sessions UNION SELECT profile FROM versions
             UNION SELECT profile FROM pauses ORDER BY 1";
        let mut statement = self.conn.prepare_cached(sql)?;
        let mut profiles = Vec::new();
        for name in statement.query_map([], |row| row.get::<_, String>(0))? {
            let name = name.map_err(reading("a profile"))?;
            profiles.push(Profile::new(name).map_err(|e| damaged("a profile", e))?);
        }
        Ok(profiles)
    }

    pub fn pending(&self, profile: &Profile) -> Result<Vec<PendingSample>, Fail> {
        let sql =
            "SELECT x.id, x.turn, s.id, t.version, x.explicit, x.reply_hash, x.reply_len, x.created,
               x.reward, x.group_id, x.group_size
             FROM samples x INDEXED BY samples_pending JOIN turns t ON t.id = x.turn JOIN sessions s USING (sid)
             WHERE x.state = 'pending' AND x.profile = ?1 ORDER BY x.id";
        let mut statement = self.conn.prepare_cached(sql)?;
        let rows = statement.query_map([profile.as_str()], |row| {
            let session: String = row.get(2)?;
            let version = PolicyVersion {
                profile: profile.clone(),
                number: unsigned(row, 3)?,
            };
            let pending = (
                SampleId(unsigned(row, 0)?),
                TurnId(unsigned(row, 1)?),
                version,
                row.get::<_, bool>(4)?,
                unsigned(row, 5)?,
                unsigned(row, 6)?,
                row.get::<_, i64>(7)?,
                row.get::<_, Option<f64>>(8)?.map(|r| r as f32),
                raw_group(row, 9)?,
            );
            Ok((session, pending))
        })?;
        let mut pending = Vec::new();
        for row in rows {
            let (session, rest) = row.map_err(reading("a pending sample"))?;
            let (id, turn, version, explicit, reply_hash, reply_len, created, reward, group) = rest;
            if self.leases.contains(&id) {
                continue;
            }
            let session = SessionId::new(session).map_err(|e| damaged(turn, e))?;
            let reply_len = usize::try_from(reply_len).map_err(|e| damaged(turn, e))?;
            let group = read_group(&turn, group)?;
            let one = PendingSample {
                id,
                turn,
                session,
                version,
                explicit,
                reply_hash,
                reply_len,
                created,
                reward,
                group,
            };
            pending.push(one);
        }
        Ok(pending)
    }
}
