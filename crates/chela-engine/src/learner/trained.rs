//! What a learner trains: an adapter beside the frozen base model, or all weights of a model of its own.

use crate::{
    adapter::{Adapter, Lora},
    digest,
    error::{kernel, weights},
    full::{self, Grads, Tensors},
    weights::BaseWeights,
};
use chela_core::{EngineError, Weights};
use chela_kernels::Kernels;
use chela_model::{FolderTexts, ModelConfig, write_model_f32};
use std::path::Path;

/// What is trained, as it is now.
pub enum Trained<K: Kernels> {
    /// An adapter.
    Adapter(Adapter<K::Buf>),
    /// A whole model.
    Full(Box<Full<K>>),
}

/// A whole model in training. Everything here is f32, whatever the base model is stored in: steps are far smaller than what bf16 can
/// add to a weight.
pub struct Full<K: Kernels> {
    /// What the optimizer moves.
    master: Tensors<K::Buf>,
    /// The same numbers as passes read them; `None` only while they are made anew.
    model: Option<BaseWeights<K>>,
    config: ModelConfig,
    none: Adapter<K::Buf>,
    /// What is written beside the weights.
    texts: FolderTexts,
}

impl<K: Kernels> Full<K> {
    /// A model of these weights. The base model's frequencies and switches stay.
    pub fn new(
        k: &K,
        base: &BaseWeights<K>,
        master: Tensors<K::Buf>,
        texts: FolderTexts,
    ) -> Result<Self, EngineError> {
        let layers = base.layers.iter().map(|_| Default::default()).collect();
        let mut full = Self {
            master,
            model: None,
            config: base.config.clone(),
            none: Adapter {
                rank: 1,
                alpha: 1.0,
                layers,
            },
            texts,
        };
        full.refresh(k)?;
        Ok(full)
    }

    fn refresh(&mut self, k: &K) -> Result<(), EngineError> {
        self.model = None; // first, so that two of them never stand in memory
        let mut from = full::Trained {
            k,
            config: &self.config,
            tensors: &self.master,
        };
        self.model = Some(BaseWeights::build(k, self.config.clone(), &mut from)?);
        Ok(())
    }

    fn model(&self) -> Result<&BaseWeights<K>, EngineError> {
        let gone = || EngineError::Stopped("the model in training was lost".to_owned());
        self.model.as_ref().ok_or_else(gone)
    }
}

/// Buffers of A and B of every map, in a fixed order.
fn buffers<B>(adapter: &Adapter<B>) -> impl Iterator<Item = &B> {
    adapter
        .layers
        .iter()
        .flatten()
        .flatten()
        .flat_map(|l| [&l.a, &l.b])
}

fn zeros_like<K: Kernels>(
    k: &K,
    adapter: &Adapter<K::Buf>,
) -> Result<Adapter<K::Buf>, EngineError> {
    let mut layers = Vec::with_capacity(adapter.layers.len());
    for maps in &adapter.layers {
        let mut zeros: [Option<Lora<K::Buf>>; 7] = Default::default();
        for (zero, lora) in zeros.iter_mut().zip(maps) {
            if let Some(lora) = lora {
                let a = k.zeros(adapter.rank * lora.input).map_err(kernel)?;
                let b = k.zeros(adapter.rank * lora.out).map_err(kernel)?;
                *zero = Some(Lora {
                    a,
                    b,
                    out: lora.out,
                    input: lora.input,
                });
            }
        }
        layers.push(zeros);
    }
    Ok(Adapter {
        rank: adapter.rank,
        alpha: adapter.alpha,
        layers,
    })
}

impl<B> Grads<B> {
    /// All buffers, in the order of [`Trained::params_mut`].
    pub(super) fn buffers(&self) -> Vec<&B> {
        match self {
            Self::Adapter(adapter) => buffers(adapter).collect(),
            Self::Full(tensors) => tensors.buffers().iter().collect(),
        }
    }

    /// As [`Grads::buffers`].
    pub(super) fn buffers_mut(&mut self) -> Vec<&mut B> {
        match self {
            Self::Adapter(adapter) => {
                let maps = adapter.layers.iter_mut().flatten().flatten();
                maps.flat_map(|l| [&mut l.a, &mut l.b]).collect()
            }
            Self::Full(tensors) => tensors.buffers_mut().iter_mut().collect(),
        }
    }
}

impl<K: Kernels> Trained<K> {
    /// Zeros of the same shapes.
    pub(super) fn grads(&self, k: &K) -> Result<Grads<K::Buf>, EngineError> {
        Ok(match self {
            Self::Adapter(adapter) => Grads::Adapter(zeros_like(k, adapter)?),
            Self::Full(full) => Grads::Full(Tensors::zeros(k, &full.config)?),
        })
    }

    /// What a pass under the present weights goes through.
    pub(super) fn present<'a>(
        &'a self,
        base: &'a BaseWeights<K>,
    ) -> Result<(&'a BaseWeights<K>, &'a Adapter<K::Buf>), EngineError> {
        Ok(match self {
            Self::Adapter(adapter) => (base, adapter),
            Self::Full(full) => (full.model()?, &full.none),
        })
    }

    /// What the optimizer moves, and whether weight decay applies to it: to all of an adapter, to the matrices of a model.
    pub(super) fn params_mut(&mut self) -> Vec<(&mut K::Buf, bool)> {
        match self {
            Self::Adapter(adapter) => {
                let maps = adapter.layers.iter_mut().flatten().flatten();
                let both = maps.flat_map(|l| [&mut l.a, &mut l.b]);
                both.map(|buf| (buf, true)).collect()
            }
            Self::Full(full) => {
                let decays: Vec<bool> = full
                    .master
                    .names()
                    .iter()
                    .map(|n| full::decays(*n))
                    .collect();
                let buffers = full.master.buffers_mut().iter_mut();
                buffers.zip(decays).collect()
            }
        }
    }

    /// After the optimizer has moved the weights.
    pub(super) fn refresh(&mut self, k: &K) -> Result<(), EngineError> {
        match self {
            Self::Adapter(_) => Ok(()),
            Self::Full(full) => full.refresh(k),
        }
    }

    /// SHA-256 over the weights as passes read them.
    pub(super) fn hash(&self, k: &K) -> Result<String, EngineError> {
        match self {
            Self::Adapter(adapter) => adapter.hash(k),
            Self::Full(full) => digest::of_model(k, full.model()?, &mut || {}),
        }
    }

    /// Writes the weights into an existing folder and syncs them: PEFT's two files, or a model that other programs open too.
    pub(super) fn write(&self, k: &K, base_model: &str, dir: &Path) -> Result<(), EngineError> {
        let full = match self {
            Self::Adapter(adapter) => return adapter.write(k, base_model, dir),
            Self::Full(full) => full,
        };
        full.texts.write(dir).map_err(weights)?;
        let mut values = |name| {
            let buf = full.master.get(name).ok_or("is not trained")?;
            k.download(buf).map_err(|e| e.to_string())
        };
        write_model_f32(&dir.join(Weights::MODEL), &full.config, &mut values).map_err(weights)
    }
}
