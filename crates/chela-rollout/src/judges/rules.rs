//! The judge that knows signs: regular expressions on what came next. The first that matches wins.

use crate::{session::normal, validators::cut};
use chela_core::{BoxFuture, Judge, JudgeCase, JudgeError, Role, Verdict, VerdictSource};
use regex::{Captures, Regex, RegexBuilder};
use serde::Deserialize;
use thiserror::Error;

/// Longest piece of text kept as evidence.
const EVIDENCE: usize = 500;

/// Whose words a rule reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RuleRole {
    /// The user's.
    #[default]
    User,
    /// A tool's result.
    Tool,
}

/// One rule, as the configuration has it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Shown in verdicts.
    pub name: String,
    /// A regular expression on one message of what came next, case-insensitive.
    pub pattern: String,
    /// Whose message.
    #[serde(default)]
    pub role: RuleRole,
    /// 1, 0 or −1; none = a hint only.
    #[serde(default)]
    pub reward: Option<f32>,
    /// Hindsight text: `$0` is the match, `$1` … the captures, `$text` the whole message, `$$` a dollar sign.
    #[serde(default)]
    pub hint: Option<String>,
}

/// A rule that cannot be used.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum RuleError {
    /// The pattern is no regular expression.
    #[error("rule {name:?}: the pattern is no regular expression: {why}")]
    Pattern {
        /// The rule.
        name: String,
        /// Where it breaks.
        why: String,
    },
    /// The reward is not a score.
    #[error("rule {name:?}: reward {reward} must be 1, 0 or -1")]
    Reward {
        /// The rule.
        name: String,
        /// What was given.
        reward: f32,
    },
    /// It would say nothing.
    #[error("rule {name:?}: give it a reward, a hint, or both")]
    Empty {
        /// The rule.
        name: String,
    },
}

/// See the module.
pub struct RulesJudge {
    rules: Vec<(Rule, Regex)>,
}

impl RulesJudge {
    /// Rules in the order in which they are tried.
    pub fn new(rules: Vec<Rule>) -> Result<Self, RuleError> {
        let rules = rules.into_iter().map(compiled).collect::<Result<_, _>>()?;
        Ok(Self { rules })
    }

    /// The verdict on what came next, if any rule has one.
    pub fn verdict(&self, case: &JudgeCase) -> Option<Verdict> {
        self.rules.iter().find_map(|(rule, pattern)| {
            let role = match rule.role {
                RuleRole::User => Role::User,
                RuleRole::Tool => Role::Tool,
            };
            case.next
                .messages
                .iter()
                .filter(|m| m.role == role)
                .find_map(|message| {
                    let text = normal::spoken(&message.content);
                    let found = pattern.captures(text)?;
                    let hint = rule.hint.as_ref().map(|h| expand(h, &found, text));
                    Some(Verdict {
                        judge: format!("rules:{}", rule.name),
                        source: VerdictSource::Rules,
                        reward: rule.reward,
                        hints: hint.into_iter().filter(|h| !h.trim().is_empty()).collect(),
                        evidence: Some(cut(text, EVIDENCE)),
                        votes: Vec::new(),
                        group: None,
                    })
                })
        })
    }
}

fn compiled(rule: Rule) -> Result<(Rule, Regex), RuleError> {
    let name = || rule.name.clone();
    if let Some(reward) = rule.reward
        && ![1.0, 0.0, -1.0].contains(&reward)
    {
        return Err(RuleError::Reward {
            name: name(),
            reward,
        });
    }
    if rule.reward.is_none() && rule.hint.as_ref().is_none_or(|h| h.trim().is_empty()) {
        return Err(RuleError::Empty { name: name() });
    }
    let pattern = RegexBuilder::new(&rule.pattern)
        .case_insensitive(true)
        .build()
        .map_err(|e| RuleError::Pattern {
            name: name(),
            why: e.to_string(),
        })?;
    Ok((rule, pattern))
}

