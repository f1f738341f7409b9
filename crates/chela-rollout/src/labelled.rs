//! Turns whose right verdict a person wrote down, and how far judges agree with them.

use crate::{
    config::TruncatedReplies,
    rollout::says_something,
    validators::{Finding, validate},
};
use chela_core::{
    FinishReason, Judge, JudgeCase, Message, NextState, Profile, Role, Score, SessionId, ToolCall,
    TurnId, Verdict,
};
use serde::Deserialize;
use std::{collections::BTreeMap, sync::Arc, time::Instant};
use thiserror::Error;

/// The set written for this project: what users and tools say next in several languages, approvals and complaints in disguise, texts that
/// speak to the judge, replies that praise themselves.
pub const BUILT_IN: &str = include_str!("../data/judged_turns.jsonl");

/// A line that is no labelled turn.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line}: {why}")]
pub struct LabelledError {
    /// From 1.
    pub line: usize,
    /// What is wrong with it.
    pub why: String,
}

/// One turn with its right verdict.
#[derive(Clone, Debug, PartialEq)]
pub struct Labelled {
    /// Its name in reports.
    pub id: String,
    /// What it is an example of.
    pub tags: Vec<String>,
    /// The verdict.
    pub label: Score,
    /// What a judge reads.
    pub case: JudgeCase,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    #[serde(default)]
    id: String,
    #[serde(default)]
    tags: Vec<String>,
    label: i64,
    messages: Vec<Said>,
    answer: Said,
    next: Vec<Said>,
    #[serde(default)]
    truncated: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Said {
    #[serde(default)]
    role: String,
    #[serde(default)]
    content: String,
    #[serde(default)]
    tool_calls: Vec<Call>,
    #[serde(default)]
    is_error: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Call {
    name: String,
    arguments: String,
}

impl Said {
    fn message(self, fallback: Option<Role>) -> Result<Message, String> {
        let role = match (self.role.as_str(), fallback) {
            ("", Some(role)) => role,
            (other, _) => Role::parse(other)
                .ok_or_else(|| format!("role {other:?}: use system, user, assistant or tool"))?,
        };
        let calls = self.tool_calls.into_iter().enumerate();
        Ok(Message {
            tool_calls: calls
                .map(|(i, call)| ToolCall {
                    id: format!("call{i}"),
                    name: call.name,
                    arguments: call.arguments,
                })
                .collect(),
            is_error: self.is_error,
            ..Message::text(role, self.content)
        })
    }
}

/// Reads JSON lines: `{"id", "tags": […], "label": 1|0|-1, "messages": […], "answer": {…}, "next": […], "truncated"}`, messages as
/// `{"role", "content", "tool_calls": [{"name", "arguments"}], "is_error"}`; empty lines are skipped.
pub fn read(text: &str) -> Result<Vec<Labelled>, LabelledError> {
    let lines = text.lines().enumerate();
    let lines = lines.filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(i, line)| one(i, line).map_err(|why| LabelledError { line: i + 1, why }))
        .collect()
}

fn one(index: usize, line: &str) -> Result<Labelled, String> {
    let line: Line = serde_json::from_str(line).map_err(|e| e.to_string())?;
    let label = match line.label {
        1 => Score::Good,
        0 => Score::Neutral,
        -1 => Score::Bad,
        other => return Err(format!("label {other}: use 1, 0 or -1")),
    };
    let messages = line.messages.into_iter().map(|m| m.message(None));
    let next = line.next.into_iter().map(|m| m.message(None));
    let next: Vec<Message> = next.collect::<Result<_, _>>()?;
    if let Some(other) = next
        .iter()
        .find(|m| !matches!(m.role, Role::User | Role::Tool))
    {
        return Err(format!(
            "next: {} cannot follow a reply",
            other.role.as_str()
        ));
    }
    let id = match line.id.as_str() {
        "" => format!("line {}", index + 1),
        id => id.to_owned(),
    };
    Ok(Labelled {
        case: JudgeCase {
            turn: TurnId(index as u64 + 1),
            profile: Profile::default(),
            session: SessionId::new("labelled").map_err(|e| e.to_string())?,
            messages: messages.collect::<Result<_, _>>()?,
            tools: Vec::new(),
            answer: line.answer.message(Some(Role::Assistant))?,
            truncated: line.truncated,
            next: NextState { messages: next },
        },
        id,
        tags: line.tags,
        label,
    })
}

/// Whether the server would put the turn before a judge: what is certain needs none.
pub(crate) fn left_to_judges(case: &JudgeCase) -> bool {
    validate(case, (finish(case), 1), TruncatedReplies::Exclude) == Finding::Ask
}

fn finish(case: &JudgeCase) -> FinishReason {
    if case.truncated {
        FinishReason::Length
    } else {
        FinishReason::End
    }
}

/// What judges made of one turn.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Judged {
    /// Who spoke, as in verdicts; empty = nobody.
    pub judge: String,
    /// What they said.
    pub score: Option<Score>,
    /// Votes that were asked for, and those without a readable answer.
    pub votes: (usize, usize),
    /// Hints that came with it.
    pub hints: usize,
    /// Characters that the votes were long.
    pub written: usize,
    /// How long it took.
    pub seconds: f64,
    /// Why a judge failed.
    pub failed: Option<String>,
}

