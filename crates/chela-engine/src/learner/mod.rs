//! The learner: gradients of named log-probs into one profile's adapter or its whole model, AdamW, checkpoints. Knows no algorithm.

mod head;
mod trained;
mod value;
mod walk;

pub use self::{
    trained::{Full, Trained},
    value::ValueHead,
};

use self::walk::{Asks, Back, Room};
use crate::{
    adapter::{Adapter, TensorFile, write_synced},
    error::{io, kernel, weights},
    full::Grads,
    packing,
    training::{Pass, Path as TriePath},
    weights::BaseWeights,
};
use chela_core::{
    Checkpoint, EngineError, Learner, OptimParams, Sample, Scored, StepReport, TokenLoss, Want,
};
use chela_kernels::{AdamW, Kernels, Priority};
use chela_model::{TensorName, write_vectors_f32};
use serde::{Deserialize, Serialize};
use std::{
    cell::Cell,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// How a learner runs.
#[derive(Clone, Debug)]
pub struct LearnerOptions {
    /// Name written into PEFT's configuration.
    pub base_model: String,
    /// Rows run together.
    pub rows: usize,
    /// Bytes of activations kept for the way back, of keys and values of a long path among them. Samples that share much are run
    /// together whatever that takes; what does not fit is walked through in steps, and read again on the way back.
    pub activation_bytes: usize,
    /// Keep only each layer's input, and run the layer again on the way back: about a third more work for a small part of the memory.
    pub recompute: bool,
}

/// One profile's adapter, or its whole model, in training.
pub struct LocalLearner<K: Kernels> {
    k: K,
    base: Arc<BaseWeights<K>>,
    options: LearnerOptions,
    trained: Trained<K>,
    value: Option<ValueHead<K::Buf>>,
    grads: Gradient<K::Buf>,
    first: Vec<K::Buf>,
    second: Vec<K::Buf>,
    step: u64,
    running: Arc<AtomicUsize>,
    read: Cell<RowsRead>,
}

/// Rows that a learner read so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowsRead {
    /// Of tries: what samples share counts once.
    pub unique: usize,
    /// Read a second time on the way back, for want of memory.
    pub again: usize,
}

/// What has added up for the next step.
struct Gradient<B> {
    weights: Grads<B>,
    value: Option<ValueHead<B>>,
}

impl<B> Default for Gradient<B> {
    fn default() -> Self {
        Self {
            weights: Grads::default(),
            value: None,
        }
    }
}

impl<B> Gradient<B> {
    /// All buffers, the value head's last.
    fn buffers(&self) -> Vec<&B> {
        let value = self.value.iter().flat_map(ValueHead::buffers);
        self.weights.buffers().into_iter().chain(value).collect()
    }

    /// As [`Gradient::buffers`].
    fn buffers_mut(&mut self) -> Vec<&mut B> {
        let value = self.value.iter_mut().flat_map(ValueHead::buffers_mut);
        let weights = self.weights.buffers_mut().into_iter();
        weights.chain(value).collect()
    }
}

#[derive(Serialize, Deserialize)]
struct State {
    step: u64,
    /// What it was trained from. (PEFT's configuration says it too, a model's does not.)
    #[serde(default)]
    base_model: String,
}

/// Counts a learner at work, so that the engine leaves it its share.
struct Running(Arc<AtomicUsize>);

impl Running {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count.clone())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<K: Kernels> LocalLearner<K> {
    /// Moments start at zero.
    pub fn new(
        k: &K,
        base: Arc<BaseWeights<K>>,
        (trained, value): (Trained<K>, Option<ValueHead<K::Buf>>),
        options: LearnerOptions,
        running: Arc<AtomicUsize>,
    ) -> Result<Self, EngineError> {
        let k = k.with_priority(Priority::Train);
        let hidden = base.config.hidden;
        let zero = value.as_ref().map(|_| ValueHead::zeros(&k, hidden));
        let grads = Gradient {
            weights: trained.grads(&k)?,
            value: zero.transpose()?,
        };
        let zeros = || {
            let like = grads.buffers().into_iter();
            let zeros = like.map(|buf| k.zeros(k.len(buf)).map_err(kernel));
            zeros.collect::<Result<Vec<_>, _>>()
        };
        let (first, second) = (zeros()?, zeros()?);
        Ok(Self {
            k,
            base,
            options,
            trained,
            value,
            grads,
            first,
            second,
            step: 0,
            running,
            read: Cell::default(),
        })
    }

