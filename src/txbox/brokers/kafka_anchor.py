"""Offsets anchored in the database: what it has lost is read again.

Source: docs/decisions/0016-anchored-offsets.md
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

import confluent_kafka as client
from confluent_kafka import KafkaException, TopicPartition

from txbox.brokers.base import Anchor, Anchors
from txbox.brokers.kafka_error import text_of
from txbox.brokers.kafka_partition import Partition
from txbox.brokers.kafka_topic import TopicIds
from txbox.errors import BrokerUnavailable, ConfigurationError

_log = logging.getLogger("txbox")

_CHECK_S = 5.0
_ASK_S = 5.0
_MARK = "txbox anchored"


class Anchoring:
    """Keeps the front of each partition in the database, and finds out where reading starts.

    Guarantee: a front is stored only in a database that still has everything the front stands for.
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
