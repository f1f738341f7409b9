//! What is kept of texts: never shared between profiles, and gone when a profile's texts are to be forgotten.

use crate::common::{begin, greedy, of, prompt, sample, started, tiny, trained};
#[cfg(unix)]
use crate::{
    common::{collect, version},
    residency::Held,
};
use chela_core::{PolicyEngine, PolicyRef, Profile, SamplingParams};
use chela_engine::LocalEngine;
use futures_executor::{block_on, block_on_stream};

fn served(profile: &str) -> PolicyRef {
    PolicyRef::Served(Profile::new(profile).unwrap())
}

fn cached(engine: &LocalEngine, policy: PolicyRef, text: &[u32]) -> usize {
    started(engine, policy, text).unwrap().1
}

#[test]
fn profiles_on_the_base_model_do_not_meet_each_others_texts() {
    let engine = tiny(1);
    let text = prompt(3, 60);
    assert_eq!(cached(&engine, served("a"), &text), 0);
    assert_eq!(cached(&engine, served("a"), &text), 59);
    assert_eq!(cached(&engine, served("b"), &text), 0);
    assert_eq!(cached(&engine, served("default"), &text), 0);
    let base = PolicyRef::Version(of("c", 0));
    assert_eq!(cached(&engine, base, &text), 0);
    // Judges ask in nobody's name: no profile meets what they read, nor they what a profile wrote.
    assert_eq!(cached(&engine, PolicyRef::Base, &text), 0);
    assert_eq!(cached(&engine, PolicyRef::Base, &text), 59);
    let other = prompt(4, 60);
    assert_eq!(cached(&engine, PolicyRef::Base, &other), 0);
    assert_eq!(cached(&engine, served("default"), &other), 0);
}

#[test]
fn profiles_with_the_same_weights_do_not_meet_each_others_texts() {
    let dir = tempfile::tempdir().unwrap();
    let engine = tiny(2);
    let weights = trained(&engine, dir.path(), 1);
    for profile in ["a", "b"] {
        engine.register(of(profile, 1), weights.clone(), None);
        engine.serve(&of(profile, 1)).unwrap();
    }
    let text = prompt(3, 60);
    assert_eq!(cached(&engine, served("a"), &text), 0);
    assert_eq!(cached(&engine, served("a"), &text), 59);
    assert_eq!(cached(&engine, served("b"), &text), 0);
}

#[test]
fn a_profiles_texts_are_forgotten_under_all_its_versions_and_nobody_elses() {
    let dir = tempfile::tempdir().unwrap();
    let engine = tiny(3);
    let weights = trained(&engine, dir.path(), 1);
    for v in [of("a", 1), of("a", 2), of("b", 1)] {
        block_on(engine.load(v, weights.clone())).unwrap();
    }
    let policies = [
        PolicyRef::Version(of("a", 0)),
        PolicyRef::Version(of("a", 1)),
        PolicyRef::Version(of("a", 2)),
        PolicyRef::Base,
        PolicyRef::Version(of("b", 0)),
        PolicyRef::Version(of("b", 1)),
    ];
    let text = prompt(3, 60);
    let all = || {
        policies
            .each_ref()
            .map(|p| cached(&engine, p.clone(), &text))
    };
    assert_eq!(all(), [0; 6]);
    assert_eq!(all(), [59; 6]);
    engine.forget_texts(&Profile::new("a").unwrap());
    assert_eq!(all(), [0, 0, 0, 0, 59, 59]);
    assert_eq!(all(), [59; 6]);
}

#[test]
fn a_reply_that_runs_when_its_profile_is_forgotten_leaves_nothing() {
    let engine = tiny(4);
    let text = prompt(3, 60);
    let mut runs = block_on_stream(begin(&engine, served("a"), &text, greedy(300)).unwrap());
    let mut other = block_on_stream(begin(&engine, served("b"), &text, greedy(300)).unwrap());
    assert!(runs.next().is_some() && other.next().is_some());
    engine.forget_texts(&Profile::new("a").unwrap());
    assert_eq!((runs.count(), other.count()), (301, 301));
    assert_eq!(cached(&engine, served("a"), &text), 0);
    assert_eq!(cached(&engine, served("b"), &text), 59);
}

#[test]
fn a_text_that_must_not_be_kept_is_read_with_what_is_kept_and_leaves_nothing() {
    let engine = tiny(6);
    let text = prompt(3, 60);
    let once = |keep| {
        let params = SamplingParams { keep, ..greedy(4) };
        sample(&engine, PolicyRef::Base, &text, params);
    };
    once(false);
    assert_eq!(cached(&engine, PolicyRef::Base, &text), 0);
    once(false);
    assert_eq!(
        cached(&engine, PolicyRef::Base, &text),
        59,
        "from the call above"
    );
}

#[cfg(unix)]
#[test]
fn so_does_one_that_waits_for_its_adapter() {
    let dir = tempfile::tempdir().unwrap();
    let engine = tiny(5);
    let weights = trained(&engine, dir.path(), 1);
    let (held, slow) = Held::new(&weights, &dir.path().join("held"));
    engine.register(version(1), slow, None);
    let policy = PolicyRef::Version(version(1));
    let text = prompt(3, 60);
    let waits = begin(&engine, policy.clone(), &text, greedy(10)).unwrap();
    engine.forget_texts(&version(1).profile);
    held.go_on();
    assert_eq!(collect(waits).len(), 10);
    assert_eq!(cached(&engine, policy.clone(), &text), 0);
    assert_eq!(cached(&engine, policy, &text), 59);
}
