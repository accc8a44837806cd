"""A consumer group on a real broker: members that join, leave, die, freeze or are slow."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient

from tests.support.brokers.kafka import (
    PROTOCOLS,
    MakeRaw,
    Nothing,
    committed,
    each_once,
    explained,
    handled,
    lag,
    new_group,
    new_topic,
    notes,
    produce,
    said,
    service,
)
from tests.support.databases import Raw
from tests.support.servers.control import ThrowawayKafka
from tests.support.shop import create_effects, statuses
from tests.support.waiting import DEADLINE_S, eventually
from txbox.brokers.kafka import Kafka

pytestmark = pytest.mark.brokers

_SESSION = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 500}


@pytest.fixture
def bootstrap(request: pytest.FixtureRequest) -> str:
    """The shared broker; for KIP-848 groups one whose settings detect dead members soon."""
    if request.node.callspec.params["protocol"] == "kip-848":
        server: ThrowawayKafka = request.getfixturevalue("throwaway_kafka")
        return server.bootstrap
    shared: str = request.getfixturevalue("kafka_bootstrap")
    return shared


def options_of(protocol: str) -> dict[str, Any]:
    return PROTOCOLS[protocol] | ({} if protocol == "kip-848" else _SESSION)


class Load:
    """Produces messages, so that enough are always waiting."""

    def __init__(self, bootstrap: str, topic: str, database: Raw) -> None:
        self._bootstrap, self._topic, self._database = bootstrap, topic, database
        self.produced = 0

    def more(self, count: int = 40) -> None:
        produce(self._bootstrap, self._topic, range(self.produced, self.produced + count))
        self.produced += count

    def until_working(self, output: Path) -> None:
        """Wait until the worker that prints to this file has handled more messages."""
        before = len(said(output, "handling"))

        def works() -> bool:
            if self.produced - len(notes(self._database)) < 150:
                self.more()
            return len(said(output, "handling")) > before + 5

        eventually(works, f"work of {output.name}")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_kafka_rebalance_mid_batch(
    protocol: str, bootstrap: str, postgresql_url: str, raw: MakeRaw, tmp_path: Path
) -> None:
    topic, group_id, database = new_topic(bootstrap, 6), new_group(), raw(postgresql_url)
    create_effects(database)
    plan = {
        "url": postgresql_url, "bootstrap": bootstrap, "group": group_id, "topic": topic,
        "handle_s": 0.01, "options": options_of(protocol),
    }  # fmt: skip
    load = Load(bootstrap, topic, database)
    one, two, three, four = (tmp_path / name for name in ("one", "two", "three", "four"))
    with ExitStack() as stack, explained(plan, database, one, two, three, four):
        leaves = stack.enter_context(service(plan, one))
        load.until_working(one)
        stack.enter_context(service(plan, two))
        dies = stack.enter_context(service(plan, three))
        load.until_working(two)
        load.until_working(three)
        dies.kill()
        load.more()
        stack.enter_context(service(plan, four))
        load.until_working(four)
        leaves.send_signal(signal.SIGTERM)
        load.more()
        each_once(database, range(load.produced))
        assert leaves.wait(DEADLINE_S) == 0
        eventually(lambda: lag(bootstrap, group_id, topic, 6) == 0, "all is committed")
    assert statuses(database) == {"processed": load.produced}
    assert set(notes(database).values()) == {1}
    # the third died while it held partitions: it gave nothing back
    assert said(three, "on_assign:done")
    assert not said(three, "event WorkerStopped")


@pytest.mark.parametrize(
    "protocol", ["cooperative", pytest.param("eager", marks=pytest.mark.slow), "kip-848"]
)
def test_a_frozen_worker_commits_nothing_of_what_it_lost(
    protocol: str, bootstrap: str, postgresql_url: str, raw: MakeRaw, tmp_path: Path
) -> None:
    topic, group_id, database = new_topic(bootstrap, 4), new_group(), raw(postgresql_url)
    create_effects(database)
    plan = {
        "url": postgresql_url, "bootstrap": bootstrap, "group": group_id, "topic": topic,
        "handle_s": 0.02, "options": options_of(protocol),
    }  # fmt: skip
    load = Load(bootstrap, topic, database)
    one, two = tmp_path / "one", tmp_path / "two"
    with (
        service(plan, one) as freezes,
        service(plan, two),
        explained(plan, database, one, two),
    ):
        load.until_working(two)
        load.until_working(one)
        freezes.send_signal(signal.SIGSTOP)
        frozen_at = len(one.read_bytes())
        load.more()
        each_once(database, range(load.produced))  # the other has taken over, after the session
        eventually(lambda: lag(bootstrap, group_id, topic, 4) == 0, "all is committed")
        freezes.send_signal(signal.SIGCONT)
        eventually(lambda: said(one, "on_lost:done"), "the loss is noticed")
        load.more()
        each_once(database, range(load.produced))
        eventually(lambda: lag(bootstrap, group_id, topic, 4) == 0, "all is committed")
    assert statuses(database) == {"processed": load.produced}
    since = one.read_bytes()[frozen_at:].decode().splitlines()
    lost = next(at for at, line in enumerate(since) if line.startswith("on_lost "))
    back = [at for at, line in enumerate(since) if line.startswith("on_assign") and at > lost]
    # before that, the answer to a commit that was on its way when the worker froze may still come
    lonely = since[lost : back[0]] if back else since[lost:]
    assert not [line for line in lonely if line.startswith("committed")], lonely


def test_a_handler_slower_than_the_poll_interval_runs_once(
    kafka_bootstrap: str, postgresql_url: str, raw: MakeRaw, tmp_path: Path
) -> None:
    topic, group_id, database = new_topic(kafka_bootstrap), new_group(), raw(postgresql_url)
    create_effects(database)
    produce(kafka_bootstrap, topic, ["slow", "next"])
    plan = {
        "url": postgresql_url, "bootstrap": kafka_bootstrap, "group": group_id, "topic": topic,
        "handle_s": 8.0, "lease_s": 30, "options": _SESSION | {"max.poll.interval.ms": 6000},
    }  # fmt: skip
    output = tmp_path / "one"
    with service(plan, output), explained(plan, database, output):
        each_once(database, ["slow", "next"])
        eventually(lambda: committed(kafka_bootstrap, group_id, topic) == 2, "the commit")
    assert handled(output) == ["slow", "next"]
    assert len(said(output, "handling")) == 2
    assert len(said(output, "on_assign", "on_revoke", "on_lost")) == 1  # no rebalance
    assert "MAXPOLL" not in output.read_text()


# all may be acknowledged at once
@pytest.mark.parametrize("crash", [("received", 2), ("before:ack", 1), ("after:ack", 1)])
def test_a_killed_worker_loses_and_doubles_nothing(
    crash: tuple[str, int], kafka_bootstrap: str, postgresql_url: str, raw: MakeRaw, tmp_path: Path
) -> None:
    topic, group_id, database = new_topic(kafka_bootstrap), new_group(), raw(postgresql_url)
    create_effects(database)
    produce(kafka_bootstrap, topic, range(30))
    # static membership: the successor need not wait until the dead member's session ends
    plan = {
        "url": postgresql_url, "bootstrap": kafka_bootstrap, "group": group_id, "topic": topic,
        "options": {"group.instance.id": group_id},
    }  # fmt: skip
    with service(plan, tmp_path / "1", crash) as process:
        assert process.wait(DEADLINE_S) == -signal.SIGKILL
    with service(plan, tmp_path / "2"), explained(plan, database, tmp_path / "2"):
        each_once(database, range(30))
        eventually(lambda: committed(kafka_bootstrap, group_id, topic) == 30, "the commit")
    assert set(notes(database).values()) == {1}


def test_a_static_member_that_dies_while_it_gives_partitions_up_leaves_none_behind(
    kafka_bootstrap: str, postgresql_url: str, raw: MakeRaw, tmp_path: Path
) -> None:
    """The group takes its successor for the same member: the second rebalance of a cooperative group never came."""
    topic, group_id, database = new_topic(kafka_bootstrap, 4), new_group(), raw(postgresql_url)
    create_effects(database)
    produce(kafka_bootstrap, topic, range(40))
    plan = {
        "url": postgresql_url, "bootstrap": kafka_bootstrap, "group": group_id, "topic": topic,
        "handle_s": 0.2,
    }  # fmt: skip
    one, two = (
        plan
        | {"options": {"heartbeat.interval.ms": 300, "group.instance.id": f"{group_id}-{name}"}}
        for name in ("one", "two")
    )
    outputs = [tmp_path / name for name in ("one", "two", "again")]
    with ExitStack() as stack, explained(plan, database, *outputs):
        dies = stack.enter_context(service(one, outputs[0]))
        eventually(lambda: said(outputs[0], "handling"), "its work")
        stack.enter_context(service(two, outputs[1]))
        eventually(lambda: said(outputs[0], "on_revoke"), "the rebalance")
        dies.kill()
        stack.enter_context(service(one, outputs[2]))
        produce(kafka_bootstrap, topic, range(40, 80))
        each_once(database, range(80))


def test_a_member_that_closes_during_a_rebalance_leaves_the_group(kafka_bootstrap: str) -> None:
    """Otherwise the others wait for the end of its session before they get what was about to be its."""
    topic, group = new_topic(kafka_bootstrap, 6), new_group()
    options = {"session.timeout.ms": 300_000, "heartbeat.interval.ms": 100}
    admin = AdminClient({"bootstrap.servers": kafka_bootstrap})
    join_states: set[str] = set()

    def on_statistics(text: str) -> None:
        join_states.add(json.loads(text)["cgrp"]["join_state"])

    def members() -> int:
        return len(admin.describe_consumer_groups([group])[group].result(DEADLINE_S).members)

    with ExitStack() as stack:
        others = [
            stack.enter_context(closing(Consumer(Kafka(kafka_bootstrap, group=group, options=options)._config)))
            for _ in range(2)
        ]  # fmt: skip
        for each in others:
            each.subscribe([topic])

        def each_has_three() -> bool:
            for each in others:
                each.poll(0.05)
            return all(len(each.assignment()) == 3 for each in others)

        eventually(each_has_three, "half of them for each")
        watched = options | {"statistics.interval.ms": 50, "stats_cb": on_statistics}
        one = Kafka(kafka_bootstrap, group=group, options=watched).consumer([topic], Nothing())
        # a member, but without a partition until each of the others gives one up, which takes a poll
        with ThreadPoolExecutor() as threads:
            try:
                eventually(
                    lambda: one.receive(1, 0.05) or "steady" in join_states, "its membership"
                )
            finally:
                ends = threads.submit(one.close)
            wait([ends], timeout=0.5)
            eventually(lambda: [each.poll(0.05) for each in others] and ends.done(), "its end")
            ends.result()
        assert members() == 2
