"""What worker processes write every few seconds, heartbeats and per-minute counts, and what they read: pauses.

Source: docs/decisions/0034-activity.md, docs/decisions/0039-pauses.md
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import zip_longest
from math import gcd
from operator import add
from typing import Any, Literal, NamedTuple

from txbox.boundaries import Boundary, log
from txbox.errors import Fault, StoreError
from txbox.session import Session
from txbox.store.dialect import FIRST, Dialect, as_time

#: Upper bounds of the histogram buckets, in seconds; the last bucket, above them, has none.
BOUNDS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0,
)  # fmt: skip
#: The counters, as columns of txbox_activity.
COUNTED = ("received", "processed", "duplicate", "deferred", "failed", "dead", "quarantined")

Kind = Literal["consumer", "route"]
# of one route
_TROUBLES_MAX = 10
# minutes folded per transaction
_FOLDED = 30


def bucket_of(seconds: float) -> int:
    """Return the index of the bucket for a duration."""
    return bisect_left(BOUNDS_S, seconds)


class Histogram:
    """Durations, counted in fixed buckets."""

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
        """Estimate a quantile in seconds, by linear interpolation within its bucket; None if nothing was counted.

        Values above the last bound count as that bound.
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
        """Return the counts separated by spaces, without trailing zeros, as they are stored."""
        last = max((index for index, count in enumerate(self.buckets) if count), default=-1)
        return " ".join(map(str, self.buckets[: last + 1]))

    @classmethod
    def of(cls, text: str) -> Histogram:
        """Read what `as_text` wrote, or add up several with commas between."""
        if "," not in text:
            return cls(map(int, text.split()))
        rows = (part.split() for part in text.split(","))
        return cls(sum(map(int, column)) for column in zip_longest(*rows, fillvalue="0"))


