-- txbox's statements for SQLite 3.35 and later: the counterparts of postgresql.sql, name by name.
-- `:name` is a parameter; a region in braces is repeated for each row, and `:rows.name` is a column of that row.
-- A query without a body has nothing to do on this database. There is one writer at a time, so SKIP LOCKED is not
-- needed, nor any lock timeout except the connection's. Statements name the rows they touch.
-- Times are UTC text of fixed width, so they compare as text.
-- `status <> 'processed'` accompanies narrower conditions: SQLite uses the partial index over open rows only if a
-- query contains the index's own condition.
-- `[name x]` inserts the text of a fragment, with x as its parameter.
-- Each section has the queries of the module it names.

-- fragment: now
strftime('%Y-%m-%d %H:%M:%f', 'now')

-- fragment: ago seconds
strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', -[seconds]))

-- fragment: in seconds
strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', [seconds]))

-- fragment: epoch at
(julianday([at]) - 2440587.5) * 86400

-- ---- claims.py ------------------------------------------------------------------------------------------------------

-- name: claim
INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, sequence, processed_at, payload_hash)
VALUES {(:consumer, :rows.message_id, 'processed', :rows.topic, :rows.type, :rows.key, :rows.sequence,
         [now], :rows.payload_hash)}
ON CONFLICT (consumer, message_id) DO NOTHING
RETURNING message_id

-- name: claim_single
-- As claim for one message: a text that is the same for all of them.
INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, sequence, processed_at, payload_hash)
VALUES (:consumer, :message_id, 'processed', :topic, :type, :key, :sequence, [now], :payload_hash)
ON CONFLICT (consumer, message_id) DO NOTHING
RETURNING message_id

-- name: claim_kept
-- claim for consumers that keep the payload of processed messages.
INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, sequence, processed_at, payload_hash,
                         content_type, headers, origin, payload, has_payload, key_id)
VALUES {(:consumer, :rows.message_id, 'processed', :rows.topic, :rows.type, :rows.key, :rows.sequence,
         [now], :rows.payload_hash, :rows.content_type, :rows.headers, :rows.origin, :rows.payload, true, :key_id)}
ON CONFLICT (consumer, message_id) DO NOTHING
RETURNING message_id

-- name: claim_leased
-- The fence: a worker whose lease was given to another matches no row.
UPDATE txbox_inbox
   SET status = 'processed', processed_at = [now], updated_at = [now],
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
-- A replay works on top of a processed row: if it fails, the rollback leaves the row `processed` as it was.
UPDATE txbox_inbox SET status = 'processed', updated_at = [now]
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id}) AND status = 'processed'
RETURNING message_id

-- name: claim_rehearsal
-- As claim_replay over a row of any status but one that is being processed; it is never committed.
UPDATE txbox_inbox SET status = 'processed', updated_at = [now]
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id}) AND status <> 'processing'
RETURNING message_id

-- name: rehearse_constraints
-- Deferred references are checked by COMMIT alone.

-- name: rehearse_references
-- Instead, those that lead nowhere before and after are compared.
SELECT "table", rowid, parent, fkid FROM pragma_foreign_key_check

-- name: bound_lock_timeout
-- The wait is the connection's busy_timeout.

-- name: restore_lock_timeout
-- The wait is the connection's busy_timeout, at BEGIN.

-- name: bound_batch
-- Not needed: with one writer there are no row locks to wait for.

-- name: arm
-- From here on every COMMIT fails, because the row references one that never exists.
INSERT INTO txbox_guard (number, token, never) VALUES (1, :token, 1)
ON CONFLICT (number) DO UPDATE SET token = excluded.token, never = 1

-- name: savepoint_claim
-- A failed statement leaves the transaction usable, so close can be used instead.

-- name: rollback_to_claim

-- name: close
-- Fails (SQLITE_MISMATCH: text is not a row number) unless this is the transaction that armed the guard.
-- Otherwise gives the row a reference that can be committed.
INSERT INTO txbox_guard (number, token, never)
SELECT CASE WHEN EXISTS (SELECT 1 FROM txbox_guard WHERE token = :token AND never = 1) THEN 1
            ELSE 'the handler left the transaction that claimed its message' END, :token, NULL
 WHERE true
ON CONFLICT (number) DO UPDATE SET never = NULL
RETURNING token

-- name: complete
-- The claim already wrote the row as processed.

-- name: duplicates
-- classify reads them along with the others.

-- ---- inbox.py -------------------------------------------------------------------------------------------------------

-- name: classify
SELECT message_id, status, payload_hash, has_payload, attempts, starts,
       coalesce(next_attempt_at <= [now], true) AS due, token, lease_until IS NOT NULL AS leased
  FROM txbox_inbox
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})

-- name: accept
-- An open guard (this call is inside a handler run by txbox) is left alone.
INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, sequence, processed_at, payload_hash)
VALUES {(:consumer, :rows.message_id, 'processed', :rows.topic, :rows.type, :rows.key, :rows.sequence,
         [now], :rows.payload_hash)}
ON CONFLICT (consumer, message_id) DO NOTHING
RETURNING message_id

-- name: savepoint
-- Not needed: a failed statement leaves the transaction as it was.

-- name: release_savepoint

-- name: rollback_to_savepoint

-- name: store
-- One row with payload and key; the second of two writers changes nothing.
INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, sequence, payload_hash, next_attempt_at,
                         content_type, headers, origin, payload, has_payload, key_id)
VALUES {(:consumer, :rows.message_id, 'pending', :rows.topic, :rows.type, :rows.key, :rows.sequence,
         :rows.payload_hash, [in :delay_s],
         :rows.content_type, :rows.headers, :rows.origin, :rows.payload, true, :key_id)}
ON CONFLICT (consumer, message_id) DO NOTHING
RETURNING message_id

-- name: return_payload
-- A redelivery restores the missing payload of an unfinished row; from then on the table owns it.
UPDATE txbox_inbox
   SET content_type = :content_type, headers = :headers, origin = :origin,
       payload = :payload, has_payload = true, key_id = :key_id, payload_hash = :payload_hash,
       next_attempt_at = coalesce(next_attempt_at, [now]), updated_at = [now]
 WHERE consumer = :consumer AND message_id = :message_id
   AND status IN ('pending', 'failed') AND NOT has_payload

-- name: quarantine
-- The same message again only increments the counter.
INSERT INTO txbox_quarantine (consumer, message_id, hash, reason, topic, type, key,
                              content_type, headers, origin, payload, key_id, kept_bytes)
VALUES (:consumer, :message_id, :hash, :reason, :topic, :type, :key,
        :content_type, :headers, :origin, :payload, :key_id, coalesce(length(:payload), 0))
ON CONFLICT (consumer, message_id, hash)
DO UPDATE SET seen = seen + 1, updated_at = [now]

-- name: record_attempt
INSERT INTO txbox_attempt (consumer, message_id, attempt, status, error_type, error, fingerprint)
VALUES (:consumer, :message_id, :attempt, :status, :error_type, :error, :fingerprint)

-- name: keep_result
UPDATE txbox_inbox SET result = :result
 WHERE consumer = :consumer AND message_id = :message_id

-- name: result
SELECT result FROM txbox_inbox WHERE consumer = :consumer AND message_id = :message_id

-- ---- failures.py ----------------------------------------------------------------------------------------------------

-- fragment: failing
status = CASE WHEN :final OR attempts + 1 >= :max_attempts OR received_at < [ago :max_age_s]
                     THEN 'dead' ELSE 'failed' END,
       attempts = attempts + 1, next_attempt_at = [in :delay_s], lease_until = NULL, token = NULL, updated_at = [now],
       error_type = :error_type, error = :error, fingerprint = :fingerprint,
       content_type = :content_type, headers = :headers, origin = :origin,
       payload = :payload, has_payload = :has_payload, key_id = :key_id

