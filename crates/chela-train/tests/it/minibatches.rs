//! Batches that are cut into several optimizer steps: one version each, nothing of a step that was not finite, figures.

use super::*;
use chela_core::VersionRecord;
use chela_train::Proximal;

/// Batches of four in two minibatches.
fn cut(proximal: Proximal) -> Rig {
    let mut rig = rig();
    (rig.config.batch, rig.config.min_batch) = (4, 4);
    (rig.config.minibatches, rig.config.proximal) = (2, proximal);
    rig.config.optim.lr = 0.05;
    rig.trainer = trainer(&rig.store, &rig.engine, &rig.learners, &rig.config);
    rig
}

impl Rig {
    fn four(&self, of: &Profile) {
        for reward in [1.0, -1.0, 1.0, 0.0] {
            self.judged(of, reward);
        }
    }

    fn newest(&self, of: &Profile) -> VersionRecord {
        self.store.versions(of).unwrap().pop().unwrap()
    }
}

fn figure(record: &VersionRecord, name: &str) -> Option<f64> {
    let found = record.metrics.iter().find(|(n, _)| n == name);
    found.map(|(_, value)| *value)
}

#[test]
fn a_batch_is_one_version_however_it_is_cut() {
    for proximal in [Proximal::Recomputed, Proximal::Interpolated] {
        let mut rig = cut(proximal);
        let p = profile("default");
        for number in 1..=2 {
            rig.four(&p);
            assert_eq!(
                rig.trainer.advance(&p).unwrap(),
                Progress::Served(version(&p, number))
            );
            assert_eq!(rig.newest(&p).steps, number, "of batches");
            assert_eq!(rig.learners.steps(), 2 * number, "of the optimizer");
        }
        // A restart goes on with the optimizer's own count.
        let trained = |again: bool| {
            let mut rig = cut(proximal);
            for _ in 0..2 {
                rig.four(&p);
                if again {
                    rig.trainer = trainer(&rig.store, &rig.engine, &rig.learners, &rig.config);
                }
                rig.trainer.advance(&p).unwrap();
            }
            rig.newest(&p).receipt.unwrap().weights_hash
        };
        assert_eq!(trained(false), trained(true));
    }
}

#[test]
fn nothing_is_left_of_a_batch_whose_second_minibatch_was_not_finite() {
    for before in [0, 1] {
        let run = |spoil: bool| {
            let mut rig = cut(Proximal::Recomputed);
            let p = profile("default");
            for _ in 0..before {
                rig.four(&p);
                rig.trainer.advance(&p).unwrap();
            }
            let steps = rig.learners.steps();
            if spoil {
                rig.learners.skip_a_step_after(1);
                rig.four(&p);
                assert_eq!(rig.trainer.advance(&p).unwrap(), Progress::Skipped);
                assert_eq!(rig.learners.steps(), steps + 1, "one went before");
                assert_eq!(rig.versions(&p).len(), before);
            } else {
                // The same turns, of which nobody says anything.
                for _ in 0..4 {
                    rig.store.next_turn_id(1_000);
                }
            }
            rig.four(&p);
            let made = Progress::Served(version(&p, before as u64 + 1));
            assert_eq!(rig.trainer.advance(&p).unwrap(), made);
            rig.newest(&p).receipt.unwrap().weights_hash
        };
        assert_eq!(run(true), run(false), "{before} versions before");
    }
}

#[test]
fn a_version_says_what_its_step_was_made_of() {
    let mut rig = rig();
    (rig.config.batch, rig.config.min_batch) = (5, 5);
    (rig.config.baseline, rig.config.optim.lr) = (false, 0.05);
    rig.trainer = trainer(&rig.store, &rig.engine, &rig.learners, &rig.config);
    let p = profile("default");
    for reward in [1.0, 1.0, -1.0, 0.0, 0.5] {
        rig.judged(&p, reward);
    }
    rig.trainer.advance(&p).unwrap();
    let first = rig.newest(&p);
    for (name, want) in [
        ("samples", 4.0),
        ("rewards_good", 2.0),
        ("rewards_bad", 1.0),
        ("rewards_neutral", 1.0),
        ("rewards_other", 1.0),
        ("hint_only", 0.0),
        ("no_signal", 0.2),
        ("reward_mean", 0.3),
        ("tokens", 8.0),
        ("masked_fraction", 0.0),
        ("clip_fraction", 0.0),
        ("ratio_mean", 1.0),
        ("ratio_p5", 1.0),
        ("ratio_max", 1.0),
        ("steps_old_0", 4.0),
    ] {
        let got = figure(&first, name).unwrap_or(f64::NAN);
        assert!((got - want).abs() < 1e-6, "{name}: {got}");
    }
    let entropy = figure(&first, "entropy").unwrap();
    assert!(entropy > 4.0 && entropy < 256f64.ln(), "{entropy}");
    assert!(figure(&first, "tokens_per_second").unwrap() > 0.0);
    // Two replies of the base model among three of what is served now.
    let served = rig.engine.served(&p);
    let mut turns = Vec::new();
    for i in 0..5 {
        if i == 2 {
            rig.engine.serve(&served).unwrap();
        } else if i == 0 {
            let base = PolicyVersion::base(p.clone());
            rig.engine.serve(&base).unwrap();
        }
        turns.push(rig.judged(&p, [1.0, -1.0][i % 2]));
    }
    rig.trainer.advance(&p).unwrap();
    let second = rig.newest(&p);
    assert_eq!(second.version.number, 2);
    assert_eq!(figure(&second, "steps_old_1"), Some(2.0));
    assert_eq!(figure(&second, "steps_old_0"), Some(3.0));
    assert_eq!(figure(&second, "steps_old_2"), None);
}
