-- What a gate found, where a version came from, and when it was served.
ALTER TABLE versions ADD COLUMN origin TEXT NOT NULL DEFAULT 'trained';
ALTER TABLE versions ADD COLUMN origin_value;
ALTER TABLE versions ADD COLUMN gate TEXT;
ALTER TABLE versions ADD COLUMN recipe TEXT;
ALTER TABLE versions ADD COLUMN served_at INTEGER;
ALTER TABLE versions ADD COLUMN left_at INTEGER;
UPDATE versions SET why = 'by an operator' WHERE state = 'rolled_back' AND why IS NULL;
CREATE INDEX versions_candidate ON versions (profile) WHERE state = 'candidate';

-- The last version number of each profile. It stays when the profile is forgotten: no number is given twice.
CREATE TABLE numbers (profile TEXT PRIMARY KEY, last INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO numbers SELECT profile, max(number) FROM versions GROUP BY profile;

-- Steps to be made again, by position: numbers of forgotten versions.
CREATE TABLE replays (
  profile TEXT NOT NULL,
  position INTEGER NOT NULL,
  number INTEGER NOT NULL,
  PRIMARY KEY (profile, position)
) WITHOUT ROWID;

-- The turn's profile again, so that one profile's samples are found without looking at the others'. `step` stays when what
-- a rejected version consumed is dropped: its weights still know it.
ALTER TABLE samples ADD COLUMN profile TEXT NOT NULL DEFAULT '';
UPDATE samples SET profile = (SELECT s.profile FROM turns t JOIN sessions s USING (sid) WHERE t.id = samples.turn);
DROP INDEX samples_pending;
CREATE INDEX samples_pending ON samples (profile, id) WHERE state = 'pending';
CREATE INDEX samples_held_out ON samples (profile, id) WHERE state = 'dropped' AND why = 'held out for the gate';
CREATE INDEX samples_step ON samples (profile, step) WHERE step IS NOT NULL;

-- Main turns that are judged or followed by a tool's result, and whether by the latter.
CREATE TABLE live (
  profile TEXT NOT NULL,
  turn INTEGER NOT NULL,
  tool INTEGER NOT NULL,
  PRIMARY KEY (profile, turn)
) WITHOUT ROWID;
INSERT INTO live
  SELECT profile, turn, tool FROM (
    SELECT s.profile, t.id AS turn,
      EXISTS (SELECT 1 FROM next_states n, json_each(iif(json_valid(n.messages), n.messages, '[]')) m
        WHERE n.turn = t.id AND m.value ->> 'role' = 'tool') AS tool,
      EXISTS (SELECT 1 FROM verdicts v WHERE v.turn = t.id) AS judged
    FROM turns t JOIN sessions s USING (sid) WHERE t.kind = 'main')
  WHERE tool OR judged;

-- Something was forgotten and the log may still hold it.
INSERT INTO meta VALUES ('truncate_owed', 0);