-- name: record_update
-- Overwrites only a failed row with the same payload, or a row that is ours by its token.
UPDATE txbox_inbox
   SET starts = CASE WHEN status = 'processing' THEN max(starts - 1, 0) ELSE starts END, [failing]
 WHERE consumer = :consumer AND message_id = :message_id
   AND ((status = 'failed' AND payload_hash IS :payload_hash) OR (status = 'processing' AND token = :token))

-- name: record_insert
-- Somebody else's row is left alone; then nothing is written.
INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, sequence, payload_hash, attempts,
                         next_attempt_at, error_type, error, fingerprint,
                         content_type, headers, origin, payload, has_payload, key_id)
VALUES (:consumer, :message_id, CASE WHEN :final OR 1 >= :max_attempts THEN 'dead' ELSE 'failed' END,
        :topic, :type, :key, :sequence, :payload_hash, 1,
        [in :delay_s], :error_type, :error, :fingerprint,
        :content_type, :headers, :origin, :payload, :has_payload, :key_id)
ON CONFLICT (consumer, message_id) DO NOTHING

-- name: record_own
-- Overwrites the row this transaction claimed: the guard is still armed with its token.
UPDATE txbox_inbox
   SET processed_at = NULL, [failing]
 WHERE consumer = :consumer AND message_id = :message_id AND status = 'processed'
   AND EXISTS (SELECT 1 FROM txbox_guard WHERE token = :token AND never = 1)
RETURNING status, attempts

-- ---- leases.py ------------------------------------------------------------------------------------------------------

-- fragment: is_due starts
-- The conditions of the index txbox_inbox_due.
consumer = :consumer AND status IN ('pending', 'failed') AND has_payload AND [starts] AND next_attempt_at <= [now]

-- fragment: head key
-- The first unfinished row of a key; those behind it wait.
(SELECT head.arrival FROM txbox_inbox AS head
  WHERE head.consumer = :consumer AND head.key = [key]
    AND head.status <> 'processed' AND head.key IS NOT NULL
    AND (head.status IN ('pending', 'failed', 'processing') OR (:dead_blocks AND head.status = 'dead'))
  ORDER BY head.arrival
  LIMIT 1)

-- fragment: take
UPDATE txbox_inbox
   SET status = 'processing', token = :token, starts = starts + 1, updated_at = [now], lease_until = [in :lease_s]

-- fragment: leased
RETURNING message_id, topic, type, key, sequence, received_at, payload_hash, attempts, starts,
          content_type, headers, origin, payload, has_payload, key_id, arrival

-- name: store_leased
-- store for rows that are leased from the start: nobody else ever sees them waiting.
INSERT INTO txbox_inbox (consumer, message_id, status, token, lease_until, starts, topic, type, key, sequence,
                         payload_hash, next_attempt_at, content_type, headers, origin, payload, has_payload, key_id)
VALUES {(:consumer, :rows.message_id, 'processing', :token,
         [in :lease_s], 1, :rows.topic, :rows.type, :rows.key,
         :rows.sequence, :rows.payload_hash, [now], :rows.content_type, :rows.headers,
         :rows.origin, :rows.payload, true, :key_id)}
ON CONFLICT (consumer, message_id) DO NOTHING
RETURNING message_id, received_at, arrival

-- name: lease
-- In the order of the index txbox_inbox_due, so the cost does not depend on how much waits behind.

[take]
 WHERE arrival IN (SELECT due.arrival FROM txbox_inbox AS due
                    WHERE [is_due starts = 0]
                    ORDER BY due.next_attempt_at, due.arrival
                    LIMIT :limit)
[leased]

-- name: lease_suspect
-- A row whose last run never ended is taken alone, so that a message which kills its process does not take others
-- with it. There are few of these, so one statement serves all consumers; ordered ones take heads only.
[take]
 WHERE arrival IN (SELECT due.arrival FROM txbox_inbox AS due
                    WHERE [is_due starts > 0]
                      AND (NOT :heads_only OR due.key IS NULL
                           OR due.arrival = [head due.key])
                    ORDER BY due.starts, due.next_attempt_at, due.arrival
                    LIMIT 1)
[leased]

-- name: lease_ordered
-- lease, but only the first unfinished row of each key. Rows that wait for their head are due as well, and may be
-- all there is in front. So the :window oldest rows are checked one by one. If those are not enough and there are
-- more, one head after another follows, from the key :after on: one index probe per key, however many rows wait
-- behind it. Rows without a key are not in that index, so they are looked for only now and then. NOT MATERIALIZED:
-- SQLite 3.46 otherwise steps through all keys before :limit can stop it.
[take]
 WHERE arrival IN (
       WITH RECURSIVE seen(arrival, key) AS MATERIALIZED (
              SELECT arrival, key FROM txbox_inbox
               WHERE [is_due starts = 0]
               ORDER BY next_attempt_at, arrival
               LIMIT :window
       ), keys(key) AS NOT MATERIALIZED (
              SELECT :after WHERE (SELECT count(*) FROM seen) = :window
               UNION ALL
              SELECT (SELECT next.key FROM txbox_inbox AS next
                       WHERE next.consumer = :consumer AND next.key > keys.key
                         AND next.status <> 'processed' AND next.key IS NOT NULL
                       ORDER BY next.key LIMIT 1)
                FROM keys WHERE keys.key IS NOT NULL
       ), unkeyed(arrival) AS NOT MATERIALIZED (
              SELECT arrival FROM txbox_inbox
               WHERE :keyless AND (SELECT count(*) FROM seen) = :window AND key IS NULL
                 AND [is_due starts = 0]
               ORDER BY next_attempt_at, arrival
               LIMIT :limit
       ), candidate(arrival) AS NOT MATERIALIZED (
              SELECT seen.arrival FROM seen
               WHERE seen.key IS NULL
                  OR seen.arrival = [head seen.key]
               UNION ALL
              SELECT (SELECT CASE WHEN head.status IN ('pending', 'failed') AND head.has_payload AND head.starts = 0
                                   AND head.next_attempt_at <= [now] THEN head.arrival END
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
[leased]

-- name: lease_next
-- lease_ordered for a single key whose turn it is. Used after running the predecessor, to avoid looking at other
-- keys.
[take]
 WHERE arrival = [head :key]
   AND status IN ('pending', 'failed') AND has_payload AND starts = 0
   AND next_attempt_at <= [now]
[leased]

-- name: lease_stored
-- store_leased already leased the rows.

-- name: heartbeat
UPDATE txbox_inbox SET lease_until = [in :lease_s]
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})
   AND token = :token AND status = 'processing'

-- name: release
-- Fenced. Takes the start back, because the message is not to blame for how the run ended.
UPDATE txbox_inbox
   SET status = CASE WHEN attempts > 0 THEN 'failed' ELSE 'pending' END,
       starts = max(starts - 1, 0), lease_until = NULL, token = NULL, updated_at = [now],
       next_attempt_at = [in :delay_s]
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})
   AND token = :token AND status = 'processing'

-- name: rescue
-- The start stays counted, because its run never ended.
UPDATE txbox_inbox
   SET status = CASE WHEN starts >= :max_starts THEN 'dead' ELSE 'failed' END,
       lease_until = NULL, token = NULL, updated_at = [now], next_attempt_at = [now],
       error_type = CASE WHEN starts >= :max_starts THEN 'KilledItsProcess' ELSE 'LeaseExpired' END,
       error = CASE WHEN starts >= :max_starts
                    THEN 'killed its process: ' || starts || ' runs never ended' ELSE 'lease expired' END,
       fingerprint = NULL
 WHERE arrival IN (SELECT expired.arrival FROM txbox_inbox AS expired
                    WHERE expired.status <> 'processed'
                      AND expired.status = 'processing' AND expired.lease_until <= [now]
                      AND (:consumer IS NULL OR expired.consumer = :consumer)
                    ORDER BY expired.lease_until
                    LIMIT :limit)
