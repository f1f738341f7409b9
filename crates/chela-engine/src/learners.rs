//! Opening learners over the engine's weights: one for a profile at a time.

use crate::{
    adapter::Adapter,
    engine::LocalEngine,
    learner::{LearnerOptions, LocalLearner},
};
use chela_core::{
    AdapterSpec, Checkpoint, EngineError, Learner, Learners, OptimParams, PolicyEngine, Profile,
    Sample, Scored, StepReport, TokenLoss, Want,
};
use chela_kernels::Cpu;
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
        format!("{}; trie of {rows} rows or {bytes} bytes", self.k.path())
    }
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
        let config = &self.base.config;
        let adapter = match from {
            Some(checkpoint) => Adapter::read(&self.k, config, &checkpoint.dir)?,
            None => Adapter::fresh(&self.k, config, spec)?,
        };
        let options = LearnerOptions {
            base_model: self.info().model,
            rows: self.options.train_rows,
            activation_bytes: self.options.activation_bytes,
            recompute,
        };
        let mut learner = LocalLearner::new(
            &self.k,
            self.base.clone(),
            adapter,
            options,
            self.training.clone(),
        )?;
        if let Some(checkpoint) = from {
            learner.resume(&checkpoint.dir)?;
        }
        Ok(learner)
    }
}
