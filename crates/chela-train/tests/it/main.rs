//! The trainer over the fakes of every seam: steps, receipts, failures, rollback, restart.
#![allow(clippy::unwrap_used, clippy::panic)]

mod faults;
mod gate;
mod groups;
mod metrics;
mod minibatches;
mod replay;

use chela_core::testing::{
    FakeEngine, FakeLearners, MemoryStore, block_on, first_turn, new_sample, profile, session,
    verdict,
};
use chela_core::{
    EngineError, Event, PolicyEngine, PolicyVersion, Profile, Reply, SampleState, TrajectoryStore,
    TurnId, VersionState,
};
use chela_train::{GateConfig, Progress, TrainConfig, TrainError, Trainer, restore::restore};
use std::{path::Path, sync::Arc};

struct Rig {
    store: Arc<MemoryStore>,
    engine: FakeEngine,
    learners: FakeLearners,
    trainer: Trainer,
    config: TrainConfig,
    dir: tempfile::TempDir,
}

fn rig() -> Rig {
    let dir = tempfile::tempdir().unwrap();
    let config = TrainConfig {
        batch: 2,
        min_batch: 2,
        gate: GateConfig {
            held_out: 0.0,
            ..GateConfig::default()
        },
        ..TrainConfig::new(dir.path().to_path_buf(), vec![1, 5, 6, 7, 8, 9, 10, 11])
    };
    let (store, engine, learners) = (
        Arc::new(MemoryStore::new()),
        FakeEngine::new(),
        FakeLearners::new(),
    );
    let trainer = trainer(&store, &engine, &learners, &config);
    Rig {
        store,
        engine,
        learners,
        trainer,
        config,
        dir,
    }
}

fn trainer(
    store: &Arc<MemoryStore>,
    engine: &FakeEngine,
    learners: &FakeLearners,
    config: &TrainConfig,
) -> Trainer {
    let clock = Arc::new(|| 5_000);
    let (engine, learners) = (Arc::new(engine.clone()), Arc::new(learners.clone()));
    Trainer::new(store.clone(), engine, learners, config.clone(), clock)
}

impl Rig {
    /// A judged turn of that profile in a session of its own, sampled by what is served now.
    fn judged(&self, of: &Profile, reward: f32) -> TurnId {
        self.judged_reply(of, reward, &[4])
    }

    /// The same with a reply of these tokens, and one that differs from turn to turn.
    fn judged_reply(&self, of: &Profile, reward: f32, reply: &[u32]) -> TurnId {
        let id = self.store.next_turn_id(1_000);
        let verdict_id = self.store.next_verdict_id();
        let mut turn = first_turn(id, of, &session(&id.to_string()));
        turn.version = self.engine.served(of);
        turn.reply = sampled(&[reply, &[5 + (id.0 % 7) as u32]].concat());
        let verdict = Box::new(verdict(Some(reward), &[]));
        block_on(self.store.append(vec![
            Event::Turn(Box::new(turn)),
            Event::Verdict {
                turn: id,
                id: verdict_id,
                verdict,
                at: 2_000,
            },
            Event::Sample(Box::new(new_sample(id, verdict_id, reward))),
        ]))
        .unwrap();
        id
    }

    fn pair(&self, of: &Profile) -> [TurnId; 2] {
        [self.judged(of, 1.0), self.judged(of, -1.0)]
    }

    fn state(&self, turn: TurnId) -> SampleState {
        self.store
            .story(turn)
            .unwrap()
            .unwrap()
            .samples
            .pop()
            .unwrap()
            .2
    }

    fn versions(&self, of: &Profile) -> Vec<(u64, u64, VersionState)> {
        let all = self.store.versions(of).unwrap();
        all.into_iter()
            .map(|v| (v.version.number, v.parent, v.state))
            .collect()
    }
}

/// A reply with the log-probs that the fakes' base model gives, so that no token is masked as too far off.
fn sampled(tokens: &[u32]) -> Reply {
    let n = tokens.len();
    let logprobs = vec![-(256f32.ln()); n];
    let columns = (logprobs.clone(), logprobs, vec![1.0; n], vec![false; n]);
    Reply::from_columns(tokens.to_vec(), columns.0, columns.1, columns.2, columns.3).unwrap()
}

