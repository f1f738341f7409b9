//! Reads the header of a GGUF file (versions 2 and 3): metadata and where each tensor lies.
//!
//! Every length in the file is checked against what is left of the file before anything is
//! allocated or read: a hostile header gives an error, never a panic and never a large allocation.

use std::collections::{BTreeMap, HashMap};
use std::io::{BufReader, Read};
use std::ops::Range;
use std::path::Path;

use crate::dequant::Q5_0_BYTES;
use crate::error::{ModelError, Result};
use crate::overlap::refuse_overlaps;
use crate::tensor::DType;

/// One metadata value. Integers of every width are `Int`, floats `Float`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    /// Any integer.
    Int(i128),
    /// Any float.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// A text.
    Text(String),
    /// Texts.
    Texts(Vec<String>),
    /// Integers (32 bits suffice for all that is asked for; wider ones saturate).
    Ints(Vec<i32>),
    /// Floats.
    Floats(Vec<f32>),
    /// Booleans; nothing here reads them.
    Other,
}

/// How a tensor is stored, including what is refused or rewritten on reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stored {
    /// As it will be handed out.
    Plain(DType),
    /// Rewritten as Q8_0 with the same values.
    Q5_0,
    /// A GGML type this engine does not have.
    Unknown(u32),
}

/// Where a tensor lies.
#[derive(Debug, Clone)]
pub(crate) struct GgufTensor {
    /// `[rows, cols]`; of a stack of matrices the rows of all.
    pub shape: [usize; 2],
    /// How many matrices it is a stack of.
    pub stack: usize,
    /// Its storage.
    pub stored: Stored,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Number of bytes; 0 for an unknown type.
    pub bytes: u64,
}

/// A parsed header.
#[derive(Debug)]
pub(crate) struct Gguf {
    /// Metadata by key.
    pub values: HashMap<String, Value>,
    /// Each pair's key and bytes in the file (key, type, value), in order.
    pub pairs: Vec<(String, Range<u64>)>,
    /// Tensors by their name in the file.
    pub tensors: BTreeMap<String, GgufTensor>,
    /// Tensors begin at multiples of this.
    pub alignment: u64,
}

const MAGIC: &[u8; 4] = b"GGUF";
/// No key or name is longer; texts may be.
const LONGEST_NAME: u64 = 65_535;

