"""FastStream's traps, one test each: what would lose a message, run it twice, or answer for one that did not run."""

from __future__ import annotations

import asyncio
import json
import secrets
import sqlite3
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
from aiokafka import ConsumerRecord
from confluent_kafka import Producer
from faststream import AckPolicy, BaseMiddleware, Context, ExceptionMiddleware, StreamMessage
from faststream.confluent import KafkaBroker as ConfluentBroker
from faststream.confluent.message import KafkaMessage as ConfluentMessage
from faststream.exceptions import RejectMessage
from faststream.kafka import KafkaBroker, TestKafkaBroker
from faststream.kafka.annotations import KafkaMessage
from faststream.kafka.message import KafkaAckableMessage
from faststream.message import AckStatus
from faststream.nats import NatsBroker
from faststream.rabbit import QueueType, RabbitBroker, RabbitMessage, RabbitQueue, TestRabbitBroker
from faststream.redis import RedisBroker, StreamSub
from nats.js.api import AckPolicy as NatsAck
from nats.js.api import ConsumerConfig, DeliverPolicy

from tests.support.brokers.kafka import committed, lag, new_group, new_topic
from tests.support.brokers.rabbitmq import declare, left, on_server, publish_plain
from tests.support.waiting import DEADLINE_S, eventually
from txbox import App, ConfigurationError, Message, Outcome, StoreUnavailable
from txbox.brokers.rabbitmq import RabbitMQ
from txbox.events import ConsumptionPaused, Event, MessageInFlight
from txbox.integrations.faststream import TX, FastStreamInbox
from txbox.policy import Limits
from txbox.testing import drain_async

Tx = Annotated[Any, Context(TX)]
Rows = Callable[[str], list[Any]]
STATUSES = "SELECT message_id, status FROM txbox_inbox ORDER BY message_id"
SAFE = AckPolicy.NACK_ON_ERROR


@pytest.fixture
def app(tmp_path: Path) -> App:
    made = App(f"sqlite:///{tmp_path / 'shop.db'}")
    made.init()
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        database.execute("CREATE TABLE ledger (amount INTEGER)")
    return made


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    def query(sql: str) -> list[Any]:
        with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
            return database.execute(sql).fetchall()

    return query


@dataclass
class Service:
    """A broker with the inbox as its middleware."""

    app: App
    broker: Any
    inbox: FastStreamInbox
    failures: list[BaseException] = field(default_factory=list)
    book: Any = None

    def ledger(self, subscription: Any, **options: Any) -> Service:
        """Add a subscriber that writes, and then fails as often as told."""

        @self.inbox.handler("payments", consumer="ledger", **options)
        @subscription
        async def book(payment: dict[str, int], tx: Tx) -> str:
            await tx.execute("INSERT INTO ledger VALUES (?)", (payment["amount"],))
            if self.failures:
                raise self.failures.pop()
            return "booked"

        self.book = book
        return self


def rabbit(app: App, url: str = "amqp://nowhere/") -> Service:
    inbox = FastStreamInbox(app)
    return Service(app, RabbitBroker(url, middlewares=[inbox]), inbox)


def kafka(app: App) -> Service:
    inbox = FastStreamInbox(app)
    return Service(app, KafkaBroker(middlewares=[inbox]), inbox)


def rabbit_ledger(app: App, **options: Any) -> Service:
    service = rabbit(app)
    return service.ledger(service.broker.subscriber("payments", ack_policy=SAFE), **options)


def delivered(ledger: Service, *ids: str, **fields: Any) -> list[Outcome]:
    """Publish one message a id; then let the table retry what is due at any date."""

    async def run() -> list[Outcome]:
        async with TestRabbitBroker(ledger.broker) as broker:
            for number in ids:
                await broker.publish({"amount": 5}, "payments", message_id=number, **fields)
        try:
            return await drain_async(ledger.app, ignore_dates=True)
        finally:
            await ledger.app.close_async()

    return asyncio.run(run())


