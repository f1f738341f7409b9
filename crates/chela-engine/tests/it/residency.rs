//! Adapters that are read when a request names them, and leave memory when others need the place.

use crate::common::{
    begin, collect, greedy, ids, of, options, prompt, sample, score, started, tiny, tiny_with,
    trained, version,
};
use chela_core::{
    AdapterSpec, EngineError, Learner, PolicyEngine, PolicyRef, PolicyVersion, Prompt, Sampling,
    Want, Weights,
};
use chela_engine::{EngineOptions, LocalEngine};
use chela_model::{
    Model,
    testing::{TinySpec, write_tiny_llama},
};
use futures_executor::{block_on, block_on_stream};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

fn folder(weights: &Weights) -> PathBuf {
    let Weights::Folder(dir) = weights;
    dir.clone()
}

fn served(v: &PolicyVersion) -> PolicyRef {
    PolicyRef::Served(v.profile.clone())
}

/// Registers and serves adapters `1..=n`, one a profile, and returns their versions.
fn registered(engine: &LocalEngine, weights: &[Weights]) -> Vec<PolicyVersion> {
    let all: Vec<_> = (0..weights.len())
        .map(|i| of(&format!("p{i}"), 1))
        .collect();
    for (v, w) in all.iter().zip(weights) {
        engine.register(v.clone(), w.clone(), None);
        engine.serve(v).unwrap();
    }
    all
}

/// A copy of an adapter whose reading lasts until [`Held::go_on`]: its configuration is a pipe.
#[cfg(unix)]
pub struct Held {
    pipe: PathBuf,
    config: Vec<u8>,
}

#[cfg(unix)]
impl Held {
    pub fn new(from: &Weights, to: &Path) -> (Self, Weights) {
        std::fs::create_dir(to).unwrap();
        let (from, name) = (folder(from), "adapter_model.safetensors");
        std::fs::copy(from.join(name), to.join(name)).unwrap();
        let pipe = to.join("adapter_config.json");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.unwrap().success());
        let config = std::fs::read(from.join("adapter_config.json")).unwrap();
        (Self { pipe, config }, Weights::Folder(to.to_path_buf()))
    }

    /// Waits until the loader reads. A read that never begins is a failure, not a test that never ends.
    pub fn begun(self) -> Begun {
        let (opened, pipe) = std::sync::mpsc::channel();
        let path = self.pipe;
        std::thread::spawn(move || opened.send(std::fs::OpenOptions::new().write(true).open(path)));
        let pipe = pipe.recv_timeout(Duration::from_secs(60));
        Begun {
            pipe: pipe.expect("the loader does not read").unwrap(),
            config: self.config,
        }
    }

    /// Waits until the loader reads and lets it.
    pub fn go_on(self) {
        self.begun().go_on();
    }
}

/// A read that has begun and lasts until [`Begun::go_on`].
#[cfg(unix)]
pub struct Begun {
    pipe: std::fs::File,
    config: Vec<u8>,
}

#[cfg(unix)]
impl Begun {
    pub fn go_on(mut self) {
        std::io::Write::write_all(&mut self.pipe, &self.config).unwrap();
    }
}

#[test]
fn a_registered_version_is_read_when_a_request_names_it() {
    let dir = tempfile::tempdir().unwrap();
    let maker = tiny(1);
    let weights = trained(&maker, dir.path(), 1);
    let hash = block_on(maker.load(version(1), weights.clone())).unwrap();
    let text = prompt(3, 30);
    let wanted = sample(&maker, PolicyRef::Version(version(1)), &text, greedy(12));
    let base = sample(&maker, PolicyRef::Base, &text, greedy(12));
    assert_ne!(ids(&wanted), ids(&base));
    let engine = tiny(1);
    engine.register(version(1), weights, Some(hash));
    engine.serve(&version(1)).unwrap();
    assert_eq!(engine.served(&version(1).profile), version(1));
    assert_eq!(engine.adapters(), (0, 0), "nothing is read before");
    assert_eq!(
        sample(&engine, served(&version(1)), &text, greedy(12)),
        wanted
    );
    assert_eq!(engine.adapters().1, 1);
    assert_eq!(
        started(&engine, served(&version(1)), &text).unwrap().0,
        version(1)
    );
    let other = tiny(1);
    other.register(version(1), folder_of(&dir, 1), None);
    let policy = PolicyRef::Version(version(1));
    let lazy = score(&other, policy.clone(), &text, 1).unwrap();
    assert_eq!(lazy, score(&maker, policy, &text, 1).unwrap());
}

fn folder_of(dir: &tempfile::TempDir, number: u64) -> Weights {
    Weights::Folder(dir.path().join(number.to_string()))
}

