//! From the journals of several runs: curves with intervals, a table of rows for spreadsheets, a picture, and what holds.

use crate::{
    LabError,
    journal::{Reading, Run},
    taste::share,
};
use plotters::prelude::*;
use serde::Serialize;
use std::path::Path;

/// A mean with how far it may be off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Mean {
    /// The mean.
    pub mean: f64,
    /// Two standard errors; NaN = cannot be told.
    pub two_errors: f64,
}

/// Mean of a figure over seeds, with two standard errors of it; one seed has none.
pub fn over_seeds(values: &[f64]) -> Mean {
    let n = values.len() as f64;
    if values.is_empty() {
        return Mean {
            mean: f64::NAN,
            two_errors: f64::NAN,
        };
    }
    let mean = values.iter().sum::<f64>() / n;
    let two_errors = if values.len() < 2 {
        f64::NAN
    } else {
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0);
        2.0 * (variance / n).sqrt()
    };
    Mean { mean, two_errors }
}

/// Mean difference of the same prompts answered after and before, with two standard errors of that; `None` when they are not the same.
pub fn paired(before: &[bool], after: &[bool]) -> Option<Mean> {
    if before.len() != after.len() || before.len() < 2 {
        return None;
    }
    let difference = |(b, a): (&bool, &bool)| f64::from(u8::from(*a)) - f64::from(u8::from(*b));
    let all: Vec<f64> = before.iter().zip(after).map(difference).collect();
    Some(over_seeds(&all))
}

/// One point of a curve: a figure after so many updates.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Point {
    /// Updates.
    pub update: u64,
    /// Runs that were read then.
    pub seeds: usize,
    /// Share of the held-out prompts of the curve that pass.
    pub passed: Mean,
    /// Share of answers that are right, where the whole set was read.
    pub right: Mean,
    /// Mean tokens of a reply.
    pub tokens: Mean,
    /// KL to the base model, nats a token.
    pub kl: Mean,
}

/// One teaching over its seeds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Curve {
    /// Its name.
    pub teaching: String,
    /// By updates.
    pub points: Vec<Point>,
}

/// Points by update, of all runs of one teaching. A whole reading counts with its first prompts, those that are read at each version.
pub fn curve(teaching: &str, runs: &[&Run]) -> Curve {
    let mut updates: Vec<u64> = runs
        .iter()
        .flat_map(|r| r.readings.iter().map(|r| r.update))
        .collect();
    updates.sort_unstable();
    updates.dedup();
    let point = |update: u64| {
        let figure = |of: &dyn Fn(&Run, &Reading) -> Option<f64>| {
            let one = |run: &&&Run| {
                let at = run.readings.iter().filter(|r| r.update == update);
                at.filter_map(|r| of(run, r)).next_back()
            };
            runs.iter().filter_map(|r| one(&r)).collect::<Vec<f64>>()
        };
        let passed = figure(&|run, r| {
            Some(share(
                r.passing.iter().copied().take(run.setting.live.max(1)),
            ))
        });
        let right = figure(&|_, r| (!r.right.is_empty()).then(|| share(r.right.iter().copied())));
        Point {
            update,
            seeds: passed.len(),
            passed: over_seeds(&passed),
            right: over_seeds(&right),
            tokens: over_seeds(&figure(&|_, r| Some(r.mean_tokens))),
            kl: over_seeds(&figure(&|_, r| Some(r.kl_to_base))),
        }
    };
    Curve {
        teaching: teaching.to_owned(),
        points: updates.into_iter().map(point).collect(),
    }
}

/// Where a teaching stands at its end, over its seeds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct End {
    /// Its name.
    pub teaching: String,
    /// Runs that ended.
    pub seeds: usize,
    /// Share of all held-out prompts that pass, before the first step.
    pub before: Mean,
    /// The same, after the last.
    pub after: Mean,
    /// Right answers after minus before, the same problems (seeds one after the other).
    pub right: Option<Mean>,
    /// Right answers before.
    pub right_before: Mean,
    /// Share of replies no other one equals.
    pub distinct: Mean,
    /// Share on topic.
    pub on_topic: Mean,
    /// The same before.
    pub on_topic_before: Mean,
    /// Mean tokens of a reply.
    pub tokens: Mean,
    /// KL to the base model, nats a token.
    pub kl: Mean,
    /// Sessions until three in a row were as the user likes them, by seed; `None` = never.
    pub three: Vec<Option<u64>>,
}

