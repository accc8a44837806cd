"""librdkafka, the client: which options it takes from Kafka(…), the error codes that are told apart, its log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from txbox.errors import ConfigurationError

_DEFAULTS = {
    "auto.offset.reset": "earliest",
    "isolation.level": "read_committed",
    # a commit that is waited for, when partitions are given back, waits as long for a broker that hangs
    "socket.timeout.ms": 10_000,
}
#: the only names of librdkafka and its Python client that are spelt with underscores
_UNDERSCORED = {"log_level", "error_cb", "stats_cb", "throttle_cb", "oauth_cb", "logger"}
_FORCED = {
    "enable.auto.commit": "only what is stored may be committed, and only by txbox",
    "enable.auto.offset.store": "only what is stored may be committed, and only by txbox",
}
_REFUSED = {
    "bootstrap.servers": "it is the first argument of Kafka(…)",
    "group.id": "it is group= of Kafka(…)",
    "on_commit": "txbox listens to the answers to its commits by itself",
    "auto.commit.interval.ms": "txbox commits by itself",
}
_PRODUCER_DEFAULTS: dict[str, Any] = {
    # what the JVM's clients do: a key lies in one partition, whoever publishes it
    "partitioner": "murmur2_random",
    # a topic that is not there is an answer within this, not only when the time is up
    "topic.metadata.propagation.max.ms": 3_000,
    "socket.timeout.ms": 10_000,
}
_PRODUCER_FORCED: dict[str, Any] = {"acks": "all", "enable.idempotence": True}
_ALL = ("all", "-1")
_PRODUCER_REFUSED = {
    "transactional.id": "a transaction of Kafka does not contain that of the database; duplicates are for the inbox",
    "delivery.report.only.error": "what is confirmed must be said",
    "dr_cb": "delivery reports are for txbox",
    "dr_msg_cb": "delivery reports are for txbox",
    "on_delivery": "delivery reports are for txbox",
    "queuing.strategy": "messages leave in their order",
}
#: Of librdkafka's options those that a producer does not know; it would warn about each.
_CONSUMER_ONLY = frozenset({
    "group.id", "group.instance.id", "group.protocol", "group.remote.assignor", "group.protocol.type",
    "partition.assignment.strategy", "session.timeout.ms", "heartbeat.interval.ms",
    "coordinator.query.interval.ms", "max.poll.interval.ms", "enable.auto.commit",
    "auto.commit.interval.ms", "enable.auto.offset.store", "auto.commit.enable", "queued.min.messages",
    "queued.max.messages.kbytes", "fetch.wait.max.ms", "fetch.queue.backoff.ms",
    "fetch.message.max.bytes", "max.partition.fetch.bytes", "fetch.max.bytes", "fetch.min.bytes",
    "fetch.error.backoff.ms", "isolation.level", "enable.partition.eof", "check.crcs",
    "auto.offset.reset", "consume.callback.max.messages", "allow.auto.create.topics",
})  # fmt: skip
#: And those that only a producer knows.
_PRODUCER_ONLY = frozenset({
    "enable.idempotence", "enable.gapless.guarantee", "queue.buffering.max.messages",
    "queue.buffering.max.kbytes", "queue.buffering.max.ms", "linger.ms", "message.send.max.retries",
    "retries", "queue.buffering.backpressure.threshold", "compression.codec", "compression.type",
    "compression.level", "batch.num.messages", "batch.size", "delivery.report.only.error",
    "sticky.partitioning.linger.ms", "request.required.acks", "acks", "request.timeout.ms",
    "message.timeout.ms", "delivery.timeout.ms", "queuing.strategy", "partitioner",
    "transactional.id", "transaction.timeout.ms", "dr_cb", "dr_msg_cb", "on_delivery",
})  # fmt: skip


def checked_options(options: Mapping[str, Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options by librdkafka's names, with the defaults of Kafka(…).

    Raises:
        ConfigurationError: one that is not for others to set.
    """
    given = dict(options)
    for name, value in keywords.items():
        given[name if name in _UNDERSCORED else name.replace("_", ".")] = value
    for name, why in _REFUSED.items():
        if name in given:
            raise ConfigurationError(f"Kafka takes no {name}: {why}.")
    for name, why in _FORCED.items():
        if str(given.pop(name, False)).lower() != "false":
            raise ConfigurationError(f"{name} must be off: {why}.")
        given[name] = False
    defaults: dict[str, Any] = dict(_DEFAULTS)
    if str(given.get("group.protocol", "classic")).lower() != "consumer":
        defaults["partition.assignment.strategy"] = "cooperative-sticky"
    return defaults | given


