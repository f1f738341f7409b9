//! Chat completions, whole and streamed.

use super::{
    Event, Exchange, Follow, Record, Replies, finish_word, frame, params, put, put_ignored,
    recorded_temperature, room, usage,
};
use crate::{
    convert::{Asked, of_chat},
    problem::{Problem, json_response},
    server::Server,
};
use axum::{
    body::{Body, Bytes},
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::Response,
};
use chela_chat::{AnswerDelta, AnswerOptions, Chat};
use chela_core::{
    Admission, Caller, EngineError, FinishReason, Message, PolicyRef, Prompt, Refusal,
    SampledToken, TurnId,
};
use serde_json::{Value, json};
use std::{collections::VecDeque, convert::Infallible, sync::Arc};

/// Spreads turn ids, which are neighbours, over all seeds.
fn seed_of(turn: TurnId) -> u64 {
    turn.0.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Answers a chat completion.
pub(crate) async fn chat(
    server: Arc<Server>,
    caller: Caller,
    asked: Asked,
) -> Result<Response, Problem> {
    let recorder = &server.app.recorder;
    let admission = recorder
        .admit(&caller, &asked.request)
        .await
        .map_err(Problem::of_model)?;
    let (stream, include_usage) = (asked.stream, asked.include_usage);
    let (replies, head) = begin(&server, asked, admission)?;
    if stream {
        return Ok(streamed(replies, head, include_usage));
    }
    whole(replies, head).await
}

/// What every answer to one request says about it.
struct Head {
    server: Arc<Server>,
    record: Arc<Record>,
    ignored: Vec<String>,
    logprobs: bool,
    id: String,
    model: String,
}

impl Head {
    fn object(&self, object: &str) -> Value {
        let created = self.record.admission.arrived / 1000;
        json!({"id": self.id, "object": object, "created": created, "model": self.model})
    }

    /// What a script needs to score the reply.
    fn mark(&self, headers: &mut HeaderMap) {
        let admission = &self.record.admission;
        let turns: Vec<String> = admission.turns.iter().map(ToString::to_string).collect();
        put(headers, "x-chela-session", admission.session.as_str());
        put(headers, "x-chela-turn", &turns.join(","));
        put(
            headers,
            "x-chela-policy-version",
            &admission.version.to_string(),
        );
        let kind = if admission.private {
            "private"
        } else {
            admission.kind.as_str()
        };
        put(headers, "x-chela-turn-kind", kind);
        put_ignored(headers, &self.ignored);
    }
}

/// Renders and starts all choices.
fn begin(
    server: &Arc<Server>,
    asked: Asked,
    mut admission: Admission,
) -> Result<(Replies, Head), Problem> {
    let app = &server.app;
    let reuse = admission.reuse.as_ref().map_err(String::as_str);
    let rendered = app
        .chat
        .render(&asked.request.conversation, reuse)
        .map_err(of_chat)?;
    let room = room(server, rendered.tokens.len())?;
    let sampling = &asked.request.sampling;
    let mut streams = Vec::with_capacity(admission.turns.len());
    for (index, turn) in admission.turns.clone().into_iter().enumerate() {
        let seed = sampling
            .seed
            .map_or_else(|| seed_of(turn), |s| s.wrapping_add(index as u64));
        let sample = |version: &chela_core::PolicyVersion| {
            let prompt = Prompt {
                tokens: rendered.tokens.clone(),
            };
            let policy = PolicyRef::Version(version.clone());
            app.engine
                .sample(policy, prompt, params(server, sampling, seed, room))
        };
        let stream = match sample(&admission.version) {
            // The served version changed between admission and here; who named no version gets the new one.
            Err(EngineError::NotLoaded(_)) if index == 0 && !is_pinned(server, &asked) => {
                admission.version = app.engine.served(&admission.profile);
                sample(&admission.version)
            }
            other => other,
        };
        let stream = stream.map_err(|e| Problem::of_model(e.into()))?;
        let options = AnswerOptions {
            tools: asked.may_call,
            stops: sampling.stop.clone(),
            call_id_seed: turn.0,
        };
        streams.push((
            stream,
            Follow::Answer(Box::new(app.chat.answer_parser(options))),
        ));
    }
    let Some(first) = admission.turns.first() else {
        return Err(Refusal::Internal("a request was admitted without a turn".to_owned()).into());
    };
    let id = format!("chatcmpl-{first}");
    let temperature = recorded_temperature(sampling);
    let logprobs = sampling.top_logprobs.is_some();
    let Asked {
        request,
        parallel,
        ignored,
        ..
    } = asked;
    let record = Arc::new(Record {
        admission,
        request,
        rendered,
        temperature,
    });
    let exchange = Arc::new(Exchange {
        server: server.clone(),
        record: Some(record.clone()),
        parallel,
        logprobs,
        _busy: server.open.enter(),
    });
    let model = app.engine.info().model;
    let head = Head {
        server: server.clone(),
        record,
        ignored,
        logprobs,
        id,
        model,
    };
    Ok((Replies::new(exchange, streams), head))
}

fn is_pinned(server: &Server, asked: &Asked) -> bool {
    let base = server.app.engine.info().model;
    let name = asked.request.model.strip_prefix(&base);
    name.is_some_and(|rest| rest.starts_with('@') || rest.starts_with(':'))
}

async fn whole(mut replies: Replies, head: Head) -> Result<Response, Problem> {
    let count = head.record.admission.turns.len();
    let mut choices: Vec<Value> = vec![Value::Null; count];
    let mut tokens: Vec<Vec<SampledToken>> = vec![Vec::new(); count];
    while let Some(event) = replies.next().await {
        match event {
            Event::Said {
                choice,
                tokens: more,
                ..
            } => tokens[choice].extend(more),
            Event::Over {
                choice,
                finish,
                message,
                tokens: more,
            } => {
                tokens[choice].extend(more);
                let tokens = std::mem::take(&mut tokens[choice]);
                choices[choice] = json!({
                    "index": choice, "message": answer(&message),
                    "logprobs": logprobs(&head, &tokens),
                    "finish_reason": finish_word(finish, &message),
                });
            }
            Event::Failed(problem) => return Err(problem),
        }
    }
    let mut body = head.object("chat.completion");
    body["choices"] = Value::Array(choices);
    let prompt = head.record.rendered.tokens.len();
    body["usage"] = usage(prompt, replies.sampled(), replies.cached());
    let mut response = json_response(StatusCode::OK, &body);
    head.mark(response.headers_mut());
    Ok(response)
}

/// The assistant's message in a whole answer.
fn answer(message: &Message) -> Value {
    // White space around calls is no answer.
    let silent = message.content.trim().is_empty() && !message.tool_calls.is_empty();
    let content = (!silent).then_some(&message.content);
    let mut out = json!({"role": "assistant", "content": content});
    if let Some(reasoning) = &message.reasoning {
        out["reasoning_content"] = json!(reasoning);
    }
    if !message.tool_calls.is_empty() {
        let call = |c: &chela_core::ToolCall| {
            json!({"id": c.id, "type": "function",
                   "function": {"name": c.name, "arguments": c.arguments}})
        };
        out["tool_calls"] = message.tool_calls.iter().map(call).collect();
    }
    out
}

/// One entry for each sampled token, at temperature 1 on the unshaped logits as its alternatives. An end id adds no bytes, so
/// the bytes of all entries are the text that was sampled.
fn logprobs(head: &Head, tokens: &[SampledToken]) -> Value {
    if !head.logprobs {
        return Value::Null;
    }
    let chat = &head.server.app.chat;
    json!({"content": tokens.iter().map(|t| logprob(chat, t)).collect::<Vec<_>>()})
}

fn logprob(chat: &Chat, token: &SampledToken) -> Value {
    let entry = |id: u32, logprob: f32| {
        let bytes = chat.token_bytes(id);
        json!({"token": String::from_utf8_lossy(&bytes), "logprob": logprob, "bytes": bytes})
    };
    let mut own = entry(token.id, token.logprob_t1);
    own["top_logprobs"] = token.top.iter().map(|(id, l)| entry(*id, *l)).collect();
    own
}

/// The state of one stream.
struct Stream {
    replies: Replies,
    head: Head,
    include_usage: bool,
    ready: VecDeque<Bytes>,
    over: bool,
}

fn streamed(replies: Replies, head: Head, include_usage: bool) -> Response {
    let mut response = Response::new(Body::empty());
    let headers = response.headers_mut();
    let kind = HeaderValue::from_static("text/event-stream; charset=utf-8");
    headers.insert(header::CONTENT_TYPE, kind);
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    head.mark(headers);
    let count = head.record.admission.turns.len();
    let mut stream = Stream {
        replies,
        head,
        include_usage,
        ready: VecDeque::new(),
        over: false,
    };
    for choice in 0..count {
        stream.delta(
            choice,
            json!({"role": "assistant", "content": ""}),
            &[],
            None,
        );
    }
    *response.body_mut() = Body::from_stream(futures_util::stream::unfold(
        stream,
        |mut stream| async move {
            let bytes = stream.next().await?;
            Some((Ok::<_, Infallible>(bytes), stream))
        },
    ));
    response
}

impl Stream {
    /// The next bytes; `None` = the stream is over.
    async fn next(&mut self) -> Option<Bytes> {
        let keep_alive = self.head.server.app.config.keep_alive;
        loop {
            if let Some(bytes) = self.ready.pop_front() {
                return Some(bytes);
            }
            if self.over {
                return None;
            }
            let event = tokio::select! {
                event = self.replies.next() => event,
                () = tokio::time::sleep(keep_alive) => {
                    // A real event: the idle timers of agents ignore comments.
                    let choice = self.replies.open().unwrap_or(0);
                    self.delta(choice, json!({}), &[], None);
                    continue;
                }
            };
            self.take(event);
        }
    }

    fn take(&mut self, event: Option<Event>) {
        match event {
            Some(Event::Said {
                choice,
                deltas,
                tokens,
            }) => {
                let mut tokens = tokens.as_slice();
                for delta in deltas {
                    self.delta(choice, delta_json(delta), tokens, None);
                    tokens = &[];
                }
            }
            Some(Event::Over {
                choice,
                finish,
                message,
                tokens,
            }) => {
                self.delta(choice, json!({}), &tokens, Some((finish, &message)));
            }
            // An error frame, and no sign of success after it.
            Some(Event::Failed(problem)) => {
                self.ready.push_back(frame(&problem.json()));
                self.over = true;
            }
            None => self.end(),
        }
    }

    fn delta(
        &mut self,
        choice: usize,
        delta: Value,
        tokens: &[SampledToken],
        over: Option<(FinishReason, &Message)>,
    ) {
        let reported = if tokens.is_empty() {
            Value::Null
        } else {
            logprobs(&self.head, tokens)
        };
        let finish = over.map(|(finish, message)| finish_word(finish, message));
        let mut chunk = self.head.object("chat.completion.chunk");
        chunk["choices"] = json!([{
            "index": choice, "delta": delta, "logprobs": reported, "finish_reason": finish,
        }]);
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        self.ready.push_back(frame(&chunk));
    }

    fn end(&mut self) {
        if self.include_usage {
            let mut chunk = self.head.object("chat.completion.chunk");
            chunk["choices"] = json!([]);
            let prompt = self.head.record.rendered.tokens.len();
            chunk["usage"] = usage(prompt, self.replies.sampled(), self.replies.cached());
            self.ready.push_back(frame(&chunk));
        }
        self.ready
            .push_back(Bytes::from_static(b"data: [DONE]\n\n"));
        self.over = true;
    }
}

fn delta_json(delta: AnswerDelta) -> Value {
    match delta {
        AnswerDelta::Content(text) => json!({"content": text}),
        AnswerDelta::Reasoning(text) => json!({"reasoning_content": text}),
        AnswerDelta::ToolCall {
            index,
            id,
            name,
            arguments,
        } => json!({"tool_calls": [{
            "index": index, "id": id, "type": "function",
            "function": {"name": name, "arguments": arguments},
        }]}),
    }
}
