//! Runs a task against a server: several replies to each prompt, each checked and handed in with its reward, as many as the server's
//! steps can take before they are too old; held-out prompts are read before, on the way, and after.

use crate::{
    LabError,
    capacity::{Bounds, Rollouts},
    client::{Ask, Client, Endpoint},
    evaluate::{self, Reading as How},
    journal::{Journal, Reading, Run},
    report::Table,
    standing::{Groups, Standing},
    tasks::{Item, Task},
    taste::share,
    texts,
    user::{self, Dice},
};
use std::{
    collections::{BTreeMap, HashSet},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// How a task is run.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainOptions {
    /// Optimizer steps to be made, beyond those that the served version has.
    pub steps: u64,
    /// n: replies to each prompt.
    pub samples: usize,
    /// Requests at once.
    pub lanes: usize,
    /// Held-out prompts are read after so many steps; 0 = before and after only.
    pub every: u64,
    /// Decides the order of prompts and the sampling seeds.
    pub seed: u64,
    /// Tells this run's sessions from those of another one on the same server.
    pub tag: String,
    /// How long no next version may come.
    pub patience: Duration,
}

/// Mean reward of the replies that one version made.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Rewards {
    sum: f64,
    replies: u64,
    /// Cut by their limit.
    cut: u64,
}

struct Runner<'a, 't> {
    client: Client,
    task: &'a Task,
    options: &'a TrainOptions,
    table: &'a Table<'t>,
    began: Instant,
    /// Replies begun; group and place in it follow from the number.
    begun: AtomicU64,
    /// Replies that may have begun by now.
    limit: AtomicU64,
    /// Replies handed in.
    handed_in: AtomicU64,
    /// Of these, refused.
    refused: AtomicU64,
    over: AtomicBool,
    failed: Mutex<Option<LabError>>,
    rewards: Mutex<BTreeMap<u64, Rewards>>,
    journal: Mutex<Journal>,
}

/// Runs it to its end.
pub fn run(
    endpoint: Endpoint,
    task: &Task,
    options: &TrainOptions,
    journal: Journal,
    table: &Table<'_>,
) -> Result<Run, LabError> {
    let client = Client::new(endpoint);
    let standing = client.standing()?;
    let groups = trained(&standing)?;
    let runner = Runner {
        client,
        task,
        options,
        table,
        began: Instant::now(),
        begun: AtomicU64::new(0),
        limit: AtomicU64::new(0),
        handed_in: AtomicU64::new(0),
        refused: AtomicU64::new(0),
        over: AtomicBool::new(false),
        failed: Mutex::new(None),
        rewards: Mutex::default(),
        journal: Mutex::new(journal),
    };
    runner.read(0, standing.served)?;
    let outcome = std::thread::scope(|scope| {
        for _ in 0..options.lanes.max(1) {
            scope.spawn(|| runner.lane());
        }
        let outcome = runner.watch(&standing, &groups);
        runner.over.store(true, Ordering::Relaxed);
        outcome
    });
    if let Some(error) = locked(&runner.failed).take() {
        return Err(error);
    }
    let (steps, version) = outcome?;
    let read = locked(&runner.journal)
        .run()
        .readings
        .iter()
        .any(|r| r.update == steps);
    if !read {
        runner.read(steps, version)?;
    }
    let mut journal = locked(&runner.journal);
    journal.end("as it was to")?;
    Ok(journal.run().clone())
}

