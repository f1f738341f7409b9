//! What happens when the disk fails: tests that need a hand inside the store.

use crate::{Store, StoreOptions, error::refuse};
use chela_core::{
    BoxFuture, Event, ForgetTarget, Profile, SampleId, StoreError, TrajectoryStore, TurnId,
    TurnMark,
    testing::{first_turn, forgetting, new_sample, session, verdict},
};
use futures_executor::block_on;
use std::sync::{atomic::Ordering, mpsc};

type Answer = BoxFuture<'static, Result<(), StoreError>>;

/// Holds the writer until the sender sends: what is written meanwhile forms one group.
fn hold(store: &Store) -> (mpsc::Sender<()>, Answer) {
    let (go, wait) = mpsc::channel::<()>();
    let (begun, begins) = mpsc::channel::<()>();
    let held = store.write(move |_| {
        begun.send(()).unwrap();
        wait.recv().unwrap();
        Ok(())
    });
    begins.recv().unwrap();
    (go, held)
}

fn turn(id: u64) -> Event {
    Event::Turn(Box::new(first_turn(
        TurnId(id),
        &Profile::default(),
        &session("s"),
    )))
}

fn stored(store: &Store, id: u64) -> bool {
    store.story(TurnId(id)).unwrap().is_some()
}

#[test]
fn one_bad_transaction_of_a_group_fails_alone() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let (go, held) = hold(&store);
    let mark = |id| Event::Mark {
        turn: TurnId(id),
        mark: TurnMark::Abandoned,
    };
    let good = store.append(vec![turn(1)]);
    let half = store.append(vec![turn(2), mark(1), mark(99)]);
    let again = store.append(vec![turn(1)]);
    let refused = store.write(|change| {
        change.apply(turn(3))?;
        refuse::<()>("on purpose")
    });
    // A parent that only another, refused transaction wrote is no parent.
    let mut child = first_turn(TurnId(4), &Profile::default(), &session("s"));
    child.parent = Some(TurnId(3));
    let orphan = store.append(vec![Event::Turn(Box::new(child))]);
    let last = store.append(vec![turn(5), mark(5)]);
    go.send(()).unwrap();
    block_on(held).unwrap();
    block_on(good).unwrap();
    block_on(last).unwrap();
    for bad in [half, again, refused, orphan] {
        assert!(matches!(block_on(bad), Err(StoreError::Conflict(_))));
    }
    let there: Vec<u64> = (1..=5).filter(|id| stored(&store, *id)).collect();
    assert_eq!(there, vec![1, 5]);
    assert_eq!(store.story(TurnId(1)).unwrap().unwrap().mark, None);
}

#[test]
fn leases_within_one_group_exclude_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let id = store.next_verdict_id();
    let verdict = Box::new(verdict(Some(1.0), &[]));
    let events = vec![
        turn(1),
        Event::Verdict {
            turn: TurnId(1),
            id,
            verdict,
            at: 1,
        },
        Event::Sample(Box::new(new_sample(TurnId(1), id, 1.0))),
    ];
    block_on(store.append(events)).unwrap();
    let (go, held) = hold(&store);
    let both = [
        store.lease(vec![SampleId(1)]),
        store.lease(vec![SampleId(1)]),
    ];
    go.send(()).unwrap();
    block_on(held).unwrap();
    let [first, second] = both;
    assert_eq!(block_on(first).unwrap().len(), 1);
    assert!(matches!(block_on(second), Err(StoreError::Conflict(_))));
}

#[test]
fn after_a_failed_sync_the_store_is_dead_until_it_is_opened_again() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    block_on(store.append(vec![turn(1)])).unwrap();
    let (go, held) = hold(&store);
    let before = store.append(vec![turn(2)]);
    let failing = store.write(|change| change.apply(turn(3)));
    let after = store.append(vec![turn(4)]);
    // The holder's own group still succeeds, the next one fails.
    store
        .shared()
        .commits_until_failure
        .store(2, Ordering::Relaxed);
    go.send(()).unwrap();
    block_on(held).unwrap();
    for lost in [
        before,
        failing,
        after,
        store.append(vec![turn(5)]),
        store.append(vec![]),
    ] {
        let error = block_on(lost).unwrap_err();
        assert!(
            matches!(&error, StoreError::Dead(why) if why.contains("injected")),
            "{error}"
        );
    }
    assert!(store.health().unwrap_err().contains("injected"));
    assert!(stored(&store, 1));
    assert!((2..=5).all(|id| !stored(&store, id)));
    assert!(matches!(
        block_on(store.lease(vec![])),
        Err(StoreError::Dead(_))
    ));
    drop(store);
    let store = Store::open(dir.path()).unwrap();
    assert!(store.health().is_ok() && stored(&store, 1));
    block_on(store.append(vec![turn(2)])).unwrap();
}

