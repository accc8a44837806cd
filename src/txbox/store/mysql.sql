-- txbox's statements for MySQL 8.0.19 and MariaDB 10.6 and later: the counterparts of postgresql.sql, name by name.
-- `:name` is a parameter; a region in braces is repeated for each row, and `:rows.name` is a column of that row.
-- A query without a body has nothing to do on this database.
-- Nothing can be refused at COMMIT, and no statement names the rows it touched (MySQL has no RETURNING). So a claim
-- writes `processing` with a token that classify reads back, and complete makes it `processed` inside a savepoint
-- with a random name. Whoever leaves the transaction loses the savepoint.
-- Where PostgreSQL picks and takes in one statement, here one locks and reads, `then` another writes.
-- Ids are VARBINARY and are converted to text in each list of columns. UPDATE assigns from left to right here, unless
-- sql_mode says otherwise, so a column that others are computed from is assigned after them.
-- `[name x]` inserts the text of a fragment, with x as its parameter.
-- Each section has the queries of the module it names.

-- fragment: text column
CONVERT([column] USING utf8mb4)

-- fragment: picked table index
-- A list of pairs is a derived table: for `(a, b) IN (…)` with a few hundred pairs, MariaDB stops using the key and
-- locks the whole table. The comment contains a word that only MySQL reads, and requires. FORCE INDEX: joined, too, a
-- small table may be read through, and then a row that a handler holds is waited for.
(WITH m (consumer, message_id) AS (VALUES {/*!80019 ROW*/ (:rows.consumer, :rows.message_id)})
        SELECT consumer, message_id FROM m) AS picked
       STRAIGHT_JOIN [table] AS own FORCE INDEX ([index])
          ON own.consumer = picked.consumer AND own.message_id = picked.message_id

-- ---- claims.py ------------------------------------------------------------------------------------------------------

-- name: claim
-- Not INSERT IGNORE, which truncates. The row count is not used either, because it depends on the client's flags.
INSERT INTO txbox_inbox (consumer, message_id, status, token, topic, type, `key`, sequence, payload_hash)
VALUES {(:consumer, :rows.message_id, 'processing', :token, :rows.topic, :rows.type, :rows.key, :rows.sequence,
         :rows.payload_hash)}
ON DUPLICATE KEY UPDATE consumer = txbox_inbox.consumer

-- name: claim_single
-- A single message is claimed like many.

-- name: claim_kept
-- claim for consumers that keep the payload of processed messages.
INSERT INTO txbox_inbox (consumer, message_id, status, token, topic, type, `key`, sequence, payload_hash,
                         content_type, headers, origin, payload, has_payload, key_id)
VALUES {(:consumer, :rows.message_id, 'processing', :token, :rows.topic, :rows.type, :rows.key, :rows.sequence,
         :rows.payload_hash, :rows.content_type, :rows.headers, :rows.origin, :rows.payload, TRUE, :key_id)}
ON DUPLICATE KEY UPDATE consumer = txbox_inbox.consumer

-- name: claim_leased
-- The fence: a worker that lost its lease to another matches no row. What complete overwrites is left alone here,
-- so that a row committed by a broken handler still has its payload.
UPDATE txbox_inbox
   SET starts = GREATEST(starts - 1, 0), token = :token, lease_until = NULL, next_attempt_at = NULL,
       updated_at = UTC_TIMESTAMP(6)
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})
   AND token = :lease AND status = 'processing'

-- name: claim_replay
-- A replay works on top of a processed row: if it fails, the rollback leaves the row `processed` as it was.
UPDATE txbox_inbox
   SET status = 'processing', token = :token, lease_until = NULL, updated_at = UTC_TIMESTAMP(6)
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id}) AND status = 'processed'

-- name: claim_rehearsal
-- No COMMIT can be refused here, so nothing is rehearsed.

-- name: rehearse_constraints
-- As claim_rehearsal.

-- name: rehearse_references
-- As claim_rehearsal.

-- name: bound_lock_timeout
-- A session setting in whole seconds, rounded up, because a limit is at least a millisecond.
SET @txbox_lock_wait = CAST(COALESCE(@txbox_lock_wait, @@SESSION.innodb_lock_wait_timeout) AS UNSIGNED),
    SESSION innodb_lock_wait_timeout = (CAST(:lock_timeout_ms AS UNSIGNED) + 999) DIV 1000

-- name: restore_lock_timeout
-- The limit was for the claim only; the handler gets its setting back. The variable belongs to the session:
-- whatever was rolled back in between, the first value saved is the original one.
SET SESSION innodb_lock_wait_timeout = CAST(COALESCE(@txbox_lock_wait, @@SESSION.innodb_lock_wait_timeout) AS UNSIGNED),
    @txbox_lock_wait = NULL

-- name: bound_batch
-- Not needed: InnoDB detects deadlocks at once. Its timeout only has whole seconds anyway.

-- name: arm
-- From here on, whatever ends the transaction (COMMIT, ROLLBACK, DDL, a deadlock) also ends the savepoint.
SAVEPOINT [canary]

-- name: savepoint_claim
-- A failed statement leaves the transaction usable, so close can be used instead.

-- name: rollback_to_claim

-- name: close
-- Fails if this is no longer the claiming transaction.
RELEASE SAVEPOINT [canary]

-- name: complete
-- On other databases the claim has already written this.
UPDATE txbox_inbox
   SET status = 'processed', processed_at = COALESCE(processed_at, UTC_TIMESTAMP(6)), updated_at = UTC_TIMESTAMP(6),
       token = NULL, error_type = NULL, error = NULL, fingerprint = NULL,
       content_type = CASE WHEN :keep THEN content_type END,
       headers = CASE WHEN :keep THEN headers END,
       origin = CASE WHEN :keep THEN origin END,
       payload = CASE WHEN :keep THEN payload END,
       has_payload = :keep AND has_payload
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})
   AND token = :token AND status = 'processing'

-- name: duplicates
-- classify reads them along with the others.

-- ---- inbox.py -------------------------------------------------------------------------------------------------------

-- name: classify
-- A locking read shows who won even under REPEATABLE READ. MariaDB does not have FOR SHARE.
SELECT [text message_id], status, payload_hash, has_payload, attempts, starts,
       COALESCE(next_attempt_at <= UTC_TIMESTAMP(6), TRUE) AS due, token, lease_until IS NOT NULL AS leased
  FROM txbox_inbox
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})
  LOCK IN SHARE MODE

-- name: accept
-- The token stays in the row; classify reads it back to tell what this call inserted.
INSERT INTO txbox_inbox (consumer, message_id, status, token, topic, type, `key`, sequence, processed_at, payload_hash)
VALUES {(:consumer, :rows.message_id, 'processed', :token, :rows.topic, :rows.type, :rows.key, :rows.sequence,
         UTC_TIMESTAMP(6), :rows.payload_hash)}
ON DUPLICATE KEY UPDATE consumer = txbox_inbox.consumer

-- name: savepoint
-- Not needed: a lock timeout rolls back only its statement, and a deadlock removes every savepoint.

-- name: release_savepoint

-- name: rollback_to_savepoint

-- name: store
-- One row with payload and key; the second of two writers changes nothing.
INSERT INTO txbox_inbox (consumer, message_id, status, token, topic, type, `key`, sequence, payload_hash,
                         next_attempt_at, content_type, headers, origin, payload, has_payload, key_id)
VALUES {(:consumer, :rows.message_id, 'pending', :token, :rows.topic, :rows.type, :rows.key, :rows.sequence,
         :rows.payload_hash, UTC_TIMESTAMP(6) + INTERVAL :delay_s SECOND, :rows.content_type, :rows.headers,
         :rows.origin, :rows.payload, TRUE, :key_id)}
ON DUPLICATE KEY UPDATE consumer = txbox_inbox.consumer

-- name: return_payload
-- A redelivery restores the missing payload of an unfinished row; from then on the table owns it.
UPDATE txbox_inbox
   SET content_type = :content_type, headers = :headers, origin = :origin,
       payload = :payload, has_payload = TRUE, key_id = :key_id, payload_hash = :payload_hash,
       next_attempt_at = COALESCE(next_attempt_at, UTC_TIMESTAMP(6)), updated_at = UTC_TIMESTAMP(6)
 WHERE consumer = :consumer AND message_id = :message_id
   AND status IN ('pending', 'failed') AND NOT has_payload

-- name: quarantine
-- The same message again only increments the counter.
INSERT INTO txbox_quarantine (consumer, message_id, hash, reason, topic, type, `key`,
                              content_type, headers, origin, payload, key_id, kept_bytes)
VALUES (:consumer, :message_id, :hash, :reason, :topic, :type, :key,
        :content_type, :headers, :origin, :payload, :key_id, COALESCE(LENGTH(:payload), 0))
