-- txbox's statements for SQLite 3.35 and later, where they are not those of common.sql.
-- `:name` is a parameter; a region in braces is repeated for each row, and `:rows.name` is a column of that row.
-- `nothing:` names queries with nothing to do. There is one writer at a time, so SKIP LOCKED is not needed, nor any
-- lock timeout except the connection's. Statements name the rows they touch.
-- Times are UTC text of fixed width, so they compare as text.
-- Each section has the queries of the module it names.

-- fragment: now
strftime('%Y-%m-%d %H:%M:%f', 'now')

-- fragment: stable_now
[now]

-- fragment: ago seconds
strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', -[seconds]))

-- fragment: stable_ago seconds
[ago [seconds]]

-- fragment: in seconds
strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', [seconds]))

-- fragment: instant seconds
strftime('%Y-%m-%d %H:%M:%f', [seconds], 'unixepoch')

-- fragment: age moment
round((julianday('now') - julianday([moment])) * 86400.0, 3)

-- fragment: clock
-- A day's fraction keeps milliseconds to 40 us: unrounded, half of what was written in this one lay in the future.
round((julianday('now') - 2440587.5) * 86400, 3)

-- fragment: text column
[column]

-- fragment: time moment
[moment]

-- fragment: joined column
group_concat([column], ',')

-- fragment: in_rows name type
IN ({:rows.[name]})

-- fragment: same a b
([a] IS [b])

-- fragment: greatest
max

-- fragment: hex column
lower(hex([column]))

-- fragment: open
status <> 'processed' AND

-- fragment: by_status
txbox_inbox WHERE consumer = :consumer

-- fragment: outbox_by_due
txbox_outbox INDEXED BY txbox_outbox_due

-- fragment: inbox_by_due
txbox_inbox

-- fragment: look
SELECT

-- fragment: kept_rows
txbox_inbox WHERE consumer = :consumer AND has_payload ORDER BY arrival

-- fragment: skip_locked

-- fragment: for_update

-- fragment: durable

-- fragment: parked
RETURNING status, attempts

-- fragment: unless_there
ON CONFLICT (consumer, message_id) DO NOTHING

-- ---- inbox.py: claims -----------------------------------------------------------------------------------------------

-- fragment: claimed
INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, sequence, processed_at, payload_hash)
VALUES {(:consumer, :rows.message_id, 'processed', :rows.topic, :rows.type, :rows.key, :rows.sequence,
         [now], :rows.payload_hash)}
ON CONFLICT (consumer, message_id) DO NOTHING
RETURNING message_id

-- name: claim
[claimed]

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

-- nothing: rehearse_limit
-- The connection's progress handler ends a statement.

-- name: rehearse_references
-- Instead, those that lead nowhere before and after are compared.
SELECT "table", rowid, parent, fkid FROM pragma_foreign_key_check

-- nothing: bound_lock_timeout restore_lock_timeout limit_idle
-- The wait is the connection's busy_timeout, at BEGIN.

-- name: arm
-- From here on every COMMIT fails, because the row references one that never exists.
INSERT INTO txbox_guard (number, token, never) VALUES (1, :token, 1)
ON CONFLICT (number) DO UPDATE SET token = excluded.token, never = 1

-- nothing: setters
-- No trigger can set anything here.

-- name: close
-- Fails (SQLITE_MISMATCH: text is not a row number) unless this is the transaction that armed the guard.
-- Otherwise gives the row a reference that can be committed.
INSERT INTO txbox_guard (number, token, never)
SELECT CASE WHEN EXISTS (SELECT 1 FROM txbox_guard WHERE token = :token AND never = 1) THEN 1
            ELSE 'the handler left the transaction that claimed its message' END, :token, NULL
 WHERE true
ON CONFLICT (number) DO UPDATE SET never = NULL
RETURNING token

-- nothing: complete rescue_broken
-- The claim already wrote the row as processed, so there is never a committed processing row without a lease.

