//! `chela train --from FILE`: learning from turns that were recorded elsewhere, without serving anybody.

use crate::{
    commands::demo::served, config::Config, folder::DataFolder, output::Output, supervise,
};
use anyhow::{Context, Result, bail};
use chela_core::{PolicyVersion, Profile, TrajectoryStore, registry};
use chela_lab::{client::Client, report::Table, stage};
use chela_model::TerminalProgress;
use chela_rollout::offline::{self, Fits};
use chela_store::Store;
use futures_executor::block_on;
use serde_json::json;
use std::{
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// A partial batch waits for no more than what is read.
const FLUSH_SECONDS: u64 = 2;

/// Reads the rows, trains on all of them, and says what became of it.
pub fn run(mut config: Config, data_dir: &Path, file: &Path, output: &Output) -> Result<()> {
    let folder = DataFolder::open(data_dir)
        .context("training from a file needs the data folder for itself; stop the server first")?;
    config.server.host = "127.0.0.1".to_owned();
    config.server.port = 0;
    config.learning.on = true;
    config.learning.batch_timeout = FLUSH_SECONDS;
    config.learning.min_batch = 1;
    config.judge.kinds = Vec::new();
    config.validate()?;
    let text =
        std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let loaded = supervise::load(&config, &mut TerminalProgress::default())?;
    let info = loaded.engine.info();
    let fits = Fits {
        vocabulary: info.vocabulary,
        context_length: info.context_length,
        tokenizer_hash: &info.tokenizer_hash,
    };
    let rows = offline::read(&text, &fits)
        .map_err(|why| anyhow::anyhow!("{}: {why}; nothing was trained", file.display()))?;
    if rows.is_empty() {
        bail!("{} holds no rows", file.display());
    }
    let profile = Profile::default();
    let taken = {
        let store = Store::open(folder.path())?;
        let served = PolicyVersion {
            profile: profile.clone(),
            number: registry::served_number(&store.versions(&profile)?),
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis();
        let now = i64::try_from(now)?;
        block_on(offline::take(&store, &profile, &served, &rows, now))?
    };
    let mut writer = output.table();
    let table = Table::new(&mut *writer);
    table.say(&format!(
        "{} rows: {} new samples, {} known before, {} without a reward (a hint alone needs the messages, which an export does not have)",
        rows.len(),
        taken.new,
        taken.known,
        taken.without_reward
    ))?;
    let standing = served(&config, folder, &loaded, |endpoint| {
        // One sample is a batch once the time-out is over.
        Ok(stage::settle(
            &Client::new(endpoint),
            1,
            Duration::from_secs(24 * 3600),
        )?)
    })?;
    for version in &standing.versions {
        let metric = |name: &str| version.metrics[name].as_f64().unwrap_or(f64::NAN);
        table.say(&format!(
            "version {}: {}, {} samples, reward {:.2}, grad norm {:.3}, masked {:.2}, KL to base {:.3}",
            version.version,
            version.state,
            version.samples.len(),
            metric("reward_mean"),
            metric("grad_norm"),
            metric("masked_fraction"),
            metric("kl_to_base")
        ))?;
    }
    if output.json {
        output.plain(
            &json!({
                "rows": rows.len(), "new": taken.new, "known": taken.known, "without_reward": taken.without_reward,
                "served": standing.served, "samples": standing.samples,
            })
            .to_string(),
        )?;
    }
    Ok(())
}
