//! Sessions, feedback, versions, status, AReaL's calls.

use super::*;

#[tokio::test]
async fn areals_three_calls_and_the_export() {
    let api = api();
    let answer = api
        .post(
            "/rl/start_session",
            "admin",
            &json!({"task_id": "t", "api_key": "sk-9"}),
        )
        .await;
    assert_eq!(
        answer.json(),
        json!({"session_id": "s-1", "api_key": "sk-1"})
    );
    assert_eq!(
        api.control.last(),
        "start default Some(\"t\") Some(\"sk-9\")"
    );

    let id = "chatcmpl-turn_0000000000000007";
    let answer = api
        .post(
            "/rl/set_reward",
            "session",
            &json!({"reward": 0.5, "interaction_id": id}),
        )
        .await;
    assert_eq!(answer.json(), json!({"message": "success"}));
    assert_eq!(api.control.last(), "reward 0.5 Some(TurnId(7))");
    api.post("/rl/set_reward", "session", &json!({"reward": -1}))
        .await;
    assert_eq!(api.control.last(), "reward -1 None");

    let bare = request("POST", "/rl/end_session").header("x-api-key", "session");
    let answer = api.send(bare.body(Body::empty()).unwrap()).await;
    assert_eq!(
        answer.json(),
        json!({"message": "success", "interaction_count": 4})
    );

    let body = json!({"session_id": "s-1", "discount": 0.9, "style": "concat"});
    let answer = api.post("/rl/export_trajectories", "admin", &body).await;
    assert_eq!(api.control.last(), "export s-1 0.9 Concat");
    let row = answer.json()["rows"][0].clone();
    assert_eq!(row["input_ids"], json!([1, 2]));
    assert_eq!(row["loss_mask"], json!([0, 1]));
    assert_eq!(row["logprobs"], json!([0.0, -0.5]));
    assert_eq!(row["versions"], json!([-1, 3]));
    assert_eq!(row["rewards"], 1.0);
}

