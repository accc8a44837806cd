"""One partition of a Kafka topic since it was assigned, and its records as messages."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import confluent_kafka as client
from confluent_kafka import TopicPartition

from txbox.brokers.base import Anchor, Delivery
from txbox.message import Headers, Message


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
