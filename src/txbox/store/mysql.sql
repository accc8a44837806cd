-- txbox's statements for MySQL 8.0.19 and MariaDB 10.6 and later, where they are not those of common.sql.
-- `:name` is a parameter; a region in braces is repeated for each row, and `:rows.name` is a column of that row.
-- `nothing:` names queries with nothing to do.
-- Nothing can be refused at COMMIT, and no statement names the rows it touched (MySQL has no RETURNING). So a claim
-- writes `processing` with a token that classify reads back, and complete makes it `processed` inside a savepoint
-- with a random name. Whoever leaves the transaction loses the savepoint.
-- Where PostgreSQL picks and takes in one statement, here one locks and reads, `then` another writes.
-- Ids are VARBINARY and are converted to text in each list of columns. UPDATE assigns from left to right here, unless
-- sql_mode says otherwise, so a column that others are computed from is assigned after them.
-- What a query is for is said in postgresql.sql; here only what differs. Sections are named after modules, as there.

-- fragment: now = UTC_TIMESTAMP(6)
-- fragment: stable_now = UTC_TIMESTAMP(6)
-- fragment: ago seconds = UTC_TIMESTAMP(6) - INTERVAL [seconds] SECOND
-- fragment: stable_ago seconds = UTC_TIMESTAMP(6) - INTERVAL [seconds] SECOND
-- fragment: in seconds = UTC_TIMESTAMP(6) + INTERVAL [seconds] SECOND
-- fragment: instant seconds = TIMESTAMP'1970-01-01 00:00:00' + INTERVAL [seconds] SECOND
-- fragment: age moment = TIMESTAMPDIFF(MICROSECOND, [moment], UTC_TIMESTAMP(6)) / 1e6
-- UNIX_TIMESTAMP would take its argument for local time.
-- fragment: clock = TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6
-- fragment: text column = CONVERT([column] USING utf8mb4)
-- fragment: time moment = [moment]
-- fragment: joined column = GROUP_CONCAT([column])
-- fragment: in_rows name type = IN ({:rows.[name]})
-- fragment: same a b = ([a] <=> [b])
-- fragment: greatest = GREATEST
-- fragment: hex column = LOWER(HEX([column]))
-- There are no partial indexes.
-- fragment: open =
-- fragment: first_space text = instr([text], ' ')
-- fragment: waiting_aside = txbox_quarantine FORCE INDEX (txbox_quarantine_waiting)
-- fragment: newest_aside = txbox_quarantine FORCE INDEX (txbox_quarantine_newest)
-- fragment: by_status = txbox_inbox FORCE INDEX (txbox_inbox_open) WHERE consumer = :consumer
-- fragment: outbox_by_due = txbox_outbox FORCE INDEX (txbox_outbox_due)
-- fragment: inbox_by_due = txbox_inbox FORCE INDEX (txbox_inbox_due)

-- fragment: kept = consumer = :consumer AND has_payload = TRUE
-- fragment: kept_rows
txbox_inbox FORCE INDEX (txbox_inbox_due) WHERE [kept]
 ORDER BY starts, next_attempt_at, arrival

-- fragment: skip_locked = FOR UPDATE SKIP LOCKED
-- fragment: for_update = FOR UPDATE
-- No statement returns what it has written.
-- fragment: parked =
-- A transaction cannot choose its durability here.
-- fragment: durable =
-- A row that is somebody else's is a duplicate-key error.
-- fragment: unless_there =
-- Rows that are not due have no time in the index txbox_inbox_due.
-- fragment: retry_at exhausted = CASE WHEN [exhausted] THEN NULL ELSE [in :delay_s] END
-- fragment: on_conflict table keys = ON DUPLICATE KEY UPDATE
-- fragment: new column = VALUES([column])
-- fragment: key = `key`
-- fragment: unless_staged = ON DUPLICATE KEY UPDATE id = txbox_outbox.id

-- InnoDB shows a commit before it is on disk, unless the server writes a binary log. A copy that only read such a row would
-- be acknowledged for a row that a crash then undoes. So a copy moves the row by a microsecond: its own COMMIT returns
-- when that, and all that was committed before it, is on disk (docs/decisions/0064-read-before-durable.md).
-- fragment: met = updated_at = txbox_inbox.updated_at + INTERVAL 1 MICROSECOND
-- fragment: unless_known = ON DUPLICATE KEY UPDATE [met]

