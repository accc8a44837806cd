"""Anchored offsets: what a database lost in a failover or a restore is read again."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient

from tests.support.backup import Backup
from tests.support.brokers.kafka import Nothing, committed, new_topic, produce
from tests.support.databases import Raw
from tests.support.shop import AT_ONCE, CONSUMER, add_effect, create_effects
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.workers import run_of, running, worker
from txbox import App, Message
from txbox.brokers.base import Anchor, Delivery
from txbox.brokers.kafka import Kafka
from txbox.brokers.kafka import client as kafka_client
from txbox.brokers.kafka import partitions as kafka_partitions
from txbox.brokers.kafka import source as kafka_source
from txbox.brokers.kafka.source import KafkaConsumer
from txbox.errors import ConfigurationError, Fault, StoreError
from txbox.worker.pump import StoredAnchors

pytestmark = pytest.mark.brokers


class Service:
    """A worker on one partition, a database that can be set back, and the messages handled so far."""

    def __init__(
        self,
        bootstrap: str,
        url: str,
        *,
        anchored: bool = True,
        partitions: int = 1,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.bootstrap, self.url, self.anchored = bootstrap, url, anchored
        self.options = options
        self.topic = new_topic(bootstrap, partitions)
        self.group = f"shop-{secrets.token_hex(4)}"
        with Raw(url) as raw:
            create_effects(raw)

    @contextmanager
    def runs(self, name: str = "") -> Iterator[None]:
        app = App(self.url)

        @app.handler(self.topic, consumer=CONSUMER, retry=AT_ONCE)
        def handle(message: Message[Any], tx: Any) -> None:
            add_effect(tx, message.id, name)

        app.consume(
            Kafka(self.bootstrap, group=self.group, anchored=self.anchored, options=self.options)
        )
        with running(worker(app)) as codes:
            yield
        assert codes == [0]

    def produce(self, first: int, last: int) -> None:
        produce(self.bootstrap, self.topic, range(first, last))

    def recreate(self) -> None:
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        admin.delete_topics([self.topic])[self.topic].result(DEADLINE_S)

        def is_made() -> bool:
            with suppress(KafkaException):
                return bool(new_topic(self.bootstrap, name=self.topic))
            return False  # its deletion is not over

        eventually(is_made, "the topic, made again")

    def effects(self) -> dict[int, int]:
        with Raw(self.url) as raw:
            found = raw.rows("SELECT message_id, count(*) FROM effect GROUP BY message_id")
        return {int(row): int(count) for row, count in found}

    def has(self, count: int) -> None:
        """Each of the first so many messages has one effect."""
        wanted = dict.fromkeys(range(count), 1)
        eventually(lambda: len(self.effects()) >= count, f"{count} effects")
        assert self.effects() == wanted

    def has_committed(self, offset: int) -> None:
        eventually(lambda: self.committed() == offset, f"the commit of {offset}")

    def committed(self) -> int:
        return committed(self.bootstrap, self.group, self.topic)

    def anchor(self) -> int | None:
        with Raw(self.url) as raw:
            found = raw.rows("SELECT state FROM txbox_job WHERE name LIKE 'anchor:kafka:%'")
        return int(found[0][0]) if found else None


@pytest.fixture
def backup(postgresql_url: str) -> Iterator[Backup]:
    made = Backup(postgresql_url)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_partitions, "_CHECK_S", 0.5)
    monkeypatch.setattr(kafka_client, "LOOK_S", 0.5)


# -- whole workers ----------------------------------------------------------------------------


def test_the_front_is_in_the_database_and_at_the_broker(
    kafka_bootstrap: str, database_url: str
) -> None:
    shop = Service(kafka_bootstrap, database_url)
    shop.produce(0, 20)
    with shop.runs():
        shop.has(20)
        shop.has_committed(20)
        assert shop.anchor() == 20
        shop.produce(20, 30)
        shop.has(30)
    assert (shop.anchor(), shop.committed()) == (30, 30)
    with shop.runs():
        shop.produce(30, 31)
        shop.has(31)


@pytest.mark.parametrize("anchored", [True, False])
@pytest.mark.parametrize("when", ["stopped", "running"])
def test_lost_transactions_are_processed_again(
    when: str, anchored: bool, kafka_bootstrap: str, postgresql_url: str, backup: Backup
) -> None:
    shop = Service(kafka_bootstrap, postgresql_url, anchored=anchored)
    shop.produce(0, 10)
    with shop.runs():
        shop.has(10)
        shop.has_committed(10)
        backup.take()
        shop.produce(10, 30)
        shop.has(30)
        shop.has_committed(30)
        if when == "running":
            backup.restore()
            shop.produce(30, 31)
            eventually(lambda: 30 in shop.effects(), "an effect in the restored database")
            if anchored:
                shop.has(31)
                shop.has_committed(31)
    if when == "stopped":
        backup.restore()
        assert len(shop.effects()) == 10
        shop.produce(30, 31)
        with shop.runs():
            eventually(lambda: 30 in shop.effects(), "an effect in the restored database")
            shop.has_committed(31)
    if anchored:
        shop.has(31)
    else:
        # without anchors nobody knows: this is what the option is for
        assert shop.effects() == dict.fromkeys([*range(10), 30], 1)


@pytest.mark.parametrize("when", ["stopped", "running"])
def test_a_topic_made_again_has_anchors_of_its_own(
    when: str, kafka_bootstrap: str, sqlite_url: str
) -> None:
    shop = Service(kafka_bootstrap, sqlite_url)
    shop.produce(0, 5)
    with shop.runs():
        shop.has_committed(5)
        if when == "running":
            shop.recreate()
            shop.produce(5, 15)
            # before it has noticed, what it reads on from its old position is committed as of the deleted topic
            shop.has(15)
            shop.has_committed(10)
    if when == "stopped":
        shop.recreate()
        shop.produce(5, 15)
        with shop.runs():
            shop.has_committed(10)
    shop.has(15)


def test_a_failover_is_noticed_without_traffic(
    kafka_bootstrap: str, postgresql_url: str, backup: Backup
) -> None:
    shop = Service(kafka_bootstrap, postgresql_url)
    shop.produce(0, 5)
    with shop.runs():
        shop.has_committed(5)
        backup.take()
        shop.produce(5, 10)
        shop.has_committed(10)
        backup.restore()
        shop.has(10)


def test_what_was_lost_since_the_last_anchor_is_noticed(
    kafka_bootstrap: str, postgresql_url: str, backup: Backup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The anchor survives: only the history shows that something after it may be lost."""
    shop = Service(kafka_bootstrap, postgresql_url)
    shop.produce(0, 5)
    with shop.runs():
        shop.has_committed(5)
        monkeypatch.setattr(kafka_source, "_COMMIT_S", 3600.0)
        shop.produce(5, 6)
        shop.has_committed(6)  # what comes now is neither anchored nor committed
        backup.take()
        shop.produce(6, 9)
        shop.has(9)
        assert shop.anchor() == 6
        backup.restore()
        shop.has(9)
    assert (shop.anchor(), shop.committed()) == (9, 9)


