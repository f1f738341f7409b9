//! Where the session, the kind and the end come from.

use super::*;

async fn hints(headers: &[(&str, &str)], more: Value) -> RequestHints {
    let api = api();
    let answer = api
        .post_with("/v1/chat/completions", headers, &ask(more))
        .await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    api.recorder.last_request().hints
}

#[tokio::test]
async fn the_first_session_id_present_counts() {
    let all_headers = [
        ("x-session-id", "1"),
        ("thread-id", "2"),
        ("x-claude-code-session-id", "3"),
        ("x-claude-code-agent-id", "agent"),
        ("session_id", "4"),
    ];
    let body = json!({
        "session_id": "5", "prompt_cache_key": "6",
        "metadata": {"session_id": "7", "user_id": "{\"session_id\": \"8\"}"},
        "previous_response_id": "9", "user": "10",
        "messages": [{"role": "user", "content": "hi\nRuntime: agent=main | sessionId=11 | model=x"}],
    });
    let drop_body = |fields: &[&str]| {
        let mut body = body.clone();
        for field in fields {
            body.as_object_mut().unwrap().remove(*field);
        }
        body
    };
    let inner = {
        let mut body = drop_body(&["session_id", "prompt_cache_key"]);
        body["metadata"]
            .as_object_mut()
            .unwrap()
            .remove("session_id");
        body
    };
    let early = ["session_id", "prompt_cache_key", "metadata"];
    type Headers<'a> = &'a [(&'a str, &'a str)];
    let cases: Vec<(Headers, Value, &str)> = vec![
        (&all_headers, body.clone(), "1"),
        (&all_headers[1..], body.clone(), "2"),
        (&all_headers[2..], body.clone(), "3:agent"),
        (&all_headers[4..], body.clone(), "4"),
        (&[("x-session-id", " ")], body.clone(), "5"),
        (&[], drop_body(&["session_id"]), "6"),
        (&[], drop_body(&["session_id", "prompt_cache_key"]), "7"),
        (&[], inner, "8"),
        (&[], drop_body(&early), "9"),
        (
            &[],
            drop_body(&[&early[..], &["previous_response_id"]].concat()),
            "10",
        ),
        (
            &[],
            drop_body(&[&early[..], &["previous_response_id", "user"]].concat()),
            "11",
        ),
    ];
    for (headers, body, expected) in cases {
        let claim = hints(headers, body).await.session.unwrap();
        assert_eq!(claim.id, expected, "{}", claim.source);
    }
    let never = [
        ("x-client-request-id", "a"),
        ("traceparent", "b"),
        ("x-session-affinity", "c"),
    ];
    assert_eq!(hints(&never, json!({})).await.session, None);
}

#[tokio::test]
async fn any_text_is_a_session_id_but_not_a_long_one() {
    for id in [
        "../../etc/passwd",
        "/etc/x",
        "...",
        "%2e%2e%2f",
        "界界",
        "CON",
        "a,b",
    ] {
        let api = api();
        let answer = api
            .post_with(
                "/v1/chat/completions",
                &[("x-session-id", id)],
                &ask(json!({})),
            )
            .await;
        assert_eq!(answer.status, StatusCode::OK, "{id}");
        let told = answer.header("x-chela-session");
        let decoded = percent_encoding::percent_decode_str(told)
            .decode_utf8()
            .unwrap();
        assert_eq!(decoded, id);
    }
    let api = api();
    let long = "x".repeat(257);
    for bad in [long.as_str(), "a\nb", "a\u{0}b", ".", ".."] {
        let answer = api.chat(ask(json!({"session_id": bad}))).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        assert_eq!(answer.json()["error"]["param"], "body session_id");
    }
}

#[tokio::test]
async fn kind_and_end_come_from_header_or_body() {
    let found = hints(
        &[("X-Turn-Type", "Side"), ("X-Session-Done", "true")],
        json!({}),
    )
    .await;
    assert_eq!(
        (found.kind, found.session_done),
        (Some(DeclaredKind::Side), true)
    );
    let found = hints(&[], json!({"turn_type": "main", "session_done": true})).await;
    assert_eq!(
        (found.kind, found.session_done),
        (Some(DeclaredKind::Main), true)
    );
    let found = hints(&[("x-turn-type", "")], json!({})).await;
    assert_eq!((found.kind, found.session_done), (None, false));
    let api = api();
    let wrong = [("x-turn-type", "maybe"), ("x-session-done", "soon")];
    for (name, value) in wrong {
        let answer = api
            .post_with("/v1/chat/completions", &[(name, value)], &ask(json!({})))
            .await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        assert_eq!(answer.json()["error"]["param"], name);
    }
}

#[tokio::test]
async fn secrets_reach_no_record() {
    let found = hints(
        &[
            ("authorization", "Bearer k-1"),
            ("x-api-key", "k-2"),
            ("cookie", "k-3"),
            ("x-auth-token", "k-4"),
            ("user-agent", "agent/1"),
        ],
        json!({}),
    )
    .await;
    assert!(
        found
            .headers
            .contains(&("user-agent".to_owned(), "agent/1".to_owned()))
    );
    assert!(
        found.headers.iter().all(|(_, value)| !value.contains("k-")),
        "{:?}",
        found.headers
    );
}

#[tokio::test]
async fn session_fields_are_not_rendered_nor_called_ignored() {
    let api = api();
    let plain = api.chat(ask(json!({}))).await;
    let marked = api
        .chat(ask(
            json!({"session_id": "s", "turn_type": "side", "session_done": false, "user": "u",
            "prompt_cache_key": "k", "metadata": {}}),
        ))
        .await;
    assert_eq!(
        (
            plain.header("x-chela-ignored"),
            marked.header("x-chela-ignored")
        ),
        ("", "")
    );
    let requests = api.engine.requests();
    assert_eq!(requests[0].prompt, requests[1].prompt);
}
