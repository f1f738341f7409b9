//! Finds, fetches, verifies and reads a model: config, tensors, tokenizer and template files.
//!
//! [`ModelSource::parse`] → [`resolve`] → [`Model::open`] → [`Model::tensor`],
//! [`Model::tokenizer`], [`Model::chat_template`].

mod checksum;
mod config;
mod config_gguf;
mod config_hf;
mod dequant;
mod encode;
mod error;
mod folder;
mod gguf;
mod gguf_meta;
mod gguf_write;
mod hf_write;
mod hub;
mod json;
mod model;
mod names;
mod overlap;
mod pip;
mod progress;
mod rewrite;
mod safetensors_file;
mod source;
mod starter;
mod tensor;
#[doc(hidden)]
pub mod testing;
mod tokenizer_gguf;
mod tokenizer_hf;
mod tokenizer_spm;
mod tokenizer_write;

pub use config::{Experts, Family, ModelConfig, Rope, RopeScaling};
pub use error::{ModelError, Result};
pub use folder::{FolderTexts, write_model_f32, write_vectors_f32};
pub use model::{Model, tokenizer_hash};
pub use names::{LayerTensor, TensorName};
pub use progress::{NoProgress, Progress, TerminalProgress};
pub use rewrite::{Edit, write_folder, write_gguf};
pub use source::{Layout, ModelFiles, ModelSource, resolve};
pub use tensor::{DType, TensorData};
