//! Choosing a token from one row of logits, on the host.

use crate::cpu::simd;
use crate::error::{KernelError, Result};

/// Below this temperature the likeliest token is taken.
const GREEDY_BELOW: f32 = 1e-3;
/// Below this temperature the log-prob that counts is the one at temperature 1 (learning.md, 3).
const LOGPROB_T1_BELOW: f32 = 0.1;

/// How a token is chosen. Temperature first, then top-k, top-p and min-p on what is left.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplePolicy {
    /// Divides the logits; (almost) 0 takes the likeliest token.
    pub temperature: f32,
    /// Keeps the likeliest tokens that together hold this mass; 1 keeps all.
    pub top_p: f32,
    /// Keeps this many of the likeliest tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps tokens with at least this fraction of the likeliest one's probability; 0 keeps all.
    pub min_p: f32,
}

impl Default for SamplePolicy {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
        }
    }
}

/// A chosen token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampled {
    /// Its id.
    pub id: u32,
    /// At the temperature, before truncation; at temperatures below 0.1 the same as `logprob_t1`.
    pub logprob: f32,
    /// At temperature 1, before truncation.
    pub logprob_t1: f32,
    /// Probability mass that truncation kept, in (0, 1]; at temperature 0 the token's own at 1.
    pub kept_mass: f32,
}

/// Log-prob of `id` at inverse temperature `inv_temperature`; the row is left as it is.
pub fn token_logprob(logits: &[f32], id: u32, inv_temperature: f32) -> Result<f32> {
    let (_, max) = best(logits)?;
    let Some(z) = logits.get(id as usize) else {
        let (index, limit) = (id as usize, logits.len());
        return Err(KernelError::Index {
            op: "token_logprob",
            what: "id",
            index,
            limit,
        });
    };
    let sum = simd::exp_total(logits, inv_temperature, inv_temperature * max);
    Ok(inv_temperature * (z - max) - sum.ln())
}

/// Chooses a token by `uniform` in [0, 1). Overwrites `logits`. A logit of minus infinity is never
/// chosen.
///
/// # Errors
/// [`KernelError::NotFinite`] when a logit is NaN or plus infinity, or none is finite.
pub fn sample_row(logits: &mut [f32], policy: SamplePolicy, uniform: f64) -> Result<Sampled> {
    let (first, max) = best(logits)?;
    let sum_t1 = simd::exp_total(logits, 1.0, max);
    let t = policy.temperature;
    if t.is_nan() || t < GREEDY_BELOW {
        let logprob = -sum_t1.ln();
        let kept_mass = logprob.exp().max(f32::MIN_POSITIVE);
        return Ok(Sampled {
            id: first,
            logprob,
            logprob_t1: logprob,
            kept_mass,
        });
    }
    let inverse = 1.0 / t;
    let sum = simd::exp_sum(logits, inverse, inverse * max);
    let (id, kept) = choose(logits, sum, policy, uniform);
    let weight = logits[id as usize].max(f32::MIN_POSITIVE);
    // weight = exp((z - max) / T), so the logit is recovered as T ln(weight).
    let relative = weight.ln();
    let logprob_t1 = (relative * t - sum_t1.ln()).min(0.0);
    let logprob = if t < LOGPROB_T1_BELOW {
        logprob_t1
    } else {
        (relative - sum.ln()).min(0.0)
    };
    Ok(Sampled {
        id,
        logprob,
        logprob_t1,
        kept_mass: kept,
    })
}

/// The first of the largest logits.
fn best(logits: &[f32]) -> Result<(u32, f32)> {
    let bad = |what| Err(KernelError::NotFinite { op: "sample", what });
    let max = simd::max(logits);
    if simd::any_nan(logits) {
        return bad("a logit is not a number");
    }
    if max == f32::INFINITY {
        return bad("a logit is infinite");
    }
    match logits.iter().position(|z| *z == max) {
        Some(i) if max > f32::NEG_INFINITY => Ok((i as u32, max)),
        _ => bad("no logit is finite"),
    }
}

/// Id and kept fraction of the mass, from weights `w` that sum to `sum` and have maximum 1.
fn choose(w: &[f32], sum: f32, policy: SamplePolicy, uniform: f64) -> (u32, f32) {
    let cuts_p = policy.top_p < 1.0;
    let cuts_k = policy.top_k > 0 && policy.top_k < w.len();
    if !cuts_p && !cuts_k {
        if policy.min_p <= 0.0 {
            return (walk(w, f64::from(sum) * uniform), 1.0);
        }
        let kept: Vec<u32> = at_least(w, policy.min_p.min(1.0));
        return pick(w, &kept, sum, uniform);
    }
    // What lies below this weight holds less than 1 - top_p of the mass: no nucleus reaches it.
    let nucleus = if cuts_p {
        (1.0 - policy.top_p.max(0.0)) * sum / w.len() as f32
    } else {
        0.0
    };
    let floor = nucleus.clamp(f32::MIN_POSITIVE, 1.0);
    let mut kept = if cuts_k {
        largest(w, policy.top_k)
    } else {
        at_least(w, floor)
    };
    if cuts_p {
        // The nucleus is taken of what top-k left.
        let total = if cuts_k {
            mass(w, &kept)
        } else {
            f64::from(sum)
        };
        cut_to_nucleus(w, &mut kept, total * f64::from(policy.top_p.max(0.0)));
    }
    // The likeliest token has weight 1.
    let least = policy.min_p.min(1.0);
    kept.retain(|id| w[*id as usize] >= least);
    pick(w, &kept, sum, uniform)
}

