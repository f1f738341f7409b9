-- Replies to one prompt that belong together; NULL = a turn of a session.
ALTER TABLE samples ADD COLUMN group_id TEXT;
ALTER TABLE samples ADD COLUMN group_size INTEGER;
