//! `chela key`: works on the key file, beside a running server or without one.

use crate::{
    cli::KeyAction,
    keys::KeyFile,
    output::{Output, json_line},
};
use anyhow::{Context, Result, bail};
use chela_core::{Profile, Scope};
use serde_json::json;
use std::path::Path;

/// Does it.
pub fn run(data_dir: &Path, action: &KeyAction, output: &Output) -> Result<()> {
    std::fs::create_dir_all(data_dir)
        .with_context(|| format!("cannot create the data folder {}", data_dir.display()))?;
    let file = KeyFile::of(data_dir);
    match action {
        KeyAction::Admin => output.plain(&file.admin()?),
        KeyAction::New { profile, scope } => {
            let scope = Scope::parse(scope).context("scope: use chat, feedback or admin")?;
            make(&file, &Profile::new(profile.clone())?, scope, output)
        }
        KeyAction::List => list(&file, output),
        KeyAction::Revoke { id } => revoke(&file, id),
        KeyAction::Rotate { id } if id == "admin" => output.plain(&file.rotate_admin()?),
        KeyAction::Rotate { id } => {
            let all = file.list()?;
            let old = all.iter().find(|k| &k.id == id);
            let Some(old) = old else {
                bail!("no key has the id {id}; `chela key list` shows them")
            };
            let scope = Scope::parse(&old.scope).context("a key of unknown scope")?;
            make(&file, &Profile::new(old.profile.clone())?, scope, output)?;
            revoke(&file, id)
        }
    }
}

fn revoke(file: &KeyFile, id: &str) -> Result<()> {
    if file.revoke(id)? {
        return Ok(());
    }
    bail!("no key has the id {id}; `chela key list` shows them")
}

fn make(file: &KeyFile, profile: &Profile, scope: Scope, output: &Output) -> Result<()> {
    let (key, record) = file.create(profile, scope)?;
    if output.json {
        let object =
            json!({"id": record.id, "key": key, "profile": record.profile, "scope": record.scope});
        return output.plain(&json_line(&object));
    }
    output.note(&format!(
        "key {} of profile {} with scope {}; it is shown only now:",
        record.id, record.profile, record.scope
    ));
    output.plain(&key)
}

fn list(file: &KeyFile, output: &Output) -> Result<()> {
    let all = file.list()?;
    if output.json {
        let rows: Vec<_> = all
            .iter()
            .map(|k| json!({"id": k.id, "profile": k.profile, "scope": k.scope}))
            .collect();
        return output.plain(&json_line(&json!({"keys": rows})));
    }
    for key in all {
        output.plain(&format!("{}  {:<20}  {}", key.id, key.profile, key.scope))?;
    }
    Ok(())
}
