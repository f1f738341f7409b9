//! Models of the Hugging Face hub, in the hub's own cache.

use std::path::{Path, PathBuf};

use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};

use crate::error::{ModelError, Result};
use crate::progress::Progress;
use crate::{json, source};

const INDEX: &str = "model.safetensors.index.json";
const WEIGHTS: &str = "model.safetensors";
const NEEDED: [&str; 2] = ["config.json", "tokenizer.json"];
const OPTIONAL: [&str; 3] = [
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
];

/// The folder of the model's files. A complete copy in the cache is used as it is, without asking
/// the network; else what is missing is downloaded, unless HF_HUB_OFFLINE forbids it.
pub(crate) fn fetch(id: &str, progress: &mut dyn Progress) -> Result<PathBuf> {
    fetch_with(id, &Environment::from_process(id)?, progress)
}

/// What the hub's environment variables say.
struct Environment {
    cache: PathBuf,
    offline: bool,
    endpoint: Option<String>,
    token: Option<String>,
}

impl Environment {
    fn from_process(id: &str) -> Result<Self> {
        let var = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let text = |name: &str| var(name).and_then(|value| value.into_string().ok());
        let under = |name: &str, rest: &str| var(name).map(|root| PathBuf::from(root).join(rest));
        let cache = var("HF_HUB_CACHE")
            .map(PathBuf::from)
            .or_else(|| under("HF_HOME", "hub"))
            .or_else(|| under("HOME", ".cache/huggingface/hub"))
            .or_else(|| under("USERPROFILE", ".cache/huggingface/hub"));
        let Some(cache) = cache else {
            return Err(problem(
                id,
                "there is no home folder for the hub's cache",
                "set HF_HOME",
            ));
        };
        let offline = text("HF_HUB_OFFLINE").is_some_and(|value| {
            ["1", "on", "yes", "true"].contains(&value.to_ascii_lowercase().as_str())
        });
        Ok(Self {
            cache,
            offline,
            endpoint: text("HF_ENDPOINT"),
            token: text("HF_TOKEN"),
        })
    }
}

fn problem(id: &str, reason: impl Into<String>, advice: impl Into<String>) -> ModelError {
    ModelError::Hub {
        id: id.to_owned(),
        reason: reason.into(),
        advice: advice.into(),
    }
}

/// The command that does by hand what failed here.
fn by_hand(id: &str) -> String {
    format!("run `hf download {id}` where the hub can be reached, or give --model a folder")
}

fn fetch_with(id: &str, environment: &Environment, progress: &mut dyn Progress) -> Result<PathBuf> {
    let cache = Cache::new(environment.cache.clone());
    let repo = Repo::new(id.to_owned(), RepoType::Model);
    let cached = cache.repo(repo.clone()).get("config.json");
    if let Some(folder) = cached.as_deref().and_then(Path::parent)
        && missing(folder)?.is_none()
    {
        return Ok(folder.to_owned());
    }
    if environment.offline {
        let reason = match cached
            .as_deref()
            .and_then(Path::parent)
            .map(missing)
            .transpose()?
        {
            Some(Some(file)) => format!("{file} is not in the cache and HF_HUB_OFFLINE is set"),
            _ => "is not in the cache and HF_HUB_OFFLINE is set".to_owned(),
        };
        return Err(problem(id, reason, by_hand(id)));
    }
    let mut builder = ApiBuilder::from_cache(cache.clone()).with_progress(false);
    if let Some(endpoint) = &environment.endpoint {
        builder = builder.with_endpoint(endpoint.clone());
    }
    if let Some(token) = &environment.token {
        builder = builder.with_token(Some(token.clone()));
    }
    let api = builder.build().map_err(|e| explain(id, &e))?;
    let listing = api.repo(repo.clone()).info().map_err(|e| explain(id, &e))?;
    let files = wanted(
        id,
        &listing
            .siblings
            .iter()
            .map(|s| &*s.rfilename)
            .collect::<Vec<_>>(),
    )?;
    // All files of one commit, also when the branch moves meanwhile.
    let pinned = Repo::with_revision(id.to_owned(), RepoType::Model, listing.sha.clone());
    let folder = cache.repo(repo.clone()).pointer_path(&listing.sha);
    download(
        id,
        &Download {
            repo: api.repo(pinned),
            folder: &folder,
            files,
        },
        progress,
    )?;
    let create = cache.repo(repo).create_ref(&listing.sha);
    create.map_err(|e| ModelError::io(&environment.cache, e))?;
    match missing(&folder)? {
        None => Ok(folder),
        Some(file) => Err(problem(id, format!("{file} did not arrive"), "start again")),
    }
}

/// The first file a usable folder would still need.
fn missing(folder: &Path) -> Result<Option<String>> {
    let mut needed: Vec<String> = NEEDED.map(str::to_owned).to_vec();
    let index = folder.join(INDEX);
    if index.exists() {
        needed.extend(source::shard_names(&index, &json::read(&index)?)?);
    } else {
        needed.push(WEIGHTS.to_owned());
    }
    Ok(needed.into_iter().find(|file| !folder.join(file).exists()))
}

