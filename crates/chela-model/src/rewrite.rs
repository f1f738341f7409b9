//! Writes a model anew with some tensors changed, one tensor in memory at a time: as a Hugging Face
//! folder or as a GGUF file, whatever it was read from.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::encode::encode;
use crate::error::{ModelError, Result};
use crate::gguf::{Gguf, GgufTensor, Stored};
use crate::gguf_meta;
use crate::gguf_write::{Entry, GgufWriter, Metadata};
use crate::hf_write::{self, SafetensorsWriter, torch_name};
use crate::model::{Model, interleaved_heads};
use crate::names::TensorName;
use crate::progress::Progress;
use crate::source::{Layout, ModelFiles};
use crate::tensor::DType;

/// Changes some tensors of a model while it is written.
pub trait Edit {
    /// Is this one changed?
    fn touches(&self, name: TensorName) -> bool;
    /// Changes its values, row-major `[rows, cols]`, with query and key rows in the half-split rotary layout.
    fn apply(
        &mut self,
        name: TensorName,
        shape: [usize; 2],
        values: &mut [f32],
    ) -> Result<(), String>;
}

/// A file or folder that gets its name only when it is whole.
struct Staged {
    to: PathBuf,
    temporary: PathBuf,
}

impl Staged {
    fn new(to: &Path) -> Result<Self> {
        if to.exists() {
            let reason = "is already there; give another name or remove it";
            return Err(ModelError::format(to, reason));
        }
        let Some(name) = to.file_name() else {
            return Err(ModelError::format(to, "has no name to write to"));
        };
        let name = format!(".{}.{}.tmp", name.to_string_lossy(), std::process::id());
        let temporary = to.with_file_name(name);
        Ok(Self {
            to: to.to_owned(),
            temporary,
        })
    }

    /// Opens what was written as a model, then gives it its name.
    fn publish(self, layout: Layout) -> Result<()> {
        let name = "written".to_owned();
        Model::open(&ModelFiles { name, layout })?;
        let io = |e| ModelError::io(&self.to, e);
        std::fs::rename(&self.temporary, &self.to).map_err(io)?;
        let parent = self.to.parent().filter(|p| !p.as_os_str().is_empty());
        let sync = || File::open(parent.unwrap_or(Path::new(".")))?.sync_all();
        sync().map_err(io)
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // After a success nothing is there any more; after an error the half is of no use.
        let _ = std::fs::remove_file(&self.temporary);
        let _ = std::fs::remove_dir_all(&self.temporary);
    }
}

/// The type of the model's first query map, where a file of this form can have it; else F16.
fn own_dtype(model: &Model) -> DType {
    let name = TensorName::Layer(0, crate::names::LayerTensor::Q);
    let dtype = model.dtype(name).filter(|dtype| !dtype.is_quantised());
    dtype.unwrap_or(DType::F16)
}

fn edited(
    edit: &mut dyn Edit,
    model: &Model,
    name: TensorName,
    to: &Path,
) -> Result<([usize; 2], Vec<f32>)> {
    let tensor = model.tensor(name)?;
    let mut values = tensor.to_f32();
    if edit.touches(name) {
        edit.apply(name, tensor.shape, &mut values)
            .map_err(|reason| ModelError::tensor(to, &name.to_string(), reason))?;
    }
    Ok((tensor.shape, values))
}

