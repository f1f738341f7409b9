//! The thread that brings versions into memory, adapters and whole models: those that requests wait for, and those that are published.
//!
//! Requests for a version that is not in memory wait here, not on the engine's thread: when the adapter has come they go on there as
//! if they had just arrived. One thread, so that adapters come one after the other: two at once would each take longer, and take the
//! cores from the replies that run.

use crate::{
    adapter::Adapter,
    digest::{self, AdapterDigest},
    error::weights,
    prefix::CacheKey,
    request::Reply,
    resident::{Found, Home, Loaded, Residents},
    scheduler::Order,
    scoring::Scoring,
    version::{self, Held, Version},
    weights::BaseWeights,
};
use chela_core::{EngineError, PolicyVersion, Profile, Weights};
use chela_kernels::Kernels;
use futures_channel::oneshot;
use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc::Sender,
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// How often the thread looks whether requests have ended whose adapters may leave memory: while another waits for the place, and
/// while nobody does.
const LOOK: Duration = Duration::from_millis(5);
const IDLE_LOOK: Duration = Duration::from_millis(200);
/// The longest that an adapter waits for others to leave memory; then it comes beyond the budget.
const PATIENCE: Duration = Duration::from_secs(1);

/// Work between two looks at what else wants the cores: shorter than a decode step and longer than handing a core over takes.
const SLICE: Duration = Duration::from_micros(500);
/// Parts of one core that reading takes while replies run: when a user waits for it, and when only a trainer does. (Replies lose at
/// most that part of their speed, so that a decode step of 40 ms takes 4 ms longer during a publish.)
const HURRY: f64 = 1.0 / 3.0;
const LEISURE: f64 = 1.0 / 10.0;

/// A request that waits for its adapter.
pub enum Waiter<K: Kernels> {
    /// A reply.
    Reply(Box<Reply<K>>),
    /// Scores.
    Score(Box<Scoring<K>>),
}

impl<K: Kernels> Waiter<K> {
    fn cancelled(&self) -> bool {
        match self {
            Self::Reply(reply) => reply.cancelled(),
            Self::Score(scoring) => scoring.answer.is_canceled(),
        }
    }

    fn key(&mut self) -> &mut CacheKey {
        match self {
            Self::Reply(reply) => &mut reply.key,
            Self::Score(scoring) => &mut scoring.key,
        }
    }

    /// The request with its weights.
    pub fn pinned(mut self, load: u64, version: Held<K>) -> Order<K> {
        self.key().load = load;
        match self {
            Self::Reply(mut reply) => {
                reply.version = version;
                Order::Sample(reply)
            }
            Self::Score(mut scoring) => {
                scoring.version = version;
                Order::Score(scoring)
            }
        }
    }

    fn fail(self, error: EngineError) {
        match self {
            Self::Reply(reply) => reply.fail(error),
            Self::Score(scoring) => {
                let _ = scoring.answer.send(Err(error)); // nobody waits any more
            }
        }
    }
}

type Versions<K> = Residents<Version<K>, Waiter<K>>;

/// A version to publish, and who is told its hash.
struct Publish {
    version: PolicyVersion,
    dir: PathBuf,
    answer: oneshot::Sender<Result<String, EngineError>>,
}

#[derive(Default)]
struct Queue {
    publishes: VecDeque<Publish>,
    wanted: VecDeque<(PolicyVersion, Home, Instant)>,
    stop: bool,
}

enum Job {
    Publish(Publish),
    Wanted(PolicyVersion, Home),
}

/// What the thread shares with the engine.
struct Shared<K: Kernels> {
    k: K,
    base: Arc<BaseWeights<K>>,
    versions: Mutex<Versions<K>>,
    queue: Mutex<Queue>,
    more: Condvar,
    orders: Mutex<Sender<Order<K>>>,
    /// Replies that run now.
    replies: Arc<AtomicUsize>,
    /// Requests that run at once.
    lanes: usize,
}

/// The adapters and their thread. Dropping it ends the thread; what waits then is failed.
pub struct Loader<K: Kernels> {
    shared: Arc<Shared<K>>,
    thread: Option<JoinHandle<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<K: Kernels> Loader<K>
where
    K: Send + Sync + 'static,
    K::Buf: Send + Sync,
    Order<K>: Send,
    Waiter<K>: Send,
    BaseWeights<K>: Send + Sync,
{
    /// Starts the thread. `budget` bytes of adapters stay in memory, `lanes` requests run at once.
    pub fn new(
        k: &K,
        base: Arc<BaseWeights<K>>,
        (orders, replies): (Sender<Order<K>>, Arc<AtomicUsize>),
        (budget, lanes): (usize, usize),
    ) -> Result<Self, EngineError> {
        let shared = Arc::new(Shared {
            k: k.clone(),
            base,
            versions: Mutex::new(Residents::new(budget)),
            queue: Mutex::default(),
            more: Condvar::new(),
            orders: Mutex::new(orders),
            replies,
            lanes,
        });
        let of_thread = shared.clone();
        let thread = std::thread::Builder::new()
            .name("chela-load".to_owned())
            .spawn(move || of_thread.run())
            .map_err(|e| EngineError::Stopped(format!("no thread for loading: {e}")))?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }
}

impl<K: Kernels> Loader<K> {
    /// What a profile's requests get now.
    pub fn served(&self, profile: &Profile) -> PolicyVersion {
        lock(&self.shared.versions).served(profile)
    }

