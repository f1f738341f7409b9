//! A [`TrajectoryStore`] without a disk.

use super::{
    futures::ready,
    memory_state::{State, TurnEntry},
    model::hash,
};
use crate::*;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, MutexGuard},
};

/// Keeps everything in memory, under the same rules and refusals as a store on disk.
#[derive(Default)]
pub struct MemoryStore {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    state: State,
    given_turn: u64,
    given_verdict: u64,
    dead: Option<String>,
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// From now on every write fails as after a failed sync; reads go on. `None` = as before.
    pub fn set_dead(&self, why: Option<&str>) {
        self.lock().dead = why.map(str::to_owned);
    }

    /// Does what a restart does: leases are void, and ids go on after the last that was stored.
    pub fn restart(&self) {
        let mut inner = self.lock();
        inner.given_turn = inner.state.last_turn;
        inner.given_verdict = inner.state.last_verdict;
        let state = &mut inner.state;
        let leased = state
            .samples
            .iter()
            .filter(|(_, s)| s.state == SampleState::Leased);
        let leased: Vec<SampleId> = leased.map(|(id, _)| *id).collect();
        state
            .release(&leased)
            .expect("leased samples can be released");
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("a test panicked inside the store")
    }

    /// Runs one transaction now, whether or not its future is awaited; a refusal leaves nothing behind.
    fn write<T: Send + 'static>(
        &self,
        change: impl FnOnce(&mut State) -> Result<T, StoreError>,
    ) -> BoxFuture<'static, Result<T, StoreError>> {
        let mut inner = self.lock();
        if let Some(why) = &inner.dead {
            return ready(Err(StoreError::Dead(why.clone())));
        }
        let mut next = inner.state.clone();
        let result = change(&mut next);
        if result.is_ok() {
            inner.given_turn = inner.given_turn.max(next.last_turn);
            inner.given_verdict = inner.given_verdict.max(next.last_verdict);
            inner.state = next;
        }
        ready(result)
    }
}

fn story(state: &State, entry: &TurnEntry) -> TurnStory {
    let id = entry.turn.id;
    let verdicts = state.verdicts.iter().filter(|(_, v)| v.turn == id);
    let samples = state.samples.iter().filter(|(_, s)| s.sample.turn == id);
    TurnStory {
        turn: (*entry.turn).clone(),
        next: entry.next.clone(),
        mark: entry.mark.clone(),
        no_verdict: entry.no_verdict.clone(),
        verdicts: verdicts
            .map(|(i, v)| (*i, v.verdict.clone(), v.no_sample.clone()))
            .collect(),
        samples: samples
            .map(|(i, s)| (*i, s.sample.clone(), s.state.clone()))
            .collect(),
    }
}

fn full(state: &State, id: SampleId) -> Option<LeasedSample> {
    let entry = state.samples.get(&id)?;
    Some(LeasedSample {
        id,
        sample: entry.sample.clone(),
        turn: (*state.turns.get(&entry.sample.turn)?.turn).clone(),
    })
}

fn waits(judged: &BTreeSet<TurnId>, entry: &TurnEntry) -> bool {
    entry.turn.kind == TurnKind::Main
        && entry.next.is_some()
        && entry.mark.is_none()
        && entry.no_verdict.is_none()
        && !judged.contains(&entry.turn.id)
}

fn judged(state: &State) -> BTreeSet<TurnId> {
    state.verdicts.values().map(|v| v.turn).collect()
}

