//! A store written by schema 1 is opened and has lost nothing.

use super::*;
use crate::Store;
use chela_core::{testing::*, *};
use futures_executor::block_on;

/// As a program of schema 1 left it: two sessions, verdicts, samples in every state, versions in most.
const ROWS: &str = r#"
INSERT INTO sessions (sid, profile, id, opened, last_active, turns) VALUES (1, 'p', 's', 10, 20, 2), (2, 'q', 't', 10, 20, 1);
INSERT INTO turns (id, sid, parent, kind, reason, version, temperature, finish, created, completed, prompt_shared,
    messages_shared, digest, prompt, reply, behavior_logprobs, logprobs_t1, kept_mass, forced, messages, tools, answer)
  VALUES (1, 1, NULL, 'main', 'r', 3, 1.0, 'end', 10, 11, 0, 0, 0, x'01000000', x'0200000003000000', x'0000000000000000',
      x'0000000000000000', x'0000803f0000803f', x'0000', '[{"role":"user","content":"hello"}]', '[]',
      '{"role":"assistant","content":"hi"}'),
    (2, 1, NULL, 'main', 'r', 1, 1.0, 'end', 12, 13, 0, 0, 0, x'01000000', x'02000000', x'00000000',
      x'00000000', x'0000803f', x'00', '[{"role":"user","content":"run it"}]', '[]', '{"role":"assistant","content":"ok"}'),
    (3, 2, NULL, 'main', 'r', 0, 1.0, 'end', 14, 15, 0, 0, 0, x'01000000', x'02000000', x'00000000',
      x'00000000', x'0000803f', x'00', '[{"role":"user","content":"hello"}]', '[]', '{"role":"assistant","content":"hi"}');
INSERT INTO next_states VALUES (2, 1, 16, '[{"role":"tool","content":"done"}]'), (3, 1, 16, '[{"role":"user","content":"the word tool"}]');
INSERT INTO verdicts (id, turn, at, judge, source, reward, body, open) VALUES
  (1, 1, 17, 'self', 'judge', 1.0, '{"hints":[],"votes":[]}', 0), (2, 1, 18, 'self', 'judge', -1.0, '{"hints":[],"votes":[]}', 0);
INSERT INTO samples (id, turn, verdict, state, why, step, reward, explicit, created, reply_hash, reply_len) VALUES
  (1, 1, 1, 'consumed', NULL, 4, 1.0, 0, 19, 5, 2), (2, 1, 2, 'pending', NULL, NULL, -1.0, 0, 19, 5, 2);
INSERT INTO versions (profile, number, parent, steps, state, why, checkpoint, samples, metrics, created) VALUES
  ('p', 4, 0, 1, 'served', NULL, 'a/4', x'0100000000000000', '[["loss","NaN"]]', 20),
  ('p', 6, 4, 2, 'rolled_back', NULL, 'a/6', x'', '[]', 21), ('q', 2, 0, 1, 'rejected', 'canary', 'a/2', x'', '[]', 22);
UPDATE meta SET value = 3 WHERE key = 'last_turn';
UPDATE meta SET value = 2 WHERE key IN ('last_verdict', 'last_sample');
"#;

/// With the digests that the store would have written.
fn schema_1(dir: &Path) {
    let path = dir.join(crate::DATABASE);
    let conn = open_with(&path, &MIGRATIONS[..1]).unwrap();
    conn.execute_batch(ROWS).unwrap();
    crate::turns::digest_again(&conn);
}

#[test]
fn a_store_of_schema_1_is_opened_and_has_lost_nothing() {
    let dir = tempfile::tempdir().unwrap();
    schema_1(dir.path());
    let store = Store::open(dir.path()).unwrap();
    let (p, q) = (profile("p"), profile("q"));
    let story = store.story(TurnId(1)).unwrap().unwrap();
    assert_eq!(story.turn.messages, vec![Message::user("hello")]);
    assert_eq!(story.turn.reply.tokens(), [2, 3]);
    assert_eq!(story.samples.len(), 2);

    let versions = store.versions(&p).unwrap();
    assert_eq!(versions[0].state, VersionState::Served);
    assert_eq!(
        versions[1].state,
        VersionState::RolledBack("by an operator".to_owned())
    );
    assert_eq!(
        store.versions(&q).unwrap()[0].state,
        VersionState::Rejected("canary".to_owned())
    );
    for version in &versions {
        assert_eq!(version.origin, VersionOrigin::Trained);
        assert_eq!((&version.gate, &version.recipe), (&None, &None));
        assert_eq!((version.served_at, version.left_at), (None, None));
    }
    assert!(versions[0].metrics[0].1.is_nan());
    let last = |profile: &Profile| store.last_version(profile).unwrap();
    assert_eq!((last(&p), last(&q), last(&profile("r"))), (6, 2, 0));

    // What the migration adds to turns and samples.
    let pending = store.pending(&p).unwrap();
    let of = |s: &PendingSample| {
        (
            s.id.0,
            s.version.number,
            s.session.to_string(),
            s.group.clone(),
        )
    };
    let all: Vec<_> = pending.iter().map(of).collect();
    assert_eq!(all, [(2, 3, "s".to_owned(), None)]);
    assert_eq!(store.pending(&q).unwrap(), vec![]);
    assert_eq!(store.profiles_to_train().unwrap(), vec![p.clone()]);
    let live = store.live_turns(&p, 9).unwrap();
    let live: Vec<_> = live
        .iter()
        .map(|l| (l.turn.0, l.reward, l.tool_error))
        .collect();
    assert_eq!(live, [(2, None, Some(false)), (1, Some(-1.0), None)]);
    assert_eq!(store.live_turns(&q, 9).unwrap(), vec![]);
    let plan = store.plan_forget(&ForgetTarget::Turn(p.clone(), TurnId(1)));
    assert_eq!(plan.unwrap().trained, vec![(SampleId(1), 4)]);

    // Forgetting takes the copy from before the migration along.
    let copy = copy_path(&dir.path().join(crate::DATABASE), 1);
    assert!(copy.exists());
    let proof = block_on(store.forget(forgetting(ForgetTarget::Profile(q.clone())))).unwrap();
    assert_eq!(proof.found, Vec::<String>::new());
    assert!(!copy.exists());
    assert_eq!(last(&q), 2);
}
