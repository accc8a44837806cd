-- The statements that all databases read alike. A query or fragment in the file of a database replaces its namesake here.
-- `:name::type` is a parameter; only PostgreSQL is told the type. `[name x]` inserts a fragment, with x as its parameter.
-- The file of each database has these fragments:
--   [now], [ago seconds], [in seconds], [age moment], [clock]   the time
--   [instant seconds]            a point in time, of seconds since 1970
--   [stable_now], [stable_ago seconds]  the same, where it has to bound an index scan
--   [time moment]                a point in time, as `as_time` reads it: whatever the session's formats, and beyond Python's
--   [text column]                what is stored as bytes, as text
--   [key]                        the column of this name, which is a reserved word on MySQL
--   [joined column]              an aggregate: the texts of a group with commas between
--   [in_rows name, type]         is one of `:rows.name`
--   [same a, b]                  a = b, where NULL equals NULL
--   [on_conflict table, keys]    the beginning of an upsert's second half; [new column] is the value that was to be inserted
--   [open]                       the predicate of the partial indexes over open rows, which some planners cannot infer
--   [waiting_aside]              the quarantine, by the index of what waits for a decision
--   [first_space text]           where the first blank of a text is, from 1; 0 is nowhere
--   [by_status]                  the rows of :consumer, by the index that has them by status and arrival
--   [inbox_read]                 SELECT … FROM: the rows of `:rows.consumer` and `:rows.message_id`, by their key
--   [inbox_of], [inbox_list], [is_inbox_of]   UPDATE … SET … WHERE: the same rows; and of the quarantine, with :rows.hash
--   [look]                       SELECT, for a page that somebody waits for
--   [skip_locked], [for_update]  row locks
--   [durable]                    an acknowledgement follows: the commit is made durable, whatever the settings
-- Each section has the queries of the module it names.

-- ---- inbox.py: claims -----------------------------------------------------------------------------------------------

-- nothing: savepoint_claim rollback_to_claim
-- A failed statement leaves the transaction usable, so close can be used instead.

-- nothing: bound_batch
-- Locks between two batches are SQLite's one, or a deadlock that InnoDB detects at once.

-- nothing: duplicates
-- classify reads them along with the others.

-- nothing: meet
-- What a transaction reads has been on disk before.

-- nothing: rehearse_constraints may_set

-- fragment: settled
-- What a processed row drops.
error_type = NULL, error = NULL, fingerprint = NULL,
       content_type = CASE WHEN :keep::boolean THEN content_type END,
       headers = CASE WHEN :keep::boolean THEN headers END,
       origin = CASE WHEN :keep::boolean THEN origin END,
       payload = CASE WHEN :keep::boolean THEN payload END,
       has_payload = :keep::boolean AND has_payload

-- ---- inbox.py -------------------------------------------------------------------------------------------------------

-- nothing: savepoint release_savepoint rollback_to_savepoint
-- For accept with a timeout: one that passes rolls back its statement and nothing else.

-- nothing: try_lock
-- For requests, which do not wait. SQLite has waited at BEGIN; the shortest wait of InnoDB is one second.

-- name: return_payload
-- A redelivery restores the missing payload of an unfinished row; from then on the table owns it.
UPDATE txbox_inbox
   SET content_type = :content_type::text, headers = :headers::text, origin = :origin::text,
       payload = :payload::bytea, has_payload = true, key_id = :key_id::text, payload_hash = :payload_hash::bytea,
       next_attempt_at = coalesce(next_attempt_at, [now]), updated_at = [now]
 WHERE consumer = :consumer::text AND message_id = :message_id::text
   AND status IN ('pending', 'failed') AND NOT has_payload
[durable]

-- fragment: anew column
[column] = CASE WHEN txbox_quarantine.message_id = '' OR txbox_quarantine.status = 'replaced' THEN [new [column]]
                  ELSE txbox_quarantine.[column] END

-- name: quarantine
-- The same message again only increments the counter. Without an id an equal one may be another message: it takes the
-- row anew, so that it is not lost where somebody has already decided on the one before; so does one that an edit has
-- put there, as nobody has decided on it. MySQL assigns from left to right: the status comes last.
INSERT INTO txbox_quarantine (consumer, message_id, hash, reason, topic, type, [key],
                              content_type, headers, origin, payload, key_id, kept_bytes)
VALUES (:consumer::text, :message_id::text, :hash::bytea, :reason::text, :topic::text, :type::text, :key::text,
        :content_type::text, :headers::text, :origin::text, :payload::bytea, :key_id::text,
        coalesce(length(:payload::bytea), 0))
[on_conflict txbox_quarantine, consumer, message_id, hash]
       seen = txbox_quarantine.seen + 1, updated_at = [stable_now],
       [anew reason], [anew topic], [anew type], [anew [key]], [anew content_type], [anew headers], [anew origin],
       [anew payload], [anew kept_bytes], [anew key_id], [anew status]
[durable]

-- name: record_attempt
INSERT INTO txbox_attempt (consumer, message_id, attempt, status, error_type, error, fingerprint)
VALUES (:consumer::text, :message_id::text, :attempt::integer, :status::text,
        :error_type::text, :error::text, :fingerprint::text)
[durable]

-- name: last_death
SELECT max(number) FROM txbox_attempt
 WHERE consumer = :consumer::text AND message_id = :message_id::text AND status = 'dead'

-- name: keep_result
UPDATE txbox_inbox SET result = :result::bytea
 WHERE consumer = :consumer::text AND message_id = :message_id::text

-- name: result
SELECT result FROM txbox_inbox WHERE consumer = :consumer::text AND message_id = :message_id::text

-- ---- inbox.py: failures ---------------------------------------------------------------------------------------------

-- fragment: final = :final::boolean OR attempts + 1 >= :max_attempts::integer OR received_at < [ago :max_age_s]

-- fragment: failing
-- MySQL assigns from left to right, so attempts comes behind what is computed from it.
next_attempt_at = [retry_at [final]], status = CASE WHEN [final] THEN 'dead' ELSE 'failed' END,
       attempts = attempts + 1, lease_until = NULL, token = NULL, updated_at = [now],
       error_type = :error_type::text, error = :error::text, fingerprint = :fingerprint::text

-- fragment: content
content_type = :content_type::text, headers = :headers::text, origin = :origin::text,
       payload = :payload::bytea, has_payload = :has_payload::boolean, key_id = :key_id::text

-- name: record_update
-- A lease overwrites the row that has its token, and nothing else. A delivery without one counts its failure on a row
-- that other deliveries have made of the same payload: as long as all attempts in its history were counted, no lease
-- has expired and no operator has decided on it since.
UPDATE txbox_inbox
   SET starts = CASE WHEN status = 'processing' THEN [greatest](starts - 1, 0) ELSE starts END, [failing], [content]
 WHERE consumer = :consumer::text AND message_id = :message_id::text
   AND ((status = 'processing' AND token = :token::text)
        OR (status = 'failed' AND :token::text = '' AND [same payload_hash, :payload_hash::bytea] AND attempts > 0
            AND attempts = (SELECT count(*) FROM txbox_attempt AS past
                             WHERE past.consumer = :consumer::text AND past.message_id = :message_id::text)))
[parked]

-- name: record_bare
-- record_update of a lease that leaves the content as it is stored: it cannot be written anew.
UPDATE txbox_inbox
   SET starts = [greatest](starts - 1, 0), [failing]
 WHERE consumer = :consumer::text AND message_id = :message_id::text AND status = 'processing' AND token = :token::text
[parked]

-- name: record_insert
-- Somebody else's row is left alone; then nothing is written.
INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, [key], sequence, payload_hash, attempts,
                         next_attempt_at, error_type, error, fingerprint,
                         content_type, headers, origin, payload, has_payload, key_id)
