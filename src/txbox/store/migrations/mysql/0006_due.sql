-- txbox schema version 6: a lease costs the same whatever waits behind it, and so does a batch of a bulk change.
-- One ALTER, which InnoDB does as a whole or not at all; prepared, since neither product can say
-- ALTER TABLE … IF EXISTS to the other, so that it can be run again.
-- key: bounded at the edge to what an index holds. Behind a part of a column MySQL does not read an index in its
-- order, and looked through the whole key for the head of each of its rows.
-- txbox_inbox_due: in the order in which rows are leased. `starts` > 0 are rows whose last run never ended, which
-- are looked for alone.
-- txbox_inbox_open: by status, for bulk changes and for leases to be rescued; txbox_inbox_lease, which every lease and
-- heartbeat changed, goes.

SET @txbox_alter = IF(
    (SELECT COUNT(*) FROM information_schema.statistics
      WHERE table_schema = DATABASE() AND table_name = 'txbox_inbox' AND index_name = 'txbox_inbox_lease') > 0,
    'ALTER TABLE txbox_inbox
        MODIFY `key` VARBINARY(1024),
        DROP KEY txbox_inbox_due, DROP KEY txbox_inbox_lease, DROP KEY txbox_inbox_status,
        ADD KEY txbox_inbox_status (status, consumer, `key`, arrival),
        ADD KEY txbox_inbox_due (consumer, has_payload, starts, next_attempt_at, arrival),
        ADD KEY txbox_inbox_open (status, consumer, arrival)',
    'DO 0');
PREPARE txbox_alter FROM @txbox_alter;
EXECUTE txbox_alter;
DEALLOCATE PREPARE txbox_alter;

INSERT INTO txbox_schema (version, compatible_from) VALUES (6, 1)
    ON DUPLICATE KEY UPDATE compatible_from = 1;
