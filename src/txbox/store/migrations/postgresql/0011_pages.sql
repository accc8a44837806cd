-- txbox schema version 11 for PostgreSQL: a page of the newest rows costs the same whatever lies below it.
-- BRIN: numbers grow with their place in the table, so that a summary of each stretch is enough, and an insert
-- that no summary covers yet writes nothing. A b-tree would cost each claim 3 to 10 us. Each index is built in one pass
-- over the table, and blocks writers (not readers) meanwhile. Whoever cannot wait makes them beforehand with
-- CREATE INDEX CONCURRENTLY, under these names.
CREATE INDEX IF NOT EXISTS txbox_inbox_arrival ON txbox_inbox USING brin (arrival) WITH (pages_per_range = 32);
CREATE INDEX IF NOT EXISTS txbox_outbox_number ON txbox_outbox USING brin (number) WITH (pages_per_range = 32);

INSERT INTO txbox_schema (version, compatible_from) VALUES (11, 1);
