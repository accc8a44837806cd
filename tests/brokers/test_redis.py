"""Redis Streams on a real server: identity, claims, trimmed entries, killed workers and servers."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.brokers.streaming import Unwatched, booked, example, process
from tests.conftest import NewDatabase
from tests.databases import Raw
from tests.runtime.support import eventually, running, worker
from tests.servers.control import ThrowawayPostgres, ThrowawayRedis
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
from txbox.brokers.redis import RedisStreams
from txbox.errors import BrokerError, BrokerUnavailable
from txbox.events import ConsumptionPaused, ConsumptionResumed
from txbox.identity import message_id

pytestmark = pytest.mark.brokers

GROUP = "shop"


class Stream:
    """A stream of this test alone."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = f"orders-{secrets.token_hex(6)}"
        self.client: Any = redis.Redis.from_url(url)

    def add(self, own_id: str | bytes | None, payload: bytes = b"{}", **fields: Any) -> bytes:
        own = {} if own_id is None else {"message-id": own_id}
        entry: bytes = self.client.xadd(self.name, {**own, "payload": payload, **fields})
        return entry

    def pending(self) -> int:
        return int(self.client.xpending(self.name, GROUP)["pending"])

    def source(self, **options: Any) -> RedisStreams:
        return RedisStreams(self.url, group=GROUP, **options)

    def opened(self, **options: Any) -> RedisStreams:
        source = self.source(**options)
        source.open([self.name], Unwatched(), Unwatched())
        return source


@pytest.fixture
def stream(redis_url: str) -> Iterator[Stream]:
    own = Stream(redis_url)
    yield own
    own.client.delete(own.name)
    own.client.close()


@pytest.fixture
def shop(sqlite_url: str) -> Iterator[Shop]:
    with opened(sqlite_url) as own:
        yield own


def handle(
    shop: Shop, stream: Stream, body: Callable[[Message[Any]], None] | None = None, **options: Any
) -> None:
    def own(message: Message[Any], tx: Any) -> None:
        shop.calls.append(str(message.id))
        add_effect(tx, message.id)
        if body is not None:
            body(message)

    shop.app.handler(stream.name, consumer=CONSUMER, retry=AT_ONCE, **options)(own)


def received(source: RedisStreams, count: int = 100) -> list[Delivery]:
    found: list[Delivery] = eventually(lambda: source.receive(count, 0.1))
    return found


def the_message(delivery: Delivery) -> Message[Any]:
    assert delivery.message is not None
    return delivery.message


def test_an_entry_becomes_a_message(stream: Stream) -> None:
    entry = stream.add(
        "m1",
        b"\xff\x00",
        type="order.paid",
        key=b"\xfe",
        note=b"\xfd\x00",
        **{"content-type": "x/y"},
    )
    source = stream.opened()
    (delivery,) = received(source)
    message = the_message(delivery)
    assert (message.topic, message.payload, message.id) == (stream.name, b"\xff\x00", None)
    assert (message.type, message.key, message.content_type) == ("order.paid", "hex:fe", "x/y")
    assert message.headers.get("note") == b"\xfd\x00"
    assert "payload" not in message.headers.names()
    assert message_id(message) == "m1"
    assert message.time is not None
    assert abs(message.time - datetime.now(UTC)) < timedelta(minutes=1)
    assert message.origin["entry_id"] == entry.decode()
    assert not delivery.redelivered
    source.close()


def test_other_entries(stream: Stream) -> None:
    stream.client.xadd(
        stream.name, {"ce_id": "1", "ce_source": "/a", "ce_type": "t", "ce_subject": "k", "x": "ü"}
    )
    stream.client.execute_command("XADD", stream.name, "*", "note", "1", "note", "2")
    stream.client.xadd(stream.name, {"data": b"\xff"})
    stream.client.execute_command(
        "XADD", stream.name, "*", "payload", "p", "note", "1", "note", "2"
    )
    source = stream.opened()
    cloud, repeated, binary, multi = received(source)
    message = the_message(cloud)
    assert message.json() == {
        "ce_id": "1",
        "ce_source": "/a",
        "ce_type": "t",
        "ce_subject": "k",
        "x": "ü",
    }
    assert (message.type, message.key, message_id(message)) == ("t", "k", "/a 1")
    assert (repeated.message, repeated.raw) == (None, b"note=1\nnote=2")
    assert binary.raw == b"data=\xff"
    assert "UTF-8" in (binary.problem or "")
    assert the_message(multi).headers.get_all("note") == [b"1", b"2"]
    source.close()


def test_weak_ids_come_from_the_clock_of_the_server(stream: Stream) -> None:
    stream.client.xadd(stream.name, {"payload": "a"}, id="5-1")
    made = stream.add(None)
    source = stream.opened(incarnation="2")
    chosen, own = received(source)
    assert "weak_id" not in the_message(chosen).origin
    assert (
        message_id(the_message(own), weak=True) == f"weak:redis:2:0:{stream.name}:{made.decode()}"
    )
    source.close()


