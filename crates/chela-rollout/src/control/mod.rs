//! What the API's learning routes ask. Who owns what is checked here.

mod feedback;
mod forget;
mod import;
mod lessons;
mod policy;
mod sessions;

pub use sessions::session_key_hash;

use crate::{
    export,
    rollout::{Rollout, unknown_turn},
};
use chela_core::{
    BoxFuture, Caller, ControlPlane, ExportRow, ExportStyle, Feedback, ForgetRequest, Forgetting,
    Lesson, PolicyAction, PolicyDiff, PolicyView, Profile, Refusal, Scope, SessionId,
    SessionRecord, StatusView, TurnId, TurnStory,
};
use std::path::PathBuf;

impl ControlPlane for Rollout {
    fn feedback<'a>(
        &'a self,
        caller: &'a Caller,
        feedback: Feedback,
    ) -> BoxFuture<'a, Result<(TurnId, Option<f32>), Refusal>> {
        Box::pin(self.take_feedback(caller, feedback))
    }

    fn start_session(
        &self,
        profile: Profile,
        task: Option<String>,
        key: Option<String>,
    ) -> BoxFuture<'_, Result<(SessionId, String), Refusal>> {
        Box::pin(self.start(profile, task, key))
    }

    fn set_reward<'a>(
        &'a self,
        caller: &'a Caller,
        reward: f32,
        turn: Option<TurnId>,
    ) -> BoxFuture<'a, Result<TurnId, Refusal>> {
        Box::pin(self.reward(caller, reward, turn))
    }

    fn end_session<'a>(&'a self, caller: &'a Caller) -> BoxFuture<'a, Result<u64, Refusal>> {
        Box::pin(self.end_own(caller))
    }

    fn export(
        &self,
        session: &SessionId,
        discount: f32,
        style: ExportStyle,
    ) -> Result<Vec<ExportRow>, Refusal> {
        if !(0.0..=1.0).contains(&discount) {
            return Err(Refusal::Invalid {
                field: "discount".to_owned(),
                message: format!("{discount} must be from 0 to 1"),
            });
        }
        let record = self.find_session(None, session)?;
        let stories = self.store.session_stories(&record.profile, &record.id)?;
        Ok(export::rows(&stories, discount, style))
    }

    fn sessions(&self, caller: &Caller, limit: usize) -> Result<Vec<SessionRecord>, Refusal> {
        self.visible_sessions(caller, limit)
    }

    fn session(
        &self,
        caller: &Caller,
        session: &SessionId,
    ) -> Result<(SessionRecord, Vec<TurnStory>), Refusal> {
        let record = self.visible_session(caller, session)?;
        let stories = self.store.session_stories(&record.profile, &record.id)?;
        Ok((record, stories))
    }

    fn turn(&self, caller: &Caller, turn: TurnId) -> Result<TurnStory, Refusal> {
        let story = self.own_turn(caller, turn)?;
        // What a session key did before a refresh it may score, not go on with.
        match &caller.session {
            Some(own) if *own != story.turn.session => Err(unknown_turn(turn)),
            _ => Ok(story),
        }
    }

    fn end_named<'a>(
        &'a self,
        caller: &'a Caller,
        session: &'a SessionId,
    ) -> BoxFuture<'a, Result<(), Refusal>> {
        Box::pin(self.ended(caller, session))
    }

    fn withdraw<'a>(
        &'a self,
        caller: &'a Caller,
        turn: TurnId,
    ) -> BoxFuture<'a, Result<(), Refusal>> {
        Box::pin(self.withdrawn(caller, turn))
    }

    fn forget<'a>(
        &'a self,
        caller: &'a Caller,
        what: ForgetRequest,
        dry: bool,
    ) -> BoxFuture<'a, Result<Forgetting, Refusal>> {
        Box::pin(self.forgotten(caller, what, dry))
    }

    fn lessons(&self, profile: &Profile, version: u64) -> Result<Vec<Lesson>, Refusal> {
        self.lessons_of(profile, version)
    }

    fn adapter(&self, profile: &Profile, version: u64) -> Result<PathBuf, Refusal> {
        self.adapter_dir(profile, version)
    }

    fn diff(
        &self,
        profile: Profile,
        from: u64,
        to: u64,
    ) -> BoxFuture<'_, Result<PolicyDiff, Refusal>> {
        Box::pin(self.difference(profile, from, to))
    }

    fn policy(&self, profile: &Profile) -> Result<PolicyView, Refusal> {
        self.policy_view(profile)
    }

    fn steer(
        &self,
        profile: Profile,
        action: PolicyAction,
    ) -> BoxFuture<'_, Result<PolicyView, Refusal>> {
        Box::pin(self.steered(profile, action))
    }

    fn status(&self, caller: &Caller) -> Result<StatusView, Refusal> {
        self.status_view(caller)
    }

    fn health(&self) -> Result<(), String> {
        self.store.health()?;
        self.engine.health()
    }
}

/// Session keys reach their session only; chat keys see and score nothing.
pub(crate) fn may_see(caller: &Caller) -> Result<(), Refusal> {
    if caller.session.is_none() && caller.scope < Scope::Feedback {
        return Err(Refusal::Forbidden(
            "this key may only chat; use one of scope feedback".to_owned(),
        ));
    }
    Ok(())
}