-- ---- inbox.py -------------------------------------------------------------------------------------------------------

-- name: classify
SELECT message_id, status, payload_hash, has_payload, attempts, starts,
       coalesce(next_attempt_at <= [now], true) AS due, token, lease_until IS NOT NULL AS leased
  FROM txbox_inbox
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})

-- name: accept
-- An open guard (this call is inside a handler run by txbox) is left alone.
[claimed]

-- name: store
-- One row with payload and key; the second of two writers changes nothing.
INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, sequence, payload_hash, next_attempt_at,
                         content_type, headers, origin, payload, has_payload, key_id)
VALUES {(:consumer, :rows.message_id, 'pending', :rows.topic, :rows.type, :rows.key, :rows.sequence,
         :rows.payload_hash, [in :delay_s],
         :rows.content_type, :rows.headers, :rows.origin, :rows.payload, true, :key_id)}
ON CONFLICT (consumer, message_id) DO NOTHING
RETURNING message_id

-- fragment: anew column
[column] = CASE WHEN txbox_quarantine.message_id = '' THEN excluded.[column] ELSE txbox_quarantine.[column] END

-- name: quarantine
-- The same message again only increments the counter. Without an id an equal one may be another message: it takes the
-- row anew, so that it is not lost where somebody has already decided on the one before.
INSERT INTO txbox_quarantine (consumer, message_id, hash, reason, topic, type, key,
                              content_type, headers, origin, payload, key_id, kept_bytes)
VALUES (:consumer, :message_id, :hash, :reason, :topic, :type, :key,
        :content_type, :headers, :origin, :payload, :key_id, coalesce(length(:payload), 0))
ON CONFLICT (consumer, message_id, hash)
DO UPDATE SET seen = seen + 1, updated_at = [now], [anew status], [anew headers], [anew payload], [anew kept_bytes], [anew key_id]

-- ---- inbox.py: failures ---------------------------------------------------------------------------------------------

-- name: record_own
-- Overwrites the row this transaction claimed: the guard is still armed with its token.
UPDATE txbox_inbox
   SET processed_at = NULL, [failing], [content]
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
-- with it; the one due longest, so that newer ones cannot keep it waiting. There are few of these, so one statement
-- serves all consumers, and sorts them; ordered ones take heads only.
[take]
 WHERE arrival IN (SELECT due.arrival FROM txbox_inbox AS due
                    WHERE [is_due starts > 0]
                      AND (NOT :heads_only OR due.key IS NULL
                           OR due.arrival = [head due.key])
                    ORDER BY due.next_attempt_at, due.arrival
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

-- nothing: lease_stored
-- store_leased already leased the rows.

-- name: heartbeat
UPDATE txbox_inbox SET lease_until = [in :lease_s]
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

-- ---- order.py -------------------------------------------------------------------------------------------------------

-- name: sequence_done
-- Never goes back: a late version leaves the higher one in place.
INSERT INTO txbox_sequence (consumer, key, last) VALUES (:consumer, :key, :sequence)
ON CONFLICT (consumer, key)
DO UPDATE SET last = max(txbox_sequence.last, excluded.last), updated_at = [now]

-- ---- jobs.py --------------------------------------------------------------------------------------------------------

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

-- name: prune_attempts
DELETE FROM txbox_attempt
 WHERE number IN (SELECT own.number FROM (VALUES {(:rows.consumer, :rows.message_id)}) AS m
                   JOIN txbox_attempt AS own ON own.consumer = m.column1 AND own.message_id = m.column2)

-- name: prune_outbox
DELETE FROM txbox_outbox
 WHERE number IN (SELECT old.number FROM txbox_outbox AS old
                   WHERE [outgoing_past]
                   LIMIT :limit)

-- name: prune_quarantine
DELETE FROM txbox_quarantine
 WHERE rowid IN (SELECT rowid FROM txbox_quarantine
                  WHERE [decided]
                  LIMIT :limit)

-- fragment: picked_quarantined
rowid IN (SELECT own.rowid FROM (VALUES {(:rows.consumer, :rows.message_id, :rows.hash)}) AS m
                  JOIN txbox_quarantine AS own
                    ON own.consumer = m.column1 AND own.message_id = m.column2 AND own.hash = m.column3)

-- name: drop_quarantined
UPDATE txbox_quarantine SET payload = NULL, kept_bytes = 0
 WHERE [picked_quarantined]

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
        [stray_routes]) AS soon
 WHERE soon.at <= [in :ahead_s]

