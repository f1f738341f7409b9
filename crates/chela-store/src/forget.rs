//! Forgetting: what goes with a turn, a session or a profile, and its removal.

use crate::{
    apply::Change,
    error::{Fail, refuse},
    pieces::Pieces,
    reads::unsigned,
    records::{read_u64s, u64_blob},
    turns::key,
    versions::state_word,
};
use chela_core::{
    Forget, ForgetPlan, ForgetTarget, Profile, SampleId, SessionId, StoreError, TurnId,
};
use rusqlite::{Connection, OptionalExtension, ToSql, params};
use std::collections::{BTreeMap, HashSet};

/// What a turn says whose next state was forgotten, so that it is not asked about again.
const WHY_UNJUDGED: &str = "what followed was forgotten";

/// The rows that go, by key; and the plan that says so.
#[derive(Default)]
pub(crate) struct Scope {
    pub plan: ForgetPlan,
    turns: Vec<i64>,
    unjudged: Vec<i64>,
    sessions: Vec<i64>,
    /// The session that loses turns and stays.
    smaller: Option<i64>,
    verdicts: Vec<i64>,
    samples: Vec<i64>,
}

/// What was removed, and what of it must not be found again.
pub(crate) struct Forgotten {
    pub plan: ForgetPlan,
    pub pieces: Vec<Vec<u8>>,
}

