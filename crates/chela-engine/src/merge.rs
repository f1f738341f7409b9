//! Merges an adapter into its base model, W + (alpha / r) · B · A, or puts all weights that were trained in its place, and writes the
//! result for other programs: a Hugging Face folder or a GGUF file. One tensor is in memory at a time.

use crate::{
    adapter::{AdapterFile, AdapterInfo, Side, Target, inspect},
    error::weights,
    version,
};
use chela_core::{EngineError, Weights};
use chela_model::{DType, Edit, Model, ModelError, Progress, TensorName, write_folder, write_gguf};
use std::path::Path;

/// What is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A folder for transformers: `config.json`, tokenizer, `model.safetensors`.
    Folder,
    /// A file for llama.cpp.
    Gguf,
}

/// What was merged and written.
#[derive(Clone, Debug, PartialEq)]
pub struct Merged {
    /// The adapter; `None` where the version is a whole model.
    pub adapter: Option<AdapterInfo>,
    /// How changed matrices are stored.
    pub dtype: DType,
    /// Maps that the adapter changed, or tensors that were put in place.
    pub maps: usize,
}

/// Merges the adapter (or whole model) in `dir` into `model` and writes `to`, which must not exist. `dtype` is that of changed matrices; `None` is the
/// model's own type in a folder (F16 where it is quantised) and F16 in a GGUF file. The adapter is checked as a whole before anything
/// is written, and after a failure nothing lies at `to`.
pub fn merge(
    model: &Model,
    dir: &Path,
    (form, dtype): (Form, Option<DType>),
    to: &Path,
    progress: &mut dyn Progress,
) -> Result<Merged, EngineError> {
    let config = model.config();
    if Weights::is_whole(dir) {
        let mut replacing = Replacing {
            by: version::open(config, dir)?,
            tensors: 0,
        };
        let dtype = write(model, (form, dtype), to, &mut replacing, progress)?;
        return Ok(Merged {
            adapter: None,
            dtype,
            maps: replacing.tensors,
        });
    }
    let adapter = inspect(dir, config)?;
    let file = AdapterFile::open(config, dir)?;
    let mut merging = Merging {
        scale: file.alpha() / file.rank() as f32,
        targets: file.targets().to_vec(),
        maps: 0,
        file,
    };
    let dtype = write(model, (form, dtype), to, &mut merging, progress)?;
    Ok(Merged {
        adapter: Some(adapter),
        dtype,
        maps: merging.maps,
    })
}

fn write(
    model: &Model,
    (form, dtype): (Form, Option<DType>),
    to: &Path,
    edit: &mut dyn Edit,
    progress: &mut dyn Progress,
) -> Result<DType, EngineError> {
    match form {
        Form::Folder => write_folder(model, to, dtype, edit, progress),
        Form::Gguf => write_gguf(model, to, dtype, edit, progress),
    }
    .map_err(refused)
}

/// Every tensor of a model by another's.
struct Replacing {
    by: Model,
    tensors: usize,
}

impl Edit for Replacing {
    fn touches(&self, _: TensorName) -> bool {
        true
    }

    fn apply(
        &mut self,
        name: TensorName,
        shape: [usize; 2],
        values: &mut [f32],
    ) -> Result<(), String> {
        let tensor = self.by.tensor(name).map_err(|e| e.to_string())?;
        let own = tensor.to_f32();
        if tensor.shape != shape || own.len() != values.len() {
            return Err(format!("is {:?} instead of {shape:?}", tensor.shape));
        }
        values.copy_from_slice(&own);
        self.tensors += 1;
        Ok(())
    }
}

/// A full disk is no fault of the weights.
fn refused(error: ModelError) -> EngineError {
    match error {
        ModelError::Io { .. } | ModelError::DiskFull { .. } => EngineError::Io(error.to_string()),
        other => weights(other),
    }
}

struct Merging {
    file: AdapterFile,
    scale: f32,
    targets: Vec<Target>,
    maps: usize,
}

impl Merging {
    fn target(&self, name: TensorName) -> Option<(usize, Target)> {
        let TensorName::Layer(layer, tensor) = name else {
            return None;
        };
        let mut targets = self.targets.iter();
        let target = targets.find(|target| target.weight() == tensor)?;
        Some((layer, *target))
    }
}

impl Edit for Merging {
    fn touches(&self, name: TensorName) -> bool {
        self.target(name).is_some()
    }

    fn apply(
        &mut self,
        name: TensorName,
        [_, cols]: [usize; 2],
        values: &mut [f32],
    ) -> Result<(), String> {
        let Some((layer, target)) = self.target(name) else {
            return Ok(());
        };
        let mut factor = |side| {
            let factor = self.file.factor(layer, target, side);
            factor.map_err(|e| e.to_string())
        };
        let (a, b) = (factor(Side::A)?, factor(Side::B)?);
        add_product(values, cols, (&a, &b), self.file.rank(), self.scale);
        self.maps += 1;
        Ok(())
    }
}

/// `values [out, in] += scale · B [out, r] · A [r, in]`. The product of a row is summed by itself first: its terms are small next
/// to the weights.
fn add_product(values: &mut [f32], cols: usize, (a, b): (&[f32], &[f32]), rank: usize, scale: f32) {
    let mut delta = vec![0.0f32; cols];
    for (row, b) in values.chunks_exact_mut(cols).zip(b.chunks_exact(rank)) {
        delta.fill(0.0);
        for (b, a) in b.iter().zip(a.chunks_exact(cols)) {
            delta.iter_mut().zip(a).for_each(|(d, a)| *d += b * a);
        }
        row.iter_mut()
            .zip(&delta)
            .for_each(|(w, d)| *w += scale * d);
    }
}

#[cfg(test)]
mod tests {
    use super::add_product;

    #[test]
    fn a_product_is_added() {
        // W [2, 3], A [2, 3], B [2, 2], by hand.
        let mut w = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0];
        let a = [1.0, 2.0, 3.0, -1.0, 0.0, 1.0];
        let b = [1.0, 0.0, 2.0, 1.0];
        add_product(&mut w, 3, (&a, &b), 2, 0.5);
        assert_eq!(w, [1.5, 1.0, 1.5, 0.5, 3.0, 3.5]);
    }
}