    /// Swaps a profile's pointer.
    pub fn serve(&self, version: &PolicyVersion) -> Result<(), EngineError> {
        lock(&self.shared.versions).serve(version)
    }

    /// Remembers where a version lies.
    pub fn register(&self, version: PolicyVersion, dir: PathBuf, hash: Option<String>) {
        let gone = lock(&self.shared.versions).register(version, dir, hash);
        drop(gone); // outside of the lock
    }

    /// True when there was something to let go of.
    pub fn unload(&self, version: &PolicyVersion) -> bool {
        let gone = lock(&self.shared.versions).unload(version);
        gone.is_some()
    }

    /// Bytes of adapters in memory, and their number.
    pub fn held(&self) -> (usize, usize) {
        lock(&self.shared.versions).held()
    }

    /// Has a version read, to be published.
    pub fn publish(
        &self,
        version: PolicyVersion,
        dir: PathBuf,
    ) -> oneshot::Receiver<Result<String, EngineError>> {
        let (answer, receiver) = oneshot::channel();
        let publish = Publish {
            version,
            dir,
            answer,
        };
        lock(&self.shared.queue).publishes.push_back(publish);
        self.shared.more.notify_one();
        receiver
    }

    /// Gives a request its adapter and sends it on: now, or when the adapter has come.
    pub fn send(&self, mut who: Waiter<K>) -> Result<(), EngineError> {
        let version = who.key().version.clone();
        if version.number == 0 {
            return self.shared.order(who.pinned(0, None));
        }
        let mut versions = lock(&self.shared.versions);
        match versions.find(&version) {
            Found::Here(load, adapter) => {
                drop(versions);
                self.shared.order(who.pinned(load, Some(adapter)))
            }
            Found::Away(home) => {
                if versions.wait(&home, who) {
                    let mut queue = lock(&self.shared.queue);
                    queue.wanted.push_back((version, home, Instant::now()));
                    self.shared.more.notify_one();
                }
                Ok(())
            }
            Found::Unknown => {
                drop(versions);
                let error = EngineError::NotLoaded(version);
                who.fail(error.clone());
                Err(error)
            }
        }
    }

    /// Texts of a profile that wait for an adapter are not kept when they end.
    pub fn forget_texts(&self, profile: &Profile) {
        for who in lock(&self.shared.versions).waiters() {
            if let Waiter::Reply(reply) = who {
                reply.forget(profile);
            }
        }
    }
}

impl<K: Kernels> Drop for Loader<K> {
    fn drop(&mut self) {
        lock(&self.shared.queue).stop = true;
        self.shared.more.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic of it has failed its own request
        }
    }
}

impl<K: Kernels> Shared<K> {
    fn order(&self, order: Order<K>) -> Result<(), EngineError> {
        lock(&self.orders)
            .send(order)
            .map_err(|_| EngineError::Stopped("its thread has ended".to_owned()))
    }

    fn run(&self) {
        while let Some(job) = self.next() {
            match job {
                Job::Publish(publish) => {
                    let loaded = self.read(&publish.dir, LEISURE);
                    let answer = loaded.map(|loaded| {
                        let hash = loaded.hash.clone();
                        let mut versions = lock(&self.versions);
                        let gone = versions.publish(publish.version, publish.dir, loaded);
                        drop(versions);
                        drop(gone); // outside of the lock
                        hash
                    });
                    let _ = publish.answer.send(answer); // nobody waits any more
                }
                Job::Wanted(version, home) => self.fetch(&version, &home),
            }
        }
    }

