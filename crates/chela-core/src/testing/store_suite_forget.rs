//! The suite's part about forgetting: what goes, what stays, and what happens to versions that learnt from it.

use super::{
    build::*,
    futures::block_on,
    store_suite::{follow, judge, put, refused, told_turn},
    store_suite_queue::{conflict, sampled, state},
    store_suite_versions::{at, set, train},
};
use crate::*;

pub(super) const PARTS: [fn(&dyn TrajectoryStore); 10] = [
    a_turn_goes_with_its_siblings_and_what_stands_on_them,
    a_lone_turn_takes_its_session_along,
    a_profile_goes_whole_but_for_its_last_number,
    what_is_not_there_cannot_be_forgotten,
    what_is_in_a_step_is_not_forgotten,
    versions_that_learnt_must_be_named,
    a_rejected_version_learnt_too,
    versions_are_forgotten_and_made_again,
    a_second_forgetting_puts_its_steps_in_front,
    a_forgotten_version_stays_forgotten,
];

fn forget(store: &dyn TrajectoryStore, target: ForgetTarget) -> ForgetPlan {
    let planned = store.plan_forget(&target).unwrap();
    let proof = block_on(store.forget(forgetting(target))).unwrap();
    assert_eq!(proof.plan, planned);
    assert_eq!(proof.found, Vec::<String>::new());
    planned
}

fn add(store: &dyn TrajectoryStore, turn: &Turn) {
    put(store, vec![Event::Turn(Box::new(turn.clone()))]);
}

fn explicit(store: &dyn TrajectoryStore, turn: TurnId, reward: f32) -> VerdictId {
    let id = store.next_verdict_id();
    let verdict = Box::new(Verdict {
        judge: "reward".to_owned(),
        source: VerdictSource::Explicit,
        evidence: None,
        ..verdict(Some(reward), &[])
    });
    put(
        store,
        vec![Event::Verdict {
            turn,
            id,
            verdict,
            at: 1,
        }],
    );
    id
}

fn a_turn_goes_with_its_siblings_and_what_stands_on_them(store: &dyn TrajectoryStore) {
    let p = profile("p");
    // root → parent → turn, its retry → child → grandchild; beside them an edited request.
    let root = told_turn(store, &p, "s");
    let parent = next_turn(store.next_turn_id(2_000), &root, &[6, 7], &[8]);
    add(store, &parent);
    let turn = next_turn(store.next_turn_id(3_000), &parent, &[9], &[10]);
    let retry = next_turn(store.next_turn_id(3_500), &parent, &[9], &[11, 12]);
    let edited = next_turn(store.next_turn_id(3_600), &parent, &[9, 9], &[13]);
    let child = next_turn(store.next_turn_id(4_000), &retry, &[14], &[15]);
    let grandchild = next_turn(store.next_turn_id(5_000), &child, &[16], &[17]);
    for one in [&turn, &retry, &edited, &child, &grandchild] {
        add(store, one);
    }
    put(store, vec![follow(parent.id, "no, the other one", 3_000)]);
    let (kept, lost) = (
        explicit(store, parent.id, 0.5),
        judge(store, parent.id, -1.0),
    );
    let of_child = judge(store, child.id, 1.0);
    let samples = [(parent.id, kept), (parent.id, lost), (child.id, of_child)];
    for (turn, verdict) in samples {
        put(
            store,
            vec![Event::Sample(Box::new(new_sample(turn, verdict, 1.0)))],
        );
    }
    let before = store.story(root.id).unwrap();
    let plan = forget(store, ForgetTarget::Turn(p.clone(), turn.id));
    let gone = vec![turn.id, retry.id, child.id, grandchild.id];
    assert_eq!((&plan.turns, &plan.unjudged), (&gone, &vec![parent.id]));
    assert_eq!((plan.sessions, plan.verdicts, plan.samples), (0, 2, 2));
    for id in gone {
        assert_eq!(store.story(id).unwrap(), None);
    }
    assert_eq!(store.story(root.id).unwrap(), before);
    assert_eq!(store.story(edited.id).unwrap().unwrap().turn, edited);
    // The parent: what a person said of it stays, what was made of the next request does not; it is not asked about again.
    let story = store.story(parent.id).unwrap().unwrap();
    assert_eq!((story.turn, story.next), (parent.clone(), None));
    assert_eq!(
        story.no_verdict.as_deref(),
        Some("what followed was forgotten")
    );
    let verdicts: Vec<_> = story.verdicts.iter().map(|v| v.0).collect();
    let samples: Vec<_> = story.samples.iter().map(|s| s.1.verdict).collect();
    assert_eq!((verdicts, samples), (vec![kept], vec![kept]));
    assert_eq!(store.unjudged(9).unwrap(), vec![root.id]);
    let live = store.live_turns(&p, 9).unwrap();
    assert_eq!(live.len(), 1);
    assert_eq!((live[0].turn, live[0].reward), (parent.id, Some(0.5)));
    assert_eq!(store.session(&p, &root.session).unwrap().unwrap().turns, 3);
    // The conversation can go on.
    add(
        store,
        &next_turn(store.next_turn_id(6_000), &parent, &[9], &[18]),
    );
}

