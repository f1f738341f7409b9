//! Text completions: answered and forgotten. With `echo`, `logprobs` and `max_tokens: 0` they give the log-probs of a text,
//! which is how a model is checked from outside.

use super::{
    Event, Exchange, Follow, Replies, finish_word, params,
    plain::Plain,
    policy_of, put_ignored, room,
    sse::{self, Counts, Out, Wire},
    usage,
};
use crate::{
    convert::{TextAsked, of_chat},
    problem::{Problem, json_response},
    server::{Server, unix_seconds},
    tasks::{Busy, aside},
    wire::PromptText,
};
use axum::{http::StatusCode, response::Response};
use chela_chat::{AnswerDelta, Chat};
use chela_core::{
    Caller, Message, PolicyRef, Priority, Prompt, Refusal, SampledToken, Scored, TokenId, Want,
};
use serde_json::{Map, Value, json};
use std::{sync::Arc, time::Instant};

/// Answers a text completion.
pub(crate) async fn completions(
    server: Arc<Server>,
    caller: Caller,
    asked: TextAsked,
) -> Result<Response, Problem> {
    let busy = server.enter(&caller.profile)?;
    let policy = policy_of(&server, &caller, &asked.model)?;
    let mut prompts = Vec::with_capacity(asked.prompts.len());
    for text in &asked.prompts {
        prompts.push(read(&server, &policy, &asked, text).await?);
    }
    let text = Text {
        id: new_id()?,
        created: unix_seconds(),
        server,
        asked,
        prompts,
    };
    let replies = if text.asked.sampling.max_tokens == Some(0) {
        None
    } else {
        Some(begin(&text, &policy, busy)?)
    };
    if text.asked.stream {
        return Ok(streamed(text, replies));
    }
    whole(text, replies).await
}

fn new_id() -> Result<String, Problem> {
    let random = getrandom::u64().map_err(|e| Refusal::Internal(format!("no random id: {e}")))?;
    Ok(format!("cmpl-{random:016x}"))
}

/// One prompt, read.
struct Read {
    tokens: Vec<TokenId>,
    /// Its text, when it is echoed.
    echo: Option<String>,
    /// Log-probs of all its tokens but the first, when they are echoed with it.
    scored: Option<Scored>,
}

async fn read(
    server: &Server,
    policy: &PolicyRef,
    asked: &TextAsked,
    text: &PromptText,
) -> Result<Read, Problem> {
    let chat = &server.app.chat;
    let (tokens, shown) = match text {
        PromptText::Text(text) => {
            let tokens = aside(text.len(), || chat.encode(text)).map_err(of_chat)?;
            (tokens, Some(text.clone()))
        }
        PromptText::Ids(ids) => (ids.clone(), asked.echo.then(|| chat.decode(ids))),
    };
    if asked.sampling.max_tokens != Some(0) {
        room(server, tokens.len())?;
    }
    let top = asked.echo.then_some(asked.sampling.top_logprobs).flatten();
    let scored = match top {
        Some(top_k) if tokens.len() > 1 => {
            let top_k = usize::from(top_k);
            let want = Want {
                top_k,
                priority: Priority::User,
                ..Want::default()
            };
            let prompt = Prompt {
                tokens: tokens.clone(),
            };
            let scored = server
                .app
                .engine
                .score(policy.clone(), prompt, 1, want)
                .await;
            let scored = scored.map_err(|e| Problem::of_model(e.into()))?;
            if scored.logprobs.iter().any(|l| !l.is_finite()) {
                let why = "log-probs of the prompt are not finite".to_owned();
                return Err(Refusal::Internal(why).into());
            }
            Some(scored)
        }
        _ => None,
    };
    Ok(Read {
        tokens,
        echo: shown.filter(|_| asked.echo),
        scored,
    })
}

/// One request and what was read of it.
struct Text {
    id: String,
    created: i64,
    server: Arc<Server>,
    asked: TextAsked,
    prompts: Vec<Read>,
}

impl Text {
    fn object(&self, choices: Value) -> Value {
        let model = self.server.app.engine.info().model;
        json!({"id": self.id, "object": "text_completion", "created": self.created,
               "model": model, "choices": choices})
    }

    fn count(&self) -> usize {
        self.prompts.len() * self.asked.choices
    }

    fn prompt(&self, choice: usize) -> &Read {
        &self.prompts[choice / self.asked.choices]
    }

