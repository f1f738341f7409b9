//! Random sequences of writes leave the store on disk equal to the one in memory, also after it is opened again.
#![allow(clippy::manual_is_multiple_of)] // `x % 5 == 0` reads like `x % 5 > 0` beside it.

use crate::snapshot::Snapshot;
use chela_core::{testing::*, *};
use chela_store::Store;
use futures_executor::block_on;
use proptest::prelude::*;
use std::path::Path;

/// Small numbers that are read against what is stored at the moment, so that many writes hit and some miss.
#[derive(Clone, Debug)]
struct Step {
    what: u8,
    a: u8,
    b: u8,
    c: u8,
}

struct Pair {
    memory: MemoryStore,
    disk: Option<Store>,
    turns: Vec<Turn>,
    verdicts: Vec<(TurnId, VerdictId)>,
    number: u64,
}

fn pick<T>(from: &[T], index: u8) -> Option<&T> {
    // One beyond the end now and then: an unknown name.
    from.get(usize::from(index) % (from.len() + 1))
}

fn kind<T>(result: &Result<T, StoreError>) -> Option<std::mem::Discriminant<StoreError>> {
    result.as_ref().err().map(std::mem::discriminant)
}

impl Pair {
    fn both<T: PartialEq + std::fmt::Debug>(
        &self,
        call: impl Fn(&dyn TrajectoryStore) -> BoxFuture<'static, Result<T, StoreError>>,
    ) -> bool {
        let disk = self.disk.as_ref().unwrap();
        let (a, b) = (block_on(call(&self.memory)), block_on(call(disk)));
        assert_eq!(kind(&a), kind(&b), "{a:?} {b:?}");
        assert_eq!(a.as_ref().ok(), b.as_ref().ok());
        a.is_ok()
    }

    fn append(&self, events: Vec<Event>) -> bool {
        self.both(|store| store.append(events.clone()))
    }

    fn turn_id(&self, index: u8) -> TurnId {
        pick(&self.turns, index).map_or(TurnId(1), |t| t.id)
    }

    fn samples(&self, step: &Step) -> Vec<SampleId> {
        let owner = self.owner(step.a);
        let pending = self.memory.pending(&owner).unwrap();
        let some = pending
            .iter()
            .map(|s| s.id)
            .take(usize::from(step.b % 4 + 1));
        some.chain((step.c == 0).then_some(SampleId(u64::from(step.b))))
            .collect()
    }

    fn leased(&self, step: &Step) -> Vec<SampleId> {
        let stories = self
            .turns
            .iter()
            .filter_map(|t| self.memory.story(t.id).unwrap());
        let samples = stories.flat_map(|s| s.samples);
        let leased = samples.filter(|(_, _, state)| *state == SampleState::Leased);
        leased
            .map(|(id, _, _)| id)
            .take(usize::from(step.b % 4 + 1))
            .collect()
    }

    fn owner(&self, index: u8) -> Profile {
        profile(["p", "q"][usize::from(index % 2)])
    }

    fn add_turn(&mut self, step: &Step) {
        let id = self.memory.next_turn_id(i64::from(step.c));
        assert_eq!(
            id,
            self.disk.as_ref().unwrap().next_turn_id(i64::from(step.c))
        );
        let name = session(["s", "t", "u"][usize::from(step.a % 3)]);
        let mut turn = match pick(&self.turns, step.b) {
            Some(parent) if step.c % 5 > 0 => {
                let said: Vec<TokenId> = (0..u32::from(step.c % 7)).collect();
                next_turn(id, parent, &said, &said[..said.len() / 2])
            }
            _ => first_turn(id, &self.owner(step.b), &name),
        };
        if step.c % 11 == 1 {
            turn.segment = Segment::Opened("history edited".to_owned());
            turn.prompt.truncate(usize::from(step.a) % 9 + 1);
            turn.messages.truncate(usize::from(step.a) % 4);
            turn.tools = vec![Tool {
                name: "t".to_owned(),
                definition: format!("{{{}}}", step.a),
            }];
        }
        if step.a % 5 == 0 {
            turn.kind = TurnKind::Side;
        }
        if step.c % 13 == 1 {
            turn.prompt[0] = 50; // Contradicts `Extends`.
        }
        if self.append(vec![Event::Turn(Box::new(turn.clone()))]) {
            self.turns.push(turn);
        }
    }

