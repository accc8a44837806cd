"""P9: retention of half a million rows, by DROP of their partition and by batches, beside live traffic."""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import measure
from benchmarks.growing import aged, fill, midnight, plain
from benchmarks.place import Gauges, Place, checkpoint
from benchmarks.result import Bar, Round, Verified, result, values
from benchmarks.servers import fresh_database
from benchmarks.workload import CONSUMER, TOPIC
from txbox import App, Message, Retention
from txbox.maintenance import run_once
from txbox.store import jobs, partitions

NUMBER = "P9"
TITLE = "Retention of half a million rows"

_RATE = 300
_ALONE_S = 5.0
_LEAST_S = 3.0
_KEPT = timedelta(days=7)
_NOTE = (
    "`longest ms` is the longest batch, or the longest detach or drop, with its wait for the lock, its look at rows "
    "and its COMMIT; `blocked ms` the longest live message that met any of them; `before p99 ms` that of live "
    "messages before pruning began."
)
_DROP, _DELETE = "partition dropped", "deleted by batch"


def run(*, rounds: int, messages: int) -> dict[str, Any]:
    """Measure; returns the result as it is stored.

    Args:
        messages: 4,000 for half a million rows: 125 times as many are pruned, and as many stay.
    """
    rows = 125 * messages
    done: list[Round] = []
    circumstances: dict[str, Any] = {}
    for name in (_DROP, _DELETE):
        for _ in range(rounds):
            with fresh_database("retention") as url:
                (aged if name == _DROP else _plain)(url, 30)
                done += _pruned(url, name, rows)
                circumstances = measure.circumstances(url)
    return result(
        phase=NUMBER,
        title=TITLE if rows == 500_000 else f"Retention of {rows:,} rows",
        method=f"{rounds} rounds of each, in a database of its own: {rows:,} rows of one day that is over, and as "
        "many of this week, which stay. `maintenance.run_once(app, 'prune')` in a process of its own, each batch, "
        "detach and drop timed there; beside it txbox's claim, an empty handler and COMMIT, one message at a time, "
        f"{_RATE} a second, one connection: for {_ALONE_S:g} s alone, then until all is pruned, for {_LEAST_S:g} s at "
        "least. p50 and p99 are those of the live messages, from when each was due",
        bars=[
            Bar(
                "a live message that meets the drop of a partition takes at most 10 ms", 10.0,
                values(done, _DROP, "blocked_ms"), "at most", "ms",
            ),
            Bar("no batch takes longer than 100 ms", 100.0, values(done, _DELETE, "longest_ms"), "at most", "ms"),
            *(
                Bar(
                    f"{name}: live p99 at most 1.5 times that of the same round before it", 1.5,
                    values(done, name, "p99_times"), "at most",
                )
                for name in (_DROP, _DELETE)
            ),
        ],
        rounds=done,
        circumstances=circumstances,
        notes=[_NOTE],
    )  # fmt: skip


def _plain(url: str, _days: int) -> None:
    plain(url)


@dataclass
class _Live:
    """Messages at a steady rate, from a thread; latencies from when each was due."""

    app: App
    spans: list[tuple[float, float]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        due = time.perf_counter()
        while not self.stop.is_set():
            due += 1 / _RATE
            while (now := time.perf_counter()) < due:
                time.sleep(due - now)
            ms, low = time.time_ns() // 1_000_000, uuid.uuid4().int
            message_id = str(uuid.UUID(int=ms << 80 | 7 << 76 | 2 << 62 | low % (1 << 62)))
            self.app.process(Message(id=message_id, topic=TOPIC, payload=b"{}"))
            self.spans.append((due, time.perf_counter()))
            self.ids.append(message_id)


def _pruned(url: str, name: str, rows: int) -> list[Round]:
    place, gauges = Place(url), Gauges(url)
    with App(url) as app, place.connect() as admin:
        app.handler(TOPIC, consumer=CONSUMER)(_nothing)
        # of a day that is over, and of the last days
        over = (midnight(-20), midnight(-19) - timedelta(seconds=1))
        fill(admin, "uuid7", rows=rows, span=over)
        fill(admin, "uuid7", rows=rows, span=(midnight(-5), midnight(0)))
        checkpoint(admin)
        live = _Live(app)
        thread = threading.Thread(target=live.run)
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        child = context.Process(target=_prune, args=(url, theirs))
        child.start()
        assert mine.recv() == "ready"
        thread.start()
        try:
            time.sleep(_ALONE_S)
            alone, before = len(live.spans), gauges.read()
            mine.send("go")
            gone, work, whole_s = mine.recv()
            time.sleep(max(0.0, _LEAST_S - whole_s))
            after = gauges.read()
        finally:
            live.stop.set()
            thread.join()
            child.join()
            gauges.close()
        verified = _verified(admin, live.ids, rows, gone)
    quiet, busy = (
        sorted(ended - due for due, ended in spans)
        for spans in (live.spans[50:alone], live.spans[alone:])
    )
    took = [ended - began for began, ended in work]
    # the clock is that of the machine, the same in both processes
    met = [
        ended - due
        for due, ended in live.spans[alone:]
        if any(due <= last and ended >= first for first, last in work)
    ]
    p99 = _part(busy, 0.99)
    wal = None
    if before.wal_bytes is not None and after.wal_bytes is not None:
        wal = (after.wal_bytes - before.wal_bytes) / rows
    return [
        Round(
            name, rows, rows / whole_s, _part(busy, 0.5) * 1e3, p99 * 1e3, None, verified, wal_bytes=wal,
            more={
                "longest_ms": max(took) * 1e3, "median_ms": statistics.median(took) * 1e3, "batches": len(took),
                "blocked_ms": max(met, default=0.0) * 1e3,
                "before_p99_ms": _part(quiet, 0.99) * 1e3, "p99_times": p99 / _part(quiet, 0.99),
            },
        )
    ]  # fmt: skip


def _nothing(message: Message[Any], tx: Any) -> None:
    """The marker alone."""


def _part(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _verified(admin: Any, live: Sequence[str], rows: int, gone: int) -> Verified:
    """Lost: live markers, or rows that should have stayed; doubled is a marker that is there twice."""
    found = admin.execute(
        "SELECT count(*), count(DISTINCT message_id) FROM txbox_inbox WHERE message_id = ANY(%s)",
        (list(live),),
    ).fetchone()
    total = admin.execute("SELECT count(*) FROM txbox_inbox").fetchone()
    return Verified(
        lost=len(live) - found[1],
        doubled=found[0] - found[1],
        inbox_off_by=(total[0] - len(live) - rows) + (gone - rows),
    )


def _prune(url: str, parent: Connection[Any, Any]) -> None:
    """In a process of its own: wait for the word, prune, and tell from when to when each transaction was."""
    spans: list[tuple[float, float]] = []

    def timed(work: Callable[..., Awaitable[Any]]) -> Any:
        async def run(*args: Any, **named: Any) -> Any:
            started = time.perf_counter()
            answer = await work(*args, **named)
            spans.append((started, time.perf_counter()))
            return answer

        return run

    with App(url, retention=Retention(processed=_KEPT)) as app:
        run_once(app, "partitions")  # connected, and the schema known
        jobs.BlockScan.batch = timed(jobs.BlockScan.batch)  # type: ignore[method-assign]
        partitions.detach = timed(partitions.detach)
        partitions.drop = timed(partitions.drop)
        parent.send("ready")
        parent.recv()
        started = time.perf_counter()
        report = run_once(app, "prune")
        parent.send((report.rows, spans, time.perf_counter() - started))
