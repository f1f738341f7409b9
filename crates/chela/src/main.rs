//! The binary.
mod config;
fn main() {}
