-- txbox schema version 8 for PostgreSQL: each outgoing message keeps where it goes, so that relays of other
-- Apps on this database leave it alone. '' is undecided: rows of before, and those of an Outbox without an App.

-- A constant default rewrites no table.
ALTER TABLE txbox_outbox ADD COLUMN route text COLLATE "C" NOT NULL DEFAULT '';

-- In the schema of their table, whatever the search_path.
DO $drop$
DECLARE
    tables_schema text := (SELECT relnamespace::pg_catalog.regnamespace FROM pg_catalog.pg_class WHERE oid OPERATOR(pg_catalog.=) 'txbox_outbox'::pg_catalog.regclass::pg_catalog.oid);
BEGIN
    EXECUTE pg_catalog.format('DROP INDEX %1$s.txbox_outbox_due, %1$s.txbox_outbox_key', tables_schema);
END
$drop$;

-- By route first: what waits for one relay, however much it is, costs the others nothing.
CREATE INDEX txbox_outbox_due ON txbox_outbox (route, available_at, number)
    WHERE status = 'pending';
CREATE INDEX txbox_outbox_key ON txbox_outbox (route, topic, key, number)
    WHERE status = 'pending' AND key IS NOT NULL;

INSERT INTO txbox_schema (version, compatible_from) VALUES (8, 1);
