//! The forward pass for serving: rows of one or many sequences through every layer, keys and values into their caches.

use crate::{
    adapter::{Adapter, Target},
    error::kernel,
    experts,
    pages::KvCache,
    version::{self, Held},
    weights::{BaseWeights, LayerWeights, Mlp},
};
use chela_core::{EngineError, TokenId};
use chela_kernels::{
    Acc, Heads, Kernels, KvPiece, Linear, Mat, MatMut, Norm, Product, Rope, RopeDirection,
    RowsMode, Segment,
};
use std::ops::Range;

/// New tokens of one sequence.
pub struct Item<'a, K: Kernels> {
    /// Its cache; the tokens are appended.
    pub cache: &'a mut KvCache<K>,
    /// The tokens.
    pub tokens: &'a [TokenId],
    /// The version's weights; all items of a pass go through one model (see [`version::model`]), beside it each has its adapter.
    pub version: Held<K>,
}

/// Rows that share an adapter.
pub struct Span<'a, B> {
    /// Which rows.
    pub rows: Range<usize>,
    /// Their adapter.
    pub adapter: &'a Adapter<B>,
}

/// Buffers of one pass, kept between passes.
pub struct Workspace<K: Kernels> {
    rows: usize,
    buffers: Option<Buffers<K>>,
}

struct Buffers<K: Kernels> {
    x: K::Buf,
    h: K::Buf,
    q: K::Buf,
    k: K::Buf,
    v: K::Buf,
    o: K::Buf,
    gate: K::Buf,
    up: K::Buf,
    act: K::Buf,
    lse: K::Buf,
    /// One for each of [`BaseWeights::ropes`].
    tables: Vec<K::Buf>,
    low: K::Buf,
    /// Where the family has norms behind attention and gated unit: their results.
    post: Option<K::Buf>,
}

impl<K: Kernels> Default for Workspace<K> {
    fn default() -> Self {
        Self {
            rows: 0,
            buffers: None,
        }
    }
}

/// Largest rank the workspace is made for at first; larger ones allocate.
const RANK: usize = 64;

impl<K: Kernels> Workspace<K> {
    fn ensure(&mut self, k: &K, base: &BaseWeights<K>, rows: usize) -> Result<(), EngineError> {
        if self.buffers.is_some() && rows <= self.rows {
            return Ok(());
        }
        let c = &base.config;
        let z = |width: usize| k.zeros(rows * width).map_err(kernel);
        let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        self.buffers = Some(Buffers {
            x: z(c.hidden)?,
            h: z(c.hidden)?,
            q: z(q)?,
            k: z(kv)?,
            v: z(kv)?,
            o: z(q)?,
            gate: z(c.intermediate)?,
            up: z(c.intermediate)?,
            act: z(c.intermediate)?,
            lse: z(c.heads)?,
            tables: base
                .ropes
                .iter()
                .map(|_| z(c.head_dim))
                .collect::<Result<_, _>>()?,
            low: z(RANK)?,
            post: if c.family.post_norms() {
                Some(z(c.hidden)?)
            } else {
                None
            },
        });
        self.rows = rows;
        Ok(())
    }
}

/// `norm.rows` for hidden rows.
pub fn hidden_norm<K: Kernels>(base: &BaseWeights<K>, rows: usize) -> Norm {
    let c = &base.config;
    Norm {
        rows,
        width: c.hidden,
        eps: c.rms_eps,
        plus_one: c.family.norm_plus_one(),
    }
}

/// `norm.rows` for heads of q or k.
pub fn head_norm<K: Kernels>(base: &BaseWeights<K>, rows: usize) -> Norm {
    let c = &base.config;
    Norm {
        rows,
        width: c.head_dim,
        eps: c.rms_eps,
        plus_one: c.family.norm_plus_one(),
    }
}

/// The heads of a model's attention.
pub fn heads<K: Kernels>(base: &BaseWeights<K>) -> Heads {
    let c = &base.config;
    Heads {
        q_heads: c.heads,
        kv_heads: c.kv_heads,
        head_dim: c.head_dim,
        scale: 1.0 / (c.query_scalar as f32).sqrt(),
    }
}

/// Rotary shape for `heads` heads.
pub fn rope<K: Kernels>(base: &BaseWeights<K>, rows: usize, heads: usize) -> Rope {
    let d = base.config.head_dim;
    Rope {
        rows,
        heads,
        head_dim: d,
        half: d / 2,
    }
}

