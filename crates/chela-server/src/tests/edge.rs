//! Host, Origin, unknown paths, health, and the end.

use super::*;
use crate::server::Phase;

async fn send(api: &Api, method: &str, path: &str, headers: &[(&str, &str)]) -> Answer {
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    api.send(request.body(Body::empty()).unwrap()).await
}

#[tokio::test]
async fn only_bound_names_are_answered() {
    let api = api();
    for host in ["here", "HERE:80", "here.:80"] {
        assert_eq!(
            send(&api, "GET", "/health", &[("host", host)]).await.status,
            200,
            "{host}"
        );
    }
    for host in ["evil.example", "here.evil.example:80", ""] {
        let answer = send(&api, "GET", "/health", &[("host", host)]).await;
        assert_eq!(answer.status, StatusCode::MISDIRECTED_REQUEST, "{host}");
        assert!(answer.json()["error"]["message"].is_string());
    }
    assert_eq!(
        send(&api, "GET", "/health", &[]).await.status,
        StatusCode::MISDIRECTED_REQUEST
    );
}

#[tokio::test]
async fn foreign_pages_may_not_call_and_listed_ones_may() {
    let api = api_with(|app| app.config.cors_origins = vec!["http://app.example".to_owned()]);
    let call = |origin: &'static str, path: &'static str| {
        let headers = [("host", "here:1"), ("origin", origin)];
        let api = &api;
        async move { send(api, "GET", path, &headers).await }
    };
    for foreign in [
        "http://evil.example",
        "null",
        "http://here:2",
        "http://app.example.evil",
    ] {
        let answer = call(foreign, "/health").await;
        assert_eq!(answer.status, StatusCode::FORBIDDEN, "{foreign}");
        assert!(!answer.headers.contains_key("access-control-allow-origin"));
    }
    let own = call("http://here:1", "/health").await;
    assert_eq!(own.status, StatusCode::OK);
    for path in ["/health", "/nowhere", "/v1/policy"] {
        let answer = call("http://app.example", path).await;
        assert_eq!(
            answer.header("access-control-allow-origin"),
            "http://app.example",
            "{path}"
        );
        assert!(
            answer
                .header("access-control-expose-headers")
                .contains("x-chela-turn")
        );
        assert_eq!(answer.header("vary"), "origin");
    }
}

#[tokio::test]
async fn preflights_need_no_key() {
    let api = api_with(|app| {
        app.config.cors_origins = vec!["http://app.example".to_owned()];
        app.gatekeeper = Arc::new(FakeGate { strict: true });
    });
    let headers = [
        ("host", "here:1"),
        ("origin", "http://app.example"),
        ("access-control-request-method", "POST"),
        (
            "access-control-request-headers",
            "authorization, x-session-id",
        ),
    ];
    let answer = send(&api, "OPTIONS", "/v1/chat/completions", &headers).await;
    assert_eq!(answer.status, StatusCode::NO_CONTENT);
    assert_eq!(
        answer.header("access-control-allow-headers"),
        "authorization, x-session-id"
    );
    assert!(
        answer
            .header("access-control-allow-methods")
            .contains("POST")
    );
    let mut foreign = headers;
    foreign[1] = ("origin", "http://evil.example");
    let answer = send(&api, "OPTIONS", "/v1/chat/completions", &foreign).await;
    assert_eq!(answer.status, StatusCode::FORBIDDEN);
}

#[tokio::test]
async fn unknown_paths_and_methods_are_json() {
    let api = api();
    let answer = api.get("/v2/nothing", "").await;
    assert_eq!(answer.status, StatusCode::NOT_FOUND);
    assert_eq!(answer.json()["error"]["code"], "unknown_path");
    let answer = api.get("/v1/chat/completions", "").await;
    assert_eq!(answer.status, StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(answer.json()["error"]["code"], "method_not_allowed");
    assert_eq!(answer.header("allow"), "POST");
}

#[tokio::test]
async fn health_says_when_the_engine_or_the_store_is_dead() {
    let api = api();
    for path in ["/health", "/healthz", "/ready"] {
        assert_eq!(api.get(path, "").await.status, StatusCode::OK);
    }
    api.engine.set_health(Err("its thread died".to_owned()));
    let answer = api.get("/health", "").await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(answer.body.contains("its thread died"));
    api.engine.set_health(Ok(()));
    api.control
        .sick
        .store(true, std::sync::atomic::Ordering::SeqCst);
    assert!(
        api.get("/ready", "")
            .await
            .body
            .contains("the disk is full")
    );
}

#[tokio::test]
async fn while_the_server_ends_new_requests_are_told_to_come_back() {
    let api = api();
    api.server.phase.send_replace(Phase::Draining);
    let answer = api.chat(ask(json!({}))).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.header("retry-after"), "5");
    assert!(api.recorder.admitted.lock().unwrap().is_empty());
    assert_eq!(api.get("/health", "").await.status, StatusCode::OK);
    assert_eq!(
        api.get("/ready", "").await.status,
        StatusCode::SERVICE_UNAVAILABLE
    );
}

