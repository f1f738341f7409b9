//! What requests may ask for (guides, penalties, truncation, candidates) and what they must not do to each other.

use crate::common::{
    collect, greedy, ids, options, prompt, rewarded, sample, score, tiny, tiny_files, tiny_with,
    trained, version,
};
use chela_core::{
    AdapterSpec, Candidates, EngineError, FinishReason, Flow, Guide, Learner, Learners,
    OptimParams, PolicyEngine, PolicyRef, PolicyVersion, Priority, Profile, Prompt, Sampling,
    SamplingEvent, SamplingParams, TokenId, TokenLoss, Want, Weights,
};
use chela_engine::{EngineOptions, LocalEngine};
use chela_model::{Model, testing};
use futures_executor::{block_on, block_on_stream};

fn warm(seed: u64, most: usize) -> SamplingParams {
    SamplingParams {
        seed,
        max_tokens: most,
        temperature: 0.7,
        ..SamplingParams::default()
    }
}

fn start(
    engine: &LocalEngine,
    policy: PolicyRef,
    tokens: &[u32],
    params: SamplingParams,
) -> Sampling {
    let prompt = Prompt {
        tokens: tokens.to_vec(),
    };
    engine.sample(policy, prompt, params).unwrap()
}

fn load(engine: &LocalEngine, number: u64, weights: &Weights) -> String {
    block_on(engine.load(version(number), weights.clone())).unwrap()
}

/// No prompt begins like another: numbers taken from a kept prefix may differ in their last bits from those of a cold run.
#[test]
fn versions_in_one_batch_do_not_touch_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let maker = tiny(1);
    let weights: Vec<Weights> = (1..4).map(|n| trained(&maker, dir.path(), n)).collect();
    let engine = || {
        let engine = tiny(1);
        weights
            .iter()
            .zip(1..)
            .for_each(|(w, n)| drop(load(&engine, n, w)));
        engine
    };
    let policy = |i: usize| match i % 4 {
        0 => PolicyRef::Base,
        n => PolicyRef::Version(version(n as u64)),
    };
    let together = engine();
    let streams: Vec<Sampling> = (0..8)
        .map(|i| {
            start(
                &together,
                policy(i),
                &prompt(3 + i as u32, 20),
                warm(i as u64, 30),
            )
        })
        .collect();
    let replies: Vec<_> = streams.into_iter().map(collect).collect();
    for (i, reply) in replies.iter().enumerate() {
        let alone = sample(
            &engine(),
            policy(i),
            &prompt(3 + i as u32, 20),
            warm(i as u64, 30),
        );
        assert_eq!(reply, &alone, "reply {i}");
    }
    assert_ne!(ids(&replies[0]), ids(&replies[1]));
}

#[test]
fn a_version_that_is_loaded_again_does_not_meet_its_old_cache() {
    let dir = tempfile::tempdir().unwrap();
    let engine = tiny(2);
    let (first, second) = (
        trained(&engine, dir.path(), 1),
        trained(&engine, dir.path(), 2),
    );
    let text = prompt(5, 60);
    let policy = || PolicyRef::Version(version(1));
    assert_ne!(load(&engine, 1, &first), load(&engine, 2, &second));
    sample(&engine, policy(), &text, greedy(8));
    load(&engine, 1, &second);
    let mut events = block_on_stream(start(&engine, policy(), &text, greedy(8)));
    let started = events.next().unwrap().unwrap();
    assert_eq!(
        started,
        SamplingEvent::Started {
            version: version(1),
            cached_tokens: 0
        }
    );
    let again = score(&engine, policy(), &text, 1).unwrap();
    let second = score(&engine, PolicyRef::Version(version(2)), &text, 1).unwrap();
    assert_eq!(again.logprobs, second.logprobs);
}

