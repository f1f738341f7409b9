//! What never reaches users, what is taken back from them, and when training stops by itself.

use super::*;
use chela_core::{HELD_OUT, Profile};
use chela_train::{Probe, WatchConfig};

/// A judged turn that is kept for the gate.
fn held_out(rig: &Rig, of: &Profile, reward: f32, tokens: &[u32]) {
    let id = rig.store.next_turn_id(900);
    let verdict_id = rig.store.next_verdict_id();
    let mut turn = first_turn(id, of, &session(&id.to_string()));
    turn.reply = sampled(tokens);
    block_on(rig.store.append(vec![
        Event::Turn(Box::new(turn)),
        Event::Verdict {
            turn: id,
            id: verdict_id,
            verdict: Box::new(verdict(Some(reward), &[])),
            at: 2_000,
        },
        Event::Sample(Box::new(new_sample(id, verdict_id, reward))),
    ]))
    .unwrap();
    let samples = rig.store.story(id).unwrap().unwrap().samples;
    block_on(rig.store.append(vec![Event::Dropped {
        samples: vec![samples[0].0],
        why: HELD_OUT.to_owned(),
    }]))
    .unwrap();
}

/// Steps so large that one of them moves the fakes' few parameters for all to see.
fn eager(rig: &mut Rig) {
    rig.config.optim.lr = 1.0;
    rig.config.baseline = false;
    rig.trainer = trainer(&rig.store, &rig.engine, &rig.learners, &rig.config);
}

fn check<'a>(record: &'a chela_core::VersionRecord, name: &str) -> &'a chela_core::GateCheck {
    let report = record.gate.as_ref().unwrap();
    report.checks.iter().find(|c| c.name == name).unwrap()
}

#[test]
fn a_candidate_that_unlearns_what_was_accepted_never_serves() {
    let mut rig = rig();
    eager(&mut rig);
    let p = profile("default");
    // The tokens of the training replies are those of accepted held-out ones, and they are punished.
    for _ in 0..3 {
        held_out(&rig, &p, 1.0, &[4, 4, 4]);
    }
    let turns = [rig.judged(&p, -1.0), rig.judged(&p, -1.0)];
    let before = rig.engine.served(&p);
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Rejected(version(&p, 1))
    );
    assert_eq!(rig.engine.served(&p), before);
    assert!(rig.engine.resident().is_empty(), "its weights leave memory");
    let record = rig.store.versions(&p).unwrap().pop().unwrap();
    assert!(
        matches!(&record.state, VersionState::Rejected(why) if why.starts_with("gate: accepted is -"))
    );
    let accepted = check(&record, "accepted");
    assert!(
        !accepted.passed && accepted.value < accepted.limit,
        "{accepted:?}"
    );
    assert!(record.receipt.is_some());
    for turn in turns {
        assert_eq!(
            rig.state(turn),
            SampleState::Dropped("gate failed".to_owned())
        );
    }
    // The learner goes on from what is served, not from what was rejected.
    rig.config.optim.lr = 1e-4;
    rig.trainer = trainer(&rig.store, &rig.engine, &rig.learners, &rig.config);
    rig.pair(&p);
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Served(version(&p, 2))
    );
    let record = rig.store.versions(&p).unwrap().pop().unwrap();
    assert_eq!(record.parent, 0);
    assert!(check(&record, "accepted").passed);
}

#[test]
fn rejected_replies_do_not_come_back() {
    let mut rig = rig();
    eager(&mut rig);
    let p = profile("default");
    for _ in 0..3 {
        held_out(&rig, &p, -1.0, &[4, 4, 4]);
    }
    rig.judged(&p, 1.0);
    rig.judged(&p, 1.0);
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Rejected(version(&p, 1))
    );
    let record = rig.store.versions(&p).unwrap().pop().unwrap();
    assert!(!check(&record, "rejected").passed);
}

#[test]
fn probes_and_the_budget_are_held_against_the_base_model() {
    let mut rig = rig();
    let probe = |name: &str, good: u32, bad: u32| Probe {
        kind: "sycophancy".to_owned(),
        name: name.to_owned(),
        prompt: vec![1, 2],
        good: vec![good, good],
        bad: vec![bad, bad],
    };
    // Training pushes token 4 up, which the probes do not want.
    rig.config.gate.probes = vec![probe("a", 1, 4), probe("b", 2, 4), probe("c", 3, 4)];
    rig.config.gate.open = vec![vec![1, 2, 3]];
    rig.config.gate.kl_budget = 1e-4;
    eager(&mut rig);
    rig.engine
        .answer_with(|_, _| vec![4, 5, 6, 7, 4, 5, 6, 7].into());
    let p = profile("default");
    rig.judged(&p, 1.0);
    rig.judged(&p, 1.0);
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Rejected(version(&p, 1))
    );
    let record = rig.store.versions(&p).unwrap().pop().unwrap();
    let syc = check(&record, "sycophancy");
    assert!(!syc.passed && syc.detail.contains("worst"), "{syc:?}");
    let kl = check(&record, "kl_to_base");
    assert!(!kl.passed && kl.value > 1e-4, "{kl:?}");
    assert!(check(&record, "length").passed && check(&record, "repetition").passed);
}

