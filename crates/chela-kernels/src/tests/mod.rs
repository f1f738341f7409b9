//! Every operation against the plain loops, and every gradient against finite differences.

mod attention;
mod elementwise;
mod head;
mod linear;
mod pool;
mod routing;
mod rows;
mod sample;
mod simd;

use std::sync::Arc;

use half::f16;

use crate::cpu::{Cpu, CpuBuf, CpuWeight};
use crate::dtype::DType;
use crate::ops::Kernels;
use crate::reference as plain;

/// How many; fewer under Miri, which runs a few million steps a second.
pub(crate) const fn many(usual: usize, under_miri: usize) -> usize {
    if cfg!(miri) { under_miri } else { usual }
}

/// A small deterministic generator (SplitMix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In [0, 1).
    pub(crate) fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Roughly normal.
    pub(crate) fn normal(&mut self) -> f32 {
        ((0..6).map(|_| self.unit()).sum::<f64>() - 3.0) as f32 * 1.414
    }

    pub(crate) fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }

    pub(crate) fn buf(&mut self, n: usize) -> CpuBuf {
        CpuBuf(self.floats(n))
    }

    /// Random bytes of a matrix with sane scales.
    pub(crate) fn weight_bytes(&mut self, dtype: DType, rows: usize, cols: usize) -> Vec<u8> {
        let mut out = Vec::new();
        for _ in 0..rows * cols / dtype.block() {
            let mut b: Vec<u8> = (0..dtype.block_bytes())
                .map(|_| self.bits() as u8)
                .collect();
            let mut half = |at: usize, scale: f32| {
                let x = f16::from_f32(self.normal() * scale).to_le_bytes();
                b[at..at + 2].copy_from_slice(&x);
            };
            match dtype {
                DType::F32 => b = self.normal().to_le_bytes().to_vec(),
                DType::F16 => half(0, 1.0),
                DType::BF16 => b = half::bf16::from_f32(self.normal()).to_le_bytes().to_vec(),
                DType::Q8_0 => half(0, 0.02),
                DType::Q4_0 => half(0, 0.2),
                DType::Q4_1 => (half(0, 0.2), half(2, 1.0)).0,
                DType::Q4_K | DType::Q5_K => (half(0, 0.005), half(2, 0.02)).0,
                DType::Q6_K => half(208, 0.001),
            }
            out.extend(b);
        }
        out
    }

    /// A weight and its numbers.
    pub(crate) fn weight(
        &mut self,
        cpu: &Cpu,
        dtype: DType,
        rows: usize,
        cols: usize,
    ) -> (CpuWeight, Vec<f64>) {
        let bytes = self.weight_bytes(dtype, rows, cols);
        let row_bytes = dtype.row_bytes(cols).unwrap();
        let numbers = bytes
            .chunks(row_bytes)
            .flat_map(|r| plain::unpack_row(dtype, r, cols))
            .collect();
        (
            cpu.weight(dtype, rows, cols, Arc::new(bytes)).unwrap(),
            numbers,
        )
    }
}

/// All numbers agree within `tolerance` of the largest expected one.
#[track_caller]
pub(crate) fn close(got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    let scale = expected.iter().fold(1e-3_f64, |m, e| m.max(e.abs()));
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        let wrong = (f64::from(*g) - e).abs();
        assert!(
            wrong <= tolerance * scale,
            "number {i}: {g} instead of {e} (scale {scale})"
        );
    }
}
