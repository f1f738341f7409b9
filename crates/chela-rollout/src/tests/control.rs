//! The learning API over fakes: feedback, trainers' sessions, exports, versions, who may see what.

use super::*;

fn scored(turn: TurnId, score: f32) -> Feedback {
    Feedback {
        target: FeedbackTarget::Turn(turn),
        score: Some(score),
        text: None,
        edited: None,
        group: None,
    }
}

#[tokio::test]
async fn explicit_beats_judge_and_the_last_word_wins() {
    let judge = Arc::new(FakeJudge::scoring("fake", Score::Bad, &[]));
    let f = fixture(vec![judge], |_| {});
    let turn = f.say("s", &[user("q")], "a").await;
    f.say("s", &[user("q"), said("a"), user("hm")], "b").await;
    f.until("the judge's sample", || f.story(turn).samples.len() == 1)
        .await;
    let standing = f
        .rollout
        .feedback(&someone(), scored(turn, 0.5))
        .await
        .unwrap();
    assert_eq!(standing, (turn, Some(0.5)));
    f.until("the explicit sample", || f.story(turn).samples.len() == 2)
        .await;
    f.rollout
        .feedback(&someone(), scored(turn, 2.0))
        .await
        .unwrap();
    f.until("the last sample", || f.story(turn).samples.len() == 3)
        .await;
    let samples = f.story(turn).samples;
    let states: Vec<_> = samples
        .iter()
        .map(|(_, s, state)| (s.reward, state.clone()))
        .collect();
    let replaced = SampleState::Dropped("replaced".to_owned());
    assert_eq!(
        states,
        [
            (Some(-1.0), replaced.clone()),
            (Some(0.5), replaced),
            (Some(2.0), SampleState::Pending)
        ]
    );
    assert!(samples[2].1.explicit);
    // Zero takes everything back.
    f.rollout
        .feedback(&someone(), scored(turn, 0.0))
        .await
        .unwrap();
    f.until("nothing pending", || {
        f.story(turn)
            .samples
            .iter()
            .all(|s| matches!(s.2, SampleState::Dropped(_)))
    })
    .await;
}

#[tokio::test]
async fn a_remark_is_judged_and_an_edit_is_a_hint() {
    let judge = Arc::new(FakeJudge::scoring("fake", Score::Bad, &[]));
    let f = fixture(vec![judge.clone()], |_| {});
    let turn = f.say("s", &[user("q")], "a").await;
    let remark = Feedback {
        target: FeedbackTarget::Session(session("s")),
        score: None,
        text: Some("wrong year".to_owned()),
        edited: None,
        group: None,
    };
    let (on, reward) = f
        .rollout
        .feedback(&someone(), remark.clone())
        .await
        .unwrap();
    assert_eq!((on, reward), (turn, None));
    f.until("a sample", || f.story(turn).samples.len() == 1)
        .await;
    assert_eq!(judge.cases()[0].next.messages[0].content, "wrong year");
    // What the client's history says next is recorded all the same, also after a restart.
    let again = fixture_over(f.store.clone(), Vec::new(), |c| c.learning = false);
    again
        .say("s", &[user("q"), said("a"), user("on")], "b")
        .await;
    let followed: Vec<String> = f
        .story(turn)
        .next
        .unwrap()
        .messages
        .into_iter()
        .map(|m| m.content)
        .collect();
    assert_eq!(followed, ["wrong year", "on"]);
    // A second remark on a judged turn is judged again.
    let remark = Feedback {
        target: FeedbackTarget::Turn(turn),
        ..remark
    };
    f.rollout.feedback(&someone(), remark).await.unwrap();
    f.until("another sample", || f.story(turn).samples.len() == 2)
        .await;
    let edit = Feedback {
        target: FeedbackTarget::Turn(turn),
        score: None,
        text: None,
        edited: Some("It was 1912.".to_owned()),
        group: None,
    };
    f.rollout.feedback(&someone(), edit).await.unwrap();
    f.until("a hinted sample", || f.story(turn).samples.len() == 3)
        .await;
    let sample = &f.story(turn).samples[2].1;
    assert!(sample.hint.as_ref().unwrap().ends_with("It was 1912."));
    // The score that stood stays with it.
    assert_eq!((sample.reward, sample.explicit), (Some(-1.0), true));
    assert!(sample.teacher_logprobs.is_some());
}

