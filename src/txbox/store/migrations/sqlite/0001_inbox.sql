-- txbox schema version 1 for SQLite 3.35 and later.
-- Text compares bytewise (BINARY, the default collation). Times are UTC text, 2026-01-31 12:00:00.000.

CREATE TABLE txbox_schema (
    version         INTEGER NOT NULL PRIMARY KEY,
    compatible_from INTEGER NOT NULL,
    applied_at      TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now'))
);

-- `arrival` is the rowid, so that the arrival number costs no index of its own. The identity of a
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
-- What an ordered key waits for.
CREATE INDEX txbox_inbox_key ON txbox_inbox (consumer, key, arrival)
    WHERE status <> 'processed' AND key IS NOT NULL;
-- Partial, so that a processed row is in no index but the key; pruning reads in arrival order.
CREATE INDEX txbox_inbox_open ON txbox_inbox (consumer, status, next_attempt_at)
    WHERE status <> 'processed';
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
    CONSTRAINT txbox_quarantine_pkey PRIMARY KEY (consumer, message_id, hash)
);

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
    CONSTRAINT txbox_outbox_pkey UNIQUE (id)
);
-- A lease moves available_at to its end, so that one index finds what is due, backs off or is leased.
CREATE INDEX txbox_outbox_due ON txbox_outbox (available_at, number)
    WHERE status = 'pending';
-- The head of a key.
CREATE INDEX txbox_outbox_key ON txbox_outbox (topic, key, number)
    WHERE status = 'pending' AND key IS NOT NULL;
CREATE INDEX txbox_outbox_ended ON txbox_outbox (status, number)
    WHERE status <> 'pending';

-- The version of each key that was processed last, for consumers that watch for gaps.
CREATE TABLE txbox_sequence (
    consumer        TEXT    NOT NULL,
    key             TEXT    NOT NULL,
    last            INTEGER NOT NULL,
    updated_at      TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    CONSTRAINT txbox_sequence_pkey PRIMARY KEY (consumer, key)
);

CREATE TABLE txbox_job (
    name            TEXT    NOT NULL PRIMARY KEY,
    token           TEXT,
    lease_until     TEXT,
    state           TEXT,
    updated_at      TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now'))
);

CREATE TABLE txbox_audit (
    number          INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    recorded_at     TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    actor           TEXT    NOT NULL,
    action          TEXT    NOT NULL,
    filter          TEXT    NOT NULL,
    affected        INTEGER NOT NULL,
    reason          TEXT
);

CREATE VIEW txbox_dead_letters AS
    SELECT consumer, message_id, topic, type, key, attempts, starts, error_type, error, fingerprint,
           payload_hash, has_payload, received_at, updated_at
      FROM txbox_inbox WHERE status = 'dead';

CREATE VIEW txbox_status AS
    SELECT consumer, status, count(*) AS messages, min(received_at) AS oldest_received_at
      FROM txbox_inbox GROUP BY consumer, status;

-- The guard, one row for the one writer there can be: while it is armed it refers to a row that
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
