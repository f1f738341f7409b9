//! Simulated users of one profile on the stage: they come when a batch is wanted, and leave when enough is learnt.

use crate::{
    LabError,
    client::Client,
    evaluate::{self, Reading},
    hostile::{self, Loop},
    report::Table,
    standing::Standing,
    taste, texts,
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

/// When it is enough.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Goal {
    /// So many steps are made, or the live score reaches this: what comes after sharpens more than it teaches.
    Steps(u64, f64),
    /// A version newer than this was made and decided on, whatever became of it.
    VersionAfter(u64),
    /// So many sessions are played.
    Sessions(u64),
}

/// Who comes.
#[derive(Clone, Copy, Debug)]
pub enum Who<'a> {
    /// Somebody with a taste.
    User(Play<'a>),
    /// A hostile loop.
    Loop(Loop),
}

impl Who<'_> {
    fn play(self, client: &Client, index: u64) -> Result<Played, LabError> {
        match self {
            Self::User(play) => user::play(client, play, index),
            Self::Loop(how) => hostile::play(client, how, index),
        }
    }
}

/// Answers a look at a version that is newly served with its live score, when it has one.
pub type Look<'a> = &'a (dyn Fn(&Standing, Sofar) -> Result<Option<f64>, LabError> + Sync);

/// What is read at each new version.
#[derive(Clone, Copy)]
pub enum Live<'a> {
    /// Nothing.
    No,
    /// So many held-out everyday questions, for the live column.
    HeldOut(usize),
    /// What this one likes.
    Each(Look<'a>),
}

/// How far the sessions are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sofar {
    /// Begun, earlier runs included.
    pub sessions: u64,
    /// After how many sessions three in a row had been as the user likes them, in order of their ends; `None` = not yet.
    pub three: Option<u64>,
}

/// Users of one profile.
#[derive(Clone, Copy)]
pub struct Crowd<'a> {
    /// Their connection.
    pub client: &'a Client,
    /// Who they are.
    pub who: Who<'a>,
    /// Sessions that were played before: names go on from there.
    pub first: u64,
    /// Samples of a step, as the server is configured.
    pub batch: usize,
    /// What is read at each version.
    pub live: Live<'a>,
    /// Sessions at once.
    pub lanes: usize,
    /// When it is enough.
    pub goal: Goal,
    /// How long no next version may come before nothing is learnt any more.
    pub patience: Duration,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// As it was to.
    Goal,
    /// The live score was enough.
    Enough,
    /// The server paused training, and why.
    Paused(String),
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Goal => f.write_str("as it was to"),
            Self::Enough => f.write_str("the live score was enough"),
            Self::Paused(why) => write!(f, "training is paused: {why}"),
        }
    }
}

/// What a run came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Course {
    /// The version that was served at its end.
    pub version: u64,
    /// Steps of that version.
    pub steps: u64,
    /// Sessions played so far, earlier runs included.
    pub sessions: u64,
    /// See [`Sofar::three`].
    pub three: Option<u64>,
    /// How it ended.
    pub ended: Ended,
}

/// How long a session may wait for its sample before it counts as one that makes none.
const SETTLING: Duration = Duration::from_secs(20);

struct Stage<'a> {
    crowd: Crowd<'a>,
    /// Sessions begun.
    next: AtomicU64,
    /// Sessions over.
    played: AtomicU64,
    /// Sessions that may have begun by now.
    limit: AtomicU64,
    stop: &'a AtomicBool,
    over: AtomicBool,
    failed: Mutex<Option<LabError>>,
}

impl Stage<'_> {
    fn going(&self) -> bool {
        !self.over.load(Ordering::Relaxed) && !self.stop.load(Ordering::Relaxed)
    }

    fn lane(&self, results: &mpsc::Sender<Played>) {
        while self.going() {
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
            match self.crowd.who.play(self.crowd.client, index) {
                Ok(played) => {
                    self.played.fetch_add(1, Ordering::Relaxed);
                    let _ = results.send(played); // the receiver goes first when the run ends
                }
                Err(error) => {
                    self.failed
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .get_or_insert(error);
                    self.over.store(true, Ordering::Relaxed);
                }
            }
        }
    }
}

