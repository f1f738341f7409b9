//! The engine's thread: decodes all running replies together, reads prompts in chunks between decode steps, scores texts when
//! nobody waits.

use crate::{
    error::kernel,
    forward::{Item, Workspace, forward, hidden_norm},
    pages::{KvCache, Pool},
    prefix::{PrefixCache, row},
    request::Reply,
    scoring::{Scoring, advance},
    version,
    weights::BaseWeights,
};
use chela_core::{EngineError, FinishReason, PolicyVersion, Priority, Profile};
use chela_kernels::{Kernels, Mat, Priority as Rank};
use std::{
    collections::{HashMap, VecDeque},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, TryRecvError},
    },
    time::{Duration, Instant},
};

/// Prompt tokens read between two decode steps; chunks end at multiples of it from the start of the text, whatever else runs: the
/// last bits of a product of many rows depend on their number.
const CHUNK: usize = 128;

/// What a pause for a learner costs replies, in pauses: what the learner does between tiles goes on into the next decoding step, whose
/// data is no longer in the caches. Measured (docs/log.md): serving kept 0.98 with no pauses, 0.89, 0.78 and 0.65 of its rate with pauses
/// of 5, 10 and 25% of the time.
const PAUSE_COSTS: f64 = 2.5;

/// Where the chunk ends that begins after `done` of `total` tokens.
pub fn chunk_end(done: usize, total: usize) -> usize {
    ((done / CHUNK + 1) * CHUNK).min(total)
}

/// What the thread is told.
pub enum Order<K: Kernels> {
    /// Make a reply.
    Sample(Box<Reply<K>>),
    /// Score a text.
    Score(Box<Scoring<K>>),
    /// A version is gone.
    Forget(PolicyVersion),
    /// Nothing of a profile's texts is kept.
    ForgetTexts(Profile),
    /// End.
    Stop,
}

/// How the thread runs.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Replies decoded together.
    pub concurrent: usize,
    /// Part of their rate that replies give up for a learner at work.
    pub train_share: f64,
}

/// What the thread shares with the rest.
pub struct Link {
    /// Learners at work now.
    pub training: Arc<AtomicUsize>,
    /// Replies that run now.
    pub replies: Arc<AtomicUsize>,
    /// Why the thread ended, when it failed.
    pub dead: Arc<Mutex<Option<String>>>,
}

/// The thread's state.
pub struct Scheduler<K: Kernels> {
    k: K,
    base: Arc<BaseWeights<K>>,
    limits: Limits,
    link: Link,
    waiting: VecDeque<Reply<K>>,
    running: Vec<Reply<K>>,
    scoring: VecDeque<Scoring<K>>,
    /// Keys and values: of what runs, and with what is left, of kept prefixes.
    pool: Pool<K>,
    prefixes: PrefixCache<K>,
    decode_work: Workspace<K>,
    chunk_work: Workspace<K>,
}

impl<K: Kernels> Scheduler<K> {
    /// A thread's state with nothing to do.
    pub fn new(
        k: &K,
        (base, pool): (Arc<BaseWeights<K>>, Pool<K>),
        limits: Limits,
        link: Link,
    ) -> Self {
        Self {
            k: k.with_priority(Rank::Serve),
            base,
            limits,
            link,
            pool,
            waiting: VecDeque::new(),
            running: Vec::new(),
            scoring: VecDeque::new(),
            prefixes: PrefixCache::default(),
            decode_work: Workspace::default(),
            chunk_work: Workspace::default(),
        }
    }

    /// Works until told to stop. A panic fails what runs and is kept as the reason why the engine is dead.
    pub fn run(mut self, orders: Receiver<Order<K>>) {
        loop {
            let outcome = catch_unwind(AssertUnwindSafe(|| self.turn(&orders)));
            let why = match outcome {
                Ok(Ok(true)) => continue,
                Ok(Ok(false)) => "it was stopped".to_owned(),
                Ok(Err(error)) => error.to_string(),
                Err(panic) => panic
                    .downcast_ref::<&str>()
                    .map(|s| (*s).to_owned())
                    .or_else(|| panic.downcast_ref::<String>().cloned())
                    .unwrap_or_else(|| "a panic without words".to_owned()),
            };
            tracing::debug!(%why, "engine thread ends");
            *self
                .link
                .dead
                .lock()
                .unwrap_or_else(PoisonError::into_inner) = Some(why.clone());
            self.fail_all(&EngineError::Stopped(why));
            while let Ok(order) = orders.try_recv() {
                self.take(order);
            }
            self.fail_all(&EngineError::Stopped("it has ended".to_owned()));
            return;
        }
    }

