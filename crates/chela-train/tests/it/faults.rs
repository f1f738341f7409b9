//! Engines that do not hold, or do not use, what was trained: none of it is served.

use super::*;
use chela_core::{
    BoxFuture, EngineInfo, PolicyRef, Prompt, Sampling, SamplingParams, Scored, Want, Weights,
};
use std::sync::Mutex;

/// What goes wrong with an adapter.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// Requests are answered by the base model.
    Dropped,
    /// Its effect counts twice.
    ScaledTwice,
    /// Another profile's is loaded in its place.
    AnotherProfiles,
    /// Texts are scored with what was loaded before.
    StaleCache,
    /// Whoever asks for what is served gets the version before.
    PointerNotMoved,
}

/// A [`FakeEngine`] with a fault.
struct Faulty {
    inner: FakeEngine,
    fault: Fault,
    other: std::path::PathBuf,
    before: Mutex<Option<PolicyVersion>>,
}

impl Faulty {
    fn policy(&self, policy: PolicyRef) -> PolicyRef {
        match (self.fault, policy) {
            (Fault::Dropped, PolicyRef::Version(_)) => PolicyRef::Base,
            (Fault::StaleCache, PolicyRef::Version(v)) => {
                let before = self.before.lock().unwrap().clone();
                PolicyRef::Version(before.unwrap_or(v))
            }
            (Fault::PointerNotMoved, PolicyRef::Served(_)) => PolicyRef::Base,
            (_, policy) => policy,
        }
    }
}

impl PolicyEngine for Faulty {
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
        // Only what is behind a kept beginning is stale.
        if self.fault == Fault::StaleCache && from == 1 {
            return self.inner.score(policy, prompt, from, want);
        }
        self.inner.score(self.policy(policy), prompt, from, want)
    }

    fn load(
        &self,
        version: PolicyVersion,
        weights: Weights,
    ) -> BoxFuture<'static, Result<String, EngineError>> {
        let Weights::Folder(dir) = weights;
        let dir = match self.fault {
            Fault::AnotherProfiles => self.other.clone(),
            Fault::ScaledTwice => {
                let twice = self.other.with_file_name("twice");
                let _ = std::fs::create_dir(&twice);
                let name = "adapter_model.safetensors";
                let bytes = std::fs::read(dir.join(name)).unwrap();
                let doubled = bytes
                    .chunks(4)
                    .flat_map(|b| (2.0 * f32::from_le_bytes(b.try_into().unwrap())).to_le_bytes());
                std::fs::write(twice.join(name), doubled.collect::<Vec<u8>>()).unwrap();
                twice
            }
            _ => dir,
        };
        self.inner.load(version, Weights::Folder(dir))
    }

    fn register(&self, version: PolicyVersion, weights: Weights, hash: Option<String>) {
        self.inner.register(version, weights, hash);
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

#[test]
fn what_is_not_what_was_trained_is_never_served() {
    for fault in [
        Fault::Dropped,
        Fault::ScaledTwice,
        Fault::AnotherProfiles,
        Fault::StaleCache,
        Fault::PointerNotMoved,
    ] {
        let mut rig = rig();
        rig.config.optim.lr = 0.5;
        rig.trainer = trainer(&rig.store, &rig.engine, &rig.learners, &rig.config);
        let (p, q) = (profile("p"), profile("q"));
        for profile in [&p, &q] {
            rig.pair(profile);
            assert_eq!(
                rig.trainer.advance(profile).unwrap(),
                Progress::Served(version(profile, 1)),
                "{fault:?}"
            );
        }
        let faulty = Faulty {
            inner: rig.engine.clone(),
            fault,
            other: rig.dir.path().join("adapters/q/00000001"),
            before: Mutex::new(Some(version(&p, 1))),
        };
        let learners = Arc::new(rig.learners.clone());
        drop(rig.trainer);
        let mut trainer = Trainer::new(
            rig.store.clone(),
            Arc::new(faulty),
            learners,
            rig.config.clone(),
            Arc::new(|| 5_000),
        );
        let pair = |reward| {
            let id = rig.store.next_turn_id(1_000);
            let verdict_id = rig.store.next_verdict_id();
            let mut turn = first_turn(id, &p, &session(&id.to_string()));
            turn.version = version(&p, 1);
            turn.reply = sampled(&[4, 5 + (id.0 % 7) as u32]);
            block_on(rig.store.append(vec![
                Event::Turn(Box::new(turn)),
                Event::Verdict {
                    turn: id,
                    id: verdict_id,
                    verdict: Box::new(verdict(Some(reward), &[])),
                    at: 2_000,
                },
                Event::Sample(Box::new(new_sample(id, verdict_id, reward))),
            ]))
            .unwrap();
        };
        pair(1.0);
        pair(-1.0);
        assert_eq!(
            trainer.advance(&p).unwrap(),
            Progress::Rejected(version(&p, 2)),
            "{fault:?}"
        );
        assert_eq!(rig.engine.served(&p), version(&p, 1), "{fault:?}");
        let states: Vec<VersionState> = rig
            .store
            .versions(&p)
            .unwrap()
            .into_iter()
            .map(|v| v.state)
            .collect();
        assert_eq!(states[0], VersionState::Served, "{fault:?}");
        let why = match &states[1] {
            VersionState::Rejected(why) | VersionState::RolledBack(why) => why.clone(),
            other => panic!("{fault:?}: {other:?}"),
        };
        assert!(
            why.contains("trained") || why.contains("published"),
            "{fault:?}: {why}"
        );
    }
}