VALUES (:consumer::text, :message_id::text,
        CASE WHEN :final::boolean OR 1 >= :max_attempts::integer THEN 'dead' ELSE 'failed' END,
        :topic::text, :type::text, :key::text, :sequence::bigint, :payload_hash::bytea, 1,
        [retry_at :final::boolean OR 1 >= :max_attempts::integer], :error_type::text, :error::text, :fingerprint::text,
        :content_type::text, :headers::text, :origin::text, :payload::bytea, :has_payload::boolean, :key_id::text)
[unless_there]
[parked]

-- ---- leases.py ------------------------------------------------------------------------------------------------------

-- fragment: message starts
[text message_id], [text topic], [text type], [text [key]], sequence, [time received_at], payload_hash, attempts,
       [starts], content_type, headers, origin, payload, has_payload, key_id, arrival

-- name: release
-- Fenced. Takes the start back, because the message is not to blame for how the run ended.
UPDATE txbox_inbox
   SET status = CASE WHEN attempts > 0 THEN 'failed' ELSE 'pending' END,
       starts = [greatest](starts - 1, 0), lease_until = NULL, token = NULL, updated_at = [now],
       next_attempt_at = [in :delay_s]
 WHERE consumer = :consumer::text AND message_id [in_rows message_id, text]
   AND token = :token::text AND status = 'processing'

-- ---- order.py -------------------------------------------------------------------------------------------------------

-- name: order_waiting
-- The keys of a claim with earlier messages unfinished; later messages of these keys wait in the table.
SELECT DISTINCT [text txbox_inbox.key] FROM txbox_inbox
 WHERE consumer = :consumer::text AND txbox_inbox.key [in_rows key, text] AND [open]
       (status IN ('pending', 'failed', 'processing') OR (:dead_blocks::boolean AND status = 'dead'))
   AND NOT [same token, :token::text]

-- name: sequence_state
-- The version processed last, whether an earlier one is being processed from the table, and whether this one has
-- waited long enough. Takes no locks: a version whose predecessor has not committed yet is stored, rather than
-- waiting here while another handler runs.
SELECT (SELECT last FROM txbox_sequence
         WHERE consumer = :consumer::text AND txbox_sequence.key = :key::text),
       EXISTS (SELECT 1 FROM txbox_inbox
                WHERE consumer = :consumer::text AND txbox_inbox.key = :key::text AND [open]
                      status IN ('pending', 'failed', 'processing') AND sequence < :sequence::bigint),
       EXISTS (SELECT 1 FROM txbox_inbox
                WHERE consumer = :consumer::text AND message_id = :message_id::text
                  AND received_at < [ago :wait_s])

-- name: sequence_next
-- Wakes the next version, which need not wait until it would be looked at again, nor behind others that were looked at
-- and still wait: those are due later than they were received. A clock set back since must not make it wait.
UPDATE txbox_inbox SET next_attempt_at = CASE WHEN received_at < [now] THEN received_at ELSE [now] END
 WHERE consumer = :consumer::text AND txbox_inbox.key = :key::text AND [open] status = 'pending'
   AND sequence = :sequence::bigint + 1

-- name: sequence_done
-- Never goes back: a late version leaves the higher one in place.
INSERT INTO txbox_sequence (consumer, [key], last) VALUES (:consumer::text, :key::text, :sequence::bigint)
[on_conflict txbox_sequence, consumer, key] last = [greatest](txbox_sequence.last, [new last]), updated_at = [now]

-- ---- jobs.py --------------------------------------------------------------------------------------------------------

-- name: job_create
INSERT INTO txbox_job (name) VALUES (:name::text) ON CONFLICT (name) DO NOTHING

-- name: job_acquire
-- One holder at a time, by the database's clock; the holder renews with the same token.
UPDATE txbox_job
   SET token = :token::text, updated_at = [now], lease_until = [in :lease_s]
 WHERE name = :name::text AND (lease_until IS NULL OR lease_until <= [now] OR token = :token::text)

-- name: job_release
UPDATE txbox_job SET token = NULL, lease_until = NULL, updated_at = [now]
 WHERE name = :name::text AND token = :token::text

-- name: job_state
SELECT state FROM txbox_job WHERE name = :name::text

-- name: job_save
-- Fenced by the lease: a reader that lost it cannot move the progress back. And by the state before: a database that
-- failed over has an older one, and not what was processed since.
UPDATE txbox_job SET state = :state::text, updated_at = [now]
 WHERE name = :name::text AND token = :token::text AND coalesce(state, '') = coalesce(:before::text, '')

-- fragment: alert_rows
SELECT [text name], [text token], state, CASE WHEN lease_until <= [now] THEN 1 ELSE 0 END FROM txbox_job

-- name: alert_row
[alert_rows] WHERE name = :name::text

-- name: alerts_open
[alert_rows] WHERE name LIKE :names::text

-- name: alert_waits
-- Whether what was said last has not left yet: then its channel is away, and more of the same would only pile up.
SELECT count(*) FROM (SELECT 1 FROM txbox_outbox WHERE status = 'pending' AND route = :route::text
                         AND topic = :topic::text AND txbox_outbox.key = :key::text LIMIT 1) AS waiting

-- name: alert_open
INSERT INTO txbox_job (name, token, lease_until, state)
VALUES (:name::text, :token::text, [in :window_s], :state::text)
ON CONFLICT (name) DO NOTHING

-- name: alert_said
-- Only the first of several processes that look at the end of a window.
UPDATE txbox_job SET state = :state::text, lease_until = [in :window_s], updated_at = [now]
 WHERE name = :name::text AND lease_until <= [now]

-- name: alert_closed
DELETE FROM txbox_job WHERE name = :name::text AND lease_until <= [now]

-- name: alerts_forgotten
-- Of an App that has gone, or has other channels by now: others move the end of their windows.
DELETE FROM txbox_job WHERE name LIKE 'alert:%' AND lease_until < [ago :older_than_s]

-- nothing: prune_blocks
-- prune already finds the rows in the best order.

-- nothing: prune_begin
-- A transaction cannot choose its durability.

-- name: prunable
SELECT count(*) FROM txbox_inbox
 WHERE status IN ('processed', 'discarded')
   AND processed_at < [stable_ago :older_than_s]
   AND (:consumer::text IS NULL OR consumer = :consumer::text)

-- fragment: outgoing_past
status <> 'pending' AND ((status = 'sent' AND sent_at < [ago :sent_s])
                         OR (status = 'discarded' AND available_at < [ago :discarded_s]))

-- name: prunable_outbox
SELECT count(*) FROM txbox_outbox
 WHERE [outgoing_past]

-- fragment: decided
-- What was accepted or discarded, and what an edit has replaced once its message is gone; what waits for a decision is
-- never deleted.
status <> 'quarantined' AND updated_at < [ago :older_than_s]
   AND (status <> 'replaced'
        OR NOT EXISTS (SELECT 1 FROM txbox_inbox AS edited
                        WHERE edited.consumer = txbox_quarantine.consumer
                          AND edited.message_id = txbox_quarantine.message_id))

-- name: prunable_quarantine
SELECT count(*) FROM txbox_quarantine
 WHERE [decided]

-- name: quarantine_bytes
SELECT coalesce(sum(kept_bytes), 0) FROM txbox_quarantine WHERE kept_bytes > 0

-- name: quarantine_oldest
SELECT [text consumer], [text message_id], hash, kept_bytes FROM txbox_quarantine
 WHERE kept_bytes > 0
 ORDER BY received_at
 LIMIT :limit::integer
[skip_locked]

-- name: drop_quarantined
UPDATE [quarantine_of] SET payload = NULL, kept_bytes = 0
 [quarantine_list]
 WHERE [is_quarantine_of]