/// Judges one turn as the server does: what is certain first, then the judges in order, the first with a verdict wins. Failures are
/// not tried again.
pub async fn judge(judges: &[Arc<dyn Judge>], case: &JudgeCase) -> Judged {
    let started = Instant::now();
    let mut judged = match validate(case, (finish(case), 1), TruncatedReplies::Exclude) {
        Finding::Verdict(verdict) => said(&verdict),
        Finding::None(_) => Judged::default(),
        Finding::Ask => heard(judges, case).await,
    };
    judged.seconds = started.elapsed().as_secs_f64();
    judged
}

async fn heard(judges: &[Arc<dyn Judge>], case: &JudgeCase) -> Judged {
    let mut last = Judged::default();
    for judge in judges {
        match judge.judge(case).await {
            Ok(Some(verdict)) => {
                let judged = said(&verdict);
                if says_something(&verdict) {
                    return judged;
                }
                last = judged;
            }
            Ok(None) => {}
            Err(error) => last.failed = Some(format!("{}: {error}", judge.name())),
        }
    }
    last
}

fn said(verdict: &Verdict) -> Judged {
    let scores = [Score::Good, Score::Neutral, Score::Bad];
    Judged {
        judge: verdict.judge.clone(),
        score: verdict
            .reward
            .and_then(|r| scores.into_iter().find(|s| s.value() == r)),
        votes: (
            verdict.votes.len(),
            verdict.votes.iter().filter(|v| v.score.is_none()).count(),
        ),
        hints: verdict.hints.len(),
        written: verdict.votes.iter().map(|v| v.raw.chars().count()).sum(),
        ..Judged::default()
    }
}

/// How far verdicts and labels agree.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Agreement {
    /// Turns by label (1, 0, −1) and verdict (1, 0, −1, none).
    pub confusion: [[usize; 4]; 3],
}

impl Agreement {
    /// Takes a turn in.
    pub fn add(&mut self, label: Score, score: Option<Score>) {
        let place = |score| match score {
            Score::Good => 0,
            Score::Neutral => 1,
            Score::Bad => 2,
        };
        self.confusion[place(label)][score.map_or(3, place)] += 1;
    }

    /// Turns.
    pub fn turns(&self) -> usize {
        self.confusion.iter().flatten().sum()
    }

    /// Turns with a verdict.
    pub fn spoken(&self) -> usize {
        self.turns() - self.confusion.iter().map(|row| row[3]).sum::<usize>()
    }

    /// Turns whose verdict is the label.
    pub fn right(&self) -> usize {
        (0..3).map(|i| self.confusion[i][i]).sum()
    }

    /// Turns that would teach the opposite: good as bad, bad as good.
    pub fn opposite(&self) -> usize {
        self.confusion[0][2] + self.confusion[2][0]
    }

    /// Right among those with a verdict, and its standard error.
    pub fn share(&self) -> Option<(f64, f64)> {
        let n = self.spoken() as f64;
        (n > 0.0).then(|| {
            let share = self.right() as f64 / n;
            (share, (share * (1.0 - share) / n).sqrt())
        })
    }

    /// Cohen's κ over turns with a verdict: agreement beyond what the two distributions alone would give.
    pub fn kappa(&self) -> Option<f64> {
        let n = self.spoken() as f64;
        let by_chance: f64 = (0..3)
            .map(|i| {
                let labels: usize = self.confusion[i][..3].iter().sum();
                let verdicts: usize = self.confusion.iter().map(|row| row[i]).sum();
                labels as f64 * verdicts as f64 / (n * n)
            })
            .sum();
        let (share, _) = self.share()?;
        (by_chance < 1.0).then(|| (share - by_chance) / (1.0 - by_chance))
    }
}

