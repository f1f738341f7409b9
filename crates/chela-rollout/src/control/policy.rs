//! Versions: seen, taken back, promoted, paused.

use crate::{canaries::blamed, rollout::Rollout};
use chela_core::{
    EngineError, Event, PolicyAction, PolicyRef, PolicyVersion, PolicyView, Profile, Prompt,
    Refusal, VersionRecord, VersionState, Want, Weights,
};
use std::path::PathBuf;

impl Rollout {
    pub(crate) fn policy_view(&self, profile: &Profile) -> Result<PolicyView, Refusal> {
        Ok(PolicyView {
            profile: profile.clone(),
            served: self.engine.served(profile).number,
            paused: self.store.paused(profile)?,
            versions: self.store.versions(profile)?,
            replays: self.store.replays(profile)?,
        })
    }

    pub(super) async fn steered(
        &self,
        profile: Profile,
        action: PolicyAction,
    ) -> Result<PolicyView, Refusal> {
        let _one_at_a_time = self.steering.lock().await;
        match action {
            PolicyAction::Pause => {
                let why = Some("paused by an operator".to_owned());
                self.store
                    .append(vec![Event::Paused {
                        profile: profile.clone(),
                        why,
                    }])
                    .await?;
            }
            PolicyAction::Resume => {
                let why = self.store.paused(&profile)?;
                if why.as_deref().and_then(blamed).is_some() {
                    self.canaries.begin_anew();
                }
                self.store
                    .append(vec![Event::Paused {
                        profile: profile.clone(),
                        why: None,
                    }])
                    .await?;
            }
            PolicyAction::Rollback(target) => self.roll_back(&profile, target).await?,
            PolicyAction::Promote(number) => self.promote(&profile, number).await?,
            PolicyAction::Import(folder) => self.import(&profile, &folder).await?,
        }
        self.policy_view(&profile)
    }

    async fn roll_back(&self, profile: &Profile, target: Option<u64>) -> Result<(), Refusal> {
        let versions = self.store.versions(profile)?;
        let served = self.engine.served(profile);
        let target = match target {
            Some(number) => number,
            None => versions
                .iter()
                .find(|v| v.version == served)
                .map(|v| v.parent)
                .ok_or_else(|| {
                    Refusal::Conflict(format!(
                        "profile {profile} serves the base model: there is nothing to go back to"
                    ))
                })?,
        };
        if target >= served.number {
            return Err(Refusal::Conflict(format!(
                "profile {profile} serves version {}: name an older one to go back to, or promote version {target}",
                served.number
            )));
        }
        let record = if target == 0 {
            None
        } else {
            Some(usable(&versions, profile, target)?)
        };
        let version = PolicyVersion {
            profile: profile.clone(),
            number: target,
        };
        let states = vec![
            Event::Version {
                version: version.clone(),
                state: VersionState::Served,
                receipt: None,
                at: self.now(),
            },
            // After `Served`, which makes the one left merely superseded.
            Event::Version {
                version: served.clone(),
                state: VersionState::RolledBack("by an operator".to_owned()),
                receipt: None,
                at: self.now(),
            },
        ];
        self.swap(&version, record, states).await
    }

    async fn promote(&self, profile: &Profile, number: u64) -> Result<(), Refusal> {
        let versions = self.store.versions(profile)?;
        if self.engine.served(profile).number == number {
            return Err(Refusal::Conflict(format!(
                "profile {profile} serves version {number} already"
            )));
        }
        let version = PolicyVersion {
            profile: profile.clone(),
            number,
        };
        let record = if number == 0 {
            None
        } else {
            Some(usable(&versions, profile, number)?)
        };
        let state = VersionState::Served;
        let states = vec![Event::Version {
            version: version.clone(),
            state,
            receipt: None,
            at: self.now(),
        }];
        self.swap(&version, record, states).await
    }

    /// The pointer, then the record; when that cannot be written, the pointer goes back.
    async fn swap(
        &self,
        version: &PolicyVersion,
        record: Option<&VersionRecord>,
        mut states: Vec<Event>,
    ) -> Result<(), Refusal> {
        // Steps that were to be made again stood on what is left now.
        let replays = self.store.replays(&version.profile)?.into_iter();
        states.extend(replays.map(|number| Event::ReplaySkipped {
            version: PolicyVersion {
                profile: version.profile.clone(),
                number,
            },
        }));
        let before = self.engine.served(&version.profile);
        if record.is_some() {
            self.answers(version).await?;
        }
        match self.engine.serve(version) {
            Ok(()) => {}
            Err(EngineError::NotLoaded(_)) => {
                let record = record.ok_or_else(|| {
                    Refusal::Internal(format!("the engine does not know {version}"))
                })?;
                self.load(record).await?;
                self.engine.serve(version)?;
            }
            Err(other) => return Err(other.into()),
        }
        if let Err(error) = self.store.append(states).await {
            self.engine.serve(&before)?;
            return Err(error.into());
        }
        tracing::info!(%before, now = %version, "another version is served");
        Ok(())
    }

