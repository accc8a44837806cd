"""A whole worker on Kafka: redelivery, order, messages without ids, and the example."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer

from tests.support.brokers.kafka import (
    MakeRaw,
    MockCluster,
    committed,
    each_once,
    handled,
    new_group,
    new_topic,
    notes,
    produce,
    rewind,
    said,
    service,
)
from tests.support.databases import NewDatabase, Raw
from tests.support.servers import ROOT
from tests.support.shop import CONSUMER, add_effect, create_effects, quarantined, statuses
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.workers import running, worker
from txbox import App, Message
from txbox.brokers.kafka import Kafka
from txbox.events import Event, MessageDuplicate
from txbox.worker import Worker

pytestmark = pytest.mark.brokers


# -- what was done comes again ----------------------------------------------------------------


def test_operator_replays_topic(
    kafka_bootstrap: str, postgresql_url: str, raw: MakeRaw, tmp_path: Path
) -> None:
    topic, group_id, database = new_topic(kafka_bootstrap), new_group(), raw(postgresql_url)
    create_effects(database)
    produce(kafka_bootstrap, topic, range(20))
    plan = {"url": postgresql_url, "bootstrap": kafka_bootstrap, "group": group_id, "topic": topic}
    one, two = tmp_path / "one", tmp_path / "two"
    with service(plan, one) as process:
        each_once(database, range(20))
        eventually(lambda: committed(kafka_bootstrap, group_id, topic) == 20, "the commit")
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    rewind(kafka_bootstrap, group_id, topic)
    produce(kafka_bootstrap, topic, ["after"])
    with service(plan, two):
        each_once(database, [*range(20), "after"])
        eventually(lambda: committed(kafka_bootstrap, group_id, topic) == 21, "the commit")
    assert handled(two) == ["after"]
    again = [line.split()[2] for line in said(two, "event") if "MessageDuplicate" in line]
    assert sorted(map(int, again)) == list(range(20))
    assert statuses(database) == {"processed": 21}


@pytest.fixture
def mock_cluster() -> Iterator[MockCluster]:
    cluster = MockCluster()
    yield cluster
    cluster.close()


class Refusing(Consumer):
    """The client's consumer; in a revocation every commit is refused, until one was."""

    cluster: ClassVar[MockCluster]
    code: ClassVar[int]
    #: For each revocation with something new to commit, what became of each commit in it.
    told: ClassVar[list[list[str]]]
    #: The members that the partition was given to, and those that it was taken from.
    given: ClassVar[list[object]]
    taken: ClassVar[list[object]]
    during: list[str] | None = None
    asked = -1

    def subscribe(self, topics: list[str], **callbacks: Any) -> None:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        # a member without partitions is called in every rebalance, too
        def on_assign(consumer: Consumer, partitions: list[Any]) -> None:
            callbacks["on_assign"](consumer, partitions)
            self.given.extend([self] * len(partitions))

        def on_lost(consumer: Consumer, partitions: list[Any]) -> None:
            callbacks["on_lost"](consumer, partitions)
            self.taken.extend([self] * len(partitions))

        def on_revoke(consumer: Consumer, partitions: list[Any]) -> None:
            armed = bool(partitions) and not self.told
            if armed:
                self.cluster.refuse_commits(*[self.code] * 10)
            self.during = []
            callbacks["on_revoke"](consumer, partitions)
            if self.during:
                self.told.append(self.during)
            self.during = None
            if armed:
                self.cluster.accept_commits()
            self.taken.extend([self] * len(partitions))

        made = {"on_assign": on_assign, "on_lost": on_lost, "on_revoke": on_revoke}
        super().subscribe(topics, **callbacks | made)

    def commit(self, **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (offset,) = [each.offset for each in options["offsets"]]
        # one that only says that nothing is in work leaves no message behind
        counts = self.during is not None and offset > self.asked
        self.asked = max(self.asked, offset)
        try:
            answered = super().commit(**options)
        except KafkaException:
            if self.during is not None and counts:
                self.during.append("refused")
            raise
        if self.during is not None and counts:
            self.during.append(
                "refused" if any(one.error for one in answered or ()) else "committed"
            )
        return answered


@pytest.mark.parametrize(
    "code",
    [
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.REBALANCE_IN_PROGRESS,
    ],
)
def test_what_a_refused_commit_leaves_behind_is_a_duplicate(
    code: int,
    mock_cluster: MockCluster,
    sqlite_url: str,
    raw: MakeRaw,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[list[str]] = []
    given: list[object] = []
    taken: list[object] = []
    values = {
        "cluster": mock_cluster, "code": code, "told": told, "given": given, "taken": taken,
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setattr(Refusing, name, value, raising=False)
    monkeypatch.setattr("confluent_kafka.Consumer", Refusing)
    topic, group_id, database = mock_cluster.topic(), new_group(), raw(sqlite_url)
    create_effects(database)
    duplicates: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, MessageDuplicate):
            duplicates.append(str(event.message_id))

    def one_worker() -> Worker:
        app = App(sqlite_url, observers=[note])

        @app.handler(topic, consumer=CONSUMER)
        def handle(message: Message[Any], tx: Any) -> None:
            add_effect(tx, message.id)

        options = {
            "partition.assignment.strategy": "range", "session.timeout.ms": 6000,
            "heartbeat.interval.ms": 300,
        }  # fmt: skip
        app.consume(Kafka(mock_cluster.bootstrap, group=group_id, options=options))
        return worker(app)

    fed = 0

    def feed() -> None:
        nonlocal fed
        # more messages wait than are handled between two checks, so there is nearly always something to commit
        if fed - len(notes(database)) < 400:
            produce(mock_cluster.bootstrap, topic, range(fed, fed + 200))
            fed += 200

    def works(handled_before: int) -> bool:
        feed()
        return len(given) > len(taken) and len(notes(database)) > handled_before + 10

    def revoked(times_before: int) -> bool:
        feed()
        return len(taken) > times_before

    with ExitStack() as workers:
        workers.enter_context(running(one_worker()))
        for _ in range(5):
            # only the owner of the partition can lose it: a member that joins or leaves while the group
            # still rebalances changes nothing
            eventually(partial(works, len(notes(database))), "work")
            times_before = len(taken)
            workers.enter_context(running(one_worker()))
            eventually(partial(revoked, times_before), "the revocation")
            if told:
                break
        assert told[0] == ["refused"]
        each_once(database, range(fed))
        # the redelivery did happen
        eventually(lambda: duplicates, "a duplicate")
        eventually(lambda: committed(mock_cluster.bootstrap, group_id, topic) == fed, "the commit")
    assert set(notes(database).values()) == {1}
    assert statuses(database) == {"processed": fed}


# -- order ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 4])
def test_the_order_of_a_key_is_kept(
    lanes: int, kafka_bootstrap: str, postgresql_url: str, raw: MakeRaw, tmp_path: Path
) -> None:
    """One lane: the order of the partition. Several: that of each key, while keys overtake one another."""
    topic, group_id, database = new_topic(kafka_bootstrap), new_group(), raw(postgresql_url)
    create_effects(database)
    # more than the first window, whose messages run one at a time anyway
    keys = {f"k{number % 8}-{number}": f"k{number % 8}" for number in range(400)}
    produce(kafka_bootstrap, topic, keys, keys)
    plan = {
        "url": postgresql_url, "bootstrap": kafka_bootstrap, "group": group_id, "topic": topic,
        "concurrency": lanes, "handle_s": 0.002,
    }  # fmt: skip
    output = tmp_path / "one"
    with service(plan, output):
        each_once(database, keys)
        eventually(lambda: committed(kafka_bootstrap, group_id, topic) == 400, "the commit")
    done = handled(output)
    if lanes == 1:
        assert done == list(keys)
        return
    by_key: dict[str, list[str]] = defaultdict(list)
    for one in done:
        by_key[keys[one]].append(one)
    for key, ones in by_key.items():
        assert ones == [one for one in keys if keys[one] == key]
    assert done != list(keys)


# -- ids --------------------------------------------------------------------------------------


@pytest.mark.parametrize("weak", [False, True])
def test_without_an_id_a_message_is_quarantined_or_weakly_known(
    weak: bool, kafka_bootstrap: str, sqlite_url: str, raw: MakeRaw
) -> None:
    topic, group_id, database = new_topic(kafka_bootstrap), new_group(), raw(sqlite_url)
    create_effects(database)
    app = App(sqlite_url)

    @app.handler(topic, consumer=CONSUMER, weak_ids=weak)
    def handle(message: Message[Any], tx: Any) -> None:
        add_effect(tx, message.id)

    app.consume(Kafka(kafka_bootstrap, group=group_id))
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    producer.produce(topic, b"{}")
    producer.produce(topic, b"{}")
    assert producer.flush(20) == 0
    with running(worker(app)):
        eventually(lambda: committed(kafka_bootstrap, group_id, topic) == 2, "the commit")
    assert len(notes(database)) == (2 if weak else 0)
    assert [seen for _, seen in quarantined(database)] == ([] if weak else [2])
    assert all(one.startswith("weak:") for one in notes(database))


# -- the example ------------------------------------------------------------------------------


def test_the_example(kafka_bootstrap: str, tmp_path: Path, new_database: NewDatabase) -> None:
    url = new_database("postgresql")
    topic = f"payments-{secrets.token_hex(4)}"
    environment = {
        **os.environ, "KAFKA_BOOTSTRAP": kafka_bootstrap, "ORDERS_TOPIC": topic,
        "ORDERS_GROUP": topic, "TXBOX_DATABASE_URL": url,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "examples"), *sys.path]),
    }  # fmt: skip

    def command(*words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, *words], cwd=tmp_path, env=environment)

    example = str(ROOT / "examples" / "kafka_service.py")
    assert command(example, "declare").wait(DEADLINE_S) == 0
    assert command(example, "publish", "3").wait(DEADLINE_S) == 0
    running_service = command("-m", "txbox", "run", "kafka_service:app")
    try:
        with Raw(url) as raw:
            eventually(lambda: raw.value("SELECT count(*) FROM booking") >= 3, "the bookings")
            # every order was published twice
            eventually(lambda: _all_committed(kafka_bootstrap, topic), "the commit")
            running_service.terminate()
            assert running_service.wait(DEADLINE_S) == 0
            assert raw.rows("SELECT * FROM booking ORDER BY 1") == [(1, 10), (2, 20), (3, 30)]
            assert statuses(raw) == {"processed": 3}
    finally:
        running_service.kill()
        running_service.wait(DEADLINE_S)


def _all_committed(bootstrap: str, topic: str) -> bool:
    fronts = [committed(bootstrap, topic, topic, number) for number in range(3)]
    return sum(front for front in fronts if front > 0) == 6
