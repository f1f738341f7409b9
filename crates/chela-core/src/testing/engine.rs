//! A [`PolicyEngine`] without a model: replies by script, log-probs by [`FakeModel`] or by a closure.

use super::{
    futures::ready,
    learner::read_parameters,
    model::{FAKE_VOCABULARY, FakeModel, hash},
    sampling::{Running, Stage},
};
use crate::*;
use std::{
    collections::{HashMap, VecDeque},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll, Waker},
};

/// Log-prob of a token after a prefix under a policy; replaces the built-in model. `PolicyRef::Served` is resolved before.
pub type ScoreFn = dyn Fn(&PolicyRef, &[TokenId], TokenId) -> f32 + Send + Sync;

type ReplyFn = dyn FnMut(&PolicyRef, &Prompt) -> FakeReply + Send;

/// One scripted reply.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FakeReply {
    /// What is sampled, in order; limits, end ids and guides still stop it, and what a guide forbids fails. When it runs out, the request's first end id is
    /// sampled (nothing, when there is none).
    pub tokens: Vec<TokenId>,
    /// Fails with this after the tokens, instead of ending.
    pub error: Option<EngineError>,
}

impl From<Vec<TokenId>> for FakeReply {
    fn from(tokens: Vec<TokenId>) -> Self {
        Self {
            tokens,
            error: None,
        }
    }
}

/// What a request asked for, without its guide.
#[derive(Clone, Debug, PartialEq)]
pub struct FakeRequest {
    /// As it was asked.
    pub policy: PolicyRef,
    /// The version that answered.
    pub version: PolicyVersion,
    /// The prompt's ids.
    pub prompt: Vec<TokenId>,
    /// The temperature.
    pub temperature: f32,
    /// The limit of tokens.
    pub max_tokens: usize,
    /// The ids that end it.
    pub end_ids: Vec<TokenId>,
    /// The seed.
    pub seed: u64,
    /// Who is served first.
    pub priority: Priority,
    /// It came with a guide.
    pub guided: bool,
}

struct State {
    queue: VecDeque<FakeReply>,
    answer: Box<ReplyFn>,
    score: Option<Arc<ScoreFn>>,
    loaded: HashMap<PolicyVersion, Arc<FakeModel>>,
    homes: HashMap<PolicyVersion, (PathBuf, Option<String>)>,
    forgotten: Vec<Profile>,
    served: HashMap<Profile, u64>,
    failure: Option<EngineError>,
    health: Result<(), String>,
    requests: Vec<FakeRequest>,
    yields: usize,
    held: bool,
    waiting: Vec<Waker>,
    running: usize,
    cancelled: usize,
    cached_tokens: usize,
}

/// Cheap to clone; clones are the same engine.
#[derive(Clone)]
pub struct FakeEngine {
    info: EngineInfo,
    state: Arc<Mutex<State>>,
}

impl Default for FakeEngine {
    fn default() -> Self {
        Self::with_info(EngineInfo {
            model: "fake".to_owned(),
            context_length: 4096,
            vocabulary: FAKE_VOCABULARY,
            tokenizer_hash: "fake".to_owned(),
        })
    }
}

impl FakeEngine {
    /// An engine that answers everything with an empty script, hence with the end id at once.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same with other properties.
    pub fn with_info(info: EngineInfo) -> Self {
        let state = State {
            queue: VecDeque::new(),
            answer: Box::new(|_, _| FakeReply::default()),
            score: None,
            loaded: HashMap::new(),
            homes: HashMap::new(),
            forgotten: Vec::new(),
            served: HashMap::new(),
            failure: None,
            health: Ok(()),
            requests: Vec::new(),
            yields: 0,
            held: false,
            waiting: Vec::new(),
            running: 0,
            cancelled: 0,
            cached_tokens: 0,
        };
        Self {
            info,
            state: Arc::new(Mutex::new(state)),
        }
    }

