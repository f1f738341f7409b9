//! Low-rank adapters (Hu et al., arXiv 2106.09685): y += (alpha / r) · (x Aᵀ) Bᵀ, in PEFT's layout on disk.

use crate::error::{io, kernel, weights};
use chela_core::{AdapterSpec, EngineError};
use chela_kernels::Kernels;
use chela_model::ModelConfig;
use safetensors::{
    Dtype,
    tensor::{Metadata, TensorView},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    collections::HashMap,
    io::{Read, Seek, SeekFrom, Write},
    path::Path,
};

/// The seven linear maps of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// Query.
    Q,
    /// Key.
    K,
    /// Value.
    V,
    /// Output of attention.
    O,
    /// Gate of the gated unit.
    Gate,
    /// Its other input.
    Up,
    /// Its output.
    Down,
}

impl Target {
    /// In the order in which weights and adapters are kept.
    pub const ALL: [Self; 7] = [
        Self::Q,
        Self::K,
        Self::V,
        Self::O,
        Self::Gate,
        Self::Up,
        Self::Down,
    ];

    /// PEFT's name of the module.
    pub fn module(self) -> &'static str {
        match self {
            Self::Q => "q_proj",
            Self::K => "k_proj",
            Self::V => "v_proj",
            Self::O => "o_proj",
            Self::Gate => "gate_proj",
            Self::Up => "up_proj",
            Self::Down => "down_proj",
        }
    }

    fn parent(self) -> &'static str {
        match self {
            Self::Q | Self::K | Self::V | Self::O => "self_attn",
            Self::Gate | Self::Up | Self::Down => "mlp",
        }
    }

    /// `(out, in)` of the map.
    pub fn shape(self, c: &ModelConfig) -> (usize, usize) {
        let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        match self {
            Self::Q => (q, c.hidden),
            Self::K | Self::V => (kv, c.hidden),
            Self::O => (c.hidden, q),
            Self::Gate | Self::Up => (c.intermediate, c.hidden),
            Self::Down => (c.hidden, c.intermediate),
        }
    }

    fn tensor(self, layer: usize, which: &str) -> String {
        format!(
            "base_model.model.model.layers.{layer}.{}.{}.lora_{which}.weight",
            self.parent(),
            self.module()
        )
    }
}

/// One map's factors.
#[derive(Debug)]
pub struct Lora<B> {
    /// `[r, in]`
    pub a: B,
    /// `[out, r]`
    pub b: B,
    /// out
    pub out: usize,
    /// in
    pub input: usize,
}

/// A whole adapter.
#[derive(Debug)]
pub struct Adapter<B> {
    /// r
    pub rank: usize,
    /// Numerator of the scale.
    pub alpha: f32,
    /// By layer, by [`Target::ALL`].
    pub layers: Vec<[Option<Lora<B>>; 7]>,
}

/// `adapter_config.json`, as far as it matters here.
#[derive(Debug, Serialize, Deserialize)]
struct PeftConfig {
    #[serde(default)]
    peft_type: String,
    r: usize,
    lora_alpha: f32,
    #[serde(default)]
    use_rslora: bool,
    #[serde(default)]
    use_dora: bool,
    target_modules: Vec<String>,
    #[serde(default)]
    task_type: Option<String>,
    #[serde(default)]
    base_model_name_or_path: Option<String>,
    #[serde(default)]
    bias: Option<String>,
    #[serde(default)]
    fan_in_fan_out: bool,
    #[serde(default)]
    inference_mode: bool,
    #[serde(default)]
    lora_dropout: f32,
    #[serde(default, skip_serializing)]
    rank_pattern: serde_json::Map<String, serde_json::Value>,
    #[serde(default, skip_serializing)]
    alpha_pattern: serde_json::Map<String, serde_json::Value>,
    #[serde(default, skip_serializing)]
    layers_to_transform: Option<serde_json::Value>,
    #[serde(default, skip_serializing)]
    modules_to_save: Option<serde_json::Value>,
}

impl PeftConfig {
    /// What would change the numbers and is not supported.
    fn refusal(&self) -> Option<String> {
        let bias = self.bias.as_deref().unwrap_or("none");
        let present = |v: &Option<serde_json::Value>| v.as_ref().is_some_and(|v| !v.is_null());
        if self.use_dora || !matches!(self.peft_type.as_str(), "" | "LORA") {
            return Some("only plain LoRA is supported".to_owned());
        }
        if self.r == 0 || !(self.lora_alpha.is_finite() && self.lora_alpha > 0.0) {
            return Some(format!("r {}, lora_alpha {}", self.r, self.lora_alpha));
        }
        let other = [
            ("bias", bias != "none"),
            ("fan_in_fan_out", self.fan_in_fan_out),
            ("rank_pattern", !self.rank_pattern.is_empty()),
            ("alpha_pattern", !self.alpha_pattern.is_empty()),
            ("layers_to_transform", present(&self.layers_to_transform)),
            ("modules_to_save", present(&self.modules_to_save)),
        ];
        let (name, _) = other.into_iter().find(|(_, set)| *set)?;
        Some(format!("{name} is not supported"))
    }
}

