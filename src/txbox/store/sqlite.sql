-- txbox's statements for SQLite 3.35 and later, where they are not those of common.sql.
-- `:name` is a parameter; a region in braces is repeated for each row, and `:rows.name` is a column of that row.
-- `nothing:` names queries with nothing to do. There is one writer at a time, so SKIP LOCKED is not needed, nor any
-- lock timeout except the connection's. Statements name the rows they touch.
-- Times are UTC text of fixed width, so they compare as text.
-- What a query is for is said in postgresql.sql; here only what differs. Sections are named after modules, as there.

-- fragment: now = strftime('%Y-%m-%d %H:%M:%f', 'now')
-- fragment: stable_now = [now]
-- fragment: ago seconds = strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', -[seconds]))
-- fragment: stable_ago seconds = [ago [seconds]]
-- fragment: in seconds = strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', [seconds]))
-- fragment: instant seconds = strftime('%Y-%m-%d %H:%M:%f', [seconds], 'unixepoch')
-- fragment: age moment = round((julianday('now') - julianday([moment])) * 86400.0, 3)
-- A day's fraction keeps milliseconds to 40 us: unrounded, half of what was written in this one lay in the future.
-- fragment: clock = round((julianday('now') - 2440587.5) * 86400, 3)
-- fragment: text column = [column]
-- fragment: time moment = [moment]
-- fragment: joined column = group_concat([column], ',')
-- fragment: in_rows name type = IN ({:rows.[name]})
-- fragment: same a b = ([a] IS [b])
-- fragment: greatest = max
-- fragment: hex column = lower(hex([column]))
-- fragment: open = status <> 'processed' AND
-- This index alone has the rows of a status in the order of their arrival.
-- fragment: first_space text = instr([text], ' ')
-- fragment: waiting_aside = txbox_quarantine
-- fragment: newest_aside = txbox_quarantine
-- fragment: by_status = txbox_inbox INDEXED BY txbox_inbox_status WHERE consumer = :consumer
-- fragment: outbox_by_due = txbox_outbox INDEXED BY txbox_outbox_due
-- fragment: inbox_by_due = txbox_inbox
-- fragment: look = SELECT
-- fragment: kept = consumer = :consumer AND has_payload
-- fragment: kept_rows = txbox_inbox WHERE [kept] ORDER BY arrival
-- fragment: skip_locked =
-- fragment: for_update =
-- fragment: durable =
-- fragment: parked = RETURNING status, attempts
-- fragment: unless_there = ON CONFLICT (consumer, message_id) DO NOTHING
-- fragment: retry_at exhausted = [in :delay_s]
-- fragment: on_conflict table keys = ON CONFLICT ([keys]) DO UPDATE SET
-- fragment: new column = excluded.[column]
-- fragment: key = key
-- fragment: unless_staged = ON CONFLICT (id) DO NOTHING
-- fragment: by_posix =

-- fragment: inbox_read
-- CROSS JOIN and INDEXED BY: with statistics of a small table SQLite 3.46 scans it.
(VALUES {(:rows.consumer, :rows.message_id)}) AS m
  CROSS JOIN txbox_inbox AS inbox INDEXED BY sqlite_autoindex_txbox_inbox_1
    ON inbox.consumer = m.column1 AND inbox.message_id = m.column2

-- fragment: inbox_of = txbox_inbox
-- fragment: inbox_list =
-- fragment: is_inbox_of = arrival IN (SELECT inbox.arrival FROM [inbox_read])
-- fragment: quarantine_of = txbox_quarantine
-- fragment: quarantine_list =

-- fragment: is_quarantine_of
rowid IN (SELECT quarantine.rowid FROM (VALUES {(:rows.consumer, :rows.message_id, :rows.hash)}) AS m
            JOIN txbox_quarantine AS quarantine ON quarantine.consumer = m.column1
             AND quarantine.message_id = m.column2 AND quarantine.hash = m.column3)

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
       [settled]
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})
   AND token = :lease AND status = 'processing'
RETURNING message_id

-- name: claim_replay
UPDATE txbox_inbox SET status = 'processed', updated_at = [now]
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id}) AND status = 'processed'
RETURNING message_id

