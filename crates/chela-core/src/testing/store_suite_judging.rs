//! The suite's part about verdicts, versions and figures.

use super::{
    build::*,
    futures::block_on,
    store_suite::{follow, judge, put, refused, told_turn},
};
use crate::*;

pub(super) const PARTS: [fn(&dyn TrajectoryStore); 4] = [
    what_waits_for_a_judge,
    verdicts_become_samples_once,
    versions_take_over_from_each_other,
    figures_add_up,
];

fn what_waits_for_a_judge(store: &dyn TrajectoryStore) {
    let owner = Profile::default();
    let turns: Vec<Turn> = (0..6)
        .map(|i| told_turn(store, &owner, &format!("s{i}")))
        .collect();
    let id = |i: usize| turns[i].id;
    let quiet = first_turn(store.next_turn_id(1), &owner, &session("quiet"));
    let mut side = first_turn(store.next_turn_id(1), &owner, &session("side"));
    side.kind = TurnKind::Side;
    let after_side = follow(side.id, "x", 1);
    put(
        store,
        vec![
            Event::Turn(Box::new(quiet.clone())),
            Event::Turn(Box::new(side)),
            after_side,
        ],
    );
    assert_eq!(
        store.unjudged(10).unwrap(),
        (0..6).map(id).collect::<Vec<_>>()
    );
    assert_eq!(store.unjudged(2).unwrap(), vec![id(0), id(1)]);

    put(
        store,
        vec![Event::Mark {
            turn: id(0),
            mark: TurnMark::Abandoned,
        }],
    );
    put(
        store,
        vec![Event::NoVerdict {
            turn: id(1),
            why: "all votes void".to_owned(),
        }],
    );
    let open = judge(store, id(2), 1.0);
    assert_eq!(store.unjudged(10).unwrap(), vec![id(3), id(4), id(5)]);
    put(store, vec![follow(id(1), "more", 3_000)]);
    put(store, vec![follow(quiet.id, "x", 1)]);
    assert_eq!(
        store.unjudged(10).unwrap(),
        vec![id(3), id(4), id(5), quiet.id]
    );
    assert_eq!(store.counts(None).unwrap().unjudged, 4);

    let story = store.story(id(1)).unwrap().unwrap();
    assert_eq!(story.no_verdict.as_deref(), Some("all votes void"));
    let both = vec![Message::user("thanks"), Message::user("more")];
    assert_eq!(story.next, Some(NextState { messages: both }));
    let story = store.story(id(2)).unwrap().unwrap();
    assert_eq!(
        story.verdicts,
        vec![(open, verdict(Some(1.0), &["be brief"]), None)]
    );
}

fn verdicts_become_samples_once(store: &dyn TrajectoryStore) {
    let owner = Profile::default();
    let turn = told_turn(store, &owner, "s");
    let other = told_turn(store, &owner, "t");
    let (a, b) = (judge(store, turn.id, 1.0), judge(store, turn.id, -1.0));
    let c = judge(store, other.id, 0.0);
    let open = store.open_verdicts(10).unwrap();
    assert_eq!(open.iter().map(|v| v.id).collect::<Vec<_>>(), vec![a, b, c]);
    assert_eq!(open[2].turn, other);
    assert_eq!(store.open_verdicts(1).unwrap().len(), 1);

    let mut sample = new_sample(turn.id, a, 1.0);
    sample.hint = Some("be brief".to_owned());
    sample.teacher_logprobs = Some(vec![-0.5, -0.25]);
    sample.student_logprobs = Some(vec![-1.0, f32::MIN_POSITIVE]);
    put(store, vec![Event::Sample(Box::new(sample.clone()))]);
    put(
        store,
        vec![Event::NoSample {
            verdict: b,
            why: "no reward".to_owned(),
        }],
    );
    assert_eq!(store.open_verdicts(10).unwrap().len(), 1);
    let story = store.story(turn.id).unwrap().unwrap();
    assert_eq!(story.samples.len(), 1);
    assert_eq!(story.samples[0].1, sample);
    assert_eq!(story.samples[0].2, SampleState::Pending);
    assert_eq!(story.verdicts[1].2.as_deref(), Some("no reward"));

    let again = |verdict, turn| Event::Sample(Box::new(new_sample(turn, verdict, 1.0)));
    refused(store, vec![again(a, turn.id)]);
    refused(store, vec![again(b, turn.id)]);
    refused(store, vec![again(c, turn.id)]);
    refused(store, vec![again(VerdictId(999), turn.id)]);
    refused(store, vec![again(c, TurnId(999))]);
    for settled in [a, b, VerdictId(999)] {
        refused(
            store,
            vec![Event::NoSample {
                verdict: settled,
                why: "x".to_owned(),
            }],
        );
    }
    let verdict_again = Box::new(verdict(None, &[]));
    refused(
        store,
        vec![Event::Verdict {
            turn: turn.id,
            id: a,
            verdict: verdict_again,
            at: 1,
        }],
    );
    let mut short = new_sample(other.id, c, 1.0);
    short.teacher_logprobs = Some(vec![-0.5]);
    refused(store, vec![Event::Sample(Box::new(short))]);
    refused(
        store,
        vec![Event::Sample(Box::new(new_sample(other.id, c, f32::NAN)))],
    );
    let infinite = Box::new(verdict(Some(f32::INFINITY), &[]));
    let id = store.next_verdict_id();
    refused(
        store,
        vec![Event::Verdict {
            turn: turn.id,
            id,
            verdict: infinite,
            at: 1,
        }],
    );
    let mut side = first_turn(store.next_turn_id(1), &owner, &session("side"));
    side.kind = TurnKind::Side;
    put(store, vec![Event::Turn(Box::new(side.clone()))]);
    let on_side = judge(store, side.id, 1.0);
    refused(store, vec![again(on_side, side.id)]);
}

