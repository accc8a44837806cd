"""P14: Kafka to PostgreSQL, end to end, beside the same worker and handlers fed from memory."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import confluent_kafka
import psycopg
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from benchmarks import measure
from benchmarks.contender import inbox_off_by
from benchmarks.place import Place
from benchmarks.result import Bar, Round, Verified, ratios, result
from benchmarks.servers import fresh_database
from benchmarks.workload import CONSUMER, Work, in_sets, order_paid, verify, writes
from tests.support.servers import ServerError, java, provision, server_urls
from tests.support.servers.kafka import POM
from txbox import App, Message
from txbox.app import Consumption
from txbox.brokers.base import Consumer, Context, Delivery, Source
from txbox.brokers.kafka import Kafka
from txbox.worker import Worker

NUMBER = "P14"
TITLE = "Kafka to PostgreSQL, end to end"
BAR = 0.8

_WAIT_S = 120.0
#: not timed: the first in-flight window of a partition, whose starts are counted (promise 4.4)
_WARM = 600
#: as many times the messages, so that rounds take a second or so
_MORE, _MORE_IN_BATCHES = 3, 10


class Memory(Source, Consumer):
    """A source that hands out what it was given, already in the form a handler gets it."""

    name = "memory"

    def __init__(self, work: Work) -> None:
        self._waiting = [
            Message[Any](
                topic="orders",
                payload=delivery.payload,
                headers=[("message-id", delivery.id.encode())],
            )
            for delivery in reversed(work.deliveries)
        ]

    def keeps_order(self, topic: str) -> bool:
        del topic
        return True

    def consumer(self, topics: Sequence[str], context: Context) -> Consumer:
        del topics, context
        return self

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        count = min(messages_max, len(self._waiting))
        if not count:
            time.sleep(min(wait_s, 0.01))
        return [Delivery(self._waiting.pop(), "orders") for _ in range(count)]

    def settle(self, deliveries: Sequence[Delivery]) -> None: ...
    def close(self) -> None: ...


class Timed(Source, Consumer):
    """Another source under a stop-watch: from the last warm-up settlement to the last of all."""

    def __init__(self, source: Source, deliveries: int) -> None:
        self._source = source
        self.name, self.topics = source.name, source.topics
        self._deliveries = deliveries
        self._received: dict[Delivery, float] = {}
        self._settled = 0
        self._began: tuple[int, float, float] | None = None
        self.took_s: list[float] = []
        self.wall_s = self.cpu_s = 0.0
        self.timed = 0
        self.done = threading.Event()

    def keeps_order(self, topic: str) -> bool:
        return self._source.keeps_order(topic)

    def consumer(self, topics: Sequence[str], context: Context) -> Consumer:
        self._consumer = self._source.consumer(topics, context)
        self.tend_every_s = self._consumer.tend_every_s
        return self

    @property
    def exhausted(self) -> bool:
        return self._consumer.exhausted

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        found = self._consumer.receive(messages_max, wait_s)
        now = time.perf_counter()
        for delivery in found:
            self._received[delivery] = now
        return found

    def tend(self, deliveries: Sequence[Delivery]) -> None:
        self._consumer.tend(deliveries)

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        self._consumer.settle(deliveries)
        now = time.perf_counter()
        self._settled += len(deliveries)
        took_s = [now - self._received.pop(delivery) for delivery in deliveries]
        if self._began is None:
            if self._settled >= _WARM:
                self._began = self._settled, now, time.process_time()
            return
        self.took_s += took_s
        if self._settled >= self._deliveries:
            settled, began, cpu_began = self._began
            self.timed = self._settled - settled
            self.wall_s, self.cpu_s = now - began, time.process_time() - cpu_began
            self.done.set()

    def close(self) -> None:
        self._consumer.close()


class Contender:
    """One worker on a database of its own, with a new source in each round."""

    def __init__(self, name: str, url: str, source: Callable[[Work], Source], *, batch: bool):
        self.name = name
        self.batch = batch
        self._url = url
        self._source = source
        self._app = App(url)
        self._app.handler("*", consumer=CONSUMER, batch=batch)(in_sets if batch else writes)
        self._app.init()

    def round(self, work: Work) -> Round:
        Place(self._url).prepare()
        source = Timed(self._source(work), len(work.deliveries))
        worker = Worker(
            self._app,
            install_signals=False,
            maintenance=False,
            consumptions=[Consumption(source, None)],
        )
        thread = threading.Thread(target=worker.run)
        thread.start()
        deadline = time.monotonic() + _WAIT_S
        while not source.done.wait(0.2) and thread.is_alive() and time.monotonic() < deadline:
            pass
        worker.stop()
        thread.join(_WAIT_S)
        if not source.done.is_set():
            raise ServerError(f"{self.name} did not finish its round: {worker.failure}")
        took = sorted(source.took_s)
        return Round(
            contender=self.name,
            messages=source.timed,
            rate=source.timed / source.wall_s,
            p50_ms=took[len(took) // 2] * 1e3,
            p99_ms=took[len(took) * 99 // 100] * 1e3,
            client_cpu_us=source.cpu_s / source.timed * 1e6,
            verified=self._verified(work),
        )

    def _verified(self, work: Work) -> Verified:
        with psycopg.connect(self._url, autocommit=True) as connection:
            return verify(connection, work, inbox_off_by(connection, work))

    def close(self) -> None:
        self._app.close()


def broker() -> str:
    provision.up(("kafka",))
    bootstrap = server_urls().get("kafka")
    if bootstrap is None:
        raise ServerError("P14 needs a Kafka broker: install a Java runtime, or give its address.")
    return bootstrap


def _loaded(bootstrap: str, work: Work) -> Kafka:
    """A source over a new topic of one partition, in which the whole workload lies already."""
    topic = f"orders-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(_WAIT_S)
    failures: list[object] = []
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 5})
    for delivery in work.deliveries:
        producer.produce(
            topic,
            delivery.payload,
            headers=[("message-id", delivery.id.encode())],
            on_delivery=lambda error, _: failures.append(error) if error else None,
        )
    if producer.flush(_WAIT_S) or failures:
        raise ServerError(f"Kafka did not take the workload: {failures[:1]}")
    return Subscribed(bootstrap, topic)


class Subscribed(Kafka):
    """Kafka, of a topic that the handlers do not know by name."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        super().__init__(bootstrap, group=topic, revoke_wait=timedelta(seconds=1))
        self.topics = (topic,)


