//! What users prefer and what counts as a held-out success: the length they like, and not by collapsing.

use serde::Serialize;
use std::{
    collections::{HashMap, HashSet},
    ops::RangeInclusive,
};

/// What a user prefers. The two are opposite: no reply fits both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taste {
    /// At most 40 words.
    Brief,
    /// A full answer, 80 words or more.
    Thorough,
}

/// What a user feels about one reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opinion {
    /// It is as they like it.
    Fits,
    /// It has more words than they like, or never came to an end where an end was wanted.
    TooLong,
    /// It ended with fewer.
    TooShort,
}

impl Taste {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Brief, Self::Thorough];

    /// Its name, which is also that of the profile in experiments.
    pub fn name(self) -> &'static str {
        match self {
            Self::Brief => "brief",
            Self::Thorough => "thorough",
        }
    }

    /// In words.
    pub fn description(self) -> &'static str {
        match self {
            Self::Brief => "brief: at most 40 words",
            Self::Thorough => "thorough: at least 80 words",
        }
    }

    /// Words of a reply that passes. A brief one needs five to be worth the name.
    fn words(self) -> RangeInclusive<usize> {
        match self {
            Self::Brief => 5..=40,
            Self::Thorough => 80..=usize::MAX,
        }
    }

    /// Most tokens of a reply that this user asks for.
    pub fn max_tokens(self) -> usize {
        match self {
            Self::Brief => 96,
            Self::Thorough => 192,
        }
    }

    /// What the simulated user feels about one reply. Who wants much does not mind that their own limit cut it. Nobody complains in conversation that a brief answer is too brief: who wants it
    /// brief is content with three words, though as a held-out success they do not count.
    pub fn opinion(self, reply: &str, ended: bool) -> Opinion {
        let (said, wanted) = (words(reply), self.words());
        match self {
            Self::Brief if !ended || said > *wanted.end() => Opinion::TooLong,
            Self::Thorough if said < *wanted.start() => Opinion::TooShort,
            _ => Opinion::Fits,
        }
    }

    /// The length is one that passes.
    fn passes(self, reply: &str, ended: bool) -> bool {
        (ended || self == Self::Thorough) && self.words().contains(&words(reply))
    }
}

/// Words separated by white space that hold a letter or digit.
pub fn words(text: &str) -> usize {
    text.split_whitespace()
        .filter(|w| w.chars().any(char::is_alphanumeric))
        .count()
}

/// Words that carry no topic.
const STOP: &[&str] = &[
    "about",
    "after",
    "again",
    "also",
    "always",
    "another",
    "because",
    "been",
    "before",
    "being",
    "best",
    "between",
    "both",
    "could",
    "does",
    "doing",
    "done",
    "during",
    "each",
    "even",
    "every",
    "explain",
    "from",
    "good",
    "have",
    "help",
    "here",
    "into",
    "just",
    "keep",
    "kind",
    "know",
    "like",
    "long",
    "made",
    "make",
    "many",
    "more",
    "most",
    "much",
    "need",
    "only",
    "other",
    "over",
    "really",
    "should",
    "some",
    "such",
    "take",
    "tell",
    "than",
    "that",
    "their",
    "them",
    "then",
    "there",
    "these",
    "they",
    "thing",
    "things",
    "this",
    "those",
    "through",
    "time",
    "under",
    "very",
    "want",
    "ways",
    "well",
    "were",
    "what",
    "when",
    "where",
    "which",
    "while",
    "will",
    "with",
    "without",
    "work",
    "works",
    "would",
    "your",
    "different",
    "people",
    "usually",
    "often",
    "actually",
    "easily",
    "safely",
];

/// Words of at least four letters that carry a topic, cut to a crude stem so that `planets` meets `planet`.
pub fn content_words(text: &str) -> HashSet<String> {
    text.split(|c: char| !c.is_alphanumeric())
        .map(str::to_lowercase)
        .filter(|w| w.chars().count() >= 4 && !STOP.contains(&w.as_str()))
        .map(|w| w.chars().take(5).collect())
        .collect()
}

/// The reply speaks of what was asked.
pub fn on_topic(question: &str, reply: &str) -> bool {
    !content_words(question).is_disjoint(&content_words(reply))
}

/// One held-out reply.
#[derive(Clone, Debug, PartialEq)]
pub struct HeldOut {
    /// What was asked.
    pub question: String,
    /// What was answered.
    pub reply: String,
    /// Ended by itself.
    pub ended: bool,
    /// Tokens.
    pub tokens: usize,
}

