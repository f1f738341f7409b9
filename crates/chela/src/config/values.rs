//! The sections, their keys, defaults and meaning. `chela config show` and docs/configuration.md are made from this.

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// Everything that can be configured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The HTTP server.
    pub server: Server,
    /// The model and the machine.
    pub model: Model,
    /// Where things are kept.
    pub data: Data,
    /// When and how to train.
    pub learning: Learning,
    /// Who scores.
    pub judge: Judge,
}

/// `[server]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Server {
    /// Address to listen on; anything but loopback needs `auth = "keys"`.
    pub host: String,
    /// Port; 0 = any free one.
    pub port: u16,
    /// `open` (loopback only) or `keys`.
    pub auth: String,
    /// Origins of web pages that may call.
    pub cors_origins: Vec<String>,
    /// Further Host names under which the server may be called.
    pub hosts: Vec<String>,
    /// Requests of one profile that may be under way; more are answered with 429.
    pub profile_requests: usize,
    /// Unknown model names are refused instead of answered by the profile's policy.
    pub strict_models: bool,
    /// Seconds that running replies get at a stop.
    pub grace_seconds: u64,
}

impl Default for Server {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".to_owned(),
            port: 30000,
            auth: "open".to_owned(),
            cors_origins: Vec::new(),
            hosts: Vec::new(),
            profile_requests: 1024,
            strict_models: false,
            grace_seconds: 20,
        }
    }
}

/// `[model]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Model {
    /// A starter's name, a folder, a .gguf file, or a hub id.
    pub name: String,
    /// Worker threads; 0 = one for each core.
    pub threads: usize,
    /// Replies decoded together.
    pub max_concurrent: usize,
    /// Memory for cached keys and values, in MiB; 0 = a quarter of the machine's, or what is left of it.
    pub cache_mib: usize,
    /// Memory for adapters of profiles, in MiB; those not used for longest leave it. 0 = a sixteenth of the machine's, or
    /// what is left of it.
    pub adapter_mib: usize,
    /// Where downloaded models lie; empty = the platform's cache folder.
    pub cache_dir: String,
}

impl Default for Model {
    fn default() -> Self {
        Self {
            name: "starter".to_owned(),
            threads: 0,
            max_concurrent: 16,
            cache_mib: 0,
            adapter_mib: 0,
            cache_dir: String::new(),
        }
    }
}

/// `[data]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Data {
    /// Store, adapters, keys; empty = the platform's data folder.
    pub dir: String,
}

