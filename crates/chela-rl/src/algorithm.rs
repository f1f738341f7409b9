//! The algorithms for replies in groups, by name: which advantage, which loss, how tokens are added up.

use crate::{
    RlError,
    advantage::{dapo, dr_grpo, gae, group::Reply, grpo, lite_ppo, reinforce_pp, rloo},
    objective::{Aggregation, Clip, Sapo, Surrogate, cispo, gspo},
};

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the names of the papers; see the modules
pub enum Algorithm {
    Ppo,
    Grpo,
    DrGrpo,
    Dapo,
    Gspo,
    LitePpo,
    Rloo,
    ReinforcePp,
    Cispo,
    Sapo,
}

/// What a reply teaches, by token `[N]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Taught {
    /// A
    pub advantages: Vec<f32>,
    /// What a value head is to say.
    pub returns: Option<Vec<f32>>,
}

impl Algorithm {
    /// All, in the order of the documentation.
    pub const ALL: [Self; 10] = [
        Self::Ppo,
        Self::Grpo,
        Self::DrGrpo,
        Self::Dapo,
        Self::Gspo,
        Self::LitePpo,
        Self::Rloo,
        Self::ReinforcePp,
        Self::Cispo,
        Self::Sapo,
    ];

    /// As people write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ppo => "ppo",
            Self::Grpo => "grpo",
            Self::DrGrpo => "dr-grpo",
            Self::Dapo => "dapo",
            Self::Gspo => "gspo",
            Self::LitePpo => "lite-ppo",
            Self::Rloo => "rloo",
            Self::ReinforcePp => "reinforce++",
            Self::Cispo => "cispo",
            Self::Sapo => "sapo",
        }
    }

    /// The one of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|a| a.name() == name)
    }

    /// Its loss by token.
    pub fn surrogate(self) -> Surrogate {
        match self {
            Self::Gspo => Surrogate::Sequence(gspo::CLIP),
            Self::Rloo => Surrogate::Reinforce,
            Self::Cispo => Surrogate::Cispo(cispo::CLIP),
            Self::Sapo => Surrogate::Sapo(Sapo::default()),
            Self::Ppo
            | Self::Grpo
            | Self::DrGrpo
            | Self::Dapo
            | Self::LitePpo
            | Self::ReinforcePp => Surrogate::Clip(Clip::default()),
        }
    }

    /// How its tokens are added up when replies have at most `limit` tokens.
    pub fn aggregation(self, limit: usize) -> Aggregation {
        match self {
            Self::Grpo | Self::Gspo => Aggregation::SequenceMean,
            Self::DrGrpo => Aggregation::Constant(limit.max(1) as f32),
            Self::Ppo
            | Self::Dapo
            | Self::LitePpo
            | Self::Rloo
            | Self::ReinforcePp
            | Self::Cispo
            | Self::Sapo => Aggregation::TokenMean,
        }
    }

    /// Whether replies need the values of a value head.
    pub fn values(self) -> bool {
        self == Self::Ppo
    }

    /// Whether replies need their log-probs less the base model's.
    pub fn kl(self) -> bool {
        self == Self::ReinforcePp
    }

    /// Whether another group is asked for in the place of one that teaches nothing.
    pub fn refills(self) -> bool {
        self == Self::Dapo
    }

    /// What each reply teaches; `None` = nothing, to be counted. `limit` is the most tokens of a reply.
    pub fn taught(self, replies: &[Reply], limit: usize) -> Result<Vec<Option<Taught>>, RlError> {
        let each = match self {
            Self::Ppo => {
                let one = |reply: &Reply| {
                    let (mask, values) = (&reply.mask, &reply.values);
                    let (advantages, returns) =
                        gae::advantages(reply.reward, values, mask, (1.0, 1.0))?;
                    Ok(Some(Taught {
                        advantages,
                        returns: Some(returns),
                    }))
                };
                return replies.iter().map(one).collect();
            }
            Self::ReinforcePp => {
                let all = reinforce_pp::advantages(replies)?;
                let Some(all) = all else {
                    return Ok(vec![None; replies.len()]);
                };
                let taught = all.into_iter().map(|advantages| {
                    Some(Taught {
                        advantages,
                        returns: None,
                    })
                });
                return Ok(taught.collect());
            }
            Self::DrGrpo => dr_grpo::advantages(replies)?,
            Self::Dapo => dapo::advantages(replies, limit)?,
            Self::LitePpo => lite_ppo::advantages(replies)?,
            Self::Rloo => rloo::advantages(replies)?,
            Self::Grpo | Self::Gspo | Self::Cispo | Self::Sapo => grpo::advantages(replies)?,
        };
        let tokens = |(reply, a): (&Reply, Option<f32>)| {
            a.map(|a| Taught {
                advantages: vec![a; reply.mask.len()],
                returns: None,
            })
        };
        Ok(replies.iter().zip(each).map(tokens).collect())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::advantage::group::tests::replies;

    #[test]
    fn every_name_is_found_and_every_algorithm_teaches() {
        for algorithm in Algorithm::ALL {
            assert_eq!(Algorithm::named(algorithm.name()), Some(algorithm));
            let mut all = replies(&[&[1.0, 0.0, 0.0], &[1.0, 1.0]]);
            for reply in &mut all {
                reply.values = vec![0.25];
            }
            let taught = algorithm.taught(&all, 2048).unwrap();
            let sign: Vec<f32> = taught[..3]
                .iter()
                .map(|t| t.as_ref().unwrap().advantages[0].signum())
                .collect();
            assert_eq!(sign, [1.0, -1.0, -1.0], "{algorithm:?}");
            let grouped = !matches!(algorithm, Algorithm::Ppo | Algorithm::ReinforcePp);
            assert_eq!(taught[3].is_none() && taught[4].is_none(), grouped);
        }
        assert_eq!(Algorithm::named("a2c"), None);
    }

    #[test]
    fn groups_of_other_sizes_and_lengths_are_legal() {
        let mut all = replies(&[&[1.0], &[1.0, 0.0, 0.5], &[0.0, 1.0]]);
        for (i, reply) in all.iter_mut().enumerate() {
            reply.mask = vec![true; i + 1];
            reply.values = vec![0.0; i + 1];
        }
        for algorithm in Algorithm::ALL {
            for (i, taught) in algorithm.taught(&all, 16).unwrap().iter().enumerate() {
                if let Some(taught) = taught {
                    assert_eq!(taught.advantages.len(), i + 1, "{algorithm:?}");
                }
            }
        }
    }
}
