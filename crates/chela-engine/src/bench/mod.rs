//! `chela bench`: what this machine and model do, beside what the machine could.

mod case;
mod run;

pub use case::{Case, MOST_LANES, Text, Work};
pub use run::{Measured, Runner};

use crate::{engine::LocalEngine, error::kernel};
use chela_core::{
    AdapterSpec, EngineError, Learner, PolicyEngine, PolicyRef, PolicyVersion, Profile, Prompt,
    Sample, SampleColumns, SampledToken, SamplingEvent, SamplingParams, Want, Weights,
};
use chela_kernels::{measured_memory_gbs, measured_sgemm_gflops};
use futures_core::Stream;
use std::{
    path::Path,
    pin::Pin,
    task::{Context, Poll, Wake, Waker},
    time::Instant,
};

/// The figures.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BenchReport {
    /// Matrix rate of all threads, GFLOP/s.
    pub sgemm_gflops: f64,
    /// Memory rate of all threads, GB/s.
    pub memory_gbs: f64,
    /// Prompt tokens read a second (512-token prompt).
    pub prefill: f64,
    /// Tokens a second, one reply.
    pub decode_1: f64,
    /// Tokens a second, eight replies together.
    pub decode_8: f64,
    /// Tokens a second through forward, backward and optimizer.
    pub train: f64,
    /// The training rate's share of `sgemm_gflops`, counting 4 FLOPs a parameter and token for the frozen maps, 6 for the
    /// adapter, 4 for the head on scored rows.
    pub train_share_of_sgemm: f64,
    /// Mean |behavior log-prob − learner's log-prob| of a sampled reply under the same weights.
    pub behavior_gap: f64,
    /// Seconds from a saved checkpoint to being served.
    pub publish_seconds: f64,
    /// Peak resident memory, MiB; 0 where the system does not tell.
    pub peak_mib: f64,
}

struct Park(std::thread::Thread);

impl Wake for Park {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.unpark();
    }
}

