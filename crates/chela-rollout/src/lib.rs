//! Follows sessions, pairs each turn with what came next, has it judged.
//!
//! [`Rollout`] is a shell around plain functions: [`session`] tells sessions, parents and kinds apart, [`validators`] and
//! [`judges`] say what a turn was worth, [`samples`] what of it may be trained on, [`credit`] how explicit rewards flow back.

pub mod canaries;
pub mod config;
mod control;
pub mod credit;
pub mod export;
pub mod judges;
mod judging;
pub mod labelled;
pub mod offline;
mod recorder;
mod rollout;
pub mod samples;
mod sampling;
pub mod session;
mod status;
pub mod validators;

#[cfg(test)]
mod tests;

pub use config::{RolloutConfig, TruncatedReplies};
pub use control::session_key_hash;
pub use judges::{
    command::CommandJudge,
    model::{ModelJudge, ModelJudgeConfig},
    own::EngineTextModel,
    rules::{Rule, RuleError, RuleRole, RulesJudge},
};
pub use rollout::{Clock, Rollout};
pub use session::kind::UnknownClients;