/// Agreement on all turns, and by tag.
pub fn agreement(
    turns: &[Labelled],
    judged: &[Judged],
) -> (Agreement, BTreeMap<String, Agreement>) {
    let (mut all, mut by_tag) = (Agreement::default(), BTreeMap::<String, Agreement>::new());
    for (turn, judged) in turns.iter().zip(judged) {
        all.add(turn.label, judged.score);
        for tag in &turn.tags {
            let tagged = by_tag.entry(tag.clone()).or_default();
            tagged.add(turn.label, judged.score);
        }
    }
    (all, by_tag)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use chela_core::{BoxFuture, JudgeError, VerdictSource};

    #[test]
    fn the_built_in_set_is_what_it_says() {
        let turns = read(BUILT_IN).unwrap();
        assert!(turns.len() >= 120, "{}", turns.len());
        let count = |label| turns.iter().filter(|t| t.label == label).count();
        for label in [Score::Good, Score::Neutral, Score::Bad] {
            assert!(count(label) >= 15, "{label:?}: {}", count(label));
        }
        let tagged = |tag: &str| {
            turns
                .iter()
                .filter(|t| t.tags.iter().any(|x| x == tag))
                .count()
        };
        for tag in [
            "user",
            "tool",
            "injection",
            "fooler",
            "approval-in-disguise",
            "sarcasm",
            "de",
            "fr",
            "zh",
            "ja",
        ] {
            assert!(tagged(tag) > 0, "{tag}");
        }
        let mut ids: Vec<&str> = turns.iter().map(|t| t.id.as_str()).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), turns.len());
        assert!(turns.iter().all(|t| !t.case.next.messages.is_empty()));
    }

    #[test]
    fn a_wrong_line_is_named() {
        let good = r#"{"label":1,"messages":[],"answer":{"content":"a"},"next":[{"role":"user","content":"ok"}]}"#;
        assert_eq!(read(good).unwrap()[0].id, "line 1");
        for (bad, word) in [
            ("{", "EOF"),
            (
                &good.replace("\"label\":1", "\"label\":2"),
                "use 1, 0 or -1",
            ),
            (&good.replace("\"user\"", "\"robot\""), "robot"),
            (&good.replace("\"user\"", "\"assistant\""), "cannot follow"),
            (&good.replace("\"label\"", "\"lable\""), "lable"),
        ] {
            let error = read(&format!("{good}\n\n{bad}")).unwrap_err();
            assert!(
                error.line == 3 && error.to_string().contains(word),
                "{error}"
            );
        }
    }

    /// Says what the last message's first word is.
    struct Echo;

    impl Judge for Echo {
        fn name(&self) -> &str {
            "echo"
        }

        fn judge<'a>(
            &'a self,
            case: &'a JudgeCase,
        ) -> BoxFuture<'a, Result<Option<Verdict>, JudgeError>> {
            Box::pin(async move {
                let said = case.next.messages.last().map_or("", |m| m.content.as_str());
                let reward = match said {
                    "good" => Some(1.0),
                    "bad" => Some(-1.0),
                    "broken" => return Err(JudgeError::Failed("down".to_owned())),
                    _ => return Ok(None),
                };
                Ok(Some(Verdict {
                    judge: "echo".to_owned(),
                    source: VerdictSource::Judge,
                    reward,
                    hints: Vec::new(),
                    evidence: None,
                    votes: Vec::new(),
                    group: None,
                }))
            })
        }
    }

    #[test]
    fn verdicts_are_compared_with_labels() {
        let line = |label: i64, said: &str| {
            format!(
                r#"{{"label":{label},"tags":["{said}"],"messages":[],"answer":{{"content":"a"}},"next":[{{"role":"user","content":"{said}"}}]}}"#
            )
        };
        let text = [
            line(1, "good"),
            line(-1, "good"),
            line(-1, "bad"),
            line(0, "hm"),
            line(1, "broken"),
        ];
        let turns = read(&text.join("\n")).unwrap();
        let judges: Vec<Arc<dyn Judge>> = vec![Arc::new(Echo)];
        let judged: Vec<Judged> = turns
            .iter()
            .map(|t| futures_executor::block_on(judge(&judges, &t.case)))
            .collect();
        let (all, by_tag) = agreement(&turns, &judged);
        assert_eq!(all.confusion, [[1, 0, 0, 1], [0, 0, 0, 1], [1, 0, 1, 0]]);
        assert_eq!(
            (all.turns(), all.spoken(), all.right(), all.opposite()),
            (5, 3, 2, 1)
        );
        assert_eq!(by_tag["good"].opposite(), 1);
        assert!(judged[4].failed.as_ref().unwrap().contains("down"));
        let (share, _) = all.share().unwrap();
        assert!((share - 2.0 / 3.0).abs() < 1e-9);
        // Labels 1/3 and 2/3, verdicts 2/3 and 1/3: 4/9 by chance.
        assert!((all.kappa().unwrap() - (2.0 / 3.0 - 4.0 / 9.0) / (5.0 / 9.0)).abs() < 1e-9);
    }

    #[test]
    fn what_is_certain_needs_no_judge() {
        let text = r#"{"label":-1,"messages":[],"answer":{"tool_calls":[{"name":"f","arguments":"{}"}]},"next":[{"role":"tool","content":"no such file","is_error":true}]}"#;
        let turn = &read(text).unwrap()[0];
        let judged = futures_executor::block_on(judge(&[], &turn.case));
        assert_eq!(
            (judged.judge.as_str(), judged.score),
            ("validator:tool-error", Some(Score::Bad))
        );
    }
}
