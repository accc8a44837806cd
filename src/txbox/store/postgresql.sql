-- txbox's statements for PostgreSQL 14 and later, where they are not those of common.sql.
-- `:name` is a parameter; `:rows.name` is one column of many rows, here an array.
-- `nothing:` names queries with nothing to do.
-- Each section has the queries of the module it names.

-- fragment: now = clock_timestamp()
-- fragment: stable_now = now()
-- fragment: ago seconds = clock_timestamp() - make_interval(secs => [seconds]::double precision)
-- fragment: stable_ago seconds = now() - make_interval(secs => [seconds]::double precision)
-- fragment: in seconds = clock_timestamp() + make_interval(secs => [seconds]::double precision)
-- fragment: instant seconds = to_timestamp([seconds]::double precision)
-- fragment: age moment
-- PostgreSQL before 17 cannot subtract infinity.
extract(epoch FROM clock_timestamp() - CASE [moment] WHEN 'infinity' THEN '9999-12-31' WHEN '-infinity' THEN '0001-01-02' ELSE [moment] END)::double precision

-- fragment: clock = extract(epoch FROM clock_timestamp())::double precision
-- fragment: text column = [column]
-- fragment: time moment = extract(epoch FROM [moment])::double precision
-- fragment: joined column = string_agg([column], ',')
-- fragment: in_rows name type = = ANY(:rows.[name]::[type][])
-- fragment: same a b = ([a] IS NOT DISTINCT FROM [b])
-- fragment: greatest = greatest
-- fragment: hex column = encode([column], 'hex')
-- fragment: open = status <> 'processed' AND
-- POSIX as in is_due.
-- fragment: first_space text = strpos([text], ' ')
-- fragment: waiting_aside = txbox_quarantine
-- fragment: newest_aside = txbox_quarantine
-- fragment: by_status = txbox_inbox WHERE consumer = :consumer::text COLLATE "POSIX"
-- fragment: outbox_by_due = txbox_outbox
-- fragment: inbox_by_due = txbox_inbox
-- fragment: look = SELECT
-- The conditions of the index txbox_inbox_kept, and of no other.
-- fragment: kept = consumer = :consumer::text COLLATE "POSIX" AND has_payload > false
-- fragment: kept_rows = txbox_inbox WHERE [kept] ORDER BY arrival
-- fragment: skip_locked = FOR UPDATE SKIP LOCKED
-- fragment: for_update = FOR UPDATE

-- fragment: flushed
CASE WHEN current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
     THEN set_config('synchronous_commit', 'on', true) END

-- fragment: durable = RETURNING [flushed]
-- fragment: parked = RETURNING status, attempts
-- ON CONSTRAINT, not a column list: inference fails while the index is rebuilt concurrently.
-- fragment: unless_there = ON CONFLICT ON CONSTRAINT txbox_inbox_pkey DO NOTHING
-- fragment: retry_at exhausted = [in :delay_s]
-- fragment: on_conflict table keys = ON CONFLICT ON CONSTRAINT [table]_pkey DO UPDATE SET
-- fragment: new column = excluded.[column]
-- fragment: key = key
-- fragment: unless_staged = ON CONFLICT ON CONSTRAINT txbox_outbox_pkey DO NOTHING
-- Compares as "C" does, and so finds the index that has this and no other one.
-- fragment: by_posix = COLLATE "POSIX"

-- fragment: inbox_read
-- LATERAL with LIMIT as in classify.
unnest(:rows.consumer::text[], :rows.message_id::text[]) AS m(consumer, message_id)
 CROSS JOIN LATERAL (SELECT consumer, message_id, status, topic, attempts, fingerprint FROM txbox_inbox AS one
                      WHERE one.consumer = m.consumer AND one.message_id = m.message_id LIMIT 1) AS inbox

-- fragment: inbox_of = txbox_inbox AS inbox
-- fragment: inbox_list = FROM unnest(:rows.consumer::text[], :rows.message_id::text[]) AS m(consumer, message_id)
-- fragment: is_inbox_of = inbox.consumer = m.consumer AND inbox.message_id = m.message_id
-- fragment: quarantine_of = txbox_quarantine AS quarantine

-- fragment: quarantine_list
FROM unnest(:rows.consumer::text[], :rows.message_id::text[], :rows.hash::bytea[]) AS m(consumer, message_id, hash)

-- fragment: is_quarantine_of
quarantine.consumer = m.consumer AND quarantine.message_id = m.message_id AND quarantine.hash = m.hash

-- fragment: messages
unnest(:rows.message_id::text[], :rows.topic::text[], :rows.type::text[], :rows.key::text[],
       :rows.sequence::bigint[], :rows.payload_hash::bytea[], :rows.content_type::text[],
       :rows.headers::text[], :rows.origin::text[], :rows.payload::bytea[])
       AS m(message_id, topic, type, key, sequence, payload_hash, content_type, headers, origin, payload)

-- ---- inbox.py: claims -----------------------------------------------------------------------------------------------

-- fragment: armed
-- Arms the guard and limits the wait for a rival. Whatever txbox.closed holds, it is not this fresh token.
-- Materialized so that the settings change exactly once, whatever the join order.
WITH armed AS MATERIALIZED (
    SELECT set_config('txbox.token', :token::text, true) AS token,
           set_config('txbox.lock_timeout', current_setting('lock_timeout'), true),
           set_config('lock_timeout', :lock_timeout_ms::text, true),
           set_config('idle_in_transaction_session_timeout', :idle_ms::text, true)
)

-- fragment: not_won
-- The requested ids that were not won; a flag marks those finished under the same payload.
-- NOT IN is hashed; `<> ALL`, or an anti-join estimated at one row, would compare every id with every other.
SELECT m.message_id, found.finished
  FROM unnest(:rows.message_id::text[], :rows.payload_hash::bytea[]) AS m(message_id, payload_hash)
  LEFT JOIN LATERAL (
       SELECT CASE WHEN inbox.status IN ('processed', 'dead', 'discarded')
                    AND coalesce(inbox.payload_hash = m.payload_hash, true) THEN 'finished' END AS finished
         FROM txbox_inbox AS inbox
        WHERE inbox.consumer = :consumer::text AND inbox.message_id = m.message_id
        LIMIT 1) AS found ON true
 WHERE m.message_id NOT IN (SELECT message_id FROM won)

-- fragment: claimed behind
INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, sequence, processed_at, payload_hash)
SELECT :consumer::text, m.message_id, 'processed', m.topic, m.type, m.key, m.sequence, now(), m.payload_hash
  FROM [behind], unnest(:rows.message_id::text[], :rows.topic::text[], :rows.type::text[], :rows.key::text[],
                        :rows.sequence::bigint[], :rows.payload_hash::bytea[])
                 AS m(message_id, topic, type, key, sequence, payload_hash)
[unless_there]
RETURNING message_id

-- name: claim
-- One statement arms the guard, limits the wait for a rival, writes the rows as processed and names the ids it did
-- not win. A flag marks those known to be finished under the same payload, which settles them; the others are
-- classified. That includes a rival that committed meanwhile, because this statement's snapshot does not show it.
[armed], won AS (
    [claimed armed]
)
[not_won]

