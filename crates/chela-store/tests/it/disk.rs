//! What lies on disk: everything acknowledged, nothing forgotten, no more than was said, and no silent damage.

use crate::snapshot::Snapshot;
use chela_core::{testing::*, *};
use chela_store::{DATABASE, Store};
use futures_executor::block_on;
use rusqlite::Connection;
use std::{fs, path::Path, sync::Arc};

fn put(store: &Store, events: Vec<Event>) {
    block_on(store.append(events)).unwrap();
}

fn forget(store: &Store, target: ForgetTarget) -> ForgetProof {
    let proof = block_on(store.forget(forgetting(target))).unwrap();
    assert_eq!(proof.found, Vec::<String>::new());
    proof
}

#[test]
fn it_is_a_store() {
    let dir = tempfile::tempdir().unwrap();
    let count = std::cell::Cell::new(0);
    store_suite(|| {
        count.set(count.get() + 1);
        Box::new(Store::open(&dir.path().join(count.get().to_string())).unwrap())
    });
}

/// Each kind of write, one after another, on top of what the ones before left.
fn writes() -> Vec<Vec<Event>> {
    let (owner, name) = (Profile::default(), session("s"));
    let a = first_turn(TurnId(1), &owner, &name);
    let b = next_turn(TurnId(2), &a, &[6, 7], &[8, 9]);
    let version = PolicyVersion {
        profile: owner.clone(),
        number: 1,
    };
    let said = |id, turn| Event::Verdict {
        turn: TurnId(turn),
        id: VerdictId(id),
        verdict: Box::new(verdict(Some(0.1), &["h"])),
        at: 3,
    };
    let opened = SessionRecord {
        profile: profile("q"),
        id: session("t"),
        key_hash: Some("ab".to_owned()),
        task: Some("sums".to_owned()),
        opened: 1,
        last_active: 2,
        ended: None,
        turns: 0,
    };
    let mut sample = new_sample(TurnId(1), VerdictId(1), 0.1);
    sample.teacher_logprobs = Some(vec![-0.1, -0.2]);
    vec![
        vec![Event::SessionOpened(opened)],
        vec![Event::Turn(Box::new(a)), Event::Turn(Box::new(b))],
        vec![Event::NextState {
            turn: TurnId(1),
            next: next_state("thanks"),
            at: 2,
        }],
        vec![Event::NextState {
            turn: TurnId(1),
            next: next_state("more"),
            at: 3,
        }],
        vec![Event::Mark {
            turn: TurnId(2),
            mark: TurnMark::Superseded,
        }],
        vec![said(1, 1), said(2, 1), said(3, 2)],
        vec![Event::NoVerdict {
            turn: TurnId(2),
            why: "void".to_owned(),
        }],
        vec![Event::Sample(Box::new(sample))],
        vec![Event::NoSample {
            verdict: VerdictId(2),
            why: "none".to_owned(),
        }],
        vec![Event::Dropped {
            samples: vec![SampleId(1)],
            why: "stale".to_owned(),
        }],
        vec![Event::Sample(Box::new(new_sample(
            TurnId(2),
            VerdictId(3),
            1.0,
        )))],
        vec![Event::Paused {
            profile: owner.clone(),
            why: Some("by hand".to_owned()),
        }],
        vec![Event::SessionEnded {
            profile: owner,
            session: name,
            at: 9,
            why: "idle".to_owned(),
        }],
        vec![Event::Version {
            version,
            state: VersionState::Served,
            receipt: Some(receipt()),
            at: 10,
        }],
    ]
}

#[test]
fn every_kind_of_write_survives_being_opened_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = Store::open(dir.path()).unwrap();
    for (i, events) in writes().into_iter().enumerate() {
        if i + 1 == writes().len() {
            block_on(store.lease(vec![SampleId(2)])).unwrap();
            block_on(store.commit_step(step(&Profile::default(), 1, 0, &[SampleId(2)]))).unwrap();
        }
        put(&store, events);
        let before = Snapshot::of(&store);
        drop(store);
        store = Store::open(dir.path()).unwrap();
        assert_eq!(Snapshot::of(&store), before, "write {i}");
    }
}