-- name: claim_rehearsal
UPDATE txbox_inbox SET status = 'processed', updated_at = [now]
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id}) AND status <> 'processing'
RETURNING message_id

-- nothing: keyspace keyspace_shards
-- Vitess speaks MySQL.

-- nothing: rehearse_limit rehearse_leave rehearse_begin rehearse_wait
-- The connection's progress handler ends a statement, and the guard refuses COMMIT.

-- fragment: recorded op row
SELECT 'CREATE TEMP TRIGGER txbox_written_[op]_' || tab.rowid || ' AFTER [op] ON main."' || replace(tab.name, '"', '""')
       || '" BEGIN INSERT INTO txbox_written (tab, op, content) VALUES (' || quote(tab.name) || ', ''[op]'', char(123) || '
       || group_concat(quote(json_quote(col.name) || ':') || ' || json_quote(CASE typeof([row].' || col.quoted
                       || ') WHEN ''blob'' THEN hex([row].' || col.quoted || ') ELSE [row].' || col.quoted || ' END)',
                       ' || '','' || ') || ' || char(125)); END'
  FROM sqlite_schema AS tab
  JOIN (SELECT inside.name AS tab, info.name, '"' || replace(info.name, '"', '""') || '"' AS quoted
          FROM sqlite_schema AS inside, pragma_table_info(inside.name) AS info) AS col ON col.tab = tab.name
 WHERE tab.type = 'table' AND tab.name NOT LIKE 'txbox\_%' ESCAPE '\' AND tab.name NOT LIKE 'sqlite\_%' ESCAPE '\'
   AND tab.sql NOT LIKE 'CREATE VIRTUAL%'
 GROUP BY tab.name

-- name: rehearse_record
-- Statements that have this connection alone note every row that is written, triggers and cascades included.
SELECT 'CREATE TEMP TABLE txbox_written (number INTEGER PRIMARY KEY, tab TEXT, op TEXT, content TEXT)'
 UNION ALL
[recorded insert, NEW]
 UNION ALL
[recorded update, NEW]
 UNION ALL
[recorded delete, OLD]

-- name: rehearse_written
SELECT tab, sum(op = 'insert'), sum(op = 'update'), sum(op = 'delete'),
       'SELECT json_object(op, json(content)) FROM txbox_written WHERE tab = ' || quote(tab) || ' ORDER BY number', 1
  FROM txbox_written GROUP BY tab

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
INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, sequence, payload_hash, next_attempt_at,
                         content_type, headers, origin, payload, has_payload, key_id)
VALUES {(:consumer, :rows.message_id, 'pending', :rows.topic, :rows.type, :rows.key, :rows.sequence,
         :rows.payload_hash, [in :delay_s],
         :rows.content_type, :rows.headers, :rows.origin, :rows.payload, true, :key_id)}
ON CONFLICT (consumer, message_id) DO NOTHING
RETURNING message_id

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
(SELECT head.arrival FROM txbox_inbox AS head
  WHERE head.consumer = :consumer AND head.key = [key]
    AND head.status <> 'processed' AND head.key IS NOT NULL
    AND (head.status IN ('pending', 'failed', 'processing') OR (:dead_blocks AND head.status = 'dead'))
  ORDER BY head.arrival
  LIMIT 1)

-- fragment: take
UPDATE txbox_inbox
   SET status = 'processing', token = :token, starts = starts + 1, updated_at = [now], lease_until = [in :lease_s]

-- name: store_leased
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
RETURNING [message starts]

-- name: lease_suspect
[take]
 WHERE arrival IN (SELECT due.arrival FROM txbox_inbox AS due
                    WHERE [is_due starts > 0]
                      AND (NOT :heads_only OR due.key IS NULL
                           OR due.arrival = [head due.key])
                    ORDER BY due.next_attempt_at, due.arrival
                    LIMIT 1)
RETURNING [message starts]

-- name: lease_ordered
-- NOT MATERIALIZED: SQLite 3.46 otherwise steps through all keys before :limit can stop it.
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
RETURNING [message starts]