    /// The next thing to read; publishes first, since they are few and a trainer waits. `None` when told to stop.
    fn next(&self) -> Option<Job> {
        let mut queue = lock(&self.queue);
        loop {
            if queue.stop {
                return None;
            }
            if let Some(publish) = queue.publishes.pop_front() {
                return Some(Job::Publish(publish));
            }
            let since = queue.wanted.front().map(|w| w.2);
            // The versions' lock is never taken under the queue's: `send` takes them in the other order.
            drop(queue);
            let (over, crowded) = {
                let mut versions = lock(&self.versions);
                let gone = versions.shrink(None);
                let state = (versions.over(), versions.crowded(self.lanes));
                drop(versions);
                drop(gone);
                state
            };
            queue = lock(&self.queue);
            if queue.stop || !queue.publishes.is_empty() {
                continue;
            }
            let ready = |since: Instant| !crowded || since.elapsed() > PATIENCE;
            if since.is_some_and(ready)
                && let Some((version, home, _)) = queue.wanted.pop_front()
            {
                return Some(Job::Wanted(version, home));
            }
            if since.is_none() && !queue.wanted.is_empty() {
                continue; // it came between the two looks
            }
            queue = if over || since.is_some() {
                let pause = if since.is_some() { LOOK } else { IDLE_LOOK };
                let waited = self.more.wait_timeout(queue, pause);
                waited.unwrap_or_else(PoisonError::into_inner).0
            } else {
                self.more
                    .wait(queue)
                    .unwrap_or_else(PoisonError::into_inner)
            };
        }
    }

    /// Reads a home for those who wait for it.
    fn fetch(&self, version: &PolicyVersion, home: &Home) {
        if !lock(&self.versions).still_wanted(home, Waiter::cancelled) {
            return;
        }
        let loaded = self.read(&home.dir, HURRY).and_then(|loaded| match &home.hash {
            Some(hash) if *hash != loaded.hash => Err(weights(format!(
                "{}: version {version} was published with the hash {hash}, these files have {}; they were changed or damaged: \
                 restore the folder, or serve another version",
                home.dir.display(),
                loaded.hash
            ))),
            _ => Ok(loaded),
        });
        let mut versions = lock(&self.versions);
        match loaded {
            Ok(loaded) => {
                let adapter = loaded.adapter.clone();
                let gone = versions.arrived(version, home, loaded);
                for who in versions.release(home) {
                    // Under the lock, so that a profile's wish to be forgotten meets each request here or on the engine's thread. A
                    // dead engine's request is dropped unsent, which tells its caller.
                    let _ = self.order(who.pinned(home.id, Some(adapter.clone())));
                }
                drop(versions);
                drop(gone); // after the requests are on their way, and outside of the lock
            }
            Err(error) => {
                let waiters = versions.release(home);
                drop(versions);
                tracing::warn!(%version, %error, "its weights could not be loaded");
                waiters.into_iter().for_each(|w| w.fail(error.clone()));
            }
        }
    }

    /// A panic is this folder's error: who waits for it is told, and the thread goes on.
    fn read(&self, dir: &Path, share: f64) -> Result<Loaded<Version<K>>, EngineError> {
        let read = || {
            if Weights::is_whole(dir) {
                self.read_whole(dir, share)
            } else {
                self.read_adapter(dir, share)
            }
        };
        catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|_| {
            let dir = dir.display();
            Err(EngineError::Stopped(format!("reading {dir} panicked")))
        })
    }

    fn read_whole(&self, dir: &Path, share: f64) -> Result<Loaded<Version<K>>, EngineError> {
        let mut begun = Instant::now();
        let mut rest = || self.rest(&mut begun, share);
        let model = version::read_whole(&self.k, &self.base, dir, &mut rest)?;
        let hash = digest::of_model(&self.k, &model, &mut rest)?;
        Ok(Loaded {
            bytes: model.bytes(&self.k),
            adapter: Arc::new(Version::Whole(Box::new(model))),
            hash,
        })
    }

    fn read_adapter(&self, dir: &Path, share: f64) -> Result<Loaded<Version<K>>, EngineError> {
        let mut digest = AdapterDigest::default();
        let mut bytes = 0;
        let mut begun = Instant::now();
        let config = &self.base.config;
        let adapter = Adapter::read_seen(&self.k, config, dir, &mut |scale, place, lora| {
            digest.add(&self.k, scale, place, lora)?;
            bytes += scale.0 * (lora.out + lora.input) * 4;
            self.rest(&mut begun, share);
            Ok(())
        })?;
        Ok(Loaded {
            adapter: Arc::new(Version::Adapter(adapter)),
            bytes,
            hash: digest.finish(),
        })
    }

    /// After a slice of work, leaves the cores to the replies that run.
    fn rest(&self, begun: &mut Instant, share: f64) {
        let worked = begun.elapsed();
        if worked < SLICE {
            return;
        }
        if self.replies.load(Ordering::Relaxed) > 0 {
            // A user who waits behind a publish waits for it too.
            let hurry = !lock(&self.queue).wanted.is_empty();
            let share = if hurry { share.max(HURRY) } else { share };
            let pause = worked.as_secs_f64() * (1.0 - share) / share;
            std::thread::sleep(Duration::from_secs_f64(pause.min(0.02)));
        }
        *begun = Instant::now();
    }
}
