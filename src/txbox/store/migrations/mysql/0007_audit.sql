-- txbox schema version 7: who was logged in stands beside the name that was given.
SET @txbox_alter = IF((SELECT count(*) FROM information_schema.columns
                        WHERE table_schema = DATABASE() AND table_name = 'txbox_audit'
                          AND column_name = 'login') > 0, 'DO 0',
    'ALTER TABLE txbox_audit ADD COLUMN login VARCHAR(300)');
PREPARE txbox_alter FROM @txbox_alter;
EXECUTE txbox_alter;
DEALLOCATE PREPARE txbox_alter;

INSERT INTO txbox_schema (version, compatible_from) VALUES (7, 1)
    ON DUPLICATE KEY UPDATE compatible_from = 1;