ON DUPLICATE KEY UPDATE seen = txbox_quarantine.seen + 1, updated_at = UTC_TIMESTAMP(6)

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
-- Columns are assigned after those that are computed from them.
next_attempt_at = CASE WHEN :final OR attempts + 1 >= :max_attempts
                                OR received_at < UTC_TIMESTAMP(6) - INTERVAL :max_age_s SECOND
                              THEN NULL ELSE UTC_TIMESTAMP(6) + INTERVAL :delay_s SECOND END,
       status = CASE WHEN :final OR attempts + 1 >= :max_attempts
                                OR received_at < UTC_TIMESTAMP(6) - INTERVAL :max_age_s SECOND
                     THEN 'dead' ELSE 'failed' END,
       attempts = attempts + 1,
       lease_until = NULL, token = NULL, updated_at = UTC_TIMESTAMP(6),
       error_type = :error_type, error = :error, fingerprint = :fingerprint,
       content_type = :content_type, headers = :headers, origin = :origin,
       payload = :payload, has_payload = :has_payload, key_id = :key_id

-- name: record_update
-- Overwrites only a failed row with the same payload, or a row that is ours by its token.
UPDATE txbox_inbox
   SET starts = CASE WHEN status = 'processing' THEN GREATEST(starts - 1, 0) ELSE starts END, [failing]
 WHERE consumer = :consumer AND message_id = :message_id
   AND ((status = 'failed' AND payload_hash <=> :payload_hash) OR (status = 'processing' AND token = :token))

-- name: record_insert
-- If the row is somebody else's, this is a duplicate-key error.
INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, `key`, sequence, payload_hash, attempts,
                         next_attempt_at, error_type, error, fingerprint,
                         content_type, headers, origin, payload, has_payload, key_id)
VALUES (:consumer, :message_id, CASE WHEN :final OR 1 >= :max_attempts THEN 'dead' ELSE 'failed' END,
        :topic, :type, :key, :sequence, :payload_hash, 1,
        CASE WHEN :final OR 1 >= :max_attempts THEN NULL ELSE UTC_TIMESTAMP(6) + INTERVAL :delay_s SECOND END,
        :error_type, :error, :fingerprint,
        :content_type, :headers, :origin, :payload, :has_payload, :key_id)

-- name: record_own
-- Overwrites the row this transaction claimed, identified by its token.
UPDATE txbox_inbox
   SET processed_at = NULL, [failing]
 WHERE consumer = :consumer AND message_id = :message_id AND status = 'processing' AND token = :token

-- ---- leases.py ------------------------------------------------------------------------------------------------------

-- fragment: leased starts
[text message_id], [text topic], [text type], [text `key`], sequence, received_at, payload_hash, attempts, [starts],
       content_type, headers, origin, payload, has_payload, key_id, arrival

-- fragment: first status consumer key order
-- One index probe. If the key comes from another row, it must be ordered by all its columns: by the last alone, MySQL
-- reads the whole key and sorts it. If the key is given, MariaDB does so unless it is ordered by the last alone.
(SELECT head.arrival FROM txbox_inbox AS head FORCE INDEX (txbox_inbox_status)
                     WHERE head.status = '[status]' AND head.consumer = [consumer] AND head.`key` = [key]
                     ORDER BY [order] LIMIT 1)

-- fragment: head consumer key none order
-- Where the first unfinished row of a key is; those behind it wait.
LEAST(COALESCE([first pending, [consumer], [key], [order]], [none]),
      COALESCE([first failed, [consumer], [key], [order]], [none]),
      COALESCE([first processing, [consumer], [key], [order]], [none]),
      COALESCE(CASE WHEN :dead_blocks THEN [first dead, [consumer], [key], [order]] END, [none]))

-- name: store_leased
-- An INSERT cannot report what it wrote here: use store, then lease_stored.

-- name: lease then lease_take
-- In the order of the index txbox_inbox_due, so the cost does not depend on how much waits behind. The index is
-- forced, because with stale statistics the optimizer would rather sort. A leased row has no `next_attempt_at`, so it
-- is not even scanned. `starts` is read as lease_take will leave it.
SELECT [leased starts + 1]
  FROM txbox_inbox FORCE INDEX (txbox_inbox_due)
 WHERE consumer = :consumer AND has_payload = TRUE AND starts = 0 AND next_attempt_at <= UTC_TIMESTAMP(6)
   AND status IN ('pending', 'failed')
 ORDER BY next_attempt_at, arrival
 LIMIT :limit
   FOR UPDATE SKIP LOCKED

-- name: lease_suspect then lease_take
-- A row whose last run never ended is taken alone, so that a message which kills its process does not take others
-- with it. There are few of these, so one statement serves all consumers; ordered ones take heads only.
SELECT [leased starts + 1]
  FROM txbox_inbox AS own FORCE INDEX (txbox_inbox_due)
 WHERE consumer = :consumer AND has_payload = TRUE AND starts > 0 AND next_attempt_at <= UTC_TIMESTAMP(6)
   AND status IN ('pending', 'failed')
   AND (NOT :heads_only OR own.`key` IS NULL
        OR own.arrival <= [head own.consumer, own.`key`, own.arrival, head.status,head.consumer,head.`key`,head.arrival])
 ORDER BY starts, next_attempt_at, arrival
 LIMIT 1
   FOR UPDATE SKIP LOCKED

-- name: lease_ordered then lease_take
-- lease, but only the first unfinished row of each key.

SELECT [leased starts + 1]
  FROM txbox_inbox AS own FORCE INDEX (txbox_inbox_due)
 WHERE consumer = :consumer AND has_payload = TRUE AND starts = 0 AND next_attempt_at <= UTC_TIMESTAMP(6)
   AND status IN ('pending', 'failed')
   AND (own.`key` IS NULL
        OR own.arrival <= [head own.consumer, own.`key`, own.arrival, head.status,head.consumer,head.`key`,head.arrival])
 ORDER BY next_attempt_at, arrival
 LIMIT :limit
   FOR UPDATE SKIP LOCKED

-- name: lease_next then lease_take
-- lease_ordered for a single key whose turn it is. Used after running the predecessor, to avoid looking at other
-- keys, or at what waits behind this row.
SELECT [leased starts + 1]
  FROM txbox_inbox AS own FORCE INDEX (txbox_inbox_arrival)
 WHERE own.arrival = [head :consumer, :key, 9223372036854775807, head.arrival]
   AND consumer = :consumer AND status IN ('pending', 'failed') AND has_payload
   AND next_attempt_at <= UTC_TIMESTAMP(6) AND starts = 0
   FOR UPDATE SKIP LOCKED

-- name: lease_stored then lease_take
-- lease for rows that the caller stored in this transaction.
SELECT [leased starts + 1]
  FROM txbox_inbox
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id}) AND status = 'pending'
   FOR UPDATE

-- name: lease_take
-- Takes rows that lease or lease_stored locked in this transaction.
UPDATE txbox_inbox
   SET status = 'processing', token = :token, starts = starts + 1, updated_at = UTC_TIMESTAMP(6),
       lease_until = UTC_TIMESTAMP(6) + INTERVAL :lease_s SECOND, next_attempt_at = NULL
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})

-- name: heartbeat then heartbeat_take
-- SKIP LOCKED: a row inside its handler's transaction needs no heartbeat, and waiting for it would block.
-- A separate statement, because inside an UPDATE MariaDB waits for the rows it is told to skip.
SELECT [text message_id] FROM txbox_inbox
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})
   AND token = :token AND status = 'processing'
   FOR UPDATE SKIP LOCKED

-- name: heartbeat_take
-- Extends rows that heartbeat locked in this transaction.
UPDATE txbox_inbox SET lease_until = UTC_TIMESTAMP(6) + INTERVAL :lease_s SECOND
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})

-- name: release
-- Fenced. Takes the start back, because the message is not to blame for how the run ended.
UPDATE txbox_inbox
   SET status = CASE WHEN attempts > 0 THEN 'failed' ELSE 'pending' END,
       starts = GREATEST(starts - 1, 0), lease_until = NULL, token = NULL, updated_at = UTC_TIMESTAMP(6),
       next_attempt_at = UTC_TIMESTAMP(6) + INTERVAL :delay_s SECOND
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})
   AND token = :token AND status = 'processing'

-- name: rescue then rescue_take
-- The start stays counted, because its run never ended. SKIP LOCKED: a locked row is alive. The last columns are
-- as rescue_take will leave them.
SELECT [text consumer], [text message_id], [text topic], starts,
       CASE WHEN starts >= :max_starts THEN 'dead' ELSE 'failed' END, attempts,
       CASE WHEN starts >= :max_starts THEN 'KilledItsProcess' ELSE 'LeaseExpired' END,
       CASE WHEN starts >= :max_starts THEN CONCAT('killed its process: ', starts, ' runs never ended')
            ELSE 'lease expired' END
  FROM txbox_inbox
 WHERE status = 'processing' AND lease_until <= UTC_TIMESTAMP(6)
   AND (:consumer IS NULL OR consumer = :consumer)
 ORDER BY lease_until
 LIMIT :limit
   FOR UPDATE SKIP LOCKED

