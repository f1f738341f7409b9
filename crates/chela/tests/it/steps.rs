//! What the trainer makes of a batch, over the fakes' learner and over the engine's: the same holds for both.

use chela_core::{
    AdapterSpec, Candidates, Checkpoint, EngineError, Learner, Learners, LeasedSample, NewSample,
    OptimParams, PolicyEngine, PolicyRef, PolicyVersion, Profile, Prompt, Reply, Sample,
    SampleColumns, SampleId, SamplingEvent, SamplingParams, Scored, StepReport, TokenLoss, TurnId,
    VerdictId, Want,
    testing::{FakeEngine, FakeLearners, block_on, first_turn, new_sample, profile, session},
};
use chela_engine::{EngineOptions, LocalEngine};
use chela_model::{Model, ModelSource, NoProgress, resolve, testing};
use chela_train::{
    AdvantageConfig, Distil, Estimator, Method, Proximal, Regular, TrainConfig,
    batch::{Prepared, prepare},
    step::{StepOutcome, kl_to_base, run},
};
use futures_util::StreamExt;
use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

/// An engine and the learners over it.
struct Pair {
    name: &'static str,
    engine: Arc<dyn PolicyEngine>,
    learners: Arc<dyn Learners>,
    /// A rate at which one step of AdamW moves log-probs by some tenths of a nat.
    lr: f32,
}

fn tiny(name: &'static str, train_rows: usize) -> Pair {
    let dir = tempfile::tempdir().unwrap();
    let spec = testing::TinySpec::default();
    let files = testing::write_tiny_llama(dir.path(), 3, &spec).unwrap();
    let options = EngineOptions {
        threads: 2,
        train_rows,
        ..EngineOptions::default()
    };
    let engine = LocalEngine::open(&Model::open(&files).unwrap(), options).unwrap();
    Pair {
        name,
        engine: engine.clone(),
        learners: engine,
        lr: 3e-2,
    }
}

fn pairs() -> [Pair; 2] {
    let engine = FakeEngine::new();
    engine.answer_with(|_, prompt| text(prompt.tokens[0] + 3, 8).into());
    let fakes = Pair {
        name: "fakes",
        engine: Arc::new(engine),
        learners: Arc::new(FakeLearners::new()),
        lr: 0.3,
    };
    [fakes, tiny("engine", EngineOptions::default().train_rows)]
}

impl Pair {
    /// One that equals the base model.
    fn fresh(&self) -> Watched {
        let spec = AdapterSpec::default();
        let inner = self
            .learners
            .open(&Profile::default(), &spec, None)
            .unwrap();
        Watched {
            inner,
            pieces: Vec::new(),
            poison: None,
            sums: Vec::new(),
            in_loss: Duration::ZERO,
        }
    }
}

/// A learner that is handed each batch in pieces, and what its losses were.
struct Watched {
    inner: Box<dyn Learner>,
    /// Samples of each piece; none = all at once.
    pieces: Vec<Vec<usize>>,
    /// The call whose gradient is not finite.
    poison: Option<usize>,
    /// Of each call, what the derivatives by log-probs add up to.
    sums: Vec<f64>,
    in_loss: Duration,
}

impl Learner for Watched {
    fn takes(&self, sample: &Sample) -> Result<(), EngineError> {
        self.inner.takes(sample)
    }

    fn forward(&mut self, batch: &[Sample], want: Want) -> Result<Vec<Scored>, EngineError> {
        self.inner.forward(batch, want)
    }

    fn forward_base(&mut self, batch: &[Sample], want: Want) -> Result<Vec<Scored>, EngineError> {
        self.inner.forward_base(batch, want)
    }

    fn forward_backward(
        &mut self,
        batch: &[Sample],
        loss: &mut dyn FnMut(usize, &Sample, &Scored) -> TokenLoss,
    ) -> Result<(), EngineError> {
        let whole: Vec<usize> = (0..batch.len()).collect();
        let pieces = match &self.pieces[..] {
            [] => vec![whole],
            pieces => pieces.to_vec(),
        };
        let (call, mut sum) = (self.sums.len(), 0.0);
        for piece in pieces {
            let some: Vec<Sample> = piece.iter().map(|i| batch[*i].clone()).collect();
            self.inner
                .forward_backward(&some, &mut |i, sample, scored| {
                    let began = Instant::now();
                    let mut given = loss(piece[i], sample, scored);
                    self.in_loss += began.elapsed();
                    sum += given.d_logprobs.iter().map(|d| f64::from(*d)).sum::<f64>();
                    if self.poison == Some(call) {
                        given.d_logprobs[0] = f32::NAN;
                    }
                    given
                })?;
        }
        self.sums.push(sum);
        Ok(())
    }

