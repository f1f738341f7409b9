//! What users prefer and what counts as a held-out success: the length they like, and not by collapsing.

use serde::Serialize;
use std::{
    collections::{HashMap, HashSet},
    ops::RangeInclusive,
};

/// What a user prefers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taste {
    /// At most 40 words.
    Brief,
    /// A full answer, 80 words or more.
    Thorough,
    /// As a person would write it: no bold, no list, no boxed result, no formulas.
    Student,
    /// Specific comments on a pupil's work: every number of it named, 100 words or more.
    Ta,
    /// Warm comments on a pupil's work: praise that names the step.
    Teacher,
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
    /// It is not written in the manner they like.
    Manner,
}

impl Taste {
    /// All.
    pub const ALL: [Self; 5] = [
        Self::Brief,
        Self::Thorough,
        Self::Student,
        Self::Ta,
        Self::Teacher,
    ];
    /// Two that no reply fits both of.
    pub const OPPOSITE: [Self; 2] = [Self::Brief, Self::Thorough];

    /// Its name, which is also that of the profile in experiments.
    pub fn name(self) -> &'static str {
        match self {
            Self::Brief => "brief",
            Self::Thorough => "thorough",
            Self::Student => "student",
            Self::Ta => "ta",
            Self::Teacher => "teacher",
        }
    }

    /// The one of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|t| t.name() == name)
    }

    /// In words.
    pub fn description(self) -> &'static str {
        match self {
            Self::Brief => "brief: at most 40 words",
            Self::Thorough => "thorough: at least 80 words",
            Self::Student => {
                "student: no bold, no list, no boxed result, as a person would write it"
            }
            Self::Ta => "TA: specific comments that name every number, at least 100 words",
            Self::Teacher => "teacher: warm, praise that names the step",
        }
    }

    /// Words of a reply that passes. It needs five to be worth the name.
    fn words(self) -> RangeInclusive<usize> {
        match self {
            Self::Brief => 5..=40,
            Self::Thorough => 80..=usize::MAX,
            Self::Ta => 100..=usize::MAX,
            Self::Student | Self::Teacher => 5..=usize::MAX,
        }
    }

    /// Most tokens of a reply that this user asks for.
    pub fn max_tokens(self) -> usize {
        match self {
            Self::Brief => 96,
            Self::Student | Self::Ta | Self::Teacher => 160,
            Self::Thorough => 192,
        }
    }

    /// Whether they comment on a pupil's work, instead of asking for an answer.
    pub fn comments(self) -> bool {
        matches!(self, Self::Ta | Self::Teacher)
    }

    /// Whether a reply may be cut by its own limit: who wants much does not mind.
    fn takes_cut(self) -> bool {
        matches!(self, Self::Thorough | Self::Ta)
    }

    /// Written as they like it, whatever its length.
    fn manner(self, question: &str, reply: &str) -> bool {
        match self {
            Self::Brief | Self::Thorough => true,
            Self::Student => plain(reply),
            Self::Ta => specific(question, reply),
            Self::Teacher => praises_a_step(reply),
        }
    }

    /// What the simulated user feels about one reply. Nobody complains in conversation that a brief answer is too brief: who wants it
    /// brief is content with three words, though as a held-out success they do not count.
    pub fn opinion(self, question: &str, reply: &str, ended: bool) -> Opinion {
        let (said, wanted) = (words(reply), self.words());
        match self {
            Self::Brief if !ended || said > *wanted.end() => Opinion::TooLong,
            Self::Thorough | Self::Ta if said < *wanted.start() => Opinion::TooShort,
            _ if !self.manner(question, reply) => Opinion::Manner,
            _ => Opinion::Fits,
        }
    }

    /// The length and the manner are ones that pass.
    fn passes(self, question: &str, reply: &str, ended: bool) -> bool {
        (ended || self.takes_cut())
            && self.words().contains(&words(reply))
            && self.manner(question, reply)
    }
}

