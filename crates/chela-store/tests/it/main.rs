//! The store against the suite of its seam, against a store in memory, and against being killed.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::expect_used,
    clippy::print_stdout
)] // Helpers of tests stop at the first surprise too.

mod disk;
mod forget;
mod kill;
mod large;
mod random;
mod schemas;
mod snapshot;
