//! From judged turns to a derivative by log-prob, in plain `f32` slices.
//!
//! No tensor, no file, no clock: every function here is numbers in, numbers out, so that a loss is tested by finite
//! differences in microseconds and a learner only has to back-propagate what it is given.

pub mod advantage;
pub mod algorithm;
pub mod baseline;
pub mod kl;
pub mod objective;

use thiserror::Error;

/// What these functions refuse.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum RlError {
    /// Columns of different lengths; a bug of the caller.
    #[error("{what}: {got} values for {want} tokens")]
    Length {
        /// Which column.
        what: &'static str,
        /// Its length.
        got: usize,
        /// The number of tokens.
        want: usize,
    },
    /// A column that this loss needs; a bug of the caller.
    #[error("{what} is missing")]
    Missing {
        /// Which column.
        what: &'static str,
    },
    /// A value that is not finite.
    #[error("{what} is not finite at token {at}")]
    NotFinite {
        /// Which column.
        what: &'static str,
        /// Which token.
        at: usize,
    },
}

pub(crate) fn same_length(what: &'static str, got: usize, want: usize) -> Result<(), RlError> {
    if got == want {
        Ok(())
    } else {
        Err(RlError::Length { what, got, want })
    }
}

pub(crate) fn finite(what: &'static str, values: &[f32]) -> Result<(), RlError> {
    match values.iter().position(|v| !v.is_finite()) {
        Some(at) => Err(RlError::NotFinite { what, at }),
        None => Ok(()),
    }
}