fn a_lone_turn_takes_its_session_along(store: &dyn TrajectoryStore) {
    let p = profile("p");
    let turn = told_turn(store, &p, "s");
    let mut retry = first_turn(store.next_turn_id(2_000), &p, &session("s"));
    retry.kind = TurnKind::Side;
    add(store, &retry);
    let other = told_turn(store, &p, "t");
    let plan = forget(store, ForgetTarget::Turn(p.clone(), retry.id));
    assert_eq!(plan.turns, vec![turn.id, retry.id]);
    assert_eq!((plan.sessions, plan.unjudged.len()), (1, 0));
    assert_eq!(store.session(&p, &turn.session).unwrap(), None);
    assert_eq!(store.story(other.id).unwrap().unwrap().turn, other);
    assert_eq!(store.counts(None).unwrap().sessions, 1);
}

fn a_profile_goes_whole_but_for_its_last_number(store: &dyn TrajectoryStore) {
    let (p, q) = (profile("p"), profile("q"));
    let (turn, a) = sampled(store, &p, "1");
    let (_, held) = sampled(store, &p, "2");
    let (other, b) = sampled(store, &q, "1");
    train(store, &p, 7, 0, &[a]);
    train(store, &q, 7, 0, &[b]);
    let paused = Event::Paused {
        profile: p.clone(),
        why: Some("by hand".to_owned()),
    };
    let dropped = Event::Dropped {
        samples: vec![held],
        why: HELD_OUT.to_owned(),
    };
    put(
        store,
        vec![paused, dropped, set(at(&p, 7), VersionState::Served, 1)],
    );
    let target = ForgetTarget::Profile(p.clone());
    let plan = store.plan_forget(&target).unwrap();
    assert_eq!((plan.turns.len(), plan.sessions, plan.samples), (2, 2, 2));
    assert_eq!(plan.trained, vec![(a, 7)]);
    let whole = Forget {
        versions: vec![7],
        back_to: Some(0),
        replay: vec![7],
        ..forgetting(target)
    };
    assert_eq!(block_on(store.forget(whole)).unwrap().plan, plan);
    assert_eq!(store.profiles().unwrap(), vec![q.clone()]);
    assert_eq!(store.story(turn.id).unwrap(), None);
    assert_eq!(store.versions(&p).unwrap(), vec![]);
    assert_eq!(store.replays(&p).unwrap(), Vec::<u64>::new());
    assert_eq!(store.paused(&p).unwrap(), None);
    assert_eq!(store.held_out(&p, 9).unwrap(), (vec![], 0));
    assert_eq!(store.live_turns(&p, 9).unwrap(), vec![]);
    assert_eq!(store.samples(&[a, b]).unwrap().len(), 1);
    assert_eq!(state(store, other.id, b), SampleState::Consumed(at(&q, 7)));
    // The number is not given again.
    assert_eq!(store.last_version(&p).unwrap(), 7);
    conflict(store.commit_step(step(&p, 7, 0, &[])));
    block_on(store.commit_step(step(&p, 8, 0, &[]))).unwrap();
    assert_eq!(store.last_version(&p).unwrap(), 8);
}

