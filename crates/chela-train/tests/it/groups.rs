//! Steps out of whole groups: what is consumed, what falls, and that a restart, a replay and forgetting lose nothing.

use super::*;
use chela_core::{
    Forget, ForgetTarget, Group, Learners, NewSample, Verdict, VerdictSource, registry,
};
use chela_train::{
    Algorithm,
    groups::{INCOMPLETE, NO_DIFFERENCE},
    replay::verify,
};

impl Rig {
    /// A reply of a group, with the score that a task runner gave it.
    fn grouped(&self, of: &Profile, name: &str, reward: f32, reply: &[u32]) -> TurnId {
        let id = self.store.next_turn_id(1_000);
        let verdict_id = self.store.next_verdict_id();
        let mut turn = first_turn(id, of, &session(&id.to_string()));
        turn.version = self.engine.served(of);
        turn.reply = sampled(reply);
        let group = Some(Group::new(name, 3).unwrap());
        let said = Verdict {
            source: VerdictSource::Explicit,
            group: group.clone(),
            ..verdict(Some(reward), &[])
        };
        let sample = NewSample {
            group,
            explicit: true,
            ..new_sample(id, verdict_id, reward)
        };
        block_on(self.store.append(vec![
            Event::Turn(Box::new(turn)),
            Event::Verdict {
                turn: id,
                id: verdict_id,
                verdict: Box::new(said),
                at: 2_000,
            },
            Event::Sample(Box::new(sample)),
        ]))
        .unwrap();
        id
    }

    /// A whole group of three; two replies are equal.
    fn group(&self, of: &Profile, name: &str, rewards: [f32; 3]) -> [TurnId; 3] {
        [(0, &[4u32, 9][..]), (1, &[4, 9]), (2, &[7, 12, 30])]
            .map(|(i, reply)| self.grouped(of, name, rewards[i], reply))
    }

    fn taught_with(&mut self, algorithm: Algorithm) {
        self.config.groups = 2;
        self.config.algorithm = algorithm;
        self.config.optim.lr = 0.05;
        self.trainer = trainer(&self.store, &self.engine, &self.learners, &self.config);
    }

    fn metric(&self, of: &Profile, name: &str) -> f64 {
        let record = self.store.versions(of).unwrap().pop().unwrap();
        let found = record.metrics.into_iter().find(|(n, _)| n == name);
        found.unwrap().1
    }
}

fn dropped(why: &str) -> SampleState {
    SampleState::Dropped(why.to_owned())
}

#[test]
fn every_algorithm_makes_a_step_and_the_log_reproduces_it() {
    for algorithm in Algorithm::ALL.into_iter().filter(|a| !a.values()) {
        let mut rig = rig();
        let p = profile("default");
        rig.taught_with(algorithm);
        for number in 1..=2 {
            let a = rig.group(&p, "a", [1.0, 0.0, 0.5]);
            assert_eq!(
                rig.trainer.advance(&p).unwrap(),
                Progress::Idle,
                "one of two"
            );
            let b = rig.group(&p, "b", [0.0, 0.25, 3.0]);
            let served = Progress::Served(version(&p, number));
            assert_eq!(rig.trainer.advance(&p).unwrap(), served, "{algorithm:?}");
            for turn in a.into_iter().chain(b) {
                assert_eq!(rig.state(turn), SampleState::Consumed(version(&p, number)));
            }
            assert!((rig.metric(&p, "groups"), rig.metric(&p, "samples")) == (2.0, 6.0));
            assert!(rig.metric(&p, "grad_norm") > 0.0, "{algorithm:?}");
        }
        // Rewards in groups say nothing about sessions.
        assert!(rig.metric(&p, "baseline_count") == 0.0);
        drop(rig.trainer);
        rig.config.algorithm = Algorithm::Ppo;
        rig.config.reply_limit = Some(3);
        let parts: (&dyn TrajectoryStore, &dyn PolicyEngine, &dyn Learners) =
            (&*rig.store, &rig.engine, &rig.learners);
        for step in verify(parts, &rig.config, (&p, 2), &mut |_| {}).unwrap() {
            assert_eq!(step.then.as_ref(), Some(&step.now), "{algorithm:?}");
        }
    }
}

#[test]
fn the_better_reply_of_a_group_becomes_likelier() {
    let mut rig = rig();
    let p = profile("default");
    rig.taught_with(Algorithm::Grpo);
    let score = |rig: &Rig, reply: [u32; 2]| -> f32 {
        let mut tokens = first_turn(TurnId(1), &p, &session("s")).prompt;
        let from = tokens.len();
        tokens.extend(reply);
        let policy = chela_core::PolicyRef::Version(rig.engine.served(&p));
        let prompt = chela_core::Prompt { tokens };
        let scored = rig
            .engine
            .score(policy, prompt, from, chela_core::Want::default());
        block_on(scored).unwrap().logprobs.iter().sum()
    };
    for name in ["a", "b"] {
        rig.grouped(&p, name, 1.0, &[4, 9]);
        rig.grouped(&p, name, 0.0, &[7, 12]);
        rig.grouped(&p, name, 0.0, &[7, 12]);
    }
    rig.trainer.advance(&p).unwrap();
    assert_eq!(rig.engine.served(&p), version(&p, 1));
    assert!(score(&rig, [4, 9]) > score(&rig, [7, 12]) + 0.01);
}

