"""NATS JetStream on a real server: identity, redelivery, confirmed acknowledgements, killed workers and servers."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nats
import pytest
from nats.js.api import ConsumerConfig

from tests.brokers.streaming import Unwatched, booked, example, process
from tests.conftest import NewDatabase
from tests.databases import Raw
from tests.runtime.support import eventually, running, worker
from tests.servers.control import ThrowawayNats, ThrowawayPostgres
from tests.shop import (
    AT_ONCE,
    CONSUMER,
    Shop,
    add_effect,
    create_effects,
    effects,
    opened,
    quarantined,
    statuses,
)
from txbox import App, ConfigurationError, Message
from txbox.brokers.base import Delivery
from txbox.brokers.nats import Nats
from txbox.errors import BrokerUnavailable
from txbox.events import ConsumptionPaused, ConsumptionResumed
from txbox.identity import message_id

pytestmark = pytest.mark.brokers

SECOND = timedelta(seconds=1)


class Stream:
    """A stream of this test alone, with the subject `<name>.paid` and others below its name."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = f"ORDERS-{secrets.token_hex(6)}"
        self.topic = f"{self.name}.paid"

    def do(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            client = await nats.connect(self.url)
            try:
                return await work(client.jetstream())
            finally:
                await client.close()

        return asyncio.run(run())

    def create(self) -> None:
        self.do(lambda js: js.add_stream(name=self.name, subjects=[f"{self.name}.>"]))

    async def add_consumer(self, config: ConsumerConfig, js: Any) -> None:
        await js.add_consumer(self.name, config)

    def delete(self) -> None:
        self.do(lambda js: js.delete_stream(self.name))

    def add(
        self, *ids: str | None, payload: bytes = b"{}", subject: str | None = None, **headers: str
    ) -> None:
        async def publish(js: Any) -> None:
            for own in ids:
                identity = {} if own is None else {"Nats-Msg-Id": own}
                await js.publish(
                    subject or self.topic, payload, headers={**identity, **headers} or None
                )

        self.do(publish)

    def add_raw(self, headers: bytes, payload: bytes = b"{}") -> None:
        """Publish header bytes that no client agrees to send."""
        block = b"NATS/1.0\r\n" + headers + b"\r\n"
        parts = urlsplit(self.url)
        with socket.create_connection((parts.hostname or "", parts.port or 0)) as connection:
            lines = connection.makefile("rb")
            lines.readline()
            sizes = f"{len(block)} {len(block) + len(payload)}".encode()
            connection.sendall(
                b'CONNECT {"headers":true,"verbose":false}\r\nHPUB ' + self.topic.encode() + b" " + sizes
                + b"\r\n" + block + payload + b"\r\nPING\r\n"
            )  # fmt: skip
            while (line := lines.readline()) != b"PONG\r\n":
                assert not line.startswith(b"-ERR"), line

    def pending(self, durable: str = "shop") -> int:
        """What is not acknowledged, delivered or not."""
        info = self.do(lambda js: js.consumer_info(self.name, durable))
        return int(info.num_ack_pending + info.num_pending)

    def source(self, **options: Any) -> Nats:
        return Nats(self.url, **{"durable": "shop", **options})

    def opened(self, **options: Any) -> Nats:
        source = self.source(**options)
        source.open([self.topic], Unwatched(), Unwatched())
        return source


@pytest.fixture
def stream(nats_url: str) -> Iterator[Stream]:
    own = Stream(nats_url)
    own.create()
    yield own
    own.delete()


@pytest.fixture
def shop(sqlite_url: str) -> Iterator[Shop]:
    with opened(sqlite_url) as own:
        yield own


@pytest.fixture
def closing() -> Iterator[Callable[[Nats], Nats]]:
    """Closes sources whatever happens: their threads must not outlive the test."""
    sources: list[Nats] = []

    def keep(source: Nats) -> Nats:
        sources.append(source)
        return source

    yield keep
    for own in sources:
        own.close()


def handle(
    shop: Shop, stream: Stream, body: Callable[[Message[Any]], None] | None = None, **options: Any
) -> None:
    def own(message: Message[Any], tx: Any) -> None:
        shop.calls.append(str(message.id))
        add_effect(tx, message.id)
        if body is not None:
            body(message)

    shop.app.handler(stream.topic, consumer=CONSUMER, retry=AT_ONCE, **options)(own)


def received(source: Nats, count: int = 1) -> list[Delivery]:
    found: list[Delivery] = []

    def enough() -> bool:
        found.extend(source.receive(100, 0.1))
        return len(found) >= count

    eventually(enough)
    return found


def the_message(delivery: Delivery) -> Message[Any]:
    assert delivery.message is not None
    return delivery.message


def test_a_message_of_the_stream(stream: Stream, closing: Any) -> None:
    stream.add("m1", payload=b"\xff\x00", type="order.paid", key="k", **{"content-type": "x/y"})
    (delivery,) = received(closing(stream.opened()))
    message = the_message(delivery)
    assert (message.topic, message.payload, message.id) == (stream.topic, b"\xff\x00", "m1")
    assert (message.type, message.key, message.content_type) == ("order.paid", "k", "x/y")
    assert message.time is not None
    assert abs(message.time - datetime.now(UTC)) < timedelta(minutes=1)
    assert (message.origin["stream"], message.origin["sequence"]) == (stream.name, 1)
    assert not delivery.redelivered


def test_hostile_headers_arrive_as_they_are(stream: Stream, closing: Any) -> None:
    stream.add_raw(
        b"message-id: m1\r\nnote: \xff\xfe\r\nnote: 2\r\na b: c\r\nkey: \xfe\r\nStatus: 503\r\nno colon\r\n"
    )
    stream.add_raw(b"ce_id: 1\r\nce_source: /a\r\nce_type: t\r\nce_subject: k\r\nNats-Msg-Id: \r\n")
    hostile, cloud = received(closing(stream.opened()), 2)
    message = the_message(hostile)
    assert message_id(message) == "m1"
    assert message.headers.get_all("note") == [b"\xff\xfe", "2"]
    assert (message.headers.get("a b"), message.headers.get("status")) == ("c", "503")
    assert message.key == "hex:fe"
    message = the_message(cloud)
    assert (message.type, message.key, message_id(message)) == ("t", "k", "/a 1")


def test_weak_ids_differ_in_a_recreated_stream(stream: Stream, closing: Any) -> None:
    found: list[str] = []
    for _ in range(2):
        stream.add(None)
        source = closing(stream.opened(ack_wait=SECOND))
        (first,) = received(source)
        (again,) = received(source)
        assert again.redelivered
        assert message_id(the_message(again), weak=True) == message_id(
            the_message(first), weak=True
        )
        assert the_message(first).origin["sequence"] == 1
        found.append(message_id(the_message(first), weak=True))
        source.close()
        stream.delete()
        stream.create()
    assert found[0] != found[1]


def test_a_service_settles_what_it_processed(shop: Shop, stream: Stream) -> None:
    stream.add(*(f"m{number}" for number in range(40)))
    # the server's own window for duplicates does not look at this header
    for number in range(10):
        stream.add(None, payload=b"{}", **{"message-id": f"m{number}"})
    stream.add(None)
    handle(shop, stream)
    shop.app.consume(stream.source())
    with running(worker(shop.app)):
        eventually(lambda: len(shop.calls) == 40 and quarantined(shop.raw))
        eventually(lambda: not stream.pending())
    assert effects(shop.raw) == 40
    assert statuses(shop.raw) == {"processed": 40}


def test_weak_ids_for_a_handler_that_wants_them(shop: Shop, stream: Stream) -> None:
    stream.add(None)
    handle(shop, stream, weak_ids=True)
    shop.app.consume(stream.source(confirm=False))
    with running(worker(shop.app)):
        eventually(lambda: effects(shop.raw) == 1)
    assert statuses(shop.raw) == {"processed": 1}


def test_several_topics_and_wildcards(stream: Stream, closing: Any) -> None:
    stream.add("m1")
    stream.add("m2", subject=f"{stream.name}.sent.eu")
    topics = [stream.topic, f"{stream.name}.sent.*"]
    source = closing(stream.source())
    source.open(topics, Unwatched(), Unwatched())
    found = received(source, 2)
    assert sorted(the_message(own).topic for own in found) == topics
    source.settle(found)
    assert stream.pending(f"shop-{stream.name}_paid") == 0
    everything = closing(stream.source(stream=stream.name, durable="all"))
    everything.open(["*"], Unwatched(), Unwatched())
    assert [the_message(own).topic for own in received(everything, 2)] == [
        stream.topic,
        f"{stream.name}.sent.eu",
    ]


def test_a_tended_message_is_not_delivered_again(stream: Stream, closing: Any) -> None:
    stream.add("m1")
    source = closing(stream.opened(ack_wait=SECOND))
    mine = received(source)
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        source.tend(mine)
        assert source.receive(10, 0.1) == []
    source.settle(mine)
    assert stream.pending() == 0


def test_a_slow_handler_runs_once(shop: Shop, stream: Stream) -> None:
    stream.add("m1")
    deliveries: list[int] = []

    def slow(message: Message[Any]) -> None:
        deliveries.append(message.origin["deliveries"])
        time.sleep(2.5)

    handle(shop, stream, slow)
    shop.app.consume(stream.source(ack_wait=SECOND))
    with running(worker(shop.app)):
        eventually(lambda: effects(shop.raw))
        eventually(lambda: not stream.pending())
    assert deliveries == [1]


def test_closing_gives_back_what_nobody_has_seen(stream: Stream, closing: Any) -> None:
    stream.add(*(f"m{number}" for number in range(5)))
    one = closing(stream.opened(ack_wait=timedelta(seconds=20)))
    (first,) = eventually(lambda: one.receive(1, 0.1))
    one.receive(0, 0.1)
    one.settle([first])
    one.close()
    other = closing(stream.opened())
    found = received(other, 4)
    assert sorted(message_id(the_message(own)) for own in found) == ["m1", "m2", "m3", "m4"]
    other.settle(found)
    assert stream.pending() == 0


@pytest.mark.parametrize("name", ["sqlite", "postgresql"])
@pytest.mark.parametrize("crash", ["received", "after:handler", "before:ack"])
def test_a_killed_worker_loses_and_doubles_nothing(
    new_database: NewDatabase, stream: Stream, name: str, crash: str
) -> None:
    url = new_database(name)
    with Raw(url) as raw:
        create_effects(raw)
        stream.add(*(f"m{number}" for number in range(5)))
        plan = {"kind": "nats", "server": stream.url, "url": url, "topic": stream.topic}
        with process(crash, **plan) as killed:
            assert killed.ended() < 0
        with process(**plan):
            eventually(lambda: effects(raw) == 5)
            eventually(lambda: not stream.pending())
        assert statuses(raw) == {"processed": 5}
        assert effects(raw) == 5


def test_a_database_that_is_away_pauses_consumption(stream: Stream) -> None:
    with ThrowawayPostgres() as server:
        with App(server.url) as app:
            app.init()
        with opened(server.url) as shop:
            handle(shop, stream)
            shop.app.consume(stream.source(ack_wait=SECOND))
            with running(worker(shop.app)):
                stream.add("m0")
                eventually(lambda: len(shop.calls) == 1)
                shop.raw.close()
                server.stop(immediate=True)
                stream.add(*(f"m{number}" for number in range(1, 6)))
                eventually(lambda: shop.emitted(ConsumptionPaused))
                server.start()
                eventually(lambda: shop.emitted(ConsumptionResumed))
                eventually(lambda: len(shop.calls) >= 6 and not stream.pending())
        with Raw(server.url) as raw:
            assert statuses(raw) == {"processed": 6}
            assert effects(raw) == 6
            assert raw.value("SELECT count(*) FROM txbox_attempt") == 0


def test_a_drain_leaves_the_rest_unacknowledged(shop: Shop, stream: Stream) -> None:
    stream.add(*(f"m{number}" for number in range(10)))
    gate, entered = threading.Event(), threading.Event()

    def wait(_: Message[Any]) -> None:
        entered.set()
        assert gate.wait(10)

    handle(shop, stream, wait)
    shop.app.consume(stream.source())
    own = worker(shop.app)
    with running(own):
        assert entered.wait(10)
        own.stop()
        gate.set()
    processed = effects(shop.raw)
    assert 1 <= processed < 10
    eventually(lambda: stream.pending() == 10 - processed)


def test_a_server_that_was_killed_and_restarted(shop: Shop, own_nats: ThrowawayNats) -> None:
    stream = Stream(own_nats.url)
    stream.create()
    handle(shop, stream)
    shop.app.consume(stream.source(ack_wait=SECOND))
    with running(worker(shop.app)):
        stream.add(*(f"m{number}" for number in range(20)))
        eventually(lambda: shop.calls)
        own_nats.stop(immediate=True)
        eventually(lambda: shop.emitted(ConsumptionPaused))
        own_nats.start()
        stream.add(*(f"m{number}" for number in range(20, 25)))
        eventually(lambda: effects(shop.raw) == 25)
        eventually(lambda: not stream.pending())
    assert statuses(shop.raw) == {"processed": 25}


def test_a_server_that_is_away_at_first(own_nats: ThrowawayNats, closing: Any) -> None:
    stream = Stream(own_nats.url)
    stream.create()
    stream.add("m1")
    own_nats.stop()
    source = closing(stream.opened(ack_wait=SECOND))
    with pytest.raises(BrokerUnavailable):
        source.receive(1, 0)
    own_nats.start()
    mine = received(source)
    own_nats.stop()
    with pytest.raises(BrokerUnavailable):
        source.settle(mine)
    own_nats.start()
    # a new connection acknowledges what came by the old one
    source.settle(mine)
    assert stream.pending() == 0


def test_a_deleted_consumer_is_created_again(stream: Stream, closing: Any) -> None:
    stream.add("m1")
    source = closing(stream.opened())
    mine = received(source)
    stream.do(lambda js: js.delete_consumer(stream.name, "shop"))
    (again,) = received(source)
    assert message_id(the_message(again)) == "m1"
    source.settle([*mine, again])
    assert stream.pending() == 0


def test_what_can_never_work_is_refused(
    stream: Stream, caplog: pytest.LogCaptureFixture, closing: Any
) -> None:
    for options, words in (
        ({"consumer": {"max_deliver": 3}}, "max_deliver 3"),
        ({"consumer": {"ack_policy": "none"}}, "ack_policy"),
        ({"consumer": {"colour": 1}}, "does not have"),
        ({"allow_reconnect": True}, "allow_reconnect"),
        ({"durable": ""}, "durable"),
        ({"ack_wait": timedelta(0)}, "ack_wait"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            stream.source(**options)
    with caplog.at_level(logging.WARNING, "txbox"):
        stream.source(consumer={"max_deliver": 50})
    assert "max_deliver 50" in caplog.text
    for topics, source in (
        (["*"], stream.source()),
        ([], stream.source()),
        ([f"{stream.name}.a.b", f"{stream.name}.a_b"], stream.source()),
        (["nowhere"], stream.source()),
        (["nowhere"], stream.source(stream="NOWHERE")),
        ([stream.topic], stream.source(durable={"other": "x"})),
    ):
        with pytest.raises(ConfigurationError):
            closing(source).open(topics, Unwatched(), Unwatched())


def test_consumers_that_exist_are_looked_at(stream: Stream, closing: Any) -> None:
    for own in (
        ConsumerConfig(durable_name="limited", max_deliver=3, filter_subject=stream.topic),
        ConsumerConfig(durable_name="other", filter_subject=f"{stream.name}.sent"),
        ConsumerConfig(
            durable_name="pushing", deliver_subject="inbox", filter_subject=stream.topic
        ),
        ConsumerConfig(durable_name="bare", headers_only=True, filter_subject=stream.topic),
    ):
        stream.do(partial(Stream.add_consumer, stream, own))
        with pytest.raises(ConfigurationError, match=str(own.durable_name)):
            closing(stream.source(durable=own.durable_name)).open(
                [stream.topic], Unwatched(), Unwatched()
            )
    fine = ConsumerConfig(durable_name="fine", ack_wait=6, filter_subject=stream.topic)
    stream.do(lambda js: js.add_consumer(stream.name, fine))
    source = closing(stream.opened(durable="fine"))
    assert (source.redelivery_s, source.tend_every_s) == (6, 2)


def test_the_example(stream: Stream, tmp_path: Path) -> None:
    stream.add("o-1", payload=b'{"id": 1, "amount": 5}', type="order.paid")
    with example("nats_service:app", tmp_path, NATS_URL=stream.url, ORDERS_SUBJECT=stream.topic):
        eventually(lambda: booked(tmp_path) == [(1, 5)])
        eventually(lambda: not stream.pending("billing"))
