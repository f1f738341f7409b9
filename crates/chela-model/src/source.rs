//! From what a person writes after `--model` to files on this machine.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{ModelError, Result};
use crate::hub;
use crate::progress::Progress;
use crate::starter::{self, Starter};

/// Where a model comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// A model with a short name that is fetched and verified.
    Starter(&'static str),
    /// A folder in Hugging Face layout.
    Folder(PathBuf),
    /// A GGUF file.
    Gguf(PathBuf),
    /// A hub id, `org/name`.
    Hub(String),
}

/// The files of a model, all on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelFiles {
    /// What to call the model: the hub id, or the name of the folder or file (without ending).
    pub name: String,
    /// Where and in what form.
    pub layout: Layout,
}

/// The two forms a model's files come in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Layout {
    /// One GGUF file.
    Gguf(PathBuf),
    /// A folder with config.json, tokenizer.json and safetensors files.
    Folder(PathBuf),
}

impl ModelSource {
    /// Understands a starter name, a folder, a `.gguf` file or a hub id. A path that exists wins
    /// over a hub id of the same spelling; a starter name wins over both (write `./starter` for a
    /// folder of that name).
    pub fn parse(given: &str) -> Result<Self> {
        let given = given.trim();
        if let Some(starter) = Starter::named(given) {
            return Ok(Self::Starter(starter.name));
        }
        let path = PathBuf::from(given);
        if path.is_dir() {
            return Ok(Self::Folder(path));
        }
        let gguf = path
            .extension()
            .is_some_and(|end| end.eq_ignore_ascii_case("gguf"));
        if gguf || path.is_file() {
            return match (gguf, path.is_file()) {
                (true, true) => Ok(Self::Gguf(path)),
                (true, false) => Err(ModelError::NotFound { path }),
                (false, _) => Err(unknown(given)),
            };
        }
        let looks_like_a_path = ["/", "./", "../", "~", "\\"]
            .iter()
            .any(|p| given.starts_with(p));
        if looks_like_a_path {
            return Err(ModelError::NotFound { path });
        }
        if is_hub_id(given) {
            Ok(Self::Hub(given.to_owned()))
        } else {
            Err(unknown(given))
        }
    }
}

/// A GGUF file's name without its ending.
fn gguf_name(path: &Path) -> String {
    path.file_stem()
        .map_or("model".into(), |name| name.to_string_lossy())
        .into_owned()
}

fn unknown(given: &str) -> ModelError {
    let starters = starter::STARTERS
        .each_ref()
        .map(|starter| starter.name)
        .join(", ");
    ModelError::UnknownSource {
        given: given.to_owned(),
        starters,
    }
}

/// `org/name`, each of letters, digits, `-`, `_` and `.`, not beginning with a dot.
fn is_hub_id(text: &str) -> bool {
    let word = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    text.split_once('/')
        .is_some_and(|(org, name)| word(org) && word(name))
}

/// Makes the model's files present: fetches what is missing, verifies what is pinned. `cache_dir`
/// holds starters; hub models lie in the hub's own cache.
pub fn resolve(
    source: &ModelSource,
    cache_dir: &Path,
    progress: &mut dyn Progress,
) -> Result<ModelFiles> {
    match source {
        ModelSource::Starter(name) => {
            let Some(starter) = Starter::named(name) else {
                return Err(unknown(name));
            };
            let path = starter.fetch(cache_dir, progress)?;
            Ok(ModelFiles {
                name: starter.title.to_owned(),
                layout: Layout::Gguf(path),
            })
        }
        ModelSource::Gguf(path) => {
            if !path.is_file() {
                return Err(ModelError::NotFound { path: path.clone() });
            }
            Ok(ModelFiles {
                name: gguf_name(path),
                layout: Layout::Gguf(path.clone()),
            })
        }
        ModelSource::Folder(folder) => in_folder(folder),
        ModelSource::Hub(id) => {
            let folder = hub::fetch(id, progress)?;
            Ok(ModelFiles {
                name: id.clone(),
                layout: Layout::Folder(folder),
            })
        }
    }
}

