//! Tests of the losses: golden vectors, finite differences, invariances, refusals.

use super::*;
use proptest::prelude::*;

pub(crate) fn log_softmax(logits: &[f32]) -> Vec<f32> {
    let sum: f64 = logits.iter().map(|z| f64::from(*z).exp()).sum();
    let lse = sum.ln();
    logits
        .iter()
        .map(|z| (f64::from(*z) - lse) as f32)
        .collect()
}

pub(crate) fn likeliest(logits: &[f32], k: usize) -> Vec<usize> {
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    ids.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    ids.truncate(k);
    ids
}

fn every_surrogate() -> [Surrogate; 5] {
    [
        Surrogate::default(),
        Surrogate::Sequence(gspo::CLIP),
        Surrogate::Reinforce,
        Surrogate::Cispo(cispo::CLIP),
        Surrogate::Sapo(Sapo::default()),
    ]
}

fn at(ratio_from: f32, ratio_to: f32, advantage: f32) -> f64 {
    let (old, new) = ([ratio_from.ln()], [ratio_to.ln()]);
    let inputs = TokenInputs {
        logprobs: &new,
        proximal_logprobs: &old,
        behavior_logprobs: &old,
        advantages: &[advantage],
        mask: &[true],
    };
    token_loss(Surrogate::default(), Correction::default(), 1.0, &inputs)
        .unwrap()
        .1
        .loss
}

#[test]
fn golden_vectors() {
    // learning page §6: clip 0.4→0.6, A 1: −1.28; A −1: 1.5; 0.4→0.2, A 1: −0.5; A −1: 0.8.
    for (to, advantage, want) in [
        (0.6, 1.0, -1.28),
        (0.6, -1.0, 1.5),
        (0.2, 1.0, -0.5),
        (0.2, -1.0, 0.8),
    ] {
        assert!(
            (at(0.4, to, advantage) - want).abs() < 1e-6,
            "{to} {advantage}"
        );
    }
}

#[test]
fn dual_clip_bounds_the_loss_of_a_bad_token() {
    let clip = Clip {
        dual: Some(3.0),
        ..Clip::default()
    };
    let (old, new) = ([-3.0f32], [-1.0f32]); // ρ = 7.39
    let inputs = TokenInputs {
        logprobs: &new,
        proximal_logprobs: &old,
        behavior_logprobs: &old,
        advantages: &[-1.0],
        mask: &[true],
    };
    let (d, stats) =
        token_loss(Surrogate::Clip(clip), Correction::default(), 1.0, &inputs).unwrap();
    assert!((stats.loss - 3.0).abs() < 1e-6);
    assert_eq!(d, vec![0.0]);
}

#[test]
fn a_stale_token_is_masked_or_capped() {
    let (now, then) = ([-1.0f32], [-4.0f32]); // w = 20.1
    let inputs = TokenInputs {
        logprobs: &now,
        proximal_logprobs: &now,
        behavior_logprobs: &then,
        advantages: &[1.0],
        mask: &[true],
    };
    let (d, stats) = token_loss(Surrogate::default(), Correction::default(), 1.0, &inputs).unwrap();
    assert_eq!((d[0], stats.masked, stats.tokens), (0.0, 1, 1));
    let (d, _) = token_loss(Surrogate::default(), Correction::Cap(5.0), 1.0, &inputs).unwrap();
    assert!((d[0] - -5.0).abs() < 1e-6);
}

#[test]
fn huge_ratios_stay_finite() {
    let (now, then) = ([-0.1f32], [-1e4f32]);
    let inputs = TokenInputs {
        logprobs: &now,
        proximal_logprobs: &then,
        behavior_logprobs: &then,
        advantages: &[-1.0],
        mask: &[true],
    };
    let (d, stats) = token_loss(Surrogate::default(), Correction::Cap(5.0), 1.0, &inputs).unwrap();
    assert!(d[0].is_finite() && stats.loss.is_finite());
}

#[test]
fn refuses_what_is_unequal_or_not_finite() {
    let ok = [-1.0f32, -2.0];
    let base = TokenInputs {
        logprobs: &ok,
        proximal_logprobs: &ok,
        behavior_logprobs: &ok,
        advantages: &ok,
        mask: &[true, true],
    };
    let run = |i: &TokenInputs<'_>| token_loss(Surrogate::default(), Correction::default(), 1.0, i);
    assert!(run(&base).is_ok());
    assert!(
        run(&TokenInputs {
            advantages: &ok[..1],
            ..base
        })
        .is_err()
    );
    assert!(
        run(&TokenInputs {
            mask: &[true],
            ..base
        })
        .is_err()
    );
    assert!(
        run(&TokenInputs {
            behavior_logprobs: &[f32::NAN, 0.0],
            ..base
        })
        .is_err()
    );
    assert!(
        run(&TokenInputs {
            advantages: &[f32::INFINITY, 0.0],
            ..base
        })
        .is_err()
    );
}