impl<B> Adapter<B> {
    /// Factor of (x Aᵀ) Bᵀ.
    pub fn scale(&self) -> f32 {
        self.alpha / self.rank as f32
    }

    /// Each present map with its layer and target.
    pub fn entries(&self) -> impl Iterator<Item = (usize, Target, &Lora<B>)> {
        self.layers.iter().enumerate().flat_map(|(layer, maps)| {
            Target::ALL
                .into_iter()
                .zip(maps)
                .filter_map(move |(t, m)| m.as_ref().map(|m| (layer, t, m)))
        })
    }

    /// A fresh adapter: A uniform in ±1/√in (PEFT's Kaiming with a = √5), B zero, so that it equals the base model.
    pub fn fresh<K: Kernels<Buf = B>>(
        k: &K,
        config: &ModelConfig,
        spec: &AdapterSpec,
    ) -> Result<Self, EngineError> {
        let targets = targets(&spec.targets)?;
        if spec.rank == 0 || !(spec.alpha.is_finite() && spec.alpha > 0.0) {
            return Err(weights(format!(
                "rank {} and alpha {}",
                spec.rank, spec.alpha
            )));
        }
        let mut rng = crate::rng::Rng::new(spec.seed ^ 0x4c6f_5241);
        let mut layers = Vec::with_capacity(config.layers);
        for _ in 0..config.layers {
            let mut maps: [Option<Lora<B>>; 7] = Default::default();
            for target in &targets {
                let (out, input) = target.shape(config);
                let bound = 1.0 / (input as f32).sqrt();
                let a: Vec<f32> = (0..spec.rank * input)
                    .map(|_| (2.0 * rng.uniform() as f32 - 1.0) * bound)
                    .collect();
                let a = k.upload(&a).map_err(kernel)?;
                let b = k.zeros(out * spec.rank).map_err(kernel)?;
                maps[*target as usize] = Some(Lora { a, b, out, input });
            }
            layers.push(maps);
        }
        Ok(Self {
            rank: spec.rank,
            alpha: spec.alpha,
            layers,
        })
    }

    /// Reads PEFT's two files, refusing what does not belong to this model, by tensor and reason.
    pub fn read<K: Kernels<Buf = B>>(
        k: &K,
        config: &ModelConfig,
        dir: &Path,
    ) -> Result<Self, EngineError> {
        let path = dir.join("adapter_config.json");
        let text = std::fs::read_to_string(&path).map_err(|e| io(&path, e))?;
        let peft: PeftConfig =
            serde_json::from_str(&text).map_err(|e| weights(format!("{}: {e}", path.display())))?;
        if let Some(why) = peft.refusal() {
            return Err(weights(format!("{}: {why}", path.display())));
        }
        let targets = targets(&peft.target_modules)?;
        let path = dir.join("adapter_model.safetensors");
        let mut file =
            TensorFile::open(&path).map_err(|e| weights(format!("{}: {e}", path.display())))?;
        let expected = config.layers * targets.len() * 2;
        if file.len() != expected {
            let got = file.len();
            return Err(weights(format!(
                "{}: {got} tensors, not {expected}",
                path.display()
            )));
        }
        let mut layers = Vec::with_capacity(config.layers);
        for layer in 0..config.layers {
            let mut maps: [Option<Lora<B>>; 7] = Default::default();
            for target in &targets {
                let (out, input) = target.shape(config);
                let mut read = |which: &str, shape: [usize; 2]| {
                    let values = factor(&mut file, &target.tensor(layer, which), shape)
                        .map_err(|e| weights(format!("{}: {e}", path.display())))?;
                    k.upload(&values).map_err(kernel)
                };
                let a = read("A", [peft.r, input])?;
                let b = read("B", [out, peft.r])?;
                maps[*target as usize] = Some(Lora { a, b, out, input });
            }
            layers.push(maps);
        }
        let root = if peft.use_rslora {
            (peft.r as f32).sqrt()
        } else {
            1.0
        };
        // rsLoRA (arXiv 2312.03732) scales by alpha / √r; kept as an equal alpha of the plain rule.
        Ok(Self {
            rank: peft.r,
            alpha: peft.lora_alpha * root,
            layers,
        })
    }

