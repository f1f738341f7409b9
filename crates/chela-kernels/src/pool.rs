//! Worker threads that take small tiles of serving and training work from one dynamic queue.
//!
//! A parallel section ([`Pool::run`]) is a job whose tiles are claimed one at a time through an
//! atomic counter by its caller and by any idle worker, so a slow or preempted thread delays one
//! tile, never a static half. Workers look for serving work before each tile. While a
//! [`ServeLease`] is held, or a serving section runs, no tile of training starts.
#![allow(unsafe_code)]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use crate::error::{KernelError, Result};

/// How long a thread without work spins before it sleeps. Sections of a decode step follow each
/// other within microseconds; waking a sleeping thread costs tens of them.
const SPIN: Duration = Duration::from_micros(50);

/// Who a piece of work is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Priority {
    /// Someone waits for the answer.
    Serve,
    /// Learning, done when nobody waits.
    Train,
}

/// A closure whose caller waits in [`Pool::run`] until every claimed tile is done.
type Task = *const (dyn Fn(usize) + Sync);

struct Job {
    task: Task,
    tiles: usize,
    next: AtomicUsize,
    done: AtomicUsize,
    failed: AtomicBool,
    failure: Mutex<Option<String>>,
    caller: Thread,
    caller_sleeps: AtomicBool,
}

// SAFETY: `task` is `Sync` behind the pointer and is only dereferenced for a claimed tile, while the
// caller of `Pool::run`, who owns the closure, is still waiting for that tile.
unsafe impl Send for Job {}
// SAFETY: as above; every other field is Sync itself.
unsafe impl Sync for Job {}

impl Job {
    fn exhausted(&self) -> bool {
        self.next.load(Ordering::Relaxed) >= self.tiles
    }

    /// Claims and runs one tile; false when none was left.
    fn step(&self) -> bool {
        let tile = self.next.fetch_add(1, Ordering::Relaxed);
        if tile >= self.tiles {
            return false;
        }
        if !self.failed.load(Ordering::Relaxed) {
            // SAFETY: the tile was claimed, so `done < tiles` until the store below and the caller
            // of `run` keeps the closure alive.
            let task = unsafe { &*self.task };
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| task(tile))) {
                self.failed.store(true, Ordering::Relaxed);
                *lock(&self.failure) = Some(message(payload.as_ref()));
            }
        }
        if self.done.fetch_add(1, Ordering::AcqRel) + 1 == self.tiles
            && self.caller_sleeps.load(Ordering::SeqCst)
        {
            self.caller.unpark();
        }
        true
    }

    fn finished(&self) -> bool {
        self.done.load(Ordering::SeqCst) >= self.tiles
    }

    /// Blocks until every tile is done.
    fn wait(&self) {
        if spin_until(|| self.finished()) {
            return;
        }
        self.caller_sleeps.store(true, Ordering::SeqCst);
        while !self.finished() {
            // The timeout only bounds the one lost wake-up that is possible when the last tile ends
            // between the two checks.
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }
}

struct Shared {
    serve: Mutex<Vec<Arc<Job>>>,
    train: Mutex<Vec<Arc<Job>>>,
    /// Leases plus serving sections in flight; training starts no tile unless it is 0.
    gate: AtomicUsize,
    /// Counts events a sleeper may wait for.
    events: AtomicU64,
    sleepers: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
    stop: AtomicBool,
}

impl Shared {
    fn announce(&self) {
        self.events.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = lock(&self.sleep);
            self.wake.notify_all();
        }
    }

    /// Sleeps until something was announced after `seen`.
    fn sleep_after(&self, seen: u64) {
        let mut guard = lock(&self.sleep);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while self.events.load(Ordering::SeqCst) == seen && !self.stop.load(Ordering::SeqCst) {
            guard = self
                .wake
                .wait(guard)
                .unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    fn enter_gate(&self) {
        self.gate.fetch_add(1, Ordering::SeqCst);
    }

    fn leave_gate(&self) {
        if self.gate.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.announce();
        }
    }

    fn open_gate(&self) -> bool {
        self.gate.load(Ordering::SeqCst) == 0
    }

    fn find(&self) -> Option<(Arc<Job>, Priority)> {
        let find = |list: &Mutex<Vec<Arc<Job>>>| {
            lock(list)
                .iter()
                .find(|job| !job.exhausted())
                .map(Arc::clone)
        };
        if let Some(job) = find(&self.serve) {
            return Some((job, Priority::Serve));
        }
        if !self.open_gate() {
            return None;
        }
        find(&self.train).map(|job| (job, Priority::Train))
    }

    fn work(&self) {
        while !self.stop.load(Ordering::SeqCst) {
            let seen = self.events.load(Ordering::SeqCst);
            match self.find() {
                Some((job, Priority::Serve)) => while job.step() {},
                Some((job, Priority::Train)) => while self.open_gate() && job.step() {},
                None => {
                    if !spin_until(|| self.events.load(Ordering::Relaxed) != seen) {
                        self.sleep_after(seen);
                    }
                }
            }
        }
    }
}

