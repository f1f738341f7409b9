//! An opened model: its configuration, and its tensors read from the file on demand.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use sha2::{Digest, Sha256};
use tokenizers::Tokenizer;

use crate::config::{Family, ModelConfig};
use crate::dequant::q5_0_to_q8_0;
use crate::error::{ModelError, Result};
use crate::gguf::{Gguf, GgufTensor, Stored, ggml_type_name};
use crate::names::{LayerTensor, TensorName};
use crate::safetensors_file::{SafeTensor, read_header};
use crate::source::{Layout, ModelFiles};
use crate::tensor::{DType, TensorData};
use crate::tokenizer_hf::SpecialNames;
use crate::{config_gguf, config_hf, json, tokenizer_gguf, tokenizer_hf};

/// A model whose files are complete and whose tensors all have the expected shapes. Weights stay
/// on disk until [`Model::tensor`] reads them.
#[derive(Debug)]
pub struct Model {
    name: String,
    config: ModelConfig,
    specials: SpecialNames,
    files: Vec<OpenFile>,
    tensors: BTreeMap<TensorName, Place>,
    text: TextSource,
}

#[derive(Debug)]
enum TextSource {
    Folder(PathBuf),
    Gguf(Box<Gguf>),
}

#[derive(Debug)]
struct OpenFile {
    path: PathBuf,
    file: Mutex<File>,
}

/// Where a tensor lies and what is done to it on reading.
#[derive(Debug, Clone)]
struct Place {
    /// One run of bytes, or one for each expert.
    parts: Vec<Part>,
    shape: [usize; 2],
    stored: Stored,
    /// Heads whose rows llama.cpp's converter interleaved (GGUF `llama` q and k only).
    interleaved_heads: Option<usize>,
    /// The file holds 1 + w of a norm, w is handed out (GGUF `gemma3` only).
    plus_one: bool,
}

/// A run of a file's bytes.
#[derive(Debug, Clone, Copy)]
struct Part {
    file: usize,
    offset: u64,
    bytes: u64,
}

impl OpenFile {
    fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| ModelError::io(path, e))?;
        Ok(Self {
            path: path.to_owned(),
            file: Mutex::new(file),
        })
    }

    fn read(&self, offset: u64, bytes: u64) -> Result<Vec<u8>> {
        let io = |e| ModelError::io(&self.path, e);
        let mut out = vec![0; bytes as usize];
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.seek(SeekFrom::Start(offset)).map_err(io)?;
        file.read_exact(&mut out).map_err(io)?;
        Ok(out)
    }
}

impl Model {
    /// Reads headers and configuration, and checks that every tensor is there, whole, and of the
    /// shape the configuration asks for.
    pub fn open(files: &ModelFiles) -> Result<Self> {
        match &files.layout {
            Layout::Gguf(path) => Self::open_gguf(&files.name, path),
            Layout::Folder(folder) => Self::open_folder(&files.name, folder),
        }
    }

    /// Like [`Model::open`], but a folder needs no weights, and its own are not looked at: for what reads only configuration,
    /// tokenizer and template. Such a model has no tensors.
    pub fn open_text(files: &ModelFiles) -> Result<Self> {
        match &files.layout {
            Layout::Gguf(path) => Self::open_gguf(&files.name, path),
            Layout::Folder(folder) => {
                let specials = SpecialNames::read(folder)?;
                let config = config_hf::read(folder, &specials)?;
                Ok(Self {
                    name: files.name.clone(),
                    config,
                    specials,
                    files: Vec::new(),
                    tensors: BTreeMap::new(),
                    text: TextSource::Folder(folder.clone()),
                })
            }
        }
    }

    fn open_gguf(name: &str, path: &Path) -> Result<Self> {
        let gguf = Gguf::open(path)?;
        let file = OpenFile::open(path)?;
        let factors = rope_factors(&gguf, &file)?;
        let config = config_gguf::read(&gguf, path, factors)?;
        let specials = tokenizer_gguf::Source { gguf: &gguf, path }.specials()?;
        let mut tensors = BTreeMap::new();
        for name in config.tensor_names() {
            let stored_name = name.gguf();
            let Some(tensor) = gguf.tensors.get(&stored_name) else {
                return Err(ModelError::tensor(
                    path,
                    &stored_name,
                    "is missing from the file",
                ));
            };
            if let Stored::Unknown(kind) = tensor.stored {
                let reason = format!("{} is not supported; {SUPPORTED}", ggml_type_name(kind));
                return Err(ModelError::tensor(path, &stored_name, reason));
            }
            check_shape(&config, name, tensor.shape)
                .and_then(|()| check_stack(&config, name, tensor.stack))
                .map_err(|reason| ModelError::tensor(path, &stored_name, reason))?;
            let plus_one = name.is_norm() && config.family.norm_plus_one();
            let place = place_in_gguf(tensor, interleaved_heads(&config, name), plus_one);
            tensors.insert(name, place);
        }
        let known = |stored: &String| stored == ROPE_FACTORS;
        refuse_strangers(path, gguf.tensors.keys(), &config, known)?;
        let (name, text) = (
            name.to_owned(),
            TextSource::Gguf(Box::new(gguf.without_tensors())),
        );
        Ok(Self {
            name,
            config,
            specials,
            files: vec![file],
            tensors,
            text,
        })
    }

