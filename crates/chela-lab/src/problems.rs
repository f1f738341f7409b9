//! What simulated users ask: everyday questions, or small word problems with a known answer, generated or read from a file.

use crate::{LabError, texts, user::Dice};
use serde::Deserialize;
use std::{collections::HashSet, fs, path::Path};

/// One thing to ask.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    /// As the user asks it.
    pub question: String,
    /// The number that a right reply ends with; `None` = there is none to check.
    pub answer: Option<f64>,
    /// A pupil's way to it, for those who comment on one.
    pub solution: Option<String>,
}

impl Problem {
    /// A question without a number for an answer.
    pub fn open(question: &str) -> Self {
        Self {
            question: question.to_owned(),
            answer: None,
            solution: None,
        }
    }

    /// Whether a reply is right: its last number is the answer. `None` = nothing to check.
    pub fn right(&self, reply: &str) -> Option<bool> {
        let answer = self.answer?;
        Some(last_number(reply).is_some_and(|said| (said - answer).abs() < 1e-6))
    }
}

/// Which half of the problems; the two share none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Sessions begin with these.
    Training,
    /// Read before and after, never trained on.
    HeldOut,
}

/// The everyday questions of one part.
pub fn everyday(part: Part) -> Vec<Problem> {
    let questions = match part {
        Part::Training => texts::training(),
        Part::HeldOut => texts::held_out(),
    };
    questions.into_iter().map(Problem::open).collect()
}

const NAMES: [&str; 16] = [
    "Anna", "Ben", "Carla", "David", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kira",
    "Liam", "Mara", "Nils", "Olga", "Pavel",
];
const THINGS: [&str; 12] = [
    "apples", "marbles", "stamps", "books", "coins", "pencils", "shells", "cards", "oranges",
    "buttons", "tickets", "stickers",
];

/// Word problems of one or two steps, in the manner of those that schools set: `n` of a part, the same for each call.
pub fn word_problems(part: Part, n: usize) -> Vec<Problem> {
    let names = match part {
        Part::Training => &NAMES[..8],
        Part::HeldOut => &NAMES[8..],
    };
    let mut dice = Dice::new(match part {
        Part::Training => 71,
        Part::HeldOut => 72,
    });
    let (mut all, mut seen) = (Vec::with_capacity(n), HashSet::new());
    while all.len() < n {
        let problem = word_problem(&mut dice, names, all.len());
        if seen.insert(problem.question.clone()) {
            all.push(problem);
        }
    }
    all
}

