//! [`LocalEngine`]: the seam's engine and learners over one set of base weights.

use crate::{
    learners::{Learning, whole_is_possible},
    loader::{Loader, Waiter},
    memory::{self, Asked, MemoryPlan},
    pages::{Pool, PoolUse},
    prefix::CacheKey,
    request::Reply,
    scheduler::{Limits, Link, Order, Scheduler},
    scoring::Scoring,
    weights::BaseWeights,
};
use chela_core::{
    AdapterSpec, BoxFuture, EngineError, EngineInfo, PolicyEngine, PolicyRef, PolicyVersion,
    Profile, Prompt, Sampling, SamplingParams, Scored, Want, Weights,
};
use chela_kernels::Cpu;
use chela_model::{Model, ModelConfig, ModelFiles};
use futures_channel::{mpsc::unbounded, oneshot};
use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::AtomicUsize,
        mpsc::{Sender, channel},
    },
    thread::JoinHandle,
};

/// How the engine runs.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Worker threads; 0 = one for each core.
    pub threads: usize,
    /// Name of the base model; empty = the model's own.
    pub model_name: String,
    /// Replies decoded together.
    pub concurrent: usize,
    /// Bytes of keys and values: of running requests, and with what they leave, of kept prefixes. 0 = a quarter of the machine's
    /// memory, or what is left of it.
    pub prefix_bytes: usize,
    /// Bytes of adapters that stay in memory while no request uses them; the least recently used leaves first and comes back when a
    /// request names it. 0 = a sixteenth of the machine's memory, at least 256 MiB, or what is left of it. (There is no limit by
    /// profile: old versions of one are simply not used any more.)
    pub adapter_bytes: usize,
    /// Part of their rate that replies give up for a learner at work.
    pub train_share: f64,
    /// Rows a learner runs together.
    pub train_rows: usize,
    /// Bytes that a learner keeps for the way back: activations, and keys and values of a long path. What needs more is walked through
    /// in steps, some of them read twice. 0 = a quarter of the machine's memory, at most 4 GiB, or what is left of it.
    pub activation_bytes: usize,
    /// Keep only each layer's input for the way back, and run the layer again.
    pub recompute: bool,
    /// Rank of the adapters that are trained, for the statement of what memory is needed; 0 = none.
    pub trained_rank: usize,
    /// Learners train all weights: memory is divided so that one learner and two such versions fit, and a model that cannot be trained so
    /// is refused at once.
    pub train_whole: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            threads: 0,
            model_name: String::new(),
            concurrent: 16,
            prefix_bytes: 0,
            train_share: 0.1,
            adapter_bytes: 0,
            train_rows: 768,
            activation_bytes: 0,
            recompute: false,
            trained_rank: AdapterSpec::default().rank,
            train_whole: false,
        }
    }
}

/// The local engine. Cheap to share by `Arc`; dropping the last handle ends its thread.
pub struct LocalEngine {
    pub(crate) k: Cpu,
    pub(crate) base: Arc<BaseWeights<Cpu>>,
    /// Where the base model's texts lie.
    pub(crate) files: ModelFiles,
    info: EngineInfo,
    pub(crate) options: EngineOptions,
    pool: Pool<Cpu>,
    memory: MemoryPlan,
    loader: Loader<Cpu>,
    pub(crate) training: Arc<AtomicUsize>,
    dead: Arc<Mutex<Option<String>>>,
    pub(crate) learning: Learning,
    orders: Mutex<Sender<Order<Cpu>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl LocalEngine {
    /// Loads a model's weights and starts the thread.
    pub fn open(model: &Model, mut options: EngineOptions) -> Result<Arc<Self>, EngineError> {
        let threads = match options.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            n => n,
        };
        let k = Cpu::new(threads);
        let base = Arc::new(BaseWeights::load(model, &k)?);
        if options.train_whole {
            whole_is_possible(&k, &base, memory::machine())?;
        }
        let memory = plan(&k, &base, &options)?;
        options.prefix_bytes = memory.cache;
        options.adapter_bytes = memory.adapters;
        options.activation_bytes = memory.activations;
        let name = match options.model_name.as_str() {
            "" => model.name().to_owned(),
            name => name.to_owned(),
        };
        let info = EngineInfo {
            model: name,
            context_length: base.config.context_length,
            vocabulary: base.config.vocab,
            // Weights without a tokenizer can be sampled and trained; whoever renders text compares the hash and refuses.
            tokenizer_hash: model.tokenizer_hash().unwrap_or_default(),
        };
        let (training, replies) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let dead = Arc::new(Mutex::new(None));
        let limits = Limits {
            concurrent: options.concurrent.max(1),
            train_share: options.train_share,
        };
        let link = Link {
            training: training.clone(),
            replies: replies.clone(),
            dead: dead.clone(),
        };
        let c = &base.config;
        let pool = Pool::new(c.layers, c.kv_heads * c.head_dim, options.prefix_bytes);
        let scheduler = Scheduler::new(&k, (base.clone(), pool.clone()), limits, link);
        let (orders, inbox) = channel();
        let budget = (options.adapter_bytes, options.concurrent.max(1));
        let link_of_loader = (orders.clone(), replies);
        let loader = Loader::new(&k, base.clone(), link_of_loader, budget)?;
        let thread = std::thread::Builder::new()
            .name("chela-engine".to_owned())
            .spawn(move || scheduler.run(inbox))
            .map_err(|e| EngineError::Stopped(format!("cannot start its thread: {e}")))?;
        Ok(Arc::new(Self {
            k,
            base,
            files: model.files(),
            info,
            options,
            pool,
            memory,
            loader,
            training,
            dead,
            learning: Arc::default(),
            orders: Mutex::new(orders),
            thread: Mutex::new(Some(thread)),
        }))
    }

