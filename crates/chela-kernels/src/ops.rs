//! The contract: every operation a model needs, on opaque buffers.
//!
//! Letters: T tokens, R rows, m/n/k sizes of a product, H hidden size, Hq query heads, Hkv key-value
//! heads, D head size, V vocabulary, P pairs, K candidates. All buffers are dense f32, rows
//! contiguous; a buffer may be longer than a shape needs, never shorter. Every operation blocks
//! until its result stands, and checks its shapes before it writes.

use std::ops::Range;
use std::sync::Arc;

use crate::dtype::DType;
use crate::error::Result;
use crate::pool::Priority;
use crate::segments::Segment;

/// Bytes of a weight, shared: a `Vec<u8>`, a memory map, anything that stays put.
pub type WeightBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// A matrix inside a buffer: element `(r, c)` is `buf[offset + r * stride + c]`.
#[derive(Debug)]
pub struct Mat<'a, B> {
    /// The buffer.
    pub buf: &'a B,
    /// Index of element (0, 0).
    pub offset: usize,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Distance of two rows; at least `cols`.
    pub stride: usize,
}

impl<B> Clone for Mat<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<B> Copy for Mat<'_, B> {}

impl<'a, B> Mat<'a, B> {
    /// The first `rows` rows of a buffer of dense rows of `cols`.
    pub fn new(buf: &'a B, rows: usize, cols: usize) -> Self {
        Self {
            buf,
            offset: 0,
            rows,
            cols,
            stride: cols,
        }
    }

    /// `rows` dense rows from row `from` on.
    pub fn rows(buf: &'a B, from: usize, rows: usize, cols: usize) -> Self {
        Self {
            buf,
            offset: from * cols,
            rows,
            cols,
            stride: cols,
        }
    }
}

/// A matrix inside a buffer, to be written.
#[derive(Debug)]
pub struct MatMut<'a, B> {
    /// The buffer.
    pub buf: &'a mut B,
    /// Index of element (0, 0).
    pub offset: usize,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Distance of two rows; at least `cols`.
    pub stride: usize,
}

impl<'a, B> MatMut<'a, B> {
    /// The first `rows` rows of a buffer of dense rows of `cols`.
    pub fn new(buf: &'a mut B, rows: usize, cols: usize) -> Self {
        Self {
            buf,
            offset: 0,
            rows,
            cols,
            stride: cols,
        }
    }

    /// `rows` dense rows from row `from` on.
    pub fn rows(buf: &'a mut B, from: usize, rows: usize, cols: usize) -> Self {
        Self {
            buf,
            offset: from * cols,
            rows,
            cols,
            stride: cols,
        }
    }
}

/// Whether a result replaces what the output holds or is added to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Acc {
    /// Replace.
    Set,
    /// Add.
    Add,
}

/// Which way a product with a weight is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowsMode {
    /// A row's result never depends on how many other rows there are (bitwise); made for 1 to 16
    /// rows, correct for any number.
    Decode,
    /// Fastest for many rows; the order of a sum may depend on the number of rows.
    Prefill,
}

/// Which operands of [`Kernels::matmul`] are read transposed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Product {
    /// `A [m, k] · B [k, n]`
    NN,
    /// `A [m, k] · Bᵀ`, B stored `[n, k]`
    NT,
    /// `Aᵀ · B [k, n]`, A stored `[k, m]`
    TN,
}

/// One output of [`Kernels::linear_group`].
#[derive(Debug)]
pub struct Linear<'a, W, B> {
    /// The weight `[n, k]`.
    pub weight: &'a W,
    /// `[n]`, added to every row.
    pub bias: Option<&'a B>,
    /// `[m, n]`, replaced.
    pub y: MatMut<'a, B>,
}

/// Shape and constants of a root-mean-square norm over rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norm {
    /// Rows (tokens, or tokens x heads for the norms of q and k).
    pub rows: usize,
    /// Numbers in a row.
    pub width: usize,
    /// Added to the mean square.
    pub eps: f32,
    /// Gemma: the factor is `1 + w` instead of `w`.
    pub plus_one: bool,
}

