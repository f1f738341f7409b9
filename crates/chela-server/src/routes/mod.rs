//! What each route does, behind the check of who may call it.

mod control;
mod open;
mod views;

use crate::{
    access::{Access, Does, Route},
    convert,
    problem::Problem,
    reply,
    server::{Phase, Server},
    tasks::aside,
};
use axum::{
    body::{Body, to_bytes},
    extract::Request,
    http::{HeaderMap, StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use chela_core::{Caller, Refusal, Scope};
use std::{borrow::Cow, sync::Arc};

/// Answers a request on a route of the table.
pub(crate) async fn dispatch(
    route: &'static Route,
    server: Arc<Server>,
    request: Request,
) -> Response {
    let response = match answer(route, server.clone(), request).await {
        Ok(response) => response,
        Err(problem) if matches!(route.does, Does::Messages | Does::CountTokens) => {
            problem.anthropic_response()
        }
        Err(mut problem) => {
            // What is called messages inside has another name on some routes.
            let spelt = match route.does {
                Does::Responses => Some("input"),
                Does::Completions => Some("prompt"),
                _ => None,
            };
            if let Some(spelt) = spelt.filter(|_| problem.param.as_deref() == Some("messages")) {
                problem.param = Some(spelt.to_owned());
            }
            problem.into_response()
        }
    };
    server.metrics.answered(route.path, response.status());
    response
}

/// The key as sent: bearer first. What is not UTF-8 stays a key, one that nobody has.
fn key(headers: &HeaderMap) -> Option<Cow<'_, str>> {
    let text = |name: &str| {
        headers
            .get(name)
            .map(|v| String::from_utf8_lossy(v.as_bytes()))
    };
    let bearer = text(header::AUTHORIZATION.as_str()).and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme
            .eq_ignore_ascii_case("bearer")
            .then(|| Cow::Owned(key.trim().to_owned()))
    });
    bearer
        .or_else(|| text("x-api-key"))
        .filter(|key| !key.trim().is_empty())
}

/// Scope and kind of key. Without any key the answer is 401, with the wrong one 403.
fn authorise(access: Access, caller: &Caller, with_key: bool) -> Result<(), Problem> {
    let own = caller.session.is_none();
    let (allowed, needed) = match access {
        Access::Open | Access::Chat => return Ok(()),
        Access::Feedback => (
            own && caller.scope >= Scope::Feedback,
            "this needs a key of scope feedback: `chela key new --scope feedback` makes one, `chela key admin` prints one that may do everything",
        ),
        Access::Admin => (
            own && caller.scope == Scope::Admin,
            "this needs the admin key: `chela key admin` prints it",
        ),
        Access::SessionKey => (
            caller.session.is_some(),
            "this needs a session's own key, as /rl/start_session gives it",
        ),
    };
    match (allowed, with_key) {
        (true, _) => Ok(()),
        (false, true) => Err(Refusal::Forbidden(needed.to_owned()).into()),
        (false, false) => Err(Refusal::Unauthenticated(needed.to_owned()).into()),
    }
}

async fn answer(
    route: &'static Route,
    server: Arc<Server>,
    request: Request,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    if route.access == Access::Open {
        return open::answer(route.does, &server, &parts.headers, &parts.uri);
    }
    let key = key(&parts.headers);
    let caller = server.app.gatekeeper.identify(key.as_deref());
    let caller = caller.map_err(Problem::from).and_then(|caller| {
        authorise(route.access, &caller, key.is_some())?;
        Ok(caller)
    });
    let caller = match caller {
        Ok(caller) => caller,
        Err(problem) => {
            drain(body).await;
            return Err(problem);
        }
    };
    let body = match route.method {
        "POST" => read(&server, &parts.headers, body).await?,
        _ => Vec::new(),
    };
    match route.does {
        Does::ChatCompletions => {
            let vocabulary = server.app.engine.info().vocabulary;
            let asked = aside(body.len(), || {
                convert::chat(&parts.headers, &body, vocabulary)
            })?;
            known_model(&server, &asked.request.model)?;
            reply::chat(server, caller, asked).await
        }
        Does::Completions => {
            let vocabulary = server.app.engine.info().vocabulary;
            let asked = aside(body.len(), || convert::text(&body, vocabulary))?;
            known_model(&server, &asked.model)?;
            reply::completions(server, caller, asked).await
        }
        Does::Messages | Does::CountTokens => {
            let vocabulary = server.app.engine.info().vocabulary;
            let count = route.does == Does::CountTokens;
            let asked = aside(body.len(), || {
                convert::anthropic(&parts.headers, &body, (vocabulary, count))
            })?;
            known_model(&server, &asked.request.model)?;
            if count {
                return aside(body.len(), || reply::count_tokens(&server, &asked));
            }
            reply::messages(server, caller, asked).await
        }
        Does::Responses => {
            let vocabulary = server.app.engine.info().vocabulary;
            let request = aside(body.len(), || {
                convert::responses(&parts.headers, &body, vocabulary)
            })?;
            known_model(&server, &request.asked.request.model)?;
            reply::responses(server, caller, request).await
        }
        Does::Response => reply::given(&server, &caller, &last_segment(&parts.uri)),
        Does::Withdraw => reply::withdraw(&server, &caller, &last_segment(&parts.uri)).await,
        _ => control::answer(route.does, &server, &caller, (&parts.uri, &body)).await,
    }
}

