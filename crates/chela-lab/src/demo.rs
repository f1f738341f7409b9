//! The demo: a simulated user with a plain preference talks to a server, which learns it; measured on prompts it never saw.

use crate::{
    LabError,
    client::{Client, Endpoint},
    evaluate::{self, Distance},
    report::Table,
    taste::{self, Scores},
    texts,
    user::{self, Arm, Play, Played},
};
use std::{
    collections::HashSet,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

/// How the demo runs.
#[derive(Clone, Debug, PartialEq)]
pub struct DemoOptions {
    /// Seed of the user and of the adapter.
    pub seed: u64,
    /// Most optimizer steps.
    pub updates: u64,
    /// Samples of a step, as the server is configured.
    pub batch: usize,
    /// Held-out prompts read before and after.
    pub held_out: usize,
    /// Held-out prompts read at each version, for the live column.
    pub live: usize,
    /// Ends early when the live score reaches this.
    pub enough: f64,
    /// The user's sampling temperature.
    pub temperature: f64,
    /// Most tokens of a reply.
    pub max_tokens: usize,
    /// Sessions at once.
    pub lanes: usize,
}

impl Default for DemoOptions {
    fn default() -> Self {
        Self {
            seed: 1,
            updates: 8,
            batch: 16,
            held_out: 120,
            live: 24,
            enough: 0.9,
            temperature: 0.7,
            max_tokens: 96,
            lanes: 16,
        }
    }
}

/// A rule of the server's `rules` judge, which reads the simulated user's remarks.
#[derive(Clone, Debug, PartialEq)]
pub struct DemoRule {
    /// Name.
    pub name: String,
    /// Regular expression.
    pub pattern: String,
    /// Score.
    pub reward: f32,
    /// Hint template.
    pub hint: Option<String>,
}

/// How this user complains about length and how they give thanks; the complaint itself is the hint.
pub fn rules() -> Vec<DemoRule> {
    vec![
        DemoRule {
            name: "too-long".to_owned(),
            pattern: r"\b(too (long|wordy|detailed|much)|wordy|short(er|en)?|brief|concise|condense|fewer words|less text|words or less|no more than \d+ words|under \d+ words|few words|tl;?dr|(single|one|two)[ -](short )?sentences?|a sentence( or two)?)\b".to_owned(),
            reward: -1.0,
            hint: Some("$text".to_owned()),
        },
        accepted(),
    ]
}

/// The control's rules: tails is a remark about an unrelated preference, which scores −1 and is the hint as a complaint is in the
/// real run; heads is thanks. Complaints about length do not occur.
pub fn control_rules() -> Vec<DemoRule> {
    let all: Vec<String> = texts::unrelated()
        .iter()
        .map(|t| regex::escape(t))
        .collect();
    vec![
        DemoRule {
            name: "coin-tails".to_owned(),
            pattern: format!("^(?:{})$", all.join("|")),
            reward: -1.0,
            hint: Some("$text".to_owned()),
        },
        accepted(),
    ]
}

fn accepted() -> DemoRule {
    DemoRule {
        name: "accepted".to_owned(),
        pattern: r"\b(thanks?|thank you|cheers|perfect|great|helpful|useful|i'll|i'm happy|pleased|appreciated|settled|now i understand|that (works|does it)|good to know|very good|learned something)\b".to_owned(),
        reward: 1.0,
        hint: None,
    }
}

/// What one arm came to.
#[derive(Clone, Debug, PartialEq)]
pub struct ArmResult {
    /// Held-out figures of the base model.
    pub before: Scores,
    /// Held-out figures of the last version.
    pub after: Scores,
    /// Held-out prompts.
    pub held_out: usize,
    /// Mean negative log-prob of the base model's held-out replies under itself.
    pub base_nll_before: f64,
    /// The last version's distance.
    pub distance: Distance,
    /// Steps made.
    pub updates: u64,
    /// Requests the user made.
    pub interactions: u64,
}

/// Plays one arm against a server that has learnt nothing yet. `before` may be given when the same base was just read.
pub fn run_arm(
    endpoint: Endpoint,
    arm: Arm,
    options: &DemoOptions,
    before: Option<(Scores, f64)>,
    table: &mut Table<'_>,
) -> Result<ArmResult, LabError> {
    let client = Client::new(endpoint);
    let questions = texts::held_out();
    let questions = &questions[..options.held_out.min(questions.len())];
    let (before, base_nll_before) = match before {
        Some(known) => known,
        None => {
            table.say(&format!(
                "reading {} held-out prompts with the base model …",
                questions.len()
            ))?;
            let replies = evaluate::read(
                &client,
                "before",
                questions,
                options.max_tokens,
                options.lanes,
            )?;
            let distance = evaluate::distance(&client, "before", questions.len(), 0, 4)?;
            (taste::score(&replies), distance.base_nll)
        }
    };
    table.say(&format!("held-out before: {:.2}", before.passed))?;
    table.head()?;
    let interactions = sessions(&client, arm, options, table)?;
    let policy = client.policy()?;
    table.say(&format!(
        "reading {} held-out prompts with version {} …",
        questions.len(),
        policy.served
    ))?;
    let replies = evaluate::read(
        &client,
        "after",
        questions,
        options.max_tokens,
        options.lanes,
    )?;
    let distance = evaluate::distance(&client, "after", questions.len(), policy.served, 4)?;
    Ok(ArmResult {
        before,
        after: taste::score(&replies),
        held_out: questions.len(),
        base_nll_before,
        distance,
        updates: policy.steps,
        interactions,
    })
}

/// How long the demo waits for a next version before it says that nothing is learnt.
const PATIENCE: Duration = Duration::from_secs(300);

struct Stage<'a> {
    client: &'a Client,
    play: Play,
    options: &'a DemoOptions,
    next: AtomicU64,
    played: AtomicU64,
    steps: AtomicU64,
    stop: AtomicBool,
    failed: Mutex<Option<LabError>>,
}

