//! What a model is: its family, its sizes, how it places tokens and where it stops.

use crate::names::{LayerTensor, TensorName};

/// The families this engine runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Llama 2/3.x, SmolLM2.
    Llama,
    /// Qwen2 and Qwen2.5: biases on q, k and v.
    Qwen2,
    /// Qwen3 dense: RMS norm on each head of q and k.
    Qwen3,
    /// Gemma 3, text: as Qwen3, and norms also behind attention and MLP, the factor of every norm 1 + w, GELU in the gate,
    /// embeddings times the root of their width, and most layers with a sliding window and rotary positions of their own.
    Gemma3,
    /// Qwen3 with a mixture of experts in every layer.
    Qwen3Moe,
}

/// The experts of every layer's MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Experts {
    /// How many there are; each is `intermediate` wide.
    pub count: usize,
    /// How many a token goes through.
    pub active: usize,
    /// The weights of a token's experts are divided by their sum.
    pub normalised: bool,
}

impl Family {
    /// The architecture's name in GGUF files.
    pub(crate) fn gguf(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gemma3 => "gemma3",
            Self::Qwen3Moe => "qwen3moe",
        }
    }

    /// `architectures` and `model_type` in config.json.
    pub(crate) fn hugging_face(self) -> (&'static str, &'static str) {
        match self {
            Self::Llama => ("LlamaForCausalLM", "llama"),
            Self::Qwen2 => ("Qwen2ForCausalLM", "qwen2"),
            Self::Qwen3 => ("Qwen3ForCausalLM", "qwen3"),
            Self::Gemma3 => ("Gemma3ForCausalLM", "gemma3_text"),
            Self::Qwen3Moe => ("Qwen3MoeForCausalLM", "qwen3_moe"),
        }
    }

    /// Whether q and k are normed per head.
    pub(crate) fn qk_norm(self) -> bool {
        matches!(self, Self::Qwen3 | Self::Gemma3 | Self::Qwen3Moe)
    }

    /// Whether norms also follow attention and MLP.
    pub fn post_norms(self) -> bool {
        self == Self::Gemma3
    }

    /// Whether the factor of a norm is 1 + w instead of w. GGUF files hold 1 + w, folders w, and so does a [`crate::Model`].
    pub fn norm_plus_one(self) -> bool {
        self == Self::Gemma3
    }
}

/// Sizes and switches of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Which forward pass.
    pub family: Family,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head; not always `hidden / heads`.
    pub head_dim: usize,
    /// Width of the gated MLP, of one expert where there are some.
    pub intermediate: usize,
    /// The mixture of experts that takes the MLP's place, where the family has one.
    pub experts: Option<Experts>,
    /// Rows of the embedding (may exceed the tokenizer's vocabulary).
    pub vocab: usize,
    /// Epsilon of every RMS norm.
    pub rms_eps: f32,
    /// Rotary positions.
    pub rope: Rope,
    /// Rotary positions of the layers with the window, where they are not those of `rope`.
    pub local_rope: Option<Rope>,
    /// A layer attends to that many last tokens only, itself included.
    pub sliding_window: Option<usize>,
    /// The layers without the window, in order; empty where all have it or none does.
    pub full_layers: Vec<usize>,
    /// Attention's scores are divided by its root: `head_dim`, unless a Gemma says otherwise.
    pub query_scalar: usize,
    /// The head is the embedding matrix; there is no `head` tensor.
    pub tie_embeddings: bool,
    /// Longest sequence the model was made for.
    pub context_length: usize,
    /// q, k and v have biases.
    pub qkv_bias: bool,
    /// The attention's output projection has a bias.
    pub o_bias: bool,
    /// q and k are normed per head.
    pub qk_norm: bool,
    /// Every token that ends a reply; the first is the tokenizer's own.
    pub end_ids: Vec<u32>,
    /// The token that opens a text, when the model has one.
    pub bos_id: Option<u32>,
    /// The tokenizer puts `bos_id` before a plain text (chat templates write it themselves).
    pub add_bos: bool,
}

/// Rotary position embedding in the half-split layout (pairs are `i` and `i + D/2`).
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of wavelengths.
    pub theta: f32,
    /// How positions beyond the pre-training length are reached.
    pub scaling: RopeScaling,
}

