//! Integration tests of the binary: the arrows between crates, file heads, where tasks are spawned.
#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used)]

mod tidy;
