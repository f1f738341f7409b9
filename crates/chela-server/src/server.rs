//! The parts a server is made of, and the router over the table of routes.

use crate::{
    ServerConfig,
    access::ROUTES,
    edge,
    metrics::Metrics,
    problem::Problem,
    routes,
    tasks::{Busy, Counter, Tasks},
};
use axum::{
    Router,
    extract::Request,
    http::{Method, StatusCode},
    middleware,
    routing::{MethodFilter, on},
};
use chela_chat::Chat;
use chela_core::{ControlPlane, Gatekeeper, PolicyEngine, Profile, Recorder};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};
use tokio::sync::watch;

/// What the server stands on.
#[derive(Clone)]
pub struct App {
    /// Samples and scores.
    pub engine: Arc<dyn PolicyEngine>,
    /// Renders and parses.
    pub chat: Arc<Chat>,
    /// Admits and keeps turns.
    pub recorder: Arc<dyn Recorder>,
    /// Sessions, feedback, versions.
    pub control: Arc<dyn ControlPlane>,
    /// Knows keys.
    pub gatekeeper: Arc<dyn Gatekeeper>,
    /// Settings.
    pub config: ServerConfig,
}

/// Where a server stands in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Takes requests.
    Running,
    /// Finishes running replies, refuses new requests.
    Draining,
    /// The grace time is over: running replies end with an error.
    Cut,
}

/// One running server.
pub(crate) struct Server {
    pub(crate) app: App,
    pub(crate) tasks: Tasks,
    pub(crate) phase: watch::Sender<Phase>,
    /// Requests whose reply is not over.
    pub(crate) open: Counter,
    /// The same by profile.
    shares: Mutex<HashMap<Profile, Counter>>,
    /// Seconds since the Unix epoch.
    pub(crate) started: i64,
    pub(crate) metrics: Metrics,
}

impl Server {
    pub(crate) fn new(app: App) -> Arc<Self> {
        Arc::new(Self {
            metrics: Metrics::new(&app.engine.memory_parts()),
            app,
            tasks: Tasks::new(),
            phase: watch::Sender::new(Phase::Running),
            open: Counter::new(),
            shares: Mutex::default(),
            started: unix_seconds(),
        })
    }

    /// A request of a profile is under way until both are dropped. One profile's crowd keeps no other from being answered.
    pub(crate) fn enter(&self, profile: &Profile) -> Result<[Busy; 2], Problem> {
        let most = self.app.config.profile_requests;
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        // Profiles come and go; what is not busy need not be remembered.
        shares.retain(|name, counter| counter.count() > 0 || name == profile);
        let share = shares.entry(profile.clone()).or_insert_with(Counter::new);
        if share.count() >= most {
            let why = format!(
                "profile {profile} has {most} requests under way, which is its limit (server.profile_requests)"
            );
            return Err(Problem {
                retry_after: Some(1),
                ..Problem::new(StatusCode::TOO_MANY_REQUESTS, why).code("rate_limit_exceeded")
            });
        }
        Ok([share.enter(), self.open.enter()])
    }

    pub(crate) fn phase(&self) -> Phase {
        *self.phase.borrow()
    }
}

/// Seconds since the Unix epoch; 0 when the clock stands before it.
pub(crate) fn unix_seconds() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| i64::try_from(d.as_secs()).unwrap_or(i64::MAX))
}

/// The whole API as one service. [`crate::serve`] adds the orderly end.
pub fn router(app: App) -> Router {
    build(&Server::new(app))
}

pub(crate) fn build(server: &Arc<Server>) -> Router {
    let mut router = Router::new();
    for route in ROUTES {
        let shared = server.clone();
        let handler = move |request: Request| routes::dispatch(route, shared.clone(), request);
        let filter = match route.method {
            "POST" => MethodFilter::POST,
            "DELETE" => MethodFilter::DELETE,
            _ => MethodFilter::GET,
        };
        router = router.route(route.path, on(filter, handler));
    }
    router
        .method_not_allowed_fallback(|method: Method, request: Request| async move {
            let path = request.uri().path();
            let message = format!("{method} is not possible on {path}");
            Problem::new(StatusCode::METHOD_NOT_ALLOWED, message).code("method_not_allowed")
        })
        .fallback(|request: Request| async move {
            let message = format!("there is nothing at {}", request.uri().path());
            Problem::new(StatusCode::NOT_FOUND, message).code("unknown_path")
        })
        .layer(middleware::from_fn_with_state(server.clone(), edge::check))
}
