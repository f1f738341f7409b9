//! Every weight of a model in training: what a whole model's learner keeps four times (the weights themselves, their gradient, two
//! moments), and what a pass adds gradients to.

use crate::{
    adapter::{Adapter, Lora, Target},
    error::kernel,
    weights::{BaseWeights, Source},
};
use chela_core::EngineError;
use chela_kernels::{Acc, Kernels, Mat, MatMut, Product};
use chela_model::{LayerTensor, ModelConfig, TensorName};
use std::collections::HashMap;

/// A buffer of f32 for each tensor of a model, in the order of a forward pass. A tied head is the embedding.
pub struct Tensors<B> {
    names: Vec<TensorName>,
    buffers: Vec<B>,
    places: HashMap<TensorName, usize>,
}

impl<B> Tensors<B> {
    /// Numbers that `make` gives for a name and a shape.
    fn with(
        config: &ModelConfig,
        mut make: impl FnMut(TensorName, [usize; 2]) -> Result<B, EngineError>,
    ) -> Result<Self, EngineError> {
        let names = config.tensor_names();
        let shape = |name: &TensorName| config.shape(*name).unwrap_or_default();
        let buffers = names.iter().map(|name| make(*name, shape(name)));
        Ok(Self {
            buffers: buffers.collect::<Result<_, _>>()?,
            places: names.iter().enumerate().map(|(i, n)| (*n, i)).collect(),
            names,
        })
    }

    /// All zero.
    pub fn zeros<K: Kernels<Buf = B>>(k: &K, config: &ModelConfig) -> Result<Self, EngineError> {
        Self::with(config, |_, [rows, cols]| {
            k.zeros(rows * cols).map_err(kernel)
        })
    }

    /// A copy of a model's weights.
    pub fn of<K: Kernels<Buf = B>>(k: &K, model: &BaseWeights<K>) -> Result<Self, EngineError> {
        Self::with(&model.config, |name, [rows, cols]| {
            let mut buf = k.zeros(rows * cols).map_err(kernel)?;
            let (mut at, mut written) = (0, Ok(()));
            model.read(k, name, &mut |values| {
                let write = k.write(&mut buf, at, values);
                at += values.len();
                written = std::mem::replace(&mut written, Ok(())).and(write);
            })?;
            written.map_err(kernel)?;
            Ok(buf)
        })
    }

    /// Their names.
    pub fn names(&self) -> &[TensorName] {
        &self.names
    }

    /// In the order of the names.
    pub fn buffers(&self) -> &[B] {
        &self.buffers
    }

    /// As [`Tensors::buffers`].
    pub fn buffers_mut(&mut self) -> &mut [B] {
        &mut self.buffers
    }

    /// One of them.
    pub fn get(&self, name: TensorName) -> Option<&B> {
        self.places.get(&name).map(|at| &self.buffers[*at])
    }

    fn get_mut(&mut self, name: TensorName) -> Option<&mut B> {
        let at = *self.places.get(&name)?;
        self.buffers.get_mut(at)
    }

    /// Adds what an adapter adds to the maps it changes.
    pub fn merge<K: Kernels<Buf = B>>(
        &mut self,
        k: &K,
        adapter: &Adapter<B>,
    ) -> Result<(), EngineError> {
        let (rank, scale) = (adapter.rank, adapter.scale());
        for (layer, target, lora) in adapter.entries() {
            let name = TensorName::Layer(layer, target.weight());
            let to = self.get_mut(name);
            let to = to.ok_or_else(|| EngineError::Shape(format!("{name} is not here")))?;
            let (a, b) = (
                Mat::new(&lora.a, rank, lora.input),
                Mat::new(&lora.b, lora.out, rank),
            );
            let to = MatMut::new(to, lora.out, lora.input);
            k.matmul(Product::NN, scale, (b, a), to, Acc::Add)
                .map_err(kernel)?;
        }
        Ok(())
    }
}

/// Tensors as the source of a model.
pub struct Trained<'a, K: Kernels> {
    /// Copies them.
    pub k: &'a K,
    /// Its sizes.
    pub config: &'a ModelConfig,
    /// The numbers.
    pub tensors: &'a Tensors<K::Buf>,
}

impl<K: Kernels> Trained<'_, K> {
    fn get(&self, name: TensorName) -> Result<&K::Buf, EngineError> {
        let found = self.tensors.get(name);
        found.ok_or_else(|| EngineError::Shape(format!("{name} is not trained")))
    }
}

