//! Builds the parts, runs them, and stops them in order: no new requests, judging, training, then the store.

use crate::{
    config::Config,
    folder::{self, DataFolder},
    judges,
    keys::{KeyFile, Keys},
    probes,
    script::ScriptEngine,
};
use anyhow::{Context, Result, bail};
use chela_chat::Chat;
use chela_core::{
    AdapterSpec, EngineInfo, GroupRules, Learners, Millis, OptimParams, PolicyEngine, Profile,
    TrajectoryStore,
};
use chela_engine::{EngineOptions, LocalEngine};
use chela_model::{Model, ModelFiles, ModelSource, Progress, resolve};
use chela_rollout::{Rollout, RolloutConfig, TruncatedReplies, UnknownClients, labelled};
use chela_server::{App, ServerConfig};
use chela_store::Store;
use chela_train::{Algorithm, GateConfig, TrainConfig, Trainer, WatchConfig, restore::restore};
use std::{
    net::TcpListener,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::sync::watch;

/// What serves.
pub struct Loaded {
    /// Samples.
    pub engine: Arc<dyn PolicyEngine>,
    /// Learns, where the engine can.
    learners: Option<Arc<dyn Learners>>,
    /// The model's template and tokenizer.
    pub chat: Arc<Chat>,
}

/// Finds, fetches and loads the configured model.
pub fn load(config: &Config, progress: &mut dyn Progress) -> Result<Loaded> {
    let (engine, chat) = load_local(config, progress)?;
    tracing::info!("{}", engine.memory());
    Ok(Loaded {
        engine: engine.clone(),
        learners: Some(engine),
        chat,
    })
}

/// A scripted engine with the configured model's tokenizer and template; its weights are not read.
pub fn load_script(config: &Config, file: &Path, progress: &mut dyn Progress) -> Result<Loaded> {
    let model = Model::open_text(&find(config, progress)?)?;
    let chat = Arc::new(Chat::load(&model)?);
    let info = EngineInfo {
        model: model.name().to_owned(),
        context_length: model.config().context_length,
        vocabulary: model.config().vocab,
        tokenizer_hash: chat.tokenizer_hash().to_owned(),
    };
    let engine = Arc::new(ScriptEngine::open(file, info, chat.clone())?);
    Ok(Loaded {
        engine,
        learners: None,
        chat,
    })
}

/// The configured model's files, fetched when they are not there.
pub fn find(config: &Config, progress: &mut dyn Progress) -> Result<ModelFiles> {
    let cache = match config.model.cache_dir.as_str() {
        "" => folder::default_cache_dir()?,
        dir => PathBuf::from(dir),
    };
    std::fs::create_dir_all(&cache)
        .with_context(|| format!("cannot create the model cache {}", cache.display()))?;
    let source = ModelSource::parse(&config.model.name)?;
    Ok(resolve(&source, &cache, progress)?)
}

/// The configured model in the local engine.
pub fn load_local(
    config: &Config,
    progress: &mut dyn Progress,
) -> Result<(Arc<LocalEngine>, Arc<Chat>)> {
    let model = Model::open(&find(config, progress)?)?;
    let chat = Arc::new(Chat::load(&model)?);
    let options = EngineOptions {
        threads: config.model.threads,
        concurrent: config.model.max_concurrent,
        prefix_bytes: config.model.cache_mib.saturating_mul(1 << 20),
        train_share: config.learning.train_share,
        adapter_bytes: config.model.adapter_mib.saturating_mul(1 << 20),
        trained_rank: config.learning.lora_rank,
        activation_bytes: config.learning.activation_mib.saturating_mul(1 << 20),
        recompute: config.learning.recompute,
        train_whole: config.learning.on && config.learning.whole(),
        ..EngineOptions::default()
    };
    let engine = LocalEngine::open(&model, options).context(
        "the local engine (model.cache_mib, model.adapter_mib, learning.activation_mib)",
    )?;
    if engine.info().tokenizer_hash != chat.tokenizer_hash() {
        bail!(
            "engine and chat template read different tokenizers; the model's files do not belong together"
        );
    }
    Ok((engine, chat))
}

fn clock() -> Arc<dyn Fn() -> Millis + Send + Sync> {
    Arc::new(|| {
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| i64::try_from(d.as_millis()).unwrap_or(i64::MAX))
    })
}

/// A running server.
pub struct Running {
    /// `http://host:port`
    pub address: String,
    /// Key of its administrator.
    pub admin_key: String,
    stop: watch::Sender<bool>,
    stop_training: Arc<AtomicBool>,
    trainer: Option<JoinHandle<()>>,
    runtime: Option<tokio::runtime::Runtime>,
    served: Option<tokio::task::JoinHandle<std::io::Result<()>>>,
    judging: Option<tokio::task::JoinHandle<()>>,
    _folder: DataFolder,
}

