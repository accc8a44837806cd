-- The statements of txbox for SQLite 3.35 and later: the twins of postgresql.sql, name by name.
-- `:name` is a parameter; a region in braces repeats for each row, `:rows.name` is its column.
-- A query without a body has nothing to do on this database: one writer at a time needs no
-- SKIP LOCKED, no lock timeout but the connection's, and its statements name the rows they touch.
-- Times are UTC text of one width, so that they compare as text.
-- `status <> 'processed'` stands beside narrower conditions: SQLite uses the partial index over open rows
-- only where a query states the index's own condition.
-- A section has the queries of the modules that it names.

-- ---- claims.py ------------------------------------------------------------------------------------------------------

-- name: claim
INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, sequence, processed_at, payload_hash)
VALUES {(:consumer, :rows.message_id, 'processed', :rows.topic, :rows.type, :rows.key, :rows.sequence,
         strftime('%Y-%m-%d %H:%M:%f', 'now'), :rows.payload_hash)}
ON CONFLICT (consumer, message_id) DO NOTHING
RETURNING message_id

-- name: claim_single
-- One message is claimed as many are.

-- name: claim_kept
-- As claim, for consumers that keep the payload of processed messages.
INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, sequence, processed_at, payload_hash,
                         content_type, headers, origin, payload, has_payload, key_id)
VALUES {(:consumer, :rows.message_id, 'processed', :rows.topic, :rows.type, :rows.key, :rows.sequence,
         strftime('%Y-%m-%d %H:%M:%f', 'now'), :rows.payload_hash,
         :rows.content_type, :rows.headers, :rows.origin, :rows.payload, true, :key_id)}
ON CONFLICT (consumer, message_id) DO NOTHING
RETURNING message_id

-- name: claim_leased
-- The fence: a worker whose lease was given to another matches no row.
UPDATE txbox_inbox
   SET status = 'processed', processed_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
       updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
       starts = max(starts - 1, 0), lease_until = NULL, token = NULL, next_attempt_at = NULL,
       error_type = NULL, error = NULL, fingerprint = NULL,
       content_type = CASE WHEN :keep THEN content_type END,
       headers = CASE WHEN :keep THEN headers END,
       origin = CASE WHEN :keep THEN origin END,
       payload = CASE WHEN :keep THEN payload END,
       has_payload = :keep AND has_payload
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})
   AND token = :lease AND status = 'processing'
RETURNING message_id

-- name: claim_replay
-- A generation of its own over a processed row: its failure rolls back to `processed` as it was.
UPDATE txbox_inbox SET status = 'processed', updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now')
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id}) AND status = 'processed'
RETURNING message_id

-- name: bound_lock_timeout
-- The wait is the connection's busy_timeout.

-- name: restore_lock_timeout
-- The wait is the connection's busy_timeout, at BEGIN.

-- name: bound_batch
-- One writer waits for no row.

-- name: arm
-- From here on no COMMIT succeeds: the row refers to one that never exists.
INSERT INTO txbox_guard (number, token, never) VALUES (1, :token, 1)
ON CONFLICT (number) DO UPDATE SET token = excluded.token, never = 1

-- name: savepoint_claim
-- A statement that fails leaves the transaction as it was: close can be asked.

-- name: rollback_to_claim

-- name: close
-- Fails (SQLITE_MISMATCH: text is no row number) unless this is the transaction that armed the
-- guard; else gives the row a reference that may be committed.
INSERT INTO txbox_guard (number, token, never)
SELECT CASE WHEN EXISTS (SELECT 1 FROM txbox_guard WHERE token = :token AND never = 1) THEN 1
            ELSE 'the handler left the transaction that claimed its message' END, :token, NULL
 WHERE true
ON CONFLICT (number) DO UPDATE SET never = NULL
RETURNING token

-- name: complete
-- The claim has written the row as processed.

-- name: duplicates
-- classify reads them with the others.

-- ---- inbox.py -------------------------------------------------------------------------------------------------------

-- name: classify
SELECT message_id, status, payload_hash, has_payload, attempts, starts,
       coalesce(next_attempt_at <= strftime('%Y-%m-%d %H:%M:%f', 'now'), true) AS due, token,
       lease_until IS NOT NULL AS leased
  FROM txbox_inbox
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})

-- name: accept
-- An open guard (a handler of txbox's is running around this call) stays as it is.
INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, sequence, processed_at, payload_hash)
VALUES {(:consumer, :rows.message_id, 'processed', :rows.topic, :rows.type, :rows.key, :rows.sequence,
         strftime('%Y-%m-%d %H:%M:%f', 'now'), :rows.payload_hash)}
ON CONFLICT (consumer, message_id) DO NOTHING
RETURNING message_id

-- name: savepoint
-- A statement that fails leaves the transaction as it was.

-- name: release_savepoint

-- name: rollback_to_savepoint

-- name: store
-- Payload and key in one row; whoever comes second changes nothing.
INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, sequence, payload_hash, next_attempt_at,
                         content_type, headers, origin, payload, has_payload, key_id)
VALUES {(:consumer, :rows.message_id, 'pending', :rows.topic, :rows.type, :rows.key, :rows.sequence,
         :rows.payload_hash, strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', :delay_s)),
         :rows.content_type, :rows.headers, :rows.origin, :rows.payload, true, :key_id)}
ON CONFLICT (consumer, message_id) DO NOTHING
RETURNING message_id

-- name: return_payload
-- A redelivery gives an unfinished row back the payload it lacks; from then on the table owns it.
UPDATE txbox_inbox
   SET content_type = :content_type, headers = :headers, origin = :origin,
       payload = :payload, has_payload = true, key_id = :key_id, payload_hash = :payload_hash,
       next_attempt_at = coalesce(next_attempt_at, strftime('%Y-%m-%d %H:%M:%f', 'now')),
       updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now')
 WHERE consumer = :consumer AND message_id = :message_id
   AND status IN ('pending', 'failed') AND NOT has_payload

-- name: quarantine
-- The same message again counts up.
INSERT INTO txbox_quarantine (consumer, message_id, hash, reason, topic, type, key,
                              content_type, headers, origin, payload, key_id, kept_bytes)
VALUES (:consumer, :message_id, :hash, :reason, :topic, :type, :key,
        :content_type, :headers, :origin, :payload, :key_id, coalesce(length(:payload), 0))
ON CONFLICT (consumer, message_id, hash)
DO UPDATE SET seen = seen + 1, updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now')

