-- txbox schema version 10 for PostgreSQL: what workers and relays say of themselves, and consumers that are paused.

-- New tables go where the others are, whatever comes first in the search_path.
DO $home$
DECLARE
    home text := (SELECT relnamespace::pg_catalog.regnamespace FROM pg_catalog.pg_class WHERE oid OPERATOR(pg_catalog.=) 'txbox_schema'::pg_catalog.regclass::pg_catalog.oid);
BEGIN
    PERFORM pg_catalog.set_config('txbox.path', pg_catalog.current_setting('search_path'), true);
    PERFORM pg_catalog.set_config('search_path', home, true);
END
$home$;

-- Counts of one minute. `minute` counts from 1970 by the clock of the database, `worker` is who counted, '' once the
-- rows of a minute have been folded into one. Of a route, `processed` is what was sent. A row is written many times:
-- no column that changes is in an index, and pages have room for the next version.
CREATE TABLE txbox_activity (
    minute      bigint           NOT NULL,
    kind        text COLLATE "C" NOT NULL,
    name        text COLLATE "C" NOT NULL,
    worker      text COLLATE "C" NOT NULL,
    received    bigint           NOT NULL DEFAULT 0,
    processed   bigint           NOT NULL DEFAULT 0,
    duplicate   bigint           NOT NULL DEFAULT 0,
    deferred    bigint           NOT NULL DEFAULT 0,
    failed      bigint           NOT NULL DEFAULT 0,
    dead        bigint           NOT NULL DEFAULT 0,
    quarantined bigint           NOT NULL DEFAULT 0,
    latency     text             NOT NULL DEFAULT '',
    run         text             NOT NULL DEFAULT '',
    oldest_s    double precision,
    CONSTRAINT txbox_activity_pkey PRIMARY KEY (minute, kind, name, worker),
    CONSTRAINT txbox_activity_kind CHECK (kind IN ('consumer', 'route'))
) WITH (fillfactor = 50);

CREATE TABLE txbox_worker (
    worker      text COLLATE "C" NOT NULL PRIMARY KEY,
    kind        text COLLATE "C" NOT NULL,
    host        text             NOT NULL,
    pid         bigint           NOT NULL,
    version     text             NOT NULL,
    app         text             NOT NULL,
    consumers   text             NOT NULL,
    sources     text             NOT NULL,
    routes      text             NOT NULL,
    lanes       integer          NOT NULL,
    state       text COLLATE "C" NOT NULL,
    busy        integer          NOT NULL,
    leases      integer          NOT NULL,
    in_flight   integer          NOT NULL,
    started_at  timestamptz      NOT NULL DEFAULT clock_timestamp(),
    seen_at     timestamptz      NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 50);

CREATE TABLE txbox_pause (
    consumer    text COLLATE "C" NOT NULL PRIMARY KEY,
    actor       text             NOT NULL,
    reason      text,
    paused_at   timestamptz      NOT NULL DEFAULT clock_timestamp()
);

SELECT pg_catalog.set_config('search_path', pg_catalog.current_setting('txbox.path'), true);

INSERT INTO txbox_schema (version, compatible_from) VALUES (10, 1);
