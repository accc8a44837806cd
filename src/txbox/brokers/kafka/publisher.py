"""Publishing to Kafka: an idempotent producer and a delivery report for each message."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import confluent_kafka as client
from confluent_kafka import KafkaError, KafkaException

from txbox.brokers.base import LAST_WORD_S, Batch
from txbox.brokers.envelope import KAFKA, utf8
from txbox.brokers.kafka.client import (
    ALL_BROKERS_DOWN,
    REFUSALS,
    ClientLog,
    producer_options,
    text_of,
)
from txbox.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    DestinationRefused,
    MessageRefused,
)
from txbox.message import Message

_PROBE_S = 5.0
_FULL_S = 0.05
# the client's own codes are public, even though their names start with an underscore
_UNKNOWN = {
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001
    KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
}
_PURGED = {
    KafkaError._PURGE_QUEUE,  # noqa: SLF001
    KafkaError._PURGE_INFLIGHT,  # noqa: SLF001
    KafkaError._MSG_TIMED_OUT,  # noqa: SLF001
}
#: The broker refuses a whole batch if it dislikes one of its messages, or their total size.
_OF_THE_BATCH = {
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE,
    KafkaError.INVALID_RECORD,
    KafkaError.INVALID_TIMESTAMP,
}
#: Rights, quotas and replicas: whatever the message is.
_OF_THE_TOPIC = REFUSALS | {
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.POLICY_VIOLATION,
    KafkaError.THROTTLING_QUOTA_EXCEEDED,
    KafkaError.KAFKA_STORAGE_ERROR,
    KafkaError.NOT_ENOUGH_REPLICAS,
    KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.INVALID_REQUIRED_ACKS,
}
_NEVER = _OF_THE_BATCH | {KafkaError.TOPIC_EXCEPTION, KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT}

_Report = Callable[[Any, Any], None]


class KafkaPublisher:
    """Publishes with `acks=all` and `enable.idempotence`, and waits for every delivery report.

    The key decides the partition, as in the JVM clients (`partitioner` is murmur2_random; a message
    without a key goes to any). The time is in milliseconds, None is a tombstone, and header values
    arrive as bytes.

    Guarantee: what is confirmed is on all in-sync replicas; the topic's `min.insync.replicas` decides
    what that survives. What is not confirmed in time is purged and its producer closed; messages already
    on their way may still arrive, under the same id. If messages of a partition are published again in
    order, their first arrivals are in that order.
    """

    event_prefix = KAFKA.prefix

    def __init__(self, bootstrap_servers: str, options: Mapping[str, Any]) -> None:
        config = producer_options(options)
        self._on_error = config.pop("error_cb", None)
        self._config = config | {"bootstrap.servers": bootstrap_servers}
        self._producer: client.Producer | None = None
        self._proven = False
        self._ended = False
        self._said = ""
        self.name = f"kafka:{bootstrap_servers}"

    def publish(
        self, messages: Sequence[Message[Any]], within_s: float
    ) -> Sequence[BrokerError | None]:
        if not messages:
            return []
        batch = _Batch(KAFKA.name, messages, within_s)
        until = batch.until - batch.last_word_s
        producer = self._connected(until)
        for at, record in batch.entries(_record):
            self._send(producer, record, until, partial(batch.report, at))
        if not producer.flush(max(0.0, until - time.monotonic())):
            self._send_alone(producer, batch, until)
        if len(producer) or self._ended:
            self._end(producer)
            if not batch.heard:
                # is anybody there? asked by a new producer, as the old one may still be waiting
                self._connected(time.monotonic() + LAST_WORD_S)
        self._proven = self._proven or None in batch.answers
        return batch.outcome()

    def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()
            producer.poll(0)

    # -- sending ------------------------------------------------------------------------------

    def _send(
        self, producer: client.Producer, record: dict[str, Any], until: float, report: _Report
    ) -> None:
        while True:
            try:
                producer.produce(**record, on_delivery=report)
            except BufferError:
                if time.monotonic() > until:
                    return
                # the client's queue is full; delivery reports make room
                producer.poll(_FULL_S)
            except KafkaException as error:
                report(error.args[0], None)
                return
            else:
                return

    def _send_alone(self, producer: client.Producer, batch: _Batch, until: float) -> None:
        """Resend what was refused as part of a batch, each message in a batch of its own."""
        suspects = batch.suspects()
        for at, unconfirmed in suspects.items():
            batch.answers[at] = unconfirmed
        for at in suspects:
            if time.monotonic() > until:
                return
            self._send(producer, _record(batch.messages[at]), until, partial(batch.report, at))
            if producer.flush(max(0.0, until - time.monotonic())):
                return

    # -- the producer -------------------------------------------------------------------------

    def _connected(self, until: float) -> client.Producer:
        if self._producer is not None and self._ended:
            self._end(self._producer)
        producer = self._producer
        if producer is None:
            try:
                producer = client.Producer(
                    self._config | {"error_cb": self._on_client_error}, logger=ClientLog()
                )
            except (KafkaException, TypeError, ValueError) as error:
                raise ConfigurationError(
                    f"Kafka rejects its options ({text_of(error)}): correct those of Kafka(…)."
                ) from error
            self._producer, self._proven, self._ended = producer, False, False
        if not self._proven:
            within_s = max(0.05, min(_PROBE_S, until - time.monotonic()))
            try:
                producer.list_topics("__consumer_offsets", timeout=within_s)
            except KafkaException as error:
                said = f"; it said: {self._said}" if self._said else ""
                raise BrokerUnavailable(
                    f"No Kafka broker answers ({text_of(error)}{said})."
                ) from error
            finally:
                if self._ended:
                    self._producer = None
            self._proven = True
        return producer

    def _end(self, producer: client.Producer) -> None:
        """Purge: what is not confirmed must not be sent later, and an idempotent producer tolerates no gaps."""
        producer.purge()
        producer.poll(0)
        self._producer = None

    def _on_client_error(self, error: KafkaError) -> None:
        """Called by the client during poll and flush."""
        self._said = error.str()
        if error.code() == ALL_BROKERS_DOWN:
            self._proven = False
        if error.fatal():
            self._ended = True
        if self._on_error is not None:
            self._on_error(error)


class _Batch(Batch):
    """The delivery reports of one call."""

    def __init__(self, broker: str, messages: Sequence[Message[Any]], within_s: float) -> None:
        super().__init__(broker, messages, within_s)
        self._refused: dict[tuple[str, int], list[int]] = defaultdict(list)

    def report(self, at: int, error: KafkaError | None, _: object) -> None:
        """Record a delivery report. One that says the client gave up is not an answer from the broker."""
        topic = self.messages[at].topic
        if error is None:
            self.answer(at, None)
        elif error.code() not in _PURGED:
            self.answer(at, _error_of(error, topic))
            if error.code() in _OF_THE_BATCH:
                self._refused[topic, error.code()].append(at)

    def suspects(self) -> dict[int, BrokerError | None]:
        """Return the messages that may have been refused because of a neighbour, as unconfirmed again."""
        # a message that was refused alone was already a batch of its own
        return {
            at: self._unconfirmed[at]
            for refused in self._refused.values()
            if len(refused) > 1
            for at in refused
        }


def _record(message: Message[Any]) -> dict[str, Any]:
    record: dict[str, Any] = {
        "topic": message.topic,
        "value": message.payload,
        "key": None if message.key is None else utf8(message.key),
        "headers": [
            (name, utf8(value) if isinstance(value, str) else value)
            for name, value in KAFKA.headers(message)
        ],
    }
    for text in (message.topic, *message.headers.names()):
        if b"\0" in utf8(text):
            raise MessageRefused("Kafka does not allow NUL in a topic or a header name.")
    if message.time is not None:
        # 0 would mean now, and times before it do not exist
        record["timestamp"] = max(0, int(message.time.timestamp() * 1000))
    return record


def _error_of(error: KafkaError, topic: str) -> BrokerError:
    code, text = error.code(), error.str()
    if code in _NEVER:
        return MessageRefused(
            f"Kafka will not accept the message for topic {topic!r} ({text}): "
            "make it smaller, or correct its topic, key or time."
        )
    if code in _UNKNOWN:
        return DestinationRefused(f"Kafka has no topic {topic!r} ({text}): create it.")
    if code in _OF_THE_TOPIC:
        return DestinationRefused(f"Kafka takes no message for topic {topic!r} ({text}).")
    return BrokerError(f"Kafka did not accept the message for topic {topic!r} ({text}).")
