//! Speaks the OpenAI API and the RL control API.
//!
//! Everything the outside sees is decided here and nowhere else: field names, statuses, headers, the order of a stream. Past
//! [`chela_core::Recorder`] and [`chela_core::ControlPlane`] nothing knows that HTTP exists.
//!
//! `POST /v1/completions` makes no turns: what is asked there is answered and forgotten.

mod access;
mod config;
mod convert;
mod edge;
mod metrics;
mod problem;
mod reply;
mod routes;
mod serve;
mod server;
mod tasks;
mod wire;

pub use access::{Access, ROUTES, Route};
pub use config::ServerConfig;
pub use serve::serve;
pub use server::{App, router};

#[cfg(test)]
mod tests;
