-- The statements of txbox for PostgreSQL 14 and later.
-- `:name` is a parameter, `:rows.name` one column of many rows, here an array.
-- A query without a body has nothing to do on this database.
-- `status <> 'processed'` stands beside narrower conditions: it is what the partial indexes over open rows are
-- made under, and with parameters in the narrower ones the planner could not conclude it.
-- A section has the queries of the modules that it names.

-- ---- claims.py ------------------------------------------------------------------------------------------------------

-- name: claim
-- One statement arms the guard, bounds the wait for a rival, writes the rows as processed, and names what
-- it has not won: with a mark what is finished under the same payload, as far as that is known, which is
-- all there is to say of it; the others are classified. A rival that committed meanwhile is not in this
-- statement's snapshot: it is one of those.
-- NOT IN is hashed; `<> ALL` and an anti-join with an estimate of one row compare every id with every other.
-- The settings are materialized so that they change once, whatever the join order.
-- ON CONSTRAINT, not a column list: inference fails while the index is rebuilt concurrently.
WITH armed AS MATERIALIZED (
    SELECT set_config('txbox.token', :token::text, true) AS token,
           set_config('txbox.closed', '', true),
           set_config('txbox.lock_timeout', current_setting('lock_timeout'), true),
           set_config('lock_timeout', :lock_timeout_ms::text, true),
           set_config('idle_in_transaction_session_timeout', :idle_ms::text, true)
), won AS (
    INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, sequence, processed_at, payload_hash)
    SELECT :consumer::text, m.message_id, 'processed', m.topic, m.type, m.key, m.sequence, now(), m.payload_hash
      FROM armed, unnest(:rows.message_id::text[], :rows.topic::text[], :rows.type::text[], :rows.key::text[],
                         :rows.sequence::bigint[], :rows.payload_hash::bytea[])
                  AS m(message_id, topic, type, key, sequence, payload_hash)
    ON CONFLICT ON CONSTRAINT txbox_inbox_pkey DO NOTHING
    RETURNING message_id
)
SELECT m.message_id, found.finished
  FROM unnest(:rows.message_id::text[], :rows.payload_hash::bytea[]) AS m(message_id, payload_hash)
  LEFT JOIN LATERAL (
       SELECT CASE WHEN own.status IN ('processed', 'dead', 'discarded')
                    AND coalesce(own.payload_hash = m.payload_hash, true) THEN 'finished' END AS finished
         FROM txbox_inbox AS own
        WHERE own.consumer = :consumer::text AND own.message_id = m.message_id
        LIMIT 1) AS found ON true
 WHERE m.message_id NOT IN (SELECT message_id FROM won)

-- name: claim_single
-- As claim for one message, 10 us cheaper: no CTE, no arrays, and RETURNING puts the wait back at once.
-- The settings are made while the row is computed, so before the insert can wait; a duplicate returns
-- nothing and runs no handler, so it needs nothing put back.
INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, sequence, processed_at, payload_hash)
VALUES (:consumer::text, :message_id::text,
        CASE WHEN set_config('txbox.token', :token::text, true)
                  || set_config('txbox.closed', '', true)
                  || set_config('txbox.lock_timeout', current_setting('lock_timeout'), true)
                  || set_config('lock_timeout', :lock_timeout_ms::text, true)
                  || set_config('idle_in_transaction_session_timeout', :idle_ms::text, true) IS NOT NULL
             THEN 'processed' END,
        :topic::text, :type::text, :key::text, :sequence::bigint, now(), :payload_hash::bytea)
ON CONFLICT ON CONSTRAINT txbox_inbox_pkey DO NOTHING
RETURNING message_id, set_config('lock_timeout', current_setting('txbox.lock_timeout'), true)

-- name: claim_kept
-- As claim, for consumers that keep the payload of processed messages.
WITH armed AS MATERIALIZED (
    SELECT set_config('txbox.token', :token::text, true) AS token,
           set_config('txbox.closed', '', true),
           set_config('txbox.lock_timeout', current_setting('lock_timeout'), true),
           set_config('lock_timeout', :lock_timeout_ms::text, true),
           set_config('idle_in_transaction_session_timeout', :idle_ms::text, true)
), won AS (
    INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, sequence, processed_at, payload_hash,
                             content_type, headers, origin, payload, has_payload, key_id)
    SELECT :consumer::text, m.message_id, 'processed', m.topic, m.type, m.key, m.sequence, now(), m.payload_hash,
           m.content_type, m.headers, m.origin, m.payload, true, :key_id::text
      FROM armed, unnest(:rows.message_id::text[], :rows.topic::text[], :rows.type::text[], :rows.key::text[],
                         :rows.sequence::bigint[], :rows.payload_hash::bytea[], :rows.content_type::text[],
                         :rows.headers::text[], :rows.origin::text[], :rows.payload::bytea[])
                  AS m(message_id, topic, type, key, sequence, payload_hash, content_type, headers, origin, payload)
    ON CONFLICT ON CONSTRAINT txbox_inbox_pkey DO NOTHING
    RETURNING message_id
)
SELECT m.message_id, found.finished
  FROM unnest(:rows.message_id::text[], :rows.payload_hash::bytea[]) AS m(message_id, payload_hash)
  LEFT JOIN LATERAL (
       SELECT CASE WHEN own.status IN ('processed', 'dead', 'discarded')
                    AND coalesce(own.payload_hash = m.payload_hash, true) THEN 'finished' END AS finished
         FROM txbox_inbox AS own
        WHERE own.consumer = :consumer::text AND own.message_id = m.message_id
        LIMIT 1) AS found ON true
 WHERE m.message_id NOT IN (SELECT message_id FROM won)

-- name: claim_leased
-- The fence: a worker whose lease was given to another matches no row. Arms the guard as claim does.
-- SELECT hides the array's length from the planner: while a few rows look cheaper than the ten of a
-- generic plan it would plan each time, for 50 us.
WITH armed AS MATERIALIZED (
    SELECT set_config('txbox.token', :token::text, true) AS token,
           set_config('txbox.closed', '', true),
           set_config('txbox.lock_timeout', current_setting('lock_timeout'), true),
           set_config('lock_timeout', :lock_timeout_ms::text, true),
           set_config('idle_in_transaction_session_timeout', :idle_ms::text, true)
)
UPDATE txbox_inbox AS own
   SET status = 'processed', processed_at = now(), updated_at = now(), starts = greatest(own.starts - 1, 0),
       lease_until = NULL, token = NULL, next_attempt_at = NULL,
       error_type = NULL, error = NULL, fingerprint = NULL,
       content_type = CASE WHEN :keep::boolean THEN own.content_type END,
       headers = CASE WHEN :keep::boolean THEN own.headers END,
       origin = CASE WHEN :keep::boolean THEN own.origin END,
       payload = CASE WHEN :keep::boolean THEN own.payload END,
       has_payload = :keep::boolean AND own.has_payload
  FROM armed
 WHERE own.consumer = :consumer::text AND own.message_id = ANY((SELECT :rows.message_id::text[])::text[])
   AND own.token = :lease::text AND own.status = 'processing'
RETURNING own.message_id

-- name: claim_replay
-- A generation of its own over a processed row: its failure rolls back to `processed` as it was.
WITH armed AS MATERIALIZED (
    SELECT set_config('txbox.token', :token::text, true) AS token,
           set_config('txbox.closed', '', true),
           set_config('txbox.lock_timeout', current_setting('lock_timeout'), true),
           set_config('lock_timeout', :lock_timeout_ms::text, true),
           set_config('idle_in_transaction_session_timeout', :idle_ms::text, true)
)
UPDATE txbox_inbox AS own SET status = 'processed', updated_at = now()
  FROM armed
 WHERE own.consumer = :consumer::text AND own.message_id = ANY(:rows.message_id::text[]) AND own.status = 'processed'
RETURNING own.message_id

-- name: bound_lock_timeout
-- For storing, and where accept was given a timeout: the caller's own setting is put back by
-- restore_lock_timeout. What is stored is acknowledged next, so its commit is made durable.
SELECT set_config('txbox.lock_timeout', current_setting('lock_timeout'), true),
       set_config('lock_timeout', :lock_timeout_ms::text, true),
       CASE WHEN current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
               THEN set_config('synchronous_commit', 'on', true) END

-- name: restore_lock_timeout
-- The wait was bounded for the claim only; the handler gets back what it had. A fence that matched
-- no row may have set nothing: then everything stays as it is.
SELECT set_config('lock_timeout', coalesce(nullif(current_setting('txbox.lock_timeout', true), ''),
                                           current_setting('lock_timeout')), true)

-- name: bound_batch
-- Instead of restore_lock_timeout for a claim of several: two batches that lock the same rows in different
-- orders give up long before deadlock_timeout, and go on message by message. A stricter bound stays.
-- And a mark: the server reports this setting by itself, so the end of this transaction inside a handler
-- is seen without asking. It means nothing to a transaction that has begun.
SELECT set_config('default_transaction_read_only', 'on', true),
       set_config('lock_timeout',
                  CASE WHEN old.wait::interval BETWEEN interval '1 us'
                                                   AND make_interval(secs => :longest_s::double precision)
                       THEN old.wait ELSE (:longest_s::double precision * 1000)::integer::text || 'ms' END, true)
  FROM (SELECT coalesce(nullif(current_setting('txbox.lock_timeout', true), ''),
                        current_setting('lock_timeout')) AS wait) AS old

