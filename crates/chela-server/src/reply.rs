//! Chat completions: sampling, streaming, and sealing before the client is told that the reply is over.

use crate::{
    convert::{Asked, of_chat},
    problem::{Problem, json_response},
    server::{Phase, Server},
    tasks::Busy,
};
use axum::{
    body::{Body, Bytes},
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::Response,
};
use chela_chat::{AnswerDelta, AnswerOptions, AnswerParser, Rendered};
use chela_core::{
    Admission, Caller, Completion, EngineError, FinishReason, Message, PolicyRef, Priority, Prompt,
    Refusal, Reply, SampledToken, Sampling, SamplingEvent, SamplingParams, TurnId,
};
use futures_util::{StreamExt, stream::SelectAll};
use serde_json::{Value, json};
use std::sync::Arc;

/// Everything of one request that its choices share.
struct Shared {
    server: Arc<Server>,
    asked: Asked,
    admission: Admission,
    rendered: Rendered,
    busy: Busy,
}

/// One choice being made. Dropped before its end, it is sealed as aborted.
struct Choice {
    shared: Arc<Shared>,
    index: usize,
    parser: AnswerParser,
    reply: Reply,
    temperature: f32,
    cached: usize,
    sealed: bool,
    logprobs: Vec<Value>,
}

/// Below this, or with shaped logits, log-probs hold at temperature 1.
const SHARP: f32 = 0.1;

fn seed_of(turn: TurnId) -> u64 {
    turn.0.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn params(shared: &Asked, admission: &Admission, index: usize, server: &Server) -> SamplingParams {
    let s = &shared.request.sampling;
    let chat = &server.app.chat;
    let context = server.app.engine.info().context_length;
    SamplingParams {
        temperature: s.temperature.unwrap_or(1.0),
        top_p: s.top_p.unwrap_or(1.0),
        top_k: s.top_k.unwrap_or(0),
        min_p: s.min_p.unwrap_or(0.0),
        frequency_penalty: s.frequency_penalty.unwrap_or(0.0),
        presence_penalty: s.presence_penalty.unwrap_or(0.0),
        logit_bias: s.logit_bias.clone(),
        seed: s.seed.map_or_else(
            || seed_of(admission.turns[index]),
            |seed| seed.wrapping_add(index as u64),
        ),
        max_tokens: s
            .max_tokens
            .or(server.app.config.default_max_tokens)
            .unwrap_or(context),
        end_ids: chat.end_ids().to_vec(),
        top_logprobs: s.top_logprobs.unwrap_or(0),
        priority: Priority::User,
        guide: chat.stop_guide(&s.stop),
    }
}

fn recorded_temperature(asked: &Asked) -> f32 {
    let s = &asked.request.sampling;
    let shaped = s.frequency_penalty.unwrap_or(0.0) != 0.0
        || s.presence_penalty.unwrap_or(0.0) != 0.0
        || !s.logit_bias.is_empty();
    let t = s.temperature.unwrap_or(1.0);
    if shaped || t < SHARP { 1.0 } else { t }
}

impl Choice {
    /// A sampled token's deltas, and its log-prob entry when asked for.
    fn take(&mut self, token: &SampledToken) -> Vec<AnswerDelta> {
        self.reply.push(token);
        if self.shared.asked.logprobs {
            self.logprobs
                .push(logprob(&self.shared.server.app.chat, token));
        }
        self.parser.push(token.id)
    }

    /// The rest of the deltas; the turn is durable when this returns.
    async fn seal(&mut self, finish: FinishReason) -> Result<(Vec<AnswerDelta>, Message), Problem> {
        let (deltas, answer) = self.parser.finish();
        let message = answer.clone();
        self.sealed = true;
        if self.shared.admission.private {
            return Ok((deltas, message));
        }
        let work = self.sealing(finish, answer);
        // Whatever becomes of the client, the turn is written to its end.
        let receiver = self.shared.server.tasks.run(work);
        match receiver.await {
            Ok(Ok(_)) => Ok((deltas, message)),
            Ok(Err(refusal)) => Err(refusal.into()),
            Err(_) => Err(Refusal::Internal("the runtime is gone".to_owned()).into()),
        }
    }

    fn sealing(
        &mut self,
        finish: FinishReason,
        answer: Message,
    ) -> impl Future<Output = Result<TurnId, Refusal>> + Send + 'static {
        let shared = self.shared.clone();
        let completion = Completion {
            choice: self.index,
            prompt: shared.rendered.tokens.clone(),
            segment: shared.rendered.segment.clone(),
            reply: std::mem::take(&mut self.reply),
            temperature: self.temperature,
            finish,
            answer,
        };
        async move {
            let recorder = shared.server.app.recorder.clone();
            recorder
                .seal(&shared.admission, &shared.asked.request, completion)
                .await
        }
    }
}