    fn open_folder(name: &str, folder: &Path) -> Result<Self> {
        let specials = SpecialNames::read(folder)?;
        let config = config_hf::read(folder, &specials)?;
        let paths = weight_files(folder)?;
        let mut found: BTreeMap<String, (usize, SafeTensor)> = BTreeMap::new();
        let mut files = Vec::new();
        for (index, path) in paths.iter().enumerate() {
            for (stored_name, tensor) in read_header(path)? {
                if found.insert(stored_name.clone(), (index, tensor)).is_some() {
                    return Err(ModelError::tensor(path, &stored_name, "is in two files"));
                }
            }
            files.push(OpenFile::open(path)?);
        }
        let mut tensors = BTreeMap::new();
        for name in config.tensor_names() {
            let mut place: Option<Place> = None;
            for stored_name in name.hugging_face_parts(&config) {
                let Some((index, tensor)) = found.get(&stored_name) else {
                    let reason = "is missing from the model's files";
                    return Err(ModelError::tensor(&paths[0], &stored_name, reason));
                };
                let bad = |reason| ModelError::tensor(&paths[*index], &stored_name, reason);
                let part = place_in_folder(&config, name, (*index, tensor)).map_err(bad)?;
                match &mut place {
                    None => place = Some(part),
                    Some(place) if place.stored != part.stored => {
                        let (one, first) = (part.stored, place.stored);
                        return Err(bad(format!("is {one:?}, the first expert's is {first:?}")));
                    }
                    Some(place) => place.parts.extend(part.parts),
                }
            }
            tensors.extend(place.map(|place| (name, place)));
        }
        let known = |stored: &String| {
            // Old checkpoints carry frequencies that follow from the configuration, and some a
            // copy of the tied embeddings.
            stored.ends_with("rotary_emb.inv_freq")
                || (config.tie_embeddings
                    && *stored == TensorName::Head.hugging_face(config.family))
        };
        refuse_strangers(folder, found.keys(), &config, known)?;
        let (name, text) = (name.to_owned(), TextSource::Folder(folder.to_owned()));
        Ok(Self {
            name,
            config,
            specials,
            files,
            tensors,
            text,
        })
    }

    /// What the model is called in `/v1/models`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sizes and switches.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// How a tensor will be handed out, without reading it.
    pub fn dtype(&self, name: TensorName) -> Option<DType> {
        self.tensors.get(&name).map(|place| match place.stored {
            _ if place.plus_one => DType::F32,
            Stored::Plain(dtype) => dtype,
            Stored::Q5_0 | Stored::Unknown(_) => DType::Q8_0,
        })
    }

    /// Bytes all tensors take once read.
    pub fn weight_bytes(&self) -> u64 {
        let rows = |(name, place): (&TensorName, &Place)| {
            let row = self.dtype(*name)?.row_bytes(place.shape[1])?;
            Some(row as u64 * place.shape[0] as u64)
        };
        self.tensors.iter().filter_map(rows).sum()
    }

    /// Reads one tensor; NaN and infinity are refused. Query and key rows are always in the
    /// half-split rotary layout.
    pub fn tensor(&self, name: TensorName) -> Result<TensorData> {
        let Some(place) = self.tensors.get(&name) else {
            let path = self
                .files
                .first()
                .map_or(Path::new(&self.name), |file| &file.path);
            return Err(ModelError::tensor(
                path,
                &name.to_string(),
                "is not part of this model",
            ));
        };
        let file = &self.files[place.parts.first().map_or(0, |part| part.file)];
        let mut bytes = Vec::new();
        for part in &place.parts {
            let read = self.files[part.file].read(part.offset, part.bytes)?;
            if bytes.is_empty() {
                bytes = read;
                bytes.reserve_exact(bytes.len() * (place.parts.len() - 1));
            } else {
                bytes.extend(read);
            }
        }
        let mut dtype = match place.stored {
            Stored::Plain(dtype) => dtype,
            Stored::Q5_0 | Stored::Unknown(_) => {
                bytes = q5_0_to_q8_0(&bytes);
                DType::Q8_0
            }
        };
        if place.plus_one {
            let values = crate::dequant::to_f32(dtype, &bytes);
            bytes = values
                .iter()
                .flat_map(|v| (v - 1.0).to_le_bytes())
                .collect();
            dtype = DType::F32;
        }
        if let Some(heads) = place.interleaved_heads {
            bytes = half_split_rows(&bytes, heads, self.config.head_dim);
        }
        let tensor = TensorData {
            name,
            shape: place.shape,
            dtype,
            bytes,
            file: file.path.clone(),
        };
        tensor.check_finite()?;
        Ok(tensor)
    }

