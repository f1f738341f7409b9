//! Leases a batch, runs learner and loss, checkpoints, publishes, rolls back.
//!
//! Knows algorithms (through chela-rl) and no tensors. One [`Trainer`] serves all profiles, each with batches and an adapter of
//! its own; it blocks, so it lives on a thread of its own.

pub mod batch;
pub mod chain;
pub mod config;
pub mod publish;
pub mod step;
pub mod trainer;

pub use chela_rl::advantage::{AdvantageConfig, Method};
pub use config::TrainConfig;
pub use trainer::{Progress, Trainer};

use chela_core::{EngineError, StoreError};
use chela_rl::RlError;
use thiserror::Error;

/// Why a step could not be made. Nothing is lost by it: leased samples go back to the queue.
#[derive(Debug, Error)]
pub enum TrainError {
    /// The learner or the engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Numbers that do not fit together.
    #[error(transparent)]
    Rl(#[from] RlError),
    /// A folder could not be read or written.
    #[error("{what} {path}: {error}")]
    Io {
        /// Doing what.
        what: &'static str,
        /// Where.
        path: String,
        /// Why.
        error: std::io::Error,
    },
}
