//! What can be set; the defaults of the documentation stand here.

use crate::{labelled::Labelled, session::kind::UnknownClients};
use chela_core::{GroupRules, Profile};
use serde::Deserialize;
use std::{path::PathBuf, time::Duration};

/// What happens to replies that were cut by length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TruncatedReplies {
    /// They never train.
    #[default]
    Exclude,
    /// They score −1.
    Bad,
    /// They are judged and trained on like any other: for controls whose verdicts mean nothing.
    Judged,
}

/// How sessions are followed and turns judged.
#[derive(Clone, Debug, PartialEq)]
pub struct RolloutConfig {
    /// The data folder: checkpoints of versions lie below it.
    pub data_dir: PathBuf,
    /// Judge turns and make samples. Off: turns are only recorded.
    pub learning: bool,
    /// Profiles whose turns are recorded and never judged. Default: none.
    pub frozen: Vec<Profile>,
    /// Turns judged, and verdicts made into samples, at the same time. Default 4.
    pub max_concurrent: usize,
    /// Turns that may wait for a judge; the oldest beyond are given up with that reason. Default 10,000.
    pub max_backlog: usize,
    /// How long one call of one judge may take; two retries follow. Default 6 minutes: a model judge makes two rounds of votes.
    pub judge_timeout: Duration,
    /// First pause after a judge failed; doubled each time, up to ten minutes. Default 15 s.
    pub judge_backoff: Duration,
    /// Turns whose verdict is known, which are put before the judges now and then. Default: none.
    pub canaries: Vec<Labelled>,
    /// Part of the judged turns beside which one of them is. Default 0.05.
    pub canary_rate: f64,
    /// The part of a judge's verdicts on canaries that may be wrong before learning stops. Default 0.3.
    pub max_judge_error: f64,
    /// Hints kept of one verdict. Default 3.
    pub max_hints: usize,
    /// Replies cut by length. Default: they never train.
    pub truncated: TruncatedReplies,
    /// Turns without any sign of their kind. Default: main.
    pub unknown_clients: UnknownClients,
    /// A session in which nothing happens for so long ends. Default 30 minutes.
    pub session_idle: Duration,
    /// How often idle sessions and failed judges are looked after. Default 5 s.
    pub tick: Duration,
    /// A verdict of 0 makes a sample: right when training subtracts a baseline. Default false.
    pub keep_neutral: bool,
    /// Turns with a smaller mean of kept probability mass never train. Default 0.8.
    pub min_kept_mass: f32,
    /// γ: how much of a later explicit reward reaches the turns before it, when an RL session ends. Default 1.
    pub turn_discount: f32,
    /// How groups of replies are trained on, for the status. Default: not at all.
    pub groups: Option<GroupRules>,
    /// Sessions held in memory. Default 1024.
    pub live_sessions: usize,
    /// Sessions of a profile that a request without any session id is compared with. Default 64.
    pub recent_sessions: usize,
}

impl RolloutConfig {
    /// The defaults.
    pub fn new(data_dir: impl Into<PathBuf>) -> Self {
        Self {
            data_dir: data_dir.into(),
            learning: true,
            frozen: Vec::new(),
            max_concurrent: 4,
            max_backlog: 10_000,
            judge_timeout: Duration::from_secs(360),
            judge_backoff: Duration::from_secs(15),
            canaries: Vec::new(),
            canary_rate: 0.05,
            max_judge_error: 0.3,
            max_hints: 3,
            truncated: TruncatedReplies::default(),
            unknown_clients: UnknownClients::default(),
            session_idle: Duration::from_secs(30 * 60),
            tick: Duration::from_secs(5),
            keep_neutral: false,
            min_kept_mass: 0.8,
            turn_discount: 1.0,
            groups: None,
            live_sessions: 1024,
            recent_sessions: 64,
        }
    }
}
