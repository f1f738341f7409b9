//! Integration tests of the binary: the arrows between crates, file heads, where tasks are spawned; the binary with a script.
#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used)]

mod judge;
mod recorded;
mod script;
mod server;
mod steps;
mod tidy;
mod whole;
