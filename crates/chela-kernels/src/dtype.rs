//! The stored types of weights, and how many bytes they take.

use crate::error::{KernelError, Result};

/// How the numbers of a [`crate::Kernels::Weight`] are stored (GGUF block layouts, little-endian).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
    /// 32 numbers: an f16 scale, 32 signed bytes.
    Q8_0,
    /// 32 numbers: an f16 scale, 16 bytes of nibbles; `d * (q - 8)`.
    Q4_0,
    /// 32 numbers: f16 scale and minimum, 16 bytes of nibbles; `d * q + m`.
    Q4_1,
    /// 256 numbers in 8 sub-blocks with 6-bit scales and minima, 4 bits each.
    Q4_K,
    /// 256 numbers in 8 sub-blocks with 6-bit scales and minima, 5 bits each.
    Q5_K,
    /// 256 numbers in 16 sub-blocks with 8-bit scales, 6 bits each.
    Q6_K,
}

impl DType {
    /// All of them.
    pub const ALL: [DType; 9] = [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::Q8_0,
        DType::Q4_0,
        DType::Q4_1,
        DType::Q4_K,
        DType::Q5_K,
        DType::Q6_K,
    ];

    /// The name GGUF uses.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "F32",
            DType::F16 => "F16",
            DType::BF16 => "BF16",
            DType::Q8_0 => "Q8_0",
            DType::Q4_0 => "Q4_0",
            DType::Q4_1 => "Q4_1",
            DType::Q4_K => "Q4_K",
            DType::Q5_K => "Q5_K",
            DType::Q6_K => "Q6_K",
        }
    }

    /// Numbers in one block.
    pub fn block(self) -> usize {
        match self {
            DType::F32 | DType::F16 | DType::BF16 => 1,
            DType::Q8_0 | DType::Q4_0 | DType::Q4_1 => 32,
            DType::Q4_K | DType::Q5_K | DType::Q6_K => 256,
        }
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::Q8_0 => 34,
            DType::Q4_0 => 18,
            DType::Q4_1 => 20,
            DType::Q4_K => 144,
            DType::Q5_K => 176,
            DType::Q6_K => 210,
        }
    }

    /// Bytes of one row of `cols` numbers.
    pub fn row_bytes(self, cols: usize) -> Result<usize> {
        if !cols.is_multiple_of(self.block()) {
            return Err(KernelError::WeightBlock {
                dtype: self.name(),
                block: self.block(),
                cols,
            });
        }
        Ok(cols / self.block() * self.block_bytes())
    }
}

impl core::fmt::Display for DType {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.name())
    }
}