impl Stage<'_> {
    /// Sessions go on while steps are made from them, but at most one batch ahead of the trainer, as patient users would.
    fn may_start(&self) -> bool {
        let ahead = (self.steps.load(Ordering::Relaxed) + 2) * self.options.batch as u64;
        self.next.load(Ordering::Relaxed) < ahead + self.options.lanes as u64 / 2
    }

    fn lane(&self, results: &mpsc::Sender<Played>) {
        while !self.stop.load(Ordering::Relaxed) {
            if !self.may_start() {
                std::thread::sleep(Duration::from_millis(50));
                continue;
            }
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            match user::play(self.client, self.play, index) {
                Ok(played) => {
                    self.played.fetch_add(1, Ordering::Relaxed);
                    let _ = results.send(played); // the receiver goes first when the demo ends
                }
                Err(error) => {
                    self.failed
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .get_or_insert(error);
                    self.stop.store(true, Ordering::Relaxed);
                }
            }
        }
    }
}

/// Plays sessions until enough steps are made. Returns the number of requests.
fn sessions(
    client: &Client,
    arm: Arm,
    options: &DemoOptions,
    table: &mut Table<'_>,
) -> Result<u64, LabError> {
    let play = Play {
        arm,
        seed: options.seed,
        temperature: options.temperature,
        max_tokens: options.max_tokens,
    };
    let stage = Stage {
        client,
        play,
        options,
        next: AtomicU64::new(0),
        played: AtomicU64::new(0),
        steps: AtomicU64::new(0),
        stop: AtomicBool::new(false),
        failed: Mutex::new(None),
    };
    std::thread::scope(|scope| {
        let (sender, results) = mpsc::channel();
        for _ in 0..options.lanes {
            let sender = sender.clone();
            let stage = &stage;
            scope.spawn(move || stage.lane(&sender));
        }
        drop(sender);
        let outcome = watch(&stage, arm, &results, table);
        stage.stop.store(true, Ordering::Relaxed);
        outcome
    })?;
    if let Some(error) = stage
        .failed
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner)
    {
        return Err(error);
    }
    Ok(stage.played.into_inner() * 2)
}

/// Prints sessions as they end, reads a few held-out prompts at each new version, and says when it is enough.
fn watch(
    stage: &Stage<'_>,
    arm: Arm,
    results: &mpsc::Receiver<Played>,
    table: &mut Table<'_>,
) -> Result<(), LabError> {
    let options = stage.options;
    let questions = texts::held_out();
    let live = &questions[..options.live.min(questions.len())];
    let mut seen = HashSet::new();
    let mut score = None;
    let mut last_step = Instant::now();
    while !stage.stop.load(Ordering::Relaxed) {
        while let Ok(played) = results.recv_timeout(Duration::from_millis(100)) {
            table.session(&played, score)?;
        }
        let policy = stage.client.policy()?;
        stage.steps.store(policy.steps, Ordering::Relaxed);
        if policy.served > 0 && seen.insert(policy.served) {
            last_step = Instant::now();
            let last = policy.steps >= options.updates;
            if last {
                stage.stop.store(true, Ordering::Relaxed);
            }
            if options.live > 0 && !last {
                let tag = format!("live-{}", policy.served);
                let scores = evaluate::quick(stage.client, &tag, live, options.max_tokens)?;
                score = Some(scores.passed);
                table.say(&format!(
                    "         version {} is served; held-out ({} prompts): {:.2}",
                    policy.served,
                    live.len(),
                    scores.passed
                ))?;
                if arm == Arm::Treatment && scores.passed >= options.enough {
                    stage.stop.store(true, Ordering::Relaxed);
                }
            }
        }
        if last_step.elapsed() > PATIENCE {
            let status = stage.client.status()?;
            return Err(LabError::Stuck(format!(
                "no new version for {} s; the server's status: {status}",
                PATIENCE.as_secs()
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first rule that matches, as the judge reads it.
    fn heard(rules: &[DemoRule], text: &str) -> Option<String> {
        rules
            .iter()
            .find(|r| {
                let pattern = format!("(?i){}", r.pattern);
                regex::Regex::new(&pattern).unwrap().is_match(text)
            })
            .map(|r| r.name.clone())
    }

    #[test]
    fn every_remark_is_heard_as_what_it_is() {
        for (rules, remarks, name) in [
            (rules(), texts::complaints(), Some("too-long")),
            (rules(), texts::thanks(), Some("accepted")),
            (rules(), texts::unrelated(), None),
            (control_rules(), texts::unrelated(), Some("coin-tails")),
            (control_rules(), texts::thanks(), Some("accepted")),
        ] {
            for remark in remarks {
                assert_eq!(heard(&rules, remark).as_deref(), name, "{remark}");
            }
        }
    }
}
