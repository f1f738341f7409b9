//! A version's weights as requests use them: an adapter over the base model, or a whole model.

use crate::{
    adapter::Adapter,
    error::weights,
    weights::{BaseWeights, Files, Source},
};
use chela_core::EngineError;
use chela_kernels::Kernels;
use chela_model::{Layout, Model, ModelConfig, ModelFiles, TensorName};
use std::{path::Path, sync::Arc};

/// What was trained.
pub enum Version<K: Kernels> {
    /// Beside the base model's weights.
    Adapter(Adapter<K::Buf>),
    /// In their place.
    Whole(Box<BaseWeights<K>>),
}

/// A request's version; `None` is the base model.
pub type Held<K> = Option<Arc<Version<K>>>;

/// The weights that rows of a version go through.
pub fn model<'a, K: Kernels>(held: &'a Held<K>, base: &'a BaseWeights<K>) -> &'a BaseWeights<K> {
    match held.as_deref() {
        Some(Version::Whole(model)) => model,
        Some(Version::Adapter(_)) | None => base,
    }
}

/// The adapter beside them.
pub fn adapter<K: Kernels>(held: &Held<K>) -> Option<&Adapter<K::Buf>> {
    match held.as_deref() {
        Some(Version::Adapter(adapter)) => Some(adapter),
        Some(Version::Whole(_)) | None => None,
    }
}

/// Opens a model that was trained from one of this configuration.
pub fn open(base: &ModelConfig, dir: &Path) -> Result<Model, EngineError> {
    let model = Model::open(&ModelFiles {
        name: dir.display().to_string(),
        layout: Layout::Folder(dir.to_owned()),
    });
    let model = model.map_err(weights)?;
    let own = model.config();
    let names = [base.tensor_names(), own.tensor_names()].concat();
    let differs = names.iter().find(|n| own.shape(**n) != base.shape(**n));
    if let Some(name) = differs {
        let size = |shape: Option<[usize; 2]>| {
            shape.map_or("none".to_owned(), |[rows, cols]| format!("{rows} x {cols}"))
        };
        return Err(weights(format!(
            "{}: {name} is {}, the base model's is {}: it was trained from another model",
            dir.display(),
            size(own.shape(*name)),
            size(base.shape(*name))
        )));
    }
    Ok(model)
}

/// Reads a model that was trained from `base`, whose frequencies and switches it keeps; `rest` is called between tensors.
pub fn read_whole<K: Kernels>(
    k: &K,
    base: &BaseWeights<K>,
    dir: &Path,
    rest: &mut dyn FnMut(),
) -> Result<BaseWeights<K>, EngineError> {
    let model = open(&base.config, dir)?;
    let mut from = Resting {
        files: Files { model: &model, k },
        rest,
    };
    BaseWeights::build(k, base.config.clone(), &mut from)
}

/// A model's files, read with pauses.
struct Resting<'a, K> {
    files: Files<'a, K>,
    rest: &'a mut dyn FnMut(),
}

impl<K: Kernels> Source<K> for Resting<'_, K> {
    fn matrix(&mut self, name: TensorName) -> Result<K::Weight, EngineError> {
        (self.rest)();
        self.files.matrix(name)
    }

    fn vector(&mut self, name: TensorName) -> Result<K::Buf, EngineError> {
        self.files.vector(name)
    }
}
