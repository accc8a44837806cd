"""Topics, producers, worker processes and librdkafka's mock cluster for the Kafka tests."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import confluent_kafka
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.servers import ROOT
from txbox.brokers.base import Delivery
from txbox.brokers.kafka import Kafka

_WAIT_S = 20.0
_OFFSET_COMMIT = 8


def new_topic(bootstrap: str, partitions: int = 1, copies: int = 1) -> str:
    name = f"orders-{secrets.token_hex(4)}"
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(name, partitions, copies)])[name].result(_WAIT_S)
    return name


def produce(bootstrap: str, topic: str, ids: Sequence[object], **more: Any) -> None:
    """Returns once all are acknowledged; keys spread them over the partitions."""
    failures: list[object] = []
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all"})
    for own in ids:
        producer.produce(
            topic,
            b'{"cents": 1}',
            key=str(own).encode(),
            headers=[("message-id", str(own).encode())],
            on_delivery=lambda error, _: failures.append(error) if error else None,
            **more,
        )
    assert producer.flush(_WAIT_S) == 0
    assert not failures


def committed(bootstrap: str, group: str, topic: str, partition: int = 0) -> int:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group})
    try:
        (own,) = consumer.committed([TopicPartition(topic, partition)], timeout=_WAIT_S)
        return own.offset
    finally:
        consumer.close()


def rewind(bootstrap: str, group: str, topic: str) -> None:
    """What an operator does: the group, which has no members, starts at the beginning again."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    start = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0, 0)])
    admin.alter_consumer_group_offsets([start])[group].result(_WAIT_S)


class Nothing:
    """What is in flight, when no worker is there."""

    done: Sequence[Delivery] = ()

    def settled(self, among: Callable[[Delivery], bool], within_s: float) -> Sequence[Delivery]:
        return [own for own in self.done if among(own)]


@contextmanager
def opened(source: Kafka, topic: str) -> Iterator[Kafka]:
    progress: Any = None
    source.open([topic], progress, Nothing())
    try:
        yield source
    finally:
        source.close()


@contextmanager
def service(
    plan: dict[str, Any], output: Path, crash: tuple[str, int] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A worker process; what it says goes to a file. Killed when the block ends, unless it has ended."""
    environment = dict(os.environ)
    if crash is not None:
        environment |= {"TXBOX_CRASH_AT": crash[0], "TXBOX_CRASH_NTH": str(crash[1])}
    with output.open("ab") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.brokers.kafka_service", json.dumps(plan)],
            cwd=ROOT,
            env=environment,
            stdout=written,
            stderr=written,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(_WAIT_S)


class MockCluster:
    """librdkafka's mock cluster, by the symbols of the library that the client brings along."""

    def __init__(self) -> None:
        folder = Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs"
        (path,) = folder.glob("librdkafka*.so*")
        self._lib = ctypes.CDLL(str(path))
        for name in ("conf_new", "new", "mock_cluster_new", "mock_cluster_bootstraps"):
            getattr(self._lib, f"rd_kafka_{name}").restype = ctypes.c_void_p
        self._lib.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
        reason = ctypes.create_string_buffer(256)
        conf = ctypes.c_void_p(self._lib.rd_kafka_conf_new())
        self._client = ctypes.c_void_p(
            self._lib.rd_kafka_new(0, conf, reason, ctypes.c_size_t(256))
        )
        self._cluster = ctypes.c_void_p(self._lib.rd_kafka_mock_cluster_new(self._client, 1))
        self.bootstrap: str = self._lib.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()

    def topic(self, partitions: int = 1) -> str:
        name = f"orders-{secrets.token_hex(4)}"
        self._lib.rd_kafka_mock_topic_create(self._cluster, name.encode(), partitions, 1)
        return name

    def refuse_commits(self, *codes: int) -> None:
        """The next commits are answered with these errors."""
        self._lib.rd_kafka_mock_push_request_errors_array(
            self._cluster,
            ctypes.c_int16(_OFFSET_COMMIT),
            ctypes.c_size_t(len(codes)),
            (ctypes.c_int * len(codes))(*codes),
        )

    def broker(self, *, up: bool) -> None:
        call = "up" if up else "down"
        getattr(self._lib, f"rd_kafka_mock_broker_set_{call}")(self._cluster, 1)

    def close(self) -> None:
        self._lib.rd_kafka_mock_cluster_destroy(self._cluster)
        self._lib.rd_kafka_destroy(self._client)
