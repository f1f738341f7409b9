//! Two users with opposite tastes on one server at the same time, a profile each: does each profile learn its own user's taste, and
//! nothing of the other's?

use crate::{
    LabError,
    client::{Client, Endpoint, Member},
    evaluate::{self, Reading},
    matrix::{Change, Row, change_line, changes, matrix_table, row},
    problems::{self, Part, Problem},
    report::{Table, versions_table},
    stage::{self, Course, Crowd, Goal, Live, Who},
    standing::{Standing, Version},
    taste::{HeldOut, Taste},
    texts,
    user::{Arm, Play, Speaker},
};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

/// How it runs.
#[derive(Clone, Debug, PartialEq)]
pub struct ProfilesOptions {
    /// Seed of the users.
    pub seed: u64,
    /// Most optimizer steps of each profile.
    pub updates: u64,
    /// Samples of a step, as the server is configured.
    pub batch: usize,
    /// Held-out prompts read at the end.
    pub held_out: usize,
    /// Held-out prompts read at each version.
    pub live: usize,
    /// Live score at which a profile has learnt enough.
    pub enough: f64,
    /// Prompts read before and after the other profile's last step.
    pub still: usize,
    /// What sessions begin with.
    pub problems: Vec<Problem>,
    /// Sampling temperature.
    pub temperature: f64,
    /// Sessions of each user at once.
    pub lanes: usize,
    /// How long to wait for a next version.
    pub patience: Duration,
}

impl Default for ProfilesOptions {
    fn default() -> Self {
        Self {
            seed: 1,
            updates: 8,
            batch: 16,
            held_out: 120,
            live: 24,
            enough: 0.75,
            still: 16,
            problems: problems::everyday(Part::Training),
            temperature: 0.7,
            lanes: 8,
            patience: Duration::from_secs(1200),
        }
    }
}

/// One profile's way.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Way {
    /// The profile.
    pub profile: &'static str,
    /// What its user prefers.
    pub preference: &'static str,
    /// Sessions the user played.
    pub sessions: u64,
    /// How it ended.
    pub ended: String,
    /// Samples by state at the very end.
    pub samples: BTreeMap<String, u64>,
    /// Every version with what the gate and the watch made of it.
    pub versions: Vec<Version>,
}

/// One more step of one profile, and the other's replies before and after it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Stillness {
    /// The profile that made a step.
    pub moved: &'static str,
    /// Its served version before and after.
    pub moved_versions: (u64, u64),
    /// The step's version and what became of it.
    pub step: (u64, String),
    /// How many of its replies to the same prompts changed.
    pub moved_changed: usize,
    /// The other profile.
    pub still: &'static str,
    /// Its served version before and after.
    pub still_versions: (u64, u64),
    /// Prompts read of each.
    pub prompts: usize,
    /// Replies of the other that are equal byte for byte; all of them, if profiles are apart.
    pub still_equal: usize,
}

/// What it came to.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ProfilesReport {
    /// `profiles`
    pub experiment: &'static str,
    /// Seed.
    pub seed: u64,
    /// Samples of a step.
    pub batch: usize,
    /// Held-out prompts.
    pub held_out: usize,
    /// The matrix.
    pub matrix: Vec<Row>,
    /// Its differences.
    pub changes: Vec<Change>,
    /// Whether one profile's step moved the other.
    pub stillness: Stillness,
    /// How each profile came there.
    pub profiles: Vec<Way>,
    /// Three replies of each row to the same prompts.
    pub examples: Vec<BTreeMap<String, String>>,
}

