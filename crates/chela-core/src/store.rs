//! The seam to what is kept: turns, what followed, verdicts, samples, versions. Durable, exactly once.

use crate::{
    BoxFuture,
    chat::{Message, Tool},
    engine::{FinishReason, Receipt},
    error::StoreError,
    ids::{Millis, PolicyVersion, Profile, SampleId, SessionId, TokenId, TurnId},
    judge::{NextState, Verdict},
};

/// Whether a turn may be trained on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TurnKind {
    /// May be trained on.
    Main,
    /// Title, heartbeat, compaction, probe: served, kept, never trained on.
    Side,
}

impl TurnKind {
    /// The word used in the API and on disk.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Main => "main",
            Self::Side => "side",
        }
    }

    /// The reverse.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Main, Self::Side]
            .into_iter()
            .find(|k| k.as_str() == text)
    }
}

/// How a turn's tokens relate to its parent's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Segment {
    /// The prompt begins with the parent's prompt and reply, id by id.
    Extends,
    /// A new segment, and why: `first turn`, `history edited`, `template changed the history`, …
    Opened(String),
}

/// The tokens of a reply with their numbers, all of one length by construction.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reply {
    tokens: Vec<TokenId>,
    behavior_logprobs: Vec<f32>,
    logprobs_t1: Vec<f32>,
    kept_mass: Vec<f32>,
    forced: Vec<bool>,
}

impl Reply {
    /// Builds it from what the sampler gave, token by token.
    pub fn push(&mut self, token: &crate::engine::SampledToken) {
        self.tokens.push(token.id);
        self.behavior_logprobs.push(token.behavior_logprob);
        self.logprobs_t1.push(token.logprob_t1);
        self.kept_mass.push(token.kept_mass);
        self.forced.push(token.forced);
    }

    /// Builds it from columns of one length.
    pub fn from_columns(
        tokens: Vec<TokenId>,
        behavior_logprobs: Vec<f32>,
        logprobs_t1: Vec<f32>,
        kept_mass: Vec<f32>,
        forced: Vec<bool>,
    ) -> Result<Self, StoreError> {
        let n = tokens.len();
        let lengths = [
            behavior_logprobs.len(),
            logprobs_t1.len(),
            kept_mass.len(),
            forced.len(),
        ];
        if lengths.iter().any(|l| *l != n) {
            return Err(StoreError::Damaged(format!(
                "reply of {n} tokens, columns {lengths:?}"
            )));
        }
        Ok(Self {
            tokens,
            behavior_logprobs,
            logprobs_t1,
            kept_mass,
            forced,
        })
    }

    /// `[N]`, the end id included.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// `[N]`
    pub fn behavior_logprobs(&self) -> &[f32] {
        &self.behavior_logprobs
    }

    /// `[N]`
    pub fn logprobs_t1(&self) -> &[f32] {
        &self.logprobs_t1
    }

    /// `[N]`
    pub fn kept_mass(&self) -> &[f32] {
        &self.kept_mass
    }

    /// `[N]`
    pub fn forced(&self) -> &[bool] {
        &self.forced
    }

    /// N
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// No token was sampled.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }
}

/// One request and its answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// Its name.
    pub id: TurnId,
    /// Whose.
    pub profile: Profile,
    /// In which session.
    pub session: SessionId,
    /// The turn whose answer this one's request continues.
    pub parent: Option<TurnId>,
    /// How its tokens relate to the parent's.
    pub segment: Segment,
    /// Main or side.
    pub kind: TurnKind,
    /// Why that kind.
    pub reason: String,
    /// The one version that sampled it.
    pub version: PolicyVersion,
    /// The whole prompt's ids (stored as the part the parent does not have).
    pub prompt: Vec<TokenId>,
    /// What was sampled.
    pub reply: Reply,
    /// The temperature at which `behavior_logprobs` hold: the turn's, or 1 when that was below 0.1 or the logits were shaped.
    pub temperature: f32,
    /// Why the reply was over.
    pub finish: FinishReason,
    /// The request's messages (stored as the part the parent does not have).
    pub messages: Vec<Message>,
    /// The request's tools.
    pub tools: Vec<Tool>,
    /// The answer as text and calls.
    pub answer: Message,
    /// When the request arrived.
    pub created: Millis,
    /// When the answer was over.
    pub completed: Millis,
}