-- name: record_attempt
INSERT INTO txbox_attempt (consumer, message_id, attempt, status, error_type, error, fingerprint)
VALUES (:consumer, :message_id, :attempt, :status, :error_type, :error, :fingerprint)

-- name: keep_result
UPDATE txbox_inbox SET result = :result
 WHERE consumer = :consumer AND message_id = :message_id

-- name: result
SELECT result FROM txbox_inbox WHERE consumer = :consumer AND message_id = :message_id

-- ---- failures.py ----------------------------------------------------------------------------------------------------

-- name: record_update
-- A failure is written only over a failed row of the same payload, or over a row that is ours by its token.
UPDATE txbox_inbox
   SET status = CASE WHEN :final OR attempts + 1 >= :max_attempts
                       OR received_at < strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', -:max_age_s))
                     THEN 'dead' ELSE 'failed' END,
       attempts = attempts + 1,
       starts = CASE WHEN status = 'processing' THEN max(starts - 1, 0) ELSE starts END,
       next_attempt_at = strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', :delay_s)),
       lease_until = NULL, token = NULL, updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
       error_type = :error_type, error = :error, fingerprint = :fingerprint,
       content_type = :content_type, headers = :headers, origin = :origin,
       payload = :payload, has_payload = :has_payload, key_id = :key_id
 WHERE consumer = :consumer AND message_id = :message_id
   AND ((status = 'failed' AND payload_hash IS :payload_hash) OR (status = 'processing' AND token = :token))

-- name: record_insert
-- Somebody else's row is left alone: nothing was written.
INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, sequence, payload_hash, attempts,
                         next_attempt_at, error_type, error, fingerprint,
                         content_type, headers, origin, payload, has_payload, key_id)
VALUES (:consumer, :message_id, CASE WHEN :final OR 1 >= :max_attempts THEN 'dead' ELSE 'failed' END,
        :topic, :type, :key, :sequence, :payload_hash, 1,
        strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', :delay_s)),
        :error_type, :error, :fingerprint,
        :content_type, :headers, :origin, :payload, :has_payload, :key_id)
ON CONFLICT (consumer, message_id) DO NOTHING

-- name: record_own
-- Over the row that this very transaction has claimed: the guard is still its own.
UPDATE txbox_inbox
   SET status = CASE WHEN :final OR attempts + 1 >= :max_attempts
                       OR received_at < strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', -:max_age_s))
                     THEN 'dead' ELSE 'failed' END,
       attempts = attempts + 1, processed_at = NULL,
       next_attempt_at = strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', :delay_s)),
       lease_until = NULL, token = NULL, updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
       error_type = :error_type, error = :error, fingerprint = :fingerprint,
       content_type = :content_type, headers = :headers, origin = :origin,
       payload = :payload, has_payload = :has_payload, key_id = :key_id
 WHERE consumer = :consumer AND message_id = :message_id AND status = 'processed'
   AND EXISTS (SELECT 1 FROM txbox_guard WHERE token = :token AND never = 1)
RETURNING status, attempts

-- ---- leases.py ------------------------------------------------------------------------------------------------------

-- name: store_leased
-- As store, for rows that are leased from the start: nobody else ever sees them waiting.
INSERT INTO txbox_inbox (consumer, message_id, status, token, lease_until, starts, topic, type, key, sequence,
                         payload_hash, next_attempt_at, content_type, headers, origin, payload, has_payload, key_id)
VALUES {(:consumer, :rows.message_id, 'processing', :token,
         strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', :lease_s)), 1, :rows.topic, :rows.type, :rows.key,
         :rows.sequence, :rows.payload_hash, strftime('%Y-%m-%d %H:%M:%f', 'now'), :rows.content_type, :rows.headers,
         :rows.origin, :rows.payload, true, :key_id)}
ON CONFLICT (consumer, message_id) DO NOTHING
RETURNING message_id, received_at, arrival

-- name: lease
-- In the order of the index txbox_inbox_due, whose conditions it repeats: what it costs does not depend on
-- what waits behind.
UPDATE txbox_inbox
   SET status = 'processing', token = :token, starts = starts + 1, updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
       lease_until = strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', :lease_s))
 WHERE arrival IN (SELECT due.arrival FROM txbox_inbox AS due
                    WHERE due.consumer = :consumer AND due.status IN ('pending', 'failed') AND due.has_payload
                      AND due.starts = 0 AND due.next_attempt_at <= strftime('%Y-%m-%d %H:%M:%f', 'now')
                    ORDER BY due.next_attempt_at, due.arrival
                    LIMIT :limit)
RETURNING message_id, topic, type, key, sequence, received_at, payload_hash, attempts, starts,
          content_type, headers, origin, payload, has_payload, key_id, arrival

-- name: lease_suspect
-- A row whose last run never ended is taken alone, so that a message which kills its process takes no
-- neighbour with it. There are few, so one statement serves all consumers: those with an order take heads only.
UPDATE txbox_inbox
   SET status = 'processing', token = :token, starts = starts + 1, updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
       lease_until = strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', :lease_s))
 WHERE arrival IN (SELECT due.arrival FROM txbox_inbox AS due
                    WHERE due.consumer = :consumer AND due.status IN ('pending', 'failed') AND due.has_payload
                      AND due.starts > 0 AND due.next_attempt_at <= strftime('%Y-%m-%d %H:%M:%f', 'now')
                      AND (NOT :heads_only OR due.key IS NULL
                           OR due.arrival = (SELECT head.arrival FROM txbox_inbox AS head
                                            WHERE head.consumer = :consumer AND head.key = due.key
                                              AND head.status <> 'processed' AND head.key IS NOT NULL
                                              AND (head.status IN ('pending', 'failed', 'processing')
                                                   OR (:dead_blocks AND head.status = 'dead'))
                                            ORDER BY head.arrival
                                            LIMIT 1))
                    ORDER BY due.starts, due.next_attempt_at, due.arrival
                    LIMIT 1)
RETURNING message_id, topic, type, key, sequence, received_at, payload_hash, attempts, starts,
          content_type, headers, origin, payload, has_payload, key_id, arrival