proptest! {
    /// Away from the corners of the clip the derivative is the finite difference.
    #[test]
    fn derivative_by_finite_differences(
        logprob in -4.0f32..-0.05, shift in -0.6f32..0.6, stale in -1.0f32..1.0, advantage in -3.0f32..3.0,
    ) {
        let proximal = [logprob - shift];
        let behavior = [proximal[0] - stale];
        let ratio = shift.exp();
        prop_assume!((ratio - 0.8).abs() > 0.02 && (ratio - 1.28).abs() > 0.02);
        let loss = |x: f32| {
            let inputs = TokenInputs {
                logprobs: &[x], proximal_logprobs: &proximal, behavior_logprobs: &behavior,
                advantages: &[advantage], mask: &[true],
            };
            token_loss(Surrogate::default(), Correction::default(), 0.25, &inputs).unwrap()
        };
        let h = 2e-3;
        let numeric = (loss(logprob + h).1.loss - loss(logprob - h).1.loss) / f64::from(2.0 * h);
        let analytic = f64::from(loss(logprob).0[0]);
        prop_assert!((numeric - analytic).abs() < 2e-2 * (1.0 + analytic.abs()), "{numeric} {analytic}");
    }

    /// The same for the other losses, with several tokens in a sample: a reply's own ratio ties them together.
    #[test]
    fn derivatives_of_every_loss_by_finite_differences(
        columns in prop::collection::vec((-3.0f32..-0.1, -0.3f32..0.3, -0.3f32..0.3, any::<bool>()), 1..5),
        advantage in -2.0f32..2.0, which in 0usize..5,
    ) {
        let surrogate = every_surrogate()[which];
        let logprobs: Vec<f32> = columns.iter().map(|c| c.0).collect();
        let proximal: Vec<f32> = columns.iter().map(|c| c.0 - c.1).collect();
        let behavior: Vec<f32> = columns.iter().map(|c| c.0 - c.1 - c.2).collect();
        let mut mask: Vec<bool> = columns.iter().map(|c| c.3).collect();
        mask[0] = true;
        // One advantage a reply and no correction by token: then the reply's derivative is the sum over its tokens.
        let (advantages, w) = (vec![advantage; columns.len()], Correction::Cap(1.0));
        let behavior = if matches!(surrogate, Surrogate::Sequence(_)) { proximal.clone() } else { behavior };
        let run = |logprobs: &[f32]| {
            let inputs = TokenInputs {
                logprobs, proximal_logprobs: &proximal, behavior_logprobs: &behavior,
                advantages: &advantages, mask: &mask,
            };
            token_loss(surrogate, w, 0.5, &inputs).unwrap()
        };
        let (derivative, stats) = run(&logprobs);
        // At a corner of a clip there is no derivative; CISPO's weight is not differentiated.
        prop_assume!(!matches!(surrogate, Surrogate::Cispo(_)));
        let mut at_a_corner = false;
        for t in 0..columns.len() {
            let moved = |by: f32| {
                let mut logprobs = logprobs.clone();
                logprobs[t] += by;
                run(&logprobs)
            };
            let h = if matches!(surrogate, Surrogate::Sequence(_)) { 1e-4 } else { 2e-3 };
            let (up, down) = (moved(h), moved(-h));
            at_a_corner |= up.1.clipped != stats.clipped || down.1.clipped != stats.clipped;
            prop_assume!(!at_a_corner);
            let numeric = (up.1.loss - down.1.loss) / f64::from(2.0 * h);
            let analytic = f64::from(derivative[t]);
            prop_assert!((numeric - analytic).abs() < 3e-2 * (1.0 + analytic.abs()), "{surrogate:?} {numeric} {analytic}");
        }
    }

    /// Losses and derivatives of a batch do not depend on the order of its samples, nor on tokens that are not trained on.
    #[test]
    fn padding_and_order_change_nothing(
        columns in prop::collection::vec((-3.0f32..-0.1, -0.5f32..0.5, -2.0f32..2.0), 1..6), pad in 1usize..4, which in 0usize..5,
    ) {
        let surrogate = every_surrogate()[which];
        let run = |columns: &[(f32, f32, f32)], pad: usize| {
            let mut logprobs: Vec<f32> = columns.iter().map(|c| c.0).collect();
            let mut proximal: Vec<f32> = columns.iter().map(|c| c.0 - c.1).collect();
            let mut advantages: Vec<f32> = columns.iter().map(|c| c.2).collect();
            let mut mask = vec![true; columns.len()];
            logprobs.extend(vec![-7.0; pad]);
            proximal.extend(vec![-1.0; pad]);
            advantages.extend(vec![3.0; pad]);
            mask.extend(vec![false; pad]);
            let inputs = TokenInputs {
                logprobs: &logprobs, proximal_logprobs: &proximal, behavior_logprobs: &proximal,
                advantages: &advantages, mask: &mask,
            };
            token_loss(surrogate, Correction::default(), 1.0, &inputs).unwrap()
        };
        let (plain, stats) = run(&columns, 0);
        let (padded, again) = run(&columns, pad);
        prop_assert_eq!(&padded[..plain.len()], &plain[..]);
        prop_assert!(padded[plain.len()..].iter().all(|d| *d == 0.0));
        prop_assert_eq!(stats, again);
        let mut reversed = columns.clone();
        reversed.reverse();
        let (mut other, _) = run(&reversed, 0);
        other.reverse();
        let close = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-6 * (1.0 + a.abs());
        prop_assert!(plain.iter().zip(&other).all(close));
    }

    /// The sum over samples does not depend on how they are grouped: weights come from the whole batch.
    #[test]
    fn token_mean_is_the_same_for_every_split(lengths in prop::collection::vec(1usize..40, 1..8)) {
        let batch = BatchSize { samples: lengths.len(), tokens: lengths.iter().sum() };
        let total: f32 = lengths.iter().map(|n| Aggregation::TokenMean.token_weight(batch, *n) * *n as f32).sum();
        prop_assert!((total - 1.0).abs() < 1e-5);
        let total: f32 = lengths.iter().map(|n| Aggregation::SequenceMean.token_weight(batch, *n) * *n as f32).sum();
        prop_assert!((total - 1.0).abs() < 1e-5);
    }
}