/// Where the gradients of a norm go.
#[derive(Debug)]
pub struct NormGrad<'a, B> {
    /// `[rows, width]`
    pub dx: &'a mut B,
    /// Whether `dx` is replaced or added to.
    pub acc: Acc,
    /// `[width]`, added to.
    pub dw: Option<&'a mut B>,
}

/// Shape of a rotary embedding: the first `2 * half` numbers of each head are turned, number `i`
/// with number `i + half` (NeoX layout); the rest is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rope {
    /// Tokens.
    pub rows: usize,
    /// Heads in a row.
    pub heads: usize,
    /// Numbers in a head.
    pub head_dim: usize,
    /// Number of frequencies.
    pub half: usize,
}

/// Turning forward, or back (the transpose: what the gradient needs).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeDirection {
    /// By the angle.
    Forward,
    /// By minus the angle (scaled alike, so it is the exact transpose).
    Backward,
}

/// Heads of an attention: query head `h` reads key-value head `h / (q_heads / kv_heads)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Heads {
    /// Hq
    pub q_heads: usize,
    /// Hkv, a divisor of Hq.
    pub kv_heads: usize,
    /// D
    pub head_dim: usize,
    /// Factor of the scores before the softmax.
    pub scale: f32,
}

/// Inputs of an attention: `q [Tq, Hq * D]`, `k` and `v` `[Tk, Hkv * D]`.
#[derive(Debug)]
pub struct Qkv<'a, B> {
    /// Queries.
    pub q: &'a B,
    /// Keys.
    pub k: &'a B,
    /// Values.
    pub v: &'a B,
}

impl<B> Clone for Qkv<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<B> Copy for Qkv<'_, B> {}

/// What the backward of an attention reads besides its inputs.
#[derive(Debug)]
pub struct AttentionSaved<'a, B> {
    /// `[Tq, Hq * D]`, the forward's result.
    pub out: &'a B,
    /// `[Tq, Hq]`, the forward's log-sum-exp.
    pub lse: &'a B,
    /// `[Tq, Hq * D]`, derivative by `out`.
    pub dout: &'a B,
}

/// Where the gradients of an attention go; all are added to.
#[derive(Debug)]
pub struct QkvGrad<'a, B> {
    /// `[Tq, Hq * D]`
    pub dq: &'a mut B,
    /// `[Tk, Hkv * D]`
    pub dk: &'a mut B,
    /// `[Tk, Hkv * D]`
    pub dv: &'a mut B,
}

/// A run of cached keys and values: rows `at..at + len` of two buffers `[capacity, Hkv * D]`.
#[derive(Debug)]
pub struct KvPiece<'a, B> {
    /// Keys.
    pub k: &'a B,
    /// Values.
    pub v: &'a B,
    /// First row.
    pub at: usize,
    /// Rows.
    pub len: usize,
}

impl<B> Clone for KvPiece<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<B> Copy for KvPiece<'_, B> {}

/// The non-linearity of a gated unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`
    Silu,
    /// The tanh form of GELU.
    GeluTanh,
}

/// Gradients of a gated unit: `dout` is read, `dgate` and `dup` are replaced.
#[derive(Debug)]
pub struct GluGrad<'a, B> {
    /// Derivative by the output.
    pub dout: &'a B,
    /// Derivative by the gate.
    pub dgate: &'a mut B,
    /// Derivative by the other input.
    pub dup: &'a mut B,
}

/// What the head is asked about: pair `p` reads hidden row `rows[p]`, scales the logits by
/// `inv_temperature[p]` and names candidates `candidates[p * k..(p + 1) * k]`. Rows may repeat.
#[derive(Debug, Clone, Copy)]
pub struct Pairs<'a> {
    /// `[P]`
    pub rows: &'a [u32],
    /// `[P]`
    pub inv_temperature: &'a [f32],
    /// `[P, K]`
    pub candidates: &'a [u32],
    /// K, may be 0.
    pub k: usize,
}

