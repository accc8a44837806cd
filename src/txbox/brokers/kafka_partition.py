"""Kafka's options, error codes, partitions and records, as the source uses them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import confluent_kafka as client
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from txbox.brokers.base import Anchor, Delivery
from txbox.errors import ConfigurationError
from txbox.message import Headers, Message

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


@dataclass(slots=True, eq=False)
class Record:
    offset: int
    epoch: int | None
    first: bool
    settled: bool = False


@dataclass(slots=True, eq=False)
class Partition:
    """What of one partition was delivered since it was assigned, and the front of what is settled.

    Args:
        placed: it is known where reading starts; nothing is handed out before.
        moved: reading is to start elsewhere, although it goes on.
        front: the last record of the gapless settled ones; asked: that whose commit was asked for last.
        floor: the first offset since the offsets are anchored.
        anchor: as it was before anything was handed out that the front may come to stand for.
    """

    topic: str
    number: int
    ours: bool = True
    delivered: int = 0
    waiting: deque[Record] = field(default_factory=deque[Record])
    front: Record | None = None
    asked: Record | None = None
    committed: Record | None = None
    last: int = -1
    placed: bool = True
    moved: bool = False
    floor: int | None = None
    anchor: Anchor | None = None

    def again(self) -> Partition:
        """The partition anew, to be read from elsewhere: what was delivered is forgotten."""
        return Partition(
            self.topic, self.number, delivered=self.delivered,
            placed=self.placed, moved=self.moved, floor=self.floor, anchor=self.anchor,
        )  # fmt: skip

    def deliver(self, offset: int, epoch: int | None, window: int) -> Record:
        record = Record(offset, epoch, self.delivered < window)
        self.delivered += 1
        self.last = offset
        if self.floor is None:
            self.floor = offset
        self.waiting.append(record)
        return record

    def settle(self, record: Record) -> None:
        # offsets have gaps (transactions, compaction): only what was delivered counts
        record.settled = True
        while self.waiting and self.waiting[0].settled:
            self.front = self.waiting.popleft()

    def answer(self, offset: int, *, refused: bool) -> None:
        """Note what became of the commit of this offset; the answer to an older one says nothing."""
        if self.asked is not None and self.asked.offset + 1 == offset:
            if refused:
                self.asked = self.committed
            else:
                self.committed = self.asked

    def offset_of(self, front: Record, mark: str) -> TopicPartition:
        offset = front.offset + 1
        if front.epoch is None:
            return TopicPartition(self.topic, self.number, offset, mark)
        return TopicPartition(self.topic, self.number, offset, mark, leader_epoch=front.epoch)


def checked_options(options: Mapping[str, Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
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


def delivery_of(raw: client.Message, partition: Partition, record: Record, source: str) -> Delivery:
    topic, tag = partition.topic, (partition, record)
    value = raw.value()
    try:
        headers = Headers(raw.headers() or ())
    except (UnicodeDecodeError, SystemError) as error:
        return Delivery(
            None, topic, tag, raw=value or b"", redelivered=record.first,
            problem=f"Partition {partition.number}, offset {record.offset}: the name of a header is "
            f"not UTF-8 ({type(error).__name__}).",
        )  # fmt: skip
    origin: dict[str, Any] = {
        "source": source, "partition": partition.number, "offset": record.offset,
    }  # fmt: skip
    kind, event_kind, content_type = headers.texts("type", "ce_type", "content-type")
    message: Message[Any] = Message(
        topic=topic,
        payload=value,
        type=kind or event_kind,
        key=_key(raw.key()),
        headers=headers,
        content_type=content_type,
        time=_time(raw.timestamp()),
        origin=origin,
    )
    return Delivery(message, topic, tag, redelivered=record.first)


def text_of(error: BaseException) -> str:
    if isinstance(error, KafkaException):
        return str(error.args[0].str())
    return str(error) or type(error).__name__


def _key(key: bytes | None) -> str | None:
    if key is None:
        return None
    try:
        return key.decode()
    except UnicodeDecodeError:
        return f"hex:{key.hex()}"


def _time(stamp: tuple[int, int]) -> datetime | None:
    kind, milliseconds = stamp
    if kind == client.TIMESTAMP_NOT_AVAILABLE:
        return None
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        # producers may write any number
        return None