-- fragment: leased_rows
SELECT 1 FROM txbox_inbox
                          WHERE consumer = :consumer::text AND [open] status = 'processing' AND lease_until IS NOT NULL

-- name: work_left
-- What keeps `run --once` running: due rows, leased rows, and versions whose turn it is, which are looked at again
-- within two seconds.
SELECT CASE WHEN EXISTS (SELECT 1 FROM [inbox_by_due] WHERE [is_due starts = 0])
              OR EXISTS (SELECT 1 FROM [inbox_by_due] WHERE [is_due starts > 0])
              OR EXISTS ([leased_rows])
              OR EXISTS (SELECT 1 FROM txbox_inbox AS inbox
                          WHERE inbox.consumer = :consumer::text AND inbox.status <> 'processed'
                            AND inbox.status = 'pending' AND inbox.next_attempt_at <= [in 3]
                            AND EXISTS (SELECT 1 FROM txbox_sequence AS done
                                         WHERE done.consumer = inbox.consumer AND done.key = inbox.key
                                           AND inbox.sequence = done.last + 1))
            THEN 1 ELSE 0 END

-- fragment: is_head
NOT EXISTS (SELECT 1 FROM txbox_inbox AS earlier
                                           WHERE earlier.consumer = inbox.consumer AND earlier.key = inbox.key
                                             AND earlier.arrival < inbox.arrival AND earlier.status <> 'processed'
                                             AND (earlier.status IN ('pending', 'failed', 'processing')
                                                  OR (:dead_blocks::boolean AND earlier.status = 'dead')))

-- name: work_left_ordered
-- work_left for ordered consumers: rows that wait for a dead row, or for one not yet due, do not count.
SELECT CASE WHEN EXISTS (SELECT 1 FROM txbox_inbox AS inbox
                          WHERE inbox.consumer = :consumer::text AND inbox.status <> 'processed'
                            AND inbox.status IN ('pending', 'failed')
                            AND inbox.has_payload AND inbox.next_attempt_at <= [now]
                            AND [is_head])
              OR EXISTS ([leased_rows])
            THEN 1 ELSE 0 END

-- fragment: stray_routes
SELECT '', [now] FROM (SELECT 1 AS one) AS always
         WHERE EXISTS (SELECT 1 FROM txbox_outbox
                       WHERE status = 'pending' AND route >= 'local' AND route < :local::text)
            OR EXISTS (SELECT 1 FROM txbox_outbox
                        WHERE status = 'pending' AND route > :local::text AND route < 'local;')

-- ---- partitions.py: PostgreSQL alone has partitions -----------------------------------------------------------------

-- nothing: partitions partitions_detached partition_begin partition_make partition_rows partition_detach
-- nothing: partition_drop prune_orphans

-- ---- schema.py ------------------------------------------------------------------------------------------------------

-- name: schema_version
SELECT version, compatible_from FROM txbox_schema ORDER BY version DESC LIMIT 1

-- nothing: schema_creators
-- Names are looked up in one database only, and then among the built-ins.

-- ---- admin/look.py, admin/changes.py, admin/replay.py ---------------------------------------------------------------

-- name: status
SELECT [text consumer], status, count(*) FROM txbox_inbox GROUP BY consumer, status ORDER BY consumer, status

-- name: oldest_unfinished
SELECT [text consumer], [age min(received_at)]
  FROM txbox_inbox WHERE [open] status IN ('pending', 'processing', 'failed')
 GROUP BY consumer ORDER BY consumer

-- name: quarantine_status
SELECT [text consumer], count(*)
  FROM txbox_quarantine WHERE status = 'quarantined' GROUP BY consumer ORDER BY consumer

-- fragment: state
-- The state shown to people.
CASE WHEN status <> 'pending' THEN status WHEN available_at <= [stable_now] THEN 'due'
                    WHEN token IS NOT NULL THEN 'leased' WHEN attempts > 0 THEN 'failed' ELSE 'delayed' END

-- name: outbox_status
SELECT [text outbox.topic], [text outbox.route], outbox.state, count(*), [age min(outbox.staged_at)]
  FROM (SELECT topic, route, staged_at, [state] AS state FROM txbox_outbox) AS outbox
 GROUP BY outbox.topic, outbox.route, outbox.state ORDER BY outbox.topic, outbox.route, outbox.state

-- fragment: some status
(SELECT count(*) FROM (SELECT 1 FROM [by_status] AND status <> 'processed' AND status = [status]
                               LIMIT :most::integer) AS counted)

-- fragment: oldest status
(SELECT [age received_at] FROM [by_status] AND status <> 'processed' AND status = [status]
         ORDER BY arrival LIMIT 1)

-- name: consumer_open
-- Of one consumer, counted up to a limit: what is open by status and quarantined, and the oldest of what is unfinished.
[look] [some 'pending'],
       [some 'processing'],
       [some 'failed'],
       [some 'dead'],
       [some 'discarded'],
       (SELECT count(*) FROM (SELECT 1 FROM [waiting_aside] WHERE consumer = :consumer::text AND status = 'quarantined'
                               LIMIT :most::integer) AS counted),
       [oldest 'pending'],
       [oldest 'processing'],
       [oldest 'failed']

-- fragment: unsent condition order
SELECT * FROM (SELECT topic, route, staged_at, [state] AS state
                         FROM txbox_outbox WHERE [condition] ORDER BY [order] LIMIT :most::integer)

-- name: outbox_open
-- As outbox_status, of what has not left: counted up to a limit, and not more than that is read.
SELECT outbox.topic, outbox.route, outbox.state, count(*), [age min(outbox.staged_at)]
  FROM ([unsent status = 'pending', route, available_at, number] AS waiting
        UNION ALL
        [unsent status <> 'pending' AND status = 'dead', number] AS ended) AS outbox
 GROUP BY outbox.topic, outbox.route, outbox.state ORDER BY outbox.topic, outbox.route, outbox.state

-- nothing: bound_look

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

-- name: inbox_newest
[look] coalesce(max(arrival), 0) FROM txbox_inbox

-- name: outbox_newest
[look] coalesce(max(number), 0) FROM txbox_outbox

-- For each table: a page, a whole row, how many rows a change affects, one batch of them, and the changes.

-- fragment: is column = (:[column]::text IS NULL OR [column] = :[column]::text)

-- fragment: within moment id
-- Of which time, and how the id begins.
(:older_than_s::double precision IS NULL OR [moment] < [ago :older_than_s])
   AND (:since_s::double precision IS NULL OR [moment] >= [instant :since_s])
   AND (:until_s::double precision IS NULL OR [moment] < [instant :until_s])
   AND (:id_prefix::text IS NULL OR substr([id], 1, length(:id_prefix::text)) = :id_prefix::text)

-- fragment: inbox_row
[text consumer], [text message_id], status, [text topic], [text type], [text txbox_inbox.key], attempts, starts,
       [time received_at], [time updated_at], [time processed_at], [time next_attempt_at], [time lease_until], error_type,
       error, fingerprint, has_payload, arrival, key_id

-- fragment: inbox_filter
[is topic]
   AND [is type]
   AND (:key::text IS NULL OR txbox_inbox.key = :key::text)
   AND [is error_type]
   AND [is fingerprint]
   AND [within received_at, message_id]

-- name: inbox_list
-- Keyset pages, newest first, of a stretch of arrivals: no index knows all rows by what may be asked for.
[look] [inbox_row]
  FROM txbox_inbox
 WHERE arrival > :floor::bigint AND arrival < :before::bigint
   AND [is consumer]
   AND [is status]
   AND [inbox_filter]
 ORDER BY arrival DESC
 LIMIT :limit::integer

