-- txbox schema version 8 for SQLite: each outgoing message keeps where it goes, so that relays of other Apps
-- on this database leave it alone. '' is undecided: rows of before, and those of an Outbox without an App.

ALTER TABLE txbox_outbox ADD COLUMN route TEXT NOT NULL DEFAULT '';

-- By route first: what waits for one relay, however much it is, costs the others nothing.
DROP INDEX txbox_outbox_due;
CREATE INDEX txbox_outbox_due ON txbox_outbox (route, available_at, number)
    WHERE status = 'pending';
DROP INDEX txbox_outbox_key;
CREATE INDEX txbox_outbox_key ON txbox_outbox (route, topic, key, number)
    WHERE status = 'pending' AND key IS NOT NULL;

INSERT INTO txbox_schema (version, compatible_from) VALUES (8, 1);
