"""Queues, publishers and sources for the tests of RabbitMQ."""

from __future__ import annotations

import asyncio
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import aio_pika
from aio_pika.abc import AbstractChannel
from aiormq.abc import ChannelFrame
from aiormq.connection import TCPTransportFactory, TransportFactory
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from tests.support.shop import AT_ONCE, CONSUMER, Shop, add_effect, opened
from tests.support.waiting import eventually
from txbox import App, Message
from txbox.brokers.base import Delivery
from txbox.brokers.rabbitmq import RabbitMQ
from txbox.brokers.rabbitmq.source import RabbitMQConsumer
from txbox.errors import BrokerUnavailable

HOSTILE = b"\xff\xfe\xfd\xfc\xfb\xfa\xf9"
STAND_IN = "HOSTILE"
#: A timestamp that stands in for one before 1970.
STAND_IN_TIME = datetime(2001, 2, 3, 4, 5, 6, tzinfo=UTC)
_BEFORE_1970 = struct.pack(">q", -1)


class _HostileTransport(TransportFactory):
    """Sends bytes that no client library agrees to send."""

    async def create(self, url: Any, **options: Any) -> Any:
        reader: Any
        writer: Any
        reader, writer = await TCPTransportFactory().create(url, **options)
        write = writer.write
        stand_in_time = struct.pack(">q", int(STAND_IN_TIME.timestamp()))

        def hostile(data: Any) -> None:
            sent = bytes(data).replace(STAND_IN.encode(), HOSTILE)
            write(sent.replace(stand_in_time, _BEFORE_1970))

        writer.write = hostile
        return reader, writer


class _HostileConnection(aio_pika.Connection):
    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        self.kwargs["transport_factory"] = _HostileTransport()


async def _with_channel(url: str, work: Callable[[AbstractChannel], Any]) -> Any:
    connection = await aio_pika.connect(url, connection_class=_HostileConnection)
    async with connection:
        return await work(await connection.channel())


def on_server(url: str, work: Callable[[AbstractChannel], Any]) -> Any:
    return asyncio.run(_with_channel(url, work))


def declare(url: str, kind: str = "classic", name: str | None = None) -> str:
    queue = name or f"txbox-{secrets.token_hex(6)}"
    arguments: Any = {"x-queue-type": kind}
    on_server(url, lambda each: each.declare_queue(queue, durable=True, arguments=arguments))
    return queue


def publish(url: str, queue: str, *messages: aio_pika.Message) -> None:
    async def send(channel: AbstractChannel) -> None:
        for message in messages:
            await channel.default_exchange.publish(message, queue, mandatory=True)

    on_server(url, send)


def publish_plain(url: str, queue: str, *messages: tuple[Basic.Properties, bytes]) -> None:
    """Publish these properties and no others: the client would add a random message_id."""

    async def send(channel: AbstractChannel) -> None:
        plain: Any = await channel.get_underlay_channel()
        for tag, (properties, body) in enumerate(messages, start=1):
            plain.confirmations[tag] = asyncio.get_running_loop().create_future()
            frames: list[Any] = [
                Basic.Publish(routing_key=queue),
                ContentHeader(body_size=len(body), properties=properties),
                *([ContentBody(body)] if body else []),
            ]
            await plain.write_queue.put(ChannelFrame.marshall(plain.number, frames))
        await asyncio.gather(*plain.confirmations.values())

    on_server(url, send)


def note(what: object, body: bytes = b'{"cents": 100}', **more: Any) -> aio_pika.Message:
    kept = aio_pika.DeliveryMode.PERSISTENT
    return aio_pika.Message(body, message_id=str(what), delivery_mode=kept, **more)


def notes(count: int) -> list[aio_pika.Message]:
    return [note(f"m{number}") for number in range(count)]


def left(url: str, queue: str) -> int:
    """How many messages wait in the queue, delivered to nobody."""

    async def ask(channel: AbstractChannel) -> int:
        found = await channel.declare_queue(queue, passive=True)
        return int(found.declaration_result.message_count or 0)

    return int(on_server(url, ask))


@contextmanager
def opened_source(url: str, *queues: str, **options: Any) -> Iterator[RabbitMQConsumer]:
    nothing: Any = None
    consumer = RabbitMQ(url, queues=queues, **options).consumer(queues, nothing)
    try:
        yield consumer
    finally:
        consumer.close()


def received(source: RabbitMQConsumer, count: int) -> list[Delivery]:
    found: list[Delivery] = []

    def enough() -> bool:
        try:
            found.extend(source.receive(count - len(found), 0.2))
        except BrokerUnavailable:
            return False
        return len(found) >= count

    eventually(enough, f"{count} deliveries")
    return found


def ids(deliveries: Sequence[Delivery]) -> list[Any]:
    return [delivery.message.id for delivery in deliveries if delivery.message is not None]


@contextmanager
def shop_on(database: str, source: RabbitMQ, topic: str, **options: Any) -> Iterator[Shop]:
    """A shop whose handler consumes `topic`; `body` runs after its effect."""
    body: Callable[[Message[Any]], None] | None = options.pop("body", None)
    with App(database) as app:
        app.init()
    with opened(database) as shop:

        def handle(message: Message[Any], tx: Any) -> None:
            shop.calls.append(str(message.id))
            add_effect(tx, message.id)
            if body is not None:
                body(message)

        options.setdefault("retry", AT_ONCE)
        register: Any = shop.app.handler(topic, consumer=CONSUMER, **options)
        register(handle)
        shop.app.consume(source)
        yield shop
