"""An inbox with millions of rows: made on the server, with the ids and the age that a benchmark wants."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Literal

import psycopg

from benchmarks.workload import CONSUMER, TOPIC, Tx
from txbox import App
from txbox.store import schema as tables
from txbox.store.dialect import dialect
from txbox.store.partitions import Partitioning

Ids = Literal["uuid7", "uuid4"]

# the id of a row, of the millisecond that is its share of the span, with bits that follow from its number
_UUID7 = """
    substr(ms, 1, 8) || '-' || substr(ms, 9) || '-7' || substr(bits, 1, 3) || '-8' || substr(bits, 4, 3)
    || '-' || substr(bits, 7, 12)
"""
_ROWS = """
INSERT INTO txbox_inbox (consumer, message_id, status, topic, processed_at, received_at, updated_at, payload_hash)
SELECT {consumer}, {id}, 'processed', {topic}, at, at, at, sha256(n::text::bytea)
  FROM (SELECT n, md5(n::text) AS bits, lpad(to_hex(floor(at)::bigint), 12, '0') AS ms, to_timestamp(at / 1000.0) AS at
          FROM (SELECT n, {first} + n * ({last} - {first}) / {rows} AS at
                  FROM generate_series(0, {rows} - 1) AS n) AS placed) AS own
"""


def fill(admin: Tx, ids: Ids, *, rows: int, span: tuple[datetime, datetime]) -> None:
    """Insert processed rows whose times, and ids where they have one, lie evenly in a span.

    The guard and the key are put aside meanwhile; the key of random ids is built with room, as it is after a while.
    """
    relation = "SELECT relkind = 'r' FROM pg_class WHERE oid = 'txbox_inbox'::regclass"
    plain = admin.execute(relation).fetchone() == (True,)
    first, last = (moment.timestamp() * 1000 for moment in span)
    statement = _ROWS.format(
        consumer=f"'{CONSUMER}'",
        topic=f"'{TOPIC}'",
        id=_UUID7 if ids == "uuid7" else "gen_random_uuid()::text",
        first=f"{first:.0f}::numeric",
        last=f"{last:.0f}::numeric",
        rows=rows,
    )
    with admin.transaction():
        admin.execute(
            "SET LOCAL txbox.token = 'copy'"
        )  # rows that were committed under the guard before
        admin.execute("SET LOCAL txbox.closed = 'copy'")
        if plain:
            admin.execute("ALTER TABLE txbox_inbox DROP CONSTRAINT txbox_inbox_pkey")
        admin.execute(statement.encode())
        if plain:
            # no ALTER while the guard waits for its turn
            admin.execute("SET CONSTRAINTS ALL IMMEDIATE")
            room = "WITH (fillfactor = 70)" if ids == "uuid4" else ""
            key = f"ADD CONSTRAINT txbox_inbox_pkey PRIMARY KEY (consumer, message_id) {room}"
            admin.execute("SET LOCAL maintenance_work_mem = '256MB'")
            admin.execute(f"ALTER TABLE txbox_inbox {key}".encode())
            if room:
                admin.execute("ALTER INDEX txbox_inbox_pkey RESET (fillfactor)")
    admin.execute("VACUUM (ANALYZE) txbox_inbox")


def aged(url: str, days: int) -> None:
    """Make an inbox in partitions of a day each, as one that was made some days ago has them."""
    text = tables.migration_text(
        dialect("postgresql"), None, partitioning=Partitioning("uuid7", ahead=1)
    )
    schema, block, made = text.rpartition("DO $partition$")
    made = made.replace("clock_timestamp()", f"(now() - interval '{days} days')")
    with psycopg.connect(url, autocommit=True) as admin:
        for statement in tables.split(schema + block + made):
            admin.execute(statement.encode())
        for number in range(-days, 3):
            admin.execute(
                "SELECT txbox_partition_make(%s, %s, 0)", (midnight(number), midnight(number + 1))
            )


def plain(url: str) -> None:
    with App(url) as app:
        app.init()


def midnight(days: int) -> datetime:
    """The beginning of today in UTC, or of a day before or behind it."""
    now = datetime.now(UTC)
    return now.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=days)
