//! The sessions in which something happened lately, in memory: filled from the store when asked for, bounded.

use crate::session::follow::Known;
use chela_core::{BoxFuture, Profile, SessionId, StoreError, TokenId, TrajectoryStore, TurnId};
use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// Most turns of one session that can still be recognised as a parent.
const TURNS: usize = 4096;

/// A panic elsewhere must not take the tracker down: its data are rebuilt from the store at need.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One session.
#[derive(Default)]
pub struct LiveSession {
    /// Held while a request is admitted or sealed, so that what is read is still true when it is written.
    pub gate: tokio::sync::Mutex<()>,
    /// It belongs to a session key, as it did when it was opened.
    keyed: bool,
    /// It is over, as far as the store says.
    ended: AtomicBool,
    /// What follows its turns and is on its way to the disk.
    writes: Mutex<Vec<Write>>,
    state: Mutex<State>,
}

/// A write that was asked for.
type Write = BoxFuture<'static, Result<(), StoreError>>;

#[derive(Default)]
struct State {
    turns: Vec<Known>,
    /// Prompt and reply of the turn sealed last: what its continuation begins with.
    last_tokens: Option<(TurnId, Arc<Vec<TokenId>>)>,
}

impl LiveSession {
    /// A copy of what is known of its turns.
    pub fn with_turns<T>(&self, read: impl FnOnce(&[Known]) -> T) -> T {
        read(&locked(&self.state).turns)
    }

    /// Belongs to a session key.
    pub fn keyed(&self) -> bool {
        self.keyed
    }

    /// Is over; who holds a session that was let go of asks the store.
    pub fn ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// It goes on.
    pub fn reopened(&self) {
        self.ended.store(false, Ordering::Release);
    }

    /// Notes a write that is under way.
    pub fn follows(&self, write: Write) {
        locked(&self.writes).push(write);
    }

    /// Writes that nobody waited for yet.
    pub fn pending(&self) -> Vec<Write> {
        std::mem::take(&mut *locked(&self.writes))
    }

    /// Adds a sealed turn and marks those it replaces.
    pub fn add(&self, turn: Known, tokens: Vec<TokenId>, superseded: &[TurnId]) {
        let mut state = locked(&self.state);
        state
            .turns
            .iter_mut()
            .filter(|t| superseded.contains(&t.id))
            .for_each(|t| t.marked = true);
        state.last_tokens = Some((turn.id, Arc::new(tokens)));
        state.turns.push(turn);
        if state.turns.len() > TURNS {
            state.turns.remove(0);
        }
    }

    /// Notes what followed a turn.
    pub fn followed(&self, turn: TurnId, next: impl Iterator<Item = crate::session::normal::Key>) {
        let mut state = locked(&self.state);
        if let Some(turn) = state.turns.iter_mut().find(|t| t.id == turn) {
            turn.next.extend(next);
        }
    }

    /// Prompt and reply of a turn, when it is the last one.
    pub fn tokens(&self, turn: TurnId) -> Option<Arc<Vec<TokenId>>> {
        let state = locked(&self.state);
        state
            .last_tokens
            .as_ref()
            .filter(|(id, _)| *id == turn)
            .map(|(_, t)| t.clone())
    }
}

type Name = (Profile, SessionId);

/// All of them.
pub struct LiveSessions {
    store: Arc<dyn TrajectoryStore>,
    capacity: usize,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    sessions: HashMap<Name, (u64, Arc<LiveSession>)>,
    /// Profiles whose last sessions were read from the store.
    read: HashSet<Profile>,
    uses: u64,
}

impl LiveSessions {
    /// Keeps at most `capacity` sessions.
    pub fn new(store: Arc<dyn TrajectoryStore>, capacity: usize) -> Self {
        Self {
            store,
            capacity: capacity.max(1),
            inner: Mutex::default(),
        }
    }

    /// A session, read from the store when it is not here; empty when it is new.
    pub fn get(&self, profile: &Profile, id: &SessionId) -> Result<Arc<LiveSession>, StoreError> {
        let name = (profile.clone(), id.clone());
        if let Some(found) = locked(&self.inner).touch(&name) {
            return Ok(found);
        }
        let turns: Vec<Known> = self
            .store
            .session_stories(profile, id)?
            .iter()
            .map(Known::of)
            .collect();
        let record = self.store.session(profile, id)?;
        let session = LiveSession {
            keyed: record.as_ref().is_some_and(|r| r.key_hash.is_some()),
            ended: AtomicBool::new(record.is_some_and(|r| r.ended.is_some())),
            ..LiveSession::default()
        };
        locked(&session.state).turns = turns;
        let mut inner = locked(&self.inner);
        // Two requests may have read at once: the first one's object is everybody's.
        if let Some(found) = inner.touch(&name) {
            return Ok(found);
        }
        let session = Arc::new(session);
        inner.uses += 1;
        let at = inner.uses;
        inner.sessions.insert(name, (at, session.clone()));
        inner.shrink(self.capacity);
        Ok(session)
    }

    /// The last active sessions of a profile, most recently used first.
    pub fn recent(
        &self,
        profile: &Profile,
        limit: usize,
    ) -> Result<Vec<(SessionId, Arc<LiveSession>)>, StoreError> {
        let first_time = !locked(&self.inner).read.contains(profile);
        if first_time {
            // Oldest first, so that the last active one is the most recently used.
            let stored = self.store.sessions(Some(profile), limit)?;
            for record in stored.iter().rev().filter(|r| r.ended.is_none()) {
                self.get(profile, &record.id)?;
            }
            locked(&self.inner).read.insert(profile.clone());
        }
        let inner = locked(&self.inner);
        let mut found: Vec<_> = inner
            .sessions
            .iter()
            .filter(|((p, _), _)| p == profile)
            .map(|((_, id), (at, session))| (*at, id.clone(), session.clone()))
            .collect();
        found.sort_by_key(|(at, ..)| std::cmp::Reverse(*at));
        found.truncate(limit);
        Ok(found
            .into_iter()
            .map(|(_, id, session)| (id, session))
            .collect())
    }

    /// Lets go of all sessions of a profile: they are read again when they are asked for.
    pub fn remove_profile(&self, profile: &Profile) {
        let mut inner = locked(&self.inner);
        inner.read.remove(profile);
        inner.sessions.retain(|(p, _), (_, session)| {
            if p == profile {
                session.ended.store(true, Ordering::Release);
            }
            p != profile
        });
    }

    /// Lets go of a session (it ended).
    pub fn remove(&self, profile: &Profile, id: &SessionId) {
        let gone = locked(&self.inner)
            .sessions
            .remove(&(profile.clone(), id.clone()));
        if let Some((_, session)) = gone {
            session.ended.store(true, Ordering::Release);
        }
    }
}

impl Inner {
    fn touch(&mut self, name: &Name) -> Option<Arc<LiveSession>> {
        self.uses += 1;
        let at = self.uses;
        let entry = self.sessions.get_mut(name)?;
        entry.0 = at;
        Some(entry.1.clone())
    }

    /// Drops the least recently used that no request holds.
    fn shrink(&mut self, capacity: usize) {
        while self.sessions.len() > capacity {
            let idle = self
                .sessions
                .iter()
                .filter(|(_, (_, s))| Arc::strong_count(s) == 1)
                .min_by_key(|(_, (at, _))| *at)
                .map(|(name, _)| name.clone());
            let Some(name) = idle else { break };
            self.sessions.remove(&name);
        }
    }
}
