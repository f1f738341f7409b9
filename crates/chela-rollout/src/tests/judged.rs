//! What judging does when judges fail, disagree or say nothing, and what of it trains.

use super::*;

/// A turn that was followed by `next`.
async fn answered(f: &Fixture, session: &str, next: &str) -> TurnId {
    let turn = f.say(session, &[user("q")], "a").await;
    f.say(session, &[user("q"), said("a"), user(next)], "b")
        .await;
    turn
}

fn saying(verdict: Verdict) -> Arc<dyn Judge> {
    Arc::new(FakeJudge::new("fake", move |_| Ok(Some(verdict.clone()))))
}

#[tokio::test]
async fn a_judge_that_is_down_delays_and_never_scores() {
    let failing = Arc::new(FakeJudge::failing("down", "503"));
    let f = fixture(
        vec![failing.clone(), saying(verdict(Some(1.0), &[]))],
        |_| {},
    );
    let turn = answered(&f, "s", "next").await;
    f.until("a second round", || failing.cases().len() > 6)
        .await;
    let story = f.story(turn);
    assert!(story.verdicts.is_empty() && story.no_verdict.is_none());
    let status = f.rollout.status(&admin()).unwrap();
    assert!(status.judge_errors[0].1 > 6);
    assert!(
        status
            .notices
            .iter()
            .any(|n| n.contains("judge down fails: 503")),
        "{status:?}"
    );
}

#[tokio::test]
async fn the_first_judge_with_a_verdict_wins() {
    let silent = Arc::new(FakeJudge::new("silent", |_| Ok(None)));
    let never = Arc::new(FakeJudge::scoring("never", Score::Bad, &[]));
    let f = fixture(
        vec![silent, saying(verdict(Some(1.0), &[])), never.clone()],
        |_| {},
    );
    let turn = answered(&f, "s", "thanks").await;
    f.until("a sample", || !f.story(turn).samples.is_empty())
        .await;
    assert_eq!(f.story(turn).samples[0].1.reward, Some(1.0));
    assert!(never.cases().is_empty());
}

#[tokio::test]
async fn nothing_said_and_void_votes_are_not_neutral() {
    let f = fixture(
        vec![Arc::new(FakeJudge::new("silent", |_| Ok(None)))],
        |_| {},
    );
    let turn = answered(&f, "s", "x").await;
    f.until("an end", || f.story(turn).no_verdict.is_some())
        .await;
    assert!(f.story(turn).verdicts.is_empty());

    let f = fixture(vec![saying(verdict(None, &[]))], |_| {});
    let turn = answered(&f, "s", "x").await;
    f.until("an end", || !f.story(turn).verdicts.is_empty())
        .await;
    let story = f.story(turn);
    assert_eq!(story.verdicts[0].2.as_deref(), Some("no valid vote"));
    assert_eq!(story.verdicts[0].1.votes.len(), 1);
    assert!(story.samples.is_empty());
}

#[tokio::test]
async fn neutral_trains_only_with_a_hint_or_a_baseline() {
    for (keep, hints, samples) in [
        (false, &[][..], 0),
        (true, &[][..], 1),
        (false, &["Say it in one line."][..], 1),
        (false, &["too short"][..], 0),
    ] {
        let f = fixture(vec![saying(verdict(Some(0.0), hints))], |c| {
            c.keep_neutral = keep
        });
        let turn = answered(&f, "s", "x").await;
        let settled = || {
            let story = f.story(turn);
            !story.samples.is_empty() || story.verdicts.iter().any(|v| v.2.is_some())
        };
        f.until("an outcome", settled).await;
        let story = f.story(turn);
        assert_eq!(story.samples.len(), samples, "{keep} {hints:?}");
        if samples == 0 {
            assert_eq!(story.verdicts[0].2.as_deref(), Some("neutral"));
        }
    }
}

#[tokio::test]
async fn without_teacher_values_there_is_no_distillation() {
    // Version 3 sampled the turn and is not resident any more.
    let gone = PolicyVersion {
        profile: Profile::default(),
        number: 3,
    };
    for (reward, samples) in [(Some(-1.0), 1), (None, 0)] {
        let judge = saying(verdict(reward, &["Say it in one line."]));
        let f = fixture(vec![judge], |_| {});
        f.engine.insert(gone.clone(), FakeModel::base(258));
        f.engine.serve(&gone).unwrap();
        let turn = answered(&f, "s", "x").await;
        f.engine
            .serve(&PolicyVersion::base(Profile::default()))
            .unwrap();
        f.engine.unload(&gone);
        let settled = || {
            let story = f.story(turn);
            !story.samples.is_empty() || story.verdicts.iter().any(|v| v.2.is_some())
        };
        f.until("an outcome", settled).await;
        let story = f.story(turn);
        assert_eq!(story.samples.len(), samples);
        match story.samples.first() {
            Some((_, sample, _)) => {
                assert_eq!((sample.reward, &sample.hint), (Some(-1.0), &None));
                assert_eq!(
                    (&sample.teacher_logprobs, &sample.student_logprobs),
                    (&None, &None)
                );
            }
            None => assert!(story.verdicts[0].2.as_ref().unwrap().contains("not loaded")),
        }
    }
}

