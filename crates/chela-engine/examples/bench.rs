//! The engine's figures alone: `cargo run --release -p chela-engine --example bench -- MODEL`.
#![allow(clippy::print_stdout, clippy::unwrap_used)]

use chela_engine::{EngineOptions, LocalEngine, bench::bench};
use chela_model::{Model, ModelSource, NoProgress, resolve};

fn main() {
    let name = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "starter".to_owned());
    let cache = directories::ProjectDirs::from("", "", "chela").unwrap();
    let source = ModelSource::parse(&name).unwrap();
    let files = resolve(&source, cache.cache_dir(), &mut NoProgress).unwrap();
    let model = Model::open(&files).unwrap();
    let engine = LocalEngine::open(&model, EngineOptions::default()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    println!("{:#?}", bench(&engine, dir.path()).unwrap());
}
