//! What is certain about a turn before any judge is asked: cheap, named, plain functions.

use crate::{
    config::TruncatedReplies,
    session::{follow, normal},
};
use chela_core::{FinishReason, Message, Role, Score, Turn, TurnStory, Verdict, VerdictSource};

/// What the validators say.
#[derive(Clone, Debug, PartialEq)]
pub enum Finding {
    /// This verdict, certain.
    Verdict(Box<Verdict>),
    /// The turn will never have one, and why.
    None(&'static str),
    /// Ask the judges.
    Ask,
}

/// Longest piece of text kept as evidence.
const EVIDENCE: usize = 500;

/// The first that applies, in the order of how certain it is.
pub fn validate(story: &TurnStory, truncated: TruncatedReplies) -> Finding {
    let turn = &story.turn;
    match turn.finish {
        FinishReason::Aborted => return Finding::None("aborted by the client"),
        FinishReason::Failed => return Finding::None("the engine failed"),
        FinishReason::Length if !turn.reply.is_empty() && truncated != TruncatedReplies::Judged => {
            return match truncated {
                TruncatedReplies::Exclude => Finding::None("truncated"),
                TruncatedReplies::Bad | TruncatedReplies::Judged => bad("truncated", None),
            };
        }
        FinishReason::Length | FinishReason::End | FinishReason::Stopped => {}
    }
    if says_nothing(turn) {
        return Finding::None("empty reply");
    }
    if follow::is_silent(&turn.answer) {
        return Finding::None("silent reply");
    }
    let next = story
        .next
        .as_ref()
        .map_or(&[][..], |n| n.messages.as_slice());
    if let Some(error) = next.iter().find(|m| m.role == Role::Tool && m.is_error) {
        return bad("tool-error", Some(cut(&error.content, EVIDENCE)));
    }
    if repeats_calls(turn) {
        let names: Vec<&str> = turn
            .answer
            .tool_calls
            .iter()
            .map(|c| c.name.as_str())
            .collect();
        return bad("repeated-call", Some(names.join(", ")));
    }
    Finding::Ask
}

fn says_nothing(turn: &Turn) -> bool {
    turn.reply.is_empty()
        || (turn.answer.content.trim().is_empty() && turn.answer.tool_calls.is_empty())
}

/// The very same calls as in the assistant's message before, one after the other.
fn repeats_calls(turn: &Turn) -> bool {
    let calls = |m: &Message| m.tool_calls.iter().map(normal::call).collect::<Vec<_>>();
    let before = turn
        .messages
        .iter()
        .rev()
        .find(|m| m.role == Role::Assistant);
    // A user who spoke in between may have asked for it again.
    let asked = turn
        .messages
        .iter()
        .rev()
        .take_while(|m| m.role != Role::Assistant);
    let asked = asked
        .into_iter()
        .any(|m| m.role == Role::User && !normal::is_passing(m));
    !asked
        && !turn.answer.tool_calls.is_empty()
        && before.is_some_and(|before| calls(before) == calls(&turn.answer))
}

fn bad(name: &str, evidence: Option<String>) -> Finding {
    Finding::Verdict(Box::new(Verdict {
        judge: format!("validator:{name}"),
        source: VerdictSource::Rules,
        reward: Some(Score::Bad.value()),
        hints: Vec::new(),
        evidence,
        votes: Vec::new(),
    }))
}

/// At most so many characters.
pub(crate) fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
