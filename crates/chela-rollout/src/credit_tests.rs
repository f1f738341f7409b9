//! Credit along branches.

use super::*;
use chela_core::{TurnMark, VerdictId, testing};

/// Turns 1.. with their parents and own explicit rewards.
fn stories(of: &[(Option<u64>, Option<f32>)]) -> Vec<TurnStory> {
    let first = testing::first_turn(TurnId(1), &testing::profile("p"), &testing::session("s"));
    of.iter()
        .enumerate()
        .map(|(i, (parent, reward))| {
            let mut turn = first.clone();
            (turn.id, turn.parent) = (TurnId(i as u64 + 1), parent.map(TurnId));
            let mut own = verdict(0.0);
            (own.judge, own.reward) = ("reward".to_owned(), *reward);
            let verdicts = reward.map(|_| (VerdictId(i as u64), own, None));
            TurnStory {
                turn,
                next: None,
                mark: None,
                no_verdict: None,
                verdicts: verdicts.into_iter().collect(),
                samples: Vec::new(),
            }
        })
        .collect()
}

fn credit(stories: &[TurnStory], gamma: f32) -> Vec<Option<f32>> {
    let credit = discounted(stories, gamma);
    stories
        .iter()
        .map(|s| credit.get(&s.turn.id).copied())
        .collect()
}

#[test]
fn rewards_flow_back_along_the_branch_and_not_along_time() {
    // 1 → 2 → 4, 1 → 3; only 4 was rewarded, 3 came before it.
    let line = stories(&[
        (None, None),
        (Some(1), None),
        (Some(1), None),
        (Some(2), Some(1.0)),
    ]);
    assert_eq!(credit(&line, 0.5), [Some(0.25), Some(0.5), None, Some(1.0)]);
    assert_eq!(credit(&line, 1.0), [Some(1.0), Some(1.0), None, Some(1.0)]);
    assert_eq!(credit(&line, 0.0), [None, None, None, Some(1.0)]);
}

#[test]
fn own_rewards_add_up_and_forks_count_once() {
    let line = stories(&[
        (None, Some(1.0)),
        (Some(1), Some(-1.0)),
        (Some(2), Some(0.5)),
    ]);
    assert_eq!(credit(&line, 1.0), [Some(0.5), Some(-0.5), Some(0.5)]);
    let fork = stories(&[(None, None), (Some(1), Some(1.0)), (Some(1), Some(0.0))]);
    assert_eq!(credit(&fork, 1.0)[0], Some(0.5));
    let mut retried = fork;
    retried[2].mark = Some(TurnMark::Superseded);
    assert_eq!(credit(&retried, 1.0)[0], Some(1.0));
}

#[test]
fn an_end_adds_only_what_is_new_and_not_yet_trained() {
    let mut line = stories(&[(None, None), (Some(1), None), (Some(2), Some(1.0))]);
    let of = |line: &[TurnStory]| {
        flowing_back(line, 1.0)
            .into_iter()
            .map(|(t, v)| (t.0, v.reward))
            .collect::<Vec<_>>()
    };
    assert_eq!(of(&line), [(1, Some(1.0)), (2, Some(1.0))]);
    let sample = testing::new_sample(TurnId(1), VerdictId(7), 1.0);
    line[0].samples = vec![(chela_core::SampleId(1), sample, SampleState::Leased)];
    assert_eq!(of(&line), [(2, Some(1.0))]);
    // Ending twice adds nothing, and what flowed is no reward of the turn's own.
    line[1].verdicts.push((VerdictId(9), verdict(1.0), None));
    assert_eq!(of(&line), []);
    assert_eq!(credit(&line, 0.5), [Some(0.25), Some(0.5), Some(1.0)]);
}

#[test]
fn rewards_as_large_as_numbers_go_stay_finite() {
    let all = stories(&[
        (None, Some(f32::MAX)),
        (Some(1), Some(f32::MAX)),
        (Some(1), Some(f32::MAX)),
        (Some(2), Some(f32::MIN)),
        (Some(3), Some(f32::MAX)),
    ]);
    let reached = credit(&all, 1.0);
    assert!(
        reached.iter().all(|r| r.unwrap().is_finite()),
        "{reached:?}"
    );
    let added = flowing_back(&all, 1.0);
    assert!(added.iter().all(|(_, v)| v.reward.unwrap().is_finite()));
}

#[test]
fn a_reward_in_a_group_stays_where_it_was_given() {
    let mut line = stories(&[(None, None), (Some(1), Some(0.5)), (Some(2), Some(1.0))]);
    line[1].verdicts[0].1.group = Some(chela_core::Group::new("g", 2).unwrap());
    assert_eq!(credit(&line, 1.0), [None, Some(0.5), Some(1.0)]);
    assert_eq!(flowing_back(&line, 1.0), []);
}
