//! `chela bench`: what this machine and model do, beside what the machine could.

use crate::{
    cli::{BenchArgs, Only},
    config::Config,
    output::Output,
    supervise,
};
use anyhow::{Context, Result, bail};
use chela_core::PolicyEngine;
use chela_engine::{
    LocalEngine,
    bench::{Case, MOST_LANES, Measured, Runner, Work, peak_mib},
};
use chela_model::TerminalProgress;
use serde_json::json;

/// Runs it.
pub fn run(mut config: Config, args: &BenchArgs, output: &Output) -> Result<()> {
    if args.only.is_empty() {
        return report(&config, output);
    }
    let cases = args.only.iter().filter_map(|only| match only {
        Only::Case(case) => Some(*case),
        Only::Stdin => None,
    });
    let cases: Vec<Case> = cases.collect();
    if !cases.is_empty() && cases.len() < args.only.len() {
        bail!("--only takes either names or -");
    }
    // What is measured is the engine, not how many replies this configuration lets in.
    config.model.max_concurrent = config.model.max_concurrent.max(MOST_LANES);
    let (engine, _) = supervise::load_local(&config, &mut TerminalProgress::default())?;
    let mut bench = Bench {
        engine: &engine,
        runners: Vec::new(),
        output,
    };
    if cases.is_empty() {
        for line in std::io::stdin().lines() {
            let line = line.context("cannot read names of cases from standard input")?;
            let case = line.trim().parse().map_err(anyhow::Error::msg)?;
            let measured = bench.once(case)?;
            if !output.json {
                output.plain(&row(&case, &[measured]))?;
            }
        }
        return Ok(());
    }
    let mut all = vec![Vec::new(); cases.len()];
    for round in 0..=args.times {
        for (case, all) in cases.iter().zip(&mut all) {
            let measured = bench.once(*case)?;
            if round > 0 {
                all.push(measured);
            }
        }
    }
    if !output.json {
        for (case, all) in cases.iter().zip(&all) {
            output.plain(&row(case, all))?;
        }
        output.plain(&format!("peak memory     {:>9.1} MiB", peak_mib()))?;
    }
    Ok(())
}

/// Cases that have been measured, ready to be measured again.
struct Bench<'a> {
    engine: &'a LocalEngine,
    runners: Vec<(Case, Runner<'a>)>,
    output: &'a Output,
}

impl Bench<'_> {
    /// Measures a case once; for a script it says at once what came of it.
    fn once(&mut self, case: Case) -> Result<Measured> {
        let known = self.runners.iter().position(|(c, _)| *c == case);
        let at = match known {
            Some(at) => at,
            None => {
                self.runners.push((case, Runner::new(self.engine, case)?));
                self.runners.len() - 1
            }
        };
        let runner = &mut self.runners[at].1;
        let measured = runner.once()?;
        if self.output.json {
            let mut line = json!({
                "case": case.to_string(), "warm_up": known.is_none(), "seconds": measured.seconds, "rate": measured.rate,
                "unit": case.unit(), "mean_logprob": measured.mean_logprob, "peak_mib": peak_mib(),
            });
            if let Some(peaks) = measured.peaks_mib {
                line["peaks_mib"] = json!({"kept": peaks[0], "recomputed": peaks[1]});
            }
            if known.is_none() {
                let texts = runner.texts().iter();
                let texts: Vec<_> = texts
                    .map(|t| json!({"ids": t.ids, "start": t.start}))
                    .collect();
                let work = Work::of(&case, self.engine)?;
                line["texts"] = texts.into();
                line["work"] = json!({
                    "rows": work.rows, "scored": work.scored, "gflop_maps": work.gflop_maps, "gflop_attention": work.gflop_attention,
                });
            }
            self.output.plain(&line.to_string())?;
        }
        Ok(measured)
    }
}

/// Least, median and most of the rates.
fn row(case: &Case, all: &[Measured]) -> String {
    let mut rates: Vec<f64> = all.iter().map(|m| m.rate).collect();
    rates.sort_by(f64::total_cmp);
    let middle = (rates[(rates.len() - 1) / 2] + rates[rates.len() / 2]) / 2.0;
    let name = case.to_string();
    let (least, most) = (rates[0], rates[rates.len() - 1]);
    let unit = case.unit();
    if let Some([kept, again]) = all.last().and_then(|m| m.peaks_mib) {
        return format!(
            "{name:<15} {middle:>9.2} {unit}  ({least:.2} to {most:.2})  peak {kept:.0} MiB kept, {again:.0} MiB recomputed"
        );
    }
    format!("{name:<15} {middle:>9.1} {unit}  ({least:.1} to {most:.1})")
}

/// Everything, once.
fn report(config: &Config, output: &Output) -> Result<()> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_shows_the_middle_and_both_ends() {
        let measured = |rate| Measured {
            seconds: 1.0,
            rate,
            mean_logprob: None,
            peaks_mib: None,
        };
        let all = [3.0, 1.0, 2.0, 9.0].map(measured);
        let shown = "decode:8              2.5 tokens/s  (1.0 to 9.0)";
        assert_eq!(row(&Case::Decode(8), &all), shown);
        let compared = Measured {
            rate: 1.3,
            peaks_mib: Some([900.4, 500.0]),
            ..all[0]
        };
        assert_eq!(
            row(&Case::Recompute, &[compared]),
            "train:recompute      1.30 x time  (1.30 to 1.30)  peak 900 MiB kept, 500 MiB recomputed"
        );
    }
}
