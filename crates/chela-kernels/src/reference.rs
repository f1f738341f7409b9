//! Plain loops in f64: what every implementation of the operations is tested against.

use half::{bf16, f16};

use crate::dtype::DType;
use crate::ops::{Activation, AdamW, Heads, Norm, Rope, Routing};
use crate::segments::Segment;

pub(crate) type F = f64;

pub(crate) fn wide(x: &[f32]) -> Vec<F> {
    x.iter().map(|x| F::from(*x)).collect()
}

/// `x [m, k] · wᵀ [n, k]`
pub(crate) fn matmul_nt(x: &[F], w: &[F], (m, n, k): (usize, usize, usize)) -> Vec<F> {
    let mut y = vec![0.0; m * n];
    for i in 0..m {
        for j in 0..n {
            y[i * n + j] = (0..k).map(|l| x[i * k + l] * w[j * k + l]).sum();
        }
    }
    y
}

pub(crate) fn transpose(x: &[F], rows: usize, cols: usize) -> Vec<F> {
    (0..rows * cols)
        .map(|i| x[i % rows * cols + i / rows])
        .collect()
}

/// One stored row as numbers, written from the description of the GGUF formats.
pub(crate) fn unpack_row(dtype: DType, row: &[u8], cols: usize) -> Vec<F> {
    let half = |b: &[u8], at: usize| f16::from_le_bytes([b[at], b[at + 1]]).to_f64();
    let blocks = row.chunks_exact(dtype.block_bytes());
    let mut out = Vec::with_capacity(cols);
    for b in blocks {
        match dtype {
            DType::F32 => out.push(F::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
            DType::F16 => out.push(half(b, 0)),
            DType::BF16 => out.push(bf16::from_le_bytes([b[0], b[1]]).to_f64()),
            DType::Q8_0 => out.extend((0..32).map(|i| half(b, 0) * F::from(b[2 + i] as i8))),
            DType::Q4_0 => out.extend((0..32).map(|i| {
                let q = if i < 16 {
                    b[2 + i] & 15
                } else {
                    b[2 + i - 16] >> 4
                };
                half(b, 0) * (F::from(q) - 8.0)
            })),
            DType::Q4_1 => out.extend((0..32).map(|i| {
                let q = if i < 16 {
                    b[4 + i] & 15
                } else {
                    b[4 + i - 16] >> 4
                };
                half(b, 0) * F::from(q) + half(b, 2)
            })),
            DType::Q4_K | DType::Q5_K => out.extend((0..256).map(|i| k_quant(dtype, b, i))),
            DType::Q6_K => out.extend((0..256).map(|i| {
                let (n, r) = (i / 128, i % 128);
                let low = b[n * 64 + r % 64];
                let low = if r < 64 { low & 15 } else { low >> 4 };
                let high = (b[128 + n * 32 + r % 32] >> (2 * (r / 32))) & 3;
                let scale = b[192 + i / 16] as i8;
                half(b, 208) * F::from(scale) * (F::from(low | (high << 4)) - 32.0)
            })),
        }
    }
    out
}

fn k_quant(dtype: DType, b: &[u8], i: usize) -> F {
    let half = |at: usize| f16::from_le_bytes([b[at], b[at + 1]]).to_f64();
    let (j, s) = (i / 32, &b[4..16]);
    let (scale, min) = if j < 4 {
        (s[j] & 63, s[j + 4] & 63)
    } else {
        let (high_s, high_m) = ((s[j - 4] >> 6) << 4, (s[j] >> 6) << 4);
        ((s[j + 4] & 15) | high_s, (s[j + 4] >> 4) | high_m)
    };
    let nibbles = if dtype == DType::Q4_K { 16 } else { 48 };
    let byte = b[nibbles + i / 64 * 32 + i % 32];
    let mut q = if i % 64 < 32 { byte & 15 } else { byte >> 4 };
    if dtype == DType::Q5_K {
        q |= ((b[16 + i % 32] >> j) & 1) << 4;
    }
    half(0) * F::from(scale) * F::from(q) - half(2) * F::from(min)
}

pub(crate) fn rms_norm(x: &[F], w: &[F], norm: Norm) -> Vec<F> {
    let mut y = Vec::new();
    for row in x.chunks_exact(norm.width) {
        let mean = row.iter().map(|x| x * x).sum::<F>() / norm.width as F;
        let r = 1.0 / (mean + F::from(norm.eps)).sqrt();
        let plus = if norm.plus_one { 1.0 } else { 0.0 };
        y.extend(row.iter().zip(w).map(|(x, w)| x * r * (w + plus)));
    }
    y
}

pub(crate) fn rope(x: &[F], positions: &[u32], inv_freq: &[f32], rope: Rope, sign: F) -> Vec<F> {
    let mut y = x.to_vec();
    for t in 0..rope.rows {
        for h in 0..rope.heads {
            let head = &mut y[(t * rope.heads + h) * rope.head_dim..][..rope.head_dim];
            for (f, freq) in inv_freq.iter().enumerate() {
                let angle = sign * F::from(positions[t]) * F::from(*freq);
                let (a, b) = (head[f], head[f + rope.half]);
                head[f] = a * angle.cos() - b * angle.sin();
                head[f + rope.half] = b * angle.cos() + a * angle.sin();
            }
        }
    }
    y
}

/// Whether query row `q` sees key row `k` through one of the segments.
pub(crate) fn sees(segments: &[Segment], q: usize, k: usize) -> bool {
    segments.iter().any(|s| {
        if !s.q.contains(&q) || !s.k.contains(&k) {
            return false;
        }
        let distance = (s.offset + q - s.q.start) as i64 - (k - s.k.start) as i64;
        (!s.causal || distance >= 0) && s.window.is_none_or(|w| distance < w as i64)
    })
}

/// Returns `out [Tq, Hq * D]` and `lse [Tq, Hq]` of a dense softmax.
pub(crate) fn attention(
    (q, k, v): (&[F], &[F], &[F]),
    heads: Heads,
    segments: &[Segment],
) -> (Vec<F>, Vec<F>) {
    let (hq, hk, d) = (heads.q_heads, heads.kv_heads, heads.head_dim);
    let (rows, keys) = (q.len() / (hq * d), k.len() / (hk * d));
    let (mut out, mut lse) = (vec![0.0; q.len()], vec![F::NEG_INFINITY; rows * hq]);
    for t in 0..rows {
        for h in 0..hq {
            let (q, g) = (&q[(t * hq + h) * d..][..d], h / (hq / hk));
            let seen: Vec<_> = (0..keys).filter(|j| sees(segments, t, *j)).collect();
            let score = |j: &usize| {
                let k = &k[(j * hk + g) * d..][..d];
                F::from(heads.scale) * q.iter().zip(k).map(|(a, b)| a * b).sum::<F>()
            };
            let sum: F = seen.iter().map(|j| score(j).exp()).sum();
            lse[t * hq + h] = sum.ln();
            for j in &seen {
                let p = score(j).exp() / sum;
                for i in 0..d {
                    out[(t * hq + h) * d + i] += p * v[(j * hk + g) * d + i];
                }
            }
        }
    }
    (out, lse)
}

pub(crate) fn glu(activation: Activation, gate: &[F], up: &[F]) -> Vec<F> {
    let act = |x: F| match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            let inner = (2.0 / core::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
    };
    gate.iter().zip(up).map(|(g, u)| act(*g) * u).collect()
}

/// The chosen experts of each row and their weights.
pub(crate) fn route(logits: &[F], routing: Routing) -> (Vec<u32>, Vec<F>) {
    let (mut experts, mut weights) = (Vec::new(), Vec::new());
    for row in logits.chunks_exact(routing.experts) {
        let p: Vec<F> = log_softmax(row).into_iter().map(F::exp).collect();
        let mut chosen: Vec<usize> = Vec::new();
        for _ in 0..routing.active {
            let left = (0..routing.experts).filter(|e| !chosen.contains(e));
            let best = left.reduce(|a, b| if p[b] > p[a] { b } else { a });
            chosen.extend(best);
        }
        let sum: F = chosen.iter().map(|e| p[*e]).sum();
        let norm = if routing.normalised { sum } else { 1.0 };
        experts.extend(chosen.iter().map(|e| *e as u32));
        weights.extend(chosen.iter().map(|e| p[*e] / norm));
    }
    (experts, weights)
}

/// Log-softmax of a row of logits.
pub(crate) fn log_softmax(z: &[F]) -> Vec<F> {
    let max = z.iter().copied().fold(F::NEG_INFINITY, F::max);
    let lse = max + z.iter().map(|z| (z - max).exp()).sum::<F>().ln();
    z.iter().map(|z| z - lse).collect()
}

pub(crate) fn entropy(logp: &[F]) -> F {
    -logp.iter().map(|l| l.exp() * l).sum::<F>()
}

/// One step for one number: returns parameter, first and second moment.
pub(crate) fn adamw((p, g, m, v): (F, F, F, F), a: AdamW) -> (F, F, F) {
    let (b1, b2) = (F::from(a.beta1), F::from(a.beta2));
    let g = g * F::from(a.grad_scale);
    let m = b1 * m + (1.0 - b1) * g;
    let v = b2 * v + (1.0 - b2) * g * g;
    let m_hat = m / (1.0 - b1.powf(a.step as F));
    let v_hat = v / (1.0 - b2.powf(a.step as F));
    let lr = F::from(a.lr);
    let p = p - lr * F::from(a.weight_decay) * p - lr * m_hat / (v_hat.sqrt() + F::from(a.eps));
    (p, m, v)
}

/// Derivative of `f` by every number of `x`, by central differences.
pub(crate) fn finite_difference(x: &[F], f: impl Fn(&[F]) -> F) -> Vec<F> {
    let (eps, mut x) = (1e-5, x.to_vec());
    (0..x.len())
        .map(|i| {
            let keep = x[i];
            x[i] = keep + eps;
            let above = f(&x);
            x[i] = keep - eps;
            let below = f(&x);
            x[i] = keep;
            (above - below) / (2.0 * eps)
        })
        .collect()
}