#[tokio::test]
async fn cut_and_aborted_replies_never_train_as_a_success() {
    use crate::TruncatedReplies::{Bad, Exclude};
    for (finish, policy, outcome) in [
        (FinishReason::Length, Exclude, Err("truncated")),
        (FinishReason::Length, Bad, Ok("validator:truncated")),
        (FinishReason::Aborted, Bad, Err("aborted by the client")),
    ] {
        let good = saying(verdict(Some(1.0), &[]));
        let f = fixture(vec![good], |c| c.truncated = policy);
        let ask = request(Some("s"), &[user("q")]);
        let admission = f.rollout.admit(&someone(), &ask).await.unwrap();
        let mut completion = f.completion(&admission, &ask, "a");
        completion.finish = finish;
        let turn = f.rollout.seal(&admission, &ask, completion).await.unwrap();
        f.say("s", &[user("q"), said("a"), user("thanks")], "b")
            .await;
        let settled = || {
            let story = f.story(turn);
            story.no_verdict.is_some() || !story.samples.is_empty()
        };
        f.until("an outcome", settled).await;
        let story = f.story(turn);
        match outcome {
            Err(why) => assert_eq!(story.no_verdict.as_deref(), Some(why)),
            Ok(judge) => {
                assert_eq!(story.verdicts[0].1.judge, judge);
                assert_eq!(story.samples[0].1.reward, Some(-1.0));
            }
        }
        // A person may praise it; it is no success all the same.
        let praise = Feedback {
            target: FeedbackTarget::Turn(turn),
            score: Some(1.0),
            text: None,
            edited: None,
            group: None,
        };
        f.rollout.feedback(&someone(), praise).await.unwrap();
        let refused = || f.story(turn).verdicts.last().unwrap().2.is_some();
        f.until("a refusal", refused).await;
        let story = f.story(turn);
        assert!(!story.samples.iter().any(|(_, s, state)| {
            s.reward == Some(1.0)
                || (finish == FinishReason::Length && *state == SampleState::Pending)
        }));
    }
}

#[tokio::test]
async fn in_a_group_a_reply_trains_with_its_reward_however_it_ended() {
    let f = fixture(Vec::new(), |_| {});
    let ask = request(None, &[user("q")]);
    let mut turns = Vec::new();
    for (answer, finish) in [
        ("a", FinishReason::End),
        ("a", FinishReason::Length),
        ("b", FinishReason::Aborted),
    ] {
        let admission = f.rollout.admit(&someone(), &ask).await.unwrap();
        let mut completion = f.completion(&admission, &ask, answer);
        completion.finish = finish;
        turns.push(f.rollout.seal(&admission, &ask, completion).await.unwrap());
    }
    let group = Group::new("task 7", 3).unwrap();
    let scored = |turn, score| Feedback {
        target: FeedbackTarget::Turn(turn),
        score,
        text: Some("far too long".to_owned()),
        edited: None,
        group: Some(group.clone()),
    };
    // Neutral is a reward here, and what is said beside it is no hint.
    for (turn, reward) in [(turns[0], 0.0), (turns[1], -1.0)] {
        f.rollout
            .feedback(&someone(), scored(turn, Some(reward)))
            .await
            .unwrap();
        f.until("a sample", || !f.story(turn).samples.is_empty())
            .await;
        let (_, sample, state) = f.story(turn).samples.remove(0);
        assert_eq!((sample.reward, sample.hint), (Some(reward), None));
        assert_eq!(
            (sample.group.as_ref(), sample.explicit),
            (Some(&group), true)
        );
        assert_eq!(state, SampleState::Pending);
    }
    let cannot = f
        .rollout
        .feedback(&someone(), scored(turns[2], Some(1.0)))
        .await;
    let why = cannot.unwrap_err().to_string();
    assert!(why.contains("aborted by the client"), "{why}");
    let no_score = f.rollout.feedback(&someone(), scored(turns[0], None)).await;
    assert!(no_score.is_err());
    assert_eq!(f.story(turns[0]).samples.len(), 1);
}

#[tokio::test]
async fn tool_errors_and_repeated_calls_are_certain() {
    let call = |id: &str| {
        let mut message = Message::assistant("");
        message.tool_calls.push(ToolCall {
            id: id.to_owned(),
            name: "ls".to_owned(),
            arguments: "{\"p\": 1}".to_owned(),
        });
        message
    };
    let result = |id: &str, is_error: bool| {
        let mut message = Message::text(Role::Tool, "out");
        (message.tool_call_id, message.is_error) = (Some(id.to_owned()), is_error);
        message
    };
    let f = fixture(Vec::new(), |_| {});
    let mut talk = vec![user("q")];
    let mut turns = Vec::new();
    for (id, is_error) in [("call_1", false), ("call_2", true)] {
        let ask = request(Some("s"), &talk);
        let admission = f.rollout.admit(&someone(), &ask).await.unwrap();
        let mut completion = f.completion(&admission, &ask, "x");
        completion.answer = call(id);
        turns.push(f.rollout.seal(&admission, &ask, completion).await.unwrap());
        // As OpenClaw sends it back.
        let bare = id.replace('_', "");
        talk.extend([call(&bare), result(&bare, is_error)]);
    }
    f.say("s", &talk, "end").await;
    f.until("verdicts", || !f.story(turns[1]).verdicts.is_empty())
        .await;
    assert_eq!(
        f.story(turns[0]).no_verdict.as_deref(),
        Some("no judge is configured")
    );
    assert_eq!(
        f.story(turns[1]).verdicts[0].1.judge,
        "validator:tool-error"
    );
    assert_eq!(f.story(turns[1]).turn.parent, Some(turns[0]));
}
