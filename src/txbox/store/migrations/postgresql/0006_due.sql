-- txbox schema version 6: a lease costs the same whatever waits behind it, and so does a batch of a bulk change.
-- Each index is built in one pass over the table, and blocks writers (not readers) meanwhile. Whoever cannot
-- wait makes them beforehand with CREATE INDEX CONCURRENTLY, under these names.

-- In the order in which rows are leased. Rows whose last run never ended (starts > 0) are looked for alone.
-- "POSIX" compares as "C" does: whoever asks by it means this index and no other that begins with the consumer.
CREATE INDEX IF NOT EXISTS txbox_inbox_due ON txbox_inbox (consumer COLLATE "POSIX", starts, next_attempt_at, arrival)
    WHERE status IN ('pending', 'failed') AND has_payload;
-- All rows that still need somebody, by status: leases to be rescued, what is changed in bulk, what keeps a partition.
CREATE INDEX IF NOT EXISTS txbox_inbox_status ON txbox_inbox (status, consumer COLLATE "POSIX", arrival)
    WHERE status <> 'processed';
-- Last, since it locks readers out, for a moment. In the schema of its table, whatever the search_path.
DO $drop$
BEGIN
    EXECUTE pg_catalog.format('DROP INDEX IF EXISTS %s.txbox_inbox_open',
                   (SELECT relnamespace::pg_catalog.regnamespace FROM pg_catalog.pg_class
                     WHERE oid OPERATOR(pg_catalog.=) 'txbox_inbox'::pg_catalog.regclass::pg_catalog.oid));
END
$drop$;

INSERT INTO txbox_schema (version, compatible_from) VALUES (6, 1);
