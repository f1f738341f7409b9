//! Explicit feedback: scores, remarks, corrections, rewards of trainers. Durable when it returns.

use crate::{
    control::may_see,
    credit,
    rollout::{Rollout, unknown_turn},
    samples,
    session::follow::REMARK,
};
use chela_core::{
    Caller, Event, Feedback, FeedbackTarget, Group, Message, NextState, Refusal, SampleState,
    Scope, SessionId, SessionRecord, TurnId, TurnKind, TurnStory, Verdict, VerdictSource,
};

/// Said before a correction, so that a teacher knows what it reads.
const EDITED: &str = "The reply should have been like this:\n";

fn invalid(field: &str, message: impl Into<String>) -> Refusal {
    Refusal::Invalid {
        field: field.to_owned(),
        message: message.into(),
    }
}

impl Rollout {
    pub(super) async fn take_feedback(
        &self,
        caller: &Caller,
        feedback: Feedback,
    ) -> Result<(TurnId, Option<f32>), Refusal> {
        may_see(caller)?;
        let said = |text: Option<String>| text.filter(|t| !t.trim().is_empty());
        let (score, text, edited) = (feedback.score, said(feedback.text), said(feedback.edited));
        if score.is_none() && text.is_none() && edited.is_none() {
            return Err(invalid(
                "score",
                "send at least one of score, text and edited",
            ));
        }
        if let Some(score) = score.filter(|s| !s.is_finite()) {
            return Err(invalid("score", format!("{score} must be a finite number")));
        }
        let group = feedback.group;
        if group.is_some() && score.is_none() {
            return Err(invalid("group", "a reply in a group needs a score"));
        }
        let story = match feedback.target {
            FeedbackTarget::Turn(turn) => self.own_turn(caller, turn)?,
            FeedbackTarget::Session(id) => {
                let record = self.visible_session(caller, &id)?;
                self.last_completed(&record)?
            }
        };
        let turn = story.turn.id;
        // Without this a group would wait for a reply that cannot come.
        if group.is_some()
            && let Some(why) = samples::never(&story.turn, &self.config)
        {
            return Err(invalid("group", format!("{turn} never trains: {why}")));
        }
        let remarked = text.is_some();
        let events = self.feedback_events(&story, (score, group), text, edited);
        self.store.append(events).await?;
        if remarked && score.is_none() {
            self.judge_again(&story);
        }
        self.wake.notify_one();
        Ok((turn, credit::standing_reward(&self.story(turn)?)))
    }

    fn feedback_events(
        &self,
        story: &TurnStory,
        (score, group): (Option<f32>, Option<Group>),
        text: Option<String>,
        edited: Option<String>,
    ) -> Vec<Event> {
        let (turn, at) = (story.turn.id, self.now());
        let mut events = Vec::new();
        if let Some(text) = &text {
            let remark = Message {
                name: Some(REMARK.to_owned()),
                ..Message::user(text)
            };
            let next = NextState {
                messages: vec![remark],
            };
            events.push(Event::NextState { turn, next, at });
        }
        if score.is_some() || edited.is_some() {
            // The complaint in the user's own words teaches why the score is bad.
            let complaint = text.clone().filter(|_| score.is_some_and(|s| s < 0.0));
            let correction = edited.map(|e| format!("{EDITED}{}", e.trim()));
            let verdict = Verdict {
                judge: "feedback".to_owned(),
                source: VerdictSource::Explicit,
                reward: score,
                hints: correction.into_iter().chain(complaint).collect(),
                evidence: text,
                votes: Vec::new(),
                group,
            };
            let id = self.store.next_verdict_id();
            events.push(Event::Verdict {
                turn,
                id,
                verdict: Box::new(verdict),
                at,
            });
        }
        events
    }

    pub(super) async fn reward(
        &self,
        caller: &Caller,
        reward: f32,
        turn: Option<TurnId>,
    ) -> Result<TurnId, Refusal> {
        if !reward.is_finite() {
            return Err(invalid(
                "reward",
                format!("{reward} must be a finite number"),
            ));
        }
        let record = self.own_session(caller)?;
        let story = match turn {
            Some(turn) => {
                let story = self.own_turn(caller, turn).map_err(|error| match error {
                    Refusal::NotFound(why) => invalid("interaction_id", why),
                    other => other,
                })?;
                if trained(&story) {
                    return Err(Refusal::Gone(format!("{turn} was trained on already")));
                }
                story
            }
            None if record.ended.is_some() => {
                return Err(Refusal::Gone(format!("session {} has ended", record.id)));
            }
            None => self.last_completed(&record).map_err(|error| match error {
                Refusal::NotFound(why) => invalid("reward", why),
                other => other,
            })?,
        };
        let verdict = Verdict {
            judge: "reward".to_owned(),
            source: VerdictSource::Explicit,
            reward: Some(reward),
            hints: Vec::new(),
            evidence: None,
            votes: Vec::new(),
            group: None,
        };
        let (turn, at) = (story.turn.id, self.now());
        let id = self.store.next_verdict_id();
        let event = Event::Verdict {
            turn,
            id,
            verdict: Box::new(verdict),
            at,
        };
        self.store.append(vec![event]).await?;
        self.wake.notify_one();
        Ok(turn)
    }

    /// A turn that is the caller's: it may score it.
    pub(super) fn own_turn(&self, caller: &Caller, turn: TurnId) -> Result<TurnStory, Refusal> {
        let story = self.story(turn)?;
        let admin = caller.scope == Scope::Admin && caller.session.is_none();
        let same_profile = story.turn.profile == caller.profile;
        let reachable = match &caller.session {
            Some(own) => self.under_same_key(caller, own, &story.turn.session)?,
            None => true,
        };
        if admin || (same_profile && reachable) {
            Ok(story)
        } else {
            Err(unknown_turn(turn))
        }
    }

    /// A session key may still score what it did in sessions before a refresh.
    fn under_same_key(
        &self,
        caller: &Caller,
        own: &SessionId,
        session: &SessionId,
    ) -> Result<bool, Refusal> {
        if own == session {
            return Ok(true);
        }
        let hash = |id| {
            let record = self.store.session(&caller.profile, id);
            record.map(|r| r.and_then(|r| r.key_hash))
        };
        let own = hash(own)?;
        Ok(own.is_some() && own == hash(session)?)
    }

    fn last_completed(&self, record: &SessionRecord) -> Result<TurnStory, Refusal> {
        let stories = self.store.session_stories(&record.profile, &record.id)?;
        stories
            .into_iter()
            .filter(|s| s.turn.kind == TurnKind::Main && s.turn.is_complete() && s.mark.is_none())
            .max_by_key(|s| s.turn.id)
            .ok_or_else(|| {
                Refusal::NotFound(format!(
                    "session {} has no completed main turn yet",
                    record.id
                ))
            })
    }
}

fn trained(story: &TurnStory) -> bool {
    story
        .samples
        .iter()
        .any(|(.., state)| matches!(state, SampleState::Consumed(_)))
}
