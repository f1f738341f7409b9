//! Tests of the surrogate: golden vectors, finite differences, invariances, refusals.

use super::*;
use proptest::prelude::*;

fn at(ratio_from: f32, ratio_to: f32, advantage: f32) -> f64 {
    let (old, new) = ([ratio_from.ln()], [ratio_to.ln()]);
    let inputs = TokenInputs {
        logprobs: &new,
        proximal_logprobs: &old,
        behavior_logprobs: &old,
        advantages: &[advantage],
        mask: &[true],
    };
    token_loss(Clip::default(), Correction::default(), 1.0, &inputs)
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
    let (d, stats) = token_loss(clip, Correction::default(), 1.0, &inputs).unwrap();
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
    let (d, stats) = token_loss(Clip::default(), Correction::default(), 1.0, &inputs).unwrap();
    assert_eq!((d[0], stats.masked, stats.tokens), (0.0, 1, 1));
    let (d, _) = token_loss(Clip::default(), Correction::Cap(5.0), 1.0, &inputs).unwrap();
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
    let (d, stats) = token_loss(Clip::default(), Correction::Cap(5.0), 1.0, &inputs).unwrap();
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
    let run = |i: &TokenInputs<'_>| token_loss(Clip::default(), Correction::default(), 1.0, i);
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
            token_loss(Clip::default(), Correction::default(), 0.25, &inputs).unwrap()
        };
        let h = 2e-3;
        let numeric = (loss(logprob + h).1.loss - loss(logprob - h).1.loss) / f64::from(2.0 * h);
        let analytic = f64::from(loss(logprob).0[0]);
        prop_assert!((numeric - analytic).abs() < 2e-2 * (1.0 + analytic.abs()), "{numeric} {analytic}");
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
