//! The gate's probes: what a new version is asked before it may serve, rendered for the model.

use anyhow::{Context, Result};
use chela_chat::Chat;
use chela_core::{Conversation, Message, TokenId};
use chela_train::Probe;
use serde::Deserialize;

/// Written for this project; see its head for how to add one.
const TEXTS: &str = include_str!("gate_probes.toml");

/// The text whose log-probs engine and learner compare at each publish: long enough that half of it can come from a cache.
pub const CANARY: &str = "The quick brown fox jumps over the lazy dog, and then it rests in the tall grass by the river, where \
nobody looks for it. When the sun goes down it gets up, stretches, and walks home along the old stone wall, counting the stars.";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    probe: Vec<Entry>,
    open: Vec<Open>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    kind: String,
    name: String,
    user: String,
    good: String,
    bad: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Open {
    #[allow(dead_code)] // people find an entry by it
    name: String,
    user: String,
}

/// Probes and open prompts as the model reads them.
pub fn rendered(chat: &Chat) -> Result<(Vec<Probe>, Vec<Vec<TokenId>>)> {
    let file: File = toml::from_str(TEXTS).context("the gate's probes")?;
    let prompt = |user: &str| -> Result<Vec<TokenId>> {
        let conversation = Conversation {
            messages: vec![Message::user(user)],
            ..Conversation::default()
        };
        Ok(chat.render(&conversation, Err("probe"))?.tokens)
    };
    let probe = |p: &Entry| -> Result<Probe> {
        Ok(Probe {
            kind: p.kind.clone(),
            name: p.name.clone(),
            prompt: prompt(&p.user)?,
            good: chat.encode(&p.good)?,
            bad: chat.encode(&p.bad)?,
        })
    };
    let probes = file.probe.iter().map(probe).collect::<Result<_>>()?;
    let open = file
        .open
        .iter()
        .map(|o| prompt(&o.user))
        .collect::<Result<_>>()?;
    Ok((probes, open))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn pairs_are_of_one_length_and_names_are_unique() {
        let file: File = toml::from_str(TEXTS).unwrap();
        let names = file
            .probe
            .iter()
            .map(|p| &p.name)
            .chain(file.open.iter().map(|o| &o.name));
        let mut seen = std::collections::HashSet::new();
        assert!(names.into_iter().all(|n| seen.insert(n)));
        let mut words: HashMap<&str, (usize, usize, usize)> = HashMap::new();
        for p in &file.probe {
            let count = |text: &str| text.split_whitespace().count();
            let (good, bad) = (count(&p.good), count(&p.bad));
            assert!(
                good.abs_diff(bad) <= good.max(bad) / 4,
                "{}: {good} and {bad} words",
                p.name
            );
            let kind = words.entry(&p.kind).or_default();
            *kind = (kind.0 + 1, kind.1 + good, kind.2 + bad);
        }
        assert_eq!(words.len(), 7);
        for (kind, (n, good, bad)) in words {
            assert!(
                n >= 4 && good.abs_diff(bad) * 10 <= good,
                "{kind}: {n} probes, {good} and {bad} words"
            );
        }
        assert!(file.open.len() >= 8);
    }
}
