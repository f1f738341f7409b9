//! Chat completions, whole and streamed.

use super::{
    Event, Replies,
    begin::{Head, begin},
    finish_word,
    sse::{self, Counts, Out, Wire},
    usage,
};
use crate::{
    convert::Asked,
    problem::{Problem, json_response},
    server::Server,
};
use axum::{http::StatusCode, response::Response};
use chela_chat::{AnswerDelta, Chat};
use chela_core::{Caller, FinishReason, Message, SampledToken};
use serde_json::{Value, json};
use std::sync::Arc;

impl Head {
    fn object(&self, object: &str) -> Value {
        json!({"id": format!("chatcmpl-{}", self.turn), "object": object,
               "created": self.created(), "model": self.model})
    }
}

/// Answers a chat completion.
pub(crate) async fn chat(
    server: Arc<Server>,
    caller: Caller,
    asked: Asked,
) -> Result<Response, Problem> {
    let (stream, include_usage) = (asked.stream, asked.include_usage);
    let (replies, head) = begin(&server, &caller, asked).await?;
    if stream {
        return Ok(streamed(replies, head, include_usage));
    }
    whole(replies, head).await
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
                ..
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
    body["usage"] = usage(prompt, sse::Counts::of(&replies));
    let mut response = json_response(StatusCode::OK, &body);
    response.headers_mut().extend(head.marks());
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

struct Chunks {
    head: Head,
    include_usage: bool,
}

fn streamed(replies: Replies, head: Head, include_usage: bool) -> Response {
    let keep_alive = head.server.app.config.keep_alive;
    let count = head.record.admission.turns.len();
    let marks = head.marks();
    let chunks = Chunks {
        head,
        include_usage,
    };
    let mut out = Out::default();
    for choice in 0..count {
        let delta = json!({"role": "assistant", "content": ""});
        chunks.delta(choice, delta, (&[], None), &mut out);
    }
    let mut response = sse::respond(Some(replies), chunks, keep_alive, out);
    response.headers_mut().extend(marks);
    response
}

impl Chunks {
    fn delta(
        &self,
        choice: usize,
        delta: Value,
        (tokens, over): (&[SampledToken], Option<(FinishReason, &Message)>),
        out: &mut Out,
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
        out.data(&chunk);
    }
}

impl Wire for Chunks {
    fn event(&mut self, event: Event, _: Counts, out: &mut Out) {
        match event {
            Event::Said {
                choice,
                deltas,
                tokens,
            } => {
                let mut tokens = tokens.as_slice();
                for delta in deltas {
                    self.delta(choice, delta_json(delta), (tokens, None), out);
                    tokens = &[];
                }
            }
            Event::Over {
                choice,
                finish,
                message,
                tokens,
                ..
            } => {
                let over = Some((finish, &message));
                self.delta(choice, json!({}), (&tokens, over), out);
            }
            Event::Failed(problem) => self.failed(&problem, out),
        }
    }

    fn quiet(&mut self, open: usize, out: &mut Out) {
        self.delta(open, json!({}), (&[], None), out);
    }

    fn failed(&mut self, problem: &Problem, out: &mut Out) {
        out.data(&problem.json());
    }

    fn end(&mut self, counts: Counts, out: &mut Out) {
        if self.include_usage {
            let mut chunk = self.head.object("chat.completion.chunk");
            chunk["choices"] = json!([]);
            let prompt = self.head.record.rendered.tokens.len();
            chunk["usage"] = usage(prompt, counts);
            out.data(&chunk);
        }
        out.done();
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
