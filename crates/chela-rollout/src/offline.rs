//! Turns that were recorded elsewhere: rows of an export become turns, verdicts and samples of a profile, each once, however often the
//! file is read.

use chela_core::{
    Event, FinishReason, Message, Millis, NewSample, PolicyVersion, Profile, Reply, Role, Segment,
    SessionId, StoreError, TrajectoryStore, Turn, TurnKind, Verdict, VerdictSource,
};
use serde::Deserialize;
use sha2::{Digest, Sha256};

/// A row as `/rl/export_trajectories` writes it, with what its answer says of all rows.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Row {
    input_ids: Vec<u32>,
    loss_mask: Vec<u8>,
    logprobs: Vec<f32>,
    versions: Vec<i64>,
    #[serde(default)]
    rewards: Option<f32>,
    #[serde(default)]
    finish: Option<String>,
    /// What the reply was sampled at; without it 1, which is what most trainers record.
    #[serde(default)]
    temperature: Option<f32>,
    #[serde(default)]
    tokenizer_hash: Option<String>,
}

/// A whole answer of the route.
#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    tokenizer_hash: Option<String>,
    rows: Vec<Row>,
}

/// What the model that is to learn is like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fits<'a> {
    /// Ids below this are known.
    pub vocabulary: usize,
    /// Most tokens of a row.
    pub context_length: usize,
    /// Of the tokenizer that made the ids.
    pub tokenizer_hash: &'a str,
}

/// Reads lines of rows or of whole answers, and checks all before anything is written. The error names line and field.
pub fn read(text: &str, fits: &Fits<'_>) -> Result<Vec<Row>, String> {
    let mut all = Vec::new();
    for (at, line) in text.lines().enumerate() {
        if line.trim().is_empty() {
            continue;
        }
        let wrong = |what: String| format!("line {}: {what}", at + 1);
        let value: serde_json::Value =
            serde_json::from_str(line).map_err(|e| wrong(format!("no JSON: {e}")))?;
        let rows = if value.get("rows").is_some() {
            let answer: Answer = serde_json::from_value(value).map_err(|e| wrong(e.to_string()))?;
            let hash = answer.tokenizer_hash;
            let mut rows = answer.rows;
            for row in &mut rows {
                row.tokenizer_hash = row.tokenizer_hash.take().or_else(|| hash.clone());
            }
            rows
        } else {
            vec![serde_json::from_value(value).map_err(|e| wrong(e.to_string()))?]
        };
        for row in rows {
            row.check(fits).map_err(wrong)?;
            all.push(row);
        }
    }
    Ok(all)
}

impl Row {
    fn check(&self, fits: &Fits<'_>) -> Result<(), String> {
        let n = self.input_ids.len();
        for (name, len) in [
            ("loss_mask", self.loss_mask.len()),
            ("logprobs", self.logprobs.len()),
            ("versions", self.versions.len()),
        ] {
            if len != n {
                return Err(format!("{name} has {len} entries for {n} input_ids"));
            }
        }
        if n > fits.context_length {
            return Err(format!(
                "{n} tokens; the model reads {}",
                fits.context_length
            ));
        }
        match self.tokenizer_hash.as_deref() {
            Some(hash) if hash != fits.tokenizer_hash => {
                return Err(format!(
                    "tokenizer_hash {hash}: another model made this export (this one's is {}); ids of other tokenizers mean other texts",
                    fits.tokenizer_hash
                ));
            }
            Some(_) => {}
            None => {
                return Err(
                    "tokenizer_hash is missing: it cannot be told whether this model's tokenizer made the ids".to_owned(),
                );
            }
        }
        if let Some(id) = self
            .input_ids
            .iter()
            .find(|id| **id as usize >= fits.vocabulary)
        {
            return Err(format!(
                "input_ids holds {id}; the model has {} ids",
                fits.vocabulary
            ));
        }
        if self.loss_mask.iter().any(|m| *m > 1) {
            return Err("loss_mask: use 0 and 1".to_owned());
        }
        if self.logprobs.iter().any(|l| !l.is_finite() || *l > 1e-3) {
            return Err("logprobs must be finite and not above 0".to_owned());
        }
        if self.rewards.is_some_and(|r| !r.is_finite()) {
            return Err("rewards must be finite".to_owned());
        }
        if self
            .temperature
            .is_some_and(|t| !(t.is_finite() && t > 0.0))
        {
            return Err("temperature must be above 0".to_owned());
        }
        match self.start() {
            Some(0) => {
                Err("the first token is a sampled one; a prompt has at least one token".to_owned())
            }
            None => Err("loss_mask has no 1: nothing was sampled".to_owned()),
            Some(_) => Ok(()),
        }
    }

