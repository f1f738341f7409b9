//! PPO's value loss: ½ max((v − R)², (v_old + clip(v − v_old, ±ε) − R)²), ε 0.5, coefficient 0.5 (Schulman et al., arXiv 1707.06347; OpenAI
//! baselines).

use crate::{RlError, finite, same_length};

/// ε
pub const CLIP: f32 = 0.5;
/// What the loss weighs beside the policy's.
pub const COEFFICIENT: f32 = 0.5;

/// Loss of one sample's values and its derivative by each of them `[N]`, coefficient and `weight` in.
pub fn loss(
    values: &[f32],
    old: &[f32],
    returns: &[f32],
    mask: &[bool],
    weight: f32,
) -> Result<(Vec<f32>, f64), RlError> {
    let n = values.len();
    same_length("old values", old.len(), n)?;
    same_length("returns", returns.len(), n)?;
    same_length("mask", mask.len(), n)?;
    for (what, all) in [
        ("values", values),
        ("old values", old),
        ("returns", returns),
    ] {
        finite(what, all)?;
    }
    let (mut derivative, mut loss) = (vec![0.0; n], 0.0);
    for t in (0..n).filter(|t| mask[*t]) {
        let free = values[t] - returns[t];
        let near = old[t] + (values[t] - old[t]).clamp(-CLIP, CLIP);
        let bounded = near - returns[t];
        let (gap, slope) = if free * free >= bounded * bounded {
            (free, free)
        } else {
            (bounded, 0.0)
        };
        loss += f64::from(weight * COEFFICIENT * 0.5 * gap * gap);
        derivative[t] = weight * COEFFICIENT * slope;
    }
    Ok((derivative, loss))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn golden_values_and_the_clip() {
        // v 1, R 0: 0.5 · ½ · 1. v 2, v_old 1, R 0: free 4 is the larger. v 0, v_old 1, R 0: bounded at 0.5, no gradient.
        for (v, old, r, want, slope) in [
            (1.0, 1.0, 0.0, 0.25, 0.5),
            (2.0, 1.0, 0.0, 1.0, 1.0),
            (0.0, 1.0, 0.0, 0.0625, 0.0),
        ] {
            let (d, loss) = loss(&[v], &[old], &[r], &[true], 1.0).unwrap();
            assert!((loss - want).abs() < 1e-6 && d == [slope], "{v} {old} {r}");
        }
        assert_eq!(loss(&[1.0], &[1.0], &[0.0], &[false], 1.0).unwrap().1, 0.0);
        assert!(loss(&[f32::NAN], &[1.0], &[0.0], &[true], 1.0).is_err());
        assert!(loss(&[1.0], &[], &[0.0], &[true], 1.0).is_err());
    }
}