/// Puts captures into a template; what the message holds is never read as a template again.
fn expand(template: &str, found: &Captures<'_>, text: &str) -> String {
    let mut out = String::new();
    let mut rest = template;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        if let Some(after) = rest.strip_prefix("text") {
            out.push_str(text.trim());
            rest = after;
        } else if let Some(after) = rest.strip_prefix('$') {
            out.push('$');
            rest = after;
        } else if let Ok(index) = rest[..digits].parse::<usize>() {
            out.push_str(found.get(index).map_or("", |m| m.as_str()));
            rest = &rest[digits..];
        } else {
            out.push('$');
        }
    }
    out.push_str(rest);
    out
}

impl Judge for RulesJudge {
    fn name(&self) -> &str {
        "rules"
    }

    fn judge<'a>(
        &'a self,
        case: &'a JudgeCase,
    ) -> BoxFuture<'a, Result<Option<Verdict>, JudgeError>> {
        Box::pin(async move { Ok(self.verdict(case)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use chela_core::{Message, NextState, Profile, SessionId, TurnId};

    fn rule(name: &str, pattern: &str, reward: Option<f32>, hint: Option<&str>) -> Rule {
        Rule {
            name: name.to_owned(),
            pattern: pattern.to_owned(),
            role: RuleRole::User,
            reward,
            hint: hint.map(str::to_owned),
        }
    }

    fn after(next: &[Message]) -> JudgeCase {
        JudgeCase {
            turn: TurnId(1),
            profile: Profile::default(),
            session: SessionId::new("s").unwrap(),
            messages: vec![Message::user("q")],
            tools: Vec::new(),
            answer: Message::assistant("a"),
            truncated: false,
            next: NextState {
                messages: next.to_vec(),
            },
        }
    }

    #[test]
    fn the_first_rule_that_matches_wins_and_fills_its_hint() {
        let judge = RulesJudge::new(vec![
            rule(
                "length",
                r"at most (\d+) words",
                Some(-1.0),
                Some("Use $1 words, costs $$1: $text"),
            ),
            rule("thanks", r"^thanks", Some(1.0), None),
        ])
        .unwrap();
        let said = "Thanks, but at MOST 40 words, $0 please";
        let verdict = judge.verdict(&after(&[Message::user(said)])).unwrap();
        assert_eq!(
            (verdict.judge.as_str(), verdict.reward),
            ("rules:length", Some(-1.0))
        );
        assert_eq!(verdict.hints, [format!("Use 40 words, costs $1: {said}")]);
        assert_eq!(verdict.evidence.as_deref(), Some(said));
        let verdict = judge.verdict(&after(&[Message::user("thanks!")])).unwrap();
        assert_eq!(verdict.reward, Some(1.0));
        assert!(
            judge
                .verdict(&after(&[Message::user("and the next?")]))
                .is_none()
        );
    }

    #[test]
    fn rules_read_only_their_role() {
        let mut tool = rule("failed", "exit code [1-9]", Some(-1.0), None);
        tool.role = RuleRole::Tool;
        let judge = RulesJudge::new(vec![tool]).unwrap();
        assert!(
            judge
                .verdict(&after(&[Message::user("exit code 1")]))
                .is_none()
        );
        let result = Message::text(Role::Tool, "exit code 1");
        assert!(
            judge
                .verdict(&after(&[Message::text(Role::Tool, "ok"), result]))
                .is_some()
        );
    }

    #[test]
    fn unusable_rules_are_refused_by_name() {
        for (bad, word) in [
            (rule("a", "(", Some(1.0), None), "regular expression"),
            (rule("b", "x", Some(2.0), None), "1, 0 or -1"),
            (rule("c", "x", None, None), "hint"),
        ] {
            let name = bad.name.clone();
            let error = RulesJudge::new(vec![bad])
                .map(|_| ())
                .unwrap_err()
                .to_string();
            assert!(error.contains(word) && error.contains(&name), "{error}");
        }
    }
}