-- name: claim_single
-- claim for a single message, 10 us cheaper: no CTE, no arrays, and RETURNING restores the lock timeout at once.
-- The settings are made while the row is computed, before the insert can wait. A duplicate returns nothing and
-- runs no handler, so nothing needs restoring.
INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, sequence, processed_at, payload_hash)
VALUES (:consumer::text, :message_id::text,
        CASE WHEN set_config('txbox.token', :token::text, true)
                  || set_config('txbox.lock_timeout', current_setting('lock_timeout'), true)
                  || set_config('lock_timeout', :lock_timeout_ms::text, true)
                  || set_config('idle_in_transaction_session_timeout', :idle_ms::text, true) IS NOT NULL
             THEN 'processed' END,
        :topic::text, :type::text, :key::text, :sequence::bigint, now(), :payload_hash::bytea)
[unless_there]
RETURNING message_id, set_config('lock_timeout', current_setting('txbox.lock_timeout'), true)

-- name: claim_kept
-- claim for consumers that keep the payload of processed messages.
[armed], won AS (
    INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, sequence, processed_at, payload_hash,
                             content_type, headers, origin, payload, has_payload, key_id)
    SELECT :consumer::text, m.message_id, 'processed', m.topic, m.type, m.key, m.sequence, now(), m.payload_hash,
           m.content_type, m.headers, m.origin, m.payload, true, :key_id::text
      FROM armed, [messages]
    [unless_there]
    RETURNING message_id
)
[not_won]

-- name: claim_leased
-- The fence: a worker that lost its lease to another matches no row. Arms the guard as claim does.
-- SELECT hides the array's length from the planner. Otherwise it would plan every time, for 50 us, whenever a few
-- rows look cheaper than the ten that a generic plan assumes.
[armed]
UPDATE txbox_inbox AS inbox
   SET status = 'processed', processed_at = now(), updated_at = now(), starts = greatest(inbox.starts - 1, 0),
       lease_until = NULL, token = NULL, next_attempt_at = NULL,
       [settled]
  FROM armed
 WHERE inbox.consumer = :consumer::text AND inbox.message_id = ANY((SELECT :rows.message_id::text[])::text[])
   AND inbox.token = :lease::text AND inbox.status = 'processing'
RETURNING inbox.message_id

-- fragment: reclaimed condition
[armed]
UPDATE txbox_inbox AS inbox SET status = 'processed', updated_at = now()
  FROM armed
 WHERE inbox.consumer = :consumer::text AND inbox.message_id = ANY(:rows.message_id::text[])
   AND inbox.status [condition]
RETURNING inbox.message_id

-- name: claim_replay
-- A replay works on top of a processed row: if it fails, the rollback leaves the row `processed` as it was.
[reclaimed = 'processed']

-- name: claim_rehearsal
-- As claim_replay over a row of any status but one that is being processed; it is never committed.
[reclaimed <> 'processing']

-- name: rehearse_constraints
-- What would be checked at COMMIT; the guard is among it, and closed by now.
SET CONSTRAINTS ALL IMMEDIATE

-- name: rehearse_limit
-- A statement of the handler cannot be refused once it runs.
SELECT set_config('statement_timeout', :limit_ms::text, true)

-- nothing: keyspace keyspace_shards
-- Vitess speaks MySQL.

-- nothing: rehearse_references rehearse_leave rehearse_begin rehearse_wait rehearse_record
-- rehearse_constraints checks them, the guard refuses COMMIT, and the server counts what is written.

-- fragment: is_small
pg_relation_size(stat.relid) <= 2097152 AND has_table_privilege(stat.relid, 'SELECT')

-- name: rehearse_written
-- How many rows this transaction has written, by table, triggers and cascades included; a query for those that it left
-- behind, where the table is so small that reading all of it holds nobody up; and whether that query finds all.
SELECT stat.schemaname || '.' || stat.relname, stat.n_tup_ins, stat.n_tup_upd, stat.n_tup_del,
       CASE WHEN [is_small]
            THEN format('SELECT to_jsonb(t)::text FROM ONLY %I.%I AS t WHERE age(t.xmin) <= 0 '
                        'AND pg_xact_status(((pg_current_xact_id()::text::bigint >> 32 << 32) '
                        '+ t.xmin::text::bigint)::text::xid8) = ''in progress'' '
                        'ORDER BY t.cmin::text::bigint, t.ctid', stat.schemaname, stat.relname) END,
       [is_small] AND stat.n_tup_del = 0
  FROM pg_stat_xact_user_tables AS stat
 WHERE stat.n_tup_ins + stat.n_tup_upd + stat.n_tup_del > 0 AND stat.relname !~ '^txbox_'

-- name: bound_lock_timeout
-- For storing, and for accept with a timeout; restore_lock_timeout restores the caller's setting.
-- What is stored is acknowledged next, so its commit is made durable.
SELECT set_config('txbox.lock_timeout', current_setting('lock_timeout'), true),
       set_config('lock_timeout', :lock_timeout_ms::text, true),
       [flushed]

-- name: limit_idle
-- Where no user code runs, a transaction is idle for milliseconds: after this long its process stands still, or its
-- host is gone, and would hold rows that nobody else gets. A claim, which user code follows, sets another limit.
SELECT set_config('idle_in_transaction_session_timeout', '30s', true)

-- name: restore_lock_timeout
-- The limit was for the claim only; the handler gets its setting back. A fence that matched no row may not have
-- set anything; then nothing changes.
SELECT set_config('lock_timeout', coalesce(nullif(current_setting('txbox.lock_timeout', true), ''),
                                           current_setting('lock_timeout')), true)

-- name: bound_batch
-- Instead of restore_lock_timeout, for a claim of several: two batches that lock the same rows in different orders
-- give up long before deadlock_timeout, and continue message by message. A stricter limit stays.
-- It also sets a mark: the server reports this setting unasked, so we notice without a query when a handler
-- ends this transaction. The setting has no effect on a transaction that has already begun.
SELECT set_config('default_transaction_read_only', 'on', true),
       set_config('lock_timeout',
                  CASE WHEN old.wait::interval BETWEEN interval '1 us'
                                                   AND make_interval(secs => :longest_s::double precision)
                       THEN old.wait ELSE (:longest_s::double precision * 1000)::integer::text || 'ms' END, true)
  FROM (SELECT coalesce(nullif(current_setting('txbox.lock_timeout', true), ''),
                        current_setting('lock_timeout')) AS wait) AS old

-- nothing: arm
-- The claim already armed the guard.

-- name: savepoint_claim
-- Follows every claim, in the same round trip if the driver can. A failed transaction still accepts the names of
-- its savepoints, and a transaction that a handler began does not have this one.
SAVEPOINT txbox_claim

-- name: rollback_to_claim
-- Checks whether this is the transaction that claimed, even if it has failed.
ROLLBACK TO SAVEPOINT txbox_claim

-- fragment: foreign_functions
pg_catalog.pg_proc AS p JOIN pg_catalog.pg_language AS l ON l.oid = p.prolang
     WHERE p.oid >= 16384 AND l.lanname NOT IN ('internal', 'c') AND p.proname NOT LIKE 'txbox\_%'

