"""A topic that is deleted and made again while its group runs: what it has then is read from its beginning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.support.brokers.kafka import (
    PROTOCOLS,
    MakeRaw,
    committed,
    each_once,
    handled,
    new_group,
    new_topic,
    opened,
    produce,
    rewind,
    service,
    take,
)
from tests.support.servers.control import ThrowawayKafka
from tests.support.shop import create_effects
from tests.support.waiting import DEADLINE_S, eventually
from txbox.brokers.kafka import Kafka
from txbox.brokers.kafka import client as kafka_client
from txbox.brokers.kafka.source import KafkaConsumer
from txbox.errors import BrokerUnavailable
from txbox.identity import message_id

pytestmark = pytest.mark.brokers

_OLD, _NEW = range(4), range(100, 130)


@pytest.fixture(params=PROTOCOLS)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return PROTOCOLS[request.param]


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_client, "LOOK_S", 0.5)


def recreate(bootstrap: str, topic: str, partitions: int = 1) -> None:
    """Delete the topic, make it again, and send what it has then: more than it had before."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.delete_topics([topic])[topic].result(DEADLINE_S)

    def is_made() -> bool:
        with suppress(KafkaException):
            new_topic(bootstrap, partitions, name=topic)
            return True
        return False  # its deletion is not over

    eventually(is_made, "the topic, made again")
    produce(bootstrap, topic, _NEW)


def reads(source: KafkaConsumer, *, settled: bool = True) -> Iterator[set[int]]:
    """What it has read of the new topic by now, again and again."""
    ids: set[int] = set()
    while True:
        with suppress(BrokerUnavailable):
            deliveries = source.receive(100, 0.2)
            ids |= {int(message_id(each.message)) for each in deliveries if each.message}
            if settled:
                source.settle(deliveries)
        yield ids & set(_NEW)


def reads_all(source: KafkaConsumer) -> None:
    progress = reads(source)
    eventually(lambda: next(progress) == set(_NEW), "every message of the new topic")