-- fragment: picked table index
-- A list of pairs is a derived table: for `(a, b) IN (…)` with a few hundred pairs, MariaDB stops using the key and
-- locks the whole table. The comment contains a word that only MySQL reads, and requires. FORCE INDEX: joined, too, a
-- small table may be read through, and then a row that a handler holds is waited for.
(WITH m (consumer, message_id) AS (VALUES {/*!80019 ROW*/ (:rows.consumer, :rows.message_id)})
        SELECT consumer, message_id FROM m) AS picked
       STRAIGHT_JOIN txbox_[table] AS [table] FORCE INDEX ([index])
          ON [table].consumer = picked.consumer AND [table].message_id = picked.message_id

-- fragment: inbox_read = [picked inbox, PRIMARY]
-- fragment: inbox_of = [picked inbox, PRIMARY]
-- fragment: inbox_list =
-- fragment: is_inbox_of = TRUE

-- ---- inbox.py: claims -----------------------------------------------------------------------------------------------

-- name: claim
-- Not INSERT IGNORE, which truncates. The row count is not used either, because it depends on the client's flags.
INSERT INTO txbox_inbox (consumer, message_id, status, token, topic, type, `key`, sequence, payload_hash)
VALUES {(:consumer, :rows.message_id, 'processing', :token, :rows.topic, :rows.type, :rows.key, :rows.sequence,
         :rows.payload_hash)}
[unless_known]

-- nothing: claim_single limit_idle
-- A single message is claimed like many.

-- name: claim_kept
INSERT INTO txbox_inbox (consumer, message_id, status, token, topic, type, `key`, sequence, payload_hash,
                         content_type, headers, origin, payload, has_payload, key_id)
VALUES {(:consumer, :rows.message_id, 'processing', :token, :rows.topic, :rows.type, :rows.key, :rows.sequence,
         :rows.payload_hash, :rows.content_type, :rows.headers, :rows.origin, :rows.payload, TRUE, :key_id)}
[unless_known]

-- name: claim_leased
-- The fence: a worker that lost its lease to another matches no row. What complete overwrites is left alone here,
-- so that a row committed by a broken handler still has its payload.
UPDATE txbox_inbox
   SET starts = GREATEST(starts - 1, 0), token = :token, lease_until = NULL, next_attempt_at = NULL,
       updated_at = UTC_TIMESTAMP(6)
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})
   AND token = :lease AND status = 'processing'

-- name: claim_replay
UPDATE txbox_inbox
   SET status = 'processing', token = :token, lease_until = NULL, updated_at = UTC_TIMESTAMP(6)
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id}) AND status = 'processed'

-- name: rehearse_leave
-- Of the transaction that has begun: the branch below must not be inside of one.
ROLLBACK

-- name: rehearse_begin
-- In a branch of an XA transaction the server refuses COMMIT, ROLLBACK, and whatever commits by itself (error 1399).
-- Nothing of it stays when its connection ends.
XA START :token

-- name: rehearse_limit
-- MariaDB reads the second comment; MySQL the first, which limits only SELECT.
SET /*!50708 SESSION max_execution_time = :limit_ms */ /*M!100101 SESSION max_statement_time = :limit_ms / 1000 */

-- name: rehearse_wait
-- Behind the claim, which puts back what the session had.
SET SESSION innodb_lock_wait_timeout = (CAST(:lock_timeout_ms AS UNSIGNED) + 999) DIV 1000

-- name: claim_rehearsal
UPDATE txbox_inbox
   SET status = 'processing', token = :token, lease_until = NULL, updated_at = UTC_TIMESTAMP(6)
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id}) AND status <> 'processing'

-- nothing: rehearse_references rehearse_record rehearse_written
-- Constraints are checked at once, and no transaction is told which rows it has written.

-- name: bound_lock_timeout
-- A session setting in whole seconds, rounded up, because a limit is at least a millisecond.
SET @txbox_lock_wait = CAST(COALESCE(@txbox_lock_wait, @@SESSION.innodb_lock_wait_timeout) AS UNSIGNED),
    SESSION innodb_lock_wait_timeout = (CAST(:lock_timeout_ms AS UNSIGNED) + 999) DIV 1000

