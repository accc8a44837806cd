-- txbox schema version 7 for PostgreSQL: who was logged in stands beside the name that was given.
-- The default comes after the column: rows that are there were not written by whoever applies this.
ALTER TABLE txbox_audit ADD COLUMN login text;
ALTER TABLE txbox_audit ALTER COLUMN login SET DEFAULT session_user;

INSERT INTO txbox_schema (version, compatible_from) VALUES (7, 1);
