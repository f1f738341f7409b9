//! Every route with who may call it. The router is built from this table, so a route without a class cannot exist.

/// Who may call a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Anybody; no key is looked at, except to list a profile's own versions.
    Open,
    /// Any caller the gatekeeper lets in.
    Chat,
    /// A key of scope feedback or admin that is no session key.
    Feedback,
    /// A key of scope admin.
    Admin,
    /// A session's own key.
    SessionKey,
}

/// What a route does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Does {
    ChatCompletions,
    Completions,
    Messages,
    CountTokens,
    Responses,
    Response,
    Withdraw,
    Metrics,
    Models,
    Model,
    Health,
    Ready,
    Page,
    StartSession,
    SetReward,
    EndSession,
    Export,
    Feedback,
    Sessions,
    Session,
    Forget,
    EndNamed,
    Policy,
    Version,
    AdapterFile,
    Diff,
    Import,
    ForgetAny,
    Rollback,
    Promote,
    Pause,
    Resume,
    Status,
}

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// `GET`, `POST` or `DELETE`.
    pub method: &'static str,
    /// With axum's placeholders.
    pub path: &'static str,
    /// Who may call it.
    pub access: Access,
    pub(crate) does: Does,
}

const fn row(method: &'static str, path: &'static str, access: Access, does: Does) -> Route {
    Route {
        method,
        path,
        access,
        does,
    }
}

/// All routes.
pub const ROUTES: &[Route] = &[
    row(
        "POST",
        "/v1/chat/completions",
        Access::Chat,
        Does::ChatCompletions,
    ),
    row(
        "POST",
        "/chat/completions",
        Access::Chat,
        Does::ChatCompletions,
    ),
    row("POST", "/v1/completions", Access::Chat, Does::Completions),
    row("POST", "/completions", Access::Chat, Does::Completions),
    row("POST", "/v1/responses", Access::Chat, Does::Responses),
    row("POST", "/responses", Access::Chat, Does::Responses),
    row(
        "GET",
        "/v1/responses/{id}",
        Access::Feedback,
        Does::Response,
    ),
    row("GET", "/responses/{id}", Access::Feedback, Does::Response),
    row(
        "DELETE",
        "/v1/responses/{id}",
        Access::Feedback,
        Does::Withdraw,
    ),
    row(
        "DELETE",
        "/responses/{id}",
        Access::Feedback,
        Does::Withdraw,
    ),
    row("POST", "/v1/messages", Access::Chat, Does::Messages),
    row("POST", "/messages", Access::Chat, Does::Messages),
    row(
        "POST",
        "/v1/messages/count_tokens",
        Access::Chat,
        Does::CountTokens,
    ),
    row(
        "POST",
        "/messages/count_tokens",
        Access::Chat,
        Does::CountTokens,
    ),
    row("GET", "/v1/models", Access::Open, Does::Models),
    row("GET", "/models", Access::Open, Does::Models),
    row("GET", "/v1/models/{*id}", Access::Open, Does::Model),
    row("GET", "/models/{*id}", Access::Open, Does::Model),
    row("GET", "/health", Access::Open, Does::Health),
    row("GET", "/healthz", Access::Open, Does::Health),
    row("GET", "/ready", Access::Open, Does::Ready),
    row("GET", "/metrics", Access::Open, Does::Metrics),
    row("GET", "/", Access::Open, Does::Page),
    row(
        "POST",
        "/rl/start_session",
        Access::Admin,
        Does::StartSession,
    ),
    row(
        "POST",
        "/rl/set_reward",
        Access::SessionKey,
        Does::SetReward,
    ),
    row(
        "POST",
        "/rl/end_session",
        Access::SessionKey,
        Does::EndSession,
    ),
    row(
        "POST",
        "/rl/export_trajectories",
        Access::Admin,
        Does::Export,
    ),
    row("POST", "/v1/feedback", Access::Feedback, Does::Feedback),
    row("GET", "/v1/sessions", Access::Feedback, Does::Sessions),
    row("GET", "/v1/sessions/{id}", Access::Feedback, Does::Session),
    row(
        "POST",
        "/v1/sessions/{id}/end",
        Access::Feedback,
        Does::EndNamed,
    ),
    row(
        "DELETE",
        "/v1/sessions/{id}",
        Access::Feedback,
        Does::Forget,
    ),
    row("GET", "/v1/policy", Access::Admin, Does::Policy),
    row(
        "GET",
        "/v1/policy/versions/{id}",
        Access::Admin,
        Does::Version,
    ),
    row(
        "GET",
        "/v1/policy/versions/{id}/{file}",
        Access::Admin,
        Does::AdapterFile,
    ),
    row("GET", "/v1/policy/diff", Access::Admin, Does::Diff),
    row("POST", "/v1/policy/import", Access::Admin, Does::Import),
    row("POST", "/v1/forget", Access::Feedback, Does::ForgetAny),
    row("POST", "/v1/policy/rollback", Access::Admin, Does::Rollback),
    row("POST", "/v1/policy/promote", Access::Admin, Does::Promote),
    row("POST", "/v1/policy/pause", Access::Admin, Does::Pause),
    row("POST", "/v1/policy/resume", Access::Admin, Does::Resume),
    row("GET", "/v1/status", Access::Feedback, Does::Status),
];