#[test]
fn a_restart_voids_leases() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    writes()
        .into_iter()
        .take(11)
        .for_each(|events| put(&store, events));
    let owner = Profile::default();
    block_on(store.lease(vec![SampleId(2)])).unwrap();
    assert_eq!(store.pending(&owner).unwrap(), vec![]);
    drop(store);
    let store = Store::open(dir.path()).unwrap();
    assert_eq!(store.pending(&owner).unwrap().len(), 1);
    let step = step(&owner, 1, 0, &[SampleId(2)]);
    assert!(matches!(
        block_on(store.commit_step(step)),
        Err(StoreError::Conflict(_))
    ));
}

#[test]
fn ids_go_on_after_a_restart_and_after_forgetting() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Profile::default();
    let now = 1_700_000_000_000;
    let store = Store::open(dir.path()).unwrap();
    let last = store.next_turn_id(now);
    let id = store.next_verdict_id();
    let verdict = Box::new(verdict(Some(1.0), &[]));
    put(
        &store,
        vec![
            Event::Turn(Box::new(first_turn(last, &owner, &session("s")))),
            Event::Verdict {
                turn: last,
                id,
                verdict,
                at: 1,
            },
            Event::Sample(Box::new(new_sample(last, id, 1.0))),
        ],
    );
    forget(&store, ForgetTarget::Session(owner.clone(), session("s")));
    drop(store);
    let store = Store::open(dir.path()).unwrap();
    // The clock runs an hour behind now.
    let next = store.next_turn_id(now - 3_600_000);
    assert!(next > last);
    assert!(store.next_verdict_id() > id);
}

#[test]
fn many_threads_append_at_once_and_all_of_it_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(Store::open(dir.path()).unwrap());
    let threads: Vec<_> = (0..64)
        .map(|i| {
            let store = store.clone();
            std::thread::spawn(move || {
                let name = session(&format!("s{i}"));
                let mut last: Option<Turn> = None;
                for j in 0..5 {
                    let id = store.next_turn_id(1_000);
                    let turn = match &last {
                        None => first_turn(id, &Profile::default(), &name),
                        Some(parent) => next_turn(id, parent, &[i, j], &[j]),
                    };
                    put(&store, vec![Event::Turn(Box::new(turn.clone()))]);
                    assert_eq!(store.story(id).unwrap().unwrap().turn, turn);
                    last = Some(turn);
                }
                (name, last.unwrap())
            })
        })
        .collect();
    let last: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
    drop(Arc::into_inner(store).unwrap());
    let store = Store::open(dir.path()).unwrap();
    for (name, turn) in last {
        let stories = store.session_stories(&turn.profile, &name).unwrap();
        assert_eq!(stories.len(), 5);
        assert_eq!(stories[4].turn, turn);
        assert_eq!(store.story(turn.id).unwrap().unwrap().turn, turn);
    }
}

#[test]
fn a_long_session_takes_no_more_than_was_said() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let mut turn = first_turn(TurnId(1), &Profile::default(), &session("s"));
    turn.tools = vec![Tool {
        name: "t".to_owned(),
        definition: format!("\"{}\"", "d".repeat(10_000)),
    }];
    let mut answers = vec![store.append(vec![Event::Turn(Box::new(turn.clone()))])];
    for id in 2..=300 {
        let mut next = next_turn(TurnId(id), &turn, &[7; 100], &[8; 20]);
        // As with templates that drop thinking: the prompt is a new segment each time.
        next.segment = Segment::Opened("template changed the history".to_owned());
        next.prompt.remove(next.prompt.len() - 101);
        answers.push(store.append(vec![Event::Turn(Box::new(next.clone()))]));
        turn = next;
    }
    answers
        .into_iter()
        .for_each(|answer| block_on(answer).unwrap());
    drop(store);
    // Whole, the prompts alone would be 18 MB and the tools 3 MB.
    let size = fs::metadata(dir.path().join(DATABASE)).unwrap().len();
    assert!(size < 1_000_000, "{size}");
    let store = Store::open(dir.path()).unwrap();
    assert_eq!(store.story(turn.id).unwrap().unwrap().turn, turn);
    assert!(store.counts(None).unwrap().bytes >= size);
}

fn on_disk(dir: &Path, text: &str) -> bool {
    fs::read_dir(dir).unwrap().any(|file| {
        let bytes = fs::read(file.unwrap().path()).unwrap();
        bytes.windows(text.len()).any(|w| w == text.as_bytes())
    })
}

