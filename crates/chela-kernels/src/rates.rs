//! How fast this machine multiplies and reads, for `chela bench` and `cargo bench`.

use std::hint::black_box;
use std::time::{Duration, Instant};

use crate::cpu::{Cpu, simd};
use crate::error::Result;
use crate::ops::{Acc, Kernels, Mat, MatMut, Product};

/// How long a measurement repeats.
const AT_LEAST: Duration = Duration::from_millis(400);

/// Best rate of repeated calls, in units (`work` per call) per second.
fn best_rate(work: f64, mut call: impl FnMut() -> Result) -> Result<f64> {
    call()?;
    let (start, mut best) = (Instant::now(), f64::INFINITY);
    while start.elapsed() < AT_LEAST {
        let one = Instant::now();
        call()?;
        best = best.min(one.elapsed().as_secs_f64());
    }
    Ok(work / best)
}

/// Single-precision matrix products of 1024 x 1024 x 1024 in tiles over the pool: 10^9 operations a
/// second (a multiply and an add count as two), best of the repetitions.
pub fn measured_sgemm_gflops(cpu: &Cpu) -> Result<f64> {
    const N: usize = 1024;
    let a = cpu.upload(&vec![0.5; N * N])?;
    let b = cpu.upload(&vec![0.25; N * N])?;
    let mut c = cpu.zeros(N * N)?;
    let rate = best_rate(2.0 * (N * N * N) as f64, || {
        let operands = (Mat::new(&a, N, N), Mat::new(&b, N, N));
        cpu.matmul(
            Product::NT,
            1.0,
            operands,
            MatMut::new(&mut c, N, N),
            Acc::Set,
        )
    })?;
    Ok(rate / 1e9)
}

/// Reading 256 MB over the pool: 10^9 bytes a second, best of the repetitions.
pub fn measured_memory_gbs(cpu: &Cpu) -> Result<f64> {
    let data = vec![1.0_f32; 64 << 20];
    let rate = best_rate(4.0 * data.len() as f64, || {
        cpu.ranges(data.len() / 4096, 400.0, |r| {
            black_box(simd::sum(&data[r.start * 4096..r.end * 4096]));
        })
    })?;
    Ok(rate / 1e9)
}