-- fragment: setting_views
pg_catalog.pg_rewrite AS r
     WHERE r.oid >= 16384 AND strpos(r.ev_action::text, ':funcid ' || 'pg_catalog.set_config'::regproc::oid || ' ') > 0

-- name: may_set
-- Whether `setters` could find anything: planning that takes 10 ms of the server, and most databases have no function.
SELECT 1 WHERE EXISTS (SELECT FROM [foreign_functions]) OR EXISTS (SELECT FROM [setting_views])

-- name: setters
-- What sets something beyond its statement (promise 2.15): functions, by their text or because they name one that
-- does; tables with such a function in a trigger, default or constraint, and the tables they are partitions of; views
-- and policies that use one. Their texts are judged by connections/settings.py.
WITH RECURSIVE body AS MATERIALIZED (
    SELECT p.oid, p.proname::text AS name, p.prosrc || coalesce(pg_get_function_sqlbody(p.oid), '') AS body
      FROM [foreign_functions]
), setter AS (
    SELECT oid, name, body FROM body
     WHERE body ~* '\m(set|set_config|set_limit|reset|discard|prepare|deallocate|listen|temp|temporary|hold|pg_settings|pg_(try_){0,1}advisory_lock(_shared){0,1})\M'
       AND CASE WHEN body ~ '--|/\*' THEN regexp_replace(body, '--[^\n]*|/\*([^*]|\*[^/])*\*/', ' ', 'g') || body ELSE body END
           ~* '\mset_config\M|\mset_limit\M|\mpg_(try_){0,1}advisory_lock(_shared){0,1}\M|\mwith\s+hold\M|\mupdate\s+(pg_catalog\.){0,1}pg_settings\M|(^|[;$'']|\("|\m(begin|then|else|loop|atomic)\M)\s*(set|reset|discard|prepare|deallocate|listen|create\s+((local|global)\s+){0,1}temp(orary){0,1})\M'
     UNION
    SELECT b.oid, b.name, 'RESET ALL'
      FROM setter AS s JOIN body AS b ON b.oid <> s.oid AND strpos(lower(b.body), lower(s.name)) > 0
), user_of AS (
    SELECT t.tgrelid AS oid, 'written' AS kind, s.body FROM setter AS s JOIN pg_catalog.pg_trigger AS t ON t.tgfoid = s.oid
     UNION ALL
    SELECT coalesce(a.adrelid, c.conrelid, r.ev_class, p.polrelid),
           CASE WHEN coalesce(a.adrelid, c.conrelid) IS NULL THEN 'used' ELSE 'written' END, s.body
      FROM setter AS s
      JOIN pg_catalog.pg_depend AS d ON d.refclassid = 'pg_catalog.pg_proc'::regclass AND d.refobjid = s.oid
      LEFT JOIN pg_catalog.pg_attrdef AS a ON d.classid = 'pg_catalog.pg_attrdef'::regclass AND a.oid = d.objid
      LEFT JOIN pg_catalog.pg_constraint AS c ON d.classid = 'pg_catalog.pg_constraint'::regclass AND c.oid = d.objid
      LEFT JOIN pg_catalog.pg_rewrite AS r ON d.classid = 'pg_catalog.pg_rewrite'::regclass AND r.oid = d.objid
      LEFT JOIN pg_catalog.pg_policy AS p ON d.classid = 'pg_catalog.pg_policy'::regclass AND p.oid = d.objid
     UNION ALL
    SELECT r.ev_class, 'used', 'RESET ALL' FROM [setting_views]
), relation AS (
    SELECT oid, kind, body FROM user_of WHERE oid > 0
     UNION
    SELECT i.inhparent, n.kind, n.body FROM relation AS n JOIN pg_catalog.pg_inherits AS i ON i.inhrelid = n.oid
)
SELECT 'function', name, body FROM setter
 UNION
SELECT n.kind, c.relname::text, n.body FROM relation AS n JOIN pg_catalog.pg_class AS c ON c.oid = n.oid

-- name: close
-- Fails unless the armed token is still this one, then marks it closed. Whatever a handler has set, the commit of
-- a claim is never less durable than `on`.
SELECT CASE WHEN :token::text <> '' AND current_setting('txbox.token', true) = :token::text
            THEN set_config('txbox.closed', :token::text, true)
            ELSE txbox_refuse() END,
       [flushed]

-- nothing: complete rescue_broken
-- The claim already wrote the row as processed, and the guard refuses to commit a processing row without a lease.

-- name: duplicates
-- The ids that are finished, reported as by claim. Used when most of them are, so that a claim would mostly lose.
SELECT wanted.message_id
  FROM unnest(:rows.message_id::text[], :rows.payload_hash::bytea[]) AS wanted(message_id, payload_hash)
 CROSS JOIN LATERAL (
       SELECT status, payload_hash FROM txbox_inbox
        WHERE consumer = :consumer::text AND message_id = wanted.message_id
        LIMIT 1) AS found
 WHERE found.status IN ('processed', 'dead', 'discarded')
   AND coalesce(found.payload_hash = wanted.payload_hash, true)

-- ---- inbox.py -------------------------------------------------------------------------------------------------------

-- name: classify
-- Reads what a claim could not settle, in a second statement, because only its snapshot shows who won.
-- LATERAL with LIMIT makes each id one lookup by key, whatever the planner assumes about a table without
-- statistics; with `= ANY` it read every row of the consumer. SELECT as in claim_leased.
SELECT found.*
  FROM unnest((SELECT :rows.message_id::text[])) AS wanted(message_id)
 CROSS JOIN LATERAL (
       SELECT message_id, status, payload_hash, has_payload, attempts, starts,
              coalesce(next_attempt_at <= clock_timestamp(), true) AS due, token, lease_until IS NOT NULL AS leased
         FROM txbox_inbox
        WHERE consumer = :consumer::text AND message_id = wanted.message_id
        LIMIT 1) AS found

-- fragment: closed_guard
-- An open guard (this call is inside a handler run by txbox) is left alone; that handler's close decides.
CASE WHEN coalesce(current_setting('txbox.token', true), '') = ''
       OR current_setting('txbox.token', true) = current_setting('txbox.closed', true)
     THEN set_config('txbox.closed', set_config('txbox.token', :token::text, true), true) END

-- name: accept
-- Claims and closes at once, in the caller's transaction.
WITH guard AS MATERIALIZED (
    SELECT [closed_guard] AS token,
           -- no duplicate may be acknowledged on the word of a row that is visible but not yet durable
           [flushed]
)
[claimed guard]

-- name: accept_single
-- As claim_single: the guard is closed and the commit made durable while the row is computed, for duplicates too.
INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, sequence, processed_at, payload_hash)
VALUES (:consumer::text, :message_id::text,
        CASE WHEN coalesce([closed_guard], '') || coalesce([flushed], '') IS NOT NULL THEN 'processed' END,
        :topic::text, :type::text, :key::text, :sequence::bigint, now(), :payload_hash::bytea)
[unless_there]
RETURNING message_id

