//! Forgetting: what would go, and then its going, with the versions that learnt from it.

use crate::rollout::{Rollout, unknown_session};
use chela_core::{
    Caller, Forget, ForgetPlan, ForgetRequest, ForgetTarget, Forgetting, PolicyVersion, Profile,
    Refusal, Scope, StoreError, VersionRecord,
    registry::{self, Undo},
};
use std::{collections::HashSet, time::Duration};

/// How often it is tried again while samples of it are in a step that is being made, and the pause between.
const TRIES: usize = 60;
const PAUSE: Duration = Duration::from_secs(1);

impl Rollout {
    pub(super) async fn forgotten(
        &self,
        caller: &Caller,
        what: ForgetRequest,
        dry: bool,
    ) -> Result<Forgetting, Refusal> {
        let target = self.target(caller, what)?;
        let profile = target.profile().clone();
        for _ in 0..TRIES {
            // Held for one try only: an operator's rollback must not wait for a step that is being made.
            let one_at_a_time = self.steering.lock().await;
            let (mut forgetting, versions) = self.would_go(&target)?;
            if dry {
                return Ok(forgetting);
            }
            let forget = Forget {
                target: target.clone(),
                why: reason(&target),
                versions: forgetting.undo.versions.clone(),
                back_to: forgetting.undo.back_to,
                replay: forgetting.undo.replay.clone(),
                at: self.now(),
            };
            match self.store.forget(forget).await {
                Ok(proof) => {
                    // Whatever was published meanwhile: users get what the registry says.
                    self.serve_recorded(&profile)?;
                    forgetting.proof = Some(proof);
                    self.let_go(&profile, &forgetting, &versions);
                    if matches!(target, ForgetTarget::Profile(_)) {
                        self.delete_metrics(&profile);
                    }
                    return Ok(forgetting);
                }
                // A step with samples of it is being made, or was finished since the plan.
                Err(StoreError::Conflict(_)) => {}
                Err(error) => return Err(error.into()),
            }
            drop(one_at_a_time);
            tokio::time::sleep(PAUSE).await;
        }
        Err(Refusal::Conflict(
            "steps with samples of it are being made; nothing was forgotten, try again in a moment"
                .to_owned(),
        ))
    }

    /// What the caller may forget.
    fn target(&self, caller: &Caller, what: ForgetRequest) -> Result<ForgetTarget, Refusal> {
        if caller.session.is_some() {
            return Err(Refusal::Forbidden(
                "a session key cannot forget its session".to_owned(),
            ));
        }
        match what {
            ForgetRequest::Turn(id) => {
                super::may_see(caller)?;
                let story = self.own_turn(caller, id)?;
                Ok(ForgetTarget::Turn(story.turn.profile, id))
            }
            ForgetRequest::Session(id, Some(profile)) if caller.scope == Scope::Admin => {
                let record = self.store.session(&profile, &id)?;
                let record = record.ok_or_else(|| unknown_session(&id))?;
                Ok(ForgetTarget::Session(record.profile, record.id))
            }
            ForgetRequest::Session(_, Some(profile)) if profile != caller.profile => {
                Err(Refusal::Forbidden(
                    "forgetting another profile's session needs the admin key".to_owned(),
                ))
            }
            ForgetRequest::Session(id, _) => {
                let record = self.visible_session(caller, &id)?;
                Ok(ForgetTarget::Session(record.profile, record.id))
            }
            ForgetRequest::Profile(_) if caller.scope < Scope::Admin => Err(Refusal::Forbidden(
                "forgetting a whole profile needs the admin key".to_owned(),
            )),
            ForgetRequest::Profile(profile) => Ok(ForgetTarget::Profile(profile)),
        }
    }