#[cfg(unix)]
#[test]
fn requests_for_one_version_wait_for_one_read_and_others_do_not_wait() {
    let dir = tempfile::tempdir().unwrap();
    let engine = tiny(2);
    let weights = trained(&engine, dir.path(), 1);
    let (held, slow) = Held::new(&weights, &dir.path().join("held"));
    engine.register(version(1), slow, None);
    engine.serve(&version(1)).unwrap();
    let text = prompt(5, 40);
    let replies: Vec<Sampling> = (0..3)
        .map(|_| begin(&engine, served(&version(1)), &text, greedy(8)).unwrap())
        .collect();
    let tokens = text.clone();
    let scores = engine.score(served(&version(1)), Prompt { tokens }, 1, Want::default());
    // The engine's thread is free.
    assert_eq!(sample(&engine, PolicyRef::Base, &text, greedy(8)).len(), 8);
    assert_eq!(engine.adapters(), (0, 0));
    held.go_on(); // once; a second read would wait for ever
    let replies: Vec<_> = replies.into_iter().map(collect).collect();
    let scores = block_on(scores).unwrap();
    block_on(engine.load(version(2), weights)).unwrap();
    let policy = PolicyRef::Version(version(2));
    let wanted = ids(&sample(&engine, policy.clone(), &text, greedy(8)));
    assert!(replies.iter().all(|r| ids(r) == wanted));
    assert_eq!(scores, score(&engine, policy, &text, 1).unwrap());
}

#[test]
fn a_read_that_fails_is_the_error_of_its_request_and_says_where() {
    let dir = tempfile::tempdir().unwrap();
    let engine = tiny(3);
    let good = trained(&engine, dir.path(), 1);
    let nothing = dir.path().join("nothing");
    let narrow = AdapterSpec {
        targets: vec!["q_proj".to_owned()],
        ..AdapterSpec::default()
    };
    let narrow = engine.learner(&narrow, None).unwrap();
    let narrow = narrow.save(&dir.path().join("narrow")).unwrap().dir;
    std::fs::copy(
        folder(&good).join("adapter_config.json"),
        narrow.join("adapter_config.json"),
    )
    .unwrap();
    let cases = [
        (
            Weights::Folder(nothing),
            None,
            "nothing/adapter_config.json",
        ),
        (
            good.clone(),
            Some("0".repeat(64)),
            "published with the hash 000",
        ),
        (
            Weights::Folder(narrow),
            None,
            "narrow/adapter_model.safetensors",
        ),
    ];
    for (number, (weights, hash, says)) in (1..).zip(cases) {
        let v = version(number);
        engine.register(v.clone(), weights.clone(), hash);
        engine.serve(&v).unwrap();
        for _ in 0..2 {
            let error = started(&engine, served(&v), &prompt(1, 20))
                .unwrap_err()
                .to_string();
            assert!(error.contains(says) && !error.contains('\n'), "{error}");
            assert!(
                error.contains(folder(&weights).to_str().unwrap()),
                "{error}"
            );
            let scored = score(&engine, served(&v), &prompt(1, 20), 1);
            assert!(scored.unwrap_err().to_string().contains(says));
        }
    }
    assert_eq!(engine.adapters(), (0, 0));
    engine.register(version(3), good, None);
    assert_eq!(
        started(&engine, served(&version(3)), &prompt(1, 20))
            .unwrap()
            .0,
        version(3)
    );
    let unknown = PolicyRef::Version(version(9));
    let refused = begin(&engine, unknown.clone(), &[1], greedy(1)).err();
    assert_eq!(refused, Some(EngineError::NotLoaded(version(9))));
    let refused = score(&engine, unknown, &[1, 2], 1).err();
    assert_eq!(refused, Some(EngineError::NotLoaded(version(9))));
}

#[cfg(unix)]
#[test]
fn who_goes_away_while_an_adapter_is_read_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let engine = tiny(4);
    let weights = trained(&engine, dir.path(), 1);
    let (held, slow) = Held::new(&weights, &dir.path().join("held"));
    engine.register(version(1), slow, None);
    engine.register(version(2), weights, None);
    let ask = |n| {
        begin(
            &engine,
            PolicyRef::Version(version(n)),
            &prompt(1, 30),
            greedy(400),
        )
    };
    drop(ask(1).unwrap());
    let stays = ask(1).unwrap();
    let tokens = prompt(1, 30);
    drop(engine.score(
        PolicyRef::Version(version(2)),
        Prompt { tokens },
        1,
        Want::default(),
    ));
    drop(ask(2).unwrap());
    held.go_on();
    assert_eq!(collect(stays).len(), 400);
    assert_eq!(
        engine.adapters().1,
        1,
        "nobody waited for version 2 any more"
    );
    assert_eq!(
        started(&engine, PolicyRef::Version(version(2)), &prompt(1, 30))
            .unwrap()
            .1,
        0
    );
    // Unloaded while it is read: who waited gets it, and then it is gone.
    let (held, slow) = Held::new(&folder_of(&dir, 1), &dir.path().join("held again"));
    engine.register(version(3), slow, None);
    let stays = ask(3).unwrap();
    engine.unload(&version(3));
    assert_eq!(ask(3).err(), Some(EngineError::NotLoaded(version(3))));
    held.go_on();
    assert_eq!(collect(stays).len(), 400);
    assert_eq!(engine.adapters().1, 2);
}