#[test]
fn a_model_that_loops_does_not_serve() {
    let mut rig = rig();
    rig.config.gate.open = vec![vec![1, 2, 3], vec![1, 2, 4]];
    rig.trainer = trainer(&rig.store, &rig.engine, &rig.learners, &rig.config);
    rig.engine.answer_with(|policy, prompt| match policy {
        chela_core::PolicyRef::Base => (0..20)
            .map(|i| i + prompt.tokens[2])
            .collect::<Vec<u32>>()
            .into(),
        _ => vec![9; 20].into(),
    });
    let p = profile("default");
    rig.pair(&p);
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Rejected(version(&p, 1))
    );
    let record = rig.store.versions(&p).unwrap().pop().unwrap();
    assert!(!check(&record, "repetition").passed);
}

#[test]
fn after_a_few_rejections_in_a_row_training_pauses_and_says_why() {
    let mut rig = rig();
    eager(&mut rig);
    let p = profile("default");
    for _ in 0..3 {
        held_out(&rig, &p, 1.0, &[4, 4, 4]);
    }
    for n in 1..=3 {
        assert_eq!(rig.store.paused(&p).unwrap(), None, "before candidate {n}");
        rig.judged(&p, -1.0);
        rig.judged(&p, -1.0);
        assert!(matches!(
            rig.trainer.advance(&p).unwrap(),
            Progress::Rejected(_)
        ));
    }
    let why = rig.store.paused(&p).unwrap().unwrap();
    assert!(
        why.starts_with("3 versions in a row") && why.contains("accepted"),
        "{why}"
    );
    rig.pair(&p);
    assert_eq!(rig.trainer.advance(&p).unwrap(), Progress::Idle);
    // Whoever resumes has seen these: three more must fall before it stops again, in a trainer that saw the pause only.
    rig.trainer = trainer(&rig.store, &rig.engine, &rig.learners, &rig.config);
    assert_eq!(rig.trainer.advance(&p).unwrap(), Progress::Idle);
    let resumed = Event::Paused {
        profile: p.clone(),
        why: None,
    };
    block_on(rig.store.append(vec![resumed])).unwrap();
    let before = rig.versions(&p).len();
    while rig.trainer.advance(&p).unwrap() != Progress::Idle {}
    while rig.versions(&p).len() < before + 3 {
        assert_eq!(rig.store.paused(&p).unwrap(), None);
        rig.judged(&p, -1.0);
        rig.judged(&p, -1.0);
        assert!(matches!(
            rig.trainer.advance(&p).unwrap(),
            Progress::Rejected(_)
        ));
    }
    assert!(rig.store.paused(&p).unwrap().is_some());
}

#[test]
fn an_operator_and_a_publish_take_turns() {
    let mut rig = rig();
    let p = profile("default");
    rig.pair(&p);
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Served(version(&p, 1))
    );
    rig.pair(&p);
    let steering = chela_core::registry::Steering::default();
    let mut trainer = rig.trainer.steered_by(steering.clone());
    let operator = block_on(steering.lock());
    let of = p.clone();
    let training = std::thread::spawn(move || trainer.advance(&of));
    while rig.store.last_version(&p).unwrap() < 2 {
        assert!(!training.is_finished(), "no second version was made");
        std::thread::yield_now();
    }
    // Whatever the trainer has found out by now, this comes first.
    rig.engine.serve(&version(&p, 0)).unwrap();
    block_on(rig.store.append(vec![Event::Version {
        version: version(&p, 0),
        state: VersionState::Served,
        receipt: None,
        at: 6_000,
    }]))
    .unwrap();
    drop(operator);
    assert_eq!(
        training.join().unwrap().unwrap(),
        Progress::Rejected(version(&p, 2))
    );
    assert_eq!(rig.engine.served(&p), version(&p, 0));
    let versions = rig.store.versions(&p).unwrap();
    assert!(versions.iter().all(|v| v.state != VersionState::Served));
}

