-- The inbox in partitions by the time that UUIDv7s and ULIDs carry in their first 48 bits, and so by ranges of
-- the id itself: a copy of a message has the same id, whenever it comes, so it meets its first row in
-- the same partition. Everything else goes to one of three partitions for the rest:
--   txbox_inbox_<ids>_before, txbox_inbox_<ids>_after   ids below the first day, or above the next century
--   txbox_inbox_<ids>_default                           what is between, and in no day's partition
-- The first two keep the third one small: PostgreSQL reads it through whenever a partition is added.
-- The functions that make and drop them are in the migrations.

DO $partition$
DECLARE
    inbox  oid := 'txbox_inbox'::regclass::oid;
    path   text := pg_catalog.current_setting('search_path');
    home   text;
    length double precision := [length_s];
    slot   bigint;
    begins text;
    ends   text;
    own    text;
    bounds text;
    made   text;
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    SELECT n.nspname INTO STRICT home
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = inbox;
    slot := floor(extract(epoch FROM clock_timestamp()) / length);
    EXECUTE format('SELECT %I.txbox_partition_bound($1, $2), %I.txbox_partition_bound($1, $3)', home, home)
       INTO begins, ends
      USING '[ids]', to_timestamp(slot * length), to_timestamp(slot * length) + interval '100 years';
    FOR own, bounds IN VALUES ('before', format('FOR VALUES FROM (MINVALUE) TO (%L)', begins)),
                              ('after', format('FOR VALUES FROM (%L) TO (MAXVALUE)', ends)),
                              ('default', 'DEFAULT') LOOP
        EXECUTE format('CREATE TABLE %I.%I PARTITION OF %I.txbox_inbox %s'
                       ' WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.05,'
                       ' autovacuum_analyze_scale_factor = 0.02)', home, 'txbox_inbox_[ids]_' || own, home, bounds);
    END LOOP;
    FOR number IN 0 .. [ahead] LOOP
        EXECUTE format('SELECT %I.txbox_partition_make($1, $2, 0)', home) INTO made
          USING to_timestamp((slot + number) * length), to_timestamp((slot + number + 1) * length);
    END LOOP;
    PERFORM set_config('search_path', path, true);
END
$partition$;
