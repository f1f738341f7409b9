//! `chela train`: a task with rewards that can be verified, against the running server, or against one of its own on the same folder.

use super::{demo::served, remote::Remote};
use crate::{
    cli::TrainArgs,
    config::Config,
    folder::{self, DataFolder},
    keys::KeyFile,
    output::Output,
    supervise,
};
use anyhow::{Context, Result, bail};
use chela_lab::{
    client::{Client, Endpoint},
    curve,
    journal::{Journal, Run, Setting},
    report::Table,
    standing::Groups,
    tasks::Task,
    train::{self, TrainOptions},
};
use chela_model::TerminalProgress;
use serde_json::json;
use std::{
    fs,
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Runs it.
pub fn run(mut config: Config, data_dir: &Path, args: &TrainArgs, output: &Output) -> Result<()> {
    if args.steps == 0 || args.samples < 2 || args.samples > 1024 || args.lanes == 0 {
        bail!("--steps and --lanes must be at least 1, --samples from 2 to 1024");
    }
    let task = Task::open(&args.task)?;
    let mut writer = output.table();
    let table = Table::new(&mut *writer);
    match DataFolder::open(data_dir) {
        Ok(folder) => {
            if let Some(algorithm) = &args.algorithm {
                config.learning.algorithm.clone_from(algorithm);
            }
            config.server.host = "127.0.0.1".to_owned();
            config.server.port = 0;
            config.learning.on = true;
            config.learning.seed = args.seed;
            // The task's checker is the judge.
            config.judge.kinds = Vec::new();
            config.validate()?;
            let loaded = supervise::load(&config, &mut TerminalProgress::default())?;
            served(&config, folder, &loaded, |endpoint| {
                teach(endpoint, (&task, args, &config), &table, output)
            })
        }
        // Somebody else has it: the server, or nobody who could be asked.
        Err(error) => {
            if folder::running(data_dir).is_none() {
                return Err(error);
            }
            let remote = Remote::find(data_dir)?;
            let status = remote.get("/v1/status")?;
            let model = status["model"].as_str().unwrap_or_default();
            let endpoint = Endpoint {
                url: remote.address().to_owned(),
                admin_key: KeyFile::of(data_dir).admin()?,
                base_model: model.to_owned(),
            };
            teach(endpoint, (&task, args, &config), &table, output)
        }
    }
}

fn teach(
    endpoint: Endpoint,
    (task, args, config): (&Task, &TrainArgs, &Config),
    table: &Table<'_>,
    output: &Output,
) -> Result<()> {
    let standing = Client::new(endpoint.clone()).standing()?;
    let groups = train::trained(&standing)?;
    if let Some(algorithm) = &args.algorithm
        && *algorithm != groups.algorithm
    {
        bail!(
            "--algorithm {algorithm}: the running server teaches groups with {}; set learning.algorithm there and start it anew",
            groups.algorithm
        );
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis();
    let options = TrainOptions {
        steps: args.steps,
        samples: args.samples,
        lanes: args.lanes,
        every: args.every,
        seed: args.seed,
        tag: format!("{now:x}"),
        patience: Duration::from_secs(3600),
    };
    fs::create_dir_all(&args.out)
        .with_context(|| format!("cannot create the folder {}", args.out.display()))?;
    let setting = setting(&endpoint, (task, args, config), &groups);
    let name = format!(
        "{}-{}-eta{}-{}-{}",
        task.name, groups.algorithm, groups.bounds.max_staleness, args.seed, options.tag
    );
    let journal = Journal::open(&args.out.join(format!("{name}.jsonl")), setting)?;
    table.say(&format!(
        "Task {}: {} replies to a prompt, {} groups a step, {} steps of {} on {}; replies may be {} steps behind.",
        task.name,
        args.samples,
        groups.bounds.batch,
        args.steps,
        groups.algorithm,
        endpoint.base_model,
        groups.bounds.max_staleness
    ))?;
    let run = train::run(endpoint, task, &options, journal, table)?;
    drawn(&run, &args.out.join(&name), table)?;
    if output.json {
        let readings = run.readings.iter().map(|r| {
            let right = r.right.iter().filter(|r| **r).count();
            json!({
                "step": r.update, "version": r.version, "right": right, "prompts": r.right.len(), "mean_tokens": r.mean_tokens,
                "kl_to_base": r.kl_to_base, "seconds": r.seconds,
            })
        });
        output.plain(
            &json!({"setting": run.setting, "readings": readings.collect::<Vec<_>>()}).to_string(),
        )?;
    }
    Ok(())
}

fn setting(
    endpoint: &Endpoint,
    (task, args, config): (&Task, &TrainArgs, &Config),
    groups: &Groups,
) -> Setting {
    Setting {
        model: endpoint.base_model.clone(),
        taste: task.name.clone(),
        teaching: groups.algorithm.clone(),
        seed: args.seed,
        updates: args.steps,
        batch: groups.bounds.batch as usize * args.samples,
        lr: config.learning.rate(),
        speaker: format!("{} replies to a prompt", args.samples),
        held_out: task.held_out.len(),
        live: task.held_out.len(),
        checked: task.held_out.len(),
        problems: args.task.clone(),
    }
}

/// Rows and a picture beside the journal, and what it came to.
fn drawn(run: &Run, stem: &Path, table: &Table<'_>) -> Result<()> {
    let (rows, picture) = (stem.with_extension("csv"), stem.with_extension("svg"));
    fs::write(&rows, curve::csv(std::slice::from_ref(run)))
        .with_context(|| format!("cannot write {}", rows.display()))?;
    let curve = curve::curve(&run.setting.teaching, &[run]);
    let title = format!("{} on {}", run.setting.taste, run.setting.model);
    curve::picture(&picture, &title, &[curve])?;
    let (start, end) = (run.start(), run.end());
    if let (Some(start), Some(end)) = (start, end) {
        let share =
            |r: &chela_lab::journal::Reading| chela_lab::taste::share(r.right.iter().copied());
        let gain = curve::paired(&start.right, &end.right).unwrap_or_default();
        table.say(&format!(
            "\n{}: {:.2} -> {:.2} of {} held-out prompts right ({:+.2}, two paired standard errors {:.2})",
            run.setting.taste,
            share(start),
            share(end),
            end.right.len(),
            gain.mean,
            gain.two_errors
        ))?;
    }
    table.say(&format!(
        "{} and {} are written",
        rows.display(),
        picture.display()
    ))?;
    Ok(())
}