fn what_is_not_there_cannot_be_forgotten(store: &dyn TrajectoryStore) {
    let (p, q) = (profile("p"), profile("q"));
    let turn = told_turn(store, &p, "s");
    put(
        store,
        vec![Event::Paused {
            profile: profile("r"),
            why: Some("x".to_owned()),
        }],
    );
    for target in [
        ForgetTarget::Turn(q.clone(), turn.id),
        ForgetTarget::Turn(p.clone(), TurnId(u64::MAX)),
        ForgetTarget::Session(q.clone(), turn.session.clone()),
        ForgetTarget::Session(p.clone(), session("t")),
        ForgetTarget::Profile(q),
    ] {
        let plan = store.plan_forget(&target);
        assert!(matches!(plan, Err(StoreError::NotFound(_))), "{plan:?}");
        let proof = block_on(store.forget(forgetting(target)));
        assert!(matches!(proof, Err(StoreError::NotFound(_))), "{proof:?}");
    }
    assert_eq!(store.story(turn.id).unwrap().unwrap().turn, turn);
    // A profile that is only paused is there.
    forget(store, ForgetTarget::Profile(profile("r")));
    assert_eq!(store.profiles().unwrap(), vec![p]);
}

fn what_is_in_a_step_is_not_forgotten(store: &dyn TrajectoryStore) {
    let p = profile("p");
    let (turn, a) = sampled(store, &p, "s");
    let (other, _) = sampled(store, &p, "t");
    let child = next_turn(store.next_turn_id(5_000), &turn, &[6], &[7]);
    add(store, &child);
    block_on(store.lease(vec![a])).unwrap();
    // The child's going would take the sample of its parent along.
    for target in [
        ForgetTarget::Turn(p.clone(), turn.id),
        ForgetTarget::Turn(p.clone(), child.id),
        ForgetTarget::Session(p.clone(), turn.session.clone()),
        ForgetTarget::Profile(p.clone()),
    ] {
        conflict(store.forget(forgetting(target)));
    }
    assert_eq!(state(store, turn.id, a), SampleState::Leased);
    forget(store, ForgetTarget::Turn(p.clone(), other.id));
    block_on(store.release(vec![a])).unwrap();
    forget(store, ForgetTarget::Turn(p.clone(), child.id));
    assert_eq!(store.samples(&[a]).unwrap(), vec![]);
}

fn versions_that_learnt_must_be_named(store: &dyn TrajectoryStore) {
    let p = profile("p");
    let (turn, a) = sampled(store, &p, "s");
    train(store, &p, 1, 0, &[a]);
    put(store, vec![set(at(&p, 1), VersionState::Served, 1)]);
    let target = || ForgetTarget::Session(p.clone(), turn.session.clone());
    let with = |versions: &[u64], back_to| {
        store.forget(Forget {
            versions: versions.to_vec(),
            back_to,
            ..forgetting(target())
        })
    };
    conflict(with(&[], None));
    conflict(with(&[2], None));
    // Nor may the profile be left without a way back, or be led where it cannot go.
    conflict(with(&[1], None));
    conflict(with(&[1], Some(1)));
    conflict(with(&[1], Some(9)));
    assert_eq!(store.story(turn.id).unwrap().unwrap().turn, turn);
    assert_eq!(store.versions(&p).unwrap()[0].samples, vec![a]);
    put(store, vec![set(at(&p, 0), VersionState::Served, 2)]);
    conflict(with(&[1], Some(0)));
    block_on(with(&[1], None)).unwrap();
}