    /// Builds the tokenizer. It neither truncates nor pads.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        let (path, tokenizer) = match &self.text {
            TextSource::Folder(folder) => (
                folder.join("tokenizer.json"),
                tokenizer_hf::tokenizer(folder)?,
            ),
            TextSource::Gguf(gguf) => {
                let path = &self.files[0].path;
                (
                    path.clone(),
                    tokenizer_gguf::Source { gguf, path }.tokenizer()?,
                )
            }
        };
        let highest = tokenizer.get_vocab(true).into_values().max().unwrap_or(0);
        if highest as usize >= self.config.vocab {
            let reason = format!("token {highest} has no row among {}", self.config.vocab);
            return Err(ModelError::tokenizer(&path, reason));
        }
        Ok(tokenizer)
    }

    /// [`tokenizer_hash`] of [`Model::tokenizer`].
    pub fn tokenizer_hash(&self) -> Result<String> {
        self.tokenizer().map(|tokenizer| tokenizer_hash(&tokenizer))
    }

    /// The Jinja chat template, when the model has one.
    pub fn chat_template(&self) -> Option<String> {
        self.specials.template.clone()
    }

    /// The template for requests with tools, when that is another one.
    pub fn tool_template(&self) -> Option<String> {
        self.specials.tool_template.clone()
    }

    /// Text of the token that fills up a batch, for writing the model anew.
    pub(crate) fn pad_token(&self) -> Option<&str> {
        self.specials.pad_token.as_deref()
    }

    /// Its files, to open it again.
    pub fn files(&self) -> ModelFiles {
        let layout = match &self.text {
            TextSource::Folder(folder) => Layout::Folder(folder.clone()),
            TextSource::Gguf(_) => {
                Layout::Gguf(self.gguf_path().unwrap_or(Path::new("")).to_owned())
            }
        };
        ModelFiles {
            name: self.name.clone(),
            layout,
        }
    }

    /// The folder it was read from.
    pub(crate) fn folder(&self) -> Option<&Path> {
        match &self.text {
            TextSource::Folder(folder) => Some(folder),
            TextSource::Gguf(_) => None,
        }
    }

    /// The GGUF file it was read from.
    pub(crate) fn gguf_path(&self) -> Option<&Path> {
        match &self.text {
            TextSource::Folder(_) => None,
            TextSource::Gguf(_) => self.files.first().map(|file| file.path.as_path()),
        }
    }

    /// Text of the token that opens a text.
    pub fn bos_token(&self) -> Option<&str> {
        self.specials.bos_token.as_deref()
    }

    /// Text of the tokenizer's own end token.
    pub fn eos_token(&self) -> Option<&str> {
        self.specials.eos_token.as_deref()
    }

    /// Every special token: text that is never meant for a reader.
    pub fn special_tokens(&self) -> Vec<(u32, String)> {
        self.specials.all.clone()
    }
}

const SUPPORTED: &str = "F32, F16, BF16, Q8_0, Q5_0, Q4_0, Q4_1, Q4_K, Q5_K and Q6_K are";
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// SHA-256 over the vocabulary in id order and the added tokens: equal hashes read and write the
/// same ids.
pub fn tokenizer_hash(tokenizer: &Tokenizer) -> String {
    let mut vocab: Vec<(u32, String)> = tokenizer
        .get_vocab(true)
        .into_iter()
        .map(|(token, id)| (id, token))
        .collect();
    vocab.sort_unstable();
    let mut hash = Sha256::new();
    for (id, token) in &vocab {
        hash.update(id.to_le_bytes());
        hash.update((token.len() as u64).to_le_bytes());
        hash.update(token.as_bytes());
    }
    let mut added: Vec<_> = tokenizer.get_added_tokens_decoder().into_iter().collect();
    added.sort_unstable_by_key(|(id, _)| *id);
    for (id, token) in &added {
        hash.update(id.to_le_bytes());
        hash.update([u8::from(token.special)]);
    }
    crate::checksum::hex(&hash.finalize())
}

/// Safetensors files of a folder: one, or those its index names.
fn weight_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let index = folder.join("model.safetensors.index.json");
    let names = if index.exists() {
        crate::source::shard_names(&index, &json::read(&index)?)?
    } else {
        vec!["model.safetensors".to_owned()]
    };
    let mut paths = Vec::new();
    for file in names {
        let path = folder.join(&file);
        if !path.exists() {
            return Err(ModelError::MissingFile {
                folder: folder.to_owned(),
                file,
            });
        }
        paths.push(path);
    }
    Ok(paths)
}