fn versions_take_over_from_each_other(store: &dyn TrajectoryStore) {
    let (p, q) = (profile("p"), profile("q"));
    let commit = |step| block_on(store.commit_step(step));
    let set = |profile: &Profile, number, state, receipt| {
        let version = PolicyVersion {
            profile: profile.clone(),
            number,
        };
        vec![Event::Version {
            version,
            state,
            receipt,
            at: 7_000,
        }]
    };
    commit(step(&p, 1, 0, &[])).unwrap();
    commit(step(&q, 5, 0, &[])).unwrap();
    commit(step(&p, 2, 1, &[])).unwrap();
    let served = step(&p, 9, 0, &[]);
    let served = VersionRecord {
        state: VersionState::Served,
        ..served.version
    };
    for bad in [
        step(&p, 2, 1, &[]),
        step(&p, 0, 0, &[]),
        step(&p, 3, 7, &[]),
        StepCommit {
            version: served,
            dropped: vec![],
        },
    ] {
        assert!(matches!(commit(bad), Err(StoreError::Conflict(_))));
    }
    let states = |profile: &Profile| -> Vec<VersionState> {
        store
            .versions(profile)
            .unwrap()
            .into_iter()
            .map(|v| v.state)
            .collect()
    };
    use VersionState::*;
    let back = || RolledBack("worse".to_owned());
    put(store, set(&q, 5, Served, None));
    put(store, set(&p, 1, Served, Some(receipt())));
    put(store, set(&p, 2, Served, None));
    assert_eq!(states(&p), vec![Superseded, Served]);
    assert_eq!(store.versions(&p).unwrap()[0].receipt, Some(receipt()));
    put(
        store,
        [set(&p, 2, back(), None), set(&p, 1, Served, None)].concat(),
    );
    assert_eq!(states(&p), vec![Served, back()]);
    assert_eq!(store.versions(&p).unwrap()[0].receipt, Some(receipt()));
    put(store, set(&p, 0, Served, None));
    assert_eq!(states(&p), vec![Superseded, back()]);
    put(store, set(&p, 2, Rejected("canary".to_owned()), None));
    assert_eq!(states(&p), vec![Superseded, Rejected("canary".to_owned())]);
    assert_eq!(states(&q), vec![Served]);
    refused(store, set(&p, 3, Served, None));
    refused(store, set(&p, 0, back(), None));

    let pause = |why: Option<&str>| {
        vec![Event::Paused {
            profile: p.clone(),
            why: why.map(str::to_owned),
        }]
    };
    assert_eq!(store.paused(&p).unwrap(), None);
    put(store, pause(Some("by hand")));
    assert_eq!(store.paused(&p).unwrap().as_deref(), Some("by hand"));
    assert_eq!(store.paused(&q).unwrap(), None);
    put(store, pause(None));
    assert_eq!(store.paused(&p).unwrap(), None);
    assert_eq!(store.profiles().unwrap(), vec![p, q]);
}

fn figures_add_up(store: &dyn TrajectoryStore) {
    let (p, q) = (profile("p"), profile("q"));
    assert_eq!(
        StoreCounts {
            bytes: 0,
            ..store.counts(None).unwrap()
        },
        StoreCounts::default()
    );
    let turn = told_turn(store, &p, "s");
    told_turn(store, &q, "s");
    let a = judge(store, turn.id, 1.0);
    let b = judge(store, turn.id, -1.0);
    let sample = |id| Event::Sample(Box::new(new_sample(turn.id, id, 1.0)));
    put(store, vec![sample(a), sample(b)]);
    let counts = store.counts(Some(&p)).unwrap();
    assert_eq!(
        counts.turns,
        vec![(TurnKind::Main, "has a session".to_owned(), 1)]
    );
    let named = |name: &str, n| (name.to_owned(), n);
    assert_eq!(
        counts.samples,
        vec![named("dropped:replaced", 1), named("pending", 1)]
    );
    assert_eq!(counts.verdicts, vec![named("judge", 2)]);
    let said: Vec<(&str, u64)> = counts.judged.iter().map(|j| (j.1.as_str(), j.2)).collect();
    assert_eq!(said, [("bad", 1), ("good", 1)]);
    let judge_of = store.story(turn.id).unwrap().unwrap().verdicts[0].1.clone();
    assert!(counts.judged.iter().all(|j| j.0 == judge_of.judge));
    assert_eq!((counts.unjudged, counts.sessions), (0, 1));
    let all = store.counts(None).unwrap();
    assert_eq!((all.unjudged, all.sessions, all.turns[0].2), (1, 2, 2));
    assert!(store.health().is_ok());
}
