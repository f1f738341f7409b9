//! The queue: every tile once, failures reported, serving before training.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use super::many;
use crate::error::KernelError;
use crate::pool::{Pool, Priority};

#[test]
fn every_tile_runs_once() {
    for threads in [0, 1, 2, 5] {
        let pool = Pool::new(threads);
        for tiles in [0, 1, 2, many(1000, 40)] {
            for priority in [Priority::Serve, Priority::Train] {
                let counts: Vec<_> = (0..tiles).map(|_| AtomicUsize::new(0)).collect();
                pool.run(priority, tiles, |t| {
                    counts[t].fetch_add(1, Ordering::Relaxed);
                })
                .unwrap();
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }
}

#[test]
fn many_short_sections_from_many_threads() {
    let sections = many(500, 10);
    let pool = Arc::new(Pool::new(3));
    let total = Arc::new(AtomicUsize::new(0));
    let callers: Vec<_> = (0..4)
        .map(|i| {
            let (pool, total) = (Arc::clone(&pool), Arc::clone(&total));
            std::thread::spawn(move || {
                let priority = if i % 2 == 0 {
                    Priority::Serve
                } else {
                    Priority::Train
                };
                for _ in 0..sections {
                    pool.run(priority, 7, |_| {
                        total.fetch_add(1, Ordering::Relaxed);
                    })
                    .unwrap();
                }
            })
        })
        .collect();
    callers.into_iter().for_each(|c| c.join().unwrap());
    assert_eq!(total.load(Ordering::Relaxed), 4 * sections * 7);
}

#[test]
fn a_panic_in_a_tile_is_an_error_and_the_pool_lives_on() {
    for threads in [1, 3] {
        let pool = Pool::new(threads);
        let error = pool
            .run(Priority::Serve, 50, |t| {
                assert!(t != 30, "tile {t} is broken")
            })
            .unwrap_err();
        assert_eq!(error, KernelError::Worker("tile 30 is broken".to_owned()));
        pool.run(Priority::Train, 50, |_| {}).unwrap();
    }
}

#[test]
fn no_training_tile_starts_under_a_lease() {
    let pool = Arc::new(Pool::new(3));
    let lease = pool.lease();
    let (started, done) = (
        Arc::new(AtomicUsize::new(0)),
        Arc::new(AtomicBool::new(false)),
    );
    let trainer = {
        let (pool, started, done) = (Arc::clone(&pool), Arc::clone(&started), Arc::clone(&done));
        std::thread::spawn(move || {
            pool.run(Priority::Train, 20, |_| {
                started.fetch_add(1, Ordering::SeqCst);
            })
            .unwrap();
            done.store(true, Ordering::SeqCst);
        })
    };
    for _ in 0..20 {
        pool.run(Priority::Serve, 5, |_| {}).unwrap();
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!(started.load(Ordering::SeqCst), 0);
    }
    drop(lease);
    trainer.join().unwrap();
    assert!(done.load(Ordering::SeqCst));
    assert_eq!(started.load(Ordering::SeqCst), 20);
}

#[test]
fn a_section_may_run_inside_a_tile() {
    let pool = Pool::new(2);
    let total = AtomicUsize::new(0);
    pool.run(Priority::Serve, 4, |_| {
        pool.run(Priority::Serve, 4, |_| {
            total.fetch_add(1, Ordering::Relaxed);
        })
        .unwrap();
    })
    .unwrap();
    assert_eq!(total.load(Ordering::Relaxed), 16);
}
