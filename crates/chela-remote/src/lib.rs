//! Judges and engines in another process, over the APIs they speak.

mod openai;
mod workers;

pub use openai::OpenAiTextModel;
