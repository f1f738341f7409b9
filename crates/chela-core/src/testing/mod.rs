//! Fakes for the tests of other crates, and the suite every store passes. Compiled only with the feature `testing`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // Test code: it stops at the first surprise.

mod build;
mod engine;
#[cfg(test)]
mod engine_tests;
mod futures;
mod judge;
mod learner;
mod memory_forget;
mod memory_state;
mod memory_store;
mod model;
mod sampling;
mod store_suite;
mod store_suite_forget;
mod store_suite_judging;
mod store_suite_queue;
mod store_suite_versions;

pub use build::*;
pub use engine::{FakeEngine, FakeReply, FakeRequest, ScoreFn};
pub use futures::{block_on, collect, iter, ready};
pub use judge::{FakeJudge, FakeTextModel};
pub use learner::{FakeLearner, FakeLearners};
pub use memory_store::MemoryStore;
pub use model::{FAKE_PARAMETERS, FAKE_VOCABULARY, FakeModel};
pub use store_suite::store_suite;
