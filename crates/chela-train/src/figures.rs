//! The figures of a step, kept with its version; docs/learning.md says what each one is.

use crate::{
    batch::{NO_SIGNAL, Prepared},
    groups::NO_DIFFERENCE,
    step::StepOutcome,
};
use chela_core::LeasedSample;
use chela_rl::baseline::Baseline;

/// Counts of samples by how old they were end here; what is older is counted together.
const OLDEST: u64 = 8;

/// Quantiles of ρ, by name.
const QUANTILES: [(&str, f64); 5] = [
    ("ratio_p5", 0.05),
    ("ratio_p50", 0.5),
    ("ratio_p95", 0.95),
    ("ratio_p99", 0.99),
    ("ratio_max", 1.0),
];

/// What is measured around a step.
pub struct Around<'a> {
    /// What was leased for it.
    pub leased: &'a [LeasedSample],
    /// The running mean of rewards, this batch's taken in.
    pub baseline: &'a Baseline,
    /// KL to the base model.
    pub kl: Option<f64>,
    /// How long it took.
    pub seconds: f64,
}

/// The smallest of sorted numbers that at least this part of them does not exceed (nearest rank); 0 of none.
fn quantile(sorted: &[f32], part: f64) -> f64 {
    let rank = (part * sorted.len() as f64).ceil() as usize;
    let at = rank.clamp(1, sorted.len().max(1)) - 1;
    sorted.get(at).map_or(0.0, |v| f64::from(*v))
}

fn mean(values: &[f32]) -> f64 {
    values.iter().map(|v| f64::from(*v)).sum::<f64>() / values.len().max(1) as f64
}

/// By name.
pub fn figures(
    prepared: &Prepared,
    outcome: &StepOutcome,
    around: &Around<'_>,
) -> Vec<(String, f64)> {
    let stats = &outcome.stats;
    let per_token = |sum: f64| sum / stats.tokens.max(1) as f64;
    // Tokens of samples with candidates have no ratio.
    let per_ratio = |sum: f64| sum / stats.ratios.len().max(1) as f64;
    let total: usize = prepared.samples.iter().map(|s| s.tokens().len()).sum();
    let mut ratios = stats.ratios.clone();
    ratios.sort_unstable_by(f32::total_cmp);
    let none = |why: &&(_, String)| [NO_SIGNAL, NO_DIFFERENCE].contains(&why.1.as_str());
    let without = prepared.left_out.iter().filter(none).count();
    let mut all = vec![
        ("loss", stats.loss),
        ("grad_norm", f64::from(outcome.report.grad_norm)),
        ("samples", prepared.samples.len() as f64),
        ("left_out", prepared.left_out.len() as f64),
        ("hinted", prepared.hinted as f64),
        (
            "no_signal",
            without as f64 / around.leased.len().max(1) as f64,
        ),
        ("groups", prepared.groups as f64),
        ("rewards_clipped", prepared.clipped as f64),
        ("tokens", stats.tokens as f64),
        ("tokens_all", total as f64),
        ("tokens_per_second", total as f64 / around.seconds.max(1e-9)),
        ("masked_tokens", stats.masked as f64),
        ("baseline", around.baseline.mean),
        ("baseline_count", around.baseline.count),
        ("seconds", around.seconds),
    ];
    // What there is none of has no mean: a missing figure is not 0.
    if !prepared.rewards.is_empty() {
        all.push(("reward_mean", mean(&prepared.rewards)));
    }
    if !ratios.is_empty() {
        all.extend([
            ("masked_fraction", per_ratio(stats.masked as f64)),
            ("clip_fraction", per_ratio(stats.clipped as f64)),
            ("ratio_mean", mean(&ratios)),
            ("behavior_gap", per_ratio(stats.behavior_gap)),
        ]);
        all.extend(QUANTILES.map(|(name, part)| (name, quantile(&ratios, part))));
    }
    all.extend(rewards(around));
    all.extend(outcome.entropy.map(|sum| ("entropy", per_token(sum))));
    all.extend(around.kl.map(|kl| ("kl_to_base", kl)));
    let all = all
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value));
    all.chain(ages(&prepared.behind)).collect()
}

/// How many of what was leased had which verdict.
fn rewards(around: &Around<'_>) -> [(&'static str, f64); 5] {
    let (mut good, mut neutral, mut bad, mut other, mut hint_only) = (0, 0, 0, 0, 0);
    for one in around.leased {
        let hinted = one.sample.teacher_logprobs.is_some();
        let count = match one.sample.reward {
            Some(1.0) => &mut good,
            Some(0.0) => &mut neutral,
            Some(-1.0) => &mut bad,
            Some(_) => &mut other,
            None if hinted => &mut hint_only,
            None => continue,
        };
        *count += 1;
    }
    [
        ("rewards_good", good),
        ("rewards_neutral", neutral),
        ("rewards_bad", bad),
        ("rewards_other", other),
        ("hint_only", hint_only),
    ]
    .map(|(name, count)| (name, f64::from(count)))
}

/// How many samples were how many steps old.
fn ages(behind: &[u64]) -> impl Iterator<Item = (String, f64)> {
    let of = |age: u64| behind.iter().filter(|b| **b.min(&&OLDEST) == age).count();
    let counts = (0..=OLDEST)
        .map(|age| (age, of(age)))
        .filter(|(_, n)| *n > 0);
    let named = counts.map(|(age, n)| {
        let more = if age == OLDEST { "_and_more" } else { "" };
        (format!("steps_old_{age}{more}"), n as f64)
    });
    named.collect::<Vec<_>>().into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_the_nearest_rank() {
        let hundred: Vec<f32> = (1..=100).map(|i| i as f32).collect();
        let got = QUANTILES.map(|(_, part)| quantile(&hundred, part));
        assert_eq!(got, [5.0, 50.0, 95.0, 99.0, 100.0]);
        assert_eq!(QUANTILES.map(|(_, part)| quantile(&[3.0], part)), [3.0; 5]);
        assert_eq!(quantile(&[], 0.5), 0.0);
    }

    #[test]
    fn ages_are_counted_and_the_oldest_together() {
        let got: Vec<_> = ages(&[0, 2, 0, 8, 31]).collect();
        let want = [
            ("steps_old_0", 2.0),
            ("steps_old_2", 1.0),
            ("steps_old_8_and_more", 2.0),
        ];
        assert_eq!(got, want.map(|(name, n)| (name.to_owned(), n)));
    }
}
