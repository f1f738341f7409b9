//! The user's preference and what counts as a held-out success: brief, and not by collapsing.

use std::collections::{HashMap, HashSet};

/// Most words of a brief reply.
pub const MOST_WORDS: usize = 40;
/// Fewest words of any reply worth the name.
pub const FEWEST_WORDS: usize = 5;

/// Words separated by white space that hold a letter or digit.
pub fn words(text: &str) -> usize {
    text.split_whitespace()
        .filter(|w| w.chars().any(char::is_alphanumeric))
        .count()
}

/// What the simulated user feels about one reply: it ended, and it is short.
pub fn fits(reply: &str, ended: bool) -> bool {
    ended && words(reply) <= MOST_WORDS
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
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Scores {
    /// Share that passes: brief, at least five words, ended, on topic, repeats no other reply.
    pub passed: f64,
    /// Share of replies that no other reply equals.
    pub distinct: f64,
    /// Share on topic.
    pub on_topic: f64,
    /// Mean tokens of a reply (cut at the limit asked for).
    pub mean_tokens: f64,
}

/// Scores a held-out set.
pub fn score(replies: &[HeldOut]) -> Scores {
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
        fits(&r.reply, r.ended)
            && words(&r.reply) >= FEWEST_WORDS
            && on_topic(&r.question, &r.reply)
            && unique(r)
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
        assert_eq!(score(std::slice::from_ref(&good)).passed, 1.0);
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
            assert_eq!(score(std::slice::from_ref(&bad)).passed, 0.0, "{bad:?}");
        }
    }

    #[test]
    fn a_reply_that_another_equals_fails_both() {
        let reply = "Gravity pulls each planet toward the sun always.";
        let both = [
            held("Why do planets orbit?", reply, true),
            held("What is a planet?", reply, true),
        ];
        let scores = score(&both);
        assert_eq!(
            (scores.passed, scores.distinct, scores.on_topic),
            (0.0, 0.0, 1.0)
        );
    }
}