    /// Index of the first sampled token.
    fn start(&self) -> Option<usize> {
        let sampled = self.versions.iter().zip(&self.loss_mask);
        let mut sampled = sampled.map(|(v, m)| *v >= 0 || *m == 1);
        let first = sampled.position(|s| s)?;
        self.loss_mask[first..].contains(&1).then_some(first)
    }

    /// The same for the same content.
    fn session(&self) -> Result<SessionId, StoreError> {
        let mut hash = Sha256::new();
        for id in &self.input_ids {
            hash.update(id.to_le_bytes());
        }
        for logprob in &self.logprobs {
            hash.update(logprob.to_le_bytes());
        }
        hash.update(self.rewards.unwrap_or(0.0).to_le_bytes());
        hash.update(&self.loss_mask);
        let name: String = hash
            .finalize()
            .iter()
            .take(16)
            .map(|b| format!("{b:02x}"))
            .collect();
        SessionId::new(format!("offline-{name}")).map_err(|e| StoreError::Damaged(e.to_string()))
    }
}

/// What became of the rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Became samples.
    pub new: usize,
    /// Had been taken before.
    pub known: usize,
    /// Had no reward: a hint alone needs the messages, which an export does not have.
    pub without_reward: usize,
}

/// Writes rows into a profile's queue, one transaction each. They count as replies of `version`, the one that is served: how far another
/// one's log-probs are from it, the loss corrects by w.
pub async fn take(
    store: &dyn TrajectoryStore,
    profile: &Profile,
    version: &PolicyVersion,
    rows: &[Row],
    now: Millis,
) -> Result<Taken, StoreError> {
    let mut taken = Taken::default();
    for row in rows {
        let Some(reward) = row.rewards else {
            taken.without_reward += 1;
            continue;
        };
        let session = row.session()?;
        if store.session(profile, &session)?.is_some() {
            taken.known += 1;
            continue;
        }
        store
            .append(events(
                store,
                (profile, session, version),
                (row, reward),
                now,
            )?)
            .await?;
        taken.new += 1;
    }
    Ok(taken)
}

