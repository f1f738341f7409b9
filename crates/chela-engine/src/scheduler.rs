//! The engine's thread: decodes all running replies together, reads prompts in chunks between decode steps, scores texts when
//! nobody waits.

use crate::{
    error::kernel,
    forward::{Item, KvCache, Workspace, forward, hidden_norm},
    prefix::{PrefixCache, row},
    request::{Reply, Scoring},
    weights::BaseWeights,
};
use chela_core::{EngineError, FinishReason, PolicyVersion, Priority, Scored};
use chela_kernels::{Kernels, Mat, Pairs, Priority as Rank};
use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, TryRecvError},
    },
    time::{Duration, Instant},
};

/// Prompt tokens read between two decode steps; chunks end at multiples of it from the start of the text.
const CHUNK: usize = 256;

/// What the thread is told.
pub enum Order<K: Kernels> {
    /// Make a reply.
    Sample(Box<Reply<K>>),
    /// Score a text.
    Score(Box<Scoring<K>>),
    /// A version is gone.
    Forget(PolicyVersion),
    /// End.
    Stop,
}

/// How the thread runs.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Replies decoded together.
    pub concurrent: usize,
    /// Bytes of kept prefixes.
    pub prefix_bytes: usize,
    /// Part of the time that a learner at work gets while replies run.
    pub train_share: f64,
}

/// What the thread shares with the rest.
pub struct Link {
    /// Learners at work now.
    pub training: Arc<AtomicUsize>,
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
    prefixes: PrefixCache<K>,
    decode_work: Workspace<K>,
    chunk_work: Workspace<K>,
}

impl<K: Kernels> Scheduler<K> {
    /// A thread's state with nothing to do.
    pub fn new(k: &K, base: Arc<BaseWeights<K>>, limits: Limits, link: Link) -> Self {
        let prefixes = PrefixCache::new(limits.prefix_bytes);
        Self {
            k: k.with_priority(Rank::Serve),
            base,
            limits,
            link,
            waiting: VecDeque::new(),
            running: Vec::new(),
            scoring: VecDeque::new(),
            prefixes,
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
            *self.link.dead.lock().unwrap_or_else(PoisonError::into_inner) = Some(why.clone());
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
            Order::Stop => return false,
        }
        true
    }

