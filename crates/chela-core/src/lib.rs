//! The words two crates exchange, and the seams where an implementation can be replaced.
//!
//! Nothing here knows HTTP, JSON, tensors, files' contents or an async runtime, and no type here carries serde: the wire
//! and the disk own their own records, so that a renamed field can change neither an API nor a stored log.

pub mod chat;
pub mod engine;
pub mod error;
pub mod ids;
pub mod judge;
pub mod record;
pub mod registry;
pub mod sample;
pub mod store;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

use std::{future::Future, pin::Pin};

/// A boxed future, so that seams stay object-safe without naming an async runtime.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A boxed stream, likewise.
pub type BoxStream<'a, T> = Pin<Box<dyn futures_core::Stream<Item = T> + Send + 'a>>;

pub use chat::*;
pub use engine::*;
pub use error::*;
pub use ids::*;
pub use judge::*;
pub use record::*;
pub use sample::*;
pub use store::*;
