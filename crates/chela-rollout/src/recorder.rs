//! The two moments of a request: it arrives and is placed, its reply is over and is kept.

use crate::{
    rollout::Rollout,
    session::{
        follow::{self, Known, Parent},
        kind::{self, Surroundings},
        live::LiveSession,
        normal::{self, Outline},
    },
};
use chela_core::{
    Admission, BoxFuture, Caller, ChatRequest, Completion, DeclaredKind, Event, NextState,
    PolicyVersion, Recorder, Refusal, ReusablePrefix, Segment, SessionId, SessionRecord,
    StoreError, Turn, TurnId, TurnKind, TurnMark, TurnStory,
};

const NO_PARENT: &str = "first turn";

/// Which weights a model name asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Served,
    Base,
    Pinned(u64),
}

/// `<base>:side` is the base model for side calls, `<base>@N` one version; any other name is the profile's policy.
fn wanted(name: &str, base: &str) -> Wanted {
    if name.strip_suffix(":side").is_some_and(|n| n == base) {
        return Wanted::Base;
    }
    match name.rsplit_once('@') {
        Some((n, number)) if n == base => number.parse().map_or(Wanted::Served, Wanted::Pinned),
        _ => Wanted::Served,
    }
}

/// A request's session, settled.
struct Placed {
    id: SessionId,
    source: String,
}

impl Recorder for Rollout {
    fn admit<'a>(
        &'a self,
        caller: &'a Caller,
        request: &'a ChatRequest,
    ) -> BoxFuture<'a, Result<Admission, Refusal>> {
        Box::pin(self.admitted(caller, request))
    }

    fn seal<'a>(
        &'a self,
        admission: &'a Admission,
        request: &'a ChatRequest,
        completion: Completion,
    ) -> BoxFuture<'a, Result<TurnId, Refusal>> {
        Box::pin(self.sealed(admission, request, completion))
    }
}

impl Rollout {
    async fn admitted(&self, caller: &Caller, request: &ChatRequest) -> Result<Admission, Refusal> {
        let now = self.now();
        let (version, side_model) = self.version(caller, &request.model)?;
        let outline = Outline::of(&request.conversation);
        let placed = self.place(caller, request, &outline)?;
        let turns = (0..request.choices.max(1))
            .map(|_| self.store.next_turn_id(now))
            .collect();
        let mut admission = Admission {
            turns,
            profile: caller.profile.clone(),
            session: placed.id,
            session_source: placed.source,
            parent: None,
            kind: TurnKind::Side,
            reason: "X-Turn-Type: private".to_owned(),
            private: request.hints.kind == Some(DeclaredKind::Private),
            version,
            reuse: Err("private".to_owned()),
            arrived: now,
        };
        if admission.private {
            return Ok(admission);
        }
        self.store.health().map_err(StoreError::Dead)?;
        let session = self.live.get(&caller.profile, &admission.session)?;
        let _gate = session.gate.lock().await;
        let around = Surroundings {
            session_has_tools: session.with_turns(|turns| turns.iter().any(|t| t.has_tools)),
            session_key: caller.session.is_some(),
            unknown: self.config.unknown_clients,
        };
        (admission.kind, admission.reason) = match side_model {
            true => (TurnKind::Side, "model :side".to_owned()),
            false => kind::kind(request, around),
        };
        let parent = session.with_turns(|turns| follow::parent(turns, &outline));
        admission.parent = parent.map(|p| p.id);
        admission.reuse = match parent {
            Some(parent) => self.reuse(&session, parent, &outline)?,
            None => Err(NO_PARENT.to_owned()),
        };
        if let Some(parent) = parent
            && admission.kind == TurnKind::Main
        {
            self.append_next(&session, parent, request, &outline);
        }
        Ok(admission)
    }

    /// The version that will sample, and whether the model's name makes this a side call.
    fn version(&self, caller: &Caller, model: &str) -> Result<(PolicyVersion, bool), Refusal> {
        let profile = caller.profile.clone();
        match wanted(model, &self.engine.info().model) {
            Wanted::Served => Ok((self.engine.served(&profile), false)),
            Wanted::Base => Ok((PolicyVersion::base(profile), true)),
            Wanted::Pinned(number) => {
                let version = PolicyVersion { profile, number };
                let known = number == 0
                    || self
                        .store
                        .versions(&version.profile)?
                        .iter()
                        .any(|v| v.version == version);
                if !known {
                    return Err(Refusal::NotFound(format!(
                        "model {model}: profile {} has no version {number}",
                        version.profile
                    )));
                }
                Ok((version, false))
            }
        }
    }