    /// What stands before the reply: the echoed prompt and its log-probs.
    fn opening(&self, choice: usize) -> (String, Columns) {
        let prompt = self.prompt(choice);
        let mut columns = Columns::default();
        let Some(echo) = &prompt.echo else {
            return (String::new(), columns);
        };
        if let Some(k) = self.asked.sampling.top_logprobs {
            columns.prompt(&self.server.app.chat, prompt, usize::from(k));
        }
        (echo.clone(), columns)
    }

    fn logprobs(&self, columns: Columns) -> Value {
        if self.asked.sampling.top_logprobs.is_some() {
            columns.json()
        } else {
            Value::Null
        }
    }

    fn usage(&self, counts: Counts) -> Value {
        let prompt = self.prompts.iter().map(|p| p.tokens.len()).sum();
        usage(prompt, counts)
    }
}

fn begin(text: &Text, policy: &PolicyRef, busy: [Busy; 2]) -> Result<Replies, Problem> {
    let server = &text.server;
    let sampling = &text.asked.sampling;
    let seed = match sampling.seed {
        Some(seed) => seed,
        None => getrandom::u64().map_err(|e| Refusal::Internal(format!("no seed: {e}")))?,
    };
    let mut streams = Vec::with_capacity(text.count());
    for choice in 0..text.count() {
        let prompt = Prompt {
            tokens: text.prompt(choice).tokens.clone(),
        };
        let room = room(server, prompt.tokens.len())?;
        // The same prompt gets the same replies wherever it stands.
        let seed = seed.wrapping_add((choice % text.asked.choices) as u64);
        let params = params(server, sampling, None, (seed, room));
        let stream = server.app.engine.sample(policy.clone(), prompt, params);
        let stream = stream.map_err(|e| Problem::of_model(e.into()))?;
        let plain = Plain::new(server.app.chat.decoder(), sampling.stop.clone());
        streams.push((stream, Follow::Plain(Box::new(plain))));
    }
    let exchange = Arc::new(Exchange {
        server: server.clone(),
        record: None,
        parallel: true,
        logprobs: sampling.top_logprobs.is_some(),
        // Each choice's own share, so that they add up.
        prompt: text.prompts.iter().map(|p| p.tokens.len()).sum::<usize>()
            / text.prompts.len().max(1),
        begun: Instant::now(),
        _busy: busy,
    });
    Ok(Replies::new(exchange, streams))
}

async fn whole(text: Text, mut replies: Option<Replies>) -> Result<Response, Problem> {
    let (mut texts, mut columns): (Vec<String>, Vec<Columns>) =
        (0..text.count()).map(|c| text.opening(c)).unzip();
    let mut finishes = vec!["length"; text.count()];
    while let Some(replies) = &mut replies {
        let Some(event) = replies.next().await else {
            break;
        };
        match event {
            Event::Said { choice, tokens, .. } => {
                columns[choice].sampled(&text.server.app.chat, &tokens);
            }
            Event::Over {
                choice,
                finish,
                message,
                tokens,
                ..
            } => {
                columns[choice].sampled(&text.server.app.chat, &tokens);
                texts[choice].push_str(&message.content);
                finishes[choice] = finish_word(finish, &message);
            }
            Event::Failed(problem) => return Err(problem),
        }
    }
    let rows = texts.into_iter().zip(columns).zip(finishes).enumerate();
    let choices: Vec<Value> = rows
        .map(|(index, ((said, columns), finish))| {
            json!({"index": index, "text": said, "logprobs": text.logprobs(columns),
                   "finish_reason": finish})
        })
        .collect();
    let mut body = text.object(Value::Array(choices));
    body["usage"] = text.usage(replies.as_ref().map_or_else(Counts::default, Counts::of));
    let mut response = json_response(StatusCode::OK, &body);
    put_ignored(response.headers_mut(), &text.asked.ignored);
    Ok(response)
}

/// What a stream says.
struct Chunks {
    text: Text,
    /// Characters said so far, of each choice.
    offsets: Vec<usize>,
}

fn streamed(text: Text, replies: Option<Replies>) -> Response {
    let keep_alive = text.server.app.config.keep_alive;
    let ignored = text.asked.ignored.clone();
    let count = text.count();
    let mut chunks = Chunks {
        text,
        offsets: vec![0; count],
    };
    let mut out = Out::default();
    for choice in 0..count {
        let (echo, columns) = chunks.text.opening(choice);
        let finish = replies.is_none().then_some("length");
        if !echo.is_empty() || finish.is_some() {
            chunks.say((choice, &echo), columns, finish, &mut out);
        }
    }
    let mut response = sse::respond(replies, chunks, keep_alive, out);
    put_ignored(response.headers_mut(), &ignored);
    response
}

