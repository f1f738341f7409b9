//! What the tests share.

use chela_core::{
    EngineError, PolicyEngine, PolicyRef, PolicyVersion, Profile, Prompt, Sample, SampleColumns,
    SampledToken, SamplingEvent, SamplingParams, Scored, Want,
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