-- name: rescue_take

UPDATE [picked txbox_inbox, PRIMARY]
   SET own.status = CASE WHEN own.starts >= :max_starts THEN 'dead' ELSE 'failed' END,
       own.lease_until = NULL, own.token = NULL, own.updated_at = UTC_TIMESTAMP(6),
       own.next_attempt_at = CASE WHEN own.starts < :max_starts THEN UTC_TIMESTAMP(6) END,
       own.error_type = CASE WHEN own.starts >= :max_starts THEN 'KilledItsProcess' ELSE 'LeaseExpired' END,
       own.error = CASE WHEN own.starts >= :max_starts
                        THEN CONCAT('killed its process: ', own.starts, ' runs never ended') ELSE 'lease expired' END,
       own.fingerprint = NULL

-- name: rescue_broken
-- A committed processing row without a lease means that its handler ended the transaction, and it is unknown which
-- of its writes persisted. SKIP LOCKED: an uncommitted one is a handler at work.
UPDATE (SELECT consumer, message_id FROM txbox_inbox
         WHERE status = 'processing' AND lease_until IS NULL
           AND (:consumer IS NULL OR consumer = :consumer)
         LIMIT :limit
           FOR UPDATE SKIP LOCKED) AS broken
       STRAIGHT_JOIN txbox_inbox AS own FORCE INDEX (PRIMARY)
          ON own.consumer = broken.consumer AND own.message_id = broken.message_id
   SET own.status = 'dead', own.token = NULL, own.next_attempt_at = NULL, own.updated_at = UTC_TIMESTAMP(6),
       own.error_type = 'TransactionBroken',
       own.error = 'the handler ended the transaction of its message; what it wrote is not known',
       own.fingerprint = NULL

-- ---- order.py -------------------------------------------------------------------------------------------------------

-- name: order_waiting
-- The keys of a claim with earlier messages unfinished; later messages of these keys wait in the table.
SELECT DISTINCT [text `key`] FROM txbox_inbox
 WHERE consumer = :consumer AND `key` IN ({:rows.key})
   AND (status IN ('pending', 'failed', 'processing') OR (:dead_blocks AND status = 'dead'))
   AND NOT (token <=> :token)

-- name: sequence_state
-- The version processed last, whether an earlier one is being processed from the table, and whether this one has
-- waited long enough. Takes no locks: a version whose predecessor has not committed yet is stored, rather than
-- waiting here while another handler runs.
SELECT (SELECT last FROM txbox_sequence WHERE consumer = :consumer AND `key` = :key),
       EXISTS (SELECT 1 FROM txbox_inbox
                WHERE consumer = :consumer AND `key` = :key
                  AND status IN ('pending', 'failed', 'processing') AND sequence < :sequence),
       EXISTS (SELECT 1 FROM txbox_inbox
                WHERE consumer = :consumer AND message_id = :message_id
                  AND received_at < UTC_TIMESTAMP(6) - INTERVAL :wait_s SECOND)

-- name: sequence_done
-- Never goes back: a late version leaves the higher one in place.
INSERT INTO txbox_sequence (consumer, `key`, last) VALUES (:consumer, :key, :sequence)
ON DUPLICATE KEY UPDATE last = GREATEST(txbox_sequence.last, VALUES(last)), updated_at = UTC_TIMESTAMP(6)

-- name: sequence_next
-- Wakes the next version, which need not wait until it would be looked at again.
UPDATE txbox_inbox SET next_attempt_at = UTC_TIMESTAMP(6)
 WHERE consumer = :consumer AND `key` = :key AND status = 'pending' AND sequence = :sequence + 1

-- ---- jobs.py --------------------------------------------------------------------------------------------------------

-- name: job_create
INSERT INTO txbox_job (name) VALUES (:name) ON DUPLICATE KEY UPDATE name = txbox_job.name

-- name: job_acquire
-- One holder at a time, by the database's clock; the holder renews with the same token.
UPDATE txbox_job
   SET token = :token, updated_at = UTC_TIMESTAMP(6), lease_until = UTC_TIMESTAMP(6) + INTERVAL :lease_s SECOND
 WHERE name = :name AND (lease_until IS NULL OR lease_until <= UTC_TIMESTAMP(6) OR token = :token)

-- name: job_release
UPDATE txbox_job SET token = NULL, lease_until = NULL, updated_at = UTC_TIMESTAMP(6)
 WHERE name = :name AND token = :token

-- name: job_state
SELECT state FROM txbox_job WHERE name = :name

-- name: job_save
-- Fenced by the lease: a reader that lost it cannot move the progress back.
UPDATE txbox_job SET state = :state, updated_at = UTC_TIMESTAMP(6)
 WHERE name = :name AND token = :token

-- name: anchor_history
-- Changes when commits may be missing: another server, or a restored table.
SELECT CONCAT_WS('/', @@hostname, @@port, @@server_id, own.create_time)
  FROM information_schema.tables own
 WHERE own.table_schema = DATABASE() AND own.table_name = 'txbox_job'

-- name: anchor_read
SELECT name, CAST(state AS SIGNED) FROM txbox_job WHERE name IN ({:rows.name})

-- name: anchor_advance
-- Never goes back, whoever writes. Always in the same order, so that two writers do not deadlock.
INSERT INTO txbox_job (name, state) VALUES {(:rows.name, :rows.position)}
ON DUPLICATE KEY UPDATE
    state = GREATEST(CAST(txbox_job.state AS SIGNED), CAST(VALUES(state) AS SIGNED)), updated_at = UTC_TIMESTAMP(6)

-- name: prune then prune_take
-- Oldest completion first. SKIP LOCKED: a redelivery that is looking at a row goes first.
SELECT [text consumer], [text message_id]
  FROM txbox_inbox
 WHERE status IN ('processed', 'discarded')
   AND processed_at < UTC_TIMESTAMP(6) - INTERVAL :older_than_s SECOND
   AND (:consumer IS NULL OR consumer = :consumer)
 ORDER BY processed_at
 LIMIT :limit
   FOR UPDATE SKIP LOCKED

-- name: prune_blocks
-- prune already finds the rows in the best order here.

-- name: prune_begin
-- A transaction cannot choose its durability here.

-- name: prune_take
-- Deletes rows that prune locked in this transaction.
DELETE own FROM [picked txbox_inbox, PRIMARY]

-- name: prune_attempts
DELETE own FROM [picked txbox_attempt, txbox_attempt_message]

-- name: prunable
SELECT count(*) FROM txbox_inbox
 WHERE status IN ('processed', 'discarded')
   AND processed_at < UTC_TIMESTAMP(6) - INTERVAL :older_than_s SECOND
   AND (:consumer IS NULL OR consumer = :consumer)

-- name: prune_orphans
-- There are no partitions here.

-- fragment: outgoing_past
status IN ('sent', 'discarded')
   AND ((status = 'sent' AND sent_at < UTC_TIMESTAMP(6) - INTERVAL :sent_s SECOND)
        OR (status = 'discarded' AND available_at < UTC_TIMESTAMP(6) - INTERVAL :discarded_s SECOND))

-- name: prune_outbox
DELETE own FROM (SELECT id FROM txbox_outbox
                  WHERE [outgoing_past]
                  LIMIT :limit
                    FOR UPDATE SKIP LOCKED) AS old
       STRAIGHT_JOIN txbox_outbox AS own FORCE INDEX (PRIMARY) ON own.id = old.id

-- name: prune_quarantine
-- Only what was accepted or discarded, and what an edit has replaced once its message is gone; what waits for a
-- decision is never deleted.
DELETE FROM txbox_quarantine
 WHERE status <> 'quarantined' AND updated_at < UTC_TIMESTAMP(6) - INTERVAL :older_than_s SECOND
   AND (status <> 'replaced'
        OR NOT EXISTS (SELECT 1 FROM txbox_inbox AS edited
                        WHERE edited.consumer = txbox_quarantine.consumer AND edited.message_id = txbox_quarantine.message_id))
 LIMIT :limit

-- name: prunable_quarantine
SELECT count(*) FROM txbox_quarantine
 WHERE status <> 'quarantined' AND updated_at < UTC_TIMESTAMP(6) - INTERVAL :older_than_s SECOND
   AND (status <> 'replaced'
        OR NOT EXISTS (SELECT 1 FROM txbox_inbox AS edited
                        WHERE edited.consumer = txbox_quarantine.consumer AND edited.message_id = txbox_quarantine.message_id))

