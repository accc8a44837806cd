-- The statements of txbox for MySQL 8.0.19 and MariaDB 10.6 and later: the twins of postgresql.sql, name by name.
-- `:name` is a parameter; a region in braces repeats for each row, `:rows.name` is its column.
-- A query without a body has nothing to do on this database.
-- No statement can be refused at COMMIT and none names the rows it touched (MySQL has no RETURNING):
-- a claim writes `processing` with a token that classify reads back, complete makes it `processed`
-- inside a savepoint of random name, and whoever leaves the transaction loses the savepoint.
-- Where PostgreSQL picks and takes in one statement, `x` locks and reads and `x_take` writes.
-- Identity is VARBINARY and is converted to text in each list of columns. UPDATE assigns from left
-- to right here, unless sql_mode says otherwise, so a column that others read is assigned after them.
-- A section has the queries of the modules that it names.

-- ---- claims.py ------------------------------------------------------------------------------------------------------

-- name: claim
-- Never INSERT IGNORE, which truncates; never the row count, which depends on the client's flags.
INSERT INTO txbox_inbox (consumer, message_id, status, token, topic, type, `key`, sequence, payload_hash)
VALUES {(:consumer, :rows.message_id, 'processing', :token, :rows.topic, :rows.type, :rows.key, :rows.sequence,
         :rows.payload_hash)}
ON DUPLICATE KEY UPDATE consumer = txbox_inbox.consumer

-- name: claim_single
-- One message is claimed as many are.

-- name: claim_kept
-- As claim, for consumers that keep the payload of processed messages.
INSERT INTO txbox_inbox (consumer, message_id, status, token, topic, type, `key`, sequence, payload_hash,
                         content_type, headers, origin, payload, has_payload, key_id)
VALUES {(:consumer, :rows.message_id, 'processing', :token, :rows.topic, :rows.type, :rows.key, :rows.sequence,
         :rows.payload_hash, :rows.content_type, :rows.headers, :rows.origin, :rows.payload, TRUE, :key_id)}
ON DUPLICATE KEY UPDATE consumer = txbox_inbox.consumer

-- name: claim_leased
-- The fence: a worker whose lease was given to another matches no row. What complete overwrites is
-- left alone here, so that a row which a broken handler commits still has its payload.
UPDATE txbox_inbox
   SET starts = GREATEST(starts - 1, 0), token = :token, lease_until = NULL, next_attempt_at = NULL,
       updated_at = UTC_TIMESTAMP(6)
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})
   AND token = :lease AND status = 'processing'

-- name: claim_replay
-- A generation of its own over a processed row: its failure rolls back to `processed` as it was.
UPDATE txbox_inbox
   SET status = 'processing', token = :token, lease_until = NULL, updated_at = UTC_TIMESTAMP(6)
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id}) AND status = 'processed'

-- name: bound_lock_timeout
-- Of the session, in whole seconds, rounded up: a bound is a millisecond at least.
SET @txbox_lock_wait = CAST(COALESCE(@txbox_lock_wait, @@SESSION.innodb_lock_wait_timeout) AS UNSIGNED),
    SESSION innodb_lock_wait_timeout = (CAST(:lock_timeout_ms AS UNSIGNED) + 999) DIV 1000

-- name: restore_lock_timeout
-- The wait was bounded for the claim only; the handler gets back what it had. The variable is of
-- the session: whatever rolled back in between, the first value that was saved is the true one.
SET SESSION innodb_lock_wait_timeout = CAST(COALESCE(@txbox_lock_wait, @@SESSION.innodb_lock_wait_timeout) AS UNSIGNED),
    @txbox_lock_wait = NULL

-- name: bound_batch
-- InnoDB finds deadlocks at once, and its wait is in whole seconds.

-- name: arm
-- From here on whatever ends the transaction (COMMIT, ROLLBACK, DDL, a deadlock) ends the savepoint.
SAVEPOINT [canary]

-- name: savepoint_claim
-- A statement that fails leaves the transaction as it was: close can be asked.

-- name: rollback_to_claim

-- name: close
-- Fails when this is no longer the claiming transaction.
RELEASE SAVEPOINT [canary]

-- name: complete
-- What elsewhere the claim has written.
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
-- classify reads them with the others.

-- ---- inbox.py -------------------------------------------------------------------------------------------------------

-- name: classify
-- A locking read sees who won also under REPEATABLE READ; FOR SHARE is not MariaDB's.
SELECT CONVERT(message_id USING utf8mb4), status, payload_hash, has_payload, attempts, starts,
       COALESCE(next_attempt_at <= UTC_TIMESTAMP(6), TRUE) AS due, token, lease_until IS NOT NULL AS leased
  FROM txbox_inbox
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})
  LOCK IN SHARE MODE

-- name: accept
-- The token stays in the row: classify reads it back to know what this call inserted.
INSERT INTO txbox_inbox (consumer, message_id, status, token, topic, type, `key`, sequence, processed_at, payload_hash)
VALUES {(:consumer, :rows.message_id, 'processed', :token, :rows.topic, :rows.type, :rows.key, :rows.sequence,
         UTC_TIMESTAMP(6), :rows.payload_hash)}
ON DUPLICATE KEY UPDATE consumer = txbox_inbox.consumer

-- name: savepoint
-- A lock timeout rolls back its statement only, and a deadlock takes every savepoint with it.

-- name: release_savepoint

-- name: rollback_to_savepoint

-- name: store
-- Payload and key in one row; whoever comes second changes nothing.
INSERT INTO txbox_inbox (consumer, message_id, status, token, topic, type, `key`, sequence, payload_hash,
                         next_attempt_at, content_type, headers, origin, payload, has_payload, key_id)
VALUES {(:consumer, :rows.message_id, 'pending', :token, :rows.topic, :rows.type, :rows.key, :rows.sequence,
         :rows.payload_hash, UTC_TIMESTAMP(6) + INTERVAL :delay_s SECOND, :rows.content_type, :rows.headers,
         :rows.origin, :rows.payload, TRUE, :key_id)}
ON DUPLICATE KEY UPDATE consumer = txbox_inbox.consumer

-- name: return_payload
-- A redelivery gives an unfinished row back the payload it lacks; from then on the table owns it.
UPDATE txbox_inbox
   SET content_type = :content_type, headers = :headers, origin = :origin,
       payload = :payload, has_payload = TRUE, key_id = :key_id, payload_hash = :payload_hash,
       next_attempt_at = COALESCE(next_attempt_at, UTC_TIMESTAMP(6)), updated_at = UTC_TIMESTAMP(6)
 WHERE consumer = :consumer AND message_id = :message_id
   AND status IN ('pending', 'failed') AND NOT has_payload

-- name: quarantine
-- The same message again counts up.
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

-- name: record_update
-- A failure is written only over a failed row of the same payload, or over a row that is ours by its token.
UPDATE txbox_inbox
   SET starts = CASE WHEN status = 'processing' THEN GREATEST(starts - 1, 0) ELSE starts END,
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
 WHERE consumer = :consumer AND message_id = :message_id
   AND ((status = 'failed' AND payload_hash <=> :payload_hash) OR (status = 'processing' AND token = :token))

