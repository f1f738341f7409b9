//! How long reads and forgetting take in a store of the size that is expected. Run the ignored one by name, optimised:
//! `cargo test --release -p chela-store -- --ignored --nocapture large`.

use chela_core::{testing::*, *};
use chela_store::Store;
use futures_executor::block_on;
use std::time::{Duration, Instant};

fn timed<T>(what: &str, call: impl FnOnce() -> T) -> (T, Duration) {
    let begun = Instant::now();
    let result = call();
    let took = begun.elapsed();
    println!("{what}: {:.1} ms", took.as_secs_f64() * 1e3);
    (result, took)
}

fn owner(i: usize) -> Profile {
    profile(&format!("user-{i:04}"))
}

#[test]
fn versions_of_a_thousand_profiles_are_read_in_no_time() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let mut answers = Vec::new();
    for i in 0..1_000 {
        for number in 1..=5 {
            let mut commit = step(&owner(i), number, number - 1, &[]);
            commit.version.gate = Some(GateReport::default());
            answers.push(store.commit_step(commit));
        }
    }
    answers.into_iter().for_each(|a| block_on(a).unwrap());
    let (count, took) = timed("versions of 1,000 profiles", || {
        let profiles = store.profiles().unwrap();
        let versions = profiles.iter().map(|p| store.versions(p).unwrap().len());
        versions.sum::<usize>()
    });
    assert_eq!(count, 5_000);
    assert!(took < Duration::from_secs(1), "{took:?}");
}

const SESSIONS: usize = 5_000;
const TURNS: usize = 20;

/// Sessions of 20 turns, a hundred of them at the same time, of 1,000 profiles.
fn fill(store: &Store) {
    for block in 0..SESSIONS / 100 {
        let mut last: Vec<Option<Turn>> = vec![None; 100];
        for i in 0..TURNS {
            let mut answers = Vec::new();
            for (j, last) in last.iter_mut().enumerate() {
                let number = block * 100 + j;
                let turn = a_turn(store, number, i, last.as_ref());
                answers.push(store.append(events(store, &turn, number + i)));
                *last = Some(turn);
            }
            answers.into_iter().for_each(|a| block_on(a).unwrap());
        }
    }
}

fn a_turn(store: &Store, number: usize, i: usize, last: Option<&Turn>) -> Turn {
    let id = store.next_turn_id(1_000);
    let ids = |n: usize, salt: usize| -> Vec<TokenId> {
        (0..n)
            .map(|k| ((number * 7_919 + i * 104_729 + k * 31 + salt) % 150_000) as u32)
            .collect()
    };
    let mut turn = match last {
        Some(last) => next_turn(id, last, &ids(60, 1), &ids(150, 2)),
        None => {
            let mut first = first_turn(id, &owner(number % 1_000), &session(&format!("s{number}")));
            first
                .messages
                .insert(0, Message::system("You are a helpful agent. ".repeat(40)));
            first
        }
    };
    if let Some(message) = turn.messages.last_mut() {
        message.content = format!(
            "request {i} of session {number}: {}",
            "please look at it again. ".repeat(8)
        );
    }
    turn.answer.content = format!(
        "answer {i} in {number}: {}",
        "this is what I found. ".repeat(25)
    );
    turn
}

fn events(store: &Store, turn: &Turn, salt: usize) -> Vec<Event> {
    let id = store.next_verdict_id();
    let mut sample = new_sample(turn.id, id, 1.0);
    sample.hint = Some(format!("be brief about {salt}"));
    let n = turn.reply.len();
    sample.teacher_logprobs = Some(vec![-0.5; n]);
    sample.student_logprobs = Some(vec![-0.25; n]);
    vec![
        Event::Turn(Box::new(turn.clone())),
        Event::NextState {
            turn: turn.id,
            next: next_state(&format!("thanks for {salt}")),
            at: 2_000,
        },
        Event::Verdict {
            turn: turn.id,
            id,
            verdict: Box::new(verdict(Some(1.0), &["be brief"])),
            at: 1,
        },
        Event::Sample(Box::new(sample)),
    ]
}

