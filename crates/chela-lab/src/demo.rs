//! The demo: a simulated user with a plain preference talks to a server, which learns it; measured on prompts it never saw.

use crate::{
    LabError,
    client::{Client, Endpoint},
    evaluate::{self, Distance, Reading},
    problems::{self, Part, Problem},
    report::Table,
    stage::{self, Crowd, Ended, Goal, Live, Who},
    taste::{self, Scores, Taste},
    texts,
    user::{Arm, Play, Speaker},
};
use std::{sync::atomic::AtomicBool, time::Duration};

/// What the demo's user prefers.
pub const TASTE: Taste = Taste::Brief;

/// How long the demo waits for a next version before it says that nothing is learnt.
const PATIENCE: Duration = Duration::from_secs(300);

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
            max_tokens: TASTE.max_tokens(),
            lanes: 16,
        }
    }
}

impl DemoOptions {
    fn reading<'a>(&self, tag: &'a str, version: Option<u64>) -> Reading<'a> {
        Reading {
            tag,
            version,
            system: texts::ASSISTANT,
            max_tokens: self.max_tokens,
            lanes: self.lanes,
        }
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

fn crowd<'a>(
    client: &'a Client,
    arm: Arm,
    options: &DemoOptions,
    problems: &'a [Problem],
) -> Crowd<'a> {
    Crowd {
        client,
        who: Who::User(Play {
            tag: "demo",
            taste: TASTE,
            problems,
            speaker: Speaker::Scripted,
            system: texts::ASSISTANT,
            arm,
            seed: options.seed,
            temperature: options.temperature,
            max_tokens: options.max_tokens,
        }),
        first: 0,
        batch: options.batch,
        live: Live::HeldOut(options.live),
        lanes: options.lanes,
        goal: Goal::Steps(options.updates, options.enough),
        patience: PATIENCE,
    }
}

/// Plays one arm against a server that has learnt nothing yet. `before` may be given when the same base was just read.
pub fn run_arm(
    endpoint: Endpoint,
    arm: Arm,
    options: &DemoOptions,
    before: Option<(Scores, f64)>,
    table: &Table<'_>,
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
            (taste::score(TASTE, &replies), distance.base_nll)
        }
    };
    table.say(&format!("held-out before: {:.2}", before.passed))?;
    table.head()?;
    let problems = problems::everyday(Part::Training);
    let crowd = crowd(&client, arm, options, &problems);
    let last = stage::run(crowd, &AtomicBool::new(false), table)?;
    if let Ended::Paused(why) = last.ended {
        return Err(LabError::Stuck(format!("training is paused: {why}")));
    }
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
        after: taste::score(TASTE, &replies),
        held_out: questions.len(),
        base_nll_before,
        distance,
        updates: last.steps,
        interactions: last.sessions * 2,
    })
}