#[test]
fn constant_groups_teach_nothing_and_are_counted() {
    let mut rig = rig();
    let p = profile("default");
    rig.taught_with(Algorithm::Grpo);
    let same = rig.group(&p, "same", [1.0; 3]);
    let other = rig.group(&p, "other", [1.0, 0.0, 0.0]);
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Served(version(&p, 1))
    );
    assert!(
        same.iter()
            .all(|turn| rig.state(*turn) == dropped(NO_DIFFERENCE))
    );
    assert!(
        other
            .iter()
            .all(|turn| rig.state(*turn) == SampleState::Consumed(version(&p, 1)))
    );
    let counts = rig.store.counts(Some(&p)).unwrap().samples;
    assert!(
        counts.contains(&(format!("dropped:{NO_DIFFERENCE}"), 3)),
        "{counts:?}"
    );
    // A batch of nothing else makes no version and is not tried again.
    rig.group(&p, "same", [0.5; 3]);
    let last = rig.group(&p, "again", [0.0; 3]);
    assert_eq!(rig.trainer.advance(&p).unwrap(), Progress::Idle);
    assert_eq!(rig.versions(&p).len(), 1);
    assert_eq!(rig.state(last[0]), dropped(NO_DIFFERENCE));
    // Where others are asked for in their place, the batch waits for these.
    rig.taught_with(Algorithm::Dapo);
    let same = rig.group(&p, "same", [0.5; 3]);
    rig.group(&p, "x", [0.0, 0.0, 1.0]);
    assert_eq!(rig.trainer.advance(&p).unwrap(), Progress::Idle);
    assert_eq!(rig.state(same[0]), dropped(NO_DIFFERENCE));
    rig.group(&p, "y", [0.0, 0.0, 1.0]);
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Served(version(&p, 2))
    );
}

#[test]
fn incomplete_and_stale_groups_fall_whole() {
    let mut rig = rig();
    let p = profile("default");
    rig.taught_with(Algorithm::Grpo);
    rig.config.max_staleness = 0;
    rig.config.batch_timeout_ms = 2_000; // the trainer's clock says 5,000, samples are of 3,000
    rig.trainer = trainer(&rig.store, &rig.engine, &rig.learners, &rig.config);
    let lone = [0.0, 1.0].map(|reward| rig.grouped(&p, "lone", reward, &[4, 9]));
    assert_eq!(rig.trainer.advance(&p).unwrap(), Progress::Idle);
    assert!(
        lone.iter()
            .all(|turn| rig.state(*turn) == dropped(INCOMPLETE))
    );

    rig.group(&p, "a", [1.0, 0.0, 0.5]);
    rig.group(&p, "b", [1.0, 0.0, 0.5]);
    let late = rig.group(&p, "c", [1.0, 0.0, 0.5]);
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Served(version(&p, 1))
    );
    assert_eq!(rig.trainer.advance(&p).unwrap(), Progress::Idle);
    assert!(late.iter().all(|turn| rig.state(*turn) == dropped("stale")));
}

#[test]
fn groups_are_trained_after_a_restart_and_sessions_beside_them() {
    let mut rig = rig();
    let p = profile("default");
    rig.taught_with(Algorithm::Rloo);
    rig.group(&p, "a", [1.0, 0.0, 0.5]);
    rig.learners
        .push_error(EngineError::NotFinite("a test".to_owned()));
    rig.group(&p, "b", [0.0, 0.25, 3.0]);
    assert!(rig.trainer.advance(&p).is_err());
    rig.store.restart();
    rig.trainer = trainer(&rig.store, &rig.engine, &rig.learners, &rig.config);
    let pair = rig.pair(&p);
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Served(version(&p, 1))
    );
    assert_eq!(
        rig.state(pair[0]),
        SampleState::Pending,
        "the older batch goes first"
    );
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Served(version(&p, 2))
    );
    assert!((rig.metric(&p, "groups"), rig.metric(&p, "baseline_count")) == (0.0, 2.0));
}

#[test]
fn what_is_left_of_a_group_makes_the_step_again() {
    let mut rig = rig();
    let p = profile("default");
    rig.taught_with(Algorithm::Grpo);
    let a = rig.group(&p, "a", [1.0, 0.0, 0.5]);
    let b = rig.group(&p, "b", [0.0, 0.25, 3.0]);
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Served(version(&p, 1))
    );
    // One reply of one group, two of the other: the reply that is left alone says nothing any more.
    for turn in [a[0], b[0], b[1]] {
        let target = ForgetTarget::Session(p.clone(), session(&turn.to_string()));
        let plan = rig.store.plan_forget(&target).unwrap();
        let undo = registry::undo(&rig.store.versions(&p).unwrap(), &plan.trained);
        let forget = Forget {
            target,
            why: "asked for".to_owned(),
            versions: undo.versions,
            back_to: undo.back_to,
            replay: undo.replay,
            at: 7_000,
        };
        block_on(rig.store.forget(forget)).unwrap();
    }
    rig.engine.serve(&PolicyVersion::base(p.clone())).unwrap();
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Replayed(version(&p, 2))
    );
    assert!((rig.metric(&p, "groups"), rig.metric(&p, "samples")) == (1.0, 2.0));
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Served(version(&p, 2))
    );
    assert_eq!(rig.state(b[2]), SampleState::Consumed(version(&p, 2)));
}

#[test]
fn an_algorithm_that_needs_a_value_head_is_refused_and_nothing_is_lost() {
    let mut rig = rig();
    let p = profile("default");
    rig.taught_with(Algorithm::Ppo);
    let a = rig.group(&p, "a", [1.0, 0.0, 0.5]);
    rig.group(&p, "b", [0.0, 0.25, 3.0]);
    assert!(matches!(rig.trainer.advance(&p), Err(TrainError::NoValues)));
    assert_eq!(rig.state(a[0]), SampleState::Pending);
    rig.taught_with(Algorithm::Grpo);
    assert_eq!(
        rig.trainer.advance(&p).unwrap(),
        Progress::Served(version(&p, 1))
    );
}
