"""What brokers are set to, on real ones: each misconfiguration is found under its code, and a clean topic has none."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy, StreamConfig

from tests.support.broker_fixtures import throwaway
from tests.support.brokers.rabbitmq import declare, on_server
from tests.support.brokers.rigs.nats import DURABLE, NatsRig
from tests.support.brokers.rigs.redis import RedisRig
from tests.support.brokers.rigs.sqs import ACCESS, SqsRig
from tests.support.doctor import diagnosed, findings
from tests.support.servers.control import ThrowawayRabbitMQ
from tests.support.waiting import DEADLINE_S
from txbox import App, ConfigurationError, Limits, Message, Retention
from txbox.admin.doctor import Finding
from txbox.brokers.base import Source
from txbox.brokers.kafka import Kafka
from txbox.brokers.nats import Nats
from txbox.brokers.rabbitmq import RabbitMQ
from txbox.brokers.redis import RedisStreams
from txbox.brokers.sqs import SQS

pytestmark = pytest.mark.brokers

DAY_MS = 86_400_000
DAY_S = 86_400


def _nothing(message: Message[Any], tx: Any) -> None:
    del message, tx


@pytest.fixture
def app(sqlite_url: str) -> Iterator[App]:
    with App(sqlite_url) as opened:
        yield opened


def consumed(app: App, source: Source, topic: str, **options: Any) -> dict[str, Finding]:
    """What is found of an App that consumes one topic."""
    register: Any = app.handler
    register(topic, consumer="billing", **options)(_nothing)
    app.consume(source)
    return findings(app)


# -- Kafka ------------------------------------------------------------------------------------


@pytest.fixture
def topic_with(kafka_bootstrap: str) -> Callable[..., str]:
    def make(**settings: str) -> str:
        name = f"orders-{secrets.token_hex(4)}"
        admin = AdminClient({"bootstrap.servers": kafka_bootstrap})
        config = {option.replace("_", "."): value for option, value in settings.items()}
        new_topic: Any = NewTopic
        admin.create_topics([new_topic(name, 1, 1, config=config)])[name].result(DEADLINE_S)
        return name

    return make


def test_a_clean_topic_of_kafka(app: App, kafka_bootstrap: str, topic_with: Any) -> None:
    topic = topic_with(retention_ms=str(7 * DAY_MS))
    assert consumed(app, Kafka(kafka_bootstrap, group="g"), topic) == {}
    assert diagnosed(app).unchecked == []


def test_a_topic_that_is_kept_for_longer_than_the_inbox(
    app: App, kafka_bootstrap: str, topic_with: Any
) -> None:
    """30 days and a segment of 7, against 30 days."""
    found = consumed(
        app, Kafka(kafka_bootstrap, group="g"), topic_with(retention_ms=str(30 * DAY_MS))
    )
    problem = found["retention-too-short"].problem
    assert "37d" in problem
    assert f"retention.ms={30 * DAY_MS}" in problem
    assert "days=38" in found["retention-too-short"].remedy


@pytest.mark.parametrize("settings", [{"cleanup_policy": "compact"}, {"retention_ms": "-1"}])
def test_a_topic_that_is_kept_for_ever(
    app: App, kafka_bootstrap: str, topic_with: Any, settings: dict[str, str]
) -> None:
    found = consumed(app, Kafka(kafka_bootstrap, group="g"), topic_with(**settings))
    assert set(found) == {"replay-unbounded"}


def test_a_topic_that_drops_what_nobody_reads(
    app: App, kafka_bootstrap: str, topic_with: Any
) -> None:
    found = consumed(app, Kafka(kafka_bootstrap, group="g"), topic_with(retention_ms="60000"))
    assert "60 s" in found["broker-drops"].problem


def test_a_topic_that_is_not_there(app: App, kafka_bootstrap: str) -> None:
    app.publish(Kafka(kafka_bootstrap), topics=["nowhere-out"])
    found = consumed(app, Kafka(kafka_bootstrap, group="g"), "nowhere-in")
    assert set(found) == {"topic-missing"}
    codes = [one.problem for one in diagnosed(app).findings]
    assert any("nowhere-in" in problem for problem in codes)
    assert any("nowhere-out" in problem for problem in codes)


def test_auto_commit_is_refused_before_there_is_anything_to_examine(kafka_bootstrap: str) -> None:
    with pytest.raises(ConfigurationError, match=r"enable\.auto\.commit must be off"):
        Kafka(kafka_bootstrap, group="g", enable_auto_commit=True)


# -- NATS -------------------------------------------------------------------------------------


class _Streams(NatsRig):
    def made(self, consumer: ConsumerConfig | None = None, **settings: Any) -> None:
        config = StreamConfig(name=self.stream, subjects=[f"{self.stream}.>"], **settings)

        async def make(js: Any) -> None:
            await js.add_stream(config)
            if consumer is not None:
                await js.add_consumer(self.stream, consumer)

        self.do(make)

    def create(self) -> None:
        """Each test makes the stream that it needs."""


@pytest.fixture
def stream(nats_url: str) -> Iterator[_Streams]:
    with _Streams(nats_url) as opened:
        yield opened


def test_a_clean_stream(app: App, stream: _Streams) -> None:
    stream.made(max_age=7 * DAY_S)
    assert consumed(app, stream.source(), stream.topic) == {}
    assert diagnosed(app).unchecked == []


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        ({"max_age": 60 * DAY_S}, "retention-too-short", "60d"),
        ({}, "replay-unbounded", "max_age=0"),
        ({"max_age": 600.0}, "broker-drops", "10m"),
    ],
)
def test_streams(
    app: App, stream: _Streams, settings: dict[str, Any], code: str, said: str
) -> None:
    stream.made(**settings)
    found = consumed(app, stream.source(), stream.topic)
    assert set(found) == {code}
    assert said in found[code].problem


def test_a_stream_that_forgets_what_is_acknowledged_has_no_horizon(
    app: App, stream: _Streams
) -> None:
    stream.made(retention=RetentionPolicy.WORK_QUEUE)
    assert consumed(app, stream.source(), stream.topic) == {}


@pytest.mark.parametrize(
    ("consumer", "code", "said"),
    [
        ({"ack_policy": AckPolicy.NONE}, "auto-ack", "ack_policy=none"),
        ({"max_deliver": 5}, "delivery-limit", "max_deliver=5"),
        ({"ack_wait": 2.0}, "time-out-redelivery", "ack_wait=2 s"),
    ],
)
def test_consumers(
    app: App, stream: _Streams, consumer: dict[str, Any], code: str, said: str
) -> None:
    wanted: dict[str, Any] = {"ack_policy": AckPolicy.EXPLICIT, "ack_wait": 30.0, **consumer}
    stream.made(
        ConsumerConfig(durable_name=DURABLE, filter_subject=stream.topic, **wanted), max_age=DAY_S
    )
    found = consumed(app, stream.source(), stream.topic)
    assert set(found) == {code}
    assert said in found[code].problem


def test_a_stream_that_is_not_there_and_a_window_that_is_short(
    app: App, stream: _Streams, nats_url: str
) -> None:
    stream.made(max_age=DAY_S, duplicate_window=5.0)
    app.publish(Nats(nats_url), topics=[stream.topic])
    assert set(findings(app)) == {"duplicate-window"}
    assert set(consumed(app, Nats(nats_url, durable="d"), "nowhere.at.all")) == {
        "duplicate-window", "topic-missing",
    }  # fmt: skip


def test_a_broker_that_is_away_is_not_checked(app: App) -> None:
    found = consumed(app, Nats("nats://127.0.0.1:1", durable="d"), "orders")
    assert found == {}
    (unchecked,) = diagnosed(app).unchecked
    assert unchecked.what == "the settings of nats:d"
    assert "nats:d cannot be reached" in unchecked.why


# -- SQS --------------------------------------------------------------------------------------


class _Attributes:
    """A client that answers as Amazon does: ElasticMQ keeps no MessageRetentionPeriod."""

    def __init__(self, rig: SqsRig, **attributes: str) -> None:
        self._rig, self._attributes = rig, attributes

    def get_queue_url(self, **named: Any) -> Any:
        return self._rig.client.get_queue_url(**named)

    def get_queue_attributes(self, **named: Any) -> Any:
        found = self._rig.client.get_queue_attributes(**named)
        return {"Attributes": {**found["Attributes"], **self._attributes}}


@pytest.fixture
def queue(sqs_url: str) -> Iterator[SqsRig]:
    with SqsRig(sqs_url) as opened:
        yield opened


def test_a_clean_queue(app: App, queue: SqsRig) -> None:
    source = SQS(client=_Attributes(queue, MessageRetentionPeriod=str(4 * DAY_S)))
    assert consumed(app, source, queue.topic) == {}
    assert diagnosed(app).unchecked == []


def test_what_a_server_does_not_tell(app: App, queue: SqsRig, sqs_url: str) -> None:
    assert consumed(app, SQS(endpoint_url=sqs_url, **ACCESS), queue.topic) == {}
    told = diagnosed(app).unchecked
    assert [one.why for one in told] == ["the server does not report MessageRetentionPeriod."]


def test_a_queue_that_keeps_for_longer_than_the_inbox(sqlite_url: str, queue: SqsRig) -> None:
    with App(sqlite_url, retention=Retention(processed=timedelta(days=7))) as app:
        source = SQS(client=_Attributes(queue, MessageRetentionPeriod=str(14 * DAY_S)))
        found = consumed(app, source, queue.topic)
    assert "MessageRetentionPeriod=1209600" in found["retention-too-short"].problem


def test_a_queue_that_gives_up_and_delivers_again_too_soon(app: App, sqs_url: str) -> None:
    with SqsRig(sqs_url) as dead:
        arn = dead.client.get_queue_attributes(QueueUrl=dead.url, AttributeNames=["QueueArn"])
        policy = (
            f'{{"deadLetterTargetArn":"{arn["Attributes"]["QueueArn"]}","maxReceiveCount":"3"}}'
        )
        with SqsRig(sqs_url, visible_s=2, RedrivePolicy=policy) as queue:
            found = consumed(app, SQS(endpoint_url=sqs_url, **ACCESS), queue.topic)
    assert set(found) == {"delivery-limit", "time-out-redelivery"}
    assert "maxReceiveCount=3" in found["delivery-limit"].problem
    assert "VisibilityTimeout=2" in found["time-out-redelivery"].problem


def test_a_queue_that_is_not_there(app: App, sqs_url: str) -> None:
    found = consumed(app, SQS(endpoint_url=sqs_url, **ACCESS), "nowhere")
    assert set(found) == {"topic-missing"}


# -- Redis ------------------------------------------------------------------------------------


@pytest.fixture
def entries(redis_url: str) -> Iterator[RedisRig]:
    with RedisRig(redis_url) as opened:
        yield opened


def test_a_clean_stream_of_redis(app: App, entries: RedisRig) -> None:
    entries.client.xadd(entries.topic, {"payload": b"{}"})
    assert consumed(app, entries.source(), entries.topic) == {}
    assert diagnosed(app).unchecked == []


def test_a_stream_of_redis_that_nobody_trims(app: App, entries: RedisRig) -> None:
    old_ms = int((time.time() - 45 * DAY_S) * 1000)
    entries.client.xadd(entries.topic, {"payload": b"{}"}, id=f"{old_ms}-0")
    entries.client.xadd(entries.topic, {"payload": b"{}"})
    found = consumed(app, entries.source(), entries.topic)
    assert set(found) == {"retention-too-short"}
    assert f"XLEN 2, oldest entry {old_ms}-0" in found["retention-too-short"].problem


def test_ids_that_tell_no_age(app: App, entries: RedisRig) -> None:
    entries.client.xadd(entries.topic, {"payload": b"{}"}, id="7-1")
    assert consumed(app, entries.source(), entries.topic) == {}
    assert "come from the producer" in diagnosed(app).unchecked[0].why


def test_a_claim_that_outlasts_the_others_patience(sqlite_url: str, redis_url: str) -> None:
    with App(sqlite_url, limits=Limits(lock_timeout=timedelta(seconds=5))) as app:
        source = RedisStreams(redis_url, group="g", claim_idle=timedelta(seconds=4))
        found = consumed(app, source, f"orders-{secrets.token_hex(4)}")
    assert "claim_idle=4 s" in found["time-out-redelivery"].problem


# -- RabbitMQ ---------------------------------------------------------------------------------


def test_a_queue_of_rabbitmq_and_what_amqp_does_not_tell(app: App, rabbitmq_url: str) -> None:
    queue = declare(rabbitmq_url)
    assert consumed(app, RabbitMQ(rabbitmq_url), queue) == {}
    (unchecked,) = diagnosed(app).unchecked
    assert "rabbitmqctl list_queues" in unchecked.why


class _Managed(ThrowawayRabbitMQ):
    """A server with the plugin that has the HTTP API."""

    ports = ThrowawayRabbitMQ.ports + 1

    @property
    def http_port(self) -> int:
        return self.port + ThrowawayRabbitMQ.ports

    def initialise(self) -> None:
        super().initialise()
        with (self.directory / "rabbitmq.conf").open("a") as conf:
            conf.write(f"management.tcp.ip = 127.0.0.1\nmanagement.tcp.port = {self.http_port}\n")
        (self.directory / "plugins").write_text("[rabbitmq_management].\n")

    @property
    def management(self) -> str:
        return f"http://guest:guest@127.0.0.1:{self.http_port}"


@pytest.fixture
def managed() -> Iterator[_Managed]:
    yield from throwaway("rabbitmq", _Managed())


def test_how_queues_of_rabbitmq_are_set(sqlite_url: str, managed: _Managed) -> None:
    quorum = {"x-queue-type": "quorum"}
    made: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
        "clean": ({}, {}, ""),
        "lasting": (quorum, {}, ""),
        "passing": ({}, {"durable": False}, "not durable"),
        "own": ({}, {"auto_delete": True}, "auto_delete"),
        "forgetful": ({"x-message-ttl": 60_000}, {}, "x-message-ttl 60000"),
        "moved": (
            {"x-message-ttl": 60_000, "x-dead-letter-exchange": "late"}, {}, "to the exchange 'late'",
        ),
        "short": ({"x-max-length": 10}, {}, "x-max-length 10"),
        "strict": ({"x-max-length": 10, "x-overflow": "reject-publish"}, {}, ""),
        "unlimited": ({**quorum, "x-delivery-limit": -1}, {}, ""),
        "impatient": ({**quorum, "x-delivery-limit": 3}, {}, "x-delivery-limit 3"),
    }  # fmt: skip
    codes = {
        "passing": "not-durable", "own": "not-durable", "forgetful": "broker-drops", "moved": "broker-drops",
        "short": "broker-drops", "impatient": "delivery-limit",
    }  # fmt: skip
    server = managed
    with App(sqlite_url) as app:

        async def declared(channel: Any) -> None:
            for name, (arguments, options, _) in made.items():
                await channel.declare_queue(
                    name, **{"durable": True, "arguments": arguments, **options}
                )

        on_server(server.url, declared)
        for name in (*made, "away"):
            app.handler(name, consumer=f"of-{name}")(_nothing)
        app.consume(RabbitMQ(server.url, management=server.management), topics=[*made, "away"])
        found = [
            (finding.problem.partition("'")[2].partition("'")[0], finding.code, finding.problem)
            for finding in diagnosed(app).findings
        ]
        refused = RabbitMQ(server.url, management=server.management.replace("guest:guest", "a:b"))
        with pytest.raises(ConfigurationError, match="refuses this user"):
            refused.examine(["clean"])
    assert {name: code for name, code, _ in found} == {**codes, "away": "topic-missing"}
    for name, _, problem in found:
        assert made.get(name, ("", "", ""))[2] in problem


def test_queues_of_rabbitmq_that_are_not_there(app: App, rabbitmq_url: str) -> None:
    app.handler(declare(rabbitmq_url), consumer="billing")(_nothing)
    found = consumed(app, RabbitMQ(rabbitmq_url), f"nowhere-{secrets.token_hex(4)}")
    assert set(found) == {"topic-missing"}


def test_a_lease_that_is_longer_than_the_broker_waits(sqlite_url: str, rabbitmq_url: str) -> None:
    with App(sqlite_url) as app:
        source = RabbitMQ(rabbitmq_url, consumer_timeout=timedelta(minutes=2))
        found = consumed(app, source, declare(rabbitmq_url))
    assert "2m" in found["time-out-redelivery"].problem


# -- what an App asks of a source -------------------------------------------------------------


def test_a_topic_that_no_handler_consumes(app: App, kafka_bootstrap: str) -> None:
    app.handler("orders", consumer="billing")(_nothing)
    app.consume(Kafka(kafka_bootstrap, group="g"), topics=["invoices"])
    assert "'invoices'" in findings(app)["topic-unhandled"].problem


def test_an_order_that_a_source_does_not_keep(app: App, rabbitmq_url: str) -> None:
    found = consumed(app, RabbitMQ(rabbitmq_url), declare(rabbitmq_url), ordered=True)
    assert "order-not-kept" in found


def test_nothing_is_received_or_created(app: App, stream: _Streams) -> None:
    stream.made(max_age=DAY_S)
    consumed(app, stream.source(), stream.topic)

    async def consumers(js: Any) -> int:
        return int((await js.stream_info(stream.stream)).state.consumer_count)

    assert stream.do(consumers) == 0
