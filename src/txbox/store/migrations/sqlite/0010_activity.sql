-- txbox schema version 10 for SQLite: what workers and relays say of themselves, and consumers that are paused.

-- Counts of one minute. `minute` counts from 1970 by the clock of the database, `worker` is who counted, '' once the
-- rows of a minute have been folded into one. Of a route, `processed` is what was sent.
CREATE TABLE txbox_activity (
    minute      INTEGER NOT NULL,
    kind        TEXT    NOT NULL CHECK (kind IN ('consumer', 'route')),
    name        TEXT    NOT NULL,
    worker      TEXT    NOT NULL,
    received    INTEGER NOT NULL DEFAULT 0,
    processed   INTEGER NOT NULL DEFAULT 0,
    duplicate   INTEGER NOT NULL DEFAULT 0,
    deferred    INTEGER NOT NULL DEFAULT 0,
    failed      INTEGER NOT NULL DEFAULT 0,
    dead        INTEGER NOT NULL DEFAULT 0,
    quarantined INTEGER NOT NULL DEFAULT 0,
    latency     TEXT    NOT NULL DEFAULT '',
    run         TEXT    NOT NULL DEFAULT '',
    oldest_s    REAL,
    PRIMARY KEY (minute, kind, name, worker)
) WITHOUT ROWID;

CREATE TABLE txbox_worker (
    worker      TEXT    NOT NULL PRIMARY KEY,
    kind        TEXT    NOT NULL,
    host        TEXT    NOT NULL,
    pid         INTEGER NOT NULL,
    version     TEXT    NOT NULL,
    app         TEXT    NOT NULL,
    consumers   TEXT    NOT NULL,
    sources     TEXT    NOT NULL,
    routes      TEXT    NOT NULL,
    lanes       INTEGER NOT NULL,
    state       TEXT    NOT NULL,
    busy        INTEGER NOT NULL,
    leases      INTEGER NOT NULL,
    in_flight   INTEGER NOT NULL,
    started_at  TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    seen_at     TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now'))
);

CREATE TABLE txbox_pause (
    consumer    TEXT    NOT NULL PRIMARY KEY,
    actor       TEXT    NOT NULL,
    reason      TEXT,
    paused_at   TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now'))
);

INSERT INTO txbox_schema (version, compatible_from) VALUES (10, 1);
