//! Tasks with rewards that can be verified: what is asked, and what a reply is worth. Read from a file, or built in.

use crate::{
    LabError, countdown,
    problems::{self, Part, Problem, last_number},
    user::Dice,
};
use serde::Deserialize;
use std::{collections::HashSet, fs, path::Path};

/// What makes a reply right.
#[derive(Clone, Debug, PartialEq)]
pub enum Truth {
    /// Its last number is this.
    Number(f64),
    /// Its last expression uses each of these at most once and comes to the target.
    Countdown {
        /// What may be used.
        numbers: Vec<u64>,
        /// What it must come to.
        target: u64,
    },
}

/// One thing to ask.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    /// As it is asked.
    pub question: String,
    /// What is right.
    pub truth: Truth,
}

impl Item {
    /// 1 for a right reply, 0 for any other.
    pub fn reward(&self, reply: &str) -> f64 {
        let right = match &self.truth {
            Truth::Number(answer) => {
                last_number(reply).is_some_and(|said| (said - answer).abs() < 1e-6)
            }
            Truth::Countdown { numbers, target } => countdown::right(reply, numbers, *target),
        };
        f64::from(u8::from(right))
    }
}

/// A task.
#[derive(Clone, Debug, PartialEq)]
pub struct Task {
    /// Its name, which begins the names of its sessions.
    pub name: String,
    /// The system message.
    pub system: String,
    /// Most tokens of a reply.
    pub max_tokens: usize,
    /// Sampling temperature of training replies.
    pub temperature: f64,
    /// Asked for training, in an order that the seed decides.
    pub training: Vec<Item>,
    /// Read greedily, never trained on.
    pub held_out: Vec<Item>,
}

/// A task as it stands in a file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    name: String,
    kind: String,
    #[serde(default)]
    system: Option<String>,
    #[serde(default)]
    max_tokens: Option<usize>,
    #[serde(default)]
    temperature: Option<f64>,
    /// Digits of the numbers of `arithmetic`.
    #[serde(default)]
    digits: Option<u32>,
    /// What `arithmetic` is made of: `+`, `-`, `*`.
    #[serde(default)]
    operators: Option<Vec<String>>,
    /// Numbers given in `countdown`.
    #[serde(default)]
    numbers: Option<usize>,
    /// JSON lines of `problems`.
    #[serde(default)]
    file: Option<String>,
    /// How many are made, or kept of a file.
    #[serde(default)]
    training: Option<usize>,
    #[serde(default)]
    held_out: Option<usize>,
}

/// The tasks that need no file.
pub const BUILT_IN: [(&str, &str); 3] = [
    ("arithmetic", include_str!("../data/task-arithmetic.toml")),
    ("countdown", include_str!("../data/task-countdown.toml")),
    (
        "word-problems",
        include_str!("../data/task-word-problems.toml"),
    ),
];

impl Task {
    /// A built-in task of this name, or the one in this file.
    pub fn open(name: &str) -> Result<Self, LabError> {
        if let Some((_, text)) = BUILT_IN.iter().find(|(n, _)| *n == name) {
            return Self::parse(text, Path::new(""))
                .map_err(|e| LabError::Problems(format!("{name}: {e}")));
        }
        let path = Path::new(name);
        let text = fs::read_to_string(path).map_err(|e| {
            let known: Vec<&str> = BUILT_IN.iter().map(|(n, _)| *n).collect();
            LabError::Problems(format!(
                "{name}: {e}; give a file, or one of the built-in tasks {}",
                known.join(", ")
            ))
        })?;
        let beside = path.parent().unwrap_or(Path::new(""));
        Self::parse(&text, beside).map_err(|e| LabError::Problems(format!("{name}: {e}")))
    }