#[tokio::test]
async fn feedback_needs_something_finite_on_a_turn_of_ones_own() {
    let f = fixture(Vec::new(), |_| {});
    let turn = f.say("s", &[user("q")], "a").await;
    let nothing = Feedback {
        score: None,
        ..scored(turn, 0.0)
    };
    for (caller, feedback, word) in [
        (someone(), nothing, "at least one"),
        (someone(), scored(turn, f32::NAN), "finite"),
        (someone(), scored(turn, f32::INFINITY), "finite"),
        (someone(), scored(turn, f32::NEG_INFINITY), "finite"),
        (
            Caller {
                scope: Scope::Chat,
                ..someone()
            },
            scored(turn, 1.0),
            "scope feedback",
        ),
        (
            Caller {
                profile: profile("other"),
                ..someone()
            },
            scored(turn, 1.0),
            "not known",
        ),
        (someone(), scored(TurnId(1), 1.0), "not known"),
    ] {
        let error = f
            .rollout
            .feedback(&caller, feedback)
            .await
            .unwrap_err()
            .to_string();
        assert!(error.contains(word), "{error}");
    }
    assert!(f.story(turn).verdicts.is_empty());
    let counts = f.store.counts(None).unwrap();
    assert!(counts.verdicts.is_empty() && counts.samples.is_empty());
    let stranger = Caller {
        profile: profile("other"),
        ..someone()
    };
    assert!(f.rollout.session(&stranger, &session("s")).is_err());
    let forget = |caller: &Caller| {
        let caller = caller.clone();
        let rollout = f.rollout.clone();
        async move {
            let what = ForgetRequest::Session(session("s"), None);
            rollout.forget(&caller, what, false).await
        }
    };
    assert!(forget(&stranger).await.is_err());
    assert_eq!(f.rollout.sessions(&stranger, 9).unwrap(), []);
    // A turn by its id, as a conversation that goes on from it names it: for its own profile, a session key in its session, admins.
    let inside = |name: &str| Caller {
        session: Some(session(name)),
        scope: Scope::Chat,
        ..someone()
    };
    for (caller, sees) in [
        (someone(), true),
        (inside("s"), true),
        (inside("other"), false),
        (stranger.clone(), false),
        (
            Caller {
                scope: Scope::Admin,
                ..stranger.clone()
            },
            true,
        ),
    ] {
        assert_eq!(f.rollout.turn(&caller, turn).is_ok(), sees, "{caller:?}");
    }
    assert!(f.rollout.turn(&admin(), TurnId(1)).is_err());
    assert_eq!(forget(&someone()).await.unwrap().plan.turns, [turn]);
}

async fn keyed(f: &Fixture, key: Option<String>) -> (Caller, String) {
    let (id, key) = f
        .rollout
        .start_session(Profile::default(), Some("task".to_owned()), key)
        .await
        .unwrap();
    let caller = Caller {
        profile: Profile::default(),
        scope: Scope::Chat,
        session: Some(id),
    };
    (caller, key)
}

#[tokio::test]
async fn a_trainers_session_from_start_to_export() {
    let f = fixture(Vec::new(), |_| {});
    let (caller, key) = keyed(&f, None).await;
    assert!(key.starts_with("sk-sess-") && key.len() == 51, "{key}");
    let early = f.rollout.set_reward(&caller, 1.0, None).await;
    assert!(matches!(early, Err(Refusal::Invalid { .. })), "{early:?}");
    // The key overrides what the request claims.
    let (_, one) = f
        .exchange(&caller, &request(Some("x"), &[user("q")]), "a")
        .await;
    let talk = [user("q"), said("a"), user("on")];
    let (admission, two) = f.exchange(&caller, &request(None, &talk), "b").await;
    assert_eq!(
        (Some(&admission.session), admission.parent),
        (caller.session.as_ref(), Some(one))
    );
    for (reward, turn, field) in [
        (f32::INFINITY, None, "reward"),
        (f32::NEG_INFINITY, Some(two), "reward"),
        (f32::NAN, None, "reward"),
        (1.0, Some(TurnId(7)), "interaction_id"),
    ] {
        let refused = f.rollout.set_reward(&caller, reward, turn).await;
        let named = matches!(&refused, Err(Refusal::Invalid { field: f, .. }) if f == field);
        assert!(named, "{refused:?}");
    }
    assert!(f.store.counts(None).unwrap().verdicts.is_empty());
    assert_eq!(f.rollout.set_reward(&caller, 2.0, None).await, Ok(two));
    assert_eq!(f.rollout.end_session(&caller).await, Ok(2));
    for gone in [
        f.rollout.end_session(&caller).await.map(|_| ()),
        f.rollout.set_reward(&caller, 1.0, None).await.map(|_| ()),
        f.rollout
            .admit(&caller, &request(None, &talk))
            .await
            .map(|_| ()),
    ] {
        assert!(matches!(gone, Err(Refusal::Gone(_))), "{gone:?}");
    }
    // γ = 1: the reward reached the turn before.
    f.until("two samples", || !f.story(one).samples.is_empty())
        .await;
    assert_eq!(f.story(one).samples[0].1.reward, Some(2.0));
    assert_eq!(f.story(two).samples[0].1.reward, Some(2.0));

    let id = caller.session.clone().unwrap();
    let rows = f.rollout.export(&id, 0.5, ExportStyle::Individual).unwrap();
    assert_eq!(
        rows.iter().map(|r| r.reward).collect::<Vec<_>>(),
        [Some(1.0), Some(2.0)]
    );
    let rows = f.rollout.export(&id, 0.5, ExportStyle::Concat).unwrap();
    assert_eq!(rows.len(), 1);
    let sampled = |turn: TurnId| f.story(turn).turn.reply.len();
    let in_loss = rows[0].loss_mask.iter().filter(|m| **m).count();
    assert_eq!(in_loss, sampled(one) + sampled(two));
    assert_eq!(
        rows[0].versions.iter().filter(|v| **v == 0).count(),
        in_loss
    );
    assert_eq!(rows[0].input_ids.len(), rows[0].logprobs.len());
}

