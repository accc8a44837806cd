"""An App's settings, and those of its brokers against what the App relies on."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import starmap
from typing import Any, NamedTuple

from txbox.admin.doctor import Diagnosis, Finding
from txbox.admin.reader import Application
from txbox.brokers.facts import Examinable, Facts
from txbox.errors import BrokerError, ConfigurationError
from txbox.handlers import Handlers, conflicts
from txbox.text import capitalized, lasting


def examine_app(app: Application, diagnosis: Diagnosis, grace: timedelta | None) -> None:
    """Examine the settings of an App and of its brokers.

    Args:
        grace: how long a drain may take, if that is known.
    """
    findings = diagnosis.findings
    findings += starmap(Finding, conflicts.time_outs(app))
    findings += _weak_ids(app.handlers)
    if grace is not None:
        findings += _cut_off(app, grace)
    _sources(app, diagnosis)
    _destinations(app, diagnosis)


def _cut_off(app: Application, grace: timedelta) -> Iterator[Finding]:
    """A handler that may run longer than a drain waits is cut off by each deployment."""
    grace_s = grace.total_seconds()
    for handler in app.handlers:
        timeout = handler.options.timeout
        if timeout is not None and timeout > grace:
            timeout_s = timeout.total_seconds()
            yield Finding(
                "time-out-grace",
                f"timeout= of {handler.name} is {lasting(timeout_s)} and the grace of a drain {lasting(grace_s)}: a "
                "run that takes its time is cut off by each stop, and begins again.",
                f"`txbox run --grace {timeout_s + 5:g}s`, and as long in what sends the SIGTERM.",
            )


def _weak_ids(handlers: Handlers) -> Iterator[Finding]:
    """Ids of the transport name a delivery and not an event: a producer that sends again passes as new."""
    for handler in handlers:
        if handler.options.weak_ids:
            yield Finding(
                "weak-ids",
                f"{handler.name} takes the broker's coordinates for an id where a message has none: what a producer "
                "sends twice is processed twice.",
                "Have the producer set a message-id, name one with message_id=, and leave weak_ids=True out.",
            )


class _Rule(NamedTuple):
    """What a broker is set to, and when that does not fit.

    Attributes:
        fact: a field of `Facts`.
        wrong: compares the fact with the limit.
        limit: in the unit of the fact; or the name of the App's setting.
        problem, remedy: with {where}, {fact} and {limit}; {days} is the next whole day after the fact.
    """

    code: str
    fact: str
    wrong: Callable[[Any, Any], bool]
    limit: float | str
    problem: str
    remedy: str


def _endless(fact: float, _: float) -> bool:
    return math.isinf(fact)


def _longer(fact: float, limit: float) -> bool:
    return limit < fact < math.inf


_MISSING = _Rule(
    "topic-missing", "found", operator.is_, False,
    "{where} does not exist.",
    "Create it, or correct the topic.",
)  # fmt: skip
_OF_SOURCES = (
    _Rule(
        "auto-ack", "acknowledged", operator.is_, False,
        "{where} acknowledges a message by delivering it{said}: what a worker has received when it crashes is lost.",
        "Have each message acknowledged by itself: delete the consumer, and let txbox create it.",
    ),
    _Rule(
        "not-durable", "durable", operator.is_, False,
        "{where} is gone when its broker restarts{said}, with all that waits in it.",
        "Declare it durable, under another name or after it is deleted.",
    ),
    _Rule(
        "broker-drops", "overflows", operator.is_not, False,
        "{where} drops its oldest messages when it is full{said}: a longer outage loses them.",
        "Take the limit away, or have the queue refuse what is too much (x-overflow=reject-publish).",
    ),
    _Rule(
        # a weekend's outage is longer; this one is anybody's
        "broker-drops", "kept_s", operator.lt, 3600.0,
        "{where} drops after {fact} what nobody has received{said}: a longer outage loses messages.",
        "Have the broker keep them for longer than an outage may last.",
    ),
    _Rule(
        # crashes count as deliveries, too
        "delivery-limit", "deliveries_max", operator.lt, 20,
        "{where} gives a message up after {fact} deliveries{said}, and crashes and deployments count: attempts are "
        "counted in the database.",
        "Take the limit away, or make it {limit} or more.",
    ),
    _Rule(
        "time-out-redelivery", "redelivery_s", operator.le, "limits.lock_timeout",
        "{where} delivers again after {fact}{said}, and a claim may wait {limit} (Limits.lock_timeout): a message that "
        "waits comes a second time.",
        "Make the broker's time-out longer, or Limits.lock_timeout shorter.",
    ),
    _Rule(
        "replay-unbounded", "replay_s", _endless, "retention.processed",
        "{where} keeps messages for ever{said}, and Retention.processed is {limit}: who replays older ones processes "
        "them again.",
        "Bound it, or replay no further back than the retention.",
    ),
    _Rule(
        "retention-too-short", "replay_s", _longer, "retention.processed",
        "{where} can deliver again what is {fact} old{said}, and Retention.processed is {limit}: what comes again "
        "after that is processed again.",
        "`Retention(processed=timedelta(days={days}))`, or let the broker keep less.",
    ),
)  # fmt: skip
_OF_DESTINATIONS = (
    _Rule(
        "duplicate-window", "duplicates_s", operator.lt, "relaying.lease",
        "{where} knows a message by its id for {fact}{said}, and a relay that dies sends again after {limit} "
        "(RelayPolicy.lease): consumers see it twice.",
        "Make the window longer than the lease; consumers with an inbox take the second one as a duplicate.",
    ),
)  # fmt: skip


def _judged(
    app: Application, rules: Sequence[_Rule], broker: str, facts: Facts
) -> Iterator[Finding]:
    """Compare the settings of one topic with what the App relies on."""
    for rule in rules if facts.found else (_MISSING,):
        fact, limit = getattr(facts, rule.fact), rule.limit
        if isinstance(limit, str):
            limit = float(operator.attrgetter(limit)(app).total_seconds())
        if fact is None or not rule.wrong(fact, limit):
            continue
        said, seconds = facts.said.get(rule.fact), rule.fact.endswith("_s")
        values = {
            "where": f"{facts.topic!r} of {broker}",
            "fact": lasting(fact) if seconds and fact < math.inf else fact,
            "limit": lasting(limit) if seconds else limit,
            "said": f" ({said})" if said else "",
            "days": math.ceil(fact / 86400) + 1 if fact < math.inf else None,
        }
        yield Finding(rule.code, rule.problem.format(**values), rule.remedy.format(**values))


def _sources(app: Application, diagnosis: Diagnosis) -> None:
    """Check each source, and the settings of its topics."""
    for consumption in app.consumptions:
        source = consumption.source
        diagnosis.findings += starmap(Finding, conflicts.redelivery(app, source))
        try:
            topics = conflicts.topics_of(app.handlers, source, consumption.topics)
        except ConfigurationError as error:
            remedy = capitalized(error.remedy)
            diagnosis.findings.append(Finding("topic-unhandled", f"{error.problem}.", remedy))
            continue
        diagnosis.findings += starmap(Finding, conflicts.order(app.handlers, source, topics))
        for facts in _examine(source, source.name, topics, diagnosis):
            diagnosis.findings += _judged(app, _OF_SOURCES, source.name, facts)


def _destinations(app: Application, diagnosis: Diagnosis) -> None:
    """Check the settings of the topics that are published to."""
    for route in app.routes.all():
        if route.destination is not None and route.topics and not route.others:
            for facts in _examine(route.destination, route.name, route.topics, diagnosis):
                diagnosis.findings += _judged(app, _OF_DESTINATIONS, route.name, facts)


def _examine(
    broker: object, name: str, topics: Sequence[str], diagnosis: Diagnosis
) -> Sequence[Facts]:
    if not isinstance(broker, Examinable):
        return ()
    try:
        examined = broker.examine(topics)
    except (BrokerError, ConfigurationError) as error:
        diagnosis.not_checked(f"the settings of {name}", str(error))
        return ()
    for facts in examined:
        for sentence in facts.unknown:
            diagnosis.not_checked(f"{facts.topic} of {name}", sentence)
    return examined
