//! The configuration: one table of keys, each with a default and a help line; flag > variable > file > default.

mod layers;
mod values;

pub use layers::{Layers, Origin};
pub use values::{Config, JudgeKind, RuleEntry};

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};

/// Where the configuration file lies when none is named.
pub fn default_path() -> Option<PathBuf> {
    directories::ProjectDirs::from("", "", "chela").map(|d| d.config_dir().join("config.toml"))
}

/// Reads and validates everything. `flags` are `section.key = value` pairs.
pub fn load(
    file: Option<&Path>,
    flags: &[(&'static str, toml::Value)],
) -> Result<(Config, Layers)> {
    let mut layers = Layers::of_defaults()?;
    let path = file.map(Path::to_path_buf).or_else(default_path);
    if let Some(path) = path {
        if path.exists() {
            let text = std::fs::read_to_string(&path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            layers.add_file(&path, &text)?;
        } else if file.is_some() {
            bail!("{}: no such configuration file", path.display());
        }
    }
    layers.add_variables(std::env::vars())?;
    for (key, value) in flags {
        layers.set(key, value.clone(), Origin::Flag)?;
    }
    let config = layers.config()?;
    config.validate()?;
    Ok((config, layers))
}

/// The static name of a key that exists.
pub fn known_key(key: &str) -> Result<&'static str> {
    let layers = Layers::of_defaults()?;
    if layers.rows().any(|(known, _, _)| known == key) {
        // Keys named on the command line live as long as the process.
        return Ok(Box::leak(key.to_owned().into_boxed_str()));
    }
    bail!("unknown key {key}; `chela config show` lists the known ones")
}

/// A value from the command line, read as the key's type.
pub fn parse_flag(key: &str, text: &str) -> Result<toml::Value> {
    Layers::of_defaults()?
        .parse(key, text)
        .with_context(|| format!("--set {key}={text}"))
}
