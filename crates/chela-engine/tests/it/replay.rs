//! The same steps from the same checkpoint give the same bytes, whatever runs beside them; and their hash is that of what is served.

use crate::{
    common::{begin, greedy, options, prompt, rewarded, tiny, tiny_with, version},
    starter::starter,
};
use chela_core::{
    AdapterSpec, Checkpoint, Learner, Learners, OptimParams, PolicyEngine, PolicyRef, Sample,
    Scored, TokenLoss, Weights,
};
use chela_engine::{EngineOptions, LocalEngine, LocalLearner};
use chela_kernels::Cpu;
use chela_model::Model;
use futures_executor::{block_on, block_on_stream};
use std::path::Path;

/// `n` samples of lengths that are no multiple of anything.
pub fn batch(n: usize, tokens: &[u32]) -> Vec<Sample> {
    (0..n)
        .map(|i| {
            let n = tokens[i % tokens.len()];
            let advantages: Vec<f32> = (0..n / 2).map(|t| (t as f32 * 0.37).sin()).collect();
            rewarded(&prompt(11 + i as u32, n), &advantages)
        })
        .collect()
}

fn step(learner: &mut LocalLearner<Cpu>, batch: &[Sample]) {
    let mut loss = |_: usize, s: &Sample, scored: &Scored| {
        let n = s.len() as f32;
        let each = s.advantages().iter().zip(&scored.logprobs);
        TokenLoss {
            d_logprobs: each.map(|(a, l)| -a * l.exp().max(0.1) / n).collect(),
            d_entropy: None,
            ..TokenLoss::default()
        }
    };
    learner.forward_backward(batch, &mut loss).unwrap();
    let params = OptimParams {
        lr: 1e-2,
        ..OptimParams::default()
    };
    assert!(!learner.optim_step(&params).unwrap().skipped);
}

pub type Files = [Vec<u8>; 3];

pub fn files(checkpoint: &Checkpoint) -> Files {
    [
        "adapter_model.safetensors",
        "optimizer.safetensors",
        "adapter_config.json",
    ]
    .map(|f| std::fs::read(checkpoint.dir.join(f)).unwrap())
}

/// Two steps from a checkpoint or from the start, saved as `name`.
pub fn two_steps(
    engine: &LocalEngine,
    from: Option<&Checkpoint>,
    (dir, name): (&Path, &str),
    batch: &[Sample],
) -> (Checkpoint, Files) {
    let mut learner = engine.learner(&AdapterSpec::default(), from).unwrap();
    step(&mut learner, batch);
    step(&mut learner, batch);
    let saved = learner.save(&dir.join(name)).unwrap();
    let bytes = files(&saved);
    (saved, bytes)
}

/// Runs `work` beside replies of `most` tokens.
pub fn beside<T>(engine: &LocalEngine, most: usize, work: impl FnOnce() -> T) -> T {
    let streams: Vec<_> = (0..3)
        .map(|i| begin(engine, PolicyRef::Base, &prompt(90 + i, 40), greedy(most)).unwrap())
        .collect();
    let mut streams: Vec<_> = streams.into_iter().map(block_on_stream).collect();
    streams.iter_mut().for_each(|s| assert!(s.next().is_some()));
    let done = work();
    drop(streams);
    done
}

fn with(threads: usize) -> EngineOptions {
    EngineOptions {
        threads,
        model_name: "tiny".to_owned(), // else the folder's, which is another one for each engine
        ..options()
    }
}

