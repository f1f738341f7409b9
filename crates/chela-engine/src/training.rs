//! The training pass: forward with activations kept, candidate log-probs, and the explicit backward into the adapter or all weights.
//!
//! Rows of several samples stand in one block; each attends to its own past only. T rows, H hidden, I gated width.

use crate::{
    adapter::{Adapter, Target},
    error::kernel,
    experts::{self, Routed},
    forward::{Span, add_low_rank, embed, head_norm, heads, hidden_norm, rope, rope_tables},
    full::Grads,
    packing::Block,
    weights::{BaseWeights, LayerWeights, Mlp},
};
use chela_core::EngineError;
use chela_kernels::{
    Acc, AttentionSaved, GluGrad, Kernels, Linear, Mat, MatMut, NormGrad, Product, Qkv, QkvGrad,
    RopeDirection, RowsMode,
};
use chela_model::{LayerTensor, TensorName};

/// What a layer's backward reads.
struct Saved<K: Kernels> {
    /// Before rotation and norm of heads, for families with q/k norm.
    plain_qk: Option<(K::Buf, K::Buf)>,
    q: K::Buf,
    k: K::Buf,
    v: K::Buf,
    o: K::Buf,
    lse: K::Buf,
    mid: K::Buf,
    mlp: SavedMlp<K>,
    /// What the norms behind attention and gated unit read, for families that have them.
    before_post: Option<(K::Buf, K::Buf)>,
}

/// What the backward of what follows attention reads.
enum SavedMlp<K: Kernels> {
    /// Gate and its other input `[T, I]`.
    Gated(K::Buf, K::Buf),
    Experts(Routed<K>),
}

/// A forward pass that can be gone back through.
pub struct Tape<K: Kernels> {
    /// Input of each layer `[T, H]`, then the last layer's output.
    inputs: Vec<K::Buf>,
    saved: Vec<Option<Saved<K>>>,
    tables: Vec<K::Buf>,
}

impl<K: Kernels> Tape<K> {
    /// The last layer's output `[T, H]`, not yet normed.
    pub fn output(&self) -> Option<&K::Buf> {
        self.inputs.last()
    }
}

/// What the rows of a pass attend to above themselves: keys and values of one path of a trie, and what its rows' derivatives add up
/// to until they are gone back through themselves. Buffers `[rows, Hkv * D]`.
pub struct Path<K: Kernels> {
    layers: Vec<PathLayer<K>>,
    /// Rows of the path before those of the pass.
    pub depth: usize,
}

struct PathLayer<K: Kernels> {
    k: K::Buf,
    v: K::Buf,
    dk: K::Buf,
    dv: K::Buf,
}

impl<K: Kernels> Path<K> {
    /// A path of at most `rows` rows, those of the passes included.
    pub fn new(k: &K, base: &BaseWeights<K>, rows: usize) -> Result<Self, EngineError> {
        let width = base.config.kv_heads * base.config.head_dim;
        let zeros = || k.zeros(rows * width).map_err(kernel);
        let layer = |_| {
            Ok(PathLayer {
                k: zeros()?,
                v: zeros()?,
                dk: zeros()?,
                dv: zeros()?,
            })
        };
        let layers = base.layers.iter().map(layer);
        Ok(Self {
            layers: layers.collect::<Result<_, EngineError>>()?,
            depth: 0,
        })
    }

    /// Bytes of each of its rows.
    pub fn row_bytes(base: &BaseWeights<K>) -> usize {
        4 * 4 * base.config.kv_heads * base.config.head_dim * base.config.layers
    }
}

/// What a pass works on.
pub struct Pass<'a, K: Kernels> {
    /// At Train priority.
    pub k: &'a K,
    /// What every row goes through: the frozen base, or a whole model in training.
    pub base: &'a BaseWeights<K>,
    /// Trained, or one without maps.
    pub adapter: &'a Adapter<K::Buf>,
    /// The rows.
    pub block: &'a Block,
    /// Keep only each layer's input and run the layer again on the way back: about a third more work for a small part of the
    /// memory.
    pub recompute: bool,
}

