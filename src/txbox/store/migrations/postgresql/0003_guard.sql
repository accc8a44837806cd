-- txbox schema version 3 for PostgreSQL: the guard fires whatever a session's replication role is.

-- A trigger that is merely enabled is silent under `session_replication_role = replica`, which a handler
-- with the right to set it can leave behind on its connection. Partitions that are made later take this over.
-- ALTER TABLE … ENABLE waits for the transactions that write, and blocks no reader.
DO $guard$
DECLARE
    own regclass;
BEGIN
    FOR own IN SELECT 'txbox_inbox'::regclass
                UNION ALL
               SELECT inhrelid::regclass FROM pg_catalog.pg_inherits WHERE inhparent = 'txbox_inbox'::regclass::oid LOOP
        EXECUTE pg_catalog.format('ALTER TABLE %s ENABLE ALWAYS TRIGGER txbox_inbox_guard', own);
    END LOOP;
END
$guard$;

-- Rows that logical replication brings were committed under the guard where they come from. Its workers are
-- told by their process and not by that role, which any session can take; in an IF of its own, since a query
-- in the first one would cost every message.
CREATE OR REPLACE FUNCTION txbox_guard() RETURNS trigger LANGUAGE plpgsql AS $function$
BEGIN
    IF coalesce(pg_catalog.current_setting('txbox.token', true), '') OPERATOR(pg_catalog.=) ''
       OR NOT coalesce(pg_catalog.current_setting('txbox.closed', true)
                       OPERATOR(pg_catalog.=) pg_catalog.current_setting('txbox.token', true), false) THEN
        IF NOT EXISTS (SELECT FROM pg_catalog.pg_stat_get_subscription(NULL) AS worker
                        WHERE worker.pid OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid()) THEN
            RAISE EXCEPTION 'a handler must not commit: txbox commits its message and its writes together'
                USING ERRCODE = 'TXB02';
        END IF;
    END IF;
    RETURN NULL;
END
$function$;

INSERT INTO txbox_schema (version, compatible_from) VALUES (3, 1);