impl Drop for Choice {
    fn drop(&mut self) {
        if self.sealed || self.shared.admission.private {
            return;
        }
        let (_, answer) = self.parser.finish();
        let work = self.sealing(FinishReason::Aborted, answer);
        drop(self.shared.server.tasks.run(async move {
            if let Err(error) = work.await {
                tracing::warn!(%error, "an aborted turn could not be kept");
            }
        }));
    }
}

fn logprob(chat: &chela_chat::Chat, token: &SampledToken) -> Value {
    let entry = |id: u32, logprob: f32| {
        let bytes = chat.token_bytes(id);
        json!({"token": String::from_utf8_lossy(&bytes), "logprob": logprob, "bytes": bytes})
    };
    let mut own = entry(token.id, token.logprob_t1);
    own["top_logprobs"] = token.top.iter().map(|(id, l)| entry(*id, *l)).collect();
    own
}

fn finish_word(finish: FinishReason, message: &Message) -> &'static str {
    match finish {
        FinishReason::Length => "length",
        _ if !message.tool_calls.is_empty() => "tool_calls",
        _ => "stop",
    }
}

/// Renders and starts all choices.
#[allow(clippy::type_complexity)] // the choices and one stream of their events
fn begin(
    server: &Arc<Server>,
    asked: Asked,
    admission: Admission,
) -> Result<(Arc<Shared>, Vec<Choice>, SelectAll<Numbered>), Problem> {
    let busy = server.open.enter();
    let reuse = admission.reuse.as_ref().map_err(String::as_str);
    let rendered = server
        .app
        .chat
        .render(&asked.request.conversation, reuse)
        .map_err(of_chat)?;
    let temperature = recorded_temperature(&asked);
    let mut streams = SelectAll::new();
    for index in 0..admission.turns.len() {
        let params = params(&asked, &admission, index, server);
        let prompt = Prompt {
            tokens: rendered.tokens.clone(),
        };
        let policy = PolicyRef::Version(admission.version.clone());
        let stream = server
            .app
            .engine
            .sample(policy, prompt, params)
            .map_err(Refusal::from)?;
        streams.push(Numbered { index, stream });
    }
    let shared = Arc::new(Shared {
        server: server.clone(),
        asked,
        admission,
        rendered,
        busy,
    });
    let choices = (0..shared.admission.turns.len())
        .map(|index| Choice {
            parser: server.app.chat.answer_parser(AnswerOptions {
                tools: shared.asked.tools,
                stops: shared.asked.request.sampling.stop.clone(),
                call_id_seed: shared.admission.turns[index].0,
            }),
            shared: shared.clone(),
            index,
            reply: Reply::default(),
            temperature,
            cached: 0,
            sealed: false,
            logprobs: Vec::new(),
        })
        .collect();
    Ok((shared, choices, streams))
}

/// A choice's events with its number.
struct Numbered {
    index: usize,
    stream: Sampling,
}

impl futures_core::Stream for Numbered {
    type Item = (usize, Result<SamplingEvent, EngineError>);

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        let index = self.index;
        self.stream
            .as_mut()
            .poll_next(context)
            .map(|e| e.map(|e| (index, e)))
    }
}

fn base(shared: &Shared, object: &str) -> Value {
    json!({
        "id": format!("chatcmpl-{}", shared.admission.turns[0]),
        "object": object,
        "created": shared.admission.arrived / 1000,
        "model": shared.server.app.engine.info().model,
    })
}

