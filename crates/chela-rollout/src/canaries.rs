//! Canaries: turns with a known verdict, put before each judge beside the real work. A judge that errs too often is found out, and
//! learning stops until it errs less or an operator says otherwise.

use crate::{
    labelled::{Labelled, left_to_judges},
    rollout::Rollout,
    session::live::locked,
    validators::cut,
};
use chela_core::{CanaryFigures, Event, Profile, Score, StoreError, TurnId, Verdict};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

/// Verdicts on canaries, the last of each judge, that its error is taken over.
pub const WINDOW: usize = 50;
/// Fewest different canary turns among them that say anything. A rule that speaks of three of them only says nothing about itself when
/// it says the same twenty times; and a judge that is wrong one time in seven is wrong seven times in twenty one time in fifty.
pub const FEWEST: usize = 20;
/// Canaries that may wait: a judge that is slower than they come due is measured on fewer.
const WAITING: usize = 50;
/// Wrong verdicts named in a reason.
const EXAMPLES: usize = 3;
/// Longest piece of a canary's text in an example, in characters.
const PIECE: usize = 60;
/// What a reason begins with, before the judge's name, and what stands behind it.
const JUDGE: (&str, &str) = ("judge ", " errs: ");

/// What a judge said of one canary.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Said {
    /// A score.
    Score(Score),
    /// Nothing, or only void votes: no error, for it would teach nothing.
    Nothing,
    /// It failed or took too long.
    Failed,
}

impl Said {
    /// Of a judge's answer.
    pub(crate) fn of(verdict: Option<&Verdict>) -> Self {
        let scores = [Score::Good, Score::Neutral, Score::Bad];
        let reward = verdict.and_then(|v| v.reward);
        let score = reward.and_then(|r| scores.into_iter().find(|s| s.value() == r));
        score.map_or(Self::Nothing, Self::Score)
    }
}

/// One judge's canaries since the start, or since an operator resumed.
#[derive(Clone, Debug, Default)]
struct Measured {
    /// The last verdicts: on which canary turn, and what was wrong in words.
    last: VecDeque<(TurnId, Option<String>)>,
    abstained: u64,
    failed: u64,
}

impl Measured {
    fn wrong(&self) -> usize {
        self.last
            .iter()
            .filter(|(_, wrong)| wrong.is_some())
            .count()
    }

    /// The share of wrong verdicts; `None` = too few to say.
    fn error(&self) -> Option<f64> {
        let different: BTreeSet<TurnId> = self.last.iter().map(|(turn, _)| *turn).collect();
        (different.len() >= FEWEST).then(|| self.wrong() as f64 / self.last.len() as f64)
    }

    fn examples(&self) -> Vec<String> {
        let newest = self
            .last
            .iter()
            .rev()
            .filter_map(|(_, wrong)| wrong.as_ref());
        newest.take(EXAMPLES).cloned().collect()
    }
}

/// Which canaries there are, which are due, and how the judges fared.
pub(crate) struct Canaries {
    turns: Vec<Labelled>,
    rate: f64,
    most: f64,
    due: Mutex<VecDeque<usize>>,
    judges: Mutex<BTreeMap<String, Measured>>,
    /// Profiles may be paused for a judge's errors.
    holding: AtomicBool,
}

impl Canaries {
    /// `rate`: part of judged turns beside which one is due. `most`: the error above which learning stops.
    pub(crate) fn new(turns: &[Labelled], rate: f64, most: f64) -> Self {
        // What is certain is never put before a judge.
        let turns = turns.iter().filter(|t| left_to_judges(&t.case));
        Self {
            turns: turns.cloned().collect(),
            rate,
            most,
            due: Mutex::default(),
            judges: Mutex::default(),
            // A stop outlives a restart; the figures do not.
            holding: AtomicBool::new(true),
        }
    }

    /// A turn was judged. Whether a canary is due, and which, follows from the turn's id alone, so it needs no state.
    pub(crate) fn judged(&self, turn: TurnId) {
        let part = (spread(turn.0) >> 11) as f64 / (1u64 << 53) as f64;
        if self.turns.is_empty() || part >= self.rate {
            return;
        }
        let mut due = locked(&self.due);
        if due.len() < WAITING {
            let which = spread(turn.0.wrapping_add(1)) % self.turns.len() as u64;
            due.push_back(which as usize);
        }
    }

    /// The next one that is due.
    pub(crate) fn next(&self) -> Option<&Labelled> {
        let which = locked(&self.due).pop_front()?;
        self.turns.get(which)
    }

