//! Writes GGUF files, version 3: metadata, the table of tensors, then their bytes one by one.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::error::{ModelError, Result};
use crate::gguf::Stored;
use crate::tensor::DType;

/// GGML's number of a storage type.
pub(crate) fn kind_of(stored: Stored) -> u32 {
    match stored {
        Stored::Q5_0 => 6,
        Stored::Unknown(kind) => kind,
        Stored::Plain(dtype) => match dtype {
            DType::F32 => 0,
            DType::F16 => 1,
            DType::Q4_0 => 2,
            DType::Q4_1 => 3,
            DType::Q8_0 => 8,
            DType::Q4_K => 12,
            DType::Q5_K => 13,
            DType::Q6_K => 14,
            DType::BF16 => 30,
        },
    }
}

/// Metadata pairs as they grow.
#[derive(Debug, Default)]
pub(crate) struct Metadata {
    pairs: u64,
    bytes: Vec<u8>,
}

impl Metadata {
    fn put_text(&mut self, text: &str) {
        self.bytes.extend((text.len() as u64).to_le_bytes());
        self.bytes.extend(text.as_bytes());
    }

    fn key(&mut self, key: &str, kind: u32) {
        self.pairs += 1;
        self.put_text(key);
        self.bytes.extend(kind.to_le_bytes());
    }

    fn list(&mut self, key: &str, kind: u32, count: usize) {
        self.key(key, 9);
        self.bytes.extend(kind.to_le_bytes());
        self.bytes.extend((count as u64).to_le_bytes());
    }

    /// A pair as another file has it: key, type and value.
    pub(crate) fn raw(&mut self, pair: &[u8]) {
        self.pairs += 1;
        self.bytes.extend(pair);
    }

    /// A text.
    pub(crate) fn text(&mut self, key: &str, text: &str) {
        self.key(key, 8);
        self.put_text(text);
    }

    /// A whole number of 32 bits.
    pub(crate) fn u32(&mut self, key: &str, number: u32) {
        self.key(key, 4);
        self.bytes.extend(number.to_le_bytes());
    }

    /// A float of 32 bits.
    pub(crate) fn f32(&mut self, key: &str, number: f32) {
        self.key(key, 6);
        self.bytes.extend(number.to_le_bytes());
    }

    /// A switch.
    pub(crate) fn flag(&mut self, key: &str, on: bool) {
        self.key(key, 7);
        self.bytes.push(u8::from(on));
    }

    /// A list of texts.
    pub(crate) fn texts(&mut self, key: &str, texts: &[String]) {
        self.list(key, 8, texts.len());
        texts.iter().for_each(|text| self.put_text(text));
    }

    /// A list of whole numbers.
    pub(crate) fn ints(&mut self, key: &str, ints: &[i32]) {
        self.list(key, 5, ints.len());
        ints.iter().for_each(|n| self.bytes.extend(n.to_le_bytes()));
    }
}

/// A tensor to come.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    /// Its name in the file.
    pub name: String,
    /// `[rows, cols]`; one row is written as a vector.
    pub shape: [usize; 2],
    /// How many matrices the rows are a stack of.
    pub stack: usize,
    /// How it is stored.
    pub stored: Stored,
    /// Number of bytes.
    pub bytes: u64,
}

/// A file whose header is written, waiting for its tensors in the order of the table.
pub(crate) struct GgufWriter {
    out: BufWriter<File>,
    path: PathBuf,
    alignment: u64,
    /// Sizes still to come, the next one last.
    left: Vec<(String, u64)>,
}

impl GgufWriter {
    /// Creates the file and writes all but the tensors' bytes.
    pub(crate) fn create(
        path: &Path,
        metadata: &Metadata,
        alignment: u64,
        entries: &[Entry],
    ) -> Result<Self> {
        let mut head = Vec::new();
        head.extend(b"GGUF");
        head.extend(3_u32.to_le_bytes());
        head.extend((entries.len() as u64).to_le_bytes());
        head.extend(metadata.pairs.to_le_bytes());
        head.extend(&metadata.bytes);
        let mut offset = 0_u64;
        for entry in entries {
            let [rows, cols] = entry.shape;
            let stack = entry.stack.max(1);
            let sizes = [cols as u64, (rows / stack) as u64, stack as u64];
            let sizes = match (rows, stack) {
                (1, _) => &sizes[..1],
                (_, 1) => &sizes[..2],
                _ => &sizes[..],
            };
            head.extend((entry.name.len() as u64).to_le_bytes());
            head.extend(entry.name.as_bytes());
            head.extend((sizes.len() as u32).to_le_bytes());
            sizes.iter().for_each(|n| head.extend(n.to_le_bytes()));
            head.extend(kind_of(entry.stored).to_le_bytes());
            head.extend(offset.to_le_bytes());
            offset += entry.bytes.next_multiple_of(alignment);
        }
        head.resize(head.len().next_multiple_of(alignment as usize), 0);
        let file = File::create_new(path).map_err(|e| ModelError::io(path, e))?;
        let left = entries.iter().rev().map(|e| (e.name.clone(), e.bytes));
        let mut writer = Self {
            out: BufWriter::with_capacity(1 << 20, file),
            path: path.to_owned(),
            alignment,
            left: left.collect(),
        };
        writer.put(&head)?;
        Ok(writer)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.out
            .write_all(bytes)
            .map_err(|e| ModelError::io(&self.path, e))
    }

