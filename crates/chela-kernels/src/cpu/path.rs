//! What decides the last bits of results on this machine, as a text to keep beside them.
#![allow(unsafe_code)]

use super::matmul::{Operand, sgemm};
use super::{Cpu, simd};
use crate::ops::Acc;
use std::sync::OnceLock;

/// FNV-1a, 64 bits.
struct Digest(u64);

impl Digest {
    fn add(&mut self, value: f32) {
        for byte in value.to_bits().to_le_bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

/// Asked once: neither the processor nor the libraries change while the process runs.
static PROBE: OnceLock<u64> = OnceLock::new();

/// Numbers in ±1 whose products and sums have to be rounded.
fn noise(n: usize, salt: u32) -> Vec<f32> {
    let mut x = 0x9e37_79b9_u32 ^ salt;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        (x >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// Depths of the probed products: `gemm` cuts deep ones by the size of the processor's first cache.
const DEPTHS: [usize; 7] = [64, 320, 576, 1024, 1536, 3072, 5000];

/// Bits of a few products by `gemm` (its instructions and its blocking) and of the system's mathematical functions (which differ
/// between versions of the C library).
fn probe() -> u64 {
    const M: usize = 32;
    const N: usize = 64;
    let mut digest = Digest(0xcbf2_9ce4_8422_2325);
    for k in DEPTHS {
        let (a, b) = (noise(M * k, 1), noise(N * k, 2));
        let mut c = vec![0.0; M * N];
        let (left, right) = (Operand::rows(&a, k), Operand::rows(&b, k).transposed());
        // SAFETY: a is [M, k], b is [N, k], c is [M, N], all of their own.
        unsafe { sgemm((M, N, k), 0.7, left, right, c.as_mut_ptr(), N, Acc::Set) };
        c.into_iter().for_each(|v| digest.add(v));
    }
    for x in noise(256, 3) {
        let (wide, positive) = (x * 40.0, x.abs() + 1e-3);
        let results = [wide.sin(), wide.cos(), wide.exp(), positive.ln()];
        results.into_iter().for_each(|v| digest.add(v));
        digest.add(positive.powf(wide));
        digest.add((1.0 - f64::from(positive).powf(7.0)) as f32);
    }
    digest.0
}

impl Cpu {
    /// Equal texts, equal bits: version of these kernels, processor family, instruction set, and a digest of results that the
    /// libraries below compute here.
    pub fn path(&self) -> String {
        format!(
            "chela-kernels {} {} {} {} probe {:016x}",
            env!("CARGO_PKG_VERSION"),
            std::env::consts::ARCH,
            std::env::consts::OS,
            simd::isa_name(),
            PROBE.get_or_init(probe)
        )
    }
}