impl TrajectoryStore for MemoryStore {
    fn append(&self, events: Vec<Event>) -> BoxFuture<'static, Result<(), StoreError>> {
        self.write(|state| events.into_iter().try_for_each(|event| state.apply(event)))
    }

    fn next_turn_id(&self, now: Millis) -> TurnId {
        let mut inner = self.lock();
        let by_clock = (now.max(0) as u64).min((1 << 43) - 1) << 20;
        inner.given_turn = by_clock.max(inner.given_turn + 1);
        TurnId(inner.given_turn)
    }

    fn next_verdict_id(&self) -> VerdictId {
        let mut inner = self.lock();
        inner.given_verdict += 1;
        VerdictId(inner.given_verdict)
    }

    fn story(&self, turn: TurnId) -> Result<Option<TurnStory>, StoreError> {
        let inner = self.lock();
        Ok(inner
            .state
            .turns
            .get(&turn)
            .map(|entry| story(&inner.state, entry)))
    }

    fn session_stories(
        &self,
        profile: &Profile,
        session: &SessionId,
    ) -> Result<Vec<TurnStory>, StoreError> {
        let inner = self.lock();
        let turns = inner.state.turns.values();
        let of = turns.filter(|e| e.turn.profile == *profile && e.turn.session == *session);
        Ok(of.map(|entry| story(&inner.state, entry)).collect())
    }

    fn session(
        &self,
        profile: &Profile,
        session: &SessionId,
    ) -> Result<Option<SessionRecord>, StoreError> {
        let key = (profile.clone(), session.clone());
        Ok(self
            .lock()
            .state
            .sessions
            .get(&key)
            .map(|e| e.record.clone()))
    }

    fn sessions(
        &self,
        profile: Option<&Profile>,
        limit: usize,
    ) -> Result<Vec<SessionRecord>, StoreError> {
        let inner = self.lock();
        let all = inner.state.sessions.values().map(|e| e.record.clone());
        let mut all: Vec<_> = all
            .filter(|r| profile.is_none_or(|p| r.profile == *p))
            .collect();
        all.sort_by_key(|r| std::cmp::Reverse(r.last_active));
        all.truncate(limit);
        Ok(all)
    }

    fn session_by_key(&self, key_hash: &str) -> Result<Option<SessionRecord>, StoreError> {
        let inner = self.lock();
        let all = inner.state.sessions.values();
        let with = all.filter(|e| e.record.key_hash.as_deref() == Some(key_hash));
        Ok(with.max_by_key(|e| e.key_order).map(|e| e.record.clone()))
    }

    fn idle_sessions(&self, since: Millis) -> Result<Vec<SessionRecord>, StoreError> {
        let inner = self.lock();
        let all = inner.state.sessions.values().map(|e| e.record.clone());
        let mut idle: Vec<_> = all
            .filter(|r| r.ended.is_none() && r.last_active < since)
            .collect();
        idle.sort_by_key(|r| r.last_active);
        Ok(idle)
    }

    fn plan_forget(&self, target: &ForgetTarget) -> Result<ForgetPlan, StoreError> {
        self.lock().state.plan_forget(target)
    }

    fn forget(&self, forget: Forget) -> BoxFuture<'static, Result<ForgetProof, StoreError>> {
        self.write(move |state| {
            Ok(ForgetProof {
                plan: state.forget(&forget)?,
                ..ForgetProof::default()
            })
        })
    }

    fn unjudged(&self, limit: usize) -> Result<Vec<TurnId>, StoreError> {
        let inner = self.lock();
        let judged = judged(&inner.state);
        let all = inner.state.turns.values();
        let waiting = all.filter(|e| waits(&judged, e));
        Ok(waiting.map(|e| e.turn.id).take(limit).collect())
    }

    fn open_verdicts(&self, limit: usize) -> Result<Vec<OpenVerdict>, StoreError> {
        let inner = self.lock();
        let sampled: BTreeSet<VerdictId> = inner
            .state
            .samples
            .values()
            .map(|s| s.sample.verdict)
            .collect();
        let all = inner.state.verdicts.iter();
        let open = all.filter(|(id, v)| v.no_sample.is_none() && !sampled.contains(id));
        let full = open.map(|(id, v)| OpenVerdict {
            id: *id,
            turn: (*inner.state.turns[&v.turn].turn).clone(),
            verdict: v.verdict.clone(),
        });
        Ok(full.take(limit).collect())
    }

    fn profiles(&self) -> Result<Vec<Profile>, StoreError> {
        let state = &self.lock().state;
        let sessions = state.sessions.keys().map(|(profile, _)| profile);
        let versions = state.versions.keys().map(|v| &v.profile);
        let all: BTreeSet<&Profile> = sessions
            .chain(versions)
            .chain(state.paused.keys())
            .collect();
        Ok(all.into_iter().cloned().collect())
    }

    fn pending(&self, profile: &Profile) -> Result<Vec<PendingSample>, StoreError> {
        let inner = self.lock();
        let mut pending = Vec::new();
        for (id, entry) in &inner.state.samples {
            let turn = &inner.state.turns[&entry.sample.turn].turn;
            if entry.state == SampleState::Pending && turn.profile == *profile {
                pending.push(PendingSample {
                    id: *id,
                    turn: turn.id,
                    session: turn.session.clone(),
                    version: turn.version.clone(),
                    explicit: entry.sample.explicit,
                    reply_hash: hash(turn.reply.tokens()),
                    reply_len: turn.reply.len(),
                    created: entry.sample.created,
                    reward: entry.sample.reward,
                    group: entry.sample.group.clone(),
                });
            }
        }
        Ok(pending)
    }

    fn lease(
        &self,
        samples: Vec<SampleId>,
    ) -> BoxFuture<'static, Result<Vec<LeasedSample>, StoreError>> {
        self.write(|state| state.lease(&samples))
    }

    fn release(&self, samples: Vec<SampleId>) -> BoxFuture<'static, Result<(), StoreError>> {
        self.write(|state| state.release(&samples))
    }

    fn commit_step(&self, step: StepCommit) -> BoxFuture<'static, Result<(), StoreError>> {
        self.write(|state| state.commit_step(step))
    }

    fn versions(&self, profile: &Profile) -> Result<Vec<VersionRecord>, StoreError> {
        let inner = self.lock();
        let all = inner.state.versions.values();
        Ok(all
            .filter(|r| r.version.profile == *profile)
            .cloned()
            .collect())
    }

    fn last_version(&self, profile: &Profile) -> Result<u64, StoreError> {
        Ok(self
            .lock()
            .state
            .last_version
            .get(profile)
            .copied()
            .unwrap_or(0))
    }

    fn replays(&self, profile: &Profile) -> Result<Vec<u64>, StoreError> {
        let inner = self.lock();
        Ok(inner
            .state
            .replays
            .get(profile)
            .cloned()
            .unwrap_or_default())
    }

    fn samples(&self, ids: &[SampleId]) -> Result<Vec<LeasedSample>, StoreError> {
        let inner = self.lock();
        let found = ids.iter().filter_map(|id| full(&inner.state, *id));
        Ok(found.collect())
    }

    fn held_out(
        &self,
        profile: &Profile,
        limit: usize,
    ) -> Result<(Vec<LeasedSample>, u64), StoreError> {
        let inner = self.lock();
        let state = &inner.state;
        let held = SampleState::Dropped(HELD_OUT.to_owned());
        let all = state.samples.iter().rev().filter(|(_, s)| s.state == held);
        let own: Vec<SampleId> = all
            .filter(|(_, s)| state.turns[&s.sample.turn].turn.profile == *profile)
            .map(|(id, _)| *id)
            .collect();
        let newest = own.iter().take(limit).filter_map(|id| full(state, *id));
        Ok((newest.collect(), own.len() as u64))
    }

    fn live_turns(&self, profile: &Profile, limit: usize) -> Result<Vec<LiveTurn>, StoreError> {
        let inner = self.lock();
        let state = &inner.state;
        let own = state
            .turns
            .values()
            .rev()
            .filter(|e| e.turn.profile == *profile && e.turn.kind == TurnKind::Main);
        let live = own.filter_map(|entry| {
            let id = entry.turn.id;
            let verdicts: Vec<&Verdict> = state
                .verdicts
                .values()
                .filter(|v| v.turn == id)
                .map(|v| &v.verdict)
                .collect();
            let followed = entry.next.iter().flat_map(|n| &n.messages);
            let tool = followed.into_iter().any(|m| m.role == Role::Tool);
            let error = verdicts.iter().any(|v| v.judge == TOOL_ERROR);
            if verdicts.is_empty() && !tool {
                return None;
            }
            Some(LiveTurn {
                turn: id,
                at: entry.turn.completed,
                version: entry.turn.version.number,
                reward: verdicts
                    .iter()
                    .rev()
                    .find_map(|v| v.reward)
                    .map(|r| r.clamp(-1.0, 1.0)),
                reply_len: entry.turn.reply.len(),
                tool_error: tool.then_some(error),
            })
        });
        Ok(live.take(limit).collect())
    }

    fn profiles_to_train(&self) -> Result<Vec<Profile>, StoreError> {
        let inner = self.lock();
        let state = &inner.state;
        let pending = state
            .samples
            .values()
            .filter(|s| s.state == SampleState::Pending);
        let pending = pending.map(|s| state.turns[&s.sample.turn].turn.profile.clone());
        let candidates = state
            .versions
            .values()
            .filter(|v| v.state == VersionState::Candidate);
        let candidates = candidates.map(|v| v.version.profile.clone());
        let replays = state.replays.iter().filter(|(_, r)| !r.is_empty());
        let all: BTreeSet<Profile> = pending
            .chain(candidates)
            .chain(replays.map(|(p, _)| p.clone()))
            .collect();
        Ok(all.into_iter().collect())
    }

    fn paused(&self, profile: &Profile) -> Result<Option<String>, StoreError> {
        Ok(self.lock().state.paused.get(profile).cloned())
    }

    fn counts(&self, profile: Option<&Profile>) -> Result<StoreCounts, StoreError> {
        let inner = self.lock();
        let state = &inner.state;
        let of = |turn: TurnId| profile.is_none_or(|p| state.turns[&turn].turn.profile == *p);
        let judged = judged(state);
        let mut turns: BTreeMap<(&str, String), u64> = BTreeMap::new();
        let (mut samples, mut verdicts) = (BTreeMap::new(), BTreeMap::new());
        let mut judgements: BTreeMap<(String, String), u64> = BTreeMap::new();
        let mut unjudged = 0;
        for entry in state.turns.values().filter(|e| of(e.turn.id)) {
            let key = (entry.turn.kind.as_str(), entry.turn.reason.clone());
            *turns.entry(key).or_default() += 1;
            unjudged += u64::from(waits(&judged, entry));
        }
        for entry in state.samples.values().filter(|s| of(s.sample.turn)) {
            let name = match &entry.state {
                SampleState::Pending => "pending".to_owned(),
                SampleState::Leased => "leased".to_owned(),
                SampleState::Consumed(_) => "consumed".to_owned(),
                SampleState::Dropped(why) => format!("dropped:{why}"),
            };
            *samples.entry(name).or_insert(0) += 1;
        }
        for entry in state.verdicts.values().filter(|v| of(v.turn)) {
            *verdicts
                .entry(entry.verdict.source.as_str().to_owned())
                .or_insert(0) += 1;
            let value = match entry.verdict.reward {
                None => "none",
                Some(r) if r > 0.0 => "good",
                Some(r) if r < 0.0 => "bad",
                Some(_) => "neutral",
            };
            let key = (entry.verdict.judge.clone(), value.to_owned());
            *judgements.entry(key).or_insert(0) += 1;
        }
        let of_profile = |key: &&(Profile, SessionId)| profile.is_none_or(|p| key.0 == *p);
        let kind = |text: &str| TurnKind::parse(text).unwrap();
        Ok(StoreCounts {
            turns: turns
                .into_iter()
                .map(|((k, reason), n)| (kind(k), reason, n))
                .collect(),
            samples: samples.into_iter().collect(),
            verdicts: verdicts.into_iter().collect(),
            judged: judgements
                .into_iter()
                .map(|((judge, value), n)| (judge, value, n))
                .collect(),
            unjudged,
            sessions: state.sessions.keys().filter(of_profile).count() as u64,
            bytes: 0,
        })
    }

    fn health(&self) -> Result<(), String> {
        match &self.lock().dead {
            Some(why) => Err(format!("the store takes no writes: {why}")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{block_on, store_suite};

    #[test]
    fn it_is_a_store() {
        store_suite(|| Box::new(MemoryStore::new()));
    }

    #[test]
    fn a_dead_store_reads_on() {
        let store = MemoryStore::new();
        store.set_dead(Some("fsync failed"));
        assert!(matches!(
            block_on(store.append(vec![])),
            Err(StoreError::Dead(_))
        ));
        assert!(store.health().is_err());
        assert_eq!(store.profiles().unwrap(), vec![]);
    }
}
