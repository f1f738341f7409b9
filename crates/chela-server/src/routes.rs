//! What each route does, behind the check of who may call it.

use crate::{
    access::{Access, Does, Route},
    convert,
    problem::{Problem, json_response},
    reply,
    server::{Phase, Server},
    wire::{Fields, invalid},
};
use axum::{
    body::{Body, to_bytes},
    extract::Request,
    http::{HeaderMap, HeaderValue, StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use chela_core::{
    Caller, ExportRow, ExportStyle, Feedback, FeedbackTarget, Message, PolicyAction, PolicyRef,
    PolicyVersion, PolicyView, Profile, Prompt, Refusal, SampleState, Scope, SessionId,
    SessionRecord, TurnId, TurnStory, VersionState, Want,
};
use serde_json::{Value, json};
use std::sync::Arc;

/// Answers a request on a route of the table.
pub(crate) async fn dispatch(
    route: &'static Route,
    server: Arc<Server>,
    request: Request,
) -> Response {
    match answer(route, server, request).await {
        Ok(response) => response,
        Err(problem) => problem.into_response(),
    }
}

fn key(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers
        .get(header::AUTHORIZATION)
        .and_then(|v| v.to_str().ok());
    let bearer = bearer.and_then(|v| {
        let (scheme, key) = v.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    });
    bearer
        .or_else(|| headers.get("x-api-key").and_then(|v| v.to_str().ok()))
        .filter(|k| !k.is_empty())
}

fn authorise(access: Access, caller: &Caller) -> Result<(), Problem> {
    let refuse = |why: &str| Err(Refusal::Forbidden(why.to_owned()).into());
    match access {
        Access::Open | Access::Chat => Ok(()),
        Access::Feedback if caller.session.is_none() && caller.scope >= Scope::Feedback => Ok(()),
        Access::Feedback => {
            refuse("this needs a key of scope feedback; `chela key new --scope feedback` makes one")
        }
        Access::Admin if caller.session.is_none() && caller.scope == Scope::Admin => Ok(()),
        Access::Admin => refuse("this needs the admin key; `chela key admin` prints it"),
        Access::SessionKey if caller.session.is_some() => Ok(()),
        Access::SessionKey => {
            refuse("this needs a session's own key, as /rl/start_session gives it")
        }
    }
}

async fn answer(
    route: &'static Route,
    server: Arc<Server>,
    request: Request,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    if route.access == Access::Open {
        return open(route.does, &server, &parts.headers, &parts.uri);
    }
    let caller = server.app.gatekeeper.identify(key(&parts.headers))?;
    authorise(route.access, &caller)?;
    let body = if route.method == "POST" {
        read(&server, &parts.headers, body).await?
    } else {
        Vec::new()
    };
    let generates = matches!(route.does, Does::ChatCompletions | Does::Completions);
    if generates && server.phase() != Phase::Running {
        return Err(Problem::unavailable("the server is stopping", 5));
    }
    match route.does {
        Does::ChatCompletions => {
            let vocabulary = server.app.engine.info().vocabulary;
            let asked = convert::chat(&parts.headers, &body, vocabulary)?;
            known_model(&server, &asked.request.model)?;
            reply::chat(server, caller, asked).await
        }
        Does::Completions => completions(&server, &caller, &body).await,
        _ => control(route.does, &server, &caller, (&parts.uri, &body)).await,
    }
}

async fn read(server: &Server, headers: &HeaderMap, body: Body) -> Result<Vec<u8>, Problem> {
    let kind = headers
        .get(header::CONTENT_TYPE)
        .and_then(|v| v.to_str().ok())
        .unwrap_or_default();
    if !kind
        .trim_start()
        .to_ascii_lowercase()
        .starts_with("application/json")
    {
        return Err(Problem::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "send the body as application/json",
        ));
    }
    let limit = server.app.config.body_limit;
    match to_bytes(body, limit).await {
        Ok(bytes) => Ok(bytes.to_vec()),
        Err(_) => Err(Problem::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("the body is larger than {limit} bytes, or broke off"),
        )),
    }
}