-- name: lease_ordered
-- As lease, of each key only the first row that is unfinished. Rows that wait for their head are due as well, and
-- may be all that there is in front: so the :window oldest rows are looked at one by one, and while those do
-- not suffice, and are not all, one head after another, from the key :after on: a probe of the index a key,
-- however many rows wait behind it. Rows without a key stand in no such index, so that is asked now and then.
UPDATE txbox_inbox
   SET status = 'processing', token = :token, starts = starts + 1, updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
       lease_until = strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', :lease_s))
 WHERE arrival IN (
       WITH RECURSIVE seen(arrival, key) AS MATERIALIZED (
              SELECT arrival, key FROM txbox_inbox
               WHERE consumer = :consumer AND status IN ('pending', 'failed') AND has_payload
                 AND starts = 0 AND next_attempt_at <= strftime('%Y-%m-%d %H:%M:%f', 'now')
               ORDER BY next_attempt_at, arrival
               LIMIT :window
       ), keys(key) AS (
              SELECT :after WHERE (SELECT count(*) FROM seen) = :window
               UNION ALL
              SELECT (SELECT next.key FROM txbox_inbox AS next
                       WHERE next.consumer = :consumer AND next.key > keys.key
                         AND next.status <> 'processed' AND next.key IS NOT NULL
                       ORDER BY next.key LIMIT 1)
                FROM keys WHERE keys.key IS NOT NULL
       ), unkeyed(arrival) AS (
              SELECT arrival FROM txbox_inbox
               WHERE :keyless AND (SELECT count(*) FROM seen) = :window AND key IS NULL
                 AND consumer = :consumer AND status IN ('pending', 'failed') AND has_payload
                 AND starts = 0 AND next_attempt_at <= strftime('%Y-%m-%d %H:%M:%f', 'now')
               ORDER BY next_attempt_at, arrival
               LIMIT :limit
       ), candidate(arrival) AS (
              SELECT seen.arrival FROM seen
               WHERE seen.key IS NULL
                  OR seen.arrival = (SELECT head.arrival FROM txbox_inbox AS head
                                            WHERE head.consumer = :consumer AND head.key = seen.key
                                              AND head.status <> 'processed' AND head.key IS NOT NULL
                                              AND (head.status IN ('pending', 'failed', 'processing')
                                                   OR (:dead_blocks AND head.status = 'dead'))
                                            ORDER BY head.arrival
                                            LIMIT 1)
               UNION ALL
              SELECT (SELECT CASE WHEN head.status IN ('pending', 'failed') AND head.has_payload AND head.starts = 0
                                   AND head.next_attempt_at <= strftime('%Y-%m-%d %H:%M:%f', 'now') THEN head.arrival END
                        FROM txbox_inbox AS head
                       WHERE head.consumer = :consumer AND head.key = keys.key
                         AND head.status <> 'processed' AND head.key IS NOT NULL
                         AND (head.status IN ('pending', 'failed', 'processing')
                              OR (:dead_blocks AND head.status = 'dead'))
                       ORDER BY head.arrival
                       LIMIT 1) FROM keys
               UNION ALL
              SELECT arrival FROM unkeyed
       )
       SELECT arrival FROM candidate WHERE arrival IS NOT NULL LIMIT :limit)
RETURNING message_id, topic, type, key, sequence, received_at, payload_hash, attempts, starts,
          content_type, headers, origin, payload, has_payload, key_id, arrival

-- name: lease_next
-- As lease_ordered, the row of one key whose turn it is: whoever has run its predecessor asks for it, and
-- pays for no look at other keys.
UPDATE txbox_inbox
   SET status = 'processing', token = :token, starts = starts + 1, updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
       lease_until = strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', :lease_s))
 WHERE arrival = (SELECT head.arrival FROM txbox_inbox AS head
                   WHERE head.consumer = :consumer AND head.key = :key AND head.status <> 'processed'
                     AND head.key IS NOT NULL
                     AND (head.status IN ('pending', 'failed', 'processing') OR (:dead_blocks AND head.status = 'dead'))
                   ORDER BY head.arrival
                   LIMIT 1)
   AND status IN ('pending', 'failed') AND has_payload AND starts = 0
   AND next_attempt_at <= strftime('%Y-%m-%d %H:%M:%f', 'now')
RETURNING message_id, topic, type, key, sequence, received_at, payload_hash, attempts, starts,
          content_type, headers, origin, payload, has_payload, key_id, arrival

-- name: lease_stored
-- store_leased has taken the rows.

-- name: lease_take
-- lease has taken the rows.

-- name: heartbeat
UPDATE txbox_inbox
   SET lease_until = strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', :lease_s))
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})
   AND token = :token AND status = 'processing'

-- name: heartbeat_take
-- heartbeat has extended the leases.

-- name: release
-- Fenced: gives the start back, since the run ended by no fault of the message.
UPDATE txbox_inbox
   SET status = CASE WHEN attempts > 0 THEN 'failed' ELSE 'pending' END,
       starts = max(starts - 1, 0), lease_until = NULL, token = NULL, updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
       next_attempt_at = strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', :delay_s))
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})
   AND token = :token AND status = 'processing'

-- name: rescue
-- The start stays counted: its run never ended.
UPDATE txbox_inbox
   SET status = CASE WHEN starts >= :max_starts THEN 'dead' ELSE 'failed' END,
       lease_until = NULL, token = NULL,
       updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now'), next_attempt_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
       error_type = CASE WHEN starts >= :max_starts THEN 'KilledItsProcess' ELSE 'LeaseExpired' END,
       error = CASE WHEN starts >= :max_starts
                    THEN 'killed its process: ' || starts || ' runs never ended' ELSE 'lease expired' END,
       fingerprint = NULL
 WHERE arrival IN (SELECT expired.arrival FROM txbox_inbox AS expired
                    WHERE expired.status <> 'processed'
                      AND expired.status = 'processing' AND expired.lease_until <= strftime('%Y-%m-%d %H:%M:%f', 'now')
                      AND (:consumer IS NULL OR expired.consumer = :consumer)
                    ORDER BY expired.lease_until
                    LIMIT :limit)
RETURNING consumer, message_id, topic, starts, status, attempts, error_type, error

-- name: rescue_take
-- rescue has taken the rows.

-- name: rescue_broken
-- A processing row without a lease cannot be committed here: the claim writes `processed`.

-- ---- order.py -------------------------------------------------------------------------------------------------------

-- name: order_waiting
-- The keys of a claim that have earlier messages unfinished: what comes behind them waits in the table.
SELECT DISTINCT key FROM txbox_inbox
 WHERE consumer = :consumer AND key IN ({:rows.key}) AND status <> 'processed'
   AND (status IN ('pending', 'failed', 'processing') OR (:dead_blocks AND status = 'dead'))
   AND token IS NOT :token

