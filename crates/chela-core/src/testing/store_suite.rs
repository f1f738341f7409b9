//! What every [`TrajectoryStore`] must do, as functions over a store that begins empty.

use super::{
    build::*, futures::block_on, store_suite_forget, store_suite_judging, store_suite_queue,
    store_suite_versions,
};
use crate::*;

type Make<'a> = &'a dyn Fn() -> Box<dyn TrajectoryStore>;

/// Runs the whole suite; each part gets an empty store.
pub fn store_suite(make: impl Fn() -> Box<dyn TrajectoryStore>) {
    let make: Make = &make;
    let parts: [fn(&dyn TrajectoryStore); 6] = [
        ids_only_grow,
        turns_read_back_as_written,
        turns_that_contradict_are_refused,
        a_transaction_is_all_or_nothing,
        sessions_open_end_and_open_again,
        keys_move_on,
    ];
    for part in parts {
        part(&*make());
    }
    for part in store_suite_judging::PARTS
        .into_iter()
        .chain(store_suite_queue::PARTS)
        .chain(store_suite_versions::PARTS)
        .chain(store_suite_forget::PARTS)
    {
        part(&*make());
    }
}

/// Appends, expecting success.
pub(super) fn put(store: &dyn TrajectoryStore, events: Vec<Event>) {
    block_on(store.append(events)).unwrap();
}

/// Appends, expecting a refusal.
#[track_caller]
pub(super) fn refused(store: &dyn TrajectoryStore, events: Vec<Event>) {
    let result = block_on(store.append(events));
    assert!(matches!(result, Err(StoreError::Conflict(_))), "{result:?}");
}

/// One user message after a turn.
pub(super) fn follow(turn: TurnId, text: &str, at: Millis) -> Event {
    Event::NextState {
        turn,
        next: next_state(text),
        at,
    }
}

/// Stores a first turn of a session with a next state.
pub(super) fn told_turn(store: &dyn TrajectoryStore, profile: &Profile, name: &str) -> Turn {
    let turn = first_turn(store.next_turn_id(1_000), profile, &session(name));
    let (id, next) = (turn.id, next_state("thanks"));
    let next = Event::NextState {
        turn: id,
        next,
        at: 2_000,
    };
    put(store, vec![Event::Turn(Box::new(turn.clone())), next]);
    turn
}

/// Gives a turn a verdict.
pub(super) fn judge(store: &dyn TrajectoryStore, turn: TurnId, reward: f32) -> VerdictId {
    let id = store.next_verdict_id();
    let verdict = Box::new(verdict(Some(reward), &["be brief"]));
    put(
        store,
        vec![Event::Verdict {
            turn,
            id,
            verdict,
            at: 2_500,
        }],
    );
    id
}

fn ids_only_grow(store: &dyn TrajectoryStore) {
    let now = 1_700_000_000_000;
    let first = store.next_turn_id(now);
    let second = store.next_turn_id(now);
    let back = store.next_turn_id(now - 10_000_000);
    assert!(first < second && second < back);
    assert!(store.next_turn_id(-5) > back);
    assert!(store.next_turn_id(now + 1) > back);
    let (a, b) = (store.next_verdict_id(), store.next_verdict_id());
    assert!(a < b);
    let far = TurnId(back.0 + (1 << 40));
    put(
        store,
        vec![Event::Turn(Box::new(first_turn(
            far,
            &Profile::default(),
            &session("s"),
        )))],
    );
    assert!(store.next_turn_id(now) > far);
}

