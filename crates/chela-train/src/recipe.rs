//! How a step was made, in words that are kept with its version: enough to make it again.

use crate::{TrainError, config::TrainConfig};
use chela_core::{AdapterSpec, OptimParams};
use chela_rl::{
    advantage::{AdvantageConfig, Method},
    algorithm::Algorithm,
    objective::{Aggregation, Clip, Correction},
};
use serde::{Deserialize, Serialize};

/// Everything that decides what a step makes of its samples. Numbers are written so that they are read back bit for bit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recipe {
    /// b, as it was subtracted from the rewards of this batch.
    pub baseline: f32,
    /// Samples of the batch; when fewer are left, it was another step.
    pub samples: usize,
    /// What decides the last bits: instruction set, threads.
    pub kernel_path: String,
    subtract_baseline: bool,
    method: String,
    weights: [f32; 2],
    clips: [f32; 2],
    ratio: [f32; 2],
    dual: Option<f32>,
    correction: (String, f32, f32),
    aggregation: (String, f32),
    optim: [f32; 6],
    /// All weights were trained. Steps before this could be said trained adapters.
    #[serde(default)]
    whole: bool,
    rank: usize,
    alpha: f32,
    targets: Vec<String>,
    seed: u64,
    /// How replies in groups were taught; `None` = the batch was out of sessions, as all were before this could be said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    groups: Option<GroupRecipe>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct GroupRecipe {
    algorithm: String,
    limit: Option<usize>,
}

impl Recipe {
    /// The recipe of a step under this configuration; `samples` is known when it is made.
    pub fn of(config: &TrainConfig, baseline: f32, kernel_path: String) -> Self {
        let (a, o) = (&config.advantage, &config.optim);
        Self {
            baseline,
            samples: 0,
            kernel_path,
            subtract_baseline: config.baseline,
            method: match a.method {
                Method::Binary => "binary",
                Method::Opd => "opd",
                Method::Combined => "combined",
            }
            .to_owned(),
            weights: [a.binary_weight, a.opd_weight],
            clips: [a.opd_clip, a.reward_clip],
            ratio: [config.clip.low, config.clip.high],
            dual: config.clip.dual,
            correction: match config.correction {
                Correction::Mask { low, cap } => ("mask".to_owned(), low, cap),
                Correction::Cap(cap) => ("cap".to_owned(), 0.0, cap),
            },
            aggregation: match config.aggregation {
                Aggregation::TokenMean => ("token".to_owned(), 0.0),
                Aggregation::SequenceMean => ("sequence".to_owned(), 0.0),
                Aggregation::Constant(length) => ("constant".to_owned(), length),
            },
            optim: [o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, o.clip],
            whole: config.adapter.whole,
            rank: config.adapter.rank,
            alpha: config.adapter.alpha,
            targets: config.adapter.targets.clone(),
            seed: config.adapter.seed,
            groups: None,
        }
    }

    /// The same for a batch of groups.
    pub fn of_groups(config: &TrainConfig, kernel_path: String) -> Self {
        Self {
            groups: Some(GroupRecipe {
                algorithm: config.algorithm.name().to_owned(),
                limit: config.reply_limit,
            }),
            ..Self::of(config, 0.0, kernel_path)
        }
    }

    /// What the groups of the batch were taught with, and the most tokens of a reply where that was known; `None` = it was out of
    /// sessions.
    pub fn groups(&self) -> Result<Option<(Algorithm, Option<usize>)>, TrainError> {
        let Some(GroupRecipe { algorithm, limit }) = &self.groups else {
            return Ok(None);
        };
        let known = Algorithm::named(algorithm);
        let unknown = || TrainError::Recipe(format!("algorithm {algorithm:?} is not known"));
        Ok(Some((known.ok_or_else(unknown)?, *limit)))
    }

    /// As it is kept.
    pub fn write(&self) -> Result<String, TrainError> {
        serde_json::to_string(self).map_err(|e| TrainError::Recipe(e.to_string()))
    }

    /// Reads what [`Recipe::write`] wrote.
    pub fn read(text: &str) -> Result<Self, TrainError> {
        serde_json::from_str(text).map_err(|e| TrainError::Recipe(e.to_string()))
    }

    /// The configuration of that step; what is no part of a step stays as in `now`.
    pub fn config(&self, now: &TrainConfig) -> Result<TrainConfig, TrainError> {
        let unknown =
            |what: &str, word: &str| TrainError::Recipe(format!("{what} {word:?} is not known"));
        let [lr, beta1, beta2, eps, weight_decay, clip] = self.optim;
        let (word, low, cap) = &self.correction;
        Ok(TrainConfig {
            baseline: self.subtract_baseline,
            advantage: AdvantageConfig {
                method: match self.method.as_str() {
                    "binary" => Method::Binary,
                    "opd" => Method::Opd,
                    "combined" => Method::Combined,
                    other => return Err(unknown("method", other)),
                },
                binary_weight: self.weights[0],
                opd_weight: self.weights[1],
                opd_clip: self.clips[0],
                reward_clip: self.clips[1],
            },
            clip: Clip {
                low: self.ratio[0],
                high: self.ratio[1],
                dual: self.dual,
            },
            correction: match word.as_str() {
                "mask" => Correction::Mask {
                    low: *low,
                    cap: *cap,
                },
                "cap" => Correction::Cap(*cap),
                other => return Err(unknown("correction", other)),
            },
            aggregation: match self.aggregation.0.as_str() {
                "token" => Aggregation::TokenMean,
                "sequence" => Aggregation::SequenceMean,
                "constant" => Aggregation::Constant(self.aggregation.1),
                other => return Err(unknown("aggregation", other)),
            },
            optim: OptimParams {
                lr,
                beta1,
                beta2,
                eps,
                weight_decay,
                clip,
            },
            adapter: AdapterSpec {
                whole: self.whole,
                rank: self.rank,
                alpha: self.alpha,
                targets: self.targets.clone(),
                seed: self.seed,
            },
            ..now.clone()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_read_back_as_it_was_written() {
        let mut config = TrainConfig::new("x".into(), vec![1, 2]);
        config.optim.lr = 1.000_000_1e-4;
        config.correction = Correction::Cap(3.3);
        config.aggregation = Aggregation::Constant(77.7);
        config.advantage.method = Method::Opd;
        config.clip.dual = Some(3.0);
        config.adapter.seed = u64::MAX;
        config.adapter.whole = true;
        let recipe = Recipe::of(&config, 0.1 + 0.2, "avx2".to_owned());
        let again = Recipe::read(&recipe.write().unwrap()).unwrap();
        assert_eq!(again, recipe);
        let other = TrainConfig::new("x".into(), vec![1, 2]);
        assert_eq!(again.config(&other).unwrap(), config);
        assert!(Recipe::read("{}").is_err());
        // Written before all weights could be trained.
        config.reply_limit = Some(512);
        config.algorithm = Algorithm::ReinforcePp;
        let grouped = Recipe::of_groups(&config, "avx2".to_owned());
        let grouped = Recipe::read(&grouped.write().unwrap()).unwrap();
        assert_eq!(
            grouped.groups().unwrap(),
            Some((Algorithm::ReinforcePp, Some(512)))
        );
        let other_name = grouped.write().unwrap().replace("reinforce++", "a2c");
        assert!(Recipe::read(&other_name).unwrap().groups().is_err());
        let old = recipe.write().unwrap().replace("\"whole\":true,", "");
        assert!(!old.contains("groups"));
        let old = Recipe::read(&old).unwrap().config(&other).unwrap();
        assert_eq!((old.adapter.whole, old.adapter.rank), (false, 16));
    }
}
