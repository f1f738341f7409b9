//! `chela experiment learn`: every teaching and seed on a server of its own, one after the other; curves of all that is done.

use super::{served, settings};
use crate::{
    cli::LearnArgs,
    config::{Config, JudgeKind},
    folder::DataFolder,
    output::Output,
    supervise,
};
use anyhow::{Context, Result, bail};
use chela_lab::{
    curve::{self, Claim, Curve, End},
    journal::{self, Journal, Reading, Run, Setting},
    learn::{self, LearnOptions, Questions, Teaching},
    problems,
    report::Table,
    rules,
    taste::Taste,
    user::Speaker,
};
use chela_model::TerminalProgress;
use serde::Serialize;
use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Problems whose answer is checked, where the style's have none.
const CHECKED: usize = 60;

/// What it came to.
#[derive(Serialize)]
struct Report {
    experiment: &'static str,
    taste: String,
    updates: u64,
    ends: Vec<End>,
    curves: Vec<Curve>,
    claims: Vec<Claim>,
}

/// What all runs share.
struct Experiment<'a> {
    config: Config,
    args: &'a LearnArgs,
    taste: Taste,
    batch: usize,
    questions: Questions,
    out: &'a Path,
}

/// Runs what is not done yet.
pub fn run(config: Config, args: &LearnArgs, output: &Output) -> Result<()> {
    let started = Instant::now();
    let args = &small(args);
    let taste = Taste::named(&args.taste).with_context(|| format!("--taste {}", args.taste))?;
    if args.live == 0 || args.live > args.held_out {
        bail!(
            "--live {} must be from 1 to --held-out, which is {}",
            args.live,
            args.held_out
        );
    }
    let questions = match &args.problems {
        Some(file) => Questions::from_file(taste, problems::read(file)?, args.held_out),
        None => Questions::of(taste, args.held_out, CHECKED.min(args.held_out)),
    };
    fs::create_dir_all(&args.out)
        .with_context(|| format!("cannot create the folder {}", args.out.display()))?;
    let experiment = Experiment {
        config,
        args,
        taste,
        batch: if args.quick { 8 } else { 16 },
        questions,
        out: &args.out,
    };
    let mut writer = output.table();
    let table = Table::new(&mut *writer);
    table.say(&format!(
        "Users who like it {}; {} seeds, {} updates of {} judged turns each; journals and pictures in {}.",
        taste.description(),
        args.seeds.len(),
        args.updates,
        experiment.batch,
        args.out.display()
    ))?;
    let mut model = String::new();
    // Seed by seed, so that a stop leaves whole comparisons.
    for seed in &args.seeds {
        for name in &args.teachings {
            let teaching = Teaching::named(name).with_context(|| format!("--teachings {name}"))?;
            model = experiment.one(teaching, *seed, &table)?;
            experiment.draw(&table)?;
        }
    }
    let (curves, ends) = experiment.drawn()?;
    let claims = curve::claims(&ends);
    table.say(&curve::table(&ends))?;
    for claim in &claims {
        let holds = if claim.holds {
            "holds"
        } else {
            "DOES NOT HOLD"
        };
        table.say(&format!("{holds}: {}", claim.claim))?;
    }
    let report = Report {
        experiment: "learn",
        taste: args.taste.clone(),
        updates: args.updates,
        ends,
        curves,
        claims,
    };
    super::finish(&experiment.config, model, report, started, (&table, output))
}

fn small(args: &LearnArgs) -> LearnArgs {
    if !args.quick {
        return args.clone();
    }
    LearnArgs {
        updates: 2,
        held_out: 16,
        live: 8,
        seeds: args.seeds.iter().copied().take(1).collect(),
        ..args.clone()
    }
}

