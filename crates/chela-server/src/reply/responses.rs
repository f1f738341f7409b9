//! OpenAI's responses, whole and streamed, and one that was given before.

use super::{
    Event, Replies,
    begin::{Head, begin},
    sse::{self, Blank, Counts, Out, Wire},
};
use crate::{
    convert::{ResponsesAsked, turn_of, unspaced},
    problem::{Problem, json_response},
    server::Server,
};
use axum::{http::StatusCode, response::Response};
use chela_chat::AnswerDelta;
use chela_core::{
    Caller, FinishReason, Message, Refusal, Role, SessionClaim, ToolCall, TurnId, TurnMark,
    TurnStory,
};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Answers a response request.
pub(crate) async fn responses(
    server: Arc<Server>,
    caller: Caller,
    mut request: ResponsesAsked,
) -> Result<Response, Problem> {
    if let Some(previous) = request.previous {
        go_on(&server, &caller, &mut request, previous)?;
    }
    let ResponsesAsked {
        asked,
        echo,
        stored,
        ..
    } = request;
    let stream = asked.stream;
    let (replies, head) = begin(&server, &caller, asked).await?;
    let shape = Shape {
        turn: head.turn,
        stored,
        created: head.created(),
        model: head.model.clone(),
        prompt: head.record.rendered.tokens.len(),
        echo,
    };
    if stream {
        return Ok(streamed(replies, &head, shape));
    }
    whole(replies, &head, shape).await
}

/// Puts the earlier conversation before the new items. New instructions replace those of the earlier response.
fn go_on(
    server: &Server,
    caller: &Caller,
    request: &mut ResponsesAsked,
    previous: TurnId,
) -> Result<(), Problem> {
    let missing = |p: Refusal| match p {
        Refusal::NotFound(why) => Problem {
            param: Some("previous_response_id".to_owned()),
            ..Refusal::NotFound(why).into()
        },
        other => other.into(),
    };
    let story = server.app.control.turn(caller, previous);
    let story = story.and_then(standing).map_err(missing)?;
    let asked = &mut request.asked.request;
    let claimed = asked.hints.session.as_ref().map(|c| c.source);
    if claimed == Some("body previous_response_id") {
        asked.hints.session = Some(SessionClaim {
            source: "body previous_response_id",
            id: story.turn.session.as_str().to_owned(),
        });
    }
    let new = std::mem::take(&mut asked.conversation.messages);
    let (instructions, items): (Vec<Message>, Vec<Message>) = match new.split_first() {
        Some((first, rest)) if request.echo.contains_key("instructions") => {
            (vec![first.clone()], rest.to_vec())
        }
        _ => (Vec::new(), new),
    };
    let mut earlier = story.turn.messages;
    if !instructions.is_empty() && earlier.first().is_some_and(|m| m.role == Role::System) {
        earlier.remove(0);
    }
    asked.conversation.messages = instructions
        .into_iter()
        .chain(earlier)
        .chain([story.turn.answer])
        .chain(items)
        .collect();
    Ok(())
}

/// A response that was given before.
pub(crate) fn given(server: &Server, caller: &Caller, id: &str) -> Result<Response, Problem> {
    let none = || Refusal::NotFound(format!("there is no response {id:?}"));
    let turn = turn_of(id).ok_or_else(none)?;
    let turn = standing(server.app.control.turn(caller, turn)?)?.turn;
    let shape = Shape {
        turn: turn.id,
        stored: true,
        created: turn.completed / 1000,
        model: server.app.engine.info().model,
        prompt: turn.prompt.len(),
        echo: Map::new(),
    };
    let counts = Counts {
        sampled: turn.reply.len(),
        ..Counts::default()
    };
    let status = match turn.finish {
        FinishReason::Failed => Status::Failed,
        FinishReason::Aborted => Status::Cancelled,
        finish => Status::of(finish),
    };
    let body = shape.response(status, items(shape.turn, &turn.answer, None), Some(counts));
    Ok(json_response(StatusCode::OK, &body))
}