    /// The kernels, for measurements.
    pub fn kernels(&self) -> &Cpu {
        &self.k
    }

    /// Parameters that a token passes through in a linear map, without embedding and head; and those of the head.
    pub fn parameters(&self) -> (usize, usize) {
        let c = &self.base.config;
        let maps: usize = crate::adapter::Target::of(c)
            .iter()
            .map(|t| {
                let (out, input) = t.shape(c);
                out * input
            })
            .sum();
        let experts = c.experts.map_or(0, |experts| {
            experts.count * c.hidden + experts.active * 3 * c.intermediate * c.hidden
        });
        ((maps + experts) * c.layers, c.vocab * c.hidden)
    }

    /// Parameters of an adapter of that rank over all maps.
    pub fn low_rank_parameters(&self, rank: usize) -> usize {
        low_rank_parameters(&self.base.config, rank)
    }

    /// How the machine's memory was divided at the start.
    pub fn memory(&self) -> MemoryPlan {
        self.memory
    }

    fn order(&self, order: Order<Cpu>) -> Result<(), EngineError> {
        self.alive()?;
        let orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        orders
            .send(order)
            .map_err(|_| EngineError::Stopped("its thread has ended".to_owned()))
    }

    fn alive(&self) -> Result<(), EngineError> {
        match &*self.dead.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(why) => Err(EngineError::Stopped(why.clone())),
            None => Ok(()),
        }
    }

    /// What a request's policy means now. What is kept of texts is filed by profile, also under the base model.
    fn key(&self, policy: PolicyRef) -> CacheKey {
        let named = policy != PolicyRef::Base;
        let version = match policy {
            PolicyRef::Base => PolicyVersion::base(Profile::default()),
            PolicyRef::Served(profile) => self.loader.served(&profile),
            PolicyRef::Version(version) => version,
        };
        CacheKey {
            version,
            load: 0,
            named,
        }
    }

    /// Bytes of cached keys and values.
    pub fn cached(&self) -> PoolUse {
        self.pool.usage()
    }

    /// Bytes of adapters in memory, and their number.
    pub fn adapters(&self) -> (usize, usize) {
        self.loader.held()
    }

    fn check(&self, tokens: &[u32]) -> Result<(), EngineError> {
        let vocabulary = self.info.vocabulary;
        match tokens.iter().find(|t| **t as usize >= vocabulary) {
            Some(id) => Err(EngineError::Token(*id, vocabulary)),
            None if tokens.is_empty() => Err(EngineError::Shape("an empty prompt".to_owned())),
            None => Ok(()),
        }
    }

    fn scoring(
        &self,
        policy: PolicyRef,
        prompt: Prompt,
        from: usize,
        want: Want,
    ) -> Result<oneshot::Receiver<Result<Scored, EngineError>>, EngineError> {
        let tokens = prompt.tokens;
        self.check(&tokens)?;
        let (n, context) = (tokens.len(), self.info.context_length);
        if n > context {
            return Err(EngineError::ContextLength { prompt: n, context });
        }
        if from == 0 || from >= n {
            return Err(EngineError::Shape(format!(
                "scores from {from} of {n} tokens"
            )));
        }
        if !(want.temperature.is_finite() && want.temperature > 0.0) {
            return Err(EngineError::Shape(format!(
                "temperature {}",
                want.temperature
            )));
        }
        if let Some(named) = &want.candidates {
            if named.rows() != n - from {
                return Err(EngineError::Shape(format!(
                    "{} candidate rows",
                    named.rows()
                )));
            }
            self.check(named.ids())?;
        }
        self.alive()?;
        let (answer, receiver) = oneshot::channel();
        let scoring = Scoring {
            key: self.key(policy),
            version: None,
            tokens,
            from,
            want,
            answer,
            cache: None,
            hidden: None,
        };
        self.loader.send(Waiter::Score(Box::new(scoring)))?;
        Ok(receiver)
    }
}

