"""What is checked before anything is consumed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from txbox.app import App, Consumption
from txbox.brokers.base import Source
from txbox.effects import PREFIX
from txbox.errors import ConfigurationError, StoreError
from txbox.worker.driving import Driver


def check_handlers(app: App) -> None:
    """Check that there are handlers, and sync or async connections as they need.

    Raises:
        ConfigurationError: there are none.
    """
    if not len(app.handlers):
        raise ConfigurationError(
            "The app has no handlers: decorate a function with @app.handler(topic, consumer=…)."
        )
    for handler in app.handlers:
        connections = app.database.asynchronous if handler.is_async else app.database.sync
        if connections is None:
            kind = "async" if handler.is_async else "sync"
            raise ConfigurationError(
                f"{handler.name} is {kind}, but {app.database.name} has no {kind} connections: "
                "give App() a URL, or an object that has them."
            )


def topics_of(app: App, consumption: Consumption) -> Sequence[str]:
    """Return the topics to ask a source for.

    Raises:
        ConfigurationError: one has no handler, or the source cannot deliver it.
    """
    source = consumption.source
    known, deliverable = app.handlers.topics(), source.topics
    wanted = consumption.topics
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


def check_time_outs(app: App) -> None:
    """Check that whoever waits waits longer than what is waited for: claim < handler < lease.

    The database ends an idle transaction of a handler after the lease (SEMANTICS 4.2), so the
    transaction's own time-out has its place by itself.

    Raises:
        ConfigurationError: the sentence names both values.
    """
    claim, lease = app.limits.lock_timeout, app.lease.duration
    if claim >= lease:
        raise ConfigurationError(
            f"Limits.lock_timeout is {_s(claim)} and Lease.duration {_s(lease)}: a claim must give up "
            "before a lease runs out, make the first shorter or the second longer."
        )
    for handler in app.handlers:
        timeout = handler.options.timeout
        if timeout is None:
            continue
        if claim >= timeout:
            raise ConfigurationError(
                f"Limits.lock_timeout is {_s(claim)} and timeout= of {handler.name} {_s(timeout)}: waiting "
                "for another run of a message must not take longer than a run may, make the first shorter."
            )
        if timeout >= lease:
            raise ConfigurationError(
                f"timeout= of {handler.name} is {_s(timeout)} and Lease.duration {_s(lease)}: a run must end "
                "before its lease, make the second longer."
            )


def check_order(app: App, source: Source, topics: Sequence[str]) -> None:
    """Check that a source keeps the order that handlers ask for.

    Raises:
        ConfigurationError: it shares a topic's messages out among consumers without regard to keys.
    """
    for handler in app.handlers:
        if not handler.options.ordered:
            continue
        for topic in topics if handler.topic == "*" else (handler.topic,):
            if (topic in topics or "*" in topics) and not source.keeps_order(topic):
                raise ConfigurationError(
                    f"{handler.name} is ordered, but {source.name} may give messages of one key of topic "
                    f"{topic!r} to several consumers at once: use a source that keeps them together "
                    "(docs/howto/order.md), or order by version with sequence=."
                )


def check_redelivery(app: App, source: Source) -> None:
    """Check that the broker waits longer than a run may last, or than the worker lets it wait.

    Raises:
        ConfigurationError: the sentence names both values.
    """
    redelivery_s, tend_every_s = source.redelivery_s, source.tend_every_s
    if redelivery_s is None:
        return
    if tend_every_s is not None and tend_every_s >= redelivery_s:
        raise ConfigurationError(
            f"{source.name} delivers again after {redelivery_s:g} s, but is told of what is in flight only "
            f"every {tend_every_s:g} s: make its time-out longer."
        )
    lease = app.lease.duration
    if tend_every_s is None and lease.total_seconds() >= redelivery_s:
        raise ConfigurationError(
            f"{source.name} delivers again after {redelivery_s:g} s and Lease.duration is {_s(lease)}: a run "
            "must end before the broker gives its message to another, make the second shorter or the "
            "broker's time-out longer."
        )


def check_database(app: App, driver: Driver) -> None:
    """Check that the database answers and holds tables that fit.

    Raises:
        StoreError: it does not answer.
        SchemaError: the message contains the command to run.
    """
    try:
        driver.perform(app.check_schema())
    except StoreError as error:
        raise StoreError(
            f"The database {app.database.name} cannot be used ({error}): "
            "check that it runs and that the URL is right.",
            fault=error.fault,
            code=error.code,
        ) from error


def _s(duration: timedelta) -> str:
    return f"{duration.total_seconds():g} s"


def _listed(topics: Sequence[str]) -> str:
    return ", ".join(map(repr, topics))
