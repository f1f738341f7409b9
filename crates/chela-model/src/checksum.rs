//! SHA-256 of files, and the stamp that spares hashing a large file at every start.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use sha2::{Digest, Sha256};

use crate::error::{ModelError, Result};

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
            // Writing to a String cannot fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
}

/// Copies everything and hashes it on the way.
pub(crate) fn copy_hashing(
    mut from: impl Read,
    mut to: impl Write,
    hash: &mut Sha256,
    mut seen: impl FnMut(u64),
) -> std::io::Result<u64> {
    let mut buffer = vec![0; 1 << 18];
    let mut total = 0;
    loop {
        let count = from.read(&mut buffer)?;
        if count == 0 {
            return Ok(total);
        }
        to.write_all(&buffer[..count])?;
        hash.update(&buffer[..count]);
        total += count as u64;
        seen(total);
    }
}

fn stamp_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".sha256");
    PathBuf::from(name)
}

/// Sum, size and time of change: what a stamp says.
fn stamp_text(path: &Path, sum: &str) -> Result<String> {
    let meta = fs::metadata(path).map_err(|e| ModelError::io(path, e))?;
    let changed = meta
        .modified()
        .ok()
        .and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    let changed = changed.map_or(0, |since| since.as_nanos());
    Ok(format!("{sum} {} {changed}\n", meta.len()))
}

/// Notes beside the file that it has this sum.
pub(crate) fn write_stamp(path: &Path, sum: &str) -> Result<()> {
    let stamp = stamp_path(path);
    fs::write(&stamp, stamp_text(path, sum)?).map_err(|e| ModelError::io(&stamp, e))
}

/// Refuses the file unless it has this sum. A stamp that fits its size and time of change is
/// believed; else the file is hashed and stamped.
pub(crate) fn verify(path: &Path, expected: &str) -> Result<()> {
    let stamp = fs::read_to_string(stamp_path(path)).unwrap_or_default();
    if stamp == stamp_text(path, expected)? {
        return Ok(());
    }
    let io = |e| ModelError::io(path, e);
    let mut hash = Sha256::new();
    copy_hashing(
        File::open(path).map_err(io)?,
        std::io::sink(),
        &mut hash,
        |_| (),
    )
    .map_err(io)?;
    let got = hex(&hash.finalize());
    if got != expected {
        let expected = expected.to_owned();
        return Err(ModelError::Checksum {
            path: path.to_owned(),
            expected,
            got,
        });
    }
    // A read-only cache is no reason to refuse a good file; it is hashed again next time.
    if let Err(error) = write_stamp(path, expected) {
        tracing::debug!(%error, "no checksum stamp written");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn a_changed_file_is_hashed_again_and_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, "abc").unwrap();
        verify(&path, ABC).unwrap();
        assert!(
            fs::read_to_string(dir.path().join("f.sha256"))
                .unwrap()
                .starts_with(ABC)
        );
        verify(&path, ABC).unwrap();
        fs::write(&path, "abcd").unwrap();
        let error = verify(&path, ABC).unwrap_err();
        assert!(matches!(&error, ModelError::Checksum { got, .. } if got.starts_with("88d4266f")));
        assert!(error.to_string().contains(ABC), "{error}");
    }

    #[test]
    fn a_fitting_stamp_is_believed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, "other").unwrap();
        write_stamp(&path, ABC).unwrap();
        verify(&path, ABC).unwrap();
    }
}
