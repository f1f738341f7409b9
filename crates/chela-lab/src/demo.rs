//! The demo: a simulated user with a plain preference talks to a server, which learns it; measured on prompts it never saw.

use crate::{
    LabError,
    client::{Client, Endpoint},
    evaluate::{self, Distance, Reading},
    report::Table,
    taste::{self, Scores},
    texts,
    user::{self, Arm, Play, Played},
};
use serde_json::Value;
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
    /// Ends early when the live score reaches this: what comes after sharpens more than it teaches.
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
            enough: 0.75,
            temperature: 0.7,
            max_tokens: 96,
            lanes: 16,
        }
    }
}

impl DemoOptions {
    fn reading<'a>(&self, tag: &'a str, version: Option<u64>) -> Reading<'a> {
        Reading {
            tag,
            version,
            max_tokens: self.max_tokens,
            lanes: self.lanes,
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
            let replies = evaluate::read(&client, options.reading("before", None), questions)?;
            let distance = evaluate::distance(&client, "before", questions.len(), 0, 4)?;
            (taste::score(&replies), distance.base_nll)
        }
    };
    table.say(&format!("held-out before: {:.2}", before.passed))?;
    table.head()?;
    let (last, interactions) = sessions(&client, arm, options, table)?;
    table.say(&format!(
        "reading {} held-out prompts with version {} …",
        questions.len(),
        last.version
    ))?;
    // By its number: a step that was under way may have been published meanwhile.
    let reading = options.reading("after", Some(last.version));
    let replies = evaluate::read(&client, reading, questions)?;
    let distance = evaluate::distance(&client, "after", questions.len(), last.version, 4)?;
    Ok(ArmResult {
        before,
        after: taste::score(&replies),
        held_out: questions.len(),
        base_nll_before,
        distance,
        updates: last.steps,
        interactions,
    })
}

/// How long the demo waits for a next version before it says that nothing is learnt.
const PATIENCE: Duration = Duration::from_secs(300);

/// How long a session may wait for its sample before it counts as one that makes none.
const SETTLING: Duration = Duration::from_secs(20);

struct Stage<'a> {
    client: &'a Client,
    play: Play,
    options: &'a DemoOptions,
    /// Sessions begun.
    next: AtomicU64,
    /// Sessions over.
    played: AtomicU64,
    /// Sessions that may have begun by now.
    limit: AtomicU64,
    stop: AtomicBool,
    failed: Mutex<Option<LabError>>,
}

