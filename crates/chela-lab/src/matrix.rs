//! The matrix of models by tastes, and what it says of profiles that are to be apart.

use crate::taste::{self, HeldOut, Scores, Taste};
use serde::Serialize;
use std::collections::BTreeMap;

/// One row of the matrix: a model read by both tastes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// `base`, or the profile.
    pub model: String,
    /// Its version.
    pub version: u64,
    /// Optimizer steps of that version.
    pub steps: u64,
    /// Share of the held-out replies that passes, by taste.
    pub passed: BTreeMap<&'static str, f64>,
    /// Mean tokens of a reply (cut at 192).
    pub mean_tokens: f64,
    /// Share of replies that no other equals.
    pub distinct: f64,
    /// Share on topic.
    pub on_topic: f64,
}

/// A profile against the base model by one taste.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// The profile.
    pub profile: &'static str,
    /// The taste it was read by.
    pub taste: &'static str,
    /// Passed, minus what the base model passes.
    pub difference: f64,
    /// Two standard errors of that.
    pub two_errors: f64,
    /// Better on its own user's taste, or not better on the other's.
    pub as_expected: bool,
}

/// A model's row, from the same replies for both tastes.
pub fn row(model: &str, (version, steps): (u64, u64), replies: &[HeldOut]) -> Row {
    let by = |taste: Taste| taste::score(taste, replies);
    let Scores {
        distinct,
        on_topic,
        mean_tokens,
        ..
    } = by(Taste::Brief);
    Row {
        model: model.to_owned(),
        version,
        steps,
        passed: Taste::OPPOSITE.map(|t| (t.name(), by(t).passed)).into(),
        mean_tokens,
        distinct,
        on_topic,
    }
}

/// What each profile gained over the base model by each taste, and whether that is what two profiles that are apart should show.
pub fn changes(matrix: &[Row], prompts: usize) -> Vec<Change> {
    let Some((base, profiles)) = matrix.split_first() else {
        return Vec::new();
    };
    let mut changes = Vec::new();
    for (row, own) in profiles.iter().zip(Taste::OPPOSITE) {
        for taste in Taste::OPPOSITE {
            let of = |row: &Row| row.passed.get(taste.name()).copied().unwrap_or(0.0);
            let (was, is) = (of(base), of(row));
            let spread = |p: f64| p * (1.0 - p) / prompts.max(1) as f64;
            let two_errors = 2.0 * (spread(was) + spread(is)).sqrt();
            let better = is - was > two_errors;
            changes.push(Change {
                profile: own.name(),
                taste: taste.name(),
                difference: is - was,
                two_errors,
                as_expected: better == (taste == own),
            });
        }
    }
    changes
}

/// The matrix for people.
pub fn matrix_table(matrix: &[Row]) -> String {
    let mut text = format!(
        "\n{:<10}{:>8}{:>7}{:>15}{:>18}{:>13}{:>10}{:>10}",
        "model",
        "version",
        "steps",
        "passes brief",
        "passes thorough",
        "mean tokens",
        "distinct",
        "on topic"
    );
    for row in matrix {
        let passed = |taste: Taste| row.passed.get(taste.name()).copied().unwrap_or(f64::NAN);
        text.push_str(&format!(
            "\n{:<10}{:>8}{:>7}{:>15.2}{:>18.2}{:>13.0}{:>10.2}{:>10.2}",
            row.model,
            format!("v{}", row.version),
            row.steps,
            passed(Taste::Brief),
            passed(Taste::Thorough),
            row.mean_tokens,
            row.distinct,
            row.on_topic
        ));
    }
    text
}

/// One difference for people.
pub fn change_line(change: &Change) -> String {
    format!(
        "profile {} by the taste {}: {:+.2} against the base model (two standard errors: {:.2}), {}",
        change.profile,
        change.taste,
        change.difference,
        change.two_errors,
        if change.as_expected {
            "as expected"
        } else {
            "NOT as expected"
        }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(reply: &str) -> HeldOut {
        HeldOut {
            question: "Why do planets orbit the sun?".to_owned(),
            reply: reply.to_owned(),
            ended: true,
            tokens: 20,
        }
    }

    fn of(model: &str, brief: f64, thorough: f64) -> Row {
        Row {
            passed: [("brief", brief), ("thorough", thorough)].into(),
            ..row(model, (1, 1), &[])
        }
    }

    #[test]
    fn a_row_reads_the_same_replies_by_both_tastes() {
        let replies = [
            held("Each planet falls sideways around the sun."),
            held(&"each planet falls sideways ".repeat(20)),
        ];
        let row = row("base", (0, 0), &replies);
        assert_eq!(row.passed["brief"], 0.5);
        assert_eq!(row.passed["thorough"], 0.5);
        assert_eq!((row.distinct, row.mean_tokens), (1.0, 20.0));
        let shown = matrix_table(&[row]);
        assert!(shown.contains("v0") && shown.contains("0.50"), "{shown}");
    }

    #[test]
    fn better_means_beyond_two_standard_errors_and_only_by_its_own_taste() {
        let base = of("base", 0.05, 0.05);
        let good = [
            base.clone(),
            of("brief", 0.7, 0.02),
            of("thorough", 0.04, 0.4),
        ];
        assert!(changes(&good, 120).iter().all(|c| c.as_expected));
        let mixed = [base, of("brief", 0.07, 0.4), of("thorough", 0.05, 0.4)];
        let expected: Vec<bool> = changes(&mixed, 120).iter().map(|c| c.as_expected).collect();
        assert_eq!(expected, [false, false, true, true]);
    }
}
