//! Recorder, control plane and gatekeeper of the tests.

use chela_core::*;
use std::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicU64, Ordering},
};
use tokio::sync::watch;

/// Keeps what it is given.
pub struct FakeRecorder {
    pub admitted: Mutex<Vec<ChatRequest>>,
    pub callers: Mutex<Vec<Caller>>,
    pub sealed: Mutex<Vec<Completion>>,
    pub refuse_admit: Mutex<Option<Refusal>>,
    pub refuse_seal: Mutex<Option<Refusal>>,
    /// Sealing waits while false.
    pub may_seal: watch::Sender<bool>,
    pub sealing: AtomicU64,
    pub version: AtomicU64,
    next: AtomicU64,
}

impl Default for FakeRecorder {
    fn default() -> Self {
        Self {
            admitted: Mutex::default(),
            callers: Mutex::default(),
            sealed: Mutex::default(),
            refuse_admit: Mutex::default(),
            refuse_seal: Mutex::default(),
            may_seal: watch::Sender::new(true),
            sealing: AtomicU64::new(0),
            version: AtomicU64::new(0),
            next: AtomicU64::new(1),
        }
    }
}

impl FakeRecorder {
    pub fn finishes(&self) -> Vec<(usize, FinishReason)> {
        self.sealed
            .lock()
            .unwrap()
            .iter()
            .map(|c| (c.choice, c.finish))
            .collect()
    }

    pub fn last_request(&self) -> ChatRequest {
        self.admitted.lock().unwrap().last().unwrap().clone()
    }
}

impl Recorder for FakeRecorder {
    fn admit<'a>(
        &'a self,
        caller: &'a Caller,
        request: &'a ChatRequest,
    ) -> BoxFuture<'a, Result<Admission, Refusal>> {
        Box::pin(async move {
            self.admitted.lock().unwrap().push(request.clone());
            self.callers.lock().unwrap().push(caller.clone());
            if let Some(refusal) = self.refuse_admit.lock().unwrap().clone() {
                return Err(refusal);
            }
            let number = self.version.load(Ordering::SeqCst);
            let first = self
                .next
                .fetch_add(request.choices as u64, Ordering::SeqCst);
            let named = request
                .hints
                .session
                .as_ref()
                .map_or("s-new", |c| c.id.as_str());
            Ok(Admission {
                turns: (0..request.choices as u64)
                    .map(|i| TurnId(first + i))
                    .collect(),
                profile: caller.profile.clone(),
                session: SessionId::new(named)?,
                session_source: "test".to_owned(),
                parent: None,
                kind: TurnKind::Main,
                reason: "test".to_owned(),
                private: request.hints.kind == Some(DeclaredKind::Private),
                version: PolicyVersion {
                    profile: caller.profile.clone(),
                    number,
                },
                reuse: Err("first turn".to_owned()),
                arrived: 1_700_000_000_123,
            })
        })
    }

    fn seal<'a>(
        &'a self,
        admission: &'a Admission,
        _request: &'a ChatRequest,
        completion: Completion,
    ) -> BoxFuture<'a, Result<TurnId, Refusal>> {
        Box::pin(async move {
            self.sealing.fetch_add(1, Ordering::SeqCst);
            self.may_seal
                .subscribe()
                .wait_for(|may| *may)
                .await
                .unwrap();
            if let Some(refusal) = self.refuse_seal.lock().unwrap().clone() {
                return Err(refusal);
            }
            let turn = admission.turns[completion.choice];
            self.sealed.lock().unwrap().push(completion);
            Ok(turn)
        })
    }
}

/// Notes what it is asked, in words; answers with the simplest thing.
#[derive(Default)]
pub struct FakeControl {
    pub calls: Mutex<Vec<String>>,
    pub refuse: Mutex<Option<Refusal>>,
    pub sick: AtomicBool,
    pub stories: Mutex<Vec<TurnStory>>,
}

impl FakeControl {
    fn note(&self, call: String) -> Result<(), Refusal> {
        self.calls.lock().unwrap().push(call);
        self.refuse.lock().unwrap().clone().map_or(Ok(()), Err)
    }

    pub fn last(&self) -> String {
        self.calls
            .lock()
            .unwrap()
            .last()
            .cloned()
            .unwrap_or_default()
    }
}

pub fn version_two() -> VersionRecord {
    VersionRecord {
        version: PolicyVersion {
            profile: Profile::default(),
            number: 2,
        },
        parent: 0,
        steps: 1,
        state: VersionState::Rejected("worse".to_owned()),
        receipt: Some(Receipt {
            weights_hash: "ab".to_owned(),
            engine_canary: vec![-1.0],
            learner_canary: vec![-1.0],
        }),
        samples: vec![SampleId(5)],
        metrics: vec![
            ("loss".to_owned(), 0.5),
            ("kl to base".to_owned(), f64::NAN),
            ("ratio.p5".to_owned(), 0.25),
            ("steps_old_8_and_more".to_owned(), 3.0),
        ],
        gate: Some(GateReport {
            checks: vec![GateCheck {
                name: "accepted".to_owned(),
                value: f64::NAN,
                limit: -0.25,
                passed: true,
                detail: "too few".to_owned(),
            }],
            seconds: 1.5,
            at: 9_500,
        }),
        created: 9_000,
        ..VersionRecord::default()
    }
}

