//! The suite's part about samples: leased, consumed, dropped, replaced, forgotten.

use super::{
    build::*,
    futures::block_on,
    store_suite::{judge, put, refused, told_turn},
};
use crate::*;

pub(super) const PARTS: [fn(&dyn TrajectoryStore); 7] = [
    samples_wait_in_order,
    a_group_stays_with_verdict_and_sample,
    leases_exclude_each_other,
    a_step_consumes_what_was_leased,
    a_newer_sample_replaces_a_pending_one,
    dropped_samples_stay_dropped,
    a_forgotten_session_is_gone,
];

/// A turn with a sample of it.
pub(super) fn sampled(
    store: &dyn TrajectoryStore,
    owner: &Profile,
    name: &str,
) -> (Turn, SampleId) {
    let turn = told_turn(store, owner, name);
    let verdict = judge(store, turn.id, 1.0);
    put(
        store,
        vec![Event::Sample(Box::new(new_sample(turn.id, verdict, 1.0)))],
    );
    let id = store.pending(owner).unwrap().last().unwrap().id;
    (turn, id)
}

pub(super) fn ids(store: &dyn TrajectoryStore, owner: &Profile) -> Vec<SampleId> {
    store
        .pending(owner)
        .unwrap()
        .into_iter()
        .map(|s| s.id)
        .collect()
}

pub(super) fn state(store: &dyn TrajectoryStore, turn: TurnId, sample: SampleId) -> SampleState {
    let story = store.story(turn).unwrap().unwrap();
    story
        .samples
        .into_iter()
        .find(|(id, _, _)| *id == sample)
        .unwrap()
        .2
}

#[track_caller]
pub(super) fn conflict<T: std::fmt::Debug>(future: BoxFuture<'static, Result<T, StoreError>>) {
    let result = block_on(future);
    assert!(matches!(result, Err(StoreError::Conflict(_))), "{result:?}");
}

fn a_group_stays_with_verdict_and_sample(store: &dyn TrajectoryStore) {
    let p = profile("p");
    let (_, alone) = sampled(store, &p, "1");
    let turn = told_turn(store, &p, "2");
    let group = Some(Group::new("task 7/\u{1F980}", 4).unwrap());
    let said = Verdict {
        source: VerdictSource::Explicit,
        group: group.clone(),
        ..verdict(Some(0.25), &[])
    };
    let id = store.next_verdict_id();
    let sample = NewSample {
        group: group.clone(),
        explicit: true,
        ..new_sample(turn.id, id, 0.25)
    };
    put(
        store,
        vec![
            Event::Verdict {
                turn: turn.id,
                id,
                verdict: Box::new(said.clone()),
                at: 2_500,
            },
            Event::Sample(Box::new(sample.clone())),
        ],
    );
    let pending = store.pending(&p).unwrap();
    let of: Vec<_> = pending
        .iter()
        .map(|s| (s.id == alone, s.reward, s.group.clone()))
        .collect();
    assert_eq!(of, [(true, Some(1.0), None), (false, Some(0.25), group)]);
    let story = store.story(turn.id).unwrap().unwrap();
    assert_eq!(
        (&story.verdicts[0].1, &story.samples[0].1),
        (&said, &sample)
    );
    let leased = block_on(store.lease(vec![pending[1].id])).unwrap();
    assert_eq!(leased[0].sample, sample);
}

fn samples_wait_in_order(store: &dyn TrajectoryStore) {
    let (p, q) = (profile("p"), profile("q"));
    let (turn, a) = sampled(store, &p, "1");
    let (_, b) = sampled(store, &p, "2");
    let (_, c) = sampled(store, &q, "1");
    assert!(a < b && b < c);
    assert_eq!((ids(store, &p), ids(store, &q)), (vec![a, b], vec![c]));
    let pending = store.pending(&p).unwrap();
    let first = &pending[0];
    assert_eq!(
        (first.turn, &first.session, first.reply_len),
        (turn.id, &turn.session, 2)
    );
    assert_eq!(
        (&first.version, first.explicit, first.created),
        (&turn.version, false, 3_000)
    );
    assert_eq!(pending[0].reply_hash, pending[1].reply_hash);
    assert_eq!(store.pending(&profile("x")).unwrap(), vec![]);
}

