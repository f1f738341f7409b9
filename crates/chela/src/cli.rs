//! The command line: what can be said, not what is done.

use chela_engine::bench::Case;
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;

/// Serves a language model to any agent and trains it from what happens next.
#[derive(Debug, Parser)]
#[command(name = "chela", version, about, max_term_width = 100)]
pub struct Cli {
    /// Options of every command.
    #[command(flatten)]
    pub common: Common,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Options of every command.
#[derive(Clone, Debug, Default, Args)]
pub struct Common {
    /// Folder of store, adapters and keys.
    #[arg(long, global = true, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// Configuration file.
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Starter name, folder, .gguf file or hub id.
    #[arg(long, global = true, value_name = "MODEL")]
    pub model: Option<String>,
    /// Worker threads; 0 = one for each core.
    #[arg(long, global = true, value_name = "N")]
    pub threads: Option<usize>,
    /// Print JSON for scripts on stdout.
    #[arg(long, global = true)]
    pub json: bool,
    /// Log lines as text or json, on stderr.
    #[arg(long, global = true, value_name = "FORMAT", default_value = "text", value_parser = ["text", "json"])]
    pub log_format: String,
    /// Set any configuration key, like `--set learning.lr=1e-4`.
    #[arg(long = "set", global = true, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve the model and learn from what happens next.
    Serve(ServeArgs),
    /// Watch a model learn a simulated user's taste, with the score before and after.
    Demo(DemoArgs),
    /// Play simulated users against a server of its own: do profiles stay apart, does a hostile loop do harm.
    Experiment {
        /// Which one.
        #[command(subcommand)]
        which: ExperimentCommand,
    },
    /// Teach a task whose answers can be checked, by reinforcement learning.
    Train(TrainArgs),
    /// Measure this machine and model: prefill, decode, training, publish.
    Bench(BenchArgs),
    /// Make, list and revoke keys.
    Key {
        /// What to do with keys.
        #[command(subcommand)]
        action: KeyAction,
    },
    /// Show the configuration in force and where each value comes from.
    Config {
        /// What to do with it.
        #[command(subcommand)]
        action: ConfigAction,
    },
    /// How the running server stands.
    Status,
    /// Sessions of the running server.
    Session {
        /// What to do with sessions.
        #[command(subcommand)]
        action: SessionAction,
    },
    /// Score a turn of the running server.
    Feedback(FeedbackArgs),
    /// Take a turn, a session or a whole profile out: its text, what it taught, and every version that learnt from it.
    Forget(ForgetArgs),
    /// Versions of a profile: list, show, compare, go back, pause, export, import.
    Policy {
        /// What to do with versions.
        #[command(subcommand)]
        action: PolicyCommand,
    },
    /// See how far the configured judges agree with verdicts that a person wrote down.
    Judge {
        /// What to do with judges.
        #[command(subcommand)]
        action: JudgeAction,
    },
    /// Point a client at the server, or take that back.
    Connect(ConnectArgs),
    /// Check folders, model, address and memory, and say what to do.
    Doctor,
}

/// What makes the replies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// The model.
    #[default]
    Local,
    /// A file.
    Script(PathBuf),
}

impl std::str::FromStr for EngineKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "local" => Ok(Self::Local),
            Some(("script", file)) if !file.is_empty() => Ok(Self::Script(file.into())),
            _ => Err("use local or script:FILE".to_owned()),
        }
    }
}

/// `chela serve`
#[derive(Clone, Debug, Default, Args)]
pub struct ServeArgs {
    /// Address to listen on.
    #[arg(long)]
    pub host: Option<String>,
    /// Port; 0 = any free one.
    #[arg(long)]
    pub port: Option<u16>,
    /// `local`, or for tests of what is around a model `script:FILE`: replies from a file of JSON lines.
    #[arg(long, default_value = "local", value_name = "ENGINE")]
    pub engine: EngineKind,
    /// Learn from what happens next.
    #[arg(long, value_parser = ["on", "off"])]
    pub learn: Option<String>,
}

/// What `chela bench --only` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Only {
    /// One case.
    Case(Case),
    /// Whatever comes on standard input.
    Stdin,
}

impl std::str::FromStr for Only {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "-" => Ok(Self::Stdin),
            name => name.parse().map(Self::Case),
        }
    }
}

