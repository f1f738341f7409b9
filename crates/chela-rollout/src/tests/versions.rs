//! Versions compared, taken in, and forgotten with what they learnt.

use super::*;
use chela_core::registry::Undo;

fn version(number: u64) -> PolicyVersion {
    PolicyVersion {
        profile: Profile::default(),
        number,
    }
}

/// An adapter of the fakes, in a folder of its own.
fn adapter(dir: &std::path::Path, parameter: f32) {
    std::fs::create_dir_all(dir).unwrap();
    std::fs::write(dir.join("adapter_config.json"), "{}").unwrap();
    let bytes: Vec<u8> = (0..FAKE_PARAMETERS)
        .flat_map(|i| (parameter * i as f32).to_le_bytes())
        .collect();
    std::fs::write(dir.join("adapter_model.safetensors"), bytes).unwrap();
}

struct Trained {
    f: Fixture,
    dir: tempfile::TempDir,
    turns: Vec<TurnId>,
}

/// Two sessions, each judged and trained into a version of its own: 1, and on it 2, which is served.
async fn trained() -> Trained {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_path_buf();
    let f = fixture(Vec::new(), |c| c.data_dir = path.clone());
    let mut turns = Vec::new();
    for number in [1, 2] {
        let name = format!("s{number}");
        let turn = f.say(&name, &[user("How high is it?")], "very").await;
        f.rollout
            .feedback(
                &someone(),
                Feedback {
                    target: FeedbackTarget::Turn(turn),
                    score: Some(-1.0),
                    text: Some("say it in metres".to_owned()),
                    edited: None,
                    group: None,
                },
            )
            .await
            .unwrap();
        f.until("a sample", || !f.story(turn).samples.is_empty())
            .await;
        let sample = f.story(turn).samples[0].0;
        f.store.lease(vec![sample]).await.unwrap();
        let mut commit = step(&Profile::default(), number, number - 1, &[sample]);
        commit.version.metrics = vec![("seconds".to_owned(), 8.0)];
        let name = commit.version.checkpoint.clone().unwrap();
        adapter(&dir.path().join(name), number as f32 * 0.1);
        f.store.commit_step(commit).await.unwrap();
        let home = dir.path().join(format!("adapters/default/{number:08}"));
        f.engine
            .load(version(number), Weights::Folder(home))
            .await
            .unwrap();
        f.engine.serve(&version(number)).unwrap();
        let served = Event::Version {
            version: version(number),
            state: VersionState::Served,
            receipt: None,
            at: 5,
        };
        f.store.append(vec![served]).await.unwrap();
        turns.push(turn);
    }
    Trained { f, dir, turns }
}

