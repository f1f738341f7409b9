//! What a profile's versions say when they are read together. Plain functions over the registry.

use crate::{
    Millis,
    ids::{PolicyVersion, Profile, SampleId},
    store::{VersionOrigin, VersionRecord, VersionState},
};
use futures_util::lock::Mutex;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::{Arc, PoisonError},
};

/// Held by whoever changes what a profile is served: a person going back and a trainer publishing take turns, so that the engine's
/// pointer and the registry say the same.
pub type Steering = Arc<Mutex<()>>;

/// Batches in a row of one profile that made no version.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Barren {
    /// How many.
    pub batches: u64,
    /// How many of their samples taught nothing for which reason.
    pub reasons: BTreeMap<String, u64>,
}

/// Which profiles' batches made no version lately: a trainer writes it, who tells operators reads it. It begins empty at each start.
#[derive(Clone, Debug, Default)]
pub struct Alarms(Arc<std::sync::Mutex<BTreeMap<Profile, Barren>>>);

impl Alarms {
    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<Profile, Barren>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more batch that came to nothing, with the reason of each sample.
    pub fn raise<'a>(&self, profile: &Profile, reasons: impl Iterator<Item = &'a str>) {
        let mut all = self.lock();
        let barren = all.entry(profile.clone()).or_default();
        barren.batches += 1;
        for why in reasons {
            *barren.reasons.entry(why.to_owned()).or_default() += 1;
        }
    }

    /// A version was made.
    pub fn clear(&self, profile: &Profile) {
        self.lock().remove(profile);
    }

    /// How a profile stands; `None` = its last batch made a version, or there was none yet.
    pub fn of(&self, profile: &Profile) -> Option<Barren> {
        self.lock().get(profile).cloned()
    }
}

/// The folder of the steps' figures, below the data folder: `<profile>.jsonl` and `<profile>/` in it.
pub const METRICS: &str = "metrics";

/// Of these, a line for each step, in the profile's folder.
pub const METRICS_LINES: &str = "steps.jsonl";

/// The parent chain of one version: number → steps since the base.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chain {
    steps: HashMap<u64, u64>,
    /// From the head to the base, the base left out.
    order: Vec<u64>,
}

impl Chain {
    /// Walks from `head` to the base.
    pub fn of(head: u64, versions: &[VersionRecord]) -> Self {
        let by_number: HashMap<u64, &VersionRecord> =
            versions.iter().map(|v| (v.version.number, v)).collect();
        let mut chain = Self {
            steps: HashMap::from([(0, 0)]),
            order: Vec::new(),
        };
        let mut at = head;
        while let Some(record) = by_number.get(&at) {
            // A parent is always an older number; anything else would be a damaged registry and must not loop.
            if chain.steps.insert(at, record.steps).is_some() {
                break;
            }
            chain.order.push(at);
            if record.parent >= at {
                break;
            }
            at = record.parent;
        }
        chain
    }

    /// Steps made since that version; `None` when it is not on the chain.
    pub fn staleness(&self, version: &PolicyVersion) -> Option<u64> {
        self.steps
            .get(&version.number)
            .map(|s| self.head_steps().saturating_sub(*s))
    }

    /// Steps from the base to the head.
    pub fn head_steps(&self) -> u64 {
        self.order
            .first()
            .and_then(|head| self.steps.get(head))
            .copied()
            .unwrap_or(0)
    }

    /// Versions from the head down to the base, the base left out.
    pub fn numbers(&self) -> &[u64] {
        &self.order
    }

    /// The version is the base or on the chain.
    pub fn holds(&self, number: u64) -> bool {
        self.steps.contains_key(&number)
    }
}

/// The version that is served; `None` = the base.
pub fn served(versions: &[VersionRecord]) -> Option<&VersionRecord> {
    versions
        .iter()
        .rev()
        .find(|v| v.state == VersionState::Served)
}

/// The number of what is served; 0 = the base.
pub fn served_number(versions: &[VersionRecord]) -> u64 {
    served(versions).map_or(0, |v| v.version.number)
}