def record(
    offset: int, headers: list[tuple[str, Any]], *, partition: int = 0, value: bytes | None = b"{}"
) -> ConsumerRecord:
    return ConsumerRecord(
        topic="payments", partition=partition, offset=offset, timestamp=1, timestamp_type=0,
        key=b"k", value=value, checksum=None, serialized_key_size=1,
        serialized_value_size=0, headers=headers,
    )  # fmt: skip


def received(broker: KafkaBroker, app: App, *records: ConsumerRecord) -> list[Exception]:
    """Give records to the broker's one subscriber, as its consumer does; returns what it swallows there."""

    async def run() -> list[Exception]:
        raised: list[Exception] = []
        async with TestKafkaBroker(broker):
            (subscriber,) = broker.subscribers
            for each in records:
                try:
                    await subscriber.process_message(each)
                except Exception as error:  # noqa: BLE001  # whatever FastStream lets through
                    raised.append(error)
        await app.close_async()
        return raised

    return asyncio.run(run())


# -- what it does -----------------------------------------------------------------------------


def test_a_redelivery_runs_nothing(app: App, rows: Rows) -> None:
    delivered(rabbit_ledger(app), "p-1", "p-1", "p-2")
    assert rows(STATUSES) == [("p-1", "processed"), ("p-2", "processed")]
    assert rows("SELECT count(*) FROM ledger") == [(2,)]


def test_a_failure_is_rolled_back_and_retried_from_the_table(app: App, rows: Rows) -> None:
    ledger = rabbit_ledger(app)
    ledger.failures = [ValueError("first"), ValueError("second")]
    assert delivered(ledger, "p-1") == [Outcome.FAILED, Outcome.PROCESSED]
    assert rows("SELECT amount FROM ledger") == [(5,)]


def test_a_retry_has_headers_that_are_not_text(app: App) -> None:
    """RabbitMQ has headers of bytes; what FastStream is given for a retry is text."""
    ledger = rabbit_ledger(app)
    ledger.failures = [ValueError("first")]
    headers = {"trace": b"\xff\x00", "text": "é"}
    assert delivered(ledger, "p-1", headers=headers) == [Outcome.PROCESSED]


def test_a_worker_whose_broker_was_never_started_retries(
    app: App, rows: Rows, tmp_path: Path
) -> None:
    ledger = rabbit_ledger(app)
    ledger.failures = [ValueError("first")]

    async def delivered_once() -> None:
        async with TestRabbitBroker(ledger.broker) as broker:
            await broker.publish({"amount": 5}, "payments", message_id="p-1")
        await app.close_async()

    asyncio.run(delivered_once())
    assert rows(STATUSES) == [("p-1", "failed")]
    elsewhere = rabbit_ledger(App(f"sqlite:///{tmp_path / 'shop.db'}")).app  # as `txbox run` has it

    async def retried() -> list[Outcome]:
        async with elsewhere:
            return await drain_async(elsewhere, ignore_dates=True)

    assert asyncio.run(retried()) == [Outcome.PROCESSED]
    assert rows("SELECT amount FROM ledger") == [(5,)]


def test_what_cannot_be_decoded_is_dead_at_once(app: App, rows: Rows) -> None:
    ledger = rabbit_ledger(app)

    async def run() -> None:
        async with TestRabbitBroker(ledger.broker) as broker:
            await broker.publish(
                b"{no", "payments", message_id="p-1", content_type="application/json"
            )
        await app.close_async()

    asyncio.run(run())
    assert rows("SELECT status, attempts FROM txbox_inbox") == [("dead", 1)]


def test_reject_message_is_a_dead_letter(app: App, rows: Rows) -> None:
    ledger = rabbit_ledger(app)
    ledger.failures = [RejectMessage()]
    delivered(ledger, "p-1")
    assert rows(STATUSES) == [("p-1", "dead")]
    assert rows("SELECT count(*) FROM ledger") == [(0,)]


