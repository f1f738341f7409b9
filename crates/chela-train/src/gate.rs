//! What a candidate must show before it may serve: replies that were accepted stay likely, rejected ones do not come back, and what
//! nobody asked to change is as it was in the base model.
//!
//! All of it runs at the engine's lowest priority. What is asked of the base model is asked once.

use crate::{
    TrainError,
    config::{GateConfig, Probe},
};
use chela_core::{
    GateCheck, Learner, LeasedSample, PolicyEngine, PolicyRef, PolicyVersion, Priority, Prompt,
    Sample, SampleColumns, SampleId, Sampling, SamplingEvent, SamplingParams, TokenId, Want,
};
use chela_rl::kl::{Estimator, estimate};
use futures_executor::block_on;
use futures_util::{StreamExt, future::join_all};
use std::{
    collections::{HashMap, HashSet},
    sync::atomic::{AtomicBool, Ordering},
    time::Instant,
};

/// Fewest held-out turns of a kind from which anything is concluded.
const FEWEST: usize = 3;

/// Held-out prompts that the candidate answers beside the open ones, and the longest of them.
const OWN_PROMPTS: usize = 4;
const OWN_PROMPT_TOKENS: usize = 768;

/// What was measured before and is so still: what the base model says to probes and open prompts, and the held-out turns as versions
/// read them.
#[derive(Debug, Default)]
pub struct Remembered {
    /// Of each probe; empty until they were asked.
    preferences: Vec<f64>,
    replies: Option<Manner>,
    turns: HashMap<PolicyRef, HashMap<SampleId, f64>>,
}

/// How replies look.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Manner {
    /// Mean tokens.
    length: f64,
    /// Share of word groups that repeat an earlier one, or of replies that are the same.
    repetition: f64,
}

/// One reply of the candidate's.
struct Answer {
    prompt: Vec<TokenId>,
    tokens: Vec<TokenId>,
    logprobs: Vec<f32>,
}

/// Prompt and reply, and where the reply begins.
type Text = (Vec<TokenId>, usize);

/// Looks at one candidate.
pub struct Gate<'a> {
    /// Samples and scores.
    pub engine: &'a dyn PolicyEngine,
    /// Holds the candidate's weights (the receipt has shown that they are the engine's) and the base model's, and reads many short
    /// texts in one pass.
    pub learner: &'a mut dyn Learner,
    /// The limits.
    pub config: &'a GateConfig,
    /// Kept between candidates.
    pub known: &'a mut Remembered,
    /// Which version the learner holds.
    pub candidate: PolicyVersion,
    /// The program is to end: the candidate is looked at after the next start.
    pub stop: &'a AtomicBool,
}

/// Texts asked for at a time; in between a stop is noticed. The learner reads what they share once, the more the more there are.
const AT_ONCE: usize = 16;
const LEARNER_AT_ONCE: usize = 64;

