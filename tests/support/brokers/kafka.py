"""Topics, producers, worker processes and librdkafka's mock cluster for the Kafka tests."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import confluent_kafka
from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.support.databases import Raw
from tests.support.servers import ROOT
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.warm import Warm
from txbox.brokers.base import Delivery
from txbox.brokers.kafka import Kafka
from txbox.brokers.kafka.client import ASK_S
from txbox.brokers.kafka.source import KafkaConsumer
from txbox.errors import BrokerUnavailable
from txbox.events import Event

MakeRaw = Callable[[str], Raw]
PROTOCOLS: dict[str, dict[str, Any]] = {
    "eager": {"partition.assignment.strategy": "range"},
    "cooperative": {"partition.assignment.strategy": "cooperative-sticky"},
    "kip-848": {"group.protocol": "consumer"},
}
_OFFSET_COMMIT, _INIT_PRODUCER_ID = 8, 22
#: What is not finished yet, and which connections are in the way.
_EVIDENCE = (
    """SELECT status, message_id, starts, attempts, lease_until, next_attempt_at, clock_timestamp()
         FROM txbox_inbox WHERE status <> 'processed' ORDER BY arrival LIMIT 20""",
    """SELECT pid, state, wait_event, clock_timestamp() - xact_start, pg_blocking_pids(pid)::text, left(query, 60)
         FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()""",
)


def new_topic(bootstrap: str, partitions: int = 1, copies: int = 1, name: str | None = None) -> str:
    name = name or f"orders-{secrets.token_hex(4)}"
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(name, partitions, copies)])[name].result(DEADLINE_S)
    return name


def new_group() -> str:
    return f"shop-{secrets.token_hex(4)}"


def produce(
    bootstrap: str,
    topic: str,
    ids: Iterable[object],
    keys: Mapping[Any, str] | None = None,
    flush_every: int | None = None,
    **more: Any,
) -> None:
    """Returns once all are acknowledged; keys (the ids, unless given) spread them over the partitions.

    Args:
        flush_every: how many make a batch; None leaves it to the client.
    """
    failures: list[object] = []
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "enable.idempotence": True})
    for number, message_id in enumerate(ids, 1):
        producer.produce(
            topic,
            b'{"cents": 1}',
            key=str(message_id if keys is None else keys[message_id]).encode(),
            headers=[("message-id", str(message_id).encode())],
            on_delivery=lambda error, _: failures.append(error) if error else None,
            **more,
        )
        if flush_every and number % flush_every == 0:
            assert producer.flush(DEADLINE_S) == 0
    assert producer.flush(DEADLINE_S) == 0
    assert not failures


def committed(bootstrap: str, group: str, topic: str, partition: int = 0) -> int:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group})
    try:
        (offsets,) = consumer.committed([TopicPartition(topic, partition)], timeout=DEADLINE_S)
        return offsets.offset
    finally:
        consumer.close()


def lag(bootstrap: str, group: str, topic: str, partitions: int) -> int:
    """Messages of a topic behind the group's committed offsets."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group})
    try:
        behind = 0
        every = [TopicPartition(topic, number) for number in range(partitions)]
        for partition in consumer.committed(every, timeout=DEADLINE_S):
            _, end = consumer.get_watermark_offsets(partition, timeout=DEADLINE_S)
            behind += end - max(partition.offset, 0)
        return behind
    finally:
        consumer.close()


def leader_of(bootstrap: str, topic: str, partition: int = 0) -> int:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    return admin.list_topics(topic, timeout=DEADLINE_S).topics[topic].partitions[partition].leader