    /// Has the engine read a version that it only knows of: files that are gone or changed are said before anybody is pointed at them.
    async fn answers(&self, version: &PolicyVersion) -> Result<(), Refusal> {
        let text = self.chat.encode("Is it there?");
        let prompt = Prompt {
            tokens: text.map_err(|e| Refusal::Internal(e.to_string()))?,
        };
        let policy = PolicyRef::Version(version.clone());
        match self.engine.score(policy, prompt, 1, Want::default()).await {
            // One that the engine does not know is loaded and compared with its receipt below.
            Ok(_) | Err(EngineError::NotLoaded(_)) => Ok(()),
            Err(EngineError::Weights(why) | EngineError::Io(why)) => Err(Refusal::Conflict(
                format!("version {version} cannot be served: {why}"),
            )),
            Err(other) => Err(other.into()),
        }
    }

    /// The folder of a version's adapter.
    pub(super) fn adapter_dir(&self, profile: &Profile, number: u64) -> Result<PathBuf, Refusal> {
        if number == 0 {
            return Err(Refusal::Conflict(
                "version 0 is the base model: it has no adapter".to_owned(),
            ));
        }
        let versions = self.store.versions(profile)?;
        let record = known(&versions, profile, number)?;
        if let VersionState::Forgotten(why) = &record.state {
            return Err(Refusal::Gone(format!("version {number} is deleted: {why}")));
        }
        let name = record
            .checkpoint
            .as_ref()
            .ok_or_else(|| Refusal::NotFound(format!("version {number} has no files")))?;
        let dir = self.config.data_dir.join(name);
        if Weights::is_whole(&dir) {
            return Err(Refusal::Conflict(format!(
                "version {number} is a whole model, it has no adapter: `chela policy export --merged hf` writes it on the server's machine"
            )));
        }
        Ok(dir)
    }

    /// Loads a checkpoint and makes sure that it is what was published then.
    async fn load(&self, record: &VersionRecord) -> Result<(), Refusal> {
        let version = &record.version;
        let name = record.checkpoint.as_ref().ok_or_else(|| {
            Refusal::Conflict(format!("version {version} has no checkpoint to load"))
        })?;
        let dir = self.config.data_dir.join(name);
        if !dir.is_dir() {
            return Err(Refusal::NotFound(format!(
                "the checkpoint of version {version} is gone: {} is no folder",
                dir.display()
            )));
        }
        let hash = self
            .engine
            .load(version.clone(), Weights::Folder(dir))
            .await?;
        match &record.receipt {
            Some(receipt) if receipt.weights_hash != hash => {
                self.engine.unload(version);
                Err(Refusal::Conflict(format!(
                    "the checkpoint of version {version} is not what was published: its weights are {hash}, they were {}",
                    receipt.weights_hash
                )))
            }
            _ => Ok(()),
        }
    }
}

fn usable<'a>(
    versions: &'a [VersionRecord],
    profile: &Profile,
    number: u64,
) -> Result<&'a VersionRecord, Refusal> {
    let record = known(versions, profile, number)?;
    match &record.state {
        VersionState::Rejected(why) => Err(Refusal::Conflict(format!(
            "version {number} was never served: {why}"
        ))),
        VersionState::Forgotten(why) => {
            Err(Refusal::Gone(format!("version {number} is deleted: {why}")))
        }
        VersionState::Candidate => Err(Refusal::Conflict(format!(
            "version {number} is a candidate: it serves when the gate has passed it"
        ))),
        _ => Ok(record),
    }
}

pub(super) fn known<'a>(
    versions: &'a [VersionRecord],
    profile: &Profile,
    number: u64,
) -> Result<&'a VersionRecord, Refusal> {
    versions
        .iter()
        .find(|v| v.version.number == number)
        .ok_or_else(|| Refusal::NotFound(format!("profile {profile} has no version {number}")))
}
