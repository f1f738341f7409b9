//! Steps made again: bit for bit while nothing is missing, and without what was forgotten.

use super::*;
use chela_core::{Forget, ForgetTarget, Learners, VersionOrigin, registry};
use chela_train::replay::verify;

/// Three steps of different figures.
fn three_steps(rig: &mut Rig, p: &Profile) -> Vec<TurnId> {
    rig.config.optim.lr = 0.05;
    rig.trainer = trainer(&rig.store, &rig.engine, &rig.learners, &rig.config);
    let mut turns = Vec::new();
    for number in 1..=3 {
        turns.extend(rig.pair(p));
        assert_eq!(
            rig.trainer.advance(p).unwrap(),
            Progress::Served(version(p, number))
        );
    }
    turns
}

fn forget(rig: &Rig, p: &Profile, turn: TurnId) -> registry::Undo {
    let target = ForgetTarget::Session(p.clone(), session(&turn.to_string()));
    let plan = rig.store.plan_forget(&target).unwrap();
    let undo = registry::undo(&rig.store.versions(p).unwrap(), &plan.trained);
    if let Some(number) = undo.back_to {
        rig.engine.serve(&version(p, number)).unwrap();
    }
    block_on(rig.store.forget(Forget {
        target,
        why: "asked for".to_owned(),
        versions: undo.versions.clone(),
        back_to: undo.back_to,
        replay: undo.replay.clone(),
        at: 7_000,
    }))
    .unwrap();
    undo
}

#[test]
fn the_log_reproduces_a_version_bit_for_bit() {
    let mut rig = rig();
    let p = profile("default");
    three_steps(&mut rig, &p);
    drop(rig.trainer);
    // Another configuration now: the steps are made as they were then.
    rig.config.optim.lr = 0.3;
    rig.config.baseline = false;
    let parts: (&dyn TrajectoryStore, &dyn PolicyEngine, &dyn Learners) =
        (&*rig.store, &rig.engine, &rig.learners);
    let all = verify(parts, &rig.config, (&p, 3), &mut |_| {}).unwrap();
    assert_eq!(all.len(), 3);
    for step in &all {
        assert_eq!(
            step.then.as_ref(),
            Some(&step.now),
            "version {}",
            step.number
        );
        assert!(step.same_path);
    }
    assert!(verify(parts, &rig.config, (&p, 9), &mut |_| {}).is_err());
}

#[test]
fn steps_are_made_again_without_what_was_forgotten() {
    let mut rig = rig();
    let p = profile("default");
    let turns = three_steps(&mut rig, &p);
    let hashes = |rig: &Rig| -> Vec<String> {
        let all = rig.store.versions(&p).unwrap();
        all.into_iter()
            .filter_map(|v| v.receipt.map(|r| r.weights_hash))
            .collect()
    };
    let first = hashes(&rig)[0].clone();
    // One of the second step's two turns.
    let undo = forget(&rig, &p, turns[2]);
    assert_eq!((undo.versions, undo.back_to), (vec![2, 3], Some(1)));
    assert_eq!(rig.engine.served(&p), version(&p, 1), "at once");
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Replayed(version(&p, 4))
    );
    assert_eq!(
        rig.engine.served(&p),
        version(&p, 1),
        "nothing half-made is served"
    );
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Replayed(version(&p, 5))
    );
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Served(version(&p, 5))
    );
    let versions = rig.store.versions(&p).unwrap();
    assert_eq!(versions[3].origin, VersionOrigin::Replayed(2));
    assert_eq!(
        (versions[4].origin.clone(), versions[4].parent),
        (VersionOrigin::Replayed(3), 4)
    );
    assert_eq!(
        (versions[3].state.clone(), versions[4].state.clone()),
        (VersionState::Superseded, VersionState::Served)
    );
    assert_eq!(
        (versions[3].samples.len(), versions[4].samples.len()),
        (1, 2)
    );
    assert_eq!(hashes(&rig)[0], first, "what was not touched is as it was");
    assert_eq!(rig.state(turns[3]), SampleState::Consumed(version(&p, 4)));
    // And what was made again can be made again.
    drop(std::mem::replace(
        &mut rig.trainer,
        trainer(&rig.store, &rig.engine, &rig.learners, &rig.config),
    ));
    let parts: (&dyn TrajectoryStore, &dyn PolicyEngine, &dyn Learners) =
        (&*rig.store, &rig.engine, &rig.learners);
    let all = verify(parts, &rig.config, (&p, 5), &mut |_| {}).unwrap();
    assert_eq!(
        all.last().unwrap().then.as_ref(),
        Some(&all.last().unwrap().now)
    );
    // Nothing is left to do; training goes on from there.
    assert_eq!(rig.trainer.advance(&p).unwrap(), Progress::Idle);
    rig.pair(&p);
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Served(version(&p, 6))
    );
}

#[test]
fn a_step_of_which_nothing_is_left_is_left_out() {
    let mut rig = rig();
    let p = profile("default");
    let turns = three_steps(&mut rig, &p);
    forget(&rig, &p, turns[4]);
    let undo = forget(&rig, &p, turns[5]);
    assert!(
        undo.versions.is_empty(),
        "version 3 was forgotten with the first"
    );
    assert_eq!(rig.trainer.advance(&p).unwrap(), Progress::Idle, "skipped");
    assert!(rig.store.replays(&p).unwrap().is_empty());
    assert_eq!(rig.engine.served(&p), version(&p, 2));
    assert_eq!(rig.versions(&p)[1].2, VersionState::Served);
}

#[test]
fn a_crash_in_the_middle_of_making_again_is_gone_on_from() {
    let mut rig = rig();
    let p = profile("default");
    let turns = three_steps(&mut rig, &p);
    forget(&rig, &p, turns[2]);
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Replayed(version(&p, 4))
    );
    drop(rig.trainer);
    rig.store.restart();
    let engine = FakeEngine::new();
    restore(&*rig.store, &engine, &rig.config, 8_000).unwrap();
    assert_eq!(engine.served(&p), version(&p, 1));
    assert_eq!(
        folders(rig.dir.path(), "default"),
        2,
        "files of forgotten versions are deleted"
    );
    let mut trainer = trainer(&rig.store, &engine, &rig.learners, &rig.config);
    for expected in [
        Progress::Replayed(version(&p, 5)),
        Progress::Served(version(&p, 5)),
    ] {
        assert_eq!(trainer.advance(&p).unwrap(), expected);
    }
    assert_eq!(engine.served(&p), version(&p, 5));
}
