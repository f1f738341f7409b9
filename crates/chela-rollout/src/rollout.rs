//! The shell that holds the parts together: store, engine, chat, judges, clock.

use crate::{
    config::RolloutConfig,
    credit,
    session::{
        follow,
        live::{LiveSessions, locked},
    },
};
use chela_chat::Chat;
use chela_core::{
    Event, Judge, Millis, PolicyEngine, Profile, Refusal, SessionId, SessionRecord, StoreError,
    TrajectoryStore, TurnId, TurnMark, TurnStory, VerdictSource, registry::Steering,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, atomic::AtomicU64},
};

/// Tells the time; the only clock there is.
pub type Clock = Arc<dyn Fn() -> Millis + Send + Sync>;

/// Follows sessions, has turns judged, answers the learning API.
pub struct Rollout {
    pub(crate) store: Arc<dyn TrajectoryStore>,
    pub(crate) engine: Arc<dyn PolicyEngine>,
    pub(crate) chat: Arc<Chat>,
    pub(crate) judges: Vec<Arc<dyn Judge>>,
    pub(crate) clock: Clock,
    pub(crate) config: RolloutConfig,
    pub(crate) live: LiveSessions,
    /// Something may be there to judge or to make a sample of.
    pub(crate) wake: tokio::sync::Notify,
    /// Judgings running now.
    pub(crate) judging: AtomicU64,
    /// By judge: failures since start, and the last reason while it keeps failing.
    pub(crate) failures: Mutex<BTreeMap<String, Failures>>,
    /// Turns to be judged although they were judged before: a remark came by feedback.
    pub(crate) again: Mutex<BTreeSet<TurnId>>,
    /// One change of versions at a time.
    pub(crate) steering: Steering,
}

/// How a judge fails.
#[derive(Clone, Debug, Default)]
pub(crate) struct Failures {
    pub count: u64,
    pub last: Option<String>,
}

impl Rollout {
    /// Judges are asked in this order; the first with a verdict wins, so rules stand before models.
    pub fn new(
        store: Arc<dyn TrajectoryStore>,
        engine: Arc<dyn PolicyEngine>,
        chat: Arc<Chat>,
        judges: Vec<Arc<dyn Judge>>,
        clock: Clock,
        config: RolloutConfig,
    ) -> Arc<Self> {
        let live = LiveSessions::new(store.clone(), config.live_sessions);
        Arc::new(Self {
            store,
            engine,
            chat,
            judges,
            clock,
            config,
            live,
            wake: tokio::sync::Notify::new(),
            judging: AtomicU64::new(0),
            failures: Mutex::default(),
            again: Mutex::default(),
            steering: Steering::default(),
        })
    }

    /// What a trainer beside it shares with operators.
    pub fn steering(&self) -> Steering {
        self.steering.clone()
    }

    pub(crate) fn now(&self) -> Millis {
        (self.clock)()
    }

    pub(crate) fn story(&self, turn: TurnId) -> Result<TurnStory, Refusal> {
        self.store.story(turn)?.ok_or_else(|| unknown_turn(turn))
    }

    pub(crate) fn note_failure(&self, judge: &str, why: &str) {
        let mut failures = locked(&self.failures);
        let entry = failures.entry(judge.to_owned()).or_default();
        entry.count += 1;
        entry.last = Some(why.to_owned());
    }

    pub(crate) fn note_success(&self, judge: &str) {
        if let Some(entry) = locked(&self.failures).get_mut(judge) {
            entry.last = None;
        }
    }

    /// What ending a session writes: turns left behind are marked, and in a trainer's session explicit rewards flow back.
    pub(crate) fn ending(
        &self,
        record: &SessionRecord,
        why: &str,
    ) -> Result<Vec<Event>, StoreError> {
        let now = self.now();
        let mut events = vec![Event::SessionEnded {
            profile: record.profile.clone(),
            session: record.id.clone(),
            at: now,
            why: why.to_owned(),
        }];
        let session = self.live.get(&record.profile, &record.id)?;
        let left = session.with_turns(follow::abandoned);
        events.extend(left.into_iter().map(|turn| Event::Mark {
            turn,
            mark: TurnMark::Abandoned,
        }));
        if record.key_hash.is_some() {
            let stories = self.store.session_stories(&record.profile, &record.id)?;
            let rewarded = |s: &TurnStory| {
                s.verdicts
                    .iter()
                    .any(|(_, v, _)| v.source == VerdictSource::Explicit)
            };
            if stories.iter().any(rewarded) {
                let flowing = credit::flowing_back(&stories, self.config.turn_discount);
                events.extend(flowing.into_iter().map(|(turn, verdict)| Event::Verdict {
                    turn,
                    id: self.store.next_verdict_id(),
                    verdict: Box::new(verdict),
                    at: now,
                }));
            }
        }
        Ok(events)
    }

    /// Ends a session.
    pub(crate) async fn end(&self, record: &SessionRecord, why: &str) -> Result<(), StoreError> {
        let events = self.ending(record, why)?;
        self.store.append(events).await?;
        self.live.remove(&record.profile, &record.id);
        self.wake.notify_one();
        Ok(())
    }

    /// A session of any profile by its id alone: the caller's own first, else the last active one.
    pub(crate) fn find_session(
        &self,
        first: Option<&Profile>,
        id: &SessionId,
    ) -> Result<SessionRecord, Refusal> {
        if let Some(profile) = first
            && let Some(record) = self.store.session(profile, id)?
        {
            return Ok(record);
        }
        let mut found: Option<SessionRecord> = None;
        for profile in self.store.profiles()? {
            if let Some(record) = self.store.session(&profile, id)?
                && found
                    .as_ref()
                    .is_none_or(|f| record.last_active > f.last_active)
            {
                found = Some(record);
            }
        }
        found.ok_or_else(|| unknown_session(id))
    }
}

/// What belongs to others is as unknown as what is not there.
pub(crate) fn unknown_turn(turn: TurnId) -> Refusal {
    Refusal::NotFound(format!("{turn} is not known here"))
}

pub(crate) fn unknown_session(id: &SessionId) -> Refusal {
    Refusal::NotFound(format!("session {id} is not known here"))
}
