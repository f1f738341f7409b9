//! Conversations to ids and back, over small tokenizers of several kinds and over the starter's.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests stand outside test functions"
)]

mod answers;
mod common;
mod families;
mod grammar;
mod prompts;
mod qwen;
mod reuse;
mod starter;
