//! The store itself: opens the folder, hands writes to the writer and reads to the readers.

use crate::{
    apply::Change,
    error::Fail,
    forget::Scope,
    proof::Forgetting,
    readers::Readers,
    reads::Read,
    schema,
    shared::Shared,
    versions, wipe,
    writer::{Order, Work, Writer},
};
use chela_core::{
    BoxFuture, Event, Forget, ForgetPlan, ForgetProof, ForgetTarget, LeasedSample, LiveTurn,
    Millis, OpenVerdict, PendingSample, Profile, SampleId, SessionId, SessionRecord, StepCommit,
    StoreCounts, StoreError, TrajectoryStore, TurnId, TurnStory, VerdictId, VersionRecord,
};
use futures_channel::oneshot;
use rusqlite::{Connection, params};
use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Sender, channel},
    },
    thread::JoinHandle,
    time::Instant,
};

/// The file's name in the data folder. Beside it SQLite keeps `-wal` and `-shm`, and a copy from before each migration.
pub const DATABASE: &str = "chela.db";

/// Transactions that may wait; more are refused, so that a slow disk cannot fill the memory.
const MOST_WAITING: usize = 16_384;

/// How a store is opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreOptions {
    /// Largest size of the database file in bytes; a write that would exceed it is refused as on a full disk.
    pub max_bytes: Option<u64>,
}

/// A [`TrajectoryStore`] in one SQLite file. Whoever opens it for writing must be the only process to do so.
pub struct Store {
    path: PathBuf,
    shared: Arc<Shared>,
    readers: Readers,
    orders: Option<Sender<Order>>,
    writer: Option<JoinHandle<()>>,
}

