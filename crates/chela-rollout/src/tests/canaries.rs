//! Canaries through the loop: a judge that errs stops learning, nothing of a canary is kept, and how it goes on again.

use super::*;
use crate::{canaries::FEWEST, labelled};
use std::sync::atomic::AtomicBool;

fn labelled_turns() -> Vec<labelled::Labelled> {
    let line = |label: i64, said: &str| {
        format!(
            r#"{{"label":{label},"messages":[{{"role":"user","content":"canary"}}],"answer":{{"content":":"}},"next":[{{"role":"user","content":"{said}"}}]}}"#
        )
    };
    // So many that hardly one is drawn twice.
    let three = [line(1, "fine"), line(-1, "no"), line(-1, "wrong")].join("\n");
    labelled::read(&[three.as_str(); 2000].join("\n")).unwrap()
}

/// Right about real turns; about canaries as long as it is told to be.
fn judge(right: &Arc<AtomicBool>) -> Arc<FakeJudge> {
    let right = right.clone();
    Arc::new(FakeJudge::new("fake", move |case| {
        let said = case.next.messages[0].content.as_str();
        let good = matches!(said, "fine" | "thanks");
        let reward = if good == right.load(Ordering::SeqCst) || case.messages[0].content == "q" {
            1.0
        } else {
            -1.0
        };
        Ok(Some(verdict(Some(reward), &[])))
    }))
}

async fn talk(f: &Fixture, from: usize, to: usize) {
    for i in from..to {
        let session = format!("s{i}");
        f.say(&session, &[user("q")], &format!("a{i}")).await;
        f.say(
            &session,
            &[user("q"), said(&format!("a{i}")), user("thanks")],
            "b",
        )
        .await;
    }
}

fn canaries_of(f: &Fixture) -> CanaryFigures {
    let status = f.rollout.status(&admin()).unwrap();
    status.judges[0].canaries.clone()
}

fn paused(f: &Fixture) -> Option<String> {
    f.store.paused(&Profile::default()).unwrap()
}

fn always(config: &mut RolloutConfig) {
    config.canaries = labelled_turns();
    config.canary_rate = 1.0;
}

#[tokio::test]
async fn a_judge_that_errs_on_canaries_stops_learning_and_one_that_is_right_again_resumes_it() {
    let right = Arc::new(AtomicBool::new(false));
    let f = fixture(vec![judge(&right)], always);
    talk(&f, 0, 15).await;
    f.until("fifteen canaries", || canaries_of(&f).verdicts == 15)
        .await;
    assert_eq!(canaries_of(&f).wrong, 15);
    assert_eq!((paused(&f), canaries_of(&f).error), (None, None), "too few");

    talk(&f, 15, 25).await;
    f.until("a stop", || paused(&f).is_some()).await;
    let why = paused(&f).unwrap();
    assert!(why.starts_with("judge fake errs: "), "{why}");
    assert!(
        why.contains("line ") && why.contains("chela judge test"),
        "{why}"
    );
    let status = f.rollout.status(&admin()).unwrap();
    let notice = status
        .notices
        .iter()
        .find(|n| n.contains("judge fake errs"));
    assert!(notice.unwrap().contains("is paused"), "{status:?}");

    f.until("all canaries", || canaries_of(&f).verdicts == 25)
        .await;
    // Real turns only: twenty-five sessions, one judged turn and one sample of each.
    let counts = f.store.counts(None).unwrap();
    assert_eq!(counts.sessions, 25);
    assert_eq!(counts.turns.iter().map(|t| t.2).sum::<u64>(), 50);
    assert_eq!(counts.verdicts.iter().map(|v| v.1).sum::<u64>(), 25);
    assert_eq!(counts.samples.iter().map(|s| s.1).sum::<u64>(), 25);
    let kept = f.rollout.sessions(&admin(), 100).unwrap();
    assert!(kept.iter().all(|s| s.id.as_str() != "labelled"));
    let unknown = SessionId::new("labelled").unwrap();
    let export = f.rollout.export(&unknown, 1.0, ExportStyle::Individual);
    assert!(matches!(export, Err(Refusal::NotFound(_))));

    right.store(true, Ordering::SeqCst);
    talk(&f, 25, 85).await;
    f.until("going on", || paused(&f).is_none()).await;
    assert!(canaries_of(&f).error.unwrap() <= 0.3);
}