-- ---- schema.py ------------------------------------------------------------------------------------------------------

-- name: schema_exists
SELECT count(*), NULL AS schema FROM sqlite_master WHERE type = 'table' AND name = 'txbox_schema'

-- nothing: schema_lock schema_unlock session
-- BEGIN IMMEDIATE already holds the one write lock.

-- name: guard_check
-- The guard works only while foreign keys are enforced on this connection.
SELECT (SELECT foreign_keys FROM pragma_foreign_keys)
       AND (SELECT count(*) FROM pragma_foreign_key_list('txbox_guard')) AS triggers,
       'origin' AS role

-- ---- admin/look.py, admin/changes.py, admin/replay.py ---------------------------------------------------------------

-- name: sizes
-- The size of the whole file, including indexes; that of a single table would take reading every page.
SELECT 'database file', own.page_count * size.page_size, NULL, 1
  FROM pragma_page_count AS own, pragma_page_size AS size

-- name: inbox_states
-- What became of messages that were retried.
SELECT own.consumer, own.message_id, own.status, own.attempts, own.fingerprint
  FROM (VALUES {(:rows.consumer, :rows.message_id)}) AS m
  JOIN txbox_inbox AS own ON own.consumer = m.column1 AND own.message_id = m.column2

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

-- name: edit_set_aside
-- What stands in the row stays readable in the quarantine, under the hash of its payload. Its bytes do not count
-- there: it is no stranger's doing, and is kept as long as its message.
INSERT INTO txbox_quarantine (consumer, message_id, hash, status, reason, topic, type, key,
                              content_type, headers, origin, payload, key_id)
SELECT consumer, message_id, :hash, 'replaced', :reason, topic, type, key,
       content_type, :headers, origin, :payload, :key_id
  FROM txbox_inbox WHERE consumer = :consumer AND message_id = :message_id
ON CONFLICT (consumer, message_id, hash) DO UPDATE
   SET status = CASE WHEN txbox_quarantine.status = 'quarantined' THEN txbox_quarantine.status ELSE 'replaced' END,
       reason = CASE WHEN txbox_quarantine.status = 'quarantined' THEN txbox_quarantine.reason ELSE excluded.reason END,
       headers = excluded.headers, payload = excluded.payload, key_id = excluded.key_id, updated_at = [now]

-- name: quarantine_end
-- Once decided, the content is no longer needed and is dropped; the row stays for its retention time.
UPDATE txbox_quarantine
   SET status = :status, payload = NULL, kept_bytes = 0, headers = NULL, updated_at = [now]
 WHERE [picked_quarantined]
   AND status = 'quarantined'

-- fragment: before_it
(SELECT head.id FROM txbox_outbox AS head
             WHERE head.status = 'pending' AND head.route IN (own.route, '')
               AND head.topic = own.topic AND head.key = own.key
               AND head.number < own.number
               AND (head.token IS NOT NULL OR head.attempts > 0 OR head.available_at = head.staged_at
                    OR head.available_at <= [now])
             ORDER BY head.number LIMIT 1)

-- ---- admin/doctor ---------------------------------------------------------------------------------------------------
-- None of these reads a table through: names are found by jumps in an index, and rows are counted up to a limit.

