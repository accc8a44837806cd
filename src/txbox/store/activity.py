"""What workers and relays say of themselves: who they are, and what they have counted, minute by minute.

Source: docs/decisions/0034-activity.md
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from operator import add
from typing import Any, Literal, NamedTuple

from txbox.session import Session
from txbox.store import pauses
from txbox.store.dialect import Dialect, as_time
from txbox.store.pauses import Pause

#: Upper bounds of the buckets of a histogram, in seconds; one more bucket is for what is above.
BOUNDS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0,
)  # fmt: skip
#: What is counted, as the columns of txbox_activity are called.
COUNTED = ("received", "processed", "duplicate", "deferred", "failed", "dead", "quarantined")

Kind = Literal["consumer", "route"]
# minutes that are folded in one transaction
_FOLDED = 30


def bucket_of(seconds: float) -> int:
    """Which bucket a time falls in."""
    return bisect_left(BOUNDS_S, seconds)


class Histogram:
    """How often what took how long, in a fixed number of buckets."""

    __slots__ = ("buckets",)

    def __init__(self, buckets: Iterable[int] = ()) -> None:
        self.buckets = [*buckets]
        self.buckets += [0] * (len(BOUNDS_S) + 1 - len(self.buckets))

    def __repr__(self) -> str:
        return f"Histogram({self.buckets})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Histogram) and self.buckets == other.buckets

    __hash__ = None  # type: ignore[assignment]

    @property
    def count(self) -> int:
        return sum(self.buckets)

    def add(self, seconds: float, times: int = 1) -> None:
        self.buckets[bisect_left(BOUNDS_S, seconds)] += times

    def merge(self, other: Histogram) -> None:
        self.buckets = [*map(add, self.buckets, other.buckets)]

    def quantile(self, share: float) -> float | None:
        """Estimate what this share of all took at most, in seconds; None where nothing was counted.

        Within a bucket all values are taken to lie evenly; above the last bound it is that bound.
        """
        wanted = share * self.count
        if not wanted:
            return None
        below, seen = 0.0, 0
        for upper, count in zip(BOUNDS_S, self.buckets, strict=False):
            if count and seen + count >= wanted:
                return below + (upper - below) * (wanted - seen) / count
            below, seen = upper, seen + count
        return BOUNDS_S[-1]

    def as_text(self) -> str:
        """The counts with blanks between, without zeros at the end; as a column keeps it."""
        last = max((index for index, count in enumerate(self.buckets) if count), default=-1)
        return " ".join(map(str, self.buckets[: last + 1]))

    @classmethod
    def of(cls, text: str) -> Histogram:
        return cls(map(int, text.split()))


@dataclass(slots=True)
class Counts:
    """What became of the messages of one consumer, or of one route, in some time.

    Attributes:
        received: handed to the consumer, by whatever way: a source, `process`, `send`, its own outbox.
        processed: whose handler's transaction has committed; of a route: sent.
        duplicate, deferred, failed, dead, quarantined: as the outcomes of these names; of failed and dead
            messages each attempt.
        latency: seconds from receipt to commit; of one that was run from the table, from its first receipt.
        run: seconds in the handler's transaction; of a batch, the mean of its messages.
        oldest_s: for how long the first message that was due in the table had been so, at most; None where none was.
    """

    received: int = 0
    processed: int = 0
    duplicate: int = 0
    deferred: int = 0
    failed: int = 0
    dead: int = 0
    quarantined: int = 0
    latency: Histogram = field(default_factory=Histogram)
    run: Histogram = field(default_factory=Histogram)
    oldest_s: float | None = None

    def merge(self, other: Counts) -> None:
        # written out: a day of ten consumers is 14,000 of these for one page
        self.received += other.received
        self.processed += other.processed
        self.duplicate += other.duplicate
        self.deferred += other.deferred
        self.failed += other.failed
        self.dead += other.dead
        self.quarantined += other.quarantined
        self.latency.merge(other.latency)
        self.run.merge(other.run)
        if other.oldest_s is not None:
            self.oldest_s = max(other.oldest_s, self.oldest_s or 0.0)


_NOTHING = Counts()


class Key(NamedTuple):
    """What counts are of: a minute since 1970 by the clock of the database, and a consumer or route."""

    minute: int
    kind: Kind
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A process that works on a database, as it does not change.

    Attributes:
        worker: random, of this process alone.
        kind: "run", "relay" or "maintain", after its command.
        app: as the command line named it, "" where none did.
        sources: the topics it asks each source for.
        routes: of the outbox, which it relays.
        lanes: how many batches it may have in flight.
    """

    worker: str
    kind: str
    host: str
    pid: int
    version: str
    app: str = ""
    consumers: tuple[str, ...] = ()
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    routes: tuple[str, ...] = ()
    lanes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Doing:
    """What a process does right now.

    Attributes:
        state: "running" or "draining".
        busy: lanes that have something to do.
        leases: rows of the inbox that it holds.
        in_flight: deliveries that were received and are not acknowledged.
    """

    state: str = "running"
    busy: int = 0
    leases: int = 0
    in_flight: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A process as the database knows it.

    Attributes:
        silent_s: for how long it has not been heard of.
    """

    identity: Identity
    doing: Doing
    started_at: datetime
    seen_at: datetime
    silent_s: float


async def write(
    db: Session,
    dialect: Dialect,
    identity: Identity,
    doing: Doing,
    counted: Mapping[Key, Counts],
    ages: Mapping[str, Counts],
    *,
    heard: Callable[[Sequence[Pause]], object],
) -> float:
    """Say that this process is there, what it does, and what it has counted; hear which consumers are paused.

    Args:
        counted: all of each minute so far, which takes the place of what was written of it before.
        ages: of each route that this process relays, the counts that are to say how old its first message is.
        heard: called with the pauses before the counts are written, so that it does not depend on them.

    Returns:
        The clock of the database in seconds since 1970.
    """
    statements = [
        dialect.statement("pauses"),
        dialect.statement("worker_write", {**_flat(identity), **_fields(doing)}),
    ]
    if ages:
        statements.append(dialect.statement("outbox_ages", {}, {"route": list(ages)}))
    results = await db.begin(tuple(statements))
    clock_s, paused = pauses.found_in(results[0])
    heard(paused)
    if ages:
        for route, age_s in results[-1].rows:
            # one that is delayed is due in a while
            if float(age_s) > 0:
                ages[str(route)].merge(Counts(oldest_s=float(age_s)))
    if told := {key: counts for key, counts in counted.items() if counts != _NOTHING}:
        await _write(db, dialect, identity.worker, told)
    await db.commit()
    return clock_s


async def _write(db: Session, dialect: Dialect, worker: str, counted: Mapping[Key, Counts]) -> None:
    rows: dict[str, list[Any]] = {
        name: [getattr(key, name) for key in counted] for name in Key._fields
    }
    for name in COUNTED:
        rows[name] = [getattr(counts, name) for counts in counted.values()]
    rows["latency"] = [counts.latency.as_text() for counts in counted.values()]
    rows["run"] = [counts.run.as_text() for counts in counted.values()]
    rows["oldest_s"] = [counts.oldest_s for counts in counted.values()]
    await db.execute(dialect.statement("activity_write", {"worker": worker}, rows))


async def gone(db: Session, dialect: Dialect, worker: str) -> None:
    """Forget a process that has ended."""
    await db.begin((dialect.statement("worker_gone", {"worker": worker}),))
    await db.commit()


async def read(
    db: Session, dialect: Dialect, *, minutes: int
) -> tuple[float, list[tuple[Key, Counts]]]:
    """Read what was counted in the last minutes.

    Returns:
        The clock of the database in seconds since 1970, and the counts of each process, the oldest first.
    """
    told = await db.read(dialect.statement("clock"))
    clock_s = float(told.rows[0][0])
    first = int(clock_s // 60) - minutes + 1
    found = await db.read(dialect.statement("activity_read", {"minute": first}))
    return clock_s, [_counted(row) for row in found.rows]


def _counted(row: Sequence[Any]) -> tuple[Key, Counts]:
    minute, kind, name, *numbers, latency, run, oldest_s = row
    received, processed, duplicate, deferred, failed, dead, quarantined = map(int, numbers)
    counts = Counts(
        received, processed, duplicate, deferred, failed, dead, quarantined,
        Histogram.of(str(latency)), Histogram.of(str(run)), None if oldest_s is None else float(oldest_s),
    )  # fmt: skip
    return Key(int(minute), kind, str(name)), counts


async def fold(db: Session, dialect: Dialect, *, older_than_s: float) -> int:
    """Make one row of those that several processes wrote of a minute; returns how many there were, 0 for no more.

    Guarantee: one commit. What somebody writes of so old a minute meanwhile may be lost: it is a statistic.
    """
    (told,) = await db.begin((dialect.statement("clock"),))
    before = int((float(told.rows[0][0]) - older_than_s) // 60)
    found = await db.execute(
        dialect.statement("activity_minutes", {"before": before, "limit": _FOLDED})
    )
    minutes = {"minute": [int(row[0]) for row in found.rows]}
    if not found.rows:
        await db.commit()
        return 0
    sums: dict[Key, Counts] = {}
    rows = await db.execute(dialect.statement("activity_of", {}, minutes))
    for key, counts in map(_counted, rows.rows):
        sums.setdefault(key, Counts()).merge(counts)
    await _write(db, dialect, "", sums)
    gone = await db.execute(dialect.statement("activity_folded", {}, minutes))
    await db.commit()
    return int(gone.count)


async def prune(db: Session, dialect: Dialect, *, older_than_s: float, silent_s: float) -> int:
    """Delete counts of old minutes, and workers that have not been heard of; returns how many rows."""
    (told,) = await db.begin((dialect.statement("clock"),))
    before = int((float(told.rows[0][0]) - older_than_s) // 60)
    counts = await db.execute(dialect.statement("activity_prune", {"before": before}))
    workers = await db.execute(dialect.statement("workers_prune", {"silent_s": silent_s}))
    await db.commit()
    return int(counts.count + workers.count)


async def workers(db: Session, dialect: Dialect) -> list[Worker]:
    """Read which processes there are, the oldest first."""
    found = await db.read(dialect.statement("workers"))
    return [_worker(row) for row in found.rows]


def _worker(row: Sequence[Any]) -> Worker:
    worker, kind, host, pid, version, app, consumers, sources, routes, lanes, *rest = row
    state, busy, leases, in_flight, started_at, seen_at, silent_s = rest
    started, seen = as_time(started_at), as_time(seen_at)
    assert started is not None
    assert seen is not None
    return Worker(
        identity=Identity(
            worker=str(worker),
            kind=str(kind),
            host=str(host),
            pid=int(pid),
            version=str(version),
            app=str(app),
            consumers=tuple(json.loads(consumers)),
            sources={name: tuple(topics) for name, topics in json.loads(sources).items()},
            routes=tuple(json.loads(routes)),
            lanes=int(lanes),
        ),
        doing=Doing(state=str(state), busy=int(busy), leases=int(leases), in_flight=int(in_flight)),
        started_at=started,
        seen_at=seen,
        silent_s=max(0.0, float(silent_s)),
    )


def _flat(identity: Identity) -> dict[str, Any]:
    lists = {
        name: json.dumps(getattr(identity, name)) for name in ("consumers", "sources", "routes")
    }
    return {**_fields(identity), **lists}


def _fields(value: Identity | Doing) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__}
