"""Kafka: a topic of one partition and a share group of its name."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from confluent_kafka import Consumer, TopicPartition

from tests.support.brokers.rigs.kafka import KafkaRig
from tests.support.waiting import DEADLINE_S
from txbox.brokers.kafka import Kafka

_DESCRIBE_SHARE_GROUP_OFFSETS = 90


class KafkaShareRig(KafkaRig):
    lacks: ClassVar = {"native ids": "a record has a key, and no id"}

    @property
    def impatient(self) -> Mapping[str, Any]:
        return {"share_record_lock_duration_ms": 1500}

    @property
    def replaceable(self) -> Mapping[str, Any]:
        """What a dead member had is free as soon as its connection ends, its partitions when its session does."""
        return {"share_session_timeout_ms": 2000, "share_heartbeat_interval_ms": 1000}

    def source(self, **options: Any) -> Kafka:
        return Kafka(self.address, group=self.topic, share=True, **options)

    def outstanding(self) -> int:
        return unacknowledged(self.address, self.topic, self.topic)


def unacknowledged(bootstrap: str, group: str, topic: str, partitions: int = 1) -> int:
    """How many records of a topic a share group has not acknowledged; the client cannot ask for it."""
    left = 0
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group, "log_level": 0})
    try:
        for number, lag in enumerate(_lags(bootstrap, group, topic, partitions)):
            partition = TopicPartition(topic, number)
            low, high = consumer.get_watermark_offsets(partition, timeout=DEADLINE_S)
            # nobody has read it so far
            left += high - low if lag < 0 else lag
    finally:
        consumer.close()
    return left


def _lags(bootstrap: str, group: str, topic: str, partitions: int) -> Iterator[int]:
    """Ask the only broker for each partition; version 1, of Kafka 4.2, has the lag. Names are short."""
    numbers = b"".join(struct.pack(">i", number) for number in range(partitions))
    body = (
        b"\2" + _text(group) + b"\2" + _text(topic) + bytes([partitions + 1]) + numbers + b"\0\0\0"
    )
    request = struct.pack(">hhih", _DESCRIBE_SHARE_GROUP_OFFSETS, 1, 1, -1) + b"\0" + body
    host, _, port = bootstrap.partition(":")
    with socket.create_connection((host, int(port)), DEADLINE_S) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        answer = connection.makefile("rb")
        (size,) = struct.unpack(">i", answer.read(4))
        described = answer.read(size)
    # correlation, tags, throttling, groups, group, topics, topic, its id, partitions
    at = 4 + 1 + 4 + 1 + len(_text(group)) + 1 + len(_text(topic)) + 16 + 1
    for _ in range(partitions):
        *_, lag, error = struct.unpack_from(">iqiqh", described, at)
        assert not error, f"the share group is not described: error {error}"
        yield lag
        # the message of an error, tags
        at += struct.calcsize(">iqiqh") + 2


def _text(text: str) -> bytes:
    return bytes([len(text) + 1]) + text.encode()
