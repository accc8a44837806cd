"""Kafka: a topic of one partition and a group of its name."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.support.brokers.rigs import ServerRig
from tests.support.waiting import DEADLINE_S, eventually
from txbox.brokers.kafka import Kafka
from txbox.testing.brokers import Note, Rig


class KafkaRig(ServerRig):
    lacks: ClassVar = {
        "native ids": "a record has a key, and no id",
        "rival": "the one partition has one owner, who would get back what was taken from it",
    }
    payloads = (*Rig.payloads, None)
    headers = tuple(  # values are bytes
        (name, value.encode() if isinstance(value, str) else value) for name, value in Rig.headers
    )
    redelivery_s = 1.5

    @property
    def impatient(self) -> Mapping[str, Any]:
        # the classic protocol would not go below the session's 6 seconds
        options = {"group.protocol": "consumer", "max.poll.interval.ms": 1500}
        return {"options": options, "revoke_wait": timedelta(seconds=1)}

    @property
    def replaceable(self) -> Mapping[str, Any]:
        # a dead member is missed after its session; the next of its name has its place at once
        return {"options": {"group.instance.id": self.topic}}

    def create(self) -> None:
        self.admin = AdminClient({"bootstrap.servers": self.address})
        self.producer = Producer({"bootstrap.servers": self.address, "acks": "all"})

        def made() -> bool:
            try:
                self.admin.create_topics([NewTopic(self.topic, 1, 1)])[self.topic].result(
                    DEADLINE_S
                )
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise
                return False  # it is still being deleted
            return True

        eventually(made, "a new topic")

    def remove(self) -> None:
        self.admin.delete_topics([self.topic])[self.topic].result(DEADLINE_S)

    def publish(self, *messages: Note) -> None:
        failures: list[object] = []
        for note in messages:
            self.producer.produce(
                self.topic, note.payload,
                headers=[
                    (name, value.encode() if isinstance(value, str) else value)
                    for name, value in note.pairs
                ],
                on_delivery=lambda error, _: failures.append(error) if error else None,
            )  # fmt: skip
        assert self.producer.flush(DEADLINE_S) == 0
        assert not failures

    def source(self, **options: Any) -> Kafka:
        return Kafka(self.address, group=self.topic, **options)

    def outstanding(self) -> int:
        consumer = Consumer({"bootstrap.servers": self.address, "group.id": self.topic})
        try:
            partition = TopicPartition(self.topic, 0)
            low, high = consumer.get_watermark_offsets(partition, timeout=DEADLINE_S)
            (front,) = consumer.committed([partition], timeout=DEADLINE_S)
            return high - max(low, front.offset)
        finally:
            consumer.close()
