"""P25: the first messages of Kafka's partitions after an assignment, beside those after them in the same run."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import psycopg
from confluent_kafka import ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from benchmarks.contender import inbox_off_by
from benchmarks.p14_kafka import Subscribed, broker, circumstances
from benchmarks.place import Place
from benchmarks.result import Bar, Round, Verified, result
from benchmarks.servers import fresh_database
from benchmarks.workload import CONSUMER, Work, order_paid, verify, writes
from tests.support.servers import ServerError
from txbox import App
from txbox.app import Consumption
from txbox.brokers.base import Consumer, Context, Delivery, Source
from txbox.worker import Worker

NUMBER = "P25"
TITLE = "Kafka from the start of an assignment"
BAR = 0.7

_WAIT_S = 300.0
_PARTITIONS = (6, 60)
#: what the group's commit says of the last owner: nothing was in work, or something may have been
_KINDS = ("at rest", "killed")


class Watched(Source, Consumer):
    """Another source, with the time and the processor's time of each settlement."""

    def __init__(self, source: Source, deliveries: int) -> None:
        self._source, self._deliveries = source, deliveries
        self.name, self.topics = source.name, source.topics
        self.settled = 0
        #: settled so far, wall and CPU, in seconds; the first is that of the first messages received
        self.marks: list[tuple[int, float, float]] = []
        self.done = threading.Event()

    def keeps_order(self, topic: str) -> bool:
        return self._source.keeps_order(topic)

    def consumer(self, topics: Sequence[str], context: Context) -> Consumer:
        self._consumer = self._source.consumer(topics, context)
        self.tend_every_s = self._consumer.tend_every_s
        return self

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        began = time.perf_counter(), time.process_time()
        found = self._consumer.receive(messages_max, wait_s)
        if found and not self.marks:
            self.marks.append((0, *began))
        return found

    def tend(self, deliveries: Sequence[Delivery]) -> None:
        self._consumer.tend(deliveries)

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        self._consumer.settle(deliveries)
        self.settled += len(deliveries)
        self.marks.append((self.settled, time.perf_counter(), time.process_time()))
        if self.settled >= self._deliveries:
            self.done.set()

    def close(self) -> None:
        self._consumer.close()


def loaded(
    bootstrap: str, work: Work, partitions: int, *, killed: bool = False, keys: int | None = None
) -> Subscribed:
    """A source over a new topic that has the whole workload, each id under one of so many keys.

    Args:
        killed: the group has a commit without a word, so that each first window may have killed whoever had it.
    """
    topic = f"orders-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(_WAIT_S)
    failures: list[object] = []
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 5})
    for number, delivery in enumerate(work.deliveries):
        producer.produce(
            topic, delivery.payload, **_where(delivery.id, number, partitions, keys),
            headers=[("message-id", delivery.id.encode())],
            on_delivery=lambda error, _: failures.append(error) if error else None,
        )  # fmt: skip
        producer.poll(0)
    if producer.flush(_WAIT_S) or failures:
        raise ServerError(f"Kafka did not take the workload: {failures[:1]}")
    if killed:
        starts = [TopicPartition(topic, number, 0) for number in range(partitions)]
        wanted = ConsumerGroupTopicPartitions(topic, starts)
        admin.alter_consumer_group_offsets([wanted])[topic].result(_WAIT_S)
    return Subscribed(bootstrap, topic)


def _where(message_id: str, number: int, partitions: int, keys: int | None) -> dict[str, Any]:
    if keys is None:
        return {"partition": number % partitions}
    # of the id, so that a duplicate has the key of its original
    return {"key": str(crc32(message_id.encode()) % keys)}


def _round(
    app: App, url: str, bootstrap: str, work: Work, partitions: int, kind: str
) -> list[Round]:
    """Two rounds of one run: its first half, and its second."""
    Place(url).prepare()
    source = Watched(
        loaded(bootstrap, work, partitions, killed=kind == "killed"), len(work.deliveries)
    )
    worker = Worker(
        app, install_signals=False, maintenance=False, consumptions=[Consumption(source, None)]
    )
    thread = threading.Thread(target=worker.run)
    thread.start()
    deadline = time.monotonic() + _WAIT_S
    while not source.done.wait(0.2) and thread.is_alive() and time.monotonic() < deadline:
        pass
    worker.stop()
    thread.join(_WAIT_S)
    if not source.done.is_set():
        raise ServerError(f"Kafka, {partitions} partitions, did not finish: {worker.failure}")
    half = len(work.deliveries) // 2
    first, last = source.marks[0], source.marks[-1]
    middle = next(mark for mark in source.marks if mark[0] >= half)
    with psycopg.connect(url, autocommit=True) as connection:
        verified = verify(connection, work, inbox_off_by(connection, work))
    return [
        Round(
            contender=f"{partitions} partitions, {kind}: {part}",
            messages=end[0] - start[0],
            rate=(end[0] - start[0]) / (end[1] - start[1]),
            p50_ms=None,
            p99_ms=None,
            client_cpu_us=(end[2] - start[2]) / (end[0] - start[0]) * 1e6,
            verified=verified if part == "warm" else Verified(0, 0),
        )
        for part, start, end in (("from the start", first, middle), ("warm", middle, last))
    ]


def run(*, rounds: int, messages: int) -> dict[str, Any]:
    """Measure, in interleaved rounds; returns the result as it is stored.

    Args:
        rounds: of each contender, 1 or more.
        messages: distinct ones in a round are five times as many.
    """
    bootstrap = broker()
    load = [os.getloadavg()[0]]
    done: list[Round] = []
    with fresh_database("start") as url, App(url) as app:
        app.handler("*", consumer=CONSUMER)(writes)
        app.init()
        for number in range(rounds + 1):
            work = order_paid(5 * messages if number else 1000, seed=number)
            for partitions in _PARTITIONS:
                for kind in _KINDS[:: 1 if number % 2 else -1]:
                    ran = _round(app, url, bootstrap, work, partitions, kind)
                    done += ran if number else []
            load.append(os.getloadavg()[0])
        about = circumstances(url)
    return result(
        phase=NUMBER,
        title=TITLE,
        method=f"{rounds} rounds of {5 * messages:,} distinct messages plus 10 % duplicates, waiting in 6 and in 60 "
        "partitions, one worker with one lane, an ordinary handler; from the start: the first half, from the receive "
        "that returns the first message; warm: the second half of the same run. At rest: a new group. Killed: a group "
        "whose commit does not say that nothing was in work, so that the first window of each partition is counted "
        "before it runs",
        bars=[
            Bar(
                f"{partitions} partitions, {kind}: from the start at least {BAR} times warm",
                BAR,
                _pairs(done, f"{partitions} partitions, {kind}"),
                stretch=kind == "killed",
            )
            for partitions in _PARTITIONS
            for kind in _KINDS
        ],
        rounds=done,
        circumstances={**about, "load_1min": load},
    )


def _pairs(done: Sequence[Round], name: str) -> list[float]:
    rates = {
        part: [run.rate or 0.0 for run in done if run.contender == f"{name}: {part}"]
        for part in ("from the start", "warm")
    }
    return [
        start / warm for start, warm in zip(rates["from the start"], rates["warm"], strict=True)
    ]
