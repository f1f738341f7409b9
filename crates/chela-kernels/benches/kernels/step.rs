//! All operations of one decode step of a SmolLM2-135M shape, context 128: tokens a second.

use std::time::Instant;

use chela_kernels::{
    Activation, Cpu, CpuBuf, CpuWeight, DType, Kernels, KvPiece, Linear, Mat, MatMut, Norm, Result,
    RowsMode,
};

use crate::attention::HEADS;
use crate::measure::{Bench, floats, timed};
use crate::products::weight;

/// The group.
pub(crate) fn decode(bench: &Bench) -> Result {
    let cpu = bench.cpu;
    step(cpu, DType::Q4_1, DType::Q8_0)?;
    step(cpu, DType::Q4_1, DType::Q4_1)?;
    step(cpu, DType::F16, DType::F16)
}

/// Best seconds of a call.
fn best(mut call: impl FnMut() -> Result) -> Result<f64> {
    call()?;
    let (start, mut best) = (Instant::now(), f64::INFINITY);
    while start.elapsed().as_secs_f64() < 0.4 {
        best = best.min(timed(&mut call)?);
    }
    Ok(best)
}

fn out<'a>(
    weight: &'a CpuWeight,
    y: &'a mut CpuBuf,
    m: usize,
    n: usize,
) -> Linear<'a, CpuWeight, CpuBuf> {
    Linear {
        weight,
        bias: None,
        y: MatMut::new(y, m, n),
    }
}

struct Layer {
    attention: [CpuWeight; 4],
    mlp: [CpuWeight; 3],
}

fn step(cpu: &Cpu, dtype: DType, head_type: DType) -> Result {
    let (h, inter, kv, vocab) = (576, 1536, 192, 49152);
    let w = |rows, cols| weight(cpu, dtype, rows, cols);
    let layer = || -> Result<Layer> {
        Ok(Layer {
            attention: [w(h, h)?, w(kv, h)?, w(kv, h)?, w(h, h)?],
            mlp: [w(inter, h)?, w(inter, h)?, w(h, inter)?],
        })
    };
    let layers = (0..30).map(|_| layer()).collect::<Result<Vec<_>>>()?;
    let head = weight(cpu, head_type, vocab, h)?;
    for m in [1, 8] {
        let mut x = cpu.upload(&floats(m * h))?;
        let norm_w = cpu.upload(&vec![1.0; h])?;
        let cache = cpu.upload(&floats(256 * kv))?;
        let mut bufs = [h, h, kv, kv, h, h, inter, inter, inter, h]
            .map(|n| cpu.zeros(m * n))
            .into_iter()
            .collect::<Result<Vec<CpuBuf>>>()?;
        let mut logits = cpu.zeros(m * vocab)?;
        let piece = [KvPiece {
            k: &cache,
            v: &cache,
            at: 0,
            len: 128,
        }];
        let caches = vec![&piece[..]; m];
        let norm = Norm {
            rows: m,
            width: h,
            eps: 1e-5,
            plus_one: false,
        };
        let s = best(|| {
            let _lease = cpu.lease();
            let [n1, q, k, v, o, ao, gate, up, act, down] = &mut bufs[..] else {
                return Ok(());
            };
            for layer in &layers {
                cpu.rms_norm(&x, &norm_w, norm, n1)?;
                let [wq, wk, wv, wo] = &layer.attention;
                let mut group = [out(wq, q, m, h), out(wk, k, m, kv), out(wv, v, m, kv)];
                cpu.linear_group(Mat::new(n1, m, h), &mut group, RowsMode::Decode)?;
                cpu.attention_decode(q, &caches, HEADS, None, o)?;
                let y = MatMut::new(ao, m, h);
                cpu.linear(Mat::new(o, m, h), wo, None, y, RowsMode::Decode)?;
                cpu.axpy(m * h, 1.0, ao, &mut x)?;
                cpu.rms_norm(&x, &norm_w, norm, n1)?;
                let [wg, wu, wd] = &layer.mlp;
                let mut group = [out(wg, gate, m, inter), out(wu, up, m, inter)];
                cpu.linear_group(Mat::new(n1, m, h), &mut group, RowsMode::Decode)?;
                cpu.glu(Activation::Silu, m * inter, gate, up, act)?;
                let y = MatMut::new(down, m, h);
                cpu.linear(Mat::new(act, m, inter), wd, None, y, RowsMode::Decode)?;
                cpu.axpy(m * h, 1e-3, down, &mut x)?;
            }
            cpu.logits(&head, Mat::new(&x, m, h), &mut logits)
        })?;
        let rate = m as f64 / s;
        println!(
            "  {dtype} with {head_type} head, {m} sequences: {rate:.0} tok/s ({:.2} ms)",
            s * 1e3
        );
    }
    Ok(())
}