    /// The next tensor's bytes.
    pub(crate) fn tensor(&mut self, bytes: &[u8]) -> Result<()> {
        let (name, expected) = self.left.pop().unwrap_or_default();
        if expected != bytes.len() as u64 {
            let reason = format!("{} bytes to write, {expected} announced", bytes.len());
            return Err(ModelError::tensor(&self.path, &name, reason));
        }
        self.put(bytes)?;
        let padded = (bytes.len() as u64).next_multiple_of(self.alignment);
        self.put(&vec![0; (padded - bytes.len() as u64) as usize])
    }

    /// Writes out and syncs.
    pub(crate) fn finish(self) -> Result<()> {
        if let Some((name, _)) = self.left.last() {
            return Err(ModelError::tensor(&self.path, name, "was not written"));
        }
        let io = |e| ModelError::io(&self.path, e);
        let file = self.out.into_inner().map_err(|e| io(e.into_error()))?;
        file.sync_all().map_err(io)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::{Gguf, Value};

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.gguf");
        let mut metadata = Metadata::default();
        metadata.u32("general.alignment", 64);
        metadata.text("a", "Grüße");
        metadata.u32("b", 7);
        metadata.f32("c", 0.5);
        metadata.flag("d", true);
        metadata.texts("e", &["x".to_owned(), String::new()]);
        metadata.ints("f", &[-1, 2]);
        let entry = |name: &str, shape, dtype, bytes| Entry {
            name: name.to_owned(),
            shape,
            stack: 1,
            stored: Stored::Plain(dtype),
            bytes,
        };
        let entries = [
            entry("v", [1, 3], DType::F32, 12),
            entry("m", [2, 32], DType::Q8_0, 68),
            Entry {
                stack: 2,
                ..entry("s", [6, 32], DType::Q8_0, 204)
            },
        ];
        let mut writer = GgufWriter::create(&path, &metadata, 64, &entries).unwrap();
        writer.tensor(&[1; 12]).unwrap();
        writer.tensor(&[2; 68]).unwrap();
        writer.tensor(&[3; 204]).unwrap();
        writer.finish().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let gguf = Gguf::open(&path).unwrap();
        assert_eq!(gguf.text("a"), Some("Grüße"));
        assert_eq!(gguf.int("b"), Some(7));
        assert_eq!(gguf.float("c"), Some(0.5));
        assert_eq!(gguf.flag("d"), Some(true));
        assert_eq!(gguf.texts("e").map(<[String]>::len), Some(2));
        assert_eq!(gguf.values.get("f"), Some(&Value::Ints(vec![-1, 2])));
        assert_eq!(gguf.tensors["m"].shape, [2, 32]);
        assert_eq!((gguf.tensors["m"].bytes, gguf.tensors["m"].stack), (68, 1));
        assert_eq!(
            (gguf.tensors["s"].shape, gguf.tensors["s"].stack),
            ([6, 32], 2)
        );
        assert_eq!(bytes.len() % 64, 0);
        let second = GgufWriter::create(&path, &metadata, 64, &entries);
        assert!(second.is_err(), "an existing file is left alone");
    }

    #[test]
    fn a_wrong_size_or_a_forgotten_tensor_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let entries = [Entry {
            name: "v".to_owned(),
            shape: [1, 3],
            stack: 1,
            stored: Stored::Plain(DType::F32),
            bytes: 12,
        }];
        let make = |name: &str| {
            let path = dir.path().join(name);
            GgufWriter::create(&path, &Metadata::default(), 32, &entries).unwrap()
        };
        assert!(make("a").tensor(&[0; 8]).is_err());
        let error = make("b").finish().unwrap_err().to_string();
        assert!(error.contains("tensor v: was not written"), "{error}");
    }
}