#[cfg(unix)]
#[test]
fn an_engine_that_ends_while_an_adapter_is_read_tells_who_waits() {
    let dir = tempfile::tempdir().unwrap();
    let files = tempfile::tempdir().unwrap();
    let endless = TinySpec {
        context_length: 1 << 16,
        ..TinySpec::default()
    };
    let files = write_tiny_llama(files.path(), 5, &endless).unwrap();
    let engine = LocalEngine::open(&Model::open(&files).unwrap(), options()).unwrap();
    let weights = trained(&engine, dir.path(), 1);
    let (held, slow) = Held::new(&weights, &dir.path().join("held"));
    engine.register(version(1), slow, None);
    engine.register(version(2), weights, None);
    let of = |n| PolicyRef::Version(version(n));
    let ask = |n| begin(&engine, of(n), &prompt(1, 30), greedy(4)).unwrap();
    let read = ask(1);
    let tokens = prompt(1, 30);
    let scores = engine.score(of(1), Prompt { tokens }, 1, Want::default());
    let held = held.begun();
    let behind = ask(2); // its read has not begun
    let most = engine.info().context_length;
    let runs = begin(&engine, PolicyRef::Base, &prompt(1, 30), greedy(most)).unwrap();
    let going = std::thread::spawn(move || drop(engine));
    let stopped = |stream: Sampling| {
        let last = block_on_stream(stream).last();
        assert!(
            matches!(last, Some(Err(EngineError::Stopped(_)))),
            "{last:?}"
        );
    };
    stopped(runs); // the engine's thread has ended, and the loader's waits for the read
    held.go_on();
    going.join().unwrap();
    stopped(read);
    stopped(behind);
    assert!(matches!(block_on(scores), Err(EngineError::Stopped(_))));
}

/// An engine whose adapters may take as much as `n` of the ones that [`trained`] makes.
fn room_for(n: usize, concurrent: usize) -> (Arc<LocalEngine>, tempfile::TempDir, Vec<Weights>) {
    let dir = tempfile::tempdir().unwrap();
    let maker = tiny(6);
    let weights: Vec<_> = (1..7).map(|i| trained(&maker, dir.path(), i)).collect();
    block_on(maker.load(version(1), weights[0].clone())).unwrap();
    let options = EngineOptions {
        adapter_bytes: n * maker.adapters().0,
        concurrent,
        ..options()
    };
    (tiny_with(6, options), dir, weights)
}

/// What nobody uses leaves: a request lets go of its adapter a moment after its last word.
fn settled(engine: &LocalEngine, adapters: usize) {
    let since = Instant::now();
    while engine.adapters().1 > adapters && since.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(engine.adapters().1, adapters);
}

#[test]
fn the_least_recently_used_leaves_memory_and_comes_back_as_it_was() {
    let (engine, _dir, weights) = room_for(2, 16);
    let all = registered(&engine, &weights);
    let text = prompt(2, 60);
    let first: Vec<_> = all
        .iter()
        .map(|v| score(&engine, served(v), &text, 1).unwrap())
        .collect();
    settled(&engine, 2);
    assert_ne!(first[0], first[1]);
    assert_eq!(started(&engine, served(&all[0]), &text).unwrap().1, 0);
    for (v, scored) in all.iter().zip(&first) {
        assert_eq!(&score(&engine, served(v), &text, 1).unwrap(), scored);
    }
    // Its text is still known: the weights that came back have the hash of those that left.
    assert_eq!(started(&engine, served(&all[0]), &text).unwrap().1, 59);
    // A candidate that was just loaded is not the one that leaves.
    block_on(engine.load(of("new", 1), weights[0].clone())).unwrap();
    settled(&engine, 2);
    let candidate = of("new", 1);
    assert!(score(&engine, PolicyRef::Version(candidate), &text, 1).is_ok());
}

#[test]
fn a_folder_that_changed_since_it_was_read_is_refused() {
    let (engine, _dir, weights) = room_for(1, 16);
    let all = registered(&engine, &weights);
    score(&engine, served(&all[0]), &prompt(1, 20), 1).unwrap();
    score(&engine, served(&all[1]), &prompt(1, 20), 1).unwrap();
    settled(&engine, 1);
    let name = "adapter_model.safetensors";
    std::fs::copy(
        folder(&weights[2]).join(name),
        folder(&weights[0]).join(name),
    )
    .unwrap();
    let error = score(&engine, served(&all[0]), &prompt(1, 20), 1).unwrap_err();
    assert!(error.to_string().contains("changed or damaged"), "{error}");
}

#[test]
fn more_profiles_at_once_than_fit_take_turns_and_say_what_they_would_alone() {
    let (engine, _dir, weights) = room_for(1, 2);
    let all = registered(&engine, &weights);
    let alone: Vec<_> = all
        .iter()
        .map(|v| ids(&sample(&engine, served(v), &prompt(7, 20), greedy(40))))
        .collect();
    for _ in 0..3 {
        let streams: Vec<_> = all
            .iter()
            .map(|v| begin(&engine, served(v), &prompt(7, 20), greedy(40)).unwrap())
            .collect();
        let together: Vec<_> = streams.into_iter().map(|s| ids(&collect(s))).collect();
        assert_eq!(together, alone);
    }
    settled(&engine, 1);
}
