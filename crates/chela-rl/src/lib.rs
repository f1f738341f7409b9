//! From judged turns to a derivative by log-prob, in plain f32 slices.
