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

from tests.support.brokers.kafka import MakeRaw, each_once, new_topic, produce
from tests.support.brokers.kafka import service as process
from tests.support.brokers.rigs.kafka_share import KafkaShareRig
from tests.support.servers.control import ThrowawayKafka
from tests.support.shop import create_effects
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.workers import worker
from txbox import Message, events
from txbox.brokers.kafka import Kafka
from txbox.connections.base import connection_lost
from txbox.errors import ConfigurationError, StoreError
from txbox.testing.brokers import (
    Note,
    Rig,
    Serve,
    SourceConformance,
    Trial,
    id_of,
    notes,
    opened,
    take,
    the_message,
)
from txbox.testing.faults import passing

pytestmark = pytest.mark.brokers

#: More deliveries than the broker makes of a record.
ENDS = 11


@pytest.fixture
def rig(kafka_bootstrap: str) -> Iterator[KafkaShareRig]:
    with KafkaShareRig(kafka_bootstrap) as rig:
        yield rig


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    with ExitStack() as stack:

        def made(rig: Rig, *args: Any, **options: Any) -> Trial:
            trial = Trial(rig, tmp_path / "service.db", *args, **options)
            stack.callback(trial.close)
            return trial

        yield made


class TestKafkaShare(SourceConformance):
    @pytest.fixture
    def throwaway_rig(self, throwaway_kafka: ThrowawayKafka) -> Iterator[Rig]:
        with KafkaShareRig(throwaway_kafka.bootstrap, throwaway_kafka) as rig:
            yield rig

    def test_a_slow_handler_keeps_its_message(self, rig: Rig, serve: Serve) -> None:
        """Not here, as a lock cannot be renewed: another member gets it, and it still has one effect."""
        go = threading.Event()
        service = serve(rig, lambda _: go.wait(DEADLINE_S), source=rig.impatient)
        rig.publish(Note("slow"))
        with service.running(), opened(rig, **rig.impatient) as rival:
            eventually(lambda: service.calls)
            (again,) = take(rival, 1)
            assert (again.redelivered, again.store_from) == (True, 0.0)
            go.set()
            eventually(lambda: service.idle() and service.effects() == 1)
            assert service.app.process(the_message(again)) == "duplicate"
            rival.settle([again])
        assert service.calls == ["slow"]
        assert rig.outstanding() == 0

    def test_while_the_database_is_away_nothing_is_given_back_or_counted(
        self, rig: Rig, serve: Serve
    ) -> None:
        """By us; the broker counts each lock that ends: an outage costs a message one of its deliveries, not all."""
        # the shortest lock that a broker allows
        service = serve(rig, source={"share_record_lock_duration_ms": 1000})
        rig.publish(Note("before"))
        away = threading.Event()

        def lose(name: str) -> None:
            if away.is_set() and name.startswith("before:") and name != "before:ack":
                raise connection_lost(definite=True)

        with passing(lose), service.running() as codes:
            eventually(lambda: len(service.settled) == 1)
            away.set()
            rig.publish(*notes(5))
            # as many locks end as would cost all deliveries
            until = time.monotonic() + ENDS
            eventually(lambda: service.emitted(events.ConsumptionPaused))
            eventually(lambda: time.monotonic() > until)
            assert (len(service.settled), codes) == (1, [])
            assert len(service.received) <= 6
            away.clear()
            eventually(lambda: service.effects() == 6 and rig.outstanding() == 0)
        service.each_once(6)
        assert service.rows("SELECT max(attempts) FROM txbox_inbox") == [(0,)]


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


def test_what_comes_again_is_stored_before_it_is_run(rig: KafkaShareRig, serve: Serve) -> None:
    rig.publish(Note("m0"))
    with opened(rig) as source:
        (first,) = take(source, 1)
        assert not first.redelivered
        assert first.store_from is not None
        assert first.store_from > time.monotonic()
    seen: list[tuple[str, int]] = []
    service: Trial = serve(
        rig, lambda _: seen.extend(service.rows("SELECT status, starts FROM txbox_inbox"))
    )
    with service.running():
        eventually(lambda: service.effects() == 1)
    assert seen == [("processing", 1)]
    assert rig.outstanding() == 0


def test_what_waits_for_half_of_its_lock_is_stored(rig: KafkaShareRig, serve: Serve) -> None:
    """A batch that a slow handler cannot finish leaves it: the others of it are acknowledged in time."""
    seen: list[list[tuple[str]]] = []

    def slow(_: Message[Any]) -> None:
        seen.append(
            service.rows("SELECT DISTINCT status FROM txbox_inbox WHERE status <> 'processed'")
        )
        if len(service.calls) == 1:
            late = max(delivery.store_from or 0.0 for delivery in service.received)
            eventually(lambda: time.monotonic() > late)

    options: Any = {"share_record_lock_duration_ms": 3000}
    service = serve(rig, slow, source=options, concurrency=1)
    rig.publish(*notes(3))
    with service.running():
        eventually(lambda: len(service.settled) == 3 and service.effects() == 3)
    assert len(service.received) == 3, "a lock has ended"
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
        assert {id_of(delivery) for delivery in found} == {"m0", "m1"}
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
    rig: KafkaShareRig, serve: Serve
) -> None:
    """They would be dropped one day, as each worker that is refused is a delivery."""
    rig.publish(*(Note(payload=b"%d" % number) for number in range(100)))
    service = serve(rig)
    with service.running():
        eventually(lambda: service.emitted(events.SourceRefused))
    with service.running():
        eventually(lambda: len(service.quarantined()) == 100)
    assert rig.outstanding() == 0


@pytest.mark.slow
def test_a_worker_that_is_killed_more_often_than_the_broker_delivers(
    kafka_bootstrap: str, postgresql_url: str, raw: MakeRaw, tmp_path: Path
) -> None:
    topic, database = new_topic(kafka_bootstrap), raw(postgresql_url)
    create_effects(database)
    # each life of a worker does two of them
    numbers = range(3 * ENDS)
    produce(kafka_bootstrap, topic, numbers)
    plan = {
        "url": postgresql_url, "bootstrap": kafka_bootstrap, "group": topic, "topic": topic,
        "share": True, "lease_s": 1,
    }  # fmt: skip
    for number in range(ENDS):
        with process(plan, tmp_path / str(number), ("after:handler", 3)) as killed:
            killed.wait(DEADLINE_S)
    with process(plan, tmp_path / "last"):
        each_once(database, numbers)


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
    rig: KafkaShareRig, serve: Serve, caplog: pytest.LogCaptureFixture
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
    assert worker(serve(rig, ordered=True).app).run() != 0
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
    # a broker learns of a change a moment after it is made
    eventually(lambda: _settings(rig)["share.record.lock.duration.ms"] == "20000")
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
