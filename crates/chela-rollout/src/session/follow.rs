//! Which turn a request continues, what followed that turn, and which turns were left behind.

use crate::session::normal::{self, Key, Outline};
use chela_core::{FinishReason, Message, Millis, Role, TurnId, TurnKind, TurnStory};

/// What is kept in memory of a sealed turn to recognise its continuation: constant size but for one text.
#[derive(Clone, Debug)]
pub struct Known {
    /// Its name.
    pub id: TurnId,
    /// The turn it continues.
    pub parent: Option<TurnId>,
    /// Main or side.
    pub kind: TurnKind,
    /// Number of prompt messages that count.
    pub prompt_len: usize,
    /// Their key.
    pub prompt: Key,
    /// The same with the answer.
    pub full: Key,
    /// Number of all prompt messages.
    pub raw_len: usize,
    /// Key of all prompt messages and the answer.
    pub raw: Key,
    /// Key of the system messages.
    pub system: Key,
    /// Key of the tools.
    pub tools: Key,
    /// Had tools.
    pub has_tools: bool,
    /// Key of the answer, `None` when it said and called nothing.
    pub answer: Option<Key>,
    /// The last prompt message that counts, when a user said it.
    pub last_user: Option<String>,
    /// Its key.
    pub last: Key,
    /// The answer as text is one of the words that mean silence.
    pub silent: bool,
    /// Keys of what followed so far.
    pub next: Vec<Key>,
    /// Marked, so never judged.
    pub marked: bool,
    /// Ended by itself with something said.
    pub complete: bool,
    /// Ended by an end id.
    pub ended: bool,
    /// When the request arrived.
    pub created: Millis,
    /// When it was sealed.
    pub completed: Millis,
}

/// Replies by which an agent says that it has nothing to say.
const SILENT: [&str; 2] = ["NO_REPLY", "HEARTBEAT_OK"];

/// Whether an answer says that nothing is to be said.
pub fn is_silent(answer: &Message) -> bool {
    answer.tool_calls.is_empty() && SILENT.contains(&answer.content.trim())
}

/// The name under which a remark that came by feedback stands among what followed a turn: it is in no client's history.
pub const REMARK: &str = "chela-feedback";

fn is_remark(message: &Message) -> bool {
    message.name.as_deref() == Some(REMARK)
}

impl Known {
    /// Reads a stored turn.
    pub fn of(story: &TurnStory) -> Self {
        let turn = &story.turn;
        let conversation = chela_core::Conversation {
            messages: turn.messages.clone(),
            tools: turn.tools.clone(),
            template_args: None,
        };
        let outline = Outline::of(&conversation);
        let answer = normal::key(&turn.answer);
        let last_place = outline.places.last().copied();
        let last = last_place.and_then(|p| turn.messages.get(p));
        let spoke = !turn.answer.content.trim().is_empty() || !turn.answer.tool_calls.is_empty();
        let next = story.next.as_ref().map(|n| {
            n.messages
                .iter()
                .filter(|m| !is_remark(m))
                .map(normal::key)
                .collect()
        });
        Self {
            id: turn.id,
            parent: turn.parent,
            kind: turn.kind,
            prompt_len: outline.len(),
            prompt: outline.whole(),
            full: outline.whole().then(answer),
            raw_len: turn.messages.len(),
            raw: outline
                .raw
                .last()
                .copied()
                .unwrap_or(Key::START)
                .then(answer),
            system: outline.system,
            tools: outline.tools,
            has_tools: outline.has_tools,
            answer: spoke.then_some(answer),
            last_user: last.filter(|m| m.role == Role::User).map(normal::text),
            last: outline.keys.last().copied().unwrap_or(Key::START),
            silent: is_silent(&turn.answer),
            next: next.unwrap_or_default(),
            marked: story.mark.is_some(),
            complete: turn.is_complete(),
            ended: turn.finish == FinishReason::End,
            created: turn.created,
            completed: turn.completed,
        }
    }
}

/// The turn a request continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parent {
    /// Which.
    pub id: TurnId,
    /// Where its answer stands among the messages that count.
    pub answer_at: usize,
    /// All that counts up to there is as it was.
    pub exact: bool,
}

/// The turn whose answer really stands in the request: the longest unchanged history first; else an answer that stands behind the
/// same message or behind a shortened or wrapped form of it (some clients rewrite the message they got answered).
pub fn parent(turns: &[Known], request: &Outline) -> Option<Parent> {
    let exact = turns
        .iter()
        .filter(|t| request.chain.get(t.prompt_len + 1) == Some(&t.full))
        .max_by_key(|t| (t.prompt_len, t.system == request.system, t.id));
    if let Some(turn) = exact {
        let answer_at = turn.prompt_len;
        // A later answer may still stand in the request behind a rewritten message.
        let later = rewritten(turns, request).filter(|p| p.answer_at > answer_at);
        return later.or(Some(Parent {
            id: turn.id,
            answer_at,
            exact: true,
        }));
    }
    rewritten(turns, request)
}