/// The ends of one teaching's runs; `None` while none ended.
pub fn end(teaching: &str, runs: &[&Run]) -> Option<End> {
    let both: Vec<(&Reading, &Reading)> = runs
        .iter()
        .filter_map(|r| Some((r.start()?, r.end()?)))
        .collect();
    if both.is_empty() {
        return None;
    }
    let of = |figure: &dyn Fn(&(&Reading, &Reading)) -> f64| -> Mean {
        over_seeds(&both.iter().map(figure).collect::<Vec<f64>>())
    };
    let passed = |r: &Reading| share(r.passing.iter().copied());
    let right = |of: &dyn Fn(&(&Reading, &Reading)) -> Vec<bool>| -> Vec<bool> {
        both.iter().flat_map(of).collect()
    };
    Some(End {
        teaching: teaching.to_owned(),
        seeds: both.len(),
        before: of(&|(start, _)| passed(start)),
        after: of(&|(_, end)| passed(end)),
        right: paired(
            &right(&|(s, _)| s.right.clone()),
            &right(&|(_, e)| e.right.clone()),
        ),
        right_before: of(&|(start, _)| share(start.right.iter().copied())),
        distinct: of(&|(_, end)| end.distinct),
        on_topic: of(&|(_, end)| end.on_topic),
        on_topic_before: of(&|(start, _)| start.on_topic),
        tokens: of(&|(_, end)| end.mean_tokens),
        kl: of(&|(_, end)| end.kl_to_base),
        three: both.iter().map(|(_, end)| end.three).collect(),
    })
}

/// A claim about the ends, and whether it holds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Claim {
    /// In words, with the figures.
    pub claim: String,
    /// It does.
    pub holds: bool,
}

/// What the experiment is to show: that the words taught it, not the walking; that both signals together are no worse than the better
/// of the two; that nothing was paid for it with right answers or sense.
pub fn claims(ends: &[End]) -> Vec<Claim> {
    let named = |name: &str| ends.iter().find(|e| e.teaching == name);
    let mut all = Vec::new();
    let mut say = |claim: String, holds: bool| all.push(Claim { claim, holds });
    let Some(combined) = named("combined") else {
        return all;
    };
    if let Some(coin) = named("coin") {
        let gap = combined.after.mean - coin.after.mean;
        say(
            format!("combined minus coin: {gap:+.2} (wanted: at least 0.40)"),
            gap >= 0.4,
        );
    }
    let singles: Vec<f64> = ["binary", "opd"]
        .into_iter()
        .filter_map(|n| named(n).map(|e| e.after.mean))
        .collect();
    if let Some(best) = singles.iter().copied().reduce(f64::max) {
        let gap = combined.after.mean - best;
        say(
            format!(
                "combined minus the better of binary and opd: {gap:+.2} (wanted: at least -0.05)"
            ),
            gap >= -0.05,
        );
    }
    if let Some(none) = named("none") {
        let moved = none.after.mean - none.before.mean;
        say(
            format!("without verdicts: {moved:+.2} (wanted: 0, to the byte)"),
            moved == 0.0,
        );
    }
    if let Some(right) = combined.right {
        // The errors are zero where no answer changed.
        let least = -right.two_errors;
        say(
            format!(
                "combined, right answers: {:+.3} from {:.2} (wanted: at least {least:.3}, two paired standard errors)",
                right.mean, combined.right_before.mean
            ),
            right.mean >= least,
        );
    }
    say(
        format!(
            "combined, on topic {:.2} (before {:.2}), distinct {:.2} (wanted: at least 0.90 each)",
            combined.on_topic.mean, combined.on_topic_before.mean, combined.distinct.mean
        ),
        combined.on_topic.mean >= 0.9 && combined.distinct.mean >= 0.9,
    );
    all
}

/// All readings of all runs as rows, with a head.
pub fn csv(runs: &[Run]) -> String {
    let mut text = "model,taste,teaching,seed,update,version,whole,prompts,passed,checked,right,distinct,on_topic,mean_tokens,\
                    kl_to_base,base_nll,sessions,seconds\n"
        .to_owned();
    for run in runs {
        let s = &run.setting;
        for r in &run.readings {
            let right = if r.right.is_empty() {
                String::new()
            } else {
                format!("{:.4}", share(r.right.iter().copied()))
            };
            // A model's name comes from outside.
            let model = s.model.replace([',', '"', '\n'], "_");
            text.push_str(&format!(
                "{model},{},{},{},{},{},{},{},{:.4},{},{right},{:.4},{:.4},{:.2},{:.5},{:.5},{},{:.1}\n",
                s.taste,
                s.teaching,
                s.seed,
                r.update,
                r.version,
                r.whole,
                r.passing.len(),
                share(r.passing.iter().copied()),
                r.right.len(),
                r.distinct,
                r.on_topic,
                r.mean_tokens,
                r.kl_to_base,
                r.base_nll,
                r.sessions,
                r.seconds
            ));
        }
    }
    text
}