-- name: arm
-- The claim has armed the guard.

-- name: savepoint_claim
-- Behind every claim, in its round trip where the driver can: a transaction that has failed answers only to
-- the names of its savepoints, and one that a handler has begun does not know this one.
SAVEPOINT txbox_claim

-- name: rollback_to_claim
-- Asks, also in a transaction that has failed, whether it is the one that claimed.
ROLLBACK TO SAVEPOINT txbox_claim

-- name: close
-- Refuses unless the armed token is still this one, then marks it closed; and whatever a handler has
-- set, no commit of a claim is less durable than `on`.
SELECT CASE WHEN :token::text <> '' AND current_setting('txbox.token', true) = :token::text
            THEN set_config('txbox.closed', :token::text, true)
            ELSE txbox_refuse() END,
       CASE WHEN current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
            THEN set_config('synchronous_commit', 'on', true) END

-- name: complete
-- The claim has written the row as processed.

-- name: duplicates
-- Of several ids the ones that are finished, as claim says it: for when most of them are, and a claim would lose.
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
-- What a claim did not name, read by a second statement: its snapshot sees who won.
-- LATERAL with LIMIT, so that each id is one look-up by the key whatever the planner believes of a
-- table without statistics; with `= ANY` it read every row of the consumer. SELECT as in claim_leased.
SELECT found.*
  FROM unnest((SELECT :rows.message_id::text[])) AS wanted(message_id)
 CROSS JOIN LATERAL (
       SELECT message_id, status, payload_hash, has_payload, attempts, starts,
              coalesce(next_attempt_at <= clock_timestamp(), true) AS due, token, lease_until IS NOT NULL AS leased
         FROM txbox_inbox
        WHERE consumer = :consumer::text AND message_id = wanted.message_id
        LIMIT 1) AS found

-- name: accept
-- Claims and closes at once, in the caller's transaction. A guard that is open (a handler of
-- txbox's is running around this call) stays as it is; that handler's own close decides.
WITH guard AS MATERIALIZED (
    SELECT CASE WHEN coalesce(current_setting('txbox.token', true), '') = ''
                  OR current_setting('txbox.token', true) = current_setting('txbox.closed', true)
                THEN set_config('txbox.closed', set_config('txbox.token', :token::text, true), true) END AS token,
           -- no duplicate may be acknowledged on the word of a row that is visible but not yet durable
           CASE WHEN current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
                THEN set_config('synchronous_commit', 'on', true) END
)
INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, sequence, processed_at, payload_hash)
SELECT :consumer::text, m.message_id, 'processed', m.topic, m.type, m.key, m.sequence, now(), m.payload_hash
  FROM guard, unnest(:rows.message_id::text[], :rows.topic::text[], :rows.type::text[], :rows.key::text[],
                     :rows.sequence::bigint[], :rows.payload_hash::bytea[])
              AS m(message_id, topic, type, key, sequence, payload_hash)
ON CONFLICT ON CONSTRAINT txbox_inbox_pkey DO NOTHING
RETURNING message_id

-- name: savepoint
SAVEPOINT txbox_accept

-- name: release_savepoint
RELEASE SAVEPOINT txbox_accept

-- name: rollback_to_savepoint
ROLLBACK TO SAVEPOINT txbox_accept

-- name: store
-- Payload and key in one row; whoever comes second changes nothing.
INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, sequence, payload_hash, next_attempt_at,
                         content_type, headers, origin, payload, has_payload, key_id)
SELECT :consumer::text, m.message_id, 'pending', m.topic, m.type, m.key, m.sequence, m.payload_hash,
       now() + make_interval(secs => :delay_s::double precision),
       m.content_type, m.headers, m.origin, m.payload, true, :key_id::text
  FROM unnest(:rows.message_id::text[], :rows.topic::text[], :rows.type::text[], :rows.key::text[],
              :rows.sequence::bigint[], :rows.payload_hash::bytea[], :rows.content_type::text[],
              :rows.headers::text[], :rows.origin::text[], :rows.payload::bytea[])
       AS m(message_id, topic, type, key, sequence, payload_hash, content_type, headers, origin, payload)
 WHERE :token::text IS NOT NULL
ON CONFLICT ON CONSTRAINT txbox_inbox_pkey DO NOTHING
RETURNING message_id

-- name: return_payload
-- A redelivery gives an unfinished row back the payload it lacks; from then on the table owns it.
UPDATE txbox_inbox
   SET content_type = :content_type::text, headers = :headers::text, origin = :origin::text,
       payload = :payload::bytea, has_payload = true, key_id = :key_id::text, payload_hash = :payload_hash::bytea,
       next_attempt_at = coalesce(next_attempt_at, clock_timestamp()), updated_at = clock_timestamp()
 WHERE consumer = :consumer::text AND message_id = :message_id::text
   AND status IN ('pending', 'failed') AND NOT has_payload
RETURNING CASE WHEN current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
               THEN set_config('synchronous_commit', 'on', true) END

-- name: quarantine
-- The same message again counts up.
INSERT INTO txbox_quarantine AS own (consumer, message_id, hash, reason, topic, type, key,
                                     content_type, headers, origin, payload, key_id, kept_bytes)
VALUES (:consumer::text, :message_id::text, :hash::bytea, :reason::text, :topic::text, :type::text, :key::text,
        :content_type::text, :headers::text, :origin::text, :payload::bytea, :key_id::text,
        coalesce(octet_length(:payload::bytea), 0))
ON CONFLICT ON CONSTRAINT txbox_quarantine_pkey DO UPDATE SET seen = own.seen + 1, updated_at = now()
RETURNING CASE WHEN current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
               THEN set_config('synchronous_commit', 'on', true) END

-- name: record_attempt
-- An acknowledgement follows: here, in quarantine and in return_payload the commit is made durable.
INSERT INTO txbox_attempt (consumer, message_id, attempt, status, error_type, error, fingerprint)
VALUES (:consumer::text, :message_id::text, :attempt::integer, :status::text,
        :error_type::text, :error::text, :fingerprint::text)
RETURNING CASE WHEN current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
               THEN set_config('synchronous_commit', 'on', true) END

-- name: keep_result
UPDATE txbox_inbox SET result = :result::bytea
 WHERE consumer = :consumer::text AND message_id = :message_id::text

-- name: result
SELECT result FROM txbox_inbox WHERE consumer = :consumer::text AND message_id = :message_id::text

-- ---- failures.py ----------------------------------------------------------------------------------------------------

-- name: record_update
-- A failure is written only over a failed row of the same payload, or over a row that is ours by its token.
UPDATE txbox_inbox
   SET status = CASE WHEN :final::boolean OR attempts + 1 >= :max_attempts::integer
                       OR received_at < clock_timestamp() - make_interval(secs => :max_age_s::double precision)
                     THEN 'dead' ELSE 'failed' END,
       attempts = attempts + 1,
       starts = CASE WHEN status = 'processing' THEN greatest(starts - 1, 0) ELSE starts END,
       next_attempt_at = clock_timestamp() + make_interval(secs => :delay_s::double precision),
       lease_until = NULL, token = NULL, updated_at = clock_timestamp(),
       error_type = :error_type::text, error = :error::text, fingerprint = :fingerprint::text,
       content_type = :content_type::text, headers = :headers::text, origin = :origin::text,
       payload = :payload::bytea, has_payload = :has_payload::boolean, key_id = :key_id::text
 WHERE consumer = :consumer::text AND message_id = :message_id::text
   AND ((status = 'failed' AND payload_hash IS NOT DISTINCT FROM :payload_hash::bytea)
        OR (status = 'processing' AND token = :token::text))

-- name: record_insert
-- Somebody else's row is left alone: nothing was written.
INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, sequence, payload_hash, attempts,
                         next_attempt_at, error_type, error, fingerprint,
                         content_type, headers, origin, payload, has_payload, key_id)
VALUES (:consumer::text, :message_id::text,
        CASE WHEN :final::boolean OR 1 >= :max_attempts::integer THEN 'dead' ELSE 'failed' END,
        :topic::text, :type::text, :key::text, :sequence::bigint, :payload_hash::bytea, 1,
        clock_timestamp() + make_interval(secs => :delay_s::double precision),
        :error_type::text, :error::text, :fingerprint::text,
        :content_type::text, :headers::text, :origin::text, :payload::bytea, :has_payload::boolean, :key_id::text)
ON CONFLICT ON CONSTRAINT txbox_inbox_pkey DO NOTHING

-- name: record_own
-- Over the row that this very transaction has claimed: of all rows under this key only that one can have its xmin.
UPDATE txbox_inbox
   SET status = CASE WHEN :final::boolean OR attempts + 1 >= :max_attempts::integer
                       OR received_at < clock_timestamp() - make_interval(secs => :max_age_s::double precision)
                     THEN 'dead' ELSE 'failed' END,
       attempts = attempts + 1, processed_at = NULL,
       next_attempt_at = clock_timestamp() + make_interval(secs => :delay_s::double precision),
       lease_until = NULL, token = NULL, updated_at = clock_timestamp(),
       error_type = :error_type::text, error = :error::text, fingerprint = :fingerprint::text,
       content_type = :content_type::text, headers = :headers::text, origin = :origin::text,
       payload = :payload::bytea, has_payload = :has_payload::boolean, key_id = :key_id::text
 WHERE consumer = :consumer::text AND message_id = :message_id::text AND status = 'processed'
   AND xmin = pg_current_xact_id()::xid AND :token::text = current_setting('txbox.token', true)