impl Store {
    /// Opens or creates the store in a folder, which is created too. Samples leased before are pending again.
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        Self::open_with(dir, &StoreOptions::default())
    }

    /// The same with options.
    pub fn open_with(dir: &Path, options: &StoreOptions) -> Result<Self, StoreError> {
        let unusable = |e: &dyn std::fmt::Display| {
            StoreError::Unusable(format!("the data folder {}: {e}", dir.display()))
        };
        std::fs::create_dir_all(dir).map_err(|e| unusable(&e))?;
        let path = dir.join(DATABASE);
        let conn = schema::open_writer(&path)?;
        prepare(&conn, options).map_err(|e| unusable(&e))?;
        let shared = Arc::new(Shared::default());
        let page = conn.pragma_query_value(None, "page_size", |row| row.get::<_, u32>(0));
        shared.set_page_size(page.map_err(|e| unusable(&e))? as usize);
        let truncate = !finish_forgetting(&conn, &path, shared.page_size())?;
        let readers = Readers::new(path.clone())?;
        seed(&readers, &shared)?;
        let (orders, waiting) = channel();
        let writer = Writer {
            conn,
            path: path.clone(),
            shared: shared.clone(),
            orders: waiting,
            held: None,
            truncate,
            unproven: 0,
            tried: Instant::now(),
        };
        let writer = std::thread::Builder::new()
            .name("chela-store".to_owned())
            .spawn(move || writer.run())
            .map_err(|e| unusable(&e))?;
        Ok(Self {
            path,
            shared,
            readers,
            orders: Some(orders),
            writer: Some(writer),
        })
    }

    /// Opens a store that exists, for reading only: writes are refused. Another process may be writing it.
    pub fn open_read_only(dir: &Path) -> Result<Self, StoreError> {
        let path = dir.join(DATABASE);
        let readers = Readers::new(path.clone())?;
        let shared = Arc::new(Shared::default());
        seed(&readers, &shared)?;
        Ok(Self {
            path,
            shared,
            readers,
            orders: None,
            writer: None,
        })
    }

    pub(crate) fn write<T, F>(&self, work: F) -> BoxFuture<'static, Result<T, StoreError>>
    where
        T: Send + 'static,
        F: FnOnce(&mut Change<'_>) -> Result<T, Fail> + Send + 'static,
    {
        self.order(|reply, _| {
            Order::Write(Box::new(Work {
                work: Some(work),
                result: None,
                reply,
            }))
        })
    }

    /// Sent now, not when the future is first polled: calls keep their order, and a future that is dropped undoes nothing.
    fn order<T: Send + 'static>(
        &self,
        make: impl FnOnce(oneshot::Sender<Result<T, StoreError>>, &Sender<Order>) -> Order,
    ) -> BoxFuture<'static, Result<T, StoreError>> {
        let refused = |error| -> BoxFuture<'static, Result<T, StoreError>> {
            Box::pin(std::future::ready(Err(error)))
        };
        if let Some(why) = self.shared.dead() {
            return refused(StoreError::Dead(why));
        }
        let Some(orders) = &self.orders else {
            return refused(StoreError::Unusable(
                "the store was opened for reading only".to_owned(),
            ));
        };
        if self.shared.waiting.fetch_add(1, Ordering::Relaxed) >= MOST_WAITING {
            self.shared.waiting.fetch_sub(1, Ordering::Relaxed);
            let why = format!("{MOST_WAITING} writes wait for the disk already");
            return refused(StoreError::Unusable(why));
        }
        let (reply, answer) = oneshot::channel();
        let sent = orders.send(make(reply, orders));
        let gone = || StoreError::Dead("the writer has stopped".to_owned());
        if sent.is_err() {
            return refused(gone());
        }
        Box::pin(async move { answer.await.unwrap_or_else(|_| Err(gone())) })
    }

    fn read<T>(&self, query: impl FnOnce(&Read<'_>) -> Result<T, Fail>) -> Result<T, StoreError> {
        let cache = &self.shared.cache;
        // Both from before the moment that is read: a sample consumed since is no longer pending on disk.
        let (generation, leases) = (cache.generation(), self.shared.leases());
        self.readers.read(|conn| {
            query(&Read {
                conn,
                cache,
                generation,
                leases: &leases,
            })
        })
    }

    fn bytes(&self) -> u64 {
        let size = |suffix: &str| {
            let mut name = self.path.as_os_str().to_owned();
            name.push(suffix);
            std::fs::metadata(PathBuf::from(name)).map_or(0, |m| m.len())
        };
        size("") + size("-wal") + size("-shm")
    }

    #[cfg(test)]
    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // A search that is not over ends early; it has a sender of its own.
        self.shared.close();
        self.orders = None;
        if let Some(writer) = self.writer.take()
            && writer.join().is_err()
        {
            tracing::error!("the writer thread panicked");
        }
    }
}

/// Leases are void now. Of two samples of a turn that thereby wait both, the newer counts.
fn prepare(conn: &Connection, options: &StoreOptions) -> rusqlite::Result<()> {
    conn.execute(
        "UPDATE samples INDEXED BY samples_pending SET state = 'dropped', why = 'replaced' WHERE state = 'pending'
         AND EXISTS (SELECT 1 FROM samples later WHERE later.turn = samples.turn AND later.id > samples.id)",
        [],
    )?;
    if let Some(bytes) = options.max_bytes {
        let page: i64 = conn.pragma_query_value(None, "page_size", |row| row.get(0))?;
        let pages = i64::try_from(bytes).unwrap_or(i64::MAX) / page.max(1);
        conn.query_row(
            &format!("PRAGMA max_page_count = {}", pages.max(1)),
            [],
            |_| Ok(()),
        )?;
    }
    Ok(())
}

