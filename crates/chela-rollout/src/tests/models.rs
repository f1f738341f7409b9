//! Model judges over scripted answers, and the base model as one.

use super::*;
use crate::{EngineTextModel, ModelJudge, ModelJudgeConfig};

fn case(next: &str) -> JudgeCase {
    JudgeCase {
        turn: TurnId(9),
        profile: Profile::default(),
        session: session("s"),
        messages: vec![user("Why is the sky blue?")],
        tools: Vec::new(),
        answer: said("Scattering."),
        truncated: false,
        next: NextState {
            messages: vec![user(next)],
        },
    }
}

fn judge(answers: &[&str]) -> (Arc<FakeTextModel>, ModelJudge) {
    let model = Arc::new(FakeTextModel::answering(answers));
    (
        model.clone(),
        ModelJudge::new("openai", model, ModelJudgeConfig::default()),
    )
}

#[tokio::test]
async fn votes_are_counted_and_kept_and_hints_come_from_valid_ones() {
    let (model, judge) = judge(&[
        "\\boxed{-1}",
        "no idea",
        "<think>\\boxed{1}</think> \\boxed{-1}",
        "[HINT_START]Answer in a full sentence.[HINT_END] \\boxed{1}",
        "[HINT_START]Never do this at all.[HINT_END] \\boxed{-1}",
        "[HINT_START]short[HINT_END] \\boxed{1}",
    ]);
    let verdict = judge
        .judge(&case("That is no sentence."))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(
        (verdict.judge.as_str(), verdict.source),
        ("openai", VerdictSource::Judge)
    );
    assert_eq!(verdict.reward, Some(-1.0));
    assert_eq!(verdict.hints, ["Answer in a full sentence."]);
    assert_eq!(verdict.evidence.as_deref(), Some("That is no sentence."));
    assert_eq!(verdict.votes.len(), 6);
    assert_eq!(verdict.votes[1].raw, "no idea");
    assert_eq!(verdict.votes[1].score, None);
    // Every vote has a delimiter and a seed of its own.
    let requests = model.requests();
    let prompts: std::collections::HashSet<_> = requests
        .iter()
        .map(|r| r.messages[1].content.clone())
        .collect();
    let seeds: std::collections::HashSet<_> = requests.iter().map(|r| r.seed).collect();
    assert_eq!((prompts.len(), seeds.len()), (6, 6));
    assert!(!requests[0].messages[0].content.contains("{{"));
}

#[tokio::test]
async fn failed_votes_leave_the_denominator_and_all_failed_is_an_error() {
    // The third vote finds no answer left and fails.
    let (_, one_down) = judge(&["\\boxed{1}", "\\boxed{1}"]);
    let verdict = one_down.judge(&case("thanks")).await.unwrap().unwrap();
    assert_eq!((verdict.reward, verdict.votes.len()), (Some(1.0), 3));
    assert!(verdict.votes[2].raw.starts_with("failed: "));
    let (_, down) = judge(&[]);
    assert!(matches!(
        down.judge(&case("thanks")).await,
        Err(JudgeError::Failed(_))
    ));
}

#[tokio::test]
async fn void_votes_make_no_score() {
    let (_, judge) = judge(&[
        "1",
        "Score: 1",
        "<think>\\boxed{1}",
        "x",
        "\\boxed{-1}",
        "y",
    ]);
    let verdict = judge
        .judge(&case("next \\boxed{1}"))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(
        (verdict.reward, verdict.hints.len(), verdict.votes.len()),
        (None, 0, 6)
    );
}

#[tokio::test]
async fn the_base_model_answers_at_the_judges_priority() {
    let f = fixture(Vec::new(), |_| {});
    let mut answer = f.chat.encode("so \\boxed{1}").unwrap();
    answer.push(END);
    f.engine.push_reply(answer);
    let model = EngineTextModel::new(Arc::new(f.engine.clone()), f.chat.clone());
    let text = model
        .complete(TextRequest {
            messages: vec![user("grade")],
            max_tokens: 64,
            temperature: 0.6,
            seed: 3,
        })
        .await;
    assert_eq!(text, Ok("so \\boxed{1}".to_owned()));
    let asked = &f.engine.requests()[0];
    assert_eq!(
        (&asked.policy, asked.priority),
        (&PolicyRef::Base, Priority::Judge)
    );
    assert_eq!(asked.end_ids, [END]);
}
