//! The one name each tensor has in this project, whatever file it comes from.

use std::fmt;

use crate::config::{Family, ModelConfig};

/// A tensor of a model. `Display` gives the canonical name, e.g. `layers.3.attn.q.weight`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TensorName {
    /// Token embeddings, `[vocab, hidden]`: `embed`.
    Embed,
    /// The norm before the head, `[1, hidden]`: `final_norm`.
    FinalNorm,
    /// The output matrix, `[vocab, hidden]`: `head`. Absent when it is tied to the embeddings.
    Head,
    /// A tensor of one layer, counted from 0.
    Layer(usize, LayerTensor),
}

/// A tensor of one layer. D = head dimension, H = heads, KV = key/value heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LayerTensor {
    /// `[1, hidden]`: `attn_norm`.
    AttnNorm,
    /// `[H * D, hidden]`: `attn.q.weight`.
    Q,
    /// `[1, H * D]`: `attn.q.bias`.
    QBias,
    /// `[KV * D, hidden]`: `attn.k.weight`.
    K,
    /// `[1, KV * D]`: `attn.k.bias`.
    KBias,
    /// `[KV * D, hidden]`: `attn.v.weight`.
    V,
    /// `[1, KV * D]`: `attn.v.bias`.
    VBias,
    /// `[hidden, H * D]`: `attn.o.weight`.
    O,
    /// `[1, hidden]`: `attn.o.bias`.
    OBias,
    /// `[1, D]`: `attn.q_norm`.
    QNorm,
    /// `[1, D]`: `attn.k_norm`.
    KNorm,
    /// `[1, hidden]`, behind attention: `post_attn_norm`.
    PostAttnNorm,
    /// `[1, hidden]`: `mlp_norm`.
    MlpNorm,
    /// `[intermediate, hidden]`: `mlp.gate`.
    Gate,
    /// `[intermediate, hidden]`: `mlp.up`.
    Up,
    /// `[hidden, intermediate]`: `mlp.down`.
    Down,
    /// `[experts, hidden]`: `mlp.router`.
    Router,
    /// `[experts * intermediate, hidden]`, one expert after the other: `mlp.experts.gate`.
    ExpertGates,
    /// `[experts * intermediate, hidden]`: `mlp.experts.up`.
    ExpertUps,
    /// `[experts * hidden, intermediate]`: `mlp.experts.down`.
    ExpertDowns,
    /// `[1, hidden]`, behind the MLP: `post_mlp_norm`.
    PostMlpNorm,
}

impl LayerTensor {
    /// All of them, in the order they are used in a forward pass.
    pub const ALL: [Self; 21] = [
        Self::AttnNorm,
        Self::Q,
        Self::QBias,
        Self::K,
        Self::KBias,
        Self::V,
        Self::VBias,
        Self::QNorm,
        Self::KNorm,
        Self::O,
        Self::OBias,
        Self::PostAttnNorm,
        Self::MlpNorm,
        Self::Gate,
        Self::Up,
        Self::Down,
        Self::Router,
        Self::ExpertGates,
        Self::ExpertUps,
        Self::ExpertDowns,
        Self::PostMlpNorm,
    ];

    /// Whether it is a stack of the experts' matrices.
    pub fn of_experts(self) -> bool {
        matches!(
            self,
            Self::ExpertGates | Self::ExpertUps | Self::ExpertDowns
        )
    }