/// Takes a response back: it is given no more, gone on from no more, and never trained on.
pub(crate) async fn withdraw(
    server: &Server,
    caller: &Caller,
    id: &str,
) -> Result<Response, Problem> {
    let none = || Refusal::NotFound(format!("there is no response {id:?}"));
    let turn = turn_of(id).ok_or_else(none)?;
    let control = &server.app.control;
    standing(control.turn(caller, turn)?)?;
    control.withdraw(caller, turn).await?;
    let body = json!({"id": id, "object": "response", "deleted": true});
    Ok(json_response(StatusCode::OK, &body))
}

/// A turn that was not withdrawn.
fn standing(story: TurnStory) -> Result<TurnStory, Refusal> {
    match story.mark {
        Some(TurnMark::Withdrawn) => Err(Refusal::NotFound(format!(
            "the response {} was deleted",
            story.turn.id
        ))),
        _ => Ok(story),
    }
}

/// What a response says beside its output.
struct Shape {
    turn: TurnId,
    /// Its id leads back to it.
    stored: bool,
    created: i64,
    model: String,
    prompt: usize,
    echo: Map<String, Value>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Status {
    InProgress,
    Completed,
    Incomplete,
    Failed,
    Cancelled,
}

impl Status {
    fn of(finish: FinishReason) -> Self {
        match finish {
            FinishReason::Length => Self::Incomplete,
            _ => Self::Completed,
        }
    }