#[test]
fn a_small_memory_makes_replies_wait_but_changes_none() {
    let bytes_of = |tokens: usize| tokens * 2 * 2 * 32 * 4;
    let small = tiny_with(
        4,
        EngineOptions {
            prefix_bytes: bytes_of(200),
            ..options()
        },
    );
    let ample = tiny(4);
    let run = |engine: &LocalEngine| {
        let streams: Vec<Sampling> = (0..6)
            .map(|i| {
                start(
                    engine,
                    PolicyRef::Base,
                    &prompt(i, 70),
                    warm(u64::from(i), 150),
                )
            })
            .collect();
        let scored = engine.score(
            PolicyRef::Base,
            Prompt {
                tokens: prompt(2, 300),
            },
            1,
            Want::default(),
        );
        let replies: Vec<_> = streams.into_iter().map(collect).collect();
        (replies, block_on(scored).unwrap().logprobs)
    };
    let (a, b) = (run(&small), run(&ample));
    assert!(a.0.iter().all(|r| r.len() == 150));
    assert_eq!(a, b);
}

/// Replies and scores of texts that begin alike and grow, with memory for so many pages of 128 tokens.
#[test]
fn what_is_held_never_exceeds_the_budget_and_one_context() {
    let bytes_of = |tokens: usize| tokens * 2 * 2 * 32 * 4;
    let ample = tiny(14);
    for pages in [0, 1, 2, 4, 7] {
        let engine = tiny_with(
            14,
            EngineOptions {
                prefix_bytes: bytes_of(128 * pages + 5),
                ..options()
            },
        );
        let context = engine.info().context_length;
        let used = engine.cached();
        assert_eq!(
            (used.page, used.budget),
            (bytes_of(128), bytes_of(128 * pages))
        );
        let asks = |engine: &LocalEngine| {
            let streams: Vec<Sampling> = (0..9)
                .map(|i| {
                    let text = prompt(i % 3, 40 + 35 * (i % 5));
                    start(engine, PolicyRef::Base, &text, warm(u64::from(i), 170))
                })
                .collect();
            let text = Prompt {
                tokens: prompt(2, 300),
            };
            let scored = engine.score(PolicyRef::Base, text, 1, Want::default());
            let lengths: Vec<usize> = streams.into_iter().map(|s| collect(s).len()).collect();
            (lengths, block_on(scored).unwrap().logprobs.len())
        };
        assert_eq!(asks(&engine), asks(&ample), "all end with {pages} pages");
        let most = |u: chela_engine::PoolUse| u.budget + context.div_ceil(128) * u.page;
        let peak = engine.cached().peak;
        assert!(
            peak > 0 && peak <= most(used),
            "{pages}: {:?}",
            engine.cached()
        );
        // The last reply's end is told before its pages go back.
        let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while engine.cached().held > used.budget && std::time::Instant::now() < until {
            std::thread::yield_now();
        }
        assert!(engine.cached().held <= used.budget);
    }
}

struct Panics;

impl Guide for Panics {
    fn accept(&mut self, _: TokenId) -> Flow {
        panic!("a guide's bug")
    }
}

#[test]
fn a_panic_in_the_thread_fails_what_waits_and_is_told() {
    let engine = tiny(5);
    let long = start(&engine, PolicyRef::Base, &prompt(1, 10), warm(1, 400));
    let bad = SamplingParams {
        guide: Some(Box::new(Panics)),
        ..warm(2, 5)
    };
    let bad = start(&engine, PolicyRef::Base, &prompt(2, 10), bad);
    for stream in [bad, long] {
        let last = block_on_stream(stream).last().unwrap();
        assert!(matches!(last, Err(EngineError::Stopped(_))), "{last:?}");
    }
    assert!(engine.health().unwrap_err().contains("a guide's bug"));
    let after = engine.sample(PolicyRef::Base, Prompt { tokens: vec![1] }, greedy(1));
    assert!(matches!(after.err(), Some(EngineError::Stopped(_))));
    assert!(score(&engine, PolicyRef::Base, &[1, 2, 3], 1).is_err());
}

/// Allows only ids from `from` on, only `only` as the third token, and stops after four.
struct Fence {
    from: usize,
    only: usize,
    seen: usize,
}

impl Guide for Fence {
    fn mask(&mut self, logits: &mut [f32]) -> Option<usize> {
        let third = self.seen == 2;
        let allowed = |i: usize| {
            if third {
                i == self.only
            } else {
                i >= self.from
            }
        };
        let mut left = 0;
        for (i, logit) in logits.iter_mut().enumerate() {
            if allowed(i) {
                left += 1;
            } else {
                *logit = f32::NEG_INFINITY;
            }
        }
        Some(left)
    }