/// What the server says of groups; an error when it trains on none.
pub fn trained(standing: &Standing) -> Result<Groups, LabError> {
    standing.groups.clone().ok_or_else(|| {
        LabError::Stuck(
            "the server does not learn (learning.on = false), so a task teaches it nothing"
                .to_owned(),
        )
    })
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Runner<'_, '_> {
    fn lane(&self) {
        while !self.over.load(Ordering::Relaxed) {
            let limit = self.limit.load(Ordering::Relaxed);
            let begun = self
                .begun
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| {
                    (n < limit).then_some(n + 1)
                });
            let Ok(number) = begun else {
                std::thread::sleep(Duration::from_millis(5));
                continue;
            };
            if let Err(error) = self.reply(number) {
                locked(&self.failed).get_or_insert(error);
                self.over.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Asks for one reply and hands it in.
    fn reply(&self, number: u64) -> Result<(), LabError> {
        let (options, task) = (self.options, self.task);
        let n = options.samples as u64;
        let (group, place) = (number / n, number % n);
        let item = &task.training[user::which(task.training.len(), options.seed, group)];
        let name = format!("{}-{}-{}-{group}", task.name, options.tag, options.seed);
        let mut dice = Dice::new(options.seed.wrapping_mul(3_000_017).wrapping_add(number));
        let reply = self.client.chat(&Ask {
            version: None,
            session: &format!("{name}-{place}"),
            kind: Some("main"),
            done: true,
            messages: &texts::opening(&task.system, &item.question),
            temperature: task.temperature,
            max_tokens: task.max_tokens,
            seed: dice.next_number() >> 12,
        })?;
        let reward = item.reward(&reply.text);
        match self
            .client
            .scored(&reply.turn, reward, (&name, options.samples))
        {
            // One that can never train, an empty one say: its group stays incomplete and falls.
            Err(LabError::Refused {
                status, message, ..
            }) if status < 500 => {
                self.refused.fetch_add(1, Ordering::Relaxed);
                self.table
                    .say(&format!("a reply was not taken: {message}"))?;
            }
            other => other?,
        }
        let mut rewards = locked(&self.rewards);
        let of = rewards.entry(reply.version).or_default();
        of.sum += reward;
        of.replies += 1;
        of.cut += u64::from(!reply.ended);
        self.handed_in.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Lets groups begin as the server's steps go on, until all are made. Steps made, and the version that holds them.
    fn watch(&self, first: &Standing, groups: &Groups) -> Result<(u64, u64), LabError> {
        let n = self.options.samples as u64;
        let bounds = Bounds {
            // One more than the lanes hold, so that none idles while the slowest reply of a group is on its way.
            max_concurrent: (self.options.lanes as u64).div_ceil(n) + 1,
            ..groups.bounds
        };
        let mut before = Samples::of(first);
        let mut read = 0;
        let mut newest = (first.newest(), Instant::now());
        let mut seen = HashSet::from([first.served]);
        let from = first.steps();
        loop {
            let standing = self.client.standing()?;
            if standing.newest() != newest.0 {
                newest = (standing.newest(), Instant::now());
            }
            let steps = standing.steps().saturating_sub(from);
            if seen.insert(standing.served) {
                self.told(&standing, steps)?;
                let every = self.options.every;
                // Several steps may have been made since the last look.
                if every > 0 && steps / every > read {
                    read = steps / every;
                    self.read(steps, standing.served)?;
                    // Nothing could begin meanwhile, so nothing could come.
                    newest.1 = Instant::now();
                }
            }
            if steps >= self.options.steps || self.over.load(Ordering::Relaxed) {
                return Ok((steps, standing.served));
            }
            if let Some(why) = standing.paused {
                return Err(LabError::Stuck(format!("training is paused: {why}")));
            }
            if newest.1.elapsed() > self.options.patience {
                return Err(LabError::Stuck(format!(
                    "no new version for {} s; samples stand at {:?}",
                    self.options.patience.as_secs(),
                    standing.samples
                )));
            }
            // What is handed in is a sample a moment later.
            let now = Samples::of(&standing);
            // What waited at the beginning and was trained on since takes no room any more.
            before.waiting = before.waiting.min(now.waiting);
            let handed_in = self.handed_in.load(Ordering::Relaxed);
            let on_the_way = (handed_in - self.refused.load(Ordering::Relaxed))
                .saturating_sub(now.all.saturating_sub(before.all));
            let waiting = now.waiting.saturating_sub(before.waiting) + on_the_way;
            let begun = self.begun.load(Ordering::Relaxed);
            let rollouts = Rollouts {
                steps,
                accepted: steps * bounds.batch + waiting.div_ceil(n),
                running: begun.saturating_sub(handed_in).div_ceil(n),
            };
            // Whole groups begin; one that has begun is in `running`.
            let whole = begun.div_ceil(n) + rollouts.capacity(&bounds);
            self.limit.fetch_max(whole * n, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// What the new version learnt from, in a line.
    fn told(&self, standing: &Standing, steps: u64) -> Result<(), LabError> {
        let version = standing
            .versions
            .iter()
            .find(|v| v.version == standing.served);
        let metric = |name: &str| {
            let value = version.and_then(|v| v.metrics[name].as_f64());
            value.map_or_else(|| "-".to_owned(), |v| format!("{v:.3}"))
        };
        // The one before it made most of what it learnt from.
        let rewards = locked(&self.rewards);
        let made = rewards
            .range(..standing.served)
            .next_back()
            .map(|(_, r)| *r);
        let made = made.unwrap_or_default();
        let of = |n: f64| n / made.replies.max(1) as f64;
        self.table.say(&format!(
            "{:>6.0} s  step {steps:>3}: reward {:.3} over {} replies of the version before, cut {:.2}; grad norm {}, KL to base {}",
            self.began.elapsed().as_secs_f64(),
            of(made.sum),
            made.replies,
            of(made.cut as f64),
            metric("grad_norm"),
            metric("kl_to_base"),
        ))
    }

    /// Reads the held-out prompts greedily.
    fn read(&self, update: u64, version: u64) -> Result<(), LabError> {
        let asked: Vec<&str> = self
            .task
            .held_out
            .iter()
            .map(|i| i.question.as_str())
            .collect();
        let tag = format!("{}-{}-{version}", self.task.name, self.options.tag);
        let how = How {
            tag: &tag,
            version: Some(version),
            system: &self.task.system,
            max_tokens: self.task.max_tokens,
            lanes: self.options.lanes,
        };
        let replies = evaluate::read(&self.client, how, &asked)?;
        let distance = evaluate::distance(&self.client, &tag, asked.len(), version, 4)?;
        let right = |(item, reply): (&Item, &str)| item.reward(reply) == 1.0;
        let texts = replies.iter().map(|r| r.reply.as_str());
        let right: Vec<bool> = self.task.held_out.iter().zip(texts).map(right).collect();
        let distinct: HashSet<&str> = replies.iter().map(|r| r.reply.as_str()).collect();
        let tokens: usize = replies.iter().map(|r| r.tokens).sum();
        let n = replies.len().max(1) as f64;
        let reading = Reading {
            update,
            version,
            whole: true,
            passing: right.clone(),
            right,
            distinct: distinct.len() as f64 / n,
            on_topic: share(replies.iter().map(|r| r.ended)),
            mean_tokens: tokens as f64 / n,
            kl_to_base: distance.kl_to_base,
            base_nll: distance.base_nll,
            sessions: self.begun.load(Ordering::Relaxed),
            three: None,
            seconds: self.began.elapsed().as_secs_f64(),
        };
        self.table.say(&format!(
            "{:>6.0} s  step {update:>3}: {:.2} of {} held-out prompts are right; {:.0} tokens, {:.2} ended by themselves, KL to base {:.3}",
            reading.seconds,
            share(reading.right.iter().copied()),
            replies.len(),
            reading.mean_tokens,
            reading.on_topic,
            reading.kl_to_base
        ))?;
        locked(&self.journal).reading(reading)
    }
}

/// How many samples there are, and how many of them are not trained on yet.
struct Samples {
    all: u64,
    waiting: u64,
}

impl Samples {
    fn of(standing: &Standing) -> Self {
        Self {
            all: standing.samples.values().sum(),
            waiting: standing.count("pending") + standing.count("leased"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_does_not_learn_is_told() {
        let standing = Standing::default();
        let error = trained(&standing).unwrap_err().to_string();
        assert!(error.contains("learning.on"), "{error}");
    }
}