-- name: record_insert
-- Somebody else's row is a duplicate-key error.
INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, `key`, sequence, payload_hash, attempts,
                         next_attempt_at, error_type, error, fingerprint,
                         content_type, headers, origin, payload, has_payload, key_id)
VALUES (:consumer, :message_id, CASE WHEN :final OR 1 >= :max_attempts THEN 'dead' ELSE 'failed' END,
        :topic, :type, :key, :sequence, :payload_hash, 1,
        CASE WHEN :final OR 1 >= :max_attempts THEN NULL ELSE UTC_TIMESTAMP(6) + INTERVAL :delay_s SECOND END,
        :error_type, :error, :fingerprint,
        :content_type, :headers, :origin, :payload, :has_payload, :key_id)

-- name: record_own
-- Over the row that this very transaction has claimed, as its token says.
UPDATE txbox_inbox
   SET next_attempt_at = CASE WHEN :final OR attempts + 1 >= :max_attempts
                                OR received_at < UTC_TIMESTAMP(6) - INTERVAL :max_age_s SECOND
                              THEN NULL ELSE UTC_TIMESTAMP(6) + INTERVAL :delay_s SECOND END,
       status = CASE WHEN :final OR attempts + 1 >= :max_attempts
                       OR received_at < UTC_TIMESTAMP(6) - INTERVAL :max_age_s SECOND
                     THEN 'dead' ELSE 'failed' END,
       attempts = attempts + 1, processed_at = NULL,
       lease_until = NULL, token = NULL, updated_at = UTC_TIMESTAMP(6),
       error_type = :error_type, error = :error, fingerprint = :fingerprint,
       content_type = :content_type, headers = :headers, origin = :origin,
       payload = :payload, has_payload = :has_payload, key_id = :key_id
 WHERE consumer = :consumer AND message_id = :message_id AND status = 'processing' AND token = :token

-- ---- leases.py ------------------------------------------------------------------------------------------------------

-- name: store_leased
-- Nothing tells here what an INSERT wrote: store, then lease_stored.

-- name: lease
-- In the order of the index txbox_inbox_due: what it costs does not depend on what waits behind. The index is
-- named, since its statistics are of another time: the optimizer would rather sort. A leased row has no
-- `next_attempt_at`, so nothing here steps over it. `starts` is read as lease_take will leave it.
SELECT CONVERT(message_id USING utf8mb4), CONVERT(topic USING utf8mb4), CONVERT(type USING utf8mb4),
       CONVERT(`key` USING utf8mb4), sequence, received_at, payload_hash, attempts, starts + 1,
       content_type, headers, origin, payload, has_payload, key_id, arrival
  FROM txbox_inbox FORCE INDEX (txbox_inbox_due)
 WHERE consumer = :consumer AND has_payload = TRUE AND starts = 0 AND next_attempt_at <= UTC_TIMESTAMP(6)
   AND status IN ('pending', 'failed')
 ORDER BY next_attempt_at, arrival
 LIMIT :limit
   FOR UPDATE SKIP LOCKED

-- name: lease_suspect
-- A row whose last run never ended is taken alone, so that a message which kills its process takes no
-- neighbour with it. There are few, so one statement serves all consumers: those with an order take heads only.
SELECT CONVERT(message_id USING utf8mb4), CONVERT(topic USING utf8mb4), CONVERT(type USING utf8mb4),
       CONVERT(`key` USING utf8mb4), sequence, received_at, payload_hash, attempts, starts + 1,
       content_type, headers, origin, payload, has_payload, key_id, arrival
  FROM txbox_inbox AS own FORCE INDEX (txbox_inbox_due)
 WHERE consumer = :consumer AND has_payload = TRUE AND starts > 0 AND next_attempt_at <= UTC_TIMESTAMP(6)
   AND status IN ('pending', 'failed')
   AND (NOT :heads_only OR own.`key` IS NULL OR own.arrival <= LEAST(
          COALESCE((SELECT head.arrival FROM txbox_inbox AS head FORCE INDEX (txbox_inbox_status)
                     WHERE head.status = 'pending' AND head.consumer = own.consumer AND head.`key` = own.`key`
                     ORDER BY head.status, head.consumer, head.`key`, head.arrival LIMIT 1), own.arrival),
          COALESCE((SELECT head.arrival FROM txbox_inbox AS head FORCE INDEX (txbox_inbox_status)
                     WHERE head.status = 'failed' AND head.consumer = own.consumer AND head.`key` = own.`key`
                     ORDER BY head.status, head.consumer, head.`key`, head.arrival LIMIT 1), own.arrival),
          COALESCE((SELECT head.arrival FROM txbox_inbox AS head FORCE INDEX (txbox_inbox_status)
                     WHERE head.status = 'processing' AND head.consumer = own.consumer AND head.`key` = own.`key`
                     ORDER BY head.status, head.consumer, head.`key`, head.arrival LIMIT 1), own.arrival),
          COALESCE(CASE WHEN :dead_blocks THEN
                   (SELECT head.arrival FROM txbox_inbox AS head FORCE INDEX (txbox_inbox_status)
                     WHERE head.status = 'dead' AND head.consumer = own.consumer AND head.`key` = own.`key`
                     ORDER BY head.status, head.consumer, head.`key`, head.arrival LIMIT 1) END, own.arrival)))
 ORDER BY starts, next_attempt_at, arrival
 LIMIT 1
   FOR UPDATE SKIP LOCKED

-- name: lease_ordered
-- As lease, of each key only the first row that is unfinished: one probe of an index a status. A head is
-- asked for in the order of every column of the index: by the last alone, MySQL reads the whole key and sorts it.
SELECT CONVERT(message_id USING utf8mb4), CONVERT(topic USING utf8mb4), CONVERT(type USING utf8mb4),
       CONVERT(`key` USING utf8mb4), sequence, received_at, payload_hash, attempts, starts + 1,
       content_type, headers, origin, payload, has_payload, key_id, arrival
  FROM txbox_inbox AS own FORCE INDEX (txbox_inbox_due)
 WHERE consumer = :consumer AND has_payload = TRUE AND starts = 0 AND next_attempt_at <= UTC_TIMESTAMP(6)
   AND status IN ('pending', 'failed')
   AND (own.`key` IS NULL OR own.arrival <= LEAST(
          COALESCE((SELECT head.arrival FROM txbox_inbox AS head FORCE INDEX (txbox_inbox_status)
                     WHERE head.status = 'pending' AND head.consumer = own.consumer AND head.`key` = own.`key`
                     ORDER BY head.status, head.consumer, head.`key`, head.arrival LIMIT 1), own.arrival),
          COALESCE((SELECT head.arrival FROM txbox_inbox AS head FORCE INDEX (txbox_inbox_status)
                     WHERE head.status = 'failed' AND head.consumer = own.consumer AND head.`key` = own.`key`
                     ORDER BY head.status, head.consumer, head.`key`, head.arrival LIMIT 1), own.arrival),
          COALESCE((SELECT head.arrival FROM txbox_inbox AS head FORCE INDEX (txbox_inbox_status)
                     WHERE head.status = 'processing' AND head.consumer = own.consumer AND head.`key` = own.`key`
                     ORDER BY head.status, head.consumer, head.`key`, head.arrival LIMIT 1), own.arrival),
          COALESCE(CASE WHEN :dead_blocks THEN
                   (SELECT head.arrival FROM txbox_inbox AS head FORCE INDEX (txbox_inbox_status)
                     WHERE head.status = 'dead' AND head.consumer = own.consumer AND head.`key` = own.`key`
                     ORDER BY head.status, head.consumer, head.`key`, head.arrival LIMIT 1) END, own.arrival)))
 ORDER BY next_attempt_at, arrival
 LIMIT :limit
   FOR UPDATE SKIP LOCKED

