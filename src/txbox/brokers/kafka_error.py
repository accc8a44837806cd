"""Errors of the Kafka client: the codes that are told apart, their text, and the client's own log."""

from __future__ import annotations

import logging

from confluent_kafka import KafkaError, KafkaException

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
