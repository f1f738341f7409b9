//! The two header parsers over bytes in memory: for fuzzers, and tests that change headers.

use std::ops::Range;
use std::path::Path;

use crate::error::Result;
use crate::gguf::Gguf;
use crate::safetensors_file;

/// A tensor's name and its bytes' place in the file.
pub type Place = (String, Range<u64>);

/// Parses the header of a GGUF file of these bytes; `path` is for messages.
pub fn gguf_header(bytes: &[u8], path: &Path) -> Result<Vec<Place>> {
    let gguf = Gguf::parse(bytes, bytes.len() as u64, path)?;
    let places = gguf.tensors.into_iter();
    Ok(places
        .map(|(name, t)| (name, t.offset..t.offset + t.bytes))
        .collect())
}

/// Parses the header of a safetensors file of these bytes; `path` is for messages.
pub fn safetensors_header(bytes: &[u8], path: &Path) -> Result<Vec<Place>> {
    let tensors = safetensors_file::parse(bytes, bytes.len() as u64, path)?;
    let places = tensors.into_iter();
    Ok(places
        .map(|(name, t)| (name, t.offset..t.offset + t.bytes))
        .collect())
}
