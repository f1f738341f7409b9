//! What serving keeps while a learner is at work on the same cores, and the learner while requests run. Measurements, run by hand.

use crate::{
    common::{begin, collect, greedy, options, prompt, rewarded},
    starter::starter,
};
use chela_core::{AdapterSpec, Learner, OptimParams, PolicyRef, Sample, TokenLoss};
use chela_engine::{EngineOptions, LocalEngine};
use chela_model::Model;
use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    time::Instant,
};

/// Tokens a second of eight replies that run together.
fn serving(engine: &LocalEngine, from: u32) -> f64 {
    let started = Instant::now();
    let streams: Vec<_> = (0..8)
        .map(|i| {
            let text = prompt(from + i, 32);
            begin(engine, PolicyRef::Base, &text, greedy(192)).unwrap()
        })
        .collect();
    let tokens: usize = streams.into_iter().map(|s| collect(s).len()).sum();
    tokens as f64 / started.elapsed().as_secs_f64()
}

/// Steps over one text of 512 tokens until told to stop; steps and seconds.
fn training(engine: &LocalEngine, stop: &AtomicBool, done: &AtomicUsize) -> (f64, f64) {
    let mut learner = engine.learner(&AdapterSpec::default(), None).unwrap();
    let batch = [rewarded(&prompt(7, 512), &[0.1; 256])];
    let started = Instant::now();
    let mut steps = 0.0;
    while !stop.load(Ordering::Relaxed) {
        let mut loss = |_: usize, sample: &Sample, _: &chela_core::Scored| TokenLoss {
            d_logprobs: vec![-0.01; sample.len()],
            ..TokenLoss::default()
        };
        learner.forward_backward(&batch, &mut loss).unwrap();
        learner.optim_step(&OptimParams::default()).unwrap();
        steps += 1.0;
        done.fetch_add(1, Ordering::Relaxed);
    }
    (steps, started.elapsed().as_secs_f64())
}

#[test]
#[ignore = "needs the starter model and a quiet machine"]
fn measured_serving_beside_a_learner() {
    for train_share in [0.0, 0.05, 0.1, 0.25] {
        let options = EngineOptions {
            train_share,
            ..options()
        };
        let engine = LocalEngine::open(&Model::open(&starter()).unwrap(), options).unwrap();
        serving(&engine, 1);
        for round in 0..3 {
            let alone = serving(&engine, 20 + 40 * round);
            let (stop, done) = (AtomicBool::new(false), AtomicUsize::new(0));
            let (beside, (steps, seconds)) = std::thread::scope(|scope| {
                let learner = scope.spawn(|| training(&engine, &stop, &done));
                while done.load(Ordering::Relaxed) == 0 {
                    std::thread::yield_now();
                }
                let beside = serving(&engine, 40 + 40 * round);
                stop.store(true, Ordering::Relaxed);
                (beside, learner.join().unwrap())
            });
            let (stop, done) = (AtomicBool::new(false), AtomicUsize::new(0));
            let (free, free_seconds) = std::thread::scope(|scope| {
                let learner = scope.spawn(|| training(&engine, &stop, &done));
                while done.load(Ordering::Relaxed) < 3 {
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
                stop.store(true, Ordering::Relaxed);
                learner.join().unwrap()
            });
            println!(
                "train_share {train_share}: serving alone {alone:.1}, beside a learner {beside:.1} tokens/s ({:.2}); steps/s beside {:.3}, on an \
                 idle server {:.3}",
                beside / alone,
                steps / seconds,
                free / free_seconds
            );
        }
    }
}
