//! Reads the header of a safetensors file: where each tensor lies.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::path::Path;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::error::{ModelError, Result};
use crate::overlap::refuse_overlaps;
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
    let file = std::fs::File::open(path).map_err(io)?;
    let len = file.metadata().map_err(io)?.len();
    parse(file, len, path)
}

/// Parses a header from `reader`, a file of `len` bytes. Its JSON is read an entry at a time: it takes
/// a few times its own size, whatever it holds.
pub(crate) fn parse(
    mut reader: impl Read,
    len: u64,
    path: &Path,
) -> Result<BTreeMap<String, SafeTensor>> {
    let io = |e| ModelError::io(path, e);
    if len < 8 {
        return Err(ModelError::format(
            path,
            "truncated: shorter than a safetensors header",
        ));
    }
    let mut word = [0; 8];
    reader.read_exact(&mut word).map_err(io)?;
    let header = u64::from_le_bytes(word);
    if header > LONGEST_HEADER || header > len - 8 {
        let reason =
            format!("not a safetensors file: a header of {header} bytes in a file of {len}");
        return Err(ModelError::format(path, reason));
    }
    let mut bytes = vec![0; header as usize];
    reader.read_exact(&mut bytes).map_err(io)?;
    let Entries(entries) = serde_json::from_slice(&bytes)
        .map_err(|e| ModelError::format(path, format!("broken safetensors header: {e}")))?;
    let mut tensors = BTreeMap::new();
    for (name, text) in entries {
        if name == "__metadata__" {
            continue;
        }
        let entry = serde_json::from_str(text.get())
            .map_err(|e| ModelError::tensor(path, &name, format!("broken header entry: {e}")))?;
        let tensor = locate(&entry, (8 + header, len))
            .map_err(|reason| ModelError::tensor(path, &name, reason))?;
        if tensors.insert(name.clone(), tensor).is_some() {
            return Err(ModelError::tensor(path, &name, "appears twice in the file"));
        }
    }
    let places = tensors.iter().map(|(name, tensor)| {
        let bytes = tensor.offset..tensor.offset + tensor.bytes;
        (name.as_str(), bytes)
    });
    refuse_overlaps(path, places)?;
    Ok(tensors)
}

/// The pairs of a JSON object in order, names that appear twice included, values not yet read.
struct Entries<'a>(Vec<(String, &'a RawValue)>);

impl<'de> Deserialize<'de> for Entries<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;

        impl<'de> Visitor<'de> for Pairs {
            type Value = Entries<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with an entry for each tensor")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
                let mut entries = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    entries.push(pair);
                }
                Ok(Entries(entries))
            }
        }

        deserializer.deserialize_map(Pairs)
    }
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
