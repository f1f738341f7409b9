//! The registry: versions of a profile's weights, their numbers, and steps that are to be made again.

use crate::{
    apply::Change,
    error::{Fail, reading, refuse},
    reads::{Read, unsigned},
    records::*,
    turns::key,
};
use chela_core::{
    GateReport, Millis, PolicyVersion, Profile, Receipt, SampleId, VersionRecord, VersionState,
};
use rusqlite::{Connection, OptionalExtension, Row, params, types::Value};

type Done = Result<(), Fail>;

/// The last number given to a profile; 0 = none.
pub(crate) fn last_version(conn: &Connection, profile: &Profile) -> Result<u64, Fail> {
    let sql = "SELECT last FROM numbers WHERE profile = ?1";
    let mut statement = conn.prepare_cached(sql)?;
    let last = statement.query_row([profile.as_str()], |row| unsigned(row, 0));
    Ok(last.optional()?.unwrap_or(0))
}

/// Steps to be made again, in order.
pub(crate) fn replays(conn: &Connection, profile: &Profile) -> Result<Vec<u64>, Fail> {
    let sql = "SELECT number FROM replays WHERE profile = ?1 ORDER BY position";
    let mut statement = conn.prepare_cached(sql)?;
    let numbers = statement.query_map([profile.as_str()], |row| unsigned(row, 0))?;
    Ok(numbers.collect::<Result<_, _>>()?)
}

/// The word of a version's state; `None` = there is no such version.
pub(crate) fn state_word(
    conn: &Connection,
    profile: &Profile,
    number: u64,
) -> Result<Option<String>, Fail> {
    let sql = "SELECT state FROM versions WHERE profile = ?1 AND number = ?2";
    let mut statement = conn.prepare_cached(sql)?;
    let word = statement.query_row(params![profile.as_str(), key(number)], |row| row.get(0));
    Ok(word.optional()?)
}

impl Change<'_> {
    /// What is forgotten has no weights any more: nothing can be said of it that would bring it back.
    fn must_be_there(&self, version: &PolicyVersion) -> Done {
        match state_word(self.conn, &version.profile, version.number)?.as_deref() {
            None => refuse(format!("version {version} is unknown")),
            Some("forgotten") => refuse(format!("version {version} is forgotten")),
            Some(_) => Ok(()),
        }
    }

    pub fn set_version(
        &self,
        version: &PolicyVersion,
        state: &VersionState,
        receipt: Option<&Receipt>,
        at: Millis,
    ) -> Done {
        let (profile, number) = (version.profile.as_str(), key(version.number));
        let served = *state == VersionState::Served;
        // The base has no record; serving it only takes the place of what was served.
        let base = version.number == 0 && served && receipt.is_none();
        if !base {
            self.must_be_there(version)?;
        }
        if served {
            let sql = "UPDATE versions SET state = 'superseded', left_at = ?3
                 WHERE profile = ?1 AND state = 'served' AND number <> ?2";
            self.conn
                .prepare_cached(sql)?
                .execute(params![profile, number, at])?;
        }
        let (word, why) = state.words();
        let sql = "UPDATE versions SET
               served_at = iif(?3 = 'served', ?5, served_at),
               left_at = iif(?3 = 'served', NULL, iif(state = 'served', ?5, left_at)),
               state = ?3, why = ?4, receipt_hash = coalesce(?6, receipt_hash),
               receipt_engine = coalesce(?7, receipt_engine), receipt_learner = coalesce(?8, receipt_learner)
             WHERE profile = ?1 AND number = ?2";
        self.conn.prepare_cached(sql)?.execute(params![
            profile,
            number,
            word,
            why,
            at,
            receipt.map(|r| &r.weights_hash),
            receipt.map(|r| f32_blob(&r.engine_canary)),
            receipt.map(|r| f32_blob(&r.learner_canary)),
        ])?;
        Ok(())
    }

    pub fn set_gate(&self, version: &PolicyVersion, report: &GateReport) -> Done {
        self.must_be_there(version)?;
        let sql = "UPDATE versions SET gate = ?3 WHERE profile = ?1 AND number = ?2";
        let name = version.profile.as_str();
        let gate = write_gate(report)?;
        self.conn
            .prepare_cached(sql)?
            .execute(params![name, key(version.number), gate])?;
        Ok(())
    }

    /// Drops what a rejected version's step consumed.
    pub fn unlearn(&self, version: &PolicyVersion, why: &str) -> Done {
        let sql = "UPDATE samples INDEXED BY samples_step SET state = 'dropped', why = ?3
             WHERE profile = ?1 AND step = ?2 AND state = 'consumed'";
        let name = version.profile.as_str();
        self.conn
            .prepare_cached(sql)?
            .execute(params![name, key(version.number), why])?;
        Ok(())
    }

    /// Takes a step off the list of those to be made again.
    pub fn skip_replay(&self, version: &PolicyVersion) -> Done {
        let sql = "DELETE FROM replays WHERE profile = ?1 AND number = ?2";
        let name = version.profile.as_str();
        let gone = self
            .conn
            .prepare_cached(sql)?
            .execute(params![name, key(version.number)])?;
        if gone == 0 {
            return refuse(format!("{version} is not to be made again"));
        }
        Ok(())
    }

    /// The same for a step that was made again; it must come first.
    pub fn strike(&self, version: &PolicyVersion, of: u64) -> Done {
        if replays(self.conn, &version.profile)?.first() != Some(&of) {
            return refuse(format!(
                "step {of} of {} is not the next to be made again",
                version.profile
            ));
        }
        self.skip_replay(&PolicyVersion {
            number: of,
            ..version.clone()
        })
    }

    /// Puts steps in front of those that are to be made again already: these stand on them.
    pub fn replay_first(&self, profile: &Profile, numbers: &[u64]) -> Done {
        let mut all = numbers.to_vec();
        let before = replays(self.conn, profile)?;
        all.extend(before.into_iter().filter(|n| !numbers.contains(n)));
        let name = profile.as_str();
        self.conn
            .prepare_cached("DELETE FROM replays WHERE profile = ?1")?
            .execute([name])?;
        let sql = "INSERT INTO replays VALUES (?1, ?2, ?3)";
        for (position, number) in all.into_iter().enumerate() {
            self.conn
                .prepare_cached(sql)?
                .execute(params![name, position as i64, key(number)])?;
        }
        Ok(())
    }

    /// Refuses a version that must not follow on what is there.
    pub fn check_version(&self, record: &VersionRecord) -> Done {
        let version = &record.version;
        let last = last_version(self.conn, &version.profile)?;
        if version.number <= last || key(version.number).is_none() {
            return refuse(format!("version {version} is not greater than {last}"));
        }
        if record.state != VersionState::Candidate {
            return refuse(format!("version {version} does not begin as a candidate"));
        }
        if record.parent != 0 {
            let word = state_word(self.conn, &version.profile, record.parent)?;
            if word.is_none_or(|w| w == "forgotten") {
                return refuse(format!(
                    "the parent {} of {version} is unknown",
                    record.parent
                ));
            }
        }
        Ok(())
    }

    pub fn insert_version(&self, record: &VersionRecord) -> Done {
        let (word, why) = record.state.words();
        let (origin, value) = write_origin(&record.origin);
        let receipt = record.receipt.as_ref();
        let name = record.version.profile.as_str();
        let sql = "INSERT INTO versions (profile, number, parent, steps, state, why, receipt_hash, receipt_engine,
               receipt_learner, checkpoint, samples, metrics, created, origin, origin_value, gate, recipe, served_at,
               left_at)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19)";
        self.conn.prepare_cached(sql)?.execute(params![
            name,
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
            origin,
            value,
            record.gate.as_ref().map(write_gate).transpose()?,
            record.recipe,
            record.served_at,
            record.left_at,
        ])?;
        self.conn
            .prepare_cached("INSERT OR REPLACE INTO numbers VALUES (?1, ?2)")?
            .execute(params![name, key(record.version.number)])?;
        Ok(())
    }
}

