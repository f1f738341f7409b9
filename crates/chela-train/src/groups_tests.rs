//! Tests of choosing and building batches of groups.

use super::*;
use crate::{
    batch::{self, TOO_LONG},
    config::GateConfig,
};
use chela_core::{
    AdapterSpec, FinishReason, Learners, NewSample, PolicyVersion, Profile, Reply as Sampled,
    SessionId, TokenLoss, Turn, TurnId, VerdictId, VersionRecord,
    testing::{FakeLearners, first_turn, new_sample, profile, session},
};
use chela_rl::objective::{Aggregation, Surrogate};

fn config() -> TrainConfig {
    TrainConfig {
        groups: 2,
        batch: 2,
        min_batch: 1,
        gate: GateConfig {
            held_out: 0.0,
            ..GateConfig::default()
        },
        ..TrainConfig::new("/nowhere".into(), vec![1, 2])
    }
}

fn group(name: &str, size: usize) -> Option<Group> {
    Some(Group::new(name, size).unwrap())
}

fn version(number: u64) -> PolicyVersion {
    PolicyVersion {
        profile: Profile::default(),
        number,
    }
}

/// A reply of group `name` of two, sampled by version `number`.
fn pending(id: u64, name: &str, number: u64) -> PendingSample {
    PendingSample {
        id: SampleId(id),
        turn: TurnId(id),
        session: SessionId::new("one").unwrap(),
        version: version(number),
        explicit: true,
        reply_hash: 7,
        reply_len: 3,
        created: 1000,
        // Below the clip, or they would be alike.
        reward: Some(id as f32 / 10.0),
        group: group(name, 2),
    }
}

fn chain(head: u64) -> Chain {
    let record = |number: u64| VersionRecord {
        version: version(number),
        parent: number - 1,
        steps: number,
        ..VersionRecord::default()
    };
    Chain::of(head, &(1..=head).map(record).collect::<Vec<_>>())
}

fn ids(selection: &Selection) -> Vec<u64> {
    selection.batch.iter().map(|s| s.0).collect()
}

fn pick(all: &[PendingSample], head: u64, config: &TrainConfig, now: Millis) -> Selection {
    batch::select(all, &chain(head), config, now)
}

#[test]
fn only_whole_groups_go_and_as_many_as_a_step_takes() {
    let mut all = vec![pending(1, "b", 0), pending(2, "a", 0), pending(3, "a", 0)];
    assert_eq!(pick(&all, 0, &config(), 2000), Selection::default());
    // However long they wait, half a batch is none, and equal replies of one session are legal.
    all.push(pending(4, "c", 0));
    let much_later = 1000 + 3 * config().batch_timeout_ms;
    let selection = pick(&all, 0, &config(), much_later);
    let incomplete = [(SampleId(1), INCOMPLETE), (SampleId(4), INCOMPLETE)];
    assert_eq!(
        (ids(&selection), &*selection.dropped),
        (vec![], &incomplete[..])
    );
    all.push(pending(5, "b", 0));
    all.push(pending(6, "c", 0));
    let selection = pick(&all, 0, &config(), much_later);
    assert_eq!(
        (ids(&selection), selection.dropped),
        (vec![1, 5, 2, 3], vec![])
    );
}

#[test]
fn a_group_still_grows_as_long_as_replies_come() {
    let mut all = vec![pending(1, "a", 0), pending(2, "a", 0)];
    all.iter_mut().for_each(|s| s.group = group("a", 3));
    let timeout = config().batch_timeout_ms;
    all[1].created = 900 + timeout;
    let wait = pick(&all, 0, &config(), 1000 + timeout);
    assert_eq!(wait, Selection::default());
    let over = pick(&all, 0, &config(), 900 + 2 * timeout);
    assert_eq!(over.dropped.len(), 2);
}

#[test]
fn an_id_that_is_used_again_is_another_group() {
    let again: Vec<_> = (1..=6).map(|i| pending(i, "a", 0)).collect();
    let one = TrainConfig {
        groups: 1,
        ..config()
    };
    assert_eq!(ids(&pick(&again, 0, &one, 2000)), [1, 2]);
    // As is one of another size.
    let mut other = vec![pending(1, "a", 0), pending(2, "a", 0)];
    other[1].group = group("a", 3);
    assert!(pick(&other, 0, &one, 2000).batch.is_empty());
}

