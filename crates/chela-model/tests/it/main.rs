//! The crate as others use it: tiny models of every family, broken ones, and the real starter.

mod broken;
mod hostile;
mod real;
mod tiny;
mod dump;
