"""The settings of an App, checked without a connection: a worker refuses to start with an error among these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta

from txbox.admin.doctor.finding import Finding
from txbox.admin.reader import Application
from txbox.brokers.base import Source
from txbox.effects import PREFIX
from txbox.errors import ConfigurationError
from txbox.handlers import Handlers


def time_outs(app: Application) -> Iterator[Finding]:
    """Waiting must last longer than what is waited for: claim < handler < lease.

    The database ends an idle transaction of a handler after the lease (promise 4.2), so the
    transaction's own time-out has its place by itself.
    """
    claim, lease = app.limits.lock_timeout, app.lease.duration
    if claim >= lease:
        yield Finding(
            "time-out-order",
            f"Limits.lock_timeout is {_s(claim)} and Lease.duration {_s(lease)}: a claim must give up "
            "before a lease runs out.",
            "Make the first shorter or the second longer.",
        )
    for handler in app.handlers:
        timeout = handler.options.timeout
        if timeout is None:
            continue
        if claim >= timeout:
            yield Finding(
                "time-out-order",
                f"Limits.lock_timeout is {_s(claim)} and timeout= of {handler.name} {_s(timeout)}: waiting "
                "for another run of a message must not take longer than a run may.",
                "Make the first shorter.",
            )
        if timeout >= lease:
            yield Finding(
                "time-out-order",
                f"timeout= of {handler.name} is {_s(timeout)} and Lease.duration {_s(lease)}: a run must end "
                "before its lease.",
                "Make the second longer.",
            )


def redelivery(app: Application, source: Source) -> Iterator[Finding]:
    """The broker must wait longer than a run may last, or than the worker lets it wait."""
    redelivery_s, tend_every_s = source.redelivery_s, source.tend_every_s
    if redelivery_s is None:
        return
    lease = app.lease.duration
    if tend_every_s is not None and tend_every_s >= redelivery_s:
        yield Finding(
            "time-out-redelivery",
            f"{source.name} delivers again after {redelivery_s:g} s, but is told of what is in flight only "
            f"every {tend_every_s:g} s.",
            "Make its time-out longer.",
        )
    if tend_every_s is None and lease.total_seconds() >= redelivery_s:
        yield Finding(
            "time-out-redelivery",
            f"{source.name} delivers again after {redelivery_s:g} s and Lease.duration is {_s(lease)}: a run "
            "must end before the broker gives its message to another.",
            "Make the second shorter or the broker's time-out longer.",
        )


def order(handlers: Handlers, source: Source, topics: Sequence[str]) -> Iterator[Finding]:
    """A source must keep the order that handlers ask for."""
    for handler in handlers:
        if not handler.options.ordered:
            continue
        for topic in topics if handler.topic == "*" else (handler.topic,):
            if (topic in topics or "*" in topics) and not source.keeps_order(topic):
                yield Finding(
                    "order-not-kept",
                    f"{handler.name} is ordered, but {source.name} may give messages of one key of topic "
                    f"{topic!r} to several consumers at once.",
                    "Use a source that keeps them together (docs/howto/order.md), or order by version with sequence=.",
                )


def grace(app: Application, given: timedelta) -> Iterator[Finding]:
    """A handler that may run longer than a drain waits is cut off by each deployment."""
    for handler in app.handlers:
        timeout = handler.options.timeout
        if timeout is not None and timeout > given:
            yield Finding(
                "time-out-grace",
                f"timeout= of {handler.name} is {_s(timeout)} and the grace of a drain {_s(given)}: a run that "
                "takes its time is cut off by each stop, and begins again.",
                f"`txbox run --grace {timeout.total_seconds() + 5:g}s`, and as long in what sends the SIGTERM.",
            )


def weak_ids(handlers: Handlers) -> Iterator[Finding]:
    """Ids of the transport name a delivery and not an event: a producer that sends again passes as new."""
    for handler in handlers:
        if handler.options.weak_ids:
            yield Finding(
                "weak-ids",
                f"{handler.name} takes the broker's coordinates for an id where a message has none: what a producer "
                "sends twice is processed twice.",
                "Have the producer set a message-id, name one with message_id=, and leave weak_ids=True out.",
            )


def topics_of(handlers: Handlers, source: Source, wanted: Sequence[str] | None) -> Sequence[str]:
    """Return the topics to ask a source for; `wanted` are those that `app.consume` names.

    Raises:
        ConfigurationError: one has no handler, or the source cannot deliver it.
    """
    known, deliverable = handlers.topics(), source.topics
    if wanted is None:
        # no broker has the effects: their rows are staged in the table
        of_sources = tuple(topic for topic in known if not topic.startswith(PREFIX))
        wanted = of_sources if deliverable is None else tuple(deliverable)
    for topic in wanted:
        if topic != "*" and "*" not in known and topic not in known:
            raise ConfigurationError(
                f"{source.name} delivers topic {topic!r}, which no handler consumes: "
                f"register a handler for it, or name another topic ({_listed(known)})."
            )
        if deliverable is not None and topic != "*" and topic not in deliverable:
            raise ConfigurationError(
                f"{source.name} cannot deliver topic {topic!r}, only {_listed(deliverable)}: "
                "set topic= on the source."
            )
    return wanted


def _s(duration: timedelta) -> str:
    return f"{duration.total_seconds():g} s"


def _listed(topics: Sequence[str]) -> str:
    return ", ".join(map(repr, topics))
