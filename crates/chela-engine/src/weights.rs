//! The base weights as the kernels hold them: once, in their stored types, shared by serving and training; and whole models that were trained, in the same form.

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

/// Where a model's tensors come from: its files, or what was trained in memory.
pub trait Source<K: Kernels> {
    /// A matrix, or a stack of them.
    fn matrix(&mut self, name: TensorName) -> Result<K::Weight, EngineError>;
    /// A norm or a bias.
    fn vector(&mut self, name: TensorName) -> Result<K::Buf, EngineError>;
}

/// A tensor as it is in memory.
pub enum Tensor<'a, K: Kernels> {
    /// One, or the parts of a stack.
    Matrices(&'a [K::Weight]),
    /// A norm or a bias.
    Vector(&'a K::Buf),
}

impl<K: Kernels> BaseWeights<K> {
    /// Reads a model's tensors one by one; each moves into the kernels without a second copy.
    pub fn load(model: &Model, k: &K) -> Result<Self, EngineError> {
        let config = model.config().clone();
        Self::build(k, config, &mut Files { model, k })
    }

    /// A model of this configuration, its tensors in the order of a forward pass.
    pub fn build(
        k: &K,
        config: ModelConfig,
        from: &mut dyn Source<K>,
    ) -> Result<Self, EngineError> {
        let embed = from.matrix(TensorName::Embed)?;
        let layers = (0..config.layers)
            .map(|layer| build_layer(k, &config, layer, from))
            .collect::<Result<_, _>>()?;
        let final_norm = from.vector(TensorName::FinalNorm)?;
        let head = if config.tie_embeddings {
            embed.clone()
        } else {
            from.matrix(TensorName::Head)?
        };
        let ropes = [Some(&config.rope), config.local_rope.as_ref()];
        let ropes = ropes.into_iter().flatten();
        let ropes = ropes.map(|rope| rope.inverse_frequencies(config.head_dim));
        let ropes = ropes.collect();
        let activation = match config.family {
            Family::Gemma3 => Activation::GeluTanh,
            Family::Llama | Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe => Activation::Silu,
        };
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

    /// One of [`ModelConfig::tensor_names`].
    pub fn tensor(&self, name: TensorName) -> Result<Tensor<'_, K>, EngineError> {
        use LayerTensor as L;
        use Tensor::{Matrices, Vector};
        let one = std::slice::from_ref;
        let found = match name {
            TensorName::Embed => Some(Matrices(one(&self.embed))),
            TensorName::Head => Some(Matrices(one(&self.head))),
            TensorName::FinalNorm => Some(Vector(&self.final_norm)),
            TensorName::Layer(layer, tensor) => {
                let of = &self.layers[layer];
                let [q, k, v, o] = &of.attention;
                let [bias_q, bias_k, bias_v, bias_o] = &of.bias;
                let vector = |found: Option<_>| found.map(Vector);
                let map = |at: usize| match &of.mlp {
                    Mlp::Gated(maps) => Some(Matrices(one(&maps[at]))),
                    Mlp::Experts(_) => None,
                };
                let stack = |which: fn(&Experts<K>) -> &[K::Weight]| match &of.mlp {
                    Mlp::Gated(_) => None,
                    Mlp::Experts(own) => Some(Matrices(which(own))),
                };
                match tensor {
                    L::AttnNorm => Some(Vector(&of.attn_norm)),
                    L::MlpNorm => Some(Vector(&of.mlp_norm)),
                    L::Q => Some(Matrices(one(q))),
                    L::K => Some(Matrices(one(k))),
                    L::V => Some(Matrices(one(v))),
                    L::O => Some(Matrices(one(o))),
                    L::QBias => vector(bias_q.as_ref()),
                    L::KBias => vector(bias_k.as_ref()),
                    L::VBias => vector(bias_v.as_ref()),
                    L::OBias => vector(bias_o.as_ref()),
                    L::QNorm => vector(of.qk_norm.as_ref().map(|(q, _)| q)),
                    L::KNorm => vector(of.qk_norm.as_ref().map(|(_, k)| k)),
                    L::PostAttnNorm => vector(of.post_norms.as_ref().map(|(attn, _)| attn)),
                    L::PostMlpNorm => vector(of.post_norms.as_ref().map(|(_, mlp)| mlp)),
                    L::Gate => map(0),
                    L::Up => map(1),
                    L::Down => map(2),
                    L::Router => stack(|own| std::slice::from_ref(&own.router)),
                    L::ExpertGates => stack(|own| &own.gate),
                    L::ExpertUps => stack(|own| &own.up),
                    L::ExpertDowns => stack(|own| &own.down),
                }
            }
        };
        found.ok_or_else(|| EngineError::Shape(format!("{name} of a model without it")))
    }

    /// Shows a tensor's numbers in their order, as f32 and some rows at a time.
    pub fn read(
        &self,
        k: &K,
        name: TensorName,
        see: &mut dyn FnMut(&[f32]),
    ) -> Result<(), EngineError> {
        const ROWS: usize = 256;
        match self.tensor(name)? {
            Tensor::Vector(buf) => see(&k.download(buf).map_err(kernel)?),
            Tensor::Matrices(parts) => {
                for part in parts {
                    let (rows, cols) = k.weight_shape(part);
                    let mut out = k.zeros(ROWS.min(rows) * cols).map_err(kernel)?;
                    let mut host = vec![0.0; ROWS.min(rows) * cols];
                    for from in (0..rows).step_by(ROWS) {
                        let ids: Vec<u32> =
                            (from..(from + ROWS).min(rows)).map(|r| r as u32).collect();
                        k.embed(part, &ids, &mut out).map_err(kernel)?;
                        let values = &mut host[..ids.len() * cols];
                        k.read(&out, 0, values).map_err(kernel)?;
                        see(values);
                    }
                }
            }
        }
        Ok(())
    }

    /// Bytes of its matrices in their stored types (norms and biases are small beside them).
    pub fn bytes(&self, k: &K) -> usize {
        let of = |weight: &K::Weight| {
            let (rows, cols) = k.weight_shape(weight);
            let dtype = k.weight_dtype(weight);
            rows * cols / dtype.block() * dtype.block_bytes()
        };
        let names = self.config.tensor_names().into_iter();
        let matrices = names.filter_map(|name| match self.tensor(name) {
            Ok(Tensor::Matrices(parts)) => Some(parts.iter().map(of).sum::<usize>()),
            _ => None,
        });
        matrices.sum()
    }

    /// The type of its first quantised matrix, where it has one.
    pub fn quantised(&self, k: &K) -> Option<DType> {
        let names = self.config.tensor_names().into_iter();
        names.into_iter().find_map(|name| match self.tensor(name) {
            Ok(Tensor::Matrices(parts)) => {
                let mut types = parts.iter().map(|part| k.weight_dtype(part));
                types.find(|t| !matches!(t, DType::F32 | DType::F16 | DType::BF16))
            }
            _ => None,
        })
    }
}

fn build_layer<K: Kernels>(
    k: &K,
    config: &ModelConfig,
    layer: usize,
    from: &mut dyn Source<K>,
) -> Result<LayerWeights<K>, EngineError> {
    use LayerTensor as L;
    let name = |t| TensorName::Layer(layer, t);
    let mut given = |t| match config.shape(name(t)) {
        Some(_) => from.vector(name(t)).map(Some),
        None => Ok(None),
    };
    let bias = [
        given(L::QBias)?,
        given(L::KBias)?,
        given(L::VBias)?,
        given(L::OBias)?,
    ];
    let qk_norm = given(L::QNorm)?.zip(given(L::KNorm)?);
    let post_norms = given(L::PostAttnNorm)?.zip(given(L::PostMlpNorm)?);
    let mut v = |t| from.vector(name(t));
    let (attn_norm, mlp_norm) = (v(L::AttnNorm)?, v(L::MlpNorm)?);
    let mut m = |t| from.matrix(name(t));
    Ok(LayerWeights {
        attn_norm,
        mlp_norm,
        attention: [m(L::Q)?, m(L::K)?, m(L::V)?, m(L::O)?],
        mlp: match config.experts {
            None => Mlp::Gated([m(L::Gate)?, m(L::Up)?, m(L::Down)?]),
            Some(experts) => {
                let mut each = |t| split(k, &m(t)?, experts.count);
                let (gate, up) = (each(L::ExpertGates)?, each(L::ExpertUps)?);
                let down = each(L::ExpertDowns)?;
                Mlp::Experts(Experts {
                    router: m(L::Router)?,
                    gate,
                    up,
                    down,
                })
            }
        },
        bias,
        qk_norm,
        post_norms,
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

/// A model's files.
pub struct Files<'a, K> {
    /// Opened.
    pub model: &'a Model,
    /// Takes the bytes.
    pub k: &'a K,
}

impl<K: Kernels> Source<K> for Files<'_, K> {
    fn matrix(&mut self, name: TensorName) -> Result<K::Weight, EngineError> {
        let tensor: TensorData = self.model.tensor(name).map_err(weights)?;
        let [rows, cols] = tensor.shape;
        let dtype = dtype(tensor.dtype);
        self.k
            .weight(dtype, rows, cols, Arc::new(tensor.bytes))
            .map_err(kernel)
    }

    fn vector(&mut self, name: TensorName) -> Result<K::Buf, EngineError> {
        let tensor = self.model.tensor(name).map_err(weights)?;
        self.k.upload(&tensor.to_f32()).map_err(kernel)
    }
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