impl Experiment<'_> {
    fn name(&self, teaching: Teaching, seed: u64) -> String {
        format!("{}-{}-{seed}", self.taste.name(), teaching.name())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.out.join(format!("{name}.jsonl"))
    }

    /// One run; the model's name.
    fn one(&self, teaching: Teaching, seed: u64, table: &Table<'_>) -> Result<String> {
        let name = self.name(teaching, seed);
        let mut config = self.config.clone();
        self.configure(&mut config, teaching, seed)?;
        let path = self.path(&name);
        if let Ok(run) = journal::read(&path)
            && run.ended.is_some()
        {
            // The setting is compared below for what is not over; what is over is told to be of another one too.
            Journal::open(
                &path,
                self.setting(&config, &run.setting.model, teaching, seed),
            )?;
            table.say(&format!("\n{name}: done before"))?;
            return Ok(run.setting.model);
        }
        table.say(&format!("\n{name}"))?;
        let loaded = supervise::load(&config, &mut TerminalProgress::default())?;
        let model = loaded.engine.info().model;
        let setting = self.setting(&config, &model, teaching, seed);
        let journal = Journal::open(&path, setting.clone())?;
        let start = self.start(&setting)?;
        let home = self.out.join("work").join(&name);
        let folder = DataFolder::open(&home)?;
        let options = LearnOptions {
            taste: self.taste,
            teaching,
            seed,
            updates: self.args.updates,
            batch: self.batch,
            live: self.args.live,
            temperature: 0.7,
            lanes: 16,
            speaker: if self.args.user == "model" {
                Speaker::Model
            } else {
                Speaker::Scripted
            },
            patience: Duration::from_secs(1800),
        };
        served(&config, folder, &loaded, |endpoint| {
            Ok(learn::run(
                endpoint,
                &options,
                &self.questions,
                (journal, start),
                table,
            )?)
        })?;
        // What is to be kept of it is in the journal.
        fs::remove_dir_all(&home).with_context(|| format!("cannot delete {}", home.display()))?;
        Ok(model)
    }

    fn configure(&self, config: &mut Config, teaching: Teaching, seed: u64) -> Result<()> {
        let rules = match teaching {
            Teaching::Coin => rules::control_rules(),
            _ => rules::rules(&[self.taste]),
        };
        settings(config, rules, (self.batch, seed))?;
        // Who asks what a method does asks it of the method, not of the gate; `chela experiment runaway` asks the gate.
        config.learning.gate = false;
        config.learning.watch_turns = 0;
        config.learning.max_steps = self.args.updates;
        config.learning.method = teaching.method().to_owned();
        // As good or bad as the user says: a limit of its own is no verdict on style, and in the control the coin's must stand.
        config.learning.truncated = match (teaching, self.taste) {
            // That a reply was cut is a verdict too.
            (Teaching::None, _) => "exclude",
            (Teaching::Coin, _) | (_, Taste::Thorough | Taste::Ta) => "judged",
            _ => "bad",
        }
        .to_owned();
        config.judge.kinds = match (teaching, self.args.judge.as_str()) {
            (Teaching::None, _) => Vec::new(),
            (Teaching::Coin, _) | (_, "rules") => vec![JudgeKind::Rules],
            _ => vec![JudgeKind::Own],
        };
        config.validate()
    }

    fn setting(&self, config: &Config, model: &str, teaching: Teaching, seed: u64) -> Setting {
        let questions = &self.questions;
        let checked = if questions.checked.is_empty() {
            let answered = questions.held_out.iter().filter(|p| p.answer.is_some());
            answered.count()
        } else {
            questions.checked.len()
        };
        let problems = self.args.problems.as_ref();
        Setting {
            model: model.to_owned(),
            taste: self.taste.name().to_owned(),
            teaching: teaching.name().to_owned(),
            seed,
            updates: self.args.updates,
            batch: self.batch,
            lr: config.learning.rate(),
            speaker: format!("{}, judged by {}", self.args.user, self.args.judge),
            held_out: questions.held_out.len(),
            live: self.args.live,
            checked,
            problems: problems.map_or_else(|| "built in".to_owned(), |p| p.display().to_string()),
        }
    }

    /// The base model's reading out of another run: it is the same for every teaching and seed.
    fn start(&self, setting: &Setting) -> Result<Option<Reading>> {
        for run in self.runs()? {
            let same = Setting {
                teaching: setting.teaching.clone(),
                seed: setting.seed,
                updates: setting.updates,
                lr: setting.lr,
                batch: setting.batch,
                speaker: setting.speaker.clone(),
                ..run.setting.clone()
            };
            if same == *setting
                && let Some(start) = run.start()
            {
                return Ok(Some(Reading {
                    seconds: 0.0,
                    ..start.clone()
                }));
            }
        }
        Ok(None)
    }

    /// All runs of this taste that are kept in the folder, of any seed.
    fn runs(&self) -> Result<Vec<Run>> {
        let mut paths = Vec::new();
        for entry in fs::read_dir(self.out)? {
            let path = entry?.path();
            let of_taste = path
                .file_name()
                .and_then(|n| n.to_str())
                .is_some_and(|n| n.starts_with(&format!("{}-", self.taste.name())));
            if of_taste && path.extension().is_some_and(|e| e == "jsonl") {
                paths.push(path);
            }
        }
        paths.sort();
        Ok(paths
            .iter()
            .map(|p| journal::read(p))
            .collect::<Result<_, _>>()?)
    }

    fn drawn(&self) -> Result<(Vec<Curve>, Vec<End>)> {
        let runs = self.runs()?;
        let (mut curves, mut ends) = (Vec::new(), Vec::new());
        for teaching in Teaching::ALL {
            let of: Vec<&Run> = runs
                .iter()
                .filter(|r| r.setting.teaching == teaching.name())
                .collect();
            if !of.is_empty() {
                curves.push(curve::curve(teaching.name(), &of));
                ends.extend(curve::end(teaching.name(), &of));
            }
        }
        Ok((curves, ends))
    }

    /// Writes the rows and the picture of what is done so far.
    fn draw(&self, table: &Table<'_>) -> Result<()> {
        let runs = self.runs()?;
        let rows = self.out.join(format!("{}.csv", self.taste.name()));
        fs::write(&rows, curve::csv(&runs))
            .with_context(|| format!("cannot write {}", rows.display()))?;
        let picture = self.out.join(format!("{}.svg", self.taste.name()));
        let model = runs.first().map_or("", |r| r.setting.model.as_str());
        let title = format!("{} on {model}", self.taste.name());
        curve::picture(&picture, &title, &self.drawn()?.0)?;
        table.say(&format!(
            "{} and {} are written",
            rows.display(),
            picture.display()
        ))?;
        Ok(())
    }
}
