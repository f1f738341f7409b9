-- Numbers never given twice, and who wrote last. This table stays as it is in every schema: a refusal reads it.
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
INSERT INTO meta VALUES ('last_turn', 0), ('last_verdict', 0), ('last_sample', 0), ('written_by', ''), ('probe', 0);

CREATE TABLE sessions (
  sid INTEGER PRIMARY KEY,
  profile TEXT NOT NULL,
  id TEXT NOT NULL,
  key_hash TEXT,
  key_order INTEGER NOT NULL DEFAULT 0,
  task TEXT,
  opened INTEGER NOT NULL,
  last_active INTEGER NOT NULL,
  ended_at INTEGER,
  ended_why TEXT,
  turns INTEGER NOT NULL DEFAULT 0,
  UNIQUE (profile, id)
);
CREATE INDEX sessions_key ON sessions (key_hash, key_order) WHERE key_hash IS NOT NULL;
CREATE INDEX sessions_live ON sessions (last_active) WHERE ended_at IS NULL;
CREATE INDEX sessions_active ON sessions (last_active);

-- What a turn shares with its parent is counted, not stored: the first `prompt_shared` ids of the parent's prompt and
-- reply, the first `messages_shared` of its messages and answer; tools NULL = the parent's.
CREATE TABLE turns (
  id INTEGER PRIMARY KEY,
  sid INTEGER NOT NULL REFERENCES sessions (sid),
  parent INTEGER REFERENCES turns (id),
  kind TEXT NOT NULL,
  reason TEXT NOT NULL,
  waiting INTEGER NOT NULL DEFAULT 0,
  mark TEXT,
  no_verdict TEXT,
  segment TEXT,
  version INTEGER NOT NULL,
  temperature REAL NOT NULL,
  finish TEXT NOT NULL,
  created INTEGER NOT NULL,
  completed INTEGER NOT NULL,
  prompt_shared INTEGER NOT NULL,
  messages_shared INTEGER NOT NULL,
  digest INTEGER NOT NULL,
  prompt BLOB NOT NULL,
  reply BLOB NOT NULL,
  behavior_logprobs BLOB NOT NULL,
  logprobs_t1 BLOB NOT NULL,
  kept_mass BLOB NOT NULL,
  forced BLOB NOT NULL,
  messages TEXT NOT NULL,
  tools TEXT,
  answer TEXT NOT NULL
);
CREATE INDEX turns_session ON turns (sid);
CREATE INDEX turns_parent ON turns (parent);
CREATE INDEX turns_kind ON turns (kind, reason, sid);
CREATE INDEX turns_waiting ON turns (id) WHERE waiting = 1;

CREATE TABLE next_states (
  turn INTEGER NOT NULL REFERENCES turns (id),
  seq INTEGER NOT NULL,
  at INTEGER NOT NULL,
  messages TEXT NOT NULL,
  PRIMARY KEY (turn, seq)
);

CREATE TABLE verdicts (
  id INTEGER PRIMARY KEY,
  turn INTEGER NOT NULL REFERENCES turns (id),
  at INTEGER NOT NULL,
  judge TEXT NOT NULL,
  source TEXT NOT NULL,
  reward REAL,
  body TEXT NOT NULL,
  no_sample TEXT,
  open INTEGER NOT NULL DEFAULT 1
);
CREATE INDEX verdicts_turn ON verdicts (turn);
CREATE INDEX verdicts_open ON verdicts (id) WHERE open = 1;
CREATE INDEX verdicts_source ON verdicts (source, turn);

-- A lease is never on disk: a leased sample is pending here, so that a restart voids it.
CREATE TABLE samples (
  id INTEGER PRIMARY KEY,
  turn INTEGER NOT NULL REFERENCES turns (id),
  verdict INTEGER NOT NULL UNIQUE REFERENCES verdicts (id),
  state TEXT NOT NULL CHECK (state IN ('pending', 'consumed', 'dropped')),
  why TEXT,
  step INTEGER,
  reward REAL,
  explicit INTEGER NOT NULL,
  created INTEGER NOT NULL,
  reply_hash INTEGER NOT NULL,
  reply_len INTEGER NOT NULL,
  hint TEXT,
  teacher_logprobs BLOB,
  student_logprobs BLOB
);
CREATE INDEX samples_turn ON samples (turn);
CREATE INDEX samples_pending ON samples (id) WHERE state = 'pending';
CREATE INDEX samples_state ON samples (state, why, turn);

CREATE TABLE versions (
  profile TEXT NOT NULL,
  number INTEGER NOT NULL,
  parent INTEGER NOT NULL,
  steps INTEGER NOT NULL,
  state TEXT NOT NULL,
  why TEXT,
  receipt_hash TEXT,
  receipt_engine BLOB,
  receipt_learner BLOB,
  checkpoint TEXT,
  samples BLOB NOT NULL,
  metrics TEXT NOT NULL,
  created INTEGER NOT NULL,
  PRIMARY KEY (profile, number)
);
CREATE UNIQUE INDEX versions_served ON versions (profile) WHERE state = 'served';

CREATE TABLE pauses (profile TEXT PRIMARY KEY, why TEXT NOT NULL) WITHOUT ROWID;
