//! An adapter's folder, opened: configuration and names checked against the model, factors read one by one.

use super::{
    PREFIX, Side, Target,
    config::{self, PeftConfig},
    inspect::check_tokenizer,
    tensors::TensorFile,
};
use crate::error::weights;
use chela_core::EngineError;
use chela_model::ModelConfig;
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

/// A folder whose configuration is supported and whose tensors are exactly the expected ones; their shapes and values are
/// checked as they are read.
pub(crate) struct AdapterFile {
    pub(super) config: PeftConfig,
    pub(super) file: TensorFile,
    path: PathBuf,
    /// The name of each tensor in the file, by the one that PEFT gives it.
    names: HashMap<String, String>,
    model: ModelConfig,
}

impl AdapterFile {
    /// Opens `dir` for a model.
    pub fn open(model: &ModelConfig, dir: &Path) -> Result<Self, EngineError> {
        let config = config::read(&dir.join("adapter_config.json"), model)?;
        check_tokenizer(dir, model)?;
        let path = dir.join("adapter_model.safetensors");
        if !path.exists() && dir.join("adapter_model.bin").exists() {
            return Err(weights(format!(
                "{}: only adapter_model.bin is here, a format that can run code when it is read; save the adapter with \
                 safe_serialization=True",
                dir.display()
            )));
        }
        let refuse = |why: String| weights(format!("{}: {why}", path.display()));
        let file = TensorFile::open(&path).map_err(refuse)?;
        let names = canonical_names(&file.names()).map_err(refuse)?;
        let adapter = Self {
            config,
            file,
            names,
            model: model.clone(),
            path: path.clone(),
        };
        adapter.check_names().map_err(refuse)?;
        Ok(adapter)
    }

    /// r
    pub fn rank(&self) -> usize {
        self.config.rank
    }

    /// Numerator of the scale.
    pub fn alpha(&self) -> f32 {
        self.config.alpha
    }

    /// The maps of each layer that it changes.
    pub fn targets(&self) -> &[Target] {
        &self.config.targets
    }

    /// One factor of one map.
    pub fn factor(
        &mut self,
        layer: usize,
        target: Target,
        side: Side,
    ) -> Result<Vec<f32>, EngineError> {
        let (out, input) = target.shape(&self.model);
        let shape = match side {
            Side::A => [self.config.rank, input],
            Side::B => [out, self.config.rank],
        };
        let name = target.tensor(layer, side);
        let stored = self.names.get(&name).unwrap_or(&name);
        self.file
            .values(stored, &shape)
            .map_err(|why| weights(format!("{}: {why}", self.path.display())))
    }

    /// Names of all tensors, in the order of layers.
    fn expected(&self) -> impl Iterator<Item = String> {
        let targets = &self.config.targets;
        (0..self.model.layers).flat_map(move |layer| {
            let sides = |t: &Target| [t.tensor(layer, Side::A), t.tensor(layer, Side::B)];
            targets.iter().flat_map(sides).collect::<Vec<_>>()
        })
    }

    /// What is missing or too much means that this adapter was made for another model.
    fn check_names(&self) -> Result<(), String> {
        let layers = self.model.layers;
        let missing = self.expected().find(|name| !self.names.contains_key(name));
        if let Some(name) = missing {
            let count = self.names.len();
            return Err(format!(
                "{name} is missing: this model has {layers} layers, the file {count} tensors; is it an adapter of another model?"
            ));
        }
        let expected: std::collections::HashSet<String> = self.expected().collect();
        let surplus = self
            .names
            .iter()
            .filter(|(name, _)| !expected.contains(*name));
        match surplus.map(|(_, stored)| stored).min() {
            None => Ok(()),
            Some(stored) if self.model.experts.is_some() && stored.contains(".mlp.") => Err(
                format!("{stored:?}: {}", config::without_experts(&Target::ALL[4..])),
            ),
            Some(stored) => Err(format!(
                "{stored:?} belongs to none of the target modules in this model's {layers} layers; is it an adapter of another model?"
            )),
        }
    }
}

/// The file's names by PEFT's. Trainers that save their own state leave the wrapper's prefix out, or the adapter's name in
/// (`lora_A.default.weight`, as it is in memory).
fn canonical_names(stored: &[String]) -> Result<HashMap<String, String>, String> {
    let mut names = HashMap::with_capacity(stored.len());
    for stored in stored {
        let inner = stored.strip_prefix(PREFIX).unwrap_or(stored);
        let inner = match inner.strip_suffix(".default.weight") {
            Some(module) => format!("{module}.weight"),
            None => inner.to_owned(),
        };
        if let Some(other) = names.insert(format!("{PREFIX}{inner}"), stored.clone()) {
            return Err(format!("{other:?} and {stored:?} are the same tensor"));
        }
    }
    Ok(names)
}
