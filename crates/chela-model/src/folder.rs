//! A Hugging Face folder whose weights come from memory: a model that was trained as a whole.

use std::path::Path;

use crate::config::ModelConfig;
use crate::encode::encode;
use crate::error::{ModelError, Result};
use crate::hf_write::{self, SafetensorsWriter, write_synced};
use crate::model::Model;
use crate::names::TensorName;
use crate::tensor::DType;

/// What lies in such a folder beside the weights (configuration, tokenizer, template), in memory: the model's own files may be gone
/// when a folder is written.
#[derive(Debug, Clone)]
pub struct FolderTexts(Vec<(String, Vec<u8>)>);

impl FolderTexts {
    /// Those of `model`, for weights in f32.
    pub fn of(model: &Model) -> Result<Self> {
        hf_write::texts(model, DType::F32).map(Self)
    }

    /// Writes and syncs them into an existing folder.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let mut files = self.0.iter();
        files.try_for_each(|(name, bytes)| write_synced(&folder.join(name), bytes))
    }
}

/// Names and shapes of a model's tensors as Hugging Face folders have them: the bytes of a stack are those of its parts, one after
/// the other.
pub(crate) fn table(config: &ModelConfig) -> Vec<(String, [usize; 2])> {
    let parts = |name: TensorName| {
        let [rows, cols] = config.shape(name).unwrap_or_default();
        let shape = [rows / config.stack(name), cols];
        let names = name.hugging_face_parts(config).into_iter();
        names.map(move |part| (part, shape)).collect::<Vec<_>>()
    };
    config.tensor_names().into_iter().flat_map(parts).collect()
}

/// Writes and syncs the weights of such a folder in f32; `values` gives one tensor after the other.
pub fn write_model_f32(
    path: &Path,
    config: &ModelConfig,
    values: &mut dyn FnMut(TensorName) -> Result<Vec<f32>, String>,
) -> Result<()> {
    let mut writer = SafetensorsWriter::create(path, DType::F32, &table(config))?;
    for name in config.tensor_names() {
        let shape = config.shape(name).unwrap_or_default();
        let refuse = |reason| ModelError::tensor(path, &name.hugging_face(config.family), reason);
        put(&mut writer, shape, values(name).map_err(refuse)?).map_err(refuse)??;
    }
    writer.finish()
}

/// Writes and syncs a safetensors file of vectors in f32, by name and length; `values` gives one after the other.
pub fn write_vectors_f32(
    path: &Path,
    vectors: &[(String, usize)],
    values: &mut dyn FnMut(usize) -> Result<Vec<f32>, String>,
) -> Result<()> {
    let table: Vec<_> = vectors
        .iter()
        .map(|(n, len)| (n.clone(), [1, *len]))
        .collect();
    let mut writer = SafetensorsWriter::create(path, DType::F32, &table)?;
    for (at, (name, len)) in vectors.iter().enumerate() {
        let refuse = |reason| ModelError::tensor(path, name, reason);
        put(&mut writer, [1, *len], values(at).map_err(refuse)?).map_err(refuse)??;
    }
    writer.finish()
}

fn put(
    writer: &mut SafetensorsWriter,
    [rows, cols]: [usize; 2],
    values: Vec<f32>,
) -> Result<Result<()>, String> {
    if values.len() != rows * cols {
        let has = values.len();
        return Err(format!("has {has} numbers, not {rows} x {cols}"));
    }
    Ok(writer.tensor(&encode(DType::F32, cols, &values)?))
}