/// Of ten samples nine are out of the way, half of a tenth is held out, the rest waits.
fn settle(store: &Store) {
    for i in 0..1_000 {
        let pending = store.pending(&owner(i)).unwrap();
        let ids = |part: usize| -> Vec<SampleId> {
            pending
                .iter()
                .enumerate()
                .filter(|(k, _)| k % 20 == part)
                .map(|(_, s)| s.id)
                .collect()
        };
        let stale: Vec<SampleId> = (2..20).flat_map(ids).collect();
        let dropped = |samples, why: &str| Event::Dropped {
            samples,
            why: why.to_owned(),
        };
        let held_out = dropped(ids(0), HELD_OUT);
        let mut events = vec![dropped(stale, "stale"), held_out];
        // Every tenth has something to train on.
        if i % 10 > 0 {
            events.push(dropped(ids(1), "stale"));
        }
        block_on(store.append(events)).unwrap();
    }
}

#[test]
#[ignore = "writes 100,000 turns: a minute or two"]
fn large_stores_stay_quick() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    timed("filling with 100,000 turns", || fill(&store));
    timed("settling", || settle(&store));
    println!("{} MB", store.counts(None).unwrap().bytes >> 20);
    let (to_train, _) = timed("profiles_to_train", || store.profiles_to_train().unwrap());
    assert_eq!(to_train.len(), 100);
    let p = owner(7);
    timed("held_out, 16 of a profile", || {
        store.held_out(&p, 16).unwrap()
    });
    timed("held_out of 1,000 profiles, only counted", || {
        (0..1_000).for_each(|i| drop(store.held_out(&owner(i), 0).unwrap()));
    });
    timed("pending of a profile", || {
        store.pending(&owner(10)).unwrap()
    });
    timed("live_turns, 64 of a profile", || {
        store.live_turns(&p, 64).unwrap()
    });
    for number in [7, 4_007, 2_345, 2_346] {
        let target = ForgetTarget::Session(owner(number % 1_000), session(&format!("s{number}")));
        timed("plan_forget of a session", || {
            store.plan_forget(&target).unwrap()
        });
        let forgetting = store.forget(forgetting(target));
        let begun = Instant::now();
        // Writes that arrive meanwhile.
        let mut slowest = Duration::ZERO;
        for _ in 0..50 {
            let before = Instant::now();
            block_on(store.append(vec![])).unwrap();
            slowest = slowest.max(before.elapsed());
        }
        let proof = block_on(forgetting).unwrap();
        println!(
            "forget: {:.2} s, {} pieces in {} MB; the slowest write meanwhile {:.0} ms",
            begun.elapsed().as_secs_f64(),
            proof.pieces,
            proof.bytes >> 20,
            slowest.as_secs_f64() * 1e3
        );
        assert_eq!(proof.found, Vec::<String>::new());
    }
    let target = ForgetTarget::Profile(owner(9));
    let (proof, _) = timed("forget of a profile of 5 sessions", || {
        block_on(store.forget(forgetting(target))).unwrap()
    });
    assert_eq!(proof.found, Vec::<String>::new());
}

/// 10,000 judged turns of one profile wait, every second in a group of 8; a batch of 8 groups is leased and given back.
#[test]
#[ignore = "writes 10,000 turns; prints what reading a long queue takes"]
fn measured_a_long_queue() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let mut last: Vec<Option<Turn>> = vec![None; 100];
    for i in 0..100 {
        let mut answers = Vec::new();
        for (number, last) in last.iter_mut().enumerate() {
            let mut turn = a_turn(
                &store,
                1_000 * number,
                i,
                last.as_ref().filter(|_| i % 10 > 0),
            );
            turn.session = session(&format!("s{number}-{}", i / 10));
            let mut events = events(&store, &turn, i);
            if number % 2 == 1
                && let Some(Event::Sample(sample)) = events.last_mut()
            {
                let group = Group::new(format!("task {}", (i * 50 + number / 2) / 8), 8);
                sample.group = Some(group.unwrap());
            }
            answers.push(store.append(events));
            *last = Some(turn);
        }
        answers.into_iter().for_each(|a| block_on(a).unwrap());
    }
    for _ in 0..5 {
        let (pending, _) = timed("pending, 10,000 samples", || {
            store.pending(&owner(0)).unwrap()
        });
        assert_eq!(pending.len(), 10_000);
        let grouped = pending.iter().filter(|s| s.group.is_some()).take(64);
        let batch: Vec<SampleId> = grouped.map(|s| s.id).collect();
        let (leased, _) = timed("leasing 64 of them", || {
            block_on(store.lease(batch.clone())).unwrap()
        });
        assert_eq!(leased.len(), 64);
        block_on(store.release(batch)).unwrap();
    }
}
