//! The data folder: made, locked by one process, and the note by which the command line finds the running server.

use anyhow::{Context, Result, bail};
use fs4::FileExt;
use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    path::{Path, PathBuf},
};

/// The platform's data folder for this program.
pub fn default_data_dir() -> Result<PathBuf> {
    let dirs = directories::ProjectDirs::from("", "", "chela")
        .context("no home folder is known; name a folder with --data-dir")?;
    Ok(dirs.data_dir().to_path_buf())
}

/// The platform's cache folder for models.
pub fn default_cache_dir() -> Result<PathBuf> {
    let dirs = directories::ProjectDirs::from("", "", "chela")
        .context("no home folder is known; name a folder with model.cache_dir")?;
    Ok(dirs.cache_dir().to_path_buf())
}

/// `server.json`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerNote {
    /// Process id.
    pub pid: u32,
    /// `http://host:port`
    pub address: String,
}

/// A locked data folder; the lock goes with this value, or with the process.
#[derive(Debug)]
pub struct DataFolder {
    path: PathBuf,
    _lock: File,
}

impl DataFolder {
    /// Makes the folder (0700) if need be and locks it. A second process is told who has it.
    pub fn open(path: &Path) -> Result<Self> {
        std::fs::create_dir_all(path)
            .with_context(|| format!("cannot create the data folder {}", path.display()))?;
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700))
                .with_context(|| format!("cannot make {} private", path.display()))?;
        }
        let lock_path = path.join("lock");
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&lock_path)
            .with_context(|| format!("cannot write to the data folder {}", path.display()))?;
        if !matches!(FileExt::try_lock(&lock), Ok(())) {
            let who = running(path).map_or_else(String::new, |n| {
                format!(" (process {} at {})", n.pid, n.address)
            });
            bail!(
                "the data folder {} is used by another chela{who}; stop it or name another folder with --data-dir",
                path.display()
            );
        }
        Ok(Self {
            path: path.to_path_buf(),
            _lock: lock,
        })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Leaves word where the server listens.
    pub fn announce(&self, address: &str) -> Result<()> {
        let note = ServerNote {
            pid: std::process::id(),
            address: address.to_owned(),
        };
        crate::keys::write_private(
            &self.path.join("server.json"),
            serde_json::to_string(&note)?.as_bytes(),
        )
    }
}

impl Drop for DataFolder {
    fn drop(&mut self) {
        // The note may never have been written; a left one only names a server that does not answer.
        let _ = std::fs::remove_file(self.path.join("server.json"));
    }
}

/// The note of a running server.
pub fn running(data_dir: &Path) -> Option<ServerNote> {
    let text = std::fs::read_to_string(data_dir.join("server.json")).ok()?;
    serde_json::from_str(&text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_owns_it() {
        let dir = tempfile::tempdir().unwrap();
        let first = DataFolder::open(dir.path()).unwrap();
        first.announce("http://127.0.0.1:1").unwrap();
        let error = format!("{:#}", DataFolder::open(dir.path()).unwrap_err());
        assert!(error.contains("127.0.0.1:1"), "{error}");
        drop(first);
        assert!(running(dir.path()).is_none());
        DataFolder::open(dir.path()).unwrap();
    }

    #[test]
    fn a_file_in_its_place_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        std::fs::write(&path, "").unwrap();
        assert!(DataFolder::open(&path).is_err());
    }
}