/// Buckets are the weights that agree in all but these bits: each 1/128 of a power of two wide.
const BUCKET_BITS: u32 = 16;

/// Keeps the likeliest ids that together reach `target`, at least one; the others' order stays. Weights, at most 1, are added up by
/// bucket, and only the bucket in which the target is reached is sorted: a flat distribution has tens of thousands.
fn cut_to_nucleus(w: &[f32], ids: &mut Vec<u32>, target: f64) {
    // The bits of numbers that are not negative rise with them.
    let of = |weight: f32| (weight.to_bits() >> BUCKET_BITS) as usize;
    let bucket = |id: u32| of(w[id as usize].min(1.0));
    let mut held_by = vec![0.0_f64; of(1.0) + 1];
    for id in ids.iter() {
        held_by[bucket(*id)] += f64::from(w[*id as usize]);
    }
    let (mut held, mut cut) = (0.0, held_by.len());
    while cut > 0 {
        cut -= 1;
        if held + held_by[cut] >= target && held_by[cut] > 0.0 {
            break;
        }
        held += held_by[cut];
    }
    let mut last: Vec<u32> = ids
        .iter()
        .copied()
        .filter(|id| bucket(*id) == cut)
        .collect();
    last.sort_unstable_by(|a, b| order(w, *a, *b));
    let reached = last.iter().position(|id| {
        held += f64::from(w[*id as usize]);
        held >= target
    });
    // Added up in another order the target may stay out of reach by a rounding.
    let Some(end) = reached.or(last.len().checked_sub(1)).map(|at| last[at]) else {
        return;
    };
    // As in `at_least`: written always, counted if kept.
    let (least, mut count) = (w[end as usize], 0);
    for at in 0..ids.len() {
        let (id, weight) = (ids[at], w[ids[at] as usize]);
        ids[count] = id;
        count += usize::from((weight > least) | ((weight == least) & (id <= end)));
    }
    ids.truncate(count);
}

fn order(w: &[f32], a: u32, b: u32) -> core::cmp::Ordering {
    w[b as usize].total_cmp(&w[a as usize]).then(a.cmp(&b))
}

fn mass(w: &[f32], ids: &[u32]) -> f64 {
    ids.iter().map(|id| f64::from(w[*id as usize])).sum()
}

fn at_least(w: &[f32], floor: f32) -> Vec<u32> {
    let mut ids = Vec::new();
    for (b, block) in w.chunks(64).enumerate() {
        if simd::max(block) < floor {
            continue;
        }
        // Written always and counted if kept: whether it is kept cannot be guessed.
        let mut kept = [0; 64];
        let mut count = 0;
        for (i, w) in block.iter().enumerate() {
            kept[count] = (b * 64 + i) as u32;
            count += usize::from(*w >= floor);
        }
        ids.extend_from_slice(&kept[..count]);
    }
    ids
}

/// The `k` largest, in no order; equal weights by id.
fn largest(w: &[f32], k: usize) -> Vec<u32> {
    let room = (2 * k).max(256);
    let (mut ids, mut floor) = (Vec::with_capacity(room), 0.0_f32);
    for (b, block) in w.chunks(64).enumerate() {
        if simd::max(block) <= floor {
            continue;
        }
        for (i, weight) in block.iter().enumerate() {
            if *weight > floor {
                ids.push((b * 64 + i) as u32);
                if ids.len() == room {
                    ids.select_nth_unstable_by(k - 1, |a, b| order(w, *a, *b));
                    floor = w[ids[k - 1] as usize];
                    ids.truncate(k);
                }
            }
        }
    }
    if ids.len() > k {
        ids.select_nth_unstable_by(k - 1, |a, b| order(w, *a, *b));
        ids.truncate(k);
    }
    ids
}

fn pick(w: &[f32], kept: &[u32], sum: f32, uniform: f64) -> (u32, f32) {
    let total = mass(w, kept);
    let mut left = total * uniform;
    let mut last = 0;
    for id in kept {
        let weight = f64::from(w[*id as usize]);
        if weight > 0.0 {
            last = *id;
            if left < weight {
                break;
            }
        }
        left -= weight;
    }
    (
        last,
        ((total / f64::from(sum)) as f32).clamp(f32::MIN_POSITIVE, 1.0),
    )
}

/// The id at which the running sum passes `left`; the last possible one when rounding ate the rest.
fn walk(w: &[f32], mut left: f64) -> u32 {
    const STEP: usize = 256;
    let mut last = 0;
    for (b, block) in w.chunks(STEP).enumerate() {
        let sum = f64::from(simd::sum(block));
        if sum <= 0.0 {
            continue;
        }
        if left >= sum {
            left -= sum;
            if let Some(i) = block.iter().rposition(|w| *w > 0.0) {
                last = b * STEP + i;
            }
            continue;
        }
        for (i, weight) in block.iter().enumerate().filter(|(_, w)| **w > 0.0) {
            last = b * STEP + i;
            if left < f64::from(*weight) {
                return last as u32;
            }
            left -= f64::from(*weight);
        }
        left = 0.0;
    }
    last as u32
}
