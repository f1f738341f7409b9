//! The suite's part about gates, when versions were served, what is held out, and whom a trainer looks at.

use super::{
    build::*,
    futures::block_on,
    store_suite::{judge, put, refused, told_turn},
    store_suite_queue::{conflict, sampled, state},
};
use crate::*;

pub(super) const PARTS: [fn(&dyn TrajectoryStore); 7] = [
    a_version_reads_back_as_written,
    a_gate_keeps_what_is_no_number,
    it_is_known_when_a_version_was_served,
    what_a_rejected_version_consumed_is_dropped,
    held_out_samples_are_read_newest_first,
    live_turns_say_how_replies_fare,
    a_trainer_is_told_whom_to_look_at,
];

pub(super) fn at(profile: &Profile, number: u64) -> PolicyVersion {
    PolicyVersion {
        profile: profile.clone(),
        number,
    }
}

/// Sets a version's state.
pub(super) fn set(version: PolicyVersion, state: VersionState, at: Millis) -> Event {
    Event::Version {
        version,
        state,
        receipt: None,
        at,
    }
}

/// Leases these samples and consumes them in a step.
pub(super) fn train(
    store: &dyn TrajectoryStore,
    profile: &Profile,
    number: u64,
    parent: u64,
    samples: &[SampleId],
) {
    block_on(store.lease(samples.to_vec())).unwrap();
    block_on(store.commit_step(step(profile, number, parent, samples))).unwrap();
}

fn report(value: f64) -> GateReport {
    GateReport {
        checks: vec![
            GateCheck {
                name: "kl_to_base".to_owned(),
                value,
                limit: f64::INFINITY,
                passed: true,
                detail: "nats a token, \"worst\" of 8\n".to_owned(),
            },
            GateCheck {
                name: "length".to_owned(),
                value: -0.1,
                limit: f64::NEG_INFINITY,
                passed: false,
                detail: String::new(),
            },
        ],
        seconds: 1.25,
        at: 6_000,
    }
}

fn a_version_reads_back_as_written(store: &dyn TrajectoryStore) {
    let p = profile("p");
    let mut first = step(&p, 1, 0, &[]);
    first.version.origin = VersionOrigin::Imported("/srv/adapters/a \u{1F980}".to_owned());
    first.version.recipe = Some("{\"lr\":1e-4}".to_owned());
    first.version.gate = Some(report(0.5));
    first.version.receipt = Some(receipt());
    (first.version.served_at, first.version.left_at) = (Some(1), Some(-2));
    block_on(store.commit_step(first.clone())).unwrap();
    assert_eq!(store.versions(&p).unwrap(), vec![first.version]);
    assert_eq!(store.last_version(&p).unwrap(), 1);
    assert_eq!(store.last_version(&profile("q")).unwrap(), 0);
    assert_eq!(store.replays(&p).unwrap(), Vec::<u64>::new());
}

fn a_gate_keeps_what_is_no_number(store: &dyn TrajectoryStore) {
    let p = profile("p");
    block_on(store.commit_step(step(&p, 1, 0, &[]))).unwrap();
    let gate = |number, report| Event::Gate {
        version: at(&p, number),
        report,
    };
    put(store, vec![gate(1, report(f64::NAN))]);
    // NaN is not equal to itself; its name is.
    let read = store.versions(&p).unwrap()[0].gate.clone().unwrap();
    assert_eq!(format!("{read:?}"), format!("{:?}", report(f64::NAN)));
    put(store, vec![gate(1, report(1e-300))]);
    assert_eq!(store.versions(&p).unwrap()[0].gate, Some(report(1e-300)));
    refused(store, vec![gate(2, report(0.0))]);
}

