//! The choices of one request while they are sampled, and what becomes of each: sealed exactly once, whatever happens.

use super::plain::Plain;
use crate::{
    metrics::ReplyFigures,
    problem::Problem,
    server::{Phase, Server},
    tasks::Busy,
};
use chela_chat::{AnswerDelta, AnswerParser, Rendered};
use chela_core::{
    Admission, ChatRequest, Completion, EngineError, FinishReason, Message, Refusal, Reply,
    SampledToken, Sampling, SamplingEvent, TurnId,
};
use std::{
    future::{Future, poll_fn},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};
use tokio::sync::oneshot;

/// What the record keeps of a request.
pub(crate) struct Record {
    pub(crate) admission: Admission,
    pub(crate) request: ChatRequest,
    pub(crate) rendered: Rendered,
    pub(crate) temperature: f32,
}

/// What all choices of one request share.
pub(crate) struct Exchange {
    pub(crate) server: Arc<Server>,
    /// `None`: answered and forgotten.
    pub(crate) record: Option<Arc<Record>>,
    /// A reply may call more than one tool.
    pub(crate) parallel: bool,
    /// Sampled tokens are reported with their log-probs.
    pub(crate) logprobs: bool,
    /// Tokens of the prompt.
    pub(crate) prompt: usize,
    /// When the request came.
    pub(crate) begun: Instant,
    /// The reply is under way until this is dropped.
    pub(crate) _busy: [Busy; 2],
}

/// Turns tokens into what the client sees.
pub(crate) enum Follow {
    Answer(Box<AnswerParser>),
    Plain(Box<Plain>),
}

impl Follow {
    fn push(&mut self, token: u32) -> Vec<AnswerDelta> {
        match self {
            Self::Answer(parser) => parser.push(token),
            Self::Plain(plain) => said(plain.push(token)),
        }
    }

    fn thinking(&self) -> bool {
        match self {
            Self::Answer(parser) => parser.thinking(),
            Self::Plain(_) => false,
        }
    }

    /// The stop string that ended the text.
    fn stop(&self) -> Option<&str> {
        match self {
            Self::Answer(parser) => parser.stop(),
            Self::Plain(_) => None,
        }
    }

    fn finish(&mut self) -> (Vec<AnswerDelta>, Message) {
        match self {
            Self::Answer(parser) => parser.finish(),
            Self::Plain(plain) => {
                let (rest, text) = plain.finish();
                (said(rest), Message::assistant(text))
            }
        }
    }
}

fn said(text: String) -> Vec<AnswerDelta> {
    if text.is_empty() {
        Vec::new()
    } else {
        vec![AnswerDelta::Content(text)]
    }
}

/// What happens to a request's choices.
pub(crate) enum Event {
    /// A choice goes on.
    Said {
        choice: usize,
        deltas: Vec<AnswerDelta>,
        tokens: Vec<SampledToken>,
    },
    /// A choice is over and, where it is recorded, durable.
    Over {
        choice: usize,
        finish: FinishReason,
        message: Message,
        /// The stop string that ended it.
        stop: Option<String>,
        tokens: Vec<SampledToken>,
    },
    /// Nothing more can come.
    Failed(Problem),
}

type Sealed = Result<TurnId, Refusal>;

enum State {
    Sampling(Sampling),
    Sealing {
        sealed: oneshot::Receiver<Sealed>,
        finish: FinishReason,
        message: Message,
    },
    Done,
}

enum Polled {
    Sampled(Option<Result<SamplingEvent, EngineError>>),
    Sealed(Sealed),
}

/// One choice. Dropped while it is sampled, it stops the engine and is sealed as aborted.
struct Choice {
    exchange: Arc<Exchange>,
    index: usize,
    follow: Follow,
    reply: Reply,
    state: State,
    cached: usize,
    sampled: usize,
    /// Of these, thoughts and their tags.
    reasoned: usize,
    /// From the request's beginning to the first token.
    first: Option<Duration>,
    /// Not yet reported.
    tokens: Vec<SampledToken>,
}

impl Choice {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Polled> {
        match &mut self.state {
            State::Sampling(sampling) => sampling.as_mut().poll_next(context).map(Polled::Sampled),
            State::Sealing { sealed, .. } => Pin::new(sealed).poll(context).map(|sealed| {
                let lost = || Refusal::Internal("the turn was not kept: no runtime".to_owned());
                Polled::Sealed(sealed.unwrap_or_else(|_| Err(lost())))
            }),
            State::Done => Poll::Pending,
        }
    }

