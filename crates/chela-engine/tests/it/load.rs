//! Measurements under load, not tests of speed: publishes while replies run, and many profiles. They assert what must never happen
//! and print the rest as minimum, median and maximum. On a quiet machine:
//!
//! `cargo test -p chela-engine --test it -- --ignored --nocapture --test-threads 1 load::`

use crate::{
    common::{begin, greedy, ids, of, open, prompt, sample, tiny, trained},
    starter::starter,
};
use chela_core::{
    AdapterSpec, Learner, OptimParams, PolicyEngine, PolicyRef, PolicyVersion, Sampling,
    SamplingEvent, SamplingParams, TokenLoss, Weights,
};
use chela_engine::{EngineOptions, LocalEngine, adapter::Adapter};
use chela_model::Model;
use futures_executor::{block_on, block_on_stream};
use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// Milliseconds, printed as minimum, median, 99th and 99.9th of a hundred, and maximum.
#[derive(Default)]
struct Times(Vec<f64>);

impl Times {
    fn add(&mut self, time: Duration) {
        self.0.push(time.as_secs_f64() * 1e3);
    }

    fn at(&mut self, share: f64) -> f64 {
        self.0.sort_by(f64::total_cmp);
        let last = self.0.len().saturating_sub(1);
        self.0
            .get((share * last as f64).round() as usize)
            .copied()
            .unwrap_or(0.0)
    }

    fn print(&mut self, what: &str) {
        let [low, mid, high, higher, most] = [0.0, 0.5, 0.99, 0.999, 1.0].map(|s| self.at(s));
        println!(
            "{what}: min {low:.2} median {mid:.2} p99 {high:.2} p99.9 {higher:.2} max {most:.2} ms (n = {})",
            self.0.len()
        );
    }
}

fn resident_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    let kib = line.and_then(|l| l.split_whitespace().next()?.parse::<f64>().ok());
    kib.unwrap_or(0.0) / 1024.0
}

/// An adapter one step away from the base model.
fn moved(engine: &LocalEngine, dir: &Path, seed: u64) -> Weights {
    let spec = AdapterSpec {
        seed,
        ..AdapterSpec::default()
    };
    let mut learner = engine.learner(&spec, None).unwrap();
    let one = crate::common::rewarded(&prompt(seed as u32 * 13, 12), &[1.0; 6]);
    let mut loss = |_: usize, s: &chela_core::Sample, _: &chela_core::Scored| TokenLoss {
        d_logprobs: vec![-1.0; s.len()],
        ..TokenLoss::default()
    };
    learner.forward_backward(&[one], &mut loss).unwrap();
    let params = OptimParams {
        lr: 1e-3,
        ..OptimParams::default()
    };
    learner.optim_step(&params).unwrap();
    Weights::Folder(
        learner
            .save(&dir.join(format!("moved {seed}")))
            .unwrap()
            .dir,
    )
}

/// Too short to be kept: every reply is a cold run, so that equal weights give equal replies.
fn question(stream: usize) -> Vec<u32> {
    prompt(20 + stream as u32, 12)
}

const STREAMS: usize = 4;

/// Replies of the served version one after the other until `stop`: gaps between tokens, and each reply with its version.
type Seen = (Times, Vec<(u64, Vec<u32>)>);

fn stream(engine: &LocalEngine, index: usize, most: usize, stop: &AtomicBool) -> Seen {
    let (mut gaps, mut replies) = (Times::default(), Vec::new());
    while !stop.load(Ordering::Relaxed) {
        let policy = PolicyRef::Served(of("p", 0).profile);
        let events = begin(engine, policy, &question(index), greedy(most)).unwrap();
        let (mut version, mut tokens, mut last) = (0, Vec::new(), None);
        for event in block_on_stream(events) {
            match event.unwrap() {
                SamplingEvent::Started { version: v, .. } => version = v.number,
                SamplingEvent::Token(token) => {
                    let now = Instant::now();
                    if let Some(last) = last.replace(now) {
                        gaps.add(now - last);
                    }
                    tokens.push(token.id);
                }
                SamplingEvent::Finished(_) => {}
            }
        }
        replies.push((version, tokens));
    }
    (gaps, replies)
}