    fn judge(&mut self, step: &Step) {
        let turn = self.turn_id(step.a);
        let id = self.memory.next_verdict_id();
        assert_eq!(id, self.disk.as_ref().unwrap().next_verdict_id());
        let reward = [None, Some(1.0), Some(-1.0), Some(0.3)][usize::from(step.b % 4)];
        let mut said = verdict(reward, &["h"]);
        if step.c % 7 == 0 {
            said.judge = TOOL_ERROR.to_owned();
        }
        said.group =
            (step.a % 6 == 0).then(|| Group::new("\u{e9}", 1 + usize::from(step.c)).unwrap());
        said.source = [VerdictSource::Judge, VerdictSource::Explicit][usize::from(step.c % 2)];
        let mut events = vec![Event::Verdict {
            turn,
            id,
            verdict: Box::new(said),
            at: 1,
        }];
        if step.c % 4 > 0 {
            events.push(Event::Sample(Box::new(new_sample(turn, id, 0.5))));
        }
        if self.append(events) {
            self.verdicts.push((turn, id));
        }
    }

    fn settle(&self, step: &Step) {
        let Some((turn, verdict)) = pick(&self.verdicts, step.a).copied() else {
            return;
        };
        let mut sample = new_sample(turn, verdict, 0.5);
        sample.explicit = step.b % 3 == 0;
        sample.group = (step.b % 5 == 0).then(|| Group::new(format!("g{}", step.a), 3).unwrap());
        if step.b % 4 == 0 {
            sample.teacher_logprobs = Some(vec![-0.1; usize::from(step.c % 4)]);
        }
        let no = Event::NoSample {
            verdict,
            why: "no reward".to_owned(),
        };
        let event = if step.c % 4 == 0 {
            no
        } else {
            Event::Sample(Box::new(sample))
        };
        self.append(vec![event]);
    }

    fn session_event(&self, step: &Step) {
        let name = ["s", "t", "v"][usize::from(step.a % 3)];
        let owner = self.owner(step.b);
        let at = i64::from(step.c) * 100;
        if step.c % 2 == 0 {
            let (session, why) = (session(name), "idle".to_owned());
            self.append(vec![Event::SessionEnded {
                profile: owner,
                session,
                at,
                why,
            }]);
            return;
        }
        self.append(vec![Event::SessionOpened(SessionRecord {
            profile: owner,
            id: session(name),
            key_hash: (step.b % 3 == 0).then(|| format!("key{}", step.b % 2)),
            task: (step.b % 4 == 0).then(|| format!("task{}", step.c)),
            opened: at,
            last_active: at,
            ended: None,
            turns: 7,
        })]);
    }

    fn commit(&mut self, step: &Step) {
        self.number += u64::from(step.c % 3);
        let leased = self.leased(step);
        let (used, left) = leased.split_at(leased.len() / 2 + leased.len() % 2);
        let parent = if step.b % 2 == 0 {
            0
        } else {
            self.number.saturating_sub(1)
        };
        let mut commit = testing::step(&self.owner(step.a), self.number, parent, used);
        commit.dropped = left
            .iter()
            .map(|id| (*id, "no signal".to_owned()))
            .collect();
        commit
            .version
            .metrics
            .push(("kl".to_owned(), f64::INFINITY));
        self.both(|store| store.commit_step(commit.clone()));
    }

    fn version(&self, step: &Step) {
        let number = u64::from(step.b) % (self.number + 2);
        let version = PolicyVersion {
            profile: self.owner(step.a),
            number,
        };
        let state = match step.c % 4 {
            0 | 1 => VersionState::Served,
            2 => VersionState::Rejected("canary".to_owned()),
            _ => VersionState::RolledBack("worse".to_owned()),
        };
        let receipt = (step.c % 8 < 4).then(receipt);
        self.append(vec![Event::Version {
            version,
            state,
            receipt,
            at: i64::from(step.c) * 7,
        }]);
    }