/// Writes the folder `to`: config.json, tokenizer files and `model.safetensors` in F32, F16 or BF16 (`None`: the model's own type,
/// F16 where that is quantised). Nothing is left at `to` when it fails.
pub fn write_folder(
    model: &Model,
    to: &Path,
    dtype: Option<DType>,
    edit: &mut dyn Edit,
    progress: &mut dyn Progress,
) -> Result<DType> {
    let dtype = dtype.unwrap_or_else(|| own_dtype(model));
    if torch_name(dtype).is_none() {
        return Err(ModelError::Unsupported {
            path: to.to_owned(),
            what: format!("{dtype} in a Hugging Face folder"),
            hint: "F32, F16 and BF16 are".to_owned(),
        });
    }
    let staged = Staged::new(to)?;
    let folder = staged.temporary.clone();
    std::fs::create_dir_all(&folder).map_err(|e| ModelError::io(&folder, e))?;
    for (name, bytes) in hf_write::texts(model, dtype)? {
        hf_write::write_synced(&folder.join(name), &bytes)?;
    }
    write_weights(
        model,
        &folder.join("model.safetensors"),
        dtype,
        edit,
        progress,
    )?;
    let sync = || File::open(&folder)?.sync_all();
    sync().map_err(|e| ModelError::io(&folder, e))?;
    staged.publish(Layout::Folder(folder))?;
    Ok(dtype)
}

fn write_weights(
    model: &Model,
    path: &Path,
    dtype: DType,
    edit: &mut dyn Edit,
    progress: &mut dyn Progress,
) -> Result<()> {
    let config = model.config();
    let names = config.tensor_names();
    let mut writer = SafetensorsWriter::create(path, dtype, &crate::folder::table(config))?;
    let mut meter = Meter::new(
        progress,
        path,
        config.parameters() * dtype.block_bytes() as u64,
    );
    for name in names {
        let same = !edit.touches(name) && model.dtype(name) == Some(dtype);
        let bytes = if same {
            model.tensor(name)?.bytes
        } else {
            let (shape, values) = edited(edit, model, name, path)?;
            encode(dtype, shape[1], &values).map_err(|reason| {
                ModelError::tensor(path, &name.hugging_face(config.family), reason)
            })?
        };
        writer.tensor(&bytes)?;
        meter.add(bytes.len());
    }
    writer.finish()
}

/// Writes the GGUF file `to`. Changed matrices are stored in `dtype`: F32, F16 (`None`), BF16 or Q8_0. What is not changed keeps its
/// bytes when the model comes from a GGUF file; of a folder's, norms and biases become F32 and matrices `dtype`. Nothing is left at
/// `to` when it fails.
pub fn write_gguf(
    model: &Model,
    to: &Path,
    dtype: Option<DType>,
    edit: &mut dyn Edit,
    progress: &mut dyn Progress,
) -> Result<DType> {
    let dtype = dtype.unwrap_or(DType::F16);
    if file_type(dtype).is_none() {
        return Err(ModelError::Unsupported {
            path: to.to_owned(),
            what: format!("writing {dtype} into a GGUF file"),
            hint: "F32, F16, BF16 and Q8_0 are".to_owned(),
        });
    }
    let staged = Staged::new(to)?;
    let plan = match model.gguf_path() {
        Some(source) => of_gguf(model, source, dtype, edit)?,
        None => of_folder(model, dtype)?,
    };
    write_plan(model, &staged.temporary, &plan, edit, progress)?;
    let written = staged.temporary.clone();
    staged.publish(Layout::Gguf(written))?;
    Ok(dtype)
}

/// llama.cpp's `LLAMA_FTYPE` for files of mostly this type.
fn file_type(dtype: DType) -> Option<u32> {
    match dtype {
        DType::F32 => Some(0),
        DType::F16 => Some(1),
        DType::Q8_0 => Some(7),
        DType::BF16 => Some(32),
        _ => None,
    }
}

/// What a tensor's bytes are made of.
enum Origin {
    /// These of the source.
    Copied(Range<u64>),
    /// The model's tensor, changed and stored anew.
    Made(TensorName, DType),
    /// These numbers.
    Given(Vec<f32>),
}

/// A GGUF file to write.
struct Plan {
    source: Option<PathBuf>,
    metadata: Metadata,
    alignment: u64,
    tensors: Vec<(Entry, Origin)>,
}

