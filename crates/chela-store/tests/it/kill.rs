//! Kills a writing process at moments of no one's choosing; what it had acknowledged must be there.

use chela_core::{testing::*, *};
use chela_store::Store;
use futures_executor::block_on;
use std::{
    collections::HashSet,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Command, Stdio},
};

const FOLDER: &str = "CHELA_STORE_KILL_FOLDER";

/// The process that is killed: not a test of its own, it does nothing without its variable.
#[test]
fn writing_child() {
    let Some(dir) = std::env::var_os(FOLDER) else {
        return;
    };
    let store = Store::open(&PathBuf::from(dir)).unwrap();
    let owner = Profile::default();
    println!();
    let mut number = store
        .versions(&owner)
        .unwrap()
        .last()
        .map_or(0, |v| v.version.number);
    let mut last: Option<Turn> = None;
    for i in 0.. {
        let id = store.next_turn_id(1_000);
        let turn = match &last {
            Some(parent) if i % 10 > 0 => next_turn(id, parent, &[i; 30], &[i; 200]),
            _ => first_turn(id, &owner, &session(&format!("s{}", id.0))),
        };
        let verdict_id = store.next_verdict_id();
        let verdict = Box::new(verdict(Some(1.0), &[]));
        block_on(store.append(vec![
            Event::Turn(Box::new(turn.clone())),
            Event::NextState {
                turn: id,
                next: next_state("thanks"),
                at: 1,
            },
            Event::Verdict {
                turn: id,
                id: verdict_id,
                verdict,
                at: 1,
            },
            Event::Sample(Box::new(new_sample(id, verdict_id, 1.0))),
        ]))
        .unwrap();
        println!("acked turn {}", id.0);
        last = Some(turn);
        if i % 3 == 2 {
            let pending: Vec<_> = store
                .pending(&owner)
                .unwrap()
                .iter()
                .map(|s| s.id)
                .collect();
            block_on(store.lease(pending.clone())).unwrap();
            block_on(store.commit_step(step(&owner, number + 1, number, &pending))).unwrap();
            number += 1;
            println!("acked step {number}");
        }
    }
}

/// Runs the child and kills it soon after its `after`th acknowledgement. Returns all that it acknowledged.
fn run_and_kill(dir: &std::path::Path, after: usize) -> (Vec<u64>, Vec<u64>) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "kill::writing_child",
            "--nocapture",
            "--test-threads=1",
        ])
        .env(FOLDER, dir)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let (mut turns, mut steps) = (Vec::new(), Vec::new());
    let mut killed = false;
    // After the kill the pipe still holds what was acknowledged before it.
    while let Some(Ok(line)) = lines.next() {
        if let Some(id) = line.strip_prefix("acked turn ") {
            turns.extend(id.parse::<u64>());
        } else if let Some(number) = line.strip_prefix("acked step ") {
            steps.extend(number.parse::<u64>());
        }
        if !killed && turns.len() + steps.len() >= after {
            child.kill().unwrap();
            killed = true;
        }
    }
    child.wait().unwrap();
    assert!(killed, "the child ended by itself");
    (turns, steps)
}

#[test]
fn what_was_acknowledged_survives_kill_9() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Profile::default();
    let (mut turns, mut steps) = (Vec::new(), Vec::new());
    for cycle in 0..6 {
        let (more_turns, more_steps) = run_and_kill(dir.path(), 1 + 7 * cycle % 23);
        turns.extend(more_turns);
        steps.extend(more_steps);
        let store = Store::open(dir.path()).unwrap();
        let mut consumed = HashSet::new();
        for record in store.versions(&owner).unwrap() {
            for sample in record.samples {
                assert!(consumed.insert(sample), "{sample:?} was consumed twice");
            }
        }
        let mut found = HashSet::new();
        for session in store.sessions(None, usize::MAX).unwrap() {
            let stories = store.session_stories(&owner, &session.id).unwrap();
            assert_eq!(stories.len() as u64, session.turns);
            for story in stories {
                found.insert(story.turn.id.0);
                // Either the whole transaction or nothing of it.
                let [(id, _, state)] = story.samples.as_slice() else {
                    panic!("{story:?}")
                };
                match state {
                    SampleState::Consumed(_) => assert!(consumed.remove(id)),
                    state => assert_eq!(*state, SampleState::Pending),
                }
            }
        }
        assert!(
            consumed.is_empty(),
            "versions name samples that were not consumed"
        );
        assert!(
            turns.iter().all(|id| found.contains(id)),
            "an acknowledged turn is gone"
        );
        let versions = store.versions(&owner).unwrap();
        let numbers: HashSet<u64> = versions.iter().map(|v| v.version.number).collect();
        assert!(
            steps.iter().all(|n| numbers.contains(n)),
            "an acknowledged step is gone"
        );
        let unique: HashSet<&u64> = turns.iter().collect();
        assert_eq!(unique.len(), turns.len(), "an id was given twice");
    }
}
