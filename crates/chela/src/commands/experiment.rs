//! `chela experiment`: a server in this process, simulated users over HTTP, tables, and one object for programs.

mod learn;

use super::demo::{served, simulated};
use crate::{
    cli::{ExperimentCommand, ProfilesArgs, RunawayArgs},
    config::Config,
    folder::DataFolder,
    keys::KeyFile,
    output::Output,
    supervise,
};
use anyhow::{Context, Result};
use chela_core::{Profile, Scope};
use chela_lab::{
    hostile::Pattern,
    profiles::{self, ProfilesOptions},
    report::Table,
    rules,
    runaway::{self, RunawayOptions},
    taste::Taste,
};
use chela_model::TerminalProgress;
use serde::Serialize;
use std::{path::Path, time::Instant};

/// A partial batch waits longer than any experiment, so that only full ones train and a run ends at rest.
const PARTIAL_BATCH_WAITS: u64 = 24 * 3600;

/// Runs one. `data_dir` is used when one was named, else a temporary folder.
pub fn run(
    config: Config,
    data_dir: Option<&Path>,
    which: &ExperimentCommand,
    output: &Output,
) -> Result<()> {
    let temporary = tempfile::tempdir().context("no temporary folder")?;
    let home = data_dir.unwrap_or(temporary.path());
    match which {
        ExperimentCommand::Learn(args) => learn::run(config, args, output),
        ExperimentCommand::Profiles(args) => run_profiles(config, home, args, output),
        ExperimentCommand::Runaway(args) => run_runaway(config, home, args, output),
    }
}

/// What every experiment ends with beside its own report.
#[derive(Serialize)]
struct Whole<T> {
    model: String,
    lr: f64,
    #[serde(flatten)]
    report: T,
    seconds: f64,
}

fn run_profiles(
    mut config: Config,
    home: &Path,
    args: &ProfilesArgs,
    output: &Output,
) -> Result<()> {
    let started = Instant::now();
    let options = profiles_options(args);
    let rules = rules::rules(&Taste::OPPOSITE);
    settings(&mut config, rules, (options.batch, args.seed))?;
    // A long reply may be cut by its own limit. Were that bad whatever the user says, as in the demo, the thorough one would be taught
    // brevity by what they praise.
    config.learning.truncated = "judged".to_owned();
    let loaded = supervise::load(&config, &mut TerminalProgress::default())?;
    let model = loaded.engine.info().model;
    let folder = DataFolder::open(&home.join("profiles"))?;
    let file = KeyFile::of(folder.path());
    let key = |taste: Taste| -> Result<String> {
        let (key, _) = file.create(&Profile::new(taste.name())?, Scope::Feedback)?;
        Ok(key)
    };
    let keys = [key(Taste::Brief)?, key(Taste::Thorough)?];
    let mut writer = output.table();
    let table = Table::of_several(&mut *writer);
    table.say(&format!(
        "Two simulated users on one server, a profile each: {}; {}.\n\
         Model {model}, at most {} updates of {} judged turns each, learning rate {}.",
        Taste::Brief.description(),
        Taste::Thorough.description(),
        options.updates,
        options.batch,
        config.learning.rate()
    ))?;
    let report = served(&config, folder, &loaded, |endpoint| {
        Ok(profiles::run(&endpoint, keys, &options, &table)?)
    })?;
    finish(&config, model, report, started, (&table, output))
}

fn profiles_options(args: &ProfilesArgs) -> ProfilesOptions {
    let defaults = ProfilesOptions {
        seed: args.seed,
        ..ProfilesOptions::default()
    };
    let options = if args.quick {
        ProfilesOptions {
            updates: 2,
            batch: 8,
            held_out: 16,
            live: 0,
            still: 8,
            ..defaults
        }
    } else {
        defaults
    };
    ProfilesOptions {
        updates: args.updates.unwrap_or(options.updates),
        ..options
    }
}

fn run_runaway(mut config: Config, home: &Path, args: &RunawayArgs, output: &Output) -> Result<()> {
    let started = Instant::now();
    if args.no_gate {
        config.learning.gate = false;
        config.learning.watch_turns = 0;
    }
    let options = runaway_options(args, &config)?;
    let rules = rules::hostile_rules();
    settings(&mut config, rules, (options.batch, args.seed))?;
    let loaded = supervise::load(&config, &mut TerminalProgress::default())?;
    let model = loaded.engine.info().model;
    let folder = DataFolder::open(&home.join("runaway"))?;
    let mut writer = output.table();
    let table = Table::new(&mut *writer);
    table.say(&format!(
        "An honest user ({}), then {} sessions of a hostile loop ({}) in the same profile; gate {}, watch {}.\n\
         Model {model}, {} honest updates of {} judged turns, learning rate {}.",
        Taste::Brief.description(),
        options.sessions,
        options.pattern.name(),
        if config.learning.gate { "on" } else { "off" },
        if config.learning.watch_turns > 0 { "on" } else { "off" },
        options.updates,
        options.batch,
        config.learning.rate()
    ))?;
    let report = served(&config, folder, &loaded, |endpoint| {
        Ok(runaway::run(endpoint, &options, &table)?)
    })?;
    finish(&config, model, report, started, (&table, output))
}

fn runaway_options(args: &RunawayArgs, config: &Config) -> Result<RunawayOptions> {
    let pattern = Pattern::parse(&args.pattern)
        .with_context(|| format!("--pattern {}: use praise, demand or both", args.pattern))?;
    let defaults = RunawayOptions {
        seed: args.seed,
        pattern,
        patient: args.patient,
        gate: config.learning.gate,
        ..RunawayOptions::default()
    };
    let options = if args.quick {
        RunawayOptions {
            updates: 2,
            batch: 8,
            held_out: 32,
            sessions: 48,
            ..defaults
        }
    } else {
        defaults
    };
    Ok(RunawayOptions {
        updates: args.updates.unwrap_or(options.updates),
        sessions: args.sessions.unwrap_or(options.sessions),
        ..options
    })
}

/// What experiments change of the configuration beside what simulated users need.
fn settings(
    config: &mut Config,
    rules: Vec<rules::RemarkRule>,
    batch_and_seed: (usize, u64),
) -> Result<()> {
    simulated(config, rules, batch_and_seed);
    // The users and the loop decide how many steps there are.
    config.learning.max_steps = 0;
    config.learning.batch_timeout = PARTIAL_BATCH_WAITS;
    config.validate()
}

fn finish<T: Serialize>(
    config: &Config,
    model: String,
    report: T,
    started: Instant,
    (table, output): (&Table<'_>, &Output),
) -> Result<()> {
    let seconds = started.elapsed().as_secs_f64();
    table.say(&format!("\n{seconds:.0} s"))?;
    if output.json {
        let whole = Whole {
            model,
            lr: config.learning.rate(),
            report,
            seconds,
        };
        output.plain(&serde_json::to_string(&whole)?)?;
    }
    Ok(())
}