    fn would_go(&self, target: &ForgetTarget) -> Result<(Forgetting, Vec<VersionRecord>), Refusal> {
        let profile = target.profile();
        let plan = self.store.plan_forget(target)?;
        let versions = self.store.versions(profile)?;
        let undo = match target {
            ForgetTarget::Profile(_) => Undo {
                versions: versions.iter().map(|v| v.version.number).collect(),
                back_to: registry::served(&versions).map(|_| 0),
                replay: Vec::new(),
            },
            _ => registry::undo(&versions, &plan.trained),
        };
        let (samples_again, seconds) = cost(&plan, &undo, &versions);
        let forgetting = Forgetting {
            profile: profile.clone(),
            plan,
            undo,
            samples_again,
            seconds,
            learning: self.config.learning,
            proof: None,
        };
        Ok((forgetting, versions))
    }

    /// Memory and files: sessions at hand, remembered words, cached prefixes, adapters.
    fn let_go(&self, profile: &Profile, forgetting: &Forgetting, versions: &[VersionRecord]) {
        self.live.remove_profile(profile);
        self.chat.forget_words();
        self.engine.forget_texts(profile);
        for record in versions {
            if !forgetting.undo.versions.contains(&record.version.number) {
                continue;
            }
            self.engine.unload(&record.version);
            let Some(name) = &record.checkpoint else {
                continue;
            };
            let dir = self.config.data_dir.join(name);
            // What stays is deleted at the next start: no version names it any more.
            if let Err(error) = std::fs::remove_dir_all(&dir)
                && dir.exists()
            {
                tracing::error!(path = %dir.display(), %error, "cannot delete a forgotten version's files");
            }
        }
        self.wake.notify_one();
    }

    /// The files with the figures of a profile's steps. What stays is deleted before the profile's next figures are written.
    fn delete_metrics(&self, profile: &Profile) {
        let dir = self.config.data_dir.join(registry::METRICS);
        let gone = std::fs::remove_dir_all(dir.join(profile.as_str())).or_else(gone_already);
        if let Err(error) = gone {
            tracing::error!(path = %dir.display(), %error, "cannot delete the figures of a forgotten profile");
        }
    }

    /// The pointer as the registry has it.
    fn serve_recorded(&self, profile: &Profile) -> Result<(), Refusal> {
        let number = registry::served_number(&self.store.versions(profile)?);
        Ok(self.engine.serve(&version(profile, number))?)
    }
}

fn gone_already(error: std::io::Error) -> std::io::Result<()> {
    match error.kind() {
        std::io::ErrorKind::NotFound => Ok(()),
        _ => Err(error),
    }
}

fn version(profile: &Profile, number: u64) -> PolicyVersion {
    PolicyVersion {
        profile: profile.clone(),
        number,
    }
}

/// As the versions' state will say it; no word of what is forgotten.
fn reason(target: &ForgetTarget) -> String {
    match target {
        ForgetTarget::Turn(_, id) => format!("it learnt from {id}, which was forgotten"),
        // A session's name may hold a person's words.
        ForgetTarget::Session(..) => "it learnt from a session that was forgotten".to_owned(),
        ForgetTarget::Profile(_) => "its profile was forgotten".to_owned(),
    }
}

/// Samples that are trained on again, and how long that takes if it takes as long as before.
fn cost(plan: &ForgetPlan, undo: &Undo, versions: &[VersionRecord]) -> (u64, f64) {
    let gone: HashSet<_> = plan.trained.iter().map(|(id, _)| *id).collect();
    let (mut samples, mut seconds) = (0, 0.0);
    for record in versions {
        if !undo.replay.contains(&record.version.number) {
            continue;
        }
        let left = record
            .samples
            .iter()
            .filter(|id| !gone.contains(id))
            .count();
        let took = record.metrics.iter().find(|(name, _)| name == "seconds");
        let took = took.map_or(0.0, |(_, s)| *s);
        samples += left as u64;
        seconds += took * left as f64 / record.samples.len().max(1) as f64;
    }
    // One look at what comes out.
    let gates = versions.iter().filter_map(|v| v.gate.as_ref());
    let gate = gates.map(|g| g.seconds).next_back().unwrap_or(0.0);
    let gate = if undo.replay.is_empty() { 0.0 } else { gate };
    (samples, seconds + gate)
}