impl Turn {
    /// A later attempt may train on it: sampled something and ended by itself.
    pub fn is_complete(&self) -> bool {
        matches!(self.finish, FinishReason::End | FinishReason::Stopped) && !self.reply.is_empty()
    }
}

/// Why a turn will never be judged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TurnMark {
    /// A retry of the same request replaced it.
    Superseded,
    /// The client went on from another branch.
    Abandoned,
    /// The client took it back.
    Withdrawn,
}

/// A stored verdict's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VerdictId(pub u64);

/// A judged turn that may be trained on.
#[derive(Clone, Debug, PartialEq)]
pub struct NewSample {
    /// The turn.
    pub turn: TurnId,
    /// The verdict it stands on.
    pub verdict: VerdictId,
    /// The score, `None` when there is only a hint.
    pub reward: Option<f32>,
    /// Explicit feedback is never dropped as stale.
    pub explicit: bool,
    /// The hint that the teacher read.
    pub hint: Option<String>,
    /// Log-probs of the reply under the hinted prompt, at temperature 1, `[N]`.
    pub teacher_logprobs: Option<Vec<f32>>,
    /// The same model, version and engine without the hint, `[N]`.
    pub student_logprobs: Option<Vec<f32>>,
    /// When it was made.
    pub created: Millis,
}

/// Where a sample stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SampleState {
    /// Waits.
    Pending,
    /// In a step that is being made; void at a restart.
    Leased,
    /// Trained on, in the step that made this version.
    Consumed(PolicyVersion),
    /// Never trained on, and why.
    Dropped(String),
}

/// What a batch is chosen by, without reading tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct PendingSample {
    /// Its name.
    pub id: SampleId,
    /// The turn.
    pub turn: TurnId,
    /// Its session.
    pub session: SessionId,
    /// The version that sampled the turn.
    pub version: PolicyVersion,
    /// Explicit feedback.
    pub explicit: bool,
    /// Hash of the reply's ids: equal replies have equal hashes.
    pub reply_hash: u64,
    /// Tokens of the reply.
    pub reply_len: usize,
    /// When it was made.
    pub created: Millis,
}

/// A sample with all that training reads.
#[derive(Clone, Debug, PartialEq)]
pub struct LeasedSample {
    /// Its name.
    pub id: SampleId,
    /// What was judged.
    pub sample: NewSample,
    /// The turn.
    pub turn: Turn,
}

/// Where a version stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VersionState {
    /// Trained, not yet served.
    Candidate,
    /// What the profile serves.
    Served,
    /// Served once; a later one took over.
    Superseded,
    /// Never served, and why.
    Rejected(String),
    /// Taken back.
    RolledBack,
}

/// One version in the registry.
#[derive(Clone, Debug, PartialEq)]
pub struct VersionRecord {
    /// Its name.
    pub version: PolicyVersion,
    /// The version its training began from.
    pub parent: u64,
    /// Optimizer steps along the parent chain since the base.
    pub steps: u64,
    /// Where it stands.
    pub state: VersionState,
    /// What the engine held when it was loaded.
    pub receipt: Option<Receipt>,
    /// Its checkpoint's folder, relative to the data folder; `None` for the base.
    pub checkpoint: Option<String>,
    /// What it was trained on in its last step.
    pub samples: Vec<SampleId>,
    /// Named figures: loss, grad_norm, kl_to_base, baseline, …
    pub metrics: Vec<(String, f64)>,
    /// When it was made.
    pub created: Millis,
}

/// A session as the registry knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionRecord {
    /// Whose.
    pub profile: Profile,
    /// Its name.
    pub id: SessionId,
    /// SHA-256 of its session key, in hex, when `/rl/start_session` made it.
    pub key_hash: Option<String>,
    /// The task a trainer named.
    pub task: Option<String>,
    /// When it began.
    pub opened: Millis,
    /// When something last happened in it.
    pub last_active: Millis,
    /// When and why it ended.
    pub ended: Option<(Millis, String)>,
    /// Number of turns.
    pub turns: u64,
}

