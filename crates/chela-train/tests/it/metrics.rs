//! Figures in files, written beside the trainer's loop.

use super::*;
use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

/// Runs the loop until that is so.
fn run_until(trainer: &mut Trainer, so: impl Fn() -> bool + Send) {
    let stop = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        let flag = stop.clone();
        scope.spawn(move || {
            for _ in 0..3_000 {
                if so() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            flag.store(true, Ordering::Relaxed);
        });
        trainer.run(&stop);
    });
}

fn served(store: &MemoryStore) -> u64 {
    let versions = store.versions(&Profile::default()).unwrap();
    chela_core::registry::served_number(&versions)
}

#[test]
fn figures_follow_each_step_and_what_is_missing_is_written_at_the_start() {
    let mut r = rig();
    let store = r.store.clone();
    let lines = r.dir.path().join("metrics/default/steps.jsonl");
    let count = || std::fs::read_to_string(&lines).map_or(0, |t| t.lines().count());
    r.pair(&Profile::default());
    run_until(&mut r.trainer, || count() == 1);
    assert_eq!(count(), 1);
    let text = std::fs::read_to_string(&lines).unwrap();
    let line: serde_json::Value = serde_json::from_str(&text).unwrap();
    let record = store.versions(&Profile::default()).unwrap().remove(0);
    assert_eq!(line["state"], "served");
    let metrics = line["metrics"].as_object().unwrap();
    assert_eq!(metrics.len(), record.metrics.len());
    for (name, x) in &record.metrics {
        assert_eq!(metrics[name].as_f64(), Some(*x), "{name}");
    }

    // The program ended before it was written.
    std::fs::remove_file(&lines).unwrap();
    run_until(&mut r.trainer, || count() == 1);
    assert_eq!(std::fs::read_to_string(&lines).unwrap(), text);

    // Files that cannot be written stop nothing.
    std::fs::remove_dir_all(r.dir.path().join("metrics")).unwrap();
    std::fs::write(r.dir.path().join("metrics"), "in the way").unwrap();
    r.pair(&Profile::default());
    run_until(&mut r.trainer, || served(&store) == 2);
    assert_eq!(served(&store), 2);
}

#[test]
fn figures_can_be_switched_off() {
    let r = rig();
    let mut config = r.config.clone();
    config.metrics = false;
    r.pair(&Profile::default());
    let mut quiet = trainer(&r.store, &r.engine, &r.learners, &config);
    let store = r.store.clone();
    run_until(&mut quiet, || served(&store) == 1);
    assert_eq!(served(&store), 1);
    assert!(!r.dir.path().join("metrics").exists());
}