-- name: lease_next
-- As lease_ordered, the row of one key whose turn it is: whoever has run its predecessor asks for it, and
-- pays for no look at other keys, nor at what waits behind it.
SELECT CONVERT(message_id USING utf8mb4), CONVERT(topic USING utf8mb4), CONVERT(type USING utf8mb4),
       CONVERT(`key` USING utf8mb4), sequence, received_at, payload_hash, attempts, starts + 1,
       content_type, headers, origin, payload, has_payload, key_id, arrival
  FROM txbox_inbox AS own FORCE INDEX (txbox_inbox_arrival)
 WHERE own.arrival = LEAST(
          COALESCE((SELECT head.arrival FROM txbox_inbox AS head FORCE INDEX (txbox_inbox_status)
                     WHERE head.status = 'pending' AND head.consumer = :consumer AND head.`key` = :key
                     ORDER BY head.arrival LIMIT 1), 9223372036854775807),
          COALESCE((SELECT head.arrival FROM txbox_inbox AS head FORCE INDEX (txbox_inbox_status)
                     WHERE head.status = 'failed' AND head.consumer = :consumer AND head.`key` = :key
                     ORDER BY head.arrival LIMIT 1), 9223372036854775807),
          COALESCE((SELECT head.arrival FROM txbox_inbox AS head FORCE INDEX (txbox_inbox_status)
                     WHERE head.status = 'processing' AND head.consumer = :consumer AND head.`key` = :key
                     ORDER BY head.arrival LIMIT 1), 9223372036854775807),
          COALESCE(CASE WHEN :dead_blocks THEN
                   (SELECT head.arrival FROM txbox_inbox AS head FORCE INDEX (txbox_inbox_status)
                     WHERE head.status = 'dead' AND head.consumer = :consumer AND head.`key` = :key
                     ORDER BY head.arrival LIMIT 1) END, 9223372036854775807))
   AND consumer = :consumer AND status IN ('pending', 'failed') AND has_payload
   AND next_attempt_at <= UTC_TIMESTAMP(6) AND starts = 0
   FOR UPDATE SKIP LOCKED

-- name: lease_stored
-- As lease, for rows that its caller has stored in this transaction.
SELECT CONVERT(message_id USING utf8mb4), CONVERT(topic USING utf8mb4), CONVERT(type USING utf8mb4),
       CONVERT(`key` USING utf8mb4), sequence, received_at, payload_hash, attempts, starts + 1,
       content_type, headers, origin, payload, has_payload, key_id, arrival
  FROM txbox_inbox
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id}) AND status = 'pending'
   FOR UPDATE

-- name: lease_take
-- Of rows that lease or lease_stored has locked in this transaction.
UPDATE txbox_inbox
   SET status = 'processing', token = :token, starts = starts + 1, updated_at = UTC_TIMESTAMP(6),
       lease_until = UTC_TIMESTAMP(6) + INTERVAL :lease_s SECOND, next_attempt_at = NULL
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})

-- name: heartbeat
-- SKIP LOCKED: a row inside its handler's transaction needs no heartbeat and must not be waited for.
-- A statement of its own: inside an UPDATE, MariaDB waits for the rows it is told to skip.
SELECT CONVERT(message_id USING utf8mb4) FROM txbox_inbox
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})
   AND token = :token AND status = 'processing'
   FOR UPDATE SKIP LOCKED

-- name: heartbeat_take
-- Of rows that heartbeat has locked in this transaction.
UPDATE txbox_inbox SET lease_until = UTC_TIMESTAMP(6) + INTERVAL :lease_s SECOND
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})

-- name: release
-- Fenced: gives the start back, since the run ended by no fault of the message.
UPDATE txbox_inbox
   SET status = CASE WHEN attempts > 0 THEN 'failed' ELSE 'pending' END,
       starts = GREATEST(starts - 1, 0), lease_until = NULL, token = NULL, updated_at = UTC_TIMESTAMP(6),
       next_attempt_at = UTC_TIMESTAMP(6) + INTERVAL :delay_s SECOND
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})
   AND token = :token AND status = 'processing'

-- name: rescue
-- The start stays counted: its run never ended. SKIP LOCKED: a locked row is alive. The last
-- columns are as rescue_take will leave them.
SELECT CONVERT(consumer USING utf8mb4), CONVERT(message_id USING utf8mb4), CONVERT(topic USING utf8mb4), starts,
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
-- A list of pairs is a table here: MariaDB gives up its key for `(a, b) IN (…)` of a few hundred
-- pairs and locks the whole table. The comment is SQL to MySQL, which wants the word, and to it only.
UPDATE (WITH m (consumer, message_id) AS (VALUES {/*!80019 ROW*/ (:rows.consumer, :rows.message_id)})
        SELECT consumer, message_id FROM m) AS picked
       STRAIGHT_JOIN txbox_inbox AS own ON own.consumer = picked.consumer AND own.message_id = picked.message_id
   SET own.status = CASE WHEN own.starts >= :max_starts THEN 'dead' ELSE 'failed' END,
       own.lease_until = NULL, own.token = NULL, own.updated_at = UTC_TIMESTAMP(6),
       own.next_attempt_at = CASE WHEN own.starts < :max_starts THEN UTC_TIMESTAMP(6) END,
       own.error_type = CASE WHEN own.starts >= :max_starts THEN 'KilledItsProcess' ELSE 'LeaseExpired' END,
       own.error = CASE WHEN own.starts >= :max_starts
                        THEN CONCAT('killed its process: ', own.starts, ' runs never ended') ELSE 'lease expired' END,
       own.fingerprint = NULL

-- name: rescue_broken
-- A committed processing row without a lease: its handler ended the transaction, and which of its
-- writes stayed is not known. SKIP LOCKED: an uncommitted one is a handler at work.
UPDATE (SELECT consumer, message_id FROM txbox_inbox
         WHERE status = 'processing' AND lease_until IS NULL
           AND (:consumer IS NULL OR consumer = :consumer)
         LIMIT :limit
           FOR UPDATE SKIP LOCKED) AS broken
       STRAIGHT_JOIN txbox_inbox AS own ON own.consumer = broken.consumer AND own.message_id = broken.message_id
   SET own.status = 'dead', own.token = NULL, own.next_attempt_at = NULL, own.updated_at = UTC_TIMESTAMP(6),
       own.error_type = 'TransactionBroken',
       own.error = 'the handler ended the transaction of its message; what it wrote is not known',
       own.fingerprint = NULL