fn known_model(server: &Server, name: &str) -> Result<(), Problem> {
    let base = server.app.engine.info().model;
    let listed = name.is_empty()
        || name == base
        || name.starts_with(&format!("{base}@"))
        || name == format!("{base}:side");
    if server.app.config.strict_models && !listed {
        return Err(Problem::of_model(Refusal::NotFound(format!(
            "there is no model {name:?}; /v1/models lists them"
        ))));
    }
    Ok(())
}

fn open(does: Does, server: &Server, headers: &HeaderMap, uri: &Uri) -> Result<Response, Problem> {
    match does {
        Does::Health => {
            server
                .app
                .engine
                .health()
                .map_err(|e| Problem::unavailable(e, 5))?;
            server
                .app
                .control
                .health()
                .map_err(|e| Problem::unavailable(e, 30))?;
            Ok(json_response(StatusCode::OK, &json!({"status": "ok"})))
        }
        Does::Ready => {
            if server.phase() != Phase::Running {
                return Err(Problem::unavailable("the server is stopping", 5));
            }
            server
                .app
                .engine
                .health()
                .map_err(|e| Problem::unavailable(e, 5))?;
            server
                .app
                .control
                .health()
                .map_err(|e| Problem::unavailable(e, 30))?;
            Ok(json_response(StatusCode::OK, &json!({"status": "ready"})))
        }
        Does::Page => {
            let mut response = Response::new(Body::from(include_str!("page.html")));
            let headers = response.headers_mut();
            headers.insert(
                header::CONTENT_TYPE,
                HeaderValue::from_static("text/html; charset=utf-8"),
            );
            headers.insert(
                header::CONTENT_SECURITY_POLICY,
                HeaderValue::from_static("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"),
            );
            Ok(response)
        }
        Does::Models => Ok(json_response(
            StatusCode::OK,
            &json!({"object": "list", "data": models(server, headers)}),
        )),
        _ => {
            let id = uri.path().rsplit_once("models/").map_or("", |(_, id)| id);
            let id = decoded(id);
            let found = models(server, headers)
                .into_iter()
                .find(|m| m["id"] == json!(id));
            found
                .map(|m| json_response(StatusCode::OK, &m))
                .ok_or_else(|| {
                    Problem::of_model(Refusal::NotFound(format!(
                        "there is no model {id:?}; /v1/models lists them"
                    )))
                })
        }
    }
}

fn decoded(text: &str) -> String {
    percent_encoding::percent_decode_str(text)
        .decode_utf8_lossy()
        .into_owned()
}

fn models(server: &Server, headers: &HeaderMap) -> Vec<Value> {
    let info = server.app.engine.info();
    let row = |id: String| {
        json!({"id": id, "object": "model", "created": server.started, "owned_by": "chela",
               "context_length": info.context_length, "max_model_len": info.context_length})
    };
    let mut all = vec![row(info.model.clone()), row(format!("{}:side", info.model))];
    // Without a key only the base models are listed; a probe sends none.
    if let Some(key) = key(headers)
        && let Ok(caller) = server.app.gatekeeper.identify(Some(key))
        && let Ok(view) = server.app.control.policy(&caller.profile)
    {
        all.extend(
            view.versions
                .iter()
                .map(|v| row(format!("{}@{}", info.model, v.version.number))),
        );
    }
    all
}

