-- txbox schema version 5: what becomes of a quarantined message, and how much of its payload is kept.
-- DDL commits by itself: where a run was cut off, the next one finds the columns and goes on. MySQL has no
-- ADD COLUMN IF NOT EXISTS.
SET @txbox_alter = IF((SELECT count(*) FROM information_schema.columns
                        WHERE table_schema = DATABASE() AND table_name = 'txbox_quarantine'
                          AND column_name = 'kept_bytes') > 0, 'DO 0',
    'ALTER TABLE txbox_quarantine
         ADD COLUMN status VARCHAR(16) NOT NULL DEFAULT ''quarantined'',
         ADD COLUMN kept_bytes BIGINT NOT NULL DEFAULT 0,
         ADD KEY txbox_quarantine_kept (kept_bytes, received_at)');
PREPARE txbox_alter FROM @txbox_alter;
EXECUTE txbox_alter;
DEALLOCATE PREPARE txbox_alter;
UPDATE txbox_quarantine SET kept_bytes = LENGTH(payload) WHERE payload IS NOT NULL;

INSERT INTO txbox_schema (version, compatible_from) VALUES (5, 1)
    ON DUPLICATE KEY UPDATE compatible_from = 1;
