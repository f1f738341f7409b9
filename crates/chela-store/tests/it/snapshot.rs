//! Everything that can be read of a store, to compare two of them.

use chela_core::*;

/// What belongs to one profile.
#[derive(Debug, PartialEq)]
struct Owned {
    profile: Profile,
    pending: Vec<PendingSample>,
    versions: Vec<VersionRecord>,
    last_version: u64,
    replays: Vec<u64>,
    paused: Option<String>,
    held_out: [(Vec<LeasedSample>, u64); 2],
    live: [Vec<LiveTurn>; 2],
    counts: StoreCounts,
}

impl Owned {
    fn of(store: &dyn TrajectoryStore, profile: Profile) -> Self {
        let p = &profile;
        Self {
            pending: store.pending(p).unwrap(),
            versions: store.versions(p).unwrap(),
            last_version: store.last_version(p).unwrap(),
            replays: store.replays(p).unwrap(),
            paused: store.paused(p).unwrap(),
            held_out: [2, usize::MAX].map(|n| store.held_out(p, n).unwrap()),
            live: [3, usize::MAX].map(|n| store.live_turns(p, n).unwrap()),
            counts: StoreCounts {
                bytes: 0,
                ..store.counts(Some(p)).unwrap()
            },
            profile,
        }
    }
}

/// All reads at once.
#[derive(Debug, PartialEq)]
pub struct Snapshot {
    sessions: Vec<SessionRecord>,
    idle: Vec<SessionRecord>,
    stories: Vec<Vec<TurnStory>>,
    single: Vec<Option<TurnStory>>,
    keys: Vec<Option<SessionRecord>>,
    unjudged: Vec<TurnId>,
    open: Vec<OpenVerdict>,
    profiles: Vec<Owned>,
    forgotten: Vec<(Profile, u64)>,
    to_train: Vec<Profile>,
    full: Vec<LeasedSample>,
    counts: StoreCounts,
}

impl Snapshot {
    pub fn of(store: &dyn TrajectoryStore) -> Self {
        let sessions = store.sessions(None, usize::MAX).unwrap();
        let stories: Vec<Vec<TurnStory>> = sessions
            .iter()
            .map(|s| store.session_stories(&s.profile, &s.id).unwrap())
            .collect();
        for session in &sessions {
            let again = store.session(&session.profile, &session.id).unwrap();
            assert_eq!(again.as_ref(), Some(session));
        }
        let turns = stories.iter().flatten().map(|s| s.turn.id);
        let keys = sessions.iter().filter_map(|s| s.key_hash.as_deref());
        let profiles = store.profiles().unwrap().into_iter();
        // Names of the tests that may have been forgotten.
        let names = ["p", "q", "default"].map(|n| Profile::new(n).unwrap());
        let last = |p: Profile| (p.clone(), store.last_version(&p).unwrap());
        let samples: Vec<SampleId> = (0..200).rev().map(SampleId).collect();
        Self {
            idle: store.idle_sessions(3_000).unwrap(),
            single: turns.map(|id| store.story(id).unwrap()).collect(),
            keys: keys.map(|k| store.session_by_key(k).unwrap()).collect(),
            unjudged: store.unjudged(usize::MAX).unwrap(),
            open: store.open_verdicts(usize::MAX).unwrap(),
            profiles: profiles.map(|p| Owned::of(store, p)).collect(),
            forgotten: names.into_iter().map(last).collect(),
            to_train: store.profiles_to_train().unwrap(),
            full: store.samples(&samples).unwrap(),
            counts: StoreCounts {
                bytes: 0,
                ..store.counts(None).unwrap()
            },
            stories,
            sessions,
        }
    }
}
