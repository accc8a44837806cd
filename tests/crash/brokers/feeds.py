"""The brokers as the sweep sees them: publish, consume, ask what is left, start again from the beginning."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import aio_pika
import boto3
import nats
import redis
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from nats.js.errors import NotFoundError

from tests.support.brokers import rabbitmq as rabbitmq_support
from tests.support.brokers.rigs.kafka_share import unacknowledged
from tests.support.waiting import DEADLINE_S
from txbox.brokers.base import Source
from txbox.brokers.kafka import Kafka
from txbox.brokers.nats import Nats
from txbox.brokers.rabbitmq import RabbitMQ
from txbox.brokers.redis import RedisStreams
from txbox.brokers.sqs import SQS

GROUP = "shop"
# what a dead worker held comes back after this long; the clients keep what they work on by then
COMES_BACK = timedelta(seconds=2)


@dataclass(frozen=True)
class Sent:
    """One message as its producer sends it."""

    id: str
    payload: bytes


class Feed(ABC):
    """A topic, queue or stream of one job. A process opens its own: no client survives a fork."""

    #: `left` counts what this process holds and has not acknowledged
    sees_unacknowledged: ClassVar[bool] = True

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.name = name

    @property
    def topic(self) -> str:
        return self.name

    @abstractmethod
    def create(self) -> None: ...

    @abstractmethod
    def publish(self, messages: Sequence[Sent]) -> None:
        """Return when the broker has confirmed them all."""

    @abstractmethod
    def source(self, member: int) -> Source: ...

    @abstractmethod
    def left(self, workers: int = 0) -> int:
        """How many messages are not acknowledged yet; 0 when so many workers alive may hold the rest."""

    def replay(self, messages: Sequence[Sent]) -> None:
        """Start again from the beginning; a queue that forgets is filled again."""
        self.publish(messages)

    @abstractmethod
    def remove(self) -> None: ...


class KafkaFeed(Feed):
    PARTITIONS = 2
    STATIC = True

    @property
    def _admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.url, "log_level": 0})

    def create(self) -> None:
        admin = self._admin
        new = NewTopic(self.name, self.PARTITIONS, 1)
        admin.create_topics([new])[self.name].result(DEADLINE_S)

    def publish(self, messages: Sequence[Sent]) -> None:
        failures: list[object] = []
        producer = Producer({"bootstrap.servers": self.url, "acks": "all", "log_level": 0})
        for message in messages:
            producer.produce(
                self.name,
                message.payload,
                key=message.id.encode(),
                headers=[("message-id", message.id.encode())],
                on_delivery=lambda error, _: failures.append(error) if error else None,
            )
        if producer.flush(DEADLINE_S) or failures:
            raise RuntimeError(f"Kafka did not confirm everything: {failures}")

    def source(self, member: int) -> Source:
        # static membership: the successor need not wait until the dead member's session ends
        static = {"group.instance.id": f"{self.name}-{member}"} if self.STATIC else {}
        return Kafka(
            self.url,
            group=self.name,
            options={"session.timeout.ms": 6000, "log_level": 0, **static},
        )

    def _partitions(self, offset: int = 0) -> list[TopicPartition]:
        return [TopicPartition(self.name, number, offset) for number in range(self.PARTITIONS)]

    def left(self, workers: int = 0) -> int:
        consumer = Consumer(
            {"bootstrap.servers": self.url, "group.id": self.name, "log_level": 0}
        )  # it never joins
        try:
            left = 0
            for partition in consumer.committed(self._partitions(), timeout=DEADLINE_S):
                _, end = consumer.get_watermark_offsets(partition, timeout=DEADLINE_S)
                left += end - max(partition.offset, 0)
            return left
        finally:
            consumer.close()

    def replay(self, messages: Sequence[Sent]) -> None:
        starts = ConsumerGroupTopicPartitions(self.name, self._partitions())
        admin = self._admin
        _wait_until_empty(admin, self.name)
        admin.alter_consumer_group_offsets([starts])[self.name].result(DEADLINE_S)

    def remove(self) -> None:
        admin = self._admin
        admin.delete_topics([self.name])[self.name].result(DEADLINE_S)


class DynamicFeed(KafkaFeed):
    """A broker that was killed may take a static member that joins twice for another, and fence it."""

    STATIC = False


class ShareFeed(KafkaFeed):
    """A share group; what it has acknowledged nobody can have again."""

    def source(self, member: int) -> Source:
        # a dead member keeps its share of the partitions for as long as its session lasts
        soon = {"share.session.timeout.ms": 2000, "share.heartbeat.interval.ms": 1000}
        options = {"log_level": 0, **soon}
        return Kafka(self.url, group=self.name, share=True, options=options)

    def left(self, workers: int = 0) -> int:
        return unacknowledged(self.url, self.name, self.name, self.PARTITIONS)

    def replay(self, messages: Sequence[Sent]) -> None:
        self.publish(messages)


class RabbitMQFeed(Feed):
    sees_unacknowledged = False
    KIND = "classic"

    def create(self) -> None:
        rabbitmq_support.declare(self.url, self.KIND, self.name)

    def publish(self, messages: Sequence[Sent]) -> None:
        notes = [rabbitmq_support.note(message.id, message.payload) for message in messages]
        rabbitmq_support.publish(self.url, self.name, *notes)

    def source(self, member: int) -> Source:
        return RabbitMQ(self.url, queues=[self.name])

    def left(self, workers: int = 0) -> int:
        # AMQP tells how many are not delivered, and how many consumers may hold the others: a dead
        # one too, until the server has noticed
        async def count(channel: aio_pika.abc.AbstractChannel) -> int:
            declared = (await channel.declare_queue(self.name, passive=True)).declaration_result
            return (declared.message_count or 0) + max(0, (declared.consumer_count or 0) - workers)

        return int(rabbitmq_support.on_server(self.url, count))

    def remove(self) -> None:
        async def delete(channel: aio_pika.abc.AbstractChannel) -> None:
            await channel.queue_delete(self.name)

        rabbitmq_support.on_server(self.url, delete)


class QuorumFeed(RabbitMQFeed):
    KIND = "quorum"


class SQSFeed(Feed):
    _ACCESS: ClassVar[dict[str, Any]] = {
        "region_name": "elasticmq", "aws_access_key_id": "any", "aws_secret_access_key": "any",
    }  # fmt: skip

    def _client(self) -> Any:
        return boto3.client("sqs", endpoint_url=self.url, **self._ACCESS)

    def _url(self, client: Any) -> str:
        return str(client.get_queue_url(QueueName=self.name)["QueueUrl"])

    def create(self) -> None:
        visible_s = str(int(COMES_BACK.total_seconds()))
        self._client().create_queue(
            QueueName=self.name, Attributes={"VisibilityTimeout": visible_s}
        )

    def publish(self, messages: Sequence[Sent]) -> None:
        client = self._client()
        url = self._url(client)
        for at in range(0, len(messages), 10):
            entries = [
                {
                    "Id": str(number),
                    "MessageBody": message.payload.decode(),
                    "MessageAttributes": {
                        "message-id": {"DataType": "String", "StringValue": message.id}
                    },
                }
                for number, message in enumerate(messages[at : at + 10])
            ]
            answer = client.send_message_batch(QueueUrl=url, Entries=entries)
            if answer.get("Failed"):
                raise RuntimeError(f"SQS did not take everything: {answer['Failed']}")

    def source(self, member: int) -> Source:
        return SQS(self.name, visibility=COMES_BACK, endpoint_url=self.url, **self._ACCESS)

    def left(self, workers: int = 0) -> int:
        client = self._client()
        found = client.get_queue_attributes(QueueUrl=self._url(client), AttributeNames=["All"])
        counts = ("", "NotVisible", "Delayed")
        return sum(
            int(found["Attributes"].get(f"ApproximateNumberOfMessages{count}", 0))
            for count in counts
        )

    def remove(self) -> None:
        client = self._client()
        client.delete_queue(QueueUrl=self._url(client))


class NatsFeed(Feed):
    @property
    def topic(self) -> str:
        return f"{self.name}.paid"

    def _do(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            client = await nats.connect(self.url)
            try:
                return await work(client.jetstream())
            finally:
                await client.close()

        return asyncio.run(run())

    def create(self) -> None:
        self._do(lambda js: js.add_stream(name=self.name, subjects=[f"{self.name}.>"]))

    def publish(self, messages: Sequence[Sent]) -> None:
        async def send(js: Any) -> None:
            for message in messages:
                # not Nats-Msg-Id: the server would drop the duplicates before txbox sees them
                await js.publish(self.topic, message.payload, headers={"message-id": message.id})

        self._do(send)

    def source(self, member: int) -> Source:
        return Nats(self.url, durable=GROUP, ack_wait=COMES_BACK)

    def left(self, workers: int = 0) -> int:
        async def count(js: Any) -> int:
            try:
                info = await js.consumer_info(self.name, GROUP)
            except NotFoundError:
                return int((await js.stream_info(self.name)).state.messages)
            return int(info.num_ack_pending + info.num_pending)

        return int(self._do(count))

    def replay(self, messages: Sequence[Sent]) -> None:
        # a consumer that is created anew delivers all there is
        self._do(lambda js: js.delete_consumer(self.name, GROUP))

    def remove(self) -> None:
        self._do(lambda js: js.delete_stream(self.name))


class RedisFeed(Feed):
    def _do(self, work: Callable[[Any], Any]) -> Any:
        client: Any = redis.Redis.from_url(self.url)
        try:
            return work(client)
        finally:
            client.close()

    def create(self) -> None:
        """A stream begins with its first entry."""

    def publish(self, messages: Sequence[Sent]) -> None:
        def send(client: Any) -> None:
            for message in messages:
                client.xadd(self.name, {"message-id": message.id, "payload": message.payload})

        self._do(send)

    def source(self, member: int) -> Source:
        return RedisStreams(self.url, group=GROUP, claim_idle=COMES_BACK)

    def left(self, workers: int = 0) -> int:
        def count(client: Any) -> int:
            if not client.exists(self.name):
                return 0
            for consumer_group in client.xinfo_groups(self.name):
                if consumer_group["name"] == GROUP.encode():
                    after = b"(" + consumer_group["last-delivered-id"]
                    return int(consumer_group["pending"]) + len(
                        client.xrange(self.name, after, "+")
                    )
            return int(client.xlen(self.name))

        return int(self._do(count))

    def replay(self, messages: Sequence[Sent]) -> None:
        self._do(lambda client: client.xgroup_setid(self.name, GROUP, "0"))

    def remove(self) -> None:
        self._do(lambda client: client.delete(self.name))


def _wait_until_empty(admin: AdminClient, group: str) -> None:
    """Offsets of a group with members cannot be changed; a static member stays until its session ends."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        described: Any = admin.describe_consumer_groups([group])[group].result(DEADLINE_S)
        if not described.members:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"the group {group} still has members after {DEADLINE_S:g} s")
        time.sleep(0.2)


FEEDS: dict[str, type[Feed]] = {
    "kafka": KafkaFeed,
    "kafka-dynamic": DynamicFeed,
    "kafka-share": ShareFeed,
    "rabbitmq": RabbitMQFeed,
    "quorum": QuorumFeed,
    "sqs": SQSFeed,
    "nats": NatsFeed,
    "redis": RedisFeed,
}
