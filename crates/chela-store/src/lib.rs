//! Keeps turns, verdicts, samples, versions: durable, exactly once.
//!
//! One SQLite file in WAL mode, synced at each commit. One thread writes: it takes every transaction that waits, runs them
//! behind one sync, and only then answers them all. Reads go through connections of their own and wait for nobody.

mod apply;
mod cache;
mod error;
mod figures;
mod forget;
mod live;
mod pieces;
mod proof;
mod queue;
mod readers;
mod reads;
mod records;
mod schema;
mod shared;
mod store;
mod training;
mod turns;
mod versions;
mod wipe;
mod writer;

#[cfg(test)]
mod fault_tests;

pub use schema::SCHEMA;
pub use store::{DATABASE, Store, StoreOptions};
