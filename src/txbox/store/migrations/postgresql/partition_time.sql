-- The inbox in partitions by the time that UUIDv7s and ULIDs carry in their first 48 bits, and so by ranges of
-- the id itself: a copy of a message has the same id, whenever it comes, so it meets its first row in
-- the same partition. Everything else goes to one of three partitions for the rest:
--   txbox_inbox_<ids>_before, txbox_inbox_<ids>_after   ids below the first day, or above the next century
--   txbox_inbox_<ids>_default                           what is between, and in no day's partition
-- The first two keep the third one small: PostgreSQL reads it through whenever a partition is added.

-- Only the owner of the table can add, detach and drop a partition, so the functions that do it run with the owner's
-- rights. In whatever schema the tables are, others may create operators and functions, and one whose types fit better
-- than pg_catalog's is the one that is called. So these functions search pg_catalog alone, and name the schema of the
-- tables, which is written into them when they are made.
DO $functions$
DECLARE
    inbox oid  := 'txbox_inbox'::regclass::oid;
    path  text := pg_catalog.current_setting('search_path');
    home  text;
BEGIN
    -- may run as superuser, so search pg_catalog only
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    SELECT n.nspname INTO STRICT home
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = inbox;

-- The least text that an id of this time can have.
EXECUTE format('CREATE FUNCTION %I.txbox_partition_bound(ids text, moment timestamptz) RETURNS text'
               ' LANGUAGE plpgsql STABLE STRICT SET search_path = pg_catalog, pg_temp AS %L', home, $function$
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
$function$);

-- Makes the partition from one time to another, as far as it is missing: 'made', 'there', or 'strays' when more
-- rows than `most` lie in the default partition by now, which are not worth a lock that long.
EXECUTE format('CREATE FUNCTION %I.txbox_partition_make(first timestamptz, last timestamptz, most integer)'
               ' RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS %L',
               home, replace(replace($function$
DECLARE
    home   CONSTANT text := [home as text];
    inbox  CONSTANT oid := to_regclass(format('%I.txbox_inbox', home))::oid;
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
    SELECT c.relname, substring(c.relname FROM '^txbox_inbox_([a-z0-9]+)_default$')
      INTO STRICT rest, ids
      FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
     WHERE i.inhparent = inbox AND c.relname ~ '^txbox_inbox_[a-z0-9]+_default$';
    -- where the last partition ends, or the first one has to begin
    SELECT max(substring(pg_get_expr(c.relpartbound, c.oid) FROM 'TO \(''([^'']*)''\)') COLLATE "C") INTO ready
      FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
     WHERE i.inhparent = inbox
       AND (c.relname ~ '^txbox_inbox_[a-z0-9]+_[0-9]' OR c.relname LIKE '%\_before');
    upper := [home].txbox_partition_bound(ids, last);
    IF upper <= ready THEN
        RETURN 'there';
    END IF;
    lower := greatest([home].txbox_partition_bound(ids, first), ready);
    EXECUTE format('SELECT count(*) FROM (SELECT FROM %I.%I WHERE message_id >= $1 AND message_id < $2 LIMIT $3) AS stray',
                   home, rest) INTO strays USING lower, upper, most + 1;
    IF strays > most THEN
        RETURN 'strays';
    END IF;
    made := 'txbox_inbox_' || ids || to_char(first AT TIME ZONE 'UTC', '_YYYYMMDD_HH24MI');
    -- after a change of their length a shorter one may have this name
    WHILE to_regclass(format('%I.%I', home, made)) IS NOT NULL LOOP
        made := made || '_';
    END LOOP;
    EXECUTE format('CREATE TABLE %I.%I (LIKE %I.txbox_inbox INCLUDING ALL EXCLUDING IDENTITY) [storage]',
                   home, made, home);
    -- whoever claims meanwhile would send his row to the default partition, and be refused: let him wait
    LOCK TABLE ONLY [home].txbox_inbox IN ACCESS EXCLUSIVE MODE;
    EXECUTE format('WITH stray AS (DELETE FROM %I.%I WHERE message_id >= $1 AND message_id < $2 RETURNING *)'
                   ' INSERT INTO %I.%I SELECT * FROM stray', home, rest, home, made) USING lower, upper;
    EXECUTE format('ALTER TABLE %I.txbox_inbox ATTACH PARTITION %I.%I FOR VALUES FROM (%L) TO (%L)',
                   home, home, made, lower, upper);
    RETURN 'made';
END
$function$, '[home]', quote_ident(home)), '[home as text]', quote_literal(home)));

-- A partition leaves the inbox in one transaction, for which everybody who uses the inbox waits, and is dropped in the
-- next, for which nobody waits.

