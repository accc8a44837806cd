"""Kafka while servers are away: the database, the broker, one broker of three; and a worker that drains."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.brokers.kafka import (
    MakeRaw,
    MockCluster,
    committed,
    each_once,
    handled,
    lag,
    leader_of,
    new_group,
    new_topic,
    notes,
    opened,
    produce,
    said,
    service,
)
from tests.support.databases import Raw
from tests.support.servers.control import ThrowawayKafka, ThrowawayKafkaCluster, ThrowawayPostgres
from tests.support.shop import create_effects, statuses
from tests.support.waiting import DEADLINE_S, eventually
from txbox import App
from txbox.brokers.base import Delivery
from txbox.brokers.kafka import Kafka
from txbox.errors import BrokerUnavailable

pytestmark = pytest.mark.brokers

_MOVED = ("on_assign", "on_revoke", "on_lost")


@contextmanager
def feeding(bootstrap: str, topic: str, pause_s: float = 0.1) -> Iterator[list[int]]:
    """Produce until the block ends, ten at a time; the list holds what the brokers have acknowledged."""
    fed: list[int] = []
    enough = threading.Event()

    def feed() -> None:
        while not enough.wait(pause_s):
            ten = range(len(fed), len(fed) + 10)
            produce(bootstrap, topic, ten)
            fed.extend(ten)

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        yield fed
    finally:
        enough.set()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_a_database_that_is_away_costs_neither_messages_nor_membership(
    kafka_bootstrap: str, tmp_path: Path
) -> None:
    topic, group_id, output = new_topic(kafka_bootstrap, 2), new_group(), tmp_path / "one"
    with ThrowawayPostgres() as server:
        with App(server.url) as app:
            app.init()
        with Raw(server.url) as database:
            create_effects(database)
        plan = {
            "url": server.url, "bootstrap": kafka_bootstrap, "group": group_id, "topic": topic,
            "handle_s": 0.02, "lease_s": 10,
            # away for longer than both
            "options": {"session.timeout.ms": 6000, "max.poll.interval.ms": 6000},
        }  # fmt: skip
        with service(plan, output) as process:
            produce(kafka_bootstrap, topic, range(100))
            eventually(lambda: len(handled(output)) > 10, "work")
            server.stop(immediate=True)
            stopped_at = time.monotonic()
            eventually(lambda: "ConsumptionPaused" in output.read_text(), "the event")
            produce(kafka_bootstrap, topic, range(100, 150))
            eventually(lambda: time.monotonic() - stopped_at > 8, "longer than the poll interval")
            assert process.poll() is None
            server.start()
            with Raw(server.url) as database:
                each_once(database, range(150))
                eventually(
                    lambda: lag(kafka_bootstrap, group_id, topic, 2) == 0, "all is committed"
                )
                assert statuses(database) == {"processed": 150}
                # an attempt counts when the handler failed
                assert database.rows("SELECT DISTINCT attempts, error_type FROM txbox_inbox") == [
                    (0, None)
                ]
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0
    moved = said(output, *_MOVED)
    assert [line.split()[0] for line in moved] == ["on_assign", "on_revoke"], moved  # start and end
    assert "ConsumptionResumed" in output.read_text()
    assert "MessageFailed" not in output.read_text()


def test_consumption_goes_on_after_the_broker_was_killed_and_restarted(
    throwaway_kafka: ThrowawayKafka, postgresql_url: str, raw: MakeRaw, tmp_path: Path
) -> None:
    topic, group_id, database = (
        new_topic(throwaway_kafka.bootstrap, 2),
        new_group(),
        raw(postgresql_url),
    )
    create_effects(database)
    plan = {
        "url": postgresql_url, "bootstrap": throwaway_kafka.bootstrap, "group": group_id, "topic": topic,
        "handle_s": 0.01,
    }  # fmt: skip
    output = tmp_path / "one"
    produce(throwaway_kafka.bootstrap, topic, range(300))
    with service(plan, output) as process:
        eventually(lambda: len(handled(output)) > 30, "work")
        throwaway_kafka.stop(immediate=True)
        assert len(notes(database)) < 300  # still under way
        throwaway_kafka.start()
        produce(throwaway_kafka.bootstrap, topic, range(300, 340))
        each_once(database, range(340))
        eventually(
            lambda: lag(throwaway_kafka.bootstrap, group_id, topic, 2) == 0, "all is committed"
        )
        assert process.poll() is None
    assert statuses(database) == {"processed": 340}


def test_a_drained_worker_has_committed_what_is_settled_and_nothing_else(
    kafka_bootstrap: str, postgresql_url: str, raw: MakeRaw, tmp_path: Path
) -> None:
    topic, group_id, database = new_topic(kafka_bootstrap), new_group(), raw(postgresql_url)
    create_effects(database)
    produce(kafka_bootstrap, topic, range(60))
    plan = {
        "url": postgresql_url, "bootstrap": kafka_bootstrap, "group": group_id, "topic": topic,
        "handle_s": 0.05,
    }  # fmt: skip
    one, two = tmp_path / "one", tmp_path / "two"
    with service(plan, one) as process:
        eventually(lambda: len(handled(one)) > 10, "work")
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    assert 10 < len(notes(database)) < 60
    # settled: processed, or stored with its payload and waiting in the table
    settled = database.value(
        "SELECT count(*) FROM txbox_inbox WHERE status = 'processed' OR has_payload"
    )
    assert committed(kafka_bootstrap, group_id, topic) == settled < 60
    with service(plan | {"handle_s": 0.0}, two):
        each_once(database, range(60))
        eventually(lambda: committed(kafka_bootstrap, group_id, topic) == 60, "the commit")
    # the rest came again, and only the rest
    assert sorted(map(int, handled(one) + handled(two))) == list(range(60))
    assert len(said(one, "handling") + said(two, "handling")) == 60
    assert "MessageDuplicate" not in two.read_text()


@pytest.mark.slow
def test_one_broker_of_three_is_killed_under_load_and_another_restarted(
    throwaway_kafka_cluster: ThrowawayKafkaCluster,
    postgresql_url: str,
    raw: MakeRaw,
    tmp_path: Path,
) -> None:
    cluster, database = throwaway_kafka_cluster, raw(postgresql_url)
    topic, group_id = new_topic(cluster.bootstrap, 6, copies=3), new_group()
    create_effects(database)
    plan = {
        "url": postgresql_url, "bootstrap": cluster.bootstrap, "group": group_id, "topic": topic,
        "handle_s": 0.005, "options": {"session.timeout.ms": 10_000},
    }  # fmt: skip
    one, two = tmp_path / "one", tmp_path / "two"

    def goes_on(what: str) -> None:
        before = len(notes(database))
        eventually(lambda: len(notes(database)) > before + 100, what)

    with service(plan, one), service(plan, two):
        with feeding(cluster.bootstrap, topic) as fed:
            goes_on("work at the start")
            leader = leader_of(cluster.bootstrap, topic)
            cluster.stop(leader, immediate=True)
            assert leader_of(cluster.bootstrap, topic) in (1, 2, 3)
            goes_on(f"work without broker {leader}")
            cluster.start(leader)
            goes_on(f"work with broker {leader} again")
            other = leader % 3 + 1
            cluster.stop(other)
            cluster.start(other)
            goes_on(f"work after broker {other} was restarted")
        each_once(database, fed)
        eventually(lambda: lag(cluster.bootstrap, group_id, topic, 6) == 0, "all is committed")
    assert statuses(database) == {"processed": len(fed)}
    assert handled(one)
    assert handled(two)


@pytest.mark.slow
def test_a_partition_lost_while_the_broker_was_away_is_received_again() -> None:
    """It is away for longer than the session of the group."""
    mock = MockCluster()
    try:
        topic = mock.topic()
        produce(mock.bootstrap, topic, ["before"])
        options = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 500, "log_level": 0}
        with opened(Kafka(mock.bootstrap, group="shop", options=options), topic) as source:
            found: list[Delivery] = []

            def receive() -> None:
                try:
                    found.extend(source.receive(10, 0.2))
                except BrokerUnavailable:
                    time.sleep(0.05)

            def lost() -> bool:
                receive()
                return not source._partitions

            def received(count: int) -> bool:
                receive()
                return len(found) >= count

            eventually(lambda: received(1))
            source.settle(found)
            mock.broker(up=False)
            # no longer assigned: the session ended while the partition was paused
            eventually(lost)
            mock.broker(up=True)
            produce(mock.bootstrap, topic, ["after"])
            eventually(lambda: received(2), "what was sent after the broker came back")
    finally:
        mock.close()