    fn optim_step(&mut self, params: &OptimParams) -> Result<StepReport, EngineError> {
        self.inner.optim_step(params)
    }

    fn weights_hash(&self) -> Result<String, EngineError> {
        self.inner.weights_hash()
    }

    fn save(&self, dir: &Path) -> Result<Checkpoint, EngineError> {
        self.inner.save(dir)
    }
}

fn text(from: u32, n: u32) -> Vec<u32> {
    (0..n).map(|i| (from + 7 * i) % 200).collect()
}

/// A sample with these advantages on its last tokens.
fn sample(tokens: &[u32], behavior: &[f32], advantages: &[f32]) -> Sample {
    let columns = SampleColumns {
        mask: vec![true; advantages.len()],
        behavior_logprobs: behavior.to_vec(),
        advantages: advantages.to_vec(),
    };
    let start = tokens.len() - advantages.len();
    let base = PolicyVersion::base(Profile::default());
    Sample::new(tokens.to_vec(), start, columns, 1.0, base).unwrap()
}

/// As if the learner had sampled them all: `(tokens, reply, advantage)`.
fn fresh_samples(learner: &mut dyn Learner, all: &[(Vec<u32>, usize, f32)]) -> Vec<Sample> {
    let with = |columns: &[Vec<f32>]| -> Vec<Sample> {
        let each = all.iter().zip(columns);
        each.map(|((tokens, n, advantage), behavior)| {
            sample(tokens, behavior, &vec![*advantage; *n])
        })
        .collect()
    };
    let blank: Vec<Vec<f32>> = all.iter().map(|(_, n, _)| vec![0.0; *n]).collect();
    with(&logprobs(learner, &with(&blank)))
}

fn logprobs(learner: &mut dyn Learner, samples: &[Sample]) -> Vec<Vec<f32>> {
    let scored = learner.forward(samples, Want::default()).unwrap();
    scored.into_iter().map(|s| s.logprobs).collect()
}

fn config(lr: f32) -> TrainConfig {
    TrainConfig {
        optim: OptimParams {
            lr,
            ..OptimParams::default()
        },
        ..TrainConfig::new("/nowhere".into(), vec![1, 2])
    }
}

/// An optimizer whose step is the gradient's as good as: noise in a gradient of zero stays noise.
fn linear(lr: f32) -> OptimParams {
    OptimParams {
        lr,
        eps: 1.0,
        ..OptimParams::default()
    }
}

fn prepared(samples: Vec<Sample>) -> Prepared {
    Prepared {
        ids: (0..samples.len() as u64).map(SampleId).collect(),
        behind: vec![0; samples.len()],
        samples,
        ..Prepared::default()
    }
}

fn step(learner: &mut Watched, samples: &[Sample], config: &TrainConfig) -> StepOutcome {
    run(learner, &prepared(samples.to_vec()), config).unwrap()
}