#[test]
fn a_version_whose_replies_fare_worse_is_taken_back() {
    let mut rig = rig();
    rig.config.watch = WatchConfig {
        turns: 6,
        ..WatchConfig::default()
    };
    // Batches never fill: only the watch acts.
    let p = profile("default");
    rig.pair(&p);
    rig.trainer = trainer(&rig.store, &rig.engine, &rig.learners, &rig.config);
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Served(version(&p, 1))
    );
    rig.config.batch = 1000;
    rig.trainer = trainer(&rig.store, &rig.engine, &rig.learners, &rig.config);
    for _ in 0..10 {
        rig.judged(&p, 1.0);
    }
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Idle,
        "all is well"
    );
    // Version 2 stands on it and users are less pleased.
    rig.config.batch = 2;
    rig.trainer = trainer(&rig.store, &rig.engine, &rig.learners, &rig.config);
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Served(version(&p, 2))
    );
    rig.config.batch = 1000;
    rig.trainer = trainer(&rig.store, &rig.engine, &rig.learners, &rig.config);
    let bad: Vec<TurnId> = (0..6).map(|_| rig.judged(&p, -1.0)).collect();
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::TakenBack(version(&p, 1))
    );
    assert_eq!(rig.engine.served(&p), version(&p, 1));
    let versions = rig.versions(&p);
    assert_eq!(versions[0].2, VersionState::Served);
    assert!(
        matches!(&versions[1].2, VersionState::RolledBack(why) if why.starts_with("by itself: the live score fell from 0.83 to -1.00")),
        "{versions:?}"
    );
    // What the version that was left sampled is not learnt from.
    assert_eq!(rig.trainer.advance(&p).unwrap(), Progress::Idle);
    for turn in bad {
        assert_eq!(
            rig.state(turn),
            SampleState::Dropped("version outside the chain".to_owned())
        );
    }
    // An operator who wants it back all the same gets it: what made it fall is known to him. (The turns are from before.)
    rig.engine.serve(&version(&p, 2)).unwrap();
    block_on(rig.store.append(vec![Event::Version {
        version: version(&p, 2),
        state: VersionState::Served,
        receipt: None,
        at: 9_000_000,
    }]))
    .unwrap();
    rig.judged(&p, -1.0);
    assert_eq!(rig.trainer.advance(&p).unwrap(), Progress::Idle);
    assert_eq!(rig.engine.served(&p), version(&p, 2));
}

#[test]
fn what_is_gone_back_to_is_read_first() {
    let mut rig = rig();
    rig.config.watch = WatchConfig {
        turns: 6,
        ..WatchConfig::default()
    };
    let p = profile("default");
    for number in 1..=3 {
        if number == 3 {
            rig.config.batch = 1000;
            rig.trainer = trainer(&rig.store, &rig.engine, &rig.learners, &rig.config);
            for _ in 0..12 {
                rig.judged(&p, 1.0);
            }
            assert_eq!(rig.trainer.advance(&p).unwrap(), Progress::Idle);
            rig.config.batch = 2;
        }
        rig.trainer = trainer(&rig.store, &rig.engine, &rig.learners, &rig.config);
        rig.pair(&p);
        assert_eq!(
            rig.trainer.advance(&p).unwrap(),
            Progress::Served(version(&p, number))
        );
    }
    rig.config.batch = 1000;
    rig.trainer = trainer(&rig.store, &rig.engine, &rig.learners, &rig.config);
    for _ in 0..6 {
        rig.judged(&p, -1.0);
    }
    let path = rig.store.versions(&p).unwrap()[1]
        .checkpoint
        .clone()
        .unwrap();
    std::fs::remove_dir_all(rig.dir.path().join(path)).unwrap();
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::TakenBack(version(&p, 1)),
        "version 2 sampled the better turns; its files are gone"
    );
    assert_eq!(rig.engine.served(&p), version(&p, 1));
}

#[test]
fn a_frozen_profile_never_learns() {
    let mut rig = rig();
    let p = profile("guest");
    rig.config.frozen = vec![p.clone()];
    rig.trainer = trainer(&rig.store, &rig.engine, &rig.learners, &rig.config);
    let turns = rig.pair(&p);
    assert_eq!(rig.trainer.advance(&p).unwrap(), Progress::Idle);
    for turn in turns {
        assert_eq!(
            rig.state(turn),
            SampleState::Dropped("this profile never learns".to_owned())
        );
    }
    assert!(rig.versions(&p).is_empty());
}

#[test]
fn a_look_is_left_off_when_the_program_ends_and_made_after_the_next_start() {
    let mut rig = rig();
    rig.config.gate.probes = vec![Probe {
        kind: "sense".to_owned(),
        name: "a".to_owned(),
        prompt: vec![1, 2],
        good: vec![3],
        bad: vec![4],
    }];
    let p = profile("default");
    rig.pair(&p);
    rig.trainer = trainer(&rig.store, &rig.engine, &rig.learners, &rig.config);
    // Told to end while the canary is read: the step is committed, the gate not begun.
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let told = stop.clone();
    rig.engine.answer_with(move |_, _| {
        told.store(true, std::sync::atomic::Ordering::Relaxed);
        vec![1].into()
    });
    rig.trainer.run(&stop);
    assert_eq!(rig.versions(&p), [(1, 0, VersionState::Candidate)]);
    drop(rig.trainer);
    let mut trainer = trainer(&rig.store, &rig.engine, &rig.learners, &rig.config);
    assert_eq!(
        trainer.advance(&p).unwrap(),
        Progress::Served(version(&p, 1))
    );
}
