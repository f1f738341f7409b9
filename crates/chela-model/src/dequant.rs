//! Plain expansion of every storage format to f32: the reference the kernels are tested against.
//! Block layouts are GGML's (ggml-quants of llama.cpp), written from their description.

use half::{bf16, f16};

use crate::tensor::{DType, f16_at};

/// All numbers of `bytes`, a whole number of blocks of `dtype`.
pub(crate) fn to_f32(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let count = bytes.len() / dtype.block_bytes() * dtype.block_len();
    let mut out = Vec::with_capacity(count);
    for block in bytes.chunks_exact(dtype.block_bytes()) {
        match dtype {
            DType::F32 => out.push(f32::from_le_bytes([block[0], block[1], block[2], block[3]])),
            DType::F16 => out.push(f16::from_le_bytes([block[0], block[1]]).to_f32()),
            DType::BF16 => out.push(bf16::from_le_bytes([block[0], block[1]]).to_f32()),
            DType::Q8_0 => {
                let d = f16_at(block, 0);
                out.extend(block[2..].iter().map(|q| d * f32::from(*q as i8)));
            }
            DType::Q4_0 => {
                let d = f16_at(block, 0);
                nibbles(&block[2..], &mut out, |q| d * (f32::from(q) - 8.0));
            }
            DType::Q4_1 => {
                let (d, m) = (f16_at(block, 0), f16_at(block, 2));
                nibbles(&block[4..], &mut out, |q| d * f32::from(q) + m);
            }
            DType::Q4_K => q4_k(block, &mut out),
            DType::Q5_K => q5_k(block, &mut out),
            DType::Q6_K => q6_k(block, &mut out),
        }
    }
    out
}

/// Low nibbles of all bytes, then the high ones.
fn nibbles(bytes: &[u8], out: &mut Vec<f32>, value: impl Fn(u8) -> f32) {
    out.extend(bytes.iter().map(|b| value(b & 0x0f)));
    out.extend(bytes.iter().map(|b| value(b >> 4)));
}

/// 6-bit scale and minimum of group `j` of 8, packed in 12 bytes: the first four of each in the
/// low six bits of bytes 0-7, the others' low nibbles in bytes 8-11 and their top two bits above
/// the first ones.
fn scale_and_minimum(packed: &[u8], j: usize) -> (f32, f32) {
    let (scale, minimum) = if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        (
            (packed[j + 4] & 0x0f) | ((packed[j - 4] >> 6) << 4),
            (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4),
        )
    };
    (f32::from(scale), f32::from(minimum))
}

fn q4_k(block: &[u8], out: &mut Vec<f32>) {
    let (d, dmin, scales) = (f16_at(block, 0), f16_at(block, 2), &block[4..16]);
    for (pair, quants) in block[16..].chunks_exact(32).enumerate() {
        for (half, shift) in [(0, 0), (1, 4)] {
            let (scale, minimum) = scale_and_minimum(scales, 2 * pair + half);
            let (scale, minimum) = (d * scale, dmin * minimum);
            out.extend(
                quants
                    .iter()
                    .map(|b| scale * f32::from((b >> shift) & 0x0f) - minimum),
            );
        }
    }
}

fn q5_k(block: &[u8], out: &mut Vec<f32>) {
    let (d, dmin, scales) = (f16_at(block, 0), f16_at(block, 2), &block[4..16]);
    let high = &block[16..48];
    for (pair, quants) in block[48..].chunks_exact(32).enumerate() {
        for (half, shift) in [(0, 0), (1, 4)] {
            let group = 2 * pair + half;
            let (scale, minimum) = scale_and_minimum(scales, group);
            let (scale, minimum) = (d * scale, dmin * minimum);
            out.extend(quants.iter().zip(high).map(|(b, h)| {
                let q = ((b >> shift) & 0x0f) | (((h >> group) & 1) << 4);
                scale * f32::from(q) - minimum
            }));
        }
    }
}

fn q6_k(block: &[u8], out: &mut Vec<f32>) {
    let d = f16_at(block, 208);
    for half in 0..2 {
        let low = &block[64 * half..64 * half + 64];
        let high = &block[128 + 32 * half..128 + 32 * half + 32];
        let scales = &block[192 + 8 * half..192 + 8 * half + 8];
        for quarter in 0..4 {
            for l in 0..32 {
                let byte = low[l + 32 * (quarter % 2)];
                let nibble = if quarter < 2 { byte & 0x0f } else { byte >> 4 };
                let q = nibble | (((high[l] >> (2 * quarter)) & 3) << 4);
                let scale = f32::from(scales[2 * quarter + l / 16] as i8);
                out.push(d * scale * (f32::from(q) - 32.0));
            }
        }
    }
}

/// Q5_0 blocks (f16 scale, 32 high bits, 16 bytes of nibbles; value = d * (q - 16)) as Q8_0 with
/// the same scale: exactly the same numbers, in a format the kernels have.
pub(crate) fn q5_0_to_q8_0(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len() / Q5_0_BYTES * DType::Q8_0.block_bytes());
    for block in bytes.chunks_exact(Q5_0_BYTES) {
        out.extend_from_slice(&block[..2]);
        let high = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
        let quants = &block[6..];
        for i in 0..32 {
            let byte = quants[i % 16];
            let nibble = if i < 16 { byte & 0x0f } else { byte >> 4 };
            let q = nibble | ((((high >> i) & 1) as u8) << 4);
            out.push(q.wrapping_sub(16));
        }
    }
    out
}

