//! From a verdict to a sample or the reason why there is none: the plain part.

use crate::{
    config::{RolloutConfig, TruncatedReplies},
    credit,
    judges::votes,
};
use chela_core::{
    FinishReason, SampleState, TokenId, Turn, TurnKind, TurnStory, Verdict, VerdictId,
    VerdictSource,
};

/// What becomes of a verdict.
#[derive(Clone, Debug, PartialEq)]
pub enum Plan {
    /// Nothing, and why.
    No(String),
    /// A sample.
    Sample {
        /// The score.
        reward: Option<f32>,
        /// The hint a teacher is to read.
        hint: Option<String>,
    },
}

/// Decides over an open verdict of a turn.
pub fn plan(story: &TurnStory, id: VerdictId, verdict: &Verdict, config: &RolloutConfig) -> Plan {
    let no = |why: &str| Plan::No(why.to_owned());
    let turn = &story.turn;
    if let Some(why) = outranked(story, id, verdict.source) {
        return no(why);
    }
    // A reply in a group is compared with the others by its reward alone, whatever that is and however the reply ended.
    if verdict.group.is_some() {
        return match (never(turn, config), verdict.reward) {
            (Some(why), _) => no(why),
            (None, None) => no("no reward in a group"),
            (None, reward) => Plan::Sample { reward, hint: None },
        };
    }
    let hint = votes::usable_hints(&verdict.hints, config.max_hints)
        .into_iter()
        .next();
    // "It should have said …" without a score leaves the score that stands.
    let reward = match verdict.source {
        VerdictSource::Explicit => verdict.reward.or_else(|| credit::standing_reward(story)),
        VerdictSource::Rules | VerdictSource::Judge => verdict.reward,
    };
    if let Some(why) = untrainable(turn, verdict.source, reward, config) {
        return no(why);
    }
    match (reward, &hint) {
        (None, None) => no("neither a reward nor a hint"),
        (Some(0.0), None) if !config.keep_neutral => no("neutral"),
        _ => Plan::Sample { reward, hint },
    }
}

const SIDE: &str = "side turn";

/// Why this turn's tokens may not be trained on with this reward.
fn untrainable(
    turn: &Turn,
    source: VerdictSource,
    reward: Option<f32>,
    config: &RolloutConfig,
) -> Option<&'static str> {
    // A cut reply is never a success; it may be a failure when a person says so or the configuration does.
    let bad = reward.is_some_and(|r| r < 0.0);
    let may = config.truncated == TruncatedReplies::Bad || source == VerdictSource::Explicit;
    let cut = turn.finish == FinishReason::Length
        && !(bad && may)
        && config.truncated != TruncatedReplies::Judged;
    never(turn, config).or(cut.then_some("truncated"))
}

/// Why this turn's tokens may not be trained on whatever is said of it.
pub fn never(turn: &Turn, config: &RolloutConfig) -> Option<&'static str> {
    if turn.kind == TurnKind::Side {
        return Some(SIDE);
    }
    if turn.reply.is_empty() {
        return Some("empty reply");
    }
    match turn.finish {
        FinishReason::End | FinishReason::Stopped | FinishReason::Length => {}
        FinishReason::Aborted => return Some("aborted by the client"),
        FinishReason::Failed => return Some("the engine failed"),
    }
    let mass = turn.reply.kept_mass();
    let mean = mass.iter().sum::<f32>() / mass.len() as f32;
    (mean.is_nan() || mean < config.min_kept_mass).then_some("truncated sampling")
}

/// A greater voice stands on the turn, or the same one spoke again since.
pub fn outranked(story: &TurnStory, id: VerdictId, source: VerdictSource) -> Option<&'static str> {
    let later = story.verdicts.iter().any(|(other, v, why)| {
        *other > id
            && v.source >= source
            && why.is_none()
            && (v.reward.is_some() || !v.hints.is_empty())
    });
    if later {
        return Some("a later verdict stands");
    }
    let taken = story.samples.iter().any(|(_, sample, state)| {
        let above = story
            .verdicts
            .iter()
            .any(|(v, by, _)| *v == sample.verdict && by.source > source);
        above && !matches!(state, SampleState::Dropped(_))
    });
    taken.then_some("a higher verdict stands")
}

/// The hinted prompt of the turn itself. `plain` and `hinted` are fresh renderings of the same conversation; the turn's prompt may
/// hold older ids for the same history (recorded replies are never tokenised again), and only the hint may differ between teacher
/// and student. So what the hint changed is put into the turn's own prompt; where its end is not the rendering's end, the fresh
/// rendering is all there is.
pub fn hinted_prompt(prompt: &[TokenId], plain: &[TokenId], hinted: Vec<TokenId>) -> Vec<TokenId> {
    let same = plain
        .iter()
        .zip(&hinted)
        .take_while(|(a, b)| a == b)
        .count();
    match prompt.strip_suffix(&plain[same..]) {
        Some(kept) if !plain[same..].is_empty() => [kept, &hinted[same..]].concat(),
        _ => hinted,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_hint_is_all_that_differs() {
        // History re-tokenised as 7 8 where the turn has 9; the hint 5 stands before the end 3 4.
        assert_eq!(
            hinted_prompt(
                &[1, 9, 2, 3, 4],
                &[1, 7, 8, 2, 3, 4],
                vec![1, 7, 8, 2, 5, 3, 4]
            ),
            [1, 9, 2, 5, 3, 4]
        );
        // Another end: nothing can be put in place.
        assert_eq!(
            hinted_prompt(&[1, 2, 6], &[1, 2, 3], vec![1, 2, 5, 3]),
            [1, 2, 5, 3]
        );
    }

    proptest! {
        #[test]
        fn without_a_hint_the_prompt_stays(prompt in prop::collection::vec(0u32..9, 1..20)) {
            prop_assert_eq!(hinted_prompt(&prompt, &prompt, prompt.clone()), prompt);
        }

        #[test]
        fn an_insertion_into_the_same_prompt_is_that_insertion(
            head in prop::collection::vec(0u32..9, 0..20),
            hint in prop::collection::vec(10u32..19, 1..9),
            tail in prop::collection::vec(0u32..9, 1..9),
        ) {
            let plain = [head.as_slice(), tail.as_slice()].concat();
            let hinted = [head.as_slice(), hint.as_slice(), tail.as_slice()].concat();
            prop_assert_eq!(hinted_prompt(&plain, &plain, hinted.clone()), hinted);
        }
    }
}