impl Gate<'_> {
    /// All checks of the candidate against `served`. `held_out` is newest first.
    pub fn look(
        &mut self,
        served: &PolicyVersion,
        held_out: &[LeasedSample],
    ) -> Result<Vec<GateCheck>, TrainError> {
        let new = PolicyRef::Version(self.candidate.clone());
        let old = match served.number {
            0 => PolicyRef::Base,
            _ => PolicyRef::Version(served.clone()),
        };
        // Of other versions nothing is asked again.
        self.known.turns.retain(|policy, _| *policy == old);
        let begun = Instant::now();
        let mut checks = self.turns((&new, &old), held_out)?;
        let turns = begun.elapsed();
        checks.extend(self.probes(&new)?);
        let probes = begun.elapsed() - turns;
        checks.extend(self.replies(&new, held_out)?);
        let replies = begun.elapsed() - turns - probes;
        tracing::debug!(?turns, ?probes, ?replies, "what the gate took");
        Ok(checks)
    }

    /// Accepted replies stay likely, rejected ones do not come back.
    fn turns(
        &mut self,
        (new, old): (&PolicyRef, &PolicyRef),
        held_out: &[LeasedSample],
    ) -> Result<Vec<GateCheck>, TrainError> {
        let mut left = self.config.turn_tokens;
        let judged = held_out
            .iter()
            .filter(|l| l.sample.reward.is_some_and(|r| r != 0.0));
        let affordable = judged.filter(|l| {
            let n = l.turn.prompt.len() + l.turn.reply.len();
            let fits = n <= left && !l.turn.reply.is_empty();
            left -= if fits { n } else { 0 };
            fits
        });
        let turns: Vec<&LeasedSample> = affordable.take(self.config.turns).collect();
        let (after, before) = (self.read(new, &turns)?, self.read(old, &turns)?);
        let change = |good: bool| -> Vec<f64> {
            let one = turns.iter().zip(after.iter().zip(&before));
            one.filter(|(l, _)| l.sample.reward.is_some_and(|r| (r > 0.0) == good))
                .map(|(_, (a, b))| a - b)
                .collect()
        };
        let (accepted, rejected) = (change(true), change(false));
        let likelier = mean(&accepted).max(0.0);
        Ok(vec![
            judged_check("accepted", &accepted, -self.config.accepted_drop, |v, l| {
                v >= l
            }),
            judged_check(
                "rejected",
                &rejected,
                self.config.rejected_rise
                    + if accepted.len() < FEWEST {
                        0.0
                    } else {
                        likelier
                    },
                |v, l| v <= l,
            ),
        ])
    }

    /// Mean log-prob of each turn's reply, from what is known where it is.
    fn read(
        &mut self,
        policy: &PolicyRef,
        turns: &[&LeasedSample],
    ) -> Result<Vec<f64>, TrainError> {
        let known = self.known.turns.get(policy).cloned().unwrap_or_default();
        let new: Vec<&&LeasedSample> = turns
            .iter()
            .filter(|l| !known.contains_key(&l.id))
            .collect();
        let texts: Vec<Text> = new
            .iter()
            .map(|l| text(&l.turn.prompt, l.turn.reply.tokens()))
            .collect();
        let means = self.means(policy, &texts)?;
        let all = self.known.turns.entry(policy.clone()).or_default();
        all.extend(new.iter().map(|l| l.id).zip(means));
        Ok(turns
            .iter()
            .map(|l| all.get(&l.id).copied().unwrap_or(f64::NAN))
            .collect())
    }

    /// Log-probs of each text's tokens from its start on.
    fn logprobs(
        &mut self,
        policy: &PolicyRef,
        texts: &[Text],
    ) -> Result<Vec<Vec<f32>>, TrainError> {
        let base = *policy == PolicyRef::Base;
        let learner_reads = base || *policy == PolicyRef::Version(self.candidate.clone());
        let at_once = if learner_reads {
            LEARNER_AT_ONCE
        } else {
            AT_ONCE
        };
        let mut all = Vec::with_capacity(texts.len());
        for some in texts.chunks(at_once) {
            if self.stop.load(Ordering::Relaxed) {
                return Err(TrainError::Stopping);
            }
            if learner_reads {
                let version = &self.candidate;
                let samples = some
                    .iter()
                    .map(|(tokens, start)| unscored(tokens, *start, version));
                let samples: Vec<Sample> = samples.collect::<Result<_, _>>()?;
                let scored = match base {
                    true => self.learner.forward_base(&samples, train())?,
                    false => self.learner.forward(&samples, train())?,
                };
                all.extend(scored.into_iter().map(|s| s.logprobs));
                continue;
            }
            let scored = some.iter().map(|(tokens, start)| {
                let prompt = Prompt {
                    tokens: tokens.clone(),
                };
                self.engine.score(policy.clone(), prompt, *start, train())
            });
            for scored in block_on(join_all(scored)) {
                all.push(scored?.logprobs);
            }
        }
        Ok(all)
    }

    /// Their means.
    fn means(&mut self, policy: &PolicyRef, texts: &[Text]) -> Result<Vec<f64>, TrainError> {
        let all = self.logprobs(policy, texts)?;
        Ok(all.iter().map(|l| mean_of(l)).collect())
    }

    /// ln p(good) − ln p(bad), per token, of each probe.
    fn preferences(&mut self, policy: &PolicyRef) -> Result<Vec<f64>, TrainError> {
        let probes = self.config.probes.iter();
        let texts: Vec<_> = probes
            .flat_map(|p| [text(&p.prompt, &p.good), text(&p.prompt, &p.bad)])
            .collect();
        let means = self.means(policy, &texts)?;
        Ok(means
            .chunks_exact(2)
            .map(|pair| pair[0] - pair[1])
            .collect())
    }

    fn probes(&mut self, new: &PolicyRef) -> Result<Vec<GateCheck>, TrainError> {
        let probes: &[Probe] = &self.config.probes;
        if probes.is_empty() {
            return Ok(Vec::new());
        }
        if self.known.preferences.is_empty() {
            self.known.preferences = self.preferences(&PolicyRef::Base)?;
        }
        let now = self.preferences(new)?;
        let base = &self.known.preferences;
        let changes: Vec<f64> = now.iter().zip(base).map(|(n, b)| n - b).collect();
        let mut kinds: Vec<&str> = Vec::new();
        for probe in probes {
            if !kinds.contains(&probe.kind.as_str()) {
                kinds.push(&probe.kind);
            }
        }
        let limit = -self.config.probe_drop;
        let check = |kind: &str| {
            let of = probes.iter().zip(&changes).filter(|(p, _)| p.kind == kind);
            let values: Vec<f64> = of.clone().map(|(_, c)| *c).collect();
            let worst = of.min_by(|a, b| a.1.total_cmp(b.1));
            let worst = worst.map_or(String::new(), |(p, c)| {
                format!("; worst {} {c:+.3}", p.name)
            });
            let value = mean(&values);
            GateCheck {
                name: kind.to_owned(),
                value,
                limit,
                passed: value >= limit,
                detail: format!(
                    "preference for the wanted reply against the base model, nats a token, mean of {}{worst}",
                    values.len()
                ),
            }
        };
        Ok(kinds.into_iter().map(check).collect())
    }

    /// KL to base, length and repetition of what the candidate says by itself.
    fn replies(
        &mut self,
        new: &PolicyRef,
        held_out: &[LeasedSample],
    ) -> Result<Vec<GateCheck>, TrainError> {
        let open = self.config.open.clone();
        if open.is_empty() && held_out.is_empty() {
            return Ok(Vec::new());
        }
        let base = match self.known.replies {
            Some(known) => known,
            None => manner(&self.answers(&PolicyRef::Base, open.clone())?),
        };
        self.known.replies = Some(base);
        let own = held_out.iter().map(|l| &l.turn.prompt);
        let own = own
            .filter(|p| p.len() <= OWN_PROMPT_TOKENS)
            .take(OWN_PROMPTS);
        let prompts: Vec<Vec<TokenId>> = open.iter().chain(own).cloned().collect();
        let answers = self.answers(new, prompts)?;
        let now = manner(&answers[..open.len().min(answers.len())]);
        let mut checks = vec![self.kl(&answers)?];
        if !open.is_empty() {
            checks.extend(self.manners(now, base));
        }
        Ok(checks)
    }

    fn manners(&self, now: Manner, base: Manner) -> [GateCheck; 2] {
        let (low, high) = self.config.length;
        let ratio = now.length / base.length.max(1.0);
        let repetition = now.repetition - base.repetition;
        [
            GateCheck {
                name: "length".to_owned(),
                value: ratio,
                limit: if ratio < low { low } else { high },
                passed: (low..=high).contains(&ratio),
                detail: format!(
                    "mean length against the base model's: {:.1} tokens, it has {:.1}",
                    now.length, base.length
                ),
            },
            GateCheck {
                name: "repetition".to_owned(),
                value: repetition,
                limit: self.config.repetition,
                passed: repetition <= self.config.repetition,
                detail: format!(
                    "share of repeated groups of four tokens or of equal replies: {:.3}, the base model has {:.3}",
                    now.repetition, base.repetition
                ),
            },
        ]
    }

    /// KL(candidate ‖ base) a token, by the k3 estimator (Schulman, 2020) over what the candidate sampled.
    fn kl(&mut self, answers: &[Answer]) -> Result<GateCheck, TrainError> {
        let said: Vec<&Answer> = answers.iter().filter(|a| !a.tokens.is_empty()).collect();
        let texts: Vec<Text> = said.iter().map(|a| text(&a.prompt, &a.tokens)).collect();
        let mut values = Vec::new();
        for (answer, base) in said.iter().zip(self.logprobs(&PolicyRef::Base, &texts)?) {
            let pairs = answer.logprobs.iter().zip(&base);
            values.extend(pairs.map(|(p, r)| f64::from(estimate(Estimator::K3, *p, *r))));
        }
        let (value, limit) = (mean(&values), self.config.kl_budget);
        Ok(GateCheck {
            name: "kl_to_base".to_owned(),
            value,
            limit,
            passed: values.is_empty() || value <= limit,
            detail: format!(
                "nats a token over {} tokens of {} replies of its own",
                values.len(),
                said.len()
            ),
        })
    }

    fn answers(
        &self,
        policy: &PolicyRef,
        prompts: Vec<Vec<TokenId>>,
    ) -> Result<Vec<Answer>, TrainError> {
        let mut streams: Vec<(Vec<TokenId>, Sampling)> = Vec::new();
        for (seed, tokens) in prompts.into_iter().enumerate() {
            let params = SamplingParams {
                seed: seed as u64,
                max_tokens: self.config.reply_tokens,
                end_ids: self.config.end_ids.clone(),
                priority: Priority::Train,
                keep: false, // a held-out turn may be forgotten meanwhile
                ..SamplingParams::default()
            };
            let prompt = Prompt {
                tokens: tokens.clone(),
            };
            streams.push((tokens, self.engine.sample(policy.clone(), prompt, params)?));
        }
        // All of them run at once; they are emptied one after the other.
        let mut answers = Vec::new();
        for (prompt, mut stream) in streams {
            let mut answer = Answer {
                prompt,
                tokens: Vec::new(),
                logprobs: Vec::new(),
            };
            while let Some(event) = block_on(stream.next()) {
                if self.stop.load(Ordering::Relaxed) {
                    return Err(TrainError::Stopping);
                }
                if let SamplingEvent::Token(token) = event? {
                    answer.tokens.push(token.id);
                    answer.logprobs.push(token.logprob_t1);
                }
            }
            answers.push(answer);
        }
        Ok(answers)
    }
}

