//! Integration tests of the binary: the arrows between crates, the command line, and the whole over HTTP.

mod tidy;