/// `[learning]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Learning {
    /// Train at all.
    pub on: bool,
    /// `combined`, `binary` or `opd`.
    pub method: String,
    /// Samples of one step.
    pub batch: usize,
    /// Fewest samples of a partial batch.
    pub min_batch: usize,
    /// Seconds until a partial batch goes.
    pub batch_timeout: u64,
    /// Steps a judged sample may be behind.
    pub max_staleness: u64,
    /// Largest part of a batch from one session while others wait.
    pub max_session_share: f64,
    /// What replies in groups are taught with: `grpo`, `dr-grpo`, `dapo`, `gspo`, `lite-ppo`, `rloo`, `reinforce++`, `cispo`, `sapo` or
    /// `ppo`. Sessions are taught by `method`.
    pub algorithm: String,
    /// Groups of one step.
    pub groups: usize,
    /// Most tokens of a reply in a group, for `dr-grpo` and `dapo`; 0 = not known: the longest of the batch, and no penalty for length.
    pub reply_limit: usize,
    /// Stop after this many steps of a profile; 0 = never.
    pub max_steps: u64,
    /// What is trained: `lora`, an adapter beside the base model, or `full`, all weights.
    pub weights: String,
    /// Learning rate; 0 = 2e-4 for `lora`, 1e-5 for `full`.
    pub lr: f64,
    /// Largest gradient norm.
    pub clip_norm: f64,
    /// Rank of the adapter; says nothing with `full`.
    pub lora_rank: usize,
    /// Its scale numerator.
    pub lora_alpha: f64,
    /// Subtract the running mean of rewards.
    pub baseline: bool,
    /// |teacher − student| is clipped to this.
    pub opd_clip: f64,
    /// |reward| is clipped to this.
    pub reward_clip: f64,
    /// Optimizer steps that a batch is cut into; they make one version together.
    pub minibatches: usize,
    /// Log-probs that the ratio of later ones looks back on: `recomputed` before the first, or `interpolated` without a pass of their own.
    pub proximal: String,
    /// Coefficient of a bonus for entropy in the loss.
    pub entropy: f64,
    /// Coefficient of KL to the base model in the loss; above 0 the base model reads each batch too.
    pub kl: f64,
    /// How it is estimated: `k2` or `k3`.
    pub kl_estimator: String,
    /// `exclude`: replies cut by length never train; `bad`: they score −1; `judged`: as the judges say (for controls).
    pub truncated: String,
    /// Turns of clients without rules are `main` or `side`.
    pub unknown_clients: String,
    /// Minutes until a silent session ends.
    pub session_idle: u64,
    /// Part of their rate that replies give up while training runs beside them.
    pub train_share: f64,
    /// MiB that a step may keep for the way back; what needs more is walked through in pieces. 0 = a quarter of the machine's memory, at
    /// most 4 GiB, or what is left of it.
    pub activation_mib: usize,
    /// Keep only each layer's input for the way back, and run the layer again.
    pub recompute: bool,
    /// Seed of fresh adapters.
    pub seed: u64,
    /// A candidate must pass the gate before it may serve.
    pub gate: bool,
    /// Part of the judged turns that is kept from training for the gate.
    pub held_out: f64,
    /// KL to the base model that a candidate's replies may have, nats a token.
    pub kl_budget: f64,
    /// How much a kind of probes may lose of the base model's preference, nats a token.
    pub probe_drop: f64,
    /// Live score that a version may lose before it is taken back by itself.
    pub rollback_margin: f64,
    /// Judged turns over which the live score is taken; 0 = versions are never taken back by themselves.
    pub watch_turns: usize,
    /// Profiles that are served and recorded but never learn.
    pub frozen: Vec<String>,
    /// Write each step's figures into `metrics/` of the data folder: JSON lines, and event files for TensorBoard.
    pub metrics: bool,
}

impl Default for Learning {
    fn default() -> Self {
        Self {
            on: true,
            method: "combined".to_owned(),
            batch: 16,
            min_batch: 4,
            batch_timeout: 600,
            max_staleness: 2,
            max_session_share: 0.25,
            algorithm: "grpo".to_owned(),
            groups: 8,
            reply_limit: 0,
            max_steps: 0,
            weights: "lora".to_owned(),
            lr: 0.0,
            clip_norm: 1.0,
            lora_rank: 16,
            lora_alpha: 32.0,
            baseline: true,
            opd_clip: 5.0,
            reward_clip: 5.0,
            minibatches: 1,
            proximal: "recomputed".to_owned(),
            entropy: 0.0,
            kl: 0.0,
            kl_estimator: "k3".to_owned(),
            truncated: "exclude".to_owned(),
            unknown_clients: "main".to_owned(),
            session_idle: 30,
            train_share: 0.1,
            activation_mib: 0,
            recompute: false,
            seed: 0,
            gate: true,
            held_out: 0.1,
            kl_budget: 1.0,
            probe_drop: 0.3,
            rollback_margin: 0.15,
            watch_turns: 30,
            frozen: Vec::new(),
            metrics: true,
        }
    }
}

impl Learning {
    /// All weights are trained.
    pub fn whole(&self) -> bool {
        self.weights == "full"
    }

    /// The learning rate. An adapter begins at zero and bears larger steps than weights that already say much: ten times larger by
    /// "LoRA Without Regret" (Schulman et al., 2025); twenty times here, on the careful side.
    pub fn rate(&self) -> f64 {
        match self.lr {
            0.0 if self.whole() => 1e-5,
            0.0 => 2e-4,
            given => given,
        }
    }
}

/// What judges there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JudgeKind {
    /// Regular expressions on the next message.
    Rules,
    /// The base model.
    #[serde(rename = "self")]
    Own,
    /// An OpenAI-compatible endpoint.
    Openai,
    /// A program that reads one JSON turn and prints a verdict.
    Command,
}