-- name: try_lock
-- For requests, which do not wait: INSERT has no NOWAIT. Those who ask for this lock never meet on the row. The seed
-- keeps apart from the locks of others.
SELECT pg_try_advisory_xact_lock(hashtextextended(:consumer::text || ' ' || :message_id::text, 8389754677))

-- name: savepoint
SAVEPOINT txbox_accept

-- name: release_savepoint
RELEASE SAVEPOINT txbox_accept

-- name: rollback_to_savepoint
ROLLBACK TO SAVEPOINT txbox_accept

-- fragment: stored
INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, sequence, payload_hash, next_attempt_at,
                         content_type, headers, origin, payload, has_payload, key_id)

-- name: store
-- One row with payload and key; the second of two writers changes nothing.
[stored]
SELECT :consumer::text, m.message_id, 'pending', m.topic, m.type, m.key, m.sequence, m.payload_hash,
       now() + make_interval(secs => :delay_s::double precision),
       m.content_type, m.headers, m.origin, m.payload, true, :key_id::text
  FROM [messages]
 WHERE :token::text IS NOT NULL
[unless_there]
RETURNING message_id

-- name: store_single
[stored]
VALUES (:consumer::text, :message_id::text, 'pending', :topic::text, :type::text, :key::text, :sequence::bigint,
        :payload_hash::bytea, now() + make_interval(secs => :delay_s::double precision),
        :content_type::text, :headers::text, :origin::text, :payload::bytea, true, :key_id::text)
[unless_there]
RETURNING message_id

-- ---- inbox.py: failures ---------------------------------------------------------------------------------------------

-- name: record_own
-- Overwrites the row this transaction claimed: of all versions under this key, only that one can have its xmin.
UPDATE txbox_inbox
   SET processed_at = NULL, [failing], [content]
 WHERE consumer = :consumer::text AND message_id = :message_id::text AND status = 'processed'
   AND xmin = pg_current_xact_id()::xid AND :token::text = current_setting('txbox.token', true)
RETURNING status, attempts

-- ---- leases.py ------------------------------------------------------------------------------------------------------

-- fragment: is_due starts
-- The conditions of the index txbox_inbox_due. statement_timestamp(), because clock_timestamp() is volatile and
-- cannot bound an index scan. POSIX is the same as C, but only this index uses that name: with stale statistics,
-- other indexes that begin with the consumer look just as good.
consumer = :consumer::text COLLATE "POSIX" AND status IN ('pending', 'failed')
          AND has_payload AND [starts] AND next_attempt_at <= statement_timestamp()

-- fragment: head column consumer key
-- The first unfinished row of a key; those behind it wait.
(SELECT head.[column] FROM txbox_inbox AS head
  WHERE head.consumer = [consumer] AND head.key = [key]
    AND head.status <> 'processed' AND head.key IS NOT NULL
    AND (head.status IN ('pending', 'failed', 'processing')
         OR (:dead_blocks::boolean AND head.status = 'dead'))
  ORDER BY head.arrival
  LIMIT 1)

-- fragment: is_head = (inbox.key IS NULL OR inbox.arrival = [head arrival, inbox.consumer, inbox.key])

-- fragment: take
-- Takes rows that `due` has locked, so their ctids are stable. With an array of ctids, or behind CASE, even stale
-- statistics cannot lead to another plan. Ctids repeat from partition to partition.
UPDATE txbox_inbox AS inbox
   SET status = 'processing', token = :token::text, starts = inbox.starts + 1, updated_at = clock_timestamp(),
       lease_until = [in :lease_s]
 WHERE inbox.ctid = ANY(ARRAY(SELECT place FROM due))
   AND CASE WHEN inbox.consumer = :consumer::text THEN inbox.message_id = ANY(ARRAY(SELECT message_id FROM due)) END
RETURNING [message starts]

-- name: store_leased
-- store for rows that are leased from the start: nobody else ever sees them waiting.
INSERT INTO txbox_inbox (consumer, message_id, status, token, lease_until, starts, topic, type, key, sequence,
                         payload_hash, next_attempt_at, content_type, headers, origin, payload, has_payload, key_id)
SELECT :consumer::text, m.message_id, 'processing', :token::text,
       [in :lease_s], 1, m.topic, m.type, m.key, m.sequence, m.payload_hash, now(),
       m.content_type, m.headers, m.origin, m.payload, true, :key_id::text
  FROM [messages]
[unless_there]
RETURNING message_id, [time received_at], arrival

-- name: lease
-- Picks and takes in one statement, in the order of the index txbox_inbox_due, so the cost does not depend on how
-- much waits behind. Materialised, here and wherever a LIMIT picks rows: if a join scanned the SELECT again, it
-- would skip the rows already taken and pick others.
WITH due AS MATERIALIZED (
       SELECT message_id, ctid AS place FROM txbox_inbox
        WHERE [is_due starts = 0]
        ORDER BY next_attempt_at, arrival
        LIMIT :limit::integer
          FOR UPDATE SKIP LOCKED)
[take]

-- name: lease_suspect
-- A row whose last run never ended is taken alone, so that a message which kills its process does not take others
-- with it; the one due longest, so that newer ones cannot keep it waiting. There are few of these, so one statement
-- serves all consumers, and sorts them; ordered ones take heads only.
WITH due AS MATERIALIZED (
       SELECT inbox.message_id, inbox.ctid AS place FROM txbox_inbox AS inbox
        WHERE [is_due starts > 0]
          AND (NOT :heads_only::boolean OR [is_head])
        ORDER BY next_attempt_at, arrival
        LIMIT 1
          FOR UPDATE OF inbox SKIP LOCKED)
[take]

-- name: lease_ordered
-- lease, but only the first unfinished row of each key. Rows that wait for their head are due as well, and may be
-- all there is in front. So the :window oldest rows are checked one by one. If those are not enough and there are
-- more, one head after another follows, from the key :after on: one index probe per key, however many rows wait
-- behind it. Rows without a key are not in that index, so they are looked for only now and then.
-- CASE: with stale statistics the planner would find each candidate by its state, among all that are due.
WITH RECURSIVE seen AS MATERIALIZED (
       SELECT message_id FROM txbox_inbox
        WHERE [is_due starts = 0]
        ORDER BY next_attempt_at, arrival
        LIMIT :window::integer
), keys(key) AS (
       SELECT :after::text COLLATE "C" WHERE (SELECT count(*) FROM seen) = :window::integer
        UNION ALL
       SELECT (SELECT next.key FROM txbox_inbox AS next
                WHERE next.consumer = :consumer::text AND next.key > keys.key
                  AND next.status <> 'processed' AND next.key IS NOT NULL
                ORDER BY next.key LIMIT 1)
         FROM keys WHERE keys.key IS NOT NULL
), candidate(message_id) AS (
       SELECT message_id FROM seen
        UNION ALL
       SELECT [head message_id, :consumer::text, keys.key]
         FROM keys
        UNION ALL
      (SELECT message_id FROM txbox_inbox
        WHERE :keyless::boolean AND (SELECT count(*) FROM seen) = :window::integer AND key IS NULL
          AND [is_due starts = 0]
        ORDER BY next_attempt_at, arrival
        LIMIT :limit::integer)
), due AS MATERIALIZED (
       SELECT free.message_id, free.place
         FROM candidate
        CROSS JOIN LATERAL (
              SELECT inbox.message_id, inbox.ctid AS place FROM txbox_inbox AS inbox
               WHERE inbox.consumer = :consumer::text AND inbox.message_id = candidate.message_id
                 AND CASE WHEN inbox.status IN ('pending', 'failed') AND inbox.has_payload
                           AND inbox.starts = 0 AND inbox.next_attempt_at <= statement_timestamp()
                          THEN [is_head] END
                 FOR UPDATE OF inbox SKIP LOCKED) AS free
        LIMIT :limit::integer)