-- name: inbox_list_open
-- The same of one consumer and any status but processed, which an index has in this order.
[look] [inbox_row]
  FROM [by_status]
   AND status <> 'processed' AND status = :status::text
   AND arrival > :floor::bigint AND arrival < :before::bigint
   AND [inbox_filter]
 ORDER BY arrival DESC
 LIMIT :limit::integer

-- name: inbox_list_id
-- The same of one consumer and id.
[look] [inbox_row]
  FROM txbox_inbox
 WHERE consumer = :consumer::text AND message_id = :message_id::text
   AND [is status]
   AND arrival < :before::bigint
   AND [inbox_filter]
 LIMIT :limit::integer

-- name: failure_groups
-- The newest failures of one consumer and status, as many as are looked at, by what they have in common.
-- Each hour of the last day has a row; 24 is before that.
[look] newest.fingerprint, newest.error_type, count(*), [time min(newest.received_at)],
       [time max(newest.updated_at)], [text min(newest.message_id)], newest.hour
  FROM (SELECT fingerprint, error_type, received_at, updated_at, message_id,
               CASE WHEN [age updated_at] < 86400 THEN round([age updated_at] / 3600.0 - 0.5) ELSE 24 END AS hour
          FROM [by_status] AND status <> 'processed' AND status = :status::text
         ORDER BY arrival DESC
         LIMIT :most::integer) AS newest
 GROUP BY newest.fingerprint, newest.error_type, newest.hour

-- name: inbox_show
SELECT [inbox_row],
       content_type, headers, payload, origin, sequence, payload_hash, result
  FROM txbox_inbox WHERE consumer = :consumer::text AND message_id = :message_id::text

-- name: inbox_attempts
SELECT attempt, status, error_type, error, fingerprint, [time recorded_at]
  FROM txbox_attempt WHERE consumer = :consumer::text AND message_id = :message_id::text ORDER BY number

-- name: inbox_count
-- What inbox_select would find in all batches of each consumer, and how many of those are spared. Takes no locks.
SELECT status, [text consumer], count(*), count(CASE WHEN error_type = :spared::text THEN 1 END) FROM txbox_inbox
 WHERE [is consumer]
   AND [is message_id]
   AND [open] status [in_rows status, text]
   AND (has_payload OR NOT :needs_payload::boolean)
   AND [inbox_filter]
 GROUP BY status, consumer ORDER BY consumer

-- fragment: inbox_changed
SELECT [text consumer], [text message_id], arrival, error_type
  FROM [by_status]
   AND (:message_id::text IS NULL OR message_id = :message_id::text AND consumer = :consumer::text)
   AND [open] status = :status::text
   AND (has_payload OR NOT :needs_payload::boolean)
   AND [inbox_filter]
   AND arrival > :after::bigint
 ORDER BY arrival
 LIMIT :limit::integer

-- name: inbox_select
-- The rows an operator's command may change now. SKIP LOCKED: what a live delivery holds is left to it.
-- Per consumer in arrival order, which an index has, so that all batches together read each row once.
[inbox_changed]
[skip_locked]

-- name: inbox_preview
-- What inbox_select would take, for a dry run: without locks.
[inbox_changed]

-- name: inbox_states
-- What became of messages that were retried.
SELECT [text inbox.consumer], [text inbox.message_id], inbox.status, inbox.attempts, inbox.fingerprint
  FROM [inbox_read]

-- name: inbox_retry
-- Grants a full new budget of attempts; the history stays in txbox_attempt.
UPDATE [inbox_of]
   SET status = 'failed', attempts = 0, starts = 0, next_attempt_at = [now], updated_at = [now],
       lease_until = NULL, token = NULL
 [inbox_list]
 WHERE [is_inbox_of] AND status IN ('dead', 'failed')

-- name: inbox_discard
UPDATE [inbox_of]
   SET status = 'discarded', processed_at = [now], updated_at = [now], next_attempt_at = NULL,
       lease_until = NULL, token = NULL
 [inbox_list]
 WHERE [is_inbox_of] AND status IN ('dead', 'failed', 'pending')

-- fragment: edited
SELECT [message starts]
  FROM txbox_inbox
 WHERE consumer = :consumer::text AND message_id = :message_id::text AND status IN ('dead', 'failed') AND has_payload

-- name: edit_lock
-- One message that may be edited, as replay_read.
[edited]
[skip_locked]

-- name: edit_read
[edited]

-- fragment: unless_quarantined column value
[column] = CASE WHEN txbox_quarantine.status = 'quarantined' THEN txbox_quarantine.[column] ELSE [value] END

-- name: edit_set_aside
-- The original stays readable in the quarantine, under the hash of its payload, as long as its message. Its bytes are
-- not counted: an operator put it there.
INSERT INTO txbox_quarantine (consumer, message_id, hash, status, reason, topic, type, [key],
                              content_type, headers, origin, payload, key_id)
SELECT inbox.consumer, inbox.message_id, :hash::bytea, 'replaced', :reason::text, inbox.topic, inbox.type, inbox.key,
       inbox.content_type, :headers::text, inbox.origin, :payload::bytea, :key_id::text
  FROM txbox_inbox AS inbox WHERE inbox.consumer = :consumer::text AND inbox.message_id = :message_id::text
[on_conflict txbox_quarantine, consumer, message_id, hash]
       [unless_quarantined reason, [new reason]], [unless_quarantined status, 'replaced'],
       headers = [new headers], payload = [new payload], key_id = [new key_id], updated_at = [now]

-- name: edit_write
-- As inbox_retry, with other content. The hash stays that of what came: a copy of it is a duplicate.
UPDATE txbox_inbox
   SET status = 'failed', attempts = 0, starts = 0, next_attempt_at = [now], updated_at = [now],
       lease_until = NULL, token = NULL, content_type = :content_type::text, headers = :headers::text,
       payload = :payload::bytea, key_id = :key_id::text
 WHERE consumer = :consumer::text AND message_id = :message_id::text AND status IN ('dead', 'failed')

-- name: replay_read
-- In arrival order; for replaying as another consumer, or replaying a processed row.
SELECT [message starts]
  FROM txbox_inbox
 WHERE [kept] AND arrival > :after::bigint
   AND [is message_id]
   AND [is status]
   AND [is topic]
   AND [is type]
   AND (:key::text IS NULL OR txbox_inbox.key = :key::text)
 ORDER BY arrival
 LIMIT :limit::integer

-- fragment: outbox_row
[text outbox.id], outbox.number, outbox.state, [text outbox.topic], [text outbox.route], [text outbox.type],
       [text outbox.key], outbox.attempts, [time outbox.staged_at],
       CASE WHEN outbox.state IN ('delayed', 'failed') THEN [time outbox.available_at] END,
       CASE WHEN outbox.state = 'leased' THEN [time outbox.available_at] END,
       [time outbox.sent_at], [text outbox.cause_consumer], [text outbox.cause_id], outbox.error_type, outbox.error,
       CASE WHEN outbox.key IS NOT NULL AND outbox.status = 'pending' THEN [before_it] END,
       outbox.key_id

-- fragment: listed order condition
(SELECT id, number, status, topic, type, txbox_outbox.key, attempts, staged_at, available_at, sent_at, cause_consumer,
               cause_id, error_type, error, key_id, route, [state] AS state
          FROM txbox_outbox
         WHERE [condition] AND number < :before::bigint
           AND [outbox_filter]
         ORDER BY [order]
         LIMIT :limit::integer) AS outbox
 ORDER BY outbox.[order]

-- fragment: outbox_filter
[is topic]
   AND [is route]
   AND [is type]
   AND (:key::text IS NULL OR txbox_outbox.key = :key::text)
   AND [is error_type]
   AND [within staged_at, id]