const COLORS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(90, 90, 90),
    RGBColor(230, 159, 0),
];

/// A figure of a [`Point`] with the name of its panel.
type Panel<'a> = (&'a str, &'a dyn Fn(&Point) -> Mean);

/// Four panels, score, right answers, length and KL by updates, a line for each teaching with bars of two standard errors.
pub fn picture(path: &Path, title: &str, curves: &[Curve]) -> Result<(), LabError> {
    let area = SVGBackend::new(path, (1000, 720)).into_drawing_area();
    let wrong = |what: String| LabError::Journal(format!("{}: {what}", path.display()));
    area.fill(&WHITE).map_err(|e| wrong(e.to_string()))?;
    let inner = area
        .titled(title, ("sans-serif", 20))
        .map_err(|e| wrong(e.to_string()))?;
    let panels: [Panel<'_>; 4] = [
        ("held-out prompts that pass", &|p| p.passed),
        ("right answers", &|p| p.right),
        ("tokens of a reply", &|p| p.tokens),
        ("KL to the base model, nats a token", &|p| p.kl),
    ];
    for (area, (name, figure)) in inner.split_evenly((2, 2)).iter().zip(panels) {
        panel(area, name, figure, curves).map_err(|e| wrong(e.to_string()))?;
    }
    inner.present().map_err(|e| wrong(e.to_string()))
}

fn panel<DB: DrawingBackend>(
    area: &DrawingArea<DB, plotters::coord::Shift>,
    name: &str,
    figure: &dyn Fn(&Point) -> Mean,
    curves: &[Curve],
) -> Result<(), DrawingAreaErrorKind<DB::ErrorType>> {
    let values = |curve: &Curve| -> Vec<(f64, Mean)> {
        let all = curve.points.iter().map(|p| (p.update as f64, figure(p)));
        all.filter(|(_, m)| m.mean.is_finite()).collect()
    };
    let all: Vec<(f64, Mean)> = curves.iter().flat_map(values).collect();
    let wide = all.iter().map(|(x, _)| *x).fold(1.0, f64::max);
    let error = |m: &Mean| {
        if m.two_errors.is_finite() {
            m.two_errors
        } else {
            0.0
        }
    };
    let high = all
        .iter()
        .map(|(_, m)| m.mean + error(m))
        .fold(0.0, f64::max);
    let low = all
        .iter()
        .map(|(_, m)| m.mean - error(m))
        .fold(0.0, f64::min);
    let high = if high > low { high } else { low + 1.0 };
    let mut chart = ChartBuilder::on(area)
        .caption(name, ("sans-serif", 15))
        .margin(8)
        .x_label_area_size(28)
        .y_label_area_size(44)
        .build_cartesian_2d(0.0..wide * 1.05, low..high * 1.08)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc("updates")
        .draw()?;
    for (at, curve) in curves.iter().enumerate() {
        let color = COLORS[at % COLORS.len()];
        let points = values(curve);
        let line = points.iter().map(|(x, m)| (*x, m.mean));
        chart
            .draw_series(LineSeries::new(line, color.stroke_width(2)))?
            .label(&curve.teaching)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color.stroke_width(2)));
        let bars = points.iter().filter(|(_, m)| error(m) > 0.0).map(|(x, m)| {
            let e = error(m);
            ErrorBar::new_vertical(*x, m.mean - e, m.mean, m.mean + e, color.filled(), 6)
        });
        chart.draw_series(bars)?;
    }
    chart
        .configure_series_labels()
        .background_style(WHITE.mix(0.8))
        .draw()?;
    Ok(())
}

