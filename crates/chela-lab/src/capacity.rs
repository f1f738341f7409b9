//! How many groups of replies a task runner may begin now, so that they are trained on before they are too old. Users are not held back by it.

use serde::{Deserialize, Serialize};

/// What bounds it; the last two stand in `/v1/status` under `groups`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bounds {
    /// Groups that may be under way at the same time.
    #[serde(skip)]
    pub max_concurrent: u64,
    /// B: groups of one step.
    #[serde(rename = "groups")]
    pub batch: u64,
    /// η: steps a group may be behind when it is trained on; 0 = each batch is sampled by what the one before it made.
    pub max_staleness: u64,
}

/// How far a runner has come, in groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rollouts {
    /// Steps of the served version.
    pub steps: u64,
    /// Groups handed in, without those that were dropped untrained.
    pub accepted: u64,
    /// Groups under way.
    pub running: u64,
}

impl Rollouts {
    /// After a restart: what was under way is lost, and what was handed in is what the steps took.
    pub fn restarted(steps: u64, bounds: &Bounds) -> Self {
        Self {
            steps,
            accepted: steps.saturating_mul(bounds.batch),
            running: 0,
        }
    }

    /// Groups that may be begun: min(max_concurrent − running, (η + steps + 1) · B − (accepted + running)) (Fu et al., AReaL, arXiv
    /// 2505.24298). Never more than (η + 1) · B groups are under way or wait for a step.
    pub fn capacity(&self, bounds: &Bounds) -> u64 {
        let free = bounds.max_concurrent.saturating_sub(self.running);
        let ahead = bounds.max_staleness.saturating_add(self.steps);
        let all = ahead.saturating_add(1).saturating_mul(bounds.batch);
        free.min(all.saturating_sub(self.accepted.saturating_add(self.running)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_bounds_are_those_of_the_status() {
        let status =
            r#"{"algorithm": "grpo", "groups": 8, "max_staleness": 2, "reply_limit": null}"#;
        let bounds: Bounds = serde_json::from_str(status).unwrap();
        assert_eq!((bounds.batch, bounds.max_staleness), (8, 2));
        let bounds = Bounds {
            max_concurrent: 100,
            ..bounds
        };
        let fresh = Rollouts::restarted(5, &bounds);
        assert_eq!((fresh.accepted, fresh.capacity(&bounds)), (40, 24));
        let synchronous = Bounds {
            max_staleness: 0,
            ..bounds
        };
        let mut one = Rollouts::restarted(5, &synchronous);
        one.running = 8;
        assert_eq!(one.capacity(&synchronous), 0);
        let huge = Rollouts {
            steps: u64::MAX,
            accepted: u64::MAX,
            running: u64::MAX,
        };
        assert_eq!(huge.capacity(&bounds), 0);
    }

    proptest! {
        /// A runner that always begins what it may, groups that end in the order in which they began, or in any, and some that are dropped.
        #[test]
        fn what_waits_is_bounded_and_what_ends_in_order_is_fresh(
            (batch, max_staleness, max_concurrent) in (1u64..6, 0u64..4, 1u64..20),
            in_order: bool,
            moves in prop::collection::vec((0u8..8, 0usize..50), 1..300),
        ) {
            let bounds = Bounds { max_concurrent, batch, max_staleness };
            let mut now = Rollouts::default();
            // Steps of the version that each group began under.
            let (mut running, mut waiting): (Vec<u64>, Vec<u64>) = (Vec::new(), Vec::new());
            for (kind, which) in moves {
                match kind {
                    0..3 => while now.capacity(&bounds) > 0 {
                        now.running += 1;
                        running.push(now.steps);
                    },
                    3..6 if !running.is_empty() => {
                        let at = if in_order { 0 } else { which % running.len() };
                        waiting.push(running.remove(at));
                        now.running -= 1;
                        now.accepted += 1;
                    }
                    6 if !in_order && !waiting.is_empty() => {
                        waiting.remove(which % waiting.len());
                        now.accepted -= 1;
                    }
                    _ if waiting.len() as u64 >= batch => {
                        let trained: Vec<u64> = waiting.drain(..batch as usize).collect();
                        let oldest = trained.iter().map(|began| now.steps - began).max();
                        prop_assert!(!in_order || oldest <= Some(max_staleness), "{oldest:?}");
                        now.steps += 1;
                    }
                    _ => {}
                }
                let untrained = (running.len() + waiting.len()) as u64;
                prop_assert!(untrained <= (max_staleness + 1) * batch);
                prop_assert!(now.running <= max_concurrent);
                // It never stands still: with nothing under way and no batch ready, something may begin.
                let stuck = running.is_empty() && (waiting.len() as u64) < batch;
                prop_assert!(!stuck || now.capacity(&bounds) > 0);
            }
        }
    }
}
