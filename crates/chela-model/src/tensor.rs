//! A tensor's bytes as they lie in the file, with what is needed to read them.

use std::fmt;
use std::path::PathBuf;

use half::f16;

use crate::error::{ModelError, Result};
use crate::names::TensorName;

/// How numbers are stored. The quantised kinds are GGML's blocks, which run along a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(
    non_camel_case_types,
    reason = "the names everybody knows these formats by"
)]
pub enum DType {
    /// 32-bit floats.
    F32,
    /// IEEE half floats.
    F16,
    /// Upper halves of 32-bit floats.
    BF16,
    /// 32 numbers: f16 scale, 32 signed bytes.
    Q8_0,
    /// 32 numbers: f16 scale, 16 bytes of nibbles (minus 8).
    Q4_0,
    /// 32 numbers: f16 scale, f16 minimum, 16 bytes of nibbles.
    Q4_1,
    /// 256 numbers in 8 groups with 6-bit scales and minima, 4 bits each.
    Q4_K,
    /// 256 numbers in 8 groups with 6-bit scales and minima, 5 bits each.
    Q5_K,
    /// 256 numbers in 16 groups with 8-bit scales, 6 bits each.
    Q6_K,
}

impl DType {
    /// Numbers per block (1 for plain floats).
    pub const fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 => 32,
            Self::Q4_K | Self::Q5_K | Self::Q6_K => 256,
        }
    }

    /// Bytes per block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q8_0 => 34,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q4_K => 144,
            Self::Q5_K => 176,
            Self::Q6_K => 210,
        }
    }

    /// Bytes of a row of so many numbers; `None` when no whole number of blocks fills it.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(self.block_len()) {
            return None;
        }
        (cols / self.block_len()).checked_mul(self.block_bytes())
    }

    /// Is it one of the block formats?
    pub const fn is_quantised(self) -> bool {
        self.block_len() > 1
    }

    /// Where, in a block, the f16 scales are that must be finite.
    const fn scales(self) -> &'static [usize] {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => &[],
            Self::Q8_0 | Self::Q4_0 => &[0],
            Self::Q4_1 | Self::Q4_K | Self::Q5_K => &[0, 2],
            Self::Q6_K => &[208],
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// One tensor, read from its file.
#[derive(Debug, Clone)]
pub struct TensorData {
    /// Which tensor.
    pub name: TensorName,
    /// `[rows, cols]`; a vector is one row.
    pub shape: [usize; 2],
    /// How `bytes` are to be read.
    pub dtype: DType,
    /// Row after row, little-endian: exactly `rows * dtype.row_bytes(cols)` bytes.
    pub bytes: Vec<u8>,
    /// The file it came from, for messages.
    pub file: PathBuf,
}

impl TensorData {
    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.bytes.len() / self.shape[0].max(1)
    }

    /// Index (row-major) of the first number that is NaN or infinite; for block formats the first
    /// number of the first block with such a scale.
    pub fn first_non_finite(&self) -> Option<usize> {
        let all_ones = |bits: u16, exponent: u16| bits & exponent == exponent;
        let half = |pair: &[u8], exponent: u16| matches!(pair, [low, high] if all_ones(u16::from_le_bytes([*low, *high]), exponent));
        match self.dtype {
            DType::F32 => self
                .bytes
                .chunks_exact(4)
                .position(|word| half(&word[2..], 0x7f80)),
            DType::BF16 => self
                .bytes
                .chunks_exact(2)
                .position(|pair| half(pair, 0x7f80)),
            DType::F16 => self
                .bytes
                .chunks_exact(2)
                .position(|pair| half(pair, 0x7c00)),
            dtype => self
                .bytes
                .chunks_exact(dtype.block_bytes())
                .position(|block| {
                    dtype
                        .scales()
                        .iter()
                        .any(|at| half(&block[*at..at + 2], 0x7c00))
                })
                .map(|block| block * dtype.block_len()),
        }
    }

    /// Refuses NaN and infinity, naming file, tensor and place.
    pub fn check_finite(&self) -> Result<()> {
        let Some(at) = self.first_non_finite() else {
            return Ok(());
        };
        let cols = self.shape[1].max(1);
        Err(ModelError::tensor(
            &self.file,
            &self.name.to_string(),
            format!(
                "not a finite number at row {}, column {}",
                at / cols,
                at % cols
            ),
        ))
    }

    /// The numbers as f32, row-major. Reference code for tests and tools; kernels read `bytes`.
    pub fn to_f32(&self) -> Vec<f32> {
        crate::dequant::to_f32(self.dtype, &self.bytes)
    }
}

/// A little-endian f16 at the head of a slice; 0 is never invented, callers pass whole blocks.
pub(crate) fn f16_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(dtype: DType, bytes: Vec<u8>) -> TensorData {
        let cols = bytes.len() / dtype.block_bytes() * dtype.block_len();
        let file = PathBuf::from("x.gguf");
        TensorData {
            name: TensorName::Embed,
            shape: [1, cols],
            dtype,
            bytes,
            file,
        }
    }

    #[test]
    fn finds_nan_and_infinity_in_floats() {
        let bytes = |v: [f32; 3]| v.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>();
        assert_eq!(
            tensor(DType::F32, bytes([1.0, -2.0, f32::MAX])).first_non_finite(),
            None
        );
        assert_eq!(
            tensor(DType::F32, bytes([1.0, f32::NAN, 0.0])).first_non_finite(),
            Some(1)
        );
        let inf = f16::NEG_INFINITY.to_le_bytes();
        assert_eq!(
            tensor(DType::F16, [[0, 0], inf].concat()).first_non_finite(),
            Some(1)
        );
        let nan = half::bf16::NAN.to_le_bytes();
        assert_eq!(
            tensor(DType::BF16, [nan, [0, 0]].concat()).first_non_finite(),
            Some(0)
        );
    }

    #[test]
    fn finds_bad_scales_of_every_block_format() {
        let all = [
            DType::Q8_0,
            DType::Q4_0,
            DType::Q4_1,
            DType::Q4_K,
            DType::Q5_K,
            DType::Q6_K,
        ];
        for dtype in all {
            for at in dtype.scales() {
                // 0xff quants are fine, only scales count.
                let mut bytes = vec![0xff_u8; 3 * dtype.block_bytes()];
                for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
                    for scale in dtype.scales() {
                        block[*scale..scale + 2].copy_from_slice(&f16::ONE.to_le_bytes());
                    }
                }
                assert_eq!(
                    tensor(dtype, bytes.clone()).first_non_finite(),
                    None,
                    "{dtype}"
                );
                let place = 2 * dtype.block_bytes() + at;
                bytes[place..place + 2].copy_from_slice(&f16::NAN.to_le_bytes());
                let bad = tensor(dtype, bytes);
                assert_eq!(
                    bad.first_non_finite(),
                    Some(2 * dtype.block_len()),
                    "{dtype}"
                );
                let message = bad.check_finite().unwrap_err().to_string();
                assert!(
                    message.contains("x.gguf: tensor embed: not a finite"),
                    "{message}"
                );
            }
        }
    }
}