/// The ways to stretch rotary positions.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// As trained.
    None,
    /// All frequencies divided by `factor`.
    Linear {
        /// The stretch.
        factor: f32,
    },
    /// Llama 3.1: long wavelengths stretched, short ones kept, a ramp between.
    Llama3 {
        /// The stretch of long wavelengths.
        factor: f32,
        /// `original_context / low_freq_factor` = wavelength above which all is stretched.
        low_freq_factor: f32,
        /// `original_context / high_freq_factor` = wavelength below which nothing is.
        high_freq_factor: f32,
        /// Length of pre-training.
        original_context: usize,
    },
    /// YaRN (arXiv 2309.00071).
    Yarn {
        /// The stretch.
        factor: f32,
        /// Length of pre-training.
        original_context: usize,
        /// Rotations above which a dimension is extrapolated.
        beta_fast: f32,
        /// Rotations below which a dimension is interpolated.
        beta_slow: f32,
        /// Multiplies cosines and sines.
        attention_factor: f32,
    },
    /// One divisor per frequency, as GGUF files of Llama 3.x carry it (`rope_freqs.weight`).
    Factors(Vec<f32>),
}

impl Rope {
    /// The angle per position of each pair `[D/2]`, and the factor on cosines and sines
    /// (1 except for YaRN).
    pub fn inverse_frequencies(&self, head_dim: usize) -> (Vec<f32>, f32) {
        let half = head_dim / 2;
        let theta = f64::from(self.theta);
        let plain = (0..half)
            .map(|i| theta.powf(-((2 * i) as f64) / head_dim as f64))
            .collect::<Vec<_>>();
        let mut magnitude = 1.0;
        let scaled: Vec<f64> = match &self.scaling {
            RopeScaling::None => plain,
            RopeScaling::Linear { factor } => {
                plain.iter().map(|f| f / f64::from(*factor)).collect()
            }
            RopeScaling::Factors(factors) => plain
                .iter()
                .zip(factors)
                .map(|(f, d)| f / f64::from(*d))
                .collect(),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => {
                let (low, high) = (f64::from(*low_freq_factor), f64::from(*high_freq_factor));
                let context = *original_context as f64;
                let stretch = |f: &f64| llama3(*f, f64::from(*factor), (low, high), context);
                plain.iter().map(stretch).collect()
            }
            RopeScaling::Yarn {
                factor,
                original_context,
                beta_fast,
                beta_slow,
                attention_factor,
            } => {
                magnitude = *attention_factor;
                let dim_of = |rotations: f32| {
                    let wavelengths =
                        *original_context as f64 / (f64::from(rotations) * std::f64::consts::TAU);
                    head_dim as f64 * wavelengths.ln() / (2.0 * theta.ln())
                };
                let low = dim_of(*beta_fast).floor().max(0.0);
                let high = dim_of(*beta_slow).ceil().min(head_dim as f64 - 1.0);
                let span = (high - low).max(0.001);
                let mix = |(i, f): (usize, &f64)| {
                    let ramp = ((i as f64 - low) / span).clamp(0.0, 1.0);
                    f / f64::from(*factor) * ramp + f * (1.0 - ramp)
                };
                plain.iter().enumerate().map(mix).collect()
            }
        };
        (scaled.into_iter().map(|f| f as f32).collect(), magnitude)
    }
}

/// Every `pattern`-th of so many layers.
pub(crate) fn full_layers(layers: usize, pattern: usize) -> Vec<usize> {
    (0..layers)
        .filter(|layer| (layer + 1).is_multiple_of(pattern))
        .collect()
}

/// Llama 3.1's stretch of one frequency; `bounds` = (low, high) frequency factors.
fn llama3(frequency: f64, factor: f64, bounds: (f64, f64), context: f64) -> f64 {
    let (low, high) = bounds;
    let wavelength = std::f64::consts::TAU / frequency;
    if wavelength < context / high {
        frequency
    } else if wavelength > context / low {
        frequency / factor
    } else {
        let smooth = (context / wavelength - low) / (high - low);
        (1.0 - smooth) * frequency / factor + smooth * frequency
    }
}

