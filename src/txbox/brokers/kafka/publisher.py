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
    NotTried,
)
from txbox.message import Message

_PROBE_S = 5.0
_FULL_S = 0.05
# how often it is looked, while confirmations are waited for, whether the producer can still get any
_LOOK_S = 0.05
# so long the reports of what was under way are waited for when the producer has ended
_REPORTS_S = 1.0
# calls to a producer, each of which may end it
_ROUNDS = 2
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
#: The producer has ended; that says nothing of the message.
_ENDED = {
    KafkaError._FATAL,  # noqa: SLF001
    KafkaError._GAPLESS_GUARANTEE,  # noqa: SLF001
    KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
    KafkaError.UNKNOWN_PRODUCER_ID,
    KafkaError.INVALID_PRODUCER_EPOCH,
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
#: Topic, value, key, time in milliseconds and headers.
_Record = tuple[str, bytes | None, bytes | None, int, list[tuple[str, str | bytes | None]]]
_Entry = tuple[int, _Record]


class KafkaPublisher:
    """Publishes with `acks=all`, `enable.idempotence` and no gaps, and waits for every delivery report.

    The key decides the partition, as in the JVM clients (`partitioner` is murmur2_random; a message
    without a key goes to any). The time is in milliseconds, None is a tombstone, and header values
    arrive as bytes.

    Guarantee: what is confirmed is on all in-sync replicas; the topic's `min.insync.replicas` decides
    what that survives. What is not confirmed in time is purged and its producer closed; messages already
    on their way may still arrive, under the same id. A partition takes nothing behind a message that it
    did not take: that ends the producer (`enable.gapless.guarantee`), and another one goes on. So if
    messages of a key are published again in order, their first arrivals are in that order.

    Source: docs/decisions/0056-runs-of-a-key.md
    """

    event_prefix = KAFKA.prefix
    keeps_runs = True

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
        try:
            self._publish(batch, until)
        except BrokerUnavailable:
            # otherwise what is confirmed would be sent again
            if not batch.heard:
                raise
        if self._producer is None and not batch.heard:
            # is anybody there? asked by a new producer, as the old one may still be waiting
            self._connected(time.monotonic() + LAST_WORD_S)
        self._proven = self._proven or None in batch.answers
        return batch.outcome()

    def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            self._end(producer)

    # -- sending ------------------------------------------------------------------------------

    def _publish(self, batch: _Batch, until: float) -> None:
        """Send all; where one of them ends the producer, send the others once more by another one."""
        entries = list(batch.entries(_record))
        for _ in range(_ROUNDS):
            if not entries or self._sent(entries, batch, until):
                return
            self._send_alone(batch, until)
            # those refused alone were not refused for a neighbour
            batch.refused.clear()
            entries = [entry for entry in entries if batch.is_open(entry[0])]
            if time.monotonic() > until:
                break
        if not batch.heard:
            # no message has ended it: sent again at once, all of them would go round for ever
            raise BrokerUnavailable(f"Kafka has ended the producer ({self._said}).")
        for at, _ in entries:
            batch.answers[at] = NotTried("The producer ended at another message.")

    def _sent(self, entries: Sequence[_Entry], batch: _Batch, until: float) -> bool:
        """Send messages and wait for their reports; returns False if one of them has ended the producer."""
        producer = self._connected(until)
        for at, record in entries:
            if batch.is_behind(at):
                continue
            if not self._send(producer, record, until, partial(batch.report, at)):
                break
        while not self._ended and (left_s := until - time.monotonic()) > 0:
            try:
                if not producer.flush(min(_LOOK_S, left_s)):
                    break
            except KafkaException as error:
                if not error.args[0].fatal():
                    raise
                self._ended, self._said = True, error.args[0].str()
        ended = self._ended
        until = min(until, time.monotonic() + _REPORTS_S)
        while ended and len(producer) and time.monotonic() < until:
            # what was under way still gets its answer, and the message that ended it
            self._poll(producer, _LOOK_S)
        if ended or len(producer):
            self._end(producer)
        return not ended

    def _send(
        self, producer: client.Producer, record: _Record, until: float, report: _Report
    ) -> bool:
        """Queue a message; returns False if there was no room for it in time."""
        while True:
            try:
                topic, value, key, timestamp, headers = record
                producer.produce(
                    topic, value, key, on_delivery=report, timestamp=timestamp, headers=headers
                )
            except BufferError:
                if time.monotonic() > until:
                    return False
                # the client's queue is full; delivery reports make room
                self._poll(producer, _FULL_S)
            except KafkaException as error:
                report(error.args[0], None)
                return True
            else:
                return True

    def _send_alone(self, batch: _Batch, until: float) -> None:
        """Resend what was refused as part of a batch, each message in a batch of its own, in the order of its key."""
        suspects = batch.take_suspects()
        behind: set[tuple[str, str]] = set()
        for at, message in enumerate(batch.messages):
            run = None if message.key is None else (message.topic, message.key)
            if at in suspects and run not in behind:
                if time.monotonic() > until:
                    return
                self._sent([(at, _record(message))], batch, until)
            if run is not None and batch.answers[at] is not None:
                behind.add(run)

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
        self._poll(producer, 0)
        self._producer = None

    def _poll(self, producer: client.Producer, wait_s: float) -> None:
        """Serve delivery reports. The end of a producer is raised once, also by a purge: it leaves a gap."""
        try:
            producer.poll(wait_s)
        except KafkaException as error:
            if not error.args[0].fatal():
                raise
            self._ended, self._said = True, error.args[0].str()

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
        self.refused: dict[tuple[str, int], list[int]] = defaultdict(list)

    def report(self, at: int, error: KafkaError | None, _: object) -> None:
        """Record a delivery report. One that says the client gave up is not an answer from the broker."""
        if error is None:
            self.answer(at, None)
        elif error.code() not in _PURGED | _ENDED:
            topic = self.messages[at].topic
            self.answer(at, _error_of(error, topic))
            if error.code() in _OF_THE_BATCH:
                self.refused[topic, error.code()].append(at)

    def take_suspects(self) -> set[int]:
        """Return the messages that may have been refused because of a neighbour, as unconfirmed again.

        With the answer, which may have been another message's, the stop of their keys is taken back.
        """
        # a message that was refused alone was already a batch of its own
        suspects = {at for refused in self.refused.values() if len(refused) > 1 for at in refused}
        self.refused.clear()
        for at in suspects:
            self.answers[at] = self._unconfirmed[at]
            message = self.messages[at]
            if self._stopped.get((message.topic, message.key)) == at:
                del self._stopped[message.topic, message.key]
        return suspects


def _record(message: Message[Any]) -> _Record:
    for text in (message.topic, *message.headers.names()):
        if b"\0" in utf8(text):
            raise MessageRefused("Kafka does not allow NUL in a topic or a header name.")
    headers: list[tuple[str, str | bytes | None]] = [
        (name, utf8(value) if isinstance(value, str) else value)
        for name, value in KAFKA.headers(message)
    ]
    key = None if message.key is None else utf8(message.key)
    # 0 means now, and times before it do not exist
    timestamp = 0 if message.time is None else max(0, int(message.time.timestamp() * 1000))
    return message.topic, message.payload, key, timestamp, headers


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
