//! `chela policy replay`: does the log reproduce a version, bit for bit?

use crate::{
    config::Config,
    folder::DataFolder,
    output::{Output, json_line},
    supervise,
};
use anyhow::{Result, bail};
use chela_core::{Learners, PolicyEngine, Profile, TrajectoryStore, registry};
use chela_model::TerminalProgress;
use chela_store::Store;
use chela_train::replay::{Replayed, verify};
use serde_json::json;
use std::path::Path;

/// Makes every step on the way to the version again and compares.
pub fn run(
    config: &Config,
    data_dir: &Path,
    (profile, version): (&str, Option<u64>),
    output: &Output,
) -> Result<()> {
    let profile = Profile::new(profile)?;
    // A learner of a profile that trains meanwhile would be in the way, and the machine's time with it.
    let folder = DataFolder::open(data_dir)?;
    let store = Store::open_read_only(folder.path())?;
    let version = match version {
        Some(version) => version,
        None => registry::served_number(&store.versions(&profile)?),
    };
    if version == 0 {
        bail!("version 0 is the base model: nothing was trained");
    }
    let (engine, chat) = supervise::load_local(config, &mut TerminalProgress::default())?;
    let train = supervise::train_config(config, folder.path(), &chat)?;
    let mut said = |one: &Replayed| output.note(&line(one));
    let parts: (&dyn TrajectoryStore, &dyn PolicyEngine, &dyn Learners) =
        (&store, &*engine, &*engine);
    let all = verify(parts, &train, (&profile, version), &mut said)?;
    if output.json {
        let rows = all.iter().map(|r| json!({"version": r.number, "now": r.now, "then": r.then, "same_kernel_path": r.same_path, "equal": equal(r)}));
        output.plain(&json_line(
            &json!({"profile": profile.as_str(), "steps": rows.collect::<Vec<_>>()}),
        ))?;
    }
    let different = all.iter().filter(|r| !equal(r)).count();
    if different > 0 {
        bail!(
            "{different} of {} steps came out otherwise; with another kernel path (instruction set, threads) the last bits differ",
            all.len()
        );
    }
    output.note(&format!("all {} steps came out bit for bit", all.len()));
    Ok(())
}

fn equal(one: &Replayed) -> bool {
    one.then.as_ref() == Some(&one.now)
}

fn line(one: &Replayed) -> String {
    let verdict = if equal(one) { "equal" } else { "DIFFERENT" };
    let path = if one.same_path {
        ""
    } else {
        " (made on another kernel path)"
    };
    let then = one.then.as_deref().unwrap_or("no receipt");
    format!(
        "version {}: {verdict}{path}  {}  {then}",
        one.number, one.now
    )
}
