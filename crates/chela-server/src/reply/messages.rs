//! Anthropic's messages, whole and streamed, and the count of a prompt's tokens.

use super::{
    Event, Replies,
    begin::{Head, begin},
    sse::{self, Blank, Counts, Out, Wire},
};
use crate::{
    convert::{Asked, UNPARSED, of_chat},
    problem::{Problem, json_response},
    server::Server,
};
use axum::{http::StatusCode, response::Response};
use chela_chat::AnswerDelta;
use chela_core::{Caller, FinishReason, Message, ToolCall};
use serde_json::{Value, json};
use std::sync::Arc;

/// Answers a message request.
pub(crate) async fn messages(
    server: Arc<Server>,
    caller: Caller,
    asked: Asked,
) -> Result<Response, Problem> {
    let stream = asked.stream;
    let (replies, head) = begin(&server, &caller, asked).await?;
    if stream {
        return Ok(streamed(replies, head));
    }
    whole(replies, head).await
}

/// Says how many tokens a request's prompt has. Nothing is sampled or recorded.
pub(crate) fn count_tokens(server: &Server, asked: &Asked) -> Result<Response, Problem> {
    let conversation = &asked.request.conversation;
    let rendered = server.app.chat.render(conversation, Err("counted"));
    let tokens = rendered.map_err(of_chat)?.tokens.len();
    Ok(json_response(
        StatusCode::OK,
        &json!({"input_tokens": tokens}),
    ))
}

/// The message around its content.
fn message(head: &Head, content: Value, (reason, stop): (Value, Value), counts: Counts) -> Value {
    json!({
        "id": format!("msg_{}", head.turn), "type": "message", "role": "assistant", "model": head.model,
        "content": content, "stop_reason": reason, "stop_sequence": stop, "usage": usage(head, counts),
    })
}

/// Tokens read from the cache are counted apart from those read anew.
fn usage(head: &Head, counts: Counts) -> Value {
    let prompt = head.record.rendered.tokens.len();
    json!({
        "input_tokens": prompt.saturating_sub(counts.cached), "output_tokens": counts.sampled,
        "cache_creation_input_tokens": 0, "cache_read_input_tokens": counts.cached,
    })
}

/// Why the reply ended, and by which stop string.
fn stop_reason(finish: FinishReason, message: &Message, stop: Option<&str>) -> (Value, Value) {
    let reason = match (finish, stop) {
        (FinishReason::Length, _) => "max_tokens",
        _ if !message.tool_calls.is_empty() => "tool_use",
        (FinishReason::Stopped, Some(stop)) => return (json!("stop_sequence"), json!(stop)),
        _ => "end_turn",
    };
    (json!(reason), Value::Null)
}

/// Clients check that thinking comes back as it was; here nothing hangs on it.
fn signature(head: &Head) -> String {
    format!("chela:{}", head.turn)
}

/// Arguments that are no JSON object come under a key of their own: a client must get an object, and the words must not be lost.
fn input(arguments: &str) -> Value {
    match serde_json::from_str(arguments) {
        Ok(Value::Object(map)) => Value::Object(map),
        _ => json!({ UNPARSED: arguments }),
    }
}

async fn whole(mut replies: Replies, head: Head) -> Result<Response, Problem> {
    let (finish, said, stop) = replies.sole().await?;
    let mut content = Vec::new();
    if let Some(reasoning) = &said.reasoning {
        content.push(
            json!({"type": "thinking", "thinking": reasoning, "signature": signature(&head)}),
        );
    }
    if !said.content.trim().is_empty() {
        content.push(json!({"type": "text", "text": said.content}));
    }
    let tool_use = |c: &ToolCall| json!({"type": "tool_use", "id": c.id, "name": c.name, "input": input(&c.arguments)});
    content.extend(said.tool_calls.iter().map(tool_use));
    let stop = stop_reason(finish, &said, stop.as_deref());
    let body = message(&head, json!(content), stop, Counts::of(&replies));
    let mut response = json_response(StatusCode::OK, &body);
    response.headers_mut().extend(head.marks());
    Ok(response)
}