fn record(id: &str) -> SessionRecord {
    SessionRecord {
        profile: Profile::default(),
        id: SessionId::new(id).unwrap(),
        key_hash: None,
        task: None,
        opened: 1,
        last_active: 2,
        ended: None,
        turns: 3,
    }
}

fn view(profile: &Profile) -> PolicyView {
    PolicyView {
        profile: profile.clone(),
        served: 0,
        paused: None,
        versions: vec![version_two()],
        replays: Vec::new(),
    }
}

impl ControlPlane for FakeControl {
    fn feedback<'a>(
        &'a self,
        _caller: &'a Caller,
        feedback: Feedback,
    ) -> BoxFuture<'a, Result<(TurnId, Option<f32>), Refusal>> {
        Box::pin(async move {
            self.note(format!("feedback {feedback:?}"))?;
            Ok((TurnId(7), feedback.score))
        })
    }

    fn start_session(
        &self,
        profile: Profile,
        task: Option<String>,
        key: Option<String>,
    ) -> BoxFuture<'_, Result<(SessionId, String), Refusal>> {
        Box::pin(async move {
            self.note(format!("start {profile} {task:?} {key:?}"))?;
            Ok((SessionId::new("s-1")?, "sk-1".to_owned()))
        })
    }

    fn set_reward<'a>(
        &'a self,
        _caller: &'a Caller,
        reward: f32,
        turn: Option<TurnId>,
    ) -> BoxFuture<'a, Result<TurnId, Refusal>> {
        Box::pin(async move {
            self.note(format!("reward {reward} {turn:?}"))?;
            Ok(TurnId(7))
        })
    }

    fn end_session<'a>(&'a self, _caller: &'a Caller) -> BoxFuture<'a, Result<u64, Refusal>> {
        Box::pin(async move {
            self.note("end".to_owned())?;
            Ok(4)
        })
    }

    fn export(
        &self,
        session: &SessionId,
        discount: f32,
        style: ExportStyle,
    ) -> Result<Vec<ExportRow>, Refusal> {
        self.note(format!("export {session} {discount} {style:?}"))?;
        Ok(vec![ExportRow {
            turn: TurnId(7),
            input_ids: vec![1, 2],
            loss_mask: vec![false, true],
            logprobs: vec![0.0, -0.5],
            versions: vec![-1, 3],
            reward: Some(1.0),
            hints: vec![],
            temperature: 0.5,
            finish: FinishReason::End,
        }])
    }

    fn sessions(&self, _caller: &Caller, limit: usize) -> Result<Vec<SessionRecord>, Refusal> {
        self.note(format!("sessions {limit}"))?;
        Ok(vec![record("a/b")])
    }

    fn session(
        &self,
        _caller: &Caller,
        session: &SessionId,
    ) -> Result<(SessionRecord, Vec<TurnStory>), Refusal> {
        self.note(format!("session {session}"))?;
        Ok((
            record(session.as_str()),
            self.stories.lock().unwrap().clone(),
        ))
    }

    fn turn(&self, _caller: &Caller, turn: TurnId) -> Result<TurnStory, Refusal> {
        self.note(format!("turn {turn}"))?;
        let stories = self.stories.lock().unwrap();
        let found = stories.iter().find(|s| s.turn.id == turn).cloned();
        found.ok_or_else(|| Refusal::NotFound(format!("there is no turn {turn}")))
    }

    fn end_named<'a>(
        &'a self,
        _caller: &'a Caller,
        session: &'a SessionId,
    ) -> BoxFuture<'a, Result<(), Refusal>> {
        Box::pin(async move { self.note(format!("end {session}")) })
    }

    fn withdraw<'a>(
        &'a self,
        _caller: &'a Caller,
        turn: TurnId,
    ) -> BoxFuture<'a, Result<(), Refusal>> {
        Box::pin(async move {
            self.note(format!("withdraw {turn}"))?;
            for story in self.stories.lock().unwrap().iter_mut() {
                if story.turn.id == turn {
                    story.mark = Some(TurnMark::Withdrawn);
                }
            }
            Ok(())
        })
    }

    fn forget<'a>(
        &'a self,
        _caller: &'a Caller,
        what: ForgetRequest,
        dry: bool,
    ) -> BoxFuture<'a, Result<Forgetting, Refusal>> {
        Box::pin(async move {
            self.note(format!("forget {what:?} {dry}"))?;
            Ok(Forgetting {
                profile: Profile::default(),
                plan: ForgetPlan {
                    turns: vec![TurnId(7)],
                    trained: vec![(SampleId(5), 2)],
                    ..ForgetPlan::default()
                },
                undo: registry::Undo {
                    versions: vec![2],
                    back_to: Some(0),
                    replay: vec![2],
                },
                samples_again: 15,
                learning: true,
                seconds: 12.5,
                proof: (!dry).then(ForgetProof::default),
            })
        })
    }

    fn lessons(&self, profile: &Profile, version: u64) -> Result<Vec<Lesson>, Refusal> {
        self.note(format!("lessons {profile} {version}"))?;
        Ok(vec![Lesson {
            sample: SampleId(5),
            version,
            turn: TurnId(7),
            session: SessionId::new("s")?,
            request: "be brief".to_owned(),
            reply: "ok".to_owned(),
            reward: Some(1.0),
            hint: None,
            judge: "rules:accepted".to_owned(),
            evidence: Some("thanks".to_owned()),
            explicit: false,
        }])
    }

    fn adapter(&self, profile: &Profile, version: u64) -> Result<std::path::PathBuf, Refusal> {
        self.note(format!("adapter {profile} {version}"))?;
        let folder = std::env::temp_dir().join(format!("chela-fake-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("adapter_config.json"), "{}").unwrap();
        Ok(folder)
    }

    fn diff(
        &self,
        profile: Profile,
        from: u64,
        to: u64,
    ) -> BoxFuture<'_, Result<PolicyDiff, Refusal>> {
        Box::pin(async move {
            self.note(format!("diff {profile} {from} {to}"))?;
            Ok(PolicyDiff {
                from,
                to,
                answers: vec![Answers {
                    request: "hi".to_owned(),
                    from: "long".to_owned(),
                    to: "short".to_owned(),
                }],
                tokens: (9.0, 3.0),
                kl: Some(0.25),
                own_prompts: true,
                steps: Some(1),
                lessons: self.lessons(&profile, 2)?,
            })
        })
    }

    fn policy(&self, profile: &Profile) -> Result<PolicyView, Refusal> {
        self.note(format!("policy {profile}"))?;
        Ok(view(profile))
    }

    fn steer(
        &self,
        profile: Profile,
        action: PolicyAction,
    ) -> BoxFuture<'_, Result<PolicyView, Refusal>> {
        Box::pin(async move {
            self.note(format!("steer {profile} {action:?}"))?;
            Ok(view(&profile))
        })
    }

    fn status(&self, _caller: &Caller) -> Result<StatusView, Refusal> {
        self.note("status".to_owned())?;
        Ok(StatusView {
            model: "org/base".to_owned(),
            context_length: 4096,
            learning: true,
            notices: vec!["no judge".to_owned()],
            counts: StoreCounts {
                turns: vec![(TurnKind::Side, "title".to_owned(), 2)],
                samples: vec![("pending".to_owned(), 1)],
                judged: vec![("rules:too-long".to_owned(), "bad".to_owned(), 4)],
                ..StoreCounts::default()
            },
            judging: 0,
            judge_errors: vec![],
            judges: vec![chela_core::JudgeView {
                judge: "self".to_owned(),
                verdicts: 9,
                valid_votes: 7,
                void_votes: 3,
                hinted: 2,
                canaries: chela_core::CanaryFigures {
                    verdicts: 20,
                    wrong: 5,
                    abstained: 2,
                    failed: 1,
                    error: Some(0.25),
                    examples: vec!["t001 (\"thanks\" said bad, is good)".to_owned()],
                },
            }],
            groups: Some(GroupRules {
                algorithm: "grpo".to_owned(),
                groups: 8,
                max_staleness: 2,
                reply_limit: None,
            }),
            profiles: vec![
                view(&Profile::default()),
                view(&Profile::new("secret").unwrap()),
            ],
        })
    }

    fn health(&self) -> Result<(), String> {
        match self.sick.load(Ordering::SeqCst) {
            true => Err("the disk is full".to_owned()),
            false => Ok(()),
        }
    }
}

/// Keys are named after what they may do.
#[derive(Default)]
pub struct FakeGate {
    /// Keys are needed for everything.
    pub strict: bool,
}

impl Gatekeeper for FakeGate {
    fn identify(&self, key: Option<&str>) -> Result<Caller, Refusal> {
        let caller = |scope, session| {
            Ok(Caller {
                profile: Profile::default(),
                scope,
                session,
            })
        };
        match key {
            Some("admin") => caller(Scope::Admin, None),
            Some("feedback") => caller(Scope::Feedback, None),
            Some("session") => caller(Scope::Chat, Some(SessionId::new("s-1")?)),
            Some("chat") => caller(Scope::Chat, None),
            _ if self.strict => Err(Refusal::Unauthenticated("no such key".to_owned())),
            _ => caller(Scope::Chat, None),
        }
    }
}
