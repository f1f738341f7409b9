//! Keys: made, listed, revoked on disk; recognised by hash, in constant time. Never stored in clear, except the admin's own.

use anyhow::{Context, Result, bail};
use chela_core::{Caller, Gatekeeper, Profile, Refusal, Scope, TrajectoryStore};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::SystemTime,
};
use subtle::ConstantTimeEq;

/// One key on disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyRecord {
    /// Short name to list and revoke it by.
    pub id: String,
    /// SHA-256 of the key, in hex.
    pub hash: String,
    /// The profile it selects.
    pub profile: String,
    /// `chat`, `feedback` or `admin`.
    pub scope: String,
}

/// `keys.json` and `admin.key` of a data folder.
#[derive(Clone, Debug)]
pub struct KeyFile {
    keys: PathBuf,
    admin: PathBuf,
}

impl KeyFile {
    /// The two files of that folder.
    pub fn of(data_dir: &Path) -> Self {
        Self {
            keys: data_dir.join("keys.json"),
            admin: data_dir.join("admin.key"),
        }
    }

    /// The admin key, made at the first call.
    pub fn admin(&self) -> Result<String> {
        match std::fs::read_to_string(&self.admin) {
            Ok(text) if text.trim().len() >= 32 => Ok(text.trim().to_owned()),
            Ok(_) => bail!(
                "{}: does not hold a key; delete it and start again for a new one",
                self.admin.display()
            ),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let key = format!("sk-admin-{}", random_text()?);
                write_private(&self.admin, key.as_bytes())?;
                Ok(key)
            }
            Err(error) => {
                Err(error).with_context(|| format!("cannot read {}", self.admin.display()))
            }
        }
    }

    /// Makes a new admin key; the old one is worthless at once.
    pub fn rotate_admin(&self) -> Result<String> {
        let key = format!("sk-admin-{}", random_text()?);
        write_private(&self.admin, key.as_bytes())?;
        Ok(key)
    }

    /// All keys but the admin's.
    pub fn list(&self) -> Result<Vec<KeyRecord>> {
        match std::fs::read_to_string(&self.keys) {
            Ok(text) => serde_json::from_str(&text)
                .with_context(|| format!("{}: not a list of keys", self.keys.display())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => {
                Err(error).with_context(|| format!("cannot read {}", self.keys.display()))
            }
        }
    }

    /// Makes a key. It is returned once and nowhere kept in clear.
    pub fn create(&self, profile: &Profile, scope: Scope) -> Result<(String, KeyRecord)> {
        let key = format!("sk-chela-{}", random_text()?);
        let record = KeyRecord {
            id: random_text()?.chars().take(8).collect(),
            hash: hash(&key),
            profile: profile.to_string(),
            scope: scope.as_str().to_owned(),
        };
        let mut all = self.list()?;
        all.push(record.clone());
        self.write(&all)?;
        Ok((key, record))
    }

    /// Removes a key. False = there was none of that id.
    pub fn revoke(&self, id: &str) -> Result<bool> {
        let mut all = self.list()?;
        let before = all.len();
        all.retain(|k| k.id != id);
        self.write(&all)?;
        Ok(all.len() < before)
    }

    fn write(&self, keys: &[KeyRecord]) -> Result<()> {
        write_private(&self.keys, serde_json::to_string_pretty(keys)?.as_bytes())
    }

    fn changed(&self) -> (Option<SystemTime>, Option<SystemTime>) {
        let time = |p: &Path| std::fs::metadata(p).and_then(|m| m.modified()).ok();
        (time(&self.keys), time(&self.admin))
    }
}

/// SHA-256 in hex.
pub fn hash(key: &str) -> String {
    hex::encode(Sha256::digest(key.as_bytes()))
}

/// 256 random bits as 64 hexadecimal digits.
pub fn random_text() -> Result<String> {
    let mut bytes = [0u8; 32];
    getrandom::fill(&mut bytes).context("the system gives no random numbers")?;
    Ok(hex::encode(bytes))
}