/// Rows of the embedding, times its factor where the family has one; `x [T, H]`.
pub fn embed<K: Kernels>(
    k: &K,
    base: &BaseWeights<K>,
    ids: &[TokenId],
    x: &mut K::Buf,
) -> Result<(), EngineError> {
    k.embed(&base.embed, ids, x).map_err(kernel)?;
    let factor = base.config.embed_scale();
    if factor == 1.0 {
        return Ok(());
    }
    k.scale(ids.len() * base.config.hidden, factor, x)
        .map_err(kernel)
}

/// Cosines and sines of these positions, a table `[T, D]` for each of the model's sets of frequencies.
pub fn rope_tables<K: Kernels>(
    k: &K,
    base: &BaseWeights<K>,
    positions: &[u32],
    tables: &mut [K::Buf],
) -> Result<(), EngineError> {
    for ((frequencies, factor), table) in base.ropes.iter().zip(tables) {
        k.rope_table(positions, frequencies, *factor, table)
            .map_err(kernel)?;
    }
    Ok(())
}

/// `x += h`, or the norm of h where the family has one there; `post` is scratch.
fn add_residual<K: Kernels>(
    k: &K,
    base: &BaseWeights<K>,
    (norm, rows): (Option<&K::Buf>, usize),
    (h, post): (&K::Buf, &mut Option<K::Buf>),
    x: &mut K::Buf,
) -> Result<(), EngineError> {
    let n = rows * base.config.hidden;
    let (Some(norm), Some(post)) = (norm, post) else {
        return k.axpy(n, 1.0, h, x).map_err(kernel);
    };
    k.rms_norm(h, norm, hidden_norm(base, rows), post)
        .map_err(kernel)?;
    k.axpy(n, 1.0, post, x).map_err(kernel)
}

/// `y[rows] += scale · (x[rows] Aᵀ) Bᵀ` for each span that has the map. `low` is scratch of at least rows · r.
pub fn add_low_rank<K: Kernels>(
    k: &K,
    spans: &[Span<'_, K::Buf>],
    at: (usize, Target),
    x: &K::Buf,
    y: &mut K::Buf,
    low: &mut K::Buf,
) -> Result<(), EngineError> {
    for span in spans {
        let adapter = span.adapter;
        let Some(lora) = &adapter.layers[at.0][at.1 as usize] else {
            continue;
        };
        let (m, r) = (span.rows.len(), adapter.rank);
        let own;
        let mut own_low = if k.len(low) < m * r {
            own = k.zeros(m * r).map_err(kernel)?;
            Some(own)
        } else {
            None
        };
        let low: &mut K::Buf = own_low.as_mut().unwrap_or(low);
        let a = Mat::new(&lora.a, r, lora.input);
        let rows = Mat::rows(x, span.rows.start, m, lora.input);
        k.matmul(
            Product::NT,
            1.0,
            (rows, a),
            MatMut::new(low, m, r),
            Acc::Set,
        )
        .map_err(kernel)?;
        let b = Mat::new(&lora.b, lora.out, r);
        let y = MatMut::rows(y, span.rows.start, m, lora.out);
        k.matmul(
            Product::NT,
            adapter.scale(),
            (Mat::new(low, m, r), b),
            y,
            Acc::Add,
        )
        .map_err(kernel)?;
    }
    Ok(())
}

/// Runs the items' tokens, rows in their order. Either every item has one token, or there is one item. Returns the final
/// hidden rows, not yet normed, inside the workspace.
pub fn forward<'w, K: Kernels>(
    k: &K,
    base: &BaseWeights<K>,
    items: &mut [Item<'_, K>],
    work: &'w mut Workspace<K>,
) -> Result<&'w mut K::Buf, EngineError> {
    let rows: usize = items.iter().map(|i| i.tokens.len()).sum();
    let decode = items.iter().all(|i| i.tokens.len() == 1);
    let mode = if decode {
        RowsMode::Decode
    } else {
        RowsMode::Prefill
    };
    work.ensure(k, base, rows)?;
    let Some(w) = work.buffers.as_mut() else {
        return Err(EngineError::Stopped("no workspace".to_owned()));
    };
    let mut ids = Vec::with_capacity(rows);
    let mut positions = Vec::with_capacity(rows);
    for item in items.iter_mut() {
        item.cache.reserve(k, item.tokens.len())?;
        let start = item.cache.len() as u32;
        positions.extend((0..item.tokens.len() as u32).map(|i| start + i));
        ids.extend_from_slice(item.tokens);
    }
    embed(k, base, &ids, &mut w.x)?;
    rope_tables(k, base, &positions, &mut w.tables)?;
    let versions: Vec<Held<K>> = items.iter().map(|i| i.version.clone()).collect();
    let adapters = versions.iter().map(version::adapter);
    let lengths = items.iter().map(|i| i.tokens.len());
    let spans = spans(adapters.zip(lengths));
    for (index, layer) in base.layers.iter().enumerate() {
        attention(k, (base, layer, index), items, (&spans, mode, rows), w)?;
        gated(k, (base, layer, index), (&spans, mode, rows), w)?;
    }
    for item in items.iter_mut() {
        item.cache.advance(item.tokens.len());
    }
    Ok(&mut w.x)
}