/// What is written. One call of [`TrajectoryStore::append`] is one transaction.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A session exists (again: opening an ended session makes it live).
    SessionOpened(SessionRecord),
    /// A session is over.
    SessionEnded {
        /// Whose.
        profile: Profile,
        /// Which.
        session: SessionId,
        /// When.
        at: Millis,
        /// Why: `client`, `idle`, `refreshed`.
        why: String,
    },
    /// A sealed turn. Sealing opens the session when nothing else did.
    Turn(Box<Turn>),
    /// Messages that followed a turn; they are appended to what is there.
    NextState {
        /// After which turn.
        turn: TurnId,
        /// What followed.
        next: NextState,
        /// When.
        at: Millis,
    },
    /// The turn will not be judged.
    Mark {
        /// Which turn.
        turn: TurnId,
        /// Why.
        mark: TurnMark,
    },
    /// A verdict. It waits for [`Event::Sample`] or [`Event::NoSample`].
    Verdict {
        /// On which turn.
        turn: TurnId,
        /// Chosen by the caller from [`TrajectoryStore::next_verdict_id`].
        id: VerdictId,
        /// What was said.
        verdict: Box<Verdict>,
        /// When.
        at: Millis,
    },
    /// Judging ended without a verdict, and why. The turn is not asked about again.
    NoVerdict {
        /// On which turn.
        turn: TurnId,
        /// Why.
        why: String,
    },
    /// The verdict became a sample. A pending sample of the same turn is dropped as `replaced`.
    Sample(Box<NewSample>),
    /// The verdict makes no sample, and why. A pending sample of the same turn stays.
    NoSample {
        /// Which verdict.
        verdict: VerdictId,
        /// Why.
        why: String,
    },
    /// Pending samples that will never be trained on.
    Dropped {
        /// Which.
        samples: Vec<SampleId>,
        /// Why.
        why: String,
    },
    /// A version's state or receipt changed.
    Version {
        /// Which.
        version: PolicyVersion,
        /// The new state. `Served` makes the profile's previously served one `Superseded`.
        state: VersionState,
        /// The new receipt, `None` = as it was.
        receipt: Option<Receipt>,
    },
    /// Training of a profile stops (with the reason) or goes on.
    Paused {
        /// Whose.
        profile: Profile,
        /// `Some(reason)` = paused.
        why: Option<String>,
    },
}

/// One optimizer step: a checkpoint that is already on disk, and what it used up.
#[derive(Clone, Debug, PartialEq)]
pub struct StepCommit {
    /// The new version, a candidate.
    pub version: VersionRecord,
    /// Samples that were leased and left out of the step, with the reason.
    pub dropped: Vec<(SampleId, String)>,
}

/// All that is known of one turn.
#[derive(Clone, Debug, PartialEq)]
pub struct TurnStory {
    /// The turn.
    pub turn: Turn,
    /// What followed it.
    pub next: Option<NextState>,
    /// Marked, and why.
    pub mark: Option<TurnMark>,
    /// Judging ended without a verdict, and why.
    pub no_verdict: Option<String>,
    /// Its verdicts, oldest first, each with why it made no sample (when it made none).
    pub verdicts: Vec<(VerdictId, Verdict, Option<String>)>,
    /// Its samples, oldest first.
    pub samples: Vec<(SampleId, NewSample, SampleState)>,
}

/// A verdict that is not yet a sample.
#[derive(Clone, Debug, PartialEq)]
pub struct OpenVerdict {
    /// Its name.
    pub id: VerdictId,
    /// The turn.
    pub turn: Turn,
    /// What was said.
    pub verdict: Verdict,
}

/// Figures for status and metrics.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StoreCounts {
    /// Turns by (kind, reason).
    pub turns: Vec<(TurnKind, String, u64)>,
    /// Samples by state: `pending`, `leased`, `consumed`, `dropped:<reason>`.
    pub samples: Vec<(String, u64)>,
    /// Verdicts by source.
    pub verdicts: Vec<(String, u64)>,
    /// Turns that wait for a judge.
    pub unjudged: u64,
    /// Sessions.
    pub sessions: u64,
    /// Bytes on disk.
    pub bytes: u64,
}

