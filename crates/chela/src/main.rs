//! The binary: reads the command line and configuration, builds the parts, runs and stops them.

mod cli;
mod commands;
mod config;
mod connect;
mod folder;
mod judges;
mod keys;
mod output;
mod probes;
mod script;
mod supervise;

use anyhow::{Context, Result};
use chela_kernels::allocator;
use chela_model::TerminalProgress;
use clap::Parser;
use cli::{Cli, Command, Common, ConfigAction, EngineKind, JudgeAction, PolicyCommand, ServeArgs};
use config::Config;
use output::Output;
use signal_hook::consts::{SIGINT, SIGTERM};
use std::{
    io::IsTerminal,
    path::PathBuf,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use toml::Value;

/// A sixth of a busy server's time went into the system's allocator (docs/log.md).
#[global_allocator]
static ALLOCATOR: allocator::MiMalloc = allocator::MiMalloc;

/// A failure before anything was done: usage, configuration, files.
#[derive(Debug)]
struct Usage;

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("not started")
    }
}

impl std::error::Error for Usage {}

fn main() -> ExitCode {
    allocator::keep_freed_pages();
    let cli = Cli::parse();
    let output = Output {
        json: cli.common.json,
    };
    start_log(&cli.common.log_format);
    match run(cli, &output) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let early = error.downcast_ref::<Usage>().is_some();
            // The chain without the marker, which comes first, on one line.
            let chain = error
                .chain()
                .skip(usize::from(early))
                .map(|e| one_line(&e.to_string()));
            output.note(&format!("chela: {}", chain.collect::<Vec<_>>().join(": ")));
            ExitCode::from(if early { 2 } else { 1 })
        }
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn start_log(format: &str) {
    let filter = tracing_subscriber::EnvFilter::try_from_env("RUST_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn,chela=info"));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    if format == "json" {
        builder.json().init()
    } else {
        builder.with_target(false).init()
    }
}

fn run(cli: Cli, output: &Output) -> Result<()> {
    let serve = match &cli.command {
        Command::Serve(args) => args.clone(),
        _ => ServeArgs::default(),
    };
    let flags = flags(&cli.common, &serve).context(Usage)?;
    let (config, layers) = config::load(cli.common.config.as_deref(), &flags).context(Usage)?;
    let data_dir = match config.data.dir.as_str() {
        "" => folder::default_data_dir().context(Usage)?,
        dir => PathBuf::from(dir),
    };
    let named = (!config.data.dir.is_empty()).then(|| data_dir.clone());
    match cli.command {
        Command::Serve(args) => serve_until_told(&config, &args.engine, &data_dir, output),
        Command::Demo(args) => commands::demo::run(config, named.as_deref(), &args, output),
        Command::Experiment { which } => {
            commands::experiment::run(config, named.as_deref(), &which, output)
        }
        Command::Train(args) => commands::train::run(config, &data_dir, &args, output),
        Command::Bench(args) => commands::bench::run(config, &args, output),
        Command::Key { action } => commands::key::run(&data_dir, &action, output),
        Command::Config {
            action: ConfigAction::Show,
        } => show(&layers, output),
        Command::Connect(args) => connect::run(&config, &data_dir, &args, output).context(Usage),
        Command::Policy {
            action:
                PolicyCommand::Export {
                    profile,
                    version,
                    merged,
                    dtype,
                    to,
                },
        } => {
            let asked = commands::export::Asked {
                profile: &profile.profile,
                version,
                merged: merged.as_deref(),
                dtype: dtype.as_deref(),
                to: &to,
            };
            commands::export::run(&config, &data_dir, &asked, output)
        }
        Command::Policy {
            action: PolicyCommand::Replay { profile, version },
        } => commands::replay::run(&config, &data_dir, (&profile.profile, version), output),
        Command::Judge {
            action: JudgeAction::Test { file, tag },
        } => commands::judge::test(&config, file.as_deref(), &tag, output),
        Command::Doctor => commands::doctor::run(&config, &data_dir, output),
        command => {
            let remote = commands::remote::Remote::find(&data_dir)?;
            match command {
                Command::Session { action } => commands::remote::session(&remote, &action, output),
                Command::Forget(args) => commands::policy::forget(&remote, &args, output),
                Command::Feedback(args) => commands::remote::feedback(&remote, &args, output),
                Command::Policy { action } => commands::policy::run(&remote, &action, output),
                _ => commands::remote::status(&remote, output),
            }
        }
    }
}

/// Flags as configuration keys.
fn flags(common: &Common, serve: &ServeArgs) -> Result<Vec<(&'static str, Value)>> {
    let mut all = Vec::new();
    let text = |s: &str| Value::String(s.to_owned());
    if let Some(dir) = &common.data_dir {
        all.push(("data.dir", text(&dir.display().to_string())));
    }
    if let Some(model) = &common.model {
        all.push(("model.name", text(model)));
    }
    if let Some(threads) = common.threads {
        all.push(("model.threads", Value::Integer(i64::try_from(threads)?)));
    }
    if let Some(host) = &serve.host {
        all.push(("server.host", text(host)));
    }
    if let Some(port) = serve.port {
        all.push(("server.port", Value::Integer(port.into())));
    }
    if let Some(learn) = &serve.learn {
        all.push(("learning.on", Value::Boolean(learn == "on")));
    }
    for pair in &common.set {
        let (key, value) = pair
            .split_once('=')
            .with_context(|| format!("--set {pair}: write KEY=VALUE"))?;
        all.push((config::known_key(key)?, config::parse_flag(key, value)?));
    }
    Ok(all)
}

fn show(layers: &config::Layers, output: &Output) -> Result<()> {
    for (key, value, origin) in layers.rows() {
        output.plain(&format!("{key} = {value}  # {origin}"))?;
    }
    Ok(())
}

fn serve_until_told(
    config: &Config,
    engine: &EngineKind,
    data_dir: &std::path::Path,
    output: &Output,
) -> Result<()> {
    // What can be wrong is found before anything slow.
    let listener = supervise::bind(config).context(Usage)?;
    let data = folder::DataFolder::open(data_dir).context(Usage)?;
    judges::rules(&config.judge.rules).context(Usage)?;
    let told = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // A second signal ends at once.
        signal_hook::flag::register_conditional_shutdown(signal, 130, told.clone())?;
        signal_hook::flag::register(signal, told.clone())?;
    }
    let mut progress = TerminalProgress::default();
    let loaded = match engine {
        EngineKind::Local => supervise::load(config, &mut progress),
        EngineKind::Script(file) => supervise::load_script(config, file, &mut progress),
    }
    .context(Usage)?;
    let mut running = supervise::start(config, data, listener, &loaded).context(Usage)?;
    output.note(&format!(
        "serving {} at {}/v1  (page: {}/ , key: chela key admin)",
        loaded.engine.info().model,
        running.address,
        running.address
    ));
    while !told.load(Ordering::Relaxed) {
        if running.failed_within(Duration::from_millis(100)) {
            break;
        }
    }
    output.note("finishing what runs …");
    running.stop()
}
