//! When and how to train; the defaults of the documentation stand here and nowhere else.

use chela_core::{AdapterSpec, OptimParams, TokenId};
use chela_rl::{
    advantage::AdvantageConfig,
    objective::{Aggregation, Clip, Correction},
};
use std::path::PathBuf;

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
    /// Judged samples older than this many steps are dropped; explicit feedback never is.
    pub max_staleness: u64,
    /// Largest part of a batch that one session fills while others wait.
    pub max_session_share: f32,
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
    /// Versions that stay resident in the engine besides the served one.
    pub resident: usize,
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
            max_steps: None,
            advantage: AdvantageConfig::default(),
            baseline: true,
            clip: Clip::default(),
            correction: Correction::default(),
            aggregation: Aggregation::default(),
            optim: OptimParams::default(),
            adapter: AdapterSpec::default(),
            canary,
            canary_tolerance: 1e-2,
            kl_tokens: 512,
            resident: 3,
        }
    }
}
