//! What can go wrong between text and tokens.

use thiserror::Error;

/// Refusals and failures of this crate.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ChatError {
    /// The model has no chat template, or one that cannot be parsed (with the line).
    #[error("chat template: {0}")]
    Template(String),
    /// The template refused this conversation in its own words, or failed on it (with the line).
    #[error("the model's chat template refuses this conversation: {0}")]
    Refused(String),
    /// Tools were asked of a template that has no place for them.
    #[error(
        "the chat template of this model has no place for tools; serve a model with one, or leave tools out"
    )]
    NoTools,
    /// The tokenizer failed.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The form that a reply is to have cannot be kept to.
    #[error("{error}")]
    Grammar {
        /// The tool whose schema is at fault, by its place.
        tool: Option<usize>,
        /// Why.
        error: String,
    },
    /// JSON inside the conversation cannot be read.
    #[error("{what}: {error}")]
    Json {
        /// Which part.
        what: String,
        /// Why.
        error: String,
    },
}
