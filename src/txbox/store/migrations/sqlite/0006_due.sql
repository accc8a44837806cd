-- txbox schema version 6: a lease costs the same whatever waits behind it, and so does a batch of a bulk change.

-- In the order in which rows are leased. Rows whose last run never ended (starts > 0) are looked for alone.
CREATE INDEX txbox_inbox_due ON txbox_inbox (consumer, starts, next_attempt_at, arrival)
    WHERE status IN ('pending', 'failed') AND has_payload;
-- All rows that still need somebody, by status: leases to be rescued, and what is changed in bulk.
CREATE INDEX txbox_inbox_status ON txbox_inbox (status, consumer, arrival)
    WHERE status <> 'processed';
DROP INDEX txbox_inbox_open;

INSERT INTO txbox_schema (version, compatible_from) VALUES (6, 1);
