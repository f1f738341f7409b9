//! A judge and a text model that say what a test tells them to.

use super::futures::ready;
use crate::{
    BoxFuture, Judge, JudgeCase, JudgeError, Score, TextModel, TextRequest, Verdict, VerdictSource,
};
use std::sync::Mutex;

type JudgeFn = dyn FnMut(&JudgeCase) -> Result<Option<Verdict>, JudgeError> + Send;

/// A judge made of a closure.
pub struct FakeJudge {
    name: String,
    answer: Mutex<Box<JudgeFn>>,
    cases: Mutex<Vec<JudgeCase>>,
}

impl FakeJudge {
    /// Answers by a closure.
    pub fn new(
        name: impl Into<String>,
        answer: impl FnMut(&JudgeCase) -> Result<Option<Verdict>, JudgeError> + Send + 'static,
    ) -> Self {
        let answer = Mutex::new(Box::new(answer) as Box<JudgeFn>);
        Self {
            name: name.into(),
            answer,
            cases: Mutex::default(),
        }
    }

    /// Gives every turn the same score and hints.
    pub fn scoring(name: impl Into<String>, score: Score, hints: &[&str]) -> Self {
        let name = name.into();
        let verdict = Verdict {
            judge: name.clone(),
            source: VerdictSource::Judge,
            reward: Some(score.value()),
            hints: hints.iter().map(|h| (*h).to_owned()).collect(),
            evidence: None,
            votes: Vec::new(),
            group: None,
        };
        Self::new(name, move |_| Ok(Some(verdict.clone())))
    }

    /// Is always down.
    pub fn failing(name: impl Into<String>, why: &str) -> Self {
        let error = JudgeError::Failed(why.to_owned());
        Self::new(name, move |_| Err(error.clone()))
    }

    /// What it was asked so far.
    pub fn cases(&self) -> Vec<JudgeCase> {
        self.cases.lock().unwrap().clone()
    }
}

impl Judge for FakeJudge {
    fn name(&self) -> &str {
        &self.name
    }

    fn judge<'a>(
        &'a self,
        case: &'a JudgeCase,
    ) -> BoxFuture<'a, Result<Option<Verdict>, JudgeError>> {
        self.cases.lock().unwrap().push(case.clone());
        let answer = (self.answer.lock().unwrap())(case);
        ready(answer)
    }
}

type TextFn = dyn FnMut(&TextRequest) -> Result<String, JudgeError> + Send;

/// A text model made of a closure or a list of answers.
pub struct FakeTextModel {
    answer: Mutex<Box<TextFn>>,
    requests: Mutex<Vec<TextRequest>>,
}

impl FakeTextModel {
    /// Answers by a closure.
    pub fn new(
        answer: impl FnMut(&TextRequest) -> Result<String, JudgeError> + Send + 'static,
    ) -> Self {
        Self {
            answer: Mutex::new(Box::new(answer)),
            requests: Mutex::default(),
        }
    }

    /// Gives these answers one after another, then fails.
    pub fn answering(answers: &[&str]) -> Self {
        let answers: Vec<String> = answers.iter().map(|a| (*a).to_owned()).collect();
        let mut left = answers.into_iter();
        Self::new(move |_| {
            left.next()
                .ok_or_else(|| JudgeError::Failed("no scripted answer is left".to_owned()))
        })
    }

    /// What it was asked so far.
    pub fn requests(&self) -> Vec<TextRequest> {
        self.requests.lock().unwrap().clone()
    }
}

impl TextModel for FakeTextModel {
    fn complete(&self, request: TextRequest) -> BoxFuture<'_, Result<String, JudgeError>> {
        let answer = (self.answer.lock().unwrap())(&request);
        self.requests.lock().unwrap().push(request);
        ready(answer)
    }
}
