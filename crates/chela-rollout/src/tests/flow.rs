//! From a request to a sample, and how sessions, parents and next states come out of requests.

use super::*;
use crate::{Rule, RuleRole, RulesJudge};

fn rules() -> Vec<Arc<dyn Judge>> {
    let rule = |name: &str, pattern: &str, reward: f32, hint: Option<&str>| Rule {
        name: name.to_owned(),
        pattern: pattern.to_owned(),
        role: RuleRole::User,
        reward: Some(reward),
        hint: hint.map(str::to_owned),
    };
    let all = vec![
        rule("length", "too long", -1.0, Some("$text")),
        rule("thanks", "^thanks", 1.0, None),
    ];
    vec![Arc::new(RulesJudge::new(all).unwrap())]
}

#[tokio::test]
async fn a_complaint_becomes_a_sample_with_teacher_and_student() {
    let f = fixture(rules(), |_| {});
    let first = f
        .say("s", &[user("Why is the sky blue?")], "Because of light.")
        .await;
    let talk = [
        user("Why is the sky blue?"),
        said("Because of light."),
        user("That is too long, use three words."),
    ];
    let second = f.say("s", &talk, "It is light.").await;
    let story = f.story(first);
    assert_eq!(story.next.unwrap().messages, talk[2..]);
    f.until("a sample", || !f.story(first).samples.is_empty())
        .await;

    let story = f.story(first);
    let (_, verdict, no_sample) = &story.verdicts[0];
    assert_eq!(
        (verdict.judge.as_str(), verdict.reward),
        ("rules:length", Some(-1.0))
    );
    assert_eq!(no_sample, &None);
    let (_, sample, state) = &story.samples[0];
    assert_eq!(
        (sample.reward, sample.explicit, state),
        (Some(-1.0), false, &SampleState::Pending)
    );
    let hint = "That is too long, use three words.";
    assert_eq!(sample.hint.as_deref(), Some(hint));
    // The student's values are the engine's own for prompt and reply; the teacher's differ by the hinted prompt only.
    let turn = &story.turn;
    let conversation = Conversation {
        messages: turn.messages.clone(),
        ..Conversation::default()
    };
    let hinted = f.chat.render_hinted(&conversation, hint).unwrap();
    for (prompt, values) in [
        (&turn.prompt, &sample.student_logprobs),
        (&hinted, &sample.teacher_logprobs),
    ] {
        let tokens = [prompt.as_slice(), turn.reply.tokens()].concat();
        let scored = f.engine.score(
            PolicyRef::Base,
            Prompt { tokens },
            prompt.len(),
            Want::default(),
        );
        assert_eq!(Some(scored.await.unwrap().logprobs), *values);
    }
    assert_ne!(sample.student_logprobs, sample.teacher_logprobs);
    // Nobody answered the second turn: it is not judged.
    let story = f.story(second);
    assert_eq!(story.turn.parent, Some(first));
    assert_eq!(story.turn.segment, Segment::Extends);
    assert!(story.next.is_none() && story.verdicts.is_empty() && story.no_verdict.is_none());
}

#[tokio::test]
async fn what_waited_is_judged_after_a_restart() {
    let before = fixture(rules(), |c| c.learning = false);
    let first = before.say("s", &[user("q")], "a").await;
    before
        .say("s", &[user("q"), said("a"), user("thanks, next?")], "b")
        .await;
    let after = fixture_over(before.store.clone(), rules(), |_| {});
    after
        .until("a sample", || !after.story(first).samples.is_empty())
        .await;
    assert_eq!(after.story(first).samples[0].1.reward, Some(1.0));
    // And the tracker knows the session again.
    let talk = [
        user("q"),
        said("a"),
        user("thanks, next?"),
        said("b"),
        user("more"),
    ];
    let third = after.say("s", &talk, "c").await;
    let parent = after.story(third).turn.parent.unwrap();
    assert_eq!(after.story(parent).turn.answer.content, "b");
    assert_eq!(after.story(third).turn.segment, Segment::Extends);
}

