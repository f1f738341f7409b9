//! Queries about figures.

use crate::{
    error::{Fail, damaged},
    reads::{Read, unsigned},
    turns::key,
};
use chela_core::{Profile, StoreCounts, TurnKind};
use rusqlite::{OptionalExtension, params};
use std::collections::BTreeMap;

impl Read<'_> {
    /// All figures but the bytes.
    pub fn counts(&self, profile: Option<&Profile>) -> Result<StoreCounts, Fail> {
        let only = if profile.is_some() {
            "WHERE s.profile = ?1"
        } else {
            "WHERE ?1 IS NULL"
        };
        let name = profile.map(Profile::as_str);
        let sql = format!(
            "SELECT t.kind, t.reason, count(*) FROM turns t JOIN sessions s USING (sid) {only} GROUP BY 1, 2 ORDER BY 1, 2"
        );
        let mut turns = Vec::new();
        for row in self
            .conn
            .prepare_cached(&sql)?
            .query_map(params![name], |row| {
                Ok((row.get::<_, String>(0)?, row.get(1)?, unsigned(row, 2)?))
            })?
        {
            let (kind, reason, n) = row?;
            let kind = TurnKind::parse(&kind).ok_or_else(|| damaged("a turn", "its kind"))?;
            turns.push((kind, reason, n));
        }
        let of_turn = "JOIN turns t ON t.id = x.turn JOIN sessions s USING (sid)";
        let sql = format!(
            "SELECT x.state || iif(x.state = 'dropped', ':' || x.why, ''), count(*) FROM samples x {of_turn} {only} GROUP BY 1"
        );
        let mut samples: BTreeMap<String, u64> = self.groups(&sql, name)?.into_iter().collect();
        self.count_leased(profile, &mut samples)?;
        let sql = format!(
            "SELECT x.source, count(*) FROM verdicts x {of_turn} {only} GROUP BY 1 ORDER BY 1"
        );
        let verdicts = self.groups(&sql, name)?;
        let value = "CASE WHEN x.reward IS NULL THEN 'none' WHEN x.reward > 0 THEN 'good' WHEN x.reward < 0 THEN 'bad' ELSE 'neutral' END";
        let sql = format!(
            "SELECT x.judge, {value}, count(*) FROM verdicts x {of_turn} {only} GROUP BY 1, 2 ORDER BY 1, 2"
        );
        let mut statement = self.conn.prepare_cached(&sql)?;
        let judged = statement
            .query_map(params![name], |row| {
                Ok((row.get(0)?, row.get(1)?, unsigned(row, 2)?))
            })?
            .collect::<Result<_, _>>()?;
        let one = |sql: &str| -> Result<u64, Fail> {
            let mut statement = self.conn.prepare_cached(sql)?;
            Ok(statement.query_row(params![name], |row| unsigned(row, 0))?)
        };
        let waiting = format!(
            "SELECT count(*) FROM turns t JOIN sessions s USING (sid) {only} AND t.waiting = 1"
        );
        Ok(StoreCounts {
            turns,
            samples: samples.into_iter().collect(),
            verdicts,
            judged,
            unjudged: one(&waiting)?,
            sessions: one(&format!("SELECT count(*) FROM sessions s {only}"))?,
            bytes: 0,
        })
    }

    fn groups(&self, sql: &str, name: Option<&str>) -> Result<Vec<(String, u64)>, Fail> {
        let mut statement = self.conn.prepare_cached(sql)?;
        let rows =
            statement.query_map(params![name], |row| Ok((row.get(0)?, unsigned(row, 1)?)))?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    /// On disk a leased sample is pending.
    fn count_leased(
        &self,
        profile: Option<&Profile>,
        samples: &mut BTreeMap<String, u64>,
    ) -> Result<(), Fail> {
        let sql = "SELECT s.profile FROM samples x JOIN turns t ON t.id = x.turn JOIN sessions s USING (sid)
             WHERE x.id = ?1 AND x.state = 'pending'";
        let mut statement = self.conn.prepare_cached(sql)?;
        let mut leased = 0;
        for id in self.leases {
            let owner: Option<String> = statement
                .query_row([key(id.0)], |row| row.get(0))
                .optional()?;
            let counts = owner.is_some_and(|o| profile.is_none_or(|p| p.as_str() == o));
            leased += u64::from(counts);
        }
        if leased > 0 {
            let pending = samples
                .remove("pending")
                .unwrap_or(0)
                .saturating_sub(leased);
            if pending > 0 {
                samples.insert("pending".to_owned(), pending);
            }
            samples.insert("leased".to_owned(), leased);
        }
        Ok(())
    }
}
