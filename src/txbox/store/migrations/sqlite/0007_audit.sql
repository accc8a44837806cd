-- txbox schema version 7: who was logged in stands beside the name that was given; nobody logs in to SQLite.
ALTER TABLE txbox_audit ADD COLUMN login TEXT;

INSERT INTO txbox_schema (version, compatible_from) VALUES (7, 1);