#[tokio::test]
async fn a_whole_answer_is_cut_too_when_the_grace_time_is_over() {
    let api = api();
    api.engine.hold();
    let body = ask(json!({}));
    let (answer, ()) = tokio::join!(api.chat(body), async {
        until("sampling", || api.engine.running() == 1).await;
        api.server.phase.send_replace(Phase::Cut);
    });
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    api.server.tasks.join().await;
    assert_eq!(api.recorder.finishes(), [(0, FinishReason::Aborted)]);
    api.server.open.idle().await;
}

#[tokio::test]
async fn the_page_holds_no_data_and_loads_nothing() {
    let api = api_with(|app| app.gatekeeper = Arc::new(FakeGate { strict: true }));
    let answer = api
        .send(request("GET", "/").body(Body::empty()).unwrap())
        .await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(answer.header("content-type"), "text/html; charset=utf-8");
    for never in [
        "http://",
        "https://",
        "innerHTML",
        "insertAdjacentHTML",
        "document.write",
        "src=",
        "<link",
    ] {
        assert!(!answer.body.contains(never), "{never}");
    }
    // What it fetches is really there.
    for path in [
        "/v1/status",
        "/v1/sessions",
        "/v1/policy/",
        "/v1/policy/diff",
        "/v1/policy/versions/",
        "/v1/forget",
    ] {
        assert!(answer.body.contains(path), "{path}");
        assert!(
            crate::ROUTES.iter().any(|r| r.path.starts_with(path)),
            "{path}"
        );
    }
}

#[tokio::test]
async fn metrics_count_requests_tokens_and_kinds_with_reasons() {
    let api = api();
    api.reply("abc");
    api.chat(ask(json!({"max_tokens": 2}))).await;
    api.chat(ask(json!({"temperature": -1}))).await;
    let answer = api.get("/metrics", "").await;
    assert_eq!(answer.status, StatusCode::OK);
    assert!(
        answer
            .header("content-type")
            .starts_with("application/openmetrics-text")
    );
    let prompt = api.engine.requests()[0].prompt.len();
    for line in [
        "chela_requests_total{route=\"/v1/chat/completions\",status=\"200\"} 1",
        "chela_requests_total{route=\"/v1/chat/completions\",status=\"400\"} 1",
        "chela_replies_total{reason=\"length\"} 1",
        "chela_generation_tokens_total 2",
        &format!("chela_prompt_tokens_total {prompt}"),
        "chela_time_to_first_token_seconds_count 1",
        "chela_turns{kind=\"side\",reason=\"title\"} 2",
        "chela_judged{judge=\"rules:too-long\",verdict=\"bad\"} 4",
        "chela_judge_error{name=\"self\"} 0.25",
        "chela_judge_canaries{judge=\"self\",outcome=\"right\"} 15",
        "chela_judge_canaries{judge=\"self\",outcome=\"abstained\"} 2",
        "chela_judge_votes{judge=\"self\",outcome=\"void\"} 3",
        "chela_judge_hinted{name=\"self\"} 2",
        "chela_memory_bytes{part=\"base\"} 5000",
        "chela_memory_bytes{part=\"cache\"} 300",
    ] {
        assert!(
            answer.body.lines().any(|l| l == line),
            "{line}\n{}",
            answer.body
        );
    }
    assert!(answer.body.ends_with("# EOF\n"));
    assert!(!answer.body.contains("secret"), "no names of profiles");
    let figures = |profile: &str| {
        [
            format!("chela_train_loss{{profile=\"{profile}\"}} 0.5"),
            format!("chela_train_ratio_p5{{profile=\"{profile}\"}} 0.25"),
            format!("chela_train_version{{profile=\"{profile}\"}} 2"),
            format!("chela_train_paused{{profile=\"{profile}\"}} 0"),
            format!("chela_train_steps_old{{profile=\"{profile}\",steps=\"8_and_more\"}} 3.0"),
        ]
    };
    let all = api.get("/metrics", "admin").await.body;
    for line in figures("default") {
        assert!(answer.body.contains(&line), "{line}\n{}", answer.body);
        assert!(all.contains(&line), "{line}");
    }
    assert!(!all.contains("kl_to_base{"), "NaN is no figure");
    for line in figures("secret") {
        assert!(all.contains(&line), "{line}\n{all}");
    }
    for key in ["chat", "feedback", "session"] {
        let body = api.get("/metrics", key).await.body;
        assert!(!body.contains("secret"), "{key}");
    }
}

#[tokio::test]
async fn one_profiles_crowd_is_told_to_wait() {
    let api = api_with(|app| app.config.profile_requests = 2);
    let held: Vec<_> = (0..2)
        .map(|_| api.server.enter(&chela_core::Profile::default()).unwrap())
        .collect();
    for (path, body) in [
        ("/v1/chat/completions", ask(json!({}))),
        ("/v1/messages", ask(json!({"max_tokens": 5}))),
        ("/v1/responses", json!({"input": "a"})),
        ("/v1/completions", json!({"prompt": "a"})),
    ] {
        let answer = api.post(path, "chat", &body).await;
        assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS, "{path}");
        assert_eq!(answer.headers["retry-after"], "1");
        assert_eq!(answer.json()["error"]["type"], "rate_limit_error");
    }
    let other = chela_core::Profile::new("other").unwrap();
    assert!(api.server.enter(&other).is_ok(), "others are answered");
    drop(held);
    let answer = api
        .post("/v1/chat/completions", "chat", &ask(json!({})))
        .await;
    assert_eq!(answer.status, StatusCode::OK);
}