/// When the program ended right after something was forgotten, the log and unused parts of pages may still hold it: they are
/// emptied before anything is written. `false` when a reader is in the log, and it has to be tried again.
fn finish_forgetting(conn: &Connection, path: &Path, page_size: usize) -> Result<bool, StoreError> {
    let failed = |e: &dyn std::fmt::Display| {
        let why = format!("{}: emptying the log after forgetting: {e}", path.display());
        StoreError::Unusable(why)
    };
    if !schema::is_owed(conn).map_err(|e| failed(&e))? {
        return Ok(true);
    }
    schema::remove_copies(path);
    if !schema::empty_log(conn).map_err(|e| failed(&e))? {
        return Ok(false);
    }
    conn.execute_batch("PRAGMA shrink_memory")
        .map_err(|e| failed(&e))?;
    wipe::wipe_all(path, page_size).map_err(|e| failed(&e))?;
    schema::settle(conn).map_err(|e| failed(&e))?;
    Ok(true)
}

/// Ids go on after the last that were stored, forgotten ones too.
fn seed(readers: &Readers, shared: &Shared) -> Result<(), StoreError> {
    let last = |name: &str| {
        readers.read(|conn| {
            let sql = "SELECT value FROM meta WHERE key = ?1";
            Ok(conn
                .query_row(sql, [name], |row| row.get::<_, i64>(0))?
                .cast_unsigned())
        })
    };
    shared.turn_ids.store(last("last_turn")?, Ordering::Relaxed);
    shared
        .verdict_ids
        .store(last("last_verdict")?, Ordering::Relaxed);
    Ok(())
}

fn next(counter: &AtomicU64, at_least: u64) -> u64 {
    let following = |last: u64| at_least.max(last + 1);
    let last = counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |l| Some(following(l)));
    following(last.unwrap_or_else(|last| last))
}

