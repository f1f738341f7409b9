//! The operations on numbers, and their CPU implementation; all unsafe code of the project.
//!
//! [`Kernels`] is the contract: model code written against it names no CPU, slice or thread.
//! [`Cpu`] implements it over one [`Pool`] of workers which serving and training share.

#[cfg(feature = "allocator")]
pub mod allocator;
pub mod cpu;
mod dtype;
mod error;
mod ops;
mod pool;
mod quant;
mod rates;
#[cfg(test)]
mod reference;
mod sample;
mod segments;
#[cfg(test)]
mod tests;

pub use cpu::{Cpu, CpuBuf, CpuWeight};
pub use dtype::DType;
pub use error::{KernelError, Result};
pub use ops::{
    Acc, Activation, AdamW, AttentionSaved, GluGrad, HeadGrad, Heads, Kernels, KvPiece, Linear,
    Mat, MatMut, Norm, NormGrad, PairGrads, PairScores, Pairs, Product, Qkv, QkvGrad, Rope,
    RopeDirection, Routes, Routing, RowsMode, TopK, Want, WeightBytes,
};
pub use pool::{Pool, Priority, ServeLease};
pub use rates::{measured_memory_gbs, measured_sgemm_gflops};
pub use sample::{SamplePolicy, Sampled, sample_row, token_logprob};
pub use segments::{Segment, check_segments};
