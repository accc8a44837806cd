"""Whether the settings of an App and its sources fit together. It needs no connection: a worker refuses to start with a
conflict, and `txbox doctor` lists them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

from txbox.brokers.base import Consumer, Source
from txbox.brokers.file import File
from txbox.brokers.local import Local
from txbox.errors import ConfigurationError
from txbox.handlers import Handlers
from txbox.identity import EFFECT_PREFIX
from txbox.policy import Lease, Limits
from txbox.text import lasting


class Configured(Protocol):
    """The part of App that these checks need."""

    handlers: Handlers
    limits: Limits
    lease: Lease


class Conflict(NamedTuple):
    """Two settings that do not fit together.

    Attributes:
        code: that of the finding of `txbox doctor`.
        problem: one sentence with both values.
        remedy: the setting to change.
    """

    code: str
    problem: str
    remedy: str

    @property
    def sentence(self) -> str:
        """Both, for an error that refuses to start."""
        return f"{self.problem} {self.remedy}"


def time_outs(app: Configured) -> Iterator[Conflict]:
    """Waiting must last longer than what is waited for: claim < handler < lease.

    The database ends an idle transaction of a handler after the lease (promise 4.2), so the
    transaction's own time-out has its place by itself.
    """
    claim, lease = app.limits.lock_timeout, app.lease.duration
    if claim >= lease:
        yield Conflict(
            "time-out-order",
            f"Limits.lock_timeout is {_length(claim)} and Lease.duration {_length(lease)}: a claim must give up "
            "before a lease runs out.",
            "Make the first shorter or the second longer.",
        )
    for handler in app.handlers:
        timeout = handler.options.timeout
        if timeout is None:
            continue
        if claim >= timeout:
            yield Conflict(
                "time-out-order",
                f"Limits.lock_timeout is {_length(claim)} and timeout= of {handler.name} {_length(timeout)}: waiting "
                "for another run of a message must not take longer than a run may.",
                "Make the first shorter.",
            )
        if timeout >= lease:
            yield Conflict(
                "time-out-order",
                f"timeout= of {handler.name} is {_length(timeout)} and Lease.duration {_length(lease)}: a run must end "
                "before its lease.",
                "Make the second longer.",
            )


def redelivery(app: Configured, source: Source | Consumer) -> Iterator[Conflict]:
    """The broker must wait longer than a run may last, or than the worker lets it wait."""
    redelivery_s, tend_every_s = source.redelivery_s, source.tend_every_s
    if redelivery_s is None:
        return
    again = f"{source.name} delivers again after {lasting(redelivery_s)}"
    lease = app.lease.duration
    if tend_every_s is not None and tend_every_s >= redelivery_s:
        yield Conflict(
            "time-out-redelivery",
            f"{again}, but in-flight extensions are sent only every {lasting(tend_every_s)}.",
            "Make its time-out longer.",
        )
    if tend_every_s is None and lease.total_seconds() >= redelivery_s:
        yield Conflict(
            "time-out-redelivery",
            f"{again} and Lease.duration is {_length(lease)}: a run must end before the broker gives its message to "
            "another.",
            "Make the second shorter or the broker's time-out longer.",
        )


def order(handlers: Handlers, source: Source, topics: Sequence[str]) -> Iterator[Conflict]:
    """A source must keep the order that handlers ask for."""
    for handler in handlers:
        if not handler.options.ordered:
            continue
        for topic in topics if handler.topic == "*" else (handler.topic,):
            if (topic in topics or "*" in topics) and not source.keeps_order(topic):
                yield Conflict(
                    "order-not-kept",
                    f"{handler.name} is ordered, but {source.name} may give messages of one key of topic "
                    f"{topic!r} to several consumers at once.",
                    "Use a source that keeps them together (docs/howto/order.md), or order by version with sequence=.",
                )


def topics_of(handlers: Handlers, source: Source, wanted: Sequence[str] | None) -> Sequence[str]:
    """Return the topics to ask a source for; `wanted` are those that `app.consume` names.

    Raises:
        ConfigurationError: one has no handler, or the source cannot deliver it.
    """
    known, deliverable = handlers.topics(), source.topics
    if deliverable is not None and (wanted is None or "*" in wanted):
        wanted = tuple(deliverable)
    elif wanted is None:
        # no broker has the effects: their rows are staged in the table
        wanted = tuple(topic for topic in known if not topic.startswith(EFFECT_PREFIX))
        if not wanted and not isinstance(source, Local):
            raise ConfigurationError(
                f"{source.name} has nothing to deliver, because no handler names a topic",
                "register a handler, or remove the source.",
            )
    for topic in wanted:
        if topic.startswith(EFFECT_PREFIX):
            raise ConfigurationError(
                f"{source.name} delivers topic {topic!r}, but topics that begin with {EFFECT_PREFIX!r} are those of "
                "effects",
                "name another topic.",
            )
        if topic != "*" and "*" not in known and topic not in known:
            raise ConfigurationError(
                f"{source.name} delivers topic {topic!r}, which no handler consumes",
                f"register a handler for it, or name another topic ({_listed(known)}).",
            )
        if deliverable is not None and topic != "*" and topic not in deliverable:
            raise ConfigurationError(
                f"{source.name} cannot deliver topic {topic!r}, only {_listed(deliverable)}",
                "set topic= on the source.",
            )
    return wanted


def names_of(sources: Sequence[tuple[Source, Sequence[str]]]) -> list[str]:
    """Return a name for each source, which no other has: its own, followed by its topics where two share that.

    Raises:
        ConfigurationError: two sources are one that only one may consume: a file, of which one would wait for the
            other, or a member of a group, which they would take from each other.
    """
    shared = Counter(source.name for source, _ in sources)
    names: list[str] = []
    for source, topics in sources:
        name = source.name
        if shared[name] > 1 and isinstance(source, File):
            raise ConfigurationError(
                f"Two sources are {name}, and one of them would wait for the other for ever: remove one, or give it "
                "another name=."
            )
        if shared[name] > 1 and source.one_process is not None:
            raise ConfigurationError(
                f"Two sources are {name}, but {source.one_process}: name all topics in one app.consume(…)."
            )
        if shared[name] > 1:
            name = f"{name} ({', '.join(topics)})"
        count = names.count(name)
        names.append(f"{name} {count + 1}" if count else name)
    return names


def _length(duration: timedelta) -> str:
    return lasting(duration.total_seconds())


def _listed(topics: Sequence[str]) -> str:
    return ", ".join(map(repr, topics))