/// Takes a stream's events to its end, each token to `see`; the number of tokens.
fn drain(
    mut stream: Pin<Box<dyn Stream<Item = Result<SamplingEvent, EngineError>> + Send>>,
    see: &mut dyn FnMut(SampledToken),
) -> Result<usize, EngineError> {
    let waker = Waker::from(std::sync::Arc::new(Park(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut tokens = 0;
    loop {
        match stream.as_mut().poll_next(&mut context) {
            Poll::Pending => std::thread::park(),
            Poll::Ready(None) => return Ok(tokens),
            Poll::Ready(Some(event)) => {
                if let SamplingEvent::Token(token) = event? {
                    tokens += 1;
                    see(token);
                }
            }
        }
    }
}

fn wait<T>(future: impl Future<Output = T>) -> T {
    let waker = Waker::from(std::sync::Arc::new(Park(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = std::pin::pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// A text without meaning: rates do not depend on it. Every call differs, so that no cache answers.
fn text(n: usize, salt: usize, vocabulary: usize) -> Vec<u32> {
    (0..n)
        .map(|i| ((i * 7919 + salt * 104_729 + 17) % (vocabulary - 1)) as u32)
        .collect()
}

fn decode(engine: &LocalEngine, lanes: usize, tokens: usize) -> Result<f64, EngineError> {
    let vocabulary = engine.info().vocabulary;
    let run = |most: usize, salt: usize| -> Result<(f64, usize), EngineError> {
        let started = Instant::now();
        let streams = (0..lanes)
            .map(|i| {
                let prompt = Prompt {
                    tokens: text(32, salt + i, vocabulary),
                };
                let params = SamplingParams {
                    max_tokens: most,
                    seed: i as u64,
                    ..Default::default()
                };
                engine.sample(PolicyRef::Base, prompt, params)
            })
            .collect::<Result<Vec<_>, _>>()?;
        let mut total = 0;
        for stream in streams {
            total += drain(stream, &mut |_| ())?;
        }
        Ok((started.elapsed().as_secs_f64(), total))
    };
    run(4, 900)?; // buffers are made, threads are awake
    let (short, few) = run(8, 1000)?;
    let (long, many) = run(8 + tokens, 2000)?;
    // The difference leaves out reading the prompts.
    Ok((many - few) as f64 / (long - short))
}

fn prefill(engine: &LocalEngine) -> Result<f64, EngineError> {
    let info = engine.info();
    let n = 512.min(info.context_length / 2);
    let mut best = f64::MAX;
    for salt in 0..3 {
        let prompt = Prompt {
            tokens: text(n, 5000 + salt, info.vocabulary),
        };
        let params = SamplingParams {
            max_tokens: 1,
            ..Default::default()
        };
        let started = Instant::now();
        drain(engine.sample(PolicyRef::Base, prompt, params)?, &mut |_| ())?;
        best = best.min(started.elapsed().as_secs_f64());
    }
    Ok(n as f64 / best)
}

fn train(engine: &LocalEngine, report: &mut BenchReport, dir: &Path) -> Result<(), EngineError> {
    let info = engine.info();
    let mut learner = engine.learner(&AdapterSpec::default(), None)?;
    let n = 256.min(info.context_length / 2);
    let start = n / 2;
    let texts = (0..6).map(|i| Text {
        ids: text(n, 7000 + i, info.vocabulary),
        start,
    });
    let batch = case::samples(texts)?;
    let mut best = f64::MAX;
    for _ in 0..2 {
        best = best.min(run::step(&mut learner, &batch)?.seconds);
    }
    let (rows, scored) = (batch.len() * (n - 1), batch.len() * (n - start));
    let flops = case::step_flops(engine, rows, scored);
    report.train = rows as f64 / best;
    report.train_share_of_sgemm = flops / best / (report.sgemm_gflops * 1e9);
    let checkpoint = learner.save(&dir.join("bench-adapter"))?;
    let version = PolicyVersion {
        profile: Profile::default(),
        number: u64::MAX,
    };
    let started = Instant::now();
    wait(engine.load(version.clone(), Weights::Folder(checkpoint.dir)))?;
    engine.serve(&version)?;
    report.publish_seconds = started.elapsed().as_secs_f64();
    engine.serve(&PolicyVersion::base(Profile::default()))?;
    engine.unload(&version);
    Ok(())
}

/// How far the sampler's log-probs are from the learner's: other paths through the same weights.
fn behavior_gap(engine: &LocalEngine) -> Result<f64, EngineError> {
    let prompt = text(32, 9000, engine.info().vocabulary);
    let params = SamplingParams {
        max_tokens: 64,
        ..Default::default()
    };
    let mut sampled = Vec::new();
    let stream = engine.sample(
        PolicyRef::Base,
        Prompt {
            tokens: prompt.clone(),
        },
        params,
    )?;
    drain(stream, &mut |token| {
        sampled.push((token.id, token.behavior_logprob))
    })?;
    let n = sampled.len();
    let columns = SampleColumns {
        mask: vec![true; n],
        behavior_logprobs: sampled.iter().map(|s| s.1).collect(),
        advantages: vec![0.0; n],
    };
    let start = prompt.len();
    let tokens = prompt
        .into_iter()
        .chain(sampled.iter().map(|s| s.0))
        .collect();
    let version = PolicyVersion::base(Profile::default());
    let sample = Sample::new(tokens, start, columns, 1.0, version)?;
    let mut learner = engine.learner(&AdapterSpec::default(), None)?;
    let scored = learner.forward(std::slice::from_ref(&sample), Want::default())?;
    let learned = scored.iter().flat_map(|s| &s.logprobs);
    let gaps = learned
        .zip(&sampled)
        .map(|(l, s)| f64::from((l - s.1).abs()));
    Ok(gaps.sum::<f64>() / n as f64)
}

/// Measures everything; `dir` takes a checkpoint for the publish.
pub fn bench(engine: &LocalEngine, dir: &Path) -> Result<BenchReport, EngineError> {
    let mut report = BenchReport {
        sgemm_gflops: measured_sgemm_gflops(engine.kernels()).map_err(kernel)?,
        memory_gbs: measured_memory_gbs(engine.kernels()).map_err(kernel)?,
        ..BenchReport::default()
    };
    report.prefill = prefill(engine)?;
    report.decode_1 = decode(engine, 1, 64)?;
    report.decode_8 = decode(engine, 8, 64)?;
    report.behavior_gap = behavior_gap(engine)?;
    train(engine, &mut report, dir)?;
    report.peak_mib = peak_mib();
    Ok(report)
}

/// Peak resident memory of this process, MiB; 0 where the system does not tell.
pub fn peak_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    let kib = line
        .and_then(|l| l.split_whitespace().next())
        .and_then(|n| n.parse::<f64>().ok());
    kib.map_or(0.0, |k| k / 1024.0)
}