RETURNING status, attempts

-- ---- leases.py ------------------------------------------------------------------------------------------------------

-- name: store_leased
-- As store, for rows that are leased from the start: nobody else ever sees them waiting.
INSERT INTO txbox_inbox (consumer, message_id, status, token, lease_until, starts, topic, type, key, sequence,
                         payload_hash, next_attempt_at, content_type, headers, origin, payload, has_payload, key_id)
SELECT :consumer::text, m.message_id, 'processing', :token::text,
       clock_timestamp() + make_interval(secs => :lease_s::double precision), 1, m.topic, m.type, m.key, m.sequence,
       m.payload_hash, now(), m.content_type, m.headers, m.origin, m.payload, true, :key_id::text
  FROM unnest(:rows.message_id::text[], :rows.topic::text[], :rows.type::text[], :rows.key::text[],
              :rows.sequence::bigint[], :rows.payload_hash::bytea[], :rows.content_type::text[],
              :rows.headers::text[], :rows.origin::text[], :rows.payload::bytea[])
       AS m(message_id, topic, type, key, sequence, payload_hash, content_type, headers, origin, payload)
ON CONFLICT ON CONSTRAINT txbox_inbox_pkey DO NOTHING
RETURNING message_id, received_at, arrival

-- name: lease
-- Picks and takes in one statement, in the order of the index txbox_inbox_due, whose conditions it repeats:
-- what it costs does not depend on what waits behind.
-- statement_timestamp() and not clock_timestamp(), which is volatile and so no bound of an index scan. POSIX is C by
-- another name, and that of this index only: with old statistics others that begin with the consumer look as good.
-- Materialised, here and wherever a LIMIT picks rows: scanned again by a join, the SELECT steps over rows
-- that are taken, to others. The rows are locked, so that their ctid stays theirs, and with an array of
-- those no statistics, however old, lead to another plan; nor behind CASE. Each partition has ctids of its own.
WITH due AS MATERIALIZED (
       SELECT message_id, ctid AS place FROM txbox_inbox
        WHERE consumer = :consumer::text COLLATE "POSIX" AND status IN ('pending', 'failed')
          AND has_payload AND starts = 0 AND next_attempt_at <= statement_timestamp()
        ORDER BY next_attempt_at, arrival
        LIMIT :limit::integer
          FOR UPDATE SKIP LOCKED)
UPDATE txbox_inbox AS own
   SET status = 'processing', token = :token::text, starts = own.starts + 1, updated_at = clock_timestamp(),
       lease_until = clock_timestamp() + make_interval(secs => :lease_s::double precision)
 WHERE own.ctid = ANY(ARRAY(SELECT place FROM due))
   AND CASE WHEN own.consumer = :consumer::text THEN own.message_id = ANY(ARRAY(SELECT message_id FROM due)) END
RETURNING own.message_id, own.topic, own.type, own.key, own.sequence, own.received_at, own.payload_hash,
          own.attempts, own.starts, own.content_type, own.headers, own.origin, own.payload,
          own.has_payload, own.key_id, own.arrival

-- name: lease_suspect
-- A row whose last run never ended is taken alone, so that a message which kills its process takes no
-- neighbour with it. There are few, so one statement serves all consumers: those with an order take heads only.
WITH due AS MATERIALIZED (
       SELECT own.message_id, own.ctid AS place FROM txbox_inbox AS own
        WHERE consumer = :consumer::text COLLATE "POSIX" AND status IN ('pending', 'failed')
          AND has_payload AND starts > 0 AND next_attempt_at <= statement_timestamp()
          AND (NOT :heads_only::boolean OR own.key IS NULL
               OR own.arrival = (SELECT head.arrival FROM txbox_inbox AS head
                                  WHERE head.consumer = own.consumer AND head.key = own.key
                                    AND head.status <> 'processed' AND head.key IS NOT NULL
                                    AND (head.status IN ('pending', 'failed', 'processing')
                                         OR (:dead_blocks::boolean AND head.status = 'dead'))
                                  ORDER BY head.arrival
                                  LIMIT 1))
        ORDER BY starts, next_attempt_at, arrival
        LIMIT 1
          FOR UPDATE OF own SKIP LOCKED)
UPDATE txbox_inbox AS own
   SET status = 'processing', token = :token::text, starts = own.starts + 1, updated_at = clock_timestamp(),
       lease_until = clock_timestamp() + make_interval(secs => :lease_s::double precision)
 WHERE own.ctid = ANY(ARRAY(SELECT place FROM due))
   AND CASE WHEN own.consumer = :consumer::text THEN own.message_id = ANY(ARRAY(SELECT message_id FROM due)) END
RETURNING own.message_id, own.topic, own.type, own.key, own.sequence, own.received_at, own.payload_hash,
          own.attempts, own.starts, own.content_type, own.headers, own.origin, own.payload,
          own.has_payload, own.key_id, own.arrival

-- name: lease_ordered
-- As lease, of each key only the first row that is unfinished. Rows that wait for their head are due as well, and
-- may be all that there is in front: so the :window oldest rows are looked at one by one, and while those do
-- not suffice, and are not all, one head after another, from the key :after on: a probe of the index a key,
-- however many rows wait behind it. Rows without a key stand in no such index, so that is asked now and then.
-- CASE: with old statistics the planner would find each candidate by its state, among all that are due.
WITH RECURSIVE seen AS MATERIALIZED (
       SELECT message_id FROM txbox_inbox
        WHERE consumer = :consumer::text COLLATE "POSIX" AND status IN ('pending', 'failed')
          AND has_payload AND starts = 0 AND next_attempt_at <= statement_timestamp()
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
       SELECT (SELECT head.message_id FROM txbox_inbox AS head
                WHERE head.consumer = :consumer::text AND head.key = keys.key
                  AND head.status <> 'processed' AND head.key IS NOT NULL
                  AND (head.status IN ('pending', 'failed', 'processing')
                       OR (:dead_blocks::boolean AND head.status = 'dead'))
                ORDER BY head.arrival LIMIT 1)
         FROM keys
        UNION ALL
      (SELECT message_id FROM txbox_inbox
        WHERE :keyless::boolean AND (SELECT count(*) FROM seen) = :window::integer AND key IS NULL
          AND consumer = :consumer::text COLLATE "POSIX" AND status IN ('pending', 'failed')
          AND has_payload AND starts = 0 AND next_attempt_at <= statement_timestamp()
        ORDER BY next_attempt_at, arrival
        LIMIT :limit::integer)
), due AS MATERIALIZED (
       SELECT free.message_id, free.place
         FROM candidate
        CROSS JOIN LATERAL (
              SELECT own.message_id, own.ctid AS place FROM txbox_inbox AS own
               WHERE own.consumer = :consumer::text AND own.message_id = candidate.message_id
                 AND CASE WHEN own.status IN ('pending', 'failed') AND own.has_payload
                           AND own.starts = 0 AND own.next_attempt_at <= statement_timestamp()
                          THEN own.key IS NULL
                               OR own.arrival = (SELECT head.arrival FROM txbox_inbox AS head
                                                  WHERE head.consumer = own.consumer AND head.key = own.key
                                                    AND head.status <> 'processed' AND head.key IS NOT NULL
                                                    AND (head.status IN ('pending', 'failed', 'processing')
                                                         OR (:dead_blocks::boolean AND head.status = 'dead'))
                                                  ORDER BY head.arrival
                                                  LIMIT 1) END
                 FOR UPDATE OF own SKIP LOCKED) AS free
        LIMIT :limit::integer)
UPDATE txbox_inbox AS own
   SET status = 'processing', token = :token::text, starts = own.starts + 1, updated_at = clock_timestamp(),
       lease_until = clock_timestamp() + make_interval(secs => :lease_s::double precision)
 WHERE own.ctid = ANY(ARRAY(SELECT place FROM due))
   AND CASE WHEN own.consumer = :consumer::text THEN own.message_id = ANY(ARRAY(SELECT message_id FROM due)) END
RETURNING own.message_id, own.topic, own.type, own.key, own.sequence, own.received_at, own.payload_hash,
          own.attempts, own.starts, own.content_type, own.headers, own.origin, own.payload,
          own.has_payload, own.key_id, own.arrival

-- name: lease_next
-- As lease_ordered, the row of one key whose turn it is: whoever has run its predecessor asks for it, and
-- pays for no look at other keys.
WITH due AS MATERIALIZED (
       SELECT own.message_id, own.ctid AS place FROM txbox_inbox AS own
        WHERE own.consumer = :consumer::text
          AND own.message_id = (SELECT head.message_id FROM txbox_inbox AS head
                                 WHERE head.consumer = :consumer::text AND head.key = :key::text
                                   AND head.status <> 'processed' AND head.key IS NOT NULL
                                   AND (head.status IN ('pending', 'failed', 'processing')
                                        OR (:dead_blocks::boolean AND head.status = 'dead'))
                                 ORDER BY head.arrival
                                 LIMIT 1)
          AND CASE WHEN own.status IN ('pending', 'failed') AND own.has_payload
                   THEN own.starts = 0 AND own.next_attempt_at <= clock_timestamp() END
          FOR UPDATE OF own SKIP LOCKED)