/// Streams run while `work` does.
fn under_load(
    engine: &Arc<LocalEngine>,
    most: usize,
    work: impl FnOnce(),
) -> (Times, Vec<(usize, u64, Vec<u32>)>) {
    let stop = Arc::new(AtomicBool::new(false));
    let threads: Vec<_> = (0..STREAMS)
        .map(|i| {
            let (engine, stop) = (engine.clone(), stop.clone());
            std::thread::spawn(move || stream(&engine, i, most, &stop))
        })
        .collect();
    work();
    stop.store(true, Ordering::Relaxed);
    let (mut gaps, mut replies) = (Times::default(), Vec::new());
    for (i, thread) in threads.into_iter().enumerate() {
        let (times, seen) = thread.join().unwrap();
        gaps.0.extend(times.0);
        replies.extend(seen.into_iter().map(|(v, tokens)| (i, v, tokens)));
    }
    (gaps, replies)
}

/// `cycles` publishes of two alternating adapters, `pause` after each, while streams of replies of `most` tokens run.
fn publishes(
    engine: &Arc<LocalEngine>,
    weights: &[Weights; 2],
    (cycles, pause, most): (u64, Duration, usize),
) {
    let version = |number| of("p", number);
    let wanted: Vec<Vec<Vec<u32>>> = (0..2)
        .map(|w| {
            let probe = of("probe", w as u64 + 1);
            block_on(engine.load(probe.clone(), weights[w].clone())).unwrap();
            let reply = |i| {
                sample(
                    engine,
                    PolicyRef::Version(probe.clone()),
                    &question(i),
                    greedy(most),
                )
            };
            (0..STREAMS).map(|i| ids(&reply(i))).collect()
        })
        .collect();
    let publish = |number: u64| {
        let weights = weights[number as usize % 2].clone();
        block_on(engine.load(version(number), weights)).unwrap();
        engine.serve(&version(number)).unwrap();
        engine.unload(&version(number - 1));
    };
    publish(1);
    let quiet = Duration::from_secs(3);
    let (mut before, _) = under_load(engine, most, || std::thread::sleep(quiet));
    let mut times = Times::default();
    let (mut during, replies) = under_load(engine, most, || {
        for number in 2..cycles + 2 {
            let started = Instant::now();
            publish(number);
            times.add(started.elapsed());
            std::thread::sleep(pause);
        }
    });
    let (mut after, _) = under_load(engine, most, || std::thread::sleep(quiet));
    let versions: std::collections::HashSet<u64> = replies.iter().map(|r| r.1).collect();
    for (i, version, tokens) in &replies {
        assert!(*version >= 1 && tokens.len() == most);
        assert_eq!(
            tokens,
            &wanted[*version as usize % 2][*i],
            "version {version}"
        );
    }
    println!(
        "{cycles} publishes beside {STREAMS} streams: {} replies of {} versions, none refused or broken",
        replies.len(),
        versions.len()
    );
    times.print("  load + serve + unload");
    before.print("  gap between tokens before");
    during.print("  gap between tokens while publishing");
    after.print("  gap between tokens after");
    let step = before.at(0.5);
    println!(
        "  target: one decode step + 5 ms = {:.2}; longest gap {:.2}",
        step + 5.0,
        during.at(1.0)
    );
}

#[test]
#[ignore = "measures"]
fn measured_tiny_publishes_under_load() {
    let dir = tempfile::tempdir().unwrap();
    let engine = tiny(1);
    let weights = [1, 2].map(|n| trained(&engine, dir.path(), n));
    publishes(&engine, &weights, (1000, Duration::from_millis(4), 50));
}