/// `/v1/completions`: answered and forgotten. `echo` with `logprobs` and `max_tokens: 0` gives the log-probs of a text.
async fn completions(server: &Server, caller: &Caller, body: &[u8]) -> Result<Response, Problem> {
    let fields = Fields::parse(body)?;
    let info = server.app.engine.info();
    let name = fields.text("model")?.unwrap_or_default().to_owned();
    known_model(server, &name)?;
    let policy = if name == format!("{}:side", info.model) {
        PolicyRef::Base
    } else if let Some(number) = name.strip_prefix(&format!("{}@", info.model)) {
        let number = number.parse().map_err(|_| {
            Problem::of_model(Refusal::NotFound(format!("there is no model {name:?}")))
        })?;
        PolicyRef::Version(PolicyVersion {
            profile: caller.profile.clone(),
            number,
        })
    } else {
        PolicyRef::Served(caller.profile.clone())
    };
    let tokens = prompt_ids(server, &fields, info.vocabulary)?;
    let most = fields.integer("max_tokens", 0, i64::MAX)?.unwrap_or(16) as usize;
    let echo = fields.flag("echo")?;
    let want_logprobs = fields.integer("logprobs", 0, 20)?;
    if most == 0 && !echo {
        return Err(invalid("max_tokens", "0 makes sense with echo only"));
    }
    if most > 0 && echo {
        return Err(invalid("echo", "is supported with max_tokens: 0"));
    }
    if most > 0 && want_logprobs.is_some() {
        return Err(invalid(
            "logprobs",
            "is supported with echo and max_tokens: 0; chat completions report them for replies",
        ));
    }
    let created = server.started;
    let head = json!({"id": "cmpl-unrecorded", "object": "text_completion", "created": created, "model": info.model});
    let (text, logprobs, finish, completion) = if most == 0 {
        let text = server.app.chat.decode(&tokens);
        let numbers = echoed(server, policy, &tokens).await?;
        let entries = want_logprobs.is_some().then(|| {
            let pieces: Vec<String> = tokens
                .iter()
                .map(|t| String::from_utf8_lossy(&server.app.chat.token_bytes(*t)).into_owned())
                .collect();
            json!({"tokens": pieces, "token_logprobs": numbers, "top_logprobs": null})
        });
        (text, entries, "length", 0)
    } else {
        let (text, finish, n) = generated(server, &fields, policy, (&tokens, most)).await?;
        (text, None, finish, n)
    };
    let mut out = head;
    out["choices"] =
        json!([{"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}]);
    out["usage"] = json!({"prompt_tokens": tokens.len(), "completion_tokens": completion, "total_tokens": tokens.len() + completion});
    Ok(json_response(StatusCode::OK, &out))
}

fn prompt_ids(server: &Server, fields: &Fields, vocabulary: usize) -> Result<Vec<u32>, Problem> {
    let ids = match fields.get("prompt") {
        Some(Value::String(text)) => server.app.chat.encode(text).map_err(convert::of_chat)?,
        Some(Value::Array(list)) => list
            .iter()
            .map(|v| {
                let id = v.as_u64().filter(|id| (*id as usize) < vocabulary);
                id.map(|id| id as u32).ok_or_else(|| {
                    invalid(
                        "prompt",
                        format!("token ids are integers below {vocabulary}"),
                    )
                })
            })
            .collect::<Result<_, _>>()?,
        _ => return Err(invalid("prompt", "must be a text or a list of token ids")),
    };
    if ids.is_empty() {
        return Err(invalid("prompt", "is empty"));
    }
    Ok(ids)
}

async fn echoed(server: &Server, policy: PolicyRef, tokens: &[u32]) -> Result<Vec<Value>, Problem> {
    let mut numbers = vec![Value::Null];
    if tokens.len() > 1 {
        let want = Want {
            priority: chela_core::Priority::User,
            ..Want::default()
        };
        let prompt = Prompt {
            tokens: tokens.to_vec(),
        };
        let scored = server
            .app
            .engine
            .score(policy, prompt, 1, want)
            .await
            .map_err(Refusal::from)?;
        numbers.extend(scored.logprobs.iter().map(|l| json!(l)));
    }
    Ok(numbers)
}

async fn generated(
    server: &Server,
    fields: &Fields,
    policy: PolicyRef,
    (tokens, most): (&[u32], usize),
) -> Result<(String, &'static str, usize), Problem> {
    use futures_util::StreamExt;
    let params = chela_core::SamplingParams {
        temperature: fields.number("temperature", 0.0, 2.0)?.unwrap_or(1.0),
        seed: fields.integer("seed", i64::MIN, i64::MAX)?.unwrap_or(0) as u64,
        max_tokens: most,
        end_ids: server.app.chat.end_ids().to_vec(),
        ..Default::default()
    };
    let prompt = Prompt {
        tokens: tokens.to_vec(),
    };
    let mut stream = server
        .app
        .engine
        .sample(policy, prompt, params)
        .map_err(Refusal::from)?;
    let mut ids = Vec::new();
    let mut finish = "stop";
    while let Some(event) = stream.next().await {
        match event.map_err(Refusal::from)? {
            chela_core::SamplingEvent::Token(token) => ids.push(token.id),
            chela_core::SamplingEvent::Finished(chela_core::FinishReason::Length) => {
                finish = "length"
            }
            _ => {}
        }
    }
    Ok((server.app.chat.decode(&ids), finish, ids.len()))
}

fn query(uri: &Uri, name: &str) -> Option<String> {
    uri.query()?.split('&').find_map(|pair| {
        let (key, value) = pair.split_once('=')?;
        (key == name).then(|| decoded(&value.replace('+', " ")))
    })
}

fn profile_of(name: Option<&str>) -> Result<Profile, Problem> {
    name.map_or_else(
        || Ok(Profile::default()),
        |n| Profile::new(n).map_err(|e| Refusal::from(e).into()),
    )
}

fn last_segment(uri: &Uri) -> String {
    decoded(uri.path().rsplit('/').next().unwrap_or_default())
}

async fn control(
    does: Does,
    server: &Server,
    caller: &Caller,
    (uri, body): (&Uri, &[u8]),
) -> Result<Response, Problem> {
    let control = &server.app.control;
    let ok = |value: Value| Ok(json_response(StatusCode::OK, &value));
    let session_id =
        || SessionId::new(last_segment(uri)).map_err(|e| Problem::from(Refusal::from(e)));
    match does {
        Does::Sessions => {
            let limit = query(uri, "limit")
                .and_then(|l| l.parse().ok())
                .unwrap_or(200)
                .min(1000);
            let all: Vec<Value> = control
                .sessions(caller, limit)?
                .iter()
                .map(session_row)
                .collect();
            ok(json!({"sessions": all}))
        }
        Does::Session => {
            let (record, turns) = control.session(caller, &session_id()?)?;
            let mut row = session_row(&record);
            row["turns"] = turns.iter().map(turn_json).collect();
            ok(row)
        }
        Does::Forget => {
            ok(json!({"forgotten_turns": control.forget_session(caller, &session_id()?).await?}))
        }
        Does::Policy => ok(policy_json(
            &control.policy(&profile_of(query(uri, "profile").as_deref())?)?,
        )),
        Does::Version => {
            let number: u64 = last_segment(uri)
                .parse()
                .map_err(|_| invalid("version", "must be a number"))?;
            let view = control.policy(&profile_of(query(uri, "profile").as_deref())?)?;
            let found = view.versions.iter().find(|v| v.version.number == number);
            let found =
                found.ok_or_else(|| Refusal::NotFound(format!("there is no version {number}")))?;
            ok(version_json(found))
        }
        Does::Status => ok(status_json(&control.status(caller)?)),
        Does::EndSession => {
            let count = control.end_session(caller).await?;
            ok(json!({"message": "success", "interaction_count": count}))
        }
        _ => posted(does, server, caller, &Fields::parse(body)?).await,
    }
}

async fn posted(
    does: Does,
    server: &Server,
    caller: &Caller,
    fields: &Fields,
) -> Result<Response, Problem> {
    let control = &server.app.control;
    let ok = |value: Value| Ok(json_response(StatusCode::OK, &value));
    match does {
        Does::StartSession => {
            let profile = profile_of(fields.text("profile")?)?;
            let task = fields.text("task_id")?.map(str::to_owned);
            let key = fields.text("api_key")?.map(str::to_owned);
            let (session, key) = control.start_session(profile, task, key).await?;
            ok(json!({"session_id": session.as_str(), "api_key": key}))
        }
        Does::SetReward => {
            let reward = fields.number("reward", f64::from(f32::MIN), f64::from(f32::MAX))?;
            let reward = reward.ok_or_else(|| invalid("reward", "is missing"))?;
            let turn = fields
                .text("interaction_id")?
                .map(|id| turn_of("interaction_id", id))
                .transpose()?;
            control.set_reward(caller, reward, turn).await?;
            ok(json!({"message": "success"}))
        }
        Does::Export => {
            let id = fields
                .text("session_id")?
                .ok_or_else(|| invalid("session_id", "is missing"))?;
            let session = SessionId::new(id).map_err(Refusal::from)?;
            let discount = fields.number("discount", 0.0, 1.0)?.unwrap_or(1.0);
            let style = match fields.text("style")?.unwrap_or("individual") {
                "individual" => ExportStyle::Individual,
                "concat" => ExportStyle::Concat,
                other => {
                    return Err(invalid(
                        "style",
                        format!("{other:?}: use individual or concat"),
                    ));
                }
            };
            let rows: Vec<Value> = control
                .export(&session, discount, style)?
                .iter()
                .map(export_json)
                .collect();
            ok(json!({"rows": rows}))
        }
        Does::Feedback => {
            let (turn, reward) = control.feedback(caller, feedback(fields)?).await?;
            ok(json!({"turn": turn.to_string(), "verdict": reward}))
        }
        _ => {
            let profile = profile_of(fields.text("profile")?)?;
            let version = fields.integer("version", 0, i64::MAX)?.map(|v| v as u64);
            let action = match does {
                Does::Rollback => PolicyAction::Rollback(version),
                Does::Promote => {
                    PolicyAction::Promote(version.ok_or_else(|| invalid("version", "is missing"))?)
                }
                Does::Pause => PolicyAction::Pause,
                _ => PolicyAction::Resume,
            };
            ok(policy_json(&control.steer(profile, action).await?))
        }
    }
}

/// A turn's id, with or without what an API puts before it.
fn turn_of(field: &str, text: &str) -> Result<TurnId, Problem> {
    let bare = text.strip_prefix("chatcmpl-").unwrap_or(text);
    TurnId::parse(bare)
        .ok_or_else(|| Refusal::NotFound(format!("{field}: {text:?} is no turn known here")).into())
}

fn feedback(fields: &Fields) -> Result<Feedback, Problem> {
    let turn = fields.text("turn")?.map(|t| turn_of("turn", t));
    let turn = match turn {
        Some(turn) => Some(turn?),
        None => fields
            .text("completion_id")?
            .map(|t| turn_of("completion_id", t))
            .transpose()?,
    };
    let target = match (turn, fields.text("session")?) {
        (Some(turn), _) => FeedbackTarget::Turn(turn),
        (None, Some(id)) => FeedbackTarget::Session(SessionId::new(id).map_err(Refusal::from)?),
        (None, None) => return Err(invalid("turn", "name a turn, a completion_id or a session")),
    };
    let score = fields.number("score", f64::from(f32::MIN), f64::from(f32::MAX))?;
    let thumb = match fields.text("thumb")? {
        None => None,
        Some("up") => Some(1.0),
        Some("down") => Some(-1.0),
        Some(other) => return Err(invalid("thumb", format!("{other:?}: use up or down"))),
    };
    let text = fields.text("text")?.map(str::to_owned);
    let edited = fields.text("edited")?.map(str::to_owned);
    let score = score.or(thumb);
    if score.is_none() && text.is_none() && edited.is_none() {
        return Err(invalid("score", "give a score, a thumb, a text or an edit"));
    }
    Ok(Feedback {
        target,
        score,
        text,
        edited,
    })
}

fn export_json(row: &ExportRow) -> Value {
    let mask: Vec<u8> = row.loss_mask.iter().map(|m| u8::from(*m)).collect();
    json!({"interaction_id": row.turn.to_string(), "input_ids": row.input_ids, "loss_mask": mask,
           "logprobs": row.logprobs, "versions": row.versions, "rewards": row.reward, "hints": row.hints})
}

fn session_row(r: &SessionRecord) -> Value {
    json!({"id": r.id.as_str(), "profile": r.profile.as_str(), "turns": r.turns, "last_active": r.last_active,
           "ended": r.ended.as_ref().map(|(at, why)| json!({"at": at, "why": why}))})
}

fn message_json(m: &Message) -> Value {
    let calls: Vec<Value> = m
        .tool_calls
        .iter()
        .map(|c| json!({"id": c.id, "name": c.name, "arguments": c.arguments}))
        .collect();
    json!({"role": m.role.as_str(), "content": m.content, "reasoning": m.reasoning, "tool_calls": calls})
}

fn turn_state(story: &TurnStory) -> String {
    if let Some(mark) = &story.mark {
        return format!("{mark:?}").to_lowercase();
    }
    match story.samples.last().map(|(_, _, state)| state) {
        Some(SampleState::Pending) => "pending".to_owned(),
        Some(SampleState::Leased) => "leased".to_owned(),
        Some(SampleState::Consumed(v)) => format!("trained into version {}", v.number),
        Some(SampleState::Dropped(why)) => format!("dropped: {why}"),
        None => match (story.verdicts.last(), &story.no_verdict, &story.next) {
            (Some((_, _, Some(why))), _, _) => format!("judged, no sample: {why}"),
            (Some(_), _, _) => "judged".to_owned(),
            (None, Some(why), _) => format!("no verdict: {why}"),
            (None, None, Some(_)) => "waits for a judge".to_owned(),
            (None, None, None) => "waits for what comes next".to_owned(),
        },
    }
}

fn turn_json(story: &TurnStory) -> Value {
    let t = &story.turn;
    let verdicts: Vec<Value> = story
        .verdicts
        .iter()
        .map(|(id, v, no_sample)| {
            let votes: Vec<Value> = v
                .votes
                .iter()
                .map(|v| json!({"raw": v.raw, "score": v.score.map(chela_core::Score::value), "hint": v.hint}))
                .collect();
            json!({"id": id.0, "judge": v.judge, "source": v.source.as_str(), "reward": v.reward, "hints": v.hints,
                   "evidence": v.evidence, "votes": votes, "no_sample": no_sample})
        })
        .collect();
    let next: Option<Vec<Value>> = story
        .next
        .as_ref()
        .map(|n| n.messages.iter().map(message_json).collect());
    json!({"id": t.id.to_string(), "parent": t.parent.map(|p| p.to_string()), "kind": t.kind.as_str(), "reason": t.reason,
           "version": t.version.number, "messages": t.messages.iter().map(message_json).collect::<Vec<_>>(),
           "reply": message_json(&t.answer), "next_state": next, "verdicts": verdicts, "state": turn_state(story),
           "prompt_tokens": t.prompt.len(), "reply_tokens": t.reply.len(), "created": t.created})
}

fn version_json(v: &chela_core::VersionRecord) -> Value {
    let state = match &v.state {
        VersionState::Candidate => "candidate".to_owned(),
        VersionState::Served => "served".to_owned(),
        VersionState::Superseded => "superseded".to_owned(),
        VersionState::Rejected(why) => format!("rejected({why})"),
        VersionState::RolledBack => "rolled_back".to_owned(),
    };
    let metrics: serde_json::Map<String, Value> = v
        .metrics
        .iter()
        .map(|(n, x)| (n.clone(), json!(x)))
        .collect();
    let receipt = v.receipt.as_ref().map(|r| {
        json!({"weights_hash": r.weights_hash, "engine_canary": r.engine_canary, "learner_canary": r.learner_canary})
    });
    json!({"version": v.version.number, "parent": v.parent, "steps": v.steps, "state": state, "receipt": receipt,
           "gate": null, "samples": v.samples.iter().map(|s| s.0).collect::<Vec<_>>(), "metrics": metrics, "created": v.created})
}

fn policy_json(view: &PolicyView) -> Value {
    json!({"profile": view.profile.as_str(), "served": view.served, "paused": view.paused,
           "versions": view.versions.iter().map(version_json).collect::<Vec<_>>()})
}

fn status_json(s: &chela_core::StatusView) -> Value {
    let turns: Vec<Value> = s
        .counts
        .turns
        .iter()
        .map(|(k, why, n)| json!({"kind": k.as_str(), "reason": why, "count": n}))
        .collect();
    let map = |rows: &[(String, u64)]| -> Value {
        Value::Object(rows.iter().map(|(k, n)| (k.clone(), json!(n))).collect())
    };
    json!({"model": s.model, "context_length": s.context_length, "learning": s.learning, "notices": s.notices,
           "turns": turns, "samples": map(&s.counts.samples), "verdicts": map(&s.counts.verdicts),
           "unjudged": s.counts.unjudged, "sessions": s.counts.sessions, "disk_bytes": s.counts.bytes,
           "judging": s.judging, "judge_errors": map(&s.judge_errors),
           "profiles": s.profiles.iter().map(policy_json).collect::<Vec<_>>()})
}