-- nothing: doctor_clock doctor_transactions
-- The clock is this machine's, and nobody knows of the transactions of other processes.

-- name: doctor_settings
SELECT 'journal_mode', journal_mode FROM pragma_journal_mode
 UNION ALL
SELECT 'synchronous', CAST(synchronous AS TEXT) FROM pragma_synchronous

-- name: doctor_columns
SELECT own.name, part.name FROM sqlite_master AS own, pragma_table_info(own.name) AS part
 WHERE own.type IN ('table', 'view') AND own.name LIKE 'txbox\_%' ESCAPE '\'

-- name: doctor_indexes
SELECT own.tbl_name, own.name, 1 FROM sqlite_master AS own
 WHERE own.type = 'index' AND own.name LIKE 'txbox\_%' ESCAPE '\'

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
-- This index alone has the rows of a status in the order of their arrival.
SELECT [age min(own.received_at)], count(CASE WHEN own.expired THEN 1 END), count(CASE WHEN own.endless THEN 1 END),
       (SELECT count(*) FROM (SELECT 1 FROM txbox_inbox INDEXED BY txbox_inbox_status
                               WHERE status <> 'processed' AND status = :status AND consumer = :consumer
                               LIMIT :counted) AS alike),
       (SELECT [age received_at] FROM txbox_inbox INDEXED BY txbox_inbox_status
         WHERE status <> 'processed' AND status = :status AND consumer = :consumer ORDER BY arrival DESC LIMIT 1)
  FROM (SELECT received_at,
               status = 'processing' AND (lease_until IS NULL OR lease_until < [ago :late_s]) AS expired,
               status <> 'dead' AND status <> 'processing' AND has_payload AND next_attempt_at IS NULL AS endless
          FROM txbox_inbox INDEXED BY txbox_inbox_status
         WHERE status <> 'processed' AND status = :status AND consumer = :consumer
         ORDER BY arrival LIMIT :limit) AS own

-- ---- admin/found.py -------------------------------------------------------------------------------------------------

-- name: explain_inbox
-- Which of these keys there are. CROSS JOIN and INDEXED BY: with statistics of a small table SQLite 3.46 scans it.
SELECT own.consumer, own.message_id, own.status, own.topic
  FROM (VALUES {(:rows.consumer, :rows.message_id)}) AS m
  CROSS JOIN txbox_inbox AS own INDEXED BY sqlite_autoindex_txbox_inbox_1
    ON own.consumer = m.column1 AND own.message_id = m.column2

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

-- nothing: stage_lock
-- One writer at a time, so numbers are committed in order.

-- fragment: page route topics
SELECT * FROM (SELECT id, number, topic, key, available_at, coalesce(length(payload), 0) AS payload_bytes, type
                         FROM txbox_outbox
                        WHERE status = 'pending' AND route = [route] AND available_at <= [now]
                          AND (available_at, number) > (coalesce(:after_at, ''), :after_number)
                          AND [topics]
                        ORDER BY available_at, number
                        LIMIT :limit)

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
 WHERE id IN ({:rows.id}) AND status = 'pending' AND available_at <= [now] AND route IN (:route, '')
RETURNING id, number, topic, type, key, content_type, headers, payload, key_id, staged_at, attempts

-- name: relay_adopt
UPDATE txbox_outbox SET route = :route
 WHERE number IN (SELECT number FROM txbox_outbox
                   WHERE status = 'pending' AND token IS NULL AND route = :from_route AND topic = :topic
                     AND type IS :type AND cause_consumer IS :cause_consumer
                   LIMIT :limit)

-- ---- activity.py ----------------------------------------------------------------------------------------------------

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

-- name: outbox_ages
-- How long the first row that is due has been so, of each route; one index probe each.
SELECT route, [age min(available_at)]
  FROM txbox_outbox WHERE status = 'pending' AND route IN ({:rows.route})
 GROUP BY route
