"""SQS on ElasticMQ: identity, redelivery, visibility, partial failures, crashes, a server that dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from uuid import uuid4

import boto3
import pytest
from types_boto3_sqs import SQSClient

from tests.conftest import NewDatabase
from tests.databases import Raw
from tests.runtime.support import eventually, running, worker
from tests.servers import ROOT
from tests.servers.control import ThrowawayElasticMQ, ThrowawayPostgres
from tests.shop import CONSUMER, Shop, add_effect, effects, opened, quarantined, statuses
from txbox import App, ConfigurationError, Message
from txbox.brokers.base import Delivery
from txbox.brokers.sqs import SQS
from txbox.errors import BrokerError, BrokerUnavailable
from txbox.events import ConsumptionPaused, MessageDuplicate

pytestmark = pytest.mark.brokers

ACCESS: dict[str, Any] = {
    "region_name": "elasticmq",
    "aws_access_key_id": "a",
    "aws_secret_access_key": "b",
}
NOBODY = cast("Any", None)  # SQS needs neither progress nor what is in flight


class Queue:
    """A queue of one test alone."""

    def __init__(self, url: str, *, visible_s: int = 30, fifo: bool = False, **more: str) -> None:
        self.endpoint = url
        self.client: SQSClient = boto3.client("sqs", endpoint_url=url, **ACCESS)
        self.name = f"q-{uuid4().hex}" + (".fifo" if fifo else "")
        attributes: Any = {"VisibilityTimeout": str(visible_s)} | more
        if fifo:
            attributes["FifoQueue"] = "true"
        made = self.client.create_queue(QueueName=self.name, Attributes=attributes)
        self.url = made["QueueUrl"]

    def send(self, own_id: str | None, body: str = "{}", **more: Any) -> None:
        attributes: Any = more.pop("attributes", {})
        if own_id is not None:
            attributes = {**attributes, "message-id": text(own_id)}
        self.client.send_message(
            QueueUrl=self.url, MessageBody=body, MessageAttributes=attributes, **more
        )

    def counts(self) -> tuple[int, int]:
        """(visible, in flight)"""
        found = self.client.get_queue_attributes(QueueUrl=self.url, AttributeNames=["All"])
        own = cast("dict[str, str]", found["Attributes"])
        return int(own["ApproximateNumberOfMessages"]), int(
            own["ApproximateNumberOfMessagesNotVisible"]
        )

    def source(self, **more: Any) -> SQS:
        return SQS(self.name, endpoint_url=self.endpoint, **ACCESS, **more)


def text(value: str) -> dict[str, str]:
    return {"DataType": "String", "StringValue": value}


class Open:
    """A source without a worker."""

    def __init__(self, source: SQS, topics: Sequence[str] = ()) -> None:
        self.source = source
        source.open(topics, NOBODY, NOBODY)

    def receive(self, count: int) -> list[Delivery]:
        found: list[Delivery] = []
        deadline = time.monotonic() + 10
        while len(found) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} came"
            found += self.source.receive(count - len(found), 0.5)
        return found


@pytest.fixture
def queue(sqs_url: str) -> Queue:
    return Queue(sqs_url)


@pytest.fixture
def lite(sqlite_url: str) -> Iterator[Shop]:
    with opened(sqlite_url) as own:
        yield own


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
    queue.send(
        "m-1", "gr\u00fc\u00df dich", MessageGroupId="account-7", MessageDeduplicationId="d-1",
        attributes={
            "type": text("order.paid"),
            "content-type": text("text/plain"),
            "cents": {"DataType": "Number", "StringValue": "30"},
            "odd": {"DataType": "Binary.png", "BinaryValue": b"\xff\x00\xfe"},
        },
    )  # fmt: skip
    opened_ = Open(queue.source())
    (delivery,) = opened_.receive(1)
    message = delivery.message
    assert message is not None
    assert (message.topic, message.key, message.type) == (queue.name, "account-7", "order.paid")
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
    opened_.source.settle([delivery])
    assert queue.counts() == (0, 0)
    opened_.source.close()


def test_a_deduplication_id_is_an_id_on_request_only(sqs_url: str) -> None:
    queue = Queue(sqs_url, fifo=True)
    queue.send(None, MessageGroupId="g", MessageDeduplicationId="d-1")
    queue.send("own", MessageGroupId="h", MessageDeduplicationId="d-2")
    opened_ = Open(queue.source(deduplication_ids=True))
    found = {own.message.key: own.message.id for own in opened_.receive(2) if own.message}
    assert found == {"g": "d-1", "h": None}
    opened_.source.close()
    hashing = Queue(sqs_url, fifo=True, ContentBasedDeduplication="true")
    with pytest.raises(ConfigurationError, match="hashes the content"):
        Open(hashing.source(deduplication_ids=True))


def test_ids_by_header_cloudevent_or_none(queue: Queue, lite: Shop) -> None:
    handler(lite, queue.name)
    lite.app.consume(queue.source())
    queue.send("m-1")
    queue.send("m-1")  # the producer sent it again: another MessageId
    queue.send(None, attributes={"ce-id": text("1"), "ce-source": text("/shop")})
    queue.send(None)
    with running(worker(lite.app)):
        eventually(lambda: queue.counts() == (0, 0) and quarantined(lite.raw))
    ids = {own for (own,) in lite.raw.rows("SELECT message_id FROM effect")}
    assert ids == {"m-1", "/shop 1"}
    assert lite.effects() == 2
    assert len(lite.emitted(MessageDuplicate)) == 1


def test_weak_ids_by_option(queue: Queue, lite: Shop) -> None:
    handler(lite, queue.name, weak_ids=True)
    lite.app.consume(queue.source())
    queue.send(None)
    queue.send(None)
    with running(worker(lite.app)):
        eventually(lambda: lite.effects() == 2)
    ids = [own for (own,) in lite.raw.rows("SELECT message_id FROM txbox_inbox")]
    assert all(own.startswith("weak:arn:aws:sqs:") for own in ids)


# -- receiving, keeping, deleting -----------------------------------------------------------------


def test_batches_bounds_and_several_queues(sqs_url: str) -> None:
    busy, calm = Queue(sqs_url, visible_s=600), Queue(sqs_url, visible_s=600)
    for number in range(25):
        busy.send(f"b-{number}")
    calm.send("c-0")
    source = SQS(busy.name, calm.url, endpoint_url=sqs_url, **ACCESS)
    assert source.topics == (busy.name, calm.name)
    assert source.tend_every_s is None
    source.open((), NOBODY, NOBODY)
    assert source.redelivery_s == 600.0
    topics = [own.topic for own in source.receive(3, 0.0)]
    assert len(topics) <= 3
    for _ in range(2):
        topics += [own.topic for own in source.receive(20, 0.5)]
    assert calm.name in topics, "a busy queue does not starve a calm one"
    deadline = time.monotonic() + 10
    while len(topics) < 26 and time.monotonic() < deadline:
        topics += [own.topic for own in source.receive(100, 0.5)]
    assert (busy.counts(), calm.counts()) == ((0, 25), (0, 1))
    source.close()
    # given back at once, not after ten minutes
    eventually(lambda: busy.counts() == (25, 0) and calm.counts() == (1, 0))


def test_an_empty_queue_is_not_asked_all_the_time(queue: Queue) -> None:
    opened_ = Open(queue.source())
    calls: list[str] = []
    opened_.source._client.meta.events.register(
        "before-call.sqs.ReceiveMessage", lambda **_: calls.append("")
    )
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        opened_.source.receive(10, 0.0)
    assert 1 <= len(calls) <= 5
    opened_.source.close()


def test_tending_keeps_what_is_in_flight(sqs_url: str) -> None:
    queue = Queue(sqs_url, visible_s=2)
    queue.send("m-1")
    mine, other = Open(queue.source()), Open(queue.source())
    (delivery,) = mine.receive(1)
    until = time.monotonic() + 4
    while time.monotonic() < until:
        mine.source.tend([delivery])
        assert other.source.receive(10, 0.5) == []
    mine.source.settle([delivery])
    assert queue.counts() == (0, 0)


def test_what_became_visible_again_is_deleted_by_its_newest_handle(sqs_url: str) -> None:
    queue = Queue(sqs_url, visible_s=1, fifo=True)
    queue.send("m-1", MessageGroupId="g", MessageDeduplicationId="d")
    opened_ = Open(queue.source())
    (delivery,) = opened_.receive(1)
    first = delivery.tag.handle

    def received_again() -> bool:
        assert list(opened_.source.receive(10, 0.5)) == [], "it is still being worked on"
        return bool(delivery.tag.handle != first)

    eventually(received_again)
    opened_.source.settle([delivery])
    assert queue.counts() == (0, 0)


def test_redelivered_is_told(sqs_url: str) -> None:
    queue = Queue(sqs_url)
    queue.send("m-1")
    first = Open(queue.source())
    first.receive(1)
    first.source.close()
    (again,) = Open(queue.source()).receive(1)
    assert again.redelivered


def test_partial_failures_are_retried_once_then_left(queue: Queue) -> None:
    for number in range(12):
        queue.send(f"m-{number}")
    opened_ = Open(queue.source())
    deliveries = opened_.receive(12)
    good = deliveries[3].tag.handle
    deliveries[3].tag.handle = "never a handle"
    deletes: list[int] = []
    opened_.source._client.meta.events.register(
        "provide-client-params.sqs.DeleteMessageBatch",
        lambda params, **_: deletes.append(len(params["Entries"])),
    )
    with pytest.raises(BrokerError, match="1 of 12"):
        opened_.source.settle(deliveries)
    assert deletes == [10, 2, 1]
    assert queue.counts() == (0, 1)
    # a handle that is gone is not extended for ever
    deliveries[3].tag.handle = "never a handle"
    opened_.source.tend(deliveries[3:4])
    assert deliveries[3].tag.gone
    deliveries[3].tag.handle = good
    opened_.source.settle(deliveries[3:4])
    assert queue.counts() == (0, 0)


def test_nothing_is_extended_beyond_twelve_hours(queue: Queue) -> None:
    queue.send("m-1")
    opened_ = Open(queue.source(visibility=timedelta(hours=12)))
    (delivery,) = opened_.receive(1)
    asked: list[int] = []
    opened_.source._client.meta.events.register(
        "provide-client-params.sqs.ChangeMessageVisibilityBatch",
        lambda params, **_: asked.append(params["Entries"][0]["VisibilityTimeout"]),
    )
    for hours, gone in ((4, False), (11.5, False), (12, True)):
        delivery.tag.received_at = time.monotonic() - hours * 3600
        opened_.source.tend([delivery])
        assert delivery.tag.gone is gone
    assert [round(own, -1) for own in asked] == [8 * 3600, 1800]
    opened_.source.settle([delivery])


def test_what_came_before_a_failure_is_handed_out(
    sqs_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Queue(sqs_url), Queue(sqs_url)
    for own in (first, second):
        own.send("m-1")
    opened_ = Open(SQS(first.name, second.name, endpoint_url=sqs_url, **ACCESS))
    receive_from, calls = opened_.source._receive_from, 0

    def failing(*given: Any) -> list[Delivery]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise BrokerUnavailable("away")
        return receive_from(*given)

    monkeypatch.setattr(opened_.source, "_receive_from", failing)
    found = [*opened_.source.receive(10, 0.0)]
    assert len(found) == 1, "it would be held back as in flight, and nobody would work on it"
    found += opened_.receive(1)
    assert {own.topic for own in found} == {first.name, second.name}
    opened_.source.settle(found)


def test_a_body_that_is_no_text_is_a_problem(queue: Queue) -> None:
    opened_ = Open(queue.source())
    own = {"MessageId": "m", "ReceiptHandle": "r", "Body": "\ud800 lone", "Attributes": {}}
    delivery = opened_.source._delivery(opened_.source._queues[0], own)
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


def test_what_is_missing_is_said(sqs_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"endpoint_url": sqs_url, **ACCESS}
    with pytest.raises(ConfigurationError, match=r"'never-made'.*QueueDoesNotExist|NonExistent"):
        Open(SQS("never-made", **options))
    with pytest.raises(ConfigurationError, match="name them"):
        Open(SQS(**options), ["*"])
    with pytest.raises(ConfigurationError, match="name each"):
        SQS("*", **options)
    with pytest.raises(ConfigurationError, match="boto3 makes no SQS client"):
        Open(SQS("orders", no_such_option=1))
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    with pytest.raises(ConfigurationError, match="no credentials"):
        Open(SQS("orders", endpoint_url=sqs_url, region_name="x"))
    with pytest.raises(ConfigurationError, match="region"):
        Open(SQS("orders"))


def test_an_unreachable_server_is_waited_for() -> None:
    source = SQS("orders", endpoint_url="http://127.0.0.1:9", **ACCESS)
    source.open((), NOBODY, NOBODY)
    assert source.tend_every_s is None
    with pytest.raises(BrokerUnavailable):
        source.receive(10, 0.0)
    source.close()


# -- with a worker --------------------------------------------------------------------------------


def test_a_handler_slower_than_the_visibility_runs_once(sqs_url: str, lite: Shop) -> None:
    queue = Queue(sqs_url, visible_s=1)
    handler(lite, queue.name, lambda _: time.sleep(2.5))
    lite.app.consume(queue.source())
    queue.send("slow")
    queue.send("behind")  # waits in the lane, invisible as well
    with running(worker(lite.app)):
        eventually(lambda: lite.effects() == 2 and queue.counts() == (0, 0))
    assert sorted(lite.calls) == ["behind", "slow"]
    assert lite.emitted(MessageDuplicate) == []


def test_groups_keep_their_order(sqs_url: str, lite: Shop) -> None:
    queue = Queue(sqs_url, fifo=True)
    handler(lite, queue.name, concurrency=4)
    lite.app.consume(queue.source())
    for number in range(20):
        group = f"g{number % 3}"
        queue.send(f"{group}-{number:02}", MessageGroupId=group, MessageDeduplicationId=str(number))
    with running(worker(lite.app)):
        eventually(lambda: lite.effects() == 20)
    for group in ("g0", "g1", "g2"):
        own = [call for call in lite.calls if call.startswith(group)]
        assert own == sorted(own)


def test_a_drain_gives_the_rest_back(sqs_url: str, lite: Shop) -> None:
    queue = Queue(sqs_url, visible_s=600)
    entered, go = threading.Event(), threading.Event()

    def hold(_: Message[Any]) -> None:
        entered.set()
        assert go.wait(20)

    handler(lite, queue.name, hold)
    lite.app.consume(queue.source())
    for number in range(5):
        queue.send(f"m-{number}")
    own = worker(lite.app)
    with running(own):
        assert entered.wait(20)
        own.stop()
        go.set()
    done = lite.effects()
    assert 1 <= done < 5
    eventually(lambda: queue.counts() == (5 - done, 0))


def test_a_database_that_is_away_costs_no_redelivery(sqs_url: str) -> None:
    queue = Queue(sqs_url, visible_s=2)
    with ThrowawayPostgres() as server:
        with App(server.url) as app:
            app.init()
        with opened(server.url) as shop:
            handler(shop, queue.name)
            shop.app.consume(queue.source())
            with running(worker(shop.app)) as codes:
                queue.send("before")
                eventually(lambda: shop.effects() == 1)
                shop.raw.close()
                server.stop(immediate=True)
                for number in range(3):
                    queue.send(f"m-{number}")
                eventually(lambda: shop.emitted(ConsumptionPaused))
                time.sleep(3)  # longer than the visibility time-out
                assert codes == []
                assert queue.counts() == (0, 3), "kept, neither deleted nor given back"
                server.start()
                eventually(lambda: queue.counts() == (0, 0))
        with Raw(server.url) as raw:
            assert effects(raw) == 4
            assert raw.rows("SELECT DISTINCT attempts FROM txbox_inbox") == [(0,)]


def test_the_server_is_killed_and_comes_back(own_sqs: ThrowawayElasticMQ, lite: Shop) -> None:
    queue = Queue(own_sqs.url, visible_s=2)
    handler(lite, queue.name)
    lite.app.consume(queue.source())
    with running(worker(lite.app)) as codes:
        queue.send("before")
        eventually(lambda: lite.effects() == 1)
        own_sqs.stop(immediate=True)
        eventually(lambda: lite.emitted(ConsumptionPaused))
        own_sqs.start()
        for number in range(20):
            queue.send(f"m-{number}")
        eventually(lambda: lite.effects() == 21 and queue.counts() == (0, 0))
        assert codes == []


@pytest.mark.parametrize(
    "kill_at",
    ["received", "after:begin", "after:handler", "before:commit", "after:commit", "before:ack",
     "after:ack"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_killed_at(
    kill_at: str, kind: str, sqs_url: str, new_database: NewDatabase, raw: Callable[[str], Raw]
) -> None:
    url = new_database(kind)
    queue = Queue(sqs_url, visible_s=2)
    with opened(url) as shop:
        for number in range(8):
            queue.send(f"m-{number}")
        plan: dict[str, Any] = {"database": url, "endpoint": sqs_url, "queue": queue.name}
        first = _service({**plan, "kill_at": kill_at, "times": 1 if "ack" in kill_at else 2})
        assert first.wait(30) == -signal.SIGKILL
        assert shop.effects() <= 8
        second = _service(plan)
        try:
            eventually(lambda: shop.effects() >= 8 and queue.counts() == (0, 0))
        finally:
            second.terminate()
            assert second.wait(30) == 0
        counts = shop.raw.rows("SELECT message_id, count(*) FROM effect GROUP BY message_id")
        assert {count for _, count in counts} == {1}
        assert len(counts) == 8
        assert statuses(shop.raw) == {"processed": 8}


def _service(plan: dict[str, Any]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.brokers.sqs_service", json.dumps(plan)], cwd=ROOT
    )


def test_the_example(sqs_url: str, sqlite_url: str, raw: Callable[[str], Raw]) -> None:
    queue = Queue(sqs_url)
    database = raw(sqlite_url)
    database.execute("CREATE TABLE booking (order_id INTEGER, amount INTEGER)")
    for own_id, body in (("o-1", '{"id": 1, "amount": 5}'), ("o-1", '{"id": 1, "amount": 5}')):
        queue.send(own_id, body, attributes={"type": text("order.paid")})
    process = subprocess.Popen(
        [sys.executable, "-m", "txbox", "run", "sqs_service:app"],
        cwd=ROOT / "examples",
        env={
            **os.environ,
            "AWS_ENDPOINT_URL_SQS": sqs_url,
            "AWS_DEFAULT_REGION": "elasticmq",
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "ORDERS_QUEUE": queue.name,
            "TXBOX_DATABASE_URL": sqlite_url,
        },
        stdout=subprocess.DEVNULL,
    )
    try:
        eventually(lambda: effects_of_example(database) and queue.counts() == (0, 0))
    finally:
        process.terminate()
        assert process.wait(30) == 0
    assert effects_of_example(database) == [(1, 5)]


def effects_of_example(database: Raw) -> list[Any]:
    return list(database.rows("SELECT order_id, amount FROM booking"))
