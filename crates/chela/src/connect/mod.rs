//! `chela connect CLIENT`: points a client at the server, and takes that back.
//!
//! What was changed is written down beside the data first, with the file as it was: `--undo` gives the very file back when nobody
//! changed it since, else only what was changed here.

mod clients;
mod file;

use crate::{
    cli::ConnectArgs,
    config::Config,
    folder,
    output::{Output, json_line},
};
use anyhow::{Context, Result, bail};
use clients::{CLIENTS, Client, Edit, Home, Target, Way};
use file::{Document, Format};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::{
    path::{Path, PathBuf},
    time::Duration,
};

/// A key that was changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Change {
    path: Vec<String>,
    /// What stood there; none: nothing.
    was: Option<Value>,
    now: Value,
}

/// What was done to a client's file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Done {
    file: PathBuf,
    /// Its text before; none: there was no file, or it was changed by others between two runs.
    before: Option<String>,
    /// There was a file.
    existed: bool,
    /// SHA-256 of the text that was written.
    wrote: String,
    changes: Vec<Change>,
}

fn hash(text: &str) -> String {
    hex::encode(Sha256::digest(text.as_bytes()))
}

/// Does it.
pub fn run(config: &Config, data_dir: &Path, args: &ConnectArgs, output: &Output) -> Result<()> {
    let Some(client) = CLIENTS.iter().find(|c| c.name == args.client) else {
        let names: Vec<&str> = CLIENTS.iter().map(|c| c.name).collect();
        bail!(
            "no client is called {}; known are {}. Any other that speaks OpenAI's or Anthropic's API works with the address of `chela serve`",
            args.client,
            names.join(", ")
        );
    };
    let dirs = directories::BaseDirs::new().context("no home folder is known")?;
    let variable = |name: &str| std::env::var(name).ok();
    let home = Home {
        dir: dirs.home_dir().to_owned(),
        variable: &variable,
    };
    let note = data_dir
        .join("connect")
        .join(format!("{}.json", client.name));
    if args.undo {
        return match &client.way {
            Way::File(format, ..) => undo(client, *format, &note, output),
            Way::Variables(_) => {
                output.note("nothing was written: unset the variables in your shell");
                Ok(())
            }
        };
    }
    let target = target(config, data_dir, args, output)?;
    if client.opening > target.context * 3 / 4 {
        output.note(&format!(
            "note: {} sends about {} tokens before a word is said, and {} reads {}: serve a model with a longer context",
            client.name, client.opening, target.model, target.context
        ));
    }
    match &client.way {
        Way::Variables(variables) if output.json => {
            let all = variables(&target);
            let all: serde_json::Map<String, Value> = all
                .into_iter()
                .map(|(k, v)| (k.to_owned(), json!(v)))
                .collect();
            output.plain(&json_line(
                &json!({"client": client.name, "variables": all}),
            ))
        }
        Way::Variables(variables) => {
            for (name, value) in variables(&target) {
                output.plain(&format!("export {name}={}", quoted(&value)))?;
            }
            output.note(&format!("then start {}", client.start));
            Ok(())
        }
        Way::File(format, path, edits) => {
            let path = path(&home);
            let (text, done) = changed(*format, &path, &edits(&target), read_note(&note)?)?;
            if args.print {
                return output.plain(text.trim_end());
            }
            std::fs::create_dir_all(note.parent().unwrap_or(data_dir))
                .with_context(|| format!("cannot create {}", data_dir.display()))?;
            // First how to take it back, then the change.
            let said = serde_json::to_string_pretty(&done)?;
            crate::keys::write_private(&note, said.as_bytes())?;
            file::write(&path, &text)?;
            if output.json {
                let object = json!({"client": client.name, "file": path, "url": target.url, "model": target.model});
                return output.plain(&json_line(&object));
            }
            output.note(&format!(
                "{} now asks {} for {} ({} changed; `chela connect {} --undo` takes it back)",
                client.name,
                target.url,
                target.model,
                path.display(),
                client.name
            ));
            output.note(&format!("start it with: {}", client.start));
            Ok(())
        }
    }
}

/// For a shell.
fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@%+,=".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

/// Where the server is and what it serves: asked of it when it runs, else from the configuration.
fn target(config: &Config, data_dir: &Path, args: &ConnectArgs, output: &Output) -> Result<Target> {
    let running = folder::running(data_dir).map(|note| note.address);
    let host = match config.server.host.as_str() {
        "0.0.0.0" | "::" => "127.0.0.1",
        host => host,
    };
    let configured = format!("http://{host}:{}", config.server.port);
    let url = args.url.clone().or(running).unwrap_or(configured);
    let url = url.trim_end_matches('/');
    let url = url.strip_suffix("/v1").unwrap_or(url).to_owned();
    if !url.starts_with("http://") && !url.starts_with("https://") {
        bail!("--url {url}: write it like http://127.0.0.1:30000");
    }
    let key = args.key.clone().unwrap_or_else(|| "local".to_owned());
    let (model, context) = match served(&url, &key) {
        Ok(found) => found,
        Err(error) => {
            output.note(&format!(
                "note: {url} does not answer ({error:#}); start `chela serve`, and connect again if its model is another"
            ));
            (config.model.name.clone(), 32_768)
        }
    };
    Ok(Target {
        url,
        model: args.name.clone().unwrap_or(model),
        key,
        context,
    })
}