/// One rule of the `rules` judge.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RuleEntry {
    /// Shown in verdicts.
    pub name: String,
    /// Regular expression on the next message, case-insensitive.
    pub pattern: String,
    /// `user` (default) or `tool`.
    #[serde(default = "user")]
    pub role: String,
    /// 1, 0 or −1; none = a hint only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reward: Option<f32>,
    /// Hindsight text; `$0` is the match, `$text` the whole message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

fn user() -> String {
    "user".to_owned()
}

/// `[judge]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Judge {
    /// In order; the first with a verdict wins. Empty = explicit feedback only.
    pub kinds: Vec<JudgeKind>,
    /// Votes of a model judge; 0 = 3, or 1 for `self`.
    pub votes: usize,
    /// Most tokens of a vote; 0 = 4096, or 512 for `self`.
    pub max_tokens: usize,
    /// Seconds a vote may take.
    pub timeout: u64,
    /// Sampling temperature of votes.
    pub temperature: f64,
    /// Rules of the `rules` judge.
    pub rules: Vec<RuleEntry>,
    /// Program and arguments of the `command` judge.
    pub command: Vec<String>,
    /// Address of the `openai` judge, ending in `/v1`.
    pub openai_url: String,
    /// Its model.
    pub openai_model: String,
    /// Name of the environment variable that holds its key.
    pub openai_key_variable: String,
    /// Part of the judged turns beside which a turn with a known verdict is put before every judge; 0 = none.
    pub canary_rate: f64,
    /// Part of a judge's last verdicts on these that may be wrong before learning stops.
    pub max_judge_error: f64,
}

impl Default for Judge {
    fn default() -> Self {
        Self {
            kinds: vec![JudgeKind::Rules, JudgeKind::Own],
            votes: 0,
            max_tokens: 0,
            timeout: 120,
            temperature: 0.6,
            rules: default_rules(),
            command: Vec::new(),
            openai_url: String::new(),
            openai_model: String::new(),
            openai_key_variable: "OPENAI_API_KEY".to_owned(),
            canary_rate: 0.05,
            max_judge_error: 0.3,
        }
    }
}

/// What an ordinary user says when a reply missed or fitted; certain signs only, the rest is a model judge's.
fn default_rules() -> Vec<RuleEntry> {
    let rule = |name: &str, pattern: &str, reward: f32, hint: Option<&str>| RuleEntry {
        name: name.to_owned(),
        pattern: pattern.to_owned(),
        role: user(),
        reward: Some(reward),
        hint: hint.map(str::to_owned),
    };
    vec![
        rule(
            "style-complaint",
            // Only what complains of the last reply: "two sentences" or "in 50 words" alone may as well be a new request.
            r"\b(too (long|short|wordy|formal|technical|vague|complicated)|(shorter|briefer|simpler|longer),? please|(make|keep) it (short|brief|simpl|concise)|fewer words|tl;?dr|in a nutshell|be (more )?(brief|concise))|^\W*(just )?(one|two|three|a few) (short )?sentences?,? please",
            -1.0,
            Some("$text"),
        ),
        rule(
            "rejected",
            r"\b(that('s| is) (wrong|not (right|correct|what i (asked|meant|wanted)))|you (misunderstood|didn'?t answer)|not what i (asked|meant|wanted)|try again|redo (it|that)|no, i (meant|asked))\b",
            -1.0,
            Some("$text"),
        ),
        rule(
            "accepted",
            r"^\W*(perfect|great|thanks?|thank you|exactly|excellent|wonderful|lovely|brilliant|that'?s (it|right|perfect|great|helpful)|just what i (needed|wanted)|that (helps|works))\b",
            1.0,
            None,
        ),
    ]
}