#[tokio::test]
async fn without_a_session_id_the_history_tells() {
    let f = fixture(Vec::new(), |_| {});
    let ask = |m: &[Message]| request(None, m);
    let (one, _) = f.exchange(&someone(), &ask(&[user("hi")]), "hello A").await;
    let (two, _) = f.exchange(&someone(), &ask(&[user("hi")]), "hello B").await;
    assert_ne!(one.session, two.session);
    let go_on = |answer: &str| ask(&[user("hi"), said(answer), user("and?")]);
    let (third, _) = f.exchange(&someone(), &go_on("hello A"), "x").await;
    assert_eq!(
        (&third.session, third.session_source.as_str()),
        (&one.session, "message prefix")
    );
    assert_eq!(third.parent, Some(one.turns[0]));
    // Another profile shares nothing.
    let other = Caller {
        profile: profile("other"),
        ..someone()
    };
    let (fourth, _) = f.exchange(&other, &go_on("hello A"), "x").await;
    assert_eq!(fourth.session_source, "new");
}

#[tokio::test]
async fn a_retry_supersedes_and_an_edit_is_another_branch() {
    let f = fixture(Vec::new(), |_| {});
    let root = f.say("s", &[user("q")], "a").await;
    let ask = |text: &str| vec![user("q"), said("a"), user(text)];
    let lost = f.say("s", &ask("left"), "l1").await;
    let again = f.say("s", &ask("left"), "l2").await;
    let edited = f.say("s", &ask("right"), "r").await;
    assert_eq!(f.story(lost).mark, Some(TurnMark::Superseded));
    assert_eq!(f.story(again).mark, None);
    for turn in [lost, again, edited] {
        assert_eq!(f.story(turn).turn.parent, Some(root));
    }
    // The retry said the same and the edit speaks of another branch: what followed the root stands once.
    assert_eq!(f.story(root).next.unwrap().messages, [user("left")]);
    let mut on = ask("right");
    on.extend([said("r"), user("fine")]);
    let last = f.say("s", &on, "end").await;
    assert_eq!(f.story(last).turn.parent, Some(edited));
    assert_eq!(f.story(edited).next.unwrap().messages, [user("fine")]);
    // Left behind for good only when the session ends.
    assert_eq!(f.story(again).mark, None);
    f.time.fetch_add(24 * 3_600_000, Ordering::SeqCst);
    f.until("the idle session's end", || f.story(again).mark.is_some())
        .await;
    assert_eq!(f.story(again).mark, Some(TurnMark::Abandoned));
    assert_eq!(f.story(last).mark, None);
    let record = f
        .store
        .session(&Profile::default(), &session("s"))
        .unwrap()
        .unwrap();
    assert_eq!(record.ended.unwrap().1, "idle");
}