#[test]
fn a_group_falls_whole() {
    let all = [
        pending(1, "stale", 0),
        pending(2, "stale", 4),
        pending(3, "half and stale", 1),
        pending(4, "foreign", 4),
        pending(5, "foreign", 9),
        pending(6, "fresh", 2),
        pending(7, "fresh", 4),
    ];
    let selection = pick(&all, 4, &config(), 2000);
    let mut dropped = selection.dropped.clone();
    dropped.sort_unstable();
    let foreign = "version outside the chain";
    assert_eq!(
        dropped,
        [
            (SampleId(1), "stale"),
            (SampleId(2), "stale"),
            (SampleId(3), "stale"),
            (SampleId(4), foreign),
            (SampleId(5), foreign),
        ]
    );
    assert!(selection.batch.is_empty());
}

#[test]
fn equal_rewards_make_room_where_the_algorithm_refills() {
    let mut all: Vec<_> = (1..=6)
        .map(|i| pending(i, ["a", "b", "c"][(i as usize - 1) / 2], 0))
        .collect();
    all[0].reward = all[1].reward;
    assert_eq!(ids(&pick(&all, 0, &config(), 2000)), [1, 2, 3, 4]);
    let dapo = TrainConfig {
        algorithm: Algorithm::Dapo,
        ..config()
    };
    let selection = pick(&all, 0, &dapo, 2000);
    assert_eq!(ids(&selection), [3, 4, 5, 6]);
    let why: Vec<_> = selection.dropped.iter().map(|d| d.1).collect();
    assert_eq!(why, [NO_DIFFERENCE; 2]);
}

#[test]
fn sessions_and_groups_make_batches_of_their_own_the_older_first() {
    let mut all: Vec<_> = (1..=6)
        .map(|i| pending(i, ["a", "b", "-"][(i as usize - 1) / 2], 0))
        .collect();
    for (i, one) in all[4..].iter_mut().enumerate() {
        (one.group, one.reply_hash) = (None, i as u64);
        one.session = SessionId::new(format!("s{i}")).unwrap();
    }
    assert_eq!(ids(&pick(&all, 0, &config(), 2000)), [1, 2, 3, 4]);
    all.rotate_left(4);
    for (i, one) in all.iter_mut().enumerate() {
        one.id = SampleId(i as u64);
    }
    assert_eq!(ids(&pick(&all, 0, &config(), 2000)), [0, 1]);
    assert_eq!(ids(&pick(&all[2..], 0, &config(), 2000)), [2, 3, 4, 5]);
}

/// A reply of `len` tokens, cut by its length, that got this reward.
fn leased(id: u64, name: &str, reward: f32, len: usize) -> LeasedSample {
    let tokens: Vec<u32> = (0..len)
        .map(|i| (id as usize * 5 + i * 3) as u32 % 200)
        .collect();
    let same = |value: f32| vec![value; len];
    let reply = Sampled::from_columns(tokens, same(-5.5), same(-5.5), same(1.0), vec![false; len]);
    LeasedSample {
        id: SampleId(id),
        sample: NewSample {
            group: group(name, 8),
            explicit: true,
            ..new_sample(TurnId(id), VerdictId(id), reward)
        },
        turn: Turn {
            reply: reply.unwrap(),
            finish: FinishReason::Length,
            ..first_turn(TurnId(id), &profile("default"), &session("s"))
        },
    }
}

/// Groups of three, two and four replies of different lengths, and one of equal rewards.
fn some() -> Vec<LeasedSample> {
    let all = [
        ("a", 1.0, 4),
        ("b", 0.5, 2),
        ("a", 0.0, 1),
        ("c", 3.0, 7),
        ("c", 0.1, 3),
        ("same", 1.0, 5),
        ("b", 0.75, 9),
        ("a", 0.3, 6),
        ("c", 0.2, 2),
        ("c", 0.7, 1),
        ("same", 1.0, 2),
    ];
    let one = |(i, (name, reward, len)): (usize, (&str, f32, usize))| {
        leased(i as u64 + 1, name, reward, len)
    };
    all.into_iter().enumerate().map(one).collect()
}

