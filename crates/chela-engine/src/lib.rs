//! The local model: serves and trains at once from one copy of the base weights.
//!
//! One thread (`scheduler`) makes replies and scores texts; learners run on their callers' threads. Both use the same kernels and
//! the same base weights; only adapters differ. No algorithm, no chat template and no tokenizer is known here.

pub mod adapter;
pub mod bench;
mod engine;
mod error;
mod forward;
mod learner;
mod learners;
mod prefix;
mod request;
mod rng;
mod scheduler;
mod scoring;
mod training;
mod weights;

pub use engine::{EngineOptions, LocalEngine};
pub use learner::{LearnerOptions, LocalLearner};
