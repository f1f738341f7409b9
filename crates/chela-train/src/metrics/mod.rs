//! The figures of each step in files that other programs read: JSON lines and TensorBoard's event files. The registry is the truth and the
//! files follow it: what they lack is appended, once for each version, whatever happened in between.

mod tfevents;

use crate::{TrainError, trainer::remove_folder};
use chela_core::{
    Profile, TrajectoryStore, VersionOrigin, VersionRecord, VersionState,
    registry::{self, Chain},
};
use serde::Deserialize;
use serde_json::json;
use std::{
    collections::BTreeSet,
    fs::{self, File, OpenOptions},
    io::{Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

/// What event files are called; TensorBoard looks for it.
const EVENTS: &str = "events.out.tfevents.";
/// The group under which TensorBoard shows the figures.
const GROUP: &str = "train";

/// What is read of a line again.
#[derive(Deserialize)]
struct Known {
    version: u64,
}

/// The folder of the files.
pub(crate) struct MetricsFiles {
    dir: PathBuf,
}

impl MetricsFiles {
    /// Below this data folder.
    pub(crate) fn below(data_dir: &Path) -> Self {
        Self {
            dir: data_dir.join(registry::METRICS),
        }
    }

    /// Writes what the files of a profile lack. Files that name versions the registry does not know are of a profile that was
    /// forgotten and began anew: they go first.
    pub(crate) fn follow(
        &self,
        store: &dyn TrajectoryStore,
        profile: &Profile,
    ) -> Result<(), TrainError> {
        let versions = store.versions(profile)?;
        let waiting = !store.replays(profile)?.is_empty();
        let steps = settled(&versions, waiting);
        let folder = self.dir.join(profile.as_str());
        let lines = folder.join(registry::METRICS_LINES);
        let mut known = lines_of(&read(&lines)?).0;
        let events = events_file(&folder)?;
        if let Some(events) = &events {
            known.extend(tfevents::steps(&read(events)?).0);
        }
        let there: BTreeSet<u64> = versions.iter().map(|v| v.version.number).collect();
        if !known.is_subset(&there) {
            remove_folder(&folder)?;
        }
        let Some(first) = steps.first() else {
            return Ok(());
        };
        make_folder(&folder)?;
        append(&lines, &[], lines_of, &steps, line)?;
        let named = format!("{EVENTS}{:010}.chela", first.created.max(0) / 1000);
        let events = events_file(&folder)?.unwrap_or_else(|| folder.join(named));
        let head = tfevents::head(seconds(first));
        append(&events, &head, tfevents::steps, &steps, event)
    }
}

/// The steps that came to something, oldest first: those whose candidate is still looked at are written when it is decided.
fn settled(versions: &[VersionRecord], replays: bool) -> Vec<&VersionRecord> {
    let under_way = registry::unfinished(versions);
    let chain = under_way.map(|v| Chain::of(v.version.number, versions));
    let undecided = |v: &VersionRecord| {
        v.state == VersionState::Candidate
            && (replays || chain.as_ref().is_some_and(|c| c.holds(v.version.number)))
    };
    let step = |v: &&VersionRecord| !matches!(v.origin, VersionOrigin::Imported(_));
    let mut steps: Vec<_> = versions.iter().filter(step).collect();
    steps.retain(|v| !undecided(v));
    steps.sort_by_key(|v| v.version.number);
    steps
}

fn seconds(record: &VersionRecord) -> f64 {
    record.created as f64 / 1000.0
}

fn line(record: &VersionRecord) -> Vec<u8> {
    let (state, why) = record.state.words();
    // What is not finite is null: it was measured, and came to no number.
    let metrics = record
        .metrics
        .iter()
        .map(|(name, x)| (name.clone(), json!(x)));
    let line = json!({
        "time": record.created,
        "profile": record.version.profile.as_str(),
        "version": record.version.number,
        "parent": record.parent,
        "steps": record.steps,
        "state": state,
        "why": why,
        "metrics": metrics.collect::<serde_json::Map<_, _>>(),
    });
    format!("{line}\n").into_bytes()
}

fn event(record: &VersionRecord) -> Vec<u8> {
    let finite = record.metrics.iter().filter(|(_, x)| x.is_finite());
    let tagged = finite.map(|(name, x)| (format!("{GROUP}/{name}"), *x));
    let tagged: Vec<_> = tagged.collect();
    tfevents::scalars(seconds(record), record.version.number, &tagged)
}

/// The versions named in a file of lines, and how many of its bytes are whole lines: a crash may leave part of one.
fn lines_of(file: &[u8]) -> (BTreeSet<u64>, usize) {
    let (mut versions, mut whole) = (BTreeSet::new(), 0);
    for line in file.split_inclusive(|b| *b == b'\n') {
        match serde_json::from_slice::<Known>(line) {
            Ok(known) if line.ends_with(b"\n") => versions.extend([known.version]),
            _ => break,
        }
        whole += line.len();
    }
    (versions, whole)
}

/// Appends what a file lacks, after what of it is whole; a file that has nothing begins with `head`.
fn append(
    path: &Path,
    head: &[u8],
    whole: impl Fn(&[u8]) -> (BTreeSet<u64>, usize),
    steps: &[&VersionRecord],
    write: impl Fn(&VersionRecord) -> Vec<u8>,
) -> Result<(), TrainError> {
    let failed = |error| io("cannot write", path, error);
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create(true).truncate(false);
    let mut file: File = options.open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(failed)?;
    let (known, end) = whole(&bytes);
    let mut more = if end == 0 { head.to_vec() } else { Vec::new() };
    for step in steps {
        if !known.contains(&step.version.number) {
            more.extend(write(step));
        }
    }
    if more.is_empty() && end == bytes.len() {
        return Ok(());
    }
    file.set_len(end as u64).map_err(failed)?;
    file.seek(SeekFrom::Start(end as u64)).map_err(failed)?;
    file.write_all(&more).map_err(failed)?;
    file.sync_data().map_err(failed)
}

/// A profile's event file, when there is one.
fn events_file(folder: &Path) -> Result<Option<PathBuf>, TrainError> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        entries => entries.map_err(|e| io("cannot read", folder, e))?,
    };
    let mut files = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|e| io("cannot read", folder, e))?;
        if entry.file_name().to_string_lossy().starts_with(EVENTS) {
            files.push(entry.path());
        }
    }
    Ok(files.into_iter().max())
}

fn read(path: &Path) -> Result<Vec<u8>, TrainError> {
    match fs::read(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        read => read.map_err(|e| io("cannot read", path, e)),
    }
}

fn make_folder(path: &Path) -> Result<(), TrainError> {
    fs::create_dir_all(path).map_err(|e| io("cannot create", path, e))
}

fn io(what: &'static str, path: &Path, error: std::io::Error) -> TrainError {
    TrainError::Io {
        what,
        path: path.display().to_string(),
        error,
    }
}

#[cfg(test)]
mod tests;
