//! The thread that writes: every transaction that waits goes behind one sync, and only then is any of them answered.

use crate::{
    apply::Change,
    cache::TurnCache,
    error::{Blame, Fail},
    schema,
};
use chela_core::{SampleId, StoreError, Turn, TurnId};
use futures_channel::oneshot;
use rusqlite::Connection;
use std::{
    collections::{HashMap, HashSet},
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc::{Receiver, RecvTimeoutError},
    },
    time::Duration,
};

/// Transactions behind one sync, at most.
const GROUP: usize = 256;

/// After a full disk, and while the log still holds what was forgotten, it is tried again this often.
const AGAIN: Duration = Duration::from_secs(2);

/// What the writer and everybody else look at.
#[derive(Default)]
pub(crate) struct Shared {
    pub cache: TurnCache,
    /// Samples in a step that is being made, as of the last sync.
    leases: Mutex<Arc<HashSet<SampleId>>>,
    /// Why writes cannot succeed until a restart.
    dead: Mutex<Option<String>>,
    /// Why writes cannot succeed at present.
    stuck: Mutex<Option<String>>,
    /// Transactions not yet answered.
    pub waiting: AtomicUsize,
    /// The last ids given.
    pub turn_ids: AtomicU64,
    pub verdict_ids: AtomicU64,
    /// Tests: the commit that counts this down from 1 fails as if its sync had.
    #[cfg(test)]
    pub commits_until_failure: AtomicUsize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub fn leases(&self) -> Arc<HashSet<SampleId>> {
        lock(&self.leases).clone()
    }

    pub fn dead(&self) -> Option<String> {
        lock(&self.dead).clone()
    }

    pub fn die(&self, why: &str) {
        tracing::error!(why, "the store takes no writes until a restart");
        lock(&self.dead).get_or_insert_with(|| why.to_owned());
    }

    pub fn stuck(&self) -> Option<String> {
        lock(&self.stuck).clone()
    }

    fn set_stuck(&self, why: Option<String>) {
        let mut stuck = lock(&self.stuck);
        match (&*stuck, &why) {
            (None, Some(why)) => tracing::error!(why, "writes are refused for now"),
            (Some(_), None) => tracing::info!("writes succeed again"),
            _ => {}
        }
        *stuck = why;
    }
}

/// A transaction on its way. Answered exactly once.
pub(crate) trait Task: Send {
    fn run(&mut self, change: &mut Change<'_>) -> Result<(), Fail>;
    fn answer(self: Box<Self>, failure: Option<StoreError>);
}

/// The work, its result once there, and who waits for it.
pub(crate) struct Work<T, F> {
    pub work: Option<F>,
    pub result: Option<T>,
    pub reply: oneshot::Sender<Result<T, StoreError>>,
}

impl<T, F> Task for Work<T, F>
where
    T: Send,
    F: FnOnce(&mut Change<'_>) -> Result<T, Fail> + Send,
{
    fn run(&mut self, change: &mut Change<'_>) -> Result<(), Fail> {
        if let Some(work) = self.work.take() {
            self.result = Some(work(change)?);
        }
        Ok(())
    }

    fn answer(self: Box<Self>, failure: Option<StoreError>) {
        let result = match (failure, self.result) {
            (None, Some(result)) => Ok(result),
            (Some(error), _) => Err(error),
            (None, None) => Err(StoreError::Dead("a transaction was not run".to_owned())),
        };
        // Nobody waits any more: what was written stays written.
        let _ = self.reply.send(result);
    }
}

pub(crate) struct Writer {
    pub conn: Connection,
    pub path: PathBuf,
    pub shared: Arc<Shared>,
    pub tasks: Receiver<Box<dyn Task>>,
    /// What was forgotten is still in the log.
    pub truncate: bool,
}

/// A writer that panicked answers nobody; the store must say so.
struct Obituary(Arc<Shared>);

impl Drop for Obituary {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.die("the writer thread panicked");
        }
    }
}

/// What a group left behind.
struct Group {
    failures: Vec<Option<StoreError>>,
    leases: HashSet<SampleId>,
    fresh: HashMap<TurnId, Arc<Turn>>,
    forgot: bool,
}

impl Writer {
    /// Until every sender is gone.
    pub fn run(mut self) {
        let _obituary = Obituary(self.shared.clone());
        loop {
            let first = if self.truncate || self.shared.stuck().is_some() {
                match self.tasks.recv_timeout(AGAIN) {
                    Ok(task) => task,
                    Err(RecvTimeoutError::Timeout) => {
                        self.try_again();
                        continue;
                    }
                    Err(RecvTimeoutError::Disconnected) => break,
                }
            } else {
                match self.tasks.recv() {
                    Ok(task) => task,
                    Err(_) => break,
                }
            };
            let mut tasks = vec![first];
            while tasks.len() < GROUP
                && let Ok(task) = self.tasks.try_recv()
            {
                tasks.push(task);
            }
            self.group(tasks);
        }
    }

    fn group(&mut self, mut tasks: Vec<Box<dyn Task>>) {
        let failures = match self.shared.dead() {
            Some(why) => vec![Some(StoreError::Dead(why)); tasks.len()],
            None => match self.transact(&mut tasks) {
                Ok(group) => self.publish(group),
                Err(blame) => vec![Some(self.broken(blame)); tasks.len()],
            },
        };
        for (task, failure) in tasks.into_iter().zip(failures) {
            self.shared.waiting.fetch_sub(1, Ordering::Relaxed);
            task.answer(failure);
        }
    }