class Seen(BaseMiddleware[Any, Any]):
    """Keeps the messages that it lets through."""

    messages: ClassVar[list[StreamMessage[Any]]] = []

    async def consume_scope(self, call_next: Any, msg: StreamMessage[Any]) -> Any:
        self.messages.append(msg)
        return await call_next(msg)


@pytest.mark.parametrize("publish", [False, True])
def test_a_middleware_that_handles_exceptions_does_not_have_a_message_acknowledged(
    app: App, rows: Rows, publish: bool
) -> None:
    """The database was away, and FastStream would take a handled exception for success."""
    handles = ExceptionMiddleware()
    handles.add_handler(Exception, publish=publish)(lambda: "handled")  # type: ignore[call-overload]
    inbox = FastStreamInbox(app)
    broker = RabbitBroker("amqp://nowhere/", middlewares=[handles, Seen, inbox])
    service = Service(app, broker, inbox)
    service.ledger(broker.subscriber("payments", ack_policy=SAFE))
    Seen.messages.clear()

    async def away(*_: object, **__: object) -> Outcome:
        raise StoreUnavailable("it is away")

    vars(app)["process_async"] = away
    delivered(service, "p-1")
    assert [each.committed for each in Seen.messages] == [AckStatus.NACKED]


def test_a_middleware_that_hides_the_functions_failure_is_refused(app: App, rows: Rows) -> None:
    inbox = FastStreamInbox(app)
    broker = RabbitBroker("amqp://nowhere/", middlewares=[inbox, ExceptionMiddleware()])
    with pytest.raises(ConfigurationError, match="list it before the inbox"):
        Service(app, broker, inbox).ledger(broker.subscriber("payments", ack_policy=SAFE))


def test_a_function_that_acknowledges_fails(app: App, rows: Rows) -> None:
    """That would be before the commit."""
    service = rabbit(app)

    @service.inbox.handler("payments", consumer="ledger", reject_on=(ConfigurationError,))
    @service.broker.subscriber("payments", ack_policy=SAFE)
    async def book(payment: dict[str, int], tx: Tx, message: RabbitMessage) -> None:
        await tx.execute("INSERT INTO ledger VALUES (?)", (payment["amount"],))
        await message.ack()

    delivered(service, "p-1")
    assert rows("SELECT * FROM ledger") == []
    assert rows(STATUSES) == [("p-1", "dead")]


def test_other_subscribers_of_the_broker_are_left_alone(app: App, rows: Rows) -> None:
    service = rabbit(app)
    broker = service.broker
    seen: list[Any] = []

    @broker.subscriber("plain")
    async def plain(body: dict[str, int]) -> None:
        seen.append(body)

    async def run() -> None:
        async with TestRabbitBroker(broker):
            await broker.publish({"a": 1}, "plain")
        await app.close_async()

    asyncio.run(run())
    assert seen == [{"a": 1}]
    assert rows(STATUSES) == []


# -- what it refuses --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, AckPolicy.ACK_FIRST, AckPolicy.ACK])
def test_a_policy_that_loses_messages_is_refused(app: App, policy: AckPolicy | None) -> None:
    service = rabbit(app)
    broker = service.broker
    options = {} if policy is None else {"ack_policy": policy}
    with pytest.raises(ConfigurationError, match="loses messages"):
        service.ledger(broker.subscriber("payments", **options))


def test_the_default_of_kafka_is_refused(app: App) -> None:
    service = kafka(app)
    broker = service.broker
    with pytest.raises(ConfigurationError, match="ACK_FIRST, which loses messages"):
        service.ledger(broker.subscriber("payments", group_id="shop"))


def test_kafka_without_a_group_is_refused(app: App) -> None:
    service = kafka(app)
    broker = service.broker
    with pytest.raises((ConfigurationError, Exception), match="group"):
        service.ledger(broker.subscriber("payments", ack_policy=SAFE))


