//! The seams the API's edge stands on: who calls, what is recorded, what can be asked and steered.

use crate::{
    BoxFuture,
    chat::{ChatRequest, Message},
    engine::FinishReason,
    error::Refusal,
    ids::{Millis, PolicyVersion, Profile, SampleId, SessionId, TokenId, TurnId},
    judge::Group,
    registry::Undo,
    store::{
        ForgetPlan, ForgetProof, Reply, Segment, SessionRecord, StoreCounts, TurnKind, TurnStory,
        VersionRecord,
    },
};
use std::path::PathBuf;

/// What a key may do. Each includes what stands before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// Ask for replies.
    Chat,
    /// Score and read the profile's own sessions.
    Feedback,
    /// Everything.
    Admin,
}

impl Scope {
    /// The word used in the API and on disk.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Feedback => "feedback",
            Self::Admin => "admin",
        }
    }

    /// The reverse.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Chat, Self::Feedback, Self::Admin]
            .into_iter()
            .find(|s| s.as_str() == text)
    }
}

/// Who calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Whose adapter answers and learns.
    pub profile: Profile,
    /// What it may do.
    pub scope: Scope,
    /// The session its key belongs to, when it is a session key: it may chat in it and score it, nothing else.
    pub session: Option<SessionId>,
}

/// Tells who a key belongs to.
pub trait Gatekeeper: Send + Sync {
    /// `None` = no key was sent. A wrong key is refused where keys are required, else it is the default profile's.
    fn identify(&self, key: Option<&str>) -> Result<Caller, Refusal>;
}

/// Recorded tokens a prompt may begin with.
#[derive(Clone, Debug, PartialEq)]
pub struct ReusablePrefix {
    /// How many of the request's messages they cover: the parent's messages and its answer.
    pub messages: usize,
    /// The parent's prompt and reply.
    pub tokens: Vec<TokenId>,
    /// The reply ended by an end id; else the template's end of the message is still to come.
    pub ended: bool,
}

/// What is settled when a request arrives.
#[derive(Clone, Debug, PartialEq)]
pub struct Admission {
    /// One for each choice.
    pub turns: Vec<TurnId>,
    /// Whose.
    pub profile: Profile,
    /// In which session.
    pub session: SessionId,
    /// Where the session id came from.
    pub session_source: String,
    /// The turn it continues.
    pub parent: Option<TurnId>,
    /// Main or side.
    pub kind: TurnKind,
    /// Why.
    pub reason: String,
    /// Nothing is kept (`X-Turn-Type: private`).
    pub private: bool,
    /// The version that will sample.
    pub version: PolicyVersion,
    /// Tokens to begin with; with `None` the reason for a new segment.
    pub reuse: Result<ReusablePrefix, String>,
    /// When it arrived.
    pub arrived: Millis,
}

/// What is known when a reply is over.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// Index into [`Admission::turns`].
    pub choice: usize,
    /// The prompt the engine read.
    pub prompt: Vec<TokenId>,
    /// How it relates to the parent's tokens.
    pub segment: Segment,
    /// What was sampled.
    pub reply: Reply,
    /// See [`crate::store::Turn::temperature`].
    pub temperature: f32,
    /// Why it was over.
    pub finish: FinishReason,
    /// The reply as text and calls.
    pub answer: Message,
}

/// What the server needs of the rest, in two moments of a request.
pub trait Recorder: Send + Sync {
    /// Session, parent, kind, ids to reuse, profile, version. The previous turn's next state is appended now.
    fn admit<'a>(
        &'a self,
        caller: &'a Caller,
        request: &'a ChatRequest,
    ) -> BoxFuture<'a, Result<Admission, Refusal>>;
    /// Keeps the turn; durable when it returns.
    fn seal<'a>(
        &'a self,
        admission: &'a Admission,
        request: &'a ChatRequest,
        completion: Completion,
    ) -> BoxFuture<'a, Result<TurnId, Refusal>>;
}

/// What feedback speaks of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FeedbackTarget {
    /// This turn.
    Turn(TurnId),
    /// The last completed main turn of this session.
    Session(SessionId),
}

/// Explicit feedback: at least one of the three.
#[derive(Clone, Debug, PartialEq)]
pub struct Feedback {
    /// On what.
    pub target: FeedbackTarget,
    /// Any finite number.
    pub score: Option<f32>,
    /// A remark; becomes a next state.
    pub text: Option<String>,
    /// What the reply should have been; becomes a hint.
    pub edited: Option<String>,
    /// The replies that the score is compared with; needs a score.
    pub group: Option<Group>,
}

/// One turn in an export.
#[derive(Clone, Debug, PartialEq)]
pub struct ExportRow {
    /// The turn, or the last turn of a concatenated row.
    pub turn: TurnId,
    /// Prompt and reply.
    pub input_ids: Vec<TokenId>,
    /// True where sampled.
    pub loss_mask: Vec<bool>,
    /// Behavior log-probs; 0 where not sampled.
    pub logprobs: Vec<f32>,
    /// The version of each sampled token; −1 where not sampled.
    pub versions: Vec<i64>,
    /// Discounted explicit reward, else the verdict's.
    pub reward: Option<f32>,
    /// The verdicts' hints.
    pub hints: Vec<String>,
    /// At which the log-probs hold: the last turn's, or 1 when that was below 0.1 or the logits were shaped.
    pub temperature: f32,
    /// Why the last turn's reply was over.
    pub finish: FinishReason,
}