[take]

-- name: lease_next
-- lease_ordered for a single key whose turn it is. Used after running the predecessor, to avoid looking at other
-- keys.
WITH due AS MATERIALIZED (
       SELECT inbox.message_id, inbox.ctid AS place FROM txbox_inbox AS inbox
        WHERE inbox.consumer = :consumer::text
          AND inbox.message_id = [head message_id, :consumer::text, :key::text]
          AND CASE WHEN inbox.status IN ('pending', 'failed') AND inbox.has_payload
                   THEN inbox.starts = 0 AND inbox.next_attempt_at <= clock_timestamp() END
          FOR UPDATE OF inbox SKIP LOCKED)
[take]

-- nothing: lease_stored
-- store_leased already leased the rows.

-- name: heartbeat
-- SKIP LOCKED: a row inside its handler's transaction needs no heartbeat, and waiting for it would block.
UPDATE txbox_inbox AS inbox SET lease_until = [in :lease_s]
  FROM (SELECT consumer, message_id FROM txbox_inbox
         WHERE consumer = :consumer::text AND message_id = ANY(:rows.message_id::text[])
           AND token = :token::text AND status = 'processing'
           FOR UPDATE SKIP LOCKED) AS held
 WHERE inbox.consumer = held.consumer AND inbox.message_id = held.message_id

-- name: rescue
-- The start stays counted, because its run never ended. SKIP LOCKED: a locked row is alive.
WITH expired AS MATERIALIZED (
       SELECT consumer, message_id FROM txbox_inbox
        WHERE status = 'processing' AND lease_until <= clock_timestamp()
          AND CASE WHEN :consumer::text IS NULL OR consumer = :consumer::text THEN true END
        ORDER BY lease_until
        LIMIT :limit::integer
          FOR UPDATE SKIP LOCKED)
UPDATE txbox_inbox AS inbox
   SET status = CASE WHEN inbox.starts >= :max_starts::integer THEN 'dead' ELSE 'failed' END,
       lease_until = NULL, token = NULL, updated_at = clock_timestamp(), next_attempt_at = clock_timestamp(),
       error_type = CASE WHEN inbox.starts >= :max_starts::integer THEN 'KilledItsProcess' ELSE 'LeaseExpired' END,
       error = CASE WHEN inbox.starts >= :max_starts::integer
                    THEN 'killed its process: ' || inbox.starts::text || ' runs never ended' ELSE 'lease expired' END,
       fingerprint = NULL
  FROM expired
 WHERE inbox.consumer = expired.consumer AND inbox.message_id = expired.message_id
RETURNING inbox.consumer, inbox.message_id, topic, starts, status, attempts, error_type, error

-- ---- order.py -------------------------------------------------------------------------------------------------------

-- ---- jobs.py --------------------------------------------------------------------------------------------------------

-- name: anchor_history
-- Changes when commits may be missing: another server, a restart, a restored database or table.
-- Even with synchronous_commit=off, what is anchored must be durable, and so must everything committed before.
SELECT concat_ws('/', extract(epoch FROM pg_postmaster_start_time())::text, here.oid::text,
                 'txbox_job'::regclass::oid::text),
       [flushed]
  FROM pg_database here
 WHERE here.datname = current_database()

-- name: anchor_read
SELECT name, state::bigint FROM txbox_job WHERE name = ANY(:rows.name::text[])

-- name: anchor_advance
-- Never goes back, whoever writes. Always in the same order, so that two writers do not deadlock.
INSERT INTO txbox_job AS job (name, state)
SELECT moved.name, moved.position::text
  FROM unnest(:rows.name::text[], :rows.position::bigint[]) AS moved(name, position)
 ORDER BY moved.name
ON CONFLICT (name) DO UPDATE
   SET state = greatest(job.state::bigint, excluded.state::bigint)::text, updated_at = clock_timestamp()

-- nothing: prune
-- prune_blocks walks the rows in physical order instead.

-- name: prune_blocks
-- A batch is whatever is old in a range of blocks. An index over every processed row would slow down each claim. The
-- BRIN index becomes useless as blocks are reused. A scan that always starts at the first block would re-read
-- everything deleted before. now() is read once; clock_timestamp() would be read for every row.
-- SKIP LOCKED: a redelivery that is looking at a row goes first.
WITH old AS MATERIALIZED (
       SELECT consumer, message_id FROM txbox_inbox
        WHERE ctid >= :from_ctid::text::tid AND ctid < :to_ctid::text::tid
          AND status IN ('processed', 'discarded')
          AND processed_at < now() - make_interval(secs => :older_than_s::double precision)
          AND (:consumer::text IS NULL OR consumer = :consumer::text)
          AND tableoid = ANY(:rows.relation::bigint[]::oid[])
        LIMIT :limit::integer
          FOR UPDATE SKIP LOCKED)
DELETE FROM txbox_inbox AS inbox
 USING old
 WHERE inbox.consumer = old.consumer AND inbox.message_id = old.message_id
RETURNING inbox.consumer, inbox.message_id

-- name: prune_begin
-- A batch undone by a crash is simply repeated, so nobody waits for its flush, and it takes no disk time from others.
SELECT set_config('synchronous_commit', 'off', true)

-- name: prune_attempts
DELETE FROM txbox_attempt AS gone
 USING unnest(:rows.consumer::text[], :rows.message_id::text[]) AS m(consumer, message_id)
 WHERE gone.consumer = m.consumer AND gone.message_id = m.message_id

-- name: prune_orphans
-- Attempts whose messages were dropped with their partition.
DELETE FROM txbox_attempt AS attempt
 WHERE attempt.number IN (SELECT gone.number FROM txbox_attempt AS gone
                       WHERE gone.recorded_at < now() - make_interval(secs => :older_than_s::double precision)
                         AND NOT EXISTS (SELECT 1 FROM txbox_inbox AS kept
                                          WHERE kept.consumer = gone.consumer AND kept.message_id = gone.message_id)
                       LIMIT :limit::integer)

-- name: prune_outbox
WITH old AS MATERIALIZED (
       SELECT id FROM txbox_outbox
        WHERE [outgoing_past]
        LIMIT :limit::integer
          FOR UPDATE SKIP LOCKED)
DELETE FROM txbox_outbox AS outbox
 USING old
 WHERE outbox.id = old.id

-- name: prune_quarantine
WITH old AS MATERIALIZED (
       SELECT consumer, message_id, hash FROM txbox_quarantine
        WHERE [decided]
        LIMIT :limit::integer
          FOR UPDATE SKIP LOCKED)