    fn accept(&mut self, _: TokenId) -> Flow {
        self.seen += 1;
        if self.seen == 4 {
            Flow::Stop
        } else {
            Flow::Continue
        }
    }
}

#[test]
fn a_guide_masks_forces_and_stops() {
    let engine = tiny(6);
    let fence = Fence {
        from: 100,
        only: 7,
        seen: 0,
    };
    let params = SamplingParams {
        guide: Some(Box::new(fence)),
        ..warm(3, 50)
    };
    let text = prompt(1, 20);
    let mut reply = Vec::new();
    let mut finish = None;
    for event in block_on_stream(start(&engine, PolicyRef::Base, &text, params)) {
        match event.unwrap() {
            SamplingEvent::Token(token) => reply.push(token),
            SamplingEvent::Finished(reason) => finish = Some(reason),
            SamplingEvent::Started { .. } => {}
        }
    }
    assert_eq!(finish, Some(FinishReason::Stopped));
    assert_eq!(
        reply.iter().map(|t| t.forced).collect::<Vec<_>>(),
        [false, false, true, false]
    );
    assert!(reply[0].id >= 100 && reply[1].id >= 100 && reply[2].id == 7 && reply[3].id >= 100);
    // Shaped logits: recorded at temperature 1 on the unshaped ones, so that a learner can compute the same.
    let mut all = text.clone();
    all.extend(ids(&reply));
    let scored = score(&engine, PolicyRef::Base, &all, text.len()).unwrap();
    for (token, plain) in reply.iter().zip(&scored.logprobs) {
        assert_eq!(token.behavior_logprob, token.logprob_t1);
        assert!((token.logprob_t1 - plain).abs() < 1e-4);
    }
}

#[test]
fn bias_penalties_and_truncation_do_what_they_say() {
    let engine = tiny(7);
    let text = prompt(9, 20);
    let run = |params| sample(&engine, PolicyRef::Base, &text, params);
    let biased = SamplingParams {
        logit_bias: vec![(33, 100.0)],
        ..warm(1, 5)
    };
    assert!(
        run(biased)
            .iter()
            .all(|t| t.id == 33 && t.behavior_logprob == t.logprob_t1)
    );
    let varied = SamplingParams {
        presence_penalty: 1e4,
        ..greedy(60)
    };
    let mut seen = ids(&run(varied));
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), 60, "every token once");
    for params in [
        SamplingParams {
            top_k: 3,
            ..warm(2, 40)
        },
        SamplingParams {
            top_p: 0.3,
            ..warm(2, 40)
        },
        SamplingParams {
            min_p: 0.5,
            ..warm(2, 40)
        },
    ] {
        let params = SamplingParams {
            top_logprobs: 3,
            ..params
        };
        let reply = run(params);
        assert!(reply.iter().any(|t| t.kept_mass < 0.9));
        for token in &reply {
            assert!(token.kept_mass > 0.0 && token.kept_mass <= 1.0 && token.top.len() == 3);
            assert!(token.top.windows(2).all(|w| w[0].1 >= w[1].1));
            assert!(token.behavior_logprob < 0.0 && token.behavior_logprob.is_finite());
        }
    }
}

#[test]
fn scores_of_candidates_agree_with_the_whole_distribution() {
    let engine = tiny(8);
    let text = prompt(4, 90);
    let vocabulary = engine.info().vocabulary as u32;
    let rows = 3;
    let every: Vec<u32> = (0..rows).flat_map(|_| 0..vocabulary).collect();
    let want = Want {
        candidates: Some(Candidates::new(every, vocabulary as usize).unwrap()),
        top_k: 4,
        temperature: 0.5,
        entropy: true,
        priority: Priority::Judge,
    };
    let prompt = Prompt {
        tokens: text.clone(),
    };
    let from = text.len() - rows;
    let scored = block_on(engine.score(PolicyRef::Base, prompt, from, want)).unwrap();
    let (top, top_logprobs) = scored.top.unwrap();
    for row in 0..rows {
        let all = &scored.logprobs[row * vocabulary as usize..][..vocabulary as usize];
        let mass: f32 = all.iter().map(|l| l.exp()).sum();
        let entropy: f32 = all.iter().map(|l| -l.exp() * l).sum();
        assert!((mass - 1.0).abs() < 1e-4, "{mass}");
        assert!((entropy - scored.entropy.as_ref().unwrap()[row]).abs() < 1e-3);
        let mut order: Vec<usize> = (0..all.len()).collect();
        order.sort_by(|a, b| all[*b].total_cmp(&all[*a]));
        for (i, id) in order[..4].iter().enumerate() {
            assert_eq!(top[row * 4 + i] as usize, *id);
            assert!((top_logprobs[row * 4 + i] - all[*id]).abs() < 1e-5);
        }
    }
    let short = Want {
        candidates: Some(Candidates::new(vec![1, 2], 1).unwrap()),
        ..Want::default()
    };
    let refused = block_on(engine.score(PolicyRef::Base, Prompt { tokens: text }, from, short));
    assert!(matches!(refused, Err(EngineError::Shape(_))));
}