/// Bytes of a Q5_0 block of 32.
pub(crate) const Q5_0_BYTES: usize = 22;

#[cfg(test)]
mod tests {
    use super::*;

    fn half(x: f32) -> [u8; 2] {
        f16::from_f32(x).to_le_bytes()
    }

    #[test]
    fn plain_floats() {
        assert_eq!(to_f32(DType::F32, &1.5_f32.to_le_bytes()), [1.5]);
        assert_eq!(to_f32(DType::F16, &half(-0.25)), [-0.25]);
        assert_eq!(to_f32(DType::BF16, &[0x40, 0xc0]), [-3.0]);
    }

    #[test]
    fn q8_0_is_scale_times_signed_byte() {
        let mut block = half(0.5).to_vec();
        block.extend((0..32).map(|i| (i as i8 - 16) as u8));
        let out = to_f32(DType::Q8_0, &block);
        assert_eq!((out[0], out[16], out[31]), (-8.0, 0.0, 7.5));
    }

    #[test]
    fn q4_0_and_q4_1_put_low_nibbles_first() {
        let quants: Vec<u8> = (0..16).map(|i| i | ((15 - i) << 4)).collect();
        let out = to_f32(DType::Q4_0, &[&half(2.0)[..], &quants].concat());
        assert_eq!(
            (out[0], out[15], out[16], out[31]),
            (-16.0, 14.0, 14.0, -16.0)
        );
        let out = to_f32(
            DType::Q4_1,
            &[&half(2.0)[..], &half(-3.0), &quants].concat(),
        );
        assert_eq!(
            (out[0], out[15], out[16], out[31]),
            (-3.0, 27.0, 27.0, -3.0)
        );
    }

    #[test]
    fn q5_0_becomes_q8_0_with_the_same_numbers() {
        // High bits of numbers 0 and 31 only.
        let high = (1_u32 | (1 << 31)).to_le_bytes();
        let mut quants = [0_u8; 16];
        quants[0] = 0x0f;
        quants[15] = 0x30;
        let block = [&half(0.5)[..], &high, &quants].concat();
        let out = to_f32(DType::Q8_0, &q5_0_to_q8_0(&block));
        assert_eq!(out.len(), 32);
        // 31 - 16, 0 - 16, 19 - 16, each halved.
        assert_eq!((out[0], out[1], out[16], out[31]), (7.5, -8.0, -8.0, 1.5));
    }

    /// Scales 1..=8 and minima 9..=16 for eight groups, those above 4 with bits beyond the low
    /// nibble: group 7 has scale 40 and minimum 48.
    fn packed_scales() -> ([u8; 12], [(f32, f32); 8]) {
        let scale = [1_u8, 2, 3, 4, 5, 6, 7, 40];
        let minimum = [9_u8, 10, 11, 12, 13, 14, 15, 48];
        let mut packed = [0_u8; 12];
        for j in 0..4 {
            packed[j] = scale[j] | ((scale[j + 4] >> 4) << 6);
            packed[j + 4] = minimum[j] | ((minimum[j + 4] >> 4) << 6);
            packed[j + 8] = (scale[j + 4] & 15) | ((minimum[j + 4] & 15) << 4);
        }
        (
            packed,
            std::array::from_fn(|j| (f32::from(scale[j]), f32::from(minimum[j]))),
        )
    }

    #[test]
    fn q4_k_has_a_scale_and_a_minimum_for_each_32() {
        let (packed, groups) = packed_scales();
        let block = [&half(0.5)[..], &half(0.25), &packed, &[0xa3_u8; 128]].concat();
        let out = to_f32(DType::Q4_K, &block);
        for (j, (scale, minimum)) in groups.into_iter().enumerate() {
            let q = if j % 2 == 0 { 3.0 } else { 10.0 };
            let expected = 0.5 * scale * q - 0.25 * minimum;
            assert!(
                out[32 * j..32 * j + 32].iter().all(|x| *x == expected),
                "group {j}"
            );
        }
    }

    #[test]
    fn q5_k_takes_the_fifth_bit_of_group_j_from_bit_j() {
        let (packed, groups) = packed_scales();
        // Bit j of every high byte is set for odd groups.
        let block = [
            &half(0.5)[..],
            &half(0.25),
            &packed,
            &[0b1010_1010; 32],
            &[0xa3; 128],
        ]
        .concat();
        let out = to_f32(DType::Q5_K, &block);
        for (j, (scale, minimum)) in groups.into_iter().enumerate() {
            let q = if j % 2 == 0 { 3.0 } else { 26.0 };
            let expected = 0.5 * scale * q - 0.25 * minimum;
            assert!(
                out[32 * j..32 * j + 32].iter().all(|x| *x == expected),
                "group {j}"
            );
        }
    }

    #[test]
    fn q6_k_takes_two_bits_from_the_high_half() {
        let scales: Vec<u8> = (1..=16_i8)
            .map(|s| if s % 3 == 0 { -s as u8 } else { s as u8 })
            .collect();
        let block = [&[0xa3_u8; 128][..], &[0b1110_0100; 64], &scales, &half(0.5)].concat();
        let out = to_f32(DType::Q6_K, &block);
        // Quarters of a half: high bits 0, 1, 2, 3 over nibbles 3, 3, 10, 10.
        let q = [3.0, 19.0, 42.0, 58.0];
        for (i, x) in out.iter().enumerate() {
            let scale = f32::from(scales[i / 16] as i8);
            assert_eq!(*x, 0.5 * scale * (q[i % 128 / 32] - 32.0), "number {i}");
        }
    }
}