/// No bold, heading, list, numbered step, boxed result or LaTeX: nothing that tells a machine from somebody who writes by hand.
fn plain(reply: &str) -> bool {
    const MARKS: [&str; 8] = ["**", "__", "\\boxed", "\\(", "\\[", "$$", "\\frac", "```"];
    let listed = |line: &str| {
        let line = line.trim_start();
        let digits = line.trim_start_matches(|c: char| c.is_ascii_digit());
        let numbered = digits.len() < line.len() && digits.starts_with(['.', ')', ':']);
        let step = line
            .get(..5)
            .is_some_and(|start| start.eq_ignore_ascii_case("step "));
        let spaced = |rest: &str| rest.starts_with([' ', '\t']);
        let bullet = line
            .strip_prefix(['-', '*', '\u{2022}'])
            .is_some_and(spaced);
        // `3.5 metres` is no numbered step.
        let decimal = digits
            .get(1..)
            .is_some_and(|r| r.starts_with(|c: char| c.is_ascii_digit()));
        (numbered && !decimal) || step || bullet || line.starts_with('#')
    };
    !MARKS.iter().any(|m| reply.contains(m)) && !reply.lines().any(listed)
}

/// Names every number of the question, or where it has none, two of its words.
fn specific(question: &str, reply: &str) -> bool {
    let numbers = |text: &str| -> HashSet<String> {
        let parts = text.split(|c: char| !c.is_ascii_digit());
        parts.filter(|p| !p.is_empty()).map(str::to_owned).collect()
    };
    let asked = numbers(question);
    if asked.is_empty() {
        return content_words(question)
            .intersection(&content_words(reply))
            .count()
            >= 2;
    }
    asked.is_subset(&numbers(reply))
}

/// A sentence that praises and names what for: a number, or an operation.
fn praises_a_step(reply: &str) -> bool {
    const PRAISE: [&str; 14] = [
        "well done",
        "good job",
        "great",
        "nice",
        "excellent",
        "wonderful",
        "proud",
        "fantastic",
        "lovely",
        "bravo",
        "brilliant",
        "good work",
        "amazing",
        "impressive",
    ];
    const STEP: [&str; 11] = [
        "add",
        "subtract",
        "multipl",
        "divid",
        "counted",
        "taking away",
        "took away",
        "shared",
        "sum",
        "product",
        "step",
    ];
    reply
        .to_lowercase()
        .split(['.', '!', '?', '\n'])
        .any(|sentence| {
            PRAISE.iter().any(|p| sentence.contains(p))
                && (sentence.contains(|c: char| c.is_ascii_digit())
                    || STEP.iter().any(|s| sentence.contains(s)))
        })
}

/// A reply that says that there is none.
fn failure_notice(reply: &str) -> bool {
    const NOTICES: [&str; 7] = [
        "i'm sorry, but",
        "i am sorry, but",
        "as an ai",
        "i cannot help",
        "i can't help",
        "i am unable to",
        "i'm unable to",
    ];
    let reply = reply.to_lowercase();
    NOTICES.iter().any(|n| reply.contains(n))
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
    /// Share that passes: of the length and manner that the taste wants, ended, on topic, no failure notice, repeats no other reply.
    pub passed: f64,
    /// Share of replies that no other reply equals.
    pub distinct: f64,
    /// Share on topic.
    pub on_topic: f64,
    /// Mean tokens of a reply (cut at the limit asked for).
    pub mean_tokens: f64,
}

/// Which replies of a held-out set pass by one taste.
pub fn passing(taste: Taste, replies: &[HeldOut]) -> Vec<bool> {
    let unique = unique(replies);
    let passes = |(r, unique): (&HeldOut, bool)| {
        let fits = taste.passes(&r.question, &r.reply, r.ended);
        fits && unique && on_topic(&r.question, &r.reply) && !failure_notice(&r.reply)
    };
    replies.iter().zip(unique).map(passes).collect()
}

/// Which replies no other one equals, white space and case aside.
fn unique(replies: &[HeldOut]) -> Vec<bool> {
    let normal = |text: &str| {
        let words: Vec<&str> = text.split_whitespace().collect();
        words.join(" ").to_lowercase()
    };
    let mut seen: HashMap<String, usize> = HashMap::new();
    for reply in replies {
        *seen.entry(normal(&reply.reply)).or_default() += 1;
    }
    let once = |r: &HeldOut| seen.get(&normal(&r.reply)) == Some(&1);
    replies.iter().map(once).collect()
}

