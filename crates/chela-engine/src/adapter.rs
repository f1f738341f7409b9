//! Low-rank adapters (Hu et al., arXiv 2106.09685): y += (alpha / r) · (x Aᵀ) Bᵀ, in PEFT's layout on disk.

mod config;
mod file;
mod inspect;
mod tensors;

pub(crate) use self::{file::AdapterFile, tensors::TensorFile};
pub use self::{
    inspect::{AdapterInfo, inspect},
    tensors::{bytes_of, floats, write_synced, write_tensors},
};

use self::config::{targets, written_config};
use crate::{
    digest::AdapterDigest,
    error::{kernel, weights},
};
use chela_core::{AdapterSpec, EngineError};
use chela_kernels::Kernels;
use chela_model::{LayerTensor, ModelConfig};
use std::path::Path;

/// The seven linear maps of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// Query.
    Q,
    /// Key.
    K,
    /// Value.
    V,
    /// Output of attention.
    O,
    /// Gate of the gated unit.
    Gate,
    /// Its other input.
    Up,
    /// Its output.
    Down,
}

impl Target {
    /// In the order in which weights and adapters are kept.
    pub const ALL: [Self; 7] = [
        Self::Q,
        Self::K,
        Self::V,
        Self::O,
        Self::Gate,
        Self::Up,
        Self::Down,
    ];

    /// Those that an adapter of this model may change: experts and their router take none.
    pub fn of(config: &ModelConfig) -> &'static [Self] {
        match config.experts {
            None => &Self::ALL,
            Some(_) => &Self::ALL[..4],
        }
    }

    /// PEFT's name of the module.
    pub fn module(self) -> &'static str {
        match self {
            Self::Q => "q_proj",
            Self::K => "k_proj",
            Self::V => "v_proj",
            Self::O => "o_proj",
            Self::Gate => "gate_proj",
            Self::Up => "up_proj",
            Self::Down => "down_proj",
        }
    }

    /// The matrix it changes.
    pub fn weight(self) -> LayerTensor {
        match self {
            Self::Q => LayerTensor::Q,
            Self::K => LayerTensor::K,
            Self::V => LayerTensor::V,
            Self::O => LayerTensor::O,
            Self::Gate => LayerTensor::Gate,
            Self::Up => LayerTensor::Up,
            Self::Down => LayerTensor::Down,
        }
    }

    /// The bias of that map, where families may have one.
    pub fn bias(self) -> Option<LayerTensor> {
        match self {
            Self::Q => Some(LayerTensor::QBias),
            Self::K => Some(LayerTensor::KBias),
            Self::V => Some(LayerTensor::VBias),
            Self::O => Some(LayerTensor::OBias),
            Self::Gate | Self::Up | Self::Down => None,
        }
    }

    fn parent(self) -> &'static str {
        match self {
            Self::Q | Self::K | Self::V | Self::O => "self_attn",
            Self::Gate | Self::Up | Self::Down => "mlp",
        }
    }

    /// `(out, in)` of the map.
    pub fn shape(self, c: &ModelConfig) -> (usize, usize) {
        let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        match self {
            Self::Q => (q, c.hidden),
            Self::K | Self::V => (kv, c.hidden),
            Self::O => (c.hidden, q),
            Self::Gate | Self::Up => (c.intermediate, c.hidden),
            Self::Down => (c.hidden, c.intermediate),
        }
    }

    /// PEFT's name of one factor's tensor.
    pub(crate) fn tensor(self, layer: usize, side: Side) -> String {
        format!(
            "{PREFIX}model.layers.{layer}.{}.{}.lora_{side:?}.weight",
            self.parent(),
            self.module()
        )
    }
}

/// Which of the two factors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// `[r, in]`
    A,
    /// `[out, r]`
    B,
}

/// What PEFT's wrapper puts before the base model's own names.
const PREFIX: &str = "base_model.model.";

/// One map's factors.
#[derive(Debug)]
pub struct Lora<B> {
    /// `[r, in]`
    pub a: B,
    /// `[out, r]`
    pub b: B,
    /// out
    pub out: usize,
    /// in
    pub input: usize,
}

/// A whole adapter.
#[derive(Debug)]
pub struct Adapter<B> {
    /// r
    pub rank: usize,
    /// Numerator of the scale.
    pub alpha: f32,
    /// By layer, by [`Target::ALL`].
    pub layers: Vec<[Option<Lora<B>>; 7]>,
}

impl<B> Adapter<B> {
    /// Factor of (x Aᵀ) Bᵀ.
    pub fn scale(&self) -> f32 {
        self.alpha / self.rank as f32
    }

    /// An adapter of the same layers that changes nothing.
    pub fn without_maps(&self) -> Self {
        Self {
            rank: self.rank,
            alpha: self.alpha,
            layers: self.layers.iter().map(|_| Default::default()).collect(),
        }
    }