#[test]
fn golden_vectors_of_the_other_losses() {
    let run = |surrogate, from: f32, to: f32, advantage| {
        let (old, new) = ([from.ln(), -2.0], [to.ln(), -2.0]);
        let inputs = TokenInputs {
            logprobs: &new,
            proximal_logprobs: &old,
            behavior_logprobs: &old,
            advantages: &[advantage, advantage],
            mask: &[true, true],
        };
        token_loss(surrogate, Correction::default(), 1.0, &inputs).unwrap()
    };
    let near = |got: f32, want: f32| assert!((got - want).abs() < 1e-5, "{got} {want}");
    // s = √1.5 clipped to 1.0004 for both tokens.
    let (d, stats) = run(Surrogate::Sequence(gspo::CLIP), 0.4, 0.6, 1.0);
    near(stats.loss as f32, -2.0008);
    assert!(d == [0.0, 0.0] && stats.clipped == 2);
    let (d, _) = run(Surrogate::Sequence(gspo::CLIP), 0.4, 0.6, -1.0);
    near(d[0], 1.224_744_9);
    near(d[1], 1.224_744_9);
    let (d, _) = run(Surrogate::Reinforce, 0.4, 0.6, 2.0);
    assert_eq!(d, [-2.0, -2.0]);
    let (d, stats) = run(Surrogate::Cispo(cispo::CLIP), 0.1, 0.9, 1.0);
    near(d[0], -5.0);
    near(d[1], -1.0);
    assert_eq!(stats.clipped, 1);
    // ρ = 1.5: σ(0.5) = 0.6224593, 4 σ (1 − σ) ρ = 1.4100223; ρ = 1: σ = ½.
    let (d, stats) = run(Surrogate::Sapo(Sapo::default()), 0.4, 0.6, 1.0);
    near(d[0], -1.410_022_3);
    near(d[1], -1.0);
    near(stats.loss as f32, -4.0 * (0.622_459_3 + 0.5));
    let (d, _) = run(Surrogate::Sapo(Sapo::default()), 0.4, 0.6, -1.0);
    // τ 1.05: σ(0.525) = 0.6283164
    near(d[0], 4.0 * 0.628_316_4 * 0.371_683_6 * 1.5);
}
