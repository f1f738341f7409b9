//! The seam to what is kept: turns, what followed, verdicts, samples, versions. Durable, exactly once.

use crate::{
    BoxFuture,
    chat::{Message, Tool},
    engine::{FinishReason, Receipt},
    error::StoreError,
    ids::{Millis, PolicyVersion, Profile, SampleId, SessionId, TokenId, TurnId},
    judge::{Group, NextState, Verdict},
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
    /// The replies that its reward is compared with; `None` = a turn of a session.
    pub group: Option<Group>,
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
    /// The score, `None` when there is only a hint.
    pub reward: Option<f32>,
    /// The replies that its reward is compared with; `None` = a turn of a session.
    pub group: Option<Group>,
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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum VersionState {
    /// Trained, not yet served.
    #[default]
    Candidate,
    /// What the profile serves.
    Served,
    /// A later one took over.
    Superseded,
    /// Never served, and why.
    Rejected(String),
    /// Taken back, and why.
    RolledBack(String),
    /// Its weights are deleted because something they learnt from was forgotten; what.
    Forgotten(String),
}

impl VersionState {
    /// The word used in the API, in files and on disk, and why, where there is a reason.
    pub fn words(&self) -> (&'static str, Option<&str>) {
        match self {
            Self::Candidate => ("candidate", None),
            Self::Served => ("served", None),
            Self::Superseded => ("superseded", None),
            Self::Rejected(why) => ("rejected", Some(why)),
            Self::RolledBack(why) => ("rolled_back", Some(why)),
            Self::Forgotten(why) => ("forgotten", Some(why)),
        }
    }

    /// Its weights still exist.
    pub fn is_there(&self) -> bool {
        !matches!(self, Self::Forgotten(_))
    }
}

/// Where a version came from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum VersionOrigin {
    /// An optimizer step on its parent.
    #[default]
    Trained,
    /// Files brought from elsewhere, as the operator named them.
    Imported(String),
    /// The step that once made this version of the profile, made again without what was forgotten.
    Replayed(u64),
}

/// One thing that was looked at before a version might serve.
#[derive(Clone, Debug, PartialEq)]
pub struct GateCheck {
    /// `accepted`, `rejected`, `kl_to_base`, `refusal`, `sycophancy`, `format`, `length`, `repetition`, …
    pub name: String,
    /// What was measured; NaN = nothing could be.
    pub value: f64,
    /// What it was held against.
    pub limit: f64,
    /// Within the limit, or nothing could be measured.
    pub passed: bool,
    /// In words: units, how many were looked at, what fell out worst.
    pub detail: String,
}

/// All that was looked at before a version might serve.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GateReport {
    /// In the order in which they were made.
    pub checks: Vec<GateCheck>,
    /// How long it took.
    pub seconds: f64,
    /// When it was over.
    pub at: Millis,
}

impl GateReport {
    /// Every check passed.
    pub fn passed(&self) -> bool {
        self.checks.iter().all(|c| c.passed)
    }
}

/// The judge named in a verdict on a turn whose tool result is an error.
pub const TOOL_ERROR: &str = "validator:tool-error";

/// Why a pending sample is kept from training: the gate compares versions on it. The word stands in [`SampleState::Dropped`].
pub const HELD_OUT: &str = "held out for the gate";

/// One version in the registry.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VersionRecord {
    /// Its name.
    pub version: PolicyVersion,
    /// The version its training began from.
    pub parent: u64,
    /// Optimizer steps along the parent chain since the base.
    pub steps: u64,
    /// Where it stands.
    pub state: VersionState,
    /// Where it came from.
    pub origin: VersionOrigin,
    /// What the engine held when it was loaded.
    pub receipt: Option<Receipt>,
    /// What the gate found.
    pub gate: Option<GateReport>,
    /// Its checkpoint's folder, relative to the data folder; `None` for the base.
    pub checkpoint: Option<String>,
    /// What it was trained on in its last step, in the order of the batch. What is forgotten is no longer named.
    pub samples: Vec<SampleId>,
    /// How the step was made, in the trainer's own notation: enough to make it again.
    pub recipe: Option<String>,
    /// Named figures: loss, grad_norm, kl_to_base, baseline, …
    pub metrics: Vec<(String, f64)>,
    /// When it was made.
    pub created: Millis,
    /// When it was served (last).
    pub served_at: Option<Millis>,
    /// When it was served no longer (last).
    pub left_at: Option<Millis>,
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
        /// When. Becomes `served_at` of the version that is now served and `left_at` of one that was served until now.
        at: Millis,
    },
    /// What the gate found about a version.
    Gate {
        /// Which.
        version: PolicyVersion,
        /// All checks.
        report: GateReport,
    },
    /// What a version's step consumed is dropped with this reason: the version was rejected.
    Unlearnt {
        /// Whose samples.
        version: PolicyVersion,
        /// Why.
        why: String,
    },
    /// A step that was to be made again cannot be (nothing of its batch is left): the next one follows on the version before.
    ReplaySkipped {
        /// Which step: the number of the forgotten version.
        version: PolicyVersion,
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

/// What is to be forgotten.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ForgetTarget {
    /// A turn of a profile, its siblings with the same prompt (retries, regenerations), and all turns that stand on any of them:
    /// they hold its words. What followed the turn before, and what was made of that, goes too.
    Turn(Profile, TurnId),
    /// A session with all its turns.
    Session(Profile, SessionId),
    /// All sessions and versions of a profile. Only its name and its last version number stay, so that no number is given twice.
    Profile(Profile),
}

