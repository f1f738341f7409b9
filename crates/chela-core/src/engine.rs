//! The seam to whatever samples and scores tokens, and the seam to whatever learns.

use crate::{
    BoxFuture, BoxStream,
    error::EngineError,
    ids::{PolicyRef, PolicyVersion, Profile, TokenId},
    sample::{Sample, Scored, TokenLoss, Want},
};
use std::path::{Path, PathBuf};

/// What an engine is.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineInfo {
    /// Name of the base model, as `/v1/models` lists it.
    pub model: String,
    /// Most tokens of prompt and reply together.
    pub context_length: usize,
    /// Number of token ids.
    pub vocabulary: usize,
    /// SHA-256 of the tokenizer; must equal chela-chat's.
    pub tokenizer_hash: String,
}

/// Token ids to read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    /// In order.
    pub tokens: Vec<TokenId>,
}

/// Who is served first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// A client waits.
    User,
    /// A verdict waits.
    Judge,
    /// A training step waits.
    Train,
}

/// What a [`Guide`] says after a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Go on.
    Continue,
    /// This token completed the reply (a stop string, a grammar's end).
    Stop,
}

/// Follows one reply token by token: stop strings, grammars, forced tools. Made where tokenizers are known, so that the
/// engine needs none and still stops exactly.
pub trait Guide: Send {
    /// Sets the logits of forbidden tokens to −∞. Returns how many tokens stay allowed, `None` = no restriction.
    fn mask(&mut self, _logits: &mut [f32]) -> Option<usize> {
        None
    }
    /// Is told of each token of the reply, end ids excepted.
    fn accept(&mut self, token: TokenId) -> Flow;
}

/// How to sample one reply.
pub struct SamplingParams {
    /// Below 0.01 means greedy.
    pub temperature: f32,
    /// In (0, 1].
    pub top_p: f32,
    /// 0 = all.
    pub top_k: u32,
    /// In [0, 1).
    pub min_p: f32,
    /// On tokens of the reply, by count.
    pub frequency_penalty: f32,
    /// On tokens of the reply, once.
    pub presence_penalty: f32,
    /// Added to logits.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Same seed, same reply, whatever else runs.
    pub seed: u64,
    /// Most tokens of the reply, at least 1; cut to what fits into the context.
    pub max_tokens: usize,
    /// Ids that end the reply; the one sampled is part of the reply.
    pub end_ids: Vec<TokenId>,
    /// Alternatives to report for each token.
    pub top_logprobs: u8,
    /// Who is served first.
    pub priority: Priority,
    /// Stop strings and grammars.
    pub guide: Option<Box<dyn Guide>>,
    /// Keys and values of the text may be kept for later requests. Off for a text that its owner may have forgotten meanwhile.
    pub keep: bool,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            max_tokens: 256,
            end_ids: Vec::new(),
            top_logprobs: 0,
            priority: Priority::User,
            guide: None,
            keep: true,
        }
    }
}

/// One sampled token. Log-probs are natural logarithms, finite and at most 0.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledToken {
    /// Its id.
    pub id: TokenId,
    /// At the turn's temperature, before any truncation (top-k, top-p, min-p). Where the temperature is below 0.1, or penalties,
    /// bias or a guide shaped the logits: at temperature 1 on the unshaped logits.
    pub behavior_logprob: f32,
    /// At temperature 1 on the unshaped logits.
    pub logprob_t1: f32,
    /// Probability mass that truncation kept, in (0, 1].
    pub kept_mass: f32,
    /// The guide left no choice.
    pub forced: bool,
    /// The most likely tokens with their log-probs at temperature 1, most likely first.
    pub top: Vec<(TokenId, f32)>,
}

/// Why a reply is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// An end id was sampled.
    End,
    /// The guide stopped it: a stop string, a grammar's end.
    Stopped,
    /// The limit of tokens or the context was reached.
    Length,
    /// The client went away.
    Aborted,
    /// The engine failed.
    Failed,
}

impl FinishReason {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::End,
        Self::Stopped,
        Self::Length,
        Self::Aborted,
        Self::Failed,
    ];

    /// The word in stores and views.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::End => "end",
            Self::Stopped => "stopped",
            Self::Length => "length",
            Self::Aborted => "aborted",
            Self::Failed => "failed",
        }
    }

    /// The reverse.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|r| r.as_str() == text)
    }
}

