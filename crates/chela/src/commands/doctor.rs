//! `chela doctor`: looks at folders, model and address and says what to do.

use crate::{config::Config, folder, output::Output};
use anyhow::{Result, bail};
use std::path::Path;

/// Says what is right and what is not; fails when something is not.
pub fn run(config: &Config, data_dir: &Path, output: &Output) -> Result<()> {
    let mut wrong = 0;
    let mut line = |good: bool, text: &str| -> Result<()> {
        wrong += usize::from(!good);
        output.plain(&format!("{}  {text}", if good { "ok   " } else { "WRONG" }))
    };
    match std::fs::create_dir_all(data_dir) {
        Ok(()) => line(
            true,
            &format!(
                "data folder {}: {} MiB",
                data_dir.display(),
                size(data_dir) >> 20
            ),
        )?,
        Err(error) => line(
            false,
            &format!("data folder {}: {error}", data_dir.display()),
        )?,
    }
    for (what, name) in [("store", "chela.db"), ("adapters", "adapters")] {
        line(
            true,
            &format!("  {what}: {} KiB", size(&data_dir.join(name)) >> 10),
        )?;
    }
    let metrics = data_dir.join(chela_core::registry::METRICS);
    line(
        true,
        &if config.learning.metrics {
            format!(
                "  figures of each step: {0}/<profile>/steps.jsonl, `tensorboard --logdir {0}`, /metrics",
                metrics.display()
            )
        } else {
            "  figures of each step: in no files (learning.metrics = false), /metrics".to_owned()
        },
    )?;
    match folder::running(data_dir) {
        Some(note) => line(
            true,
            &format!("server: process {} at {}", note.pid, note.address),
        )?,
        None => {
            line(
                true,
                "server: none runs on this folder; `chela serve` starts one",
            )?;
            let address = (config.server.host.as_str(), config.server.port);
            match std::net::TcpListener::bind(address) {
                Ok(_) => line(
                    true,
                    &format!("address {}:{} is free", address.0, address.1),
                )?,
                Err(error) => line(
                    false,
                    &format!(
                        "address {}:{}: {error}; choose another with --port",
                        address.0, address.1
                    ),
                )?,
            }
        }
    }
    line(true, &format!("model: {}", config.model.name))?;
    match config.model.name.as_str() {
        "starter" => line(
            true,
            "  context 8192: OpenClaw and Codex need 16k or more; use --model qwen2.5-coder-0.5b or your own",
        )?,
        "qwen2.5-coder-0.5b" => line(true, "  context 32768")?,
        _ => {}
    }
    if wrong > 0 {
        bail!("{wrong} of these need attention");
    }
    Ok(())
}

fn size(path: &Path) -> u64 {
    let Ok(meta) = std::fs::metadata(path) else {
        return 0;
    };
    if meta.is_file() {
        return meta.len();
    }
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    entries.map(|e| size(&e.path())).sum()
}