UPDATE txbox_inbox AS own
   SET status = 'processing', token = :token::text, starts = own.starts + 1, updated_at = clock_timestamp(),
       lease_until = clock_timestamp() + make_interval(secs => :lease_s::double precision)
 WHERE own.ctid = ANY(ARRAY(SELECT place FROM due))
   AND CASE WHEN own.consumer = :consumer::text THEN own.message_id = ANY(ARRAY(SELECT message_id FROM due)) END
RETURNING own.message_id, own.topic, own.type, own.key, own.sequence, own.received_at, own.payload_hash,
          own.attempts, own.starts, own.content_type, own.headers, own.origin, own.payload,
          own.has_payload, own.key_id, own.arrival

-- name: lease_stored
-- store_leased has taken the rows.

-- name: lease_take
-- lease has taken the rows.

-- name: heartbeat
-- SKIP LOCKED: a row inside its handler's transaction needs no heartbeat and must not be waited for.
UPDATE txbox_inbox AS own
   SET lease_until = clock_timestamp() + make_interval(secs => :lease_s::double precision)
  FROM (SELECT consumer, message_id FROM txbox_inbox
         WHERE consumer = :consumer::text AND message_id = ANY(:rows.message_id::text[])
           AND token = :token::text AND status = 'processing'
           FOR UPDATE SKIP LOCKED) AS held
 WHERE own.consumer = held.consumer AND own.message_id = held.message_id

-- name: heartbeat_take
-- heartbeat has extended the leases.

-- name: release
-- Fenced: gives the start back, since the run ended by no fault of the message.
UPDATE txbox_inbox
   SET status = CASE WHEN attempts > 0 THEN 'failed' ELSE 'pending' END,
       starts = greatest(starts - 1, 0), lease_until = NULL, token = NULL, updated_at = clock_timestamp(),
       next_attempt_at = clock_timestamp() + make_interval(secs => :delay_s::double precision)
 WHERE consumer = :consumer::text AND message_id = ANY(:rows.message_id::text[])
   AND token = :token::text AND status = 'processing'

-- name: rescue
-- The start stays counted: its run never ended. SKIP LOCKED: a locked row is alive.
WITH expired AS MATERIALIZED (
       SELECT consumer, message_id FROM txbox_inbox
        WHERE status = 'processing' AND lease_until <= clock_timestamp()
          AND CASE WHEN :consumer::text IS NULL OR consumer = :consumer::text THEN true END
        ORDER BY lease_until
        LIMIT :limit::integer
          FOR UPDATE SKIP LOCKED)
UPDATE txbox_inbox AS own
   SET status = CASE WHEN own.starts >= :max_starts::integer THEN 'dead' ELSE 'failed' END,
       lease_until = NULL, token = NULL, updated_at = clock_timestamp(), next_attempt_at = clock_timestamp(),
       error_type = CASE WHEN own.starts >= :max_starts::integer THEN 'KilledItsProcess' ELSE 'LeaseExpired' END,
       error = CASE WHEN own.starts >= :max_starts::integer
                    THEN 'killed its process: ' || own.starts::text || ' runs never ended' ELSE 'lease expired' END,
       fingerprint = NULL
  FROM expired
 WHERE own.consumer = expired.consumer AND own.message_id = expired.message_id
RETURNING own.consumer, own.message_id, own.topic, own.starts, own.status, own.attempts, own.error_type, own.error

-- name: rescue_take
-- rescue has taken the rows.

-- name: rescue_broken
-- A processing row without a lease cannot be committed here: the guard refuses it.

-- ---- order.py -------------------------------------------------------------------------------------------------------

-- name: order_waiting
-- The keys of a claim that have earlier messages unfinished: what comes behind them waits in the table.
SELECT DISTINCT key FROM txbox_inbox
 WHERE consumer = :consumer::text AND key = ANY(:rows.key::text[]) AND status <> 'processed'
   AND (status IN ('pending', 'failed', 'processing') OR (:dead_blocks::boolean AND status = 'dead'))
   AND token IS DISTINCT FROM :token::text

-- name: sequence_state
-- The version processed last; whether an earlier one is on its way through the table; and whether this
-- one has waited long enough. Nothing is locked: a version whose predecessor has yet to commit is stored,
-- instead of waiting here for as long as another's handler runs.
SELECT (SELECT last FROM txbox_sequence
         WHERE consumer = :consumer::text AND key = :key::text),
       EXISTS (SELECT 1 FROM txbox_inbox
                WHERE consumer = :consumer::text AND key = :key::text AND status <> 'processed'
                  AND status IN ('pending', 'failed', 'processing') AND sequence < :sequence::bigint),
       EXISTS (SELECT 1 FROM txbox_inbox
                WHERE consumer = :consumer::text AND message_id = :message_id::text
                  AND received_at < clock_timestamp() - make_interval(secs => :wait_s::double precision))

-- name: sequence_done
-- Never back: a version that comes late leaves the higher one.
INSERT INTO txbox_sequence (consumer, key, last) VALUES (:consumer::text, :key::text, :sequence::bigint)
ON CONFLICT ON CONSTRAINT txbox_sequence_pkey
DO UPDATE SET last = greatest(txbox_sequence.last, excluded.last), updated_at = clock_timestamp()

-- name: sequence_next
-- The version behind the one that is done need not wait for its next look.
UPDATE txbox_inbox SET next_attempt_at = clock_timestamp()
 WHERE consumer = :consumer::text AND key = :key::text AND status <> 'processed' AND status = 'pending'
   AND sequence = :sequence::bigint + 1

-- ---- jobs.py --------------------------------------------------------------------------------------------------------

-- name: job_create
INSERT INTO txbox_job (name) VALUES (:name::text) ON CONFLICT (name) DO NOTHING

-- name: job_acquire
-- One holder at a time, by the clock of the database; a holder renews with the same token.
UPDATE txbox_job
   SET token = :token::text, updated_at = clock_timestamp(),
       lease_until = clock_timestamp() + make_interval(secs => :lease_s::double precision)
 WHERE name = :name::text AND (lease_until IS NULL OR lease_until <= clock_timestamp() OR token = :token::text)

-- name: job_release
UPDATE txbox_job SET token = NULL, lease_until = NULL, updated_at = clock_timestamp()
 WHERE name = :name::text AND token = :token::text

-- name: job_state
SELECT state FROM txbox_job WHERE name = :name::text

-- name: job_save
-- Fenced by the lease: a reader that lost it cannot move the progress back.
UPDATE txbox_job SET state = :state::text, updated_at = clock_timestamp()
 WHERE name = :name::text AND token = :token::text

-- name: anchor_history
-- Another text when commits may be missing: another server, one started again, a restored database or table.
-- With synchronous_commit=off, what is anchored must be durable all the same, and with it all that was committed
-- before.
SELECT concat_ws('/', extract(epoch FROM pg_postmaster_start_time())::text, own.oid::text,
                 'txbox_job'::regclass::oid::text),
       CASE WHEN current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
            THEN set_config('synchronous_commit', 'on', true) END
  FROM pg_database own
 WHERE own.datname = current_database()

-- name: anchor_read
SELECT name, state::bigint FROM txbox_job WHERE name = ANY(:rows.name::text[])

-- name: anchor_advance
-- Never back, whoever writes; always in one order, so that two writers do not deadlock.
INSERT INTO txbox_job AS own (name, state)
SELECT moved.name, moved.position::text
  FROM unnest(:rows.name::text[], :rows.position::bigint[]) AS moved(name, position)
 ORDER BY moved.name
ON CONFLICT (name) DO UPDATE
   SET state = greatest(own.state::bigint, excluded.state::bigint)::text, updated_at = clock_timestamp()

-- name: prune
-- Here rows are walked through in the order they lie in: prune_blocks.

-- name: prune_blocks
-- A batch is what is old in a range of blocks. An index over every processed row would cost each claim, and
-- the BRIN index says less and less of blocks that are used again; a scan that starts at the first block
-- each time reads all that was deleted before. now(), not clock_timestamp(): read once, not for each row.
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
DELETE FROM txbox_inbox AS own
 USING old
 WHERE own.consumer = old.consumer AND own.message_id = old.message_id
RETURNING own.consumer, own.message_id

-- name: prune_begin
-- A batch that a crash undoes is done again: nobody waits for its flush, and no live commit for the disk it takes.
SELECT set_config('synchronous_commit', 'off', true)

-- name: prune_take
-- prune has deleted the rows.

-- name: prune_attempts
DELETE FROM txbox_attempt AS gone
 USING unnest(:rows.consumer::text[], :rows.message_id::text[]) AS m(consumer, message_id)
 WHERE gone.consumer = m.consumer AND gone.message_id = m.message_id

-- name: prunable
SELECT count(*) FROM txbox_inbox
 WHERE status IN ('processed', 'discarded')
   AND processed_at < now() - make_interval(secs => :older_than_s::double precision)
   AND (:consumer::text IS NULL OR consumer = :consumer::text)