/// What a sampling stream yields: `Started` once, then tokens, then `Finished` once, then nothing.
#[derive(Clone, Debug, PartialEq)]
pub enum SamplingEvent {
    /// The prompt is read.
    Started {
        /// The version that samples every token of this reply.
        version: PolicyVersion,
        /// Prompt tokens taken from the cache.
        cached_tokens: usize,
    },
    /// A token.
    Token(SampledToken),
    /// The reply is over.
    Finished(FinishReason),
}

/// Dropping it cancels the request within one decode step.
pub type Sampling = BoxStream<'static, Result<SamplingEvent, EngineError>>;

/// Weights to load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Weights {
    /// A folder that [`Learner::save`] or another program wrote: an adapter in PEFT's layout (`adapter_config.json`,
    /// `adapter_model.safetensors`), or a whole model as Hugging Face has it (`config.json`, `model.safetensors`).
    Folder(PathBuf),
}

impl Weights {
    /// The file of an adapter's numbers.
    pub const ADAPTER: &str = "adapter_model.safetensors";
    /// The file of a whole model's.
    pub const MODEL: &str = "model.safetensors";

    /// Whether a folder holds a whole model; else it is read as an adapter. The one place that tells them apart.
    pub fn is_whole(dir: &Path) -> bool {
        dir.join(Self::MODEL).is_file() && !dir.join(Self::ADAPTER).is_file()
    }

    /// Whether either lies there.
    pub fn are_there(dir: &Path) -> bool {
        [Self::ADAPTER, Self::MODEL]
            .iter()
            .any(|name| dir.join(name).is_file())
    }
}

/// What the engine really holds after a load.
#[derive(Clone, Debug, PartialEq)]
pub struct Receipt {
    /// SHA-256 over the adapter or the whole model as resident in the engine: names, shapes, scale and values.
    pub weights_hash: String,
    /// Log-probs of the canary text under this version, from the engine.
    pub engine_canary: Vec<f32>,
    /// The same from the learner; empty when loaded at a restart without one.
    pub learner_canary: Vec<f32>,
}

/// Samples and scores. `load` makes a version resident without serving it (so that receipts and gates come before users);
/// `serve` swaps the profile's pointer. Running requests keep the version they began with, even when it is unloaded.
pub trait PolicyEngine: Send + Sync {
    /// What it is.
    fn info(&self) -> EngineInfo;
    /// The version a profile's requests get now; the base when nothing else was served.
    fn served(&self, profile: &Profile) -> PolicyVersion;
    /// Samples a reply. Refuses before the stream begins what can be refused then.
    fn sample(
        &self,
        policy: PolicyRef,
        prompt: Prompt,
        params: SamplingParams,
    ) -> Result<Sampling, EngineError>;
    /// Log-probs of `prompt.tokens[from..]`, each given all tokens before it; `from` ≥ 1. With [`Want::top_k`] also the most
    /// likely tokens at each of these positions.
    fn score(
        &self,
        policy: PolicyRef,
        prompt: Prompt,
        from: usize,
        want: Want,
    ) -> BoxFuture<'static, Result<Scored, EngineError>>;
    /// Makes a version resident, and remembers where it lies. Returns the hash of what is now in memory.
    fn load(
        &self,
        version: PolicyVersion,
        weights: Weights,
    ) -> BoxFuture<'static, Result<String, EngineError>>;
    /// Remembers where a version lies without reading it: it becomes resident when a request names it. With `hash`, what is then
    /// read must have it, else the request fails.
    fn register(&self, version: PolicyVersion, weights: Weights, hash: Option<String>);
    /// From now on new requests of the profile get this version (which must be resident, registered, or the base).
    fn serve(&self, version: &PolicyVersion) -> Result<(), EngineError>;
    /// Lets go of a version that is not served, and forgets where it lies. Unknown versions are no error.
    fn unload(&self, version: &PolicyVersion);
    /// Drops everything kept of a profile's texts: cached prefixes of all its versions.
    fn forget_texts(&self, profile: &Profile);
    /// Whether requests can make progress; the reason when not.
    fn health(&self) -> Result<(), String>;
    /// Bytes that were set aside for each part at the start, by its name; empty where memory is another program's.
    fn memory_parts(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

/// What is trained: a low-rank delta (Hu et al., arXiv 2106.09685): W + (alpha / rank) · B · A, or all weights.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterSpec {
    /// All weights are trained, into a whole model of the profile's own; the other fields say nothing then.
    pub whole: bool,
    /// Rank r ≥ 1.
    pub rank: usize,
    /// Scale numerator.
    pub alpha: f32,
    /// Module names as PEFT has them: `q_proj k_proj v_proj o_proj gate_proj up_proj down_proj`. All seven mean every map that
    /// takes an adapter: in a mixture of experts those of attention.
    pub targets: Vec<String>,
    /// Seed of the initial A; B starts at zero.
    pub seed: u64,
    /// Beside it a map of the final hidden state to one number, what a state is worth ([`crate::Scored::values`]); it starts at zero, is
    /// trained and saved with the rest, and is no part of what is served.
    pub value_head: bool,
}

impl Default for AdapterSpec {
    fn default() -> Self {
        let targets = [
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        ];
        Self {
            whole: false,
            rank: 16,
            alpha: 32.0,
            targets: targets.iter().map(|t| (*t).to_owned()).collect(),
            seed: 0,
            value_head: false,
        }
    }
}

/// AdamW (Loshchilov & Hutter, arXiv 1711.05101) and clipping by global norm.
#[derive(Clone, Debug, PartialEq)]
pub struct OptimParams {
    /// Learning rate.
    pub lr: f32,
    /// First-moment decay.
    pub beta1: f32,
    /// Second-moment decay.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Largest global gradient norm; 0 = no clipping.
    pub clip: f32,
}

impl Default for OptimParams {
    fn default() -> Self {
        Self {
            lr: 2e-4,
            beta1: 0.9,
            beta2: 0.98,
            eps: 1e-8,
            weight_decay: 0.0,
            clip: 1.0,
        }
    }
}

/// What one optimizer step did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepReport {
    /// Global norm of the accumulated gradient before clipping.
    pub grad_norm: f32,
    /// The gradient was not finite: nothing was changed, weights and moments are bit-identical.
    pub skipped: bool,
    /// Optimizer steps done so far, this one included unless skipped.
    pub step: u64,
}