fn largest_gap(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    let pairs = a.iter().flatten().zip(b.iter().flatten());
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Judged turns of unequal lengths; some with a verdict, some with a hint, some with both.
fn leased(learner: &mut dyn Learner) -> Vec<LeasedSample> {
    let rewards = [
        Some(1.0),
        Some(-1.0),
        None,
        Some(1.0),
        Some(0.0),
        Some(-1.0),
    ];
    let one = |i: usize, behavior: Vec<f32>| {
        let n = 3 + 2 * i;
        let mut turn = first_turn(TurnId(i as u64), &profile("default"), &session("s"));
        turn.prompt = text(10 * i as u32, 5 + (i as u32 * 3) % 7);
        let tokens = text(31 + i as u32, n as u32);
        let mut forced = vec![false; n];
        forced[i % 3] = i % 2 == 1;
        let (t1, mass) = (behavior.clone(), vec![1.0; n]);
        turn.reply = Reply::from_columns(tokens, behavior, t1, mass, forced).unwrap();
        let hinted = i % 3 != 1;
        let by = |k: f32| {
            let each = (0..n).map(|t| -2.0 - (k * t as f32).sin());
            hinted.then(|| each.collect())
        };
        LeasedSample {
            id: SampleId(i as u64),
            sample: NewSample {
                reward: rewards[i],
                hint: hinted.then(|| "be brief".to_owned()),
                teacher_logprobs: by(0.9),
                student_logprobs: by(1.7),
                ..new_sample(turn.id, VerdictId(i as u64), 0.0)
            },
            turn,
        }
    };
    let blank = (0..6).map(|i| one(i, vec![0.0; 3 + 2 * i]));
    let texts = blank.map(|l| {
        let tokens = [&l.turn.prompt[..], l.turn.reply.tokens()].concat();
        (tokens, l.turn.reply.len(), 0.0)
    });
    let fresh = fresh_samples(learner, &texts.collect::<Vec<_>>());
    let near = fresh.iter().enumerate().map(|(i, s)| {
        let behavior = s.behavior_logprobs().iter().enumerate();
        one(
            i,
            behavior.map(|(t, b)| b + 0.1 * (t as f32).cos()).collect(),
        )
    });
    near.collect()
}

#[test]
fn a_batch_gives_one_update_in_every_split_and_order() {
    let [fakes, engine] = pairs();
    // Beside what a learner is handed, the engine cuts by its own limit: eight rows are about one sample.
    for pair in [fakes, engine, tiny("engine, few rows", 8)] {
        let leased = leased(&mut pair.fresh());
        for method in [Method::Binary, Method::Opd, Method::Combined] {
            let config = TrainConfig {
                advantage: AdvantageConfig {
                    method,
                    ..AdvantageConfig::default()
                },
                optim: linear(0.5),
                ..config(0.5)
            };
            let update = |order: &[usize], pieces: &dyn Fn(usize) -> Vec<Vec<usize>>| {
                let mut learner = pair.fresh();
                let leased: Vec<LeasedSample> = order.iter().map(|i| leased[*i].clone()).collect();
                let takes = |s: &Sample| learner.takes(s);
                let prepared = prepare(&leased, &config, 0.25, &takes);
                let n = prepared.samples.len();
                assert_eq!(n, if method == Method::Combined { 6 } else { n });
                assert!(n >= 4, "{method:?}");
                let mut samples = prepared.samples.clone();
                samples.sort_by_key(|s| s.tokens().len());
                let before = logprobs(&mut learner, &samples);
                learner.pieces = pieces(n);
                let outcome = run(&mut learner, &prepared, &config).unwrap();
                assert!(!outcome.report.skipped);
                (before, logprobs(&mut learner, &samples), outcome)
            };
            let (before, want, outcome) = update(&[0, 1, 2, 3, 4, 5], &|_| Vec::new());
            let moved = largest_gap(&before, &want);
            assert!(moved > 1e-2, "{} {method:?}: {moved}", pair.name);
            let halves = |n: usize| vec![(0..n / 2).collect(), (n / 2..n).collect()];
            let alone = |n: usize| (0..n).map(|i| vec![i]).collect();
            let turned = |n: usize| vec![(1..n).rev().collect(), vec![0]];
            let splits: [&dyn Fn(usize) -> Vec<Vec<usize>>; 4] =
                [&|_| Vec::new(), &halves, &alone, &turned];
            for pieces in splits {
                for order in [[0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4]] {
                    let (_, got, other) = update(&order, pieces);
                    let gap = largest_gap(&want, &got);
                    assert!(
                        gap < 1e-3 * moved,
                        "{} {method:?}: {gap} of {moved}",
                        pair.name
                    );
                    let gap = (outcome.stats.loss - other.stats.loss).abs();
                    assert!(gap < 1e-5, "{} {method:?}: {gap}", pair.name);
                    assert_eq!(outcome.stats.tokens, other.stats.tokens);
                }
            }
        }
    }
}

#[test]
fn with_one_minibatch_every_ratio_is_one_and_with_two_the_clip_acts() {
    for pair in pairs() {
        let twice = [(text(20, 14), 6, 1.0), (text(20, 14), 6, 1.0)];
        let samples = fresh_samples(&mut pair.fresh(), &twice);
        let mut config = config(pair.lr);
        let one = step(&mut pair.fresh(), &samples, &config);
        assert!(one.stats.ratios.len() == 12 && one.stats.ratios.iter().all(|r| *r == 1.0));
        assert_eq!(one.stats.clipped, 0);
        for proximal in [Proximal::Recomputed, Proximal::Interpolated] {
            (config.minibatches, config.proximal) = (2, proximal);
            let mut learner = pair.fresh();
            let two = step(&mut learner, &samples, &config);
            let (first, second) = two.stats.ratios.split_at(6);
            assert!(first.iter().all(|r| *r == 1.0));
            assert!(
                second.iter().any(|r| *r > 1.28),
                "{}: {second:?}",
                pair.name
            );
            let outside = second.iter().filter(|r| **r > 1.28).count();
            assert_eq!(two.stats.clipped, outside, "{} {proximal:?}", pair.name);
            assert_eq!((two.report.step, learner.sums.len()), (2, 2));
            assert!(!two.moved && !two.report.skipped);
        }
    }
}

#[test]
fn recomputed_and_interpolated_are_the_same_unless_samples_are_stale() {
    for pair in pairs() {
        let six = [1.0, -0.5, 0.7, 1.0, -1.0, 0.4];
        let six = six.iter().enumerate();
        let six: Vec<_> = six
            .map(|(i, a)| (text(9 * i as u32, 12 + i as u32), 5, *a))
            .collect();
        let fresh = fresh_samples(&mut pair.fresh(), &six);
        let stale = fresh.iter().map(|s| {
            let behavior = s.behavior_logprobs().iter().map(|b| b - 0.4);
            sample(s.tokens(), &behavior.collect::<Vec<_>>(), s.advantages())
        });
        let stale: Vec<Sample> = stale.collect();
        let update = |samples: &[Sample], (behind, lr), proximal| {
            let mut learner = pair.fresh();
            let config = TrainConfig {
                minibatches: 3,
                proximal,
                optim: linear(lr),
                ..config(lr)
            };
            let mut prepared = prepared(samples.to_vec());
            prepared.behind = vec![behind; samples.len()];
            let outcome = run(&mut learner, &prepared, &config).unwrap();
            let gap = outcome.stats.behavior_gap / outcome.stats.tokens as f64;
            (logprobs(&mut learner, &fresh), gap)
        };
        let (a, gap_a) = update(&fresh, (0, 0.5), Proximal::Recomputed);
        let (b, gap_b) = update(&fresh, (0, 0.5), Proximal::Interpolated);
        let gap = largest_gap(&a, &b);
        assert!(gap < 1e-4, "{}: {gap}", pair.name);
        assert!(
            gap_a < 1e-5 && gap_b < 1e-5,
            "{}: {gap_a} {gap_b}",
            pair.name
        );
        let (a, gap_a) = update(&stale, (1, 0.02), Proximal::Recomputed);
        let (b, gap_b) = update(&stale, (1, 0.02), Proximal::Interpolated);
        // After one and two steps, α is 3/4 and 3/5 of what lies between; in the first minibatch both are the learner's own.
        assert!((gap_a - 0.4).abs() < 1e-3, "{}: {gap_a}", pair.name);
        let between = 0.4 * (1.0 + 0.75 + 0.6) / 3.0;
        assert!(
            (gap_b - between).abs() < 0.05,
            "{}: {gap_b} {between}",
            pair.name
        );
        // w · ρ does not ask what lies between, as long as nothing is clipped.
        let gap = largest_gap(&a, &b);
        assert!(gap < 1e-3, "{}: {gap}", pair.name);
    }
}

/// With `max_staleness = 0` and one minibatch the decoupled loss is the plain one, up to what engine and learner differ by.
#[test]
fn proximal_is_behavior_where_nothing_is_stale() {
    for pair in pairs() {
        let replies = (0..4u32).map(|i| {
            let temperature = if i % 2 == 0 { 1.0 } else { 0.7 };
            let params = SamplingParams {
                temperature,
                max_tokens: 10,
                ..SamplingParams::default()
            };
            let tokens = text(17 * i, 9);
            let prompt = Prompt {
                tokens: tokens.clone(),
            };
            let stream = pair.engine.sample(PolicyRef::Base, prompt, params).unwrap();
            let events = block_on(stream.collect::<Vec<_>>());
            let (mut ids, mut behavior) = (tokens, Vec::new());
            for event in events {
                if let SamplingEvent::Token(token) = event.unwrap() {
                    ids.push(token.id);
                    behavior.push(token.behavior_logprob);
                }
            }
            let columns = SampleColumns {
                mask: vec![true; behavior.len()],
                advantages: vec![1.0; behavior.len()],
                behavior_logprobs: behavior,
            };
            let base = PolicyVersion::base(Profile::default());
            Sample::new(ids, 9, columns, temperature, base).unwrap()
        });
        let replies: Vec<Sample> = replies.collect();
        let outcome = step(&mut pair.fresh(), &replies, &config(pair.lr));
        assert!(outcome.stats.tokens >= 4);
        let gap = outcome.stats.behavior_gap / outcome.stats.tokens as f64;
        assert!(gap < 1e-4, "{}: {gap}", pair.name);
        assert_eq!(outcome.stats.masked, 0);
    }
}

#[test]
fn tokens_of_a_minibatch_weigh_by_its_own_number_before_w_masks_any() {
    for pair in pairs() {
        let three = [
            (text(1, 12), 5, 1.0),
            (text(50, 20), 3, 1.0),
            (text(90, 16), 7, 1.0),
        ];
        let mut samples = fresh_samples(&mut pair.fresh(), &three);
        let mut behavior = samples[2].behavior_logprobs().to_vec();
        behavior[3] -= 10.0;
        samples[2] = sample(samples[2].tokens(), &behavior, samples[2].advantages());
        let config = TrainConfig {
            minibatches: 3,
            ..config(0.0)
        };
        let mut learner = pair.fresh();
        let outcome = step(&mut learner, &samples, &config);
        assert_eq!((outcome.stats.masked, outcome.stats.tokens), (1, 15));
        let want = [-1.0, -1.0, -6.0 / 7.0];
        for (got, want) in learner.sums.iter().zip(want) {
            assert!(
                (got - want).abs() < 1e-4,
                "{}: {:?}",
                pair.name,
                learner.sums
            );
        }
        assert_eq!(learner.sums.len(), 3);
    }
}

#[test]
fn a_pull_to_the_base_and_a_bonus_for_entropy_do_what_they_say() {
    for pair in pairs() {
        let texts = [(text(20, 14), 6, 1.0), (text(70, 11), 4, 1.0)];
        let rewarded = fresh_samples(&mut pair.fresh(), &texts);
        let zero = |s: &Sample| sample(s.tokens(), s.behavior_logprobs(), &vec![0.0; s.len()]);
        let zero: Vec<Sample> = rewarded.iter().map(zero).collect();
        let measure = |learner: &mut Watched| {
            let want = Want {
                entropy: true,
                ..Want::default()
            };
            let scored = learner.forward(&zero, want).unwrap();
            let base = learner.forward_base(&zero, Want::default()).unwrap();
            let now = scored.iter().flat_map(|s| &s.logprobs);
            let base = base.iter().flat_map(|s| &s.logprobs);
            let gaps: Vec<f64> = now.zip(base).map(|(n, b)| f64::from(n - b)).collect();
            let entropy = scored.iter().flat_map(|s| s.entropy.as_ref().unwrap());
            let entropy = entropy.map(|h| f64::from(*h)).sum::<f64>() / 10.0;
            let mean = |f: &dyn Fn(&f64) -> f64| gaps.iter().map(f).sum::<f64>() / 10.0;
            (mean(&|d| *d), mean(&|d| d * d / 2.0), entropy)
        };
        let regular = |kl, estimator, entropy| Regular {
            kl,
            estimator,
            entropy,
        };
        for regular in [
            regular(0.5, Estimator::K2, 0.0),
            regular(0.5, Estimator::K3, 0.0),
            regular(0.0, Estimator::K3, 0.5),
            Regular::default(),
        ] {
            let mut learner = pair.fresh();
            step(&mut learner, &rewarded, &config(pair.lr));
            let (k1, k2, entropy) = measure(&mut learner);
            let config = TrainConfig {
                regular,
                optim: OptimParams {
                    beta1: 0.0, // the step before goes on otherwise
                    ..linear(0.1)
                },
                ..config(0.1)
            };
            let outcome = step(&mut learner, &zero, &config);
            let (_, k2_now, entropy_now) = measure(&mut learner);
            let what = format!(
                "{} {regular:?}: {k2} {k2_now} {entropy} {entropy_now}",
                pair.name
            );
            let said = outcome.entropy.unwrap() / outcome.stats.tokens as f64;
            assert!((said - entropy).abs() < 1e-4, "{what}: {said}");
            assert_eq!(outcome.reference.is_some(), regular.kl > 0.0);
            if regular.kl > 0.0 {
                assert!(k2_now < 0.999 * k2, "{what}");
                let kl = kl_to_base(&*pair.engine, &prepared(zero.clone()), &outcome, &config);
                let kl = kl.unwrap().unwrap();
                assert!((kl - k1).abs() < 1e-4, "{what}: {kl} {k1}");
                assert!(outcome.stats.loss > 0.0);
            } else if regular.entropy > 0.0 {
                assert!(entropy_now > entropy + 1e-5, "{what}");
                let loss = -0.5 * entropy;
                assert!((outcome.stats.loss - loss).abs() < 1e-4, "{what}");
            } else {
                assert_eq!(outcome.stats.loss, 0.0);
            }
        }
    }
}

#[test]
fn a_minibatch_that_is_not_finite_ends_the_step_and_says_whether_others_went_before() {
    for pair in pairs() {
        let four: Vec<_> = (0..4).map(|i| (text(30 * i, 12), 5, 1.0)).collect();
        let samples = fresh_samples(&mut pair.fresh(), &four);
        let config = TrainConfig {
            minibatches: 4,
            ..config(pair.lr)
        };
        let untouched = pair.fresh().weights_hash().unwrap();
        for (at, moved) in [(0, false), (2, true)] {
            let mut learner = pair.fresh();
            learner.poison = Some(at);
            let outcome = step(&mut learner, &samples, &config);
            assert!(outcome.report.skipped);
            assert_eq!((outcome.moved, learner.sums.len()), (moved, at + 1));
            let same = learner.weights_hash().unwrap() == untouched;
            assert_eq!(same, !moved, "{}", pair.name);
        }
    }
}

/// Positions with four candidates each, which a teacher orders the other way round.
fn taught(pair: &Pair, from: u32) -> Sample {
    let (tokens, n) = (text(from, 14), 5);
    let plain = sample(&tokens, &vec![-5.0; n], &vec![0.0; n]);
    // Of one class of the fakes in each column, so that they can be moved apart.
    let ids = (0..n as u32).flat_map(|t| (0..4).map(move |c| 1 + c + 16 * t));
    let named = Candidates::new(ids.collect(), 4).unwrap();
    let asked = plain.clone().with_candidates(named.clone()).unwrap();
    let now = logprobs(&mut pair.fresh(), &[asked]).remove(0);
    let teacher = now.iter().enumerate();
    let teacher = teacher.map(|(i, l)| l + [0.8, -0.8, 0.3, -0.4][i % 4]);
    plain.with_teacher(named, teacher.collect()).unwrap()
}

#[test]
fn candidates_are_drawn_to_what_a_teacher_says_of_them() {
    for pair in pairs() {
        let both = [taught(&pair, 20), taught(&pair, 75)];
        let towards = |learner: &mut Watched| -> f32 {
            let now = logprobs(learner, &both);
            let gaps = now.iter().zip(&both).flat_map(|(now, sample)| {
                let teacher = sample.teacher_logprobs().unwrap();
                let each = now.iter().zip(teacher).map(|(n, t)| (t - n).abs());
                each.collect::<Vec<_>>()
            });
            gaps.sum::<f32>() / 40.0
        };
        for distil in [Distil::TopK, Distil::Hybrid { limit: 1.0 }] {
            let config = TrainConfig {
                distil,
                minibatches: 2,
                proximal: Proximal::Interpolated, // which candidates have none of
                ..config(pair.lr / 5.0)
            };
            let mut learner = pair.fresh();
            let before = towards(&mut learner);
            let first = step(&mut learner, &both, &config);
            assert_eq!((first.stats.tokens, first.stats.ratios.len()), (10, 0));
            assert_eq!(first.logprobs[0].len(), 20);
            let mut last = first.stats.loss;
            for _ in 0..15 {
                last = step(&mut learner, &both, &config).stats.loss;
            }
            let after = towards(&mut learner);
            let what = format!("{} {distil:?}: {before} {after}", pair.name);
            assert!(after < 0.8 * before, "{what}");
            if distil == Distil::TopK {
                assert!(
                    first.stats.loss > 0.0 && last < 0.7 * first.stats.loss,
                    "{what}"
                );
            }
            let kl = kl_to_base(&*pair.engine, &prepared(both.to_vec()), &first, &config);
            assert_eq!(kl.unwrap(), None, "nothing was said of sampled tokens");
        }
        // Beside others, a sample's loss is the same; the pull to the base model goes over the candidates.
        let plain = fresh_samples(&mut pair.fresh(), &[(text(40, 12), 5, 1.0)]).remove(0);
        let loss = |samples: &[Sample], kl| {
            let config = TrainConfig {
                regular: Regular {
                    kl,
                    ..Regular::default()
                },
                ..config(0.0)
            };
            step(&mut pair.fresh(), samples, &config).stats.loss
        };
        let (one, other) = (both[0].clone(), both[1].clone());
        let mixed = loss(&[one.clone(), plain.clone(), other], 0.0);
        let alone = (2.0 * loss(&both, 0.0) + loss(&[plain], 0.0)) / 3.0;
        assert!(
            (mixed - alone).abs() < 1e-4,
            "{}: {mixed} {alone}",
            pair.name
        );
        let same = loss(std::slice::from_ref(&one), 0.0);
        let pulled = loss(std::slice::from_ref(&one), 0.5);
        assert!((same - pulled).abs() < 1e-4, "it is the base model still");
        let named = one.candidates().unwrap().clone();
        let untaught = sample(one.tokens(), &[-5.0; 5], &[0.0; 5]);
        let untaught = untaught.with_candidates(named).unwrap();
        let outcome = step(&mut pair.fresh(), &[untaught], &config(0.1));
        assert!(outcome.report.skipped, "no missing teacher becomes a zero");
    }
}

/// What the loss code takes of a training step: it is numbers by token, beside matrices by token.
#[test]
#[ignore = "needs the starter model"]
fn measured_loss_beside_a_step() {
    let cache = directories::ProjectDirs::from("", "", "chela").unwrap();
    let source = ModelSource::parse("starter").unwrap();
    let files = resolve(&source, cache.cache_dir(), &mut NoProgress).unwrap();
    let engine = LocalEngine::open(&Model::open(&files).unwrap(), EngineOptions::default());
    let engine = engine.unwrap();
    let pair = Pair {
        name: "starter",
        engine: engine.clone(),
        learners: engine,
        lr: 2e-4,
    };
    let sixteen: Vec<_> = (0..16).map(|i| (text(11 * i, 160), 80, 1.0)).collect();
    let samples = fresh_samples(&mut pair.fresh(), &sixteen);
    for (minibatches, kl, entropy) in [(1, 0.0, 0.0), (4, 0.1, 0.01)] {
        let config = TrainConfig {
            minibatches,
            regular: Regular {
                kl,
                entropy,
                ..Regular::default()
            },
            ..config(pair.lr)
        };
        let mut learner = pair.fresh();
        let began = Instant::now();
        step(&mut learner, &samples, &config);
        let (all, own) = (began.elapsed(), learner.in_loss);
        let part = own.as_secs_f64() / all.as_secs_f64();
        println!(
            "{minibatches} minibatches, kl {kl}, entropy {entropy}: {own:?} of {all:?}, {:.4} %",
            100.0 * part
        );
        assert!(part < 0.01);
    }
}