    /// Session key, else claim, else the longest history shared with a recent session, else a new one.
    fn place(
        &self,
        caller: &Caller,
        request: &ChatRequest,
        outline: &Outline,
    ) -> Result<Placed, Refusal> {
        let profile = &caller.profile;
        if let Some(id) = &caller.session {
            let record = self.store.session(profile, id)?;
            if record.as_ref().is_none_or(|r| r.ended.is_some()) {
                return Err(Refusal::Gone(format!("session {id} of this key has ended")));
            }
            return Ok(Placed {
                id: id.clone(),
                source: "session key".to_owned(),
            });
        }
        if let Some(claim) = &request.hints.session {
            let id = SessionId::new(claim.id.as_str())?;
            if self.live.get(profile, &id)?.keyed() {
                return Err(Refusal::Forbidden(format!(
                    "session {id} belongs to a session key: send that key instead of its id"
                )));
            }
            return Ok(Placed {
                id,
                source: claim.source.to_owned(),
            });
        }
        let recent = self.live.recent(profile, self.config.recent_sessions)?;
        let mut best: Option<((usize, bool), SessionId)> = None;
        for (id, session) in recent {
            let shared = session.with_turns(|turns| follow::shared(turns, outline));
            // Most recently used first: of equals the first one stays.
            if let Some(shared) = shared
                && best.as_ref().is_none_or(|(s, _)| shared > *s)
                && !session.keyed()
            {
                best = Some((shared, id));
            }
        }
        match best {
            Some((_, id)) => Ok(Placed {
                id,
                source: "message prefix".to_owned(),
            }),
            None => Ok(Placed {
                id: new_session()?,
                source: "new".to_owned(),
            }),
        }
    }

    /// The parent's tokens, when the request's history is word for word the parent's.
    fn reuse(
        &self,
        session: &LiveSession,
        parent: Parent,
        outline: &Outline,
    ) -> Result<Result<ReusablePrefix, String>, Refusal> {
        let found = session.with_turns(|turns| {
            let turn = turns.iter().find(|t| t.id == parent.id)?;
            Some(follow::reusable(turn, outline).map(|messages| (messages, turn.ended)))
        });
        let (messages, ended) = match found {
            Some(Ok(found)) => found,
            Some(Err(why)) => return Ok(Err(why.to_owned())),
            None => return Ok(Err(NO_PARENT.to_owned())),
        };
        let tokens = match session.tokens(parent.id) {
            Some(tokens) => tokens.as_ref().clone(),
            None => {
                let turn = self.story(parent.id)?.turn;
                [turn.prompt.as_slice(), turn.reply.tokens()].concat()
            }
        };
        Ok(Ok(ReusablePrefix {
            messages,
            tokens,
            ended,
        }))
    }

    /// What followed the parent is written now and durable before the request is answered: sealing waits for it, so that one sync does
    /// for both.
    fn append_next(
        &self,
        session: &LiveSession,
        parent: Parent,
        request: &ChatRequest,
        outline: &Outline,
    ) {
        let begin = outline.places[parent.answer_at] + 1;
        let (turn, messages) = session.with_turns(|turns| {
            let turn = follow::addressee(turns, parent.id);
            let known = turns.iter().find(|t| t.id == turn);
            let recorded = known.map_or(&[][..], |t| t.next.as_slice());
            (
                turn,
                follow::next_messages(recorded, &request.conversation.messages[begin..]),
            )
        });
        if messages.is_empty() {
            return;
        }
        let keys: Vec<_> = messages.iter().map(normal::key).collect();
        let next = NextState { messages };
        session.follows(self.store.append(vec![Event::NextState {
            turn,
            next,
            at: self.now(),
        }]));
        session.followed(turn, keys.into_iter());
        self.wake.notify_one();
    }

