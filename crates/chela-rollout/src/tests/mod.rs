//! Tests of the whole crate over fakes.