-- name: quarantine_bytes
SELECT CAST(COALESCE(SUM(kept_bytes), 0) AS SIGNED) FROM txbox_quarantine WHERE kept_bytes > 0

-- name: quarantine_oldest
SELECT [text consumer], [text message_id], hash, kept_bytes FROM txbox_quarantine
 WHERE kept_bytes > 0
 ORDER BY received_at
 LIMIT :limit
   FOR UPDATE SKIP LOCKED

-- fragment: picked_quarantined
(WITH m (consumer, message_id, hash) AS (VALUES {/*!80019 ROW*/ (:rows.consumer, :rows.message_id, :rows.hash)})
        SELECT consumer, message_id, hash FROM m) AS picked
       STRAIGHT_JOIN txbox_quarantine AS own FORCE INDEX (PRIMARY)
          ON own.consumer = picked.consumer AND own.message_id = picked.message_id AND own.hash = picked.hash

-- name: drop_quarantined
UPDATE [picked_quarantined]
   SET own.payload = NULL, own.kept_bytes = 0

-- name: prunable_outbox
SELECT count(*) FROM txbox_outbox
 WHERE [outgoing_past]

-- name: second_of_day
SELECT TIME_TO_SEC(UTC_TIME())

-- name: drop_payloads
-- For consumers that keep payloads of processed messages for a limited time; the key and the hash stay.
UPDATE (SELECT consumer, message_id FROM txbox_inbox
         WHERE consumer = :consumer AND status = 'processed' AND has_payload
           AND processed_at < UTC_TIMESTAMP(6) - INTERVAL :older_than_s SECOND
         LIMIT :limit
           FOR UPDATE SKIP LOCKED) AS old
       STRAIGHT_JOIN txbox_inbox AS own FORCE INDEX (PRIMARY)
          ON own.consumer = old.consumer AND own.message_id = old.message_id
   SET own.payload = NULL, own.headers = NULL, own.origin = NULL, own.content_type = NULL, own.has_payload = FALSE

-- name: due
-- One query for a whole worker: in how many seconds each consumer's next row is due, and the outbox's under the
-- empty name, if within `ahead_s`. Rows that are not on the route :local may still be for its App: see relay_strays.
-- Needs only the index, which the server reads in one jump per consumer and number of starts, past the NULLs of
-- rows that are never due.
SELECT [text soon.consumer], TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), soon.due_at) / 1e6
  FROM (SELECT first.consumer, MIN(first.due_at) AS due_at
          FROM (SELECT consumer, MIN(next_attempt_at) AS due_at FROM txbox_inbox FORCE INDEX (txbox_inbox_due)
                 WHERE consumer IN ({:rows.consumer}) AND has_payload = TRUE AND next_attempt_at >= '1000-01-01'
                 GROUP BY consumer, has_payload, starts) AS first
         GROUP BY first.consumer
         UNION ALL
        SELECT '', MIN(next.due_at)
          FROM (SELECT MIN(available_at) AS due_at FROM txbox_outbox
                 WHERE status = 'pending' AND route IN ({:rows.route}) GROUP BY route) AS next
         UNION ALL
        SELECT '', UTC_TIMESTAMP(6) FROM DUAL
         WHERE EXISTS (SELECT 1 FROM txbox_outbox
                       WHERE status = 'pending' AND route >= 'local' AND route < :local)
            OR EXISTS (SELECT 1 FROM txbox_outbox
                        WHERE status = 'pending' AND route > :local AND route < 'local;')) AS soon
 WHERE soon.due_at <= UTC_TIMESTAMP(6) + INTERVAL :ahead_s SECOND

-- name: work_left
-- What keeps `run --once` running: due rows, leased rows, and versions whose turn it is, which are looked at again
-- within two seconds.
SELECT CASE WHEN EXISTS (SELECT 1 FROM txbox_inbox FORCE INDEX (txbox_inbox_due)
                          WHERE consumer = :consumer AND has_payload = TRUE AND starts = 0
                            AND next_attempt_at <= UTC_TIMESTAMP(6) AND status IN ('pending', 'failed'))
              OR EXISTS (SELECT 1 FROM txbox_inbox FORCE INDEX (txbox_inbox_due)
                          WHERE consumer = :consumer AND has_payload = TRUE AND starts > 0
                            AND next_attempt_at <= UTC_TIMESTAMP(6) AND status IN ('pending', 'failed'))
              OR EXISTS (SELECT 1 FROM txbox_inbox
                          WHERE consumer = :consumer AND status = 'processing' AND lease_until IS NOT NULL)
              OR EXISTS (SELECT 1 FROM txbox_inbox AS own
                          WHERE own.consumer = :consumer AND own.status <> 'processed' AND own.status = 'pending'
                            AND own.next_attempt_at <= UTC_TIMESTAMP(6) + INTERVAL 3 SECOND
                            AND EXISTS (SELECT 1 FROM txbox_sequence AS done
                                         WHERE done.consumer = own.consumer AND done.`key` = own.`key`
                                           AND own.sequence = done.last + 1))
            THEN 1 ELSE 0 END