/// The workers. One pool serves a whole process.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl core::fmt::Debug for Pool {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Pool")
            .field("threads", &self.threads())
            .finish()
    }
}

impl Pool {
    /// A pool of `threads` threads, the caller of each section counted as one of them: `threads - 1`
    /// workers are started, none for 0 or 1. When the system refuses a thread, there are fewer.
    pub fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            serve: Mutex::new(Vec::new()),
            train: Mutex::new(Vec::new()),
            gate: AtomicUsize::new(0),
            events: AtomicU64::new(0),
            sleepers: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            stop: AtomicBool::new(false),
        });
        let workers = (1..threads)
            .filter_map(|i| {
                let shared = Arc::clone(&shared);
                let name = format!("chela-kernel-{i}");
                std::thread::Builder::new()
                    .name(name)
                    .spawn(move || shared.work())
                    .ok()
            })
            .collect();
        Self { shared, workers }
    }

    /// Threads that take part in a section, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Keeps training from starting tiles until the lease is dropped.
    pub fn lease(&self) -> ServeLease {
        self.shared.enter_gate();
        ServeLease {
            shared: Arc::clone(&self.shared),
        }
    }

    /// Runs `task(0)` to `task(tiles - 1)`, in any order and in parallel, and returns when all are
    /// done. The caller takes part. Tiles should take at most about half a millisecond.
    ///
    /// # Errors
    /// [`KernelError::Worker`] when a tile panicked; tiles that had not started are then skipped.
    pub fn run(&self, priority: Priority, tiles: usize, task: impl Fn(usize) + Sync) -> Result {
        let _gate = (priority == Priority::Serve).then(|| self.lease());
        let task: &(dyn Fn(usize) + Sync) = &task;
        // SAFETY: only the lifetime is erased. `run` returns after `wait`, when every claimed tile is
        // done and no unclaimed one is left, so the pointer is never read after `task` is gone.
        let task: Task = unsafe { core::mem::transmute(task) };
        let job = Arc::new(Job {
            task,
            tiles,
            next: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            caller: std::thread::current(),
            caller_sleeps: AtomicBool::new(false),
        });
        let shared = tiles > 1 && !self.workers.is_empty();
        let list = match priority {
            Priority::Serve => &self.shared.serve,
            Priority::Train => &self.shared.train,
        };
        if shared {
            lock(list).push(Arc::clone(&job));
            self.shared.announce();
        }
        self.take_part(priority, &job);
        job.wait();
        if shared {
            lock(list).retain(|other| !Arc::ptr_eq(other, &job));
        }
        if job.failed.load(Ordering::SeqCst) {
            let failure = lock(&job.failure).take();
            return Err(KernelError::Worker(failure.unwrap_or_default()));
        }
        Ok(())
    }

    fn take_part(&self, priority: Priority, job: &Job) {
        loop {
            if priority == Priority::Train {
                self.wait_for_gate(job);
            }
            if !job.step() {
                return;
            }
        }
    }

    /// Returns when training may start a tile, or when `job` has none left.
    fn wait_for_gate(&self, job: &Job) {
        loop {
            let seen = self.shared.events.load(Ordering::SeqCst);
            if self.shared.open_gate() || job.exhausted() {
                return;
            }
            self.shared.sleep_after(seen);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.announce();
        for worker in self.workers.drain(..) {
            // A worker catches its tiles' panics, so there is no failure to report.
            let _ = worker.join();
        }
    }
}

/// While one is held, no tile of training starts.
#[must_use = "the lease ends when it is dropped"]
pub struct ServeLease {
    shared: Arc<Shared>,
}

impl core::fmt::Debug for ServeLease {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("ServeLease")
    }
}

impl Drop for ServeLease {
    fn drop(&mut self) {
        self.shared.leave_gate();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// True when `ready` came true within [`SPIN`].
fn spin_until(ready: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        for _ in 0..32 {
            if ready() {
                return true;
            }
            core::hint::spin_loop();
        }
        if start.elapsed() > SPIN {
            return false;
        }
    }
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}
