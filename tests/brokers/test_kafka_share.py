"""Kafka's share groups: the conformance suite, and what locks and counts of the broker mean for a message."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._resource import ResourceType

from tests.support.brokers.conformance import STRICT, SourceConformance, service, the_message
from tests.support.brokers.kafka import MakeRaw, each_once, new_topic, produce
from tests.support.brokers.kafka import service as process
from tests.support.brokers.rigs import Note, Rig, notes, opened, take
from tests.support.brokers.rigs.kafka_share import KafkaShareRig
from tests.support.databases import Raw
from tests.support.servers.control import ThrowawayKafka, ThrowawayPostgres
from tests.support.shop import (
    CONSUMER,
    Shop,
    add_effect,
    create_effects,
    effects,
    quarantined,
    statuses,
)
from tests.support.shop import opened as opened_shop
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.workers import running, worker
from txbox import App, Message, events
from txbox.brokers.kafka import Kafka
from txbox.errors import ConfigurationError, StoreError
from txbox.identity import message_id

pytestmark = pytest.mark.brokers

#: More deliveries than the broker makes of a record.
ENDS = 6


@pytest.fixture
def rig(kafka_bootstrap: str) -> Iterator[KafkaShareRig]:
    with KafkaShareRig(kafka_bootstrap) as rig:
        yield rig


@pytest.fixture
def shop(sqlite_url: str) -> Iterator[Shop]:
    with opened_shop(sqlite_url, lease=STRICT) as shop:
        yield shop


class TestKafkaShare(SourceConformance):
    @pytest.fixture
    def throwaway_rig(self, throwaway_kafka: ThrowawayKafka) -> Iterator[Rig]:
        with KafkaShareRig(throwaway_kafka.bootstrap, throwaway_kafka) as rig:
            yield rig

    def test_a_slow_handler_keeps_its_message(self, rig: Rig, shop: Shop) -> None:
        """Not here, as a lock cannot be renewed: another member gets it, and it still has one effect."""
        go = threading.Event()
        watched = service(shop, rig, lambda _: go.wait(DEADLINE_S), source=rig.impatient)
        rig.publish(Note("slow"))
        with running(worker(shop.app)), opened(rig, **rig.impatient) as rival:
            eventually(lambda: shop.calls)
            (again,) = take(rival, 1)
            assert (again.redelivered, again.store_from) == (True, 0.0)
            go.set()
            eventually(lambda: watched.idle)
            assert shop.app.process(the_message(again)) == "duplicate"
            rival.settle([again])
        assert (shop.calls, effects(shop.raw)) == (["slow"], 1)
        assert rig.outstanding() == 0

    def test_while_the_database_is_away_nothing_is_given_back_or_counted(self, rig: Rig) -> None:
        """By us; the broker counts each lock that ends: an outage costs a message one of its deliveries, not all."""
        with ThrowawayPostgres() as database:
            with App(database.url) as app:
                app.init()
            with opened_shop(database.url, lease=STRICT) as shop:
                # the shortest lock that a broker allows
                watched = service(shop, rig, source={"share_record_lock_duration_ms": 1000})
                rig.publish(Note("before"))
                with running(worker(shop.app)) as codes:
                    eventually(lambda: len(watched.settled) == 1)
                    shop.raw.close()
                    database.stop(immediate=True)
                    rig.publish(*notes(5))
                    away_until = time.monotonic() + ENDS
                    eventually(lambda: shop.emitted(events.ConsumptionPaused))
                    # as many locks end as would cost all deliveries
                    eventually(lambda: time.monotonic() > away_until)
                    assert (len(watched.settled), codes) == (1, [])
                    assert len(watched.received) <= 6
            # nothing is left in memory
            database.start()
            with App(database.url) as app, Raw(database.url) as raw:
                register: Any = app.handler(rig.topic, consumer=CONSUMER)
                register(lambda message, tx: add_effect(tx, message.id))
                app.consume(rig.source())
                with running(worker(app)):
                    eventually(lambda: effects(raw) >= 6)
                assert (effects(raw), statuses(raw)) == (6, {"processed": 6})
                assert raw.value("SELECT max(attempts) FROM txbox_inbox") == 0
        assert rig.outstanding() == 0


# -- what the broker counts ---------------------------------------------------------------------------


class Away:
    """A database that is away, or not, without a worker."""

    lease_s = 1.0

    def __init__(self) -> None:
        self.away = False
        self.writes = 0
        self.progress: Any = self

    def settled(self, among: object, within_s: float) -> Sequence[Any]:
        return []

    def report(self, event: object) -> None:
        raise AssertionError(event)

    def load(self) -> None:
        if self.away:
            raise StoreError("away")

    def acquire(self) -> bool:
        self.writes += 1
        self.load()
        return True

    def release(self) -> None:
        return


def test_what_comes_again_is_stored_before_it_is_run(rig: KafkaShareRig, shop: Shop) -> None:
    rig.publish(Note("m0"))
    with opened(rig) as source:
        (first,) = take(source, 1)
        assert not first.redelivered
        assert first.store_from is not None
        assert first.store_from > time.monotonic()
    seen: list[tuple[str, int]] = []
    service(
        shop, rig, lambda _: seen.extend(shop.raw.rows("SELECT status, starts FROM txbox_inbox"))
    )
    with running(worker(shop.app)):
        eventually(lambda: shop.effects() == 1)
    assert seen == [("processing", 1)]
    assert rig.outstanding() == 0


def test_what_waits_for_half_of_its_lock_is_stored(rig: KafkaShareRig, shop: Shop) -> None:
    """A batch that a slow handler cannot finish leaves it: the others of it are acknowledged in time."""
    watched: Any = None
    seen: list[list[tuple[str]]] = []

    def slow(_: Message[Any]) -> None:
        seen.append(
            shop.raw.rows("SELECT DISTINCT status FROM txbox_inbox WHERE status <> 'processed'")
        )
        if len(shop.calls) == 1:
            late = max(delivery.store_from or 0.0 for delivery in watched.received)
            eventually(lambda: time.monotonic() > late)

    options: Any = {"share_record_lock_duration_ms": 3000}
    watched = service(shop, rig, slow, source=options, concurrency=1)
    rig.publish(*notes(3))
    with running(worker(shop.app)):
        eventually(lambda: len(watched.settled) == 3 and shop.effects() == 3)
    assert len(watched.received) == 3, "a lock has ended"
    assert seen == [[], [("processing",)], [("processing",)]]
    assert rig.outstanding() == 0


def test_nothing_is_fetched_while_the_database_is_away(rig: KafkaShareRig) -> None:
    context: Any = Away()
    source = rig.source(share_record_lock_duration_ms=1500).consumer([rig.topic], context)
    try:
        rig.publish(Note("m0"))
        (first,) = take(source, 1)
        context.away = True
        eventually(lambda: _refused(source))
        rig.publish(Note("m1"))
        for _ in range(5):
            assert _refused(source)
        # nobody has it: the first member has left, or waits for its last
        with opened(rig) as rival:
            (other,) = take(rival, 1)
            assert (the_message(other).headers.text("message-id"), other.redelivered) == (
                "m1",
                False,
            )
        context.away = False
        found = take(source, 2)
        assert {message_id(the_message(delivery)) for delivery in found} == {"m0", "m1"}
        assert all(delivery.redelivered for delivery in found)
        assert context.writes, "a database may answer, and store nothing"
        source.settle([first, *found])
    finally:
        source.close()
    assert rig.outstanding() == 0


def _refused(source: Any) -> bool:
    try:
        source.receive(100, 0.05)
    except StoreError:
        return True
    return False


def test_without_ids_a_source_that_was_refused_sets_its_messages_aside(
    rig: KafkaShareRig, shop: Shop
) -> None:
    """They would be dropped one day, as each worker that is refused is a delivery."""
    rig.publish(*(Note(payload=b"%d" % number) for number in range(100)))
    service(shop, rig)
    with running(worker(shop.app)):
        eventually(lambda: shop.emitted(events.SourceRefused))
    with running(worker(shop.app)):
        eventually(lambda: len(quarantined(shop.raw)) == 100)
    assert rig.outstanding() == 0


@pytest.mark.slow
def test_a_worker_that_is_killed_more_often_than_the_broker_delivers(
    kafka_bootstrap: str, postgresql_url: str, raw: MakeRaw, tmp_path: Path
) -> None:
    topic, database = new_topic(kafka_bootstrap), raw(postgresql_url)
    create_effects(database)
    produce(kafka_bootstrap, topic, range(20))
    plan = {
        "url": postgresql_url, "bootstrap": kafka_bootstrap, "group": topic, "topic": topic,
        "share": True, "lease_s": 1,
    }  # fmt: skip
    for number in range(ENDS):
        with process(plan, tmp_path / str(number), ("after:handler", 3)) as killed:
            killed.wait(DEADLINE_S)
    with process(plan, tmp_path / "last"):
        each_once(database, range(20))


# -- a partition and many workers ---------------------------------------------------------------------


@pytest.mark.slow
def test_twelve_workers_share_one_partition(
    kafka_bootstrap: str, postgresql_url: str, raw: MakeRaw, tmp_path: Path
) -> None:
    """Of a classic group, one of them works."""
    topic, database, count = new_topic(kafka_bootstrap), raw(postgresql_url), 300
    create_effects(database)
    busy: dict[bool, int] = {}
    took: dict[bool, float] = {}
    for share in (False, True):
        plan = {
            "url": postgresql_url, "bootstrap": kafka_bootstrap, "group": f"{topic}-{share}",
            "topic": topic, "share": share, "handle_s": 0.02,
            "options": {"max.poll.records": 10} if share else {},
        }  # fmt: skip
        with ExitStack() as stack:
            for number in range(12):
                stack.enter_context(process(plan, tmp_path / f"{share}-{number}"))
            ids = [f"{share}-{number}" for number in range(count)]
            produce(kafka_bootstrap, topic, [f"{share}-first"])
            first = f"SELECT count(*) FROM effect WHERE message_id = '{share}-first'"
            eventually(lambda: database.value(first) == 1)  # noqa: B023
            began = time.monotonic()
            # a broker hands a batch out as a whole
            produce(kafka_bootstrap, topic, ids, flush_every=10)
            everything = f"SELECT count(*) FROM effect WHERE message_id LIKE '{share}-%'"
            eventually(lambda: database.value(everything) == count + 1)  # noqa: B023
            took[share] = time.monotonic() - began
        busy[share] = database.value(
            f"SELECT count(DISTINCT note) FROM effect WHERE message_id LIKE '{share}-%'"
        )
    print(f"classic {count / took[False]:.0f} a second, share group {count / took[True]:.0f}")
    assert busy[False] == 1
    assert busy[True] > 6


# -- options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"auto_offset_reset": "latest"},
        {"isolation_level": "read_uncommitted"},
        {"group_instance_id": "one"},
        {"options": {"share.acknowledgement.mode": "implicit"}},
        {"enable_auto_commit": True},
    ],
)
def test_options_that_a_share_group_has_not_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"does not take|must be off"):
        Kafka("localhost:9092", group="shop", share=True, **options)


def test_what_no_share_group_can_do_is_refused(
    rig: KafkaShareRig, shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    nothing: Any = None
    with pytest.raises(ConfigurationError, match="omit anchored="):
        Kafka("localhost:9092", group="shop", share=True, anchored=True)
    with pytest.raises(ConfigurationError, match="by name"):
        Kafka("localhost:9092", group="shop", share=True).consumer(["*"], nothing)
    with pytest.raises(ConfigurationError, match="needs a group"):
        Kafka("localhost:9092", share=True).consumer(["orders"], nothing)
    with pytest.raises(ConfigurationError, match=r"no\.such\.option"):
        Kafka("localhost:9092", group="shop", share=True, no_such_option=1).consumer(["o"], nothing)
    service(shop, rig, ordered=True)
    assert worker(shop.app).run() != 0
    assert "several consumers at once" in caplog.text


def _settings(rig: KafkaShareRig) -> dict[str, str]:
    resource = ConfigResource(ResourceType.GROUP, rig.topic)
    (future,) = rig.admin.describe_configs([resource]).values()
    return {name: entry.value for name, entry in future.result(DEADLINE_S).items()}


def test_the_group_is_set_up_and_what_others_have_set_stays(rig: KafkaShareRig) -> None:
    with opened(
        rig, share_record_lock_duration_ms=20_000, share_isolation_level="read_uncommitted"
    ):
        pass
    with opened(rig) as source:
        settings = _settings(rig)
        assert source.redelivery_s == 20
    assert settings["share.auto.offset.reset"] == "earliest"
    assert settings["share.isolation.level"] == "read_uncommitted"
    with (
        pytest.raises(ConfigurationError, match=r"kafka-configs\.sh"),
        opened(rig, share_record_lock_duration_ms=1),
    ):
        pass