fn learner(learners: &FakeLearners) -> Box<dyn Learner> {
    learners
        .open(&profile("default"), &AdapterSpec::default(), None)
        .unwrap()
}

/// Moves it away from the base model.
fn teach(learner: &mut dyn Learner, sample: &Sample) {
    let mut loss = |_: usize, sample: &Sample, _: &Scored| TokenLoss {
        d_logprobs: vec![-1.0; sample.len()],
        ..TokenLoss::default()
    };
    learner
        .forward_backward(std::slice::from_ref(sample), &mut loss)
        .unwrap();
    learner
        .optim_step(&chela_core::OptimParams::default())
        .unwrap();
}

#[test]
fn the_order_of_a_batch_changes_no_bit() {
    for algorithm in Algorithm::ALL.into_iter().filter(|a| !a.values()) {
        let learners = FakeLearners::new();
        let mut learner = learner(&learners);
        let mut all = some();
        let sample = sample_of(&all[3], vec![0.0; 7]).unwrap();
        teach(&mut *learner, &sample);
        let first = prepare(&all, &config(), (algorithm, Some(9)), &mut *learner).unwrap();
        all.reverse();
        all.swap(2, 7);
        let again = prepare(&all, &config(), (algorithm, Some(9)), &mut *learner).unwrap();
        assert_eq!(first.samples, again.samples, "{algorithm:?}");
        assert_eq!((&first.ids, &first.left_out), (&again.ids, &again.left_out));
        // What a step consumed makes the same step again.
        let kept: Vec<_> = all
            .into_iter()
            .filter(|l| first.ids.contains(&l.id))
            .collect();
        let replayed = prepare(&kept, &config(), (algorithm, Some(9)), &mut *learner).unwrap();
        assert_eq!(first.samples, replayed.samples, "{algorithm:?}");
        assert_eq!(first.surrogate, algorithm.surrogate());
    }
}

#[test]
fn groups_of_any_size_and_length_are_compared_within() {
    let learners = FakeLearners::new();
    let mut learner = learner(&learners);
    let how = (Algorithm::Grpo, None);
    let prepared = prepare(&some(), &config(), how, &mut *learner).unwrap();
    assert_eq!((prepared.samples.len(), prepared.groups), (9, 3));
    let same: Vec<_> = prepared
        .left_out
        .iter()
        .map(|(id, why)| (id.0, &**why))
        .collect();
    assert_eq!(same, [(6, NO_DIFFERENCE), (11, NO_DIFFERENCE)]);
    let of = |id: u64| {
        let at = prepared.ids.iter().position(|i| i.0 == id).unwrap();
        prepared.samples[at].advantages().to_vec()
    };
    // 0.5 and 0.75: half of the root of two away from their mean, in deviations.
    assert_eq!((of(2).len(), of(7).len()), (2, 9));
    assert!((of(2)[0] + 0.5f32.sqrt()).abs() < 1e-4 && (of(7)[8] - 0.5f32.sqrt()).abs() < 1e-4);
    assert_eq!(prepared.aggregation, Aggregation::SequenceMean);
    let constant = prepare(&some(), &config(), (Algorithm::DrGrpo, None), &mut *learner);
    assert_eq!(constant.unwrap().aggregation, Aggregation::Constant(9.0));
    let known = prepare(
        &some(),
        &config(),
        (Algorithm::DrGrpo, Some(64)),
        &mut *learner,
    );
    assert_eq!(known.unwrap().aggregation, Aggregation::Constant(64.0));
    assert_eq!(prepared.surrogate, Surrogate::default());
}

#[test]
fn without_a_limit_long_replies_lose_nothing() {
    let learners = FakeLearners::new();
    let mut learner = learner(&learners);
    let all = [leased(1, "a", 1.0, 9), leased(2, "a", 0.99, 1)];
    let mut first = |limit| {
        let made = prepare(&all, &config(), (Algorithm::Dapo, limit), &mut *learner);
        made.unwrap().samples[0].advantages()[0]
    };
    // Of a limit of nine tokens, nine cost 1 and one costs 504 of 512.
    assert!(first(None) > 0.5 && first(Some(9)) < -0.5);
}

