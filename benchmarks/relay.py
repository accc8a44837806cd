"""RELAY: rows of the outbox to Kafka, beside a loop that publishes one, waits for its confirmation and deletes it."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import aio_pika
import confluent_kafka
import psycopg
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from benchmarks import measure
from benchmarks.result import Bar, Round, Verified, ratios, result
from benchmarks.servers import fresh_database
from benchmarks.workload import Delivery, Work, order_paid
from tests.support.servers import ServerError, provision, server_urls
from txbox import App, Message, Outbox, Outgoing, RelayPolicy
from txbox.brokers.kafka import Kafka
from txbox.brokers.rabbitmq import RabbitMQ
from txbox.worker.agenda import Run
from txbox.worker.relay import Relay

NUMBER = "RELAY"
TITLE = "The relay, from PostgreSQL to Kafka"
BAR = 10.0

_PARTITIONS = 6
_KEYS = 1000
_WAIT_S = 60.0
_PART = 500
#: one by one takes that much longer: a part of the rows tells its rate
_FEWER_ONE_BY_ONE = 10

_Ids = Callable[[], "Counter[str]"]


class Contender:
    """One way to empty an outbox into a new topic.

    Args:
        topic: makes a topic and yields its name, and how to read the ids that arrived there.
        send: empties the outbox; yields the seconds that each row took, a list for each step.
        share: of the rows of a round.
    """

    def __init__(
        self, name: str, url: str, topic: Any, send: Callable[[str, str], Iterator[list[float]]],
        *, share: int = 1,
    ) -> None:  # fmt: skip
        self.name = name
        self._url, self._topic, self._send, self._share = url, topic, send, share

    def round(self, work: Work) -> Round:
        rows = work.deliveries[: len(work.deliveries) // self._share]
        with self._topic() as (topic, arrived):
            ids = staged(self._url, topic, rows)
            took: list[float] = []
            began, cpu_began = time.perf_counter(), time.process_time()
            for step in self._send(self._url, topic):
                took += step
            wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
            verified = self._verified(ids, arrived())
        took.sort()
        return Round(
            contender=self.name,
            messages=len(ids),
            rate=len(ids) / wall_s,
            p50_ms=took[len(took) // 2] * 1e3,
            p99_ms=took[len(took) * 99 // 100] * 1e3,
            client_cpu_us=cpu_s / len(ids) * 1e6,
            verified=verified,
        )

    def _verified(self, ids: list[str], arrived: Counter[str]) -> Verified:
        with psycopg.connect(self._url, autocommit=True) as connection:
            row = connection.execute("SELECT count(*) FROM txbox_outbox").fetchone()
        assert row is not None
        lost = sum(message_id not in arrived for message_id in ids)
        return Verified(lost, sum(count > 1 for count in arrived.values()), 0, int(row[0]))


def staged(url: str, topic: str, rows: Sequence[Delivery], keys: int | None = _KEYS) -> list[str]:
    """The rows in the outbox, and nothing else, under so many keys; None for no key."""
    ids: list[str] = []
    with psycopg.connect(url) as tx:
        tx.execute("TRUNCATE txbox_outbox, txbox_inbox")
        for start in range(0, len(rows), _PART):
            ids += Outbox().stage_many(
                tx,
                [
                    Outgoing(
                        topic=topic, body=row.payload, key=None if keys is None else str(at % keys)
                    )
                    for at, row in enumerate(rows[start : start + _PART], start)
                ],
            )
            tx.commit()
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute("ANALYZE txbox_outbox")
        admin.execute("CHECKPOINT")
    return ids


def by_relay(destination: Any, **policy: Any) -> Callable[[str, str], Iterator[list[float]]]:
    """The relay of txbox; a row takes as long as the turn that sends it."""

    def send(url: str, topic: str) -> Iterator[list[float]]:
        with App(url, relaying=RelayPolicy(**policy)) as app:

            @app.handler(topic, consumer="next")
            def take(message: Message[Any], tx: Any) -> None: ...

            if destination is not None:
                app.publish(destination, topics=[topic])
            sent: list[int] = []
            app.events.observers.append(lambda event: sent.append(getattr(event, "count", 0)))
            relay = Relay(Run(app, lambda _error: None), app.routes.all()[0])
            more = True
            while more:
                began, before = time.perf_counter(), sum(sent)
                # a turn also ends when its time does
                more = relay.turn() or relay.has_rows()
                yield [time.perf_counter() - began] * (sum(sent) - before)
            relay.close()

    return send


def one_by_one(bootstrap: str, marked_each: int) -> Callable[[str, str], Iterator[list[float]]]:
    """The textbook loop: publish, wait, delete.

    Args:
        marked_each: rows that one DELETE and its commit take together; 1 is what a crash forgives most.
    """

    def send(url: str, topic: str) -> Iterator[list[float]]:
        del topic
        options = {"bootstrap.servers": bootstrap, "acks": "all", "enable.idempotence": True}
        producer = Producer(options | {"linger.ms": 0})
        failures: list[object] = []
        with psycopg.connect(url, autocommit=True) as connection:
            while True:
                rows = connection.execute(
                    "SELECT id, topic, key, payload FROM txbox_outbox ORDER BY number LIMIT 500"
                ).fetchall()
                if not rows:
                    break
                took: list[float] = []
                done: list[str] = []
                for message_id, row_topic, key, payload in rows:
                    began = time.perf_counter()
                    producer.produce(
                        row_topic, payload, key=key, headers=[("message-id", message_id.encode())],
                        on_delivery=lambda error, _: failures.append(error) if error else None,
                    )  # fmt: skip
                    if producer.flush(_WAIT_S) or failures:
                        raise ServerError(f"Kafka did not take a message: {failures[:1]}")
                    done.append(message_id)
                    if len(done) == marked_each or len(took) + 1 == len(rows):
                        connection.execute("DELETE FROM txbox_outbox WHERE id = ANY(%s)", (done,))
                        done = []
                    took.append(time.perf_counter() - began)
                yield took

    return send


# -- where it goes --------------------------------------------------------------------------------


def kafka_topics(bootstrap: str) -> Any:
    @contextmanager
    def topic() -> Iterator[tuple[str, _Ids]]:
        name = f"relay-{uuid.uuid4().hex[:8]}"
        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.create_topics([NewTopic(name, _PARTITIONS, 1)])[name].result(_WAIT_S)
        yield name, lambda: _kafka_ids(bootstrap, name)
        admin.delete_topics([name])[name].result(_WAIT_S)

    return topic


def _kafka_ids(bootstrap: str, topic: str) -> Counter[str]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": topic})
    found: Counter[str] = Counter()
    try:
        every = [TopicPartition(topic, number, 0) for number in range(_PARTITIONS)]
        left = sum(
            consumer.get_watermark_offsets(partition, timeout=_WAIT_S)[1] for partition in every
        )
        consumer.assign(every)
        while found.total() < left:
            for record in consumer.consume(min(1000, left - found.total()), timeout=_WAIT_S):
                message_id = dict(record.headers() or ())["message-id"]
                found[
                    message_id.decode() if isinstance(message_id, bytes) else str(message_id)
                ] += 1
    finally:
        consumer.close()
    return found


def queues(url: str) -> Any:
    async def on_channel(work: Callable[[Any], Any]) -> Any:
        async with await aio_pika.connect(url) as connection:
            return await work(await connection.channel())

    def ids(name: str) -> Counter[str]:
        async def read(channel: Any) -> Counter[str]:
            queue, found = await channel.declare_queue(name, passive=True), Counter[str]()
            for _ in range(queue.declaration_result.message_count):
                found[(await queue.get(no_ack=True)).message_id] += 1
            return found

        return asyncio.run(on_channel(read))

    @contextmanager
    def topic() -> Iterator[tuple[str, _Ids]]:
        name = f"relay-{uuid.uuid4().hex[:8]}"
        asyncio.run(on_channel(lambda channel: channel.declare_queue(name, durable=True)))
        yield name, lambda: ids(name)
        asyncio.run(on_channel(lambda channel: channel.queue_delete(name)))

    return topic


def _inbox(url: str) -> Any:
    @contextmanager
    def topic() -> Iterator[tuple[str, _Ids]]:
        def ids() -> Counter[str]:
            with psycopg.connect(url) as connection:
                rows = connection.execute("SELECT message_id FROM txbox_inbox").fetchall()
            return Counter(message_id for (message_id,) in rows)

        yield f"relay-{uuid.uuid4().hex[:8]}", ids

    return topic


def _servers() -> tuple[str, str]:
    provision.up(("kafka", "rabbitmq"))
    urls = server_urls()
    if "kafka" not in urls or "rabbitmq" not in urls:
        raise ServerError(f"{NUMBER} needs Kafka and RabbitMQ: give their addresses.")
    return urls["kafka"], urls["rabbitmq"]


def run(*, rounds: int, messages: int) -> dict[str, Any]:
    """Measure, in interleaved rounds; returns the result as it is stored.

    Args:
        rounds: of each contender, 1 or more.
        messages: distinct ones in each round; the relay is given five times as many.
    """
    bootstrap, amqp = _servers()
    load = [os.getloadavg()[0]]
    lease = {"lease": timedelta(seconds=60), "confirm_within": timedelta(seconds=25)}
    kafka, rabbitmq = Kafka(bootstrap), RabbitMQ(amqp)
    with fresh_database("relay") as url:
        with App(url) as app:
            app.init()
        topics = kafka_topics(bootstrap)
        contenders = [
            Contender("one by one", url, topics, one_by_one(bootstrap, 1), share=_FEWER_ONE_BY_ONE),
            Contender(
                "one by one, deleted 500 at once", url, topics, one_by_one(bootstrap, 500),
                share=_FEWER_ONE_BY_ONE,
            ),
            Contender("relay to Kafka", url, topics, by_relay(kafka, **lease)),
            Contender("relay to RabbitMQ", url, queues(amqp), by_relay(rabbitmq, **lease), share=2),
            Contender("relay to its own App", url, _inbox(url), by_relay(None, **lease)),
        ]  # fmt: skip
        for contender in contenders:
            contender.round(order_paid(1000, seed=0))  # all warm
        done: list[Round] = []
        for number in range(1, rounds + 1):
            # who goes first alternates
            work = order_paid(5 * messages, seed=number)
            done += [contender.round(work) for contender in contenders[:: 1 if number % 2 else -1]]
            load.append(os.getloadavg()[0])
        waiting = ratios(done, "relay to Kafka", "one by one, deleted 500 at once")
        found = measure.circumstances(url)
        found["versions"] |= {"confluent_kafka": confluent_kafka.__version__}
        return result(
            phase=NUMBER,
            title=TITLE,
            method=f"{rounds} rounds of {5 * messages:,} staged rows of {_KEYS:,} keys, each into a new topic of "
            f"{_PARTITIONS} partitions, contenders in turns on one machine with broker and database (one by one: a "
            f"tenth of the rows, RabbitMQ: half). One by one: an idempotent producer, `acks=all`, no linger; publish, "
            "wait for the confirmation, DELETE in a commit of its own. The relay as it comes, batches of 500, of one "
            "key one message at a time. A row's latency is that of its batch",
            bars=[
                Bar(
                    "the relay to Kafka: at least 10 times one by one",
                    BAR,
                    ratios(done, "relay to Kafka", "one by one"),
                ),
                Bar(
                    "and 5 times a loop that deletes 500 rows in one statement, so that it pays for publishing alone",
                    5.0,
                    waiting,
                    stretch=True,
                ),
            ],
            rounds=done,
            circumstances={**found, "load_1min": load},
        )
