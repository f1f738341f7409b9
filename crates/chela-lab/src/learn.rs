//! One run of the experiment: a simulated user of one taste teaches a server that has learnt nothing yet, and held-out prompts are
//! read greedily before, at each version, and after.

use crate::{
    LabError,
    client::{Client, Endpoint},
    evaluate::{self, Reading as How},
    journal::{Journal, Reading, Run},
    problems::{self, Part, Problem},
    report::Table,
    stage::{self, Crowd, Goal, Live, Sofar, Who},
    standing::Standing,
    taste::{self, Taste},
    texts,
    user::{self, Arm, Play, Speaker},
};
use std::{
    sync::{Mutex, PoisonError, atomic::AtomicBool},
    time::{Duration, Instant},
};

/// What becomes of the users' words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Teaching {
    /// Scores only.
    Binary,
    /// Hints only.
    Opd,
    /// Both.
    Combined,
    /// The control: both, but scores are thrown by a coin and hints speak of something else.
    Coin,
    /// The control without verdicts: users talk, nobody judges.
    None,
}

impl Teaching {
    /// All, in the order in which they run.
    pub const ALL: [Self; 5] = [
        Self::Combined,
        Self::Coin,
        Self::Opd,
        Self::Binary,
        Self::None,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Binary => "binary",
            Self::Opd => "opd",
            Self::Combined => "combined",
            Self::Coin => "coin",
            Self::None => "none",
        }
    }

    /// The one of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|t| t.name() == name)
    }

    /// The learning method that the server is to use.
    pub fn method(self) -> &'static str {
        match self {
            Self::Binary => "binary",
            Self::Opd => "opd",
            Self::Combined | Self::Coin | Self::None => "combined",
        }
    }

    fn arm(self) -> Arm {
        match self {
            Self::Coin => Arm::Control,
            _ => Arm::Treatment,
        }
    }
}

/// What is asked in a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Questions {
    /// Sessions begin with these.
    pub training: Vec<Problem>,
    /// Read for the style.
    pub held_out: Vec<Problem>,
    /// Read for their answers; empty = those of `held_out` are checked.
    pub checked: Vec<Problem>,
}

impl Questions {
    /// Those built in: everyday questions for who likes replies brief or thorough, with word problems to check answers on; word problems
    /// for a student; a pupil's work to comment on for those who do.
    pub fn of(taste: Taste, held_out: usize, checked: usize) -> Self {
        match taste {
            Taste::Brief | Taste::Thorough => Self {
                training: problems::everyday(Part::Training),
                held_out: first(problems::everyday(Part::HeldOut), held_out),
                checked: problems::word_problems(Part::HeldOut, checked),
            },
            Taste::Student => Self {
                training: problems::word_problems(Part::Training, 400),
                held_out: problems::word_problems(Part::HeldOut, held_out),
                checked: Vec::new(),
            },
            Taste::Ta | Taste::Teacher => {
                let commented = |all: Vec<Problem>| all.iter().map(comment).collect();
                Self {
                    training: commented(problems::word_problems(Part::Training, 400)),
                    held_out: commented(problems::word_problems(Part::HeldOut, held_out)),
                    // What a comment gets right no rule can read; that the model still reckons, it can.
                    checked: problems::word_problems(Part::HeldOut, checked),
                }
            }
        }
    }

    /// Those of a file: three of four are for training.
    pub fn from_file(taste: Taste, all: Vec<Problem>, held_out: usize) -> Self {
        let all: Vec<Problem> = if taste.comments() {
            all.iter().map(comment).collect()
        } else {
            all
        };
        let (mut training, mut held) = (Vec::new(), Vec::new());
        for (at, problem) in all.into_iter().enumerate() {
            if at % 4 == 3 {
                held.push(problem);
            } else {
                training.push(problem);
            }
        }
        Self {
            training,
            held_out: first(held, held_out),
            checked: Vec::new(),
        }
    }
}

fn first(mut all: Vec<Problem>, n: usize) -> Vec<Problem> {
    all.truncate(n);
    all
}

/// A pupil's work, to comment on.
fn comment(problem: &Problem) -> Problem {
    let work = problem.solution.as_deref().unwrap_or("I do not know.");
    Problem::open(&format!(
        "A pupil was asked: {} The pupil wrote: {work}. Please write a comment for the pupil.",
        problem.question
    ))
}