    fn advance(&mut self, polled: Polled) -> Option<Event> {
        match polled {
            Polled::Sampled(Some(Ok(SamplingEvent::Started { cached_tokens, .. }))) => {
                self.cached = cached_tokens;
                None
            }
            Polled::Sampled(Some(Ok(SamplingEvent::Token(token)))) => self.token(token),
            Polled::Sampled(Some(Ok(SamplingEvent::Finished(finish)))) => match finish {
                FinishReason::Failed | FinishReason::Aborted => {
                    let why = "the engine gave up on the reply".to_owned();
                    Some(self.fail(EngineError::Stopped(why), finish))
                }
                _ => self.over(finish),
            },
            Polled::Sampled(Some(Err(error))) => Some(self.fail(error, FinishReason::Failed)),
            Polled::Sampled(None) => {
                let why = "the reply broke off".to_owned();
                Some(self.fail(EngineError::Stopped(why), FinishReason::Failed))
            }
            Polled::Sealed(sealed) => Some(self.sealed(sealed)),
        }
    }

    fn token(&mut self, token: SampledToken) -> Option<Event> {
        let numbers = [token.behavior_logprob, token.logprob_t1, token.kept_mass];
        if numbers
            .iter()
            .chain(token.top.iter().map(|(_, l)| l))
            .any(|x| !x.is_finite())
        {
            let what = format!("the numbers of token {}", token.id);
            return Some(self.fail(EngineError::NotFinite(what), FinishReason::Failed));
        }
        self.reply.push(&token);
        self.sampled += 1;
        self.first
            .get_or_insert_with(|| self.exchange.begun.elapsed());
        let thought = self.follow.thinking();
        let mut deltas = self.follow.push(token.id);
        self.reasoned += usize::from(thought || self.follow.thinking());
        if self.exchange.logprobs {
            self.tokens.push(token);
        }
        let call = deltas
            .iter()
            .position(|d| matches!(d, AnswerDelta::ToolCall { .. }));
        if let Some(at) = call.filter(|_| !self.exchange.parallel) {
            deltas.truncate(at + 1);
            let (_, message) = self.follow.finish();
            self.seal(FinishReason::Stopped, message);
        }
        self.report(deltas)
    }

    /// A reply that ended by itself. What was still held back is said before it is sealed.
    fn over(&mut self, finish: FinishReason) -> Option<Event> {
        let (mut deltas, message) = self.follow.finish();
        if !self.exchange.parallel {
            let first = deltas
                .iter()
                .position(|d| matches!(d, AnswerDelta::ToolCall { .. }));
            deltas.truncate(first.map_or(deltas.len(), |at| at + 1));
        }
        self.seal(finish, message);
        self.report(deltas)
    }

    fn report(&mut self, deltas: Vec<AnswerDelta>) -> Option<Event> {
        if deltas.is_empty() {
            return None;
        }
        let tokens = std::mem::take(&mut self.tokens);
        Some(Event::Said {
            choice: self.index,
            deltas,
            tokens,
        })
    }

    fn sealed(&mut self, sealed: Sealed) -> Event {
        let tokens = std::mem::take(&mut self.tokens);
        match (std::mem::replace(&mut self.state, State::Done), sealed) {
            (
                State::Sealing {
                    finish, message, ..
                },
                Ok(_),
            ) => Event::Over {
                choice: self.index,
                finish,
                message,
                stop: self.follow.stop().map(str::to_owned),
                tokens,
            },
            (_, Ok(_)) => Event::Failed(Refusal::Internal("sealed twice".to_owned()).into()),
            (_, Err(refusal)) => {
                tracing::error!(%refusal, "a turn could not be kept");
                Event::Failed(refusal.into())
            }
        }
    }

    fn fail(&mut self, error: EngineError, finish: FinishReason) -> Event {
        let (_, message) = self.follow.finish();
        self.seal(finish, message);
        Event::Failed(Refusal::from(error).into())
    }