RETURNING consumer, message_id, topic, starts, status, attempts, error_type, error

-- name: rescue_broken
-- The claim writes `processed`, so there is never a committed processing row without a lease.

-- ---- order.py -------------------------------------------------------------------------------------------------------

-- name: order_waiting
-- The keys of a claim with earlier messages unfinished; later messages of these keys wait in the table.
SELECT DISTINCT key FROM txbox_inbox
 WHERE consumer = :consumer AND key IN ({:rows.key}) AND status <> 'processed'
   AND (status IN ('pending', 'failed', 'processing') OR (:dead_blocks AND status = 'dead'))
   AND token IS NOT :token

-- name: sequence_state
-- The version processed last, whether an earlier one is being processed from the table, and whether this one has
-- waited long enough.
SELECT (SELECT last FROM txbox_sequence WHERE consumer = :consumer AND key = :key),
       EXISTS (SELECT 1 FROM txbox_inbox
                WHERE consumer = :consumer AND key = :key AND status <> 'processed'
                  AND status IN ('pending', 'failed', 'processing') AND sequence < :sequence),
       EXISTS (SELECT 1 FROM txbox_inbox
                WHERE consumer = :consumer AND message_id = :message_id
                  AND received_at < [ago :wait_s])

-- name: sequence_done
-- Never goes back: a late version leaves the higher one in place.
INSERT INTO txbox_sequence (consumer, key, last) VALUES (:consumer, :key, :sequence)
ON CONFLICT (consumer, key)
DO UPDATE SET last = max(txbox_sequence.last, excluded.last), updated_at = [now]

-- name: sequence_next
-- Wakes the next version, which need not wait until it would be looked at again.
UPDATE txbox_inbox SET next_attempt_at = [now]
 WHERE consumer = :consumer AND key = :key AND status <> 'processed' AND status = 'pending'
   AND sequence = :sequence + 1

-- ---- jobs.py --------------------------------------------------------------------------------------------------------

-- name: job_create
INSERT INTO txbox_job (name) VALUES (:name) ON CONFLICT (name) DO NOTHING

-- name: job_acquire
-- One holder at a time, by the database's clock; the holder renews with the same token.
UPDATE txbox_job
   SET token = :token, updated_at = [now], lease_until = [in :lease_s]
 WHERE name = :name AND (lease_until IS NULL OR lease_until <= [now] OR token = :token)

-- name: job_release
UPDATE txbox_job SET token = NULL, lease_until = NULL, updated_at = [now]
 WHERE name = :name AND token = :token

-- name: job_state
SELECT state FROM txbox_job WHERE name = :name

-- name: job_save
-- Fenced by the lease: a reader that lost it cannot move the progress back.
UPDATE txbox_job SET state = :state, updated_at = [now]
 WHERE name = :name AND token = :token

-- name: anchor_history
-- Constant: a file has no server that could be replaced.
SELECT ''

-- name: anchor_read
SELECT name, CAST(state AS INTEGER) FROM txbox_job WHERE name IN ({:rows.name})

-- name: anchor_advance
-- Never goes back, whoever writes.
INSERT INTO txbox_job (name, state) VALUES {(:rows.name, CAST(:rows.position AS TEXT))}
ON CONFLICT (name) DO UPDATE
   SET state = CAST(max(CAST(txbox_job.state AS INTEGER), CAST(excluded.state AS INTEGER)) AS TEXT), updated_at = [now]

-- name: prune
-- In arrival order, which is roughly the order of completion.
DELETE FROM txbox_inbox
 WHERE arrival IN (SELECT old.arrival FROM txbox_inbox AS old
                    WHERE old.status IN ('processed', 'discarded')
                      AND old.processed_at < [ago :older_than_s]
                      AND (:consumer IS NULL OR old.consumer = :consumer)
                    ORDER BY old.arrival
                    LIMIT :limit)
RETURNING consumer, message_id

-- name: prune_blocks
-- prune already finds the rows in the best order here.

-- name: prune_begin
-- A transaction cannot choose its durability here.

-- name: prune_attempts
DELETE FROM txbox_attempt
 WHERE number IN (SELECT own.number FROM (VALUES {(:rows.consumer, :rows.message_id)}) AS m
                   JOIN txbox_attempt AS own ON own.consumer = m.column1 AND own.message_id = m.column2)

-- name: prunable
SELECT count(*) FROM txbox_inbox
 WHERE status IN ('processed', 'discarded')
   AND processed_at < [ago :older_than_s]
   AND (:consumer IS NULL OR consumer = :consumer)

-- name: prune_orphans
-- There are no partitions here.

-- fragment: outgoing_past
status <> 'pending'
   AND ((status = 'sent' AND sent_at < [ago :sent_s])
        OR (status = 'discarded' AND available_at < [ago :discarded_s]))

-- name: prune_outbox
DELETE FROM txbox_outbox
 WHERE number IN (SELECT old.number FROM txbox_outbox AS old
                   WHERE [outgoing_past]
                   LIMIT :limit)

-- name: prune_quarantine
-- Only what was accepted or discarded, and what an edit has replaced once its message is gone; what waits for a
-- decision is never deleted.
DELETE FROM txbox_quarantine
 WHERE rowid IN (SELECT gone.rowid FROM txbox_quarantine AS gone
                  WHERE gone.status <> 'quarantined'
                    AND gone.updated_at < [ago :older_than_s]
                    AND (gone.status <> 'replaced'
                         OR NOT EXISTS (SELECT 1 FROM txbox_inbox AS edited
                                         WHERE edited.consumer = gone.consumer AND edited.message_id = gone.message_id))
                  LIMIT :limit)

-- name: prunable_quarantine
SELECT count(*) FROM txbox_quarantine
 WHERE status <> 'quarantined' AND updated_at < [ago :older_than_s]
   AND (status <> 'replaced'
        OR NOT EXISTS (SELECT 1 FROM txbox_inbox AS edited
                        WHERE edited.consumer = txbox_quarantine.consumer AND edited.message_id = txbox_quarantine.message_id))

-- name: quarantine_bytes
SELECT coalesce(sum(kept_bytes), 0) FROM txbox_quarantine WHERE kept_bytes > 0

-- name: quarantine_oldest
SELECT consumer, message_id, hash, kept_bytes FROM txbox_quarantine
 WHERE kept_bytes > 0
 ORDER BY received_at
 LIMIT :limit

-- fragment: picked_quarantined
rowid IN (SELECT own.rowid FROM (VALUES {(:rows.consumer, :rows.message_id, :rows.hash)}) AS m
                  JOIN txbox_quarantine AS own
                    ON own.consumer = m.column1 AND own.message_id = m.column2 AND own.hash = m.column3)

-- name: drop_quarantined
UPDATE txbox_quarantine SET payload = NULL, kept_bytes = 0
 WHERE [picked_quarantined]

-- name: prunable_outbox
SELECT count(*) FROM txbox_outbox
 WHERE [outgoing_past]

-- name: second_of_day
SELECT strftime('%s', 'now') - strftime('%s', 'now', 'start of day')

-- name: drop_payloads
-- For consumers that keep payloads of processed messages for a limited time; the key and the hash stay.
UPDATE txbox_inbox
   SET payload = NULL, headers = NULL, origin = NULL, content_type = NULL, has_payload = 0
 WHERE arrival IN (SELECT old.arrival FROM txbox_inbox AS old
                    WHERE old.consumer = :consumer AND old.status = 'processed' AND old.has_payload
                      AND old.processed_at < [ago :older_than_s]
                    LIMIT :limit)

