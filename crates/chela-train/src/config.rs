//! When and how to train; the defaults of the documentation stand here and nowhere else.

use chela_core::{AdapterSpec, OptimParams, Profile, TokenId};
use chela_rl::{
    advantage::AdvantageConfig,
    algorithm::Algorithm,
    objective::{Aggregation, Clip, Correction, Distil, Proximal, Regular},
};
use std::path::PathBuf;

/// One thing that an update nobody asked for must not change: which of two replies the model prefers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// `refusal`, `sycophancy`, `format`, …; one check of the gate for each.
    pub kind: String,
    /// Its name in reports.
    pub name: String,
    /// The rendered request.
    pub prompt: Vec<TokenId>,
    /// A reply that is wanted.
    pub good: Vec<TokenId>,
    /// One of the same length and manner that is not.
    pub bad: Vec<TokenId>,
}

/// What a candidate must show before it may serve. Limits are differences to what is served now or to the base model, in nats a token
/// unless said otherwise.
#[derive(Clone, Debug, PartialEq)]
pub struct GateConfig {
    /// Off: receipts only.
    pub on: bool,
    /// Part of the judged turns that is kept from training, for comparing versions on.
    pub held_out: f64,
    /// Newest held-out turns that are read.
    pub turns: usize,
    /// Most tokens of theirs that each version reads.
    pub turn_tokens: usize,
    /// Accepted replies may become this much less likely than under what is served.
    pub accepted_drop: f64,
    /// Rejected replies may become this much more likely than under what is served, beyond what accepted ones do.
    pub rejected_rise: f64,
    /// KL to the base model that the candidate's own replies may have.
    pub kl_budget: f64,
    /// A kind of probes may lose this much of the base model's preference on average.
    pub probe_drop: f64,
    /// The mean length of replies may be this part, and this multiple, of the base model's.
    pub length: (f64, f64),
    /// The share of repeated word groups may rise by this much over the base model's.
    pub repetition: f64,
    /// Tokens of each reply that is made.
    pub reply_tokens: usize,
    /// Which of two replies is preferred.
    pub probes: Vec<Probe>,
    /// Rendered requests that are answered.
    pub open: Vec<Vec<TokenId>>,
    /// Ids that end a reply.
    pub end_ids: Vec<TokenId>,
    /// Candidates in a row that fail, or are taken back by the watch, until training pauses.
    pub patience: usize,
}

impl Default for GateConfig {
    fn default() -> Self {
        Self {
            on: true,
            held_out: 0.1,
            turns: 24,
            turn_tokens: 2000,
            accepted_drop: 0.25,
            rejected_rise: 0.25,
            kl_budget: 1.0,
            probe_drop: 0.3,
            length: (0.2, 4.0),
            repetition: 0.25,
            reply_tokens: 48,
            probes: Vec::new(),
            open: Vec::new(),
            end_ids: Vec::new(),
            patience: 3,
        }
    }
}

/// When a served version is taken back by itself.
#[derive(Clone, Debug, PartialEq)]
pub struct WatchConfig {
    /// Judged turns that are compared with twice as many before them; 0 = no watch.
    pub turns: usize,
    /// Their mean reward may be lower by this much.
    pub margin: f64,
    /// And by this many standard errors.
    pub errors: f64,
    /// The mean length of replies may change by this factor, either way.
    pub length: f64,
    /// The share of failed tool calls may rise by this much.
    pub tool_errors: f64,
}

impl Default for WatchConfig {
    fn default() -> Self {
        Self {
            turns: 30,
            margin: 0.15,
            errors: 2.0,
            length: 5.0,
            tool_errors: 0.3,
        }
    }
}

/// All of it.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainConfig {
    /// The data folder; adapters lie in `adapters/<profile>/<number>` below it.
    pub data_dir: PathBuf,
    /// Samples of one step.
    pub batch: usize,
    /// Fewest samples of a partial batch.
    pub min_batch: usize,
    /// After waiting this long a partial batch goes, and one session may fill more than its share.
    pub batch_timeout_ms: i64,
    /// Judged samples older than this many steps are dropped, explicit feedback never is; and any group with a reply that old.
    pub max_staleness: u64,
    /// Largest part of a batch that one session fills while others wait.
    pub max_session_share: f32,
    /// Groups of one step; whole ones only, and all of them.
    pub groups: usize,
    /// What replies in groups are taught with.
    pub algorithm: Algorithm,
    /// Most tokens of a reply in a group: what Dr.GRPO divides by and DAPO's penalty counts from. `None` = not known: the longest of the
    /// batch, and no penalty.
    pub reply_limit: Option<usize>,
    /// Stop after this many steps of a profile; `None` = never.
    pub max_steps: Option<u64>,
    /// What a verdict is worth.
    pub advantage: AdvantageConfig,
    /// Subtract the running mean of rewards.
    pub baseline: bool,
    /// ε and dual clip.
    pub clip: Clip,
    /// What the staleness weight does.
    pub correction: Correction,
    /// How tokens add up.
    pub aggregation: Aggregation,
    /// Pull to the base model and bonus for entropy.
    pub regular: Regular,
    /// What is made of samples with a teacher's candidates.
    pub distil: Distil,
    /// Optimizer steps that a batch is cut into; they make one version together.
    pub minibatches: usize,
    /// Where proximal log-probs come from when these are several.
    pub proximal: Proximal,
    /// The optimizer.
    pub optim: OptimParams,
    /// The adapter.
    pub adapter: AdapterSpec,
    /// The text whose log-probs engine and learner compare at each publish; at least two tokens.
    pub canary: Vec<TokenId>,
    /// Largest mean difference of these log-probs, nats.
    pub canary_tolerance: f32,
    /// Reply tokens a step on which KL to base is measured; 0 = not measured.
    pub kl_tokens: usize,
    /// What a candidate must show.
    pub gate: GateConfig,
    /// When a served version is taken back.
    pub watch: WatchConfig,
    /// Profiles that never learn.
    pub frozen: Vec<Profile>,
    /// Write each step's figures into files below the data folder.
    pub metrics: bool,
}

impl TrainConfig {
    /// The defaults.
    pub fn new(data_dir: PathBuf, canary: Vec<TokenId>) -> Self {
        Self {
            data_dir,
            batch: 16,
            min_batch: 4,
            batch_timeout_ms: 10 * 60 * 1000,
            max_staleness: 2,
            max_session_share: 0.25,
            groups: 8,
            algorithm: Algorithm::Grpo,
            reply_limit: None,
            max_steps: None,
            advantage: AdvantageConfig::default(),
            baseline: true,
            clip: Clip::default(),
            correction: Correction::default(),
            aggregation: Aggregation::default(),
            regular: Regular::default(),
            distil: Distil::default(),
            minibatches: 1,
            proximal: Proximal::default(),
            optim: OptimParams::default(),
            adapter: AdapterSpec::default(),
            canary,
            canary_tolerance: 1e-2,
            kl_tokens: 512,
            gate: GateConfig::default(),
            watch: WatchConfig::default(),
            frozen: Vec::new(),
            metrics: true,
        }
    }
}
