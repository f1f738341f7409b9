//! Tests of choosing and building a batch.

use super::*;
use crate::config::GateConfig;
use chela_core::{PolicyVersion, Profile, SessionId, TurnId, VersionRecord, VersionState};

fn version(number: u64) -> PolicyVersion {
    PolicyVersion {
        profile: Profile::default(),
        number,
    }
}

fn record(number: u64) -> VersionRecord {
    VersionRecord {
        version: version(number),
        parent: number - 1,
        steps: number,
        state: VersionState::Superseded,
        ..VersionRecord::default()
    }
}

fn pending(id: u64, session: &str, number: u64) -> PendingSample {
    PendingSample {
        id: SampleId(id),
        turn: TurnId(id),
        session: SessionId::new(session).unwrap(),
        version: version(number),
        explicit: false,
        reply_hash: id,
        reply_len: 3,
        created: 1000,
        reward: Some(1.0),
        group: None,
    }
}

fn config() -> TrainConfig {
    TrainConfig {
        batch: 4,
        min_batch: 2,
        gate: GateConfig {
            held_out: 0.0,
            ..GateConfig::default()
        },
        ..TrainConfig::new("/nowhere".into(), vec![1, 2])
    }
}

fn chain(head: u64) -> Chain {
    Chain::of(head, &(1..=head).map(record).collect::<Vec<_>>())
}

fn ids(selection: &Selection) -> Vec<u64> {
    selection.batch.iter().map(|s| s.0).collect()
}

#[test]
fn waits_for_a_full_batch_then_takes_the_oldest() {
    let mut all: Vec<_> = (1..=3).map(|i| pending(i, &format!("s{i}"), 0)).collect();
    assert!(select(&all, &chain(0), &config(), 2000).batch.is_empty());
    all.extend((4..=6).map(|i| pending(i, &format!("s{i}"), 0)));
    assert_eq!(ids(&select(&all, &chain(0), &config(), 2000)), [1, 2, 3, 4]);
}

#[test]
fn one_session_waits_while_others_have_samples_but_never_starves() {
    let mut all: Vec<_> = (1..=4).map(|i| pending(i, "loop", 0)).collect();
    all.extend((5..=6).map(|i| pending(i, &format!("s{i}"), 0)));
    assert!(
        select(&all, &chain(0), &config(), 2000).batch.is_empty(),
        "1 + 2 of 4"
    );
    let late = 1000 + config().batch_timeout_ms;
    assert_eq!(ids(&select(&all, &chain(0), &config(), late)), [1, 5, 6, 2]);
}

#[test]
fn a_partial_batch_goes_at_the_time_out_if_it_is_large_enough() {
    let late = 1000 + config().batch_timeout_ms;
    let two: Vec<_> = (1..=2).map(|i| pending(i, &format!("s{i}"), 0)).collect();
    assert_eq!(ids(&select(&two, &chain(0), &config(), late)), [1, 2]);
    assert!(
        select(&two[..1], &chain(0), &config(), late)
            .batch
            .is_empty()
    );
}

#[test]
fn stale_foreign_and_repeated_replies_are_dropped_with_the_reason() {
    let mut explicit = pending(3, "c", 0);
    explicit.explicit = true;
    let mut copy = pending(5, "e", 4);
    copy.reply_hash = 4;
    let all = [
        pending(1, "a", 0),
        pending(2, "b", 9),
        explicit,
        pending(4, "d", 4),
        copy,
    ];
    let selection = select(&all, &chain(4), &config(), 2000);
    assert_eq!(
        selection.dropped,
        [
            (SampleId(1), "stale"),
            (SampleId(2), "version outside the chain"),
            (SampleId(5), "duplicate reply")
        ]
    );
}

#[test]
fn ten_thousand_pending_samples_keep_their_order() {
    let all: Vec<_> = (0..10_000)
        .map(|i| pending(i, &format!("s{}", i % 500), 0))
        .collect();
    assert_eq!(ids(&select(&all, &chain(0), &config(), 2000)), [0, 1, 2, 3]);
}

#[test]
fn a_tenth_of_what_is_judged_is_kept_for_the_gate_and_nothing_a_person_said() {
    let config = TrainConfig {
        gate: GateConfig::default(),
        ..config()
    };
    let all: Vec<_> = (0..2000)
        .map(|i| pending((i << 20) | (i % 3), &format!("s{i}"), 0))
        .collect();
    let selection = select(&all, &chain(0), &config, 2000);
    let kept = selection.dropped.len();
    assert!((150..250).contains(&kept), "{kept}");
    assert!(selection.dropped.iter().all(|(_, why)| *why == HELD_OUT));
    assert_eq!(select(&all, &chain(0), &config, 2000), selection);
    let explicit = all.into_iter().map(|s| PendingSample {
        explicit: true,
        ..s
    });
    let explicit: Vec<_> = explicit.collect();
    assert!(
        select(&explicit, &chain(0), &config, 2000)
            .dropped
            .is_empty()
    );
}