fn ids(conn: &Connection, sql: &str, values: &[&dyn ToSql]) -> Result<Vec<i64>, Fail> {
    let mut statement = conn.prepare_cached(sql)?;
    let rows = statement.query_map(values, |row| row.get(0))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

impl Scope {
    /// What goes with the target. `NotFound` for what is not there.
    pub fn of(conn: &Connection, target: &ForgetTarget) -> Result<Self, Fail> {
        let mut scope = match target {
            ForgetTarget::Turn(profile, turn) => Self::of_turn(conn, profile, *turn)?,
            ForgetTarget::Session(profile, session) => Self::of_session(conn, profile, session)?,
            ForgetTarget::Profile(profile) => Self::of_profile(conn, profile)?,
        };
        scope.add_verdicts(conn)?;
        scope.add_samples(conn, target.profile())?;
        let turn = |id: &i64| TurnId(id.cast_unsigned());
        scope.plan.turns = scope.turns.iter().map(turn).collect();
        scope.plan.unjudged = scope.unjudged.iter().map(turn).collect();
        scope.plan.sessions = scope.sessions.len() as u64;
        scope.plan.verdicts = scope.verdicts.len() as u64;
        scope.plan.samples = scope.samples.len() as u64;
        Ok(scope)
    }

    /// Turns of one parent have the same prompt when they share as much with it and add the same.
    fn of_turn(conn: &Connection, profile: &Profile, turn: TurnId) -> Result<Self, Fail> {
        let sql = "SELECT t.sid, t.parent FROM turns t JOIN sessions s USING (sid) WHERE t.id = ?1 AND s.profile = ?2";
        let found: Option<(i64, Option<i64>)> = conn
            .prepare_cached(sql)?
            .query_row(params![key(turn.0), profile.as_str()], |row| {
                Ok((row.get(0)?, row.get(1)?))
            })
            .optional()?;
        let Some((sid, parent)) = found else {
            return Err(StoreError::NotFound(turn.to_string()).into());
        };
        let sql = "WITH RECURSIVE gone (id) AS (
               SELECT o.id FROM turns t JOIN turns o INDEXED BY turns_session
                 ON o.sid = t.sid AND o.parent IS t.parent AND o.prompt_shared = t.prompt_shared AND o.prompt = t.prompt
                 WHERE t.id = ?1
               UNION SELECT c.id FROM gone JOIN turns c ON c.parent = gone.id)
             SELECT id FROM gone ORDER BY id";
        let turns = ids(conn, sql, params![key(turn.0)])?;
        let sql = "SELECT count(*) FROM turns WHERE sid = ?1";
        let all = conn
            .prepare_cached(sql)?
            .query_row([sid], |row| unsigned(row, 0))?;
        let whole = turns.len() as u64 == all;
        Ok(Self {
            turns,
            unjudged: parent.into_iter().collect(),
            sessions: whole.then_some(sid).into_iter().collect(),
            smaller: (!whole).then_some(sid),
            ..Self::default()
        })
    }

    fn of_session(conn: &Connection, profile: &Profile, session: &SessionId) -> Result<Self, Fail> {
        let sql = "SELECT sid FROM sessions WHERE profile = ?1 AND id = ?2";
        let sessions = ids(conn, sql, params![profile.as_str(), session.as_str()])?;
        let Some(sid) = sessions.first().copied() else {
            return Err(StoreError::NotFound(format!("session {session}")).into());
        };
        let sql = "SELECT id FROM turns WHERE sid = ?1 ORDER BY id";
        Ok(Self {
            turns: ids(conn, sql, params![sid])?,
            sessions,
            ..Self::default()
        })
    }

    fn of_profile(conn: &Connection, profile: &Profile) -> Result<Self, Fail> {
        let name = profile.as_str();
        let known = "SELECT 1 FROM sessions WHERE profile = ?1 UNION ALL SELECT 1 FROM versions WHERE profile = ?1
             UNION ALL SELECT 1 FROM pauses WHERE profile = ?1";
        if !conn.prepare_cached(known)?.exists([name])? {
            return Err(StoreError::NotFound(format!("profile {profile}")).into());
        }
        let sql = "SELECT t.id FROM sessions s JOIN turns t USING (sid) WHERE s.profile = ?1 ORDER BY t.id";
        let turns = ids(conn, sql, params![name])?;
        let sql = "SELECT sid FROM sessions WHERE profile = ?1";
        Ok(Self {
            turns,
            sessions: ids(conn, sql, params![name])?,
            ..Self::default()
        })
    }

    fn add_verdicts(&mut self, conn: &Connection) -> Result<(), Fail> {
        let sql = "SELECT id FROM verdicts WHERE turn = ?1";
        for turn in &self.turns {
            self.verdicts.extend(ids(conn, sql, params![turn])?);
        }
        // What a person or client said of a turn that stays does not come from what followed it.
        let sql = "SELECT id FROM verdicts WHERE turn = ?1 AND source <> 'explicit'";
        for turn in &self.unjudged {
            self.verdicts.extend(ids(conn, sql, params![turn])?);
        }
        Ok(())
    }

    fn add_samples(&mut self, conn: &Connection, profile: &Profile) -> Result<(), Fail> {
        let sql = "SELECT id, state, step FROM samples WHERE verdict = ?1";
        let mut statement = conn.prepare_cached(sql)?;
        let mut there = BTreeMap::new();
        for verdict in &self.verdicts {
            let found = statement
                .query_row([verdict], |row| {
                    let step: Option<i64> = row.get(2)?;
                    Ok((row.get(0)?, row.get::<_, String>(1)?, step))
                })
                .optional()?;
            let Some((id, state, step)) = found else {
                continue;
            };
            self.samples.push(id);
            let Some(number) = step.map(i64::cast_unsigned) else {
                continue;
            };
            // One that was dropped again taught a rejected version, whose weights may still be there.
            if state == "consumed" || is_there(conn, profile, number, &mut there)? {
                let sample = SampleId(id.cast_unsigned());
                self.plan.trained.push((sample, number));
            }
        }
        self.plan.trained.sort_unstable_by_key(|(id, _)| id.0);
        Ok(())
    }
}

fn is_there(
    conn: &Connection,
    profile: &Profile,
    number: u64,
    known: &mut BTreeMap<u64, bool>,
) -> Result<bool, Fail> {
    if let Some(there) = known.get(&number) {
        return Ok(*there);
    }
    let word = state_word(conn, profile, number)?;
    let there = word.is_some_and(|w| w != "forgotten");
    known.insert(number, there);
    Ok(there)
}

