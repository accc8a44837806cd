"""P8: what a marker costs in an inbox of no rows, a million and ten million."""

from __future__ import annotations

import secrets
import statistics
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from benchmarks import measure
from benchmarks.growing import Ids, aged, fill, midnight, plain
from benchmarks.place import Gauges, Place, checkpoint
from benchmarks.result import Bar, Plot, Round, Verified, ratios, result, values
from benchmarks.servers import fresh_database
from benchmarks.workload import CONSUMER, TOPIC
from txbox import App, Message
from txbox.session import Session, drive
from txbox.store.codec import Arrival

NUMBER = "P8"
TITLE = "Growth: a marker in an inbox of no rows, a million, ten million"

_BATCH = 100
_DAYS = 30
_HASH = bytes(32)

_TIMED = "time-ordered ids"
_PARTITIONED = "time-ordered ids, partitioned"
_RANDOM = "random ids"
_KINDS: tuple[tuple[str, Ids, bool], ...] = (
    (_TIMED, "uuid7", False),
    (_PARTITIONED, "uuid7", True),
    (_RANDOM, "uuid4", False),
)


@dataclass(frozen=True, slots=True)
class _Cell:
    """One size of one kind: its name in the table, what is there, and what is added."""

    name: str
    ids: Ids
    rows: int
    markers: int


def run(*, rounds: int, messages: int) -> dict[str, Any]:
    """Measure `rounds` times at each size; returns the result as it is stored.

    Args:
        messages: 4,000 for the sizes of the title: a million is 250 times as many, ten million 2,500 times.
    """
    sizes = [0, 250 * messages, 2_500 * messages]
    markers = max(2_000, 5 * messages)
    done: list[Round] = []
    circumstances: dict[str, Any] = {}
    for kind, ids, partitioned in _KINDS:
        with ExitStack() as stack:
            measured: dict[str, Callable[[], Round]] = {}
            urls = [stack.enter_context(fresh_database(f"growth_{rows}")) for rows in sizes]
            for rows, url in zip(sizes, urls, strict=True):
                aged(url, _DAYS) if partitioned else plain(url)
                cell = _Cell(_name(kind, rows), ids, rows, markers)
                measured[cell.name] = stack.enter_context(_grown(url, cell))
            # who goes first alternates: all sizes meet the same disturbances of the disk
            found = [
                measured[name]()
                for number in range(rounds)
                for name in list(measured)[:: -1 if number % 2 else 1]
            ]
            circumstances = measure.circumstances(urls[0])
        done += [outcome for name in measured for outcome in found if outcome.contender == name]
    most = sizes[-1]
    return result(
        phase=NUMBER,
        title=TITLE if most == 10_000_000 else f"Growth to {most:,} rows",
        method=f"{rounds} rounds at each size, in turns, of {markers:,} markers, right after a CHECKPOINT, the worst "
        f"case for WAL: txbox's claim of {_BATCH} ids, close and COMMIT, one connection, closed loop. The rows "
        f"that are there were processed evenly over {_DAYS} days; partitioned, a thirtieth is in the partition of "
        "today. Random ids: their index is built with 30 % of room, as it is in the long run",
        bars=[
            *(
                Bar(
                    f"{kind}, {most:,} rows: at most 1.2 times the cost with no rows", 1.2,
                    ratios(done, _name(kind, most), _name(kind, 0), "us_marker"), "at most",
                )
                for kind in (_TIMED, _PARTITIONED)
            ),
            *(
                Bar(
                    f"{kind}, {most:,} rows: at most 400 B of WAL a marker", 400.0,
                    values(done, _name(kind, most), "wal_bytes"), "at most", "B",
                )
                for kind in (_TIMED, _PARTITIONED)
            ),
            Bar(
                f"random ids, {most:,} rows: times the cost with no rows (reported)", 1.2,
                ratios(done, _name(_RANDOM, most), _name(_RANDOM, 0), "us_marker"), "at most", stretch=True,
            ),
        ],
        rounds=done,
        circumstances=circumstances,
        plots=[
            _plot("us_marker", "us a marker", done, sizes),
            _plot("wal_bytes", "bytes of WAL a marker", done, sizes),
        ],
    )  # fmt: skip


def _name(kind: str, rows: int) -> str:
    return f"{kind}, {rows:,} rows"


def _plot(figure: str, y: str, done: Sequence[Round], sizes: Sequence[int]) -> Plot:
    """One figure over the number of rows."""
    lines = {
        kind: [
            (rows / 1e6, statistics.median(values(done, _name(kind, rows), figure)))
            for rows in sizes
        ]
        for kind, _, _ in _KINDS
    }
    name = f"growth_{figure}"
    return Plot(name, "A marker in a growing inbox", "lines", "million rows", y, lines)