    fn idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty() && self.scoring.is_empty()
    }

    /// One round. False when told to stop.
    fn turn(&mut self, orders: &Receiver<Order<K>>) -> Result<bool, EngineError> {
        if self.idle() {
            let Ok(order) = orders.recv() else { return Ok(false) };
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
        let share = self.limits.train_share.clamp(0.0, 0.9);
        if share > 0.0 && self.link.training.load(Ordering::Relaxed) > 0 {
            let pause = busy.as_secs_f64() * share / (1.0 - share);
            std::thread::sleep(Duration::from_secs_f64(pause.min(0.1)));
        }
    }

    fn drop_cancelled(&mut self) {
        self.waiting.retain(|r| !r.cancelled());
        let (gone, on): (Vec<_>, Vec<_>) = self.running.drain(..).partition(Reply::cancelled);
        self.running = on;
        for reply in gone {
            self.end(reply, FinishReason::Aborted);
        }
        self.scoring.retain(|s| !s.answer.is_canceled());
    }

    fn end(&mut self, reply: Reply<K>, reason: FinishReason) {
        let (version, tokens, cache) = reply.finish(reason);
        if let Some(cache) = cache {
            self.prefixes.keep(version, tokens, cache);
        }
    }

    fn cache(&self) -> Result<KvCache<K>, EngineError> {
        let c = &self.base.config;
        KvCache::new(&self.k, c.layers, c.kv_heads * c.head_dim, 64)
    }

    fn admit(&mut self) -> Result<(), EngineError> {
        while self.running.len() < self.limits.concurrent {
            let next = self.waiting.iter().enumerate().min_by_key(|(i, r)| (r.params.priority, *i));
            let Some(index) = next.map(|(i, _)| i) else { break };
            let Some(mut reply) = self.waiting.remove(index) else { break };
            // The last token is always read anew: its row gives the first logits.
            let known = &reply.tokens[..reply.tokens.len() - 1];
            let cache = match self.prefixes.find(&self.k, &reply.version, known, true)? {
                Some(cache) => cache,
                None => self.cache()?,
            };
            reply.reused = cache.len();
            reply.cache = Some(cache);
            self.running.push(reply);
        }
        Ok(())
    }

    /// One token for every reply whose prompt is read. True when there was any.
    fn decode(&mut self) -> Result<bool, EngineError> {
        let (k, base) = (&self.k, &self.base);
        let mut chosen: Vec<&mut Reply<K>> =
            self.running.iter_mut().filter(|r| r.decoding()).collect();
        if chosen.is_empty() {
            return Ok(false);
        }
        // Rows of one version stand together: their adapters run as one product.
        chosen.sort_by(|a, b| a.version.cmp(&b.version));
        let lease = k.lease();
        let last: Vec<[u32; 1]> =
            chosen.iter().map(|r| [r.tokens.last().copied().unwrap_or(0)]).collect();
        let mut items: Vec<Item<'_, K>> = Vec::with_capacity(chosen.len());
        for (reply, token) in chosen.iter_mut().zip(&last) {
            let adapter = reply.adapter.clone();
            let Some(cache) = reply.cache.as_mut() else { continue };
            items.push(Item { cache, tokens: token, adapter });
        }
        let rows = items.len();
        let x = forward(k, base, &mut items, &mut self.decode_work)?;
        drop(items);
        let mut all = logits(k, base, x, rows)?;
        drop(lease);
        for (reply, logits) in chosen.iter_mut().zip(all.chunks_mut(base.config.vocab)) {
            reply.over = reply.draw(logits).transpose();
        }
        drop(chosen);
        let (over, on): (Vec<_>, Vec<_>) =
            self.running.drain(..).partition(|r| r.over.is_some());
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
        let Some(at) = next.map(|(i, _)| i) else { return Ok(false) };
        let (k, base) = (&self.k, &self.base);
        let reply = &mut self.running[at];
        let adapter = reply.adapter.clone();
        let Some(cache) = reply.cache.as_mut() else { return Ok(false) };
        let done = cache.len();
        let end = ((done / CHUNK + 1) * CHUNK).min(reply.tokens.len());
        let last = end == reply.tokens.len();
        let lease = (reply.params.priority == Priority::User).then(|| k.lease());
        let mut items = [Item { cache, tokens: &reply.tokens[done..end], adapter }];
        let x = forward(k, base, &mut items, &mut self.chunk_work)?;
        if !last {
            return Ok(true);
        }
        let hidden = row(k, x, end - done - 1, base.config.hidden)?;
        let mut logits = logits(k, base, &hidden, 1)?;
        drop(lease);
        reply.started();
        match reply.draw(&mut logits) {
            Ok(None) => {}
            Ok(Some(reason)) => {
                let reply = self.running.swap_remove(at);
                self.end(reply, reason);
            }
            Err(error) => self.running.swap_remove(at).fail(error),
        }
        Ok(true)
    }

    /// The next chunk of the text that is scored first. Behind replies that run, only one chunk a round.
    fn score_chunk(&mut self, replies_run: bool) -> Result<(), EngineError> {
        let next = self.scoring.iter().enumerate().min_by_key(|(i, s)| (s.priority(), *i));
        let Some(at) = next.map(|(i, _)| i) else { return Ok(()) };
        let Some(mut scoring) = self.scoring.remove(at) else { return Ok(()) };
        let k = if replies_run { self.k.clone() } else { self.k.with_priority(Rank::Train) };
        if scoring.cache.is_none() {
            let known = &scoring.tokens[..scoring.from - 1];
            let found = self.prefixes.find(&k, &scoring.version, known, false)?;
            scoring.cache = Some(match found {
                Some(cache) => cache,
                None => self.cache()?,
            });
        }
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

/// Reads one more chunk; the scores when the text is through.
fn advance<K: Kernels>(
    k: &K,
    base: &BaseWeights<K>,
    scoring: &mut Scoring<K>,
    work: &mut Workspace<K>,
) -> Result<Option<Scored>, EngineError> {
    let width = base.config.hidden;
    let rows = scoring.tokens.len() - scoring.from;
    let adapter = scoring.adapter.clone();
    let Some(cache) = scoring.cache.as_mut() else {
        return Err(EngineError::Shape("scoring without a cache".to_owned()));
    };
    if scoring.hidden.is_none() {
        scoring.hidden = Some(k.zeros(rows * width).map_err(kernel)?);
    }
    let total = scoring.tokens.len() - 1;
    let done = cache.len();
    let end = ((done / CHUNK + 1) * CHUNK).min(total);
    let mut items = [Item { cache, tokens: &scoring.tokens[done..end], adapter }];
    let x = forward(k, base, &mut items, work)?;
    let first = scoring.from - 1; // row p predicts token p + 1
    if let (Some(hidden), true) = (scoring.hidden.as_mut(), end > first) {
        let from = done.max(first);
        let (src, dst) = ((from - done) * width, (from - first) * width);
        k.copy(x, src, hidden, dst, (end - from) * width).map_err(kernel)?;
    }
    if end < total {
        return Ok(None);
    }
    let Some(hidden) = scoring.hidden.take() else { return Ok(None) };
    head(k, base, scoring, &hidden, rows).map(Some)
}

fn head<K: Kernels>(
    k: &K,
    base: &BaseWeights<K>,
    scoring: &Scoring<K>,
    hidden: &K::Buf,
    rows: usize,
) -> Result<Scored, EngineError> {
    let width = base.config.hidden;
    let mut normed = k.zeros(rows * width).map_err(kernel)?;
    k.rms_norm(hidden, &base.final_norm, hidden_norm(base, rows), &mut normed).map_err(kernel)?;
    let want = &scoring.want;
    let (ids, n) = match &want.candidates {
        Some(named) => (named.ids(), named.k()),
        None => (&scoring.tokens[scoring.from..], 1),
    };
    let pair_rows: Vec<u32> = (0..rows as u32).collect();
    let temperatures = vec![1.0 / want.temperature; rows];
    let pairs =
        Pairs { rows: &pair_rows, inv_temperature: &temperatures, candidates: ids, k: n };
    let ask = chela_kernels::Want { entropy: want.entropy, top_k: want.top_k };
    let scores = k
        .head_scores(&base.head, Mat::new(&normed, rows, width), pairs, ask)
        .map_err(kernel)?;
    Ok(Scored {
        logprobs: scores.logprobs,
        entropy: scores.entropy.filter(|_| want.entropy),
        top: scores.top.map(|t| (t.ids, t.logprobs)),
        values: None,
    })
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
    k.rms_norm(x, &base.final_norm, hidden_norm(base, rows), &mut normed).map_err(kernel)?;
    let mut out = k.zeros(rows * c.vocab).map_err(kernel)?;
    k.logits(&base.head, Mat::new(&normed, rows, c.hidden), &mut out).map_err(kernel)?;
    let mut host = vec![0.0; rows * c.vocab];
    k.read(&out, 0, &mut host).map_err(kernel)?;
    Ok(host)
}
