//! Short ways to the records that store tests need.

use crate::*;

/// A profile by its name.
pub fn profile(name: &str) -> Profile {
    Profile::new(name).unwrap()
}

/// A session id by its text.
pub fn session(id: &str) -> SessionId {
    SessionId::new(id).unwrap()
}

/// A reply of these tokens with numbers that differ from column to column.
pub fn reply(tokens: &[TokenId]) -> Reply {
    let mut reply = Reply::default();
    for (i, id) in tokens.iter().enumerate() {
        reply.push(&SampledToken {
            id: *id,
            behavior_logprob: -0.25 * (i as f32 + 1.0),
            logprob_t1: -0.5 * (i as f32 + 1.0),
            kept_mass: 1.0 / (i as f32 + 1.0),
            forced: i % 3 == 2,
            top: Vec::new(),
        });
    }
    reply
}

/// The first turn of a session: prompt `[1, 2, 3]`, reply `[4, 5]`, one user message.
pub fn first_turn(id: TurnId, profile: &Profile, session: &SessionId) -> Turn {
    Turn {
        id,
        profile: profile.clone(),
        session: session.clone(),
        parent: None,
        segment: Segment::Opened("first turn".to_owned()),
        kind: TurnKind::Main,
        reason: "has a session".to_owned(),
        version: PolicyVersion::base(profile.clone()),
        prompt: vec![1, 2, 3],
        reply: reply(&[4, 5]),
        temperature: 1.0,
        finish: FinishReason::End,
        messages: vec![Message::user("hello")],
        tools: Vec::new(),
        answer: Message::assistant("hi"),
        created: 1_000,
        completed: 1_100,
    }
}

/// A turn that continues `parent`: its prompt is the parent's tokens and `said`, its reply `answered`.
pub fn next_turn(id: TurnId, parent: &Turn, said: &[TokenId], answered: &[TokenId]) -> Turn {
    let mut prompt = parent.prompt.clone();
    prompt.extend(parent.reply.tokens());
    prompt.extend(said);
    let mut messages = parent.messages.clone();
    messages.push(parent.answer.clone());
    messages.push(Message::user(format!("then {said:?}")));
    Turn {
        id,
        parent: Some(parent.id),
        segment: Segment::Extends,
        prompt,
        reply: reply(answered),
        messages,
        answer: Message::assistant(format!("so {answered:?}")),
        created: parent.completed + 1_000,
        completed: parent.completed + 1_100,
        ..parent.clone()
    }
}

/// A next state of one user message.
pub fn next_state(text: &str) -> NextState {
    NextState {
        messages: vec![Message::user(text)],
    }
}

/// A judge's verdict with one vote.
pub fn verdict(reward: Option<f32>, hints: &[&str]) -> Verdict {
    let score = reward.map(|r| {
        let near = |s: &Score| s.value() == r;
        [Score::Good, Score::Neutral, Score::Bad]
            .into_iter()
            .find(near)
            .unwrap_or(Score::Neutral)
    });
    Verdict {
        judge: "self".to_owned(),
        source: VerdictSource::Judge,
        reward,
        hints: hints.iter().map(|h| (*h).to_owned()).collect(),
        evidence: Some("thanks".to_owned()),
        votes: vec![Vote {
            kind: VoteKind::Score,
            raw: "so: 1".to_owned(),
            score,
            hint: None,
        }],
        group: None,
    }
}

/// A sample of a verdict, without log-probs of a teacher.
pub fn new_sample(turn: TurnId, verdict: VerdictId, reward: f32) -> NewSample {
    NewSample {
        turn,
        verdict,
        reward: Some(reward),
        explicit: false,
        hint: None,
        teacher_logprobs: None,
        student_logprobs: None,
        created: 3_000,
        group: None,
    }
}

/// A step that makes version `number` from `parent` out of `samples`.
pub fn step(profile: &Profile, number: u64, parent: u64, samples: &[SampleId]) -> StepCommit {
    let version = PolicyVersion {
        profile: profile.clone(),
        number,
    };
    StepCommit {
        version: VersionRecord {
            checkpoint: Some(format!("adapters/{profile}/{number:08}")),
            version,
            parent,
            steps: parent + 1,
            samples: samples.to_vec(),
            metrics: vec![("loss".to_owned(), 0.125), ("grad_norm".to_owned(), 1e-30)],
            created: 4_000,
            ..VersionRecord::default()
        },
        dropped: Vec::new(),
    }
}

/// A receipt with numbers.
pub fn receipt() -> Receipt {
    Receipt {
        weights_hash: "ab12".to_owned(),
        engine_canary: vec![-1.5, -0.25],
        learner_canary: vec![-1.5, -0.250_000_1],
    }
}

/// Forgetting that touches no version.
pub fn forgetting(target: ForgetTarget) -> Forget {
    Forget {
        target,
        why: "asked for".to_owned(),
        versions: Vec::new(),
        back_to: None,
        replay: Vec::new(),
        at: 9_000,
    }
}
