"""The partitions of one group member: what was delivered from each, and where reading starts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import confluent_kafka as client
from confluent_kafka import KafkaException, TopicPartition

from txbox.boundaries import log as _log
from txbox.brokers.base import Anchor, Anchors
from txbox.brokers.kafka.client import ASK_S, TopicIds, text_of
from txbox.errors import BrokerUnavailable, ConfigurationError

_CHECK_S = 5.0
_MARK = "txbox anchored"


@dataclass(slots=True, eq=False)
class Record:
    """One delivered record. `first`: another member may have had it before us."""

    partition: Partition
    offset: int
    epoch: int | None
    first: bool
    settled: bool = False


@dataclass(slots=True, eq=False)
class Partition:
    """What was delivered from one partition since it was assigned, and how far it is settled without gaps.

    Args:
        placed: it is known where reading starts; nothing is handed out before that.
        moved: reading must restart elsewhere, although it is under way.
        front: the last record below which everything is settled; asked: the one last sent for commit.
        jumped: the client may have jumped over messages before the next one.
        floor: the first offset since offsets have been anchored.
        anchor: as it was before anything was handed out that the front may come to cover.
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
    jumped: bool = False
    floor: int | None = None
    anchor: Anchor | None = None

    def again(self) -> Partition:
        """Return the partition reset, to be read from elsewhere; what was delivered is forgotten."""
        return Partition(
            self.topic, self.number, delivered=self.delivered,
            placed=self.placed, moved=self.moved, floor=self.floor, anchor=self.anchor,
        )  # fmt: skip

    def deliver(self, offset: int, epoch: int | None, window: int) -> Record:
        record = Record(self, offset, epoch, self.delivered < window)
        self.delivered += 1
        self.last = offset
        if self.floor is None:
            self.floor = offset
        self.waiting.append(record)
        return record

    def settle(self, record: Record) -> None:
        # offsets have gaps (transactions, compaction), so only delivered records count
        record.settled = True
        while self.waiting and self.waiting[0].settled:
            self.front = self.waiting.popleft()

    def answer(self, offset: int, *, refused: bool) -> None:
        """Record the result of committing this offset; results of older commits are ignored."""
        if self.asked is not None and self.asked.offset + 1 == offset:
            if refused:
                self.asked = self.committed
            else:
                self.committed = self.asked

    def is_behind(self, *, answered: bool) -> bool:
        """Whether the front still needs a commit; unless `answered`, a commit that was sent counts as done."""
        return self.front is not None and self.front is not (
            self.committed if answered else self.asked
        )

    def commit(self, mark: str) -> TopicPartition:
        """Return the commit of the front, with the mark as its metadata."""
        assert self.front is not None, "only what is behind is committed"
        self.asked = self.front
        epoch = {} if self.front.epoch is None else {"leader_epoch": self.front.epoch}
        return TopicPartition(self.topic, self.number, self.front.offset + 1, mark, **epoch)


class Assignment(dict[tuple[str, int], Partition]):
    """The partitions that are ours, by topic and number; with `anchoring` their offsets are anchored."""

    anchoring: Anchoring | None = None

    def add(self, topic: str, number: int) -> None:
        self[topic, number] = Partition(topic, number, placed=self.anchoring is None)

    def known(self, partitions: Iterable[TopicPartition]) -> list[Partition]:
        keys = [
            (topic_partition.topic, topic_partition.partition) for topic_partition in partitions
        ]
        return [self[key] for key in keys if key in self]

    def replace(self, partition: Partition) -> Partition:
        """Forget what was delivered from a partition that stays ours."""
        partition.ours = False
        new = self[partition.topic, partition.number] = partition.again()
        return new

    def forget(self, partitions: Iterable[Partition]) -> None:
        for partition in list(partitions):
            partition.ours = False
            self.pop((partition.topic, partition.number), None)

    def read_again(self, lost: Iterable[Partition]) -> None:
        """Forget what was delivered from partitions for which the database lost commits."""
        for partition in lost:
            new = self.replace(partition)
            new.placed, new.moved, new.anchor = False, True, None

    def check(self) -> None:
        """Read again what the database has lost, as found by `Anchoring.check`; raises StoreError."""
        if self.anchoring is not None:
            self.read_again(
                self.anchoring.check([partition for partition in self.values() if partition.placed])
            )

    def place(self, consumer: client.Consumer) -> None:
        """Determine where reading of new partitions starts; raises what `Anchoring.place` raises."""
        if self.anchoring is None:
            return
        unplaced = [partition for partition in self.values() if not partition.placed]
        if unplaced:
            for partition in self.anchoring.place(consumer, unplaced):
                self.replace(partition)


