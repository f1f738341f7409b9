//! `chela demo`: a server in this process, a simulated user over HTTP, a table, and the score before and after.

use crate::{
    cli::DemoArgs,
    config::{Config, JudgeKind, RuleEntry},
    folder::DataFolder,
    output::Output,
    supervise::{self, Loaded},
};
use anyhow::{Context, Result};
use chela_lab::{
    client::Endpoint,
    demo::{self, ArmResult, DemoOptions},
    report::{Summary, Table},
    rules::{self, RemarkRule},
    user::Arm,
};
use chela_model::TerminalProgress;
use std::{path::Path, time::Instant};

/// Runs it. `data_dir` is used when one was named, else a temporary folder.
pub fn run(
    mut config: Config,
    data_dir: Option<&Path>,
    args: &DemoArgs,
    output: &Output,
) -> Result<()> {
    let started = Instant::now();
    let options = options(args);
    settings(&mut config, args, &options);
    config.validate()?;
    let temporary = tempfile::tempdir().context("no temporary folder")?;
    let home = data_dir.unwrap_or(temporary.path());
    let mut writer = output.table();
    let table = Table::new(&mut *writer);
    let loaded = supervise::load(&config, &mut TerminalProgress::default())?;
    let model = loaded.engine.info().model;
    table.say(&format!(
        "A simulated user likes replies of at most 40 words and says so in plain words when one is longer.\n\
         Model {model}, {} updates of {} judged turns, learning rate {}.",
        options.updates, options.batch, config.learning.rate()
    ))?;
    let result = arm(
        &config,
        &loaded,
        &home.join("demo"),
        Arm::Treatment,
        &options,
        None,
        &table,
    )?;
    table.arm("learnt", &result)?;
    let control = if args.control {
        table.say("\nThe control: the same user, but praise and remarks are thrown by a coin.")?;
        // A fresh engine: nothing of the first run is resident or cached.
        drop(loaded);
        let loaded = supervise::load(&config, &mut TerminalProgress::default())?;
        control_settings(&mut config);
        let options = DemoOptions {
            updates: result.updates,
            ..options.clone()
        };
        let before = Some((result.before, result.base_nll_before));
        let control = arm(
            &config,
            &loaded,
            &home.join("control"),
            Arm::Control,
            &options,
            before,
            &table,
        )?;
        table.arm("control", &control)?;
        Some(control)
    } else {
        None
    };
    let seconds = started.elapsed().as_secs_f64();
    let summary = summary(
        &model,
        &config,
        &options,
        (&result, control.as_ref()),
        seconds,
    );
    table.say(&format!("\n{seconds:.0} s"))?;
    if output.json {
        output.plain(&serde_json::to_string(&summary)?)?;
    }
    Ok(())
}

fn options(args: &DemoArgs) -> DemoOptions {
    let defaults = DemoOptions {
        seed: args.seed,
        ..DemoOptions::default()
    };
    let mut options = if args.quick {
        DemoOptions {
            updates: 3,
            batch: 8,
            held_out: 32,
            live: 0,
            ..defaults
        }
    } else {
        defaults
    };
    if let Some(updates) = args.updates {
        options.updates = updates;
    }
    options
}

/// What the demo changes of the configuration.
fn settings(config: &mut Config, args: &DemoArgs, options: &DemoOptions) {
    let rules = rules::rules(&[demo::TASTE]);
    simulated(config, rules, (options.batch, args.seed));
    config.learning.max_steps = options.updates;
}

/// What simulated users need of the configuration: a server for this machine only, whose rules alone judge; cut replies are bad, and
/// training gets its full share.
pub(super) fn simulated(config: &mut Config, rules: Vec<RemarkRule>, (batch, seed): (usize, u64)) {
    config.server.host = "127.0.0.1".to_owned();
    config.server.port = 0;
    config.server.auth = "open".to_owned();
    config.judge.kinds = vec![JudgeKind::Rules];
    config.judge.rules = rule_entries(rules);
    // These rules know what the simulated users say, not what the labelled turns do; a control's know nothing.
    config.judge.canary_rate = 0.0;
    let learning = &mut config.learning;
    learning.on = true;
    learning.batch = batch;
    learning.min_batch = learning.min_batch.min(batch);
    learning.truncated = "bad".to_owned();
    learning.seed = seed;
    learning.train_share = learning.train_share.max(0.5);
}

fn control_settings(config: &mut Config) {
    config.judge.rules = rule_entries(rules::control_rules());
    // A cut reply is as good or bad as the coin says, or its length would be taught after all.
    config.learning.truncated = "judged".to_owned();
}

fn rule_entries(rules: Vec<RemarkRule>) -> Vec<RuleEntry> {
    rules
        .into_iter()
        .map(|r| RuleEntry {
            name: r.name,
            pattern: r.pattern,
            role: "user".to_owned(),
            reward: Some(r.reward),
            hint: r.hint,
        })
        .collect()
}

fn arm(
    config: &Config,
    loaded: &Loaded,
    home: &Path,
    arm: Arm,
    options: &DemoOptions,
    before: Option<(chela_lab::taste::Scores, f64)>,
    table: &Table<'_>,
) -> Result<ArmResult> {
    let folder = DataFolder::open(home)?;
    served(config, folder, loaded, |endpoint| {
        Ok(demo::run_arm(endpoint, arm, options, before, table)?)
    })
}

/// Runs a server on the folder while `work` speaks to it.
pub(super) fn served<T>(
    config: &Config,
    folder: DataFolder,
    loaded: &Loaded,
    work: impl FnOnce(Endpoint) -> Result<T>,
) -> Result<T> {
    let listener = supervise::bind(config)?;
    let running = supervise::start(config, folder, listener, loaded)?;
    let result = work(Endpoint {
        url: running.address.clone(),
        admin_key: running.admin_key.clone(),
        base_model: loaded.engine.info().model,
    });
    running.stop()?;
    result
}

fn summary(
    model: &str,
    config: &Config,
    options: &DemoOptions,
    (result, control): (&ArmResult, Option<&ArmResult>),
    seconds: f64,
) -> Summary {
    Summary {
        model: model.to_owned(),
        preference: demo::TASTE.description().to_owned(),
        updates: result.updates,
        interactions: result.interactions,
        before: result.before.passed,
        after: result.after.passed,
        control_after: control.map(|c| c.after.passed),
        kl_to_base: result.distance.kl_to_base,
        distinct: result.after.distinct,
        on_topic: result.after.on_topic,
        base_nll_before: result.base_nll_before,
        base_nll_after: result.distance.base_nll,
        lr: config.learning.rate(),
        batch: options.batch,
        mean_tokens_before: result.before.mean_tokens,
        mean_tokens_after: result.after.mean_tokens,
        seconds,
    }
}
