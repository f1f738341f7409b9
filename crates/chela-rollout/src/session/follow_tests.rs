//! Property tests of the tracker against a simple model: a tree of conversations.

use super::*;
use chela_core::{Conversation, TurnId, testing};
use proptest::prelude::*;

/// A turn of this request and answer.
fn turn(id: u64, parent: Option<u64>, messages: &[Message], answer: &Message) -> Known {
    let mut turn = testing::first_turn(
        TurnId(id),
        &testing::profile("default"),
        &testing::session("s"),
    );
    turn.parent = parent.map(TurnId);
    turn.messages = messages.to_vec();
    turn.answer = answer.clone();
    (turn.created, turn.completed) = (id as i64 * 10, id as i64 * 10 + 5);
    Known::of(&TurnStory {
        turn,
        next: None,
        mark: None,
        no_verdict: None,
        verdicts: Vec::new(),
        samples: Vec::new(),
    })
}

fn outline(messages: &[Message]) -> Outline {
    Outline::of(&Conversation {
        messages: messages.to_vec(),
        ..Conversation::default()
    })
}

/// Builds a tree: each step continues an earlier turn (or starts anew) with a word, and gets a word back.
fn tree(steps: &[(usize, u8, u8)]) -> (Vec<Known>, Vec<Vec<Message>>) {
    let (mut turns, mut histories): (Vec<Known>, Vec<Vec<Message>>) = (Vec::new(), Vec::new());
    for (i, (at, word, answer)) in steps.iter().enumerate() {
        let parent = (i > 0 && *at % (i + 1) < i).then(|| *at % (i + 1));
        let mut messages = parent.map_or_else(Vec::new, |p| histories[p].clone());
        messages.push(Message::user(format!("u{word}")));
        let answer = Message::assistant(format!("a{answer}"));
        turns.push(turn(
            i as u64 + 1,
            parent.map(|p| p as u64 + 1),
            &messages,
            &answer,
        ));
        messages.push(answer);
        histories.push(messages);
    }
    (turns, histories)
}

proptest! {
    #[test]
    fn the_parent_is_the_longest_history_that_stands_in_the_request(
        steps in prop::collection::vec((0usize..50, 0u8..3, 0u8..3), 1..12),
        pick in 0usize..50,
        padding in "[ \n]{0,3}",
    ) {
        let (turns, histories) = tree(&steps);
        let pick = pick % turns.len();
        let mut request = histories[pick].clone();
        for message in &mut request {
            message.content = format!("{padding}{}{padding}", message.content);
        }
        request.push(Message::user("something never said before"));
        let parent = parent(&turns, &outline(&request)).unwrap();
        let found = turns.iter().position(|t| t.id == parent.id).unwrap();
        // Equal words make equal histories: any turn with this very history is right.
        prop_assert_eq!(&histories[found], &histories[pick]);
        prop_assert_eq!(parent.answer_at, histories[pick].len() - 1);
        prop_assert!(parent.exact);
    }

    #[test]
    fn a_request_without_any_of_our_answers_has_no_parent(
        steps in prop::collection::vec((0usize..50, 0u8..3, 0u8..3), 1..12),
        words in prop::collection::vec(0u8..3, 1..6),
    ) {
        let (turns, _) = tree(&steps);
        let request: Vec<Message> = words
            .iter()
            .flat_map(|w| [Message::user(format!("u{w}")), Message::assistant("not ours")])
            .collect();
        prop_assert_eq!(parent(&turns, &outline(&request)), None);
    }

    #[test]
    fn order_of_arrival_does_not_matter(
        steps in prop::collection::vec((0usize..50, 0u8..3, 0u8..3), 2..12),
        pick in 0usize..50,
    ) {
        let (turns, histories) = tree(&steps);
        let request = outline(&histories[pick % turns.len()]);
        let mut backwards = turns.clone();
        backwards.reverse();
        prop_assert_eq!(parent(&turns, &request), parent(&backwards, &request));
    }

    #[test]
    fn what_followed_is_recorded_once_however_it_arrives(
        kinds in prop::collection::vec(0u8..3, 0..8),
        cut in 0usize..9,
    ) {
        let messages: Vec<Message> = kinds
            .iter()
            .enumerate()
            .map(|(i, kind)| match kind {
                0 => Message::user(format!("u{i}")),
                1 => Message::text(Role::Tool, format!("t{i}")),
                _ => Message::assistant(format!("other {i}")),
            })
            .collect();
        let cut = cut.min(messages.len());
        let mut recorded = next_messages(&[], &messages[..cut]);
        for _ in 0..2 {
            let keys: Vec<Key> = recorded.iter().map(normal::key).collect();
            recorded.extend(next_messages(&keys, &messages));
        }
        let wanted: Vec<Message> =
            messages.into_iter().filter(|m| m.role != Role::Assistant).collect();
        prop_assert_eq!(recorded, wanted);
    }
}

