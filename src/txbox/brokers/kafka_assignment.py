"""The partitions of one member of a consumer group, as they come, go, and are read again."""

from __future__ import annotations

from collections.abc import Iterable

import confluent_kafka as client
from confluent_kafka import TopicPartition

from txbox.brokers.kafka_anchor import Anchoring
from txbox.brokers.kafka_partition import Partition


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