/// How a run is made, beside what its journal's setting says.
#[derive(Clone, Debug, PartialEq)]
pub struct LearnOptions {
    /// What the user likes.
    pub taste: Taste,
    /// What becomes of their words.
    pub teaching: Teaching,
    /// Seed of the user.
    pub seed: u64,
    /// Optimizer steps.
    pub updates: u64,
    /// Samples of a step, as the server is configured.
    pub batch: usize,
    /// Of the held-out prompts, read at each version.
    pub live: usize,
    /// The user's sampling temperature.
    pub temperature: f64,
    /// Sessions at once.
    pub lanes: usize,
    /// Who finds the user's words.
    pub speaker: Speaker,
    /// How long no next version may come.
    pub patience: Duration,
}

/// Sessions whose names may be taken after a stop: those that were under way.
const MAYBE_PLAYED: u64 = 64;

/// Plays one run, or goes on with it: what its journal has is not read again. `start` is the reading of the base model of another
/// run of the same setting, which is the same to the byte.
pub fn run(
    endpoint: Endpoint,
    options: &LearnOptions,
    questions: &Questions,
    (journal, start): (Journal, Option<Reading>),
    table: &Table<'_>,
) -> Result<Run, LabError> {
    let reader = Reader {
        client: Client::new(endpoint),
        options,
        questions,
        journal: Mutex::new(journal),
        began: Instant::now(),
        table,
    };
    let known = reader.known();
    if known.start().is_none() {
        match start {
            Some(start) => reader.keep(start)?,
            None => reader.read(true, (0, 0), Sofar::default())?,
        }
    }
    let sofar = Sofar {
        sessions: known.readings.last().map_or(0, |r| r.sessions) + known.resumed * MAYBE_PLAYED,
        three: known.readings.iter().find_map(|r| r.three),
    };
    let (version, steps, sofar) = if options.teaching == Teaching::None {
        reader.unjudged(sofar)?
    } else {
        reader.taught(sofar)?
    };
    // By its number: the last step may be published while its curve is read.
    reader.read(true, (steps, version), sofar)?;
    let mut journal = reader
        .journal
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    journal.end("as it was to")?;
    Ok(journal.run().clone())
}

struct Reader<'a, 't> {
    client: Client,
    options: &'a LearnOptions,
    questions: &'a Questions,
    journal: Mutex<Journal>,
    began: Instant,
    table: &'a Table<'t>,
}

impl Reader<'_, '_> {
    fn known(&self) -> Run {
        let journal = self.journal.lock().unwrap_or_else(PoisonError::into_inner);
        journal.run().clone()
    }

    fn keep(&self, reading: Reading) -> Result<(), LabError> {
        let mut journal = self.journal.lock().unwrap_or_else(PoisonError::into_inner);
        journal.reading(reading)
    }

