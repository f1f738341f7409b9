//! A stored matrix, shared and never expanded as a whole.

use core::ops::Range;
use std::sync::Arc;

use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::ops::WeightBytes;
use crate::quant;

struct Inner {
    dtype: DType,
    rows: usize,
    cols: usize,
    row_bytes: usize,
    bytes: WeightBytes,
}

/// A matrix `[rows, cols]` = `[out, in]` in its stored type. A clone shares the bytes.
#[derive(Clone)]
pub struct CpuWeight(Arc<Inner>);

impl core::fmt::Debug for CpuWeight {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(
            f,
            "CpuWeight({} {} x {})",
            self.dtype(),
            self.rows(),
            self.cols()
        )
    }
}

impl CpuWeight {
    pub(crate) fn new(dtype: DType, rows: usize, cols: usize, bytes: WeightBytes) -> Result<Self> {
        let row_bytes = dtype.row_bytes(cols)?;
        let has = (*bytes).as_ref().len();
        let needs = row_bytes.saturating_mul(rows);
        if has != needs {
            return Err(KernelError::WeightBytes {
                dtype: dtype.name(),
                rows,
                cols,
                needs,
                has,
            });
        }
        Ok(Self(Arc::new(Inner {
            dtype,
            rows,
            cols,
            row_bytes,
            bytes: aligned(dtype, bytes),
        })))
    }

    /// Some rows as a weight of their own over the same bytes.
    pub(crate) fn slice(&self, rows: Range<usize>) -> Result<Self> {
        if rows.start > rows.end || rows.end > self.rows() {
            return Err(KernelError::Index {
                op: "weight_rows",
                what: "row",
                index: rows.end,
                limit: self.rows() + 1,
            });
        }
        let inner = &self.0;
        let part = Part {
            bytes: inner.bytes.clone(),
            range: rows.start * inner.row_bytes..rows.end * inner.row_bytes,
        };
        Self::new(inner.dtype, rows.len(), inner.cols, Arc::new(part))
    }

    pub(crate) fn dtype(&self) -> DType {
        self.0.dtype
    }

    pub(crate) fn rows(&self) -> usize {
        self.0.rows
    }

    pub(crate) fn cols(&self) -> usize {
        self.0.cols
    }

    #[cfg(target_arch = "x86_64")]
    pub(crate) fn row_bytes(&self) -> usize {
        self.0.row_bytes
    }

    pub(crate) fn row(&self, row: usize) -> &[u8] {
        &(*self.0.bytes).as_ref()[row * self.0.row_bytes..][..self.0.row_bytes]
    }

    /// The bytes of a run of rows.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn row_span(&self, rows: Range<usize>) -> &[u8] {
        &(*self.0.bytes).as_ref()[rows.start * self.0.row_bytes..rows.end * self.0.row_bytes]
    }

    /// The whole matrix when it is stored as f32.
    pub(crate) fn as_f32(&self) -> Option<&[f32]> {
        if self.0.dtype != DType::F32 {
            return None;
        }
        bytemuck::try_cast_slice((*self.0.bytes).as_ref()).ok()
    }

    /// Unpacks `rows` x `cols` into dense rows of `out`; `cols` starts at a multiple of 32, and ends
    /// at one unless it ends the row.
    pub(crate) fn unpack(&self, rows: Range<usize>, cols: Range<usize>, out: &mut [f32]) {
        for (row, out) in rows.zip(out.chunks_exact_mut(cols.len().max(1))) {
            super::few::unpack(self.dtype(), self.row(row), cols.start, out);
        }
    }
}

/// f32 rows are read as they lie, which needs their alignment: others are copied once.
fn aligned(dtype: DType, bytes: WeightBytes) -> WeightBytes {
    let raw = (*bytes).as_ref();
    if dtype != DType::F32 || bytemuck::try_cast_slice::<u8, f32>(raw).is_ok() {
        return bytes;
    }
    let mut copy = vec![0.0_f32; raw.len() / 4];
    quant::unpack(DType::F32, raw, 0, &mut copy);
    Arc::new(Floats(copy))
}

/// A run of a weight's bytes.
struct Part {
    bytes: WeightBytes,
    range: Range<usize>,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &(*self.bytes).as_ref()[self.range.clone()]
    }
}

/// f32 storage seen as bytes (in the machine's order, which is the one it is read in).
pub(crate) struct Floats(pub(crate) Vec<f32>);

impl AsRef<[u8]> for Floats {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}