    async fn sealed(
        &self,
        admission: &Admission,
        request: &ChatRequest,
        completion: Completion,
    ) -> Result<TurnId, Refusal> {
        let Some(&id) = admission.turns.get(completion.choice) else {
            let (choice, all) = (completion.choice, admission.turns.len());
            return Err(Refusal::Internal(format!(
                "choice {choice} of {all} was sealed"
            )));
        };
        if admission.private {
            return Ok(id);
        }
        let session = self.live.get(&admission.profile, &admission.session)?;
        let _gate = session.gate.lock().await;
        let mut turn = self.turn(id, admission, request, completion);
        let known = |parent| session.with_turns(|turns| turns.iter().any(|t| t.id == parent));
        if !turn.parent.is_none_or(known) {
            // The session was forgotten while this reply was sampled.
            turn.parent = None;
            turn.segment = Segment::Opened("history forgotten".to_owned());
        }
        let story = TurnStory {
            turn,
            next: None,
            mark: None,
            no_verdict: None,
            verdicts: Vec::new(),
            samples: Vec::new(),
        };
        let known = Known::of(&story);
        let superseded = session.with_turns(|turns| follow::superseded(turns, &known));
        let turn = story.turn;
        let tokens = [turn.prompt.as_slice(), turn.reply.tokens()].concat();
        // One that was let go of meanwhile counts as ended: then the store knows.
        let mut events = match session.ended() {
            true => self.reopening(admission)?,
            false => Vec::new(),
        };
        events.push(Event::Turn(Box::new(turn)));
        events.extend(superseded.iter().map(|t| Event::Mark {
            turn: *t,
            mark: TurnMark::Superseded,
        }));
        let kept = self.store.append(events);
        for write in session.pending() {
            if let Err(error) = write.await {
                // What is known of the session in memory is more than what is stored.
                self.live.remove(&admission.profile, &admission.session);
                return Err(error.into());
            }
        }
        kept.await?;
        self.wake.notify_one();
        session.reopened();
        session.add(known, tokens, &superseded);
        if request.hints.session_done && self.all_sealed(&session, admission) {
            self.done(admission).await?;
        }
        Ok(id)
    }

    fn turn(
        &self,
        id: TurnId,
        admission: &Admission,
        request: &ChatRequest,
        completion: Completion,
    ) -> Turn {
        Turn {
            id,
            profile: admission.profile.clone(),
            session: admission.session.clone(),
            parent: admission.parent,
            segment: completion.segment,
            kind: admission.kind,
            reason: admission.reason.clone(),
            version: admission.version.clone(),
            prompt: completion.prompt,
            reply: completion.reply,
            temperature: completion.temperature,
            finish: completion.finish,
            messages: request.conversation.messages.clone(),
            tools: request.conversation.tools.clone(),
            answer: completion.answer,
            created: admission.arrived,
            completed: self.now().max(admission.arrived),
        }
    }

    /// A session that ended goes on when its client does; a trainer's does not.
    fn reopening(&self, admission: &Admission) -> Result<Vec<Event>, Refusal> {
        let record = self.store.session(&admission.profile, &admission.session)?;
        Ok(match record {
            Some(record) if record.ended.is_some() && record.key_hash.is_none() => {
                let last_active = self.now();
                vec![Event::SessionOpened(SessionRecord {
                    ended: None,
                    last_active,
                    ..record
                })]
            }
            _ => Vec::new(),
        })
    }

    fn all_sealed(&self, session: &LiveSession, admission: &Admission) -> bool {
        session.with_turns(|turns| {
            admission
                .turns
                .iter()
                .all(|id| turns.iter().any(|t| t.id == *id))
        })
    }

    /// `X-Session-Done`.
    async fn done(&self, admission: &Admission) -> Result<(), Refusal> {
        let record = self.store.session(&admission.profile, &admission.session)?;
        if let Some(record) = record.filter(|r| r.ended.is_none()) {
            self.end(&record, "client").await?;
        }
        Ok(())
    }
}

fn new_session() -> Result<SessionId, Refusal> {
    let mut bytes = [0u8; 12];
    getrandom::fill(&mut bytes)
        .map_err(|e| Refusal::Internal(format!("no random numbers for a session id: {e}")))?;
    Ok(SessionId::new(format!("s-{}", hex::encode(bytes)))?)
}

#[cfg(test)]
mod unit {
    use super::*;

    #[test]
    fn model_names() {
        assert_eq!(wanted("m", "m"), Wanted::Served);
        assert_eq!(wanted("m:side", "m"), Wanted::Base);
        assert_eq!(wanted("m@3", "m"), Wanted::Pinned(3));
        assert_eq!(wanted("m@0", "m"), Wanted::Pinned(0));
        assert_eq!(wanted("other@3", "m"), Wanted::Served);
        assert_eq!(wanted("m@x", "m"), Wanted::Served);
    }
}