/// `chela bench`
#[derive(Clone, Debug, Default, Args)]
pub struct BenchArgs {
    /// Measure only these cases, each in turn.
    ///
    /// `train:BxN` is a LoRA step over B texts of N tokens, all scored; `train:ragged` over texts of different lengths and
    /// `train:shared` over texts that begin alike, of which the replies are scored; `train:recompute` says how many times as long a step
    /// takes with `learning.recompute`, and the peak memory with and without (measure it alone); `decode:N` makes N replies together;
    /// `prefill:N` reads a prompt of N tokens; `turn2:N` waits for the first token behind N cached tokens and 32 new ones; `sgemm` and
    /// `memory` are the machine's rates. `-` reads one name a line from standard input and measures it once, so that a script can let
    /// another program work in between. With --json each measurement is a line, the first of a case with its texts.
    #[arg(long, value_name = "CASE", value_delimiter = ',')]
    pub only: Vec<Only>,
    /// Measurements of each case, after one that warms up and does not count.
    #[arg(long, value_name = "N", default_value_t = 3, requires = "only", value_parser = clap::value_parser!(u32).range(1..))]
    pub times: u32,
}

/// `chela demo`
#[derive(Clone, Debug, Args)]
pub struct DemoArgs {
    /// Seed of the simulated user and of the adapter.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Also run a control whose scores are thrown by a coin.
    #[arg(long)]
    pub control: bool,
    /// A few updates and 32 held-out prompts, in under three minutes.
    #[arg(long)]
    pub quick: bool,
    /// Most optimizer steps.
    #[arg(long)]
    pub updates: Option<u64>,
}

/// `chela experiment …`
#[derive(Clone, Debug, Subcommand)]
pub enum ExperimentCommand {
    /// Does it learn? Users of one taste, taught from their words in several ways and by several seeds, with controls; curves.
    Learn(LearnArgs),
    /// Two users with opposite tastes at once: each profile must learn its own user's, and neither move on the other's.
    Profiles(ProfilesArgs),
    /// A hostile loop fills the batches after an honest user: what is served must stay good.
    Runaway(RunawayArgs),
}

/// `chela train`
#[derive(Clone, Debug, Args)]
pub struct TrainArgs {
    /// arithmetic, countdown, word-problems, or a task's file (docs/learning.md).
    #[arg(long, value_name = "TASK")]
    pub task: String,
    /// Optimizer steps to make.
    #[arg(long, default_value_t = 20)]
    pub steps: u64,
    /// Replies to each prompt.
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub samples: usize,
    /// What groups are taught with, like grpo; needs no server running, which has its own (`learning.algorithm`).
    #[arg(long)]
    pub algorithm: Option<String>,
    /// Read the held-out prompts after so many steps; 0 = before and after only.
    #[arg(long, default_value_t = 5)]
    pub every: u64,
    /// Requests at once.
    #[arg(long, default_value_t = 16)]
    pub lanes: usize,
    /// Order of prompts, sampling, and the adapter.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Folder of the journal, the curve and its picture.
    #[arg(long, value_name = "DIR", default_value = "chela-train")]
    pub out: PathBuf,
}

/// `chela experiment learn`
#[derive(Clone, Debug, Args)]
pub struct LearnArgs {
    /// What the users like.
    #[arg(long, default_value = "brief", value_parser = ["brief", "thorough", "student", "ta", "teacher"])]
    pub taste: String,
    /// What becomes of their words, separated by commas: combined, coin, opd, binary, none.
    #[arg(long, value_delimiter = ',', default_value = "combined,coin,opd,binary,none",
        value_parser = ["combined", "coin", "opd", "binary", "none"])]
    pub teachings: Vec<String>,
    /// Seeds of the users and of the adapters, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "1,2,3")]
    pub seeds: Vec<u64>,
    /// Optimizer steps of each run.
    #[arg(long, default_value_t = 8)]
    pub updates: u64,
    /// Held-out prompts read before the first step and after the last.
    #[arg(long, default_value_t = 200)]
    pub held_out: usize,
    /// Of these, read at each version for the curve.
    #[arg(long, default_value_t = 40)]
    pub live: usize,
    /// Who finds the users' words: they are drawn from written ones, or the base model rewrites those (then name a judge that
    /// understands them, `--judge self`).
    #[arg(long, default_value = "scripted", value_parser = ["scripted", "model"])]
    pub user: String,
    /// Who judges what users say next.
    #[arg(long, default_value = "rules", value_parser = ["rules", "self"])]
    pub judge: String,
    /// Ask these instead of the built-in questions: JSON lines {"question": …, "answer": …, "solution": …}.
    #[arg(long, value_name = "FILE")]
    pub problems: Option<PathBuf>,
    /// Folder of journals, curves and pictures; what is there already is not run again.
    #[arg(long, value_name = "DIR", default_value = "chela-experiment")]
    pub out: PathBuf,
    /// Two updates of eight turns and few prompts, to see that it runs.
    #[arg(long)]
    pub quick: bool,
}

