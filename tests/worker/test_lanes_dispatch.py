"""Several sources in one worker: each topic to its handlers, each acknowledgement to its source."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from pamqp.commands import Basic

from tests.support.broker_fixtures import throwaway
from tests.support.brokers.rabbitmq import declare, left, note, notes, on_server, publish
from tests.support.brokers.rabbitmq import publish_plain as publish_nameless
from tests.support.servers.control import ThrowawayRabbitMQ
from tests.support.shop import AT_ONCE, CONSUMER, Shop, add_effect, effects, opened, statuses
from tests.support.sources import write_events
from tests.support.waiting import eventually
from tests.support.workers import running, worker
from txbox import Message
from txbox.brokers.file import File
from txbox.brokers.rabbitmq import RabbitMQ
from txbox.brokers.redis import RedisStreams
from txbox.events import ConsumptionPaused, MessageProcessed, SourceRefused

pytestmark = pytest.mark.brokers

GROUP = "shop"


@pytest.fixture
def shop(postgresql_url: str) -> Iterator[Shop]:
    with opened(postgresql_url) as other_shop:
        yield other_shop


@pytest.fixture
def queue(rabbitmq_url: str) -> Iterator[str]:
    queue_name = declare(rabbitmq_url)
    yield queue_name
    on_server(rabbitmq_url, lambda channel: channel.queue_delete(queue_name))


class Stream:
    """A stream of this test alone."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = f"scans-{secrets.token_hex(6)}"
        self.client: Any = redis.Redis.from_url(url)

    def add(self, count: int, first: int = 0) -> None:
        for number in range(first, first + count):
            self.client.xadd(self.name, {"message-id": f"s{number}", "payload": b"{}"})

    def pending(self) -> int:
        return int(self.client.xpending(self.name, GROUP)["pending"])


@pytest.fixture
def stream(redis_url: str) -> Iterator[Stream]:
    made = Stream(redis_url)
    yield made
    made.client.delete(made.name)
    made.client.close()


def consumer(shop: Shop, name: str, *topics: str, **options: Any) -> None:
    """A consumer whose effects carry the topic that its handler was called for."""
    for topic in topics:

        def handle(message: Message[Any], tx: Any) -> None:
            shop.calls.append(f"{name}:{message.topic}")
            add_effect(tx, message.id, f"{name}:{message.topic}")

        register: Any = shop.app.handler(topic, consumer=name, retry=AT_ONCE, **options)
        register(handle)


def booked(shop: Shop) -> dict[str, int]:
    rows = shop.raw.rows("SELECT note, count(*) FROM effect GROUP BY note")
    return {str(note): int(count) for note, count in rows}


def test_files_and_brokers_at_once(
    shop: Shop, rabbitmq_url: str, queue: str, stream: Stream, tmp_path: Path
) -> None:
    for name, count in (("orders", 30), ("invoices", 20)):
        write_events(tmp_path / f"{name}.jsonl", [f"{name}{number}" for number in range(count)])
        shop.app.consume(File(tmp_path / f"{name}.jsonl", follow=True))
    publish(rabbitmq_url, queue, *notes(25))
    shop.app.consume(RabbitMQ(rabbitmq_url), [queue])
    stream.add(15)
    shop.app.consume(RedisStreams(stream.url, group=GROUP), [stream.name])
    consumer(shop, "billing", "orders", "invoices", queue)
    consumer(shop, "audit", queue, stream.name, concurrency=3)

    with running(worker(shop.app)) as codes:
        eventually(lambda: shop.effects() == 30 + 20 + 25 * 2 + 15, "every message")
        eventually(lambda: stream.pending() == 0, "acknowledgements on Redis")
    assert codes == [0]

    assert booked(shop) == {
        "billing:orders": 30, "billing:invoices": 20, f"billing:{queue}": 25,
        f"audit:{queue}": 25, f"audit:{stream.name}": 15,
    }  # fmt: skip
    assert statuses(shop.raw) == {"processed": 115}
    assert left(rabbitmq_url, queue) == 0, "acknowledged where it came from"
    with opened_again(shop) as again:
        # every source remembers how far it came: nothing comes twice
        for name in ("orders", "invoices"):
            again.app.consume(File(tmp_path / f"{name}.jsonl"))
        again.app.consume(RabbitMQ(rabbitmq_url), [queue])
        again.app.consume(RedisStreams(stream.url, group=GROUP), [stream.name])
        consumer(again, "late", "orders", "invoices", queue, stream.name)
        publish(rabbitmq_url, queue, note("last"))
        stream.add(1, first=99)
        with running(worker(again.app)):
            eventually(lambda: again.effects() == 2, "what is new")
        assert booked(again) == {f"late:{queue}": 1, f"late:{stream.name}": 1}