-- ---- order.py -------------------------------------------------------------------------------------------------------

-- name: order_waiting
-- The keys of a claim that have earlier messages unfinished: what comes behind them waits in the table.
SELECT DISTINCT CONVERT(`key` USING utf8mb4) FROM txbox_inbox
 WHERE consumer = :consumer AND `key` IN ({:rows.key})
   AND (status IN ('pending', 'failed', 'processing') OR (:dead_blocks AND status = 'dead'))
   AND NOT (token <=> :token)

-- name: sequence_state
-- The version processed last; whether an earlier one is on its way through the table; and whether this
-- one has waited long enough. Nothing is locked: a version whose predecessor has yet to commit is stored,
-- instead of waiting here for as long as another's handler runs.
SELECT (SELECT last FROM txbox_sequence WHERE consumer = :consumer AND `key` = :key),
       EXISTS (SELECT 1 FROM txbox_inbox
                WHERE consumer = :consumer AND `key` = :key
                  AND status IN ('pending', 'failed', 'processing') AND sequence < :sequence),
       EXISTS (SELECT 1 FROM txbox_inbox
                WHERE consumer = :consumer AND message_id = :message_id
                  AND received_at < UTC_TIMESTAMP(6) - INTERVAL :wait_s SECOND)

-- name: sequence_done
-- Never back: a version that comes late leaves the higher one.
INSERT INTO txbox_sequence (consumer, `key`, last) VALUES (:consumer, :key, :sequence)
ON DUPLICATE KEY UPDATE last = GREATEST(txbox_sequence.last, VALUES(last)), updated_at = UTC_TIMESTAMP(6)

-- name: sequence_next
-- The version behind the one that is done need not wait for its next look.
UPDATE txbox_inbox SET next_attempt_at = UTC_TIMESTAMP(6)
 WHERE consumer = :consumer AND `key` = :key AND status = 'pending' AND sequence = :sequence + 1

-- ---- jobs.py --------------------------------------------------------------------------------------------------------

-- name: job_create
INSERT INTO txbox_job (name) VALUES (:name) ON DUPLICATE KEY UPDATE name = txbox_job.name

-- name: job_acquire
-- One holder at a time, by the clock of the database; a holder renews with the same token.
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
-- Another text when commits may be missing: another server, or a restored table.
SELECT CONCAT_WS('/', @@hostname, @@port, @@server_id, own.create_time)
  FROM information_schema.tables own
 WHERE own.table_schema = DATABASE() AND own.table_name = 'txbox_job'

-- name: anchor_read
SELECT name, CAST(state AS SIGNED) FROM txbox_job WHERE name IN ({:rows.name})

-- name: anchor_advance
-- Never back, whoever writes; always in one order, so that two writers do not deadlock.
INSERT INTO txbox_job (name, state) VALUES {(:rows.name, :rows.position)}
ON DUPLICATE KEY UPDATE
    state = GREATEST(CAST(txbox_job.state AS SIGNED), CAST(VALUES(state) AS SIGNED)), updated_at = UTC_TIMESTAMP(6)

-- name: prune
-- Oldest completion first; SKIP LOCKED: a redelivery that is looking at a row goes first.
SELECT CONVERT(consumer USING utf8mb4), CONVERT(message_id USING utf8mb4)
  FROM txbox_inbox
 WHERE status IN ('processed', 'discarded')
   AND processed_at < UTC_TIMESTAMP(6) - INTERVAL :older_than_s SECOND
   AND (:consumer IS NULL OR consumer = :consumer)
 ORDER BY processed_at
 LIMIT :limit
   FOR UPDATE SKIP LOCKED

-- name: prune_blocks
-- prune finds the rows in the order that is best here.

-- name: prune_begin
-- Durability is not a transaction's choice here.

-- name: prune_take
-- Of rows that prune has locked in this transaction.
DELETE own FROM (WITH m (consumer, message_id) AS (VALUES {/*!80019 ROW*/ (:rows.consumer, :rows.message_id)})
        SELECT consumer, message_id FROM m) AS picked
       STRAIGHT_JOIN txbox_inbox AS own ON own.consumer = picked.consumer AND own.message_id = picked.message_id

-- name: prune_attempts
DELETE own FROM (WITH m (consumer, message_id) AS (VALUES {/*!80019 ROW*/ (:rows.consumer, :rows.message_id)})
        SELECT consumer, message_id FROM m) AS picked
       STRAIGHT_JOIN txbox_attempt AS own ON own.consumer = picked.consumer AND own.message_id = picked.message_id

-- name: prunable
SELECT count(*) FROM txbox_inbox
 WHERE status IN ('processed', 'discarded')
   AND processed_at < UTC_TIMESTAMP(6) - INTERVAL :older_than_s SECOND
   AND (:consumer IS NULL OR consumer = :consumer)

-- name: prune_orphans
-- There are no partitions here.

-- name: prune_outbox
DELETE own FROM (SELECT id FROM txbox_outbox
                  WHERE status IN ('sent', 'discarded')
                    AND ((status = 'sent' AND sent_at < UTC_TIMESTAMP(6) - INTERVAL :sent_s SECOND)
                         OR (status = 'discarded' AND available_at < UTC_TIMESTAMP(6) - INTERVAL :discarded_s SECOND))
                  LIMIT :limit
                    FOR UPDATE SKIP LOCKED) AS old
       STRAIGHT_JOIN txbox_outbox AS own FORCE INDEX (PRIMARY) ON own.id = old.id

-- name: prune_quarantine
-- Only what was accepted or discarded; what waits for a decision is never deleted.
DELETE FROM txbox_quarantine
 WHERE status <> 'quarantined' AND updated_at < UTC_TIMESTAMP(6) - INTERVAL :older_than_s SECOND
 LIMIT :limit

-- name: prunable_quarantine
SELECT count(*) FROM txbox_quarantine
 WHERE status <> 'quarantined' AND updated_at < UTC_TIMESTAMP(6) - INTERVAL :older_than_s SECOND

-- name: quarantine_bytes
SELECT CAST(COALESCE(SUM(kept_bytes), 0) AS SIGNED) FROM txbox_quarantine WHERE kept_bytes > 0

-- name: quarantine_oldest
SELECT CONVERT(consumer USING utf8mb4), CONVERT(message_id USING utf8mb4), hash, kept_bytes FROM txbox_quarantine
 WHERE kept_bytes > 0
 ORDER BY received_at
 LIMIT :limit
   FOR UPDATE SKIP LOCKED

-- name: drop_quarantined
UPDATE (WITH m (consumer, message_id, hash) AS (VALUES {/*!80019 ROW*/ (:rows.consumer, :rows.message_id, :rows.hash)})
        SELECT consumer, message_id, hash FROM m) AS picked
       STRAIGHT_JOIN txbox_quarantine AS own
          ON own.consumer = picked.consumer AND own.message_id = picked.message_id AND own.hash = picked.hash
   SET own.payload = NULL, own.kept_bytes = 0

