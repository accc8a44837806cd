"""Publishing to Kafka: the conformance suite for publishers, and what is special about Kafka."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.support.brokers.kafka import MockCluster
from tests.support.brokers.rigs.kafka import KafkaRig
from tests.support.servers.control import ThrowawayKafka, ThrowawayKafkaCluster
from tests.support.waiting import DEADLINE_S, eventually
from txbox import Message
from txbox.brokers.kafka import Kafka
from txbox.brokers.kafka.publisher import _Batch
from txbox.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    DestinationRefused,
    MessageRefused,
    NotTried,
)
from txbox.testing.brokers import (
    HOSTILE,
    TIME,
    WITHIN_S,
    PublisherConformance,
    Rig,
    arrived,
    confirmed,
    ids,
    message,
    publisher_of,
    several,
)

pytestmark = pytest.mark.brokers


class TestKafkaPublisher(PublisherConformance):
    headers = tuple(  # values are bytes
        (name, value.encode() if isinstance(value, str) else value) for name, value in HOSTILE
    )
    tombstones = True
    time = TIME.replace(microsecond=234000)

    @pytest.fixture
    def rig(self, kafka_bootstrap: str) -> Iterator[Rig]:
        with KafkaRig(kafka_bootstrap) as opened_rig:
            yield opened_rig

    @pytest.fixture
    def throwaway_rig(self, throwaway_kafka: ThrowawayKafka) -> Iterator[Rig]:
        with KafkaRig(throwaway_kafka.bootstrap, throwaway_kafka) as opened_rig:
            yield opened_rig

    def test_a_batch_that_is_too_large_is_no_message_that_is(self, rig: Rig) -> None:
        """The topic's limit applies to a batch, which the broker refuses as a whole."""
        topic = f"small-{rig.topic}"
        new_topic(rig.address, topic, {"max.message.bytes": "2000"})
        messages = [message(rig, number, topic=topic, key=str(number)) for number in range(200)]
        messages.insert(100, message(rig, "large", topic=topic, payload=b"x" * 5000))
        with publisher_of(rig) as publisher:
            answers = publisher.publish(messages, WITHIN_S)
        assert [at for at, answer in enumerate(answers) if answer is not None] == [100]
        assert isinstance(answers[100], MessageRefused)

    def test_nothing_of_a_key_is_taken_behind_what_was_not(self, rig: Rig) -> None:
        """An idempotent producer alone goes on behind a batch that was refused for good (ADR 0056)."""
        topic = f"run-{rig.topic}"
        new_topic(rig.address, topic, {"max.message.bytes": "2000"})
        run = [message(rig, number, topic=topic, key="k") for number in range(60)]
        run.insert(30, message(rig, "large", topic=topic, key="k", payload=b"x" * 5000))
        others = [message(rig, f"other-{number}", topic=topic, key="o") for number in range(5)]
        with publisher_of(rig) as publisher:
            answers = publisher.publish([*run, *others], WITHIN_S)
            assert answers[:30] == [None] * 30
            assert isinstance(answers[30], MessageRefused)
            assert all(isinstance(answer, NotTried) for answer in answers[31:61])
            # what another key had behind it goes at once, or with the next call
            assert all(answer is None or isinstance(answer, NotTried) for answer in answers[61:])
            again = [*run[31:], *others]
            assert publisher.publish(again, WITHIN_S) == [None] * len(again)
        order = [name for name in records(rig.address, topic) if not name.startswith("other")]
        firsts = list(dict.fromkeys(order))
        assert firsts == [str(entry.id) for entry in run if entry is not run[30]]

    def test_the_topic_decides_how_large_a_message_may_be(self, rig: Rig) -> None:
        """And not the client, whose own limit is lower than a topic's by default, and than what topics are set to."""
        topic = f"wide-{rig.topic}"
        new_topic(rig.address, topic, {"max.message.bytes": "5000000"})
        with publisher_of(rig) as publisher:
            large = message(rig, "large", topic=topic, payload=b"x" * 4_000_000)
            default = message(rig, "default", payload=b"x" * 1_040_000)
            confirmed(publisher, [large, default])
            (answer,) = publisher.publish(
                [message(rig, "larger", topic=topic, payload=b"x" * 6_000_000)], WITHIN_S
            )
        assert isinstance(answer, MessageRefused)

    def test_a_topic_that_is_made_later_takes_messages_then(self, rig: Rig) -> None:
        topic = f"later-{rig.topic}"
        sent = message(rig, "m1", topic=topic)
        with publisher_of(rig) as publisher:
            assert publisher.publish([sent], WITHIN_S) != [None]
            new_topic(rig.address, topic, {})
            eventually(lambda: publisher.publish([sent], WITHIN_S) == [None], "the new topic")

    def test_without_a_group_it_publishes_and_with_one_it_does_both(self, rig: Rig) -> None:
        with publisher_of(rig, linger_ms=1, acks=-1, session_timeout_ms=6000) as publisher:
            confirmed(publisher, several(rig, 10))
        alone = Kafka(rig.address).publisher()
        confirmed(alone, several(rig, 10, first=10))
        alone.close()
        assert ids(arrived(rig, 20)) == {f"m{number}" for number in range(20)}

    def test_a_producer_that_can_do_no_more_is_replaced(self, rig: Rig) -> None:
        with publisher_of(rig) as publisher:
            confirmed(publisher, [message(rig, "m1")])
            first = publisher._producer
            publisher._on_client_error(
                KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, "gone", fatal=True)
            )
            confirmed(publisher, [message(rig, "m2")])
            assert publisher._producer is not first
        assert ids(arrived(rig, 2)) == {"m1", "m2"}

    def test_a_name_that_is_no_topic_is_refused(self, rig: Rig) -> None:
        with publisher_of(rig) as publisher:
            refused, kept = publisher.publish(
                [message(rig, "m1", topic="no topic!"), message(rig, "m2")], WITHIN_S
            )
        assert isinstance(refused, MessageRefused)
        assert kept is None


