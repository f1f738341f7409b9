//! What reviewers would otherwise have to watch: the arrows between crates, file heads and sizes, where `unsafe` may stand.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

/// Every arrow there is. A new one is a decision: it goes into ARCHITECTURE.md with its reason, then here.
const ARROWS: &[(&str, &[&str])] = &[
    ("chela-core", &[]),
    ("chela-kernels", &[]),
    ("chela-model", &[]),
    ("chela-rl", &[]),
    ("chela-chat", &["chela-core", "chela-model"]),
    ("chela-store", &["chela-core"]),
    (
        "chela-engine",
        &["chela-core", "chela-kernels", "chela-model"],
    ),
    ("chela-train", &["chela-core", "chela-rl"]),
    ("chela-rollout", &["chela-chat", "chela-core"]),
    ("chela-server", &["chela-chat", "chela-core"]),
    ("chela-remote", &["chela-core"]),
    ("chela-lab", &[]),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn manifest_arrows(text: &str, name: &str) -> BTreeSet<String> {
    let mut section = "";
    let mut found = BTreeSet::new();
    for line in text.lines() {
        let line = line.trim();
        if line.starts_with('[') {
            section = line;
        } else if section == "[dependencies]"
            && let Some(dependency) = line.split(['.', '=', ' ']).next()
            && dependency.starts_with("chela-")
            && dependency != name
        {
            found.insert(dependency.to_owned());
        }
    }
    found
}

#[test]
fn crates_know_only_what_they_may() {
    let allowed: BTreeMap<_, BTreeSet<String>> = ARROWS
        .iter()
        .map(|(name, to)| (*name, to.iter().map(|t| (*t).to_owned()).collect()))
        .collect();
    let mut seen = 0;
    for entry in std::fs::read_dir(root().join("crates")).unwrap() {
        let dir = entry.unwrap().path();
        let name = dir.file_name().unwrap().to_str().unwrap().to_owned();
        if name == "chela" {
            continue;
        }
        let text = std::fs::read_to_string(dir.join("Cargo.toml")).unwrap();
        let arrows = manifest_arrows(&text, &name);
        let legal = allowed
            .get(name.as_str())
            .unwrap_or_else(|| panic!("{name} is not in the table"));
        let extra: Vec<_> = arrows.difference(legal).collect();
        assert!(extra.is_empty(), "{name} must not know {extra:?}");
        seen += 1;
    }
    assert_eq!(seen, ARROWS.len());
}

fn sources(dir: &Path, all: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, all);
        } else if path.extension().is_some_and(|e| e == "rs") {
            all.push(path);
        }
    }
}

#[test]
fn files_say_what_they_are_for_and_stay_readable() {
    let mut all = Vec::new();
    sources(&root().join("crates"), &mut all);
    assert!(all.len() > 50);
    for path in all {
        let text = std::fs::read_to_string(&path).unwrap();
        let shown = path.strip_prefix(root()).unwrap().display().to_string();
        assert!(
            text.starts_with("//! "),
            "{shown} does not open with a //! line"
        );
        assert!(
            text.lines().count() <= 1000,
            "{shown} has {} lines",
            text.lines().count()
        );
        if !shown.starts_with("crates/chela-kernels") {
            let word = concat!("uns", "afe ");
            for line in text.lines().filter(|l| !l.trim_start().starts_with("//")) {
                assert!(!line.contains(&format!("{word}{{")), "{shown}: {line}");
                assert!(!line.contains(&format!("{word}fn")), "{shown}: {line}");
            }
        }
    }
}

#[test]
fn tasks_are_spawned_in_one_place_a_crate() {
    let mut all = Vec::new();
    sources(&root().join("crates"), &mut all);
    for path in all {
        let shown = path.strip_prefix(root()).unwrap().display().to_string();
        let allowed = shown.contains("/tests/")
            || shown.ends_with("tasks.rs")
            || shown.contains("tests")
            || shown == "crates/chela/src/supervise.rs";
        if allowed {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        let spawns = code
            .lines()
            .filter(|l| !l.trim_start().starts_with("//"))
            .any(|l| l.contains("tokio::spawn("));
        assert!(!spawns, "{shown} spawns a task outside the supervisor");
    }
}
