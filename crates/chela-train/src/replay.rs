//! Whether the log reproduces a version: every step on the way to it is made again and the weights are compared with the receipts.

use crate::{
    TrainError, batch,
    config::TrainConfig,
    make::{Made, Parent, Plan, make},
    recipe::Recipe,
};
use chela_core::{
    Learner, Learners, LeasedSample, PolicyEngine, Profile, TrajectoryStore, VersionOrigin,
    VersionRecord, registry::Chain,
};
use std::path::Path;

/// One step made again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replayed {
    /// The version.
    pub number: u64,
    /// Hash of the weights as they came out now.
    pub now: String,
    /// Hash in its receipt; `None` = it never had one.
    pub then: Option<String>,
    /// It was made with the same instructions and threads.
    pub same_path: bool,
}

/// The recipe of a step that is made again with what is left of its batch. What is whole is made exactly as it was; of what is not,
/// the baseline is taken anew.
pub fn recipe(
    old: &VersionRecord,
    leased: &[LeasedSample],
    parent: &Parent,
    config: &TrainConfig,
) -> Result<Recipe, TrainError> {
    let text = old.recipe.as_deref().ok_or_else(|| {
        TrainError::Recipe(format!(
            "version {} was trained by an earlier program that kept no recipe",
            old.version
        ))
    })?;
    let mut recipe = Recipe::read(text)?;
    if leased.len() != recipe.samples {
        let then = recipe.config(config)?;
        recipe.baseline = batch::baseline_of(leased, &then, &parent.baseline());
    }
    Ok(recipe)
}

/// Makes every step on the way to a version again, from the base or from the nearest import, and compares. Writes nothing; the
/// profile must not be training.
pub fn verify(
    (store, engine, learners): (&dyn TrajectoryStore, &dyn PolicyEngine, &dyn Learners),
    config: &TrainConfig,
    (profile, number): (&Profile, u64),
    progress: &mut dyn FnMut(&Replayed),
) -> Result<Vec<Replayed>, TrainError> {
    let versions = store.versions(profile)?;
    let mut way = Chain::of(number, &versions).numbers().to_vec();
    if way.is_empty() {
        return Err(TrainError::Recipe(format!(
            "profile {profile} has no version {number}"
        )));
    }
    way.reverse();
    let find = |number: u64| {
        versions
            .iter()
            .find(|v| v.version.number == number)
            .cloned()
    };
    let mut parent = Parent::of(None);
    let mut learner: Option<Box<dyn Learner>> = None;
    let mut all = Vec::new();
    for record in way.into_iter().filter_map(find) {
        if matches!(record.origin, VersionOrigin::Imported(_)) {
            parent = Parent::of(Some(record));
            learner = None;
            continue;
        }
        let leased = store.samples(&record.samples)?;
        let recipe = recipe(&record, &leased, &parent, config)?;
        let kernel_path = learners.kernel_path();
        let same_path = recipe.kernel_path == kernel_path;
        let adapter = recipe.config(config)?.adapter;
        let open = match &mut learner {
            Some(open) => open,
            none => {
                let from = parent.checkpoint(&config.data_dir);
                none.insert(learners.open(profile, &adapter, from.as_ref())?)
            }
        };
        let plan = Plan {
            version: record.version.clone(),
            parent: &parent,
            versions: &versions,
            leased: &leased,
            recipe,
            origin: record.origin.clone(),
            now: record.created,
        };
        let Made::Version(_) = make(&plan, &mut **open, engine, (config, None::<&Path>))? else {
            return Err(TrainError::Recipe(format!(
                "the step of version {} makes nothing now",
                record.version
            )));
        };
        let one = Replayed {
            number: record.version.number,
            now: open.weights_hash()?,
            then: record.receipt.as_ref().map(|r| r.weights_hash.clone()),
            same_path,
        };
        progress(&one);
        all.push(one);
        parent = Parent::of(Some(record));
    }
    Ok(all)
}