fn turns_read_back_as_written(store: &dyn TrajectoryStore) {
    let (owner, name) = (Profile::default(), session("s \u{1F980}"));
    let mut a = first_turn(store.next_turn_id(1), &owner, &name);
    a.tools = vec![Tool {
        name: "f".to_owned(),
        definition: "{\"b\":1,\"a\":{}}".to_owned(),
    }];
    a.answer.tool_calls = vec![ToolCall {
        id: "c1".to_owned(),
        name: "f".to_owned(),
        arguments: "{ }".to_owned(),
    }];
    a.answer.reasoning = Some(String::new());
    let mut b = next_turn(store.next_turn_id(2), &a, &[6, 7], &[8]);
    b.messages[2] = Message {
        tool_call_id: Some("c1".to_owned()),
        name: Some("f".to_owned()),
        is_error: true,
        ..Message::text(Role::Tool, "no\0 \u{202e}such file")
    };
    // The client's echo of the answer differs from what was recorded, and so do the tokens.
    let mut c = next_turn(store.next_turn_id(3), &b, &[], &[9, 10, 11]);
    c.segment = Segment::Opened("history edited".to_owned());
    c.prompt = vec![1, 2, 3, 4, 99];
    c.messages[3].content = "edited".to_owned();
    c.tools = Vec::new();
    c.finish = FinishReason::Length;
    c.kind = TurnKind::Side;
    c.temperature = 0.7;
    let d = next_turn(store.next_turn_id(4), &c, &[12; 50], &[]);
    let sibling = next_turn(store.next_turn_id(5), &a, &[6], &[13]);
    let all = [a, b, c, d, sibling];
    for turn in &all {
        put(store, vec![Event::Turn(Box::new(turn.clone()))]);
    }
    for turn in &all {
        let story = store.story(turn.id).unwrap().unwrap();
        assert_eq!(story.turn, *turn);
        assert_eq!(
            (story.next, story.mark, story.no_verdict),
            (None, None, None)
        );
    }
    let stories = store.session_stories(&owner, &name).unwrap();
    assert_eq!(stories.into_iter().map(|s| s.turn).collect::<Vec<_>>(), all);
    assert_eq!(store.story(TurnId(7)).unwrap(), None);
    assert_eq!(store.story(TurnId(u64::MAX)).unwrap(), None);
    assert_eq!(store.session_stories(&profile("x"), &name).unwrap(), vec![]);
}

fn turns_that_contradict_are_refused(store: &dyn TrajectoryStore) {
    let (owner, name) = (Profile::default(), session("s"));
    let a = first_turn(TurnId(10), &owner, &name);
    put(store, vec![Event::Turn(Box::new(a.clone()))]);
    let bad = |change: &dyn Fn(&mut Turn)| {
        let mut turn = next_turn(TurnId(11), &a, &[6], &[7]);
        change(&mut turn);
        refused(store, vec![Event::Turn(Box::new(turn))]);
    };
    bad(&|t| t.id = TurnId(10));
    bad(&|t| t.id = TurnId(u64::MAX));
    bad(&|t| t.parent = Some(TurnId(99)));
    bad(&|t| t.parent = Some(TurnId(11)));
    bad(&|t| t.parent = None);
    bad(&|t| t.prompt[0] = 77);
    bad(&|t| t.prompt.truncate(4));
    bad(&|t| t.session = session("other"));
    bad(&|t| t.version.profile = profile("other"));
    bad(&|t| t.temperature = f32::NAN);
    for turn in [TurnId(11), TurnId(u64::MAX)] {
        let unknown = [
            Event::NextState {
                turn,
                next: next_state("x"),
                at: 1,
            },
            Event::Mark {
                turn,
                mark: TurnMark::Abandoned,
            },
            Event::NoVerdict {
                turn,
                why: "x".to_owned(),
            },
            Event::Verdict {
                turn,
                id: VerdictId(1),
                verdict: Box::new(verdict(None, &[])),
                at: 1,
            },
        ];
        unknown
            .into_iter()
            .for_each(|event| refused(store, vec![event]));
    }
    let other = session("other");
    let ended = Event::SessionEnded {
        profile: owner.clone(),
        session: other,
        at: 1,
        why: "idle".to_owned(),
    };
    refused(store, vec![ended]);
    assert_eq!(store.session(&owner, &name).unwrap().unwrap().turns, 1);
    assert_eq!(store.sessions(None, 10).unwrap().len(), 1);
}

fn a_transaction_is_all_or_nothing(store: &dyn TrajectoryStore) {
    let turn = first_turn(TurnId(10), &Profile::default(), &session("s"));
    let mark = |turn| Event::Mark {
        turn,
        mark: TurnMark::Superseded,
    };
    refused(
        store,
        vec![Event::Turn(Box::new(turn.clone())), mark(TurnId(11))],
    );
    assert_eq!(store.story(turn.id).unwrap(), None);
    assert_eq!(store.sessions(None, 10).unwrap(), vec![]);
    put(
        store,
        vec![Event::Turn(Box::new(turn.clone())), mark(turn.id)],
    );
    assert_eq!(
        store.story(turn.id).unwrap().unwrap().mark,
        Some(TurnMark::Superseded)
    );
    put(store, vec![]);
}

