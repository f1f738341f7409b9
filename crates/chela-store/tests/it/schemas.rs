//! Stores as every released schema left them (tests/fixtures) are opened and have lost nothing; what is no store is refused.

use chela_core::{testing::*, *};
use chela_store::{DATABASE, SCHEMA, Store};
use futures_executor::block_on;
use rusqlite::Connection;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Makes the file that a program of that schema left.
pub fn write_schema(schema: usize, dir: &Path) {
    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let sql = fs::read_to_string(fixtures.join(format!("schema_{schema}.sql")))
        .expect("each schema has a fixture: run tests/fixtures/make.py");
    let conn = Connection::open(dir.join(DATABASE)).unwrap();
    conn.execute_batch(&sql).unwrap();
}

fn open(schema: usize) -> (tempfile::TempDir, Store) {
    let dir = tempfile::tempdir().unwrap();
    write_schema(schema, dir.path());
    let store = Store::open(dir.path()).unwrap();
    (dir, store)
}

fn each() -> impl Iterator<Item = usize> {
    1..=SCHEMA
}

/// What is done to a file's bytes.
type Damage<'a> = &'a dyn Fn(&mut Vec<u8>);

#[test]
fn turns_with_what_followed_and_verdicts_are_found_again() {
    for schema in each() {
        let (_dir, store) = open(schema);
        let (p, q) = (profile("p"), profile("q"));
        let first = first_turn(TurnId(1), &p, &session("s"));
        let mut second = next_turn(TurnId(2), &first, &[6, 7], &[8, 9, 10]);
        second.version.number = 1;
        let stories = store.session_stories(&p, &session("s")).unwrap();
        let turns: Vec<_> = stories.iter().map(|s| s.turn.clone()).collect();
        assert_eq!(turns, [first, second], "schema {schema}");
        let followed = [Message::text(Role::Tool, "done"), Message::user("thanks")];
        assert_eq!(stories[0].next.as_ref().unwrap().messages, followed);
        assert_eq!(stories[1].next, Some(next_state("no, shorter")));

        let (id, said, no_sample) = &stories[0].verdicts[0];
        let expected = Verdict {
            hints: vec!["say why".to_owned()],
            ..verdict(Some(1.0), &[])
        };
        assert_eq!((id.0, said, no_sample), (1, &expected, &None));
        let explicit = &stories[0].verdicts[1].1;
        let sort = (explicit.source, explicit.reward);
        assert_eq!(sort, (VerdictSource::Explicit, Some(-0.5)));
        let ids: Vec<_> = stories[1].verdicts.iter().map(|v| v.0.0).collect();
        assert_eq!(ids, [3, 4, 5]);
        assert_eq!(stories[1].verdicts[1].2.as_deref(), Some("no votes"));
        let open: Vec<_> = store.open_verdicts(9).unwrap();
        assert_eq!(open.iter().map(|o| o.id.0).collect::<Vec<_>>(), [5]);

        let other = store.story(TurnId(3)).unwrap().unwrap();
        assert_eq!(other.turn, first_turn(TurnId(3), &q, &session("t")));
        assert_eq!(other.mark, Some(TurnMark::Withdrawn));
        let ended = store.session(&q, &session("t")).unwrap().unwrap().ended;
        assert_eq!(ended, Some((5_000, "idle".to_owned())));
        let keyed = store.session_by_key("ab").unwrap().unwrap();
        assert_eq!(
            (keyed.id.as_str(), keyed.task.as_deref()),
            ("s", Some("sums"))
        );
        let live = store.live_turns(&p, 9).unwrap();
        let live: Vec<_> = live.iter().map(|l| (l.turn.0, l.tool_error)).collect();
        assert_eq!(live, [(2, None), (1, Some(false))]);
    }
}

#[test]
fn samples_in_each_state_are_found_again_and_the_queue_goes_on() {
    for schema in each() {
        let (_dir, store) = open(schema);
        let p = profile("p");
        let stories = store.session_stories(&p, &session("s")).unwrap();
        let (consumed, pending) = (&stories[0].samples[0], &stories[0].samples[1]);
        assert_eq!(consumed.1.hint.as_deref(), Some("say why"));
        assert_eq!(consumed.1.teacher_logprobs, Some(vec![-0.1, -0.2]));
        let version = PolicyVersion {
            profile: p.clone(),
            number: 1,
        };
        assert_eq!(consumed.2, SampleState::Consumed(version));
        assert_eq!(
            (pending.1.explicit, &pending.2),
            (true, &SampleState::Pending)
        );
        let held_out = &stories[1].samples[0];
        assert_eq!(held_out.2, SampleState::Dropped(HELD_OUT.to_owned()));
        assert_eq!(store.held_out(&p, 9).unwrap().1, 1);

        let queue = store.pending(&p).unwrap();
        let group = (schema >= 3).then(|| Group::new("g", 2).unwrap());
        assert_eq!(queue[0].group, group);
        let of = |s: &PendingSample| (s.id.0, s.turn.0, s.version.number, s.session.to_string());
        assert_eq!(
            queue.iter().map(of).collect::<Vec<_>>(),
            [(2, 1, 0, "s".to_owned())]
        );
        assert_eq!(store.profiles_to_train().unwrap(), vec![p.clone()]);

        // Trained on before and after the migration: each once, under a number that was never given.
        block_on(store.lease(vec![SampleId(2)])).unwrap();
        assert!(block_on(store.commit_step(step(&p, 4, 2, &[SampleId(2)]))).is_err());
        block_on(store.commit_step(step(&p, 5, 2, &[SampleId(2)]))).unwrap();
        assert_eq!(store.pending(&p).unwrap(), vec![]);
        assert_eq!(store.next_verdict_id(), VerdictId(6));
        assert!(store.next_turn_id(0) > TurnId(3));
    }
}