    /// The next request without a reply of its own gets this one; called again, replies queue up.
    pub fn push_reply(&self, reply: impl Into<FakeReply>) {
        self.lock().queue.push_back(reply.into());
    }

    /// Answers by a closure when the queue is empty.
    pub fn answer_with(
        &self,
        answer: impl FnMut(&PolicyRef, &Prompt) -> FakeReply + Send + 'static,
    ) {
        self.lock().answer = Box::new(answer);
    }

    /// Log-probs by a closure instead of the built-in model; temperature and distribution are then the closure's affair.
    pub fn score_with(
        &self,
        score: impl Fn(&PolicyRef, &[TokenId], TokenId) -> f32 + Send + Sync + 'static,
    ) {
        self.lock().score = Some(Arc::new(score));
    }

    /// Every call that can fail fails with this; `None` = as before.
    pub fn fail_with(&self, error: Option<EngineError>) {
        self.lock().failure = error;
    }

    /// What [`PolicyEngine::health`] says.
    pub fn set_health(&self, health: Result<(), String>) {
        self.lock().health = health;
    }

    /// Each event of a stream is `Pending` this many times before it is ready: other tasks run in between.
    pub fn set_yields(&self, yields: usize) {
        self.lock().yields = yields;
    }

    /// Streams give no event until [`FakeEngine::go_on`].
    pub fn hold(&self) {
        self.lock().held = true;
    }

