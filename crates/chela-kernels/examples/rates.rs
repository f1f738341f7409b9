//! Prints how fast the operations run on this machine: `cargo run --release --example rates`.
#![allow(clippy::print_stdout)]

use std::sync::Arc;
use std::time::Instant;

use chela_kernels::{
    Acc, AttentionSaved, Cpu, CpuBuf, CpuWeight, DType, Heads, Kernels, KvPiece, Linear, Mat,
    MatMut, Norm, Priority, Product, Qkv, QkvGrad, Result, RowsMode, SamplePolicy, Segment,
    measured_memory_gbs, measured_sgemm_gflops, sample_row,
};

/// Best seconds of a call.
fn best(mut call: impl FnMut() -> Result) -> Result<f64> {
    call()?;
    let (start, mut best) = (Instant::now(), f64::INFINITY);
    while start.elapsed().as_secs_f64() < 0.4 {
        let one = Instant::now();
        call()?;
        best = best.min(one.elapsed().as_secs_f64());
    }
    Ok(best)
}

fn floats(n: usize) -> Vec<f32> {
    (0..n)
        .map(|i| ((i * 7919) % 1000) as f32 / 1000.0 - 0.5)
        .collect()
}

fn weight(cpu: &Cpu, dtype: DType, rows: usize, cols: usize) -> Result<CpuWeight> {
    let bytes = rows * dtype.row_bytes(cols)?;
    let bytes: Vec<u8> = match dtype {
        DType::F32 => floats(rows * cols)
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect(),
        // Scales of 0x1111 are small ordinary numbers.
        _ => vec![0x11; bytes],
    };
    cpu.weight(dtype, rows, cols, Arc::new(bytes))
}

fn few_rows(cpu: &Cpu) -> Result {
    println!("few rows: dtype, out x in, m: microseconds, GB/s of weight bytes, GFLOP/s");
    for (n, k) in [(1536, 576), (576, 1536), (49152, 576)] {
        for dtype in [
            DType::F32,
            DType::F16,
            DType::Q8_0,
            DType::Q4_0,
            DType::Q4_1,
        ] {
            few_rows_of(cpu, dtype, n, k)?;
        }
    }
    for dtype in [DType::Q4_K, DType::Q5_K, DType::Q6_K] {
        few_rows_of(cpu, dtype, 4096, 1024)?;
    }
    Ok(())
}

fn few_rows_of(cpu: &Cpu, dtype: DType, n: usize, k: usize) -> Result {
    let w = weight(cpu, dtype, n, k)?;
    for m in [1, 2, 4, 8, 16] {
        let x = cpu.upload(&floats(m * k))?;
        let mut y = cpu.zeros(m * n)?;
        let s = best(|| {
            let y = MatMut::new(&mut y, m, n);
            cpu.linear(Mat::new(&x, m, k), &w, None, y, RowsMode::Decode)
        })?;
        let bytes = (n * dtype.row_bytes(k)?) as f64;
        let flops = 2.0 * (m * n * k) as f64;
        let (us, gbs, gf) = (s * 1e6, bytes / s / 1e9, flops / s / 1e9);
        println!("  {dtype:5} {n:6} x {k:5} m {m:2}: {us:8.1} us {gbs:6.1} GB/s {gf:6.1} GF/s");
    }
    Ok(())
}

fn many_rows(cpu: &Cpu) -> Result {
    println!("many rows (m 1024): GFLOP/s");
    let m = 1024;
    for (n, k) in [(1536, 576), (576, 1536), (576, 576), (3072, 1024)] {
        for dtype in [DType::F32, DType::F16, DType::Q4_1] {
            let w = weight(cpu, dtype, n, k)?;
            let x = cpu.upload(&floats(m * k))?;
            let mut y = cpu.zeros(m * n)?;
            let mut dx = cpu.zeros(m * k)?;
            let flops = 2.0 * (m * n * k) as f64 / 1e9;
            let forward = best(|| {
                let y = MatMut::new(&mut y, m, n);
                cpu.linear(Mat::new(&x, m, k), &w, None, y, RowsMode::Prefill)
            })?;
            let back = best(|| {
                let dx = MatMut::new(&mut dx, m, k);
                cpu.linear_dx(Mat::new(&y, m, n), &w, dx, Acc::Set)
            })?;
            let (f, b) = (flops / forward, flops / back);
            println!("  {dtype:5} {n:5} x {k:5}: forward {f:6.1}  dx {b:6.1}");
        }
    }
    Ok(())
}

