//! The thread that writes: every transaction that waits goes behind one sync, and only then is any of them answered.

use crate::{
    apply::Change,
    error::{Blame, Fail},
    schema,
    shared::Shared,
    wipe,
};
use chela_core::{SampleId, StoreError, Turn, TurnId};
use futures_channel::oneshot;
use rusqlite::Connection;
use std::{
    collections::{HashMap, HashSet},
    path::PathBuf,
    sync::{
        Arc,
        atomic::Ordering,
        mpsc::{Receiver, RecvTimeoutError, Sender},
    },
    time::{Duration, Instant},
};

/// Transactions behind one sync, at most.
const GROUP: usize = 256;

/// After a full disk it is tried again this often.
const AGAIN: Duration = Duration::from_secs(2);

/// While the log still holds what was forgotten, it is tried again this often; writes go on between.
const TRUNCATE_AGAIN: Duration = Duration::from_millis(200);

/// So long emptying the log waits for readers in it, and with it every write.
const TRUNCATE_WAITS: Duration = Duration::from_millis(20);

/// What the writer is told.
pub(crate) enum Order {
    /// A transaction that may share its sync with others.
    Write(Box<dyn Task>),
    /// One that may be large: it has no savepoint, which would keep a copy of every page that it changes.
    Alone(Box<dyn Task>),
    /// Pages of the database whose unused middles are to be emptied.
    Wipe(Wipe),
    /// A search after forgetting is over and found nothing.
    Proven,
}

/// Pages by number; whether it could be done.
pub(crate) struct Wipe {
    pub pages: Vec<u64>,
    pub reply: Sender<bool>,
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
    pub orders: Receiver<Order>,
    /// Came while a group was gathered, and cannot be part of it.
    pub held: Option<Order>,
    /// What was forgotten is still in the log.
    pub truncate: bool,
    /// Searches after forgetting that are not over.
    pub unproven: usize,
    /// When it was last tried again.
    pub tried: Instant,
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
        while let Some(order) = self.next_order() {
            match order {
                Order::Write(first) => {
                    let tasks = self.gather(first);
                    self.group(tasks);
                }
                Order::Alone(task) => self.group(vec![task]),
                Order::Wipe(order) => {
                    let done = self.wipe(&order.pages);
                    // Whoever searched may have gone.
                    let _ = order.reply.send(done);
                }
                Order::Proven => self.prove(),
            }
            // With always something to do there would be no pause to try in.
            if self
                .again()
                .is_some_and(|pause| self.tried.elapsed() >= pause)
            {
                self.try_again();
            }
        }
    }

    fn next_order(&mut self) -> Option<Order> {
        loop {
            if let Some(order) = self.held.take() {
                return Some(order);
            }
            let Some(pause) = self.again() else {
                return self.orders.recv().ok();
            };
            match self.orders.recv_timeout(pause) {
                Ok(order) => return Some(order),
                Err(RecvTimeoutError::Timeout) => self.try_again(),
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
    }

    /// How long until something has to be tried again.
    fn again(&self) -> Option<Duration> {
        if self.truncate {
            return Some(TRUNCATE_AGAIN);
        }
        self.shared.stuck().map(|_| AGAIN)
    }

    /// All that waits and may share a sync.
    fn gather(&mut self, first: Box<dyn Task>) -> Vec<Box<dyn Task>> {
        let mut tasks = vec![first];
        while tasks.len() < GROUP {
            match self.orders.try_recv() {
                Ok(Order::Write(task)) => tasks.push(task),
                Ok(other) => {
                    self.held = Some(other);
                    break;
                }
                Err(_) => break,
            }
        }
        tasks
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

    /// Runs the tasks in one transaction of SQLite, a savepoint around each of several, and syncs once.
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
        let one = tasks.len() == 1;
        for task in tasks {
            if !one {
                sql("SAVEPOINT one")?;
            }
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
                        group.failures.push(Some(error));
                        if one {
                            sql("ROLLBACK")?;
                            return Ok(group);
                        }
                        sql("ROLLBACK TO one")?;
                    }
                    all => return Err(all),
                },
            }
            if !one {
                sql("RELEASE one")?;
            }
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
        self.shared.set_leases(group.leases);
        if group.forgot {
            self.shared.cache.clear();
            schema::remove_copies(&self.path);
            self.unproven += 1;
            self.truncate = true;
            self.shared.owe_log(true);
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
        self.tried = Instant::now();
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
        let emptied = self
            .conn
            .busy_timeout(TRUNCATE_WAITS)
            .and_then(|()| schema::empty_log(&self.conn));
        let emptied = emptied.and_then(|done| {
            self.conn.busy_timeout(schema::BUSY)?;
            Ok(done)
        });
        match emptied {
            Ok(true) => {
                self.truncate = false;
                self.shared.owe_log(false);
            }
            Ok(false) => tracing::debug!("a reader is in the log; it is truncated later"),
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

    /// Empties the log and these pages' middles. A page in the log or in memory would bring the old middle back, so both go first.
    fn wipe(&mut self, pages: &[u64]) -> bool {
        if self.shared.dead().is_some() {
            return false;
        }
        self.truncate = true;
        self.truncate_log();
        if self.truncate || self.conn.execute_batch("PRAGMA shrink_memory").is_err() {
            return false;
        }
        match wipe::wipe(&self.path, self.shared.page_size(), pages) {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(path = %self.path.display(), %error, "cannot empty unused parts of pages");
                false
            }
        }
    }

    /// What was forgotten need not be looked after at the next opening.
    fn prove(&mut self) {
        self.unproven = self.unproven.saturating_sub(1);
        if self.unproven > 0 || self.truncate || self.shared.dead().is_some() {
            return;
        }
        if let Err(error) = schema::settle(&self.conn) {
            match Fail::from(error).blame() {
                Blame::Fatal(why) => self.shared.die(&format!("{}: {why}", self.path.display())),
                Blame::Later(why) => tracing::warn!(why, "the next opening empties the log again"),
                Blame::One(error) => {
                    tracing::warn!(%error, "the next opening empties the log again")
                }
            }
        }
    }
}
