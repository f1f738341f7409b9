//! What a [`super::MemoryStore`] holds, and how each event changes it: the store's rules without a disk.

use crate::*;
use std::{collections::BTreeMap, sync::Arc};

#[derive(Clone)]
pub(super) struct SessionEntry {
    pub record: SessionRecord,
    /// Counts openings with a key: the latest owns it.
    pub key_order: u64,
}

#[derive(Clone)]
pub(super) struct TurnEntry {
    pub turn: Arc<Turn>,
    pub next: Option<NextState>,
    pub mark: Option<TurnMark>,
    pub no_verdict: Option<String>,
}

#[derive(Clone)]
pub(super) struct VerdictEntry {
    pub turn: TurnId,
    pub verdict: Verdict,
    pub no_sample: Option<String>,
}

#[derive(Clone)]
pub(super) struct SampleEntry {
    pub sample: NewSample,
    pub state: SampleState,
}

/// Cheap to clone, so that a refused transaction leaves nothing behind.
#[derive(Clone, Default)]
pub(super) struct State {
    pub sessions: BTreeMap<(Profile, SessionId), SessionEntry>,
    pub turns: BTreeMap<TurnId, Arc<TurnEntry>>,
    pub verdicts: BTreeMap<VerdictId, Arc<VerdictEntry>>,
    pub samples: BTreeMap<SampleId, Arc<SampleEntry>>,
    pub versions: BTreeMap<PolicyVersion, VersionRecord>,
    pub paused: BTreeMap<Profile, String>,
    /// Steps to be made again.
    pub replays: BTreeMap<Profile, Vec<u64>>,
    /// The last number of each profile, kept when its versions are forgotten.
    pub last_version: BTreeMap<Profile, u64>,
    pub last_turn: u64,
    pub last_verdict: u64,
    pub last_sample: u64,
    pub key_order: u64,
}

type Done = Result<(), StoreError>;

pub(super) fn refuse<T>(why: impl Into<String>) -> Result<T, StoreError> {
    Err(StoreError::Conflict(why.into()))
}

impl State {
    pub fn apply(&mut self, event: Event) -> Done {
        match event {
            Event::SessionOpened(record) => self.open_session(record),
            Event::SessionEnded {
                profile,
                session,
                at,
                why,
            } => self.end_session(profile, session, (at, why)),
            Event::Turn(turn) => self.add_turn(*turn),
            Event::NextState { turn, next, at } => self.add_next(turn, next, at),
            Event::Mark { turn, mark } => {
                self.turn_mut(turn)?.mark = Some(mark);
                Ok(())
            }
            Event::Verdict {
                turn,
                id,
                verdict,
                at: _,
            } => self.add_verdict(turn, id, *verdict),
            Event::NoVerdict { turn, why } => {
                self.turn_mut(turn)?.no_verdict = Some(why);
                Ok(())
            }
            Event::Sample(sample) => self.add_sample(*sample),
            Event::NoSample { verdict, why } => {
                self.open_verdict(verdict)?.no_sample = Some(why);
                Ok(())
            }
            Event::Dropped { samples, why } => samples
                .into_iter()
                .try_for_each(|id| self.drop_sample(id, &why)),
            Event::Version {
                version,
                state,
                receipt,
                at,
            } => self.set_version(version, (state, at), receipt),
            Event::Gate { version, report } => match self.versions.get_mut(&version) {
                Some(record) if record.state.is_there() => {
                    record.gate = Some(report);
                    Ok(())
                }
                _ => refuse(format!("version {version} is unknown or forgotten")),
            },
            Event::Unlearnt { version, why } => {
                for entry in self.samples.values_mut() {
                    if entry.state == SampleState::Consumed(version.clone()) {
                        Arc::make_mut(entry).state = SampleState::Dropped(why.clone());
                    }
                }
                Ok(())
            }
            Event::ReplaySkipped { version } => {
                let waiting = self.replays.entry(version.profile.clone()).or_default();
                let before = waiting.len();
                waiting.retain(|n| *n != version.number);
                if waiting.len() == before {
                    return refuse(format!("{version} is not to be made again"));
                }
                Ok(())
            }
            Event::Paused { profile, why } => {
                match why {
                    Some(why) => self.paused.insert(profile, why),
                    None => self.paused.remove(&profile),
                };
                Ok(())
            }
        }
    }

