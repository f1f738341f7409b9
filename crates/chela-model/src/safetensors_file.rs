//! Reads the header of a safetensors file: where each tensor lies.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use crate::error::{ModelError, Result};
use crate::tensor::DType;

/// Where a tensor lies in its file.
#[derive(Debug, Clone)]
pub(crate) struct SafeTensor {
    /// `[rows, cols]`; `None` for more than two dimensions.
    pub shape: Option<[usize; 2]>,
    /// Its storage, or the name of one that is not supported.
    pub dtype: Result<DType, String>,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// The format's own bound on headers.
const LONGEST_HEADER: u64 = 100_000_000;

/// Tensors of the file at `path`, by name.
pub(crate) fn read_header(path: &Path) -> Result<BTreeMap<String, SafeTensor>> {
    let io = |e| ModelError::io(path, e);
    let mut file = std::fs::File::open(path).map_err(io)?;
    let len = file.metadata().map_err(io)?.len();
    if len < 8 {
        return Err(ModelError::format(
            path,
            "truncated: shorter than a safetensors header",
        ));
    }
    let mut word = [0; 8];
    file.read_exact(&mut word).map_err(io)?;
    let header = u64::from_le_bytes(word);
    if header > LONGEST_HEADER || header > len - 8 {
        let reason =
            format!("not a safetensors file: a header of {header} bytes in a file of {len}");
        return Err(ModelError::format(path, reason));
    }
    let mut bytes = vec![0; header as usize];
    file.read_exact(&mut bytes).map_err(io)?;
    let entries: BTreeMap<String, serde_json::Value> = serde_json::from_slice(&bytes)
        .map_err(|e| ModelError::format(path, format!("broken safetensors header: {e}")))?;
    let mut tensors = BTreeMap::new();
    for (name, value) in entries {
        if name == "__metadata__" {
            continue;
        }
        let entry = serde_json::from_value(value)
            .map_err(|e| ModelError::tensor(path, &name, format!("broken header entry: {e}")))?;
        let tensor = locate(&entry, (8 + header, len))
            .map_err(|reason| ModelError::tensor(path, &name, reason))?;
        tensors.insert(name, tensor);
    }
    Ok(tensors)
}

/// A tensor as the header describes it.
#[derive(serde::Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Checks an entry against the file, whose data spans `start..len`.
fn locate(entry: &Entry, (start, len): (u64, u64)) -> Result<SafeTensor, String> {
    let (from, to) = entry.data_offsets;
    let end = start.checked_add(to).filter(|_| from <= to);
    let Some(end) = end else {
        return Err(format!("impossible offsets {from} to {to}"));
    };
    if end > len {
        return Err(format!(
            "the file is truncated: it ends at byte {len}, this tensor at {end}; download it again"
        ));
    }
    let dtype = match entry.dtype.as_str() {
        "F32" => Ok(DType::F32),
        "F16" => Ok(DType::F16),
        "BF16" => Ok(DType::BF16),
        other => Err(other.to_owned()),
    };
    if let Ok(dtype) = dtype {
        let width = dtype.block_bytes() as u64;
        let bytes = entry
            .shape
            .iter()
            .try_fold(width, |bytes, size| bytes.checked_mul(*size));
        if bytes != Some(to - from) {
            return Err(format!(
                "{} bytes for the shape {:?}",
                to - from,
                entry.shape
            ));
        }
    }
    let shape = match entry.shape.as_slice() {
        [cols] => Some([1, *cols as usize]),
        [rows, cols] => Some([*rows as usize, *cols as usize]),
        _ => None,
    };
    Ok(SafeTensor {
        shape,
        dtype,
        offset: start + from,
        bytes: to - from,
    })
}