-- name: restore_lock_timeout
-- The limit was for the claim only; the handler gets its setting back. The variable belongs to the session:
-- whatever was rolled back in between, the first value saved is the original one.
SET SESSION innodb_lock_wait_timeout = CAST(COALESCE(@txbox_lock_wait, @@SESSION.innodb_lock_wait_timeout) AS UNSIGNED),
    @txbox_lock_wait = NULL

-- name: arm
-- From here on, whatever ends the transaction (COMMIT, ROLLBACK, DDL, a deadlock) also ends the savepoint.
SAVEPOINT [canary]

-- name: setters
-- Routines, and tables with triggers, as far as this user may see them; connections/settings.py judges their texts.
-- A text that is hidden may set anything.
SELECT 'function', r.routine_name, COALESCE(r.routine_definition, 'SET SESSION')
  FROM information_schema.routines AS r
 WHERE r.routine_schema NOT IN ('sys', 'mysql', 'information_schema', 'performance_schema')
 UNION ALL
SELECT 'written', t.event_object_table, COALESCE(t.action_statement, 'SET SESSION')
  FROM information_schema.triggers AS t
 WHERE t.trigger_schema NOT IN ('sys', 'mysql')

-- name: close
-- Fails if this is no longer the claiming transaction.
RELEASE SAVEPOINT [canary]

-- name: complete
-- On other databases the claim has already written this.
UPDATE txbox_inbox
   SET status = 'processed', processed_at = COALESCE(processed_at, UTC_TIMESTAMP(6)), updated_at = UTC_TIMESTAMP(6),
       token = NULL, [settled]
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})
   AND token = :token AND status = 'processing'

-- ---- inbox.py -------------------------------------------------------------------------------------------------------

-- name: classify
-- A locking read shows who won even under REPEATABLE READ. MariaDB does not have FOR SHARE. The index is forced: a
-- small table would be read through, up to a row that somebody else has claimed.
SELECT [text message_id], status, payload_hash, has_payload, attempts, starts,
       COALESCE(next_attempt_at <= UTC_TIMESTAMP(6), TRUE) AS is_due, token, lease_until IS NOT NULL AS leased
  FROM txbox_inbox FORCE INDEX (PRIMARY)
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})
  LOCK IN SHARE MODE

-- name: meet
-- Before classify where no claim has met the row.
UPDATE txbox_inbox SET [met] WHERE consumer = :consumer AND message_id = :message_id

-- name: accept
-- The token stays in the row; classify reads it back to tell what this call inserted.
INSERT INTO txbox_inbox (consumer, message_id, status, token, topic, type, `key`, sequence, processed_at, payload_hash)
VALUES {(:consumer, :rows.message_id, 'processed', :token, :rows.topic, :rows.type, :rows.key, :rows.sequence,
         UTC_TIMESTAMP(6), :rows.payload_hash)}
[unless_known]

-- name: store
INSERT INTO txbox_inbox (consumer, message_id, status, token, topic, type, `key`, sequence, payload_hash,
                         next_attempt_at, content_type, headers, origin, payload, has_payload, key_id)
VALUES {(:consumer, :rows.message_id, 'pending', :token, :rows.topic, :rows.type, :rows.key, :rows.sequence,
         :rows.payload_hash, UTC_TIMESTAMP(6) + INTERVAL :delay_s SECOND, :rows.content_type, :rows.headers,
         :rows.origin, :rows.payload, TRUE, :key_id)}
[unless_known]

-- ---- inbox.py: failures ---------------------------------------------------------------------------------------------

-- name: record_own
-- Overwrites the row this transaction claimed, identified by its token.
UPDATE txbox_inbox
   SET processed_at = NULL, [failing], [content]
 WHERE consumer = :consumer AND message_id = :message_id AND status = 'processing' AND token = :token

-- ---- leases.py ------------------------------------------------------------------------------------------------------

-- fragment: is_due starts
consumer = :consumer AND has_payload = TRUE AND [starts] AND next_attempt_at <= [now]
   AND status IN ('pending', 'failed')

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

-- nothing: store_leased
-- An INSERT cannot report what it wrote here: use store, then lease_stored.