/// When users come: as many as a batch needs, and only once it is decided whether the version is served that learnt from the last
/// one. On two cores nothing is gained by talking to an old version meanwhile, and what it says teaches less.
struct Pace {
    batch: u64,
    /// Sessions played before these.
    first: u64,
    /// Samples made so far, and since when it has been so many.
    made: (u64, Instant),
    /// Samples that were there at the beginning.
    before: Option<u64>,
    /// Sessions of which no sample came.
    lost: u64,
}

impl Pace {
    fn new(batch: usize, first: u64) -> Self {
        Self {
            batch: batch as u64,
            first,
            made: (0, Instant::now()),
            before: None,
            lost: 0,
        }
    }

    /// How many more may begin. Begun and played count from the profile's first session.
    fn more(&mut self, standing: &Standing, (begun, played): (u64, u64)) -> u64 {
        let all: u64 = standing.samples.values().sum();
        let made = all.saturating_sub(*self.before.get_or_insert(all));
        if made != self.made.0 {
            self.made = (made, Instant::now());
        }
        let learning = standing.learning();
        let mut settling = (played - self.first).saturating_sub(made + self.lost);
        if settling > 0 && begun == played && !learning && self.made.1.elapsed() > SETTLING {
            self.lost += settling;
            settling = 0;
        }
        if learning {
            return 0;
        }
        let coming = standing.count("pending") + (begun - played) + settling;
        self.batch.saturating_sub(coming)
    }
}

/// How many sessions in a row were as the user likes them.
#[derive(Default)]
struct Streak {
    ended: u64,
    row: u64,
    three: Option<u64>,
}

impl Streak {
    fn add(&mut self, fits: bool) {
        self.ended += 1;
        self.row = if fits { self.row + 1 } else { 0 };
        if self.row == 3 {
            self.three.get_or_insert(self.ended);
        }
    }
}

/// Plays sessions until it is enough, or `stop` is set by whoever runs beside it.
pub fn run(crowd: Crowd<'_>, stop: &AtomicBool, table: &Table<'_>) -> Result<Course, LabError> {
    let stage = Stage {
        crowd,
        next: AtomicU64::new(crowd.first),
        played: AtomicU64::new(crowd.first),
        limit: AtomicU64::new(crowd.first),
        stop,
        over: AtomicBool::new(false),
        failed: Mutex::new(None),
    };
    let outcome = std::thread::scope(|scope| {
        let (sender, results) = mpsc::channel();
        for _ in 0..crowd.lanes {
            let sender = sender.clone();
            let stage = &stage;
            scope.spawn(move || stage.lane(&sender));
        }
        drop(sender);
        let outcome = watch(&stage, &results, table);
        stage.over.store(true, Ordering::Relaxed);
        outcome
    });
    let failed = stage.failed.into_inner();
    if let Some(error) = failed.unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    let (standing, three, ended) = outcome?;
    Ok(Course {
        version: standing.served,
        steps: standing.steps(),
        sessions: stage.next.into_inner(),
        three,
        ended,
    })
}

