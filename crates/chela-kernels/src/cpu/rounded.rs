//! Activations rounded to sixteen bits, a scale for every 32, for products that read stored integers as integers.
//!
//! A step of few rows is bound by unpacking bytes to floats, not by memory. With both sides as integers, 32 products are two
//! instructions. It costs a rounding of each activation to 1/65,534 of the largest of its 32 neighbours, less than the
//! difference between two orders of a float sum in practice.
#![allow(unsafe_code)]

use super::few::Rows;
use super::simd::LANES;
use crate::quant::GROUP;

/// Largest rounded number.
const MOST: f32 = 32_767.0;

/// Rows of rounded activations, in groups of 32: `x ≈ scale · q`.
pub(crate) struct Rounded {
    q: Vec<i16>,
    /// `[rows, groups]`
    scale: Vec<f32>,
    groups: usize,
}

impl Rounded {
    /// Rounds rows whose width is a multiple of 32. A group with a number that is not finite becomes NaN as a whole.
    pub(crate) fn new(x: Rows<'_>) -> Self {
        let groups = x.width / GROUP;
        let mut rounded = Self {
            q: vec![0; x.count * x.width],
            scale: vec![0.0; x.count * groups],
            groups,
        };
        for row in 0..x.count {
            let at = row * groups;
            round_row(
                x.row(row),
                &mut rounded.q[row * x.width..][..x.width],
                &mut rounded.scale[at..at + groups],
            );
        }
        rounded
    }

    /// Groups of a row.
    pub(crate) fn groups(&self) -> usize {
        self.groups
    }

    /// The rounded numbers of a row.
    pub(crate) fn q(&self, row: usize) -> &[i16] {
        &self.q[row * self.groups * GROUP..][..self.groups * GROUP]
    }

    /// The scales of a row.
    pub(crate) fn scale(&self, row: usize) -> &[f32] {
        &self.scale[row * self.groups..][..self.groups]
    }
}

super::simd::simd_fn! {
    /// One row.
    fn round_row(x: &[f32], q: &mut [i16], scale: &mut [f32]) {
        for ((x, q), scale) in x
            .chunks_exact(GROUP)
            .zip(q.chunks_exact_mut(GROUP))
            .zip(scale)
        {
            let mut largest = [0.0_f32; LANES];
            // 0 · x is NaN for what is not finite, and so is every sum with it.
            let mut odd = [0.0_f32; LANES];
            for x in x.chunks_exact(LANES) {
                for l in 0..LANES {
                    largest[l] = if x[l].abs() > largest[l] { x[l].abs() } else { largest[l] };
                    odd[l] += x[l] * 0.0;
                }
            }
            let largest = largest.iter().fold(0.0_f32, |a, b| if *b > a { *b } else { a });
            let odd: f32 = odd.iter().sum();
            let inverse = if largest > 0.0 { MOST / largest } else { 0.0 };
            let inverse = if inverse.is_finite() { inverse } else { 0.0 };
            *scale = largest / MOST + odd;
            for (x, q) in x.iter().zip(q.iter_mut()) {
                // Adding 1.5 · 2^23 rounds to the nearest integer, ties to even.
                let n = (x * inverse + 12_582_912.0).to_bits() as i32 - 0x4b40_0000;
                *q = n as i16;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounded(x: &[f32]) -> Rounded {
        Rounded::new(Rows {
            data: x,
            stride: x.len(),
            count: 1,
            width: x.len(),
        })
    }

    #[test]
    fn numbers_come_back_within_half_a_step_of_their_group() {
        let x: Vec<f32> = (0..96)
            .map(|i| ((i * 37 % 101) as f32 - 50.0) * [0.01, 3.0, 1e-6][i / 32])
            .collect();
        let r = rounded(&x);
        for g in 0..3 {
            let (q, s) = (&r.q(0)[g * 32..][..32], r.scale(0)[g]);
            for (q, x) in q.iter().zip(&x[g * 32..]) {
                assert!((f32::from(*q) * s - x).abs() <= s * 0.5001, "{q} {s} {x}");
            }
        }
    }

    #[test]
    fn nothing_stays_nothing_and_what_is_not_finite_is_not_hidden() {
        let mut x = vec![0.0; 96];
        x[40] = f32::INFINITY;
        x[70] = f32::NAN;
        let r = rounded(&x);
        assert_eq!(r.scale(0)[0], 0.0);
        assert!(r.scale(0)[1].is_nan() && r.scale(0)[2].is_nan());
        // The smallest and the largest numbers there are.
        let r = rounded(&[f32::MIN_POSITIVE / 8.0; 32]);
        assert!(r.scale(0)[0].is_finite());
        let r = rounded(&[f32::MAX; 32]);
        assert_eq!(r.q(0)[0], 32_767);
        assert!(r.scale(0)[0].is_finite());
    }
}