/// What [`Kernels::head_scores`] computes beyond the candidates' log-probs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Want {
    /// The entropy of each pair (needed by a backward with `d_entropy`).
    pub entropy: bool,
    /// How many of the likeliest ids of each pair.
    pub top_k: usize,
}

/// The likeliest ids of each pair, best first, ties by id.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TopK {
    /// How many per pair (never more than V).
    pub k: usize,
    /// `[P, k]`
    pub ids: Vec<u32>,
    /// `[P, k]`
    pub logprobs: Vec<f32>,
}

/// What the head answers.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PairScores {
    /// `[P, K]`: `z_c / T - logsumexp`
    pub logprobs: Vec<f32>,
    /// `[P]` of the logits divided by the temperature.
    pub logsumexp: Vec<f32>,
    /// `[P]` in nats, when asked.
    pub entropy: Option<Vec<f32>>,
    /// When asked.
    pub top: Option<TopK>,
}

/// What the backward of the head reads: derivatives, and the forward's sums.
#[derive(Debug, Clone, Copy)]
pub struct PairGrads<'a> {
    /// `[P]` from [`PairScores`].
    pub logsumexp: &'a [f32],
    /// `[P, K]` derivative by each candidate's log-prob.
    pub d_logprobs: &'a [f32],
    /// `[P]` entropy of the forward and `[P]` derivative by it.
    pub entropy: Option<(&'a [f32], &'a [f32])>,
}

/// Where the gradients of the head go; both are added to.
#[derive(Debug)]
pub struct HeadGrad<'a, B> {
    /// `[R, H]`
    pub dhidden: MatMut<'a, B>,
    /// `[V, H]`, by the head's own matrix; `None` where it is frozen.
    pub dhead: Option<MatMut<'a, B>>,
}

/// How rows are sent to experts: from the softmax over the logits `[T, E]` of each row, the `active` likeliest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Routing {
    /// T
    pub rows: usize,
    /// E
    pub experts: usize,
    /// K, 1 to E.
    pub active: usize,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub normalised: bool,
}

/// Where rows go: the chosen experts of each row, the likeliest first, ties by number.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Routes {
    /// `[T, K]`
    pub experts: Vec<u32>,
    /// `[T, K]`: the softmax at the chosen, or that divided by its sum over them.
    pub weights: Vec<f32>,
}

/// Constants of one AdamW step (Loshchilov and Hutter, decoupled weight decay).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Learning rate.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Steps done including this one; the first is 1.
    pub step: u64,
    /// Factor of the gradient (clipping); 1 for none.
    pub grad_scale: f32,
}