def test_a_database_older_than_its_first_anchor(
    kafka_bootstrap: str, postgresql_url: str, backup: Backup
) -> None:
    shop = Service(kafka_bootstrap, postgresql_url)
    backup.take()
    shop.produce(0, 10)
    with shop.runs():
        shop.has_committed(10)
    backup.restore()
    assert (shop.effects(), shop.anchor()) == ({}, None)
    with shop.runs():
        shop.has(10)


def test_offsets_that_an_operator_sets_forward_stay(kafka_bootstrap: str, sqlite_url: str) -> None:
    shop = Service(kafka_bootstrap, sqlite_url)
    shop.produce(0, 5)
    with shop.runs():
        shop.has_committed(5)
    shop.produce(5, 10)
    admin = AdminClient({"bootstrap.servers": kafka_bootstrap})
    skipped = ConsumerGroupTopicPartitions(shop.group, [TopicPartition(shop.topic, 0, 8)])
    admin.alter_consumer_group_offsets([skipped])[shop.group].result(DEADLINE_S)
    with shop.runs():
        shop.has_committed(10)
    assert set(shop.effects()) == {0, 1, 2, 3, 4, 8, 9}


def test_a_lower_anchor_alone_is_noticed(kafka_bootstrap: str, database_url: str) -> None:
    shop = Service(kafka_bootstrap, database_url)
    shop.produce(0, 10)
    with shop.runs():
        shop.has_committed(10)
        with Raw(database_url) as raw:
            raw.execute("BEGIN")
            raw.execute("DELETE FROM effect WHERE message_id IN ('7', '8', '9')")
            raw.execute("DELETE FROM txbox_inbox WHERE message_id IN ('7', '8', '9')")
            raw.execute("UPDATE txbox_job SET state = '7' WHERE name LIKE 'anchor:%'")
            raw.execute("COMMIT")
        shop.has(10)
        eventually(lambda: shop.anchor() == 10, "the anchor")


