//! How a [`super::MemoryStore`] forgets.

use super::memory_state::{SampleEntry, State, refuse};
use crate::*;
use std::{collections::BTreeSet, sync::Arc};

impl State {
    /// What forgetting would remove.
    pub fn plan_forget(&self, target: &ForgetTarget) -> Result<ForgetPlan, StoreError> {
        let turns = self.turns_of(target)?;
        let parents = self.turns.values().filter(|e| turns.contains(&e.turn.id));
        let parents = parents.filter_map(|e| e.turn.parent);
        let unjudged: BTreeSet<TurnId> = parents.filter(|p| !turns.contains(p)).collect();
        let sessions = self.sessions.keys().filter(|(profile, id)| match target {
            ForgetTarget::Session(p, s) => (profile, id) == (p, s),
            ForgetTarget::Profile(p) => profile == p,
            ForgetTarget::Turn(p, _) => {
                let mut of = self.turns.values().map(|e| &e.turn);
                let touched = self.turns.values().any(|e| {
                    turns.contains(&e.turn.id)
                        && (&e.turn.profile, &e.turn.session) == (profile, id)
                });
                profile == p
                    && touched
                    && of
                        .all(|t| (&t.profile, &t.session) != (profile, id) || turns.contains(&t.id))
            }
        });
        let goes = |v: &VerdictId| {
            let entry = &self.verdicts[v];
            turns.contains(&entry.turn)
                || (unjudged.contains(&entry.turn)
                    && entry.verdict.source != VerdictSource::Explicit)
        };
        let samples = self.samples.iter().filter(|(_, s)| goes(&s.sample.verdict));
        let trained = samples
            .clone()
            .flat_map(|(id, s)| self.learnt(target.profile(), *id, &s.state));
        Ok(ForgetPlan {
            sessions: sessions.count() as u64,
            verdicts: self.verdicts.keys().filter(|v| goes(v)).count() as u64,
            samples: samples.clone().count() as u64,
            trained: trained.collect(),
            turns: turns.iter().copied().collect(),
            unjudged: unjudged.into_iter().collect(),
        })
    }

    /// The version that a sample counts for, or whose weights learnt it before it was dropped again.
    fn learnt(
        &self,
        profile: &Profile,
        id: SampleId,
        state: &SampleState,
    ) -> BTreeSet<(SampleId, u64)> {
        let named = self.versions.values().filter(|r| {
            r.version.profile == *profile && r.state.is_there() && r.samples.contains(&id)
        });
        let mut learnt: BTreeSet<_> = named.map(|r| (id, r.version.number)).collect();
        if let SampleState::Consumed(version) = state {
            learnt.insert((id, version.number));
        }
        learnt
    }

    fn turns_of(&self, target: &ForgetTarget) -> Result<BTreeSet<TurnId>, StoreError> {
        let missing = |what: String| Err(StoreError::NotFound(what));
        let all = self.turns.values().map(|e| &e.turn);
        match target {
            ForgetTarget::Session(profile, session) => {
                let key = (profile.clone(), session.clone());
                if !self.sessions.contains_key(&key) {
                    return missing(format!("session {session}"));
                }
                let of = all.filter(|t| t.profile == *profile && t.session == *session);
                Ok(of.map(|t| t.id).collect())
            }
            ForgetTarget::Profile(profile) => {
                let known = self.sessions.keys().any(|(p, _)| p == profile)
                    || self.versions.keys().any(|v| v.profile == *profile)
                    || self.paused.contains_key(profile);
                if !known {
                    return missing(format!("profile {profile}"));
                }
                Ok(all
                    .filter(|t| t.profile == *profile)
                    .map(|t| t.id)
                    .collect())
            }
            ForgetTarget::Turn(profile, id) => {
                let found = self.turns.get(id).map(|e| &e.turn);
                let Some(turn) = found.filter(|t| t.profile == *profile) else {
                    return missing(format!("{id}"));
                };
                let same = |t: &&Arc<Turn>| {
                    (&t.profile, &t.session, t.parent, &t.prompt)
                        == (&turn.profile, &turn.session, turn.parent, &turn.prompt)
                };
                let mut gone: BTreeSet<TurnId> = all.filter(same).map(|t| t.id).collect();
                // Children have larger ids than their parents.
                for entry in self.turns.values() {
                    if entry.turn.parent.is_some_and(|p| gone.contains(&p)) {
                        gone.insert(entry.turn.id);
                    }
                }
                Ok(gone)
            }
        }
    }

