//! A client's configuration file, changed key by key so that everything else in it stays.

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use toml_edit::{DocumentMut, Item, Table, TableLike};

/// How a file is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Plain JSON.
    Json,
    /// TOML; comments stay.
    Toml,
    /// A key and a value on each line, with this between: the top level of YAML, or variables.
    Lines(&'static str),
}

/// A parsed file.
pub enum Document {
    /// JSON.
    Json(Value),
    /// TOML.
    Toml(DocumentMut),
    /// Lines with what stands between key and value.
    Lines(Vec<String>, &'static str),
}

impl Document {
    /// Reads a text; an empty one is an empty file.
    pub fn parse(format: Format, text: &str) -> Result<Self> {
        Ok(match format {
            Format::Json if text.trim().is_empty() => Self::Json(Value::Object(Map::new())),
            Format::Json => {
                let value: Value = serde_json::from_str(text)
                    .context("it is not plain JSON (comments are not understood)")?;
                if !value.is_object() {
                    bail!("it is no JSON object");
                }
                Self::Json(value)
            }
            Format::Toml => Self::Toml(text.parse().context("it is not TOML")?),
            Format::Lines(between) => {
                let lines: Vec<String> = text.lines().map(str::to_owned).collect();
                if let Some(line) = lines.iter().find(|line| !is_simple(line, between)) {
                    bail!(
                        "it has the line {line:?}, and only lines of a plain key and its value are understood"
                    );
                }
                Self::Lines(lines, between)
            }
        })
    }

    /// The file's text.
    pub fn text(&self) -> Result<String> {
        Ok(match self {
            Self::Json(value) => serde_json::to_string_pretty(value)? + "\n",
            Self::Toml(document) => document.to_string(),
            Self::Lines(lines, _) => lines.iter().map(|l| format!("{l}\n")).collect(),
        })
    }

    /// The value at a path.
    pub fn get(&self, path: &[String]) -> Option<Value> {
        match self {
            Self::Json(root) => path.iter().try_fold(root, |at, key| at.get(key)).cloned(),
            Self::Toml(document) => {
                let mut at = document.as_item();
                for key in path {
                    at = at.get(key)?;
                }
                from_toml(at)
            }
            Self::Lines(lines, between) => {
                let at = line_of(lines, path.first()?, between)?;
                let (_, value) = lines[at].split_once(between.trim_end())?;
                let quoted = serde_json::from_str::<String>(value.trim()).ok();
                Some(Value::from(
                    quoted.unwrap_or_else(|| value.trim().to_owned()),
                ))
            }
        }
    }

    /// Puts a value at a path, and tables on the way to it.
    pub fn set(&mut self, path: &[String], value: &Value) -> Result<()> {
        let Some((last, parents)) = path.split_last() else {
            bail!("an empty path");
        };
        let in_the_way = |key: &str| format!("{key} in it is no table");
        match self {
            Self::Json(root) => {
                let mut at = root;
                for key in parents {
                    let map = at.as_object_mut().context("it is no table")?;
                    at = map.entry(key).or_insert_with(|| Value::Object(Map::new()));
                    if !at.is_object() {
                        bail!(in_the_way(key));
                    }
                }
                let map = at.as_object_mut().context("it is no table")?;
                map.insert(last.clone(), value.clone());
            }
            Self::Toml(document) => {
                let mut at: &mut dyn TableLike = document.as_table_mut();
                for key in parents {
                    let item = at.entry(key).or_insert_with(|| {
                        let mut table = Table::new();
                        // Only what holds values gets a header.
                        table.set_implicit(true);
                        Item::Table(table)
                    });
                    at = item.as_table_like_mut().with_context(|| in_the_way(key))?;
                }
                let mut value = to_toml(value)?;
                match at.get_mut(last) {
                    // What is written around it stays.
                    Some(Item::Value(old)) => {
                        *value.decor_mut() = old.decor().clone();
                        *old = value;
                    }
                    _ => {
                        at.insert(last, Item::Value(value));
                    }
                }
            }
            Self::Lines(lines, between) => {
                let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@+".contains(c);
                let text = match value {
                    Value::String(text) if !text.is_empty() && text.chars().all(plain) => {
                        text.clone()
                    }
                    // Both YAML and files of variables read such a text in JSON's quotes.
                    other => other.to_string(),
                };
                let line = format!("{last}{between}{text}");
                let found = line_of(lines, last, between);
                let more = found.and_then(|at| line_of(&lines[at + 1..], last, between));
                if more.is_some() {
                    bail!("{last} is in it twice");
                }
                match found {
                    Some(at) => {
                        let old = lines[at].split_once(between.trim_end());
                        let old = old.map_or("", |(_, value)| value.trim_start());
                        if old.starts_with(['|', '>', '&', '*']) || old.is_empty() {
                            bail!("{last} in it is no value on one line");
                        }
                        lines[at] = line;
                    }
                    None => lines.push(line),
                }
            }
        }
        Ok(())
    }