    /// Reads moments and step beside the adapter; a checkpoint whose optimizer was cleaned away starts with fresh moments.
    pub fn resume(&mut self, dir: &Path) -> Result<(), EngineError> {
        let path = dir.join("optimizer.safetensors");
        if !path.exists() {
            tracing::warn!(dir = %dir.display(), "no optimizer state in this checkpoint; moments start at zero");
            return Ok(());
        }
        let refuse = |why| weights(format!("{}: {why}", path.display()));
        let mut file = TensorFile::open(&path).map_err(refuse)?;
        // A value head that begins now has no moments there.
        let begins = self.value.is_some() && !ValueHead::<K::Buf>::is_in(dir);
        let kept = self.first.len() - if begins { 2 } else { 0 };
        for (name, moments) in [("first", &mut self.first), ("second", &mut self.second)] {
            for (i, buffer) in moments[..kept].iter_mut().enumerate() {
                let shape = [self.k.len(buffer)];
                let values = file.values(&format!("{name}.{i}"), &shape);
                let values = values.map_err(refuse)?;
                self.k.write(buffer, 0, &values).map_err(kernel)?;
            }
        }
        let path = dir.join("state.json");
        let text = std::fs::read_to_string(&path).map_err(|e| io(&path, e))?;
        let state: State = serde_json::from_str(&text).map_err(|e| io(&path, e))?;
        self.step = state.step;
        Ok(())
    }

    /// What it read so far.
    pub fn rows_read(&self) -> RowsRead {
        self.read.get()
    }

    /// Present gradients of an adapter, for tests: `(layer, module, dA [r, in], dB [out, r])`.
    #[allow(clippy::type_complexity)] // one row of a test's table
    pub fn gradients(&self) -> Result<Vec<(usize, &'static str, Vec<f32>, Vec<f32>)>, EngineError> {
        let Grads::Adapter(grads) = &self.grads.weights else {
            return Ok(Vec::new());
        };
        grads
            .entries()
            .map(|(layer, target, lora)| {
                let a = self.k.download(&lora.a).map_err(kernel)?;
                let b = self.k.download(&lora.b).map_err(kernel)?;
                Ok((layer, target.module(), a, b))
            })
            .collect()
    }

    /// Present gradients of a whole model, for tests.
    pub fn full_gradients(&self) -> Result<Vec<(TensorName, Vec<f32>)>, EngineError> {
        let Grads::Full(grads) = &self.grads.weights else {
            return Ok(Vec::new());
        };
        let all = grads.names().iter().zip(grads.buffers());
        all.map(|(name, buf)| Ok((*name, self.k.download(buf).map_err(kernel)?)))
            .collect()
    }

    /// Present gradients of a value head, for tests: w's `[H]`, then b's.
    pub fn value_gradients(&self) -> Result<Vec<f32>, EngineError> {
        let both = self.grads.value.iter().flat_map(ValueHead::buffers);
        let both = both.map(|buf| self.k.download(buf).map_err(kernel));
        Ok(both.collect::<Result<Vec<_>, _>>()?.concat())
    }

    /// How a trie of `rows` rows and its longest path are held.
    fn room(&self, rows: usize, depth: usize) -> Result<Room, EngineError> {
        let row = Pass::row_bytes(&self.base, self.options.recompute);
        let path = TriePath::row_bytes(&self.base);
        let bytes = self.options.activation_bytes;
        Room::new(bytes, (rows, depth), (row, path), self.options.rows).map_err(|needs| {
            EngineError::Memory(format!(
                "training on a sample of {} tokens needs {} MiB for activations and there are {} MiB",
                depth + 1,
                needs.div_ceil(1 << 20),
                bytes >> 20
            ))
        })
    }

