//! Times a kernel in turn with its plain loops, and prints both.

use std::time::Instant;

use chela_kernels::{Cpu, Result, measured_memory_gbs, measured_sgemm_gflops};

/// What a kernel is bound by, and how much of it a call does.
#[derive(Clone, Copy)]
pub(crate) enum Work {
    /// Floating-point operations.
    Flops(f64),
    /// Bytes read and written, each once.
    Bytes(f64),
}

impl Work {
    fn amount(self) -> f64 {
        match self {
            Self::Flops(n) | Self::Bytes(n) => n,
        }
    }
}

/// The plain loops on a smaller piece of the same work: how much of it, in the kernel's unit, and a call.
pub(crate) type Plain<'a> = (f64, &'a mut dyn FnMut());

/// The machine's rates, and the kernels to time.
pub(crate) struct Bench<'a> {
    pub(crate) cpu: &'a Cpu,
    sgemm: f64,
    memory: f64,
}

impl<'a> Bench<'a> {
    /// Measures the machine and prints a group's heading.
    pub(crate) fn new(cpu: &'a Cpu, name: &str) -> Result<Self> {
        let bench = Self {
            cpu,
            sgemm: measured_sgemm_gflops(cpu)?,
            memory: measured_memory_gbs(cpu)?,
        };
        println!(
            "{name}: sgemm {:.1} GFLOP/s, memory {:.1} GB/s",
            bench.sgemm, bench.memory
        );
        Ok(bench)
    }

    /// Prints a kernel's best time and rate, its share of the machine's, and how many times the plain loops' rate that is.
    pub(crate) fn run(
        &self,
        name: &str,
        work: Work,
        mut kernel: impl FnMut() -> Result,
        mut plain: Option<Plain<'_>>,
    ) -> Result {
        kernel()?;
        let (start, mut rounds) = (Instant::now(), 0);
        let (mut best, mut slow) = (f64::INFINITY, f64::INFINITY);
        while rounds < 3 || start.elapsed().as_secs_f64() < 0.25 {
            best = best.min(timed(&mut kernel)?);
            if let Some((_, call)) = &mut plain {
                slow = slow.min(timed(|| {
                    call();
                    Ok(())
                })?);
            }
            rounds += 1;
        }
        let rate = work.amount() / best / 1e9;
        let (unit, of, peak) = match work {
            Work::Flops(_) => ("GFLOP/s", "sgemm", self.sgemm),
            Work::Bytes(_) => ("GB/s   ", "memory", self.memory),
        };
        let beside = plain.map_or(String::new(), |(amount, _)| {
            format!("  {:7.1} x plain loops", rate / (amount / slow / 1e9))
        });
        let (us, share) = (best * 1e6, 100.0 * rate / peak);
        println!("  {name:34} {us:9.1} us {rate:7.2} {unit} {share:5.1}% of {of:6}{beside}");
        Ok(())
    }
}

/// Seconds of a call.
pub(crate) fn timed(mut call: impl FnMut() -> Result) -> Result<f64> {
    let start = Instant::now();
    call()?;
    Ok(start.elapsed().as_secs_f64())
}

/// Numbers in ±0.5, the same in every run.
pub(crate) fn floats(n: usize) -> Vec<f32> {
    (0..n)
        .map(|i| ((i * 7919) % 1000) as f32 / 1000.0 - 0.5)
        .collect()
}
