//! One loop for every API's stream: follows the choices, keeps the connection alive, and never shows success after a failure.

use super::{Event, Replies};
use crate::problem::Problem;
use axum::{
    body::{Body, Bytes},
    http::{HeaderValue, header},
    response::Response,
};
use serde_json::Value;
use std::{collections::VecDeque, convert::Infallible, time::Duration};

/// Frames waiting to be sent.
#[derive(Default)]
pub(super) struct Out(VecDeque<Bytes>);

impl Out {
    /// A frame without a name.
    pub(super) fn data(&mut self, value: &Value) {
        self.0.push_back(Bytes::from(format!("data: {value}\n\n")));
    }

    /// A frame whose event is named as its `type`.
    pub(super) fn named(&mut self, value: &Value) {
        let name = value["type"].as_str().unwrap_or_default();
        let frame = format!("event: {name}\ndata: {value}\n\n");
        self.0.push_back(Bytes::from(frame));
    }

    /// The end mark of OpenAI's older APIs.
    pub(super) fn done(&mut self) {
        self.0.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
    }
}

/// Tokens of a request.
#[derive(Clone, Copy, Default)]
pub(super) struct Counts {
    /// Sampled so far.
    pub(super) sampled: usize,
    /// Of these, thoughts.
    pub(super) reasoned: usize,
    /// Of the prompt, from the cache.
    pub(super) cached: usize,
}

impl Counts {
    /// As they stand.
    pub(super) fn of(replies: &Replies) -> Self {
        Self {
            sampled: replies.sampled(),
            reasoned: replies.reasoned(),
            cached: replies.cached(),
        }
    }
}

/// How one API writes what happens.
pub(super) trait Wire: Send + 'static {
    /// A choice goes on, or is over. Never [`Event::Failed`].
    fn event(&mut self, event: Event, counts: Counts, out: &mut Out);
    /// Nothing has happened for a while: a real event, since the idle timers of agents ignore comments.
    fn quiet(&mut self, open: usize, out: &mut Out);
    /// Nothing more comes, and it was no success.
    fn failed(&mut self, problem: &Problem, out: &mut Out);
    /// Every choice is over.
    fn end(&mut self, counts: Counts, out: &mut Out);
}

struct Stream<W> {
    replies: Option<Replies>,
    wire: W,
    keep_alive: Duration,
    out: Out,
    over: bool,
}

/// A stream of `out`, then of what happens to the replies, if there are any.
pub(super) fn respond<W: Wire>(
    replies: Option<Replies>,
    wire: W,
    keep_alive: Duration,
    out: Out,
) -> Response {
    let stream = Stream {
        replies,
        wire,
        keep_alive,
        out,
        over: false,
    };
    let frames = futures_util::stream::unfold(stream, |mut stream| async move {
        let bytes = stream.next().await?;
        Some((Ok::<_, Infallible>(bytes), stream))
    });
    let mut response = Response::new(Body::from_stream(frames));
    let headers = response.headers_mut();
    let kind = HeaderValue::from_static("text/event-stream; charset=utf-8");
    headers.insert(header::CONTENT_TYPE, kind);
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

impl<W: Wire> Stream<W> {
    /// The next bytes; `None` = the stream is over.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(bytes) = self.out.0.pop_front() {
                return Some(bytes);
            }
            if self.over {
                return None;
            }
            let event = match &mut self.replies {
                None => None,
                Some(replies) => tokio::select! {
                    event = replies.next() => event,
                    () = tokio::time::sleep(self.keep_alive) => {
                        self.wire.quiet(replies.open().unwrap_or(0), &mut self.out);
                        continue;
                    }
                },
            };
            let counts = self
                .replies
                .as_ref()
                .map_or_else(Counts::default, Counts::of);
            match event {
                Some(Event::Failed(problem)) => {
                    self.wire.failed(&problem, &mut self.out);
                    self.over = true;
                }
                Some(event) => self.wire.event(event, counts, &mut self.out),
                None => {
                    self.wire.end(counts, &mut self.out);
                    self.over = true;
                }
            }
        }
    }
}

/// White space that came where no text is open: it is no block of its own, and the beginning of the text that follows.
#[derive(Default)]
pub(super) struct Blank(String);

impl Blank {
    /// What is to be written of a piece of text now; `None` = it waits.
    pub fn with(&mut self, text: String, in_text: bool) -> Option<String> {
        if !in_text && text.trim().is_empty() {
            self.0.push_str(&text);
            return None;
        }
        let held = std::mem::take(&mut self.0);
        Some(if held.is_empty() { text } else { held + &text })
    }
}
