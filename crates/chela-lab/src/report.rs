//! What the demo prints: a live table for people, one object for programs.

use crate::{LabError, demo::ArmResult, user::Played};
use serde::Serialize;
use std::io::Write;

/// The object on the last line of `demo --json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Base model.
    pub model: String,
    /// What the user prefers.
    pub preference: String,
    /// Optimizer steps of the version that was read at the end.
    pub updates: u64,
    /// Requests the simulated user made.
    pub interactions: u64,
    /// Held-out share that passes, base model.
    pub before: f64,
    /// The same, last version.
    pub after: f64,
    /// The same, after the control run.
    pub control_after: Option<f64>,
    /// Mean k1 per held-out reply token at temperature 1.
    pub kl_to_base: f64,
    /// Share of held-out replies that no other equals, after.
    pub distinct: f64,
    /// Share of held-out replies on topic, after.
    pub on_topic: f64,
    /// Mean negative log-prob under the base of the held-out replies, before.
    pub base_nll_before: f64,
    /// The same, after.
    pub base_nll_after: f64,
    /// Learning rate.
    pub lr: f64,
    /// Samples of a step.
    pub batch: usize,
    /// Mean tokens of a held-out reply, before (cut at the limit).
    pub mean_tokens_before: f64,
    /// The same, after.
    pub mean_tokens_after: f64,
    /// Wall time.
    pub seconds: f64,
}

/// A printer of the live table.
pub struct Table<'a> {
    out: &'a mut dyn Write,
    wide: usize,
}

impl<'a> Table<'a> {
    /// Prints to `out`.
    pub fn new(out: &'a mut dyn Write) -> Self {
        Self { out, wide: 44 }
    }

    /// A line of prose.
    pub fn say(&mut self, text: &str) -> Result<(), LabError> {
        writeln!(self.out, "{text}")?;
        Ok(self.out.flush()?)
    }

    /// The column heads.
    pub fn head(&mut self) -> Result<(), LabError> {
        let wide = self.wide;
        writeln!(
            self.out,
            "\n{:>7}  {:<wide$}  {:<30}  {:>7}  {:>7}  {:>8}",
            "session", "first reply", "what the user said next", "verdict", "version", "held-out"
        )?;
        Ok(self.out.flush()?)
    }

    /// One session.
    pub fn session(&mut self, played: &Played, held_out: Option<f64>) -> Result<(), LabError> {
        let wide = self.wide;
        let score = held_out.map_or_else(String::new, |s| format!("{s:.2}"));
        writeln!(
            self.out,
            "{:>7}  {:<wide$}  {:<30}  {:>7}  {:>7}  {:>8}",
            played.index + 1,
            cut(&played.first, wide),
            cut(&played.remark, 30),
            if played.pleased { "good" } else { "bad" },
            format!("v{}", played.version),
            score,
        )?;
        Ok(self.out.flush()?)
    }

    /// The end of an arm.
    pub fn arm(&mut self, name: &str, result: &ArmResult) -> Result<(), LabError> {
        self.say(&format!(
            "\n{name}: held-out {:.2} -> {:.2} over {} prompts after {} updates; \
             mean reply {:.0} -> {:.0} tokens; distinct {:.2}, on topic {:.2}; \
             KL to base {:.3} nats a token; base NLL {:.2} -> {:.2}",
            result.before.passed,
            result.after.passed,
            result.held_out,
            result.updates,
            result.before.mean_tokens,
            result.after.mean_tokens,
            result.after.distinct,
            result.after.on_topic,
            result.distance.kl_to_base,
            result.base_nll_before,
            result.distance.base_nll,
        ))
    }
}

/// At most `width` characters on one line.
pub fn cut(text: &str, width: usize) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.chars().count() <= width {
        return line;
    }
    let mut short: String = line.chars().take(width.saturating_sub(1)).collect();
    short.push('…');
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_by_characters() {
        assert_eq!(cut("a  b\nc", 9), "a b c");
        assert_eq!(cut(&"界".repeat(50), 10).chars().count(), 10);
    }
}