    fn play(&self) -> Play<'_> {
        Play {
            tag: self.options.taste.name(),
            taste: self.options.taste,
            problems: &self.questions.training,
            speaker: self.options.speaker,
            system: texts::ASSISTANT,
            arm: self.options.teaching.arm(),
            seed: self.options.seed,
            temperature: self.options.temperature,
            max_tokens: self.options.taste.max_tokens(),
        }
    }

    /// Until all steps are made.
    fn taught(&self, sofar: Sofar) -> Result<(u64, u64, Sofar), LabError> {
        let look = |standing: &Standing, now: Sofar| {
            let steps = standing.steps();
            if self.known().readings.iter().any(|r| r.update == steps) {
                return Ok(None);
            }
            let now = Sofar {
                sessions: now.sessions,
                // Counted from where this run went on.
                three: sofar.three.or(now.three.map(|n| sofar.sessions + n)),
            };
            self.read(false, (steps, standing.served), now)?;
            let last = self
                .known()
                .readings
                .last()
                .map(|r| taste::share(r.passing.iter().copied()));
            Ok(last)
        };
        let crowd = Crowd {
            client: &self.client,
            who: Who::User(self.play()),
            first: sofar.sessions,
            batch: self.options.batch,
            live: Live::Each(&look),
            lanes: self.options.lanes,
            goal: Goal::Steps(self.options.updates, f64::INFINITY),
            patience: self.options.patience,
        };
        let course = stage::run(crowd, &AtomicBool::new(false), self.table)?;
        if course.steps < self.options.updates {
            return Err(LabError::Stuck(course.ended.to_string()));
        }
        let now = Sofar {
            sessions: course.sessions,
            three: sofar.three.or(course.three.map(|n| sofar.sessions + n)),
        };
        Ok((course.version, course.steps, now))
    }

    /// As many sessions as the steps would have taken; nothing may come of them.
    fn unjudged(&self, sofar: Sofar) -> Result<(u64, u64, Sofar), LabError> {
        let sessions = self.options.updates * self.options.batch as u64;
        let left = sessions.saturating_sub(sofar.sessions) as usize;
        evaluate::in_parallel(left, self.options.lanes, |i| {
            let played = user::play(&self.client, self.play(), sofar.sessions + i as u64)?;
            self.table.session(self.client.profile(), &played, None)
        })?;
        let standing = self.client.standing()?;
        let samples: u64 = standing.samples.values().sum();
        if standing.newest() > 0 || samples > 0 {
            return Err(LabError::Stuck(format!(
                "nobody judged, and there are {samples} samples and version {}",
                standing.newest()
            )));
        }
        let now = Sofar { sessions, ..sofar };
        Ok((0, 0, now))
    }

    /// Reads held-out prompts with a version, and keeps what it came to.
    fn read(
        &self,
        whole: bool,
        (update, version): (u64, u64),
        sofar: Sofar,
    ) -> Result<(), LabError> {
        let (options, questions) = (self.options, self.questions);
        let most = if whole { usize::MAX } else { options.live };
        let held: Vec<&Problem> = questions.held_out.iter().take(most).collect();
        if held.is_empty() {
            return Ok(());
        }
        let tag = format!("{}{version}", if whole { "whole" } else { "live" });
        let how = |tag, max_tokens| How {
            tag,
            version: Some(version),
            system: texts::ASSISTANT,
            max_tokens,
            lanes: options.lanes,
        };
        fn asked<'a>(problems: &[&'a Problem]) -> Vec<&'a str> {
            problems.iter().map(|p| p.question.as_str()).collect()
        }
        let replies = evaluate::read(
            &self.client,
            how(&tag, options.taste.max_tokens()),
            &asked(&held),
        )?;
        let distance = evaluate::distance(&self.client, &tag, held.len(), version, 4)?;
        let scores = taste::score(options.taste, &replies);
        let mut right: Vec<bool> = Vec::new();
        if questions.checked.is_empty() {
            right.extend(
                held.iter()
                    .zip(&replies)
                    .filter_map(|(p, r)| p.right(&r.reply)),
            );
        } else if whole {
            let problems: Vec<&Problem> = questions.checked.iter().collect();
            let tag = format!("checked{version}");
            let replies =
                evaluate::read(&self.client, how(&tag, CHECKED_TOKENS), &asked(&problems))?;
            right.extend(
                problems
                    .iter()
                    .zip(&replies)
                    .filter_map(|(p, r)| p.right(&r.reply)),
            );
        }
        let reading = Reading {
            update,
            version,
            whole,
            passing: taste::passing(options.taste, &replies),
            right,
            distinct: scores.distinct,
            on_topic: scores.on_topic,
            mean_tokens: scores.mean_tokens,
            kl_to_base: distance.kl_to_base,
            base_nll: distance.base_nll,
            sessions: sofar.sessions,
            three: sofar.three,
            seconds: self.began.elapsed().as_secs_f64(),
        };
        self.table.say(&said(&reading))?;
        self.keep(reading)
    }
}

/// Room for a reckoning, whatever length the user likes.
const CHECKED_TOKENS: usize = 160;

/// A reading in a line.
fn said(r: &Reading) -> String {
    let right = if r.right.is_empty() {
        String::new()
    } else {
        format!(
            ", right {:.2} of {}",
            taste::share(r.right.iter().copied()),
            r.right.len()
        )
    };
    format!(
        "         update {}: passes {:.2} of {} held-out{right}; mean {:.0} tokens, distinct {:.2}, on topic {:.2}, KL to base {:.3} nats a token",
        r.update,
        taste::share(r.passing.iter().copied()),
        r.passing.len(),
        r.mean_tokens,
        r.distinct,
        r.on_topic,
        r.kl_to_base
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn teachings_have_names_and_methods_of_the_server() {
        for teaching in Teaching::ALL {
            assert_eq!(Teaching::named(teaching.name()), Some(teaching));
            assert!(["binary", "opd", "combined"].contains(&teaching.method()));
        }
        assert_eq!(Teaching::named("luck"), None);
    }

    #[test]
    fn every_taste_has_questions_and_none_is_on_both_sides() {
        for taste in Taste::ALL {
            let questions = Questions::of(taste, 200, 40);
            assert_eq!(questions.held_out.len(), 200, "{taste:?}");
            assert!(questions.training.len() >= 150);
            assert!(
                questions
                    .held_out
                    .iter()
                    .all(|p| !questions.training.contains(p))
            );
            let checked = if questions.checked.is_empty() {
                &questions.held_out
            } else {
                &questions.checked
            };
            assert!(checked.iter().all(|p| p.answer.is_some()), "{taste:?}");
        }
        let all = problems::word_problems(Part::Training, 40);
        let mine = Questions::from_file(Taste::Teacher, all, 8);
        assert_eq!((mine.training.len(), mine.held_out.len()), (30, 8));
        assert!(mine.held_out[0].question.contains("The pupil wrote: "));
    }
}