-- name: prunable_outbox
SELECT count(*) FROM txbox_outbox
 WHERE status IN ('sent', 'discarded')
   AND ((status = 'sent' AND sent_at < UTC_TIMESTAMP(6) - INTERVAL :sent_s SECOND)
        OR (status = 'discarded'
            AND available_at < UTC_TIMESTAMP(6) - INTERVAL :discarded_s SECOND))

-- name: second_of_day
SELECT TIME_TO_SEC(UTC_TIME())

-- name: drop_payloads
-- For consumers that keep the payload of processed messages for a time only; the key and the hash stay.
UPDATE (SELECT consumer, message_id FROM txbox_inbox
         WHERE consumer = :consumer AND status = 'processed' AND has_payload
           AND processed_at < UTC_TIMESTAMP(6) - INTERVAL :older_than_s SECOND
         LIMIT :limit
           FOR UPDATE SKIP LOCKED) AS old
       STRAIGHT_JOIN txbox_inbox AS own ON own.consumer = old.consumer AND own.message_id = old.message_id
   SET own.payload = NULL, own.headers = NULL, own.origin = NULL, own.content_type = NULL, own.has_payload = FALSE

-- name: due
-- One look for a whole worker: in how many seconds each consumer's next row is due, and under the empty name
-- the outbox's; only what is due within `ahead_s`. Rows beside the route :local may be for its App: see
-- relay_strays. Nothing is asked but the index, which the server then reads
-- in one jump for each consumer and each number of starts, past the NULLs of what is never due.
SELECT CONVERT(soon.consumer USING utf8mb4), TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), soon.due_at) / 1e6
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
-- What keeps `run --once` alive: due rows, rows that somebody has leased, and versions whose turn it is: they
-- look again within two seconds.
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
-- As work_left: rows that wait for one which is dead, or not yet due, keep nothing alive.
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
SELECT count(*), NULL FROM information_schema.tables
 WHERE table_schema = DATABASE() AND table_name = 'txbox_schema'

-- name: schema_lock
-- Two `txbox init` at once: the second waits. Locks are named across databases.
SELECT GET_LOCK(CONCAT('txbox.', SHA2(DATABASE(), 224)), 3600)

-- name: schema_unlock
SELECT RELEASE_LOCK(CONCAT('txbox.', SHA2(DATABASE(), 224)))

-- name: guard_check
-- The savepoint guards transactional tables only.
SELECT count(*) AS triggers, 'origin' AS role FROM information_schema.tables
 WHERE table_schema = DATABASE() AND table_name = 'txbox_inbox' AND engine = 'InnoDB'

-- name: schema_creators
-- Names are found in one database only, and what is not there is a built-in.

-- ---- rows.py, audit.py ----------------------------------------------------------------------------------------------

-- name: status
SELECT CONVERT(own.consumer USING utf8mb4), own.status, count(*), min(own.received_at)
  FROM txbox_inbox AS own GROUP BY own.consumer, own.status ORDER BY own.consumer, own.status

-- name: oldest_unfinished
SELECT CONVERT(own.consumer USING utf8mb4),
       TIMESTAMPDIFF(MICROSECOND, min(own.received_at), UTC_TIMESTAMP(6)) / 1e6
  FROM txbox_inbox AS own WHERE own.status IN ('pending', 'processing', 'failed')
 GROUP BY own.consumer ORDER BY own.consumer

-- name: quarantine_status
SELECT CONVERT(own.consumer USING utf8mb4), count(*), min(own.received_at)
  FROM txbox_quarantine AS own WHERE own.status = 'quarantined' GROUP BY own.consumer ORDER BY own.consumer

-- name: sizes
-- As InnoDB estimates them; a table is its primary key, so only the other indexes count as such.
SELECT table_name, data_length, index_length, 1
  FROM information_schema.tables
 WHERE table_schema = DATABASE() AND table_type = 'BASE TABLE' AND LEFT(table_name, 6) = 'txbox_'
 ORDER BY table_name

-- name: list
-- Keyset pages by arrival, newest first.
SELECT CONVERT(consumer USING utf8mb4), CONVERT(message_id USING utf8mb4), status, CONVERT(topic USING utf8mb4),
       CONVERT(type USING utf8mb4), CONVERT(`key` USING utf8mb4), attempts, starts, received_at, updated_at,
       processed_at, next_attempt_at, lease_until, error_type, error, fingerprint, has_payload, arrival
  FROM txbox_inbox
 WHERE (:consumer IS NULL OR consumer = :consumer)
   AND (:message_id IS NULL OR message_id = :message_id)
   AND (:status IS NULL OR status = :status)
   AND (:topic IS NULL OR topic = :topic)
   AND (:type IS NULL OR type = :type)
   AND (:key IS NULL OR `key` = :key)
   AND (:error_type IS NULL OR error_type = :error_type)
   AND (:fingerprint IS NULL OR fingerprint = :fingerprint)
   AND (:older_than_s IS NULL OR received_at < UTC_TIMESTAMP(6) - INTERVAL :older_than_s SECOND)
   AND (:before IS NULL OR arrival < :before)
 ORDER BY arrival DESC
 LIMIT :limit

-- name: list_quarantine
SELECT CONVERT(consumer USING utf8mb4), CONVERT(message_id USING utf8mb4), hash, reason,
       CONVERT(topic USING utf8mb4), CONVERT(type USING utf8mb4), CONVERT(`key` USING utf8mb4), seen,
       received_at, updated_at, status, kept_bytes
  FROM txbox_quarantine
 WHERE (:consumer IS NULL OR consumer = :consumer)
   AND (:message_id IS NULL OR message_id = :message_id)
   AND (:hash_prefix IS NULL OR LEFT(LOWER(HEX(hash)), CHAR_LENGTH(:hash_prefix)) = :hash_prefix)
   AND (:status IS NULL OR status = :status)
   AND (:topic IS NULL OR topic = :topic)
   AND (:type IS NULL OR type = :type)
   AND (:older_than_s IS NULL OR received_at < UTC_TIMESTAMP(6) - INTERVAL :older_than_s SECOND)
 ORDER BY received_at DESC
 LIMIT :limit

-- name: show
SELECT CONVERT(consumer USING utf8mb4), CONVERT(message_id USING utf8mb4), status, CONVERT(topic USING utf8mb4),
       CONVERT(type USING utf8mb4), CONVERT(`key` USING utf8mb4), sequence, received_at, updated_at, processed_at,
       payload_hash, attempts, starts, next_attempt_at, lease_until, error_type, error, fingerprint, content_type,
       headers, origin, payload, has_payload, key_id, arrival, result
  FROM txbox_inbox WHERE consumer = :consumer AND message_id = :message_id

-- name: show_attempts
SELECT attempt, status, error_type, error, fingerprint, recorded_at
  FROM txbox_attempt WHERE consumer = :consumer AND message_id = :message_id ORDER BY number

