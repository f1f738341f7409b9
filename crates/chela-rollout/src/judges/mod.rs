//! Judges: rules, a program, a model that is asked.

pub mod command;
pub mod model;
pub mod own;
pub mod quote;
pub mod rules;
pub mod votes;