    fn parse(text: &str, beside: &Path) -> Result<Self, String> {
        let w: Written = toml::from_str(text).map_err(|e| one_line(&e.to_string()))?;
        let (training, held_out) = (w.training.unwrap_or(400), w.held_out.unwrap_or(100));
        if w.name.is_empty()
            || w.name.len() > 60
            || !w
                .name
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || c == '-')
        {
            return Err(format!(
                "name = {:?}: use 1 to 60 letters, digits and dashes",
                w.name
            ));
        }
        if !(1..=100_000).contains(&training) || !(1..=100_000).contains(&held_out) {
            return Err("training and held_out must be from 1 to 100000".to_owned());
        }
        let only = |kinds: &[&str], field: &str, is: bool| {
            if is && !kinds.contains(&w.kind.as_str()) {
                return Err(format!(
                    "{field} is for kind {}, not {:?}",
                    kinds.join(" or "),
                    w.kind
                ));
            }
            Ok(())
        };
        only(&["arithmetic"], "digits", w.digits.is_some())?;
        only(&["arithmetic"], "operators", w.operators.is_some())?;
        only(&["countdown"], "numbers", w.numbers.is_some())?;
        only(&["problems"], "file", w.file.is_some())?;
        let (items, held) = match w.kind.as_str() {
            "arithmetic" => arithmetic(w.digits.unwrap_or(2), w.operators, (training, held_out))?,
            "countdown" => countdowns(w.numbers.unwrap_or(3), (training, held_out))?,
            "word-problems" => {
                let of = |part, n| -> Vec<Item> {
                    let all = problems::word_problems(part, n);
                    all.iter().filter_map(item).collect()
                };
                (of(Part::Training, training), of(Part::HeldOut, held_out))
            }
            "problems" => {
                let file = w
                    .file
                    .ok_or("kind = \"problems\" needs file = \"….jsonl\"")?;
                from_file(&beside.join(file), (training, held_out))?
            }
            other => {
                return Err(format!(
                    "kind = {other:?}: use arithmetic, countdown, word-problems or problems"
                ));
            }
        };
        let max_tokens = w.max_tokens.unwrap_or(160);
        let temperature = w.temperature.unwrap_or(1.0);
        if !(1..=32_768).contains(&max_tokens) {
            return Err(format!("max_tokens = {max_tokens} must be from 1 to 32768"));
        }
        // Below a tenth nothing is explored, and log-probs are kept at temperature 1.
        if !(0.1..=2.0).contains(&temperature) {
            return Err(format!("temperature = {temperature} must be from 0.1 to 2"));
        }
        Ok(Self {
            name: w.name,
            system: w
                .system
                .unwrap_or_else(|| crate::texts::ASSISTANT.to_owned()),
            max_tokens,
            temperature,
            training: items,
            held_out: held,
        })
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn item(problem: &Problem) -> Option<Item> {
    Some(Item {
        question: problem.question.clone(),
        truth: Truth::Number(problem.answer?),
    })
}

/// `training` and `held_out` different items; those held out come first, so that more training items change none of them.
fn different(
    (training, held_out): (usize, usize),
    mut make: impl FnMut() -> Item,
) -> Result<(Vec<Item>, Vec<Item>), String> {
    let (mut all, mut seen, mut tries) = (Vec::new(), HashSet::new(), 0);
    while all.len() < training + held_out {
        let item = make();
        if seen.insert(item.question.clone()) {
            all.push(item);
        }
        tries += 1;
        if tries > 200 * (training + held_out) {
            return Err(format!(
                "there are not {} different ones of this kind; ask for fewer",
                training + held_out
            ));
        }
    }
    let items = all.split_off(held_out);
    Ok((items, all))
}

fn arithmetic(
    digits: u32,
    operators: Option<Vec<String>>,
    sizes: (usize, usize),
) -> Result<(Vec<Item>, Vec<Item>), String> {
    if !(1..=6).contains(&digits) {
        return Err(format!("digits = {digits} must be from 1 to 6"));
    }
    let operators = operators.unwrap_or_else(|| vec!["+".to_owned(), "-".to_owned()]);
    if operators.is_empty()
        || operators
            .iter()
            .any(|o| !["+", "-", "*"].contains(&o.as_str()))
    {
        return Err(format!(
            "operators = {operators:?}: use \"+\", \"-\", \"*\""
        ));
    }
    let mut dice = Dice::new(81);
    let range = 10u64.pow(digits - 1)..10u64.pow(digits);
    different(sizes, || {
        let at = dice.within(0..operators.len() as u64) as usize;
        let (mut a, mut b) = (dice.within(range.clone()), dice.within(range.clone()));
        let answer = match operators[at].as_str() {
            "+" => a + b,
            "-" => {
                (a, b) = (a.max(b), a.min(b));
                a - b
            }
            _ => a * b,
        };
        Item {
            question: format!("What is {a} {} {b}?", operators[at]),
            truth: Truth::Number(answer as f64),
        }
    })
}

fn countdowns(numbers: usize, sizes: (usize, usize)) -> Result<(Vec<Item>, Vec<Item>), String> {
    if !(2..=6).contains(&numbers) {
        return Err(format!("numbers = {numbers} must be from 2 to 6"));
    }
    let mut dice = Dice::new(82);
    different(sizes, || {
        let (given, target) = countdown::solvable(&mut dice, numbers);
        let list: Vec<String> = given.iter().map(u64::to_string).collect();
        Item {
            question: format!(
                "Use the numbers {} to make {target}, each at most once, with + - * / and brackets. End with the expression alone on the last line.",
                list.join(", ")
            ),
            truth: Truth::Countdown {
                numbers: given,
                target,
            },
        }
    })
}

fn from_file(
    path: &Path,
    (training, held_out): (usize, usize),
) -> Result<(Vec<Item>, Vec<Item>), String> {
    let all = problems::read(path).map_err(|e| e.to_string())?;
    let all: Vec<Item> = all.iter().filter_map(item).collect();
    if all.len() < held_out + 1 {
        return Err(format!(
            "{} has {} problems with an answer; held_out = {held_out} leaves none for training",
            path.display(),
            all.len()
        ));
    }
    let (held, rest) = all.split_at(held_out);
    let mut rest = rest.to_vec();
    rest.truncate(training);
    Ok((rest, held.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_tasks_are_apart_and_can_be_solved() {
        for (name, _) in BUILT_IN {
            let task = Task::open(name).unwrap();
            assert_eq!(task.name, name);
            assert!(task.held_out.len() >= 64 && task.training.len() >= 200);
            let asked: HashSet<&str> = task.training.iter().map(|i| i.question.as_str()).collect();
            assert_eq!(asked.len(), task.training.len());
            assert!(
                task.held_out
                    .iter()
                    .all(|i| !asked.contains(i.question.as_str()))
            );
            for item in &task.held_out {
                assert_eq!(item.reward("I do not know."), 0.0);
                if let Truth::Number(answer) = item.truth {
                    assert_eq!(item.reward(&format!("It is {answer}.")), 1.0);
                    assert_eq!(item.reward(&format!("It is {}.", answer + 1.0)), 0.0);
                }
            }
        }
    }

    #[test]
    fn wrong_files_are_refused_with_the_reason() {
        let refused = |text: &str| Task::parse(text, Path::new("")).unwrap_err();
        for (text, says) in [
            ("name = \"a\"", "kind"),
            ("name = \"a b\"\nkind = \"arithmetic\"", "letters"),
            ("name = \"a\"\nkind = \"chess\"", "chess"),
            (
                "name = \"a\"\nkind = \"arithmetic\"\nsamples = 3",
                "unknown field",
            ),
            ("name = \"a\"\nkind = \"arithmetic\"\ndigits = 0", "digits"),
            (
                "name = \"a\"\nkind = \"arithmetic\"\noperators = [\"^\"]",
                "operators",
            ),
            (
                "name = \"a\"\nkind = \"arithmetic\"\nnumbers = 3",
                "countdown",
            ),
            ("name = \"a\"\nkind = \"countdown\"\nnumbers = 9", "numbers"),
            ("name = \"a\"\nkind = \"problems\"", "file"),
            (
                "name = \"a\"\nkind = \"problems\"\nfile = \"none.jsonl\"",
                "none.jsonl",
            ),
            ("name = \"a\"\nkind = \"arithmetic\"\ndigits = 1", "fewer"),
            (
                "name = \"a\"\nkind = \"arithmetic\"\ntemperature = 0.0",
                "temperature",
            ),
            (
                "name = \"a\"\nkind = \"arithmetic\"\nmax_tokens = 0",
                "max_tokens",
            ),
            (
                "name = \"a\"\nkind = \"arithmetic\"\nheld_out = 0",
                "held_out",
            ),
        ] {
            let error = refused(text);
            assert!(error.contains(says), "{text}: {error}");
        }
        assert!(
            Task::open("no-such-task")
                .unwrap_err()
                .to_string()
                .contains("word-problems")
        );
    }
}