/// When what is served was put back although newer versions were there, or was taken back before; `None` when it followed on its
/// parent.
pub fn put_back(versions: &[VersionRecord]) -> Option<Millis> {
    let served = served(versions)?;
    let at = served.served_at?;
    let others = versions.iter().filter(|v| v.version != served.version);
    let mut later = others.filter(|v| {
        let newer = v.version.number > served.version.number && v.created <= at;
        newer || v.served_at.is_some_and(|other| other > served.created)
    });
    later.next().map(|_| at)
}

/// The newest version when it is a candidate that stands on what is served: directly, or through candidates of a replay.
pub fn unfinished(versions: &[VersionRecord]) -> Option<&VersionRecord> {
    let newest = versions.iter().max_by_key(|v| v.version.number)?;
    if newest.state != VersionState::Candidate {
        return None;
    }
    let served = served_number(versions);
    let mut at = newest;
    while at.parent != served {
        let replayed = matches!(at.origin, VersionOrigin::Replayed(_));
        let parent = versions
            .iter()
            .find(|v| v.version.number == at.parent && v.state == VersionState::Candidate);
        at = parent.filter(|p| replayed && p.version.number < at.version.number)?;
    }
    Some(newest)
}

/// What has to happen to a profile's versions when samples are forgotten.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Undo {
    /// Versions whose step consumed such a sample, and all that stand on them, by number.
    pub versions: Vec<u64>,
    /// The nearest ancestor of the served version that is not among them; `None` when the served one is not touched.
    pub back_to: Option<u64>,
    /// Those on the way to what is served, or to the candidate on top of it, oldest first: their steps are made again without the
    /// forgotten samples.
    pub replay: Vec<u64>,
}