def test_too_few_replicas_fail_their_message_alone(
    throwaway_kafka_cluster: ThrowawayKafkaCluster,
) -> None:
    bootstrap = throwaway_kafka_cluster.bootstrap
    for name, replicas in (("strict", "3"), ("mild", "2")):
        new_topic(bootstrap, name, {"min.insync.replicas": replicas}, copies=3)
    publisher = Kafka(bootstrap).publisher()
    strict: Message[Any] = Message(topic="strict", id="m1")
    mild: Message[Any] = Message(topic="mild", id="m2")
    confirmed(publisher, [strict, mild])
    throwaway_kafka_cluster.stop(3, immediate=True)

    def refused() -> bool:
        try:
            lost, kept = publisher.publish([strict, mild], 5)
        except BrokerUnavailable:
            # the other brokers have not noticed yet
            return False
        return type(lost) is DestinationRefused and "strict" in str(lost) and kept is None

    eventually(refused, "a topic with too few replicas")
    # also if nothing is confirmed: the other brokers still answer
    (lost,) = publisher.publish([strict], 5)
    assert type(lost) is DestinationRefused
    throwaway_kafka_cluster.start(3)
    eventually(lambda: publisher.publish([strict, mild], 5) == [None, None], "three replicas")
    publisher.close()


def records(bootstrap: str, topic: str) -> list[str]:
    """The ids in the only partition of a topic, in their order."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": topic})
    try:
        partition = TopicPartition(topic, 0, 0)
        _, end = consumer.get_watermark_offsets(partition, timeout=DEADLINE_S)
        consumer.assign([partition])
        found: list[str] = []
        while len(found) < end:
            for record in consumer.consume(end - len(found), timeout=DEADLINE_S):
                message_id = dict(record.headers() or ())["message-id"]
                assert isinstance(message_id, bytes)
                found.append(message_id.decode())
        return found
    finally:
        consumer.close()


def new_topic(bootstrap: str, topic: str, config: dict[str, str], copies: int = 1) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    made = admin.create_topics([NewTopic(topic, 1, copies, config=config)])
    made[topic].result(DEADLINE_S)


@pytest.mark.parametrize(
    "options",
    [
        {"acks": 1}, {"request_required_acks": "0"}, {"enable_idempotence": False}, {"retries": 0},
        {"transactional_id": "t"}, {"delivery_report_only_error": True}, {"queuing_strategy": "lifo"},
        {"max_in_flight": 6},
    ],
)  # fmt: skip
def test_options_with_which_a_confirmation_means_nothing_are_refused(
    options: dict[str, Any],
) -> None:
    with pytest.raises(
        ConfigurationError, match=r"acks|idempoten|txbox|transaction|order|said|confirm"
    ):
        Kafka("localhost:1", **options).publisher()


def test_each_client_gets_only_its_own_options(caplog: pytest.LogCaptureFixture) -> None:
    """The other one would log a warning for each of them."""
    caplog.set_level(logging.DEBUG, "txbox.kafka")
    both = Kafka("localhost:1", group="shop", session_timeout_ms=6000, linger_ms=1, acks="all")
    publisher = both.publisher()
    nothing: Any = None
    with suppress(BrokerUnavailable):
        publisher.publish([Message(topic="orders", id="m1")], 0.1)
    publisher.close()
    consumer = both.consumer(["orders"], nothing)
    with suppress(BrokerUnavailable):
        consumer.receive(1, 0.1)
    consumer.close()
    assert "FAIL" in caplog.text  # the clients did log
    assert "CONFWARN" not in caplog.text


def test_what_there_was_no_time_to_send_alone_is_tried_again() -> None:
    """Most messages of a refused batch are innocent: only one that is refused alone is refused for good."""
    messages: list[Message[Any]] = [Message(topic="orders", id=str(number)) for number in range(2)]
    batch = _Batch("Kafka", messages, 5)
    for at in range(2):
        batch.report(at, KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), None)
    Kafka("localhost:1").publisher()._send_alone(batch, until=0.0)
    assert [type(answer) for answer in batch.answers] == [BrokerError, BrokerError]


def test_what_was_refused_with_its_neighbours_is_suspected_once() -> None:
    """Else what is confirmed alone would be sent again when another message ends the next producer."""
    messages: list[Message[Any]] = [Message(topic="orders", id=str(number)) for number in range(2)]
    batch = _Batch("Kafka", messages, 5)
    for at in range(2):
        batch.report(at, KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), None)
    assert batch.take_suspects() == {0, 1}
    batch.report(0, None, None)
    assert batch.take_suspects() == set()
    assert batch.answers[0] is None


def test_a_producer_that_no_message_has_ended_is_trouble_of_the_broker() -> None:
    """Sent again at once, as what is behind another message, all would go round without a pause."""
    with closing(MockCluster()) as cluster:
        cluster.refuse_producers(*[KafkaError.CLUSTER_AUTHORIZATION_FAILED] * 100)
        sent = Message[Any](topic=cluster.topic(), id="m1", key="k")
        with (
            closing(Kafka(cluster.bootstrap).publisher()) as publisher,
            pytest.raises(BrokerUnavailable, match=r"ended the producer .*[Aa]uthori"),
        ):
            publisher.publish([sent], WITHIN_S)


def test_what_is_given_up_under_way_ends_the_producer_and_not_the_call() -> None:
    """Purged in flight, it leaves a gap, which the client raises where its reports are served."""
    with closing(MockCluster()) as cluster:
        topic = cluster.topic()
        sent = [Message[Any](topic=topic, id=f"m{number}", key="k") for number in range(2)]
        with closing(Kafka(cluster.bootstrap).publisher()) as publisher:
            assert publisher.publish(sent, WITHIN_S) == [None, None]
            cluster.answer_after(4000)
            with suppress(BrokerUnavailable):
                assert None not in publisher.publish(sent, 2)


def test_a_queue_that_stays_full_is_not_waited_for_beyond_the_time() -> None:
    """Each of a thousand messages would wait a little, for a minute in all."""
    polled: list[float] = []

    class Full:
        def produce(self, *_: Any, **__: Any) -> None:
            raise BufferError

        def poll(self, timeout: float) -> None:
            polled.append(timeout)

    full: Any = Full()
    Kafka("localhost:1").publisher()._send(full, ("orders", b"", None, 0, []), 0.0, print)
    assert polled == []


def test_to_consume_it_needs_a_group() -> None:
    nothing: Any = None
    with pytest.raises(ConfigurationError, match="group"):
        Kafka("localhost:1").consumer(["orders"], nothing)
