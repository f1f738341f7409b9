//! What was forgotten is in no file: looked for here byte by byte, by other means than the store's own.

use chela_core::{testing::*, *};
use chela_store::{DATABASE, Store};
use futures_executor::block_on;
use rusqlite::Connection;
use std::{
    collections::HashMap,
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

fn put(store: &Store, events: Vec<Event>) {
    block_on(store.append(events)).unwrap();
}

fn forget(store: &Store, target: ForgetTarget) -> ForgetProof {
    let proof = block_on(store.forget(forgetting(target))).unwrap();
    assert_eq!(proof.found, Vec::<String>::new());
    proof
}

fn own_session(name: &str) -> ForgetTarget {
    ForgetTarget::Session(Profile::default(), session(name))
}

/// A word that nothing else holds.
fn rare(session: usize, turn: usize, place: &str) -> String {
    format!("zq{session}x{turn}{place}heron")
}

/// Ids of a session lie within a multiple of this and the next.
const RANGE: u32 = 20_000;

const MARK: TokenId = 31_337;

/// Ids that nothing else holds.
fn rare_tokens(session: usize, turn: usize) -> Vec<TokenId> {
    let base = (session as u32 + 5) * RANGE + turn as u32 * 11;
    vec![base, MARK, base + 5, 99]
}

/// One more turn of a session, with rare words in everything that a turn can have.
fn talk(store: &Store, sessions: &mut HashMap<usize, (usize, Turn)>, number: usize) {
    let owner = Profile::default();
    let id = store.next_turn_id(1_000);
    let (count, mut turn) = match sessions.get(&number) {
        None => (0, first_turn(id, &owner, &session(&format!("s{number}")))),
        Some((count, last)) => {
            let said = rare_tokens(number, count + 500);
            (
                *count,
                next_turn(id, last, &said, &rare_tokens(number, *count)),
            )
        }
    };
    let word = |place: &str| format!("said {} in passing", rare(number, count, place));
    // Sizes from a few bytes to several pages.
    let length = [10, 300, 900, 2_000, 9_000][(number * 7 + count) % 5];
    let filler = format!("{:x}", number * 31 + count).repeat(length / 4);
    let last = turn.messages.len() - 1;
    turn.messages[last].content = format!("{}{filler}", word("asked"));
    turn.answer.content = word("answered");
    let verdict_id = store.next_verdict_id();
    let mut said = verdict(Some(1.0), &[]);
    said.hints = vec![word("hinted")];
    said.evidence = Some(word("evidence"));
    said.votes[0].raw = word("voted");
    let mut sample = new_sample(id, verdict_id, 1.0);
    sample.hint = Some(word("taught"));
    put(
        store,
        vec![
            Event::Turn(Box::new(turn.clone())),
            Event::NextState {
                turn: id,
                next: next_state(&word("next")),
                at: 2_000,
            },
            Event::Verdict {
                turn: id,
                id: verdict_id,
                verdict: Box::new(said),
                at: 1,
            },
            Event::Sample(Box::new(sample)),
        ],
    );
    sessions.insert(number, (count + 1, turn));
}

/// All that lies in the folder.
fn bytes_in(dir: &Path) -> Vec<u8> {
    let files = fs::read_dir(dir).unwrap();
    let all = files.map(|file| fs::read(file.unwrap().path()).unwrap());
    all.collect::<Vec<_>>().concat()
}

/// How many of a session's rare words and token sequences are in these bytes.
fn count(bytes: &[u8], session: usize) -> usize {
    let word = format!("zq{session}x");
    let words = String::from_utf8_lossy(bytes).matches(&word).count();
    // Each rare sequence has this id in the second place.
    let mark = MARK.to_le_bytes();
    let marks =
        (4..bytes.len()).filter(|at| bytes[*at] == mark[0] && bytes[*at..].starts_with(&mark));
    let before = marks.map(|at| [bytes[at - 4], bytes[at - 3], bytes[at - 2], bytes[at - 1]]);
    let own =
        before.filter(|b| rare_tokens(session, 0)[0] / RANGE == u32::from_le_bytes(*b) / RANGE);
    words + own.count()
}

#[test]
fn sessions_that_grew_among_each_other_go_without_a_trace() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let mut sessions = HashMap::new();
    // In an order that puts rows of all sessions into the same pages.
    for i in 0..240 {
        talk(&store, &mut sessions, (i * i + i / 7) % 12);
    }
    for number in 0..12 {
        let Some((_, last)) = sessions.remove(&number) else {
            continue;
        };
        assert!(count(&bytes_in(dir.path()), number) > 0);
        let proof = if number % 3 == 0 {
            let first = store.session_stories(&last.profile, &last.session).unwrap();
            let target = ForgetTarget::Turn(last.profile.clone(), first[0].turn.id);
            forget(&store, target)
        } else {
            forget(&store, own_session(last.session.as_str()))
        };
        assert!(proof.pieces > 20 && proof.bytes > 100_000, "{proof:?}");
        assert!(proof.files.contains(&DATABASE.to_owned()), "{proof:?}");
        assert_eq!(count(&bytes_in(dir.path()), number), 0, "session {number}");
        // What came after is moved about by what is forgotten, and must go as well.
        for i in 0..5 {
            talk(&store, &mut sessions, 20 + (number + i) % 3);
        }
    }
    let (kept, _) = sessions[&20];
    assert!(count(&bytes_in(dir.path()), 20) > 7 * kept);
    drop(store);
    assert!(
        Store::open(dir.path())
            .unwrap()
            .counts(None)
            .unwrap()
            .sessions
            > 0
    );
}