/// Plays both users; their profiles' keys, of the brief one first.
pub fn run(
    endpoint: &Endpoint,
    keys: [String; 2],
    options: &ProfilesOptions,
    table: &Table<'_>,
) -> Result<ProfilesReport, LabError> {
    let mut keys = keys.into_iter();
    let clients = Taste::OPPOSITE.map(|taste| {
        let member = Member {
            profile: taste.name().to_owned(),
            key: keys.next(),
        };
        Client::of(endpoint.clone(), member)
    });
    let base = options.read(&clients[0], ("base", 0), table)?;
    table.head()?;
    let courses = both(&clients, options, table)?;
    let standings = [
        stage::settle(&clients[0], options.batch, options.patience)?,
        stage::settle(&clients[1], options.batch, options.patience)?,
    ];
    // By its number: what a user says last may still have made a step.
    let brief = options.read(&clients[0], ("brief", courses[0].version), table)?;
    let thorough = options.read(&clients[1], ("thorough", courses[1].version), table)?;
    let of = |course: &Course| (course.version, course.steps);
    let matrix = vec![
        row("base", (0, 0), &base),
        row("brief", of(&courses[0]), &brief),
        row("thorough", of(&courses[1]), &thorough),
    ];
    table.say(&matrix_table(&matrix))?;
    let stillness = stillness(&clients, (&courses, standings), options, table)?;
    let report = ProfilesReport {
        experiment: "profiles",
        seed: options.seed,
        batch: options.batch,
        held_out: base.len(),
        changes: changes(&matrix, base.len()),
        stillness,
        profiles: vec![
            way(&clients[0], Taste::Brief, &courses[0])?,
            way(&clients[1], Taste::Thorough, &courses[1])?,
        ],
        examples: examples([("base", &base), ("brief", &brief), ("thorough", &thorough)]),
        matrix,
    };
    show(&report, table)?;
    Ok(report)
}

/// Everything but the matrix, which was shown when it was read.
fn show(report: &ProfilesReport, table: &Table<'_>) -> Result<(), LabError> {
    table.say(&still_line(&report.stillness))?;
    for way in &report.profiles {
        table.say(&format!(
            "\n{}, {} sessions, {}\n{}",
            way.profile,
            way.sessions,
            way.ended,
            versions_table(&way.versions, None)
        ))?;
    }
    table.say("")?;
    for change in &report.changes {
        table.say(&change_line(change))?;
    }
    Ok(())
}

impl ProfilesOptions {
    /// Both tastes are read from the same replies, so all are asked for as long as the longer one needs.
    fn reading<'a>(&self, tag: &'a str, version: Option<u64>, lanes: usize) -> Reading<'a> {
        Reading {
            tag,
            version,
            system: texts::PARAGRAPH,
            max_tokens: Taste::Thorough.max_tokens(),
            lanes,
        }
    }

    /// The held-out prompts, answered by a version.
    fn read(
        &self,
        client: &Client,
        (name, version): (&str, u64),
        table: &Table<'_>,
    ) -> Result<Vec<HeldOut>, LabError> {
        let questions = texts::held_out();
        let questions = &questions[..self.held_out.min(questions.len())];
        table.say(&format!(
            "reading {} held-out prompts with {name}, version {version} …",
            questions.len()
        ))?;
        let tag = format!("{name}-{version}");
        // Alone on the server: twice the lanes of one of two.
        let reading = self.reading(&tag, Some(version), 2 * self.lanes);
        evaluate::read(client, reading, questions)
    }

    fn crowd<'a>(&'a self, client: &'a Client, taste: Taste, first: u64, goal: Goal) -> Crowd<'a> {
        Crowd {
            client,
            who: Who::User(Play {
                tag: taste.name(),
                taste,
                problems: &self.problems,
                speaker: Speaker::Scripted,
                system: texts::PARAGRAPH,
                arm: Arm::Treatment,
                seed: self.seed,
                temperature: self.temperature,
                max_tokens: taste.max_tokens(),
            }),
            first,
            batch: self.batch,
            live: Live::HeldOut(self.live),
            lanes: self.lanes,
            goal,
            patience: self.patience,
        }
    }
}

/// Both users at once, each until their profile has learnt enough.
fn both(
    clients: &[Client; 2],
    options: &ProfilesOptions,
    table: &Table<'_>,
) -> Result<[Course; 2], LabError> {
    let stop = AtomicBool::new(false);
    let one = |at: usize| {
        let goal = Goal::Steps(options.updates, options.enough);
        let crowd = options.crowd(&clients[at], Taste::OPPOSITE[at], 0, goal);
        let course = stage::run(crowd, &stop, table);
        // Without one of them the experiment is over.
        if course.is_err() {
            stop.store(true, Ordering::Relaxed);
        }
        course
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| one(1));
        let first = one(0);
        let other = other
            .join()
            .unwrap_or_else(|_| Err(LabError::Stuck("a user's thread panicked".to_owned())));
        Ok([first?, other?])
    })
}