/// Adapter (or whole model) and optimizer state on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// The folder: PEFT's two files or a model's, and the optimizer's.
    pub dir: PathBuf,
    /// Optimizer steps done.
    pub step: u64,
}

/// Opens learners. Opening is cheap next to a step; only one learner of a profile may be open.
pub trait Learners: Send + Sync {
    /// What equals the base model (a fresh adapter, or all its weights), or what a checkpoint holds. All weights may begin at an adapter's
    /// checkpoint, which is merged into them, not the other way round.
    fn open(
        &self,
        profile: &Profile,
        spec: &AdapterSpec,
        from: Option<&Checkpoint>,
    ) -> Result<Box<dyn Learner>, EngineError>;
    /// What decides the last bits of a step: instruction set, threads, blocking. Equal texts, equal bits.
    fn kernel_path(&self) -> String;
}

/// Owns weights and optimizer; blocking, one thread owns it. Knows no algorithm.
pub trait Learner: Send {
    /// Whether it could read this sample, however it is batched; the error says why not (too long for the context or for memory, ids of
    /// another vocabulary). A batch with one that it does not take is refused whole.
    fn takes(&self, sample: &Sample) -> Result<(), EngineError>;
    /// Log-probs (and what [`Want`] asks for) of each sample's scored positions under the present weights, at the sample's
    /// temperature.
    fn forward(&mut self, batch: &[Sample], want: Want) -> Result<Vec<Scored>, EngineError>;
    /// As [`Learner::forward`], under the base model.
    fn forward_base(&mut self, batch: &[Sample], want: Want) -> Result<Vec<Scored>, EngineError>;
    /// Forward, then `loss(index, sample, scored)` for its derivative by each log-prob, then backward; gradients add up until
    /// the next [`Learner::optim_step`]. Samples may be visited in any order, each once; the closure sees one at a time.
    fn forward_backward(
        &mut self,
        batch: &[Sample],
        loss: &mut dyn FnMut(usize, &Sample, &Scored) -> TokenLoss,
    ) -> Result<(), EngineError>;
    /// One AdamW step over the accumulated gradient, which is then cleared.
    fn optim_step(&mut self, params: &OptimParams) -> Result<StepReport, EngineError>;
    /// SHA-256 over what is trained as it is in memory, equal to what [`PolicyEngine::load`] answers for the same weights.
    fn weights_hash(&self) -> Result<String, EngineError>;
    /// Writes and syncs weights and optimizer into `dir`, which is created and must not exist.
    fn save(&self, dir: &Path) -> Result<Checkpoint, EngineError>;
}
