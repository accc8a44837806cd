"""The partitions of one member of a consumer group: what of each was delivered, and where its reading starts."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import confluent_kafka as client
from confluent_kafka import KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient

from txbox.brokers.base import Anchor, Anchors, Delivery
from txbox.brokers.kafka.librdkafka import REFUSALS, ClientLog, text_of
from txbox.errors import BrokerUnavailable, ConfigurationError, UnusableMessage
from txbox.identity import message_id
from txbox.message import Headers, Message

_log = logging.getLogger("txbox")

_CHECK_S = 5.0
_ASK_S = 5.0
_MARK = "txbox anchored"
_DESCRIBE_S = 5.0
_SHARED = (
    "bootstrap.", "security.", "sasl.", "ssl.", "socket.", "client.", "broker.", "enable.ssl",
    "oauth_cb", "metadata.", "https.",
)  # fmt: skip


@dataclass(slots=True, eq=False)
class Record:
    """One delivered record; `first`: another member may have had it before us."""

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


class Assignment(dict[tuple[str, int], Partition]):
    """By topic and number the partitions that are ours; with `anchoring` their offsets are anchored."""

    anchoring: Anchoring | None = None

    def add(self, topic: str, number: int) -> Partition:
        partition = self[topic, number] = Partition(topic, number, placed=self.anchoring is None)
        return partition

    def known(self, partitions: Iterable[TopicPartition]) -> list[Partition]:
        keys = [
            (topic_partition.topic, topic_partition.partition) for topic_partition in partitions
        ]
        return [self[key] for key in keys if key in self]

    def replace(self, partition: Partition) -> Partition:
        """Forget what was delivered of a partition that stays ours."""
        partition.ours = False
        new = self[partition.topic, partition.number] = partition.again()
        return new

    def forget(self, partitions: Iterable[Partition]) -> None:
        for partition in list(partitions):
            partition.ours = False
            self.pop((partition.topic, partition.number), None)

    def read_again(self, lost: Iterable[Partition]) -> None:
        """Forget what was delivered of partitions that the database has lost something of."""
        for partition in lost:
            new = self.replace(partition)
            new.placed, new.moved, new.anchor = False, True, None

    def check(self) -> None:
        """Read again what the database has lost, by `Anchoring.check`; raises StoreError."""
        if self.anchoring is not None:
            self.read_again(
                self.anchoring.check([partition for partition in self.values() if partition.placed])
            )

    def place(self, consumer: client.Consumer) -> None:
        """Find out where the reading of new ones starts; raises as `Anchoring.place`."""
        if self.anchoring is None:
            return
        unplaced = [partition for partition in self.values() if not partition.placed]
        if unplaced:
            for partition in self.anchoring.place(consumer, unplaced):
                self.replace(partition)


class Anchoring:
    """Keeps the front of each partition in the database, and finds out where reading starts.

    Guarantee: a front is stored only in a database that still has everything the front stands for.

    Source: docs/decisions/0016-anchored-offsets.md
    """

    def __init__(self, group: str, anchors: Anchors, topics: TopicIds) -> None:
        self._group = group
        self._anchors = anchors
        self._topics = topics
        self._check_at = 0.0

    def advance(self, partitions: Sequence[Partition]) -> list[Partition]:
        """Store the fronts; returns the partitions of which the database has lost something."""
        moves = {
            self._name(partition): (partition.front.offset + 1, partition.anchor)
            for partition in partitions
            if partition.front is not None and partition.anchor is not None
        }
        return self._compared(partitions, moves)

    def check(self, partitions: Sequence[Partition]) -> list[Partition]:
        """As `advance`, without storing, every few seconds: for partitions on which nothing happens."""
        if not partitions or time.monotonic() < self._check_at:
            return []
        lost = self._compared(partitions, None)
        self._check_at = time.monotonic() + _CHECK_S
        return lost

    def _compared(
        self, partitions: Sequence[Partition], moves: dict[str, tuple[int, Anchor]] | None
    ) -> list[Partition]:
        names = [self._name(partition) for partition in partitions]
        found = self._anchors.read(names) if moves is None else self._anchors.advance(moves)
        lost: list[Partition] = []
        for partition, name in zip(partitions, names, strict=True):
            assert partition.anchor is not None, "only placed partitions are compared"
            if partition.anchor.is_missing_in(found[name]):
                lost.append(partition)
            else:
                partition.anchor = found[name]
        return lost

    def mark(self, partition: Partition) -> str:
        """The metadata of a commit: that it is anchored, and since which offset."""
        return f"{_MARK} {self._topics.uuid(partition.topic)} {partition.floor}"

    def place(self, consumer: client.Consumer, partitions: Sequence[Partition]) -> list[Partition]:
        """Find out where reading starts, and seek; returns the partitions that were sought.

        What was received of those before is to be forgotten. A partition that cannot be sought yet
        stays unplaced.

        Raises:
            BrokerUnavailable, StoreError: nobody answers; nothing may be handed out meanwhile.
        """
        names = [self._name(partition) for partition in partitions]
        committed = _committed(consumer, partitions)
        found = self._anchors.read(names)
        sought: list[Partition] = []
        for partition, name, group in zip(partitions, names, committed, strict=True):
            anchor = found[name]
            offset = group.offset if group.offset >= 0 else None
            floor = self._floor(partition, group.metadata)
            start = offset
            if offset is None:
                start = partition.floor if anchor.position is None else anchor.position
            elif floor is not None:
                # a commit without the mark is no promise of the database's: an operator's, say
                start = min(offset, floor if anchor.position is None else anchor.position)
            if start is not None and (partition.moved or (offset is not None and start < offset)):
                if not self._sought(consumer, partition, start, offset):
                    continue
                sought.append(partition)
            if floor is None:
                floor = partition.floor if offset is None else offset
            partition.floor, partition.anchor = floor, anchor
            partition.placed, partition.moved = True, False
        return sought

    def _sought(
        self, consumer: client.Consumer, partition: Partition, start: int, committed: int | None
    ) -> bool:
        try:
            consumer.seek(TopicPartition(partition.topic, partition.number, start))
        except KafkaException as error:
            # it is not read yet, or no longer ours
            _log.info(
                "%s[%d] is not sought yet: %s", partition.topic, partition.number, text_of(error)
            )
            return False
        _log.error(
            "The database has been restored, failed over or started again: group %s reads %s[%d] again "
            "from offset %d (committed: %s). What the database still has is found to be a duplicate.",
            self._group, partition.topic, partition.number, start, committed,
        )  # fmt: skip
        return True

    def _floor(self, partition: Partition, metadata: str | None) -> int | None:
        """Since which offset all is anchored; None when the commit is not an anchored one."""
        mark, _, floor = (metadata or "").rpartition(" ")
        if mark != f"{_MARK} {self._topics.uuid(partition.topic)}" or not floor.isdecimal():
            return None
        return int(floor)

    def _name(self, partition: Partition) -> str:
        uuid = self._topics.uuid(partition.topic)
        if uuid is None:
            raise ConfigurationError(
                f"Kafka(anchored=True) needs the UUID of {partition.topic}: allow the client to "
                "describe the topic, on brokers of 2.8 or later."
            )
        return f"kafka:{self._group}:{uuid}:{partition.number}"


def _committed(
    consumer: client.Consumer, partitions: Iterable[Partition]
) -> Sequence[TopicPartition]:
    asked = [TopicPartition(partition.topic, partition.number) for partition in partitions]
    try:
        told = consumer.committed(asked, timeout=_ASK_S)
    except KafkaException as error:
        raise BrokerUnavailable(
            f"Kafka does not tell the committed offsets ({text_of(error)})."
        ) from error
    by_key = {(answer.topic, answer.partition): answer for answer in told}
    answers = [
        by_key[topic_partition.topic, topic_partition.partition] for topic_partition in asked
    ]
    for answer in answers:
        if answer.error is not None:
            raise BrokerUnavailable(
                f"Kafka does not tell the committed offsets ({answer.error.str()})."
            )
    return answers


class TopicIds:
    """Asks for each topic once."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = {
            option: value for option, value in config.items() if option.startswith(_SHARED)
        }
        self._known: dict[str, str | None] = {}

    def forget(self, topic: str) -> None:
        self._known.pop(topic, None)

    def uuid(self, topic: str) -> str | None:
        """Return the topic's UUID; None when the broker is older than those, or does not tell it.

        Raises:
            BrokerUnavailable: nobody answers.
        """
        if topic not in self._known:
            try:
                admin = AdminClient(self._config, logger=ClientLog())
                asked: dict[str, Any] = admin.describe_topics(  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
                    TopicCollection([topic]), request_timeout=_DESCRIBE_S
                )
                uuid = str(asked[topic].result(_DESCRIBE_S + 1).topic_id)
            except (KafkaException, TimeoutError) as error:
                if isinstance(error, KafkaException) and error.args[0].code() in REFUSALS:
                    _log.warning("The UUID of %s is not told: %s", topic, text_of(error))
                    uuid = ""
                else:
                    raise BrokerUnavailable(
                        f"Kafka does not describe the topic {topic} ({text_of(error)})."
                    ) from error
            # brokers older than topic ids answer with zeros
            self._known[topic] = uuid if uuid.strip("A=") else None
        return self._known[topic]

    def identify(self, delivery: Delivery, partition: int, offset: int) -> None:
        """Add the weak id of a message that has no other, and only then: it takes a question."""
        message = delivery.message
        if message is None or message.headers.get("message-id"):
            return
        try:
            message_id(message)
        except UnusableMessage:
            uuid = self.uuid(delivery.topic)
        else:
            return
        if uuid is not None:
            weak_id = f"{uuid}/{partition}/{offset}"
            delivery.message = replace(message, origin={**message.origin, "weak_id": weak_id})