fn it_is_known_when_a_version_was_served(store: &dyn TrajectoryStore) {
    let p = profile("p");
    for number in 1..=3 {
        block_on(store.commit_step(step(&p, number, number - 1, &[]))).unwrap();
    }
    let times = || -> Vec<(Option<Millis>, Option<Millis>)> {
        let versions = store.versions(&p).unwrap().into_iter();
        versions.map(|v| (v.served_at, v.left_at)).collect()
    };
    use VersionState::*;
    put(store, vec![set(at(&p, 1), Served, 10)]);
    put(store, vec![set(at(&p, 2), Served, 20)]);
    assert_eq!(
        times(),
        [(Some(10), Some(20)), (Some(20), None), (None, None)]
    );
    let worse = || RolledBack("worse".to_owned());
    put(store, vec![set(at(&p, 2), worse(), 30)]);
    put(store, vec![set(at(&p, 1), Served, 40)]);
    assert_eq!(
        times(),
        [(Some(40), None), (Some(20), Some(30)), (None, None)]
    );
    // Served once more, it goes on; what was never served did not leave.
    put(store, vec![set(at(&p, 1), Served, 50)]);
    put(store, vec![set(at(&p, 3), Rejected("gate".to_owned()), 60)]);
    assert_eq!(
        times(),
        [(Some(50), None), (Some(20), Some(30)), (None, None)]
    );
    put(store, vec![set(at(&p, 0), Served, 70)]);
    assert_eq!(times()[0], (Some(50), Some(70)));
    assert_eq!(store.versions(&p).unwrap()[1].state, worse());
}

fn what_a_rejected_version_consumed_is_dropped(store: &dyn TrajectoryStore) {
    let (p, q) = (profile("p"), profile("q"));
    let (one, a) = sampled(store, &p, "1");
    let (two, b) = sampled(store, &p, "2");
    let (other, c) = sampled(store, &q, "1");
    train(store, &p, 1, 0, &[a]);
    train(store, &p, 2, 1, &[b]);
    train(store, &q, 2, 0, &[c]);
    let why = "rejected by the gate";
    let unlearnt = |version| Event::Unlearnt {
        version,
        why: why.to_owned(),
    };
    put(store, vec![unlearnt(at(&p, 2)), unlearnt(at(&p, 9))]);
    assert_eq!(
        state(store, two.id, b),
        SampleState::Dropped(why.to_owned())
    );
    assert_eq!(state(store, one.id, a), SampleState::Consumed(at(&p, 1)));
    assert_eq!(state(store, other.id, c), SampleState::Consumed(at(&q, 2)));
    assert_eq!(store.versions(&p).unwrap()[1].samples, vec![b]);
    conflict(store.lease(vec![b]));
}

fn held_out_samples_are_read_newest_first(store: &dyn TrajectoryStore) {
    let (p, q) = (profile("p"), profile("q"));
    let (turn, a) = sampled(store, &p, "1");
    let (_, b) = sampled(store, &p, "2");
    let (_, c) = sampled(store, &p, "3");
    let (_, d) = sampled(store, &q, "1");
    let (_, stale) = sampled(store, &p, "4");
    let drop = |samples: &[SampleId], why: &str| Event::Dropped {
        samples: samples.to_vec(),
        why: why.to_owned(),
    };
    put(
        store,
        vec![drop(&[a, b, d], HELD_OUT), drop(&[stale], "stale")],
    );
    put(store, vec![drop(&[c], HELD_OUT)]);
    let ids = |all: Vec<LeasedSample>| all.into_iter().map(|s| s.id).collect::<Vec<_>>();
    let (two, count) = store.held_out(&p, 2).unwrap();
    assert_eq!((ids(two), count), (vec![c, b], 3));
    let (all, _) = store.held_out(&p, usize::MAX).unwrap();
    assert_eq!((&all[2].turn, all[2].sample.reward), (&turn, Some(1.0)));
    assert_eq!(store.held_out(&p, 0).unwrap(), (vec![], 3));
    assert_eq!(ids(store.held_out(&q, 9).unwrap().0), vec![d]);
    assert_eq!(store.held_out(&profile("x"), 9).unwrap(), (vec![], 0));
    // By name, in the order asked for; unknown ones are left out.
    let asked = [stale, SampleId(999), a, SampleId(u64::MAX), d];
    assert_eq!(ids(store.samples(&asked).unwrap()), vec![stale, a, d]);
}

