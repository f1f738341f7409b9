//! Everything that can be read of a store, to compare two of them.

use chela_core::*;

/// What belongs to one profile.
type Owned = (
    Profile,
    Vec<PendingSample>,
    Vec<VersionRecord>,
    Option<String>,
    StoreCounts,
);

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
        let profiles = store.profiles().unwrap().into_iter().map(|p| {
            let pending = store.pending(&p).unwrap();
            let versions = store.versions(&p).unwrap();
            let paused = store.paused(&p).unwrap();
            let counts = store.counts(Some(&p)).unwrap();
            (
                p,
                pending,
                versions,
                paused,
                StoreCounts { bytes: 0, ..counts },
            )
        });
        Self {
            idle: store.idle_sessions(3_000).unwrap(),
            single: turns.map(|id| store.story(id).unwrap()).collect(),
            keys: keys.map(|k| store.session_by_key(k).unwrap()).collect(),
            unjudged: store.unjudged(usize::MAX).unwrap(),
            open: store.open_verdicts(usize::MAX).unwrap(),
            profiles: profiles.collect(),
            counts: StoreCounts {
                bytes: 0,
                ..store.counts(None).unwrap()
            },
            stories,
            sessions,
        }
    }
}