-- name: outbox_list
-- Keyset pages of a stretch of numbers, newest first; each row with the one of its key that must leave before it, if
-- any. Of the statuses that people see, the table has four as pending: that is asked first, it is what an index knows.
[look] [outbox_row]
  FROM [listed number DESC, number > :floor::bigint
           AND (:status::text IS NULL
                OR status = CASE WHEN :status::text IN ('due', 'delayed', 'leased', 'failed') THEN 'pending'
                                 ELSE :status::text END
                   AND [state] = :status::text)]

-- name: outbox_list_ended
-- The same of those that are dead, sent or discarded, which an index has in this order.
[look] [outbox_row]
  FROM [listed number DESC, status <> 'pending' AND status = :status::text AND number > :floor::bigint]

-- name: outbox_list_id
-- The same of one id.
[look] [outbox_row]
  FROM [listed number DESC, id = :message_id::text AND (:status::text IS NULL OR [state] = :status::text)]

-- name: outbox_show
SELECT [outbox_row], outbox.content_type, outbox.headers, outbox.payload
  FROM (SELECT found.*, [state] AS state
          FROM txbox_outbox AS found WHERE id = :message_id::text) AS outbox

-- name: outbox_count
SELECT outbox.state, NULL, count(*), 0
  FROM (SELECT [state] AS state
          FROM txbox_outbox
         WHERE (:message_id::text IS NULL OR id = :message_id::text)
           AND status IN ('pending', 'dead')
           AND [outbox_filter]) AS outbox
 WHERE outbox.state [in_rows status, text]
 GROUP BY outbox.state

-- fragment: outbox_changed
SELECT [text id], number, error_type FROM txbox_outbox
 WHERE (:message_id::text IS NULL OR id = :message_id::text)
   AND status IN ('pending', 'dead')
   AND [state] [in_rows status, text]
   AND [outbox_filter]
   AND number > :after::bigint
 ORDER BY number
 LIMIT :limit::integer

-- name: outbox_select
-- inbox_select for the outbox, of several statuses: a row may go from one to another meanwhile. Rows that a relay is
-- marking are left to it.
[outbox_changed]
[skip_locked]

-- name: outbox_preview
[outbox_changed]

-- The outbox, of which [is_of list] are the rows of a list of ids.
-- fragment: outgoing_of list = txbox_outbox
-- fragment: is_of list = id [in_rows [list], text]

-- name: outbox_retry
-- Grants a full new budget. available_at is set back to when it was staged, so that the row precedes the later rows of
-- its key again.
UPDATE [outgoing_of message_id] SET status = 'pending', attempts = 0, token = NULL, available_at = staged_at
 WHERE [is_of message_id] AND status IN ('pending', 'dead')

-- name: outbox_discard
-- For a row that is no longer pending, available_at is when it was given up.
UPDATE [outgoing_of message_id] SET status = 'discarded', token = NULL, available_at = [now]
 WHERE [is_of message_id] AND status IN ('pending', 'dead')

-- name: outbox_reroute
-- Grants a new budget, because the attempts were made on the old route. Rows that were tried are due at once. MySQL
-- assigns from left to right, so attempts comes last.
UPDATE [outgoing_of message_id] SET status = 'pending', route = :to::text, token = NULL,
       available_at = CASE WHEN attempts > 0 THEN staged_at ELSE available_at END, attempts = 0
 WHERE [is_of message_id] AND status IN ('pending', 'dead')

-- fragment: hash_begins = (:hash::text IS NULL OR substr([hex hash], 1, length(:hash::text)) = lower(:hash::text))

-- fragment: quarantine_named
[is consumer]
   AND [is message_id]
   AND [hash_begins]

-- fragment: quarantine_filter
[is topic]
   AND [is type]
   AND (:key::text IS NULL OR txbox_quarantine.key = :key::text)
   AND [is reason]
   AND [within received_at, message_id]

-- fragment: quarantine_page
[text consumer], [text message_id], hash, status, reason, [text topic], [text type], [text txbox_quarantine.key],
       seen, [time received_at], [time updated_at], kept_bytes, key_id

-- fragment: quarantine_row = [quarantine_page], content_type, headers, payload, origin

-- name: quarantine_list
-- Keyset pages, newest first. Rows have no number for their order of arrival, so the row itself is the page mark.
[look] [quarantine_page]
  FROM txbox_quarantine
 WHERE [quarantine_named]
   AND [is status]
   AND [quarantine_filter]
   AND (:mark_hash::bytea IS NULL
        OR (received_at, hash, consumer, message_id)
           < (SELECT mark.received_at, mark.hash, mark.consumer, mark.message_id FROM txbox_quarantine AS mark
               WHERE mark.consumer = :mark_consumer::text AND mark.message_id = :mark_id::text
                 AND mark.hash = :mark_hash::bytea))
 ORDER BY received_at DESC, hash DESC, consumer DESC, message_id DESC
 LIMIT :limit::integer

-- name: quarantine_show
SELECT [quarantine_row]
  FROM txbox_quarantine
 WHERE [quarantine_named]
 ORDER BY received_at
 LIMIT :limit::integer

-- name: quarantine_show_id
-- The same of one consumer and id, by the key.
SELECT [quarantine_row]
  FROM txbox_quarantine
 WHERE consumer = :consumer::text AND message_id = :message_id::text AND [hash_begins]
 ORDER BY received_at
 LIMIT :limit::integer

-- name: quarantine_groups
-- The newest that wait for a decision, as many as are looked at, by reason and by what their ids begin with: those of
-- CloudEvents begin with their source.
[look] [text newest.consumer], newest.reason, [text newest.topic], [text newest.source], count(*),
       [time min(newest.received_at)], [time max(newest.received_at)]
  FROM (SELECT consumer, reason, topic, received_at, substr(message_id, 1, nullif([first_space message_id], 0) - 1) AS source
          FROM [newest_aside] WHERE status = 'quarantined'
         ORDER BY received_at DESC, hash DESC, consumer DESC, message_id DESC
         LIMIT :most::integer) AS newest
 GROUP BY newest.consumer, newest.reason, newest.topic, newest.source

-- name: quarantine_count
SELECT status, [text consumer], count(*), 0 FROM txbox_quarantine
 WHERE status [in_rows status, text]
   AND [quarantine_named]
   AND [quarantine_filter]
 GROUP BY status, consumer ORDER BY consumer

-- fragment: quarantine_changed
SELECT [text consumer], [text message_id], hash, NULL, NULL FROM txbox_quarantine
 WHERE status = :status::text
   AND consumer = :consumer::text
   AND [is message_id]
   AND [hash_begins]
   AND [quarantine_filter]
   AND (:mark_hash::bytea IS NULL
        OR (received_at, hash, message_id)
           > (SELECT mark.received_at, mark.hash, mark.message_id FROM txbox_quarantine AS mark
               WHERE mark.consumer = :consumer::text AND mark.message_id = :mark_id::text
                 AND mark.hash = :mark_hash::bytea))
 ORDER BY received_at, hash, message_id
 LIMIT :limit::integer

-- name: quarantine_select
-- In order of arrival. Waits for a live copy that is incrementing a row's counter, which does not take long.
[quarantine_changed]
[for_update]

-- name: quarantine_preview
[quarantine_changed]

-- fragment: quarantine_decided
SELECT [quarantine_row]
  FROM txbox_quarantine
 WHERE consumer = :consumer::text AND message_id = :message_id::text AND hash = :hash::bytea AND status = 'quarantined'

-- name: quarantine_lock
[quarantine_decided]
[for_update]

-- name: quarantine_read
[quarantine_decided]

-- name: quarantine_end
-- Once decided, the content is no longer needed and is dropped; the row stays for its retention time.
UPDATE [quarantine_of]
   SET status = :status::text, payload = NULL, kept_bytes = 0, headers = NULL, updated_at = [now]
 [quarantine_list]
 WHERE [is_quarantine_of] AND status = 'quarantined'

