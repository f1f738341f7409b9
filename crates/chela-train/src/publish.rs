//! From a committed step to what users get: load, compare what the engine holds with what the learner trained, look at it, swap the
//! pointer, and compare once more through it.

use crate::{
    TrainError,
    config::TrainConfig,
    gate::{Gate, Remembered, unscored},
};
use chela_core::{
    Event, GateReport, Learner, Millis, PolicyEngine, PolicyRef, PolicyVersion, Priority, Prompt,
    Receipt, SamplingParams, TrajectoryStore, VersionRecord, VersionState, Want, Weights,
    registry::{self, Steering},
};
use futures_executor::block_on;
use futures_util::StreamExt;
use std::{path::PathBuf, sync::atomic::AtomicBool};

/// How reasons of the program's own begin, so that they are told from an operator's.
pub const BY_ITSELF: &str = "by itself: ";

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
    /// What time it is.
    pub now: Millis,
    /// The program is to end.
    pub stop: &'a AtomicBool,
    /// Held while what is served changes.
    pub steering: &'a Steering,
}

/// What a publish came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// New requests get it.
    Served,
    /// What was served before is still served; why.
    Rejected {
        /// As the version's state says it.
        why: String,
        /// As its samples' state says it: `gate failed`, `receipt mismatch`.
        short: &'static str,
    },
}

