"""The ground the broker tests stand on: what a broker acknowledged is there after kill -9."""

from __future__ import annotations

import asyncio
from typing import Any

import aio_pika
import boto3
import nats
import pytest
import redis
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from types_boto3_sqs import SQSClient

from tests.support.servers.control import (
    ThrowawayElasticMQ,
    ThrowawayKafka,
    ThrowawayNats,
    ThrowawayRabbitMQ,
    ThrowawayRedis,
)
from tests.support.waiting import DEADLINE_S, eventually

pytestmark = pytest.mark.brokers


def _create_topic(bootstrap: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    topic = NewTopic("orders", num_partitions=1, replication_factor=1)
    admin.create_topics([topic])["orders"].result(DEADLINE_S)


def _produce(bootstrap: str, body: bytes) -> None:
    """Returns once the broker acknowledged it."""
    failures: list[object] = []
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "log_level": 0})
    producer.produce("orders", body, on_delivery=lambda error, _: failures.append(error))
    assert producer.flush(DEADLINE_S) == 0
    assert failures == [None]


def _consume(bootstrap: str, count: int) -> list[bytes | None]:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "smoke",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "log_level": 0,
        }
    )
    consumer.subscribe(["orders"])
    try:
        messages = consumer.consume(count, timeout=DEADLINE_S)
        return [message.value() for message in messages if message.error() is None]
    finally:
        consumer.close()


def test_kafka_keeps_what_it_acknowledged(throwaway_kafka: ThrowawayKafka) -> None:
    _create_topic(throwaway_kafka.bootstrap)
    _produce(throwaway_kafka.bootstrap, b"kept")
    throwaway_kafka.stop(immediate=True)
    throwaway_kafka.start()
    assert _consume(throwaway_kafka.bootstrap, 1) == [b"kept"]


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_rabbitmq_keeps_what_it_confirmed(throwaway_rabbitmq: ThrowawayRabbitMQ, kind: str) -> None:
    async def publish() -> None:
        async with await aio_pika.connect(throwaway_rabbitmq.url) as connection:
            channel = await connection.channel(publisher_confirms=True)
            await channel.declare_queue("orders", durable=True, arguments={"x-queue-type": kind})
            message = aio_pika.Message(b"kept", delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
            await channel.default_exchange.publish(message, "orders", mandatory=True)

    async def receive() -> bytes:
        async with await aio_pika.connect(throwaway_rabbitmq.url) as connection:
            channel = await connection.channel()
            queue = await channel.get_queue("orders")
            async with queue.iterator(timeout=DEADLINE_S) as messages:
                message = await anext(messages)
                await message.ack()
                return message.body

    asyncio.run(publish())
    if kind == "quorum":
        throwaway_rabbitmq.wait_until_kept("orders")
    throwaway_rabbitmq.stop(immediate=True)
    throwaway_rabbitmq.start()
    assert asyncio.run(receive()) == b"kept"


def test_redis_keeps_what_it_answered(throwaway_redis: ThrowawayRedis) -> None:
    with redis.Redis.from_url(throwaway_redis.url) as client:
        client.xadd("orders", {"body": "kept"})
    throwaway_redis.stop(immediate=True)
    throwaway_redis.start()
    with redis.Redis.from_url(throwaway_redis.url, decode_responses=True) as client:
        client.xgroup_create("orders", "smoke", id="0")
        answer: Any = client.xreadgroup("smoke", "one", {"orders": ">"})
        ((_, entries),) = answer
        ((entry, fields),) = entries
        assert fields == {"body": "kept"}
        assert client.xack("orders", "smoke", entry) == 1


def test_nats_keeps_what_a_stream_acknowledged(throwaway_nats: ThrowawayNats) -> None:
    async def publish() -> None:
        client = await nats.connect(throwaway_nats.url)
        stream = client.jetstream()
        await stream.add_stream(name="ORDERS", subjects=["orders"])
        await stream.publish("orders", b"kept")
        await client.close()

    async def receive() -> bytes:
        client = await nats.connect(throwaway_nats.url)
        subscription = await client.jetstream().pull_subscribe("orders", durable="smoke")
        (message,) = await subscription.fetch(1, timeout=DEADLINE_S)
        await message.ack_sync()
        await client.close()
        return message.data

    asyncio.run(publish())
    throwaway_nats.stop(immediate=True)
    throwaway_nats.start()
    assert asyncio.run(receive()) == b"kept"


def _sqs(url: str) -> SQSClient:
    return boto3.client(
        "sqs",
        endpoint_url=url,
        region_name="elasticmq",
        aws_access_key_id="any",
        aws_secret_access_key="any",
    )


def test_elasticmq_keeps_what_it_answered(throwaway_sqs: ThrowawayElasticMQ) -> None:
    client = _sqs(throwaway_sqs.url)
    queue = client.create_queue(QueueName="orders")["QueueUrl"]
    client.send_message(QueueUrl=queue, MessageBody="kept")
    throwaway_sqs.stop(immediate=True)
    throwaway_sqs.start()
    # asked again and again: it takes calls before it has its messages back, and may not wake who waits for them
    (message,) = eventually(
        lambda: client.receive_message(QueueUrl=queue, WaitTimeSeconds=1).get("Messages")
    )
    assert message.get("Body") == "kept"
    client.delete_message(QueueUrl=queue, ReceiptHandle=message.get("ReceiptHandle", ""))
    client.close()
