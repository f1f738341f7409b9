//! Serving: seeds, caches, versions, limits, cancellation.

use crate::common::{collect, greedy, ids, sample, score, tiny, version};
use chela_core::{
    AdapterSpec, EngineError, FinishReason, Learner, OptimParams, PolicyEngine, PolicyRef, Prompt,
    Sampling, SamplingEvent, SamplingParams, TokenLoss, Weights,
};
use chela_engine::LocalEngine;
use futures_executor::{block_on, block_on_stream};
use std::path::Path;

fn seeded(seed: u64, most: usize) -> SamplingParams {
    SamplingParams {
        seed,
        max_tokens: most,
        temperature: 0.8,
        ..SamplingParams::default()
    }
}

fn start(engine: &LocalEngine, tokens: &[u32], params: SamplingParams) -> Sampling {
    engine
        .sample(
            PolicyRef::Base,
            Prompt {
                tokens: tokens.to_vec(),
            },
            params,
        )
        .unwrap()
}

/// An adapter that is far from the base, saved below `dir`.
fn moved(engine: &LocalEngine, dir: &Path, name: &str) -> Weights {
    let mut learner = engine.learner(&AdapterSpec::default(), None).unwrap();
    let one = crate::common::rewarded(&[5, 6, 7, 8, 9, 10], &[1.0; 3]);
    for _ in 0..4 {
        learner
            .forward_backward(std::slice::from_ref(&one), &mut |_, s, _| TokenLoss {
                d_logprobs: vec![-1.0; s.len()],
                ..TokenLoss::default()
            })
            .unwrap();
        learner
            .optim_step(&OptimParams {
                lr: 1e-2,
                ..OptimParams::default()
            })
            .unwrap();
    }
    Weights::Folder(learner.save(&dir.join(name)).unwrap().dir)
}

#[test]
fn a_seed_gives_the_same_reply_whatever_else_runs() {
    let engine = tiny(1);
    let prompt: Vec<u32> = (10..40).collect();
    let alone = sample(&engine, PolicyRef::Base, &prompt, seeded(7, 40));
    drop(engine);
    let engine = tiny(1);
    let others: Vec<Sampling> = (0..5)
        .map(|i| {
            start(
                &engine,
                &(50 + i..75 + 2 * i).collect::<Vec<u32>>(),
                seeded(u64::from(i), 60),
            )
        })
        .collect();
    let among = start(&engine, &prompt, seeded(7, 40));
    assert_eq!(collect(among), alone);
    others
        .into_iter()
        .for_each(|o| assert!(!collect(o).is_empty()));
    assert_ne!(
        ids(&sample(&engine, PolicyRef::Base, &prompt, seeded(8, 40))),
        ids(&alone)
    );
}

#[test]
fn sampled_log_probs_are_those_that_score_gives() {
    let engine = tiny(2);
    let prompt: Vec<u32> = (10..30).collect();
    let reply = sample(&engine, PolicyRef::Base, &prompt, seeded(1, 30));
    let mut all = prompt.clone();
    all.extend(ids(&reply));
    let scored = score(&engine, PolicyRef::Base, &all, prompt.len()).unwrap();
    for (token, score) in reply.iter().zip(&scored.logprobs) {
        assert!((token.logprob_t1 - score).abs() < 1e-4, "{token:?} {score}");
        assert!(token.behavior_logprob <= 0.0 && token.kept_mass > 0.999);
    }
}

#[test]
fn a_next_turn_reads_only_its_new_tokens_and_says_the_same() {
    let engine = tiny(3);
    let mut text: Vec<u32> = (10..60).collect();
    text.extend(ids(&sample(&engine, PolicyRef::Base, &text, greedy(20))));
    text.extend(100..120);
    let mut events = block_on_stream(start(&engine, &text, greedy(10)));
    let Some(Ok(SamplingEvent::Started { cached_tokens, .. })) = events.next() else {
        panic!("no start")
    };
    assert!(cached_tokens >= 68, "{cached_tokens}");
    let warm: Vec<u32> = events
        .filter_map(|e| match e.unwrap() {
            SamplingEvent::Token(t) => Some(t.id),
            _ => None,
        })
        .collect();
    let cold = tiny(3);
    assert_eq!(
        warm,
        ids(&sample(&cold, PolicyRef::Base, &text, greedy(10)))
    );
}

#[test]
fn a_version_never_meets_the_cache_of_another() {
    let engine = tiny(4);
    let dir = tempfile::tempdir().unwrap();
    let prompt: Vec<u32> = (10..74).collect();
    sample(&engine, PolicyRef::Base, &prompt, greedy(8));
    let weights = moved(&engine, dir.path(), "a");
    block_on(engine.load(version(1), weights.clone())).unwrap();
    engine.serve(&version(1)).unwrap();
    let policy = PolicyRef::Served(version(1).profile);
    let stream = engine
        .sample(
            policy.clone(),
            Prompt {
                tokens: prompt.clone(),
            },
            greedy(8),
        )
        .unwrap();
    let mut events = block_on_stream(stream);
    let first = events.next().unwrap().unwrap();
    assert_eq!(
        first,
        SamplingEvent::Started {
            version: version(1),
            cached_tokens: 0
        }
    );
    let warm = score(&engine, policy, &prompt, 1).unwrap();
    let cold = tiny(4);
    block_on(cold.load(version(1), weights)).unwrap();
    let cold_scores = score(&cold, PolicyRef::Version(version(1)), &prompt, 1).unwrap();
    assert_eq!(warm.logprobs, cold_scores.logprobs);
    assert_ne!(
        warm.logprobs,
        score(&cold, PolicyRef::Base, &prompt, 1).unwrap().logprobs
    );
}

