//! Opening learners over the engine's weights: one for a profile at a time.

use crate::{
    adapter::Adapter,
    engine::LocalEngine,
    error::weights,
    full::Tensors,
    learner::{Full, LearnerOptions, LocalLearner, Trained, ValueHead},
    memory, version,
    weights::BaseWeights,
};
use chela_core::{
    AdapterSpec, Checkpoint, EngineError, Learner, Learners, OptimParams, PolicyEngine, Profile,
    Sample, Scored, StepReport, TokenLoss, Want, Weights,
};
use chela_kernels::{Cpu, Kernels};
use chela_model::{FolderTexts, Model};
use std::{
    collections::HashSet,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

/// Profiles with an open learner.
pub type Learning = Arc<Mutex<HashSet<Profile>>>;

/// A profile's place among [`Learning`], given up when dropped.
struct Claim {
    profile: Profile,
    learning: Learning,
}

impl Claim {
    fn new(profile: &Profile, learning: &Learning) -> Result<Self, EngineError> {
        let fresh = learning
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(profile.clone());
        if !fresh {
            return Err(EngineError::Shape(format!(
                "a learner of {profile} is already open"
            )));
        }
        Ok(Self {
            profile: profile.clone(),
            learning: learning.clone(),
        })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut learning = self.learning.lock().unwrap_or_else(PoisonError::into_inner);
        learning.remove(&self.profile);
    }
}

/// A learner that holds its profile's place.
struct Claimed {
    learner: LocalLearner<Cpu>,
    _claim: Claim,
}

impl Learner for Claimed {
    fn takes(&self, sample: &Sample) -> Result<(), EngineError> {
        self.learner.takes(sample)
    }

    fn forward(&mut self, batch: &[Sample], want: Want) -> Result<Vec<Scored>, EngineError> {
        self.learner.forward(batch, want)
    }

    fn forward_base(&mut self, batch: &[Sample], want: Want) -> Result<Vec<Scored>, EngineError> {
        self.learner.forward_base(batch, want)
    }

    fn forward_backward(
        &mut self,
        batch: &[Sample],
        loss: &mut dyn FnMut(usize, &Sample, &Scored) -> TokenLoss,
    ) -> Result<(), EngineError> {
        self.learner.forward_backward(batch, loss)
    }

    fn optim_step(&mut self, params: &OptimParams) -> Result<StepReport, EngineError> {
        self.learner.optim_step(params)
    }

    fn weights_hash(&self) -> Result<String, EngineError> {
        self.learner.weights_hash()
    }

    fn save(&self, dir: &Path) -> Result<Checkpoint, EngineError> {
        self.learner.save(dir)
    }
}

impl Learners for LocalEngine {
    fn open(
        &self,
        profile: &Profile,
        spec: &AdapterSpec,
        from: Option<&Checkpoint>,
    ) -> Result<Box<dyn Learner>, EngineError> {
        let claim = Claim::new(profile, &self.learning)?;
        let learner = self.learner(spec, from)?;
        Ok(Box::new(Claimed {
            learner,
            _claim: claim,
        }))
    }

    /// Neither the number of threads nor what runs beside a step changes its bits (`tests/it/replay.rs`); the rows that a learner
    /// runs together do, since sums over rows are cut there.
    fn kernel_path(&self) -> String {
        let (rows, bytes) = (self.options.train_rows, self.options.activation_bytes);
        let how = if self.options.recompute {
            ", layers run again"
        } else {
            ""
        };
        format!(
            "{}; trie of {rows} rows or {bytes} bytes{how}",
            self.k.path()
        )
    }
}

/// Refuses to train all weights of a model that is quantised, or too large for this machine.
pub fn whole_is_possible(
    k: &Cpu,
    base: &BaseWeights<Cpu>,
    machine: Option<usize>,
) -> Result<(), EngineError> {
    if let Some(dtype) = base.quantised(k) {
        return Err(weights(format!(
            "this model has matrices in {}, and all weights can be trained only from F32, F16 or BF16: open the model in one of these \
             types, or set learning.weights = \"lora\", which trains beside quantised weights",
            dtype.name()
        )));
    }
    memory::room_for_whole(machine, base.bytes(k), &base.config)
}

impl LocalEngine {
    /// As [`Learners::open`], not boxed.
    pub fn learner(
        &self,
        spec: &AdapterSpec,
        from: Option<&Checkpoint>,
    ) -> Result<LocalLearner<Cpu>, EngineError> {
        self.learner_that(self.options.recompute, spec, from)
    }

    /// The same, told whether to run layers again instead of keeping their activations.
    pub(crate) fn learner_that(
        &self,
        recompute: bool,
        spec: &AdapterSpec,
        from: Option<&Checkpoint>,
    ) -> Result<LocalLearner<Cpu>, EngineError> {
        let trained = if spec.whole {
            Trained::Full(Box::new(self.whole(from)?))
        } else {
            Trained::Adapter(self.adapter(spec, from)?)
        };
        let hidden = self.base.config.hidden;
        let value = spec.value_head.then(|| match from {
            Some(checkpoint) => ValueHead::read(&self.k, hidden, &checkpoint.dir),
            None => ValueHead::zeros(&self.k, hidden),
        });
        let options = LearnerOptions {
            base_model: self.info().model,
            rows: self.options.train_rows,
            activation_bytes: self.options.activation_bytes,
            recompute,
        };
        let mut learner = LocalLearner::new(
            &self.k,
            self.base.clone(),
            (trained, value.transpose()?),
            options,
            self.training.clone(),
        )?;
        // The moments of an adapter say nothing of the weights it was merged into.
        if let Some(checkpoint) = from
            && spec.whole == Weights::is_whole(&checkpoint.dir)
        {
            learner.resume(&checkpoint.dir)?;
        }
        Ok(learner)
    }

    fn adapter(
        &self,
        spec: &AdapterSpec,
        from: Option<&Checkpoint>,
    ) -> Result<Adapter<<Cpu as Kernels>::Buf>, EngineError> {
        let config = &self.base.config;
        match from {
            None => Adapter::fresh(&self.k, config, spec),
            Some(checkpoint) if Weights::is_whole(&checkpoint.dir) => Err(weights(format!(
                "{} is a whole model, and LoRA trains an adapter beside the base model: set learning.weights = \"full\" to go on from \
                 it, or roll the profile back to a version with an adapter, or to the base model",
                checkpoint.dir.display()
            ))),
            Some(checkpoint) => Adapter::read(&self.k, config, &checkpoint.dir),
        }
    }

    /// All weights: the base model's, a checkpoint's, or those of both when the checkpoint is an adapter.
    fn whole(&self, from: Option<&Checkpoint>) -> Result<Full<Cpu>, EngineError> {
        let (k, base) = (&self.k, &*self.base);
        whole_is_possible(k, base, self.memory().machine)?;
        let texts = Model::open_text(&self.files).and_then(|model| FolderTexts::of(&model));
        let texts = texts.map_err(|e| {
            weights(format!(
                "all weights are trained into a folder of their own, which needs the model's tokenizer and configuration: {e}"
            ))
        })?;
        let master = match from {
            None => Tensors::of(k, base)?,
            Some(checkpoint) if Weights::is_whole(&checkpoint.dir) => {
                let model = version::read_whole(k, base, &checkpoint.dir, &mut || {})?;
                Tensors::of(k, &model)?
            }
            Some(checkpoint) => {
                let mut merged = Tensors::of(k, base)?;
                merged.merge(k, &Adapter::read(k, &base.config, &checkpoint.dir)?)?;
                merged
            }
        };
        Full::new(k, base, master, texts)
    }
}