impl TrajectoryStore for Store {
    fn append(&self, events: Vec<Event>) -> BoxFuture<'static, Result<(), StoreError>> {
        self.write(move |change| events.into_iter().try_for_each(|event| change.apply(event)))
    }

    fn next_turn_id(&self, now: Millis) -> TurnId {
        // 43 bits of milliseconds reach to the year 2248; below them 2^20 turns in each.
        let by_clock = now.clamp(0, (1 << 43) - 1).cast_unsigned() << 20;
        TurnId(next(&self.shared.turn_ids, by_clock))
    }

    fn next_verdict_id(&self) -> VerdictId {
        VerdictId(next(&self.shared.verdict_ids, 0))
    }

    fn story(&self, turn: TurnId) -> Result<Option<TurnStory>, StoreError> {
        self.read(|read| read.story(turn))
    }

    fn session_stories(
        &self,
        profile: &Profile,
        session: &SessionId,
    ) -> Result<Vec<TurnStory>, StoreError> {
        self.read(|read| read.session_stories(profile, session))
    }

    fn session(
        &self,
        profile: &Profile,
        session: &SessionId,
    ) -> Result<Option<SessionRecord>, StoreError> {
        let names = params![profile.as_str(), session.as_str()];
        let found = self.read(|read| read.sessions("WHERE profile = ?1 AND id = ?2", names))?;
        Ok(found.into_iter().next())
    }

    fn sessions(
        &self,
        profile: Option<&Profile>,
        limit: usize,
    ) -> Result<Vec<SessionRecord>, StoreError> {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        match profile {
            Some(profile) => {
                let rest = "WHERE profile = ?1 ORDER BY last_active DESC, profile, id LIMIT ?2";
                self.read(|read| read.sessions(rest, params![profile.as_str(), limit]))
            }
            None => {
                let rest = "ORDER BY last_active DESC, profile, id LIMIT ?1";
                self.read(|read| read.sessions(rest, params![limit]))
            }
        }
    }

    fn session_by_key(&self, key_hash: &str) -> Result<Option<SessionRecord>, StoreError> {
        let rest = "WHERE key_hash = ?1 ORDER BY key_order DESC LIMIT 1";
        let found = self.read(|read| read.sessions(rest, params![key_hash]))?;
        Ok(found.into_iter().next())
    }

    fn idle_sessions(&self, since: Millis) -> Result<Vec<SessionRecord>, StoreError> {
        let rest = "WHERE ended_at IS NULL AND last_active < ?1 ORDER BY last_active, profile, id";
        self.read(|read| read.sessions(rest, params![since]))
    }

    fn plan_forget(&self, target: &ForgetTarget) -> Result<ForgetPlan, StoreError> {
        self.read(|read| Ok(Scope::of(read.conn, target)?.plan))
    }

    fn forget(&self, forget: Forget) -> BoxFuture<'static, Result<ForgetProof, StoreError>> {
        self.order(|reply, orders| {
            Order::Alone(Box::new(Forgetting {
                forget,
                done: None,
                reply,
                path: self.path.clone(),
                shared: self.shared.clone(),
                orders: orders.clone(),
            }))
        })
    }

    fn unjudged(&self, limit: usize) -> Result<Vec<TurnId>, StoreError> {
        self.read(|read| read.unjudged(limit))
    }

    fn open_verdicts(&self, limit: usize) -> Result<Vec<OpenVerdict>, StoreError> {
        self.read(|read| read.open_verdicts(limit))
    }

    fn profiles(&self) -> Result<Vec<Profile>, StoreError> {
        self.read(|read| read.profiles())
    }

    fn pending(&self, profile: &Profile) -> Result<Vec<PendingSample>, StoreError> {
        self.read(|read| read.pending(profile))
    }

    fn lease(
        &self,
        samples: Vec<SampleId>,
    ) -> BoxFuture<'static, Result<Vec<LeasedSample>, StoreError>> {
        self.write(move |change| change.lease(&samples))
    }

    fn release(&self, samples: Vec<SampleId>) -> BoxFuture<'static, Result<(), StoreError>> {
        self.write(move |change| change.release(&samples))
    }

    fn commit_step(&self, step: StepCommit) -> BoxFuture<'static, Result<(), StoreError>> {
        self.write(move |change| change.commit_step(&step))
    }

    fn versions(&self, profile: &Profile) -> Result<Vec<VersionRecord>, StoreError> {
        self.read(|read| read.versions(profile))
    }

    fn last_version(&self, profile: &Profile) -> Result<u64, StoreError> {
        self.read(|read| versions::last_version(read.conn, profile))
    }

    fn replays(&self, profile: &Profile) -> Result<Vec<u64>, StoreError> {
        self.read(|read| versions::replays(read.conn, profile))
    }

    fn samples(&self, ids: &[SampleId]) -> Result<Vec<LeasedSample>, StoreError> {
        self.read(|read| read.full_samples(ids))
    }

    fn held_out(
        &self,
        profile: &Profile,
        limit: usize,
    ) -> Result<(Vec<LeasedSample>, u64), StoreError> {
        self.read(|read| read.held_out(profile, limit))
    }

    fn live_turns(&self, profile: &Profile, limit: usize) -> Result<Vec<LiveTurn>, StoreError> {
        self.read(|read| read.live_turns(profile, limit))
    }

    fn profiles_to_train(&self) -> Result<Vec<Profile>, StoreError> {
        self.read(|read| read.profiles_to_train())
    }

    fn paused(&self, profile: &Profile) -> Result<Option<String>, StoreError> {
        self.read(|read| read.paused(profile))
    }

    fn counts(&self, profile: Option<&Profile>) -> Result<StoreCounts, StoreError> {
        let counts = self.read(|read| read.counts(profile))?;
        Ok(StoreCounts {
            bytes: self.bytes(),
            ..counts
        })
    }

    fn health(&self) -> Result<(), String> {
        if let Some(why) = self.shared.dead() {
            return Err(StoreError::Dead(why).to_string());
        }
        if let Some(why) = self.shared.stuck() {
            return Err(why);
        }
        match self.orders {
            Some(_) => Ok(()),
            None => Err("the store was opened for reading only".to_owned()),
        }
    }
}
