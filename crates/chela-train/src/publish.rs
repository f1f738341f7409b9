//! From a committed step to what users get: load, compare engine and learner on a canary text, then swap the pointer.

use crate::{TrainError, config::TrainConfig};
use chela_core::{
    Event, Learner, PolicyEngine, PolicyRef, PolicyVersion, Priority, Prompt, Receipt, Sample,
    SampleColumns, TrajectoryStore, VersionRecord, VersionState, Want, Weights,
};
use futures_executor::block_on;
use std::path::PathBuf;

/// Where a version's files lie, relative to the data folder.
pub fn checkpoint_name(version: &PolicyVersion) -> String {
    format!("adapters/{}/{:08}", version.profile, version.number)
}

/// What a publish works with.
pub struct Publisher<'a> {
    /// Serves.
    pub engine: &'a dyn PolicyEngine,
    /// Records.
    pub store: &'a dyn TrajectoryStore,
    /// Says how.
    pub config: &'a TrainConfig,
}

impl Publisher<'_> {
    /// Loads a version from its checkpoint. Returns the hash of what the engine holds.
    pub fn load(&self, record: &VersionRecord) -> Result<String, TrainError> {
        let name = record
            .checkpoint
            .clone()
            .unwrap_or_else(|| checkpoint_name(&record.version));
        let dir: PathBuf = self.config.data_dir.join(name);
        Ok(block_on(
            self.engine
                .load(record.version.clone(), Weights::Adapter(dir)),
        )?)
    }

    /// Publishes a candidate: loads it, takes the receipt and serves it, or rejects it with the reason. `Ok(false)` = rejected:
    /// what was served before is still served.
    pub fn publish(
        &self,
        record: &VersionRecord,
        learner: &mut dyn Learner,
    ) -> Result<bool, TrainError> {
        let weights_hash = self.load(record)?;
        let engine_canary = self.engine_canary(&record.version)?;
        let learner_canary = self.learner_canary(&record.version, learner)?;
        let gap = mean_gap(&engine_canary, &learner_canary);
        let receipt = Some(Receipt {
            weights_hash,
            engine_canary,
            learner_canary,
        });
        let version = record.version.clone();
        if gap > self.config.canary_tolerance || !gap.is_finite() {
            let why = format!(
                "the engine's weights are not the trained ones: canary log-probs differ by {gap:.4} nats a token"
            );
            tracing::error!(%version, "{why}");
            self.engine.unload(&version);
            self.append(Event::Version {
                version,
                state: VersionState::Rejected(why),
                receipt,
            })?;
            return Ok(false);
        }
        // Recorded first: after a crash in between, the version is served at start.
        let state = VersionState::Served;
        self.append(Event::Version {
            version: version.clone(),
            state,
            receipt,
        })?;
        self.engine.serve(&version)?;
        tracing::info!(%version, canary_gap = gap, "serving");
        Ok(true)
    }

    fn append(&self, event: Event) -> Result<(), TrainError> {
        Ok(block_on(self.store.append(vec![event]))?)
    }

    fn engine_canary(&self, version: &PolicyVersion) -> Result<Vec<f32>, TrainError> {
        let prompt = Prompt {
            tokens: self.config.canary.clone(),
        };
        let want = Want {
            priority: Priority::Train,
            ..Want::default()
        };
        let policy = PolicyRef::Version(version.clone());
        Ok(block_on(self.engine.score(policy, prompt, 1, want))?.logprobs)
    }

    fn learner_canary(
        &self,
        version: &PolicyVersion,
        learner: &mut dyn Learner,
    ) -> Result<Vec<f32>, TrainError> {
        let tokens = self.config.canary.clone();
        let n = tokens.len().saturating_sub(1);
        let columns = SampleColumns {
            mask: vec![false; n],
            behavior_logprobs: vec![0.0; n],
            advantages: vec![0.0; n],
        };
        let sample = Sample::new(tokens, 1, columns, 1.0, version.clone())?;
        let want = Want {
            priority: Priority::Train,
            ..Want::default()
        };
        let scored = learner.forward(std::slice::from_ref(&sample), want)?;
        Ok(scored
            .into_iter()
            .next()
            .map(|s| s.logprobs)
            .unwrap_or_default())
    }
}

/// Mean absolute difference; infinite when the lengths differ or nothing was compared.
pub fn mean_gap(a: &[f32], b: &[f32]) -> f32 {
    if a.len() != b.len() || a.is_empty() {
        return f32::INFINITY;
    }
    a.iter().zip(b).map(|(x, y)| (x - y).abs()).sum::<f32>() / a.len() as f32
}