def redis(app: App, url: str = "redis://nowhere/") -> Service:
    inbox = FastStreamInbox(app)
    return Service(app, RedisBroker(url, middlewares=[inbox]), inbox)


@pytest.mark.parametrize(
    ("subscription", "says"),
    [
        ({"list": "payments"}, "list or channel"), ({"channel": "payments"}, "list or channel"),
        ({"stream": "payments"}, "for a group"),
        ({"stream": StreamSub("payments", group="g", consumer="c", no_ack=True)}, "for a group"),
        ({"stream": StreamSub("payments", group="g", consumer="c")}, "who claims it"),
    ],
)  # fmt: skip
def test_what_redis_does_not_deliver_again_is_refused(
    app: App, subscription: dict[str, Any], says: str
) -> None:
    service = redis(app)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FastStream's own, of policies that do nothing
        subscribe = service.broker.subscriber(ack_policy=SAFE, **subscription)
    with pytest.raises(ConfigurationError, match=says):
        service.ledger(subscribe)


def test_one_that_reads_and_one_that_claims_are_of_one_group(app: App) -> None:
    service = redis(app)
    other = StreamSub("payments", group="other", consumer="c", min_idle_time=100)
    with pytest.raises(ConfigurationError, match="one of which claims"):
        service.ledger(stacked(service, StreamSub("payments", group="g", consumer="c"), other))
    claiming = StreamSub("payments", group="g", consumer="c", claim_min_idle_time=100)
    redis(app).ledger(service.broker.subscriber(stream=claiming, ack_policy=SAFE))


def stacked(service: Service, *streams: StreamSub) -> Any:
    def subscribe(function: Any) -> Any:
        for stream in streams:
            function = service.broker.subscriber(stream=stream, ack_policy=SAFE)(function)
        return function

    return subscribe


@pytest.mark.parametrize(
    ("subscription", "says"),
    [
        ({}, "only from a stream"), ({"kv_watch": "bucket"}, "only from a stream"),
        ({"obj_watch": True}, "only from a stream"),
        ({"stream": "s", "ordered_consumer": True}, "acknowledgements"),
        ({"stream": "s", "config": ConsumerConfig(ack_policy=NatsAck.NONE)}, "acknowledgements"),
        ({"stream": "s", "config": ConsumerConfig(max_deliver=3)}, "max_deliver=3"),
        ({"stream": "s", "deliver_policy": DeliverPolicy.NEW}, "'new'"),
    ],
)  # fmt: skip
def test_what_nats_does_not_deliver_again_is_refused(
    app: App, subscription: dict[str, Any], says: str
) -> None:
    inbox = FastStreamInbox(app)
    service = Service(app, NatsBroker(middlewares=[inbox]), inbox)
    policy = SAFE if "stream" in subscription else AckPolicy.MANUAL
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subscribe = service.broker.subscriber("payments", ack_policy=policy, **subscription)
    with pytest.raises(ConfigurationError, match=says):
        service.ledger(subscribe)
    inbox = FastStreamInbox(app)
    fine = Service(app, NatsBroker(middlewares=[inbox]), inbox)
    subscribe = partial(fine.broker.subscriber, "payments", stream="s", ack_policy=SAFE)
    fine.ledger(subscribe(queue="q", deliver_policy=DeliverPolicy.NEW))


_QUORUM = partial(RabbitQueue, "payments", QueueType.QUORUM)


@pytest.mark.parametrize(
    ("queue", "says"),
    [
        (RabbitQueue("payments", exclusive=True), "lasting"),
        (RabbitQueue("payments", auto_delete=True), "lasting"),
        (RabbitQueue("payments", QueueType.STREAM), "lasting"),
        (_QUORUM(), "nacked 20 times"),
        (_QUORUM(arguments={"x-delivery-limit": 100}), "nacked 20 times"),
        (_QUORUM(arguments={"x-delivery-limit": -1}), None),
        (_QUORUM(arguments={"x-dead-letter-exchange": "dead"}), None),
        (RabbitQueue("payments"), None),
    ],
)  # fmt: skip
def test_what_rabbitmq_gives_up_is_refused(app: App, queue: RabbitQueue, says: str | None) -> None:
    service = rabbit(app)
    subscribe = service.broker.subscriber(queue, ack_policy=SAFE)
    if says is None:
        service.ledger(subscribe)
        return
    with pytest.raises(ConfigurationError, match=says):
        service.ledger(subscribe)