    fn check(&self, batch: &[Sample]) -> Result<(), EngineError> {
        let c = &self.base.config;
        for sample in batch {
            let n = sample.tokens().len();
            if n > c.context_length {
                return Err(EngineError::ContextLength {
                    prompt: n,
                    context: c.context_length,
                });
            }
            self.room(n - 1, n - 1)?;
            let named = sample.candidates().map_or(&[][..], |c| c.ids());
            if let Some(id) = sample
                .tokens()
                .iter()
                .chain(named)
                .find(|t| **t as usize >= c.vocab)
            {
                return Err(EngineError::Token(*id, c.vocab));
            }
        }
        Ok(())
    }

    fn grad_norm(&self) -> Result<f64, EngineError> {
        let mut sum = 0.0;
        for buffer in self.grads.buffers() {
            sum += self
                .k
                .sum_squares(self.k.len(buffer), buffer)
                .map_err(kernel)?;
        }
        Ok(sum.sqrt())
    }

    fn clear(&mut self) -> Result<(), EngineError> {
        let k = self.k.clone();
        for buffer in self.grads.buffers_mut() {
            k.fill(k.len(buffer), 0.0, buffer).map_err(kernel)?;
        }
        Ok(())
    }

    /// What a model with an adapter gives for each sample.
    fn read(
        &self,
        model: (&BaseWeights<K>, &Adapter<K::Buf>),
        value: Option<&ValueHead<K::Buf>>,
        batch: &[Sample],
        want: Want,
    ) -> Result<Vec<Scored>, EngineError> {
        self.check(batch)?;
        let _running = Running::new(&self.running);
        let want = chela_kernels::Want {
            entropy: want.entropy,
            top_k: want.top_k,
        };
        let mut all = Vec::with_capacity(batch.len());
        for of in packing::blocks(batch, self.options.rows) {
            let samples: Vec<&Sample> = of.iter().map(|i| &batch[*i]).collect();
            let scored = self.walk(model, &samples, Asks { want, value }, None)?;
            all.extend(of.into_iter().zip(scored));
        }
        all.sort_by_key(|(index, _)| *index);
        Ok(all.into_iter().map(|(_, scored)| scored).collect())
    }

    fn block_backward(
        &self,
        batch: &[Sample],
        of: &[usize],
        loss: &mut dyn FnMut(usize, &Sample, &Scored) -> TokenLoss,
        grads: &mut Gradient<K::Buf>,
    ) -> Result<(), EngineError> {
        let model = self.trained.present(&self.base)?;
        let samples: Vec<&Sample> = of.iter().map(|i| &batch[*i]).collect();
        let want = chela_kernels::Want {
            entropy: true,
            top_k: 0,
        };
        let value = self.value.as_ref();
        let back = Back { of, loss, grads };
        self.walk(model, &samples, Asks { want, value }, Some(back))
            .map(|_| ())
    }
}

impl<K: Kernels> Learner for LocalLearner<K> {
    fn takes(&self, sample: &Sample) -> Result<(), EngineError> {
        self.check(std::slice::from_ref(sample))
    }

    fn forward(&mut self, batch: &[Sample], want: Want) -> Result<Vec<Scored>, EngineError> {
        let model = self.trained.present(&self.base)?;
        self.read(model, self.value.as_ref(), batch, want)
    }

    fn forward_base(&mut self, batch: &[Sample], want: Want) -> Result<Vec<Scored>, EngineError> {
        let layers = self.base.layers.iter().map(|_| Default::default());
        let none = Adapter {
            rank: 1,
            alpha: 1.0,
            layers: layers.collect(),
        };
        self.read((&self.base, &none), None, batch, want)
    }

    fn forward_backward(
        &mut self,
        batch: &[Sample],
        loss: &mut dyn FnMut(usize, &Sample, &Scored) -> TokenLoss,
    ) -> Result<(), EngineError> {
        self.check(batch)?;
        let _running = Running::new(&self.running);
        for of in packing::blocks(batch, self.options.rows) {
            let mut grads = std::mem::take(&mut self.grads);
            let added = self.block_backward(batch, &of, loss, &mut grads);
            self.grads = grads;
            if let Err(error) = added {
                self.clear()?; // half a batch must not reach a later step
                return Err(error);
            }
        }
        Ok(())
    }