/// The operations. A handle is cheap to clone and carries the [`Priority`] its work runs at.
pub trait Kernels: Clone + Send + Sync + 'static {
    /// A buffer of f32 on the device.
    type Buf: Send + Sync + core::fmt::Debug + 'static;
    /// An immutable matrix `[out, in]` in its stored type; a clone shares the bytes.
    type Weight: Clone + Send + Sync + core::fmt::Debug + 'static;
    /// While one is held, no tile of training starts.
    type Lease: Send;

    /// The same device at another priority.
    fn with_priority(&self, priority: Priority) -> Self;
    /// The priority of this handle's work.
    fn priority(&self) -> Priority;
    /// Keeps training from starting tiles until dropped (held over one decode step).
    fn lease(&self) -> Self::Lease;
    /// For people: which device, threads and instruction set.
    fn describe(&self) -> String;

    // ---- memory -------------------------------------------------------------------------------

    /// A buffer of `len` zeros.
    fn zeros(&self, len: usize) -> Result<Self::Buf>;
    /// A buffer with these numbers.
    fn upload(&self, data: &[f32]) -> Result<Self::Buf>;
    /// Numbers in a buffer.
    fn len(&self, buf: &Self::Buf) -> usize;
    /// All numbers of a buffer.
    fn download(&self, buf: &Self::Buf) -> Result<Vec<f32>> {
        let mut out = vec![0.0; self.len(buf)];
        self.read(buf, 0, &mut out)?;
        Ok(out)
    }
    /// Reads `out.len()` numbers from index `at` on.
    fn read(&self, buf: &Self::Buf, at: usize, out: &mut [f32]) -> Result;
    /// Writes `data` from index `at` on.
    fn write(&self, buf: &mut Self::Buf, at: usize, data: &[f32]) -> Result;
    /// `dst[dst_at..dst_at + len] = src[src_at..src_at + len]`
    fn copy(
        &self,
        src: &Self::Buf,
        src_at: usize,
        dst: &mut Self::Buf,
        dst_at: usize,
        len: usize,
    ) -> Result;
    /// Copies inside one buffer; the ranges may overlap.
    fn copy_within(&self, buf: &mut Self::Buf, src_at: usize, dst_at: usize, len: usize) -> Result;
    /// `dst[i] = src[ids[i]]` for rows of `width`.
    fn gather_rows(
        &self,
        src: &Self::Buf,
        width: usize,
        ids: &[u32],
        dst: &mut Self::Buf,
    ) -> Result;
    /// `dst[ids[i]] += src[i]` for rows of `width`; ids may repeat.
    fn scatter_add_rows(
        &self,
        src: &Self::Buf,
        width: usize,
        ids: &[u32],
        dst: &mut Self::Buf,
    ) -> Result;

    /// A weight of `rows x cols` (out x in) from raw little-endian bytes in GGUF block layout.
    fn weight(
        &self,
        dtype: DType,
        rows: usize,
        cols: usize,
        bytes: WeightBytes,
    ) -> Result<Self::Weight>;
    /// An F32 weight that copies a buffer's first `rows * cols` numbers.
    fn weight_from_buf(&self, buf: &Self::Buf, rows: usize, cols: usize) -> Result<Self::Weight>;
    /// Rows of a weight as a weight of its own, `[rows.len(), cols]`, which shares the bytes: one expert of a stack of them.
    fn weight_rows(&self, weight: &Self::Weight, rows: Range<usize>) -> Result<Self::Weight>;
    /// `(rows, cols)` = (out, in).
    fn weight_shape(&self, weight: &Self::Weight) -> (usize, usize);
    /// Its stored type.
    fn weight_dtype(&self, weight: &Self::Weight) -> DType;
    /// `out[i, :] = weight[ids[i], :]` as f32; `out [ids.len(), cols]`. The embedding, also a way
    /// to read rows of a weight.
    fn embed(&self, weight: &Self::Weight, ids: &[u32], out: &mut Self::Buf) -> Result;

    // ---- products -----------------------------------------------------------------------------

    /// `y [m, n] = x [m, k] · Wᵀ (+ bias)` for several weights over one x, in one parallel section.
    fn linear_group(
        &self,
        x: Mat<'_, Self::Buf>,
        outputs: &mut [Linear<'_, Self::Weight, Self::Buf>],
        mode: RowsMode,
    ) -> Result;
    /// [`Kernels::linear_group`] for one weight.
    fn linear(
        &self,
        x: Mat<'_, Self::Buf>,
        weight: &Self::Weight,
        bias: Option<&Self::Buf>,
        y: MatMut<'_, Self::Buf>,
        mode: RowsMode,
    ) -> Result {
        self.linear_group(x, &mut [Linear { weight, bias, y }], mode)
    }
    /// `dx [m, k] (+)= dy [m, n] · W [n, k]`, the gradient of [`Kernels::linear`] by its input.
    fn linear_dx(
        &self,
        dy: Mat<'_, Self::Buf>,
        weight: &Self::Weight,
        dx: MatMut<'_, Self::Buf>,
        acc: Acc,
    ) -> Result;
    /// `c [m, n] (+)= alpha * product(a, b)` of dense f32 matrices. For m up to 16 a row of `c`
    /// does not depend on the number of rows.
    fn matmul(
        &self,
        product: Product,
        alpha: f32,
        operands: (Mat<'_, Self::Buf>, Mat<'_, Self::Buf>),
        c: MatMut<'_, Self::Buf>,
        acc: Acc,
    ) -> Result;

    // ---- rows ---------------------------------------------------------------------------------

    /// `y = x / sqrt(mean(x²) + eps) * w` (or `* (1 + w)`), `x, y [rows, width]`, `w [width]`.
    fn rms_norm(&self, x: &Self::Buf, w: &Self::Buf, norm: Norm, y: &mut Self::Buf) -> Result;
    /// Gradients of [`Kernels::rms_norm`] from its input `x` and `dy [rows, width]`.
    fn rms_norm_backward(
        &self,
        x: &Self::Buf,
        w: &Self::Buf,
        dy: &Self::Buf,
        norm: Norm,
        grad: NormGrad<'_, Self::Buf>,
    ) -> Result;
    /// Fills `table [T, 2 * F]` with `scale * cos` and `scale * sin` of `positions[t] *
    /// inv_freq[f]`; once per step, used by every layer.
    fn rope_table(
        &self,
        positions: &[u32],
        inv_freq: &[f32],
        scale: f32,
        table: &mut Self::Buf,
    ) -> Result;
    /// Turns `x [rows, heads * head_dim]` in place; backward turns a gradient back.
    fn rope(
        &self,
        x: &mut Self::Buf,
        table: &Self::Buf,
        rope: Rope,
        direction: RopeDirection,
    ) -> Result;

    // ---- attention ----------------------------------------------------------------------------

    /// Softmax attention over `segments`. Writes `out [Tq, Hq * D]` and `lse [Tq, Hq]` for the query
    /// rows the segments name (0 and minus infinity for one that sees no key), leaves others alone.
    /// No `Tq x Tk` buffer exists.
    fn attention(
        &self,
        qkv: Qkv<'_, Self::Buf>,
        heads: Heads,
        segments: &[Segment],
        out: &mut Self::Buf,
        lse: &mut Self::Buf,
    ) -> Result {
        let whole = [KvPiece {
            k: qkv.k,
            v: qkv.v,
            at: 0,
            len: segments.iter().map(|s| s.k.end).max().unwrap_or(0),
        }];
        self.attention_paged((qkv.q, &whole), heads, segments, out, lse)
    }
    /// [`Kernels::attention`] of `q [Tq, Hq * D]` over keys in pieces, the pages of a cached text:
    /// the key rows that `segments` name are those of the pieces, one piece after the other. Where
    /// every piece but the last has a multiple of 128 rows, the result is that of the same rows in
    /// one piece to the bit.
    fn attention_paged(
        &self,
        inputs: (&Self::Buf, &[KvPiece<'_, Self::Buf>]),
        heads: Heads,
        segments: &[Segment],
        out: &mut Self::Buf,
        lse: &mut Self::Buf,
    ) -> Result;
    /// Gradients of [`Kernels::attention`], recomputed from `lse`.
    fn attention_backward(
        &self,
        qkv: Qkv<'_, Self::Buf>,
        heads: Heads,
        segments: &[Segment],
        saved: AttentionSaved<'_, Self::Buf>,
        grad: QkvGrad<'_, Self::Buf>,
    ) -> Result;
    /// One query row for each sequence over its cache: row s of `q [S, Hq * D]` attends to all rows
    /// of `caches[s]` (pieces in order of position, this token's own key included), or to the last
    /// `window`. `out [S, Hq * D]`. A sequence's result does not depend on the others.
    fn attention_decode(
        &self,
        q: &Self::Buf,
        caches: &[&[KvPiece<'_, Self::Buf>]],
        heads: Heads,
        window: Option<usize>,
        out: &mut Self::Buf,
    ) -> Result;

    // ---- elementwise --------------------------------------------------------------------------

    /// `out = activation(gate) * up` over the first `n` numbers.
    fn glu(
        &self,
        activation: Activation,
        n: usize,
        gate: &Self::Buf,
        up: &Self::Buf,
        out: &mut Self::Buf,
    ) -> Result;
    /// Gradients of [`Kernels::glu`].
    fn glu_backward(
        &self,
        activation: Activation,
        n: usize,
        gate: &Self::Buf,
        up: &Self::Buf,
        grad: GluGrad<'_, Self::Buf>,
    ) -> Result;
    /// `y += alpha * x` over the first `n` numbers (the residual add with alpha 1).
    fn axpy(&self, n: usize, alpha: f32, x: &Self::Buf, y: &mut Self::Buf) -> Result;
    /// `x *= alpha` over the first `n` numbers.
    fn scale(&self, n: usize, alpha: f32, x: &mut Self::Buf) -> Result;
    /// `x = value` over the first `n` numbers.
    fn fill(&self, n: usize, value: f32, x: &mut Self::Buf) -> Result;
    /// Sum of squares of the first `n` numbers, in f64; the same for any number of threads.
    fn sum_squares(&self, n: usize, x: &Self::Buf) -> Result<f64>;
    /// Whether the first `n` numbers are all finite.
    fn all_finite(&self, n: usize, x: &Self::Buf) -> Result<bool>;
    /// One optimizer step over whole buffers of equal length.
    fn adamw(
        &self,
        param: &mut Self::Buf,
        grad: &Self::Buf,
        first: &mut Self::Buf,
        second: &mut Self::Buf,
        adamw: AdamW,
    ) -> Result;

    // ---- experts ------------------------------------------------------------------------------

    /// Chooses each row's experts from the router's `logits [T, E]`. The answer is on the host: it decides which products follow.
    fn route(&self, logits: &Self::Buf, routing: Routing) -> Result<Routes>;
    /// Gradient of [`Kernels::route`]: from `d_weights [T, K]`, the derivative by the weights of the chosen experts, replaces
    /// `d_logits [T, E]`. (Which experts are chosen has no derivative.)
    fn route_backward(
        &self,
        logits: &Self::Buf,
        routing: Routing,
        routes: (&Routes, &[f32]),
        d_logits: &mut Self::Buf,
    ) -> Result;
    /// `x[r] *= factors[r]` for the first `factors.len()` rows of `width`.
    fn scale_rows(&self, factors: &[f32], width: usize, x: &mut Self::Buf) -> Result;
    /// `a[r] · b[r]` for each of `rows` rows of `width`: the gradient of [`Kernels::scale_rows`] by its factors.
    fn row_dots(
        &self,
        rows: usize,
        width: usize,
        operands: (&Self::Buf, &Self::Buf),
    ) -> Result<Vec<f32>>;

    // ---- head ---------------------------------------------------------------------------------

    /// `logits [m, V] = hidden [m, H] · headᵀ` for sampling; [`RowsMode::Decode`].
    fn logits(
        &self,
        head: &Self::Weight,
        hidden: Mat<'_, Self::Buf>,
        logits: &mut Self::Buf,
    ) -> Result {
        let (vocab, _) = self.weight_shape(head);
        let y = MatMut::new(logits, hidden.rows, vocab);
        self.linear(hidden, head, None, y, RowsMode::Decode)
    }
    /// Log-probs of named candidates from normed hidden rows `[R, H]`, in chunks of the vocabulary:
    /// `[R, V]` never exists.
    fn head_scores(
        &self,
        head: &Self::Weight,
        hidden: Mat<'_, Self::Buf>,
        pairs: Pairs<'_>,
        want: Want,
    ) -> Result<PairScores>;
    /// Adds the gradients of [`Kernels::head_scores`]: with `p` the softmax of a pair, `dz_j =
    /// (Σ_c d_c (1[j = c] - p_j) - d_entropy p_j (log p_j + entropy)) / T`; `dhidden = dz · head`,
    /// `dhead = dzᵀ · hidden`. `[R, V]` never exists here either.
    fn head_backward(
        &self,
        head: &Self::Weight,
        hidden: Mat<'_, Self::Buf>,
        pairs: Pairs<'_>,
        grads: PairGrads<'_>,
        to: HeadGrad<'_, Self::Buf>,
    ) -> Result;
}