/// How an export joins turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportStyle {
    /// A row for each turn.
    Individual,
    /// A row for each segment.
    Concat,
}

/// A profile's versions.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyView {
    /// Whose.
    pub profile: Profile,
    /// What new requests get.
    pub served: u64,
    /// Why training is paused, when it is.
    pub paused: Option<String>,
    /// By number, without the base.
    pub versions: Vec<VersionRecord>,
    /// Steps that are being made again after forgetting: numbers of forgotten versions.
    pub replays: Vec<u64>,
}

/// What one sample taught.
#[derive(Clone, Debug, PartialEq)]
pub struct Lesson {
    /// Its name.
    pub sample: SampleId,
    /// The version whose step learnt it.
    pub version: u64,
    /// The turn.
    pub turn: TurnId,
    /// Its session.
    pub session: SessionId,
    /// The user's words that the reply answered.
    pub request: String,
    /// The reply.
    pub reply: String,
    /// What the verdict was.
    pub reward: Option<f32>,
    /// The hint a teacher read.
    pub hint: Option<String>,
    /// Who said so.
    pub judge: String,
    /// The words that caused the verdict.
    pub evidence: Option<String>,
    /// It came from a person or client through the API.
    pub explicit: bool,
}

/// One prompt answered by two versions.
#[derive(Clone, Debug, PartialEq)]
pub struct Answers {
    /// The user's last words in it.
    pub request: String,
    /// What the first version answers, greedily.
    pub from: String,
    /// What the second does.
    pub to: String,
}

/// What changed between two versions of a profile, in words and numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyDiff {
    /// The first.
    pub from: u64,
    /// The second.
    pub to: u64,
    /// The same prompts answered by both.
    pub answers: Vec<Answers>,
    /// Mean tokens of these answers, of the first and of the second.
    pub tokens: (f64, f64),
    /// KL(second ‖ first) in nats a token, estimated on the second's answers; `None` = it answered nothing.
    pub kl: Option<f64>,
    /// The prompts are of the profile's own turns; else a few of ours, since it has none.
    pub own_prompts: bool,
    /// Steps on the way from the first to the second; `None` when neither stands on the other.
    pub steps: Option<u64>,
    /// What lies between, oldest first.
    pub lessons: Vec<Lesson>,
}

/// What is to be forgotten, as a caller names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ForgetRequest {
    /// A turn, and what stands on it.
    Turn(TurnId),
    /// A session: the caller's own, or with the admin key that of the profile named (else of the one that was active last).
    Session(SessionId, Option<Profile>),
    /// Everything of a profile.
    Profile(Profile),
}

/// What forgetting takes away, or took.
#[derive(Clone, Debug, PartialEq)]
pub struct Forgetting {
    /// Whose.
    pub profile: Profile,
    /// What goes.
    pub plan: ForgetPlan,
    /// What happens to the profile's versions.
    pub undo: Undo,
    /// Samples that remain in the steps to be made again.
    pub samples_again: u64,
    /// How long making them again takes, from how long they took; in the background.
    pub seconds: f64,
    /// Learning is on; else steps are made again once it is.
    pub learning: bool,
    /// The proof; `None` = it was only asked what would happen.
    pub proof: Option<ForgetProof>,
}

/// What an operator can do to a profile's versions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicyAction {
    /// Serve an older version (0 = base), or the served one's parent; training goes on from there.
    Rollback(Option<u64>),
    /// Serve this version.
    Promote(u64),
    /// No more steps.
    Pause,
    /// Steps again.
    Resume,
    /// Take an adapter in PEFT's layout from this folder in as a candidate on top of what is served; the gate looks at it.
    Import(PathBuf),
}

/// How one judge fared with canaries: turns whose right verdict is known, put before it beside the real work.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CanaryFigures {
    /// Its last verdicts on canaries, at most as many as its error is taken over.
    pub verdicts: u64,
    /// Those of them that were wrong.
    pub wrong: u64,
    /// Canaries it had nothing to say about, or only void votes.
    pub abstained: u64,
    /// Canaries it failed on.
    pub failed: u64,
    /// The share that was wrong; `None` = too few verdicts to say.
    pub error: Option<f64>,
    /// The newest wrong ones, in words.
    pub examples: Vec<String>,
}

/// How one judge fared since the start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JudgeView {
    /// Its name, as configured.
    pub judge: String,
    /// Turns of users on which it gave a verdict.
    pub verdicts: u64,
    /// Votes with a readable answer.
    pub valid_votes: u64,
    /// Votes without.
    pub void_votes: u64,
    /// Verdicts that came with a hint.
    pub hinted: u64,
    /// Canaries.
    pub canaries: CanaryFigures,
}