#[test]
#[ignore = "needs the starter model and a quiet machine"]
fn measured_publishes_under_load() {
    let dir = tempfile::tempdir().unwrap();
    let engine = open(&starter());
    let weights = [1, 2].map(|n| moved(&engine, dir.path(), n));
    publishes(&engine, &weights, (100, Duration::ZERO, 96));
}

#[test]
#[ignore = "needs the starter model and a quiet machine"]
fn measured_adapter_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let files = starter();
    let engine = open(&files);
    let Weights::Folder(folder) = moved(&engine, dir.path(), 1);
    let model = Model::open(&files).unwrap();
    let (mut read, mut hash, mut load) = (Times::default(), Times::default(), Times::default());
    for n in 1..21 {
        let started = Instant::now();
        let adapter = Adapter::read(engine.kernels(), model.config(), &folder).unwrap();
        read.add(started.elapsed());
        let started = Instant::now();
        adapter.hash(engine.kernels()).unwrap();
        hash.add(started.elapsed());
        let started = Instant::now();
        block_on(engine.load(of("p", n), Weights::Folder(folder.clone()))).unwrap();
        load.add(started.elapsed());
        engine.unload(&of("p", n));
    }
    let size = std::fs::metadata(folder.join("adapter_model.safetensors"))
        .unwrap()
        .len();
    println!("an adapter of {:.1} MB", size as f64 / 1e6);
    read.print("  read");
    hash.print("  hash");
    load.print("  load");
}

/// Folders with the same adapter under other names.
fn copies(from: &Weights, to: &Path, n: usize) -> Vec<PathBuf> {
    let Weights::Folder(from) = from;
    let copy = |i: usize| {
        let dir = to.join(format!("copy {i}"));
        std::fs::create_dir(&dir).unwrap();
        for file in ["adapter_config.json", "adapter_model.safetensors"] {
            std::fs::hard_link(from.join(file), dir.join(file)).unwrap();
        }
        dir
    };
    (0..n).map(copy).collect()
}

fn serve(engine: &LocalEngine, folders: &[PathBuf]) -> Vec<PolicyVersion> {
    let mut all = Vec::new();
    for (i, dir) in folders.iter().enumerate() {
        let version = of(&format!("p{i}"), 1);
        engine.register(version.clone(), Weights::Folder(dir.clone()), None);
        engine.serve(&version).unwrap();
        all.push(version);
    }
    all
}

fn ask(engine: &LocalEngine, version: &PolicyVersion, salt: usize, most: usize) -> Sampling {
    let text: Vec<u32> = (0..24)
        .map(|i| 100 + ((i * 37 + salt * 101) % 4000) as u32)
        .collect();
    let params = SamplingParams {
        max_tokens: most,
        seed: salt as u64,
        ..SamplingParams::default()
    };
    begin(
        engine,
        PolicyRef::Served(version.profile.clone()),
        &text,
        params,
    )
    .unwrap()
}

/// Tokens a second of 16 replies at once, reply `i` by `pick(i)`; reading the prompts is left out as a difference of two runs.
fn rate(engine: &LocalEngine, salt: usize, pick: &dyn Fn(usize) -> PolicyVersion) -> f64 {
    let run = |most: usize, salt: usize| {
        let started = Instant::now();
        let streams: Vec<_> = (0..16)
            .map(|i| ask(engine, &pick(i), salt + i, most))
            .collect();
        let tokens: usize = streams
            .into_iter()
            .map(|s| crate::common::collect(s).len())
            .sum();
        (started.elapsed().as_secs_f64(), tokens as f64)
    };
    run(2, salt); // adapters come into memory
    let (short, few) = run(8, salt + 100);
    let (long, many) = run(40, salt + 200);
    (many - few) / (long - short)
}

