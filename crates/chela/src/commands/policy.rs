//! `chela policy …` and `chela forget`: versions listed, shown, compared, steered, taken back, forgotten.

use super::remote::{Remote, encode, print, text};
use crate::{
    cli::{ForgetArgs, PolicyCommand},
    output::{Output, json_line},
};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::io::{IsTerminal, Write};

/// All of `chela policy` that a running server does.
pub fn run(remote: &Remote, command: &PolicyCommand, output: &Output) -> Result<()> {
    let (route, body) = match command {
        PolicyCommand::List(profile) => {
            let answer = remote.get(&format!("/v1/policy?profile={}", encode(&profile.profile)))?;
            return versions(output, &answer);
        }
        PolicyCommand::Show { profile, version } => {
            let number = match version {
                Some(number) => *number,
                None => served(remote, &profile.profile)?,
            };
            let route = format!(
                "/v1/policy/versions/{number}?profile={}",
                encode(&profile.profile)
            );
            return show(output, &remote.get(&route)?);
        }
        PolicyCommand::Diff { profile, from, to } => {
            let mut route = format!("/v1/policy/diff?profile={}", encode(&profile.profile));
            for (name, number) in [("from", from), ("to", to)] {
                if let Some(number) = number {
                    route.push_str(&format!("&{name}={number}"));
                }
            }
            return diff(output, &remote.get(&route)?);
        }
        PolicyCommand::Import { profile, from } => {
            // The server may have been started elsewhere.
            let path = std::path::absolute(from)
                .with_context(|| format!("{} is no path", from.display()))?;
            ("import", json!({"profile": profile.profile, "path": path}))
        }
        PolicyCommand::Rollback { profile, version } => (
            "rollback",
            json!({"profile": profile.profile, "version": version}),
        ),
        PolicyCommand::Promote { profile, version } => (
            "promote",
            json!({"profile": profile.profile, "version": version}),
        ),
        PolicyCommand::Pause(profile) => ("pause", json!({"profile": profile.profile})),
        PolicyCommand::Resume(profile) => ("resume", json!({"profile": profile.profile})),
        PolicyCommand::Export { .. } | PolicyCommand::Replay { .. } => {
            bail!("this is done without the server")
        }
    };
    versions(output, &remote.post(&format!("/v1/policy/{route}"), &body)?)
}

fn served(remote: &Remote, profile: &str) -> Result<u64> {
    let answer = remote.get(&format!("/v1/policy?profile={}", encode(profile)))?;
    answer["served"]
        .as_u64()
        .context("the server names no served version")
}

fn versions(output: &Output, answer: &Value) -> Result<()> {
    if output.json {
        return output.plain(&json_line(answer));
    }
    let paused = answer["paused"]
        .as_str()
        .map_or_else(String::new, |why| format!(" (training is paused: {why})"));
    output.plain(&format!(
        "profile {} serves version {}{paused}",
        text(&answer["profile"]),
        answer["served"]
    ))?;
    for one in answer["versions"].as_array().into_iter().flatten() {
        let why = one["why"]
            .as_str()
            .map_or_else(String::new, |why| format!(": {why}"));
        output.plain(&format!(
            "{:>5}  parent {:>5}  {:>4} steps  {}{why}",
            one["version"],
            one["parent"],
            one["steps"],
            text(&one["state"])
        ))?;
    }
    for of in answer["replays"].as_array().into_iter().flatten() {
        output.plain(&format!(
            "{of:>5}  is made again without what was forgotten"
        ))?;
    }
    Ok(())
}

fn show(output: &Output, answer: &Value) -> Result<()> {
    if output.json {
        return output.plain(&json_line(answer));
    }
    let why = answer["why"]
        .as_str()
        .map_or_else(String::new, |why| format!(": {why}"));
    output.plain(&format!(
        "version {} on {}, {} steps from the base model, {}{why}",
        answer["version"],
        answer["parent"],
        answer["steps"],
        text(&answer["state"])
    ))?;
    let origin = &answer["origin"];
    match origin["kind"].as_str() {
        Some("imported") => output.plain(&format!("imported from {}", text(&origin["from"])))?,
        Some("replayed") => {
            output.plain(&format!("made again: the step of version {}", origin["of"]))?
        }
        _ => {}
    }
    if let Some(hash) = answer["receipt"]["weights_hash"].as_str() {
        output.plain(&format!("weights {hash}"))?;
    }
    for (name, value) in answer["metrics"].as_object().into_iter().flatten() {
        output.plain(&format!("  {name:<20} {value}"))?;
    }
    if let Some(checks) = answer["gate"]["checks"].as_array() {
        output.plain(&format!(
            "gate, {:.1} s:",
            answer["gate"]["seconds"].as_f64().unwrap_or(0.0)
        ))?;
        for check in checks {
            output.plain(&format!(
                "  {} {:<12} {:>8} (limit {})  {}",
                if check["passed"] == true {
                    "ok  "
                } else {
                    "FAIL"
                },
                text(&check["name"]),
                short(&check["value"]),
                short(&check["limit"]),
                text(&check["detail"])
            ))?;
        }
    }
    lessons(output, answer)
}

fn short(value: &Value) -> String {
    value
        .as_f64()
        .map_or_else(|| "-".to_owned(), |x| format!("{x:.3}"))
}

