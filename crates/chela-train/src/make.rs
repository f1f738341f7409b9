//! Makes one version out of one batch: the same way when it is trained, when it is made again without what was forgotten, and when it
//! is made again to see whether the log reproduces it.

use crate::{
    TrainError, batch,
    config::TrainConfig,
    figures::{Around, figures},
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
    /// The profile's versions.
    pub versions: &'a [VersionRecord],
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
    /// The step was not finite.
    Skipped {
        /// After a part of the batch: the learner holds what nobody wants and must be opened again. Else it is as it was.
        moved: bool,
    },
}

/// Makes it. `learner` holds the parent's weights and afterwards the new ones; `dir` is where they are saved, `None` = nowhere.
pub fn make(
    plan: &Plan<'_>,
    learner: &mut dyn Learner,
    engine: &dyn PolicyEngine,
    (config, dir): (&TrainConfig, Option<&Path>),
) -> Result<Made, TrainError> {
    let config = plan.recipe.config(config)?;
    let mut prepared = match plan.recipe.groups()? {
        Some(how) => groups::prepare(plan.leased, &config, how, learner)?,
        None => {
            let takes = |sample: &Sample| learner.takes(sample);
            batch::prepare(plan.leased, &config, plan.recipe.baseline, &takes)
        }
    };
    if prepared.samples.is_empty() {
        return Ok(Made::Nothing(prepared.left_out));
    }
    prepared.behind = behind(plan, &prepared.samples);
    let started = std::time::Instant::now();
    let outcome = step::run(learner, &prepared, &config)?;
    if outcome.report.skipped {
        let moved = outcome.moved;
        return Ok(Made::Skipped { moved });
    }
    let mut kl = None;
    if let Some(dir) = dir {
        create_parent(dir)?;
        learner.save(dir)?;
        kl = step::kl_to_base(engine, &prepared, &outcome, &config)?;
    }
    let mut baseline = plan.parent.baseline();
    // Rewards in groups are compared with one another: the sessions' mean knows nothing of them.
    if prepared.groups == 0 {
        baseline.update(&prepared.rewards);
    }
    let around = Around {
        leased: plan.leased,
        baseline: &baseline,
        kl,
        seconds: started.elapsed().as_secs_f64(),
    };
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
        metrics: figures(&prepared, &outcome, &around),
        created: plan.now,
        ..VersionRecord::default()
    };
    Ok(Made::Version(Box::new(StepCommit {
        version,
        dropped: prepared.left_out,
    })))
}

/// Steps between what sampled each sample and the parent. A step that is made again stands where the first one stood, so that counting
/// asks for no chain; of a version whose record is gone nothing is known, and nothing is assumed.
fn behind(plan: &Plan<'_>, samples: &[Sample]) -> Vec<u64> {
    let steps = |version: &PolicyVersion| {
        let record = plan.versions.iter().find(|v| v.version == *version);
        let steps = record.map_or(plan.parent.steps, |v| v.steps);
        if version.number == 0 { 0 } else { steps }
    };
    let each = samples.iter().map(|s| steps(s.version()));
    each.map(|then| plan.parent.steps.saturating_sub(then))
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