#[tokio::test]
async fn a_refresh_moves_the_key_in_one_step() {
    let f = fixture(Vec::new(), |_| {});
    let (old, key) = keyed(&f, None).await;
    let (_, turn) = f.exchange(&old, &request(None, &[user("q")]), "a").await;
    f.store.set_dead(Some("full"));
    let failed = f
        .rollout
        .start_session(Profile::default(), None, Some(key.clone()))
        .await;
    assert!(failed.is_err());
    f.store.set_dead(None);
    let (new, same) = keyed(&f, Some(key.clone())).await;
    assert_eq!(same, key);
    assert_ne!(new.session, old.session);
    let record = f
        .store
        .session_by_key(&crate::session_key_hash(&key))
        .unwrap()
        .unwrap();
    assert_eq!(Some(record.id), new.session);
    let ended = f
        .store
        .session(&old.profile, &old.session.unwrap())
        .unwrap()
        .unwrap()
        .ended;
    assert_eq!(ended.unwrap().1, "refreshed");
    // A late reward that names its turn still lands there, under the key that made it and no other.
    assert_eq!(f.rollout.set_reward(&new, 1.0, Some(turn)).await, Ok(turn));
    let (stranger, _) = keyed(&f, None).await;
    let refused = f.rollout.set_reward(&stranger, 1.0, Some(turn)).await;
    assert!(
        matches!(refused, Err(Refusal::Invalid { .. })),
        "{refused:?}"
    );
    // Nobody gets into a trainer's session by naming it.
    let claim = request(Some(new.session.as_ref().unwrap().as_str()), &[user("q")]);
    let refused = f.rollout.admit(&someone(), &claim).await;
    assert!(matches!(refused, Err(Refusal::Forbidden(_))), "{refused:?}");
}

/// Versions 1 and 2, the second one served.
async fn with_two_versions() -> Fixture {
    let f = fixture(Vec::new(), |_| {});
    let me = Profile::default();
    for number in [1, 2] {
        f.store
            .commit_step(step(&me, number, number - 1, &[]))
            .await
            .unwrap();
        f.engine.insert(version(number), FakeModel::base(258));
        f.engine.serve(&version(number)).unwrap();
        let served = Event::Version {
            version: version(number),
            state: VersionState::Served,
            receipt: None,
            at: 5,
        };
        f.store.append(vec![served]).await.unwrap();
    }
    f
}

fn version(number: u64) -> PolicyVersion {
    PolicyVersion {
        profile: Profile::default(),
        number,
    }
}

fn by_hand() -> VersionState {
    VersionState::RolledBack("by an operator".to_owned())
}

