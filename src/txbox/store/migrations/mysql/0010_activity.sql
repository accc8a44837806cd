-- txbox schema version 10 for MySQL and MariaDB: what workers and relays say of themselves, and
-- consumers that are paused.

-- Counts of one minute. `minute` counts from 1970 by the clock of the database, `worker` is who counted, '' once the
-- rows of a minute have been folded into one. Of a route, `processed` is what was sent.
CREATE TABLE IF NOT EXISTS txbox_activity (
    minute      BIGINT          NOT NULL,
    kind        VARCHAR(16)     CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    name        VARBINARY(255)  NOT NULL,
    worker      VARCHAR(64)     CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    received    BIGINT          NOT NULL DEFAULT 0,
    processed   BIGINT          NOT NULL DEFAULT 0,
    duplicate   BIGINT          NOT NULL DEFAULT 0,
    deferred    BIGINT          NOT NULL DEFAULT 0,
    failed      BIGINT          NOT NULL DEFAULT 0,
    dead        BIGINT          NOT NULL DEFAULT 0,
    quarantined BIGINT          NOT NULL DEFAULT 0,
    latency     VARCHAR(1024)   CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '',
    run         VARCHAR(1024)   CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '',
    oldest_s    DOUBLE,
    PRIMARY KEY (minute, kind, name, worker),
    CONSTRAINT txbox_activity_kind CHECK (kind IN ('consumer', 'route'))
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS txbox_worker (
    worker      VARCHAR(64)     CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    kind        VARCHAR(16)     CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    host        TEXT            NOT NULL,
    pid         BIGINT          NOT NULL,
    version     TEXT            NOT NULL,
    app         TEXT            NOT NULL,
    consumers   LONGTEXT        NOT NULL,
    sources     LONGTEXT        NOT NULL,
    routes      LONGTEXT        NOT NULL,
    lanes       INT             NOT NULL,
    state       VARCHAR(16)     CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    busy        INT             NOT NULL,
    leases      INT             NOT NULL,
    in_flight   INT             NOT NULL,
    started_at  DATETIME(6)     NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    seen_at     DATETIME(6)     NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    PRIMARY KEY (worker)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS txbox_pause (
    consumer    VARBINARY(255)  NOT NULL,
    actor       TEXT            NOT NULL,
    reason      LONGTEXT,
    paused_at   DATETIME(6)     NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    PRIMARY KEY (consumer)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

INSERT INTO txbox_schema (version, compatible_from) VALUES (10, 1)
    ON DUPLICATE KEY UPDATE compatible_from = 1;