    fn fail_all(&mut self, error: &EngineError) {
        for reply in self.waiting.drain(..).chain(self.running.drain(..)) {
            reply.fail(error.clone());
        }
        for scoring in self.scoring.drain(..) {
            let _ = scoring.answer.send(Err(error.clone())); // nobody waits any more
        }
    }

    /// Returns false for [`Order::Stop`].
    fn take(&mut self, order: Order<K>) -> bool {
        match order {
            Order::Sample(reply) => self.waiting.push_back(*reply),
            Order::Score(scoring) => self.scoring.push_back(*scoring),
            Order::Forget(version) => self.prefixes.forget(&version),
            Order::ForgetTexts(profile) => {
                self.prefixes.forget_texts(&profile);
                let requests = self.waiting.iter_mut().chain(&mut self.running);
                requests.for_each(|r| r.forget(&profile));
            }
            Order::Stop => return false,
        }
        true
    }

    fn idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty() && self.scoring.is_empty()
    }

    /// One round. False when told to stop.
    fn turn(&mut self, orders: &Receiver<Order<K>>) -> Result<bool, EngineError> {
        let replies = self.running.len();
        self.link.replies.store(replies, Ordering::Relaxed);
        if self.idle() {
            let Ok(order) = orders.recv() else {
                return Ok(false);
            };
            if !self.take(order) {
                return Ok(false);
            }
        }
        loop {
            match orders.try_recv() {
                Ok(order) => {
                    if !self.take(order) {
                        return Ok(false);
                    }
                }
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return Ok(false),
            }
        }
        self.drop_cancelled();
        self.admit()?;
        let started = Instant::now();
        let decoded = self.decode()?;
        let read = self.read_chunk()?;
        if decoded || read {
            self.leave_share(started.elapsed());
        }
        if !read {
            self.score_chunk(decoded)?;
        }
        Ok(true)
    }

    /// A learner at work gets its share of the time although replies run: none of the thread's work keeps it from the cores.
    fn leave_share(&self, busy: Duration) {
        let share = self.limits.train_share.clamp(0.0, 0.9) / PAUSE_COSTS;
        if share > 0.0 && self.link.training.load(Ordering::Relaxed) > 0 {
            let pause = busy.as_secs_f64() * share / (1.0 - share);
            std::thread::sleep(Duration::from_secs_f64(pause.min(0.1)));
        }
    }

    fn drop_cancelled(&mut self) {
        self.waiting.retain(|r| !r.cancelled());
        self.scoring.retain(|s| !s.answer.is_canceled());
        let (gone, on): (Vec<_>, Vec<_>) = self.running.drain(..).partition(Reply::cancelled);
        self.running = on;
        for reply in gone {
            self.end(reply, FinishReason::Aborted);
        }
    }

    fn end(&mut self, reply: Reply<K>, reason: FinishReason) {
        let (key, tokens, cache) = reply.finish(reason);
        if let Some(cache) = cache {
            self.prefixes.keep(key, tokens, &cache);
            drop(cache);
            self.prefixes.give_back(self.pool.excess());
        }
    }

    /// Whether `pages` pages may be taken: kept prefixes give way; beyond the budget only for one text at a time, so that the
    /// oldest always goes on and what is held never exceeds the budget and one context.
    fn room(&mut self, pages: usize) -> bool {
        if self.prefixes.make_room(&self.pool, pages) {
            return true;
        }
        let busy = !self.running.is_empty() || self.scoring.iter().any(|s| s.cache.is_some());
        if !busy {
            self.prefixes.give_back(pages);
        }
        !busy
    }

    /// Lets requests in while lanes and memory last, in the order of [`next`]. A quarter of the lanes is kept for users, who would
    /// else wait for a judge's whole reply.
    fn admit(&mut self) -> Result<(), EngineError> {
        let lanes = self.limits.concurrent;
        while self.running.len() < lanes {
            let waiting = self.waiting.iter().map(Reply::whose);
            let Some(index) = next(waiting, self.running.iter().map(Reply::whose)) else {
                break;
            };
            let reply = &self.waiting[index];
            let user = reply.params.priority == Priority::User;
            if !user && self.running.len() >= (lanes - lanes / 4).max(1) {
                break;
            }
            let capacity = reply.tokens.len() + reply.most.min(64);
            // The last token is always read anew: its row gives the first logits.
            let known = &reply.tokens[..reply.tokens.len() - 1];
            let found = self.prefixes.find(&self.pool, &reply.key, known);
            let mut cache = found.unwrap_or_else(|| KvCache::new(&self.pool, Vec::new(), 0));
            let more = capacity - cache.len();
            if !self.room(cache.growth(more)) {
                break;
            }
            let Some(mut reply) = self.waiting.remove(index) else {
                break;
            };
            cache.reserve(&self.k, more)?;
            reply.reused = cache.len();
            reply.cache = Some(cache);
            self.running.push(reply);
        }
        Ok(())
    }

    /// Indices of the replies that take a token now: all whose prompt is read, in order of arrival, but those that would have to
    /// grow while memory is used up. The oldest may always.
    fn chosen(&mut self) -> Vec<usize> {
        let (mut chosen, mut taken) = (Vec::new(), 0);
        let decoding = self.running.iter().enumerate();
        for (i, reply) in decoding.filter(|(_, r)| r.decoding()) {
            let growth = reply.cache.as_ref().map_or(0, |c| c.growth(1));
            let fits = growth == 0 || self.prefixes.make_room(&self.pool, taken + growth);
            if fits || i == 0 {
                taken += growth;
                chosen.push(i);
            }
        }
        chosen
    }

    /// One token for every reply whose prompt is read. True when there was any.
    fn decode(&mut self) -> Result<bool, EngineError> {
        let indices = self.chosen();
        if indices.is_empty() {
            return Ok(false);
        }
        let (k, base) = (&self.k, &self.base);
        let mut chosen: Vec<&mut Reply<K>> = self
            .running
            .iter_mut()
            .enumerate()
            .filter(|(i, _)| indices.contains(i))
            .map(|(_, r)| r)
            .collect();
        // Rows of one model stand together and run as one pass; among them those of one version, whose adapters run as one product.
        let model = |r: &Reply<K>| std::ptr::from_ref(version::model(&r.version, base)).addr();
        chosen.sort_by(|a, b| (model(a), &a.key).cmp(&(model(b), &b.key)));
        for rows in chosen.chunk_by_mut(|a, b| model(a) == model(b)) {
            decode(k, base, rows, &mut self.decode_work)?;
        }
        drop(chosen);
        let (over, on): (Vec<_>, Vec<_>) = self.running.drain(..).partition(|r| r.over.is_some());
        self.running = on;
        for mut reply in over {
            match reply.over.take() {
                Some(Err(error)) => reply.fail(error),
                Some(Ok(reason)) => self.end(reply, reason),
                None => self.running.push(reply),
            }
        }
        Ok(true)
    }

    /// The next chunk of the prompt that comes first. True when there was any.
    fn read_chunk(&mut self) -> Result<bool, EngineError> {
        let next = self
            .running
            .iter()
            .enumerate()
            .filter(|(_, r)| !r.decoding())
            .min_by_key(|(i, r)| (r.params.priority, *i));
        let Some(at) = next.map(|(i, _)| i) else {
            return Ok(false);
        };
        let (k, base) = (&self.k, &self.base);
        let reply = &mut self.running[at];
        let version = reply.version.clone();
        let model = version::model(&version, base);
        let Some(cache) = reply.cache.as_mut() else {
            return Ok(false);
        };
        let done = cache.len();
        let end = chunk_end(done, reply.tokens.len());
        let last = end == reply.tokens.len();
        let lease = (reply.params.priority == Priority::User).then(|| k.lease());
        let mut items = [Item {
            cache,
            tokens: &reply.tokens[done..end],
            version: version.clone(),
        }];
        let x = forward(k, model, &mut items, &mut self.chunk_work)?;
        if !last {
            return Ok(true);
        }
        let hidden = row(k, x, end - done - 1, base.config.hidden)?;
        let mut logits = logits(k, model, &hidden, 1)?;
        drop(lease);
        reply.started();
        match reply.draw(&mut logits) {
            Ok(None) => {}
            Ok(Some(reason)) => {
                let reply = self.running.remove(at);
                self.end(reply, reason);
            }
            Err(error) => self.running.remove(at).fail(error),
        }
        Ok(true)
    }

    /// Gives a text that is to be scored its memory. False when there is none now.
    fn begin(&mut self, at: usize) -> Result<bool, EngineError> {
        let scoring = &self.scoring[at];
        let known = &scoring.tokens[..scoring.from - 1];
        let found = self.prefixes.find(&self.pool, &scoring.key, known);
        let mut cache = found.unwrap_or_else(|| KvCache::new(&self.pool, Vec::new(), 0));
        let more = scoring.tokens.len() - cache.len();
        if !self.room(cache.growth(more)) {
            return Ok(false);
        }
        cache.reserve(&self.k, more)?;
        self.scoring[at].cache = Some(cache);
        Ok(true)
    }

    /// The next chunk of the text that is scored first. Behind replies that run, only one chunk a round.
    fn score_chunk(&mut self, replies_run: bool) -> Result<(), EngineError> {
        let first = |all: &VecDeque<Scoring<K>>, begun: bool| {
            let all = all
                .iter()
                .enumerate()
                .filter(|(_, s)| !begun || s.cache.is_some());
            all.min_by_key(|(i, s)| (s.priority(), *i)).map(|(i, _)| i)
        };
        let Some(mut at) = first(&self.scoring, false) else {
            return Ok(());
        };
        if self.scoring[at].cache.is_none() && !self.begin(at)? {
            // Memory comes back when what has begun ends.
            let Some(begun) = first(&self.scoring, true) else {
                return Ok(());
            };
            at = begun;
        }
        let Some(mut scoring) = self.scoring.remove(at) else {
            return Ok(());
        };
        let k = if replies_run {
            self.k.clone()
        } else {
            self.k.with_priority(Rank::Train)
        };
        match advance(&k, &self.base, &mut scoring, &mut self.chunk_work) {
            Ok(None) => self.scoring.push_front(scoring),
            Ok(Some(scored)) => {
                let _ = scoring.answer.send(Ok(scored)); // nobody waits any more
            }
            Err(error @ EngineError::Stopped(_)) => return Err(error),
            Err(error) => {
                let _ = scoring.answer.send(Err(error));
            }
        }
        Ok(())
    }
}

