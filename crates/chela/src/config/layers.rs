//! Defaults, file, variables and flags, laid over one another with the origin of each value kept.

use super::values::Config;
use anyhow::{Context, Result, anyhow, bail};
use std::{collections::BTreeMap, fmt, path::Path};
use toml::{Table, Value};

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Built in.
    Default,
    /// This file.
    File(String),
    /// This environment variable.
    Variable(String),
    /// The command line.
    Flag,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path) => f.write_str(path),
            Self::Variable(name) => f.write_str(name),
            Self::Flag => f.write_str("flag"),
        }
    }
}

/// Values by dotted key (`server.port`), each with its origin.
#[derive(Clone, Debug)]
pub struct Layers {
    values: BTreeMap<String, (Value, Origin)>,
}

impl Layers {
    /// Every key there is, with its default.
    pub fn of_defaults() -> Result<Self> {
        let table = Table::try_from(Config::default()).context("the built-in defaults")?;
        let mut values = BTreeMap::new();
        for (section, keys) in table {
            let Value::Table(keys) = keys else {
                bail!("{section} is not a section")
            };
            for (key, value) in keys {
                values.insert(format!("{section}.{key}"), (value, Origin::Default));
            }
        }
        Ok(Self { values })
    }

    /// Lays a file's values over what is there. An unknown key is an error that names it.
    pub fn add_file(&mut self, path: &Path, text: &str) -> Result<()> {
        let origin = Origin::File(path.display().to_string());
        let table: Table = text
            .parse()
            .map_err(|e: toml::de::Error| anyhow!("{origin}: {}", one_line(&e)))?;
        for (section, keys) in table {
            let Value::Table(keys) = keys else {
                bail!("{origin}: {section} must be a section like [{section}]");
            };
            for (key, value) in keys {
                self.set(&format!("{section}.{key}"), value, origin.clone())
                    .with_context(|| origin.to_string())?;
            }
        }
        Ok(())
    }

    /// Lays `CHELA_SECTION_KEY` variables over what is there; other names that begin with `CHELA_` are an error, so that a
    /// misspelt one does not pass unseen.
    pub fn add_variables(&mut self, vars: impl Iterator<Item = (String, String)>) -> Result<()> {
        for (name, text) in vars {
            let Some(rest) = name.strip_prefix("CHELA_") else {
                continue;
            };
            let wanted = rest.to_ascii_lowercase();
            let found = self
                .values
                .keys()
                .find(|k| k.replace('.', "_") == wanted)
                .cloned();
            let Some(key) = found else {
                bail!(
                    "the variable {name} names no configuration key; `chela config show` lists them"
                );
            };
            let value = self
                .parse(&key, &text)
                .with_context(|| format!("the variable {name} = {text:?}"))?;
            self.set(&key, value, Origin::Variable(name))?;
        }
        Ok(())
    }

    /// Text as a value of the key's type: strings as they are, everything else as TOML.
    pub fn parse(&self, key: &str, text: &str) -> Result<Value> {
        if matches!(self.values.get(key), Some((Value::String(_), _))) {
            return Ok(Value::String(text.to_owned()));
        }
        parse_value(text)
    }

    /// Sets one value. The key must exist and the type must fit.
    pub fn set(&mut self, key: &str, value: Value, origin: Origin) -> Result<()> {
        let Some((present, _)) = self.values.get(key) else {
            bail!("unknown key {key}; `chela config show` lists the known ones");
        };
        let value = match (present, value) {
            (Value::Float(_), Value::Integer(i)) => Value::Float(i as f64),
            (_, value) => value,
        };
        if present.type_str() != value.type_str() {
            bail!(
                "{key} must be of type {}, not {}",
                present.type_str(),
                value.type_str()
            );
        }
        self.values.insert(key.to_owned(), (value, origin));
        Ok(())
    }

    /// The typed configuration.
    pub fn config(&self) -> Result<Config> {
        let mut table = Table::new();
        for (key, (value, _)) in &self.values {
            let Some((section, name)) = key.split_once('.') else {
                continue;
            };
            let entry = table
                .entry(section)
                .or_insert_with(|| Value::Table(Table::new()));
            if let Value::Table(keys) = entry {
                keys.insert(name.to_owned(), value.clone());
            }
        }
        Value::Table(table)
            .try_into()
            .map_err(|e: toml::de::Error| anyhow!("configuration: {}", one_line(&e)))
    }

    /// Each key with value and origin, by name.
    pub fn rows(&self) -> impl Iterator<Item = (&str, &Value, &Origin)> {
        self.values.iter().map(|(k, (v, o))| (k.as_str(), v, o))
    }
}

fn parse_value(text: &str) -> Result<Value> {
    let table: Table = format!("v = {text}")
        .parse()
        .map_err(|e: toml::de::Error| anyhow!("{}", one_line(&e)))?;
    table.get("v").cloned().context("no value")
}

fn one_line(error: &toml::de::Error) -> String {
    let text = error.to_string();
    text.lines()
        .map(str::trim)
        .filter(|l| !l.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flag_over_variable_over_file_over_default() {
        let mut layers = Layers::of_defaults().unwrap();
        assert_eq!(layers.config().unwrap().server.port, 30000);
        layers
            .add_file(
                Path::new("f.toml"),
                "[server]\nport = 1\nhost = \"localhost\"",
            )
            .unwrap();
        layers
            .add_variables([("CHELA_SERVER_PORT".to_owned(), "2".to_owned())].into_iter())
            .unwrap();
        assert_eq!(layers.config().unwrap().server.port, 2);
        layers
            .set("server.port", Value::Integer(3), Origin::Flag)
            .unwrap();
        let config = layers.config().unwrap();
        assert_eq!(
            (config.server.port, config.server.host.as_str()),
            (3, "localhost")
        );
        let row = layers.rows().find(|r| r.0 == "server.host").unwrap();
        assert_eq!(row.2.to_string(), "f.toml");
    }

    #[test]
    fn what_is_unknown_or_of_another_type_is_named() {
        let mut layers = Layers::of_defaults().unwrap();
        let file = Path::new("f.toml");
        for (text, word) in [
            ("[server]\nprot = 1", "server.prot"),
            ("[nothing]\nx = 1", "nothing.x"),
            ("[server]\nport = \"x\"", "server.port"),
            ("port = 1", "section"),
            ("[server", "f.toml"),
        ] {
            let error = format!("{:#}", layers.add_file(file, text).unwrap_err());
            assert!(error.contains(word), "{error}");
            assert!(!error.contains('\n'), "{error}");
        }
        let bad = [("CHELA_SERVER_PROT".to_owned(), "2".to_owned())];
        assert!(layers.add_variables(bad.into_iter()).is_err());
    }
}