-- name: prune_orphans
-- The attempts of messages that went with their partition.
DELETE FROM txbox_attempt AS own
 WHERE own.number IN (SELECT gone.number FROM txbox_attempt AS gone
                       WHERE gone.recorded_at < now() - make_interval(secs => :older_than_s::double precision)
                         AND NOT EXISTS (SELECT 1 FROM txbox_inbox AS kept
                                          WHERE kept.consumer = gone.consumer AND kept.message_id = gone.message_id)
                       LIMIT :limit::integer)

-- name: prune_outbox
WITH old AS MATERIALIZED (
       SELECT id FROM txbox_outbox
        WHERE status <> 'pending'
          AND ((status = 'sent' AND sent_at < clock_timestamp() - make_interval(secs => :sent_s::double precision))
               OR (status = 'discarded'
                   AND available_at < clock_timestamp() - make_interval(secs => :discarded_s::double precision)))
        LIMIT :limit::integer
          FOR UPDATE SKIP LOCKED)
DELETE FROM txbox_outbox AS own
 USING old
 WHERE own.id = old.id

-- name: prune_quarantine
-- Only what was accepted or discarded; what waits for a decision is never deleted.
WITH old AS MATERIALIZED (
       SELECT consumer, message_id, hash FROM txbox_quarantine
        WHERE status <> 'quarantined'
          AND updated_at < clock_timestamp() - make_interval(secs => :older_than_s::double precision)
        LIMIT :limit::integer
          FOR UPDATE SKIP LOCKED)
DELETE FROM txbox_quarantine AS own
 USING old
 WHERE own.consumer = old.consumer AND own.message_id = old.message_id AND own.hash = old.hash

-- name: prunable_quarantine
SELECT count(*) FROM txbox_quarantine
 WHERE status <> 'quarantined'
   AND updated_at < clock_timestamp() - make_interval(secs => :older_than_s::double precision)

-- name: quarantine_bytes
SELECT coalesce(sum(kept_bytes), 0)::bigint FROM txbox_quarantine WHERE kept_bytes > 0

-- name: quarantine_oldest
SELECT consumer, message_id, hash, kept_bytes FROM txbox_quarantine
 WHERE kept_bytes > 0
 ORDER BY received_at
 LIMIT :limit::integer
   FOR UPDATE SKIP LOCKED

-- name: drop_quarantined
UPDATE txbox_quarantine AS own SET payload = NULL, kept_bytes = 0
  FROM unnest(:rows.consumer::text[], :rows.message_id::text[], :rows.hash::bytea[]) AS m(consumer, message_id, hash)
 WHERE own.consumer = m.consumer AND own.message_id = m.message_id AND own.hash = m.hash

-- name: prunable_outbox
SELECT count(*) FROM txbox_outbox
 WHERE status <> 'pending'
   AND ((status = 'sent' AND sent_at < clock_timestamp() - make_interval(secs => :sent_s::double precision))
        OR (status = 'discarded'
            AND available_at < clock_timestamp() - make_interval(secs => :discarded_s::double precision)))

-- name: second_of_day
SELECT mod(extract(epoch FROM clock_timestamp())::numeric, 86400)::double precision

-- name: drop_payloads
-- For consumers that keep the payload of processed messages for a time only; the key and the hash stay.
WITH old AS MATERIALIZED (
       SELECT consumer, message_id FROM txbox_inbox
        WHERE consumer = :consumer::text AND status = 'processed' AND has_payload
          AND processed_at < clock_timestamp() - make_interval(secs => :older_than_s::double precision)
        LIMIT :limit::integer
          FOR UPDATE SKIP LOCKED)
UPDATE txbox_inbox AS own
   SET payload = NULL, headers = NULL, origin = NULL, content_type = NULL, has_payload = false
  FROM old
 WHERE own.consumer = old.consumer AND own.message_id = old.message_id

-- name: due
-- One look for a whole worker: in how many seconds each consumer's next row is due, and under the empty name
-- the outbox's; only what is due within `ahead_s`. Rows beside the route :local may be for its App: see
-- relay_strays. An index probe for each, however much is behind it.
SELECT soon.consumer, extract(epoch FROM soon.at - clock_timestamp())::double precision
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
        SELECT '', clock_timestamp()
         WHERE EXISTS (SELECT 1 FROM txbox_outbox
                       WHERE status = 'pending' AND route >= 'local' AND route < :local::text)
            OR EXISTS (SELECT 1 FROM txbox_outbox
                        WHERE status = 'pending' AND route > :local::text AND route < 'local;')) AS soon
 WHERE soon.at <= clock_timestamp() + make_interval(secs => :ahead_s::double precision)

-- name: work_left
-- What keeps `run --once` alive: due rows, rows that somebody has leased, and versions whose turn it is: they
-- look again within two seconds.
SELECT CASE WHEN EXISTS (SELECT 1 FROM txbox_inbox
                          WHERE consumer = :consumer::text COLLATE "POSIX" AND status IN ('pending', 'failed')
                            AND has_payload AND starts = 0 AND next_attempt_at <= statement_timestamp())
              OR EXISTS (SELECT 1 FROM txbox_inbox
                          WHERE consumer = :consumer::text COLLATE "POSIX" AND status IN ('pending', 'failed')
                            AND has_payload AND starts > 0 AND next_attempt_at <= statement_timestamp())
              OR EXISTS (SELECT 1 FROM txbox_inbox
                          WHERE consumer = :consumer::text AND status = 'processing' AND lease_until IS NOT NULL)
              OR EXISTS (SELECT 1 FROM txbox_inbox AS own
                          WHERE own.consumer = :consumer::text AND own.status <> 'processed' AND own.status = 'pending'
                            AND own.next_attempt_at <= clock_timestamp() + interval '3 seconds'
                            AND EXISTS (SELECT 1 FROM txbox_sequence AS done
                                         WHERE done.consumer = own.consumer AND done.key = own.key
                                           AND own.sequence = done.last + 1))
            THEN 1 ELSE 0 END

-- name: work_left_ordered
-- As work_left: rows that wait for one which is dead, or not yet due, keep nothing alive.
SELECT CASE WHEN EXISTS (SELECT 1 FROM txbox_inbox AS own
                          WHERE own.consumer = :consumer::text AND own.status <> 'processed'
                            AND own.status IN ('pending', 'failed')
                            AND own.has_payload AND own.next_attempt_at <= clock_timestamp()
                            AND (own.key IS NULL
                                 OR own.arrival = (SELECT head.arrival FROM txbox_inbox AS head
                                                    WHERE head.consumer = own.consumer AND head.key = own.key
                                                      AND head.status <> 'processed' AND head.key IS NOT NULL
                                                      AND (head.status IN ('pending', 'failed', 'processing')
                                                           OR (:dead_blocks::boolean AND head.status = 'dead'))
                                                    ORDER BY head.arrival
                                                    LIMIT 1)))
              OR EXISTS (SELECT 1 FROM txbox_inbox
                          WHERE consumer = :consumer::text AND status <> 'processed'
                            AND status = 'processing' AND lease_until IS NOT NULL)
            THEN 1 ELSE 0 END

-- ---- partitions.py --------------------------------------------------------------------------------------------------

-- name: partitions
-- The tables that hold the rows: the inbox itself, or its partitions; where a partition by ranges begins and
-- ends, how many blocks each has, and what time it is.
SELECT own.oid::bigint, own.relname::text,
       substring(pg_get_expr(own.relpartbound, own.oid) FROM 'FROM \(''([^'']*)''\)'),
       substring(pg_get_expr(own.relpartbound, own.oid) FROM 'TO \(''([^'']*)''\)'),
       pg_relation_size(own.oid::regclass) / current_setting('block_size')::bigint,
       extract(epoch FROM clock_timestamp())::double precision
  FROM pg_class AS own
 WHERE (own.oid = 'txbox_inbox'::regclass::oid AND own.relkind = 'r')
    OR own.oid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = 'txbox_inbox'::regclass::oid)
 ORDER BY own.relname

-- name: partition_make
SELECT txbox_partition_make(to_timestamp(:first_s::double precision), to_timestamp(:last_s::double precision),
                            :most::integer)

-- name: partition_rows
SELECT count(*) FROM txbox_inbox
 WHERE message_id >= :first::text COLLATE "C" AND message_id < :last::text COLLATE "C"

-- name: partition_drop
SELECT txbox_partition_drop(:name::text, :older_than_s::double precision)

-- ---- schema.py ------------------------------------------------------------------------------------------------------

-- name: schema_version
SELECT version, compatible_from FROM txbox_schema ORDER BY version DESC LIMIT 1

-- name: schema_exists
SELECT count(*), (SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                   WHERE c.oid = to_regclass('txbox_schema')::oid) AS schema
  FROM pg_class WHERE oid = to_regclass('txbox_schema')::oid

-- name: schema_lock
-- Two `txbox init` at once: the second waits, then finds the work done. The number is txbox's own.
SELECT pg_advisory_xact_lock(8389754677)

-- name: schema_unlock
-- The lock ends with its transaction.