-- name: lease then lease_take
-- In the order of the index txbox_inbox_due, so the cost does not depend on how much waits behind. The index is
-- forced, because with stale statistics the optimizer would rather sort. A leased row has no `next_attempt_at`, so it
-- is not even scanned. `starts` is read as lease_take will leave it.
SELECT [message starts + 1]
  FROM [inbox_by_due]
 WHERE [is_due starts = 0]
 ORDER BY next_attempt_at, arrival
 LIMIT :limit
   FOR UPDATE SKIP LOCKED

-- fragment: leads
-- Rows without a key, and the first unfinished row of a key.
inbox.`key` IS NULL OR inbox.arrival
               = [head inbox.consumer, inbox.`key`, 9223372036854775807, head.status,head.consumer,head.`key`,head.arrival]

-- name: lease_suspect then lease_take
SELECT [message starts + 1]
  FROM txbox_inbox AS inbox FORCE INDEX (txbox_inbox_due)
 WHERE [is_due starts > 0]
   AND (NOT :heads_only OR [leads])
 ORDER BY next_attempt_at, arrival
 LIMIT 1
   FOR UPDATE SKIP LOCKED

-- name: lease_ordered then lease_take
-- lease, but only the first unfinished row of each key. The rows are read as they are now, and which one is first by
-- the statement's snapshot. What was committed since is first in no key there, so it is left for the next look.
SELECT [message starts + 1]
  FROM txbox_inbox AS inbox FORCE INDEX (txbox_inbox_due)
 WHERE [is_due starts = 0]
   AND ([leads])
 ORDER BY next_attempt_at, arrival
 LIMIT :limit
   FOR UPDATE SKIP LOCKED

-- name: lease_next then lease_take
SELECT [message starts + 1]
  FROM txbox_inbox AS inbox FORCE INDEX (txbox_inbox_arrival)
 WHERE inbox.arrival = [head :consumer, :key, 9223372036854775807, head.arrival]
   AND consumer = :consumer AND status IN ('pending', 'failed') AND has_payload
   AND next_attempt_at <= UTC_TIMESTAMP(6) AND starts = 0
   FOR UPDATE SKIP LOCKED

-- name: lease_stored then lease_take
-- lease for rows that the caller stored in this transaction.
SELECT [message starts + 1]
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
-- A separate statement, because inside an UPDATE MariaDB waits for the rows it is told to skip.
SELECT [text message_id] FROM txbox_inbox
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})
   AND token = :token AND status = 'processing'
   FOR UPDATE SKIP LOCKED

-- name: heartbeat_take
-- Extends rows that heartbeat locked in this transaction.
UPDATE txbox_inbox SET lease_until = UTC_TIMESTAMP(6) + INTERVAL :lease_s SECOND
 WHERE consumer = :consumer AND message_id IN ({:rows.message_id})

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
UPDATE [picked inbox, PRIMARY]
   SET status = CASE WHEN starts >= :max_starts THEN 'dead' ELSE 'failed' END,
       lease_until = NULL, token = NULL, updated_at = [now],
       next_attempt_at = CASE WHEN starts < :max_starts THEN [now] END,
       error_type = CASE WHEN starts >= :max_starts THEN 'KilledItsProcess' ELSE 'LeaseExpired' END,
       error = CASE WHEN starts >= :max_starts
                    THEN CONCAT('killed its process: ', starts, ' runs never ended') ELSE 'lease expired' END,
       fingerprint = NULL

-- name: rescue_broken
-- A committed processing row without a lease means that its handler ended the transaction, and it is unknown which
-- of its writes persisted. SKIP LOCKED: an uncommitted one is a handler at work.
UPDATE (SELECT consumer, message_id FROM txbox_inbox
         WHERE status = 'processing' AND lease_until IS NULL
           AND (:consumer IS NULL OR consumer = :consumer)
         LIMIT :limit
           FOR UPDATE SKIP LOCKED) AS broken
       STRAIGHT_JOIN txbox_inbox AS inbox FORCE INDEX (PRIMARY)
          ON inbox.consumer = broken.consumer AND inbox.message_id = broken.message_id
   SET status = 'dead', token = NULL, next_attempt_at = NULL, updated_at = [now], error_type = 'TransactionBroken',
       error = 'the handler ended the transaction of its message; what it wrote is not known', fingerprint = NULL

