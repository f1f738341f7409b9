//! Turns a conversation into the exact tokens the policy reads, and tokens back into text, reasoning and tool calls.
//!
//! Two promises: text that somebody typed never becomes a control token, and tokens that were sampled are never tokenized again.

mod answer;
mod call;
mod chat;
mod decode;
mod encode;
mod error;
mod grammar;
mod python;
mod stop;
mod template;
mod words;

pub use answer::{AnswerDelta, AnswerOptions, AnswerParser};
pub use chat::{Chat, ChatParts, Rendered};
pub use decode::TextDecoder;
pub use error::ChatError;
pub use grammar::Grammar;
pub use template::Clock;