-- name: guard_check
-- The guard works only while its trigger fires, on every partition; DISABLE TRIGGER silences it, and before
-- version 3 so does a replication role.
SELECT NOT EXISTS (SELECT 1
                     FROM (SELECT 'txbox_inbox'::regclass::oid
                            UNION ALL
                           SELECT inhrelid FROM pg_inherits WHERE inhparent = 'txbox_inbox'::regclass::oid) AS own(relation)
                    WHERE NOT EXISTS (SELECT 1 FROM pg_trigger
                                       WHERE tgname = 'txbox_inbox_guard' AND tgrelid = own.relation
                                         AND (tgenabled = 'A'
                                              OR tgenabled = 'O' AND NOT EXISTS (SELECT 1 FROM txbox_schema
                                                                                  WHERE version >= 3)))) AS triggers,
       current_setting('session_replication_role') AS role

-- name: schema_creators
-- Who may create in the schema of the tables beside their owners and superusers. What they make there is found
-- before pg_catalog's own by every statement whose types it fits better.
SELECT CASE WHEN own.grantee = 0 THEN 'PUBLIC' ELSE role.rolname::text END
  FROM pg_class AS home
  JOIN pg_namespace AS n ON n.oid = home.relnamespace
 CROSS JOIN LATERAL aclexplode(n.nspacl) AS own
  LEFT JOIN pg_roles AS role ON role.oid = own.grantee
 WHERE home.oid = 'txbox_schema'::regclass::oid AND own.privilege_type = 'CREATE'
   AND own.grantee <> n.nspowner AND own.grantee <> home.relowner AND NOT coalesce(role.rolsuper, false)
 ORDER BY 1

-- ---- rows.py, audit.py ----------------------------------------------------------------------------------------------

-- name: status
SELECT consumer, status, count(*), min(received_at) FROM txbox_inbox GROUP BY consumer, status ORDER BY consumer, status

-- name: oldest_unfinished
SELECT consumer, extract(epoch FROM clock_timestamp() - min(received_at))::double precision
  FROM txbox_inbox WHERE status <> 'processed' AND status IN ('pending', 'processing', 'failed')
 GROUP BY consumer ORDER BY consumer

-- name: quarantine_status
SELECT consumer, count(*), min(received_at) FROM txbox_quarantine WHERE status = 'quarantined'
 GROUP BY consumer ORDER BY consumer

-- name: sizes
-- In bytes, with what belongs to a table but its indexes (TOAST, maps); of a partitioned one the sum.
SELECT own.relname::text, sum(pg_table_size(part.oid::regclass))::bigint, sum(pg_indexes_size(part.oid::regclass))::bigint, count(*)
  FROM pg_class AS home
  JOIN pg_class AS own ON own.relnamespace = home.relnamespace AND own.relkind IN ('r', 'p')
                      AND NOT own.relispartition AND own.relname LIKE 'txbox\_%'
 CROSS JOIN LATERAL (SELECT own.oid WHERE own.relkind = 'r'
                      UNION ALL
                     SELECT inhrelid FROM pg_inherits WHERE inhparent = own.oid AND own.relkind = 'p') AS part(oid)
 WHERE home.oid = 'txbox_schema'::regclass::oid
 GROUP BY own.relname ORDER BY own.relname

-- name: list
-- Keyset pages by arrival, newest first.
SELECT consumer, message_id, status, topic, type, key, attempts, starts, received_at, updated_at, processed_at,
       next_attempt_at, lease_until, error_type, error, fingerprint, has_payload, arrival
  FROM txbox_inbox
 WHERE (:consumer::text IS NULL OR consumer = :consumer::text)
   AND (:message_id::text IS NULL OR message_id = :message_id::text)
   AND (:status::text IS NULL OR status = :status::text)
   AND (:topic::text IS NULL OR topic = :topic::text)
   AND (:type::text IS NULL OR type = :type::text)
   AND (:key::text IS NULL OR key = :key::text)
   AND (:error_type::text IS NULL OR error_type = :error_type::text)
   AND (:fingerprint::text IS NULL OR fingerprint = :fingerprint::text)
   AND (:older_than_s::double precision IS NULL
        OR received_at < clock_timestamp() - make_interval(secs => :older_than_s::double precision))
   AND (:before::bigint IS NULL OR arrival < :before::bigint)
 ORDER BY arrival DESC
 LIMIT :limit::integer

-- name: list_quarantine
SELECT consumer, message_id, hash, reason, topic, type, key, seen, received_at, updated_at, status, kept_bytes
  FROM txbox_quarantine
 WHERE (:consumer::text IS NULL OR consumer = :consumer::text)
   AND (:message_id::text IS NULL OR message_id = :message_id::text)
   AND (:hash_prefix::text IS NULL OR left(encode(hash, 'hex'), length(:hash_prefix::text)) = :hash_prefix::text)
   AND (:status::text IS NULL OR status = :status::text)
   AND (:topic::text IS NULL OR topic = :topic::text)
   AND (:type::text IS NULL OR type = :type::text)
   AND (:older_than_s::double precision IS NULL
        OR received_at < clock_timestamp() - make_interval(secs => :older_than_s::double precision))
 ORDER BY received_at DESC
 LIMIT :limit::integer

-- name: show
SELECT consumer, message_id, status, topic, type, key, sequence, received_at, updated_at, processed_at, payload_hash,
       attempts, starts, next_attempt_at, lease_until, error_type, error, fingerprint, content_type, headers, origin,
       payload, has_payload, key_id, arrival, result
  FROM txbox_inbox WHERE consumer = :consumer::text AND message_id = :message_id::text

-- name: show_attempts
SELECT attempt, status, error_type, error, fingerprint, recorded_at
  FROM txbox_attempt WHERE consumer = :consumer::text AND message_id = :message_id::text ORDER BY number

-- name: show_quarantine
SELECT consumer, message_id, hash, reason, topic, type, key, content_type, headers, origin, payload, key_id, seen,
       received_at, updated_at, status, kept_bytes
  FROM txbox_quarantine
 WHERE (:consumer::text IS NULL OR consumer = :consumer::text)
   AND (:message_id::text IS NULL OR message_id = :message_id::text)
   AND (:hash_prefix::text IS NULL OR left(encode(hash, 'hex'), length(:hash_prefix::text)) = :hash_prefix::text)
 ORDER BY received_at
 LIMIT :limit::integer

-- name: select_quarantine
-- What an operator's command means, in the order in which it came.
SELECT consumer, message_id, hash FROM txbox_quarantine
 WHERE (:consumer::text IS NULL OR consumer = :consumer::text)
   AND (:message_id::text IS NULL OR message_id = :message_id::text)
   AND (:hash_prefix::text IS NULL OR left(encode(hash, 'hex'), length(:hash_prefix::text)) = :hash_prefix::text)
   AND (:status::text IS NULL OR status = :status::text)
   AND (:topic::text IS NULL OR topic = :topic::text)
   AND (:type::text IS NULL OR type = :type::text)
   AND (:older_than_s::double precision IS NULL
        OR received_at < clock_timestamp() - make_interval(secs => :older_than_s::double precision))
 ORDER BY received_at, hash
 LIMIT :limit::integer

-- name: take_quarantined
SELECT consumer, message_id, hash, reason, topic, type, key, content_type, headers, origin, payload, key_id, seen,
       received_at, updated_at, status, kept_bytes
  FROM txbox_quarantine
 WHERE consumer = :consumer::text AND message_id = :message_id::text AND hash = :hash::bytea AND status = 'quarantined'
   FOR UPDATE

-- name: end_quarantined
-- What was decided on is not needed any more: the row stays for its time, its content goes.
UPDATE txbox_quarantine AS own
   SET status = :status::text, payload = NULL, kept_bytes = 0, headers = NULL, updated_at = clock_timestamp()
  FROM unnest(:rows.consumer::text[], :rows.message_id::text[], :rows.hash::bytea[]) AS m(consumer, message_id, hash)
 WHERE own.consumer = m.consumer AND own.message_id = m.message_id AND own.hash = m.hash
   AND own.status = 'quarantined'

-- name: count_for_change
-- What select_for_change would find in all batches of each consumer, and how many of that are spared; nothing is locked.
SELECT consumer, count(*), count(*) FILTER (WHERE error_type = :spared::text) FROM txbox_inbox
 WHERE CASE WHEN :consumer::text IS NULL OR consumer = :consumer::text THEN true END
   AND (:message_id::text IS NULL
        OR message_id = :message_id::text AND consumer = coalesce(:consumer::text, consumer))
   AND status <> 'processed' AND status = :status::text
   AND (has_payload OR NOT :needs_payload::boolean)
   AND (:topic::text IS NULL OR topic = :topic::text)
   AND (:type::text IS NULL OR type = :type::text)
   AND (:key::text IS NULL OR key = :key::text)
   AND (:error_type::text IS NULL OR error_type = :error_type::text)
   AND (:fingerprint::text IS NULL OR fingerprint = :fingerprint::text)
   AND (:older_than_s::double precision IS NULL
        OR received_at < clock_timestamp() - make_interval(secs => :older_than_s::double precision))
 GROUP BY consumer ORDER BY consumer

