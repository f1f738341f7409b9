//! Leases a batch, runs learner and loss, checkpoints, gates, publishes, rolls back, and makes steps again.
//!
//! Knows algorithms (through chela-rl) and no tensors. One [`Trainer`] serves all profiles, each with batches and an adapter of
//! its own; it blocks, so it lives on a thread of its own.

pub mod batch;
pub mod config;
pub mod figures;
pub mod gate;
pub mod groups;
pub mod make;
mod metrics;
pub mod publish;
pub mod recipe;
pub mod replay;
pub mod restore;
pub mod step;
pub mod trainer;
pub mod watch;

pub use chela_rl::{
    advantage::{AdvantageConfig, Method},
    algorithm::Algorithm,
    kl::Estimator,
    objective::{Distil, Proximal, Regular},
};
pub use config::{GateConfig, Probe, TrainConfig, WatchConfig};
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
    /// The algorithm needs what this learner does not have.
    #[error(
        "learning.algorithm = \"ppo\" needs a value head, and this learner has none: use another algorithm, such as grpo"
    )]
    NoValues,
    /// The program is to end; what was begun is gone on with after the next start.
    #[error("the program is ending")]
    Stopping,
    /// How a step was made is not known or cannot be read.
    #[error("cannot make a step again: {0}")]
    Recipe(String),
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