/// Who is let in next: users before judges, of these the profile with the fewest replies under way, then who came first. So a profile
/// that asks for much at once waits for itself, and nobody for it.
fn next<'a>(
    waiting: impl Iterator<Item = (Priority, &'a Profile)>,
    running: impl Iterator<Item = (Priority, &'a Profile)>,
) -> Option<usize> {
    let mut under_way: HashMap<&Profile, usize> = HashMap::new();
    running.for_each(|(_, profile)| *under_way.entry(profile).or_default() += 1);
    let rank = |(i, (priority, profile))| {
        let busy = under_way.get(profile).copied().unwrap_or(0);
        (priority, busy, i)
    };
    waiting.enumerate().map(rank).min().map(|(.., i)| i)
}

/// One token for each of these replies, whose rows all go through one model.
fn decode<K: Kernels>(
    k: &K,
    base: &BaseWeights<K>,
    replies: &mut [&mut Reply<K>],
    work: &mut Workspace<K>,
) -> Result<(), EngineError> {
    let lease = k.lease();
    let version = replies.first().and_then(|r| r.version.clone());
    let model = version::model(&version, base);
    let last: Vec<[u32; 1]> = replies
        .iter()
        .map(|r| [r.tokens.last().copied().unwrap_or(0)])
        .collect();
    let mut items: Vec<Item<'_, K>> = Vec::with_capacity(replies.len());
    for (reply, token) in replies.iter_mut().zip(&last) {
        let version = reply.version.clone();
        let Some(cache) = reply.cache.as_mut() else {
            continue;
        };
        items.push(Item {
            cache,
            tokens: token,
            version,
        });
    }
    let rows = items.len();
    let x = forward(k, model, &mut items, work)?;
    drop(items);
    let mut all = logits(k, model, x, rows)?;
    drop(lease);
    for (reply, logits) in replies.iter_mut().zip(all.chunks_mut(base.config.vocab)) {
        reply.over = reply.draw(logits).transpose();
    }
    Ok(())
}

/// Logits `[rows, V]` of hidden rows that are not yet normed.
fn logits<K: Kernels>(
    k: &K,
    base: &BaseWeights<K>,
    x: &K::Buf,
    rows: usize,
) -> Result<Vec<f32>, EngineError> {
    let c = &base.config;
    let mut normed = k.zeros(rows * c.hidden).map_err(kernel)?;
    k.rms_norm(x, &base.final_norm, hidden_norm(base, rows), &mut normed)
        .map_err(kernel)?;
    let mut out = k.zeros(rows * c.vocab).map_err(kernel)?;
    k.logits(&base.head, Mat::new(&normed, rows, c.hidden), &mut out)
        .map_err(kernel)?;
    let mut host = vec![0.0; rows * c.vocab];
    k.read(&out, 0, &mut host).map_err(kernel)?;
    Ok(host)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn users_come_before_judges_and_who_has_least_before_who_has_much() {
        let [a, b, c] = ["a", "b", "c"].map(|n| Profile::new(n).unwrap());
        let user = |p| (Priority::User, p);
        let waiting = [(Priority::Judge, &c), user(&a), user(&a), user(&b)];
        let running = [user(&a), user(&a), user(&b)];
        let next = |waiting: &[_], running: &[_]| {
            super::next(waiting.iter().copied(), running.iter().copied())
        };
        assert_eq!(next(&waiting, &running), Some(3), "b has one, a has two");
        assert_eq!(next(&waiting[..3], &running), Some(1), "a judge waits");
        assert_eq!(next(&waiting, &[]), Some(1), "the first to come");
        assert_eq!(next(&waiting[..1], &running), Some(0));
        assert_eq!(next(&[], &running), None);
    }
}
