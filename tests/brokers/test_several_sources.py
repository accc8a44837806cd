"""Several sources in one service: each delivers its own topics, and an id is one id on all of them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.brokers.rabbitmq_support import declare, left, note, on_server, publish
from tests.databases import Raw
from tests.runtime.support import eventually, running, worker
from txbox import App, Message
from txbox.brokers.rabbitmq import RabbitMQ
from txbox.brokers.redis import RedisStreams

pytestmark = pytest.mark.brokers


@pytest.fixture
def queue(rabbitmq_url: str) -> Iterator[str]:
    name = declare(rabbitmq_url)
    yield name
    on_server(rabbitmq_url, lambda channel: channel.queue_delete(name))


@pytest.fixture
def stream(redis_url: str) -> Iterator[str]:
    name = f"txbox-{secrets.token_hex(6)}"
    yield name
    with redis.Redis.from_url(redis_url) as client:
        client.delete(name)


def _add(url: str, stream: str, own_id: str) -> None:
    with redis.Redis.from_url(url) as client:
        client.xadd(stream, {"message-id": own_id, "payload": b'{"cents": 100}'})


def _pending(url: str, stream: str) -> int:
    with redis.Redis.from_url(url) as client:
        summary: Any = client.xpending(stream, "shop")
        return int(summary["pending"])


def test_each_source_delivers_its_topics(
    sqlite_url: str, rabbitmq_url: str, queue: str, redis_url: str, stream: str
) -> None:
    handled: list[tuple[str, str, object]] = []
    publish(rabbitmq_url, queue, note("payment-1"))
    _add(redis_url, stream, "click-1")
    with App(sqlite_url) as app:

        @app.handler(queue, consumer="ledger")
        def pay(message: Message[Any], tx: Any) -> None:
            handled.append(("ledger", message.topic, message.id))

        @app.handler(stream, consumer="statistics")
        def count(message: Message[Any], tx: Any) -> None:
            handled.append(("statistics", message.topic, message.id))

        app.consume(RabbitMQ(rabbitmq_url), topics=[queue])
        app.consume(RedisStreams(redis_url, group="shop"), topics=[stream])
        with running(worker(app)):
            eventually(lambda: len(handled) == 2)
            eventually(lambda: not left(rabbitmq_url, queue) and not _pending(redis_url, stream))
    assert sorted(handled) == [("ledger", queue, "payment-1"), ("statistics", stream, "click-1")]
    with Raw(sqlite_url) as raw:
        assert raw.rows("SELECT consumer, status FROM txbox_inbox ORDER BY 1") == [
            ("ledger", "processed"),
            ("statistics", "processed"),
        ]


def test_an_id_that_came_from_one_broker_is_a_duplicate_from_another(
    sqlite_url: str, rabbitmq_url: str, queue: str, redis_url: str, stream: str
) -> None:
    handled: list[object] = []
    with App(sqlite_url) as app:
        for topic in (queue, stream):

            @app.handler(topic, consumer="ledger")
            def pay(message: Message[Any], tx: Any) -> None:
                handled.append(message.id)

        app.consume(RabbitMQ(rabbitmq_url), topics=[queue])
        app.consume(RedisStreams(redis_url, group="shop"), topics=[stream])
        publish(rabbitmq_url, queue, note("payment-1"))
        with running(worker(app)):
            eventually(lambda: handled == ["payment-1"])
            _add(redis_url, stream, "payment-1")
            _add(redis_url, stream, "payment-2")
            eventually(lambda: "payment-2" in handled)
            eventually(lambda: not _pending(redis_url, stream))
    assert handled == ["payment-1", "payment-2"]