/// The versions touched by samples that were trained into the versions named beside them.
pub fn undo(versions: &[VersionRecord], trained: &[(SampleId, u64)]) -> Undo {
    let consumed: HashSet<u64> = trained.iter().map(|(_, version)| *version).collect();
    let mut touched = BTreeSet::new();
    let mut sorted: Vec<&VersionRecord> = versions.iter().filter(|v| v.state.is_there()).collect();
    sorted.sort_by_key(|v| v.version.number);
    // Parents come before children, so one pass reaches every descendant.
    for record in sorted {
        let number = record.version.number;
        if consumed.contains(&number) || touched.contains(&record.parent) {
            touched.insert(number);
        }
    }
    let served = served_number(versions);
    let head = unfinished(versions).map_or(served, |v| v.version.number);
    let chain = Chain::of(head, versions);
    let on_chain = chain.numbers().iter().filter(|n| touched.contains(n));
    let mut replay: Vec<u64> = on_chain.copied().collect();
    replay.reverse();
    let oldest = replay.first().filter(|_| touched.contains(&served));
    let back_to = oldest.map(|oldest| {
        let record = versions.iter().find(|v| v.version.number == *oldest);
        record.map_or(0, |r| r.parent)
    });
    Undo {
        versions: touched.into_iter().collect(),
        back_to,
        replay,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(number: u64, parent: u64, steps: u64, state: VersionState) -> VersionRecord {
        VersionRecord {
            version: PolicyVersion {
                profile: Profile::default(),
                number,
            },
            parent,
            steps,
            state,
            ..VersionRecord::default()
        }
    }

    fn replayed(number: u64, parent: u64, of: u64) -> VersionRecord {
        VersionRecord {
            origin: VersionOrigin::Replayed(of),
            ..record(number, parent, 1, VersionState::Candidate)
        }
    }

    fn back() -> VersionState {
        VersionState::RolledBack("by hand".to_owned())
    }

    #[test]
    fn what_follows_on_its_parent_was_not_put_back_and_what_an_operator_chose_was() {
        let at = |record: VersionRecord, created, served_at| VersionRecord {
            created,
            served_at: Some(served_at),
            ..record
        };
        let s = VersionState::Superseded;
        let one = at(record(1, 0, 1, s.clone()), 10, 11);
        let two = at(record(2, 1, 2, VersionState::Served), 20, 21);
        assert_eq!(put_back(&[]), None);
        assert_eq!(put_back(&[one.clone(), two.clone()]), None);
        let left = at(record(2, 1, 2, back()), 20, 21);
        let first = at(record(1, 0, 1, VersionState::Served), 10, 30);
        assert_eq!(put_back(&[first, left]), Some(30), "gone back to");
        let between = at(record(1, 0, 1, s), 10, 30);
        let again = VersionRecord {
            served_at: Some(40),
            ..two
        };
        assert_eq!(
            put_back(&[between, again.clone()]),
            Some(40),
            "promoted again"
        );
        let rejected = VersionRecord {
            created: 50,
            ..record(3, 2, 3, VersionState::Rejected("why".to_owned()))
        };
        let two = VersionRecord {
            served_at: Some(21),
            ..again
        };
        assert_eq!(put_back(&[one, two, rejected]), None, "came to nothing");
    }

    #[test]
    fn staleness_counts_steps_along_the_parents_only() {
        let s = VersionState::Superseded;
        // 1 → 2 → 3, rolled back to 1, then 4.
        let all = [
            record(1, 0, 1, s.clone()),
            record(2, 1, 2, s.clone()),
            record(3, 2, 3, back()),
            record(4, 1, 2, VersionState::Served),
        ];
        let chain = Chain::of(4, &all);
        let at = |n| {
            chain.staleness(&PolicyVersion {
                profile: Profile::default(),
                number: n,
            })
        };
        assert_eq!((at(4), at(1), at(0)), (Some(0), Some(1), Some(2)));
        assert_eq!((at(2), at(3), at(9)), (None, None, None));
        assert_eq!(chain.numbers(), [4, 1]);
        assert_eq!(served(&all).unwrap().version.number, 4);
    }

    #[test]
    fn a_damaged_registry_does_not_loop() {
        let all = [
            record(1, 2, 1, VersionState::Served),
            record(2, 1, 2, VersionState::Served),
        ];
        assert_eq!(Chain::of(2, &all).head_steps(), 2);
        assert_eq!(undo(&all, &[(SampleId(1), 1)]).versions, [1, 2]);
    }

    #[test]
    fn only_a_candidate_on_top_of_what_is_served_is_unfinished() {
        let served = record(1, 0, 1, VersionState::Served);
        let on_top = record(2, 1, 2, VersionState::Candidate);
        assert_eq!(
            unfinished(&[served.clone(), on_top.clone()])
                .unwrap()
                .version
                .number,
            2
        );
        assert!(unfinished(&[record(1, 0, 1, back()), on_top.clone()]).is_none());
        assert!(unfinished(std::slice::from_ref(&served)).is_none());
        assert!(unfinished(&[]).is_none());
        // A replay stands on candidates until its last step is served; a plain candidate may not.
        let chain = [served.clone(), replayed(5, 1, 2), replayed(6, 5, 3)];
        assert_eq!(unfinished(&chain).unwrap().version.number, 6);
        let broken = [served, on_top, record(3, 2, 3, VersionState::Candidate)];
        assert!(unfinished(&broken).is_none());
    }

    #[test]
    fn what_stands_on_a_forgotten_sample_goes_and_the_served_chain_is_made_again() {
        let s = VersionState::Superseded;
        // 1 → 2 → 4 → 5 (served); 3 is a branch from 1, 6 from 2.
        let all = [
            record(1, 0, 1, s.clone()),
            record(2, 1, 2, s.clone()),
            record(3, 1, 2, back()),
            record(4, 2, 3, s.clone()),
            record(5, 4, 4, VersionState::Served),
            record(6, 2, 3, VersionState::Rejected("gate".to_owned())),
        ];
        let undone = undo(&all, &[(SampleId(7), 2)]);
        assert_eq!(undone.versions, [2, 4, 5, 6]);
        assert_eq!(undone.back_to, Some(1));
        assert_eq!(undone.replay, [2, 4, 5]);
        // Off the served chain: nothing is made again.
        let undone = undo(&all, &[(SampleId(7), 3)]);
        assert_eq!((undone.versions, undone.back_to), (vec![3], None));
        // The first step: back to the base.
        assert_eq!(undo(&all, &[(SampleId(7), 1)]).back_to, Some(0));
        assert_eq!(undo(&all, &[]), Undo::default());
        // A replay under way, 7 of 2 on the served 1: its step is made once more.
        let all = [record(1, 0, 1, VersionState::Served), replayed(7, 1, 2)];
        let undone = undo(&all, &[(SampleId(7), 7)]);
        assert_eq!((undone.versions, undone.replay), (vec![7], vec![7]));
        assert_eq!(undone.back_to, None);
    }
}
