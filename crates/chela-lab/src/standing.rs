//! How a profile stands, as `/v1/status` says it: samples, versions with what the gate found, what is under way.

use crate::{LabError, capacity::Bounds};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// One check of the gate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Check {
    /// Name.
    pub name: String,
    /// What was found; `None` = it was not finite.
    pub value: Option<f64>,
    /// How far it may go.
    pub limit: Option<f64>,
    /// Within it.
    pub passed: bool,
    /// On what it was measured.
    pub detail: String,
}

/// What the gate found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gate {
    /// The checks.
    pub checks: Vec<Check>,
    /// How long it took.
    pub seconds: f64,
}

/// One version of a profile.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Version {
    /// Its number.
    pub version: u64,
    /// The one it stands on.
    pub parent: u64,
    /// Steps since the base model.
    pub steps: u64,
    /// `candidate`, `served`, `superseded`, `rejected`, `rolled_back`, `forgotten`.
    pub state: String,
    /// Why it was rejected or taken back.
    pub why: Option<String>,
    /// What the gate found; `None` = it was not asked.
    pub gate: Option<Gate>,
    /// What its step learnt.
    pub samples: Vec<u64>,
    /// Figures of its step.
    pub metrics: Value,
}

impl Version {
    /// Names of the checks that failed.
    pub fn failed(&self) -> Vec<&str> {
        let checks = self.gate.iter().flat_map(|g| &g.checks);
        checks
            .filter(|c| !c.passed)
            .map(|c| c.name.as_str())
            .collect()
    }
}

/// A profile's versions, as the policy routes show them.
#[derive(Deserialize)]
struct PolicyView {
    profile: String,
    served: u64,
    paused: Option<String>,
    versions: Vec<Version>,
}

/// How the server trains on groups of replies.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Groups {
    /// What they are taught with.
    pub algorithm: String,
    /// How many make a step, and how old they may be.
    #[serde(flatten)]
    pub bounds: Bounds,
}

#[derive(Deserialize)]
struct StatusView {
    #[serde(default)]
    groups: Option<Groups>,
    samples: BTreeMap<String, u64>,
    unjudged: u64,
    judging: u64,
    profiles: Vec<PolicyView>,
}

/// How a profile stands.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Standing {
    /// Samples by state: `pending`, `leased`, `consumed`, `dropped:<reason>`.
    pub samples: BTreeMap<String, u64>,
    /// Turns that wait for a judge or are with one.
    pub judging: u64,
    /// How groups of replies are trained on; `None` = not at all.
    pub groups: Option<Groups>,
    /// The served version.
    pub served: u64,
    /// Why training is paused, if it is.
    pub paused: Option<String>,
    /// All versions, by number; the base model is not among them.
    pub versions: Vec<Version>,
}

impl Standing {
    /// Reads a status. A profile that the server has not heard of yet stands at the base model.
    pub fn read(profile: &str, status: Value) -> Result<Self, LabError> {
        let view: StatusView = serde_json::from_value(status)
            .map_err(|e| LabError::Http(format!("/v1/status answers in another form: {e}")))?;
        let own = view.profiles.into_iter().find(|p| p.profile == profile);
        let (served, paused, mut versions) =
            own.map_or((0, None, Vec::new()), |p| (p.served, p.paused, p.versions));
        versions.sort_by_key(|v| v.version);
        Ok(Self {
            samples: view.samples,
            judging: view.unjudged + view.judging,
            groups: view.groups,
            served,
            paused,
            versions,
        })
    }

    /// Samples in a state.
    pub fn count(&self, state: &str) -> u64 {
        self.samples.get(state).copied().unwrap_or(0)
    }

    /// Steps of the served version.
    pub fn steps(&self) -> u64 {
        let served = self.versions.iter().find(|v| v.version == self.served);
        served.map_or(0, |v| v.steps)
    }

    /// The newest version's number.
    pub fn newest(&self) -> u64 {
        self.versions.last().map_or(0, |v| v.version)
    }

    /// A step is under way, or made and not decided on.
    pub fn learning(&self) -> bool {
        let candidate = self.versions.last().is_some_and(|v| v.state == "candidate");
        self.count("leased") > 0 || candidate
    }

