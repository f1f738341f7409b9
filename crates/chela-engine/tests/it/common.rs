//! What the tests share.

use chela_core::{
    AdapterSpec, EngineError, Learner, OptimParams, PolicyEngine, PolicyRef, PolicyVersion,
    Profile, Prompt, Sample, SampleColumns, SampledToken, Sampling, SamplingEvent, SamplingParams,
    Scored, TokenLoss, Want, Weights,
};
use chela_engine::{EngineOptions, LocalEngine};
use chela_model::{Model, ModelFiles, ModelSource, NoProgress, resolve, testing};
use futures_executor::{block_on, block_on_stream};
use std::{path::Path, sync::Arc};

pub fn open(files: &ModelFiles) -> Arc<LocalEngine> {
    LocalEngine::open(&Model::open(files).unwrap(), options()).unwrap()
}

pub fn options() -> EngineOptions {
    EngineOptions {
        threads: 2,
        ..EngineOptions::default()
    }
}

/// A golden checkpoint beside a tokenizer (which these weights have none of and no test here reads).
pub fn golden_model(dir: &Path) -> Model {
    let home = tempfile::tempdir().unwrap();
    testing::write_tiny_llama(home.path(), 0, &testing::TinySpec::default()).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(dir.join(name), home.path().join(name)).unwrap();
    }
    let model = Model::open(&folder(home.path())).unwrap();
    std::mem::forget(home); // tensors are read on demand; the system cleans its temporary folder
    model
}

fn folder(dir: &Path) -> ModelFiles {
    let source = ModelSource::parse(dir.to_str().unwrap()).unwrap();
    resolve(&source, dir, &mut NoProgress).unwrap()
}

/// A tiny random Llama that lives as long as the engine does not need its files any more.
pub fn tiny(seed: u64) -> Arc<LocalEngine> {
    tiny_with(seed, options())
}

pub fn tiny_with(seed: u64, options: EngineOptions) -> Arc<LocalEngine> {
    let dir = tempfile::tempdir().unwrap();
    let files = tiny_files(dir.path(), seed);
    LocalEngine::open(&Model::open(&files).unwrap(), options).unwrap()
}

pub fn tiny_files(dir: &Path, seed: u64) -> ModelFiles {
    testing::write_tiny_llama(dir, seed, &testing::TinySpec::default()).unwrap()
}

pub fn version(number: u64) -> PolicyVersion {
    PolicyVersion {
        profile: Profile::default(),
        number,
    }
}

pub fn score(
    engine: &LocalEngine,
    policy: PolicyRef,
    tokens: &[u32],
    from: usize,
) -> Result<Scored, EngineError> {
    let prompt = Prompt {
        tokens: tokens.to_vec(),
    };
    block_on(engine.score(policy, prompt, from, Want::default()))
}

pub fn sample(
    engine: &LocalEngine,
    policy: PolicyRef,
    tokens: &[u32],
    params: SamplingParams,
) -> Vec<SampledToken> {
    let prompt = Prompt {
        tokens: tokens.to_vec(),
    };
    collect(engine.sample(policy, prompt, params).unwrap())
}

pub fn collect(stream: chela_core::Sampling) -> Vec<SampledToken> {
    let mut tokens = Vec::new();
    for event in block_on_stream(stream) {
        if let SamplingEvent::Token(token) = event.unwrap() {
            tokens.push(token);
        }
    }
    tokens
}

pub fn greedy(most: usize) -> SamplingParams {
    SamplingParams {
        temperature: 0.0,
        max_tokens: most,
        ..SamplingParams::default()
    }
}

pub fn ids(tokens: &[SampledToken]) -> Vec<u32> {
    tokens.iter().map(|t| t.id).collect()
}

/// A sample whose last tokens carry these advantages.
pub fn rewarded(tokens: &[u32], advantages: &[f32]) -> Sample {
    let n = advantages.len();
    let columns = SampleColumns {
        mask: vec![true; n],
        behavior_logprobs: vec![-1.0; n],
        advantages: advantages.to_vec(),
    };
    Sample::new(tokens.to_vec(), tokens.len() - n, columns, 1.0, version(0)).unwrap()
}

/// The policy gradient's derivative: −A by token, averaged over the reply.
pub fn policy_gradient(_: usize, sample: &Sample, _: &Scored) -> TokenLoss {
    let n = sample.len() as f32;
    TokenLoss {
        d_logprobs: sample.advantages().iter().map(|a| -a / n).collect(),
        ..TokenLoss::default()
    }
}

/// A text without meaning that begins with `from`.
pub fn prompt(from: u32, n: u32) -> Vec<u32> {
    (0..n).map(|i| (from + 7 * i) % 200).collect()
}

/// An adapter trained for some steps towards one reply, saved below `dir`.
pub fn trained(engine: &LocalEngine, dir: &Path, number: u64) -> Weights {
    let spec = AdapterSpec {
        seed: number,
        ..AdapterSpec::default()
    };
    let mut learner = engine.learner(&spec, None).unwrap();
    let one = rewarded(&prompt(number as u32 * 13, 12), &[1.0; 6]);
    for _ in 0..3 {
        let mut loss = |_: usize, s: &Sample, _: &Scored| TokenLoss {
            d_logprobs: vec![-1.0; s.len()],
            ..TokenLoss::default()
        };
        learner
            .forward_backward(std::slice::from_ref(&one), &mut loss)
            .unwrap();
        learner
            .optim_step(&OptimParams {
                lr: 1e-2,
                ..OptimParams::default()
            })
            .unwrap();
    }
    Weights::Folder(learner.save(&dir.join(number.to_string())).unwrap().dir)
}

pub fn of(profile: &str, number: u64) -> PolicyVersion {
    PolicyVersion {
        profile: Profile::new(profile).unwrap(),
        number,
    }
}

pub fn begin(
    engine: &LocalEngine,
    policy: PolicyRef,
    tokens: &[u32],
    params: SamplingParams,
) -> Result<Sampling, EngineError> {
    let tokens = tokens.to_vec();
    engine.sample(policy, Prompt { tokens }, params)
}

/// Runs a reply to its end: who sampled it, and how much of its prompt came from a cache.
pub fn started(
    engine: &LocalEngine,
    policy: PolicyRef,
    tokens: &[u32],
) -> Result<(PolicyVersion, usize), EngineError> {
    let mut first = None;
    for event in block_on_stream(begin(engine, policy, tokens, greedy(4))?) {
        if let SamplingEvent::Started {
            version,
            cached_tokens,
        } = event?
        {
            first = Some((version, cached_tokens));
        }
    }
    Ok(first.unwrap())
}
