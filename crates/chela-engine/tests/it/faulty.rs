//! An engine with faults that a receipt must notice: it wraps any [`PolicyEngine`] and knows nothing else of it.

use chela_core::{
    BoxFuture, EngineError, EngineInfo, PolicyEngine, PolicyRef, PolicyVersion, Profile, Prompt,
    Sampling, SamplingParams, Scored, Want, Weights,
};
use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

/// What goes wrong.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// Nothing.
    None,
    /// Requests get the base model, although the adapter is in memory.
    Dropped,
    /// The adapter's alpha counts twice.
    ScaledTwice,
    /// This folder is read instead of the one that was named.
    AnothersFolder(PathBuf),
    /// Requests get what was loaded before.
    Stale,
}

/// The wrapper; `scratch` takes files that faults write.
pub struct FaultyEngine {
    inner: Arc<dyn PolicyEngine>,
    fault: Fault,
    scratch: PathBuf,
    /// Latest load and the one before.
    loads: Mutex<(Option<PolicyVersion>, Option<PolicyVersion>)>,
}

impl FaultyEngine {
    pub fn new(inner: Arc<dyn PolicyEngine>, fault: Fault, scratch: &Path) -> Self {
        Self {
            inner,
            fault,
            scratch: scratch.to_path_buf(),
            loads: Mutex::default(),
        }
    }

    fn folder(&self, weights: Weights) -> Weights {
        let Weights::Folder(dir) = &weights;
        match &self.fault {
            Fault::AnothersFolder(other) => Weights::Folder(other.clone()),
            Fault::ScaledTwice => {
                let to = self.scratch.join("twice");
                std::fs::create_dir_all(&to).unwrap();
                let file = "adapter_model.safetensors";
                std::fs::copy(dir.join(file), to.join(file)).unwrap();
                let file = "adapter_config.json";
                let config = std::fs::read(dir.join(file)).unwrap();
                let mut config: serde_json::Value = serde_json::from_slice(&config).unwrap();
                config["lora_alpha"] = (2.0 * config["lora_alpha"].as_f64().unwrap()).into();
                std::fs::write(to.join(file), config.to_string()).unwrap();
                Weights::Folder(to)
            }
            _ => weights,
        }
    }

    fn policy(&self, policy: PolicyRef) -> PolicyRef {
        let before = self.loads.lock().unwrap().1.clone();
        match (&self.fault, &policy) {
            (_, PolicyRef::Base) => policy,
            (Fault::Dropped, _) => PolicyRef::Base,
            (Fault::Stale, _) => before.map_or(PolicyRef::Base, PolicyRef::Version),
            _ => policy,
        }
    }
}

impl PolicyEngine for FaultyEngine {
    fn info(&self) -> EngineInfo {
        self.inner.info()
    }

    fn served(&self, profile: &Profile) -> PolicyVersion {
        self.inner.served(profile)
    }

    fn sample(
        &self,
        policy: PolicyRef,
        prompt: Prompt,
        params: SamplingParams,
    ) -> Result<Sampling, EngineError> {
        self.inner.sample(self.policy(policy), prompt, params)
    }

    fn score(
        &self,
        policy: PolicyRef,
        prompt: Prompt,
        from: usize,
        want: Want,
    ) -> BoxFuture<'static, Result<Scored, EngineError>> {
        self.inner.score(self.policy(policy), prompt, from, want)
    }

    fn load(
        &self,
        version: PolicyVersion,
        weights: Weights,
    ) -> BoxFuture<'static, Result<String, EngineError>> {
        let mut loads = self.loads.lock().unwrap();
        loads.1 = loads.0.replace(version.clone());
        self.inner.load(version, self.folder(weights))
    }

    fn register(&self, version: PolicyVersion, weights: Weights, hash: Option<String>) {
        self.inner.register(version, self.folder(weights), hash);
    }

    fn serve(&self, version: &PolicyVersion) -> Result<(), EngineError> {
        self.inner.serve(version)
    }

    fn unload(&self, version: &PolicyVersion) {
        self.inner.unload(version);
    }

    fn forget_texts(&self, profile: &Profile) {
        self.inner.forget_texts(profile);
    }

    fn health(&self) -> Result<(), String> {
        self.inner.health()
    }
}