    /// Nothing more will happen without further turns: none is being judged, no step is under way, and no full batch waits, or it
    /// waits for ever since training is paused.
    pub fn quiet(&self, batch: usize) -> bool {
        let waits = self.count("pending") >= batch as u64 && self.paused.is_none();
        self.judging == 0 && !self.learning() && !waits
    }

    /// The served version and those it stands on, newest first; the base model is left out.
    pub fn chain(&self) -> Vec<u64> {
        let mut chain = Vec::new();
        let mut at = self.served;
        while let Some(version) = self.versions.iter().find(|v| v.version == at) {
            chain.push(at);
            // A parent is always older; anything else must not loop.
            if version.parent >= at {
                break;
            }
            at = version.parent;
        }
        chain
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::json;

    pub(crate) fn version(number: u64, parent: u64, state: &str) -> Version {
        Version {
            version: number,
            parent,
            steps: number,
            state: state.to_owned(),
            why: None,
            gate: None,
            samples: vec![1, 2],
            metrics: json!({}),
        }
    }

    fn status() -> Value {
        let gate = json!({"passed": false, "seconds": 1.0, "checks": [
            {"name": "kl_to_base", "value": 2.0, "limit": 1.0, "passed": false, "detail": "d"},
            {"name": "length", "value": null, "limit": 4.0, "passed": true, "detail": "d"},
        ]});
        let version = |number: u64, parent: u64, state: &str, gate: &Value| {
            json!({
                "version": number, "parent": parent, "steps": parent + 1, "state": state, "why": null, "gate": gate,
                "origin": {"kind": "trained"}, "receipt": null, "samples": [7, 8], "metrics": {"loss": 0.5},
            })
        };
        json!({
            "model": "m", "groups": {"algorithm": "rloo", "groups": 4, "max_staleness": 1, "reply_limit": null}, "samples": {"pending": 3, "dropped:stale": 2}, "unjudged": 1, "judging": 2,
            "profiles": [
                {"profile": "other", "served": 9, "paused": null, "replays": [], "versions": []},
                {"profile": "mine", "served": 2, "paused": "why", "replays": [], "versions": [
                    version(3, 2, "rejected", &gate), version(2, 1, "served", &Value::Null),
                    version(1, 0, "superseded", &Value::Null),
                ]},
            ],
        })
    }

    #[test]
    fn a_status_is_read_for_one_profile() {
        let mine = Standing::read("mine", status()).unwrap();
        assert_eq!((mine.served, mine.steps(), mine.newest()), (2, 2, 3));
        assert_eq!((mine.judging, mine.count("pending")), (3, 3));
        assert_eq!(
            (mine.count("leased"), mine.paused.as_deref()),
            (0, Some("why"))
        );
        assert_eq!(mine.chain(), [2, 1]);
        let groups = mine.groups.as_ref().unwrap();
        assert_eq!(
            (groups.algorithm.as_str(), groups.bounds.batch),
            ("rloo", 4)
        );
        assert_eq!(mine.versions[2].failed(), ["kl_to_base"]);
        let none = Standing::read("none", status()).unwrap();
        assert_eq!((none.served, none.steps(), none.chain()), (0, 0, vec![]));
        assert!(Standing::read("mine", json!({"samples": {}})).is_err());
    }

    #[test]
    fn it_is_quiet_when_nothing_can_come() {
        let with = |pending: u64, leased: u64, judging: u64, state: &str| Standing {
            samples: [
                ("pending".to_owned(), pending),
                ("leased".to_owned(), leased),
            ]
            .into(),
            judging,
            versions: vec![version(1, 0, state)],
            ..Standing::default()
        };
        assert!(with(15, 0, 0, "served").quiet(16));
        assert!(!with(16, 0, 0, "served").quiet(16));
        assert!(!with(3, 16, 0, "served").quiet(16));
        assert!(!with(3, 0, 1, "served").quiet(16));
        assert!(!with(3, 0, 0, "candidate").quiet(16));
        let mut paused = with(100, 0, 0, "rejected");
        paused.paused = Some("three were rejected".to_owned());
        assert!(paused.quiet(16));
    }
}