-- name: work_left_ordered
-- work_left for ordered consumers: rows that wait for a dead row, or for one not yet due, do not count.
SELECT CASE WHEN EXISTS (SELECT 1 FROM txbox_inbox AS own
                          WHERE own.consumer = :consumer AND own.status <> 'processed'
                            AND own.status IN ('pending', 'failed')
                            AND own.has_payload AND own.next_attempt_at <= UTC_TIMESTAMP(6)
                            AND NOT EXISTS (SELECT 1 FROM txbox_inbox AS earlier
                                           WHERE earlier.consumer = own.consumer AND earlier.`key` = own.`key`
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
SELECT count(*), NULL FROM information_schema.tables
 WHERE table_schema = DATABASE() AND table_name = 'txbox_schema'

-- name: schema_lock
-- Of two concurrent `txbox init`, the second waits. Lock names are shared by all databases of a server.
SELECT GET_LOCK(CONCAT('txbox.', SHA2(DATABASE(), 224)), 3600)

-- name: schema_unlock
SELECT RELEASE_LOCK(CONCAT('txbox.', SHA2(DATABASE(), 224)))

-- name: guard_check
-- The savepoint protects transactional tables only.
SELECT count(*) AS triggers, 'origin' AS role FROM information_schema.tables
 WHERE table_schema = DATABASE() AND table_name = 'txbox_inbox' AND engine = 'InnoDB'

-- name: schema_creators
-- Names are looked up in one database only, and then among the built-ins.

-- ---- admin/queries.py -----------------------------------------------------------------------------------------------

-- name: status
SELECT [text own.consumer], own.status, count(*)
  FROM txbox_inbox AS own GROUP BY own.consumer, own.status ORDER BY own.consumer, own.status

-- name: oldest_unfinished
SELECT [text own.consumer],
       TIMESTAMPDIFF(MICROSECOND, min(own.received_at), UTC_TIMESTAMP(6)) / 1e6
  FROM txbox_inbox AS own WHERE own.status IN ('pending', 'processing', 'failed')
 GROUP BY own.consumer ORDER BY own.consumer

-- name: quarantine_status
SELECT [text own.consumer], count(*)
  FROM txbox_quarantine AS own WHERE own.status = 'quarantined' GROUP BY own.consumer ORDER BY own.consumer

-- fragment: state
-- The state shown to people.
CASE WHEN status <> 'pending' THEN status WHEN available_at <= UTC_TIMESTAMP(6) THEN 'due'
                    WHEN token IS NOT NULL THEN 'leased' WHEN attempts > 0 THEN 'failed' ELSE 'delayed' END

-- name: outbox_status
-- Overdue: due for over a minute and never tried.
SELECT [text own.topic], [text own.route], own.state, count(*),
       TIMESTAMPDIFF(MICROSECOND, min(own.staged_at), UTC_TIMESTAMP(6)) / 1e6, CAST(sum(own.overdue) AS SIGNED)
  FROM (SELECT topic, route, staged_at,
               status = 'pending' AND token IS NULL AND attempts = 0
               AND available_at < UTC_TIMESTAMP(6) - INTERVAL 1 MINUTE AS overdue,
               [state] AS state
          FROM txbox_outbox) AS own
 GROUP BY own.topic, own.route, own.state ORDER BY own.topic, own.route, own.state

-- name: bound_look
-- A setting would stay in the session, whoever has it next: each statement of a page says it itself.

-- fragment: look
-- A page that takes longer than 5 s is none. The first comment is MariaDB's, the second MySQL's.
/*M!100100 SET STATEMENT max_statement_time = 5 FOR */ SELECT /*+ MAX_EXECUTION_TIME(5000) */

-- name: consumers
-- From one to the next in the keys: as many steps as there are consumers, however many rows they have.
[look] [text own.consumer]
  FROM (SELECT DISTINCT consumer FROM txbox_inbox UNION SELECT DISTINCT consumer FROM txbox_quarantine) AS own
 ORDER BY own.consumer

-- fragment: some status
(SELECT count(*) FROM (SELECT 1 FROM txbox_inbox FORCE INDEX (txbox_inbox_open)
             WHERE status <> 'processed' AND status = [status] AND consumer = :consumer
             LIMIT :most) AS own)

-- fragment: oldest status
(SELECT TIMESTAMPDIFF(MICROSECOND, received_at, UTC_TIMESTAMP(6)) / 1e6 FROM txbox_inbox FORCE INDEX (txbox_inbox_open)
         WHERE status <> 'processed' AND status = [status] AND consumer = :consumer
         ORDER BY arrival LIMIT 1)

-- name: consumer_open
-- Of one consumer, counted up to a limit: what is open by status and quarantined, and the oldest of what is unfinished.
[look] [some 'pending'],
       [some 'processing'],
       [some 'failed'],
       [some 'dead'],
       [some 'discarded'],
       (SELECT count(*) FROM (SELECT 1 FROM txbox_quarantine
                               WHERE consumer = :consumer AND status = 'quarantined' LIMIT :most) AS own),
       [oldest 'pending'],
       [oldest 'processing'],
       [oldest 'failed']

-- fragment: outgoing status
[text found.topic], [text found.route], [state] AS state, count(*),
       TIMESTAMPDIFF(MICROSECOND, min(found.staged_at), UTC_TIMESTAMP(6)) / 1e6,
       CAST(sum(status = 'pending' AND token IS NULL AND attempts = 0
                AND available_at < UTC_TIMESTAMP(6) - INTERVAL 1 MINUTE) AS SIGNED)
  FROM (SELECT id FROM txbox_outbox WHERE status = [status]
         ORDER BY route, available_at, number LIMIT :most) AS first
       STRAIGHT_JOIN txbox_outbox AS found FORCE INDEX (PRIMARY) ON found.id = first.id
 GROUP BY found.topic, found.route, state

-- name: outbox_open
-- As outbox_status, of what has not left: counted up to a limit, and not more than that is read. The limit is on keys,
-- which an index has: twenty thousand rows with their topics are too wide for a table in memory.
[look] [outgoing 'pending']
 UNION ALL
SELECT [outgoing 'dead']

-- name: inbox_newest
[look] coalesce(max(arrival), 0) FROM txbox_inbox

-- name: outbox_newest
[look] coalesce(max(number), 0) FROM txbox_outbox

-- name: sizes
-- InnoDB's estimates. A table is its primary key, so only the other indexes count as indexes.
SELECT table_name, data_length, index_length, 1
  FROM information_schema.tables
 WHERE table_schema = DATABASE() AND table_type = 'BASE TABLE' AND LEFT(table_name, 6) = 'txbox_'
 ORDER BY table_name

-- fragment: inbox_row
[text consumer], [text message_id], status, [text topic], [text type], [text `key`], attempts, starts, received_at,
       updated_at, processed_at, next_attempt_at, lease_until, error_type, error, fingerprint, has_payload, arrival, key_id

-- fragment: inbox_filter
(:topic IS NULL OR topic = :topic)
   AND (:type IS NULL OR type = :type)
   AND (:key IS NULL OR `key` = :key)
   AND (:error_type IS NULL OR error_type = :error_type)
   AND (:fingerprint IS NULL OR fingerprint = :fingerprint)
   AND (:older_than_s IS NULL OR received_at < UTC_TIMESTAMP(6) - INTERVAL :older_than_s SECOND)

-- name: inbox_list
-- Keyset pages, newest first, of a stretch of arrivals: no index knows all rows by what may be asked for.
[look] [inbox_row]
  FROM txbox_inbox
 WHERE arrival > :floor AND arrival < :before
   AND (:consumer IS NULL OR consumer = :consumer)
   AND (:status IS NULL OR status = :status)
   AND [inbox_filter]
 ORDER BY arrival DESC
 LIMIT :limit

-- name: inbox_list_open
-- The same of one consumer and any status but processed, which an index has in this order.
[look] [inbox_row]
  FROM txbox_inbox FORCE INDEX (txbox_inbox_open)
 WHERE consumer = :consumer
   AND status <> 'processed' AND status = :status
   AND arrival < :before
   AND [inbox_filter]
 ORDER BY arrival DESC
 LIMIT :limit

-- name: inbox_list_id
-- The same of one consumer and id.
[look] [inbox_row]
  FROM txbox_inbox
 WHERE consumer = :consumer AND message_id = :message_id
   AND (:status IS NULL OR status = :status)
   AND arrival < :before
   AND [inbox_filter]
 LIMIT :limit

-- name: failure_groups
-- The newest failures of one consumer and status, as many as are looked at, by what they have in common.
[look] own.fingerprint, own.error_type, count(*), min(own.received_at), max(own.updated_at), [text min(own.message_id)]
  FROM (SELECT fingerprint, error_type, received_at, updated_at, message_id
          FROM txbox_inbox FORCE INDEX (txbox_inbox_open)
         WHERE consumer = :consumer AND status <> 'processed' AND status = :status
         ORDER BY arrival DESC
         LIMIT :most) AS own
 GROUP BY own.fingerprint, own.error_type

-- name: inbox_states
-- What became of messages that were retried.
SELECT [text consumer], [text message_id], status, attempts, fingerprint
  FROM txbox_inbox WHERE (consumer, message_id) IN ({(:rows.consumer, :rows.message_id)})

-- name: inbox_show
SELECT [inbox_row],
       content_type, headers, payload, origin, sequence, payload_hash, result
  FROM txbox_inbox WHERE consumer = :consumer AND message_id = :message_id

-- name: inbox_attempts
SELECT attempt, status, error_type, error, fingerprint, recorded_at
  FROM txbox_attempt WHERE consumer = :consumer AND message_id = :message_id ORDER BY number

-- name: inbox_count
-- What inbox_select would find in all batches of each consumer, and how many of those are spared. Takes no locks.
SELECT status, [text consumer], count(*), count(CASE WHEN error_type = :spared THEN 1 END)
  FROM txbox_inbox
 WHERE (:consumer IS NULL OR consumer = :consumer)
   AND (:message_id IS NULL OR message_id = :message_id)
   AND status IN ({:rows.status})
   AND (has_payload OR NOT :needs_payload)
   AND [inbox_filter]
 GROUP BY status, consumer ORDER BY consumer

-- name: inbox_select
-- The rows an operator's command may change now. SKIP LOCKED: what a live delivery holds is left to it.
-- Per consumer in arrival order, which an index has, so that all batches together read each row once.
SELECT [text consumer], [text message_id], arrival, error_type
  FROM txbox_inbox FORCE INDEX (txbox_inbox_open)
 WHERE consumer = :consumer
   AND (:message_id IS NULL OR message_id = :message_id)
   AND status = :status
   AND (has_payload OR NOT :needs_payload)
   AND [inbox_filter]
   AND arrival > :after
 ORDER BY arrival
 LIMIT :limit
   FOR UPDATE SKIP LOCKED

-- name: inbox_retry
-- Grants a full new budget of attempts; the history stays in txbox_attempt.
UPDATE [picked txbox_inbox, PRIMARY]
   SET own.status = 'failed', own.attempts = 0, own.starts = 0, own.next_attempt_at = UTC_TIMESTAMP(6),
       own.updated_at = UTC_TIMESTAMP(6), own.lease_until = NULL, own.token = NULL
 WHERE own.status IN ('dead', 'failed')

-- name: inbox_discard
UPDATE [picked txbox_inbox, PRIMARY]
   SET own.status = 'discarded', own.processed_at = UTC_TIMESTAMP(6), own.updated_at = UTC_TIMESTAMP(6),
       own.next_attempt_at = NULL, own.lease_until = NULL, own.token = NULL
 WHERE own.status IN ('dead', 'failed', 'pending')

-- name: edit_lock
-- One message that may be edited, as replay_read and with what an edit keeps.
SELECT [leased starts], error
  FROM txbox_inbox
 WHERE consumer = :consumer AND message_id = :message_id AND status IN ('dead', 'failed') AND has_payload
   FOR UPDATE SKIP LOCKED

-- name: edit_set_aside
-- What stands in the row stays readable in the quarantine, under the hash of its payload. Its bytes do not count
-- there: it is no stranger's doing, and is kept as long as its message.
INSERT INTO txbox_quarantine (consumer, message_id, hash, status, reason, topic, type, `key`,
                              content_type, headers, origin, payload, key_id)
SELECT own.consumer, own.message_id, :hash, 'replaced', :reason, own.topic, own.type, own.`key`,
       own.content_type, own.headers, own.origin, own.payload, own.key_id
  FROM txbox_inbox AS own WHERE own.consumer = :consumer AND own.message_id = :message_id
ON DUPLICATE KEY UPDATE
       status = CASE WHEN txbox_quarantine.status = 'quarantined' THEN txbox_quarantine.status ELSE 'replaced' END,
       headers = own.headers, payload = own.payload, key_id = own.key_id, updated_at = UTC_TIMESTAMP(6)

-- name: edit_write
-- As inbox_retry, with other content. The hash stays that of what came: a copy of it is a duplicate.
UPDATE txbox_inbox
   SET status = 'failed', attempts = 0, starts = 0, next_attempt_at = UTC_TIMESTAMP(6), updated_at = UTC_TIMESTAMP(6),
       lease_until = NULL, token = NULL, content_type = :content_type, headers = :headers,
       payload = :payload, key_id = :key_id, error = :error
 WHERE consumer = :consumer AND message_id = :message_id AND status IN ('dead', 'failed')

-- name: replay_read
-- In arrival order; for replaying as another consumer, or replaying a processed row.
SELECT [leased starts]
  FROM txbox_inbox
 WHERE consumer = :consumer AND has_payload AND arrival > :after
   AND (:message_id IS NULL OR message_id = :message_id)
   AND (:status IS NULL OR status = :status)
   AND (:topic IS NULL OR topic = :topic)
   AND (:type IS NULL OR type = :type)
   AND (:key IS NULL OR `key` = :key)
 ORDER BY arrival
 LIMIT :limit

-- fragment: first_of_key route
-- The number of the row that must leave before this one, or its own. MariaDB has no index for route IN (own.route, '').
COALESCE((SELECT min(first.number) FROM txbox_outbox AS first FORCE INDEX (txbox_outbox_key)
           WHERE first.status = 'pending' AND first.route = [route]
             AND first.topic = own.topic AND first.`key` = own.`key`
             AND first.number < own.number
             AND (first.token IS NOT NULL OR first.attempts > 0 OR first.available_at = first.staged_at
                  OR first.available_at <= UTC_TIMESTAMP(6))), own.number)

-- fragment: outbox_row
[text own.id], own.number, own.state, [text own.topic], [text own.route], [text own.type], [text own.`key`],
       own.attempts, own.staged_at,
       CASE WHEN own.state IN ('delayed', 'failed') THEN own.available_at END,
       CASE WHEN own.state = 'leased' THEN own.available_at END, own.sent_at, [text own.cause_consumer],
       [text own.cause_id], own.error_type, own.error,
       CASE WHEN own.`key` IS NOT NULL AND own.status = 'pending' THEN
           (SELECT [text head.id] FROM txbox_outbox AS head
             WHERE head.number = LEAST([first_of_key own.route], [first_of_key ''])
               AND head.number < own.number) END,
       own.key_id

-- fragment: outbox_filter
(:topic IS NULL OR topic = :topic)
   AND (:route IS NULL OR route = :route)
   AND (:type IS NULL OR type = :type)
   AND (:key IS NULL OR `key` = :key)
   AND (:error_type IS NULL OR error_type = :error_type)
   AND (:older_than_s IS NULL OR staged_at < UTC_TIMESTAMP(6) - INTERVAL :older_than_s SECOND)

-- name: outbox_list
-- Keyset pages of a stretch of numbers, newest first; each row with the one of its `key` that must leave before it, if
-- any. Of the statuses that people see, the table has four as pending: that is asked first, it is what an index knows.
[look] [outbox_row]
  FROM (SELECT id, number, status, topic, type, `key`, attempts, staged_at, available_at, sent_at, cause_consumer,
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
[look] [outbox_row]
  FROM (SELECT id, number, status, topic, type, `key`, attempts, staged_at, available_at, sent_at, cause_consumer,
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
[look] [outbox_row]
  FROM (SELECT id, number, status, topic, type, `key`, attempts, staged_at, available_at, sent_at, cause_consumer,
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
-- inbox_select for the outbox; rows that a relay is marking are left to it.
SELECT [text id], number, error_type FROM txbox_outbox
 WHERE (:message_id IS NULL OR id = :message_id)
   AND status IN ('pending', 'dead')
   AND [state] = :status
   AND [outbox_filter]
   AND number > :after
 ORDER BY number
 LIMIT :limit
   FOR UPDATE SKIP LOCKED

-- name: outbox_retry
-- Grants a full new budget. available_at is set back to when it was staged, so that the row precedes the later rows of
-- its key again.
UPDATE txbox_outbox SET status = 'pending', attempts = 0, token = NULL, available_at = staged_at
 WHERE id IN ({:rows.message_id}) AND status IN ('pending', 'dead')

-- name: outbox_discard
-- For a row that is no longer pending, available_at is when it was given up.
UPDATE txbox_outbox SET status = 'discarded', token = NULL, available_at = UTC_TIMESTAMP(6)
 WHERE id IN ({:rows.message_id}) AND status IN ('pending', 'dead')

-- name: outbox_reroute
-- Grants a new budget, because the attempts were made on the old route. Rows that were tried are due at once. MySQL
-- assigns from left to right, so attempts comes last.
UPDATE txbox_outbox SET status = 'pending', route = :to, token = NULL,
       available_at = CASE WHEN attempts > 0 THEN staged_at ELSE available_at END, attempts = 0
 WHERE id IN ({:rows.message_id}) AND status IN ('pending', 'dead')

-- fragment: quarantine_named
(:consumer IS NULL OR consumer = :consumer)
   AND (:message_id IS NULL OR message_id = :message_id)
   AND (:hash IS NULL OR LEFT(LOWER(HEX(hash)), CHAR_LENGTH(:hash)) = LOWER(:hash))

-- fragment: quarantine_filter
(:topic IS NULL OR topic = :topic)
   AND (:type IS NULL OR type = :type)
   AND (:key IS NULL OR `key` = :key)
   AND (:older_than_s IS NULL OR received_at < UTC_TIMESTAMP(6) - INTERVAL :older_than_s SECOND)

-- fragment: quarantine_row
[text consumer], [text message_id], hash, status, reason, [text topic], [text type], [text `key`], seen, received_at,
       updated_at, kept_bytes,
       key_id, content_type, headers, payload, origin

-- name: quarantine_list
-- Keyset pages, newest first. Rows have no number for their order of arrival, so the row itself is the page mark.
[look] [text consumer], [text message_id], hash, status, reason, [text topic], [text type], [text `key`], seen,
       received_at,
       updated_at, kept_bytes, key_id
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
SELECT status, [text consumer], count(*), 0 FROM txbox_quarantine
 WHERE status IN ({:rows.status})
   AND [quarantine_named]
   AND [quarantine_filter]
 GROUP BY status, consumer ORDER BY consumer

-- name: quarantine_select
-- In order of arrival. Waits for a live copy that is incrementing a row's counter, which does not take long.
SELECT [text consumer], [text message_id], hash, NULL, NULL FROM txbox_quarantine
 WHERE status = :status
   AND consumer = :consumer
   AND (:message_id IS NULL OR message_id = :message_id)
   AND (:hash IS NULL OR LEFT(LOWER(HEX(hash)), CHAR_LENGTH(:hash)) = LOWER(:hash))
   AND [quarantine_filter]
   AND (:mark_hash IS NULL
        OR (received_at, hash, message_id)
           > (SELECT own.received_at, own.hash, own.message_id FROM txbox_quarantine AS own
               WHERE own.consumer = :consumer AND own.message_id = :mark_id
                 AND own.hash = :mark_hash))
 ORDER BY received_at, hash, message_id
 LIMIT :limit
   FOR UPDATE

-- name: quarantine_lock
SELECT [quarantine_row]
  FROM txbox_quarantine
 WHERE consumer = :consumer AND message_id = :message_id AND hash = :hash AND status = 'quarantined'
   FOR UPDATE

-- name: quarantine_end
-- Once decided, the content is no longer needed and is dropped; the row stays for its retention time.
UPDATE [picked_quarantined]
   SET own.status = :status, own.payload = NULL, own.kept_bytes = 0, own.headers = NULL,
       own.updated_at = UTC_TIMESTAMP(6)
 WHERE own.status = 'quarantined'

-- name: audit_list
-- Keyset pages, newest first.
[look] number, recorded_at, actor, login, action, filter, affected, reason
  FROM txbox_audit
 WHERE (:before IS NULL OR number < :before)
 ORDER BY number DESC
 LIMIT :limit

-- name: audit
INSERT INTO txbox_audit (actor, action, filter, affected, reason, login)
VALUES (:actor, :action, :filter, :affected, :reason, SESSION_USER())

-- ---- admin/doctor ---------------------------------------------------------------------------------------------------
-- None of these reads a table through: names are found by jumps in an index, and rows are counted up to a limit.

-- fragment: age moment
TIMESTAMPDIFF(MICROSECOND, [moment], UTC_TIMESTAMP(6)) / 1e6

-- name: doctor_clock
SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6

-- name: doctor_settings
-- Not `@@name`: what one of the two products does not have would be an error.
SHOW VARIABLES
 WHERE Variable_name IN ('innodb_flush_log_at_trx_commit', 'innodb_doublewrite', 'log_bin', 'sync_binlog',
                         'transaction_isolation', 'tx_isolation', 'read_only', 'super_read_only', 'innodb_read_only',
                         'innodb_lock_wait_timeout', 'wait_timeout', 'max_statement_time', 'max_execution_time',
                         'idle_transaction_timeout', 'idle_write_transaction_timeout')

-- name: doctor_backend
-- Nothing that shares connections out by transaction is known here.

-- name: doctor_columns
SELECT table_name, column_name FROM information_schema.columns
 WHERE table_schema = DATABASE() AND table_name LIKE 'txbox\_%'

-- name: doctor_indexes
-- An index is there as a whole, or not at all.
SELECT DISTINCT table_name, index_name, TRUE FROM information_schema.statistics
 WHERE table_schema = DATABASE() AND table_name LIKE 'txbox\_%'

-- name: doctor_functions
-- There are none.

-- name: doctor_storage
-- InnoDB purges by itself.

-- name: doctor_transactions
-- The oldest one of somebody else that holds back purge. What one of the two products runs, the other reads as a comment:
-- MariaDB's tables take the right PROCESS. Those of the same name in MySQL fail (3854) for as long as any session
-- runs a statement with bytes that are not UTF-8, as our tokens are; the others take SELECT on performance_schema.
/*M! SELECT 'session', CAST(trx.trx_mysql_thread_id AS CHAR), COALESCE(client.user, ''), trx.trx_state,
            TIMESTAMPDIFF(MICROSECOND, trx.trx_started, NOW(6)) / 1e6 AS age_s
       FROM information_schema.innodb_trx AS trx
       LEFT JOIN information_schema.processlist AS client ON client.id = trx.trx_mysql_thread_id
      WHERE trx.trx_mysql_thread_id NOT IN (0, CONNECTION_ID()) */
/*!80000 SELECT 'session', CAST(client.processlist_id AS CHAR), COALESCE(client.processlist_user, ''), trx.state,
                trx.timer_wait / 1e12 AS age_s
           FROM performance_schema.events_transactions_current AS trx
           JOIN performance_schema.threads AS client USING (thread_id)
          WHERE trx.state = 'ACTIVE' AND client.processlist_id <> CONNECTION_ID() */
 ORDER BY age_s DESC LIMIT 1

-- name: doctor_standbys
-- How far behind a replica is, only the replica tells.

-- name: doctor_consumers
-- Who has rows of a status, by a jump in the index for each of them, however many rows they have.
SELECT own.status, [text own.consumer]
  FROM txbox_inbox AS own FORCE INDEX (txbox_inbox_open)
 WHERE own.status IN ('pending', 'failed', 'processing', 'dead')
 GROUP BY own.status, own.consumer
 LIMIT :limit

-- name: doctor_messages
-- Of the oldest of a consumer and status: topics and types, how many, since when, and how many are late.
SELECT [text own.topic], [text own.type], count(*), [age min(own.received_at)],
       count(CASE WHEN own.until < UTC_TIMESTAMP(6) - INTERVAL :late_s SECOND THEN 1 END)
  FROM (SELECT topic, type, received_at,
               CASE WHEN status = 'processing' THEN lease_until WHEN has_payload THEN next_attempt_at END AS until
          FROM txbox_inbox FORCE INDEX (txbox_inbox_open)
         WHERE status = :status AND consumer = :consumer
         ORDER BY arrival LIMIT :limit) AS own
 GROUP BY own.topic, own.type

-- name: doctor_routes
-- As doctor_consumers.
SELECT [text own.route]
  FROM txbox_outbox AS own FORCE INDEX (txbox_outbox_due)
 WHERE own.status = 'pending'
 GROUP BY own.status, own.route
 LIMIT :limit

-- name: doctor_outgoing
-- Of those of a route that are due first, as doctor_messages.
SELECT [text own.topic], [text own.type], [text own.cause_consumer], count(*), [age min(own.staged_at)],
       count(CASE WHEN own.token IS NULL AND own.attempts = 0
                   AND own.available_at < UTC_TIMESTAMP(6) - INTERVAL :late_s SECOND THEN 1 END)
  FROM (SELECT topic, type, cause_consumer, staged_at, token, attempts, available_at
          FROM txbox_outbox FORCE INDEX (txbox_outbox_due)
         WHERE status = 'pending' AND route = :route
         ORDER BY available_at, number LIMIT :limit) AS own
 GROUP BY own.topic, own.type, own.cause_consumer

-- name: doctor_outgoing_dead
SELECT count(*), [age min(own.staged_at)]
  FROM (SELECT staged_at FROM txbox_outbox FORCE INDEX (txbox_outbox_due) WHERE status = 'dead' LIMIT :limit) AS own

-- name: doctor_quarantined
SELECT [text own.consumer], count(*), [age min(own.received_at)]
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
SELECT UTC_TIMESTAMP(6)

-- name: explain_consumers
-- The next consumer that has rows: min() of a range is read from the key; DISTINCT would read all of it.
SELECT [text own.consumer]
  FROM (SELECT min(consumer) AS consumer FROM txbox_inbox WHERE consumer > :after) AS own
 WHERE own.consumer IS NOT NULL
 LIMIT :limit

-- name: explain_aside
-- The same of the quarantine.
SELECT [text own.consumer]
  FROM (SELECT min(consumer) AS consumer FROM txbox_quarantine WHERE consumer > :after) AS own
 WHERE own.consumer IS NOT NULL
 LIMIT :limit

-- name: explain_inbox
-- Which of these keys there are.
SELECT [text own.consumer], [text own.message_id], own.status, [text own.topic]
  FROM [picked txbox_inbox, PRIMARY]

-- name: explain_outbox
-- Which of these outgoing messages there are.
SELECT [text id], [state], [text topic] FROM txbox_outbox WHERE id IN ({:rows.message_id})

-- name: explain_quarantine
SELECT [quarantine_row]
  FROM txbox_quarantine
 WHERE consumer = :consumer AND message_id = :message_id
 ORDER BY received_at
 LIMIT :limit

-- name: explain_holder
-- Who holds a row stands in tables of the server that take the right PROCESS: explain_locked tells that it is held.

-- name: explain_writers
-- As explain_holder.

-- name: explain_locked
-- Fails where an open transaction has locked the row, changed it, or inserted it; rolled back at once.
SELECT 1 FROM txbox_inbox WHERE consumer = :consumer AND message_id = :message_id FOR UPDATE NOWAIT

-- ---- waits.py -------------------------------------------------------------------------------------------------------

-- name: waits_order
-- For rows that have not run: the first row of their key that they wait for.
SELECT [text own.message_id], [text head.message_id], head.status, head.next_attempt_at
  FROM (SELECT behind.message_id,
               (SELECT earlier.message_id FROM txbox_inbox AS earlier
                 WHERE earlier.consumer = behind.consumer AND earlier.`key` = behind.`key`
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
SELECT [text own.message_id], own.sequence, own.last, [text head.message_id], head.status, head.next_attempt_at,
       head.sequence
  FROM (SELECT behind.message_id, behind.sequence, done.last,
               (SELECT earlier.message_id FROM txbox_inbox AS earlier
                 WHERE earlier.consumer = behind.consumer AND earlier.`key` = behind.`key`
                   AND earlier.sequence < behind.sequence AND earlier.status <> 'processed'
                   AND (earlier.status IN ('pending', 'failed', 'processing')
                        OR (earlier.status = 'dead' AND earlier.sequence > coalesce(done.last, earlier.sequence - 1)))
                 ORDER BY earlier.sequence LIMIT 1) AS head_id
          FROM txbox_inbox AS behind
          LEFT JOIN txbox_sequence AS done ON done.consumer = behind.consumer AND done.`key` = behind.`key`
         WHERE behind.consumer = :consumer AND behind.message_id IN ({:rows.message_id})
           AND behind.status IN ('pending', 'failed') AND behind.sequence IS NOT NULL) AS own
  LEFT JOIN txbox_inbox AS head ON head.consumer = :consumer AND head.message_id = own.head_id

-- ---- outbox.py ------------------------------------------------------------------------------------------------------

-- fragment: page route topics
(SELECT [text id] AS id, number, [text topic] AS topic, [text `key`] AS `key`, available_at, COALESCE(LENGTH(payload),
         0) AS payload_bytes, [text type] AS type
    FROM txbox_outbox
   WHERE status = 'pending' AND route = [route] AND available_at <= UTC_TIMESTAMP(6)
     AND available_at >= COALESCE(:after_at, '1000-01-01')
     AND NOT (available_at = COALESCE(:after_at, '1000-01-01') AND number <= :after_number)
     AND [topics]
   ORDER BY available_at, number
   LIMIT :limit)

-- fragment: picked_outgoing
-- A list joined by the key. Otherwise the server would read every row of a small table, and wait for those that
-- others have staged but not committed.
(WITH m (id) AS (VALUES {/*!80019 ROW*/ (:rows.id)}) SELECT id FROM m) AS mine
       STRAIGHT_JOIN txbox_outbox AS own FORCE INDEX (PRIMARY) ON own.id = mine.id

-- name: stage
-- Many messages in one statement, in the caller's transaction; `number` is the order of insertion.
-- A repeated run with the same cause stages the same ids, and changes nothing.
INSERT INTO txbox_outbox (id, topic, type, `key`, content_type, headers, payload, key_id, cause_consumer, cause_id,
                          available_at, route)
VALUES {(:rows.id, :rows.topic, :rows.type, :rows.key, :rows.content_type, :rows.headers, :rows.payload, :key_id,
         :rows.cause_consumer, :rows.cause_id, UTC_TIMESTAMP(6) + INTERVAL :rows.delay_s SECOND, :rows.route)}
ON DUPLICATE KEY UPDATE id = txbox_outbox.id

-- name: stage_notify
-- No notifications here: relays poll.

-- name: stage_lock
-- InnoDB's row locks end with the transaction, while GET_LOCK's do not. So there is a row for each of 4,096 buckets
-- of keys, locked until the caller commits. Sorted by the caller.
INSERT INTO txbox_job (name) VALUES {(CONCAT('order:', MOD(:rows.lock, 4096)))}
ON DUPLICATE KEY UPDATE name = txbox_job.name

-- name: relay_page
-- What may be due on one route, or was staged without one, oldest first, from where the last look ended. Takes no
-- locks. Two scans, each in index order: with `route IN (…)` everything due would be sorted.
[page :route, (:whole OR (topic IN ({:rows.topic})) = :named)]
UNION ALL
[page '', (topic IN ({:rows.topic})) = :named]
 ORDER BY available_at, number
 LIMIT :limit

-- name: relay_heads
-- For each key and type, the first row that must not be overtaken, and how many there are up to :last. A row staged
-- with a delay counts once the delay is over. Any other counts even if it is not due yet by this transaction's clock,
-- which stopped when the transaction began.
SELECT [text topic], [text `key`], [text type], MIN(number), COUNT(*)
  FROM txbox_outbox
 WHERE status = 'pending' AND number <= :last
   AND (route, topic, `key`) IN ({(:rows.route, :rows.topic, :rows.key)})
   AND (token IS NOT NULL OR attempts > 0 OR available_at = staged_at OR available_at <= UTC_TIMESTAMP(6))
 GROUP BY topic, `key`, type

-- name: relay_lease then relay_take

SELECT [text own.id], number, [text topic], [text type], [text `key`], content_type, headers, payload, key_id,
       staged_at, attempts
  FROM [picked_outgoing]
 WHERE status = 'pending' AND available_at <= UTC_TIMESTAMP(6)
   FOR UPDATE SKIP LOCKED

-- name: relay_take
-- Takes rows that relay_lease locked in this transaction.
UPDATE [picked_outgoing]
   SET token = :token, available_at = UTC_TIMESTAMP(6) + INTERVAL :lease_s SECOND

-- name: relay_release
-- Fenced. For rows that were not sent through no fault of their own; they keep their place ahead of later ones.
UPDATE [picked_outgoing]
   SET token = NULL, available_at = staged_at
 WHERE token = :token AND status = 'pending'

-- name: relay_sent
DELETE own FROM [picked_outgoing]
 WHERE token = :token AND status = 'pending'

-- name: relay_kept
-- relay_sent for rows that are kept for a while.
UPDATE [picked_outgoing]
   SET status = 'sent', token = NULL, sent_at = UTC_TIMESTAMP(6), error_type = NULL, error = NULL
 WHERE token = :token AND status = 'pending'

-- name: relay_failed
UPDATE txbox_outbox
   SET status = :status, attempts = attempts + 1, token = NULL, error_type = :error_type, error = :error,
       available_at = UTC_TIMESTAMP(6) + INTERVAL :delay_s SECOND
 WHERE id = :id AND token = :token AND status = 'pending'

-- name: relay_left
-- What is due or leased on one route, or was staged without one.
SELECT DISTINCT [text topic], [text type] FROM txbox_outbox
 WHERE status = 'pending' AND (token IS NOT NULL OR available_at <= UTC_TIMESTAMP(6))
   AND route IN (:route, '')
   AND ((:whole AND route = :route) OR (topic IN ({:rows.topic})) = :named)

-- name: relay_strays
-- Rows for consumers on this database that are not on this App's own route, and rows without any route.
SELECT DISTINCT [text route], [text topic], [text type], [text cause_consumer]
  FROM txbox_outbox
 WHERE status = 'pending' AND (route = '' OR (route >= 'local' AND route < 'local;')) AND route <> :route

-- name: relay_adopt
UPDATE txbox_outbox SET route = :route
 WHERE status = 'pending' AND token IS NULL AND route = :from_route AND topic = :topic
   AND type <=> :type AND cause_consumer <=> :cause_consumer
 LIMIT :limit

-- ---- activity.py, pauses.py -----------------------------------------------------------------------------------------

-- name: activity_write
-- What a process has counted in these minutes so far takes the place of what it wrote before: writing again after a
-- lost answer doubles nothing. No other process writes these rows.
INSERT INTO txbox_activity (minute, kind, name, worker, received, processed, duplicate, deferred, failed, dead,
                            quarantined, latency, run, oldest_s)
VALUES {(:rows.minute, :rows.kind, :rows.name, :worker, :rows.received, :rows.processed, :rows.duplicate,
         :rows.deferred, :rows.failed, :rows.dead, :rows.quarantined, :rows.latency, :rows.run, :rows.oldest_s)}
ON DUPLICATE KEY UPDATE
    received = VALUES(received), processed = VALUES(processed), duplicate = VALUES(duplicate),
    deferred = VALUES(deferred), failed = VALUES(failed), dead = VALUES(dead), quarantined = VALUES(quarantined),
    latency = VALUES(latency), run = VALUES(run), oldest_s = VALUES(oldest_s)

-- fragment: counted
minute, kind, [text name], received, processed, duplicate, deferred, failed, dead, quarantined, latency, run, oldest_s

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
-- In seconds since 1970; UNIX_TIMESTAMP would take its argument for local time.
SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6

-- name: outbox_ages
-- How long the first row that is due has been so, of each route; one index probe each.
SELECT asked.route, TIMESTAMPDIFF(MICROSECOND, asked.at, UTC_TIMESTAMP(6)) / 1e6
  FROM (SELECT [text route] AS route, MIN(available_at) AS at
          FROM txbox_outbox WHERE status = 'pending' AND route IN ({:rows.route})
         GROUP BY route) AS asked

-- name: worker_write
INSERT INTO txbox_worker (worker, kind, host, pid, version, app, consumers, sources, routes, lanes, state, busy, leases,
                          in_flight)
VALUES (:worker, :kind, :host, :pid, :version, :app, :consumers, :sources, :routes, :lanes, :state, :busy, :leases,
        :in_flight)
ON DUPLICATE KEY UPDATE
    state = VALUES(state), busy = VALUES(busy), leases = VALUES(leases), in_flight = VALUES(in_flight),
    seen_at = UTC_TIMESTAMP(6)

-- name: worker_gone
DELETE FROM txbox_worker WHERE worker = :worker

-- name: workers
SELECT worker, kind, host, pid, version, app, consumers, sources, routes, lanes, state, busy, leases, in_flight,
       started_at, seen_at, TIMESTAMPDIFF(MICROSECOND, seen_at, UTC_TIMESTAMP(6)) / 1e6
  FROM txbox_worker ORDER BY started_at, worker

-- name: workers_prune
DELETE FROM txbox_worker WHERE seen_at < UTC_TIMESTAMP(6) - INTERVAL :silent_s SECOND

-- name: pauses
-- A row at least, which tells the time.
SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6, [text paused.consumer], paused.actor,
       paused.reason, paused.paused_at
  FROM (SELECT 1 AS one) AS always LEFT JOIN txbox_pause AS paused ON TRUE ORDER BY paused.consumer

-- name: pause
INSERT INTO txbox_pause (consumer, actor, reason) VALUES (:consumer, :actor, :reason)

-- name: resume
DELETE FROM txbox_pause WHERE consumer = :consumer