fn version(of: &Profile, number: u64) -> PolicyVersion {
    PolicyVersion {
        profile: of.clone(),
        number,
    }
}

fn folders(dir: &Path, of: &str) -> usize {
    std::fs::read_dir(dir.join("adapters").join(of)).map_or(0, Iterator::count)
}

#[test]
fn a_full_batch_becomes_a_served_version_with_a_receipt() {
    let mut rig = rig();
    let p = profile("default");
    let first = rig.judged(&p, 1.0);
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Idle,
        "one of two"
    );
    let second = rig.judged(&p, -1.0);
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Served(version(&p, 1))
    );
    assert_eq!(rig.engine.served(&p), version(&p, 1));
    for turn in [first, second] {
        assert_eq!(rig.state(turn), SampleState::Consumed(version(&p, 1)));
    }
    let record = rig.store.versions(&p).unwrap().pop().unwrap();
    let receipt = record.receipt.unwrap();
    assert_eq!((record.steps, receipt.engine_canary.len()), (1, 7));
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Idle,
        "nothing trains twice"
    );
    assert_eq!(rig.learners.steps(), 1);
}

#[test]
fn profiles_learn_apart() {
    let mut rig = rig();
    let (a, b) = (profile("a"), profile("b"));
    rig.pair(&a);
    let other = rig.judged(&b, 1.0);
    assert_eq!(
        rig.trainer.advance(&a).unwrap(),
        Progress::Served(version(&a, 1))
    );
    assert_eq!(rig.trainer.advance(&b).unwrap(), Progress::Idle);
    assert_eq!(rig.engine.served(&b), PolicyVersion::base(b.clone()));
    assert_eq!(rig.state(other), SampleState::Pending);
    assert!(rig.versions(&b).is_empty());
}

#[test]
fn weights_that_are_not_the_trained_ones_are_never_served() {
    let mut rig = rig();
    let p = profile("default");
    rig.learners.set_drift(0.5);
    rig.pair(&p);
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Rejected(version(&p, 1))
    );
    assert_eq!(rig.engine.served(&p).number, 0);
    assert!(matches!(
        rig.versions(&p)[..],
        [(1, 0, VersionState::Rejected(_))]
    ));
    rig.learners.set_drift(0.0);
    rig.pair(&p);
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Served(version(&p, 2))
    );
    let kept = rig.versions(&p);
    assert_eq!(
        kept[1],
        (2, 0, VersionState::Served),
        "training went on from what is served"
    );
}

#[test]
fn a_skipped_step_drops_its_samples_and_makes_no_version() {
    let mut rig = rig();
    let p = profile("default");
    rig.learners.skip_steps(1);
    let turns = rig.pair(&p);
    assert_eq!(rig.trainer.advance(&p).unwrap(), Progress::Skipped);
    for turn in turns {
        assert_eq!(
            rig.state(turn),
            SampleState::Dropped("non-finite step".to_owned())
        );
    }
    assert!(rig.versions(&p).is_empty());
}

/// What is no number the store refuses; as large as numbers go, a reward is worth no more than the clip.
#[test]
fn huge_rewards_are_clipped_and_leave_every_figure_finite() {
    let made = |good: f32, bad: f32| {
        let mut rig = rig();
        let p = profile("default");
        let turns = [rig.judged(&p, good), rig.judged(&p, bad)];
        assert!(matches!(
            rig.trainer.advance(&p).unwrap(),
            Progress::Served(_)
        ));
        for turn in turns {
            assert!(matches!(rig.state(turn), SampleState::Consumed(_)));
        }
        let mut metrics = rig.store.versions(&p).unwrap()[0].metrics.clone();
        // What a clock said, and how many were clipped, differ.
        metrics.retain(|(name, _)| !name.contains("second") && name != "rewards_clipped");
        assert!(metrics.iter().all(|(_, x)| x.is_finite()), "{metrics:?}");
        metrics
    };
    let clip = TrainConfig::new("/nowhere".into(), vec![1, 2])
        .advantage
        .reward_clip;
    assert_eq!(made(f32::MAX, f32::MIN), made(clip, -clip));
}

