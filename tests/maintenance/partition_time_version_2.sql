-- The inbox in partitions by the time that UUIDv7s and ULIDs carry in their first 48 bits, and so by ranges of
-- the id itself: a copy of a message has the same id, whenever it comes, so it meets its first row in
-- the same partition. Everything else goes to one of three partitions for the rest:
--   txbox_inbox_<ids>_before, txbox_inbox_<ids>_after   ids below the first day, or above the next century
--   txbox_inbox_<ids>_default                           what is between, and in no day's partition
-- The first two keep the third one small: PostgreSQL reads it through whenever a partition is added.

-- The least text that an id of this time can have.
CREATE FUNCTION txbox_partition_bound(ids text, moment timestamptz) RETURNS text
    LANGUAGE plpgsql STABLE STRICT AS $function$
DECLARE
    ms    bigint := floor(extract(epoch FROM moment) * 1000);
    bound text := '';
BEGIN
    IF ids = 'uuid7' THEN
        bound := lpad(to_hex(ms), 12, '0');
        RETURN substr(bound, 1, 8) || '-' || substr(bound, 9);
    END IF;
    FOR place IN REVERSE 9 .. 0 LOOP
        bound := bound || substr('0123456789ABCDEFGHJKMNPQRSTVWXYZ', ((ms >> (5 * place)) & 31)::integer + 1, 1);
    END LOOP;
    RETURN bound;
END
$function$;

-- Makes the partition from one time to another, as far as it is missing: 'made', 'there', or 'strays' when more
-- rows than `most` lie in the default partition by now, which are not worth a lock that long.
-- SECURITY DEFINER, here and below: adding and dropping a partition takes the owner of the table, and
-- who may call this may do that much and nothing else.
CREATE FUNCTION txbox_partition_make(first timestamptz, last timestamptz, most integer) RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER AS $function$
DECLARE
    home   text;
    ids    text;
    rest   text;
    made   text;
    ready  text COLLATE "C";
    lower  text COLLATE "C";
    upper  text COLLATE "C";
    strays bigint;
BEGIN
    -- one at a time, `txbox init` included
    PERFORM pg_advisory_xact_lock(8389754677);
    SELECT n.nspname, c.relname, substring(c.relname FROM '^txbox_inbox_([a-z0-9]+)_default$')
      INTO STRICT home, rest, ids
      FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE i.inhparent = 'txbox_inbox'::regclass AND c.relname ~ '^txbox_inbox_[a-z0-9]+_default$';
    -- where the last partition ends, or the first one has to begin
    SELECT max(substring(pg_get_expr(c.relpartbound, c.oid) FROM 'TO \(''([^'']*)''\)') COLLATE "C") INTO ready
      FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
     WHERE i.inhparent = 'txbox_inbox'::regclass
       AND (c.relname ~ '^txbox_inbox_[a-z0-9]+_[0-9]' OR c.relname LIKE '%\_before');
    upper := txbox_partition_bound(ids, last);
    IF upper <= ready THEN
        RETURN 'there';
    END IF;
    lower := greatest(txbox_partition_bound(ids, first), ready);
    EXECUTE format('SELECT count(*) FROM (SELECT FROM %I.%I WHERE message_id >= $1 AND message_id < $2 LIMIT $3) AS own',
                   home, rest) INTO strays USING lower, upper, most + 1;
    IF strays > most THEN
        RETURN 'strays';
    END IF;
    made := 'txbox_inbox_' || ids || to_char(first AT TIME ZONE 'UTC', '_YYYYMMDD_HH24MI');
    -- after a change of their length a shorter one may have this name
    WHILE to_regclass(format('%I.%I', home, made)) IS NOT NULL LOOP
        made := made || '_';
    END LOOP;
    EXECUTE format('CREATE TABLE %I.%I (LIKE txbox_inbox INCLUDING ALL EXCLUDING IDENTITY)'
                   ' WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.05,'
                   ' autovacuum_analyze_scale_factor = 0.02)', home, made);
    -- whoever claims meanwhile would send his row to the default partition, and be refused: let him wait
    LOCK TABLE ONLY txbox_inbox IN ACCESS EXCLUSIVE MODE;
    EXECUTE format('WITH stray AS (DELETE FROM %I.%I WHERE message_id >= $1 AND message_id < $2 RETURNING *)'
                   ' INSERT INTO %I.%I SELECT * FROM stray', home, rest, home, made) USING lower, upper;
    EXECUTE format('ALTER TABLE txbox_inbox ATTACH PARTITION %I.%I FOR VALUES FROM (%L) TO (%L)',
                   home, made, lower, upper);
    RETURN 'made';