#[test]
fn words_that_others_said_too_are_no_finding() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    for (name, owner) in [("s", "p"), ("t", "q")] {
        let mut turn = first_turn(store.next_turn_id(1), &profile(owner), &session(name));
        turn.messages[0].content = "a system prompt that is the same for everybody".repeat(4);
        turn.answer.content = format!("an answer of which only {owner} knows, and nobody else");
        put(&store, vec![Event::Turn(Box::new(turn))]);
    }
    let proof = forget(&store, ForgetTarget::Profile(profile("p")));
    assert_eq!(proof.pieces, 3);
}

#[test]
fn copies_are_removed_or_named() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let mut sessions = HashMap::new();
    (0..4).for_each(|_| talk(&store, &mut sessions, 1));
    block_on(store.append(vec![])).unwrap();
    let copy = dir.path().join(format!("{DATABASE}.schema-1"));
    fs::write(&copy, bytes_in(dir.path())).unwrap();
    // One that the store does not know it can only find.
    let unknown = dir.path().join(format!("{DATABASE}.bak"));
    fs::copy(&copy, &unknown).unwrap();
    let proof = block_on(store.forget(forgetting(own_session("s1")))).unwrap();
    assert!(!copy.exists());
    assert_eq!(proof.found, [format!("{DATABASE}.bak")]);
    fs::remove_file(unknown).unwrap();
    assert_eq!(count(&bytes_in(dir.path()), 1), 0);
}

fn reader(dir: &Path) -> Connection {
    let conn = Connection::open(dir.join(DATABASE)).unwrap();
    conn.execute_batch("BEGIN; SELECT count(*) FROM turns;")
        .unwrap();
    conn
}

#[test]
fn a_reader_in_the_log_delays_the_proof_but_no_write() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let mut sessions = HashMap::new();
    (0..9).for_each(|i| talk(&store, &mut sessions, 1 + i % 3));
    let reader = reader(dir.path());
    talk(&store, &mut sessions, 2);
    let proof = store.forget(forgetting(own_session("s1")));
    let begun = Instant::now();
    let mut writes = 0;
    while begun.elapsed() < Duration::from_millis(1_200) {
        let before = Instant::now();
        talk(&store, &mut sessions, 3);
        assert!(before.elapsed() < Duration::from_secs(1));
        writes += 1;
    }
    assert!(writes > 10, "{writes}");
    assert!(count(&bytes_in(dir.path()), 1) > 0);
    drop(reader);
    let proof = block_on(proof).unwrap();
    assert_eq!(proof.found, Vec::<String>::new());
    assert_eq!(count(&bytes_in(dir.path()), 1), 0);
}

const FOLDER: &str = "CHELA_STORE_FORGET_FOLDER";

/// The process that is killed: not a test of its own, it does nothing without its variable.
#[test]
fn forgetting_child() {
    let Some(dir) = std::env::var_os(FOLDER) else {
        return;
    };
    let dir = PathBuf::from(dir);
    let store = Store::open(&dir).unwrap();
    let mut sessions = HashMap::new();
    (0..40).for_each(|i| talk(&store, &mut sessions, 1 + i % 3));
    // So that the log cannot be cut off before the kill.
    let _reader = reader(&dir);
    talk(&store, &mut sessions, 2);
    let _proof = store.forget(forgetting(own_session("s1")));
    while store
        .session(&Profile::default(), &session("s1"))
        .unwrap()
        .is_some()
    {
        std::thread::yield_now();
    }
    println!("\nforgotten");
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
fn a_crash_after_forgetting_is_made_good_at_the_next_opening() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "forget::forgetting_child",
            "--nocapture",
            "--test-threads=1",
        ])
        .env(FOLDER, dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let forgotten = lines.map_while(Result::ok).any(|line| line == "forgotten");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(forgotten, "the child ended by itself");
    assert!(count(&bytes_in(dir.path()), 1) > 0);
    let copy = dir.path().join(format!("{DATABASE}.schema-1"));
    fs::write(&copy, rare(1, 1, "asked")).unwrap();
    let store = Store::open(dir.path()).unwrap();
    assert_eq!(count(&bytes_in(dir.path()), 1), 0);
    assert_eq!(store.sessions(None, 9).unwrap().len(), 2);
    assert!(!copy.exists());
}
