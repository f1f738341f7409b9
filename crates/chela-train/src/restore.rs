//! What a start finds: serves again what was served, and deletes the folders of steps that were never committed.

use crate::{TrainError, config::TrainConfig, publish::Publisher};
use chela_core::{
    EngineError, Millis, PolicyEngine, PolicyVersion, Profile, TrajectoryStore, VersionRecord,
    Weights,
    registry::{self, Chain, Steering},
};
use futures_executor::block_on;
use std::{collections::HashSet, path::Path, sync::atomic::AtomicBool};

/// Adapters of this many profiles, the last served ones, are read and compared with their receipts at once; the others when they are
/// asked for.
const READ_AT_START: usize = 4;

/// Registers all versions and points each profile at what it served. Trains nothing.
pub fn restore(
    store: &dyn TrajectoryStore,
    engine: &dyn PolicyEngine,
    config: &TrainConfig,
    now: Millis,
) -> Result<(), TrainError> {
    let stop = AtomicBool::new(false);
    let publisher = Publisher {
        engine,
        store,
        config,
        now,
        stop: &stop,
        steering: &Steering::default(), // nobody is there yet
    };
    let mut named = HashSet::new();
    let mut served: Vec<(Option<Millis>, Profile, Vec<VersionRecord>)> = Vec::new();
    for profile in store.profiles()? {
        let versions = store.versions(&profile)?;
        for record in versions.iter().filter(|v| v.checkpoint.is_some()) {
            named.extend(record.checkpoint.clone());
            let hash = record.receipt.as_ref().map(|r| r.weights_hash.clone());
            let weights = Weights::Folder(publisher.dir(record));
            engine.register(record.version.clone(), weights, hash);
        }
        if let Some(at) = registry::served(&versions).map(|v| v.served_at) {
            served.push((at, profile, versions));
        }
    }
    served.sort_by_key(|(at, ..)| std::cmp::Reverse(*at));
    for (i, (_, profile, versions)) in served.iter().enumerate() {
        serve_again(&publisher, profile, versions, i < READ_AT_START)?;
    }
    if served.len() > READ_AT_START {
        let others = served.len() - READ_AT_START;
        tracing::info!(
            "the weights of {others} more profiles are read when somebody asks for them"
        );
    }
    delete_unnamed(&config.data_dir, &named)
}

/// The served version, or the nearest one below it that is whole.
fn serve_again(
    publisher: &Publisher<'_>,
    profile: &Profile,
    versions: &[VersionRecord],
    read: bool,
) -> Result<(), TrainError> {
    let served = registry::served_number(versions);
    let version = |number| PolicyVersion {
        profile: profile.clone(),
        number,
    };
    let (number, broken) = nearest_whole(publisher, versions, (served, read))?;
    match broken {
        Some(why) => publisher.back(&version(served), &version(number), why),
        None if number == 0 => Ok(()),
        None => {
            publisher.engine.serve(&version(number))?;
            if read {
                tracing::info!(version = %version(number), "serving again");
            }
            Ok(())
        }
    }
}

/// The first whole version from `from` down to the base, and why those before it are not. With `read` off the first one's weights are
/// not looked at, only that its files are there.
pub(crate) fn nearest_whole(
    publisher: &Publisher<'_>,
    versions: &[VersionRecord],
    (from, read): (u64, bool),
) -> Result<(u64, Option<String>), TrainError> {
    let mut broken: Option<String> = None;
    for number in Chain::of(from, versions).numbers().iter().copied() {
        let Some(record) = versions.iter().find(|v| v.version.number == number) else {
            break;
        };
        match whole(publisher, record, read || broken.is_some())? {
            None => return Ok((number, broken)),
            Some(why) => {
                tracing::error!(version = %record.version, "{why}");
                broken.get_or_insert(why);
            }
        }
    }
    Ok((0, broken))
}

/// Why a version's files cannot be served. An error when they were made for another model: then nothing may be changed.
fn whole(
    publisher: &Publisher<'_>,
    record: &VersionRecord,
    read: bool,
) -> Result<Option<String>, TrainError> {
    let dir = publisher.dir(record);
    if !Weights::are_there(&dir) {
        return Ok(Some(format!("its files are gone: {}", dir.display())));
    }
    if !read {
        return Ok(None);
    }
    let load = publisher
        .engine
        .load(record.version.clone(), Weights::Folder(dir.clone()));
    Ok(match block_on(load) {
        Err(error) => {
            let model = publisher.engine.info().model;
            if let Some(made_for) = base_model(&dir).filter(|name| *name != model) {
                let why = format!(
                    "the weights of this data folder were trained on {made_for}, this model is {model}: name that model, or another --data-dir ({}: {error})",
                    record.version
                );
                return Err(EngineError::Weights(why).into());
            }
            Some(format!("its files cannot be read: {error}"))
        }
        Ok(hash) => record
            .receipt
            .as_ref()
            .filter(|receipt| receipt.weights_hash != hash)
            .map(|receipt| {
                format!(
                    "{} is not what was published: its weights are {hash}, they were {}",
                    dir.display(),
                    receipt.weights_hash
                )
            }),
    })
}

/// The model that PEFT's configuration names, or that a whole model's learner began with.
fn base_model(dir: &Path) -> Option<String> {
    let said = |file: &str, key: &str| {
        let text = std::fs::read_to_string(dir.join(file)).ok()?;
        let json: serde_json::Value = serde_json::from_str(&text).ok()?;
        Some(json[key].as_str()?.to_owned())
    };
    let adapter = said("adapter_config.json", "base_model_name_or_path");
    adapter.or_else(|| said("state.json", "base_model"))
}

/// Deletes `adapters/<profile>/<number>` folders that no committed version names: steps a crash left half-made, and versions that
/// were forgotten.
fn delete_unnamed(data_dir: &Path, named: &HashSet<String>) -> Result<(), TrainError> {
    let adapters = data_dir.join("adapters");
    for profile in folders(&adapters)? {
        for name in folders(&adapters.join(&profile))? {
            let relative = format!("adapters/{profile}/{name}");
            if !named.contains(&relative) {
                let path = data_dir.join(&relative);
                tracing::warn!(path = %path.display(), "deleting a checkpoint that no version names");
                std::fs::remove_dir_all(&path).map_err(|error| TrainError::Io {
                    what: "cannot delete",
                    path: path.display().to_string(),
                    error,
                })?;
            }
        }
    }
    Ok(())
}

fn folders(dir: &Path) -> Result<Vec<String>, TrainError> {
    let failed = |error| TrainError::Io {
        what: "cannot read",
        path: dir.display().to_string(),
        error,
    };
    if !dir.exists() {
        return Ok(Vec::new());
    }
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.path().is_dir() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    Ok(names)
}
