-- txbox schema version 2 for PostgreSQL: how often tables are vacuumed, and how full their pages are.
-- ALTER TABLE … SET waits for a vacuum at most, and blocks no reader or writer.
-- A partitioned table has no such settings: there each partition gets them when it is made.

-- A fifth of the table is PostgreSQL's default threshold: of ten million rows, two million pruned ones
-- that keep their space until then, and two million new ones without a visibility map or a summary in
-- the BRIN index. Fillfactor stays at 100: a claim inserts and never updates, and every other change
-- writes `status`, which is indexed, so that free space in the page would make no update cheaper.
DO $storage$
BEGIN
    IF (SELECT relkind FROM pg_catalog.pg_class WHERE oid = 'txbox_inbox'::regclass::oid) = 'r' THEN
        ALTER TABLE txbox_inbox SET (autovacuum_vacuum_scale_factor = 0.02,
                                     autovacuum_vacuum_insert_scale_factor = 0.05,
                                     autovacuum_analyze_scale_factor = 0.02);
    END IF;
END
$storage$;

-- A queue: a row is written three times and deleted, so that almost all that was ever there is dead.
-- Statistics of a queue go stale fastest. Fillfactor as above: a lease changes an indexed column.
ALTER TABLE txbox_outbox SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.02);

-- Rows that are updated again and again in columns without an index: where a page has room, the new
-- version stays in it and no index changes. Of 5,000 updates spread over 5,000 keys, 75 % did so at a
-- fillfactor of 100, 99 % at 80, all at 50. Leases and anchors are a page or two: room costs nothing.
ALTER TABLE txbox_sequence SET (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05);
ALTER TABLE txbox_job SET (fillfactor = 50);

INSERT INTO txbox_schema (version, compatible_from) VALUES (2, 1);