/// Rows that no whole number of blocks fills are stored as F16, as llama.cpp's quantiser does.
fn fitting(dtype: DType, [rows, cols]: [usize; 2]) -> DType {
    match rows {
        1 => DType::F32,
        _ if dtype.row_bytes(cols).is_none() => DType::F16,
        _ => dtype,
    }
}

/// llama.cpp's converter keeps the small matrix that decides so much.
fn stored_as(dtype: DType, name: TensorName, shape: [usize; 2]) -> DType {
    match name {
        TensorName::Layer(_, crate::names::LayerTensor::Router) => DType::F32,
        _ => fitting(dtype, shape),
    }
}

fn entry(name: String, shape: [usize; 2], stack: usize, dtype: DType) -> Entry {
    let row = dtype.row_bytes(shape[1]).unwrap_or_default();
    Entry {
        name,
        shape,
        stack,
        stored: Stored::Plain(dtype),
        bytes: (row * shape[0]) as u64,
    }
}

/// Metadata and unchanged tensors as they are in `source`, tensors in its order.
fn of_gguf(model: &Model, source: &Path, dtype: DType, edit: &dyn Edit) -> Result<Plan> {
    let gguf = Gguf::open(source)?;
    let names: HashMap<String, TensorName> = model
        .config()
        .tensor_names()
        .into_iter()
        .map(|name| (name.gguf(), name))
        .collect();
    let mut in_order: Vec<(&String, &GgufTensor)> = gguf.tensors.iter().collect();
    in_order.sort_by_key(|(_, tensor)| tensor.offset);
    let (mut tensors, mut made, mut kept) = (Vec::new(), 0, 0);
    for (stored_name, tensor) in in_order {
        let touched = names.get(stored_name).filter(|name| edit.touches(**name));
        let weights = (tensor.shape[0] * tensor.shape[1]) as u64;
        match touched {
            Some(name) => {
                let dtype = stored_as(dtype, *name, tensor.shape);
                let entry = entry(stored_name.clone(), tensor.shape, tensor.stack, dtype);
                tensors.push((entry, Origin::Made(*name, dtype)));
                made += weights;
            }
            None => {
                let entry = Entry {
                    name: stored_name.clone(),
                    shape: tensor.shape,
                    stack: tensor.stack,
                    stored: tensor.stored,
                    bytes: tensor.bytes,
                };
                let range = tensor.offset..tensor.offset + tensor.bytes;
                tensors.push((entry, Origin::Copied(range)));
                let embedding = matches!(
                    names.get(stored_name),
                    Some(TensorName::Embed | TensorName::Head)
                );
                kept += if embedding { 0 } else { weights };
            }
        }
    }
    let mut metadata = Metadata::default();
    let mut file = File::open(source).map_err(|e| ModelError::io(source, e))?;
    let renamed = file_type(dtype).filter(|_| made > kept);
    for (key, range) in &gguf.pairs {
        match (key.as_str(), renamed) {
            ("general.file_type", Some(_))
            | ("split.count" | "split.no" | "split.tensors.count", _) => {}
            _ => metadata.raw(&read_range(&mut file, source, range)?),
        }
    }
    if let Some(kind) = renamed {
        metadata.u32("general.file_type", kind);
    }
    if dtype.is_quantised() && gguf.int("general.quantization_version").is_none() {
        metadata.u32(
            "general.quantization_version",
            gguf_meta::QUANTIZATION_VERSION,
        );
    }
    Ok(Plan {
        source: Some(source.to_owned()),
        metadata,
        alignment: gguf.alignment,
        tensors,
    })
}