impl Read<'_> {
    pub fn versions(&self, profile: &Profile) -> Result<Vec<VersionRecord>, Fail> {
        let sql = "SELECT number, parent, steps, state, why, receipt_hash, receipt_engine, receipt_learner, checkpoint,
               samples, metrics, created, origin, origin_value, gate, recipe, served_at, left_at
             FROM versions WHERE profile = ?1 ORDER BY number";
        let mut statement = self.conn.prepare_cached(sql)?;
        let rows = statement.query_map([profile.as_str()], RawVersion::of)?;
        let mut versions = Vec::new();
        for row in rows {
            let raw = row.map_err(reading(format!("a version of {profile}")))?;
            versions.push(raw.read(profile)?);
        }
        Ok(versions)
    }

    pub fn paused(&self, profile: &Profile) -> Result<Option<String>, Fail> {
        let sql = "SELECT why FROM pauses WHERE profile = ?1";
        let mut statement = self.conn.prepare_cached(sql)?;
        Ok(statement
            .query_row([profile.as_str()], |row| row.get(0))
            .optional()?)
    }
}

struct RawVersion {
    state: String,
    why: Option<String>,
    receipt: Option<(String, Vec<u8>, Vec<u8>)>,
    samples: Vec<u8>,
    metrics: String,
    origin: (String, Value),
    gate: Option<String>,
    record: VersionRecord,
}

impl RawVersion {
    fn of(row: &Row<'_>) -> rusqlite::Result<Self> {
        let hash: Option<String> = row.get(5)?;
        let receipt = match hash {
            Some(hash) => Some((hash, row.get(6)?, row.get(7)?)),
            None => None,
        };
        let version = PolicyVersion {
            number: unsigned(row, 0)?,
            profile: Profile::default(),
        };
        Ok(Self {
            state: row.get(3)?,
            why: row.get(4)?,
            receipt,
            samples: row.get(9)?,
            metrics: row.get(10)?,
            origin: (row.get(12)?, row.get(13)?),
            gate: row.get(14)?,
            record: VersionRecord {
                version,
                parent: unsigned(row, 1)?,
                steps: unsigned(row, 2)?,
                checkpoint: row.get(8)?,
                created: row.get(11)?,
                recipe: row.get(15)?,
                served_at: row.get(16)?,
                left_at: row.get(17)?,
                ..VersionRecord::default()
            },
        })
    }

    fn read(self, profile: &Profile) -> Result<VersionRecord, Fail> {
        let version = PolicyVersion {
            profile: profile.clone(),
            ..self.record.version
        };
        let what = format!("version {version}");
        let receipt = match self.receipt {
            None => None,
            Some((weights_hash, engine, learner)) => Some(Receipt {
                weights_hash,
                engine_canary: read_f32s(&what, &engine)?,
                learner_canary: read_f32s(&what, &learner)?,
            }),
        };
        let gate = self.gate.map(|text| read_gate(&what, &text));
        Ok(VersionRecord {
            version,
            state: read_state(&what, &self.state, self.why)?,
            origin: read_origin(&what, &self.origin.0, self.origin.1)?,
            receipt,
            gate: gate.transpose()?,
            samples: read_u64s(&what, &self.samples)?
                .into_iter()
                .map(SampleId)
                .collect(),
            metrics: read_metrics(&what, &self.metrics)?,
            ..self.record
        })
    }
}