    fn optim_step(&mut self, params: &OptimParams) -> Result<StepReport, EngineError> {
        let _running = Running::new(&self.running);
        let norm = self.grad_norm()?;
        if !norm.is_finite() {
            self.clear()?;
            return Ok(StepReport {
                grad_norm: norm as f32,
                skipped: true,
                step: self.step,
            });
        }
        let clip = f64::from(params.clip);
        let grad_scale = if clip > 0.0 && norm > clip {
            (clip / norm) as f32
        } else {
            1.0
        };
        self.step += 1;
        let adamw = AdamW {
            lr: params.lr,
            beta1: params.beta1,
            beta2: params.beta2,
            eps: params.eps,
            weight_decay: params.weight_decay,
            step: self.step,
            grad_scale,
        };
        let k = self.k.clone();
        let moments = self.first.iter_mut().zip(&mut self.second);
        let grads = self.grads.buffers().into_iter().zip(moments);
        let value = self.value.iter_mut().flat_map(ValueHead::buffers_mut);
        let value = value.zip([true, false]); // a bias does not decay
        let params = self.trained.params_mut().into_iter().chain(value);
        for ((param, decays), (grad, (first, second))) in params.zip(grads) {
            let adamw = AdamW {
                weight_decay: if decays { adamw.weight_decay } else { 0.0 },
                ..adamw
            };
            k.adamw(param, grad, first, second, adamw).map_err(kernel)?;
        }
        self.trained.refresh(&k)?;
        self.clear()?;
        Ok(StepReport {
            grad_norm: norm as f32,
            skipped: false,
            step: self.step,
        })
    }

    fn weights_hash(&self) -> Result<String, EngineError> {
        self.trained.hash(&self.k)
    }

    fn save(&self, dir: &Path) -> Result<Checkpoint, EngineError> {
        if dir.exists() {
            return Err(io(dir, "a checkpoint is already there"));
        }
        let temporary = PathBuf::from(format!("{}.tmp", dir.display()));
        if temporary.exists() {
            std::fs::remove_dir_all(&temporary).map_err(|e| io(&temporary, e))?;
        }
        std::fs::create_dir_all(&temporary).map_err(|e| io(&temporary, e))?;
        self.trained
            .write(&self.k, &self.options.base_model, &temporary)?;
        if let Some(value) = &self.value {
            value.write(&self.k, &temporary)?;
        }
        let moments: Vec<(String, &K::Buf)> = [("first", &self.first), ("second", &self.second)]
            .into_iter()
            .flat_map(|(name, all)| {
                let numbered = all.iter().enumerate();
                numbered.map(move |(i, buf)| (format!("{name}.{i}"), buf))
            })
            .collect();
        let table = moments.iter().map(|(n, buf)| (n.clone(), self.k.len(buf)));
        let table: Vec<_> = table.collect();
        let path = temporary.join("optimizer.safetensors");
        write_vectors_f32(&path, &table, &mut |i| {
            self.k.download(moments[i].1).map_err(|e| e.to_string())
        })
        .map_err(|e| EngineError::Io(e.to_string()))?;
        let state = State {
            step: self.step,
            base_model: self.options.base_model.clone(),
        };
        let state = serde_json::to_vec(&state).map_err(weights)?;
        write_synced(&temporary.join("state.json"), &state)?;
        sync_dir(&temporary)?;
        std::fs::rename(&temporary, dir).map_err(|e| io(dir, e))?;
        if let Some(parent) = dir.parent() {
            sync_dir(parent)?;
        }
        Ok(Checkpoint {
            dir: dir.to_path_buf(),
            step: self.step,
        })
    }
}

fn sync_dir(dir: &Path) -> Result<(), EngineError> {
    let sync = || std::fs::File::open(dir)?.sync_all();
    sync().map_err(|e| io(dir, e))
}