/// The kind of block that is open.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
}

/// Blocks follow one another, each with its start, its deltas and its stop, numbered without gaps.
struct Blocks {
    head: Head,
    open: Option<Block>,
    /// Blocks begun.
    begun: usize,
    blank: Blank,
}

fn streamed(replies: Replies, head: Head) -> Response {
    let keep_alive = head.server.app.config.keep_alive;
    let marks = head.marks();
    let mut out = Out::default();
    let start = message(
        &head,
        json!([]),
        (Value::Null, Value::Null),
        Counts::default(),
    );
    out.named(&json!({"type": "message_start", "message": start}));
    let blocks = Blocks {
        head,
        open: None,
        begun: 0,
        blank: Blank::default(),
    };
    let mut response = sse::respond(Some(replies), blocks, keep_alive, out);
    response.headers_mut().extend(marks);
    response
}

impl Blocks {
    fn close(&mut self, out: &mut Out) {
        let Some(block) = self.open.take() else {
            return;
        };
        let index = self.begun - 1;
        if block == Block::Thinking {
            let delta = json!({"type": "signature_delta", "signature": signature(&self.head)});
            out.named(&json!({"type": "content_block_delta", "index": index, "delta": delta}));
        }
        out.named(&json!({"type": "content_block_stop", "index": index}));
    }

    fn begin(&mut self, block: &Value, out: &mut Out) -> usize {
        self.close(out);
        let index = self.begun;
        self.begun += 1;
        out.named(&json!({"type": "content_block_start", "index": index, "content_block": block}));
        index
    }

    fn text(&mut self, kind: Block, text: &str, out: &mut Out) {
        if self.open != Some(kind) {
            let block = match kind {
                Block::Thinking => json!({"type": "thinking", "thinking": "", "signature": ""}),
                Block::Text => json!({"type": "text", "text": ""}),
            };
            self.begin(&block, out);
            self.open = Some(kind);
        }
        let delta = match kind {
            Block::Thinking => json!({"type": "thinking_delta", "thinking": text}),
            Block::Text => json!({"type": "text_delta", "text": text}),
        };
        let index = self.begun - 1;
        out.named(&json!({"type": "content_block_delta", "index": index, "delta": delta}));
    }

    fn call(&mut self, (id, name, arguments): (&str, &str, &str), out: &mut Out) {
        let block = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
        let index = self.begin(&block, out);
        let delta =
            json!({"type": "input_json_delta", "partial_json": input(arguments).to_string()});
        out.named(&json!({"type": "content_block_delta", "index": index, "delta": delta}));
        out.named(&json!({"type": "content_block_stop", "index": index}));
    }
}

impl Wire for Blocks {
    fn event(&mut self, event: Event, counts: Counts, out: &mut Out) {
        match event {
            Event::Said { deltas, .. } => {
                for delta in deltas {
                    match delta {
                        AnswerDelta::Content(text) => {
                            let in_text = self.open == Some(Block::Text);
                            if let Some(text) = self.blank.with(text, in_text) {
                                self.text(Block::Text, &text, out);
                            }
                        }
                        AnswerDelta::Reasoning(text) => self.text(Block::Thinking, &text, out),
                        AnswerDelta::ToolCall {
                            id,
                            name,
                            arguments,
                            ..
                        } => self.call((&id, &name, &arguments), out),
                    }
                }
            }
            Event::Over {
                finish,
                message,
                stop,
                ..
            } => {
                self.close(out);
                let (reason, stop) = stop_reason(finish, &message, stop.as_deref());
                out.named(&json!({
                    "type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": stop},
                    "usage": usage(&self.head, counts),
                }));
            }
            Event::Failed(problem) => self.failed(&problem, out),
        }
    }

    fn quiet(&mut self, _: usize, out: &mut Out) {
        out.named(&json!({"type": "ping"}));
    }

    fn failed(&mut self, problem: &Problem, out: &mut Out) {
        out.named(&problem.anthropic());
    }

    fn end(&mut self, _: Counts, out: &mut Out) {
        out.named(&json!({"type": "message_stop"}));
    }
}