-- name: audit_list
-- Keyset pages, newest first.
[look] number, [time recorded_at], actor, login, action, filter, affected, reason
  FROM txbox_audit
 WHERE (:before::bigint IS NULL OR number < :before::bigint)
 ORDER BY number DESC
 LIMIT :limit::integer

-- name: audit
INSERT INTO txbox_audit (actor, action, filter, affected, reason)
VALUES (:actor::text, :action::text, :filter::text, :affected::bigint, :reason::text)

-- ---- admin/look.py: what only pages ask ------------------------------------------------------------------------------

-- name: inbox_list_prefix
-- Of one consumer, by the first characters of an id; in its order, which the key has.
[look] [inbox_row]
  FROM txbox_inbox
 WHERE consumer = :consumer::text AND message_id >= :id_prefix::text AND message_id < :id_end::text
   AND [is status]
   AND [inbox_filter]
 ORDER BY message_id
 LIMIT :limit::integer

-- name: outbox_list_prefix
-- As inbox_list_prefix.
[look] [outbox_row]
  FROM [listed id, id >= :id_prefix::text AND id < :id_end::text AND (:status::text IS NULL OR [state] = :status::text)]

-- name: inbox_moment
-- When the first of a few arrivals was received: numbers grow with time, so halves of halves find a time's place.
[look] [time min(received_at)] FROM txbox_inbox WHERE arrival > :floor::bigint AND arrival < :before::bigint

-- name: outbox_moment
-- As inbox_moment.
[look] [time min(staged_at)] FROM txbox_outbox WHERE number > :floor::bigint AND number < :before::bigint

-- name: pause_changes
-- When consumers were paused and resumed, the newest first; among the newest rows of the audit, which has no index by
-- time.
[look] [time latest.recorded_at], latest.actor, latest.action, latest.filter, latest.reason
  FROM (SELECT number, recorded_at, actor, action, filter, reason FROM txbox_audit
         ORDER BY number DESC LIMIT :limit::integer) AS latest
 WHERE latest.action IN ('pause', 'resume')
 ORDER BY latest.number DESC

-- ---- admin/encrypt.py -----------------------------------------------------------------------------------------------
-- Of each table: a stretch of rows in the order of its key, with what tells under which key they are; the texts of one
-- row, unless somebody has leased or locked it; and those that replace them.

-- fragment: begins column = substr([column], 1, :length::integer)

-- name: encrypt_inbox
SELECT [text consumer], [text message_id], key_id, payload IS NOT NULL, [begins headers], [begins error], [begins result]
  FROM txbox_inbox
 WHERE consumer = :consumer::text AND message_id > :message_id::text
 ORDER BY message_id
 LIMIT :limit::integer

-- name: encrypt_inbox_row
SELECT key_id, payload, headers, error, result
  FROM txbox_inbox
 WHERE consumer = :consumer::text AND message_id = :message_id::text AND status <> 'processing'
[skip_locked]

-- name: encrypt_inbox_write
UPDATE txbox_inbox
   SET key_id = :key_id::text, payload = :payload::bytea, headers = :headers::text, error = :error::text,
       result = :result::bytea
 WHERE consumer = :consumer::text AND message_id = :message_id::text

-- name: encrypt_attempt
SELECT number, [text consumer], [text message_id], NULL, NULL, NULL, [begins error], NULL
  FROM txbox_attempt
 WHERE number > :number::bigint
 ORDER BY number
 LIMIT :limit::integer

-- name: encrypt_attempt_row
-- Without a lock: it is written once, and may be deleted meanwhile.
SELECT NULL, NULL, NULL, error, NULL FROM txbox_attempt WHERE number = :number::bigint

-- name: encrypt_attempt_write
UPDATE txbox_attempt SET error = :error::text WHERE number = :number::bigint

-- name: encrypt_quarantine
SELECT [text consumer], [text message_id], hash, key_id, payload IS NOT NULL, [begins headers], NULL, NULL
  FROM txbox_quarantine
 WHERE (consumer, message_id, hash) > (:consumer::text, :message_id::text, :hash::bytea)
 ORDER BY consumer, message_id, hash
 LIMIT :limit::integer

-- name: encrypt_quarantine_row
-- Nobody leases these: a copy that increments the counter is waited for.
SELECT key_id, payload, headers, NULL, NULL
  FROM txbox_quarantine
 WHERE consumer = :consumer::text AND message_id = :message_id::text AND hash = :hash::bytea
[for_update]

-- name: encrypt_quarantine_write
UPDATE txbox_quarantine SET key_id = :key_id::text, payload = :payload::bytea, headers = :headers::text
 WHERE consumer = :consumer::text AND message_id = :message_id::text AND hash = :hash::bytea

-- name: encrypt_outbox
SELECT [text id], key_id, payload IS NOT NULL, [begins headers], [begins error], NULL
  FROM txbox_outbox
 WHERE id > :message_id::text
 ORDER BY id
 LIMIT :limit::integer

-- name: encrypt_outbox_row
SELECT key_id, payload, headers, error, NULL FROM txbox_outbox WHERE id = :message_id::text AND token IS NULL
[skip_locked]

-- name: encrypt_outbox_write
UPDATE txbox_outbox
   SET key_id = :key_id::text, payload = :payload::bytea, headers = :headers::text, error = :error::text
 WHERE id = :message_id::text

-- ---- admin/doctor ---------------------------------------------------------------------------------------------------
-- No full scans: names come from index skip scans, and rows are counted up to a limit.

-- name: doctor_clock
SELECT [clock]

-- nothing: doctor_backend doctor_functions doctor_storage doctor_standbys

-- name: doctor_consumers
-- Consumers with rows in a status, by skip scan: one probe of the index for each of them, however many rows they have.
WITH RECURSIVE found(status, consumer) AS (
    SELECT unfinished.column1,
           (SELECT inbox.consumer FROM txbox_inbox AS inbox
             WHERE inbox.status <> 'processed' AND inbox.status = unfinished.column1
             ORDER BY inbox.consumer [by_posix] LIMIT 1)
      FROM (VALUES ('pending'), ('failed'), ('processing'), ('dead')) AS unfinished
     UNION ALL
    SELECT last.status,
           (SELECT inbox.consumer FROM txbox_inbox AS inbox
             WHERE inbox.status <> 'processed' AND inbox.status = last.status
               AND inbox.consumer > last.consumer [by_posix]
             ORDER BY inbox.consumer [by_posix] LIMIT 1)
      FROM found AS last WHERE last.consumer IS NOT NULL
)
SELECT status, consumer FROM found WHERE consumer IS NOT NULL LIMIT :limit::integer

-- name: doctor_messages
-- Of a consumer and status: the age of the oldest, how many of the oldest have lost their lease, and how many there are
-- of all, up to a limit, and the age of the newest. Each row that is looked at may be on another page; the count needs
-- the index alone.
SELECT [age min(oldest.received_at)], count(CASE WHEN oldest.expired THEN 1 END),
       count(CASE WHEN oldest.endless THEN 1 END),
       (SELECT count(*) FROM (SELECT 1 FROM [by_status] AND [open] status = :status::text
                               LIMIT :counted::integer) AS alike),
       (SELECT [age received_at] FROM [by_status] AND [open] status = :status::text ORDER BY arrival DESC LIMIT 1)
  FROM (SELECT received_at,
               status = 'processing' AND (lease_until IS NULL OR lease_until < [ago :late_s]) AS expired,
               status <> 'dead' AND status <> 'processing' AND has_payload AND next_attempt_at IS NULL AS endless
          FROM [by_status] AND [open] status = :status::text
         ORDER BY arrival LIMIT :limit::integer) AS oldest