@contextmanager
def _grown(url: str, cell: _Cell) -> Generator[Callable[[], Round]]:
    """An inbox of that size; yields what measures a round in it."""
    place, gauges = Place(url), Gauges(url)
    try:
        with App(url) as app:
            assert app.database.sync is not None
            drive(app.database.sync, app.protocol.check_schema)
            if cell.rows:
                span = (midnight(1 - _DAYS), datetime.now(UTC) - timedelta(seconds=1))
                with place.connect() as admin:
                    fill(admin, cell.ids, rows=cell.rows, span=span)
            yield partial(_measured, app, place, gauges, cell)
    finally:
        gauges.close()


def _measured(app: App, place: Place, gauges: Gauges, cell: _Cell) -> Round:
    markers = cell.markers
    connections = app.database.sync
    assert connections is not None
    batches = _batches(cell.ids, markers)
    won, took = 0, list[float]()
    with place.connect() as admin:
        if not cell.rows:
            # what earlier rounds have left
            admin.execute("TRUNCATE txbox_inbox")
        for batch in _batches(cell.ids, 2_000):
            drive(connections, _claimed, app, batch)
        checkpoint(admin)
        before = gauges.read()
        last = before.at
        for batch in batches:
            won += len(drive(connections, _claimed, app, batch))
            now = time.perf_counter()
            took.append(now - last)
            last = now
        after = gauges.read()
        wall_s = sum(took)
        known = [arrival.message_id for batch in batches for arrival in batch]
        row = admin.execute(
            "SELECT count(*) FROM txbox_inbox WHERE consumer = %s AND message_id = ANY(%s)",
            (CONSUMER, known),
        ).fetchone()
        sizes = admin.execute(_SIZES).fetchone()
    assert row is not None
    assert sizes is not None
    again = sum(len(drive(connections, _claimed, app, batch)) for batch in batches[:10])
    took.sort()
    server_s = None
    if before.server_cpu_s is not None and after.server_cpu_s is not None:
        server_s = after.server_cpu_s - before.server_cpu_s
    wal = None
    if before.wal_bytes is not None and after.wal_bytes is not None:
        wal = (after.wal_bytes - before.wal_bytes) / markers
    return Round(
        cell.name, markers, markers / wall_s, took[len(took) // 2] * 1e3, took[len(took) * 99 // 100] * 1e3,
        (after.client_cpu_s - before.client_cpu_s) / markers * 1e6,
        Verified(lost=markers - row[0], doubled=again, inbox_off_by=won - markers),
        server_cpu_us=None if server_s is None else server_s / markers * 1e6,
        wal_bytes=wal,
        more={
            "us_marker": wall_s / markers * 1e6,
            "table_mb": sizes[0] / 1e6,
            "index_mb": sizes[1] / 1e6,
        },
    )  # fmt: skip


_SIZES = """
SELECT sum(pg_table_size(oid))::bigint, sum(pg_indexes_size(oid))::bigint
  FROM pg_class WHERE relkind = 'r' AND relname LIKE 'txbox\\_inbox%'
"""


async def _claimed(db: Session, app: App, batch: Sequence[Arrival]) -> set[str]:
    """Claim a batch, and commit without a handler in between."""
    token, store = secrets.token_hex(16), app.store
    claim = store.claim(
        CONSUMER,
        batch,
        token=token,
        lock_timeout=app.limits.lock_timeout,
        idle_s=60.0,
        keep=False,
    )
    answers = await db.begin(claim)
    won = store.claimed(claim, answers)
    await db.commit((store.closing(token),))
    assert won is not None
    return won.ids


def _batches(ids: Ids, markers: int) -> list[list[Arrival]]:
    """Fresh ids of now, each batch sorted as a worker sorts it."""
    started = time.time_ns() // 1_000_000
    fresh = [
        str(uuid.uuid4()) if ids == "uuid4" else _uuid7(started + at // 20) for at in range(markers)
    ]
    return [
        [_arrival(message_id) for message_id in sorted(fresh[at : at + _BATCH])]
        for at in range(0, markers, _BATCH)
    ]


def _uuid7(ms: int) -> str:
    high = ms << 16 | 7 << 12 | secrets.randbits(12)
    return str(uuid.UUID(int=high << 64 | 2 << 62 | secrets.randbits(62)))


def _arrival(message_id: str) -> Arrival:
    return Arrival(Message(id=message_id, topic=TOPIC, payload=b"{}"), message_id, _HASH)
