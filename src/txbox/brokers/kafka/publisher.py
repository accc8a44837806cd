"""Publishing to Kafka: an idempotent producer, and a delivery report for each message."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import confluent_kafka as client
from confluent_kafka import KafkaError, KafkaException

from txbox.brokers.kafka.librdkafka import ALL_BROKERS_DOWN, ClientLog, producer_options, text_of
from txbox.brokers.plain import CONTENT_TYPE, MESSAGE_ID, TYPE, described, utf8
from txbox.errors import BrokerError, BrokerUnavailable, ConfigurationError, MessageRefused
from txbox.message import Message

_PROBE_S = 5.0
_LAST_WORD_S = 0.5
_FULL_S = 0.05
# the client's own codes are public, their names begin with an underscore all the same
_UNKNOWN = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
    }
)
_PURGED = frozenset(
    {
        KafkaError._PURGE_QUEUE,  # noqa: SLF001
        KafkaError._PURGE_INFLIGHT,  # noqa: SLF001
        KafkaError._MSG_TIMED_OUT,  # noqa: SLF001
    }
)
#: The broker refuses a batch as a whole when one message of it, or their sum, is not to its taste.
_OF_THE_BATCH = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
    }
)
_NEVER = _OF_THE_BATCH | {KafkaError.TOPIC_EXCEPTION, KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT}

_Answer = BrokerError | KafkaError | None


class KafkaPublisher:
    """Publishes with `acks=all` and `enable.idempotence`, and waits for every delivery report.

    The key decides the partition as the JVM's clients do (`partitioner` is murmur2_random; a message
    without a key goes to any). The id is the header `message-id`, type and content type are headers
    `type` and `content-type`, the time is the record's timestamp in milliseconds, None is a tombstone.
    Header values arrive as bytes.

    Guarantee: what is confirmed is on all in-sync replicas, so `min.insync.replicas` of the topic
    decides what that survives. What is not confirmed in time is purged, and its producer ended; what
    of it was on its way may still arrive, under the same id. Messages of a partition that are
    published again in their order first arrive in that order.
    """

    event_prefix = "ce_"

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
        # a part of the time is for asking whether anybody is there at all
        until = time.monotonic() + within_s - min(_LAST_WORD_S, within_s / 4)
        producer = self._connected(until)
        pending = BrokerError("nothing was said of it")
        answers: list[_Answer] = [pending] * len(messages)
        for at, message in enumerate(messages):
            self._send(producer, message, until, partial(_report, answers, at))
        left = producer.flush(max(0.0, until - time.monotonic()))
        if not left:
            self._send_alone(producer, messages, answers, until)
        if len(producer) or self._ended:
            self._end(producer)
            if not any(_answered(answer, pending) for answer in answers):
                self._check_there()
        self._proven = self._proven or None in answers
        return [
            _unconfirmed(message) if answer is pending else _sentence(answer, message)
            for answer, message in zip(answers, messages, strict=True)
        ]

    def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()
            producer.poll(0)

    # -- sending ------------------------------------------------------------------------------

    def _send(
        self, producer: client.Producer, message: Message[Any], until: float, report: Any
    ) -> None:
        try:
            record = _record(message)
        except MessageRefused as refusal:
            report(refusal, None)
            return
        while True:
            try:
                producer.produce(**record, on_delivery=report)
            except BufferError:
                # the client's queue is full: room comes with the reports
                producer.poll(_FULL_S)
                if time.monotonic() > until:
                    return
            except KafkaException as error:
                report(error.args[0], None)
                return
            else:
                return

    def _send_alone(
        self,
        producer: client.Producer,
        messages: Sequence[Message[Any]],
        answers: list[_Answer],
        until: float,
    ) -> None:
        """Send again, each in a batch of its own, what was refused as part of a batch."""
        refused: dict[tuple[str, int], list[int]] = defaultdict(list)
        for at, answer in enumerate(answers):
            if isinstance(answer, KafkaError) and answer.code() in _OF_THE_BATCH:
                refused[messages[at].topic, answer.code()].append(at)
        for suspects in refused.values():
            # one alone was a batch of its own already
            for at in suspects if len(suspects) > 1 else ():
                if time.monotonic() > until:
                    return
                self._send(producer, messages[at], until, partial(_report, answers, at))
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
                    self._config | {"error_cb": self._failed}, logger=ClientLog()
                )
            except (KafkaException, TypeError, ValueError) as error:
                raise ConfigurationError(
                    f"Kafka refuses its options ({text_of(error)}): correct those of Kafka(…)."
                ) from error
            self._producer, self._proven, self._ended = producer, False, False
        if not self._proven:
            try:
                self._probe(producer, min(_PROBE_S, until - time.monotonic()))
            finally:
                if self._ended:
                    self._producer = None
        return producer

    def _probe(self, producer: client.Producer, within_s: float) -> None:
        try:
            producer.list_topics("__consumer_offsets", timeout=max(0.05, within_s))
        except KafkaException as error:
            said = f"; it said: {self._said}" if self._said else ""
            raise BrokerUnavailable(f"No Kafka broker answers ({text_of(error)}{said}).") from error
        self._proven = True

    def _end(self, producer: client.Producer) -> None:
        """What is not confirmed must not leave later, and an idempotent producer keeps no gaps."""
        producer.purge()
        producer.poll(0)
        self._producer = None

    def _check_there(self) -> None:
        """Raise BrokerUnavailable unless somebody answers; by a new producer, the old may wait still."""
        self._connected(time.monotonic() + _LAST_WORD_S)

    def _failed(self, error: KafkaError) -> None:
        """Called by the client inside poll and flush."""
        self._said = error.str()
        if error.code() == ALL_BROKERS_DOWN:
            self._proven = False
        if error.fatal():
            self._ended = True
        if self._on_error is not None:
            self._on_error(error)


def _record(message: Message[Any]) -> dict[str, Any]:
    record: dict[str, Any] = {
        "topic": message.topic,
        "value": message.payload,
        "key": None if message.key is None else utf8(message.key),
        "headers": [
            (name, utf8(value) if isinstance(value, str) else value)
            for name, value in described(message, MESSAGE_ID, TYPE, CONTENT_TYPE)
        ],
    }
    for text in (message.topic, *message.headers.names()):
        if b"\0" in utf8(text):
            raise MessageRefused("Kafka takes no NUL in a topic or in the name of a header.")
    if message.time is not None:
        # 0 would be now, and there is nothing before it
        record["timestamp"] = max(0, int(message.time.timestamp() * 1000))
    return record


def _report(answers: list[_Answer], at: int, answer: _Answer, _: object) -> None:
    answers[at] = answer


def _answered(answer: _Answer, pending: BrokerError) -> bool:
    """Somebody has said something of it."""
    if isinstance(answer, KafkaError):
        return answer.code() not in _PURGED
    return answer is not pending and not isinstance(answer, MessageRefused)


def _sentence(answer: _Answer, message: Message[Any]) -> BrokerError | None:
    if not isinstance(answer, KafkaError):
        return answer
    code, text, topic = answer.code(), answer.str(), message.topic
    if code in _NEVER:
        return MessageRefused(
            f"Kafka will not take the message for topic {topic!r} ({text}): "
            "make it smaller, or correct its topic, key or time."
        )
    if code in _UNKNOWN:
        return BrokerError(f"Kafka has no topic {topic!r} ({text}): create it.")
    if code in _PURGED:
        return _unconfirmed(message)
    return BrokerError(f"Kafka did not take the message for topic {topic!r} ({text}).")


def _unconfirmed(message: Message[Any]) -> BrokerError:
    return BrokerError(f"Kafka has not confirmed the message for topic {message.topic!r} in time.")