-- ---- order.py -------------------------------------------------------------------------------------------------------

-- ---- jobs.py --------------------------------------------------------------------------------------------------------

-- name: job_create
INSERT INTO txbox_job (name) VALUES (:name) ON DUPLICATE KEY UPDATE name = txbox_job.name

-- name: alert_open
INSERT INTO txbox_job (name, token, lease_until, state) VALUES (:name, :token, [in :window_s], :state)
ON DUPLICATE KEY UPDATE name = txbox_job.name

-- name: anchor_history
-- Changes when commits may be missing: another server, or a restored table.
SELECT CONCAT_WS('/', @@hostname, @@port, @@server_id, job.create_time)
  FROM information_schema.tables job
 WHERE job.table_schema = DATABASE() AND job.table_name = 'txbox_job'

-- name: anchor_read
SELECT name, CAST(state AS SIGNED) FROM txbox_job WHERE name IN ({:rows.name})

-- name: anchor_advance
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

-- name: prune_take
-- Deletes rows that prune locked in this transaction.
DELETE inbox FROM [picked inbox, PRIMARY]

-- name: prune_attempts
DELETE attempt FROM [picked attempt, txbox_attempt_message]

-- fragment: outgoing_past
status IN ('sent', 'discarded')
   AND ((status = 'sent' AND sent_at < UTC_TIMESTAMP(6) - INTERVAL :sent_s SECOND)
        OR (status = 'discarded' AND available_at < UTC_TIMESTAMP(6) - INTERVAL :discarded_s SECOND))

-- name: prune_outbox
DELETE outbox FROM (SELECT id FROM txbox_outbox
                  WHERE [outgoing_past]
                  LIMIT :limit
                    FOR UPDATE SKIP LOCKED) AS old
       STRAIGHT_JOIN txbox_outbox AS outbox FORCE INDEX (PRIMARY) ON outbox.id = old.id

-- name: prune_quarantine
DELETE quarantine FROM (SELECT consumer, message_id, hash FROM txbox_quarantine
                  WHERE [decided]
                  LIMIT :limit
                    FOR UPDATE SKIP LOCKED) AS old
       STRAIGHT_JOIN txbox_quarantine AS quarantine FORCE INDEX (PRIMARY)
          ON quarantine.consumer = old.consumer AND quarantine.message_id = old.message_id
         AND quarantine.hash = old.hash

-- fragment: quarantine_of
(WITH m (consumer, message_id, hash) AS (VALUES {/*!80019 ROW*/ (:rows.consumer, :rows.message_id, :rows.hash)})
        SELECT consumer, message_id, hash FROM m) AS picked
       STRAIGHT_JOIN txbox_quarantine AS quarantine FORCE INDEX (PRIMARY)
          ON quarantine.consumer = picked.consumer AND quarantine.message_id = picked.message_id
         AND quarantine.hash = picked.hash

-- fragment: quarantine_list =
-- fragment: is_quarantine_of = TRUE

-- name: second_of_day
SELECT TIME_TO_SEC(UTC_TIME())

-- name: drop_payloads
UPDATE (SELECT consumer, message_id FROM txbox_inbox
         WHERE consumer = :consumer AND status = 'processed' AND has_payload
           AND processed_at < UTC_TIMESTAMP(6) - INTERVAL :older_than_s SECOND
         LIMIT :limit
           FOR UPDATE SKIP LOCKED) AS old
       STRAIGHT_JOIN txbox_inbox AS inbox FORCE INDEX (PRIMARY)
          ON inbox.consumer = old.consumer AND inbox.message_id = old.message_id
   SET payload = NULL, headers = NULL, origin = NULL, content_type = NULL, has_payload = FALSE

