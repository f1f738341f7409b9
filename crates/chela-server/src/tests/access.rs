//! Who may call what: every row of the table with every kind of key.

use super::*;
use crate::{Access, ROUTES};

fn allowed(access: Access, key: &str) -> bool {
    match access {
        Access::Open => true,
        Access::Chat => true,
        Access::Feedback => matches!(key, "feedback" | "admin"),
        Access::Admin => key == "admin",
        Access::SessionKey => key == "session",
    }
}

#[tokio::test]
async fn every_route_with_every_key() {
    let api = api();
    for route in ROUTES {
        let id = if route.path.contains("responses") {
            "resp_turn_0000000000000007"
        } else {
            "2"
        };
        let path = route
            .path
            .replace("{*id}", "org/base")
            .replace("{id}", id)
            .replace("{file}", "adapter_config.json");
        for key in ["", "unknown", "chat", "session", "feedback", "admin"] {
            *api.control.stories.lock().unwrap() = vec![responses::earlier(7)];
            let body = match route.path {
                p if p.ends_with("chat/completions") => ask(json!({})),
                p if p.ends_with("/responses") => json!({"input": "a"}),
                p if p.contains("/messages") => ask(json!({"max_tokens": 5})),
                p if p.ends_with("completions") => json!({"prompt": "a"}),
                "/rl/set_reward" => json!({"reward": 1}),
                "/rl/export_trajectories" => json!({"session_id": "s"}),
                "/v1/feedback" => json!({"session": "s", "score": 1}),
                "/v1/policy/promote" => json!({"version": 2}),
                "/v1/policy/import" => json!({"path": "/somewhere"}),
                "/v1/forget" => json!({"session": "s"}),
                _ => json!({}),
            };
            let mut request =
                request(route.method, &path).header("content-type", "application/json");
            if !key.is_empty() {
                request = request.header("x-api-key", key);
            }
            let body = if route.method == "POST" {
                body.to_string()
            } else {
                String::new()
            };
            let answer = api.send(request.body(Body::from(body)).unwrap()).await;
            let expected = match (allowed(route.access, key), key) {
                (true, _) => 200,
                (false, "") => 401,
                (false, _) => 403,
            };
            let what = format!("{} {path} with key {key:?}: {}", route.method, answer.body);
            assert_eq!(answer.status.as_u16(), expected, "{what}");
            if expected != 200 {
                assert!(answer.json()["error"]["message"].is_string(), "{what}");
            }
        }
    }
}

#[tokio::test]
async fn where_keys_are_required_a_wrong_one_is_401_in_the_apis_shape() {
    let api = api_with(|app| app.gatekeeper = Arc::new(FakeGate { strict: true }));
    for key in ["", "wrong", "schlüssel"] {
        let answer = api.post("/v1/chat/completions", key, &ask(json!({}))).await;
        assert_eq!(answer.status, StatusCode::UNAUTHORIZED, "{key}");
        assert_eq!(answer.json()["error"]["code"], "invalid_api_key");
        assert_eq!(answer.header("www-authenticate"), "Bearer");
    }
    for (name, value) in [("authorization", "bearer chat"), ("x-api-key", "chat")] {
        let answer = api
            .post_with("/v1/chat/completions", &[(name, value)], &ask(json!({})))
            .await;
        assert_eq!(answer.status, StatusCode::OK, "{name}");
    }
    assert_eq!(api.get("/v1/models", "wrong").await.status, StatusCode::OK);
}

#[tokio::test]
async fn models_are_listed_in_the_shape_of_the_client_that_asks() {
    let api = api();
    let request = request("GET", "/v1/models").header("anthropic-version", "2023-06-01");
    let body = api.send(request.body(Body::empty()).unwrap()).await.json();
    assert_eq!(body["has_more"], false);
    assert_eq!(body["first_id"], "org/base");
    assert_eq!(body["data"][0]["type"], "model");
    assert_eq!(body["data"][1]["display_name"], "org/base:side");
}

#[tokio::test]
async fn models_are_base_only_without_key() {
    let api = api();
    let request = request("GET", "/v1/models").body(Body::empty()).unwrap();
    let ids = |answer: &Answer| -> Vec<String> {
        let data = answer.json()["data"].as_array().unwrap().clone();
        data.iter()
            .map(|m| m["id"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(ids(&api.send(request).await), ["org/base", "org/base:side"]);
    let all = api.get("/models", "chat").await;
    assert_eq!(
        ids(&all),
        ["org/base", "org/base:side", "org/base@0", "org/base@2"]
    );
    assert_eq!(all.json()["data"][0]["context_length"], CONTEXT);

    let one = api.get("/v1/models/org/base@2", "chat").await;
    assert_eq!(
        (one.status, one.json()["id"].clone()),
        (StatusCode::OK, json!("org/base@2"))
    );
    assert_eq!(
        api.get("/v1/models/org%2Fbase", "").await.json()["id"],
        "org/base"
    );
    let none = api.get("/v1/models/org/base@9", "chat").await;
    assert_eq!(none.status, StatusCode::NOT_FOUND);
    assert_eq!(none.json()["error"]["code"], "model_not_found");
}