fn lessons(output: &Output, answer: &Value) -> Result<()> {
    let all: Vec<&Value> = answer["lessons"].as_array().into_iter().flatten().collect();
    output.plain(&format!("{} lessons", all.len()))?;
    for one in all {
        let reward = one["reward"]
            .as_f64()
            .map_or_else(|| "hint".to_owned(), |r| format!("{r:+}"));
        output.plain(&format!(
            "  {reward:>4}  {}  by {}  (version {}, {})",
            first_line(&one["request"]),
            text(&one["judge"]),
            one["version"],
            text(&one["turn"])
        ))?;
        output.plain(&format!("        reply: {}", first_line(&one["reply"])))?;
        for (name, words) in [("because", &one["evidence"]), ("hint", &one["hint"])] {
            if !words.is_null() {
                output.plain(&format!("        {name}: {}", first_line(words)))?;
            }
        }
    }
    Ok(())
}

/// Beginning of a text, on one line.
fn first_line(value: &Value) -> String {
    let words = text(value).split_whitespace().collect::<Vec<_>>().join(" ");
    match words.char_indices().nth(100) {
        Some((end, _)) => format!("“{}…”", &words[..end]),
        None => format!("“{words}”"),
    }
}

fn diff(output: &Output, answer: &Value) -> Result<()> {
    if output.json {
        return output.plain(&json_line(answer));
    }
    let (from, to) = (&answer["from"], &answer["to"]);
    let steps = answer["steps"].as_u64().map_or_else(
        || "neither stands on the other".to_owned(),
        |n| format!("{n} steps apart"),
    );
    let whose = if answer["own_prompts"] == true {
        "held-out prompts of this profile"
    } else {
        "prompts of ours: this profile has no held-out turns yet"
    };
    output.plain(&format!(
        "version {from} and version {to}, {steps}; {whose}"
    ))?;
    output.plain(&format!(
        "KL({to} || {from}) {} nats a token; mean length {} and {} tokens",
        short(&answer["kl"]),
        short(&answer["mean_tokens"]["from"]),
        short(&answer["mean_tokens"]["to"])
    ))?;
    for one in answer["answers"].as_array().into_iter().flatten() {
        output.plain(&format!("\n? {}", first_line(&one["request"])))?;
        output.plain(&format!("{from}: {}", text(&one["from"]).trim()))?;
        output.plain(&format!("{to}: {}", text(&one["to"]).trim()))?;
    }
    output.plain("")?;
    lessons(output, answer)
}

/// `chela forget`
pub fn forget(remote: &Remote, args: &ForgetArgs, output: &Output) -> Result<()> {
    let mut body = json!({"dry_run": true});
    let named = [
        ("turn", &args.turn),
        ("session", &args.session),
        ("profile", &args.profile),
    ];
    for (name, value) in named {
        if let Some(value) = value {
            body[name] = json!(value);
        }
    }
    let plan = remote.post("/v1/forget", &body)?;
    if args.dry_run && output.json {
        return output.plain(&json_line(&plan));
    }
    output.note(&said(&plan));
    if args.dry_run {
        return Ok(());
    }
    if !args.yes && !agreed()? {
        bail!("nothing was forgotten");
    }
    body["dry_run"] = json!(false);
    let done = remote.post("/v1/forget", &body)?;
    let proof = &done["proof"];
    let found: Vec<String> = proof["found"]
        .as_array()
        .into_iter()
        .flatten()
        .map(text)
        .collect();
    if output.json {
        print(output, &done)?;
    } else {
        output.plain(&format!(
            "forgotten; looked for {} pieces of it in {} files ({} bytes)",
            proof["pieces_looked_for"],
            proof["files"].as_array().map_or(0, Vec::len),
            proof["bytes"]
        ))?;
    }
    if !found.is_empty() {
        bail!(
            "pieces are still in {}; a reader may hold the log, try again",
            found.join(", ")
        );
    }
    Ok(())
}

/// What would go, and what it costs, in words.
fn said(plan: &Value) -> String {
    let count = |name: &str| plan[name].as_u64().unwrap_or(0);
    let list = |name: &str| -> Vec<String> {
        plan[name]
            .as_array()
            .into_iter()
            .flatten()
            .map(text)
            .collect()
    };
    let mut words = format!(
        "profile {}: {} turns, {} verdicts and {} samples go, {} of them were trained on",
        text(&plan["profile"]),
        count("forgotten_turns"),
        count("verdicts"),
        count("samples"),
        count("trained_samples")
    );
    let versions = list("versions");
    if versions.is_empty() {
        words.push_str("; no version learnt from it");
        return words;
    }
    words.push_str(&format!("; versions {} are deleted", versions.join(", ")));
    if let Some(back) = plan["back_to"].as_u64() {
        words.push_str(&format!(", version {back} is served at once"));
    }
    let replay = list("replay");
    if !replay.is_empty() {
        words.push_str(&format!(
            ", and {} steps are made again {} from {} samples, in about {:.0} s",
            replay.len(),
            match plan["learning"].as_bool() {
                Some(false) => "once learning is on (it is off now)",
                _ => "in the background",
            },
            count("samples_again"),
            plan["seconds"].as_f64().unwrap_or(0.0)
        ));
    }
    words
}

fn agreed() -> Result<bool> {
    if !std::io::stdin().is_terminal() {
        bail!("nothing was forgotten: nobody is there to ask; say --yes");
    }
    let mut out = std::io::stderr();
    write!(out, "forget it? [y/N] ")?;
    out.flush()?;
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    Ok(matches!(line.trim(), "y" | "Y" | "yes"))
}