@dataclass(slots=True)
class Counts:
    """Outcomes and durations of one consumer or route over some time.

    Attributes:
        received: messages that reached the consumer from a source, `process`, `send` or the outbox.
        processed: messages whose transaction committed; for a route, messages sent.
        duplicate, deferred, failed, dead, quarantined: outcomes; failed and dead count every attempt.
        latency: seconds from the first receipt to the commit.
        run: seconds in the handler's transaction; for a batch, the mean per message.
        oldest_s: the longest that the oldest due message had been due; None if none was due.
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

    def copy(self) -> Counts:
        copied = Counts()
        copied.merge(self)
        return copied


class Key(NamedTuple):
    """What is counted: a minute since the epoch by the database's clock, and a consumer or route."""

    minute: int
    kind: Kind
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A worker process: what stays the same for its lifetime.

    Attributes:
        worker: a random id.
        kind: "run", "relay" or "maintain", the command it was started with.
        app: the `--app` argument, or "".
        sources: each source with its topics.
        routes: the outbox routes it relays.
        lanes: the most batches it can have in flight.
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
class Trouble:
    """A broker from which a process cannot receive, or to which it cannot send.

    Attributes:
        name: the source, or the route of the outbox.
        since_s: seconds since the epoch.
        error: what the broker, or its client, said last.
        topic: the only one that a route cannot send; None for all of them.
    """

    kind: Literal["source", "route"]
    name: str
    since_s: int
    error: str
    topic: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Doing:
    """What a worker process is doing right now.

    Attributes:
        state: "running" or "draining".
        busy: lanes with work.
        leases: inbox rows it holds.
        in_flight: deliveries received and not yet acknowledged.
        troubles: the brokers that it waits for.
    """

    state: str = "running"
    busy: int = 0
    leases: int = 0
    in_flight: int = 0
    troubles: tuple[Trouble, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker process as recorded in the database.

    Attributes:
        silent_s: seconds since its last heartbeat.
    """

    identity: Identity
    doing: Doing
    started_at: datetime
    seen_at: datetime
    silent_s: float


async def write(
    db: Session, dialect: Dialect, identity: Identity, doing: Doing, counted: Mapping[Key, Counts]
) -> None:
    """Write this process's heartbeat and counts, in one commit.

    Args:
        counted: totals of minutes; they replace those written before.
    """
    heartbeat = dialect.statement("worker_write", _flat(identity, doing))
    if not counted:
        await db.alone(heartbeat)
        return
    await db.begin((heartbeat,))
    await _write(db, dialect, identity.worker, counted)
    await db.commit()


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
    """Delete the record of a process that has ended."""
    await db.alone(dialect.statement("worker_gone", {"worker": worker}))


async def outbox_ages(db: Session, dialect: Dialect, routes: Sequence[str]) -> dict[str, float]:
    """Read for how many seconds the first message of each route has been due; negative while it is delayed.

    A route is left out where this is no time, but was altered.
    """
    result = await db.alone(dialect.statement("outbox_ages", {}, {"route": list(routes)}))
    return {str(route): float(age_s) for route, age_s in result.rows if age_s is not None}


async def read(
    db: Session,
    dialect: Dialect,
    *,
    minutes: int,
    step: int,
    only: tuple[Kind, str] | None = None,
) -> tuple[float, list[tuple[Key, Counts]]]:
    """Read the counts of the last minutes, oldest first, summed over all processes.

    Args:
        step: minutes of a step, from multiples of it; the first one is read from its beginning. A key has the first
            minute of what was summed, an hour at most: the database joins the histograms of so many.
        only: a consumer or a route; by default all of them.

    Returns:
        The database's clock in seconds since the epoch, and the counts.
    """
    clock = await db.alone(dialect.statement("clock"))
    clock_s = float(clock.rows[0][0])
    first = int(clock_s // 60) - minutes + 1
    params: dict[str, Any] = {"minute": first - first % step, "step": gcd(step, 60)}
    name = "activity_read"
    if only is not None:
        name, params = "activity_read_one", {**params, "kind": only[0], "name": only[1]}
    result = await db.alone(dialect.statement(name, params))
    return clock_s, [_counted(row) for row in result.rows]


def _counted(row: Sequence[Any]) -> tuple[Key, Counts]:
    minute, kind, name, *numbers, latency, run, oldest_s = row
    received, processed, duplicate, deferred, failed, dead, quarantined = map(int, numbers)
    counts = Counts(
        received, processed, duplicate, deferred, failed, dead, quarantined,
        Histogram.of(str(latency)), Histogram.of(str(run)), None if oldest_s is None else float(oldest_s),
    )  # fmt: skip
    return Key(int(minute), kind, str(name)), counts


async def fold(db: Session, dialect: Dialect, *, older_than_s: float, step: int = 1) -> int:
    """Merge the rows of several processes, and of several minutes; returns how many there were, 0 for no more.

    Args:
        step: so many minutes become one row, which has the first of them.

    Guarantee: one commit. Counts written for such an old minute at the same time may be lost: they are statistics.
    """
    before = await _minute_before(db, dialect, older_than_s)
    params = {"before": before - before % step, "limit": _FOLDED, "step": step}
    result = await db.execute(dialect.statement("activity_minutes", params))
    if not result.rows:
        await db.commit()
        return 0
    steps = {int(row[0]) // step * step for row in result.rows}
    minutes = {"minute": [first + offset for first in sorted(steps) for offset in range(step)]}
    sums: dict[Key, Counts] = {}
    rows = await db.execute(dialect.statement("activity_of", {}, minutes))
    for key, counts in map(_counted, rows.rows):
        first = key._replace(minute=key.minute // step * step)
        sums.setdefault(first, Counts()).merge(counts)
    await _write(db, dialect, "", sums)
    gone = await db.execute(dialect.statement("activity_folded", params, minutes))
    await db.commit()
    return int(gone.count)


async def prune(
    db: Session, dialect: Dialect, *, older_than_s: float, step: int, silent_s: float
) -> int:
    """Delete old counts and the records of silent workers; returns how many rows.

    Args:
        step: minutes that the oldest rows have been merged from: one of which a part is younger is kept.
    """
    before = await _minute_before(db, dialect, older_than_s)
    params = {"before": before - before % step}
    counts = await db.execute(dialect.statement("activity_prune", params))
    workers = await db.execute(dialect.statement("workers_prune", {"silent_s": silent_s}))
    await db.commit()
    return int(counts.count + workers.count)


async def _minute_before(db: Session, dialect: Dialect, older_than_s: float) -> int:
    """Begin a transaction; returns the minute that was `older_than_s` ago."""
    (clock,) = await db.begin((dialect.statement("clock"),))
    return int((float(clock.rows[0][0]) - older_than_s) // 60)


async def workers(db: Session, dialect: Dialect) -> list[Worker]:
    """Read the worker processes, oldest first."""
    result = await db.alone(dialect.statement("workers"))
    return [_shown(row) for row in result.rows]


def _shown(row: Sequence[Any]) -> Worker:
    try:
        return _worker(row)
    except Exception as error:  # noqa: BLE001  # an altered row must not hide the others
        raised = type(error).__name__
        log.warning("A worker cannot be shown: %s (boundary: %s)", raised, Boundary.ROW)
        plain = (*row[:5], f"(cannot be shown: {raised})", "[]", "{}", "{}", 0, row[10], 0, 0, 0)
        return _worker((*plain, as_time(row[14]) or FIRST, as_time(row[15]) or FIRST, row[16]))


def _worker(row: Sequence[Any]) -> Worker:
    worker, kind, host, pid, version, app, consumers, sources, routes, lanes, *rest = row
    state, busy, leases, in_flight, started_at, seen_at, silent_s = rest
    started, seen = as_time(started_at), as_time(seen_at)
    assert started is not None
    assert seen is not None
    received, sent = _named(sources), _named(routes)
    return Worker(
        identity=Identity(
            worker=str(worker),
            kind=str(kind),
            host=str(host),
            pid=int(pid),
            version=str(version),
            app=str(app),
            consumers=tuple(json.loads(consumers)),
            sources={name: tuple(of.get("topics", ())) for name, of in received.items()},
            routes=tuple(sent),
            lanes=int(lanes),
        ),
        doing=Doing(
            state=str(state),
            busy=int(busy),
            leases=int(leases),
            in_flight=int(in_flight),
            troubles=(*_troubles("source", received), *_troubles("route", sent)),
        ),
        started_at=started,
        seen_at=seen,
        silent_s=max(0.0, float(silent_s)),
    )


def _named(text: str) -> dict[str, dict[str, Any]]:
    """Sources or routes by their names; a process of another release may have written less of them."""
    names: Any = json.loads(text)
    known: dict[str, Any] = names if hasattr(names, "items") else dict.fromkeys(names)
    return {name: of if isinstance(of, dict) else {} for name, of in known.items()}


def _troubles(kind: Literal["source", "route"], named: Mapping[str, dict[str, Any]]) -> list[Trouble]:  # fmt: skip
    return [
        Trouble(kind=kind, name=name, since_s=since_s, error=error, topic=topic)
        for name, of in named.items()
        for since_s, error, topic in of.get("away", ())
    ]


def _flat(identity: Identity, doing: Doing) -> dict[str, Any]:
    """The columns of a row; each source and route has its troubles with it."""
    row = {name: getattr(value, name) for value in (identity, doing) for name in value.__slots__}
    sources: dict[str, dict[str, Any]] = {
        name: {"topics": topics} for name, topics in identity.sources.items()
    }
    routes: dict[str, dict[str, Any]] = {name: {} for name in identity.routes}
    for trouble in row.pop("troubles"):
        of = (sources if trouble.kind == "source" else routes).setdefault(trouble.name, {})
        away = of.setdefault("away", [])
        if len(away) < _TROUBLES_MAX:
            away.append((trouble.since_s, trouble.error, trouble.topic))
    lists = {"consumers": identity.consumers, "sources": sources, "routes": routes}
    return {**row, **{name: json.dumps(value) for name, value in lists.items()}}


# -- paused consumers -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A consumer that no worker serves until it is resumed."""

    consumer: str
    actor: str
    reason: str | None
    paused_at: datetime


async def pauses(db: Session, dialect: Dialect) -> tuple[float, list[Pause]]:
    """Read which consumers are paused, in one statement that takes no locks.

    Returns:
        The database's clock in seconds since the epoch, and the pauses by consumer.
    """
    result = await db.alone(dialect.statement("pauses"))
    paused: list[Pause] = []
    for _, consumer, actor, reason, paused_at in result.rows:
        at = as_time(paused_at)
        if at is not None:
            paused.append(
                Pause(consumer=str(consumer), actor=str(actor), reason=reason, paused_at=at)
            )
    return float(result.rows[0][0]), paused


async def pause(
    db: Session,
    dialect: Dialect,
    consumer: str,
    *,
    actor: str,
    reason: str | None,
    dry_run: bool = False,
    pausing: Callable[[Session], Awaitable[None]] | None = None,
) -> bool:
    """Pause a consumer; False if it is already paused.

    Args:
        pausing: what else must happen in this transaction.

    Guarantee: the pause and its audit row are one commit.
    """
    params = {"consumer": consumer, "actor": actor, "reason": reason}
    await db.begin()
    try:
        await db.execute(dialect.statement("pause", params))
    except StoreError as error:
        await db.rollback()
        if error.fault is not Fault.DUPLICATE:
            raise
        return False
    if pausing is not None:
        await pausing(db)
    return await _audited(db, dialect, "pause", consumer, actor, reason, dry_run=dry_run)


async def resume(
    db: Session,
    dialect: Dialect,
    consumer: str,
    *,
    actor: str,
    reason: str | None,
    dry_run: bool = False,
) -> bool:
    """Resume a consumer; False if it was not paused. Same guarantee as `pause`."""
    await db.begin()
    gone = await db.execute(dialect.statement("resume", {"consumer": consumer}))
    if not gone.count:
        await db.rollback()
        return False
    return await _audited(db, dialect, "resume", consumer, actor, reason, dry_run=dry_run)


async def _audited(
    db: Session,
    dialect: Dialect,
    action: str,
    consumer: str,
    actor: str,
    reason: str | None,
    *,
    dry_run: bool,
) -> bool:
    if dry_run:
        await db.rollback()
        return True
    audit = {
        "actor": actor, "action": action, "filter": json.dumps({"consumer": consumer}), "affected": 1,
        "reason": reason,
    }  # fmt: skip
    await db.execute(dialect.statement("audit", audit))
    await db.commit()
    return True