fn leases_exclude_each_other(store: &dyn TrajectoryStore) {
    let p = Profile::default();
    let (turn, a) = sampled(store, &p, "1");
    let (_, b) = sampled(store, &p, "2");
    let leased = block_on(store.lease(vec![b, a])).unwrap();
    assert_eq!(leased.iter().map(|l| l.id).collect::<Vec<_>>(), vec![b, a]);
    assert_eq!(
        (&leased[1].turn, leased[1].sample.reward),
        (&turn, Some(1.0))
    );
    assert_eq!(ids(store, &p), vec![]);
    assert_eq!(state(store, turn.id, a), SampleState::Leased);
    assert_eq!(
        store.counts(None).unwrap().samples,
        vec![("leased".to_owned(), 2)]
    );
    let (_, c) = sampled(store, &p, "3");
    conflict(store.lease(vec![c, a]));
    conflict(store.lease(vec![c, c]));
    conflict(store.lease(vec![c, SampleId(999)]));
    assert_eq!(ids(store, &p), vec![c]);
    conflict(store.release(vec![a, c]));
    conflict(store.release(vec![a, a]));
    refused(
        store,
        vec![Event::Dropped {
            samples: vec![a],
            why: "stale".to_owned(),
        }],
    );
    block_on(store.release(vec![a])).unwrap();
    conflict(store.release(vec![a]));
    assert_eq!(ids(store, &p), vec![a, c]);
    block_on(store.lease(vec![a, c])).unwrap();
}

fn a_step_consumes_what_was_leased(store: &dyn TrajectoryStore) {
    let (p, q) = (profile("p"), profile("q"));
    let (turn, a) = sampled(store, &p, "1");
    let (other, b) = sampled(store, &p, "2");
    let (_, c) = sampled(store, &p, "3");
    let (_, d) = sampled(store, &q, "1");
    block_on(store.lease(vec![a, b, d])).unwrap();
    let commit = |samples: &[SampleId], dropped: &[SampleId]| {
        let mut step = step(&p, 1, 0, samples);
        step.dropped = dropped
            .iter()
            .map(|id| (*id, "no signal".to_owned()))
            .collect();
        store.commit_step(step)
    };
    conflict(commit(&[a, b, c], &[]));
    conflict(commit(&[a, a], &[]));
    conflict(commit(&[a], &[a]));
    conflict(commit(&[a], &[c]));
    conflict(commit(&[a, d], &[]));
    conflict(commit(&[a, SampleId(999)], &[]));
    assert_eq!(store.versions(&p).unwrap(), vec![]);
    assert_eq!(state(store, turn.id, a), SampleState::Leased);

    block_on(commit(&[a], &[b])).unwrap();
    assert_eq!(
        store.versions(&p).unwrap(),
        vec![step(&p, 1, 0, &[a]).version]
    );
    let version = PolicyVersion {
        profile: p.clone(),
        number: 1,
    };
    assert_eq!(state(store, turn.id, a), SampleState::Consumed(version));
    assert_eq!(
        state(store, other.id, b),
        SampleState::Dropped("no signal".to_owned())
    );
    conflict(store.lease(vec![a]));
    conflict(store.release(vec![a]));
    conflict(store.commit_step(step(&p, 2, 1, &[a])));
    refused(
        store,
        vec![Event::Dropped {
            samples: vec![a],
            why: "stale".to_owned(),
        }],
    );
    assert_eq!(ids(store, &p), vec![c]);
}

