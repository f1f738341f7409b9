//! The base weights as the kernels hold them: once, in their stored types, shared by serving and training.

use crate::{
    adapter::Target,
    error::{kernel, weights},
    experts::Experts,
};
use chela_core::EngineError;
use chela_kernels::{Activation, DType, Kernels};
use chela_model::{Family, LayerTensor, Model, ModelConfig, TensorData, TensorName};
use std::sync::Arc;

/// One decoder layer.
pub struct LayerWeights<K: Kernels> {
    /// Norm before attention `[H]`.
    pub attn_norm: K::Buf,
    /// Norm before the gated unit `[H]`.
    pub mlp_norm: K::Buf,
    /// q k v o, each `[out, in]`, in the order of [`Target`].
    pub attention: [K::Weight; 4],
    /// What follows attention.
    pub mlp: Mlp<K>,
    /// Biases of q k v o, where the family has them.
    pub bias: [Option<K::Buf>; 4],
    /// Norms of each head of q and k `[D]`, where the family has them.
    pub qk_norm: Option<(K::Buf, K::Buf)>,
    /// Norms behind attention and behind the gated unit `[H]`, where the family has them.
    pub post_norms: Option<(K::Buf, K::Buf)>,
    /// How many last tokens it attends to; `None` = all.
    pub window: Option<usize>,
    /// Which of [`BaseWeights::ropes`] is its.
    pub rope: usize,
}

/// What follows attention in a layer.
pub enum Mlp<K: Kernels> {
    /// A gated unit: gate up down, each `[out, in]`.
    Gated([K::Weight; 3]),
    /// A mixture of them.
    Experts(Experts<K>),
}

impl<K: Kernels> LayerWeights<K> {
    /// The weight of a map that an adapter may change.
    pub fn linear(&self, target: Target) -> Result<&K::Weight, EngineError> {
        let (at, attention) = (target as usize, self.attention.len());
        let found = match &self.mlp {
            _ if at < attention => Some(&self.attention[at]),
            Mlp::Gated(maps) => maps.get(at - attention),
            Mlp::Experts(_) => None,
        };
        found.ok_or_else(|| EngineError::Shape(format!("{target:?} in a mixture of experts")))
    }
}

/// All of them.
pub struct BaseWeights<K: Kernels> {
    /// Sizes and switches.
    pub config: ModelConfig,
    /// `[V, H]`
    pub embed: K::Weight,
    /// `[V, H]`, the embedding itself when tied.
    pub head: K::Weight,
    /// `[H]`
    pub final_norm: K::Buf,
    /// In order.
    pub layers: Vec<LayerWeights<K>>,
    /// Rotary frequencies `[D/2]` and the factor on cosines and sines: one pair, or a second one for layers with a window.
    pub ropes: Vec<(Vec<f32>, f32)>,
    /// The non-linearity of the gated unit.
    pub activation: Activation,
}

impl<K: Kernels> BaseWeights<K> {
    /// Reads a model's tensors one by one; each moves into the kernels without a second copy.
    pub fn load(model: &Model, k: &K) -> Result<Self, EngineError> {
        let config = model.config().clone();
        let embed = matrix(model, k, TensorName::Embed)?;
        let head = if config.tie_embeddings {
            embed.clone()
        } else {
            matrix(model, k, TensorName::Head)?
        };
        let layers = (0..config.layers)
            .map(|layer| load_layer(model, k, &config, layer))
            .collect::<Result<_, _>>()?;
        let ropes = [Some(&config.rope), config.local_rope.as_ref()];
        let ropes = ropes.into_iter().flatten();
        let ropes = ropes.map(|rope| rope.inverse_frequencies(config.head_dim));
        let ropes = ropes.collect();
        let activation = match config.family {
            Family::Gemma3 => Activation::GeluTanh,
            Family::Llama | Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe => Activation::Silu,
        };
        let final_norm = vector(model, k, TensorName::FinalNorm)?;
        Ok(Self {
            config,
            embed,
            head,
            final_norm,
            layers,
            ropes,
            activation,
        })
    }
}

