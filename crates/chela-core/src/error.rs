//! What can go wrong at each seam. HTTP statuses and exit codes are chosen at the edge, never here.

use crate::ids::{PolicyVersion, TokenId};
use thiserror::Error;

/// A name a person or client gave that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NameError {
    /// Not usable as a profile.
    #[error(
        "profile {0:?}: use 1 to 64 characters of a-z A-Z 0-9 . _ - that do not begin with a dot"
    )]
    Profile(String),
    /// Not usable as a session id.
    #[error("session id {0:?}: use 1 to 256 characters without control characters")]
    Session(String),
    /// Not usable as a group's id.
    #[error("group id {0:?}: use 1 to 200 characters without control characters")]
    Group(String),
    /// No number of replies of a group.
    #[error("a group of {0} replies: use a size from 1 to 1024")]
    GroupSize(usize),
}

/// What an engine or a learner refuses or fails at.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum EngineError {
    /// The prompt and the wanted reply do not fit into the context.
    #[error("the prompt has {prompt} tokens and the context of the model is {context}")]
    ContextLength {
        /// Tokens of the prompt.
        prompt: usize,
        /// The model's context length.
        context: usize,
    },
    /// A token id outside the vocabulary.
    #[error("token id {0} is outside the vocabulary of {1}")]
    Token(TokenId, usize),
    /// A version that is not resident.
    #[error("version {0} is not loaded")]
    NotLoaded(PolicyVersion),
    /// Weights that do not belong to this model or are damaged.
    #[error("weights refused: {0}")]
    Weights(String),
    /// More memory is asked for than there is.
    #[error("not enough memory: {0}")]
    Memory(String),
    /// Something this engine or learner does not offer.
    #[error("not supported by this engine: {0}")]
    Unsupported(&'static str),
    /// Arguments that do not fit together; a bug of the caller.
    #[error("wrong shape: {0}")]
    Shape(String),
    /// Numbers that are not finite came out.
    #[error("not finite: {0}")]
    NotFinite(String),
    /// The engine stopped: shutting down, or its thread died.
    #[error("the engine has stopped: {0}")]
    Stopped(String),
    /// Reading or writing a checkpoint failed.
    #[error("{0}")]
    Io(String),
}

/// What a store refuses or fails at.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum StoreError {
    /// The store cannot take writes any more until a restart (a failed sync, a full disk, an I/O error).
    #[error("the store takes no writes: {0}")]
    Dead(String),
    /// The folder is used by another process, or cannot be used.
    #[error("{0}")]
    Unusable(String),
    /// The thing asked for is not there.
    #[error("not found: {0}")]
    NotFound(String),
    /// The write contradicts what is stored (a second consumption, an unknown turn, a version number used before).
    #[error("refused: {0}")]
    Conflict(String),
    /// What was read back is not what was written.
    #[error("damaged: {0}")]
    Damaged(String),
}

/// Why a judge gave no verdict. Never a score.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum JudgeError {
    /// Nobody answered within the time limit.
    #[error("time limit of {0} ms passed")]
    Timeout(u64),
    /// The judge's model or address failed.
    #[error("{0}")]
    Failed(String),
}

/// Why a request of a client or an operator was refused, in words every API can shape its own way.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum Refusal {
    /// A field of the request is wrong.
    #[error("{field}: {message}")]
    Invalid {
        /// The field, in the API's spelling where it is known, like `messages[2].role`.
        field: String,
        /// What is wrong and what would be right.
        message: String,
    },
    /// No key, or one that is unknown, where one is needed.
    #[error("{0}")]
    Unauthenticated(String),
    /// A key whose scope does not reach this.
    #[error("{0}")]
    Forbidden(String),
    /// Unknown session, turn, version, profile or model.
    #[error("{0}")]
    NotFound(String),
    /// It was there and has ended.
    #[error("{0}")]
    Gone(String),
    /// It contradicts what is there.
    #[error("{0}")]
    Conflict(String),
    /// The prompt does not fit.
    #[error("the prompt has {prompt} tokens and the context of the model is {context}")]
    ContextLength {
        /// Tokens of the prompt.
        prompt: usize,
        /// The model's context length.
        context: usize,
    },
    /// Temporarily impossible; trying again later is right.
    #[error("{message}")]
    Unavailable {
        /// Why.
        message: String,
        /// After how many seconds to try again.
        retry_after: u32,
    },
    /// Our fault.
    #[error("internal error: {0}")]
    Internal(String),
}

impl From<EngineError> for Refusal {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::ContextLength { prompt, context } => {
                Self::ContextLength { prompt, context }
            }
            EngineError::NotLoaded(version) => {
                Self::NotFound(format!("version {version} is not loaded"))
            }
            EngineError::Stopped(why) => Self::Unavailable {
                message: format!("the engine has stopped: {why}"),
                retry_after: 5,
            },
            other => Self::Internal(other.to_string()),
        }
    }
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::NotFound(what) => Self::NotFound(what),
            StoreError::Conflict(why) => Self::Conflict(why),
            StoreError::Dead(_) | StoreError::Unusable(_) => Self::Unavailable {
                message: error.to_string(),
                retry_after: 30,
            },
            StoreError::Damaged(_) => Self::Internal(error.to_string()),
        }
    }
}

impl From<NameError> for Refusal {
    fn from(error: NameError) -> Self {
        let field = match error {
            NameError::Profile(_) => "profile",
            NameError::Session(_) => "session_id",
            NameError::Group(_) => "group.id",
            NameError::GroupSize(_) => "group.size",
        };
        Self::Invalid {
            field: field.to_owned(),
            message: error.to_string(),
        }
    }
}
