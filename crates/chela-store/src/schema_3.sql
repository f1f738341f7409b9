-- Replies to one prompt that belong together; NULL = a turn of a session.
ALTER TABLE samples ADD COLUMN group_id TEXT;
ALTER TABLE samples ADD COLUMN group_size INTEGER;

-- The turn's session and version again: with them the index below holds all that a batch is chosen by, and a long queue is read
-- without a look at turns or at the samples themselves, whose log-probs lie in between.
ALTER TABLE samples ADD COLUMN session INTEGER NOT NULL DEFAULT 0;
ALTER TABLE samples ADD COLUMN version INTEGER NOT NULL DEFAULT 0;
UPDATE samples SET (session, version) = (SELECT t.sid, t.version FROM turns t WHERE t.id = samples.turn);
DROP INDEX samples_pending;
CREATE INDEX samples_pending ON samples (profile, id, state, turn, session, version, explicit, reply_hash, reply_len, created, reward,
  group_id, group_size) WHERE state = 'pending';