#[test]
fn huge_rewards_are_clipped_and_counted_and_what_is_left_out_enters_no_mean() {
    let learners = FakeLearners::new();
    learners.set_most_tokens(12);
    let mut learner = learner(&learners);
    let mut all = vec![
        leased(1, "a", 1e30, 2),
        leased(2, "a", 4.0, 2),
        leased(3, "a", 3.0, 2),
        leased(4, "a", -100.0, 40),
        leased(5, "a", 1.0, 2),
        leased(6, "alone", 1.0, 2),
    ];
    all[4].sample.reward = Some(f32::NAN);
    let how = (Algorithm::DrGrpo, None);
    let prepared = prepare(&all, &config(), how, &mut *learner).unwrap();
    assert_eq!(
        (&*prepared.rewards, prepared.clipped),
        (&[5.0, 4.0, 3.0][..], 1)
    );
    let advantages: Vec<f32> = prepared.samples.iter().map(|s| s.advantages()[0]).collect();
    let want = [1.0, 0.0, -1.0];
    assert!(
        advantages
            .iter()
            .zip(want)
            .all(|(a, w)| (a - w).abs() < 1e-5),
        "{advantages:?}"
    );
    let left: Vec<_> = prepared
        .left_out
        .iter()
        .map(|(id, why)| (id.0, &**why))
        .collect();
    assert_eq!(
        left,
        [
            (4, TOO_LONG),
            (5, "no reward in a group"),
            (6, NO_DIFFERENCE)
        ]
    );
}

#[test]
fn the_kl_to_the_base_model_lowers_what_is_taught() {
    let learners = FakeLearners::new();
    let mut learner = learner(&learners);
    let all = [leased(1, "a", 1.0, 3), leased(2, "b", 0.0, 3)];
    let how = (Algorithm::ReinforcePp, None);
    let before = prepare(&all, &config(), how, &mut *learner).unwrap();
    let first = before.samples[0].advantages();
    assert!(
        first.iter().all(|a| *a == first[0]),
        "equal at the base model: {first:?}"
    );
    (0..50).for_each(|_| teach(&mut *learner, &before.samples[0]));
    let after = prepare(&all, &config(), how, &mut *learner).unwrap();
    assert_ne!(
        before.samples[0].advantages(),
        after.samples[0].advantages()
    );
}

#[test]
fn ppo_is_refused_without_a_value_head() {
    let learners = FakeLearners::new();
    let mut learner = learner(&learners);
    let how = (Algorithm::Ppo, None);
    let error = prepare(&some(), &config(), how, &mut *learner).unwrap_err();
    assert!(error.to_string().contains("value head"), "{error}");
}

/// `cargo test --release -p chela-train -- --ignored --nocapture measured`
#[test]
#[ignore = "prints what choosing from a long queue and building its batch takes"]
fn measured_a_long_queue() {
    let queue: Vec<_> = (0..10_000)
        .map(|i| PendingSample {
            session: SessionId::new(format!("s{}", i % 1000)).unwrap(),
            group: (i % 2 == 1).then(|| Group::new(format!("task {}", i / 16), 8).unwrap()),
            reply_hash: i,
            ..pending(i, "-", 0)
        })
        .collect();
    let config = TrainConfig::new("/nowhere".into(), vec![1, 2]);
    let batch: Vec<_> = (0..64u64)
        .map(|i| leased(i, &format!("task {}", i / 8), (i % 3) as f32, 150))
        .collect();
    let learners = FakeLearners::new();
    let mut learner = learner(&learners);
    for _ in 0..5 {
        let begun = std::time::Instant::now();
        let selection = pick(&queue, 0, &config, 2000);
        let chosen = begun.elapsed();
        assert_eq!(selection.batch.len(), 16, "the older batch is of sessions");
        let how = (Algorithm::Grpo, None);
        let prepared = prepare(&batch, &config, how, &mut *learner).unwrap();
        assert_eq!(prepared.samples.len(), 64);
        println!("select {chosen:?}, with prepare {:?}", begun.elapsed());
    }
}