class Anchoring:
    """Keeps each partition's front in the database, and decides where reading starts.

    Guarantee: a front is stored only in a database that still has everything it covers.

    Source: docs/decisions/0016-anchored-offsets.md
    """

    def __init__(self, group: str, anchors: Anchors, topics: TopicIds) -> None:
        self._group = group
        self._anchors = anchors
        self._topics = topics
        self._check_at = 0.0

    def advance(self, partitions: Sequence[Partition]) -> list[Partition]:
        """Store the fronts; returns the partitions for which the database has lost something."""
        moves = {
            self._name(partition): (partition.front.offset + 1, partition.anchor)
            for partition in partitions
            if partition.front is not None and partition.anchor is not None
        }
        return self._compared(partitions, moves)

    def check(self, partitions: Sequence[Partition]) -> list[Partition]:
        """Check for losses without storing anything, every few seconds: for partitions that are idle."""
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
        """Return the metadata of a commit: that it is anchored, and since which offset."""
        return f"{_MARK} {self._topics.uuid(partition.topic)} {partition.floor}"

    def place(self, consumer: client.Consumer, partitions: Sequence[Partition]) -> list[Partition]:
        """Determine where reading starts, and seek there; returns the partitions that were sought.

        What was received from those before must be forgotten. A partition that cannot be sought yet
        stays unplaced.

        Raises:
            BrokerUnavailable, StoreError: no answer; nothing may be handed out until there is one.
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
                # a commit without the mark (by an operator, say) does not rely on the database
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
            # not being read yet, or no longer ours
            _log.info(
                "%s[%d] is not sought yet: %s", partition.topic, partition.number, text_of(error)
            )
            return False
        _log.error(
            "The database was restored, failed over or restarted: group %s reads %s[%d] again from offset %d "
            "(committed: %s). Messages the database still has will be duplicates.",
            self._group, partition.topic, partition.number, start, committed,
        )  # fmt: skip
        return True

    def _floor(self, partition: Partition, metadata: str | None) -> int | None:
        """Return the offset since which everything is anchored; None if the commit was not an anchored one."""
        mark, _, floor = (metadata or "").rpartition(" ")
        if mark != f"{_MARK} {self._topics.uuid(partition.topic)}" or not floor.isdecimal():
            return None
        return int(floor)

    def _name(self, partition: Partition) -> str:
        uuid = self._topics.uuid(partition.topic)
        if uuid is None:
            raise ConfigurationError(
                f"Kafka(anchored=True) needs the UUID of {partition.topic}: allow the client to "
                "describe the topic, on brokers of version 2.8 or later."
            )
        return f"kafka:{self._group}:{uuid}:{partition.number}"


def _committed(
    consumer: client.Consumer, partitions: Iterable[Partition]
) -> Sequence[TopicPartition]:
    asked = [TopicPartition(partition.topic, partition.number) for partition in partitions]
    try:
        found = consumer.committed(asked, timeout=ASK_S)
    except KafkaException as error:
        raise BrokerUnavailable(
            f"Kafka does not return the committed offsets ({text_of(error)})."
        ) from error
    by_key = {(answer.topic, answer.partition): answer for answer in found}
    answers = [
        by_key[topic_partition.topic, topic_partition.partition] for topic_partition in asked
    ]
    for answer in answers:
        if answer.error is not None:
            raise BrokerUnavailable(
                f"Kafka does not return the committed offsets ({answer.error.str()})."
            )
    return answers