@pytest.fixture
def throwaway_server() -> Iterator[ThrowawayRabbitMQ]:
    yield from throwaway("rabbitmq", ThrowawayRabbitMQ())


def test_a_source_that_is_down_does_not_stop_the_other(
    shop: Shop, throwaway_server: ThrowawayRabbitMQ, stream: Stream
) -> None:
    queue = declare(throwaway_server.url, "quorum")
    throwaway_server.wait_until_kept(queue)
    publish(throwaway_server.url, queue, *notes(5))
    shop.app.consume(RabbitMQ(throwaway_server.url), [queue])
    shop.app.consume(RedisStreams(stream.url, group=GROUP), [stream.name])
    consumer(shop, CONSUMER, queue, stream.name)
    with running(worker(shop.app)) as codes:
        eventually(lambda: shop.effects() == 5)
        throwaway_server.stop(immediate=True)
        eventually(lambda: shop.emitted(ConsumptionPaused), "a pause of RabbitMQ")
        stream.add(30)
        eventually(lambda: shop.effects() == 35, "Redis goes on")
        eventually(lambda: stream.pending() == 0, "acknowledgements on Redis")
        throwaway_server.start()
        publish(throwaway_server.url, queue, note("back"))
        eventually(lambda: effects(shop.raw, "back") == 1, "RabbitMQ is back")
    assert codes == [0]
    assert all(event.source.startswith("rabbitmq:") for event in shop.emitted(ConsumptionPaused))
    assert statuses(shop.raw) == {"processed": 36}


def test_a_source_without_ids_does_not_stop_the_other(
    shop: Shop, rabbitmq_url: str, queue: str, stream: Stream
) -> None:
    bodies = [b'{"n": %d}' % number for number in range(120)]
    publish_nameless(rabbitmq_url, queue, *((Basic.Properties(), body) for body in bodies))
    shop.app.consume(RabbitMQ(rabbitmq_url), [queue])
    shop.app.consume(RedisStreams(stream.url, group=GROUP), [stream.name])
    consumer(shop, CONSUMER, queue, stream.name)
    with running(worker(shop.app)) as codes:
        eventually(lambda: shop.emitted(SourceRefused), "the pause")
        stream.add(10)
        eventually(lambda: shop.effects() == 10, "Redis goes on")
    assert codes == [0]
    (event,) = shop.emitted(SourceRefused)
    assert "rabbitmq" in event.source
    assert "weak_ids" not in event.reason, "a delivery tag names nothing"
    assert left(rabbitmq_url, queue) >= 120 - len(acknowledged(shop))

    with opened_again(shop) as again:
        # with the option set, what was not acknowledged is processed
        again.app.consume(RabbitMQ(rabbitmq_url), [queue])
        consumer(again, CONSUMER, queue, message_id="body.n")
        waiting = left(rabbitmq_url, queue)
        assert waiting >= 20
        with running(worker(again.app)):
            eventually(lambda: again.effects() == waiting, "the rest of the queue")
        assert len(again.emitted(MessageProcessed)) == waiting
    assert left(rabbitmq_url, queue) == 0


def acknowledged(shop: Shop) -> list[Any]:
    return shop.raw.rows("SELECT hash FROM txbox_quarantine")


def opened_again(shop: Shop) -> Any:
    shop.raw.execute("DROP TABLE effect")
    return opened(shop.url)