fn low_rank_parameters(c: &ModelConfig, rank: usize) -> usize {
    let targets = crate::adapter::Target::of(c);
    let shapes = targets.iter().map(|t| t.shape(c));
    shapes.map(|(out, input)| out + input).sum::<usize>() * c.layers * rank
}

/// Divides this machine's memory between the parts of the engine.
fn plan(
    k: &Cpu,
    base: &BaseWeights<Cpu>,
    options: &EngineOptions,
) -> Result<MemoryPlan, EngineError> {
    let asked = Asked {
        cache: options.prefix_bytes,
        adapters: options.adapter_bytes,
        activations: options.activation_bytes,
    };
    // Adapter, gradient and two moments, all f32.
    let (optimizer, version) = if options.train_whole {
        memory::whole(&base.config)
    } else {
        let parameters = low_rank_parameters(&base.config, options.trained_rank);
        (4 * 4 * parameters, 4 * parameters)
    };
    let fixed = (base.bytes(k), optimizer, version);
    MemoryPlan::new(memory::machine(), fixed, asked)
}

impl Drop for LocalEngine {
    fn drop(&mut self) {
        let orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = orders.send(Order::Stop); // it may have ended by itself
        drop(orders);
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread {
            let _ = thread.join(); // its panics are caught and kept in `dead`
        }
    }
}

impl PolicyEngine for LocalEngine {
    fn info(&self) -> EngineInfo {
        self.info.clone()
    }

    fn served(&self, profile: &Profile) -> PolicyVersion {
        self.loader.served(profile)
    }

    fn sample(
        &self,
        policy: PolicyRef,
        prompt: Prompt,
        params: SamplingParams,
    ) -> Result<Sampling, EngineError> {
        self.check(&prompt.tokens)?;
        let (n, context) = (prompt.tokens.len(), self.info.context_length);
        if n >= context {
            return Err(EngineError::ContextLength { prompt: n, context });
        }
        let most = params.max_tokens.max(1).min(context - n);
        self.alive()?;
        let (events, stream) = unbounded();
        let reply = Reply::new(self.key(policy), prompt.tokens, (params, most), events);
        self.loader.send(Waiter::Reply(Box::new(reply)))?;
        Ok(Box::pin(stream))
    }

    fn score(
        &self,
        policy: PolicyRef,
        prompt: Prompt,
        from: usize,
        want: Want,
    ) -> BoxFuture<'static, Result<Scored, EngineError>> {
        let receiver = self.scoring(policy, prompt, from, want);
        Box::pin(async move {
            match receiver?.await {
                Ok(answer) => answer,
                Err(_) => Err(EngineError::Stopped("its thread has ended".to_owned())),
            }
        })
    }

    fn load(
        &self,
        version: PolicyVersion,
        weights: Weights,
    ) -> BoxFuture<'static, Result<String, EngineError>> {
        let Weights::Folder(dir) = weights;
        if version.number == 0 {
            return Box::pin(async { Err(crate::error::weights("version 0 is the base model")) });
        }
        let receiver = self.loader.publish(version, dir);
        Box::pin(async move {
            match receiver.await {
                Ok(answer) => answer,
                Err(_) => Err(EngineError::Stopped("loading ended early".to_owned())),
            }
        })
    }

    fn register(&self, version: PolicyVersion, weights: Weights, hash: Option<String>) {
        let Weights::Folder(dir) = weights;
        if version.number != 0 {
            self.loader.register(version, dir, hash);
        }
    }

    fn serve(&self, version: &PolicyVersion) -> Result<(), EngineError> {
        self.loader.serve(version)
    }

    fn unload(&self, version: &PolicyVersion) {
        if self.loader.unload(version) {
            let _ = self.order(Order::Forget(version.clone())); // a dead engine keeps no caches
        }
    }

    fn forget_texts(&self, profile: &Profile) {
        // First what waits: it may go on at any time, and the engine's thread then marks it too.
        self.loader.forget_texts(profile);
        let _ = self.order(Order::ForgetTexts(profile.clone())); // a dead engine keeps no caches
    }

    fn health(&self) -> Result<(), String> {
        self.alive().map_err(|e| e.to_string())
    }

    fn memory_parts(&self) -> Vec<(&'static str, u64)> {
        self.memory.parts().map(|(n, b)| (n, b as u64)).to_vec()
    }
}