    /// Runs the tasks in one transaction of SQLite, a savepoint around each, and syncs once.
    fn transact(&self, tasks: &mut [Box<dyn Task>]) -> Result<Group, Blame> {
        let sql = |sql: &str| {
            let done = self
                .conn
                .prepare_cached(sql)
                .and_then(|mut s| s.execute([]));
            done.map(drop).map_err(|e| Fail::from(e).blame())
        };
        sql("BEGIN IMMEDIATE")?;
        let mut group = Group {
            failures: Vec::with_capacity(tasks.len()),
            leases: (*self.shared.leases()).clone(),
            fresh: HashMap::new(),
            forgot: false,
        };
        for task in tasks {
            sql("SAVEPOINT one")?;
            let mut change = Change {
                conn: &self.conn,
                cache: &self.shared.cache,
                leases: &mut group.leases,
                fresh: &mut group.fresh,
                written: Vec::new(),
                forgot: false,
                turn_ids: 0,
                verdict_ids: 0,
            };
            let result = task.run(&mut change);
            let Change {
                written,
                forgot,
                turn_ids,
                verdict_ids,
                ..
            } = change;
            match result {
                Ok(()) => {
                    group.forgot |= forgot;
                    self.shared.turn_ids.fetch_max(turn_ids, Ordering::Relaxed);
                    self.shared
                        .verdict_ids
                        .fetch_max(verdict_ids, Ordering::Relaxed);
                    group.failures.push(None);
                }
                Err(fail) => match fail.blame() {
                    Blame::One(error) => {
                        written.iter().for_each(|id| drop(group.fresh.remove(id)));
                        sql("ROLLBACK TO one")?;
                        group.failures.push(Some(error));
                    }
                    all => return Err(all),
                },
            }
            sql("RELEASE one")?;
        }
        self.injected()?;
        sql("COMMIT")?;
        Ok(group)
    }

    #[cfg(test)]
    fn injected(&self) -> Result<(), Blame> {
        let left = &self.shared.commits_until_failure;
        let counted = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
        if counted == Ok(1) {
            return Err(Blame::Fatal("disk I/O error (injected)".to_owned()));
        }
        Ok(())
    }

    #[cfg(not(test))]
    fn injected(&self) -> Result<(), Blame> {
        Ok(())
    }

    /// It is on disk: now others may see it.
    fn publish(&mut self, group: Group) -> Vec<Option<StoreError>> {
        *lock(&self.shared.leases) = Arc::new(group.leases);
        if group.forgot {
            self.shared.cache.clear();
            schema::remove_copies(&self.path);
            self.truncate = true;
            self.truncate_log();
        }
        let generation = self.shared.cache.generation();
        for turn in group.fresh.into_values() {
            self.shared.cache.put(generation, turn);
        }
        if self.shared.stuck().is_some() && group.failures.iter().any(Option::is_none) {
            self.shared.set_stuck(None);
        }
        group.failures
    }

    /// Nothing of the group counts. Leases and turns of before still stand.
    fn broken(&self, blame: Blame) -> StoreError {
        if !self.conn.is_autocommit()
            && let Err(error) = self.conn.execute_batch("ROLLBACK")
        {
            let why = format!("{}: {error}", self.path.display());
            self.shared.die(&why);
            return StoreError::Dead(why);
        }
        match blame {
            Blame::One(error) => error,
            Blame::Later(why) => {
                let why = format!("{}: {why}", self.path.display());
                self.shared.set_stuck(Some(why.clone()));
                StoreError::Unusable(why)
            }
            // After a failed sync nobody knows what is on disk; asking again may answer wrongly that all is well.
            Blame::Fatal(why) => {
                let why = format!("{}: {why}", self.path.display());
                self.shared.die(&why);
                StoreError::Dead(why)
            }
        }
    }

    fn try_again(&mut self) {
        if self.shared.dead().is_some() {
            self.truncate = false;
            self.shared.set_stuck(None);
            return;
        }
        if self.truncate {
            self.truncate_log();
        }
        if self.shared.stuck().is_some() {
            let sql = "UPDATE meta SET value = value + 1 WHERE key = 'probe'";
            if self.conn.execute(sql, []).is_ok() {
                self.shared.set_stuck(None);
            }
        }
    }

    /// `secure_delete` has overwritten what was forgotten; the log still holds pages from before.
    fn truncate_log(&mut self) {
        let busy = self
            .conn
            .query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get(0));
        match busy {
            Ok(false) => self.truncate = false,
            Ok(true) => tracing::debug!("a reader is in the log; it is truncated later"),
            Err(error) => match Fail::from(error).blame() {
                Blame::Fatal(why) => {
                    self.truncate = false;
                    self.shared
                        .die(&format!("{}: checkpoint: {why}", self.path.display()));
                }
                Blame::Later(why) => tracing::warn!(why, "the log is truncated later"),
                Blame::One(error) => tracing::warn!(%error, "the log is truncated later"),
            },
        }
    }
}
