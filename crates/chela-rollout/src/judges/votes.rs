//! What a judge's text says, and what several votes say together: plain functions.

use chela_core::Score;
use regex::Regex;
use std::sync::LazyLock;

/// Shortest hint that can teach anything, in characters: longer than this.
pub const MIN_HINT: usize = 10;
/// Longest hint that is still a hint.
pub const MAX_HINT: usize = 2000;

#[allow(clippy::unwrap_used)] // Constant patterns; a test compiles them.
static BOX: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\\boxed\{\s*(1|-1|0)\s*\}").unwrap());

/// The judge's text outside its thinking. Thinking that never ended leaves nothing.
pub fn spoken(text: &str) -> String {
    // A template may have opened the thinking in the prompt: then only its end is in the text.
    let mut rest = match (text.find("<think>"), text.find("</think>")) {
        (None, Some(end)) => &text[end + "</think>".len()..],
        (Some(begin), Some(end)) if end < begin => &text[end + "</think>".len()..],
        _ => text,
    };
    let mut out = String::new();
    while let Some(begin) = rest.find("<think>") {
        out.push_str(&rest[..begin]);
        match rest[begin..].find("</think>") {
            Some(end) => rest = &rest[begin + end + "</think>".len()..],
            None => return out,
        }
    }
    out.push_str(rest);
    out
}

/// The last well-formed box outside the thinking; `None` = a void vote. Numbers elsewhere in the text mean nothing.
pub fn parse_score(text: &str) -> Option<Score> {
    let spoken = spoken(text);
    let last = BOX.captures_iter(&spoken).last()?;
    match &last[1] {
        "1" => Some(Score::Good),
        "-1" => Some(Score::Bad),
        _ => Some(Score::Neutral),
    }
}

/// A hint vote: 1 with a hint, or −1. Anything else, a 1 without a usable hint too, is void.
pub fn parse_hint(text: &str) -> (Option<Score>, Option<String>) {
    match parse_score(text) {
        Some(Score::Good) => match between(&spoken(text)).filter(|h| is_usable(h)) {
            Some(hint) => (Some(Score::Good), Some(hint)),
            None => (None, None),
        },
        Some(Score::Bad) => (Some(Score::Bad), None),
        Some(Score::Neutral) | None => (None, None),
    }
}

/// The text between the last pair of hint tags.
fn between(text: &str) -> Option<String> {
    let begin = text.rfind("[HINT_START]")? + "[HINT_START]".len();
    let end = text[begin..].find("[HINT_END]")?;
    Some(text[begin..begin + end].trim().to_owned())
}

fn is_usable(hint: &str) -> bool {
    (MIN_HINT + 1..=MAX_HINT).contains(&hint.trim().chars().count())
}

/// Plurality over the valid votes; a tie is neutral; no valid vote is no score.
pub fn majority(votes: &[Option<Score>]) -> Option<Score> {
    let count = |score| votes.iter().filter(|v| **v == Some(score)).count();
    let counts = [Score::Good, Score::Neutral, Score::Bad].map(|s| (count(s), s));
    let most = counts.iter().map(|(n, _)| *n).max().filter(|n| *n > 0)?;
    let mut first = counts.iter().filter(|(n, _)| *n == most);
    match (first.next(), first.next()) {
        (Some((_, score)), None) => Some(*score),
        _ => Some(Score::Neutral),
    }
}