/// A session record with nothing in it.
pub(super) fn record(name: &str, key: Option<&str>, at: Millis) -> SessionRecord {
    SessionRecord {
        profile: Profile::default(),
        id: session(name),
        key_hash: key.map(str::to_owned),
        task: None,
        opened: at,
        last_active: at,
        ended: None,
        turns: 0,
    }
}

fn names(all: Vec<SessionRecord>) -> Vec<String> {
    all.into_iter().map(|r| r.id.as_str().to_owned()).collect()
}

fn sessions_open_end_and_open_again(store: &dyn TrajectoryStore) {
    let owner = Profile::default();
    let end = |name: &str, at| Event::SessionEnded {
        profile: Profile::default(),
        session: session(name),
        at,
        why: "client".to_owned(),
    };
    let task = Some("sums".to_owned());
    put(
        store,
        vec![Event::SessionOpened(SessionRecord {
            task: task.clone(),
            ..record("a", None, 10)
        })],
    );
    put(store, vec![Event::SessionOpened(record("b", None, 20))]);
    let turn = told_turn(store, &owner, "a");
    let a = store.session(&owner, &session("a")).unwrap().unwrap();
    assert_eq!((a.opened, a.last_active, a.turns), (10, 2_000, 1));
    assert_eq!(names(store.sessions(Some(&owner), 10).unwrap()), ["a", "b"]);
    assert_eq!(names(store.sessions(None, 1).unwrap()), ["a"]);
    assert_eq!(
        names(store.sessions(Some(&profile("x")), 10).unwrap()),
        Vec::<String>::new()
    );
    assert_eq!(names(store.idle_sessions(2_001).unwrap()), ["b", "a"]);
    assert_eq!(names(store.idle_sessions(2_000).unwrap()), ["b"]);
    assert_eq!(
        names(store.idle_sessions(20).unwrap()),
        Vec::<String>::new()
    );

    put(store, vec![end("a", 5_000)]);
    put(store, vec![end("a", 6_000)]);
    let a = store.session(&owner, &session("a")).unwrap().unwrap();
    assert_eq!(a.ended, Some((5_000, "client".to_owned())));
    assert_eq!(names(store.idle_sessions(9_999).unwrap()), ["b"]);
    // What comes late is kept and wakes nobody.
    put(store, vec![follow(turn.id, "x", 7_000)]);
    let a = store.session(&owner, &session("a")).unwrap().unwrap();
    assert!(a.ended.is_some());
    put(store, vec![Event::SessionOpened(record("a", None, 8_000))]);
    let a = store.session(&owner, &session("a")).unwrap().unwrap();
    assert_eq!(
        (a.opened, a.last_active, a.ended, a.turns),
        (10, 8_000, None, 1)
    );
    assert_eq!(a.task, task);
    assert_eq!(store.profiles().unwrap(), vec![owner]);
}

fn keys_move_on(store: &dyn TrajectoryStore) {
    put(
        store,
        vec![Event::SessionOpened(record("a", Some("k"), 10))],
    );
    put(store, vec![Event::SessionOpened(record("b", Some("k"), 5))]);
    put(
        store,
        vec![Event::SessionOpened(record("c", Some("l"), 30))],
    );
    let owner = |key: &str| {
        store
            .session_by_key(key)
            .unwrap()
            .map(|r| r.id.as_str().to_owned())
    };
    assert_eq!(owner("k").as_deref(), Some("b"));
    assert_eq!(owner("l").as_deref(), Some("c"));
    assert_eq!(owner("m"), None);
    // Opening again without a key keeps it and moves nothing.
    put(store, vec![Event::SessionOpened(record("a", None, 40))]);
    assert_eq!(owner("k").as_deref(), Some("b"));
    let a = store
        .session(&Profile::default(), &session("a"))
        .unwrap()
        .unwrap();
    assert_eq!(a.key_hash.as_deref(), Some("k"));
    put(
        store,
        vec![Event::SessionOpened(record("a", Some("k"), 50))],
    );
    assert_eq!(owner("k").as_deref(), Some("a"));
}