DELETE FROM txbox_quarantine AS quarantine
 USING old
 WHERE quarantine.consumer = old.consumer AND quarantine.message_id = old.message_id AND quarantine.hash = old.hash

-- name: second_of_day
SELECT mod(extract(epoch FROM clock_timestamp())::numeric, 86400)::double precision

-- name: drop_payloads
-- For consumers that keep payloads of processed messages for a limited time; the key and the hash stay.
WITH old AS MATERIALIZED (
       SELECT consumer, message_id FROM txbox_inbox
        WHERE [kept] AND status = 'processed'
          AND processed_at < [ago :older_than_s]
        LIMIT :limit::integer
          FOR UPDATE SKIP LOCKED)
UPDATE txbox_inbox AS inbox
   SET payload = NULL, headers = NULL, origin = NULL, content_type = NULL, has_payload = false
  FROM old
 WHERE inbox.consumer = old.consumer AND inbox.message_id = old.message_id

-- name: due
-- One query for a whole worker: in how many seconds each consumer's next row is due, and the outbox's under the
-- empty name, if within `ahead_s`. Rows that are not on the route :local may still be for its App: see relay_strays.
-- One index probe each, however much is behind it.
SELECT soon.consumer, -[age soon.at]
  FROM (SELECT asked.consumer,
               least((SELECT next_attempt_at FROM txbox_inbox
                       WHERE consumer = asked.consumer COLLATE "POSIX" AND status IN ('pending', 'failed')
                         AND has_payload AND starts = 0
                       ORDER BY next_attempt_at LIMIT 1),
                     (SELECT min(next_attempt_at) FROM txbox_inbox
                       WHERE consumer = asked.consumer COLLATE "POSIX" AND status IN ('pending', 'failed')
                         AND has_payload AND starts > 0)) AS at
          FROM unnest(:rows.consumer::text[]) AS asked(consumer)
         UNION ALL
        SELECT '', min(next.at)
          FROM unnest(:rows.route::text[]) AS asked(route)
               CROSS JOIN LATERAL (SELECT available_at AS at FROM txbox_outbox
                                    WHERE status = 'pending' AND route = asked.route
                                    ORDER BY available_at LIMIT 1) AS next
         UNION ALL
        [stray_routes]) AS soon
 WHERE soon.at <= [in :ahead_s]

-- ---- partitions.py --------------------------------------------------------------------------------------------------

-- name: partitions
-- The tables that hold the rows: the inbox itself, or its partitions. With the bounds of range partitions, the
-- number of blocks of each, and the current time.
SELECT part.oid::bigint, part.relname::text,
       substring(pg_get_expr(part.relpartbound, part.oid) FROM 'FROM \(''([^'']*)''\)'),
       substring(pg_get_expr(part.relpartbound, part.oid) FROM 'TO \(''([^'']*)''\)'),
       pg_relation_size(part.oid::regclass) / current_setting('block_size')::bigint,
       extract(epoch FROM clock_timestamp())::double precision
  FROM pg_class AS part
 WHERE (part.oid = 'txbox_inbox'::regclass::oid AND part.relkind = 'r')
    OR part.oid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = 'txbox_inbox'::regclass::oid)
 ORDER BY part.relname

-- name: partitions_detached
-- txbox_partition_detach sets this comment.
SELECT detached.relname::text
  FROM pg_class AS inbox
  JOIN pg_class AS detached ON detached.relnamespace = inbox.relnamespace AND detached.relkind = 'r'
                           AND NOT detached.relispartition
 WHERE inbox.oid = 'txbox_inbox'::regclass::oid
   AND obj_description(detached.oid, 'pg_class'::name) = detached.relname::text || ': to be dropped by txbox'
 ORDER BY detached.relname

-- name: partition_begin
-- What a crash undoes is repeated, and nothing later becomes durable before it. Callers
-- wait for the lock, not for the flush.
SELECT set_config('lock_timeout', :lock_timeout_ms::text, true), set_config('synchronous_commit', 'off', true)

-- name: partition_make
SELECT txbox_partition_make(to_timestamp(:first_s::double precision), to_timestamp(:last_s::double precision),
                            :most::integer)

-- name: partition_rows
SELECT count(*) FROM txbox_inbox
 WHERE message_id >= :first::text COLLATE "C" AND message_id < :last::text COLLATE "C"

-- name: partition_detach
SELECT txbox_partition_detach(:name::text, :older_than_s::double precision)

-- name: partition_drop
SELECT txbox_partition_drop(:name::text, :older_than_s::double precision)

-- ---- schema.py ------------------------------------------------------------------------------------------------------

-- name: schema_exists
SELECT count(*), (SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                   WHERE c.oid = to_regclass('txbox_schema')::oid) AS schema
  FROM pg_class WHERE oid = to_regclass('txbox_schema')::oid

-- name: schema_lock
-- Of two concurrent `txbox init`, the second waits and then finds the work done. The number is arbitrary.
SELECT pg_advisory_xact_lock(8389754677)

-- nothing: schema_unlock
-- The lock ends with its transaction.

-- fragment: our_tables kinds
-- Those beside txbox_schema, and their partitions.
pg_class AS home
  JOIN pg_class AS relation ON home.oid = to_regclass('txbox_schema')::oid
                           AND relation.relnamespace = home.relnamespace AND relation.relkind IN ([kinds])
                           AND relation.relname LIKE 'txbox\_%'

-- name: session
-- What `schema.unfit` judges: settings by their names, and the tables whose row security applies to this role.
SELECT name::text, setting FROM pg_settings
 WHERE name IN ('client_encoding', 'server_encoding', 'array_nulls', 'extra_float_digits', 'standard_conforming_strings')
 UNION ALL
SELECT 'row_security', string_agg(relation.relname::text, ', ' ORDER BY relation.relname)
  FROM [our_tables 'r', 'p'] WHERE NOT relation.relispartition AND row_security_active(relation.oid)

-- name: guard_check
-- The guard works only while its trigger fires on every partition, whatever the replication role.
SELECT NOT EXISTS (SELECT 1
                     FROM (SELECT 'txbox_inbox'::regclass::oid
                            UNION ALL
                           SELECT inhrelid FROM pg_inherits WHERE inhparent = 'txbox_inbox'::regclass::oid) AS part(oid)
                    WHERE NOT EXISTS (SELECT 1 FROM pg_trigger
                                       WHERE tgname = 'txbox_inbox_guard' AND tgrelid = part.oid
                                         AND tgenabled = 'A')) AS triggers,
       current_setting('session_replication_role') AS role

-- name: schema_creators
-- Who may create objects in the tables' schema, besides their owners and superusers. An operator or function
-- created there wins over pg_catalog's in every statement whose types it fits better.
SELECT CASE WHEN acl.grantee = 0 THEN 'PUBLIC' ELSE role.rolname::text END
  FROM pg_class AS home
  JOIN pg_namespace AS n ON n.oid = home.relnamespace
 CROSS JOIN LATERAL aclexplode(n.nspacl) AS acl
  LEFT JOIN pg_roles AS role ON role.oid = acl.grantee
 WHERE home.oid = 'txbox_schema'::regclass::oid AND acl.privilege_type = 'CREATE'
   AND acl.grantee <> n.nspowner AND acl.grantee <> home.relowner AND NOT coalesce(role.rolsuper, false)
 ORDER BY 1