def test_a_service_settles_what_it_processed(shop: Shop, stream: Stream) -> None:
    for number in range(50):
        stream.add(f"m{number % 40}")
    stream.add(None)
    handle(shop, stream)
    shop.app.consume(stream.source())
    with running(worker(shop.app)):
        eventually(lambda: len(shop.calls) == 40 and quarantined(shop.raw) and not stream.pending())
    assert effects(shop.raw) == 40
    assert statuses(shop.raw) == {"processed": 40}
    # the consumer has left the group
    assert stream.client.xinfo_consumers(stream.name, GROUP) == []


def test_weak_ids_for_a_handler_that_wants_them(shop: Shop, stream: Stream) -> None:
    stream.add(None)
    handle(shop, stream, weak_ids=True)
    shop.app.consume(stream.source())
    with running(worker(shop.app)):
        eventually(lambda: effects(shop.raw) == 1)
    assert statuses(shop.raw) == {"processed": 1}


def test_trimmed_entries_raise_an_alarm(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(3):
        stream.add(f"m{number}")
    dead, living = (
        stream.opened(claim_idle=timedelta(seconds=1)),
        stream.opened(claim_idle=timedelta(seconds=1)),
    )
    first = received(dead)
    assert len(first) == 3
    stream.client.xtrim(stream.name, maxlen=1, approximate=False)
    with caplog.at_level(logging.WARNING, "txbox"):
        (delivery,) = eventually(lambda: living.receive(10, 0.2))
        # what is pending under the own name comes without fields
        dead._held.clear()
        dead._ready = False
        assert dead.receive(10, 0) == []
    assert message_id(the_message(delivery)) == "m2"
    assert delivery.redelivered
    assert living.lost_upstream == 2
    assert "lost upstream: 2 entries" in caplog.text
    living.settle([delivery])
    assert stream.pending() == 0


def test_own_pending_entries_that_were_trimmed_are_acknowledged(stream: Stream) -> None:
    stream.add("m0")
    source = stream.opened()
    received(source)
    stream.client.xtrim(stream.name, maxlen=0, approximate=False)
    source._held.clear()
    source._ready = False
    assert source.receive(10, 0) == []
    assert source.lost_upstream == 1
    assert stream.pending() == 0


def test_tended_entries_are_not_claimed(stream: Stream) -> None:
    stream.add("m0")
    one, other = (
        stream.opened(claim_idle=timedelta(seconds=1)),
        stream.opened(claim_idle=timedelta(seconds=1)),
    )
    mine = received(one)
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        one.tend(mine)
        assert other.receive(10, 0.1) == []
    (pending,) = stream.client.xpending_range(stream.name, GROUP, "-", "+", 1)
    assert pending["times_delivered"] == 1
    one.settle(mine)
    assert stream.pending() == 0


def test_a_slow_handler_runs_once(shop: Shop, stream: Stream) -> None:
    stream.add("m0")
    handle(shop, stream, lambda _: time.sleep(2.5))
    shop.app.consume(stream.source(claim_idle=timedelta(seconds=1)))
    other = stream.opened(claim_idle=timedelta(seconds=1))
    with running(worker(shop.app)):
        eventually(lambda: shop.calls)
        while not effects(shop.raw):
            assert other.receive(10, 0.1) == []
    assert shop.calls == ["m0"]
    assert stream.pending() == 0


def test_closing_gives_back_at_once(stream: Stream) -> None:
    for number in range(5):
        stream.add(f"m{number}")
    one = stream.opened()
    assert len(one.receive(2, 0.1)) == 2
    one.close()
    other = stream.opened()
    found: list[Delivery] = []
    while len(found) < 5:
        found += received(other)
    assert sorted(message_id(the_message(own)) for own in found) == [
        f"m{number}" for number in range(5)
    ]
    other.settle(found)
    other.close()
    assert stream.pending() == 0


def test_several_streams_never_exceed_what_was_asked_for(redis_url: str) -> None:
    streams = [Stream(redis_url) for _ in range(3)]
    for own in streams:
        for number in range(10):
            own.add(f"m{number}")
    source = streams[0].source()
    source.open([own.name for own in streams], Unwatched(), Unwatched())
    found: list[Delivery] = []
    while len(found) < 30:
        batch = source.receive(4, 0.1)
        assert 1 <= len(batch) <= 4
        found += batch
    source.settle(found)
    assert [own.pending() for own in streams] == [0, 0, 0]
    source.close()


def test_a_deleted_stream_is_read_from_its_beginning(stream: Stream) -> None:
    stream.add("m0")
    source = stream.opened()
    first = received(source)
    stream.client.delete(stream.name)
    stream.add("m1")
    (delivery,) = received(source)
    assert message_id(the_message(delivery)) == "m1"
    source.settle([*first, delivery])
    source.tend(first)
    assert stream.pending() == 0
    source.close()


@pytest.mark.parametrize("name", ["sqlite", "postgresql"])
@pytest.mark.parametrize("crash", ["received", "after:handler", "before:ack"])
def test_a_killed_worker_loses_and_doubles_nothing(
    new_database: NewDatabase, stream: Stream, name: str, crash: str
) -> None:
    url = new_database(name)
    with Raw(url) as raw:
        create_effects(raw)
        for number in range(5):
            stream.add(f"m{number}")
        plan = {"kind": "redis", "server": stream.url, "url": url, "topic": stream.name}
        with process(crash, **plan) as killed:
            assert killed.ended() < 0
        with process(**plan):
            eventually(lambda: effects(raw) == 5 and not stream.pending())
        assert statuses(raw) == {"processed": 5}
        assert effects(raw) == 5


def test_a_database_that_is_away_pauses_consumption(stream: Stream) -> None:
    with ThrowawayPostgres() as server:
        with App(server.url) as app:
            app.init()
        with opened(server.url) as shop:
            handle(shop, stream)
            shop.app.consume(stream.source(claim_idle=timedelta(seconds=1)))
            with running(worker(shop.app)):
                stream.add("m0")
                eventually(lambda: len(shop.calls) == 1 and not stream.pending())
                shop.raw.close()
                server.stop(immediate=True)
                for number in range(1, 6):
                    stream.add(f"m{number}")
                eventually(lambda: shop.emitted(ConsumptionPaused))
                eventually(stream.pending)
                server.start()
                eventually(lambda: shop.emitted(ConsumptionResumed))
                eventually(lambda: len(shop.calls) >= 6 and not stream.pending())
        with Raw(server.url) as raw:
            assert statuses(raw) == {"processed": 6}
            assert effects(raw) == 6
            assert raw.value("SELECT count(*) FROM txbox_attempt") == 0


def test_a_drain_leaves_the_rest_unacknowledged(shop: Shop, stream: Stream) -> None:
    for number in range(10):
        stream.add(f"m{number}")
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
    unread = stream.client.xinfo_groups(stream.name)[0]["lag"]
    assert stream.pending() + unread == 10 - processed


def test_a_server_that_was_killed_and_restarted(shop: Shop, own_redis: ThrowawayRedis) -> None:
    stream = Stream(own_redis.url)
    handle(shop, stream)
    shop.app.consume(stream.source(claim_idle=timedelta(seconds=1)))
    with running(worker(shop.app)):
        for number in range(20):
            stream.add(f"m{number}")
        eventually(lambda: shop.calls)
        own_redis.stop(immediate=True)
        eventually(lambda: shop.emitted(ConsumptionPaused))
        own_redis.start()
        for number in range(20, 25):
            stream.add(f"m{number}")
        eventually(lambda: effects(shop.raw) == 25 and not stream.pending())
    assert statuses(shop.raw) == {"processed": 25}


def test_a_server_that_is_away_at_first(own_redis: ThrowawayRedis) -> None:
    stream = Stream(own_redis.url)
    stream.add("m0")
    own_redis.stop()
    source = stream.opened()
    with pytest.raises(BrokerUnavailable):
        source.receive(1, 0)
    own_redis.start()
    (delivery,) = received(source)
    own_redis.stop()
    with pytest.raises(BrokerUnavailable):
        source.settle([delivery])
    own_redis.start()
    # it was not acknowledged: it comes again
    (again,) = received(source)
    assert again.redelivered
    source.settle([again])
    assert stream.pending() == 0
    source.close()


def test_what_can_never_work_is_refused(stream: Stream) -> None:
    with pytest.raises(ConfigurationError, match="decode_responses"):
        stream.source(decode_responses=True)
    with pytest.raises(ConfigurationError, match="decode_responses"):
        RedisStreams(stream.url + "?decode_responses=true", group=GROUP)
    with pytest.raises(ConfigurationError, match="retry"):
        stream.source(retry=None)
    with pytest.raises(ConfigurationError, match="group"):
        RedisStreams(stream.url, group="")
    with pytest.raises(ConfigurationError, match="claim_idle"):
        stream.source(claim_idle=timedelta(0))
    with pytest.raises(ConfigurationError, match="URL"):
        RedisStreams("nonsense", group=GROUP)
    with pytest.raises(ConfigurationError, match="by name"):
        stream.source().open(["*"], Unwatched(), Unwatched())
    stream.client.set(stream.name, "text")
    with pytest.raises(ConfigurationError, match="no stream"):
        stream.opened()
    with pytest.raises(ConfigurationError, match="password"):
        RedisStreams(stream.url, group=GROUP, username="nobody", password="wrong").open(
            [stream.name], Unwatched(), Unwatched()
        )
    assert issubclass(BrokerUnavailable, BrokerError)


def test_the_example(stream: Stream, tmp_path: Path) -> None:
    stream.add("o-1", b'{"id": 1, "amount": 5}', type="order.paid")
    with example("redis_service:app", tmp_path, REDIS_URL=stream.url, ORDERS_STREAM=stream.name):
        eventually(lambda: booked(tmp_path) == [(1, 5)])
        eventually(lambda: stream.client.xpending(stream.name, "billing")["pending"] == 0)