-- name: show_quarantine
SELECT CONVERT(consumer USING utf8mb4), CONVERT(message_id USING utf8mb4), hash, reason,
       CONVERT(topic USING utf8mb4), CONVERT(type USING utf8mb4), CONVERT(`key` USING utf8mb4), content_type,
       headers, origin, payload, key_id, seen, received_at, updated_at, status, kept_bytes
  FROM txbox_quarantine
 WHERE (:consumer IS NULL OR consumer = :consumer)
   AND (:message_id IS NULL OR message_id = :message_id)
   AND (:hash_prefix IS NULL OR LEFT(LOWER(HEX(hash)), CHAR_LENGTH(:hash_prefix)) = :hash_prefix)
 ORDER BY received_at
 LIMIT :limit

-- name: select_quarantine
-- What an operator's command means, in the order in which it came.
SELECT CONVERT(consumer USING utf8mb4), CONVERT(message_id USING utf8mb4), hash FROM txbox_quarantine
 WHERE (:consumer IS NULL OR consumer = :consumer)
   AND (:message_id IS NULL OR message_id = :message_id)
   AND (:hash_prefix IS NULL OR LEFT(LOWER(HEX(hash)), CHAR_LENGTH(:hash_prefix)) = :hash_prefix)
   AND (:status IS NULL OR status = :status)
   AND (:topic IS NULL OR topic = :topic)
   AND (:type IS NULL OR type = :type)
   AND (:older_than_s IS NULL OR received_at < UTC_TIMESTAMP(6) - INTERVAL :older_than_s SECOND)
 ORDER BY received_at, hash
 LIMIT :limit

-- name: take_quarantined
SELECT CONVERT(consumer USING utf8mb4), CONVERT(message_id USING utf8mb4), hash, reason,
       CONVERT(topic USING utf8mb4), CONVERT(type USING utf8mb4), CONVERT(`key` USING utf8mb4), content_type,
       headers, origin, payload, key_id, seen, received_at, updated_at, status, kept_bytes
  FROM txbox_quarantine
 WHERE consumer = :consumer AND message_id = :message_id AND hash = :hash AND status = 'quarantined'
   FOR UPDATE

-- name: end_quarantined
-- What was decided on is not needed any more: the row stays for its time, its content goes.
UPDATE (WITH m (consumer, message_id, hash) AS (VALUES {/*!80019 ROW*/ (:rows.consumer, :rows.message_id, :rows.hash)})
        SELECT consumer, message_id, hash FROM m) AS picked
       STRAIGHT_JOIN txbox_quarantine AS own
          ON own.consumer = picked.consumer AND own.message_id = picked.message_id AND own.hash = picked.hash
   SET own.status = :status, own.payload = NULL, own.kept_bytes = 0, own.headers = NULL,
       own.updated_at = UTC_TIMESTAMP(6)
 WHERE own.status = 'quarantined'

-- name: count_for_change
-- What select_for_change would find in all batches of each consumer, and how many of that are spared; nothing is locked.
SELECT CONVERT(consumer USING utf8mb4), count(*), count(CASE WHEN error_type = :spared THEN 1 END) FROM txbox_inbox
 WHERE (:consumer IS NULL OR consumer = :consumer)
   AND (:message_id IS NULL OR message_id = :message_id)
   AND status = :status
   AND (has_payload OR NOT :needs_payload)
   AND (:topic IS NULL OR topic = :topic)
   AND (:type IS NULL OR type = :type)
   AND (:key IS NULL OR `key` = :key)
   AND (:error_type IS NULL OR error_type = :error_type)
   AND (:fingerprint IS NULL OR fingerprint = :fingerprint)
   AND (:older_than_s IS NULL OR received_at < UTC_TIMESTAMP(6) - INTERVAL :older_than_s SECOND)
 GROUP BY consumer ORDER BY consumer

-- name: select_for_change
-- The rows that an operator's command may touch now; SKIP LOCKED: what a live delivery holds is left to it.
-- Of one consumer in arrival order, as in an index, so that all batches together read each row once.
SELECT CONVERT(consumer USING utf8mb4), CONVERT(message_id USING utf8mb4), status, arrival, error_type
  FROM txbox_inbox FORCE INDEX (txbox_inbox_open)
 WHERE consumer = :consumer
   AND (:message_id IS NULL OR message_id = :message_id)
   AND status = :status
   AND (has_payload OR NOT :needs_payload)
   AND (:topic IS NULL OR topic = :topic)
   AND (:type IS NULL OR type = :type)
   AND (:key IS NULL OR `key` = :key)
   AND (:error_type IS NULL OR error_type = :error_type)
   AND (:fingerprint IS NULL OR fingerprint = :fingerprint)
   AND (:older_than_s IS NULL OR received_at < UTC_TIMESTAMP(6) - INTERVAL :older_than_s SECOND)
   AND arrival > :after
 ORDER BY arrival
 LIMIT :limit
   FOR UPDATE SKIP LOCKED

-- name: retry
-- A full new budget: the history stays in txbox_attempt.
UPDATE (WITH m (consumer, message_id) AS (VALUES {/*!80019 ROW*/ (:rows.consumer, :rows.message_id)})
        SELECT consumer, message_id FROM m) AS picked
       STRAIGHT_JOIN txbox_inbox AS own ON own.consumer = picked.consumer AND own.message_id = picked.message_id
   SET own.status = 'failed', own.attempts = 0, own.starts = 0, own.next_attempt_at = UTC_TIMESTAMP(6),
       own.updated_at = UTC_TIMESTAMP(6), own.lease_until = NULL, own.token = NULL
 WHERE own.status IN ('dead', 'failed')

-- name: discard
UPDATE (WITH m (consumer, message_id) AS (VALUES {/*!80019 ROW*/ (:rows.consumer, :rows.message_id)})
        SELECT consumer, message_id FROM m) AS picked
       STRAIGHT_JOIN txbox_inbox AS own ON own.consumer = picked.consumer AND own.message_id = picked.message_id
   SET own.status = 'discarded', own.processed_at = UTC_TIMESTAMP(6), own.updated_at = UTC_TIMESTAMP(6),
       own.next_attempt_at = NULL, own.lease_until = NULL, own.token = NULL
 WHERE own.status IN ('dead', 'failed', 'pending')

-- name: replay_read
-- In arrival order, for a replay as another consumer or of a processed row.
SELECT CONVERT(message_id USING utf8mb4), CONVERT(topic USING utf8mb4), CONVERT(type USING utf8mb4),
       CONVERT(`key` USING utf8mb4), sequence, received_at, payload_hash, attempts, starts, content_type, headers,
       origin, payload, has_payload, key_id, arrival
  FROM txbox_inbox
 WHERE consumer = :consumer AND has_payload AND arrival > :after
   AND (:message_id IS NULL OR message_id = :message_id)
   AND (:status IS NULL OR status = :status)
   AND (:topic IS NULL OR topic = :topic)
   AND (:type IS NULL OR type = :type)
   AND (:key IS NULL OR `key` = :key)
 ORDER BY arrival
 LIMIT :limit

-- name: audit
INSERT INTO txbox_audit (actor, action, filter, affected, reason, login)
VALUES (:actor, :action, :filter, :affected, :reason, SESSION_USER())

-- ---- waits.py -------------------------------------------------------------------------------------------------------