    fn registry_event(&self, step: &Step) {
        let version = PolicyVersion {
            profile: self.owner(step.a),
            number: u64::from(step.b) % (self.number + 2),
        };
        let why = "rejected by the gate".to_owned();
        self.append(vec![match step.c % 3 {
            0 => Event::Gate {
                version,
                report: GateReport {
                    checks: vec![GateCheck {
                        name: "kl_to_base".to_owned(),
                        value: f64::NEG_INFINITY,
                        limit: f64::from(step.b) / 3.0,
                        passed: step.b % 2 == 0,
                        detail: String::new(),
                    }],
                    seconds: 0.1,
                    at: i64::from(step.b),
                },
            },
            1 => Event::Unlearnt { version, why },
            _ => Event::ReplaySkipped { version },
        }]);
    }

    /// A whole lesson at once, which single steps rarely add up to: a judged turn, a step on all that waits, mostly served.
    fn teach(&mut self, step: &Step) {
        let before = self.turns.len();
        self.add_turn(&Step {
            a: step.a | 1,
            ..step.clone()
        });
        let Some(turn) = self.turns.get(before).cloned() else {
            return;
        };
        let id = self.memory.next_verdict_id();
        assert_eq!(id, self.disk.as_ref().unwrap().next_verdict_id());
        let verdict = Event::Verdict {
            turn: turn.id,
            id,
            verdict: Box::new(verdict(Some(1.0), &["look at what the heron did"])),
            at: 1,
        };
        let sample = Event::Sample(Box::new(new_sample(turn.id, id, 1.0)));
        self.append(vec![verdict, sample]);
        let owner = turn.profile;
        let pending = self.memory.pending(&owner).unwrap();
        let samples: Vec<SampleId> = pending.iter().map(|s| s.id).collect();
        self.both(|store| store.lease(samples.clone()));
        self.number += 1;
        let served = registry::served_number(&self.memory.versions(&owner).unwrap());
        let commit = testing::step(&owner, self.number, served, &samples);
        self.both(|store| store.commit_step(commit.clone()));
        if step.c % 4 > 0 {
            self.append(vec![Event::Version {
                version: PolicyVersion {
                    profile: owner,
                    number: self.number,
                },
                state: VersionState::Served,
                receipt: None,
                at: i64::from(step.c),
            }]);
        }
    }

    /// Makes the next of the waiting steps again, mostly out of what it may.
    fn replay(&mut self, step: &Step) {
        let owner = self.owner(step.a);
        let versions = self.memory.versions(&owner).unwrap();
        let replays = self.memory.replays(&owner).unwrap();
        let Some(of) = replays.get(usize::from(step.b % 5 == 4)).copied() else {
            return;
        };
        let old = versions.iter().find(|v| v.version.number == of);
        let samples = old.map_or(Vec::new(), |v| v.samples.clone());
        self.number += 1;
        let parent =
            [0, registry::served_number(&versions), self.number - 1][usize::from(step.c % 3)];
        let mut commit = testing::step(&owner, self.number, parent, &samples);
        commit.version.origin = VersionOrigin::Replayed(of);
        self.both(|store| store.commit_step(commit.clone()));
    }