/// The ends for people.
pub fn table(ends: &[End]) -> String {
    let shown = |m: Mean| {
        if m.two_errors.is_finite() {
            format!("{:.2} ± {:.2}", m.mean, m.two_errors)
        } else {
            format!("{:.2}", m.mean)
        }
    };
    let mut text = format!(
        "\n{:<10}{:>6}{:>14}{:>14}{:>18}{:>10}{:>10}{:>8}{:>8}  sessions to three in a row",
        "teaching",
        "seeds",
        "before",
        "after",
        "right after-before",
        "distinct",
        "on topic",
        "tokens",
        "KL"
    );
    for e in ends {
        let right = e.right.map_or_else(|| "-".to_owned(), shown);
        let three: Vec<String> = e
            .three
            .iter()
            .map(|t| t.map_or_else(|| "never".to_owned(), |n| n.to_string()))
            .collect();
        text.push_str(&format!(
            "\n{:<10}{:>6}{:>14}{:>14}{:>18}{:>10.2}{:>10.2}{:>8.0}{:>8.3}  {}",
            e.teaching,
            e.seeds,
            shown(e.before),
            shown(e.after),
            right,
            e.distinct.mean,
            e.on_topic.mean,
            e.tokens.mean,
            e.kl.mean,
            three.join(", ")
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::tests::setting;

    fn run(teaching: &str, seed: u64, passed: [usize; 3]) -> Run {
        let reading = |update: u64, whole: bool, passed: usize| Reading {
            update,
            version: update,
            whole,
            passing: (0..4).map(|i| i < passed).collect(),
            right: if whole {
                vec![true, false, true, false]
            } else {
                Vec::new()
            },
            distinct: 1.0,
            on_topic: 0.95,
            mean_tokens: 40.0,
            kl_to_base: 0.1 * update as f64,
            ..Reading::default()
        };
        let mut setting = setting(teaching, seed);
        setting.live = 4;
        Run {
            setting,
            readings: vec![
                reading(0, true, passed[0]),
                reading(1, false, passed[1]),
                reading(2, true, passed[2]),
            ],
            resumed: 0,
            ended: Some("as it was to".to_owned()),
        }
    }

    #[test]
    fn means_and_errors_are_those_of_the_books() {
        let m = over_seeds(&[0.2, 0.4, 0.6]);
        assert!(
            (m.mean - 0.4).abs() < 1e-12 && (m.two_errors - 2.0 * 0.2 / 3f64.sqrt()).abs() < 1e-12
        );
        assert!(over_seeds(&[0.3]).two_errors.is_nan() && over_seeds(&[]).mean.is_nan());
        let d = paired(&[true, false, false, true], &[true, true, false, false]).unwrap();
        assert_eq!(d.mean, 0.0);
        assert!((d.two_errors - 2.0 * (2.0f64 / 3.0 / 4.0).sqrt()).abs() < 1e-12);
        assert!(paired(&[true], &[true, false]).is_none());
    }

    #[test]
    fn curves_and_claims_say_what_the_runs_say() {
        let runs = [
            run("combined", 1, [0, 2, 4]),
            run("combined", 2, [0, 1, 3]),
            run("coin", 1, [0, 0, 1]),
            run("opd", 1, [0, 3, 4]),
            run("none", 1, [0, 0, 0]),
        ];
        let of = |name: &str| {
            runs.iter()
                .filter(|r| r.setting.teaching == name)
                .collect::<Vec<_>>()
        };
        let combined = curve("combined", &of("combined"));
        assert_eq!(combined.points.len(), 3);
        assert_eq!(
            (combined.points[1].seeds, combined.points[1].passed.mean),
            (2, 0.375)
        );
        assert!(combined.points[1].right.mean.is_nan());
        let ends: Vec<End> = ["combined", "coin", "opd", "none"]
            .iter()
            .filter_map(|n| end(n, &of(n)))
            .collect();
        assert_eq!(ends[0].after.mean, 0.875);
        let held: Vec<bool> = claims(&ends).iter().map(|c| c.holds).collect();
        // 0.875 - 0.25; 0.875 - 1; none moved by nothing; right as before; on topic.
        assert_eq!(held, [true, false, true, true, true]);
        assert!(table(&ends).contains("0.88"));
        let rows = csv(&runs);
        assert_eq!(rows.lines().count(), 1 + 15);
        let columns = |line: &str| line.split(',').count();
        assert!(rows.lines().all(|l| columns(l) == 18), "{rows}");
        let path = std::env::temp_dir().join(format!("chela-curve-{}.svg", std::process::id()));
        picture(&path, "brief", &[combined, curve("coin", &of("coin"))]).unwrap();
        let drawn = std::fs::read_to_string(&path).unwrap();
        assert!(
            drawn.starts_with("<svg")
                && drawn.contains("combined")
                && drawn.matches("<polyline").count() >= 4
        );
        std::fs::remove_file(&path).unwrap();
    }
}
