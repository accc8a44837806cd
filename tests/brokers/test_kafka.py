"""Kafka: the conformance suite; options, identity, the committed front, the log, and errors from the mock cluster."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC
from functools import partial
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.support.brokers.kafka import (
    PROTOCOLS,
    MockCluster,
    Nothing,
    committed,
    new_group,
    new_topic,
    opened,
    produce,
    take,
)
from tests.support.brokers.rigs.kafka import KafkaRig
from tests.support.servers.control import ThrowawayKafka
from tests.support.waiting import DEADLINE_S, eventually
from txbox import Message
from txbox.brokers.base import Delivery
from txbox.brokers.kafka import Kafka
from txbox.brokers.kafka import source as kafka_source
from txbox.brokers.kafka.partitions import _marked
from txbox.brokers.kafka.source import KafkaConsumer
from txbox.errors import BrokerUnavailable, ConfigurationError
from txbox.events import MessagesLost, TopicMissing
from txbox.identity import message_id
from txbox.testing.brokers import Rig, SourceConformance

pytestmark = pytest.mark.brokers


class TestKafka(SourceConformance):
    @pytest.fixture
    def rig(self, kafka_bootstrap: str) -> Iterator[Rig]:
        with KafkaRig(kafka_bootstrap) as rig:
            yield rig

    @pytest.fixture
    def throwaway_rig(self, throwaway_kafka: ThrowawayKafka) -> Iterator[Rig]:
        with KafkaRig(throwaway_kafka.bootstrap, throwaway_kafka) as rig:
            yield rig


def nothing_comes(source: KafkaConsumer) -> bool:
    return not any(source.receive(100, 0.2) for _ in range(8))


def is_unavailable(source: KafkaConsumer, what: str) -> bool:
    try:
        source.receive(100, 0.2)
    except BrokerUnavailable as error:
        return what in str(error)
    return False


def is_made(bootstrap: str, topic: str) -> bool:
    try:
        new_topic(bootstrap, name=topic)
    except KafkaException:
        # its deletion is not over
        return False
    return True


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


def test_a_static_member_does_not_cooperate() -> None:
    strategy = "partition.assignment.strategy"
    for options in ({}, {strategy: "range"}, {"group.protocol": "consumer"}):
        Kafka("localhost:9092", group="shop", group_instance_id="one", options=options)
    for strategies in ("cooperative-sticky", "range,cooperative-sticky"):
        with pytest.raises(ConfigurationError, match=r"cooperative together with group\.instance"):
            Kafka("localhost:9092", options={strategy: strategies, "group.instance.id": "one"})


def test_an_unknown_option_is_refused_when_opened() -> None:
    progress: Any = None
    source = Kafka("localhost:9092", group="shop", no_such_option=1)
    with pytest.raises(ConfigurationError, match=r"no\.such\.option"):
        source.consumer(["orders"], progress)


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
    with opened(Kafka(kafka_bootstrap, group=new_group()), topic) as source:
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
        with opened(Kafka(kafka_bootstrap, group=new_group()), topic) as source:
            ids.append(message_of(take(source, 1)[0]).origin["weak_id"])
    assert ids[0] != ids[1]


def test_a_topic_made_again_under_its_reader_has_other_weak_ids(kafka_bootstrap: str) -> None:
    """Nothing tells the reader but the offsets, which start over; its first messages are no duplicates."""
    topic = new_topic(kafka_bootstrap)
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    admin = AdminClient({"bootstrap.servers": kafka_bootstrap})

    def weak_ids(source: KafkaConsumer, count: int) -> list[str]:
        for _ in range(count):
            producer.produce(topic, b"{}")
        assert producer.flush(20) == 0
        return [message_of(each).origin["weak_id"] for each in take(source, count)]

    with opened(Kafka(kafka_bootstrap, group=new_group()), topic) as source:
        before = weak_ids(source, 5)
        admin.delete_topics([topic])[topic].result(20)
        eventually(partial(is_made, kafka_bootstrap, topic), "the topic, made again")
        after = weak_ids(source, 3)
    assert [weak_id.rpartition("/")[2] for weak_id in after] == ["0", "1", "2"]
    assert not set(before) & set(after)


def test_with_kip_848_a_topic_made_again_that_outgrows_the_old_one_loses_nothing(
    kafka_bootstrap: str,
) -> None:
    """Its partitions are assigned by the topic's id; with the classic protocol the offsets alone tell."""
    topic, admin = new_topic(kafka_bootstrap), AdminClient({"bootstrap.servers": kafka_bootstrap})
    with opened(
        Kafka(kafka_bootstrap, group=new_group(), group_protocol="consumer"), topic
    ) as source:
        produce(kafka_bootstrap, topic, range(3))
        source.settle(take(source, 3))
        admin.delete_topics([topic])[topic].result(20)
        eventually(partial(is_made, kafka_bootstrap, topic), "the topic, made again")
        produce(kafka_bootstrap, topic, range(10, 20))
        found: set[int] = set()

        def complete() -> bool:
            with suppress(BrokerUnavailable):
                found.update(int(message_id(message_of(each))) for each in source.receive(100, 0.2))
            return found == set(range(10, 20))

        eventually(complete, "every message of the new topic")