fn first_token(engine: &LocalEngine, version: &PolicyVersion, salt: usize) -> Duration {
    let started = Instant::now();
    let tokens = block_on_stream(ask(engine, version, salt, 1)).count();
    assert_eq!(tokens, 3);
    started.elapsed()
}

#[test]
#[ignore = "needs the starter model and a quiet machine"]
fn measured_many_profiles() {
    let dir = tempfile::tempdir().unwrap();
    let files = starter();
    let maker = open(&files);
    let one = moved(&maker, dir.path(), 1);
    let folders = copies(&one, dir.path(), 256);
    block_on(maker.load(of("p", 1), one)).unwrap();
    let bytes = maker.adapters().0;
    drop(maker);
    let options = EngineOptions {
        threads: 2,
        adapter_bytes: 32 * bytes,
        ..EngineOptions::default()
    };
    let engine = LocalEngine::open(&Model::open(&files).unwrap(), options).unwrap();
    println!(
        "resident set with the base model alone: {:.0} MiB",
        resident_mib()
    );
    let all = serve(&engine, &folders);
    let base = of("nobody", 0);
    for round in 0..2 {
        let salt = round * 10_000;
        let none = rate(&engine, salt, &|_| base.clone());
        let same = rate(&engine, salt + 1000, &|_| all[0].clone());
        println!("resident set with 1 profile: {:.0} MiB", resident_mib());
        let each = rate(&engine, salt + 2000, &|i| all[i].clone());
        println!("resident set with 16 profiles: {:.0} MiB", resident_mib());
        println!(
            "16 replies at once, tokens/s: base {none:.0}, all of one profile {same:.0}, each of another {each:.0}"
        );
    }
    let (mut idle, mut warm) = (Times::default(), Times::default());
    for (i, version) in all.iter().take(64).enumerate() {
        idle.add(first_token(&engine, version, 50_000 + i));
        warm.add(first_token(&engine, version, 60_000 + i));
    }
    idle.print("first token, profile idle");
    warm.print("first token, profile in memory");
    let (held, count) = engine.adapters();
    println!(
        "256 profiles, {count} adapters ({:.0} MiB) in memory, resident set {:.0} MiB",
        held as f64 / f64::from(1 << 20),
        resident_mib()
    );
    let mut tokens = 0;
    let started = Instant::now();
    for group in all.chunks(16) {
        let streams: Vec<_> = group
            .iter()
            .enumerate()
            .map(|(i, v)| ask(&engine, v, 70_000 + i, 8))
            .collect();
        tokens += streams
            .into_iter()
            .map(|s| crate::common::collect(s).len())
            .sum::<usize>();
    }
    println!(
        "rotating through 256 profiles, 16 at once, 8 tokens each: {:.0} tokens/s with reading",
        tokens as f64 / started.elapsed().as_secs_f64()
    );
}

#[test]
#[ignore = "needs the starter model and a quiet machine"]
fn measured_a_thousand_profiles() {
    let dir = tempfile::tempdir().unwrap();
    let engine = open(&starter());
    let one = moved(&engine, dir.path(), 1);
    let folders = copies(&one, dir.path(), 1000);
    let before = resident_mib();
    let started = Instant::now();
    let all = serve(&engine, &folders);
    let took = started.elapsed();
    println!(
        "1000 profiles registered and served in {:.2} ms; resident set {before:.1} -> {:.1} MiB",
        took.as_secs_f64() * 1e3,
        resident_mib()
    );
    let (mut idle, mut warm, mut base) = (Times::default(), Times::default(), Times::default());
    first_token(&engine, &of("nobody", 0), 0); // buffers are made
    for (i, version) in all.iter().rev().take(12).enumerate() {
        idle.add(first_token(&engine, version, 100 + i));
        warm.add(first_token(&engine, version, 200 + i));
        base.add(first_token(&engine, &of("nobody", 0), 300 + i));
    }
    idle.print("first token of 24, profile idle");
    warm.print("first token of 24, profile in memory");
    base.print("first token of 24, base model");
}
