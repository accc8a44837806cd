"""Commits of Kafka offsets: what was asked, what was answered, what was refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import confluent_kafka as client
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from txbox.brokers.kafka_assignment import Assignment
from txbox.brokers.kafka_error import MOVED_ON
from txbox.brokers.kafka_partition import Partition
from txbox.errors import BrokerUnavailable

_log = logging.getLogger("txbox")


class Commits:
    """Asks for the commits of one source and hears the answers.

    Args:
        source: its name, for people.
        ended: is called with an error that ends the membership.

    Guarantee: what was refused is behind again, so it is asked for again while it is ours.
    """

    def __init__(
        self, source: str, partitions: Assignment, ended: Callable[[KafkaError], None]
    ) -> None:
        self._source = source
        self._partitions = partitions
        self._ended = ended
        self._refusal: KafkaError | None = None

    def ask(
        self, consumer: client.Consumer, behind: Sequence[Partition], *, wait: bool = False
    ) -> None:
        """Commit the fronts; unless `wait`, the answers come to `answered`, inside a later poll.

        While messages come nobody waits: a commit whose coordinator has died is kept by the client
        until there is one again, and the pump would stand still for as long.

        Raises:
            BrokerUnavailable: refused, if that is known already.
            StoreError: the fronts could not be anchored; nothing was asked.
        """
        anchoring = self._partitions.anchoring
        if anchoring is not None:
            lost = anchoring.advance(behind)
            self._partitions.read_again(lost)
            behind = [partition for partition in behind if partition not in lost]
        offsets: list[TopicPartition] = []
        for partition in behind:
            if partition.front is not None:
                partition.asked = partition.front
                mark = "" if anchoring is None else anchoring.mark(partition)
                offsets.append(partition.offset_of(partition.front, mark))
        if not offsets:
            return
        try:
            if wait:
                self.answered(None, consumer.commit(offsets=offsets, asynchronous=False))
            else:
                consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            self.answered(error.args[0], offsets)
        if wait:
            self.raise_refusal()

    def answered(self, error: KafkaError | None, offsets: Iterable[TopicPartition]) -> None:
        """Called by the client inside poll, and when it was waited for."""
        for answer in offsets:
            refusal = answer.error or error
            if partition := self._partitions.get((answer.topic, answer.partition)):
                partition.answer(answer.offset, refused=refusal is not None)
            if refusal is not None:
                self._refused(refusal)

    def _refused(self, error: KafkaError) -> None:
        if error.code() in MOVED_ON:
            # tried again after the rebalance, if the partition is still ours by then
            _log.info("%s: not committed while the group rebalances: %s", self._source, error.str())
        elif error.fatal():
            self._ended(error)
        else:
            self._refusal = error

    def raise_refusal(self) -> None:
        """Raises BrokerUnavailable, once: a commit was refused since the last call."""
        error, self._refusal = self._refusal, None
        if error is not None:
            raise BrokerUnavailable(f"Kafka did not take the commit ({error.str()}).")