/// `chela experiment profiles`
#[derive(Clone, Debug, Args)]
pub struct ProfilesArgs {
    /// Seed of the simulated users and of the adapters.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Most optimizer steps of each profile.
    #[arg(long)]
    pub updates: Option<u64>,
    /// A few updates and prompts, to see that it runs.
    #[arg(long)]
    pub quick: bool,
}

/// `chela experiment runaway`
#[derive(Clone, Debug, Args)]
pub struct RunawayArgs {
    /// Seed of the simulated users and of the adapter.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Optimizer steps that the honest user teaches first.
    #[arg(long)]
    pub updates: Option<u64>,
    /// Sessions of the hostile loop.
    #[arg(long)]
    pub sessions: Option<usize>,
    /// Thanks for worthless replies, demands of garbage, or one and the other in turn.
    #[arg(long, default_value = "both", value_parser = ["praise", "demand", "both"])]
    pub pattern: String,
    /// The loop comes batch by batch, so that nothing of it is stale, instead of as fast as the server takes it.
    #[arg(long)]
    pub patient: bool,
    /// The control: the same without gate and watch.
    #[arg(long)]
    pub no_gate: bool,
    /// Two updates, 48 hostile sessions, 32 prompts.
    #[arg(long)]
    pub quick: bool,
}

/// `chela key …`
#[derive(Debug, Subcommand)]
pub enum KeyAction {
    /// Make a key; it is shown once.
    New {
        /// The profile it selects.
        #[arg(long, default_value = "default")]
        profile: String,
        /// What it may do.
        #[arg(long, default_value = "chat", value_parser = ["chat", "feedback", "admin"])]
        scope: String,
    },
    /// List keys, without the keys themselves.
    List,
    /// Take a key back.
    Revoke {
        /// Its id, as listed.
        id: String,
    },
    /// Replace a key by a new one for the same profile and scope, or the admin key with `admin`.
    Rotate {
        /// Its id, as listed, or `admin`.
        id: String,
    },
    /// Print the admin key.
    Admin,
}

/// `chela judge …`
#[derive(Debug, Subcommand)]
pub enum JudgeAction {
    /// Have labelled turns judged: agreement, confusion, cost.
    Test {
        /// JSON lines, one turn each: label 1, 0 or -1, messages, answer, next (docs/learning.md). Without it, the set that Chela brings.
        file: Option<PathBuf>,
        /// Only turns with one of these tags.
        #[arg(long, value_name = "TAG", value_delimiter = ',')]
        tag: Vec<String>,
    },
}

/// `chela config …`
#[derive(Debug, Subcommand)]
pub enum ConfigAction {
    /// Print every key with its value and where that comes from.
    Show,
}

/// `chela session …`
#[derive(Debug, Subcommand)]
pub enum SessionAction {
    /// The last active ones.
    List,
    /// The turns of one, with verdicts.
    Show {
        /// Its id.
        id: String,
    },
    /// End one: its last reply will get no next message.
    End {
        /// Its id.
        id: String,
    },
    /// Its trajectories as JSON.
    Export {
        /// Its id.
        id: String,
    },
}

/// `chela connect`
#[derive(Debug, Args)]
pub struct ConnectArgs {
    /// openclaw, codex, claude-code, opencode, zeroclaw, aider, mini-swe-agent; or openai, anthropic, langchain, openai-agents,
    /// whose variables are printed.
    pub client: String,
    /// The server's address; else the running one's, else the configured one.
    #[arg(long, value_name = "URL")]
    pub url: Option<String>,
    /// The model's name in the client; else what the server lists first.
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// The key that the client sends; none is needed on loopback.
    #[arg(long, value_name = "KEY")]
    pub key: Option<String>,
    /// Print the changed file instead of writing it.
    #[arg(long)]
    pub print: bool,
    /// Give the file back as it was.
    #[arg(long)]
    pub undo: bool,
}

/// `chela feedback`
#[derive(Debug, Args)]
pub struct FeedbackArgs {
    /// A turn's id, or a session's with --session.
    pub target: String,
    /// The target is a session: its last completed turn is meant.
    #[arg(long)]
    pub session: bool,
    /// Any finite number; 1 = good, -1 = bad.
    #[arg(long, allow_hyphen_values = true)]
    pub score: Option<f32>,
    /// A remark.
    #[arg(long)]
    pub text: Option<String>,
}