fn a_rejected_version_learnt_too(store: &dyn TrajectoryStore) {
    let p = profile("p");
    let (_, a) = sampled(store, &p, "s");
    train(store, &p, 1, 0, &[a]);
    let why = || "gate".to_owned();
    let unlearnt = Event::Unlearnt {
        version: at(&p, 1),
        why: why(),
    };
    put(
        store,
        vec![set(at(&p, 1), VersionState::Rejected(why()), 1), unlearnt],
    );
    let target = || ForgetTarget::Session(p.clone(), session("s"));
    let plan = store.plan_forget(&target()).unwrap();
    assert_eq!(plan.trained, vec![(a, 1)]);
    conflict(store.forget(forgetting(target())));
    let with = Forget {
        versions: vec![1],
        ..forgetting(target())
    };
    block_on(store.forget(with)).unwrap();
    let versions = store.versions(&p).unwrap();
    assert_eq!(
        versions[0].state,
        VersionState::Forgotten("asked for".to_owned())
    );
    assert_eq!(
        (&versions[0].checkpoint, &versions[0].samples),
        (&None, &vec![])
    );
}

/// Three steps, each on one sample of its own, the second also on one of the first session; the third is served.
fn three_steps(store: &dyn TrajectoryStore, p: &Profile) -> (Vec<Turn>, Vec<SampleId>) {
    let (turns, samples): (Vec<_>, Vec<_>) = ["1", "2", "3", "4"]
        .map(|name| sampled(store, p, name))
        .into_iter()
        .unzip();
    train(store, p, 1, 0, &[samples[0]]);
    train(store, p, 2, 1, &[samples[1], samples[3]]);
    train(store, p, 3, 2, &[samples[2]]);
    for number in 1..=3 {
        let served = Event::Version {
            version: at(p, number),
            state: VersionState::Served,
            receipt: Some(receipt()),
            at: number as i64,
        };
        let gate = Event::Gate {
            version: at(p, number),
            report: GateReport::default(),
        };
        put(store, vec![gate, served]);
    }
    (turns, samples)
}

fn replayed(p: &Profile, number: u64, parent: u64, of: u64, samples: &[SampleId]) -> StepCommit {
    let mut commit = step(p, number, parent, samples);
    commit.version.origin = VersionOrigin::Replayed(of);
    commit
}

fn versions_are_forgotten_and_made_again(store: &dyn TrajectoryStore) {
    let p = profile("p");
    let (turns, samples) = three_steps(store, &p);
    let target = ForgetTarget::Session(p.clone(), session("2"));
    let plan = store.plan_forget(&target).unwrap();
    assert_eq!(plan.trained, vec![(samples[1], 2)]);
    let undo = registry::undo(&store.versions(&p).unwrap(), &plan.trained);
    let change = Forget {
        versions: undo.versions,
        back_to: undo.back_to,
        replay: undo.replay,
        ..forgetting(target)
    };
    block_on(store.forget(change)).unwrap();
    let versions = store.versions(&p).unwrap();
    let forgotten = VersionState::Forgotten("asked for".to_owned());
    let states: Vec<_> = versions.iter().map(|v| v.state.clone()).collect();
    assert_eq!(states, [VersionState::Served, forgotten.clone(), forgotten]);
    let times: Vec<_> = versions.iter().map(|v| (v.served_at, v.left_at)).collect();
    assert_eq!(
        times,
        [
            (Some(9_000), None),
            (Some(2), Some(3)),
            (Some(3), Some(9_000))
        ]
    );
    for gone in &versions[1..] {
        assert_eq!(
            (&gone.checkpoint, &gone.receipt, &gone.gate),
            (&None, &None, &None)
        );
    }
    assert_eq!(versions[1].samples, vec![samples[3]]);
    assert_eq!(store.replays(&p).unwrap(), vec![2, 3]);
    // What is left of the batches was consumed and needs no lease. Order, step and number must fit.
    conflict(store.commit_step(replayed(&p, 4, 1, 3, &[samples[2]])));
    conflict(store.commit_step(replayed(&p, 4, 1, 2, &[samples[2]])));
    conflict(store.commit_step(replayed(&p, 4, 1, 2, &[samples[3], samples[3]])));
    conflict(store.commit_step(replayed(&p, 4, 1, 2, &[samples[1]])));
    conflict(store.commit_step(replayed(&p, 4, 2, 2, &[samples[3]])));
    conflict(store.commit_step(replayed(&p, 3, 1, 2, &[samples[3]])));
    assert_eq!(
        state(store, turns[3].id, samples[3]),
        SampleState::Consumed(at(&p, 2))
    );
    block_on(store.commit_step(replayed(&p, 4, 1, 2, &[samples[3]]))).unwrap();
    assert_eq!(
        state(store, turns[3].id, samples[3]),
        SampleState::Consumed(at(&p, 4))
    );
    assert_eq!(store.replays(&p).unwrap(), vec![3]);
    let four = replayed(&p, 4, 1, 2, &[samples[3]]).version;
    assert_eq!(store.versions(&p).unwrap()[3], four);
    let skipped = |number| Event::ReplaySkipped {
        version: at(&p, number),
    };
    refused(store, vec![skipped(2)]);
    put(store, vec![skipped(3)]);
    assert_eq!(store.replays(&p).unwrap(), Vec::<u64>::new());
    conflict(store.commit_step(replayed(&p, 5, 4, 3, &[samples[2]])));
}