-- name: due
-- Needs only the index, which the server reads in one jump per consumer and number of starts, past the NULLs of
-- rows that are never due.
SELECT [text soon.consumer], TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), soon.due_at) / 1e6
  FROM (SELECT earliest.consumer, MIN(earliest.due_at) AS due_at
          FROM (SELECT consumer, MIN(next_attempt_at) AS due_at FROM txbox_inbox FORCE INDEX (txbox_inbox_due)
                 WHERE consumer IN ({:rows.consumer}) AND has_payload = TRUE AND next_attempt_at >= '1000-01-01'
                 GROUP BY consumer, has_payload, starts) AS earliest
         GROUP BY earliest.consumer
         UNION ALL
        SELECT '', MIN(pending.due_at)
          FROM (SELECT MIN(available_at) AS due_at FROM txbox_outbox
                 WHERE status = 'pending' AND route IN ({:rows.route}) GROUP BY route) AS pending
         UNION ALL
        [stray_routes]) AS soon
 WHERE soon.due_at <= UTC_TIMESTAMP(6) + INTERVAL :ahead_s SECOND

-- ---- schema.py ------------------------------------------------------------------------------------------------------

-- name: schema_exists
SELECT count(*), NULL FROM information_schema.tables
 WHERE table_schema = DATABASE() AND table_name = 'txbox_schema'

-- name: schema_lock
-- Of two concurrent `txbox init`, the second waits. Lock names are shared by all databases of a server.
SELECT GET_LOCK(CONCAT('txbox.', SHA2(DATABASE(), 224)), 3600)

-- name: schema_unlock
SELECT RELEASE_LOCK(CONCAT('txbox.', SHA2(DATABASE(), 224)))

-- name: session
-- What `schema.unfit` judges; 0 is no limit to Vitess. SHOW VARIABLES would be cut off by sql_select_limit, which a
-- LIMIT overrides.
SELECT 'character_set_client', CAST(@@character_set_client AS CHAR)
 UNION ALL
SELECT 'character_set_connection', CAST(@@character_set_connection AS CHAR)
 UNION ALL
SELECT 'character_set_results', CAST(@@character_set_results AS CHAR)
 UNION ALL
SELECT 'sql_mode', CAST(@@sql_mode AS CHAR)
 UNION ALL
SELECT 'sql_safe_updates', CAST(@@sql_safe_updates AS CHAR)
 UNION ALL
SELECT 'sql_select_limit',
       CAST(CASE WHEN @@sql_select_limit = 0 AND @@version LIKE '%-Vitess' THEN ~0 ELSE @@sql_select_limit END AS CHAR)
 UNION ALL
SELECT 'completion_type', CAST(@@completion_type AS CHAR)
 UNION ALL
SELECT 'vitess', CASE WHEN @@version LIKE '%-Vitess' THEN 1 END
 LIMIT 10

-- name: keyspace
-- Behind a UNION it would be the tablet's database.
SELECT DATABASE()

-- name: keyspace_shards
SHOW VITESS_SHARDS

-- name: guard_check
-- The savepoint protects transactional tables only.
SELECT count(*) AS triggers, 'origin' AS role FROM information_schema.tables
 WHERE table_schema = DATABASE() AND table_name = 'txbox_inbox' AND engine = 'InnoDB'

-- ---- admin/look.py, admin/changes.py, admin/replay.py ---------------------------------------------------------------

-- A page that takes longer than 5 s is cancelled: no index serves its filter. The first comment is MariaDB's, the second MySQL's.
-- fragment: look = /*M!100100 SET STATEMENT max_statement_time = 5 FOR */ SELECT /*+ MAX_EXECUTION_TIME(5000) */

-- name: consumers
[look] [text known.consumer]
  FROM (SELECT DISTINCT consumer FROM txbox_inbox UNION SELECT DISTINCT consumer FROM txbox_quarantine) AS known
 ORDER BY known.consumer

-- fragment: outgoing status
[text found.topic], [text found.route], [state] AS state, count(*), [age min(found.staged_at)]
  FROM (SELECT id FROM txbox_outbox WHERE status = [status]
         ORDER BY route, available_at, number LIMIT :most) AS oldest
       STRAIGHT_JOIN txbox_outbox AS found FORCE INDEX (PRIMARY) ON found.id = oldest.id
 GROUP BY found.topic, found.route, state

-- name: outbox_open
-- As outbox_status, of what has not left: counted up to a limit, and not more than that is read. The limit is on keys,
-- which an index has: twenty thousand rows with their topics are too wide for a table in memory.
[look] [outgoing 'pending']
 UNION ALL
SELECT [outgoing 'dead']