    fn forget(&mut self, step: &Step) {
        let owner = self.owner(step.a);
        let target = match step.b % 8 {
            0 => ForgetTarget::Profile(owner.clone()),
            1..=3 => ForgetTarget::Session(
                owner.clone(),
                session(["s", "t", "u"][usize::from(step.c % 3)]),
            ),
            _ => match pick(&self.turns, step.c) {
                Some(turn) => ForgetTarget::Turn(turn.profile.clone(), turn.id),
                None => ForgetTarget::Turn(owner.clone(), TurnId(3)),
            },
        };
        let owner = target.profile().clone();
        let disk = self.disk.as_ref().unwrap();
        let plan = self.memory.plan_forget(&target);
        let on_disk = disk.plan_forget(&target);
        assert_eq!(kind(&plan), kind(&on_disk));
        assert_eq!(plan.as_ref().ok(), on_disk.as_ref().ok());
        let Ok(plan) = plan else { return };
        let undo = registry::undo(&self.memory.versions(&owner).unwrap(), &plan.trained);
        let mut forget = Forget {
            versions: undo.versions,
            back_to: undo.back_to,
            replay: undo.replay,
            ..forgetting(target)
        };
        match step.a % 16 {
            2 => drop(forget.versions.pop()),
            3 => forget.back_to = Some(u64::from(step.b % 3)),
            _ => {}
        }
        let disk = self.disk.as_ref().unwrap();
        let (a, b) = (
            block_on(self.memory.forget(forget.clone())),
            block_on(disk.forget(forget)),
        );
        assert_eq!(kind(&a), kind(&b), "{a:?} {b:?}");
        let (Ok(a), Ok(b)) = (a, b) else { return };
        assert_eq!((&a.plan, &b.found), (&b.plan, &vec![]));
        self.turns.retain(|t| !a.plan.turns.contains(&t.id));
    }

    fn run(&mut self, step: &Step, dir: &Path) {
        let turn = self.turn_id(step.a);
        let why = || "because".to_owned();
        match step.what % 30 {
            0..=4 => self.add_turn(step),
            5 | 6 => {
                let mut next = next_state(&format!("said {} to a heron in the reeds", step.b));
                if step.b % 3 == 0 {
                    next.messages[0].role = Role::Tool;
                }
                let at = i64::from(step.c) * 50;
                self.append(vec![Event::NextState { turn, next, at }]);
            }
            7 => {
                let mark = if step.b % 2 == 0 {
                    TurnMark::Superseded
                } else {
                    TurnMark::Abandoned
                };
                self.append(vec![Event::Mark { turn, mark }]);
            }
            8 => {
                self.append(vec![Event::NoVerdict { turn, why: why() }]);
            }
            9 | 10 => self.judge(step),
            11 | 12 => self.settle(step),
            13 => {
                let held_out = step.c % 2 == 0;
                self.append(vec![Event::Dropped {
                    samples: self.samples(step),
                    why: if held_out { HELD_OUT.to_owned() } else { why() },
                }]);
            }
            14 => {
                let samples = self.samples(step);
                self.both(|store| store.lease(samples.clone()));
            }
            15 => {
                let samples = self.leased(step);
                self.both(|store| store.release(samples.clone()));
            }
            16 => self.commit(step),
            17 => self.version(step),
            18 => self.session_event(step),
            19 | 20 => self.forget(step),
            21 => self.registry_event(step),
            22 | 23 => self.replay(step),
            24..=27 => self.teach(step),
            _ if step.b % 3 == 0 => {
                self.memory.restart();
                self.disk = None;
                self.disk = Some(Store::open(dir).unwrap());
            }
            _ => {
                let paused = (step.c % 2 == 0).then(why);
                self.append(vec![Event::Paused {
                    profile: self.owner(step.a),
                    why: paused,
                }]);
            }
        }
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = (any::<u8>(), any::<u8>(), any::<u8>(), any::<u8>());
    proptest::collection::vec(
        step.prop_map(|(what, a, b, c)| Step { what, a, b, c }),
        1..60,
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn disk_and_memory_agree(steps in steps()) {
        let dir = tempfile::tempdir().unwrap();
        let mut pair = Pair {
            memory: MemoryStore::new(),
            disk: Some(Store::open(dir.path()).unwrap()),
            turns: Vec::new(),
            verdicts: Vec::new(),
            number: 0,
        };
        for step in &steps {
            pair.run(step, dir.path());
        }
        let disk = pair.disk.take().unwrap();
        prop_assert_eq!(Snapshot::of(&pair.memory), Snapshot::of(&disk));
        drop(disk);
        pair.memory.restart();
        let again = Store::open(dir.path()).unwrap();
        prop_assert_eq!(Snapshot::of(&pair.memory), Snapshot::of(&again));
    }
}
