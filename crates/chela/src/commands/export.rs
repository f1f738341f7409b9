//! Takes what was learned out of the program: an adapter as PEFT's two files, or merged into the model for other programs.

use crate::{
    config::Config,
    output::{Output, json_line},
    supervise,
};
use anyhow::{Context, Result, bail};
use chela_core::{Profile, TrajectoryStore, VersionState, Weights, registry};
use chela_engine::merge::{self, Form, Merged};
use chela_model::{DType, Model, Progress, TerminalProgress};
use chela_store::Store;
use serde_json::json;
use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
};

/// What `chela policy export` was asked for.
pub struct Asked<'a> {
    /// Whose version.
    pub profile: &'a str,
    /// Which; `None` = what is served.
    pub version: Option<u64>,
    /// `hf` or `gguf`; `None` = the adapter itself.
    pub merged: Option<&'a str>,
    /// See [`parse_dtype`].
    pub dtype: Option<&'a str>,
    /// What is made.
    pub to: &'a Path,
}

/// `chela policy export`: reads the store, also while a server runs, and writes files.
pub fn run(config: &Config, data_dir: &Path, asked: &Asked<'_>, output: &Output) -> Result<()> {
    let profile = Profile::new(asked.profile)?;
    let store = Store::open_read_only(data_dir)?;
    let versions = store.versions(&profile)?;
    let number = asked
        .version
        .unwrap_or_else(|| registry::served_number(&versions));
    if number == 0 {
        bail!(
            "profile {profile} serves the base model: there is no adapter; name a version with --version"
        );
    }
    let record = versions
        .iter()
        .find(|v| v.version.number == number)
        .with_context(|| format!("profile {profile} has no version {number}"))?;
    if let VersionState::Forgotten(why) = &record.state {
        bail!("version {number} is deleted: {why}");
    }
    let name = record.checkpoint.as_ref();
    let from = data_dir.join(name.with_context(|| format!("version {number} has no files"))?);
    let said = match asked.merged {
        None => format!("{} bytes", export_adapter(&from, asked.to)?),
        Some(format) => {
            let mut progress = TerminalProgress::default();
            let model = Model::open(&supervise::find(config, &mut progress)?)?;
            let dtype = asked.dtype.map(parse_dtype).transpose()?;
            let form = parse_format(format)?;
            let merged = export_merged(&model, &from, form, dtype, asked.to, &mut progress)?;
            match merged.adapter {
                Some(_) => format!("{} maps merged, stored as {:?}", merged.maps, merged.dtype),
                None => format!(
                    "the whole model that was trained, stored as {:?}",
                    merged.dtype
                ),
            }
        }
    };
    if output.json {
        return output.plain(&json_line(&json!({
            "profile": profile.as_str(), "version": number, "to": asked.to.display().to_string(),
        })));
    }
    output.note(&format!(
        "version {profile}@{number} is in {} ({said})",
        asked.to.display()
    ));
    Ok(())
}

/// The files that PEFT reads; a checkpoint's others are the optimizer's.
const FILES: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];

/// Copies an adapter's two files from the folder `from` into `to`, which must not exist and does only when both are on disk.
/// Returns their bytes.
pub fn export_adapter(from: &Path, to: &Path) -> Result<u64> {
    refuse_existing(to)?;
    if Weights::is_whole(from) {
        bail!(
            "{} is a whole model, there is no adapter to export; `--merged hf` or `--merged gguf` writes the model",
            from.display()
        );
    }
    for name in FILES {
        if !from.join(name).is_file() {
            bail!(
                "{}: {name} is missing; give the folder of an adapter",
                from.display()
            );
        }
    }
    let temporary = temporary(to)?;
    let copied = copy_into(from, &temporary).and_then(|bytes| {
        fs::rename(&temporary, to).with_context(|| to.display().to_string())?;
        sync(parent(to))?;
        Ok(bytes)
    });
    if copied.is_err() {
        let _ = fs::remove_dir_all(&temporary); // half a copy is of no use; the first error is what is told
    }
    copied
}

fn copy_into(from: &Path, dir: &Path) -> Result<u64> {
    fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    let mut total = 0;
    for name in FILES {
        let (source, target) = (from.join(name), dir.join(name));
        let bytes = fs::read(&source).with_context(|| source.display().to_string())?;
        let write = || {
            let mut file = File::create(&target)?;
            file.write_all(&bytes)?;
            file.sync_all()
        };
        write().with_context(|| target.display().to_string())?;
        total += bytes.len() as u64;
    }
    sync(dir)?;
    Ok(total)
}

