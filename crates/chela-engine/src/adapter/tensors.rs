//! Tensors of an adapter's file: read one by one and checked, written at once.

use crate::error::io;
use chela_core::EngineError;
use safetensors::{
    Dtype,
    tensor::{Metadata, TensorView},
};
use std::{
    collections::HashMap,
    io::{Read, Seek, SeekFrom, Write},
    path::Path,
};

/// The format's own bound on headers (safetensors, `MAX_HEADER_SIZE`).
const LONGEST_HEADER: u64 = 100_000_000;

/// A safetensors file whose tensors are read one after the other into the same memory: a publish waits for it, and fresh memory
/// for the whole file costs several times its reading.
pub struct TensorFile {
    file: std::fs::File,
    metadata: Metadata,
    start: u64,
    bytes: Vec<u8>,
    /// Of the whole file.
    pub len: u64,
}

impl TensorFile {
    pub fn open(path: &Path) -> Result<Self, String> {
        let said = |e: std::io::Error| e.to_string();
        let mut file = std::fs::File::open(path).map_err(said)?;
        let len = file.metadata().map_err(said)?.len();
        let mut word = [0; 8];
        file.read_exact(&mut word)
            .map_err(|_| "shorter than a safetensors header".to_owned())?;
        let header = u64::from_le_bytes(word);
        if header > LONGEST_HEADER || header > len.saturating_sub(8) {
            return Err(format!(
                "not a safetensors file: a header of {header} bytes in a file of {len}"
            ));
        }
        let mut bytes = vec![0; header as usize];
        file.read_exact(&mut bytes).map_err(said)?;
        let metadata: Metadata = serde_json::from_slice(&bytes)
            .map_err(|e| format!("broken safetensors header: {e}"))?;
        let (start, data) = (8 + header, metadata.data_len() as u64);
        if start.checked_add(data) != Some(len) {
            return Err(format!(
                "{} bytes of tensors where the header has {data}; the file is cut or damaged",
                len.saturating_sub(start)
            ));
        }
        Ok(Self {
            file,
            metadata,
            start,
            bytes,
            len,
        })
    }

    /// Names in the order of their bytes.
    pub fn names(&self) -> Vec<String> {
        self.metadata.offset_keys()
    }

    /// How a tensor is stored.
    pub fn dtype(&self, name: &str) -> Option<Dtype> {
        self.metadata.info(name).map(|info| info.dtype)
    }

    fn tensor(&mut self, name: &str) -> Result<TensorView<'_>, String> {
        let info = self
            .metadata
            .info(name)
            .ok_or_else(|| format!("{name} is missing"))?;
        let (from, to) = info.data_offsets;
        self.bytes.resize(to - from, 0);
        self.file
            .seek(SeekFrom::Start(self.start + from as u64))
            .and_then(|_| self.file.read_exact(&mut self.bytes))
            .map_err(|e| format!("{name}: {e}"))?;
        TensorView::new(info.dtype, info.shape.clone(), &self.bytes)
            .map_err(|e| format!("{name}: {e}"))
    }

    /// The values of a tensor, which must have this shape and be finite numbers.
    pub fn values(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, String> {
        // The shape first, so that nothing is read for a tensor of any size.
        if let Some(info) = self.metadata.info(name)
            && info.shape != shape
        {
            return Err(format!(
                "{name} has the shape {:?}, this model and rank need {shape:?}",
                info.shape
            ));
        }
        let tensor = self.tensor(name)?;
        let Some(values) = floats(&tensor) else {
            let dtype = tensor.dtype();
            return Err(format!(
                "{name} is {dtype:?}; F32, F16 and BF16 are supported"
            ));
        };
        if all_finite(&values) {
            return Ok(values);
        }
        let at = values.iter().position(|v| !v.is_finite()).unwrap_or(0);
        let cols = shape.last().map_or(1, |n| (*n).max(1));
        Err(format!(
            "{name} holds {} at row {}, column {}: not a finite number",
            values[at],
            at / cols,
            at % cols
        ))
    }
}

/// One pass without a branch: x · 0 is NaN exactly for what is not finite. In lanes, since a single sum is bound by latency.
fn all_finite(values: &[f32]) -> bool {
    let mut odd = [0.0f32; 16];
    let chunks = values.chunks_exact(odd.len());
    let rest: f32 = chunks.remainder().iter().map(|v| v * 0.0).sum();
    for chunk in chunks {
        odd.iter_mut().zip(chunk).for_each(|(o, v)| *o += v * 0.0);
    }
    !(odd.iter().sum::<f32>() + rest).is_nan()
}

/// A tensor's values as f32; `None` for other types than F32, F16, BF16.
pub fn floats(tensor: &TensorView<'_>) -> Option<Vec<f32>> {
    let data = tensor.data();
    Some(match tensor.dtype() {
        Dtype::F32 if cfg!(target_endian = "little") => {
            // A whole copy at once: a publish waits for it. (Files and memory are little-endian alike here.)
            bytemuck::allocation::pod_collect_to_vec(data)
        }
        Dtype::F32 => data
            .chunks_exact(4)
            .map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]]))
            .collect(),
        Dtype::F16 => data
            .chunks_exact(2)
            .map(|c| half::f16::from_le_bytes([c[0], c[1]]).to_f32())
            .collect(),
        Dtype::BF16 => data
            .chunks_exact(2)
            .map(|c| half::bf16::from_le_bytes([c[0], c[1]]).to_f32())
            .collect(),
        _ => return None,
    })
}

/// Little-endian bytes.
pub fn bytes_of(values: &[f32]) -> Vec<u8> {
    if cfg!(target_endian = "little") {
        return bytemuck::cast_slice(values).to_vec();
    }
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Writes f32 tensors as safetensors and syncs.
pub fn write_tensors(
    path: &Path,
    tensors: &[(String, Vec<usize>, Vec<u8>)],
) -> Result<(), EngineError> {
    let views: HashMap<&str, TensorView<'_>> = tensors
        .iter()
        .map(|(name, shape, bytes)| {
            TensorView::new(Dtype::F32, shape.clone(), bytes)
                .map(|v| (name.as_str(), v))
                .map_err(|e| io(path, e))
        })
        .collect::<Result<_, _>>()?;
    let bytes = safetensors::serialize(views, None).map_err(|e| io(path, e))?;
    write_synced(path, &bytes)
}

/// Writes a file and syncs it.
pub fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), EngineError> {
    let write = || {
        let mut file = std::fs::File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(|e| io(path, e))
}