-- name: lease_next
[take]
 WHERE arrival = [head :key]
   AND status IN ('pending', 'failed') AND has_payload AND starts = 0
   AND next_attempt_at <= [now]
RETURNING [message starts]

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
 WHERE number IN (SELECT attempt.number FROM (VALUES {(:rows.consumer, :rows.message_id)}) AS m
                   JOIN txbox_attempt AS attempt ON attempt.consumer = m.column1 AND attempt.message_id = m.column2)

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

-- name: second_of_day
SELECT strftime('%s', 'now') - strftime('%s', 'now', 'start of day')

-- name: drop_payloads
UPDATE txbox_inbox
   SET payload = NULL, headers = NULL, origin = NULL, content_type = NULL, has_payload = 0
 WHERE arrival IN (SELECT old.arrival FROM txbox_inbox AS old
                    WHERE old.consumer = :consumer AND old.status = 'processed' AND old.has_payload
                      AND old.processed_at < [ago :older_than_s]
                    LIMIT :limit)

-- name: due
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
SELECT 'database file', pages.page_count * size.page_size, NULL, 1
  FROM pragma_page_count AS pages, pragma_page_size AS size

-- fragment: before_it
(SELECT head.id FROM txbox_outbox AS head
             WHERE head.status = 'pending' AND head.route IN (outbox.route, '')
               AND head.topic = outbox.topic AND head.key = outbox.key
               AND head.number < outbox.number
               AND (head.token IS NOT NULL OR head.attempts > 0 OR head.available_at = head.staged_at
                    OR head.available_at <= [now])
             ORDER BY head.number LIMIT 1)

-- ---- admin/doctor ---------------------------------------------------------------------------------------------------
-- No full scans: names come from index skip scans, and rows are counted up to a limit.

-- nothing: doctor_clock doctor_transactions
-- The clock is this machine's, and nobody knows of the transactions of other processes.

-- name: doctor_settings
SELECT 'journal_mode', journal_mode FROM pragma_journal_mode
 UNION ALL
SELECT 'synchronous', CAST(synchronous AS TEXT) FROM pragma_synchronous

-- name: doctor_columns
SELECT relation.name, part.name FROM sqlite_master AS relation, pragma_table_info(relation.name) AS part
 WHERE relation.type IN ('table', 'view') AND relation.name LIKE 'txbox\_%' ESCAPE '\'

-- name: doctor_indexes
SELECT relation.tbl_name, relation.name, 1 FROM sqlite_master AS relation
 WHERE relation.type = 'index' AND relation.name LIKE 'txbox\_%' ESCAPE '\'

-- ---- admin/facts.py -------------------------------------------------------------------------------------------------

-- ---- outbox.py ------------------------------------------------------------------------------------------------------

-- nothing: stage_lock
-- One writer at a time, so numbers are committed in order.

-- fragment: route_keys = VALUES {(:rows.route, :rows.topic, :rows.key)}

-- fragment: page route topics
SELECT * FROM (SELECT id, number, topic, key, available_at, coalesce(length(payload), 0) AS payload_bytes, type
                         FROM txbox_outbox
                        WHERE status = 'pending' AND route = [route] AND available_at <= [now]
                          AND (available_at, number) > (coalesce(:after_at, ''), :after_number)
                          AND [topics]
                        ORDER BY available_at, number
                        LIMIT :limit)

-- name: relay_lease
UPDATE txbox_outbox
   SET token = :token, available_at = [in :lease_s]
 WHERE id IN ({:rows.id}) AND status = 'pending' AND available_at <= [now] AND route IN (:route, '')
RETURNING id, number, topic, type, key, content_type, headers, payload, key_id, staged_at, attempts

-- ---- activity.py ----------------------------------------------------------------------------------------------------

-- fragment: counted
VALUES {(:rows.minute, :rows.kind, :rows.name, :worker, :rows.received, :rows.processed, :rows.duplicate,
         :rows.deferred, :rows.failed, :rows.dead, :rows.quarantined, :rows.latency, :rows.run, :rows.oldest_s)}

-- name: outbox_ages
SELECT route, [age min(available_at)]
  FROM txbox_outbox WHERE status = 'pending' AND route IN ({:rows.route})
 GROUP BY route