fn a_newer_sample_replaces_a_pending_one(store: &dyn TrajectoryStore) {
    let p = Profile::default();
    let replaced = SampleState::Dropped("replaced".to_owned());
    let (turn, a) = sampled(store, &p, "1");
    let newer = |reward| {
        let verdict = judge(store, turn.id, reward);
        put(
            store,
            vec![Event::Sample(Box::new(new_sample(
                turn.id, verdict, reward,
            )))],
        );
        *ids(store, &p).last().unwrap()
    };
    let b = newer(-1.0);
    assert_eq!(state(store, turn.id, a), replaced);
    assert_eq!(ids(store, &p), vec![b]);
    // One in a step is not taken from it; given back it must not stand beside the newer one.
    block_on(store.lease(vec![b])).unwrap();
    let c = newer(0.5);
    assert_eq!(state(store, turn.id, b), SampleState::Leased);
    block_on(store.release(vec![b])).unwrap();
    assert_eq!(state(store, turn.id, b), replaced);
    assert_eq!(ids(store, &p), vec![c]);
    // One that was trained on stays so, and the newer one waits.
    block_on(store.lease(vec![c])).unwrap();
    let d = newer(1.0);
    block_on(store.commit_step(step(&p, 1, 0, &[c]))).unwrap();
    assert!(matches!(state(store, turn.id, c), SampleState::Consumed(_)));
    assert_eq!(ids(store, &p), vec![d]);
}

fn dropped_samples_stay_dropped(store: &dyn TrajectoryStore) {
    let p = Profile::default();
    let (turn, a) = sampled(store, &p, "1");
    let drop = |why: &str, samples: &[SampleId]| {
        vec![Event::Dropped {
            samples: samples.to_vec(),
            why: why.to_owned(),
        }]
    };
    refused(store, drop("stale", &[a, SampleId(999)]));
    assert_eq!(ids(store, &p), vec![a]);
    put(store, drop("stale", &[a]));
    // Dropping again is no contradiction; the first reason stays.
    put(store, drop("again", &[a]));
    assert_eq!(
        state(store, turn.id, a),
        SampleState::Dropped("stale".to_owned())
    );
    assert_eq!(
        store.counts(None).unwrap().samples,
        vec![("dropped:stale".to_owned(), 1)]
    );
    conflict(store.lease(vec![a]));
}

fn a_forgotten_session_is_gone(store: &dyn TrajectoryStore) {
    let (p, q) = (profile("p"), profile("q"));
    let (turn, a) = sampled(store, &p, "s");
    let (other, b) = sampled(store, &q, "s");
    let child = next_turn(store.next_turn_id(5_000), &turn, &[6], &[7]);
    put(store, vec![Event::Turn(Box::new(child.clone()))]);
    block_on(store.lease(vec![a])).unwrap();
    let forget = || {
        store.forget(forgetting(ForgetTarget::Session(
            p.clone(),
            turn.session.clone(),
        )))
    };
    conflict(forget());
    block_on(store.release(vec![a])).unwrap();
    let proof = block_on(forget()).unwrap();
    assert_eq!((proof.plan.turns.len(), proof.found.len()), (2, 0));
    let again = block_on(forget());
    assert!(matches!(again, Err(StoreError::NotFound(_))), "{again:?}");
    assert_eq!(store.story(turn.id).unwrap(), None);
    assert_eq!(store.story(child.id).unwrap(), None);
    assert_eq!(store.session(&p, &turn.session).unwrap(), None);
    assert_eq!(store.session_stories(&p, &turn.session).unwrap(), vec![]);
    assert_eq!((ids(store, &p), ids(store, &q)), (vec![], vec![b]));
    assert_eq!(store.story(other.id).unwrap().unwrap().turn, other);
    assert_eq!(store.profiles().unwrap(), vec![q]);
    let empty = StoreCounts {
        bytes: 0,
        ..store.counts(Some(&p)).unwrap()
    };
    assert_eq!(empty, StoreCounts::default());
    // Names are never given again.
    let (later, c) = sampled(store, &p, "s");
    assert!(later.id > child.id && c > b);
}