    fn word(self) -> &'static str {
        match self {
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
            Self::Incomplete => "incomplete",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

impl Shape {
    fn response(&self, status: Status, output: Vec<Value>, counts: Option<Counts>) -> Value {
        let details =
            (status == Status::Incomplete).then(|| json!({"reason": "max_output_tokens"}));
        let usage = counts.map(|counts| {
            json!({
                "input_tokens": self.prompt,
                "input_tokens_details": {"cached_tokens": counts.cached},
                "output_tokens": counts.sampled,
                "output_tokens_details": {"reasoning_tokens": counts.reasoned},
                "total_tokens": self.prompt + counts.sampled,
            })
        });
        let mut body = json!({
            "id": format!("resp_{}{}", if self.stored { "" } else { "unstored_" }, self.turn), "object": "response", "created_at": self.created,
            "status": status.word(), "error": null, "incomplete_details": details,
            "instructions": null, "max_output_tokens": null, "model": self.model, "output": output,
            "parallel_tool_calls": true, "previous_response_id": null,
            "reasoning": {"effort": null, "summary": null}, "store": true, "temperature": 1.0,
            "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [],
            "top_p": 1.0, "truncation": "disabled", "usage": usage, "user": null, "metadata": {},
        });
        for (name, value) in &self.echo {
            body[name.as_str()] = value.clone();
        }
        body
    }
}

fn reasoning_item(turn: TurnId, text: Option<&str>) -> Value {
    let content: Vec<Value> = text
        .map(|t| json!({"type": "reasoning_text", "text": t}))
        .into_iter()
        .collect();
    json!({"type": "reasoning", "id": format!("rs_{turn}"), "summary": [], "content": content})
}

fn message_item(turn: TurnId, text: Option<&str>) -> Value {
    let content: Vec<Value> = text.map(text_part).into_iter().collect();
    let status = if text.is_some() {
        "completed"
    } else {
        "in_progress"
    };
    json!({"type": "message", "id": format!("msg_{turn}"), "status": status, "role": "assistant",
           "content": content})
}

fn text_part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

fn call_item(tools: Option<&Value>, call: &ToolCall, done: bool) -> Value {
    let (arguments, status) = if done {
        (call.arguments.as_str(), "completed")
    } else {
        ("", "in_progress")
    };
    let (space, name) = unspaced(tools, &call.name);
    let mut item = json!({"type": "function_call", "id": format!("fc_{}", call.id), "call_id": call.id,
        "name": name, "arguments": arguments, "status": status});
    if let Some(space) = space {
        item["namespace"] = json!(space);
    }
    item
}

/// The answer as items.
fn items(turn: TurnId, answer: &Message, tools: Option<&Value>) -> Vec<Value> {
    let mut all = Vec::new();
    if let Some(text) = &answer.reasoning {
        all.push(reasoning_item(turn, Some(text)));
    }
    if !answer.content.trim().is_empty() {
        all.push(message_item(turn, Some(&answer.content)));
    }
    all.extend(answer.tool_calls.iter().map(|c| call_item(tools, c, true)));
    all
}

async fn whole(mut replies: Replies, head: &Head, shape: Shape) -> Result<Response, Problem> {
    let (finish, said, _) = replies.sole().await?;
    let counts = Some(Counts::of(&replies));
    let output = items(shape.turn, &said, shape.echo.get("tools"));
    let body = shape.response(Status::of(finish), output, counts);
    let mut response = json_response(StatusCode::OK, &body);
    response.headers_mut().extend(head.marks());
    Ok(response)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Text,
}

/// Items follow one another, each added, filled and done; every event has the next sequence number.
struct Items {
    shape: Shape,
    sequence: u64,
    done: Vec<Value>,
    open: Option<(Kind, String)>,
    /// How the reply ended, once it has.
    finish: Option<FinishReason>,
    blank: Blank,
}

fn streamed(replies: Replies, head: &Head, shape: Shape) -> Response {
    let keep_alive = head.server.app.config.keep_alive;
    let marks = head.marks();
    let mut items = Items {
        shape,
        sequence: 0,
        done: Vec::new(),
        open: None,
        finish: None,
        blank: Blank::default(),
    };
    let mut out = Out::default();
    for kind in ["response.created", "response.in_progress"] {
        items.progress(kind, &mut out);
    }
    let mut response = sse::respond(Some(replies), items, keep_alive, out);
    response.headers_mut().extend(marks);
    response
}

impl Items {
    fn send(&mut self, kind: &str, mut event: Value, out: &mut Out) {
        event["type"] = json!(kind);
        event["sequence_number"] = json!(self.sequence);
        self.sequence += 1;
        out.named(&event);
    }

    fn progress(&mut self, kind: &str, out: &mut Out) {
        let response = self
            .shape
            .response(Status::InProgress, self.done.clone(), None);
        self.send(kind, json!({"response": response}), out);
    }

    fn item_id(&self, kind: Kind) -> String {
        let turn = self.shape.turn;
        match kind {
            Kind::Reasoning => format!("rs_{turn}"),
            Kind::Text => format!("msg_{turn}"),
        }
    }

    /// A part of the item that is open.
    fn part(&self, kind: Kind, more: Value) -> Value {
        let mut event = json!({"item_id": self.item_id(kind), "output_index": self.done.len(), "content_index": 0});
        if let (Some(event), Value::Object(more)) = (event.as_object_mut(), more) {
            event.extend(more);
        }
        event
    }

    fn text(&mut self, kind: Kind, text: &str, out: &mut Out) {
        if self.open.as_ref().is_none_or(|(k, _)| *k != kind) {
            self.close(out);
            let turn = self.shape.turn;
            let (item, part) = match kind {
                Kind::Reasoning => (
                    reasoning_item(turn, None),
                    json!({"type": "reasoning_text", "text": ""}),
                ),
                Kind::Text => (message_item(turn, None), text_part("")),
            };
            let index = self.done.len();
            let added = json!({"output_index": index, "item": item});
            self.send("response.output_item.added", added, out);
            let part = self.part(kind, json!({"part": part}));
            self.send("response.content_part.added", part, out);
            self.open = Some((kind, String::new()));
        }
        if let Some((_, all)) = &mut self.open {
            all.push_str(text);
        }
        let (name, more) = match kind {
            Kind::Reasoning => ("response.reasoning_text.delta", json!({"delta": text})),
            Kind::Text => (
                "response.output_text.delta",
                json!({"delta": text, "logprobs": []}),
            ),
        };
        let event = self.part(kind, more);
        self.send(name, event, out);
    }

    fn close(&mut self, out: &mut Out) {
        let Some((kind, text)) = self.open.take() else {
            return;
        };
        let turn = self.shape.turn;
        let (name, part, item) = match kind {
            Kind::Reasoning => (
                "response.reasoning_text.done",
                json!({"type": "reasoning_text", "text": text}),
                reasoning_item(turn, Some(&text)),
            ),
            Kind::Text => (
                "response.output_text.done",
                text_part(&text),
                message_item(turn, Some(&text)),
            ),
        };
        let event = self.part(kind, json!({"text": text}));
        self.send(name, event, out);
        let event = self.part(kind, json!({"part": part}));
        self.send("response.content_part.done", event, out);
        self.item_done(item, out);
    }

    fn item_done(&mut self, item: Value, out: &mut Out) {
        let event = json!({"output_index": self.done.len(), "item": item});
        self.send("response.output_item.done", event, out);
        self.done.push(item);
    }

    fn call(&mut self, call: &ToolCall, out: &mut Out) {
        self.close(out);
        let index = self.done.len();
        let item = |done| call_item(self.shape.echo.get("tools"), call, done);
        let (begun, whole) = (item(false), item(true));
        let added = json!({"output_index": index, "item": begun});
        self.send("response.output_item.added", added, out);
        let id = format!("fc_{}", call.id);
        let delta = json!({"item_id": id, "output_index": index, "delta": call.arguments});
        self.send("response.function_call_arguments.delta", delta, out);
        let done = json!({"item_id": id, "output_index": index, "name": whole["name"],
                          "arguments": call.arguments});
        self.send("response.function_call_arguments.done", done, out);
        self.item_done(whole, out);
    }
}

impl Wire for Items {
    fn event(&mut self, event: Event, _: Counts, out: &mut Out) {
        match event {
            Event::Said { deltas, .. } => {
                for delta in deltas {
                    let in_text = matches!(self.open, Some((Kind::Text, _)));
                    match delta {
                        AnswerDelta::Content(text) => {
                            if let Some(text) = self.blank.with(text, in_text) {
                                self.text(Kind::Text, &text, out);
                            }
                        }
                        AnswerDelta::Reasoning(text) => self.text(Kind::Reasoning, &text, out),
                        AnswerDelta::ToolCall {
                            id,
                            name,
                            arguments,
                            ..
                        } => {
                            let call = ToolCall {
                                id,
                                name,
                                arguments,
                            };
                            self.call(&call, out);
                        }
                    }
                }
            }
            Event::Over { finish, .. } => {
                self.close(out);
                self.finish = Some(finish);
            }
            Event::Failed(problem) => self.failed(&problem, out),
        }
    }

    fn quiet(&mut self, _: usize, out: &mut Out) {
        self.progress("response.in_progress", out);
    }

    fn failed(&mut self, problem: &Problem, out: &mut Out) {
        // What was said stays said.
        self.close(out);
        let mut response = self.shape.response(Status::Failed, self.done.clone(), None);
        response["error"] = json!({"code": "server_error", "message": problem.message});
        self.send("response.failed", json!({"response": response}), out);
    }

    fn end(&mut self, counts: Counts, out: &mut Out) {
        let status = self.finish.map_or(Status::Completed, Status::of);
        let output = std::mem::take(&mut self.done);
        let response = self.shape.response(status, output, Some(counts));
        let kind = format!("response.{}", status.word());
        self.send(&kind, json!({"response": response}), out);
    }
}
