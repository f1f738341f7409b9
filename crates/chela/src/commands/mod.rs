//! The commands beside `serve`: thin clients of the running server, or readers of files.

pub mod bench;
pub mod demo;
pub mod doctor;
pub mod experiment;
pub mod export;
pub mod judge;
pub mod key;
pub mod policy;
pub mod remote;
pub mod replay;
pub mod train;