#[tokio::test]
async fn forgetting_is_told_before_and_takes_versions_along() {
    let Trained { f, dir, turns } = trained().await;
    let me = Profile::default();
    let what = ForgetRequest::Session(session("s2"), None);
    let told = f
        .rollout
        .forget(&someone(), what.clone(), true)
        .await
        .unwrap();
    assert_eq!(told.plan.turns, [turns[1]]);
    assert_eq!(told.plan.trained.len(), 1);
    let undo = Undo {
        versions: vec![2],
        back_to: Some(1),
        replay: vec![2],
    };
    assert_eq!(told.undo, undo);
    assert_eq!((told.samples_again, told.seconds), (0, 0.0));
    assert_eq!(told.proof, None);
    assert_eq!(f.engine.served(&me).number, 2, "asking changes nothing");
    assert_eq!(f.story(turns[1]).samples.len(), 1);

    let done = f.rollout.forget(&someone(), what, false).await.unwrap();
    assert!(done.proof.is_some());
    assert_eq!(f.engine.served(&me).number, 1);
    assert_eq!(f.engine.forgotten(), std::slice::from_ref(&me));
    assert!(f.store.story(turns[1]).unwrap().is_none());
    assert!(!dir.path().join("adapters/default/00000002").exists());
    assert!(dir.path().join("adapters/default/00000001").exists());
    let view = f.rollout.policy(&me).unwrap();
    assert!(matches!(view.versions[1].state, VersionState::Forgotten(_)));
    assert_eq!(view.replays, [2]);
    let refused = f
        .rollout
        .steer(me.clone(), PolicyAction::Promote(2))
        .await
        .unwrap_err();
    assert!(matches!(refused, Refusal::Gone(_)), "{refused}");
    let notices = f.rollout.status(&admin()).unwrap().notices;
    assert!(
        notices.iter().any(|n| n.contains("made again")),
        "{notices:?}"
    );
    // What is not there, or not one's own, or not one's to forget.
    for (caller, what, word) in [
        (
            someone(),
            ForgetRequest::Session(session("s2"), None),
            "not known",
        ),
        (
            admin(),
            ForgetRequest::Session(session("s1"), Some(profile("other"))),
            "not known",
        ),
        (
            someone(),
            ForgetRequest::Session(session("s1"), Some(profile("other"))),
            "admin",
        ),
        (someone(), ForgetRequest::Turn(TurnId(3)), "not known"),
        (someone(), ForgetRequest::Profile(me.clone()), "admin"),
        (admin(), ForgetRequest::Profile(profile("nobody")), "nobody"),
    ] {
        let error = f.rollout.forget(&caller, what, false).await.unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[tokio::test]
async fn forgetting_a_profile_leaves_its_name_and_its_last_number() {
    let Trained { f, dir, .. } = trained().await;
    let me = Profile::default();
    let figures = dir.path().join(chela_core::registry::METRICS);
    std::fs::create_dir_all(figures.join("default")).unwrap();
    std::fs::create_dir_all(figures.join("other")).unwrap();
    for name in ["default/steps.jsonl", "default/events", "other/steps.jsonl"] {
        std::fs::write(figures.join(name), "{}").unwrap();
    }
    let what = ForgetRequest::Profile(me.clone());
    let done = f.rollout.forget(&admin(), what, false).await.unwrap();
    assert_eq!(done.undo.versions, [1, 2]);
    assert_eq!(f.engine.served(&me).number, 0);
    assert!(f.store.profiles().unwrap().is_empty());
    assert_eq!(f.store.last_version(&me).unwrap(), 2);
    assert!(!dir.path().join("adapters/default/00000001").exists());
    let left = std::fs::read_dir(figures).unwrap();
    let left: Vec<_> = left.map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["other"], "the profile's figures went");
    // The conversation goes on as a new one.
    let turn = f.say("s1", &[user("hello")], "hi").await;
    assert_eq!(f.story(turn).turn.parent, None);
}

#[tokio::test]
async fn a_step_that_holds_what_is_to_be_forgotten_is_waited_for() {
    let Trained { f, turns, .. } = trained().await;
    let third = f.say("s3", &[user("How deep?")], "quite").await;
    let feedback = Feedback {
        target: FeedbackTarget::Turn(third),
        score: Some(1.0),
        text: None,
        edited: None,
        group: None,
    };
    f.rollout.feedback(&someone(), feedback).await.unwrap();
    f.until("a sample", || !f.story(third).samples.is_empty())
        .await;
    let sample = f.story(third).samples[0].0;
    f.store.lease(vec![sample]).await.unwrap();
    let rollout = f.rollout.clone();
    let forgetting = tokio::spawn(async move {
        let what = ForgetRequest::Session(session("s3"), None);
        rollout.forget(&someone(), what, false).await
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(f.store.story(third).unwrap().is_some());
    // The step is finished meanwhile: the plan is made anew and takes its version along.
    f.store
        .commit_step(step(&Profile::default(), 3, 2, &[sample]))
        .await
        .unwrap();
    let done = forgetting.await.unwrap().unwrap();
    assert_eq!(done.undo.versions, [3]);
    assert_eq!(f.engine.served(&Profile::default()).number, 2);
    assert!(f.store.story(turns[0]).unwrap().is_some());
}

#[tokio::test]
async fn two_versions_are_compared_in_words() {
    let Trained { f, .. } = trained().await;
    let me = Profile::default();
    let chat = f.chat.clone();
    f.engine.answer_with(move |policy, _| {
        let text = match policy {
            PolicyRef::Version(v) if v.number == 2 => "in metres",
            _ => "high",
        };
        let mut tokens = chat.encode(text).unwrap();
        tokens.push(END);
        tokens.into()
    });
    let diff = f.rollout.diff(me.clone(), 0, 2).await.unwrap();
    assert_eq!((diff.steps, diff.lessons.len()), (Some(2), 2));
    assert!(!diff.own_prompts && diff.answers.len() == 4);
    assert_eq!(
        (diff.answers[0].from.as_str(), diff.answers[0].to.as_str()),
        ("high", "in metres")
    );
    assert_eq!(diff.tokens, (5.0, 10.0));
    assert!(diff.kl.unwrap() > 1e-3, "{:?}", diff.kl);
    let lesson = &diff.lessons[1];
    assert_eq!(
        (
            lesson.version,
            lesson.request.as_str(),
            lesson.reply.as_str()
        ),
        (2, "How high is it?", "very")
    );
    assert_eq!(lesson.evidence.as_deref(), Some("say it in metres"));
    assert!(lesson.explicit);
    // The same version does not differ from itself.
    let same = f.rollout.diff(me.clone(), 2, 2).await.unwrap();
    assert_eq!((same.steps, same.lessons.len()), (Some(0), 0));
    assert!(same.kl.unwrap() < 1e-6);
    let back = f.rollout.diff(me.clone(), 2, 1).await.unwrap();
    assert_eq!((back.steps, back.lessons.len()), (Some(1), 1));
    assert!(f.rollout.diff(me, 0, 9).await.is_err());
}

#[tokio::test]
async fn an_adapter_from_elsewhere_becomes_a_candidate() {
    let Trained { f, dir, .. } = trained().await;
    let me = Profile::default();
    let from = dir.path().join("elsewhere");
    let import = |path: &std::path::Path| {
        f.rollout
            .steer(me.clone(), PolicyAction::Import(path.to_path_buf()))
    };
    // Nothing there, then something that is no adapter: said, and nothing is left behind.
    let error = import(&from).await.unwrap_err();
    assert!(error.to_string().contains("adapter_config.json"), "{error}");
    adapter(&from, 0.3);
    std::fs::write(from.join("adapter_model.safetensors"), "short").unwrap();
    let error = import(&from).await.unwrap_err();
    assert!(matches!(error, Refusal::Invalid { .. }), "{error}");
    assert!(error.to_string().contains("elsewhere"), "{error}");
    assert!(!dir.path().join("adapters/default/00000003").exists());
    assert_eq!(f.rollout.policy(&me).unwrap().versions.len(), 2);

    adapter(&from, 0.3);
    let view = import(&from).await.unwrap();
    let new = &view.versions[2];
    assert_eq!(
        (new.parent, new.state.clone()),
        (2, VersionState::Candidate)
    );
    assert!(matches!(&new.origin, VersionOrigin::Imported(path) if path.ends_with("elsewhere")));
    assert_eq!(view.served, 2, "the gate comes first");
    let again = import(&from).await.unwrap_err();
    assert!(matches!(again, Refusal::Conflict(_)), "{again}");
    // Nor does an operator get past it.
    let refused = f.rollout.steer(me, PolicyAction::Promote(3)).await;
    assert!(matches!(refused, Err(Refusal::Conflict(_))), "{refused:?}");
}

#[tokio::test]
async fn nobody_is_pointed_at_files_that_are_gone() {
    let Trained { f, dir, .. } = trained().await;
    let me = Profile::default();
    // As after a start: the engine knows where it lies and has not read it.
    let home = dir.path().join("adapters/default/00000001");
    f.engine.unload(&version(1));
    f.engine
        .register(version(1), Weights::Folder(home.clone()), None);
    std::fs::remove_dir_all(&home).unwrap();
    let refused = f
        .rollout
        .steer(me.clone(), PolicyAction::Rollback(Some(1)))
        .await
        .unwrap_err();
    assert!(
        matches!(&refused, Refusal::Conflict(why) if why.contains("00000001")),
        "{refused}"
    );
    assert_eq!(f.engine.served(&me).number, 2);
    assert_eq!(f.rollout.policy(&me).unwrap().served, 2);
}