impl Gguf {
    /// Reads the header of the file at `path`.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = std::fs::File::open(path).map_err(|e| ModelError::io(path, e))?;
        let len = file.metadata().map_err(|e| ModelError::io(path, e))?.len();
        Self::parse(BufReader::with_capacity(1 << 16, file), len, path)
    }

    /// Parses a header from `reader`, a file of `len` bytes.
    pub(crate) fn parse(reader: impl Read, len: u64, path: &Path) -> Result<Self> {
        let mut head = Header {
            reader,
            at: 0,
            len,
            path,
        };
        if &head.array::<4>()? != MAGIC {
            return Err(ModelError::format(path, "not a GGUF file"));
        }
        let version = head.u32()?;
        if !(2..=3).contains(&version) {
            let hint = "versions 2 and 3 are (a big-endian file shows a huge number)".to_owned();
            let what = format!("GGUF version {version}");
            return Err(ModelError::Unsupported {
                path: path.to_owned(),
                what,
                hint,
            });
        }
        let tensors = head.u64()?;
        let pairs = head.u64()?;
        // The shortest pair: an empty key, a type, one byte. The shortest tensor: an empty name,
        // its dimensions' number, one dimension, type, offset.
        head.must_fit(pairs, 13, "metadata")?;
        head.must_fit(tensors, 32, "tensors")?;
        let (values, pairs) = head.metadata(pairs)?;
        if let Some(Value::Int(parts)) = values.get("split.count")
            && *parts > 1
        {
            let what = format!("a GGUF split into {parts} files");
            let hint = "join them with `llama-gguf-split --merge`".to_owned();
            return Err(ModelError::Unsupported {
                path: path.to_owned(),
                what,
                hint,
            });
        }
        let alignment = match values.get("general.alignment") {
            None => 32,
            Some(Value::Int(n)) if (1..=1 << 20).contains(n) && n.count_ones() == 1 => *n as u64,
            Some(_) => return Err(ModelError::format(path, "general.alignment is not usable")),
        };
        let tensors = head.tensors(tensors, alignment)?;
        Ok(Self {
            values,
            pairs,
            tensors,
            alignment,
        })
    }

    /// The metadata alone.
    pub(crate) fn without_tensors(self) -> Self {
        Self {
            tensors: BTreeMap::new(),
            ..self
        }
    }

    /// An integer.
    pub(crate) fn int(&self, key: &str) -> Option<i128> {
        match self.values.get(key) {
            Some(Value::Int(n)) => Some(*n),
            _ => None,
        }
    }

    /// A size: an integer from 0 to 2^32.
    pub(crate) fn size(&self, key: &str) -> Option<usize> {
        self.int(key)
            .and_then(|n| u32::try_from(n).ok())
            .map(|n| n as usize)
    }

    /// A float, also when it was written as an integer.
    pub(crate) fn float(&self, key: &str) -> Option<f32> {
        match self.values.get(key) {
            Some(Value::Float(x)) => Some(*x as f32),
            Some(Value::Int(n)) => Some(*n as f32),
            _ => None,
        }
    }

    /// A boolean.
    pub(crate) fn flag(&self, key: &str) -> Option<bool> {
        match self.values.get(key) {
            Some(Value::Bool(b)) => Some(*b),
            _ => None,
        }
    }

    /// A text.
    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        match self.values.get(key) {
            Some(Value::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// A list of texts.
    pub(crate) fn texts(&self, key: &str) -> Option<&[String]> {
        match self.values.get(key) {
            Some(Value::Texts(texts)) => Some(texts),
            _ => None,
        }
    }

    /// A list of integers.
    pub(crate) fn ints(&self, key: &str) -> Option<&[i32]> {
        match self.values.get(key) {
            Some(Value::Ints(ints)) => Some(ints),
            _ => None,
        }
    }

    /// A list of floats.
    pub(crate) fn floats(&self, key: &str) -> Option<&[f32]> {
        match self.values.get(key) {
            Some(Value::Floats(floats)) => Some(floats),
            _ => None,
        }
    }
}

/// Reads forward through a header and knows how much of the file is left.
struct Header<'a, R> {
    reader: R,
    at: u64,
    len: u64,
    path: &'a Path,
}