impl Wire for Chunks {
    fn event(&mut self, event: Event, _: Counts, out: &mut Out) {
        match event {
            Event::Said {
                choice,
                deltas,
                tokens,
            } => {
                let texts = deltas.into_iter().filter_map(|d| match d {
                    AnswerDelta::Content(text) => Some(text),
                    AnswerDelta::Reasoning(_) | AnswerDelta::ToolCall { .. } => None,
                });
                let said: String = texts.collect();
                let columns = self.columns(choice, &tokens);
                self.say((choice, &said), columns, None, out);
            }
            Event::Over {
                choice,
                finish,
                message,
                tokens,
                ..
            } => {
                let columns = self.columns(choice, &tokens);
                let word = finish_word(finish, &Message::assistant(message.content));
                self.say((choice, ""), columns, Some(word), out);
            }
            Event::Failed(problem) => self.failed(&problem, out),
        }
    }

    fn quiet(&mut self, open: usize, out: &mut Out) {
        self.say((open, ""), Columns::default(), None, out);
    }

    fn failed(&mut self, problem: &Problem, out: &mut Out) {
        out.data(&problem.json());
    }

    fn end(&mut self, counts: Counts, out: &mut Out) {
        if self.text.asked.include_usage {
            let mut chunk = self.text.object(json!([]));
            chunk["usage"] = self.text.usage(counts);
            out.data(&chunk);
        }
        out.done();
    }
}

impl Chunks {
    fn columns(&self, choice: usize, tokens: &[SampledToken]) -> Columns {
        let mut columns = Columns {
            at: self.offsets[choice],
            ..Columns::default()
        };
        columns.sampled(&self.text.server.app.chat, tokens);
        columns
    }

    fn say(
        &mut self,
        (choice, said): (usize, &str),
        columns: Columns,
        finish: Option<&str>,
        out: &mut Out,
    ) {
        self.offsets[choice] = columns.at.max(self.offsets[choice]);
        let logprobs = if columns.tokens.is_empty() {
            Value::Null
        } else {
            self.text.logprobs(columns)
        };
        let mut chunk = self.text.object(json!([{
            "index": choice, "text": said, "logprobs": logprobs, "finish_reason": finish,
        }]));
        if self.text.asked.include_usage {
            chunk["usage"] = Value::Null;
        }
        out.data(&chunk);
    }
}

/// The legacy shape of log-probs: columns of one length, `[N]`.
#[derive(Default)]
struct Columns {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<Map<String, Value>>>,
    text_offset: Vec<usize>,
    at: usize,
}

impl Columns {
    fn push(&mut self, chat: &Chat, id: TokenId, logprob: Option<f32>, top: &[(TokenId, f32)]) {
        let name = |id| String::from_utf8_lossy(&chat.token_bytes(id)).into_owned();
        let token = name(id);
        self.text_offset.push(self.at);
        self.at += token.chars().count();
        self.tokens.push(token);
        self.token_logprobs.push(logprob);
        let top = || top.iter().map(|(id, l)| (name(*id), json!(l))).collect();
        self.top_logprobs.push(logprob.map(|_| top()));
    }

    /// The first token of a text has nothing before it, hence no log-prob.
    fn prompt(&mut self, chat: &Chat, prompt: &Read, k: usize) {
        for (i, &id) in prompt.tokens.iter().enumerate() {
            let row = i.checked_sub(1).zip(prompt.scored.as_ref());
            let logprob = row.and_then(|(row, scored)| scored.logprobs.get(row).copied());
            let top = row.and_then(|(row, scored)| {
                let (ids, numbers) = scored.top.as_ref()?;
                let range = row * k..(row + 1) * k;
                Some(
                    ids.get(range.clone())?
                        .iter()
                        .copied()
                        .zip(numbers.get(range)?.iter().copied()),
                )
            });
            let top: Vec<_> = top.into_iter().flatten().collect();
            self.push(chat, id, logprob, &top);
        }
    }

    fn sampled(&mut self, chat: &Chat, tokens: &[SampledToken]) {
        for token in tokens {
            self.push(chat, token.id, Some(token.logprob_t1), &token.top);
        }
    }

    fn json(&self) -> Value {
        json!({"tokens": self.tokens, "token_logprobs": self.token_logprobs,
               "top_logprobs": self.top_logprobs, "text_offset": self.text_offset})
    }
}