impl Stage<'_> {
    fn lane(&self, results: &mpsc::Sender<Played>) {
        while !self.stop.load(Ordering::Relaxed) {
            let limit = self.limit.load(Ordering::Relaxed);
            let begun = self
                .next
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| {
                    (next < limit).then_some(next + 1)
                });
            let Ok(index) = begun else {
                std::thread::sleep(Duration::from_millis(20));
                continue;
            };
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

/// When users come: as many as a batch needs, and only once the version is served that learnt from the last one. On two cores
/// nothing is gained by talking to an old version meanwhile, and what it says teaches less.
struct Pace {
    batch: u64,
    /// Samples made so far, and since when it has been so many.
    made: (u64, Instant),
    /// Sessions of which no sample came.
    lost: u64,
}

impl Pace {
    fn new(batch: usize) -> Self {
        Self {
            batch: batch as u64,
            made: (0, Instant::now()),
            lost: 0,
        }
    }

    /// How many more may begin. `samples` is the server's count by state, `steps` those of the served version.
    fn more(&mut self, samples: &Value, steps: u64, (begun, played): (u64, u64)) -> u64 {
        let of = |state: &str| samples[state].as_u64().unwrap_or(0);
        let made: u64 = samples
            .as_object()
            .into_iter()
            .flatten()
            .filter_map(|(_, n)| n.as_u64())
            .sum();
        if made != self.made.0 {
            self.made = (made, Instant::now());
        }
        let learning = of("leased") > 0 || of("consumed") > steps * self.batch;
        let mut settling = played.saturating_sub(made + self.lost);
        if settling > 0 && begun == played && !learning && self.made.1.elapsed() > SETTLING {
            self.lost += settling;
            settling = 0;
        }
        if learning {
            return 0;
        }
        let coming = of("pending") + (begun - played) + settling;
        self.batch.saturating_sub(coming)
    }
}

/// The version a run ends with.
struct Last {
    version: u64,
    steps: u64,
}

/// Plays sessions until enough steps are made. Returns the version to be judged and the number of requests.
fn sessions(
    client: &Client,
    arm: Arm,
    options: &DemoOptions,
    table: &mut Table<'_>,
) -> Result<(Last, u64), LabError> {
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
        limit: AtomicU64::new(0),
        stop: AtomicBool::new(false),
        failed: Mutex::new(None),
    };
    let last = std::thread::scope(|scope| {
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
    Ok((last, stage.played.into_inner() * 2))
}

/// Prints sessions as they end, reads a few held-out prompts at each new version, and says when it is enough.
fn watch(
    stage: &Stage<'_>,
    arm: Arm,
    results: &mpsc::Receiver<Played>,
    table: &mut Table<'_>,
) -> Result<Last, LabError> {
    let options = stage.options;
    let questions = texts::held_out();
    let live = &questions[..options.live.min(questions.len())];
    let mut seen = HashSet::new();
    let mut score = None;
    let mut last_step = Instant::now();
    let mut pace = Pace::new(options.batch);
    let mut last = Last {
        version: 0,
        steps: 0,
    };
    while !stage.stop.load(Ordering::Relaxed) {
        while let Ok(played) = results.recv_timeout(Duration::from_millis(100)) {
            table.session(&played, score)?;
        }
        let policy = stage.client.policy()?;
        let status = stage.client.status()?;
        last = Last {
            version: policy.served,
            steps: policy.steps,
        };
        if policy.steps >= options.updates {
            break;
        }
        let begun = stage.next.load(Ordering::Relaxed);
        let played = stage.played.load(Ordering::Relaxed);
        let more = pace.more(&status["samples"], policy.steps, (begun, played));
        stage.limit.store(begun + more, Ordering::Relaxed);
        if policy.served > 0 && seen.insert(policy.served) {
            last_step = Instant::now();
            // The first update moves little, and the control has nothing to show on the way.
            if options.live > 0 && arm == Arm::Treatment && policy.steps > 1 {
                let tag = format!("live-{}", policy.served);
                let reading = options.reading(&tag, Some(policy.served));
                let scores = evaluate::quick(stage.client, reading, live)?;
                score = Some(scores.passed);
                table.say(&format!(
                    "         version {} is served; held-out ({} prompts): {:.2}",
                    policy.served,
                    live.len(),
                    scores.passed
                ))?;
                if scores.passed >= options.enough {
                    break;
                }
            }
        }
        if last_step.elapsed() > PATIENCE {
            return Err(LabError::Stuck(format!(
                "no new version for {} s; the server's status: {status}",
                PATIENCE.as_secs()
            )));
        }
    }
    Ok(last)
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

    #[test]
    fn users_come_for_one_batch_and_wait_while_it_is_learnt() {
        let mut pace = Pace::new(16);
        let samples = |pending: u64, leased: u64, consumed: u64| serde_json::json!({"pending": pending, "leased": leased, "consumed": consumed});
        assert_eq!(pace.more(&samples(0, 0, 0), 0, (0, 0)), 16);
        // Ten run, four are over and wait for their samples, two samples are there.
        assert_eq!(pace.more(&samples(2, 0, 0), 0, (16, 6)), 0);
        assert_eq!(pace.more(&samples(2, 0, 0), 0, (12, 6)), 4);
        // The step is under way, then made but not served.
        assert_eq!(pace.more(&samples(0, 16, 0), 0, (16, 16)), 0);
        assert_eq!(pace.more(&samples(0, 0, 16), 0, (16, 16)), 0);
        assert_eq!(pace.more(&samples(3, 0, 16), 1, (19, 19)), 13);
    }

    #[test]
    fn a_session_without_a_sample_is_made_up_for() {
        let mut pace = Pace::new(4);
        let samples = serde_json::json!({"pending": 3, "dropped:duplicate reply": 0});
        assert_eq!(pace.more(&samples, 0, (4, 4)), 0);
        pace.made.1 = Instant::now().checked_sub(SETTLING * 2).unwrap();
        assert_eq!(pace.more(&samples, 0, (4, 4)), 1);
    }
}