/// Prints sessions as they end, reads a few held-out prompts at each new version, and says when it is enough.
fn watch(
    stage: &Stage<'_>,
    results: &mpsc::Receiver<Played>,
    table: &Table<'_>,
) -> Result<(Standing, Option<u64>, Ended), LabError> {
    let crowd = &stage.crowd;
    let mut streak = Streak::default();
    let mut seen = HashSet::new();
    let mut score = None;
    let mut last_version = (0, Instant::now());
    let mut pace = Pace::new(crowd.batch, crowd.first);
    loop {
        while let Ok(played) = results.recv_timeout(Duration::from_millis(100)) {
            streak.add(played.fits);
            table.session(crowd.client.profile(), &played, score)?;
        }
        let standing = crowd.client.standing()?;
        let begun = stage.next.load(Ordering::Relaxed);
        let new = standing.served > 0 && seen.insert(standing.served);
        if let (true, Live::Each(look)) = (new, crowd.live) {
            let sofar = Sofar {
                sessions: begun,
                three: streak.three,
            };
            score = look(&standing, sofar)?.or(score);
        }
        if reached(crowd.goal, &standing, begun) || !stage.going() {
            return Ok((standing, streak.three, Ended::Goal));
        }
        if let Some(why) = standing.paused.clone() {
            return Ok((standing, streak.three, Ended::Paused(why)));
        }
        let played = stage.played.load(Ordering::Relaxed);
        let more = pace.more(&standing, (begun, played));
        stage
            .limit
            .store(most(crowd.goal).min(begun + more), Ordering::Relaxed);
        if standing.newest() != last_version.0 {
            last_version = (standing.newest(), Instant::now());
        }
        if let (true, Live::HeldOut(_)) = (new, crowd.live) {
            score = live(crowd, &standing, table)?.or(score);
            if let (Goal::Steps(_, enough), Some(score)) = (crowd.goal, score)
                && score >= enough
            {
                return Ok((standing, streak.three, Ended::Enough));
            }
        }
        if last_version.1.elapsed() > crowd.patience {
            return Err(LabError::Stuck(format!(
                "no new version of profile {} for {} s; it stands at {standing:?}",
                crowd.client.profile(),
                crowd.patience.as_secs()
            )));
        }
    }
}

/// Sessions that may begin in all.
fn most(goal: Goal) -> u64 {
    match goal {
        Goal::Sessions(n) => n,
        Goal::Steps(..) | Goal::VersionAfter(_) => u64::MAX,
    }
}

fn reached(goal: Goal, standing: &Standing, begun: u64) -> bool {
    match goal {
        Goal::Sessions(n) => begun >= n,
        Goal::Steps(steps, _) => standing.steps() >= steps,
        Goal::VersionAfter(version) => standing.newest() > version && !standing.learning(),
    }
}

/// The live score of what is served. The first update moves little, and the control has nothing to show on the way.
fn live(
    crowd: &Crowd<'_>,
    standing: &Standing,
    table: &Table<'_>,
) -> Result<Option<f64>, LabError> {
    let Who::User(play) = crowd.who else {
        return Ok(None);
    };
    let Live::HeldOut(most) = crowd.live else {
        return Ok(None);
    };
    if most == 0 || play.arm == Arm::Control || standing.steps() < 2 {
        return Ok(None);
    }
    let questions = texts::held_out();
    let questions = &questions[..most.min(questions.len())];
    let reading = Reading {
        tag: &format!("live-{}", standing.served),
        version: Some(standing.served),
        system: play.system,
        max_tokens: play.max_tokens,
        lanes: crowd.lanes,
    };
    let replies = evaluate::read(crowd.client, reading, questions)?;
    let passed = taste::score(play.taste, &replies).passed;
    table.say(&format!(
        "         version {} of {} is served; held-out ({} prompts): {passed:.2}",
        standing.served,
        crowd.client.profile(),
        questions.len(),
    ))?;
    Ok(Some(passed))
}

