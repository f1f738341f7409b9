//! Taking an adapter in that was trained elsewhere: copied, read by the engine, and put before the gate like any other candidate.

use crate::rollout::Rollout;
use chela_core::{
    PolicyVersion, Profile, Refusal, StepCommit, VersionOrigin, VersionRecord, Weights, registry,
};
use std::path::{Path, PathBuf};

/// PEFT's two files; nothing else of a folder is looked at or copied.
const FILES: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];

fn invalid(folder: &Path, why: impl std::fmt::Display) -> Refusal {
    Refusal::Invalid {
        field: "path".to_owned(),
        message: format!("{}: {why}", folder.display()),
    }
}

impl Rollout {
    pub(super) async fn import(&self, profile: &Profile, folder: &Path) -> Result<(), Refusal> {
        if Weights::is_whole(folder) {
            let what = "it holds a whole model, and only adapters are imported; serve it as the base model with `chela serve --model`";
            return Err(invalid(folder, what));
        }
        for name in FILES {
            if !folder.join(name).is_file() {
                let what = format!(
                    "{name} is not there; an adapter in PEFT's layout has {} and {}",
                    FILES[0], FILES[1]
                );
                return Err(invalid(folder, what));
            }
        }
        let versions = self.store.versions(profile)?;
        if registry::unfinished(&versions).is_some() || !self.store.replays(profile)?.is_empty() {
            return Err(Refusal::Conflict(format!(
                "a version of profile {profile} is being made; try again when it is served or rejected"
            )));
        }
        let version = PolicyVersion {
            profile: profile.clone(),
            number: self.store.last_version(profile)? + 1,
        };
        if !self.config.learning || self.config.frozen.contains(profile) {
            return Err(Refusal::Conflict(format!(
                "nothing looks at candidates of profile {profile}: learning is off for it, and only the gate lets an import serve"
            )));
        }
        // A name that no step of the trainer has, whatever it makes meanwhile.
        let name = format!("adapters/{profile}/{:08}-import", version.number);
        let dir = self.config.data_dir.join(&name);
        copy(folder, &dir)?;
        let taken = self
            .take_in(&version, (folder, &dir), (name, &versions))
            .await;
        if taken.is_err() {
            self.engine.unload(&version);
            // A folder that stays is deleted at the next start: no version names it.
            let _ = std::fs::remove_dir_all(&dir);
        }
        taken
    }

    async fn take_in(
        &self,
        version: &PolicyVersion,
        (folder, dir): (&Path, &Path),
        (name, versions): (String, &[VersionRecord]),
    ) -> Result<(), Refusal> {
        let weights = Weights::Folder(dir.to_path_buf());
        let load = self.engine.load(version.clone(), weights).await;
        load.map_err(|e| {
            invalid(
                folder,
                e.to_string()
                    .replace(&dir.display().to_string(), &folder.display().to_string()),
            )
        })?;
        let served = registry::served(versions);
        let record = VersionRecord {
            version: version.clone(),
            parent: served.map_or(0, |v| v.version.number),
            steps: served.map_or(0, |v| v.steps) + 1,
            origin: VersionOrigin::Imported(folder.display().to_string()),
            checkpoint: Some(name),
            created: self.now(),
            ..VersionRecord::default()
        };
        self.store
            .commit_step(StepCommit {
                version: record,
                dropped: Vec::new(),
            })
            .await?;
        tracing::info!(%version, from = %folder.display(), "an adapter was imported as a candidate");
        Ok(())
    }
}

/// Copies and syncs the two files into a folder that does not exist yet, whole or not at all.
fn copy(from: &Path, to: &Path) -> Result<(), Refusal> {
    let failed = |path: &Path, e: std::io::Error| {
        Refusal::Internal(format!("cannot write {}: {e}", path.display()))
    };
    if to.exists() {
        return Err(Refusal::Conflict(
            "an import is being made; try again in a moment".to_owned(),
        ));
    }
    let half = PathBuf::from(format!("{}.tmp", to.display()));
    if half.exists() {
        std::fs::remove_dir_all(&half).map_err(|e| failed(&half, e))?;
    }
    std::fs::create_dir_all(&half).map_err(|e| failed(&half, e))?;
    for name in FILES {
        let path = half.join(name);
        std::fs::copy(from.join(name), &path).map_err(|e| invalid(from, format!("{name}: {e}")))?;
        let sync = std::fs::File::open(&path).and_then(|f| f.sync_all());
        sync.map_err(|e| failed(&path, e))?;
    }
    std::fs::rename(&half, to).map_err(|e| failed(to, e))
}
