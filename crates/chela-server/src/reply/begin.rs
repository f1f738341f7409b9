//! From a request to its running choices, whichever API it came by.

use super::{
    Exchange, Follow, Record, Replies, params, put, put_ignored, recorded_temperature, room,
};
use crate::{
    convert::{Asked, of_chat},
    problem::Problem,
    server::Server,
    tasks::aside,
    wire::invalid,
};
use axum::http::HeaderMap;
use chela_chat::{AnswerOptions, ChatError};
use chela_core::{Caller, EngineError, PolicyRef, Prompt, Refusal, Tool, TurnId};
use std::{sync::Arc, time::Instant};

/// Spreads turn ids, which are neighbours, over all seeds.
fn seed_of(turn: TurnId) -> u64 {
    turn.0.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// What every answer to one request says about it.
pub(super) struct Head {
    pub(super) server: Arc<Server>,
    pub(super) record: Arc<Record>,
    pub(super) ignored: Vec<String>,
    pub(super) logprobs: bool,
    /// The first choice's turn; ids in bodies hold it.
    pub(super) turn: TurnId,
    pub(super) model: String,
}

impl Head {
    /// Seconds since 1970.
    pub(super) fn created(&self) -> i64 {
        self.record.admission.arrived / 1000
    }

    /// What a script needs to score the reply.
    pub(super) fn marks(&self) -> HeaderMap {
        let mut map = HeaderMap::new();
        let headers = &mut map;
        let admission = &self.record.admission;
        let turns: Vec<String> = admission.turns.iter().map(ToString::to_string).collect();
        put(headers, "x-chela-session", admission.session.as_str());
        if !admission.private {
            put(headers, "x-chela-turn", &turns.join(","));
        }
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
        map
    }
}

/// Admits a request, renders it and starts all choices.
pub(super) async fn begin(
    server: &Arc<Server>,
    caller: &Caller,
    asked: Asked,
) -> Result<(Replies, Head), Problem> {
    let begun = Instant::now();
    let app = &server.app;
    let busy = server.enter(&caller.profile)?;
    let constraint = asked.request.sampling.constraint.as_ref();
    let grammar = constraint
        // Compiling takes long whatever the size.
        .map(|c| {
            aside(usize::MAX, || {
                app.chat.grammar(c, &asked.request.conversation)
            })
        })
        .transpose()
        .map_err(|e| match e {
            ChatError::Grammar { tool: None, error } => invalid(asked.form_field, error),
            other => of_chat(other),
        })?;
    let mut admission = app
        .recorder
        .admit(caller, &asked.request)
        .await
        .map_err(Problem::of_model)?;
    let reuse = admission.reuse.as_ref().map_err(String::as_str);
    let conversation = &asked.request.conversation;
    let size: usize = conversation.messages.iter().map(|m| m.content.len()).sum();
    let rendered = aside(size, || app.chat.render(conversation, reuse)).map_err(of_chat)?;
    let room = room(server, rendered.tokens.len())?;
    let sampling = &asked.request.sampling;
    let offered: Arc<[Tool]> = asked.request.conversation.tools.as_slice().into();
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
            app.engine.sample(
                policy,
                prompt,
                params(server, sampling, grammar.as_ref(), (seed, room)),
            )
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
            offered: offered.clone(),
            stops: sampling.stop.clone(),
            call_id_seed: turn.0,
        };
        streams.push((
            stream,
            Follow::Answer(Box::new(app.chat.answer_parser(options))),
        ));
    }
    let Some(&turn) = admission.turns.first() else {
        return Err(Refusal::Internal("a request was admitted without a turn".to_owned()).into());
    };
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
        prompt: record.rendered.tokens.len(),
        begun,
        _busy: busy,
    });
    let model = app.engine.info().model;
    let head = Head {
        server: server.clone(),
        record,
        ignored,
        logprobs,
        turn,
        model,
    };
    Ok((Replies::new(exchange, streams), head))
}

fn is_pinned(server: &Server, asked: &Asked) -> bool {
    let base = server.app.engine.info().model;
    let name = asked.request.model.strip_prefix(&base);
    name.is_some_and(|rest| rest.starts_with('@') || rest.starts_with(':'))
}
