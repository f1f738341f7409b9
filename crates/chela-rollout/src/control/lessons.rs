//! What versions learnt, in the words of the turns behind them, and what changed between two of them.

use crate::{rollout::Rollout, validators::cut};
use chela_core::{
    Answers, Candidates, Conversation, Lesson, Message, PolicyDiff, PolicyRef, PolicyVersion,
    Priority, Profile, Prompt, Refusal, Role, SamplingEvent, SamplingParams, TokenId,
    VersionRecord, Want, registry::Chain,
};
use futures_util::StreamExt;

/// Prompts that both versions answer, the longest of them, and the longest answers.
const PROMPTS: usize = 4;
const PROMPT_TOKENS: usize = 2048;
const ANSWER_TOKENS: usize = 96;

/// Most lessons that a diff lists.
const LESSONS: usize = 200;

/// Longest piece of a text that is shown.
const WORDS: usize = 300;

/// Tokens whose probabilities are compared at each position; the others count as one.
const TOP: usize = 20;

/// For profiles without held-out turns.
const OURS: [&str; PROMPTS] = [
    "Why is the sky blue?",
    "Write a short note to thank a neighbour for watering the plants.",
    "Give me three ideas for a rainy afternoon.",
    "What is a good way to learn the names of birds?",
];

/// One prompt and what both made of it.
struct Pair {
    request: String,
    prompt: Vec<TokenId>,
}

impl Rollout {
    /// What one version's step learnt.
    pub(super) fn lessons_of(
        &self,
        profile: &Profile,
        number: u64,
    ) -> Result<Vec<Lesson>, Refusal> {
        if number == 0 {
            return Ok(Vec::new());
        }
        let versions = self.store.versions(profile)?;
        self.lessons_in(super::policy::known(&versions, profile, number)?)
    }

    fn lessons_in(&self, record: &VersionRecord) -> Result<Vec<Lesson>, Refusal> {
        let mut lessons = Vec::new();
        for leased in self.store.samples(&record.samples)? {
            let story = self.story(leased.turn.id)?;
            let verdict = story
                .verdicts
                .iter()
                .find(|(id, ..)| *id == leased.sample.verdict);
            lessons.push(Lesson {
                sample: leased.id,
                version: record.version.number,
                turn: leased.turn.id,
                session: leased.turn.session.clone(),
                request: last_words(&leased.turn.messages),
                reply: cut(&leased.turn.answer.content, WORDS),
                reward: leased.sample.reward,
                hint: leased.sample.hint.clone(),
                judge: verdict.map_or_else(String::new, |(_, v, _)| v.judge.clone()),
                evidence: verdict.and_then(|(_, v, _)| v.evidence.clone()),
                explicit: leased.sample.explicit,
            });
        }
        Ok(lessons)
    }

    pub(super) async fn difference(
        &self,
        profile: Profile,
        from: u64,
        to: u64,
    ) -> Result<PolicyDiff, Refusal> {
        let versions = self.store.versions(&profile)?;
        let (first, second) = (
            self.reference(&profile, from, &versions)?,
            self.reference(&profile, to, &versions)?,
        );
        let (pairs, own_prompts) = self.prompts(&profile)?;
        let (mut answers, mut tokens, mut kl) = (Vec::new(), (0.0, 0.0), (0.0, 0));
        for pair in &pairs {
            let one = self.answer(&first, &pair.prompt).await?;
            let other = self.answer(&second, &pair.prompt).await?;
            tokens.0 += one.len() as f64 / pairs.len() as f64;
            tokens.1 += other.len() as f64 / pairs.len() as f64;
            if !other.is_empty() {
                let text = [pair.prompt.as_slice(), &other].concat();
                kl.0 += self
                    .divergence((&second, &first), text, pair.prompt.len())
                    .await?;
                kl.1 += other.len();
            }
            answers.push(Answers {
                request: pair.request.clone(),
                from: self.chat.decode(&one),
                to: self.chat.decode(&other),
            });
        }
        let (steps, between) = between(&versions, from, to);
        let mut lessons = Vec::new();
        for record in between {
            if lessons.len() < LESSONS {
                lessons.extend(self.lessons_in(record)?);
            }
        }
        lessons.truncate(LESSONS);
        Ok(PolicyDiff {
            from,
            to,
            answers,
            tokens,
            kl: (kl.1 > 0).then(|| kl.0 / kl.1 as f64),
            own_prompts,
            steps,
            lessons,
        })
    }

    fn reference(
        &self,
        profile: &Profile,
        number: u64,
        versions: &[VersionRecord],
    ) -> Result<PolicyRef, Refusal> {
        if number == 0 {
            return Ok(PolicyRef::Base);
        }
        super::policy::known(versions, profile, number)?;
        self.adapter_dir(profile, number)?;
        Ok(PolicyRef::Version(PolicyVersion {
            profile: profile.clone(),
            number,
        }))
    }

