"""What is late, dead, paused, quarantined or unserved: decided here once, and shown by `status`, `explain`,
`doctor` and the overview alike.

Source: docs/decisions/0049-findings.md
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf
from shlex import quote
from typing import Any, Literal, NamedTuple, TypeVar

from txbox.admin import activity
from txbox.admin.activity import WorkerStatus
from txbox.admin.reader import Application, Rows, has_app, routes_for, waits_of
from txbox.admin.tables import COUNTED_MAX
from txbox.errors import StoreError, StoreUnavailable
from txbox.session import Session, Statement
from txbox.store.activity import Pause, Trouble, pauses, workers
from txbox.store.dialect import Dialect
from txbox.text import UNMATCHED, age, counted

#: Due for longer than this is late.
LATE_S = 60.0
# counted by an index alone; and rows of which columns are read, each of which may be a page of its own
_COUNTED, _LOOKED, _LOOKED_OUTGOING = COUNTED_MAX + 1, 100, 1_000
_NAMES = 500


Severity = Literal["error", "warning", "note"]
#: The worst first.
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

#: Every code: an error breaks a promise or stops work, a warning will, a note is informational.
CODES: dict[str, Severity] = {
    # the tables
    "schema-missing": "error",
    "schema-version": "error",
    "schema-behind": "warning",
    "schema-drift": "error",
    "index-invalid": "error",
    "guard-off": "error",
    "guard-changed": "error",
    "foreign-create": "warning",
    "partitions-missing": "warning",
    # the server
    "session-setting": "error",
    "row-security": "error",
    "role-encoding": "warning",
    "server-encoding": "warning",
    "on-replica": "error",
    "isolation-level": "warning",
    "pooler-statement": "error",
    "pooler-prepared": "error",
    "pooler-transaction": "note",
    "pooler-listen": "warning",
    "durability-fsync": "error",
    "durability-torn-pages": "error",
    "durability-flush": "error",
    "durability-commit": "warning",
    "durability-journal": "error",
    "replication-lag": "warning",
    "replication-asynchronous": "note",
    "clock-skew": "warning",
    "autovacuum-off": "warning",
    "dead-tuples": "warning",
    "old-transaction": "warning",
    # what a codec encodes
    "plain-rows": "warning",
    "key-missing": "error",
    # time-outs, in the order in which they must grow
    "time-out-order": "error",
    "time-out-statement": "warning",
    "time-out-transaction": "warning",
    "time-out-lock-wait": "warning",
    "time-out-redelivery": "error",
    "time-out-grace": "note",
    # what the App says
    "topic-unhandled": "error",
    "order-not-kept": "error",
    "weak-ids": "note",
    # the brokers
    "topic-missing": "error",
    "auto-ack": "error",
    "not-durable": "error",
    "retention-too-short": "error",
    "replay-unbounded": "note",
    "broker-drops": "warning",
    "delivery-limit": "warning",
    "duplicate-window": "note",
    # brokers as running processes see them, and rows
    "relay-away": "error",
    "source-away": "error",
    "consumer-unserved": "error",
    "route-unserved": "error",
    "orphan-consumer": "error",
    "orphan-messages": "error",
    "orphan-route": "error",
    "never-due": "error",
    "consumer-paused": "warning",
    "inbox-overdue": "warning",
    "outbox-overdue": "warning",
    "lease-expired": "warning",
    "dead-messages": "warning",
    "dead-outgoing": "warning",
    "quarantined-messages": "warning",
    "pruning-stopped": "warning",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or worth knowing.

    Args:
        code: a key of `CODES`.
        problem: one sentence, with the figures that prove it.
        remedy: the command to run, or the statement or setting to change.
        page: of the dashboard, with the rows; "" for none.
        query: what that page is to show.
        subject: what it is about: a consumer, a source, a route, topics.
        age_s: how long ago that began, or the newest message of it came.
        count: how many messages it is about, up to `COUNTED_MAX` + 1; of dead outgoing ones, without alerts.
    """

    code: str
    problem: str
    remedy: str
    page: str = ""
    query: Mapping[str, str] = field(default_factory=dict[str, str])
    subject: str = ""
    age_s: float | None = field(default=None, compare=False)
    count: int | None = field(default=None, compare=False)

    @property
    def severity(self) -> Severity:
        return CODES[self.code]


