//! What Prometheus reads at `/metrics`: what this process did, and how the store stands.

use axum::http::StatusCode;
use chela_core::{FinishReason, PolicyView, Profile, StatusView};
use prometheus_client::{
    encoding::{EncodeLabelSet, text},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};
use std::{collections::BTreeMap, fmt, sync::atomic::AtomicU64, time::Duration};

/// The type of what is written.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Seconds.
const BUCKETS: [f64; 14] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Answered {
    route: &'static str,
    status: u16,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Finished {
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Kind {
    kind: &'static str,
    reason: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Named {
    name: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfProfile {
    profile: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Aged {
    profile: String,
    steps: String,
}

/// What the counts of samples by their age are called in a version's record, before the number of steps.
const AGES: &str = "steps_old_";

type Real = Gauge<f64, AtomicU64>;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Judged {
    judge: String,
    verdict: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Outcome {
    judge: String,
    outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Part {
    part: &'static str,
}

/// Counts since the process began.
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<Answered, Counter>,
    finished: Family<Finished, Counter>,
    prompt: Counter,
    cached: Counter,
    generated: Counter,
    first_token: Histogram,
    whole: Histogram,
    running: Gauge,
}

/// One reply, from its beginning to its end.
pub(crate) struct ReplyFigures {
    pub(crate) prompt: usize,
    pub(crate) cached: usize,
    pub(crate) sampled: usize,
    pub(crate) first: Option<Duration>,
    pub(crate) whole: Duration,
    pub(crate) finish: FinishReason,
}

impl Metrics {
    /// `memory`: how the engine divided it.
    pub(crate) fn new(memory: &[(&'static str, u64)]) -> Self {
        let histogram = || Histogram::new(BUCKETS);
        let mut all = Self {
            registry: Registry::with_prefix("chela"),
            requests: Family::default(),
            finished: Family::default(),
            prompt: Counter::default(),
            cached: Counter::default(),
            generated: Counter::default(),
            first_token: histogram(),
            whole: histogram(),
            running: Gauge::default(),
        };
        let r = &mut all.registry;
        r.register(
            "requests",
            "Requests answered, by route and status",
            all.requests.clone(),
        );
        r.register(
            "replies",
            "Replies that ended, by reason",
            all.finished.clone(),
        );
        r.register(
            "prompt_tokens",
            "Prompt tokens of all replies",
            all.prompt.clone(),
        );
        r.register(
            "cached_prompt_tokens",
            "Prompt tokens whose keys and values were still there",
            all.cached.clone(),
        );
        r.register("generation_tokens", "Tokens sampled", all.generated.clone());
        r.register(
            "time_to_first_token_seconds",
            "From a request's beginning to its first token",
            all.first_token.clone(),
        );
        r.register(
            "reply_seconds",
            "From a request's beginning to the end of its reply",
            all.whole.clone(),
        );
        r.register(
            "requests_running",
            "Requests whose reply is not over",
            all.running.clone(),
        );
        let parts = Family::<Part, Gauge>::default();
        for (part, bytes) in memory {
            let bytes = i64::try_from(*bytes).unwrap_or(i64::MAX);
            parts.get_or_create(&Part { part }).set(bytes);
        }
        r.register(
            "memory_bytes",
            "Memory as divided at the start: base and optimizer take so much, the other parts at most so much",
            parts,
        );
        all
    }

    pub(crate) fn answered(&self, route: &'static str, status: StatusCode) {
        let status = status.as_u16();
        self.requests
            .get_or_create(&Answered { route, status })
            .inc();
    }

    pub(crate) fn replied(&self, reply: &ReplyFigures) {
        let reason = reply.finish.as_str();
        self.finished.get_or_create(&Finished { reason }).inc();
        self.prompt.inc_by(reply.prompt as u64);
        self.cached.inc_by(reply.cached as u64);
        self.generated.inc_by(reply.sampled as u64);
        if let Some(first) = reply.first {
            self.first_token.observe(first.as_secs_f64());
        }
        self.whole.observe(reply.whole.as_secs_f64());
    }

    /// Everything as text. `open`: requests whose reply is not over. `every_profile`: figures of all profiles, not only of the one whose
    /// name everybody knows.
    pub(crate) fn text(
        &self,
        open: usize,
        status: Option<&StatusView>,
        every_profile: bool,
    ) -> Result<String, fmt::Error> {
        self.running.set(i64::try_from(open).unwrap_or(i64::MAX));
        let mut out = String::new();
        text::encode_registry(&mut out, &self.registry)?;
        if let Some(status) = status {
            text::encode_registry(&mut out, &of_status(status))?;
            text::encode_registry(&mut out, &of_steps(status, every_profile))?;
        }
        text::encode_eof(&mut out)?;
        Ok(out)
    }
}

/// How the store stands, read when it is asked for.
fn of_status(status: &StatusView) -> Registry {
    let mut registry = Registry::with_prefix("chela");
    let counts = &status.counts;
    let mut single = |name: &str, help: &str, value: u64| {
        let gauge = Gauge::<i64>::default();
        gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        registry.register(name, help, gauge);
    };
    single(
        "unjudged_turns",
        "Turns that wait for a judge",
        counts.unjudged,
    );
    single("judging", "Judges at work", status.judging);
    single("sessions", "Sessions stored", counts.sessions);
    single("store_bytes", "Bytes on disk", counts.bytes);
    single(
        "learning",
        "1 when turns are learnt from",
        status.learning.into(),
    );
    let versions = status.profiles.iter().map(|p| p.versions.len() as u64);
    single(
        "policy_versions",
        "Versions of all profiles",
        versions.sum(),
    );
    let kinds = Family::<Kind, Gauge>::default();
    for (kind, reason, n) in &counts.turns {
        let (kind, reason) = (kind.as_str(), reason.clone());
        kinds.get_or_create(&Kind { kind, reason }).set(*n as i64);
    }
    registry.register(
        "turns",
        "Turns stored, by kind and why they are of that kind",
        kinds,
    );
    for (name, help, rows) in [
        ("samples", "Samples stored, by state", &counts.samples),
        ("verdicts", "Verdicts stored, by source", &counts.verdicts),
        (
            "judge_errors",
            "Judge errors since the start, by judge",
            &status.judge_errors,
        ),
    ] {
        let family = Family::<Named, Gauge>::default();
        for (name, n) in rows {
            let name = name.clone();
            family.get_or_create(&Named { name }).set(*n as i64);
        }
        registry.register(name, help, family);
    }
    let judged = Family::<Judged, Gauge>::default();
    for (judge, verdict, n) in &counts.judged {
        let (judge, verdict) = (judge.clone(), verdict.clone());
        judged
            .get_or_create(&Judged { judge, verdict })
            .set(*n as i64);
    }
    registry.register(
        "judged",
        "Verdicts stored, by who gave them and what they say",
        judged,
    );
    of_judges(&mut registry, status);
    registry
}

/// What the last steps of the profiles were like: every figure that a version's record has, under its own name.
fn of_steps(status: &StatusView, every_profile: bool) -> Registry {
    let mut registry = Registry::with_prefix("chela_train");
    let mut figures: BTreeMap<String, Family<OfProfile, Real>> = BTreeMap::new();
    let ages = Family::<Aged, Real>::default();
    let (versions, paused) = (
        Family::<OfProfile, Gauge>::default(),
        Family::<OfProfile, Gauge>::default(),
    );
    let shown = |p: &&PolicyView| every_profile || p.profile == Profile::default();
    for view in status.profiles.iter().filter(shown) {
        let of = OfProfile {
            profile: view.profile.to_string(),
        };
        paused.get_or_create(&of).set(view.paused.is_some().into());
        let steps = view.versions.iter().filter(|v| !v.metrics.is_empty());
        let Some(last) = steps.max_by_key(|v| v.version.number) else {
            continue;
        };
        let number = i64::try_from(last.version.number).unwrap_or(i64::MAX);
        versions.get_or_create(&of).set(number);
        // What is not finite is left out: missing, not zero.
        for (name, x) in last.metrics.iter().filter(|(_, x)| x.is_finite()) {
            if let Some(steps) = name.strip_prefix(AGES) {
                let (profile, steps) = (of.profile.clone(), steps.to_owned());
                ages.get_or_create(&Aged { profile, steps }).set(*x);
                continue;
            }
            let legal = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let name = name.replace(|c| !legal(c), "_");
            let family = figures.entry(name).or_default();
            family.get_or_create(&of).set(*x);
        }
    }
    registry.register(
        "paused",
        "1 while training of the profile is paused",
        paused,
    );
    registry.register(
        "version",
        "The version whose step the figures below are of, by profile",
        versions,
    );
    registry.register(
        "steps_old",
        "Samples of the last step by how many steps ago they were sampled",
        ages,
    );
    for (name, family) in figures {
        registry.register(name, "A figure of the profile's last step", family);
    }
    registry
}

/// What each judge did since the start, and its error on canaries where enough is known.
fn of_judges(registry: &mut Registry, status: &StatusView) {
    let verdicts = Family::<Named, Gauge>::default();
    let hinted = Family::<Named, Gauge>::default();
    let votes = Family::<Outcome, Gauge>::default();
    let canaries = Family::<Outcome, Gauge>::default();
    let errors = Family::<Named, Real>::default();
    for view in &status.judges {
        let name = || Named {
            name: view.judge.clone(),
        };
        let set = |family: &Family<Outcome, Gauge>, outcome, n: u64| {
            let judge = view.judge.clone();
            family
                .get_or_create(&Outcome { judge, outcome })
                .set(n as i64);
        };
        verdicts.get_or_create(&name()).set(view.verdicts as i64);
        hinted.get_or_create(&name()).set(view.hinted as i64);
        set(&votes, "valid", view.valid_votes);
        set(&votes, "void", view.void_votes);
        let c = &view.canaries;
        set(&canaries, "right", c.verdicts.saturating_sub(c.wrong));
        set(&canaries, "wrong", c.wrong);
        set(&canaries, "abstained", c.abstained);
        set(&canaries, "failed", c.failed);
        if let Some(error) = c.error {
            errors.get_or_create(&name()).set(error);
        }
    }
    let r = registry;
    r.register(
        "judge_verdicts",
        "Verdicts since the start, by judge",
        verdicts,
    );
    r.register(
        "judge_hinted",
        "Verdicts with a hint since the start, by judge",
        hinted,
    );
    r.register(
        "judge_votes",
        "Votes since the start, by judge and whether they could be read",
        votes,
    );
    r.register(
        "judge_canaries",
        "Turns with a known verdict put before a judge: right and wrong of the last, abstained and failed since the start",
        canaries,
    );
    r.register(
        "judge_error",
        "Part of a judge's last verdicts on canaries that was wrong; absent while there are too few",
        errors,
    );
}