END
$function$;

-- Drops a partition whose time is over, unless a row in it is unfinished, dead, or younger than the horizon; says
-- whether it did. The rows are looked at without a lock first, and again under the lock, by two small
-- indexes: what an id of an old time has brought in between must not go with the rest.
CREATE FUNCTION txbox_partition_drop(partition text, older_than_s double precision) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET enable_seqscan = off AS $function$
DECLARE
    home    text;
    ids     text;
    upper   text COLLATE "C";
    horizon timestamptz := clock_timestamp() - make_interval(secs => older_than_s);
    kept    boolean;
    looked  boolean := false;
BEGIN
    SELECT n.nspname, substring(c.relname FROM '^txbox_inbox_([a-z0-9]+)_[0-9]'),
           substring(pg_get_expr(c.relpartbound, c.oid) FROM 'TO \(''([^'']*)''\)')
      INTO home, ids, upper
      FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE i.inhparent = 'txbox_inbox'::regclass AND c.relname = partition AND c.relname ~ '^txbox_inbox_[a-z0-9]+_[0-9]';
    IF upper IS NULL OR upper > txbox_partition_bound(ids, horizon) THEN
        RETURN false;
    END IF;
    -- a vacuum may not have come by since the last rows; what has no summary is read row by row
    PERFORM brin_summarize_new_values(i.indexrelid)
       FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid JOIN pg_am a ON a.oid = x.relam
      WHERE i.indrelid = to_regclass(format('%I.%I', home, partition)) AND a.amname = 'brin';
    LOOP
        EXECUTE format('SELECT EXISTS (SELECT FROM %I.%I WHERE status <> ''processed'' AND status <> ''discarded'')'
                       ' OR EXISTS (SELECT FROM %I.%I WHERE processed_at >= $1 OR processed_at IS NULL)',
                       home, partition, home, partition) INTO kept USING horizon;
        IF kept THEN
            RETURN false;
        END IF;
        EXIT WHEN looked;
        LOCK TABLE ONLY txbox_inbox IN ACCESS EXCLUSIVE MODE;
        EXECUTE format('LOCK TABLE %I.%I IN ACCESS EXCLUSIVE MODE', home, partition);
        looked := true;
    END LOOP;
    EXECUTE format('DROP TABLE %I.%I', home, partition);
    RETURN true;
END
$function$;

REVOKE EXECUTE ON FUNCTION txbox_partition_make(timestamptz, timestamptz, integer) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION txbox_partition_drop(text, double precision) FROM PUBLIC;

DO $partition$
DECLARE
    home   text := (SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                     WHERE c.oid = 'txbox_inbox'::regclass);
    length double precision := [length_s];
    slot   bigint := floor(extract(epoch FROM clock_timestamp()) / length);
    begins text := txbox_partition_bound('[ids]', to_timestamp(slot * length));
    ends   text := txbox_partition_bound('[ids]', to_timestamp(slot * length) + interval '100 years');
    own    text;
    bounds text;
BEGIN
    -- what runs with the owner's rights finds the owner's tables, whatever the caller's search_path
    FOREACH own IN ARRAY ARRAY['txbox_partition_make'::regproc::text, 'txbox_partition_drop'::regproc::text] LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path = %I, pg_temp', own, home);
    END LOOP;
    FOR own, bounds IN VALUES ('before', format('FOR VALUES FROM (MINVALUE) TO (%L)', begins)),
                              ('after', format('FOR VALUES FROM (%L) TO (MAXVALUE)', ends)),
                              ('default', 'DEFAULT') LOOP
        EXECUTE format('CREATE TABLE %I.%I PARTITION OF txbox_inbox %s'
                       ' WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.05,'
                       ' autovacuum_analyze_scale_factor = 0.02)', home, 'txbox_inbox_[ids]_' || own, bounds);
    END LOOP;
    FOR number IN 0 .. [ahead] LOOP
        PERFORM txbox_partition_make(to_timestamp((slot + number) * length),
                                     to_timestamp((slot + number + 1) * length), 0);
    END LOOP;
END
$partition$;