# -- the committed front ----------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_only_the_gapless_front_is_committed(kafka_bootstrap: str, protocol: str) -> None:
    topic, group_id = new_topic(kafka_bootstrap), new_group()
    produce(kafka_bootstrap, topic, range(6))
    with opened(
        Kafka(kafka_bootstrap, group=group_id, options=PROTOCOLS[protocol]), topic
    ) as source:
        found = take(source, 6)
        source.settle([found[0], found[1], found[4], found[2], found[5]])
    assert committed(kafka_bootstrap, group_id, topic) == 3
    with opened(
        Kafka(kafka_bootstrap, group=group_id, options=PROTOCOLS[protocol]), topic
    ) as source:
        again = take(source, 3)
        assert [message_of(one).origin["offset"] for one in again] == [3, 4, 5]
        source.settle(found)  # from an assignment that has ended: ignored
    assert committed(kafka_bootstrap, group_id, topic) == 3


@pytest.mark.parametrize(
    ("metadata", "marked"),
    [
        # what earlier releases have written, an operator, and what a later one may add
        ("txbox topic u", ("u", None, False)),
        ("txbox anchored u 7", ("u", 7, False)),
        ("txbox topic u idle", ("u", None, True)),
        ("txbox anchored u 7 idle", ("u", 7, True)),
        ("txbox anchored u 7 idle more", ("u", 7, True)),
        ("", (None, None, False)),
        ("by hand, idle", (None, None, False)),
    ],
)
def test_the_mark_of_a_commit(metadata: str, marked: tuple[str | None, int | None, bool]) -> None:
    assert _marked(metadata) == marked


def test_what_was_given_back_at_rest_is_no_redelivery(kafka_bootstrap: str) -> None:
    """Promise 4.4: only what an owner may have died of is counted before it runs, not each first window."""
    topic, group_id = new_topic(kafka_bootstrap), new_group()
    kafka = Kafka(kafka_bootstrap, group=group_id)

    def redelivered(count: int, settled: int, *, rested: bool) -> list[bool]:
        with opened(kafka, topic) as source:
            found = take(source, count)
            source.settle(found[:settled])
            source.rested = rested
            return [delivery.redelivered for delivery in found]

    produce(kafka_bootstrap, topic, range(8))
    assert redelivered(8, 2, rested=True) == [False] * 8, "nobody had anything of the group"
    assert redelivered(6, 2, rested=False) == [False] * 6, "nothing was in work any more"
    # handlers were at work at the end
    assert redelivered(4, 4, rested=True) == [True] * 4
    produce(kafka_bootstrap, topic, [8])
    # of the hundred that may have been in work only four have come
    assert redelivered(1, 1, rested=True) == [True]
    produce(kafka_bootstrap, topic, range(9, 108))
    with opened(kafka, topic) as source:
        source.settle(take(source, 99))
    produce(kafka_bootstrap, topic, [108, 109])
    assert redelivered(2, 2, rested=False) == [True] * 2, "99 of 100"
    produce(kafka_bootstrap, topic, range(110, 212))
    with opened(kafka, topic) as source:
        found = take(source, 102)
        assert [delivery.redelivered for delivery in found] == [True] * 100 + [False] * 2
        source.settle(found)
    produce(kafka_bootstrap, topic, [212])
    assert redelivered(1, 1, rested=False) == [False], "all are settled, and more than were in work"


def test_what_the_group_does_not_know_to_be_in_work_counts_as_redelivered(
    mock_cluster: MockCluster,
) -> None:
    """The next owner could not tell that this one died of it; and nobody waits for a group that does not answer."""
    topic, group_id = mock_cluster.topic(), new_group()
    produce(mock_cluster.bootstrap, topic, range(3))
    mock_cluster.refuse_commits(*[KafkaError.REBALANCE_IN_PROGRESS] * 100)
    with opened(Kafka(mock_cluster.bootstrap, group=group_id), topic) as source:
        assert [delivery.redelivered for delivery in take(source, 3)] == [True] * 3
        mock_cluster.accept_commits()
        eventually(
            lambda: (
                not source.receive(100, 0.1)
                and committed(mock_cluster.bootstrap, group_id, topic) == 0
            ),
            "the announcement",
        )
        produce(mock_cluster.bootstrap, topic, [3])
        assert [delivery.redelivered for delivery in take(source, 1)] == [False]


