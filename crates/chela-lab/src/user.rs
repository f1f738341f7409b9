//! The simulated user: asks an everyday question, says in ordinary words when the reply is not of the length they like, and moves on
//! when it fits.

use crate::{
    LabError,
    client::{Ask, Client, Said},
    problems::Problem,
    taste::{Opinion, Taste},
    texts,
};
use std::ops::Range;

/// Whether the user's remarks mean anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arm {
    /// Remarks follow the preference.
    Treatment,
    /// Remarks are thrown by a coin, and the hints speak of something else.
    Control,
}

/// Who finds the user's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speaker {
    /// They are drawn from those written for this project.
    Scripted,
    /// The base model, told what the user likes and what it felt about the reply.
    Model,
}

/// A small generator (SplitMix64; Steele et al., OOPSLA 2014): seeded, so that a run can be repeated.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// Seeds it.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn next_number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A whole number from this range, which is not empty.
    pub fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.next_number() % (range.end - range.start).max(1)
    }

    /// One of them.
    pub fn pick<'a>(&mut self, all: &[&'a str]) -> &'a str {
        all[(self.next_number() % all.len() as u64) as usize]
    }
}

/// How a session is played.
#[derive(Clone, Copy, Debug)]
pub struct Play<'a> {
    /// How its sessions' names begin.
    pub tag: &'static str,
    /// What this user prefers.
    pub taste: Taste,
    /// What sessions begin with; at least one.
    pub problems: &'a [Problem],
    /// Who finds the words that follow.
    pub speaker: Speaker,
    /// The conversations' system message.
    pub system: &'static str,
    /// Which arm.
    pub arm: Arm,
    /// Seed of the run.
    pub seed: u64,
    /// Sampling temperature.
    pub temperature: f64,
    /// Most tokens of a reply.
    pub max_tokens: usize,
}

/// What happened in a session.
#[derive(Clone, Debug, PartialEq)]
pub struct Played {
    /// Which session.
    pub index: u64,
    /// The first reply.
    pub first: String,
    /// The user's remark on it.
    pub remark: String,
    /// The remark was praise.
    pub pleased: bool,
    /// The reply was as the user likes it, whatever was said; a hostile loop likes nothing.
    pub fits: bool,
    /// The version that gave the first reply.
    pub version: u64,
}

/// Most tokens of the second reply, which is never judged, since the user is gone: a courtesy after a praise, and after a complaint
/// a second try.
pub(crate) const COURTESY_TOKENS: usize = 12;
/// See [`COURTESY_TOKENS`].
const SECOND_TOKENS: usize = 48;

/// Plays one session: question, reply, remark, reply.
pub fn play(client: &Client, play: Play<'_>, index: u64) -> Result<Played, LabError> {
    let mut dice = Dice::new(play.seed.wrapping_mul(1_000_003).wrapping_add(index));
    let session = format!("{}-{}-{index}", play.tag, play.seed);
    let problem = &play.problems[which(play.problems.len(), play.seed, index)];
    let mut messages = texts::opening(play.system, &problem.question);
    let ask = |messages: &[Said], max_tokens, done, seed| {
        client.chat(&Ask {
            version: None,
            session: &session,
            kind: None,
            done,
            messages,
            temperature: play.temperature,
            max_tokens,
            seed,
        })
    };
    let first = ask(&messages, play.max_tokens, false, dice.next_number() >> 12)?;
    let felt = play
        .taste
        .opinion(&problem.question, &first.text, first.ended);
    let (pleased, remarks) = match play.arm {
        Arm::Treatment => (felt == Opinion::Fits, texts::remarks(play.taste, felt)),
        Arm::Control if dice.next_number() & (1 << 40) != 0 => (true, texts::thanks()),
        Arm::Control => (false, texts::unrelated()),
    };
    let scripted = dice.pick(&remarks);
    let remark = match play.speaker {
        Speaker::Scripted => scripted.to_owned(),
        Speaker::Model => in_its_words(client, &play, (&session, scripted, pleased), &mut dice)?,
    };
    texts::answered(&mut messages, &first.text, &remark);
    let most = if pleased {
        COURTESY_TOKENS
    } else {
        SECOND_TOKENS.min(play.max_tokens)
    };
    ask(&messages, most, true, dice.next_number() >> 12)?;
    Ok(Played {
        index,
        first: first.text,
        remark,
        pleased,
        fits: felt == Opinion::Fits,
        version: first.version,
    })
}

/// Most tokens of a remark that a model finds words for.
const REMARK_TOKENS: usize = 40;

/// What the base model makes of a scripted remark: the same content, in words that nobody wrote for a rule to match. An empty reply
/// leaves the scripted one.
fn in_its_words(
    client: &Client,
    play: &Play<'_>,
    (session, scripted, pleased): (&str, &str, bool),
    dice: &mut Dice,
) -> Result<String, LabError> {
    let mood = if pleased {
        "is content"
    } else {
        "is not content"
    };
    let system = "You rewrite what a person says. Reply with one short sentence that means the same, and nothing else.";
    let request = format!(
        "A person who likes replies like this ({}) {mood} and says: {scripted}",
        play.taste.description()
    );
    let said = client.chat(&Ask {
        version: Some(0),
        session: &format!("{session}-words"),
        kind: Some("side"),
        done: true,
        messages: &texts::opening(system, &request),
        temperature: play.temperature,
        max_tokens: REMARK_TOKENS,
        seed: dice.next_number() >> 12,
    })?;
    let said = said.text.trim();
    Ok(if said.is_empty() { scripted } else { said }.to_owned())
}

/// Which of `n` a session begins with. Every one is used once before any is used again; the order depends on the seed.
pub fn which(n: usize, seed: u64, index: u64) -> usize {
    let shift = Dice::new(seed).next_number();
    let at = shift.wrapping_add(index.wrapping_mul(coprime(n)));
    (at % n.max(1) as u64) as usize
}

/// A step that visits every residue of `n`.
fn coprime(n: usize) -> u64 {
    let n = n as u64;
    let gcd = |mut a: u64, mut b: u64| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    (n / 2 + 1..).find(|c| gcd(*c, n) == 1).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_question_is_visited_before_any_again() {
        for n in [1usize, 2, 7, 160, 161] {
            let step = coprime(n);
            let seen: HashSet<u64> = (0..n as u64).map(|i| (i * step) % n as u64).collect();
            assert_eq!(seen.len(), n);
        }
    }

    #[test]
    fn dice_repeat_and_differ() {
        let (mut a, mut b, mut c) = (Dice::new(1), Dice::new(1), Dice::new(2));
        let (x, y, z) = (a.next_number(), b.next_number(), c.next_number());
        assert_eq!(x, y);
        assert_ne!(x, z);
    }
}