-- name: sequence_state
-- The version processed last; whether an earlier one is on its way through the table; and whether this
-- one has waited long enough.
SELECT (SELECT last FROM txbox_sequence WHERE consumer = :consumer AND key = :key),
       EXISTS (SELECT 1 FROM txbox_inbox
                WHERE consumer = :consumer AND key = :key AND status <> 'processed'
                  AND status IN ('pending', 'failed', 'processing') AND sequence < :sequence),
       EXISTS (SELECT 1 FROM txbox_inbox
                WHERE consumer = :consumer AND message_id = :message_id
                  AND received_at < strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', -:wait_s)))

-- name: sequence_done
-- Never back: a version that comes late leaves the higher one.
INSERT INTO txbox_sequence (consumer, key, last) VALUES (:consumer, :key, :sequence)
ON CONFLICT (consumer, key)
DO UPDATE SET last = max(txbox_sequence.last, excluded.last), updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now')

-- name: sequence_next
-- The version behind the one that is done need not wait for its next look.
UPDATE txbox_inbox SET next_attempt_at = strftime('%Y-%m-%d %H:%M:%f', 'now')
 WHERE consumer = :consumer AND key = :key AND status <> 'processed' AND status = 'pending'
   AND sequence = :sequence + 1

-- ---- jobs.py --------------------------------------------------------------------------------------------------------

-- name: job_create
INSERT INTO txbox_job (name) VALUES (:name) ON CONFLICT (name) DO NOTHING

-- name: job_acquire
-- One holder at a time, by the clock of the database; a holder renews with the same token.
UPDATE txbox_job
   SET token = :token, updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
       lease_until = strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', :lease_s))
 WHERE name = :name AND (lease_until IS NULL OR lease_until <= strftime('%Y-%m-%d %H:%M:%f', 'now') OR token = :token)

-- name: job_release
UPDATE txbox_job SET token = NULL, lease_until = NULL, updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now')
 WHERE name = :name AND token = :token

-- name: job_state
SELECT state FROM txbox_job WHERE name = :name

-- name: job_save
-- Fenced by the lease: a reader that lost it cannot move the progress back.
UPDATE txbox_job SET state = :state, updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now')
 WHERE name = :name AND token = :token

-- name: anchor_history
-- A file has no server that could be another one.
SELECT ''

-- name: anchor_read
SELECT name, CAST(state AS INTEGER) FROM txbox_job WHERE name IN ({:rows.name})

-- name: anchor_advance
-- Never back, whoever writes.
INSERT INTO txbox_job (name, state) VALUES {(:rows.name, CAST(:rows.position AS TEXT))}
ON CONFLICT (name) DO UPDATE
   SET state = CAST(max(CAST(txbox_job.state AS INTEGER), CAST(excluded.state AS INTEGER)) AS TEXT),
       updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now')

-- name: prune
-- In arrival order, which is about the order of completion.
DELETE FROM txbox_inbox
 WHERE arrival IN (SELECT old.arrival FROM txbox_inbox AS old
                    WHERE old.status IN ('processed', 'discarded')
                      AND old.processed_at
                          < strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', -:older_than_s))
                      AND (:consumer IS NULL OR old.consumer = :consumer)
                    ORDER BY old.arrival
                    LIMIT :limit)
RETURNING consumer, message_id

-- name: prune_blocks
-- prune finds the rows in the order that is best here.

-- name: prune_begin
-- Durability is not a transaction's choice here.

-- name: prune_take
-- prune has deleted the rows.

-- name: prune_attempts
DELETE FROM txbox_attempt
 WHERE number IN (SELECT own.number FROM (VALUES {(:rows.consumer, :rows.message_id)}) AS m
                   JOIN txbox_attempt AS own ON own.consumer = m.column1 AND own.message_id = m.column2)

-- name: prunable
SELECT count(*) FROM txbox_inbox
 WHERE status IN ('processed', 'discarded')
   AND processed_at < strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', -:older_than_s))
   AND (:consumer IS NULL OR consumer = :consumer)

-- name: prune_orphans
-- There are no partitions here.

-- name: prune_outbox
DELETE FROM txbox_outbox
 WHERE number IN (SELECT old.number FROM txbox_outbox AS old
                   WHERE old.status <> 'pending'
                     AND ((old.status = 'sent'
                           AND old.sent_at < strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', -:sent_s)))
                          OR (old.status = 'discarded'
                              AND old.available_at < strftime('%Y-%m-%d %H:%M:%f', 'now',
                                                              printf('%+.3f seconds', -:discarded_s))))
                   LIMIT :limit)

-- name: prune_quarantine
-- Only what was accepted or discarded; what waits for a decision is never deleted.
DELETE FROM txbox_quarantine
 WHERE rowid IN (SELECT gone.rowid FROM txbox_quarantine AS gone
                  WHERE gone.status <> 'quarantined'
                    AND gone.updated_at < strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', -:older_than_s))
                  LIMIT :limit)

-- name: prunable_quarantine
SELECT count(*) FROM txbox_quarantine
 WHERE status <> 'quarantined' AND updated_at < strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', -:older_than_s))

-- name: quarantine_bytes
SELECT coalesce(sum(kept_bytes), 0) FROM txbox_quarantine WHERE kept_bytes > 0

-- name: quarantine_oldest
SELECT consumer, message_id, hash, kept_bytes FROM txbox_quarantine
 WHERE kept_bytes > 0
 ORDER BY received_at
 LIMIT :limit

-- name: drop_quarantined
UPDATE txbox_quarantine SET payload = NULL, kept_bytes = 0
 WHERE rowid IN (SELECT own.rowid FROM (VALUES {(:rows.consumer, :rows.message_id, :rows.hash)}) AS m
                  JOIN txbox_quarantine AS own
                    ON own.consumer = m.column1 AND own.message_id = m.column2 AND own.hash = m.column3)

-- name: prunable_outbox
SELECT count(*) FROM txbox_outbox
 WHERE status <> 'pending'
   AND ((status = 'sent' AND sent_at < strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', -:sent_s)))
        OR (status = 'discarded'
            AND available_at < strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', -:discarded_s))))

-- name: second_of_day
SELECT strftime('%s', 'now') - strftime('%s', 'now', 'start of day')

-- name: drop_payloads
-- For consumers that keep the payload of processed messages for a time only; the key and the hash stay.
UPDATE txbox_inbox
   SET payload = NULL, headers = NULL, origin = NULL, content_type = NULL, has_payload = 0
 WHERE arrival IN (SELECT old.arrival FROM txbox_inbox AS old
                    WHERE old.consumer = :consumer AND old.status = 'processed' AND old.has_payload
                      AND old.processed_at
                          < strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', -:older_than_s))
                    LIMIT :limit)

-- name: due
-- One look for a whole worker: in how many seconds each consumer's next row is due, and under the empty name
-- the outbox's; only what is due within `ahead_s`. Rows beside the route :local may be for its App: see
-- relay_strays. An index probe for each, however much is behind it.
SELECT soon.consumer, (julianday(soon.at) - julianday('now')) * 86400.0
  FROM (SELECT asked.column1 AS consumer,
               min(coalesce((SELECT next_attempt_at FROM txbox_inbox
                              WHERE consumer = asked.column1 AND status IN ('pending', 'failed') AND has_payload
                                AND starts = 0
                              ORDER BY next_attempt_at LIMIT 1), '9999-12-31'),
                   coalesce((SELECT min(next_attempt_at) FROM txbox_inbox
                              WHERE consumer = asked.column1 AND status IN ('pending', 'failed') AND has_payload
                                AND starts > 0), '9999-12-31')) AS at
          FROM (VALUES {(:rows.consumer)}) AS asked
         UNION ALL
        SELECT '', min((SELECT available_at FROM txbox_outbox WHERE status = 'pending' AND route = asked.column1
                         ORDER BY available_at LIMIT 1))
          FROM (VALUES {(:rows.route)}) AS asked
         UNION ALL
        SELECT '', strftime('%Y-%m-%d %H:%M:%f', 'now')
         WHERE EXISTS (SELECT 1 FROM txbox_outbox
                       WHERE status = 'pending' AND route >= 'local' AND route < :local)
            OR EXISTS (SELECT 1 FROM txbox_outbox
                        WHERE status = 'pending' AND route > :local AND route < 'local;')) AS soon
 WHERE soon.at <= strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', :ahead_s))

-- name: work_left
-- What keeps `run --once` alive: due rows, rows that somebody has leased, and versions whose turn it is: they
-- look again within two seconds.
SELECT CASE WHEN EXISTS (SELECT 1 FROM txbox_inbox
                          WHERE consumer = :consumer AND status IN ('pending', 'failed') AND has_payload
                            AND starts = 0 AND next_attempt_at <= strftime('%Y-%m-%d %H:%M:%f', 'now'))
              OR EXISTS (SELECT 1 FROM txbox_inbox
                          WHERE consumer = :consumer AND status IN ('pending', 'failed') AND has_payload
                            AND starts > 0 AND next_attempt_at <= strftime('%Y-%m-%d %H:%M:%f', 'now'))
              OR EXISTS (SELECT 1 FROM txbox_inbox
                          WHERE consumer = :consumer AND status <> 'processed'
                            AND status = 'processing' AND lease_until IS NOT NULL)
              OR EXISTS (SELECT 1 FROM txbox_inbox AS own
                          WHERE own.consumer = :consumer AND own.status <> 'processed' AND own.status = 'pending'
                            AND own.next_attempt_at <= strftime('%Y-%m-%d %H:%M:%f', 'now', '+3 seconds')
                            AND EXISTS (SELECT 1 FROM txbox_sequence AS done
                                         WHERE done.consumer = own.consumer AND done.key = own.key
                                           AND own.sequence = done.last + 1))
            THEN 1 ELSE 0 END

-- name: work_left_ordered
-- As work_left: rows that wait for one which is dead, or not yet due, keep nothing alive.
SELECT CASE WHEN EXISTS (SELECT 1 FROM txbox_inbox AS own
                          WHERE own.consumer = :consumer AND own.status <> 'processed'
                            AND own.status IN ('pending', 'failed')
                            AND own.has_payload AND own.next_attempt_at <= strftime('%Y-%m-%d %H:%M:%f', 'now')
                            AND NOT EXISTS (SELECT 1 FROM txbox_inbox AS earlier
                                           WHERE earlier.consumer = own.consumer AND earlier.key = own.key
                                             AND earlier.arrival < own.arrival AND earlier.status <> 'processed'
                                             AND (earlier.status IN ('pending', 'failed', 'processing')
                                                  OR (:dead_blocks AND earlier.status = 'dead'))))
              OR EXISTS (SELECT 1 FROM txbox_inbox
                          WHERE consumer = :consumer AND status <> 'processed'
                            AND status = 'processing' AND lease_until IS NOT NULL)
            THEN 1 ELSE 0 END

-- ---- partitions.py --------------------------------------------------------------------------------------------------

-- name: partitions
-- There are no partitions here.

-- name: partition_make
-- There are no partitions here.

-- name: partition_rows
-- There are no partitions here.

-- name: partition_drop
-- There are no partitions here.

-- ---- schema.py ------------------------------------------------------------------------------------------------------

-- name: schema_version
SELECT version, compatible_from FROM txbox_schema ORDER BY version DESC LIMIT 1

-- name: schema_exists
SELECT count(*), NULL AS schema FROM sqlite_master WHERE type = 'table' AND name = 'txbox_schema'

-- name: schema_lock
-- BEGIN IMMEDIATE has the one write lock.

-- name: schema_unlock
-- The lock ends with its transaction.

-- name: guard_check
-- The guard works only while foreign keys are enforced on this connection.
SELECT (SELECT foreign_keys FROM pragma_foreign_keys)
       AND (SELECT count(*) FROM pragma_foreign_key_list('txbox_guard')) AS triggers,
       'origin' AS role

-- name: schema_creators
-- There are no roles.

-- ---- rows.py, audit.py ----------------------------------------------------------------------------------------------

-- name: status
SELECT consumer, status, count(*), min(received_at) FROM txbox_inbox GROUP BY consumer, status ORDER BY consumer, status

-- name: oldest_unfinished
SELECT consumer, (julianday('now') - julianday(min(received_at))) * 86400.0
  FROM txbox_inbox WHERE status <> 'processed' AND status IN ('pending', 'processing', 'failed')
 GROUP BY consumer ORDER BY consumer

-- name: quarantine_status
SELECT consumer, count(*), min(received_at) FROM txbox_quarantine WHERE status = 'quarantined'
 GROUP BY consumer ORDER BY consumer

-- name: sizes
-- Of one table only a look at every page could tell: it is the whole file that is known, indexes included.
SELECT 'database file', own.page_count * size.page_size, NULL, 1
  FROM pragma_page_count AS own, pragma_page_size AS size

-- name: list
-- Keyset pages by arrival, newest first.
SELECT consumer, message_id, status, topic, type, key, attempts, starts, received_at, updated_at, processed_at,
       next_attempt_at, lease_until, error_type, error, fingerprint, has_payload, arrival
  FROM txbox_inbox
 WHERE (:consumer IS NULL OR consumer = :consumer)
   AND (:message_id IS NULL OR message_id = :message_id)
   AND (:status IS NULL OR status = :status)
   AND (:topic IS NULL OR topic = :topic)
   AND (:type IS NULL OR type = :type)
   AND (:key IS NULL OR key = :key)
   AND (:error_type IS NULL OR error_type = :error_type)
   AND (:fingerprint IS NULL OR fingerprint = :fingerprint)
   AND (:older_than_s IS NULL
        OR received_at < strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', -:older_than_s)))
   AND (:before IS NULL OR arrival < :before)
 ORDER BY arrival DESC
 LIMIT :limit

-- name: list_quarantine
SELECT consumer, message_id, hash, reason, topic, type, key, seen, received_at, updated_at, status, kept_bytes
  FROM txbox_quarantine
 WHERE (:consumer IS NULL OR consumer = :consumer)
   AND (:message_id IS NULL OR message_id = :message_id)
   AND (:hash_prefix IS NULL OR substr(lower(hex(hash)), 1, length(:hash_prefix)) = :hash_prefix)
   AND (:status IS NULL OR status = :status)
   AND (:topic IS NULL OR topic = :topic)
   AND (:type IS NULL OR type = :type)
   AND (:older_than_s IS NULL
        OR received_at < strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', -:older_than_s)))
 ORDER BY received_at DESC
 LIMIT :limit

-- name: show
SELECT consumer, message_id, status, topic, type, key, sequence, received_at, updated_at, processed_at, payload_hash,
       attempts, starts, next_attempt_at, lease_until, error_type, error, fingerprint, content_type, headers, origin,
       payload, has_payload, key_id, arrival, result
  FROM txbox_inbox WHERE consumer = :consumer AND message_id = :message_id

-- name: show_attempts
SELECT attempt, status, error_type, error, fingerprint, recorded_at
  FROM txbox_attempt WHERE consumer = :consumer AND message_id = :message_id ORDER BY number

-- name: show_quarantine
SELECT consumer, message_id, hash, reason, topic, type, key, content_type, headers, origin, payload, key_id, seen,
       received_at, updated_at, status, kept_bytes
  FROM txbox_quarantine
 WHERE (:consumer IS NULL OR consumer = :consumer)
   AND (:message_id IS NULL OR message_id = :message_id)
   AND (:hash_prefix IS NULL OR substr(lower(hex(hash)), 1, length(:hash_prefix)) = :hash_prefix)
 ORDER BY received_at
 LIMIT :limit

-- name: select_quarantine
-- What an operator's command means, in the order in which it came.
SELECT consumer, message_id, hash FROM txbox_quarantine
 WHERE (:consumer IS NULL OR consumer = :consumer)
   AND (:message_id IS NULL OR message_id = :message_id)
   AND (:hash_prefix IS NULL OR substr(lower(hex(hash)), 1, length(:hash_prefix)) = :hash_prefix)
   AND (:status IS NULL OR status = :status)
   AND (:topic IS NULL OR topic = :topic)
   AND (:type IS NULL OR type = :type)
   AND (:older_than_s IS NULL
        OR received_at < strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', -:older_than_s)))
 ORDER BY received_at, hash
 LIMIT :limit

-- name: take_quarantined
SELECT consumer, message_id, hash, reason, topic, type, key, content_type, headers, origin, payload, key_id, seen,
       received_at, updated_at, status, kept_bytes
  FROM txbox_quarantine
 WHERE consumer = :consumer AND message_id = :message_id AND hash = :hash AND status = 'quarantined'

-- name: end_quarantined
-- What was decided on is not needed any more: the row stays for its time, its content goes.
UPDATE txbox_quarantine
   SET status = :status, payload = NULL, kept_bytes = 0, headers = NULL,
       updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now')
 WHERE rowid IN (SELECT own.rowid FROM (VALUES {(:rows.consumer, :rows.message_id, :rows.hash)}) AS m
                  JOIN txbox_quarantine AS own
                    ON own.consumer = m.column1 AND own.message_id = m.column2 AND own.hash = m.column3)
   AND status = 'quarantined'

-- name: count_for_change
-- What select_for_change would find in all batches of each consumer, and how many of that are spared; nothing is locked.
SELECT consumer, count(*), count(*) FILTER (WHERE error_type = :spared) FROM txbox_inbox
 WHERE (:consumer IS NULL OR consumer = :consumer)
   AND (:message_id IS NULL OR message_id = :message_id)
   AND status <> 'processed' AND status = :status
   AND (has_payload OR NOT :needs_payload)
   AND (:topic IS NULL OR topic = :topic)
   AND (:type IS NULL OR type = :type)
   AND (:key IS NULL OR key = :key)
   AND (:error_type IS NULL OR error_type = :error_type)
   AND (:fingerprint IS NULL OR fingerprint = :fingerprint)
   AND (:older_than_s IS NULL
        OR received_at < strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', -:older_than_s)))
 GROUP BY consumer ORDER BY consumer

-- name: select_for_change
-- The rows that an operator's command may touch now: BEGIN IMMEDIATE keeps every other writer out.
-- Of one consumer in arrival order, as in an index, so that all batches together read each row once.
SELECT consumer, message_id, status, arrival, error_type FROM txbox_inbox
 WHERE consumer = :consumer
   AND (:message_id IS NULL OR message_id = :message_id)
   AND status <> 'processed' AND status = :status
   AND (has_payload OR NOT :needs_payload)
   AND (:topic IS NULL OR topic = :topic)
   AND (:type IS NULL OR type = :type)
   AND (:key IS NULL OR key = :key)
   AND (:error_type IS NULL OR error_type = :error_type)
   AND (:fingerprint IS NULL OR fingerprint = :fingerprint)
   AND (:older_than_s IS NULL
        OR received_at < strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', -:older_than_s)))
   AND arrival > :after
 ORDER BY arrival
 LIMIT :limit

-- name: retry
-- A full new budget: the history stays in txbox_attempt.
UPDATE txbox_inbox
   SET status = 'failed', attempts = 0, starts = 0, next_attempt_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
       updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now'), lease_until = NULL, token = NULL
 WHERE arrival IN (SELECT own.arrival FROM (VALUES {(:rows.consumer, :rows.message_id)}) AS m
                    JOIN txbox_inbox AS own ON own.consumer = m.column1 AND own.message_id = m.column2)
   AND status IN ('dead', 'failed')

-- name: discard
UPDATE txbox_inbox
   SET status = 'discarded', processed_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
       updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
       next_attempt_at = NULL, lease_until = NULL, token = NULL
 WHERE arrival IN (SELECT own.arrival FROM (VALUES {(:rows.consumer, :rows.message_id)}) AS m
                    JOIN txbox_inbox AS own ON own.consumer = m.column1 AND own.message_id = m.column2)
   AND status IN ('dead', 'failed', 'pending')

-- name: replay_read
-- In arrival order, for a replay as another consumer or of a processed row.
SELECT message_id, topic, type, key, sequence, received_at, payload_hash, attempts, starts, content_type, headers,
       origin, payload, has_payload, key_id, arrival
  FROM txbox_inbox
 WHERE consumer = :consumer AND has_payload AND arrival > :after
   AND (:message_id IS NULL OR message_id = :message_id)
   AND (:status IS NULL OR status = :status)
   AND (:topic IS NULL OR topic = :topic)
   AND (:type IS NULL OR type = :type)
   AND (:key IS NULL OR key = :key)
 ORDER BY arrival
 LIMIT :limit

-- name: audit
INSERT INTO txbox_audit (actor, action, filter, affected, reason)
VALUES (:actor, :action, :filter, :affected, :reason)

-- ---- waits.py -------------------------------------------------------------------------------------------------------

-- name: waits_order
-- Of rows that have not run: the first row of their key that is in their way.
SELECT own.message_id, head.message_id, head.status, head.next_attempt_at
  FROM (SELECT behind.message_id,
               (SELECT earlier.message_id FROM txbox_inbox AS earlier
                 WHERE earlier.consumer = behind.consumer AND earlier.key = behind.key
                   AND earlier.arrival < behind.arrival AND earlier.status <> 'processed'
                   AND (earlier.status IN ('pending', 'failed', 'processing')
                        OR (:dead_blocks AND earlier.status = 'dead'))
                 ORDER BY earlier.arrival LIMIT 1) AS head_id
          FROM txbox_inbox AS behind
         WHERE behind.consumer = :consumer AND behind.message_id IN ({:rows.message_id})
           AND behind.status IN ('pending', 'failed')) AS own
  JOIN txbox_inbox AS head ON head.consumer = :consumer AND head.message_id = own.head_id

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
         WHERE behind.consumer = :consumer AND behind.message_id IN ({:rows.message_id})
           AND behind.status IN ('pending', 'failed') AND behind.sequence IS NOT NULL) AS own
  LEFT JOIN txbox_inbox AS head ON head.consumer = :consumer AND head.message_id = own.head_id

-- ---- outbox.py ------------------------------------------------------------------------------------------------------

-- name: stage
-- In the caller's transaction, many messages in one statement; `number` is the order of their inserts.
-- A re-run under the same cause stages the same ids, and changes nothing.
INSERT INTO txbox_outbox (id, topic, type, key, content_type, headers, payload, key_id, cause_consumer, cause_id,
                          available_at, route)
VALUES {(:rows.id, :rows.topic, :rows.type, :rows.key, :rows.content_type, :rows.headers, :rows.payload, :key_id,
         :rows.cause_consumer, :rows.cause_id,
         strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', :rows.delay_s)), :rows.route)}
ON CONFLICT (id) DO NOTHING

-- name: stage_notify
-- Nobody listens: relays poll.

-- name: stage_lock
-- One writer at a time: numbers are committed in their order.

-- name: relay_page
-- What may be due of one route, and of what was staged without one, oldest first, from where the last look ended.
SELECT id, number, topic, key, available_at, payload_bytes, type
  FROM (SELECT * FROM (SELECT id, number, topic, key, available_at, coalesce(length(payload), 0) AS payload_bytes, type
                         FROM txbox_outbox
                        WHERE status = 'pending' AND route = :route
                          AND available_at <= strftime('%Y-%m-%d %H:%M:%f', 'now')
                          AND (available_at, number) > (coalesce(:after_at, ''), :after_number)
                          AND (:whole OR (topic IN ({:rows.topic})) = :named)
                        ORDER BY available_at, number
                        LIMIT :limit)
        UNION ALL
        SELECT * FROM (SELECT id, number, topic, key, available_at, coalesce(length(payload), 0), type
                         FROM txbox_outbox
                        WHERE status = 'pending' AND route = '' AND available_at <= strftime('%Y-%m-%d %H:%M:%f', 'now')
                          AND (available_at, number) > (coalesce(:after_at, ''), :after_number)
                          AND (topic IN ({:rows.topic})) = :named
                        ORDER BY available_at, number
                        LIMIT :limit)) AS due
 ORDER BY available_at, number
 LIMIT :limit

-- name: relay_heads
-- Of each key, by type, the first row that others must not overtake, and how many there are up to :last. A row that
-- was staged with a delay counts once that is over; any other counts even if this transaction's clock,
-- which stood still at its start, says that its time is yet to come.
SELECT topic, key, type, min(number), count(*)
  FROM txbox_outbox
 WHERE status = 'pending' AND key IS NOT NULL AND number <= :last
   AND (route, topic, key) IN (VALUES {(:rows.route, :rows.topic, :rows.key)})
   AND (token IS NOT NULL OR attempts > 0 OR available_at = staged_at
        OR available_at <= strftime('%Y-%m-%d %H:%M:%f', 'now'))
 GROUP BY topic, key, type

-- name: relay_lease
UPDATE txbox_outbox
   SET token = :token, available_at = strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', :lease_s))
 WHERE id IN ({:rows.id}) AND status = 'pending' AND available_at <= strftime('%Y-%m-%d %H:%M:%f', 'now')
RETURNING id, number, topic, type, key, content_type, headers, payload, key_id, staged_at, attempts

-- name: relay_take
-- relay_lease has taken the rows.

-- name: relay_release
-- Fenced: rows that were not sent, by no fault of theirs; they keep their place before later ones.
UPDATE txbox_outbox
   SET token = NULL, available_at = staged_at
 WHERE id IN ({:rows.id}) AND token = :token AND status = 'pending'

-- name: relay_sent
DELETE FROM txbox_outbox WHERE id IN ({:rows.id}) AND token = :token AND status = 'pending'

-- name: relay_kept
-- As relay_sent, for rows that are kept for a time.
UPDATE txbox_outbox
   SET status = 'sent', token = NULL, sent_at = strftime('%Y-%m-%d %H:%M:%f', 'now'), error_type = NULL, error = NULL
 WHERE id IN ({:rows.id}) AND token = :token AND status = 'pending'

-- name: relay_failed
UPDATE txbox_outbox
   SET status = :status, attempts = attempts + 1, token = NULL, error_type = :error_type, error = :error,
       available_at = strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', :delay_s))
 WHERE id = :id AND token = :token AND status = 'pending'

-- name: relay_left
-- What is due or leased of one route, and of what was staged without one.
SELECT DISTINCT topic, type FROM txbox_outbox
 WHERE status = 'pending' AND (token IS NOT NULL OR available_at <= strftime('%Y-%m-%d %H:%M:%f', 'now'))
   AND route IN (:route, '')
   AND ((:whole AND route = :route) OR (topic IN ({:rows.topic})) = :named)

-- name: relay_strays
-- What goes to consumers of the database itself and is not on this App's own route; and what has no route at all.
SELECT DISTINCT route, topic, type, cause_consumer FROM txbox_outbox
 WHERE status = 'pending' AND (route = '' OR (route >= 'local' AND route < 'local;')) AND route <> :route

-- name: relay_adopt
UPDATE txbox_outbox SET route = :route
 WHERE number IN (SELECT number FROM txbox_outbox
                   WHERE status = 'pending' AND token IS NULL AND route = :from_route AND topic = :topic
                     AND type IS :type AND cause_consumer IS :cause_consumer
                   LIMIT :limit)

-- ---- outbox_rows.py -------------------------------------------------------------------------------------------------

-- name: outbox_status
-- Overdue: due for a minute, and never tried.
SELECT own.topic, own.route, own.state, count(*), (julianday('now') - julianday(min(own.staged_at))) * 86400.0,
       sum(own.overdue)
  FROM (SELECT topic, route, staged_at,
               status = 'pending' AND token IS NULL AND attempts = 0
               AND available_at < strftime('%Y-%m-%d %H:%M:%f', 'now', '-1 minute') AS overdue,
               CASE WHEN status <> 'pending' THEN status
                    WHEN available_at <= strftime('%Y-%m-%d %H:%M:%f', 'now') THEN 'due'
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
                    OR head.available_at <= strftime('%Y-%m-%d %H:%M:%f', 'now'))
             ORDER BY head.number LIMIT 1) END
  FROM (SELECT id, number, status, topic, type, key, attempts, staged_at, available_at, sent_at, cause_consumer,
               cause_id, error_type, error, key_id, route,
               CASE WHEN status <> 'pending' THEN status
                    WHEN available_at <= strftime('%Y-%m-%d %H:%M:%f', 'now') THEN 'due'
                    WHEN token IS NOT NULL THEN 'leased' WHEN attempts > 0 THEN 'failed' ELSE 'delayed' END AS state
          FROM txbox_outbox
         WHERE (:id IS NULL OR id = :id)
           AND (:stored IS NULL OR status = :stored)
           AND (:state IS NULL
                OR CASE WHEN status <> 'pending' THEN status
                        WHEN available_at <= strftime('%Y-%m-%d %H:%M:%f', 'now') THEN 'due'
                        WHEN token IS NOT NULL THEN 'leased' WHEN attempts > 0 THEN 'failed' ELSE 'delayed' END
                   = :state)
           AND (:topic IS NULL OR topic = :topic)
           AND (:route IS NULL OR route = :route)
           AND (:type IS NULL OR type = :type)
           AND (:key IS NULL OR key = :key)
           AND (:error_type IS NULL OR error_type = :error_type)
           AND (:older_than_s IS NULL
                OR staged_at < strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', -:older_than_s)))
           AND (:before IS NULL OR number < :before)
         ORDER BY number DESC
         LIMIT :limit) AS own
 ORDER BY own.number DESC

-- name: outbox_content
SELECT content_type, headers, payload, key_id FROM txbox_outbox WHERE id = :id

-- name: outbox_select
-- The rows that an operator's command may touch now; BEGIN IMMEDIATE keeps every other writer out.
SELECT id, number FROM txbox_outbox
 WHERE (:id IS NULL OR id = :id)
   AND status IN ('pending', 'dead')
   AND CASE WHEN status <> 'pending' THEN status
            WHEN available_at <= strftime('%Y-%m-%d %H:%M:%f', 'now') THEN 'due'
            WHEN token IS NOT NULL THEN 'leased' WHEN attempts > 0 THEN 'failed' ELSE 'delayed' END
       IN ({:rows.state})
   AND (:topic IS NULL OR topic = :topic)
   AND (:route IS NULL OR route = :route)
   AND (:type IS NULL OR type = :type)
   AND (:key IS NULL OR key = :key)
   AND (:error_type IS NULL OR error_type = :error_type)
   AND (:older_than_s IS NULL
        OR staged_at < strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', -:older_than_s)))
   AND number > :after
 ORDER BY number
 LIMIT :limit

-- name: outbox_retry
-- A full new budget; available_at as staged, so that it is before the later rows of its key again.
UPDATE txbox_outbox SET status = 'pending', attempts = 0, token = NULL, available_at = staged_at
 WHERE id IN ({:rows.id}) AND status IN ('pending', 'dead')

-- name: outbox_discard
-- Of a row that is no longer pending, available_at says when it was given up.
UPDATE txbox_outbox SET status = 'discarded', token = NULL, available_at = strftime('%Y-%m-%d %H:%M:%f', 'now')
 WHERE id IN ({:rows.id}) AND status IN ('pending', 'dead')

-- name: outbox_reroute
-- A new budget, as the attempts were those of the old route; what was tried is due at once.
UPDATE txbox_outbox SET status = 'pending', route = :to, attempts = 0, token = NULL,
       available_at = CASE WHEN attempts > 0 THEN staged_at ELSE available_at END
 WHERE id IN ({:rows.id}) AND status IN ('pending', 'dead')