/// Figures of a held-out set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Scores {
    /// Share that passes: of the length that the taste wants, ended, on topic, repeats no other reply.
    pub passed: f64,
    /// Share of replies that no other reply equals.
    pub distinct: f64,
    /// Share on topic.
    pub on_topic: f64,
    /// Mean tokens of a reply (cut at the limit asked for).
    pub mean_tokens: f64,
}

/// Scores a held-out set by one taste.
pub fn score(taste: Taste, replies: &[HeldOut]) -> Scores {
    if replies.is_empty() {
        return Scores::default();
    }
    let normal = |text: &str| {
        text.split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
            .to_lowercase()
    };
    let mut seen: HashMap<String, usize> = HashMap::new();
    for reply in replies {
        *seen.entry(normal(&reply.reply)).or_default() += 1;
    }
    let unique = |r: &HeldOut| seen.get(&normal(&r.reply)) == Some(&1);
    let passes = |r: &&HeldOut| {
        taste.passes(&r.reply, r.ended) && on_topic(&r.question, &r.reply) && unique(r)
    };
    let share = |n: usize| n as f64 / replies.len() as f64;
    Scores {
        passed: share(replies.iter().filter(passes).count()),
        distinct: share(replies.iter().filter(|r| unique(r)).count()),
        on_topic: share(
            replies
                .iter()
                .filter(|r| on_topic(&r.question, &r.reply))
                .count(),
        ),
        mean_tokens: replies.iter().map(|r| r.tokens as f64).sum::<f64>() / replies.len() as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(question: &str, reply: &str, ended: bool) -> HeldOut {
        HeldOut {
            question: question.to_owned(),
            reply: reply.to_owned(),
            ended,
            tokens: 10,
        }
    }

    #[test]
    fn a_brief_answer_passes_and_a_collapsed_one_does_not() {
        let question = "Why do planets orbit the sun?";
        let good = held(
            question,
            "Gravity pulls each planet toward the sun while it moves sideways.",
            true,
        );
        assert_eq!(score(Taste::Brief, std::slice::from_ref(&good)).passed, 1.0);
        for bad in [
            held(question, "Gravity does it.", true),
            held(
                question,
                "It is a very nice question that you asked me there.",
                true,
            ),
            held(question, &good.reply, false),
            held(question, &"planet ".repeat(41), true),
            held(question, "", true),
        ] {
            assert_eq!(
                score(Taste::Brief, std::slice::from_ref(&bad)).passed,
                0.0,
                "{bad:?}"
            );
        }
    }

    #[test]
    fn a_reply_that_another_equals_fails_both() {
        let reply = "Gravity pulls each planet toward the sun always.";
        let both = [
            held("Why do planets orbit?", reply, true),
            held("What is a planet?", reply, true),
        ];
        let scores = score(Taste::Brief, &both);
        assert_eq!(
            (scores.passed, scores.distinct, scores.on_topic),
            (0.0, 0.0, 1.0)
        );
    }

    #[test]
    fn a_reply_fits_at_most_one_taste() {
        for n in 0..200 {
            let reply = "word ".repeat(n);
            let brief = Taste::Brief.opinion(&reply, true);
            let thorough = Taste::Thorough.opinion(&reply, true);
            assert_eq!(brief == Opinion::Fits, n <= 40, "{n}");
            assert_eq!(thorough == Opinion::Fits, n >= 80, "{n}");
            assert_eq!(thorough == Opinion::TooShort, n < 80, "{n}");
            assert_eq!(Taste::Brief.opinion(&reply, false), Opinion::TooLong);
            assert!(!Taste::Brief.passes(&reply, false));
            assert_eq!(Taste::Thorough.opinion(&reply, false), thorough);
        }
    }

    #[test]
    fn a_full_answer_passes_where_a_brief_one_fails() {
        let question = "Why do planets orbit the sun?";
        let full = held(question, &"Each planet falls sideways ".repeat(25), true);
        let short = held(question, "Each planet falls sideways around the sun.", true);
        let passed = |taste, reply: &HeldOut| score(taste, std::slice::from_ref(reply)).passed;
        for (taste, good, bad) in [
            (Taste::Thorough, &full, &short),
            (Taste::Brief, &short, &full),
        ] {
            assert_eq!((passed(taste, good), passed(taste, bad)), (1.0, 0.0));
        }
    }
}
