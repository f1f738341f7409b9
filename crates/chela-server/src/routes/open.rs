//! Routes that need no key: models, health, the page.

use super::{check_health, decoded, key, no_model};
use crate::{
    access::Does,
    metrics::CONTENT_TYPE,
    problem::{Problem, json_response},
    server::Server,
};
use axum::{
    body::Body,
    http::{HeaderMap, HeaderValue, StatusCode, Uri, header},
    response::Response,
};
use chela_core::{Caller, Profile, Refusal, Scope};
use serde_json::{Value, json};

/// Nothing from elsewhere is loaded, and no other page can frame this one.
const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
);

pub(super) fn answer(
    does: Does,
    server: &Server,
    headers: &HeaderMap,
    uri: &Uri,
) -> Result<Response, Problem> {
    let ok = |value: &Value| Ok(json_response(StatusCode::OK, value));
    match does {
        Does::Health => {
            check_health(server, false)?;
            ok(&json!({"status": "ok"}))
        }
        Does::Ready => {
            check_health(server, true)?;
            ok(&json!({"status": "ready"}))
        }
        Does::Page => Ok(page()),
        Does::Metrics => metrics(server, headers),
        Does::Models if headers.contains_key("anthropic-version") => {
            ok(&anthropic(&models(server, headers)))
        }
        Does::Models => ok(&json!({"object": "list", "data": models(server, headers)})),
        _ => {
            let path = uri.path();
            let id = decoded(path.split_once("/models/").map_or("", |(_, id)| id));
            let found = models(server, headers)
                .into_iter()
                .find(|m| m["id"] == json!(id));
            found
                .map(|m| json_response(StatusCode::OK, &m))
                .ok_or_else(|| no_model(&id))
        }
    }
}

/// Counts and figures only: nothing that anybody said, and names of profiles for the admin key alone.
fn metrics(server: &Server, headers: &HeaderMap) -> Result<Response, Problem> {
    let caller = key(headers).map(|key| server.app.gatekeeper.identify(Some(&key)));
    let admin = matches!(caller, Some(Ok(c)) if c.scope == Scope::Admin && c.session.is_none());
    let everything = Caller {
        scope: Scope::Admin,
        profile: Profile::default(),
        session: None,
    };
    let status = server.app.control.status(&everything);
    let text = server
        .metrics
        .text(server.open.count(), status.as_ref().ok(), admin);
    let text = text.map_err(|e| Refusal::Internal(format!("metrics: {e}")))?;
    let mut response = Response::new(Body::from(text));
    let kind = HeaderValue::from_static(CONTENT_TYPE);
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    Ok(response)
}

fn page() -> Response {
    let mut response = Response::new(Body::from(include_str!("../page.html")));
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/html; charset=utf-8"),
    );
    headers.insert(header::CONTENT_SECURITY_POLICY, POLICY);
    headers.insert(
        header::X_CONTENT_TYPE_OPTIONS,
        HeaderValue::from_static("nosniff"),
    );
    response
}

/// The list as Anthropic's clients read it. The date is the one that their documentation has for an unknown one.
fn anthropic(models: &[Value]) -> Value {
    let row = |m: &Value| {
        json!({"type": "model", "id": m["id"], "display_name": m["id"],
               "created_at": "1970-01-01T00:00:00Z"})
    };
    let data: Vec<Value> = models.iter().map(row).collect();
    let id = |m: Option<&Value>| m.map_or(Value::Null, |m| m["id"].clone());
    json!({"first_id": id(data.first()), "last_id": id(data.last()), "has_more": false, "data": data})
}

/// Without a key the base models only: a probe sends none.
fn models(server: &Server, headers: &HeaderMap) -> Vec<Value> {
    let info = server.app.engine.info();
    let row = |id: String, created: i64| {
        json!({"id": id, "object": "model", "created": created, "owned_by": "chela",
               "context_length": info.context_length, "max_model_len": info.context_length})
    };
    let mut all = vec![
        row(info.model.clone(), server.started),
        row(format!("{}:side", info.model), server.started),
    ];
    if let Some(key) = key(headers)
        && let Ok(caller) = server.app.gatekeeper.identify(Some(&key))
        && let Ok(view) = server.app.control.policy(&caller.profile)
    {
        let name = |number: u64| format!("{}@{number}", info.model);
        all.push(row(name(0), server.started));
        all.extend(
            view.versions
                .iter()
                .map(|v| row(name(v.version.number), v.created / 1000)),
        );
    }
    all
}