def test_a_batch_is_refused(app: App) -> None:
    service = kafka(app)
    broker = service.broker
    with pytest.raises(ConfigurationError, match="not a batch"):
        service.ledger(broker.subscriber("payments", group_id="g", ack_policy=SAFE, batch=True))


def test_a_stacked_publisher_is_refused_below_the_inbox(app: App) -> None:
    service = rabbit(app)
    broker = service.broker

    def stacked(function: Any) -> Any:
        return broker.publisher("out")(broker.subscriber("payments", ack_policy=SAFE)(function))

    with pytest.raises(ConfigurationError, match="stacked publisher"):
        service.ledger(stacked)


def test_a_publisher_stacked_later_is_refused_before_the_function_runs(
    app: App, rows: Rows
) -> None:
    ledger = rabbit_ledger(app)
    ledger.broker.publisher("out")(ledger.book)
    with pytest.raises(ConfigurationError, match="stacked publisher"):
        delivered(ledger, "p-1")
    assert rows(STATUSES) == []


def test_a_plain_function_is_refused(app: App) -> None:
    with pytest.raises(ConfigurationError, match=r"on top of one @broker\.subscriber"):
        rabbit(app).ledger(lambda function: function)


# -- what FastStream would do besides ---------------------------------------------------------


def test_no_automatic_reply_is_sent(app: App) -> None:
    ledger = rabbit_ledger(app)
    replies: list[Any] = []

    @ledger.broker.subscriber("replies")
    async def reply(body: Any) -> None:
        replies.append(body)

    delivered(ledger, "p-1", "p-1", reply_to="replies")
    assert replies == []


def test_a_reply_goes_through_the_outbox_once(app: App, rows: Rows) -> None:
    app.publish(RabbitMQ("amqp://nowhere/"), ["replies"])  # no relay runs
    delivered(rabbit_ledger(app, reply_to="replies"), "p-1", "p-1")
    assert rows("SELECT topic, count(*) FROM txbox_outbox") == [("replies", 1)]


def test_two_partitions_with_one_offset_are_two_messages(app: App, rows: Rows) -> None:
    service = kafka(app)
    broker = service.broker
    service.ledger(broker.subscriber("payments", group_id="g", ack_policy=SAFE))
    payment = b'{"amount": 5}'
    received(
        broker,
        app,
        record(7, [("message-id", b"a")], partition=0, value=payment),
        record(7, [("message-id", b"b")], partition=1, value=payment),
        record(7, [], partition=0, value=payment),  # FastStream's id is not the producer's
    )
    assert rows(STATUSES) == [("a", "processed"), ("b", "processed")]
    assert len(rows("SELECT * FROM txbox_quarantine")) == 1


def test_a_header_that_kills_the_parser_is_set_aside(app: App, rows: Rows) -> None:
    service = kafka(app)
    broker = service.broker
    service.ledger(broker.subscriber("payments", group_id="g", ack_policy=SAFE))
    poison = record(1, [("trace", None)], value=b'{"amount": 5}')
    assert len(received(broker, app, poison)) == 1
    ((payload, reason),) = rows("SELECT payload, reason FROM txbox_quarantine")
    assert payload == b'{"amount": 5}'
    assert "could not parse" in reason