fn text(prompt: &[TokenId], reply: &[TokenId]) -> Text {
    ([prompt, reply].concat(), prompt.len())
}

fn train() -> Want {
    Want {
        priority: Priority::Train,
        ..Want::default()
    }
}

/// A text of which only log-probs are asked.
pub(crate) fn unscored(
    tokens: &[TokenId],
    start: usize,
    version: &PolicyVersion,
) -> Result<Sample, TrainError> {
    let n = tokens.len().saturating_sub(start);
    let columns = SampleColumns {
        mask: vec![false; n],
        behavior_logprobs: vec![0.0; n],
        advantages: vec![0.0; n],
    };
    Ok(Sample::new(
        tokens.to_vec(),
        start,
        columns,
        1.0,
        version.clone(),
    )?)
}

fn mean_of(logprobs: &[f32]) -> f64 {
    let values: Vec<f64> = logprobs.iter().map(|l| f64::from(*l)).collect();
    mean(&values)
}

/// NaN of nothing.
fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// `within(value, limit)` holds, or too few turns are there to say.
fn judged_check(
    name: &str,
    changes: &[f64],
    limit: f64,
    within: impl Fn(f64, f64) -> bool,
) -> GateCheck {
    let (value, n) = (mean(changes), changes.len());
    let few = n < FEWEST;
    let why = if few { "; too few to conclude" } else { "" };
    GateCheck {
        name: name.to_owned(),
        value,
        limit,
        passed: few || within(value, limit),
        detail: format!(
            "log-prob of {name} held-out replies against what is served, nats a token, mean of {n}{why}"
        ),
    }
}