    /// Ends [`FakeEngine::hold`].
    pub fn go_on(&self) {
        let mut state = self.lock();
        state.held = false;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// What [`SamplingEvent::Started`] reports as cached.
    pub fn set_cached_tokens(&self, tokens: usize) {
        self.lock().cached_tokens = tokens;
    }

    /// Makes a version resident without files.
    pub fn insert(&self, version: PolicyVersion, model: FakeModel) {
        self.lock().loaded.insert(version, Arc::new(model));
    }

    /// Requests for replies so far.
    pub fn requests(&self) -> Vec<FakeRequest> {
        self.lock().requests.clone()
    }

    /// Streams neither finished nor dropped.
    pub fn running(&self) -> usize {
        self.lock().running
    }

    /// Streams dropped before they were finished.
    pub fn cancelled(&self) -> usize {
        self.lock().cancelled
    }

    /// Profiles whose texts were to be forgotten, in order.
    pub fn forgotten(&self) -> Vec<Profile> {
        self.lock().forgotten.clone()
    }

    /// Resident versions, sorted.
    pub fn resident(&self) -> Vec<PolicyVersion> {
        let mut all: Vec<_> = self.lock().loaded.keys().cloned().collect();
        all.sort();
        all
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state
            .lock()
            .expect("a test panicked inside the engine")
    }

    /// Whether a stream may give its next event now.
    pub(super) fn poll_turn(&self, cx: &mut Context<'_>, yields_left: &mut usize) -> Poll<()> {
        let mut state = self.lock();
        if state.held {
            state.waiting.push(cx.waker().clone());
            return Poll::Pending;
        }
        if *yields_left > 0 {
            *yields_left -= 1;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        *yields_left = state.yields;
        Poll::Ready(())
    }

    pub(super) fn stream_over(&self, finished: bool) {
        // Also while a test panics.
        if let Ok(mut state) = self.state.lock() {
            state.running -= 1;
            state.cancelled += usize::from(!finished);
        }
    }

    fn resolve(&self, policy: &PolicyRef) -> Result<Resolved, EngineError> {
        let state = self.lock();
        if let Some(error) = &state.failure {
            return Err(error.clone());
        }
        let version = match policy {
            PolicyRef::Base => PolicyVersion::base(Profile::default()),
            PolicyRef::Version(version) => version.clone(),
            PolicyRef::Served(profile) => {
                let number = state.served.get(profile).copied().unwrap_or(0);
                PolicyVersion {
                    profile: profile.clone(),
                    number,
                }
            }
        };
        let score = state.score.clone();
        if version.number == 0 {
            let model = Arc::new(FakeModel::base(self.info.vocabulary));
            return Ok(Resolved {
                policy: PolicyRef::Base,
                version,
                model,
                score,
            });
        }
        let mut model = state.loaded.get(&version).cloned();
        if model.is_none()
            && let Some((dir, hash)) = state.homes.get(&version).cloned()
        {
            drop(state);
            let read = load(&dir, self.info.vocabulary)?;
            if hash.is_some_and(|h| h != read.hash()) {
                return Err(EngineError::Weights(format!(
                    "{} is not what was published",
                    dir.display()
                )));
            }
            let read = Arc::new(read);
            self.lock().loaded.insert(version.clone(), read.clone());
            model = Some(read);
        }
        let Some(model) = model else {
            return Err(EngineError::NotLoaded(version));
        };
        Ok(Resolved {
            policy: PolicyRef::Version(version.clone()),
            version,
            model,
            score,
        })
    }

    fn check(&self, prompt: &Prompt) -> Result<(), EngineError> {
        let (n, context) = (prompt.tokens.len(), self.info.context_length);
        if n == 0 {
            return Err(EngineError::Shape("an empty prompt".to_owned()));
        }
        if n > context {
            return Err(EngineError::ContextLength { prompt: n, context });
        }
        FakeModel::base(self.info.vocabulary).check(&prompt.tokens)
    }

    fn score_now(
        &self,
        policy: &PolicyRef,
        tokens: &[TokenId],
        from: usize,
        want: &Want,
    ) -> Result<Scored, EngineError> {
        let resolved = self.resolve(policy)?;
        self.check(&Prompt {
            tokens: tokens.to_vec(),
        })?;
        if from == 0 || from > tokens.len() {
            return Err(EngineError::Shape(format!(
                "from {from} of {} tokens",
                tokens.len()
            )));
        }
        let n = tokens.len() - from;
        if let Some(c) = &want.candidates
            && c.rows() != n
        {
            return Err(EngineError::Shape(format!(
                "{} rows for {n} positions",
                c.rows()
            )));
        }
        let mut scored = Scored {
            entropy: want.entropy.then(Vec::new),
            top: (want.top_k > 0).then(|| (Vec::new(), Vec::new())),
            ..Scored::default()
        };
        for (row, at) in (from..tokens.len()).enumerate() {
            let one = [tokens[at]];
            let wanted = match &want.candidates {
                Some(c) => &c.ids()[row * c.k()..(row + 1) * c.k()],
                None => &one,
            };
            let prefix = &tokens[..at];
            let each = wanted
                .iter()
                .map(|t| resolved.logprob(prefix, *t, want.temperature));
            scored.logprobs.extend(each);
            let position = resolved.model.position(hash(prefix), want.temperature);
            if let Some(entropy) = &mut scored.entropy {
                entropy.push(position.entropy());
            }
            if let Some((ids, logprobs)) = &mut scored.top {
                let top = resolved.top(prefix, want.top_k, want.temperature);
                ids.extend(top.iter().map(|t| t.0));
                logprobs.extend(top.iter().map(|t| t.1));
            }
        }
        Ok(scored)
    }
}

pub(super) struct Resolved {
    pub policy: PolicyRef,
    pub version: PolicyVersion,
    pub model: Arc<FakeModel>,
    pub score: Option<Arc<ScoreFn>>,
}

impl Resolved {
    fn logprob(&self, prefix: &[TokenId], token: TokenId, temperature: f32) -> f32 {
        match &self.score {
            Some(score) => score(&self.policy, prefix, token),
            None => self.model.logprob(prefix, token, temperature),
        }
    }

    pub fn top(&self, prefix: &[TokenId], k: usize, temperature: f32) -> Vec<(TokenId, f32)> {
        let Some(score) = &self.score else {
            return self
                .model
                .top(&self.model.position(hash(prefix), temperature), k);
        };
        let ids = 0..self.model.vocabulary as TokenId;
        let mut all: Vec<_> = ids.map(|t| (t, score(&self.policy, prefix, t))).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        all.truncate(k);
        all
    }
}

impl PolicyEngine for FakeEngine {
    fn info(&self) -> EngineInfo {
        self.info.clone()
    }

    fn served(&self, profile: &Profile) -> PolicyVersion {
        let number = self.lock().served.get(profile).copied().unwrap_or(0);
        PolicyVersion {
            profile: profile.clone(),
            number,
        }
    }

    fn sample(
        &self,
        policy: PolicyRef,
        prompt: Prompt,
        params: SamplingParams,
    ) -> Result<Sampling, EngineError> {
        let resolved = self.resolve(&policy)?;
        self.check(&prompt)?;
        let (n, context) = (prompt.tokens.len(), self.info.context_length);
        if n >= context {
            return Err(EngineError::ContextLength { prompt: n, context });
        }
        let mut state = self.lock();
        let reply = match state.queue.pop_front() {
            Some(reply) => reply,
            None => (state.answer)(&resolved.policy, &prompt),
        };
        resolved.model.check(&reply.tokens)?;
        state.running += 1;
        state.requests.push(FakeRequest {
            policy,
            version: resolved.version.clone(),
            prompt: prompt.tokens.clone(),
            temperature: params.temperature,
            max_tokens: params.max_tokens,
            end_ids: params.end_ids.clone(),
            seed: params.seed,
            priority: params.priority,
            guided: params.guide.is_some(),
        });
        let stream = Running {
            engine: self.clone(),
            cached_tokens: state.cached_tokens.min(n),
            yields_left: state.yields,
            resolved,
            hash: hash(&prompt.tokens),
            prefix: prompt.tokens,
            left: reply.tokens.into(),
            error: reply.error,
            room: params.max_tokens.max(1).min(context - n),
            params,
            stage: Stage::New,
        };
        Ok(Box::pin(stream))
    }

    fn score(
        &self,
        policy: PolicyRef,
        prompt: Prompt,
        from: usize,
        want: Want,
    ) -> BoxFuture<'static, Result<Scored, EngineError>> {
        ready(self.score_now(&policy, &prompt.tokens, from, &want))
    }

    fn load(
        &self,
        version: PolicyVersion,
        weights: Weights,
    ) -> BoxFuture<'static, Result<String, EngineError>> {
        if let Some(error) = self.lock().failure.clone() {
            return ready(Err(error));
        }
        if version.number == 0 {
            return ready(Err(EngineError::Weights(
                "number 0 is the base model".to_owned(),
            )));
        }
        let Weights::Folder(dir) = weights;
        ready(load(&dir, self.info.vocabulary).map(|model| {
            let hash = model.hash();
            self.lock().homes.insert(version.clone(), (dir, None));
            self.insert(version, model);
            hash
        }))
    }

    fn register(&self, version: PolicyVersion, weights: Weights, hash: Option<String>) {
        let Weights::Folder(dir) = weights;
        self.lock().homes.insert(version, (dir, hash));
    }

    fn serve(&self, version: &PolicyVersion) -> Result<(), EngineError> {
        self.resolve(&PolicyRef::Version(version.clone()))?;
        self.lock()
            .served
            .insert(version.profile.clone(), version.number);
        Ok(())
    }

    fn unload(&self, version: &PolicyVersion) {
        let mut state = self.lock();
        if state.served.get(&version.profile) != Some(&version.number) {
            state.loaded.remove(version);
            state.homes.remove(version);
        }
    }

    fn forget_texts(&self, profile: &Profile) {
        self.lock().forgotten.push(profile.clone());
    }

    fn health(&self) -> Result<(), String> {
        self.lock().health.clone()
    }

    fn memory_parts(&self) -> Vec<(&'static str, u64)> {
        vec![("base", 5000), ("cache", 300)]
    }
}

fn load(dir: &Path, vocabulary: usize) -> Result<FakeModel, EngineError> {
    Ok(FakeModel {
        vocabulary,
        parameters: read_parameters(dir)?,
    })
}
