//! Where a version stands on the way from the base to what is trained now. Plain functions over the registry.

use chela_core::{PolicyVersion, VersionRecord, VersionState};
use std::collections::HashMap;

/// The parent chain of one version: number → steps since the base.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chain {
    steps: HashMap<u64, u64>,
    head_steps: u64,
}

impl Chain {
    /// Walks from `head` to the base.
    pub fn of(head: u64, versions: &[VersionRecord]) -> Self {
        let by_number: HashMap<u64, &VersionRecord> =
            versions.iter().map(|v| (v.version.number, v)).collect();
        let mut steps = HashMap::from([(0, 0)]);
        let mut at = head;
        while let Some(record) = by_number.get(&at) {
            // A parent is always an older number; anything else would be a damaged registry and must not loop.
            if steps.insert(at, record.steps).is_some() || record.parent >= at {
                break;
            }
            at = record.parent;
        }
        let head_steps = steps.get(&head).copied().unwrap_or(0);
        Self { steps, head_steps }
    }

    /// Steps made since that version; `None` when it is not on the chain.
    pub fn staleness(&self, version: &PolicyVersion) -> Option<u64> {
        self.steps
            .get(&version.number)
            .map(|s| self.head_steps.saturating_sub(*s))
    }

    /// Steps from the base to the head.
    pub fn head_steps(&self) -> u64 {
        self.head_steps
    }
}

/// The version the registry says is served; `None` = the base.
pub fn served(versions: &[VersionRecord]) -> Option<&VersionRecord> {
    versions
        .iter()
        .rev()
        .find(|v| v.state == VersionState::Served)
}

/// A candidate that a crash left between its step and its publish: the newest version, trained from what is served.
pub fn unfinished(versions: &[VersionRecord]) -> Option<&VersionRecord> {
    let newest = versions.iter().max_by_key(|v| v.version.number)?;
    let served = served(versions).map_or(0, |v| v.version.number);
    (newest.state == VersionState::Candidate && newest.parent == served).then_some(newest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use chela_core::Profile;

    fn record(number: u64, parent: u64, steps: u64, state: VersionState) -> VersionRecord {
        VersionRecord {
            version: PolicyVersion {
                profile: Profile::default(),
                number,
            },
            parent,
            steps,
            state,
            receipt: None,
            checkpoint: None,
            samples: Vec::new(),
            metrics: Vec::new(),
            created: 0,
        }
    }

    #[test]
    fn staleness_counts_steps_along_the_parents_only() {
        let s = VersionState::Superseded;
        // 1 → 2 → 3, rolled back to 1, then 4.
        let all = [
            record(1, 0, 1, s.clone()),
            record(2, 1, 2, s.clone()),
            record(3, 2, 3, VersionState::RolledBack),
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
        assert_eq!(served(&all).unwrap().version.number, 4);
    }

    #[test]
    fn a_damaged_registry_does_not_loop() {
        let all = [
            record(1, 2, 1, VersionState::Served),
            record(2, 1, 2, VersionState::Served),
        ];
        assert_eq!(Chain::of(2, &all).head_steps(), 2);
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
        assert!(unfinished(&[record(1, 0, 1, VersionState::RolledBack), on_top]).is_none());
        assert!(unfinished(&[served]).is_none());
        assert!(unfinished(&[]).is_none());
    }
}
