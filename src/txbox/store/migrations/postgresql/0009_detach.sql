-- txbox schema version 9 for PostgreSQL: a partition leaves the inbox in one transaction, which all who use the inbox
-- wait for, and is dropped in the next, which nobody waits for.
-- As in version 4 both functions run with the owner's rights, search pg_catalog alone, and name the schema of the tables.

DO $migration$
DECLARE
    inbox  oid  := 'txbox_inbox'::regclass::oid;
    path   text := pg_catalog.current_setting('search_path');
    home   text;
    caller text;
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    SELECT n.nspname INTO STRICT home
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = inbox;
    IF EXISTS (SELECT FROM pg_partitioned_table WHERE partrelid = inbox AND partstrat = 'r') THEN

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
        -- all that come wait for this transaction now, so it waits for nobody: a vacuum of one of these goes first
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
EXECUTE format('CREATE OR REPLACE FUNCTION %I.txbox_partition_drop(partition text, older_than_s double precision)'
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

EXECUTE format('REVOKE EXECUTE ON FUNCTION %I.txbox_partition_detach(text, double precision) FROM PUBLIC', home);
-- whoever may drop may now detach
FOR caller IN SELECT CASE WHEN own.grantee = 0 THEN 'PUBLIC' ELSE own.grantee::regrole::text END
                FROM pg_proc p CROSS JOIN LATERAL aclexplode(p.proacl) AS own
               WHERE p.oid = to_regprocedure(format('%I.txbox_partition_drop(text, double precision)', home))::oid
                 AND own.grantee <> p.proowner LOOP
    EXECUTE format('GRANT EXECUTE ON FUNCTION %I.txbox_partition_detach(text, double precision) TO %s', home, caller);
END LOOP;

    END IF;
    PERFORM set_config('search_path', path, true);
END
$migration$;

INSERT INTO txbox_schema (version, compatible_from) VALUES (9, 1);
