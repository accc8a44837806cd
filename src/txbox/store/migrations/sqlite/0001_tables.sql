-- txbox schema version 1 for SQLite 3.35 and later.
-- Text compares bytewise (BINARY, the default collation). Times are UTC text, 2026-01-31 12:00:00.000.

CREATE TABLE txbox_schema (
    version         INTEGER NOT NULL PRIMARY KEY,
    compatible_from INTEGER NOT NULL,
    applied_at      TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now'))
);

-- ---- inbox ----------------------------------------------------------------------------------------------------------

-- `arrival` is the rowid, so that the arrival number costs no further index. The identity of a
-- message is the UNIQUE constraint, and NOT NULL because SQLite lets NULL into a unique key twice.
CREATE TABLE txbox_inbox (
    arrival         INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    consumer        TEXT    NOT NULL,
    message_id      TEXT    NOT NULL,
    status          TEXT    NOT NULL,
    topic           TEXT    NOT NULL,
    type            TEXT,
    key             TEXT,
    sequence        INTEGER,
    received_at     TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    updated_at      TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    processed_at    TEXT,
    payload_hash    BLOB,
    attempts        INTEGER NOT NULL DEFAULT 0,
    starts          INTEGER NOT NULL DEFAULT 0,
    next_attempt_at TEXT,
    lease_until     TEXT,
    token           TEXT,
    error_type      TEXT,
    error           TEXT,
    fingerprint     TEXT,
    content_type    TEXT,
    headers         TEXT,
    origin          TEXT,
    payload         BLOB,
    has_payload     INTEGER NOT NULL DEFAULT 0,
    result          BLOB,
    key_id          TEXT,
    CONSTRAINT txbox_inbox_pkey UNIQUE (consumer, message_id),
    CONSTRAINT txbox_inbox_status CHECK
        (status IN ('pending', 'processing', 'processed', 'failed', 'dead', 'discarded'))
);

-- Partial, so that a processed row is in no index but the key; pruning reads in arrival order.

-- The order in which rows are leased. Rows whose last run never ended (starts > 0) are looked for separately.
CREATE INDEX txbox_inbox_due ON txbox_inbox (consumer, starts, next_attempt_at, arrival)
    WHERE status IN ('pending', 'failed') AND has_payload;
-- Unfinished rows by status: leases to be rescued, and bulk changes.
CREATE INDEX txbox_inbox_status ON txbox_inbox (status, consumer, arrival)
    WHERE status <> 'processed';
-- Earlier rows of an ordered key.
CREATE INDEX txbox_inbox_key ON txbox_inbox (consumer, key, arrival)
    WHERE status <> 'processed' AND key IS NOT NULL;
-- Replays, in arrival order.
CREATE INDEX txbox_inbox_kept ON txbox_inbox (consumer, arrival) WHERE has_payload;

CREATE TABLE txbox_attempt (
    number          INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    consumer        TEXT    NOT NULL,
    message_id      TEXT    NOT NULL,
    attempt         INTEGER NOT NULL,
    status          TEXT    NOT NULL,
    error_type      TEXT,
    error           TEXT,
    fingerprint     TEXT,
    recorded_at     TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now'))
);
CREATE INDEX txbox_attempt_message ON txbox_attempt (consumer, message_id, number);

-- `kept_bytes` is the size of the payload, 0 once that is dropped.
CREATE TABLE txbox_quarantine (
    consumer        TEXT    NOT NULL,
    message_id      TEXT    NOT NULL,
    hash            BLOB    NOT NULL,
    reason          TEXT    NOT NULL,
    topic           TEXT,
    type            TEXT,
    key             TEXT,
    content_type    TEXT,
    headers         TEXT,
    origin          TEXT,
    payload         BLOB,
    key_id          TEXT,
    seen            INTEGER NOT NULL DEFAULT 1,
    received_at     TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    updated_at      TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    status          TEXT    NOT NULL DEFAULT 'quarantined',
    kept_bytes      INTEGER NOT NULL DEFAULT 0,
    CONSTRAINT txbox_quarantine_pkey PRIMARY KEY (consumer, message_id, hash)
);
-- The oldest payloads, which are dropped first when all of them together are too large.
CREATE INDEX txbox_quarantine_kept ON txbox_quarantine (received_at) WHERE kept_bytes > 0;
-- The newest first, as they are listed.
CREATE INDEX txbox_quarantine_newest ON txbox_quarantine (received_at, hash, consumer, message_id);
-- How many of a consumer wait for a decision, and since when.
CREATE INDEX txbox_quarantine_waiting ON txbox_quarantine (consumer, received_at) WHERE status = 'quarantined';

-- The version of each key that was processed last, for consumers that watch for gaps.
CREATE TABLE txbox_sequence (
    consumer        TEXT    NOT NULL,
    key             TEXT    NOT NULL,
    last            INTEGER NOT NULL,
    updated_at      TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    CONSTRAINT txbox_sequence_pkey PRIMARY KEY (consumer, key)
);

CREATE VIEW txbox_dead_letters AS
    SELECT consumer, message_id, topic, type, key, attempts, starts, error_type, error, fingerprint,
           payload_hash, has_payload, received_at, updated_at
      FROM txbox_inbox WHERE status = 'dead';

CREATE VIEW txbox_status AS
    SELECT consumer, status, count(*) AS messages, min(received_at) AS oldest_received_at
      FROM txbox_inbox GROUP BY consumer, status;

