//! Rounds f32 to the storage formats that models are written in.

use half::{bf16, f16};

use crate::tensor::DType;

/// The bytes of rows of `cols` numbers in `dtype`: F32, F16, BF16 or Q8_0. A number that the format
/// cannot hold is an error, with its place.
pub(crate) fn encode(dtype: DType, cols: usize, values: &[f32]) -> Result<Vec<u8>, String> {
    let cols = cols.max(1);
    let too_large = |at: usize| {
        format!(
            "{} at row {}, column {} does not fit {dtype}; write BF16 or F32",
            values[at],
            at / cols,
            at % cols
        )
    };
    if let Some(at) = values.iter().position(|x| !x.is_finite()) {
        return Err(format!(
            "{} at row {}, column {} is not a finite number",
            values[at],
            at / cols,
            at % cols
        ));
    }
    if dtype.row_bytes(cols).is_none() {
        return Err(format!("rows of {cols} are not whole blocks of {dtype}"));
    }
    match dtype {
        DType::F32 => Ok(values.iter().flat_map(|x| x.to_le_bytes()).collect()),
        DType::F16 => {
            let rounded: Vec<f16> = values.iter().map(|x| f16::from_f32(*x)).collect();
            match rounded.iter().position(|x| x.is_infinite()) {
                Some(at) => Err(too_large(at)),
                None => Ok(rounded.iter().flat_map(|x| x.to_le_bytes()).collect()),
            }
        }
        DType::BF16 => {
            let rounded: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
            match rounded.iter().position(|x| x.is_infinite()) {
                Some(at) => Err(too_large(at)),
                None => Ok(rounded.iter().flat_map(|x| x.to_le_bytes()).collect()),
            }
        }
        DType::Q8_0 => q8_0(values).map_err(|block| too_large(block * DType::Q8_0.block_len())),
        other => Err(format!("models are not written in {other}")),
    }
}

/// GGML's own rounding (`quantize_row_q8_0_ref`): the scale is the largest size / 127, its inverse
/// is taken before it is rounded to f16, halves round away from zero.
fn q8_0(values: &[f32]) -> Result<Vec<u8>, usize> {
    let len = DType::Q8_0.block_len();
    let mut out = Vec::with_capacity(values.len() / len * DType::Q8_0.block_bytes());
    for (index, block) in values.chunks_exact(len).enumerate() {
        let most = block.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        let scale = most / 127.0;
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        let stored = f16::from_f32(scale);
        if stored.is_infinite() {
            return Err(index);
        }
        out.extend(stored.to_le_bytes());
        out.extend(block.iter().map(|x| (x * inverse).round() as i8 as u8));
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dequant::to_f32;

    #[test]
    fn plain_floats_come_back() {
        let values = [1.5, -0.25, 0.0, 3.0];
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            assert_eq!(to_f32(dtype, &encode(dtype, 2, &values).unwrap()), values);
        }
    }

    #[test]
    fn blocks_are_within_half_a_step() {
        let values: Vec<f32> = (0..64)
            .map(|i| ((i * 37 % 61) as f32 - 30.0) / 17.0)
            .collect();
        let back = to_f32(DType::Q8_0, &encode(DType::Q8_0, 64, &values).unwrap());
        for (block, back) in values.chunks(32).zip(back.chunks(32)) {
            let most = block.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
            for (x, y) in block.iter().zip(back) {
                // Half a step, and what rounding the scale to 11 bits adds.
                assert!(
                    (x - y).abs() <= most / 127.0 * 0.5 + most / 2048.0,
                    "{x} {y}"
                );
            }
        }
        assert_eq!(encode(DType::Q8_0, 32, &[0.0; 32]).unwrap(), [0; 34]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let message = |dtype, values: &[f32]| encode(dtype, 2, values).unwrap_err();
        let text = message(DType::F16, &[0.0, 1.0, 2.0, 70_000.0]);
        assert!(
            text.contains("70000 at row 1, column 1 does not fit F16"),
            "{text}"
        );
        assert!(encode(DType::BF16, 2, &[70_000.0, 0.0]).is_ok());
        assert!(message(DType::BF16, &[f32::MAX, 0.0]).contains("does not fit BF16"));
        assert!(message(DType::F32, &[f32::NAN, 0.0]).contains("NaN at row 0"));
        assert!(message(DType::Q8_0, &[0.0; 4]).contains("not whole blocks"));
        assert!(message(DType::Q4_K, &[]).contains("whole blocks"));
    }
}