-- name: sizes
-- InnoDB's estimates. A table is its primary key, so only the other indexes count as indexes.
SELECT table_name, data_length, index_length, 1
  FROM information_schema.tables
 WHERE table_schema = DATABASE() AND table_type = 'BASE TABLE' AND LEFT(table_name, 6) = 'txbox_'
 ORDER BY table_name

-- fragment: first_of_key route
-- The number of the row that must leave before this one, or of this row. MariaDB has no index for IN (outbox.route, '').
COALESCE((SELECT min(head.number) FROM txbox_outbox AS head FORCE INDEX (txbox_outbox_key)
           WHERE head.status = 'pending' AND head.route = [route]
             AND head.topic = outbox.topic AND head.`key` = outbox.`key`
             AND head.number < outbox.number
             AND (head.token IS NOT NULL OR head.attempts > 0 OR head.available_at = head.staged_at
                  OR head.available_at <= UTC_TIMESTAMP(6))), outbox.number)

-- fragment: before_it
(SELECT [text head.id] FROM txbox_outbox AS head
             WHERE head.number = LEAST([first_of_key outbox.route], [first_of_key ''])
               AND head.number < outbox.number)

-- name: audit
INSERT INTO txbox_audit (actor, action, filter, affected, reason, login)
VALUES (:actor, :action, :filter, :affected, :reason, SESSION_USER())

-- ---- admin/doctor ---------------------------------------------------------------------------------------------------
-- No full scans: names come from index skip scans, and rows are counted up to a limit.

-- name: doctor_settings
-- Not `@@name`: what one of the two products does not have would be an error.
SHOW VARIABLES
 WHERE Variable_name IN ('innodb_flush_log_at_trx_commit', 'innodb_doublewrite', 'log_bin', 'sync_binlog',
                         'transaction_isolation', 'tx_isolation', 'read_only', 'super_read_only', 'innodb_read_only',
                         'innodb_lock_wait_timeout', 'wait_timeout', 'max_statement_time', 'max_execution_time',
                         'idle_transaction_timeout', 'idle_write_transaction_timeout')

-- name: doctor_columns
SELECT table_name, column_name FROM information_schema.columns
 WHERE table_schema = DATABASE() AND LEFT(table_name, 6) = 'txbox_'

-- name: doctor_indexes
-- An index is there as a whole, or not at all.
SELECT DISTINCT table_name, index_name, TRUE FROM information_schema.statistics
 WHERE table_schema = DATABASE() AND LEFT(table_name, 6) = 'txbox_'

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

-- name: doctor_consumers
-- Consumers with rows in a status, by skip scan, however many rows they have.
SELECT inbox.status, [text inbox.consumer]
  FROM txbox_inbox AS inbox FORCE INDEX (txbox_inbox_open)
 WHERE inbox.status IN ('pending', 'failed', 'processing', 'dead')
 GROUP BY inbox.status, inbox.consumer
 LIMIT :limit

-- name: doctor_routes
-- As doctor_consumers.
SELECT [text outbox.route]
  FROM txbox_outbox AS outbox FORCE INDEX (txbox_outbox_due)
 WHERE outbox.status = 'pending'
 GROUP BY outbox.status, outbox.route
 LIMIT :limit

-- name: doctor_outgoing_dead
SELECT count(*), [age min(oldest.staged_at)], count(CASE WHEN substr(oldest.topic, 1, 12) <> 'txbox.alerts' THEN 1 END)
  FROM (SELECT staged_at, topic FROM txbox_outbox FORCE INDEX (txbox_outbox_due) WHERE status = 'dead' LIMIT :limit) AS oldest

-- ---- admin/facts.py -------------------------------------------------------------------------------------------------

-- fragment: consumers_of table
-- The next one: min() of a range is read from the key; DISTINCT would read all of it.
SELECT [text known.consumer]
  FROM (SELECT min(consumer) AS consumer FROM [table] WHERE consumer > :after) AS known
 WHERE known.consumer IS NOT NULL
 LIMIT :limit

-- name: explain_locked
-- Fails where an open transaction has locked the row, changed it, or inserted it; rolled back at once.
SELECT 1 FROM txbox_inbox WHERE consumer = :consumer AND message_id = :message_id FOR UPDATE NOWAIT