fn word_problem(dice: &mut Dice, names: &[&str], kind: usize) -> Problem {
    let (name, thing) = (dice.pick(names), dice.pick(&THINGS));
    let mut other = dice.pick(names);
    while other == name {
        other = dice.pick(names);
    }
    let (a, b, c) = (dice.within(12..60), dice.within(3..30), dice.within(2..9));
    let (question, answer, solution) = match kind % 5 {
        0 => (
            format!(
                "{name} has {a} {thing} and gets {b} more from {other}. How many {thing} does {name} have now?"
            ),
            a + b,
            format!("{a} + {b} = {}", a + b),
        ),
        1 => {
            let whole = a + b;
            (
                format!(
                    "{name} had {whole} {thing} and gave {b} of them to {other}. How many {thing} does {name} have left?"
                ),
                a,
                format!("{whole} - {b} = {a}"),
            )
        }
        2 => (
            format!(
                "{name} buys {c} boxes with {b} {thing} in each. How many {thing} is that altogether?"
            ),
            c * b,
            format!("{c} * {b} = {}", c * b),
        ),
        3 => (
            format!(
                "{name} and {other} share {} {thing} between {c} friends, the same number for each. How many {thing} does each friend get?",
                c * b
            ),
            b,
            format!("{} / {c} = {b}", c * b),
        ),
        _ => (
            format!(
                "{name} has {a} {thing}. {other} brings {c} bags with {b} {thing} in each. How many {thing} do they have together?"
            ),
            a + c * b,
            format!("{c} * {b} = {}, {a} + {} = {}", c * b, c * b, a + c * b),
        ),
    };
    Problem {
        question,
        answer: Some(answer as f64),
        solution: Some(solution),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    question: String,
    #[serde(default)]
    answer: Option<serde_json::Value>,
    #[serde(default)]
    solution: Option<String>,
}

/// Reads a file of JSON lines `{"question": …, "answer": …, "solution": …}`; the last two may be missing. An answer is a number, or a
/// text that ends with one, as GSM8K has them (`#### 72`).
pub fn read(path: &Path) -> Result<Vec<Problem>, LabError> {
    let wrong = |what: String| LabError::Problems(format!("{}: {what}", path.display()));
    let text = fs::read_to_string(path).map_err(|e| wrong(e.to_string()))?;
    let mut all = Vec::new();
    for (at, line) in text.lines().enumerate() {
        if line.trim().is_empty() {
            continue;
        }
        let at = at + 1;
        let line: Line =
            serde_json::from_str(line).map_err(|e| wrong(format!("line {at}: {e}")))?;
        if line.question.trim().is_empty() {
            return Err(wrong(format!("line {at}: the question is empty")));
        }
        let answer = match &line.answer {
            None | Some(serde_json::Value::Null) => None,
            Some(serde_json::Value::Number(n)) => n.as_f64(),
            Some(serde_json::Value::String(text)) => Some(
                last_number(text)
                    .ok_or_else(|| wrong(format!("line {at}: no number in the answer {text:?}")))?,
            ),
            Some(other) => {
                return Err(wrong(format!(
                    "line {at}: the answer {other} is neither a number nor a text"
                )));
            }
        };
        all.push(Problem {
            question: line.question,
            answer,
            solution: line.solution,
        });
    }
    if all.len() < 8 {
        return Err(wrong(format!(
            "{} problems; at least 8 are needed",
            all.len()
        )));
    }
    Ok(all)
}

/// The last number in a text; thousands may be set apart by commas, as in `1,200`.
pub fn last_number(text: &str) -> Option<f64> {
    let mut last = None;
    let mut rest = text;
    while let Some(start) = rest.find(|c: char| c.is_ascii_digit()) {
        let minus = rest[..start].ends_with('-')
            && !rest[..start - 1].ends_with(|c: char| c.is_alphanumeric() || c == ' ');
        let tail = &rest[start..];
        let mut end = 0;
        let digit = |at: usize| tail.as_bytes().get(at).is_some_and(u8::is_ascii_digit);
        while digit(end)
            || (matches!(tail.as_bytes().get(end), Some(b'.' | b',')) && digit(end + 1))
        {
            end += 1;
        }
        if let Ok(number) = tail[..end].replace(',', "").parse::<f64>() {
            last = Some(if minus { -number } else { number });
        }
        rest = &tail[end.max(1)..];
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_number_is_read_as_people_write_them() {
        for (text, number) in [
            ("so 12 + 5 = 17.", Some(17.0)),
            ("it costs $1,200.50 in all", Some(1200.5)),
            ("1. First 3\n2. then the answer is 42.", Some(42.0)),
            ("\\boxed{-8}", Some(-8.0)),
            ("20 - 8", Some(8.0)),
            ("none at all", None),
            ("", None),
            ("#### 72", Some(72.0)),
            ("version 3.", Some(3.0)),
            ("ü5é", Some(5.0)),
        ] {
            assert_eq!(last_number(text), number, "{text}");
        }
    }

    #[test]
    fn word_problems_are_different_right_and_apart() {
        let (train, held) = (
            word_problems(Part::Training, 300),
            word_problems(Part::HeldOut, 300),
        );
        let questions = |all: &[Problem]| -> HashSet<String> {
            all.iter().map(|p| p.question.clone()).collect()
        };
        assert_eq!(questions(&train).len(), 300);
        assert!(questions(&train).is_disjoint(&questions(&held)));
        assert_eq!(train, word_problems(Part::Training, 300));
        for problem in train.iter().chain(&held) {
            // The written way ends with the answer.
            assert_eq!(
                problem.right(problem.solution.as_deref().unwrap()),
                Some(true)
            );
            assert_eq!(problem.right("I do not know."), Some(false));
        }
        assert_eq!(Problem::open("Why?").right("7"), None);
    }

    #[test]
    fn a_file_is_read_or_refused_with_its_line() {
        let dir = std::env::temp_dir().join(format!("chela-problems-{}", std::process::id()));
        let refused = |text: &str| {
            fs::write(&dir, text).unwrap();
            read(&dir).unwrap_err().to_string()
        };
        let line = r#"{"question": "How many?", "answer": "so #### 1,072"}"#;
        fs::write(&dir, format!("{line}\n\n").repeat(8)).unwrap();
        let all = read(&dir).unwrap();
        assert_eq!((all.len(), all[0].answer), (8, Some(1072.0)));
        assert!(refused(line).contains("at least 8"));
        assert!(refused("{\"question\": \"\"}").contains("line 1"));
        assert!(refused("{\"questions\": \"x\"}").contains("unknown field"));
        assert!(refused(r#"{"question": "x", "answer": "many"}"#).contains("no number"));
        assert!(refused(r#"{"question": "x", "answer": [1]}"#).contains("neither"));
        fs::remove_file(&dir).unwrap();
        assert!(read(&dir).is_err());
    }
}