fn a_second_forgetting_puts_its_steps_in_front(store: &dyn TrajectoryStore) {
    let p = profile("p");
    let (_, samples) = three_steps(store, &p);
    let first = Forget {
        versions: vec![2, 3],
        back_to: Some(1),
        replay: vec![2, 3],
        ..forgetting(ForgetTarget::Session(p.clone(), session("2")))
    };
    block_on(store.forget(first)).unwrap();
    block_on(store.commit_step(replayed(&p, 4, 1, 2, &[samples[3]]))).unwrap();
    // Now the first step as well: 4 stands on 1, so both are made again before 3.
    let target = ForgetTarget::Session(p.clone(), session("1"));
    let plan = store.plan_forget(&target).unwrap();
    let undo = registry::undo(&store.versions(&p).unwrap(), &plan.trained);
    assert_eq!((&undo.versions, undo.back_to), (&vec![1, 4], Some(0)));
    let second = Forget {
        versions: undo.versions,
        back_to: undo.back_to,
        replay: undo.replay,
        ..forgetting(target)
    };
    block_on(store.forget(second)).unwrap();
    assert_eq!(store.replays(&p).unwrap(), vec![1, 4, 3]);
    let served = |v: &VersionRecord| v.state == VersionState::Served;
    assert!(!store.versions(&p).unwrap().iter().any(served));
    put(store, vec![Event::ReplaySkipped { version: at(&p, 1) }]);
    block_on(store.commit_step(replayed(&p, 5, 0, 4, &[samples[3]]))).unwrap();
    block_on(store.commit_step(replayed(&p, 6, 5, 3, &[samples[2]]))).unwrap();
    assert_eq!(store.replays(&p).unwrap(), Vec::<u64>::new());
    assert_eq!(store.last_version(&p).unwrap(), 6);
}

fn a_forgotten_version_stays_forgotten(store: &dyn TrajectoryStore) {
    let p = profile("p");
    let (_, a) = sampled(store, &p, "1");
    train(store, &p, 1, 0, &[a]);
    let with = Forget {
        versions: vec![1],
        ..forgetting(ForgetTarget::Session(p.clone(), session("1")))
    };
    block_on(store.forget(with)).unwrap();
    // A trainer that was looking at it meanwhile comes too late.
    let gate = Event::Gate {
        version: at(&p, 1),
        report: GateReport::default(),
    };
    refused(store, vec![gate]);
    for state in [
        VersionState::Served,
        VersionState::Candidate,
        VersionState::Rejected("gate".to_owned()),
    ] {
        refused(store, vec![set(at(&p, 1), state, 1)]);
    }
    conflict(store.commit_step(step(&p, 2, 1, &[])));
    assert!(!store.versions(&p).unwrap()[0].state.is_there());
}
