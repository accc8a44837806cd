-- txbox schema version 4 for PostgreSQL: what makes and drops the partitions of a time, where there are any.
-- Adding and dropping a partition takes the owner of the table, so two of these functions run with the owner's
-- rights. In whatever schema the tables are, others may create operators and functions, and one whose types
-- fit better than pg_catalog's is the one that is called. So these three search pg_catalog alone, and name
-- the schema of the tables, which is written into them when they are made.

DO $migration$
DECLARE
    inbox oid  := 'txbox_inbox'::regclass::oid;
    path  text := pg_catalog.current_setting('search_path');
    home  text;
BEGIN
    -- whoever applies this may be a superuser: nor does this block look beyond pg_catalog
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    SELECT n.nspname INTO STRICT home
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = inbox;
    IF EXISTS (SELECT FROM pg_partitioned_table WHERE partrelid = inbox AND partstrat = 'r') THEN

-- The least text that an id of this time can have.
EXECUTE format('CREATE OR REPLACE FUNCTION %I.txbox_partition_bound(ids text, moment timestamptz) RETURNS text'
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
EXECUTE format('CREATE OR REPLACE FUNCTION %I.txbox_partition_make(first timestamptz, last timestamptz, most integer)'
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
    EXECUTE format('CREATE TABLE %I.%I (LIKE %I.txbox_inbox INCLUDING ALL EXCLUDING IDENTITY)'
                   ' WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.05,'
                   ' autovacuum_analyze_scale_factor = 0.02)', home, made, home);
    -- whoever claims meanwhile would send his row to the default partition, and be refused: let him wait
    LOCK TABLE ONLY [home].txbox_inbox IN ACCESS EXCLUSIVE MODE;
    EXECUTE format('WITH stray AS (DELETE FROM %I.%I WHERE message_id >= $1 AND message_id < $2 RETURNING *)'
                   ' INSERT INTO %I.%I SELECT * FROM stray', home, rest, home, made) USING lower, upper;
    EXECUTE format('ALTER TABLE %I.txbox_inbox ATTACH PARTITION %I.%I FOR VALUES FROM (%L) TO (%L)',
                   home, home, made, lower, upper);
    RETURN 'made';
END
$function$, '[home]', quote_ident(home)), '[home as text]', quote_literal(home)));

-- Drops a partition whose time is over, unless a row in it is unfinished, dead, or younger than the horizon; says
-- whether it did. The rows are looked at without a lock first, and again under the lock, by two small
-- indexes: what an id of an old time has brought in between must not go with the rest. Only READ COMMITTED
-- sees it then: elsewhere the second look is as old as the first, or older than the lock.
EXECUTE format('CREATE OR REPLACE FUNCTION %I.txbox_partition_drop(partition text, older_than_s double precision)'
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
        RAISE EXCEPTION 'txbox_partition_drop needs a READ COMMITTED transaction, and this one is %',
            upper(current_setting('transaction_isolation')) USING ERRCODE = 'TXB03';
    END IF;
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
        EXECUTE format('LOCK TABLE %I.%I IN ACCESS EXCLUSIVE MODE', home, partition);
        looked := true;
    END LOOP;
    EXECUTE format('DROP TABLE %I.%I', home, partition);
    RETURN true;
END
$function$, '[home]', quote_ident(home)), '[home as text]', quote_literal(home)));

EXECUTE format('REVOKE EXECUTE ON FUNCTION %I.txbox_partition_make(timestamptz, timestamptz, integer),'
               ' %I.txbox_partition_drop(text, double precision) FROM PUBLIC', home, home);

    END IF;
    PERFORM set_config('search_path', path, true);
END
$migration$;

INSERT INTO txbox_schema (version, compatible_from) VALUES (4, 1);
