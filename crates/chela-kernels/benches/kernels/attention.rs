//! Attention: a whole sequence forward and backward, and one token against a cache.

use std::hint::black_box;

use chela_kernels::{AttentionSaved, Heads, Kernels, KvPiece, Qkv, QkvGrad, Result, Segment};

use crate::measure::{Bench, Work, floats};
use crate::reference as plain;

/// Nine query heads of 64 numbers share three key-value heads (SmolLM2-135M).
pub(crate) const HEADS: Heads = Heads {
    q_heads: 9,
    kv_heads: 3,
    head_dim: 64,
    scale: 0.125,
};

const Q: usize = HEADS.q_heads * HEADS.head_dim;
const KV: usize = HEADS.kv_heads * HEADS.head_dim;

/// Operations of a forward over `pairs` of query and key.
fn flops(pairs: usize) -> f64 {
    4.0 * (pairs * Q) as f64
}

/// The group.
pub(crate) fn attention(bench: &Bench) -> Result {
    sequence(bench)?;
    decode(bench)
}

fn sequence(bench: &Bench) -> Result {
    let (cpu, t) = (bench.cpu, 1024);
    let (q, k, v) = (
        cpu.upload(&floats(t * Q))?,
        cpu.upload(&floats(t * KV))?,
        cpu.upload(&floats(t * KV))?,
    );
    let (mut out, mut lse) = (cpu.zeros(t * Q)?, cpu.zeros(t * HEADS.q_heads)?);
    let segments = [Segment::causal(0..t)];
    let qkv = Qkv {
        q: &q,
        k: &k,
        v: &v,
    };
    // Half of the pairs are seen.
    let work = flops(t * t / 2);
    let few = 64;
    let (pq, pk) = (
        plain::wide(&floats(few * Q)),
        plain::wide(&floats(few * KV)),
    );
    let seen = [Segment::causal(0..few)];
    let mut loops = || {
        black_box(plain::attention((&pq, &pk, &pk), HEADS, &seen));
    };
    bench.run(
        "forward 1 x 1024, causal",
        Work::Flops(work),
        || cpu.attention(qkv, HEADS, &segments, &mut out, &mut lse),
        Some((flops(few * few / 2), &mut loops)),
    )?;
    let (mut dq, mut dk, mut dv) = (cpu.zeros(t * Q)?, cpu.zeros(t * KV)?, cpu.zeros(t * KV)?);
    let backward = || {
        let saved = AttentionSaved {
            out: &out,
            lse: &lse,
            dout: &q,
        };
        let grad = QkvGrad {
            dq: &mut dq,
            dk: &mut dk,
            dv: &mut dv,
        };
        cpu.attention_backward(qkv, HEADS, &segments, saved, grad)
    };
    // Five products instead of two.
    bench.run(
        "backward 1 x 1024, causal",
        Work::Flops(2.5 * work),
        backward,
        None,
    )
}

fn decode(bench: &Bench) -> Result {
    let cpu = bench.cpu;
    let longest = 1024;
    let q = cpu.upload(&floats(8 * Q))?;
    let kv = cpu.upload(&floats(longest * KV))?;
    let mut out = cpu.zeros(8 * Q)?;
    for (sequences, len) in [(1, 128), (1, 1024), (8, 512)] {
        let piece = [KvPiece {
            k: &kv,
            v: &kv,
            at: 0,
            len,
        }];
        let caches = vec![&piece[..]; sequences];
        let (pq, pk) = (plain::wide(&floats(Q)), plain::wide(&floats(128 * KV)));
        let seen = [Segment::ancestor(0..1, 0..128, 127)];
        let mut loops = || {
            black_box(plain::attention((&pq, &pk, &pk), HEADS, &seen));
        };
        bench.run(
            &format!("decode {sequences} x {len}"),
            Work::Flops(flops(sequences * len)),
            || cpu.attention_decode(&q, &caches, HEADS, None, &mut out),
            Some((flops(128), &mut loops)),
        )?;
    }
    Ok(())
}