/// The files to download of those the repository lists; an index brings its shards later.
fn wanted(id: &str, listed: &[&str]) -> Result<Vec<&'static str>> {
    let has = |file: &str| listed.contains(&file);
    let weights = [INDEX, WEIGHTS].into_iter().find(|file| has(file));
    let Some(weights) = weights else {
        return Err(match listed.iter().find(|file| file.ends_with(".gguf")) {
            Some(file) => {
                let advice = format!("run `hf download {id} {file}` and give its path");
                problem(id, "holds GGUF files only", advice)
            }
            None => problem(id, "has no safetensors weights", "choose another model"),
        });
    };
    if let Some(file) = NEEDED.into_iter().find(|file| !has(file)) {
        return Err(problem(
            id,
            format!("has no {file}"),
            "choose another model",
        ));
    }
    let optional = OPTIONAL.into_iter().filter(|file| has(file));
    Ok(NEEDED
        .into_iter()
        .chain(optional)
        .chain([weights])
        .collect())
}

/// One model on its way into the cache.
struct Download<'a> {
    repo: ApiRepo,
    folder: &'a Path,
    files: Vec<&'static str>,
}

fn download(id: &str, task: &Download<'_>, progress: &mut dyn Progress) -> Result<()> {
    let mut get = |file: &str| {
        if task.folder.join(file).exists() {
            return Ok(());
        }
        let bar = HubProgress {
            inner: progress,
            done: 0,
        };
        let done = task.repo.download_with_progress(file, bar);
        done.map(drop).map_err(|e| explain(id, &e))
    };
    for file in &task.files {
        get(file)?;
    }
    if task.files.contains(&INDEX) {
        let index = task.folder.join(INDEX);
        for shard in source::shard_names(&index, &json::read(&index)?)? {
            get(&shard)?;
        }
    }
    Ok(())
}

/// One line of advice for the ways a download fails.
fn explain(id: &str, error: &ApiError) -> ModelError {
    let text = error.to_string();
    let reason = text.lines().next().unwrap_or("failed").to_owned();
    let refused = |code: &str| text.contains(&format!("status: {code}"));
    let full = text.contains("No space left") || text.contains("storage full");
    if full {
        return problem(id, "the disk is full", "free some space and start again");
    }
    if refused("404") {
        return problem(
            id,
            "no such model on the hub",
            "check the spelling of org/name",
        );
    }
    if refused("401") || refused("403") {
        let advice = "accept the model's terms on the hub and set HF_TOKEN";
        return problem(id, "the hub refuses access", advice);
    }
    problem(id, reason, by_hand(id))
}

/// Hands hf-hub's progress on.
struct HubProgress<'a> {
    inner: &'a mut dyn Progress,
    done: u64,
}

impl hf_hub::api::Progress for HubProgress<'_> {
    fn init(&mut self, size: usize, filename: &str) {
        self.done = 0;
        self.inner.start(filename, Some(size as u64));
    }

    fn update(&mut self, size: usize) {
        self.done += size as u64;
        self.inner.set(self.done);
    }

    fn finish(&mut self) {
        self.inner.finish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::NoProgress;

    fn environment(cache: &Path) -> Environment {
        // Nothing listens on port 9 of this machine: a try to download fails at once.
        let endpoint = Some("http://127.0.0.1:9".to_owned());
        Environment {
            cache: cache.to_owned(),
            offline: true,
            endpoint,
            token: None,
        }
    }

    #[test]
    fn a_complete_cache_needs_no_network() {
        let dir = tempfile::tempdir().unwrap();
        let repo = dir.path().join("models--org--name");
        let snapshot = repo.join("snapshots/abc");
        std::fs::create_dir_all(&snapshot).unwrap();
        std::fs::create_dir_all(repo.join("refs")).unwrap();
        std::fs::write(repo.join("refs/main"), "abc").unwrap();
        for file in ["config.json", "tokenizer.json"] {
            std::fs::write(snapshot.join(file), "{}").unwrap();
        }
        let fetch = |env: &Environment| fetch_with("org/name", env, &mut NoProgress);
        let offline = environment(dir.path());
        let message = fetch(&offline).unwrap_err().to_string();
        assert!(
            message.contains("model.safetensors is not in the cache"),
            "{message}"
        );
        std::fs::write(snapshot.join("model.safetensors"), "").unwrap();
        assert_eq!(fetch(&offline).unwrap(), snapshot);
        let online = Environment {
            offline: false,
            ..environment(dir.path())
        };
        assert_eq!(fetch(&online).unwrap(), snapshot);
    }

    #[test]
    fn offline_and_unreachable_say_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let offline = environment(dir.path());
        let message = fetch_with("org/name", &offline, &mut NoProgress)
            .unwrap_err()
            .to_string();
        assert!(message.contains("HF_HUB_OFFLINE is set"), "{message}");
        let online = Environment {
            offline: false,
            ..environment(dir.path())
        };
        let message = fetch_with("org/name", &online, &mut NoProgress)
            .unwrap_err()
            .to_string();
        assert!(message.contains("run `hf download org/name`"), "{message}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }

    #[test]
    fn chooses_files_or_says_why_not() {
        let all = [
            "README.md",
            "config.json",
            "tokenizer.json",
            "model.safetensors",
        ];
        let files = wanted("a/b", &all).unwrap();
        assert_eq!(
            files,
            ["config.json", "tokenizer.json", "model.safetensors"]
        );
        let sharded = [
            "config.json",
            "tokenizer.json",
            INDEX,
            WEIGHTS,
            "chat_template.jinja",
        ];
        assert_eq!(wanted("a/b", &sharded).unwrap().last(), Some(&INDEX));
        let gguf = wanted("a/b", &["x-Q4.gguf"]).unwrap_err().to_string();
        assert!(gguf.contains("hf download a/b x-Q4.gguf"), "{gguf}");
        assert!(wanted("a/b", &["config.json", WEIGHTS]).is_err());
    }
}