-- name: waits_order
-- Of rows that have not run: the first row of their key that is in their way.
SELECT CONVERT(own.message_id USING utf8mb4), CONVERT(head.message_id USING utf8mb4), head.status,
       head.next_attempt_at
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
-- Of rows that have not run: their version, the one processed last, and the lowest that is in their way.
SELECT CONVERT(own.message_id USING utf8mb4), own.sequence, own.last, CONVERT(head.message_id USING utf8mb4),
       head.status, head.next_attempt_at, head.sequence
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

-- name: stage
-- In the caller's transaction, many messages in one statement; `number` is the order of their inserts.
-- A re-run under the same cause stages the same ids, and changes nothing.
INSERT INTO txbox_outbox (id, topic, type, `key`, content_type, headers, payload, key_id, cause_consumer, cause_id,
                          available_at, route)
VALUES {(:rows.id, :rows.topic, :rows.type, :rows.key, :rows.content_type, :rows.headers, :rows.payload, :key_id,
         :rows.cause_consumer, :rows.cause_id, UTC_TIMESTAMP(6) + INTERVAL :rows.delay_s SECOND, :rows.route)}
ON DUPLICATE KEY UPDATE id = txbox_outbox.id

-- name: stage_notify
-- Nobody listens: relays poll.

-- name: stage_lock
-- Locks of InnoDB's own end with the transaction, those of GET_LOCK do not: so a row for each of 4,096
-- buckets of keys, held until the caller commits. Sorted by the caller.
INSERT INTO txbox_job (name) VALUES {(CONCAT('order:', MOD(:rows.lock, 4096)))}
ON DUPLICATE KEY UPDATE name = txbox_job.name

-- name: relay_page
-- What may be due of one route, and of what was staged without one, oldest first, from where the last look
-- ended; nothing is locked. Two scans, each in the order of the index: with `route IN (…)` all that is due
-- would be sorted.
(SELECT CONVERT(id USING utf8mb4) AS id, number, CONVERT(topic USING utf8mb4) AS topic,
         CONVERT(`key` USING utf8mb4) AS `key`, available_at, COALESCE(LENGTH(payload), 0) AS payload_bytes,
         CONVERT(type USING utf8mb4) AS type
    FROM txbox_outbox
   WHERE status = 'pending' AND route = :route AND available_at <= UTC_TIMESTAMP(6)
     AND available_at >= COALESCE(:after_at, '1000-01-01')
     AND NOT (available_at = COALESCE(:after_at, '1000-01-01') AND number <= :after_number)
     AND (:whole OR (topic IN ({:rows.topic})) = :named)
   ORDER BY available_at, number
   LIMIT :limit)
UNION ALL
(SELECT CONVERT(id USING utf8mb4) AS id, number, CONVERT(topic USING utf8mb4) AS topic,
         CONVERT(`key` USING utf8mb4) AS `key`, available_at, COALESCE(LENGTH(payload), 0) AS payload_bytes,
         CONVERT(type USING utf8mb4) AS type
    FROM txbox_outbox
   WHERE status = 'pending' AND route = '' AND available_at <= UTC_TIMESTAMP(6)
     AND available_at >= COALESCE(:after_at, '1000-01-01')
     AND NOT (available_at = COALESCE(:after_at, '1000-01-01') AND number <= :after_number)
     AND (topic IN ({:rows.topic})) = :named
   ORDER BY available_at, number
   LIMIT :limit)
 ORDER BY available_at, number
 LIMIT :limit

-- name: relay_heads
-- Of each key, by type, the first row that others must not overtake, and how many there are up to :last. A row that
-- was staged with a delay counts once that is over; any other counts even if this transaction's clock,
-- which stood still at its start, says that its time is yet to come.
SELECT CONVERT(topic USING utf8mb4), CONVERT(`key` USING utf8mb4), CONVERT(type USING utf8mb4), MIN(number), COUNT(*)
  FROM txbox_outbox
 WHERE status = 'pending' AND number <= :last
   AND (route, topic, `key`) IN ({(:rows.route, :rows.topic, :rows.key)})
   AND (token IS NOT NULL OR attempts > 0 OR available_at = staged_at OR available_at <= UTC_TIMESTAMP(6))
 GROUP BY topic, `key`, type

-- name: relay_lease
-- Joined to a list by the key, here and below: of a small table the server would else read every row, and
-- wait for those that others have staged and not yet committed.
SELECT CONVERT(own.id USING utf8mb4), number, CONVERT(topic USING utf8mb4), CONVERT(type USING utf8mb4),
       CONVERT(`key` USING utf8mb4), content_type, headers, payload, key_id, staged_at, attempts
  FROM (WITH m (id) AS (VALUES {/*!80019 ROW*/ (:rows.id)}) SELECT id FROM m) AS mine
       STRAIGHT_JOIN txbox_outbox AS own FORCE INDEX (PRIMARY) ON own.id = mine.id
 WHERE status = 'pending' AND available_at <= UTC_TIMESTAMP(6)
   FOR UPDATE SKIP LOCKED

-- name: relay_take
-- Of rows that relay_lease has locked in this transaction.
UPDATE (WITH m (id) AS (VALUES {/*!80019 ROW*/ (:rows.id)}) SELECT id FROM m) AS mine
       STRAIGHT_JOIN txbox_outbox AS own FORCE INDEX (PRIMARY) ON own.id = mine.id
   SET token = :token, available_at = UTC_TIMESTAMP(6) + INTERVAL :lease_s SECOND

-- name: relay_release
-- Fenced: rows that were not sent, by no fault of theirs; they keep their place before later ones.
UPDATE (WITH m (id) AS (VALUES {/*!80019 ROW*/ (:rows.id)}) SELECT id FROM m) AS mine
       STRAIGHT_JOIN txbox_outbox AS own FORCE INDEX (PRIMARY) ON own.id = mine.id
   SET token = NULL, available_at = staged_at
 WHERE token = :token AND status = 'pending'

-- name: relay_sent
DELETE own FROM (WITH m (id) AS (VALUES {/*!80019 ROW*/ (:rows.id)}) SELECT id FROM m) AS mine
       STRAIGHT_JOIN txbox_outbox AS own FORCE INDEX (PRIMARY) ON own.id = mine.id
 WHERE token = :token AND status = 'pending'

-- name: relay_kept
-- As relay_sent, for rows that are kept for a time.
UPDATE (WITH m (id) AS (VALUES {/*!80019 ROW*/ (:rows.id)}) SELECT id FROM m) AS mine
       STRAIGHT_JOIN txbox_outbox AS own FORCE INDEX (PRIMARY) ON own.id = mine.id
   SET status = 'sent', token = NULL, sent_at = UTC_TIMESTAMP(6), error_type = NULL, error = NULL
 WHERE token = :token AND status = 'pending'

-- name: relay_failed
UPDATE txbox_outbox
   SET status = :status, attempts = attempts + 1, token = NULL, error_type = :error_type, error = :error,
       available_at = UTC_TIMESTAMP(6) + INTERVAL :delay_s SECOND
 WHERE id = :id AND token = :token AND status = 'pending'