fn usage(prompt: usize, completion: usize, cached: usize) -> Value {
    json!({
        "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    })
}

/// Puts what a script needs to score the reply into the headers.
fn mark(headers: &mut HeaderMap, shared: &Shared) {
    let admission = &shared.admission;
    let turns: Vec<String> = admission.turns.iter().map(ToString::to_string).collect();
    let safe = |text: &str| {
        percent_encoding::utf8_percent_encode(text, percent_encoding::CONTROLS).to_string()
    };
    let mut put = |name: &'static str, text: String| {
        if let Ok(value) = HeaderValue::from_str(&safe(&text)) {
            headers.insert(name, value);
        }
    };
    put("x-chela-session", admission.session.to_string());
    put("x-chela-turn", turns.join(","));
    put("x-chela-policy-version", admission.version.to_string());
    let kind = if admission.private {
        "private"
    } else {
        admission.kind.as_str()
    };
    put("x-chela-turn-kind", kind.to_owned());
    if !shared.asked.ignored.is_empty() {
        put("x-chela-ignored", shared.asked.ignored.join(","));
    }
}

/// Answers a chat completion.
pub(crate) async fn chat(
    server: Arc<Server>,
    caller: Caller,
    asked: Asked,
) -> Result<Response, Problem> {
    let admission = server
        .app
        .recorder
        .admit(&caller, &asked.request)
        .await
        .map_err(Problem::of_model)?;
    let stream = asked.stream;
    let (shared, choices, streams) = begin(&server, asked, admission)?;
    if stream {
        return Ok(streamed(shared, choices, streams));
    }
    whole(shared, choices, streams).await
}

async fn whole(
    shared: Arc<Shared>,
    mut choices: Vec<Choice>,
    mut streams: SelectAll<Numbered>,
) -> Result<Response, Problem> {
    let mut phase = shared.server.phase.subscribe();
    let mut done: Vec<Option<Value>> = vec![None; choices.len()];
    let mut completion = 0;
    while done.iter().any(Option::is_none) {
        let event = tokio::select! {
            event = streams.next() => event,
            _ = phase.wait_for(|p| *p == Phase::Cut) => {
                return Err(Problem::unavailable("the server is stopping", 5));
            }
        };
        let Some((index, event)) = event else {
            return Err(failed(
                &mut choices,
                EngineError::Stopped("a reply broke off".to_owned()),
            )
            .await);
        };
        let choice = &mut choices[index];
        match event {
            Err(error) => return Err(failed(&mut choices, error).await),
            Ok(SamplingEvent::Started { cached_tokens, .. }) => choice.cached = cached_tokens,
            Ok(SamplingEvent::Token(token)) => drop(choice.take(&token)),
            Ok(SamplingEvent::Finished(finish)) => {
                completion += choice.reply.len();
                let (_, message) = choice.seal(finish).await?;
                done[index] = Some(choice_json(choice, finish, &message));
            }
        }
    }
    let mut body = base(&shared, "chat.completion");
    body["choices"] = done.into_iter().flatten().collect();
    body["usage"] = usage(shared.rendered.tokens.len(), completion, choices[0].cached);
    let mut response = json_response(StatusCode::OK, &body);
    mark(response.headers_mut(), &shared);
    Ok(response)
}

/// Seals what is open as failed.
async fn failed(choices: &mut [Choice], error: EngineError) -> Problem {
    for choice in choices.iter_mut().filter(|c| !c.sealed) {
        // A second failure changes nothing for the client.
        let _ = choice.seal(FinishReason::Failed).await;
    }
    Refusal::from(error).into()
}

fn choice_json(choice: &mut Choice, finish: FinishReason, message: &Message) -> Value {
    let mut said = json!({"role": "assistant", "content": message.content});
    if let Some(reasoning) = &message.reasoning {
        said["reasoning_content"] = json!(reasoning);
    }
    if !message.tool_calls.is_empty() {
        if message.content.is_empty() {
            said["content"] = Value::Null;
        }
        said["tool_calls"] = message
            .tool_calls
            .iter()
            .map(|c| {
                json!({"id": c.id, "type": "function",
                       "function": {"name": c.name, "arguments": c.arguments}})
            })
            .collect();
    }
    let mut out = json!({
        "index": choice.index, "message": said, "finish_reason": finish_word(finish, message),
        "logprobs": null,
    });
    if choice.shared.asked.logprobs {
        out["logprobs"] = json!({"content": std::mem::take(&mut choice.logprobs)});
    }
    out
}

fn frame(value: &Value) -> Bytes {
    Bytes::from(format!("data: {value}\n\n"))
}

/// The state of one stream.
struct Stream {
    shared: Arc<Shared>,
    choices: Vec<Choice>,
    streams: SelectAll<Numbered>,
    open: usize,
    completion: usize,
    ready: std::collections::VecDeque<Bytes>,
    over: bool,
}

fn streamed(shared: Arc<Shared>, choices: Vec<Choice>, streams: SelectAll<Numbered>) -> Response {
    let mut stream = Stream {
        open: choices.len(),
        shared: shared.clone(),
        choices,
        streams,
        completion: 0,
        ready: std::collections::VecDeque::new(),
        over: false,
    };
    for index in 0..stream.choices.len() {
        stream.delta(index, json!({"role": "assistant", "content": ""}), None);
    }
    let body = futures_util::stream::unfold(stream, |mut stream| async move {
        let bytes = stream.next().await?;
        Some((Ok::<_, std::convert::Infallible>(bytes), stream))
    });
    let mut response = Response::new(Body::from_stream(body));
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream; charset=utf-8"),
    );
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    mark(headers, &shared);
    response
}