/// Keeps everything. Writes are durable (synced) when their future resolves; one that fails for a reason of the disk makes the
/// store dead until restart. Reads see every write whose future has resolved. All reads are quick enough for an async caller.
pub trait TrajectoryStore: Send + Sync {
    /// One transaction, in order.
    fn append(&self, events: Vec<Event>) -> BoxFuture<'static, Result<(), StoreError>>;

    /// A turn id never given before: time-ordered, also across restarts and clocks that run backwards.
    fn next_turn_id(&self, now: Millis) -> TurnId;
    /// A verdict id never given before.
    fn next_verdict_id(&self) -> VerdictId;

    /// A turn and what became of it.
    fn story(&self, turn: TurnId) -> Result<Option<TurnStory>, StoreError>;
    /// A session's turns, oldest first.
    fn session_stories(
        &self,
        profile: &Profile,
        session: &SessionId,
    ) -> Result<Vec<TurnStory>, StoreError>;
    /// A session.
    fn session(
        &self,
        profile: &Profile,
        session: &SessionId,
    ) -> Result<Option<SessionRecord>, StoreError>;
    /// Sessions of a profile (or all), the last active first.
    fn sessions(
        &self,
        profile: Option<&Profile>,
        limit: usize,
    ) -> Result<Vec<SessionRecord>, StoreError>;
    /// The session a key belongs to, live or ended.
    fn session_by_key(&self, key_hash: &str) -> Result<Option<SessionRecord>, StoreError>;
    /// Live sessions in which nothing happened since.
    fn idle_sessions(&self, since: Millis) -> Result<Vec<SessionRecord>, StoreError>;
    /// Removes a session with its turns, verdicts and samples. Returns the number of turns removed. A session with samples in a
    /// step that is being made is refused.
    fn forget_session(
        &self,
        profile: &Profile,
        session: &SessionId,
    ) -> BoxFuture<'static, Result<u64, StoreError>>;

    /// Main turns with a next state, no mark, and neither verdict nor `NoVerdict`, oldest first.
    fn unjudged(&self, limit: usize) -> Result<Vec<TurnId>, StoreError>;
    /// Verdicts that became neither a sample nor `NoSample`, oldest first.
    fn open_verdicts(&self, limit: usize) -> Result<Vec<OpenVerdict>, StoreError>;

    /// Profiles with anything stored.
    fn profiles(&self) -> Result<Vec<Profile>, StoreError>;
    /// Pending samples of a profile, oldest first.
    fn pending(&self, profile: &Profile) -> Result<Vec<PendingSample>, StoreError>;
    /// Takes pending samples out of the queue; all or none. Leases end by [`TrajectoryStore::commit_step`],
    /// [`TrajectoryStore::release`] or a restart.
    fn lease(
        &self,
        samples: Vec<SampleId>,
    ) -> BoxFuture<'static, Result<Vec<LeasedSample>, StoreError>>;
    /// Gives leased samples back.
    fn release(&self, samples: Vec<SampleId>) -> BoxFuture<'static, Result<(), StoreError>>;
    /// Names the checkpoint and consumes the leased samples in one transaction. Refused when a sample is not leased or the
    /// version number was used before.
    fn commit_step(&self, step: StepCommit) -> BoxFuture<'static, Result<(), StoreError>>;

    /// All versions of a profile, by number; without the base, which has no record.
    fn versions(&self, profile: &Profile) -> Result<Vec<VersionRecord>, StoreError>;
    /// Why training of a profile is paused, when it is.
    fn paused(&self, profile: &Profile) -> Result<Option<String>, StoreError>;
    /// Figures, of a profile or of all.
    fn counts(&self, profile: Option<&Profile>) -> Result<StoreCounts, StoreError>;
    /// Whether writes can succeed; the reason when not.
    fn health(&self) -> Result<(), String>;
}