fn served(url: &str, key: &str) -> Result<(String, usize)> {
    let config = ureq::Agent::config_builder()
        .timeout_global(Some(Duration::from_secs(5)))
        .build();
    let agent: ureq::Agent = config.into();
    let request = agent.get(format!("{url}/v1/models"));
    let mut answer = request
        .header("authorization", format!("Bearer {key}"))
        .call()?;
    let body: Value = answer.body_mut().read_json()?;
    let first = &body["data"][0];
    let name = first["id"].as_str().context("it lists no model")?;
    let context = first["context_length"].as_u64().unwrap_or(32_768);
    Ok((name.to_owned(), context as usize))
}

fn read(path: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

fn read_note(path: &Path) -> Result<Option<Done>> {
    let text = read(path)?;
    text.map(|text| {
        serde_json::from_str(&text)
            .with_context(|| format!("{} is damaged; remove it to go on", path.display()))
    })
    .transpose()
}

/// The file's new text, and what to write down. What an earlier run noted as the user's own stays that.
fn changed(
    format: Format,
    path: &Path,
    edits: &[Edit],
    earlier: Option<Done>,
) -> Result<(String, Done)> {
    let earlier = earlier.filter(|done| done.file == path);
    let old = read(path)?;
    let by_hand = || {
        let mut document = Document::parse(format, "")?;
        for edit in edits.iter().filter(|edit| !edit.value.is_null()) {
            document.set(&edit.at, &edit.value)?;
        }
        document.text()
    };
    let parsed = Document::parse(format, old.as_deref().unwrap_or_default());
    let edited = parsed.and_then(|mut document| {
        let mut changes = Vec::new();
        let stands = |e: &Edit| {
            e.unless
                .as_ref()
                .is_some_and(|at| document.get(at).is_some())
        };
        let edits: Vec<&Edit> = edits.iter().filter(|edit| !stands(edit)).collect();
        for Edit { at, value, .. } in edits.iter().copied() {
            let noted = earlier.iter().flat_map(|e| &e.changes);
            let was = match noted.clone().find(|c| &c.path == at) {
                Some(change) => change.was.clone(),
                None => document.get(at),
            };
            match value {
                Value::Null => document.remove(at),
                value => document.set(at, value)?,
            }
            let (path, now) = (at.clone(), value.clone());
            changes.push(Change { path, was, now });
        }
        // What an earlier run set and this one does not is still to be taken back one day.
        let others = earlier.iter().flat_map(|e| &e.changes);
        let others = others.filter(|c| !edits.iter().any(|edit| edit.at == c.path));
        changes.extend(others.cloned().collect::<Vec<_>>());
        Ok((document.text()?, changes))
    });
    let (text, changes) = match edited {
        Ok(done) => done,
        Err(error) => bail!(
            "cannot change {}: {error:#}. Add this to it by hand:\n{}",
            path.display(),
            by_hand()?
        ),
    };
    let untouched = |e: &Done| old.as_deref().map(hash).as_ref() == Some(&e.wrote);
    let (existed, before) = match earlier {
        Some(e) if untouched(&e) => (e.existed, e.before),
        // What an earlier run wrote stands in it, beside what others wrote.
        Some(_) => (old.is_some(), None),
        None => (old.is_some(), old),
    };
    let done = Done {
        file: path.to_owned(),
        existed,
        before,
        wrote: hash(&text),
        changes,
    };
    Ok((text, done))
}

fn undo(client: &Client, format: Format, note: &Path, output: &Output) -> Result<()> {
    let Some(done) = read_note(note)? else {
        bail!("{} was not connected from this data folder", client.name);
    };
    let path = &done.file;
    let left = restore(format, &done)?;
    std::fs::remove_file(note).with_context(|| format!("cannot remove {}", note.display()))?;
    for key in left {
        output.note(&format!("{key} was changed since and stays"));
    }
    output.note(&format!("{} is as it was before", path.display()));
    Ok(())
}

/// Takes changes back. Returns the keys that somebody else changed since, which stay.
fn restore(format: Format, done: &Done) -> Result<Vec<String>> {
    let path = &done.file;
    let Some(now) = read(path)? else {
        return Ok(Vec::new());
    };
    if hash(&now) == done.wrote {
        match (&done.before, done.existed) {
            (Some(before), _) => return file::write(path, before).map(|()| Vec::new()),
            (None, false) => {
                std::fs::remove_file(path)
                    .with_context(|| format!("cannot remove {}", path.display()))?;
                return Ok(Vec::new());
            }
            (None, true) => {}
        }
    }
    let mut document = Document::parse(format, &now)
        .with_context(|| format!("cannot change {} back", path.display()))?;
    let mut left = Vec::new();
    for change in &done.changes {
        let standing = document.get(&change.path);
        if standing.clone().unwrap_or_default() != change.now {
            if standing != change.was {
                left.push(change.path.join("."));
            }
            continue;
        }
        match &change.was {
            Some(was) => document.set(&change.path, was)?,
            None => document.remove(&change.path),
        }
    }
    file::write(path, &document.text()?)?;
    Ok(left)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target() -> Target {
        Target {
            url: "http://127.0.0.1:1".to_owned(),
            model: "org/m".to_owned(),
            key: "k".to_owned(),
            context: 32_768,
        }
    }

    /// Every client's file: written into nothing, beside what is there, twice, and taken back.
    #[test]
    fn what_is_written_is_taken_back() {
        for client in CLIENTS {
            let Way::File(format, path, edits) = &client.way else {
                continue;
            };
            let dir = tempfile::tempdir().unwrap();
            let home = Home {
                dir: dir.path().to_owned(),
                variable: &|_| None,
            };
            let path = path(&home);
            assert!(path.starts_with(dir.path()), "{}", client.name);
            let edits = edits(&target());
            // No file before: none after.
            let (text, done) = changed(*format, &path, &edits, None).unwrap();
            file::write(&path, &text).unwrap();
            assert!(text.contains("127.0.0.1:1"), "{}: {text}", client.name);
            assert!(restore(*format, &done).unwrap().is_empty());
            assert!(!path.exists(), "{}", client.name);
            // The user's own things stay, byte for byte.
            let own = match format {
                Format::Json => "{\"theme\":   \"dark\"}",
                Format::Toml => "# mine\ntheme = \"dark\"   # really\n",
                Format::Lines(between) => &format!("# mine\ntheme{between}dark\n"),
            };
            file::write(&path, own).unwrap();
            let (text, done) = changed(*format, &path, &edits, None).unwrap();
            file::write(&path, &text).unwrap();
            let mut moved = target();
            moved.url = "http://127.0.0.1:2".to_owned();
            let Way::File(_, _, again) = &client.way else {
                continue;
            };
            let (text, done) = changed(*format, &path, &again(&moved), Some(done)).unwrap();
            file::write(&path, &text).unwrap();
            assert!(text.contains("127.0.0.1:2") && text.contains("dark"));
            assert!(restore(*format, &done).unwrap().is_empty());
            assert_eq!(
                std::fs::read_to_string(&path).unwrap(),
                own,
                "{}",
                client.name
            );
        }
    }

    fn edit(at: &str, value: &str, unless: Option<&str>) -> Edit {
        Edit {
            at: vec![at.to_owned()],
            value: json!(value),
            unless: unless.map(|at| vec![at.to_owned()]),
        }
    }

    #[test]
    fn what_is_only_a_default_leaves_what_stands_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.toml");
        let edits = [
            edit("model", "ours", None),
            edit("level", "low", Some("profile")),
            edit("profile", "chela", Some("profile")),
        ];
        let own = "profile = \"strict\"\n";
        file::write(&path, own).unwrap();
        let (text, _) = changed(Format::Toml, &path, &edits, None).unwrap();
        assert_eq!(text, "profile = \"strict\"\nmodel = \"ours\"\n");
        // What a run before this one put there is still taken out.
        file::write(&path, "").unwrap();
        let (text, done) = changed(Format::Toml, &path, &edits, None).unwrap();
        assert!(text.contains("level = \"low\"") && text.contains("profile = \"chela\""));
        file::write(&path, &(text + "# mine\n")).unwrap();
        let (text, done) = changed(Format::Toml, &path, &edits, Some(done)).unwrap();
        file::write(&path, &text).unwrap();
        assert!(restore(Format::Toml, &done).unwrap().is_empty());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "# mine\n");
    }

    #[test]
    fn what_the_user_changed_since_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.toml");
        file::write(&path, "model = \"mine\"\n").unwrap();
        let edits = [edit("model", "ours", None), edit("provider", "chela", None)];
        let (text, done) = changed(Format::Toml, &path, &edits, None).unwrap();
        let edited = text.replace("chela", "other") + "more = 1\n";
        file::write(&path, &edited).unwrap();
        assert_eq!(restore(Format::Toml, &done).unwrap(), ["provider"]);
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, "model = \"mine\"\nprovider = \"other\"\nmore = 1\n");
    }

    #[test]
    fn a_file_that_is_not_understood_is_left_alone_and_the_words_are_given() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.json");
        file::write(&path, "{ // mine\n}").unwrap();
        let edits = [edit("model", "ours", None)];
        let error = changed(Format::Json, &path, &edits, None).unwrap_err();
        let error = format!("{error:#}");
        assert!(
            error.contains("\"model\": \"ours\"") && error.contains("c.json"),
            "{error}"
        );
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{ // mine\n}");
    }

    #[test]
    fn a_shell_reads_what_is_printed() {
        assert_eq!(quoted("http://127.0.0.1:1/v1"), "http://127.0.0.1:1/v1");
        assert_eq!(quoted("it's"), "'it'\\''s'");
    }
}