#[test]
fn steps_are_the_same_to_the_bit_with_any_threads_fresh_and_resumed_alone_and_beside_replies() {
    let dir = tempfile::tempdir().unwrap();
    let batch = batch(7, &[301, 97, 40, 257]); // more rows than run together
    let reference = tiny_with(1, with(1));
    let (first, fresh) = two_steps(&reference, None, (dir.path(), "fresh"), &batch);
    let (_, resumed) = two_steps(&reference, Some(&first), (dir.path(), "resumed"), &batch);
    assert_ne!(fresh, resumed);
    for threads in 1..=3 {
        let engine = tiny_with(1, with(threads));
        for replies in [false, true] {
            let steps = |from: Option<&Checkpoint>, name: String| {
                let run = || two_steps(&engine, from, (dir.path(), &name), &batch).1;
                if replies {
                    beside(&engine, 400, run)
                } else {
                    run()
                }
            };
            let what = format!("{threads} threads, replies beside: {replies}");
            assert!(steps(None, format!("{what} fresh")) == fresh, "{what}");
            let again = steps(Some(&first), format!("{what} resumed"));
            assert!(again == resumed, "{what}");
        }
        assert_eq!(engine.kernel_path(), reference.kernel_path());
    }
    let frugal = EngineOptions {
        recompute: true,
        ..with(2)
    };
    let again = two_steps(&tiny_with(1, frugal), None, (dir.path(), "frugal"), &batch).1;
    assert!(again == fresh, "layers that are run again give other bits");
}

#[test]
fn the_path_names_what_decides_the_bits() {
    let engine = tiny(1);
    let path = engine.kernel_path();
    assert!(
        path.contains("768 rows") && path.contains(std::env::consts::ARCH),
        "{path}"
    );
    let fewer = EngineOptions {
        train_rows: 64,
        ..options()
    };
    assert_ne!(tiny_with(1, fewer).kernel_path(), path);
}

#[test]
fn a_learners_hash_is_that_of_what_is_loaded_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let engine = tiny(2);
    let load = |dir: &Path| {
        let weights = Weights::Folder(dir.to_path_buf());
        block_on(engine.load(version(1), weights)).unwrap()
    };
    for (rank, alpha) in [(1, 0.1f32), (3, 2.7), (5, 16.0), (16, 32.0), (7, 1e-3)] {
        let spec = AdapterSpec {
            rank,
            alpha,
            ..AdapterSpec::default()
        };
        let at = |what: &str| dir.path().join(format!("{rank} {what}"));
        let mut learner = engine.learner(&spec, None).unwrap();
        let empty = learner.weights_hash().unwrap();
        assert_eq!(empty, load(&learner.save(&at("empty")).unwrap().dir));
        step(&mut learner, &batch(7, &[30]));
        let hash = learner.weights_hash().unwrap();
        assert_ne!(hash, empty);
        let saved = learner.save(&at("trained")).unwrap();
        assert_eq!(hash, load(&saved.dir));
        // Scaled by alpha / √r, as other trainers save it: folded into alpha when read, and again when saved.
        let config = saved.dir.join("adapter_config.json");
        let text = std::fs::read_to_string(&config).unwrap();
        let rooted = text.replace("\"use_rslora\": false", "\"use_rslora\": true");
        assert_ne!(text, rooted);
        std::fs::write(&config, rooted).unwrap();
        let learner = engine.learner(&spec, Some(&saved)).unwrap();
        let folded = learner.weights_hash().unwrap();
        assert_eq!(folded, load(&saved.dir));
        assert_eq!(folded == hash, rank == 1);
        let again = learner.save(&at("folded")).unwrap();
        assert_eq!(folded, load(&again.dir));
    }
    let learners: &dyn Learners = &*engine;
    let profile = version(1).profile;
    let boxed = learners
        .open(&profile, &AdapterSpec::default(), None)
        .unwrap();
    assert_eq!(boxed.weights_hash().unwrap().len(), 64);
}

/// The same for real sizes and quantised weights.
#[test]
#[ignore = "needs the starter model"]
fn starter_steps_are_the_same_to_the_bit() {
    let dir = tempfile::tempdir().unwrap();
    let model = Model::open(&starter()).unwrap();
    let batch = batch(3, &[157, 40, 33]);
    let mut reference = None;
    for threads in [1, 2, 3] {
        let engine = LocalEngine::open(&model, with(threads)).unwrap();
        for replies in [false, true] {
            let what = format!("{threads} threads, replies beside: {replies}");
            let run = || two_steps(&engine, None, (dir.path(), &what), &batch).1;
            let bytes = if replies {
                beside(&engine, 40, run)
            } else {
                run()
            };
            println!("{what}: done; {}", engine.kernel_path());
            assert!(
                *reference.get_or_insert_with(|| bytes.clone()) == bytes,
                "{what}"
            );
        }
    }
}