impl Stream {
    fn delta(&mut self, index: usize, delta: Value, finish: Option<&str>) {
        let mut chunk = base(&self.shared, "chat.completion.chunk");
        let mut choice =
            json!({"index": index, "delta": delta, "finish_reason": finish, "logprobs": null});
        let entries = std::mem::take(&mut self.choices[index].logprobs);
        if !entries.is_empty() {
            choice["logprobs"] = json!({"content": entries});
        }
        chunk["choices"] = json!([choice]);
        if self.shared.asked.include_usage {
            chunk["usage"] = Value::Null;
        }
        self.ready.push_back(frame(&chunk));
    }

    fn deltas(&mut self, index: usize, deltas: Vec<AnswerDelta>) {
        for delta in deltas {
            let value = match delta {
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
            };
            self.delta(index, value, None);
        }
    }

    /// The next bytes; `None` = the stream is over.
    async fn next(&mut self) -> Option<Bytes> {
        let mut phase = self.shared.server.phase.subscribe();
        let keep_alive = self.shared.server.app.config.keep_alive;
        loop {
            if let Some(bytes) = self.ready.pop_front() {
                return Some(bytes);
            }
            if self.over {
                return None;
            }
            let event = tokio::select! {
                event = self.streams.next() => event,
                () = tokio::time::sleep(keep_alive) => {
                    // A real event: the idle timers of agents ignore comments.
                    self.delta(0, json!({}), None);
                    continue;
                }
                _ = phase.wait_for(|p| *p == Phase::Cut) => {
                    self.broken(Problem::unavailable("the server is stopping", 5));
                    continue;
                }
            };
            match event {
                Some((index, Ok(event))) => self.event(index, event).await,
                Some((_, Err(error))) => self.engine_failed(error).await,
                None => {
                    self.engine_failed(EngineError::Stopped("a reply broke off".to_owned()))
                        .await
                }
            }
        }
    }

    async fn event(&mut self, index: usize, event: SamplingEvent) {
        match event {
            SamplingEvent::Started { cached_tokens, .. } => {
                self.choices[index].cached = cached_tokens;
            }
            SamplingEvent::Token(token) => {
                let deltas = self.choices[index].take(&token);
                self.deltas(index, deltas);
            }
            SamplingEvent::Finished(finish) => {
                self.completion += self.choices[index].reply.len();
                match self.choices[index].seal(finish).await {
                    Ok((deltas, message)) => {
                        self.deltas(index, deltas);
                        self.delta(index, json!({}), Some(finish_word(finish, &message)));
                        self.open -= 1;
                        if self.open == 0 {
                            self.end();
                        }
                    }
                    Err(problem) => self.broken(problem),
                }
            }
        }
    }

    fn end(&mut self) {
        if self.shared.asked.include_usage {
            let mut chunk = base(&self.shared, "chat.completion.chunk");
            chunk["choices"] = json!([]);
            let prompt = self.shared.rendered.tokens.len();
            chunk["usage"] = usage(prompt, self.completion, self.choices[0].cached);
            self.ready.push_back(frame(&chunk));
        }
        self.ready
            .push_back(Bytes::from_static(b"data: [DONE]\n\n"));
        self.over = true;
    }

    async fn engine_failed(&mut self, error: EngineError) {
        let problem = failed(&mut self.choices, error).await;
        self.broken(problem);
    }

    /// An error frame and no sign of success after it.
    fn broken(&mut self, problem: Problem) {
        self.ready.push_back(frame(&problem.json()));
        self.over = true;
    }
}

impl Shared {
    /// Under way until dropped; read by no one.
    #[allow(dead_code)] // held for its Drop
    fn busy(&self) -> &Busy {
        &self.busy
    }
}