-- fragment: late starts
SELECT message_id, status, topic, type, next_attempt_at FROM [inbox_by_due]
         WHERE [is_due [starts]] AND next_attempt_at < [stable_ago :late_s]
         ORDER BY next_attempt_at LIMIT :limit::integer

-- name: doctor_late
-- Those of a consumer that have been due for longest, if for so long.
SELECT [text late.message_id], late.status, [text late.topic], [text late.type], [age late.next_attempt_at]
  FROM (SELECT * FROM ([late starts = 0]) AS once
         UNION ALL
        SELECT * FROM ([late starts > 0]) AS again) AS late

-- name: doctor_outgoing
-- Of those of a route that have been due for longest, if for so long: how many, for how long, and how many of them wait
-- for no other one of their key.
SELECT [text late.topic], [text late.type], [text late.cause_consumer], count(*), [age min(late.available_at)],
       sum(late.foremost)
  FROM (SELECT outbox.topic, outbox.type, outbox.cause_consumer, outbox.available_at,
               CASE WHEN outbox.key IS NULL OR [before_it] IS NULL THEN 1 ELSE 0 END AS foremost
          FROM (SELECT topic, type, cause_consumer, available_at, route, txbox_outbox.key, number
                  FROM [outbox_by_due] WHERE status = 'pending' AND route = :route::text
                   AND available_at < [stable_ago :late_s]
                 ORDER BY available_at, number LIMIT :limit::integer) AS outbox) AS late
 GROUP BY late.topic, late.type, late.cause_consumer

-- name: doctor_routes
-- Routes with rows that wait, by skip scan.
WITH RECURSIVE found(route) AS (
    SELECT min(route) FROM txbox_outbox WHERE status = 'pending'
     UNION ALL
    SELECT (SELECT min(later.route) FROM txbox_outbox AS later
             WHERE later.status = 'pending' AND later.route > last.route)
      FROM found AS last WHERE last.route IS NOT NULL
)
SELECT route FROM found WHERE route IS NOT NULL LIMIT :limit::integer

-- name: doctor_outgoing_dead
SELECT count(*), [age min(oldest.staged_at)], count(CASE WHEN substr(oldest.topic, 1, 12) <> 'txbox.alerts' THEN 1 END)
  FROM (SELECT staged_at, topic FROM txbox_outbox WHERE status <> 'pending' AND status = 'dead'
         ORDER BY number LIMIT :limit::integer) AS oldest

-- name: doctor_quarantined
SELECT count(*), [age min(oldest.received_at)], [age max(oldest.received_at)]
  FROM (SELECT received_at FROM [waiting_aside]
         WHERE consumer = :consumer::text AND status = 'quarantined' LIMIT :limit::integer) AS oldest

-- name: doctor_keys
-- Under which keys the payloads of a consumer are; of rows in order of arrival, up to a limit.
SELECT key_id, count(*) FROM (SELECT key_id FROM [kept_rows] LIMIT :limit::integer) AS kept GROUP BY key_id

-- fragment: keys_of table order
SELECT '[table]', key_id, count(*)
  FROM (SELECT key_id, payload IS NULL AS bare FROM txbox_[table] ORDER BY [order] LIMIT :limit::integer) AS listed
 WHERE NOT listed.bare GROUP BY key_id

-- name: doctor_keys_beside
-- The same of the other tables.
[keys_of outbox, id]
 UNION ALL
[keys_of quarantine, consumer, message_id, hash]

-- name: doctor_pruning
-- When pruning ran last, how old the tables are, and whether there is any row.
SELECT 'ran', [age updated_at] FROM txbox_job WHERE name = 'prune'
 UNION ALL
SELECT 'tables', [age min(applied_at)] FROM txbox_schema
 UNION ALL
SELECT 'rows', count(*)::double precision FROM (SELECT 1 FROM txbox_inbox LIMIT 1) AS present

-- ---- admin/facts.py -------------------------------------------------------------------------------------------------

-- name: database_clock
SELECT [time [now]]

-- fragment: consumers_of table
-- From one to the next in the index of the key: no look at all rows.
WITH RECURSIVE known(consumer) AS (
       SELECT min(consumer) FROM [table] WHERE consumer > :after::text
        UNION ALL
       SELECT (SELECT min(next.consumer) FROM [table] AS next WHERE next.consumer > known.consumer)
         FROM known WHERE known.consumer IS NOT NULL)
SELECT consumer FROM known WHERE consumer IS NOT NULL LIMIT :limit::integer

-- name: explain_consumers
[consumers_of txbox_inbox]

-- name: explain_aside
[consumers_of txbox_quarantine]

-- name: explain_inbox
-- Which of these keys there are.
SELECT [text inbox.consumer], [text inbox.message_id], inbox.status, [text inbox.topic]
  FROM [inbox_read]

-- name: explain_outbox
-- Which of these outgoing messages there are.
SELECT [text id], [state], [text topic] FROM txbox_outbox WHERE id [in_rows message_id, text]

-- name: explain_quarantine
SELECT [quarantine_row]
  FROM txbox_quarantine
 WHERE consumer = :consumer::text AND message_id = :message_id::text
 ORDER BY received_at
 LIMIT :limit::integer

-- nothing: explain_holder explain_writers explain_locked

-- ---- order.py: what waits -------------------------------------------------------------------------------------------

-- name: waits_order
-- For rows that have not run: the first row of their key that they wait for.
SELECT [text waiting.message_id], [text head.message_id], head.status, [time head.next_attempt_at]
  FROM (SELECT behind.message_id,
               (SELECT earlier.message_id FROM txbox_inbox AS earlier
                 WHERE earlier.consumer = behind.consumer AND earlier.key = behind.key
                   AND earlier.arrival < behind.arrival AND earlier.status <> 'processed'
                   AND (earlier.status IN ('pending', 'failed', 'processing')
                        OR (:dead_blocks::boolean AND earlier.status = 'dead'))
                 ORDER BY earlier.arrival LIMIT 1) AS head_id
          FROM txbox_inbox AS behind
         WHERE behind.consumer = :consumer::text AND behind.message_id [in_rows message_id, text]
           AND behind.status IN ('pending', 'failed')) AS waiting
  JOIN txbox_inbox AS head ON head.consumer = :consumer::text AND head.message_id = waiting.head_id

-- name: waits_version
-- For rows that have not run: their version, the one processed last, and the lowest one they wait for.
SELECT [text waiting.message_id], waiting.sequence, waiting.last, [text head.message_id], head.status,
       [time head.next_attempt_at], head.sequence
  FROM (SELECT behind.message_id, behind.sequence, done.last,
               (SELECT earlier.message_id FROM txbox_inbox AS earlier
                 WHERE earlier.consumer = behind.consumer AND earlier.key = behind.key
                   AND earlier.sequence < behind.sequence AND earlier.status <> 'processed'
                   AND (earlier.status IN ('pending', 'failed', 'processing')
                        OR (earlier.status = 'dead' AND earlier.sequence > coalesce(done.last, earlier.sequence - 1)))
                 ORDER BY earlier.sequence LIMIT 1) AS head_id
          FROM txbox_inbox AS behind
          LEFT JOIN txbox_sequence AS done ON done.consumer = behind.consumer AND done.key = behind.key
         WHERE behind.consumer = :consumer::text AND behind.message_id [in_rows message_id, text]
           AND behind.status IN ('pending', 'failed') AND behind.sequence IS NOT NULL) AS waiting
  LEFT JOIN txbox_inbox AS head ON head.consumer = :consumer::text AND head.message_id = waiting.head_id

-- ---- outbox.py ------------------------------------------------------------------------------------------------------

-- nothing: stage_notify stage_single stage_notify_single accept_single store_single
-- One row travels as its values wherever a statement repeats its text for each.