#[test]
fn batches_that_teach_nothing_are_told_of_until_a_good_step() {
    let mut rig = rig();
    let p = profile("default");
    let alarms = chela_core::registry::Alarms::default();
    let fresh = trainer(&rig.store, &rig.engine, &rig.learners, &rig.config);
    rig.trainer = fresh.alarming(alarms.clone());
    for batches in 1..3 {
        // Equal rewards equal their mean.
        rig.judged(&p, 1.0);
        rig.judged(&p, 1.0);
        assert_eq!(rig.trainer.advance(&p).unwrap(), Progress::Idle);
        let barren = alarms.of(&p).unwrap();
        assert_eq!(barren.batches, batches);
        assert_eq!(barren.reasons.values().sum::<u64>(), 2 * batches);
    }
    rig.learners.skip_steps(1);
    rig.pair(&p);
    assert_eq!(rig.trainer.advance(&p).unwrap(), Progress::Skipped);
    let barren = alarms.of(&p).unwrap();
    assert_eq!((barren.batches, barren.reasons["non-finite step"]), (3, 2));
    assert_eq!(alarms.of(&profile("other")), None);
    rig.pair(&p);
    assert!(matches!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Served(_)
    ));
    assert_eq!(alarms.of(&p), None);
}

#[test]
fn a_sample_that_is_too_long_is_dropped_alone_and_the_rest_is_trained() {
    let mut rig = rig();
    rig.config.batch = 3;
    rig.trainer = trainer(&rig.store, &rig.engine, &rig.learners, &rig.config);
    let p = profile("default");
    rig.learners.set_most_tokens(8); // the text whose log-probs a receipt holds has so many
    let long = rig.judged_reply(&p, 1.0, &[4; 8]);
    let short = rig.pair(&p);
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Served(version(&p, 1))
    );
    let too_long = SampleState::Dropped("too long".to_owned());
    assert_eq!(rig.state(long), too_long);
    for turn in short {
        assert_eq!(rig.state(turn), SampleState::Consumed(version(&p, 1)));
    }
    // A batch of nothing else makes no version and is not tried again.
    let long = [1.0, -1.0, 1.0].map(|reward| rig.judged_reply(&p, reward, &[5; 8]));
    assert_eq!(rig.trainer.advance(&p).unwrap(), Progress::Idle);
    assert_eq!(rig.versions(&p).len(), 1);
    assert!(long.iter().all(|turn| rig.state(*turn) == too_long));
}

#[test]
fn a_step_that_fails_gives_its_samples_back() {
    let mut rig = rig();
    let p = profile("default");
    rig.learners
        .push_error(EngineError::NotFinite("a test".to_owned()));
    let turns = rig.pair(&p);
    let error = rig.trainer.advance(&p).unwrap_err();
    assert!(
        matches!(error, TrainError::Engine(EngineError::NotFinite(_))),
        "{error}"
    );
    assert!(turns.iter().all(|t| rig.state(*t) == SampleState::Pending));
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Served(version(&p, 1))
    );
}

#[test]
fn after_a_rollback_training_goes_on_from_there() {
    let mut rig = rig();
    let p = profile("default");
    for number in 1..=2 {
        rig.pair(&p);
        assert_eq!(
            rig.trainer.advance(&p).unwrap(),
            Progress::Served(version(&p, number))
        );
    }
    let to = |n, state| Event::Version {
        version: version(&p, n),
        state,
        receipt: None,
        at: 5_500,
    };
    let by_hand = VersionState::RolledBack("by an operator".to_owned());
    let back = vec![to(2, by_hand), to(1, VersionState::Served)];
    block_on(rig.store.append(back)).unwrap();
    rig.engine.serve(&version(&p, 1)).unwrap();
    rig.pair(&p);
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Served(version(&p, 3))
    );
    assert_eq!(rig.versions(&p)[2], (3, 1, VersionState::Served));
}