-- name: select_for_change
-- The rows that an operator's command may touch now; SKIP LOCKED: what a live delivery holds is left to it.
-- Of one consumer in arrival order, as in an index, so that all batches together read each row once. POSIX as in lease.
SELECT consumer, message_id, status, arrival, error_type FROM txbox_inbox
 WHERE consumer = :consumer::text COLLATE "POSIX"
   AND (:message_id::text IS NULL OR message_id = :message_id::text AND consumer = :consumer::text)
   AND status <> 'processed' AND status = :status::text
   AND (has_payload OR NOT :needs_payload::boolean)
   AND (:topic::text IS NULL OR topic = :topic::text)
   AND (:type::text IS NULL OR type = :type::text)
   AND (:key::text IS NULL OR key = :key::text)
   AND (:error_type::text IS NULL OR error_type = :error_type::text)
   AND (:fingerprint::text IS NULL OR fingerprint = :fingerprint::text)
   AND (:older_than_s::double precision IS NULL
        OR received_at < clock_timestamp() - make_interval(secs => :older_than_s::double precision))
   AND arrival > :after::bigint
 ORDER BY arrival
 LIMIT :limit::integer
   FOR UPDATE SKIP LOCKED

-- name: retry
-- A full new budget: the history stays in txbox_attempt.
UPDATE txbox_inbox AS own
   SET status = 'failed', attempts = 0, starts = 0, next_attempt_at = clock_timestamp(), updated_at = clock_timestamp(),
       lease_until = NULL, token = NULL
  FROM unnest(:rows.consumer::text[], :rows.message_id::text[]) AS m(consumer, message_id)
 WHERE own.consumer = m.consumer AND own.message_id = m.message_id AND own.status IN ('dead', 'failed')

-- name: discard
UPDATE txbox_inbox AS own
   SET status = 'discarded', processed_at = clock_timestamp(), updated_at = clock_timestamp(), next_attempt_at = NULL,
       lease_until = NULL, token = NULL
  FROM unnest(:rows.consumer::text[], :rows.message_id::text[]) AS m(consumer, message_id)
 WHERE own.consumer = m.consumer AND own.message_id = m.message_id AND own.status IN ('dead', 'failed', 'pending')

-- name: replay_read
-- In arrival order, for a replay as another consumer or of a processed row.
SELECT message_id, topic, type, key, sequence, received_at, payload_hash, attempts, starts, content_type, headers,
       origin, payload, has_payload, key_id, arrival
  FROM txbox_inbox
 WHERE consumer = :consumer::text AND has_payload AND arrival > :after::bigint
   AND (:message_id::text IS NULL OR message_id = :message_id::text)
   AND (:status::text IS NULL OR status = :status::text)
   AND (:topic::text IS NULL OR topic = :topic::text)
   AND (:type::text IS NULL OR type = :type::text)
   AND (:key::text IS NULL OR key = :key::text)
 ORDER BY arrival
 LIMIT :limit::integer

-- name: audit
INSERT INTO txbox_audit (actor, action, filter, affected, reason)
VALUES (:actor::text, :action::text, :filter::text, :affected::bigint, :reason::text)

-- ---- waits.py -------------------------------------------------------------------------------------------------------

-- name: waits_order
-- Of rows that have not run: the first row of their key that is in their way.
SELECT own.message_id, head.message_id, head.status, head.next_attempt_at
  FROM (SELECT behind.message_id,
               (SELECT earlier.message_id FROM txbox_inbox AS earlier
                 WHERE earlier.consumer = behind.consumer AND earlier.key = behind.key
                   AND earlier.arrival < behind.arrival AND earlier.status <> 'processed'
                   AND (earlier.status IN ('pending', 'failed', 'processing')
                        OR (:dead_blocks::boolean AND earlier.status = 'dead'))
                 ORDER BY earlier.arrival LIMIT 1) AS head_id
          FROM txbox_inbox AS behind
         WHERE behind.consumer = :consumer::text AND behind.message_id = ANY(:rows.message_id::text[])
           AND behind.status IN ('pending', 'failed')) AS own
  JOIN txbox_inbox AS head ON head.consumer = :consumer::text AND head.message_id = own.head_id

-- name: waits_version
-- Of rows that have not run: their version, the one processed last, and the lowest that is in their way.
SELECT own.message_id, own.sequence, own.last, head.message_id, head.status, head.next_attempt_at, head.sequence
  FROM (SELECT behind.message_id, behind.sequence, done.last,
               (SELECT earlier.message_id FROM txbox_inbox AS earlier
                 WHERE earlier.consumer = behind.consumer AND earlier.key = behind.key
                   AND earlier.sequence < behind.sequence AND earlier.status <> 'processed'
                   AND (earlier.status IN ('pending', 'failed', 'processing')
                        OR (earlier.status = 'dead' AND earlier.sequence > coalesce(done.last, earlier.sequence - 1)))
                 ORDER BY earlier.sequence LIMIT 1) AS head_id
          FROM txbox_inbox AS behind
          LEFT JOIN txbox_sequence AS done ON done.consumer = behind.consumer AND done.key = behind.key
         WHERE behind.consumer = :consumer::text AND behind.message_id = ANY(:rows.message_id::text[])
           AND behind.status IN ('pending', 'failed') AND behind.sequence IS NOT NULL) AS own
  LEFT JOIN txbox_inbox AS head ON head.consumer = :consumer::text AND head.message_id = own.head_id

-- ---- outbox.py ------------------------------------------------------------------------------------------------------

-- name: stage
-- In the caller's transaction, many messages in one statement; `number` is the order of their inserts.
-- A re-run under the same cause stages the same ids, and changes nothing.
INSERT INTO txbox_outbox (id, topic, type, key, content_type, headers, payload, key_id, cause_consumer, cause_id,
                          available_at, route)
SELECT m.id, m.topic, m.type, m.key, m.content_type, m.headers, m.payload, :key_id::text, m.cause_consumer,
       m.cause_id, now() + make_interval(secs => m.delay_s), m.route
  FROM unnest(:rows.id::text[], :rows.topic::text[], :rows.type::text[], :rows.key::text[],
              :rows.content_type::text[], :rows.headers::text[], :rows.payload::bytea[],
              :rows.cause_consumer::text[], :rows.cause_id::text[], :rows.delay_s::double precision[],
              :rows.route::text[])
       WITH ORDINALITY AS m(id, topic, type, key, content_type, headers, payload, cause_consumer, cause_id, delay_s,
                            route, position)
 ORDER BY m.position
ON CONFLICT ON CONSTRAINT txbox_outbox_pkey DO NOTHING

-- name: stage_notify
-- As stage, and at its commit whoever listens looks at the outbox; one round trip.
WITH staged AS (
    INSERT INTO txbox_outbox (id, topic, type, key, content_type, headers, payload, key_id, cause_consumer, cause_id,
                              available_at, route)
    SELECT m.id, m.topic, m.type, m.key, m.content_type, m.headers, m.payload, :key_id::text, m.cause_consumer,
           m.cause_id, now() + make_interval(secs => m.delay_s), m.route
      FROM unnest(:rows.id::text[], :rows.topic::text[], :rows.type::text[], :rows.key::text[],
                  :rows.content_type::text[], :rows.headers::text[], :rows.payload::bytea[],
                  :rows.cause_consumer::text[], :rows.cause_id::text[], :rows.delay_s::double precision[],
                  :rows.route::text[])
           WITH ORDINALITY AS m(id, topic, type, key, content_type, headers, payload, cause_consumer, cause_id, delay_s,
                                route, position)
     ORDER BY m.position
    ON CONFLICT ON CONSTRAINT txbox_outbox_pkey DO NOTHING)
SELECT pg_notify('txbox_outbox', '')

-- name: stage_lock
-- Until the caller's transaction ends nobody else stages in order under these keys: numbers are then
-- committed in their order. Sorted by the caller.
SELECT pg_advisory_xact_lock(own.lock) FROM unnest(:rows.lock::bigint[]) AS own(lock)

-- name: relay_page
-- What may be due of one route, and of what was staged without one, oldest first, from where the last look
-- ended; nothing is locked. Two scans, each in the order of the index: with `route IN (…)` all that is due
-- would be sorted. now() and not clock_timestamp(): a bound of the index scan, which else reads every delayed row.
SELECT id, number, topic, key, available_at, payload_bytes, type
  FROM ((SELECT id, number, topic, key, available_at, coalesce(octet_length(payload), 0) AS payload_bytes, type
           FROM txbox_outbox
          WHERE status = 'pending' AND route = :route::text AND available_at <= now()
            AND (available_at, number) > (coalesce(:after_at::timestamptz, '-infinity'), :after_number::bigint)
            AND (:whole::boolean OR (topic = ANY(:rows.topic::text[])) = :named::boolean)
          ORDER BY available_at, number
          LIMIT :limit::integer)
        UNION ALL
        (SELECT id, number, topic, key, available_at, coalesce(octet_length(payload), 0), type
           FROM txbox_outbox
          WHERE status = 'pending' AND route = '' AND available_at <= now()
            AND (available_at, number) > (coalesce(:after_at::timestamptz, '-infinity'), :after_number::bigint)
            AND (topic = ANY(:rows.topic::text[])) = :named::boolean
          ORDER BY available_at, number
          LIMIT :limit::integer)) AS due
 ORDER BY available_at, number
 LIMIT :limit::integer