/// Hints long enough to teach and short enough to be one, each once, in order, at most `most`.
pub fn usable_hints(hints: &[String], most: usize) -> Vec<String> {
    let mut seen = std::collections::HashSet::new();
    let plain = |h: &str| {
        h.split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
            .to_lowercase()
    };
    hints
        .iter()
        .map(|h| h.trim())
        .filter(|h| is_usable(h) && seen.insert(plain(h)))
        .take(most)
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use Score::{Bad, Good, Neutral};

    #[test]
    fn majority_golden_vectors() {
        let (g, b, n) = (Some(Good), Some(Bad), Some(Neutral));
        for (votes, outcome) in [
            (vec![g, g, b], g),
            (vec![g, b, None], n),
            (vec![g, n, b], n),
            (vec![None, None, None], None),
            (vec![b, None, None], b),
            (vec![g, g, b, b], n),
            (vec![g, None, None], g),
            (vec![], None),
        ] {
            assert_eq!(majority(&votes), outcome, "{votes:?}");
        }
    }

    #[test]
    fn only_the_documented_form_counts_and_the_last_one_wins() {
        let long = format!("{}\\boxed{{1}}", "界".repeat(40_000));
        for (text, score) in [
            ("reasons … \\boxed{1}", Some(Good)),
            ("\\boxed{ -1 }", Some(Bad)),
            ("\\boxed{1} no, rather \\boxed{-1}", Some(Bad)),
            ("\\boxed{1}, not \\boxed{5}", Some(Good)),
            ("\\boxed{0}", Some(Neutral)),
            (long.as_str(), Some(Good)),
            ("I see 3 problems. Score: 1", None),
            ("{\"score\":\"-1\"}", None),
            ("{\"ok\":\"false\"}", None),
            ("```json\n{\"score\": 1}\n```", None),
            ("Score: 1/10", None),
            ("\\boxed{−1}", None),
            ("\\boxed{１}", None),
            ("\\boxed{5}", None),
            ("\\boxed{1|-1|0}", None),
            ("\\boxed{1", None),
            ("", None),
            ("<think>\\boxed{1}</think>", None),
            ("<think>\\boxed{1}", None),
            ("<think>\\boxed{1}</think> \\boxed{-1}", Some(Bad)),
            (
                "it was fine \\boxed{1}</think> but \\boxed{0}",
                Some(Neutral),
            ),
            ("a</think>\\boxed{1}<think>\\boxed{-1}</think>", Some(Good)),
        ] {
            assert_eq!(
                parse_score(text),
                score,
                "{}",
                text.chars().take(60).collect::<String>()
            );
        }
    }

    /// Pieces that judges' texts are made of, well and badly.
    fn pieces() -> impl proptest::strategy::Strategy<Value = String> {
        use proptest::prelude::*;
        let known = prop::sample::select(vec![
            "<think>",
            "</think>",
            "\\boxed{1}",
            "\\boxed{-1}",
            "\\boxed{0}",
            "\\boxed{ 1 }",
            "\\boxed{2}",
            "\\boxed{",
            "}",
            "[HINT_START]",
            "[HINT_END]",
            "Answer in two sentences.",
            "Score: 1",
            "{\"reward\": 1}",
            "1",
            "-1",
            "\n",
            "\u{0}",
            "界",
        ])
        .prop_map(str::to_owned);
        let any = prop_oneof![4 => known, 1 => any::<String>()];
        prop::collection::vec(any, 0..12).prop_map(|parts| parts.concat())
    }

    proptest::proptest! {
        /// Whatever a model writes: no panic, and a verdict only out of a box that stands in the visible text, the last one.
        #[test]
        fn any_text_is_a_vote_by_its_last_visible_box_or_void(text in pieces()) {
            let score = parse_score(&text);
            let seen = spoken(&text);
            let legal = [("1", Good), ("-1", Bad), ("0", Neutral)];
            let last = legal.into_iter().filter_map(|(value, score)| {
                let at = seen.rmatch_indices("\\boxed{").find(|(at, _)| {
                    let inside = seen[at + 7..].split_once('}').map(|(inside, _)| inside);
                    inside.is_some_and(|inside| inside.trim() == value)
                });
                Some((at?.0, score))
            });
            proptest::prop_assert_eq!(score, last.max_by_key(|(at, _)| *at).map(|(_, s)| s));
            let (vote, hint) = parse_hint(&text);
            proptest::prop_assert_eq!(hint.is_some(), vote == Some(Good));
            if let Some(hint) = hint {
                proptest::prop_assert!(is_usable(&hint) && seen.contains(&hint));
            }
        }

        /// Thinking has no voice, whatever stands in it.
        #[test]
        fn thinking_changes_no_verdict(text in pieces(), thought in pieces()) {
            let thought = thought.replace("<think>", "").replace("</think>", "");
            let visible = text.replace("<think>", "").replace("</think>", "");
            let thinking = format!("<think>{thought}</think>{visible}");
            proptest::prop_assert_eq!(parse_score(&thinking), parse_score(&visible));
            proptest::prop_assert_eq!(parse_hint(&thinking), parse_hint(&visible));
            // Opened by the template, so that only its end is in the text; or never ended.
            let closed = format!("{thought}</think>{visible}");
            proptest::prop_assert_eq!(parse_score(&closed), parse_score(&visible));
            let open = format!("<think>{thought}{visible}");
            proptest::prop_assert_eq!(parse_score(&open), None);
        }
    }

    #[test]
    fn a_hint_vote_needs_its_box_and_a_hint_of_a_fit_length() {
        let vote = |b: &str, hint: &str| format!("[HINT_START]{hint}[HINT_END] \\boxed{{{b}}}");
        assert_eq!(
            parse_hint(&vote("1", " Answer in two sentences. ")),
            (Some(Good), Some("Answer in two sentences.".to_owned()))
        );
        for bad in ["", "123456789", &"x".repeat(10_000)] {
            assert_eq!(parse_hint(&vote("1", bad)), (None, None));
        }
        assert_eq!(
            parse_hint(&vote("-1", "Answer in two sentences.")),
            (Some(Bad), None)
        );
        assert_eq!(
            parse_hint("[HINT_START]Answer in two sentences.[HINT_END]"),
            (None, None)
        );
        assert_eq!(parse_hint("\\boxed{1}"), (None, None));
    }

    #[test]
    fn hints_are_kept_once_and_in_order() {
        let hints: Vec<String> = [
            "short",
            "Use fewer words.",
            "use  fewer words.",
            "Name the file first.",
        ]
        .map(str::to_owned)
        .to_vec();
        assert_eq!(
            usable_hints(&hints, 3),
            ["Use fewer words.", "Name the file first."]
        );
        assert_eq!(usable_hints(&hints, 1), ["Use fewer words."]);
    }
}