    /// Removes it.
    pub fn forget(&mut self, forget: &Forget) -> Result<ForgetPlan, StoreError> {
        let plan = self.plan_forget(&forget.target)?;
        let profile = forget.target.profile();
        let gone: BTreeSet<TurnId> = plan.turns.iter().copied().collect();
        let unjudged: BTreeSet<TurnId> = plan.unjudged.iter().copied().collect();
        let verdicts: BTreeSet<VerdictId> = self
            .verdicts
            .iter()
            .filter(|(_, v)| {
                gone.contains(&v.turn)
                    || (unjudged.contains(&v.turn) && v.verdict.source != VerdictSource::Explicit)
            })
            .map(|(id, _)| *id)
            .collect();
        let of = |s: &SampleEntry| verdicts.contains(&s.sample.verdict);
        if self
            .samples
            .values()
            .any(|s| of(s) && s.state == SampleState::Leased)
        {
            return refuse("samples of it are in a step being made");
        }
        let missing = plan
            .trained
            .iter()
            .find(|(_, n)| !forget.versions.contains(n) && self.is_there(profile, *n));
        if let Some((_, number)) = missing {
            return refuse(format!("version {number} learnt from it since"));
        }
        self.check_way_back(forget)?;
        let lost: BTreeSet<SampleId> = self
            .samples
            .iter()
            .filter(|(_, s)| of(s))
            .map(|(id, _)| *id)
            .collect();
        self.samples.retain(|id, _| !lost.contains(id));
        self.verdicts.retain(|id, _| !verdicts.contains(id));
        for (id, entry) in &mut self.turns {
            if unjudged.contains(id) {
                let entry = Arc::make_mut(entry);
                entry.next = None;
                entry.no_verdict = Some("what followed was forgotten".to_owned());
            }
        }
        self.turns.retain(|id, _| !gone.contains(id));
        self.forget_sessions(&forget.target, profile);
        for record in self
            .versions
            .values_mut()
            .filter(|r| r.version.profile == *profile)
        {
            record.samples.retain(|id| !lost.contains(id));
        }
        self.forget_versions(forget, profile);
        Ok(plan)
    }

    /// Something that keeps its weights must be served afterwards, and only what is taken away is replaced.
    fn check_way_back(&self, forget: &Forget) -> Result<(), StoreError> {
        let profile = forget.target.profile();
        if matches!(forget.target, ForgetTarget::Profile(_)) {
            return Ok(());
        }
        let goes = self.versions.values().any(|r| {
            r.version.profile == *profile
                && r.state == VersionState::Served
                && forget.versions.contains(&r.version.number)
        });
        let stands =
            |n: u64| n == 0 || (self.is_there(profile, n) && !forget.versions.contains(&n));
        match forget.back_to {
            Some(n) if goes && stands(n) => Ok(()),
            None if !goes => Ok(()),
            _ => refuse("what is served has changed since, or there is no way back"),
        }
    }

    fn is_there(&self, profile: &Profile, number: u64) -> bool {
        let version = PolicyVersion {
            profile: profile.clone(),
            number,
        };
        self.versions
            .get(&version)
            .is_some_and(|v| v.state.is_there())
    }

    fn forget_sessions(&mut self, target: &ForgetTarget, profile: &Profile) {
        let turns = &self.turns;
        self.sessions.retain(|(p, id), entry| {
            if p != profile {
                return true;
            }
            let left = turns
                .values()
                .filter(|e| (&e.turn.profile, &e.turn.session) == (p, id));
            let left = left.count() as u64;
            let had = std::mem::replace(&mut entry.record.turns, left);
            match target {
                ForgetTarget::Session(_, s) => s != id,
                ForgetTarget::Profile(_) => false,
                ForgetTarget::Turn(..) => left > 0 || had == 0,
            }
        });
    }

    fn forget_versions(&mut self, forget: &Forget, profile: &Profile) {
        if matches!(forget.target, ForgetTarget::Profile(_)) {
            self.versions.retain(|v, _| v.profile != *profile);
            self.paused.remove(profile);
            self.replays.remove(profile);
            return;
        }
        for number in &forget.versions {
            let version = PolicyVersion {
                profile: profile.clone(),
                number: *number,
            };
            if let Some(record) = self.versions.get_mut(&version) {
                if record.state == VersionState::Served {
                    record.left_at = Some(forget.at);
                }
                record.state = VersionState::Forgotten(forget.why.clone());
                record.checkpoint = None;
                record.receipt = None;
                record.gate = None;
            }
        }
        if let Some(number) = forget.back_to {
            let version = PolicyVersion {
                profile: profile.clone(),
                number,
            };
            if let Some(record) = self.versions.get_mut(&version) {
                record.state = VersionState::Served;
                record.served_at = Some(forget.at);
                record.left_at = None;
            }
        }
        // What was to be made again already stands on what is made again now.
        let waiting = self.replays.entry(profile.clone()).or_default();
        waiting.retain(|n| !forget.replay.contains(n));
        waiting.splice(0..0, forget.replay.iter().copied());
    }
}
