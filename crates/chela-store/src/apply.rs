//! How each event changes the tables, and what is refused.

use crate::{
    cache::TurnCache,
    error::{Fail, refuse},
    records::*,
    turns::{self, key},
};
use chela_core::{
    Event, Group, Millis, NewSample, NextState, Profile, Role, SampleId, SessionId, SessionRecord,
    Turn, TurnId, TurnKind, Verdict, VerdictId,
};
use rusqlite::{Connection, OptionalExtension, params};
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

/// One transaction being made. What it puts into `leases` and `fresh` counts once the sync is done.
pub(crate) struct Change<'a> {
    pub conn: &'a Connection,
    pub cache: &'a TurnCache,
    /// Samples in a step that is being made.
    pub leases: &'a mut HashSet<SampleId>,
    /// Turns written behind the same sync.
    pub fresh: &'a mut HashMap<TurnId, Arc<Turn>>,
    /// Those of them that this transaction wrote.
    pub written: Vec<TurnId>,
    /// Something was forgotten.
    pub forgot: bool,
    /// The largest ids seen.
    pub turn_ids: u64,
    pub verdict_ids: u64,
}

type Done = Result<(), Fail>;

impl Change<'_> {
    pub fn apply(&mut self, event: Event) -> Done {
        match event {
            Event::SessionOpened(record) => self.open_session(&record),
            Event::SessionEnded {
                profile,
                session,
                at,
                why,
            } => self.end_session(&profile, &session, at, &why),
            Event::Turn(turn) => self.add_turn(*turn),
            Event::NextState { turn, next, at } => self.add_next(turn, &next, at),
            Event::Mark { turn, mark } => {
                let sql = "UPDATE turns SET mark = ?2, waiting = 0 WHERE id = ?1";
                self.on_turn(turn, sql, write_mark(&mark))
            }
            Event::NoVerdict { turn, why } => {
                let sql = "UPDATE turns SET no_verdict = ?2, waiting = 0 WHERE id = ?1";
                self.on_turn(turn, sql, &why)
            }
            Event::Verdict {
                turn,
                id,
                verdict,
                at,
            } => self.add_verdict(turn, id, &verdict, at),
            Event::Sample(sample) => self.add_sample(&sample),
            Event::NoSample { verdict, why } => {
                self.open_verdict(verdict)?;
                let sql = "UPDATE verdicts SET no_sample = ?2, open = 0 WHERE id = ?1";
                self.conn
                    .prepare_cached(sql)?
                    .execute(params![key(verdict.0), why])?;
                Ok(())
            }
            Event::Dropped { samples, why } => samples
                .into_iter()
                .try_for_each(|id| self.drop_sample(id, &why)),
            Event::Version {
                version,
                state,
                receipt,
                at,
            } => self.set_version(&version, &state, receipt.as_ref(), at),
            Event::Gate { version, report } => self.set_gate(&version, &report),
            Event::Unlearnt { version, why } => self.unlearn(&version, &why),
            Event::ReplaySkipped { version } => self.skip_replay(&version),
            Event::Paused { profile, why } => {
                let name = profile.as_str();
                match why {
                    Some(why) => self
                        .conn
                        .prepare_cached("INSERT OR REPLACE INTO pauses VALUES (?1, ?2)")?
                        .execute(params![name, why])?,
                    None => self
                        .conn
                        .prepare_cached("DELETE FROM pauses WHERE profile = ?1")?
                        .execute([name])?,
                };
                Ok(())
            }
        }
    }

    /// A turn, from what is not yet synced, from the cache, or from its chain.
    pub fn turn(&self, id: TurnId) -> Result<Option<Arc<Turn>>, Fail> {
        let known = |id: TurnId| self.fresh.get(&id).cloned().or_else(|| self.cache.get(id));
        turns::load(self.conn, id, &known)
    }

    fn on_turn(&self, turn: TurnId, sql: &str, value: &str) -> Done {
        let changed = self
            .conn
            .prepare_cached(sql)?
            .execute(params![key(turn.0), value])?;
        if changed == 0 {
            refuse(format!("{turn} is unknown"))
        } else {
            Ok(())
        }
    }

    fn open_session(&self, record: &SessionRecord) -> Done {
        let sql =
            "INSERT INTO sessions (profile, id, key_hash, task, opened, last_active, key_order)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6,
               iif(?3 IS NULL, 0, (SELECT coalesce(max(key_order), 0) + 1 FROM sessions)))
             ON CONFLICT (profile, id) DO UPDATE SET
               key_hash = coalesce(excluded.key_hash, key_hash),
               key_order = iif(excluded.key_hash IS NULL, key_order, excluded.key_order),
               task = coalesce(excluded.task, task),
               last_active = max(last_active, excluded.last_active),
               ended_at = NULL, ended_why = NULL";
        self.conn.prepare_cached(sql)?.execute(params![
            record.profile.as_str(),
            record.id.as_str(),
            record.key_hash,
            record.task,
            record.opened,
            record.last_active,
        ])?;
        Ok(())
    }

    fn end_session(&self, profile: &Profile, session: &SessionId, at: Millis, why: &str) -> Done {
        let sql = "UPDATE sessions SET ended_why = iif(ended_at IS NULL, ?4, ended_why),
               ended_at = coalesce(ended_at, ?3) WHERE profile = ?1 AND id = ?2";
        let changed = self.conn.prepare_cached(sql)?.execute(params![
            profile.as_str(),
            session.as_str(),
            at,
            why
        ])?;
        if changed == 0 {
            refuse(format!("session {session} is unknown"))
        } else {
            Ok(())
        }
    }

    fn add_turn(&mut self, turn: Turn) -> Done {
        let Some(id) = key(turn.id.0) else {
            return refuse(format!("{} is not an id that next_turn_id gave", turn.id));
        };
        if self.exists("SELECT 1 FROM turns WHERE id = ?1", id)? {
            return refuse(format!("{} is stored already", turn.id));
        }
        let parent = match turn.parent {
            None => None,
            Some(parent) => match self.turn(parent)? {
                None => return refuse(format!("the parent {parent} of {} is unknown", turn.id)),
                found => found,
            },
        };
        turns::check(&turn, parent.as_deref())?;
        let sql = "INSERT INTO sessions (profile, id, opened, last_active, turns) VALUES (?1, ?2, ?3, ?4, 1)
             ON CONFLICT (profile, id) DO UPDATE SET
               turns = turns + 1, last_active = max(last_active, excluded.last_active)
             RETURNING sid";
        let sid = self.conn.prepare_cached(sql)?.query_row(
            params![
                turn.profile.as_str(),
                turn.session.as_str(),
                turn.created,
                turn.completed
            ],
            |row| row.get(0),
        )?;
        turns::insert(self.conn, sid, &turn, parent.as_deref())?;
        self.turn_ids = self.turn_ids.max(turn.id.0);
        self.count("last_turn", id)?;
        self.written.push(turn.id);
        self.fresh.insert(turn.id, Arc::new(turn));
        Ok(())
    }

    fn exists(&self, sql: &str, id: i64) -> Result<bool, Fail> {
        Ok(self.conn.prepare_cached(sql)?.exists([id])?)
    }

    /// Numbers are not given again, also when what had them is forgotten.
    fn count(&self, name: &str, value: i64) -> Done {
        let sql = "UPDATE meta SET value = ?2 WHERE key = ?1 AND value < ?2";
        self.conn
            .prepare_cached(sql)?
            .execute(params![name, value])?;
        Ok(())
    }

    fn add_next(&self, turn: TurnId, next: &NextState, at: Millis) -> Done {
        let messages = write_messages(&next.messages)?;
        let sql = "UPDATE sessions SET last_active = max(last_active, ?2)
             WHERE sid = (SELECT sid FROM turns WHERE id = ?1)";
        let changed = self
            .conn
            .prepare_cached(sql)?
            .execute(params![key(turn.0), at])?;
        if changed == 0 {
            return refuse(format!("{turn} is unknown"));
        }
        let sql = "INSERT INTO next_states (turn, seq, at, messages) VALUES
             (?1, (SELECT coalesce(max(seq), 0) + 1 FROM next_states WHERE turn = ?1), ?2, ?3)";
        self.conn
            .prepare_cached(sql)?
            .execute(params![key(turn.0), at, messages])?;
        let sql = "UPDATE turns SET waiting = 1 WHERE id = ?1 AND kind = 'main' AND mark IS NULL
             AND no_verdict IS NULL AND NOT EXISTS (SELECT 1 FROM verdicts WHERE turn = ?1)";
        self.conn.prepare_cached(sql)?.execute([key(turn.0)])?;
        if next.messages.iter().any(|m| m.role == Role::Tool) {
            self.enliven(turn, true)?;
        }
        Ok(())
    }

    fn add_verdict(&mut self, turn: TurnId, id: VerdictId, verdict: &Verdict, at: Millis) -> Done {
        let sql = "UPDATE turns SET waiting = 0 WHERE id = ?1";
        if self.conn.prepare_cached(sql)?.execute([key(turn.0)])? == 0 {
            return refuse(format!("{turn} is unknown"));
        }
        let taken = "SELECT 1 FROM verdicts WHERE id = ?1";
        let Some(number) = key(id.0).filter(|n| !matches!(self.exists(taken, *n), Ok(true))) else {
            return refuse(format!("verdict {} is stored already", id.0));
        };
        if verdict.reward.is_some_and(|r| !r.is_finite()) {
            return refuse(format!("the reward of verdict {} is not finite", id.0));
        }
        let sql = "INSERT INTO verdicts (id, turn, at, judge, source, reward, body)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)";
        self.conn.prepare_cached(sql)?.execute(params![
            number,
            key(turn.0),
            at,
            verdict.judge,
            verdict.source.as_str(),
            verdict.reward,
            verdict_body(verdict)?,
        ])?;
        self.enliven(turn, false)?;
        self.verdict_ids = self.verdict_ids.max(id.0);
        self.count("last_verdict", number)
    }

    /// The turn of a verdict of which it is not settled whether it becomes a sample.
    fn open_verdict(&self, id: VerdictId) -> Result<TurnId, Fail> {
        let sql = "SELECT turn, open FROM verdicts WHERE id = ?1";
        let mut statement = self.conn.prepare_cached(sql)?;
        let found: Option<(i64, bool)> = statement
            .query_row([key(id.0)], |row| Ok((row.get(0)?, row.get(1)?)))
            .optional()?;
        match found {
            None => refuse(format!("verdict {} is unknown", id.0)),
            Some((turn, true)) => Ok(TurnId(turn.cast_unsigned())),
            Some((turn, false)) => {
                let turn = TurnId(turn.cast_unsigned());
                refuse(format!("verdict {} on {turn} is settled already", id.0))
            }
        }
    }

    fn add_sample(&mut self, sample: &NewSample) -> Done {
        let Some(turn) = self.turn(sample.turn)? else {
            return refuse(format!("{} is unknown", sample.turn));
        };
        if self.open_verdict(sample.verdict)? != turn.id {
            return refuse(format!(
                "verdict {} is not on {}",
                sample.verdict.0, turn.id
            ));
        }
        if turn.kind == TurnKind::Side {
            return refuse(format!(
                "{} is a side turn and is never trained on",
                turn.id
            ));
        }
        if sample.reward.is_some_and(|r| !r.is_finite()) {
            return refuse(format!(
                "the reward of a sample of {} is not finite",
                turn.id
            ));
        }
        for column in [&sample.teacher_logprobs, &sample.student_logprobs]
            .into_iter()
            .flatten()
        {
            if column.len() != turn.reply.len() {
                let (is, should) = (column.len(), turn.reply.len());
                return refuse(format!(
                    "{is} log-probs for the {should} tokens of {}",
                    turn.id
                ));
            }
        }
        self.replace_pending(turn.id)?;
        self.insert_sample(sample, &turn)?;
        let sql = "UPDATE verdicts SET open = 0 WHERE id = ?1";
        self.conn
            .prepare_cached(sql)?
            .execute([key(sample.verdict.0)])?;
        Ok(())
    }

    fn replace_pending(&self, turn: TurnId) -> Done {
        // Left to itself SQLite looks through all that are pending.
        let sql =
            "SELECT id FROM samples INDEXED BY samples_turn WHERE turn = ?1 AND state = 'pending'";
        let mut statement = self.conn.prepare_cached(sql)?;
        let older: Vec<i64> = statement
            .query_map([key(turn.0)], |row| row.get(0))?
            .collect::<Result<_, _>>()?;
        for id in older {
            if !self.leases.contains(&SampleId(id.cast_unsigned())) {
                self.drop_row(id, "replaced")?;
            }
        }
        Ok(())
    }

    pub fn drop_row(&self, id: i64, why: &str) -> Done {
        let sql = "UPDATE samples SET state = 'dropped', why = ?2 WHERE id = ?1";
        self.conn.prepare_cached(sql)?.execute(params![id, why])?;
        Ok(())
    }

    fn insert_sample(&self, sample: &NewSample, turn: &Turn) -> Done {
        let sql = "UPDATE meta SET value = value + 1 WHERE key = 'last_sample' RETURNING value";
        let id: i64 = self
            .conn
            .prepare_cached(sql)?
            .query_row([], |row| row.get(0))?;
        let sql = "INSERT INTO samples (id, turn, verdict, state, reward, explicit, created, reply_hash, reply_len, hint,
               teacher_logprobs, student_logprobs, profile, group_id, group_size)
             VALUES (?1, ?2, ?3, 'pending', ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14)";
        self.conn.prepare_cached(sql)?.execute(params![
            id,
            key(turn.id.0),
            key(sample.verdict.0),
            sample.reward,
            sample.explicit,
            sample.created,
            Fnv::default().bytes(&u32_blob(turn.reply.tokens())).value(),
            turn.reply.len() as i64,
            sample.hint,
            sample.teacher_logprobs.as_deref().map(f32_blob),
            sample.student_logprobs.as_deref().map(f32_blob),
            turn.profile.as_str(),
            sample.group.as_ref().map(Group::id),
            sample.group.as_ref().map(|g| g.size() as i64),
        ])?;
        Ok(())
    }

    fn drop_sample(&self, id: SampleId, why: &str) -> Done {
        let sql = "SELECT state FROM samples WHERE id = ?1";
        let mut statement = self.conn.prepare_cached(sql)?;
        let state: Option<String> = statement
            .query_row([key(id.0)], |row| row.get(0))
            .optional()?;
        match (state.as_deref(), key(id.0)) {
            (Some("dropped"), _) => Ok(()),
            (Some("pending"), Some(row)) if !self.leases.contains(&id) => self.drop_row(row, why),
            (Some(_), _) => refuse(format!("sample {} is not pending", id.0)),
            (None, _) => refuse(format!("sample {} is unknown", id.0)),
        }
    }
}