#[tokio::test]
async fn versions_go_back_forward_and_pause() {
    let f = with_two_versions().await;
    let me = Profile::default();
    let steer = |action| f.rollout.steer(me.clone(), action);
    let states = |view: &PolicyView| {
        view.versions
            .iter()
            .map(|v| v.state.clone())
            .collect::<Vec<_>>()
    };
    let view = steer(PolicyAction::Rollback(None)).await.unwrap();
    assert_eq!(view.served, 1);
    assert_eq!(states(&view), [VersionState::Served, by_hand()]);
    assert!(steer(PolicyAction::Rollback(Some(5))).await.is_err());
    let view = steer(PolicyAction::Promote(2)).await.unwrap();
    assert_eq!(view.served, 2);
    assert_eq!(
        states(&view),
        [VersionState::Superseded, VersionState::Served]
    );
    let view = steer(PolicyAction::Rollback(Some(0))).await.unwrap();
    assert_eq!(view.served, 0);
    assert_eq!(states(&view), [VersionState::Superseded, by_hand()]);
    assert!(matches!(
        steer(PolicyAction::Rollback(None)).await,
        Err(Refusal::Conflict(_))
    ));
    // Not resident any more, and its files are not there: said, and nothing changes.
    f.engine.unload(&version(1));
    let refused = steer(PolicyAction::Promote(1)).await.unwrap_err();
    assert!(
        matches!(&refused, Refusal::NotFound(why) if why.contains("/nowhere")),
        "{refused}"
    );
    assert_eq!(f.rollout.policy(&me).unwrap().served, 0);
    // A record that cannot be written leaves users where they were.
    f.store.set_dead(Some("full"));
    assert!(steer(PolicyAction::Promote(2)).await.is_err());
    f.store.set_dead(None);
    assert_eq!(f.rollout.policy(&me).unwrap().served, 0);
    let paused = steer(PolicyAction::Pause).await.unwrap().paused;
    assert_eq!(paused.as_deref(), Some("paused by an operator"));
    assert_eq!(steer(PolicyAction::Resume).await.unwrap().paused, None);
}

#[tokio::test]
async fn status_shows_ones_own_and_why_nothing_trains() {
    let f = fixture(Vec::new(), |c| {
        c.unknown_clients = crate::UnknownClients::Side
    });
    f.say("s", &[user("q")], "a").await;
    let status = f.rollout.status(&someone()).unwrap();
    assert!(
        status.notices[0].starts_with("0 of 1 turns were main: "),
        "{status:?}"
    );
    assert_eq!(status.profiles.len(), 1);
    let alarms = f.rollout.alarms();
    let reasons = ["too long", "nothing to learn from", "nothing to learn from"];
    alarms.raise(&Profile::default(), reasons.into_iter());
    alarms.raise(&Profile::default(), reasons.into_iter());
    alarms.raise(&Profile::new("other").unwrap(), reasons.into_iter());
    let notices = f.rollout.status(&someone()).unwrap().notices;
    let told: Vec<_> = notices.iter().filter(|n| n.contains("in a row")).collect();
    assert_eq!(told.len(), 1, "{notices:?}");
    assert!(told[0].starts_with(
        "profile default: 2 batches in a row held nothing to learn from: nothing to learn from (4), too long (2)"
    ));
    alarms.clear(&Profile::default());
    let notices = f.rollout.status(&someone()).unwrap().notices;
    assert!(!notices.iter().any(|n| n.contains("in a row")));
    assert!(
        f.rollout
            .status(&Caller {
                scope: Scope::Chat,
                ..someone()
            })
            .is_err()
    );
    assert_eq!(f.rollout.health(), Ok(()));
}

#[tokio::test]
async fn a_withdrawn_turn_is_never_trained_on() {
    let judge = Arc::new(FakeJudge::scoring("fake", Score::Bad, &[]));
    let f = fixture(vec![judge], |_| {});
    let turn = f.say("s", &[user("q")], "a").await;
    f.say("s", &[user("q"), said("a"), user("hm")], "b").await;
    f.until("the judge's sample", || f.story(turn).samples.len() == 1)
        .await;
    f.rollout.withdraw(&someone(), turn).await.unwrap();
    let story = f.story(turn);
    assert_eq!(story.mark, Some(TurnMark::Withdrawn));
    let dropped = SampleState::Dropped("withdrawn".to_owned());
    assert_eq!(story.samples[0].2, dropped);
    assert!(f.rollout.withdraw(&someone(), TurnId(99)).await.is_err());
}

#[tokio::test]
async fn a_named_session_ends_once() {
    let f = fixture(Vec::new(), |_| {});
    f.say("s", &[user("q")], "a").await;
    let id = SessionId::new("s").unwrap();
    for _ in 0..2 {
        f.rollout.end_named(&someone(), &id).await.unwrap();
        let (record, _) = f.rollout.session(&someone(), &id).unwrap();
        assert_eq!(record.ended.unwrap().1, "client");
    }
    let other = SessionId::new("unknown").unwrap();
    assert!(f.rollout.end_named(&someone(), &other).await.is_err());
}