/// `chela forget`
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("what").required(true).multiple(true).args(["turn", "session", "profile"])))]
pub struct ForgetArgs {
    /// A turn, with all that stands on it.
    #[arg(long, value_name = "ID", conflicts_with_all = ["session", "profile"])]
    pub turn: Option<String>,
    /// A session.
    #[arg(long, value_name = "ID")]
    pub session: Option<String>,
    /// Everything of a profile; with --session, whose session it is.
    #[arg(long, value_name = "NAME")]
    pub profile: Option<String>,
    /// Only say what would go and what it would cost.
    #[arg(long)]
    pub dry_run: bool,
    /// Do not ask.
    #[arg(long)]
    pub yes: bool,
}

/// `chela policy …`
#[derive(Debug, Subcommand)]
pub enum PolicyCommand {
    /// All versions of a profile.
    List(ProfileArg),
    /// One version: what it learnt from which words, its receipt, what the gate found.
    Show {
        /// Whose.
        #[command(flatten)]
        profile: ProfileArg,
        /// Which version; else what is served.
        version: Option<u64>,
    },
    /// What changed between two versions: the same prompts answered by both, KL, length, and the lessons between.
    Diff {
        /// Whose.
        #[command(flatten)]
        profile: ProfileArg,
        /// The first; else the base model.
        #[arg(long)]
        from: Option<u64>,
        /// The second; else what is served.
        #[arg(long)]
        to: Option<u64>,
    },
    /// Write a version's adapter (PEFT's layout), or the model with it merged in.
    Export {
        /// Whose.
        #[command(flatten)]
        profile: ProfileArg,
        /// Which version; else what is served.
        #[arg(long)]
        version: Option<u64>,
        /// Merge the adapter into the base weights: a Hugging Face folder, or one GGUF file.
        #[arg(long, value_parser = ["hf", "gguf"])]
        merged: Option<String>,
        /// Type of merged weights: f32, f16, bf16 or (gguf) q8_0; else the model's own, f16 for quantised ones.
        #[arg(long, value_parser = ["f32", "f16", "bf16", "q8_0"], requires = "merged")]
        dtype: Option<String>,
        /// The folder or file to make.
        to: PathBuf,
    },
    /// Take an adapter in PEFT's layout in as a candidate; it serves once the gate has passed it.
    Import {
        /// Whose.
        #[command(flatten)]
        profile: ProfileArg,
        /// Its folder.
        from: PathBuf,
    },
    /// Make every step on the way to a version again and compare the weights bit for bit (no server may run).
    Replay {
        /// Whose.
        #[command(flatten)]
        profile: ProfileArg,
        /// Which version; else what is served.
        #[arg(long)]
        version: Option<u64>,
    },
    /// Go back to a version (0 = the base model), or to the served one's parent.
    Rollback {
        /// Whose.
        #[command(flatten)]
        profile: ProfileArg,
        /// Which version.
        #[arg(long)]
        version: Option<u64>,
    },
    /// Serve a version.
    Promote {
        /// Whose.
        #[command(flatten)]
        profile: ProfileArg,
        /// Which version.
        #[arg(long)]
        version: u64,
    },
    /// No more steps.
    Pause(ProfileArg),
    /// Steps again.
    Resume(ProfileArg),
}

/// Whose versions.
#[derive(Clone, Debug, Args)]
pub struct ProfileArg {
    /// The profile.
    #[arg(long, default_value = "default")]
    pub profile: String,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;

    fn bench(args: &[&str]) -> Result<BenchArgs, String> {
        let all = ["chela", "bench"].iter().chain(args);
        match Cli::try_parse_from(all).map_err(|e| e.to_string())?.command {
            Command::Bench(args) => Ok(args),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn bench_takes_cases_by_name() {
        let args = bench(&[]).unwrap();
        assert!(args.only.is_empty(), "the whole report");
        let args = bench(&["--only", "train:1x1024,decode:8", "--only", "prefill:512"]).unwrap();
        let names: Vec<Only> = ["train:1x1024", "decode:8", "prefill:512"]
            .map(|n| n.parse().unwrap())
            .to_vec();
        assert_eq!((args.only, args.times), (names, 3));
        let args = bench(&["--only", "-"]).unwrap();
        assert_eq!(args.only, [Only::Stdin]);
        for (wrong, says) in [
            (&["--only", "train"][..], "train: no such case; there are"),
            (&["--only", "decode:0"], "not a number from 1 to 64"),
            (&["--only", "sgemm", "--times", "0"], "--times"),
            (&["--times", "5"], "--only"),
        ] {
            let error = bench(wrong).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }
}