-- name: relay_heads
-- Of each key, by type, the first row that others must not overtake, and how many there are up to :last. A row that
-- was staged with a delay counts once that is over; any other counts even if this transaction's clock,
-- which stood still at its start, says that its time is yet to come.
SELECT topic, key, type, min(number), count(*)
  FROM txbox_outbox
 WHERE status = 'pending' AND key IS NOT NULL AND number <= :last::bigint
   AND (route, topic, key) IN (SELECT m.route, m.topic, m.key
                                 FROM unnest(:rows.route::text[], :rows.topic::text[], :rows.key::text[])
                                      AS m(route, topic, key))
   AND (token IS NOT NULL OR attempts > 0 OR available_at = staged_at OR available_at <= now())
 GROUP BY topic, key, type

-- name: relay_lease
-- The commit that takes a row is durable, and so is, before it, the commit that staged it: nothing is
-- published that a crash of the server could still undo.
UPDATE txbox_outbox AS own
   SET token = :token::text, available_at = clock_timestamp() + make_interval(secs => :lease_s::double precision)
  FROM (SELECT id FROM txbox_outbox
         WHERE id = ANY(:rows.id::text[]) AND status = 'pending' AND available_at <= now()
           FOR UPDATE SKIP LOCKED) AS due
 WHERE own.id = due.id
RETURNING own.id, own.number, own.topic, own.type, own.key, own.content_type, own.headers, own.payload, own.key_id,
          own.staged_at, own.attempts,
          CASE WHEN current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
               THEN set_config('synchronous_commit', 'on', true) END

-- name: relay_take
-- relay_lease has taken the rows.

-- name: relay_release
-- Fenced: rows that were not sent, by no fault of theirs; they keep their place before later ones.
UPDATE txbox_outbox
   SET token = NULL, available_at = staged_at
 WHERE id = ANY(:rows.id::text[]) AND token = :token::text AND status = 'pending'

-- name: relay_sent
DELETE FROM txbox_outbox WHERE id = ANY(:rows.id::text[]) AND token = :token::text AND status = 'pending'

-- name: relay_kept
-- As relay_sent, for rows that are kept for a time.
UPDATE txbox_outbox SET status = 'sent', token = NULL, sent_at = clock_timestamp(), error_type = NULL, error = NULL
 WHERE id = ANY(:rows.id::text[]) AND token = :token::text AND status = 'pending'

-- name: relay_failed
UPDATE txbox_outbox
   SET status = :status::text, attempts = attempts + 1, token = NULL,
       error_type = :error_type::text, error = :error::text,
       available_at = clock_timestamp() + make_interval(secs => :delay_s::double precision)
 WHERE id = :id::text AND token = :token::text AND status = 'pending'

-- name: relay_left
-- What is due or leased of one route, and of what was staged without one.
SELECT DISTINCT topic, type FROM txbox_outbox
 WHERE status = 'pending' AND (token IS NOT NULL OR available_at <= now())
   AND route IN (:route::text, '')
   AND ((:whole::boolean AND route = :route::text) OR (topic = ANY(:rows.topic::text[])) = :named::boolean)

-- name: relay_strays
-- What goes to consumers of the database itself and is not on this App's own route; and what has no route at all.
SELECT DISTINCT route, topic, type, cause_consumer FROM txbox_outbox
 WHERE status = 'pending' AND (route = '' OR (route >= 'local' AND route < 'local;')) AND route <> :route::text

-- name: relay_adopt
UPDATE txbox_outbox SET route = :route::text
 WHERE id IN (SELECT id FROM txbox_outbox
               WHERE status = 'pending' AND token IS NULL AND route = :from_route::text AND topic = :topic::text
                 AND type IS NOT DISTINCT FROM :type::text
                 AND cause_consumer IS NOT DISTINCT FROM :cause_consumer::text
               LIMIT :limit::integer
                 FOR UPDATE SKIP LOCKED)

-- ---- outbox_rows.py -------------------------------------------------------------------------------------------------

-- name: outbox_status
-- Overdue: due for a minute, and never tried.
SELECT own.topic, own.route, own.state, count(*),
       extract(epoch FROM clock_timestamp() - min(own.staged_at))::double precision,
       count(*) FILTER (WHERE own.overdue)
  FROM (SELECT topic, route, staged_at,
               status = 'pending' AND token IS NULL AND attempts = 0
               AND available_at < now() - interval '1 minute' AS overdue,
               CASE WHEN status <> 'pending' THEN status WHEN available_at <= now() THEN 'due'
                    WHEN token IS NOT NULL THEN 'leased' WHEN attempts > 0 THEN 'failed' ELSE 'delayed' END AS state
          FROM txbox_outbox) AS own
 GROUP BY own.topic, own.route, own.state ORDER BY own.topic, own.route, own.state

-- name: outbox_list
-- Keyset pages by number, newest first; each row with the one of its key that must leave before it, if any.
SELECT own.id, own.number, own.state, own.topic, own.type, own.key, own.attempts, own.staged_at, own.available_at,
       own.sent_at, own.cause_consumer, own.cause_id, own.error_type, own.error, own.key_id,
       own.route,
       CASE WHEN own.key IS NOT NULL AND own.status = 'pending' THEN
           (SELECT head.id FROM txbox_outbox AS head
             WHERE head.status = 'pending' AND head.route IN (own.route, '')
               AND head.topic = own.topic AND head.key = own.key
               AND head.number < own.number
               AND (head.token IS NOT NULL OR head.attempts > 0 OR head.available_at = head.staged_at
                    OR head.available_at <= now())
             ORDER BY head.number LIMIT 1) END
  FROM (SELECT id, number, status, topic, type, key, attempts, staged_at, available_at, sent_at, cause_consumer,
               cause_id, error_type, error, key_id, route,
               CASE WHEN status <> 'pending' THEN status WHEN available_at <= now() THEN 'due'
                    WHEN token IS NOT NULL THEN 'leased' WHEN attempts > 0 THEN 'failed' ELSE 'delayed' END AS state
          FROM txbox_outbox
         WHERE (:id::text IS NULL OR id = :id::text)
           AND (:stored::text IS NULL OR status = :stored::text)
           AND (:state::text IS NULL
                OR CASE WHEN status <> 'pending' THEN status WHEN available_at <= now() THEN 'due'
                        WHEN token IS NOT NULL THEN 'leased' WHEN attempts > 0 THEN 'failed' ELSE 'delayed' END
                   = :state::text)
           AND (:topic::text IS NULL OR topic = :topic::text)
           AND (:route::text IS NULL OR route = :route::text)
           AND (:type::text IS NULL OR type = :type::text)
           AND (:key::text IS NULL OR key = :key::text)
           AND (:error_type::text IS NULL OR error_type = :error_type::text)
           AND (:older_than_s::double precision IS NULL
                OR staged_at < clock_timestamp() - make_interval(secs => :older_than_s::double precision))
           AND (:before::bigint IS NULL OR number < :before::bigint)
         ORDER BY number DESC
         LIMIT :limit::integer) AS own
 ORDER BY own.number DESC

-- name: outbox_content
SELECT content_type, headers, payload, key_id FROM txbox_outbox WHERE id = :id::text

-- name: outbox_select
-- The rows that an operator's command may touch now; SKIP LOCKED: what a relay is marking is left to it.
SELECT id, number FROM txbox_outbox
 WHERE (:id::text IS NULL OR id = :id::text)
   AND status IN ('pending', 'dead')
   AND CASE WHEN status <> 'pending' THEN status WHEN available_at <= now() THEN 'due'
            WHEN token IS NOT NULL THEN 'leased' WHEN attempts > 0 THEN 'failed' ELSE 'delayed' END
       = ANY(:rows.state::text[])
   AND (:topic::text IS NULL OR topic = :topic::text)
   AND (:route::text IS NULL OR route = :route::text)
   AND (:type::text IS NULL OR type = :type::text)
   AND (:key::text IS NULL OR key = :key::text)
   AND (:error_type::text IS NULL OR error_type = :error_type::text)
   AND (:older_than_s::double precision IS NULL
        OR staged_at < clock_timestamp() - make_interval(secs => :older_than_s::double precision))
   AND number > :after::bigint
 ORDER BY number
 LIMIT :limit::integer
   FOR UPDATE SKIP LOCKED

-- name: outbox_retry
-- A full new budget; available_at as staged, so that it is before the later rows of its key again.
UPDATE txbox_outbox SET status = 'pending', attempts = 0, token = NULL, available_at = staged_at
 WHERE id = ANY(:rows.id::text[]) AND status IN ('pending', 'dead')

-- name: outbox_discard
-- Of a row that is no longer pending, available_at says when it was given up.
UPDATE txbox_outbox SET status = 'discarded', token = NULL, available_at = clock_timestamp()
 WHERE id = ANY(:rows.id::text[]) AND status IN ('pending', 'dead')

-- name: outbox_reroute
-- A new budget, as the attempts were those of the old route; what was tried is due at once.
UPDATE txbox_outbox SET status = 'pending', route = :to::text, attempts = 0, token = NULL,
       available_at = CASE WHEN attempts > 0 THEN staged_at ELSE available_at END
 WHERE id = ANY(:rows.id::text[]) AND status IN ('pending', 'dead')
