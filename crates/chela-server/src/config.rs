//! What an operator can set about the server.

use std::time::Duration;

/// Settings of the HTTP server.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Host names and addresses under which the server may be called, without port: `127.0.0.1`, `localhost`, `[::1]`. Any
    /// other Host is answered with 421 (DNS rebinding). The entry `*` allows all; it is meant for addresses other than
    /// loopback, where keys are required.
    pub bound_names: Vec<String>,
    /// Origins whose pages may call, like `http://localhost:5173`; `*` allows all.
    pub cors_origins: Vec<String>,
    /// Most bytes of a request's body.
    pub body_limit: usize,
    /// Requests of one profile that may be under way; more are answered with 429.
    pub profile_requests: usize,
    /// Refuse model names that `/v1/models` does not list.
    pub strict_models: bool,
    /// Most tokens of a reply whose request names no limit; `None` = what the context leaves.
    pub default_max_tokens: Option<usize>,
    /// After this long without anything to say, a stream says something empty.
    pub keep_alive: Duration,
    /// How long running replies may take to finish after the end was asked for.
    pub grace: Duration,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            bound_names: ["127.0.0.1", "localhost", "[::1]"]
                .map(str::to_owned)
                .to_vec(),
            cors_origins: Vec::new(),
            body_limit: 64 << 20,
            profile_requests: 1024,
            strict_models: false,
            default_max_tokens: None,
            keep_alive: Duration::from_secs(10),
            grace: Duration::from_secs(20),
        }
    }
}