-- ---- outbox.py ------------------------------------------------------------------------------------------------------

-- fragment: route_keys = {(:rows.route, :rows.topic, :rows.key)}

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

-- fragment: outgoing_of list
-- A list joined by the key. Otherwise the server would read every row of a small table, and wait for those that
-- others have staged but not committed.
(WITH m (id) AS (VALUES {/*!80019 ROW*/ (:rows.[list])}) SELECT id FROM m) AS mine
       STRAIGHT_JOIN txbox_outbox AS outbox FORCE INDEX (PRIMARY) ON outbox.id = mine.id

-- fragment: is_of list = TRUE

-- name: stage_lock
-- InnoDB's row locks end with the transaction, while GET_LOCK's do not. So there is a row for each of 4,096 buckets
-- of keys, locked until the caller commits. In the order of the buckets, so that two callers do not deadlock.
INSERT INTO txbox_job (name)
SELECT CONCAT('order:', wanted.bucket)
  FROM (WITH m (bucket) AS (VALUES {/*!80019 ROW*/ (MOD(:rows.lock, 4096))}) SELECT DISTINCT bucket FROM m) AS wanted
 ORDER BY wanted.bucket
ON DUPLICATE KEY UPDATE name = txbox_job.name

-- name: relay_page
[page :route, (:whole OR (topic IN ({:rows.topic})) = :named)]
UNION ALL
[page '', :route <> '' AND (topic IN ({:rows.topic})) = :named]
 ORDER BY available_at, number
 LIMIT :limit

-- name: relay_lease then relay_take
-- The route again: an operator may have changed it since the page was read.
SELECT [text outbox.id], number, [text topic], [text type], [text `key`], content_type, headers, payload, key_id,
       staged_at, attempts
  FROM [outgoing_of id]
 WHERE status = 'pending' AND available_at <= UTC_TIMESTAMP(6) AND route IN (:route, '')
   FOR UPDATE SKIP LOCKED

-- name: relay_take
-- Takes rows that relay_lease locked in this transaction.
UPDATE [outgoing_of id]
   SET token = :token, available_at = UTC_TIMESTAMP(6) + INTERVAL :lease_s SECOND

-- name: relay_sent
DELETE outbox FROM [outgoing_of id]
 WHERE token = :token AND status = 'pending'

-- name: relay_adopt
UPDATE (SELECT id FROM txbox_outbox
         WHERE status = 'pending' AND token IS NULL AND route = :from_route AND topic = :topic
           AND type <=> :type AND cause_consumer <=> :cause_consumer
           AND (:due_s = 0 OR available_at <= [ago :due_s])
         LIMIT :limit
           FOR UPDATE SKIP LOCKED) AS stray
       STRAIGHT_JOIN txbox_outbox AS outbox FORCE INDEX (PRIMARY) ON outbox.id = stray.id
   SET outbox.route = :route

-- ---- activity.py ----------------------------------------------------------------------------------------------------

-- fragment: counted
VALUES {(:rows.minute, :rows.kind, :rows.name, :worker, :rows.received, :rows.processed, :rows.duplicate,
         :rows.deferred, :rows.failed, :rows.dead, :rows.quarantined, :rows.latency, :rows.run, :rows.oldest_s)}

-- fragment: summed which
-- MySQL would cut the joined texts off at 1,024 bytes. The first comment is MariaDB's, the second MySQL's.
/*M!100100 SET STATEMENT group_concat_max_len = 16777216 FOR */
SELECT /*+ SET_VAR(group_concat_max_len = 16777216) */
       minute - minute % :step AS begins, kind, [text name], sum(received), sum(processed), sum(duplicate),
       sum(deferred), sum(failed), sum(dead), sum(quarantined), [joined latency], [joined run], max(oldest_s)
  FROM txbox_activity WHERE [which]
 GROUP BY 1, 2, 3 ORDER BY 1

-- name: outbox_ages
SELECT asked.route, TIMESTAMPDIFF(MICROSECOND, asked.at, UTC_TIMESTAMP(6)) / 1e6
  FROM (SELECT [text route] AS route, MIN(available_at) AS at
          FROM txbox_outbox WHERE status = 'pending' AND route IN ({:rows.route})
         GROUP BY route) AS asked