#[test]
fn a_shortened_or_wrapped_question_still_leads_to_its_answer() {
    let long = Message::user("Fix the bug.\n\nReply with blocks in this format only.");
    let turns = [turn(
        1,
        None,
        &[long],
        &Message::assistant("done, see block"),
    )];
    for now in [
        "Fix the bug.",
        "[queued] Fix the bug.\n\nReply with blocks in this format only. Go.",
    ] {
        let request = [
            Message::user("file listing"),
            Message::assistant("Ok."),
            Message::user(now),
            Message::assistant("done, see block"),
            Message::user("and the test?"),
        ];
        let found = parent(&turns, &outline(&request)).unwrap();
        assert_eq!((found.answer_at, found.exact), (3, false));
    }
    let other = [
        Message::user("Something else"),
        Message::assistant("done, see block"),
    ];
    assert_eq!(parent(&turns, &outline(&other)), None);
}

#[test]
fn a_shared_beginning_alone_does_not_make_a_session() {
    let first = [Message::user("hi")];
    let turns = [turn(1, None, &first, &Message::assistant("hello"))];
    let talk = |answer: &str| {
        outline(&[
            Message::user("hi"),
            Message::assistant(answer),
            Message::user("on"),
        ])
    };
    assert_eq!(shared(&turns, &outline(&first)), None);
    assert_eq!(shared(&turns, &talk("other")), None);
    assert_eq!(shared(&turns, &talk("hello")), Some((2, true)));
    // A client that leaves out an answer it cannot use.
    let dropped = outline(&[Message::user("hi"), Message::user("Tool call error")]);
    assert_eq!(shared(&turns, &dropped), Some((1, true)));
}

#[test]
fn only_an_earlier_request_that_is_over_is_superseded() {
    let messages = [Message::user("q")];
    let answer = Message::assistant("a");
    let old = turn(1, None, &messages, &answer);
    let new = turn(2, None, &messages, &answer);
    assert_eq!(superseded(std::slice::from_ref(&old), &new), [old.id]);
    let mut running = old.clone();
    running.completed = new.created + 1;
    let mut sibling = old.clone();
    sibling.created = new.created;
    let mut continued = old.clone();
    continued.next.push(Key::START);
    assert_eq!(superseded(&[running, sibling, continued], &new), []);
    let other = turn(
        3,
        None,
        &[Message::system("another agent"), Message::user("q")],
        &answer,
    );
    assert_eq!(superseded(&[old], &other), []);
}

#[test]
fn reuse_names_what_changed() {
    let messages = [Message::system("s"), Message::user("q")];
    let answer = Message::assistant("a");
    let known = turn(1, None, &messages, &answer);
    let with = |system: &str, answer: &str| {
        outline(&[
            Message::system(system),
            Message::user("q"),
            Message::assistant(answer),
            Message::user("on"),
        ])
    };
    assert_eq!(reusable(&known, &with("s", " a ")), Ok(3));
    assert_eq!(
        reusable(&known, &with("t", "a")),
        Err("system prompt changed")
    );
    assert_eq!(reusable(&known, &with("s", "b")), Err("history edited"));
}

#[test]
fn the_last_answer_is_known_again_after_a_compaction() {
    let said = [
        Message::user("one"),
        Message::assistant("a"),
        Message::user("two"),
    ];
    let turns = [
        turn(1, None, &said[..1], &said[1]),
        turn(2, Some(1), &said, &Message::assistant("the answer")),
    ];
    let compacted = |answer: &str| {
        outline(&[
            Message::user("Summary of what was said."),
            Message::assistant(answer),
            Message::user("three"),
        ])
    };
    let parent_of =
        |answer| parent(&turns, &compacted(answer)).map(|p| (p.id, p.answer_at, p.exact));
    assert_eq!(parent_of("the answer"), Some((TurnId(2), 1, false)));
    assert_eq!(parent_of("a"), None, "an older answer is no sign");
    assert_eq!(parent_of("another"), None);
}
