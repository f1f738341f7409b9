//! What the writer and everybody else look at.

use crate::cache::TurnCache;
use chela_core::{SampleId, StoreError};
use std::{
    collections::HashSet,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Instant,
};

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
    /// The log may still hold what was forgotten.
    log_owed: Mutex<bool>,
    log_changed: Condvar,
    closing: AtomicBool,
    page_size: AtomicUsize,
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

    pub fn set_leases(&self, leases: HashSet<SampleId>) {
        *lock(&self.leases) = Arc::new(leases);
    }

    pub fn dead(&self) -> Option<String> {
        lock(&self.dead).clone()
    }

    pub fn die(&self, why: &str) {
        tracing::error!(why, "the store takes no writes until a restart");
        lock(&self.dead).get_or_insert_with(|| why.to_owned());
        self.log_changed.notify_all();
    }

    pub fn close(&self) {
        self.closing.store(true, Ordering::Relaxed);
        // With the lock, so that nobody begins to wait between looking and this.
        drop(lock(&self.log_owed));
        self.log_changed.notify_all();
    }

    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }

    pub fn set_page_size(&self, bytes: usize) {
        self.page_size.store(bytes, Ordering::Relaxed);
    }

    /// Of the database, in bytes.
    pub fn page_size(&self) -> usize {
        self.page_size.load(Ordering::Relaxed).max(512)
    }

    pub fn owe_log(&self, owed: bool) {
        *lock(&self.log_owed) = owed;
        self.log_changed.notify_all();
    }

    /// Until the log no longer holds what was forgotten, or until then.
    pub fn wait_for_log(&self, until: Instant) -> Result<(), StoreError> {
        let mut owed = lock(&self.log_owed);
        loop {
            if self.is_closing() {
                let why = "the store was closed before its files were searched";
                return Err(StoreError::Unusable(why.to_owned()));
            }
            if let Some(why) = self.dead() {
                return Err(StoreError::Dead(why));
            }
            let left = until.saturating_duration_since(Instant::now());
            if !*owed || left.is_zero() {
                return Ok(());
            }
            let waited = self.log_changed.wait_timeout(owed, left);
            owed = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub fn stuck(&self) -> Option<String> {
        lock(&self.stuck).clone()
    }

    pub fn set_stuck(&self, why: Option<String>) {
        let mut stuck = lock(&self.stuck);
        match (&*stuck, &why) {
            (None, Some(why)) => tracing::error!(why, "writes are refused for now"),
            (Some(_), None) => tracing::info!("writes succeed again"),
            _ => {}
        }
        *stuck = why;
    }
}
