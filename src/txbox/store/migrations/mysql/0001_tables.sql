-- txbox schema version 1 for MySQL 8.0.19 and MariaDB 10.6 and later: what both understand.
-- DDL commits at once here, so every statement can be run again after a crash.
-- Identity is VARBINARY: every other type compares case, accents or trailing spaces away.
-- Times are UTC_TIMESTAMP: independent of the session's time zone.

CREATE TABLE IF NOT EXISTS txbox_schema (
    version         INT             NOT NULL,
    compatible_from INT             NOT NULL,
    applied_at      DATETIME(6)     NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    PRIMARY KEY (version)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- ---- inbox ----------------------------------------------------------------------------------------------------------

-- There are no partial indexes. `next_attempt_at` is NULL in rows that are not due.
-- `key` is bounded to what an index holds as a whole: MySQL does not read an index in the order of what stands behind a
-- prefix of a column.
--   txbox_inbox_arrival   not UNIQUE: the upsert of a claim must meet one unique key only
--   txbox_inbox_status    what an ordered key waits for
--   txbox_inbox_due       the order in which rows are leased; rows whose last run never ended (starts > 0) are looked
--                         for separately
--   txbox_inbox_open      bulk changes, and leases to be rescued
CREATE TABLE IF NOT EXISTS txbox_inbox (
    consumer        VARBINARY(255)  NOT NULL,
    message_id      VARBINARY(255)  NOT NULL,
    status          VARCHAR(16)     CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    topic           VARBINARY(1024) NOT NULL,
    type            VARBINARY(1024),
    `key`           VARBINARY(1024),
    sequence        BIGINT,
    received_at     DATETIME(6)     NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    updated_at      DATETIME(6)     NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    processed_at    DATETIME(6),
    payload_hash    VARBINARY(64),
    attempts        INT             NOT NULL DEFAULT 0,
    starts          INT             NOT NULL DEFAULT 0,
    next_attempt_at DATETIME(6),
    lease_until     DATETIME(6),
    token           VARCHAR(64)     CHARACTER SET ascii COLLATE ascii_bin,
    error_type      TEXT,
    error           LONGTEXT,
    fingerprint     TEXT,
    content_type    TEXT,
    headers         LONGTEXT,
    origin          LONGTEXT,
    payload         LONGBLOB,
    has_payload     BOOLEAN         NOT NULL DEFAULT FALSE,
    result          LONGBLOB,
    key_id          VARCHAR(255),
    arrival         BIGINT          NOT NULL AUTO_INCREMENT,
    PRIMARY KEY (consumer, message_id),
    KEY txbox_inbox_arrival (arrival),
    KEY txbox_inbox_processed_at (processed_at),
    KEY txbox_inbox_status (status, consumer, `key`, arrival),
    KEY txbox_inbox_due (consumer, has_payload, starts, next_attempt_at, arrival),
    KEY txbox_inbox_open (status, consumer, arrival),
    CONSTRAINT txbox_inbox_status CHECK
        (status IN ('pending', 'processing', 'processed', 'failed', 'dead', 'discarded'))
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS txbox_attempt (
    number          BIGINT          NOT NULL AUTO_INCREMENT,
    consumer        VARBINARY(255)  NOT NULL,
    message_id      VARBINARY(255)  NOT NULL,
    attempt         INT             NOT NULL,
    status          VARCHAR(16)     CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    error_type      TEXT,
    error           LONGTEXT,
    fingerprint     TEXT,
    recorded_at     DATETIME(6)     NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    PRIMARY KEY (number),
    KEY txbox_attempt_message (consumer, message_id, number)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- `kept_bytes` is the size of the payload, 0 once that is dropped: the oldest first, when all of them are too large.
CREATE TABLE IF NOT EXISTS txbox_quarantine (
    consumer        VARBINARY(255)  NOT NULL,
    message_id      VARBINARY(255)  NOT NULL,
    hash            VARBINARY(64)   NOT NULL,
    reason          TEXT            NOT NULL,
    topic           VARBINARY(1024),
    type            VARBINARY(1024),
    `key`           BLOB,
    content_type    TEXT,
    headers         LONGTEXT,
    origin          LONGTEXT,
    payload         LONGBLOB,
    key_id          VARCHAR(255),
    seen            INT             NOT NULL DEFAULT 1,
    received_at     DATETIME(6)     NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    updated_at      DATETIME(6)     NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    status          VARCHAR(16)     NOT NULL DEFAULT 'quarantined',
    kept_bytes      BIGINT          NOT NULL DEFAULT 0,
    PRIMARY KEY (consumer, message_id, hash),
    KEY txbox_quarantine_kept (kept_bytes, received_at),
    -- the newest first, as they are listed
    KEY txbox_quarantine_newest (received_at, hash),
    -- how many of a consumer wait for a decision, and since when
    KEY txbox_quarantine_waiting (consumer, status, received_at)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The version of each key that was processed last, for consumers that watch for gaps; a key is bounded
-- at the edge to what an index holds.
CREATE TABLE IF NOT EXISTS txbox_sequence (
    consumer        VARBINARY(255)  NOT NULL,
    `key`           VARBINARY(1024) NOT NULL,
    last            BIGINT          NOT NULL,
    updated_at      DATETIME(6)     NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    PRIMARY KEY (consumer, `key`)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE OR REPLACE VIEW txbox_dead_letters AS
    SELECT CONVERT(consumer USING utf8mb4) AS consumer, CONVERT(message_id USING utf8mb4) AS message_id,
           CONVERT(topic USING utf8mb4) AS topic, CONVERT(type USING utf8mb4) AS type,
           CONVERT(`key` USING utf8mb4) AS `key`, attempts, starts, error_type, error, fingerprint,
           payload_hash, has_payload, received_at, updated_at
      FROM txbox_inbox WHERE status = 'dead';

CREATE OR REPLACE VIEW txbox_status AS
    SELECT CONVERT(inbox.consumer USING utf8mb4) AS consumer, inbox.status AS status, count(*) AS messages,
           min(inbox.received_at) AS oldest_received_at
      FROM txbox_inbox AS inbox GROUP BY inbox.consumer, inbox.status;

-- ---- outbox ---------------------------------------------------------------------------------------------------------

-- `route` is where a message goes, so that relays of other Apps on this database leave it alone; '' is undecided, as an
-- Outbox without an App stages it. A lease moves available_at to its end, so that one index finds what is due, backs
-- off or is leased. By route first: what waits for one relay, however much it is, costs the others nothing.
CREATE TABLE IF NOT EXISTS txbox_outbox (
    id              VARBINARY(255)  NOT NULL,
    number          BIGINT          NOT NULL AUTO_INCREMENT,
    status          VARCHAR(16)     CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT 'pending',
    topic           VARBINARY(1024) NOT NULL,
    type            VARBINARY(1024),
    `key`           BLOB,
    content_type    TEXT,
    headers         LONGTEXT,
    payload         LONGBLOB,
    key_id          VARCHAR(255),
    cause_consumer  VARBINARY(255),
    cause_id        VARBINARY(255),
    staged_at       DATETIME(6)     NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    available_at    DATETIME(6)     NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    sent_at         DATETIME(6),
    attempts        INT             NOT NULL DEFAULT 0,
    token           VARCHAR(64)     CHARACTER SET ascii COLLATE ascii_bin,
    error_type      TEXT,
    error           LONGTEXT,
    route           VARBINARY(255)  NOT NULL DEFAULT '',
    PRIMARY KEY (id),
    KEY txbox_outbox_number (number),
    KEY txbox_outbox_due (status, route, available_at, number),
    KEY txbox_outbox_key (route, topic(255), `key`(255), number)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- ---- maintenance and operators --------------------------------------------------------------------------------------

-- Leases of the maintenance jobs, and the progress of sources.
CREATE TABLE IF NOT EXISTS txbox_job (
    name            VARBINARY(255)  NOT NULL,
    token           VARCHAR(64)     CHARACTER SET ascii COLLATE ascii_bin,
    lease_until     DATETIME(6),
    state           LONGTEXT,
    updated_at      DATETIME(6)     NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    PRIMARY KEY (name)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- `actor` is the name that was given, `login` the account that was logged in.
CREATE TABLE IF NOT EXISTS txbox_audit (
    number          BIGINT          NOT NULL AUTO_INCREMENT,
    recorded_at     DATETIME(6)     NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    actor           TEXT            NOT NULL,
    action          VARCHAR(255)    NOT NULL,
    filter          LONGTEXT        NOT NULL,
    affected        BIGINT          NOT NULL,
    reason          LONGTEXT,
    login           VARCHAR(300),
    PRIMARY KEY (number)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Counts of one minute. `minute` counts from 1970 by the clock of the database, `worker` is who counted, '' once the
-- rows of a minute have been folded into one. Of a route, `processed` is what was sent.
CREATE TABLE IF NOT EXISTS txbox_activity (
    minute          BIGINT          NOT NULL,
    kind            VARCHAR(16)     CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    name            VARBINARY(255)  NOT NULL,
    worker          VARCHAR(64)     CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    received        BIGINT          NOT NULL DEFAULT 0,
    processed       BIGINT          NOT NULL DEFAULT 0,
    duplicate       BIGINT          NOT NULL DEFAULT 0,
    deferred        BIGINT          NOT NULL DEFAULT 0,
    failed          BIGINT          NOT NULL DEFAULT 0,
    dead            BIGINT          NOT NULL DEFAULT 0,
    quarantined     BIGINT          NOT NULL DEFAULT 0,
    latency         VARCHAR(1024)   CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '',
    run             VARCHAR(1024)   CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '',
    oldest_s        DOUBLE,
    PRIMARY KEY (minute, kind, name, worker),
    -- the charts of one
    KEY txbox_activity_one (kind, name, minute),
    CONSTRAINT txbox_activity_kind CHECK (kind IN ('consumer', 'route'))
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- What workers and relays report of themselves.
CREATE TABLE IF NOT EXISTS txbox_worker (
    worker          VARCHAR(64)     CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    kind            VARCHAR(16)     CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    host            TEXT            NOT NULL,
    pid             BIGINT          NOT NULL,
    version         TEXT            NOT NULL,
    app             TEXT            NOT NULL,
    consumers       LONGTEXT        NOT NULL,
    sources         LONGTEXT        NOT NULL,
    routes          LONGTEXT        NOT NULL,
    lanes           INT             NOT NULL,
    state           VARCHAR(16)     CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    busy            INT             NOT NULL,
    leases          INT             NOT NULL,
    in_flight       INT             NOT NULL,
    started_at      DATETIME(6)     NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    seen_at         DATETIME(6)     NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    PRIMARY KEY (worker)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS txbox_pause (
    consumer        VARBINARY(255)  NOT NULL,
    actor           TEXT            NOT NULL,
    reason          LONGTEXT,
    paused_at       DATETIME(6)     NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    PRIMARY KEY (consumer)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

INSERT INTO txbox_schema (version, compatible_from) VALUES (1, 1)
    ON DUPLICATE KEY UPDATE compatible_from = 1;