-- name: relay_left
-- What is due or leased of one route, and of what was staged without one.
SELECT DISTINCT CONVERT(topic USING utf8mb4), CONVERT(type USING utf8mb4) FROM txbox_outbox
 WHERE status = 'pending' AND (token IS NOT NULL OR available_at <= UTC_TIMESTAMP(6))
   AND route IN (:route, '')
   AND ((:whole AND route = :route) OR (topic IN ({:rows.topic})) = :named)

-- name: relay_strays
-- What goes to consumers of the database itself and is not on this App's own route; and what has no route at all.
SELECT DISTINCT CONVERT(route USING utf8mb4), CONVERT(topic USING utf8mb4), CONVERT(type USING utf8mb4),
       CONVERT(cause_consumer USING utf8mb4)
  FROM txbox_outbox
 WHERE status = 'pending' AND (route = '' OR (route >= 'local' AND route < 'local;')) AND route <> :route

-- name: relay_adopt
UPDATE txbox_outbox SET route = :route
 WHERE status = 'pending' AND token IS NULL AND route = :from_route AND topic = :topic
   AND type <=> :type AND cause_consumer <=> :cause_consumer
 LIMIT :limit

-- ---- outbox_rows.py -------------------------------------------------------------------------------------------------

-- name: outbox_status
-- Overdue: due for a minute, and never tried.
SELECT CONVERT(own.topic USING utf8mb4), CONVERT(own.route USING utf8mb4), own.state, count(*),
       TIMESTAMPDIFF(MICROSECOND, min(own.staged_at), UTC_TIMESTAMP(6)) / 1e6, CAST(sum(own.overdue) AS SIGNED)
  FROM (SELECT topic, route, staged_at,
               status = 'pending' AND token IS NULL AND attempts = 0
               AND available_at < UTC_TIMESTAMP(6) - INTERVAL 1 MINUTE AS overdue,
               CASE WHEN status <> 'pending' THEN status WHEN available_at <= UTC_TIMESTAMP(6) THEN 'due'
                    WHEN token IS NOT NULL THEN 'leased' WHEN attempts > 0 THEN 'failed' ELSE 'delayed' END AS state
          FROM txbox_outbox) AS own
 GROUP BY own.topic, own.route, own.state ORDER BY own.topic, own.route, own.state

-- name: outbox_list
-- Keyset pages by number, newest first; each row with the one of its key that must leave before it, if any.
SELECT CONVERT(own.id USING utf8mb4), own.number, own.state, CONVERT(own.topic USING utf8mb4),
       CONVERT(own.type USING utf8mb4), CONVERT(own.`key` USING utf8mb4), own.attempts, own.staged_at, own.available_at,
       own.sent_at, CONVERT(own.cause_consumer USING utf8mb4), CONVERT(own.cause_id USING utf8mb4), own.error_type,
       own.error, own.key_id, CONVERT(own.route USING utf8mb4),
       CASE WHEN own.`key` IS NOT NULL AND own.status = 'pending' THEN
           (SELECT CONVERT(head.id USING utf8mb4) FROM txbox_outbox AS head
             WHERE head.status = 'pending' AND head.route IN (own.route, '')
               AND head.topic = own.topic AND head.`key` = own.`key`
               AND head.number < own.number
               AND (head.token IS NOT NULL OR head.attempts > 0 OR head.available_at = head.staged_at
                    OR head.available_at <= UTC_TIMESTAMP(6))
             ORDER BY head.number LIMIT 1) END
  FROM (SELECT id, number, status, topic, type, `key`, attempts, staged_at, available_at, sent_at, cause_consumer,
               cause_id, error_type, error, key_id, route,
               CASE WHEN status <> 'pending' THEN status WHEN available_at <= UTC_TIMESTAMP(6) THEN 'due'
                    WHEN token IS NOT NULL THEN 'leased' WHEN attempts > 0 THEN 'failed' ELSE 'delayed' END AS state
          FROM txbox_outbox
         WHERE (:id IS NULL OR id = :id)
           AND (:stored IS NULL OR status = :stored)
           AND (:state IS NULL
                OR CASE WHEN status <> 'pending' THEN status WHEN available_at <= UTC_TIMESTAMP(6) THEN 'due'
                        WHEN token IS NOT NULL THEN 'leased' WHEN attempts > 0 THEN 'failed' ELSE 'delayed' END
                   = :state)
           AND (:topic IS NULL OR topic = :topic)
           AND (:route IS NULL OR route = :route)
           AND (:type IS NULL OR type = :type)
           AND (:key IS NULL OR `key` = :key)
           AND (:error_type IS NULL OR error_type = :error_type)
           AND (:older_than_s IS NULL
                OR staged_at < UTC_TIMESTAMP(6) - INTERVAL :older_than_s SECOND)
           AND (:before IS NULL OR number < :before)
         ORDER BY number DESC
         LIMIT :limit) AS own
 ORDER BY own.number DESC

-- name: outbox_content
SELECT content_type, headers, payload, key_id FROM txbox_outbox WHERE id = :id

-- name: outbox_select
-- The rows that an operator's command may touch now; SKIP LOCKED: what a relay is marking is left to it.
SELECT CONVERT(id USING utf8mb4), number FROM txbox_outbox
 WHERE (:id IS NULL OR id = :id)
   AND status IN ('pending', 'dead')
   AND CASE WHEN status <> 'pending' THEN status WHEN available_at <= UTC_TIMESTAMP(6) THEN 'due'
            WHEN token IS NOT NULL THEN 'leased' WHEN attempts > 0 THEN 'failed' ELSE 'delayed' END
       IN ({:rows.state})
   AND (:topic IS NULL OR topic = :topic)
   AND (:route IS NULL OR route = :route)
   AND (:type IS NULL OR type = :type)
   AND (:key IS NULL OR `key` = :key)
   AND (:error_type IS NULL OR error_type = :error_type)
   AND (:older_than_s IS NULL
        OR staged_at < UTC_TIMESTAMP(6) - INTERVAL :older_than_s SECOND)
   AND number > :after
 ORDER BY number
 LIMIT :limit
   FOR UPDATE SKIP LOCKED

-- name: outbox_retry
-- A full new budget; available_at as staged, so that it is before the later rows of its key again.
UPDATE txbox_outbox SET status = 'pending', attempts = 0, token = NULL, available_at = staged_at
 WHERE id IN ({:rows.id}) AND status IN ('pending', 'dead')

-- name: outbox_discard
-- Of a row that is no longer pending, available_at says when it was given up.
UPDATE txbox_outbox SET status = 'discarded', token = NULL, available_at = UTC_TIMESTAMP(6)
 WHERE id IN ({:rows.id}) AND status IN ('pending', 'dead')

-- name: outbox_reroute
-- A new budget, as the attempts were those of the old route; what was tried is due at once. MySQL assigns from left
-- to right, so that attempts comes last.
UPDATE txbox_outbox SET status = 'pending', route = :to, token = NULL,
       available_at = CASE WHEN attempts > 0 THEN staged_at ELSE available_at END, attempts = 0
 WHERE id IN ({:rows.id}) AND status IN ('pending', 'dead')