-- name: due
-- One query for a whole worker: in how many seconds each consumer's next row is due, and the outbox's under the
-- empty name, if within `ahead_s`. Rows that are not on the route :local may still be for its App: see relay_strays.
-- One index probe each, however much is behind it.
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
        SELECT '', [now]
         WHERE EXISTS (SELECT 1 FROM txbox_outbox
                       WHERE status = 'pending' AND route >= 'local' AND route < :local)
            OR EXISTS (SELECT 1 FROM txbox_outbox
                        WHERE status = 'pending' AND route > :local AND route < 'local;')) AS soon
 WHERE soon.at <= [in :ahead_s]

-- name: work_left
-- What keeps `run --once` running: due rows, leased rows, and versions whose turn it is, which are looked at again
-- within two seconds.
SELECT CASE WHEN EXISTS (SELECT 1 FROM txbox_inbox WHERE [is_due starts = 0])
              OR EXISTS (SELECT 1 FROM txbox_inbox WHERE [is_due starts > 0])
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
-- work_left for ordered consumers: rows that wait for a dead row, or for one not yet due, do not count.
SELECT CASE WHEN EXISTS (SELECT 1 FROM txbox_inbox AS own
                          WHERE own.consumer = :consumer AND own.status <> 'processed'
                            AND own.status IN ('pending', 'failed')
                            AND own.has_payload AND own.next_attempt_at <= [now]
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

-- name: partitions_detached
-- There are no partitions here.

-- name: partition_begin
-- There are no partitions here.

-- name: partition_make
-- There are no partitions here.

-- name: partition_rows
-- There are no partitions here.

-- name: partition_detach
-- There are no partitions here.

-- name: partition_drop
-- There are no partitions here.

-- ---- schema.py ------------------------------------------------------------------------------------------------------

-- name: schema_version
SELECT version, compatible_from FROM txbox_schema ORDER BY version DESC LIMIT 1

-- name: schema_exists
SELECT count(*), NULL AS schema FROM sqlite_master WHERE type = 'table' AND name = 'txbox_schema'

-- name: schema_lock
-- BEGIN IMMEDIATE already holds the one write lock.

-- name: schema_unlock
-- The lock ends with its transaction.

-- name: guard_check
-- The guard works only while foreign keys are enforced on this connection.
SELECT (SELECT foreign_keys FROM pragma_foreign_keys)
       AND (SELECT count(*) FROM pragma_foreign_key_list('txbox_guard')) AS triggers,
       'origin' AS role

-- name: schema_creators
-- There are no roles.

-- ---- admin/queries.py -----------------------------------------------------------------------------------------------

-- name: status
SELECT consumer, status, count(*) FROM txbox_inbox GROUP BY consumer, status ORDER BY consumer, status

-- name: oldest_unfinished
SELECT consumer, (julianday('now') - julianday(min(received_at))) * 86400.0
  FROM txbox_inbox WHERE status <> 'processed' AND status IN ('pending', 'processing', 'failed')
 GROUP BY consumer ORDER BY consumer

-- name: quarantine_status
SELECT consumer, count(*) FROM txbox_quarantine WHERE status = 'quarantined' GROUP BY consumer ORDER BY consumer

-- fragment: state
-- The state shown to people.
CASE WHEN status <> 'pending' THEN status
                    WHEN available_at <= [now] THEN 'due'
                    WHEN token IS NOT NULL THEN 'leased' WHEN attempts > 0 THEN 'failed' ELSE 'delayed' END

-- name: outbox_status
-- Overdue: due for over a minute and never tried.
SELECT own.topic, own.route, own.state, count(*), (julianday('now') - julianday(min(own.staged_at))) * 86400.0,
       sum(own.overdue)
  FROM (SELECT topic, route, staged_at,
               status = 'pending' AND token IS NULL AND attempts = 0
               AND available_at < strftime('%Y-%m-%d %H:%M:%f', 'now', '-1 minute') AS overdue,
               [state] AS state
          FROM txbox_outbox) AS own
 GROUP BY own.topic, own.route, own.state ORDER BY own.topic, own.route, own.state

-- name: bound_look
-- There is none.

-- name: consumers
-- From one to the next in the keys: as many steps as there are consumers, however many rows they have.
WITH RECURSIVE received(consumer) AS (
    SELECT min(consumer) FROM txbox_inbox
     UNION ALL
    SELECT (SELECT min(later.consumer) FROM txbox_inbox AS later WHERE later.consumer > received.consumer)
      FROM received WHERE received.consumer IS NOT NULL),
aside(consumer) AS (
    SELECT min(consumer) FROM txbox_quarantine
     UNION ALL
    SELECT (SELECT min(later.consumer) FROM txbox_quarantine AS later WHERE later.consumer > aside.consumer)
      FROM aside WHERE aside.consumer IS NOT NULL)
SELECT consumer FROM received WHERE consumer IS NOT NULL
 UNION
SELECT consumer FROM aside WHERE consumer IS NOT NULL
 ORDER BY consumer

-- fragment: some status
(SELECT count(*) FROM (SELECT 1 FROM txbox_inbox
             WHERE status <> 'processed' AND status = [status] AND consumer = :consumer
             LIMIT :most) AS own)

-- fragment: oldest status
(SELECT (julianday('now') - julianday(received_at)) * 86400.0 FROM txbox_inbox
         WHERE status <> 'processed' AND status = [status] AND consumer = :consumer
         ORDER BY arrival LIMIT 1)

-- name: consumer_open
-- Of one consumer, counted up to a limit: what is open by status and quarantined, and the oldest of what is unfinished.
SELECT [some 'pending'],
       [some 'processing'],
       [some 'failed'],
       [some 'dead'],
       [some 'discarded'],
       (SELECT count(*) FROM (SELECT 1 FROM txbox_quarantine
                               WHERE consumer = :consumer AND status = 'quarantined' LIMIT :most) AS own),
       [oldest 'pending'],
       [oldest 'processing'],
       [oldest 'failed']

-- name: outbox_open
-- As outbox_status, of what has not left: counted up to a limit, and not more than that is read.
SELECT own.topic, own.route, own.state, count(*),
       (julianday('now') - julianday(min(own.staged_at))) * 86400.0,
       sum(own.overdue)
  FROM (SELECT * FROM (SELECT topic, route, staged_at, status = 'pending' AND token IS NULL AND attempts = 0
                      AND available_at < strftime('%Y-%m-%d %H:%M:%f', 'now', '-1 minute') AS overdue,
                       [state] AS state
                  FROM txbox_outbox WHERE status = 'pending' ORDER BY route, available_at, number LIMIT :most) AS waiting
         UNION ALL
        SELECT * FROM (SELECT topic, route, staged_at, status = 'pending' AND token IS NULL AND attempts = 0
                      AND available_at < strftime('%Y-%m-%d %H:%M:%f', 'now', '-1 minute') AS overdue,
                       [state] AS state
                  FROM txbox_outbox WHERE status <> 'pending' AND status = 'dead' ORDER BY number LIMIT :most) AS ended) AS own
 GROUP BY own.topic, own.route, own.state ORDER BY own.topic, own.route, own.state

-- name: inbox_newest
SELECT coalesce(max(arrival), 0) FROM txbox_inbox

-- name: outbox_newest
SELECT coalesce(max(number), 0) FROM txbox_outbox

-- name: sizes
-- The size of the whole file, including indexes; that of a single table would take reading every page.
SELECT 'database file', own.page_count * size.page_size, NULL, 1
  FROM pragma_page_count AS own, pragma_page_size AS size

-- fragment: inbox_row
consumer, message_id, status, topic, type, key, attempts, starts, received_at, updated_at, processed_at,
       next_attempt_at, lease_until, error_type, error, fingerprint, has_payload, arrival, key_id

-- fragment: inbox_filter
(:topic IS NULL OR topic = :topic)
   AND (:type IS NULL OR type = :type)
   AND (:key IS NULL OR key = :key)
   AND (:error_type IS NULL OR error_type = :error_type)
   AND (:fingerprint IS NULL OR fingerprint = :fingerprint)
   AND (:older_than_s IS NULL OR received_at < [ago :older_than_s])

-- name: inbox_list
-- Keyset pages, newest first, of a stretch of arrivals: no index knows all rows by what may be asked for.
SELECT [inbox_row]
  FROM txbox_inbox
 WHERE arrival > :floor AND arrival < :before
   AND (:consumer IS NULL OR consumer = :consumer)
   AND (:status IS NULL OR status = :status)
   AND [inbox_filter]
 ORDER BY arrival DESC
 LIMIT :limit

-- name: inbox_list_open
-- The same of one consumer and any status but processed, which an index has in this order.
SELECT [inbox_row]
  FROM txbox_inbox
 WHERE consumer = :consumer
   AND status <> 'processed' AND status = :status
   AND arrival < :before
   AND [inbox_filter]
 ORDER BY arrival DESC
 LIMIT :limit

-- name: inbox_list_id
-- The same of one consumer and id.
SELECT [inbox_row]
  FROM txbox_inbox
 WHERE consumer = :consumer AND message_id = :message_id
   AND (:status IS NULL OR status = :status)
   AND arrival < :before
   AND [inbox_filter]
 LIMIT :limit

-- name: failure_groups
-- The newest failures of one consumer and status, as many as are looked at, by what they have in common.
SELECT own.fingerprint, own.error_type, count(*), min(own.received_at), max(own.updated_at), min(own.message_id)
  FROM (SELECT fingerprint, error_type, received_at, updated_at, message_id
          FROM txbox_inbox
         WHERE consumer = :consumer AND status <> 'processed' AND status = :status
         ORDER BY arrival DESC
         LIMIT :most) AS own
 GROUP BY own.fingerprint, own.error_type

-- name: inbox_states
-- What became of messages that were retried.
SELECT own.consumer, own.message_id, own.status, own.attempts, own.fingerprint
  FROM (VALUES {(:rows.consumer, :rows.message_id)}) AS m
  JOIN txbox_inbox AS own ON own.consumer = m.column1 AND own.message_id = m.column2

-- name: inbox_show
SELECT [inbox_row],
       content_type, headers, payload, origin, sequence, payload_hash, result
  FROM txbox_inbox WHERE consumer = :consumer AND message_id = :message_id

-- name: inbox_attempts
SELECT attempt, status, error_type, error, fingerprint, recorded_at
  FROM txbox_attempt WHERE consumer = :consumer AND message_id = :message_id ORDER BY number

-- name: inbox_count
-- What inbox_select would find in all batches of each consumer, and how many of those are spared. Takes no locks.
SELECT status, consumer, count(*), count(*) FILTER (WHERE error_type = :spared) FROM txbox_inbox
 WHERE (:consumer IS NULL OR consumer = :consumer)
   AND (:message_id IS NULL OR message_id = :message_id)
   AND status <> 'processed' AND status IN ({:rows.status})
   AND (has_payload OR NOT :needs_payload)
   AND [inbox_filter]
 GROUP BY status, consumer ORDER BY consumer

-- name: inbox_select
-- The rows an operator's command may change now; BEGIN IMMEDIATE keeps every other writer out.
-- Per consumer in arrival order, which an index has, so that all batches together read each row once.
SELECT consumer, message_id, arrival, error_type FROM txbox_inbox
 WHERE consumer = :consumer
   AND (:message_id IS NULL OR message_id = :message_id)
   AND status <> 'processed' AND status = :status
   AND (has_payload OR NOT :needs_payload)
   AND [inbox_filter]
   AND arrival > :after
 ORDER BY arrival
 LIMIT :limit

-- fragment: picked
arrival IN (SELECT own.arrival FROM (VALUES {(:rows.consumer, :rows.message_id)}) AS m
                    JOIN txbox_inbox AS own ON own.consumer = m.column1 AND own.message_id = m.column2)

-- name: inbox_retry
-- Grants a full new budget of attempts; the history stays in txbox_attempt.
UPDATE txbox_inbox
   SET status = 'failed', attempts = 0, starts = 0, next_attempt_at = [now],
       updated_at = [now], lease_until = NULL, token = NULL
 WHERE [picked]
   AND status IN ('dead', 'failed')

-- name: inbox_discard
UPDATE txbox_inbox
   SET status = 'discarded', processed_at = [now], updated_at = [now],
       next_attempt_at = NULL, lease_until = NULL, token = NULL
 WHERE [picked]
   AND status IN ('dead', 'failed', 'pending')

-- name: edit_lock
-- One message that may be edited, as replay_read and with what an edit keeps.
SELECT message_id, topic, type, key, sequence, received_at, payload_hash, attempts, starts, content_type, headers,
       origin, payload, has_payload, key_id, arrival, error
  FROM txbox_inbox
 WHERE consumer = :consumer AND message_id = :message_id AND status IN ('dead', 'failed') AND has_payload

-- name: edit_set_aside
-- What stands in the row stays readable in the quarantine, under the hash of its payload. Its bytes do not count
-- there: it is no stranger's doing, and is kept as long as its message.
INSERT INTO txbox_quarantine (consumer, message_id, hash, status, reason, topic, type, key,
                              content_type, headers, origin, payload, key_id)
SELECT consumer, message_id, :hash, 'replaced', :reason, topic, type, key,
       content_type, headers, origin, payload, key_id
  FROM txbox_inbox WHERE consumer = :consumer AND message_id = :message_id
ON CONFLICT (consumer, message_id, hash) DO UPDATE
   SET status = CASE WHEN txbox_quarantine.status = 'quarantined' THEN txbox_quarantine.status ELSE 'replaced' END,
       headers = excluded.headers, payload = excluded.payload, key_id = excluded.key_id, updated_at = [now]

-- name: edit_write
-- As inbox_retry, with other content. The hash stays that of what came: a copy of it is a duplicate.
UPDATE txbox_inbox
   SET status = 'failed', attempts = 0, starts = 0, next_attempt_at = [now], updated_at = [now],
       lease_until = NULL, token = NULL, content_type = :content_type, headers = :headers,
       payload = :payload, key_id = :key_id, error = :error
 WHERE consumer = :consumer AND message_id = :message_id AND status IN ('dead', 'failed')

-- name: replay_read
-- In arrival order; for replaying as another consumer, or replaying a processed row.
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

-- fragment: outbox_row
own.id, own.number, own.state, own.topic, own.route, own.type, own.key, own.attempts, own.staged_at,
       CASE WHEN own.state IN ('delayed', 'failed') THEN own.available_at END,
       CASE WHEN own.state = 'leased' THEN own.available_at END,
       own.sent_at, own.cause_consumer, own.cause_id, own.error_type, own.error,
       CASE WHEN own.key IS NOT NULL AND own.status = 'pending' THEN
           (SELECT head.id FROM txbox_outbox AS head
             WHERE head.status = 'pending' AND head.route IN (own.route, '')
               AND head.topic = own.topic AND head.key = own.key
               AND head.number < own.number
               AND (head.token IS NOT NULL OR head.attempts > 0 OR head.available_at = head.staged_at
                    OR head.available_at <= [now])
             ORDER BY head.number LIMIT 1) END,
       own.key_id

-- fragment: outbox_filter
(:topic IS NULL OR topic = :topic)
   AND (:route IS NULL OR route = :route)
   AND (:type IS NULL OR type = :type)
   AND (:key IS NULL OR key = :key)
   AND (:error_type IS NULL OR error_type = :error_type)
   AND (:older_than_s IS NULL OR staged_at < [ago :older_than_s])

-- name: outbox_list
-- Keyset pages of a stretch of numbers, newest first; each row with the one of its key that must leave before it, if
-- any. Of the statuses that people see, the table has four as pending: that is asked first, it is what an index knows.
SELECT [outbox_row]
  FROM (SELECT id, number, status, topic, type, key, attempts, staged_at, available_at, sent_at, cause_consumer,
               cause_id, error_type, error, key_id, route, [state] AS state
          FROM txbox_outbox
         WHERE number > :floor AND number < :before
           AND (:status IS NULL
                OR status = CASE WHEN :status IN ('due', 'delayed', 'leased', 'failed') THEN 'pending'
                                 ELSE :status END
                   AND [state] = :status)
           AND [outbox_filter]
         ORDER BY number DESC
         LIMIT :limit) AS own
 ORDER BY own.number DESC

-- name: outbox_list_ended
-- The same of those that are dead, sent or discarded, which an index has in this order.
SELECT [outbox_row]
  FROM (SELECT id, number, status, topic, type, key, attempts, staged_at, available_at, sent_at, cause_consumer,
               cause_id, error_type, error, key_id, route, [state] AS state
          FROM txbox_outbox
         WHERE status <> 'pending' AND status = :status
           AND number < :before
           AND [outbox_filter]
         ORDER BY number DESC
         LIMIT :limit) AS own
 ORDER BY own.number DESC

-- name: outbox_list_id
-- The same of one id.
SELECT [outbox_row]
  FROM (SELECT id, number, status, topic, type, key, attempts, staged_at, available_at, sent_at, cause_consumer,
               cause_id, error_type, error, key_id, route, [state] AS state
          FROM txbox_outbox
         WHERE id = :message_id AND number < :before
           AND (:status IS NULL OR [state] = :status)
           AND [outbox_filter]
         ORDER BY number DESC
         LIMIT :limit) AS own
 ORDER BY own.number DESC

-- name: outbox_show
-- The columns of outbox_list.
SELECT [outbox_row], own.content_type, own.headers, own.payload
  FROM (SELECT found.*, [state] AS state
          FROM txbox_outbox AS found WHERE id = :message_id) AS own

-- name: outbox_count
SELECT own.state, NULL, count(*), 0
  FROM (SELECT [state] AS state
          FROM txbox_outbox
         WHERE (:message_id IS NULL OR id = :message_id)
           AND status IN ('pending', 'dead')
           AND [outbox_filter]) AS own
 WHERE own.state IN ({:rows.status})
 GROUP BY own.state

-- name: outbox_select
-- inbox_select for the outbox.
SELECT id, number, error_type FROM txbox_outbox
 WHERE (:message_id IS NULL OR id = :message_id)
   AND status IN ('pending', 'dead')
   AND [state] = :status
   AND [outbox_filter]
   AND number > :after
 ORDER BY number
 LIMIT :limit

-- name: outbox_retry
-- Grants a full new budget. available_at is set back to when it was staged, so that the row precedes the later rows of
-- its key again.
UPDATE txbox_outbox SET status = 'pending', attempts = 0, token = NULL, available_at = staged_at
 WHERE id IN ({:rows.message_id}) AND status IN ('pending', 'dead')

-- name: outbox_discard
-- For a row that is no longer pending, available_at is when it was given up.
UPDATE txbox_outbox SET status = 'discarded', token = NULL, available_at = [now]
 WHERE id IN ({:rows.message_id}) AND status IN ('pending', 'dead')

-- name: outbox_reroute
-- Grants a new budget, because the attempts were made on the old route. Rows that were tried are due at once.
UPDATE txbox_outbox SET status = 'pending', route = :to, attempts = 0, token = NULL,
       available_at = CASE WHEN attempts > 0 THEN staged_at ELSE available_at END
 WHERE id IN ({:rows.message_id}) AND status IN ('pending', 'dead')

-- fragment: quarantine_named
(:consumer IS NULL OR consumer = :consumer)
   AND (:message_id IS NULL OR message_id = :message_id)
   AND (:hash IS NULL OR substr(lower(hex(hash)), 1, length(:hash)) = lower(:hash))

-- fragment: quarantine_filter
(:topic IS NULL OR topic = :topic)
   AND (:type IS NULL OR type = :type)
   AND (:key IS NULL OR key = :key)
   AND (:older_than_s IS NULL OR received_at < [ago :older_than_s])

-- fragment: quarantine_row
consumer, message_id, hash, status, reason, topic, type, key, seen, received_at, updated_at, kept_bytes,
       key_id, content_type, headers, payload, origin

-- name: quarantine_list
-- Keyset pages, newest first. Rows have no number for their order of arrival, so the row itself is the page mark.
SELECT consumer, message_id, hash, status, reason, topic, type, key, seen, received_at, updated_at, kept_bytes,
       key_id
  FROM txbox_quarantine
 WHERE [quarantine_named]
   AND (:status IS NULL OR status = :status)
   AND [quarantine_filter]
   AND (:mark_hash IS NULL
        OR (received_at, hash, consumer, message_id)
           < (SELECT own.received_at, own.hash, own.consumer, own.message_id FROM txbox_quarantine AS own
               WHERE own.consumer = :mark_consumer AND own.message_id = :mark_id
                 AND own.hash = :mark_hash))
 ORDER BY received_at DESC, hash DESC, consumer DESC, message_id DESC
 LIMIT :limit

-- name: quarantine_show
SELECT [quarantine_row]
  FROM txbox_quarantine
 WHERE [quarantine_named]
 ORDER BY received_at
 LIMIT :limit

-- name: quarantine_count
SELECT status, consumer, count(*), 0 FROM txbox_quarantine
 WHERE status IN ({:rows.status})
   AND [quarantine_named]
   AND [quarantine_filter]
 GROUP BY status, consumer ORDER BY consumer

-- name: quarantine_select
-- In order of arrival.
SELECT consumer, message_id, hash, NULL, NULL FROM txbox_quarantine
 WHERE status = :status
   AND consumer = :consumer
   AND (:message_id IS NULL OR message_id = :message_id)
   AND (:hash IS NULL OR substr(lower(hex(hash)), 1, length(:hash)) = lower(:hash))
   AND [quarantine_filter]
   AND (:mark_hash IS NULL
        OR (received_at, hash, message_id)
           > (SELECT own.received_at, own.hash, own.message_id FROM txbox_quarantine AS own
               WHERE own.consumer = :consumer AND own.message_id = :mark_id
                 AND own.hash = :mark_hash))
 ORDER BY received_at, hash, message_id
 LIMIT :limit

-- name: quarantine_lock
SELECT [quarantine_row]
  FROM txbox_quarantine
 WHERE consumer = :consumer AND message_id = :message_id AND hash = :hash AND status = 'quarantined'

-- name: quarantine_end
-- Once decided, the content is no longer needed and is dropped; the row stays for its retention time.
UPDATE txbox_quarantine
   SET status = :status, payload = NULL, kept_bytes = 0, headers = NULL, updated_at = [now]
 WHERE [picked_quarantined]
   AND status = 'quarantined'

-- name: audit_list
-- Keyset pages, newest first.
SELECT number, recorded_at, actor, login, action, filter, affected, reason
  FROM txbox_audit
 WHERE (:before IS NULL OR number < :before)
 ORDER BY number DESC
 LIMIT :limit

-- name: audit
INSERT INTO txbox_audit (actor, action, filter, affected, reason)
VALUES (:actor, :action, :filter, :affected, :reason)

-- ---- admin/doctor ---------------------------------------------------------------------------------------------------
-- None of these reads a table through: names are found by jumps in an index, and rows are counted up to a limit.

-- fragment: age moment
(julianday('now') - julianday([moment])) * 86400.0

-- name: doctor_clock
-- It is this machine's.

-- name: doctor_settings
SELECT 'journal_mode', journal_mode FROM pragma_journal_mode
 UNION ALL
SELECT 'synchronous', CAST(synchronous AS TEXT) FROM pragma_synchronous

-- name: doctor_backend
-- There is no server, and so no pooler.

-- name: doctor_columns
SELECT own.name, part.name FROM sqlite_master AS own, pragma_table_info(own.name) AS part
 WHERE own.type IN ('table', 'view') AND own.name LIKE 'txbox\_%' ESCAPE '\'

-- name: doctor_indexes
SELECT own.tbl_name, own.name, 1 FROM sqlite_master AS own
 WHERE own.type = 'index' AND own.name LIKE 'txbox\_%' ESCAPE '\'

-- name: doctor_functions
-- There are none.

-- name: doctor_storage
-- Free pages are used again.

-- name: doctor_transactions
-- Nobody knows of the transactions of other processes.

-- name: doctor_standbys
-- There is one file.

-- name: doctor_consumers
-- Who has rows of a status, by a jump in the index for each of them, however many rows they have.
WITH RECURSIVE found(status, consumer) AS (
    SELECT asked.column1,
           (SELECT min(own.consumer) FROM txbox_inbox AS own
             WHERE own.status <> 'processed' AND own.status = asked.column1)
      FROM (VALUES ('pending'), ('failed'), ('processing'), ('dead')) AS asked
     UNION ALL
    SELECT last.status,
           (SELECT min(own.consumer) FROM txbox_inbox AS own
             WHERE own.status <> 'processed' AND own.status = last.status AND own.consumer > last.consumer)
      FROM found AS last WHERE last.consumer IS NOT NULL
)
SELECT status, consumer FROM found WHERE consumer IS NOT NULL LIMIT :limit

-- name: doctor_messages
-- Of the oldest of a consumer and status: topics and types, how many, since when, and how many are late.
SELECT own.topic, own.type, count(*), [age min(own.received_at)],
       count(CASE WHEN julianday(own.until) < julianday('now') - :late_s / 86400.0 THEN 1 END)
  FROM (SELECT topic, type, received_at,
               CASE WHEN status = 'processing' THEN lease_until WHEN has_payload THEN next_attempt_at END AS until
          FROM txbox_inbox INDEXED BY txbox_inbox_status
         WHERE status <> 'processed' AND status = :status AND consumer = :consumer
         ORDER BY arrival LIMIT :limit) AS own
 GROUP BY own.topic, own.type

-- name: doctor_routes
-- As doctor_consumers.
WITH RECURSIVE found(route) AS (
    SELECT (SELECT min(own.route) FROM txbox_outbox AS own WHERE own.status = 'pending')
     UNION ALL
    SELECT (SELECT min(own.route) FROM txbox_outbox AS own WHERE own.status = 'pending' AND own.route > last.route)
      FROM found AS last WHERE last.route IS NOT NULL
)
SELECT route FROM found WHERE route IS NOT NULL LIMIT :limit

-- name: doctor_outgoing
-- Of those of a route that are due first, as doctor_messages.
SELECT own.topic, own.type, own.cause_consumer, count(*), [age min(own.staged_at)],
       count(CASE WHEN own.token IS NULL AND own.attempts = 0
                   AND julianday(own.available_at) < julianday('now') - :late_s / 86400.0 THEN 1 END)
  FROM (SELECT topic, type, cause_consumer, staged_at, token, attempts, available_at
          FROM txbox_outbox INDEXED BY txbox_outbox_due WHERE status = 'pending' AND route = :route
         ORDER BY available_at, number LIMIT :limit) AS own
 GROUP BY own.topic, own.type, own.cause_consumer

-- name: doctor_outgoing_dead
SELECT count(*), [age min(own.staged_at)]
  FROM (SELECT staged_at FROM txbox_outbox WHERE status <> 'pending' AND status = 'dead'
         ORDER BY number LIMIT :limit) AS own

-- name: doctor_quarantined
SELECT own.consumer, count(*), [age min(own.received_at)]
  FROM (SELECT consumer, received_at FROM txbox_quarantine WHERE status = 'quarantined' LIMIT :limit) AS own
 GROUP BY own.consumer ORDER BY own.consumer

-- name: doctor_pruning
-- When pruning ran last, how old the tables are, and whether there is any row.
SELECT 'ran', [age updated_at] FROM txbox_job WHERE name = 'prune'
 UNION ALL
SELECT 'tables', [age min(applied_at)] FROM txbox_schema
 UNION ALL
SELECT 'rows', count(*) FROM (SELECT 1 FROM txbox_inbox LIMIT 1) AS own

-- ---- admin/found.py -------------------------------------------------------------------------------------------------

-- name: database_clock
SELECT [now]

-- name: explain_consumers
-- The consumers that have rows, from one to the next in the index of the key: no look at all rows.
WITH RECURSIVE known(consumer) AS (
       SELECT min(consumer) FROM txbox_inbox WHERE consumer > :after
        UNION ALL
       SELECT (SELECT min(next.consumer) FROM txbox_inbox AS next WHERE next.consumer > known.consumer)
         FROM known WHERE known.consumer IS NOT NULL)
SELECT consumer FROM known WHERE consumer IS NOT NULL LIMIT :limit

-- name: explain_aside
-- The same of the quarantine.
WITH RECURSIVE known(consumer) AS (
       SELECT min(consumer) FROM txbox_quarantine WHERE consumer > :after
        UNION ALL
       SELECT (SELECT min(next.consumer) FROM txbox_quarantine AS next WHERE next.consumer > known.consumer)
         FROM known WHERE known.consumer IS NOT NULL)
SELECT consumer FROM known WHERE consumer IS NOT NULL LIMIT :limit

-- name: explain_inbox
-- Which of these keys there are. CROSS JOIN and INDEXED BY: with statistics of a small table SQLite 3.46 scans it.
SELECT own.consumer, own.message_id, own.status, own.topic
  FROM (VALUES {(:rows.consumer, :rows.message_id)}) AS m
  CROSS JOIN txbox_inbox AS own INDEXED BY sqlite_autoindex_txbox_inbox_1
    ON own.consumer = m.column1 AND own.message_id = m.column2

-- name: explain_outbox
-- Which of these outgoing messages there are.
SELECT id, [state], topic FROM txbox_outbox WHERE id IN ({:rows.message_id})

-- name: explain_quarantine
SELECT [quarantine_row]
  FROM txbox_quarantine
 WHERE consumer = :consumer AND message_id = :message_id
 ORDER BY received_at
 LIMIT :limit

-- name: explain_holder
-- Whoever writes holds the whole file, and SQLite does not say who that is.

-- name: explain_writers
-- As explain_holder.

-- name: explain_locked
-- As explain_holder.

-- ---- waits.py -------------------------------------------------------------------------------------------------------

-- name: waits_order
-- For rows that have not run: the first row of their key that they wait for.
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
-- For rows that have not run: their version, the one processed last, and the lowest one they wait for.
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
-- Many messages in one statement, in the caller's transaction; `number` is the order of insertion.
-- A repeated run with the same cause stages the same ids, and changes nothing.
INSERT INTO txbox_outbox (id, topic, type, key, content_type, headers, payload, key_id, cause_consumer, cause_id,
                          available_at, route)
VALUES {(:rows.id, :rows.topic, :rows.type, :rows.key, :rows.content_type, :rows.headers, :rows.payload, :key_id,
         :rows.cause_consumer, :rows.cause_id,
         [in :rows.delay_s], :rows.route)}
ON CONFLICT (id) DO NOTHING

-- name: stage_notify
-- No notifications here: relays poll.

-- name: stage_lock
-- One writer at a time, so numbers are committed in order.

-- fragment: page route topics
SELECT * FROM (SELECT id, number, topic, key, available_at, coalesce(length(payload), 0) AS payload_bytes, type
                         FROM txbox_outbox
                        WHERE status = 'pending' AND route = [route] AND available_at <= [now]
                          AND (available_at, number) > (coalesce(:after_at, ''), :after_number)
                          AND [topics]
                        ORDER BY available_at, number
                        LIMIT :limit)

-- name: relay_page
-- What may be due on one route, or was staged without one, oldest first, from where the last look ended.
SELECT id, number, topic, key, available_at, payload_bytes, type
  FROM ([page :route, (:whole OR (topic IN ({:rows.topic})) = :named)]
        UNION ALL
        [page '', (topic IN ({:rows.topic})) = :named]) AS due
 ORDER BY available_at, number
 LIMIT :limit

-- name: relay_heads
-- For each key and type, the first row that must not be overtaken, and how many there are up to :last. A row staged
-- with a delay counts once the delay is over. Any other counts even if it is not due yet by this transaction's clock,
-- which stopped when the transaction began.
SELECT topic, key, type, min(number), count(*)
  FROM txbox_outbox
 WHERE status = 'pending' AND key IS NOT NULL AND number <= :last
   AND (route, topic, key) IN (VALUES {(:rows.route, :rows.topic, :rows.key)})
   AND (token IS NOT NULL OR attempts > 0 OR available_at = staged_at
        OR available_at <= [now])
 GROUP BY topic, key, type

-- name: relay_lease
UPDATE txbox_outbox
   SET token = :token, available_at = [in :lease_s]
 WHERE id IN ({:rows.id}) AND status = 'pending' AND available_at <= [now]
RETURNING id, number, topic, type, key, content_type, headers, payload, key_id, staged_at, attempts

-- name: relay_release
-- Fenced. For rows that were not sent through no fault of their own; they keep their place ahead of later ones.
UPDATE txbox_outbox
   SET token = NULL, available_at = staged_at
 WHERE id IN ({:rows.id}) AND token = :token AND status = 'pending'

-- name: relay_sent
DELETE FROM txbox_outbox WHERE id IN ({:rows.id}) AND token = :token AND status = 'pending'

-- name: relay_kept
-- relay_sent for rows that are kept for a while.
UPDATE txbox_outbox
   SET status = 'sent', token = NULL, sent_at = [now], error_type = NULL, error = NULL
 WHERE id IN ({:rows.id}) AND token = :token AND status = 'pending'

-- name: relay_failed
UPDATE txbox_outbox
   SET status = :status, attempts = attempts + 1, token = NULL, error_type = :error_type, error = :error,
       available_at = [in :delay_s]
 WHERE id = :id AND token = :token AND status = 'pending'

-- name: relay_left
-- What is due or leased on one route, or was staged without one.
SELECT DISTINCT topic, type FROM txbox_outbox
 WHERE status = 'pending' AND (token IS NOT NULL OR available_at <= [now])
   AND route IN (:route, '')
   AND ((:whole AND route = :route) OR (topic IN ({:rows.topic})) = :named)

-- name: relay_strays
-- Rows for consumers on this database that are not on this App's own route, and rows without any route.
SELECT DISTINCT route, topic, type, cause_consumer FROM txbox_outbox
 WHERE status = 'pending' AND (route = '' OR (route >= 'local' AND route < 'local;')) AND route <> :route

-- name: relay_adopt
UPDATE txbox_outbox SET route = :route
 WHERE number IN (SELECT number FROM txbox_outbox
                   WHERE status = 'pending' AND token IS NULL AND route = :from_route AND topic = :topic
                     AND type IS :type AND cause_consumer IS :cause_consumer
                   LIMIT :limit)

-- ---- activity.py, pauses.py -----------------------------------------------------------------------------------------

-- name: activity_write
-- What a process has counted in these minutes so far takes the place of what it wrote before: writing again after a
-- lost answer doubles nothing. No other process writes these rows.
INSERT INTO txbox_activity (minute, kind, name, worker, received, processed, duplicate, deferred, failed, dead,
                            quarantined, latency, run, oldest_s)
VALUES {(:rows.minute, :rows.kind, :rows.name, :worker, :rows.received, :rows.processed, :rows.duplicate,
         :rows.deferred, :rows.failed, :rows.dead, :rows.quarantined, :rows.latency, :rows.run, :rows.oldest_s)}
ON CONFLICT (minute, kind, name, worker) DO UPDATE
   SET received = excluded.received, processed = excluded.processed, duplicate = excluded.duplicate,
       deferred = excluded.deferred, failed = excluded.failed, dead = excluded.dead,
       quarantined = excluded.quarantined, latency = excluded.latency, run = excluded.run,
       oldest_s = excluded.oldest_s

-- fragment: counted
minute, kind, name, received, processed, duplicate, deferred, failed, dead, quarantined, latency, run, oldest_s

-- name: activity_read
SELECT [counted] FROM txbox_activity WHERE minute >= :minute ORDER BY minute

-- name: activity_minutes
-- Minutes of which several processes have rows yet.
SELECT DISTINCT minute FROM txbox_activity WHERE minute < :before AND worker <> '' ORDER BY minute LIMIT :limit

-- name: activity_of
SELECT [counted] FROM txbox_activity WHERE minute IN ({:rows.minute})

-- name: activity_folded
DELETE FROM txbox_activity WHERE minute IN ({:rows.minute}) AND worker <> ''

-- name: activity_prune
DELETE FROM txbox_activity WHERE minute < :before

-- name: clock
-- In seconds since 1970.
SELECT [epoch 'now']

-- name: outbox_ages
-- How long the first row that is due has been so, of each route; one index probe each.
SELECT route, [epoch 'now'] - [epoch min(available_at)]
  FROM txbox_outbox WHERE status = 'pending' AND route IN ({:rows.route})
 GROUP BY route

-- name: worker_write
INSERT INTO txbox_worker (worker, kind, host, pid, version, app, consumers, sources, routes, lanes, state, busy, leases,
                          in_flight)
VALUES (:worker, :kind, :host, :pid, :version, :app, :consumers, :sources, :routes, :lanes, :state, :busy, :leases,
        :in_flight)
ON CONFLICT (worker) DO UPDATE
   SET state = excluded.state, busy = excluded.busy, leases = excluded.leases, in_flight = excluded.in_flight,
       seen_at = [now]

-- name: worker_gone
DELETE FROM txbox_worker WHERE worker = :worker

-- name: workers
SELECT worker, kind, host, pid, version, app, consumers, sources, routes, lanes, state, busy, leases, in_flight,
       started_at, seen_at, [epoch 'now'] - [epoch seen_at]
  FROM txbox_worker ORDER BY started_at, worker

-- name: workers_prune
DELETE FROM txbox_worker WHERE seen_at < [ago :silent_s]

-- name: pauses
-- A row at least, which tells the time.
SELECT [epoch 'now'], paused.consumer, paused.actor, paused.reason, paused.paused_at
  FROM (SELECT 1) AS always LEFT JOIN txbox_pause AS paused ON true ORDER BY paused.consumer

-- name: pause
INSERT INTO txbox_pause (consumer, actor, reason) VALUES (:consumer, :actor, :reason)

-- name: resume
DELETE FROM txbox_pause WHERE consumer = :consumer