/// Reads the thorough profile, lets the brief one make one more step, and reads again: through the pointer, as its user would.
fn stillness(
    clients: &[Client; 2],
    (courses, standings): (&[Course; 2], [Standing; 2]),
    options: &ProfilesOptions,
    table: &Table<'_>,
) -> Result<Stillness, LabError> {
    let questions = texts::held_out();
    let questions = &questions[..options.still.min(questions.len())];
    let read = |client: &Client, when: &str| {
        let tag = format!("still-{when}");
        evaluate::read(
            client,
            options.reading(&tag, None, options.lanes),
            questions,
        )
    };
    let (mover, other) = (&clients[0], &clients[1]);
    table.say("\none more step of profile brief; does profile thorough move? …")?;
    let before = (read(mover, "before")?, read(other, "before")?);
    let newest = standings[0].newest();
    // Where training is paused no step comes, and the report says so.
    if standings[0].paused.is_none() {
        let goal = Goal::VersionAfter(newest);
        let crowd = options.crowd(mover, Taste::Brief, courses[0].sessions, goal);
        stage::run(crowd, &AtomicBool::new(false), table)?;
    }
    let after = (read(mover, "after")?, read(other, "after")?);
    let (moved, still) = (mover.standing()?, other.standing()?);
    let step = moved.versions.iter().find(|v| v.version > newest);
    Ok(Stillness {
        moved: Taste::Brief.name(),
        moved_versions: (standings[0].served, moved.served),
        step: step.map_or((0, "no step was made".to_owned()), |v| {
            (v.version, v.state.clone())
        }),
        moved_changed: questions.len() - equal(&before.0, &after.0),
        still: Taste::Thorough.name(),
        still_versions: (standings[1].served, still.served),
        prompts: questions.len(),
        still_equal: equal(&before.1, &after.1),
    })
}

fn equal(before: &[HeldOut], after: &[HeldOut]) -> usize {
    before.iter().zip(after).filter(|(b, a)| b == a).count()
}

fn way(client: &Client, taste: Taste, course: &Course) -> Result<Way, LabError> {
    let standing = client.standing()?;
    Ok(Way {
        profile: taste.name(),
        preference: taste.description(),
        sessions: course.sessions,
        ended: course.ended.to_string(),
        samples: standing.samples,
        versions: standing.versions,
    })
}

fn examples(rows: [(&str, &Vec<HeldOut>); 3]) -> Vec<BTreeMap<String, String>> {
    let one = |i: usize| {
        let replies = rows
            .iter()
            .filter_map(|(name, r)| Some(((*name).to_owned(), r.get(i)?.reply.clone())));
        let question = rows[0].1.get(i).map(|r| r.question.clone());
        let question = question.map(|q| ("question".to_owned(), q));
        replies.chain(question).collect()
    };
    (0..3).map(one).collect()
}

fn still_line(s: &Stillness) -> String {
    format!(
        "profile {}: step {} ({}), served v{} -> v{}, {} of {} replies changed; profile {}: v{} -> v{}, {} of {} replies are the same \
         byte for byte",
        s.moved,
        s.step.0,
        s.step.1,
        s.moved_versions.0,
        s.moved_versions.1,
        s.moved_changed,
        s.prompts,
        s.still,
        s.still_versions.0,
        s.still_versions.1,
        s.still_equal,
        s.prompts
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(reply: &str) -> HeldOut {
        HeldOut {
            question: "Why do planets orbit the sun?".to_owned(),
            reply: reply.to_owned(),
            ended: true,
            tokens: 20,
        }
    }

    #[test]
    fn equal_means_every_byte_and_how_it_ended() {
        let (a, b) = (held("Same."), held("same."));
        let mut cut = a.clone();
        cut.ended = false;
        let before = [a.clone(), a.clone(), a.clone()];
        assert_eq!(equal(&before, &[a, b, cut]), 1);
    }
}