#[test]
fn a_writer_that_panics_leaves_a_dead_store() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let result = block_on(store.write::<(), _>(|_| panic!("on purpose")));
    assert!(matches!(result, Err(StoreError::Dead(_))));
    while store.health().is_ok() {
        std::thread::yield_now();
    }
    assert!(matches!(
        block_on(store.append(vec![turn(1)])),
        Err(StoreError::Dead(_))
    ));
    assert!(!stored(&store, 1));
}

#[test]
fn a_full_disk_refuses_writes_and_serves_reads() {
    let dir = tempfile::tempdir().unwrap();
    let options = StoreOptions {
        max_bytes: Some(400_000),
    };
    let store = Store::open_with(dir.path(), &options).unwrap();
    let large = |id| {
        let mut turn = first_turn(TurnId(id), &Profile::default(), &session("s"));
        turn.messages[0].content = "x".repeat(50_000);
        vec![Event::Turn(Box::new(turn))]
    };
    let mut kept = Vec::new();
    let error = loop {
        let id = kept.len() as u64 + 1;
        match block_on(store.append(large(id))) {
            Ok(()) => kept.push(id),
            Err(error) => break error,
        }
        assert!(kept.len() < 100, "the limit was not kept");
    };
    assert!(!kept.is_empty());
    assert!(
        matches!(&error, StoreError::Unusable(why) if why.contains("full")),
        "{error}"
    );
    assert!(store.health().unwrap_err().contains("full"));
    assert!(kept.iter().all(|id| stored(&store, *id)));
    // What fits is taken, and says that writes succeed again.
    let pause = Event::Paused {
        profile: Profile::default(),
        why: Some("full".to_owned()),
    };
    block_on(store.append(vec![pause])).unwrap();
    assert!(store.health().is_ok());
    drop(store);
    let store = Store::open(dir.path()).unwrap();
    block_on(store.append(large(99))).unwrap();
    assert!(kept.iter().all(|id| stored(&store, *id)));
}

fn long_turn(id: u64) -> Event {
    let mut turn = first_turn(TurnId(id), &Profile::default(), &session("s"));
    turn.messages[0].content = "nobody else says anything like this".to_owned();
    Event::Turn(Box::new(turn))
}

fn forget_all(store: &Store) -> chela_core::Forget {
    assert!(stored(store, 1));
    forgetting(ForgetTarget::Session(Profile::default(), session("s")))
}

#[test]
fn a_log_that_a_reader_holds_too_long_is_said_to_hold_it_still() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    block_on(store.append(vec![long_turn(1)])).unwrap();
    let path = dir.path().join(crate::DATABASE);
    let reader = rusqlite::Connection::open(&path).unwrap();
    reader
        .execute_batch("BEGIN; SELECT count(*) FROM turns;")
        .unwrap();
    let proof = block_on(store.forget(forget_all(&store))).unwrap();
    assert!(
        proof.found.contains(&"chela.db-wal".to_owned()),
        "{proof:?}"
    );
    assert!(store.health().is_ok() && !stored(&store, 1));
    // It is tried on.
    drop(reader);
    let holds = || {
        let files = std::fs::read_dir(dir.path()).unwrap();
        files.into_iter().any(|file| {
            let bytes = std::fs::read(file.unwrap().path()).unwrap();
            String::from_utf8_lossy(&bytes).contains("nobody else says")
        })
    };
    let begun = std::time::Instant::now();
    while holds() {
        assert!(begun.elapsed().as_secs() < 20);
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

#[test]
fn forgetting_that_fails_forgets_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    block_on(store.append(vec![long_turn(1)])).unwrap();
    let left = &store.shared().commits_until_failure;
    left.store(1, Ordering::Relaxed);
    let lost = block_on(store.forget(forget_all(&store)));
    assert!(matches!(lost, Err(StoreError::Dead(_))), "{lost:?}");
    assert!(stored(&store, 1));
}

#[test]
fn a_store_may_be_closed_while_it_is_searched() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    block_on(store.append(vec![long_turn(1), turn(2)])).unwrap();
    let path = dir.path().join(crate::DATABASE);
    let reader = rusqlite::Connection::open(&path).unwrap();
    reader
        .execute_batch("BEGIN; SELECT count(*) FROM turns;")
        .unwrap();
    let proof = store.forget(forget_all(&store));
    while stored(&store, 1) {
        std::thread::yield_now();
    }
    drop(store);
    let proof = block_on(proof);
    assert!(
        matches!(&proof, Err(StoreError::Unusable(why)) if why.contains("closed")),
        "{proof:?}"
    );
    drop(reader);
    let store = Store::open(dir.path()).unwrap();
    assert!(!stored(&store, 1));
    let file = std::fs::read(path).unwrap();
    assert!(!String::from_utf8_lossy(&file).contains("nobody else says"));
}