/// Writes the model with an adapter merged in: a Hugging Face folder or a GGUF file at `to`, which must not exist. `dtype` `None` is
/// the form's default (see [`merge::merge`]).
pub fn export_merged(
    model: &Model,
    adapter_dir: &Path,
    format: Form,
    dtype: Option<DType>,
    to: &Path,
    progress: &mut dyn Progress,
) -> Result<Merged> {
    refuse_existing(to)?;
    if format == Form::Gguf && to.extension().is_none_or(|end| end != "gguf") {
        bail!("{}: a GGUF file's name ends in .gguf", to.display());
    }
    let parent = parent(to);
    fs::create_dir_all(parent).with_context(|| parent.display().to_string())?;
    Ok(merge::merge(
        model,
        adapter_dir,
        (format, dtype),
        to,
        progress,
    )?)
}

/// `hf` or `gguf`, as a person writes it.
pub fn parse_format(word: &str) -> Result<Form> {
    match word {
        "hf" | "safetensors" => Ok(Form::Folder),
        "gguf" => Ok(Form::Gguf),
        other => bail!(
            "{other:?} is no format: hf (a folder for transformers) and gguf (a file for llama.cpp) are"
        ),
    }
}

/// `f32`, `f16`, `bf16` or `q8_0`; which of them a format takes is checked when it is written.
pub fn parse_dtype(word: &str) -> Result<DType> {
    match word.to_ascii_lowercase().as_str() {
        "f32" => Ok(DType::F32),
        "f16" => Ok(DType::F16),
        "bf16" => Ok(DType::BF16),
        "q8_0" => Ok(DType::Q8_0),
        _ => {
            bail!("{word:?} is no type to store weights in: f32, f16, bf16 and (for gguf) q8_0 are")
        }
    }
}

fn refuse_existing(to: &Path) -> Result<()> {
    if to.exists() {
        bail!(
            "{} is already there; give another name or remove it",
            to.display()
        );
    }
    Ok(())
}

fn parent(to: &Path) -> &Path {
    match to.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Beside the target, so that the last step is a rename.
fn temporary(to: &Path) -> Result<PathBuf> {
    let Some(name) = to.file_name() else {
        bail!("{}: give a folder to write to", to.display());
    };
    let name = format!(".{}.{}.tmp", name.to_string_lossy(), std::process::id());
    Ok(to.with_file_name(name))
}

fn sync(dir: &Path) -> Result<()> {
    let sync = || File::open(dir)?.sync_all();
    sync().with_context(|| dir.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use chela_model::{NoProgress, testing};

    fn adapter(dir: &Path) {
        fs::create_dir_all(dir).unwrap();
        for name in FILES {
            fs::write(dir.join(name), name).unwrap();
        }
        fs::write(dir.join("optimizer.safetensors"), "no part of it").unwrap();
    }

    #[test]
    fn an_adapter_is_two_files() {
        let home = tempfile::tempdir().unwrap();
        let (from, to) = (home.path().join("from"), home.path().join("a/b/to"));
        adapter(&from);
        assert_eq!(export_adapter(&from, &to).unwrap(), 44);
        let mut names: Vec<_> = fs::read_dir(&to)
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        names.sort();
        assert_eq!(names, FILES);
        let error = export_adapter(&from, &to).unwrap_err().to_string();
        assert!(error.contains("already there"), "{error}");
        fs::remove_file(from.join(FILES[1])).unwrap();
        let other = home.path().join("other");
        fs::write(from.join(Weights::MODEL), "weights").unwrap();
        let error = export_adapter(&from, &other).unwrap_err().to_string();
        assert!(error.contains("--merged hf"), "{error}");
        fs::remove_file(from.join(Weights::MODEL)).unwrap();
        let error = export_adapter(&from, &other).unwrap_err().to_string();
        assert!(
            error.contains("adapter_model.safetensors is missing"),
            "{error}"
        );
        assert!(!other.exists());
    }

    #[test]
    fn what_cannot_be_merged_leaves_nothing() {
        let home = tempfile::tempdir().unwrap();
        let spec = testing::TinySpec::default();
        let files = testing::write_tiny_llama(&home.path().join("tiny"), 1, &spec).unwrap();
        let model = Model::open(&files).unwrap();
        let from = home.path().join("from");
        adapter(&from); // not one at all
        for (form, name) in [
            (Form::Folder, "x"),
            (Form::Gguf, "x.gguf"),
            (Form::Gguf, "x"),
        ] {
            let to = home.path().join(name);
            let merged = export_merged(&model, &from, form, None, &to, &mut NoProgress);
            assert!(merged.is_err());
            assert!(!to.exists());
        }
    }

    #[test]
    fn words_are_read() {
        assert_eq!(parse_format("hf").unwrap(), Form::Folder);
        assert_eq!(parse_format("gguf").unwrap(), Form::Gguf);
        assert!(parse_format("onnx").is_err());
        assert_eq!(parse_dtype("Q8_0").unwrap(), DType::Q8_0);
        assert!(parse_dtype("int4").is_err());
    }
}
