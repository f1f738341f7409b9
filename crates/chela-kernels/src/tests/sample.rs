//! Sampling from a row.

use super::{Random, many};
use crate::reference as plain;
use crate::sample::{SamplePolicy, sample_row, token_logprob};

fn row(random: &mut Random, n: usize) -> Vec<f32> {
    random.floats(n).iter().map(|z| 3.0 * z).collect()
}

/// What the policy keeps, by sorting everything.
fn kept(logits: &[f32], policy: SamplePolicy) -> (Vec<usize>, Vec<f64>) {
    let scaled: Vec<f64> = logits
        .iter()
        .map(|z| f64::from(*z) / f64::from(policy.temperature))
        .collect();
    let p: Vec<f64> = plain::log_softmax(&scaled)
        .iter()
        .map(|l| l.exp())
        .collect();
    let mut ids: Vec<usize> = (0..p.len()).collect();
    ids.sort_by(|a, b| p[*b].total_cmp(&p[*a]).then(a.cmp(b)));
    if policy.top_k > 0 {
        ids.truncate(policy.top_k);
    }
    let total: f64 = ids.iter().map(|i| p[*i]).sum();
    if policy.top_p < 1.0 {
        let mut held = 0.0;
        let mut count = 0;
        while count < ids.len() && held < total * f64::from(policy.top_p) {
            held += p[ids[count]];
            count += 1;
        }
        ids.truncate(count.max(1));
    }
    let best = p[ids[0]];
    ids.retain(|i| p[*i] >= best * f64::from(policy.min_p));
    (ids, p)
}

fn policies() -> Vec<SamplePolicy> {
    let mut all = Vec::new();
    for temperature in [0.5, 1.0, 1.7] {
        for top_p in [1.0, 0.9, 0.3] {
            for top_k in [0, 1, 20, 5000] {
                for min_p in [0.0, 0.05] {
                    all.push(SamplePolicy {
                        temperature,
                        top_p,
                        top_k,
                        min_p,
                    });
                }
            }
        }
    }
    all
}

#[test]
fn truncation_keeps_what_sorting_would() {
    let mut random = Random(60);
    for policy in policies() {
        let logits = row(&mut random, many(1000, 60));
        let (ids, p) = kept(&logits, policy);
        let mass: f64 = ids.iter().map(|i| p[*i]).sum();
        for _ in 0..many(20, 1) {
            let mut copy = logits.clone();
            let s = sample_row(&mut copy, policy, random.unit()).unwrap();
            assert!(
                ids.contains(&(s.id as usize)),
                "{policy:?}: {} is not kept",
                s.id
            );
            assert!(
                (f64::from(s.kept_mass) - mass).abs() < 1e-3,
                "{policy:?}: {s:?} {mass}"
            );
            assert!((f64::from(s.logprob) - p[s.id as usize].ln()).abs() < 1e-4);
            let t1 = plain::log_softmax(&plain::wide(&logits))[s.id as usize];
            assert!((f64::from(s.logprob_t1) - t1).abs() < 1e-4);
            let again = token_logprob(&logits, s.id, 1.0 / policy.temperature).unwrap();
            assert!((again - s.logprob).abs() < 1e-4);
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "minutes under Miri")]
fn frequencies_follow_the_distribution() {
    let mut random = Random(61);
    let logits = row(&mut random, 12);
    for policy in [
        SamplePolicy::default(),
        SamplePolicy {
            top_p: 0.8,
            temperature: 1.3,
            ..SamplePolicy::default()
        },
    ] {
        let (ids, p) = kept(&logits, policy);
        let mass: f64 = ids.iter().map(|i| p[*i]).sum();
        let draws = 20_000;
        let mut counts = [0_u32; 12];
        for i in 0..draws {
            let uniform = (f64::from(i) + 0.5) / f64::from(draws);
            counts[sample_row(&mut logits.clone(), policy, uniform).unwrap().id as usize] += 1;
        }
        for id in 0..12 {
            let expected = if ids.contains(&id) { p[id] / mass } else { 0.0 };
            let got = f64::from(counts[id]) / f64::from(draws);
            assert!(
                (got - expected).abs() < 2e-4,
                "{id}: {got} instead of {expected}"
            );
        }
    }
}

#[test]
fn cold_rows_are_greedy_and_report_temperature_one() {
    let mut random = Random(62);
    let mut logits = row(&mut random, 500);
    logits[77] = 30.0;
    logits[300] = 30.0;
    let t1 = plain::log_softmax(&plain::wide(&logits))[77];
    for temperature in [0.0, 1e-4, -1.0] {
        let policy = SamplePolicy {
            temperature,
            ..SamplePolicy::default()
        };
        let s = sample_row(&mut logits.clone(), policy, 0.999).unwrap();
        assert_eq!(s.id, 77, "the first of equals");
        assert_eq!(s.logprob, s.logprob_t1);
        assert!((f64::from(s.logprob) - t1).abs() < 1e-5);
    }
    let policy = SamplePolicy {
        temperature: 0.05,
        ..SamplePolicy::default()
    };
    let s = sample_row(&mut logits.clone(), policy, 0.9).unwrap();
    assert_eq!((s.id, s.logprob), (300, s.logprob_t1));
}

#[test]
fn extreme_rows() {
    let masked = [f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY, 1.0];
    for uniform in [0.0, 0.4999, 0.5, 0.999_999_999] {
        let s = sample_row(&mut masked.clone(), SamplePolicy::default(), uniform).unwrap();
        assert_eq!(s.id, if uniform < 0.5 { 1 } else { 3 });
        assert!((s.logprob + 0.5_f32.ln().abs()).abs() < 1e-6);
    }
    let far = [1e30, -1e30, 0.0];
    let s = sample_row(&mut far.clone(), SamplePolicy::default(), 0.99).unwrap();
    assert_eq!((s.id, s.logprob), (0, 0.0));
    let tiny = SamplePolicy {
        top_p: 0.0,
        ..SamplePolicy::default()
    };
    assert_eq!(sample_row(&mut [0.0, 2.0, 1.0], tiny, 0.999).unwrap().id, 1);
    for bad in [
        [0.0, f32::NAN],
        [0.0, f32::INFINITY],
        [f32::NEG_INFINITY; 2],
    ] {
        assert!(sample_row(&mut bad.clone(), SamplePolicy::default(), 0.5).is_err());
    }
    assert!(sample_row(&mut [], SamplePolicy::default(), 0.5).is_err());
}
