//! What the demo prints: a live table for people, one object for programs.

use crate::{LabError, demo::ArmResult, standing::Version, user::Played};
use serde::Serialize;
use std::{
    io::Write,
    sync::{Mutex, PoisonError},
};

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

/// A printer of the live table. Users on several threads write to it, a line at a time.
pub struct Table<'a> {
    out: Mutex<&'a mut (dyn Write + Send)>,
    wide: usize,
    /// Width of the column that names the profile; 0 = there is only one.
    who: usize,
}

impl<'a> Table<'a> {
    /// Prints to `out`.
    pub fn new(out: &'a mut (dyn Write + Send)) -> Self {
        Self {
            out: Mutex::new(out),
            wide: 44,
            who: 0,
        }
    }

    /// With a column that names the profile.
    pub fn of_several(out: &'a mut (dyn Write + Send)) -> Self {
        Self {
            who: 10,
            ..Self::new(out)
        }
    }

    /// A line of prose.
    pub fn say(&self, text: &str) -> Result<(), LabError> {
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        writeln!(out, "{text}")?;
        Ok(out.flush()?)
    }

    /// The column heads.
    pub fn head(&self) -> Result<(), LabError> {
        let columns = [
            "session",
            "first reply",
            "what the user said next",
            "verdict",
            "version",
            "held-out",
        ];
        self.say(&format!("\n{}", self.row("profile", columns)))
    }

    /// One session of a profile.
    pub fn session(
        &self,
        profile: &str,
        played: &Played,
        held_out: Option<f64>,
    ) -> Result<(), LabError> {
        let score = held_out.map_or_else(String::new, |s| format!("{s:.2}"));
        let columns = [
            (played.index + 1).to_string(),
            cut(&played.first, self.wide),
            cut(&played.remark, 30),
            if played.pleased { "good" } else { "bad" }.to_owned(),
            format!("v{}", played.version),
            score,
        ];
        self.say(&self.row(profile, columns.each_ref().map(String::as_str)))
    }

    fn row(
        &self,
        profile: &str,
        [session, first, next, verdict, version, score]: [&str; 6],
    ) -> String {
        let (who, wide) = (self.who, self.wide);
        let profile = if who > 0 { profile } else { "" };
        format!(
            "{profile:<who$}{session:>7}  {first:<wide$}  {next:<30}  {verdict:>7}  {version:>7}  {score:>8}"
        )
    }

    /// The end of an arm.
    pub fn arm(&self, name: &str, result: &ArmResult) -> Result<(), LabError> {
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

/// Versions with what the gate and the watch made of them. `hostile` has the samples of each that a hostile loop made.
pub fn versions_table(versions: &[Version], hostile: Option<&[usize]>) -> String {
    let mut lines = vec![format!(
        "{:>7} {:>6} {:>5} {:>7}{}  {:<11}  why, and the gate's figures",
        "version",
        "parent",
        "steps",
        "samples",
        hostile.map_or("", |_| "  hostile"),
        "state"
    )];
    for (i, version) in versions.iter().enumerate() {
        let of_loop = hostile.and_then(|h| h.get(i));
        lines.push(format!(
            "{:>7} {:>6} {:>5} {:>7}{}  {:<11}  {}",
            format!("v{}", version.version),
            format!("v{}", version.parent),
            version.steps,
            version.samples.len(),
            of_loop.map_or_else(String::new, |n| format!("  {n:>7}")),
            version.state,
            found(version)
        ));
    }
    lines.join("\n")
}

/// The reason, then every check: `name value`, with a mark where it failed.
fn found(version: &Version) -> String {
    let checks = version.gate.iter().flat_map(|g| &g.checks);
    let mut all: Vec<String> = checks
        .map(|c| {
            let value = c.value.map_or("-".to_owned(), |v| format!("{v:.2}"));
            let mark = if c.passed { "" } else { "!" };
            format!("{} {value}{mark}", c.name)
        })
        .collect();
    // A gate's reason repeats its checks.
    let why = version.why.as_ref().filter(|_| version.failed().is_empty());
    all.splice(0..0, why.cloned());
    all.join(", ")
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
    use crate::standing::tests::version;

    #[test]
    fn a_column_names_the_profile_where_there_are_several() {
        let played = Played {
            index: 2,
            first: "It is so.".to_owned(),
            remark: "Too short.".to_owned(),
            fits: true,
            pleased: false,
            version: 4,
        };
        let (mut one, mut several) = (Vec::new(), Vec::new());
        Table::new(&mut one).session("p", &played, None).unwrap();
        Table::of_several(&mut several)
            .session("p", &played, Some(0.5))
            .unwrap();
        let (one, several) = (
            String::from_utf8(one).unwrap(),
            String::from_utf8(several).unwrap(),
        );
        assert!(one.starts_with("      3  It is so."), "{one}");
        assert!(
            several.starts_with("p               3  It is so."),
            "{several}"
        );
        assert!(several.trim_end().ends_with("v4      0.50"), "{several}");
    }

    #[test]
    fn versions_are_told_with_reason_and_figures() {
        let mut bad = version(3, 2, "rejected");
        bad.gate = serde_json::from_value(serde_json::json!({"seconds": 1.0, "checks": [
            {"name": "kl_to_base", "value": 2.0, "limit": 1.0, "passed": false, "detail": ""},
            {"name": "rejected", "value": null, "limit": 0.2, "passed": true, "detail": ""},
        ]}))
        .unwrap();
        bad.why = Some("gate: kl_to_base is 2.000".to_owned());
        let mut back = version(4, 2, "rolled_back");
        back.why = Some("by itself: the live score fell".to_owned());
        let told = versions_table(&[bad, back], Some(&[16, 5]));
        let lines: Vec<&str> = told.lines().collect();
        assert!(lines[0].contains("hostile"), "{told}");
        assert!(lines[1].contains("     16  rejected"), "{told}");
        assert!(
            lines[1].ends_with("  kl_to_base 2.00!, rejected -"),
            "{told}"
        );
        assert!(
            lines[2].ends_with("by itself: the live score fell"),
            "{told}"
        );
        assert!(!versions_table(&[], None).contains("hostile"));
    }

    #[test]
    fn cuts_by_characters() {
        assert_eq!(cut("a  b\nc", 9), "a b c");
        assert_eq!(cut(&"界".repeat(50), 10).chars().count(), 10);
    }
}