fn events(
    store: &dyn TrajectoryStore,
    (profile, session, version): (&Profile, SessionId, &PolicyVersion),
    (row, reward): (&Row, f32),
    now: Millis,
) -> Result<Vec<Event>, StoreError> {
    let start = row.start().unwrap_or(row.input_ids.len());
    let logprobs = row.logprobs[start..].to_vec();
    let n = logprobs.len();
    let reply = Reply::from_columns(
        row.input_ids[start..].to_vec(),
        logprobs.clone(),
        logprobs,
        vec![1.0; n],
        // What has mask 0 between sampled tokens, such as a tool's words, is trained on no more than what a form forced.
        row.loss_mask[start..].iter().map(|m| *m == 0).collect(),
    )?;
    let finish = row.finish.as_deref().and_then(FinishReason::parse);
    let turn = Turn {
        id: store.next_turn_id(now),
        profile: profile.clone(),
        session: session.clone(),
        parent: None,
        segment: Segment::Opened("recorded elsewhere".to_owned()),
        kind: TurnKind::Main,
        reason: "offline".to_owned(),
        version: version.clone(),
        prompt: row.input_ids[..start].to_vec(),
        reply,
        temperature: row.temperature.unwrap_or(1.0),
        finish: finish.unwrap_or(FinishReason::End),
        messages: Vec::new(),
        tools: Vec::new(),
        answer: Message::text(Role::Assistant, ""),
        created: now,
        completed: now,
    };
    let (id, verdict) = (turn.id, store.next_verdict_id());
    Ok(vec![
        Event::Turn(Box::new(turn)),
        Event::Verdict {
            turn: id,
            id: verdict,
            verdict: Box::new(Verdict {
                reward: Some(reward),
                hints: Vec::new(),
                judge: "offline".to_owned(),
                source: VerdictSource::Explicit,
                evidence: None,
                votes: Vec::new(),
                group: None,
            }),
            at: now,
        },
        Event::Sample(Box::new(NewSample {
            turn: id,
            verdict,
            reward: Some(reward),
            explicit: true,
            hint: None,
            teacher_logprobs: None,
            student_logprobs: None,
            created: now,
            group: None,
        })),
        Event::SessionEnded {
            profile: profile.clone(),
            session,
            at: now,
            why: "offline".to_owned(),
        },
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use chela_core::testing::MemoryStore;
    use futures_executor::block_on;
    use serde_json::{Value, json};

    const FITS: Fits<'static> = Fits {
        vocabulary: 50,
        context_length: 8,
        tokenizer_hash: "t",
    };

    fn row() -> Value {
        json!({
            "interaction_id": "turn_0000000000000007", "input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 1, 0, 1],
            "logprobs": [0.0, 0.0, -0.5, -1.5, -0.25], "versions": [-1, -1, 3, 3, 3], "rewards": 1.5, "hints": [], "temperature": 0.7,
            "finish": "end", "tokenizer_hash": "t",
        })
    }

    fn with(field: &str, value: Value) -> Value {
        let mut row = row();
        row[field] = value;
        row
    }

    #[test]
    fn rows_and_whole_answers_are_read() {
        let mut bare = row();
        bare.as_object_mut().unwrap().remove("tokenizer_hash");
        let answer = json!({"session_id": "s", "tokenizer_hash": "t", "rows": [bare, bare]});
        let text = format!("{}\n\n{answer}\n", row());
        let rows = read(&text, &FITS).unwrap();
        assert_eq!(rows.len(), 3);
        assert_eq!(rows[0], rows[2]);
    }

    #[test]
    fn what_does_not_fit_is_refused_with_line_and_field() {
        for (field, value, says) in [
            ("tokenizer_hash", json!("other"), "another model"),
            ("tokenizer_hash", Value::Null, "tokenizer_hash is missing"),
            ("input_ids", json!([1, 2, 3, 4, 50]), "50 ids"),
            ("input_ids", json!([1, 2, 3, 4]), "loss_mask has 5"),
            ("loss_mask", json!([0, 0, 0, 0, 0]), "nothing was sampled"),
            ("loss_mask", json!([0, 0, 2, 0, 1]), "0 and 1"),
            ("versions", json!([3, 3, 3, 3, 3]), "at least one token"),
            ("logprobs", json!([0.0, 0.0, 0.5, 0.0, 0.0]), "logprobs"),
            ("rewards", json!(1e60), "rewards"),
            ("temperature", json!(0.0), "temperature"),
            ("logprobs", json!("x"), "invalid type"),
        ] {
            let text = format!("{}\n{}", row(), with(field, value));
            let error = read(&text, &FITS).unwrap_err();
            assert!(
                error.starts_with("line 2") && error.contains(says),
                "{field}: {error}"
            );
        }
        let short = Fits {
            context_length: 4,
            ..FITS
        };
        assert!(
            read(&row().to_string(), &short)
                .unwrap_err()
                .contains("5 tokens")
        );
        assert!(read("{", &FITS).unwrap_err().contains("line 1"));
    }

    #[test]
    fn each_row_becomes_one_sample_however_often_it_is_read() {
        let store = MemoryStore::default();
        let profile = Profile::default();
        let served = PolicyVersion {
            profile: profile.clone(),
            number: 2,
        };
        let unscored = with("rewards", Value::Null);
        let text = format!("{}\n{unscored}\n{}", row(), with("rewards", json!(-1.0)));
        let rows = read(&text, &FITS).unwrap();
        let take = || block_on(super::take(&store, &profile, &served, &rows, 1_000)).unwrap();
        let first = take();
        assert_eq!((first.new, first.known, first.without_reward), (2, 0, 1));
        let again = take();
        assert_eq!((again.new, again.known), (0, 2));
        let pending = store.pending(&profile).unwrap();
        assert_eq!(pending.len(), 2);
        assert!(pending.iter().all(|p| p.explicit && p.version == served));
        let leased = block_on(store.lease(vec![pending[0].id])).unwrap();
        let turn = &leased[0].turn;
        assert_eq!(
            (turn.prompt.as_slice(), turn.temperature),
            (&[1u32, 2][..], 0.7)
        );
        assert_eq!(turn.reply.tokens(), [3, 4, 5]);
        assert_eq!(turn.reply.forced(), [false, true, false]);
        assert_eq!(turn.reply.behavior_logprobs(), [-0.5, -1.5, -0.25]);
        assert_eq!(leased[0].sample.reward, Some(1.5));
    }
}
