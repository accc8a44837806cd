"""Rows that wait: for a decision, for a worker that is late, or for one that does not exist."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from shlex import quote
from typing import Any

from txbox.admin.doctor.case import Case, lasting
from txbox.admin.doctor.finding import Finding
from txbox.admin.reader import Application
from txbox.admin.views import UNMATCHED, counted
from txbox.store import activity

# rows are counted up to this, and of each consumer and status so many are looked at: each may be a page of its own
_COUNTED, _LOOKED = 1_000, 100
_NAMES = 500
# due for so long without having been taken: nobody takes them
_LATE_S = 300.0
_PRUNED_WITHIN_S = 86_400.0


@dataclass(slots=True)
class _Many:
    """Some rows: how many, since when, and how many of them are late."""

    count: int = 0
    age_s: float = 0.0
    late: int = 0

    def add(self, count: Any, age_s: Any, late: Any = 0) -> None:
        self.count += int(count)
        # a row that arrives between two clocks has no negative age
        self.age_s = max(self.age_s, float(age_s or 0.0))
        self.late += int(late)

    def said(self, most: int = _COUNTED) -> str:
        return _at_least(self.count, most)


def _at_least(count: int, most: int) -> str:
    return f"{'at least ' if count >= most else ''}{counted(count)}"


async def inbox(case: Case) -> AsyncIterator[Finding]:
    """Messages that wait for a decision, for a worker, or for a handler that is not there."""
    clock_s, paused = await activity.pauses(case.db, case.dialect)
    for pause in paused:
        yield _paused(pause, clock_s)
    held = {pause.consumer for pause in paused}
    for status, consumer in await case.rows("doctor_consumers", limit=_NAMES):
        found = await case.rows(
            "doctor_messages", status=status, consumer=consumer, limit=_LOOKED, counted=_COUNTED, late_s=_LATE_S,
        )  # fmt: skip
        every = _Many()
        kinds: dict[tuple[str, str | None], _Many] = defaultdict(_Many)
        for topic, kind, *of_kind, total in found:
            kinds[topic, kind].add(*of_kind)
            every.add(*of_kind)
            every.count = int(total)
        if status == "dead":
            yield _dead(consumer, every)
        elif every.late and status == "processing":
            yield _expired(consumer, every)
        elif every.late and consumer not in held:
            for finding in _late(case.app if case.known else None, consumer, every, kinds):
                yield finding


def _paused(pause: activity.Pause, clock_s: float) -> Finding:
    why = f": {pause.reason}" if pause.reason else ""
    return Finding(
        "consumer-paused",
        f"{pause.consumer} was paused {lasting(clock_s - pause.paused_at.timestamp())} ago by {pause.actor}{why}, and "
        "its messages wait.",
        f"`txbox resume {quote(pause.consumer)}`.",
    )


def _dead(consumer: str, dead: _Many) -> Finding:
    return Finding(
        "dead-messages",
        f"{consumer} has given up {dead.said()}, the oldest received {lasting(dead.age_s)} ago: somebody must decide.",
        f"`txbox list --consumer {quote(consumer)} --status dead` shows why; then `txbox retry` or `txbox discard`.",
    )


def _expired(consumer: str, rows: _Many) -> Finding:
    return Finding(
        "lease-expired",
        f"Workers of {consumer} vanished in the middle of {_at_least(rows.late, _LOOKED)} more than "
        f"{lasting(_LATE_S)} ago, and nobody has put these back.",
        "Have `txbox run` or `txbox maintain` running, or `txbox rescue` once.",
    )


def _late(
    app: Application | None,
    consumer: str,
    every: _Many,
    kinds: dict[tuple[str, str | None], _Many],
) -> list[Finding]:
    handlers = None if app is None else app.handlers.consumers().get(consumer)
    if app is not None and handlers is None:
        return [
            Finding(
                "orphan-consumer",
                f"{every.said()} of {consumer} wait, the oldest received {lasting(every.age_s)} ago, and no handler of "
                "this App has that consumer.",
                f"Run the App that has it, register it again, or `txbox discard --consumer {quote(consumer)}`.",
            )
        ]
    if app is not None:
        left = {
            kind: many
            for kind, many in kinds.items()
            if many.late and not app.handlers.matching(*kind, consumer)
        }
        if left:
            return [_unmatched(consumer, *kind, many) for kind, many in left.items()]
        if handlers is not None and any(handler.options.in_order for handler in handlers):
            # behind the head of its key a row is due for as long as that takes
            return []
    return [
        Finding(
            "inbox-overdue",
            f"{_at_least(every.late, _LOOKED)} of {consumer} {'has' if every.late == 1 else 'have'} been due for more "
            f"than {lasting(_LATE_S)}: no worker of it runs, or it is behind.",
            "Have `txbox run` running; more of them, or `concurrency=`, when it does.",
        )
    ]


def _unmatched(consumer: str, topic: str, kind: str | None, many: _Many) -> Finding:
    return Finding(
        "orphan-messages",
        f"{many.said(_LOOKED)} of {consumer} wait, the oldest received {lasting(many.age_s)} ago, and none of its "
        f"handlers takes topic {topic!r}" + ("." if kind is None else f" with type {kind!r}."),
        f"Register a handler for it, or `txbox discard --consumer {quote(consumer)} --topic {quote(topic)}`.",
    )


async def outbox(case: Case) -> AsyncIterator[Finding]:
    """Outgoing messages that no relay takes, and those that were given up."""
    for (route,) in await case.rows("doctor_routes", limit=_NAMES):
        strays: dict[str, _Many] = defaultdict(_Many)
        late = _Many()
        for topic, kind, cause, *figures in await case.rows(
            "doctor_outgoing", route=route, limit=_COUNTED, late_s=_LATE_S
        ):
            many = _Many()
            many.add(*figures)
            if many.late:
                taken = not case.known or _taken(case.app, route, topic, kind, cause)
                (late if taken else strays[topic]).add(*figures)
        for topic, many in strays.items():
            yield _stray(route, topic, many)
        if late.late:
            yield Finding(
                "outbox-overdue",
                f"{late.late:,} outgoing messages of the route {route or 'any'} have been due for more than "
                f"{lasting(_LATE_S)} without an attempt: no relay of it runs, or its broker is away.",
                "Have `txbox run` or `txbox relay` of the App with this route running.",
            )
    (row,) = await case.rows("doctor_outgoing_dead", limit=_COUNTED)
    dead = _Many()
    dead.add(*row)
    if dead.count:
        yield Finding(
            "dead-outgoing",
            f"Relays have given up {dead.said()}, the oldest staged {lasting(dead.age_s)} ago: somebody must decide.",
            "`txbox outbox list --status dead` shows why; then `txbox outbox retry` or `txbox outbox discard`.",
        )


def _taken(app: Application, route: str, topic: str, kind: str | None, cause: str | None) -> bool:
    """Say whether a relay of this App takes such rows, now or once it has adopted them."""
    for served in app.routes.all():
        if served.name != route and (route or not served.names(topic)):
            continue
        if served.destination is not None or app.handlers.matching(topic, kind):
            return True
    return app.routes.adopts(route, topic, kind, cause)


def _stray(route: str, topic: str, many: _Many) -> Finding:
    why = f"the route {route!r}" if route else "any App that publishes it"
    return Finding(
        "orphan-route",
        f"{many.said()} of topic {topic!r} wait for {why}, the oldest staged {lasting(many.age_s)} ago, and this App "
        "has none such.",
        "Run the App that has it, `app.publish` the topic, or `txbox outbox reroute` them.",
    )


async def quarantine(case: Case) -> AsyncIterator[Finding]:
    """What was set aside."""
    for consumer, *figures in await case.rows("doctor_quarantined", limit=_COUNTED):
        many = _Many()
        many.add(*figures)
        yield Finding(
            "quarantined-messages",
            f"{consumer or UNMATCHED} has {many.said()} in quarantine, the oldest for {lasting(many.age_s)}: somebody "
            "must decide.",
            "`txbox quarantine list` shows why; then `txbox quarantine accept` or `txbox quarantine discard`.",
        )


async def pruning(case: Case) -> AsyncIterator[Finding]:
    """Whether somebody prunes."""
    known = {str(what): float(value) for what, value in await case.rows("doctor_pruning")}
    every_s, ran_s = case.app.retention.every.total_seconds(), known.get("ran", math.inf)
    within_s = max(_PRUNED_WITHIN_S, 4 * every_s)
    if not known["rows"] or min(known["tables"], ran_s) <= within_s:
        return
    last = "has never run" if math.isinf(ran_s) else f"ran {lasting(ran_s)} ago"
    yield Finding(
        "pruning-stopped",
        f"Pruning {last}, and is due every {lasting(every_s)}: the tables grow without bound.",
        "Have `txbox run` or `txbox maintain` running, or `txbox prune` once.",
    )
