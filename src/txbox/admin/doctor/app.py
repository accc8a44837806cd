"""An App's settings, and those of its brokers against what the App relies on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import starmap

from txbox import settings
from txbox.admin.doctor.finding import Diagnosis, Finding
from txbox.admin.reader import Application
from txbox.brokers.base import Examinable, Facts, Source
from txbox.errors import BrokerError, ConfigurationError
from txbox.handlers import Handlers
from txbox.text import lasting


def grace(app: Application, given: timedelta) -> Iterator[Finding]:
    """A handler that may run longer than a drain waits is cut off by each deployment."""
    given_s = given.total_seconds()
    for handler in app.handlers:
        timeout = handler.options.timeout
        if timeout is not None and timeout > given:
            timeout_s = timeout.total_seconds()
            yield Finding(
                "time-out-grace",
                f"timeout= of {handler.name} is {lasting(timeout_s)} and the grace of a drain {lasting(given_s)}: a "
                "run that takes its time is cut off by each stop, and begins again.",
                f"`txbox run --grace {timeout_s + 5:g}s`, and as long in what sends the SIGTERM.",
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


# crashes count as deliveries, too
_DELIVERIES_MIN = 20
# a weekend's outage is longer; this one is anybody's
_KEPT_MIN_S = 3600.0


def sources(app: Application, diagnosis: Diagnosis) -> None:
    """Check each source, and the settings of its topics."""
    for consumption in app.consumptions:
        source = consumption.source
        diagnosis.found(starmap(Finding, settings.redelivery(app, source)))
        try:
            topics = settings.topics_of(app.handlers, source, consumption.topics)
        except ConfigurationError as error:
            problem, _, remedy = str(error).rpartition(": ")
            diagnosis.found(
                [Finding("topic-unhandled", f"{problem}.", f"{remedy[0].upper()}{remedy[1:]}")]
            )
            continue
        diagnosis.found(starmap(Finding, settings.order(app.handlers, source, topics)))
        for facts in _asked(source, source.name, topics, diagnosis):
            diagnosis.found(_consumed(app, source, facts))


def destinations(app: Application, diagnosis: Diagnosis) -> None:
    """Check the settings of the topics that are published to."""
    for route in app.routes.all():
        if route.destination is not None and route.topics and not route.others:
            for facts in _asked(route.destination, route.name, route.topics, diagnosis):
                diagnosis.found(_published(app, route.name, facts))


def _asked(
    broker: object, name: str, topics: Sequence[str], diagnosis: Diagnosis
) -> Sequence[Facts]:
    if not isinstance(broker, Examinable):
        return ()
    try:
        found = broker.examine(topics)
    except (BrokerError, ConfigurationError) as error:
        diagnosis.not_checked(f"the settings of {name}", str(error))
        return ()
    for facts in found:
        for sentence in facts.unknown:
            diagnosis.not_checked(f"{facts.topic} of {name}", sentence)
    return found


def _consumed(app: Application, source: Source, facts: Facts) -> Iterator[Finding]:
    where = f"{facts.topic!r} of {source.name}"
    if not facts.found:
        yield _missing(where)
        return
    if not facts.acknowledged:
        yield Finding(
            "auto-ack",
            f"{where} counts what it delivers as acknowledged{_said(facts, 'acknowledged')}: what a crash leaves is "
            "lost.",
            "Have each message acknowledged by itself: delete the consumer, and let txbox create it.",
        )
    if not facts.durable:
        yield Finding(
            "not-durable",
            f"{where} is gone when its broker restarts{_said(facts, 'durable')}, with all that waits in it.",
            "Declare it durable, under another name or after it is deleted.",
        )
    yield from _kept(app, where, facts)
    if facts.deliveries_max is not None and facts.deliveries_max < _DELIVERIES_MIN:
        yield Finding(
            "delivery-limit",
            f"{where} gives a message up after {facts.deliveries_max} deliveries{_said(facts, 'deliveries_max')}, and "
            "crashes and deployments count: attempts are counted in the database.",
            f"Take the limit away, or make it {_DELIVERIES_MIN} or more.",
        )
    claim_s = app.limits.lock_timeout.total_seconds()
    if facts.redelivery_s is not None and facts.redelivery_s <= claim_s:
        yield Finding(
            "time-out-redelivery",
            f"{where} delivers again after {lasting(facts.redelivery_s)}{_said(facts, 'redelivery_s')}, and a claim "
            f"may wait {lasting(claim_s)} (Limits.lock_timeout): a message that waits comes a second time.",
            "Make the broker's time-out longer, or Limits.lock_timeout shorter.",
        )


def _kept(app: Application, where: str, facts: Facts) -> Iterator[Finding]:
    kept_s = app.retention.processed.total_seconds()
    if facts.replay_s is not None and math.isinf(facts.replay_s):
        yield Finding(
            "replay-unbounded",
            f"{where} keeps messages without a bound in time{_said(facts, 'replay_s')}, and Retention.processed is "
            f"{lasting(kept_s)}: who replays older ones processes them again.",
            "Bound it, or replay no further back than the retention.",
        )
    elif facts.replay_s is not None and facts.replay_s > kept_s:
        yield Finding(
            "retention-too-short",
            f"{where} can deliver again what is {lasting(facts.replay_s)} old{_said(facts, 'replay_s')}, and "
            f"Retention.processed is {lasting(kept_s)}: what comes again after that is processed again.",
            f"`Retention(processed=timedelta(days={math.ceil(facts.replay_s / 86400) + 1}))`, or let the broker keep "
            "less.",
        )
    if facts.kept_s is not None and facts.kept_s < _KEPT_MIN_S:
        yield Finding(
            "broker-drops",
            f"{where} drops after {lasting(facts.kept_s)} what nobody has received{_said(facts, 'kept_s')}: a longer "
            "outage loses messages.",
            "Have the broker keep them for longer than an outage may last.",
        )
    if facts.overflows:
        yield Finding(
            "broker-drops",
            f"{where} drops its oldest messages when it is full{_said(facts, 'overflows')}: a longer outage "
            "loses them.",
            "Take the limit away, or have the queue refuse what is too much (x-overflow=reject-publish).",
        )


def _published(app: Application, route: str, facts: Facts) -> Iterator[Finding]:
    where = f"{facts.topic!r} of {route}"
    if not facts.found:
        yield _missing(where)
        return
    lease_s = app.relaying.lease.total_seconds()
    if facts.duplicates_s is not None and facts.duplicates_s < lease_s:
        yield Finding(
            "duplicate-window",
            f"{where} knows a message by its id for {lasting(facts.duplicates_s)}{_said(facts, 'duplicates_s')}, and a "
            f"relay that dies sends again after {lasting(lease_s)} (RelayPolicy.lease): consumers see it twice.",
            "Make the window longer than the lease; consumers with an inbox take the second one as a duplicate.",
        )


def _missing(where: str) -> Finding:
    return Finding(
        "topic-missing",
        f"{where} does not exist.",
        "Create it, or correct the topic.",
    )


def _said(facts: Facts, what: str) -> str:
    said = facts.said.get(what)
    return f" ({said})" if said else ""
