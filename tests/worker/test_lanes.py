"""Many consumers of one worker share its connections and threads: bounded, and nobody starves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tests.support.databases import Raw
from tests.support.shop import TOPIC, Shop, opened, paid, statuses
from tests.support.sources import Memory
from tests.support.tidying import SESSIONS
from tests.support.waiting import eventually
from tests.support.workers import running, worker
from txbox import Batching, ConfigurationError, Lease, Limits, Message, Retry
from txbox.brokers.base import Delivery

# the poll, the heartbeat, the relay and the main thread of `once`
BESIDE = 4
CONNECTIONS = {
    "postgresql": "SELECT count(*) - 1 FROM pg_stat_activity WHERE datname = current_database() "
    "AND backend_type = 'client backend'",
    "mysql": f"SELECT count(*) - 1 FROM {SESSIONS} WHERE db = DATABASE()",
}


@pytest.fixture
def server(database_url: str) -> Iterator[Shop]:
    if database_url.startswith("sqlite"):
        pytest.skip("a file has no connections to run out of")
    with opened(database_url) as shop:
        yield shop


@contextmanager
def most_connections(url: str, product: str) -> Iterator[Callable[[], int]]:
    """Look on the server, again and again, at how many connections there are; returns the most."""
    most, over = 0, threading.Event()
    with Raw(url) as raw:
        base = raw.value(CONNECTIONS[product])

        def look() -> None:
            nonlocal most
            while not over.is_set():
                most = max(most, raw.value(CONNECTIONS[product]) - base)
                time.sleep(0.005)

        thread = threading.Thread(target=look, name="test-look")
        thread.start()
        try:
            yield lambda: most
        finally:
            over.set()
            thread.join()


def lane_threads() -> int:
    """The threads of lanes, which have the names of their lanes."""
    return sum(
        "consumer-" in each.name or each.name == "txbox-lane" for each in threading.enumerate()
    )


def test_a_message_to_a_thousand_consumers_takes_a_bounded_number_of_connections(
    server: Shop,
) -> None:
    threads: list[int] = []

    def note(_message: Message[Any], _tx: Any) -> None:
        threads.append(lane_threads())

    for number in range(1000):
        server.handler(note, consumer=f"consumer-{number}")
    source = Memory([], endless=True)
    server.app.consume(source)
    # the tests' own connection, and its app's
    with (
        most_connections(server.url, server.raw.product) as most,
        running(worker(server.app, maintenance=True)),
    ):
        eventually(lambda: source.threads, "an open source")
        # each lane has looked once, and then has no thread
        eventually(lambda: lane_threads() == 0, "idle lanes have none")
        source.waiting.append(delivery("m1"))
        eventually(lambda: source.settled_ids == ["m1"])
    assert statuses(server.raw) == {"processed": 1000}
    assert len(server.calls) == 1000
    # and the thread that has received
    assert max(threads) <= 16 + 1
    assert most() <= 16 + BESIDE + 1


def test_lanes_that_share_one_connection_starve_nobody(database_url: str) -> None:
    """Whatever a lane needs besides (a failure to record, a lease to keep, a retry), one connection serves all."""
    limits = Limits(connections=1)
    lease = Lease(duration=timedelta(seconds=6))
    with opened(database_url, limits=limits, lease=lease) as shop:
        done = threading.Event()
        busy = shop.handler(consumer="consumer-busy", concurrency=3)

        def fail_once(message: Message[Any], _tx: Any) -> None:
            if message.attempt == 1:
                raise Retry(after=timedelta(milliseconds=50))

        for number in range(6):
            shop.handler(fail_once, consumer=f"consumer-failing-{number}")
        shop.handler(consumer="consumer-stored", mode="stored")
        shop.handler(consumer="consumer-ordered", ordered=True)

        async def later(_message: Message[Any], tx: Any) -> None:
            shop.calls.append("later")

        shop.app.handler(TOPIC, consumer="consumer-async")(later)

        def outside(_message: Message[Any]) -> None:
            # longer than the lease: heartbeats need a connection while this runs
            done.wait(4)

        shop.app.handler(TOPIC, consumer="consumer-outside", transactional=False)(outside)
        source = Memory([paid(f"m{number}", key="k") for number in range(5)], endless=True)
        shop.app.consume(source)
        with running(worker(shop.app)) as codes:
            eventually(
                lambda: (
                    shop.raw.value(
                        "SELECT count(*) FROM txbox_inbox WHERE status = 'processed' AND consumer <> 'consumer-outside'"
                    )
                    == 5 * 10
                )
            )
            done.set()
            eventually(lambda: statuses(shop.raw) == {"processed": 55})
        assert codes == [0]
        assert busy.options.concurrency == 3
        assert len(source.settled) == 5


def test_a_consumer_with_a_backlog_gives_its_thread_to_the_others(shop: Shop) -> None:
    shop.app.limits = Limits(connections=1)
    # sixteen batches in a row are one turn
    shop.app.batching = Batching(messages=5)
    order: list[str] = []

    def busy(_message: Message[Any], _tx: Any) -> None:
        order.append("busy")

    def other(_message: Message[Any], _tx: Any) -> None:
        order.append("other")

    shop.app.handler("busy", consumer="consumer-busy")(busy)
    shop.app.handler("other", consumer="consumer-other")(other)
    waiting = [delivery(f"b{number}", "busy") for number in range(500)]
    waiting.insert(50, delivery("o1", "other"))
    source = Memory(waiting, endless=True)
    shop.app.consume(source)
    with running(worker(shop.app)):
        eventually(lambda: len(source.settled) == 501)
    assert order.index("other") < 300, "in its turn, and not after all the rest"


def test_what_is_given_a_connection_that_is_lost_is_not_stuck(server: Shop) -> None:
    """A dropped connection keeps no place from the others."""
    server.app.limits = Limits(connections=1)
    killed = threading.Event()

    def die_once(_message: Message[Any], tx: Any) -> None:
        if not killed.is_set():
            killed.set()
            with Raw(server.url) as raw:
                if raw.product == "postgresql":
                    raw.rows("SELECT pg_terminate_backend(?)", (tx.info.backend_pid,))
                else:
                    raw.execute(f"KILL {tx.thread_id()}")

    for number in range(5):
        server.handler(die_once, consumer=f"consumer-{number}")
    source = Memory([paid(f"m{number}") for number in range(20)], endless=True)
    server.app.consume(source)
    with running(worker(server.app)):
        eventually(lambda: statuses(server.raw) == {"processed": 100})


def test_the_bound_is_one_or_more() -> None:
    with pytest.raises(ConfigurationError, match=r"Limits\.connections is 0: it must be 1 or more"):
        Limits(connections=0)


def delivery(message_id: str, topic: str = TOPIC) -> Delivery:
    return Delivery(replace(paid(message_id), topic=topic), topic)