fn lora(cpu: &Cpu) -> Result {
    let (m, n, k, r) = (1024, 1536, 576, 16);
    let x = cpu.upload(&floats(m * k))?;
    let a = cpu.upload(&floats(r * k))?;
    let b = cpu.upload(&floats(n * r))?;
    let mut low = cpu.zeros(m * r)?;
    let mut y = cpu.zeros(m * n)?;
    let mut da = cpu.zeros(r * k)?;
    let mut db = cpu.zeros(n * r)?;
    println!("LoRA r 16, 1024 x 576 -> 1536: microseconds, GFLOP/s");
    let s = best(|| {
        let operands = (Mat::new(&x, m, k), Mat::new(&a, r, k));
        cpu.matmul(
            Product::NT,
            1.0,
            operands,
            MatMut::new(&mut low, m, r),
            Acc::Set,
        )
    })?;
    println!(
        "  x A'     {:8.1} {:6.1}",
        s * 1e6,
        2e-9 * (m * k * r) as f64 / s
    );
    let s = best(|| {
        let operands = (Mat::new(&low, m, r), Mat::new(&b, n, r));
        cpu.matmul(
            Product::NT,
            1.0,
            operands,
            MatMut::new(&mut y, m, n),
            Acc::Add,
        )
    })?;
    println!(
        "  (xA') B' {:8.1} {:6.1}",
        s * 1e6,
        2e-9 * (m * n * r) as f64 / s
    );
    let s = best(|| {
        let operands = (Mat::new(&low, m, r), Mat::new(&x, m, k));
        cpu.matmul(
            Product::TN,
            1.0,
            operands,
            MatMut::new(&mut da, r, k),
            Acc::Add,
        )
    })?;
    println!(
        "  dA       {:8.1} {:6.1}",
        s * 1e6,
        2e-9 * (m * k * r) as f64 / s
    );
    let s = best(|| {
        let operands = (Mat::new(&y, m, n), Mat::new(&low, m, r));
        cpu.matmul(
            Product::TN,
            1.0,
            operands,
            MatMut::new(&mut db, n, r),
            Acc::Add,
        )
    })?;
    println!(
        "  dB       {:8.1} {:6.1}",
        s * 1e6,
        2e-9 * (m * n * r) as f64 / s
    );
    Ok(())
}

const HEADS: Heads = Heads {
    q_heads: 9,
    kv_heads: 3,
    head_dim: 64,
    scale: 0.125,
};

fn attention(cpu: &Cpu) -> Result {
    let t = 1024;
    let (q, kv) = (t * 576, t * 192);
    let (qb, kb, vb) = (
        cpu.upload(&floats(q))?,
        cpu.upload(&floats(kv))?,
        cpu.upload(&floats(kv))?,
    );
    let (mut out, mut lse) = (cpu.zeros(q)?, cpu.zeros(t * 9)?);
    let segments = [Segment::causal(0..t)];
    let qkv = Qkv {
        q: &qb,
        k: &kb,
        v: &vb,
    };
    let forward = best(|| cpu.attention(qkv, HEADS, &segments, &mut out, &mut lse))?;
    let (mut dq, mut dk, mut dv) = (cpu.zeros(q)?, cpu.zeros(kv)?, cpu.zeros(kv)?);
    let back = best(|| {
        let saved = AttentionSaved {
            out: &out,
            lse: &lse,
            dout: &qb,
        };
        let grad = QkvGrad {
            dq: &mut dq,
            dk: &mut dk,
            dv: &mut dv,
        };
        cpu.attention_backward(qkv, HEADS, &segments, saved, grad)
    })?;
    let flops = 2.0 * (t * t * 576) as f64 / 1e9;
    println!("attention 1 x 1024, 9/3 heads of 64 (causal counted as half)");
    println!(
        "  forward  {:6.2} ms {:6.1} GFLOP/s",
        forward * 1e3,
        flops / forward
    );
    println!(
        "  backward {:6.2} ms {:6.1} GFLOP/s",
        back * 1e3,
        2.5 * flops / back
    );
    for (sequences, len) in [(1, 128), (1, 1024), (8, 512)] {
        let piece = [KvPiece {
            k: &kb,
            v: &vb,
            at: 0,
            len,
        }];
        let caches = vec![&piece[..]; sequences];
        let s = best(|| cpu.attention_decode(&qb, &caches, HEADS, None, &mut out))?;
        println!("  decode {sequences} x {len}: {:7.1} us", s * 1e6);
    }
    Ok(())
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

/// The operations of one decode step of a SmolLM2-135M shape; tokens a second.
fn decode(cpu: &Cpu, dtype: DType, head_type: DType) -> Result {
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
                cpu.glu(chela_kernels::Activation::Silu, m * inter, gate, up, act)?;
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

fn main() -> Result {
    let only = std::env::args().nth(1).unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut counts = vec![1, cores];
    counts.dedup();
    for threads in counts {
        let cpu = Cpu::new(threads);
        println!("== {}", cpu.describe());
        println!("sgemm {:.1} GFLOP/s", measured_sgemm_gflops(&cpu)?);
        println!("memory {:.1} GB/s", measured_memory_gbs(&cpu)?);
        let train = cpu.with_priority(Priority::Train);
        if only.is_empty() || only == "few" {
            few_rows(&cpu)?;
        }
        if only.is_empty() || only == "many" {
            many_rows(&train)?;
            lora(&train)?;
        }
        if only.is_empty() || only == "attention" {
            attention(&train)?;
        }
        if only.is_empty() || only == "decode" {
            println!("decode, SmolLM2-135M shape, context 128");
            decode(&cpu, DType::Q4_1, DType::Q8_0)?;
            decode(&cpu, DType::Q4_1, DType::Q4_1)?;
            decode(&cpu, DType::F16, DType::F16)?;
        }
    }
    let mut logits = floats(49152);
    let policy = SamplePolicy {
        top_p: 0.9,
        temperature: 0.8,
        ..SamplePolicy::default()
    };
    let s = best(|| {
        logits
            .iter_mut()
            .enumerate()
            .for_each(|(i, z)| *z = ((i * 7919) % 997) as f32 / 80.0);
        sample_row(&mut logits, policy, 0.5).map(drop)
    })?;
    println!(
        "sample_row, 49152, top-p 0.9, filling included: {:.0} us",
        s * 1e6
    );
    Ok(())
}
