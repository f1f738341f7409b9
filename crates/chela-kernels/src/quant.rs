//! Unpacking of stored rows into f32, one block of 32 numbers at a time: the portable path.
//!
//! A block-quantised row is a sequence of blocks of 32 (or super-blocks of 256, eight of 32), so any
//! range of columns that starts at a multiple of 32 can be unpacked on its own.

use half::{bf16, f16};

use crate::dtype::DType;

/// Columns that unpack together.
pub(crate) const GROUP: usize = 32;

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Unpacks columns `from..from + out.len()` of a row; `from` is a multiple of 32, and for
/// block-quantised types `out.len()` is too.
pub(crate) fn unpack(dtype: DType, row: &[u8], from: usize, out: &mut [f32]) {
    match dtype {
        DType::F32 => {
            for (o, b) in out.iter_mut().zip(row[from * 4..].chunks_exact(4)) {
                *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        DType::F16 => {
            for (o, b) in out.iter_mut().zip(row[from * 2..].chunks_exact(2)) {
                *o = f16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        DType::BF16 => {
            for (o, b) in out.iter_mut().zip(row[from * 2..].chunks_exact(2)) {
                *o = bf16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        _ => {
            for (i, out) in out.chunks_exact_mut(GROUP).enumerate() {
                let group = from / GROUP + i;
                let per_block = dtype.block() / GROUP;
                let block = &row[group / per_block * dtype.block_bytes()..][..dtype.block_bytes()];
                unpack_group(dtype, block, group % per_block, out);
            }
        }
    }
}

fn unpack_group(dtype: DType, block: &[u8], sub: usize, out: &mut [f32]) {
    match dtype {
        DType::Q8_0 => q8_0(block, out),
        DType::Q4_0 => q4_0(block, out),
        DType::Q4_1 => q4_1(block, out),
        DType::Q4_K => q4_k(block, sub, out),
        DType::Q5_K => q5_k(block, sub, out),
        DType::Q6_K => q6_k(block, sub, out),
        // Not block-quantised: `unpack` handles them itself.
        DType::F32 | DType::F16 | DType::BF16 => {}
    }
}

fn q8_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (o, &q) in out.iter_mut().zip(&block[2..34]) {
        *o = d * f32::from(q as i8);
    }
}

fn q4_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    let (low, high) = out.split_at_mut(16);
    for ((l, h), &q) in low.iter_mut().zip(high).zip(&block[2..18]) {
        *l = d * (f32::from(q & 15) - 8.0);
        *h = d * (f32::from(q >> 4) - 8.0);
    }
}

fn q4_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    let (low, high) = out.split_at_mut(16);
    for ((l, h), &q) in low.iter_mut().zip(high).zip(&block[4..20]) {
        *l = d * f32::from(q & 15) + m;
        *h = d * f32::from(q >> 4) + m;
    }
}

/// Scale and minimum of sub-block `j`, 6 bits each, packed in 12 bytes.
pub(crate) fn scale_min(scales: &[u8], j: usize) -> (f32, f32) {
    let (s, m) = if j < 4 {
        (scales[j] & 63, scales[j + 4] & 63)
    } else {
        (
            (scales[j + 4] & 15) | ((scales[j - 4] >> 6) << 4),
            (scales[j + 4] >> 4) | ((scales[j] >> 6) << 4),
        )
    };
    (f32::from(s), f32::from(m))
}

fn q4_k(block: &[u8], sub: usize, out: &mut [f32]) {
    let (s, m) = scale_min(&block[4..16], sub);
    let (d, m) = (half_at(block, 0) * s, half_at(block, 2) * m);
    let shift = 4 * (sub % 2);
    for (o, &q) in out.iter_mut().zip(&block[16 + sub / 2 * 32..][..32]) {
        *o = d * f32::from((q >> shift) & 15) - m;
    }
}

fn q5_k(block: &[u8], sub: usize, out: &mut [f32]) {
    let (s, m) = scale_min(&block[4..16], sub);
    let (d, m) = (half_at(block, 0) * s, half_at(block, 2) * m);
    let shift = 4 * (sub % 2);
    let high = &block[16..48];
    for ((o, &q), &h) in out
        .iter_mut()
        .zip(&block[48 + sub / 2 * 32..][..32])
        .zip(high)
    {
        *o = d * f32::from(((q >> shift) & 15) | (((h >> sub) & 1) << 4)) - m;
    }
}

fn q6_k(block: &[u8], sub: usize, out: &mut [f32]) {
    let d = half_at(block, 208);
    // Sub-block 4 * h + c holds columns 128 h + 32 c: nibble c / 2 of bytes 64 h + 32 (c % 2).
    let (half, c) = (sub / 4, sub % 4);
    let low = &block[64 * half + 32 * (c % 2)..][..32];
    let high = &block[128 + 32 * half..][..32];
    let scales = &block[192 + 2 * sub..][..2];
    for (i, ((o, &l), &h)) in out.iter_mut().zip(low).zip(high).enumerate() {
        let q = ((l >> (4 * (c / 2))) & 15) | (((h >> (2 * c)) & 3) << 4);
        *o = d * f32::from(scales[i / 16] as i8) * (f32::from(q) - 32.0);
    }
}
