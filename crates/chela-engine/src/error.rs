//! How failures below become the seam's errors.

use chela_core::EngineError;
use chela_kernels::KernelError;

/// An operation that was refused is a bug of this crate; a worker's death is the engine's.
pub fn kernel(error: KernelError) -> EngineError {
    match error {
        KernelError::Worker(_) => EngineError::Stopped(error.to_string()),
        other => EngineError::Shape(other.to_string()),
    }
}

/// A model file that cannot be used.
pub fn weights(error: impl std::fmt::Display) -> EngineError {
    EngineError::Weights(error.to_string())
}

/// A file that cannot be read or written.
pub fn io(path: &std::path::Path, error: impl std::fmt::Display) -> EngineError {
    EngineError::Io(format!("{}: {error}", path.display()))
}