def run(*, rounds: int, messages: int) -> dict[str, Any]:
    """Measure, in interleaved rounds; returns the result as it is stored.

    Args:
        rounds: of each contender, 1 or more.
        messages: distinct ones in each round.
    """
    bootstrap = broker()
    load = [os.getloadavg()[0]]

    def kafka(work: Work) -> Source:
        return _loaded(bootstrap, work)

    with fresh_database("memory") as memory_url, fresh_database("kafka") as kafka_url:
        contenders = [
            Contender(f"{name}{', batches' if batch else ''}", url, source, batch=batch)
            for batch in (False, True)
            for name, url, source in (("memory", memory_url, Memory), ("kafka", kafka_url, kafka))
        ]
        try:
            done: list[Round] = []
            for contender in contenders:
                contender.round(order_paid(2 * _WARM, seed=0))  # all warm
            for number in range(1, rounds + 1):
                # who goes first alternates
                for contender in contenders[:: 1 if number % 2 else -1]:
                    more = _MORE_IN_BATCHES if contender.batch else _MORE
                    done.append(contender.round(order_paid(messages * more, seed=number)))
                load.append(os.getloadavg()[0])
        finally:
            for contender in contenders:
                contender.close()
        return result(
            phase=NUMBER,
            title=TITLE,
            method=f"{rounds} rounds of {_MORE * messages:,} distinct messages plus 10 % duplicates "
            f"({_MORE_IN_BATCHES * messages:,} for the set-based batch handler), one worker with one lane, one "
            "partition that is full from the start, contenders in turns on one machine with broker and database; "
            f"timed from the settlement of message {_WARM} to that of the last; memory: the same worker, its source a "
            "list of ready messages; latency: received to acknowledged, of a backlog",
            bars=[
                Bar(
                    f"from Kafka{kind}: at least 0.8 times the same from memory",
                    BAR,
                    ratios(done, f"kafka{kind}", f"memory{kind}"),
                )
                for kind in ("", ", batches")
            ],
            rounds=done,
            circumstances={**circumstances(kafka_url), "load_1min": load},
        )


def circumstances(url: str) -> dict[str, Any]:
    found = measure.circumstances(url)
    brokers = [jar.stem.removeprefix("kafka_2.13-") for jar in java.jars(POM).glob("kafka_2.13-*")]
    found["versions"] |= {
        "kafka": brokers[0] if brokers else "of the given broker",
        "confluent_kafka": confluent_kafka.__version__,
        "librdkafka": confluent_kafka.libversion()[0],
    }
    return found
