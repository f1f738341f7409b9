//! The loop: looks at each profile's queue, makes a step when a batch is ready, publishes it, watches it, and picks up after a restart.

use crate::{
    TrainError, batch,
    config::TrainConfig,
    gate::Remembered,
    make::{Made, Parent, Plan, make},
    metrics::MetricsFiles,
    publish::{BY_ITSELF, Outcome, Publisher, checkpoint_name},
    recipe::Recipe,
    replay,
    restore::nearest_whole,
    watch::watch,
};
use chela_core::{
    AdapterSpec, EngineError, Event, Learner, Learners, LeasedSample, Millis, PolicyEngine,
    PolicyVersion, Profile, SampleId, StepCommit, TrajectoryStore, VersionOrigin, VersionRecord,
    VersionState,
    registry::{self, Alarms, Chain, Steering},
};
use futures_executor::block_on;
use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
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
    /// The watch took what was served back; now this one is.
    TakenBack(PolicyVersion),
    /// A step was made again; more follow before anything is served.
    Replayed(PolicyVersion),
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
    known: Remembered,
    /// Profiles that failed, until when they are left alone.
    later: HashMap<Profile, Instant>,
    /// The program is to end.
    stop: Arc<AtomicBool>,
    /// The newest turn of each profile that the watch has seen.
    watched: HashMap<Profile, chela_core::TurnId>,
    /// The last version that was there when a profile was paused: what fell before is no reason to pause again.
    patient_from: HashMap<Profile, u64>,
    steering: Steering,
    alarms: Alarms,
}

/// How the reason begins of a replay's candidate that fell with a later one, without having been looked at.
const ON_TOP: &str = "with version ";