-- Takes a partition whose time is over out of the inbox, unless a row in it is unfinished, dead, or younger than the
-- horizon; says whether it did. The rows are looked at without a lock first, and again under the lock, by two small
-- indexes: what an id of an old time has brought in between must not go with the rest. Only READ COMMITTED
-- sees it then: elsewhere the second look is as old as the first, or older than the lock.
-- The comment, in the same transaction, is what txbox_partition_drop knows the table by.
EXECUTE format('CREATE FUNCTION %I.txbox_partition_detach(partition text, older_than_s double precision)'
               ' RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp'
               ' SET enable_seqscan = off AS %L',
               home, replace(replace($function$
DECLARE
    home    CONSTANT text := [home as text];
    inbox   CONSTANT oid := to_regclass(format('%I.txbox_inbox', home))::oid;
    ids     text;
    upper   text COLLATE "C";
    horizon timestamptz := clock_timestamp() - make_interval(secs => older_than_s);
    kept    boolean;
    looked  boolean := false;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'txbox_partition_detach needs a READ COMMITTED transaction, and this one is %',
            upper(current_setting('transaction_isolation')) USING ERRCODE = 'TXB03';
    END IF;
    -- one at a time, and none while a partition is made
    PERFORM pg_advisory_xact_lock(8389754677);
    SELECT substring(c.relname FROM '^txbox_inbox_([a-z0-9]+)_[0-9]'),
           substring(pg_get_expr(c.relpartbound, c.oid) FROM 'TO \(''([^'']*)''\)')
      INTO ids, upper
      FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
     WHERE i.inhparent = inbox AND c.relname = partition::name AND c.relname ~ '^txbox_inbox_[a-z0-9]+_[0-9]';
    IF upper IS NULL OR upper > [home].txbox_partition_bound(ids, horizon) THEN
        RETURN false;
    END IF;
    -- a vacuum may not have come by since the last rows; what has no summary is read row by row
    PERFORM brin_summarize_new_values(i.indexrelid)
       FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid JOIN pg_am a ON a.oid = x.relam
      WHERE i.indrelid = to_regclass(format('%I.%I', home, partition))::oid AND a.amname = 'brin';
    LOOP
        EXECUTE format('SELECT EXISTS (SELECT FROM %I.%I WHERE status <> ''processed'' AND status <> ''discarded'')'
                       ' OR EXISTS (SELECT FROM %I.%I WHERE processed_at >= $1 OR processed_at IS NULL)',
                       home, partition, home, partition) INTO kept USING horizon;
        IF kept THEN
            RETURN false;
        END IF;
        EXIT WHEN looked;
        LOCK TABLE ONLY [home].txbox_inbox IN ACCESS EXCLUSIVE MODE;
        -- everyone queues behind this lock, so never wait: NOWAIT; a vacuum of one of these goes first
        EXECUTE format('LOCK TABLE %I.%I, %I.%I IN ACCESS EXCLUSIVE MODE NOWAIT',
                       home, partition, home, 'txbox_inbox_' || ids || '_default');
        looked := true;
    END LOOP;
    EXECUTE format('ALTER TABLE %I.txbox_inbox DETACH PARTITION %I.%I', home, home, partition);
    EXECUTE format('COMMENT ON TABLE %I.%I IS %L', home, partition, partition || ': to be dropped by txbox');
    RETURN true;
END
$function$, '[home]', quote_ident(home)), '[home as text]', quote_literal(home)));

-- Drops what txbox_partition_detach has taken out of the inbox; says whether it did. A table that somebody has detached by
-- hand, renamed or commented on otherwise is left alone, and so is one that has rows which may not go.
EXECUTE format('CREATE FUNCTION %I.txbox_partition_drop(partition text, older_than_s double precision)'
               ' RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp'
               ' SET enable_seqscan = off AS %L',
               home, replace(replace($function$
DECLARE
    home    CONSTANT text := [home as text];
    inbox   CONSTANT oid := to_regclass(format('%I.txbox_inbox', home))::oid;
    horizon timestamptz := clock_timestamp() - make_interval(secs => older_than_s);
    kept    boolean;
BEGIN
    PERFORM pg_advisory_xact_lock(8389754677);
    IF NOT EXISTS (SELECT FROM pg_class c JOIN pg_class parent USING (relnamespace, relowner)
                    WHERE parent.oid = inbox AND c.relname = partition::name AND c.relkind = 'r'
                      AND NOT EXISTS (SELECT FROM pg_inherits i WHERE c.oid IN (i.inhrelid, i.inhparent))
                      AND obj_description(c.oid, 'pg_class') = partition || ': to be dropped by txbox') THEN
        RETURN false;
    END IF;
    EXECUTE format('LOCK TABLE %I.%I IN ACCESS EXCLUSIVE MODE', home, partition);
    EXECUTE format('SELECT EXISTS (SELECT FROM %I.%I WHERE status <> ''processed'' AND status <> ''discarded'')'
                   ' OR EXISTS (SELECT FROM %I.%I WHERE processed_at >= $1 OR processed_at IS NULL)',
                   home, partition, home, partition) INTO kept USING horizon;
    IF kept THEN
        RETURN false;
    END IF;
    EXECUTE format('DROP TABLE %I.%I', home, partition);
    RETURN true;
END
$function$, '[home]', quote_ident(home)), '[home as text]', quote_literal(home)));

EXECUTE format('REVOKE EXECUTE ON FUNCTION %1$I.txbox_partition_make(timestamptz, timestamptz, integer),'
               ' %1$I.txbox_partition_detach(text, double precision),'
               ' %1$I.txbox_partition_drop(text, double precision) FROM PUBLIC', home);

    PERFORM set_config('search_path', path, true);
END
$functions$;

DO $partition$
DECLARE
    inbox  oid := 'txbox_inbox'::regclass::oid;
    path   text := pg_catalog.current_setting('search_path');
    home   text;
    length double precision := [length_s];
    slot   bigint;
    begins text;
    ends   text;
    rest   text;
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
    FOR rest, bounds IN VALUES ('before', format('FOR VALUES FROM (MINVALUE) TO (%L)', begins)),
                               ('after', format('FOR VALUES FROM (%L) TO (MAXVALUE)', ends)),
                               ('default', 'DEFAULT') LOOP
        EXECUTE format('CREATE TABLE %I.%I PARTITION OF %I.txbox_inbox %s [storage]',
                       home, 'txbox_inbox_[ids]_' || rest, home, bounds);
    END LOOP;
    FOR number IN 0 .. [ahead] LOOP
        EXECUTE format('SELECT %I.txbox_partition_make($1, $2, 0)', home) INTO made
          USING to_timestamp((slot + number) * length), to_timestamp((slot + number + 1) * length);
    END LOOP;
    PERFORM set_config('search_path', path, true);
END
$partition$;