#[tokio::test]
async fn rewards_that_cannot_be_given() {
    let api = api();
    for body in [
        json!({}),
        json!({"reward": "1"}),
        json!({"reward": true}),
        json!({"reward": 1e300}),
        json!({"reward": 1, "interaction_id": "nonsense"}),
    ] {
        let answer = api.post("/rl/set_reward", "session", &body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{body}");
    }
    // No JSON value holds these: infinity once read, and words that are none.
    for (path, key, body) in [
        ("/rl/set_reward", "session", r#"{"reward": 1e999}"#),
        ("/rl/set_reward", "session", r#"{"reward": -3.5e38}"#),
        ("/rl/set_reward", "session", r#"{"reward": NaN}"#),
        (
            "/v1/feedback",
            "feedback",
            r#"{"turn": "turn_1", "score": 1e39}"#,
        ),
        (
            "/v1/feedback",
            "feedback",
            r#"{"turn": "turn_1", "score": -Infinity}"#,
        ),
        (
            "/v1/feedback",
            "feedback",
            r#"{"turn": "nonsense", "score": 1}"#,
        ),
    ] {
        let sent = request("POST", path)
            .header("content-type", "application/json")
            .header("authorization", format!("Bearer {key}"));
        let answer = api.send(sent.body(body.into()).unwrap()).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{body}");
    }
    assert_eq!(api.control.last(), "", "nothing of it went further");
    let unknown = Refusal::NotFound("none yet".to_owned());
    for (refusal, status) in [
        (unknown, 400),
        (Refusal::Conflict("none yet".to_owned()), 400),
        (Refusal::Gone("ended".to_owned()), 410),
    ] {
        *api.control.refuse.lock().unwrap() = Some(refusal);
        let answer = api
            .post("/rl/set_reward", "session", &json!({"reward": 1}))
            .await;
        assert_eq!(answer.status.as_u16(), status);
    }
}

#[tokio::test]
async fn feedback_in_all_its_forms() {
    let api = api();
    let turn = "turn_0000000000000007";
    for (body, part) in [
        (
            json!({"turn": turn, "score": 0.5}),
            "Turn(TurnId(7)), score: Some(0.5)",
        ),
        (
            json!({"completion_id": format!("chatcmpl-{turn}"), "thumb": "down"}),
            "Turn(TurnId(7)), score: Some(-1.0)",
        ),
        (
            json!({"session": "s", "thumb": "up", "text": "nice"}),
            "score: Some(1.0), text: Some(\"nice\")",
        ),
        (
            json!({"session": "s", "edited": "better"}),
            "edited: Some(\"better\")",
        ),
        (
            json!({"turn": turn, "score": 0, "group": {"id": "task 7", "size": 8}}),
            "group: Some(Group { id: \"task 7\", size: 8 })",
        ),
    ] {
        let answer = api.post("/v1/feedback", "feedback", &body).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
        assert_eq!(answer.json()["turn"], turn);
        assert!(api.control.last().contains(part), "{}", api.control.last());
    }
    for body in [
        json!({"score": 1}),
        json!({"turn": turn}),
        json!({"turn": turn, "session": "s", "score": 1}),
        json!({"turn": turn, "score": 1, "thumb": "up"}),
        json!({"turn": turn, "thumb": "sideways"}),
        json!({"turn": "x", "score": 1}),
        json!({"turn": turn, "score": "1"}),
        json!({"turn": turn, "text": " "}),
    ] {
        let answer = api.post("/v1/feedback", "feedback", &body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{body}");
    }
    for (group, field) in [
        (json!("g"), "group"),
        (json!({"size": 2}), "group.id"),
        (json!({"id": 3, "size": 2}), "group.id"),
        (json!({"id": "", "size": 2}), "group.id"),
        (json!({"id": "x".repeat(201), "size": 2}), "group.id"),
        (json!({"id": "g"}), "group.size"),
        (json!({"id": "g", "size": 0}), "group.size"),
        (json!({"id": "g", "size": 1.5}), "group.size"),
        (json!({"id": "g", "size": 1025}), "group.size"),
    ] {
        let body = json!({"turn": turn, "score": 1, "group": group});
        let answer = api.post("/v1/feedback", "feedback", &body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{body}");
        assert_eq!(answer.json()["error"]["param"], field, "{body}");
    }
    let huge = format!("{{\"turn\": \"{turn}\", \"score\": 1e39}}");
    let answer = api
        .send(
            request("POST", "/v1/feedback")
                .header("x-api-key", "feedback")
                .header("content-type", "application/json")
                .body(Body::from(huge))
                .unwrap(),
        )
        .await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn sessions_by_percent_encoded_ids() {
    let api = api();
    let answer = api.get("/v1/sessions?limit=5", "feedback").await;
    assert_eq!(api.control.last(), "sessions 5");
    let row = answer.json()["sessions"][0].clone();
    assert_eq!(
        (&row["id"], &row["profile"]),
        (&json!("a/b"), &json!("default"))
    );
    assert_eq!((&row["turns"], &row["last_active"]), (&json!(3), &json!(2)));

    api.get("/v1/sessions/a%2Fb%20%E7%95%8C", "feedback").await;
    assert_eq!(api.control.last(), "session a/b 界");
    let delete = request("DELETE", "/v1/sessions/..%2F..%2Fx").header("x-api-key", "feedback");
    let answer = api.send(delete.body(Body::empty()).unwrap()).await;
    assert_eq!(answer.json()["forgotten_turns"], 1);
    assert_eq!(
        api.control.last(),
        "forget Session(SessionId(\"../../x\"), None) false"
    );
    let bad = api.get("/v1/sessions/a%0Ab", "feedback").await;
    assert_eq!(bad.status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn a_turn_is_shown_with_the_words_that_caused_its_verdict() {
    let api = api();
    let verdict = Verdict {
        judge: "rules:x".to_owned(),
        source: VerdictSource::Rules,
        reward: Some(-1.0),
        hints: vec!["shorter".to_owned()],
        evidence: Some("too long".to_owned()),
        votes: vec![],
        group: None,
    };
    let turn = Turn {
        id: TurnId(7),
        profile: Profile::default(),
        session: SessionId::new("s").unwrap(),
        parent: Some(TurnId(6)),
        segment: Segment::Extends,
        kind: TurnKind::Main,
        reason: "default".to_owned(),
        version: PolicyVersion::base(Profile::default()),
        prompt: vec![1],
        reply: Reply::default(),
        temperature: 1.0,
        finish: FinishReason::End,
        messages: vec![Message::user("q")],
        tools: vec![],
        answer: Message::assistant("a"),
        created: 1,
        completed: 2,
    };
    *api.control.stories.lock().unwrap() = vec![TurnStory {
        turn,
        next: Some(NextState {
            messages: vec![Message::user("too long")],
        }),
        mark: None,
        no_verdict: None,
        verdicts: vec![(VerdictId(1), verdict, None)],
        samples: vec![],
    }];
    let shown = api.get("/v1/sessions/s", "feedback").await.json()["turns"][0].clone();
    assert_eq!(shown["id"], "turn_0000000000000007");
    assert_eq!(shown["parent"], "turn_0000000000000006");
    assert_eq!(
        (&shown["kind"], &shown["reason"]),
        (&json!("main"), &json!("default"))
    );
    assert_eq!(shown["version"], 0);
    assert_eq!(shown["messages"][0]["content"], "q");
    assert_eq!(shown["reply"]["content"], "a");
    assert_eq!(shown["next_state"][0]["content"], "too long");
    assert_eq!(shown["verdicts"][0]["reward"], -1.0);
    assert_eq!(shown["verdicts"][0]["evidence"], "too long");
    assert_eq!(shown["state"], "judged");
}

#[tokio::test]
async fn versions_are_shown_and_steered() {
    let api = api();
    let view = api.get("/v1/policy?profile=other", "admin").await.json();
    assert_eq!(api.control.last(), "policy other");
    assert_eq!(
        (&view["profile"], &view["served"]),
        (&json!("other"), &json!(0))
    );
    let version = view["versions"][0].clone();
    assert_eq!(
        (&version["version"], &version["parent"]),
        (&json!(2), &json!(0))
    );
    assert_eq!(
        (&version["state"], &version["why"]),
        (&json!("rejected"), &json!("worse"))
    );
    assert_eq!(
        version["gate"]["checks"][0]["value"],
        json!(null),
        "NaN is null"
    );
    assert_eq!(version["receipt"]["weights_hash"], "ab");
    assert_eq!(version["samples"], json!([5]));
    let mut shown = api.get("/v1/policy/versions/2", "admin").await.json();
    let lessons = shown.as_object_mut().unwrap().remove("lessons").unwrap();
    assert_eq!(lessons[0]["evidence"], "thanks");
    assert_eq!(shown, version);
    assert_eq!(
        api.get("/v1/policy/versions/0", "admin").await.json()["state"],
        "served"
    );
    assert_eq!(
        api.get("/v1/policy/versions/9", "admin").await.status,
        StatusCode::NOT_FOUND
    );
    assert_eq!(
        api.get("/v1/policy/versions/x", "admin").await.status,
        StatusCode::BAD_REQUEST
    );
    assert_eq!(
        api.get("/v1/policy?profile=..", "admin").await.status,
        StatusCode::BAD_REQUEST
    );

    for (path, body, call) in [
        ("rollback", json!({}), "steer default Rollback(None)"),
        (
            "rollback",
            json!({"profile": "p", "version": 0}),
            "steer p Rollback(Some(0))",
        ),
        ("promote", json!({"version": 2}), "steer default Promote(2)"),
        ("pause", json!({}), "steer default Pause"),
        ("resume", json!({"profile": "p"}), "steer p Resume"),
    ] {
        let answer = api
            .post(&format!("/v1/policy/{path}"), "admin", &body)
            .await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
        assert_eq!(api.control.last(), call);
    }
    let answer = api.post("/v1/policy/promote", "admin", &json!({})).await;
    assert_eq!(answer.json()["error"]["param"], "version");
}

#[tokio::test]
async fn the_status() {
    let status = api().get("/v1/status", "feedback").await.json();
    let groups = json!({"algorithm": "grpo", "groups": 8, "max_staleness": 2, "reply_limit": null});
    assert_eq!(status["groups"], groups);
    assert_eq!(
        status["turns"],
        json!([{"kind": "side", "reason": "title", "count": 2}])
    );
    assert_eq!(status["samples"], json!({"pending": 1}));
    assert_eq!(status["notices"], json!(["no judge"]));
    let judge = &status["judges"][0];
    assert_eq!(judge["votes"], json!({"valid": 7, "void": 3}));
    assert_eq!(judge["canaries"]["error"], json!(0.25));
    assert_eq!(
        judge["canaries"]["examples"][0],
        "t001 (\"thanks\" said bad, is good)"
    );
    assert_eq!(status["profiles"][0]["versions"][0]["version"], 2);
}

#[tokio::test]
async fn a_session_is_ended_by_its_name() {
    let api = api();
    let path = "/v1/sessions/a%2Fb%3A1/end";
    let answer = api.post(path, "feedback", &json!({})).await;
    assert_eq!(answer.json(), json!({"id": "a/b:1", "ended": true}));
    assert_eq!(api.control.last(), "end a/b:1");
    api.post("/v1/sessions/end/end", "feedback", &json!({}))
        .await;
    assert_eq!(api.control.last(), "end end");
    assert_eq!(api.post(path, "chat", &json!({})).await.status, 403);
}

#[tokio::test]
async fn versions_are_compared_taken_in_and_handed_out() {
    let api = api();
    let diff = api
        .get("/v1/policy/diff?profile=p&from=0&to=2", "admin")
        .await
        .json();
    assert_eq!(api.control.calls.lock().unwrap()[1], "diff p 0 2");
    assert_eq!(
        (&diff["kl"], &diff["answers"][0]["to"]),
        (&json!(0.25), &json!("short"))
    );
    assert_eq!(diff["lessons"][0]["request"], "be brief");
    let bad = api.get("/v1/policy/diff?from=x", "admin").await;
    assert_eq!(bad.status, StatusCode::BAD_REQUEST);

    let import = json!({"profile": "p", "path": "/a/b"});
    let answer = api.post("/v1/policy/import", "admin", &import).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(api.control.last(), "steer p Import(\"/a/b\")");
    let answer = api.post("/v1/policy/import", "admin", &json!({})).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);

    let file = |name: &str| format!("/v1/policy/versions/2/{name}?profile=p");
    let answer = api.get(&file("adapter_config.json"), "admin").await;
    assert_eq!(
        (answer.status, answer.body.as_str()),
        (StatusCode::OK, "{}")
    );
    assert_eq!(api.control.last(), "adapter p 2");
    for name in [
        "adapter_model.safetensors",
        "optimizer.safetensors",
        "..%2Fadmin.key",
    ] {
        let answer = api.get(&file(name), "admin").await;
        assert_eq!(answer.status, StatusCode::NOT_FOUND, "{name}");
    }
}

#[tokio::test]
async fn forgetting_is_asked_about_and_then_done() {
    let api = api();
    let ask = json!({"turn": "turn_0000000000000007", "dry_run": true});
    let told = api.post("/v1/forget", "feedback", &ask).await.json();
    assert_eq!(api.control.last(), "forget Turn(TurnId(7)) true");
    assert_eq!(
        (&told["forgotten"], &told["seconds"]),
        (&json!(false), &json!(12.5))
    );
    assert_eq!(
        (&told["back_to"], &told["replay"]),
        (&json!(0), &json!([2]))
    );
    let done = api
        .post("/v1/forget", "feedback", &json!({"profile": "p"}))
        .await
        .json();
    assert_eq!(done["forgotten"], true);
    assert_eq!(done["proof"]["found"], json!([]));
    let ask = json!({"session": "s", "profile": "p", "dry_run": true});
    api.post("/v1/forget", "admin", &ask).await;
    let last = api.control.last();
    assert!(
        last.contains("SessionId(\"s\")") && last.contains("Some(Profile(\"p\"))"),
        "{last}"
    );
    for bad in [
        json!({}),
        json!({"turn": "x"}),
        json!({"turn": "turn_0000000000000007", "profile": "p"}),
        json!({"turn": "turn_0000000000000007", "session": "s"}),
        json!({"profile": ".."}),
    ] {
        let answer = api.post("/v1/forget", "feedback", &bad).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{bad}");
    }
}
