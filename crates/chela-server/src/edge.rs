//! What is checked of every request before any route sees it: Host, Origin, whether the server is ending.

use crate::{
    problem::Problem,
    routes::drain,
    server::{Phase, Server},
};
use axum::{
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use std::sync::Arc;

const EXPOSED: HeaderValue = HeaderValue::from_static(
    "x-chela-session, x-chela-turn, x-chela-policy-version, x-chela-turn-kind, x-chela-ignored, retry-after",
);
const METHODS: HeaderValue = HeaderValue::from_static("GET, POST, DELETE, OPTIONS");
const PRIVATE_ASKED: HeaderName = HeaderName::from_static("access-control-request-private-network");
const PRIVATE_ALLOWED: HeaderName = HeaderName::from_static("access-control-allow-private-network");

/// The outermost layer.
pub(crate) async fn check(
    State(server): State<Arc<Server>>,
    request: Request,
    next: Next,
) -> Response {
    // Counted before the phase is read: either this request sees the end coming, or the end waits for it.
    let _busy = server.open.enter();
    let config = &server.app.config;
    let host = host_of(request.headers(), request.uri());
    if !host
        .as_deref()
        .is_some_and(|h| is_bound(h, &config.bound_names))
    {
        let named = host.unwrap_or_default();
        let message = format!(
            "this server does not answer to the host {named:?}; add its name to server.bound_names if it should"
        );
        drain(request.into_body()).await;
        return Problem::new(StatusCode::MISDIRECTED_REQUEST, message).into_response();
    }
    let origin = request.headers().get(header::ORIGIN).cloned();
    let listed = match &origin {
        None => None,
        Some(o) if is_listed(o, &config.cors_origins) => Some(o.clone()),
        Some(o) if is_same(o, host.as_deref()) => None,
        Some(_) => {
            drain(request.into_body()).await;
            let message = "pages of this origin may not call; list it in server.cors_origins";
            return Problem::new(StatusCode::FORBIDDEN, message)
                .code("foreign_origin")
                .into_response();
        }
    };
    let preflight = request.method() == Method::OPTIONS && listed.is_some();
    let mut response = if preflight {
        answer_preflight(request.headers())
    } else if server.phase() >= Phase::Draining && !is_probe(request.uri().path()) {
        drain(request.into_body()).await;
        Problem::unavailable("the server is shutting down", 5).into_response()
    } else {
        next.run(request).await
    };
    if let Some(origin) = listed {
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
        headers.append(header::VARY, HeaderValue::from_static("origin"));
    }
    response
}

fn is_probe(path: &str) -> bool {
    matches!(path, "/health" | "/healthz" | "/ready")
}

fn answer_preflight(asked: &HeaderMap) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, METHODS);
    headers.insert(
        header::ACCESS_CONTROL_MAX_AGE,
        HeaderValue::from_static("600"),
    );
    if let Some(names) = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
    }
    if asked.contains_key(PRIVATE_ASKED) {
        headers.insert(PRIVATE_ALLOWED, HeaderValue::from_static("true"));
    }
    response
}

/// Host and port as the client wrote them.
fn host_of(headers: &HeaderMap, uri: &Uri) -> Option<String> {
    match headers.get(header::HOST) {
        Some(value) => value.to_str().ok().map(str::to_ascii_lowercase),
        None => uri.authority().map(|a| a.as_str().to_ascii_lowercase()),
    }
}

fn is_bound(host: &str, names: &[String]) -> bool {
    let name = without_port(host).trim_end_matches('.');
    let plain = |n: &str| n.trim_matches(['[', ']']).to_ascii_lowercase();
    !name.is_empty() && names.iter().any(|n| n == "*" || plain(n) == plain(name))
}

/// `[::1]:80` → `[::1]`, `localhost:80` → `localhost`
fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port))
            if !port.ends_with(']') && (name.ends_with(']') || !name.contains(':')) =>
        {
            name
        }
        _ => host,
    }
}

fn is_listed(origin: &HeaderValue, listed: &[String]) -> bool {
    listed.iter().any(|l| {
        l == "*"
            || l.trim_end_matches('/')
                .as_bytes()
                .eq_ignore_ascii_case(origin.as_bytes())
    })
}

/// The page this server itself gave out.
fn is_same(origin: &HeaderValue, host: Option<&str>) -> bool {
    let origin = origin
        .to_str()
        .map(str::to_ascii_lowercase)
        .unwrap_or_default();
    let own = origin
        .strip_prefix("http://")
        .or_else(|| origin.strip_prefix("https://"));
    own.is_some() && own == host
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_compared_without_port() {
        let names = ["127.0.0.1", "localhost", "[::1]"].map(str::to_owned);
        for good in [
            "127.0.0.1:30000",
            "localhost",
            "localhost.",
            "[::1]:1",
            "[::1]",
        ] {
            assert!(is_bound(good, &names), "{good}");
        }
        for bad in [
            "evil.example",
            "localhost.evil.example:80",
            "",
            ":80",
            "127.0.0.1.evil:1",
        ] {
            assert!(!is_bound(bad, &names), "{bad}");
        }
        assert!(is_bound("anything", &["*".to_owned()]));
    }

    #[test]
    fn an_origin_is_the_same_with_its_port_only() {
        let origin = HeaderValue::from_static("http://127.0.0.1:30000");
        assert!(is_same(&origin, Some("127.0.0.1:30000")));
        assert!(!is_same(&origin, Some("127.0.0.1:30001")));
        assert!(!is_same(&HeaderValue::from_static("null"), Some("null")));
    }
}
