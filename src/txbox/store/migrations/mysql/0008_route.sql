-- txbox schema version 8 for MySQL and MariaDB: each outgoing message keeps where it goes, so that relays of
-- other Apps on this database leave it alone. '' is undecided: rows of before, and those of an Outbox without
-- an App.

-- One ALTER, all or nothing, and none where it has been done: this DDL commits by itself, so that a crash
-- behind it leaves the old version number. By route first: what waits for one relay, however much it is, costs
-- the others nothing.
SET @txbox_route = IF(
    EXISTS (SELECT 1 FROM information_schema.columns
             WHERE table_schema = DATABASE() AND table_name = 'txbox_outbox' AND column_name = 'route'),
    'DO 0',
    'ALTER TABLE txbox_outbox ADD COLUMN route VARBINARY(255) NOT NULL DEFAULT '''',
         DROP KEY txbox_outbox_due, ADD KEY txbox_outbox_due (status, route, available_at, number),
         DROP KEY txbox_outbox_key, ADD KEY txbox_outbox_key (route, topic(255), `key`(255), number)');
PREPARE txbox_route FROM @txbox_route;
EXECUTE txbox_route;
DEALLOCATE PREPARE txbox_route;

INSERT INTO txbox_schema (version, compatible_from) VALUES (8, 1)
    ON DUPLICATE KEY UPDATE compatible_from = 1;
