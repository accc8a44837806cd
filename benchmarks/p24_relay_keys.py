"""P24: the relay to each broker, beside a loop of one's own with the same client, with many keys and with one."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import aio_pika
import boto3
import confluent_kafka
import nats
import psycopg
import redis
from confluent_kafka import Producer

from benchmarks import measure
from benchmarks.relay import by_relay, kafka_topics, queues, staged
from benchmarks.result import Bar, Round, Verified, ratios, result
from benchmarks.servers import fresh_database
from benchmarks.workload import order_paid
from tests.support.servers import ServerError, provision, server_urls
from txbox import App
from txbox.brokers.kafka import Kafka
from txbox.brokers.nats import Nats
from txbox.brokers.rabbitmq import RabbitMQ
from txbox.brokers.redis import RedisStreams
from txbox.brokers.sqs import SQS

NUMBER = "P24"
TITLE = "The relay and a loop of one's own, with many keys and with one"

_WAIT_S = 60.0
_PART = 500
_AWS: dict[str, Any] = {
    "region_name": "elasticmq",
    "aws_access_key_id": "any",
    "aws_secret_access_key": "any",
}
_MANY, _ONE = "1,000 keys", "one key"
#: what the page calls them, and how many there are; None for rows without a key
KEYS: dict[str, int | None] = {_MANY: 1000, "no key": None, "10 keys": 10, _ONE: 1}
#: for each broker at least so many times the loop, with many keys and with one
BARS = {
    "Kafka": (0.9, 0.5), "Redis": (0.9, 0.5), "NATS": (0.9, 0.3), "RabbitMQ": (0.9, 0.3), "SQS": (0.9, 0.3),
}  # fmt: skip

#: A row of the outbox: id, topic, key, payload.
Row = tuple[str, str, str | None, bytes]
Publish = Callable[[Sequence[Row]], None]


@dataclass(frozen=True)
class Broker:
    """Where the rows go.

    Args:
        destination: what the App publishes to.
        topic: makes a topic; yields its name, and how to read the ids that have arrived.
        by_hand: opens the client, and yields what publishes rows and waits until all are confirmed.
        share: of the rows of a round, as slow brokers tell their rate by fewer.
    """

    destination: Any
    topic: Any
    by_hand: Any
    share: int = 1


# -- loops of one's own -----------------------------------------------------------------------------


@contextmanager
def _kafka(bootstrap: str) -> Iterator[Publish]:
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "enable.idempotence": True})

    def publish(rows: Sequence[Row]) -> None:
        failures: list[object] = []
        for message_id, topic, key, payload in rows:
            producer.produce(
                topic, payload, key=key, headers=[("message-id", message_id.encode())],
                on_delivery=lambda error, _: failures.append(error) if error else None,
            )  # fmt: skip
        if producer.flush(_WAIT_S) or failures:
            raise ServerError(f"Kafka did not take all: {failures[:1]}")

    yield publish


@contextmanager
def _redis(url: str) -> Iterator[Publish]:
    client: Any = redis.Redis.from_url(url)

    def publish(rows: Sequence[Row]) -> None:
        with client.pipeline(transaction=False) as pipeline:
            for message_id, topic, _, payload in rows:
                pipeline.xadd(topic, {"message-id": message_id, "payload": payload})
            pipeline.execute()

    yield publish
    client.close()


@contextmanager
def _nats(url: str) -> Iterator[Publish]:
    with asyncio.Runner() as runner:
        client = runner.run(nats.connect(url))
        stream = client.jetstream()

        async def together(rows: Sequence[Row]) -> None:
            waiting = [
                await stream.publish_async(topic, payload, headers={"message-id": message_id})
                for message_id, topic, _, payload in rows
            ]
            await asyncio.gather(*waiting)

        yield lambda rows: runner.run(together(rows))
        runner.run(client.close())


@contextmanager
def _rabbitmq(url: str) -> Iterator[Publish]:
    with asyncio.Runner() as runner:
        connection: Any = runner.run(aio_pika.connect(url))

        async def opened() -> Any:
            return await connection.channel(publisher_confirms=True)

        exchange = runner.run(opened()).default_exchange

        async def together(rows: Sequence[Row]) -> None:
            await asyncio.gather(
                *(
                    exchange.publish(
                        aio_pika.Message(payload, message_id=message_id, delivery_mode=2),
                        topic,
                        mandatory=True,
                    )
                    for message_id, topic, _, payload in rows
                )
            )

        yield lambda rows: runner.run(together(rows))
        runner.run(connection.close())


@contextmanager
def _sqs(url: str) -> Iterator[Publish]:
    client: Any = boto3.client("sqs", endpoint_url=url, **_AWS)
    urls: dict[str, str] = {}

    def publish(rows: Sequence[Row]) -> None:
        for start in range(0, len(rows), 10):
            part = rows[start : start + 10]
            topic = part[0][1]
            if topic not in urls:
                urls[topic] = client.get_queue_url(QueueName=topic)["QueueUrl"]
            entries = [
                {
                    "Id": str(number), "MessageBody": payload.decode(),
                    "MessageDeduplicationId": message_id, "MessageGroupId": key or message_id,
                    "MessageAttributes": {"message-id": {"DataType": "String", "StringValue": message_id}},
                }
                for number, (message_id, _, key, payload) in enumerate(part)
            ]  # fmt: skip
            answer = client.send_message_batch(QueueUrl=urls[topic], Entries=entries)
            if answer.get("Failed"):
                raise ServerError(f"SQS did not take all: {answer['Failed'][:1]}")

    yield publish
    client.close()


def by_hand(opened: Any) -> Callable[[str, str], Iterator[list[float]]]:
    """Read 500 rows, publish them, wait for all confirmations, delete them."""

    def send(url: str, topic: str) -> Iterator[list[float]]:
        del topic
        with psycopg.connect(url, autocommit=True) as connection, opened as publish:
            while True:
                began = time.perf_counter()
                rows = connection.execute(
                    "SELECT id, topic, key, payload FROM txbox_outbox ORDER BY number LIMIT %s",
                    (_PART,),
                ).fetchall()
                if not rows:
                    return
                publish(rows)
                connection.execute(
                    "DELETE FROM txbox_outbox WHERE id = ANY(%s)", ([row[0] for row in rows],)
                )
                yield [time.perf_counter() - began] * len(rows)

    return send


# -- where it goes ----------------------------------------------------------------------------------


def _streams(url: str) -> Any:
    @contextmanager
    def topic() -> Iterator[tuple[str, Callable[[], Counter[str]]]]:
        client: Any = redis.Redis.from_url(url)
        name = f"relay-{uuid.uuid4().hex[:8]}"

        def ids() -> Counter[str]:
            return Counter(fields[b"message-id"].decode() for _, fields in client.xrange(name))

        yield name, ids
        client.delete(name)
        client.close()

    return topic


def _subjects(url: str) -> Any:
    async def on_stream(work: Callable[[Any, Any], Any]) -> Any:
        client = await nats.connect(url)
        try:
            return await work(client, client.jetstream())
        finally:
            await client.close()

    @contextmanager
    def topic() -> Iterator[tuple[str, Callable[[], Counter[str]]]]:
        name = f"relay-{uuid.uuid4().hex[:8]}"

        def ids() -> Counter[str]:
            async def read(_: Any, stream: Any) -> Counter[str]:
                found: Counter[str] = Counter()
                count = (await stream.stream_info(name)).state.messages
                pull = await stream.pull_subscribe(f"{name}.all", "counting")
                while found.total() < count:
                    for got in await pull.fetch(min(1000, count - found.total()), timeout=_WAIT_S):
                        names = {name.lower(): value for name, value in got.headers.items()}
                        found[names.get("message-id") or names["nats-msg-id"]] += 1
                        # without it the server hands out no more than a thousand
                        await got.ack()
                return found

            return asyncio.run(on_stream(read))

        asyncio.run(
            on_stream(lambda _, stream: stream.add_stream(name=name, subjects=[f"{name}.>"]))
        )
        yield f"{name}.all", ids
        asyncio.run(on_stream(lambda _, stream: stream.delete_stream(name)))

    return topic


def _fifo(url: str) -> Any:
    @contextmanager
    def topic() -> Iterator[tuple[str, Callable[[], Counter[str]]]]:
        client: Any = boto3.client("sqs", endpoint_url=url, **_AWS)
        name = f"relay-{uuid.uuid4().hex[:8]}.fifo"
        queue = client.create_queue(QueueName=name, Attributes={"FifoQueue": "true"})["QueueUrl"]

        def ids() -> Counter[str]:
            found: Counter[str] = Counter()
            while True:
                got = client.receive_message(
                    QueueUrl=queue, MaxNumberOfMessages=10, MessageAttributeNames=["All"]
                ).get("Messages", [])
                if not got:
                    return found
                found.update(each["MessageAttributes"]["message-id"]["StringValue"] for each in got)
                client.delete_message_batch(
                    QueueUrl=queue,
                    Entries=[
                        {"Id": str(number), "ReceiptHandle": each["ReceiptHandle"]}
                        for number, each in enumerate(got)
                    ],
                )

        yield name, ids
        client.delete_queue(QueueUrl=queue)
        client.close()

    return topic


def brokers(names: Sequence[str]) -> dict[str, Broker]:
    """The brokers of the test environment.

    Raises:
        ServerError: one of them is missing.
    """
    provision.up(tuple(name.lower() for name in names))
    urls = server_urls()
    if missing := [name for name in names if name.lower() not in urls]:
        raise ServerError(f"{NUMBER} needs {' and '.join(missing)}: give the addresses.")
    url = {name: urls[name.lower()] for name in names}
    made: dict[str, Callable[[str], Broker]] = {
        "Kafka": lambda at: Broker(Kafka(at), kafka_topics(at), lambda: _kafka(at)),
        "Redis": lambda at: Broker(RedisStreams(at), _streams(at), lambda: _redis(at)),
        "NATS": lambda at: Broker(Nats(at), _subjects(at), lambda: _nats(at), share=2),
        "RabbitMQ": lambda at: Broker(RabbitMQ(at), queues(at), lambda: _rabbitmq(at), share=4),
        "SQS": lambda at: Broker(SQS(endpoint_url=at, **_AWS), _fifo(at), lambda: _sqs(at), share=10),
    }  # fmt: skip
    return {name: made[name](at) for name, at in url.items()}


def run(*, rounds: int, messages: int, names: Sequence[str] = tuple(BARS)) -> dict[str, Any]:
    """Measure, in interleaved rounds; returns the result as it is stored.

    Args:
        rounds: of each contender, 1 or more.
        messages: rows of a round are five times as many, fewer of the slow brokers.
    """
    load = [os.getloadavg()[0]]
    policy: dict[str, Any] = {
        "lease": timedelta(seconds=60),
        "confirm_within": timedelta(seconds=25),
    }
    found = brokers(names)
    done: list[Round] = []
    with fresh_database("relay") as url:
        with App(url) as app:
            app.init()
        for number in range(rounds + 1):
            work = order_paid(5 * messages if number else 1000, seed=number)
            for name, broker in found.items():
                rows = work.deliveries[: len(work.deliveries) // broker.share]
                for kind, keys in KEYS.items():
                    for side in ("by hand", "relay")[:: 1 if number % 2 else -1]:
                        send = (
                            by_relay(broker.destination, **policy)
                            if side == "relay"
                            else by_hand(broker.by_hand())
                        )
                        ran = _round(f"{name}, {kind}: {side}", url, broker, rows, keys, send)
                        if number:
                            done.append(ran)
            load.append(os.getloadavg()[0])
        circumstances = measure.circumstances(url)
    circumstances["versions"] |= {"confluent_kafka": confluent_kafka.__version__}
    return result(
        phase=NUMBER,
        title=TITLE,
        method=f"{rounds} rounds of {5 * messages:,} staged rows (NATS a half, RabbitMQ a quarter, SQS, a FIFO queue, "
        "a tenth), relay and loop in turns on one machine with broker and database. By hand: read "
        f"{_PART} rows, publish all of them with the same client, wait for all confirmations, delete them; it does not "
        "care what becomes of a key when one of its messages is refused. Kafka: 6 partitions",
        bars=[
            Bar(
                f"{name}, {kind}: at least {bar} times by hand",
                bar,
                ratios(done, f"{name}, {kind}: relay", f"{name}, {kind}: by hand"),
            )
            for name in names
            for kind, bar in zip((_MANY, _ONE), BARS[name], strict=True)
        ],
        rounds=done,
        circumstances={**circumstances, "load_1min": load},
    )


def _round(
    contender: str,
    url: str,
    broker: Broker,
    rows: Sequence[Any],
    keys: int | None,
    send: Callable[[str, str], Iterator[list[float]]],
) -> Round:
    with broker.topic() as (topic, arrived):
        ids = staged(url, topic, rows, keys)
        took: list[float] = []
        began, cpu_began = time.perf_counter(), time.process_time()
        for step in send(url, topic):
            took += step
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        counts = arrived()
    with psycopg.connect(url, autocommit=True) as connection:
        left = connection.execute("SELECT count(*) FROM txbox_outbox").fetchone()
    assert left is not None
    took.sort()
    return Round(
        contender=contender,
        messages=len(ids),
        rate=len(ids) / wall_s,
        p50_ms=took[len(took) // 2] * 1e3,
        p99_ms=took[len(took) * 99 // 100] * 1e3,
        client_cpu_us=cpu_s / len(ids) * 1e6,
        verified=Verified(
            sum(message_id not in counts for message_id in ids),
            sum(count > 1 for count in counts.values()), 0, int(left[0]),
        ),
    )  # fmt: skip
