//! From a request to its reply: sampling, following each choice, sealing before the client is told that a reply is over.

mod begin;
mod chat;
mod choice;
mod completions;
mod messages;
mod plain;
mod responses;
mod sse;

pub(crate) use chat::chat;
pub(crate) use choice::{Event, Exchange, Follow, Record, Replies};
pub(crate) use completions::completions;
pub(crate) use messages::{count_tokens, messages};
pub(crate) use responses::{given, responses, withdraw};

use crate::{problem::Problem, server::Server};
use axum::http::{HeaderMap, HeaderValue};
use chela_chat::Grammar;
use chela_core::{
    FinishReason, Message, PolicyRef, Priority, Refusal, SamplingParams, SamplingRequest,
};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use serde_json::{Value, json};

/// Below this, or with shaped logits, behavior log-probs hold at temperature 1.
const SHARP: f32 = 0.1;
/// Most field names told in `x-chela-ignored`.
const MOST_NAMES: usize = 40;
/// `%` too, so that what was encoded can be told from what was not.
const UNSAFE: &AsciiSet = &CONTROLS.add(b'%');

/// What the engine is asked for. `seed` counts when the request has none; `room` is what the context leaves.
fn params(
    server: &Server,
    s: &SamplingRequest,
    grammar: Option<&Grammar>,
    (seed, room): (u64, usize),
) -> SamplingParams {
    let limit = s
        .max_tokens
        .or(server.app.config.default_max_tokens)
        .unwrap_or(room);
    SamplingParams {
        temperature: s.temperature.unwrap_or(1.0),
        top_p: s.top_p.unwrap_or(1.0),
        top_k: s.top_k.unwrap_or(0),
        min_p: s.min_p.unwrap_or(0.0),
        frequency_penalty: s.frequency_penalty.unwrap_or(0.0),
        presence_penalty: s.presence_penalty.unwrap_or(0.0),
        logit_bias: s.logit_bias.clone(),
        seed,
        max_tokens: limit.clamp(1, room.max(1)),
        end_ids: server.app.chat.end_ids().to_vec(),
        top_logprobs: s.top_logprobs.unwrap_or(0),
        priority: Priority::User,
        guide: server.app.chat.guide(&s.stop, grammar),
        keep: true,
    }
}

/// The temperature at which the behavior log-probs of such a reply hold. A guide for stop strings shapes nothing.
fn recorded_temperature(s: &SamplingRequest) -> f32 {
    let shaped = s.frequency_penalty.unwrap_or(0.0) != 0.0
        || s.presence_penalty.unwrap_or(0.0) != 0.0
        || !s.logit_bias.is_empty()
        || s.constraint.is_some();
    let t = s.temperature.unwrap_or(1.0);
    if shaped || t < SHARP { 1.0 } else { t }
}

/// Tokens left for a reply; none is a refusal.
fn room(server: &Server, prompt: usize) -> Result<usize, Problem> {
    let context = server.app.engine.info().context_length;
    if prompt >= context {
        return Err(Refusal::ContextLength { prompt, context }.into());
    }
    Ok(context - prompt)
}

fn finish_word(finish: FinishReason, message: &Message) -> &'static str {
    match finish {
        FinishReason::Length => "length",
        _ if !message.tool_calls.is_empty() => "tool_calls",
        _ => "stop",
    }
}

fn usage(prompt: usize, counts: sse::Counts) -> Value {
    json!({
        "prompt_tokens": prompt, "completion_tokens": counts.sampled,
        "total_tokens": prompt + counts.sampled,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
        "completion_tokens_details": {"reasoning_tokens": counts.reasoned},
    })
}

/// Sets a header whatever the text: what a header cannot hold is percent-encoded.
fn put(headers: &mut HeaderMap, name: &'static str, text: &str) {
    let safe = utf8_percent_encode(text, UNSAFE).to_string();
    if let Ok(value) = HeaderValue::from_str(&safe) {
        headers.insert(name, value);
    }
}

/// Names the fields that had no effect.
fn put_ignored(headers: &mut HeaderMap, ignored: &[String]) {
    if !ignored.is_empty() {
        let names: Vec<&str> = ignored
            .iter()
            .take(MOST_NAMES)
            .map(String::as_str)
            .collect();
        put(headers, "x-chela-ignored", &names.join(","));
    }
}

/// The weights that a model's name asks for, where no recorder decides it.
fn policy_of(
    server: &Server,
    caller: &chela_core::Caller,
    name: &str,
) -> Result<PolicyRef, Problem> {
    let base = server.app.engine.info().model;
    if name.strip_suffix(":side").is_some_and(|n| n == base) {
        return Ok(PolicyRef::Base);
    }
    let pinned = name.rsplit_once('@').filter(|(n, _)| *n == base);
    let Some(number) = pinned.and_then(|(_, number)| number.parse::<u64>().ok()) else {
        return Ok(PolicyRef::Served(caller.profile.clone()));
    };
    let known = number == 0
        || server
            .app
            .control
            .policy(&caller.profile)?
            .versions
            .iter()
            .any(|v| v.version.number == number);
    if !known {
        let why = format!(
            "model {name}: profile {} has no version {number}",
            caller.profile
        );
        return Err(Problem::of_model(Refusal::NotFound(why)));
    }
    let profile = caller.profile.clone();
    Ok(PolicyRef::Version(chela_core::PolicyVersion {
        profile,
        number,
    }))
}