/// Metadata made from the configuration and the tokenizer, tensors in the order of a forward pass.
fn of_folder(model: &Model, dtype: DType) -> Result<Plan> {
    let (mut metadata, factors) = gguf_meta::of_folder(model)?;
    if let Some(kind) = file_type(dtype) {
        metadata.u32("general.file_type", kind);
    }
    let config = model.config();
    let mut tensors = Vec::new();
    if let Some(factors) = factors {
        let entry = entry(
            "rope_freqs.weight".to_owned(),
            [1, factors.len()],
            1,
            DType::F32,
        );
        tensors.push((entry, Origin::Given(factors)));
    }
    for name in config.tensor_names() {
        let shape = config.shape(name).unwrap_or_default();
        let dtype = stored_as(dtype, name, shape);
        let entry = entry(name.gguf(), shape, config.stack(name), dtype);
        tensors.push((entry, Origin::Made(name, dtype)));
    }
    Ok(Plan {
        source: None,
        metadata,
        alignment: 32,
        tensors,
    })
}

fn write_plan(
    model: &Model,
    path: &Path,
    plan: &Plan,
    edit: &mut dyn Edit,
    progress: &mut dyn Progress,
) -> Result<()> {
    let entries: Vec<Entry> = plan
        .tensors
        .iter()
        .map(|(entry, _)| entry.clone())
        .collect();
    let mut writer = GgufWriter::create(path, &plan.metadata, plan.alignment, &entries)?;
    let source = plan.source.as_deref().unwrap_or(path);
    let mut file = File::open(source).map_err(|e| ModelError::io(source, e))?;
    let mut meter = Meter::new(progress, path, entries.iter().map(|e| e.bytes).sum());
    for (entry, origin) in &plan.tensors {
        let refuse = |reason| ModelError::tensor(path, &entry.name, reason);
        let bytes = match origin {
            Origin::Copied(range) => read_range(&mut file, source, range)?,
            Origin::Given(values) => encode(DType::F32, values.len(), values).map_err(refuse)?,
            Origin::Made(name, dtype) => {
                let (shape, mut values) = edited(edit, model, *name, path)?;
                if let Some(heads) = interleaved_heads(model.config(), *name) {
                    values = interleave(&values, heads, model.config().head_dim);
                }
                if name.is_norm() && model.config().family.norm_plus_one() {
                    values.iter_mut().for_each(|w| *w += 1.0);
                }
                encode(*dtype, shape[1], &values).map_err(refuse)?
            }
        };
        writer.tensor(&bytes)?;
        meter.add(bytes.len());
    }
    writer.finish()
}

/// Row `h * D/2 + j` of a head becomes row `2j + h`: what `half_split_rows` undoes.
fn interleave(values: &[f32], heads: usize, head_dim: usize) -> Vec<f32> {
    let row = values.len() / (heads * head_dim);
    let mut out = Vec::with_capacity(values.len());
    for head in values.chunks_exact(head_dim * row) {
        let (first, second) = head.split_at(head_dim / 2 * row);
        for (a, b) in first.chunks_exact(row).zip(second.chunks_exact(row)) {
            out.extend_from_slice(a);
            out.extend_from_slice(b);
        }
    }
    out
}

fn read_range(file: &mut File, path: &Path, range: &Range<u64>) -> Result<Vec<u8>> {
    let io = |e| ModelError::io(path, e);
    let mut bytes = vec![0; (range.end - range.start) as usize];
    file.seek(SeekFrom::Start(range.start)).map_err(io)?;
    file.read_exact(&mut bytes).map_err(io)?;
    Ok(bytes)
}

/// Tells how far the writing is, and its end also when it fails.
struct Meter<'a> {
    progress: &'a mut dyn Progress,
    done: u64,
}

impl<'a> Meter<'a> {
    fn new(progress: &'a mut dyn Progress, path: &Path, total: u64) -> Self {
        let name = path.file_name().unwrap_or(path.as_os_str());
        progress.start(&format!("writing {}", name.to_string_lossy()), Some(total));
        Self { progress, done: 0 }
    }

    fn add(&mut self, bytes: usize) {
        self.done += bytes as u64;
        self.progress.set(self.done);
    }
}

impl Drop for Meter<'_> {
    fn drop(&mut self) {
        self.progress.finish();
    }
}
