//! Queries of the trainer: whom to look at, and samples with all that training reads.

use crate::{
    error::{Fail, damaged, reading},
    reads::{self, Read, limit, unsigned},
};
use chela_core::{HELD_OUT, LeasedSample, Profile, SampleId};
use rusqlite::{OptionalExtension, params};
use std::{collections::BTreeSet, sync::Arc};

impl Read<'_> {
    pub fn profiles_to_train(&self) -> Result<Vec<Profile>, Fail> {
        let mut names = BTreeSet::new();
        let mut at = String::new();
        // From one profile's first pending sample to the next profile's, so that a long queue costs nothing. The index is
        // named where SQLite's guess would be another one.
        let sql = "SELECT profile FROM samples INDEXED BY samples_pending WHERE state = 'pending' AND profile > ?1 ORDER BY profile LIMIT 1";
        let mut statement = self.conn.prepare_cached(sql)?;
        while let Some(name) = statement
            .query_row([&at], |row| row.get::<_, String>(0))
            .optional()
            .map_err(reading("the profile of a pending sample"))?
        {
            if self.has_pending(&name)? {
                names.insert(name.clone());
            }
            at = name;
        }
        let sql = "SELECT profile FROM versions WHERE state = 'candidate' UNION SELECT profile FROM replays";
        let mut statement = self.conn.prepare_cached(sql)?;
        for name in statement.query_map([], |row| row.get::<_, String>(0))? {
            names.insert(name.map_err(reading("the profile of a version"))?);
        }
        let read = |name: String| Profile::new(name).map_err(|e| damaged("a profile", e));
        names.into_iter().map(read).collect()
    }

    /// On disk a leased sample is pending.
    fn has_pending(&self, profile: &str) -> Result<bool, Fail> {
        let sql = "SELECT id FROM samples INDEXED BY samples_pending WHERE state = 'pending' AND profile = ?1 ORDER BY id LIMIT ?2";
        let mut statement = self.conn.prepare_cached(sql)?;
        let most = limit(self.leases.len() + 1);
        for id in statement.query_map(params![profile, most], |row| unsigned(row, 0))? {
            if !self.leases.contains(&SampleId(id?)) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    pub fn full_samples(&self, ids: &[SampleId]) -> Result<Vec<LeasedSample>, Fail> {
        let mut found = Vec::with_capacity(ids.len());
        for id in ids {
            let Some((sample, _)) = reads::sample(self.conn, *id)? else {
                continue;
            };
            found.push(LeasedSample {
                id: *id,
                turn: Arc::unwrap_or_clone(self.turn(sample.turn)?),
                sample,
            });
        }
        Ok(found)
    }

    pub fn held_out(
        &self,
        profile: &Profile,
        most: usize,
    ) -> Result<(Vec<LeasedSample>, u64), Fail> {
        // The reason as a literal, which is what the index is chosen by.
        let own = format!(
            "INDEXED BY samples_held_out WHERE state = 'dropped' AND why = '{HELD_OUT}' AND profile = ?1"
        );
        let sql = format!("SELECT count(*) FROM samples {own}");
        let mut statement = self.conn.prepare_cached(&sql)?;
        let count = statement.query_row([profile.as_str()], |row| unsigned(row, 0))?;
        let sql = format!("SELECT id FROM samples {own} ORDER BY id DESC LIMIT ?2");
        let mut statement = self.conn.prepare_cached(&sql)?;
        let newest = params![profile.as_str(), limit(most)];
        let ids = statement
            .query_map(newest, |row| Ok(SampleId(unsigned(row, 0)?)))?
            .collect::<Result<Vec<_>, _>>()?;
        Ok((self.full_samples(&ids)?, count))
    }
}
