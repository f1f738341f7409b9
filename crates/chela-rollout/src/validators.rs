//! What is certain about a turn before any judge is asked: cheap, named, plain functions.

use crate::{
    config::TruncatedReplies,
    session::{follow, normal},
};
use chela_core::{FinishReason, JudgeCase, Message, Role, Score, Verdict, VerdictSource};

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

/// The first that applies, in the order of how certain it is. `finish` and `tokens` are of the reply.
pub fn validate(
    case: &JudgeCase,
    (finish, tokens): (FinishReason, usize),
    truncated: TruncatedReplies,
) -> Finding {
    match finish {
        FinishReason::Aborted => return Finding::None("aborted by the client"),
        FinishReason::Failed => return Finding::None("the engine failed"),
        FinishReason::Length if tokens > 0 && truncated != TruncatedReplies::Judged => {
            return match truncated {
                TruncatedReplies::Exclude => Finding::None("truncated"),
                TruncatedReplies::Bad | TruncatedReplies::Judged => bad("truncated", None),
            };
        }
        FinishReason::Length | FinishReason::End | FinishReason::Stopped => {}
    }
    let answer = &case.answer;
    if tokens == 0 || (answer.content.trim().is_empty() && answer.tool_calls.is_empty()) {
        return Finding::None("empty reply");
    }
    if follow::is_silent(answer) {
        return Finding::None("silent reply");
    }
    let next = &case.next.messages;
    if let Some(error) = next.iter().find(|m| m.role == Role::Tool && m.is_error) {
        return bad("tool-error", Some(cut(&error.content, EVIDENCE)));
    }
    if repeats_calls(case) {
        let names: Vec<&str> = answer.tool_calls.iter().map(|c| c.name.as_str()).collect();
        return bad("repeated-call", Some(names.join(", ")));
    }
    Finding::Ask
}

/// The very same calls as in the assistant's message before, one after the other.
fn repeats_calls(turn: &JudgeCase) -> bool {
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
        group: None,
    }))
}

/// At most so many characters.
pub(crate) fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
