//! `chela bench`: what this machine and model do, beside what the machine could.

use crate::{config::Config, output::Output, supervise};
use anyhow::{Context, Result};
use chela_core::PolicyEngine;
use chela_model::TerminalProgress;
use serde_json::json;

/// Runs it.
pub fn run(config: &Config, output: &Output) -> Result<()> {
    let (engine, _) = supervise::load_local(config, &mut TerminalProgress::default())?;
    let temporary = tempfile::tempdir().context("no temporary folder")?;
    let r = chela_engine::bench::bench(&engine, temporary.path())?;
    let model = engine.info().model;
    if output.json {
        return output.plain(
            &json!({
                "model": model, "sgemm_gflops": r.sgemm_gflops, "memory_gbs": r.memory_gbs,
                "prefill_tokens_per_second": r.prefill, "decode_1_tokens_per_second": r.decode_1,
                "decode_8_tokens_per_second": r.decode_8, "train_tokens_per_second": r.train,
                "train_share_of_sgemm": r.train_share_of_sgemm, "publish_seconds": r.publish_seconds,
                "behavior_gap": r.behavior_gap, "peak_mib": r.peak_mib,
            })
            .to_string(),
        );
    }
    output.plain(&format!("model           {model}"))?;
    output.plain(&format!(
        "sgemm           {:>9.1} GFLOP/s   all threads",
        r.sgemm_gflops
    ))?;
    output.plain(&format!(
        "memory          {:>9.1} GB/s      all threads",
        r.memory_gbs
    ))?;
    output.plain(&format!(
        "prefill         {:>9.1} tokens/s  512-token prompt",
        r.prefill
    ))?;
    output.plain(&format!("decode, 1       {:>9.1} tokens/s", r.decode_1))?;
    output.plain(&format!(
        "decode, 8       {:>9.1} tokens/s  together",
        r.decode_8
    ))?;
    output.plain(&format!(
        "LoRA training   {:>9.1} tokens/s  {:.0}% of sgemm",
        r.train,
        100.0 * r.train_share_of_sgemm
    ))?;
    output.plain(&format!(
        "publish         {:>9.1} ms        checkpoint to served",
        1e3 * r.publish_seconds
    ))?;
    output.plain(&format!(
        "behavior gap    {:>9.1e} nats      mean |sampled - learner's log-prob|",
        r.behavior_gap
    ))?;
    output.plain(&format!("peak memory     {:>9.1} MiB", r.peak_mib))
}