#[test]
fn a_publish_during_a_reply_changes_nothing_in_it() {
    let engine = tiny(5);
    let dir = tempfile::tempdir().unwrap();
    let prompt: Vec<u32> = (10..40).collect();
    let quiet = sample(&engine, PolicyRef::Base, &prompt, seeded(3, 200));
    let weights = moved(&engine, dir.path(), "a");
    let policy = PolicyRef::Served(version(0).profile);
    let stream = engine.sample(
        policy.clone(),
        Prompt {
            tokens: prompt.clone(),
        },
        seeded(3, 200),
    );
    let mut events = block_on_stream(stream.unwrap());
    let mut got = Vec::new();
    for n in 1..=20 {
        block_on(engine.load(version(n), weights.clone())).unwrap();
        engine.serve(&version(n)).unwrap();
        if n > 1 {
            engine.unload(&version(n - 1));
        }
        got.extend(events.next());
    }
    got.extend(events);
    let tokens: Vec<_> = got
        .into_iter()
        .filter_map(|e| match e.unwrap() {
            SamplingEvent::Token(t) => Some(t),
            SamplingEvent::Started { version: v, .. } => {
                assert_eq!(v.number, 0);
                None
            }
            SamplingEvent::Finished(_) => None,
        })
        .collect();
    assert_eq!(ids(&tokens), ids(&quiet));
    let after = engine
        .sample(policy, Prompt { tokens: prompt }, greedy(1))
        .unwrap();
    let first = block_on_stream(after).next().unwrap().unwrap();
    assert!(matches!(first, SamplingEvent::Started { version: v, .. } if v.number == 20));
}

#[test]
fn limits_and_ends_are_told_apart() {
    let engine = tiny(6);
    let context = engine.info().context_length;
    let long: Vec<u32> = (0..context as u32).map(|i| i % 200).collect();
    let refused = engine.sample(
        PolicyRef::Base,
        Prompt {
            tokens: long.clone(),
        },
        greedy(1),
    );
    assert_eq!(
        refused.err(),
        Some(EngineError::ContextLength {
            prompt: context,
            context
        })
    );
    let last = |tokens: &[u32], params| block_on_stream(start(&engine, tokens, params)).last();
    let full = last(&long[..context - 3], greedy(100)).unwrap().unwrap();
    assert_eq!(full, SamplingEvent::Finished(FinishReason::Length));
    let first = sample(&engine, PolicyRef::Base, &long[..30], greedy(3));
    let end = SamplingParams {
        end_ids: vec![first[2].id],
        ..greedy(50)
    };
    let reply = block_on_stream(start(&engine, &long[..30], end))
        .map(Result::unwrap)
        .collect::<Vec<_>>();
    assert_eq!(
        reply.last(),
        Some(&SamplingEvent::Finished(FinishReason::End))
    );
    assert!(reply.len() <= 5);
    let bad = engine.sample(
        PolicyRef::Base,
        Prompt {
            tokens: vec![u32::MAX],
        },
        greedy(1),
    );
    assert!(matches!(bad.err(), Some(EngineError::Token(..))));
    let gone = PolicyRef::Version(version(9));
    let bad = engine.sample(gone, Prompt { tokens: vec![1] }, greedy(1));
    assert_eq!(bad.err(), Some(EngineError::NotLoaded(version(9))));
    assert!(engine.serve(&version(9)).is_err());
}

#[test]
fn a_dropped_stream_stops_its_request() {
    let engine = tiny(7);
    for i in 0..32 {
        drop(start(&engine, &[10, 11, 12 + i], seeded(1, 400)));
    }
    // All lanes are free again, or this would wait behind 32 long replies.
    assert_eq!(
        sample(&engine, PolicyRef::Base, &[9, 8, 7], greedy(3)).len(),
        3
    );
    engine.health().unwrap();
}

#[test]
fn adapters_of_another_shape_or_with_holes_are_refused() {
    let engine = tiny(8);
    let dir = tempfile::tempdir().unwrap();
    let Weights::Folder(good) = moved(&engine, dir.path(), "good");
    let load = |d: &Path| block_on(engine.load(version(1), Weights::Folder(d.to_path_buf())));
    let config = std::fs::read_to_string(good.join("adapter_config.json")).unwrap();
    let tensors = std::fs::read(good.join("adapter_model.safetensors")).unwrap();
    let spoil = |name: &str, config: &str, tensors: &[u8]| {
        let to = dir.path().join(name);
        std::fs::create_dir(&to).unwrap();
        std::fs::write(to.join("adapter_config.json"), config).unwrap();
        std::fs::write(to.join("adapter_model.safetensors"), tensors).unwrap();
        let error = load(&to).unwrap_err().to_string();
        assert!(!error.contains('\n'), "{error}");
        error
    };
    assert!(spoil("rank", &config.replace("\"r\": 16", "\"r\": 8"), &tensors).contains("shape"));
    assert!(spoil("module", &config.replace("q_proj", "x_proj"), &tensors).contains("x_proj"));
    spoil("cut", &config, &tensors[..tensors.len() - 5]);
    let mut nan = tensors.clone();
    let n = nan.len();
    nan[n - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    assert!(spoil("nan", &config, &nan).contains("finite"));
    assert!(load(&dir.path().join("nothing")).is_err());
    assert!(engine.serve(&version(1)).is_err(), "nothing was loaded");
    let hash = load(&good).unwrap();
    assert_eq!(hash.len(), 64);
    assert_eq!(hash, load(&good).unwrap());
}