#[test]
fn what_is_forgotten_is_in_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let owner = Profile::default();
    let mut turn = first_turn(TurnId(1), &owner, &session("s"));
    turn.messages[0].content = format!("my password is heron {}", "x".repeat(9_000));
    let next = next_state("it is not heron");
    put(
        &store,
        vec![
            Event::Turn(Box::new(turn)),
            Event::Turn(Box::new(first_turn(TurnId(2), &owner, &session("t")))),
            Event::NextState {
                turn: TurnId(1),
                next,
                at: 1,
            },
        ],
    );
    assert!(on_disk(dir.path(), "heron"));
    let proof = forget(&store, ForgetTarget::Session(owner, session("s")));
    assert_eq!(proof.plan.turns, vec![TurnId(1)]);
    assert!(!on_disk(dir.path(), "heron"));
    assert!(store.story(TurnId(2)).unwrap().is_some());
    drop(store);
    assert!(!on_disk(dir.path(), "heron"));
}

#[test]
fn damage_is_said_and_names_the_turn() {
    for damage in [
        "UPDATE turns SET behavior_logprobs = substr(behavior_logprobs, 2) WHERE id = 2",
        "UPDATE turns SET reply = CAST(x'0800000009000001' AS BLOB) WHERE id = 2",
        "UPDATE turns SET prompt = 'text' WHERE id = 2",
        "UPDATE turns SET messages = '[{\"role\":\"wizard\",\"content\":\"\"}]' WHERE id = 2",
        "UPDATE turns SET prompt_shared = 99 WHERE id = 2",
    ] {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        writes()
            .into_iter()
            .take(4)
            .for_each(|events| put(&store, events));
        drop(store);
        let conn = Connection::open(dir.path().join(DATABASE)).unwrap();
        assert_eq!(conn.execute(damage, []).unwrap(), 1);
        drop(conn);
        let store = Store::open(dir.path()).unwrap();
        match store.story(TurnId(2)) {
            Err(StoreError::Damaged(why)) => {
                assert!(why.contains(&TurnId(2).to_string()), "{why}");
            }
            other => panic!("{damage}: {other:?}"),
        }
        // The others can still be read, and writes go on; a child of the damaged turn is refused.
        let parent = store.story(TurnId(1)).unwrap().unwrap().turn;
        put(
            &store,
            vec![Event::Turn(Box::new(next_turn(
                TurnId(3),
                &parent,
                &[6],
                &[7],
            )))],
        );
        let mut child = next_turn(TurnId(4), &parent, &[6], &[7]);
        child.parent = Some(TurnId(2));
        let refused = block_on(store.append(vec![Event::Turn(Box::new(child))]));
        assert!(
            matches!(refused, Err(StoreError::Damaged(_))),
            "{refused:?}"
        );
        assert!(store.health().is_ok());
    }
}

#[test]
fn damaged_logprobs_of_a_teacher_are_said() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    writes()
        .into_iter()
        .take(8)
        .for_each(|events| put(&store, events));
    drop(store);
    let conn = Connection::open(dir.path().join(DATABASE)).unwrap();
    conn.execute("UPDATE samples SET teacher_logprobs = x'00000000'", [])
        .unwrap();
    drop(conn);
    let store = Store::open(dir.path()).unwrap();
    let result = block_on(store.lease(vec![SampleId(1)]));
    assert!(
        matches!(&result, Err(StoreError::Damaged(w)) if w.contains("sample 1")),
        "{result:?}"
    );
}

#[test]
fn reading_only_refuses_writes_and_sees_what_another_store_writes() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(
        Store::open_read_only(dir.path()),
        Err(StoreError::Unusable(_))
    ));
    let store = Store::open(dir.path()).unwrap();
    let reader = Store::open_read_only(dir.path()).unwrap();
    writes()
        .into_iter()
        .take(4)
        .for_each(|events| put(&store, events));
    assert_eq!(Snapshot::of(&reader), Snapshot::of(&store));
    assert!(matches!(
        block_on(reader.append(vec![])),
        Err(StoreError::Unusable(_))
    ));
    assert!(reader.health().is_err());
    drop(store);
    assert!(reader.story(TurnId(2)).unwrap().is_some());
}

#[test]
fn a_folder_that_cannot_be_used_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    let error = Store::open(&file).err().unwrap();
    assert!(
        matches!(&error, StoreError::Unusable(why) if why.contains("file")),
        "{error}"
    );
}
