//! The fake engine keeps the contract of an engine.

use super::{FAKE_VOCABULARY, FakeEngine, FakeModel, block_on, collect};
use crate::*;

struct StopAt(TokenId);

impl Guide for StopAt {
    fn accept(&mut self, token: TokenId) -> Flow {
        if token == self.0 {
            Flow::Stop
        } else {
            Flow::Continue
        }
    }
}

fn sampled(engine: &FakeEngine, params: SamplingParams) -> (Vec<TokenId>, FinishReason) {
    let prompt = Prompt { tokens: vec![1, 2] };
    let events = collect(engine.sample(PolicyRef::Base, prompt, params).unwrap());
    assert!(matches!(events[0], Ok(SamplingEvent::Started { .. })));
    let tokens = events.iter().filter_map(|e| match e {
        Ok(SamplingEvent::Token(t)) => Some(t.id),
        _ => None,
    });
    match events.last() {
        Some(Ok(SamplingEvent::Finished(reason))) => (tokens.collect(), *reason),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_reply_ends_by_end_id_guide_or_length() {
    let engine = FakeEngine::new();
    engine.set_yields(2);
    engine.answer_with(|_, _| vec![5, 6, 7].into());
    let params = || SamplingParams {
        end_ids: vec![9],
        ..SamplingParams::default()
    };
    assert_eq!(
        sampled(&engine, params()),
        (vec![5, 6, 7, 9], FinishReason::End)
    );
    let short = SamplingParams {
        max_tokens: 2,
        ..params()
    };
    assert_eq!(sampled(&engine, short), (vec![5, 6], FinishReason::Length));
    let guided = SamplingParams {
        guide: Some(Box::new(StopAt(6))),
        ..params()
    };
    assert_eq!(
        sampled(&engine, guided),
        (vec![5, 6], FinishReason::Stopped)
    );
    assert_eq!((engine.running(), engine.cancelled()), (0, 0));
}

#[test]
fn scoring_a_reply_gives_the_sampled_logprobs_again() {
    let engine = FakeEngine::new();
    engine.push_reply(vec![5, 6]);
    let prompt = Prompt { tokens: vec![1, 2] };
    let params = SamplingParams {
        end_ids: vec![9],
        ..SamplingParams::default()
    };
    let events = collect(engine.sample(PolicyRef::Base, prompt, params).unwrap());
    let logprobs: Vec<f32> = events
        .into_iter()
        .filter_map(|e| match e {
            Ok(SamplingEvent::Token(t)) => Some(t.logprob_t1),
            _ => None,
        })
        .collect();
    let prompt = Prompt {
        tokens: vec![1, 2, 5, 6, 9],
    };
    let scored = block_on(engine.score(PolicyRef::Base, prompt, 2, Want::default())).unwrap();
    assert_eq!(scored.logprobs, logprobs);
}

#[test]
fn a_version_is_served_only_when_resident() {
    let engine = FakeEngine::new();
    let version = PolicyVersion {
        profile: Profile::default(),
        number: 3,
    };
    assert_eq!(
        engine.serve(&version),
        Err(EngineError::NotLoaded(version.clone()))
    );
    engine.insert(version.clone(), FakeModel::base(FAKE_VOCABULARY));
    engine.serve(&version).unwrap();
    assert_eq!(engine.served(&version.profile), version);
    engine.unload(&version);
    assert_eq!(engine.resident(), vec![version]);
}