    fn end_session(&mut self, profile: Profile, id: SessionId, end: (Millis, String)) -> Done {
        match self.sessions.get_mut(&(profile, id.clone())) {
            Some(entry) => {
                entry.record.ended.get_or_insert(end);
                Ok(())
            }
            None => refuse(format!("session {id} is unknown")),
        }
    }

    fn add_next(&mut self, turn: TurnId, next: NextState, at: Millis) -> Done {
        let entry = self.turn_mut(turn)?;
        entry
            .next
            .get_or_insert_default()
            .messages
            .extend(next.messages);
        let key = (entry.turn.profile.clone(), entry.turn.session.clone());
        if let Some(session) = self.sessions.get_mut(&key) {
            session.record.last_active = session.record.last_active.max(at);
        }
        Ok(())
    }

    fn turn_mut(&mut self, id: TurnId) -> Result<&mut TurnEntry, StoreError> {
        match self.turns.get_mut(&id) {
            Some(entry) => Ok(Arc::make_mut(entry)),
            None => refuse(format!("{id} is unknown")),
        }
    }

    fn open_session(&mut self, record: SessionRecord) -> Done {
        let key = (record.profile.clone(), record.id.clone());
        if record.key_hash.is_some() {
            self.key_order += 1;
        }
        let order = if record.key_hash.is_some() {
            Some(self.key_order)
        } else {
            None
        };
        match self.sessions.get_mut(&key) {
            None => {
                let record = SessionRecord {
                    ended: None,
                    turns: 0,
                    ..record
                };
                let entry = SessionEntry {
                    record,
                    key_order: order.unwrap_or(0),
                };
                self.sessions.insert(key, entry);
            }
            Some(entry) => {
                let old = &mut entry.record;
                old.ended = None;
                old.last_active = old.last_active.max(record.last_active);
                old.task = record.task.or(old.task.take());
                old.key_hash = record.key_hash.or(old.key_hash.take());
                entry.key_order = order.unwrap_or(entry.key_order);
            }
        }
        Ok(())
    }

    fn check_turn(&self, turn: &Turn) -> Done {
        if turn.id.0 > i64::MAX as u64 {
            return refuse(format!("{} is not an id that next_turn_id gave", turn.id));
        }
        if self.turns.contains_key(&turn.id) {
            return refuse(format!("{} is stored already", turn.id));
        }
        if turn.version.profile != turn.profile {
            return refuse(format!(
                "{} of {} sampled by {}",
                turn.id, turn.profile, turn.version
            ));
        }
        if !turn.temperature.is_finite() {
            return refuse(format!("{} has temperature {}", turn.id, turn.temperature));
        }
        let parent = match turn.parent {
            None => None,
            Some(id) => match self.turns.get(&id) {
                None => return refuse(format!("the parent {id} of {} is unknown", turn.id)),
                Some(entry) => Some(&entry.turn),
            },
        };
        if let Some(p) = parent
            && (&p.profile, &p.session) != (&turn.profile, &turn.session)
        {
            return refuse(format!(
                "the parent {} of {} is of another session",
                p.id, turn.id
            ));
        }
        let extends = parent.is_some_and(|p| {
            turn.prompt
                .strip_prefix(p.prompt.as_slice())
                .is_some_and(|t| t.starts_with(p.reply.tokens()))
        });
        if turn.segment == Segment::Extends && !extends {
            return refuse(format!("{} does not extend its parent's tokens", turn.id));
        }
        Ok(())
    }

    fn add_turn(&mut self, turn: Turn) -> Done {
        self.check_turn(&turn)?;
        let key = (turn.profile.clone(), turn.session.clone());
        let entry = self.sessions.entry(key).or_insert_with(|| SessionEntry {
            record: SessionRecord {
                profile: turn.profile.clone(),
                id: turn.session.clone(),
                key_hash: None,
                task: None,
                opened: turn.created,
                last_active: turn.completed,
                ended: None,
                turns: 0,
            },
            key_order: 0,
        });
        entry.record.turns += 1;
        entry.record.last_active = entry.record.last_active.max(turn.completed);
        self.last_turn = self.last_turn.max(turn.id.0);
        let turn = Arc::new(turn);
        let entry = TurnEntry {
            turn: turn.clone(),
            next: None,
            mark: None,
            no_verdict: None,
        };
        self.turns.insert(turn.id, Arc::new(entry));
        Ok(())
    }