impl ModelConfig {
    /// How many last tokens a layer attends to; `None` = all.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.sliding_window
            .filter(|_| !self.full_layers.contains(&layer))
    }

    /// How many matrices a tensor is a stack of: one, or one for each expert.
    pub(crate) fn stack(&self, name: TensorName) -> usize {
        match name {
            TensorName::Layer(_, tensor) if tensor.of_experts() => {
                self.experts.map_or(1, |experts| experts.count)
            }
            _ => 1,
        }
    }

    /// What embeddings are multiplied by. Activations are f32 here, so this is the f32 that transformers takes for a model in f32;
    /// only when it computes in bf16 does it round the factor to bf16 first. llama.cpp takes the f32 too.
    pub fn embed_scale(&self) -> f32 {
        match self.family {
            Family::Gemma3 => (self.hidden as f32).sqrt(),
            _ => 1.0,
        }
    }

    /// `p` when every p-th layer is one without the window, and no other is.
    pub(crate) fn window_pattern(&self) -> Option<usize> {
        let pattern = self.full_layers.first().map_or(self.layers, |l| *l) + 1;
        let regular = full_layers(self.layers, pattern) == self.full_layers;
        regular.then_some(pattern)
    }

    /// Shape `[rows, cols]` of a tensor; vectors are one row. `None` when a model of this
    /// configuration has no such tensor.
    pub fn shape(&self, name: TensorName) -> Option<[usize; 2]> {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let (hidden, inner) = (self.hidden, self.intermediate);
        let (layer, tensor) = match name {
            TensorName::Embed => return Some([self.vocab, hidden]),
            TensorName::FinalNorm => return Some([1, hidden]),
            TensorName::Head => return (!self.tie_embeddings).then_some([self.vocab, hidden]),
            TensorName::Layer(layer, tensor) => (layer, tensor),
        };
        if layer >= self.layers {
            return None;
        }
        match tensor {
            LayerTensor::AttnNorm | LayerTensor::MlpNorm => Some([1, hidden]),
            LayerTensor::PostAttnNorm | LayerTensor::PostMlpNorm => {
                self.family.post_norms().then_some([1, hidden])
            }
            LayerTensor::Q => Some([q, hidden]),
            LayerTensor::K | LayerTensor::V => Some([kv, hidden]),
            LayerTensor::O => Some([hidden, q]),
            LayerTensor::QBias => self.qkv_bias.then_some([1, q]),
            LayerTensor::KBias | LayerTensor::VBias => self.qkv_bias.then_some([1, kv]),
            LayerTensor::OBias => self.o_bias.then_some([1, hidden]),
            LayerTensor::QNorm | LayerTensor::KNorm => self.qk_norm.then_some([1, self.head_dim]),
            LayerTensor::Gate | LayerTensor::Up => {
                self.experts.is_none().then_some([inner, hidden])
            }
            LayerTensor::Down => self.experts.is_none().then_some([hidden, inner]),
            LayerTensor::Router => self.experts.map(|e| [e.count, hidden]),
            LayerTensor::ExpertGates | LayerTensor::ExpertUps => {
                self.experts.map(|e| [e.count * inner, hidden])
            }
            LayerTensor::ExpertDowns => self.experts.map(|e| [e.count * hidden, inner]),
        }
    }

    /// Every tensor a model of this configuration has, in the order of a forward pass.
    pub fn tensor_names(&self) -> Vec<TensorName> {
        let layers = (0..self.layers)
            .flat_map(|layer| LayerTensor::ALL.map(|tensor| TensorName::Layer(layer, tensor)));
        std::iter::once(TensorName::Embed)
            .chain(layers)
            .chain([TensorName::FinalNorm, TensorName::Head])
            .filter(|name| self.shape(*name).is_some())
            .collect()
    }

    /// Number of weights.
    pub fn parameters(&self) -> u64 {
        self.tensor_names()
            .into_iter()
            .filter_map(|name| self.shape(name))
            .map(|[rows, cols]| rows as u64 * cols as u64)
            .sum()
    }

    /// A reason why these numbers cannot be a model, if there is one. Run on whatever a file
    /// says, so nothing later divides by zero or overflows.
    pub(crate) fn flaw(&self) -> Option<String> {
        const MOST: usize = 1 << 24;
        let sizes = [
            ("hidden size", self.hidden),
            ("layers", self.layers),
            ("attention heads", self.heads),
            ("key/value heads", self.kv_heads),
            ("head dimension", self.head_dim),
            ("intermediate size", self.intermediate),
            ("vocabulary", self.vocab),
            ("context length", self.context_length),
            ("query scalar", self.query_scalar),
            ("sliding window", self.sliding_window.unwrap_or(1)),
        ];
        for (what, size) in sizes {
            if size == 0 || size > MOST {
                return Some(format!("{what} is {size}, expected 1 to {MOST}"));
            }
        }
        if let Some(experts) = self.experts
            && (experts.active == 0 || experts.active > experts.count || experts.count > 4096)
        {
            return Some(format!(
                "{} of {} experts for a token, expected 1 to all of at most 4096",
                experts.active, experts.count
            ));
        }
        if self.layers > 4096 || self.heads > 4096 {
            return Some(format!("{} layers of {} heads", self.layers, self.heads));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Some(format!(
                "{} heads over {} key/value heads",
                self.heads, self.kv_heads
            ));
        }
        if !self.head_dim.is_multiple_of(2) || self.head_dim > 4096 {
            return Some(format!(
                "head dimension {} is not an even number",
                self.head_dim
            ));
        }
        if !(self.rms_eps.is_finite() && self.rms_eps > 0.0) {
            return Some(format!("RMS norm epsilon is {}", self.rms_eps));
        }
        if let Some(layer) = self.full_layers.iter().find(|l| **l >= self.layers) {
            return Some(format!("layer {layer} of {} has no window", self.layers));
        }
        if self.end_ids.is_empty() {
            return Some("no end-of-text token is named".to_owned());
        }
        let ids = self.end_ids.iter().chain(&self.bos_id);
        if let Some(id) = ids.into_iter().find(|id| **id as usize >= self.vocab) {
            return Some(format!(
                "special token {id} is beyond the vocabulary of {}",
                self.vocab
            ));
        }
        let ropes = [Some(&self.rope), self.local_rope.as_ref()];
        ropes
            .into_iter()
            .flatten()
            .find_map(|rope| rope.flaw(self.head_dim))
    }
}

