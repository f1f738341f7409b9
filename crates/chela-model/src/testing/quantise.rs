//! Plain rounding of f32 to the simple storage formats, for test models.

use std::path::Path;

use half::{bf16, f16};

use crate::error::{ModelError, Result};
use crate::tensor::DType;

/// The bytes of `values` in `dtype`: F32, F16, BF16, Q8_0, Q4_0 or Q4_1.
pub fn quantise(dtype: DType, values: &[f32]) -> Result<Vec<u8>> {
    let refuse = |reason: &str| {
        Err(ModelError::format(
            Path::new("test model"),
            format!("{dtype}: {reason}"),
        ))
    };
    if !values.len().is_multiple_of(dtype.block_len()) {
        return refuse("not a whole number of blocks");
    }
    let mut out = Vec::with_capacity(values.len() / dtype.block_len() * dtype.block_bytes());
    for block in values.chunks_exact(dtype.block_len()) {
        match dtype {
            DType::F32 => out.extend(block[0].to_le_bytes()),
            DType::F16 => out.extend(f16::from_f32(block[0]).to_le_bytes()),
            DType::BF16 => out.extend(bf16::from_f32(block[0]).to_le_bytes()),
            DType::Q8_0 => {
                let d = scale(largest(block).abs() / 127.0, &mut out);
                out.extend(block.iter().map(|x| (x * inverse(d)).round() as i8 as u8));
            }
            DType::Q4_0 => {
                let d = scale(largest(block) / -8.0, &mut out);
                nibbles(block, &mut out, |x| x * inverse(d) + 8.0);
            }
            DType::Q4_1 => {
                let low = block.iter().copied().fold(f32::INFINITY, f32::min);
                let high = block.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let d = scale((high - low) / 15.0, &mut out);
                let m = scale(low, &mut out);
                nibbles(block, &mut out, |x| (x - m) * inverse(d));
            }
            DType::Q4_K | DType::Q5_K | DType::Q6_K => return refuse("no writer for this format"),
        }
    }
    Ok(out)
}

/// The number of greatest size, with its sign.
fn largest(block: &[f32]) -> f32 {
    block.iter().copied().fold(
        0.0,
        |best: f32, x| if x.abs() > best.abs() { x } else { best },
    )
}

/// Writes a scale and gives it back as it will be read.
fn scale(value: f32, out: &mut Vec<u8>) -> f32 {
    let stored = f16::from_f32(value);
    out.extend(stored.to_le_bytes());
    stored.to_f32()
}

fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

fn nibbles(block: &[f32], out: &mut Vec<u8>, level: impl Fn(f32) -> f32) {
    let nibble = |x: f32| level(x).round().clamp(0.0, 15.0) as u8;
    let (low, high) = block.split_at(block.len() / 2);
    out.extend(
        low.iter()
            .zip(high)
            .map(|(l, h)| nibble(*l) | (nibble(*h) << 4)),
    );
}
