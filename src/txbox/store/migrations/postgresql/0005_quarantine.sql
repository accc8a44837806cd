-- txbox schema version 5: what becomes of a quarantined message, and how much of its payload is kept.
-- Columns with a default are added without writing a row; the UPDATE writes those that have a payload.
ALTER TABLE txbox_quarantine
    ADD COLUMN status     text   COLLATE "C" NOT NULL DEFAULT 'quarantined',
    ADD COLUMN kept_bytes bigint NOT NULL DEFAULT 0;
UPDATE txbox_quarantine SET kept_bytes = octet_length(payload) WHERE payload IS NOT NULL;
CREATE INDEX txbox_quarantine_kept ON txbox_quarantine (received_at) WHERE kept_bytes > 0;

INSERT INTO txbox_schema (version, compatible_from) VALUES (5, 1);