    /// (canonical, Hugging Face, GGUF), each below the layer's prefix.
    fn names(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::AttnNorm => ("attn_norm", "input_layernorm.weight", "attn_norm.weight"),
            Self::Q => ("attn.q.weight", "self_attn.q_proj.weight", "attn_q.weight"),
            Self::QBias => ("attn.q.bias", "self_attn.q_proj.bias", "attn_q.bias"),
            Self::K => ("attn.k.weight", "self_attn.k_proj.weight", "attn_k.weight"),
            Self::KBias => ("attn.k.bias", "self_attn.k_proj.bias", "attn_k.bias"),
            Self::V => ("attn.v.weight", "self_attn.v_proj.weight", "attn_v.weight"),
            Self::VBias => ("attn.v.bias", "self_attn.v_proj.bias", "attn_v.bias"),
            Self::O => (
                "attn.o.weight",
                "self_attn.o_proj.weight",
                "attn_output.weight",
            ),
            Self::OBias => ("attn.o.bias", "self_attn.o_proj.bias", "attn_output.bias"),
            Self::QNorm => (
                "attn.q_norm",
                "self_attn.q_norm.weight",
                "attn_q_norm.weight",
            ),
            Self::KNorm => (
                "attn.k_norm",
                "self_attn.k_norm.weight",
                "attn_k_norm.weight",
            ),
            Self::PostAttnNorm => (
                "post_attn_norm",
                "post_attention_layernorm.weight",
                "post_attention_norm.weight",
            ),
            Self::MlpNorm => (
                "mlp_norm",
                "post_attention_layernorm.weight",
                "ffn_norm.weight",
            ),
            Self::Gate => ("mlp.gate", "mlp.gate_proj.weight", "ffn_gate.weight"),
            Self::Up => ("mlp.up", "mlp.up_proj.weight", "ffn_up.weight"),
            Self::Down => ("mlp.down", "mlp.down_proj.weight", "ffn_down.weight"),
            Self::Router => ("mlp.router", "mlp.gate.weight", "ffn_gate_inp.weight"),
            Self::ExpertGates => (
                "mlp.experts.gate",
                "mlp.experts.*.gate_proj.weight",
                "ffn_gate_exps.weight",
            ),
            Self::ExpertUps => (
                "mlp.experts.up",
                "mlp.experts.*.up_proj.weight",
                "ffn_up_exps.weight",
            ),
            Self::ExpertDowns => (
                "mlp.experts.down",
                "mlp.experts.*.down_proj.weight",
                "ffn_down_exps.weight",
            ),
            Self::PostMlpNorm => (
                "post_mlp_norm",
                "post_feedforward_layernorm.weight",
                "post_ffw_norm.weight",
            ),
        }
    }
}

impl TensorName {
    /// Whether it is the weight of a norm.
    pub fn is_norm(self) -> bool {
        use LayerTensor as L;
        match self {
            Self::FinalNorm => true,
            Self::Embed | Self::Head => false,
            Self::Layer(_, tensor) => matches!(
                tensor,
                L::AttnNorm | L::PostAttnNorm | L::MlpNorm | L::PostMlpNorm | L::QNorm | L::KNorm
            ),
        }
    }

    /// The names of the parts in Hugging Face checkpoints, where each expert's matrices are tensors of their own.
    pub(crate) fn hugging_face_parts(self, config: &ModelConfig) -> Vec<String> {
        let name = self.hugging_face(config.family);
        match self {
            Self::Layer(_, tensor) if tensor.of_experts() => (0..config.stack(self))
                .map(|expert| name.replace('*', &expert.to_string()))
                .collect(),
            _ => vec![name],
        }
    }

    /// The name in a family's Hugging Face checkpoints; `*` stands for the number of an expert.
    pub fn hugging_face(self, family: Family) -> String {
        match self {
            // With norms behind attention and MLP too, the name that others give the norm before the MLP is taken.
            Self::Layer(layer, LayerTensor::MlpNorm) if family.post_norms() => {
                format!("model.layers.{layer}.pre_feedforward_layernorm.weight")
            }
            Self::Embed => "model.embed_tokens.weight".to_owned(),
            Self::FinalNorm => "model.norm.weight".to_owned(),
            Self::Head => "lm_head.weight".to_owned(),
            Self::Layer(layer, tensor) => format!("model.layers.{layer}.{}", tensor.names().1),
        }
    }

    /// The name in GGUF files.
    pub fn gguf(self) -> String {
        match self {
            Self::Embed => "token_embd.weight".to_owned(),
            Self::FinalNorm => "output_norm.weight".to_owned(),
            Self::Head => "output.weight".to_owned(),
            Self::Layer(layer, tensor) => format!("blk.{layer}.{}", tensor.names().2),
        }
    }
}

impl fmt::Display for TensorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embed => f.write_str("embed"),
            Self::FinalNorm => f.write_str("final_norm"),
            Self::Head => f.write_str("head"),
            Self::Layer(layer, tensor) => write!(f, "layers.{layer}.{}", tensor.names().0),
        }
    }
}
