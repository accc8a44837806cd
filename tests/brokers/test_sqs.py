"""SQS: the conformance suite; attributes, queues, visibility, partial failures."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from botocore.awsrequest import AWSResponse

from tests.support.brokers.example_runs import booked, example
from tests.support.brokers.rigs.sqs import ACCESS, SqsRig
from tests.support.servers.control import ThrowawayElasticMQ
from tests.support.shop import CONSUMER, Shop, add_effect, opened
from tests.support.waiting import eventually
from tests.support.workers import running, worker
from txbox import ConfigurationError, Message
from txbox.brokers.base import Delivery
from txbox.brokers.sqs import SQS
from txbox.errors import BrokerError, BrokerUnavailable
from txbox.testing.brokers import Note, Pairs, Rig, SourceConformance

pytestmark = pytest.mark.brokers


class TestSqs(SourceConformance):
    @pytest.fixture
    def rig(self, sqs_url: str) -> Iterator[Rig]:
        with SqsRig(sqs_url) as rig:
            yield rig

    @pytest.fixture
    def throwaway_rig(self, throwaway_sqs: ThrowawayElasticMQ) -> Iterator[Rig]:
        with SqsRig(throwaway_sqs.url, throwaway_sqs) as rig:
            yield rig


NOBODY = cast("Any", None)  # SQS needs neither progress nor what is in flight


class Queue(SqsRig):
    """A queue for a single test, created at once."""

    def __init__(self, address: str, **options: Any) -> None:
        super().__init__(address, **options)
        self.create()

    def add(self, own_id: str | None, body: str = "{}", headers: Pairs = (), **more: Any) -> None:
        self.send(Note(own_id, body.encode(), headers), **more)


class Open:
    """A source without a worker."""

    def __init__(self, source: SQS, topics: Sequence[str] = ()) -> None:
        self.source = source.consumer(topics, NOBODY)

    def receive(self, count: int) -> list[Delivery]:
        found: list[Delivery] = []

        def enough() -> bool:
            found.extend(self.source.receive(count - len(found), 0.5))
            return len(found) >= count

        eventually(enough, f"{count} deliveries")
        return found


@pytest.fixture
def queue(sqs_url: str) -> Queue:
    return Queue(sqs_url)


@pytest.fixture
def lite(sqlite_url: str) -> Iterator[Shop]:
    with opened(sqlite_url) as shop:
        yield shop


def handler(
    shop: Shop, topic: str, body: Callable[[Message[Any]], object] = id, **more: Any
) -> None:
    @shop.app.handler(topic, consumer=CONSUMER, **more)
    def handle(message: Message[Any], tx: Any) -> None:
        shop.calls.append(str(message.headers.text("message-id")))
        add_effect(tx, message.id)
        body(message)


# -- what a message looks like --------------------------------------------------------------------


def test_a_message_with_everything(sqs_url: str) -> None:
    queue = Queue(sqs_url, fifo=True)
    before = datetime.now(UTC) - timedelta(seconds=5)
    queue.add(
        "m-1", "gr\u00fc\u00df dich", MessageGroupId="account-7", MessageDeduplicationId="d-1",
        headers=(("type", "order.paid"), ("content-type", "text/plain")),
        attributes={
            "cents": {"DataType": "Number", "StringValue": "30"},
            "odd": {"DataType": "Binary.png", "BinaryValue": b"\xff\x00\xfe"},
        },
    )  # fmt: skip
    opened_source = Open(queue.source())
    (delivery,) = opened_source.receive(1)
    message = delivery.message
    assert message is not None
    assert (message.topic, message.key, message.type) == (queue.topic, "account-7", "order.paid")
    assert message.payload == "gr\u00fc\u00df dich".encode()
    assert message.content_type == "text/plain"
    assert message.id is None, "neither MessageId nor the deduplication id is used silently"
    assert message.headers.get("message-id") == "m-1"
    assert message.headers.get("odd") == b"\xff\x00\xfe"
    assert message.headers.get("cents") == "30"
    assert message.time is not None
    assert before < message.time < datetime.now(UTC) + timedelta(seconds=5)
    assert message.origin["deduplication_id"] == "d-1"
    assert message.origin["weak_id"].startswith("arn:aws:sqs:")
    assert not delivery.redelivered
    opened_source.source.settle([delivery])
    assert queue.counts() == (0, 0)
    opened_source.source.close()


def test_a_deduplication_id_is_an_id_on_request_only(sqs_url: str) -> None:
    queue = Queue(sqs_url, fifo=True)
    queue.add(None, MessageGroupId="g", MessageDeduplicationId="d-1")
    queue.add("own", MessageGroupId="h", MessageDeduplicationId="d-2")
    opened_source = Open(queue.source(deduplication_ids=True))
    found = {
        delivery.message.key: delivery.message.id
        for delivery in opened_source.receive(2)
        if delivery.message
    }
    assert found == {"g": "d-1", "h": None}
    opened_source.source.close()
    hashing = Queue(sqs_url, fifo=True, ContentBasedDeduplication="true")
    with pytest.raises(ConfigurationError, match="hashes the content"):
        Open(hashing.source(deduplication_ids=True))


# -- receiving, keeping, deleting -----------------------------------------------------------------


def test_batches_bounds_and_several_queues(sqs_url: str) -> None:
    busy, calm = Queue(sqs_url, visible_s=600), Queue(sqs_url, visible_s=600)
    for number in range(25):
        busy.add(f"b-{number}")
    calm.add("c-0")
    both = SQS(busy.topic, calm.url, endpoint_url=sqs_url, **ACCESS)
    assert both.topics == (busy.topic, calm.topic)
    assert both.tend_every_s is None
    source = both.consumer((), NOBODY)
    assert source.redelivery_s == 600.0
    topics = [each.topic for each in source.receive(3, 0.0)]
    assert len(topics) <= 3
    for _ in range(2):
        topics += [each.topic for each in source.receive(20, 0.5)]
    assert calm.topic in topics, "a busy queue does not starve a calm one"

    def all_came() -> bool:
        topics.extend(each.topic for each in source.receive(100, 0.5))
        return len(topics) >= 26

    eventually(all_came, "the rest")
    assert (busy.counts(), calm.counts()) == ((0, 25), (0, 1))
    source.close()
    # given back at once, not after ten minutes
    eventually(lambda: busy.counts() == (25, 0) and calm.counts() == (1, 0))


def test_an_empty_queue_is_not_asked_all_the_time(queue: Queue) -> None:
    opened_source = Open(queue.source())
    calls: list[str] = []
    opened_source.source._client.meta.events.register(
        "before-call.sqs.ReceiveMessage", lambda **_: calls.append("")
    )
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        opened_source.source.receive(10, 0.0)
    assert 1 <= len(calls) <= 5
    opened_source.source.close()


def test_what_became_visible_again_is_deleted_by_its_newest_handle(sqs_url: str) -> None:
    queue = Queue(sqs_url, visible_s=1, fifo=True)
    queue.add("m-1", MessageGroupId="g", MessageDeduplicationId="d")
    opened_source = Open(queue.source())
    (delivery,) = opened_source.receive(1)
    first = delivery.tag.handle

    def received_again() -> bool:
        assert list(opened_source.source.receive(10, 0.5)) == [], "it is still being worked on"
        return bool(delivery.tag.handle != first)

    eventually(received_again)
    opened_source.source.settle([delivery])
    assert queue.counts() == (0, 0)


def test_partial_failures_are_retried_once_then_left(queue: Queue) -> None:
    for number in range(12):
        queue.add(f"m-{number}")
    opened_source = Open(queue.source())
    deliveries = opened_source.receive(12)
    good = deliveries[3].tag.handle
    deliveries[3].tag.handle = "never a handle"
    deletes: list[int] = []
    opened_source.source._client.meta.events.register(
        "provide-client-params.sqs.DeleteMessageBatch",
        lambda params, **_: deletes.append(len(params["Entries"])),
    )
    with pytest.raises(BrokerError, match="1 of 12"):
        opened_source.source.settle(deliveries)
    assert deletes == [10, 2, 1]
    assert queue.counts() == (0, 1)
    # a handle that is gone is not extended for ever
    deliveries[3].tag.handle = "never a handle"
    opened_source.source.tend(deliveries[3:4])
    assert deliveries[3].tag.gone
    deliveries[3].tag.handle = good
    opened_source.source.settle(deliveries[3:4])
    assert queue.counts() == (0, 0)


def test_nothing_is_extended_beyond_twelve_hours(queue: Queue) -> None:
    queue.add("m-1")
    opened_source = Open(queue.source(visibility=timedelta(hours=12)))
    (delivery,) = opened_source.receive(1)
    asked: list[int] = []
    opened_source.source._client.meta.events.register(
        "provide-client-params.sqs.ChangeMessageVisibilityBatch",
        lambda params, **_: asked.append(params["Entries"][0]["VisibilityTimeout"]),
    )
    for hours, gone in ((4, False), (11.5, False), (12, True)):
        delivery.tag.received_at = time.monotonic() - hours * 3600
        opened_source.source.tend([delivery])
        assert delivery.tag.gone is gone
    assert [round(each, -1) for each in asked] == [8 * 3600, 1800]
    opened_source.source.settle([delivery])


def test_what_came_before_a_failure_is_handed_out(
    sqs_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Queue(sqs_url), Queue(sqs_url)
    for each in (first, second):
        each.add("m-1")
    opened_source = Open(SQS(first.topic, second.topic, endpoint_url=sqs_url, **ACCESS))
    receive_from, calls = opened_source.source._receive_from, 0

    def failing(*given: Any) -> list[Delivery]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise BrokerUnavailable("away")
        return receive_from(*given)

    monkeypatch.setattr(opened_source.source, "_receive_from", failing)
    found = [*opened_source.source.receive(10, 0.0)]
    assert len(found) == 1, "it would be held back as in flight, and nobody would work on it"
    found += opened_source.receive(1)
    assert {row.topic for row in found} == {first.topic, second.topic}
    opened_source.source.settle(found)


def test_a_body_that_is_no_text_is_a_problem(queue: Queue) -> None:
    opened_source = Open(queue.source())
    made = {"MessageId": "m", "ReceiptHandle": "r", "Body": "\ud800 lone", "Attributes": {}}
    delivery = opened_source.source._delivery(opened_source.source._queues[0], made)
    assert delivery is not None
    assert delivery.message is None
    assert delivery.problem is not None
    assert delivery.raw.endswith(b" lone")


# -- what can never work, and what a wait cures ---------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"visibility": timedelta(0)}, {"visibility": timedelta(hours=13)},
        {"wait": timedelta(seconds=21)}, {"wait": timedelta(0)}, {"client": object()},
    ],
    ids="-".join,
)  # fmt: skip
def test_options_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        SQS("orders", region_name="x", **wrong)


@pytest.mark.parametrize("named", [True, False])
def test_what_is_received_is_what_its_consumer_was_asked_for(sqs_url: str, named: bool) -> None:
    first, second = Queue(sqs_url), Queue(sqs_url)
    first.add("m1")
    second.add("m2")
    queues = (first.topic, second.topic) if named else ()
    source = SQS(*queues, endpoint_url=sqs_url, **ACCESS)
    for queue, wanted in ((first, "m1"), (second, "m2")):
        consumer = Open(source, [queue.topic])
        (delivery,) = consumer.receive(1)
        assert delivery.topic == queue.topic
        assert delivery.message is not None
        assert delivery.message.headers.get("message-id") == wanted
        assert not consumer.source.receive(1, 0.0), "nothing of the other"
        consumer.source.close()


def test_what_is_missing_is_said(sqs_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"endpoint_url": sqs_url, **ACCESS}
    with pytest.raises(ConfigurationError, match=r"'never-made'.*QueueDoesNotExist|NonExistent"):
        Open(SQS("never-made", **options))
    with pytest.raises(ConfigurationError, match="name them"):
        Open(SQS(**options), ["*"])
    with pytest.raises(ConfigurationError, match="list each"):
        SQS("*", **options)
    with pytest.raises(ConfigurationError, match="boto3 cannot create an SQS client"):
        Open(SQS("orders", no_such_option=1))
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    with pytest.raises(ConfigurationError, match="AWS variables"):
        Open(SQS("orders", endpoint_url=sqs_url, region_name="x"))
    with pytest.raises(ConfigurationError, match="region"):
        Open(SQS("orders"))


def test_an_unreachable_server_is_waited_for() -> None:
    source = SQS("orders", endpoint_url="http://127.0.0.1:9", **ACCESS).consumer((), NOBODY)
    assert source.tend_every_s is None
    with pytest.raises(BrokerUnavailable):
        source.receive(10, 0.0)
    source.close()


def test_a_queue_that_was_there_is_waited_for(queue: Queue) -> None:
    """A server that comes back, or a queue that is recreated, is not a wrong configuration."""
    source = Open(queue.source())
    queue.remove()
    with pytest.raises(BrokerUnavailable, match=r"NonExistentQueue|QueueDoesNotExist"):
        source.source.receive(10, 0.5)
    queue.create()
    queue.add("m-1")
    (delivery,) = source.receive(1)
    source.source.settle([delivery])
    source.source.close()
    assert queue.outstanding() == 0


def test_a_queue_that_is_gone_keeps_no_other_from_being_served(sqs_url: str) -> None:
    gone, there = Queue(sqs_url), Queue(sqs_url, visible_s=2)
    for each in (gone, there):
        each.add("m-1")
    source = Open(SQS(gone.topic, there.topic, endpoint_url=sqs_url, **ACCESS))
    found = sorted(source.receive(2), key=lambda delivery: delivery.topic != gone.topic)
    gone.remove()
    extended: list[str] = []
    source.source._client.meta.events.register(
        "provide-client-params.sqs.ChangeMessageVisibilityBatch",
        lambda params, **_: extended.append(params["QueueUrl"].rpartition("/")[2]),
    )
    with pytest.raises(BrokerUnavailable):
        source.source.tend(found)
    assert extended == [gone.topic, there.topic]
    with pytest.raises(BrokerUnavailable) as caught:
        source.source.settle(found)
    assert caught.value.failed == 1
    assert there.counts() == (0, 0)
    source.source.close()


def test_a_permission_that_is_taken_away_is_waited_for(queue: Queue) -> None:
    """It could be used before, so it is not the configuration."""
    source = Open(queue.source())

    no_headers: Any = {}

    def denied(**_: Any) -> tuple[AWSResponse, dict[str, Any]]:
        answer = {"Error": {"Code": "AccessDenied"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
        return AWSResponse("http://sqs/", 403, no_headers, None), answer

    events = source.source._client.meta.events
    events.register("before-call.sqs.ReceiveMessage", denied)
    with pytest.raises(BrokerUnavailable, match="AccessDenied"):
        source.source.receive(10, 0.5)
    events.unregister("before-call.sqs.ReceiveMessage", denied)
    queue.add("m-1")
    (delivery,) = source.receive(1)
    source.source.settle([delivery])
    source.source.close()


# -- with a worker --------------------------------------------------------------------------------


def test_groups_keep_their_order(sqs_url: str, lite: Shop) -> None:
    queue = Queue(sqs_url, fifo=True)
    handler(lite, queue.topic, concurrency=4)
    lite.app.consume(queue.source())
    for number in range(20):
        group = f"g{number % 3}"
        queue.add(f"{group}-{number:02}", MessageGroupId=group, MessageDeduplicationId=str(number))
    with running(worker(lite.app)):
        eventually(lambda: lite.effects() == 20)
    for group in ("g0", "g1", "g2"):
        messages = [call for call in lite.calls if call.startswith(group)]
        assert messages == sorted(messages)


def test_the_example(sqs_url: str, postgresql_url: str) -> None:
    queue = Queue(sqs_url)
    for body in ('{"id": 1, "amount": 5}',) * 2:
        queue.add("o-1", body, headers=(("type", "order.paid"),))
    with example(
        "sqs_service:app",
        postgresql_url,
        AWS_ENDPOINT_URL_SQS=sqs_url,
        AWS_DEFAULT_REGION="elasticmq",
        AWS_ACCESS_KEY_ID="any",
        AWS_SECRET_ACCESS_KEY="any",
        ORDERS_QUEUE=queue.topic,
    ):
        eventually(lambda: booked(postgresql_url) and queue.counts() == (0, 0))
    assert booked(postgresql_url) == [(1, 5)]