def test_what_cannot_be_parsed_waits_for_the_database(app: App, tmp_path: Path, rows: Rows) -> None:
    holder = sqlite3.connect(tmp_path / "shop.db", check_same_thread=False)
    holder.execute("BEGIN IMMEDIATE")

    def end_when_it_waits(event: Event) -> None:
        if isinstance(event, ConsumptionPaused):
            holder.rollback()

    waiting = App(
        f"sqlite:///{tmp_path / 'shop.db'}",
        observers=[end_when_it_waits],
        limits=Limits(lock_timeout=timedelta(seconds=0.1)),
    )
    service = kafka(waiting)
    broker = service.broker
    service.ledger(broker.subscriber("payments", group_id="g", ack_policy=SAFE))
    received(broker, waiting, record(1, [("trace", None)], value=b'{"amount": 5}'))
    holder.close()
    assert rows("SELECT payload FROM txbox_quarantine") == [(b'{"amount": 5}',)]


def test_a_tombstone_and_repeated_headers_arrive_as_they_are(app: App, rows: Rows) -> None:
    service = kafka(app)
    broker = service.broker
    seen: list[Any] = []

    def kept(message: Any) -> str:
        seen.append((message.payload, message.headers.get_all("tag"), message.key))
        return "t-1"

    @service.inbox.handler("payments", consumer="ledger", message_id=kept)
    @broker.subscriber("payments", group_id="g", ack_policy=SAFE)
    async def forget(body: Any) -> None: ...

    received(broker, app, record(1, [("tag", b"1"), ("tag", b"2")], value=None))
    assert seen[0] == (None, [b"1", b"2"], "k")
    assert rows(STATUSES) == [("t-1", "processed")]


def test_a_cancelled_handler_leaves_nothing_and_acknowledges_nothing(app: App, rows: Rows) -> None:
    service = kafka(app)
    settled: list[str] = []

    async def run() -> None:
        started = asyncio.Event()

        @service.inbox.handler("payments", consumer="ledger")
        @service.broker.subscriber("payments", group_id="g", ack_policy=SAFE)
        async def book(message: KafkaMessage, tx: Tx) -> None:
            for verb in ("ack", "nack", "reject"):
                setattr(message, verb, partial(_told, settled, verb))
            await tx.execute("INSERT INTO ledger VALUES (5)")
            started.set()
            await asyncio.Event().wait()

        async with TestKafkaBroker(service.broker):
            (subscriber,) = service.broker.subscribers
            delivery = asyncio.ensure_future(
                subscriber.process_message(record(1, [("message-id", b"p-1")]))
            )
            await started.wait()
            delivery.cancel()
            await asyncio.wait([delivery])
            assert delivery.cancelled()
        await app.close_async()

    asyncio.run(run())
    assert settled == []
    assert rows(STATUSES) == []
    assert rows("SELECT count(*) FROM ledger") == [(0,)]


async def _told(settled: list[str], verb: str) -> None:
    settled.append(verb)


# -- on a real Kafka --------------------------------------------------------------------------

CLIENTS = ("aiokafka", "confluent")
Pay = Callable[[Any, int], Awaitable[None]]


def kafka_service(client: str, app: App, bootstrap: str) -> Service:
    make = KafkaBroker if client == "aiokafka" else ConfluentBroker
    inbox = FastStreamInbox(app)
    return Service(app, make(bootstrap, middlewares=[inbox]), inbox)


def subscribed(service: Service, topic: str, group: str, pay: Pay, **more: Any) -> Service:
    subscription = service.broker.subscriber(
        topic, group_id=group, ack_policy=SAFE, auto_offset_reset="earliest", **more
    )

    @service.inbox.handler(topic, consumer="ledger")
    @subscription
    async def book(payment: dict[str, int], tx: Tx) -> None:
        await pay(tx, payment["partition"])

    return service


def serve_until(service: Service, enough: Callable[[], bool]) -> None:
    """Run a broker of FastStream until then; what a handler has in hand is cancelled."""

    async def run() -> None:
        async with service.broker:
            await service.broker.start()
            await asyncio.to_thread(eventually, enough)
        await service.app.close_async()

    asyncio.run(run())


