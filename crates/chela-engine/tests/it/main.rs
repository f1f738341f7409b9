//! Integration tests of the engine: golden numbers of an independent implementation, serving, learning.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout
)]

mod common;
mod exported;
mod faulty;
mod forgetting;
mod full;

mod gemma_real;
mod golden;
mod imports;
mod learning;
mod load;
mod merged_real;
mod merging;
mod mixed;
mod qwen_real;
mod receipts;
mod replay;
mod requests;
mod residency;
mod serving;
mod shared;
mod starter;
mod value;
