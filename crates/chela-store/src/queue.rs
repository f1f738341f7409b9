//! Samples between their making and the step that uses them up; and forgetting.

use crate::{
    apply::Change,
    error::{Fail, refuse},
    reads,
    records::*,
    turns::key,
};
use chela_core::{
    LeasedSample, PolicyVersion, Profile, SampleId, SessionId, StepCommit, StoreError,
    VersionRecord, VersionState,
};
use rusqlite::{OptionalExtension, params};
use std::collections::HashSet;

impl Change<'_> {
    /// Takes samples out of the queue, all or none.
    pub fn lease(&mut self, samples: &[SampleId]) -> Result<Vec<LeasedSample>, Fail> {
        let mut taken = HashSet::new();
        let mut leased = Vec::with_capacity(samples.len());
        for id in samples {
            if self.leases.contains(id) || !taken.insert(*id) {
                return refuse(format!("sample {} is not pending", id.0));
            }
            let Some((sample, word)) = reads::sample(self.conn, *id)? else {
                return refuse(format!("sample {} is unknown", id.0));
            };
            if word != "pending" {
                return refuse(format!("sample {} is not pending", id.0));
            }
            let Some(turn) = self.turn(sample.turn)? else {
                let what = format!("sample {}: its turn {} is gone", id.0, sample.turn);
                return Err(StoreError::Damaged(what).into());
            };
            leased.push(LeasedSample {
                id: *id,
                sample,
                turn: (*turn).clone(),
            });
        }
        self.leases.extend(taken);
        Ok(leased)
    }

    /// Checks that all are leased and named once.
    fn all_leased(&self, samples: &[SampleId]) -> Result<HashSet<SampleId>, Fail> {
        let mut named = HashSet::new();
        for id in samples {
            if !self.leases.contains(id) || !named.insert(*id) {
                return refuse(format!("sample {} is not leased", id.0));
            }
        }
        Ok(named)
    }

    /// Puts samples back. One that a newer sample of its turn overtook meanwhile must not stand beside it.
    pub fn release(&mut self, samples: &[SampleId]) -> Result<(), Fail> {
        let named = self.all_leased(samples)?;
        let sql = "UPDATE samples SET state = 'dropped', why = 'replaced' WHERE id = ?1
             AND EXISTS (SELECT 1 FROM samples later WHERE later.turn = samples.turn AND later.id > ?1)";
        for id in samples {
            self.conn.prepare_cached(sql)?.execute([key(id.0)])?;
        }
        self.leases.retain(|id| !named.contains(id));
        Ok(())
    }

    /// Names the checkpoint and uses the samples up.
    pub fn commit_step(&mut self, step: &StepCommit) -> Result<(), Fail> {
        let record = &step.version;
        self.check_version(record)?;
        let dropped = step.dropped.iter().map(|(id, _)| *id);
        let all: Vec<SampleId> = record.samples.iter().copied().chain(dropped).collect();
        let named = self.all_leased(&all)?;
        for id in &all {
            self.check_owner(*id, &record.version)?;
        }
        self.insert_version(record)?;
        let sql = "UPDATE samples SET state = 'consumed', step = ?2 WHERE id = ?1";
        for id in &record.samples {
            let number = key(record.version.number);
            self.conn
                .prepare_cached(sql)?
                .execute(params![key(id.0), number])?;
        }
        for (id, why) in &step.dropped {
            let Some(row) = key(id.0) else { continue };
            self.drop_row(row, why)?;
        }
        self.leases.retain(|id| !named.contains(id));
        Ok(())
    }

    fn check_version(&self, record: &VersionRecord) -> Result<(), Fail> {
        let version = &record.version;
        let sql = "SELECT coalesce(max(number), 0) FROM versions WHERE profile = ?1";
        let profile = version.profile.as_str();
        let last: i64 = self
            .conn
            .prepare_cached(sql)?
            .query_row([profile], |r| r.get(0))?;
        if key(version.number).is_none_or(|n| n <= last) {
            return refuse(format!("version {version} is not greater than {last}"));
        }
        if record.state != VersionState::Candidate {
            return refuse(format!("version {version} does not begin as a candidate"));
        }
        let sql = "SELECT 1 FROM versions WHERE profile = ?1 AND number = ?2";
        let parent = params![profile, key(record.parent)];
        if record.parent != 0 && !self.conn.prepare_cached(sql)?.exists(parent)? {
            return refuse(format!(
                "the parent {} of {version} is unknown",
                record.parent
            ));
        }
        Ok(())
    }

    /// A profile's adapter learns only from that profile's turns.
    fn check_owner(&self, id: SampleId, version: &PolicyVersion) -> Result<(), Fail> {
        let sql = "SELECT s.profile FROM samples x JOIN turns t ON t.id = x.turn JOIN sessions s USING (sid)
             WHERE x.id = ?1";
        let mut statement = self.conn.prepare_cached(sql)?;
        let owner: Option<String> = statement
            .query_row([key(id.0)], |row| row.get(0))
            .optional()?;
        if owner.as_deref() != Some(version.profile.as_str()) {
            return refuse(format!(
                "sample {} is not of profile {}",
                id.0, version.profile
            ));
        }
        Ok(())
    }

    fn insert_version(&self, record: &VersionRecord) -> Result<(), Fail> {
        let (word, why) = write_state(&record.state);
        let receipt = record.receipt.as_ref();
        let sql = "INSERT INTO versions (profile, number, parent, steps, state, why, receipt_hash, receipt_engine,
               receipt_learner, checkpoint, samples, metrics, created)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)";
        self.conn.prepare_cached(sql)?.execute(params![
            record.version.profile.as_str(),
            key(record.version.number),
            key(record.parent),
            key(record.steps),
            word,
            why,
            receipt.map(|r| &r.weights_hash),
            receipt.map(|r| f32_blob(&r.engine_canary)),
            receipt.map(|r| f32_blob(&r.learner_canary)),
            record.checkpoint,
            u64_blob(record.samples.iter().map(|id| id.0)),
            write_metrics(&record.metrics)?,
            record.created,
        ])?;
        Ok(())
    }

    /// Removes a session with everything that hangs on it. Returns the number of its turns.
    pub fn forget(&mut self, profile: &Profile, session: &SessionId) -> Result<u64, Fail> {
        let sql = "SELECT sid FROM sessions WHERE profile = ?1 AND id = ?2";
        let names = [profile.as_str(), session.as_str()];
        let sid: Option<i64> = self
            .conn
            .prepare_cached(sql)?
            .query_row(names, |row| row.get(0))
            .optional()?;
        let Some(sid) = sid else {
            return Err(StoreError::NotFound(format!("session {session}")).into());
        };
        let sql = "SELECT id FROM samples WHERE state = 'pending'
             AND turn IN (SELECT id FROM turns WHERE sid = ?1)";
        let mut statement = self.conn.prepare_cached(sql)?;
        let pending: Vec<i64> = statement
            .query_map([sid], |row| row.get(0))?
            .collect::<Result<_, _>>()?;
        if pending
            .iter()
            .any(|id| self.leases.contains(&SampleId(id.cast_unsigned())))
        {
            return refuse(format!(
                "samples of session {session} are in a step being made"
            ));
        }
        for table in ["samples", "verdicts", "next_states"] {
            let sql =
                format!("DELETE FROM {table} WHERE turn IN (SELECT id FROM turns WHERE sid = ?1)");
            self.conn.prepare_cached(&sql)?.execute([sid])?;
        }
        let turns = self
            .conn
            .prepare_cached("DELETE FROM turns WHERE sid = ?1")?
            .execute([sid])?;
        self.conn
            .prepare_cached("DELETE FROM sessions WHERE sid = ?1")?
            .execute([sid])?;
        self.fresh
            .retain(|_, t| (&t.profile, &t.session) != (profile, session));
        self.forgot = true;
        Ok(turns as u64)
    }
}