impl Change<'_> {
    /// Removes the target with everything that hangs on it.
    pub fn forget(&mut self, forget: &Forget) -> Result<Forgotten, Fail> {
        let scope = Scope::of(self.conn, &forget.target)?;
        self.check_forget(forget, &scope)?;
        let profile = forget.target.profile();
        let mut pieces = Pieces::default();
        // A turn may go before the ones that stand on it.
        self.conn.execute_batch("PRAGMA defer_foreign_keys = ON")?;
        self.remove_samples(&scope, &mut pieces)?;
        self.remove_verdicts(&scope, &mut pieces)?;
        self.remove_next_states(&scope, &mut pieces)?;
        for turn in &scope.unjudged {
            self.unfollow(profile, *turn)?;
            let sql = "UPDATE turns SET no_verdict = ?2, waiting = 0 WHERE id = ?1";
            self.conn
                .prepare_cached(sql)?
                .execute(params![turn, WHY_UNJUDGED])?;
        }
        self.remove_turns(profile, &scope, &mut pieces)?;
        self.remove_sessions(&scope, &mut pieces)?;
        let sql = "UPDATE sessions SET turns = turns - ?2 WHERE sid = ?1";
        let less = params![scope.smaller, scope.turns.len() as i64];
        self.conn.prepare_cached(sql)?.execute(less)?;
        self.unname(profile, &scope)?;
        self.forget_versions(forget)?;
        let sql = "UPDATE meta SET value = 1 WHERE key = 'truncate_owed'";
        self.conn.prepare_cached(sql)?.execute([])?;
        self.forgot = true;
        Ok(Forgotten {
            plan: scope.plan,
            pieces: pieces.into_vec(),
        })
    }

    fn check_forget(&self, forget: &Forget, scope: &Scope) -> Result<(), Fail> {
        let leased = |id: &i64| self.leases.contains(&SampleId(id.cast_unsigned()));
        if scope.samples.iter().any(leased) {
            return refuse("samples of it are in a step being made; try again when it is over");
        }
        let profile = forget.target.profile();
        let mut there = BTreeMap::new();
        for (_, number) in &scope.plan.trained {
            if !forget.versions.contains(number)
                && is_there(self.conn, profile, *number, &mut there)?
            {
                let why = format!("version {number} learnt from it since; ask again what goes");
                return refuse(why);
            }
        }
        if let ForgetTarget::Profile(_) = forget.target {
            return Ok(());
        }
        let sql = "SELECT number FROM versions WHERE profile = ?1 AND state = 'served'";
        let served = ids(self.conn, sql, params![profile.as_str()])?;
        let mut served = served.into_iter().map(i64::cast_unsigned);
        let goes = served.any(|n| forget.versions.contains(&n));
        let way_back = match forget.back_to {
            None => !goes,
            Some(0) => goes,
            Some(n) => {
                goes && !forget.versions.contains(&n)
                    && is_there(self.conn, profile, n, &mut there)?
            }
        };
        if !way_back {
            return refuse(
                "what is served has changed since, or there is no way back; ask again what goes",
            );
        }
        Ok(())
    }

    fn remove_samples(&self, scope: &Scope, pieces: &mut Pieces) -> Result<(), Fail> {
        let sql = "DELETE FROM samples WHERE id = ?1 RETURNING hint";
        let mut statement = self.conn.prepare_cached(sql)?;
        for id in &scope.samples {
            let hint: Option<String> = statement.query_row([id], |row| row.get(0))?;
            hint.iter().for_each(|hint| pieces.text(hint.as_bytes()));
        }
        Ok(())
    }

    fn remove_verdicts(&self, scope: &Scope, pieces: &mut Pieces) -> Result<(), Fail> {
        let sql = "DELETE FROM verdicts WHERE id = ?1 RETURNING body";
        let mut statement = self.conn.prepare_cached(sql)?;
        for id in &scope.verdicts {
            let body: String = statement.query_row([id], |row| row.get(0))?;
            pieces.json(&body);
        }
        Ok(())
    }

    fn remove_next_states(&self, scope: &Scope, pieces: &mut Pieces) -> Result<(), Fail> {
        let sql = "DELETE FROM next_states WHERE turn = ?1 RETURNING messages";
        let mut statement = self.conn.prepare_cached(sql)?;
        for turn in scope.turns.iter().chain(&scope.unjudged) {
            for messages in statement.query_map([turn], |row| row.get::<_, String>(0))? {
                pieces.json(&messages?);
            }
        }
        Ok(())
    }

    fn remove_turns(
        &self,
        profile: &Profile,
        scope: &Scope,
        pieces: &mut Pieces,
    ) -> Result<(), Fail> {
        let sql =
            "DELETE FROM turns WHERE id = ?1 RETURNING messages, answer, tools, prompt, reply";
        let mut statement = self.conn.prepare_cached(sql)?;
        let sql = "DELETE FROM live WHERE profile = ?1 AND turn = ?2";
        let mut live = self.conn.prepare_cached(sql)?;
        for turn in &scope.turns {
            statement.query_row([turn], |row| {
                for column in 0..3 {
                    let text: Option<String> = row.get(column)?;
                    text.iter().for_each(|text| pieces.json(text));
                }
                for column in 3..5 {
                    pieces.tokens(row.get_ref(column)?.as_blob()?);
                }
                Ok(())
            })?;
            live.execute(params![profile.as_str(), turn])?;
        }
        Ok(())
    }

    fn remove_sessions(&self, scope: &Scope, pieces: &mut Pieces) -> Result<(), Fail> {
        let sql = "DELETE FROM sessions WHERE sid = ?1 RETURNING id, task";
        let mut statement = self.conn.prepare_cached(sql)?;
        for sid in &scope.sessions {
            statement.query_row([sid], |row| {
                pieces.text(row.get_ref(0)?.as_str()?.as_bytes());
                let task: Option<String> = row.get(1)?;
                task.iter().for_each(|task| pieces.text(task.as_bytes()));
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Versions no longer name samples that are gone.
    fn unname(&self, profile: &Profile, scope: &Scope) -> Result<(), Fail> {
        let gone: HashSet<u64> = scope.samples.iter().map(|id| id.cast_unsigned()).collect();
        if gone.is_empty() {
            return Ok(());
        }
        let sql = "SELECT number, samples FROM versions WHERE profile = ?1";
        let mut statement = self.conn.prepare_cached(sql)?;
        let all: Vec<(i64, Vec<u8>)> = statement
            .query_map([profile.as_str()], |row| Ok((row.get(0)?, row.get(1)?)))?
            .collect::<Result<_, _>>()?;
        for (number, blob) in all {
            let named = read_u64s(&format!("version {profile}@{number}"), &blob)?;
            if named.iter().any(|id| gone.contains(id)) {
                let left = u64_blob(named.into_iter().filter(|id| !gone.contains(id)));
                let sql = "UPDATE versions SET samples = ?3 WHERE profile = ?1 AND number = ?2";
                self.conn
                    .prepare_cached(sql)?
                    .execute(params![profile.as_str(), number, left])?;
            }
        }
        Ok(())
    }

    fn forget_versions(&self, forget: &Forget) -> Result<(), Fail> {
        let profile = forget.target.profile();
        let name = profile.as_str();
        if let ForgetTarget::Profile(_) = forget.target {
            for table in ["versions", "pauses", "replays"] {
                let sql = format!("DELETE FROM {table} WHERE profile = ?1");
                self.conn.prepare_cached(&sql)?.execute([name])?;
            }
            return Ok(());
        }
        let sql = "UPDATE versions SET left_at = iif(state = 'served', ?3, left_at), state = 'forgotten', why = ?4,
               checkpoint = NULL, receipt_hash = NULL, receipt_engine = NULL, receipt_learner = NULL, gate = NULL
             WHERE profile = ?1 AND number = ?2";
        for number in &forget.versions {
            let values = params![name, key(*number), forget.at, forget.why];
            self.conn.prepare_cached(sql)?.execute(values)?;
        }
        if let Some(number) = forget.back_to {
            let sql =
                "UPDATE versions SET state = 'served', why = NULL, served_at = ?3, left_at = NULL
                 WHERE profile = ?1 AND number = ?2";
            let values = params![name, key(number), forget.at];
            self.conn.prepare_cached(sql)?.execute(values)?;
        }
        self.replay_first(profile, &forget.replay)
    }
}