/// After a failure.
const AGAIN: Duration = Duration::from_secs(5);

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
            known: Remembered::default(),
            later: HashMap::new(),
            stop: Arc::default(),
            watched: HashMap::new(),
            patient_from: HashMap::new(),
            steering: Steering::default(),
            alarms: Alarms::default(),
        }
    }

    /// Takes turns with those who change by hand what is served.
    pub fn steered_by(mut self, steering: Steering) -> Self {
        self.steering = steering;
        self
    }

    /// Tells of batches that came to nothing there.
    pub fn alarming(mut self, alarms: Alarms) -> Self {
        self.alarms = alarms;
        self
    }

    /// Runs until `stop` is set: a step already begun is finished first, a look at a candidate is left off.
    pub fn run(&mut self, stop: &Arc<AtomicBool>) {
        self.stop = stop.clone();
        match self.store.profiles() {
            // What was made and not yet written when the program ended.
            Ok(profiles) => profiles.iter().for_each(|p| self.write_metrics(p)),
            Err(error) => tracing::error!(%error, "reading whose figures are to be written"),
        }
        let mut pause = Duration::from_millis(50);
        while !stop.load(Ordering::Relaxed) {
            match self.tick(stop) {
                Ok(true) => pause = Duration::from_millis(50),
                Ok(false) => std::thread::sleep(pause),
                Err(TrainError::Stopping) => {}
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

    /// Looks once at every profile that has something to do. True when a step was made.
    fn tick(&mut self, stop: &AtomicBool) -> Result<bool, TrainError> {
        let mut worked = false;
        for profile in self.store.profiles_to_train()? {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            if self
                .later
                .get(&profile)
                .is_some_and(|until| *until > Instant::now())
            {
                continue;
            }
            match self.advance(&profile) {
                Ok(Progress::Idle) => {}
                Ok(_) => {
                    worked = true;
                    self.write_metrics(&profile);
                }
                Err(TrainError::Stopping) => return Err(TrainError::Stopping),
                // One profile's trouble keeps no other from learning.
                Err(error) => {
                    tracing::error!(%profile, %error, "training failed; trying again in 5 s");
                    self.open.remove(&profile);
                    self.later.insert(profile, Instant::now() + AGAIN);
                }
            }
        }
        Ok(worked)
    }

    /// Looks at one profile: finishes what was begun, watches what is served, and makes a step when a batch is ready.
    pub fn advance(&mut self, profile: &Profile) -> Result<Progress, TrainError> {
        let versions = self.store.versions(profile)?;
        let paused = self.store.paused(profile)?.is_some();
        if paused {
            let last = versions.last().map_or(0, |v| v.version.number);
            self.patient_from.insert(profile.clone(), last);
        }
        let replays = self.store.replays(profile)?;
        if let Some(of) = replays.first() {
            if paused {
                return Ok(Progress::Idle);
            }
            return self.replay(profile, &versions, *of);
        }
        if let Some(record) = registry::unfinished(&versions) {
            return self.finish(record.clone());
        }
        if self.config.frozen.contains(profile) {
            return self.never_learns(profile);
        }
        if let Some(back) = self.look_back(profile, &versions)? {
            return Ok(Progress::TakenBack(back));
        }
        if paused {
            return Ok(Progress::Idle);
        }
        let head = registry::served(&versions).cloned();
        let chain = Chain::of(registry::served_number(&versions), &versions);
        let most = self.config.max_steps;
        if most.is_some_and(|most| chain.head_steps() >= most) {
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
            number: head.as_ref().map_or(0, |v| v.version.number),
            steps: chain.head_steps(),
            record: head,
        };
        match self.step(profile, (&parent, &versions), &leased) {
            Ok(Step::Nothing(progress)) => Ok(progress),
            // Committed: from here on the version is a candidate, whatever happens to its publish.
            Ok(Step::Version(record)) => self.finish(*record),
            Err(error) => {
                // Nothing was committed: the samples wait again.
                self.open.remove(profile);
                block_on(self.store.release(selection.batch))?;
                Err(error)
            }
        }
    }

    /// Figures in files are for people: learning does not stop where they cannot be written.
    fn write_metrics(&self, profile: &Profile) {
        if !self.config.metrics {
            return;
        }
        let files = MetricsFiles::below(&self.config.data_dir);
        if let Err(error) = files.follow(&*self.store, profile) {
            tracing::error!(%profile, %error, "the figures of the last steps are not written");
        }
    }

    fn never_learns(&self, profile: &Profile) -> Result<Progress, TrainError> {
        let pending = self.store.pending(profile)?;
        let dropped: Vec<_> = pending
            .iter()
            .map(|s| (s.id, "this profile never learns"))
            .collect();
        self.drop_pending(&dropped)?;
        Ok(Progress::Idle)
    }

    fn drop_pending<W: AsRef<str>>(&self, dropped: &[(SampleId, W)]) -> Result<(), TrainError> {
        let mut by_reason: HashMap<&str, Vec<SampleId>> = HashMap::new();
        for (id, why) in dropped {
            by_reason.entry(why.as_ref()).or_default().push(*id);
        }
        let events: Vec<Event> = by_reason
            .into_iter()
            .map(|(why, samples)| Event::Dropped {
                samples,
                why: why.to_owned(),
            })
            .collect();
        self.append(events)
    }

    fn append(&self, events: Vec<Event>) -> Result<(), TrainError> {
        if !events.is_empty() {
            block_on(self.store.append(events))?;
        }
        Ok(())
    }

    fn publisher(&self) -> Publisher<'_> {
        Publisher {
            engine: &*self.engine,
            store: &*self.store,
            config: &self.config,
            now: (self.clock)(),
            stop: &self.stop,
            steering: &self.steering,
        }
    }

    /// Takes the served version back when its replies fare clearly worse than those before it.
    fn look_back(
        &mut self,
        profile: &Profile,
        versions: &[VersionRecord],
    ) -> Result<Option<PolicyVersion>, TrainError> {
        let n = self.config.watch.turns;
        let Some(served) = registry::served(versions).filter(|_| n > 0) else {
            return Ok(None);
        };
        let turns = self.store.live_turns(profile, 4 * n)?;
        let newest = turns.first().map(|t| t.turn);
        if newest.is_none() || self.watched.get(profile) == newest.as_ref() {
            return Ok(None);
        }
        self.watched.extend(newest.map(|t| (profile.clone(), t)));
        let chain = Chain::of(served.version.number, versions);
        let since = registry::put_back(versions);
        let Some(fall) = watch(&turns, (&chain, since), &self.config.watch) else {
            return Ok(None);
        };
        let why = format!("{BY_ITSELF}{}", fall.why);
        // What users are pointed at next must be there.
        let from = (fall.back_to, true);
        let (number, _) = nearest_whole(&self.publisher(), versions, from)?;
        let to = PolicyVersion {
            profile: profile.clone(),
            number,
        };
        {
            let _one_at_a_time = block_on(self.steering.lock());
            // An operator was faster.
            if registry::served_number(&self.store.versions(profile)?) != served.version.number {
                return Ok(None);
            }
            self.publisher().back(&served.version, &to, why)?;
        }
        self.open.remove(profile);
        self.run_out_of_patience(profile)?;
        Ok(Some(to))
    }

    /// Pauses training after too many candidates in a row came to nothing.
    fn run_out_of_patience(&mut self, profile: &Profile) -> Result<(), TrainError> {
        let most = self.config.gate.patience;
        let mut versions = self.store.versions(profile)?;
        let from = self.patient_from.get(profile).copied().unwrap_or(0);
        versions.retain(|v| v.version.number > from);
        versions.sort_by_key(|v| std::cmp::Reverse(v.version.number));
        let fell = |v: &&VersionRecord| matches!(&v.state, VersionState::Rejected(why) if why.starts_with(ON_TOP));
        let bad = versions
            .iter()
            .filter(|v| !fell(v))
            .map_while(|v| match &v.state {
                VersionState::Rejected(why) => Some(why.as_str()),
                VersionState::RolledBack(why) => why.strip_prefix(BY_ITSELF),
                _ => None,
            });
        let bad: Vec<&str> = bad.take(most).collect();
        if most > 0 && bad.len() == most {
            let why = format!(
                "{most} versions in a row were not good enough (the last: {}); look at `chela policy show`, then `chela policy resume`",
                bad.first().unwrap_or(&"")
            );
            tracing::error!(%profile, "training pauses: {why}");
            self.patient_from.extend(
                versions
                    .first()
                    .map(|v| (profile.clone(), v.version.number)),
            );
            self.append(vec![Event::Paused {
                profile: profile.clone(),
                why: Some(why),
            }])?;
        }
        Ok(())
    }

    fn step(
        &mut self,
        profile: &Profile,
        (parent, versions): (&Parent, &[VersionRecord]),
        leased: &[LeasedSample],
    ) -> Result<Step, TrainError> {
        let kernel_path = self.learners.kernel_path();
        let recipe = if leased.iter().any(|l| l.sample.group.is_some()) {
            Recipe::of_groups(&self.config, kernel_path)
        } else {
            let baseline = batch::baseline_of(leased, &self.config, &parent.baseline());
            Recipe::of(&self.config, baseline, kernel_path)
        };
        let (version, made) = self.make(
            profile,
            (parent, versions),
            (leased, recipe, VersionOrigin::Trained),
        )?;
        match made {
            Made::Version(commit) => {
                let record = Box::new(commit.version.clone());
                self.commit(*commit)?;
                self.holds(profile, version.number);
                self.alarms.clear(profile);
                Ok(Step::Version(record))
            }
            // A whole batch without signal is said aloud and dropped, else it would be leased again for ever.
            Made::Nothing(why) => {
                tracing::warn!(%profile, samples = leased.len(), "a whole batch held nothing to learn from");
                self.alarms
                    .raise(profile, why.iter().map(|(_, why)| why.as_str()));
                self.give_up(&why)?;
                Ok(Step::Nothing(Progress::Idle))
            }
            Made::Skipped { .. } => {
                tracing::error!(%profile, samples = leased.len(), "a step was not finite and is skipped; weights are unchanged");
                let reasons = leased.iter().map(|_| "non-finite step");
                self.alarms.raise(profile, reasons);
                let why = leased.iter().map(|l| (l.id, "non-finite step".to_owned()));
                self.give_up(&why.collect::<Vec<_>>())?;
                Ok(Step::Nothing(Progress::Skipped))
            }
        }
    }

    fn make(
        &mut self,
        profile: &Profile,
        (parent, versions): (&Parent, &[VersionRecord]),
        (leased, recipe, origin): (&[LeasedSample], Recipe, VersionOrigin),
    ) -> Result<(PolicyVersion, Made), TrainError> {
        let version = PolicyVersion {
            profile: profile.clone(),
            number: self.store.last_version(profile)? + 1,
        };
        let plan = Plan {
            version: version.clone(),
            parent,
            versions,
            leased,
            recipe,
            origin,
            now: (self.clock)(),
        };
        let dir = self.config.data_dir.join(checkpoint_name(&version));
        // A step that failed after it was saved; no version has this number yet.
        remove_folder(&dir)?;
        let (config, engine) = (self.config.clone(), self.engine.clone());
        let spec = plan.recipe.config(&config)?.adapter;
        if parent.record.is_none() {
            // A fresh adapter is made as this step says, not as the one before it did.
            self.open.remove(profile);
        }
        let learner = self.learner(profile, parent, &spec)?;
        let made = make(&plan, learner, &*engine, (&config, Some(&dir)));
        if made.is_err() {
            remove_folder(&dir)?;
        }
        if matches!(made, Err(_) | Ok(Made::Skipped { moved: true })) {
            // Part of a batch may be in its weights: the next step begins at the parent's checkpoint.
            self.open.remove(profile);
        }
        Ok((version, made?))
    }

    /// Commits a step; when that is refused, nothing of it stays on disk.
    fn commit(&self, commit: StepCommit) -> Result<(), TrainError> {
        let version = commit.version.version.clone();
        if let Err(error) = block_on(self.store.commit_step(commit)) {
            if self.store.last_version(&version.profile)? < version.number {
                remove_folder(&self.config.data_dir.join(checkpoint_name(&version)))?;
            }
            return Err(error.into());
        }
        Ok(())
    }

    fn holds(&mut self, profile: &Profile, number: u64) {
        if let Some(open) = self.open.get_mut(profile) {
            open.at = number;
        }
    }

    /// Makes the next step again without what was forgotten, on top of what stands.
    fn replay(
        &mut self,
        profile: &Profile,
        versions: &[VersionRecord],
        of: u64,
    ) -> Result<Progress, TrainError> {
        let head = registry::unfinished(versions).or(registry::served(versions));
        let parent = Parent::of(head.cloned());
        let skip = |trainer: &mut Self, why: &str| {
            tracing::warn!(%profile, of, "a step is not made again: {why}");
            trainer.open.remove(profile);
            trainer.append(vec![Event::ReplaySkipped {
                version: PolicyVersion {
                    profile: profile.clone(),
                    number: of,
                },
            }])?;
            Ok(Progress::Idle)
        };
        let Some(old) = versions.iter().find(|v| v.version.number == of) else {
            return skip(self, "its record is gone");
        };
        let leased = self.store.samples(&old.samples)?;
        if leased.is_empty() {
            return skip(self, "nothing of its batch is left");
        }
        let mut recipe = match replay::recipe(old, &leased, &parent, &self.config) {
            Ok(recipe) => recipe,
            Err(error) => return skip(self, &error.to_string()),
        };
        recipe.kernel_path = self.learners.kernel_path();
        let origin = VersionOrigin::Replayed(of);
        let (version, made) = self.make(profile, (&parent, versions), (&leased, recipe, origin))?;
        let mut commit = match made {
            Made::Version(commit) => commit,
            Made::Nothing(why) => {
                let first = why.first().map_or("an empty batch", |(_, why)| why);
                return skip(self, first);
            }
            Made::Skipped { .. } => return skip(self, "it is not finite"),
        };
        // What is left out now was consumed before: it stays named, and taught nothing.
        commit.version.samples = old.samples.clone();
        commit.dropped.clear();
        self.commit(*commit)?;
        self.holds(profile, version.number);
        tracing::info!(%version, of, "a step was made again");
        Ok(Progress::Replayed(version))
    }

    /// Publishes a committed candidate, or rejects it.
    fn finish(&mut self, record: VersionRecord) -> Result<Progress, TrainError> {
        let version = record.version.clone();
        let profile = version.profile.clone();
        let parent = Parent::of(Some(record.clone()));
        let spec = self.config.adapter.clone();
        match self.learner(&profile, &parent, &spec).map(|_| ()) {
            Err(TrainError::Engine(EngineError::Weights(why) | EngineError::Io(why))) => {
                return self.unreadable(version, why);
            }
            other => other?,
        }
        let Some(mut open) = self.open.remove(&profile) else {
            return Ok(Progress::Idle);
        };
        // An operator may have gone back meanwhile: what was trained from another version is not published over that.
        let now = self.store.versions(&profile)?;
        if registry::unfinished(&now).is_none_or(|v| v.version != version) {
            let why = "another version was put in its parent's place during the step".to_owned();
            let state = self
                .publisher()
                .state(&version, VersionState::Rejected(why.clone()), None);
            self.append(vec![
                state,
                Event::Unlearnt {
                    version: version.clone(),
                    why,
                },
            ])?;
            return Ok(Progress::Rejected(version));
        }
        let mut known = std::mem::take(&mut self.known);
        let outcome = self
            .publisher()
            .publish(&record, &mut *open.learner, &mut known);
        self.known = known;
        // The candidates of a replay that it stands on served for nothing else.
        let below = Chain::of(record.parent, &now);
        let between = now
            .iter()
            .filter(|v| v.state == VersionState::Candidate && below.holds(v.version.number));
        match outcome? {
            Outcome::Served => {
                let passed = between.map(|v| {
                    self.publisher()
                        .state(&v.version, VersionState::Superseded, None)
                });
                self.append(passed.collect())?;
                self.open.insert(profile, open);
                Ok(Progress::Served(version))
            }
            Outcome::Rejected { why, .. } => {
                let state = VersionState::Rejected(format!(
                    "version {} on top of it: {why}",
                    version.number
                ));
                let rejected = between.flat_map(|v| {
                    let unlearnt = Event::Unlearnt {
                        version: v.version.clone(),
                        why: "gate failed".to_owned(),
                    };
                    let state = self.publisher().state(&v.version, state.clone(), None);
                    [state, unlearnt]
                });
                self.append(rejected.collect())?;
                // The learner must not go on from weights that were rejected: it is opened anew from what is served.
                drop(open);
                self.run_out_of_patience(&profile)?;
                Ok(Progress::Rejected(version))
            }
        }
    }

    /// A candidate whose files cannot be read will not get better.
    fn unreadable(&self, version: PolicyVersion, why: String) -> Result<Progress, TrainError> {
        let why = format!("its files cannot be read: {why}");
        tracing::error!(%version, "rejected: {why}");
        let state = self
            .publisher()
            .state(&version, VersionState::Rejected(why.clone()), None);
        let unlearnt = Event::Unlearnt {
            version: version.clone(),
            why,
        };
        self.append(vec![state, unlearnt])?;
        Ok(Progress::Rejected(version))
    }

    /// The learner holding exactly `parent`'s weights: the open one, or one opened from the checkpoint.
    fn learner(
        &mut self,
        profile: &Profile,
        parent: &Parent,
        spec: &AdapterSpec,
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
            let learner = self.learners.open(profile, spec, from.as_ref())?;
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

    fn give_up(&self, leased: &[(SampleId, String)]) -> Result<(), TrainError> {
        block_on(self.store.release(leased.iter().map(|l| l.0).collect()))?;
        self.drop_pending(leased)
    }
}

/// What a step came to, before anything is published.
enum Step {
    /// A committed candidate.
    Version(Box<VersionRecord>),
    /// No version.
    Nothing(Progress),
}

pub(crate) fn remove_folder(dir: &std::path::Path) -> Result<(), TrainError> {
    match std::fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(TrainError::Io {
            what: "cannot delete",
            path: dir.display().to_string(),
            error,
        }),
        _ => Ok(()),
    }
}