impl<R: Read> Header<'_, R> {
    fn bad(&self, reason: impl Into<String>) -> ModelError {
        ModelError::format(self.path, reason)
    }

    fn left(&self) -> u64 {
        self.len.saturating_sub(self.at)
    }

    /// Refuses a count of things, each at least `least` bytes, that the rest of the file cannot hold.
    fn must_fit(&self, count: u64, least: u64, what: &str) -> Result<()> {
        match count.checked_mul(least) {
            Some(bytes) if bytes <= self.left() => Ok(()),
            _ => Err(self.bad(format!(
                "broken header at byte {}: {count} {what} cannot fit in the {} bytes left",
                self.at,
                self.left()
            ))),
        }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<()> {
        if bytes.len() as u64 > self.left() {
            return Err(self.bad(format!(
                "the file ends within its header, at byte {}",
                self.len
            )));
        }
        self.reader
            .read_exact(bytes)
            .map_err(|e| ModelError::io(self.path, e))?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn text(&mut self, longest: u64) -> Result<String> {
        let len = self.u64()?;
        if len > longest {
            return Err(self.bad(format!("a name of {len} bytes at byte {}", self.at)));
        }
        self.must_fit(len, 1, "bytes of text")?;
        let mut bytes = vec![0; len as usize];
        self.fill(&mut bytes)?;
        String::from_utf8(bytes)
            .map_err(|_| self.bad(format!("text before byte {} is not UTF-8", self.at)))
    }

    #[allow(clippy::type_complexity)] // values, and where they lie
    fn metadata(
        &mut self,
        pairs: u64,
    ) -> Result<(HashMap<String, Value>, Vec<(String, Range<u64>)>)> {
        let (mut values, mut places) = (HashMap::new(), Vec::new());
        for _ in 0..pairs {
            let start = self.at;
            let key = self.text(LONGEST_NAME)?;
            let kind = self.u32()?;
            let value = if kind == 9 {
                self.list(&key)?
            } else {
                self.scalar(kind, &key)?
            };
            if values.contains_key(&key) {
                return Err(self.bad(format!("metadata key {key} appears twice")));
            }
            places.push((key.clone(), start..self.at));
            values.insert(key, value);
        }
        Ok((values, places))
    }

    fn scalar(&mut self, kind: u32, key: &str) -> Result<Value> {
        Ok(match kind {
            0 => Value::Int(i128::from(self.array::<1>()?[0])),
            1 => Value::Int(i128::from(i8::from_le_bytes(self.array()?))),
            2 => Value::Int(i128::from(u16::from_le_bytes(self.array()?))),
            3 => Value::Int(i128::from(i16::from_le_bytes(self.array()?))),
            4 => Value::Int(i128::from(self.u32()?)),
            5 => Value::Int(i128::from(i32::from_le_bytes(self.array()?))),
            6 => Value::Float(f64::from(f32::from_le_bytes(self.array()?))),
            7 => Value::Bool(self.array::<1>()?[0] != 0),
            8 => Value::Text(self.text(u64::MAX)?),
            10 => Value::Int(i128::from(self.u64()?)),
            11 => Value::Int(i128::from(i64::from_le_bytes(self.array()?))),
            12 => Value::Float(f64::from_le_bytes(self.array()?)),
            _ => return Err(self.bad(format!("metadata {key} has the unknown type {kind}"))),
        })
    }

    fn list(&mut self, key: &str) -> Result<Value> {
        let kind = self.u32()?;
        let count = self.u64()?;
        let width = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            _ => return Err(self.bad(format!("metadata {key} is a list of unknown type {kind}"))),
        };
        self.must_fit(count, width, "list elements")?;
        match kind {
            8 => (0..count)
                .map(|_| self.text(u64::MAX))
                .collect::<Result<_>>()
                .map(Value::Texts),
            0..=5 | 10 | 11 => {
                let mut ints = Vec::with_capacity(count as usize);
                for _ in 0..count {
                    let Value::Int(n) = self.scalar(kind, key)? else {
                        continue;
                    };
                    ints.push(n.clamp(i32::MIN.into(), i32::MAX.into()) as i32);
                }
                Ok(Value::Ints(ints))
            }
            6 | 12 => {
                let mut floats = Vec::with_capacity(count as usize);
                for _ in 0..count {
                    if let Value::Float(x) = self.scalar(kind, key)? {
                        floats.push(x as f32);
                    }
                }
                Ok(Value::Floats(floats))
            }
            _ => {
                for _ in 0..count {
                    self.scalar(kind, key)?;
                }
                Ok(Value::Other)
            }
        }
    }

    fn tensors(&mut self, count: u64, alignment: u64) -> Result<BTreeMap<String, GgufTensor>> {
        let mut tensors = BTreeMap::new();
        for _ in 0..count {
            let name = self.text(LONGEST_NAME)?;
            let tensor = self.tensor(&name, alignment)?;
            if tensors.insert(name.clone(), tensor).is_some() {
                return Err(ModelError::tensor(
                    self.path,
                    &name,
                    "appears twice in the file",
                ));
            }
        }
        let data = self.at.next_multiple_of(alignment);
        for (name, tensor) in &mut tensors {
            let end = tensor.offset.checked_add(data).and_then(|at| {
                tensor.offset = at;
                at.checked_add(tensor.bytes)
            });
            if end.is_none_or(|end| end > self.len) {
                let end = end.map_or_else(|| "beyond any file".to_owned(), |end| end.to_string());
                let reason = format!(
                    "the file is truncated: it ends at byte {}, this tensor at {end}; download it again",
                    self.len
                );
                return Err(ModelError::tensor(self.path, name, reason));
            }
        }
        let places = tensors.iter().map(|(name, tensor)| {
            let bytes = tensor.offset..tensor.offset + tensor.bytes;
            (name.as_str(), bytes)
        });
        refuse_overlaps(self.path, places)?;
        Ok(tensors)
    }

    /// One entry of the tensor table; its offset is still relative to the data.
    fn tensor(&mut self, name: &str, alignment: u64) -> Result<GgufTensor> {
        let path = self.path;
        let bad = |reason: String| ModelError::tensor(path, name, reason);
        let dims = self.u32()?;
        if !(1..=4).contains(&dims) {
            return Err(bad(format!("has {dims} dimensions")));
        }
        let mut sizes = [1_u64; 4];
        for size in sizes.iter_mut().take(dims as usize) {
            *size = self.u64()?;
        }
        let kind = self.u32()?;
        let offset = self.u64()?;
        if !offset.is_multiple_of(alignment) {
            return Err(bad(format!(
                "starts at {offset}, not a multiple of {alignment}"
            )));
        }
        let rows = sizes[1..]
            .iter()
            .try_fold(1_u64, |rows, size| rows.checked_mul(*size));
        let shape = rows.zip(Some(sizes[0])).and_then(|(rows, cols)| {
            Some([usize::try_from(rows).ok()?, usize::try_from(cols).ok()?])
        });
        // Not bounded by the rows when one of the sizes is 0.
        let stack = sizes[2]
            .checked_mul(sizes[3])
            .and_then(|stack| usize::try_from(stack).ok());
        let (Some(shape), Some(stack)) = (shape, stack) else {
            return Err(bad(format!("has the sizes {sizes:?}")));
        };
        let stored = stored(kind);
        let row = match stored {
            Stored::Plain(dtype) => dtype.row_bytes(shape[1]),
            Stored::Q5_0 if !shape[1].is_multiple_of(32) => None,
            Stored::Q5_0 => (shape[1] / 32).checked_mul(Q5_0_BYTES),
            Stored::Unknown(_) => Some(0),
        };
        let bytes = row.and_then(|row| (row as u64).checked_mul(shape[0] as u64));
        match bytes {
            Some(bytes) => Ok(GgufTensor {
                shape,
                stack,
                stored,
                offset,
                bytes,
            }),
            None => Err(bad(format!(
                "rows of {} cannot be stored as {stored:?}",
                shape[1]
            ))),
        }
    }
}

/// GGML's type numbers.
fn stored(kind: u32) -> Stored {
    Stored::Plain(match kind {
        0 => DType::F32,
        1 => DType::F16,
        2 => DType::Q4_0,
        3 => DType::Q4_1,
        6 => return Stored::Q5_0,
        8 => DType::Q8_0,
        12 => DType::Q4_K,
        13 => DType::Q5_K,
        14 => DType::Q6_K,
        30 => DType::BF16,
        other => return Stored::Unknown(other),
    })
}

/// The names of GGML types that are refused, for the message.
pub(crate) fn ggml_type_name(kind: u32) -> String {
    let known = match kind {
        7 => "Q5_1",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16..=23 | 29 => "an IQ type",
        24..=28 => "a plain integer or f64 type",
        34 | 35 => "a ternary type",
        39 => "MXFP4",
        _ => return format!("GGML type {kind}"),
    };
    format!("{known} (GGML type {kind})")
}
