//! The local model: serves and trains at once from one copy of the base weights.
//!
//! One thread (`scheduler`) makes replies and scores texts; another (`loader`) brings adapters into memory when a request names them;
//! learners run on their callers' threads. All use the same kernels and the same base weights; only adapters differ. No algorithm, no chat template and no tokenizer is known here.

pub mod adapter;
pub mod bench;
mod digest;
mod engine;
mod error;
mod experts;
mod forward;
mod full;
mod learner;
mod learners;
mod loader;
mod memory;
pub mod merge;
mod packing;
mod pages;
mod prefix;
mod request;
mod resident;
mod rng;
mod scheduler;
mod scoring;
mod training;
mod version;
mod weights;

pub use engine::{EngineOptions, LocalEngine};
pub use learner::{LearnerOptions, LocalLearner, RowsRead};
pub use memory::MemoryPlan;
pub use pages::PoolUse;