impl Config {
    /// What types cannot say.
    pub fn validate(&self) -> Result<()> {
        let one_of = |key: &str, value: &str, legal: &[&str]| {
            if legal.contains(&value) {
                Ok(())
            } else {
                bail!("{key} = {value:?}: use one of {}", legal.join(", "))
            }
        };
        one_of("server.auth", &self.server.auth, &["open", "keys"])?;
        one_of(
            "learning.method",
            &self.learning.method,
            &["combined", "binary", "opd"],
        )?;
        one_of(
            "learning.algorithm",
            &self.learning.algorithm,
            &chela_train::Algorithm::ALL.map(chela_train::Algorithm::name),
        )?;
        one_of(
            "learning.weights",
            &self.learning.weights,
            &["lora", "full"],
        )?;
        one_of(
            "learning.proximal",
            &self.learning.proximal,
            &["recomputed", "interpolated"],
        )?;
        if self.learning.kl_estimator == "k1" {
            bail!(
                "learning.kl_estimator = \"k1\": its gradient in a loss is zero on average, so that it would pull nowhere; use k2 or k3"
            );
        }
        one_of(
            "learning.kl_estimator",
            &self.learning.kl_estimator,
            &["k2", "k3"],
        )?;
        one_of(
            "learning.truncated",
            &self.learning.truncated,
            &["exclude", "bad", "judged"],
        )?;
        one_of(
            "learning.unknown_clients",
            &self.learning.unknown_clients,
            &["main", "side"],
        )?;
        let loopback = self.server.host == "localhost"
            || self
                .server
                .host
                .parse::<IpAddr>()
                .is_ok_and(|a| a.is_loopback());
        if !loopback && self.server.auth != "keys" {
            bail!(
                "server.host = {:?} can be reached from elsewhere, so keys are needed: set server.auth = \"keys\" and make one with `chela key new`",
                self.server.host
            );
        }
        let l = &self.learning;
        let positive = [
            ("learning.batch", l.batch as f64),
            ("learning.min_batch", l.min_batch as f64),
            ("learning.groups", l.groups as f64),
            ("learning.minibatches", l.minibatches as f64),
            ("learning.lr", l.rate()),
            ("learning.lora_rank", l.lora_rank as f64),
            ("learning.lora_alpha", l.lora_alpha),
            ("learning.opd_clip", l.opd_clip),
            ("learning.reward_clip", l.reward_clip),
            ("learning.session_idle", l.session_idle as f64),
            (
                "server.profile_requests",
                self.server.profile_requests as f64,
            ),
            ("learning.kl_budget", l.kl_budget),
            ("learning.probe_drop", l.probe_drop),
            ("learning.rollback_margin", l.rollback_margin),
            ("model.max_concurrent", self.model.max_concurrent as f64),
            ("judge.timeout", self.judge.timeout as f64),
        ];
        for (key, value) in positive {
            if !(value.is_finite() && value > 0.0) {
                bail!("{key} = {value} must be positive");
            }
        }
        if l.min_batch > l.batch {
            bail!(
                "learning.min_batch = {} is above learning.batch = {}",
                l.min_batch,
                l.batch
            );
        }
        if l.minibatches > l.batch {
            bail!(
                "learning.minibatches = {} is above learning.batch = {}: each has at least one sample",
                l.minibatches,
                l.batch
            );
        }
        for (key, value) in [("learning.entropy", l.entropy), ("learning.kl", l.kl)] {
            if !(value.is_finite() && value >= 0.0) {
                bail!("{key} = {value} must be 0 (off) or positive");
            }
        }
        for (key, value) in [
            ("learning.max_session_share", l.max_session_share),
            ("learning.train_share", l.train_share),
        ] {
            if !(value > 0.0 && value <= 1.0) {
                bail!("{key} = {value} must be above 0 and at most 1");
            }
        }
        if !(0.0..=0.5).contains(&l.held_out) {
            bail!("learning.held_out = {} must be from 0 to 0.5", l.held_out);
        }
        for (key, value) in [
            ("judge.canary_rate", self.judge.canary_rate),
            ("judge.max_judge_error", self.judge.max_judge_error),
        ] {
            if !(0.0..=1.0).contains(&value) {
                bail!("{key} = {value} must be from 0 to 1");
            }
        }
        for name in &l.frozen {
            if let Err(error) = chela_core::Profile::new(name) {
                bail!("learning.frozen: {error}");
            }
        }
        if self.judge.kinds.contains(&JudgeKind::Openai)
            && (self.judge.openai_url.is_empty() || self.judge.openai_model.is_empty())
        {
            bail!("judge.kinds names openai: set judge.openai_url and judge.openai_model");
        }
        if self.judge.kinds.contains(&JudgeKind::Command) && self.judge.command.is_empty() {
            bail!("judge.kinds names command: set judge.command = [\"program\", \"argument\"]");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid_and_other_addresses_need_keys() {
        let mut config = Config::default();
        config.validate().unwrap();
        config.server.host = "0.0.0.0".to_owned();
        assert!(config.validate().unwrap_err().to_string().contains("keys"));
        config.server.auth = "keys".to_owned();
        config.validate().unwrap();
    }

    #[test]
    fn the_learning_rate_follows_what_is_trained_unless_it_is_set() {
        let mut learning = Config::default().learning;
        assert!(!learning.whole() && learning.rate() == 2e-4);
        learning.weights = "full".to_owned();
        assert!(learning.whole() && learning.rate() == 1e-5);
        learning.lr = 3e-5;
        assert!(learning.rate() == 3e-5);
    }

    #[test]
    fn wrong_values_are_named() {
        let mut config = Config::default();
        config.learning.lr = f64::NAN;
        assert!(
            config
                .validate()
                .unwrap_err()
                .to_string()
                .contains("learning.lr")
        );
        let mut config = Config::default();
        config.learning.weights = "all".to_owned();
        let says = config.validate().unwrap_err().to_string();
        assert!(says.contains("lora, full"), "{says}");
        let mut config = Config::default();
        config.learning.method = "ppo".to_owned();
        assert!(
            config
                .validate()
                .unwrap_err()
                .to_string()
                .contains("combined")
        );
        let mut config = Config::default();
        config.judge.canary_rate = f64::NAN;
        let says = config.validate().unwrap_err().to_string();
        assert!(says.contains("judge.canary_rate = NaN"), "{says}");
        let mut config = Config::default();
        config.judge.max_judge_error = 30.0;
        let says = config.validate().unwrap_err().to_string();
        assert!(says.contains("judge.max_judge_error = 30"), "{says}");
        config.learning.algorithm = "a2c".to_owned();
        let says = config.validate().unwrap_err().to_string();
        assert!(
            says.contains("learning.algorithm") && says.contains("reinforce++"),
            "{says}"
        );
        let mut config = Config::default();
        config.learning.groups = 0;
        let says = config.validate().unwrap_err().to_string();
        assert!(says.contains("learning.groups"), "{says}");
        let mut config = Config::default();
        config.judge.kinds = vec![JudgeKind::Openai];
        assert!(
            config
                .validate()
                .unwrap_err()
                .to_string()
                .contains("openai_url")
        );
    }

    #[test]
    fn what_a_loss_cannot_do_is_refused_with_the_reason() {
        let says = |set: &dyn Fn(&mut Learning)| {
            let mut config = Config::default();
            set(&mut config.learning);
            config.validate().map_err(|e| e.to_string())
        };
        let k1 = says(&|l| l.kl_estimator = "k1".to_owned()).unwrap_err();
        assert!(k1.contains("zero on average") && k1.contains("k3"), "{k1}");
        for (set, word) in [
            ((|l| l.kl = -0.1) as fn(&mut Learning), "learning.kl"),
            (|l| l.entropy = f64::INFINITY, "learning.entropy"),
            (|l| l.minibatches = 0, "learning.minibatches"),
            (|l| l.minibatches = 17, "learning.batch"),
            (|l| l.proximal = "stale".to_owned(), "interpolated"),
            (|l| l.kl_estimator = "k4".to_owned(), "k2, k3"),
        ] {
            let error = says(&set).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
        says(&|l| (l.minibatches, l.kl, l.entropy) = (4, 0.1, 0.01)).unwrap();
    }

    #[test]
    fn default_rules_know_complaint_and_thanks() {
        let sign = |text: &str| {
            default_rules().into_iter().find_map(|r| {
                let pattern = format!("(?i){}", r.pattern);
                regex_lite(&pattern, text).then_some(r.reward)
            })
        };
        assert_eq!(
            sign("That's too long, two sentences please."),
            Some(Some(-1.0))
        );
        assert_eq!(sign("Thanks! How long do eggs keep?"), Some(Some(1.0)));
        assert_eq!(sign("Could you be more concise?"), Some(Some(-1.0)));
        assert_eq!(sign("Two sentences, please."), Some(Some(-1.0)));
        for request in [
            "How long do eggs keep?",
            "Write two sentences about owls.",
            "Sum up this letter in 50 words.",
        ] {
            assert_eq!(sign(request), None, "{request}");
        }
    }

    fn regex_lite(pattern: &str, text: &str) -> bool {
        regex::Regex::new(pattern).unwrap().is_match(text)
    }
}
