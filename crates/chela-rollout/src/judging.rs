//! The loop: turns whose next state came are judged, verdicts become samples, silent sessions end.

use crate::{
    rollout::{Rollout, says_something},
    session::live::locked,
    validators::{self, Finding},
};
use chela_core::{
    BoxFuture, Event, FinishReason, Judge, JudgeCase, JudgeError, OpenVerdict, StoreError, TurnId,
    TurnKind, TurnStory, Verdict, VerdictId,
};
use futures_util::{StreamExt, stream::FuturesUnordered};
use std::{
    collections::{BTreeSet, HashMap, HashSet},
    future::Future,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tokio::time::Instant;

/// Calls of one judge on one turn before it counts as down: one and two retries.
const TRIES: u32 = 3;
/// From an announcement to a look.
const GATHER: Duration = Duration::from_millis(10);
/// Longest pause of a turn whose judge is down.
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

/// What a finished piece of work was.
enum Done {
    Judged(TurnId, Outcome),
    Settled(VerdictId, TurnId, bool),
    Canary,
}

/// How judging a turn went.
enum Outcome {
    /// Written.
    Settled,
    /// A judge or the store failed: try again later.
    Delayed,
}

/// What the loop remembers between two rounds; nothing of it is needed after a restart.
#[derive(Default)]
struct Work {
    judging: HashSet<TurnId>,
    settling: HashSet<TurnId>,
    /// Verdicts that wait for a restart.
    stuck: HashSet<VerdictId>,
    pauses: HashMap<TurnId, (u32, Instant)>,
    /// A canary is before the judges: one at a time, so that real turns wait for no more than that.
    canary: bool,
}

impl Rollout {
    /// Judges, makes samples and ends idle sessions until `shutdown` resolves. What is unfinished then is found again at the next
    /// start.
    pub async fn run(self: Arc<Self>, shutdown: impl Future<Output = ()>) {
        let mut shutdown = std::pin::pin!(shutdown);
        let mut tick = tokio::time::interval(self.config.tick.max(Duration::from_millis(1)));
        let mut running: FuturesUnordered<BoxFuture<'_, Done>> = FuturesUnordered::new();
        let mut work = Work::default();
        loop {
            if self.config.learning
                && let Err(error) = self.begin(&mut work, &mut running)
            {
                tracing::error!("reading what is to be judged: {error}");
            }
            tokio::select! {
                () = &mut shutdown => return,
                _ = tick.tick() => self.look_after().await,
                // What was announced is on its way to the disk, and more may come at once.
                () = self.wake.notified() => tokio::time::sleep(GATHER).await,
                Some(done) = running.next(), if !running.is_empty() => self.finish(&mut work, done),
            }
        }
    }

    /// Fills the free places: verdicts first, they are nearer to a sample.
    fn begin<'a>(
        &'a self,
        work: &mut Work,
        running: &mut FuturesUnordered<BoxFuture<'a, Done>>,
    ) -> Result<(), StoreError> {
        let most = self.config.max_concurrent.max(1);
        let free = most.saturating_sub(work.settling.len());
        if free > 0 {
            let known = work.settling.len() + work.stuck.len();
            for open in self.store.open_verdicts(known + free + most)? {
                // One verdict of a turn at a time, in their order.
                if work.settling.len() == most {
                    break;
                }
                if work.stuck.contains(&open.id) || !work.settling.insert(open.turn.id) {
                    continue;
                }
                running.push(Box::pin(self.settled(open)));
            }
        }
        let now = Instant::now();
        // What is not asked about again was settled elsewhere or forgotten.
        work.pauses
            .retain(|_, (_, until)| *until + 2 * LONGEST_PAUSE > now);
        for turn in self.waiting(work)? {
            if work.judging.len() >= most {
                break;
            }
            let paused = work
                .pauses
                .get(&turn)
                .is_some_and(|(_, until)| *until > now);
            if paused || !work.judging.insert(turn) {
                continue;
            }
            self.judging.fetch_add(1, Ordering::Relaxed);
            running.push(Box::pin(async move {
                Done::Judged(turn, self.judged(turn).await)
            }));
        }
        if !work.canary
            && let Some(turn) = self.canaries.next()
        {
            work.canary = true;
            running.push(Box::pin(async move {
                self.canary(turn).await;
                Done::Canary
            }));
        }
        Ok(())
    }

    fn waiting(&self, work: &Work) -> Result<Vec<TurnId>, StoreError> {
        let again: BTreeSet<TurnId> = locked(&self.again).clone();
        let limit = work.judging.len() + work.pauses.len() + self.config.max_concurrent.max(1);
        let new = self.store.unjudged(limit)?;
        Ok(again.into_iter().chain(new).collect())
    }

    async fn settled(&self, open: OpenVerdict) -> Done {
        let settled = self.settle(&open).await.unwrap_or_else(|error| {
            tracing::error!(turn = %open.turn.id, "making a sample: {error}");
            false
        });
        Done::Settled(open.id, open.turn.id, settled)
    }

    fn finish(&self, work: &mut Work, done: Done) {
        match done {
            Done::Canary => work.canary = false,
            Done::Settled(verdict, turn, settled) => {
                work.settling.remove(&turn);
                if !settled {
                    work.stuck.insert(verdict);
                }
            }
            Done::Judged(turn, outcome) => {
                self.judging.fetch_sub(1, Ordering::Relaxed);
                work.judging.remove(&turn);
                match outcome {
                    Outcome::Settled => {
                        work.pauses.remove(&turn);
                        locked(&self.again).remove(&turn);
                    }
                    Outcome::Delayed => {
                        let times = work.pauses.get(&turn).map_or(0, |(n, _)| *n);
                        let pause = self
                            .config
                            .judge_backoff
                            .saturating_mul(2u32.pow(times.min(10)));
                        let until = Instant::now() + pause.min(LONGEST_PAUSE);
                        work.pauses.insert(turn, (times + 1, until));
                    }
                }
            }
        }
    }

    /// Judges one turn and writes what came out.
    async fn judged(&self, turn: TurnId) -> Outcome {
        let result = async {
            let Some(story) = self.store.story(turn)? else {
                return Ok(Outcome::Settled);
            };
            let events = match self.verdict(&story).await {
                Ok(verdict) => self.verdict_events(turn, verdict),
                Err(()) => return Ok(Outcome::Delayed),
            };
            self.store.append(events).await?;
            Ok::<_, StoreError>(Outcome::Settled)
        };
        result.await.unwrap_or_else(|error| {
            tracing::error!(%turn, "judging: {error}");
            Outcome::Delayed
        })
    }

    fn verdict_events(&self, turn: TurnId, verdict: Result<Verdict, String>) -> Vec<Event> {
        let verdict = match verdict {
            Ok(verdict) => verdict,
            Err(why) => return vec![Event::NoVerdict { turn, why }],
        };
        let (id, at) = (self.store.next_verdict_id(), self.now());
        let void = verdict.reward.is_none() && verdict.hints.is_empty();
        let mut events = vec![Event::Verdict {
            turn,
            id,
            verdict: Box::new(verdict),
            at,
        }];
        if void {
            // The votes are kept for whoever wants to know why.
            events.push(Event::NoSample {
                verdict: id,
                why: "no valid vote".to_owned(),
            });
        }
        events
    }

    /// Validators, then judges in order. Inner `Err` = there will be no verdict, and why; outer = not now.
    async fn verdict(&self, story: &TurnStory) -> Result<Result<Verdict, String>, ()> {
        if self.config.frozen.contains(&story.turn.profile) {
            return Ok(Err("this profile never learns".to_owned()));
        }
        let case = case(story);
        let reply = (story.turn.finish, story.turn.reply.len());
        let cut = match validators::validate(&case, reply, self.config.truncated) {
            Finding::Verdict(verdict) if story.turn.finish == FinishReason::Length => Some(verdict),
            Finding::Verdict(verdict) => return Ok(Ok(*verdict)),
            Finding::None(why) => return Ok(Err(why.to_owned())),
            Finding::Ask => None,
        };
        if let Some(mut certain) = cut {
            // A cut reply is bad whatever is said of it, but the words that follow are still a hint.
            if let Ok(said) = self.heard(&case).await? {
                certain.hints = said.hints;
                certain.evidence = said.evidence;
                certain.votes = said.votes;
            }
            return Ok(Ok(*certain));
        }
        self.heard(&case).await
    }

    /// The judges in order; the first with a verdict wins.
    async fn heard(&self, case: &JudgeCase) -> Result<Result<Verdict, String>, ()> {
        if self.judges.is_empty() {
            return Ok(Err("no judge is configured".to_owned()));
        }
        let mut void = None;
        for judge in &self.judges {
            match self.asked(judge.as_ref(), case).await? {
                Some(verdict) if says_something(&verdict) => {
                    self.canaries.judged(case.turn);
                    return Ok(Ok(verdict));
                }
                Some(nothing) => void = void.or(Some(nothing)),
                None => {}
            }
        }
        self.canaries.judged(case.turn);
        Ok(void.ok_or_else(|| "no judge had anything to say".to_owned()))
    }

    /// One judge, with a time limit and two retries. A judge that is down gives no verdict and no score.
    async fn asked(&self, judge: &dyn Judge, case: &JudgeCase) -> Result<Option<Verdict>, ()> {
        let limit = self.config.judge_timeout;
        let mut last = JudgeError::Timeout(u64::try_from(limit.as_millis()).unwrap_or(u64::MAX));
        for _ in 0..TRIES {
            match tokio::time::timeout(limit, judge.judge(case)).await {
                Ok(Ok(verdict)) => {
                    self.note_answer(judge.name(), verdict.as_ref());
                    return Ok(verdict);
                }
                Ok(Err(error)) => last = error,
                Err(_) => {}
            }
            self.note_failure(judge.name(), &last.to_string());
        }
        tracing::warn!(judge = judge.name(), turn = %case.turn, "no verdict yet: {last}");
        Err(())
    }

    /// Ends silent sessions and keeps the backlog bounded.
    async fn look_after(&self) {
        let idle = i64::try_from(self.config.session_idle.as_millis()).unwrap_or(i64::MAX);
        let since = self.now().saturating_sub(idle);
        let result = async {
            for record in self.store.idle_sessions(since)? {
                self.end(&record, "idle").await?;
            }
            if self.config.learning {
                self.bound_backlog().await?;
                self.heed_canaries().await?;
            }
            Ok::<_, StoreError>(())
        };
        if let Err(error) = result.await {
            tracing::error!("looking after sessions: {error}");
        }
    }

    async fn bound_backlog(&self) -> Result<(), StoreError> {
        let waiting = self
            .store
            .unjudged(self.config.max_backlog.saturating_add(1000))?;
        let surplus = waiting.len().saturating_sub(self.config.max_backlog);
        if surplus == 0 {
            return Ok(());
        }
        tracing::warn!(
            surplus,
            "giving up the oldest turns: the judges are too slow"
        );
        let why = "the backlog of the judges is full";
        let given_up = waiting.into_iter().take(surplus);
        let events = given_up.map(|turn| Event::NoVerdict {
            turn,
            why: why.to_owned(),
        });
        self.store.append(events.collect()).await
    }

    /// Has a turn judged although it was judged before.
    pub(crate) fn judge_again(&self, story: &TurnStory) {
        let before = !story.verdicts.is_empty() || story.no_verdict.is_some();
        if before && story.turn.kind == TurnKind::Main && story.mark.is_none() {
            locked(&self.again).insert(story.turn.id);
        }
    }
}

/// What a judge reads of a turn.
fn case(story: &TurnStory) -> JudgeCase {
    let turn = &story.turn;
    JudgeCase {
        turn: turn.id,
        profile: turn.profile.clone(),
        session: turn.session.clone(),
        messages: turn.messages.clone(),
        tools: turn.tools.clone(),
        answer: turn.answer.clone(),
        truncated: turn.finish == FinishReason::Length,
        next: story.next.clone().unwrap_or_default(),
    }
}