fn live_turns_say_how_replies_fare(store: &dyn TrajectoryStore) {
    let p = profile("p");
    let judged = told_turn(store, &p, "1");
    let quiet = told_turn(store, &p, "2");
    let tool = told_turn(store, &p, "3");
    let failed = told_turn(store, &p, "4");
    let mut side = first_turn(store.next_turn_id(1), &p, &session("5"));
    side.kind = TurnKind::Side;
    put(store, vec![Event::Turn(Box::new(side.clone()))]);
    told_turn(store, &profile("q"), "1");
    let result = |turn| Event::NextState {
        turn,
        next: NextState {
            messages: vec![Message::text(Role::Tool, "a role of \"tool\"")],
        },
        at: 3_000,
    };
    put(
        store,
        vec![result(tool.id), result(failed.id), result(side.id)],
    );
    judge(store, judged.id, -1.0);
    judge(store, side.id, 1.0);
    let said = |turn, judge: &str, reward| Event::Verdict {
        turn,
        id: store.next_verdict_id(),
        verdict: Box::new(Verdict {
            judge: judge.to_owned(),
            ..verdict(reward, &[])
        }),
        at: 3_000,
    };
    // The last reward counts, clipped; a verdict without one does not hide it.
    put(
        store,
        vec![
            said(judged.id, "feedback", Some(7.5)),
            said(judged.id, "self", None),
        ],
    );
    put(store, vec![said(failed.id, TOOL_ERROR, Some(-1.0))]);
    let live = |turn: &Turn, reward, tool_error| LiveTurn {
        turn: turn.id,
        at: turn.completed,
        version: 0,
        reward,
        reply_len: 2,
        tool_error,
    };
    let expected = [
        live(&failed, Some(-1.0), Some(true)),
        live(&tool, None, Some(false)),
        live(&judged, Some(1.0), None),
    ];
    assert_eq!(store.live_turns(&p, 10).unwrap(), expected);
    assert_eq!(store.live_turns(&p, 1).unwrap(), expected[..1]);
    put(store, vec![said(quiet.id, "self", None)]);
    assert_eq!(
        store.live_turns(&p, 10).unwrap()[2],
        live(&quiet, None, None)
    );
    assert_eq!(store.live_turns(&profile("x"), 10).unwrap(), vec![]);
}

fn a_trainer_is_told_whom_to_look_at(store: &dyn TrajectoryStore) {
    let [p, q, r] = ["p", "q", "r"].map(profile);
    let look = || store.profiles_to_train().unwrap();
    told_turn(store, &r, "1");
    assert_eq!(look(), vec![]);
    let (_, a) = sampled(store, &q, "1");
    let (_, b) = sampled(store, &p, "1");
    assert_eq!(look(), vec![p.clone(), q.clone()]);
    // One in a step does not wait.
    block_on(store.lease(vec![a])).unwrap();
    assert_eq!(look(), vec![p.clone()]);
    let (_, c) = sampled(store, &q, "2");
    assert_eq!(look(), vec![p.clone(), q.clone()]);
    let dropped = Event::Dropped {
        samples: vec![b, c],
        why: "stale".to_owned(),
    };
    put(store, vec![dropped]);
    assert_eq!(look(), vec![]);
    block_on(store.commit_step(step(&q, 1, 0, &[a]))).unwrap();
    assert_eq!(look(), vec![q.clone()]);
    put(store, vec![set(at(&q, 1), VersionState::Served, 1)]);
    assert_eq!(look(), vec![]);
    // Steps to be made again.
    let forget = Forget {
        versions: vec![1],
        back_to: Some(0),
        replay: vec![1],
        ..forgetting(ForgetTarget::Session(q.clone(), session("1")))
    };
    block_on(store.forget(forget)).unwrap();
    assert_eq!(look(), vec![q.clone()]);
    put(store, vec![Event::ReplaySkipped { version: at(&q, 1) }]);
    assert_eq!(look(), vec![]);
}
