//! Makes one version out of one batch: the same way when it is trained, when it is made again without what was forgotten, and when it
//! is made again to see whether the log reproduces it.

use crate::{
    TrainError,
    batch::{self, Prepared},
    config::TrainConfig,
    groups,
    recipe::Recipe,
    step,
};
use chela_core::{
    Checkpoint, Learner, LeasedSample, Millis, PolicyEngine, PolicyVersion, Sample, SampleId,
    StepCommit, VersionOrigin, VersionRecord,
};
use chela_rl::baseline::Baseline;
use std::path::Path;

/// What a step starts from.
pub struct Parent {
    /// 0 = the base.
    pub number: u64,
    /// Steps on the way to it.
    pub steps: u64,
    /// `None` = the base.
    pub record: Option<VersionRecord>,
}

impl Parent {
    /// From its record.
    pub fn of(record: Option<VersionRecord>) -> Self {
        Self {
            number: record.as_ref().map_or(0, |r| r.version.number),
            steps: record.as_ref().map_or(0, |r| r.steps),
            record,
        }
    }

    /// The running mean of rewards that goes with it.
    pub fn baseline(&self) -> Baseline {
        let metric = |name: &str| {
            let metrics = self.record.iter().flat_map(|r| &r.metrics);
            metrics
                .filter(|(n, _)| n == name)
                .map(|(_, v)| *v)
                .next_back()
                .unwrap_or(0.0)
        };
        Baseline {
            mean: metric("baseline"),
            count: metric("baseline_count"),
        }
    }

    /// Its files.
    pub fn checkpoint(&self, data_dir: &Path) -> Option<Checkpoint> {
        let record = self.record.as_ref()?;
        let name = record.checkpoint.as_ref()?;
        Some(Checkpoint {
            dir: data_dir.join(name),
            step: record.steps,
        })
    }
}

/// What is to be made.
pub struct Plan<'a> {
    /// Its name.
    pub version: PolicyVersion,
    /// On what.
    pub parent: &'a Parent,
    /// Out of what, in this order.
    pub leased: &'a [LeasedSample],
    /// How; its baseline and kernel path stand already.
    pub recipe: Recipe,
    /// Where it comes from.
    pub origin: VersionOrigin,
    /// When.
    pub now: Millis,
}

/// What came of it.
pub enum Made {
    /// Files on disk that nothing names yet.
    Version(Box<StepCommit>),
    /// The batch holds nothing to learn from; why, of each sample.
    Nothing(Vec<(SampleId, String)>),
    /// The step was not finite; the learner is as it was.
    Skipped,
}

/// Makes it. `learner` holds the parent's weights and afterwards the new ones; `dir` is where they are saved, `None` = nowhere.
pub fn make(
    plan: &Plan<'_>,
    learner: &mut dyn Learner,
    engine: &dyn PolicyEngine,
    (config, dir): (&TrainConfig, Option<&Path>),
) -> Result<Made, TrainError> {
    let config = plan.recipe.config(config)?;
    let prepared = match plan.recipe.groups()? {
        Some(how) => groups::prepare(plan.leased, &config, how, learner)?,
        None => {
            let takes = |sample: &Sample| learner.takes(sample);
            batch::prepare(plan.leased, &config, plan.recipe.baseline, &takes)
        }
    };
    if prepared.samples.is_empty() {
        return Ok(Made::Nothing(prepared.left_out));
    }
    let started = std::time::Instant::now();
    let outcome = step::run(learner, &prepared, &config)?;
    if outcome.report.skipped {
        return Ok(Made::Skipped);
    }
    let mut kl = None;
    if let Some(dir) = dir {
        create_parent(dir)?;
        learner.save(dir)?;
        kl = step::kl_to_base(engine, &prepared, &outcome.logprobs, &config)?;
    }
    let mut baseline = plan.parent.baseline();
    // Rewards in groups are compared with one another: the sessions' mean knows nothing of them.
    if prepared.groups == 0 {
        baseline.update(&prepared.rewards);
    }
    let seconds = started.elapsed().as_secs_f64();
    let mut recipe = plan.recipe.clone();
    recipe.samples = prepared.ids.len();
    let version = VersionRecord {
        version: plan.version.clone(),
        parent: plan.parent.number,
        steps: plan.parent.steps + 1,
        origin: plan.origin.clone(),
        checkpoint: Some(crate::publish::checkpoint_name(&plan.version)),
        samples: prepared.ids.clone(),
        recipe: Some(recipe.write()?),
        metrics: metrics(&prepared, &outcome, &baseline, kl, seconds),
        created: plan.now,
        ..VersionRecord::default()
    };
    Ok(Made::Version(Box::new(StepCommit {
        version,
        dropped: prepared.left_out,
    })))
}

fn metrics(
    prepared: &Prepared,
    outcome: &step::StepOutcome,
    baseline: &Baseline,
    kl: Option<f64>,
    seconds: f64,
) -> Vec<(String, f64)> {
    let stats = &outcome.stats;
    let per_token = |sum: f64| sum / stats.tokens.max(1) as f64;
    let reward_mean = prepared.rewards.iter().map(|r| f64::from(*r)).sum::<f64>()
        / prepared.rewards.len().max(1) as f64;
    let total: usize = prepared.samples.iter().map(|s| s.tokens().len()).sum();
    let mut all = vec![
        ("loss", stats.loss),
        ("grad_norm", f64::from(outcome.report.grad_norm)),
        ("samples", prepared.samples.len() as f64),
        ("left_out", prepared.left_out.len() as f64),
        ("hinted", prepared.hinted as f64),
        ("groups", prepared.groups as f64),
        ("reward_mean", reward_mean),
        ("rewards_clipped", prepared.clipped as f64),
        ("tokens", stats.tokens as f64),
        ("tokens_all", total as f64),
        ("masked_tokens", stats.masked as f64),
        ("clip_fraction", per_token(stats.clipped as f64)),
        ("behavior_gap", per_token(stats.behavior_gap)),
        ("baseline", baseline.mean),
        ("baseline_count", baseline.count),
        ("seconds", seconds),
    ];
    all.extend(kl.map(|kl| ("kl_to_base", kl)));
    all.into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}

fn create_parent(dir: &Path) -> Result<(), TrainError> {
    let Some(parent) = dir.parent() else {
        return Ok(());
    };
    std::fs::create_dir_all(parent).map_err(|error| TrainError::Io {
        what: "cannot create",
        path: parent.display().to_string(),
        error,
    })
}