def one_in(partition: int, bootstrap: str, topic: str) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all"})
    headers: list[Any] = [("message-id", f"p-{partition}".encode())]
    payload = json.dumps({"partition": partition}).encode()
    producer.produce(topic, payload, partition=partition, headers=headers)
    assert producer.flush(20) == 0


def one_in_each_partition(bootstrap: str, topic: str) -> None:
    for partition in (0, 1):
        one_in(partition, bootstrap, topic)


async def pay(tx: Any, partition: int) -> None:
    await tx.execute("INSERT INTO ledger VALUES (?)", (partition,))


@contextmanager
def held_elsewhere(url: str, topic: str, message_id: str) -> Iterator[None]:
    """Another process has a message's handler running, which then fails."""
    other = App(url)
    running, end = threading.Event(), threading.Event()

    @other.handler(topic, consumer="ledger")
    def hang(message: Message[bytes], tx: Any) -> None:
        running.set()
        end.wait()
        raise LookupError

    thread = threading.Thread(
        target=other.process, args=[Message(topic=topic, payload=b"{}", id=message_id)]
    )
    thread.start()
    try:
        assert running.wait(DEADLINE_S)
        yield
    finally:
        end.set()
        thread.join()
        other.close()


@pytest.mark.brokers
@pytest.mark.parametrize("client", CLIENTS)
def test_what_is_nacked_is_not_committed_with_its_neighbour(
    client: str, postgresql_url: str, kafka_bootstrap: str
) -> None:
    """FastStream nacks by seeking back, and acks by committing all that was polled: for librdkafka that is both."""
    topic, group = new_topic(kafka_bootstrap, partitions=2), new_group()
    one_in(0, kafka_bootstrap, topic)
    with closing(App(postgresql_url)) as first:
        first.init()
    refused: list[Event] = []

    def publish_the_neighbour(event: Event) -> None:
        if isinstance(event, MessageInFlight) and not refused:
            refused.append(event)
            one_in(1, kafka_bootstrap, topic)

    app = App(
        postgresql_url,
        observers=[publish_the_neighbour],
        limits=Limits(lock_timeout=timedelta(seconds=0.1)),
    )
    done: list[int] = []

    async def note(tx: Any, partition: int) -> None:
        done.append(partition)

    service = subscribed(kafka_service(client, app, kafka_bootstrap), topic, group, note)
    with held_elsewhere(postgresql_url, topic, "p-0"):
        serve_until(service, lambda: committed(kafka_bootstrap, group, topic, 1) == 1)
        assert committed(kafka_bootstrap, group, topic, 0) <= 0
    assert done == [1]