/// Reads what a refused request still sends: a connection with an unread body is closed, and the client's next request on it lost.
pub(crate) async fn drain(body: Body) {
    const MOST: usize = 1 << 20;
    // Too much of it, or a client that left: then it is closed.
    let _ = to_bytes(body, MOST).await;
}

/// The body of a POST. An empty one needs no content type.
async fn read(server: &Server, headers: &HeaderMap, body: Body) -> Result<Vec<u8>, Problem> {
    let limit = server.app.config.body_limit;
    let too_large = || {
        let message = format!("the body is larger than {limit} bytes");
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    };
    let named = |name| headers.get(name).and_then(|v| v.to_str().ok());
    let announced = named(header::CONTENT_LENGTH).and_then(|n| n.parse::<u64>().ok());
    if announced.is_some_and(|n| n > limit as u64) {
        return Err(too_large());
    }
    let bytes = to_bytes(body, limit).await.map_err(|error| {
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        if cause.is_some_and(|c| c.contains("length limit")) {
            return too_large();
        }
        Problem::new(
            StatusCode::BAD_REQUEST,
            format!("the body could not be read: {error}"),
        )
    })?;
    if bytes.is_empty() {
        return Ok(Vec::new());
    }
    let kind = named(header::CONTENT_TYPE).unwrap_or_default();
    let essence = kind.split(';').next().unwrap_or_default().trim();
    let unsupported = |message| Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message);
    if !essence.eq_ignore_ascii_case("application/json") {
        return Err(unsupported(format!(
            "send the body as application/json, not as {kind:?}"
        )));
    }
    if named(header::CONTENT_ENCODING).is_some_and(|e| !e.eq_ignore_ascii_case("identity")) {
        return Err(unsupported("send the body uncompressed".to_owned()));
    }
    Ok(bytes.to_vec())
}

fn known_model(server: &Server, name: &str) -> Result<(), Problem> {
    let base = server.app.engine.info().model;
    let listed = name
        .strip_prefix(&base)
        .is_some_and(|rest| rest.is_empty() || rest == ":side" || rest.starts_with('@'));
    if !listed && !name.is_empty() {
        if server.app.config.strict_models {
            return Err(no_model(name));
        }
        tracing::debug!(
            ?name,
            "a model name that is not listed; the profile's policy answers"
        );
    }
    Ok(())
}

fn no_model(name: &str) -> Problem {
    let why = format!("there is no model {name:?}; /v1/models lists them");
    Problem::of_model(Refusal::NotFound(why))
}

fn decoded(text: &str) -> String {
    percent_encoding::percent_decode_str(text)
        .decode_utf8_lossy()
        .into_owned()
}

/// Requests are taken and can make progress.
fn check_health(server: &Server, ready: bool) -> Result<(), Problem> {
    if ready && server.phase() != Phase::Running {
        return Err(Problem::unavailable("the server is shutting down", 5));
    }
    let engine = server.app.engine.health();
    engine.map_err(|e| Problem::unavailable(format!("the engine cannot serve: {e}"), 5))?;
    server
        .app
        .control
        .health()
        .map_err(|e| Problem::unavailable(e, 30))
}

/// The last part of a path, decoded.
fn last_segment(uri: &Uri) -> String {
    decoded(uri.path().rsplit('/').next().unwrap_or_default())
}
