//! The shell that holds the parts together: store, engine, chat, judges, clock.

use crate::{
    canaries::Canaries,
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
    TrajectoryStore, TurnId, TurnMark, TurnStory, Verdict, VerdictSource,
    registry::{Alarms, Steering},
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
    /// By judge: what it did since the start.
    pub(crate) tallies: Mutex<BTreeMap<String, Tally>>,
    /// Turns with a known verdict, and how judges fared with them.
    pub(crate) canaries: Canaries,
    /// Turns to be judged although they were judged before: a remark came by feedback.
    pub(crate) again: Mutex<BTreeSet<TurnId>>,
    /// One change of versions at a time.
    pub(crate) steering: Steering,
    /// Batches that came to nothing, as the trainer tells.
    pub(crate) alarms: Alarms,
}

/// What a judge did since the start.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub failures: u64,
    /// The last reason, while it keeps failing.
    pub failing: Option<String>,
    pub verdicts: u64,
    pub valid_votes: u64,
    pub void_votes: u64,
    pub hinted: u64,
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
        let canaries = Canaries::new(&config.canaries, config.canary_rate, config.max_judge_error);
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
            tallies: Mutex::default(),
            canaries,
            again: Mutex::default(),
            steering: Steering::default(),
            alarms: Alarms::default(),
        })
    }

    /// What a trainer beside it shares with operators.
    pub fn steering(&self) -> Steering {
        self.steering.clone()
    }

    /// Where a trainer beside it tells of batches that came to nothing.
    pub fn alarms(&self) -> Alarms {
        self.alarms.clone()
    }

    pub(crate) fn now(&self) -> Millis {
        (self.clock)()
    }

    pub(crate) fn story(&self, turn: TurnId) -> Result<TurnStory, Refusal> {
        self.store.story(turn)?.ok_or_else(|| unknown_turn(turn))
    }

    pub(crate) fn note_failure(&self, judge: &str, why: &str) {
        let mut tallies = locked(&self.tallies);
        let tally = tallies.entry(judge.to_owned()).or_default();
        tally.failures += 1;
        tally.failing = Some(why.to_owned());
    }

    pub(crate) fn note_answer(&self, judge: &str, verdict: Option<&Verdict>) {
        let mut tallies = locked(&self.tallies);
        let tally = tallies.entry(judge.to_owned()).or_default();
        tally.failing = None;
        let Some(verdict) = verdict else {
            return;
        };
        let void = verdict.votes.iter().filter(|v| v.score.is_none()).count();
        tally.verdicts += u64::from(says_something(verdict));
        tally.void_votes += void as u64;
        tally.valid_votes += (verdict.votes.len() - void) as u64;
        tally.hinted += u64::from(!verdict.hints.is_empty());
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

/// A verdict that is not only void votes.
pub(crate) fn says_something(verdict: &Verdict) -> bool {
    verdict.reward.is_some() || !verdict.hints.is_empty()
}

/// What belongs to others is as unknown as what is not there.
pub(crate) fn unknown_turn(turn: TurnId) -> Refusal {
    Refusal::NotFound(format!("{turn} is not known here"))
}

pub(crate) fn unknown_session(id: &SessionId) -> Refusal {
    Refusal::NotFound(format!("session {id} is not known here"))
}