-- ---- outbox ---------------------------------------------------------------------------------------------------------

-- `route` is where a message goes, so that relays of other Apps on this database leave it alone; '' is undecided, as an
-- Outbox without an App stages it.
CREATE TABLE txbox_outbox (
    number          INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    id              TEXT    NOT NULL,
    status          TEXT    NOT NULL DEFAULT 'pending',
    topic           TEXT    NOT NULL,
    type            TEXT,
    key             TEXT,
    content_type    TEXT,
    headers         TEXT,
    payload         BLOB,
    key_id          TEXT,
    cause_consumer  TEXT,
    cause_id        TEXT,
    staged_at       TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    available_at    TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    sent_at         TEXT,
    attempts        INTEGER NOT NULL DEFAULT 0,
    token           TEXT,
    error_type      TEXT,
    error           TEXT,
    route           TEXT    NOT NULL DEFAULT '',
    CONSTRAINT txbox_outbox_pkey UNIQUE (id)
);
-- A lease moves available_at to its end, so that one index finds what is due, backs off or is leased. By route first:
-- what waits for one relay, however much it is, costs the others nothing.
CREATE INDEX txbox_outbox_due ON txbox_outbox (route, available_at, number)
    WHERE status = 'pending';
-- The head of a key.
CREATE INDEX txbox_outbox_key ON txbox_outbox (route, topic, key, number)
    WHERE status = 'pending' AND key IS NOT NULL;
CREATE INDEX txbox_outbox_ended ON txbox_outbox (status, number)
    WHERE status <> 'pending';

-- ---- maintenance and operators --------------------------------------------------------------------------------------

-- Leases of the maintenance jobs, and the progress of sources.
CREATE TABLE txbox_job (
    name            TEXT    NOT NULL PRIMARY KEY,
    token           TEXT,
    lease_until     TEXT,
    state           TEXT,
    updated_at      TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now'))
);

-- `actor` is the name that was given; nobody logs in to SQLite.
CREATE TABLE txbox_audit (
    number          INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    recorded_at     TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    actor           TEXT    NOT NULL,
    action          TEXT    NOT NULL,
    filter          TEXT    NOT NULL,
    affected        INTEGER NOT NULL,
    reason          TEXT,
    login           TEXT
);

-- Counts of one minute. `minute` counts from 1970 by the clock of the database, `worker` is who counted, '' once the
-- rows of a minute have been folded into one. Of a route, `processed` is what was sent.
CREATE TABLE txbox_activity (
    minute          INTEGER NOT NULL,
    kind            TEXT    NOT NULL CHECK (kind IN ('consumer', 'route')),
    name            TEXT    NOT NULL,
    worker          TEXT    NOT NULL,
    received        INTEGER NOT NULL DEFAULT 0,
    processed       INTEGER NOT NULL DEFAULT 0,
    duplicate       INTEGER NOT NULL DEFAULT 0,
    deferred        INTEGER NOT NULL DEFAULT 0,
    failed          INTEGER NOT NULL DEFAULT 0,
    dead            INTEGER NOT NULL DEFAULT 0,
    quarantined     INTEGER NOT NULL DEFAULT 0,
    latency         TEXT    NOT NULL DEFAULT '',
    run             TEXT    NOT NULL DEFAULT '',
    oldest_s        REAL,
    PRIMARY KEY (minute, kind, name, worker)
) WITHOUT ROWID;
-- the charts of one
CREATE INDEX txbox_activity_one ON txbox_activity (kind, name, minute);

-- What workers and relays report of themselves.
CREATE TABLE txbox_worker (
    worker          TEXT    NOT NULL PRIMARY KEY,
    kind            TEXT    NOT NULL,
    host            TEXT    NOT NULL,
    pid             INTEGER NOT NULL,
    version         TEXT    NOT NULL,
    app             TEXT    NOT NULL,
    consumers       TEXT    NOT NULL,
    sources         TEXT    NOT NULL,
    routes          TEXT    NOT NULL,
    lanes           INTEGER NOT NULL,
    state           TEXT    NOT NULL,
    busy            INTEGER NOT NULL,
    leases          INTEGER NOT NULL,
    in_flight       INTEGER NOT NULL,
    started_at      TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    seen_at         TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now'))
);

CREATE TABLE txbox_pause (
    consumer        TEXT    NOT NULL PRIMARY KEY,
    actor           TEXT    NOT NULL,
    reason          TEXT,
    paused_at       TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now'))
);

-- ---- guard ----------------------------------------------------------------------------------------------------------

-- One row for the one writer there can be: while it is armed it refers to a row that
-- never exists, and the deferred foreign key is checked at COMMIT, by whatever call. Only close lifts
-- it. It holds while PRAGMA foreign_keys is on, which cannot be changed inside a transaction.
CREATE TABLE txbox_guard_never (
    id              INTEGER NOT NULL PRIMARY KEY CHECK (id <> 1)
);
CREATE TABLE txbox_guard (
    number          INTEGER NOT NULL PRIMARY KEY CHECK (number = 1),
    token           TEXT    NOT NULL,
    never           INTEGER CHECK (never = 1)
                            REFERENCES txbox_guard_never (id) DEFERRABLE INITIALLY DEFERRED
);

INSERT INTO txbox_schema (version, compatible_from) VALUES (1, 1);