impl<K: Kernels> Pass<'_, K> {
    /// What is kept for the way back, per row: each layer's activations, or with `recompute` each layer's input and one layer's
    /// activations.
    pub fn row_bytes(base: &BaseWeights<K>, recompute: bool) -> usize {
        let (hidden, layers) = (4 * base.config.hidden, base.config.layers);
        let layer = Self::layer_bytes(base);
        if recompute {
            hidden * layers + layer
        } else {
            layer * layers
        }
    }

    /// One layer's part of it.
    fn layer_bytes(base: &BaseWeights<K>) -> usize {
        let c = &base.config;
        let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let plain = if c.qk_norm { q + kv } else { 0 };
        let post = if c.family.post_norms() { 2 } else { 0 } * c.hidden;
        let (copies, logits) = c.experts.map_or((1, 0), |e| (e.active, e.count));
        let inner = 2 * c.intermediate * copies + logits;
        let row = 2 * c.hidden + 2 * q + 2 * kv + c.heads + inner + plain + post;
        4 * row
    }

    fn zeros(&self, width: usize) -> Result<K::Buf, EngineError> {
        self.k.zeros(self.block.rows() * width).map_err(kernel)
    }

    fn span(&self) -> [Span<'_, K::Buf>; 1] {
        [Span {
            rows: 0..self.block.rows(),
            adapter: self.adapter,
        }]
    }

    fn low(&self) -> Result<K::Buf, EngineError> {
        self.zeros(self.adapter.rank)
    }

    /// Forward through all layers. With `keep` off nothing but the output stands.
    pub fn forward(
        &self,
        keep: bool,
        mut path: Option<&mut Path<K>>,
    ) -> Result<Tape<K>, EngineError> {
        let (k, c) = (self.k, &self.base.config);
        let mut x = self.zeros(c.hidden)?;
        embed(k, self.base, &self.block.ids, &mut x)?;
        let tables = self.base.ropes.iter().map(|_| self.zeros(c.head_dim));
        let mut tables: Vec<K::Buf> = tables.collect::<Result<_, _>>()?;
        rope_tables(k, self.base, &self.block.positions, &mut tables)?;
        let mut tape = Tape {
            inputs: vec![x],
            saved: Vec::new(),
            tables,
        };
        for index in 0..self.base.layers.len() {
            let (out, saved) = {
                let Some(x) = tape.inputs.last() else { break };
                self.layer(index, x, &tape.tables, path.as_deref_mut())?
            };
            if !keep {
                tape.inputs.clear();
            }
            tape.inputs.push(out);
            tape.saved.push((keep && !self.recompute).then_some(saved));
        }
        Ok(tape)
    }

    fn layer(
        &self,
        index: usize,
        x: &K::Buf,
        tables: &[K::Buf],
        path: Option<&mut Path<K>>,
    ) -> Result<(K::Buf, Saved<K>), EngineError> {
        let (k, c, t) = (self.k, &self.base.config, self.block.rows());
        let layer = &self.base.layers[index];
        let mut h = self.zeros(c.hidden)?;
        k.rms_norm(x, &layer.attn_norm, hidden_norm(self.base, t), &mut h)
            .map_err(kernel)?;
        let (q, key, v, plain_qk) = self.qkv(index, layer, &h, &tables[layer.rope])?;
        let (o, lse) = self.attend(index, (&q, &key, &v), path)?;
        let mut mid = self.zeros(c.hidden)?;
        self.linear(index, Target::O, &o, &mut mid)?;
        let post = layer.post_norms.as_ref();
        let (mut mid, attn_out) = self.post_norm(post.map(|(attn, _)| attn), mid)?;
        k.axpy(t * c.hidden, 1.0, x, &mut mid).map_err(kernel)?;
        k.rms_norm(&mid, &layer.mlp_norm, hidden_norm(self.base, t), &mut h)
            .map_err(kernel)?;
        let (out, mlp) = self.mlp(index, &h)?;
        let (mut out, mlp_out) = self.post_norm(post.map(|(_, mlp)| mlp), out)?;
        k.axpy(t * c.hidden, 1.0, &mid, &mut out).map_err(kernel)?;
        Ok((
            out,
            Saved {
                plain_qk,
                q,
                k: key,
                v,
                o,
                lse,
                mid,
                mlp,
                before_post: attn_out.zip(mlp_out),
            },
        ))
    }

    /// Attention of the rows over themselves, and over a path that they then belong to: `[T, Hq * D]` and the log-sum-exps.
    fn attend(
        &self,
        index: usize,
        (q, key, v): (&K::Buf, &K::Buf, &K::Buf),
        path: Option<&mut Path<K>>,
    ) -> Result<(K::Buf, K::Buf), EngineError> {
        let (k, c) = (self.k, &self.base.config);
        let mut o = self.zeros(c.heads * c.head_dim)?;
        let mut lse = self.zeros(c.heads)?;
        let mut qkv = Qkv { q, k: key, v };
        if let Some(path) = path {
            let (width, layer) = (c.kv_heads * c.head_dim, &mut path.layers[index]);
            let (at, n) = (path.depth * width, self.block.rows() * width);
            k.copy(key, 0, &mut layer.k, at, n).map_err(kernel)?;
            k.copy(v, 0, &mut layer.v, at, n).map_err(kernel)?;
            (qkv.k, qkv.v) = (&layer.k, &layer.v);
        }
        let segments = self.block.segments(self.base.layers[index].window);
        k.attention(qkv, heads(self.base), &segments, &mut o, &mut lse)
            .map_err(kernel)?;
        Ok((o, lse))
    }

    /// What follows attention, from the normed rows.
    fn mlp(&self, index: usize, h: &K::Buf) -> Result<(K::Buf, SavedMlp<K>), EngineError> {
        let (k, c, t) = (self.k, &self.base.config, self.block.rows());
        let mut out = self.zeros(c.hidden)?;
        if let Mlp::Experts(own) = &self.base.layers[index].mlp {
            let how = (t, RowsMode::Prefill);
            let routed = experts::forward(k, (self.base, own), h, how, &mut out)?;
            return Ok((out, SavedMlp::Experts(routed)));
        }
        let (mut gate, mut up) = (self.zeros(c.intermediate)?, self.zeros(c.intermediate)?);
        self.linear(index, Target::Gate, h, &mut gate)?;
        self.linear(index, Target::Up, h, &mut up)?;
        let mut act = self.zeros(c.intermediate)?;
        let n = t * c.intermediate;
        k.glu(self.base.activation, n, &gate, &up, &mut act)
            .map_err(kernel)?;
        self.linear(index, Target::Down, &act, &mut out)?;
        Ok((out, SavedMlp::Gated(gate, up)))
    }

    /// The norm of what attention or the gated unit gave, and what it read; without such a norm the same buffer.
    fn post_norm(
        &self,
        norm: Option<&K::Buf>,
        x: K::Buf,
    ) -> Result<(K::Buf, Option<K::Buf>), EngineError> {
        let Some(norm) = norm else {
            return Ok((x, None));
        };
        let mut y = self.zeros(self.base.config.hidden)?;
        let shape = hidden_norm(self.base, self.block.rows());
        self.k.rms_norm(&x, norm, shape, &mut y).map_err(kernel)?;
        Ok((y, Some(x)))
    }

    /// Derivative by what such a norm read.
    fn post_norm_backward(
        &self,
        (norm, x): (&K::Buf, &K::Buf),
        dy: &K::Buf,
        dw: Option<&mut K::Buf>,
    ) -> Result<K::Buf, EngineError> {
        let mut dx = self.zeros(self.base.config.hidden)?;
        let grad = NormGrad {
            dx: &mut dx,
            acc: Acc::Set,
            dw,
        };
        let shape = hidden_norm(self.base, self.block.rows());
        self.k
            .rms_norm_backward(x, norm, dy, shape, grad)
            .map_err(kernel)?;
        Ok(dx)
    }

    /// y = x Wᵀ + bias + the adapter's part.
    fn linear(
        &self,
        index: usize,
        target: Target,
        x: &K::Buf,
        y: &mut K::Buf,
    ) -> Result<(), EngineError> {
        let (out, input) = target.shape(&self.base.config);
        let (k, t) = (self.k, self.block.rows());
        let layer = &self.base.layers[index];
        let bias = layer.bias.get(target as usize).and_then(Option::as_ref);
        let weight = layer.linear(target)?;
        let to = MatMut::new(y, t, out);
        k.linear(Mat::new(x, t, input), weight, bias, to, RowsMode::Prefill)
            .map_err(kernel)?;
        add_low_rank(k, &self.span(), (index, target), x, y, &mut self.low()?)
    }

    #[allow(clippy::type_complexity)] // four buffers of one layer, named where they are taken apart
    fn qkv(
        &self,
        index: usize,
        layer: &LayerWeights<K>,
        h: &K::Buf,
        table: &K::Buf,
    ) -> Result<(K::Buf, K::Buf, K::Buf, Option<(K::Buf, K::Buf)>), EngineError> {
        let (k, c, t) = (self.k, &self.base.config, self.block.rows());
        let (q_width, kv_width) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let (mut q, mut key, mut v) = (
            self.zeros(q_width)?,
            self.zeros(kv_width)?,
            self.zeros(kv_width)?,
        );
        let [wq, wk, wv, _] = &layer.attention;
        let [bq, bk, bv, _] = &layer.bias;
        k.linear_group(
            Mat::new(h, t, c.hidden),
            &mut [
                Linear {
                    weight: wq,
                    bias: bq.as_ref(),
                    y: MatMut::new(&mut q, t, q_width),
                },
                Linear {
                    weight: wk,
                    bias: bk.as_ref(),
                    y: MatMut::new(&mut key, t, kv_width),
                },
                Linear {
                    weight: wv,
                    bias: bv.as_ref(),
                    y: MatMut::new(&mut v, t, kv_width),
                },
            ],
            RowsMode::Prefill,
        )
        .map_err(kernel)?;
        let (span, mut low) = (self.span(), self.low()?);
        add_low_rank(k, &span, (index, Target::Q), h, &mut q, &mut low)?;
        add_low_rank(k, &span, (index, Target::K), h, &mut key, &mut low)?;
        add_low_rank(k, &span, (index, Target::V), h, &mut v, &mut low)?;
        let mut plain = None;
        if let Some((q_norm, k_norm)) = &layer.qk_norm {
            let (mut nq, mut nk) = (self.zeros(q_width)?, self.zeros(kv_width)?);
            k.rms_norm(&q, q_norm, head_norm(self.base, t * c.heads), &mut nq)
                .map_err(kernel)?;
            k.rms_norm(&key, k_norm, head_norm(self.base, t * c.kv_heads), &mut nk)
                .map_err(kernel)?;
            plain = Some((
                std::mem::replace(&mut q, nq),
                std::mem::replace(&mut key, nk),
            ));
        }
        let forward = RopeDirection::Forward;
        k.rope(&mut q, table, rope(self.base, t, c.heads), forward)
            .map_err(kernel)?;
        k.rope(&mut key, table, rope(self.base, t, c.kv_heads), forward)
            .map_err(kernel)?;
        Ok((q, key, v, plain))
    }

    /// Backward from `dx` = derivative by the last layer's output `[T, H]`; adds to `grads`.
    pub fn backward(
        &self,
        mut tape: Tape<K>,
        mut dx: K::Buf,
        grads: &mut Grads<K::Buf>,
        mut path: Option<&mut Path<K>>,
    ) -> Result<(), EngineError> {
        tape.inputs.pop();
        for index in (0..self.base.layers.len()).rev() {
            let (Some(x), Some(saved)) = (tape.inputs.pop(), tape.saved.pop()) else {
                return Err(EngineError::Shape("a tape without activations".to_owned()));
            };
            let saved = match saved {
                Some(saved) => saved,
                None => {
                    let (_, saved) = self.layer(index, &x, &tape.tables, path.as_deref_mut())?;
                    saved
                }
            };
            let table = &tape.tables[self.base.layers[index].rope];
            let saved = (saved, table, path.as_deref_mut());
            self.layer_backward(index, &x, saved, &mut dx, grads)?;
        }
        self.embed_backward(dx, grads)
    }

    /// Adds each row's derivative to its token's row of the embedding, where that is trained.
    fn embed_backward(&self, mut dx: K::Buf, grads: &mut Grads<K::Buf>) -> Result<(), EngineError> {
        let (k, c, t) = (self.k, &self.base.config, self.block.rows());
        let Some(to) = grads.tensor(TensorName::Embed) else {
            return Ok(());
        };
        let factor = c.embed_scale();
        if factor != 1.0 {
            k.scale(t * c.hidden, factor, &mut dx).map_err(kernel)?;
        }
        k.scatter_add_rows(&dx, c.hidden, &self.block.ids, to)
            .map_err(kernel)
    }

    /// Turns `dx` from the derivative by the layer's output into that by its input.
    fn layer_backward(
        &self,
        index: usize,
        x: &K::Buf,
        (saved, table, path): (Saved<K>, &K::Buf, Option<&mut Path<K>>),
        dx: &mut K::Buf,
        grads: &mut Grads<K::Buf>,
    ) -> Result<(), EngineError> {
        let (k, c, t) = (self.k, &self.base.config, self.block.rows());
        let layer = &self.base.layers[index];
        self.gated_backward(index, &saved, dx, grads)?;
        // dx is now the derivative by `mid`.
        let mut d_o = self.zeros(c.heads * c.head_dim)?;
        let own = match (&layer.post_norms, &saved.before_post) {
            (Some((norm, _)), Some((x, _))) => {
                let dw = grads.of_layer(index, LayerTensor::PostAttnNorm);
                Some(self.post_norm_backward((norm, x), dx, dw)?)
            }
            _ => None,
        };
        self.linear_backward(
            (index, Target::O),
            &saved.o,
            own.as_ref().unwrap_or(dx),
            (&mut d_o, Acc::Set),
            grads,
        )?;
        let at = (table, path);
        let (dq, dk, dv) = self.attention_backward(index, &saved, at, &d_o, grads)?;
        let mut h = self.zeros(c.hidden)?;
        k.rms_norm(x, &layer.attn_norm, hidden_norm(self.base, t), &mut h)
            .map_err(kernel)?;
        let mut dh = self.zeros(c.hidden)?;
        self.linear_backward((index, Target::Q), &h, &dq, (&mut dh, Acc::Set), grads)?;
        self.linear_backward((index, Target::K), &h, &dk, (&mut dh, Acc::Add), grads)?;
        self.linear_backward((index, Target::V), &h, &dv, (&mut dh, Acc::Add), grads)?;
        if index == 0 && grads.frozen_base() {
            return Ok(()); // so is the embedding
        }
        let grad = NormGrad {
            dx,
            acc: Acc::Add,
            dw: grads.of_layer(index, LayerTensor::AttnNorm),
        };
        k.rms_norm_backward(x, &layer.attn_norm, &dh, hidden_norm(self.base, t), grad)
            .map_err(kernel)
    }

    /// Derivatives by q, k and v as the linear maps gave them.
    #[allow(clippy::type_complexity)] // three buffers, named where they are taken apart
    fn attention_backward(
        &self,
        index: usize,
        saved: &Saved<K>,
        (table, path): (&K::Buf, Option<&mut Path<K>>),
        d_o: &K::Buf,
        grads: &mut Grads<K::Buf>,
    ) -> Result<(K::Buf, K::Buf, K::Buf), EngineError> {
        let (k, c, t) = (self.k, &self.base.config, self.block.rows());
        let (mut dq, mut dk, mut dv) = (
            self.zeros(c.heads * c.head_dim)?,
            self.zeros(c.kv_heads * c.head_dim)?,
            self.zeros(c.kv_heads * c.head_dim)?,
        );
        let mut qkv = Qkv {
            q: &saved.q,
            k: &saved.k,
            v: &saved.v,
        };
        let mut grad = QkvGrad {
            dq: &mut dq,
            dk: &mut dk,
            dv: &mut dv,
        };
        let segments = self.block.segments(self.base.layers[index].window);
        let saved_rows = AttentionSaved {
            out: &saved.o,
            lse: &saved.lse,
            dout: d_o,
        };
        if let Some(path) = path {
            let layer = &mut path.layers[index];
            (qkv.k, qkv.v) = (&layer.k, &layer.v);
            (grad.dk, grad.dv) = (&mut layer.dk, &mut layer.dv);
            k.attention_backward(qkv, heads(self.base), &segments, saved_rows, grad)
                .map_err(kernel)?;
            // Everything below these rows has added its part; the next rows at this depth begin at zero.
            let (width, zeros) = (
                c.kv_heads * c.head_dim,
                self.zeros(c.kv_heads * c.head_dim)?,
            );
            let (at, n) = (path.depth * width, t * width);
            for (all, own) in [(&mut layer.dk, &mut dk), (&mut layer.dv, &mut dv)] {
                k.copy(all, at, own, 0, n).map_err(kernel)?;
                k.copy(&zeros, 0, all, at, n).map_err(kernel)?;
            }
        } else {
            k.attention_backward(qkv, heads(self.base), &segments, saved_rows, grad)
                .map_err(kernel)?;
        }
        let back = RopeDirection::Backward;
        k.rope(&mut dq, table, rope(self.base, t, c.heads), back)
            .map_err(kernel)?;
        k.rope(&mut dk, table, rope(self.base, t, c.kv_heads), back)
            .map_err(kernel)?;
        let norms = &self.base.layers[index].qk_norm;
        if let (Some((q_norm, k_norm)), Some((q, key))) = (norms, &saved.plain_qk) {
            let dw = grads.of_layer(index, LayerTensor::QNorm);
            dq = self.head_norm_backward((q, q_norm), &dq, c.heads, dw)?;
            let dw = grads.of_layer(index, LayerTensor::KNorm);
            dk = self.head_norm_backward((key, k_norm), &dk, c.kv_heads, dw)?;
        }
        Ok((dq, dk, dv))
    }

    fn gated_backward(
        &self,
        index: usize,
        saved: &Saved<K>,
        dx: &mut K::Buf,
        grads: &mut Grads<K::Buf>,
    ) -> Result<(), EngineError> {
        let (k, t) = (self.k, self.block.rows());
        let layer = &self.base.layers[index];
        let own = match (&layer.post_norms, &saved.before_post) {
            (Some((_, norm)), Some((_, x))) => {
                let dw = grads.of_layer(index, LayerTensor::PostMlpNorm);
                Some(self.post_norm_backward((norm, x), dx, dw)?)
            }
            _ => None,
        };
        let dh = self.mlp_backward(index, saved, own.as_ref().unwrap_or(dx), grads)?;
        let grad = NormGrad {
            dx,
            acc: Acc::Add,
            dw: grads.of_layer(index, LayerTensor::MlpNorm),
        };
        k.rms_norm_backward(
            &saved.mid,
            &layer.mlp_norm,
            &dh,
            hidden_norm(self.base, t),
            grad,
        )
        .map_err(kernel)
    }

    /// Derivative by the normed rows that the gated unit or the experts read.
    fn mlp_backward(
        &self,
        index: usize,
        saved: &Saved<K>,
        dout: &K::Buf,
        grads: &mut Grads<K::Buf>,
    ) -> Result<K::Buf, EngineError> {
        let (k, c, t) = (self.k, &self.base.config, self.block.rows());
        let layer = &self.base.layers[index];
        let (mut h, mut dh) = (self.zeros(c.hidden)?, self.zeros(c.hidden)?);
        let norm = hidden_norm(self.base, t);
        k.rms_norm(&saved.mid, &layer.mlp_norm, norm, &mut h)
            .map_err(kernel)?;
        let (gate, up) = match (&saved.mlp, &layer.mlp) {
            (SavedMlp::Gated(gate, up), _) => (gate, up),
            (SavedMlp::Experts(routed), Mlp::Experts(own)) => {
                let (base, to) = ((self.base, own), (dout, &mut dh));
                experts::backward(k, base, (routed, t, &h), to, (index, grads))?;
                return Ok(dh);
            }
            _ => return Err(EngineError::Shape("a tape of another model".to_owned())),
        };
        let n = t * c.intermediate;
        let mut act = self.zeros(c.intermediate)?;
        k.glu(self.base.activation, n, gate, up, &mut act)
            .map_err(kernel)?;
        let mut d_act = self.zeros(c.intermediate)?;
        let to = (&mut d_act, Acc::Set);
        self.linear_backward((index, Target::Down), &act, dout, to, grads)?;
        let (mut d_gate, mut d_up) = (act, self.zeros(c.intermediate)?);
        let grad = GluGrad {
            dout: &d_act,
            dgate: &mut d_gate,
            dup: &mut d_up,
        };
        k.glu_backward(self.base.activation, n, gate, up, grad)
            .map_err(kernel)?;
        let to = (&mut dh, Acc::Set);
        self.linear_backward((index, Target::Gate), &h, &d_gate, to, grads)?;
        let to = (&mut dh, Acc::Add);
        self.linear_backward((index, Target::Up), &h, &d_up, to, grads)?;
        Ok(dh)
    }

    fn head_norm_backward(
        &self,
        (x, w): (&K::Buf, &K::Buf),
        dy: &K::Buf,
        heads: usize,
        dw: Option<&mut K::Buf>,
    ) -> Result<K::Buf, EngineError> {
        let mut dx = self.zeros(heads * self.base.config.head_dim)?;
        let grad = NormGrad {
            dx: &mut dx,
            acc: Acc::Set,
            dw,
        };
        let norm = head_norm(self.base, self.block.rows() * heads);
        self.k
            .rms_norm_backward(x, w, dy, norm, grad)
            .map_err(kernel)?;
        Ok(dx)
    }

    /// From dy `[T, out]`: dx (+)= dy W + s (dy B) A; dB += s dyᵀ (x Aᵀ), dA += s (dy B)ᵀ x, or dW += dyᵀ x.
    fn linear_backward(
        &self,
        (index, target): (usize, Target),
        x: &K::Buf,
        dy: &K::Buf,
        (dx, acc): (&mut K::Buf, Acc),
        grads: &mut Grads<K::Buf>,
    ) -> Result<(), EngineError> {
        let (out, input) = target.shape(&self.base.config);
        let (k, t, r) = (self.k, self.block.rows(), self.adapter.rank);
        let weight = self.base.layers[index].linear(target)?;
        k.linear_dx(Mat::new(dy, t, out), weight, MatMut::new(dx, t, input), acc)
            .map_err(kernel)?;
        grads.add_linear(
            k,
            (index, target),
            Mat::new(x, t, input),
            Mat::new(dy, t, out),
        )?;
        let (Some(lora), Some(grad)) = (
            &self.adapter.layers[index][target as usize],
            grads.lora(index, target),
        ) else {
            return Ok(());
        };
        let scale = self.adapter.scale();
        let (x, dy) = (Mat::new(x, t, input), Mat::new(dy, t, out));
        let a = Mat::new(&lora.a, r, input);
        let mut low = self.low()?;
        k.matmul(
            Product::NT,
            1.0,
            (x, a),
            MatMut::new(&mut low, t, r),
            Acc::Set,
        )
        .map_err(kernel)?;
        let db = MatMut::new(&mut grad.b, out, r);
        k.matmul(Product::TN, scale, (dy, Mat::new(&low, t, r)), db, Acc::Add)
            .map_err(kernel)?;
        let b = Mat::new(&lora.b, out, r);
        k.matmul(
            Product::NN,
            scale,
            (dy, b),
            MatMut::new(&mut low, t, r),
            Acc::Set,
        )
        .map_err(kernel)?;
        let low = Mat::new(&low, t, r);
        let da = MatMut::new(&mut grad.a, r, input);
        k.matmul(Product::TN, 1.0, (low, x), da, Acc::Add)
            .map_err(kernel)?;
        k.matmul(
            Product::NN,
            1.0,
            (low, a),
            MatMut::new(dx, t, input),
            Acc::Add,
        )
        .map_err(kernel)
    }
}