impl Publisher<'_> {
    /// The folder of a version's files.
    pub fn dir(&self, record: &VersionRecord) -> PathBuf {
        let name = record.checkpoint.clone();
        let name = name.unwrap_or_else(|| checkpoint_name(&record.version));
        self.config.data_dir.join(name)
    }

    /// Publishes a candidate, or rejects it with the reason; what it found is recorded either way.
    pub fn publish(
        &self,
        record: &VersionRecord,
        learner: &mut dyn Learner,
        known: &mut Remembered,
    ) -> Result<Outcome, TrainError> {
        let version = &record.version;
        let before = self.engine.served(&version.profile);
        let (receipt, mismatch) = self.receipt(record, learner)?;
        if let Some(why) = mismatch {
            return self.reject(version, Some(receipt), why, "receipt mismatch");
        }
        if let Some(why) = self.gate((version, &before), learner, known)? {
            return self.reject(version, Some(receipt), why, "gate failed");
        }
        let _one_at_a_time = block_on(self.steering.lock());
        // Looking took a while: an operator may have gone back, or something was forgotten.
        let versions = self.store.versions(&version.profile)?;
        if registry::unfinished(&versions).is_none_or(|v| v.version != *version) {
            let why = "another version was put in its parent's place meanwhile".to_owned();
            return self.reject(version, Some(receipt), why, "left behind");
        }
        let before = PolicyVersion {
            profile: version.profile.clone(),
            number: registry::served_number(&versions),
        };
        // Recorded first: after a crash in between, the version is served at start.
        let canary = receipt.learner_canary.clone();
        self.record(version, VersionState::Served, Some(receipt))?;
        self.engine.serve(version)?;
        if let Some(why) = self.behind_the_pointer(version, &canary)? {
            self.back(version, &before, format!("{BY_ITSELF}{why}"))?;
            self.append(vec![Event::Unlearnt {
                version: version.clone(),
                why: "receipt mismatch".to_owned(),
            }])?;
            return Ok(Outcome::Rejected {
                why: "what is served is not what was published".to_owned(),
                short: "receipt mismatch",
            });
        }
        tracing::info!(%version, "serving");
        Ok(Outcome::Served)
    }

    /// What the engine holds, and why that is not what was trained, if so.
    fn receipt(
        &self,
        record: &VersionRecord,
        learner: &mut dyn Learner,
    ) -> Result<(Receipt, Option<String>), TrainError> {
        let version = &record.version;
        let load = self
            .engine
            .load(version.clone(), Weights::Folder(self.dir(record)));
        let weights_hash = block_on(load)?;
        let trained = learner.weights_hash()?;
        let policy = PolicyRef::Version(version.clone());
        let engine_canary = self.canary(policy.clone(), 1)?;
        let learner_canary = self.learner_canary(version, learner)?;
        let gap = mean_gap(&engine_canary, &learner_canary)
            .max(self.cached_gap(policy, &learner_canary)?);
        let mismatch = if weights_hash != trained {
            Some(format!(
                "the engine's weights are not the trained ones: it holds {weights_hash}, the learner {trained}"
            ))
        } else if gap > self.config.canary_tolerance || !gap.is_finite() {
            Some(format!(
                "the engine does not use the trained weights: canary log-probs differ by {gap:.4} nats a token"
            ))
        } else {
            None
        };
        let receipt = Receipt {
            weights_hash,
            engine_canary,
            learner_canary,
        };
        Ok((receipt, mismatch))
    }

    /// Looks at a candidate; the reason when it must not serve.
    fn gate(
        &self,
        (version, before): (&PolicyVersion, &PolicyVersion),
        learner: &mut dyn Learner,
        known: &mut Remembered,
    ) -> Result<Option<String>, TrainError> {
        let config = &self.config.gate;
        if !config.on {
            return Ok(None);
        }
        let started = std::time::Instant::now();
        let (held_out, _) = self.store.held_out(&version.profile, 4 * config.turns)?;
        let mut gate = Gate {
            engine: self.engine,
            learner,
            candidate: version.clone(),
            config,
            known,
            stop: self.stop,
        };
        let report = GateReport {
            checks: gate.look(before, &held_out)?,
            seconds: started.elapsed().as_secs_f64(),
            at: self.now,
        };
        let failed: Vec<String> = report
            .checks
            .iter()
            .filter(|c| !c.passed)
            .map(|c| format!("{} is {:.3}, limit {:.3}", c.name, c.value, c.limit))
            .collect();
        tracing::info!(%version, seconds = report.seconds, passed = failed.is_empty(), "gate");
        self.append(vec![Event::Gate {
            version: version.clone(),
            report,
        }])?;
        Ok((!failed.is_empty()).then(|| format!("gate: {}", failed.join("; "))))
    }

    fn reject(
        &self,
        version: &PolicyVersion,
        receipt: Option<Receipt>,
        why: String,
        short: &'static str,
    ) -> Result<Outcome, TrainError> {
        tracing::error!(%version, "rejected: {why}");
        self.engine.unload(version);
        self.append(vec![
            self.state(version, VersionState::Rejected(why.clone()), receipt),
            Event::Unlearnt {
                version: version.clone(),
                why: short.to_owned(),
            },
        ])?;
        Ok(Outcome::Rejected { why, short })
    }

    /// The canary through the profile's pointer, as users' requests go; the reason when that is not what was published.
    fn behind_the_pointer(
        &self,
        version: &PolicyVersion,
        canary: &[f32],
    ) -> Result<Option<String>, TrainError> {
        let served = self.engine.served(&version.profile);
        if served != *version {
            return Ok(Some(format!(
                "the engine serves {served} after it was told to serve {version}"
            )));
        }
        let now = self.canary(PolicyRef::Served(version.profile.clone()), 1)?;
        let gap = mean_gap(&now, canary);
        Ok((gap > self.config.canary_tolerance || !gap.is_finite())
            .then(|| format!("requests are not answered with the trained weights: canary log-probs differ by {gap:.4} nats a token")))
    }

    /// Takes a version back that is served; the caller holds the steering.
    pub fn back(
        &self,
        version: &PolicyVersion,
        to: &PolicyVersion,
        why: String,
    ) -> Result<(), TrainError> {
        tracing::error!(%version, %to, "taken back: {why}");
        self.engine.serve(to)?;
        // `Served` first: it makes the one left merely superseded.
        self.append(vec![
            self.state(to, VersionState::Served, None),
            self.state(version, VersionState::RolledBack(why), None),
        ])
    }

    /// A change of state, now.
    pub fn state(
        &self,
        version: &PolicyVersion,
        state: VersionState,
        receipt: Option<Receipt>,
    ) -> Event {
        Event::Version {
            version: version.clone(),
            state,
            receipt,
            at: self.now,
        }
    }

    fn record(
        &self,
        version: &PolicyVersion,
        state: VersionState,
        receipt: Option<Receipt>,
    ) -> Result<(), TrainError> {
        self.append(vec![self.state(version, state, receipt)])
    }

    fn append(&self, events: Vec<Event>) -> Result<(), TrainError> {
        Ok(block_on(self.store.append(events))?)
    }

    fn canary(&self, policy: PolicyRef, from: usize) -> Result<Vec<f32>, TrainError> {
        let prompt = Prompt {
            tokens: self.config.canary.clone(),
        };
        let want = Want {
            priority: Priority::Train,
            ..Want::default()
        };
        Ok(block_on(self.engine.score(policy, prompt, from, want))?.logprobs)
    }

    /// The same text's second half behind whatever the engine keeps of its first: keys and values that other weights made would
    /// show. The reply that is then asked for leaves such for the next publish.
    fn cached_gap(&self, policy: PolicyRef, canary: &[f32]) -> Result<f32, TrainError> {
        let half = (self.config.canary.len() / 2).max(1);
        let second = self.canary(policy.clone(), half)?;
        let gap = mean_gap(&second, canary.get(half - 1..).unwrap_or_default());
        let params = SamplingParams {
            max_tokens: 1,
            priority: Priority::Train,
            ..SamplingParams::default()
        };
        let prompt = Prompt {
            tokens: self.config.canary.clone(),
        };
        let mut reply = self.engine.sample(policy, prompt, params)?;
        while let Some(event) = block_on(reply.next()) {
            event?;
        }
        Ok(gap)
    }

    fn learner_canary(
        &self,
        version: &PolicyVersion,
        learner: &mut dyn Learner,
    ) -> Result<Vec<f32>, TrainError> {
        let sample = unscored(&self.config.canary, 1, version)?;
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