/// The address, taken before anything slow, so that a port in use is said at once.
pub fn bind(config: &Config) -> Result<TcpListener> {
    let (host, port) = (config.server.host.as_str(), config.server.port);
    let listener = TcpListener::bind((host, port)).with_context(|| {
        format!("cannot listen on {host}:{port}; if the port is in use, choose another with --port")
    })?;
    listener
        .set_nonblocking(true)
        .context("the listening socket")?;
    Ok(listener)
}

/// Starts everything on a locked folder.
pub fn start(
    config: &Config,
    folder: DataFolder,
    listener: TcpListener,
    loaded: &Loaded,
) -> Result<Running> {
    let data = folder.path().to_path_buf();
    let store: Arc<dyn TrajectoryStore> = Arc::new(Store::open(&data)?);
    let engine: Arc<dyn PolicyEngine> = loaded.engine.clone();
    let train = train_config(config, &data, &loaded.chat)?;
    let clock = clock();
    // A scripted engine has no weights: it would find every version broken.
    if loaded.learners.is_some() {
        restore(&*store, &*engine, &train, clock())?;
    }
    let judges = judges::build(config, &engine, &loaded.chat)?;
    let rollout = Rollout::new(
        store.clone(),
        engine.clone(),
        loaded.chat.clone(),
        judges,
        clock.clone(),
        rollout_config(config, &data, &train)?,
    );
    let (steering, alarms) = (rollout.steering(), rollout.alarms());
    let keys = KeyFile::of(&data);
    let admin_key = keys.admin()?;
    let gatekeeper = Keys::open(keys, config.server.auth == "keys", store.clone())?;
    let local = listener.local_addr().context("the listening address")?;
    let address = format!("http://{local}");
    let app = App {
        engine: engine.clone(),
        chat: loaded.chat.clone(),
        recorder: rollout.clone(),
        control: rollout.clone(),
        gatekeeper: Arc::new(gatekeeper),
        config: server_config(config, &local),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let (stop, stopped) = watch::channel(false);
    let until = |mut stopped: watch::Receiver<bool>| async move {
        let _ = stopped.wait_for(|s| *s).await; // the sender gone means stop as well
    };
    let listener = {
        let _inside = runtime.enter();
        tokio::net::TcpListener::from_std(listener).context("the listening socket")?
    };
    let served = runtime.spawn(chela_server::serve(listener, app, until(stopped.clone())));
    let judging = runtime.spawn(rollout.run(until(stopped)));
    let stop_training = Arc::new(AtomicBool::new(false));
    let learners = loaded.learners.clone().filter(|_| config.learning.on);
    let trainer = if let Some(learners) = learners {
        let mut trainer = Trainer::new(store, engine, learners, train, clock)
            .steered_by(steering)
            .alarming(alarms);
        let flag = stop_training.clone();
        let thread = std::thread::Builder::new().name("chela-train".to_owned());
        Some(
            thread
                .spawn(move || trainer.run(&flag))
                .context("cannot start the trainer")?,
        )
    } else {
        None
    };
    folder.announce(&address)?;
    Ok(Running {
        address,
        admin_key,
        stop,
        stop_training,
        trainer,
        runtime: Some(runtime),
        served: Some(served),
        judging: Some(judging),
        _folder: folder,
    })
}

impl Running {
    /// Blocks until the server has ended by itself, which it does only on failure; false when `patience` passed first.
    pub fn failed_within(&mut self, patience: Duration) -> bool {
        std::thread::sleep(patience);
        self.served
            .as_ref()
            .is_some_and(tokio::task::JoinHandle::is_finished)
    }

    /// Finishes running replies, judging and the step under way, flushes, and ends.
    pub fn stop(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        self.stop.send_replace(true);
        self.stop_training.store(true, Ordering::Relaxed);
        let Some(runtime) = self.runtime.take() else {
            return Ok(());
        };
        let served = self.served.take();
        let judging = self.judging.take();
        let outcome = runtime.block_on(async {
            let outcome = match served {
                Some(task) => task.await.context("the server's task")?.context("serving"),
                None => Ok(()),
            };
            if let Some(task) = judging {
                task.await.context("the judging task")?;
            }
            outcome
        });
        if let Some(trainer) = self.trainer.take()
            && trainer.join().is_err()
        {
            bail!("the trainer's thread panicked");
        }
        runtime.shutdown_timeout(Duration::from_secs(2));
        outcome
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::error!("stopping: {error:#}");
        }
    }
}