@pytest.mark.brokers
@pytest.mark.parametrize("client", CLIENTS)
def test_a_commit_of_offsets_that_fails_costs_a_duplicate(
    client: str, app: App, rows: Rows, tmp_path: Path, kafka_bootstrap: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    topic, group = new_topic(kafka_bootstrap, partitions=2), new_group()
    one_in_each_partition(kafka_bootstrap, topic)
    lost: list[object] = []

    async def lose(message: Any) -> None:
        lost.append(message)
        raise ConnectionError("the reply never came")  # FastStream logs it, and goes on

    acked = KafkaAckableMessage if client == "aiokafka" else ConfluentMessage
    with monkeypatch.context() as patched:
        patched.setattr(acked, "ack", lose)
        service = subscribed(kafka_service(client, app, kafka_bootstrap), topic, group, pay)
        serve_until(service, lambda: len(lost) == 2)
    again = App(f"sqlite:///{tmp_path / 'shop.db'}")
    service = subscribed(kafka_service(client, again, kafka_bootstrap), topic, group, pay)
    serve_until(service, lambda: lag(kafka_bootstrap, group, topic, 2) == 0)
    assert sorted(rows("SELECT amount FROM ledger")) == [(0,), (1,)]


@pytest.mark.brokers
def test_no_commit_covers_what_another_worker_still_runs(
    postgresql_url: str, kafka_bootstrap: str
) -> None:
    topic, group = new_topic(kafka_bootstrap, partitions=2), new_group()
    one_in_each_partition(kafka_bootstrap, topic)
    with closing(App(postgresql_url)) as first:
        first.init()
    begun = threading.Event()
    done: list[int] = []

    async def hang_on_the_first(tx: Any, partition: int) -> None:
        if partition == 0:
            begun.set()
            await asyncio.Event().wait()
        done.append(partition)

    async def note(tx: Any, partition: int) -> None:
        done.append(partition)

    service = kafka_service("aiokafka", App(postgresql_url), kafka_bootstrap)
    subscribed(service, topic, group, hang_on_the_first, max_workers=2)
    serve_until(
        service, lambda: begun.is_set() and committed(kafka_bootstrap, group, topic, 1) == 1
    )
    assert committed(kafka_bootstrap, group, topic, 0) <= 0
    assert done == [1]
    again = kafka_service("aiokafka", App(postgresql_url), kafka_bootstrap)
    subscribed(again, topic, group, note, max_workers=2)
    serve_until(again, lambda: lag(kafka_bootstrap, group, topic, 2) == 0)
    assert done == [1, 0]


# -- on a real RabbitMQ -----------------------------------------------------------------------


@pytest.mark.brokers
def test_what_has_no_id_is_set_aside_and_what_is_manual_is_acknowledged(
    app: App, rows: Rows, rabbitmq_url: str
) -> None:
    from pamqp.commands import Basic

    name = declare(rabbitmq_url)
    service = rabbit(app, rabbitmq_url)
    broker = service.broker
    queue = RabbitQueue(name, durable=True)
    service.ledger(broker.subscriber(queue, ack_policy=AckPolicy.MANUAL))
    nameless = Basic.Properties(content_type="application/json")
    named = Basic.Properties(content_type="application/json", message_id="p-1")
    publish_plain(
        rabbitmq_url, name, *((each, b'{"amount": 5}') for each in (nameless, named, named))
    )

    async def run() -> None:
        async with broker:
            await broker.start()
            await asyncio.to_thread(
                eventually,
                lambda: len(rows(STATUSES)) == len(rows("SELECT 1 FROM txbox_quarantine")) == 1,
            )
        await app.close_async()

    asyncio.run(run())
    assert rows(STATUSES) == [("p-1", "processed")]
    assert left(rabbitmq_url, name) == 0
    on_server(rabbitmq_url, lambda channel: channel.queue_delete(name))


# -- on a real Redis --------------------------------------------------------------------------


@pytest.mark.brokers
def test_entries_of_redis_come_again_when_the_database_was_away(
    app: App, rows: Rows, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = f"payments-{secrets.token_hex(4)}"
    service = redis(app, redis_url)
    new = StreamSub(stream, group="g", consumer="c", polling_interval=50)
    idle = StreamSub(stream, group="g", consumer="c", polling_interval=50, min_idle_time=100)
    service.ledger(stacked(service, new, idle))
    process, met = app.process_async, set[object]()

    async def away_at_first(message: Message[Any], **named: Any) -> Outcome:
        if message.headers.text("message-id") not in met:
            met.add(message.headers.text("message-id"))
            raise StoreUnavailable("it is away")
        return await process(message, **named)

    monkeypatch.setattr(app, "process_async", away_at_first)

    async def run() -> None:
        async with service.broker as broker:
            await broker.start()
            for number in range(9):
                named = {"message-id": f"p-{number}"}
                await broker.publish({"amount": number}, stream=stream, headers=named)
            await asyncio.to_thread(eventually, lambda: len(rows("SELECT amount FROM ledger")) == 9)
        await app.close_async()

    asyncio.run(run())
    assert rows(STATUSES) == [(f"p-{number}", "processed") for number in range(9)]
