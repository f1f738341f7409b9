//! Demo, experiments and benchmarks, as clients of the public API.