fn server_config(config: &Config, local: &std::net::SocketAddr) -> ServerConfig {
    let defaults = ServerConfig::default();
    let mut bound_names = defaults.bound_names.clone();
    bound_names.push(config.server.host.clone());
    bound_names.push(local.ip().to_string());
    bound_names.extend(config.server.hosts.iter().cloned());
    ServerConfig {
        bound_names,
        cors_origins: config.server.cors_origins.clone(),
        profile_requests: config.server.profile_requests,
        strict_models: config.server.strict_models,
        grace: Duration::from_secs(config.server.grace_seconds),
        ..defaults
    }
}

/// Profiles that never learn.
fn frozen(config: &Config) -> Result<Vec<Profile>> {
    let names = config.learning.frozen.iter().map(Profile::new);
    Ok(names.collect::<Result<_, _>>()?)
}

fn rollout_config(config: &Config, data: &Path, train: &TrainConfig) -> Result<RolloutConfig> {
    let learning = &config.learning;
    Ok(RolloutConfig {
        learning: learning.on,
        truncated: match learning.truncated.as_str() {
            "bad" => TruncatedReplies::Bad,
            "judged" => TruncatedReplies::Judged,
            _ => TruncatedReplies::Exclude,
        },
        unknown_clients: match learning.unknown_clients.as_str() {
            "side" => UnknownClients::Side,
            _ => UnknownClients::Main,
        },
        frozen: frozen(config)?,
        session_idle: Duration::from_secs(learning.session_idle * 60),
        keep_neutral: learning.baseline,
        canaries: labelled::read(labelled::BUILT_IN).context("the built-in labelled turns")?,
        canary_rate: config.judge.canary_rate,
        max_judge_error: config.judge.max_judge_error,
        groups: learning.on.then(|| GroupRules {
            algorithm: train.algorithm.name().to_owned(),
            groups: train.groups,
            max_staleness: train.max_staleness,
            reply_limit: train.reply_limit,
        }),
        // A judge's votes run side by side, then its votes on hints; and what stands around them.
        judge_timeout: Duration::from_secs(config.judge.timeout.saturating_mul(3)),
        ..RolloutConfig::new(data)
    })
}

/// What a checked configuration names.
fn named<T>(find: fn(&str) -> Option<T>, name: &str) -> Result<T> {
    find(name).with_context(|| format!("{name:?} is not known"))
}

/// When and how to train.
pub fn train_config(config: &Config, data: &Path, chat: &Chat) -> Result<TrainConfig> {
    let learning = &config.learning;
    let canary = chat.encode(probes::CANARY)?;
    let (probes, open) = probes::rendered(chat)?;
    let defaults = TrainConfig::new(data.to_path_buf(), canary);
    Ok(TrainConfig {
        batch: learning.batch,
        min_batch: learning.min_batch,
        batch_timeout_ms: i64::try_from(learning.batch_timeout * 1000).unwrap_or(i64::MAX),
        max_staleness: learning.max_staleness,
        max_session_share: learning.max_session_share as f32,
        groups: learning.groups,
        algorithm: Algorithm::named(&learning.algorithm).unwrap_or(defaults.algorithm),
        reply_limit: (learning.reply_limit > 0).then_some(learning.reply_limit),
        max_steps: (learning.max_steps > 0).then_some(learning.max_steps),
        advantage: chela_train::AdvantageConfig {
            method: match learning.method.as_str() {
                "binary" => chela_train::Method::Binary,
                "opd" => chela_train::Method::Opd,
                _ => chela_train::Method::Combined,
            },
            opd_clip: learning.opd_clip as f32,
            reward_clip: learning.reward_clip as f32,
            ..defaults.advantage.clone()
        },
        baseline: learning.baseline,
        regular: chela_train::Regular {
            kl: learning.kl as f32,
            estimator: named(chela_train::Estimator::named, &learning.kl_estimator)?,
            entropy: learning.entropy as f32,
        },
        minibatches: learning.minibatches,
        proximal: named(chela_train::Proximal::named, &learning.proximal)?,
        optim: OptimParams {
            lr: learning.rate() as f32,
            clip: learning.clip_norm as f32,
            ..OptimParams::default()
        },
        adapter: AdapterSpec {
            whole: learning.whole(),
            rank: learning.lora_rank,
            alpha: learning.lora_alpha as f32,
            seed: learning.seed,
            value_head: Algorithm::named(&learning.algorithm).is_some_and(Algorithm::values),
            ..AdapterSpec::default()
        },
        gate: GateConfig {
            on: learning.gate,
            held_out: if learning.gate {
                learning.held_out
            } else {
                0.0
            },
            kl_budget: learning.kl_budget,
            probe_drop: learning.probe_drop,
            probes,
            open,
            end_ids: chat.end_ids().to_vec(),
            ..GateConfig::default()
        },
        watch: WatchConfig {
            turns: learning.watch_turns,
            margin: learning.rollback_margin,
            ..WatchConfig::default()
        },
        frozen: frozen(config)?,
        metrics: learning.metrics,
        ..defaults
    })
}
