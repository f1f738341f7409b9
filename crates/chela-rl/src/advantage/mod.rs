//! Credit per reply token: from a verdict, or from the rewards of several replies to one prompt; a file for each way.

pub mod binary;
pub mod combined;
pub mod dapo;
pub mod dr_grpo;
pub mod gae;
pub mod group;
pub mod grpo;
pub mod lite_ppo;
pub mod opd;
pub mod reinforce_pp;
pub mod rloo;
pub mod steps;

use crate::RlError;

/// Which part of a verdict trains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// A = r − b.
    Binary,
    /// A = teacher − student.
    Opd,
    /// The weighted sum of both.
    Combined,
}

/// The constants of the advantage.
#[derive(Clone, Debug, PartialEq)]
pub struct AdvantageConfig {
    /// Which part trains.
    pub method: Method,
    /// Weight of r − b.
    pub binary_weight: f32,
    /// Weight of teacher − student.
    pub opd_weight: f32,
    /// |teacher − student| is clipped to this.
    pub opd_clip: f32,
    /// |r| is clipped to this.
    pub reward_clip: f32,
}

impl Default for AdvantageConfig {
    fn default() -> Self {
        Self {
            method: Method::Combined,
            binary_weight: 1.0,
            opd_weight: 1.0,
            opd_clip: 5.0,
            reward_clip: 5.0,
        }
    }
}

/// What a verdict says about one reply of N tokens.
#[derive(Clone, Copy, Debug)]
pub struct Credit<'a> {
    /// N
    pub tokens: usize,
    /// r; `None` when there is only a hint.
    pub reward: Option<f32>,
    /// b
    pub baseline: f32,
    /// `(teacher, student)`, each `[N]` at temperature 1, same version and engine; `None` when there is no usable hint.
    pub hinted: Option<(&'a [f32], &'a [f32])>,
}

pub use self::binary::clipped_reward;

/// A `[N]`, or `None` when the method finds nothing in this verdict.
pub fn advantages(
    config: &AdvantageConfig,
    credit: &Credit<'_>,
) -> Result<Option<Vec<f32>>, RlError> {
    let binary = || binary::advantage(credit.reward, credit.baseline, config.reward_clip);
    let opd = || opd::advantage(credit.hinted, credit.tokens, config.opd_clip);
    Ok(match config.method {
        Method::Binary => binary()?.map(|b| vec![b; credit.tokens]),
        Method::Opd => opd()?,
        Method::Combined => combined::advantage(
            (binary()?, config.binary_weight),
            (opd()?, config.opd_weight),
            credit.tokens,
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn credit<'a>(
        reward: Option<f32>,
        hinted: Option<(&'a [f32], &'a [f32])>,
        n: usize,
    ) -> Credit<'a> {
        Credit {
            tokens: n,
            reward,
            baseline: 0.0,
            hinted,
        }
    }

    #[test]
    fn combined_golden_vector() {
        // learning page §6: teacher ln .3, student ln .5, r −1.
        let (teacher, student) = ([0.3f32.ln()], [0.5f32.ln()]);
        let got = advantages(
            &AdvantageConfig::default(),
            &credit(Some(-1.0), Some((&teacher, &student)), 1),
        );
        let got = got.unwrap().unwrap();
        assert!((got[0] - -1.510_825_6).abs() < 1e-6, "{got:?}");
    }

    #[test]
    fn each_part_alone() {
        let config = AdvantageConfig::default();
        let (t, s) = ([-1.0f32, -2.0], [-1.5f32, -1.0]);
        assert_eq!(
            advantages(&config, &credit(None, Some((&t, &s)), 2)).unwrap(),
            Some(vec![0.5, -1.0])
        );
        assert_eq!(
            advantages(&config, &credit(Some(1.0), None, 2)).unwrap(),
            Some(vec![1.0, 1.0])
        );
        assert_eq!(advantages(&config, &credit(None, None, 2)).unwrap(), None);
        let binary = AdvantageConfig {
            method: Method::Binary,
            ..config.clone()
        };
        assert_eq!(
            advantages(&binary, &credit(None, Some((&t, &s)), 2)).unwrap(),
            None
        );
        let opd = AdvantageConfig {
            method: Method::Opd,
            ..config
        };
        assert_eq!(advantages(&opd, &credit(Some(1.0), None, 2)).unwrap(), None);
    }

    #[test]
    fn an_empty_hint_gives_exactly_zero() {
        let same = [-0.3f32, -4.0, -0.001];
        let opd = AdvantageConfig {
            method: Method::Opd,
            ..AdvantageConfig::default()
        };
        let got = advantages(&opd, &credit(None, Some((&same, &same)), 3))
            .unwrap()
            .unwrap();
        assert_eq!(got, vec![0.0; 3]);
    }

    #[test]
    fn clips_and_refuses() {
        let config = AdvantageConfig::default();
        let (t, s) = ([-100.0f32], [-1.0f32]);
        assert_eq!(
            advantages(&config, &credit(None, Some((&t, &s)), 1)).unwrap(),
            Some(vec![-5.0])
        );
        assert_eq!(
            advantages(&config, &credit(Some(1e9), None, 1)).unwrap(),
            Some(vec![5.0])
        );
        let nan = [f32::NAN];
        assert!(advantages(&config, &credit(None, Some((&nan, &s)), 1)).is_err());
        assert!(advantages(&config, &credit(Some(f32::INFINITY), None, 1)).is_err());
        assert!(
            advantages(&config, &credit(None, Some((&t, &s)), 2)).is_err(),
            "missing value"
        );
    }
}