/// Neighbouring rows of one adapter become one span.
fn spans<'a, B>(rows: impl Iterator<Item = (Option<&'a Adapter<B>>, usize)>) -> Vec<Span<'a, B>> {
    let mut spans: Vec<Span<'a, B>> = Vec::new();
    let mut at = 0;
    for (adapter, n) in rows {
        let rows = at..at + n;
        at += n;
        let Some(adapter) = adapter else { continue };
        match spans.last_mut() {
            Some(last) if last.rows.end == rows.start && std::ptr::eq(last.adapter, adapter) => {
                last.rows.end = rows.end;
            }
            _ => spans.push(Span { rows, adapter }),
        }
    }
    spans
}

type At<'a, K> = (&'a BaseWeights<K>, &'a LayerWeights<K>, usize);
type How<'a, B> = (&'a [Span<'a, B>], RowsMode, usize);

fn attention<K: Kernels>(
    k: &K,
    (base, layer, index): At<'_, K>,
    items: &mut [Item<'_, K>],
    (spans, mode, rows): How<'_, K::Buf>,
    w: &mut Buffers<K>,
) -> Result<(), EngineError> {
    let c = &base.config;
    let (q_width, kv_width) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
    k.rms_norm(&w.x, &layer.attn_norm, hidden_norm(base, rows), &mut w.h)
        .map_err(kernel)?;
    let [wq, wk, wv, wo] = &layer.attention;
    let [bq, bk, bv, bo] = &layer.bias;
    k.linear_group(
        Mat::new(&w.h, rows, c.hidden),
        &mut [
            Linear {
                weight: wq,
                bias: bq.as_ref(),
                y: MatMut::new(&mut w.q, rows, q_width),
            },
            Linear {
                weight: wk,
                bias: bk.as_ref(),
                y: MatMut::new(&mut w.k, rows, kv_width),
            },
            Linear {
                weight: wv,
                bias: bv.as_ref(),
                y: MatMut::new(&mut w.v, rows, kv_width),
            },
        ],
        mode,
    )
    .map_err(kernel)?;
    add_low_rank(k, spans, (index, Target::Q), &w.h, &mut w.q, &mut w.low)?;
    add_low_rank(k, spans, (index, Target::K), &w.h, &mut w.k, &mut w.low)?;
    add_low_rank(k, spans, (index, Target::V), &w.h, &mut w.v, &mut w.low)?;
    if let Some((q_norm, k_norm)) = &layer.qk_norm {
        k.rms_norm(&w.q, q_norm, head_norm(base, rows * c.heads), &mut w.o)
            .map_err(kernel)?;
        k.copy(&w.o, 0, &mut w.q, 0, rows * q_width)
            .map_err(kernel)?;
        k.rms_norm(&w.k, k_norm, head_norm(base, rows * c.kv_heads), &mut w.o)
            .map_err(kernel)?;
        k.copy(&w.o, 0, &mut w.k, 0, rows * kv_width)
            .map_err(kernel)?;
    }
    let (forward, table) = (RopeDirection::Forward, &w.tables[layer.rope]);
    k.rope(&mut w.q, table, rope(base, rows, c.heads), forward)
        .map_err(kernel)?;
    k.rope(&mut w.k, table, rope(base, rows, c.kv_heads), forward)
        .map_err(kernel)?;
    append(k, items, index, w)?;
    attend(k, (base, layer, index), items, w)?;
    let y = MatMut::new(&mut w.h, rows, c.hidden);
    k.linear(Mat::new(&w.o, rows, q_width), wo, bo.as_ref(), y, mode)
        .map_err(kernel)?;
    add_low_rank(k, spans, (index, Target::O), &w.o, &mut w.h, &mut w.low)?;
    let norm = layer.post_norms.as_ref().map(|(attn, _)| attn);
    add_residual(k, base, (norm, rows), (&w.h, &mut w.post), &mut w.x)
}

/// Puts the rows' keys and values into their caches.
fn append<K: Kernels>(
    k: &K,
    items: &mut [Item<'_, K>],
    layer: usize,
    w: &Buffers<K>,
) -> Result<(), EngineError> {
    let mut at = 0;
    for item in items.iter_mut() {
        let n = item.tokens.len();
        item.cache.append(k, layer, (&w.k, &w.v), (at, n))?;
        at += n;
    }
    Ok(())
}

fn attend<K: Kernels>(
    k: &K,
    (base, layer, index): At<'_, K>,
    items: &[Item<'_, K>],
    w: &mut Buffers<K>,
) -> Result<(), EngineError> {
    let window = layer.window;
    let pages: Vec<Vec<KvPiece<'_, K::Buf>>> = items
        .iter()
        .map(|item| {
            let tokens = item.cache.len() + item.tokens.len();
            item.cache.pieces(index, tokens)
        })
        .collect();
    if items.iter().all(|i| i.tokens.len() == 1) {
        let pages: Vec<&[KvPiece<'_, K::Buf>]> = pages.iter().map(Vec::as_slice).collect();
        return k
            .attention_decode(&w.q, &pages, heads(base), window, &mut w.o)
            .map_err(kernel);
    }
    let ([item], [pages]) = (items, &pages[..]) else {
        return Err(EngineError::Shape("several prompts in one pass".to_owned()));
    };
    let n = item.tokens.len();
    let segment = Segment::chunk(0..n, 0..item.cache.len() + n)
        .ok_or_else(|| EngineError::Shape("a chunk longer than its text".to_owned()))?
        .with_window(window);
    let keys = (&w.q, &pages[..]);
    k.attention_paged(keys, heads(base), &[segment], &mut w.o, &mut w.lse)
        .map_err(kernel)
}

fn gated<K: Kernels>(
    k: &K,
    (base, layer, index): At<'_, K>,
    (spans, mode, rows): How<'_, K::Buf>,
    w: &mut Buffers<K>,
) -> Result<(), EngineError> {
    let c = &base.config;
    let wide = c.intermediate;
    k.rms_norm(&w.x, &layer.mlp_norm, hidden_norm(base, rows), &mut w.h)
        .map_err(kernel)?;
    let norm = layer.post_norms.as_ref().map(|(_, mlp)| mlp);
    let [gate, up, down] = match &layer.mlp {
        Mlp::Gated(maps) => maps,
        Mlp::Experts(own) => {
            let mut out = k.zeros(rows * c.hidden).map_err(kernel)?;
            experts::forward(k, (base, own), &w.h, (rows, mode), &mut out)?;
            return add_residual(k, base, (norm, rows), (&out, &mut w.post), &mut w.x);
        }
    };
    k.linear_group(
        Mat::new(&w.h, rows, c.hidden),
        &mut [
            Linear {
                weight: gate,
                bias: None,
                y: MatMut::new(&mut w.gate, rows, wide),
            },
            Linear {
                weight: up,
                bias: None,
                y: MatMut::new(&mut w.up, rows, wide),
            },
        ],
        mode,
    )
    .map_err(kernel)?;
    add_low_rank(
        k,
        spans,
        (index, Target::Gate),
        &w.h,
        &mut w.gate,
        &mut w.low,
    )?;
    add_low_rank(k, spans, (index, Target::Up), &w.h, &mut w.up, &mut w.low)?;
    k.glu(base.activation, rows * wide, &w.gate, &w.up, &mut w.act)
        .map_err(kernel)?;
    let y = MatMut::new(&mut w.h, rows, c.hidden);
    k.linear(Mat::new(&w.act, rows, wide), down, None, y, mode)
        .map_err(kernel)?;
    add_low_rank(
        k,
        spans,
        (index, Target::Down),
        &w.act,
        &mut w.h,
        &mut w.low,
    )?;
    add_residual(k, base, (norm, rows), (&w.h, &mut w.post), &mut w.x)
}