-- name: stage
-- Many messages in one statement, in the caller's transaction; `number` is the order of insertion.
-- A repeated run with the same cause stages the same ids, and changes nothing.
INSERT INTO txbox_outbox (id, topic, type, [key], content_type, headers, payload, key_id, cause_consumer, cause_id,
                          available_at, route)
VALUES {(:rows.id, :rows.topic, :rows.type, :rows.key, :rows.content_type, :rows.headers, :rows.payload, :key_id,
         :rows.cause_consumer, :rows.cause_id, [in :rows.delay_s], :rows.route)}
[unless_staged]

-- name: relay_page
-- What may be due on one route, or was staged without one, oldest first, from where the last look ended. Takes no
-- locks. Two scans, each in index order: with `route IN (…)` everything due would be sorted.
SELECT id, number, topic, key, [time available_at], payload_bytes, type
  FROM ([page :route::text, (:whole::boolean OR (topic [in_rows topic, text]) = :named::boolean)]
        UNION ALL
        [page '', :route::text <> '' AND (topic [in_rows topic, text]) = :named::boolean]) AS due
 ORDER BY available_at, number
 LIMIT :limit::integer

-- name: relay_heads
-- For each key and type, the first row that must not be overtaken, and how many there are up to :last. A row staged
-- with a delay counts once the delay is over. Any other counts even if it is not due yet by this transaction's clock,
-- which stopped when the transaction began.
SELECT [text topic], [text txbox_outbox.key], [text type], min(number), count(*)
  FROM txbox_outbox
 WHERE status = 'pending' AND txbox_outbox.key IS NOT NULL AND number <= :last::bigint
   AND (route, topic, txbox_outbox.key) IN ([route_keys])
   AND (token IS NOT NULL OR attempts > 0 OR available_at = staged_at OR available_at <= [stable_now])
 GROUP BY topic, txbox_outbox.key, type

-- name: relay_release
-- Fenced. For rows that were not sent although nothing is wrong with them; they keep their place ahead of later ones.
UPDATE [outgoing_of id]
   SET token = NULL, available_at = staged_at
 WHERE [is_of id] AND token = :token::text AND status = 'pending'

-- name: relay_sent
DELETE FROM txbox_outbox WHERE id [in_rows id, text] AND token = :token::text AND status = 'pending'

-- name: relay_kept
-- relay_sent for rows that are kept for a while.
UPDATE [outgoing_of id] SET status = 'sent', token = NULL, sent_at = [now], error_type = NULL, error = NULL
 WHERE [is_of id] AND token = :token::text AND status = 'pending'

-- name: relay_failed
UPDATE txbox_outbox
   SET status = :status::text, attempts = attempts + 1, token = NULL,
       error_type = :error_type::text, error = :error::text, available_at = [in :delay_s]
 WHERE id = :id::text AND token = :token::text AND status = 'pending'

-- name: relay_left
-- What is due or leased on one route, or was staged without one.
SELECT DISTINCT [text topic], [text type] FROM txbox_outbox
 WHERE status = 'pending' AND (token IS NOT NULL OR available_at <= [stable_now])
   AND route IN (:route::text, '')
   AND ((:whole::boolean AND route = :route::text) OR (topic [in_rows topic, text]) = :named::boolean)

-- name: relay_strays
-- Rows for consumers on this database that are not on this App's route, and rows without any route.
SELECT DISTINCT [text route], [text topic], [text type], [text cause_consumer] FROM txbox_outbox
 WHERE status = 'pending' AND (route = '' OR (route >= 'local' AND route < 'local;')) AND route <> :route::text

-- name: relay_adopt
UPDATE txbox_outbox SET route = :route::text
 WHERE id IN (SELECT id FROM txbox_outbox
               WHERE status = 'pending' AND token IS NULL AND route = :from_route::text AND topic = :topic::text
                 AND [same type, :type::text] AND [same cause_consumer, :cause_consumer::text]
                 AND (:due_s::double precision = 0 OR available_at <= [ago :due_s])
               LIMIT :limit::integer
               [skip_locked])

-- ---- activity.py ----------------------------------------------------------------------------------------------------

-- name: activity_write
-- What a process has counted in these minutes so far takes the place of what it wrote before: writing again after a
-- lost answer doubles nothing. No other process writes these rows.
INSERT INTO txbox_activity (minute, kind, name, worker, received, processed, duplicate, deferred, failed, dead,
                            quarantined, latency, run, oldest_s)
[counted]
[on_conflict txbox_activity, minute, kind, name, worker]
       received = [new received], processed = [new processed], duplicate = [new duplicate], deferred = [new deferred],
       failed = [new failed], dead = [new dead], quarantined = [new quarantined], latency = [new latency],
       run = [new run], oldest_s = [new oldest_s]

-- fragment: summed which
-- By steps of time, with their histograms joined: an hour of ten consumers is 600 rows of minutes.
SELECT minute - minute % :step::bigint AS first, kind, [text name], sum(received), sum(processed), sum(duplicate),
       sum(deferred), sum(failed), sum(dead), sum(quarantined), [joined latency], [joined run], max(oldest_s)
  FROM txbox_activity WHERE [which]
 GROUP BY 1, 2, 3 ORDER BY 1

-- name: activity_read
[summed minute >= :minute::bigint]

-- name: activity_read_one
-- By the index that has the counts of one together: those of the others are not read.
[summed kind = :kind::text AND name = :name::text AND minute >= :minute::bigint]

-- fragment: unfolded
(worker <> '' OR minute % :step::bigint <> 0)

-- name: activity_minutes
-- Minutes of which several processes have rows yet, or that belong to a longer step.
SELECT DISTINCT minute FROM txbox_activity
 WHERE minute < :before::bigint AND [unfolded] ORDER BY minute LIMIT :limit::integer

-- name: activity_of
SELECT minute, kind, [text name], received, processed, duplicate, deferred, failed, dead, quarantined, latency, run,
       oldest_s
  FROM txbox_activity WHERE minute [in_rows minute, bigint]

-- name: activity_folded
DELETE FROM txbox_activity WHERE minute [in_rows minute, bigint] AND [unfolded]

-- name: activity_prune
DELETE FROM txbox_activity WHERE minute < :before::bigint

-- name: clock
-- In seconds since 1970.
SELECT [clock]

-- name: worker_write
INSERT INTO txbox_worker (worker, kind, host, pid, version, app, consumers, sources, routes, lanes, state, busy, leases,
                          in_flight)
VALUES (:worker::text, :kind::text, :host::text, :pid::bigint, :version::text, :app::text, :consumers::text,
        :sources::text, :routes::text, :lanes::integer, :state::text, :busy::integer, :leases::integer,
        :in_flight::integer)
[on_conflict txbox_worker, worker]
       sources = [new sources], routes = [new routes], state = [new state], busy = [new busy], leases = [new leases],
       in_flight = [new in_flight], seen_at = [now]

-- name: worker_gone
DELETE FROM txbox_worker WHERE worker = :worker::text

-- name: workers
SELECT worker, kind, host, pid, version, app, consumers, sources, routes, lanes, state, busy, leases, in_flight,
       [time started_at], [time seen_at], [age seen_at]
  FROM txbox_worker ORDER BY started_at, worker

-- name: workers_prune
DELETE FROM txbox_worker WHERE seen_at < [ago :silent_s]

-- name: pauses
-- A row at least, which tells the time.
SELECT [clock], [text paused.consumer], paused.actor, paused.reason, [time paused.paused_at]
  FROM (SELECT 1 AS one) AS always LEFT JOIN txbox_pause AS paused ON true ORDER BY paused.consumer

-- name: pause
INSERT INTO txbox_pause (consumer, actor, reason) VALUES (:consumer::text, :actor::text, :reason::text)

-- name: resume
DELETE FROM txbox_pause WHERE consumer = :consumer::text