    /// Hands the turn over. From here on it is kept whatever becomes of the request; the engine's stream is gone.
    fn seal(&mut self, finish: FinishReason, mut message: Message) {
        if !self.exchange.parallel {
            message.tool_calls.truncate(1);
        }
        self.exchange.server.metrics.replied(&ReplyFigures {
            prompt: self.exchange.prompt,
            cached: self.cached,
            sampled: self.sampled,
            first: self.first,
            whole: self.exchange.begun.elapsed(),
            finish,
        });
        let sealed = match self
            .exchange
            .record
            .clone()
            .filter(|r| !r.admission.private)
        {
            None => {
                let (sender, receiver) = oneshot::channel();
                // Cannot fail: the receiver is in hand.
                let _ = sender.send(Ok(TurnId(0)));
                receiver
            }
            Some(record) => {
                let completion = Completion {
                    choice: self.index,
                    prompt: record.rendered.tokens.clone(),
                    segment: record.rendered.segment.clone(),
                    reply: std::mem::take(&mut self.reply),
                    temperature: record.temperature,
                    finish,
                    answer: message.clone(),
                };
                let exchange = self.exchange.clone();
                self.exchange.server.tasks.run(async move {
                    let recorder = &exchange.server.app.recorder;
                    let sealed = recorder
                        .seal(&record.admission, &record.request, completion)
                        .await;
                    if let Err(error) = &sealed {
                        tracing::warn!(%error, "a turn was not kept");
                    }
                    sealed
                })
            }
        };
        self.state = State::Sealing {
            sealed,
            finish,
            message,
        };
    }
}

impl Drop for Choice {
    fn drop(&mut self) {
        if matches!(self.state, State::Sampling(_)) {
            let (_, message) = self.follow.finish();
            self.seal(FinishReason::Aborted, message);
        }
    }
}

/// All choices of one request, followed at once.
pub(crate) struct Replies {
    exchange: Arc<Exchange>,
    choices: Vec<Choice>,
    /// Whose turn it is to be looked at first.
    first: usize,
}

impl Replies {
    /// One choice for each stream.
    pub(crate) fn new(exchange: Arc<Exchange>, streams: Vec<(Sampling, Follow)>) -> Self {
        let choices = streams
            .into_iter()
            .enumerate()
            .map(|(index, (sampling, follow))| Choice {
                exchange: exchange.clone(),
                index,
                follow,
                reply: Reply::default(),
                state: State::Sampling(sampling),
                cached: 0,
                sampled: 0,
                reasoned: 0,
                first: None,
                tokens: Vec::new(),
            });
        Self {
            choices: choices.collect(),
            exchange,
            first: 0,
        }
    }

    /// What happens next; `None` when every choice is over or one failed. Dropping the future loses nothing.
    pub(crate) async fn next(&mut self) -> Option<Event> {
        let mut phase = self.exchange.server.phase.subscribe();
        loop {
            if self.choices.iter().all(|c| matches!(c.state, State::Done)) {
                return None;
            }
            let polled = tokio::select! {
                biased;
                _ = phase.wait_for(|p| *p == Phase::Cut) => None,
                polled = poll_fn(|context| self.poll(context)) => Some(polled),
            };
            let event = match polled {
                None => {
                    let why = "the server is shutting down; the reply was cut";
                    Some(Event::Failed(Problem::unavailable(why, 5)))
                }
                Some((index, polled)) => self.choices[index].advance(polled),
            };
            if matches!(event, Some(Event::Failed(_))) {
                // Stops the others and seals them as aborted.
                self.choices.clear();
            }
            if event.is_some() {
                return event;
            }
        }
    }

    /// Follows a single choice to its end.
    pub(crate) async fn sole(
        &mut self,
    ) -> Result<(FinishReason, Message, Option<String>), Problem> {
        while let Some(event) = self.next().await {
            match event {
                Event::Said { .. } => {}
                Event::Over {
                    finish,
                    message,
                    stop,
                    ..
                } => return Ok((finish, message, stop)),
                Event::Failed(problem) => return Err(problem),
            }
        }
        let why = "a reply ended without an end".to_owned();
        Err(Refusal::Internal(why).into())
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<(usize, Polled)> {
        let count = self.choices.len();
        for index in (0..count).map(|k| (self.first + k) % count) {
            if let Poll::Ready(polled) = self.choices[index].poll(context) {
                self.first = index + 1;
                return Poll::Ready((index, polled));
            }
        }
        Poll::Pending
    }

    /// The choice that is not over yet and comes first.
    pub(crate) fn open(&self) -> Option<usize> {
        self.choices
            .iter()
            .find(|c| !matches!(c.state, State::Done))
            .map(|c| c.index)
    }

    /// Tokens sampled so far, of all choices.
    pub(crate) fn sampled(&self) -> usize {
        self.choices.iter().map(|c| c.sampled).sum()
    }

    /// Of these, thoughts.
    pub(crate) fn reasoned(&self) -> usize {
        self.choices.iter().map(|c| c.reasoned).sum()
    }

    /// Prompt tokens that came from the cache.
    pub(crate) fn cached(&self) -> usize {
        self.choices.first().map_or(0, |c| c.cached)
    }
}