    /// Takes in what a judge said.
    pub(crate) fn take(&self, judge: &str, turn: &Labelled, said: Said) {
        let mut judges = locked(&self.judges);
        let measured = judges.entry(judge.to_owned()).or_default();
        let score = match said {
            Said::Score(score) => score,
            Said::Nothing => {
                measured.abstained += 1;
                return;
            }
            Said::Failed => {
                measured.failed += 1;
                return;
            }
        };
        let wrong = (score != turn.label).then(|| {
            let next = turn.case.next.messages.last().map_or("", |m| &m.content);
            let piece = cut(next.trim(), PIECE).replace('\n', " ");
            let (said, is) = (word(score), word(turn.label));
            format!("{} ({piece:?} said {said}, is {is})", turn.id)
        });
        measured.last.push_back((turn.case.turn, wrong));
        if measured.last.len() > WINDOW {
            measured.last.pop_front();
        }
    }

    /// Forgets what was measured: an operator goes on with these judges.
    pub(crate) fn begin_anew(&self) {
        locked(&self.judges).clear();
    }

    /// How the judges fared, by name.
    pub(crate) fn figures(&self) -> BTreeMap<String, CanaryFigures> {
        let judges = locked(&self.judges);
        let each = judges.iter().map(|(name, m)| {
            let figures = CanaryFigures {
                verdicts: m.last.len() as u64,
                wrong: m.wrong() as u64,
                abstained: m.abstained,
                failed: m.failed,
                error: m.error(),
                examples: m.examples(),
            };
            (name.clone(), figures)
        });
        each.collect()
    }

    /// Why learning stops, when a judge errs too often.
    fn objection(&self) -> Option<String> {
        let judges = locked(&self.judges);
        let (name, measured, error) = judges.iter().find_map(|(name, m)| {
            let error = m.error().filter(|e| *e > self.most)?;
            Some((name, m, error))
        })?;
        Some(format!(
            "{}{name}{}{} of its last {} verdicts on canaries were wrong ({:.0} %, judge.max_judge_error = {}), such as {}; look at \
             `chela judge test`, then take another judge or raise the limit; `chela policy resume` goes on and measures anew",
            JUDGE.0,
            JUDGE.1,
            measured.wrong(),
            measured.last.len(),
            100.0 * error,
            self.most,
            measured.examples().join(", "),
        ))
    }

    /// The judge that a reason names is trusted again: measured and within the limit.
    fn trusts(&self, judge: &str) -> bool {
        let judges = locked(&self.judges);
        let error = judges.get(judge).and_then(Measured::error);
        error.is_some_and(|e| e <= self.most)
    }
}

/// The judge that a profile is paused for; `None` when it is paused for something else.
pub(crate) fn blamed(why: &str) -> Option<&str> {
    let rest = why.strip_prefix(JUDGE.0)?;
    Some(rest.split_once(JUDGE.1)?.0)
}

impl Rollout {
    /// Puts a canary before every judge, then has learning stop or go on.
    pub(crate) async fn canary(&self, turn: &Labelled) {
        for judge in &self.judges {
            let answer = tokio::time::timeout(self.config.judge_timeout, judge.judge(&turn.case));
            let said = match answer.await {
                Ok(Ok(verdict)) => Said::of(verdict.as_ref()),
                Ok(Err(_)) | Err(_) => Said::Failed,
            };
            self.canaries.take(judge.name(), turn, said);
        }
        if let Err(error) = self.heed_canaries().await {
            tracing::error!("pausing or resuming for what canaries showed: {error}");
        }
    }

    /// Pauses the profiles that learn while a judge errs too often, and lets those go on that were paused for a judge that does no
    /// longer, or is no longer there.
    pub(crate) async fn heed_canaries(&self) -> Result<(), StoreError> {
        let objection = self.canaries.objection();
        if objection.is_none() && !self.canaries.holding.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut events = Vec::new();
        let mut holding = objection.is_some();
        for profile in self.store.profiles()? {
            if self.config.frozen.contains(&profile) {
                continue;
            }
            let before = self.store.paused(&profile)?;
            let gone = |judge: &str| !self.judges.iter().any(|j| j.name() == judge);
            let after = match (before.as_deref().map(blamed), &objection) {
                (None, Some(why)) => Some(why.clone()),
                (Some(Some(judge)), why) if gone(judge) || self.canaries.trusts(judge) => {
                    why.clone()
                }
                _ => before.clone(),
            };
            holding |= after.as_deref().and_then(blamed).is_some();
            if after != before {
                self.say_pause(&profile, after.as_deref());
                events.push(Event::Paused {
                    profile,
                    why: after,
                });
            }
        }
        if !events.is_empty() {
            self.store.append(events).await?;
        }
        self.canaries.holding.store(holding, Ordering::Relaxed);
        Ok(())
    }