/// Waits until nothing more can happen without further turns; a few looks in a row, since a turn is between two counts for a moment.
pub fn settle(client: &Client, batch: usize, patience: Duration) -> Result<Standing, LabError> {
    let started = Instant::now();
    let mut quiet = 0;
    loop {
        let standing = client.standing()?;
        quiet = if standing.quiet(batch) { quiet + 1 } else { 0 };
        if quiet >= 4 {
            return Ok(standing);
        }
        if started.elapsed() > patience {
            return Err(LabError::Stuck(format!(
                "profile {} does not come to rest in {} s; it stands at {standing:?}",
                client.profile(),
                patience.as_secs()
            )));
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::standing::tests::version;

    fn standing(samples: [(&str, u64); 3], newest: Option<&str>) -> Standing {
        Standing {
            samples: samples.map(|(name, n)| (name.to_owned(), n)).into(),
            versions: newest
                .map(|state| version(1, 0, state))
                .into_iter()
                .collect(),
            served: u64::from(newest == Some("served")),
            ..Standing::default()
        }
    }

    fn counts(pending: u64, leased: u64, consumed: u64) -> [(&'static str, u64); 3] {
        [
            ("pending", pending),
            ("leased", leased),
            ("consumed", consumed),
        ]
    }

    #[test]
    fn three_in_a_row_are_counted_once() {
        let mut streak = Streak::default();
        for fits in [true, true, false, true, true, true, true, false, true] {
            streak.add(fits);
        }
        assert_eq!(streak.three, Some(6));
    }

    #[test]
    fn users_come_for_one_batch_and_wait_while_it_is_learnt() {
        let mut pace = Pace::new(16, 0);
        let at = |p, l, c, newest| standing(counts(p, l, c), newest);
        assert_eq!(pace.more(&at(0, 0, 0, None), (0, 0)), 16);
        // Ten run, four are over and wait for their samples, two samples are there.
        assert_eq!(pace.more(&at(2, 0, 0, None), (16, 6)), 0);
        assert_eq!(pace.more(&at(2, 0, 0, None), (12, 6)), 4);
        // The step is under way, then made but not decided on.
        assert_eq!(pace.more(&at(0, 16, 0, None), (16, 16)), 0);
        assert_eq!(pace.more(&at(0, 0, 16, Some("candidate")), (16, 16)), 0);
        assert_eq!(pace.more(&at(3, 0, 16, Some("served")), (19, 19)), 13);
        // What was learnt was taken back: they come again.
        assert_eq!(pace.more(&at(0, 0, 19, Some("rolled_back")), (19, 19)), 16);
    }

    #[test]
    fn a_second_run_counts_from_what_is_there() {
        let mut pace = Pace::new(16, 40);
        let at = |p, c| standing(counts(p, 0, c), Some("served"));
        assert_eq!(pace.more(&at(5, 32), (40, 40)), 11);
        assert_eq!(pace.more(&at(5, 32), (51, 45)), 0);
        assert_eq!(pace.more(&at(10, 32), (51, 45)), 0);
        assert_eq!(pace.more(&at(14, 32), (51, 51)), 0);
    }

    #[test]
    fn a_session_without_a_sample_is_made_up_for() {
        let mut pace = Pace::new(4, 0);
        pace.more(&standing(counts(0, 0, 0), None), (0, 0));
        let now = standing(
            [
                ("pending", 3),
                ("dropped:duplicate reply", 0),
                ("leased", 0),
            ],
            None,
        );
        assert_eq!(pace.more(&now, (4, 4)), 0);
        pace.made.1 = Instant::now().checked_sub(SETTLING * 2).unwrap();
        assert_eq!(pace.more(&now, (4, 4)), 1);
    }

    #[test]
    fn a_goal_is_reached_by_what_is_decided() {
        let at = |state| standing(counts(0, 0, 16), Some(state));
        assert!(reached(Goal::Steps(1, 0.9), &at("served"), 16));
        assert!(!reached(Goal::Steps(1, 0.9), &at("rejected"), 16));
        assert!(reached(Goal::VersionAfter(0), &at("rejected"), 16));
        assert!(!reached(Goal::VersionAfter(0), &at("candidate"), 16));
        assert!(!reached(Goal::VersionAfter(1), &at("served"), 16));
        assert!(reached(Goal::Sessions(16), &at("candidate"), 16));
        assert!(!reached(Goal::Sessions(17), &at("served"), 16));
        assert_eq!(most(Goal::Sessions(17)), 17);
    }
}