class RebalancedWithin:
    """A consumer that gives its partitions back within `consume`, after that has taken a message."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self.taken: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def consume(self, _count: int, _timeout: float) -> list[Any]:
        self.taken = self._consumer.consume(1, 20)
        self._consumer.unsubscribe()
        eventually(lambda: not self._consumer.poll(0.1) and not self.assignment(), "the revocation")
        return self.taken


def test_what_the_call_that_lost_a_partition_took_from_it_is_the_next_owners(
    kafka_bootstrap: str,
) -> None:
    """Committing it would skip what the next owner has in flight."""
    topic, group_id = new_topic(kafka_bootstrap), new_group()
    produce(kafka_bootstrap, topic, range(1))
    # each of the two calls takes a message then, and none the news that there are no more
    alone = Kafka(kafka_bootstrap, group=group_id, enable_partition_eof=False)
    with opened(alone, topic) as source:
        take(source, 1)
        consumer: Any = RebalancedWithin(source._consumer)
        source._consumer = consumer
        produce(kafka_bootstrap, topic, range(2))
        assert nothing_comes(source)
        assert [raw.offset() for raw in consumer.taken] == [2]


def test_gaps_of_transactions_are_no_gaps(kafka_bootstrap: str) -> None:
    topic, group_id = new_topic(kafka_bootstrap), new_group()
    producer = Producer({"bootstrap.servers": kafka_bootstrap, "transactional.id": topic})
    producer.init_transactions(20)
    for body, end in ((b"1", "commit"), (b"2", "abort"), (b"3", "commit")):
        producer.begin_transaction()
        producer.produce(topic, body)
        getattr(producer, f"{end}_transaction")(20)
    with opened(Kafka(kafka_bootstrap, group=group_id), topic) as source:
        found = take(source, 2)
        assert [message_of(one).payload for one in found] == [b"1", b"3"]
        source.settle(found)
    with opened(Kafka(kafka_bootstrap, group=group_id), topic) as source:
        assert nothing_comes(source)


@pytest.mark.parametrize("when", ["while it reads", "while nobody reads"])
def test_what_retention_deleted_before_it_was_read_is_reported(
    kafka_bootstrap: str, when: str
) -> None:
    topic, group_id = new_topic(kafka_bootstrap), new_group()
    seen: Any = Reports()
    kafka = Kafka(kafka_bootstrap, group=group_id)
    source: Any = kafka.consumer([topic], seen)
    try:
        produce(kafka_bootstrap, topic, range(3))
        source.settle(take(source, 3))
        if when == "while nobody reads":
            source.close()
        else:
            # what the client has fetched already is not lost
            source._pause()
        produce(kafka_bootstrap, topic, range(3, 10))
        admin = AdminClient({"bootstrap.servers": kafka_bootstrap})
        (deleted,) = admin.delete_records([TopicPartition(topic, 0, 8)]).values()
        deleted.result(DEADLINE_S)
        if when == "while nobody reads":
            source = kafka.consumer([topic], seen)
        found = take(source, 2)
        assert [delivery.tag.offset for delivery in found] == [8, 9]
        ((count, named, reason),) = [(one.count, one.topic, one.reason) for one in seen.reported]
        assert (count, named) == (5, topic)
        assert "offsets 3 to 7" in reason
    finally:
        source.close()


class Reports:
    """In flight is nothing; it remembers what is reported."""

    def __init__(self) -> None:
        self.reported: list[MessagesLost] = []

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)

    def settled(self, among: Any, within_s: float) -> list[Delivery]:
        del among, within_s
        return []

    def report(self, event: Any) -> None:
        self.reported.append(event)


# -- the assignment in the log ----------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_partitions_are_logged_as_they_come_and_go(
    kafka_bootstrap: str, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic, group_id = new_topic(kafka_bootstrap, 2), new_group()
    both, either = f"{topic}[0,1]", {f"{topic}[0]", f"{topic}[1]"}
    caplog.set_level(logging.INFO, "txbox")

    def member() -> Kafka:
        return Kafka(kafka_bootstrap, group=group_id, options=PROTOCOLS[protocol])

    def told(what: str, *members: KafkaConsumer) -> set[str]:
        """Of which partitions the log has said so by now."""
        for each in members:
            is_unavailable(each, "")
        ends = {both, *either}
        return {end for end in ends if f"kafka:{group_id}: {what} {end}" in caplog.messages}

    with opened(member(), topic) as first:
        eventually(lambda: both in told("assigned", first), "the assignment")
        with opened(member(), topic) as second:
            eventually(lambda: either & told("assigned", first, second), "one for the other")
            # the eager protocol revokes all of them in between
            assert told("revoked")
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_lost_partitions_are_logged(kafka_bootstrap: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "txbox")
    nothing: Any = None
    source: Any = Kafka(kafka_bootstrap, group="shop").consumer(["orders"], nothing)
    lost = [("orders", 10), ("invoices", 0), ("orders", 9)]
    source._lost(None, [TopicPartition(*each) for each in lost])
    assert caplog.messages == ["kafka:shop: lost invoices[0] orders[9,10]"]
    source.close()


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
    topic, group_id = mock_cluster.topic(), new_group()
    produce(mock_cluster.bootstrap, topic, range(3))
    with opened(Kafka(mock_cluster.bootstrap, group=group_id), topic) as source:
        found = take(source, 3)
        mock_cluster.refuse_commits(code)
        source.settle(found[:1])  # refused: nothing is raised
        source.settle(found[1:2])
    assert committed(mock_cluster.bootstrap, group_id, topic) <= 2


def test_nobody_waits_for_the_answer_to_a_commit(mock_cluster: MockCluster) -> None:
    topic, group_id = mock_cluster.topic(), new_group()
    produce(mock_cluster.bootstrap, topic, range(3))
    with opened(Kafka(mock_cluster.bootstrap, group=group_id), topic) as source:
        found = take(source, 3)
        mock_cluster.answer_after(5_000)
        asked_at = time.monotonic()
        source.settle(found)
        source.tend([])
        assert time.monotonic() - asked_at < 4
        mock_cluster.answer_after(0)
    assert committed(mock_cluster.bootstrap, group_id, topic) == 3


def test_a_refused_commit_is_said_and_asked_for_again(mock_cluster: MockCluster) -> None:
    topic, group_id = mock_cluster.topic(), new_group()
    produce(mock_cluster.bootstrap, topic, range(3))
    with opened(Kafka(mock_cluster.bootstrap, group=group_id), topic) as source:
        found = take(source, 3)
        mock_cluster.refuse_commits(KafkaError.TOPIC_AUTHORIZATION_FAILED)
        source.settle(found)

        def is_said() -> bool:
            try:
                source.receive(100, 0.1)
            except BrokerUnavailable as error:
                return "did not accept the commit" in str(error)
            return False

        eventually(is_said, "BrokerUnavailable")

        def is_committed() -> bool:
            source.receive(100, 0.1)
            return committed(mock_cluster.bootstrap, group_id, topic) == 3

        eventually(is_committed, "the commit")


def test_a_topic_that_is_missing_is_said_until_it_exists(kafka_bootstrap: str) -> None:
    """Otherwise it would look like an empty topic, and the worker like one that is ready."""
    topic = f"missing-{new_group()}"
    with opened(Kafka(kafka_bootstrap, group=new_group()), topic) as source:
        eventually(partial(is_unavailable, source, topic), "a receive that says what is missing")
        for _ in range(5):
            with pytest.raises(BrokerUnavailable, match=topic):
                source.receive(100, 0.2)
        new_topic(kafka_bootstrap, name=topic)
        eventually(lambda: not is_unavailable(source, topic), "a topic that exists")
        produce(kafka_bootstrap, topic, ["m1"])
        assert [message_of(one).payload for one in take(source, 1)]


def test_one_missing_topic_of_several_is_reported_while_the_others_are_consumed(
    kafka_bootstrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_source, "_MISSING_S", 0.2)
    topic, missing = new_topic(kafka_bootstrap), f"missing-{new_group()}"
    produce(kafka_bootstrap, topic, ["m1"])
    nothing: Any = Nothing()
    kafka = Kafka(kafka_bootstrap, group=new_group(), topic_metadata_refresh_interval_ms=500)
    source = kafka.consumer([topic, missing], nothing)
    found: list[Delivery] = []

    def receives(count: int) -> bool:
        # while it joins the group, what is missing is all that it can say
        with suppress(BrokerUnavailable):
            found.extend(source.receive(10, 0.1))
        return len(found) == count

    def reported() -> list[TopicMissing]:
        return [event for event in nothing.events if isinstance(event, TopicMissing)]

    try:
        eventually(lambda: receives(1), "the topic that exists")
        eventually(lambda: receives(1) and len(reported()) > 2, "what is missing, again and again")
        assert {(event.source, event.topic) for event in reported()} == {(source.name, missing)}
        assert all(missing in event.reason for event in reported())
        new_topic(kafka_bootstrap, name=missing)
        produce(kafka_bootstrap, missing, ["m2"])
        eventually(lambda: receives(2), "the topic that was missing")
    finally:
        source.close()


def test_brokers_that_are_down_are_waited_for(mock_cluster: MockCluster) -> None:
    topic = mock_cluster.topic()
    produce(mock_cluster.bootstrap, topic, ["a"])
    with opened(Kafka(mock_cluster.bootstrap, group=new_group()), topic) as source:
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
