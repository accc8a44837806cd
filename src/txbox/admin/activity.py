"""What workers do and have done: rates, times and failures by the minute, and the processes themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta

from txbox.errors import ConfigurationError
from txbox.session import Session
from txbox.store import activity
from txbox.store.activity import Counts, Identity, Kind, Pause, Trouble
from txbox.store.dialect import Dialect

_MINUTE = timedelta(minutes=1)
#: A process without a sign of life for so long has died, hangs, or cannot reach the database.
SILENT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The counts of one step of time.

    Attributes:
        at: when the step begins, by the clock of the database.
    """

    at: datetime
    counts: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """The counts of one consumer, or of one route of the outbox.

    Attributes:
        total: the sum of all steps; `Histogram.quantile` of its `latency` and `run` gives percentiles.
        points: the steps in which something was counted, the oldest first.
    """

    kind: Kind
    name: str
    total: Counts
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activities:
    """The counts of a span of time.

    Attributes:
        since: when the first step begins.
        until: now, by the clock of the database; the last step is not over.
        step: the length of each.
    """

    since: datetime
    until: datetime
    step: timedelta
    consumers: tuple[Activity, ...]
    routes: tuple[Activity, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus(Identity):
    """A process that works on this database.

    Attributes:
        paused: those of its consumers that are paused.
        state: "running", "draining", or "silent" without a sign of life for half a minute.
        busy: lanes that have something to do.
        leases: rows of the inbox that it holds.
        in_flight: deliveries that it has received and not acknowledged.
        troubles: the brokers from which it cannot receive, or to which it cannot send, and why.
        seen_at: its last sign of life; there is one every few seconds.
    """

    paused: tuple[str, ...]
    state: str
    busy: int
    leases: int
    in_flight: int
    troubles: tuple[Trouble, ...]
    started_at: datetime
    seen_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a consumer, or a route of the outbox, did in the last minute or two.

    Attributes:
        paused: nobody runs this consumer.
        received_per_s, processed_per_s, duplicate_per_s: per second; of a route, `processed` is sent.
        failed, dead, quarantined: how many.
        p50_s, p95_s, p99_s: seconds from receipt to commit, of what was processed; None where nothing was.
        oldest_s: for how long the oldest due message has been due; None where none is.
    """

    kind: Kind
    name: str
    paused: bool
    received_per_s: float
    processed_per_s: float
    duplicate_per_s: float
    failed: int
    dead: int
    quarantined: int
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    oldest_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What goes on right now.

    Attributes:
        at: by the clock of the database.
        over_s: the seconds that rates are of: this minute so far, and the one before.
    """

    at: datetime
    over_s: float
    consumers: tuple[Rates, ...]
    routes: tuple[Rates, ...]
    workers: tuple[WorkerStatus, ...]
    paused: tuple[Pause, ...]


def snapshot(
    activities: Activities, workers: Sequence[WorkerStatus], paused: Sequence[Pause]
) -> Snapshot:
    """The rates of the last two minutes, also for consumers that did nothing."""
    over_s = (activities.until - activities.since).total_seconds()
    paused_names = {pause.consumer for pause in paused}
    consumers = {each.name: each for each in activities.consumers}
    routes = {each.name: each for each in activities.routes}
    known = paused_names.union(consumers, *(worker.consumers for worker in workers))
    ways = {*routes}.union(*(worker.routes for worker in workers))
    return Snapshot(
        at=activities.until,
        over_s=over_s,
        consumers=tuple(
            _rates("consumer", name, consumers.get(name), over_s, paused=name in paused_names)
            for name in sorted(known)
        ),
        routes=tuple(_rates("route", name, routes.get(name), over_s) for name in sorted(ways)),
        workers=tuple(workers),
        paused=tuple(paused),
    )


def _rates(
    kind: Kind, name: str, entry: Activity | None, over_s: float, *, paused: bool = False
) -> Rates:
    counts = Counts() if entry is None else entry.total
    p50, p95, p99 = (counts.latency.quantile(share) for share in (0.5, 0.95, 0.99))
    return Rates(
        kind=kind,
        name=name,
        paused=paused,
        received_per_s=counts.received / over_s,
        processed_per_s=counts.processed / over_s,
        duplicate_per_s=counts.duplicate / over_s,
        failed=counts.failed,
        dead=counts.dead,
        quarantined=counts.quarantined,
        p50_s=p50,
        p95_s=p95,
        p99_s=p99,
        oldest_s=None if entry is None else entry.points[-1].counts.oldest_s,
    )


async def read(
    db: Session,
    dialect: Dialect,
    last: timedelta,
    step: timedelta,
    only: tuple[Kind, str] | None = None,
) -> Activities:
    """Read the counts of the last minutes, of one consumer or route or of all.

    Raises:
        ConfigurationError: not whole minutes.
    """
    if step < _MINUTE or step % _MINUTE or last < step:
        raise ConfigurationError(
            f"Counts are kept by the minute: a step of {step} over {last} cannot be shown."
        )
    length, minutes = step // _MINUTE, last // _MINUTE
    clock_s, rows = await activity.read(db, dialect, minutes=minutes, step=length, only=only)
    steps: dict[tuple[Kind, str], dict[int, Counts]] = {}
    for key, counts in rows:
        # steps begin at round times
        of_step = steps.setdefault((key.kind, key.name), {})
        if (sums := of_step.setdefault(key.minute // length, counts)) is not counts:
            sums.merge(counts)
    shown = [_activity(*of, steps[of], length) for of in sorted(steps)]
    first = int(clock_s // 60) - minutes + 1
    return Activities(
        since=_moment(first // length * length),
        until=datetime.fromtimestamp(clock_s, UTC),
        step=step,
        consumers=tuple(each for each in shown if each.kind == "consumer"),
        routes=tuple(each for each in shown if each.kind == "route"),
    )


def together(activities: Sequence[Activity]) -> Activity:
    """All these as one, without a name."""
    steps: dict[datetime, Counts] = {}
    for each in activities:
        for point in each.points:
            steps.setdefault(point.at, Counts()).merge(point.counts)
    total = Counts()
    for counts in steps.values():
        total.merge(counts)
    points = tuple(Point(at=at, counts=steps[at]) for at in sorted(steps))
    return Activity(kind="consumer", name="", total=total, points=points)


def _activity(kind: Kind, name: str, steps: dict[int, Counts], length: int) -> Activity:
    total = Counts()
    for counts in steps.values():
        total.merge(counts)
    points = (
        Point(at=_moment(number * length), counts=counts)
        for number, counts in sorted(steps.items())
    )
    return Activity(kind=kind, name=name, total=total, points=tuple(points))


def _moment(minute: int) -> datetime:
    return datetime.fromtimestamp(minute * 60, UTC)


def statuses(workers: Sequence[activity.Worker], paused: Sequence[Pause]) -> list[WorkerStatus]:
    """The processes as people see them, the longest at work first."""
    paused_names = {pause.consumer for pause in paused}
    return [
        WorkerStatus(
            **{item.name: getattr(worker.identity, item.name) for item in fields(Identity)},
            paused=tuple(name for name in worker.identity.consumers if name in paused_names),
            state=worker.doing.state if worker.silent_s < SILENT_S else "silent",
            busy=worker.doing.busy,
            leases=worker.doing.leases,
            in_flight=worker.doing.in_flight,
            troubles=worker.doing.troubles,
            started_at=worker.started_at,
            seen_at=worker.seen_at,
        )
        for worker in workers
    ]