@pytest.mark.parametrize(
    "options",
    [
        {"partition.assignment.strategy": "range"},
        {"partition.assignment.strategy": "cooperative-sticky"},
        {"group.protocol": "consumer"},
    ],
    ids=["eager", "cooperative", "kip-848"],
)
def test_partitions_that_move_keep_their_anchors(
    options: dict[str, Any],
    kafka_bootstrap: str,
    postgresql_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shop = Service(kafka_bootstrap, postgresql_url, partitions=4, options=options)
    produced = 0

    def works(name: str) -> bool:
        nonlocal produced
        if produced - len(shop.effects()) < 40:
            shop.produce(produced, produced + 20)
            produced += 20
        with Raw(shop.url) as raw:
            return bool(raw.value("SELECT count(*) FROM effect WHERE note = ?", (name,)))

    with shop.runs("first"):
        eventually(lambda: works("first"), "work of the first")
        with shop.runs("second"):
            eventually(lambda: works("second"), "work of the second")
        shop.produce(produced, produced + 20)
        shop.has(produced + 20)
    with Raw(shop.url) as raw:
        anchors = raw.rows("SELECT state FROM txbox_job WHERE name LIKE 'anchor:kafka:%'")
    assert len(anchors) == 4
    assert sum(int(state) for (state,) in anchors) == produced + 20
    # nothing is read again needlessly
    assert not [record for record in caplog.records if "reads" in record.getMessage()]


# -- the anchors ------------------------------------------------------------------------------


def test_two_writers_never_move_an_anchor_back(database_url: str) -> None:
    names = [f"kafka:shop:{number}" for number in range(3)]
    apps = [App(database_url) for _ in range(2)]
    stores = [StoredAnchors(run_of(app)) for app in apps]
    start = stores[0].read(names)[names[0]]
    assert start.position is None
    seen: list[list[int]] = [[], []]

    def write(message_id: int) -> None:
        # the zombie's positions are older; both are valid
        for position in range(10 - message_id * 3, 60, 2):
            moves = {name: (max(position, 1), start) for name in names}
            while True:
                try:
                    after = stores[message_id].advance(moves)
                except StoreError:
                    continue
                break
            seen[message_id].append(min(anchor.position or 0 for anchor in after.values()))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    for each in range(2):
        assert seen[each] == sorted(seen[each])
    final = stores[1].read(names)
    assert {anchor.position for anchor in final.values()} == {59}
    # numbers, not text
    assert stores[0].advance({names[0]: (9, start)})[names[0]].position == 59
    assert stores[0].advance({names[0]: (100, start)})[names[0]].position == 100
    for app in apps:
        app.close()


def test_nothing_is_anchored_in_a_database_that_has_lost_something(database_url: str) -> None:
    with App(database_url) as app:
        anchors = StoredAnchors(run_of(app))
        history = anchors.read(["p"])["p"].history
        anchors.advance({"p": (50, Anchor(None, history))})
        for known in (Anchor(100, history), Anchor(50, "another server")):
            after = anchors.advance({"p": (120, known)})["p"]
            assert (after.position, known.is_missing_in(after)) == (50, True)
        assert anchors.read(["p", "q"]) == {"p": Anchor(50, history), "q": Anchor(None, history)}


def test_a_postgresql_that_was_copied_has_another_history(
    postgresql_url: str, backup: Backup
) -> None:
    def history() -> str:
        with App(postgresql_url) as app:
            return StoredAnchors(run_of(app)).read(["p"])["p"].history

    before = history()
    assert history() == before
    backup.take()
    backup.restore()
    assert history() != before


# -- the source -------------------------------------------------------------------------------


class Memory:
    """Anchors that a test can set back."""

    lease_s = 1.0

    def __init__(self) -> None:
        self.history = "first"
        self.positions: dict[str, int] = {}
        self.away = False

    @property
    def anchors(self) -> Memory:
        return self

    def read(self, names: Sequence[str]) -> Mapping[str, Anchor]:
        if self.away:
            raise StoreError("The database is away.", fault=Fault.UNAVAILABLE)
        return {name: Anchor(self.positions.get(name), self.history) for name in names}

    def advance(self, moves: Mapping[str, tuple[int, Anchor]]) -> Mapping[str, Anchor]:
        self.read(list(moves))
        for name, (position, known) in moves.items():
            found = self.positions.get(name)
            if not known.is_missing_in(Anchor(found, self.history)):
                self.positions[name] = max(position, found or 0)
        return self.read(list(moves))


def offsets(deliveries: Sequence[Delivery]) -> list[int]:
    return [
        delivery.message.origin["offset"] for delivery in deliveries if delivery.message is not None
    ]


@contextmanager
def opened_with(source: Kafka, topic: str, progress: Any) -> Iterator[KafkaConsumer]:
    context = Nothing()
    context.progress = progress
    consumer = source.consumer([topic], context)
    assert isinstance(consumer, KafkaConsumer)
    try:
        yield consumer
    finally:
        consumer.close()


def take(source: KafkaConsumer, count: int) -> list[Delivery]:
    found: list[Delivery] = []

    def enough() -> bool:
        found.extend(source.receive(100, 0.2))
        return len(found) >= count

    eventually(enough, f"{count} deliveries")
    return found


def anchored(source: KafkaConsumer, progress: Memory, position: int) -> None:
    eventually(
        lambda: source.receive(100, 0.1) or list(progress.positions.values()) == [position],
        f"the anchor {position}",
    )
    assert list(progress.positions.values()) == [position]


def test_deliveries_in_flight_are_forgotten(kafka_bootstrap: str) -> None:
    topic, group, progress = new_topic(kafka_bootstrap), f"g-{secrets.token_hex(4)}", Memory()
    produce(kafka_bootstrap, topic, range(10))
    kafka = Kafka(kafka_bootstrap, group=group, anchored=True)
    with opened_with(kafka, topic, progress) as source:
        before = take(source, 10)
        assert offsets(before) == list(range(10))
        source.settle(before[:6])
        anchored(source, progress, 6)
        # the anchor survives a failover while 6 to 9 are in flight, whose outcome is unknown
        progress.history = "second"
        after = take(source, 4)
        assert offsets(after) == [6, 7, 8, 9]
        source.settle(before[6:])
        source.receive(100, 0.6)
        assert list(progress.positions.values()) == [6]
        source.settle(after)
    assert list(progress.positions.values()) == [10]
    consumer = Consumer({"bootstrap.servers": kafka_bootstrap, "group.id": group})
    (positions,) = consumer.committed([TopicPartition(topic, 0)], timeout=DEADLINE_S)
    consumer.close()
    assert positions.offset == 10
    *kind, _, floor = str(positions.metadata).removesuffix(" idle").split(" ")
    assert (kind, floor) == (["txbox", "anchored"], "0")


def test_a_database_that_is_away_costs_no_membership(kafka_bootstrap: str) -> None:
    topic, group, progress = new_topic(kafka_bootstrap), f"g-{secrets.token_hex(4)}", Memory()
    produce(kafka_bootstrap, topic, range(3))
    kafka = Kafka(
        kafka_bootstrap, group=group, anchored=True,
        session_timeout_ms=6000, max_poll_interval_ms=6000,
    )  # fmt: skip
    with opened_with(kafka, topic, progress) as source:
        found = take(source, 3)
        progress.away = True
        with suppress(StoreError):
            source.settle(found)
        ends = time.monotonic() + 8
        while time.monotonic() < ends:
            with suppress(StoreError):
                source.tend(found)
            with suppress(StoreError):
                assert not source.receive(100, 0.1)
        # where reading began, before anything was in work
        assert committed(kafka_bootstrap, group, topic) == 0
        progress.away = False
        anchored(source, progress, 3)
        assert not source.receive(100, 1.0)
    assert committed(kafka_bootstrap, group, topic) == 3


def test_a_progress_without_anchors_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="anchors"):
        Kafka("localhost:9092", group="shop", anchored=True).consumer(["orders"], Nothing())
