"""RabbitMQ on its real server: identity, redelivery, dead channels, killed workers, a killed server."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel
from aiormq.abc import ChannelFrame
from aiormq.connection import TCPTransportFactory, TransportFactory
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from tests.brokers.conftest import _own
from tests.databases import Raw
from tests.runtime.support import eventually, running, worker
from tests.servers import ROOT
from tests.servers.control import ThrowawayPostgres, ThrowawayRabbitMQ
from tests.shop import AT_ONCE, CONSUMER, Shop, add_effect, effects, opened, quarantined, statuses
from txbox import App, ConfigurationError, Message, steps
from txbox.brokers.base import Delivery
from txbox.brokers.rabbitmq import RabbitMQ
from txbox.errors import BrokerUnavailable
from txbox.events import ConsumptionPaused, ConsumptionResumed, SettleFailed
from txbox.identity import message_id
from txbox.worker import Worker

pytestmark = pytest.mark.brokers

HOSTILE = b"\xff\xfe\xfd\xfc\xfb\xfa\xf9"
_STAND_IN = "HOSTILE"


class _HostileTransport(TransportFactory):
    """Sends bytes that no client library agrees to send."""

    async def create(self, url: Any, **options: Any) -> Any:
        reader: Any
        writer: Any
        reader, writer = await TCPTransportFactory().create(url, **options)
        write = writer.write
        writer.write = lambda data: write(bytes(data).replace(_STAND_IN.encode(), HOSTILE))
        return reader, writer


class _HostileConnection(aio_pika.Connection):
    def __init__(self, *own: Any, **options: Any) -> None:
        super().__init__(*own, **options)
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
    on_server(url, lambda own: own.declare_queue(queue, durable=True, arguments=arguments))
    return queue


def publish(url: str, queue: str, *messages: aio_pika.Message) -> None:
    async def send(channel: AbstractChannel) -> None:
        for message in messages:
            await channel.default_exchange.publish(message, queue, mandatory=True)

    on_server(url, send)


def publish_plain(url: str, queue: str, properties: Basic.Properties) -> None:
    """Publish these properties and no others: the client would add a random message_id."""

    async def send(channel: AbstractChannel) -> None:
        plain: Any = await channel.get_underlay_channel()
        frames: list[Any] = [
            Basic.Publish(routing_key=queue), ContentHeader(body_size=1, properties=properties),
            ContentBody(b"1"),
        ]  # fmt: skip
        await plain.write_queue.put(ChannelFrame.marshall(plain.number, frames))
        await plain.queue_declare(queue, passive=True)  # answered after the publish

    on_server(url, send)


def note(own: object, body: bytes = b'{"cents": 100}', **more: Any) -> aio_pika.Message:
    kept = aio_pika.DeliveryMode.PERSISTENT
    return aio_pika.Message(body, message_id=str(own), delivery_mode=kept, **more)


def notes(count: int) -> list[aio_pika.Message]:
    return [note(f"m{number}") for number in range(count)]


def left(url: str, queue: str) -> int:
    """How many messages wait in the queue, delivered to nobody."""

    async def ask(channel: AbstractChannel) -> int:
        found = await channel.declare_queue(queue, passive=True)
        return int(found.declaration_result.message_count or 0)

    return int(on_server(url, ask))


@pytest.fixture
def queue(rabbitmq_url: str) -> Iterator[str]:
    own = declare(rabbitmq_url)
    yield own
    on_server(rabbitmq_url, lambda channel: channel.queue_delete(own))


@contextmanager
def opened_source(url: str, *queues: str, **options: Any) -> Iterator[RabbitMQ]:
    source = RabbitMQ(url, queues=queues, **options)
    nothing: Any = None
    source.open(queues, nothing, nothing)
    try:
        yield source
    finally:
        source.close()


def received(source: RabbitMQ, count: int) -> list[Delivery]:
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
    return [own.message.id for own in deliveries if own.message is not None]


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
        shop.app.handler(topic, consumer=CONSUMER, **options)(handle)
        shop.app.consume(source)
        yield shop


# -- what a delivery becomes -----------------------------------------------------------------------


def test_properties_become_the_message(rabbitmq_url: str, queue: str) -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    headers: Any = {
        "text": "é", "bytes": bytearray(b"\xff\x00"), "number": 7, "flag": True, "none": None, "time": at,
        "nested": {"list": [1, None, {"b": bytearray(b"\xff")}], "time": at}, "price": Decimal("1.25"),
    }  # fmt: skip
    sent = note(
        "m1", b"\x00\xff", type="order.paid", content_type="application/json", timestamp=at,
        headers=headers, correlation_id="c1", reply_to="answers",
    )  # fmt: skip
    publish(rabbitmq_url, queue, sent)
    with opened_source(rabbitmq_url, queue) as source:
        (delivery,) = received(source, 1)
    message = delivery.message
    assert message is not None
    assert delivery.topic == message.topic == queue
    assert (message.id, message.type, message.payload) == ("m1", "order.paid", b"\x00\xff")
    assert (message.content_type, message.time) == ("application/json", at)
    assert dict(message.headers) == {
        "text": "é", "bytes": b"\xff\x00", "number": "7", "flag": "true", "none": None,
        "time": "2026-01-02T03:04:05+00:00", "price": "1.25",
        "nested": '{"list": [1, null, {"b": "hex:ff"}], "time": "2026-01-02T03:04:05+00:00"}',
    }  # fmt: skip
    assert message.origin == {
        "queue": queue, "exchange": "", "routing_key": queue, "correlation_id": "c1",
        "reply_to": "answers",
    }  # fmt: skip
    assert not delivery.redelivered


@pytest.mark.parametrize(
    ("property_id", "headers", "expected"),
    [
        ("p1", {"message-id": "h1"}, "p1"),
        (None, {"message-id": "h1"}, "h1"),
        ("", {"Message-Id": bytearray(b"h1")}, "h1"),
        (None, {"message-id": 17}, "17"),
        (None, {"cloudEvents:id": "e1", "cloudEvents:source": "/shop"}, "/shop e1"),
        (None, {"ce-id": "e1", "ce-source": "/shop"}, "/shop e1"),
        (None, {"ce_id": "e1", "ce_source": "/shop"}, "/shop e1"),
    ],
)
def test_identity(
    rabbitmq_url: str, queue: str, property_id: str | None, headers: Any, expected: str
) -> None:
    publish_plain(rabbitmq_url, queue, Basic.Properties(message_id=property_id, headers=headers))
    with opened_source(rabbitmq_url, queue) as source:
        (delivery,) = received(source, 1)
    assert delivery.message is not None
    assert message_id(delivery.message) == expected


def test_type_and_key_of_a_cloud_event(rabbitmq_url: str, queue: str) -> None:
    headers: Any = {"cloudEvents:type": "order.paid", "cloudEvents:subject": "account-7"}
    publish(rabbitmq_url, queue, note("m1", headers=headers))
    publish(rabbitmq_url, queue, note("m2", headers={**headers, "type": "order.sent"}))
    with opened_source(rabbitmq_url, queue) as source:
        messages = [own.message for own in received(source, 2)]
    assert [(own.type, own.key) for own in messages if own] == [
        ("order.paid", "account-7"), ("order.sent", "account-7"),
    ]  # fmt: skip


def test_what_no_client_can_decode_is_a_problem_and_the_rest_goes_on(
    rabbitmq_url: str, queue: str
) -> None:
    headers: tuple[Any, ...] = ({_STAND_IN: "a name"}, {"value": _STAND_IN})
    publish(
        rabbitmq_url, queue, note("m1"), note(_STAND_IN, b"property"),
        note("m2", b"name", headers=headers[0]), note("m3", b"value", headers=headers[1]), note("m4"),
    )  # fmt: skip
    with opened_source(rabbitmq_url, queue) as source:
        first, by_property, by_name, by_value, last = received(source, 5)
        assert ids([first, by_value, last]) == ["m1", "m3", "m4"]
        assert by_value.message is not None
        assert by_value.message.headers.get("value") == HOSTILE
        for own, raw in ((by_property, b"property"), (by_name, b"name")):
            assert own.message is None
            assert "cannot be decoded" in str(own.problem)
            assert (own.topic, own.raw) == (queue, raw)
        source.settle([first, by_property, by_name, by_value, last])
    assert left(rabbitmq_url, queue) == 0


def test_a_routing_key_that_is_no_text(rabbitmq_url: str, queue: str) -> None:
    async def send(channel: AbstractChannel) -> None:
        exchange = await channel.declare_exchange(queue, aio_pika.ExchangeType.FANOUT)
        await (await channel.get_queue(queue)).bind(exchange)
        await exchange.publish(note("m1"), _STAND_IN, mandatory=True)
        await channel.exchange_delete(queue)

    on_server(rabbitmq_url, send)
    with opened_source(rabbitmq_url, queue) as source:
        (delivery,) = received(source, 1)
        assert delivery.message is not None
        assert delivery.message.origin["routing_key"] == f"hex:{HOSTILE.hex()}"
        source.settle([delivery])
    assert left(rabbitmq_url, queue) == 0


# -- settling ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_only_what_is_settled_is_gone(rabbitmq_url: str, kind: str) -> None:
    queue = declare(rabbitmq_url, kind)
    publish(rabbitmq_url, queue, *notes(8))
    with opened_source(rabbitmq_url, queue) as source:
        deliveries = received(source, 8)
        # a gap, the front, the rest of it: single and multiple acknowledgements meet
        source.settle([deliveries[3], deliveries[1]])
        source.settle([deliveries[0]])
        source.settle([deliveries[2], deliveries[6]])
    with opened_source(rabbitmq_url, queue) as source:
        again = received(source, 3)
        assert sorted(ids(again)) == ["m4", "m5", "m7"]
        assert all(own.redelivered for own in again)
        source.settle(again)
    assert left(rabbitmq_url, queue) == 0
    on_server(rabbitmq_url, lambda channel: channel.queue_delete(queue))


def test_prefetch_bounds_what_is_out(rabbitmq_url: str, queue: str) -> None:
    publish(rabbitmq_url, queue, *notes(10))
    with opened_source(rabbitmq_url, queue, prefetch=4) as source:
        deliveries = received(source, 4)
        assert source.receive(10, 0.3) == []
        assert left(rabbitmq_url, queue) == 6
        source.settle(deliveries[:3])
        assert ids(received(source, 3)) == ["m4", "m5", "m6"]


def test_several_queues(rabbitmq_url: str, queue: str) -> None:
    other = declare(rabbitmq_url)
    publish(rabbitmq_url, queue, note("a"))
    publish(rabbitmq_url, other, note("b"))
    with opened_source(rabbitmq_url, queue, other) as source:
        deliveries = received(source, 2)
        assert {(own.topic, *ids([own])) for own in deliveries} == {(queue, "a"), (other, "b")}
        source.settle(deliveries)
    on_server(rabbitmq_url, lambda channel: channel.queue_delete(other))


# -- dead consumers ----------------------------------------------------------------------------------


def test_a_deleted_queue_is_waited_for(rabbitmq_url: str, queue: str) -> None:
    """The server cancels the consumer: without looking, it would wait for ever."""
    publish(rabbitmq_url, queue, note("m1"))
    with opened_source(rabbitmq_url, queue) as source:
        old = received(source, 1)
        on_server(rabbitmq_url, lambda channel: channel.queue_delete(queue))

        def away() -> str | None:
            try:
                source.receive(1, 0.1)
            except BrokerUnavailable as error:
                return str(error)
            return None

        eventually(lambda: "does not exist" in (away() or ""))
        declare(rabbitmq_url, name=queue)
        publish(rabbitmq_url, queue, note("m2"))
        new = received(source, 1)
        assert ids(new) == ["m2"]
        source.settle(
            old
        )  # its tag is 1, as that of the new delivery: it must not acknowledge that
        assert left(rabbitmq_url, queue) == 0
    with opened_source(rabbitmq_url, queue) as source:
        assert ids(received(source, 1)) == ["m2"]


def test_a_consumer_that_vanished_silently_is_noticed(rabbitmq_url: str, queue: str) -> None:
    with opened_source(rabbitmq_url, queue, check=timedelta(milliseconds=100)) as source:
        link = source._link
        assert link is not None
        channel: Any = link._channel
        (tag,) = channel.consumers
        source._call(channel.basic_cancel(tag))
        publish(rabbitmq_url, queue, note("m1"))
        assert ids(received(source, 1)) == ["m1"]
        assert source._link is not link


class _Impatient(ThrowawayRabbitMQ):
    """Takes back what is not acknowledged within a second."""

    def environment(self) -> Mapping[str, str]:
        known, name = super().environment(), "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS"
        quick = "-rabbit consumer_timeout 1000 -rabbit channel_tick_interval 500"
        return {**known, name: f"{known[name]} {quick}"}


@pytest.fixture
def impatient() -> Iterator[ThrowawayRabbitMQ]:
    yield from _own("rabbitmq", _Impatient())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_a_handler_slower_than_the_consumer_timeout_runs_once(
    impatient: ThrowawayRabbitMQ, sqlite_url: str, kind: str
) -> None:
    declare(impatient.url, kind, "orders")
    publish(impatient.url, "orders", note("m1"))
    source, go = RabbitMQ(impatient.url), threading.Event()
    with shop_on(sqlite_url, source, "orders", body=lambda _: go.wait(30) and None) as shop:
        with running(worker(shop.app)) as codes:
            eventually(lambda: shop.calls)
            link = source._link
            # the server closes the channel under the delivery, and delivers it again
            eventually(lambda: source._link not in {link, None})
            go.set()
            eventually(lambda: shop.effects() == 1)
            publish(impatient.url, "orders", note("m2"))
            eventually(lambda: shop.effects() == 2)
            assert codes == []
        assert shop.calls == ["m1", "m2"]
    assert left(impatient.url, "orders") == 0


# -- a server that is away ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_server_comes_back_mid_stream(
    own_rabbitmq: ThrowawayRabbitMQ, sqlite_url: str
) -> None:
    declare(own_rabbitmq.url, "quorum", "orders")
    own_rabbitmq.wait_until_kept("orders")
    publish(own_rabbitmq.url, "orders", *notes(40))
    half, go = threading.Event(), threading.Event()

    def wait_at_half(message: Message[Any]) -> None:
        if message.id == "m20":
            half.set()
            assert go.wait(60)

    source = RabbitMQ(own_rabbitmq.url)
    with shop_on(sqlite_url, source, "orders", body=wait_at_half) as shop:
        with running(worker(shop.app)) as codes:
            assert half.wait(30)
            own_rabbitmq.stop(immediate=True)
            go.set()
            eventually(lambda: shop.emitted(ConsumptionPaused))
            own_rabbitmq.start()
            eventually(lambda: shop.emitted(ConsumptionResumed))
            eventually(lambda: shop.effects() == 40)
            publish(own_rabbitmq.url, "orders", note("late"))
            eventually(lambda: shop.effects() == 41)
            assert codes == []
        assert statuses(shop.raw) == {"processed": 41}
    assert left(own_rabbitmq.url, "orders") == 0


@pytest.mark.slow
def test_a_server_that_is_away_at_the_start_is_waited_for(
    own_rabbitmq: ThrowawayRabbitMQ, sqlite_url: str
) -> None:
    declare(own_rabbitmq.url, name="orders")
    publish(own_rabbitmq.url, "orders", note("m1"))
    own_rabbitmq.stop()
    with (
        shop_on(sqlite_url, RabbitMQ(own_rabbitmq.url), "orders") as shop,
        running(worker(shop.app)) as codes,
    ):
        (paused, *_) = eventually(lambda: shop.emitted(ConsumptionPaused))
        assert "cannot be reached" in paused.reason
        assert "guest" not in paused.reason
        own_rabbitmq.start()
        eventually(lambda: shop.effects() == 1)
        assert codes == []


@pytest.mark.slow
def test_a_server_that_hangs_is_left(own_rabbitmq: ThrowawayRabbitMQ) -> None:
    """No frames come and nothing is closed: only the heartbeats tell."""
    declare(own_rabbitmq.url, name="orders")
    publish(own_rabbitmq.url, "orders", note("m1"))
    pid = own_rabbitmq._pid()
    assert pid is not None
    with opened_source(f"{own_rabbitmq.url}?heartbeat=1", "orders") as source:
        received(source, 1)
        link = source._link
        assert link is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            eventually(lambda: link.lost or source.receive(1, 0.1), "the loss")
        finally:
            os.kill(pid, signal.SIGCONT)
        (delivery,) = received(source, 1)
        assert delivery.redelivered
        source.settle([delivery])
    assert left(own_rabbitmq.url, "orders") == 0


# -- with the worker ---------------------------------------------------------------------------------


def test_duplicates_have_no_second_effect(rabbitmq_url: str, queue: str, sqlite_url: str) -> None:
    publish(rabbitmq_url, queue, *notes(5), *notes(5), *notes(5))
    with shop_on(sqlite_url, RabbitMQ(rabbitmq_url), queue) as shop:
        with running(worker(shop.app)):
            eventually(lambda: shop.effects() == 5 and left(rabbitmq_url, queue) == 0)
        assert sorted(shop.calls) == [f"m{number}" for number in range(5)]
        assert statuses(shop.raw) == {"processed": 5}
    assert left(rabbitmq_url, queue) == 0


@pytest.mark.parametrize("weak", [False, True])
def test_without_an_id_it_is_quarantined(
    rabbitmq_url: str, queue: str, sqlite_url: str, weak: bool
) -> None:
    """Even by weak_ids: a delivery tag names nothing, and the same message would get another one."""
    publish_plain(rabbitmq_url, queue, Basic.Properties())
    publish(rabbitmq_url, queue, note("m1"))
    with shop_on(sqlite_url, RabbitMQ(rabbitmq_url), queue, weak_ids=weak) as shop:
        with running(worker(shop.app)):
            eventually(lambda: shop.effects() == 1 and quarantined(shop.raw))
        ((reason, seen),) = quarantined(shop.raw)
        assert "has no id" in reason
        assert seen == 1
        assert shop.calls == ["m1"]
    assert left(rabbitmq_url, queue) == 0


def test_undecodable_headers_are_quarantined(
    rabbitmq_url: str, queue: str, sqlite_url: str
) -> None:
    publish(rabbitmq_url, queue, note("m1", headers={_STAND_IN: 1}), note("m2"))
    with shop_on(sqlite_url, RabbitMQ(rabbitmq_url), queue) as shop:
        with running(worker(shop.app)):
            eventually(lambda: shop.effects() == 1 and quarantined(shop.raw))
        ((reason, _),) = quarantined(shop.raw)
        assert "cannot be decoded" in reason
    assert left(rabbitmq_url, queue) == 0


@pytest.mark.parametrize("mode", ["inline", "stored"])
@pytest.mark.parametrize("own", [{}, {"type": "a\0b"}, {"message_id": "a\0b"}])
def test_what_no_database_keeps(
    rabbitmq_url: str, queue: str, postgresql_url: str, mode: Any, own: dict[str, Any]
) -> None:
    properties: dict[str, Any] = {
        "message_id": "m1", "content_type": "a\0b", "correlation_id": "a\0b", "reply_to": "\ufffe",
        "headers": {"a\0b": "c\0d", "nested": {"a\0b": ["\0", 1.5]}},
    }  # fmt: skip
    publish_plain(rabbitmq_url, queue, Basic.Properties(**_amqp_names({**properties, **own})))
    publish(rabbitmq_url, queue, note("m2"))
    with (
        shop_on(postgresql_url, RabbitMQ(rabbitmq_url), queue, mode=mode) as shop,
        running(worker(shop.app)) as codes,
    ):
        eventually(lambda: shop.effects("m2") == 1)
        eventually(lambda: shop.effects("m1") == 1 or quarantined(shop.raw))
        assert codes == []
    assert left(rabbitmq_url, queue) == 0


def _amqp_names(properties: dict[str, Any]) -> dict[str, Any]:
    return {("message_type" if name == "type" else name): own for name, own in properties.items()}


def test_failures_are_acknowledged_and_retried_from_the_table(
    rabbitmq_url: str, queue: str, sqlite_url: str
) -> None:
    publish(rabbitmq_url, queue, *notes(3))
    tries: dict[object, int] = {}

    def fail_twice(message: Message[Any]) -> None:
        tries[message.id] = tries.get(message.id, 0) + 1
        if message.id == "m1" and tries["m1"] < 3:
            raise ValueError("not now")

    with shop_on(sqlite_url, RabbitMQ(rabbitmq_url), queue, body=fail_twice) as shop:
        with running(worker(shop.app)):
            eventually(lambda: shop.effects() == 3)
        assert tries == {"m0": 1, "m1": 3, "m2": 1}
        assert not shop.emitted(SettleFailed)
    assert left(rabbitmq_url, queue) == 0


def test_a_drain_leaves_the_rest_in_the_queue(
    rabbitmq_url: str, queue: str, sqlite_url: str
) -> None:
    publish(rabbitmq_url, queue, *notes(10))
    started, go = threading.Event(), threading.Event()

    def hold(message: Message[Any]) -> None:
        started.set()
        assert go.wait(30)

    source = RabbitMQ(rabbitmq_url)
    with shop_on(sqlite_url, source, queue, body=hold) as shop:
        draining = worker(shop.app)
        with running(draining) as codes:
            assert started.wait(30)
            draining.stop()
            go.set()
            eventually(lambda: codes)
        assert codes == [0]
        assert shop.effects() == 1
        assert left(rabbitmq_url, queue) == 9
        with running(worker(shop.app)):
            eventually(lambda: shop.effects() == 10)
        assert sorted(shop.calls) == sorted(f"m{number}" for number in range(10))
    assert left(rabbitmq_url, queue) == 0


@pytest.mark.slow
def test_while_the_database_is_away_nothing_is_rejected_or_counted(
    rabbitmq_url: str,
) -> None:
    queue = declare(rabbitmq_url, "quorum")
    with ThrowawayPostgres() as server:
        source = RabbitMQ(rabbitmq_url)
        with shop_on(server.url, source, queue) as shop, running(worker(shop.app)) as codes:
            publish(rabbitmq_url, queue, *notes(3))
            eventually(lambda: shop.effects() == 3)
            shop.raw.close()
            link = source._link
            server.stop(immediate=True)
            publish(rabbitmq_url, queue, *(note(f"n{number}") for number in range(5)))
            eventually(lambda: shop.emitted(ConsumptionPaused))
            server.start()
            with Raw(server.url) as raw:
                eventually(lambda: effects(raw) == 8)
                assert statuses(raw) == {"processed": 8}
                assert raw.value("SELECT max(attempts) FROM txbox_inbox") == 0
            # the same channel: nothing was given back, so nothing was delivered twice
            assert source._link is link
            assert codes == []
    assert left(rabbitmq_url, queue) == 0
    on_server(rabbitmq_url, lambda channel: channel.queue_delete(queue))


POINTS = [
    "received", "before:handler", "after:handler", "before:commit", "after:commit", "before:ack", "after:ack",
]  # fmt: skip


def _serve_and_die(plan: dict[str, Any]) -> None:
    """A worker that kills itself at the third passage of a point; run as a process of its own."""
    passages = 0

    def die(point: str) -> None:
        nonlocal passages
        passages += point == plan["point"]
        if passages == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    app = App(plan["url"])

    @app.handler(plan["queue"], consumer=CONSUMER, retry=AT_ONCE)
    def handle(message: Message[Any], tx: Any) -> None:
        add_effect(tx, message.id)

    app.consume(RabbitMQ(plan["broker"]))
    steps.crash_point = die
    Worker(app, maintenance=False).run()


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_a_worker_killed_at(rabbitmq_url: str, postgresql_url: str, point: str) -> None:
    queue = declare(rabbitmq_url, "quorum")
    # each alone, so that every point is passed more than twice
    with shop_on(postgresql_url, RabbitMQ(rabbitmq_url), queue) as shop:
        plan = {"url": postgresql_url, "broker": rabbitmq_url, "queue": queue, "point": point}
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.brokers.test_rabbitmq", json.dumps(plan)], cwd=ROOT
        )
        try:
            for number in range(10):
                publish(rabbitmq_url, queue, note(f"m{number}"))
            assert process.wait(30) == -signal.SIGKILL
        finally:
            process.kill()
            process.wait(30)
        with running(worker(shop.app, maintenance=True)):
            eventually(lambda: shop.effects() == 10)
            eventually(lambda: left(rabbitmq_url, queue) == 0)
        assert statuses(shop.raw) == {"processed": 10}
        assert {shop.effects(f"m{number}") for number in range(10)} == {1}
    # what the drained worker had not acknowledged would be back by now
    assert left(rabbitmq_url, queue) == 0
    on_server(rabbitmq_url, lambda channel: channel.queue_delete(queue))


# -- what can never work -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("amqp://127.0.0.1/", {"no_ack": True}, "refuses no_ack="),
        ("amqp://127.0.0.1/", {"prefetch": 0}, "prefetch is 0"),
        ("amqp://127.0.0.1/", {"queues": []}, "no queue to consume"),
        ("amqp://127.0.0.1/", {"queues": [""]}, "no name of a queue"),
        ("amqp://127.0.0.1/", {"colour": 1}, "knows no option 'colour'"),
        ("amqp://127.0.0.1/?heartbeat=0", {}, "heartbeat=0"),
        ("http://user:secret@127.0.0.1/", {}, "amqp://user:password@host"),
    ],
)
def test_refused_at_construction(url: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        RabbitMQ(url, **options)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


def test_refused_at_open(rabbitmq_url: str, queue: str) -> None:
    with (
        pytest.raises(ConfigurationError, match="'absent' does not exist"),
        opened_source(rabbitmq_url, queue, "absent"),
    ):
        pass
    wrong = rabbitmq_url.replace("guest:guest", "guest:secret")
    with pytest.raises(ConfigurationError) as caught, opened_source(wrong, queue):
        pass
    assert "check user, password" in str(caught.value)
    assert "secret" not in str(caught.value)
    nothing: Any = None
    with pytest.raises(ConfigurationError, match="pass queues="):
        RabbitMQ(rabbitmq_url).open(["*"], nothing, nothing)


def test_what_it_says_of_itself(rabbitmq_url: str) -> None:
    source = RabbitMQ("amqp://user:secret@broker.test/", queues=["orders", "payments"])
    assert source.name == "rabbitmq:broker.test:5672/:orders,payments"
    assert source.topics == ("orders", "payments")
    assert source.redelivery_s == 1800
    assert RabbitMQ(rabbitmq_url, consumer_timeout=None).redelivery_s is None
    assert not source.exhausted
    source.close()


@pytest.mark.slow
def test_the_example(rabbitmq_url: str, tmp_path: Path) -> None:
    queue = f"txbox-{secrets.token_hex(6)}"
    with closing(sqlite3.connect(tmp_path / "rabbitmq.db")) as database:
        database.execute("CREATE TABLE ledger (payment INTEGER, amount INTEGER)")
    environment = {
        **os.environ, "AMQP_URL": rabbitmq_url, "PAYMENTS_QUEUE": queue,
        "PYTHONPATH": str(ROOT / "examples"),
    }  # fmt: skip

    def command(*own: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, *own], cwd=tmp_path, env=environment)

    example = str(ROOT / "examples" / "rabbitmq_service.py")
    assert command(example, "declare").wait(30) == 0
    assert command("-m", "txbox", "init", "--database", "sqlite:///rabbitmq.db").wait(30) == 0
    assert command(example, "publish", "3").wait(30) == 0
    service = command("-m", "txbox", "run", "rabbitmq_service:app")
    try:
        with Raw(f"sqlite:///{tmp_path / 'rabbitmq.db'}") as raw:
            eventually(lambda: raw.value("SELECT count(*) FROM ledger") >= 3)
            eventually(lambda: left(rabbitmq_url, queue) == 0)
            service.terminate()
            assert service.wait(30) == 0
            assert raw.rows("SELECT * FROM ledger ORDER BY 1") == [(1, 10), (2, 20), (3, 30)]
            assert statuses(raw) == {"processed": 3}
    finally:
        service.kill()
        service.wait(30)
    # what the drained service had not acknowledged would be back by now
    assert left(rabbitmq_url, queue) == 0
    on_server(rabbitmq_url, lambda channel: channel.queue_delete(queue))


if __name__ == "__main__":
    _serve_and_die(json.loads(sys.argv[1]))