/// How groups of replies are trained on: what a task runner has to know to keep pace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupRules {
    /// The algorithm's name.
    pub algorithm: String,
    /// Groups of one step.
    pub groups: usize,
    /// Steps a reply may be behind when it is trained on.
    pub max_staleness: u64,
    /// Most tokens of a reply, where that is set.
    pub reply_limit: Option<usize>,
}

/// How things stand.
#[derive(Clone, Debug, PartialEq)]
pub struct StatusView {
    /// The base model.
    pub model: String,
    /// Its context.
    pub context_length: usize,
    /// Learning is on.
    pub learning: bool,
    /// Why turns make no samples although learning is on, in a line each; empty when all is well.
    pub notices: Vec<String>,
    /// Figures of the store.
    pub counts: StoreCounts,
    /// Judging: running now.
    pub judging: u64,
    /// Judge errors since start, by judge.
    pub judge_errors: Vec<(String, u64)>,
    /// Each configured judge, in the order in which they are asked.
    pub judges: Vec<JudgeView>,
    /// How groups of replies are trained on; `None` = not at all.
    pub groups: Option<GroupRules>,
    /// Each profile with what it serves.
    pub profiles: Vec<PolicyView>,
}

/// What the API's learning routes ask. Scopes are checked by the caller before; ownership (profile, session) is checked here.
pub trait ControlPlane: Send + Sync {
    /// Records feedback; durable when it returns. Returns the turn and the reward now standing.
    fn feedback<'a>(
        &'a self,
        caller: &'a Caller,
        feedback: Feedback,
    ) -> BoxFuture<'a, Result<(TurnId, Option<f32>), Refusal>>;
    /// Starts a session under a key (a fresh one when `None`); a live key's session ends and the key moves on. Returns the
    /// session's id and key.
    fn start_session(
        &self,
        profile: Profile,
        task: Option<String>,
        key: Option<String>,
    ) -> BoxFuture<'_, Result<(SessionId, String), Refusal>>;
    /// AReaL's reward: on a turn, or on the session's last completed main turn.
    fn set_reward<'a>(
        &'a self,
        caller: &'a Caller,
        reward: f32,
        turn: Option<TurnId>,
    ) -> BoxFuture<'a, Result<TurnId, Refusal>>;
    /// Ends the key's session. Returns its number of turns.
    fn end_session<'a>(&'a self, caller: &'a Caller) -> BoxFuture<'a, Result<u64, Refusal>>;
    /// Ends a session that the caller may see; one that has ended stays so.
    fn end_named<'a>(
        &'a self,
        caller: &'a Caller,
        session: &'a SessionId,
    ) -> BoxFuture<'a, Result<(), Refusal>>;
    /// A session's turns for a trainer elsewhere.
    fn export(
        &self,
        session: &SessionId,
        discount: f32,
        style: ExportStyle,
    ) -> Result<Vec<ExportRow>, Refusal>;
    /// Sessions the caller may see, the last active first.
    fn sessions(&self, caller: &Caller, limit: usize) -> Result<Vec<SessionRecord>, Refusal>;
    /// One session's turns.
    fn session(
        &self,
        caller: &Caller,
        session: &SessionId,
    ) -> Result<(SessionRecord, Vec<TurnStory>), Refusal>;
    /// One turn, when the caller may see it.
    fn turn(&self, caller: &Caller, turn: TurnId) -> Result<TurnStory, Refusal>;
    /// Takes one turn back: it is never judged or trained on. Its text stays until its session is forgotten, for later turns
    /// stand on it.
    fn withdraw<'a>(
        &'a self,
        caller: &'a Caller,
        turn: TurnId,
    ) -> BoxFuture<'a, Result<(), Refusal>>;
    /// Forgets, or with `dry` only says what that would take away.
    fn forget<'a>(
        &'a self,
        caller: &'a Caller,
        what: ForgetRequest,
        dry: bool,
    ) -> BoxFuture<'a, Result<Forgetting, Refusal>>;
    /// A profile's versions.
    fn policy(&self, profile: &Profile) -> Result<PolicyView, Refusal>;
    /// What one version's step learnt.
    fn lessons(&self, profile: &Profile, version: u64) -> Result<Vec<Lesson>, Refusal>;
    /// The folder of a version's adapter, for an export.
    fn adapter(&self, profile: &Profile, version: u64) -> Result<PathBuf, Refusal>;
    /// What changed between two versions.
    fn diff(
        &self,
        profile: Profile,
        from: u64,
        to: u64,
    ) -> BoxFuture<'_, Result<PolicyDiff, Refusal>>;
    /// Steers them.
    fn steer(
        &self,
        profile: Profile,
        action: PolicyAction,
    ) -> BoxFuture<'_, Result<PolicyView, Refusal>>;
    /// How things stand: all profiles for an admin, else the caller's.
    fn status(&self, caller: &Caller) -> Result<StatusView, Refusal>;
    /// Whether turns can be accepted; the reason when not.
    fn health(&self) -> Result<(), String>;
}