#[test]
fn one_learner_of_a_profile_is_open() {
    let engine = tiny(9);
    let learners: &dyn Learners = &*engine;
    let (mine, other) = (Profile::default(), Profile::new("other").unwrap());
    let spec = AdapterSpec::default();
    let first = learners.open(&mine, &spec, None).unwrap();
    assert!(learners.open(&mine, &spec, None).is_err());
    assert!(learners.open(&other, &spec, None).is_ok());
    drop(first);
    assert!(learners.open(&mine, &spec, None).is_ok());
}

#[test]
fn training_beside_replies_ends_and_changes_none_of_them() {
    let engine = tiny(10);
    let quiet = sample(&engine, PolicyRef::Base, &prompt(1, 30), warm(5, 300));
    let streams: Vec<Sampling> = (0..4)
        .map(|_| start(&engine, PolicyRef::Base, &prompt(1, 30), warm(5, 300)))
        .collect();
    let mut learner = engine.learner(&AdapterSpec::default(), None).unwrap();
    let batch = [rewarded(&prompt(2, 80), &[1.0; 20])];
    for _ in 0..4 {
        let mut loss = |_: usize, s: &chela_core::Sample, _: &chela_core::Scored| TokenLoss {
            d_logprobs: vec![-0.1; s.len()],
            ..TokenLoss::default()
        };
        learner.forward_backward(&batch, &mut loss).unwrap();
        assert!(!learner.optim_step(&OptimParams::default()).unwrap().skipped);
    }
    for stream in streams {
        assert_eq!(ids(&collect(stream)), ids(&quiet));
    }
}

#[test]
fn a_failed_batch_leaves_no_gradient_behind() {
    // Each sample is a block of its own, so that the first is through when the second fails.
    let options = EngineOptions {
        train_rows: 30,
        ..options()
    };
    let engine = tiny_with(11, options);
    let mut learner = engine.learner(&AdapterSpec::default(), None).unwrap();
    let batch = [
        rewarded(&prompt(2, 30), &[1.0; 5]),
        rewarded(&prompt(3, 30), &[1.0; 5]),
    ];
    let mut wrong = |i: usize, s: &chela_core::Sample, _: &chela_core::Scored| TokenLoss {
        d_logprobs: vec![-1.0; s.len() + i],
        ..TokenLoss::default()
    };
    assert!(matches!(
        learner.forward_backward(&batch, &mut wrong),
        Err(EngineError::Shape(_))
    ));
    let gradients = learner.gradients().unwrap();
    assert!(
        gradients
            .iter()
            .all(|(_, _, a, b)| a.iter().chain(b).all(|g| *g == 0.0))
    );
}