#[test]
fn versions_are_found_again() {
    for schema in each() {
        let (_dir, store) = open(schema);
        let p = profile("p");
        let versions = store.versions(&p).unwrap();
        let why = if schema == 1 {
            "by an operator"
        } else {
            "too long"
        };
        let states: Vec<_> = versions.iter().map(|v| v.state.clone()).collect();
        assert_eq!(
            states,
            [
                VersionState::Superseded,
                VersionState::Served,
                VersionState::Rejected("canary".to_owned()),
                VersionState::RolledBack(why.to_owned()),
            ]
        );
        let parents: Vec<_> = versions.iter().map(|v| v.parent).collect();
        assert_eq!(parents, [0, 1, 2, 2]);
        assert_eq!(versions[0].samples, [SampleId(1)]);
        let receipt = Receipt {
            learner_canary: vec![-1.5, -0.25],
            ..receipt()
        };
        assert_eq!(versions[1].receipt.as_ref(), Some(&receipt));
        assert_eq!(
            versions[1].checkpoint.as_deref(),
            Some("adapters/p/00000002")
        );
        assert!(versions[0].metrics[0].1.is_nan());
        assert_eq!(store.last_version(&p).unwrap(), 4);
        let paused = store.paused(&profile("q")).unwrap();
        assert_eq!(paused.as_deref(), Some("by hand"));
        if schema >= 2 {
            assert_eq!(versions[1].origin, VersionOrigin::Replayed(1));
            let gate = versions[1].gate.as_ref().unwrap();
            assert_eq!((gate.checks[0].value, gate.at), (1.5, 7));
            assert_eq!(versions[1].recipe.as_deref(), Some("{}"));
            assert_eq!(store.replays(&p).unwrap(), [3]);
        } else {
            assert_eq!(versions[1].origin, VersionOrigin::Trained);
        }
    }
}

#[test]
fn a_copy_from_before_is_kept_and_can_itself_be_opened() {
    for schema in 1..SCHEMA {
        let (dir, store) = open(schema);
        let copy = dir.path().join(format!("{DATABASE}.schema-{schema}"));
        let again = tempfile::tempdir().unwrap();
        fs::copy(copy, again.path().join(DATABASE)).unwrap();
        let again = Store::open(again.path()).unwrap();
        let (p, s) = (profile("p"), session("s"));
        assert_eq!(
            again.session_stories(&p, &s).unwrap(),
            store.session_stories(&p, &s).unwrap()
        );
    }
}

/// What opening says, both ways.
fn refused(dir: &Path) -> [String; 2] {
    let text = |e: Option<StoreError>| e.expect("it must be refused").to_string();
    [
        text(Store::open_read_only(dir).err()),
        text(Store::open(dir).err()),
    ]
}

#[test]
fn what_is_no_store_of_this_program_is_refused_with_what_to_do() {
    let later = format!("PRAGMA user_version = {}", SCHEMA + 1);
    for (change, says, to_do) in [
        (
            later.as_str(),
            "it has schema",
            "use that program or a later one",
        ),
        (
            "PRAGMA application_id = 7",
            "the database of another program",
            "--data-dir",
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        write_schema(SCHEMA, dir.path());
        let conn = Connection::open(dir.path().join(DATABASE)).unwrap();
        conn.execute_batch(change).unwrap();
        drop(conn);
        let before = fs::read(dir.path().join(DATABASE)).unwrap();
        for text in refused(dir.path()) {
            for part in [DATABASE, says, to_do] {
                assert!(text.contains(part), "{text}");
            }
        }
        assert_eq!(fs::read(dir.path().join(DATABASE)).unwrap(), before);
    }
}

#[test]
fn a_cut_or_overwritten_file_is_refused_with_what_to_do() {
    let cut = |bytes: &mut Vec<u8>| bytes.truncate(bytes.len() / 2);
    let head = |bytes: &mut Vec<u8>| bytes[..64].fill(0x55);
    let odd = |bytes: &mut Vec<u8>| bytes.truncate(700);
    let changes: [Damage<'_>; 3] = [&cut, &head, &odd];
    for change in changes {
        let dir = tempfile::tempdir().unwrap();
        write_schema(SCHEMA, dir.path());
        let path = dir.path().join(DATABASE);
        let mut bytes = fs::read(&path).unwrap();
        change(&mut bytes);
        fs::write(&path, &bytes).unwrap();
        for text in refused(dir.path()) {
            for part in [DATABASE, "damaged", "chela backup", "--data-dir"] {
                assert!(text.contains(part), "{text}");
            }
        }
        assert_eq!(fs::read(&path).unwrap(), bytes, "it is left as it is");
    }
}

#[test]
fn an_older_store_is_not_read_before_it_is_brought_up_to_date() {
    let dir = tempfile::tempdir().unwrap();
    write_schema(1, dir.path());
    let text = Store::open_read_only(dir.path()).err().unwrap().to_string();
    assert!(
        text.contains("schema 1") && text.contains("chela serve"),
        "{text}"
    );
}
