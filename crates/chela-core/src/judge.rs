//! Who scores a turn from what came next, and what scoring yields.

use crate::{
    BoxFuture,
    chat::{Message, Tool},
    error::{JudgeError, NameError},
    ids::{Profile, SessionId, TurnId},
};

/// What a judge can say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Score {
    /// The next state shows that the reply served.
    Good,
    /// Nothing can be told.
    Neutral,
    /// It shows that it did not.
    Bad,
}

impl Score {
    /// 1 / 0 / −1
    pub fn value(self) -> f32 {
        match self {
            Self::Good => 1.0,
            Self::Neutral => 0.0,
            Self::Bad => -1.0,
        }
    }
}

/// Everything that followed a turn in its branch, in order: user messages and all parallel tool results.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NextState {
    /// Roles User and Tool only.
    pub messages: Vec<Message>,
}

/// Who a verdict comes from; the greater one wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum VerdictSource {
    /// A model that was asked.
    Judge,
    /// A rule or validator, certain and named.
    Rules,
    /// A client or person through the API.
    Explicit,
}

impl VerdictSource {
    /// The word used in the API and on disk.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Judge => "judge",
            Self::Rules => "rules",
            Self::Explicit => "explicit",
        }
    }

    /// The reverse.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Judge, Self::Rules, Self::Explicit]
            .into_iter()
            .find(|s| s.as_str() == text)
    }
}

/// What a vote was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VoteKind {
    /// A score.
    Score,
    /// A hint.
    Hint,
}

/// One answer of one judge, kept as it came.
#[derive(Clone, Debug, PartialEq)]
pub struct Vote {
    /// What was asked.
    pub kind: VoteKind,
    /// Its text, whole; for a failure the reason.
    pub raw: String,
    /// `None` = void: it leaves the denominator.
    pub score: Option<Score>,
    /// The hint it gave, when one was asked for and given.
    pub hint: Option<String>,
}

/// The outcome of judging one turn.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// Name of the judge, rule or client: `rules:too-long`, `self`, `feedback`.
    pub judge: String,
    /// Which kind of voice it is.
    pub source: VerdictSource,
    /// `None` is not neutral: it makes no score. A judge's is 1, 0 or −1; an explicit one any finite number.
    pub reward: Option<f32>,
    /// Hindsight texts, best first.
    pub hints: Vec<String>,
    /// The words that caused it, cut from the next state or the feedback.
    pub evidence: Option<String>,
    /// Every vote, void ones too.
    pub votes: Vec<Vote>,
    /// The replies that the reward is compared with; only explicit verdicts name them.
    pub group: Option<Group>,
}

/// Replies to one prompt whose rewards are compared with one another: those of a profile that name the same id and size.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Group {
    id: String,
    size: usize,
}

impl Group {
    /// Most replies of one.
    pub const MOST: usize = 1024;

    /// Accepts an id of 1 to 200 characters without control characters and a size of 1 to [`Group::MOST`].
    pub fn new(id: impl Into<String>, size: usize) -> Result<Self, NameError> {
        let id = id.into();
        if id.is_empty() || id.chars().count() > 200 || id.chars().any(char::is_control) {
            return Err(NameError::Group(id.chars().take(80).collect()));
        }
        if !(1..=Self::MOST).contains(&size) {
            return Err(NameError::GroupSize(size));
        }
        Ok(Self { id, size })
    }

    /// The client's name for it.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// How many replies it has once it is whole.
    pub fn size(&self) -> usize {
        self.size
    }
}

/// What a judge reads.
#[derive(Clone, Debug, PartialEq)]
pub struct JudgeCase {
    /// Which turn.
    pub turn: TurnId,
    /// Whose.
    pub profile: Profile,
    /// In which session.
    pub session: SessionId,
    /// The request's messages, oldest first.
    pub messages: Vec<Message>,
    /// The tools it offered.
    pub tools: Vec<Tool>,
    /// The reply.
    pub answer: Message,
    /// The reply was cut by its length.
    pub truncated: bool,
    /// What came next.
    pub next: NextState,
}

/// Scores turns. A judge that is down gives an error, never a score.
pub trait Judge: Send + Sync {
    /// Its name in verdicts and configuration.
    fn name(&self) -> &str;
    /// `Ok(None)`: this judge has nothing to say about this turn.
    fn judge<'a>(
        &'a self,
        case: &'a JudgeCase,
    ) -> BoxFuture<'a, Result<Option<Verdict>, JudgeError>>;
}

/// A text to complete for a judge.
#[derive(Clone, Debug, PartialEq)]
pub struct TextRequest {
    /// The conversation.
    pub messages: Vec<Message>,
    /// Most tokens of the answer.
    pub max_tokens: usize,
    /// Sampling temperature.
    pub temperature: f32,
    /// Same seed, same answer where the model can.
    pub seed: u64,
}

/// A model that answers in text: the base model here, or one behind an address.
pub trait TextModel: Send + Sync {
    /// Answers. The visible text only; thinking is left out where it can be told apart.
    fn complete(&self, request: TextRequest) -> BoxFuture<'_, Result<String, JudgeError>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_a_name_and_at_least_one_reply() {
        let long = "é".repeat(200);
        assert_eq!(Group::new(long.as_str(), 1024).unwrap().id(), long);
        for (id, size) in [("", 2), ("a\nb", 2), ("a", 0), ("a", 1025)] {
            assert!(Group::new(id, size).is_err(), "{id:?} {size}");
        }
        assert!(Group::new(long + "é", 2).is_err());
    }
}