impl<K: Kernels> BaseWeights<K> {
    /// Bytes of its matrices in their stored types (norms and biases are small beside them).
    pub fn bytes(&self, k: &K) -> usize {
        let of = |weight: &K::Weight| {
            let (rows, cols) = k.weight_shape(weight);
            let dtype = k.weight_dtype(weight);
            rows * cols / dtype.block() * dtype.block_bytes()
        };
        let head = if self.config.tie_embeddings {
            0
        } else {
            of(&self.head)
        };
        let layers = self.layers.iter().map(|layer| {
            let rest: usize = match &layer.mlp {
                Mlp::Gated(maps) => maps.iter().map(of).sum(),
                Mlp::Experts(own) => {
                    let maps = own.gate.iter().chain(&own.up).chain(&own.down);
                    maps.chain([&own.router]).map(of).sum()
                }
            };
            layer.attention.iter().map(of).sum::<usize>() + rest
        });
        of(&self.embed) + head + layers.sum::<usize>()
    }
}

fn load_layer<K: Kernels>(
    model: &Model,
    k: &K,
    config: &ModelConfig,
    layer: usize,
) -> Result<LayerWeights<K>, EngineError> {
    use LayerTensor as L;
    let m = |t| matrix(model, k, TensorName::Layer(layer, t));
    let v = |t| vector(model, k, TensorName::Layer(layer, t));
    let bias = |on: bool, t| if on { v(t).map(Some) } else { Ok(None) };
    Ok(LayerWeights {
        attn_norm: v(L::AttnNorm)?,
        mlp_norm: v(L::MlpNorm)?,
        attention: [m(L::Q)?, m(L::K)?, m(L::V)?, m(L::O)?],
        mlp: match config.experts {
            None => Mlp::Gated([m(L::Gate)?, m(L::Up)?, m(L::Down)?]),
            Some(experts) => {
                let each = |t| split(k, &m(t)?, experts.count);
                Mlp::Experts(Experts {
                    router: m(L::Router)?,
                    gate: each(L::ExpertGates)?,
                    up: each(L::ExpertUps)?,
                    down: each(L::ExpertDowns)?,
                })
            }
        },
        bias: [
            bias(config.qkv_bias, L::QBias)?,
            bias(config.qkv_bias, L::KBias)?,
            bias(config.qkv_bias, L::VBias)?,
            bias(config.o_bias, L::OBias)?,
        ],
        qk_norm: if config.qk_norm {
            Some((v(L::QNorm)?, v(L::KNorm)?))
        } else {
            None
        },
        post_norms: if config.family.post_norms() {
            Some((v(L::PostAttnNorm)?, v(L::PostMlpNorm)?))
        } else {
            None
        },
        window: config.window(layer),
        rope: usize::from(config.local_rope.is_some() && config.window(layer).is_some()),
    })
}

/// The matrices of a stack, over the same bytes.
fn split<K: Kernels>(k: &K, stack: &K::Weight, n: usize) -> Result<Vec<K::Weight>, EngineError> {
    let rows = k.weight_shape(stack).0 / n;
    (0..n)
        .map(|i| k.weight_rows(stack, i * rows..(i + 1) * rows))
        .collect::<Result<_, _>>()
        .map_err(kernel)
}

fn matrix<K: Kernels>(model: &Model, k: &K, name: TensorName) -> Result<K::Weight, EngineError> {
    let tensor: TensorData = model.tensor(name).map_err(weights)?;
    let [rows, cols] = tensor.shape;
    let dtype = dtype(tensor.dtype);
    k.weight(dtype, rows, cols, Arc::new(tensor.bytes))
        .map_err(kernel)
}

fn vector<K: Kernels>(model: &Model, k: &K, name: TensorName) -> Result<K::Buf, EngineError> {
    let tensor = model.tensor(name).map_err(weights)?;
    k.upload(&tensor.to_f32()).map_err(kernel)
}

fn dtype(dtype: chela_model::DType) -> DType {
    use chela_model::DType as M;
    match dtype {
        M::F32 => DType::F32,
        M::F16 => DType::F16,
        M::BF16 => DType::BF16,
        M::Q8_0 => DType::Q8_0,
        M::Q4_0 => DType::Q4_0,
        M::Q4_1 => DType::Q4_1,
        M::Q4_K => DType::Q4_K,
        M::Q5_K => DType::Q5_K,
        M::Q6_K => DType::Q6_K,
    }
}