fn check_shape(config: &ModelConfig, name: TensorName, found: [usize; 2]) -> Result<(), String> {
    match config.shape(name) {
        Some(expected) if expected == found => Ok(()),
        expected => {
            let expected = expected.unwrap_or_default();
            Err(format!(
                "has the shape {found:?}, the configuration asks for {expected:?}"
            ))
        }
    }
}

fn check_stack(config: &ModelConfig, name: TensorName, found: usize) -> Result<(), String> {
    match config.stack(name) {
        expected if expected == found => Ok(()),
        expected => Err(format!(
            "is a stack of {found} matrices, expected {expected}"
        )),
    }
}

fn place_in_gguf(tensor: &GgufTensor, interleaved_heads: Option<usize>, plus_one: bool) -> Place {
    Place {
        parts: vec![Part {
            file: 0,
            offset: tensor.offset,
            bytes: tensor.bytes,
        }],
        shape: tensor.shape,
        stored: tensor.stored,
        interleaved_heads,
        plus_one,
    }
}

fn place_in_folder(
    config: &ModelConfig,
    name: TensorName,
    (file, tensor): (usize, &SafeTensor),
) -> Result<Place, String> {
    let shape = tensor.shape.ok_or("has neither one nor two dimensions")?;
    let stack = config.stack(name);
    let whole = config.shape(name).unwrap_or_default();
    // Each expert's matrix is a tensor of its own here.
    let expected = [whole[0] / stack.max(1), whole[1]];
    if shape != expected {
        return Err(format!(
            "has the shape {shape:?}, the configuration asks for {expected:?}"
        ));
    }
    let dtype = match &tensor.dtype {
        Ok(dtype) => *dtype,
        Err(other) => return Err(format!("{other} is not supported; F32, F16 and BF16 are")),
    };
    let (offset, bytes, stored) = (tensor.offset, tensor.bytes, Stored::Plain(dtype));
    Ok(Place {
        parts: vec![Part {
            file,
            offset,
            bytes,
        }],
        shape: whole,
        stored,
        interleaved_heads: None,
        plus_one: false,
    })
}

/// A tensor nobody would read changes the model without a word: it is refused.
fn refuse_strangers<'a>(
    path: &Path,
    stored: impl Iterator<Item = &'a String>,
    config: &ModelConfig,
    known: impl Fn(&String) -> bool,
) -> Result<()> {
    let expected: std::collections::HashSet<String> = config
        .tensor_names()
        .into_iter()
        .flat_map(|name| {
            let mut names = name.hugging_face_parts(config);
            names.push(name.gguf());
            names
        })
        .collect();
    for name in stored {
        if !expected.contains(name) && !known(name) {
            let reason = "is not part of this model's family; the file is of another kind";
            return Err(ModelError::tensor(path, name, reason));
        }
    }
    Ok(())
}

/// GGUF files of the `llama` architecture have q and k rows for the interleaved rotary layout.
pub(crate) fn interleaved_heads(config: &ModelConfig, name: TensorName) -> Option<usize> {
    let TensorName::Layer(_, tensor) = name else {
        return None;
    };
    match tensor {
        _ if config.family != Family::Llama => None,
        LayerTensor::Q | LayerTensor::QBias => Some(config.heads),
        LayerTensor::K | LayerTensor::KBias => Some(config.kv_heads),
        _ => None,
    }
}

/// Row `2j + h` of a head becomes row `h * D/2 + j`. Quantised blocks run along rows, so whole
/// rows move; a bias moves element by element the same way.
fn half_split_rows(bytes: &[u8], heads: usize, head_dim: usize) -> Vec<u8> {
    let row = bytes.len() / (heads * head_dim);
    let mut out = Vec::with_capacity(bytes.len());
    for head in bytes.chunks_exact(head_dim * row) {
        for half in 0..2 {
            for j in 0..head_dim / 2 {
                let at = (2 * j + half) * row;
                out.extend_from_slice(&head[at..at + row]);
            }
        }
    }
    out
}

/// The divisors of Llama 3's frequencies, when the file has them.
fn rope_factors(gguf: &Gguf, file: &OpenFile) -> Result<Option<Vec<f32>>> {
    let Some(tensor) = gguf.tensors.get(ROPE_FACTORS) else {
        return Ok(None);
    };
    if tensor.stored != Stored::Plain(DType::F32) || tensor.bytes > 1 << 16 {
        return Err(ModelError::tensor(
            &file.path,
            ROPE_FACTORS,
            "is not a short list of F32",
        ));
    }
    let bytes = file.read(tensor.offset, tensor.bytes)?;
    Ok(Some(crate::dequant::to_f32(DType::F32, &bytes)))
}