/// Writes by rename, readable by the owner only.
pub fn write_private(path: &Path, bytes: &[u8]) -> Result<()> {
    use std::io::Write;
    let temporary = path.with_extension("new");
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let write = || -> std::io::Result<()> {
        let mut file = options.open(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

type Stamp = (Option<SystemTime>, Option<SystemTime>);

struct Known {
    stamp: Stamp,
    keys: Vec<KeyRecord>,
    admin_hash: String,
}

/// Recognises keys against the files, which are read again when they change: `chela key` works beside a running server.
pub struct Keys {
    file: KeyFile,
    required: bool,
    store: Arc<dyn TrajectoryStore>,
    known: Mutex<Known>,
}

impl Keys {
    /// Reads the files. `required` = `server.auth = "keys"`.
    pub fn open(file: KeyFile, required: bool, store: Arc<dyn TrajectoryStore>) -> Result<Self> {
        let known = read(&file)?;
        Ok(Self {
            file,
            required,
            store,
            known: Mutex::new(known),
        })
    }

    fn lookup(&self, wanted: &str) -> Result<Option<(Profile, Scope)>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.stamp != self.file.changed() {
            *known = read(&self.file)?;
        }
        // Every comparison is made, so that the time tells nothing about which one fitted.
        let mut found = None;
        if equal(&known.admin_hash, wanted) {
            found = Some((Profile::default(), Scope::Admin));
        }
        for key in &known.keys {
            if equal(&key.hash, wanted) {
                let scope = Scope::parse(&key.scope).context("a key of unknown scope")?;
                found = Some((Profile::new(key.profile.clone())?, scope));
            }
        }
        Ok(found)
    }
}

fn read(file: &KeyFile) -> Result<Known> {
    let admin = file.admin()?;
    Ok(Known {
        stamp: file.changed(),
        keys: file.list()?,
        admin_hash: hash(&admin),
    })
}

fn equal(a: &str, b: &str) -> bool {
    a.as_bytes().ct_eq(b.as_bytes()).into()
}

impl Gatekeeper for Keys {
    fn identify(&self, key: Option<&str>) -> Result<Caller, Refusal> {
        let anyone = Caller {
            profile: Profile::default(),
            scope: Scope::Chat,
            session: None,
        };
        let Some(key) = key else {
            return if self.required {
                Err(Refusal::Unauthenticated(
                    "a key is needed: send it as Authorization: Bearer <key>".to_owned(),
                ))
            } else {
                Ok(anyone)
            };
        };
        let wanted = hash(key);
        let known = self
            .lookup(&wanted)
            .map_err(|e| Refusal::Internal(format!("keys: {e:#}")))?;
        if let Some((profile, scope)) = known {
            return Ok(Caller {
                profile,
                scope,
                session: None,
            });
        }
        if let Some(session) = self.store.session_by_key(&wanted)? {
            return Ok(Caller {
                profile: session.profile,
                scope: Scope::Chat,
                session: Some(session.id),
            });
        }
        if self.required {
            return Err(Refusal::Unauthenticated(
                "this key is not known here".to_owned(),
            ));
        }
        Ok(anyone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use chela_core::testing::MemoryStore;

    fn keys(dir: &Path, required: bool) -> Keys {
        let store = Arc::new(MemoryStore::default());
        Keys::open(KeyFile::of(dir), required, store).unwrap()
    }

    #[test]
    fn a_key_selects_its_profile_until_it_is_revoked() {
        let dir = tempfile::tempdir().unwrap();
        let gate = keys(dir.path(), true);
        let file = KeyFile::of(dir.path());
        let profile = Profile::new("claw").unwrap();
        let (key, record) = file.create(&profile, Scope::Feedback).unwrap();
        let caller = gate.identify(Some(&key)).unwrap();
        assert_eq!((caller.profile, caller.scope), (profile, Scope::Feedback));
        assert!(gate.identify(None).is_err());
        assert!(gate.identify(Some("sk-wrong")).is_err());
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(file.revoke(&record.id).unwrap());
        assert!(!file.revoke(&record.id).unwrap());
        assert!(gate.identify(Some(&key)).is_err());
        let on_disk = std::fs::read_to_string(dir.path().join("keys.json")).unwrap();
        assert!(!on_disk.contains(&key));
    }

    #[test]
    fn open_auth_gives_strangers_chat_and_never_admin() {
        let dir = tempfile::tempdir().unwrap();
        let gate = keys(dir.path(), false);
        for key in [None, Some("anything")] {
            let caller = gate.identify(key).unwrap();
            assert_eq!(
                (caller.scope, caller.profile.as_str()),
                (Scope::Chat, "default")
            );
        }
        let admin = KeyFile::of(dir.path()).admin().unwrap();
        assert_eq!(gate.identify(Some(&admin)).unwrap().scope, Scope::Admin);
    }

    #[cfg(unix)]
    #[test]
    fn files_are_the_owners_only() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let file = KeyFile::of(dir.path());
        file.admin().unwrap();
        file.create(&Profile::default(), Scope::Chat).unwrap();
        for name in ["admin.key", "keys.json"] {
            let mode = std::fs::metadata(dir.path().join(name))
                .unwrap()
                .permissions()
                .mode();
            assert_eq!(mode & 0o777, 0o600, "{name}");
        }
    }
}