def rewind(bootstrap: str, group: str, topic: str) -> None:
    """What an operator does: the group, which has no members, starts at the beginning again."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    start = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0, 0)])
    admin.alter_consumer_group_offsets([start])[group].result(DEADLINE_S)


class Nothing:
    """What is in flight, when no worker is there."""

    done: Sequence[Delivery] = ()
    progress: Any = None

    def __init__(self) -> None:
        self.events: list[Event] = []

    def settled(self, among: Callable[[Delivery], bool], within_s: float) -> Sequence[Delivery]:
        return [each for each in self.done if among(each)]

    def report(self, event: Event) -> None:
        self.events.append(event)


@contextmanager
def opened(source: Kafka, topic: str) -> Iterator[KafkaConsumer]:
    consumer = source.consumer([topic], Nothing())
    assert isinstance(consumer, KafkaConsumer)
    try:
        yield consumer
    finally:
        consumer.close()


def take(source: KafkaConsumer, count: int) -> list[Delivery]:
    """Receive until so many have come."""
    found: list[Delivery] = []

    def enough() -> bool:
        try:
            found.extend(source.receive(100, 0.2))
        except BrokerUnavailable:
            return False
        return len(found) >= count

    eventually(enough, f"{count} deliveries")
    assert len(found) == count
    return found


def notes(raw: Raw) -> dict[str, int]:
    """Effects by id."""
    return {
        str(value): int(count)
        for value, count in raw.rows("SELECT message_id, count(*) FROM effect GROUP BY message_id")
    }


def each_once(raw: Raw, ids: Iterable[object]) -> None:
    """Wait for the effects of these ids: none is missing, none is there twice."""
    wanted = {str(message_id): 1 for message_id in ids}
    eventually(lambda: len(notes(raw)) >= len(wanted), "an effect of every message")
    found = notes(raw)
    wrong = set(found.items()) ^ set(wanted.items())
    assert not wrong, f"wrong numbers of effects: {sorted(wrong)}"


def said(output: Path, *what: str) -> list[str]:
    """The lines of a service that begin with one of these words."""
    lines = output.read_text(errors="replace").splitlines()
    return [line for line in lines if line.partition(" ")[0] in what]


def handled(output: Path) -> list[str]:
    return [line.split()[1] for line in said(output, "handled")]


@contextmanager
def service(
    plan: dict[str, Any], output: Path, crash: tuple[str, int] | None = None
) -> Iterator[Warm]:
    """A worker process; what it says goes to a file. Killed when the block ends, unless it has ended."""
    environment = dict(os.environ)
    if crash is not None:
        environment |= {"TXBOX_CRASH_AT": crash[0], "TXBOX_CRASH_NTH": str(crash[1])}
    with output.open("ab") as written:
        process = Warm(
            ["tests.support.brokers.kafka_service", json.dumps(plan)],
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
        process.wait(DEADLINE_S)


@contextmanager
def explained(plan: dict[str, Any], raw: Raw, *outputs: Path) -> Iterator[None]:
    """If the block fails, print what its workers, their group and their database are about at that moment."""
    try:
        yield
    except AssertionError:
        for query in _EVIDENCE:
            for row in raw.rows(query):
                print(*row)
        for output in filter(Path.exists, outputs):
            print(output.name, *output.read_text(errors="replace").splitlines()[-15:], sep="\n  ")
        admin = AdminClient({"bootstrap.servers": plan["bootstrap"]})
        described = admin.describe_consumer_groups([plan["group"]], request_timeout=ASK_S)
        try:
            group = described[plan["group"]].result(ASK_S)
        except KafkaException as error:
            print("group", error)
        else:
            print("group", group.state)
            for member in group.members:
                print("member", member.member_id, member.assignment.topic_partitions)
        raise


def librdkafka() -> ctypes.CDLL:
    """The C library that the client brings along."""
    folder = Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs"
    (path,) = folder.glob("librdkafka*.so*")
    return ctypes.CDLL(str(path))


class MockCluster:
    """librdkafka's mock cluster of one broker: fast, and it answers with the errors that are ordered."""

    def __init__(self) -> None:
        self._lib = librdkafka()
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
        self._refuse(_OFFSET_COMMIT, codes)

    def refuse_producers(self, *codes: int) -> None:
        """The next producers that want to be idempotent are answered with these errors."""
        self._refuse(_INIT_PRODUCER_ID, codes)

    def _refuse(self, request: int, codes: Sequence[int]) -> None:
        self._lib.rd_kafka_mock_push_request_errors_array(
            self._cluster,
            ctypes.c_int16(request),
            ctypes.c_size_t(len(codes)),
            (ctypes.c_int * len(codes))(*codes),
        )

    def accept_commits(self) -> None:
        """Forget the errors that were ordered and not answered yet."""
        self._lib.rd_kafka_mock_clear_request_errors(self._cluster, ctypes.c_int16(_OFFSET_COMMIT))

    def answer_after(self, milliseconds: int) -> None:
        """Let the broker take its time with every answer."""
        self._lib.rd_kafka_mock_broker_set_rtt(
            self._cluster, ctypes.c_int32(1), ctypes.c_int(milliseconds)
        )

    def broker(self, *, up: bool) -> None:
        call = "up" if up else "down"
        getattr(self._lib, f"rd_kafka_mock_broker_set_{call}")(self._cluster, 1)

    def close(self) -> None:
        self._lib.rd_kafka_mock_cluster_destroy(self._cluster)
        self._lib.rd_kafka_destroy(self._client)