    fn add_verdict(&mut self, turn: TurnId, id: VerdictId, verdict: Verdict) -> Done {
        self.turn_mut(turn)?;
        if id.0 > i64::MAX as u64 || self.verdicts.contains_key(&id) {
            return refuse(format!("verdict {} is stored already", id.0));
        }
        if verdict.reward.is_some_and(|r| !r.is_finite()) {
            return refuse(format!("the reward of verdict {} is not finite", id.0));
        }
        self.last_verdict = self.last_verdict.max(id.0);
        let entry = VerdictEntry {
            turn,
            verdict,
            no_sample: None,
        };
        self.verdicts.insert(id, Arc::new(entry));
        Ok(())
    }

    /// A verdict of which it is not settled whether it becomes a sample.
    fn open_verdict(&mut self, id: VerdictId) -> Result<&mut VerdictEntry, StoreError> {
        let sampled = self.samples.values().any(|s| s.sample.verdict == id);
        match self.verdicts.get_mut(&id) {
            None => refuse(format!("verdict {} is unknown", id.0)),
            Some(entry) if sampled || entry.no_sample.is_some() => {
                let turn = entry.turn;
                refuse(format!("verdict {} on {turn} is settled already", id.0))
            }
            Some(entry) => Ok(Arc::make_mut(entry)),
        }
    }

    fn add_sample(&mut self, sample: NewSample) -> Done {
        let turn = self.turn_mut(sample.turn)?.turn.clone();
        if self.open_verdict(sample.verdict)?.turn != sample.turn {
            return refuse(format!(
                "verdict {} is not on {}",
                sample.verdict.0, turn.id
            ));
        }
        if turn.kind == TurnKind::Side {
            return refuse(format!(
                "{} is a side turn and is never trained on",
                turn.id
            ));
        }
        if sample.reward.is_some_and(|r| !r.is_finite()) {
            return refuse(format!(
                "the reward of a sample of {} is not finite",
                turn.id
            ));
        }
        for column in [&sample.teacher_logprobs, &sample.student_logprobs]
            .into_iter()
            .flatten()
        {
            if column.len() != turn.reply.len() {
                let (is, should) = (column.len(), turn.reply.len());
                return refuse(format!(
                    "{is} log-probs for the {should} tokens of {}",
                    turn.id
                ));
            }
        }
        for entry in self.samples.values_mut() {
            if entry.sample.turn == turn.id && entry.state == SampleState::Pending {
                Arc::make_mut(entry).state = SampleState::Dropped("replaced".to_owned());
            }
        }
        self.last_sample += 1;
        let entry = SampleEntry {
            sample,
            state: SampleState::Pending,
        };
        self.samples
            .insert(SampleId(self.last_sample), Arc::new(entry));
        Ok(())
    }

    fn drop_sample(&mut self, id: SampleId, why: &str) -> Done {
        match self.samples.get_mut(&id) {
            Some(entry) => match entry.state {
                SampleState::Dropped(_) => Ok(()),
                SampleState::Pending => {
                    Arc::make_mut(entry).state = SampleState::Dropped(why.to_owned());
                    Ok(())
                }
                _ => refuse(format!("sample {} is not pending", id.0)),
            },
            None => refuse(format!("sample {} is unknown", id.0)),
        }
    }

    fn set_version(
        &mut self,
        version: PolicyVersion,
        (state, at): (VersionState, Millis),
        receipt: Option<Receipt>,
    ) -> Done {
        let base = version.number == 0 && state == VersionState::Served && receipt.is_none();
        // What is forgotten has no weights: no later word brings it back.
        let known = self.versions.get(&version).map(|r| r.state.is_there());
        if !base && known != Some(true) {
            return refuse(format!("version {version} is unknown or forgotten"));
        }
        if state == VersionState::Served {
            self.leave(&version, at);
        }
        if let Some(record) = self.versions.get_mut(&version) {
            if state == VersionState::Served {
                record.served_at = Some(at);
                record.left_at = None;
            } else if record.state == VersionState::Served {
                record.left_at = Some(at);
            }
            record.state = state;
            if receipt.is_some() {
                record.receipt = receipt;
            }
        }
        Ok(())
    }