#[tokio::test]
async fn an_operator_resumes_and_it_is_measured_anew() {
    let right = Arc::new(AtomicBool::new(false));
    let f = fixture(vec![judge(&right)], always);
    talk(&f, 0, 21).await;
    f.until("a stop", || paused(&f).is_some()).await;
    f.until("all canaries", || canaries_of(&f).verdicts == 21)
        .await;
    let profile = Profile::default();
    f.rollout
        .steer(profile.clone(), PolicyAction::Resume)
        .await
        .unwrap();
    assert_eq!((paused(&f), canaries_of(&f).verdicts), (None, 0));
    talk(&f, 21, 21 + FEWEST - 1).await;
    f.until("more canaries", || {
        canaries_of(&f).verdicts == FEWEST as u64 - 1
    })
    .await;
    assert_eq!(paused(&f), None);
    talk(&f, 50, 51).await;
    f.until("a stop again", || paused(&f).is_some()).await;

    // What an operator paused is the operator's to resume.
    let steer = |action| f.rollout.steer(profile.clone(), action);
    steer(PolicyAction::Resume).await.unwrap();
    steer(PolicyAction::Pause).await.unwrap();
    right.store(true, Ordering::SeqCst);
    talk(&f, 60, 60 + FEWEST).await;
    f.until("right canaries", || canaries_of(&f).error == Some(0.0))
        .await;
    assert_eq!(paused(&f).as_deref(), Some("paused by an operator"));
}

#[tokio::test]
async fn a_stop_outlives_a_restart_until_the_judge_is_measured_or_gone() {
    let right = Arc::new(AtomicBool::new(false));
    let f = fixture(vec![judge(&right)], always);
    talk(&f, 0, 21).await;
    f.until("a stop", || paused(&f).is_some()).await;

    let again = fixture_over(f.store.clone(), vec![judge(&right)], always);
    talk(&again, 30, 31).await;
    again
        .until("one canary", || canaries_of(&again).verdicts == 1)
        .await;
    assert!(paused(&again).is_some(), "nothing says otherwise yet");

    // Another judge in its place: a fresh one would be measured first, this one is not the one that erred.
    let other = Arc::new(FakeJudge::scoring("other", Score::Good, &[]));
    let other = fixture_over(f.store.clone(), vec![other], always);
    other.until("going on", || paused(&other).is_none()).await;
}

#[tokio::test]
async fn void_votes_and_silence_on_canaries_are_no_errors() {
    let void = Arc::new(FakeJudge::new("void", |_| Ok(Some(verdict(None, &[])))));
    let failing = Arc::new(FakeJudge::new("silent", |_| Ok(None)));
    let f = fixture(vec![void, failing], always);
    talk(&f, 0, 22).await;
    f.until("canaries", || canaries_of(&f).abstained == 22)
        .await;
    let status = f.rollout.status(&admin()).unwrap();
    assert_eq!(
        status.judges[0].void_votes, 22,
        "votes on canaries are not counted"
    );
    assert_eq!(status.judges[1].canaries.abstained, 22);
    assert_eq!((paused(&f), canaries_of(&f).verdicts), (None, 0));
}

#[tokio::test]
async fn a_judge_that_never_answers_holds_one_canary_and_no_real_turn() {
    /// Answers real turns; of a canary nothing is ever heard.
    struct Stuck;
    impl Judge for Stuck {
        fn name(&self) -> &str {
            "stuck"
        }
        fn judge<'a>(
            &'a self,
            case: &'a JudgeCase,
        ) -> BoxFuture<'a, Result<Option<Verdict>, JudgeError>> {
            Box::pin(async move {
                if case.messages[0].content == "canary" {
                    std::future::pending::<()>().await;
                }
                Ok(Some(verdict(Some(1.0), &[])))
            })
        }
    }
    let f = fixture(vec![Arc::new(Stuck)], always);
    talk(&f, 0, 9).await;
    f.until("nine samples", || {
        let counts = f.store.counts(None).unwrap();
        counts.samples.iter().map(|s| s.1).sum::<u64>() == 9
    })
    .await;
    assert_eq!(canaries_of(&f), CanaryFigures::default());
}