fn rewritten(turns: &[Known], request: &Outline) -> Option<Parent> {
    // After a compaction the history is shorter, and nothing but the last answer is left of what was said before it.
    let newest = turns
        .iter()
        .filter(|t| t.kind == TurnKind::Main && t.complete)
        .max_by_key(|t| t.id)
        .map(|t| t.id);
    let last = (0..request.len())
        .rev()
        .find(|at| request.is_assistant(*at));
    turns
        .iter()
        .filter_map(|turn| {
            let answer = turn.answer?;
            let at = (1..request.len()).rev().find(|at| {
                request.keys[*at] == answer
                    && request.is_assistant(*at)
                    && (same_question(turn, request, at - 1)
                        || (Some(turn.id) == newest && Some(*at) == last && *at < turn.prompt_len))
            })?;
            Some((at, turn.system == request.system, turn.id))
        })
        .max()
        .map(|(answer_at, _, id)| Parent {
            id,
            answer_at,
            exact: false,
        })
}

fn same_question(turn: &Known, request: &Outline, at: usize) -> bool {
    if request.keys[at] == turn.last {
        return true;
    }
    let (Some(then), Some(now)) = (&turn.last_user, request.user_text(at)) else {
        return false;
    };
    !then.is_empty() && !now.is_empty() && (then.contains(now) || now.contains(then.as_str()))
}

/// How sure a session is the request's own: length of the shared history. A shared prompt alone is no sign (two people can begin with
/// the same words), unless the client left out our answer and went on.
pub fn shared(turns: &[Known], request: &Outline) -> Option<(usize, bool)> {
    turns
        .iter()
        .filter_map(|t| {
            let n = t.prompt_len;
            let answered = t.answer.is_some() && request.chain.get(n + 1) == Some(&t.full);
            let dropped = n > 0
                && n < request.len()
                && request.chain[n] == t.prompt
                && !request.is_assistant(n)
                && t.system == request.system;
            let shared = if answered { n + 1 } else { n };
            (answered || dropped).then_some((shared, t.system == request.system))
        })
        .max()
}

/// What followed the answer, as far as it is not recorded yet: user messages and tool results. A history that contradicts what is
/// recorded is another branch and adds nothing.
pub fn next_messages(recorded: &[Key], messages: &[Message]) -> Vec<Message> {
    let followed: Vec<&Message> = messages
        .iter()
        .filter(|m| matches!(m.role, Role::User | Role::Tool) && !normal::is_passing(m))
        .collect();
    let same = followed
        .iter()
        .zip(recorded)
        .all(|(m, k)| normal::key(m) == *k);
    if !same {
        return Vec::new();
    }
    followed.into_iter().skip(recorded.len()).cloned().collect()
}

/// The turn that what follows speaks of: the parent, or behind silent side turns (a heartbeat that answered nothing) the main turn
/// that the person really saw.
pub fn addressee(turns: &[Known], parent: TurnId) -> TurnId {
    let mut at = parent;
    while let Some(turn) = turns.iter().find(|t| t.id == at) {
        match turn.parent {
            Some(before) if turn.kind == TurnKind::Side && turn.silent && before < at => {
                at = before
            }
            _ => break,
        }
    }
    at
}

/// Older turns with the very same request that nobody went on from: this turn, which arrived after they were over, retries them.
pub fn superseded(turns: &[Known], new: &Known) -> Vec<TurnId> {
    turns
        .iter()
        .filter(|t| {
            t.id < new.id
                && t.completed <= new.created
                && t.created < new.created
                && (t.prompt_len, t.prompt, t.system) == (new.prompt_len, new.prompt, new.system)
                && t.kind == new.kind
                && t.next.is_empty()
                && !t.marked
        })
        .map(|t| t.id)
        .collect()
}

/// Turns that nobody went on from although the client went on from a sibling: settled when the session ends, since until then any
/// branch may be taken up again.
pub fn abandoned(turns: &[Known]) -> Vec<TurnId> {
    let went_on =
        |t: &Known| !t.next.is_empty() || turns.iter().any(|child| child.parent == Some(t.id));
    turns
        .iter()
        .filter(|t| {
            let left = !t.marked && t.kind == TurnKind::Main && !went_on(t);
            left && t.parent.is_some()
                && turns
                    .iter()
                    .any(|s| s.parent == t.parent && s.id != t.id && went_on(s))
        })
        .map(|t| t.id)
        .collect()
}

/// Why the parent's tokens cannot begin this prompt; `Ok` = they can, covering this many of the request's messages.
pub fn reusable(turn: &Known, request: &Outline) -> Result<usize, &'static str> {
    if turn.tools != request.tools {
        return Err("tools changed");
    }
    if turn.system != request.system {
        return Err("system prompt changed");
    }
    if request.raw.get(turn.raw_len + 1) != Some(&turn.raw) {
        return Err("history edited");
    }
    Ok(turn.raw_len + 1)
}

#[cfg(test)]
#[path = "follow_tests.rs"]
mod tests;