def commit(bootstrap: str, group: str, topic: str, offset: int, metadata: str = "") -> None:
    """Commit what the group, which has no members, has not read."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group})
    offsets = [TopicPartition(topic, 0, offset, metadata)]
    consumer.commit(offsets=offsets, asynchronous=False)
    consumer.close()


def test_it_is_read_by_a_group_that_lives_through_it(
    kafka_bootstrap: str, options: dict[str, Any]
) -> None:
    topic, group = new_topic(kafka_bootstrap), new_group()
    produce(kafka_bootstrap, topic, _OLD)
    with opened(Kafka(kafka_bootstrap, group=group, options=options), topic) as source:
        source.settle(take(source, len(_OLD)))
        # as while handlers run: the client learns of it when there is more than it has read already
        source._pause()
        recreate(kafka_bootstrap, topic)
        reads_all(source)
    assert committed(kafka_bootstrap, group, topic) == len(_NEW)


def test_it_is_read_after_a_new_leader_by_a_client_that_knows_the_deleted_one(
    throwaway_kafka: ThrowawayKafka, options: dict[str, Any]
) -> None:
    """The client takes what is said of its leader for older than what it knows, and would never read it."""
    bootstrap, group = throwaway_kafka.bootstrap, new_group()
    topic = new_topic(bootstrap)
    produce(bootstrap, topic, _OLD[:2])
    with opened(Kafka(bootstrap, group=group, options=options), topic) as source:
        source.settle(take(source, 2))
        throwaway_kafka.stop(immediate=True)
        throwaway_kafka.start()
        produce(bootstrap, topic, _OLD[2:])
        source.settle(take(source, 2))
        recreate(bootstrap, topic)
        reads_all(source)


def test_it_is_read_by_a_member_that_heard_of_the_deleted_one_and_got_its_partitions_later(
    throwaway_kafka: ThrowawayKafka,
) -> None:
    """Another member leads the group: only the leader asks for metadata again before partitions are assigned."""
    bootstrap, group = throwaway_kafka.bootstrap, new_group()
    topic = new_topic(bootstrap, 2)
    throwaway_kafka.stop(immediate=True)
    throwaway_kafka.start()
    produce(bootstrap, topic, _OLD)
    settings = {"group.id": group, "partition.assignment.strategy": "cooperative-sticky"}
    leader = Consumer({"bootstrap.servers": bootstrap, **settings})
    leader.subscribe([topic])
    eventually(lambda: leader.poll(0.1) or leader.assignment(), "partitions of the leader")
    with opened(Kafka(bootstrap, group=group), topic) as source:
        with suppress(BrokerUnavailable):
            source.receive(1, 0.5)
        assert not source._partitions, "the leader has them"
        recreate(bootstrap, topic, partitions=2)
        ids = reads(source)

        def has_read() -> bool:
            # a leader that does not poll is waited for
            leader.poll(0)
            return bool(next(ids))

        eventually(has_read, "messages of its partition")
    leader.close()


def test_it_is_read_by_whoever_comes_after_a_worker_that_did_not_notice(
    kafka_bootstrap: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_client, "LOOK_S", 3600.0)
    topic, group = new_topic(kafka_bootstrap), new_group()
    produce(kafka_bootstrap, topic, _OLD)
    with opened(Kafka(kafka_bootstrap, group=group, options=options), topic) as source:
        before = take(source, len(_OLD))
        source._pause()
        recreate(kafka_bootstrap, topic)
        # the commit is of the deleted topic, and the new one takes it for its own
        source.settle(before)
    with opened(Kafka(kafka_bootstrap, group=group, options=options), topic) as source:
        reads_all(source)
    assert committed(kafka_bootstrap, group, topic) == len(_NEW)


def test_it_is_read_by_whoever_comes_after_a_worker_that_read_on_and_died(
    kafka_bootstrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_client, "LOOK_S", 3600.0)
    topic, group = new_topic(kafka_bootstrap), new_group()
    produce(kafka_bootstrap, topic, _OLD)
    with opened(Kafka(kafka_bootstrap, group=group), topic) as source:
        source.settle(take(source, len(_OLD)))
        source._pause()
        recreate(kafka_bootstrap, topic)
        progress = reads(source)
        # it reads on behind what the deleted topic had, and commits that
        eventually(lambda: set(_NEW[-3:]) <= next(progress), "the end of the new topic")
    assert committed(kafka_bootstrap, group, topic) == len(_NEW)
    with opened(Kafka(kafka_bootstrap, group=group), topic) as source:
        reads_all(source)


def test_an_operators_offset_is_no_stale_commit(kafka_bootstrap: str) -> None:
    topic, group = new_topic(kafka_bootstrap), new_group()
    produce(kafka_bootstrap, topic, _OLD)
    with opened(Kafka(kafka_bootstrap, group=group), topic) as source:
        source.settle(take(source, len(_OLD)))
    recreate(kafka_bootstrap, topic)
    commit(kafka_bootstrap, group, topic, 10)
    with opened(Kafka(kafka_bootstrap, group=group), topic) as source:
        progress = reads(source)
        eventually(lambda: next(progress) == set(_NEW[10:]), "what is behind the operator's offset")
        assert next(progress) == set(_NEW[10:])
    rewind(kafka_bootstrap, group, topic)
    with opened(Kafka(kafka_bootstrap, group=group), topic) as source:
        reads_all(source)


def test_all_of_it_is_read_where_a_new_group_reads_only_what_comes(kafka_bootstrap: str) -> None:
    topic, group = new_topic(kafka_bootstrap), new_group()
    produce(kafka_bootstrap, topic, _OLD)
    commit(kafka_bootstrap, group, topic, 0)
    with opened(Kafka(kafka_bootstrap, group=group, auto_offset_reset="latest"), topic) as source:
        source.settle(take(source, len(_OLD)))
        source._pause()
        recreate(kafka_bootstrap, topic)
        reads_all(source)


def test_workers_that_are_killed_around_it_read_all_of_it_once(
    kafka_bootstrap: str, postgresql_url: str, raw: MakeRaw, tmp_path: Path
) -> None:
    """It has fewer partitions than before, and more messages in each."""
    topic, group, database = new_topic(kafka_bootstrap, 3), new_group(), raw(postgresql_url)
    create_effects(database)
    options = {"session.timeout.ms": 6000, "topic.metadata.refresh.interval.ms": 1000}
    plan = {
        "url": postgresql_url, "bootstrap": kafka_bootstrap, "group": group, "topic": topic, "options": options,
        "handle_s": 0.02,
    }  # fmt: skip
    one, two = tmp_path / "one", tmp_path / "two"
    produce(kafka_bootstrap, topic, _OLD)
    with service(plan, one) as first:
        each_once(database, _OLD)
        recreate(kafka_bootstrap, topic, 2)
        eventually(lambda: len(handled(one)) > len(_OLD) + 5, "work on the new topic")
        first.kill()
    with service(plan, two):
        each_once(database, [*_OLD, *_NEW])


# -- what the broker does not answer -------------------------------------------------------------


def test_without_an_answer_at_the_assignment_nothing_is_handed_out_until_there_is_one(
    kafka_bootstrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, group = new_topic(kafka_bootstrap), new_group()
    produce(kafka_bootstrap, topic, range(100, 104))
    ask, asked = kafka_client.TopicIds.ask, 0

    def silent(ids: kafka_client.TopicIds, topics: Any) -> dict[str, str | None]:
        nonlocal asked
        asked += 1
        # the first is before it joins
        if 1 < asked < 5:
            raise BrokerUnavailable("No answer.")
        return ask(ids, topics)

    monkeypatch.setattr(kafka_client.TopicIds, "ask", silent)
    with opened(Kafka(kafka_bootstrap, group=group), topic) as source:
        deliveries = take(source, 4)
        assert asked == 5
        assert [each.tag.offset for each in deliveries] == [0, 1, 2, 3]
        source.settle(deliveries)
    assert committed(kafka_bootstrap, group, topic) == 4


def test_brokers_that_have_no_uuids_are_believed(
    kafka_bootstrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, group = new_topic(kafka_bootstrap), new_group()
    produce(kafka_bootstrap, topic, range(100, 104))
    with opened(Kafka(kafka_bootstrap, group=group), topic) as source:
        source.settle(take(source, 4)[:2])

    def ignorant(_: kafka_client.TopicIds, topics: Any) -> dict[str, str | None]:
        return dict.fromkeys(topics)

    monkeypatch.setattr(kafka_client.TopicIds, "ask", ignorant)
    with opened(Kafka(kafka_bootstrap, group=group), topic) as source:
        deliveries = take(source, 2)
        assert [each.tag.offset for each in deliveries] == [2, 3]
        source.settle(deliveries)
    assert committed(kafka_bootstrap, group, topic) == 4
