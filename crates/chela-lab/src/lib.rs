//! Demo, experiments and benchmarks, as clients of the public API: everything here speaks HTTP and knows nothing inside.

pub mod capacity;
pub mod client;
pub mod countdown;
pub mod curve;
pub mod demo;
pub mod evaluate;
pub mod hostile;
pub mod journal;
pub mod learn;
pub mod matrix;
pub mod problems;
pub mod profiles;
pub mod report;
pub mod rules;
pub mod runaway;
pub mod stage;
pub mod standing;
pub mod tasks;
pub mod taste;
pub mod texts;
pub mod train;
pub mod user;

use thiserror::Error;

/// What can go wrong in an experiment.
#[derive(Debug, Error)]
pub enum LabError {
    /// The server did not answer, or not as its API says.
    #[error("{0}")]
    Http(String),
    /// The server refused.
    #[error("{status} at {route}: {message}")]
    Refused {
        /// HTTP status.
        status: u16,
        /// Route.
        route: String,
        /// Its message.
        message: String,
    },
    /// Nothing was learnt in time.
    #[error("{0}")]
    Stuck(String),
    /// A file of problems that cannot be used.
    #[error("{0}")]
    Problems(String),
    /// What was kept of an earlier run cannot be used.
    #[error("{0}")]
    Journal(String),
    /// Output failed.
    #[error("cannot print: {0}")]
    Print(#[from] std::io::Error),
}
