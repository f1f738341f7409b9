//! Integration tests of the engine: golden numbers of an independent implementation, serving, learning.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout
)]

mod common;
mod golden;
mod learning;
mod requests;
mod serving;
mod starter;
