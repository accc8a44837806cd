"""What workers do and have done: rates, times and failures by the minute, and who is at work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from txbox.errors import ConfigurationError
from txbox.session import Session
from txbox.store import activity
from txbox.store.activity import Counts, Kind
from txbox.store.dialect import Dialect
from txbox.store.pauses import Pause

_MINUTE = timedelta(minutes=1)
#: A process that has not been heard of for so long has ended, hangs, or does not reach the database.
SILENT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What was counted in one step of time.

    Attributes:
        at: when the step begins, by the clock of the database.
    """

    at: datetime
    counts: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What was counted of one consumer, or of one route of the outbox.

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
    """What was counted in some time.

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
class WorkerStatus:
    """A process that works on this database.

    Attributes:
        worker: random, of this process alone.
        kind: "run", "relay" or "maintain", after its command.
        app: as its command line named it, "" where none did.
        sources: the topics it asks each source for.
        routes: of the outbox, which it relays.
        paused: of its consumers, those that are.
        lanes: how many batches it may have in flight.
        busy: lanes that have something to do.
        leases: rows of the inbox that it holds.
        in_flight: deliveries that it has received and not acknowledged.
        state: "running", "draining", or "silent" when it has not been heard of for half a minute.
        seen_at: when it was heard of last; it says something every few seconds.
    """

    worker: str
    kind: str
    state: str
    host: str
    pid: int
    version: str
    app: str
    consumers: tuple[str, ...]
    paused: tuple[str, ...]
    sources: Mapping[str, tuple[str, ...]]
    routes: tuple[str, ...]
    lanes: int
    busy: int
    leases: int
    in_flight: int
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
        oldest_s: for how long the first message that is due in the table has been so; None where none is.
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
    found: Activities, workers: Sequence[WorkerStatus], paused: Sequence[Pause]
) -> Snapshot:
    """What the counts of the last two minutes say of right now; of consumers that did nothing, too."""
    over_s = (found.until - found.since).total_seconds()
    held = {pause.consumer for pause in paused}
    consumers = {each.name: each for each in found.consumers}
    routes = {each.name: each for each in found.routes}
    known = held.union(consumers, *(worker.consumers for worker in workers))
    ways = {*routes}.union(*(worker.routes for worker in workers))
    return Snapshot(
        at=found.until,
        over_s=over_s,
        consumers=tuple(
            _rates("consumer", name, consumers.get(name), over_s, paused=name in held)
            for name in sorted(known)
        ),
        routes=tuple(_rates("route", name, routes.get(name), over_s) for name in sorted(ways)),
        workers=tuple(workers),
        paused=tuple(paused),
    )


def _rates(
    kind: Kind, name: str, found: Activity | None, over_s: float, *, paused: bool = False
) -> Rates:
    counts = Counts() if found is None else found.total
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
        oldest_s=None if found is None else found.points[-1].counts.oldest_s,
    )


async def read(db: Session, dialect: Dialect, last: timedelta, step: timedelta) -> Activities:
    """Read what was counted in the last so many minutes.

    Raises:
        ConfigurationError: times that are no whole minutes.
    """
    if step < _MINUTE or step % _MINUTE or last < step:
        raise ConfigurationError(
            f"Counts are kept by the minute: a step of {step} over {last} is none that can be shown."
        )
    length, minutes = step // _MINUTE, last // _MINUTE
    clock_s, found = await activity.read(db, dialect, minutes=minutes)
    first = int(clock_s // 60) - minutes + 1
    steps: dict[tuple[Kind, str], dict[int, Counts]] = {}
    for key, counts in found:
        # steps begin at round times
        of_step = steps.setdefault((key.kind, key.name), {})
        of_step.setdefault(key.minute // length, Counts()).merge(counts)
    totals = {of: Counts() for of in steps}
    for of, of_steps in steps.items():
        for counts in of_steps.values():
            totals[of].merge(counts)
    shown = {
        of: Activity(
            kind=of[0],
            name=of[1],
            total=totals[of],
            points=tuple(
                Point(at=_moment(number * length), counts=counts)
                for number, counts in sorted(steps[of].items())
            ),
        )
        for of in sorted(totals)
    }
    return Activities(
        since=_moment(first // length * length),
        until=datetime.fromtimestamp(clock_s, UTC),
        step=step,
        consumers=tuple(each for of, each in shown.items() if of[0] == "consumer"),
        routes=tuple(each for of, each in shown.items() if of[0] == "route"),
    )


def _moment(minute: int) -> datetime:
    return datetime.fromtimestamp(minute * 60, UTC)


def statuses(workers: Sequence[activity.Worker], paused: Sequence[Pause]) -> list[WorkerStatus]:
    """What people see of processes, the longest at work first."""
    names = {pause.consumer for pause in paused}
    return [_status(worker, names) for worker in workers]


def _status(worker: activity.Worker, paused: set[str]) -> WorkerStatus:
    identity, doing = worker.identity, worker.doing
    return WorkerStatus(
        worker=identity.worker,
        kind=identity.kind,
        state=doing.state if worker.silent_s < SILENT_S else "silent",
        host=identity.host,
        pid=identity.pid,
        version=identity.version,
        app=identity.app,
        consumers=identity.consumers,
        paused=tuple(name for name in identity.consumers if name in paused),
        sources=identity.sources,
        routes=identity.routes,
        lanes=identity.lanes,
        busy=doing.busy,
        leases=doing.leases,
        in_flight=doing.in_flight,
        started_at=worker.started_at,
        seen_at=worker.seen_at,
    )