impl<K: Kernels> Source<K> for Trained<'_, K> {
    fn matrix(&mut self, name: TensorName) -> Result<K::Weight, EngineError> {
        let [rows, cols] = self.config.shape(name).unwrap_or_default();
        let weight = self.k.weight_from_buf(self.get(name)?, rows, cols);
        weight.map_err(kernel)
    }

    fn vector(&mut self, name: TensorName) -> Result<K::Buf, EngineError> {
        let from = self.get(name)?;
        let n = self.k.len(from);
        let mut to = self.k.zeros(n).map_err(kernel)?;
        self.k.copy(from, 0, &mut to, 0, n).map_err(kernel)?;
        Ok(to)
    }
}

/// Whether weight decay applies: to matrices, as is usual, not to norms and biases.
pub fn decays(name: TensorName) -> bool {
    use LayerTensor as L;
    let bias = matches!(
        name,
        TensorName::Layer(_, L::QBias | L::KBias | L::VBias | L::OBias)
    );
    !name.is_norm() && !bias
}

/// What a pass adds gradients to.
pub enum Grads<B> {
    /// An adapter's; everything else is frozen.
    Adapter(Adapter<B>),
    /// All weights'.
    Full(Tensors<B>),
}

impl<B> Default for Grads<B> {
    fn default() -> Self {
        Self::Adapter(Adapter {
            rank: 1,
            alpha: 1.0,
            layers: Vec::new(),
        })
    }
}

impl<B> Grads<B> {
    /// Whether only an adapter is trained.
    pub fn frozen_base(&self) -> bool {
        matches!(self, Self::Adapter(_))
    }

    /// Where an adapter's map is trained.
    pub fn lora(&mut self, layer: usize, target: Target) -> Option<&mut Lora<B>> {
        match self {
            Self::Adapter(adapter) => adapter.layers[layer][target as usize].as_mut(),
            Self::Full(_) => None,
        }
    }

    /// Where the model's own tensor is trained.
    pub fn tensor(&mut self, name: TensorName) -> Option<&mut B> {
        match self {
            Self::Adapter(_) => None,
            Self::Full(tensors) => tensors.get_mut(name),
        }
    }

    /// [`Grads::tensor`] of a layer.
    pub fn of_layer(&mut self, layer: usize, tensor: LayerTensor) -> Option<&mut B> {
        self.tensor(TensorName::Layer(layer, tensor))
    }

    /// Where the head's matrix is trained: the embedding's place when they are one.
    pub fn head(&mut self, config: &ModelConfig) -> Option<&mut B> {
        self.tensor(if config.tie_embeddings {
            TensorName::Embed
        } else {
            TensorName::Head
        })
    }

    /// From the rows that a map read and the derivative by what it gave: dW += dyᵀ x, d bias += the sum of dy.
    pub fn add_linear<K: Kernels<Buf = B>>(
        &mut self,
        k: &K,
        (layer, target): (usize, Target),
        x: Mat<'_, B>,
        dy: Mat<'_, B>,
    ) -> Result<(), EngineError> {
        if let Some(dw) = self.of_layer(layer, target.weight()) {
            let to = MatMut::new(dw, dy.cols, x.cols);
            k.matmul(Product::TN, 1.0, (dy, x), to, Acc::Add)
                .map_err(kernel)?;
        }
        let bias = target.bias().and_then(|bias| self.of_layer(layer, bias));
        let Some(bias) = bias else { return Ok(()) };
        let ones = k.upload(&vec![1.0; dy.rows]).map_err(kernel)?;
        let ones = Mat::new(&ones, dy.rows, 1);
        let to = MatMut::new(bias, dy.cols, 1);
        k.matmul(Product::TN, 1.0, (dy, ones), to, Acc::Add)
            .map_err(kernel)
    }

    /// dW += dyᵀ x for one matrix of a stack.
    pub fn add_part<K: Kernels<Buf = B>>(
        &mut self,
        k: &K,
        (layer, tensor, part): (usize, LayerTensor, usize),
        x: Mat<'_, B>,
        dy: Mat<'_, B>,
    ) -> Result<(), EngineError> {
        let Some(dw) = self.of_layer(layer, tensor) else {
            return Ok(());
        };
        let to = MatMut::rows(dw, part * dy.cols, dy.cols, x.cols);
        k.matmul(Product::TN, 1.0, (dy, x), to, Acc::Add)
            .map_err(kernel)
    }
}
