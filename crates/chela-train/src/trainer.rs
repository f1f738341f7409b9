//! The loop: looks at each profile's queue, makes a step when a batch is ready, publishes it, and picks up after a restart.

use crate::{
    TrainError,
    batch::{self, Prepared},
    chain::{self, Chain},
    config::TrainConfig,
    publish::{Publisher, checkpoint_name},
    step,
};
use chela_core::{
    Checkpoint, Event, Learner, Learners, LeasedSample, Millis, PolicyEngine, PolicyVersion,
    Profile, SampleId, StepCommit, TrajectoryStore, VersionRecord, VersionState,
};
use chela_rl::baseline::Baseline;
use futures_executor::block_on;
use std::{
    collections::{HashMap, HashSet},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

/// What one look at a profile's queue came to.
#[derive(Clone, Debug, PartialEq)]
pub enum Progress {
    /// No batch is ready, training is paused, or the limit of steps is reached.
    Idle,
    /// A step was made and its version is served.
    Served(PolicyVersion),
    /// A step was made and its version rejected.
    Rejected(PolicyVersion),
    /// The step was not finite; weights are as they were, its samples dropped.
    Skipped,
}

struct Open {
    learner: Box<dyn Learner>,
    /// The version whose weights the learner holds.
    at: u64,
}

/// Trains all profiles; owned by one thread.
pub struct Trainer {
    store: Arc<dyn TrajectoryStore>,
    engine: Arc<dyn PolicyEngine>,
    learners: Arc<dyn Learners>,
    config: TrainConfig,
    clock: Arc<dyn Fn() -> Millis + Send + Sync>,
    open: HashMap<Profile, Open>,
}

/// Learners of this many profiles stay open; more are closed and reopened from their checkpoints.
const OPEN_LEARNERS: usize = 2;

impl Trainer {
    /// A trainer with nothing opened yet.
    pub fn new(
        store: Arc<dyn TrajectoryStore>,
        engine: Arc<dyn PolicyEngine>,
        learners: Arc<dyn Learners>,
        config: TrainConfig,
        clock: Arc<dyn Fn() -> Millis + Send + Sync>,
    ) -> Self {
        Self {
            store,
            engine,
            learners,
            config,
            clock,
            open: HashMap::new(),
        }
    }

    /// Serves again what was served when the process ended, and deletes folders of steps that were never committed. Before
    /// requests are taken; trains nothing.
    pub fn restore(
        store: &dyn TrajectoryStore,
        engine: &dyn PolicyEngine,
        config: &TrainConfig,
    ) -> Result<(), TrainError> {
        let publisher = Publisher {
            engine,
            store,
            config,
        };
        let mut named = HashSet::new();
        for profile in store.profiles()? {
            let versions = store.versions(&profile)?;
            named.extend(versions.iter().filter_map(|v| v.checkpoint.clone()));
            if let Some(record) = chain::served(&versions) {
                publisher.load(record)?;
                engine.serve(&record.version)?;
                tracing::info!(version = %record.version, "serving again");
            }
        }
        delete_unnamed(&config.data_dir, &named)
    }

    /// Runs until `stop` is set: a step already begun is finished first.
    pub fn run(&mut self, stop: &AtomicBool) {
        let mut pause = Duration::from_millis(50);
        while !stop.load(Ordering::Relaxed) {
            match self.tick(stop) {
                Ok(true) => pause = Duration::from_millis(50),
                Ok(false) => std::thread::sleep(pause),
                Err(error) => {
                    tracing::error!(%error, "training step failed; trying again in 5 s");
                    self.open.clear();
                    for _ in 0..50 {
                        if !stop.load(Ordering::Relaxed) {
                            std::thread::sleep(Duration::from_millis(100));
                        }
                    }
                }
            }
        }
    }

    /// Looks at every profile once. True when a step was made.
    fn tick(&mut self, stop: &AtomicBool) -> Result<bool, TrainError> {
        let mut worked = false;
        for profile in self.store.profiles()? {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            worked |= self.advance(&profile)? != Progress::Idle;
        }
        Ok(worked)
    }

    /// Looks at one profile's queue and makes a step when a batch is ready.
    pub fn advance(&mut self, profile: &Profile) -> Result<Progress, TrainError> {
        if self.store.paused(profile)?.is_some() {
            return Ok(Progress::Idle);
        }
        let versions = self.store.versions(profile)?;
        if let Some(record) = chain::unfinished(&versions) {
            return self.finish(record.clone());
        }
        let head = chain::served(&versions).cloned();
        let number = head.as_ref().map_or(0, |v| v.version.number);
        let chain = Chain::of(number, &versions);
        if self
            .config
            .max_steps
            .is_some_and(|most| chain.head_steps() >= most)
        {
            return Ok(Progress::Idle);
        }
        let pending = self.store.pending(profile)?;
        let selection = batch::select(&pending, &chain, &self.config, (self.clock)());
        self.drop_pending(&selection.dropped)?;
        if selection.batch.is_empty() {
            return Ok(Progress::Idle);
        }
        let leased = block_on(self.store.lease(selection.batch.clone()))?;
        let parent = Parent {
            number,
            steps: chain.head_steps(),
            record: head,
        };
        match self.step(profile, &parent, &versions, &leased) {
            Ok(Made::Nothing(progress)) => Ok(progress),
            // Committed: from here on the version is a candidate, whatever happens to its publish.
            Ok(Made::Version(record)) => self.finish(record),
            Err(error) => {
                // Nothing was committed: the samples wait again.
                self.open.remove(profile);
                block_on(self.store.release(selection.batch))?;
                Err(error)
            }
        }
    }

    fn drop_pending(&self, dropped: &[(SampleId, &'static str)]) -> Result<(), TrainError> {
        let mut by_reason: HashMap<&str, Vec<SampleId>> = HashMap::new();
        for (id, why) in dropped {
            by_reason.entry(why).or_default().push(*id);
        }
        let events: Vec<Event> = by_reason
            .into_iter()
            .map(|(why, samples)| Event::Dropped {
                samples,
                why: why.to_owned(),
            })
            .collect();
        if !events.is_empty() {
            block_on(self.store.append(events))?;
        }
        Ok(())
    }

    fn step(
        &mut self,
        profile: &Profile,
        parent: &Parent,
        versions: &[VersionRecord],
        leased: &[LeasedSample],
    ) -> Result<Made, TrainError> {
        let mut baseline = parent.baseline();
        let prepared = batch::prepare(leased, &self.config, &baseline)?;
        let number = versions.iter().map(|v| v.version.number).max().unwrap_or(0) + 1;
        let version = PolicyVersion {
            profile: profile.clone(),
            number,
        };
        if prepared.samples.is_empty() {
            return self
                .nothing_learnt(profile, leased, &prepared)
                .map(Made::Nothing);
        }
        let started = std::time::Instant::now();
        let checkpoint = self.config.data_dir.join(checkpoint_name(&version));
        let config = self.config.clone();
        let learner = self.learner(profile, parent)?;
        let outcome = step::run(learner, &prepared, &config)?;
        if outcome.report.skipped {
            return self.skipped(profile, leased).map(Made::Nothing);
        }
        create_parent(&checkpoint)?;
        learner.save(&checkpoint)?;
        let kl = step::kl_to_base(&*self.engine, &prepared, &outcome.logprobs, &self.config)?;
        let seconds = started.elapsed().as_secs_f64();
        baseline.update(&prepared.rewards);
        let record = VersionRecord {
            version: version.clone(),
            parent: parent.number,
            steps: parent.steps + 1,
            state: VersionState::Candidate,
            receipt: None,
            checkpoint: Some(checkpoint_name(&version)),
            samples: prepared.ids.clone(),
            metrics: metrics(&prepared, &outcome, &baseline, kl, seconds),
            created: (self.clock)(),
        };
        let commit = StepCommit {
            version: record.clone(),
            dropped: prepared.left_out.clone(),
        };
        block_on(self.store.commit_step(commit))?;
        if let Some(open) = self.open.get_mut(profile) {
            open.at = number;
        }
        Ok(Made::Version(record))
    }

    /// Publishes a committed candidate and lets older versions go.
    fn finish(&mut self, record: VersionRecord) -> Result<Progress, TrainError> {
        let profile = record.version.profile.clone();
        let at = Parent {
            number: record.version.number,
            steps: record.steps,
            record: Some(record.clone()),
        };
        self.learner(&profile, &at)?;
        let Some(open) = self.open.get_mut(&profile) else {
            return Ok(Progress::Idle);
        };
        // An operator may have gone back meanwhile: what was trained from another version is not published over that.
        let now = self.store.versions(&profile)?;
        if chain::served(&now).map_or(0, |v| v.version.number) != record.parent {
            let why = "another version was put in its parent's place during the step".to_owned();
            let (version, state) = (record.version.clone(), VersionState::Rejected(why));
            block_on(self.store.append(vec![Event::Version {
                version,
                state,
                receipt: None,
            }]))?;
            self.open.remove(&profile);
            return Ok(Progress::Rejected(record.version));
        }
        let publisher = Publisher {
            engine: &*self.engine,
            store: &*self.store,
            config: &self.config,
        };
        if !publisher.publish(&record, &mut *open.learner)? {
            // The learner must not go on from weights that were rejected.
            self.open.remove(&profile);
            return Ok(Progress::Rejected(record.version));
        }
        let versions = self.store.versions(&profile)?;
        let keep = self
            .config
            .resident
            .max(self.config.max_staleness as usize + 1);
        for old in versions.iter().rev().skip(keep + 1) {
            self.engine.unload(&old.version);
        }
        Ok(Progress::Served(record.version))
    }

    /// The learner holding exactly `parent`'s weights: the open one, or one opened from the checkpoint.
    fn learner(
        &mut self,
        profile: &Profile,
        parent: &Parent,
    ) -> Result<&mut dyn Learner, TrainError> {
        if self
            .open
            .get(profile)
            .is_some_and(|o| o.at != parent.number)
        {
            self.open.remove(profile);
        }
        if !self.open.contains_key(profile) {
            if self.open.len() >= OPEN_LEARNERS {
                self.open.clear();
            }
            let from = parent.checkpoint(&self.config.data_dir);
            let learner = self
                .learners
                .open(profile, &self.config.adapter, from.as_ref())?;
            self.open.insert(
                profile.clone(),
                Open {
                    learner,
                    at: parent.number,
                },
            );
        }
        match self.open.get_mut(profile) {
            Some(open) => Ok(&mut *open.learner),
            None => Err(chela_core::EngineError::Stopped("no learner".to_owned()).into()),
        }
    }

    /// A whole batch without signal is said aloud and dropped, else it would be leased again for ever.
    fn nothing_learnt(
        &mut self,
        profile: &Profile,
        leased: &[LeasedSample],
        prepared: &Prepared,
    ) -> Result<Progress, TrainError> {
        tracing::warn!(%profile, samples = leased.len(), "a whole batch held nothing to learn from");
        let why = prepared
            .left_out
            .first()
            .map_or("nothing to learn from", |(_, w)| w.as_str());
        self.give_up(leased, why)?;
        Ok(Progress::Idle)
    }

    fn skipped(
        &mut self,
        profile: &Profile,
        leased: &[LeasedSample],
    ) -> Result<Progress, TrainError> {
        tracing::error!(%profile, samples = leased.len(), "a step was not finite and is skipped; weights are unchanged");
        self.give_up(leased, "non-finite step")?;
        Ok(Progress::Skipped)
    }

    fn give_up(&self, leased: &[LeasedSample], why: &str) -> Result<(), TrainError> {
        let samples: Vec<SampleId> = leased.iter().map(|l| l.id).collect();
        block_on(self.store.release(samples.clone()))?;
        block_on(self.store.append(vec![Event::Dropped {
            samples,
            why: why.to_owned(),
        }]))?;
        Ok(())
    }
}

/// What a step came to, before anything is published.
enum Made {
    /// A committed candidate.
    Version(VersionRecord),
    /// No version.
    Nothing(Progress),
}

/// What a step starts from.
struct Parent {
    number: u64,
    steps: u64,
    record: Option<VersionRecord>,
}

impl Parent {
    fn baseline(&self) -> Baseline {
        let metric = |name: &str| {
            let metrics = self.record.iter().flat_map(|r| &r.metrics);
            metrics
                .filter(|(n, _)| n == name)
                .map(|(_, v)| *v)
                .next_back()
                .unwrap_or(0.0)
        };
        Baseline {
            mean: metric("baseline"),
            count: metric("baseline_count"),
        }
    }

    fn checkpoint(&self, data_dir: &Path) -> Option<Checkpoint> {
        let record = self.record.as_ref()?;
        let name = record.checkpoint.as_ref()?;
        Some(Checkpoint {
            dir: data_dir.join(name),
            step: record.steps,
        })
    }
}

fn metrics(
    prepared: &Prepared,
    outcome: &step::StepOutcome,
    baseline: &Baseline,
    kl: Option<f64>,
    seconds: f64,
) -> Vec<(String, f64)> {
    let stats = &outcome.stats;
    let per_token = |sum: f64| sum / stats.tokens.max(1) as f64;
    let reward_mean = prepared.rewards.iter().map(|r| f64::from(*r)).sum::<f64>()
        / prepared.rewards.len().max(1) as f64;
    let total: usize = prepared.samples.iter().map(|s| s.tokens().len()).sum();
    let mut all = vec![
        ("loss", stats.loss),
        ("grad_norm", f64::from(outcome.report.grad_norm)),
        ("samples", prepared.samples.len() as f64),
        ("left_out", prepared.left_out.len() as f64),
        ("hinted", prepared.hinted as f64),
        ("reward_mean", reward_mean),
        ("tokens", stats.tokens as f64),
        ("tokens_all", total as f64),
        ("masked_tokens", stats.masked as f64),
        ("clip_fraction", per_token(stats.clipped as f64)),
        ("behavior_gap", per_token(stats.behavior_gap)),
        ("baseline", baseline.mean),
        ("baseline_count", baseline.count),
        ("seconds", seconds),
    ];
    all.extend(kl.map(|kl| ("kl_to_base", kl)));
    all.into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}

fn create_parent(dir: &Path) -> Result<(), TrainError> {
    let Some(parent) = dir.parent() else {
        return Ok(());
    };
    std::fs::create_dir_all(parent).map_err(|error| TrainError::Io {
        what: "cannot create",
        path: parent.display().to_string(),
        error,
    })
}

/// Deletes `adapters/<profile>/<number>` folders that no committed version names: steps a crash left half-made.
fn delete_unnamed(data_dir: &Path, named: &HashSet<String>) -> Result<(), TrainError> {
    let adapters = data_dir.join("adapters");
    for profile in folders(&adapters)? {
        for name in folders(&adapters.join(&profile))? {
            let relative = format!("adapters/{profile}/{name}");
            if !named.contains(&relative) {
                let path = data_dir.join(&relative);
                tracing::warn!(path = %path.display(), "deleting a checkpoint that was never committed");
                std::fs::remove_dir_all(&path).map_err(|error| TrainError::Io {
                    what: "cannot delete",
                    path: path.display().to_string(),
                    error,
                })?;
            }
        }
    }
    Ok(())
}

fn folders(dir: &Path) -> Result<Vec<String>, TrainError> {
    let failed = |error| TrainError::Io {
        what: "cannot read",
        path: dir.display().to_string(),
        error,
    };
    if !dir.exists() {
        return Ok(Vec::new());
    }
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.path().is_dir() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    Ok(names)
}