fn manner(answers: &[Answer]) -> Manner {
    let lengths: Vec<f64> = answers.iter().map(|a| a.tokens.len() as f64).collect();
    let repeated: Vec<f64> = answers.iter().map(|a| repeated(&a.tokens)).collect();
    let different: HashSet<&[TokenId]> = answers.iter().map(|a| a.tokens.as_slice()).collect();
    let same = 1.0 - different.len() as f64 / answers.len().max(1) as f64;
    Manner {
        length: mean(&lengths),
        repetition: mean(&repeated).max(same),
    }
}

/// Share of groups of four that occurred before in the same reply.
fn repeated(tokens: &[TokenId]) -> f64 {
    let mut seen = HashSet::new();
    let groups: Vec<&[TokenId]> = tokens.windows(4).collect();
    let again = groups.iter().filter(|g| !seen.insert(**g)).count();
    again as f64 / groups.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loops_and_one_phrase_for_everything_are_repetition() {
        assert_eq!(repeated(&[1, 2, 3, 4, 5, 6]), 0.0);
        assert!(repeated(&[1, 2, 1, 2, 1, 2, 1, 2, 1, 2]) > 0.7);
        assert_eq!(repeated(&[]), 0.0);
        let answer = |tokens: &[TokenId]| Answer {
            prompt: vec![1],
            tokens: tokens.to_vec(),
            logprobs: vec![-1.0; tokens.len()],
        };
        let same = manner(&[answer(&[1, 2]), answer(&[1, 2]), answer(&[1, 2])]);
        assert!(same.repetition > 0.6, "{same:?}");
        let other = manner(&[answer(&[1, 2]), answer(&[3, 4])]);
        assert_eq!((other.repetition, other.length), (0.0, 2.0));
    }

    #[test]
    fn too_few_turns_conclude_nothing() {
        let within = |v: f64, l: f64| v >= l;
        assert!(judged_check("accepted", &[-9.0, -9.0], -0.1, within).passed);
        assert!(!judged_check("accepted", &[-9.0; 3], -0.1, within).passed);
        assert!(!judged_check("accepted", &[f64::NAN; 3], -0.1, within).passed);
        assert!(judged_check("accepted", &[], -0.1, within).passed);
    }
}
