//! What the figures' files hold after steps, restarts, crashes and forgetting.

use super::*;
use chela_core::{
    Event, PolicyVersion, StepCommit,
    testing::{MemoryStore, block_on},
};

fn store() -> MemoryStore {
    MemoryStore::new()
}

fn of(number: u64) -> PolicyVersion {
    PolicyVersion {
        profile: Profile::default(),
        number,
    }
}

/// A candidate on the version before it.
fn commit(store: &MemoryStore, number: u64) {
    let version = VersionRecord {
        version: of(number),
        parent: number - 1,
        steps: number,
        metrics: vec![
            ("loss".to_owned(), 0.5 / number as f64),
            ("kl_to_base".to_owned(), f64::NAN),
        ],
        created: 1_780_000_000_500 + 1000 * number as i64,
        ..VersionRecord::default()
    };
    let step = StepCommit {
        version,
        dropped: Vec::new(),
    };
    block_on(store.commit_step(step)).unwrap();
}

fn becomes(store: &MemoryStore, number: u64, state: VersionState) {
    let event = Event::Version {
        version: of(number),
        state,
        receipt: None,
        at: 9,
    };
    block_on(store.append(vec![event])).unwrap();
}

fn step(store: &MemoryStore, number: u64) {
    commit(store, number);
    becomes(store, number, VersionState::Served);
}

struct Files {
    dir: tempfile::TempDir,
}

impl Files {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self { dir }
    }

    fn follow(&self, store: &MemoryStore) {
        MetricsFiles::below(self.dir.path())
            .follow(store, &Profile::default())
            .unwrap();
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("metrics/default/steps.jsonl")
    }

    fn events(&self) -> PathBuf {
        events_file(&self.dir.path().join("metrics/default"))
            .unwrap()
            .unwrap()
    }

    fn lines(&self) -> Vec<serde_json::Value> {
        let text = fs::read_to_string(self.path()).unwrap();
        text.lines()
            .map(|l| serde_json::from_str(l).unwrap())
            .collect()
    }

    /// The versions in both files, in their order; in the event file each once, for its bytes are what the lines' versions make.
    fn versions(&self) -> Vec<u64> {
        let lines: Vec<u64> = self
            .lines()
            .iter()
            .map(|l| l["version"].as_u64().unwrap())
            .collect();
        let bytes = fs::read(self.events()).unwrap();
        let (steps, whole) = tfevents::steps(&bytes);
        assert_eq!(whole, bytes.len());
        assert_eq!(steps, lines.iter().copied().collect());
        lines
    }
}

#[test]
fn each_step_is_a_line_and_an_event_once_over_restarts() {
    let (store, files) = (store(), Files::new());
    files.follow(&store);
    assert!(!files.path().exists(), "nothing was made");
    step(&store, 1);
    step(&store, 2);
    files.follow(&store);
    files.follow(&store);
    commit(&store, 3);
    files.follow(&store);
    assert_eq!(files.versions(), [1, 2], "a candidate may yet be rejected");
    becomes(&store, 3, VersionState::Rejected("worse".to_owned()));
    files.follow(&store);
    assert_eq!(files.versions(), [1, 2, 3]);
    let lines = files.lines();
    assert_eq!(lines[0]["state"], "superseded");
    assert_eq!(lines[1]["metrics"]["loss"], 0.25);
    assert_eq!(lines[1]["metrics"]["kl_to_base"], serde_json::Value::Null);
    assert_eq!(lines[2]["state"], "rejected");
    assert_eq!(lines[2]["why"], "worse");
    assert_eq!(lines[2]["time"], 1_780_000_003_500_i64);
    let name = files.events();
    let name = name.file_name().unwrap().to_string_lossy();
    assert_eq!(name, "events.out.tfevents.1780000001.chela");
    let size = fs::metadata(files.events()).unwrap().len();
    let one = |n: u64| {
        let version = store.versions(&Profile::default()).unwrap();
        event(&version[n as usize - 1]).len()
    };
    let all = tfevents::head(1.0).len() + one(1) + one(2) + one(3);
    assert_eq!(size, all as u64, "no event twice");
}

#[test]
fn a_crash_in_the_middle_of_a_write_loses_and_doubles_nothing() {
    let (store, files) = (store(), Files::new());
    (1..4).for_each(|n| step(&store, n));
    files.follow(&store);
    let (lines, events) = (
        fs::read(files.path()).unwrap(),
        fs::read(files.events()).unwrap(),
    );
    for path in [files.path(), files.events()] {
        let whole = fs::read(&path).unwrap();
        for cut in (0..whole.len()).step_by(7) {
            fs::write(&path, &whole[..cut]).unwrap();
            files.follow(&store);
            assert_eq!(fs::read(&path).unwrap(), whole, "{cut}");
        }
        fs::write(&path, [&whole[..], b"{\"version\":"].concat()).unwrap();
        files.follow(&store);
    }
    assert_eq!(fs::read(files.path()).unwrap(), lines);
    assert_eq!(fs::read(files.events()).unwrap(), events);
    fs::remove_file(files.events()).unwrap();
    files.follow(&store);
    assert_eq!(fs::read(files.events()).unwrap(), events);
}

#[test]
fn files_of_a_forgotten_profile_go_before_new_figures_come() {
    let (before, files) = (store(), Files::new());
    (1..4).for_each(|n| step(&before, n));
    files.follow(&before);
    // The name began anew; version numbers go on.
    let after = store();
    files.follow(&after);
    assert!(!files.path().exists());
    files.follow(&before);
    let mut record = before.versions(&Profile::default()).unwrap()[0].clone();
    (record.version.number, record.parent) = (4, 0);
    record.state = VersionState::Candidate;
    let commit = StepCommit {
        version: record,
        dropped: Vec::new(),
    };
    block_on(after.commit_step(commit)).unwrap();
    becomes(&after, 4, VersionState::Served);
    files.follow(&after);
    assert_eq!(files.versions(), [4]);
}

#[test]
fn what_is_no_step_has_no_line() {
    let (store, files) = (store(), Files::new());
    let version = VersionRecord {
        version: of(1),
        origin: VersionOrigin::Imported("elsewhere".to_owned()),
        ..VersionRecord::default()
    };
    let commit = StepCommit {
        version,
        dropped: Vec::new(),
    };
    block_on(store.commit_step(commit)).unwrap();
    becomes(&store, 1, VersionState::Served);
    files.follow(&store);
    assert!(!files.path().exists());
    step(&store, 2);
    files.follow(&store);
    assert_eq!(files.versions(), [2]);
}
