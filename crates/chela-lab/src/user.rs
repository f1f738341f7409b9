//! The simulated user: asks an everyday question, says in ordinary words when the reply is not of the length they like, and moves on
//! when it fits.

use crate::{
    LabError,
    client::{Ask, Client, Said},
    taste::{Opinion, Taste},
    texts,
};

/// Whether the user's remarks mean anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arm {
    /// Remarks follow the preference.
    Treatment,
    /// Remarks are thrown by a coin, and the hints speak of something else.
    Control,
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

    /// One of them.
    pub fn pick<'a>(&mut self, all: &[&'a str]) -> &'a str {
        all[(self.next_number() % all.len() as u64) as usize]
    }
}

/// How a session is played.
#[derive(Clone, Copy, Debug)]
pub struct Play {
    /// How its sessions' names begin.
    pub tag: &'static str,
    /// What this user prefers.
    pub taste: Taste,
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
    /// The version that gave the first reply.
    pub version: u64,
}

/// Most tokens of the second reply, which is never judged, since the user is gone: a courtesy after a praise, and after a complaint
/// a second try.
pub(crate) const COURTESY_TOKENS: usize = 12;
/// See [`COURTESY_TOKENS`].
const SECOND_TOKENS: usize = 48;

/// Plays one session: question, reply, remark, reply.
pub fn play(client: &Client, play: Play, index: u64) -> Result<Played, LabError> {
    let mut dice = Dice::new(play.seed.wrapping_mul(1_000_003).wrapping_add(index));
    let session = format!("{}-{}-{index}", play.tag, play.seed);
    let mut messages = texts::opening(play.system, question(play.seed, index));
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
    let (pleased, remarks) = match play.arm {
        Arm::Treatment => {
            let opinion = play.taste.opinion(&first.text, first.ended);
            (
                opinion == Opinion::Fits,
                texts::remarks(play.taste, opinion),
            )
        }
        Arm::Control if dice.next_number() & (1 << 40) != 0 => (true, texts::thanks()),
        Arm::Control => (false, texts::unrelated()),
    };
    let remark = dice.pick(&remarks);
    texts::answered(&mut messages, &first.text, remark);
    let most = if pleased {
        COURTESY_TOKENS
    } else {
        SECOND_TOKENS.min(play.max_tokens)
    };
    ask(&messages, most, true, dice.next_number() >> 12)?;
    Ok(Played {
        index,
        first: first.text,
        remark: remark.to_owned(),
        pleased,
        version: first.version,
    })
}

/// The question of a session. Every one is used once before any is used again; the order depends on the seed.
pub fn question(seed: u64, index: u64) -> &'static str {
    let questions = texts::training();
    let shift = Dice::new(seed).next_number();
    let at = shift.wrapping_add(index.wrapping_mul(coprime(questions.len())));
    questions[(at % questions.len() as u64) as usize]
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
