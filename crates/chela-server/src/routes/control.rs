//! Sessions, feedback, versions, status, and AReaL's three calls.

use super::{
    decoded, last_segment,
    views::{
        base_version_json, diff_json, export_json, forgetting_json, lesson_json, policy_json,
        session_row, status_json, turn_json, version_json,
    },
};
use crate::{
    access::Does,
    problem::{Problem, json_response},
    server::Server,
    tasks::aside,
    wire::{Fields, invalid},
};
use axum::{
    http::{StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use chela_core::{
    Caller, ExportStyle, Feedback, FeedbackTarget, ForgetRequest, Group, PolicyAction, Profile,
    Refusal, SessionId, TurnId,
};
use serde_json::{Value, json};

const DEFAULT_SESSIONS: usize = 200;
const MOST_SESSIONS: usize = 1000;

pub(super) async fn answer(
    does: Does,
    server: &Server,
    caller: &Caller,
    (uri, body): (&Uri, &[u8]),
) -> Result<Response, Problem> {
    let value = match does {
        Does::Sessions | Does::Session | Does::Forget | Does::EndNamed => {
            sessions(does, server, caller, uri).await?
        }
        Does::Policy | Does::Version => policy(does, server, caller, uri)?,
        Does::AdapterFile => return adapter_file(server, caller, uri),
        Does::Diff => diff(server, caller, uri).await?,
        Does::Status => status_json(&server.app.control.status(caller)?),
        _ => {
            let fields = if body.is_empty() {
                Fields::none()
            } else {
                Fields::parse(body)?
            };
            posted(does, server, caller, &fields).await?
        }
    };
    Ok(json_response(StatusCode::OK, &value))
}

fn query(uri: &Uri, name: &str) -> Option<String> {
    uri.query()?.split('&').find_map(|pair| {
        let (key, value) = pair.split_once('=')?;
        (key == name).then(|| decoded(&value.replace('+', " ")))
    })
}

/// The one named, else the caller's.
fn profile_of(name: Option<&str>, caller: &Caller) -> Result<Profile, Problem> {
    match name {
        None => Ok(caller.profile.clone()),
        Some(name) => Profile::new(name).map_err(|e| Refusal::from(e).into()),
    }
}

fn session_of(text: impl Into<String>) -> Result<SessionId, Problem> {
    SessionId::new(text).map_err(|e| Refusal::from(e).into())
}

async fn sessions(
    does: Does,
    server: &Server,
    caller: &Caller,
    uri: &Uri,
) -> Result<Value, Problem> {
    let control = &server.app.control;
    if does == Does::Sessions {
        let limit = match query(uri, "limit") {
            None => DEFAULT_SESSIONS,
            Some(text) => text
                .parse()
                .map_err(|_| invalid("limit", "must be a whole number"))?,
        };
        let all = control.sessions(caller, limit.min(MOST_SESSIONS))?;
        return Ok(json!({"sessions": all.iter().map(session_row).collect::<Vec<_>>()}));
    }
    if does == Does::EndNamed {
        let path = uri.path();
        let path = path.strip_suffix("/end").unwrap_or(path);
        let id = session_of(decoded(path.rsplit('/').next().unwrap_or_default()))?;
        control.end_named(caller, &id).await?;
        return Ok(json!({"id": id.as_str(), "ended": true}));
    }
    let id = session_of(last_segment(uri))?;
    if does == Does::Forget {
        let what = ForgetRequest::Session(id, None);
        return Ok(forgetting_json(&control.forget(caller, what, false).await?));
    }
    let (record, turns) = control.session(caller, &id)?;
    let mut row = session_row(&record);
    row["turns"] = turns.iter().map(turn_json).collect();
    Ok(row)
}

fn policy(does: Does, server: &Server, caller: &Caller, uri: &Uri) -> Result<Value, Problem> {
    let profile = profile_of(query(uri, "profile").as_deref(), caller)?;
    let view = server.app.control.policy(&profile)?;
    if does == Does::Policy {
        return Ok(policy_json(&view));
    }
    let text = last_segment(uri);
    let number = number_of("version", &text)?;
    if number == 0 {
        return Ok(base_version_json(view.served == 0));
    }
    let found = view.versions.iter().find(|v| v.version.number == number);
    let missing = || Refusal::NotFound(format!("profile {profile} has no version {number}"));
    let mut shown = version_json(found.ok_or_else(missing)?);
    let lessons = server.app.control.lessons(&profile, number)?;
    shown["lessons"] = lessons.iter().map(lesson_json).collect();
    Ok(shown)
}

fn number_of(field: &str, text: &str) -> Result<u64, Problem> {
    text.parse()
        .map_err(|_| invalid(field, "must be a whole number"))
}

async fn diff(server: &Server, caller: &Caller, uri: &Uri) -> Result<Value, Problem> {
    let control = &server.app.control;
    let profile = profile_of(query(uri, "profile").as_deref(), caller)?;
    let number = |name: &str| {
        query(uri, name)
            .map(|text| number_of(name, &text))
            .transpose()
    };
    let view = control.policy(&profile)?;
    // What is served against the base, unless something else is asked for.
    let (from, to) = (
        number("from")?.unwrap_or(0),
        number("to")?.unwrap_or(view.served),
    );
    Ok(diff_json(&control.diff(profile, from, to).await?))
}

/// One of PEFT's two files, as it lies there.
fn adapter_file(server: &Server, caller: &Caller, uri: &Uri) -> Result<Response, Problem> {
    let mut parts = uri.path().rsplit('/');
    let (file, number) = (
        parts.next().unwrap_or_default(),
        parts.next().unwrap_or_default(),
    );
    let kind = match file {
        "adapter_config.json" => "application/json",
        "adapter_model.safetensors" => "application/octet-stream",
        other => {
            let why = format!(
                "there is no file {other:?}; adapter_config.json and adapter_model.safetensors can be had"
            );
            return Err(Refusal::NotFound(why).into());
        }
    };
    let profile = profile_of(query(uri, "profile").as_deref(), caller)?;
    let folder = server
        .app
        .control
        .adapter(&profile, number_of("version", number)?)?;
    let path = folder.join(file);
    // Tens of megabytes: the thread's other tasks go on elsewhere.
    let read = aside(usize::MAX, || std::fs::read(&path));
    let bytes =
        read.map_err(|e| Problem::from(Refusal::NotFound(format!("{}: {e}", path.display()))))?;
    Ok(([(header::CONTENT_TYPE, kind)], bytes).into_response())
}

async fn posted(
    does: Does,
    server: &Server,
    caller: &Caller,
    fields: &Fields,
) -> Result<Value, Problem> {
    let control = &server.app.control;
    match does {
        Does::StartSession => {
            let profile = profile_of(fields.text("profile")?, caller)?;
            let task = fields.text("task_id")?.map(str::to_owned);
            let key = fields.filled("api_key")?.map(str::to_owned);
            let (session, key) = control.start_session(profile, task, key).await?;
            Ok(json!({"session_id": session.as_str(), "api_key": key}))
        }
        Does::SetReward => set_reward(server, caller, fields).await,
        Does::EndSession => {
            let count = control.end_session(caller).await?;
            Ok(json!({"message": "success", "interaction_count": count}))
        }
        Does::Export => export(server, fields),
        Does::Feedback => {
            let (turn, reward) = control.feedback(caller, feedback(fields)?).await?;
            Ok(json!({"turn": turn.to_string(), "verdict": reward}))
        }
        Does::ForgetAny => {
            let what = forget_request(fields)?;
            let dry = fields.flag("dry_run")?;
            Ok(forgetting_json(&control.forget(caller, what, dry).await?))
        }
        _ => {
            let profile = profile_of(fields.text("profile")?, caller)?;
            let version = fields.integer("version", 0, i64::MAX)?.map(|v| v as u64);
            let action = match does {
                Does::Rollback => PolicyAction::Rollback(version),
                Does::Promote => {
                    PolicyAction::Promote(version.ok_or_else(|| invalid("version", "is missing"))?)
                }
                Does::Pause => PolicyAction::Pause,
                Does::Import => {
                    let path = fields.filled("path")?.ok_or_else(|| {
                        invalid(
                            "path",
                            "is missing: the folder of an adapter on the server's machine",
                        )
                    })?;
                    PolicyAction::Import(path.into())
                }
                _ => PolicyAction::Resume,
            };
            Ok(policy_json(&control.steer(profile, action).await?))
        }
    }
}

fn forget_request(fields: &Fields) -> Result<ForgetRequest, Problem> {
    let turn = fields
        .filled("turn")?
        .map(|t| turn_of("turn", t))
        .transpose()?;
    let session = fields.filled("session")?.map(session_of).transpose()?;
    let profile = fields.filled("profile")?.map(Profile::new).transpose();
    match (turn, session, profile.map_err(Refusal::from)?) {
        (Some(turn), None, None) => Ok(ForgetRequest::Turn(turn)),
        (None, Some(session), profile) => Ok(ForgetRequest::Session(session, profile)),
        (None, None, Some(profile)) => Ok(ForgetRequest::Profile(profile)),
        _ => Err(invalid(
            "turn",
            "name one of turn, session (with its profile, if you like), profile",
        )),
    }
}

/// AReaL's: an unknown id, or no reply yet, is 400 there.
async fn set_reward(server: &Server, caller: &Caller, fields: &Fields) -> Result<Value, Problem> {
    let reward = finite(fields, "reward")?.ok_or_else(|| invalid("reward", "is missing"))?;
    let turn = fields
        .filled("interaction_id")?
        .map(|id| turn_of("interaction_id", id));
    let turn = turn.transpose()?;
    let done = server.app.control.set_reward(caller, reward, turn).await;
    done.map_err(|refusal| match refusal {
        Refusal::NotFound(why) | Refusal::Conflict(why) => invalid("interaction_id", why),
        other => other.into(),
    })?;
    Ok(json!({"message": "success"}))
}

fn export(server: &Server, fields: &Fields) -> Result<Value, Problem> {
    let id = fields
        .text("session_id")?
        .ok_or_else(|| invalid("session_id", "is missing"))?;
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
    let rows = server
        .app
        .control
        .export(&session_of(id)?, discount, style)?;
    Ok(json!({"session_id": id, "rows": rows.iter().map(export_json).collect::<Vec<_>>()}))
}

fn finite(fields: &Fields, name: &str) -> Result<Option<f32>, Problem> {
    fields.number(name, f64::from(f32::MIN), f64::from(f32::MAX))
}

/// A turn's id, with or without what an API puts before it.
fn turn_of(field: &str, text: &str) -> Result<TurnId, Problem> {
    let bare = text.find("turn_").map_or(text, |at| &text[at..]);
    TurnId::parse(bare).ok_or_else(|| invalid(field, format!("{text:?} is no id of a turn")))
}

/// `{"id", "size"}`: which replies a score is compared with.
fn group(fields: &Fields) -> Result<Option<Group>, Problem> {
    let Some(group) = fields.object("group")? else {
        return Ok(None);
    };
    let id = group.get("id").and_then(Value::as_str);
    let id = id.ok_or_else(|| invalid("group.id", "must be a string"))?;
    let size = group.get("size").and_then(Value::as_u64);
    let size = size.and_then(|n| usize::try_from(n).ok());
    let size = size.ok_or_else(|| invalid("group.size", "must be a whole number from 1"))?;
    let group = Group::new(id, size).map_err(Refusal::from);
    Ok(Some(group?))
}

fn feedback(fields: &Fields) -> Result<Feedback, Problem> {
    let turn = fields
        .filled("turn")?
        .map(|t| turn_of("turn", t))
        .transpose()?;
    let completion = fields
        .filled("completion_id")?
        .map(|t| turn_of("completion_id", t));
    let completion = completion.transpose()?;
    let session = fields.filled("session")?.map(session_of).transpose()?;
    let target = match (turn, completion, session) {
        (Some(turn), None, None) | (None, Some(turn), None) => FeedbackTarget::Turn(turn),
        (None, None, Some(session)) => FeedbackTarget::Session(session),
        _ => return Err(invalid("turn", "name one of turn, completion_id, session")),
    };
    let thumb = match fields.text("thumb")? {
        None => None,
        Some("up") => Some(1.0),
        Some("down") => Some(-1.0),
        Some(other) => return Err(invalid("thumb", format!("{other:?}: use up or down"))),
    };
    let score = match (finite(fields, "score")?, thumb) {
        (Some(_), Some(_)) => return Err(invalid("thumb", "give a score or a thumb, not both")),
        (score, thumb) => score.or(thumb),
    };
    let text = fields.filled("text")?.map(str::to_owned);
    let edited = fields.filled("edited")?.map(str::to_owned);
    if score.is_none() && text.is_none() && edited.is_none() {
        return Err(invalid("score", "give a score, a thumb, a text or an edit"));
    }
    Ok(Feedback {
        target,
        score,
        text,
        edited,
        group: group(fields)?,
    })
}
