//! Receipts: what the engine holds is compared with what the learner trained, and every fault shows.

use crate::{
    common::{begin, greedy, of, prompt, rewarded, sample, score, tiny, trained, version},
    faulty::{Fault, FaultyEngine},
};
use chela_core::{
    AdapterSpec, Checkpoint, Learner, PolicyEngine, PolicyRef, PolicyVersion, Prompt,
    SamplingEvent, Want, Weights,
};
use chela_engine::{LocalEngine, LocalLearner};
use chela_kernels::Cpu;
use futures_executor::{block_on, block_on_stream};

/// The largest difference of canary log-probs that counts as equal.
const BOUND: f32 = 1e-2;

fn canary() -> Vec<u32> {
    prompt(42, 48)
}

/// Whether the hashes agree, and how far the canary's log-probs are apart.
fn receipt(
    engine: &dyn PolicyEngine,
    learner: &mut LocalLearner<Cpu>,
    (version, weights): (PolicyVersion, Weights),
) -> (bool, f32) {
    let hash = block_on(engine.load(version.clone(), weights)).unwrap();
    let tokens = canary();
    let policy = PolicyRef::Version(version);
    let ours = block_on(engine.score(policy, Prompt { tokens }, 1, Want::default())).unwrap();
    let tokens = canary();
    let text = rewarded(&tokens, &vec![0.0; tokens.len() - 1]);
    let theirs = learner.forward(&[text], Want::default()).unwrap();
    let pairs = ours.logprobs.iter().zip(&theirs[0].logprobs);
    let gap = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    (hash == learner.weights_hash().unwrap(), gap)
}

fn reopened(engine: &LocalEngine, weights: &Weights) -> LocalLearner<Cpu> {
    let Weights::Folder(dir) = weights.clone();
    let checkpoint = Checkpoint { dir, step: 3 };
    engine
        .learner(&AdapterSpec::default(), Some(&checkpoint))
        .unwrap()
}

#[test]
fn every_fault_between_a_checkpoint_and_a_served_version_shows_in_its_receipt() {
    let dir = tempfile::tempdir().unwrap();
    let engine = tiny(1);
    let weights: Vec<_> = (1..4).map(|n| trained(&engine, dir.path(), n)).collect();
    let Weights::Folder(others) = weights[2].clone();
    let faults = [
        (Fault::None, [true, true]),
        (Fault::Dropped, [true, false]),
        (Fault::ScaledTwice, [false, false]),
        (Fault::AnothersFolder(others), [false, false]),
        (Fault::Stale, [true, false]),
    ];
    for (fault, agree) in faults {
        let faulty = FaultyEngine::new(engine.clone(), fault.clone(), dir.path());
        // A version before it, which a stale engine would show.
        block_on(faulty.load(of("a", 1), weights[0].clone())).unwrap();
        let mut learner = reopened(&engine, &weights[1]);
        let (hash, gap) = receipt(&faulty, &mut learner, (of("a", 2), weights[1].clone()));
        println!("{fault:?}: hashes agree: {hash}, canary gap {gap:.2e}");
        assert_eq!([hash, gap <= BOUND], agree, "{fault:?}: {gap}");
    }
}

#[test]
fn other_weights_under_a_number_that_was_used_never_meet_what_was_kept_of_the_first() {
    let dir = tempfile::tempdir().unwrap();
    let engine = tiny(2);
    let (first, second) = (
        trained(&engine, dir.path(), 1),
        trained(&engine, dir.path(), 2),
    );
    let text = prompt(5, 300);
    let policy = || PolicyRef::Version(version(1));
    let cold = tiny(2);
    block_on(cold.load(version(1), second.clone())).unwrap();
    let wanted = score(&cold, policy(), &text, 1).unwrap();
    let reply = sample(&cold, policy(), &text, greedy(12));
    for lazily in [false, true] {
        let bring = |weights: &Weights| {
            if lazily {
                engine.register(version(1), weights.clone(), None);
            } else {
                block_on(engine.load(version(1), weights.clone())).unwrap();
            }
        };
        for unload in [true, false] {
            bring(&first);
            sample(&engine, policy(), &text, greedy(12));
            sample(&engine, policy(), &text, greedy(12));
            assert_ne!(score(&engine, policy(), &text, 1).unwrap(), wanted);
            if unload {
                engine.unload(&version(1));
            }
            bring(&second);
            let mut events = block_on_stream(begin(&engine, policy(), &text, greedy(12)).unwrap());
            let Some(Ok(SamplingEvent::Started { cached_tokens, .. })) = events.next() else {
                panic!("no start")
            };
            assert_eq!(cached_tokens, 0);
            let tokens: Vec<_> = events
                .filter_map(|e| match e.unwrap() {
                    SamplingEvent::Token(t) => Some(t),
                    _ => None,
                })
                .collect();
            assert_eq!(tokens, reply);
            assert_eq!(score(&engine, policy(), &text, 1).unwrap(), wanted);
        }
    }
}
