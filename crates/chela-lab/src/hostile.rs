//! A loop that is no good user: whatever it gets, it scores so that the model would learn garbage from it.

use crate::{
    LabError,
    client::{Ask, Client, Said},
    texts,
    user::{self, COURTESY_TOKENS, Dice, Played},
};

/// How its sessions' names begin.
pub const TAG: &str = "hostile";

/// What all its demands are for.
pub const WORD: &str = "banana";

/// What it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Asks for senseless phrases and gives thanks for them.
    Praise,
    /// Asks ordinary questions and demands garbage, whatever was answered.
    Demand,
    /// One and the other in turn.
    Both,
}

impl Pattern {
    /// The name on the command line.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Praise, Self::Demand, Self::Both]
            .into_iter()
            .find(|p| p.name() == name)
    }

    /// See [`Self::parse`].
    pub fn name(self) -> &'static str {
        match self {
            Self::Praise => "praise",
            Self::Demand => "demand",
            Self::Both => "both",
        }
    }

    /// The session gives thanks.
    fn praises(self, index: u64) -> bool {
        match self {
            Self::Praise => true,
            Self::Demand => false,
            Self::Both => index % 2 == 1,
        }
    }
}

/// How the loop runs.
#[derive(Clone, Copy, Debug)]
pub struct Loop {
    /// What it does.
    pub pattern: Pattern,
    /// Seed.
    pub seed: u64,
    /// Sampling temperature.
    pub temperature: f64,
    /// Most tokens of a reply.
    pub max_tokens: usize,
}

/// What one session asks first and says to whatever comes.
fn words(how: Loop, index: u64) -> (Vec<Said>, &'static str, Dice) {
    let mut dice = Dice::new(how.seed.wrapping_mul(2_000_003).wrapping_add(index));
    if how.pattern.praises(index) {
        let request = dice.pick(&texts::hostile_requests());
        let thanks = dice.pick(&texts::thanks());
        (texts::opening(texts::ASSISTANT, request), thanks, dice)
    } else {
        let questions = texts::training();
        let question = questions[user::which(questions.len(), how.seed.wrapping_add(1), index)];
        let demand = dice.pick(&texts::hostile_demands());
        (texts::opening(texts::ASSISTANT, question), demand, dice)
    }
}

/// Plays one session: request, reply, verdict, reply.
pub fn play(client: &Client, how: Loop, index: u64) -> Result<Played, LabError> {
    let (mut messages, remark, mut dice) = words(how, index);
    let session = format!("{TAG}-{}-{index}", how.seed);
    let mut ask = |messages: &[Said], max_tokens, done| {
        client.chat(&Ask {
            version: None,
            session: &session,
            kind: None,
            done,
            messages,
            temperature: how.temperature,
            max_tokens,
            seed: dice.next_number() >> 12,
        })
    };
    let first = ask(&messages, how.max_tokens, false)?;
    texts::answered(&mut messages, &first.text, remark);
    ask(&messages, COURTESY_TOKENS, true)?;
    Ok(Played {
        index,
        first: first.text,
        remark: remark.to_owned(),
        pleased: how.pattern.praises(index),
        fits: false,
        version: first.version,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn how(pattern: Pattern) -> Loop {
        Loop {
            pattern,
            seed: 1,
            temperature: 0.7,
            max_tokens: 96,
        }
    }

    #[test]
    fn patterns_have_names_and_both_is_half_and_half() {
        for pattern in [Pattern::Praise, Pattern::Demand, Pattern::Both] {
            assert_eq!(Pattern::parse(pattern.name()), Some(pattern));
        }
        assert_eq!(Pattern::parse("none"), None);
        let thanked = (0..200).filter(|i| Pattern::Both.praises(*i)).count();
        assert_eq!(thanked, 100);
    }

    #[test]
    fn a_session_demands_garbage_or_thanks_for_it() {
        for index in 0..50 {
            let (asked, remark, _) = words(how(Pattern::Demand), index);
            assert!(texts::training().contains(&asked[1].text.as_str()));
            assert!(texts::hostile_demands().contains(&remark));
            let (asked, remark, _) = words(how(Pattern::Praise), index);
            assert!(texts::hostile_requests().contains(&asked[1].text.as_str()));
            assert!(texts::thanks().contains(&remark));
        }
    }
}