    fn say_pause(&self, profile: &Profile, why: Option<&str>) {
        match why {
            Some(why) => tracing::error!(%profile, "training pauses: {why}"),
            None => {
                tracing::info!(%profile, "training goes on: the judge it was paused for is within judge.max_judge_error");
            }
        }
    }
}

/// As `chela judge test` writes it.
fn word(score: Score) -> &'static str {
    match score {
        Score::Good => "good",
        Score::Neutral => "neutral",
        Score::Bad => "bad",
    }
}

/// The mixing of splitmix64 (Steele et al., 2014): ids that follow one another fall anywhere.
fn spread(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::labelled::{BUILT_IN, read};

    fn canaries(rate: f64) -> Canaries {
        Canaries::new(&read(BUILT_IN).unwrap(), rate, 0.3)
    }

    fn tell(canaries: &Canaries, right: usize, wrong: usize) {
        let bad = canaries.turns.iter().filter(|t| t.label == Score::Bad);
        let said = [(right, Score::Bad), (wrong, Score::Good)];
        let said = said.iter().flat_map(|(n, score)| vec![*score; *n]);
        for (turn, score) in bad.cycle().zip(said) {
            canaries.take("j", turn, Said::Score(score));
        }
    }

    #[test]
    fn the_rate_is_kept_and_every_canary_has_its_turn_foolers_too() {
        let canaries = canaries(0.05);
        let mut seen = std::collections::BTreeSet::new();
        let mut drawn = 0;
        for turn in 0..40_000 {
            canaries.judged(TurnId(1_700_000_000_000 + 7 * turn));
            while let Some(turn) = canaries.next() {
                drawn += 1;
                seen.insert(turn.id.clone());
            }
        }
        assert!((1800..2200).contains(&drawn), "{drawn}");
        assert_eq!(seen.len(), canaries.turns.len());
        let foolers = canaries.turns.iter();
        let foolers = foolers.filter(|t| t.tags.iter().any(|t| t == "fooler"));
        assert!(foolers.count() >= 7);
        assert!(canaries.turns.iter().all(|t| left_to_judges(&t.case)));
        // The same turns, the same canaries.
        let again = super::tests::canaries(0.05);
        let drawn = |c: &Canaries| {
            (0..999).for_each(|i| c.judged(TurnId(i)));
            std::iter::from_fn(|| c.next().map(|t| t.id.clone())).collect::<Vec<_>>()
        };
        assert_eq!(drawn(&canaries), drawn(&again));
        let off = super::tests::canaries(0.0);
        assert!(drawn(&off).is_empty());
    }

    #[test]
    fn an_error_needs_twenty_verdicts_and_is_taken_over_the_last_fifty() {
        let canaries = canaries(0.05);
        tell(&canaries, 0, FEWEST - 1);
        assert_eq!(canaries.figures()["j"].error, None);
        assert_eq!(canaries.objection(), None);
        canaries.take("j", canaries.turns.last().unwrap(), Said::Failed);
        let last = canaries.turns.iter().rfind(|t| t.label == Score::Bad);
        canaries.take("j", last.unwrap(), Said::Score(Score::Bad));
        let why = canaries.objection().unwrap();
        for part in [
            "judge j errs",
            "19 of its last 20",
            "95 %",
            "said good, is bad",
        ] {
            assert!(why.contains(part), "{why}");
        }
        assert!(why.contains("chela judge test") && why.contains("judge.max_judge_error"));
        assert_eq!(blamed(&why), Some("j"));
        assert_eq!(blamed("paused by an operator"), None);
        tell(&canaries, WINDOW - 15, 0);
        let figures = &canaries.figures()["j"];
        assert_eq!((figures.verdicts, figures.wrong), (50, 14));
        assert!(canaries.objection().is_none() && canaries.trusts("j"));
        canaries.begin_anew();
        assert!(!canaries.trusts("j"));
        // The same one again and again is one.
        for _ in 0..WINDOW {
            tell(&canaries, 0, 1);
        }
        assert_eq!(canaries.figures()["j"].error, None);
    }

    #[test]
    fn an_abstention_is_counted_and_no_error() {
        let canaries = canaries(0.05);
        for _ in 0..60 {
            canaries.take("j", &canaries.turns[0], Said::Nothing);
            canaries.take("j", &canaries.turns[0], Said::Failed);
        }
        let figures = &canaries.figures()["j"];
        assert_eq!((figures.abstained, figures.failed), (60, 60));
        assert_eq!((figures.verdicts, figures.error), (0, None));
        assert!(canaries.objection().is_none());
    }
}