impl ForgetTarget {
    /// Whose.
    pub fn profile(&self) -> &Profile {
        match self {
            Self::Turn(profile, _) | Self::Session(profile, _) | Self::Profile(profile) => profile,
        }
    }
}

/// What forgetting would remove.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ForgetPlan {
    /// Turns that go, oldest first.
    pub turns: Vec<TurnId>,
    /// Turns that stay but lose what followed them, with the verdicts and samples made of it (explicit ones stay).
    pub unjudged: Vec<TurnId>,
    /// Sessions that go whole.
    pub sessions: u64,
    /// Verdicts that go.
    pub verdicts: u64,
    /// Samples that go.
    pub samples: u64,
    /// Those of them that were trained on, with the number of the version whose step did (rejected ones too).
    pub trained: Vec<(SampleId, u64)>,
}

/// The change that forgetting makes; see [`crate::registry::undo`] for the last three.
#[derive(Clone, Debug, PartialEq)]
pub struct Forget {
    /// What goes.
    pub target: ForgetTarget,
    /// Why, as the versions' state will say.
    pub why: String,
    /// Versions whose weights learnt from it, or stand on such: they become [`VersionState::Forgotten`], their checkpoints are
    /// named no longer. All that the plan's `trained` names must be among them.
    pub versions: Vec<u64>,
    /// The version that is served from now on (0 = the base), when the served one is among `versions`.
    pub back_to: Option<u64>,
    /// Which of `versions` are to be made again without what is forgotten, in this order, on `back_to`.
    pub replay: Vec<u64>,
    /// When.
    pub at: Millis,
}

/// What was found when it was looked for after forgetting.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ForgetProof {
    /// What was removed.
    pub plan: ForgetPlan,
    /// Pieces of the removed texts and token sequences that were looked for; such as others still hold are not.
    pub pieces: u64,
    /// Files looked through, and their bytes in all.
    pub files: Vec<String>,
    /// Bytes looked through.
    pub bytes: u64,
    /// Files in which a piece was still found: nothing, or the proof failed.
    pub found: Vec<String>,
}

/// How replies fared lately, as the gate's watch needs it.
#[derive(Clone, Debug, PartialEq)]
pub struct LiveTurn {
    /// The turn.
    pub turn: TurnId,
    /// When its reply was complete.
    pub at: Millis,
    /// The version that sampled it.
    pub version: u64,
    /// The last verdict's reward, clipped to −1..1; `None` = not judged.
    pub reward: Option<f32>,
    /// Tokens of the reply.
    pub reply_len: usize,
    /// A tool result followed: whether the validator found an error in it.
    pub tool_error: Option<bool>,
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
    /// Verdicts by who gave them and what they say: `good` (above 0), `neutral` (0), `bad` (below 0), `none` (no reward).
    pub judged: Vec<(String, String, u64)>,
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
    /// What forgetting would remove. `NotFound` for what is not there (or not that profile's).
    fn plan_forget(&self, target: &ForgetTarget) -> Result<ForgetPlan, StoreError>;
    /// Removes it, in one transaction, and then looks for it in every file of the store. Resolves when it is gone from the log as
    /// well, or cannot be had out of it in time. Refused when samples of it are in a step that is being made, and when `versions`
    /// does not hold all versions that learnt from it (something was trained since the plan: ask again).
    fn forget(&self, forget: Forget) -> BoxFuture<'static, Result<ForgetProof, StoreError>>;

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
    /// version number was used before. Samples of a version whose origin is `Replayed` need no lease: they were consumed by the
    /// step that is made again, and now count as the new version's.
    fn commit_step(&self, step: StepCommit) -> BoxFuture<'static, Result<(), StoreError>>;

    /// All versions of a profile, by number; without the base, which has no record.
    fn versions(&self, profile: &Profile) -> Result<Vec<VersionRecord>, StoreError>;
    /// The last version number given to a profile, forgotten ones included; 0 = none.
    fn last_version(&self, profile: &Profile) -> Result<u64, StoreError>;
    /// Steps that are to be made again, in order: numbers of forgotten versions. [`TrajectoryStore::commit_step`] of a version
    /// whose origin is `Replayed(n)` strikes n off.
    fn replays(&self, profile: &Profile) -> Result<Vec<u64>, StoreError>;
    /// Samples a step consumed, or held out ones, with all that training reads, in the order asked for. A sample that is gone is
    /// left out.
    fn samples(&self, ids: &[SampleId]) -> Result<Vec<LeasedSample>, StoreError>;
    /// The profile's newest samples that are [`HELD_OUT`], newest first; and how many there are.
    fn held_out(
        &self,
        profile: &Profile,
        limit: usize,
    ) -> Result<(Vec<LeasedSample>, u64), StoreError>;
    /// The profile's newest main turns that are judged or followed by a tool result, newest first.
    fn live_turns(&self, profile: &Profile, limit: usize) -> Result<Vec<LiveTurn>, StoreError>;
    /// Profiles with pending samples, a candidate, or steps to be made again: those a trainer has to look at.
    fn profiles_to_train(&self) -> Result<Vec<Profile>, StoreError>;
    /// Why training of a profile is paused, when it is.
    fn paused(&self, profile: &Profile) -> Result<Option<String>, StoreError>;
    /// Figures, of a profile or of all.
    fn counts(&self, profile: Option<&Profile>) -> Result<StoreCounts, StoreError>;
    /// Whether writes can succeed; the reason when not.
    fn health(&self) -> Result<(), String>;
}