impl Rope {
    fn flaw(&self, head_dim: usize) -> Option<String> {
        if !(self.theta.is_finite() && self.theta > 1.0) {
            return Some(format!("rope theta is {}", self.theta));
        }
        let (numbers, context) = match &self.scaling {
            RopeScaling::None => return None,
            RopeScaling::Linear { factor } => (vec![*factor], 1),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => {
                if low_freq_factor >= high_freq_factor {
                    return Some(
                        "rope scaling: low_freq_factor is not below high_freq_factor".into(),
                    );
                }
                (
                    vec![*factor, *low_freq_factor, *high_freq_factor],
                    *original_context,
                )
            }
            RopeScaling::Yarn {
                factor,
                original_context,
                beta_fast,
                beta_slow,
                attention_factor,
            } => (
                vec![*factor, *beta_fast, *beta_slow, *attention_factor],
                *original_context,
            ),
            RopeScaling::Factors(factors) => {
                if factors.len() != head_dim / 2 {
                    return Some(format!(
                        "{} rope factors for a head dimension of {head_dim}",
                        factors.len()
                    ));
                }
                (factors.clone(), 1)
            }
        };
        let bad = numbers.iter().find(|n| !(n.is_finite() && **n > 0.0));
        match bad {
            Some(number) => Some(format!("rope scaling has the number {number}")),
            None if context == 0 => Some("rope scaling has no original context length".to_owned()),
            None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_frequencies_fall_from_one() {
        let rope = Rope {
            theta: 10_000.0,
            scaling: RopeScaling::None,
        };
        let (f, magnitude) = rope.inverse_frequencies(4);
        assert_eq!(f, vec![1.0, 0.01]);
        assert_eq!(magnitude, 1.0);
    }

    #[test]
    fn llama3_keeps_short_waves_and_stretches_long_ones() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192,
        };
        let plain = Rope {
            theta: 500_000.0,
            scaling: RopeScaling::None,
        };
        let (plain, _) = plain.inverse_frequencies(128);
        let (f, _) = Rope {
            theta: 500_000.0,
            scaling,
        }
        .inverse_frequencies(128);
        assert_eq!(f[0], plain[0]);
        assert!((f[63] - plain[63] / 8.0).abs() < 1e-12);
        let (middle, whole) = (f[33], plain[33]);
        assert!(middle < whole && middle > whole / 8.0, "{middle} {whole}");
    }

    #[test]
    fn yarn_extrapolates_fast_dimensions_only() {
        let scaling = RopeScaling::Yarn {
            factor: 4.0,
            original_context: 32768,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: 1.138_629_4,
        };
        let plain = Rope {
            theta: 1e6,
            scaling: RopeScaling::None,
        };
        let (plain, _) = plain.inverse_frequencies(128);
        let (f, magnitude) = Rope {
            theta: 1e6,
            scaling,
        }
        .inverse_frequencies(128);
        assert_eq!(f[0], plain[0]);
        assert!((f[63] * 4.0 - plain[63]).abs() < 1e-9);
        assert!((magnitude - 1.138_629_4).abs() < 1e-6);
    }
}
