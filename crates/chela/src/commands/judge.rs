//! `chela judge test`: labelled turns in; agreement, confusion and cost out.

use crate::{Usage, config::Config, judges, output::Output, supervise};
use anyhow::{Context, Result, bail};
use chela_core::{PolicyEngine, Score};
use chela_model::TerminalProgress;
use chela_rollout::labelled::{self, Agreement, Judged, Labelled};
use futures_util::{StreamExt, stream};
use serde_json::json;
use std::{path::Path, sync::Arc, time::Instant};

/// Turns judged at the same time: a local model decodes several replies at little more than the cost of one.
const AT_ONCE: usize = 8;

/// Runs it.
pub fn test(config: &Config, file: Option<&Path>, tags: &[String], output: &Output) -> Result<()> {
    let mut turns = read(file).context(Usage)?;
    turns.retain(|turn| tags.is_empty() || tags.iter().any(|tag| turn.tags.contains(tag)));
    if turns.is_empty() {
        let why = anyhow::anyhow!("no turn has the tag {}", tags.join(" or "));
        return Err(why).context(Usage);
    }
    judges::rules(&config.judge.rules).context(Usage)?;
    let (engine, chat) = supervise::load_local(config, &mut TerminalProgress::default())?;
    let engine: Arc<dyn PolicyEngine> = engine;
    let judges = judges::build(config, &engine, &chat).context(Usage)?;
    let names: Vec<&str> = judges.iter().map(|j| j.name()).collect();
    let names = names.join(", ");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let started = Instant::now();
    let judged: Vec<Judged> = runtime.block_on(async {
        let (judges, n) = (&judges, turns.len());
        let each = turns.iter().enumerate().map(|(i, turn)| async move {
            let one = labelled::judge(judges, &turn.case).await;
            if !output.json {
                output.note(&format!("{:>4}/{}  {}", i + 1, n, said(turn, &one)));
            }
            one
        });
        stream::iter(each).buffered(AT_ONCE).collect().await
    });
    let seconds = started.elapsed().as_secs_f64();
    if judged.iter().all(|j| j.failed.is_some()) {
        let why = judged.first().and_then(|j| j.failed.as_deref());
        bail!(
            "no judge answered: {}",
            why.unwrap_or("no judge is configured")
        );
    }
    report(&names, (&turns, &judged), seconds, output)
}

fn read(file: Option<&Path>) -> Result<Vec<Labelled>> {
    let Some(file) = file else {
        return labelled::read(labelled::BUILT_IN).context("the built-in set");
    };
    let text =
        std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let turns = labelled::read(&text).with_context(|| format!("{}", file.display()))?;
    if turns.is_empty() {
        bail!("{} holds no turn", file.display());
    }
    Ok(turns)
}

fn word(score: Option<Score>) -> &'static str {
    match score {
        Some(Score::Good) => "good",
        Some(Score::Neutral) => "neutral",
        Some(Score::Bad) => "bad",
        None => "none",
    }
}

fn said(turn: &Labelled, judged: &Judged) -> String {
    let mark = match judged.score {
        Some(score) if score == turn.label => " ",
        Some(_) => "!",
        None => "-",
    };
    let next = turn.case.next.messages.last().map_or("", |m| &m.content);
    let next: String = next.chars().take(48).collect();
    let by = match (&judged.failed, judged.judge.as_str()) {
        (Some(why), "") => why,
        (_, by) => by,
    };
    format!(
        "{mark} {:<8} {:<8} {by:<24} {:>6.1} s  {}",
        word(Some(turn.label)),
        word(judged.score),
        judged.seconds,
        next.replace('\n', " ")
    )
}

fn figures(agreement: &Agreement) -> serde_json::Value {
    let share = agreement.share();
    json!({
        "turns": agreement.turns(), "with_verdict": agreement.spoken(), "right": agreement.right(), "opposite": agreement.opposite(),
        "agreement": share.map(|s| s.0), "standard_error": share.map(|s| s.1), "kappa": agreement.kappa(),
        "confusion": agreement.confusion,
    })
}

fn report(
    names: &str,
    (turns, judged): (&[Labelled], &[Judged]),
    total: f64,
    output: &Output,
) -> Result<()> {
    let (all, by_tag) = labelled::agreement(turns, judged);
    let votes: usize = judged.iter().map(|j| j.votes.0).sum();
    let void: usize = judged.iter().map(|j| j.votes.1).sum();
    let written: usize = judged.iter().map(|j| j.written).sum();
    let failed = judged.iter().filter(|j| j.failed.is_some()).count();
    let mut seconds: Vec<f64> = judged.iter().map(|j| j.seconds).collect();
    seconds.sort_by(f64::total_cmp);
    let median = seconds[seconds.len() / 2];
    if output.json {
        let each = turns.iter().zip(judged);
        let each: Vec<_> = each
            .map(|(turn, judged)| {
                json!({
                    "id": turn.id, "label": turn.label.value(), "score": judged.score.map(Score::value), "judge": judged.judge,
                    "votes": judged.votes.0, "void_votes": judged.votes.1, "hints": judged.hints, "seconds": judged.seconds,
                    "failed": judged.failed,
                })
            })
            .collect();
        let tags: serde_json::Map<_, _> = by_tag
            .iter()
            .map(|(tag, a)| (tag.clone(), figures(a)))
            .collect();
        return output.plain(
            &json!({
                "judges": names, "all": figures(&all), "by_tag": tags, "votes": votes, "void_votes": void, "failed_turns": failed,
                "characters_written": written, "seconds": total, "median_seconds": median, "turns": each,
            })
            .to_string(),
        );
    }
    let percent = |a: &Agreement| match a.share() {
        Some((share, error)) => format!("{:>3.0}% ± {:.0}", 100.0 * share, 200.0 * error),
        None => "no verdict".to_owned(),
    };
    output.plain(&format!("judges: {names}"))?;
    output.plain("\nlabel \\ verdict   good  neutral  bad  none")?;
    for (name, row) in ["good", "neutral", "bad"].iter().zip(all.confusion) {
        let [good, neutral, bad, none] = row;
        output.plain(&format!(
            "{name:<15} {good:>6} {neutral:>8} {bad:>4} {none:>5}"
        ))?;
    }
    let kappa = all.kappa().map_or(String::new(), |k| format!(", κ {k:.2}"));
    output.plain(&format!(
        "\nagreement {} of the {} of {} turns with a verdict (two standard errors){kappa}; {} would teach the opposite",
        percent(&all).trim(),
        all.spoken(),
        all.turns(),
        all.opposite(),
    ))?;
    output.plain(&format!(
        "{votes} votes, {void} of them void; {failed} turns where a judge failed; {total:.1} s, {AT_ONCE} turns at a time, {median:.1} s a turn in the middle; {written} characters written"
    ))?;
    output.plain("\ntag                    turns  verdicts  agreement  opposite")?;
    for (tag, a) in &by_tag {
        let (turns, spoken, opposite) = (a.turns(), a.spoken(), a.opposite());
        output.plain(&format!(
            "{tag:<22} {turns:>5} {spoken:>9}  {:<10} {opposite:>7}",
            percent(a)
        ))?;
    }
    Ok(())
}