    /// Each present map with its layer and target.
    pub fn entries(&self) -> impl Iterator<Item = (usize, Target, &Lora<B>)> {
        self.layers.iter().enumerate().flat_map(|(layer, maps)| {
            Target::ALL
                .into_iter()
                .zip(maps)
                .filter_map(move |(t, m)| m.as_ref().map(|m| (layer, t, m)))
        })
    }

    /// A fresh adapter: A uniform in ±1/√in (PEFT's Kaiming with a = √5), B zero, so that it equals the base model.
    pub fn fresh<K: Kernels<Buf = B>>(
        k: &K,
        config: &ModelConfig,
        spec: &AdapterSpec,
    ) -> Result<Self, EngineError> {
        let targets = targets(&spec.targets, config)?;
        if spec.rank == 0 || !(spec.alpha.is_finite() && spec.alpha > 0.0) {
            return Err(weights(format!(
                "rank {} and alpha {}",
                spec.rank, spec.alpha
            )));
        }
        let mut rng = crate::rng::Rng::new(spec.seed ^ 0x4c6f_5241);
        let mut layers = Vec::with_capacity(config.layers);
        for _ in 0..config.layers {
            let mut maps: [Option<Lora<B>>; 7] = Default::default();
            for target in &targets {
                let (out, input) = target.shape(config);
                let bound = 1.0 / (input as f32).sqrt();
                let a: Vec<f32> = (0..spec.rank * input)
                    .map(|_| (2.0 * rng.uniform() as f32 - 1.0) * bound)
                    .collect();
                let a = k.upload(&a).map_err(kernel)?;
                let b = k.zeros(out * spec.rank).map_err(kernel)?;
                maps[*target as usize] = Some(Lora { a, b, out, input });
            }
            layers.push(maps);
        }
        Ok(Self {
            rank: spec.rank,
            alpha: spec.alpha,
            layers,
        })
    }

    /// Reads PEFT's two files, refusing what does not belong to this model, by tensor and reason.
    pub fn read<K: Kernels<Buf = B>>(
        k: &K,
        config: &ModelConfig,
        dir: &Path,
    ) -> Result<Self, EngineError> {
        Self::read_seen(k, config, dir, &mut |_, _, _| Ok(()))
    }

    /// The same; `see` is shown rank and scale, layer and target, and the factors of each map as soon as it stands in memory.
    #[allow(clippy::type_complexity)] // one closure's parameters
    pub fn read_seen<K: Kernels<Buf = B>>(
        k: &K,
        config: &ModelConfig,
        dir: &Path,
        see: &mut dyn FnMut((usize, f32), (usize, Target), &Lora<B>) -> Result<(), EngineError>,
    ) -> Result<Self, EngineError> {
        let mut file = AdapterFile::open(config, dir)?;
        let mut adapter = Self {
            rank: file.rank(),
            alpha: file.alpha(),
            layers: Vec::with_capacity(config.layers),
        };
        let scale = (adapter.rank, adapter.scale());
        for layer in 0..config.layers {
            let mut maps: [Option<Lora<B>>; 7] = Default::default();
            for target in file.targets().to_vec() {
                let (out, input) = target.shape(config);
                let mut read = |side| k.upload(&file.factor(layer, target, side)?).map_err(kernel);
                let (a, b) = (read(Side::A)?, read(Side::B)?);
                let lora = Lora { a, b, out, input };
                see(scale, (layer, target), &lora)?;
                maps[target as usize] = Some(lora);
            }
            adapter.layers.push(maps);
        }
        Ok(adapter)
    }

    /// Writes PEFT's two files into an existing folder and syncs them.
    pub fn write<K: Kernels<Buf = B>>(
        &self,
        k: &K,
        base_model: &str,
        dir: &Path,
    ) -> Result<(), EngineError> {
        let mut modules: Vec<String> = Vec::new();
        let mut tensors = Vec::new();
        for (layer, target, lora) in self.entries() {
            if layer == 0 {
                modules.push(target.module().to_owned());
            }
            let a = k.download(&lora.a).map_err(kernel)?;
            let b = k.download(&lora.b).map_err(kernel)?;
            tensors.push((
                target.tensor(layer, Side::A),
                vec![self.rank, lora.input],
                bytes_of(&a),
            ));
            tensors.push((
                target.tensor(layer, Side::B),
                vec![lora.out, self.rank],
                bytes_of(&b),
            ));
        }
        let text = written_config(self.rank, self.alpha, modules, base_model)?;
        write_synced(&dir.join("adapter_config.json"), &text)?;
        write_tensors(&dir.join("adapter_model.safetensors"), &tensors)
    }

    /// SHA-256 over names, shapes, scale and values as they are in memory.
    pub fn hash<K: Kernels<Buf = B>>(&self, k: &K) -> Result<String, EngineError> {
        let mut digest = AdapterDigest::default();
        for (layer, target, lora) in self.entries() {
            digest.add(k, (self.rank, self.scale()), (layer, target), lora)?;
        }
        Ok(digest.finish())
    }
}