-- ---- admin/look.py, admin/changes.py, admin/replay.py ---------------------------------------------------------------

-- name: bound_look
-- Cancelled: no index serves this filter.
SELECT set_config('statement_timeout', :statement_ms::text, true), set_config('jit', 'off', true)

-- fragment: newest table column
-- The greatest number so far; there is no index to ask. Whoever may not read the sequence pays with a look at all rows.
SELECT CASE WHEN has_sequence_privilege(sequence.oid, 'USAGE, SELECT')
            THEN coalesce(pg_sequence_last_value(sequence.oid), 0)
            ELSE (SELECT coalesce(max([column]), 0) FROM txbox_[table]) END
  FROM (SELECT pg_get_serial_sequence('txbox_[table]', '[column]')::regclass AS oid) AS sequence

-- name: inbox_newest
[newest inbox, arrival]

-- name: outbox_newest
[newest outbox, number]

-- name: sizes
-- In bytes, including TOAST and maps but not indexes; for a partitioned table the sum.
SELECT relation.relname::text, sum(pg_table_size(part.oid::regclass))::bigint,
       sum(pg_indexes_size(part.oid::regclass))::bigint, count(*)
  FROM [our_tables 'r', 'p']
 CROSS JOIN LATERAL (SELECT relation.oid WHERE relation.relkind = 'r'
                      UNION ALL
                     SELECT inhrelid FROM pg_inherits
                      WHERE inhparent = relation.oid AND relation.relkind = 'p') AS part(oid)
 WHERE NOT relation.relispartition
 GROUP BY relation.relname ORDER BY relation.relname

-- For each table: a page, a whole row, how many rows a change affects, one batch of them, and the changes.

-- name: inbox_count
-- What inbox_select would find in all batches of each consumer, and how many of those are spared. Takes no locks.
SELECT status, consumer, count(*), count(*) FILTER (WHERE error_type = :spared::text) FROM txbox_inbox
 WHERE CASE WHEN :consumer::text IS NULL OR consumer = :consumer::text THEN true END
   AND (:message_id::text IS NULL
        OR message_id = :message_id::text AND consumer = coalesce(:consumer::text, consumer))
   AND status <> 'processed' AND status = ANY(:rows.status::text[])
   AND (has_payload OR NOT :needs_payload::boolean)
   AND [inbox_filter]
 GROUP BY status, consumer ORDER BY consumer

-- fragment: ahead_of_it route
-- Of each route by itself, as the index has them in their order.
(SELECT head.id, head.number FROM txbox_outbox AS head
              WHERE head.status = 'pending' AND head.route = [route]
                AND head.topic = outbox.topic AND head.key = outbox.key
                AND head.number < outbox.number
                AND (head.token IS NOT NULL OR head.attempts > 0 OR head.available_at = head.staged_at
                     OR head.available_at <= now())
              ORDER BY head.number LIMIT 1)

-- fragment: before_it
(SELECT first.id FROM ([ahead_of_it outbox.route] UNION ALL [ahead_of_it '']) AS first
             ORDER BY first.number LIMIT 1)

-- ---- admin/doctor ---------------------------------------------------------------------------------------------------
-- No full scans: names come from index skip scans, and rows are counted up to a limit.

-- name: doctor_settings
-- Lengths of time in milliseconds, as pg_settings has them.
SELECT name::text, setting FROM pg_settings
 WHERE name IN ('fsync', 'full_page_writes', 'synchronous_commit', 'synchronous_standby_names', 'transaction_isolation',
                'transaction_read_only', 'default_transaction_read_only', 'default_transaction_isolation',
                'statement_timeout', 'transaction_timeout', 'autovacuum', 'track_counts')
 UNION ALL
SELECT 'in_recovery', CASE WHEN pg_is_in_recovery() THEN 'on' ELSE 'off' END
 UNION ALL
-- What connections that are not ours have, unless they say otherwise; of two, that of the role in this database.
(SELECT 'role_encoding', split_part(entry.text, '=', 2)
  FROM pg_db_role_setting AS setting
 CROSS JOIN unnest(setting.setconfig) AS entry(text)
 WHERE setting.setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
   AND setting.setrole IN (0, (SELECT oid FROM pg_roles WHERE rolname = session_user))
   AND entry.text LIKE 'client_encoding=%'
 ORDER BY setting.setrole = 0, setting.setdatabase = 0
 LIMIT 1)

-- name: doctor_backend
-- A pooler that knows prepared statements gives them other names.
SELECT pg_backend_pid(), EXISTS (SELECT 1 FROM pg_prepared_statements WHERE name LIKE 'txbox\_%')

-- name: doctor_columns
SELECT relation.relname::text, part.attname::text
  FROM [our_tables 'r', 'p', 'v']
  JOIN pg_attribute AS part ON part.attrelid = relation.oid AND part.attnum > 0 AND NOT part.attisdropped
 WHERE NOT relation.relispartition

-- name: doctor_indexes
-- Those of partitions, too: one that was being built when its session ended is there, and nobody uses it.
SELECT relation.relname::text, index.relname::text, part.indisvalid AND part.indisready AND part.indislive
  FROM [our_tables 'r', 'p']
  JOIN pg_index AS part ON part.indrelid = relation.oid
  JOIN pg_class AS index ON index.oid = part.indexrelid

-- name: doctor_functions
SELECT function.proname::text, function.prosrc
  FROM pg_class AS home
  JOIN pg_proc AS function ON function.pronamespace = home.relnamespace AND function.proname LIKE 'txbox\_%'
 WHERE home.oid = 'txbox_schema'::regclass::oid

-- name: doctor_storage
-- What the statistics collector counts, which is no look at the tables.
SELECT relation.relname::text, seen.n_live_tup, seen.n_dead_tup,
       coalesce((SELECT option_value::boolean FROM pg_options_to_table(relation.reloptions)
                  WHERE option_name = 'autovacuum_enabled'), true),
       extract(epoch FROM clock_timestamp() - greatest(seen.last_vacuum, seen.last_autovacuum))::double precision
  FROM [our_tables 'r']
  JOIN pg_stat_user_tables AS seen ON seen.relid = relation.oid
 ORDER BY relation.relname

-- name: doctor_transactions
-- The oldest one of somebody else that holds back vacuum here; and whether this role may see them all.
(SELECT 'session', pid::text, coalesce(usename::text, ''), coalesce(state, ''),
        extract(epoch FROM clock_timestamp() - xact_start)::double precision
   FROM pg_stat_activity
  WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL
    AND backend_type = 'client backend'
  ORDER BY xact_start LIMIT 1)
 UNION ALL
(SELECT 'prepared', gid, owner::text, 'prepared', extract(epoch FROM clock_timestamp() - prepared)::double precision
   FROM pg_prepared_xacts WHERE database = current_database() ORDER BY prepared LIMIT 1)
 UNION ALL
