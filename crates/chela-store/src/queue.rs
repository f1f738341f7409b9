//! Samples between their making and the step that uses them up.

use crate::{
    apply::Change,
    error::{Fail, refuse},
    reads,
    turns::key,
};
use chela_core::{
    LeasedSample, PolicyVersion, SampleId, StepCommit, StoreError, VersionOrigin, VersionRecord,
};
use rusqlite::params;
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
        let leased: Vec<SampleId> = match record.origin {
            VersionOrigin::Replayed(_) => dropped.collect(),
            _ => record.samples.iter().copied().chain(dropped).collect(),
        };
        let named = self.all_leased(&leased)?;
        for id in &leased {
            self.check_owner(*id, &record.version)?;
        }
        if let VersionOrigin::Replayed(of) = record.origin {
            self.strike(&record.version, of)?;
            self.move_samples(record, of)?;
        } else {
            self.consume(record)?;
        }
        self.insert_version(record)?;
        for (id, why) in &step.dropped {
            let Some(row) = key(id.0) else { continue };
            self.drop_row(row, why)?;
        }
        self.leases.retain(|id| !named.contains(id));
        Ok(())
    }

    fn consume(&self, record: &VersionRecord) -> Result<(), Fail> {
        let sql = "UPDATE samples SET state = 'consumed', step = ?2 WHERE id = ?1";
        for id in &record.samples {
            let number = key(record.version.number);
            self.conn
                .prepare_cached(sql)?
                .execute(params![key(id.0), number])?;
        }
        Ok(())
    }

    /// What step `of` consumed counts as the new version's: it was trained on once, and is once more.
    fn move_samples(&self, record: &VersionRecord, of: u64) -> Result<(), Fail> {
        let sql = "UPDATE samples SET step = ?4 WHERE id = ?1 AND profile = ?2 AND state = 'consumed' AND step = ?3";
        let version = &record.version;
        for id in &record.samples {
            let (profile, number) = (version.profile.as_str(), key(version.number));
            let moved = self.conn.prepare_cached(sql)?.execute(params![
                key(id.0),
                profile,
                key(of),
                number
            ])?;
            if moved == 0 {
                return refuse(format!("sample {} was not consumed by step {of}", id.0));
            }
        }
        Ok(())
    }

    /// A profile's adapter learns only from that profile's turns.
    fn check_owner(&self, id: SampleId, version: &PolicyVersion) -> Result<(), Fail> {
        let sql = "SELECT 1 FROM samples WHERE id = ?1 AND profile = ?2";
        let own = params![key(id.0), version.profile.as_str()];
        if self.conn.prepare_cached(sql)?.exists(own)? {
            return Ok(());
        }
        refuse(format!(
            "sample {} is not of profile {}",
            id.0, version.profile
        ))
    }
}
