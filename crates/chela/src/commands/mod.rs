//! The commands beside `serve`: thin clients of the running server, or readers of files.

pub mod bench;
pub mod demo;
pub mod doctor;
pub mod key;
pub mod remote;