SELECT 'blind', '', current_user::text, '', 0 WHERE NOT pg_has_role('pg_read_all_stats', 'USAGE')

-- name: doctor_standbys
SELECT application_name, coalesce(extract(epoch FROM replay_lag), 0)::double precision,
       CASE WHEN NOT pg_is_in_recovery() THEN pg_wal_lsn_diff(pg_current_wal_lsn(), replay_lsn) END::bigint, sync_state
  FROM pg_stat_replication WHERE state = 'streaming'

-- ---- admin/facts.py -------------------------------------------------------------------------------------------------

-- name: explain_outbox
-- Which of these outgoing messages there are.
SELECT found.*
  FROM unnest(:rows.message_id::text[]) AS m(message_id)
 CROSS JOIN LATERAL (
       SELECT id, [state] AS state, topic FROM txbox_outbox
        WHERE id = m.message_id
        LIMIT 1) AS found

-- name: explain_holder
-- The open transaction that has locked or changed this row: its id stands in the row, and while it is open it
-- holds a lock on that id. What pg_stat_activity hides from this role is NULL.
SELECT lock.pid, act.usename::text, act.application_name, act.state,
       extract(epoch FROM clock_timestamp() - act.xact_start)::double precision
  FROM (SELECT xmax AS holder FROM txbox_inbox
         WHERE consumer = :consumer::text AND message_id = :message_id::text) AS held
  JOIN pg_locks AS lock ON lock.locktype = 'transactionid' AND lock.granted AND lock.transactionid = held.holder
  LEFT JOIN pg_stat_activity AS act ON act.pid = lock.pid

-- name: explain_writers
-- Open transactions that have written to the inbox, oldest first: rows that they have inserted are not seen.
SELECT lock.pid, act.usename::text, act.application_name, act.state,
       extract(epoch FROM clock_timestamp() - act.xact_start)::double precision
  FROM pg_locks AS lock
  LEFT JOIN pg_stat_activity AS act ON act.pid = lock.pid
 WHERE lock.locktype = 'relation' AND lock.granted AND lock.mode = 'RowExclusiveLock'
   AND lock.relation = 'txbox_inbox'::regclass::oid
   AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND lock.pid <> pg_backend_pid()
 ORDER BY act.xact_start
 LIMIT :limit::integer

-- ---- outbox.py ------------------------------------------------------------------------------------------------------

-- fragment: staged
-- A repeated run with the same cause stages the same ids, and changes nothing.
INSERT INTO txbox_outbox (id, topic, type, key, content_type, headers, payload, key_id, cause_consumer, cause_id,
                          available_at, route)

-- fragment: staging
-- Many messages in one statement, in the caller's transaction; `number` is the order of insertion.
[staged]
SELECT m.id, m.topic, m.type, m.key, m.content_type, m.headers, m.payload, :key_id::text, m.cause_consumer,
       m.cause_id, now() + make_interval(secs => m.delay_s), m.route
  FROM unnest(:rows.id::text[], :rows.topic::text[], :rows.type::text[], :rows.key::text[],
              :rows.content_type::text[], :rows.headers::text[], :rows.payload::bytea[],
              :rows.cause_consumer::text[], :rows.cause_id::text[], :rows.delay_s::double precision[],
              :rows.route::text[])
       WITH ORDINALITY AS m(id, topic, type, key, content_type, headers, payload, cause_consumer, cause_id, delay_s,
                            route, position)
 ORDER BY m.position
[unless_staged]

-- fragment: staging_single
[staged]
VALUES (:id::text, :topic::text, :type::text, :key::text, :content_type::text, :headers::text, :payload::bytea,
        :key_id::text, :cause_consumer::text, :cause_id::text,
        now() + make_interval(secs => :delay_s::double precision), :route::text)
[unless_staged]

-- fragment: notifying insert
-- Plus a notification at commit for relays that listen; one round trip.
WITH staged AS ([insert])
SELECT pg_notify('txbox_outbox', '')

-- name: stage
[staging]

-- name: stage_single
[staging_single]

-- name: stage_notify
[notifying [staging]]

-- name: stage_notify_single
[notifying [staging_single]]

-- name: stage_lock
-- Nobody else can stage in order under these keys until the caller's transaction ends, so numbers are committed in
-- order. Sorted by the caller.
SELECT pg_advisory_xact_lock(wanted.lock) FROM unnest(:rows.lock::bigint[]) AS wanted(lock)

-- fragment: route_keys
SELECT m.route, m.topic, m.key
  FROM unnest(:rows.route::text[], :rows.topic::text[], :rows.key::text[]) AS m(route, topic, key)

-- fragment: page route topics
-- now() bounds the index scan, which with clock_timestamp() would read every delayed row.
(SELECT id, number, topic, key, available_at, coalesce(octet_length(payload), 0) AS payload_bytes, type
           FROM txbox_outbox
          WHERE status = 'pending' AND route = [route] AND available_at <= now()
            AND (available_at, number)
                > (coalesce(to_timestamp(:after_at::double precision), '-infinity'), :after_number::bigint)
            AND [topics]
          ORDER BY available_at, number
          LIMIT :limit::integer)

-- name: relay_lease
-- The commit that takes a row is durable, and so is the earlier commit that staged it: nothing is published that a
-- server crash could still undo. The route again: an operator may have changed it since the page was read.
-- By ctid, as in `take`: by id each row would be looked for twice, or the whole table read.
WITH due AS (SELECT ctid AS place FROM txbox_outbox
              WHERE id = ANY(:rows.id::text[]) AND status = 'pending' AND available_at <= now()
                AND route IN (:route::text, '')
                FOR UPDATE SKIP LOCKED)
UPDATE txbox_outbox SET token = :token::text, available_at = [in :lease_s]
 WHERE ctid = ANY(ARRAY(SELECT place FROM due))
RETURNING id, number, topic, type, key, content_type, headers, payload, key_id, [time staged_at], attempts, [flushed]

-- ---- activity.py ----------------------------------------------------------------------------------------------------

-- fragment: counted
SELECT counted.minute, counted.kind, counted.name, :worker::text, counted.received, counted.processed,
       counted.duplicate, counted.deferred, counted.failed, counted.dead, counted.quarantined, counted.latency,
       counted.run, counted.oldest_s
  FROM unnest(:rows.minute::bigint[], :rows.kind::text[], :rows.name::text[], :rows.received::bigint[],
              :rows.processed::bigint[], :rows.duplicate::bigint[], :rows.deferred::bigint[], :rows.failed::bigint[],
              :rows.dead::bigint[], :rows.quarantined::bigint[], :rows.latency::text[], :rows.run::text[],
              :rows.oldest_s::double precision[])
       AS counted(minute, kind, name, received, processed, duplicate, deferred, failed, dead, quarantined, latency,
                  run, oldest_s)

-- name: outbox_ages
-- How long the first row that is due has been so, of each route; one index probe each.
SELECT asked.route, [age first.at]
  FROM unnest(:rows.route::text[]) AS asked(route)
       CROSS JOIN LATERAL (SELECT available_at AS at FROM txbox_outbox
                            WHERE status = 'pending' AND route = asked.route
                            ORDER BY available_at LIMIT 1) AS first