#[test]
fn a_paused_profile_makes_no_steps() {
    let mut rig = rig();
    let p = profile("default");
    rig.pair(&p);
    let pause = |why: Option<&str>| Event::Paused {
        profile: p.clone(),
        why: why.map(str::to_owned),
    };
    block_on(rig.store.append(vec![pause(Some("by hand"))])).unwrap();
    assert_eq!(rig.trainer.advance(&p).unwrap(), Progress::Idle);
    block_on(rig.store.append(vec![pause(None)])).unwrap();
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Served(version(&p, 1))
    );
}

#[test]
fn a_restart_serves_again_and_deletes_what_was_never_committed() {
    let mut rig = rig();
    let p = profile("default");
    rig.pair(&p);
    rig.trainer.advance(&p).unwrap();
    let stray = rig.dir.path().join("adapters/default/00000002");
    std::fs::create_dir(&stray).unwrap();
    drop(rig.trainer);
    rig.store.restart();
    let engine = FakeEngine::new();
    restore(&*rig.store, &engine, &rig.config, 6_000).unwrap();
    assert_eq!(engine.served(&p), version(&p, 1));
    assert_eq!(
        (stray.exists(), folders(rig.dir.path(), "default")),
        (false, 1)
    );
}

#[test]
fn a_crash_between_step_and_publish_is_finished_after_the_restart() {
    let mut rig = rig();
    let p = profile("default");
    rig.pair(&p);
    // The step commits, then the engine is gone before it can load the version.
    rig.engine
        .fail_with(Some(EngineError::Stopped("a test".to_owned())));
    let kl_off = TrainConfig {
        kl_tokens: 0,
        ..rig.config.clone()
    };
    rig.trainer = trainer(&rig.store, &rig.engine, &rig.learners, &kl_off);
    assert!(rig.trainer.advance(&p).is_err());
    assert_eq!(rig.versions(&p), [(1, 0, VersionState::Candidate)]);
    drop(rig.trainer);
    rig.store.restart();
    let engine = FakeEngine::new();
    restore(&*rig.store, &engine, &rig.config, 6_000).unwrap();
    assert_eq!(engine.served(&p).number, 0);
    let mut trainer = trainer(&rig.store, &engine, &rig.learners, &rig.config);
    assert_eq!(
        trainer.advance(&p).unwrap(),
        Progress::Served(version(&p, 1))
    );
    assert_eq!((engine.served(&p).number, rig.learners.steps()), (1, 1));
}

#[test]
fn a_step_that_cannot_be_committed_leaves_nothing_and_is_tried_again() {
    let mut rig = rig();
    let p = profile("default");
    rig.pair(&p);
    rig.store.set_dead(Some("a full disk"));
    assert!(rig.trainer.advance(&p).is_err());
    rig.store.set_dead(None);
    assert_eq!(folders(rig.dir.path(), "default"), 0);
    // A folder that an older failure left is no obstacle.
    std::fs::create_dir_all(rig.dir.path().join("adapters/default/00000001")).unwrap();
    rig.store.restart();
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Served(version(&p, 1))
    );
}

#[test]
fn a_candidate_whose_files_are_broken_is_rejected() {
    let mut rig = rig();
    let p = profile("default");
    rig.pair(&p);
    rig.engine
        .fail_with(Some(EngineError::Stopped("a test".to_owned())));
    let kl_off = TrainConfig {
        kl_tokens: 0,
        ..rig.config.clone()
    };
    rig.trainer = trainer(&rig.store, &rig.engine, &rig.learners, &kl_off);
    assert!(rig.trainer.advance(&p).is_err());
    rig.engine.fail_with(None);
    let file = rig
        .dir
        .path()
        .join("adapters/default/00000001/adapter_model.safetensors");
    std::fs::write(file, "cut").unwrap();
    drop(rig.trainer);
    let mut trainer = trainer(&rig.store, &rig.engine, &rig.learners, &rig.config);
    assert_eq!(
        trainer.advance(&p).unwrap(),
        Progress::Rejected(version(&p, 1))
    );
    assert_eq!(trainer.advance(&p).unwrap(), Progress::Idle);
}