    /// The profile's newest held-out prompts, else ours. True when they are its own.
    fn prompts(&self, profile: &Profile) -> Result<(Vec<Pair>, bool), Refusal> {
        let (held_out, _) = self.store.held_out(profile, 4 * PROMPTS)?;
        let own = held_out
            .into_iter()
            .filter(|l| l.turn.prompt.len() <= PROMPT_TOKENS);
        let own: Vec<Pair> = own
            .take(PROMPTS)
            .map(|l| Pair {
                request: last_words(&l.turn.messages),
                prompt: l.turn.prompt,
            })
            .collect();
        if !own.is_empty() {
            return Ok((own, true));
        }
        let rendered = OURS.iter().map(|text| {
            let conversation = Conversation {
                messages: vec![Message::user(*text)],
                ..Conversation::default()
            };
            let rendered = self.chat.render(&conversation, Err("comparison"));
            let rendered = rendered.map_err(|e| Refusal::Internal(e.to_string()))?;
            Ok(Pair {
                request: (*text).to_owned(),
                prompt: rendered.tokens,
            })
        });
        Ok((rendered.collect::<Result<_, Refusal>>()?, false))
    }

    async fn answer(
        &self,
        policy: &PolicyRef,
        prompt: &[TokenId],
    ) -> Result<Vec<TokenId>, Refusal> {
        let params = SamplingParams {
            temperature: 0.0,
            max_tokens: ANSWER_TOKENS,
            end_ids: self.chat.end_ids().to_vec(),
            priority: Priority::Judge,
            keep: false, // its session may be forgotten while the versions are compared
            ..SamplingParams::default()
        };
        let prompt = Prompt {
            tokens: prompt.to_vec(),
        };
        let mut events = self.engine.sample(policy.clone(), prompt, params)?;
        let mut tokens = Vec::new();
        while let Some(event) = events.next().await {
            if let SamplingEvent::Token(token) = event? {
                tokens.push(token.id);
            }
        }
        Ok(tokens)
    }

    /// Σ over positions of KL(policy ‖ reference), exact for the policy's most likely tokens, the rest taken as one.
    async fn divergence(
        &self,
        (policy, reference): (&PolicyRef, &PolicyRef),
        tokens: Vec<TokenId>,
        from: usize,
    ) -> Result<f64, Refusal> {
        let prompt = Prompt { tokens };
        let want = Want {
            top_k: TOP,
            ..Want::default()
        };
        let scored = self
            .engine
            .score(policy.clone(), prompt.clone(), from, want)
            .await?;
        let Some((ids, p)) = scored.top else {
            return Err(Refusal::Internal("the engine named no tokens".to_owned()));
        };
        let k = ids.len() / (prompt.tokens.len() - from).max(1);
        let want = Want {
            candidates: Some(Candidates::new(ids, k.max(1))?),
            ..Want::default()
        };
        let q = self
            .engine
            .score(reference.clone(), prompt, from, want)
            .await?
            .logprobs;
        Ok(p.chunks(k.max(1))
            .zip(q.chunks(k.max(1)))
            .map(|(p, q)| divergence_at(p, q))
            .sum())
    }
}

/// Σ p (ln p − ln q) over named tokens, and the same for all others together.
fn divergence_at(p: &[f32], q: &[f32]) -> f64 {
    let (mut sum, mut left_p, mut left_q) = (0.0, 1.0, 1.0);
    for (p, q) in p.iter().zip(q) {
        let (p, q) = (f64::from(*p), f64::from(*q));
        sum += p.exp() * (p - q);
        left_p -= p.exp();
        left_q -= q.exp();
    }
    // Rounding may leave less than nothing.
    let (left_p, left_q) = (left_p.max(1e-9), left_q.max(1e-9));
    (sum + left_p * (left_p / left_q).ln()).max(0.0)
}

/// Steps between two versions, and their records oldest first, when one stands on the other.
fn between(versions: &[VersionRecord], from: u64, to: u64) -> (Option<u64>, Vec<&VersionRecord>) {
    let (chain_to, chain_from) = (Chain::of(to, versions), Chain::of(from, versions));
    let (chain, below) = if chain_to.holds(from) {
        (chain_to, chain_from)
    } else if chain_from.holds(to) {
        (chain_from, chain_to)
    } else {
        return (None, Vec::new());
    };
    let mut way: Vec<u64> = chain
        .numbers()
        .iter()
        .copied()
        .filter(|n| !below.holds(*n))
        .collect();
    way.reverse();
    let records = way
        .iter()
        .filter_map(|n| versions.iter().find(|v| v.version.number == *n));
    (
        Some(chain.head_steps() - below.head_steps()),
        records.collect(),
    )
}

fn last_words(messages: &[Message]) -> String {
    let user = messages.iter().rev().find(|m| m.role == Role::User);
    user.map_or_else(String::new, |m| cut(&m.content, WORDS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_counts_the_rest_as_one() {
        let ln = |values: &[f32]| values.iter().map(|v| v.ln()).collect::<Vec<f32>>();
        assert!(divergence_at(&ln(&[0.5, 0.3]), &ln(&[0.5, 0.3])) < 1e-6);
        // 0.5 ln(0.5/0.25) + 0.5 ln(0.5/0.75)
        let one = divergence_at(&ln(&[0.5]), &ln(&[0.25]));
        assert!((one - 0.143_841).abs() < 1e-5, "{one}");
    }
}