    /// Takes a value out, and tables that are empty without it.
    pub fn remove(&mut self, path: &[String]) {
        match self {
            Self::Json(root) => remove_json(root, path),
            Self::Toml(document) => remove_toml(document.as_table_mut(), path),
            Self::Lines(lines, between) => {
                let at = path.first().and_then(|key| line_of(lines, key, between));
                if let Some(at) = at {
                    lines.remove(at);
                }
            }
        }
    }
}

/// Empty, a comment, indented below a key, or a plain key with its value.
fn is_simple(line: &str, between: &str) -> bool {
    let line = line.strip_prefix("export ").unwrap_or(line);
    if line.trim().is_empty() || line.starts_with(['#', ' ', '\t']) {
        return true;
    }
    let Some((key, _)) = line.split_once(between.trim_end()) else {
        return false;
    };
    let key = key.trim_end();
    !key.is_empty()
        && key
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

fn line_of(lines: &[String], key: &str, between: &str) -> Option<usize> {
    let mark = between.trim_end();
    lines.iter().position(|line| {
        let rest = line.strip_prefix(key).map(str::trim_start);
        rest.is_some_and(|rest| rest.starts_with(mark))
    })
}

fn remove_json(at: &mut Value, path: &[String]) {
    let (Some(map), Some((key, rest))) = (at.as_object_mut(), path.split_first()) else {
        return;
    };
    if let Some(inner) = map.get_mut(key).filter(|_| !rest.is_empty()) {
        remove_json(inner, rest);
        if inner.as_object().is_some_and(|inner| !inner.is_empty()) {
            return;
        }
    }
    map.shift_remove(key);
}

fn remove_toml(at: &mut dyn TableLike, path: &[String]) {
    let Some((key, rest)) = path.split_first() else {
        return;
    };
    if let Some(inner) = at.get_mut(key).filter(|_| !rest.is_empty()) {
        let Some(inner) = inner.as_table_like_mut() else {
            return;
        };
        remove_toml(inner, rest);
        if !inner.is_empty() {
            return;
        }
    }
    at.remove(key);
}

fn from_toml(item: &Item) -> Option<Value> {
    let value = item.as_value()?;
    // Through TOML's own text: a value alone is a document's only entry.
    let table: toml::Table = toml::from_str(&format!("v = {}", value.to_string().trim())).ok()?;
    serde_json::to_value(table.get("v")?).ok()
}

fn to_toml(value: &Value) -> Result<toml_edit::Value> {
    let text = toml::Value::try_from(value)?.to_string();
    text.parse().context("a value that TOML cannot hold")
}

/// Writes a file whole or not at all. A new one is private: it may hold a key.
pub fn write(path: &Path, text: &str) -> Result<()> {
    // A link stays one: what it points at is replaced.
    let path: PathBuf = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let folder = path.parent().context("a file without a folder")?;
    std::fs::create_dir_all(folder)
        .with_context(|| format!("cannot create {}", folder.display()))?;
    let whole = || -> std::io::Result<()> {
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        std::io::Write::write_all(&mut file, text.as_bytes())?;
        if let Ok(old) = std::fs::metadata(&path) {
            file.as_file().set_permissions(old.permissions())?;
        }
        file.as_file().sync_all()?;
        file.persist(&path)?;
        Ok(())
    };
    whole().with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn path(dotted: &str) -> Vec<String> {
        dotted.split('.').map(str::to_owned).collect()
    }

    #[test]
    fn what_is_set_and_removed_leaves_the_rest_as_it_was() {
        let toml = "# mine\nmodel = \"other\" # keep\n\n[tools]\nweb = true\n";
        for (format, text) in [
            (
                Format::Json,
                "{\n  \"model\": \"other\",\n  \"tools\": {\n    \"web\": true\n  }\n}\n",
            ),
            (Format::Toml, toml),
        ] {
            let mut document = Document::parse(format, text).unwrap();
            let new = path("providers.chela.base");
            assert_eq!(document.get(&path("model")), Some(json!("other")));
            assert_eq!(document.get(&new), None);
            document.set(&new, &json!("http://x")).unwrap();
            document
                .set(&path("providers.chela.list"), &json!(["a", 1]))
                .unwrap();
            let mut again = Document::parse(format, &document.text().unwrap()).unwrap();
            assert_eq!(again.get(&new), Some(json!("http://x")));
            assert_eq!(
                again.get(&path("providers.chela.list")),
                Some(json!(["a", 1]))
            );
            again.remove(&new);
            again.remove(&path("providers.chela.list"));
            assert_eq!(again.text().unwrap(), text);
            let error = again.set(&path("model.deeper"), &json!(1)).unwrap_err();
            assert!(error.to_string().contains("model in it"), "{error}");
        }
    }

    #[test]
    fn comments_around_a_replaced_value_stay() {
        let text = "# mine\nmodel = \"a\"   # keep\n";
        let mut document = Document::parse(Format::Toml, text).unwrap();
        document.set(&path("model"), &json!("b")).unwrap();
        assert_eq!(document.text().unwrap(), "# mine\nmodel = \"b\"   # keep\n");
    }

    #[test]
    fn lines_are_replaced_where_they_stand() {
        let text = "# comment\nmodel: a\nother: 1\n";
        let mut document = Document::parse(Format::Lines(": "), text).unwrap();
        document.set(&path("model"), &json!("b")).unwrap();
        document.set(&path("new"), &json!("c")).unwrap();
        assert_eq!(
            document.text().unwrap(),
            "# comment\nmodel: b\nother: 1\nnew: c\n"
        );
        document
            .set(&path("new"), &json!("a: b # \n\"c\""))
            .unwrap();
        let said = document.text().unwrap();
        assert!(said.ends_with("new: \"a: b # \\n\\\"c\\\"\"\n"), "{said}");
        assert_eq!(document.get(&path("new")), Some(json!("a: b # \n\"c\"")));
        document.remove(&path("new"));
        document.set(&path("model"), &json!("a")).unwrap();
        assert_eq!(document.text().unwrap(), text);
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        assert!(Document::parse(Format::Json, "{ // no\n}").is_err());
        assert!(Document::parse(Format::Json, "[]").is_err());
        assert!(Document::parse(Format::Toml, "a = ").is_err());
        for yaml in [
            "{model: x}",
            "- a",
            "a: [1\n]",
            "\"model\": x",
            "---",
            "...",
        ] {
            assert!(
                Document::parse(Format::Lines(": "), yaml).is_err(),
                "{yaml}"
            );
        }
        for yaml in ["model: |\n  a", "model: a\nmodel: b", "model:\n  - a"] {
            let mut document = Document::parse(Format::Lines(": "), yaml).unwrap();
            assert!(document.set(&path("model"), &json!("x")).is_err(), "{yaml}");
        }
    }
}