#[test]
fn a_quantised_model_samples_scores_and_learns_alike() {
    let dir = tempfile::tempdir().unwrap();
    for dtype in [chela_model::DType::Q8_0, chela_model::DType::Q4_1] {
        let spec = testing::TinySpec {
            dtype,
            ..testing::TinySpec::default()
        };
        let home = dir.path().join(format!("{dtype:?}"));
        std::fs::create_dir(&home).unwrap();
        let files = testing::write_tiny_gguf(&home, 1, &spec).unwrap();
        let open = || LocalEngine::open(&Model::open(&files).unwrap(), options()).unwrap();
        let engine = open();
        let text = prompt(6, 40);
        let reply = sample(&engine, PolicyRef::Base, &text, warm(1, 60));
        let crowd = open();
        let streams: Vec<Sampling> = (0..7)
            .map(|i| {
                start(
                    &crowd,
                    PolicyRef::Base,
                    &prompt(50 + i, 30),
                    warm(u64::from(i), 60),
                )
            })
            .collect();
        assert_eq!(
            sample(&crowd, PolicyRef::Base, &text, warm(1, 60)),
            reply,
            "{dtype:?}"
        );
        drop(streams);
        let mut all = text.clone();
        all.extend(ids(&reply));
        let batch = [rewarded(&all, &vec![1.0; reply.len()])];
        let mut learner = engine.learner(&AdapterSpec::default(), None).unwrap();
        let learned = learner.forward(&batch, Want::default()).unwrap();
        let gaps = reply
            .iter()
            .zip(&learned[0].logprobs)
            .map(|(t, l)| (t.logprob_t1 - l).abs());
        let mean = gaps.sum::<f32>() / reply.len() as f32;
        assert!(
            mean < 0.03,
            "{dtype:?}: sampler and learner differ by {mean}"
        );
    }
}

#[test]
fn what_is_not_finite_stops_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let files = tiny_files(dir.path(), 12);
    let path = dir.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let n = bytes.len();
    bytes[n - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    let Err(error) = LocalEngine::open(&Model::open(&files).unwrap(), options()) else {
        panic!("opened")
    };
    let text = error.to_string();
    assert!(
        text.contains("model.safetensors") && text.contains("finite"),
        "{text}"
    );
}

#[test]
fn profiles_at_the_base_version_are_named_apart() {
    let engine = tiny(13);
    let other = Profile::new("other").unwrap();
    let policy = PolicyRef::Served(other.clone());
    let started = block_on_stream(start(&engine, policy, &[1, 2, 3], greedy(1))).next();
    let version = PolicyVersion::base(other);
    assert_eq!(
        started.unwrap().unwrap(),
        SamplingEvent::Started {
            version,
            cached_tokens: 0
        }
    );
}

/// Holds the engine's thread at its first token, until it is let go.
struct Gatekeeper(Option<std::sync::mpsc::Receiver<()>>);

impl Guide for Gatekeeper {
    fn accept(&mut self, _: TokenId) -> Flow {
        if let Some(open) = self.0.take() {
            open.recv().unwrap();
        }
        Flow::Continue
    }
}

/// Reports its profile at its first token.
struct Reports(&'static str, std::sync::mpsc::Sender<&'static str>, bool);

impl Guide for Reports {
    fn accept(&mut self, _: TokenId) -> Flow {
        if !std::mem::replace(&mut self.2, true) {
            self.1.send(self.0).unwrap();
        }
        Flow::Continue
    }
}

#[test]
fn a_profile_that_asks_for_much_waits_for_itself_and_nobody_for_it() {
    let options = EngineOptions {
        concurrent: 2,
        ..options()
    };
    let engine = tiny_with(9, options);
    let ask = |profile: &str, from, guide: Box<dyn Guide>| {
        let policy = PolicyRef::Served(Profile::new(profile).unwrap());
        let params = SamplingParams {
            guide: Some(guide),
            ..greedy(20)
        };
        start(&engine, policy, &prompt(from, 20), params)
    };
    let (open, closed) = std::sync::mpsc::channel();
    let (told, order) = std::sync::mpsc::channel();
    let mut all = vec![ask("a", 1, Box::new(Gatekeeper(Some(closed))))];
    for i in 0..12 {
        all.push(ask("a", 2 + i, Box::new(Reports("a", told.clone(), false))));
    }
    for (i, profile) in (20..).zip(["b", "c"]) {
        all.push(ask(
            profile,
            i,
            Box::new(Reports(profile, told.clone(), false)),
        ));
    }
    open.send(()).unwrap();
    for stream in all {
        assert_eq!(collect(stream).len(), 20);
    }
    drop(told);
    let order: Vec<&str> = order.iter().collect();
    let place = |name| order.iter().position(|n| *n == name).unwrap();
    // One of a's may have been let in beside the first before the thread was held.
    assert!(place("b") <= 1 && place("c") <= 3, "{order:?}");
}