/// Scores a held-out set by one taste.
pub fn score(taste: Taste, replies: &[HeldOut]) -> Scores {
    if replies.is_empty() {
        return Scores::default();
    }
    let share = |of: &dyn Fn(&HeldOut) -> bool| share(replies.iter().map(of));
    Scores {
        passed: self::share(passing(taste, replies)),
        distinct: self::share(unique(replies)),
        on_topic: share(&|r| on_topic(&r.question, &r.reply)),
        mean_tokens: replies.iter().map(|r| r.tokens as f64).sum::<f64>() / replies.len() as f64,
    }
}

/// The part that is true; 0 of nothing.
pub fn share(all: impl IntoIterator<Item = bool>) -> f64 {
    let (mut yes, mut n) = (0usize, 0usize);
    for one in all {
        yes += usize::from(one);
        n += 1;
    }
    yes as f64 / n.max(1) as f64
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
            let brief = Taste::Brief.opinion("", &reply, true);
            let thorough = Taste::Thorough.opinion("", &reply, true);
            assert_eq!(brief == Opinion::Fits, n <= 40, "{n}");
            assert_eq!(thorough == Opinion::Fits, n >= 80, "{n}");
            assert_eq!(thorough == Opinion::TooShort, n < 80, "{n}");
            assert_eq!(Taste::Brief.opinion("", &reply, false), Opinion::TooLong);
            assert!(!Taste::Brief.passes("", &reply, false));
            assert_eq!(Taste::Thorough.opinion("", &reply, false), thorough);
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

    #[test]
    fn a_student_wants_what_a_person_would_write() {
        let question = "Anna has 12 apples and gets 3 more. How many apples does Anna have now?";
        let passed =
            |reply: &str| score(Taste::Student, &[held(question, reply, true)]).passed == 1.0;
        assert!(passed(
            "Anna starts with 12 apples and gets 3 more, so she has 15 apples."
        ));
        assert!(passed(
            "Each apple weighs 3.5 ounces.\n3.5 times 12 apples is 42 - a lot."
        ));
        for bad in [
            "**Answer**: Anna has 15 apples now.",
            "Here is how:\n1. Take the 12 apples.\n2. Add 3 apples.",
            "Step 1: take the 12 apples and add three apples.",
            "# Apples\nAnna has 15 apples now, of course.",
            "So Anna has \\boxed{15} apples now, of course.",
            "She has \\(12 + 3 = 15\\) apples now in all.",
            "She has:\n- 12 apples\n- 3 apples more",
            "I'm sorry, but I cannot count apples for Anna.",
            "15 apples",
        ] {
            assert!(!passed(bad), "{bad}");
        }
    }

    #[test]
    fn comments_are_specific_or_warm() {
        let question = "A pupil was asked what 12 + 3 is and wrote 12 + 3 = 15. Please comment.";
        let long = "The pupil took the number twelve and went on from there. ".repeat(10);
        let named = format!("{long} The pupil added 12 and 3 to 15.");
        let ta = |reply: &str| Taste::Ta.opinion(question, reply, true);
        assert_eq!(ta("They added 12 and 3 to 15."), Opinion::TooShort);
        assert_eq!(ta(&long), Opinion::Manner);
        assert_eq!(ta(&named), Opinion::Fits);
        let warm = |reply: &str| Taste::Teacher.opinion(question, reply, true);
        assert_eq!(warm("Well done for adding 12 and 3!"), Opinion::Fits);
        assert_eq!(
            warm("Well done! The pupil added twelve and three."),
            Opinion::Manner
        );
        assert_eq!(warm("The result 15 is right."), Opinion::Manner);
    }

    #[test]
    fn every_taste_has_a_name() {
        for taste in Taste::ALL {
            assert_eq!(Taste::named(taste.name()), Some(taste));
        }
        assert_eq!(Taste::named("loud"), None);
    }
}