@dataclass(frozen=True, slots=True)
class Unchecked:
    """What could not be examined, and why."""

    what: str
    why: str


@dataclass(slots=True)
class Diagnosis:
    """The findings, and what could not be examined."""

    findings: list[Finding] = field(default_factory=list[Finding])
    unchecked: list[Unchecked] = field(default_factory=list[Unchecked])

    def not_checked(self, what: str, why: str) -> None:
        self.unchecked.append(Unchecked(what, why))

    def at_least(self, severity: Severity) -> list[Finding]:
        """The findings of this severity or worse."""
        bad = SEVERITIES[: SEVERITIES.index(severity) + 1]
        return [finding for finding in self.findings if finding.severity in bad]


def grouped(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Put findings of one code together, the newest first; and of these groups the worst first, then the newest."""
    groups: dict[str, list[Finding]] = {}
    for finding in sorted(findings, key=_age):
        groups.setdefault(finding.code, []).append(finding)
    return sorted(
        groups.values(), key=lambda group: (SEVERITIES.index(group[0].severity), _age(group[0]))
    )


def _age(finding: Finding) -> float:
    return inf if finding.age_s is None else finding.age_s


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by severity; within one in the order of `CODES`."""
    order = {code: rank for rank, code in enumerate(CODES)}
    return sorted(findings, key=lambda one: (SEVERITIES.index(one.severity), order[one.code]))


# -- who is at work ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """The processes on this database, and what is paused, at one time.

    Attributes:
        workers: also those that are silent.
    """

    at: datetime
    workers: tuple[WorkerStatus, ...]
    paused: tuple[Pause, ...]

    @property
    def alive(self) -> list[WorkerStatus]:
        """Those with a sign of life in the last half minute."""
        return [worker for worker in self.workers if worker.state != "silent"]

    def running(self, consumer: str) -> list[WorkerStatus]:
        return [worker for worker in self.alive if consumer in worker.consumers]

    def relaying(self, routes: Collection[str]) -> list[WorkerStatus]:
        return [worker for worker in self.alive if not set(routes).isdisjoint(worker.routes)]

    def rescuing(self) -> list[WorkerStatus]:
        return [worker for worker in self.alive if worker.kind != "relay"]

    def pause_of(self, consumer: str) -> Pause | None:
        return next((pause for pause in self.paused if pause.consumer == consumer), None)

    def troubles(self) -> list[Trouble]:
        """What keeps live processes from receiving or sending, each once, with the longest time."""
        longest: dict[tuple[str, str, str], Trouble] = {}
        for trouble in (trouble for worker in self.alive for trouble in worker.troubles):
            key = trouble.kind, trouble.name, trouble.topic or ""
            if key not in longest or trouble.since_s < longest[key].since_s:
                longest[key] = trouble
        return [longest[key] for key in sorted(longest)]

    def since(self, trouble: Trouble) -> str:
        return age(max(0.0, self.at.timestamp() - trouble.since_s))


async def crew(db: Session, dialect: Dialect) -> Crew:
    """Read who is at work, and what is paused."""
    clock_s, paused = await pauses(db, dialect)
    return Crew(
        at=datetime.fromtimestamp(clock_s, UTC),
        workers=tuple(activity.statuses(await workers(db, dialect), paused)),
        paused=tuple(paused),
    )


# -- why something is late --------------------------------------------------------------------


class Cause(NamedTuple):
    """Why messages are late: the code of the finding, the reason, which ends a sentence, and the remedy."""

    code: str
    why: str
    remedy: str


def cause_of_inbox(crew: Crew, app: Application, consumer: str, topic: str, kind: str | None) -> Cause:  # fmt: skip
    """Why no worker runs a due message of a consumer."""
    at_work, handlers = crew.running(consumer), app.handlers.consumers().get(consumer)
    if handlers is not None and not app.handlers.matching(topic, kind, consumer):
        typed = "" if kind is None else f" with type {kind!r}"
        return Cause(
            "orphan-messages",
            f"no handler of {consumer} in this App takes topic {topic!r}{typed}",
            "Register a handler for them",
        )
    if at_work:
        return Cause(
            "inbox-overdue",
            f"{_processes(at_work)} with this consumer, but cannot keep up",
            "Start more `txbox run`, or raise `concurrency=`",
        )
    if len(app.handlers) and handlers is None:
        return Cause(
            "orphan-consumer",
            "no running worker has this consumer, and this App does not have it either",
            "Run the App that has it, or register it again",
        )
    return Cause(
        "consumer-unserved",
        "no running worker has this consumer",
        "Start `txbox run` of the App that has it",
    )


def cause_of_outbox(
    crew: Crew, app: Application, route: str, topic: str, kind: str | None, cause: str | None
) -> Cause:
    """Why a due outgoing message is not sent."""
    ours, known = routes_for(app, route, topic, kind, cause), has_app(app)
    names = (
        {route, *ours} if route or ours else {name for each in crew.alive for name in each.routes}
    )
    named = route or "any"
    for trouble in crew.troubles():
        if trouble.kind == "route" and trouble.name in names and trouble.topic in (None, topic):
            return Cause("relay-away", f"the relay cannot send: {trouble.error.rstrip('.')}", _AWAY)
    if at_work := crew.relaying(names):
        return Cause(
            "outbox-overdue",
            f"{_processes(at_work)} with the route {named}, but cannot keep up",
            "Start more `txbox relay` of the App with this route",
        )
    if known and not ours:
        have = ", ".join(route.name for route in app.routes.all()) or "none"
        return Cause(
            "orphan-route",
            f"no running relay has the route {named}, and this App has no such route (it has: {have})",
            "Run the App that has it, `app.publish` the topic, or `txbox outbox reroute` them",
        )
    return Cause(
        "route-unserved",
        f"no running relay has the route {named}",
        "Start `txbox run` or `txbox relay` of the App that has it, or `txbox outbox reroute` them",
    )


_AWAY = "Mend the broker, the network or the login; what waits is sent then, and no attempt is lost"


def _processes(at_work: Sequence[WorkerStatus]) -> str:
    count = counted(len(at_work), "process")
    return f"{count} {'runs' if len(at_work) == 1 else 'run'}"


# -- the findings -----------------------------------------------------------------------------


@dataclass(slots=True)
class Examination:
    """One database that is looked at.

    Args:
        app: its policies, or the defaults of a database alone.
        dialect: with the schema of the tables, once that is known.
    """

    db: Session
    app: Application
    dialect: Dialect
    known: Crew | None = field(default=None, init=False)

    async def crew(self) -> Crew:
        """Who is at work, and what is paused: read once for all parts."""
        if self.known is None:
            self.known = await crew(self.db, self.dialect)
        return self.known

    async def rows(self, query: str, **params: Any) -> Rows:
        """Read in a transaction of its own."""
        return (await self.db.alone(self.statement(query, **params))).rows

    def statement(self, query: str, **params: Any) -> Statement:
        return self.dialect.statement(query, params)


CaseT = TypeVar("CaseT", bound=Examination)


async def read(
    db: Session, app: Application, dialect: Dialect, known: Crew | None = None
) -> Diagnosis:
    """Everything about rows and processes that is wrong, the worst first; the cost does not grow with the tables.

    Args:
        known: who is at work, if that has been read.
    """
    case, diagnosis = Examination(db, app, dialect), Diagnosis()
    case.known = known
    for what, part in PARTS.items():
        await check(case, diagnosis, what, part)
    diagnosis.findings = worst_first(diagnosis.findings)
    return diagnosis


async def check(
    case: CaseT, diagnosis: Diagnosis, what: str, part: Callable[[CaseT], AsyncIterator[Finding]]
) -> None:
    """Add the findings of one part, or why it could not be examined."""
    try:
        async for finding in part(case):
            diagnosis.findings.append(finding)
    except StoreUnavailable:
        raise
    except StoreError as error:
        # above all a missing right
        await case.db.rollback()
        diagnosis.not_checked(what, str(error))


async def brokers(case: Examination) -> AsyncIterator[Finding]:
    """Brokers from which running processes cannot receive, or to which they cannot send."""
    now = await case.crew()
    for trouble in now.troubles():
        if trouble.kind == "route":
            of = "" if trouble.topic is None else f" of topic {trouble.topic}"
            code, what = "relay-away", f"Nothing{of} has left by the route {trouble.name or 'any'}"
        else:
            code, what = "source-away", f"Nothing has been received from {trouble.name}"
        problem = f"{what} for {now.since(trouble)}: {trouble.error.rstrip('.')}."
        since_s = now.at.timestamp() - trouble.since_s
        yield Finding(
            code, problem, f"{_AWAY}.", "workers", subject=trouble.name or "any", age_s=since_s
        )


async def inbox(case: Examination) -> AsyncIterator[Finding]:
    """Messages that wait for a decision, for a worker, or for a handler that is not there."""
    now, app = await case.crew(), case.app
    waiting: dict[str, int] = defaultdict(int)
    for status, consumer in await case.rows("doctor_consumers", limit=_NAMES):
        ((age_s, expired, endless, total, newest_s),) = await case.rows(
            "doctor_messages", status=status, consumer=consumer, limit=_LOOKED, counted=_COUNTED, late_s=LATE_S,
        )  # fmt: skip
        count = int(total)
        named = quote(consumer)
        if status == "dead" and count:
            blocked = any(
                handler.options.dead_blocks
                for handler in app.handlers.consumers().get(consumer, ())
            )
            yield Finding(
                "dead-messages",
                f"{consumer} has {_some(count, 'dead message')}, the oldest received {_ago(age_s)} ago, the newest "
                f"{_ago(newest_s)} ago"
                + (", and later messages of their keys wait (dead_blocks=True)." if blocked else "."),
                f"`txbox list --consumer {named} --status dead` shows the errors; then `txbox retry` or `txbox "
                "discard`.",
                "messages", {"consumer": consumer, "status": "dead"}, consumer, _seconds(newest_s), count,
            )  # fmt: skip
        elif status == "processing" and expired:
            yield Finding(
                "lease-expired",
                f"Workers of {consumer} vanished in the middle of {counted(int(expired))}, and nobody has put "
                f"{'it' if expired == 1 else 'them'} back.",
                "Have `txbox run` or `txbox maintain` running, or `txbox rescue` once.",
                "messages", {"consumer": consumer, "status": "processing"}, consumer, _seconds(age_s),
            )  # fmt: skip
        elif status in ("pending", "failed"):
            waiting[consumer] += count
            if endless:
                yield Finding(
                    "never-due",
                    f"{consumer} has {counted(int(endless))} that no worker takes, as no time is set at which to: "
                    "something else has written to the table.",
                    f"`txbox retry --status failed --consumer {named}` makes failed ones due; or discard them.",
                    "messages", {"consumer": consumer, "status": status}, consumer, _seconds(age_s),
                )  # fmt: skip
    for consumer in sorted({*waiting, *(pause.consumer for pause in now.paused)}):
        if (pause := now.pause_of(consumer)) is not None:
            yield _paused(now, pause, waiting[consumer])
        elif waiting[consumer]:
            for finding in await _late(case, now, consumer):
                yield finding


def _paused(crew: Crew, pause: Pause, waiting: int) -> Finding:
    why = f": {pause.reason.rstrip('.')}" if pause.reason else ""
    age_s = max(0.0, crew.at.timestamp() - pause.paused_at.timestamp())
    wait = f"; {_some(waiting)} {_is(waiting)} waiting" if waiting else ""
    return Finding(
        "consumer-paused",
        f"{pause.consumer} was paused {age(age_s)} ago by {pause.actor}{why}{wait}.",
        f"`txbox resume {quote(pause.consumer)}` lets workers run it again.",
        "workers", {}, pause.consumer, age_s,
    )  # fmt: skip


async def _late(case: Examination, crew: Crew, consumer: str) -> list[Finding]:
    """The findings about a consumer's messages that have been due for too long, one for each cause."""
    rows = await case.rows("doctor_late", consumer=consumer, limit=_LOOKED, late_s=LATE_S)
    cut = len(rows) >= _LOOKED
    # behind another message of its key a row is due for as long as that takes
    behind = await waits_of(
        case.db, case.dialect, consumer, [row[0] for row in rows], case.app.handlers.consumers().get(consumer, ()),
    )  # fmt: skip
    causes: dict[Cause, list[Any]] = defaultdict(list)
    for row in rows:
        message_id, _, topic, kind, _ = row
        if message_id not in behind:
            causes[cause_of_inbox(crew, case.app, consumer, topic, kind)].append(row)
    findings: list[Finding] = []
    for cause, late in causes.items():
        count, oldest = len(late), max(float(row[-1] or 0.0) for row in late)
        remedy = f"{cause.remedy}."
        if cause.code.startswith("orphan"):
            topic = f" --topic {quote(late[0][2])}" if cause.code == "orphan-messages" else ""
            # without a status a discard means dead ones
            discards = [
                f"`txbox discard --status {status} --consumer {quote(consumer)}{topic}`"
                for status in sorted({row[1] for row in late})
            ]
            remedy = f"{cause.remedy}; or {' and '.join(discards)}."
        some = f"{'at least ' if cut else ''}{counted(count)}"
        problem = f"{consumer} has {some} overdue by up to {age(oldest)}: {cause.why}."
        query = {"consumer": consumer}
        findings.append(Finding(cause.code, problem, remedy, "messages", query, consumer, oldest))
    return findings


async def outbox(case: Examination) -> AsyncIterator[Finding]:
    """Outgoing messages without a relay, and dead ones."""
    now = await case.crew()
    for (route,) in await case.rows("doctor_routes", limit=_NAMES):
        rows = await case.rows(
            "doctor_outgoing", route=route, limit=_LOOKED_OUTGOING, late_s=LATE_S
        )
        cut = sum(int(row[3]) for row in rows) >= _LOOKED_OUTGOING
        causes: dict[Cause, list[Any]] = defaultdict(list)
        for row in rows:
            topic, kind, cause_consumer = row[:3]
            cause = cause_of_outbox(now, case.app, route, topic, kind, cause_consumer)
            causes[cause].append(row)
        for cause, late in causes.items():
            # what is behind another message of its key waits for that one; the route's own trouble is told above
            if cause.code == "relay-away" or not any(int(row[5]) for row in late):
                continue
            some = f"{'at least ' if cut else ''}{counted(sum(int(row[3]) for row in late))}"
            topics = ", ".join(sorted({str(row[0]) for row in late})[:5])
            oldest = max(_seconds(row[4]) for row in late)
            yield Finding(
                cause.code,
                f"{topics}: {some} overdue by up to {age(oldest)}: {cause.why}.",
                f"{cause.remedy}.",
                "outbox", {"route": route or "any", "status": "due"}, topics, oldest,
            )  # fmt: skip
    for count, age_s, others in await case.rows("doctor_outgoing_dead", limit=_COUNTED):
        if count:
            yield Finding(
                "dead-outgoing",
                f"{_some(int(count), 'outgoing message')} {_is(int(count))} dead, the oldest staged {_ago(age_s)} ago.",
                "`txbox outbox list --status dead` shows the errors; then `txbox outbox retry` or `txbox outbox "
                "discard`.",
                "outbox", {"status": "dead"}, "outbox", _seconds(age_s), int(others),
            )  # fmt: skip


async def quarantine(case: Examination) -> AsyncIterator[Finding]:
    """What was set aside."""
    for (consumer,) in await case.rows("consumers"):
        ((count, age_s, newest_s),) = await case.rows(
            "doctor_quarantined", consumer=consumer, limit=_COUNTED
        )
        if count:
            name = consumer or UNMATCHED
            yield Finding(
                "quarantined-messages",
                f"{name} has {_some(int(count))} in quarantine, the oldest for {_ago(age_s)}.",
                "`txbox quarantine list` shows why; then `txbox quarantine accept` or `txbox quarantine discard`.",
                "quarantine", {"consumer": name}, name, _seconds(newest_s), int(count),
            )  # fmt: skip


#: Each part by what it looks at.
PARTS: dict[str, Callable[[Examination], AsyncIterator[Finding]]] = {
    "brokers, as running processes see them": brokers,
    "messages that wait": inbox,
    "outgoing messages that wait": outbox,
    "the quarantine": quarantine,
}


def _some(count: int, noun: str = "message") -> str:
    return (
        f"more than {counted(COUNTED_MAX, noun)}" if count > COUNTED_MAX else counted(count, noun)
    )


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _seconds(age_s: Any) -> float:
    # clocks differ: never negative
    return max(0.0, float(age_s or 0.0))


def _ago(age_s: Any) -> str:
    return age(_seconds(age_s))