    /// Writes PEFT's two files into an existing folder and syncs them.
    pub fn write<K: Kernels<Buf = B>>(
        &self,
        k: &K,
        base_model: &str,
        dir: &Path,
    ) -> Result<(), EngineError> {
        let mut modules: Vec<String> = Vec::new();
        let mut tensors = Vec::new();
        for (layer, target, lora) in self.entries() {
            if layer == 0 {
                modules.push(target.module().to_owned());
            }
            let a = k.download(&lora.a).map_err(kernel)?;
            let b = k.download(&lora.b).map_err(kernel)?;
            tensors.push((
                target.tensor(layer, "A"),
                vec![self.rank, lora.input],
                bytes_of(&a),
            ));
            tensors.push((
                target.tensor(layer, "B"),
                vec![lora.out, self.rank],
                bytes_of(&b),
            ));
        }
        let peft = PeftConfig {
            peft_type: "LORA".to_owned(),
            r: self.rank,
            lora_alpha: self.alpha,
            use_rslora: false,
            use_dora: false,
            target_modules: modules,
            task_type: Some("CAUSAL_LM".to_owned()),
            base_model_name_or_path: Some(base_model.to_owned()),
            bias: Some("none".to_owned()),
            fan_in_fan_out: false,
            inference_mode: true,
            lora_dropout: 0.0,
            rank_pattern: serde_json::Map::new(),
            alpha_pattern: serde_json::Map::new(),
            layers_to_transform: None,
            modules_to_save: None,
        };
        let text = serde_json::to_vec_pretty(&peft).map_err(weights)?;
        write_synced(&dir.join("adapter_config.json"), &text)?;
        write_tensors(&dir.join("adapter_model.safetensors"), &tensors)
    }

    /// SHA-256 over names, shapes, scale and values as they are in memory.
    pub fn hash<K: Kernels<Buf = B>>(&self, k: &K) -> Result<String, EngineError> {
        let mut hash = Sha256::new();
        // One buffer for all: a publish waits for this, and fresh memory costs as much as the hash.
        let mut values = Vec::new();
        let mut add = |hash: &mut Sha256, buf: &B| {
            values.resize(k.len(buf), 0.0);
            k.read(buf, 0, &mut values).map_err(kernel)?;
            if cfg!(target_endian = "little") {
                hash.update(bytemuck::cast_slice(&values));
            } else {
                hash.update(bytes_of(&values));
            }
            Ok(())
        };
        hash.update(self.rank.to_le_bytes());
        hash.update(self.scale().to_le_bytes());
        for (layer, target, lora) in self.entries() {
            hash.update(target.tensor(layer, "A").as_bytes());
            hash.update(lora.out.to_le_bytes());
            hash.update(lora.input.to_le_bytes());
            add(&mut hash, &lora.a)?;
            add(&mut hash, &lora.b)?;
        }
        Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
    }
}

fn targets(modules: &[String]) -> Result<Vec<Target>, EngineError> {
    let find = |m: &String| {
        Target::ALL
            .into_iter()
            .find(|t| t.module() == m)
            .ok_or_else(|| weights(format!("unknown target module {m}")))
    };
    let mut all: Vec<Target> = modules.iter().map(find).collect::<Result<_, _>>()?;
    all.sort_by_key(|t| *t as usize);
    all.dedup();
    if all.is_empty() {
        return Err(weights("an adapter without target modules"));
    }
    Ok(all)
}

/// A safetensors file whose tensors are read one after the other into the same memory: a publish waits for it, and fresh memory
/// for the whole file costs several times its reading.
struct TensorFile {
    file: std::fs::File,
    metadata: Metadata,
    start: u64,
    bytes: Vec<u8>,
}

impl TensorFile {
    fn open(path: &Path) -> Result<Self, String> {
        let said = |e: std::io::Error| e.to_string();
        let mut file = std::fs::File::open(path).map_err(said)?;
        let len = file.metadata().map_err(said)?.len();
        let mut word = [0; 8];
        file.read_exact(&mut word)
            .map_err(|_| "shorter than a safetensors header".to_owned())?;
        let header = u64::from_le_bytes(word);
        if header > len - 8 {
            return Err(format!("a header of {header} bytes in a file of {len}"));
        }
        let mut bytes = vec![0; header as usize];
        file.read_exact(&mut bytes).map_err(said)?;
        let metadata: Metadata = serde_json::from_slice(&bytes)
            .map_err(|e| format!("broken safetensors header: {e}"))?;
        let (start, data) = (8 + header, metadata.data_len() as u64);
        if start + data != len {
            return Err(format!(
                "{} bytes of tensors where the header has {data}; the file is cut or damaged",
                len - start
            ));
        }
        Ok(Self {
            file,
            metadata,
            start,
            bytes,
        })
    }

    fn len(&self) -> usize {
        self.metadata.tensors().len()
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
}

fn factor(file: &mut TensorFile, name: &str, shape: [usize; 2]) -> Result<Vec<f32>, String> {
    let tensor = file.tensor(name)?;
    if tensor.shape() != shape {
        return Err(format!(
            "{name} has shape {:?}, this model needs {shape:?}",
            tensor.shape()
        ));
    }
    let values = floats(&tensor).ok_or_else(|| format!("{name} is {:?}", tensor.dtype()))?;
    // One pass without a branch: x · 0 is NaN exactly for what is not finite. In lanes, since a single sum is bound by latency.
    let mut odd = [0.0f32; 16];
    let chunks = values.chunks_exact(odd.len());
    let rest: f32 = chunks.remainder().iter().map(|v| v * 0.0).sum();
    for chunk in chunks {
        odd.iter_mut().zip(chunk).for_each(|(o, v)| *o += v * 0.0);
    }
    if (odd.iter().sum::<f32>() + rest).is_nan() {
        return Err(format!("{name} holds a number that is not finite"));
    }
    Ok(values)
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