    /// What the profile of `next` serves is superseded by it.
    fn leave(&mut self, next: &PolicyVersion, at: Millis) {
        for other in self.versions.values_mut() {
            if other.version.profile == next.profile
                && other.version != *next
                && other.state == VersionState::Served
            {
                other.state = VersionState::Superseded;
                other.left_at = Some(at);
            }
        }
    }

    pub fn lease(&mut self, samples: &[SampleId]) -> Result<Vec<LeasedSample>, StoreError> {
        let mut leased = Vec::new();
        for id in samples {
            match self.samples.get_mut(id) {
                Some(entry) if entry.state == SampleState::Pending => {
                    Arc::make_mut(entry).state = SampleState::Leased;
                    let sample = entry.sample.clone();
                    let turn = (*self.turn_mut(sample.turn)?.turn).clone();
                    leased.push(LeasedSample {
                        id: *id,
                        sample,
                        turn,
                    });
                }
                _ => return refuse(format!("sample {} is not pending", id.0)),
            }
        }
        Ok(leased)
    }

    fn leased_mut(&mut self, id: SampleId) -> Result<&mut SampleEntry, StoreError> {
        match self.samples.get_mut(&id) {
            Some(entry) if entry.state == SampleState::Leased => Ok(Arc::make_mut(entry)),
            _ => refuse(format!("sample {} is not leased", id.0)),
        }
    }

    pub fn release(&mut self, samples: &[SampleId]) -> Done {
        for id in samples {
            let turn = self.leased_mut(*id)?.sample.turn;
            let later = (SampleId(id.0 + 1))..;
            let replaced = self
                .samples
                .range(later)
                .any(|(_, s)| s.sample.turn == turn);
            self.leased_mut(*id)?.state = if replaced {
                SampleState::Dropped("replaced".to_owned())
            } else {
                SampleState::Pending
            };
        }
        Ok(())
    }

    pub fn commit_step(&mut self, step: StepCommit) -> Done {
        let version = step.version.version.clone();
        let last = self
            .last_version
            .get(&version.profile)
            .copied()
            .unwrap_or(0);
        if version.number <= last {
            return refuse(format!("version {version} is not greater than {last}"));
        }
        if step.version.state != VersionState::Candidate {
            return refuse(format!("version {version} does not begin as a candidate"));
        }
        let parent = PolicyVersion {
            number: step.version.parent,
            ..version.clone()
        };
        let there = |v: &VersionRecord| v.state.is_there();
        if parent.number != 0 && !self.versions.get(&parent).is_some_and(there) {
            return refuse(format!("the parent {parent} of {version} is unknown"));
        }
        if let VersionOrigin::Replayed(of) = step.version.origin {
            self.strike(&version, of)?;
            for id in &step.version.samples {
                let entry = match self.samples.get_mut(id) {
                    Some(entry) => Arc::make_mut(entry),
                    None => return refuse(format!("sample {} is unknown", id.0)),
                };
                let old = PolicyVersion {
                    number: of,
                    ..version.clone()
                };
                if entry.state != SampleState::Consumed(old) {
                    return refuse(format!("sample {} was not consumed by step {of}", id.0));
                }
                entry.state = SampleState::Consumed(version.clone());
            }
        } else {
            for id in &step.version.samples {
                self.own_leased(*id, &version)?.state = SampleState::Consumed(version.clone());
            }
        }
        for (id, why) in step.dropped {
            self.own_leased(id, &version)?.state = SampleState::Dropped(why);
        }
        self.last_version
            .insert(version.profile.clone(), version.number);
        self.versions.insert(version, step.version);
        Ok(())
    }

    /// Takes the step off the list of those to be made again; it must come first.
    fn strike(&mut self, version: &PolicyVersion, of: u64) -> Done {
        let waiting = self.replays.entry(version.profile.clone()).or_default();
        if waiting.first() != Some(&of) {
            return refuse(format!(
                "step {of} of {} is not the next to be made again",
                version.profile
            ));
        }
        waiting.remove(0);
        Ok(())
    }

    fn own_leased(
        &mut self,
        id: SampleId,
        version: &PolicyVersion,
    ) -> Result<&mut SampleEntry, StoreError> {
        let turn = self.leased_mut(id)?.sample.turn;
        if self.turn_mut(turn)?.turn.profile != version.profile {
            return refuse(format!(
                "sample {} is not of profile {}",
                id.0, version.profile
            ));
        }
        self.leased_mut(id)
    }
}