#[tokio::test]
async fn side_private_and_pinned_requests() {
    let f = fixture(Vec::new(), |_| {});
    let mut side = request(Some("s"), &[user("title?")]);
    side.model = "tiny:side".to_owned();
    let (admission, _) = f.exchange(&someone(), &side, "T").await;
    assert_eq!(
        (admission.kind, admission.reason.as_str()),
        (TurnKind::Side, "model :side")
    );
    assert_eq!(admission.version.number, 0);

    let mut private = request(Some("s"), &[user("secret")]);
    private.hints.kind = Some(DeclaredKind::Private);
    let (admission, turn) = f.exchange(&someone(), &private, "x").await;
    assert!(admission.private);
    assert_eq!(f.store.story(turn).unwrap(), None);

    let mut pinned = request(Some("s"), &[user("q")]);
    pinned.model = "tiny@7".to_owned();
    match f.rollout.admit(&someone(), &pinned).await {
        Err(Refusal::NotFound(why)) => assert!(why.contains("tiny@7"), "{why}"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_dead_store_refuses_before_anything_is_answered() {
    let f = fixture(Vec::new(), |_| {});
    f.say("s", &[user("q")], "a").await;
    f.store.set_dead(Some("disk full"));
    let next = request(Some("s"), &[user("q"), said("a"), user("on")]);
    let refused = f.rollout.admit(&someone(), &next).await;
    assert!(
        matches!(refused, Err(Refusal::Unavailable { .. })),
        "{refused:?}"
    );
}

#[tokio::test]
async fn choices_are_siblings_and_done_ends_the_session() {
    let f = fixture(Vec::new(), |_| {});
    let mut two = request(Some("s"), &[user("q")]);
    (two.choices, two.hints.session_done) = (2, true);
    let admission = f.rollout.admit(&someone(), &two).await.unwrap();
    let ended = || {
        f.store
            .session(&Profile::default(), &session("s"))
            .unwrap()
            .unwrap()
            .ended
            .is_some()
    };
    for choice in [0, 1] {
        let mut completion = f.completion(&admission, &two, "a");
        completion.choice = choice;
        f.rollout.seal(&admission, &two, completion).await.unwrap();
        assert_eq!(ended(), choice == 1);
    }
    assert_eq!(admission.turns.len(), 2);
    assert!(admission.turns.iter().all(|t| f.story(*t).mark.is_none()));
    // The client goes on: the session lives again.
    f.say("s", &[user("q"), said("a"), user("more")], "b").await;
    assert!(!ended());
}

#[tokio::test]
async fn a_heartbeat_is_no_answer_to_the_turn_before() {
    let f = fixture(Vec::new(), |_| {});
    let main = f.say("s", &[user("q")], "a").await;
    let beat = user("Follow the heartbeat monitor scratch context now");
    let mut talk = vec![user("q"), said("a"), beat];
    f.say("s", &talk, "NO_REPLY").await;
    assert_eq!(f.story(main).next, None);
    talk.extend([said("NO_REPLY"), user("thanks")]);
    let last = f.say("s", &talk, "b").await;
    assert_eq!(f.story(last).turn.kind, TurnKind::Main);
    assert_eq!(f.story(main).next.unwrap().messages, [user("thanks")]);
}

#[tokio::test]
async fn a_session_forgotten_during_a_reply_takes_the_reply_as_a_first_turn() {
    let f = fixture(Vec::new(), |_| {});
    f.say("s", &[user("q")], "a").await;
    let ask = request(Some("s"), &[user("q"), said("a"), user("on")]);
    let admission = f.rollout.admit(&someone(), &ask).await.unwrap();
    let completion = f.completion(&admission, &ask, "b");
    f.rollout
        .forget(
            &someone(),
            ForgetRequest::Session(session("s"), None),
            false,
        )
        .await
        .unwrap();
    let turn = f.rollout.seal(&admission, &ask, completion).await.unwrap();
    let turn = f.story(turn).turn;
    assert_eq!(
        (turn.parent, turn.segment),
        (None, Segment::Opened("history forgotten".to_owned()))
    );
}

#[tokio::test]
async fn requests_of_one_session_at_the_same_moment_are_siblings() {
    let f = fixture(Vec::new(), |_| {});
    let root = f.say("s", &[user("q")], "a").await;
    let ask = request(Some("s"), &[user("q"), said("a"), user("on")]);
    let me = someone();
    let (one, two) = tokio::join!(f.rollout.admit(&me, &ask), f.rollout.admit(&me, &ask));
    let (one, two) = (one.unwrap(), two.unwrap());
    for admission in [&two, &one] {
        let completion = f.completion(admission, &ask, "b");
        f.rollout.seal(admission, &ask, completion).await.unwrap();
    }
    for turn in [one.turns[0], two.turns[0]] {
        assert_eq!(
            (f.story(turn).turn.parent, f.story(turn).mark),
            (Some(root), None)
        );
    }
    assert_eq!(f.story(root).next.unwrap().messages, [user("on")]);
}
