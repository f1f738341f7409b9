//! Sessions: started under a key, ended, listed, forgotten.

use crate::{
    control::may_see,
    rollout::{Rollout, unknown_session},
};
use chela_core::{
    Caller, Event, Profile, Refusal, SampleState, Scope, SessionId, SessionRecord, TurnId, TurnMark,
};
use sha2::{Digest, Sha256};

const KEY_ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
/// Random characters of a session key: 258 bits.
const KEY_LENGTH: usize = 43;

/// SHA-256 of a key in hex: what is stored of it.
pub fn session_key_hash(key: &str) -> String {
    hex::encode(Sha256::digest(key.as_bytes()))
}

fn random_text(length: usize) -> Result<String, Refusal> {
    let mut bytes = vec![0u8; length];
    getrandom::fill(&mut bytes)
        .map_err(|e| Refusal::Internal(format!("no random numbers for a key: {e}")))?;
    Ok(bytes
        .iter()
        .map(|b| char::from(KEY_ALPHABET[usize::from(b & 63)]))
        .collect())
}

impl Rollout {
    pub(super) async fn start(
        &self,
        profile: Profile,
        task: Option<String>,
        key: Option<String>,
    ) -> Result<(SessionId, String), Refusal> {
        let key = match key {
            None => format!("sk-sess-{}", random_text(KEY_LENGTH)?),
            Some(key) if key.trim() == key && key.len() >= 16 => key,
            Some(_) => {
                return Err(Refusal::Invalid {
                    field: "api_key".to_owned(),
                    message: "send the key of the session before, or none for a new one; a key has at least 16 characters and no spaces around it".to_owned(),
                });
            }
        };
        let hash = session_key_hash(&key);
        let name = task.as_deref().filter(|t| !t.is_empty()).unwrap_or("rl");
        let name: String = name.chars().filter(|c| !c.is_control()).take(200).collect();
        let id = SessionId::new(format!("{name}-{}", random_text(12)?))?;
        let now = self.now();
        let record = SessionRecord {
            profile,
            id: id.clone(),
            key_hash: Some(hash.clone()),
            task,
            opened: now,
            last_active: now,
            ended: None,
            turns: 0,
        };
        // Both or neither: a refresh that fails leaves the old session live under its key, and can be tried again.
        let old = self
            .store
            .session_by_key(&hash)?
            .filter(|r| r.ended.is_none());
        let mut events = match &old {
            Some(old) => self.ending(old, "refreshed")?,
            None => Vec::new(),
        };
        events.push(Event::SessionOpened(record));
        self.store.append(events).await?;
        if let Some(old) = old {
            self.live.remove(&old.profile, &old.id);
            self.wake.notify_one();
        }
        Ok((id, key))
    }

    /// The live session of the caller's session key.
    pub(super) fn own_session(&self, caller: &Caller) -> Result<SessionRecord, Refusal> {
        let Some(id) = &caller.session else {
            return Err(Refusal::Forbidden(
                "this needs a session key, as POST /rl/start_session gives".to_owned(),
            ));
        };
        let record = self
            .store
            .session(&caller.profile, id)?
            .ok_or_else(|| Refusal::Gone(format!("session {id} of this key is forgotten")))?;
        Ok(record)
    }

    pub(super) async fn end_own(&self, caller: &Caller) -> Result<u64, Refusal> {
        let record = self.own_session(caller)?;
        if record.ended.is_some() {
            return Err(Refusal::Gone(format!("session {} has ended", record.id)));
        }
        self.end(&record, "client").await?;
        Ok(record.turns)
    }

    pub(super) fn visible_sessions(
        &self,
        caller: &Caller,
        limit: usize,
    ) -> Result<Vec<SessionRecord>, Refusal> {
        may_see(caller)?;
        if caller.session.is_some() {
            return Ok(vec![self.own_session(caller)?]);
        }
        let profile = (caller.scope < Scope::Admin).then_some(&caller.profile);
        Ok(self.store.sessions(profile, limit)?)
    }

    /// A session that the caller may see. What belongs to others is as unknown as what is not there.
    pub(super) fn visible_session(
        &self,
        caller: &Caller,
        id: &SessionId,
    ) -> Result<SessionRecord, Refusal> {
        may_see(caller)?;
        if caller.session.as_ref().is_some_and(|own| own != id) {
            return Err(unknown_session(id));
        }
        if caller.scope == Scope::Admin && caller.session.is_none() {
            return self.find_session(Some(&caller.profile), id);
        }
        self.store
            .session(&caller.profile, id)?
            .ok_or_else(|| unknown_session(id))
    }

    pub(super) async fn ended(&self, caller: &Caller, id: &SessionId) -> Result<(), Refusal> {
        let record = self.visible_session(caller, id)?;
        match record.ended {
            Some(_) => Ok(()),
            None => Ok(self.end(&record, "client").await?),
        }
    }

    pub(super) async fn withdrawn(&self, caller: &Caller, turn: TurnId) -> Result<(), Refusal> {
        let story = self.own_turn(caller, turn)?;
        let mut events = vec![Event::Mark {
            turn,
            mark: TurnMark::Withdrawn,
        }];
        match story.samples.last() {
            Some((id, _, SampleState::Pending)) => events.push(Event::Dropped {
                samples: vec![*id],
                why: "withdrawn".to_owned(),
            }),
            Some((_, _, SampleState::Leased)) => {
                return Err(Refusal::Conflict(format!(
                    "turn {turn} is in a step being made; try again in a moment"
                )));
            }
            _ => {}
        }
        self.store.append(events).await?;
        Ok(())
    }
}
