"""Order over several processes, over kills, and at a size (I7)."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.ordered import add_step, create_steps, done, of
from tests.support.ordered_service import service
from tests.support.servers import ROOT
from tests.support.shop import CONSUMER, TOPIC, Shop, opened, statuses
from tests.support.sources import Memory
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.warm import Warm
from tests.support.workers import worker
from txbox import App, Message, RetryPolicy
from txbox.brokers.nats import Nats
from txbox.brokers.rabbitmq import RabbitMQ
from txbox.brokers.redis import RedisStreams


@pytest.fixture
def shop(database_url: str) -> Iterator[Shop]:
    with opened(database_url) as other_shop:
        create_steps(other_shop.raw)
        yield other_shop


class Workers:
    """Worker processes, gone when the block ends."""

    def __init__(self, stack: ExitStack, url: str, way: str, file: Path | None = None) -> None:
        self._plan = json.dumps({"url": url, "way": way, "file": str(file) if file else None})
        self._stack = stack

    def start(self, crash_at: str | None = None, nth: int = 1) -> Warm:
        environment = dict(os.environ)
        if crash_at is not None:
            environment |= {"TXBOX_CRASH_AT": crash_at, "TXBOX_CRASH_NTH": str(nth)}
        process = Warm(["tests.support.ordered_service", self._plan], cwd=ROOT, env=environment)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process


def stored(url: str, way: str, messages: Sequence[Message[Any]]) -> None:
    with service(url, way) as app:
        app.send_many(messages)


def all_of(keys: int, versions: int) -> list[Message[Any]]:
    return [of(f"k{key}", n) for n in range(1, versions + 1) for key in range(keys)]


def in_order(keys: int, versions: int) -> dict[str, list[int]]:
    return {f"k{key}": list(range(1, versions + 1)) for key in range(keys)}


@pytest.mark.parametrize("way", ["ordered", "sequence"])
def test_two_processes_on_one_table(shop: Shop, way: str) -> None:
    messages = all_of(keys=5, versions=10)
    stored(shop.url, way, messages if way == "ordered" else messages[::-1])
    with ExitStack() as stack:
        both = [Workers(stack, shop.url, way).start() for _ in range(2)]
        eventually(lambda: statuses(shop.raw) == {"processed": 50}, "all 50")
        if way == "ordered":
            assert [process.wait(DEADLINE_S) for process in both] == [0, 0]
    assert done(shop.raw) == in_order(5, 10)


@pytest.mark.parametrize(
    ("point", "nth"), [("after:handler", 3), ("before:commit", 9), ("after:commit", 9)]
)
def test_killed_in_the_middle_of_a_key(shop: Shop, point: str, nth: int) -> None:
    """Rows that a killed worker had leased are rescued in their place."""
    stored(shop.url, "ordered", all_of(keys=3, versions=8))
    with ExitStack() as stack:
        workers = Workers(stack, shop.url, "ordered")
        assert workers.start(point, nth).wait(DEADLINE_S) == -signal.SIGKILL
        assert workers.start().wait(DEADLINE_S) == 0
    assert done(shop.raw) == in_order(3, 8)
    assert statuses(shop.raw) == {"processed": 24}


@pytest.mark.parametrize(
    ("point", "nth"),
    [("after:handler", 2), ("after:handler", 5), ("after:commit", 5), ("before:ack", 1)],
)
def test_killed_with_a_source(shop: Shop, tmp_path: Path, point: str, nth: int) -> None:
    """What was not acknowledged comes again, and keeps its place behind what failed."""
    lines = [
        json.dumps(
            {"specversion": "1.0", "id": str(message.id), "source": "/t", "type": "t",
             "subject": message.key, "data": {"n": message.json()["n"]}}
        )
        for message in all_of(keys=3, versions=8)
    ]  # fmt: skip
    file = tmp_path / "events.jsonl"
    file.write_text("\n".join(lines) + "\n")
    with ExitStack() as stack:
        workers = Workers(stack, shop.url, "ordered", file)
        assert workers.start(point, nth).wait(DEADLINE_S) == -signal.SIGKILL
        assert workers.start().wait(DEADLINE_S) == 0
    assert done(shop.raw) == in_order(3, 8)


def test_two_thousand_messages_of_two_hundred_keys_with_one_percent_poison(shop: Shop) -> None:
    """Order is kept, the dead release their keys, and other keys do not notice."""
    keys, versions = 200, 10
    poison = {f"k{key}-{key % versions + 1}" for key in range(0, keys, 10)}
    flaky = {f"k{key}-{key % 4 + 1}" for key in range(3, keys, 7)} - poison
    tried: list[str] = []

    @shop.app.handler(
        TOPIC, consumer=CONSUMER, ordered=True, concurrency=4,
        retry=RetryPolicy(max_attempts=2, base=timedelta(0)),
    )  # fmt: skip
    def handle(message: Message[Any], tx: Any) -> None:
        tried.append(str(message.id))
        add_step(tx, message)
        if message.id in poison or (message.id in flaky and message.attempt == 1):
            raise ValueError("told to fail")

    source = Memory(all_of(keys, versions))
    shop.app.consume(source)
    assert worker(shop.app, once=True).run() == 0

    expected = {
        f"k{key}": [n for n in range(1, versions + 1) if f"k{key}-{n}" not in poison]
        for key in range(keys)
    }
    assert done(shop.raw) == expected
    assert statuses(shop.raw) == {"processed": 1980, "dead": 20}
    assert len(source.settled) == 2000
    # neighbours of a culprit run again in good faith; attempts are what failed
    assert len(tried) >= 2000 + len(poison) + len(flaky)
    attempts = shop.raw.value("SELECT count(*) FROM txbox_attempt")
    assert attempts == 2 * len(poison) + len(flaky)


@pytest.mark.parametrize(
    "source",
    [RedisStreams("redis://localhost:1", group="g"), Nats("nats://localhost:1", durable="d"),
     RabbitMQ("amqp://localhost:1", queues=["q"])],
    ids=lambda source: type(source).__name__,
)  # fmt: skip
def test_sources_without_order_are_refused(
    sqlite_url: str, source: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with App(sqlite_url) as app:
        app.handler("q", consumer=CONSUMER, ordered=True)(lambda message, tx: None)
        app.consume(source, topics=["q"])
        assert worker(app).run() == 2
    assert "is ordered, but" in caplog.text
    assert "sequence=" in caplog.text


def test_a_single_active_consumer_keeps_order() -> None:
    assert RabbitMQ("amqp://localhost:1", queues=["q"], single_active_consumer=True).keeps_order(
        "q"
    )
