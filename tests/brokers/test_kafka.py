"""Kafka on a real broker: identity, the committed front, rebalances, replays, crashes."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, Producer

from tests.brokers.kafka_support import (
    MockCluster,
    committed,
    new_topic,
    opened,
    produce,
    rewind,
    service,
)
from tests.databases import Raw
from tests.runtime.support import eventually, running, worker
from tests.shop import CONSUMER, add_effect, create_effects
from txbox import App, Message
from txbox.brokers.base import Delivery
from txbox.brokers.kafka import Kafka
from txbox.errors import BrokerUnavailable, ConfigurationError

pytestmark = pytest.mark.brokers

PROTOCOLS: dict[str, dict[str, Any]] = {
    "eager": {"partition.assignment.strategy": "range"},
    "cooperative": {"partition.assignment.strategy": "cooperative-sticky"},
    "kip-848": {"group.protocol": "consumer"},
}
MakeRaw = Callable[[str], Raw]


def take(source: Kafka, count: int) -> list[Delivery]:
    """Receive until so many have come."""
    found: list[Delivery] = []

    def enough() -> bool:
        try:
            found.extend(source.receive(100, 0.2))
        except BrokerUnavailable:
            return False
        return len(found) >= count

    eventually(enough, f"{count} deliveries")
    assert len(found) == count
    return found


def nothing_comes(source: Kafka) -> bool:
    return not any(source.receive(100, 0.2) for _ in range(8))


def group() -> str:
    return f"shop-{secrets.token_hex(4)}"


def message_of(delivery: Delivery) -> Message[Any]:
    assert delivery.message is not None
    return delivery.message


# -- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"enable_auto_commit": True},
        {"enable_auto_offset_store": "true"},
        {"group_id": "other"},
        {"options": {"bootstrap.servers": "elsewhere:9092"}},
        {"options": {"enable.auto.commit": True}},
    ],
)
def test_options_that_would_lose_messages_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"enable\.auto|group\.id|bootstrap\.servers"):
        Kafka("localhost:9092", group="shop", **options)


def test_an_unknown_option_is_refused_when_opened() -> None:
    progress: Any = None
    source = Kafka("localhost:9092", group="shop", no_such_option=1)
    with pytest.raises(ConfigurationError, match=r"no\.such\.option"):
        source.open(["orders"], progress, progress)


# -- what a message is ------------------------------------------------------------------------


def test_headers_keys_and_tombstones(kafka_bootstrap: str) -> None:
    topic = new_topic(kafka_bootstrap)
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    pairs: list[tuple[str, str | bytes | None]] = [
        ("message-id", b"m-1"),
        ("type", b"order.paid"),
        ("x", None),
        ("x", b"\xff\0"),
        ("é", b""),
    ]
    producer.produce(topic, b"\0\xff", key=b"\xff\xfe", headers=pairs)
    producer.produce(topic, None, key="café".encode(), headers=[("ce_type", b"gone")])
    assert producer.flush(20) == 0
    with opened(Kafka(kafka_bootstrap, group=group()), topic) as source:
        first, second = map(message_of, take(source, 2))
    assert (first.payload, first.key, first.type, first.id) == (
        b"\0\xff",
        "hex:fffe",
        "order.paid",
        None,
    )
    assert list(first.headers) == pairs
    assert first.time is not None
    assert first.time.tzinfo is UTC
    assert (second.payload, second.key, second.type) == (None, "café", "gone")
    assert (second.origin["partition"], second.origin["offset"]) == (0, 1)
    assert "weak_id" not in first.origin
    uuid, partition, offset = second.origin["weak_id"].rsplit("/", 2)
    assert (len(uuid), partition, offset) == (22, "0", "1")


def test_a_topic_made_again_has_other_weak_ids(kafka_bootstrap: str) -> None:
    ids = []
    for topic in (new_topic(kafka_bootstrap), new_topic(kafka_bootstrap)):
        producer = Producer({"bootstrap.servers": kafka_bootstrap})
        producer.produce(topic, b"{}")
        assert producer.flush(20) == 0
        with opened(Kafka(kafka_bootstrap, group=group()), topic) as source:
            ids.append(message_of(take(source, 1)[0]).origin["weak_id"])
    assert ids[0] != ids[1]


# -- the committed front ----------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_only_the_gapless_front_is_committed(kafka_bootstrap: str, protocol: str) -> None:
    topic, own = new_topic(kafka_bootstrap), group()
    produce(kafka_bootstrap, topic, range(6))
    with opened(Kafka(kafka_bootstrap, group=own, options=PROTOCOLS[protocol]), topic) as source:
        found = take(source, 6)
        source.settle([found[0], found[1], found[4], found[2], found[5]])
    assert committed(kafka_bootstrap, own, topic) == 3
    with opened(Kafka(kafka_bootstrap, group=own, options=PROTOCOLS[protocol]), topic) as source:
        again = take(source, 3)
        assert [message_of(one).origin["offset"] for one in again] == [3, 4, 5]
        source.settle(found)  # of an assignment that is over: ignored
    assert committed(kafka_bootstrap, own, topic) == 3


def test_gaps_of_transactions_are_no_gaps(kafka_bootstrap: str) -> None:
    topic, own = new_topic(kafka_bootstrap), group()
    producer = Producer({"bootstrap.servers": kafka_bootstrap, "transactional.id": topic})
    producer.init_transactions(20)
    for body, end in ((b"1", "commit"), (b"2", "abort"), (b"3", "commit")):
        producer.begin_transaction()
        producer.produce(topic, body)
        getattr(producer, f"{end}_transaction")(20)
    with opened(Kafka(kafka_bootstrap, group=own), topic) as source:
        found = take(source, 2)
        assert [message_of(one).payload for one in found] == [b"1", b"3"]
        source.settle(found)
    with opened(Kafka(kafka_bootstrap, group=own), topic) as source:
        assert nothing_comes(source)


# -- the mock cluster: errors to order --------------------------------------------------------


@pytest.fixture
def mock_cluster() -> Iterator[MockCluster]:
    cluster = MockCluster()
    yield cluster
    cluster.close()


@pytest.mark.parametrize(
    "code",
    [
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.REBALANCE_IN_PROGRESS,
    ],
)
def test_a_commit_refused_by_a_rebalance_stops_nobody(mock_cluster: MockCluster, code: int) -> None:
    topic, own = mock_cluster.topic(), group()
    produce(mock_cluster.bootstrap, topic, range(3))
    with opened(Kafka(mock_cluster.bootstrap, group=own), topic) as source:
        found = take(source, 3)
        mock_cluster.refuse_commits(code)
        source.settle(found[:1])  # refused: nothing is raised
        source.settle(found[1:2])
    assert committed(mock_cluster.bootstrap, own, topic) <= 2


def test_brokers_that_are_down_are_waited_for(mock_cluster: MockCluster) -> None:
    topic = mock_cluster.topic()
    produce(mock_cluster.bootstrap, topic, ["a"])
    with opened(Kafka(mock_cluster.bootstrap, group=group()), topic) as source:
        source.settle(take(source, 1))
        mock_cluster.broker(up=False)

        def is_away() -> bool:
            try:
                source.receive(100, 0.2)
            except BrokerUnavailable:
                return True
            return False

        eventually(is_away, "BrokerUnavailable")
        mock_cluster.broker(up=True)
        produce(mock_cluster.bootstrap, topic, ["b"])
        take(source, 1)


# -- whole workers ----------------------------------------------------------------------------


def notes(raw: Raw) -> dict[str, int]:
    return {str(own): int(count) for own, count in raw.rows(
        "SELECT message_id, count(*) FROM effect GROUP BY message_id"
    )}  # fmt: skip


def each_once(raw: Raw, ids: Sequence[object]) -> None:
    wanted = {str(own): 1 for own in ids}
    eventually(lambda: len(notes(raw)) >= len(wanted), "an effect of every message")
    assert notes(raw) == wanted


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_kafka_rebalance_mid_batch(
    protocol: str, kafka_bootstrap: str, postgresql_url: str, raw: MakeRaw, tmp_path: Path
) -> None:
    topic, own, database = new_topic(kafka_bootstrap, 6), group(), raw(postgresql_url)
    create_effects(database)
    produced = 0
    options = PROTOCOLS[protocol]
    if "group.protocol" not in options:
        options = options | {"session.timeout.ms": 6000}
    plan = {
        "url": postgresql_url, "bootstrap": kafka_bootstrap, "group": own, "topic": topic,
        "handle_s": 0.01, "options": options,
    }  # fmt: skip

    def feed() -> None:
        nonlocal produced
        produce(kafka_bootstrap, topic, range(produced, produced + 40))
        produced += 40

    def handles(name: str) -> None:
        def does() -> bool:
            if produced - len(notes(database)) < 150:
                feed()
            return b"handling" in (tmp_path / name).read_bytes()

        eventually(does, f"work of {name}")

    with ExitStack() as stack:
        first = stack.enter_context(service(plan, tmp_path / "1"))
        handles("1")
        stack.enter_context(service(plan, tmp_path / "2"))
        third = stack.enter_context(service(plan, tmp_path / "3"))
        handles("2")
        handles("3")
        first.send_signal(signal.SIGTERM)
        # a member that dies is missed after its session; KIP-848 sets that on the broker, 45 s
        third.send_signal(signal.SIGTERM if protocol == "kip-848" else signal.SIGKILL)
        feed()
        each_once(database, range(produced))
        assert first.wait(20) == 0
    assert set(notes(database).values()) == {1}


def test_operator_replays_topic(
    kafka_bootstrap: str, postgresql_url: str, raw: MakeRaw, tmp_path: Path
) -> None:
    topic, own, database = new_topic(kafka_bootstrap), group(), raw(postgresql_url)
    create_effects(database)
    produce(kafka_bootstrap, topic, range(20))
    plan = {"url": postgresql_url, "bootstrap": kafka_bootstrap, "group": own, "topic": topic}
    with service(plan, tmp_path / "1") as process:
        each_once(database, range(20))
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert committed(kafka_bootstrap, own, topic) == 20
    rewind(kafka_bootstrap, own, topic)
    produce(kafka_bootstrap, topic, ["after"])
    with service(plan, tmp_path / "2"):
        each_once(database, [*range(20), "after"])
        eventually(lambda: committed(kafka_bootstrap, own, topic) == 21, "the commit")
    assert set(notes(database).values()) == {1}


@pytest.mark.parametrize("point", ["received", "before:ack", "after:ack"])
def test_a_killed_worker_loses_and_doubles_nothing(
    point: str, kafka_bootstrap: str, postgresql_url: str, raw: MakeRaw, tmp_path: Path
) -> None:
    topic, own, database = new_topic(kafka_bootstrap), group(), raw(postgresql_url)
    create_effects(database)
    produce(kafka_bootstrap, topic, range(30))
    # static membership: the successor need not wait until the dead member's session ends
    plan = {
        "url": postgresql_url, "bootstrap": kafka_bootstrap, "group": own, "topic": topic,
        "options": {"group.instance.id": own},
    }  # fmt: skip
    with service(plan, tmp_path / "1", (point, 2)) as process:
        assert process.wait(20) == -signal.SIGKILL
    with service(plan, tmp_path / "2"):
        each_once(database, range(30))
        eventually(lambda: committed(kafka_bootstrap, own, topic) == 30, "the commit")
    assert set(notes(database).values()) == {1}


def test_a_handler_slower_than_the_poll_interval_runs_once(
    kafka_bootstrap: str, postgresql_url: str, raw: MakeRaw, tmp_path: Path
) -> None:
    topic, own, database = new_topic(kafka_bootstrap), group(), raw(postgresql_url)
    create_effects(database)
    produce(kafka_bootstrap, topic, ["slow"])
    plan = {
        "url": postgresql_url, "bootstrap": kafka_bootstrap, "group": own, "topic": topic,
        "handle_s": 8.0, "options": {"session.timeout.ms": 6000, "max.poll.interval.ms": 6000},
    }  # fmt: skip
    with service(plan, tmp_path / "1"):
        each_once(database, ["slow"])
        eventually(lambda: committed(kafka_bootstrap, own, topic) == 1, "the commit")
    said = (tmp_path / "1").read_text()
    assert said.count("handling") == 1
    assert "MAXPOLL" not in said


@pytest.mark.parametrize("weak", [False, True])
def test_without_an_id_a_message_is_quarantined_or_weakly_known(
    weak: bool, kafka_bootstrap: str, sqlite_url: str, raw: MakeRaw
) -> None:
    topic, own, database = new_topic(kafka_bootstrap), group(), raw(sqlite_url)
    create_effects(database)
    app = App(sqlite_url)

    @app.handler(topic, consumer=CONSUMER, weak_ids=weak)
    def handle(message: Message[Any], tx: Any) -> None:
        add_effect(tx, message.id)

    app.consume(Kafka(kafka_bootstrap, group=own))
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    producer.produce(topic, b"{}")
    producer.produce(topic, b"{}")
    assert producer.flush(20) == 0
    with running(worker(app)):
        eventually(lambda: committed(kafka_bootstrap, own, topic) == 2, "the commit")
    assert len(notes(database)) == (2 if weak else 0)
    assert all(own.startswith("weak:") for own in notes(database))