/// A folder holds a Hugging Face model, or exactly one GGUF file.
fn in_folder(folder: &Path) -> Result<ModelFiles> {
    let io = |e| ModelError::io(folder, e);
    if !folder.join("config.json").exists() {
        let mut ggufs = Vec::new();
        for entry in std::fs::read_dir(folder).map_err(io)? {
            let path = entry.map_err(io)?.path();
            if path
                .extension()
                .is_some_and(|end| end.eq_ignore_ascii_case("gguf"))
            {
                ggufs.push(path);
            }
        }
        if let [path] = ggufs.as_slice() {
            return Ok(ModelFiles {
                name: gguf_name(path),
                layout: Layout::Gguf(path.clone()),
            });
        }
        let file = match ggufs.len() {
            0 => "config.json".to_owned(),
            n => format!("config.json (there are {n} GGUF files: give the path of one)"),
        };
        return Err(ModelError::MissingFile {
            folder: folder.to_owned(),
            file,
        });
    }
    let full = folder.canonicalize().map_err(io)?;
    let name = full
        .file_name()
        .map_or("model".into(), |name| name.to_string_lossy());
    Ok(ModelFiles {
        name: name.into_owned(),
        layout: Layout::Folder(folder.to_owned()),
    })
}

/// The files an index names, each once. They must lie beside the index.
pub(crate) fn shard_names(path: &Path, index: &Value) -> Result<Vec<String>> {
    let map = index.get("weight_map").and_then(Value::as_object);
    let names = map.and_then(|map| map.values().map(Value::as_str).collect::<Option<Vec<_>>>());
    let Some(mut names) = names.filter(|names| !names.is_empty()) else {
        return Err(ModelError::format(path, "has no weight_map of file names"));
    };
    names.sort_unstable();
    names.dedup();
    let outside = |name: &&&str| {
        name.is_empty() || name.starts_with('.') || name.contains(['/', '\\', ':', '\0'])
    };
    if let Some(name) = names.iter().find(outside) {
        return Err(ModelError::format(
            path,
            format!("names the file {name:?} elsewhere"),
        ));
    }
    Ok(names.into_iter().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::NoProgress;
    use serde_json::json;

    #[test]
    fn every_form_is_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let gguf = dir.path().join("tiny.GGUF");
        std::fs::write(&gguf, "x").unwrap();
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let parse = |given: &str| ModelSource::parse(given);
        assert_eq!(parse(" starter ").unwrap(), ModelSource::Starter("starter"));
        let coder = "qwen2.5-coder-0.5b";
        assert_eq!(parse(coder).unwrap(), ModelSource::Starter(coder));
        assert_eq!(
            parse(&text(dir.path())).unwrap(),
            ModelSource::Folder(dir.path().to_owned())
        );
        assert_eq!(parse(&text(&gguf)).unwrap(), ModelSource::Gguf(gguf));
        assert_eq!(
            parse("Qwen/Qwen3-0.6B").unwrap(),
            ModelSource::Hub("Qwen/Qwen3-0.6B".into())
        );
        for missing in ["./nowhere", "/no/such/folder", "models/none.gguf"] {
            assert!(
                matches!(parse(missing), Err(ModelError::NotFound { .. })),
                "{missing}"
            );
        }
        for odd in ["", "smollm", "a/b/c", "org/../x", "or g/name", "-/"] {
            let error = parse(odd).unwrap_err();
            assert!(
                matches!(error, ModelError::UnknownSource { .. }),
                "{odd}: {error}"
            );
            assert!(error.to_string().contains("starter, qwen2.5-coder-0.5b"));
        }
    }

    #[test]
    fn a_folder_with_one_gguf_is_that_file() {
        let dir = tempfile::tempdir().unwrap();
        let source = ModelSource::Folder(dir.path().to_owned());
        let error = resolve(&source, dir.path(), &mut NoProgress).unwrap_err();
        assert!(
            error.to_string().contains("config.json is missing"),
            "{error}"
        );
        std::fs::write(dir.path().join("a.gguf"), "x").unwrap();
        let files = resolve(&source, dir.path(), &mut NoProgress).unwrap();
        assert_eq!(files.layout, Layout::Gguf(dir.path().join("a.gguf")));
        assert_eq!(files.name, "a");
        std::fs::write(dir.path().join("b.gguf"), "x").unwrap();
        let error = resolve(&source, dir.path(), &mut NoProgress).unwrap_err();
        assert!(error.to_string().contains("2 GGUF files"), "{error}");
    }

    #[test]
    fn an_index_cannot_lead_elsewhere() {
        let path = Path::new("i.json");
        let index = json!({"weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"}});
        assert_eq!(
            shard_names(path, &index).unwrap(),
            ["1.safetensors", "2.safetensors"]
        );
        for bad in [
            json!({}),
            json!({"weight_map": {}}),
            json!({"weight_map": {"a": 3}}),
        ] {
            assert!(shard_names(path, &bad).is_err());
        }
        for name in ["../x", "/etc/passwd", "a/b", "C:x", ".hidden", ""] {
            assert!(
                shard_names(path, &json!({"weight_map": {"a": name}})).is_err(),
                "{name}"
            );
        }
    }
}