def producer_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a producer among those of Kafka(…), with its defaults.

    Raises:
        ConfigurationError: one with which a confirmation would not mean that it is kept.
    """
    wanted = {name: value for name, value in given.items() if name not in _CONSUMER_ONLY}
    for name, why in _PRODUCER_REFUSED.items():
        if name in wanted:
            raise ConfigurationError(f"Kafka publishes without {name}: {why}.")
    for name in ("acks", "request.required.acks"):
        if str(wanted.pop(name, "all")).lower() not in _ALL:
            raise ConfigurationError(
                f"{name} must be all: a message that one broker alone has confirmed can be lost with it."
            )
    if str(wanted.pop("enable.idempotence", True)).lower() != "true":
        raise ConfigurationError(
            "enable.idempotence must be true: without it a retry inside the client changes the order."
        )
    for name in ("retries", "message.send.max.retries"):
        if int(wanted.get(name, 1)) < 1:
            raise ConfigurationError(f"{name} must be 1 or more: an idempotent producer needs it.")
    for name in ("max.in.flight", "max.in.flight.requests.per.connection"):
        if not 1 <= int(wanted.get(name, 5)) <= 5:
            raise ConfigurationError(f"{name} must be 1 to 5: an idempotent producer needs it.")
    return _PRODUCER_DEFAULTS | wanted | _PRODUCER_FORCED


def consumer_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a consumer among those of Kafka(…)."""
    return {name: value for name, value in given.items() if name not in _PRODUCER_ONLY}


# The group has moved on. Which partitions are gone is said by on_revoke and on_lost, not by these:
# forgetting a partition that stays ours would let a later commit pass over what is in flight.
MOVED_ON = {
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.STALE_MEMBER_EPOCH,
    KafkaError.FENCED_MEMBER_EPOCH,
    KafkaError._STATE,  # noqa: SLF001
    KafkaError._ASSIGNMENT_LOST,  # noqa: SLF001
    KafkaError._NO_OFFSET,  # noqa: SLF001
    KafkaError.UNKNOWN_TOPIC_OR_PART,
}
REFUSALS = {
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.OFFSET_METADATA_TOO_LARGE,
}
# the client's own codes are public, their names begin with an underscore all the same
PARTITION_EOF = KafkaError._PARTITION_EOF  # noqa: SLF001
MAX_POLL_EXCEEDED = KafkaError._MAX_POLL_EXCEEDED  # noqa: SLF001
ALL_BROKERS_DOWN = KafkaError._ALL_BROKERS_DOWN  # noqa: SLF001
AUTHENTICATION = KafkaError._AUTHENTICATION  # noqa: SLF001
AUTO_OFFSET_RESET = KafkaError._AUTO_OFFSET_RESET  # noqa: SLF001
FATAL = KafkaError._FATAL  # noqa: SLF001

#: Of librdkafka's log the lines that its errors say, too: many a second while a broker is away.
_SAID_BY_ERRORS = frozenset({"FAIL", "ERROR", "REQTMOUT", "GETPID"})


class ClientLog:
    """librdkafka's log, on the logger `txbox.kafka`; given to a client as `logger=`."""

    _log = logging.getLogger("txbox.kafka")

    def log(self, level: int, text: str, facility: str, *more: str) -> None:
        known = facility in _SAID_BY_ERRORS
        self._log.log(logging.DEBUG if known else level, text, facility, *more)


def text_of(error: BaseException) -> str:
    if isinstance(error, KafkaException):
        return str(error.args[0].str())
    return str(error) or type(error).__name__
